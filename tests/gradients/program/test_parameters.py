"""The parameters: their names, their memory, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import jetplane as jp
from classifiers import X, Y


def test_shared_memory_frozen_parameters_and_views() -> None:
    flat = torch.randn(4 * 5 + 5 * 3, dtype=torch.float64)
    first = flat[:20].view(4, 5).requires_grad_()
    second = flat[20:].view(5, 3).requires_grad_()
    x = X.double()

    def losses(x: Tensor) -> Tensor:
        return F.cross_entropy((x @ first).relu() @ second, Y, reduction="none")

    losses(x).mean().backward()
    wanted = second.grad.clone()
    first.grad = second.grad = None
    jp.forward_gradient(losses, {"first": first, "second": second}, x)
    torch.testing.assert_close(second.grad, wanted)
    assert first.grad.shape == first.shape
    first.grad = second.grad = None
    jp.forward_gradient(losses, [second], x)
    torch.testing.assert_close(second.grad, wanted)
    assert first.grad is None
    first.requires_grad_(False)
    jp.forward_gradient(losses, [first, second], x)
    assert first.grad is None


W = torch.ones(4, 3)


def test_bad_params() -> None:
    w = W.clone().requires_grad_()
    for error, message, params in (
        (TypeError, "params is a tensor; expected tensors, a mapping", w),
        (ValueError, "params holds no tensor that requires grad", [W]),
        (ValueError, "parameter 1 is parameter 0; expected each parameter once", [w, w]),
        (TypeError, "parameter 0 is str; expected a tensor", ["w"]),
    ):
        with pytest.raises(error, match=message):
            jp.forward_gradient(lambda: w.sum(1), params)


@pytest.mark.slow
def test_a_first_gradient_imports_no_symbolic_shapes() -> None:
    """Which torch does where it is handed gradients: for an embedding of constants, made of parameters alone."""
    program = """
import sys, torch, jetplane as jp
table, head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 2)
losses = lambda x: head(x + table(torch.arange(4))).square().sum((1, 2))
jp.forward_gradient(losses, [*table.parameters(), *head.parameters()], torch.randn(5, 4, 3))
assert table.weight.grad is not None and "sympy" not in sys.modules, "sympy was imported"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
