"""All rows of a convolution's jet from one kernel: under Triton's interpreter, through its compiler, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jetplane as jp
from jetplane.ad.algebra.jet import Operand, PairSet
from jetplane.ad.kernels import convolution_kernel
from jetplane.ad.kernels.convolution_kernel import convolution_jet, pays, rounded
from jetplane.ad.kernels.halves import halves
from jetplane.ad.rules import products

F64 = torch.float64
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# -- the operation --------------------------------------------------------------------------------------------------


def operands(k: int, channels: int, outputs: int, window: tuple[int, int], second: bool) -> tuple[Operand, Operand]:
    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=F64)

    image, pairs = (2, channels, 9, 8), k * (k + 1) // 2
    x = Operand(rows(*image), rows(k, *image), rows(pairs, *image) if second else None)
    return x, Operand(rows(outputs, channels, *window), rows(k, outputs, channels, *window), None)


def rule(k: int, x: Operand, w: Operand, bias: Any, stride: Any, padding: Any, dilation: Any) -> Operand:
    layout = (stride, padding, dilation, False, [0, 0], 1)
    return products._convolution(PairSet.all(k), torch.ops.aten.convolution.default, x, w, bias, *layout)


def assert_same(actual: Operand, expected: Operand, tolerance: float = 1e-12) -> None:
    for part in ("primal", "tangent", "second"):
        torch.testing.assert_close(getattr(actual, part), getattr(expected, part), rtol=tolerance, atol=tolerance)


LAYOUTS = [  # K, stride, padding, dilation, size of the kernel, second rows
    (1, [1, 1], [0, 0], [1, 1], (5, 5), False),
    (2, [2, 1], [1, 2], [1, 2], (3, 2), True),
    (3, [1, 2], [0, 1], [2, 1], (2, 3), True),
    (4, [1, 1], [2, 0], [1, 1], (3, 3), False),
]


@pytest.mark.parametrize("bias", ["none", "constant", "tangents", "second"])
@pytest.mark.parametrize(("k", "stride", "padding", "dilation", "window", "second"), LAYOUTS)
def test_the_operation_is_the_rule(
    k: int, stride: Any, padding: Any, dilation: Any, window: tuple[int, int], second: bool, bias: str
) -> None:
    x, w = operands(k, 3, 5, window, second)
    pairs = torch.randn(k * (k + 1) // 2, 5, dtype=F64) if bias == "second" else None
    added: Any = None if bias == "none" else torch.randn(5, dtype=F64)
    if bias in ("tangents", "second"):
        added = Operand(added, torch.randn(k, 5, dtype=F64), pairs)
    expected = rule(k, x, w, added, stride, padding, dilation)
    assert_same(convolution_jet(x, w, added, stride, padding, dilation), expected)


def test_a_factor_without_tangents_is_refused() -> None:
    x, w = operands(1, 3, 5, (3, 3), False)
    with pytest.raises(ValueError, match=r"a factor of the convolution has no tangents; expected some on both\."):
        convolution_jet(x, Operand(w.primal, None, None), None, [1, 1], [0, 0], [1, 1])


def test_a_traced_rule_uses_the_operation_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands(3, 3, 5, (3, 3), False)
    bias = Operand(torch.randn(5, dtype=F64), torch.randn(3, 5, dtype=F64), None)
    layout = ([1, 1], [1, 1], [1, 1])

    def jet(*parts: Tensor) -> Any:
        left, right, more = (Operand(*parts[n : n + 2], None) for n in (0, 2, 4))
        out = rule(3, left, right, more, *layout)
        return out.primal, out.tangent, out.second

    inputs = [part for one in (x, w, bias) for part in (one.primal, one.tangent)]
    for paid in (False, True):
        monkeypatch.setattr(convolution_kernel, "pays", lambda *_, paid=paid: paid)
        graph = make_fx(jet, tracing_mode="fake")(*inputs)
        assert any(node.target == torch.ops.jetplane.convolution_jet.default for node in graph.graph.nodes) == paid
        assert_same(Operand(*graph(*inputs)), rule(3, x, w, bias, *layout))


def test_the_operation_is_sound() -> None:
    x, w = torch.randn(3, 2, 5, 5, 2), torch.randn(3, 4, 2, 2, 2)
    torch.library.opcheck(
        torch.ops.jetplane.convolution_jet.default,
        (x, w, torch.randn(3, 2, 5, 5, 2), None, torch.randn(3, 4), [1, 1], [1, 1]),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.jetplane.convolution_jet.default,
        (*halves(x, w, torch.randn(3, 2, 5, 5, 2)), torch.randn(3, 4), [1, 1], [1, 1]),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_in_tf32s_place_factors_are_halves(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_kernel, "tf32", lambda: allowed)
    exact = operands(3, 4, 5, (3, 3), True)
    x, w = (Operand(*(part if part is None else part.float() for part in astuple(one))) for one in exact)
    layout = ([1, 1], [1, 1], [1, 1])
    found, expected = convolution_jet(x, w, None, *layout), rule(3, *exact, None, *layout)
    for one, truth in zip(astuple(found), astuple(expected), strict=True):
        assert one.dtype == torch.float32
        apart = (one - truth).abs().max() / truth.abs().max()
        assert (1e-5 < apart < 1e-3) if allowed else apart < 1e-6  # rounded to 11 bits, or not


def test_rounding_is_to_the_nearest_number_of_tf32() -> None:
    x = torch.cat([torch.randn(10000) * 10.0**power for power in (-30, -3, 0, 3, 30)])
    out = rounded(x)
    assert not (out.view(torch.int32) & 0x1FFF).any()
    assert ((out - x).abs() <= x.abs() * 2.0**-11).all()
    assert ((out - x) / x).mean().abs() < 2e-6  # cutting off: -2.4e-4
    assert not rounded(torch.tensor([float("nan"), float("inf"), -float("inf")])).isfinite().any()


# -- where it is used -----------------------------------------------------------------------------------------------


def fake(k: int = 3, **changes: Any) -> Any:
    """Whether the kernel is used for the paper's second convolution on an H200, changed by ``changes``."""
    options = {"n": 2048, "c": 20, "o": 50, "size": 5, "dtype": torch.float32, "device": "cuda", **changes}
    pairs = options.get("pairs", PairSet.all(k))
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind = {"dtype": options["dtype"], "device": options["device"]}
        image = (options["n"], options["c"], 12, 12)
        weight = (options["o"], options["c"], options["size"], options["size"])
        x = Operand(torch.empty(image, **kind), torch.empty((k, *image), **kind), None)
        w = Operand(torch.empty(weight, **kind), torch.empty((k, *weight), **kind), None)
    if options.get("constant"):
        x = Operand(x.primal, None, None)
    layout = (options.get("stride", [1, 1]), [0, 0], [1, 1])
    return pays(pairs, x, w, *layout, options.get("groups", 1), options.get("transposed", False))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(convolution_kernel, "ENABLED", True)
    monkeypatch.setattr(convolution_kernel, "_HAS_TRITON", True)
    monkeypatch.setattr(convolution_kernel, "tf32", lambda: True)


@pytest.mark.usefixtures("h200")
def test_it_is_used_for_the_second_convolution_of_the_cnn() -> None:
    assert all(fake(k) for k in (2, 3, 10))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"dtype": F64},
        {"n": 16},
        {"stride": [4, 4]},
        {"c": 3},
        {"o": 10},
        {"c": 128},
        {"k": 1},
        {"k": 17},
        {"pairs": PairSet.diagonal(3)},
        {"pairs": PairSet.laplacian(3)},
        {"constant": True},
        {"groups": 2},
        {"transposed": True},
    ],
    ids=str,
)
def test_it_is_not_used_where_there_is_none_or_it_would_not_pay(changes: dict[str, Any]) -> None:
    assert not fake(**changes)


@pytest.mark.usefixtures("h200")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_kernel, "ENABLED", False)
    assert not fake()
    ask = "from jetplane.ad.kernels import convolution_kernel as c; print(c.ENABLED)"
    for value in ("0", "1"):
        env = {**os.environ, "JETPLANE_CONVOLUTION_KERNEL": value}
        ran = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == str(value == "1")


@pytest.mark.parametrize("allowed", [False, True])
def test_it_follows_the_precision_of_convolutions(allowed: bool) -> None:
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        assert convolution_kernel.tf32() == allowed


# -- the kernel -----------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("rows", range(2, 18))
def test_the_plan_makes_both_products_of_every_pair_once(rows: int) -> None:
    from jetplane.ad.kernels.convolution_triton import plan

    made: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for pattern, groups in plan(rows).items():
        for group in groups:
            sums: dict[int, list[tuple[int, int]]] = {}
            for n, i, j in (term for phase in pattern.phases for term in phase):
                sums.setdefault(n, []).append((group[i], group[j]))
            for n, other in pattern.merged:
                sums[n] += sums.pop(other)
            for n, (i, j) in enumerate(pattern.sums):
                assert (group[i], group[j]) not in made
                made[group[i], group[j]] = sums[n]
    assert sorted(made) == list(PairSet.all(rows).pairs)
    for (i, j), terms in made.items():
        assert sorted(terms) == sorted({(i, j), (j, i)})


# -- on a GPU -------------------------------------------------------------------------------------------------------


@needs_cuda
@needs_triton
@pytest.mark.parametrize("k", [2, 3])
def test_a_compiled_plane_with_the_kernel_is_the_one_without(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 20, 5), torch.nn.Tanh(), torch.nn.Conv2d(20, 50, 5), torch.nn.Tanh(), torch.nn.Flatten()
    ).cuda()
    values = {name: p.detach() for name, p in model.named_parameters()}
    directions = {name: torch.randn(k, *p.shape, device="cuda") for name, p in values.items()}
    x = torch.randn(512, 4, 16, 16, device="cuda")

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().mean()

    expected = jp.quadratic(loss, values, directions)
    calls = []
    monkeypatch.setattr(
        convolution_kernel, "convolution_jet", lambda *args: calls.append(args) or convolution_jet(*args)
    )
    with torch.backends.cudnn.flags(allow_tf32=True):
        found = jp.compile(jp.quadratic)(loss, values, directions)
    assert len(calls) == 1  # the first has 4 x 5 x 5 numbers in a window, but no tangents before it
    for part in ("loss", "slope", "curvature"):
        truth = getattr(expected, part)
        assert (getattr(found, part) - truth).abs().max() <= 2e-2 * truth.abs().max()
