"""What forward gradients promise beside being unbiased: noise, state, plans, memory, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X, Y, backprop, classify, gradient, mlp
from jetplane.errors import MissingRule
from jetplane_lab.data import load

# -- noise --------------------------------------------------------------------------------------------------------


# -- the estimate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["activation", "weight"])
def test_mean_of_draws_is_the_gradient(estimator: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    wanted = backprop(model, classify(model), X, Y)
    estimate = jp.ForwardGradient(model.parameters(), samples=400, estimator=estimator, chunk_size=100)
    with jp.forward_only():
        for _ in range(3):
            loss = estimate(classify(model), X, Y)
    found = gradient(model) / 3
    assert F.cosine_similarity(found, wanted, dim=0) > 0.97
    assert abs(found.norm() / wanted.norm() - 1) < 0.2
    torch.testing.assert_close(loss, classify(model)(X, Y).mean().detach())
    assert loss.grad_fn is None


def test_more_samples_are_better_and_activations_beat_weights() -> None:
    model = mlp()
    wanted = backprop(model, classify(model), X, Y)

    def cosine(estimator: str, samples: int) -> float:
        total = 0.0
        estimate = jp.ForwardGradient(model.parameters(), samples=samples, estimator=estimator)
        for _ in range(10):
            model.zero_grad()
            estimate(classify(model), X, Y)
            total += float(F.cosine_similarity(gradient(model), wanted, dim=0)) / 10
        return total

    assert cosine("weight", 8) < cosine("activation", 1) < cosine("activation", 16)


def test_trains_a_network_on_digits_with_adam() -> None:
    digits = load("digits").train
    chosen = torch.randperm(len(digits.labels))[:512]
    x, y = digits.images[chosen].reshape(512, -1).float() / 255, digits.labels[chosen]
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    with jp.forward_only():
        estimate = jp.ForwardGradient(model.parameters(), samples=4)
        for _ in range(60):
            adam.zero_grad()
            loss = estimate(classify(model), x, y)
            adam.step()
    assert loss < 0.8  # of 2.3
    assert (model(x).argmax(1) == y).float().mean() > 0.8


def test_function_counts_calls_and_keeps_plans() -> None:
    model = mlp()
    found = []
    for _ in range(2):
        model.zero_grad()
        loss, aux = jp.forward_gradient(
            lambda x, y: (classify(model)(x, y), "aux"),
            model.named_parameters(),
            *(X, Y),
            samples=2,
            control=False,
            has_aux=True,
        )
        found.append(gradient(model).clone())
    assert aux == "aux" and loss.shape == ()
    assert not torch.equal(*found)  # new noise
    for step, wanted in enumerate(found):
        model.zero_grad()
        jp.forward_gradient(classify(model), model.parameters(), X, Y, samples=2, step=step, control=False)
        torch.testing.assert_close(gradient(model), wanted)
    jp.forward_gradient(classify(model), model.parameters(), X, Y, samples=2, step=1, control=False)
    torch.testing.assert_close(gradient(model), 2 * found[1])  # adds up


def test_state_goes_on_bit_by_bit() -> None:
    model = mlp()
    first = jp.ForwardGradient(model.parameters(), samples=2, seed=5)
    for _ in range(3):
        first(classify(model), X, Y)
    second = jp.ForwardGradient(model.parameters(), samples=2)
    second.load_state_dict(first.state_dict())
    model.zero_grad()
    first(classify(model), X, Y)
    wanted = gradient(model).clone()
    model.zero_grad()
    second(classify(model), X, Y)
    assert torch.equal(gradient(model), wanted) and second.step == 4
    plain = {"samples": 2, "seed": 5, "step": 3, "control": False}
    found = []
    for capturable in (False, True):
        third = jp.ForwardGradient(model.parameters(), capturable=capturable, **plain)
        model.zero_grad()
        third(classify(model), X, Y)
        assert third.step == 4
        found.append(gradient(model).clone())
    assert torch.equal(*found)
    third.step = 9
    assert third.state_dict() == {"seed": 5, "step": 9, "control": {}}
    for key, message in (("seed", "seed is 'a'; expected a whole"), ("step", "step is 'a'; expected a whole")):
        with pytest.raises(ValueError, match=message):
            third.load_state_dict(third.state_dict() | {key: "a"})


# -- programs -----------------------------------------------------------------------------------------------------


def test_autocast() -> None:
    model = mlp()
    wanted = backprop(model, classify(model), X, Y)
    estimate = jp.ForwardGradient(model.parameters(), samples=500)
    with torch.autocast("cpu", torch.bfloat16):
        estimate(classify(model), X, Y)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert F.cosine_similarity(gradient(model), wanted, dim=0) > 0.9


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "samples is 0; expected a positive whole number", {"samples": 0}),
        (ValueError, "chunk_size is 0; expected a positive whole number", {"chunk_size": 0}),
        (ValueError, "seed is -1; expected a whole number from 0 to 2", {"seed": -1}),
        (ValueError, "step is 4294967296; expected a whole number from 0 to 2", {"step": 1 << 32}),
        (ValueError, "estimator is 'weights'; expected one of 'activation', 'weight'", {"estimator": "weights"}),
        (ValueError, "coupled is 'no'; expected one of 'sum', 'raise'", {"coupled": "no"}),
        (ValueError, "chunk_size is 2 and memory '1MiB'; expected one", {"chunk_size": 2, "memory": "1MiB"}),
        (ValueError, "memory is 'much'", {"memory": "much"}),
        (ValueError, "memory is 10 B, but one tangent at a time needs", {"memory": 10}),
    ],
)
def test_bad_options(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        jp.forward_gradient(classify(model), model.parameters(), X, Y, **options)


def unsteady() -> Callable[[Tensor], Tensor]:
    calls = iter(range(100))
    return lambda x: (x @ PARAMETER).relu() @ OTHER if next(calls) % 2 else (x @ PARAMETER).tanh() @ OTHER


PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


@torch.library.custom_op("jpcontract::crossed", mutates_args=())
def cross(x: Tensor, other: Tensor) -> Tensor:
    return torch.linalg.cross(x, other)


jp.register.bilinear(torch.ops.jpcontract.crossed)


def crossed(x: Tensor) -> Tensor:
    return cross(x @ PARAMETER, OTHER.expand(8, 3)).sum(1)


PROGRAMS: list[tuple[type[Exception], str, Callable[[Tensor], Any]]] = [
    (jp.UnsupportedProgram, "the losses do not depend on other through any layer", lambda x: (x @ PARAMETER).sum(1)),
    (jp.UnsupportedProgram, "do not depend on other", lambda x: (x @ PARAMETER * OTHER.detach()).sum(1)),
    (
        jp.UnsupportedProgram,
        "loss_fn detaches its losses, by",
        lambda x: F.mse_loss(x @ PARAMETER, OTHER.expand(8, 3), reduction="none").sum(1).detach(),
    ),
    (jp.UnsupportedProgram, "function of parameters alone", lambda x: PARAMETER.sum(0) * OTHER),
    (jp.UnsupportedProgram, "did other operations when it was called again", unsteady()),
    (MissingRule, r"jpcontract.crossed.default has no local product for its parameter other \(8, 3\)", crossed),
]


@pytest.mark.parametrize(("error", "message", "program"), PROGRAMS, ids=[message for _, message, _ in PROGRAMS])
def test_refused_programs(error: type[Exception], message: str, program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(error, match=message):
        jp.forward_gradient(program, {"weight": PARAMETER, "other": OTHER}, X)


def test_losses_that_are_detached_behind_a_known_loss_leave_no_gradient() -> None:
    # what a loss does to its input is known without a tangent behind it
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimate(classify(model), X, Y)
    before = gradient(model).clone()
    with pytest.raises(jp.UnsupportedProgram, match="expected losses that depend on the parameters"):
        estimate(lambda x, y: classify(model)(x, y).detach(), X, Y)
    assert torch.equal(gradient(model), before)


def test_a_parameter_without_entries_needs_no_use() -> None:
    model = mlp()
    empty = nn.Parameter(torch.zeros(0, 3))
    found = jp.ForwardGradient([*model.parameters(), empty])
    found(classify(model), X, Y)
    assert all(param.grad is not None for param in model.parameters())


def test_refused_calls() -> None:
    model = mlp()
    with pytest.raises(TypeError, match=r"loss_fn returned Tensor; expected a pair \(losses, aux\) with has_aux=True"):
        jp.forward_gradient(classify(model), model.parameters(), X, Y, has_aux=True)
    with torch.inference_mode(), pytest.raises(jp.UnsupportedProgram, match="inference_mode"):
        jp.forward_gradient(classify(model), model.parameters(), X, Y)
    unused = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="the program never used parameter 1"):
        jp.forward_gradient(lambda x: (x @ PARAMETER).sum(1), [PARAMETER, unused], X, estimator="weight")
    jp.forward_gradient(lambda x: (x @ PARAMETER).sum(1), [PARAMETER, unused], X, allow_unused=True)
    assert unused.grad is None


# -- where the program switches autograd off ------------------------------------------------------------------------


@torch.no_grad()
def _constant(x: Tensor) -> Tensor:
    return x.tanh()


def _set_off(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    out = x.tanh()
    torch.set_grad_enabled(True)
    return out


def _set_off_inside(x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        return x.tanh()


def _inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.tanh()


def _differentiated(x: Tensor) -> Tensor:
    with torch.enable_grad():
        t = torch.zeros_like(x).requires_grad_()
        return torch.autograd.grad((x.tanh() * t).sum(), t)[0]


@pytest.mark.parametrize("constant", [_constant, _set_off, _set_off_inside, _inferred, _differentiated])
def test_every_switch_of_autograd_stops_the_derivative(constant: Callable[[Tensor], Tensor]) -> None:
    w = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    x = torch.randn(5, 4, dtype=torch.float64)
    jp.forward_gradient(lambda x: (constant(z := F.linear(x, w)).clone() * z).sum(1), [w], x, samples=None)
    (expected,) = torch.autograd.grad((F.linear(x, w).tanh().detach() * F.linear(x, w)).sum(1).mean(), w)
    torch.testing.assert_close(w.grad, expected)


def test_hooks_of_gradients_are_not_passed_over_in_silence() -> None:
    model = mlp()
    handle = model[0].weight.register_hook(lambda gradient: 0 * gradient)
    estimate = jp.ForwardGradient(model.named_parameters())
    with pytest.warns(UserWarning, match=r"the gradient of 0\.weight has hooks, which .* a forward gradient does not"):
        estimate(classify(model), X, Y)
    estimate(classify(model), X, Y)  # said once
    handle.remove()
    model[2].bias.register_post_accumulate_grad_hook(lambda leaf: None)
    with pytest.warns(UserWarning, match=r"the gradient of 2\.bias has hooks"):
        jp.ForwardGradient(model.named_parameters())(classify(model), X, Y)


def test_data_made_in_inference_mode_are_data() -> None:
    model = mlp()
    with torch.inference_mode():
        x = X.clone()
    found = jp.forward_gradient(classify(model), model.parameters(), x, Y, control=False, step=0)
    other = gradient(model).clone()
    model.zero_grad()
    assert found == jp.forward_gradient(classify(model), model.parameters(), X, Y, control=False, step=0)
    assert torch.equal(other, gradient(model))
