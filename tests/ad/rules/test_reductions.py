"""Products, sums of exponentials and softmax at zeros and far out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetplane as jp
from cases import F64, check, vec


def product_without(x: list[float], *left_out: int) -> float:
    return math.prod(value for i, value in enumerate(x) if i not in left_out)


INF = math.inf
ZEROS = [[2.0, 0.0, 3.0, -1.0], [2.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 4.0], [0.0, 2.0, 3.0, 4.0], [1.5, 2.0, -3.0, 4.0]]


@pytest.mark.parametrize("numbers", ZEROS, ids=str)
def test_product_with_zeros(numbers: list[float]) -> None:
    n = len(numbers)
    gradient = vec(*(product_without(numbers, i) for i in range(n)))
    hessian = torch.zeros(n, n, dtype=F64)
    for i, j in itertools.permutations(range(n), 2):
        hessian[i, j] = product_without(numbers, i, j)
    for function in (
        lambda x: x.prod(),
        lambda x: x.view(1, n).prod(1).sum(),
        lambda x: x.view(1, n).prod(1, keepdim=True).sum(),
    ):
        check(function, vec(*numbers), gradient, hessian)


@pytest.mark.parametrize("numbers", ZEROS, ids=str)
def test_cumulative_product_with_zeros(numbers: list[float]) -> None:
    n = len(numbers)
    weights = vec(0.5, -1, 2, 3)
    gradient, hessian = torch.zeros(n, dtype=F64), torch.zeros(n, n, dtype=F64)
    for end in range(1, n + 1):
        for i in range(end):
            gradient[i] += weights[end - 1] * product_without(numbers[:end], i)
        for i, j in itertools.permutations(range(end), 2):
            hessian[i, j] += weights[end - 1] * product_without(numbers[:end], i, j)
    check(lambda x: (x.cumprod(0) * weights).sum(), vec(*numbers), gradient, hessian)


def test_logsumexp_with_minus_infinity() -> None:
    p = vec(-INF, 0, 1).softmax(0)
    hessian = torch.diag(p) - torch.outer(p, p)
    for function in (lambda x: x.logsumexp(0), lambda x: torch.cat([vec(-INF), x[1:]]).logsumexp(0)):
        check(function, vec(-INF, 0, 1), p, hessian)
    # exp(-inf) - 0: a masked entry does not vary
    check(lambda x: x.masked_fill(torch.tensor([True, False, False]), -INF).logsumexp(0), vec(5, 0, 1), p, hessian)
    check(lambda x: (x + vec(-INF, 0, 0)).softmax(0)[2], vec(5, 0, 1), *softmax_entry(p, 2))


def softmax_entry(p: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of softmax(x)[c] from the probabilities."""
    delta = torch.zeros_like(p)
    delta[c] = 1
    gradient = p[c] * (delta - p)
    hessian = torch.outer(gradient, delta - p) - p[c] * (torch.diag(p) - torch.outer(p, p))
    return gradient, hessian


def test_logsumexp_of_nothing_but_minus_infinity_is_finite() -> None:
    x = vec(-INF, -INF)
    assert jp.gradient(lambda x: x.logsumexp(0), x).nan_to_num(7.0).isfinite().all()


@pytest.mark.parametrize("numbers", [(1e4, 0.0, -1e4), (-1e4, -1e4, -1e4), (1e4, 1e4, 1e4 - 1)], ids=str)
def test_softmax_far_out(numbers: tuple[float, ...]) -> None:
    x = vec(*numbers)
    p = x.softmax(0)
    onehot = vec(0, 1, 0)
    check(lambda x: x.log_softmax(0)[1], x, onehot - p, torch.outer(p, p) - torch.diag(p))
    check(lambda x: F.cross_entropy(x[None], torch.tensor([1])), x, p - onehot, torch.diag(p) - torch.outer(p, p))
    check(lambda x: x.softmax(0)[2], x, *softmax_entry(p, 2))
