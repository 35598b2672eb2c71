"""The engine: a dispatch mode that carries jets beside the ordinary tensors of an unmodified program.

It knows no operation. For each call that touches a perturbed storage it asks the table for a plan and follows it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule, UnsupportedProgram
from .. import _torch, _torch_distributed, rules
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import FOR_COMPLEX, Kind, Treatment, lookup, plan, plan_for_complex
from ..algebra.sparse import SparseOperand, Support, padded, term_of
from ..storage_geometry import written
from .aliases import EarlierAliases
from .boundary import AtOnce, Boundary
from .grad_switches import GradSwitches
from .locate import call_site
from .results import no_complex_rule, refuse_reinterpretation
from .rows import Record, Seed, resolved
from .stops import StopMode, every_stop
from .witness import Witness

__all__ = ["JetMode"]

Read = Callable[[Tensor], tuple[Tensor | None, Tensor | None]]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_SEVERAL = (list, tuple)


class JetMode(_torch.DispatchMode):
    """Carries tangent and second rows for every storage that depends on a perturbed leaf."""

    def __init__(self, pairs: PairSet, boundary: Boundary | None = None, no_grad: str = "stop") -> None:
        super().__init__()
        rules.load()
        self.pairs = pairs
        self.boundary = boundary or AtOnce(pairs)  # where second order begins
        self.above: _torch.AboveAutograd  # as it is when the pass begins: see :mod:`.guards`
        self.stops = StopMode(self)
        self.before: contextlib.AbstractContextManager[Any] | None = (
            None  # a mode that sees the program's operations first
        )
        self.switches = GradSwitches(no_grad)
        self.halted = False  # whether a tangent has stopped where the program switched autograd off
        self.detached = False  # whether the program has detached what varies
        self._records: weakref.WeakKeyDictionary[Any, Record | Seed] = weakref.WeakKeyDictionary()
        self._stopped: dict[int, weakref.ref[Tensor]] = {}
        self._spoiled: dict[int, weakref.ref[Tensor]] = {}  # of these, where what varies was written through one
        self.earlier = EarlierAliases()
        self._complex = False  # whether complex numbers vary
        self._sparse = False  # whether there are leaves that vary along some directions alone
        self._unused: list[Seed] = []  # that no operation has been seen to read
        self._bodies: list[Any] = []  # composites that are running, innermost last
        self.witness: Witness | None = None  # of what is seen, where results are read by whoever wrote the program
        self._functions: list[str] = []  # autograd.Functions running that no perturbed tensor was passed to
        self._others = _torch_distributed.has_others()  # processes, who may perturb what is constant here

    # -- records ----------------------------------------------------------------------------------------------------

    def seed(self, tensor: Tensor, seed: Seed) -> None:
        """Perturb a leaf."""
        self._sparse |= self.boundary.begins_late and seed.structured
        storage = tensor.untyped_storage()
        other = self._records.get(storage)
        if other is None:
            self._records[storage] = seed
            self._unused.append(seed)
            return
        # leaves that are parts of one storage share a record, where their uses cannot be told apart
        seed.used = True
        if isinstance(other, Seed):
            other.used = True
            other = other.record(tensor)
        other.write(tensor, *seed.read(tensor))
        self._records[storage] = other

    def record_of(self, tensor: Tensor) -> Record | Seed | None:
        """The record behind ``tensor``; None where it does not depend on a perturbed leaf."""
        if (self._stopped and self.is_stopped(tensor)) or (self.earlier.any and self.earlier.is_one(tensor)):
            if self._spoiled:
                self._refuse_spoiled(tensor)
            return None
        try:
            # asked of every tensor: the dictionary's own get is one more call of Python
            return self._records.data.get(weakref.ref(tensor.untyped_storage()))  # type: ignore[attr-defined]
        except NotImplementedError:  # sparse and nested layouts own no single storage
            return None

    def jet(self, tensor: Tensor) -> Operand:
        """The jet of a tensor of the program."""
        record = self.record_of(tensor)
        return Operand(tensor, None, None) if record is None else Operand(tensor, *record.read(tensor))

    def tracks(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` depends on a perturbed leaf."""
        return self.record_of(tensor) is not None

    @contextlib.contextmanager
    def inside_function(self, name: str) -> Iterator[None]:
        """While the forward body of autograd.Function ``name`` runs: it may use no perturbed tensor."""
        self._functions.append(name)
        try:
            yield
        finally:
            self._functions.pop()

    @property
    def begins_late(self) -> bool:
        """Whether second order begins at the loss."""
        return self.boundary.begins_late

    def inside_loss(self, func: Any, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """A context for while a loss of torch.nn.functional runs."""
        return self.boundary.inside_loss(func, args, kwargs, self.tracks)

    def run_function(self, name: str, call: Callable[[], Any]) -> Any:
        """The outputs of an autograd.Function without a rule, or None to refuse it. Only a survey runs it."""
        return None

    def stop(self, tensor: Tensor) -> None:
        """Let no tangent through this tensor object: the user detached it."""
        tensor = _torch_distributed.inside(tensor)
        self._note_detached(tensor)
        _remember(self._stopped, tensor)

    def forget(self, tensor: Tensor) -> None:
        """Let no tangent be in this tensor's memory, which no other shares."""
        tensor = _torch_distributed.inside(tensor)
        self._note_detached(tensor)
        self._records.pop(tensor.untyped_storage(), None)

    def hand_out(self, tensor: Tensor) -> None:
        """The program makes plain numbers of this tensor, with which no tangent goes."""
        self._note_detached(_torch_distributed.inside(tensor))

    def _note_detached(self, tensor: Tensor) -> None:
        """The program has detached this, unless it is a rule that did, whose derivative is a true zero there."""
        self.detached = self.detached or (not self._bodies and self.tracks(tensor))

    def is_stopped(self, tensor: Tensor) -> bool:
        """Whether the user detached this tensor, or a tensor that it is a view of."""
        reference = self._stopped.get(id(tensor))
        return reference is not None and reference() is tensor

    # -- dispatch ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is not _torch.OpOverload and isinstance(
            func, _torch.HigherOrderOperator
        ):  # slow: an abstract class
            return self._call(func, args, kwargs)
        if not _PLAIN.issuperset(types):
            if any(map(_torch_distributed.is_wrapper, types)):
                return NotImplemented  # it sends the operation on to the tensors inside, and they are seen again
            _refuse_subclasses(func, types)
        tracked = self._tracked(args, kwargs)
        if not tracked and not (self._others and not self.switches.off and plan(func).traits.meets):
            out = func(*args, **kwargs)
            if self._stopped:
                self._stop_views(func, args, out)
        elif self.switches.off:
            out = self._constant(func, args, kwargs)
        else:
            if self._functions and tracked:
                self._refuse_inside_function(func)
            try:
                out = self._follow(plan(func), func, args, kwargs, tracked)
            except MissingRule as error:
                raise self._explain(func, error) from None
            if self.earlier.any:
                self.earlier.note(out, args)
        if self.witness is not None:
            self.witness.note(func, args, kwargs, out)
        return out

    def _refuse_inside_function(self, func: Any) -> None:
        raise UnsupportedProgram(
            f"the forward body of torch.autograd.Function {self._functions[-1]} uses a perturbed tensor that is "
            f"not one of its arguments, in {call_site(str(func))}; expected it as an argument, and a rule."
        )

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of higher order: the functions that it takes are parts of the program, whatever they capture."""
        rule = lookup(func)
        if rule is None:
            raise self._explain(func, MissingRule(f"{func} has no rule", str(func)))
        with self.above(), every_stop(), self, self.before or contextlib.nullcontext():
            return rule.apply(*args, **kwargs)

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation where the program has switched autograd off: what it returns, be it a view, does not vary.

        Memory that it writes keeps its rows, as it keeps its graph in backprop.
        """
        self.halted = True
        targets = [(tensor, tensor.shape) for tensor in written(func, args, kwargs) if self.tracks(tensor)]
        out = func(*args, **kwargs)
        for tensor, shape in targets:
            if tensor.shape != shape:
                raise UnsupportedProgram(
                    f"{call_site(str(func))} changes the shape of a perturbed tensor from {tuple(shape)} to "
                    f"{tuple(tensor.shape)} where autograd is off; expected a tensor of its own."
                )
        given = _torch.pytree.tree_leaves((args, kwargs))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and self.tracks(tensor) and not any(tensor is one for one in given):
                self.stop(tensor)
        return out

    def _follow(self, step: Treatment, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        if self._complex and _any_complex((args, kwargs)):
            step = plan_for_complex(func)
        if step.kind is Kind.VIEW:
            out = func(*args, **kwargs)
            if self._stopped:
                self._stop_views(func, args, out)
            refuse_reinterpretation(func, tracked[0].dtype, out)
            return out
        if step.kind is Kind.CONSTANT:
            return func(*args, **kwargs)
        if step.kind is Kind.MISSING:
            return self._missing(step, func, args, kwargs)
        if self._unused:
            self._note_use(tracked)
        if step.kind is Kind.INPLACE:
            return self._write(step, func, args, kwargs, tracked)
        return self._return(self._apply(step, func, args, kwargs, tracked), args, func)

    def _note_use(self, tracked: list[Tensor]) -> None:
        for tensor in tracked:
            record = self._records.get(tensor.untyped_storage())
            if isinstance(record, Seed):
                record.used = True
        self._unused = [seed for seed in self._unused if not seed.used]

    def _apply(self, step: Treatment, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        """The outputs of an operation: jets from a rule, tensors of the program from a composite."""
        assert step.apply is not None
        if step.kind is Kind.COMPOSITE:
            if func in self._bodies and self._bodies[-1].namespace == "prims":
                # torch's table says that the operation is a primitive, and of the primitive that it is the operation
                raise MissingRule(f"{func} has no rule", str(func))
            # torch's own composites must not meet the function modes again, which would call the whole operation
            stops = _torch.no_function_modes() if step.traits.hidden else every_stop()
            self._bodies.append(func)
            try:
                with self.above(), stops, self:
                    out = step.apply(*args, **kwargs)
            finally:
                self._bodies.pop()
            if out is NotImplemented:  # torch's decomposition declines these arguments
                raise MissingRule(f"{func} has no rule", str(func))
            return out
        if not self.boundary.begins_late and step.traits.pointwise and self.above.is_needless():
            return self._rule(step, func, args, kwargs, self.pairs, self._lift)
        with self.above():
            if not self.boundary.begins_late:  # a short cut: the answers are known
                return self._rule(step, func, args, kwargs, self.pairs, self._lift)
            late = self.boundary.is_late(func, tracked)
            if late:
                rows = partial(self.boundary.rows, func, find=self.record_of)
                out = self._rule(step, func, args, kwargs, self.boundary.late, partial(self._lift, read=rows))
            else:
                out = self._early(step, func, args, kwargs, self.boundary.early)
            return self.boundary.note(late, func, args, kwargs, tracked, out)

    def _early(self, step: Treatment, func: Any, args: Any, kwargs: Any, pairs: PairSet) -> Any:
        """The outputs of a rule before the boundary: tangents alone, of some directions where no argument has more."""
        if not self._sparse or step.traits.meets:
            return self._rule(step, func, args, kwargs, pairs, self._lift)
        given: list[Operand] = []
        args, kwargs = (self._lift_sparsely(values, pairs.k, given) for values in (args, kwargs))
        if step.traits.sparse or not any(isinstance(one, SparseOperand) for one in given):
            return self._rule(step, func, args, kwargs, pairs, _identity)
        terms = [term_of(one) for one in given]
        union = Support.of(pairs.k, (run for term in terms if term is not None for run in term.support.runs))
        rows = {
            id(one): one.primal if term is None else Operand(one.primal, padded(term, union), None)
            for one, term in zip(given, terms, strict=True)
        }
        out = self._rule(step, func, args, kwargs, PairSet.none(union.count), partial(_replaced, rows))
        return out if union.whole else _supported(out, union)

    def _lift_sparsely(self, value: Any, k: int, given: list[Operand]) -> Any:
        """An argument with jets in place of perturbed tensors, which are noted in ``given``."""
        if isinstance(value, Tensor):
            record = self.record_of(value)
            if record is None:
                return value
            one = record.operand(value) if isinstance(record, Record) else record.operand(value, k)
            given.append(one)
            return one
        if isinstance(value, _SEVERAL):
            return [self._lift_sparsely(item, k, given) for item in value]
        if isinstance(value, dict):
            return {name: self._lift_sparsely(item, k, given) for name, item in value.items()}
        return value

    def _rule(
        self, step: Treatment, func: Any, args: Any, kwargs: Any, pairs: PairSet, lift: Callable[[Any], Any]
    ) -> Any:
        assert step.apply is not None
        if not kwargs:
            return step.apply(pairs, func, *map(lift, args))
        return step.apply(pairs, func, *map(lift, args), **{name: lift(value) for name, value in kwargs.items()})

    def _return(self, out: Any, args: Any, func: Any = None) -> Any:
        """Enter the rows of the outputs and hand back ordinary tensors."""
        if isinstance(out, Operand):
            value = _fresh(out.primal, args)
            self._enter(value, out, func)
            return value
        if isinstance(out, Tensor):
            return _fresh(out, args)
        if isinstance(out, tuple | list):
            items = [self._return(item, args, func) for item in out]
            return items if isinstance(out, list) else tuple(items)
        return out

    def _enter(self, value: Tensor, jet: Operand, func: Any) -> None:
        if jet.tangent is None and jet.second is None:
            return
        if value.is_complex() and not self._complex:
            self._begin_complex(func)
        # Outputs of one operation may share a storage, so an existing record is written to, not replaced.
        self._overwrite(value, jet)

    def _begin_complex(self, func: Any) -> None:
        """From here on complex numbers vary; the first are made by ``func``, of real ones and constants."""
        if func is not None and _rule_of(plan_for_complex(func)) is not _rule_of(plan(func)):
            raise no_complex_rule(func)
        self._complex = True

    def _write(self, step: Treatment, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        """An in-place or out= operation: the functional counterpart's jets, written into the destinations."""
        assert step.counterpart is not None
        targets = written(func, args, kwargs)
        if not self._complex and targets[0].is_complex():
            self._begin_complex(func)
        if step.counterpart.kind is Kind.CONSTANT:
            result = func(*args, **kwargs)
            jets: list[Operand] = [Operand(target, None, None) for target in targets]
        else:
            outs = _outs(func)
            if self._stopped and not self._take_over(targets):
                return self._write_values(func, args, kwargs, targets)
            jets = self._written_jets(step, func, args, kwargs, tracked, targets)
            for target, jet in zip(targets, jets, strict=True):
                value = jet.primal.detach() if jet.primal.requires_grad else jet.primal
                if target.shape != value.shape and outs:
                    target.resize_(value.shape)
                target.copy_(value)
            result = targets[0] if len(targets) == 1 else tuple(targets)
        for target, jet in zip(targets, jets, strict=True):
            self.boundary.move(jet.primal, target, self.tracks)
            self._overwrite(target, jet)
        return result

    def _written_jets(
        self, step: Treatment, func: Any, args: Any, kwargs: Any, tracked: list[Tensor], targets: list[Tensor]
    ) -> list[Operand]:
        """What the functional counterpart makes of the inputs, one jet for each target."""
        assert step.counterpart is not None
        if self.above.differentiable:
            # rows may save the old contents for a backward pass, so they get their own copy
            with self.above(), self:
                copies = {id(t): t.clone() for t in targets if t.requires_grad}
            args = [copies.get(id(a), a) for a in args]
        if self.boundary.all_of_parameters(tracked):
            args = self._with_copies(args, targets)
            tracked = self._tracked(args, kwargs)
        outs = _outs(func)
        inputs = {name: value for name, value in kwargs.items() if name not in outs}
        out = self._apply(step.counterpart, step.functional, args, inputs, tracked)
        flat = list(out) if isinstance(out, tuple | list) else [out]
        with self.above():
            return [
                item if isinstance(item, Operand) else self._jet_for(target, item, func)
                for target, item in zip(targets, flat, strict=False)
            ]

    def _jet_for(self, target: Tensor, value: Tensor, func: Any) -> Operand:
        """The jet of ``value`` as it is written into ``target``."""
        if self.boundary.joins_late(target, self.tracks):
            return Operand(value, *self.boundary.rows(func, value, self.record_of))
        return self.jet(value)

    def _with_copies(self, args: Any, targets: list[Tensor]) -> list[Any]:
        """Arguments with copies of those that are written: what is known of them outlives the write."""
        copies = {}
        for target in targets:
            copies[id(target)] = copy = target.clone()
            record = self.record_of(target)
            if record is not None:
                self._records[copy.untyped_storage()] = Record(copy, *record.read(target))
                self.boundary.adopt(copy, target)
        return [copies.get(id(arg), arg) for arg in args]

    def _take_over(self, targets: list[Tensor]) -> bool:
        """Whether rows can be written: a detached tensor becomes one of the program's own, if it owns its memory."""
        stopped = [target for target in targets if self.is_stopped(target)]
        if not all(map(_torch.owns_memory, stopped)):
            return False
        for target in stopped:
            del self._stopped[id(target)]
            self._records.pop(target.untyped_storage(), None)
        return True

    def _write_values(self, func: Any, args: Any, kwargs: Any, targets: list[Tensor]) -> Any:
        """A write through detached tensors, as ``average.data.lerp_(new, 0.1)`` is one.

        It moves the values of those that share the memory, and not their derivatives, as in backprop. The detached
        tensors themselves vary from here on, which no rows say: they are not to be read again.
        """
        if not all(map(self.is_stopped, targets)):
            raise UnsupportedProgram(
                f"{call_site(str(func))} writes into several tensors, some of them detached, whose memory they share "
                "with others; expected a write into clones."
            )
        self.detached = True
        out = func(*args, **kwargs)
        written_to = {target.untyped_storage()._cdata for target in targets}
        for reference in [*self._stopped.values()]:
            tensor = reference()
            if tensor is not None and tensor.untyped_storage()._cdata in written_to:
                _remember(self._spoiled, tensor)
        return out

    def _refuse_spoiled(self, tensor: Tensor) -> None:
        reference = self._spoiled.get(id(tensor))
        if reference is not None and reference() is tensor:
            raise UnsupportedProgram(
                f"{call_site('the program')} reads a detached tensor after it has written a perturbed value into it, "
                "while others share its memory; expected a write into a clone."
            )

    def _overwrite(self, target: Tensor, jet: Operand) -> None:
        tangent, second = jet.tangent, jet.second
        support = jet.support if isinstance(jet, SparseOperand) else None
        storage = target.untyped_storage()
        record = self._records.get(storage)
        dtype = target.dtype
        if dtype.is_complex:
            tangent, second = resolved(tangent), resolved(second)
        fits = (tangent is None or tangent.dtype == dtype) and (second is None or second.dtype == dtype)
        if record is None and fits:  # as nearly always
            if tangent is not None or second is not None:
                self._records[storage] = Record(target, tangent, second, support)
            return
        with self.above():
            tangent, second = _cast(tangent, target), _cast(second, target)
            if record is None:
                self._records[storage] = Record(target, tangent, second, support)
                return
            if isinstance(record, Seed):
                record = record.record(target)
            record.write(target, tangent, second, support)
        if record.empty:
            del self._records[storage]
        else:
            self._records[storage] = record

    def _missing(self, step: Treatment, func: Any, args: Any, kwargs: Any) -> Any:
        if not step.writes:
            out = func(*args, **kwargs)
            tensors = [t for t in _torch.pytree.tree_leaves(out) if isinstance(t, Tensor)]
            if not any(t.is_floating_point() or t.is_complex() for t in tensors):
                return out  # integers and truth values have no derivative
        raise no_complex_rule(func) if step.family == FOR_COMPLEX else MissingRule(f"{func} has no rule", str(func))

    def _explain(self, func: Any, error: MissingRule) -> MissingRule:
        if getattr(error, "explained", False):
            return error
        full = MissingRule(
            f"{error}; {call_site('called')}. Register one with jetplane.register, for example "
            f"jetplane.register.composite(torch.ops.{func}, body) with a body of operations that have rules; "
            "see CONTRIBUTING, 'Add a rule'.",
            error.op,
        )
        full.explained = True  # type: ignore[attr-defined]
        return full

    # -- arguments --------------------------------------------------------------------------------------------------

    def _tracked(self, args: Any, kwargs: Any) -> list[Tensor]:
        found: list[Tensor] = []
        self._collect(args, found)
        if kwargs:
            self._collect(kwargs.values(), found)
        return found

    def _collect(self, values: Any, found: list[Tensor]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if self.record_of(value) is not None:
                    found.append(value)
                    if value.is_complex():
                        self._complex = True
            elif isinstance(value, _SEVERAL):
                self._collect(value, found)

    def _lift(self, value: Any, read: Read | None = None) -> Any:
        """An argument with jets in place of perturbed tensors; ``read`` gives the rows of one."""
        if isinstance(value, Tensor):
            record = self.record_of(value)
            if record is None:
                return value
            tangent, second = record.read(value) if read is None else read(value)
            return value if tangent is None and second is None else Operand(value, tangent, second)
        if isinstance(value, _SEVERAL):
            return [self._lift(item, read) for item in value]
        return value

    def _stop_views(self, func: Any, args: Any, out: Any) -> None:
        """Views of a detached tensor are detached."""
        if plan(func).kind is Kind.VIEW and any(isinstance(a, Tensor) and self.is_stopped(a) for a in args):
            for tensor in out if isinstance(out, list | tuple) else [out]:
                self.stop(tensor)


def _remember(table: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> None:
    """Enter a tensor object by its identity, for as long as it lives."""
    key = id(tensor)
    table[key] = weakref.ref(tensor, lambda _: table.pop(key, None))


def _fresh(value: Tensor, args: Any) -> Tensor:
    """``value`` as autograd expects it from below: without a graph and a tangent of its own and not an input."""
    if value.requires_grad or value._is_view() or _torch.is_forward_mode():
        return _detached(value)
    for given in args:
        if given is value:
            return _detached(value)
    return value


def _detached(value: Tensor) -> Tensor:
    """As autograd has it; not the program's detach, where a call from TorchScript has left function modes on."""
    with _torch.no_function_modes():
        return value.detach()


@cache
def _outs(func: Any) -> frozenset[str]:
    """The names of the arguments that receive an operation's results."""
    return frozenset(a.name for a in func._schema.arguments if a.is_out)


def _identity(value: Any) -> Any:
    return value


def _replaced(rows: dict[int, Any], value: Any) -> Any:
    if isinstance(value, Operand):
        return rows[id(value)]
    return [_replaced(rows, item) for item in value] if isinstance(value, list) else value


def _supported(out: Any, support: Support) -> Any:
    """The outputs of a rule, whose tangents belong to these directions."""
    if isinstance(out, Operand):
        return SparseOperand(out.primal, out.tangent, None, support)
    return type(out)(_supported(item, support) for item in out) if isinstance(out, _SEVERAL) else out


def _any_complex(values: Any) -> bool:
    """Whether there is a complex tensor or number among the arguments."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_complex():
                return True
        elif isinstance(value, complex):
            return True
        elif isinstance(value, dict):
            if _any_complex(value.values()):
                return True
        elif isinstance(value, _SEVERAL) and _any_complex(value):
            return True
    return False


def _rule_of(step: Treatment) -> Any:
    return step.apply if step.counterpart is None else step.counterpart.apply


def _cast(rows: Tensor | None, value: Tensor) -> Tensor | None:
    if rows is None or rows.dtype == value.dtype:
        return rows
    if rows.is_complex() and not value.is_complex():
        raise MissingRule(f"a rule gives complex derivatives of a value of {value.dtype}, whose own are real")
    return rows.to(value.dtype)


def _has_own_dispatch(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _refuse_subclasses(func: Any, types: Any) -> None:
    for kind in types:
        if kind not in _PLAIN and not _torch.is_fake(kind) and _has_own_dispatch(kind):
            raise UnsupportedProgram(
                f"{call_site(str(func))} uses the tensor subclass {kind.__name__}, whose own dispatch hides its "
                "operations from the engine; expected plain tensors."
            )
