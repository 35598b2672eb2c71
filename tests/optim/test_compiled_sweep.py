"""Compiled passes in a process group, where what follows them is the uncompiled step's."""

from __future__ import annotations

from typing import Any

import torch

Results = list[dict[str, Any]]


def test_compiled_passes_in_a_group_are_the_uncompiled_ones(two: Results) -> None:
    (plain, aux, no, *rest), other = two[0]["compiled"], two[1]["compiled"]
    fast, fast_aux, yes = rest
    assert (no, yes) == (False, True)
    assert torch.equal(fast, other[3]) and torch.equal(plain, other[0])  # the same bits in both processes
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-12)
    assert torch.equal(aux, fast_aux) and not torch.equal(aux, other[1])
