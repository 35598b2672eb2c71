"""The cases that the tests run over: models, losses, layers and elementwise functions, each one small and named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import jetplane as jp
from jetplane.testing.oracle import double_backward

F64 = torch.float64


# -- checks -------------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=F64)


def vec(*numbers: float) -> Tensor:
    """These numbers in float64."""
    return torch.tensor(numbers, dtype=F64)


def along(leaves: Sequence[Tensor], k: int) -> list[Tensor]:
    """K random directions for each of ``leaves``."""
    return [torch.randn(k, *leaf.shape, dtype=leaf.dtype) for leaf in leaves]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    """Equal up to rounding, measured against the largest number expected."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0.0, atol=tolerance * scale)


def oracle(program: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor]) -> jp.Quadratic:
    """Double backward; skips where this release of torch has none for an operation of the program."""
    try:
        return double_backward(program, leaves, directions)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")


def assert_quadratic(actual: jp.Quadratic, expected: jp.Quadratic, tolerance: float = 1e-11) -> None:
    """Loss, slope and curvature agree."""
    assert_close(actual.loss, expected.loss, tolerance)
    assert_close(actual.slope, expected.slope, tolerance)
    assert_close(actual.curvature, expected.curvature, tolerance)


def check(
    function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, hessian: Tensor, tolerance: float = 1e-13
) -> None:
    """Gradient and Hessian of a function of one tensor against given ones."""
    assert_close(jp.gradient(function, x), gradient, tolerance)
    assert_close(jp.hessian(function, x), hessian, tolerance)


def check_against_oracle(
    function: Callable[..., Tensor],
    *primals: Tensor,
    twin: Callable[..., Tensor] | None = None,
    k: int = 3,
    tolerance: float = 1e-11,
) -> None:
    """``jp.quadratic`` of a function of tensors against double backward of it, or of its functional ``twin``."""
    directions = along(primals, k)
    actual = jp.quadratic(function, primals, tuple(directions))
    leaves = [p.clone().requires_grad_() for p in primals]
    assert_quadratic(actual, double_backward(lambda: (twin or function)(*leaves), leaves, directions), tolerance)


def gauss_newton_by_jacobian(
    model: Callable[[], Tensor],
    loss: Callable[[Tensor], Tensor],
    leaves: Sequence[Tensor],
    directions: Sequence[Tensor],
) -> Tensor:
    """V J^T H J V^T: J by backward passes through the model, H by double backward of the loss at its output."""
    with torch.enable_grad():
        z = model()
        rows = []
        for entry in z.reshape(-1):
            parts = torch.autograd.grad(entry, list(leaves), retain_graph=True, allow_unused=True)
            pairs = zip(parts, directions, strict=True)
            rows.append(sum((d * g).flatten(1).sum(1) for g, d in pairs if g is not None))
    tangents = torch.stack(rows, 1)  # (K, outputs)
    return tangents @ _second_derivatives(lambda flat: loss(flat.reshape(z.shape)), z.detach().reshape(-1)) @ tangents.T


def _second_derivatives(loss: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """By double backward, or by differences of gradients where torch has none."""
    try:
        return torch.autograd.functional.hessian(loss, z)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
    steps = 1e-5 * torch.eye(len(z), dtype=z.dtype)
    rows = [torch.func.grad(loss)(z + step) - torch.func.grad(loss)(z - step) for step in steps]
    return torch.stack(rows) / 2e-5


# -- models -------------------------------------------------------------------------------------------------------


def squares(out: Tensor) -> Tensor:
    """A smooth loss without further data."""
    return (out * out + out).mean()


def classes(out: Tensor) -> Tensor:
    """Cross-entropy against fixed labels."""
    return F.cross_entropy(out, torch.arange(out.shape[0]) % out.shape[1])


@dataclass(frozen=True)
class Case:
    """A model with data and a loss."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]  # one argument of the model, or a tuple of them
    loss: Callable[[Tensor], Tensor] = squares
    train: bool = True
    tolerance: float = 1e-11

    def build(self) -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
        """The parameters, and the program that computes the loss: the same numbers at every call."""
        torch.manual_seed(7)
        model = self.model().double().train(self.train)
        data = self.data()
        arguments = data if isinstance(data, tuple) else (data,)

        def program() -> Tensor:
            torch.manual_seed(8)  # dropout draws the same mask for the oracle
            return self.loss(model(*arguments))

        return dict(model.named_parameters()), program


def mlp(activation: nn.Module, width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), activation, nn.Linear(width, width), activation, nn.Linear(width, 3))


def between(
    layer: Callable[[], nn.Module], before: nn.Module, after: nn.Module | None = None
) -> Callable[[], nn.Module]:
    """A layer behind a linear or convolutional one, so that its input varies."""
    return lambda: nn.Sequential(before, layer(), nn.Tanh() if after is None else after)


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(4)
        self.skip = nn.Conv2d(3, 4, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)), inplace=True)
        y = self.norm2(self.second(y))
        y += self.skip(x)
        return F.adaptive_avg_pool2d(F.relu(y), 1).flatten(1)


class Transformer(nn.Module):
    """A pre-norm block over tokens, with rotary positions and the embedding tied to the output."""

    def __init__(self, mask: str, rotary: bool = False, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm1, self.norm2 = norm(8), norm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.mask, self.rotary = mask, rotary

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.rotary:
            q, k = self.rotate(q), self.rotate(k)
        n = x.shape[1]
        masks = {
            "none": {},
            "causal": {"is_causal": True},
            "float": {"attn_mask": torch.linspace(-1, 1, n * n, dtype=x.dtype).view(n, n)},
            "bool": {"attn_mask": torch.eye(n, dtype=torch.bool) | (torch.arange(n) % 2 == 0)},
        }
        y = F.scaled_dot_product_attention(q, k, v, **masks[self.mask])
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return (x @ self.embed.weight.T).flatten(0, 1)


class Recurrent(nn.Module):
    """A recurrent layer and a readout of all its steps."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.cell = kind(3, 4, batch_first=True, **options)
        self.readout = nn.LazyLinear(2)
        with torch.no_grad():
            self.readout(self.cell(torch.zeros(1, 2, 3))[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.cell(x)[0])


class Cells(nn.Module):
    """A cell unrolled by hand."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class SelfAttention(nn.Module):
    """torch's own attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.layer(x, x, x)
        return out + weights.sum(-1, keepdim=True) ** 2


def paper_cnn() -> nn.Module:
    """The paper's CNN, made small."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 5)),
    )


def batch(*shape: int) -> Callable[[], Tensor]:
    return lambda: randn(*shape)


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 5))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


ACTIVATIONS: list[nn.Module] = [
    *(nn.Tanh(), nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(), nn.CELU(), nn.SELU()),
    *(nn.Sigmoid(), nn.LogSigmoid(), nn.Softplus(), nn.Softsign(), nn.Tanhshrink(), nn.Softshrink(), nn.Hardshrink()),
    *(nn.LeakyReLU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardswish(), nn.Threshold(0.1, 0.2)),
    *(nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmin(-1), nn.RReLU(), nn.PReLU(), nn.GLU(-1)),
]

MODELS: list[Case] = [
    *(Case(f"mlp-{a}", lambda a=a: mlp(a), batch(4, 5), classes) for a in ACTIVATIONS if not isinstance(a, nn.GLU)),
    Case("glu", lambda: nn.Sequential(nn.Linear(5, 6), nn.GLU(-1), nn.Linear(3, 4)), batch(4, 5), classes),
    Case("cnn", paper_cnn, batch(3, 1, 14, 14), classes),
    Case("residual-train", Residual, batch(3, 3, 6, 6), classes),
    Case("residual-eval", Residual, batch(3, 3, 6, 6), classes, train=False),
    *(
        Case(f"transformer-{m}", lambda m=m: Transformer(m), tokens, classes)
        for m in ("none", "causal", "float", "bool")
    ),
    Case("transformer-rotary", lambda: Transformer("causal", rotary=True), tokens, classes),
    Case("transformer-rmsnorm", lambda: Transformer("causal", norm=nn.RMSNorm), tokens, classes),
    Case("attention", SelfAttention, batch(2, 3, 8)),
    Case("attention-eval", SelfAttention, batch(2, 3, 8), train=False),
    Case("encoder-train", lambda: encoder(dropout=0.2), batch(2, 3, 8)),
    Case("encoder-eval", lambda: encoder(), batch(2, 3, 8), train=False),
    Case("encoder-norm-first", lambda: encoder(norm_first=True, activation="gelu", dropout=0.0), batch(2, 3, 8)),
    *(
        Case(f"{kind.__name__}", lambda kind=kind: Recurrent(kind), batch(2, 3, 3))
        for kind in (nn.RNN, nn.GRU, nn.LSTM)
    ),
    Case("RNN-relu", lambda: Recurrent(nn.RNN, nonlinearity="relu"), batch(2, 3, 3)),
    Case("LSTM-deep", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3), batch(2, 3, 3)),
    Case("LSTM-projected", lambda: Recurrent(nn.LSTM, proj_size=2), batch(2, 3, 3)),
    *(
        Case(kind.__name__, lambda kind=kind: Cells(kind), batch(2, 3, 3))
        for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    ),
    Case("dropout", lambda: mlp(nn.Sequential(nn.Tanh(), nn.Dropout(0.4))), batch(4, 5), classes),
    Case("alpha-dropout", lambda: mlp(nn.Sequential(nn.SELU(), nn.AlphaDropout(0.3))), batch(4, 5), classes),
    Case("spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(5, 4)), batch(3, 5), classes, train=False),
    Case("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4)), batch(3, 4), classes),
    Case("bilinear", lambda: nn.Bilinear(3, 4, 2), lambda: (randn(5, 3), randn(5, 4))),
    Case("cosine", lambda: nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), Lambda(_cosine)), batch(3, 4)),
]


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _cosine(x: Tensor) -> Tensor:
    return F.cosine_similarity(x[:, 0], x[:, 1]) + F.pairwise_distance(x[:, 0], x[:, 1])


# -- single layers: a convolution or a linear layer in front makes their input vary ---------------------------------

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def layer(name: str, dims: int, make: Callable[[], nn.Module], size: int = 6, **options: Any) -> Case:
    """A layer on (2, 4, size, ...), behind a convolution."""
    return Case(
        name, lambda: nn.Sequential(_CONV[dims](3, 4, 1), make(), nn.Tanh()), batch(2, 3, *(size,) * dims), **options
    )


LAYERS: list[Case] = [
    layer("conv1d", 1, lambda: nn.Conv1d(4, 4, 3, stride=2, padding=1)),
    layer("conv2d-grouped", 2, lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same", padding_mode="reflect")),
    layer("conv2d-dilated", 2, lambda: nn.Conv2d(4, 2, (3, 2), dilation=2)),
    layer("conv2d-depthwise", 2, lambda: nn.Conv2d(4, 4, 3, groups=4, padding_mode="circular", padding=1)),
    layer("conv3d", 3, lambda: nn.Conv3d(4, 2, 2), size=3),
    layer("conv-transpose1d", 1, lambda: nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1)),
    layer("conv-transpose2d", 2, lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, groups=2), size=3),
    layer("conv-transpose3d", 3, lambda: nn.ConvTranspose3d(4, 2, 2), size=2),
    layer("batchnorm1d-train", 1, lambda: nn.BatchNorm1d(4)),
    layer("batchnorm1d-eval", 1, lambda: nn.BatchNorm1d(4), train=False),
    layer("batchnorm2d-plain", 2, lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
    layer("batchnorm3d", 3, lambda: nn.BatchNorm3d(4), size=2),
    layer("groupnorm", 2, lambda: nn.GroupNorm(2, 4)),
    layer("instancenorm", 2, lambda: nn.InstanceNorm2d(4, affine=True)),
    layer("instancenorm-eval", 2, lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), train=False),
    layer("layernorm", 1, lambda: nn.LayerNorm((4, 6))),
    layer("rmsnorm", 1, lambda: nn.RMSNorm((4, 6))),
    layer("local-response", 2, lambda: nn.LocalResponseNorm(3)),
    layer("max-pool1d", 1, lambda: nn.MaxPool1d(3, 2, padding=1)),
    layer("max-pool2d", 2, lambda: nn.MaxPool2d(2, ceil_mode=True), size=5),
    layer("max-pool3d", 3, lambda: nn.MaxPool3d(2), size=4),
    layer("avg-pool1d", 1, lambda: nn.AvgPool1d(3, 2, padding=1)),
    layer("avg-pool2d", 2, lambda: nn.AvgPool2d(2, count_include_pad=False, padding=1)),
    layer("avg-pool3d", 3, lambda: nn.AvgPool3d(2), size=4),
    layer("lp-pool", 2, lambda: nn.LPPool2d(2, 2)),
    layer("adaptive-max1d", 1, lambda: nn.AdaptiveMaxPool1d(4)),
    layer("adaptive-max2d", 2, lambda: nn.AdaptiveMaxPool2d(4)),
    layer("adaptive-max3d", 3, lambda: nn.AdaptiveMaxPool3d(2), size=3),
    layer("adaptive-avg1d", 1, lambda: nn.AdaptiveAvgPool1d(4)),
    layer("adaptive-avg2d", 2, lambda: nn.AdaptiveAvgPool2d((4, None))),
    layer("adaptive-avg3d", 3, lambda: nn.AdaptiveAvgPool3d(2), size=3),
    layer("fractional-max", 2, lambda: nn.FractionalMaxPool2d(2, output_size=3)),
    *(
        layer(f"upsample-{m}", 2, lambda m=m: nn.Upsample(scale_factor=2, mode=m), size=3)
        for m in ("nearest", "bilinear", "bicubic")
    ),
    layer("upsample-linear", 1, lambda: nn.Upsample(size=7, mode="linear", align_corners=True), size=3),
    layer("upsample-trilinear", 3, lambda: nn.Upsample(scale_factor=2, mode="trilinear"), size=2),
    layer("upsample-antialias", 2, lambda: Lambda(lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True))),
    *(
        layer(f"pad-{m}", 2, lambda m=m: Lambda(lambda x: F.pad(x, (1, 2, 2, 1), mode=m)), size=4)
        for m in ("constant", "reflect", "replicate", "circular")
    ),
    layer("fold", 2, lambda: nn.Sequential(nn.Unfold(2), nn.Fold((6, 6), 2))),
    layer("pixel-shuffle", 2, lambda: nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(3))),
    layer("channel-shuffle", 2, lambda: nn.ChannelShuffle(2)),
    layer(
        "grid-sample",
        2,
        lambda: Lambda(lambda x: F.grid_sample(x[:, :2], x[:, 2:].tanh().movedim(1, -1), align_corners=False)),
        size=4,
    ),
    layer("dropout2d", 2, lambda: nn.Dropout2d(0.5)),
    layer("feature-alpha-dropout", 2, lambda: nn.FeatureAlphaDropout(0.3)),
]

# -- losses: of a prediction that varies, and a target -------------------------------------------------------------

_Y = torch.linspace(-1.3, 1.7, 12, dtype=F64).view(4, 3)
_LABELS = torch.tensor([0, 2, 1, 2])
_ONE = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64)


def _multi_margin(x: Tensor) -> Tensor:
    """Written out, for torch's has no double backward."""
    margins = (1 - x.gather(1, _LABELS[:, None]) + x).clamp(min=0)
    return (margins * (1 - F.one_hot(_LABELS, 3))).sum() / 12


def _multilabel_margin(x: Tensor) -> Tensor:
    """Written out for the labels 0 and 1 of each row."""
    return (1 - x[:, :2] + x[:, 2:]).clamp(min=0).sum() / 12


def _ctc(x: Tensor) -> Tensor:
    """The sum over all paths of four steps that spell 1, 2 (0 is the blank), written out."""
    logs = x.view(4, 3).log_softmax(-1)
    paths = [p for p in itertools.product(range(3), repeat=4) if [k for k, _ in itertools.groupby(p) if k] == [1, 2]]
    return -torch.stack([sum(logs[t, k] for t, k in enumerate(p)) for p in paths]).logsumexp(0) / 2


# (name, loss, and a program of equal value where torch's loss has no double backward)
LOSSES: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]] = [
    ("l1", lambda x: F.l1_loss(x, _Y), None),
    ("mse", lambda x: F.mse_loss(x, _Y), None),
    ("mse-both-vary", lambda x: F.mse_loss(x, x.flip(0).sin()), None),
    ("huber", lambda x: F.huber_loss(x, _Y, delta=0.5), None),
    ("smooth-l1", lambda x: F.smooth_l1_loss(x, _Y, beta=0.5), None),
    ("cross-entropy", lambda x: F.cross_entropy(x, _LABELS), None),
    ("cross-entropy-smooth", lambda x: F.cross_entropy(x, _LABELS, label_smoothing=0.1, weight=_Y[0] + 2), None),
    ("cross-entropy-soft", lambda x: F.cross_entropy(x, _Y.softmax(-1)), None),
    ("cross-entropy-ignore", lambda x: F.cross_entropy(x, _LABELS, ignore_index=2, reduction="sum"), None),
    ("nll", lambda x: F.nll_loss(x.log_softmax(-1), _LABELS), None),
    ("nll-2d", lambda x: F.nll_loss(x.view(1, 3, 2, 2).log_softmax(1), _LABELS.view(1, 2, 2)), None),
    ("kl", lambda x: F.kl_div(x.log_softmax(-1), _Y.softmax(-1), reduction="batchmean"), None),
    (
        "kl-log-both",
        lambda x: F.kl_div(x.log_softmax(-1), (2 * x).log_softmax(-1), reduction="sum", log_target=True),
        None,
    ),
    ("bce", lambda x: F.binary_cross_entropy(x.sigmoid(), _Y.sigmoid(), weight=_Y.exp()), None),
    ("bce-logits", lambda x: F.binary_cross_entropy_with_logits(x, _Y.sigmoid(), pos_weight=_Y[0].exp()), None),
    ("poisson-nll", lambda x: F.poisson_nll_loss(x, _Y.exp(), full=True), None),
    ("gaussian-nll", lambda x: F.gaussian_nll_loss(x, _Y, x.exp()), None),
    ("hinge", lambda x: F.hinge_embedding_loss(x, _ONE[:, None].expand(4, 3)), None),
    ("soft-margin", lambda x: F.soft_margin_loss(x, _Y.sign()), None),
    ("multi-margin", lambda x: F.multi_margin_loss(x, _LABELS), _multi_margin),
    ("multilabel-margin", lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, 1, -1]] * 4)), _multilabel_margin),
    ("multilabel-soft-margin", lambda x: F.multilabel_soft_margin_loss(x, (_Y > 0).double()), None),
    ("margin-ranking", lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], _ONE, margin=0.3), None),
    ("cosine-embedding", lambda x: F.cosine_embedding_loss(x, _Y, _ONE, margin=-0.5), None),
    ("triplet", lambda x: F.triplet_margin_loss(x, _Y, x.sin() + 1), None),
    (
        "ctc",
        lambda x: F.ctc_loss(
            x.view(4, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
        ),
        _ctc,
    ),
]

# -- elementwise functions: (name, function, domain). A new rule is one line in the rules and one line here ----------

REAL, POSITIVE, UNIT, ABOVE_ONE = (-2.0, 2.0), (0.2, 3.0), (-0.9, 0.9), (1.1, 3.0)

ELEMENTWISE: list[tuple[str, Callable[[Tensor], Tensor], tuple[float, float]]] = [
    ("abs", torch.abs, REAL),
    ("acos", torch.acos, UNIT),
    ("acosh", torch.acosh, ABOVE_ONE),
    ("asin", torch.asin, UNIT),
    ("asinh", torch.asinh, REAL),
    ("atan", torch.atan, REAL),
    ("atanh", torch.atanh, UNIT),
    ("ceil", torch.ceil, REAL),
    ("celu", lambda x: F.celu(x, 2.0), REAL),
    ("clamp", lambda x: x.clamp(-0.5, 1.0), REAL),
    ("cos", torch.cos, REAL),
    ("cosh", torch.cosh, REAL),
    ("deg2rad", torch.deg2rad, REAL),
    ("digamma", torch.digamma, POSITIVE),
    ("div-scalar", lambda x: 2.0 / x, POSITIVE),
    ("elu", lambda x: F.elu(x, 0.7), REAL),
    ("entr", torch.special.entr, POSITIVE),
    ("erf", torch.erf, REAL),
    ("erfc", torch.erfc, REAL),
    ("erfcx", torch.special.erfcx, REAL),
    ("erfinv", torch.erfinv, UNIT),
    ("exp", torch.exp, REAL),
    ("exp2", torch.exp2, REAL),
    ("expm1", torch.expm1, REAL),
    ("floor", torch.floor, REAL),
    ("frac", torch.frac, REAL),
    ("gelu", F.gelu, REAL),
    ("gelu-tanh", lambda x: F.gelu(x, approximate="tanh"), REAL),
    ("hardshrink", F.hardshrink, REAL),
    ("hardswish", F.hardswish, (-4.0, 4.0)),
    ("hardtanh", F.hardtanh, REAL),
    ("i0", torch.i0, REAL),
    ("i0e", torch.special.i0e, REAL),
    ("i1", torch.special.i1, POSITIVE),
    ("i1e", torch.special.i1e, POSITIVE),
    ("leaky_relu", F.leaky_relu, REAL),
    ("lerp", lambda x: torch.lerp(x, x.sin(), 0.3), REAL),
    ("lgamma", torch.lgamma, POSITIVE),
    ("log", torch.log, POSITIVE),
    ("log10", torch.log10, POSITIVE),
    ("log1p", torch.log1p, POSITIVE),
    ("log2", torch.log2, POSITIVE),
    ("log_ndtr", torch.special.log_ndtr, REAL),
    ("logit", torch.logit, (0.1, 0.9)),
    ("logit-eps", lambda x: torch.logit(x, 0.2), (0.1, 0.9)),
    ("logsigmoid", F.logsigmoid, REAL),
    ("mish", F.mish, REAL),
    ("mvlgamma", lambda x: torch.mvlgamma(x, 2), ABOVE_ONE),
    ("nan_to_num", torch.nan_to_num, REAL),
    ("ndtr", torch.special.ndtr, REAL),
    ("ndtri", torch.special.ndtri, (0.1, 0.9)),
    ("neg", torch.neg, REAL),
    ("polygamma", lambda x: torch.polygamma(2, x), POSITIVE),
    ("pow-2.5", lambda x: x**2.5, POSITIVE),
    ("pow-minus-2", lambda x: x**-2, POSITIVE),
    ("pow-of-2", lambda x: 2.0**x, REAL),
    ("rad2deg", torch.rad2deg, REAL),
    ("reciprocal", torch.reciprocal, POSITIVE),
    ("relu", F.relu, REAL),
    ("relu6", F.relu6, (-2.0, 8.0)),
    ("remainder-scalar", lambda x: torch.remainder(x, 0.7), REAL),
    ("round", torch.round, REAL),
    ("round-decimals", lambda x: torch.round(x, decimals=1), REAL),
    ("rrelu-eval", lambda x: F.rrelu(x, training=False), REAL),
    ("rsqrt", torch.rsqrt, POSITIVE),
    ("rsub", lambda x: torch.rsub(x, 2.0, alpha=3.0), REAL),
    ("selu", F.selu, REAL),
    ("sigmoid", torch.sigmoid, REAL),
    ("sign", torch.sign, REAL),
    ("silu", F.silu, REAL),
    ("sin", torch.sin, REAL),
    ("sinc", torch.sinc, POSITIVE),
    ("sinh", torch.sinh, REAL),
    ("softplus", lambda x: F.softplus(x, beta=1.5), REAL),
    ("softplus-threshold", lambda x: F.softplus(x, threshold=0.5), REAL),
    ("softshrink", F.softshrink, REAL),
    ("softsign", F.softsign, REAL),
    ("sqrt", torch.sqrt, POSITIVE),
    ("square", torch.square, REAL),
    ("tan", torch.tan, UNIT),
    ("tanh", torch.tanh, REAL),
    ("tanhshrink", F.tanhshrink, REAL),
    ("threshold", lambda x: F.threshold(x, 0.3, -1.0), REAL),
    ("trunc", torch.trunc, REAL),
    ("polygamma-0", lambda x: torch.polygamma(0, x), POSITIVE),
]

# functions of two tensors: (name, function, domain of the first, domain of the second)
ELEMENTWISE_OF_TWO: list[tuple[str, Callable[[Tensor, Tensor], Tensor], tuple[float, float], tuple[float, float]]] = [
    ("add-alpha", lambda a, b: torch.add(a, b, alpha=0.3), REAL, REAL),
    ("addcdiv", lambda a, b: torch.addcdiv(a, a.sin(), b, value=0.3), REAL, POSITIVE),
    ("addcmul", lambda a, b: torch.addcmul(a, a.sin(), b, value=0.3), REAL, REAL),
    ("atan2", torch.atan2, REAL, POSITIVE),
    ("clamp-tensors", lambda a, b: torch.clamp(a, -b, b), REAL, POSITIVE),
    ("copysign", torch.copysign, REAL, REAL),
    ("div", torch.div, REAL, POSITIVE),
    ("div-floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), REAL, POSITIVE),
    ("float_power", torch.float_power, POSITIVE, REAL),
    ("fmax", torch.fmax, REAL, REAL),
    ("fmin", torch.fmin, REAL, REAL),
    ("fmod", torch.fmod, REAL, POSITIVE),
    ("hypot", torch.hypot, REAL, POSITIVE),
    ("ldexp", torch.ldexp, REAL, REAL),
    ("lerp-weight", lambda a, b: torch.lerp(a, b, a * b), REAL, REAL),
    ("logaddexp", torch.logaddexp, REAL, REAL),
    ("logaddexp2", torch.logaddexp2, REAL, REAL),
    ("maximum", torch.maximum, REAL, REAL),
    ("minimum", torch.minimum, REAL, REAL),
    ("mul", torch.mul, REAL, REAL),
    ("pow", torch.pow, POSITIVE, REAL),
    ("prelu", lambda a, b: F.prelu(a, b[:1]), REAL, REAL),
    ("remainder", torch.remainder, REAL, POSITIVE),
    ("sub-alpha", lambda a, b: torch.sub(a, b, alpha=0.3), REAL, REAL),
    ("where", lambda a, b: torch.where(a > b, a * b, b), REAL, REAL),
    ("xlog1py", torch.special.xlog1py, REAL, POSITIVE),
    ("xlogy", torch.xlogy, REAL, POSITIVE),
]
