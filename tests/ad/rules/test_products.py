"""Products of several pairs at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from compilation import F64, assert_close
from jetplane.ad.rules.products import Convolution, MatMul

LAYOUTS = [  # stride, padding, dilation, groups, channels, size of the kernel
    ([1, 1], [0, 0], [1, 1], 1, 1, (5, 5)),
    ([2, 1], [0, 0], [1, 1], 1, 2, (3, 2)),
    ([2, 2], [1, 2], [1, 1], 1, 2, (3, 3)),
    ([1, 1], [0, 0], [2, 1], 1, 2, (3, 3)),
    ([1, 2], [1, 1], [1, 1], 2, 4, (3, 3)),
]


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups", "channels", "size"), LAYOUTS)
def test_a_joint_convolution_is_one_of_each_pair(
    monkeypatch: pytest.MonkeyPatch,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    channels: int,
    size: tuple[int, int],
) -> None:
    lifted = Convolution(stride, padding, dilation, False, [0, 0], groups)
    x, w = torch.randn(3, 2, channels, 9, 8, dtype=F64), torch.randn(2, 6, channels // groups, *size, dtype=F64)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    expected = torch.stack([torch.stack([F.conv2d(one, other, **options) for other in w]) for one in x])
    assert_close(lifted.joint(x, w), expected)
    last = torch.channels_last
    wide = lifted(x.flatten(0, 1).contiguous(memory_format=last), lifted._wide(w).contiguous(memory_format=last))
    assert_close(wide, lifted(x.flatten(0, 1), lifted._wide(w)))
    if groups == 1 and not any(padding) and set(dilation) == {1}:
        monkeypatch.setattr(Convolution, "_laid_out", Convolution._as_matrices)
        assert_close(lifted.joint(x, w), expected)


def test_a_joint_product_of_matrices_is_one_of_each_pair() -> None:
    for shapes in (((3, 4, 5), (2, 5, 6)), ((3, 7, 4, 5), (2, 7, 5, 6))):
        a, b = (torch.randn(shape, dtype=F64) for shape in shapes)
        expected = torch.stack([torch.stack([one @ other for other in b]) for one in a])
        assert_close(MatMul().joint(a, b), expected)
