"""Steps go on without a process that is slow; it takes them, too, and all stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetplane import optim
from jetplane.parallel import Quorum
from many_processes import batch, convex, cuts, flat, losses

Results = list[dict[str, Any]]


def test_a_slow_process_is_left_out_and_the_weight_corrected(two: Results) -> None:
    (end, left_out, calls), (other_end, other_left_out, other_calls) = (found["absent"] for found in two)
    assert torch.equal(end, other_end) and left_out == other_left_out
    assert (
        left_out[2] == left_out[3] == [1] and [] in left_out[4:]
    )  # on a busy machine it may be late in other steps, too
    assert calls == list(range(8))
    skipped = set(range(8)) - set(other_calls)
    assert all(left_out[step] == [1] for step in skipped)
    # the same steps by one process, with the shards of those that were there
    model, (x, y) = convex(), batch()
    opt, loss = optim.FoMoHKD(model.parameters(), 0.3, 2, clip=1.0), losses(model, "mean")
    for absent in left_out:
        shards = [cut for rank, cut in enumerate(cuts(2)) if rank not in absent]
        opt.step([lambda a=a, b=b: loss(x[a:b], y[a:b]) for a, b in shards], weight=[b - a for a, b in shards])
    torch.testing.assert_close(flat(model), end, rtol=0, atol=1e-15)


def test_what_a_quorum_refuses(two: Results) -> None:
    first, second = (found["quorum_refusals"] for found in two)
    for found in (first, second):
        assert found["HorizonAdam"] == (
            "ValueError: process_group of HorizonAdam is a Quorum, and a step in a plane alone can leave a process "
            "out; expected a ProcessGroup."
        )
        assert found["least"] == ("ValueError: least is 3 in a Quorum of a group of 2 processes; expected at most all.")
        assert found["no group"] == "ValueError: least is 1 in a Quorum without a group; expected a ProcessGroup."
        assert found["acceptance"].startswith(
            "ValueError: process_group is a Quorum, and step 0 asks for its loss, at which others may come in time; "
        )
        assert found["nobody"].startswith("ValueError: the weights of all processes are zero at step 0;")
        assert found["drifted"].startswith(
            "ProcessesDiffer: process 1 differs from process 0 at step 2: the hash of the parameters after 2 steps is "
        )


def test_who_fails_or_does_not_come_is_named(two: Results) -> None:
    first, second = (found["quorum_refusals"] for found in two)
    assert first["solver"] == "ZeroDivisionError: a broken solver"
    assert second["solver"].startswith("LostProcess: process 0 raised an error at step 0;")
    assert first["raising"] == (
        "LostProcess: process 1 did not come within 1.0 s at step 0; expected 2 of 2 processes."
    )
    assert second["raising"] == "KeyError: 'a broken disk'"
    assert second["leader gone"].startswith(
        "LostProcess: process 0 is gone, or did not answer within 1.0 s, at step 1 ("
    )
    assert second["behind"].startswith("LostProcess: this process (1) is more than 1000 exchanges behind at step 1;")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least": 0, "wait": 1.0}, "least is 0; expected a whole number of processes from 1."),
        ({"least": 1, "wait": 0.0}, "wait is 0.0; expected a positive number of seconds."),
        ({"least": 1, "wait": 1.0, "lost": "long"}, "lost is 'long'; expected a positive number of seconds."),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quorum(None, **options)
