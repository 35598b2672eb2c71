"""Where tangents would get lost in silence: each place is switched off or refused while a pass runs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingRule, UnsupportedProgram
from . import _torch
from .interpreter import JetMode
from .locate import call_site
from .registry import Kind, lookup

_LOCK = threading.Lock()
_ACTIVE: list[tuple[JetMode, int]] = []  # running passes and the threads that own them
_HARMLESS_THREADS = ("multiprocessing", "torch.utils.data", "tqdm")


def refuse_transforms() -> None:
    """Raise inside torch.func transforms, whose wrapped tensors a pass cannot follow."""
    if _torch.are_transforms_active():
        raise UnsupportedProgram(
            "a jetplane pass was started inside a torch.func transform (vmap, grad, jvp, ...); expected the transform "
            "inside the differentiated program, or batched inputs."
        )


@contextlib.contextmanager
def guarded(mode: JetMode) -> Iterator[None]:
    """Run a pass with every known leak of tangents closed; all settings are restored on the way out."""
    refuse_transforms()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_autocast_without_cache())
        stack.enter_context(_no_fused_encoder())
        stack.enter_context(_torch.unfused_script())  # its fused kernels are invisible
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_hooks(mode))
        stack.enter_context(mode.stops)
        mode.above = _torch.AboveAutograd()  # as late as this: other modes may have been entered since
        stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _autocast_without_cache() -> Iterator[None]:
    # The cache holds casts of weights made before they were perturbed.
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _no_fused_encoder() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def _hooks(mode: JetMode) -> Iterator[None]:
    entry = (mode, threading.get_ident())
    with _LOCK:
        if not _ACTIVE:
            _install()
        _ACTIVE.append(entry)
    try:
        yield
    finally:
        with _LOCK:
            _ACTIVE.remove(entry)
            if not _ACTIVE:
                _uninstall()


_START, _SUBMIT = threading.Thread.start, ThreadPoolExecutor.submit


def _install() -> None:
    _torch.SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
    threading.Thread.start = _start  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = _submit  # type: ignore[method-assign,assignment]


def _uninstall() -> None:
    del _torch.SingleLevelFunction.apply  # type: ignore[attr-defined]
    threading.Thread.start = _START  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = _SUBMIT  # type: ignore[method-assign]


# -- threads ------------------------------------------------------------------------------------------------------


def _start(self: threading.Thread) -> None:
    target = getattr(self, "_target", None) or type(self).run
    if not str(getattr(target, "__module__", "")).startswith(_HARMLESS_THREADS):
        _refuse_thread()
    _START(self)


def _submit(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
    _refuse_thread()
    return _SUBMIT(self, *args, **kwargs)


def _refuse_thread() -> None:
    if any(owner == threading.get_ident() for _, owner in _ACTIVE):
        raise UnsupportedProgram(
            f"{call_site('the program')} starts a thread, where tangents are not followed; expected it to run in the "
            "thread of the pass (torch.nn.DataParallel cannot be used)."
        )


# -- torch.autograd.Function --------------------------------------------------------------------------------------


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply`` while a pass runs: a Function's forward body is not what its author differentiates."""
    original = super(_torch.SingleLevelFunction, cls).apply
    tensors = [_torch.unwrap_functorch(a) for a in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    if not any(mode.tracks(tensor) for mode, _ in _ACTIVE for tensor in tensors):
        with contextlib.ExitStack() as stack:
            for mode, _ in _ACTIVE:
                stack.enter_context(mode.inside_function(cls.__name__))
            return original(*args, **kwargs)
    if cls.__module__ == "torch.utils.checkpoint":
        return original(*args, **kwargs)  # its forward is the checkpointed program itself, or saves its inputs
    rule = lookup(cls)
    if rule is None:
        for mode, _ in _ACTIVE:
            out = mode.run_function(cls.__name__, partial(original, *args, **kwargs))
            if out is not None:
                return out
        raise MissingRule(
            f"torch.autograd.Function {cls.__name__} has no rule, and differentiating its forward body could "
            f"contradict its backward; {call_site('called')}. Register one with "
            f"jetplane.register.composite({cls.__name__}, body), or jetplane.register.transparent({cls.__name__}) if "
            "the forward body itself is to be differentiated.",
            cls.__name__,
        )
    if rule.kind is Kind.CONSTANT:
        return _torch.pytree.tree_map_only(Tensor, torch.Tensor.detach, original(*args, **kwargs))
    return rule.apply(*args, **kwargs) if rule.family != "transparent" else original(*args, **kwargs)
