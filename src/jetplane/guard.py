"""A guard for forward-only training: inside, a backward pass and the building of an autograd graph raise.

Two places of torch see all of it, whichever way it is reached, and neither costs anything until it is:

- Autograd makes a node for each operation that it records, an addition as well as a convolution, in C++ as well as in
  Python. In torch's anomaly mode a new node asks ``torch.fx.traceback.format_stack`` where it was made. The guard
  answers that question, and raises. A node is not made while autograd is off, as it is on entry.
- Backward passes that Python starts are run by one engine object. The guard stands in for it.

What is allowed: tensors that require grad, setting ``.grad``, torch.optim's steps, forward-mode AD, and derivatives
within one layer (:class:`local`). A backward pass that a C++ extension starts by itself, over a graph from before the
guard, is not seen.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx import traceback as _torch_traceback

from .ad import _torch
from .ad.engine.locate import call_site
from .errors import BackwardPass

__all__ = ["Seen", "count_default", "forward_only", "local", "refuse_default"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class forward_only:
    """Raise :class:`jetplane.BackwardPass` at a backward pass, and where an autograd graph is built.

    Autograd is off inside; ``torch.enable_grad()`` turns it on, and then the first operation on a tensor that requires
    grad raises. The guard holds for the thread that it is entered in, and for threads that are made inside. It can be
    nested, and used as a decorator. Afterwards everything is as it was.

    A layer's local product, its own input times numbers that belong to its own output, is not a backward pass. For an
    operation that :func:`jetplane.forward_gradient` has no adjoint of, autograd makes that product, of this one
    operation. Entering the guard gives a :class:`Seen` that counts them, and ``strict`` refuses them.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> with forward_only():
        ...     loss = (w * w).sum()
        ...     try:
        ...         loss.backward()
        ...     except BackwardPass as error:
        ...         print(str(error).split(" at ")[0])
        torch.Tensor.backward
        >>> with forward_only(strict=True) as seen:
        ...     pass
        >>> print(seen)
        no operation was differentiated by autograd
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def __enter__(self) -> Seen:
        guard = _Guard(self.strict)
        _HERE.guards.append(guard)
        try:
            with _LOCK:
                if not _ACTIVE:
                    _install()
                _ACTIVE.append(guard)
            torch.set_grad_enabled(False)
            _check_once()
        except BaseException:
            _leave(guard)
            raise
        return guard.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(_HERE.guards[-1])
        last, _HERE.last = _HERE.last, None
        if last is not None and "failed in the TorchScript interpreter" in str(error):
            raise last from error  # its text is lost there

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """``function``, guarded whenever it is called."""
        later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isclass)
        if any(is_one(function) for is_one in later):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(f"{name} does not run where it is called, so it cannot be guarded; expected a function.")

        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with forward_only(self.strict):
                return function(*args, **kwargs)

        return guarded


@dataclass
class Seen:
    """What a guard has seen and let pass."""

    defaults: Counter[str] = field(default_factory=Counter)  # by operation: derivatives of it alone, by autograd

    def __str__(self) -> str:
        parts = ", ".join(f"{op} {count} times" for op, count in sorted(self.defaults.items()))
        return (
            f"differentiated by autograd, each by itself: {parts}"
            if parts
            else ("no operation was differentiated by autograd")
        )


class local:
    """Inside, in this thread, the guard lets autograd do as it likes.

    For derivatives that stay within one layer and for nothing else: that of a parametrised weight by what it is made
    of, or a layer's output by its own parameters. Not for anything that runs through two layers. Autograd is not turned
    on by it. Without a guard it does nothing.

    Example:
        >>> v = torch.ones(2, requires_grad=True)
        >>> with forward_only(), local(), torch.enable_grad():
        ...     torch.autograd.grad((v * v).sum(), v)
        (tensor([2., 2.]),)
    """

    def __enter__(self) -> None:
        _HERE.allowed += 1

    def __exit__(self, *exc: object) -> None:
        _HERE.allowed -= 1


# -- who is guarded ---------------------------------------------------------------------------------------------------


class _Guard:
    """One use of :class:`forward_only`."""

    def __init__(self, strict: bool) -> None:
        self.grad = torch.is_grad_enabled()  # to be restored
        self.strict = strict
        self.seen = Seen()


class _Here(threading.local):
    """What holds in one thread."""

    def __init__(self) -> None:
        self.guards: list[_Guard] = []
        self.allowed = 0
        self.last: BackwardPass | None = None  # that a node made raise


_HERE = _Here()
_LOCK = threading.RLock()
_ACTIVE: list[_Guard] = []  # of all threads
_INHERITED = "_forward_only"  # the guards that a thread was made under, an attribute of it


def _guarded() -> bool:
    return not _HERE.allowed and bool(_guards())


def _guards() -> list[_Guard]:
    """Those that hold in this thread."""
    if _HERE.guards:
        return _HERE.guards
    return [guard for guard in getattr(threading.current_thread(), _INHERITED, ()) if guard in _ACTIVE]


def refuse_default(op: str) -> None:
    """Raise if a guard is strict about operations that autograd differentiates by themselves."""
    if any(guard.strict for guard in _guards()):
        raise BackwardPass(
            f"{call_site(op)} has no adjoint, so autograd would differentiate it, by itself, inside "
            f"jetplane.forward_only(strict=True); expected jetplane.register.adjoint(torch.ops.{op}, ...) before."
        )


def count_default(op: str) -> None:
    """Note that autograd differentiates one operation by itself; raise where that is refused."""
    refuse_default(op)
    for guard in _guards():
        guard.seen.defaults[op] += 1


def _leave(guard: _Guard) -> None:
    torch.set_grad_enabled(guard.grad)
    _HERE.guards.remove(guard)
    with _LOCK:
        if guard in _ACTIVE:
            _ACTIVE.remove(guard)
            if not _ACTIVE:
                _uninstall()


# -- what torch asks --------------------------------------------------------------------------------------------------

_FORMAT, _SET_ANOMALY, _INIT = _torch_traceback.format_stack, torch.set_anomaly_enabled, threading.Thread.__init__


class _Before:
    """What the first of the guards found."""

    engine: Any = None
    anomaly = (False, False)  # enabled, and looking for NaN
    traces = False  # somebody wants to know where nodes were made


def _install() -> None:
    _Before.anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    _Before.traces = _Before.anomaly[0]
    _Before.engine = _torch.engine()
    _torch_traceback.format_stack = _node_made
    torch.set_anomaly_enabled = _set_anomaly
    _torch.set_engine(_Engine(_Before.engine))
    threading.Thread.__init__ = _made_inside  # type: ignore[method-assign]
    _set_anomaly(*_Before.anomaly)


def _uninstall() -> None:
    _torch_traceback.format_stack = _FORMAT
    torch.set_anomaly_enabled = _SET_ANOMALY
    _torch.set_engine(_Before.engine)
    threading.Thread.__init__ = _INIT  # type: ignore[method-assign]
    _SET_ANOMALY(*_Before.anomaly)


def _set_anomaly(enabled: bool, check_nan: bool = True) -> None:
    """In place of ``torch.set_anomaly_enabled``: a program that turns anomaly mode off must not turn the guard off."""
    _Before.traces = enabled
    _SET_ANOMALY(True, enabled and check_nan)


def _made_inside(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
    """In place of ``Thread.__init__``: torch starts a thread with autograd on, but it is part of what is guarded."""
    _INIT(self, *args, **kwargs)
    outer = getattr(threading.current_thread(), _INHERITED, ())
    setattr(self, _INHERITED, (*outer, *_HERE.guards))


def _node_made() -> list[str]:
    """In place of ``format_stack``, which autograd calls for each node that it makes."""
    tracing = _torch.is_tracing()  # a graph that the compiler builds of tensors without values is none of the program's
    if _guarded() and torch.is_grad_enabled() and not tracing:
        operation = _operation(sys._getframe().f_back)
        if operation is not None:
            _HERE.last = BackwardPass(
                f"{call_site(operation)} builds an autograd graph inside jetplane.forward_only(); expected it where "
                "autograd is off, as it is there until torch.enable_grad() or the like turns it on."
            )
            raise _HERE.last
    return _FORMAT() if tracing or _Before.traces else []


class _Engine:
    """In place of the engine of backward passes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if _guarded() and not _torch.is_tracing():
            raise BackwardPass(
                f"{call_site(_entry(sys._getframe().f_back))} starts a backward pass inside jetplane.forward_only(); "
                "expected forward passes alone, as of jetplane.optim or jetplane.forward_gradient."
            )
        return self._engine.run_backward(*args, **kwargs)


@functools.cache
def _check_once() -> None:
    """Raise where this torch does not tell of the nodes that it makes: a guard that sees nothing is worse than none."""
    with torch.inference_mode(False), torch.enable_grad():
        try:
            torch.zeros(1, device="cpu", requires_grad=True).abs()
        except BackwardPass:
            return
    raise RuntimeError(
        f"torch {torch.__version__} does not report the autograd nodes that it makes, so forward_only cannot see them; "
        "expected torch 2.11 to 2.13."
    )


# -- names for what was done ------------------------------------------------------------------------------------------

_TORCH, _JETPLANE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
_LONGEST = 60


def _operation(frame: FrameType | None) -> str | None:
    """What makes a node, as it stands in the source; None where the node will not be part of a graph."""
    function = frame.f_locals.get("cls") if frame is not None else None
    if frame is not None and inspect.isclass(function) and issubclass(function, torch.autograd.Function):
        # a Function makes its node first, and finds out then whether any of its arguments requires grad
        arguments = frame.f_locals.get("args", ())
        needed = any(isinstance(one, torch.Tensor) and one.requires_grad for one in arguments)
        return f"torch.autograd.Function {function.__name__}" if needed else None
    while frame is not None and frame.f_code.co_filename.startswith(_JETPLANE):  # calls that a pass hands on
        frame = frame.f_back
    return _expression(frame) or "an operation"


def _expression(frame: FrameType | None) -> str:
    """The call that ``frame`` is in, as it stands in the source; empty where there is no source."""
    if frame is None:
        return ""
    first, last, start, stop = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), [None] * 4)
    if first is None or last is None or start is None or stop is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    text = " ".join(b" ".join(lines).decode(errors="replace").split())
    if not text:
        return ""
    return f"`{text}`" if len(text) <= _LONGEST else f"`{text[:_LONGEST].rstrip()}...`"


def _entry(frame: FrameType | None) -> str:
    """The function of torch through which the program came here, by its public name."""
    name = "a call of the engine"
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        module = str(frame.f_globals.get("__name__", ""))
        parts = ["torch", "func"] if module.startswith("torch._functorch") else module.split(".")
        qualified = frame.f_code.co_qualname.split(".<locals>")[0]
        name = ".".join([*(part for part in parts if not part.startswith("_")), qualified])
        frame = frame.f_back
    return name
