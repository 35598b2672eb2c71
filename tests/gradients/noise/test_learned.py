"""What was learned of a program: saved, loaded, checked, and forgotten in place."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn

import jetplane as jp
from classifiers import X, Y, estimated, learned, mlp


def test_batches_of_any_size_share_what_is_learned() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    estimate = jp.ForwardGradient(model.parameters(), samples=2)
    for count in (8, 5, 1):
        estimated(estimate, model, X[:count].unsqueeze(1), Y[:count])
    state = learned(estimate)
    assert state["calls"] == 3 and state["jacobian.0"].shape == (3, 6)


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
    assert all(torch.equal(kept[key], value) for key, value in states[2]["control"].items()) and len(kept) == 9
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
    held = estimate._known.control._learned
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


def test_a_state_from_before_noise_was_measured_by_the_whole_derivative_is_taken() -> None:
    model = mlp()
    estimate = jp.ForwardGradient(model.parameters())
    estimated(estimate, model, X, Y)
    state = estimate.state_dict()
    earlier = {key: value for key, value in state["control"].items() if ".explained." not in key}
    assert len(earlier) < len(state["control"])
    resumed = jp.ForwardGradient(model.parameters())
    estimated(resumed, model, X, Y)
    resumed.load_state_dict(state | {"control": earlier})
    found = learned(resumed)
    assert torch.equal(
        found["unexplained.0"], state["control"][next(k for k in earlier if k.endswith("unexplained.0"))]
    )
    assert float(found["explained.0"]) == 0.0


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
