"""Families as plain values: those that are functions of seed, step and updates, and why others are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from jetplane import directions as d
from jetplane.errors import JournalRefused
from jetplane.journal import recipes
from jetplane.journal.recipes import family_of, recipe_of

FAMILIES = [
    *(d.Gaussian(3), d.Rademacher(1), d.Sphere(2), d.Orthonormal(2), d.RankOne(9), d.Coordinate()),
    *(d.PreviousStep(), d.Momentum([0.0, 0.9]), d.Best(3), d.Grown(d.Rademacher, start=4)),
    d.Mixed([d.PerLayer(d.PreviousStep(), by="parameter"), d.Mixed([d.Gaussian(2)])]),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_a_family_comes_back(family: d.Family) -> None:
    assert family_of(json.loads(json.dumps(recipe_of(family)))) == family


def test_every_family_of_the_library_is_known_or_has_a_reason() -> None:
    families = {
        name
        for name in d.__all__
        if isinstance(kind := getattr(d, name), type) and issubclass(kind, d.Learning) and kind is not d.Learning
    }
    assert families == recipes._KNOWN.keys() | recipes._WHY.keys()


def test_a_gradient_is_no_function_of_the_seed() -> None:
    message = "the directions are Gradient, and a gradient is a function of the batch: no function of the seed and the"
    with pytest.raises(JournalRefused, match=message):
        recipe_of(d.Mixed([d.Gaussian(1), d.Gradient()]))


def test_directions_of_the_users() -> None:
    with pytest.raises(
        JournalRefused, match="the directions are Fixed, and they are tensors of the user's: no function"
    ):
        recipe_of(d.Fixed([torch.ones(1, 3)]))


def test_families_of_others() -> None:
    @dataclass(frozen=True)
    class Gaussian(d.Gaussian):
        """Another one of the same name."""

    with pytest.raises(JournalRefused, match="the directions are Gaussian, and they are none of this library's: no "):
        recipe_of(d.PerLayer(Gaussian(2)))


def test_families_that_cannot_be_named() -> None:
    with pytest.raises(JournalRefused, match="the directions are made by partial, which a file cannot hold; expected "):
        recipe_of(d.Grown(partial(d.Gaussian)))


def test_memory_and_a_changing_number_together() -> None:
    mixed = d.Mixed([d.PreviousStep(), d.Grown(d.Gaussian)])
    with pytest.raises(JournalRefused, match="which remember steps and change their number by more than the records"):
        recipe_of(mixed)
