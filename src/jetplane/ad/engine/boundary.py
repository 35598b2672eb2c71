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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...errors import MissingBoundary
from .. import _torch
from ..algebra.jet import Operand, PairSet
from ..rules.heads import HEADS, Head
from ..rules.mark import MARK
from ..rules.named_losses import LOSSES, Loss
from ..storage_geometry import covers
from .crossing import Crossing, crossings
from .locate import call_site
from .parameter_functions import Recipe, in_order, recipe
from .rows import Record, Seed

__all__ = ["AtOnce", "Boundary"]

Find = Callable[[Tensor], Record | Seed | None]
Tracks = Callable[[Tensor], bool]  # whether a tensor depends on a perturbed leaf

_REMEDY = "expected a loss of torch.nn.functional, or jetplane.mark_output(z) on the model's output z"


@dataclass(frozen=True, eq=False)
class State:
    """What a pass knows of a storage that is no leaf."""

    late: bool
    head: Head | None = None
    recipe: Recipe | None = None


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
            return self._made_anew(state.recipe, find).read(tensor)
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
        """The head that an output is."""
        follow = HEADS.get(func.overloadpacket)
        if follow is None or not isinstance(out, Operand):
            return None
        state = self._states.get(args[0].untyped_storage())
        return follow(args, out.primal, None if state is None else state.head)

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
        if not self.all_of_parameters(tracked):
            return None
        states = [self._states.get(tensor.untyped_storage()) for tensor in tracked]
        parents = [state.recipe for state in states if state is not None and state.recipe is not None]
        return recipe(func, args, kwargs, tracked, parents, value)

    def _made_anew(self, wanted: Recipe, find: Find) -> Record:
        """The rows of a function of parameters alone, second order included, from the parameters on."""
        order = in_order(wanted)
        uses = Counter(parent for one in order for parent in one.parents)
        made: dict[Recipe, Record] = {}

        def lift(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [lift(item) for item in value]
            if not isinstance(value, Tensor) or (record := find(value)) is None:
                return value
            state = self._states.get(value.untyped_storage())
            if state is not None and state.recipe is not None:
                return Operand(value, *made[state.recipe].read(value))
            tangent, _ = record.read(value)
            return value if tangent is None else Operand(value, self._cross(tangent), None)

        for one in order:
            jet = one.run(self.late, lift)
            made[one] = Record(jet.primal, jet.tangent, jet.second)
            for parent in one.parents:  # rows of the size of a parameter: not one longer than needed
                uses[parent] -= 1
                if not uses[parent]:
                    del made[parent]
        return made[wanted]
