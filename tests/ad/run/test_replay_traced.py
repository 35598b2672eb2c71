"""Several runs of a program in one traced function: the same random numbers, and buffers as after one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from jetplane.ad.run.replay_traced import ReplayTraced
from jetplane.errors import CaptureFailed


def twice(program: Callable[[Tensor], Tensor], *written: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def runs(x: Tensor) -> tuple[Tensor, Tensor]:
        replay = ReplayTraced(written)
        return replay.run(lambda: program(x)), replay.run(lambda: program(2 * x))

    return runs


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "native_dropout in evaluation": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "native_dropout of everything": lambda x: torch.native_dropout(x, 1.0, True)[0],
    "noise like it": lambda x: x * torch.rand_like(x),
    "noise in its place": lambda x: x * torch.empty_like(x).normal_(),
    "chances": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_later_runs_see_what_the_first_one_drew(name: str) -> None:
    x = torch.rand(50, dtype=torch.float64) + 1
    runs = twice(PROGRAMS[name])
    graph = make_fx(runs, tracing_mode="fake")(x)
    seen = []
    for run in (runs, graph, graph):
        one, other = run(x)
        torch.testing.assert_close(other, 2 * one)
        seen.append(one)
    drawn = name not in ("native_dropout in evaluation", "native_dropout of everything")
    assert torch.equal(seen[1], seen[2]) != drawn  # each call of the graph draws anew


def test_memory_is_as_after_one_run() -> None:
    buffer = torch.zeros(3)

    def program(x: Tensor) -> Tensor:
        buffer.add_(x)
        return buffer * 1

    replay, x = ReplayTraced([buffer]), torch.ones(3)
    assert replay.wrote and [replay.run(lambda: program(x)).tolist() for _ in range(3)] == [[1.0] * 3] * 3
    assert buffer.tolist() == [1.0] * 3
    replay.rewind()
    assert buffer.tolist() == [0.0] * 3


def test_what_is_no_part_of_the_program_draws_for_itself() -> None:
    replay, x, seen = ReplayTraced([]), torch.ones(20), []

    def program() -> Tensor:
        with replay.unwatched():
            seen.append(torch.rand(20))
        return torch.rand_like(x)

    assert torch.equal(replay.run(program), replay.run(program)) and not torch.equal(*seen)


def test_a_program_that_draws_others_is_refused() -> None:
    replay, x, draws = ReplayTraced([]), torch.ones(4), [torch.rand_like, torch.randn_like, torch.exp]
    replay.run(lambda: draws[0](x))
    message = "it drew other random numbers when it was run again, by aten.randn_like.default"
    with pytest.raises(CaptureFailed, match=f"^{re.escape(message)}$"):
        replay.run(lambda: draws[1](x))
    replay = ReplayTraced([])
    replay.run(lambda: draws[0](x))
    with pytest.raises(CaptureFailed, match=r"^it drew other random numbers when it was run again$"):
        replay.run(lambda: draws[2](x))


def test_numbers_that_cannot_be_handed_on_are_refused() -> None:
    message = "draws random numbers, and what it draws cannot be given to a second pass"
    with pytest.raises(CaptureFailed, match=message):
        ReplayTraced([]).run(lambda: F.rrelu(torch.ones(3), training=True))


def test_what_comes_next_waits_only_where_it_is_asked_to() -> None:
    replay, value = ReplayTraced([]), torch.arange(6.0).reshape(2, 3)
    before = value.clone()
    replay.then(torch.ones(2, 2))
    assert replay.after is None
    replay.hold_back(value)
    assert value._version == 0

    replay.in_turn = True
    replay.then(torch.zeros(0))
    assert replay.after is None
    for made in (torch.full((2, 2), torch.nan), torch.tensor(3.0)):
        replay.then(made)
        assert replay.after is not None and replay.after.ndim == 0
        replay.hold_back(value)
        assert torch.equal(value, before)
    repeated = torch.ones(1, 3).expand(2, 3)
    replay.hold_back(repeated)  # one number at several places cannot be written
    assert repeated._version == 0


def test_a_value_that_waits_depends_on_what_was_made() -> None:
    def runs(x: Tensor, y: Tensor) -> Tensor:
        replay = ReplayTraced([])
        replay.in_turn = True
        replay.then(y.exp())
        value = x + 1
        replay.hold_back(value)
        return value

    traced = make_fx(runs, tracing_mode="fake")(torch.ones(3), torch.ones(2))
    assert any(node.target is torch.ops.aten.exp.default and node.users for node in traced.graph.nodes)
    assert torch.equal(traced(torch.ones(3), torch.ones(2)), torch.full((3,), 2.0))
