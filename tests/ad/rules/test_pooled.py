"""Convolution, ReLU and max-pooling as one operation: its kernels under the interpreter, by the compiler, on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad import _torch
from jetplane.ad.kernels import convolution_kernel
from jetplane.ad.rules import pooled
from pooled_layers import F64, Layers, needs_cuda, needs_triton, program
from tracing import trace_only

# -- the chain in a program -----------------------------------------------------------------------------------------


PLANES = list(itertools.product(["relu, pool", "one more", "one more in place"], ["exact", "ggn"], [False, True]))


def compiled_cases() -> list[Any]:
    """Every plane traced, and by the compiler: there slow but for one."""
    fast = [("one more", "ggn", True)]
    by_compiler = [pytest.param(*p, True, marks=() if p in fast else pytest.mark.slow) for p in PLANES]
    return [pytest.param(*p, False) for p in PLANES] + by_compiler


@pytest.mark.parametrize(("first", "curvature", "paid", "compiler"), compiled_cases())
def test_a_compiled_plane_with_fused_layers_is_the_eager_one(
    first: str, curvature: str, paid: bool, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(_torch, "compiled", trace_only)
    # the operations behind the kernels run on a CPU as plain convolutions
    monkeypatch.setattr(pooled, "_pays", lambda *_: paid)
    monkeypatch.setattr(convolution_kernel, "pays", lambda *_, **__: paid)
    func, params, directions = program(first, "in place")
    if curvature == "ggn":
        inner = func
        func = lambda params: jp.mark_output(inner(params)).square()  # noqa: E731
    torch._dynamo.reset()
    plane = jp.compile(jp.quadratic)(func, params, directions, curvature=curvature)
    expected = jp.quadratic(func, params, directions, curvature=curvature)
    for part in ("loss", "slope", "curvature"):
        torch.testing.assert_close(getattr(plane, part), getattr(expected, part), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_step_with_a_backward_pass_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled, "_pays", lambda *_: True)
    monkeypatch.setattr(convolution_kernel, "pays", lambda *_, **__: True)
    torch.manual_seed(0)
    model, x = Layers("relu, pool").double(), torch.randn(3, 1, 9, 10, dtype=F64)
    before = [value.detach().clone() for value in model.parameters()]
    moved = []
    for compile in (False, True):
        with torch.no_grad():
            for value, old in zip(model.parameters(), before, strict=True):
                value.copy_(old)
        opt = jp.optim.FoMoHBP(model.parameters(), lr=0.1, compile=compile)
        opt.step(lambda x: model(x).square().mean(), x)
        moved.append([value.detach().clone() for value in model.parameters()])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# -- the operations -------------------------------------------------------------------------------------------------


def layer_inputs(rows: int, n: int, size: tuple[int, int], channels: int, outputs: int, window: tuple[int, int]) -> Any:
    x = torch.randn(rows, n, *size, channels, dtype=F64)
    w = torch.randn(rows, outputs, *window, channels, dtype=F64)
    return x, w, torch.randn(rows, outputs, dtype=F64)


@pytest.mark.parametrize("bias", [False, True])
def test_the_operations_are_the_composition(bias: bool) -> None:
    """Against double backward through torch's own layers, along x + e_i x_i and w + e_i w_i."""
    x, w, b = layer_inputs(3, 2, (7, 6), 2, 3, (3, 2))
    steps = torch.zeros(2, dtype=F64, requires_grad=True)

    def moved(rows: Tensor) -> Tensor:
        return rows[0] + steps[0] * rows[1] + steps[1] * rows[2]

    one, kernel = moved(x).permute(0, 3, 1, 2), moved(w).permute(0, 3, 1, 2)
    y = F.max_pool2d(F.conv2d(one, kernel, moved(b) if bias else None, (1, 1), 0, (2, 1)).relu(), 2)
    layout = ([1, 1], [2, 1])
    value, rows, codes = torch.ops.jetplane.convolution_pooled_rows(x, w, b if bias else None, *layout, False)
    jet = torch.ops.jetplane.convolution_pooled_jet(x, w, None, None, b if bias else None, codes, *layout)
    torch.testing.assert_close(value.permute(0, 3, 1, 2), y.detach())
    torch.testing.assert_close(rows, jet[:3])
    for place in torch.cartesian_prod(*map(torch.arange, y.shape)):
        (first,) = torch.autograd.grad(y[tuple(place)], steps, create_graph=True, allow_unused=True)
        n, o, i, j = place
        torch.testing.assert_close(rows[1:, n, i, j, o], first.detach())
        for number, (a, c) in enumerate(((0, 0), (0, 1), (1, 1))):
            (second,) = torch.autograd.grad(first[a], steps, retain_graph=True)
            torch.testing.assert_close(jet[3 + number, n, i, j, o], second[c])


def test_codes_follow_torch_for_ties_and_what_is_no_number() -> None:
    image = torch.tensor(
        [[1.0, 1.0, -1.0, -2.0], [0.0, 1.0, -3.0, 0.0], [float("nan"), 2.0, 0.0, 0.0], [1.0, 3.0, 0.0, 0.0]]
    )
    x, w = image.reshape(1, 1, 4, 4, 1), torch.ones(1, 1, 1, 1, 1)
    value, _, codes = torch.ops.jetplane.convolution_pooled_rows(x, w, None, [1, 1], [1, 1], False)
    assert codes.flatten().tolist() == [0, 4, 0, 4]
    torch.testing.assert_close(value.flatten(), torch.tensor([1.0, 0.0, float("nan"), 0.0]), equal_nan=True)


def test_the_operations_are_sound() -> None:
    x, w, b = (part.float() for part in layer_inputs(3, 2, (7, 6), 2, 3, (3, 2)))
    ops, tests = torch.ops.jetplane, {"test_utils": ("test_schema", "test_faketensor")}
    codes = torch.zeros(2, 2, 2, 3, dtype=torch.uint8)
    layout = ([1, 1], [1, 1])
    torch.library.opcheck(ops.convolution_pooled_rows.default, (x, w, b, *layout, False), **tests)
    torch.library.opcheck(ops.convolution_pooled_jet.default, (x, w, None, None, b, codes, *layout), **tests)
    plain = (x[0].permute(0, 3, 1, 2), w[0].permute(0, 3, 1, 2), b[0], [1, 2], [1, 0], [1, 1])
    torch.library.opcheck(ops.convolution_relu_pool.default, plain, **tests)


# -- the kernels ----------------------------------------------------------------------------------------------------


@needs_cuda
@needs_triton
@pytest.mark.parametrize("k", [1, 3])
def test_a_compiled_plane_on_a_gpu(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [nn.Conv2d(4, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    torch.manual_seed(0)
    model = nn.Sequential(*chain, nn.Flatten()).cuda()
    values = {name: value.detach() for name, value in model.named_parameters()}
    directions = {name: torch.randn(k, *value.shape, device="cuda") for name, value in values.items()}
    x = torch.randn(512, 4, 24, 24, device="cuda")

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().mean()

    expected, second_order, calls = jp.quadratic(loss, values, directions), pooled._second_order, []
    monkeypatch.setattr(pooled, "_second_order", lambda *args: calls.append(args) or second_order(*args))
    with torch.backends.cudnn.flags(allow_tf32=True):
        fast = jp.compile(jp.quadratic)
        planes = [fast(loss, values, directions) for _ in range(5)]  # the last ones are replayed
    assert len(calls) == 1
    for found in planes:
        for part in ("loss", "slope", "curvature"):
            truth = getattr(expected, part)
            assert (getattr(found, part) - truth).abs().max() <= 2e-2 * truth.abs().max()
