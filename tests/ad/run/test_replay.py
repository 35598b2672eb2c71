"""Running a program more than once as if it had run once."""

from __future__ import annotations

import torch

from jetplane.ad.run.replay import Replay


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
