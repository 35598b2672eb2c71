"""The kernels of a convolution, ReLU and max-pooling in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pooled_layers import needs_cuda, needs_triton

# rows, images, height, width, channels, outputs, window, stride, dilation, bias, rows of x, dtype
CASES: list[tuple[Any, ...]] = [
    (4, 2, 12, 12, 1, 20, (5, 5), (1, 1), (1, 1), True, 1, "float32"),  # the paper's first convolution, in small
    (3, 1, 12, 12, 20, 50, (5, 5), (1, 1), (1, 1), True, 3, "float32"),  # and the second
    (2, 3, 9, 8, 3, 5, (3, 2), (2, 1), (1, 2), False, 2, "float64"),
    (1, 2, 7, 9, 4, 70, (2, 2), (1, 1), (1, 1), True, 1, "float64"),  # two blocks of channels, the value alone
    (3, 2, 8, 7, 5, 3, (3, 3), (1, 2), (2, 1), True, 1, "float32"),
]


KERNEL = """
import sys
import torch
from jetplane.ad.kernels.convolution_triton import Tile, convolve
from jetplane.ad.rules.pooled import _pooled_shape
from jetplane.ad.kernels.pooled_triton import pooled_rows

found = []
for x, w, bias, stride, dilation in torch.load(sys.argv[1], weights_only=True):
    shape = _pooled_shape(x[0], w[0], stride, dilation)
    one = list(pooled_rows(x, w, bias, stride, dilation, shape, False))
    if x.shape[0] == w.shape[0] > 1:
        tiles = lambda pattern: Tile(positions=32, depth=64)
        one.append(convolve(x, w, None, None, bias, stride, dilation, shape, one[2], tiles=tiles))
    found.append(one)
torch.save(found, sys.argv[2])
"""


def inputs_of(case: tuple[Any, ...]) -> list[Any]:
    rows, n, height, width, channels, outputs, window, stride, dilation, bias, rows_of_x, kind = case
    torch.manual_seed(0)
    parts = [
        torch.randn(rows_of_x, n, height, width, channels),
        torch.randn(rows, outputs, *window, channels) / 4,
        torch.randn(rows, outputs) if bias else None,
    ]
    return [None if part is None else part.to(getattr(torch, kind)) for part in parts] + [list(stride), list(dilation)]


def expected_of(inputs: list[Any]) -> list[Tensor]:
    """The operations' own arithmetic on a CPU, in float64."""
    x, w, bias, stride, dilation = inputs
    factors = [None if part is None else part.double() for part in (x, w, bias)]
    found = list(torch.ops.jetplane.convolution_pooled_rows(*factors, stride, dilation, False))
    if x.shape[0] == w.shape[0] > 1:
        x, w, bias = factors
        found.append(torch.ops.jetplane.convolution_pooled_jet(x, w, None, None, bias, found[2], stride, dilation))
    return found


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float, case: Any) -> None:
    assert len(found) == len(expected)
    assert torch.equal(found[2].cpu(), expected[2]), case
    for one, other in zip(found, expected, strict=True):
        gap = (one.cpu().double() - other.double()).abs().max()
        assert gap <= tolerance * other.double().abs().max(), case


@needs_triton
def test_the_kernels_under_the_interpreter(tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    given, found = tmp_path / "given.pt", tmp_path / "found.pt"
    inputs = [inputs_of(case) for case in CASES]
    torch.save(inputs, given)
    script = [sys.executable, "-c", KERNEL, str(given), str(found)]
    ran = subprocess.run(script, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for case, one, outputs in zip(CASES, inputs, torch.load(found, weights_only=True), strict=True):
        assert_close(outputs, expected_of(one), 1e-13 if case[-1] == "float64" else 1e-6, case)


@needs_triton
@pytest.mark.parametrize(
    ("rows", "rows_of_x", "size", "channels", "shape"),
    [(4, 1, (28, 28, 1), 20, (2048, 12, 12, 20)), (1, 1, (12, 12, 20), 50, (2048, 4, 4, 50)),
     (4, 4, (12, 12, 20), 50, (2048, 4, 4, 50))],
)  # fmt: skip
def test_it_compiles_to_matrix_instructions_of_warp_groups(
    rows: int, rows_of_x: int, size: Any, channels: int, shape: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no device is needed to compile; the interpreter takes much that the compiler does not
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jetplane.ad.kernels import pooled_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, tile = pooled_triton._pooled, pooled_triton.Tile()
    x = torch.empty(rows_of_x, 2048, *size, device="meta")
    w = torch.empty(rows, channels, 5, 5, size[-1], device="meta")
    fixed = pooled_triton.constants(x, w, w[:, :, 0, 0, 0], [1, 1], [1, 1], shape, True, tile)
    kinds = {name: "*u8" if n == 5 else "*fp32" if n < 6 else "i32" for n, name in enumerate(kernel.arg_names[:10])}
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(6)}
    source = ASTSource(kernel, kinds | dict.fromkeys(fixed, "constexpr"), fixed, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert "mma.sync" not in made.asm["ptx"]
    assert "shfl.sync.bfly" not in made.asm["ptx"]  # the four positions of a window are one thread's


@needs_cuda
@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_on_a_gpu(case: tuple[Any, ...]) -> None:
    inputs = inputs_of(case)
    x, w, bias, *layout = (part.cuda() if isinstance(part, Tensor) else part for part in inputs)
    found = list(torch.ops.jetplane.convolution_pooled_rows(x, w, bias, *layout, False))
    if x.shape[0] == w.shape[0] > 1:
        found.append(torch.ops.jetplane.convolution_pooled_jet(x, w, None, None, bias, found[2], *layout))
    assert_close(found, expected_of(inputs), 1e-12 if case[-1] == "float64" else 1e-5, case)
