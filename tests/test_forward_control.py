"""The learned control variate of forward gradients: what it learns, what it saves, and where there is none.

That it leaves the estimate unbiased is tested beside the estimate itself, with any numbers as Jacobians.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.gradients import balance, control, forward
from jetplane.gradients.layout import Grid, Layout
from test_forward_contract import X, Y, classify, gradient, mlp


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def backprop(model: nn.Module, *batch: Tensor) -> Tensor:
    model.zero_grad()
    classify(model)(*batch).mean().backward()
    result = gradient(model).clone()
    model.zero_grad()
    return result


def estimated(estimate: jp.ForwardGradient, model: nn.Module, *batch: Tensor) -> Tensor:
    model.zero_grad()
    with jp.forward_only():
        estimate(classify(model), *batch)
    return gradient(model).clone()


def learned(estimate: jp.ForwardGradient) -> dict[str, Tensor]:
    """The state, without the name of the only program that there is."""
    state = estimate.state_dict()["control"]
    assert len({key.partition(".")[0] for key in state}) == 1
    return {key.partition(".")[2]: tensor for key, tensor in state.items()}


def off(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Tensor, **options: Any) -> bool:
    estimate = jp.ForwardGradient(model.parameters(), **options)
    estimate(loss_fn, *batch)
    return not any(".jacobian." in key for key in estimate.state_dict()["control"])


# -- learning -----------------------------------------------------------------------------------------------------


def test_jacobians_of_a_linear_network_become_exact_and_the_noise_vanishes() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)).double()
    x, y = torch.randn(32, 5, dtype=torch.float64), torch.arange(32) % 3
    wanted = backprop(model, x, y)
    estimate = jp.ForwardGradient(model.parameters(), samples=4)
    first = (estimated(estimate, model, x, y) - wanted).norm()
    for _ in range(100):
        last = (estimated(estimate, model, x, y) - wanted).norm()
    assert last < 1e-3 * first
    state = learned(estimate)
    assert state["calls"] == 101
    torch.testing.assert_close(state["jacobian.1"], model[2].weight.detach(), rtol=0, atol=1e-3)
    torch.testing.assert_close(state["jacobian.0"], (model[2].weight @ model[1].weight).detach(), rtol=0, atol=1e-3)
    assert torch.equal(state["activity.0"], torch.ones(8, dtype=torch.float64))


def test_estimates_become_much_better_while_a_network_trains() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 5))
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    estimate = jp.ForwardGradient(model.parameters(), samples=4)
    cosines: dict[str, list[Tensor]] = {"plain": [], "controlled": []}
    for step in range(200):
        x = torch.randn(128, 16)
        y = teacher(4 * x).argmax(1)
        if step >= 195:
            wanted = backprop(model, x, y)[: 16 * 32 + 32 + 32 * 32]  # of the layers with noise
            plain = jp.ForwardGradient(model.parameters(), samples=4, control=False, step=step)
            found = {"plain": estimated(plain, model, x, y), "controlled": estimated(estimate, model, x, y)}
            for name, value in found.items():
                cosines[name].append(F.cosine_similarity(value[: len(wanted)], wanted, dim=0))
        else:
            estimated(estimate, model, x, y)
        adam.step()
    plain, controlled = (float(torch.stack(values).mean()) for values in cosines.values())
    assert controlled > 0.75 and plain < 0.5


@pytest.mark.parametrize("samples", [1, 8])
def test_learning_is_stable_however_little_there_is_to_learn_from(samples: int) -> None:
    # thousands of numbers, and one or some products to learn them from: an error must not grow
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 3)).double()
    x, y = X[:2].double(), Y[:2]
    estimate = jp.ForwardGradient(model.parameters(), samples=samples)
    for _ in range(20):
        estimated(estimate, model, x, y)
    state = learned(estimate)
    exact = {"jacobian.1": model[2].weight.detach(), "jacobian.0": (model[2].weight @ model[1].weight).detach()}
    error = sum((state[key] - value).square().sum() for key, value in exact.items())
    assert error < sum(value.square().sum() for value in exact.values())


def test_what_is_not_predicted_is_measured_and_decides_how_long_noise_is() -> None:
    # the second site is followed by a linear layer, so it is predicted; the first by a curved function
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5), nn.Linear(5, 3))
    model.double()
    x, y = 3 * torch.randn(64, 4, dtype=torch.float64), torch.arange(64) % 3
    estimate = jp.ForwardGradient(model.parameters(), samples=8)
    for _ in range(400):
        estimated(estimate, model, x, y)
    state = learned(estimate)
    names = [key for key in state if key.startswith("unexplained")]
    hidden = [model[:2](x).detach().requires_grad_()]
    hidden += [model[2:4](hidden[0]).detach().requires_grad_()]
    errors = []
    for key, inner, rest in zip(names, hidden, (model[2:], model[4:]), strict=False):
        z = rest(inner)
        slope = (z.softmax(1) - F.one_hot(y, 3)).detach()
        (wanted,) = torch.autograd.grad(F.cross_entropy(rest(inner), y, reduction="sum"), inner)
        missing = wanted - slope @ state[key.replace("unexplained", "jacobian")]
        errors.append(float(missing.square().sum(1).mean()))
    assert float(state[names[0]]) == pytest.approx(errors[0], rel=0.3)
    assert errors[1] < 1e-3 * errors[0] and abs(float(state[names[1]])) < 0.02 * errors[0]
    found = balance.lengths(torch.stack([state[name] for name in names]))
    assert found[1] > 2 * found[0]


def test_activity_is_the_share_of_samples_with_a_derivative() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    alive = (model[0](X) > 0).float().mean(0)
    torch.testing.assert_close(learned(estimate)["activity.0"], alive)
    for _ in range(30):
        estimated(estimate, model, X, Y)
    torch.testing.assert_close(learned(estimate)["activity.0"], alive)
    dead = alive == 0
    assert torch.equal(learned(estimate)["jacobian.0"][:, dead], torch.zeros(3, int(dead.sum())))


def test_a_jacobian_is_used_before_it_learns() -> None:
    # the first call has learned nothing, so it is that without control; what it has learned serves the second
    model = mlp()
    found = [[], []]
    for results, on in zip(found, (True, False), strict=True):
        estimate = jp.ForwardGradient(model.parameters(), samples=2, control=on)
        results += [estimated(estimate, model, X, Y) for _ in range(2)]
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.allclose(found[0][1], found[1][1])


def test_numbers_that_are_not_finite_teach_nothing() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    before = learned(estimate)
    estimated(estimate, model, X * float("nan"), Y)
    after = learned(estimate)
    assert all(torch.equal(before[key], after[key]) for key in before if "jacobian" in key)
    assert estimated(estimate, model, X, Y).isfinite().all()


# -- chunks, batches, layouts -------------------------------------------------------------------------------------


def test_chunks_learn_the_same() -> None:
    model = mlp().double()
    x = X.double()
    results = []
    for options in ({}, {"chunk_size": 2}, {"chunk_size": 1}, {"memory": "8 KiB"}):
        estimate = jp.ForwardGradient(model.parameters(), samples=5, **options)
        grads = [estimated(estimate, model, x, Y) for _ in range(3)]
        results.append([*grads, *learned(estimate).values()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_batches_of_any_size_share_what_is_learned() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), samples=2)
    for count in (8, 5, 1):
        estimated(estimate, model, X[:count].unsqueeze(1), Y[:count])
    state = learned(estimate)
    assert state["calls"] == 3 and state["jacobian.0"].shape == (3, 6)


def test_grids_split_by_sample_and_token() -> None:
    for samples, tokens, shape in (
        (Layout(0, 1), None, (3, 4)),
        (Layout(1, 1), None, (2, 3, 5)),
        (Layout(0, 2), None, (12, 2)),
        (Layout(1, 2), None, (2, 6)),
        (Layout(0, 1), Layout(1, 1), (3, 2, 5)),
        (Layout(1, 1), Layout(0, 1), (2, 3, 5)),
        (Layout(0, 2), Layout(0, 1), (6, 4)),
        (Layout(0, 1), Layout(0, 3), (6, 4)),
        (Layout(0, 4), Layout(2, 2), (12, 2, 4)),
    ):
        count = 1 if tokens is None else 2
        grid, rows, numbers = Grid(samples, tokens), torch.randn(2, *shape), torch.randn(2, 3, count)
        parts = grid.split(rows, 3, count)
        assert parts.shape == (2, 3, count, rows[0].numel() // 3 // count)
        assert torch.equal(grid.join(parts[0], shape), rows[0])
        weighted = grid.split(grid.weighted(rows, numbers).unsqueeze(0), 3, count)[0]
        torch.testing.assert_close(weighted, (parts * numbers.unsqueeze(3)).sum(0))
        for sample, token in itertools.product(range(3), range(count)):
            own = samples.spread(F.one_hot(torch.tensor(sample), 3), shape).expand(shape).bool()
            if tokens is not None:
                own = own & tokens.spread(F.one_hot(torch.tensor(token), 2), shape).bool()
            assert torch.equal(parts[1, sample, token], rows[1][own])


def test_other_layouts_and_several_inputs_of_a_loss() -> None:
    # sequence first, and a loss of two layers' outputs; all linear, so that everything can be predicted
    first, second, third = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 3)
    model = nn.ModuleList([first, second, third]).double()
    x, y = torch.randn(5, 6, 3, dtype=torch.float64), torch.arange(6) % 3

    def losses(x: Tensor) -> Tensor:
        h = first(x)
        return second(h).square().sum((0, 2)) + F.cross_entropy(third(h.mean(0)), y, reduction="none")

    losses(x).mean().backward()
    wanted = gradient(model).clone()
    estimate = jp.ForwardGradient(model.parameters(), samples=32)
    for _ in range(60):
        model.zero_grad()
        estimate(losses, x)
    assert learned(estimate)["jacobian.0"].shape == (5 * 2 + 3, 5 * 4)
    torch.testing.assert_close(gradient(model), wanted, rtol=0, atol=1e-2 * float(wanted.norm()))


def test_tangents_are_not_counted_twice() -> None:
    # z enters the loss itself and, with something that is not exact, once more
    a, b, c = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleList([a, b, c])

    def losses(x: Tensor) -> Tensor:
        h = a(x)
        z = b(h)
        return z.square().sum(1) + (z * h).sum(1) + c(h.tanh()).sum(1)

    assert off(model, losses, X)


# -- state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
def test_training_goes_on_bit_by_bit(capturable: bool) -> None:
    def trained(model: nn.Module, adam: torch.optim.Adam, estimate: jp.ForwardGradient, steps: int) -> None:
        for _ in range(steps):
            estimated(estimate, model, X, Y)
            adam.step()

    def parts(model: nn.Module) -> tuple[torch.optim.Adam, jp.ForwardGradient]:
        return torch.optim.Adam(model.parameters(), 0.01), jp.ForwardGradient(
            model.parameters(), 2, capturable=capturable
        )

    whole, half = mlp(), mlp()
    half.load_state_dict(whole.state_dict())
    trained(whole, *parts(whole), 6)
    adam, estimate = parts(half)
    trained(half, adam, estimate, 3)
    file = io.BytesIO()
    torch.save([half.state_dict(), adam.state_dict(), estimate.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed = mlp()
    adam, estimate = parts(resumed)
    for one, state in zip((resumed, adam, estimate), states, strict=True):
        one.load_state_dict(state)
    kept = estimate.state_dict()["control"]  # also before the program was called
    assert all(torch.equal(kept[key], value) for key, value in states[2]["control"].items()) and len(kept) == 7
    trained(resumed, adam, estimate, 3)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_counting_on_the_device_changes_nothing() -> None:
    model = mlp()
    found = []
    for capturable in (False, True):
        estimate = jp.ForwardGradient(model.parameters(), samples=2, capturable=capturable)
        found.append([*(estimated(estimate, model, X, Y) for _ in range(3)), *learned(estimate).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_reset_forgets_in_place() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    first = estimated(estimate, model, X, Y)
    held = estimate._control._learned
    tensors = [tensor.data_ptr() for one in held.values() for tensor in one.tensors().values()]
    estimate.reset()
    estimate.step = 0
    assert torch.equal(estimated(estimate, model, X, Y), first)
    assert tensors == [tensor.data_ptr() for one in held.values() for tensor in one.tensors().values()]
    state = estimate.state_dict()
    estimated(estimate, model, X, Y)
    estimate.load_state_dict(state)  # at once, as a graph that was captured does not ask for it
    for key, tensor in state["control"].items():
        assert torch.equal(held[key.partition(".")[0]].tensors()[key.partition(".")[2]], tensor)
    estimated(estimate, model, X, Y)
    assert tensors == [tensor.data_ptr() for one in held.values() for tensor in one.tensors().values()]
    jp.ForwardGradient(model.parameters(), control=False).reset()
    estimate.load_state_dict({"seed": 0, "step": 0})  # of one without
    assert torch.equal(estimated(estimate, model, X, Y), first)


def test_a_site_that_was_not_learned_yet_is_no_error() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    state = estimate.state_dict()
    part = {key: value for key, value in state["control"].items() if not key.endswith(".0")}
    estimate.load_state_dict(state | {"control": part})
    found = learned(estimate)
    assert torch.equal(found["jacobian.0"], torch.zeros(3, 6)) and found["jacobian.1"].abs().sum() > 0


def test_a_bad_state_is_refused_as_long_as_it_is_there() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    good = estimate.state_dict()
    (name,) = {key.partition(".")[0] for key in good["control"]}

    def load(changes: dict[str, Any], without: str = "", seen: bool = False) -> None:
        fresh = jp.ForwardGradient(model.parameters())
        if seen:
            estimated(fresh, model, X, Y)
        merged = {**good["control"], **{f"{name}.{key}": value for key, value in changes.items()}}
        merged.pop(f"{name}.{without}", None)
        fresh.load_state_dict(good | {"control": merged})
        with contextlib.suppress(ValueError):
            estimated(fresh, model, X, Y)
        estimated(fresh, model, X, Y)

    load({})
    for message, changes, without in (
        (r"has values that are not finite in \w+\.jacobian\.0", {"jacobian.0": torch.full((3, 6), torch.nan)}, ""),
        (r"has list in \w+\.calls; expected a tensor of finite numbers", {"calls": [1]}, ""),
        (r"\w+\.jacobian\.0 of shape \(6, 3\); expected \(3, 6\)", {"jacobian.0": torch.zeros(6, 3)}, ""),
        (r"\w+\.jacobian\.7 of shape \(2,\); expected one of calls, jac", {"jacobian.7": torch.zeros(2)}, ""),
        (r"has no \w+\.activity\.1; expected all that was saved", {}, "activity.1"),
        (r"has no \w+\.calls; expected all", {}, "calls"),
    ):
        for seen in (False, True):
            with pytest.raises(ValueError, match=message):
                load(changes, without, seen)


# -- the function -------------------------------------------------------------------------------------------------


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
    count = len(forward._KEPT)
    jp.forward_gradient(classify(model), model.parameters(), X, Y)
    (key,) = [key for key in forward._KEPT if key[0] == id(model[0].weight)]
    (one,) = forward._KEPT[key].control._learned.values()
    jacobian = weakref.ref(one.jacobians[0])
    del one
    model[4].bias = None  # any of them
    gc.collect()
    assert key not in forward._KEPT and len(forward._KEPT) <= count and jacobian() is None


def test_programs_with_the_same_shapes_do_not_share() -> None:
    trunk, heads = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
    named = [*trunk.parameters(), *heads.parameters()]
    estimate = jp.ForwardGradient(named, allow_unused=True)
    for head in heads:
        estimate(lambda x, head=head: F.cross_entropy(head(trunk(x).relu()), Y, reduction="none"), X)
    assert sum(key.endswith("calls") for key in estimate.state_dict()["control"]) == 2


# -- where there is none ------------------------------------------------------------------------------------------


def test_none_is_wanted() -> None:
    model = mlp()
    assert off(model, classify(model), X, Y, control=False)
    assert off(model, classify(model), X, Y, estimator="weight")
    assert not off(model, classify(model), X, Y)


def test_coupled_samples_take_no_part() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), Centred(), nn.Tanh(), nn.Linear(5, 3))
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    coupled = {site.number for site in estimate.sites(classify(model), X, Y) if site.coupled}
    assert coupled == {0}
    assert {key for key in learned(estimate) if "jacobian" in key} == {"jacobian.1"}


def test_where_there_is_none_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "jetplane")
    wide = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1025))
    assert off(wide, classify(wide), X, Y)
    assert "No control variate at 1 of 1 places where noise enters: the losses depend on 1025 num" in caplog.text
    small = mlp()
    monkeypatch.setattr(control, "_LARGEST", 16)
    monkeypatch.setattr(control, "_SHARE", 0)
    estimate = jp.ForwardGradient(small.parameters())
    estimated(estimate, small, X, Y)
    assert "jacobian.1" in learned(estimate) and "jacobian.0" not in learned(estimate)
    assert "No control variate at 1 of 2 places where noise enters: their Jacobians are too large." in caplog.text
    monkeypatch.setattr(control, "_LARGEST", 1 << 20)
    monkeypatch.setattr(control, "_PROGRAMS", 0)
    assert off(small, classify(small), X, Y)
    assert "2 of 2 places where noise enters: 0 other programs have one." in caplog.text


def test_losses_of_unknown_derivative_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jetplane")
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def written(x: Tensor) -> Tensor:
        z = model(x)
        losses = x.new_zeros(len(x), 1)
        view = losses[:, 0]
        losses[:, 0] = z.square().sum(1)
        return view

    assert off(model, written, X)
    assert "the derivative of the losses by what enters them is not known" in caplog.text
    caplog.clear()
    assert off(model, lambda x: model(x[:3]).square().sum() + torch.zeros(8), X)
    assert "what enters the losses cannot be split by sample" in caplog.text
