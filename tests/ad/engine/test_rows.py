"""Rows live as long as what they belong to."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from test_storage import finish
from torch import Tensor

import jetplane as jp
from cases import assert_close, randn


def live_tensors() -> int:
    gc.collect()
    return sum(type(thing) is Tensor for thing in gc.get_objects())  # isinstance would wake lazy modules


def test_rows_are_freed_with_their_tensors() -> None:
    w = randn(100)
    with jp.perturb([w], [randn(2, 100)]) as jets:
        y = (w * 2).tanh()
        before = live_tensors(), len(jets._pass.mode._records)
        for _ in range(10):
            y = (w * 2).tanh()
            z = y.view(10, 10).t() @ y.view(10, 10)
            z[0] = 3.0
        del z
        after = live_tensors(), len(jets._pass.mode._records)
    assert after == before


def test_nothing_outlives_the_pass() -> None:
    w, v = randn(10), randn(2, 10)
    jp.quadratic(finish, w, v)
    before = live_tensors()
    for _ in range(3):
        jp.quadratic(finish, w, v)
    assert live_tensors() == before


@pytest.mark.parametrize("read", [lambda y: y.share_memory_(), copy.deepcopy], ids=["share_memory_", "deepcopy"])
def test_memory_that_is_read_as_bytes_is_refused(read) -> None:
    says = (
        r"reads the memory of a perturbed tensor of torch.float64 as torch.uint8, .*; expected .clone\(\), or .detach"
    )
    with pytest.raises(jp.UnsupportedProgram, match=says):
        jp.gradient(lambda x: read(x * 1).sum(), randn(3))


def test_a_copy_of_a_module_is_a_constant_as_in_backprop() -> None:
    net, v = torch.nn.Linear(3, 1, bias=False).double(), randn(1, 1, 3)
    x = randn(2, 3)
    with jp.perturb(net.parameters(), [v]) as jets:
        loss = (net(x) * copy.deepcopy(net)(x)).sum()
    (expected,) = torch.autograd.grad((net(x) * net(x).detach()).sum(), net.weight)
    assert_close(jets.quadratic(loss).slope, (expected * v[0]).sum().reshape(1))
