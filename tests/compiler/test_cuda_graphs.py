"""Recordings of CUDA graphs: what is kept of their inputs, and their memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jetplane.compiler.cuda_graphs import Pool, Recording


def test_a_parameter_with_other_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would go on with the memory that the parameter had, which may be another tensor's by now."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    written, read = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    recording = Recording(list, frozenset({0}), Pool())
    recording._hold([written, read])
    assert not recording._moved([written, read])
    written.data = written.data.clone()
    assert recording._moved([written, read])
    recording._hold([written, read])
    assert not recording._moved([written, read])
    read.data = read.data.clone()
    assert recording._moved([written, read])
    recording._hold([written, read])
    read.data = read.data.clone()
    assert not recording._moved([written, read]), "it is copied from now on"


def test_a_pool_has_another_name_once_all_its_graphs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        pass

    names = iter(range(10))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(names))
    pool, one, other = Pool(), Graph(), Graph()
    assert [pool.admit(one), pool.admit(other)] == [0, 0]
    del one
    third = Graph()
    assert pool.admit(third) == 0
    del other, third
    assert pool.admit(Graph()) == 1
