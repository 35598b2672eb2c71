"""The table where operations and their rules meet. It knows no operation and no engine.

A rule belongs to a family (:mod:`jetplane.ad.families`). It is looked up by overload, then by overload packet;
in-place and out= variants use the rule of their functional counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from . import _torch


class Kind(Enum):
    """What the engine does with an operation that touches perturbed tensors."""

    CONSTANT = "constant"  # derivative zero everywhere: run it
    JET = "jet"  # call the rule with jets in place of the perturbed tensors
    COMPOSITE = "composite"  # run the rule's body with the engine active
    VIEW = "view"  # rows follow from the shared storage: run it
    INPLACE = "in-place"  # the functional counterpart's rule, then a write
    MISSING = "missing"


@dataclass(frozen=True)
class Rule:
    """A rule as it stands in the table."""

    family: str
    kind: Kind
    apply: Callable[..., Any]


@dataclass(frozen=True)
class Plan:
    """How the engine treats one overload."""

    kind: Kind
    family: str
    apply: Callable[..., Any] | None = None
    functional: Any = None  # for INPLACE: the counterpart's overload
    counterpart: Plan | None = None  # and its plan
    writes: tuple[str, ...] = ()  # names of the arguments that the operation writes


_TABLE: dict[Any, Rule] = {}


def add(op: Any, rule: Rule) -> None:
    """Enter ``rule`` for an overload, an overload packet or a subclass of torch.autograd.Function."""
    if op in _TABLE:
        family = _TABLE[op].family
        raise ValueError(f"{name_of(op)} already has a rule of family {family!r}; expected one rule for each.")
    _TABLE[op] = rule
    plan.cache_clear()


def remove(op: Any) -> None:
    """Take the rule of ``op`` out of the table."""
    if op not in _TABLE:
        raise ValueError(f"{name_of(op)} has no rule to remove.")
    del _TABLE[op]
    plan.cache_clear()


def lookup(op: Any) -> Rule | None:
    """The registered rule of an overload, of its packet, or of an autograd.Function."""
    rule = _TABLE.get(op)
    if rule is None and isinstance(op, _torch.OpOverload):
        rule = _TABLE.get(op.overloadpacket)
    return rule


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


@cache
def plan(op: Any) -> Plan:
    """How the engine treats overload ``op`` when it touches a perturbed tensor."""
    if op.namespace == "prim":  # a tracer's questions: prim.device of a tensor without values
        return Plan(Kind.CONSTANT, "constant")
    rule = _TABLE.get(op)
    writes = tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if rule is None and writes:
        return _inplace(op, writes)
    rule = lookup(op)
    if rule is not None:
        return Plan(rule.kind, rule.family, rule.apply, writes=writes)
    if op.is_view:
        return Plan(Kind.VIEW, "view")
    if _torch.is_composite(op):
        return Plan(Kind.COMPOSITE, "torch composite", op.decompose)
    body = _torch.prim_body(op) or _torch.decomposition(op)
    if body is not None:
        return Plan(Kind.COMPOSITE, "torch decomposition", body)
    return Plan(Kind.MISSING, "missing")


def _inplace(op: Any, writes: tuple[str, ...]) -> Plan:
    functional = _functional_counterpart(op)
    if functional is None:
        if _torch.is_composite(op):
            return Plan(Kind.COMPOSITE, "torch composite", op.decompose)
        # transpose_, squeeze_ and their like change the tensor's geometry, not its storage
        if "inplace_view" in {tag.name for tag in op.tags}:
            return Plan(Kind.VIEW, "view")
        return Plan(Kind.MISSING, "missing", writes=writes)
    if "inplace_view" in {tag.name for tag in op.tags}:
        return Plan(Kind.VIEW, "view")
    inner = plan(functional)
    if inner.kind is Kind.MISSING:
        return Plan(Kind.MISSING, "missing", writes=writes)
    return Plan(Kind.INPLACE, inner.family, functional=functional, counterpart=inner, writes=writes)


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
