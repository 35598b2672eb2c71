"""The kernel of the convolution of jets: what it computes, and what it is compiled to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_convolution_kernel import needs_cuda, needs_triton
from torch import Tensor

from jetplane.ad.kernels.halves import halves

# rows, images, height, width, channels, outputs, kernel, stride, dilation, bias, second rows, dtype
PAPERS = (4, 1, 12, 12, 20, 50, (5, 5), (1, 1), (1, 1), True, False, "float32")  # the paper's second convolution


CASES = [
    (2, 3, 7, 6, 4, 5, (3, 2), (1, 1), (1, 1), True, False, "float32"),
    (3, 2, 5, 6, 3, 70, (2, 2), (1, 1), (1, 1), True, True, "float64"),  # two blocks of channels
    (4, 2, 9, 10, 4, 6, (3, 3), (2, 1), (1, 2), False, True, "float32"),
    PAPERS,
    (5, 2, 6, 5, 2, 3, (2, 3), (1, 1), (2, 1), True, True, "float64"),
    (6, 2, 5, 4, 1, 17, (2, 3), (1, 2), (1, 1), True, False, "float32"),
    (4, 2, 5, 5, 8, 9, (3, 3), (1, 1), (1, 1), True, True, "float16"),
]


KERNEL = """
import sys
import torch
from jetplane.ad.kernels.convolution_kernel import _shape
from jetplane.ad.kernels.convolution_triton import Tile, convolve

found = []
for number, inputs in enumerate(torch.load(sys.argv[1], weights_only=True)):
    x, w, second, scale, bias, stride, dilation = inputs
    tiles = lambda pattern: Tile(positions=32, depth=64, near=bool(number % 2))
    found.append(convolve(*inputs, _shape(x, w, stride, dilation), tiles=tiles))
torch.save(found, sys.argv[2])
"""


def inputs_of(case: tuple[Any, ...]) -> list[Any]:
    rows, n, height, width, channels, outputs, window, stride, dilation, bias, second, kind = case
    dtype = getattr(torch, kind)
    x, w = torch.randn(rows, n, height, width, channels), torch.randn(rows, outputs, *window, channels) / 4
    more = torch.randn(rows * (rows - 1) // 2, n, height, width, channels) if second else None
    parts = (x, w, more, None, torch.randn(rows, outputs) if bias else None)
    return [None if part is None else part.to(dtype) for part in parts] + [list(stride), list(dilation)]


def expected_of(inputs: list[Any]) -> Tensor:
    """The operation's own arithmetic in float64."""
    parts = [part.double() if isinstance(part, Tensor) else part for part in inputs]
    return torch.ops.jetplane.convolution_jet(*parts)


def as_halves(inputs: list[Any]) -> list[Any]:
    """The same in float16, directions 1e6 times as large as values."""
    x, w, second, _, *rest = inputs
    for part in (x, w):
        part[1:] *= 1e6
    return [*halves(x, w, second), *rest]


@needs_triton
@pytest.mark.parametrize("papers", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["small", "papers"])
def test_the_kernel_equals_plain_convolutions(papers: bool, tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    given, found = tmp_path / "given.pt", tmp_path / "found.pt"
    cases = [case for case in CASES if (case == PAPERS) == papers]
    inputs = [inputs_of(case) for case in cases]
    inputs += [as_halves(inputs_of(case)) for case in cases if case[-1] == "float32"]
    torch.save(inputs, given)
    script = [sys.executable, "-c", KERNEL, str(given), str(found)]
    ran = subprocess.run(script, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    close = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3}
    for one, made in zip(inputs, torch.load(found, weights_only=True), strict=True):
        x, scale = one[0], one[3]
        assert made.dtype == (x.dtype if scale is None else scale.dtype)
        expected = expected_of(one)
        size = expected.flatten(1).abs().amax(1).reshape(-1, 1, 1, 1, 1)
        assert ((made - expected).abs() <= close[made.dtype] * size).all(), (one[0].shape, one[0].dtype)


@needs_triton
@pytest.mark.parametrize("rows", [4, 5])
def test_it_compiles_to_matrix_instructions_of_warp_groups(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no device is needed to compile; the interpreter takes much that the compiler does not
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jetplane.ad.kernels import convolution_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = convolution_triton._sums
    x = torch.empty(rows, 2048, 12, 12, 20, device="meta", dtype=torch.float16)
    w = torch.empty(rows, 50, 5, 5, 20, device="meta", dtype=torch.float16)
    for pattern, groups in convolution_triton.plan(rows).items():
        tile = convolution_triton.tile_of(pattern)
        shape, bias = (2048, 8, 8, 50), torch.empty(rows, 50, device="meta")
        layout = ([1, 1], [1, 1], shape, pattern, groups, tile, False, True)
        fixed = convolution_triton.constants(x, w, None, bias, *layout)
        kinds = {name: "i32" for name in kernel.arg_names[:12]} | dict.fromkeys(("x", "w", "second"), "*fp16")
        kinds |= dict.fromkeys(("scale", "bias", "codes", "out"), "*fp32")
        steps = {"x_step": x[0].numel(), "w_step": w[0].numel(), "out_step": 2048 * 8 * 8 * 50 * fixed["UNIT"]}
        whole = {name for name, step in steps.items() if step // fixed["UNIT"] % 16 == 0}
        aligned = {
            (n,): [["tt.divisibility", 16]]
            for n, (name, kind) in enumerate(kinds.items())
            if kind.startswith("*") or name in whole
        }
        source = ASTSource(kernel, kinds | dict.fromkeys(fixed, "constexpr"), fixed, aligned)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        count = sum(len(phase) for phase in pattern.phases)
        assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16") == count * fixed["DEPTH"] // 16
        assert "mma.sync" not in ptx
        assert "cp.async.ca.shared.global" in ptx  # x through the L1 cache
        assert made.metadata.shared <= 145 * 1024  # 110 KiB of 256 are left to the L1 cache


@needs_cuda
@needs_triton
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_on_a_gpu(case: tuple[Any, ...], scaled: bool) -> None:
    inputs = inputs_of(case)
    if scaled:
        inputs = as_halves([part.float() if isinstance(part, Tensor) else part for part in inputs])
    parts = [part.cuda() if isinstance(part, Tensor) else part for part in inputs]
    expected = expected_of(inputs)
    out = torch.ops.jetplane.convolution_jet(*parts).cpu()
    close = 1e-5 if scaled else {"float64": 1e-12, "float32": 1e-5, "float16": 3e-3}[case[-1]]
    size = expected.flatten(1).abs().amax(1).reshape(-1, 1, 1, 1, 1)
    assert ((out - expected).abs() <= close * size).all()
