"""torchvision's operations: beside torchvision where it is installed, and by closed forms where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetplane as jp
from jetplane.ad.rules.torchvision_operations import _deform_conv2d

_SCHEMAS = {
    "roi_align": "(Tensor x, Tensor rois, float s, SymInt h, SymInt w, int ratio, bool aligned) -> Tensor",
    "ps_roi_align": "(Tensor x, Tensor rois, float s, SymInt h, SymInt w, int ratio) -> (Tensor, Tensor)",
    "roi_pool": "(Tensor x, Tensor rois, float s, SymInt h, SymInt w) -> (Tensor, Tensor)",
}


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """The operations, or, where torchvision is not installed, ones of their names that pool whole boxes."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
            library.impl(name, globals()[f"_plain_{name}"], "CPU")
        yield torch.ops.torchvision
        library._destroy()
    else:
        yield torch.ops.torchvision


def _boxes(x: Tensor, rois: Tensor) -> list[Tensor]:
    """What lies in each box, (C, h, w)."""
    return [x[int(n), :, int(y0) : int(y1), int(x0) : int(x1)] for n, x0, y0, x1, y1 in rois.tolist()]


def _plain_roi_align(x: Tensor, rois: Tensor, s: float, h: int, w: int, ratio: int, aligned: bool) -> Tensor:
    return torch.stack([box.mean((1, 2), keepdim=True).expand(-1, h, w) for box in _boxes(x, rois)])


def _plain_ps_roi_align(x: Tensor, rois: Tensor, s: float, h: int, w: int, ratio: int) -> tuple[Tensor, Tensor]:
    y = torch.stack([box.mean((1, 2)).reshape(-1, h, w) for box in _boxes(x, rois)])
    return y, torch.zeros(y.shape, dtype=torch.int32)


def _plain_roi_pool(x: Tensor, rois: Tensor, s: float, h: int, w: int) -> tuple[Tensor, Tensor]:
    values, places = [], []
    for box, (_, x0, y0, x1, _) in zip(_boxes(x, rois), rois.tolist(), strict=True):
        value, place = box.flatten(1).max(1)
        width = int(x1) - int(x0)
        values.append(value[:, None, None].expand(-1, h, w))
        where = (int(y0) + place // width) * x.shape[3] + int(x0) + place % width
        places.append(where.int()[:, None, None].expand(-1, h, w))
    return torch.stack(values), torch.stack(places)


@pytest.mark.parametrize(("name", "options"), [("roi_align", (2, True)), ("ps_roi_align", (2,)), ("roi_pool", ())])
def test_pooling_of_regions_is_linear_in_the_features(ops: Any, name: str, options: tuple[Any, ...]) -> None:
    """Along directions V the pooled rows are the pooling of each: slope and curvature of a square, by hand."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    rows = torch.randn(3, *x.shape, dtype=torch.float64)
    rois = torch.tensor([[0.0, 1.0, 1.0, 4.0, 5.0], [1.0, 0.0, 2.0, 3.0, 6.0]], dtype=torch.float64)
    op = getattr(ops, name)

    def pool(x: Tensor) -> Tensor:
        out = op(x, rois, 1.0, 2, 2, *options)
        return out if isinstance(out, Tensor) else out[0]

    plane = jp.quadratic(lambda x: pool(x).square().sum() / 2, (x,), (rows,))
    step = 1e-7  # small enough that no maximum changes its place; exact for what is linear
    moved = torch.stack([(pool(x + step * row) - pool(x - step * row)) / (2 * step) for row in rows])
    torch.testing.assert_close(plane.slope, (moved * pool(x)).sum((1, 2, 3, 4)), rtol=1e-6, atol=1e-7)
    flat = moved.flatten(1)
    torch.testing.assert_close(plane.curvature, flat @ flat.T, rtol=1e-6, atol=1e-7)


def test_the_places_of_regions_are_constants(ops: Any) -> None:
    x, rois = torch.randn(1, 4, 6, 6), torch.tensor([[0.0, 1.0, 1.0, 4.0, 5.0]])
    with jp.perturb([rois], [torch.ones(1, 1, 5)], allow_unused=True) as jets:
        y = ops.roi_align(x, rois * 1.0, 1.0, 2, 2, 2, False)
    assert jets.of(y).tangent is None or not jets.of(y).tangent.any()


def _deformed(x: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, groups: int, offset_groups: int) -> Tensor:
    bias = torch.zeros(weight.shape[0], dtype=x.dtype)
    return _deform_conv2d(x, weight, offset, mask, bias, 1, 1, 1, 1, 1, 1, groups, offset_groups, True)


def test_offsets_of_zero_are_a_convolution() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randn(6, 2, 3, 3, dtype=torch.float64)
    offset, mask = torch.zeros(2, 36, 5, 6, dtype=torch.float64), torch.ones(2, 18, 5, 6, dtype=torch.float64)
    y = _deformed(x, weight, offset, mask, 2, 2)
    torch.testing.assert_close(y, F.conv2d(x, weight, padding=1, groups=2))


def test_offsets_are_bilinear_samples() -> None:
    """Beside grid_sample, for a kernel with one entry, and places outside of the image."""
    torch.manual_seed(1)
    x, offset = torch.randn(1, 3, 5, 6, dtype=torch.float64), 3 * torch.randn(1, 2, 5, 6, dtype=torch.float64)
    weight, mask = torch.eye(3, dtype=torch.float64)[:, :, None, None], torch.rand(1, 1, 5, 6, dtype=torch.float64)
    bias = torch.arange(3.0, dtype=torch.float64)
    y = _deform_conv2d(x, weight, offset, mask, bias, 1, 1, 0, 0, 1, 1, 1, 1, True)
    rows, columns = torch.meshgrid(torch.arange(5.0), torch.arange(6.0), indexing="ij")
    places = torch.stack([(columns + offset[0, 1]) / 2.5 - 1, (rows + offset[0, 0]) / 2 - 1], -1)
    sampled = F.grid_sample(x, places[None], align_corners=True)
    torch.testing.assert_close(y, sampled * mask + bias[:, None, None])


def test_deformable_convolution_beside_torchvision() -> None:
    vision = pytest.importorskip("torchvision")
    torch.manual_seed(2)
    x, weight = torch.randn(2, 4, 7, 6, dtype=torch.float64), torch.randn(6, 2, 3, 3, dtype=torch.float64)
    offset, mask = torch.randn(2, 36, 3, 3, dtype=torch.float64), torch.rand(2, 18, 3, 3, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    theirs = vision.ops.deform_conv2d(x, offset[..., :3, :3], weight, bias, (2, 2), (1, 1), (2, 2), mask)
    ours = _deform_conv2d(x, weight, offset, mask, bias, 2, 2, 1, 1, 2, 2, 2, 2, True)
    torch.testing.assert_close(ours, theirs)
