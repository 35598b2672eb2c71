"""Where tangents would get lost in silence: each place is switched off or refused while a pass runs."""

from __future__ import annotations

import contextlib
import sys
import threading
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


class guarded:
    """Run a pass with every known leak of tangents closed; all settings are restored on the way out.

    A class, as the parts are: generators would cost more than a small program inside.
    """

    def __init__(self, mode: JetMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        refuse_transforms()
        mode = self._mode
        # the fused kernels of TorchScript and of compiled functions are invisible
        contexts = (_Settings(), _torch.unfused_script(), _torch.uncompiled(), _Hooks(mode), mode.stops)
        self._entered: list[Any] = []
        try:
            for context in contexts:
                context.__enter__()
                self._entered.append(context)
            mode.above = _torch.AboveAutograd()  # as late as this: other modes may have been entered since
            mode.__enter__()
            self._entered.append(mode)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *exc: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__(*exc)


class _Settings:
    """Autocast without its cache, which holds casts of weights made before they were perturbed; no fused encoder."""

    def __enter__(self) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        self._fused = torch.backends.mha.get_fastpath_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *exc: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._fused)
        torch.set_autocast_cache_enabled(self._cached)
        torch.clear_autocast_cache()


class _Hooks:
    """What must be seen in all threads while a pass runs."""

    def __init__(self, mode: JetMode) -> None:
        self._entry = mode, threading.get_ident()

    def __enter__(self) -> None:
        with _LOCK:
            if not _ACTIVE:
                _install()
            _ACTIVE.append(self._entry)

    def __exit__(self, *exc: object) -> None:
        with _LOCK:
            _ACTIVE.remove(self._entry)
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
