"""Convolution, ReLU and max-pooling as one operation: its kernels under the interpreter, by the compiler, on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad.fusion import fused
from jetplane.ad.rules import convolution_kernel, pooled

F64 = torch.float64
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# -- the chain in a program -----------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Convolutions with what is put behind them."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.convolutions = nn.ModuleList(nn.Conv2d(1 if n == 0 else 3, 3, 3, padding=1) for n in range(len(kinds)))

    def forward(self, x: Tensor) -> Tensor:
        """One number for each image."""
        for kind, convolution in zip(self.kinds, self.convolutions, strict=True):
            x = LAYERS[kind](convolution(x))
        return x.flatten(1).sum(1)


LAYERS: dict[str, Any] = {
    "relu, pool": lambda y: F.max_pool2d(F.relu(y), 2),
    "pool, relu": lambda y: F.max_pool2d(y, (2, 2), 2).relu(),
    "in place": lambda y: torch.max_pool2d(y.relu_(), 2, [2, 2]),
    "pool, in place": lambda y: F.relu(F.max_pool2d(y, 2), inplace=True),
    "one more": lambda y: F.max_pool2d(F.relu(y), 2) + 1,  # the same tangents as before, and another value
    "one more in place": lambda y: F.max_pool2d(F.relu(y), 2).add_(1),
    # and what must not be taken for it
    "kept": lambda y: F.max_pool2d(F.relu(y), 2) + y.mean(),
    "used twice": lambda y: (lambda r: F.max_pool2d(r, 2) * r.mean())(F.relu(y)),
    "three": lambda y: F.max_pool2d(F.relu(y), 3),
    "overlapping": lambda y: F.max_pool2d(F.relu(y), 2, 1),
    "padded": lambda y: F.max_pool2d(F.relu(y), 2, 2, 1),
    "upwards": lambda y: F.max_pool2d(F.relu(y), 2, ceil_mode=True),
    "indices": lambda y: F.max_pool2d(F.relu(y), 2, return_indices=True)[0],
    "other": lambda y: F.max_pool2d(F.leaky_relu(y), 2),
    "no pool": lambda y: F.relu(y),
}
CHAINS = ["relu, pool", "pool, relu", "in place", "pool, in place", "one more", "one more in place"]


def program(*kinds: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Layers(*kinds).double()
    x = torch.randn(3, 1, 9, 10, dtype=F64)
    params = {name: value.detach() for name, value in model.named_parameters()}
    directions = {name: torch.randn(3, *value.shape, dtype=F64) for name, value in params.items()}
    return lambda params: torch.func.functional_call(model, params, (x,)).square().mean(), params, directions


def operations(func: Any, params: dict[str, Tensor]) -> list[Any]:
    """The operations of the captured program after fusion."""
    from jetplane.ad.capture import Captured, single

    seen: list[Any] = []

    def build(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in fused(graph._module).graph.nodes)
        assert torch.equal(graph(inputs)[0], graph.for_jets(inputs)[0])
        return graph

    with torch.no_grad():
        Captured(build, single)(func, (params,))
    return seen


@pytest.mark.parametrize("kind", LAYERS)
def test_a_chain_is_one_operation_and_nothing_else_is(kind: str) -> None:
    func, params, _ = program(kind)
    count = operations(func, params).count(torch.ops.jetplane.convolution_relu_pool.default)
    assert count == (1 if kind in CHAINS else 0)


def test_both_layers_of_two_are_fused() -> None:
    func, params, _ = program("relu, pool", "pool, relu")
    found = operations(func, params)
    assert found.count(torch.ops.jetplane.convolution_relu_pool.default) == 2
    assert F.relu not in found


def test_groups_images_without_a_batch_and_padding_by_name_are_left() -> None:
    w = torch.randn(2, 1, 3, 3)

    def loss(params: dict[str, Tensor]) -> Tensor:
        x = params["x"]
        a = F.max_pool2d(F.relu(F.conv2d(x, w, groups=2)), 2)
        b = F.max_pool2d(F.relu(F.conv2d(x[0], w.expand(2, 2, 3, 3))), 2)
        c = F.max_pool2d(F.relu(F.conv2d(x, w.expand(2, 2, 3, 3), padding="same")), 2)
        return a.sum() + b.sum() + c.sum()

    found = operations(loss, {"x": torch.randn(2, 2, 6, 6)})
    assert torch.ops.jetplane.convolution_relu_pool.default not in found


def test_what_autocast_would_cast_is_left() -> None:
    model = Layers("relu, pool")
    x, params = torch.randn(2, 1, 8, 8), {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.func.functional_call(model, params, (x,)).float().mean()

    assert torch.ops.jetplane.convolution_relu_pool.default not in operations(loss, params)


@pytest.mark.parametrize("paid", [False, True])
@pytest.mark.parametrize("curvature", ["exact", "ggn"])
@pytest.mark.parametrize("first", ["relu, pool", "one more", "one more in place"])
def test_a_compiled_plane_with_fused_layers_is_the_eager_one(
    paid: bool, curvature: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
from jetplane.ad.rules.convolution_triton import Tile, convolve
from jetplane.ad.rules.pooled import _pooled_shape
from jetplane.ad.rules.pooled_triton import pooled_rows

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

    from jetplane.ad.rules import pooled_triton

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
