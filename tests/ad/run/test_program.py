"""The two ways to hand over a program."""

from __future__ import annotations

import pytest
import torch

from jetplane.ad.run.program import as_closure


def test_a_closure_uses_its_tensors_in_place() -> None:
    w = torch.ones(2)
    program, named = as_closure(lambda: w * 2, [w])
    assert named["parameter 0"] is w and torch.equal(program(), 2 * w)
    assert as_closure(lambda: w, {"w": w})[1]["w"] is w
    assert as_closure(lambda: w, w)[1]["parameter 0"] is w


def test_a_function_is_called_with_clones() -> None:
    x, y = torch.ones(2), torch.ones(3)
    program, named = as_closure(lambda a, b: a.sum() + b["y"].sum(), (x, {"y": y}))
    assert list(named) == ["primal 0", "primal 1"] and named["primal 0"] is not x
    named["primal 1"].fill_(5.0)
    assert float(program()) == 17.0 and float(y.sum()) == 3.0


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^func is int; expected a callable\.$"):
        as_closure(3, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^params is empty; expected at least one tensor to perturb\.$"):
        as_closure(lambda: 0, [])
    with pytest.raises(ValueError, match=r"^primals hold no tensor; expected at least one to perturb\.$"):
        as_closure(lambda x: x, ())
