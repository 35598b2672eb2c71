"""Where tangents would get lost in silence: each place is switched off or refused while a pass runs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule, UnsupportedProgram
from .. import _torch
from ..algebra.registry import Kind, lookup
from .interpreter import JetMode
from .locate import call_site
from .threads import Handovers

_LOCK = threading.Lock()
_ACTIVE: list[tuple[JetMode, int]] = []  # running passes and the threads that own them
# the checkpointed program itself, or what saves its inputs; operations that the dispatcher sees, and their rules
_TRANSPARENT = ("torch.utils.checkpoint", "torch._library.autograd", "torch.distributed.")
_HANDOVERS = Handovers(
    lambda thread: any(owner == thread for _, owner in _ACTIVE),
    lambda tensor: any(mode.tracks(tensor) for mode, _ in _ACTIVE),
)


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
            mode.switches.begin()
            for one in (mode,) if mode.before is None else (mode, mode.before):
                one.__enter__()
                self._entered.append(one)
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


_COMPILE = torch.compile
_FOLD = _torch.CONST_FOLD.split_module


def _install() -> None:
    _torch.SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
    _HANDOVERS.install()
    torch.is_grad_enabled = _is_grad_enabled
    torch.compile = _compile
    _torch.CONST_FOLD.split_module = _fold


def _uninstall() -> None:
    del _torch.SingleLevelFunction.apply  # type: ignore[attr-defined]
    torch.is_grad_enabled = _torch.IS_GRAD_ENABLED
    torch.compile = _COMPILE
    _torch.CONST_FOLD.split_module = _FOLD


# -- the state of autograd ------------------------------------------------------------------------------------------


def _is_grad_enabled() -> bool:
    """``torch.is_grad_enabled`` while a pass runs: to the program, what is its own doing."""
    enabled = _torch.IS_GRAD_ENABLED()
    for mode, owner in _ACTIVE:
        if owner == threading.get_ident():
            enabled = mode.switches.answer(sys._getframe(1).f_code, enabled)
    return enabled


# -- the compiler ---------------------------------------------------------------------------------------------------


def _compile(*args: Any, **kwargs: Any) -> Any:
    """``torch.compile`` while a pass runs, as torch.cond calls it: what it makes runs as it is."""
    _torch.uncompiled.begin_late()
    return _COMPILE(*args, **kwargs)


def _fold(*args: Any, **kwargs: Any) -> Any:
    """What ``torch.func.linearize`` makes constants with: what it traces inside a pass has none of the numbers."""
    if any(owner == threading.get_ident() for _, owner in _ACTIVE):
        raise UnsupportedProgram(
            f"{call_site('torch.func.linearize')} traces a graph whose numbers are not those of the pass; expected "
            "torch.func.jvp."
        )
    return _FOLD(*args, **kwargs)


# -- torch.autograd.Function --------------------------------------------------------------------------------------


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``Function.apply`` while a pass runs: a Function's forward body is not what its author differentiates."""
    original = super(_torch.SingleLevelFunction, cls).apply
    if cls.__module__.startswith(_TRANSPARENT):  # also where the perturbed tensors are captured, and the arguments data
        return original(*args, **kwargs)
    made, lift = _made_of(cls)
    if made is None:
        return original(*args, **kwargs)
    tensors = [_torch.unwrap_functorch(a) for a in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    if not any(mode.tracks(tensor) for mode, _ in _ACTIVE if not mode.switches.off for tensor in tensors):
        with contextlib.ExitStack() as stack:
            for mode, _ in _ACTIVE:
                stack.enter_context(mode.inside_function(made.__name__))
            return original(*args, **kwargs)
    rule = lookup(made)
    if rule is None:
        for mode, _ in _ACTIVE:
            out = mode.run_function(made.__name__, partial(original, *args, **kwargs))
            if out is not None:
                return out
        raise MissingRule(
            f"torch.autograd.Function {made.__name__} has no rule, and differentiating its forward body could "
            f"contradict its backward; {call_site('called')}. Register one with "
            f"jetplane.register.composite({made.__name__}, body), or jetplane.register.transparent({made.__name__}) if "
            "the forward body itself is to be differentiated.",
            made.__name__,
        )
    if rule.kind is Kind.CONSTANT:
        return _torch.pytree.tree_map_only(Tensor, torch.Tensor.detach, original(*args, **kwargs))
    return original(*args, **kwargs) if rule.traits.as_it_is else lift(rule.apply)(*args, **kwargs)


def _made_of(cls: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The Function of the program that ``cls`` is, or was made of for ``vmap``, with how a program is lifted alike.

    None where it only calls that of the program, which comes here in its turn.
    """
    made = _torch.made_for_transform(cls)
    if made is None:
        return cls, lambda body: body
    inner, over = made
    if over is None:
        return None, lambda body: body
    origin, lift = _made_of(inner)
    return origin, lambda body: over(lift(body))
