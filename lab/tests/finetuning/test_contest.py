"""Rates are chosen by the validation split, runs are not made twice, and one that fails does not end the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_texts
from jetplane_lab.finetuning import contest
from jetplane_lab.finetuning.contest import Contest
from jetplane_lab.finetuning.contestants import CONTESTANTS
from jetplane_lab.finetuning.entry import Entry, Settings
from jetplane_lab.finetuning.turns_on_device import Turns

DATA = tiny_texts.data()


def held(folder: Path, said: list[str] | None = None, debug: bool = False) -> Contest:
    say = (said if said is not None else []).append
    return Contest(tiny_texts.SETTINGS, DATA, folder, say, Turns(folder), debug)


def pretend(monkeypatch: pytest.MonkeyPatch, answers: dict[float, tuple[float, float | None]]) -> list[Entry]:
    """Runs that are not made: each rate's validation accuracy and loss; the entries that were asked for."""
    asked: list[Entry] = []

    def run(entry: Entry, data: Any, budget: float, *rest: Any) -> dict[str, Any]:
        asked.append(entry)
        accuracy, loss = answers[entry.rate]
        return {"entry": dataclasses.asdict(entry), "validation": accuracy, "validation_loss": loss}

    monkeypatch.setattr(contest, "run", run)
    return asked


@pytest.mark.parametrize(
    ("answers", "best"),
    [
        ([(0.6, 0.5), (0.8, 0.7), (0.7, 0.1), (0.5, 0.9)], 1),  # accuracy counts
        ([(0.8, 0.5), (0.8, 0.4), (0.8, 0.6), (0.5, 0.1)], 1),  # among equals the loss
        ([(0.8, None), (0.8, 0.9), (0.5, None), (0.5, 0.1)], 1),  # one that is not finite is the largest
        ([(0.5, 0.5), (0.6, 0.5), (0.7, 0.5), (0.8, 0.5)], 3),  # a larger one may be better still
    ],
)
def test_the_best_rate_is_chosen_and_trained_with_for_each_seed(
    answers: Sequence[tuple[float, float | None]], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = CONTESTANTS["adamw"].rates["all"]
    asked, said = pretend(monkeypatch, dict(zip(rates, answers, strict=True))), list[str]()
    found = held(tmp_path, said).hold(["adamw"], ["all"], [4, 5])
    end = ", at the end of those that were tried" if best in (0, 3) else ""
    assert said[0].startswith(f"all-adamw: {rates[best]:g} is the best rate{end} (1e-05: ")
    assert [(one.rate, one.seed, one.tested) for one in asked] == [
        *((rate, 4, False) for rate in rates),
        *((rates[best], seed, True) for seed in (4, 5)),
    ]
    assert len(found) == 2


def test_a_single_rate_is_no_choice_and_checkpoints_take_over_that_of_backprop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = CONTESTANTS["adamw"].rates["lora"]
    asked = pretend(monkeypatch, {1.0: (0.5, 0.5)} | {rate: (rate, 0.5) for rate in rates})
    held(tmp_path).hold(["horizon", "adamw-checkpointed"], ["lora"], [0])
    assert asked[0].method == "horizon" and asked[0].tested
    assert {one.method for one in asked[1:-1]} == {"adamw"}
    assert (asked[-1].method, asked[-1].rate) == ("adamw-checkpointed", max(rates))


def test_a_method_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, {1.0: (0.5, 0.5)})  # of no other rate
    said: list[str] = []
    one = held(tmp_path, said)
    assert len(one.hold(["adamw", "horizon"], ["all"], [0])) == 1 and asked[-1].method == "horizon"
    assert one.failures == said == ["all-adamw failed: 1e-05"]
    with pytest.raises(KeyError):
        held(tmp_path, debug=True).hold(["adamw"], ["all"], [0])


def test_names_are_checked_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method is 'mezzo'; did you mean mezo\? expected one of horizon"):
        held(tmp_path).hold(["adamw", "mezzo"], ["all"], [0])
    with pytest.raises(ValueError, match=r"moving is 'none'; .*expected one of all, lora"):
        held(tmp_path).hold(["adamw"], ["none"], [0])


def test_zeroth_order_has_the_passes_of_horizons_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "passes_of", lambda entry, data: 7.5 if entry.method == "horizon" else 2.0)
    assert held(tmp_path).budget("all") == 7.5 * 4  # steps of an epoch of 32 texts
    said: list[str] = []
    (record,) = (one for one in held(tmp_path, said).hold(["mezo"], ["lora"], [0]) if one["entry"]["tested"])
    assert record["steps"] == 15 and record["passes"] == 30.0
    assert said.count("lora-mezo: counting the passes of a step") == 1, "for three rates"
    assert sorted(path.name for path in tmp_path.glob("*-choice.json")) == [
        f"lora-mezo-{rate}-seed-0-choice.json" for rate in ("0.0001", "0.001", "1e-05")
    ]


def test_a_quick_look_is_small_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = contest.quick(Settings(device="cpu", rank=3))
    assert few.layers == 1 and few.texts == 96 and few.rank == 3
    pytest.importorskip("tokenizers")
    folder = tiny_texts.place(tmp_path, monkeypatch)
    data = contest.load(dataclasses.replace(few, texts=5, batch=5, length=6), folder)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [5, 5, 5]
    assert data.train.pieces.shape == (5, 6) and data.start.shape == tiny_texts.SHAPE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs is 0; expected a whole number from 1 to inf"),
        ({"length": 2}, "length is 2; expected a whole number from 3 to 12"),
        ({"length": 13}, "length is 13; expected a whole number from 3 to 12"),
        ({"batch": 6}, "batch is 6; expected a whole number from 1 to 5"),
        ({"layers": 3}, "layers is 3; expected a whole number from 1 to 2"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(
    settings: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "require_tokenizers", lambda: None)
    folder = tiny_texts.place(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=message):
        contest.load(dataclasses.replace(Settings(length=6, batch=5, texts=5), **settings), folder)
