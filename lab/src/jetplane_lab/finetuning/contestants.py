"""The methods that fine-tune, each behind the same call, and what is chosen for it: nothing, or a rate of a few."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetplane import ForwardGradient, forward_only, optim

from ..methods import Method
from ..methods.backprop import Backprop
from ..methods.forward import Horizon, OnForwardGradients
from .encoder import Classifier, Layer

__all__ = ["CONTESTANTS", "MOVING", "Contestant", "one_leaf"]

MOVING = ("all", "lora")  # all weights, or adapters and the classifier's layer
_FEW = 4  # tangents: a step then has the passes of three backprop steps
_SUBSPACE = 3  # directions of FoMoH-KD

Make = Callable[[nn.Module, float, int, bool], Method]  # model, rate, seed, compile


@dataclass(frozen=True)
class Contestant:
    """A method, and how it is run.

    ``rates`` are those that a choice is made of, by the validation split; a single one is the method's default. Where
    ``by_passes`` is set it takes as many steps as have the forward passes of HorizonAdam's run, else as many epochs.
    """

    label: str
    make: Make
    rates: Mapping[str, tuple[float, ...]]  # by what moves
    backward: bool = False  # uses a backward pass
    decays: bool = False  # its rate falls linearly to zero
    by_passes: bool = False
    per_sample: bool = True  # is given one loss for each sample
    dropout: bool = True
    checkpointed: bool = False
    rates_of: str | None = None  # another method, whose choice is taken

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """About the steps: what is called forward-only is."""
        with contextlib.nullcontext() if self.backward else forward_only():
            yield

    def prepare(self, model: Classifier) -> None:
        """Training mode, and checkpoints where there are some."""
        model.train(self.dropout)
        if self.checkpointed:
            for layer in model.modules():
                if isinstance(layer, Layer):
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]


def moving(model: nn.Module) -> list[Tensor]:
    """The parameters that move."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def one_leaf(model: nn.Module) -> Tensor:
    """One vector that the model's moving parameters are views of from now on.

    Methods that know losses alone move the vector, and so the model; autograd knows nothing of it.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> flat = one_leaf(model)
        >>> with torch.no_grad():
        ...     _ = flat.fill_(1.0)
        >>> model.weight.tolist(), model.bias.tolist()
        ([[1.0, 1.0]], [1.0])
    """
    leaves = moving(model)
    flat = torch.cat([leaf.detach().flatten() for leaf in leaves])
    for leaf, part in zip(leaves, flat.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.data = part.view_as(leaf)
    return flat.requires_grad_()


# -- what each is made of ---------------------------------------------------------------------------------------------


def _horizon(samples: int | None, model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    return Horizon(optim.HorizonAdam(moving(model), lr=rate, samples=samples, seed=seed, compile=compile))


def _forward_adamw(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    leaves = moving(model)
    estimate = ForwardGradient(leaves, _FEW, seed=seed, compile=compile)
    return OnForwardGradients(torch.optim.AdamW(leaves, rate), estimate)


def _fomoh(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    return optim.FoMoHKD(moving(model), rate, _SUBSPACE, seed=seed, patience=None, compile=compile)


def _gauss_newton(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    return optim.GaussNewtonSearch(moving(model), rate, seed=seed, patience=None, compile=compile)


def _mezo(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    return optim.MeZO([one_leaf(model)], rate, seed=seed)


def _fzoo(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    return optim.FZOO([one_leaf(model)], rate, seed=seed)


def _adamw(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    leaves = moving(model)
    capturable = compile and leaves[0].is_cuda
    return Backprop(torch.optim.AdamW(leaves, rate, capturable=capturable), compile=compile)


def _eager_adamw(model: nn.Module, rate: float, seed: int, compile: bool) -> Method:
    return _adamw(model, rate, seed, False)


def _one(rate: float, adapters: float | None = None) -> dict[str, tuple[float, ...]]:
    return {"all": (rate,), "lora": (rate if adapters is None else adapters,)}


_ADAMW = {"all": (1e-5, 3e-5, 1e-4, 3e-4), "lora": (1e-4, 3e-4, 1e-3, 3e-3)}

CONTESTANTS = {
    "horizon": Contestant("HorizonAdam, J = 4", partial(_horizon, _FEW), _one(1.0)),
    "horizon-default": Contestant("HorizonAdam, J as found", partial(_horizon, None), _one(1.0)),
    # the default rate of most fine-tuning, and ten times it for adapters
    "forward-adamw": Contestant("ForwardGradient (J = 4), AdamW", _forward_adamw, _one(5e-5, 5e-4), decays=True),
    # a look at the loss behind the step cannot be compiled beside random numbers
    "gauss-newton": Contestant("Gauss-Newton search, K = 64", _gauss_newton, _one(1.0), by_passes=True, dropout=False),
    "fomoh-kd": Contestant("FoMoH-3D", _fomoh, _one(0.1), by_passes=True, per_sample=False),
    "mezo": Contestant("MeZO", _mezo, {"all": (1e-7, 1e-6, 1e-5), "lora": (1e-5, 1e-4, 1e-3)}, by_passes=True),
    "fzoo": Contestant("FZOO, K = 8", _fzoo, {"all": (1e-8, 1e-7, 1e-6), "lora": (1e-7, 1e-6, 1e-5)}, by_passes=True),
    "adamw": Contestant("AdamW, backprop", _adamw, _ADAMW, backward=True, decays=True, per_sample=False),
    "adamw-checkpointed": Contestant(
        "AdamW, checkpointed backprop",
        _eager_adamw,
        _ADAMW,
        backward=True,
        decays=True,
        per_sample=False,
        checkpointed=True,
        rates_of="adamw",
    ),
}
