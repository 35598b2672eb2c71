"""What can be told only of a plan that the program has followed: raised, or said once."""

from __future__ import annotations

import logging
import warnings

from ..ad.engine.locate import users_level
from ..errors import CoupledSamples, UnsupportedProgram
from .noise.statistics import Statistics
from .plan.noise_plan import NoisePlan
from .program.parameters import Parameters

__all__ = ["PlanChecks", "warn_of_noise"]

log = logging.getLogger("jetplane")

_HOOKS = "hooks"
_NOISY = 4.0  # times the power of all else: what the norms' part may have before it is worth a warning


class PlanChecks:
    """The checks of one estimator."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._told: set[str] = set()  # what was said: places where samples are coupled, and that there are hooks

    def __call__(self, plan: NoisePlan, allow_unused: bool, coupled: str) -> None:
        """Raise where parameters are not used, or samples coupled, unless that is allowed; say what is worth it."""
        if not allow_unused:
            self._check_reached(plan)
        self._check_coupled(plan, coupled)
        self._tell_of_hooks()

    def _tell_of_hooks(self) -> None:
        hooked = self._parameters.hooked()
        if hooked and _HOOKS not in self._told:
            self._told.add(_HOOKS)
            warnings.warn(
                f"the gradient of {', '.join(hooked)} has hooks, which a backward pass calls and a forward gradient "
                "does not; expected what they do (a mask, a scale) done to .grad afterwards, or in a parametrisation.",
                UserWarning,
                stacklevel=users_level(),
            )

    def _check_reached(self, plan: NoisePlan) -> None:
        named = zip(self._parameters.names, self._parameters.tensors, strict=True)
        missed = [name for number, (name, leaf) in enumerate(named) if number not in plan.reached and leaf.numel()]
        if missed:
            raise UnsupportedProgram(
                f"the losses do not depend on {', '.join(missed)} through any layer; expected every parameter that "
                "requires grad to be used (a model that keeps what it computed on an earlier call hides it), or "
                "allow_unused=True."
            )

    def _check_coupled(self, plan: NoisePlan, asked: str) -> None:
        coupled = [site for site in plan.sites if site.coupled]
        together = [site for site in coupled if site.layout is None]  # not by a batch norm, of which more is known
        if together and together[0].where not in self._told:
            self._told.add(together[0].where)
            log.warning(
                "the samples of a forward gradient are coupled at the output of %s, where noise costs %d times as "
                "much; avoid what couples them, if it is not the loss itself",
                together[0].where,
                plan.samples,
            )
        if coupled and asked == "raise":
            site = coupled[0]
            raise CoupledSamples(
                f"other samples' losses depend on a sample's entries of {tuple(site.shape)}, the output of "
                f"{site.where}; expected {plan.samples} samples that do not interact, or coupled='sum'."
            )


def warn_of_noise(plan: NoisePlan, statistics: Statistics) -> None:
    """Say once that there is hardly anything but noise in an estimate. Waits for the device."""
    share = float(statistics.share)
    if share > _NOISY:
        plan.noisy = True
        warnings.warn(
            f"the estimate is mostly noise: the statistics of {len(plan.norms)} batch norms, each read from the noise "
            f"of all later ones, have {share:.3g} times the power of all else; expected more samples in a batch, or "
            "batch_norm='bounded' for more than two norms.",
            UserWarning,
            stacklevel=users_level(),
        )
