"""Batches in a few shapes: what is measured is that of the batch as it was, and few shapes are compiled."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from compilation import Captures, assert_close
from jetplane.optim import FoMoHKD, HorizonAdam

F64 = torch.float64
FILL = {"tokens": 0, "mask": False, "labels": -100}
Batch = dict[str, Tensor]


class Reader(nn.Module):
    """One attention layer over the tokens that the mask leaves, a class for each text and one for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(11, 8), nn.Embedding(32, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.attended, self.mixed = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)  # a bias of keys does nothing
        self.head, self.each = nn.Linear(8, 3), nn.Linear(8, 5)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(tokens) + self.positions.weight[: tokens.shape[1]]
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.attended(self.norms[0](x)).chunk(3, 2))
        x = x + F.scaled_dot_product_attention(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(2)
        x = x + self.mixed(torch.tanh(self.norms[1](x)))
        pooled = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(pooled), self.each(x)


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader().double()


def losses(model: nn.Module, batch: Batch) -> Tensor:
    found, each = model(batch["tokens"], batch["mask"])
    by_token = F.cross_entropy(each.mT, batch["labels"], reduction="none").sum(1) / batch["mask"].sum(1)
    return F.cross_entropy(found, batch["kind"], reduction="none") + by_token


def texts(count: int, length: int, seed: int = 0) -> Batch:
    made = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (count,), generator=made)
    lengths[0] = length
    mask = torch.arange(length) < lengths[:, None]
    tokens = torch.randint(1, 11, (count, length), generator=made) * mask
    labels = torch.randint(5, (count, length), generator=made).masked_fill(~mask, -100)
    return {"tokens": tokens, "mask": mask, "labels": labels, "kind": tokens[:, 0] % 3}


def buckets(samples: int = 6) -> jp.Buckets:
    return jp.Buckets(samples=samples, lengths=(8, 16), fill=FILL)


@pytest.fixture
def double() -> Iterator[None]:
    """The weights of batches without numbers of floating point."""
    torch.set_default_dtype(F64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("count", "length"), [(6, 8), (6, 5), (4, 16), (1, 9)])
@pytest.mark.usefixtures("double")
def test_the_mean_and_its_gradient_are_those_of_the_batch(count: int, length: int) -> None:
    model, batch = reader(), texts(count, length)
    padded, weight = buckets()(batch)
    assert padded["tokens"].shape == (6, 8 if length <= 8 else 16) and weight.shape == (6,)
    found, wanted = (weight * losses(model, padded)).mean(), losses(model, batch).mean()
    assert_close(found, wanted)
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("curvature", ["exact", "ggn"])
@pytest.mark.usefixtures("double")
def test_slopes_and_curvatures_are_those_of_the_batch(curvature: str) -> None:
    model, batch = reader(), texts(4, 11)
    padded, weight = buckets()(batch)
    named = dict(model.named_parameters())
    made = torch.Generator().manual_seed(3)
    directions = {name: torch.randn(2, *p.shape, generator=made) for name, p in named.items()}

    def plane(batch: Batch, weight: Tensor) -> jp.Quadratic:
        def loss(params: dict[str, Tensor]) -> Tensor:
            found, each = torch.func.functional_call(model, params, (batch["tokens"], batch["mask"]))
            del each
            return (weight * F.cross_entropy(found, batch["kind"], reduction="none")).mean()

        return jp.quadratic(loss, named, directions, curvature=curvature)

    found, wanted = plane(padded, weight), plane(batch, torch.ones(4))
    for part in ("loss", "slope", "curvature"):
        assert_close(getattr(found, part), getattr(wanted, part))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "HorizonAdam": lambda model, **more: HorizonAdam(model.parameters(), samples=2, rotate=False, **more),
    "FoMoHKD": lambda model, **more: FoMoHKD(model.parameters(), lr=0.1, k=2, **more),
}


def stepped(opt: Any, model: nn.Module, shaped: Callable[[Batch], tuple[Batch, Tensor]], lengths: list[int]) -> None:
    each = isinstance(opt, HorizonAdam)
    for number, length in enumerate(lengths):
        last = number + 1 == len(lengths)
        batch, weight = shaped(texts(4 if last else 6, length, number))
        opt.step(
            lambda b, w: w * losses(model, b) if each else (w * losses(model, b)).mean(),
            batch,
            weight,
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("double", "traced", "nothing_shared")
def test_many_lengths_and_a_last_batch_that_is_smaller_are_a_graph_for_each_bucket(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    captures, lengths = Captures(caplog), [3, 9, 4, 10, 5, 11, 8, 14]
    model = reader()
    twin = copy.deepcopy(model)
    fast, slow = OPTIMIZERS[name](model, compile=True), OPTIMIZERS[name](twin)
    stepped(fast, model, buckets(), lengths)
    assert captures.count == 2
    stepped(slow, twin, buckets(), lengths)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(one, other)


@pytest.mark.usefixtures("double", "traced")
def test_a_forward_gradient_of_many_lengths_too(caplog: pytest.LogCaptureFixture) -> None:
    captures, model = Captures(caplog), reader()
    twin = copy.deepcopy(model)
    fast, slow = jp.ForwardGradient(model.parameters(), 2, compile=True), jp.ForwardGradient(twin.parameters(), 2)
    for length in (3, 9, 5, 12, 8):
        batch, weight = buckets()(texts(5, length, length))
        fast(lambda b, w: w * losses(model, b), batch, weight)
        slow(lambda b, w: w * losses(twin, b), batch, weight)
    assert captures.count == 2
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(one.grad, other.grad)


def test_a_batch_keeps_its_kind() -> None:
    x, y = torch.ones(3, 5), torch.arange(3)
    (long, same), weight = jp.Buckets(lengths=4, fill=(0.5, None))((x, y))
    assert long.shape == (3, 8) and (long[:, 5:] == 0.5).all() and same is y and weight.tolist() == [1, 1, 1]
    (more,), weight = jp.Buckets(samples=5)([x.double()])
    assert more.shape == (5, 5) and weight.dtype == F64 and weight.tolist() == [5 / 3] * 3 + [0, 0]
    alone, weight = jp.Buckets(samples=7, lengths=(6,), fill=2.0, axis=1)(x)
    assert alone.shape == (7, 6) and (alone[:, 5] == 2).all() and weight.shape == (7,)
    assert torch.equal(jp.Buckets(samples=7)(y)[0], torch.tensor([0, 1, 2, 0, 1, 2, 0]))


def test_a_batch_that_has_its_shape_is_left_alone() -> None:
    batch = {"x": torch.ones(4, 8)}
    padded, weight = jp.Buckets(samples=4, lengths=(8,), fill={"x": 0.0})(batch)
    assert padded["x"] is batch["x"] and torch.equal(weight, torch.ones(4))


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"samples": 0}, None, "samples is 0; expected a positive whole number, or None."),
        ({"lengths": True, "fill": 0}, None, "lengths is True; expected a positive whole number, or None."),
        ({"lengths": (8, 4), "fill": 0}, None, "lengths is (8, 4); expected positive whole numbers that rise."),
        ({"lengths": 8}, None, "lengths is 8 and fill None; expected both, what is to be filled up and with what"),
        ({"axis": 0}, None, "axis is 0; expected 1 or more, for the samples are along axis 0."),
        ({"samples": 2}, torch.ones(3), "the batch has 3 samples; expected at most 2, as samples says."),
        ({}, {"x": "word"}, "the batch is ['str']; expected tensors with their samples along the first axis."),
        ({}, (torch.ones(2), torch.ones(3)), "the batch is [(2,), (3,)]; expected tensors with their samples"),
        ({}, torch.ones(0, 2), "the batch is [(0, 2)]; expected tensors with their samples"),
        ({"lengths": 8, "fill": {"z": 0}}, {"x": torch.ones(2)}, "fill has ['z'] and the batch ['x']; expected parts"),
        ({"lengths": 8, "fill": {0: 0}}, torch.ones(2, 2), "fill has [0] and the batch [0]; expected parts"),
        ({"lengths": 8, "fill": 0}, torch.ones(2), "a tensor of shape (2,) is to be filled up along axis 1; expected"),
        ({"lengths": (4,), "fill": 0}, torch.ones(2, 5), "a length is 5 and the largest bucket 4; expected no longer"),
        (
            {"lengths": 4, "fill": (0, 0)},
            (torch.ones(2, 5), torch.ones(2, 6)),
            "the lengths in one batch are [5, 6]; expected one, along axis 1.",
        ),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        jp.Buckets(**options)(batch)
