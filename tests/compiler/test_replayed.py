"""Steps in CUDA graphs: how they are shared out among recordings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jetplane.compiler.cuda_graphs import Recording
from jetplane.compiler.replayed import Replayed, repeated


def test_any_number_of_steps_is_replayed_in_graphs_of_up_to_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that does again what was recorded, in place of the device's."""

    @contextlib.contextmanager
    def recording(self: Any) -> Iterator[None]:
        yield

        class Graph:
            def replay(graph) -> None:
                found = repeated(self._run, self._inputs, self._batches, self._count)
                for output, now in zip(self._outputs, found, strict=True):
                    output.copy_(now)

        recorded.append(self._count)
        self._graph = Graph()

    recorded: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(Recording, "_recording", recording)
    replayed = Replayed(lambda inputs: [inputs[0] + inputs[1], inputs[1].sum()])
    for count in (1, 2, 3, 10, 27, 1, 3):
        batches, fixed = torch.randn(count, 4), torch.randn(4)
        sums, totals = replayed([fixed, batches[0]], {1: batches}, count)
        torch.testing.assert_close((sums, totals), (fixed + batches, batches.sum(1)), rtol=1e-12, atol=1e-12)
    assert recorded == [3, 10, 10, 7, 1, 3]  # the first three as they are; what has moved is recorded anew, and copied
