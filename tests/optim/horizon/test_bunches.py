"""Arithmetic on several parameters at once: that of each alone, and left alone where a step is not taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from jetplane.optim import HorizonAdam
from jetplane.optim.horizon import bunches

SHAPES = (3, 4), (4,), (0,), (2, 3, 1)


def many(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in SHAPES]


def test_a_bunch_is_of_one_kind_and_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = [*many(), *many(torch.float64), torch.zeros(2)]
    kinds = "aabaaaaaa"
    assert bunches.bunches(leaves, kinds, [1] * 9) == [[0, 1, 3, 8], [2], [4, 5, 6, 7]]
    monkeypatch.setattr(bunches, "AT_ONCE", 4)
    assert bunches.bunches(leaves, kinds, [3, 1, 9, 9, 2, 2, 1, 1, 1]) == [[0, 1], [2], [3], [4, 5], [6, 7], [8]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_at_once_is_each_alone(dtype: torch.dtype) -> None:
    ones, others, number = many(dtype), many(dtype), torch.tensor(0.3, dtype=dtype)
    each = list(number * torch.arange(1, 5))
    for found, wanted in (
        (bunches.times(ones, number), [one * number for one in ones]),
        (bunches.times(ones, each), [one * by for one, by in zip(ones, each, strict=True)]),
        (bunches.divided(ones, number), [one / number for one in ones]),
        (bunches.scaled([one.clone() for one in ones], number), [one * number for one in ones]),
        (bunches.lerped(ones, others, 0.1), [torch.lerp(a, b, 0.1) for a, b in zip(ones, others, strict=True)]),
        (bunches.lerped(ones, others, number), [torch.lerp(a, b, number) for a, b in zip(ones, others, strict=True)]),
        (bunches.followed(ones, others, number), [(b - a) * number + a for a, b in zip(ones, others, strict=True)]),
        (bunches.sizes([one.abs() for one in ones], number), [one.abs().sqrt() / number for one in ones]),
        (bunches.against([one.clone() for one in ones], others), [-a / b for a, b in zip(ones, others, strict=True)]),
        (bunches.plus([one.clone() for one in ones], 1e-8), [one + 1e-8 for one in ones]),
        (bunches.plus([one.clone() for one in ones], others), [a + b for a, b in zip(ones, others, strict=True)]),
    ):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(2))
def test_one_entry_that_is_not_finite_is_found(bad: float, place: int) -> None:
    tensors = [torch.randn(100), torch.randn(7, 9), torch.randn(5, dtype=torch.float64), torch.zeros(0)]
    for some in (tensors[:2], tensors):
        assert bunches.all_finite(some)
        tensors[place].view(-1)[3] = bad
        assert bunches.finite(some[:2]).tolist() == [place != 0, place != 1] and not bunches.all_finite(some)
        tensors[place].view(-1)[3] = 0.0
    assert bunches.all_finite([torch.full((9,), 6e4, dtype=torch.float16)])


def test_what_is_not_taken_stays_whatever_is_offered() -> None:
    places, new = many(), [torch.full(shape, torch.nan) for shape in SHAPES]
    before = [place.clone() for place in places]
    bunches.keep(torch.tensor(False), new, places)
    assert all(map(torch.equal, places, before))
    bunches.keep(torch.tensor(True), before, places)
    assert all(map(torch.equal, places, before))


class Count(TorchDispatchMode):
    """Operations of an update."""

    count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **kwargs or {})  # type: ignore[operator]


def step(sizes: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    x, y = torch.randn(16, 8), torch.arange(16) % 3
    with monkeypatch.context() as patched:
        if sizes is not None:
            patched.setattr(bunches, "AT_ONCE", sizes)
        opt = HorizonAdam(model.parameters(), samples=2)
        for _ in range(9):
            opt.step(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        with Count() as counted:
            opt.step(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
    return model, counted.count


def test_steps_of_bunches_are_those_of_single_parameters_in_fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    (many_at_once, few), (one_by_one, more) = step(None, monkeypatch), step(0, monkeypatch)
    for one, other in zip(many_at_once.parameters(), one_by_one.parameters(), strict=True):
        assert torch.equal(one, other)
    assert more - few > 10 * len(list(one_by_one.parameters()))
