"""A batch in parts of its samples has the estimate of the whole, and what is learned from it, in less memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad.run.budget import Trace
from jetplane.gradients import by_parts
from jetplane.gradients.passes import divisions
from jetplane.gradients.plan import noise_plan
from jetplane.optim import HorizonAdam

N = 12  # samples

Losses = Callable[..., Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96, 3)),
    ).double()


def smooth() -> nn.Module:
    """No norm behind a bias, whose gradient is rounding."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(96, 3)),
    ).double()


def recurrent() -> nn.Module:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.layer(self.table(words)).mean(1))

    return Model().double()


def classify(model: nn.Module) -> Losses:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


X, WORDS = torch.randn(N, 1, 12, 12, dtype=torch.float64), torch.arange(N * 5).reshape(N, 5) % 7
Y = torch.arange(N) % 3


def after(calls: int, model: nn.Module, losses: Losses, *batch: Any, **options: Any) -> list[Tensor]:
    """The last gradient, what was learned, and the last loss of some calls with steps between them."""
    estimate = jp.ForwardGradient(model.parameters(), 3, **options)
    loss = torch.zeros(())
    for _ in range(calls):
        model.zero_grad()
        loss = estimate(losses, *batch)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
    learned = estimate.state_dict()["control"]
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None), *(learned[key] for key in learned)]


@pytest.mark.parametrize(
    ("make", "batch", "memories"), [(network, (X, Y), ("100 kB", "60 kB")), (recurrent, (WORDS, Y), ("60 kB",))]
)
def test_parts_give_the_numbers_of_the_whole(
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    memories: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With what is learned from them, also once noise is balanced, which takes 20 calls."""
    found = []
    for memory in (None, *memories):
        model = make()
        with caplog.at_level(logging.INFO, "jetplane"):
            found.append(after(21, model, classify(model), *batch, memory=memory))
    lines = {line for line in caplog.messages if "a batch of 12 samples is taken in" in line}
    assert len(lines) == len(memories)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("make", "batch"), [(network, (X, Y)), pytest.param(recurrent, (WORDS, Y), marks=pytest.mark.slow)]
)
def test_compiled_parts_give_the_numbers_of_the_whole(
    make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor]
) -> None:
    found = []
    for options in ({}, {"compile": True, "memory": "100 kB"}):
        model = make()
        estimate = jp.ForwardGradient(model.parameters(), 3, **options)
        losses = [estimate(classify(model), *batch)]
        for _ in range(2):
            losses.extend(estimate.steps(classify(model), *(torch.stack([part, part.flip(0)]) for part in batch)))
        learned = estimate.state_dict()["control"]
        found.append([*losses, *(p.grad for p in model.parameters()), *(learned[key] for key in learned)])
        assert (len(estimate.parts(classify(model), *batch)) > 1) == bool(options)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_of_horizon_adam_in_parts_is_that_of_the_whole(compile: bool) -> None:
    """The look back along the path, which takes the same parts, among them."""
    found = []
    for options in ({}, {"compile": compile, "memory": "100 kB"}):
        model = smooth()
        opt = HorizonAdam(model.parameters(), samples=3, every=2, clip=0.5, **options)
        losses = [opt.step(classify(model), X, Y)]
        rates = [opt.report.rate]
        for _ in range(2):
            report = opt.steps(classify(model), torch.stack([X, X.flip(0)]), torch.stack([Y, Y.flip(0)]))
            losses.extend(report.loss)
            rates.extend(report.rate)
        assert (len(opt.estimate.parts(classify(model), X, Y)) > 1) == bool(options)
        found.append([*losses, *rates, *model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def with_aux(model: nn.Module) -> Callable[..., Any]:
    """Of a batch in a dict; beside the losses whatever has an entry for each sample, and words."""

    def losses(batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        z = model(batch["x"])
        loss = F.cross_entropy(z, batch["y"], reduction="none")
        return loss, {"hits": z.argmax(1) == batch["y"], "z": [z], "name": "logits", "none": None}

    return losses


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "compile"),
    [
        *((jp.ForwardGradient, False), (jp.ForwardGradient, True), (HorizonAdam, False)),
        pytest.param(HorizonAdam, True, marks=pytest.mark.slow),
    ],
)
def test_aux_of_all_parts_is_that_of_the_whole(kind: Any, compile: bool) -> None:
    """Of batches in dicts, which are other ones at each call."""
    found = []
    for options in ({}, {"compile": compile, "memory": "100 kB"}):
        model = smooth()
        made, losses = kind(model.parameters(), samples=3, **options), with_aux(model)
        estimate, results = made.estimate if kind is HorizonAdam else made, list[Any]()
        for number in range(6):
            batch = {"x": X.roll(number, 0), "y": Y.roll(number)}
            if kind is HorizonAdam:
                results.append((made.step(losses, batch, has_aux=True), made.report.aux))
            else:
                results.append(made(losses, batch, has_aux=True))
        assert (len(estimate.parts(losses, batch)) > 1) == bool(options)
        assert results[0][1]["z"][0].shape == (N, 3) and results[0][1].pop("name") == "logits"
        assert results[0][1].pop("none") is None
        learned = estimate.state_dict()["control"]
        grads = [p.grad for p in model.parameters()] if kind is jp.ForwardGradient else []
        found.append([*results[0][1]["z"], results[0][1]["hits"], results[-1][0], *results[-1][1]["z"], *grads])
        found[-1] += [*model.parameters(), *(learned[key] for key in learned)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("beside", "compile"),
    [
        (lambda z, y: (z.argmax(1) == y).sum(), False),
        (lambda z, y: {"mean": z.mean(), "z": z}, False),
        (lambda z, y: {"mean": z.mean(), "z": z}, True),
        (lambda z, y: z.T, False),
        (lambda z, y: len(z), False),
        (lambda z, y: 0.5, False),
    ],
    ids=["sum", "mean", "mean, compiled", "other axis", "count", "constant"],
)
def test_aux_that_is_no_samples_is_that_of_the_whole(beside: Callable[[Tensor, Tensor], Any], compile: bool) -> None:
    """Which is then taken whole: whether a number is a sum or a mean of something, nobody can tell."""
    found = []
    for options in ({}, {"compile": compile, "memory": "140 kB"}):
        model = smooth()
        estimate = jp.ForwardGradient(model.parameters(), 3, **options)

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> tuple[Tensor, Any]:
            z = model(x)
            return F.cross_entropy(z, y, reduction="none"), beside(z, y)

        found.append([estimate(losses, X, Y, has_aux=True) for _ in range(1 if compile else 2)])
        assert len(estimate.parts(losses, X, Y)) == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_aux_that_is_no_samples_any_more_is_taken_whole() -> None:
    model, twin, seen = network(), network(), {"sums": False}

    def losses_of(model: nn.Module) -> Callable[..., Any]:
        def losses(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            z = model(x)
            return F.cross_entropy(z, y, reduction="none"), z.sum() if seen["sums"] else z

        return losses

    estimates = [
        (jp.ForwardGradient(one.parameters(), 3, **options), losses_of(one))
        for one, options in ((model, {"memory": "200 kB"}), (twin, {}))
    ]
    for sums in (False, True):
        seen["sums"] = sums
        found = [estimate(losses, X, Y, has_aux=True) for estimate, losses in estimates]
        assert len(estimates[0][0].parts(estimates[0][1], X, Y)) == 1 if sums else 2
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    grads = [[parameter.grad for parameter in one.parameters()] for one in (model, twin)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("samples", [7, pytest.param(11, marks=pytest.mark.slow)])
def test_the_last_part_may_be_smaller(samples: int, caplog: pytest.LogCaptureFixture) -> None:
    """A prime number of samples, too, has the numbers of the whole in parts, with what is learned."""
    found = []
    for memory in (None, "80 kB"):
        model = network()
        with caplog.at_level(logging.INFO, "jetplane"):
            found.append(after(21, model, classify(model), X[:samples], Y[:samples], memory=memory))
    assert f"a batch of {samples} samples is taken in {-(-samples // 3)} parts" in caplog.messages
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("ignore:the estimate is mostly noise:UserWarning")  # with twelve samples
@pytest.mark.parametrize("compiled", [HorizonAdam, jp.ForwardGradient])
def test_compiled_samples_that_are_found_coupled_are_taken_whole(compiled: Any) -> None:
    """Which losses do not tell: what couples them has no effect on their values, here."""
    found = []
    for options in ({}, {"compile": True, "memory": "300 kB"}):
        model = smooth()
        made = compiled(model.parameters(), samples=3, **options)

        def losses(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            z = model(x)
            return F.cross_entropy(z + 1e-9 * z.mean(0), y, reduction="none")

        call = made.step if compiled is HorizonAdam else made
        found.append([call(losses, X, Y) for _ in range(3)])
        estimate = made.estimate if compiled is HorizonAdam else made
        assert len(estimate.parts(losses, X, Y)) == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def coupled_norm(model: nn.Module) -> Losses:
    norm = nn.BatchNorm1d(96).double()
    return lambda x, y: F.cross_entropy(model[7](norm(model[:7](x))), y, reduction="none")


def shared_share(model: nn.Module) -> Losses:
    """A loss that depends on how many samples there are of its kind."""
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none") / torch.bincount(y, minlength=3)[y]


def largest_is_one(model: nn.Module) -> Losses:
    return lambda x, y: F.cross_entropy(model(x / x.abs().max()), y, reduction="none")


def mixed(model: nn.Module) -> Losses:
    """Samples that see each other."""

    def losses(x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        return F.cross_entropy(z - z.mean(0), y, reduction="none")

    return losses


def of_their_own(model: nn.Module) -> Losses:
    """Samples that come from nowhere: no argument has them."""
    return lambda: F.cross_entropy(model(X), Y, reduction="none")


@pytest.mark.filterwarnings("ignore:the estimate is mostly noise:UserWarning")  # with twelve samples
@pytest.mark.parametrize("make", [coupled_norm, shared_share, largest_is_one, mixed, of_their_own])
def test_what_depends_on_other_samples_stays_whole(
    make: Callable[[nn.Module], Losses], caplog: pytest.LogCaptureFixture
) -> None:
    batch = () if make is of_their_own else (X, Y)
    model, twin = network(), network()
    with caplog.at_level(logging.INFO, "jetplane"):
        found = after(3, model, make(model), *batch, memory="200 kB")
    expected = after(3, twin, make(twin), *batch, chunk_size=3)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(list(model.buffers()), list(twin.buffers()))


def test_the_function_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    agree = by_parts.agree

    def counting(*given: Any) -> bool:
        looked.append(agree(*given))
        return looked[-1]

    monkeypatch.setattr(by_parts, "agree", counting)
    model = network()
    for _ in range(3):
        jp.forward_gradient(classify(model), model.parameters(), X, Y, samples=3, memory="100 kB")
    assert looked == [True]


def test_a_model_that_changes_its_mode_keeps_its_parts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(400, 3)).double()
    losses = classify(model)
    estimate = jp.ForwardGradient(model.parameters(), 3, memory="200 kB")
    for training in (True, False, True, False):
        model.train(training)
        estimate(losses, X, Y)
        assert len(estimate.parts(losses, X, Y)) > 1


def test_parts_that_are_other_programs_are_taken_whole() -> None:
    """What a sample is asked for depends on its part, here."""
    model, twin = network(), network()

    def branching(model: nn.Module) -> Losses:
        def losses(x: Tensor, y: Tensor) -> Tensor:
            z = model(x)
            return F.cross_entropy(z if y[-1] == 1 else z.tanh().atanh(), y, reduction="none")

        return losses

    y = torch.arange(N) // 6  # of two parts the last ones differ
    after(2, model, branching(model), X, y, memory="200 kB"), after(2, twin, branching(twin), X, y)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-9, atol=1e-11)


def test_a_program_that_has_parts_no_more_is_taken_whole() -> None:
    """What it does between samples is data, and a flag of its own."""
    model, twin, seen = network(), network(), {"mixes": False}

    def losses_of(model: nn.Module) -> Losses:
        def losses(x: Tensor, y: Tensor) -> Tensor:
            z = model(x)
            return F.cross_entropy(z - z.mean(0) if seen["mixes"] else z, y, reduction="none")

        return losses

    estimates = [
        (jp.ForwardGradient(one.parameters(), 3, **options), losses_of(one))
        for one, options in ((model, {"memory": "200 kB"}), (twin, {}))
    ]
    for mixes in (False, True, True, False):
        seen["mixes"] = mixes
        for estimate, losses in estimates:
            estimate(losses, X, Y)
    grads = [[parameter.grad for parameter in one.parameters()] for one in (model, twin)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_how_samples_are_coupled_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a batch's own numbers, which no operation on parameters tells."""
    monkeypatch.setattr(divisions, "_LOOKED", 2)
    model, twin = network(), network()
    losses = [lambda x, y, model=one: F.cross_entropy(model(x), y, reduction="none") / y.max() for one in (model, twin)]
    parts = jp.ForwardGradient(model.parameters(), 3, memory="200 kB")
    whole = jp.ForwardGradient(twin.parameters(), 3)
    alike, other = torch.full((N,), 2), torch.arange(N) // 4
    for y in (alike, alike):  # the first of them decides
        parts(losses[0], X, y), whole(losses[1], X, y)
    model.zero_grad(), twin.zero_grad()
    parts(losses[0], X, other), whole(losses[1], X, other)
    grads = [[parameter.grad for parameter in one.parameters()] for one in (model, twin)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_dropout_is_drawn_in_each_part() -> None:
    """Both passes of a part see the same units: with all tangents of its noise the estimate is the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, totals = torch.randn(N, 4, dtype=torch.float64), []
    estimate = jp.ForwardGradient(model.parameters(), 4, memory="8 kB", control=False)
    for seed in range(400):
        torch.manual_seed(seed)
        estimate(classify(model), x, Y)
        totals.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone())
        model.zero_grad()
    exact = []
    for seed in range(1000):
        torch.manual_seed(seed)
        F.cross_entropy(model(x), Y).backward()
        exact.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone())
        model.zero_grad()
    mean, wanted = torch.stack(totals).mean(0), torch.stack(exact).mean(0)
    assert float((mean - wanted).norm() / wanted.norm()) < 0.2


def test_a_batch_in_parts_holds_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no budget is given, and no more passes of the program are counted for it."""
    monkeypatch.setattr(noise_plan, "_SMALL", 1)
    peaks = []
    for options in ({}, {"chunk_size": 3}):
        model = network()
        estimate, losses = jp.ForwardGradient(model.parameters(), 3, **options), classify(model)
        estimate(losses, X, Y)
        gc.collect()
        gc.disable()
        try:
            with Trace.of([]) as trace:
                estimate(losses, X, Y)
        finally:
            gc.enable()
        peaks.append(trace.peak())
    assert peaks[0] < 0.4 * peaks[1]


def test_what_is_not_finite_in_one_part_teaches_nothing() -> None:
    found = []
    for memory in (None, "100 kB"):
        model, bad = network(), X.clone()
        bad[-1] = torch.inf
        estimate = jp.ForwardGradient(model.parameters(), 3, memory=memory)
        for x in (X, bad):
            model.zero_grad()
            estimate(classify(model), x, Y)
        learned = estimate.state_dict()["control"]
        found.append([learned[key] for key in learned])
        assert not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        assert all(bool(one.isfinite().all()) for one in found[-1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_parameters_that_are_not_used_have_no_gradient() -> None:
    model = nn.ModuleDict({"used": network(), "left": nn.Linear(2, 2)})
    estimate = jp.ForwardGradient(model.parameters(), 3, memory="100 kB", allow_unused=True)
    estimate(classify(model["used"]), X, Y)
    assert model["left"].weight.grad is None and model["used"][0].weight.grad is not None


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compile", [False, True])
def test_parts_are_drawn_again_each_by_itself(compile: bool) -> None:
    found = []
    for resample in (False, True):
        model = smooth()
        estimate = jp.ForwardGradient(model.parameters(), 3, memory="100 kB", resample=resample, compile=compile)
        loss = estimate(classify(model), X, Y)
        torch.testing.assert_close(loss, classify(model)(X, Y).mean().detach())
        assert len(estimate.parts(classify(model), X, Y)) > 1
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert found[1].isfinite().all() and not torch.allclose(found[0], found[1])
