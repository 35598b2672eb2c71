"""Families of directions as plain values, and back. What is no function of seed, step and updates is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .. import directions
from ..directions.earlier import adopted
from ..errors import JournalRefused

__all__ = ["family_of", "recipe_of"]

_RANDOM = ("Gaussian", "Rademacher", "Sphere", "Orthonormal", "RankOne")
_KNOWN: dict[str, Any] = {
    name: getattr(directions, name)
    for name in (*_RANDOM, "Coordinate", "PreviousStep", "Momentum", "Best", "Grown", "Mixed", "PerLayer")
}
_WHY = {
    "Gradient": "a gradient is a function of the batch",
    "Fixed": "they are tensors of the user's",
}
_FOREIGN = "they are none of this library's"


def recipe_of(family: Any) -> dict[str, Any]:
    """A family as a plain value.

    Example:
        >>> recipe_of(directions.Mixed([directions.PreviousStep(), directions.Gaussian(3)]))
        {'Mixed': {'families': [{'PreviousStep': {}}, {'Gaussian': {'k': 3}}]}}
    """
    start = adopted(family).init()
    if start.slots and start.size is not None:
        raise JournalRefused(
            f"the directions are {family!r}, which remember steps and change their number by more than the records "
            "hold; expected directions that do one of the two."
        )
    return _recipe(family)


def family_of(recipe: dict[str, Any]) -> Any:
    """The family of a recipe.

    Example:
        >>> family_of({"Gaussian": {"k": 3}})
        Gaussian(k=3)
    """
    ((name, options),) = recipe.items()
    return _KNOWN[name](**{option: _thing(value) for option, value in options.items()})


def _recipe(family: Any) -> dict[str, Any]:
    name = type(family).__name__
    if type(family) is not _KNOWN.get(name):
        why = _WHY.get(name, _FOREIGN) if type(family) is getattr(directions, name, None) else _FOREIGN
        raise JournalRefused(
            f"the directions are {name}, and {why}: no function of the seed and the step, so that no journal can "
            f"replay them; expected families such as Gaussian(k), or one of {', '.join(_KNOWN)}."
        )
    return {name: {field.name: _value(getattr(family, field.name)) for field in fields(family)}}


def _value(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    if isinstance(value, type) and value.__name__ in _RANDOM and _KNOWN[value.__name__] is value:
        return {"class": value.__name__}
    if callable(value) and not hasattr(value, "draw"):
        made = getattr(value, "__qualname__", type(value).__name__)
        raise JournalRefused(
            f"the directions are made by {made}, which a file cannot hold; expected one of {', '.join(_RANDOM)}."
        )
    return _recipe(value)


def _thing(value: Any) -> Any:
    if isinstance(value, list):
        return [_thing(one) for one in value]
    if isinstance(value, dict):
        return _KNOWN[value["class"]] if "class" in value else family_of(value)
    return value
