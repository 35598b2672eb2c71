"""The user's own calls that end tangents, or would lose them, or say where the loss begins.

A dispatch mode cannot tell the user's ``detach`` from autograd's internal ones: both arrive as ``aten.detach``. A
function mode sees the user's calls only.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import UnsupportedProgram
from .. import _torch
from ..rules.named_losses import LOSSES
from ..storage_geometry import geometry
from .grad_switches import GradSwitches
from .locate import call_site, called_by_autograd, called_by_transform

__all__ = ["StopMode", "every_stop"]


class Follower(Protocol):
    """What follows the tangents: the engine."""

    @property
    def begins_late(self) -> bool: ...
    @property
    def switches(self) -> GradSwitches: ...
    def stop(self, tensor: Tensor) -> None: ...
    def forget(self, tensor: Tensor) -> None: ...
    def hand_out(self, tensor: Tensor) -> None: ...
    def tracks(self, tensor: Tensor) -> bool: ...
    def inside_loss(self, func: Any, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[None]: ...


class StopMode(TorchFunctionMode):
    """Sees the user's own calls, which a dispatch mode cannot tell from autograd's internal ones."""

    def __init__(self, jets: Follower) -> None:
        super().__init__()
        self._jets = weakref.proxy(jets)

    def __enter__(self) -> StopMode:
        _RUNNING.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        _RUNNING.remove(self)
        super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        hook = _HOOKS.get(func)
        if hook is None:
            return func(*args, **(kwargs or {}))
        return hook(self._jets, func, args, kwargs or {})


_RUNNING: list[StopMode] = []  # of all nested passes, outermost first


@contextlib.contextmanager
def every_stop() -> Iterator[None]:
    """A composite's body is a part of the program: its detach stops the tangents of every nested pass."""
    with contextlib.ExitStack() as stack:
        for stops in dict.fromkeys(_RUNNING):
            stack.enter_context(stops)
        yield


def _stop_output(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if not called_by_autograd():
        jets.stop(_torch.unwrap_functorch(out))
    return out


def _new_constant(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    # in memory of its own, so that it can be written to as any other
    out = func(*args, **kwargs)
    jets.forget(_torch.unwrap_functorch(out))
    return out


def _numbers(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    if not _torch.is_functorch_wrapper(args[0]):
        jets.hand_out(args[0])
    return func(*args, **kwargs)


class _SeenEngine:
    """torch's engine of backward passes, with the modes on: it runs parts of the program, once more or for the first
    time, as checkpoints and a Function's ``backward`` are. A function mode is off while the function it sees runs."""

    def __init__(self) -> None:
        self._engine = _torch.engine()
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with every_stop() if threading.get_ident() == self._thread else contextlib.nullcontext():
            return self._engine.run_backward(*args, **kwargs)


_NO_GRAPH = "does not require grad"  # and, of a result, does not have a grad_fn


def _why_without_graph(
    jets: Follower, func: Any, error: RuntimeError, args: Any, kwargs: Any
) -> tuple[str, str] | None:
    """Why autograd knows nothing of what a program wants to differentiate, and what to do; None if that is its own."""
    if _NO_GRAPH not in str(error):
        return None
    if jets.switches.blind:
        return (
            "for a pass runs with autograd off",
            "torch.enable_grad() around a program that differentiates inside itself"
            + ("" if func is torch.autograd.grad else ", and no backward of a loss, which is only to be returned"),
        )
    given = _torch.pytree.tree_leaves((args, kwargs))
    if any(isinstance(one, Tensor) and _has_no_graph(jets, one) for one in given):
        return (
            "for the perturbed tensors do not require grad",
            "primals that do, as of requires_grad_(), or torch.func.grad inside the program",
        )
    return None


def _differentiate(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    engine = _torch.engine()
    _torch.set_engine(_SeenEngine())
    try:
        # torch.func's own are functions, to be differentiated; where autograd is off it makes no graph of them
        if _keeps_graph(func, args, kwargs) or called_by_transform():
            return func(*args, **kwargs)
        with jets.switches.without_graph():
            return func(*args, **kwargs)
    except RuntimeError as error:
        reason = _why_without_graph(jets, func, error, args, kwargs)
        if reason is None:
            raise
        raise UnsupportedProgram(
            f"{call_site('the program')} differentiates what has no graph, {reason[0]} ({error}); expected {reason[1]}."
        ) from error
    finally:
        _torch.set_engine(engine)


def _keeps_graph(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a backward pass is asked for derivatives that can be differentiated."""
    place = 4 if func is torch.autograd.grad else 3
    return bool(args[place] if len(args) > place else kwargs.get("create_graph"))


def _switch(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    return jets.switches.switch(func, args, kwargs)


def _gumbel_softmax(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    # its straight-through detach happens where this mode cannot see it, so it is done here
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    hard, dim = bound.arguments["hard"], bound.arguments["dim"]
    bound.arguments["hard"] = False
    soft = func(*bound.args, **bound.kwargs)
    if not hard:
        return soft
    one_hot = torch.zeros_like(soft).scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0)
    constant = soft.detach()
    jets.stop(_torch.unwrap_functorch(constant))
    return one_hot - constant + soft


def _refuse_tracked(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if isinstance(tensor, Tensor) and not _torch.is_functorch_wrapper(tensor) and jets.tracks(tensor):
        raise UnsupportedProgram(
            f"{getattr(func, '__name__', func)} on a perturbed tensor loses its tangents, in "
            f"{call_site('the program')}; expected .detach() before it."
        )
    return func(*args, **kwargs)


def _set_data(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, value = args
    if isinstance(value, Tensor) and not _torch.is_functorch_wrapper(tensor) and not _is_same_memory(tensor, value):
        if jets.tracks(tensor):
            raise UnsupportedProgram(
                f"{call_site('an assignment to .data')} puts other memory under a perturbed tensor, which loses its "
                "tangents; expected an assignment of the tensor itself."
            )
        func(tensor, value)
        jets.stop(tensor)  # whatever the value depends on: to autograd it is data
        return None
    return func(*args, **kwargs)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether nothing changes by one in the place of the other, as ``Module.to`` puts a parameter there itself."""
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() if a is not b else True
    return same and a.dtype == b.dtype and geometry(a) == geometry(b)


def _requires_grad(jets: Follower, func: Any, args: Any, kwargs: Any) -> bool:
    # a program that asks decides by the answer, such as whether derivatives inside it are to have a graph; in backprop
    # what depends on a parameter says yes
    enabled = bool(func(*args, **kwargs))
    if enabled or _torch.is_functorch_wrapper(args[0]):
        return enabled
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:  # the hooks of nested passes
        frame = frame.f_back
    if frame is None or not jets.switches.requires_grad(frame.f_code) or not jets.tracks(args[0]):
        return False
    if _torch.IS_GRAD_ENABLED() and not isinstance(args[0], torch.nn.Parameter):
        with _torch.no_function_modes():  # so that the derivative it may take by this tensor has a graph
            args[0].requires_grad_()
    return True


def _keep_gradient(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    # no backward pass comes, so there is nothing to keep
    return None if _has_no_graph(jets, args[0]) else func(*args, **kwargs)


_OBSERVERS = frozenset({"pyro.util"})  # modules whose hooks change no gradient: they warn of what is not finite


def _refuse_hook(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    if _has_no_graph(jets, args[0]):
        hook = args[1] if len(args) > 1 else kwargs.get("hook")
        if getattr(hook, "__module__", None) in _OBSERVERS:
            return None
        raise UnsupportedProgram(
            f"{call_site('register_hook')} puts a hook on the gradient of a perturbed tensor, which no backward pass "
            "will call; expected a program without it."
        )
    return func(*args, **kwargs)


def _has_no_graph(jets: Follower, tensor: Tensor) -> bool:
    """Whether autograd knows nothing of a perturbed tensor, as in a pass, which runs with autograd off."""
    return not _torch.is_functorch_wrapper(tensor) and not _requires(tensor) and jets.tracks(tensor)


def _without_fused_rnn(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    # cuDNN's and oneDNN's fused layers hide the recurrence; without them torch unrolls it into plain operations
    with _torch.without_fused_libraries():
        return func(*args, **kwargs)


def _loss(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    # the call that the user made, which the operations it consists of do not tell
    if jets.switches.off:
        return func(*args, **kwargs)
    with jets.inside_loss(func, args, kwargs):
        return func(*args, **kwargs)


def _linear_cross_entropy(jets: Follower, func: Any, args: Any, kwargs: Any) -> Any:
    # the last layer of the model inside the loss: the boundary is between them
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    if not jets.begins_late or jets.switches.off or given["linear_weight"].ndim != 2:
        return func(*args, **kwargs)
    z = F.linear(given["input"], given["linear_weight"], given.get("linear_bias"))
    options: dict[str, Any] = {
        name: given[name] for name in ("weight", "reduction", "label_smoothing") if name in given
    }
    if given.get("ignore_index") is not None:
        options["ignore_index"] = given["ignore_index"]
    return _loss(jets, F.cross_entropy, (z, given["target"]), options)


_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _requires(tensor: Tensor) -> bool:
    """What autograd itself says."""
    with _torch.no_function_modes():
        return bool(tensor.requires_grad)


_HOOKS: dict[Any, Any] = {
    **dict.fromkeys(LOSSES, _loss),
    _torch.SET_GRAD_ENABLED: _switch,
    torch.Tensor.detach: _stop_output,
    torch.detach: _stop_output,
    torch.Tensor.detach_: _stop_output,
    torch.detach_: _stop_output,
    torch.Tensor.data.__get__: _stop_output,  # type: ignore[attr-defined]
    torch.tensor: _new_constant,
    **dict.fromkeys((torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__), _numbers),
    torch.autograd.grad: _differentiate,
    torch.autograd.backward: _differentiate,
    torch.Tensor.backward: _differentiate,
    torch.nn.functional.gumbel_softmax: _gumbel_softmax,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    _REQUIRES_GRAD: _requires_grad,
    torch.Tensor.retain_grad: _keep_gradient,
    torch.Tensor.register_hook: _refuse_hook,
    torch.Tensor.numpy: _refuse_tracked,
    torch.Tensor.__array__: _refuse_tracked,
    torch.Tensor.__dlpack__: _refuse_tracked,
    torch.lstm: _without_fused_rnn,
    torch.gru: _without_fused_rnn,
    torch.rnn_tanh: _without_fused_rnn,
    torch.rnn_relu: _without_fused_rnn,
}
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    _HOOKS[F.linear_cross_entropy] = _linear_cross_entropy
