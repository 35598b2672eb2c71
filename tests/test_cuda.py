"""The models on a GPU, whose float32 and float16 kernels (cuDNN, fused norms, flash attention) are not the CPU's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import jetplane as jp
from cases import LAYERS, MODELS, Case, along, assert_quadratic, oracle
from jetplane.directions import Gaussian, Plane, Rademacher
from jetplane.optim import FoMoHKD
from jetplane.testing.oracle import double_backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# PReLU's case holds a module made on the CPU
@pytest.mark.parametrize("case", [c for c in MODELS + LAYERS if "PReLU" not in c.name], ids=lambda case: case.name)
def test_models_in_float64(case: Case) -> None:
    with torch.device("cuda"):
        params, program = case.build()
        directions = dict(zip(params, along(list(params.values()), 3), strict=True))
        with jp.perturb(params, directions) as jets:
            loss = program()
        assert loss.is_cuda
        with torch.backends.cudnn.flags(enabled=False):  # cuDNN's recurrent layers have no double backward
            expected = oracle(program, list(params.values()), list(directions.values()))
        assert_quadratic(jets.quadratic(loss), expected, max(case.tolerance, 1e-10))


def apart(model: jp.Quadratic, truth: jp.Quadratic) -> float:
    """The largest difference, relative to the largest entry of its part."""
    parts = ((model.loss, truth.loss), (model.slope, truth.slope), (model.curvature, truth.curvature))
    return max(float((a.double().cpu() - b.cpu()).abs().max() / b.abs().max().cpu()) for a, b in parts)


def against_float64(
    module: nn.Module, x: Tensor, dtype: torch.dtype, read: Callable[[nn.Module, Tensor], Tensor]
) -> float:
    """How far a module in ``dtype`` on the GPU is from the same in float64 on the CPU."""
    short = copy.deepcopy(module).to("cuda", dtype)
    long = copy.deepcopy(short).to("cpu", torch.float64)
    x_short = x.to("cuda", dtype)
    params = dict(short.named_parameters())
    directions = {name: torch.randn(2, *p.shape).to(p) for name, p in params.items()}
    with jp.perturb(params, directions) as jets:
        loss = read(short, x_short)
    leaves = list(long.parameters())
    rows = [directions[name].to("cpu", torch.float64) for name in params]
    return apart(
        jets.quadratic(loss), double_backward(lambda: read(long, x_short.to("cpu", torch.float64)), leaves, rows)
    )


def first(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    return (out[0] if isinstance(out, tuple) else out).square().mean()


MODULES = {
    "LSTM": (nn.LSTM(5, 6, num_layers=2, bidirectional=True), (4, 3, 5)),
    "GRU": (nn.GRU(5, 6, batch_first=True), (4, 3, 5)),
    "RNN": (nn.RNN(5, 6, nonlinearity="tanh"), (4, 3, 5)),
    "BatchNorm2d": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh()), (4, 3, 8, 8)),
    "BatchNorm2d eval": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh()).eval(), (4, 3, 8, 8)),
    "LayerNorm": (nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.GELU()), (5, 6)),
    "RMSNorm": (nn.Sequential(nn.Linear(6, 64), nn.RMSNorm(64), nn.SiLU()), (5, 6)),
    "GroupNorm": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Tanh()), (4, 3, 8, 8)),
    "channels_last": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh()).to(memory_format=torch.channels_last), (4, 3, 8, 8)),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True),
        (2, 5, 16),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_float32(name: str) -> None:
    module, shape = MODULES[name]
    assert against_float64(module, torch.randn(shape), torch.float32, first) < 1e-3


class Attention(nn.Module):
    """Attention of three projections, as a transformer has it."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.float16),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float16),
        (SDPBackend.CUDNN_ATTENTION, torch.float16),
        (SDPBackend.MATH, torch.float32),
    ],
    ids=str,
)
def test_attention_kernels(backend: SDPBackend, dtype: torch.dtype, causal: bool) -> None:
    def read(module: nn.Module, x: Tensor) -> Tensor:
        with sdpa_kernel(backend if x.is_cuda else SDPBackend.MATH):
            return module(x).float().square().mean() if x.dtype != torch.float64 else module(x).square().mean()

    limit = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}[dtype]
    assert against_float64(Attention(64, causal), torch.randn(2, 16, 64), dtype, read) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
    x, y = torch.randn(8, 16, device="cuda"), torch.arange(8, device="cuda") % 4
    params = dict(model.named_parameters())
    directions = {name: torch.randn(2, *p.shape, device="cuda") for name, p in params.items()}

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    with torch.autocast("cuda", dtype):
        loss()  # fills the cache of casts, which must not be used
        with jp.perturb(params, directions) as jets:
            quadratic = jets.quadratic(loss())
    truth = double_backward(loss, list(params.values()), list(directions.values()))
    assert apart(quadratic, truth) < 5e-2


def test_dropout_is_drawn_once_for_all_chunks() -> None:
    x = torch.randn(64, device="cuda")
    directions = torch.randn(4, 64, device="cuda")

    def program(x: Tensor) -> Tensor:
        return (F.dropout(x, 0.5) ** 3).sum()

    torch.cuda.manual_seed(0)
    whole = jp.quadratic(program, x, directions)
    torch.cuda.manual_seed(0)
    chunked = jp.quadratic(program, x, directions, chunk_size=1)
    torch.testing.assert_close(chunked.curvature, whole.curvature)


def test_autograd_inside_the_program_runs_in_another_thread() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return slope.sum()

    x = torch.tensor([1.0, 2.0], dtype=torch.float64, device="cuda")
    hessian = jp.hessian(program, x)
    torch.testing.assert_close(hessian, torch.diag(torch.full_like(x, 6.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", [Gaussian(3), Rademacher(3)], ids=lambda family: type(family).__name__)
def test_random_directions_are_those_of_the_cpu(family: Gaussian | Rademacher, dtype: torch.dtype) -> None:
    here, there = torch.zeros(1000, 7, dtype=dtype), torch.zeros(1000, 7, dtype=dtype, device="cuda")
    rows = [family.draw(Plane(5, 11, 2, [leaf], list)).rows(0, leaf, 0, 3) for leaf in (here, there)]
    assert rows[1].is_cuda
    assert torch.equal(rows[0], rows[1].cpu())


def test_an_optimizer_follows_the_path_of_the_cpu() -> None:
    def path(device: str) -> Tensor:
        x = torch.full((4,), -1.0, dtype=torch.float64, device=device, requires_grad=True)
        opt = FoMoHKD([x], lr=0.5, k=3, seed=1)
        for _ in range(10):
            opt.step(lambda: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum())
        return x.detach().cpu()

    torch.testing.assert_close(path("cuda"), path("cpu"), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_compiled_plane_takes_new_batches_and_directions() -> None:
    """From other addresses at each call: what was recorded of the first ones is recorded anew, with copies."""
    fast = jp.compile(jp.quadratic)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to("cuda", torch.float64)
    values = {name: p.detach() for name, p in model.named_parameters()}
    kept = []
    for number in range(12):
        x = torch.randn(4 if number < 8 else 7, 5, dtype=torch.float64, device="cuda")
        directions = {name: torch.randn(2, *p.shape, dtype=torch.float64, device="cuda") for name, p in values.items()}
        kept.append((x, directions))  # so that no address comes again

        def loss(values: dict[str, Tensor], x: Tensor = x) -> Tensor:
            return torch.func.functional_call(model, values, (x,)).square().mean()

        with torch.no_grad():
            found, expected = fast(loss, values, directions), jp.quadratic(loss, values, directions)
        for part in ("loss", "slope", "curvature"):
            torch.testing.assert_close(getattr(found, part), getattr(expected, part), rtol=1e-9, atol=1e-9)
