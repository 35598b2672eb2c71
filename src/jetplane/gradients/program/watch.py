"""The engine, watched: which operations of a program have parameters, and which depend on them.

Values are of four kinds. *Parameters* are the wanted tensors, their views, and what is made of parameters alone;
*variable* is what depends on parameters and data; *born* are constants that the program makes; all else is data. An
operation with a variable argument, or with a parameter and data, is a *node*. Nodes are numbered in order, and the
numbers are the same in every pass, whether tangents are carried or not.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ad import _torch
from ...ad.algebra.jet import Operand, PairSet
from ...ad.algebra.registry import Kind, Treatment, derived, is_elementwise, plan
from ...ad.engine.interpreter import JetMode
from ...ad.engine.locate import call_site
from ...ad.engine.results import refuse_layout, refuse_reinterpretation, refuse_results
from ...ad.rules.attention import KERNELS, added, bias_of, drops, options_of
from ...ad.storage_geometry import written
from ...errors import UnsupportedProgram
from .parameters import Parameters

__all__ = [
    "Path",
    "Phase",
    "Visit",
    "WatchMode",
    "any_complex",
    "as_real",
    "at",
    "broadcast",
    "functional",
    "outputs",
    "replaced",
]

aten = torch.ops.aten
Path = tuple[int | str, ...]  # of a tensor among an operation's arguments: (0,), (0, 2) in a list, ("weight",)

_PARAMETER, _VARIABLE, _BORN, _DATA, _MORE = "parameter", "variable", "born", "data", "more than a parameter"
_SEVERAL = (list, tuple)
_COPIES = (aten.copy_.default, aten.fill_.Tensor)


@dataclass(frozen=True, eq=False)
class Visit:
    """A node that is about to run, or has run."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    variables: list[tuple[Path, Tensor]]
    parameters: list[tuple[Path, Tensor]]
    step: Treatment  # the engine's, of the operation
    functional: Any  # the operation, or that which it performs in place
    written: list[Tensor]


class Phase(Protocol):
    """What a pass does at the nodes."""

    def before(self, mode: WatchMode, visit: Visit) -> None: ...
    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None: ...
    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None: ...
    def same(self, tensor: Tensor, other: Tensor) -> None: ...
    def wrote(self, tensor: Tensor) -> None: ...
    def seen(self, func: Any, args: Any, kwargs: Any) -> None: ...


class WatchMode(JetMode):
    """Carries tangents as the engine does, and tells a phase about the nodes."""

    def __init__(self, pairs: PairSet, parameters: Parameters, phase: Phase, probing: bool = False) -> None:
        super().__init__(pairs)
        self._probing = probing  # tangents are NaN or zero: what matters is where a mask of attention lets them pass
        self._parameters = parameters
        self._phase = phase
        for tensor in () if parameters.wholes.any else parameters.tensors:
            self.earlier.begin(tensor)
        self._kinds: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # by storage
        self._changes: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()  # likewise
        self._nodes = 0
        self._quiet = False  # inside a node, whose own operations are not nodes

    @property
    def nodes(self) -> int:
        """How many nodes have run."""
        return self._nodes

    def origin(self, tensor: Tensor) -> tuple[Any, ...]:
        """Where a variable tensor comes from: what last touched its memory, and where in it the entries lie."""
        return self._changes.get(tensor.untyped_storage()), tensor.stride(), int(tensor.storage_offset())

    def number(self, parameter: Tensor) -> int | None:
        """Which of the parameters a tensor is, or is a view of; None for what is made of them."""
        return self._parameters.find(parameter)

    def inject(self, tensor: Tensor, rows: Tensor) -> None:
        """Add ``rows`` (K, *S) to the tangents of a value of the program."""
        tangent = self.jet(tensor).tangent
        self.replace(tensor, rows if tangent is None else tangent + rows)

    def replace(self, tensor: Tensor, rows: Tensor) -> None:
        """Let ``rows`` (K, *S) be the tangents of a value of the program."""
        self._overwrite(tensor, Operand(tensor, rows, None))

    def tracks(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` depends on a parameter, whether or not it carries tangents in this pass."""
        return super().tracks(tensor) or self._kind(tensor) in (_PARAMETER, _VARIABLE)

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet or type(func) is not _torch.OpOverload:  # of higher order: its bodies are parts of the program
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._phase.seen(func, args, kwargs)
        if self.switches.off:
            return self._constant(func, args, kwargs)
        given = _tensors(args, kwargs)
        if self._others:
            self._refuse_meetings(func, given)
        kinds = [self._kind(tensor) for _, tensor in given]
        if _MORE in kinds:
            out = self._part(func, types, args, kwargs, given)
        elif _VARIABLE not in kinds and _PARAMETER not in kinds:
            return self._independent(func, types, args, kwargs, kinds)
        else:
            out = self._dependent(func, types, args, kwargs, given, kinds)
        if self.earlier.any:
            self.earlier.note(out, args)
        return out

    def _refuse_meetings(self, func: Any, given: Any) -> None:
        if plan(func).traits.meets and any(tensor.is_floating_point() for _, tensor in given):
            raise UnsupportedProgram(
                f"{call_site(str(func))} is a collective, behind which the noise of one process is in the losses of "
                "others, who do not know it; expected a program without collectives, or estimator='weight', or an "
                "optimizer that searches a plane."
            )

    def _independent(self, func: Any, types: Any, args: Any, kwargs: Any, kinds: list[str]) -> Any:
        """An operation on constants: what is made of none of the data is born."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if _DATA not in kinds:
            self._mark(out, _BORN)
        return out

    def _dependent(self, func: Any, types: Any, args: Any, kwargs: Any, given: Any, kinds: list[str]) -> Any:
        """An operation on something that depends on parameters: a node, or one of the cases that are none."""
        if func is aten.detach.default:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self._phase.same(out, args[0])
            return out
        step = plan(func)
        kind = step.kind if step.kind is not Kind.INPLACE else _performed(step).kind
        if kind is Kind.CONSTANT:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self._note_writes(func, args, kwargs)
            return out
        if _VARIABLE not in kinds and self._is_parametrisation(func, step, given, kinds):
            return self._parametrised(func, args, kwargs)
        if _PARAMETER in kinds and func in KERNELS:
            return self._unfused(func, args, kwargs)
        if kind is Kind.COMPOSITE and func not in _COPIES:
            return self._decomposed(step, func, args, kwargs)
        return self._visit(step, func, types, args, kwargs, given, kinds)

    def _parametrised(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that makes a parameter of parameters."""
        out = func(*args, **kwargs)
        for tensor in outputs(out):
            refuse_layout(func, tensor)
        self._mark(out, _PARAMETER)
        self._phase.parametrised(func, args, kwargs, out)
        return out

    def _part(self, func: Any, types: Any, args: Any, kwargs: Any, given: Any) -> Any:
        """An operation on memory that is more than a parameter: a view of it may be one, and all else is refused."""
        if func is aten.detach.default or plan(func).kind in (Kind.VIEW, Kind.CONSTANT):
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensor = next(tensor for _, tensor in given if self._kind(tensor) == _MORE)
        raise UnsupportedProgram(
            f"{call_site(str(func))} uses a tensor {tuple(tensor.shape)} of which only a part is "
            f"{', '.join(self._parameters.touched(tensor))}; expected parameters that are used as they are, or views."
        )

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._constant(func, args, kwargs)
        self._note_writes(func, args, kwargs)
        return out

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        """A write of constants into memory that may hold something variable."""
        for tensor in written(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage in self._changes:
                node, count = self._changes[storage]
                self._changes[storage] = node, count + 1
            self._phase.wrote(tensor)

    def _visit(
        self, step: Treatment, func: Any, types: Any, args: Any, kwargs: Any, given: Any, kinds: list[str]
    ) -> Any:
        targets = written(func, args, kwargs)
        if targets:
            self._refuse_writes(func, targets)
        variables: list[tuple[Path, Tensor]] = []
        parameters: list[tuple[Path, Tensor]] = []
        for one, kind in zip(given, kinds, strict=True):
            if kind == _VARIABLE:
                variables.append(one)
            elif kind == _PARAMETER:
                parameters.append(one)
        made = step.functional if step.kind is Kind.INPLACE else func
        visit = Visit(self._nodes, func, args, kwargs, variables, parameters, step, made, targets)
        self._phase.before(self, visit)
        out = self._run(func, types, args, kwargs)
        if step.kind is Kind.VIEW:
            refuse_reinterpretation(func, (variables or parameters)[0][1].dtype, out)
        refuse_results(func, out)
        self._mark(out, _VARIABLE, (self._nodes, 0))
        self._nodes += 1
        self._phase.after(self, visit, out)
        return out

    def _refuse_writes(self, func: Any, targets: list[Tensor]) -> None:
        for tensor in targets:
            if self._parameters.find(tensor) is not None and not self.is_stopped(tensor):
                raise UnsupportedProgram(
                    f"{call_site(str(func))} writes into a parameter while its gradient is estimated; expected a "
                    "program that leaves them alone."
                )

    def _write_values(self, func: Any, args: Any, kwargs: Any, targets: list[Tensor]) -> Any:
        # what is variable is known by its memory here, and the others who share this are not
        raise UnsupportedProgram(
            f"{call_site(str(func))} writes what depends on parameters into a detached tensor, whose memory it shares "
            "with others; expected it under torch.no_grad(), or a write into a clone."
        )

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        is_attention = func in KERNELS
        if is_attention and not self._tracked(args, kwargs) and drops(func, args, kwargs):
            # with tangents the weights are dropped outside of the kernel, so they are without them too
            lifted = [Operand(args[0], None, None), *args[1:]]
            with self.above():
                out = plan(func).apply(self.pairs, func, *lifted, **kwargs)  # type: ignore[misc]
            return self._return(out, args)
        self._quiet = func in _COPIES  # which the engine may run as a program
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._quiet = False
        if self._probing and is_attention:
            with self.above():
                self._lose(out[0], args[:3], options_of(func, args, kwargs))
        return out

    def _lose(self, out: Tensor, given: Any, options: dict[str, Any]) -> None:
        """What is lost behind attention. The rule multiplies masked scores by zero, which leaves NaN as it is."""
        bias, rows = bias_of(options), [self.jet(x).tangent for x in given]
        if (bias is not None and self.tracks(bias)) or all(row is None for row in rows):
            return
        query, key, _ = given
        scores = query.new_zeros((query.shape[-2], key.shape[-2]))
        allowed = added(bias, scores, options.get("is_causal", False)) > -math.inf
        lost = _lost(rows, allowed, query.shape[-3] // key.shape[-3])
        tangent = torch.where(lost, math.nan, 0.0).to(out.dtype).unsqueeze(-1)
        self._overwrite(out, Operand(out, tangent.expand(-1, *out.shape).contiguous(), None))

    def _decomposed(self, step: Treatment, func: Any, args: Any, kwargs: Any) -> Any:
        """The nodes of a composite are those of its body."""
        if step.kind is Kind.INPLACE:
            return self._decomposed_write(step, func, args, kwargs)
        return self._handed_back(self._apply(step, func, args, kwargs, []), args)

    def _decomposed_write(self, step: Treatment, func: Any, args: Any, kwargs: Any) -> Any:
        """One that writes: the body of its counterpart, copied to where the results belong."""
        assert step.counterpart is not None
        outs = {a.name for a in func._schema.arguments if a.is_out}
        inputs = {name: value for name, value in kwargs.items() if name not in outs}
        result = self._handed_back(self._apply(step.counterpart, step.functional, args, inputs, []), args)
        targets = written(func, args, kwargs)
        for target, one in zip(targets, outputs(result), strict=False):
            if outs and target.shape != one.shape:
                target.resize_(one.shape)
            with self:
                target.copy_(one)
        return targets[0] if len(targets) == 1 else tuple(targets)

    def _unfused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention with a parameter among its operands, a learned query or bias: its products one by one."""
        options = options_of(func, args, kwargs)
        with self.above(), _torch.no_function_modes(), self:
            out, _ = aten._scaled_dot_product_attention_math(
                *args[:3],
                bias_of(options),
                options.get("dropout_p", 0.0),
                options.get("is_causal", False),
                scale=options.get("scale"),
                enable_gqa=args[0].shape[-3] != args[1].shape[-3],
            )
        return self._handed_back(out, args), *func(*args, **kwargs)[1:]

    def _handed_back(self, out: Any, args: Any) -> Any:
        """What the program gets of a composite's results: the same values, if not the same tensors."""
        result = self._return(out, args)
        for tensor, other in zip(outputs(result), outputs(out), strict=True):
            if tensor is not other:
                self._phase.same(tensor, other)
        return result

    # -- kinds ------------------------------------------------------------------------------------------------------

    def _kind(self, tensor: Tensor) -> str:
        if tensor.layout is not torch.strided or (self._stopped and self.is_stopped(tensor)):
            return _DATA
        storage = tensor.untyped_storage()
        if storage in self._parameters.places:
            if self.earlier.any and self.earlier.is_one(tensor):
                return _DATA
            if self._parameters.find(tensor) is not None:
                return _PARAMETER
            if self._parameters.touched(tensor):
                return _MORE
        if self._parameters.parts:
            self._parameters.check_whole(tensor)
        return self._kinds.get(storage, _DATA)

    def _mark(self, out: Any, kind: str, change: tuple[int, int] | None = None) -> None:
        """Enter what the results are, and what has last touched their memory, if it was a node."""
        places = self._parameters.places
        for tensor in outputs(out):
            storage = tensor.untyped_storage()
            if change is not None:
                self._changes[storage] = change
            if storage not in places or self._parameters.find(tensor) is None:
                differentiable = tensor.is_floating_point() or tensor.is_complex()
                self._kinds[storage] = kind if differentiable or kind == _BORN else _BORN

    def _is_parametrisation(self, func: Any, step: Treatment, given: Any, kinds: list[str]) -> bool:
        """Whether the result is made of parameters alone, or of them and constants that are as good as numbers."""
        if step.writes and not self._is_made(given[0][1], kinds[0]):
            return False
        tensors = [tensor for _, tensor in given]
        if all(tensor.ndim == 0 for tensor, kind in zip(tensors, kinds, strict=True) if kind != _PARAMETER):
            return True
        if is_elementwise(func):
            return _is_as_large(tensors, kinds)
        return step.traits.gathers and {_PARAMETER, _BORN}.issuperset(kinds)

    def _is_made(self, target: Tensor, kind: str) -> bool:
        """Whether a target is made of parameters: a write into a constant, or into a parameter itself, is a node."""
        return kind == _PARAMETER and self._parameters.find(target) is None


def _is_as_large(tensors: list[Tensor], kinds: list[str]) -> bool:
    """Whether the result of an elementwise operation is as large as one of its parameters."""
    whole = broadcast(tensor.shape for tensor in tensors)
    return any(tensor.shape == whole for tensor, kind in zip(tensors, kinds, strict=True) if kind == _PARAMETER)


def broadcast(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape of what is made of tensors of these shapes, entry by entry; torch's own imports its symbolic shapes.

    Example:
        >>> broadcast([(4, 1), (3,), (2, 1, 1)])
        (2, 4, 3)
    """
    axes = zip_longest(*(tuple(shape)[::-1] for shape in shapes), fillvalue=1)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in axes)[::-1]


def _lost(rows: list[Tensor | None], allowed: Tensor, shared: int) -> Tensor:
    """(K, B, H, L): which tokens read something that is NaN, of attention with tangents ``rows`` of its operands."""
    query, *read = rows
    lost = torch.zeros((), dtype=torch.bool, device=allowed.device) if query is None else query.isnan().any(-1)
    for row in read:
        if row is not None:
            seen = row.isnan().any(-1).repeat_interleave(shared, -2)
            lost = lost | (seen.unsqueeze(-2) & allowed).any(-1)
    return lost


def _performed(step: Treatment) -> Treatment:
    """The treatment of what an operation computes, be it in place."""
    return step.counterpart if step.kind is Kind.INPLACE and step.counterpart is not None else step


@derived
def functional(func: Any) -> Any:
    """The operation that ``func`` is, or that it performs in place."""
    step = plan(func)
    return step.functional if step.kind is Kind.INPLACE else func


def outputs(out: Any) -> list[Tensor]:
    """The tensors that an operation returned."""
    if isinstance(out, Tensor):
        return [out]
    return [one for one in out if isinstance(one, Tensor)] if isinstance(out, tuple | list) else []


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, (*S, 2); real ones as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def any_complex(args: Any, kwargs: Any) -> bool:
    """Whether there are complex tensors among an operation's arguments."""
    return any(tensor.is_complex() for _, tensor in _tensors(args, kwargs))


def at(path: Path, args: Any, kwargs: Any) -> Any:
    """The argument at ``path``."""
    value: Any = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for index in path[1:]:
        value = value[index]
    return value


def replaced(path: Path, args: Any, kwargs: Any, value: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with another value at ``path``."""
    args, kwargs = list(args), dict(kwargs)
    holder: Any = kwargs if isinstance(path[0], str) else args
    key: Any = path[0]
    for index in path[1:]:
        holder[key] = list(holder[key])
        holder, key = holder[key], index
    holder[key] = value
    return args, kwargs


def _tensors(args: Any, kwargs: Any) -> list[tuple[Path, Tensor]]:
    found: list[tuple[Path, Tensor]] = []
    _collect_tensors((), enumerate(args), found)
    if kwargs:
        _collect_tensors((), kwargs.items(), found)
    return found


def _collect_tensors(path: Path, values: Iterable[tuple[int | str, Any]], found: list[tuple[Path, Tensor]]) -> None:
    # not a function inside the other: one that calls itself is a cycle, which would keep the tensors alive
    for place, value in values:
        if isinstance(value, Tensor):
            found.append(((*path, place), value))
        elif isinstance(value, _SEVERAL):
            _collect_tensors((*path, place), enumerate(value), found)
