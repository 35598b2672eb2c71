"""What a compiled function may differ by: rounding of the arithmetic it uses, and what rounding does to the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from jetplane.ad import agreement
from jetplane.ad.agreement import compare, difference
from jetplane.errors import CaptureFailed

Function = Callable[[Sequence[Tensor]], list[Tensor]]


def off_by(function: Function, relative: float) -> Function:
    return lambda tensors: [out * (1 + relative) for out in function(tensors)]


def agrees(function: Function, run: Function, *inputs: Tensor) -> bool:
    before = [tensor.clone() for tensor in inputs]
    try:
        compare(function, run, inputs)
    except CaptureFailed as error:
        assert str(error).startswith("compiled, its output 0 differs by ")
        return False
    finally:
        assert all(map(torch.equal, before, inputs))
    return True


def squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[0].square().sum(0), tensors[0] + 1]


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        (torch.float64, 1e-12, 1e-8),
        (torch.float32, 1e-6, 1e-3),
        (torch.bfloat16, 1e-2, 0.1),
        (torch.float16, 1e-3, 0.1),
    ],
)
def test_the_tolerance_follows_the_dtype(dtype: torch.dtype, right: float, wrong: float) -> None:
    x = torch.linspace(1, 2, 10, dtype=dtype)
    assert agrees(squares, off_by(squares, right), x)
    assert not agrees(squares, off_by(squares, wrong), x)


@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_the_tolerance_follows_a_coarser_dtype_within(inner: torch.dtype) -> None:
    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0].to(inner).square().sum().double()]

    x = torch.linspace(1, 2, 10, dtype=torch.float64)
    right, wrong = (1e-6, 1e-3) if inner is torch.float32 else (1e-2, 0.1)
    assert agrees(function, off_by(function, right), x)
    assert not agrees(function, off_by(function, wrong), x)


def test_the_tolerance_follows_autocast() -> None:
    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [(tensors[0] @ tensors[0]).float()]

    x = torch.linspace(1, 2, 16).reshape(4, 4)
    assert agrees(function, off_by(function, 1e-2), x)
    assert not agrees(function, off_by(function, 0.1), x)


def pooled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The derivative of max-pooling along a direction: it jumps where the larger entry changes."""
    x, v = tensors
    indices = F.max_pool1d(x[None], 2, return_indices=True)[1][0]
    return [v[indices].sum(0, keepdim=True)]


def pooled_from_behind(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same, with the entries rounded in another way, and a tie for the last of them."""
    x, v = tensors
    x, v = (x * (1 + 1e-7)).flip(0) * (1 - 1e-7), v.flip(0)
    return pooled([x, v])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tie_may_fall_either_way(dtype: torch.dtype) -> None:
    v = torch.tensor([1.0, 5.0, 2.0, 3.0], dtype=dtype)
    tied, apart = torch.tensor([0.3, 0.3, 0.1, 0.9]), torch.tensor([0.3, 0.2, 0.1, 0.9])
    assert float(pooled([tied.to(dtype), v])[0]) != float(pooled_from_behind([tied.to(dtype), v])[0])
    assert agrees(pooled, pooled_from_behind, tied.to(dtype), v)
    assert agrees(pooled, pooled_from_behind, apart.to(dtype), v)
    # where there is no tie, another entry than the larger one is wrong
    smaller = lambda tensors: pooled([-tensors[0], tensors[1]])  # noqa: E731
    assert not agrees(pooled, smaller, apart.to(dtype), v)


def test_a_badly_conditioned_system_may_be_less_exact() -> None:
    def solved(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.linalg.solve(tensors[0], tensors[1])]

    def otherwise(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.linalg.inv(tensors[0]) @ tensors[1]]

    hilbert = 1 / (torch.arange(6)[:, None] + torch.arange(6) + 1.0)  # of condition 1e7
    right = torch.ones(6)
    assert difference(solved([hilbert, right])[0], otherwise([hilbert, right])[0]) > 1e-4
    assert agrees(solved, otherwise, hilbert, right)
    assert not agrees(solved, off_by(solved, 1e3), hilbert, right)
    assert not agrees(solved, off_by(solved, 1e-2), torch.eye(6) + hilbert, right)


def test_numbers_that_are_not_finite_must_agree() -> None:
    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0].log()]

    def without(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0].log().nan_to_num()]

    x = torch.tensor([1.0, 0.0, -1.0])
    assert agrees(function, function, x)
    assert not agrees(function, without, x)


def test_inputs_stay_in_their_domain() -> None:
    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [F.binary_cross_entropy(tensors[0], tensors[0], reduction="none")]  # raises beyond one

    assert not agrees(function, off_by(function, 0.5), torch.tensor([0.0, 0.5, 1.0]))


def test_nothing_and_whole_numbers_are_compared() -> None:
    def function(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0] * 2]

    assert agrees(function, function, torch.zeros(0)) and agrees(function, function, torch.arange(3))
    assert agrees(function, function, torch.zeros(3))
    assert not agrees(function, lambda tensors: [tensors[0] * 3], torch.arange(3))


def test_products_with_fewer_bits_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    with torch.backends.cudnn.flags(allow_tf32=True):
        try:
            torch.set_float32_matmul_precision("highest")
            assert agreement._uses_tf32(convolved=True) and not agreement._uses_tf32(convolved=False)
            torch.set_float32_matmul_precision("high")
            assert agreement._uses_tf32(convolved=False)
        finally:
            torch.set_float32_matmul_precision(before)

    def unsaid() -> str:
        raise RuntimeError("PyTorch is checking whether allow_tf32 is enabled")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", unsaid)
    assert agreement._uses_tf32(convolved=False)  # torch does not tell: they may have
