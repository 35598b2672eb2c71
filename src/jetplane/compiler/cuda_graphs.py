"""A compiled function replayed as a CUDA graph: one launch a call, in place of one for each kernel."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from .capture import Run

__all__ = ["WARM_UPS", "Pool", "Recorded", "Recording"]

log = logging.getLogger("jetplane")

WARM_UPS = 3  # as torch advises: libraries choose their algorithms, and their workspaces, at first


class Pool:
    """Memory that several graphs share for what lies between their inputs and outputs. They take turns."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._done: torch.cuda.Event | None = None

    def admit(self, graph: Any) -> Any:
        """torch's name of the memory, for a graph that is to be captured.

        With the last of the graphs torch gives the memory up, and refuses its name from then on: so then it is another.
        """
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        return self._handle

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is launched here waits for what was launched in the turn before, on whatever stream that was."""
        stream = torch.cuda.current_stream()
        if self._done is None:
            self._done = torch.cuda.Event()
        else:
            stream.wait_event(self._done)
        yield
        self._done.record(stream)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected here, but before: a graph that is freed while another is recorded breaks the recording.

    Example:
        >>> with without_collection():
        ...     gc.isenabled()
        False
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Recording:
    """The launches of ``run`` as a CUDA graph.

    Inputs are read, and written, where they are; one whose address changes between two calls is copied to a place of
    ours from then on, or, where ``run`` writes it, the launches are recorded anew.
    """

    def __init__(self, run: Run, written: Set[int], pool: Pool) -> None:
        self._run = run
        self._written = written  # places among the inputs
        self._pool = pool
        self._calls = 0
        # A stream of its own to capture on: matrix libraries keep a workspace for each stream, and two graphs that use
        # the same one must not run at the same time.
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []  # at the addresses that the graph reads
        self._copied: set[int] = set()
        self._outputs: list[Tensor] = []

    def _moved(self, inputs: Sequence[Tensor], but: Set[int] = frozenset()) -> bool:
        """Whether an input of the graph is somewhere else now; such a one is copied from now on, where it can be."""
        moved = {
            place
            for place, (new, old) in enumerate(zip(inputs, self._inputs, strict=True))
            if place not in self._copied and place not in but and new.data_ptr() != old.data_ptr()
        }
        self._copied |= moved - self._written  # a copy would take what is written away from its owner
        return bool(moved)

    def _hold(self, inputs: Sequence[Tensor]) -> None:
        """Keep the inputs that the next graph reads: their memory, for a parameter may be given another one."""
        plain = [tensor.detach() for tensor in inputs]
        self._inputs = [tensor.clone() if place in self._copied else tensor for place, tensor in enumerate(plain)]

    def _fill(self, inputs: Sequence[Tensor]) -> None:
        for place in self._copied:
            self._inputs[place].copy_(inputs[place])

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """What is launched here makes the graph. Nothing of it runs."""
        self._graph, self._outputs = None, []  # gives its memory back
        graph = torch.cuda.CUDAGraph()
        with without_collection(), torch.cuda.graph(graph, pool=self._pool.admit(graph), stream=self._stream):
            yield
        self._graph = graph


class Recorded(Recording):
    """Calls ``run`` a few times as it is, and from then on replays what it launches. Outputs are copies."""

    def __init__(self, run: Run, written: Set[int], pool: Pool, device: torch.device) -> None:
        with torch.cuda.device(device):
            super().__init__(run, written, pool)
        self._device = device
        self._turn = pool.turn

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of ``run``."""
        with torch.cuda.device(self._device):  # whose streams are meant
            if self._calls < WARM_UPS or torch.cuda.is_current_stream_capturing():  # then it is a part of that graph
                self._calls += 1
                return list(self._run(inputs))
            if self._graph is None or self._moved(inputs):
                log.info("capturing a compiled function as a CUDA graph")
                self._hold(inputs)
                with self._recording():
                    outputs = list(self._run(self._inputs))
                self._outputs = outputs
            assert self._graph is not None
            with self._turn():
                self._fill(inputs)
                self._graph.replay()
                return _torch.copies(self._outputs)
