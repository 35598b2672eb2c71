"""float64, float32, bfloat16 and float16: rows keep the dtype, and agree with the float64 result to its precision."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from jetplane import Quadratic
from jetplane.testing.oracle import double_backward

SHORT = [torch.float32, torch.bfloat16, torch.float16]
ALL = [torch.float64, *SHORT]


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def near(actual: Quadratic, expected: Quadratic, tolerance: float) -> None:
    """Each part to ``tolerance``, relative to its largest entry."""
    for part in ("loss", "slope", "curvature"):
        a, b = getattr(actual, part).double(), getattr(expected, part)
        scale = max(float(b.abs().max()), 1e-2)
        assert float((a - b).abs().max()) <= tolerance * scale, f"{part}: {a} and {b}"


def has_dtype(model: Quadratic, dtype: torch.dtype) -> None:
    assert (model.loss.dtype, model.slope.dtype, model.curvature.dtype) == (dtype, dtype, dtype)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * 16).round() / 16


# -- elementwise --------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "scalars": lambda x: 2.5 * x + 1 - 0.1 / (x * x + 3),
    "scalar first": lambda x: 1.5 - 3 * (2 / (4 + x)),
    "integer scalar": lambda x: (3 * x - 2) * x,
    "pow 2": lambda x: x**2,
    "pow 3.0": lambda x: x**3.0,
    "base": lambda x: 2**x,
    "sin": torch.sin,
    "exp": lambda x: torch.exp(-0.5 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "elu": F.elu,
    "relu": torch.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "log1p": lambda x: torch.log1p(x * x),
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "erf": torch.erf,
    "clamp": lambda x: x.clamp(-0.5, 1.5) * x,
    "where scalar": lambda x: torch.where(x > 0, x * x, 0.5),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.25),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "softmax": lambda x: x.softmax(0) * x,
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "mean": lambda x: (x * x).mean(),
    "var": lambda x: x.var(),
    "cumsum": lambda x: x.cumsum(0) ** 2,
    "numpy-like scalar tensor": lambda x: x * torch.tensor(1.5, dtype=torch.float64),
    "in place": lambda x: (x * 1).mul_(2.0).add_(1).sin_(),
}


@pytest.mark.parametrize("dtype", ALL, ids=named)
@pytest.mark.parametrize("name", OPERATIONS)
def test_elementwise_rows_keep_the_dtype(name: str, dtype: torch.dtype) -> None:
    operation = OPERATIONS[name]
    x, directions = randn(6).to(dtype), randn(2, 6, seed=1).to(dtype)
    jet = jp.jet(operation, x, directions)
    assert (jet.primal.dtype, jet.tangent.dtype, jet.second.dtype) == (dtype, dtype, dtype)
    exact = jp.jet(operation, x.double(), directions.double())
    # a few roundings; half precision runs some operations in float32 and rounds once
    tolerance = 60 * torch.finfo(dtype).eps
    for actual, expected in ((jet.primal, exact.primal), (jet.tangent, exact.tangent), (jet.second, exact.second)):
        scale = max(float(expected.abs().max()), 1.0)
        assert float((actual.double() - expected).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("dtype", ALL, ids=named)
def test_every_function_keeps_the_dtype(dtype: torch.dtype) -> None:
    x, v = randn(3).to(dtype), randn(3, seed=1).to(dtype)

    def function(x: Tensor) -> Tensor:
        return (0.5 * x**3 + 2 * x.sin()).sum()

    results = [
        *jp.jvp(function, (x,), (v,)),
        *jp.hyperdual(function, x, v, v),
        jp.gradient(function, x),
        jp.hvp(function, x, v),
        jp.hessian(function, x),
        jp.laplacian(function, x),
        jp.quadratic(function, x, v[None]).curvature,
        jp.quadratic(function, x, torch.stack([v, x]), chunk_size=1).curvature,
    ]
    assert {result.dtype for result in results} == {dtype}


# -- an MLP -------------------------------------------------------------------------------------------------------

# relative to the largest entry; half precision loses digits in a loss over a batch
PRECISION = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def mlp(activation: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 3)).double()


def of_module(module: nn.Module, loss: Callable[[nn.Module], Tensor], dtype: torch.dtype, k: int = 3) -> Quadratic:
    """The quadratic model of a copy of ``module`` in ``dtype`` along fixed directions of its parameters."""
    module = copy.deepcopy(module).to(dtype)
    parameters = dict(module.named_parameters())
    directions = {
        name: randn(k, *p.shape, seed=7 + i).to(dtype) * 0.25 for i, (name, p) in enumerate(parameters.items())
    }
    with jp.perturb(parameters, directions) as jets:
        value = loss(module)
    return jets.quadratic(value)


def of_oracle(module: nn.Module, loss: Callable[[nn.Module], Tensor], k: int = 3) -> Quadratic:
    module = copy.deepcopy(module).double()
    parameters = list(module.parameters())
    directions = [randn(k, *p.shape, seed=7 + i) * 0.25 for i, p in enumerate(parameters)]
    return double_backward(lambda: loss(module), parameters, directions)


@pytest.mark.parametrize("dtype", ALL, ids=named)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.SiLU, nn.ReLU, nn.Softplus])
def test_mlp(activation: type[nn.Module], dtype: torch.dtype) -> None:
    def loss(module: nn.Module) -> Tensor:
        x = randn(6, 4).to(next(module.parameters()).dtype)
        return F.cross_entropy(module(x), torch.arange(6) % 3)

    model = mlp(activation)
    actual = of_module(model, loss, dtype)
    has_dtype(actual, dtype)
    near(actual, of_oracle(model, loss), PRECISION[dtype])


@pytest.mark.parametrize("dtype", ALL, ids=named)
def test_regression_losses(dtype: torch.dtype) -> None:
    model = mlp(nn.Tanh)
    for criterion in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):

        def loss(module: nn.Module, criterion: Callable[..., Tensor] = criterion) -> Tensor:
            kind = next(module.parameters()).dtype
            return criterion(module(randn(6, 4).to(kind)), randn(6, 3, seed=5).clamp(0, 1).to(kind))

        actual = of_module(model, loss, dtype)
        has_dtype(actual, dtype)
        near(actual, of_oracle(model, loss), PRECISION[dtype])


# -- float32 has other kernels than float64 -----------------------------------------------------------------------


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class Attention(nn.Module):
    """Self-attention, with torch's own module or function."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of a sequence with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 5, batch_first=True),
    "LSTM bidirectional": lambda: nn.LSTM(8, 3, num_layers=2, bidirectional=True, batch_first=True),
    "LSTM projection": lambda: nn.LSTM(8, 5, proj_size=3, batch_first=True),
    "GRU": lambda: nn.GRU(8, 5, batch_first=True),
    "GRU two layers": lambda: nn.GRU(8, 4, num_layers=2, batch_first=True),
    "RNN tanh": lambda: nn.RNN(8, 5, batch_first=True),
    "RNN relu": lambda: nn.RNN(8, 5, nonlinearity="relu", batch_first=True),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()),
    "RMSNorm": lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Tanh()),
    "BatchNorm1d": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Tanh()),
    "GroupNorm": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(3, 6), nn.Tanh()),
    "InstanceNorm1d": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.InstanceNorm1d(6, affine=True), nn.Tanh()),
    "scaled_dot_product_attention": lambda: Attention(causal=False),
    "causal attention": lambda: Attention(causal=True),
    "MultiheadAttention": SelfAttention,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "Conv1d": lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1, stride=2), nn.GELU()),
}


def sequence_loss(module: nn.Module) -> Tensor:
    out = first(module(randn(3, 4, 8).to(next(module.parameters()).dtype)))
    return (out.sin() * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().mean()


def build(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODULES[name]()


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_float32_layers_agree_with_float64(name: str, train: bool) -> None:
    module = build(name).train(train)
    expected = of_oracle(module, sequence_loss)
    near(of_module(module, sequence_loss, torch.float64), expected, 1e-10)
    actual = of_module(module, sequence_loss, torch.float32)
    has_dtype(actual, torch.float32)
    near(actual, expected, 1e-4)


@pytest.mark.parametrize(
    "name", ["LSTM", "GRU", "LayerNorm", "BatchNorm1d", "causal attention", "TransformerEncoderLayer"]
)
def test_bfloat16_layers(name: str) -> None:
    module = build(name)
    actual = of_module(module, sequence_loss, torch.bfloat16)
    has_dtype(actual, torch.bfloat16)
    near(actual, of_oracle(module.to(torch.bfloat16), sequence_loss), 0.15)


def test_float32_image_network() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )

    def loss(module: nn.Module) -> Tensor:
        x = randn(4, 2, 8, 8).to(next(module.parameters()).dtype)
        return F.cross_entropy(module(x), torch.arange(4) % 3)

    actual = of_module(model, loss, torch.float32)
    has_dtype(actual, torch.float32)
    near(actual, of_oracle(model, loss), 1e-4)


# -- mixed dtypes -------------------------------------------------------------------------------------------------


def test_a_perturbed_scalar_of_float64_does_not_upcast() -> None:
    x, scale = randn(4).float(), torch.tensor(1.5, dtype=torch.float64)
    directions = (randn(2, 4, seed=1).float(), randn(2, seed=2))

    def function(x: Tensor, scale: Tensor) -> Tensor:
        return (scale * x.sin() + x / scale) * scale

    jet = jp.jet(function, (x, scale), directions)
    assert (jet.primal.dtype, jet.tangent.dtype, jet.second.dtype) == (torch.float32,) * 3
    exact = jp.jet(function, (x.double(), scale), (directions[0].double(), directions[1]))
    torch.testing.assert_close(jet.second.double(), exact.second, rtol=1e-5, atol=1e-5)


def test_a_constant_scalar_of_float64_does_not_upcast() -> None:
    x, scale = randn(4).float(), torch.tensor(1.5, dtype=torch.float64)
    jet = jp.jet(lambda x: (scale * x).sin() + scale, x, randn(2, 4, seed=1).float())
    assert (jet.primal.dtype, jet.tangent.dtype, jet.second.dtype) == (torch.float32,) * 3


@pytest.mark.parametrize("first_dtype", ALL, ids=named)
@pytest.mark.parametrize("second_dtype", ALL, ids=named)
def test_two_dtypes_follow_torch(first_dtype: torch.dtype, second_dtype: torch.dtype) -> None:
    a, b = randn(3).to(first_dtype), randn(3, seed=1).to(second_dtype)
    directions = (randn(2, 3, seed=2).to(first_dtype), randn(2, 3, seed=3).to(second_dtype))

    def function(a: Tensor, b: Tensor) -> Tensor:
        return a * b + torch.maximum(a, b) * 2 - a / (b * b + 1)

    jet = jp.jet(function, (a, b), directions)
    expected = torch.promote_types(first_dtype, second_dtype)
    assert function(a, b).dtype == expected
    assert (jet.primal.dtype, jet.tangent.dtype, jet.second.dtype) == (expected,) * 3
    exact = jp.jet(function, (a.double(), b.double()), tuple(d.double() for d in directions))
    tolerance = 30 * max(torch.finfo(first_dtype).eps, torch.finfo(second_dtype).eps)
    torch.testing.assert_close(jet.second.double(), exact.second, rtol=tolerance, atol=tolerance * 4)


def test_casts_inside_the_program() -> None:
    x, directions = randn(4), randn(2, 4, seed=1)

    def function(x: Tensor) -> Tensor:
        return (x.float().sin().half().to(torch.float32) * x.type(torch.float32)).double().sum() + x.to(x).sum()

    model = jp.quadratic(function, x, directions)
    has_dtype(model, torch.float64)
    exact = jp.quadratic(lambda x: (x.sin() * x).sum() + x.sum(), x, directions)
    near(model, exact, 1e-2)


def test_integer_and_boolean_tensors_pass_through() -> None:
    x = randn(4)
    counts, mask = torch.tensor([1, 2, 3, 4]), torch.tensor([True, False, True, True])

    def function(x: Tensor) -> Tensor:
        return (counts * x**2 * mask + x.argsort() + (x > 0)).sum()

    curvature = jp.hessian(function, x)
    torch.testing.assert_close(curvature, torch.diag(2.0 * counts * mask).double())


def test_default_dtype_does_not_leak() -> None:
    x = randn(3).float()
    torch.set_default_dtype(torch.float64)
    try:
        jet = jp.jet(lambda x: torch.ones(3, dtype=x.dtype) * x**2 + 1.0, x, torch.ones(1, 3, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (jet.tangent.dtype, jet.second.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=named)
def test_autocast(dtype: torch.dtype) -> None:
    model = mlp(nn.Tanh).float()

    def loss(module: nn.Module) -> Tensor:
        kind = next(module.parameters()).dtype
        with torch.autocast("cpu", dtype=dtype, enabled=kind == torch.float32):
            out = module(randn(6, 4).to(kind))
        return F.cross_entropy(out.to(kind), torch.arange(6) % 3)

    with torch.autocast("cpu", dtype=dtype):
        model(randn(6, 4).float())  # fills autocast's cache of weights
    actual = of_module(model, loss, torch.float32)
    has_dtype(actual, torch.float32)
    near(actual, of_oracle(model, loss), PRECISION[dtype])
