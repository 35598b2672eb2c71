"""Where noise enters for a layer, and which layers share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from classifiers import X, classify


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
