"""What a run is: every number that changes its results, checked, and as JSON both ways."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from . import models

__all__ = [
    *(
        "DTYPES",
        "FORWARD_GRADIENT",
        "METHODS",
        "PER_SAMPLE",
        "REVERSE",
        "SCHEDULES",
        "SECOND_ORDER",
        "SOLVERS",
        "ZEROTH_ORDER",
    ),
    *("Config", "choice"),
]

FORWARD_GRADIENT = ("forward-adam", "forward-sgd", "horizon")  # estimate a gradient by tangents of the activations

# The options beyond lr, batch size and the like that each method takes.
_TAKES: dict[str, tuple[str, ...]] = {
    "fgd": ("k", "clip", "weight_decay", "compile"),
    "fomoh": ("eps", "clip", "weight_decay", "solver", "start", "compile"),
    "fomoh-bp": ("eps", "clip", "weight_decay", "solver", "start", "compile"),
    "fomoh-kd": ("k", "clip", "weight_decay", "solver", "start", "compile"),
    "backprop": (
        "average",
        "compile",
    ),
    "sgd": ("weight_decay", "momentum", "compile"),
    "adam": ("eps", "weight_decay", "compile"),
    "forward-adam": ("samples", "eps", "weight_decay", "compile"),
    "forward-sgd": ("samples", "weight_decay", "momentum", "compile"),
    "horizon": ("samples", "eps", "weight_decay", "compile"),
    "gauss-newton": ("k", "clip", "weight_decay", "compile"),
    "mezo": ("k", "eps", "weight_decay"),
    "fzoo": ("k", "eps", "weight_decay"),
}
_TAKES |= {method: (*names, "average") for method, names in _TAKES.items() if method != "horizon"}  # it has its own
# a penalty on the weights has no activations
_TAKES |= {method: (*names, "penalty") for method, names in _TAKES.items() if method not in FORWARD_GRADIENT}
METHODS = tuple(_TAKES)
SECOND_ORDER = ("fomoh", "fomoh-bp", "fomoh-kd", "gauss-newton")  # measure the curvature of a plane
PER_SAMPLE = (*FORWARD_GRADIENT, "gauss-newton")  # are given one loss for each sample
ZEROTH_ORDER = ("mezo", "fzoo")  # know losses alone
REVERSE = ("fomoh-bp", "backprop", "sgd", "adam")  # use a backward pass
SCHEDULES = ("none", "rise", "step", "milestone3", "cosine", "custom")
ADAPTIVE = ("damped", "trust-region", "cubic", "levenberg-marquardt")
SOLVERS = ("absolute-curvature", "jittered-inverse", "saddle-free", "softabs", *ADAPTIVE)
_UPRIGHT = ("mnist", "fashion-mnist", "digits")
DTYPES = {"float32": torch.float32, "float64": torch.float64}

# What a field is where it is None: the method's own, or that of all others.
_OWN: dict[str, tuple[dict[str, Any], Any]] = {
    "k": ({"gauss-newton": 64, "fzoo": 8}, 1),
    "lr": ({"forward-adam": 2e-3, "horizon": 1.0, "gauss-newton": 1.0, "mezo": 1e-3, "fzoo": 1e-5}, 0.1),
}
_NONE: Any = None
_MOST_TANGENTS = 32  # that the library takes where nothing is said
_SAMPLES_BEFORE = 4  # what runs were recorded with whose method has none
_LATER = {
    "samples": _SAMPLES_BEFORE,
    "average": 0.0,
    "penalty": 0.0,
    "augment": False,
}  # fields that came later: at these values a run is the one that it was without them


@dataclass(frozen=True)
class Config:
    """The identity of a run. Fields that are None take the method's own default.

    Example:
        >>> config = Config(model="cnn", method="fomoh-kd", k=3, lr=0.3032, batch_size=512)
        >>> assert Config.from_json(config.to_json()) == config
    """

    model: str = "cnn"
    method: str = "fomoh-kd"  # one of METHODS; "backprop" is plain SGD
    k: int = _NONE  # directions: of FGD, FoMoH-KD, MeZO (1), FZOO (8), and of the Gauss-Newton search (64)
    lr: float = _NONE  # 0.1; of "horizon" and "gauss-newton", which find the length of a step, a factor (1)
    batch_size: int = 2048
    epochs: int = 10
    seed: int = 0  # of the initial values, of the order of the batches and of the directions
    schedule: str = "none"  # of lr: one of SCHEDULES; "custom" goes with a callable given to the Trainer
    gamma: float = 0.1  # what lr is multiplied with
    period: int = 1000  # epochs between multiplications ("step"), or until them ("milestone3")
    patience: int = 20  # epochs in each of the two windows that "rise" compares
    dataset: str = "mnist"
    hold_out: int = 0  # digits of the training split kept for validation; 0: validation is the test split
    device: str = "cpu"
    dtype: str = "float32"
    tf32: bool = False  # on CUDA: products of float32 numbers with 10 bits of mantissa
    compile: bool = False  # the step as one graph
    evaluate_train: int = 0  # evaluate the training split after every so many epochs, and the last; 0: the last only
    eps: float | None = None  # added to the curvature by FoMoH, FoMoH-BP (1e-5), to the root by Adam (1e-8); of MeZO
    # and FZOO the length of a perturbation (1e-3)
    clip: float | None = None  # largest length of an update
    weight_decay: float = 0.0
    momentum: float = 0.0  # of "sgd" and "forward-sgd"
    solver: str | None = None  # one of SOLVERS: of FoMoH, FoMoH-BP (absolute-curvature), FoMoH-KD (jittered-inverse)
    start: float | None = None  # damping, radius or sigma with which an adaptive solver begins (1)
    divergence: float | None = 10.0  # end at so many times the first loss, for three epochs; None: where not finite
    samples: int | None = None  # tangents J of each activation, of forward gradients; None: the library's 8 to 32
    penalty: float = 0.0  # p of p / 2 |w|^2 in the loss, without biases; running training values have it, too
    augment: bool = False  # flips and crops of the training images, drawn for each sample and epoch
    average: float = 0.0  # judge by the mean of the parameters, with weights like step^(average - 1); 0: by the last

    def __post_init__(self) -> None:
        for name in _OWN:
            if getattr(self, name) is None:
                object.__setattr__(self, name, _own(name, self.method))
        if self.method not in FORWARD_GRADIENT and self.samples == _SAMPLES_BEFORE:
            object.__setattr__(self, "samples", None)
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        models.find(self.model)
        for name, allowed in _CHOICES.items():
            choice(name, getattr(self, name), allowed)
        for name, (least, most) in _WHOLE.items():
            _check_whole(name, getattr(self, name), least, most)
        for name, (low, high, expected) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low < value < high):
                raise ValueError(f"{name} is {value!r}; expected {expected}.")
        _check_device(self.device)
        self._check_together()
        self._check_options()

    def _check_together(self) -> None:
        """Raise where options contradict each other."""
        if self.solver is not None:
            choice("solver", self.solver, SOLVERS)
        if self.eps is not None and self.solver not in (None, "absolute-curvature"):
            raise ValueError(f"eps is {self.eps!r} and solver {self.solver}; eps belongs to absolute-curvature alone.")
        if self.start is not None and self.solver not in ADAPTIVE:
            raise ValueError(f"start is {self.start!r} and solver {self.solver}; {', '.join(ADAPTIVE)} have one.")
        if self.augment and self.dataset in _UPRIGHT:
            raise ValueError(f"augment is True, but a mirrored image of {self.dataset} is another; expected cifar-10.")

    def _check_options(self) -> None:
        """Raise where an option is given that the method does not take."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        defaults |= {name: _own(name, self.method) for name in _OWN}
        for name in sorted({name for names in _TAKES.values() for name in names}):
            value = getattr(self, name)
            if value != defaults[name] and name not in _TAKES[self.method]:
                takers = ", ".join(method for method, names in _TAKES.items() if name in names)
                raise ValueError(f"{name} is {value!r}, but method {self.method} takes none; {takers} take it.")

    @property
    def tangents(self) -> int:
        """How many tangents a value carries in a step, at most."""
        return (self.samples or _MOST_TANGENTS) if self.method in FORWARD_GRADIENT else self.k

    def replace(self, **changes: Any) -> Self:
        """The same with other values."""
        self._check_names(changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def _check_names(cls, fields: Mapping[str, Any]) -> None:
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(fields.keys() - set(names))
        if unknown:
            choice("the field", unknown[0], names)

    # -- JSON -------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The fields as a JSON object, one line each."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """A config from its fields; those that are not there take the default."""
        cls._check_names(fields)
        return cls(**fields)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A config from what `to_json` gave."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"a config is {type(fields).__name__}; expected a JSON object.")
        return cls.from_dict(fields)

    def digest(self) -> str:
        """SHA-256 of the fields; a run that was begun before there was a field can be gone on with."""
        fields = self.to_dict()
        if self.method not in FORWARD_GRADIENT:
            fields["samples"] = _SAMPLES_BEFORE
        fields = {name: value for name, value in fields.items() if (name, value) not in _LATER.items()}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Config) -> str | None:
        """The first field in which ``other`` differs."""
        ours, theirs = self.to_dict(), other.to_dict()
        return next((name for name, value in ours.items() if value != theirs[name]), None)


_CHOICES: dict[str, Iterable[str]] = {"method": METHODS, "schedule": SCHEDULES, "dtype": tuple(DTYPES)}
_WHOLE: dict[str, tuple[int, int | None]] = {
    "k": (1, None),
    "samples": (1, None),
    "batch_size": (1, None),
    "epochs": (1, None),
    "seed": (0, 2**63 - 1),
    "period": (1, None),
    "patience": (1, None),
    "hold_out": (0, None),
    "evaluate_train": (0, None),
}
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "lr": (0.0, math.inf, "a positive, finite number"),
    "gamma": (0.0, math.inf, "a positive, finite number"),
    "start": (0.0, math.inf, "a positive, finite number"),
    "divergence": (1.0, math.inf, "a finite number above 1"),
    "eps": (-1e-300, math.inf, "a finite number from 0"),
    "clip": (0.0, math.inf, "a positive, finite number"),
    "weight_decay": (-1e-300, math.inf, "a finite number from 0"),
    "penalty": (-1e-300, math.inf, "a finite number from 0"),
    "momentum": (-1e-300, 1.0, "a number from 0, below 1"),
    "average": (-1e-300, math.inf, "a finite number from 0"),
}


def choice(what: str, value: str, allowed: Iterable[str]) -> str:
    """``value`` if it is one of those allowed; else an error with the nearest of them."""
    names = list(allowed)
    if value not in names:
        close = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{what} is {value!r}; {hint}expected one of {', '.join(names)}.")
    return value


def _own(name: str, method: object) -> Any:
    """What a field is for a method where nothing is said."""
    special, default = _OWN[name]
    return special.get(str(method), default)


def _check_type(name: str, value: object, annotation: str) -> None:
    wanted = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
    kinds: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    kind, _, optional = annotation.partition(" | ")
    if value is None and optional:
        return
    if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} is {value!r}; expected {wanted[kind]}.")


def _check_whole(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is None:
        return
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" to {most}"
        raise ValueError(f"{name} is {value}; expected a whole number from {least}{upper}.")


def _check_device(device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; expected one such as cpu, cuda or cuda:1.") from None
