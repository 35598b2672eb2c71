"""What forward gradients promise beside being unbiased: noise, state, plans, memory, and what they refuse."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad.budget import Trace
from jetplane.directions.counter import Stream, rademacher
from jetplane.errors import MissingRule
from jetplane.experiments.data import load
from jetplane.gradients.layout import Layout, candidates
from jetplane.gradients.noise import Signs
from jetplane.gradients.passes import Passes

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def classify(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def backprop(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    model.zero_grad()
    loss_fn(*batch).mean().backward()
    result = gradient(model).clone()
    model.zero_grad()
    return result


# -- noise --------------------------------------------------------------------------------------------------------


def test_signs_are_those_of_the_counter() -> None:
    rows = Signs(7, 3).rows(5, 2, 6, torch.zeros(11, 17))
    twin = rademacher(Stream(7, 3, 1 << 15, 5), 2, 6, 11 * 17, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(rows.flatten(1), twin)
    step = torch.tensor(3)
    assert torch.equal(Signs(7, step).rows(5, 2, 6, torch.zeros(11, 17)), rows)
    assert Signs(7, 3).rows(5, 0, 2, torch.zeros(3, dtype=torch.float64)).dtype == torch.float64


KERNEL = """
import sys
import torch
from jetplane.gradients import kernels

drawn = {}
for case in eval(sys.argv[1]):
    seed, step, place, start, stop, size = case
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        words = torch.tensor(seed), torch.tensor(step)
        drawn[str((*case, str(kind)))] = kernels.signs(*words, place, start, stop, size, kind)
torch.save(drawn, sys.argv[2])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_makes_the_same_signs(tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    cases = [(7, 3, 5, 2, 6, 187), (-1, 2**32 - 1, 2**16 - 1, 0, 2, 5000), (0, 0, 0, 0, 1, 1), (1, 1, 1, 0, 1, 0)]
    given = [(seed, step, site | 1 << 31, *rest) for seed, step, site, *rest in cases]
    script = [sys.executable, "-c", KERNEL, repr(given), str(tmp_path / "drawn.pt")]
    ran = subprocess.run(script, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    drawn = torch.load(tmp_path / "drawn.pt", weights_only=True)
    for (seed, step, site, start, stop, size), key in zip(cases, given, strict=True):
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            expected = Signs(seed % 2**64, step).rows(site, start, stop, torch.zeros(size, dtype=kind))
            assert torch.equal(drawn[str((*key, str(kind)))], expected)


def test_noise_has_zero_mean_and_unit_covariance_and_is_fresh_everywhere() -> None:
    draws = torch.stack([Signs(0, step).rows(site, 0, 4, torch.zeros(40)) for step in range(150) for site in range(4)])
    flat = draws.reshape(150, 4 * 4 * 40)  # steps x (site, row, entry)
    assert flat.mean(0).abs().max() < 5 / 150**0.5
    correlation = flat.T @ flat / 150
    assert torch.equal(correlation.diagonal(), torch.ones(640))
    off = correlation - torch.eye(640)
    assert off.abs().max() < 6 / 150**0.5
    assert abs(off.square().mean() * 150 - 1) < 0.05
    # along the steps too, and between seeds
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 0.02
    assert not torch.equal(Signs(0, 0).rows(0, 0, 1, torch.zeros(64)), Signs(1, 0).rows(0, 0, 1, torch.zeros(64)))


def test_bits_are_kept_for_the_second_pass_where_they_are_few() -> None:
    signs = Signs(0, 0)
    small, large = torch.zeros(3, 100), torch.zeros(300_000)
    for site, like in enumerate((small, large, small.double())):
        first = signs.rows(site, 0, 2, like)
        assert all(torch.equal(first, signs.rows(site, 0, 2, like)) for _ in range(3))
        assert torch.equal(first, Signs(0, 0).rows(site, 0, 2, like)) and first.dtype == like.dtype
    for site in range(100):
        signs.rows(site, 0, 2, torch.zeros(10_000))
    assert 0 < sum(bits.nbytes for bits in signs._drawn.values()) <= 1 << 15


def test_noise_is_keyed_by_call_and_not_by_parameter() -> None:
    layer = nn.Linear(4, 4)
    seen: list[int] = []

    class Watched(Signs):
        def rows(self, site: int, start: int, stop: int, like: Tensor) -> Tensor:
            seen.append(site)
            return super().rows(site, start, stop, like)

    def twice(x: Tensor) -> Tensor:
        return layer(layer(layer(x).tanh()).tanh()).square().sum(1)

    jp.ForwardGradient(layer.parameters(), noise=Watched)(twice, X)
    assert seen == [0, 1, 0, 1]  # two of the three calls, in two passes; behind the third is the loss


@pytest.mark.parametrize(
    ("activation", "zeros"),
    [(nn.ReLU(), True), (nn.ReLU6(), True), (nn.Hardtanh(), True), (nn.LeakyReLU(), False), (nn.GELU(), False)],
    ids=lambda value: str(value),
)
def test_noise_is_zero_only_where_the_derivative_is(
    activation: nn.Module, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nn.Linear(4, 16), nn.Linear(16, 3)
    with torch.no_grad():
        second.weight.copy_(torch.eye(16)[:3] * 0 + 1)  # the losses' tangents are sums of the noise
    hidden = first(X)
    with torch.no_grad():
        slopes = torch.func.jvp(activation, (hidden,), (torch.ones_like(hidden),))[1]
    assert bool((slopes == 0).any()) == zeros
    rows = Signs(0, 0).rows(0, 0, 1, hidden)[0]
    expected = torch.where(slopes == 0, 0.0, rows).sum(1) * 3
    scalars: list[Tensor] = []
    estimate = jp.ForwardGradient([*first.parameters(), *second.parameters()])
    carry = Passes.carry
    monkeypatch.setattr(Passes, "carry", lambda *args, **kw: scalars.append(carry(*args, **kw)) or scalars[-1])
    estimate(lambda x: second(activation(first(x))).sum(1), X)
    torch.testing.assert_close(scalars[-1][0].squeeze(1), expected)


def test_noise_enters_behind_functions_only_if_nothing_else_reads_their_arguments() -> None:
    a, b, c = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)
    named = [*a.parameters(), *b.parameters()]

    def alone(x: Tensor) -> Tensor:
        return b(F.max_pool1d(a(x).relu(), 2).repeat(1, 2)).square().sum(1)

    def shared(x: Tensor) -> Tensor:
        h = a(x)
        return (b(h.relu()) + c(h)).tanh().square().sum(1)

    def rejoined(x: Tensor) -> Tensor:
        h = a(x)
        return b(h.relu() + h.sigmoid()).square().sum(1)

    def logged(x: Tensor) -> tuple[Tensor, Any]:
        h = a(x)
        return b(h.relu()).square().sum(1), (h.detach(), h.mean(), (h > 0).sum())

    assert [s.shape.numel() for s in jp.ForwardGradient(named).sites(alone, X)] == [8 * 3]
    (site,) = jp.ForwardGradient([*named, *c.parameters()]).sites(shared, X)
    assert site.group.nodes == (0,)
    (site,) = jp.ForwardGradient(named).sites(rejoined, X)
    assert site.group.nodes == (0, 1, 2, 3)
    (site,) = jp.ForwardGradient(named).sites(logged, X, has_aux=True)
    assert len(site.group.nodes) == 2  # what only a metric reads does not count


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


@pytest.mark.parametrize("estimator", ["activation", "weight"])
def test_chunks_change_nothing(estimator: str) -> None:
    model = mlp()
    found = []
    for options in ({}, {"chunk_size": 2}, {"chunk_size": 7}, {"memory": "8 KiB"}, {"memory": "1GiB"}):
        model.zero_grad()
        jp.ForwardGradient(model.parameters(), samples=7, estimator=estimator, **options)(classify(model), X, Y)
        found.append(gradient(model).clone())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


def peak(estimate: jp.ForwardGradient, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The most bytes that a call holds, once the program is known; nothing may wait for the garbage collector."""
    model.zero_grad(set_to_none=False)
    estimate(classify(model), x, y)
    gc.disable()
    try:
        with Trace.of([]) as trace:
            estimate(classify(model), x, y)
    finally:
        gc.enable()
    return trace.peak()


def deep(depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 3))


def test_memory_is_flat_in_depth_and_within_its_budget() -> None:
    x, y = torch.randn(128, 32), torch.arange(128) % 3
    shallow, net = deep(2), deep(24)
    flat = peak(jp.ForwardGradient(net.parameters(), samples=8), net, x, y)
    assert flat < 1.1 * peak(jp.ForwardGradient(shallow.parameters(), samples=8), shallow, x, y)
    assert flat > 400_000
    assert peak(jp.ForwardGradient(net.parameters(), samples=8, memory=200_000), net, x, y) < 220_000


# -- programs -----------------------------------------------------------------------------------------------------


def test_buffers_and_random_state_are_as_after_one_run() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), samples=4, chunk_size=1)
    for _ in range(2):  # planned, and as planned
        before = {name: value.clone() for name, value in model.state_dict().items()}
        start = torch.get_rng_state()
        model(X)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        end = torch.get_rng_state()
        model.load_state_dict(before)
        torch.set_rng_state(start)
        estimate(classify(model), X, Y)
        assert torch.equal(torch.get_rng_state(), end)
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]), name


def test_programs_may_change_between_calls() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), samples=4, control=False)
    for training in (False, True, False, True):
        model.train(training)
        count = int(model[1].num_batches_tracked)
        fresh = jp.ForwardGradient(model.parameters(), samples=4, step=estimate.step, control=False)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.zero_grad()
        fresh(classify(model), X, Y)
        wanted = gradient(model).clone()
        model.load_state_dict(state)
        model.zero_grad()
        estimate(classify(model), X, Y)
        torch.testing.assert_close(gradient(model), wanted)
        assert int(model[1].num_batches_tracked) == count + training


def test_the_same_operations_on_other_values_are_another_program() -> None:
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.ModuleList([a, b, c]).double()
    x = X.double()

    def program(swap: bool) -> Callable[[Tensor], Tensor]:
        def losses(x: Tensor) -> Tensor:
            h = a(x)
            k = b(h)
            one, other = (h, k) if swap else (k, h)
            return c(one.relu()).square().sum(1) + 0 * other.sum(1)

        return losses

    estimate = jp.ForwardGradient(model.parameters(), samples=3000, allow_unused=True)
    for swap in (False, True, False, True):
        model.zero_grad()
        estimate(program(swap), x)
        found = gradient(model).clone()
        wanted = backprop(model, program(swap), x)
        assert F.cosine_similarity(found, wanted, dim=0) > 0.97, swap


def test_the_same_operations_on_other_parameters_are_another_program() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    estimate = jp.ForwardGradient([*a.named_parameters("a"), *b.named_parameters("b")])
    estimate(lambda x: b(a(x).relu()).square(), X)
    with pytest.raises(jp.UnsupportedProgram, match=r"the losses do not depend on b\.weight, b\.bias"):
        estimate(lambda x: a(a(x).relu()).square(), X)


def test_shared_memory_frozen_parameters_and_views() -> None:
    flat = torch.randn(4 * 5 + 5 * 3, dtype=torch.float64)
    first = flat[:20].view(4, 5).requires_grad_()
    second = flat[20:].view(5, 3).requires_grad_()
    x = X.double()

    def losses(x: Tensor) -> Tensor:
        return F.cross_entropy((x @ first).relu() @ second, Y, reduction="none")

    losses(x).mean().backward()
    wanted = second.grad.clone()
    first.grad = second.grad = None
    jp.forward_gradient(losses, {"first": first, "second": second}, x)
    torch.testing.assert_close(second.grad, wanted)
    assert first.grad.shape == first.shape
    first.grad = second.grad = None
    jp.forward_gradient(losses, [second], x)
    torch.testing.assert_close(second.grad, wanted)
    assert first.grad is None
    first.requires_grad_(False)
    jp.forward_gradient(losses, [first, second], x)
    assert first.grad is None


def test_autocast() -> None:
    model = mlp()
    wanted = backprop(model, classify(model), X, Y)
    estimate = jp.ForwardGradient(model.parameters(), samples=500)
    with torch.autocast("cpu", torch.bfloat16):
        estimate(classify(model), X, Y)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert F.cosine_similarity(gradient(model), wanted, dim=0) > 0.9


def test_dead_layers_are_not_taken_for_proven() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    estimate = jp.ForwardGradient(model.parameters(), samples=2, probe_every=2, coupled="raise")
    first, second = estimate.sites(classify(model), X, Y)
    assert first.layout is None and not first.coupled  # nothing was seen, so nothing is known
    assert second.layout == Layout(0, 1)
    estimate(classify(model), X, Y)
    assert model[0].weight.grad.abs().max() == 0
    with torch.no_grad():
        model[2].bias.zero_()
    estimate(classify(model), X, Y)  # looks again
    assert first.layout == Layout(0, 1)
    assert model[0].weight.grad.abs().max() > 0


def test_layouts_of_a_shape() -> None:
    assert candidates((6, 4), 3) == [Layout(0, 2), Layout(0, 1)]
    assert candidates((5, 12, 3), 3)[0] == Layout(2, 1)
    assert Layout(1, 4) in candidates((5, 12, 3), 3) and Layout(1, 2) in candidates((5, 12, 3), 3)
    assert candidates((5, 7), 3) == []


# -- what is refused ----------------------------------------------------------------------------------------------


def test_coupled_samples_raise() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), coupled="raise")
    with pytest.raises(
        jp.CoupledSamples, match=r"sample's entries of \(8, 6\), the output of aten.addmm.default in module 0"
    ):
        estimate(classify(model), X, Y)
    jp.ForwardGradient(model.eval().parameters(), coupled="raise")(classify(model), X, Y)
    jp.forward_gradient(classify(model), model.parameters(), X, Y)
    model.train()
    jp.forward_gradient(classify(model), model.parameters(), X, Y)
    with pytest.raises(jp.CoupledSamples):  # also where the plan is known
        jp.forward_gradient(classify(model), model.parameters(), X, Y, coupled="raise")


W = torch.ones(4, 3)


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


def test_bad_params() -> None:
    w = W.clone().requires_grad_()
    for error, message, params in (
        (TypeError, "params is a tensor; expected tensors, a mapping", w),
        (ValueError, "params holds no tensor that requires grad", [W]),
        (ValueError, "parameter 1 is parameter 0; expected each parameter once", [w, w]),
        (TypeError, "parameter 0 is str; expected a tensor", ["w"]),
    ):
        with pytest.raises(error, match=message):
            jp.forward_gradient(lambda: w.sum(1), params)


def unsteady() -> Callable[[Tensor], Tensor]:
    calls = iter(range(100))
    return lambda x: (x @ PARAMETER).relu() @ OTHER if next(calls) % 2 else (x @ PARAMETER).tanh() @ OTHER


PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


def written(x: Tensor) -> Tensor:
    PARAMETER.mul_(x.sum(1)[:4, None].abs().sum() * OTHER)
    return (x @ PARAMETER).sum(1)


def overwritten(x: Tensor) -> Tensor:
    h = x * OTHER[:1]
    y = F.linear(h, PARAMETER.T)
    h.add_(1)
    return y.relu() @ torch.ones(3, 2) @ torch.ones(2)


def randomised() -> Tensor:
    return torch.native_dropout(PARAMETER, 0.5, True)[0]


def crossed(x: Tensor) -> Tensor:
    return torch.linalg.cross(x @ PARAMETER, OTHER.expand(8, 3)).sum(1)


PROGRAMS: list[tuple[type[Exception], str, Callable[[Tensor], Any]]] = [
    (TypeError, "loss_fn returned float; expected a tensor of losses", lambda x: 1.0),
    (ValueError, r"shape \(\); expected one loss for each sample", lambda x: (x @ PARAMETER).sum()),
    (ValueError, r"torch.int64 of shape \(8,\); expected one loss", lambda x: (x @ PARAMETER).argmax(1)),
    (jp.UnsupportedProgram, "the losses do not depend on other through any layer", lambda x: (x @ PARAMETER).sum(1)),
    (jp.UnsupportedProgram, "do not depend on other", lambda x: (x @ PARAMETER * OTHER.detach()).sum(1)),
    (jp.UnsupportedProgram, "function of parameters alone", lambda x: PARAMETER.sum(0) * OTHER),
    (jp.UnsupportedProgram, "did other operations when it was called again", unsteady()),
    (jp.UnsupportedProgram, "writes into a parameter", written),
    (
        jp.UnsupportedProgram,
        "draws random numbers for a function of parameters",
        lambda x: x @ randomised() @ OTHER,
    ),
    (jp.UnsupportedProgram, r"the \(8, 4\) that aten.mm.default read or made was overwritten", overwritten),
    (MissingRule, r"aten.linalg_cross.default has no local product for its parameter other \(8, 3\)", crossed),
]


@pytest.mark.parametrize(("error", "message", "program"), PROGRAMS, ids=[message for _, message, _ in PROGRAMS])
def test_refused_programs(error: type[Exception], message: str, program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(error, match=message):
        jp.forward_gradient(program, {"weight": PARAMETER, "other": OTHER}, X)


def test_refused_calls() -> None:
    model = mlp()
    with pytest.raises(TypeError, match=r"loss_fn returned Tensor; expected \(losses, aux\)"):
        jp.forward_gradient(classify(model), model.parameters(), X, Y, has_aux=True)
    with torch.inference_mode(), pytest.raises(jp.UnsupportedProgram, match="inference_mode"):
        jp.forward_gradient(classify(model), model.parameters(), X, Y)
    unused = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="the program never used parameter 1"):
        jp.forward_gradient(lambda x: (x @ PARAMETER).sum(1), [PARAMETER, unused], X, estimator="weight")
    jp.forward_gradient(lambda x: (x @ PARAMETER).sum(1), [PARAMETER, unused], X, allow_unused=True)
    assert unused.grad is None


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.GroupNorm(2, 4), (8, 4, 3, 3)),
        (nn.BatchNorm2d(4), (8, 4, 3, 3)),
        (nn.LayerNorm((4, 6, 6)), (8, 4, 3, 3)),
        (nn.RMSNorm((4, 6, 6)), (8, 4, 3, 3)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_layer_and_its_norm_share_the_noise_behind_the_pooling(norm: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)),
    )
    sites = jp.ForwardGradient(model.parameters()).sites(classify(model), torch.randn(8, 1, 8, 8), torch.arange(8) % 3)
    assert [tuple(site.shape) for site in sites] == [shape, (8, 5)]


# -- how many tangents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "tangents"), [(64, 8), (8, 8), (7, 16), (4, 16), (3, 24), (2, 32), (1, 32)])
def test_a_batch_has_as_many_tangents_as_a_sample_has_numbers_of_noise(samples: int, tangents: int) -> None:
    """64 numbers of noise, behind the first layer; from 8 tangents to 32."""
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)).double()
    x, y = torch.randn(samples, 4, dtype=torch.float64), torch.arange(samples) % 3
    found = []
    for count in (None, tangents):
        model.zero_grad()
        jp.ForwardGradient(model.parameters(), count)(lambda: F.cross_entropy(model(x), y, reduction="none"))
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_number_of_weight_tangents_has_to_be_said() -> None:
    with pytest.raises(ValueError, match=r"^samples is None; expected a positive whole number\.$"):
        jp.ForwardGradient([torch.ones(2, requires_grad=True)], None, estimator="weight")
