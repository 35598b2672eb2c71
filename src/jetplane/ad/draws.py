"""Which operations draw random numbers: what a recorded graph would repeat, and a second pass has to see again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["draws"]

_FUNCTIONS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu"),
    *("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli"),
    *("multinomial", "poisson", "gumbel_softmax", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"),
}
_ATTENTION = {  # the places of dropout_p, and of training where there is one
    "scaled_dot_product_attention": (4, None),
    "multi_head_attention_forward": (10, 13),
}
_CHANCES = ("dropout_p", "dropout")  # what an operation of aten calls the probability of dropout


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation, of a function of torch, or of a method, by its name, draws random numbers.

    Attention and recurrent networks can have dropout, and are tagged for that; with a probability of 0 they draw none.

    Example:
        >>> x = torch.ones(1, 1, 2, 2)
        >>> attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
        >>> draws(attention, (x, x, x, None, False), {}), draws(attention, (x, x, x, None, False, 0.1), {})
        (False, True)
    """
    name = func if isinstance(func, str) else getattr(func, "__name__", "")
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        for place, argument in enumerate(func._schema.arguments):
            if argument.name in _CHANCES:
                return not _is_zero(_given(args, kwargs, place, argument.name, argument.default_value))
        return True
    if name in _ATTENTION:
        place, training = _ATTENTION[name]
        trains = training is None or _given(args, kwargs, training, "training", True)
        return bool(trains) and not _is_zero(_given(args, kwargs, place, "dropout_p", 0.0))
    return name in _FUNCTIONS


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)


def _is_zero(chance: Any) -> bool:
    return isinstance(chance, int | float) and chance == 0
