"""The table where operations and their rules meet. It knows no operation and no engine.

A rule belongs to a family (:mod:`jetplane.ad.algebra.families`). It is looked up by overload, then by overload packet;
in-place and out= variants use the rule of their functional counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

import torch

from .. import _torch
from ..storage_geometry import declared


class Kind(Enum):
    """What the engine does with an operation that touches perturbed tensors."""

    CONSTANT = "constant"  # derivative zero everywhere: run it
    JET = "jet"  # call the rule with jets in place of the perturbed tensors
    COMPOSITE = "composite"  # run the rule's body with the engine active
    VIEW = "view"  # rows follow from the shared storage: run it
    INPLACE = "in-place"  # the functional counterpart's rule, then a write
    MISSING = "missing"


@dataclass(frozen=True)
class Traits:
    """What the engine makes use of, where a rule says it of itself."""

    pointwise: bool = False  # each entry of a result depends on one entry of each argument
    sparse: bool = False  # takes the tangents of some directions alone as they are, and outer products
    hidden: bool = False  # torch's own body, in which the calls are not the user's
    as_it_is: bool = False  # an autograd.Function whose own forward body is what is differentiated
    gathers: bool = False  # entries of the first tensor, at places that whole numbers or masks tell
    chooses: bool = False  # between entries that stand at the same place, as a condition tells
    meets: bool = False  # other processes take part, who may have rows of it where this one has none


PLAIN, POINTWISE, SPARSE, _HIDDEN = Traits(), Traits(pointwise=True), Traits(sparse=True), Traits(hidden=True)
MEETING, CHOOSES, GATHERS = Traits(meets=True), Traits(chooses=True), Traits(gathers=True)


@dataclass(frozen=True)
class Rule:
    """A rule as it stands in the table."""

    family: str
    kind: Kind
    apply: Callable[..., Any]
    traits: Traits = PLAIN


@dataclass(frozen=True)
class Treatment:
    """How the engine treats one overload."""

    kind: Kind
    family: str
    apply: Callable[..., Any] | None = None
    functional: Any = None  # for INPLACE: the counterpart's overload
    counterpart: Treatment | None = None  # and its plan
    writes: tuple[str, ...] = ()  # names of the arguments that the operation writes
    traits: Traits = PLAIN


_TABLE: dict[Any, Rule] = {}
_COMPLEX: dict[Any, Rule | None] = {}  # of complex numbers; None: the rule in the table holds for them as it stands
_F = TypeVar("_F", bound=Callable[..., Any])
_DERIVED: list[Any] = []


def derived(function: _F) -> _F:
    """The function of an operation, its results kept for as long as the table stays what it is."""
    kept: Any = cache(function)
    _DERIVED.append(kept)
    return cast(_F, kept)


def forget() -> None:
    """The table has changed, or one that is read beside it."""
    for one in _DERIVED:
        one.cache_clear()


def add(op: Any, rule: Rule) -> None:
    """Enter ``rule`` for an overload, an overload packet or a subclass of torch.autograd.Function.

    ``op`` may also be its dotted name, such as "torchvision.roi_align": a rule for a package that need not be there.
    """
    if op in _TABLE:
        family = _TABLE[op].family
        raise ValueError(f"{name_of(op)} already has a rule of family {family!r}; expected one rule for each.")
    _TABLE[op] = rule
    forget()


def add_for_complex(op: Any, rule: Rule | None = None) -> None:
    """Enter the rule of ``op`` for complex numbers; without one, its rule for real numbers holds for them, too."""
    if op in _COMPLEX:
        raise ValueError(f"{name_of(op)} already has a rule for complex numbers; expected one rule for each.")
    _COMPLEX[op] = rule
    forget()


def remove(op: Any) -> None:
    """Take the rule of ``op`` out of the table."""
    if op not in _TABLE:
        raise ValueError(f"{name_of(op)} has no rule to remove.")
    del _TABLE[op]
    _COMPLEX.pop(op, None)
    forget()


def lookup(op: Any) -> Rule | None:
    """The registered rule of an overload, of its packet, of an autograd.Function, or of the name of one of these."""
    rule = _TABLE.get(op)
    if rule is None and isinstance(op, _torch.OpOverload):
        rule = _TABLE.get(op.overloadpacket)
    return rule if rule is not None else _TABLE.get(dotted(op))


def dotted(op: Any) -> str:
    """The name under which an overload's packet or an autograd.Function is found in the table.

    >>> dotted(torch.ops.aten.mul.Tensor), dotted(torch.autograd.Function)
    ('aten.mul', 'torch.autograd.function.Function')
    """
    if isinstance(op, type):
        return f"{op.__module__}.{op.__qualname__}"
    return str(op.overloadpacket if isinstance(op, _torch.OpOverload) else op)


def registered() -> dict[Any, Rule]:
    """A copy of the table."""
    return dict(_TABLE)


def name_of(op: Any) -> str:
    """The name of an operation as messages print it."""
    return op.__name__ if isinstance(op, type) else str(op)


@cache
def argument_names(op: Any) -> tuple[str, ...]:
    """The names of an overload's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


@derived
def is_elementwise(op: Any) -> bool:
    """Whether each entry of the result depends on one entry of each argument, and on nothing drawn at random.

    On a function of parameters and constants such an operation makes another one: scale * (p - start) ** 2.
    """
    return plan(op).traits.pointwise and torch.Tag.nondeterministic_seeded not in op.tags


@derived
def plan(op: Any) -> Treatment:
    """How the engine treats overload ``op`` when it touches a perturbed tensor."""
    if op.namespace == "prim":  # a tracer's questions: prim.device of a tensor without values
        return Treatment(Kind.CONSTANT, "constant")
    rule = _TABLE.get(op)
    writes = declared(op)
    if rule is None and writes:
        return _inplace(op, writes)
    rule = lookup(op)
    if rule is not None:
        return Treatment(rule.kind, rule.family, rule.apply, writes=writes, traits=rule.traits)
    if op.is_view:
        return Treatment(Kind.VIEW, "view")
    if _torch.is_composite(op):
        return Treatment(Kind.COMPOSITE, "torch composite", op.decompose, traits=_HIDDEN)
    body = _torch.prim_body(op) or _torch.decomposition(op)
    if body is not None:
        return Treatment(Kind.COMPOSITE, "torch decomposition", body)
    return Treatment(Kind.MISSING, "missing")


FOR_COMPLEX = "missing for complex numbers"
_REAL_LINEAR = frozenset(("linear", "bilinear"))  # families whose rules apply the operation itself, to any numbers


@derived
def plan_for_complex(op: Any) -> Treatment:
    """How the engine treats overload ``op`` when a complex number is among its arguments.

    Complex numbers are pairs of real ones, and rows of theirs are complex, too. What is linear over the real numbers,
    as conj, is as linear as ever; any other rule must be known to hold.
    """
    step = plan(op)
    if step.kind is Kind.MISSING:
        return step
    if step.counterpart is not None:
        inner = plan_for_complex(step.functional)
        if inner.kind is Kind.MISSING:
            return Treatment(Kind.MISSING, inner.family, writes=step.writes)
        return replace(step, counterpart=inner)
    found = next((_COMPLEX[key] for key in (op, op.overloadpacket) if key in _COMPLEX), step)
    if isinstance(found, Rule):
        return Treatment(found.kind, found.family, found.apply, writes=step.writes, traits=found.traits)
    holds = step.kind in (Kind.VIEW, Kind.CONSTANT) or step.family in _REAL_LINEAR or step.family == "torch composite"
    return step if holds or found is None else Treatment(Kind.MISSING, FOR_COMPLEX, writes=step.writes)


def _inplace(op: Any, writes: tuple[str, ...]) -> Treatment:
    functional = _functional_counterpart(op)
    if functional is None:
        if _torch.is_composite(op):
            return Treatment(Kind.COMPOSITE, "torch composite", op.decompose, traits=_HIDDEN)
        # transpose_, squeeze_ and their like change the tensor's geometry, not its storage
        if "inplace_view" in {tag.name for tag in op.tags}:
            return Treatment(Kind.VIEW, "view")
        return Treatment(Kind.MISSING, "missing", writes=writes)
    if "inplace_view" in {tag.name for tag in op.tags}:
        return Treatment(Kind.VIEW, "view")
    inner = plan(functional)
    if inner.kind is Kind.MISSING:
        return Treatment(Kind.MISSING, "missing", writes=writes)
    return Treatment(Kind.INPLACE, inner.family, None, functional, inner, writes, inner.traits)


def _functional_counterpart(op: Any) -> Any:
    """``aten.mul.Tensor`` for ``aten.mul_.Tensor`` and for ``aten.mul.out``; None where there is none."""
    namespace = getattr(torch.ops, op.namespace)
    packet_name = op.overloadpacket.__name__.removesuffix("_")
    packet = getattr(namespace, packet_name, None)
    if packet is None:
        return None
    wanted = [str(a.type) for a in op._schema.arguments if not a.is_out]
    names = [a.name for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = candidate._schema.arguments
        if candidate._schema.is_mutable:
            continue
        if [a.name for a in arguments] == names and [str(a.type) for a in arguments] == wanted:
            return candidate
    return None
