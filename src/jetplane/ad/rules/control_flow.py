"""Rules of torch's operators of higher order: the functions that they take are parts of the program.

Run as they are, with the engine active, each is the program that its author wrote; torch's own bodies of them are that,
too, where they do not ask which mode is active.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .. import _torch
from ..algebra.families import composite


def _cond(pred: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return (true if pred else false)(*operands)


def _scan(combine: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], additional_inputs: Any = ()) -> Any:
    carried, made = list(init), []
    for step in range(xs[0].shape[0]):
        found = combine(*carried, *(x[step] for x in xs), *additional_inputs)
        carried = list(found[: len(init)])
        made.append(found[len(init) :])
    return [*carried, *map(torch.stack, zip(*made, strict=True))]


def _flex(
    query: Any, key: Any, value: Any, score: Any, joint: Any, mask: Any, scale: Any, options: Any, *rest: Any
) -> Any:
    """The arguments of its autograd.Function, which has traced the score for a backward pass."""
    return _torch.plain_body("flex_attention")(query, key, value, score, mask, scale, options, rest[1:], rest[0])


composite("cond", _cond)
composite("scan", _scan)
for _name in ("while_loop", "map_impl", "associative_scan", "flex_attention"):
    composite(_name, partial(lambda name, *args, **kwargs: _torch.plain_body(name)(*args, **kwargs), _name))

# how a score of flex_attention looks up a number for its head or place
composite("torch._dynamo._trace_wrapped_higher_order_op.ModIndex", torch.ops.aten.index)

# where a graph is asked for, they are called as these first
_HOPS = "torch._higher_order_ops."
composite(_HOPS + "cond.CondAutogradOp", lambda pred, true, false, *operands: _cond(pred, true, false, operands))
composite(_HOPS + "flex_attention.FlexAttentionAutogradOp", _flex)
composite(
    _HOPS + "map.MapAutogradOp",
    lambda f, count, *args: _torch.plain_body("map_impl")(f, args[:count], args[count:]),
)
composite(
    _HOPS + "while_loop.WhileLoopAutogradOp",
    lambda going, body, count, more, *args: _torch.plain_body("while_loop")(going, body, args[:count], args[count:]),
)
