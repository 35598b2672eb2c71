"""Many together or one alone, whoever they are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from jetplane_lab.finetuning.turns_on_device import Courteous, Turns


def started(target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_two_are_together_and_one_alone_waits_for_both(tmp_path: Path) -> None:
    one, two, three = (Turns(tmp_path) for _ in range(3))
    seen: list[str] = []

    def alone() -> None:
        with three.alone():
            seen.append("alone")

    with one.together():
        with two.together():
            waiting = started(alone)
            while not one.waited_for():
                pass
        assert seen == []
    waiting.join(10)
    assert seen == ["alone"] and not one.waited_for()


def test_who_comes_after_the_one_that_waits_comes_in_after_it(tmp_path: Path) -> None:
    turns, seen = Turns(tmp_path), list[str]()

    def alone() -> None:
        with Turns(tmp_path).alone():
            seen.append("alone")

    def late() -> None:
        with Turns(tmp_path).together():
            seen.append("late")

    with turns.together():
        first = started(alone)
        while not turns.waited_for():
            pass
        second = started(late)
        second.join(0.1)
        assert seen == []
    first.join(10)
    second.join(10)
    assert seen == ["alone", "late"]


def test_runs_make_room_between_their_batches(tmp_path: Path) -> None:
    courteous, seen = Courteous(Turns(tmp_path)), list[str]()

    def alone() -> None:
        with Turns(tmp_path).alone():
            seen.append("alone")

    courteous.begin(None)
    courteous.begin(None)  # a second run of the same process
    courteous.batch(None, 1, 2)
    thread = started(alone)
    while not Turns(tmp_path).waited_for():
        pass
    assert seen == []
    courteous.batch(None, 2, 2)
    assert seen == ["alone"]
    thread.join(10)
    courteous.end(None, None)
    courteous.end(None, None)
    with Turns(tmp_path).alone():
        pass
