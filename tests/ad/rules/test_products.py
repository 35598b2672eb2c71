"""Products of several pairs at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import jetplane as jp
from compilation import F64, assert_close
from jetplane.ad.rules.products import Convolution, MatMul
from jetplane.testing.oracle import double_backward

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


GROUPS = torch.tensor([3, 3, 8], dtype=torch.int32)  # where they end; the second one is empty


@pytest.mark.parametrize("k", [1, 3])
def test_a_grouped_product_is_a_product_for_each_group(k: int) -> None:
    # torch has it in float32 and bfloat16
    def grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(a.sin().float(), b.float(), offs=GROUPS).double().square().sum()

    def looped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = zip(a.sin().tensor_split(GROUPS[:-1].long()), b, strict=True)
        return torch.cat([part @ one for part, one in parts]).square().sum()

    torch.manual_seed(k)
    a, b = torch.randn(8, 16, dtype=F64), torch.randn(3, 16, 8, dtype=F64)
    v = torch.randn(k, 8, 16, dtype=F64), torch.randn(k, 3, 16, 8, dtype=F64)
    leaves = [a.requires_grad_(), b.requires_grad_()]
    expected = double_backward(lambda: looped(*leaves), leaves, v)
    found = jp.quadratic(grouped, (a.detach(), b.detach()), v)
    scale = expected.curvature.abs().amax()
    assert_close(found.slope / scale, expected.slope / scale, tolerance=1e-6)
    assert_close(found.curvature / scale, expected.curvature / scale, tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ["csr", "csc", "coo", "bsr"])
def test_products_with_sparse_matrices(name: str) -> None:
    torch.manual_seed(0)
    dense = torch.randn(6, 4, dtype=F64).relu()
    make = {"csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc, "coo": dense.to_sparse}
    matrix = make[name]() if name in make else dense.to_sparse_bsr((2, 2))
    x, v = torch.randn(4, 3, dtype=F64), torch.randn(3, 4, 3, dtype=F64)
    leaf = x.clone().requires_grad_()
    for product in (lambda m, y: m @ y, lambda m, y: torch.addmm(dense[:, :3], m, y, beta=0.5, alpha=2)):
        expected = double_backward(lambda f=product: f(dense, leaf.sin()).pow(3).sum(), [leaf], [v])
        found = jp.quadratic(lambda x, f=product: f(matrix, x.sin()).pow(3).sum(), x, v)
        assert_close(found.slope, expected.slope)
        assert_close(found.curvature, expected.curvature)
    if name == "coo":
        found = jp.quadratic(lambda x: torch.sparse.mm(matrix, x).pow(3).sum(), x, v)
        expected = double_backward(lambda: (dense @ leaf).pow(3).sum(), [leaf], [v])
        assert_close(found.curvature, expected.curvature)
