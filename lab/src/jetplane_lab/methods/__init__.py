"""The optimizer of a config: jetplane's for the forward-only methods, torch's for backpropagation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from jetplane import ForwardGradient, optim, solvers

from ..config import FORWARD_GRADIENT, ZEROTH_ORDER, Config
from .backprop import Backprop
from .forward import Horizon, OnForwardGradients

__all__ = ["Method", "average_of", "make", "scheduled"]


class Method(Protocol):
    """What the training loop asks of an optimizer."""

    @property
    def report(self) -> Any: ...

    def step(self, loss_fn: Any, *batch: Any, has_aux: bool = False) -> Tensor: ...

    def steps(self, loss_fn: Any, *batches: Tensor, has_aux: bool = False) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


_SOLVERS: dict[str, Callable[[], solvers.Solver]] = {
    "jittered-inverse": solvers.JitteredInverse,
    "saddle-free": solvers.SaddleFree,
    "softabs": solvers.SoftAbs,
}
_ADAPTIVE: dict[str, Callable[[float], solvers.Solver]] = {
    "damped": solvers.Damped,
    "trust-region": solvers.TrustRegion,
    "cubic": solvers.Cubic,
    "levenberg-marquardt": solvers.LevenbergMarquardt,
}
_ALONE = ("backprop", "sgd", "adam", *ZEROTH_ORDER)  # not for several processes


def make(config: Config, parameters: Iterable[Tensor], process_group: Any = None) -> Method:
    """The optimizer of ``config``'s method and options, which all processes of a group step together."""
    moving = list(parameters)
    if config.method in FORWARD_GRADIENT:
        return _on_forward_gradients(config, moving, process_group)
    if process_group is not None and config.method in _ALONE:
        raise ValueError(
            f"method is {config.method!r}, which is trained by one process; expected a search in a plane or a method "
            "on forward gradients for several."
        )
    if config.method in ("backprop", "sgd"):
        sgd = torch.optim.SGD(moving, config.lr, config.momentum, weight_decay=config.weight_decay)
        return Backprop(sgd, compile=config.compile)
    if config.method == "adam":
        eps = 1e-8 if config.eps is None else config.eps
        graphed = config.compile and moving[0].is_cuda  # then its count of steps must lie on the device
        adam = torch.optim.Adam(moving, config.lr, eps=eps, weight_decay=config.weight_decay, capturable=graphed)
        return Backprop(adam, compile=config.compile)
    if config.method in ZEROTH_ORDER:
        named = {"mezo": optim.MeZO, "fzoo": optim.FZOO}[config.method]
        eps = 1e-3 if config.eps is None else config.eps
        decay = config.weight_decay
        return named(moving, config.lr, config.k, eps=eps, seed=config.seed, weight_decay=decay)
    return _search(config, moving, process_group)


def _search(config: Config, moving: list[Tensor], process_group: Any) -> Method:
    # patience: None, for a run of 3000 epochs must not end for ten bad steps; they are counted in the metrics
    options: dict[str, Any] = {
        "seed": config.seed,
        "clip": config.clip,
        "weight_decay": config.weight_decay,
        "patience": None,
        "process_group": process_group,
    }
    if config.compile:
        options["compile"] = True
    if config.method == "fgd":
        return optim.FGD(moving, config.lr, config.k, **options)
    if config.method == "gauss-newton":
        return optim.GaussNewtonSearch(moving, config.lr, config.k, **options)
    if (solver := _solver(config)) is not None:
        options["solver"] = solver
    if config.method == "fomoh-kd":
        return optim.FoMoHKD(moving, config.lr, config.k, **options)
    named = {"fomoh": optim.FoMoH, "fomoh-bp": optim.FoMoHBP}[config.method]
    return named(moving, config.lr, **options)


def _on_forward_gradients(config: Config, moving: list[Tensor], process_group: Any) -> Method:
    eps, decay = 1e-8 if config.eps is None else config.eps, config.weight_decay
    shared: dict[str, Any] = {"samples": config.samples, "seed": config.seed, "compile": config.compile}
    shared["process_group"] = process_group
    if config.method == "horizon":
        return Horizon(optim.HorizonAdam(moving, lr=config.lr, eps=eps, weight_decay=decay, **shared))
    optimizer: torch.optim.Optimizer
    if config.method == "forward-adam":
        optimizer = torch.optim.Adam(moving, config.lr, eps=eps, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(moving, config.lr, config.momentum, weight_decay=decay)
    return OnForwardGradients(optimizer, ForwardGradient(moving, **shared))


def average_of(method: Method) -> contextlib.AbstractContextManager[None] | None:
    """The average that a method keeps of the parameters in the model, inside; None where it keeps none."""
    return method.averaged() if isinstance(method, Horizon) else None


def scheduled(method: Method) -> torch.optim.Optimizer:
    """The torch optimizer whose lr a scheduler sets."""
    found = method.optimizer if isinstance(method, Backprop | OnForwardGradients | Horizon) else method
    assert isinstance(found, torch.optim.Optimizer)
    return found


def _solver(config: Config) -> solvers.Solver | None:
    """The solver that was asked for; None for the method's own."""
    if config.solver == "absolute-curvature" or config.eps is not None:
        return solvers.AbsoluteCurvature() if config.eps is None else solvers.AbsoluteCurvature(config.eps)
    if config.solver in _ADAPTIVE:
        return _ADAPTIVE[config.solver](1.0 if config.start is None else config.start)
    return None if config.solver is None else _SOLVERS[config.solver]()
