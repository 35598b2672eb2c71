"""The kernels that scale and round to halves."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs_of(trial: int) -> list[Tensor | None]:
    """Rows of many sizes, some zero, some not finite, some too far apart."""
    made = torch.Generator().manual_seed(trial)

    def number(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=made)

    count, n, m = int(number(2, 7)), int(number(1, 9000)), int(number(1, 300))
    x = torch.randn(count, n, generator=made) * 2.0 ** number(-50, 50, count, 1)
    w = torch.randn(count, m, generator=made) * 2.0 ** number(-8, 8, count, 1) * x.abs().amax(1, keepdim=True)
    pairs = count * (count - 1) // 2
    second = torch.randn(pairs, n, generator=made) * 2.0 ** number(-50, 50, pairs, 1)
    if trial % 3 == 0:
        x[number(0, count)] = 0
    if trial % 5 == 0:
        w[number(0, count)] = 0
    if trial % 7 == 0:
        x[0, 0], w[-1, 0] = torch.inf, torch.nan
    if trial % 11 == 0:
        x[1] *= 2.0**40
    return [x, w, second if trial % 2 else None]


def assert_same(found: list[Tensor], inputs: list[Tensor | None]) -> None:
    for one, other in zip(found, torch.ops.jetplane.halves(*inputs), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


KERNEL = """
import sys
import torch
from jetplane.ad.kernels.halves_triton import scaled

torch.save([scaled(*inputs) for inputs in torch.load(sys.argv[1], weights_only=True)], sys.argv[2])
"""


# the first twelve have one of each kind of rows
@needs_triton
@pytest.mark.parametrize(
    "trials", [range(12), pytest.param(range(12, 36), marks=pytest.mark.slow)], ids=["first", "more"]
)
def test_the_kernels_under_the_interpreter(trials: range, tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    given_, found = tmp_path / "given.pt", tmp_path / "found.pt"
    inputs = [inputs_of(trial) for trial in trials]
    torch.save(inputs, given_)
    script = [sys.executable, "-c", KERNEL, str(given_), str(found)]
    ran = subprocess.run(script, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for one, made in zip(inputs, torch.load(found, weights_only=True), strict=True):
        assert_same(made, one)


@needs_triton
@pytest.mark.parametrize("name", ["_largest", "_scaled"])
def test_the_kernels_compile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # no device is needed to compile; the interpreter takes much that the compiler does not
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jetplane.ad.kernels import halves_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, fixed = getattr(halves_triton, name), {"ROWS": 11, "BLOCK": 2048, "TURNS": 4, "WIDE": 16}
    types = {"largest": "*i32", "back": "*fp32"} | dict.fromkeys(("x", "w", "second"), "*fp32")
    types |= {f"{part}_made": "*fp16" for part in ("x", "w", "second")}
    kinds = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kinds) if name in (*types, "x_size")}
    made = triton.compile(ASTSource(kernel, kinds, fixed, aligned), target=GPUTarget("cuda", 90, 32))
    assert "ld.global.v4.b32" in made.asm["ptx"]  # 16 bytes at a time


@needs_cuda
@needs_triton
@pytest.mark.parametrize("trial", range(12))
def test_the_kernels_on_a_gpu(trial: int) -> None:
    inputs = inputs_of(trial)
    parts = [None if part is None else part.cuda() for part in inputs]
    assert_same(torch.ops.jetplane.halves(*parts), inputs)
