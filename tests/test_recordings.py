"""Recordings of CUDA graphs: what is kept of their inputs, how steps are shared out among them, and their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from jetplane.ad.graphs import Pool, Recording
from jetplane.optim import graphs


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


def test_any_number_of_steps_is_replayed_in_graphs_of_up_to_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that does again what was recorded, in place of the device's."""

    @contextlib.contextmanager
    def recording(self: Any) -> Iterator[None]:
        yield

        class Graph:
            def replay(graph) -> None:
                found = graphs.repeated(self._run, self._inputs, self._batches, self._count)
                for output, now in zip(self._outputs, found, strict=True):
                    output.copy_(now)

        recorded.append(self._count)
        self._graph = Graph()

    recorded: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(Recording, "_recording", recording)
    replayed = graphs.Replayed(lambda inputs: [inputs[0] + inputs[1], inputs[1].sum()])
    for count in (1, 2, 3, 10, 27, 1, 3):
        batches, fixed = torch.randn(count, 4), torch.randn(4)
        sums, totals = replayed([fixed, batches[0]], {1: batches}, count)
        torch.testing.assert_close((sums, totals), (fixed + batches, batches.sum(1)), rtol=1e-12, atol=1e-12)
    assert recorded == [3, 10, 10, 7, 1, 3]  # the first three as they are; what has moved is recorded anew, and copied


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
