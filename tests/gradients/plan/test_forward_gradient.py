"""Forward gradients are unbiased, exactly: with every coordinate in turn as the tangent they equal backprop.

The noise u is replaced by J = D rows sqrt(J) e_i, one for each entry i of each site, of which the mean of u u^T is the
identity as it is in expectation for the real noise. Nothing is left to chance, so equality is to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import (
    CASES,
    LABELS,
    B,
    Case,
    check_exact,
    normal,
)

# -- the programs -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A causal transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(4)

    def forward(self, t: Tensor) -> Tensor:
        h = self.tokens(t) + self.places(torch.arange(t.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1], dtype=torch.float64)
        return self.norm(self.block(h, src_mask=mask, is_causal=True)) @ self.tokens.weight.t()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of a checkpoint, rightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_estimate_with_all_coordinates_is_the_gradient(case: Case) -> None:
    model = case.model().double()
    sites = check_exact(model, lambda x, y: F.cross_entropy(model(x), y, reduction="none"), case.data(), LABELS)
    assert any(site.coupled for site in sites) == case.coupled


TOKENS = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(1))


def test_tied_causal_transformer_with_a_loss_for_each_token() -> None:
    model = Tied().double()

    def losses(t: Tensor) -> Tensor:  # (B, T)
        return F.cross_entropy(model(t[:, :-1]).transpose(1, 2), t[:, 1:], reduction="none")

    sites = check_exact(model, losses, TOKENS)
    assert not any(site.coupled for site in sites)  # samples are told apart, although B = T = 3
    # losses (B T,) of tokens that depend on each other are coupled
    sites = check_exact(model, lambda t: losses(t).flatten(), TOKENS)
    assert all(site.coupled for site in sites)


LOSSES = [
    lambda z, y: F.mse_loss(z, y, reduction="none"),
    lambda z, y: F.huber_loss(z, y, reduction="none"),
    lambda z, y: F.l1_loss(z, y, reduction="none").sum(1),
    lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction="none").mean(1),
    lambda z, y: F.binary_cross_entropy(z.sigmoid(), y, reduction="none"),
    lambda z, y: F.cross_entropy(z, y.softmax(1), reduction="none"),
    lambda z, y: F.cross_entropy(z, y.argmax(1), reduction="none", label_smoothing=0.1),
    lambda z, y: F.nll_loss(z.log_softmax(1), y.argmax(1), reduction="none"),
    lambda z, y: F.kl_div(z.log_softmax(1), y.softmax(1), reduction="none").sum(1),
    lambda z, y: -z.softmax(1).gather(1, y.argmax(1, keepdim=True)).squeeze(1),
    lambda z, y: z.logsumexp(1) - z[:, 0],
]


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_losses_get_an_exact_derivative(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    # one layer, and behind it the loss: no noise at all
    model = nn.Linear(5, 4).double()
    assert check_exact(model, lambda x, y: loss(model(x), y), normal(B, 5), torch.rand(B, 4, dtype=torch.float64)) == []


def test_other_programs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    x = normal(B, 3)

    def contrastive(x: Tensor) -> Tensor:
        z = F.normalize(model(x), dim=1)
        return F.cross_entropy(z @ z.T / 0.5, torch.arange(B).roll(1), reduction="none")

    assert all(site.coupled for site in check_exact(model, contrastive, x))
    decayed = check_exact(
        model, lambda x: model(x).square().sum(1) + sum(p.square().sum() for p in model.parameters()), x
    )
    assert len(decayed) == 1
    check_exact(model, lambda: model(x).square())  # data from outside, and losses (B, ...)
    check_exact(model, lambda x: model(x.T.contiguous().T).square().sum(1)[:1], x)  # one sample's loss


def test_derivatives_by_data_inside_the_program() -> None:
    # the residual of a differential equation: jets inside, noise outside
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()

    def residual(x: Tensor) -> Tensor:
        return (jp.laplacian(lambda x: net(x).squeeze(-1), x, batch_ndim=1) + 1).square()

    check_exact(net, residual, normal(3, 2))


def test_latent_variables_and_segmentation() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.mean, self.spread, self.d = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.e(x).tanh()
            mean, spread = self.mean(h), self.spread(h)
            z = mean + torch.randn_like(mean) * (spread / 2).exp()
            return (self.d(z) - x).square().sum(1) - 0.5 * (1 + spread - mean**2 - spread.exp()).sum(1)

    class Segmentation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).relu()
            up = F.interpolate(self.b(F.max_pool2d(h, 2)), scale_factor=2, mode="bilinear")
            return self.c(torch.cat([h, up], 1))

    model = Autoencoder().double()
    check_exact(model, model, normal(B, 3))
    net = Segmentation().double()
    labels = torch.randint(0, 2, (2, 4, 4))
    check_exact(net, lambda x, y: F.cross_entropy(net(x), y, reduction="none"), normal(2, 1, 4, 4), labels)


class Placed(nn.Module):
    """Positions (1, T) that all samples share, as a model of Hugging Face's makes them."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(7, 8), nn.Embedding(3, 8)
        self.kinds = nn.Linear(2, 8) if learned else nn.Embedding(2, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, t: Tensor) -> Tensor:
        kinds = torch.ones(1, 3, 2).double() if isinstance(self.kinds, nn.Linear) else torch.zeros_like(t)
        h = self.tokens(t) + self.kinds(kinds) + self.places(torch.arange(3)[None])
        return self.out(self.norm(h).tanh().mean(1))


@pytest.mark.parametrize("samples", [B, 6])
@pytest.mark.parametrize("learned", [False, True])
def test_positions_that_samples_share_do_not_couple_them(samples: int, learned: bool) -> None:
    model, y = Placed(learned).double(), torch.arange(samples) % 4
    t = torch.randint(7, (samples, 3))
    sites = check_exact(model, lambda t, y: F.cross_entropy(model(t), y, reduction="none"), t, y)
    assert sites and not any(site.coupled for site in sites)


class Tabled(nn.Module):
    """Positions (T, d), and of pairs of them (heads, T, T), looked up by indices that are data."""

    def __init__(self, steps: int, width: int, heads: int, first: bool) -> None:
        super().__init__()
        self.embed, self.places, self.norm = nn.Linear(3, width), nn.Embedding(steps, width), nn.LayerNorm(width)
        self.query, self.pairs = nn.Linear(width, 2 * width), nn.Parameter(torch.randn(2 * steps - 1, heads))
        self.out, self.heads, self.first = nn.Linear(width, 3), heads, first
        each = torch.arange(steps)
        self.register_buffer("each", each)
        self.register_buffer("apart", (each[:, None] - each + steps - 1).flatten())

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(self.each)
        h = self.norm(self.embed(x) + (places[:, None] if self.first else places))
        h = h.transpose(0, 1) if self.first else h
        query, value = self.query(h).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.pairs[self.apart].view(len(self.each), len(self.each), -1).permute(2, 0, 1)
        mixed = (query @ value.mT + bias).softmax(-1) @ value
        return self.out((h + mixed.transpose(1, 2).flatten(2)).tanh().mean(1))


def tabled(sizes: tuple[int, ...], first: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    samples, steps, width, heads = sizes
    model, y = Tabled(steps, width, heads, first).double(), torch.arange(samples) % 3
    x = normal(steps, samples, 3) if first else normal(samples, steps, 3)
    return model, lambda x: F.cross_entropy(model(x), y, reduction="none"), x


LIKE = [(2, 2, 2, 2), (2, 4, 2, 1), (3, 3, 4, 2)]  # samples, steps, width, heads
SIZES = [sizes for sizes in itertools.product((2, 3, 4), (2, 3, 4), (2, 4), (1, 2)) if sizes not in LIKE]


@pytest.mark.parametrize(
    ("sizes", "first"),
    [(LIKE[0], False), (LIKE[1], True), (LIKE[2], True)]
    + [pytest.param(sizes, first, marks=pytest.mark.slow) for sizes in SIZES for first in (False, True)],
    ids=str,
)
def test_tables_are_not_taken_for_samples_whatever_their_sizes(sizes: tuple[int, ...], first: bool) -> None:
    torch.manual_seed(0)
    model, losses, x = tabled(sizes, first)
    sites = jp.ForwardGradient(model.parameters()).sites(losses, x)
    assert sites and not any(site.coupled for site in sites)
    if sizes == LIKE[0]:
        check_exact(model, losses, x)


def test_a_place_stays_where_moving_it_is_of_no_use() -> None:
    """What samples share goes through a layer of its own, and meets the samples in a product."""

    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.places = nn.Linear(3, 5), nn.Linear(2, 5), nn.Embedding(5, 5)
            self.register_buffer("classes", torch.randn(3, 2))
            self.register_buffer("each", torch.arange(5))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()[:, None] * self.places(self.each)
            return h.sum(1) @ self.b(self.classes).tanh().T

    torch.manual_seed(0)
    model, x, y = Prototypes().double(), normal(3, 3), torch.arange(3)
    sites = check_exact(model, lambda x: F.cross_entropy(model(x), y, reduction="none"), x, every_site=False)
    assert [(tuple(site.shape), site.coupled) for site in sites] == [((3, 5), False), ((3, 5), True)]


def test_what_couples_samples_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)).double(), normal(B, 3)
    estimate = jp.ForwardGradient(model.parameters(), probe_every=1)

    def losses(x: Tensor) -> Tensor:
        z = model(x)
        return (z - z.mean(0)).square().sum(1)

    for _ in range(3):
        estimate(losses, x)
    (record,) = [one for one in caplog.records if "are coupled at the output of" in one.getMessage()]
    assert record.levelname == "WARNING" and f"costs {B} times as much" in record.getMessage()
