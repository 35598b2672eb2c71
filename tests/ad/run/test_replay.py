"""Running a program more than once as if it had run once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jetplane.ad.algebra.jet import PairSet
from jetplane.ad.run.directions import Given, Leaf
from jetplane.ad.run.passes import Pass
from jetplane.ad.run.replay import Replay, _Writes


def test_each_run_sees_the_random_numbers_and_the_memory_of_the_first() -> None:
    buffer, replay = torch.zeros(3), Replay()

    def program() -> list[float]:
        buffer.add_(torch.rand(3))
        return buffer.tolist()

    first = replay.run(program)
    after = torch.get_rng_state()
    torch.rand(5)  # what happens in between does not matter
    buffer.fill_(7.0)
    assert replay.run(program) == first and replay.wrote
    assert buffer.tolist() == first and torch.equal(torch.get_rng_state(), after)


def test_trials_leave_no_trace() -> None:
    buffer, other, replay = torch.zeros(2), torch.zeros(2), Replay()
    replay.run(lambda: buffer.add_(torch.rand(2)))
    replay.keep()
    kept, state = buffer.clone(), torch.get_rng_state()
    replay.run(lambda: (buffer.add_(torch.rand(2)).mul_(3), other.fill_(1.0), torch.rand(9)))
    assert not torch.equal(buffer, kept) and other.any()
    replay.settle()
    assert torch.equal(buffer, kept) and not other.any() and torch.equal(torch.get_rng_state(), state)


def test_every_source_of_random_numbers_is_put_back() -> None:
    own, replay = torch.Generator().manual_seed(3), Replay()
    sources = (
        random.random,
        np.random.rand,
        lambda: torch.rand(()).item(),
        lambda: torch.rand((), generator=own).item(),
    )
    before = [source() for source in sources]
    first = replay.run(lambda: [source() for source in sources])
    assert replay.run(lambda: [source() for source in sources]) == first != before
    replay.keep()
    after = replay.run(lambda: [source() for _ in range(2) for source in sources])[len(sources) :]
    replay.settle()
    assert [source() for source in sources] == after


def test_buffers_that_a_program_assigns_are_put_back() -> None:
    norm, replay = nn.BatchNorm1d(2), Replay()

    def program() -> list[float]:
        if not hasattr(norm, "seen"):
            norm.register_buffer("seen", torch.zeros(()))
        norm.running_mean = norm.running_mean + 1
        norm.seen = norm.seen + 1
        return [*norm.running_mean.tolist(), norm.seen.item()]

    assert replay.run(program) == replay.run(program) == [1.0, 1.0, 1.0] and replay.wrote
    replay.keep()
    replay.run(lambda: (program(), program()))
    replay.settle()
    assert norm.running_mean.tolist() == [1.0, 1.0] and norm.seen == 1
    replay.rewind()
    assert not hasattr(norm, "seen") and not norm.running_mean.any()


def test_memory_of_the_program_itself_is_not_saved() -> None:
    replay = Replay()
    replay.run(lambda: torch.zeros(3).add_(1))
    assert not replay.wrote
    outside = torch.zeros(3)
    with replay.unwatched():
        replay.run(lambda: outside.add_(1))
    assert not replay.wrote
    replay.run(lambda: outside[1:].add_(1))  # a view of it, too
    assert replay.wrote


def test_under_a_mode_the_program_is_watched_and_what_the_mode_does_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, weight, replay = torch.zeros(3), torch.ones(3, requires_grad=True), Replay()
    one = Pass.of(PairSet.of("all", 2), False)
    one.perturb(Leaf(weight, 0, Given([torch.ones(2, 3)]), (0, 1)), "weight")
    operations: list[Any] = []
    looked = _Writes.__torch_dispatch__

    def look(self: _Writes, func: Any, *rest: Any) -> Any:
        operations.append(func)
        return looked(self, func, *rest)

    monkeypatch.setattr(_Writes, "__torch_dispatch__", look)

    def program() -> Tensor:
        with torch.no_grad(), one.running():
            buffer.add_(1)
            return (weight.exp() * buffer).sum()

    assert torch.equal(replay.run(program, one.mode), replay.run(program, one.mode))
    aten = torch.ops.aten
    assert operations == 2 * [aten.add_.Tensor, aten.exp.default, aten.mul.Tensor, aten.sum.default]
    replay.rewind()
    assert replay.wrote_to(buffer) and not buffer.any()


def test_what_the_functions_of_an_operator_of_higher_order_write_is_seen() -> None:
    buffer, weight, replay = torch.zeros(3), torch.ones(3, requires_grad=True), Replay()
    one = Pass.of(PairSet.of("all", 1), False)
    one.perturb(Leaf(weight, 0, Given([torch.ones(1, 3)]), (0,)), "weight")

    def counting(x: Tensor) -> Tensor:
        buffer.add_(1)
        return 2 * x

    def program() -> Tensor:
        with torch.no_grad(), one.running():
            return torch.cond(torch.tensor(True), counting, counting, (weight,))

    replay.run(program, one.mode)
    assert replay.wrote_to(buffer) and buffer.tolist() == [1, 1, 1]
