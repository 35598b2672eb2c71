"""Rows of a jet as float16 with scales: the bits of TF32, over the range that float32 has."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetplane.ad.jet import PairSet
from jetplane.ad.rules.convolution_kernel import rounded
from jetplane.ad.rules.halves import SPREAD, halves

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
T, N, LENGTH, OUTPUTS = 4, 5, 30, 6


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scaled_back(part: Tensor, back: Tensor) -> Tensor:
    return part.double() * back.double().reshape(-1, *[1] * (part.ndim - 1))


def jet(x: Tensor, w: Tensor, second: Tensor | None) -> Tensor:
    """Rows (i, j) of a product's jet in float64."""
    x, w = x.double(), w.double()
    out = []
    for number, (i, j) in enumerate(PairSet.all(T).pairs):
        row = x[i] @ w[j].T + (x[j] @ w[i].T if j else 0)
        out.append(row + (second[number - T].double() @ w[0].T if second is not None and i else 0))
    return torch.stack(out)


def times(row: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The smaller one first: the product with the larger may be out of range."""
    return row * torch.minimum(one, other) * torch.maximum(one, other)


def jet_of_halves(x: Tensor, w: Tensor, second: Tensor | None) -> Tensor:
    """The same as the kernel makes it: sums of float16's products in float32, scaled afterwards."""
    left, right, pairs, back = halves(x, w, second)
    assert left.dtype == right.dtype == torch.float16
    assert back.dtype == torch.float32
    left, right = left.float(), right.float()
    out = []
    for number, (i, j) in enumerate(PairSet.all(T).pairs):
        row = left[i] @ right[j].T + (left[j] @ right[i].T if j else 0)
        row = times(row, back[i], back[T + j])
        if pairs is not None and i:
            scales = back[2 * T + number - T], back[T]
            row = times(row, *(1 / scale for scale in scales)) + pairs[number - T].float() @ right[0].T
            row = times(row, *scales)
        out.append(row)
    return torch.stack(out)


def bound(x: Tensor, w: Tensor, second: Tensor | None) -> Tensor:
    """What rounding both factors to 11 bits may do to each entry, and sums in float32 add."""
    return 2.1 * 2.0**-11 * jet(x.abs(), w.abs(), None if second is None else second.abs())


exponents = st.lists(st.integers(-60, 60), min_size=T, max_size=T)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**20), exponents, st.integers(-40, 40), st.booleans())
def test_directions_of_any_length_lose_no_more_than_tf32_does(
    seed: int, lengths: list[int], ratio: int, more: bool
) -> None:
    lengths[0] = min(max(lengths[0], -20), 20)
    length = torch.tensor([2.0**n for n in lengths]).reshape(T, 1, 1)
    x, w = rows(seed, T, N, LENGTH) * length, rows(seed + 1, T, OUTPUTS, LENGTH) * length * 2.0**ratio / 4
    i, j = torch.triu_indices(T - 1, T - 1) + 1
    second = rows(seed + 2, len(i), N, LENGTH) * length[i] * length[j] / length[0] if more else None
    truth = jet(x, w, second)
    found = jet_of_halves(x, w, second)
    terms = bound(x, w, second) * 2**10  # the sum of their sizes; float32 itself must be able to hold it
    held = (terms < 1e38) & (truth.abs() > 1e-36)
    assert ((found - truth).abs() <= bound(x, w, second))[held].all()


@pytest.mark.parametrize("apart", [0, 10, 20, SPREAD - 3])
def test_ratios_that_differ_between_directions(apart: int) -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    x[1] *= 2.0**apart  # a direction that moves what comes before the layer much more than the layer
    error = (jet_of_halves(x, w, None) - jet(x, w, None)).abs()
    assert (error <= bound(x, w, None)).all()


def test_ratios_too_far_apart_are_no_numbers_instead_of_zeros() -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    x[1] *= 2.0 ** (SPREAD + 6)
    assert jet_of_halves(x, w, None).isnan().all()


@pytest.mark.parametrize("factor", ["x", "w"])
@pytest.mark.parametrize("row", [0, 1, slice(1, None), slice(None)])
def test_rows_of_zeros_do_not_count(factor: str, row: int | slice) -> None:
    x, w = 1e20 * rows(0, T, N, LENGTH), 1e-20 * rows(1, T, OUTPUTS, LENGTH)
    (x if factor == "x" else w)[row] = 0
    found, truth = jet_of_halves(x, w, None), jet(x, w, None)
    assert ((found - truth).abs() <= bound(x, w, None)).all()
    assert (found != 0).any(-1).any(-1).equal((truth != 0).any(-1).any(-1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    x[2, 3, 7] = value
    found = jet_of_halves(x, w, None)
    assert not found[2, 3].isfinite().any()  # the tangent of that sample
    others = [n for n in range(N) if n != 3]
    truth = jet(x, w, None)[:, others]
    assert ((found[:, others] - truth).abs() <= bound(x, w, None)[:, others]).all()


def test_second_rows_that_are_nothing_beside_the_rest_do_not_spoil_it() -> None:
    x, w = rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH)
    for size in (0.0, 1e-35, 1e-20, 1e20):
        second = size * rows(2, T * (T - 1) // 2, N, LENGTH)
        assert ((jet_of_halves(x, w, second) - jet(x, w, second)).abs() <= bound(x, w, second)).all()


def test_entries_have_the_bits_of_tf32() -> None:
    x = rows(0, T, 10000) * 2.0 ** -torch.arange(28.0).repeat(T, 358)[:, :10000]
    left, *_, back = halves(x, rows(1, T, 3), None)
    same = scaled_back(left, back[:T]) == rounded(x).double()
    assert same[x.abs() > x.abs().amax(1, keepdim=True) * 2.0**-22].all()  # the ratios take 6 of 28


def test_the_operation_is_sound() -> None:
    for second in (None, rows(2, T * (T - 1) // 2, N, LENGTH)):
        torch.library.opcheck(
            torch.ops.jetplane.halves.default,
            (rows(0, T, N, LENGTH), rows(1, T, OUTPUTS, LENGTH), second),
            test_utils=("test_schema", "test_faketensor"),
        )


# -- the kernels ----------------------------------------------------------------------------------------------------


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
from jetplane.ad.rules.halves_triton import scaled

torch.save([scaled(*inputs) for inputs in torch.load(sys.argv[1], weights_only=True)], sys.argv[2])
"""


@needs_triton
def test_the_kernels_under_the_interpreter(tmp_path: Path) -> None:
    # a process of its own: Triton decides at its import whether to interpret
    given_, found = tmp_path / "given.pt", tmp_path / "found.pt"
    inputs = [inputs_of(trial) for trial in range(36)]
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

    from jetplane.ad.rules import halves_triton

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
