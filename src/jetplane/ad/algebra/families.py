"""The rule families: how second-order jets pass through whole classes of operations.

A family turns what a person knows of an operation (a derivative, "it is linear", "it is a product") into a rule.
Zero rows are handled here and nowhere else: a rule never sees a missing tangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import MissingRule
from .. import _torch
from .jet import Lifted, Operand, PairSet
from .registry import PLAIN, POINTWISE, SPARSE, Kind, Rule, Traits, add, add_for_complex, argument_names, name_of
from .row_lifts import Vmapped, is_jet, lifted, shifted
from .sparse import Factors, SparseOperand, Support, Term, gathered, term_of, with_outer

Derivative = Callable[..., Any]

_NUMBERS = (int, float)
_SEVERAL = (list, tuple)


# -- constant -----------------------------------------------------------------------------------------------------


def constant(*ops: Any) -> None:
    """Operations whose derivative is zero wherever it exists: floor, comparisons, zeros_like, random draws."""
    for op in ops:
        add(op, Rule("constant", Kind.CONSTANT, _identity))


def _identity(value: Any) -> Any:
    return value


# -- composite ----------------------------------------------------------------------------------------------------


def composite(op: Any, body: Callable[..., Any]) -> None:
    """An operation equal to a program ``body`` of operations that have rules. ``body`` takes the same arguments."""
    add(op, Rule("composite", Kind.COMPOSITE, body))


def holds_for_complex(*ops: Any) -> None:
    """Operations whose rule, written for real numbers, is one of complex numbers as it stands."""
    for op in ops:
        add_for_complex(op)


def complex_composite(op: Any, body: Callable[..., Any]) -> None:
    """The same as :func:`composite` of an operation on complex numbers."""
    add_for_complex(op, Rule("composite", Kind.COMPOSITE, body))


def complex_rule(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the rule of an operation on complex numbers, written out as for :func:`jet_rule`."""

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        add_for_complex(op, Rule("complex", Kind.JET, rule))
        return rule

    return enter


def transparent(*functions: Any) -> None:
    """Subclasses of torch.autograd.Function, or their names, whose forward body is what is differentiated."""
    for function in functions:
        add(function, Rule("transparent", Kind.COMPOSITE, primal_of, Traits(as_it_is=True)))


# -- jet: the general form ----------------------------------------------------------------------------------------


_TRAITS = {"elementwise": POINTWISE, "bilinear": SPARSE}  # of families, also where a rule is written out


def jet_rule(
    op: Any, family: str = "jet", traits: Traits | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a rule written out in full: ``rule(pairs, op, *args, **kwargs)``.

    Perturbed tensors arrive as :class:`Operand`, all others as they are; the rule returns an Operand for each output
    that varies and a tensor for each that does not.
    """

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        add(op, Rule(family, Kind.JET, rule, traits or _TRAITS.get(family, PLAIN)))
        return rule

    return enter


def primal_of(value: Any) -> Any:
    """The value without its derivatives."""
    return value.primal if isinstance(value, Operand) else value


def primals_of(tree: Any) -> Any:
    """``tree`` with every Operand replaced by its value. By hand: torch's tree_map costs more than a small rule."""
    if isinstance(tree, Operand):
        return tree.primal
    if isinstance(tree, _SEVERAL):
        values = [primals_of(leaf) for leaf in tree]
        return values if isinstance(tree, list) else tuple(values)
    return {name: primals_of(leaf) for name, leaf in tree.items()} if isinstance(tree, dict) else tree


def evaluate(op: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """The operation on the values alone."""
    args, kwargs = primals_of((tuple(args), kwargs or {}))
    return op(*args, **kwargs)


# -- elementwise --------------------------------------------------------------------------------------------------


def elementwise(op: Any, first: Derivative, second: Derivative | None = None) -> None:
    """A function of one tensor, element by element.

    ``first(x, y, *rest)`` is f'(x) given the input and the output y = f(x); ``second(x, y, d, *rest)`` is f''(x),
    given d = f'(x) too, or None where f'' is zero. Both take the operation's further arguments.
    """

    def rule(pairs: PairSet, op: Any, x: Any, *rest: Any, **kwargs: Any) -> Any:
        _refuse_jets(op, (x, *rest), kwargs, 1)
        y = op(x.primal, *rest, **kwargs)
        d = first(x.primal, y, *rest, **kwargs)
        curved = second is not None and pairs.rows and x.tangent is not None
        h = second(x.primal, y, d, *rest, **kwargs) if curved and second is not None else None
        if x.primal.shape == y.shape:  # the chain rule below, for one operand
            tangent, rows = scaled(x.tangent, d), scaled(x.second, d) if pairs.rows else None
            return Operand(y, tangent, _added(rows, None if x.tangent is None else _bent(pairs, x.tangent, h)))
        return chain(pairs, y, [x], [d], {(0, 0): h})

    add(op, Rule("elementwise", Kind.JET, rule, POINTWISE))


def elementwise_of_many(op: Any, count: int, first: Derivative, second: Derivative | None = None) -> None:
    """A function of ``count`` tensors (or numbers), element by element with broadcasting.

    ``first(y, *args)`` gives the ``count`` partial derivatives, ``second(y, *args)`` a dict of second ones keyed by
    (a, b), a <= b; what is missing or None is zero, and a function is called only if its derivative is needed.
    """

    def rule(pairs: PairSet, op: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_jets(op, args, kwargs, count)
        values = [arg.primal if isinstance(arg, Operand) else arg for arg in args]
        y = op(*values, **kwargs)
        partials = first(y, *values, **kwargs)
        hessian = second(y, *values, **kwargs) if second is not None and pairs.rows else {}
        return chain(pairs, y, args[:count], partials, hessian)

    add(op, Rule("elementwise", Kind.JET, rule, POINTWISE))


def chain(
    pairs: PairSet, y: Tensor, operands: Sequence[Any], partials: Sequence[Any], hessian: dict[tuple[int, int], Any]
) -> Operand:
    """The chain rule, written once: ``partials`` and ``hessian`` of an elementwise y, at the operands' jets.

    y_i  = sum_a f_a a_i
    y_ij = sum_a f_a a_ij + sum_a f_aa a_i a_j + sum_{a<b} f_ab (a_i b_j + a_j b_i)
    """
    ndim, curved = y.ndim, pairs.rows > 0
    tangents: dict[int, Tensor] = {}
    tangent: Tensor | None = None
    second: Tensor | None = None
    for number, (x, d) in enumerate(zip(operands, partials, strict=True)):
        if not isinstance(x, Operand):
            continue
        factor = d() if callable(d) else d
        rows = align(x.tangent, ndim)
        if rows is not None:
            tangents[number] = rows
            tangent = plus_scaled(tangent, rows, factor)
        if curved:
            second = plus_scaled(second, align(x.second, ndim), factor)
    if curved:
        for (a, b), h in hessian.items():
            if a == b and a in tangents:
                second = _added(second, _bent(pairs, tangents[a], h))
            elif a in tangents and b in tangents:
                bent = scaled(tangents[a], h)
                second = _added(second, None if bent is None else pairs.cross(bent, tangents[b]))
    return Operand(y, spread(tangent, y), spread(second, y))


def _bent(pairs: PairSet, tangent: Tensor, h: Any) -> Tensor | None:
    """The rows ``h a_i a_j``."""
    if h is None:
        return None
    if pairs.weights is not None:  # one row, so that it is summed first: K rows are not scaled
        return scaled(pairs.outer(tangent, tangent), h)
    bent = scaled(tangent, h)
    return None if bent is None else pairs.outer(bent, tangent)


def _added(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if before is None else before if more is None else before + more


def align(rows: Tensor | None, ndim: int) -> Tensor | None:
    """Rows (R, *S) with size-1 axes behind the first, so that S broadcasts against a value of ``ndim`` axes."""
    if rows is None or rows.ndim == ndim + 1:
        return rows
    return rows.reshape(rows.shape[0], *(1,) * (ndim + 1 - rows.ndim), *rows.shape[1:])


def scaled(rows: Tensor | None, factor: Any) -> Tensor | None:
    """``rows * factor``, with None for zero rows or a zero factor."""
    if rows is None or factor is None:
        return None
    if isinstance(factor, Tensor):
        # of a mask, a product would make numbers first
        return torch.where(factor, rows, 0.0) if factor.dtype == torch.bool else rows * factor
    if callable(factor):
        return scaled(rows, factor())
    return rows if _is_one(factor) else rows * factor


def plus_scaled(before: Tensor | None, rows: Tensor | None, factor: Any) -> Tensor | None:
    """``before + rows * factor``, with None for zero; in one operation where the factor is a number."""
    if before is not None and rows is not None and isinstance(factor, _NUMBERS):
        return before + rows if factor == 1 else torch.add(before, rows, alpha=factor)
    return _added(before, scaled(rows, factor))


def total(terms: Any) -> Tensor | None:
    """The sum of rows, None for zero."""
    result = None
    for term in terms:
        if term is not None:
            result = term if result is None else result + term
    return result


def spread(rows: Tensor | None, y: Tensor) -> Tensor | None:
    """Rows broadcast to (R, *y.shape)."""
    if rows is None or rows.shape[1:] == y.shape:
        return rows
    return rows.expand(rows.shape[0], *y.shape)


def _is_one(factor: Any) -> bool:
    return isinstance(factor, _NUMBERS) and factor == 1


# -- linear -------------------------------------------------------------------------------------------------------


def linear(op: Any, over: str | Sequence[str] | None = None, dims: str | None = None, traits: Traits = PLAIN) -> None:
    """An operation jointly linear (or affine) in the arguments named by ``over``; by default in the first one.

    Its rows are the operation applied to the rows, with every other operand of ``over`` set to zero. Rows are lifted
    by :func:`over_rows`, or, where ``dims`` names the argument that holds the axes, by moving those axes one up.
    """
    names = (over,) if isinstance(over, str) else over

    def rule(pairs: PairSet, op: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = argument_names(op)
        active = set(names or arguments[:1])
        bound = dict(zip(arguments, args, strict=False)) | kwargs
        y = evaluate(op, args, kwargs)
        for name, value in bound.items():
            if name not in active and _has_jets(value):
                raise _nonlinear_argument(op, name)
        axes = dims if _can_shift(bound, active) else None

        def lift(part: str) -> Any:
            if axes is None:
                return lifted(op, args, kwargs, active, part)
            return shifted(op, args, kwargs, active, part, axes)

        return rejoin(y, lift("tangent"), lift("second") if pairs.rows else None)

    add(op, Rule("linear", Kind.JET, rule, traits))


def rejoin(y: Any, tangent: Any, second: Any) -> Any:
    """Jets from an operation's outputs and their rows; integer outputs stay constants."""
    if isinstance(y, Tensor):
        return Operand(y, tangent, second) if y.is_floating_point() or y.is_complex() else y
    count = len(y)
    tangents = tangent if tangent is not None else (None,) * count
    seconds = second if second is not None else (None,) * count
    return tuple(rejoin(*parts) for parts in zip(y, tangents, seconds, strict=True))


def _rows_of(value: Any, part: str) -> Tensor | None:
    return getattr(value, part) if isinstance(value, Operand) else None


def _has_jets(value: Any) -> bool:
    return isinstance(value, Operand) or (isinstance(value, _SEVERAL) and any(map(_has_jets, value)))


def _can_shift(bound: dict[str, Any], active: set[str]) -> bool:
    jets = [j for name in active for j in _torch.pytree.tree_leaves(bound.get(name), is_leaf=is_jet) if is_jet(j)]
    return all(j.primal.ndim > 0 for j in jets)


# -- bilinear -----------------------------------------------------------------------------------------------------


def bilinear(op: Any, lift: Callable[..., Lifted] | None = None) -> None:
    """An operation linear in its first and in its second argument: a product, a convolution.

    ``lift(op, a, b, *rest)`` gives the operation over leading row axes; without it vmap does.
    """

    def rule(pairs: PairSet, op: Any, a: Any, b: Any, *rest: Any, **kwargs: Any) -> Operand:
        _refuse_jets(op, (a, b, *rest), kwargs, 2)
        y = op(primal_of(a), primal_of(b), *rest, **kwargs)
        if lift is None:
            lifted: Lifted = Vmapped(lambda left, right: op(left, right, *rest, **kwargs))
        else:
            lifted = lift(op, primal_of(a), primal_of(b), *rest, **kwargs)
        return product(pairs, y, lifted, a, b)

    add(op, Rule("bilinear", Kind.JET, rule, SPARSE))


def product(pairs: PairSet, y: Tensor, lifted: Lifted, a: Any, b: Any) -> Operand:
    """The jet of y = B(a, b): the product rule of first and second order, for any bilinear B."""
    if isinstance(a, SparseOperand) or isinstance(b, SparseOperand):
        return _sparse_product(y, lifted, a, b)
    x, w = primal_of(a), primal_of(b)
    xt, wt = _rows_of(a, "tangent"), _rows_of(b, "tangent")
    tangent = accumulate(None if xt is None else lifted.left(xt, w), None if wt is None else lifted.right(x, wt))
    if not pairs.rows:
        return Operand(y, tangent, None)
    xs, ws = _rows_of(a, "second"), _rows_of(b, "second")
    second = accumulate(
        None if xs is None else lifted.left(xs, w),
        None if ws is None else lifted.right(x, ws),
        None if xt is None or wt is None else pairs.bilinear(lifted, xt, wt),
    )
    return Operand(y, tangent, second)


def _sparse_product(y: Tensor, lifted: Lifted, a: Any, b: Any) -> Operand:
    """The same of first order, each term for the directions that it is there for."""
    x, w = primal_of(a), primal_of(b)
    terms: list[Term] = []
    if isinstance(a, Operand) and (left := term_of(a)) is not None:
        terms.append(Term(left.support, lifted.left(left.rows, w)))
    apply = getattr(lifted, "outer", None)  # where the product can take outer products as they are
    outer, k = (b.outer, b.support.k) if isinstance(b, SparseOperand) and apply is not None else ((), 0)
    if outer:
        b = replace(b, outer=())
    if isinstance(b, Operand) and (right := term_of(b)) is not None:
        terms.append(Term(right.support, lifted.right(x, right.rows)))
    total = gathered(terms)
    for block in outer:
        assert apply is not None and isinstance(block.rows, Factors)
        total = with_outer(total, Support.of(k, [(block.start, block.stop)]), partial(apply, x, block.rows))
    return with_term(y, total)


def with_term(y: Tensor, term: Term | None) -> Operand:
    """The jet of first order with these rows."""
    if term is None or term.support.whole:
        return Operand(y, None if term is None else term.rows, None)
    return SparseOperand(y, term.rows, None, term.support)


class Joint(Lifted, Protocol):
    """A bilinear operation that can take the products of several left sides with several right sides in one call."""

    def joint(self, a: Tensor, b: Tensor) -> Tensor: ...  # (K, *A), (L, *B) -> (K, L, *S)


def joint_product(pairs: PairSet, lifted: Joint, a: Any, b: Any) -> Operand:
    """The jet of B(a, b), value and rows from as few calls as there can be: for a compiler, to whom stacking is free.

    All products of (x; its tangents) with (w; its tangents) are needed where all pairs are:

        B(x, w)    B(x, w_j)         value                tangents
        B(x_i, w)  B(x_i, w_j)       tangents             pairs, when symmetrised
    """
    x, w = primal_of(a), primal_of(b)
    xt, wt = _rows_of(a, "tangent"), _rows_of(b, "tangent")
    left = x.unsqueeze(0) if xt is None else torch.cat([x.unsqueeze(0), xt])
    right = w.unsqueeze(0) if wt is None else torch.cat([w.unsqueeze(0), wt])
    # with one direction all four products in one call are faster than the three of first order in two
    square = pairs.shape == "all" or pairs.k == 1
    if xt is None or wt is None or square:
        grid = lifted.joint(left, right)
        value, down, across = grid[0, 0], grid[1:, 0], grid[0, 1:]
        inner = grid[1:, 1:] if xt is not None and wt is not None else None
    else:
        column = lifted.joint(left, right[:1])[:, 0]
        value, down, across = column[0], column[1:], lifted.joint(left[:1], right[1:])[0]
        inner = None
    tangent = total(part for part, rows in ((down, xt), (across, wt)) if rows is not None)
    if not pairs.rows:
        return Operand(value, tangent, None)
    xs, ws = _rows_of(a, "second"), _rows_of(b, "second")
    second = total(
        (
            None if xs is None else lifted.joint(xs, w.unsqueeze(0))[:, 0],
            None if ws is None else lifted.joint(x.unsqueeze(0), ws)[0],
            _symmetric(pairs, lifted, inner, xt, wt),
        )
    )
    return Operand(value, tangent, second)


def _symmetric(
    pairs: PairSet, lifted: Lifted, inner: Tensor | None, xt: Tensor | None, wt: Tensor | None
) -> Tensor | None:
    if xt is None or wt is None:
        return None
    if inner is None:
        return pairs.bilinear(lifted, xt, wt)
    return 2 * inner[:, 0] if pairs.k == 1 else pairs.symmetrise(inner)


def accumulate(rows: Tensor | None, *terms: Tensor | None) -> Tensor | None:
    """The sum of rows. ``rows`` belong to the caller alone and are added to in place where autograd allows it."""
    for term in terms:
        if term is None:
            continue
        if rows is None:
            rows = term
        elif rows.requires_grad or term.requires_grad:
            rows = rows + term
        else:
            rows.add_(term)
    return rows


# -- errors -------------------------------------------------------------------------------------------------------


def _refuse_jets(op: Any, args: Sequence[Any], kwargs: dict[str, Any], differentiated: int) -> None:
    """Raise if an argument behind the first ``differentiated`` ones is perturbed: the rule takes it for constant."""
    if not (any(map(_has_jets, args[differentiated:])) or (kwargs and any(map(_has_jets, kwargs.values())))):
        return
    positional = list(zip(argument_names(op), args, strict=False))
    for name, value in (*positional[differentiated:], *kwargs.items()):
        if _has_jets(value):
            raise _nonlinear_argument(op, name)


def _nonlinear_argument(op: Any, name: str) -> MissingRule:
    message = f"the rule of {name_of(op)} does not differentiate its argument {name!r}, which is perturbed"
    return MissingRule(message, str(op))
