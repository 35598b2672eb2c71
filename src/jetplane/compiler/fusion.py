"""Neighbouring operations of a captured program that one kernel does better, put together as one operation.

That is done before a pass over the program is traced, for in the trace each of them has become many. A program with
fused operations is for jets alone: they have no backward pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from ..ad import _torch

__all__ = ["fused"]

_CONVOLUTIONS = {torch.conv2d, F.conv2d}
_RELUS = {F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_"}
_POOLS = {F.max_pool2d, torch.max_pool2d, "max_pool2d"}
_SWITCHES = {_torch.SET_GRAD_ENABLED, *_torch.INFERENCE_SWITCHES}

_CONVOLUTION = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}  # defaults behind input, weight
_POOL = {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}


def fused(module: GraphModule) -> GraphModule:
    """The program with each chain of convolution, ReLU and max-pooling as one operation; or itself if it has none.

    Pooling and ReLU may come in either order: the larger of two numbers is also the larger one after ReLU.
    """
    if not any(_chain(node) for node in module.graph.nodes):
        return module
    module = copy.copy(module)
    module.graph = copy.deepcopy(module.graph)
    for node in list(module.graph.nodes):
        found = _chain(node)
        if found is None:
            continue
        last, arguments = found
        (between,) = node.users
        with module.graph.inserting_before(last):
            one = module.graph.call_function(torch.ops.jetplane.convolution_relu_pool.default, arguments)
        one.meta = last.meta
        last.replace_all_uses_with(one)
        for old in (last, between, node):
            module.graph.erase_node(old)
    module.recompile()
    return module


def _chain(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """The last node of the chain that begins with a convolution, and the arguments of the operation in its place."""
    if node.target not in _CONVOLUTIONS:
        return None
    second = _only_user(node)
    third = None if second is None else _only_user(second)
    if second is None or third is None:
        return None
    relu, pool = (second, third) if second.target in _RELUS else (third, second)
    if relu.target not in _RELUS or pool.target not in _POOLS or not _halves(pool) or _switches(node, third):
        return None
    if not _plain(relu, node, second):
        return None
    named = _bound(node, ("input", "weight"), _CONVOLUTION)
    lengths = [_two(named[name]) for name in ("stride", "padding", "dilation")]
    value, weight, out = (_like(one) for one in (named["input"], named["weight"], node))
    if value is None or weight is None or out is None or value.ndim != 4 or named["groups"] != 1 or None in lengths:
        return None
    if not value.dtype == weight.dtype == out.dtype:  # autocast: one operation in place of three would not be cast
        return None
    return third, (named["input"], named["weight"], named["bias"], *lengths)


def _switches(first: Node, last: Node) -> bool:
    """Whether the program switches autograd on or off between two nodes: then only some of them are constant."""
    while first is not last:
        first = first.next
        if first.target in _SWITCHES:
            return True
    return False


def _like(node: Any) -> Tensor | None:
    """A tensor without values like that of a node, where it is known."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def _plain(relu: Node, *before: Node) -> bool:
    """Whether the ReLU takes what stands before it, and nothing else."""
    return relu.all_input_nodes == [relu.args[0]] and relu.args[0] in before


def _only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _halves(pool: Node) -> bool:
    """Whether a pool has windows of 2 x 2 side by side, and gives their maxima alone."""
    named = _bound(pool, ("input",), _POOL)
    stride = named["kernel_size"] if named["stride"] in (None, [], ()) else named["stride"]
    wanted = ((named["kernel_size"], 2), (stride, 2), (named["padding"], 0), (named["dilation"], 1))
    return all(_two(value) == [n, n] for value, n in wanted) and not named["ceil_mode"] and not named["return_indices"]


def _bound(node: Node, first: tuple[str, ...], defaults: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**defaults, **dict(zip((*first, *defaults), node.args, strict=False)), **node.kwargs}


def _two(value: Any) -> list[int] | None:
    """A number for height and one for width, where they are numbers."""
    if isinstance(value, int):
        return [value, value]
    if isinstance(value, list | tuple) and len(value) in (1, 2) and all(isinstance(n, int) for n in value):
        return [*value, *value][:2]
    return None
