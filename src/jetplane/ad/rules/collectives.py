"""Rules of collectives: operations in which all processes of a group take part.

Each process differentiates its own results along directions that all of them share. So the tangents of what a process
hears are made of the tangents of what the others said: of y = sum_r x_r they are y_i = sum_r x_r,i, and as much holds
for second-order rows, for nearly all collectives are linear. The rows travel with the value, along a last axis, in one
message. Before it a header of a few whole numbers goes round: a process may have rows where another has none, and
processes that disagree (on K, on what comes next) are told so in place of waiting for each other.

Operations of c10d, which write into their arguments, are programs of the functional ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import LostProcess, MissingRule, ProcessesDiffer, UnsupportedProgram
from .. import _torch_distributed as groups
from ..algebra.families import primal_of
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import MEETING, Kind, Rule, add, argument_names, name_of

functional = getattr(torch.ops, "_c10d_functional", None)
c10d = getattr(torch.ops, "c10d", None)

_LINEAR = ("sum", "avg")
_MARK = 0x6A70  # the first number of a header, by which it is told from other messages


# -- what processes say to each other -----------------------------------------------------------------------------


class _NoWayBack(torch.autograd.Function):
    """Rows of a collective, through which no backward pass goes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise UnsupportedProgram(
            "a backward pass goes through the rows of a collective, whose gradients would have to travel back; "
            "expected derivatives of collectives that are not differentiated further."
        )


def _said(op: Any, call: Callable[[], Any]) -> Any:
    """An exchange, whose failure is told in our words."""
    try:
        return call()
    except RuntimeError as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LostProcess(
            f"{name_of(op)} inside the program failed ({first}); expected all processes of its group to run the same "
            "collectives in the same order, inside a pass. How long one waits is the timeout of the group."
        ) from error


def _wait(out: Any) -> Any:
    if isinstance(out, Tensor):
        return functional.wait_tensor(out)  # type: ignore[union-attr]
    return [_wait(one) for one in out]


def _agree(op: Any, group: Any, pairs: PairSet, operands: Sequence[Any]) -> tuple[bool, bool]:
    """Whether any process has tangents, and second-order rows, of what is said; raises where they are not alike."""
    first = primal_of(operands[0])
    jets = [one for one in operands if isinstance(one, Operand)]
    has = [any(getattr(one, part) is not None for one in jets) for part in ("tangent", "second")]
    what = zlib.crc32(name_of(op).encode())
    mine = torch.tensor([_MARK, what, pairs.k, pairs.rows, *has], dtype=torch.int64, device=first.device)
    if group.size() == 1:
        return has[0], has[1]
    groups.SEEN.inside_programs = True
    name = group.group_name
    heard = _said(op, lambda: _wait(functional.all_gather_into_tensor(mine, group.size(), name)))  # type: ignore[union-attr]
    headers = heard.view(group.size(), -1).tolist()
    for number, header in enumerate(headers):
        if header[:2] != [_MARK, what]:
            raise ProcessesDiffer(
                f"process {number} of the group is not at {name_of(op)}, where process {group.rank()} is; expected the "
                "same collectives in the same order, inside a pass, on all processes."
            )
        if header[2:4] != [pairs.k, pairs.rows]:
            raise ProcessesDiffer(
                f"process {number} of the group carries K = {header[2]} directions and {header[3]} second-order rows "
                f"at {name_of(op)}, and process {group.rank()} {pairs.k} and {pairs.rows}; expected the same on all "
                "processes."
            )
    return any(header[4] for header in headers), any(header[5] for header in headers)


class _Parcel:
    """A value with its rows along a last axis, and back."""

    def __init__(self, pairs: PairSet, tangent: bool, second: bool) -> None:
        self._counts = [pairs.k if tangent else 0, pairs.rows if second else 0]

    def packed(self, x: Any) -> Tensor:
        value = primal_of(x)
        parts = [value.unsqueeze(-1)]
        for count, name in zip(self._counts, ("tangent", "second"), strict=True):
            rows = getattr(x, name) if isinstance(x, Operand) else None
            if rows is not None:
                parts.append(rows.movedim(0, -1))
            elif count:
                parts.append(value.new_zeros(()).expand(*value.shape, count))
        whole = torch.cat(parts, -1)
        return whole

    def opened(self, packed: Tensor) -> Operand:
        if packed.requires_grad:
            packed = _NoWayBack.apply(packed)
        value, *rows = packed.split([1, *self._counts], -1)
        tangent, second = (part.movedim(-1, 0).contiguous() if part.shape[-1] else None for part in rows)
        return Operand(value.squeeze(-1).contiguous(), tangent, second)


# -- linear ones --------------------------------------------------------------------------------------------------


def _bound(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(argument_names(op), args, strict=False)) | kwargs


def _is_constant(given: Any) -> bool:
    """Whether what is said has no derivative, being whole numbers or truth values."""
    first = primal_of(given[0] if isinstance(given, list | tuple) else given)
    return not (first.is_floating_point() or first.is_complex())


def _collective(pairs: PairSet, op: Any, given: Any, *rest: Any, **kwargs: Any) -> Any:
    """A linear collective of one tensor, or of a list: itself, of value and rows together."""
    several = isinstance(given, list | tuple)
    operands = list(given) if several else [given]
    values = [primal_of(one) for one in operands]
    if not operands or _is_constant(given):
        return _said(op, lambda: _wait(op(values if several else values[0], *rest, **kwargs)))
    bound = _bound(op, (given, *rest), kwargs)
    tangent, second = _agree(op, groups.group_named(bound["group_name"]), pairs, operands)
    if not (tangent or second):
        return _said(op, lambda: _wait(op(values if several else values[0], *rest, **kwargs)))
    parcel = _Parcel(pairs, tangent, second)
    packed = [parcel.packed(one) for one in operands]
    heard = _said(op, lambda: _wait(op(packed if several else packed[0], *rest, **kwargs)))
    return [parcel.opened(one) for one in heard] if several else parcel.opened(heard)


def _reduction(pairs: PairSet, op: Any, given: Any, *rest: Any, **kwargs: Any) -> Any:
    """A reduction: linear for sums and means; extrema and products are made of what all processes say."""
    bound = _bound(op, (given, *rest), kwargs)
    how = bound["reduce_op"].lower()
    if how in _LINEAR or _is_constant(given):
        return _collective(pairs, op, given, *rest, **kwargs)
    if how not in _OF_ALL or isinstance(given, list | tuple):
        raise MissingRule(f"{name_of(op)} with the reduction {how!r} has no rule", str(op))
    group = groups.group_named(bound["group_name"])
    size, value = group.size(), primal_of(given)
    tangent, second = _agree(op, group, pairs, [given])
    if not (tangent or second):
        return _said(op, lambda: _wait(op(value, *rest, **kwargs)))
    parcel = _Parcel(pairs, tangent, second)
    mine = parcel.packed(given).unsqueeze(0)
    heard = _said(op, lambda: _wait(functional.all_gather_into_tensor(mine, size, group.group_name)))  # type: ignore[union-attr]
    found = _OF_ALL[how](pairs, [parcel.opened(part) for part in heard.unbind(0)])
    if op.overloadpacket is functional.reduce_scatter_tensor:  # type: ignore[union-attr]
        parts = (None if part is None else part.chunk(size, axis)[group.rank()] for axis, part in _axes(found))
        found = Operand(*parts)  # type: ignore[arg-type]
    return found


def _axes(x: Operand) -> list[tuple[int, Tensor | None]]:
    return [(0, x.primal), (1, x.tangent), (1, x.second)]


def _extremum(sign: float) -> Callable[[PairSet, list[Operand]], Operand]:
    """The largest (sign 1) or smallest (-1) over processes; where several have it, their rows are averaged."""

    def of(pairs: PairSet, operands: list[Operand]) -> Operand:
        values = torch.stack([one.primal for one in operands])
        y = values.amax(0) if sign > 0 else values.amin(0)
        chosen = (values == y).to(y.dtype)
        share = chosen / chosen.sum(0)

        def rows(name: str) -> Tensor | None:
            parts = [getattr(one, name) for one in operands]
            if parts[0] is None:
                return None
            total = share[0] * parts[0]
            for weight, part in zip(share[1:], parts[1:], strict=True):
                total = total + weight * part
            return total

        return Operand(y, rows("tangent"), rows("second"))

    return of


def _product(pairs: PairSet, operands: list[Operand]) -> Operand:
    """The product over processes, by one factor after the other."""
    y, tangent, second = operands[0].primal, operands[0].tangent, operands[0].second
    for one in operands[1:]:
        x, xt, xs = one.primal, one.tangent, one.second
        if pairs.rows:
            terms = [None if second is None else second * x, None if xs is None else xs * y]
            terms.append(None if tangent is None or xt is None else pairs.cross(tangent, xt))
            present = [term for term in terms if term is not None]
            second = sum(present[1:], present[0]) if present else None
        if tangent is not None and xt is not None:
            tangent = tangent * x + xt * y
        y = y * x
    return Operand(y, tangent, second)


_OF_ALL = {"max": _extremum(1.0), "min": _extremum(-1.0), "product": _product}


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over the processes of a group, inside of a program."""
    out: Tensor = functional.all_reduce(x, "sum", group.group_name)  # type: ignore[union-attr]
    return out


# -- the operations of c10d -----------------------------------------------------------------------------------------


class _Group:
    """A process group, for the bodies below."""

    def __init__(self, script: Any) -> None:
        group = groups.group_behind(script)
        self.size, self.rank, self.name = group.size(), group.rank(), group.group_name

    def reduced(self, x: Tensor, op: Any) -> Tensor:
        how = groups.reduction_behind(op)
        out: Tensor = functional.all_reduce(x, how, self.name)  # type: ignore[union-attr]
        return out

    def gathered(self, x: Tensor) -> Tensor:
        """(processes, *S)"""
        out: Tensor = functional.all_gather_into_tensor(x.unsqueeze(0).contiguous(), self.size, self.name)  # type: ignore[union-attr]
        return out

    def scattered(self, x: Tensor, op: Any) -> Tensor:
        """The part (1, ...) of this process of the reduced (processes, ...)."""
        how = groups.reduction_behind(op)
        out: Tensor = functional.reduce_scatter_tensor(x.contiguous(), how, self.size, self.name)  # type: ignore[union-attr]
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        out: Tensor = functional.broadcast(x, source, self.name)  # type: ignore[union-attr]
        return out

    def exchanged(self, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        out: Tensor = functional.all_to_all_single(x.contiguous(), list(received), list(sent), self.name)  # type: ignore[union-attr]
        return out


def _allreduce_(tensors: Any, group: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    for tensor in tensors:
        tensor.copy_(place.reduced(tensor, op))
    return tensors, groups.finished(tensors)


def _allreduce_coalesced_(tensors: Any, group: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    return _allreduce_(tensors, group, op)[1]


def _reduce_(tensors: Any, group: Any, op: Any, root: int, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    for tensor in tensors:
        found = place.reduced(tensor, op)
        if place.rank == root:  # on the others nothing is promised: they keep what they have
            tensor.copy_(found)
    return groups.finished(tensors)


def _broadcast_(tensors: Any, group: Any, root: int, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    for tensor in tensors:
        tensor.copy_(place.broadcast(tensor, root))
    return tensors, groups.finished(tensors)


def _allgather_(outputs: Any, inputs: Any, group: Any, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    for outs, x in zip(outputs, inputs, strict=True):
        if any(out.shape != x.shape for out in outs):
            raise MissingRule("c10d.allgather_ of tensors of several shapes has no rule", "c10d.allgather_")
        for out, part in zip(outs, place.gathered(x).unbind(0), strict=True):
            out.copy_(part)
    return outputs, groups.finished([out for outs in outputs for out in outs])


def _allgather_base_(output: Tensor, x: Tensor, group: Any, *rest: Any, **kwargs: Any) -> Any:
    output.copy_(_Group(group).gathered(x).reshape(output.shape))
    return output, groups.finished([output])


def _allgather_into_tensor_coalesced_(outputs: Any, inputs: Any, group: Any, *rest: Any, **kwargs: Any) -> Any:
    for output, x in zip(outputs, inputs, strict=True):
        _allgather_base_(output, x, group)
    return groups.finished(outputs)


def _reduce_scatter_(outputs: Any, inputs: Any, group: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    for output, parts in zip(outputs, inputs, strict=True):
        if any(part.shape != output.shape for part in parts):
            raise MissingRule("c10d.reduce_scatter_ of tensors of several shapes has no rule", "c10d.reduce_scatter_")
        output.copy_(place.scattered(torch.stack(list(parts)), op).squeeze(0))
    return outputs, groups.finished(outputs)


def _reduce_scatter_base_(output: Tensor, x: Tensor, group: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    output.copy_(place.scattered(x.reshape(place.size, -1), op).reshape(output.shape))
    return output, groups.finished([output])


def _reduce_scatter_tensor_coalesced_(outputs: Any, inputs: Any, group: Any, op: Any, *rest: Any, **kwargs: Any) -> Any:
    for output, x in zip(outputs, inputs, strict=True):
        _reduce_scatter_base_(output, x, group, op)
    return groups.finished(outputs)


def _alltoall_base_(
    output: Tensor, x: Tensor, group: Any, received: Sequence[int], sent: Sequence[int], *rest: Any, **kwargs: Any
) -> Any:
    place = _Group(group)
    even = [[tensor.shape[0] // place.size] * place.size for tensor in (output, x)]
    output.copy_(place.exchanged(x, received or even[0], sent or even[1]).reshape(output.shape))
    return groups.finished([output])


def _alltoall_(outputs: Any, inputs: Any, group: Any, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    received, sent = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
    flat = place.exchanged(torch.cat([x.reshape(-1) for x in inputs]), received, sent)
    for output, part in zip(outputs, flat.split(received), strict=True):
        output.copy_(part.reshape(output.shape))
    return outputs, groups.finished(outputs)


def _gather_(outputs: Any, inputs: Any, group: Any, root: int, *rest: Any, **kwargs: Any) -> Any:
    place = _Group(group)
    found = place.gathered(inputs[0])
    if place.rank == root:
        for output, part in zip(outputs[0], found.unbind(0), strict=True):
            output.copy_(part)
    return groups.finished([out for outs in outputs for out in outs])


def _scatter_(outputs: Any, inputs: Any, group: Any, root: int, *rest: Any, **kwargs: Any) -> Any:
    place, output = _Group(group), outputs[0]
    mine = torch.stack(list(inputs[0])) if place.rank == root else output.new_zeros((place.size, *output.shape))
    output.copy_(place.broadcast(mine, root)[place.rank])
    return outputs, groups.finished(outputs)


def _shard_dim_alltoall(x: Tensor, gathered: int, cut: int, name: Any) -> Tensor:
    """A DTensor that is cut along one axis is cut along another."""
    size = groups.group_named(name).size()
    sent = torch.stack(x.chunk(size, cut))
    ones = [1] * size
    return torch.cat(functional.all_to_all_single(sent, ones, ones, name).unbind(0), gathered)  # type: ignore[union-attr]


def _from_one_to_one(pairs: PairSet, op: Any, *args: Any, **kwargs: Any) -> Any:
    raise MissingRule(
        f"{name_of(op)} is given a perturbed tensor, and tangents do not travel from one process to one other: "
        "all_to_all and broadcast have rules",
        str(op),
    )


# -- the table ----------------------------------------------------------------------------------------------------


def _known(namespace: Any, names: Sequence[str]) -> list[Any]:
    """The operations of these names that torch has."""
    return [getattr(namespace, name) for name in names if hasattr(namespace, name)]


_INTO = ("all_reduce_", "all_reduce_coalesced_", "broadcast_")  # write what their namesakes without _ return
_C10D: dict[str, Callable[..., Any]] = {
    "allreduce_": _allreduce_,
    "allreduce_coalesced_": _allreduce_coalesced_,
    "reduce_": _reduce_,
    "broadcast_": _broadcast_,
    "allgather_": _allgather_,
    "_allgather_base_": _allgather_base_,
    "allgather_into_tensor_coalesced_": _allgather_into_tensor_coalesced_,
    "reduce_scatter_": _reduce_scatter_,
    "_reduce_scatter_base_": _reduce_scatter_base_,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensor_coalesced_,
    "alltoall_base_": _alltoall_base_,
    "alltoall_": _alltoall_,
    "gather_": _gather_,
    "scatter_": _scatter_,
}


_POINT_TO_POINT = ("send", "recv_", "recv_any_source_", "allgather_coalesced_")


def _written(op: Any) -> Callable[..., Any]:
    """The program of an operation that writes what another one returns."""

    def body(given: Any, *rest: Any) -> Any:
        out = op(given, *rest)
        for target, value in zip(given, out, strict=True) if isinstance(given, list) else [(given, out)]:
            target.copy_(value)
        return given

    return body


def _written_out(op: Any) -> Callable[..., Any]:
    def body(*args: Any, out: Tensor) -> Tensor:
        return out.copy_(op(*args))

    return body


def _enter() -> None:
    linear = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_to_all_single", "broadcast")
    reducing = ("all_reduce", "all_reduce_coalesced", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
    for op in _known(functional, linear):
        add(op, Rule("linear", Kind.JET, _collective, MEETING))
    for op in _known(functional, reducing):
        add(op, Rule("linear", Kind.JET, _reduction, MEETING))
    for op in _known(functional, ("wait_tensor", "_wrap_tensor_autograd")):
        add(op, Rule("view", Kind.VIEW, primal_of))
    for op in _known(functional, _INTO):
        body = _written(getattr(functional, op.__name__.removesuffix("_")))
        add(op.default, Rule("composite", Kind.COMPOSITE, body, MEETING))
    for op in _known(functional, ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")):
        body = _written_out(getattr(functional, op.__name__.removesuffix("_out")))
        add(op.default, Rule("composite", Kind.COMPOSITE, body, MEETING))
    for op in _known(c10d, _POINT_TO_POINT):
        add(op.default, Rule("refused", Kind.JET, _from_one_to_one))
    for name, body in _C10D.items():
        for op in _known(c10d, (name,)):
            add(op.default, Rule("composite", Kind.COMPOSITE, body, MEETING))


_enter()
add("_dtensor.shard_dim_alltoall", Rule("composite", Kind.COMPOSITE, _shard_dim_alltoall, MEETING))
