"""Texts become pieces of one length."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

import tiny_texts
from jetplane_lab.data.errors import DataError
from jetplane_lab.finetuning import contest
from jetplane_lab.finetuning.reviews import Review
from jetplane_lab.finetuning.tokens import Texts, encode

VOCABULARY = json.dumps(tiny_texts.VOCABULARY).encode()


def test_pieces_marks_and_what_fills_up() -> None:
    pytest.importorskip("tokenizers")
    found = encode(VOCABULARY, [Review("a good film", True), Review("not a very very bad one", False)], 6)
    assert found.pieces.tolist() == [[2, 8, 4, 6, 3, 0], [2, 9, 8, 7, 7, 3]]
    assert found.good.tolist() == [1, 0] and len(found) == 2
    assert found.pieces.dtype == found.good.dtype == torch.int64
    assert encode(VOCABULARY, [], 6).pieces.shape == (0, 6)


def test_texts_move_together() -> None:
    there = Texts(torch.ones(2, 3), torch.ones(2)).to("meta")
    assert there.pieces.device.type == there.good.device.type == "meta"


def test_without_the_package_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "pretrained", pytest.fail)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"texts need the package tokenizers; expected it to be there, by: pip install"):
        contest.load(tiny_texts.SETTINGS)
