"""Where the program itself has switched autograd off: tangents stop there, as backprop's gradients do.

A pass mostly runs with autograd off, so torch's own state tells nothing: what counts is what the program does to it
from the start of the pass on. A function mode (:mod:`.stops`) sees each switch, and the frame that made it says which
context is entered or left; a context that was entered before the pass, or by torch's differentiation, is not the
program's. No function mode sees inference mode, but its state is the program's own where the pass began without it.

A backward pass inside the program that makes no graph is such a place, too.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from ...errors import UnsupportedProgram
from .. import _torch
from .locate import call_site, is_differentiation, is_library, is_ours

__all__ = ["GradSwitches", "check_no_grad"]

_CHOICES = ("stop", "follow")
_ENTERED, _MADE, _AGAIN, _LEFT = "entered", "made", "entered, having been made", "left"
_CONTEXTS: dict[CodeType, str] = {
    torch.no_grad.__enter__.__code__: _ENTERED,
    torch.enable_grad.__enter__.__code__: _ENTERED,
    torch.set_grad_enabled.__init__.__code__: _MADE,
    torch.set_grad_enabled.__enter__.__code__: _AGAIN,
    torch.set_grad_enabled.__call__.__code__: _LEFT,  # a decorator takes back what making it did
    torch.no_grad.__exit__.__code__: _LEFT,
    torch.enable_grad.__exit__.__code__: _LEFT,
    torch.set_grad_enabled.__exit__.__code__: _LEFT,
}
_PASSED_ON = "__torch_function__"


def check_no_grad(no_grad: str) -> bool:
    """Whether tangents are to stop where the program switches autograd off."""
    if no_grad not in _CHOICES:
        raise ValueError(f"no_grad is {no_grad!r}; expected 'stop' or 'follow'.")
    return no_grad == "stop"


class GradSwitches:
    """The state of autograd as far as it is the program's own doing. One for each pass."""

    def __init__(self, no_grad: str = "stop") -> None:
        self._stops = check_no_grad(no_grad)

    def begin(self) -> None:
        """Take the state as it is for what the program starts with: that stops nothing."""
        self._off = False
        self.blind = not _torch.IS_GRAD_ENABLED()  # what the program asks for, and puts back, is not its own state
        self._inferring = torch.is_inference_mode_enabled()
        self._before: weakref.WeakKeyDictionary[Any, bool] | None = None  # off, by context; none was entered yet
        self._by_call: Any = None  # the set_grad_enabled that was made, not entered, and switched off
        self._asked = False  # whether the program has been told that autograd is on, which it is not
        self._switching = False

    @property
    def off(self) -> bool:
        """Whether the program has switched autograd off where it is now."""
        return self._off or (self._stops and torch.is_inference_mode_enabled() and not self._inferring)

    def answer(self, code: CodeType, enabled: bool) -> bool:
        """What the program is told that asks whether autograd is on: yes, unless it has switched it off itself."""
        if not self._stops or not self.blind or is_library(code):
            return enabled
        self._asked = True
        return not self._off

    def requires_grad(self, code: CodeType) -> bool:
        """Whether code is told that a perturbed tensor requires grad, as it does in backprop."""
        return self._stops and not is_library(code)

    def switch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let a function switch autograd on or off, and note it. To be called by a function mode's hook."""
        if not self._stops or self._switching:  # a composite's body may run with the function mode entered twice
            return func(*args, **kwargs)
        self._switching = True
        try:
            out = func(*args, **kwargs)
            self._note(_torch.IS_GRAD_ENABLED(), *_origin(sys._getframe(2)))
            return out
        finally:
            self._switching = False

    @contextlib.contextmanager
    def without_graph(self) -> Iterator[None]:
        """While a backward pass runs that makes no graph: backprop takes what comes of it for constant."""
        before, self._off = self._off, self._off or self._stops
        try:
            yield
        finally:
            self._off = before

    def _note(self, enabled: bool, kind: str | None, context: Any, maker: CodeType | None) -> None:
        if maker is not None and (is_ours(maker) or is_differentiation(maker)):
            return
        if kind is _LEFT:
            self._off, self._by_call = self._before is not None and self._before.pop(context, False), None
            return
        if kind is _AGAIN:
            self._stay_off(enabled)
            self._off = not enabled
            self._by_call = None if self._by_call is context else self._by_call
            return
        if kind is not _ENTERED:
            self._refuse_unclear(enabled)
            self._stay_off(enabled)
            self._by_call = None if enabled else (context or True)
        if context is not None:
            if self._before is None:
                self._before = weakref.WeakKeyDictionary()
            self._before[context] = self._off
        self._off = not enabled

    def _stay_off(self, enabled: bool) -> None:
        """Where the program goes back to what it started with, or was told: in this pass that is off."""
        if enabled and self.blind and (self._asked or self._by_call is not None):
            _torch.SET_GRAD_ENABLED(False)

    def _refuse_unclear(self, enabled: bool) -> None:
        """Off by a call, and once more: that may be the state from before, asked for where it is not seen."""
        if enabled or not self.blind or self._before_off():
            return
        if self._by_call is not None:
            raise UnsupportedProgram(
                f"{call_site('set_grad_enabled(False)')} may mean the state from before it was switched off, which is "
                "off throughout this pass; expected 'with torch.no_grad():' around what is constant."
            )

    def _before_off(self) -> bool:
        """Whether a context that is still open has switched autograd off: then it stays off either way."""
        return self._off and self._by_call is None


def _origin(frame: FrameType | None) -> tuple[str | None, Any, CodeType | None]:
    """What a switch is a part of: entering, making or leaving a context, which one, and the code that does it."""
    while frame is not None and frame.f_code.co_name == _PASSED_ON:
        frame = frame.f_back
    kind, context = None, None
    while frame is not None and frame.f_code in _CONTEXTS:
        kind, context = _CONTEXTS[frame.f_code], frame.f_locals["self"]
        frame = frame.f_back
    if frame is None:
        return kind, context, None
    if frame.f_code.co_filename == _torch.CONTEXT_DECORATORS:  # a decorator's context is that of what it decorates
        return kind, context, getattr(inspect.unwrap(frame.f_locals["func"]), "__code__", None)
    return kind, context, frame.f_code
