"""x0 as tensors, and the way back; nothing imports numpy."""

from __future__ import annotations

import sys
from typing import Any

import numpy
import pytest
import torch

import jetplane as jp
from cases import F64
from jetplane.optim.arrays import StartPoint, as_tensors


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<f4", "<f2", "<i4", "<u1"])
def test_arrays_of_all_kinds(dtype: str) -> None:
    array = numpy.array([[1, 2], [3, 4]], dtype=dtype)[:, ::-1]
    array.flags.writeable = False
    start = StartPoint(array)
    assert start.leaves[0].tolist() == [[2.0, 1.0], [4.0, 3.0]]
    back = start.back([start.leaves[0] + 1])
    assert isinstance(back, numpy.ndarray) and back.tolist() == [[3.0, 2.0], [5.0, 4.0]]
    assert back.dtype == (numpy.float64 if array.dtype.kind in "iu" else array.dtype.newbyteorder("="))


def test_the_array_is_not_shared() -> None:
    array = numpy.zeros(2)
    StartPoint(array).leaves[0].fill_(1.0)
    assert array.tolist() == [0.0, 0.0]


def test_scalars_of_numpy() -> None:
    start = StartPoint(numpy.float32(2))
    assert start.leaves[0].shape == () and start.leaves[0].dtype == torch.float32
    assert start.back(start.leaves).shape == ()


def test_structures_are_kept() -> None:
    start = StartPoint({"a": numpy.ones(2), "b": (torch.zeros(1), [torch.ones(3)])})
    assert [type(leaf) for leaf in start.leaves] == [torch.Tensor] * 3
    back = start.back(start.leaves)
    assert type(back["a"]) is numpy.ndarray and back["b"][1][0] is start.leaves[2]
    assert type(start.tree(start.leaves)["a"]) is torch.Tensor


@pytest.mark.parametrize("x0", [[], [True], [1.0, torch.ones(1)], {"a": 1.0}, "1", None])
def test_what_is_no_array_stays_as_it_is(x0: Any) -> None:
    assert not any(isinstance(leaf, torch.Tensor) and leaf.dtype == F64 for leaf in StartPoint(x0).leaves)


@pytest.mark.parametrize("dtype", ["complex128", "bool", "longdouble", "U3"])
def test_arrays_that_cannot_move(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"x0 has dtype .*; expected real numbers of at most 64 bits"):
        StartPoint(numpy.zeros(2, dtype=dtype))


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "i4", "bool"])
def test_further_arguments_keep_their_kind(dtype: str) -> None:
    array = numpy.array([1, 0], dtype=dtype)
    (tensor, word, nested) = as_tensors((array, "word", [array]))
    assert isinstance(tensor, torch.Tensor) and tensor.tolist() == array.tolist()
    assert tensor.is_floating_point() == (array.dtype.kind == "f")
    assert word == "word" and nested[0] is array  # what is inside of others is the user's own
    (text,) = as_tensors(numpy.array(["a"]))
    assert isinstance(text, numpy.ndarray)


def test_ragged_lists() -> None:
    with pytest.raises(ValueError, match=r"x0 is a list of numbers of no shape .*; expected rows of one length"):
        StartPoint([[1.0], [2.0, 3.0]])


def test_nothing_here_imports_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # an import would raise
    assert jp.minimize(lambda x: (x - 1).square().sum(), [3.0, 4.0]).success
