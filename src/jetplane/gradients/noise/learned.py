"""What a control variate has learned of one program: a Jacobian for each site, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Form", "Learned"]

_NAMES = ("jacobian", "activity", "unexplained", "explained")
_LATER = "explained"  # a state of version 0.1.0 has none


@dataclass(frozen=True)
class Form:
    """Which entries of the Jacobian of z by an activation are learned: all, or those of a token by itself.

    With ``blocks`` of 0 the matrix is (T V, n), from all that a sample has there to all of z. With T blocks it is
    (T, V, n), from each token to itself, and with one (1, V, n), the same for all tokens.
    """

    tokens: int  # T of z
    width: int  # V
    here: int  # C: T, or 1 where tokens are not told apart
    size: int  # n, of a token or of a sample
    blocks: int  # 0, 1 or T

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the Jacobian."""
        if self.blocks:
            return self.blocks, self.width, self.size
        return self.tokens * self.width, self.size

    @property
    def numbers(self) -> int:
        """How many there are to learn."""
        return (self.blocks or self.tokens) * self.width * self.size


@dataclass(eq=False)
class Learned:
    """What is known of one program."""

    forms: dict[int, Form]  # by site, where there is to be a Jacobian
    devices: list[torch.device]  # by site
    dtype: torch.dtype
    calls: Tensor  # (), how many it was learned from
    jacobians: dict[int, Tensor] = field(default_factory=dict)  # by site, once its samples are told apart
    activity: dict[int, Tensor] = field(default_factory=dict)  # likewise (C n,): share of samples with a derivative
    unexplained: dict[int, Tensor] = field(default_factory=dict)  # likewise (): |g - A^T e|^2 of a sample, in the mean
    explained: dict[int, Tensor] = field(default_factory=dict)  # likewise (): |A^T e|^2

    def start(self, site: int) -> None:
        """Have a Jacobian for a site."""
        if site not in self.jacobians:
            form, like = self.forms[site], {"dtype": self.dtype, "device": self.devices[site]}
            self.jacobians[site] = torch.zeros(form.shape, **like)  # type: ignore[call-overload]
            self.activity[site] = torch.ones(form.here * form.size, **like)  # type: ignore[call-overload]
            self.unexplained[site] = torch.zeros((), **like)  # type: ignore[call-overload]
            self.explained[site] = torch.zeros((), **like)  # type: ignore[call-overload]

    def reset(self) -> None:
        """In place: a captured graph goes on with it."""
        self.calls.zero_()
        for number in self.jacobians:
            self.jacobians[number].zero_()
            self.activity[number].fill_(1.0)
            self.unexplained[number].zero_()
            self.explained[number].zero_()

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        named = {"calls": self.calls}
        for name, tensors in zip(_NAMES, self._kinds, strict=True):
            named |= {f"{name}.{number}": tensor for number, tensor in tensors.items()}
        return named

    @property
    def _kinds(self) -> tuple[dict[int, Tensor], ...]:
        return self.jacobians, self.activity, self.unexplained, self.explained

    def twin(self, tensors: Sequence[Tensor]) -> Learned:
        """The same with other tensors, in the order of :meth:`tensors`."""
        held = dict(zip(self.tensors(), tensors, strict=True))
        other = Learned(self.forms, self.devices, self.dtype, held["calls"])
        for name, found in zip(_NAMES, other._kinds, strict=True):
            found |= {number: held[f"{name}.{number}"] for number in self.jacobians}
        return other

    def load(self, name: str, given: Mapping[str, Tensor]) -> None:
        """Take over what another one has learned of the program."""
        self._check_shapes(name, given)
        sites = [number for number in self.forms if not given.keys().isdisjoint(_keys(number))]
        needed = {key for number in sites for key in _keys(number) if not key.startswith(_LATER)}
        missing = {"calls", *needed} - given.keys()
        if missing:
            raise ValueError(f"the control state has no {name}.{min(missing)}; expected all that was saved.")
        for number in sites:
            self.start(number)
        for key, tensor in self.tensors().items():
            if key in given:
                tensor.copy_(given[key])

    def _check_shapes(self, name: str, given: Mapping[str, Tensor]) -> None:
        shapes: dict[str, tuple[int, ...]] = {"calls": ()}
        for number, form in self.forms.items():
            shapes |= {f"jacobian.{number}": form.shape, f"activity.{number}": (form.here * form.size,)}
            shapes |= {f"unexplained.{number}": (), f"explained.{number}": ()}
        for key, tensor in given.items():
            if shapes.get(key) != tensor.shape:
                expected = shapes.get(key, f"one of {', '.join(shapes)}")
                raise ValueError(
                    f"the control state has {name}.{key} of shape {tuple(tensor.shape)}; expected {expected}."
                )


def _keys(site: int) -> list[str]:
    """The names of what is kept for a site."""
    return [f"{what}.{site}" for what in _NAMES]
