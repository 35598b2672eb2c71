"""Programs that are captured, and what says that a graph is to be believed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import jetplane as jp
from compilation import F64, fallen_back, leaf
from jetplane.ad import _torch
from jetplane.compiler import capture
from jetplane.optim import FoMoH, FoMoHKD
from tracing import trace_only

pytestmark = pytest.mark.usefixtures("nothing_shared")


@pytest.mark.usefixtures("traced")
def test_functions_that_share_a_name_do_not_share_what_is_compiled() -> None:
    def raised(power: int) -> Callable[[Tensor], Tensor]:
        @torch.compiler.allow_in_graph
        def function(x: Tensor) -> Tensor:
            return x**power

        return function

    for power in (2, 4):
        x, function = leaf(2.0, 1.0), raised(power)
        loss = FoMoH([x], compile=True).step(lambda: function(x).sum())  # noqa: B023 - called at once
        assert float(loss) == 2.0**power + 1


@pytest.mark.usefixtures("traced")
@torch._dynamo.config.patch(recompile_limit=2)
def test_a_captured_program_says_how_often_it_changed() -> None:
    program = capture.Captured(lambda graph, inputs: graph, capture.single)
    for size in (2, 3):
        assert float(program(torch.sum, (torch.ones(size),))) == size
    with pytest.raises(capture.CaptureFailed, match=r"^its shapes, modes or numbers changed 2 times, the limit$"):
        program(torch.sum, (torch.ones(4),))


def test_a_compiler_that_is_wrong_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        run, written = trace_only(function, inputs)
        return (lambda tensors: [1.1 * out for out in run(tensors)]), written

    monkeypatch.setattr(_torch, "compiled", wrong)
    x = leaf(1.0, 2.0)
    opt = FoMoHKD([x], k=2, compile=True)
    fallen_back(
        lambda: opt.step(lambda: x.square().sum()), r"its output 0 differs by 1\.0e-01 from what it is uncompiled"
    )
    assert float(x.detach().norm()) < 1e-6  # an eager step was taken


def test_a_compiler_that_fails_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        raise KeyError("no such kernel.")

    monkeypatch.setattr(_torch, "compiled", fail)
    x = leaf(1.0, 2.0)
    fallen_back(lambda: FoMoH([x], compile=True).step(lambda: x.square().sum()), "KeyError: 'no such kernel")
    fallen_back(lambda: jp.compile(jp.quadratic)(torch.sum, x.detach(), torch.eye(2, dtype=F64)), "KeyError")


def test_inputs_that_are_one_tensor_are_left_to_autograds_layers() -> None:
    x = torch.tensor([1.0, 2.0])
    run, written = _torch.compiled(lambda tensors: [tensors[0] * 3 + tensors[1]], [x, x])
    assert (run([x, x])[0].tolist(), written) == ([4.0, 8.0], set())


def test_a_warning_of_the_compiler_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here warnings are errors: a program would be run as it is for nothing but advice."""
    from torch._inductor import compile_fx

    original = compile_fx.compile_fx

    def advising(*args: Any, **options: Any) -> Any:
        warnings.warn("online softmax\n is disabled", UserWarning, stacklevel=1)
        return original(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx", advising)
    x, fast = torch.randn(3), jp.compile(jp.quadratic)
    with caplog.at_level(logging.INFO, "jetplane"):
        found = fast(lambda x: x.sin().prod(), x, torch.eye(3))
    torch.testing.assert_close(found.curvature, jp.quadratic(lambda x: x.sin().prod(), x, torch.eye(3)).curvature)
    assert "torch's compiler: online softmax is disabled" in caplog.messages
