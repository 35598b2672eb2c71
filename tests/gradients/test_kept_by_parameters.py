"""What calls leave to later ones lives as long as the parameters, and is theirs alone."""

from __future__ import annotations

import gc
import weakref

import torch

import jetplane as jp
from classifiers import X, Y, classify, estimated, gradient, mlp
from jetplane.gradients import as_function


def test_the_function_learns_for_the_same_parameters_and_no_others() -> None:
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    estimate = jp.ForwardGradient(model.parameters(), samples=2)
    for _ in range(3):
        wanted = estimated(estimate, model, X, Y)
    for one in (model, twin):  # what the first has learned is not the second's
        for _ in range(3):
            one.zero_grad()
            jp.forward_gradient(classify(one), one.parameters(), X, Y, samples=2)
        assert torch.equal(gradient(one), wanted)


def test_what_was_learned_goes_with_the_parameters() -> None:
    model = mlp()
    count = len(as_function._KEPT)
    jp.forward_gradient(classify(model), model.parameters(), X, Y)
    known = as_function._KEPT.of(list(model.parameters()))
    (one,) = known.control._learned.values()
    kept, jacobian = weakref.ref(known), weakref.ref(one.jacobians[0])
    del known, one
    model[4].bias = None  # any of them
    gc.collect()
    assert kept() is None and len(as_function._KEPT) <= count and jacobian() is None
