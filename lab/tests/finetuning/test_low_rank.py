"""Adapters change nothing at first, and are all that moves."""

from __future__ import annotations

import torch
from torch import nn

import tiny_texts
from jetplane_lab.finetuning.encoder import classifier
from jetplane_lab.finetuning.low_rank import LowRank, add_adapters


def test_the_formula() -> None:
    base, x = nn.Linear(4, 3), torch.randn(5, 4)
    layer = LowRank(base, 2, 6.0)
    with torch.no_grad():
        layer.up.weight.normal_()
    expected = x @ (base.weight + 3.0 * layer.up.weight @ layer.down.weight).T + base.bias
    torch.testing.assert_close(layer(x), expected)


def test_adapters_change_nothing_at_first_and_are_all_that_moves() -> None:
    pieces = tiny_texts.texts(4, 0).pieces
    plain = classifier(tiny_texts.pretrained(), 2, 0).eval()
    model, again = (classifier(tiny_texts.pretrained(), 2, 0).eval() for _ in range(2))
    state = torch.get_rng_state()
    add_adapters(model, 2, 4.0, 0)
    add_adapters(again, 2, 4.0, 0)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator was drawn from"
    assert torch.equal(model(pieces), plain(pieces))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = [f"encoder.encoder.layer.{n}.attention.self.{which}" for n in (0, 1) for which in ("query", "value")]
    expected = {f"{layer}.{part}.weight" for layer in layers for part in ("down", "up")}
    assert names == expected | {"head.weight", "head.bias"}
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
