"""Programs captured as graphs, so that a pass over them can be compiled once and run many times.

Dynamo captures the user's program: parameters, buffers, batch and everything else that it reads become inputs of the
graph, and its guards see to it that a changed shape, dtype, ``train()`` or ``eval()`` is captured anew. A pass over the
graph is then traced with tensors that have no values, and compiled. Nothing that a step may change is baked in.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.agreement import compare
from ..ad.draws import draws
from ..errors import BackwardPass, CaptureFailed
from .fusion import fused

__all__ = [
    "Captured",
    "Compiled",
    "Graph",
    "Run",
    "compiled",
    "every",
    "every_with_aux",
    "identity",
    "single",
    "single_with_aux",
]

log = logging.getLogger("jetplane")

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Graph:
    """A captured program: a function of its inputs to its outputs, some of them those that jets are wanted of."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module = module
        (output,) = module.graph.find_nodes(op="output")
        outputs: Any = output.args[0]
        self.outputs = len(outputs)  # how many there are
        marked = _unmark(module, list(outputs))
        self.wanted = marked[_WANTED]  # places among them
        # the shapes of those that came with it, by place
        self.aux: dict[int, torch.Size] = {n: outputs[n].meta["example_value"].shape for n in marked[_BESIDE]}

    @property
    def loss(self) -> int:
        """The place of the one output that is wanted."""
        (place,) = self.wanted
        return place

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The program's outputs."""
        return _run(self._module, inputs)

    def for_jets(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The program's outputs, with operations put together for which there are faster jets."""
        return _run(self._fused, inputs)

    def bare(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The program's outputs; those that are wanted as the program made them, and no copies, for its plan's sake."""
        return _run(self._bare, inputs)

    @functools.cached_property
    def _bare(self) -> torch.fx.GraphModule:
        graph = copy.deepcopy(self._module.graph)
        (output,) = graph.find_nodes(op="output")
        made: Any = output.args[0]
        for mark in {made[place] for place in self.wanted}:
            mark.replace_all_uses_with(mark.args[0])
            graph.erase_node(mark)
        return torch.fx.GraphModule(self._module, graph)

    @functools.cached_property
    def _fused(self) -> torch.fx.GraphModule:
        return fused(self._module)

    @property
    def text(self) -> str | None:
        """The program as text, equal for equal programs; None where it holds more than text can say."""
        nodes = self._module.graph.nodes
        unsaid = any(node.op in ("get_attr", "call_module") or _is_users(node.target) for node in nodes)
        return None if unsaid else self._module.code

    @property
    def random(self) -> bool:
        """Whether the program draws random numbers."""
        return any(draws(node.target, node.args, node.kwargs) for node in self._module.graph.nodes)

    @property
    def asking(self) -> str | None:
        """Where the program asks for the value of a tensor, which waits for the device; None where it does not."""
        asked = (node for node in self._module.graph.nodes if node.target in ("item", "tolist"))
        for node in asked:
            places = [
                line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")
            ]
            return places[-1] if places else f"a call of {node.target}"
        return None


def _run(module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a graph, which switches autograd as the program did and may end with it on."""
    before = torch.is_grad_enabled()
    try:
        return list(module(*inputs))
    finally:
        torch.set_grad_enabled(before)


def _is_users(target: Any) -> bool:
    """Whether a graph calls a function that is not torch's: another one may have its name."""
    return isinstance(target, types.FunctionType) and str(target.__module__).split(".")[0] != "torch"


class Captured:
    """A program ``func(*args)`` whose graphs are run by what ``build`` makes of them.

    ``reading`` says what of its result is wanted: :func:`single` and the like. ``build(graph, inputs)`` is called once
    for each graph, with the tensors of the call that made it, and gives a function of such tensors to the graph's
    outputs. The result of a call is the program's own, made of those outputs.
    """

    def __init__(self, build: Callable[[Graph, Sequence[Tensor]], Run], reading: Callable[..., Any]) -> None:
        self._build = build
        self._count = 0
        self._program = _torch.captured(_fresh(reading), self._backend)

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """What ``func(*args)`` returns. CaptureFailed where it cannot be captured."""
        try:
            # on, so that Dynamo writes down where the program switches it off; what is built runs with it off
            with torch.enable_grad():
                return self._program(func, args)
        except _torch.capture_errors() as error:
            if type(error).__name__ == "FailOnRecompileLimitHit":
                raise CaptureFailed(f"its shapes, modes or numbers changed {self._count} times, the limit") from error
            raise CaptureFailed(_torch.explain_capture(error)) from error

    def _backend(self, module: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        self._count += 1
        log.info("captured graph %d of a program with %d inputs", self._count, len(inputs))
        graph, run = Graph(module), None

        def call(*inputs: Tensor) -> Sequence[Tensor]:
            nonlocal run
            with torch.no_grad():
                if run is None:  # not before: here the tensors are those of the call itself
                    run = self._build(graph, inputs)
                return run(inputs)

        return call


def single(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result is one tensor, which is wanted."""
    return torch.ops.jetplane.wanted(func(*args))


def single_with_aux(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result is a pair; the first one of it is a tensor, which is wanted."""
    loss, aux = func(*args)
    return torch.ops.jetplane.wanted(loss), _kept(aux)


def every(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """All tensors of the result are wanted."""
    return _torch.pytree.tree_map_only(Tensor, torch.ops.jetplane.wanted, func(*args))


def every_with_aux(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result is a pair; all tensors of the first one of it are wanted."""
    out, aux = func(*args)
    return _torch.pytree.tree_map_only(Tensor, torch.ops.jetplane.wanted, out), _kept(aux)


def _kept(aux: Any) -> Any:
    """Copies: a parameter or a buffer among them is an output of the graph then, as it is before it changes."""
    return _torch.pytree.tree_map_only(Tensor, torch.ops.jetplane.beside, aux)


def identity(func: Callable[..., Any]) -> Any:
    """What a program is known by: a closure made anew for each batch is the same program as the last one.

    Dynamo tells apart what else differs: values that closures hold, the arguments of a partial, modules.
    """
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__code__", func)


def _fresh(function: Any) -> types.FunctionType:
    """A copy with a code object of its own: Dynamo keeps its graphs, and counts them, by code object."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@torch.library.custom_op("jetplane::wanted", mutates_args=())
def _mark(output: Tensor) -> Tensor:
    """An output of which the jet is wanted, told apart from the other outputs of a graph."""
    return output.clone()


@torch.library.custom_op("jetplane::beside", mutates_args=())
def _mark_aux(output: Tensor) -> Tensor:
    """An output that the program returned beside what is wanted, likewise."""
    return output.clone()


for _op in (_mark, _mark_aux):
    _op.register_fake(torch.empty_like)

_WANTED, _BESIDE = "wanted", "beside"


def _unmark(module: torch.fx.GraphModule, outputs: list[torch.fx.Node]) -> dict[str, list[int]]:
    """Take the marks out of the graph, and return which outputs they were, by mark."""
    places: dict[str, list[int]] = {}
    for name in (_WANTED, _BESIDE):
        packet = getattr(torch.ops.jetplane, name)
        marks = [node for node in module.graph.nodes if node.target in (packet, packet.default)]
        places[name] = [outputs.index(mark) for mark in marks]
        for mark in marks:
            mark.target = torch.clone
    module.recompile()
    return places


@dataclass(frozen=True)
class Compiled:
    """A compiled function of tensors."""

    run: Run
    written: frozenset[int]  # places of the inputs that it writes

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.run(inputs)


def compiled(
    function: Callable[[list[Tensor]], list[Tensor]],
    inputs: Sequence[Tensor],
    reference: Callable[[list[Tensor]], list[Tensor]] | None,
    writes: bool = False,
) -> Compiled:
    """``function``, traced with tensors like ``inputs`` but without values, and compiled.

    With a ``reference``, which may be the function itself, the outputs of both are compared, on copies of ``inputs``;
    and, if it ``writes`` what it is for, the inputs that were written.
    """
    try:
        run, written = _torch.compiled(function, inputs)
    except (CaptureFailed, BackwardPass):
        raise
    except Exception as error:  # whatever it is, the program can still be run as it is, and says what is wrong then
        text = " ".join(str(error).split())
        raise CaptureFailed(f"{type(error).__name__}: {text[:300].rstrip('.')}") from error
    storages = [tensor.untyped_storage().data_ptr() for tensor in inputs]
    if any(inputs[place].numel() and storages.count(storages[place]) > 1 for place in written):
        raise CaptureFailed("two of the tensors that the program reads share memory, and one of them is written")
    if reference is not None:
        places = sorted(written) if writes else []
        compare(_telling(reference, places), _telling(run, places), inputs, full=writes)
    return Compiled(run, frozenset(written))


def _telling(run: Callable[[list[Tensor]], Sequence[Tensor]], places: Sequence[int]) -> Run:
    """``run``, which gives also what has become of some of its inputs."""

    def telling(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        inputs = list(inputs)
        return [*run(inputs), *(inputs[place] for place in places)]

    return telling
