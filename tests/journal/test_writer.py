"""A run with a journal can be left at any moment, and gone on with: it is the run that was never left."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jetplane.directions import Gaussian
from jetplane.errors import JournalRefused, OptimizationStalled
from jetplane.journal import Journal, holds_journal, opened, replay, snapshots, verify
from jetplane.journal.reader import FILE
from jetplane.optim import FGD
from journaled import Run, recorded, same

# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, commit_every", [("groups", 1), ("cubic", 1), ("gauss-newton", 1), ("best", 4), ("grown", 4), ("fgd", 4)]
)
def test_a_run_that_was_left_goes_on_as_if_it_never_was(method: str, commit_every: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"commit_every": commit_every, "snapshot_every": 5, "digest_every": 3}
    states = recorded(tmp_path / "whole", method, 20, **options)
    first = Run(method)
    journal = first.journal(tmp_path / "parts", **options)
    for number in range(11):
        journal.place = {"batch": number}
        first.step()
    journal._lock.close()  # as a kill leaves it: what is not committed is lost
    second = Run(method)
    second.model[0].weight.data.zero_()  # whatever was there
    with second.resumed(tmp_path / "parts", **options) as journal:
        left = 11 if commit_every == 1 else 10  # the snapshot after step 10 was a commit, too
        assert journal.step == left and journal.place == {"batch": left - 1}
        assert same(second.state, states[left])
        for number in range(left, 20):
            journal.place = {"batch": number}
            second.step()
    assert same(second.state, states[20])
    bodies = [[frame.body for frame in opened(tmp_path / name).frames.records] for name in ("whole", "parts")]
    assert bodies[0] == bodies[1]
    assert verify(tmp_path / "parts") == (20, 6, 2)


def test_the_state_of_the_optimizer_goes_on(tmp_path: Path) -> None:
    whole, parts = Run("gauss-newton"), Run("gauss-newton")
    with whole.journal(tmp_path, snapshot_every=4):
        whole.states(6)
    with parts.resumed(tmp_path):
        ours, theirs = parts.optimizer.state_dict(), whole.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, kept in ours["state"].items():
        assert same(kept, theirs["state"][number])


def test_going_on_from_an_earlier_step_drops_the_records_behind(tmp_path: Path) -> None:
    states = recorded(tmp_path, steps=12, snapshot_every=5)
    run = Run("fomoh-kd")
    with run.resumed(tmp_path, step=7, snapshot_every=5) as journal:
        assert journal.step == 7 and same(run.state, states[7])
        assert opened(tmp_path).last == 7 and snapshots.steps_of(tmp_path) == [0, 5]
        run.states(5)
    assert same(run.state, states[12]) and opened(tmp_path).last == 12
    with pytest.raises(JournalRefused, match=r"step is 13, and the journal in .* goes from 0 to 12"):
        Run("fomoh-kd").resumed(tmp_path, step=13)


def test_an_optimizer_may_have_taken_steps_before(tmp_path: Path) -> None:
    run = Run("previous")
    run.states(3)
    with run.journal(tmp_path):
        states = run.states(4)
    assert opened(tmp_path).first == 3
    assert [same(replay(tmp_path, 3 + number), state) for number, state in enumerate(states)] == [True] * 5


def test_a_learning_rate_in_a_tensor_is_written_to(tmp_path: Path) -> None:
    def make() -> tuple[nn.Linear, FGD]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return model, FGD(model.parameters(), lr=torch.tensor(0.1))

    model, opt = make()
    with Journal(tmp_path, opt):
        opt.param_groups[0]["lr"].fill_(0.025)
        opt.step(lambda: model(torch.ones(2)).square().sum())
    _, opt = make()
    lr = opt.param_groups[0]["lr"]
    Journal.resume(tmp_path, opt).close()
    assert opt.param_groups[0]["lr"] is lr and lr == 0.025


def test_a_torn_tail_is_cut_off_where_the_run_goes_on(tmp_path: Path) -> None:
    states = recorded(tmp_path, steps=6)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-3])
    assert opened(tmp_path).frames.torn > 0
    run = Run("fomoh-kd")
    with run.resumed(tmp_path) as journal:
        assert journal.step == 5 and opened(tmp_path).frames.torn == 0
        run.step()
    assert same(run.state, states[6])


def test_a_run_that_stalled_counts_anew(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    opt = FGD(model.parameters(), patience=2)
    with Journal(tmp_path, opt), pytest.raises(OptimizationStalled):
        for _ in range(2):
            opt.step(lambda: model(torch.full((2,), float("nan"))).sum())
    again = FGD(model.parameters(), patience=2)
    Journal.resume(tmp_path, again).close()
    assert [group["bad"] for group in (*opt.param_groups, *again.param_groups)] == [0, 0]
    assert again.param_groups[0]["step"] == 2


def test_first_and_newest_snapshots_stay(tmp_path: Path) -> None:
    recorded(tmp_path / "two", steps=12, snapshot_every=2)
    assert snapshots.steps_of(tmp_path / "two") == [0, 10, 12]
    recorded(tmp_path / "all", steps=12, snapshot_every=4, keep=None)
    assert snapshots.steps_of(tmp_path / "all") == [0, 4, 8, 12]
    recorded(tmp_path / "one", steps=12, snapshot_every=4, keep=1)
    assert snapshots.steps_of(tmp_path / "one") == [0, 12]


def test_a_journal_changes_nothing(tmp_path: Path) -> None:
    plain, kept = Run("gauss-newton"), Run("gauss-newton")
    states = plain.states(6)
    with kept.journal(tmp_path):
        assert all(same(one, other) for one, other in zip(kept.states(6), states, strict=True))


# -- kill -9 ----------------------------------------------------------------------------------------------------------

STEPS = 40
SETTINGS: list[dict[str, Any]] = [
    {"commit_every": 1, "snapshot_every": 7, "digest_every": 3},
    {"commit_every": 6, "snapshot_every": 10, "digest_every": 5},
]


def train(folder: Path, method: str, options: dict[str, Any]) -> None:
    """What a process does: begin, or go on, and train to the end."""
    run = Run(method)
    with (run.resumed if holds_journal(folder) else run.journal)(folder, **options) as journal:
        assert journal.place == (None if journal.step == 0 else [journal.step - 1])
        while journal.step < STEPS:
            journal.place = [journal.step]
            run.step()


def killed(folder: Path, method: str, options: dict[str, Any], seconds: float) -> bool:
    """Train in a process of its own, and kill it after a while. Whether it was killed before its end."""
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)
            train(folder, method, options)
            status = 0
        finally:
            os._exit(status)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def survives(folder: Path, method: str, options: dict[str, Any], kills: int, chance: random.Random) -> int:
    """Kill a run until it has had enough, and let it end; how many kills there were."""
    states = recorded(folder / "whole", method, STEPS, **options)
    count = 0
    while count < kills and killed(folder / "killed", method, options, chance.uniform(0.0, 0.1)):
        count += 1
    train(folder / "killed", method, options)
    assert same(replay(folder / "killed"), states[-1])
    assert opened(folder / "killed").last == STEPS  # none lost, none taken twice
    verify(folder / "killed")
    assert not list((folder / "killed").glob(".*"))
    return count


def test_kills_at_random_moments(tmp_path: Path) -> None:
    assert survives(tmp_path, "fomoh-kd", SETTINGS[1], 2, random.Random(0)) > 0


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    chance, count, number = random.Random(1), 0, 0
    while count < 50:
        method = ("fomoh-kd", "gauss-newton", "fgd", "grown")[number % 4]
        count += survives(tmp_path / str(number), method, SETTINGS[number % 2], 8, chance)
        number += 1


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_one_already(tmp_path: Path) -> None:
    recorded(tmp_path, steps=2)
    with pytest.raises(JournalRefused, match=r"holds a journal already; expected another folder, or Journal.resume to"):
        Run("fomoh-kd").journal(tmp_path)


def test_a_folder_that_holds_none(tmp_path: Path) -> None:
    with pytest.raises(JournalRefused, match=r"holds no journal; expected Journal\(path, optimizer\) to begin one"):
        Run("fomoh-kd").resumed(tmp_path)


@pytest.mark.parametrize("method", ["fomoh", "gauss-newton", "groups"])
def test_another_run_is_refused_and_nothing_is_touched(method: str, tmp_path: Path) -> None:
    recorded(tmp_path, steps=2)
    run, before = Run(method), (tmp_path / FILE).read_bytes()
    state = run.state
    with pytest.raises(JournalRefused, match=r"is that of another run: .* there and .* here"):
        run.resumed(tmp_path)
    assert same(run.state, state) and (tmp_path / FILE).read_bytes() == before
    run.step()  # nobody watches


def test_two_journals_of_one_optimizer_and_two_writers_of_one_folder(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path / "a"):
        with pytest.raises(JournalRefused, match="the optimizer has a journal already; expected one for each"):
            run.journal(tmp_path / "b")
        with pytest.raises(JournalRefused, match="is being written already; expected one writer at a time"):
            Run("fomoh-kd").resumed(tmp_path / "a")
    Run("fomoh-kd").resumed(tmp_path / "a").close()


def test_steps_after_the_journal_was_closed_are_not_its_own(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    journal = run.journal(tmp_path)
    run.step()
    journal.close()
    run.step()
    assert opened(tmp_path).last == 1
    with pytest.raises(
        JournalRefused, match=r"the journal in .* is closed; expected Journal.resume, or no journal, for"
    ):
        journal.before(run.optimizer._numbers)


def test_steps_that_are_not_one_after_the_other(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path):
        run.step()
        for group in run.optimizer.param_groups:
            group["step"] = 5
        state = run.state
        message = (
            "has seed 0 and step 5, and the journal in .* goes on with seed 0 and step 1; expected steps one after"
        )
        with pytest.raises(JournalRefused, match=message):
            run.step()
        assert same(run.state, state)


def test_parameters_that_came_later(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path):
        run.optimizer.add_param_group({"params": [torch.zeros(2, dtype=torch.float64, requires_grad=True)]})
        run.rates.append(0.1)
        with pytest.raises(JournalRefused, match="the optimizer has 7 parameters and had 6 when its journal began"):
            run.step()


def test_a_step_that_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = recorded(tmp_path / "whole", steps=5)
    run = Run("fomoh-kd")
    journal = run.journal(tmp_path / "broken")
    run.states(2)
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step(lambda: 1 / 0)  # which moved nothing
    run.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal, "after", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    with pytest.raises(
        JournalRefused, match="step 3 was broken off when it may have moved the parameters; expected Jou"
    ):
        run.step()
    journal.close()
    again = Run("fomoh-kd")
    with again.resumed(tmp_path / "broken") as journal:
        again.step()
        with monkeypatch.context() as patch:
            patch.setattr("jetplane.journal.writer.enframed", interrupt)
            with pytest.raises(KeyboardInterrupt):
                again.step()
        with pytest.raises(
            JournalRefused, match=r"step 4 was broken off while it was written down; expected Journal.res"
        ):
            again.step()
    last = Run("fomoh-kd")
    with last.resumed(tmp_path / "broken"):
        last.step()
    assert same(last.state, states[5])


def test_parts_that_were_changed(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path):
        run.optimizer.solver = copy.copy(run.optimizer.solver)  # an equal one
        run.step()
        for name, value in (("directions", Gaussian(4)), ("samples", 2), ("maximize", True), ("clip", 3.0)):
            before = getattr(run.optimizer, name)
            setattr(run.optimizer, name, value)
            with pytest.raises(JournalRefused, match=f"is that of another run: {name} is .* there and .* here"):
                run.step()
            setattr(run.optimizer, name, before)
        run.step()
    assert same(replay(tmp_path), run.state)


def test_an_optimizer_that_is_compiled_later(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path):
        run.optimizer.compile = True
        with pytest.raises(JournalRefused, match="is that of another run: compile is False there and True here"):
            run.step()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = recorded(tmp_path / "whole", steps=8)
    run = Run("fomoh-kd")
    journal = run.journal(tmp_path / "full", commit_every=2)
    run.states(4)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jetplane.journal.writer.os.fsync", fail)
        run.step()
        with pytest.raises(OSError, match="No space left"):
            run.step()
    message = "steps.journal could not be written after step 6 .* expected Journal.resume, or no journal, for further"
    with pytest.raises(JournalRefused, match=message):
        run.step()
    journal.close()
    again = Run("fomoh-kd")
    with again.resumed(tmp_path / "full") as journal:
        assert journal.step == 4
        again.states(4)
    assert same(again.state, states[8])


@pytest.mark.parametrize("place", [{1: 2}, (1, 2), {"a": {2}}, torch.ones(1)])
def test_places_that_are_no_plain_values(place: Any, tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path) as journal, pytest.raises(TypeError, match=r"the place is .*JSON"):
        journal.place = place


@pytest.mark.parametrize("name", ["snapshot_every", "commit_every", "digest_every", "keep"])
def test_options_are_whole_numbers(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; expected a whole number from 1"):
        Run("fomoh-kd").journal(tmp_path, **{name: 0})


def test_a_copy_of_the_optimizer_has_no_journal(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path):
        model, opt = copy.deepcopy((run.model, run.optimizer))
        opt.step(lambda: model(torch.ones(8, 2, dtype=torch.float64)).sum())
    assert opened(tmp_path).last == 0
