"""Compiled forward gradients: unbiased as the eager ones are, with the same noise, random numbers and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import CASES, LABELS, B, Case, check_exact, normal

# What Dynamo, or a trace, cannot take: these are run as they are, after a warning that says why.
NOT_CAPTURED = {
    "batch norms and dropout": "data-dependent",  # a norm with momentum=None counts its calls on the host
    "batch norm over steps, as many as samples": "its operations are others where it is traced",
    "lstm, sequence first": "RNN, GRU, or LSTM",
    "lstm, batch first": "RNN, GRU, or LSTM",
    "gru": "RNN, GRU, or LSTM",
    "rnn, as long as the batch": "RNN, GRU, or LSTM",
    "experts": "data-dependent",
}
FAST = ("dropout", "in place")

Losses = Callable[[Tensor, Tensor], Tensor]


def losses_of(model: nn.Module) -> Losses:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of a checkpoint, rightly
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in CASES
        if case.name not in NOT_CAPTURED
    ],
)
def test_a_compiled_estimate_with_all_coordinates_is_the_gradient(case: Case) -> None:
    model = case.model().double()
    check_exact(model, losses_of(model), case.data(), LABELS, compile=True)


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_in_chunks_that_take_turns_it_is_the_gradient_too(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    model = case.model().double()
    check_exact(model, losses_of(model), case.data(), LABELS, compile=True, chunk_size=40)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "gru" else pytest.mark.slow) for name in NOT_CAPTURED],
)
def test_what_cannot_be_captured_is_run_as_it_is(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    model = case.model().double()
    twin, x = copy.deepcopy(model), case.data()
    estimate, eager = (jp.ForwardGradient(one.parameters(), 2, compile=c) for one, c in ((model, True), (twin, False)))
    for turn in range(2):
        torch.manual_seed(turn)
        if turn:
            loss = estimate(losses_of(model), x, LABELS)
        else:
            with pytest.warns(UserWarning, match=NOT_CAPTURED[name]):
                loss = estimate(losses_of(model), x, LABELS)
        torch.manual_seed(turn)
        assert torch.equal(loss, eager(losses_of(twin), x, LABELS))
    same(model, twin)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def same(model: nn.Module, twin: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, twin.get_buffer(name), rtol=1e-12, atol=1e-12)


def runs(compile: bool) -> tuple[nn.Module, jp.ForwardGradient, Losses]:
    model = network()
    return model, jp.ForwardGradient(model.parameters(), 3, seed=5, compile=compile), losses_of(model)


@pytest.mark.usefixtures("traced")
def test_steps_are_as_many_calls_and_go_on_after_a_load() -> None:
    xs, ys = normal(5, B, 4), torch.arange(5 * B).reshape(5, B) % 3
    (model, one, losses), (twin, other, theirs) = runs(True), runs(False)
    torch.manual_seed(1)
    found = one.steps(losses, xs[:3], ys[:3])
    torch.manual_seed(1)
    expected = other.steps(theirs, xs[:3], ys[:3])
    torch.testing.assert_close(found, expected)
    same(model, twin)
    assert one.step == other.step == 3
    again = jp.ForwardGradient(model.parameters(), 3, compile=True)
    again.load_state_dict(one.state_dict())
    for number in (3, 4):
        torch.manual_seed(number)
        loss = again(losses, xs[number], ys[number])
        torch.manual_seed(number)
        torch.testing.assert_close(loss, other(theirs, xs[number], ys[number]))
    same(model, twin)
    assert copy.deepcopy(again).step == 5


def mixed() -> nn.Module:
    """Noise in samples' own weights, behind a batch norm, and with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Flatten(), nn.Linear(300, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
    ).double()


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore:the estimate is mostly noise:UserWarning")  # with four samples
def test_chunks_in_turn_give_the_numbers_of_one() -> None:
    """Twice, so that what is learned from chunks is compared, too."""
    x, y = normal(B, 1, 12, 12), LABELS
    found = []
    for options in ({}, {"chunk_size": 2}, {"compile": True, "chunk_size": 2}, {"compile": True, "memory": "1MiB"}):
        model = mixed()
        estimate = jp.ForwardGradient(model.parameters(), 5, **options)
        for number in range(2):
            torch.manual_seed(number)
            estimate(losses_of(model), x, y)
        found.append([parameter.grad for parameter in model.parameters()] + list(model.buffers()))
    assert any(site.own is not None for site in estimate.sites(losses_of(model), x, y))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("traced")
def test_aux_comes_along() -> None:
    model = nn.Linear(4, 3).double()
    xs, ys = normal(2, B, 4), torch.zeros(2, B, dtype=torch.int64)

    def losses(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
        logits = model(x)
        return F.cross_entropy(logits, y, reduction="none"), {"logits": logits, "of": "a batch"}

    estimate = jp.ForwardGradient(model.parameters(), compile=True)
    loss, aux = estimate(losses, xs[0], ys[0], has_aux=True)
    assert loss.ndim == 0 and aux["of"] == "a batch"
    torch.testing.assert_close(aux["logits"], model(xs[0]).detach())
    many, auxes = estimate.steps(losses, xs, ys, has_aux=True)
    assert many.shape == (2,)
    torch.testing.assert_close(auxes["logits"], model(xs).detach())


@pytest.mark.usefixtures("traced")
def test_a_plan_that_no_longer_holds_is_made_anew() -> None:
    """Which samples are coupled is data here, so the plan of the first call is wrong for the last ones."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def losses(x: Tensor, order: Tensor) -> Tensor:
        h = layers[1](layers[0](x))
        return layers[2](h + h[order]).square().sum(1)

    apart, coupled, x = torch.arange(B), torch.arange(B).flip(0), normal(B, 3)
    estimate = jp.ForwardGradient(layers.parameters(), 2, compile=True, probe_every=3, control=False)
    for _ in range(2):
        estimate(losses, x, apart)
    eager = jp.ForwardGradient(layers.parameters(), 2, control=False, step=2)
    layers.zero_grad()
    estimate(losses, x, coupled)  # the third call, which looks again
    found = [p.grad.clone() for p in layers.parameters()]  # type: ignore[union-attr]
    layers.zero_grad()
    eager(losses, x, coupled)
    for gradient, parameter in zip(found, layers.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_seed_and_step_stay_where_a_graph_reads_them() -> None:
    estimate = jp.ForwardGradient([torch.ones(2, requires_grad=True)], seed=3, compile=True)
    seed, step = estimate.words
    assert all(one is other for one, other in zip(estimate.words, (seed, step), strict=True)) and int(seed) == 3
    estimate.seed = 4
    assert int(estimate.words[0]) == 4 and estimate.words[1] is step


def test_weights_perturbed_themselves_are_not_compiled() -> None:
    with pytest.raises(
        ValueError, match=r"^estimator is 'weight' and compile True; expected 'activation' with compile"
    ):
        jp.ForwardGradient([torch.ones(2, requires_grad=True)], estimator="weight", compile=True)


def test_a_program_that_waits_for_a_value_is_run_as_it_is() -> None:
    weight = torch.ones(3, requires_grad=True)
    estimate = jp.ForwardGradient([weight], compile=True)
    with pytest.warns(UserWarning, match="cannot be compiled and is run as it is"):
        estimate(lambda x: (x @ weight) * x.sum().item(), torch.ones(2, 3))


@pytest.mark.slow
def test_inductor_gives_the_same() -> None:
    x, y = normal(B, 4), LABELS
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)).double()
    twin = copy.deepcopy(model)
    one, other = (jp.ForwardGradient(m.parameters(), 4, compile=c) for m, c in ((model, True), (twin, False)))
    for _ in range(3):
        torch.testing.assert_close(one(losses_of(model), x, y), other(losses_of(twin), x, y))
    same(model, twin)
