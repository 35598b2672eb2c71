"""Where the model ends and the loss begins, for passes whose second order begins there: Gauss-Newton.

Such a pass carries tangents alone through the model. Its output z is taken for linear in the parameters, so what the
loss makes of z's tangents is V J^T (Hess loss) J V^T. A tensor of the program is therefore one of three things:

    early   made by the model: a value and tangents, no second rows
    late    made by the loss of the model's output: all rows
    leaf    a perturbed parameter itself, or a function of parameters alone: a regulariser, exact where the loss uses it
            (entries of a parameter are one, while a layer behind them, as behind an embedding, is the model)

The boundary is the input of a loss of ``torch.nn.functional``, or what :func:`mark_output` is given. An operation on a
late tensor is late. One that joins a late tensor with an early one would drop the early one's curvature: it is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import MissingBoundary, UnsupportedProgram
from .. import _torch
from ..algebra.families import jet_rule
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import is_elementwise, plan
from ..rules.indexing import GATHERS
from ..storage_geometry import Geometry, covers, geometry
from .locate import call_site
from .rows import Record, Seed

__all__ = ["LOSSES", "AtOnce", "Boundary", "Crossing", "Loss", "crossings", "mark_output"]

aten = torch.ops.aten
Find = Callable[[Tensor], Record | Seed | None]
Tracks = Callable[[Tensor], bool]  # whether a tensor depends on a perturbed leaf

_REMEDY = "expected a loss of torch.nn.functional, or jetplane.mark_output(z) on the model's output z"


# -- losses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A loss of torch.nn.functional.

    ``heads``: a softmax or sigmoid whose output it is given belongs to it. ``logarithms``: it expects logarithms of
    probabilities, and has no positive curvature without the normalisation that made them.
    """

    name: str
    heads: bool = False
    logarithms: bool = False

    def argument(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the loss is given of the model."""
        return args[0] if args else kwargs.get("input", kwargs.get("log_probs"))


_NAMES = (
    *("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
    *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "multilabel_soft_margin_loss"),
    *("multilabel_margin_loss", "multi_margin_loss", "margin_ranking_loss", "hinge_embedding_loss"),
    *("cosine_embedding_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss"),
)
_KINDS = (
    *(Loss(name) for name in _NAMES),
    *(Loss(name, heads=True, logarithms=True) for name in ("nll_loss", "kl_div", "ctc_loss")),
    Loss("binary_cross_entropy", heads=True),
)

LOSSES: dict[Any, Loss] = {
    function: loss for loss in _KINDS for function in (getattr(F, loss.name), *_torch.native_losses(loss.name))
}


# -- the mark -----------------------------------------------------------------------------------------------------


def mark_output(z: Tensor) -> Tensor:
    """Mark the model's output for a loss that is not one of torch.nn.functional; returns ``z``.

    A Gauss-Newton pass carries no second order before it and all of it behind it. Several tensors may be marked. A
    log_softmax or logsigmoid whose output is marked counts as a part of the loss. Outside of passes: the identity.

    Example:
        >>> import jetplane as jp
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> with jp.perturb(model.parameters(), [torch.eye(2).reshape(2, 1, 2)], curvature="ggn") as jets:
        ...     loss = mark_output(model(x)).square().sum() / 2
        >>> jets.quadratic(loss).curvature
        tensor([[ 9., 12.],
                [12., 16.]])
    """
    if not isinstance(z, Tensor):
        raise TypeError(f"mark_output got {type(z).__name__}; expected a tensor, the model's output.")
    # an operation of its own only where somebody looks: a pass does so by a function mode
    if torch.compiler.is_compiling() or torch.overrides.has_torch_function((z,)):
        marked: Tensor = torch.ops.jetplane.output(z)
        return marked
    return z


@torch.library.custom_op("jetplane::output", mutates_args=())
def _output(z: Tensor) -> Tensor:
    """The model's output."""
    return z.clone()


@_output.register_fake
def _(z: Tensor) -> Tensor:
    return torch.empty_like(z)


_output.register_autograd(lambda ctx, gradient: gradient)
_output.register_vmap(lambda info, in_dims, z: (torch.ops.jetplane.output(z), in_dims[0]))
MARK = torch.ops.jetplane.output.default


@jet_rule(MARK, "linear")
def _mark(pairs: PairSet, op: Any, z: Operand) -> Operand:
    return Operand(z.primal.clone(), z.tangent, z.second)


# -- heads: softmax and sigmoid -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A tensor that is a softmax or a sigmoid, or the logarithm of one, of something linear in the parameters.

    Its second rows follow from its value y and its tangents y_i, so they can be made after the fact:

        log_softmax   y_ij = -<p, y_i y_j>,  p = exp(y)
        softmax       y_ij = y_i y_j / y - y <1, y_i y_j / y>
        logsigmoid    y_ij = -y_i y_j exp(y) / (1 - exp(y))
        sigmoid       y_ij = y_i y_j (1 - 2 y) / (y (1 - y))
    """

    kind: str
    axis: int  # of the classes
    anchor: Geometry  # of the tensor that it says this of

    def second(self, pairs: PairSet, y: Tensor, tangent: Tensor) -> Tensor:
        """(rows, *S)"""
        axis = self.axis - y.ndim
        if self.kind == "log_softmax":
            return (-pairs.inner(tangent * y.exp(), tangent, axis)).expand(-1, *y.shape)
        if self.kind == "softmax":
            squares = pairs.outer(_over(tangent, y), tangent)
            return squares - y * squares.sum(axis, keepdim=True)
        if self.kind == "logsigmoid":
            return pairs.outer(_over(tangent, torch.expm1(y)) * y.exp(), tangent)
        return pairs.outer(_over(tangent, y * (1 - y)) * (1 - 2 * y), tangent)

    def seen_by(self, tensor: Tensor) -> int | None:
        """The axis of the classes in ``tensor``, a view; None where they are not one of its axes."""
        size, stride, _ = self.anchor
        if geometry(tensor) == self.anchor or not size:
            return self.axis
        wanted = size[self.axis], stride[self.axis]
        found = [axis for axis, one in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if one == wanted]
        return found[0] if len(found) == 1 else None

    @property
    def elementwise(self) -> bool:
        return self.kind in ("sigmoid", "logsigmoid")

    @property
    def logarithm(self) -> bool:
        return self.kind in ("log_softmax", "logsigmoid")


def _over(rows: Tensor, value: Tensor) -> Tensor:
    """rows / value, zero where the value is: the rows are there, too."""
    return torch.where(value == 0, 0.0, rows / torch.where(value == 0, 1.0, value))


_HEADS = {
    aten._log_softmax: "log_softmax",
    aten._softmax: "softmax",
    aten.sigmoid: "sigmoid",
    aten.log_sigmoid_forward: "logsigmoid",
}
_LOGARITHMS = {"softmax": "log_softmax", "sigmoid": "logsigmoid"}
_MOVES = (aten.clone, aten._to_copy, aten.index, aten.index_select)  # elements of the first argument


def _axis_after(op: Any, args: Sequence[Any], axis: int) -> int | None:
    """Where the axis of the classes is after a move; None where they are not together any more."""
    x = args[0]
    if op in (aten.clone, aten._to_copy):
        return axis
    if op is aten.index_select:
        return axis if args[1] % x.ndim != axis else None
    indices = args[1]
    kept = axis == x.ndim - 1 and len(indices) <= axis
    return -1 if kept else None


# -- functions of parameters alone --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a function of parameters alone is made, so that its second rows can be, should the loss use it."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    parents: list[State]
    versions: list[tuple[Tensor, int]]
    gathered: bool = False  # made of entries that whole numbers choose, which may be data

    def run(self, pairs: PairSet, lift: Callable[[Any], Any]) -> Operand:
        """The jet, from those of its arguments."""
        for tensor, version in self.versions:
            if tensor._version != version:
                raise MissingBoundary(
                    "a function of parameters that the loss uses was written in place since; "
                    "expected it behind the model's output, or jetplane.mark_output on the parameters."
                )
        apply = plan(self.func).apply
        assert apply is not None
        out = apply(pairs, self.func, *map(lift, self.args), **{name: lift(v) for name, v in self.kwargs.items()})
        assert isinstance(out, Operand)
        return out


_CHOICES = (aten.where, aten.masked_fill)  # entry by entry as well, though no function of one entry of each argument


@dataclass(frozen=True, eq=False)
class State:
    """What a pass knows of a storage that is no leaf."""

    late: bool
    head: Head | None = None
    recipe: Recipe | None = None


# -- chunks -------------------------------------------------------------------------------------------------------


class Crossing:
    """What crosses the boundary in a pass over one chunk of the directions.

    The passes over all chunks but the last keep the tangents that cross it; the last one puts all of them together,
    so that the loss sees every pair. The program does the same in each of them, so they are told apart by their order.
    """

    def __init__(self, kept: list[list[Tensor]], number: int, last: bool) -> None:
        self._kept = kept
        self._number = number
        self._last = last
        self._place = 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows (K of the chunk, *S), in the last pass those of all chunks."""
        place, self._place = self._place, self._place + 1
        if not self._number and place == len(self._kept):
            self._kept.append([])
        before = self._kept[place] if place < len(self._kept) else None
        if before is None or len(before) != self._number or (before and before[0].shape[1:] != rows.shape[1:]):
            raise UnsupportedProgram(
                "the program took another course when it was run again for further directions; expected the same "
                "operations each time, or chunk_size=None."
            )
        if self._last:
            return torch.cat([*before, rows]) if before else rows
        before.append(rows)
        return rows


def crossings(count: int) -> list[Crossing]:
    """One for each of ``count`` chunks, in the order in which they are run."""
    kept: list[list[Tensor]] = []
    return [Crossing(kept, number, number == count - 1) for number in range(count)]


# -- the boundary of one pass -------------------------------------------------------------------------------------


class AtOnce:
    """No boundary: second order begins at the parameters, and nothing is early or late."""

    begins_late = False

    def __init__(self, pairs: PairSet) -> None:
        self.early = self.late = pairs

    def inside_loss(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tracks: Tracks
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_late(self, func: Any, tracked: Sequence[Tensor]) -> bool:
        return False

    def all_of_parameters(self, tracked: Sequence[Tensor]) -> bool:
        return False

    def joins_late(self, target: Tensor, tracks: Tracks) -> bool:
        return False

    def check_result(self, tensor: Tensor, tracks: Tracks) -> None:
        pass

    def rows(self, func: Any, tensor: Tensor, find: Find) -> tuple[Tensor | None, Tensor | None]:
        record = find(tensor)
        return (None, None) if record is None else record.read(tensor)

    def note(
        self, late: bool, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tracked: Sequence[Tensor], out: Any
    ) -> Any:
        return out

    def move(self, source: Tensor, target: Tensor, tracks: Tracks) -> None:
        pass

    def adopt(self, copy: Tensor, tensor: Tensor) -> None:
        pass


class Boundary:
    """What is early and what is late in one pass."""

    begins_late = True

    def __init__(self, early: PairSet, late: PairSet, crossing: Crossing | None = None) -> None:
        self.early = early
        self.late = late
        self._cross = crossing or crossings(1)[0]
        self._states: weakref.WeakKeyDictionary[Any, State] = weakref.WeakKeyDictionary()
        self._inside: list[Loss] = []

    # -- what the engine asks ---------------------------------------------------------------------------------------

    def is_late(self, func: Any, tracked: Sequence[Tensor]) -> bool:
        """Whether an operation on these perturbed tensors carries second order."""
        return bool(self._inside) or func is MARK or any(self.past(tensor) for tensor in tracked)

    def past(self, tensor: Tensor) -> bool:
        """Whether a perturbed tensor is late."""
        state = self._states.get(tensor.untyped_storage())
        return state is not None and state.late

    def inside_loss(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tracks: Tracks
    ) -> contextlib.AbstractContextManager[None]:
        """A context for while a loss of torch.nn.functional runs: everything in it is late."""
        loss = LOSSES[func]
        given = loss.argument(args, kwargs)
        given = _torch.unwrap_functorch(given) if isinstance(given, Tensor) else None
        if given is not None and tracks(given):
            self._check_input(loss, given)
        return self._in(loss)

    def all_of_parameters(self, tracked: Sequence[Tensor]) -> bool:
        """Whether each of these perturbed tensors is a leaf, or a function of leaves alone."""
        return all(map(self._of_parameters, tracked))

    def _of_parameters(self, tensor: Tensor) -> bool:
        """Whether a perturbed tensor is a leaf, or a function of leaves alone."""
        state = self._states.get(tensor.untyped_storage())
        return state is None or state.recipe is not None

    @contextlib.contextmanager
    def _in(self, loss: Loss) -> Iterator[None]:
        self._inside.append(loss)
        try:
            yield
        finally:
            self._inside.pop()

    def _check_input(self, loss: Loss, tensor: Tensor) -> None:
        """Raise where ``loss``, given this perturbed tensor, would have no curvature in silence."""
        state = self._states.get(tensor.untyped_storage())
        if loss.logarithms and state is not None and not state.late and state.head is None:
            raise MissingBoundary(
                f"{call_site(loss.name)} is given logarithms of probabilities that are not the output of a "
                "log_softmax or logsigmoid, which its curvature comes from; expected one of these, or "
                "jetplane.mark_output(z) on the model's output z that they are made of."
            )

    def check_result(self, tensor: Tensor, tracks: Tracks) -> None:
        """Raise where a perturbed tensor's second rows are asked for, and it has none."""
        if tracks(tensor) and not self.past(tensor):
            raise MissingBoundary(
                "no boundary between model and loss was found before this tensor, and that is where a Gauss-Newton "
                f"curvature begins; {_REMEDY}."
            )

    def rows(self, func: Any, tensor: Tensor, find: Find) -> tuple[Tensor | None, Tensor | None]:
        """Tangent and second rows of a tensor as a late operation sees it; ``find`` gives the record of one."""
        record = find(tensor)
        if record is None:
            return None, None
        state = self._states.get(tensor.untyped_storage())
        if state is not None and state.late:
            return record.read(tensor)
        if state is not None and state.head is not None and self._includes(func, state.head):
            return self._with_head(state.head, tensor, record)
        if state is not None and not self._inside and func is not MARK:
            if state.recipe is None:
                raise MissingBoundary(
                    f"{call_site(str(func))} joins the loss with a tensor that the model made and that did not pass "
                    f"the boundary between them, so that its curvature would be lost; {_REMEDY}, for this tensor too."
                )
            return self._made_anew(state, find).read(tensor)
        tangent, _ = record.read(tensor)
        return None if tangent is None else self._cross(tangent), None

    def note(
        self, late: bool, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tracked: Sequence[Tensor], out: Any
    ) -> Any:
        """Take note of what the outputs of a rule are; returns them."""
        if isinstance(out, tuple | list):
            head = None if late else self._head(func, args, out[0])
            for number, item in enumerate(out):
                if isinstance(item, Operand):
                    self._states[item.primal.untyped_storage()] = State(late, head if number == 0 else None)
        elif isinstance(out, Operand):
            if any(out.primal.untyped_storage() is tensor.untyped_storage() for tensor in tracked):
                # memory of its own: what the program does with the argument's is another matter
                out = replace(out, primal=out.primal.clone())
            head = None if late else self._head(func, args, out)
            recipe = None if late else self._recipe(func, args, kwargs, tracked, out.primal)
            self._states[out.primal.untyped_storage()] = State(late, head, recipe)
        return out

    def joins_late(self, target: Tensor, tracks: Tracks) -> bool:
        """Whether what is written into ``target`` stands beside something late, which is kept."""
        return tracks(target) and self.past(target) and not covers(target)

    def move(self, source: Tensor, target: Tensor, tracks: Tracks) -> None:
        """``source`` is being written into ``target``, whose storage is perturbed already or not."""
        tracked = tracks(target)
        storage = target.untyped_storage()
        new = self._states.get(source.untyped_storage())
        old = self._states.pop(storage, None)
        old = old if tracked else None  # else what it held before is gone
        if not covers(target) and (new is not None or old is not None):
            late = new is not None and new.late
            if tracked and late and (old is None or not old.late):
                raise MissingBoundary(
                    f"{call_site('the program')} writes the loss into memory that holds something which did not pass "
                    f"the boundary between model and loss; {_REMEDY}, for that too."
                )
            new = State(late or (old is not None and old.late))  # of both; neither a head nor a recipe says it all
        if new is not None:
            self._states[storage] = new

    def adopt(self, copy: Tensor, tensor: Tensor) -> None:
        """``copy`` is what ``tensor`` was before it is written to."""
        state = self._states.get(tensor.untyped_storage())
        if state is not None:
            self._states[copy.untyped_storage()] = state

    # -- heads ------------------------------------------------------------------------------------------------------

    def _head(self, func: Any, args: Sequence[Any], out: Any) -> Head | None:
        if not isinstance(out, Operand):
            return None
        op, y = func.overloadpacket, out.primal
        if op in _HEADS:
            axis = args[1] % max(y.ndim, 1) if op in (aten._log_softmax, aten._softmax) else 0
            return Head(_HEADS[op], axis, geometry(y))
        if op is not aten.log and op not in _MOVES:
            return None
        state = self._states.get(args[0].untyped_storage())
        if state is None or state.head is None:
            return None
        head = state.head
        kind = _LOGARITHMS.get(head.kind) if op is aten.log else head.kind
        if kind is None or head.elementwise:
            return None if kind is None else Head(kind, 0, geometry(y))
        axis_before = head.seen_by(args[0])
        if axis_before is None:
            return None
        after = axis_before if op is aten.log else _axis_after(op, args, axis_before)
        return None if after is None else Head(kind, after % max(y.ndim, 1), geometry(y))

    def _includes(self, func: Any, head: Head) -> bool:
        """Whether the head belongs to the loss that is running, or to one that will be given what is marked."""
        if self._inside:
            return self._inside[-1].heads
        return func is MARK and head.logarithm

    def _with_head(self, head: Head, tensor: Tensor, record: Record | Seed) -> tuple[Tensor | None, Tensor | None]:
        y = tensor.as_strided(*head.anchor)
        tangent, _ = record.read(y)
        if tangent is None:
            return None, None
        tangent = self._cross(tangent)
        second = head.second(self.late, y, tangent) if self.late.rows else None
        return Record(y, tangent, second).read(tensor)

    # -- functions of parameters alone --------------------------------------------------------------------------------

    def _recipe(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tracked: Sequence[Tensor], value: Tensor
    ) -> Recipe | None:
        if not self.all_of_parameters(tracked) or plan(func).traits.meets:
            return None  # a collective is not run once more, when others may do something else
        tensors = [leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_inference() for tensor in tensors):  # they do not count what is written to them
            return None
        states = [self._states.get(tensor.untyped_storage()) for tensor in tracked]
        parents = [state for state in states if state is not None]
        gathered = any(state.recipe is not None and state.recipe.gathered for state in parents)
        if _is_layer(func, tensors, tracked, value, gathered):
            return None
        versions = [(tensor, tensor._version) for tensor in tensors]
        return Recipe(func, args, kwargs, parents, versions, gathered or _is_gather(func, tensors))

    def _made_anew(self, wanted: State, find: Find) -> Record:
        """The rows of a function of parameters alone, second order included, from the parameters on."""
        order = _parents_first(wanted)
        uses: dict[State, int] = {}
        for _, recipe in order:
            for parent in recipe.parents:
                uses[parent] = uses.get(parent, 0) + 1
        made: dict[State, Record] = {}

        def lift(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [lift(item) for item in value]
            if not isinstance(value, Tensor) or (record := find(value)) is None:
                return value
            state = self._states.get(value.untyped_storage())
            if state is not None:
                return Operand(value, *made[state].read(value))
            tangent, _ = record.read(value)
            return value if tangent is None else Operand(value, self._cross(tangent), None)

        for state, recipe in order:
            jet = recipe.run(self.late, lift)
            made[state] = Record(jet.primal, jet.tangent, jet.second)
            for parent in recipe.parents:  # rows of the size of a parameter: not one longer than needed
                uses[parent] -= 1
                if not uses[parent]:
                    del made[parent]
        return made[wanted]


def _is_layer(func: Any, tensors: Sequence[Tensor], tracked: Sequence[Tensor], value: Tensor, gathered: bool) -> bool:
    """Whether an operation on functions of parameters is the model's: with data, or behind an embedding."""
    with_others = len(tensors) > len(tracked)
    if with_others and value.numel() > max(tensor.numel() for tensor in tracked):
        return True
    if is_elementwise(func) or func.overloadpacket in _CHOICES:  # a product with data is larger, or no such operation
        return False
    if gathered and len(tracked) > 1:
        return True
    return with_others and not _is_gather(func, tensors)


def _is_gather(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an operation takes entries of its one floating tensor, at places that whole numbers or masks tell."""
    return func.overloadpacket in GATHERS and sum(tensor.is_floating_point() for tensor in tensors) == 1


def _parents_first(wanted: State) -> list[tuple[State, Recipe]]:
    """The functions that ``wanted`` is made of, and itself. Not by recursion: a sum over parameters is a long chain."""
    order: list[tuple[State, Recipe]] = []
    seen: set[State] = set()
    stack = [(wanted, False)]
    while stack:
        state, entered = stack.pop()
        assert state.recipe is not None
        if entered:
            order.append((state, state.recipe))
        elif state not in seen:
            seen.add(state)
            stack.append((state, True))
            stack += [(parent, False) for parent in reversed(state.recipe.parents)]
    return order
