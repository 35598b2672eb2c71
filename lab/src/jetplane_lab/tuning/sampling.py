"""Where the parameters of a trial come from.

Draw ``i`` of a study has its own seed, made of the study's and ``i``. So processes that share a study never draw alike,
and a study that was stopped goes on with the draws it would have made: on a grid and at random the parameters of draw
``i`` are a function of the settings and ``i`` alone, and the Bayesian sampler adds the results it has seen.
"""

from __future__ import annotations

import math
import random
import warnings
from typing import TYPE_CHECKING, Any

from .settings import Settings

if TYPE_CHECKING:
    import optuna

__all__ = ["grid", "sampler", "space"]


def space(settings: Settings) -> dict[str, Any]:
    """Optuna's distributions of the parameters."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    low, high = settings.lr_bounds
    return {
        "lr": FloatDistribution(low, high, log=True),
        "batch_size": CategoricalDistribution(settings.batch_sizes),
    }


def grid(settings: Settings) -> list[dict[str, Any]]:
    """As many points as there are trials: learning rates at equal ratios times batch sizes, in a seeded order.

    >>> settings = Settings("lr-fgd", "grid", trials=3, epochs=1, lr_bounds=(0.01, 1), batch_sizes=(64,), hold_out=1)
    >>> sorted(round(point["lr"], 9) for point in grid(settings))
    [0.01, 0.1, 1]
    """
    low, high = settings.lr_bounds
    count = math.ceil(settings.trials / len(settings.batch_sizes))
    if count == 1:
        rates = [math.sqrt(low) * math.sqrt(high)]
    else:  # the ends are the bounds themselves, not their roundings
        inner = (low * (high / low) ** (i / (count - 1)) for i in range(1, count - 1))
        rates = [low, *inner, high]
    points = [{"lr": lr, "batch_size": size} for lr in rates for size in settings.batch_sizes]
    random.Random(settings.seed).shuffle(points)
    return points[: settings.trials]


def sampler(settings: Settings, draw: int) -> optuna.samplers.BaseSampler:
    """The sampler of one draw."""
    import optuna

    seed = random.Random(f"{settings.seed}/{draw}").getrandbits(32)
    if settings.sampler != "bayes":  # a grid's points are entered, not sampled
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # the liar takes running trials for bad ones, so that processes do not all try the same spot
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
