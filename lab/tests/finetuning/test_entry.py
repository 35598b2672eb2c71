"""An entry names its run, and says how the model begins."""

from __future__ import annotations

import dataclasses

import torch

import tiny_texts
from jetplane_lab.finetuning.entry import Entry, build, losses_of

ENTRY = Entry("adamw", "lora", 3e-4, 2, False, tiny_texts.SETTINGS)


def test_names_tell_entries_apart() -> None:
    assert ENTRY.name == "lora-adamw-0.0003-seed-2-choice"
    assert dataclasses.replace(ENTRY, tested=True).name == "lora-adamw-0.0003-seed-2"


def test_the_first_layers_and_adapters() -> None:
    data = tiny_texts.data()
    fewer = dataclasses.replace(ENTRY, settings=dataclasses.replace(tiny_texts.SETTINGS, layers=1))
    assert len(build(fewer, data).encoder.layers) == 1 and len(build(ENTRY, data).encoder.layers) == 2
    moving = [sum(p.numel() for p in build(one, data).parameters() if p.requires_grad) for one in (fewer, ENTRY)]
    assert moving == [2 * 2 * 16 + 18, 2 * 2 * 2 * 16 + 18]  # two adapters a layer of rank 2 and width 8, and the head
    one, same = build(ENTRY, data), build(ENTRY, data)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))


def test_losses_of_samples_and_their_mean() -> None:
    data = tiny_texts.data()
    model = build(ENTRY, data).eval()
    index = torch.tensor([3, 1, 4])
    each, mean = losses_of(model, data.train, False)(index), losses_of(model, data.train, True)(index)
    logits = model(data.train.pieces[index]).log_softmax(1)
    expected = -logits[torch.arange(3), data.train.good[index]]
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(mean, expected.mean())
