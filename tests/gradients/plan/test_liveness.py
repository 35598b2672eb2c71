"""Entries that no loss reads get no noise; tokens in front of a norm get it in proportion to their length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from exactness import LABELS, B, check_exact, normal
from jetplane.gradients.noise.balance import sizes
from jetplane.gradients.plan.noise_plan import Site

TOKENS, WIDTH = 5, 4


class ClassToken(nn.Module):
    """A transformer with norms first, of which one token is read."""

    def __init__(self, read: Callable[[Tensor], Tensor] = lambda h: h[:, 0]) -> None:
        super().__init__()
        self.patch, self.head, self.read = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3), read
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(TOKENS, WIDTH) / 50)
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 2, 6, **layer) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], 1) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.read(h))


def losses_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: F.cross_entropy(model(x), LABELS, reduction="none")


@pytest.mark.parametrize(
    ("read", "tokens"),
    [
        (lambda h: h[:, 0], 1),
        (lambda h: h[:, -1], 1),
        (lambda h: h[:, 1:4:2].mean(1), 2),
        (lambda h: h[:, -2:].sum(1) + h[:, 0], 3),
        (lambda h: h.transpose(0, 1)[2], 1),
        (lambda h: F.layer_norm(h, (WIDTH,))[:, 1], 1),
        (lambda h: h.mean(1), TOKENS),
        (lambda h: h[torch.arange(B), LABELS], TOKENS),  # which token is data: none may be left out
    ],
)
def test_a_transformer_of_which_some_tokens_are_read(read: Callable[[Tensor], Tensor], tokens: int) -> None:
    torch.manual_seed(0)
    model = ClassToken(read).double()
    sites = check_exact(model, losses_of(model), normal(B, TOKENS - 1, 3))
    counted = [site.numbers * site.shape[-2] / site.shape.numel() for site in sites]
    assert counted[:4] == [TOKENS] * 4  # tokens with noise in the first block
    assert counted[5:8] == [tokens] * 3  # the second one's attention, projection and hidden layer
    assert [site.normed for site in sites[:7]] == [True, False, True, False, True, False, True]


@pytest.mark.parametrize(
    "behind",
    [
        lambda h, w: (h @ w)[:, 1],
        lambda h, w: (h.reshape(-1, 4) @ w).reshape(h.shape)[:, 1].tanh(),
        lambda h, w: torch.addmm(torch.ones(4), h.flatten(0, 1), w).unflatten(0, h.shape[:2])[:, 1:2],
        lambda h, w: torch.bmm(h, w.expand(B, 4, 4)).permute(1, 0, 2)[1],
        lambda h, w: F.rms_norm(h @ w, (4,)).unsqueeze(0).squeeze(0)[:, 1],
        lambda h, w: (h @ w).softmax(-1)[:, 1],
        lambda h, w: (h @ w)[:, 1] + (h @ w).clone()[:, 1],
    ],
)
def test_gradients_of_what_is_not_read_are_zero(behind: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    places, weight = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4))
    estimate = jp.ForwardGradient([places, weight])
    with jp.forward_only():
        estimate(lambda x: behind((x + places).sigmoid(), weight).flatten(1).cos().sum(1), torch.randn(B, 3, 4))
    assert places.grad[1].abs().min() > 0 and not places.grad[[0, 2]].any()


def test_what_is_read_twice_is_read_wherever_one_of_them_reads() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))

    def losses(x: Tensor) -> Tensor:
        h = model(x)
        return h[:, 0].cos().sum(1) + (2 * h)[:, 2].sin().sum(1)

    (site,) = check_exact(model.double(), losses, normal(B, 3, 3))[:1]
    assert site.live.flatten().tolist() == [True, False, True]


def test_a_class_token_that_starts_at_zero_does_not_drown_the_rest() -> None:
    """Its derivative is some fifty times that of the others; the noise of all other weights must not be that of it."""
    torch.manual_seed(2)
    model = ClassToken()
    with torch.no_grad():
        model.places[1:] += torch.randn(TOKENS - 1, WIDTH)
    x, losses = torch.randn(B, TOKENS - 1, 3), losses_of(model)
    weight = model.blocks[0].linear1.weight

    def spread(lengths: Callable[[Site, Tensor], Tensor | None]) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jetplane.gradients.noise.noise_shape.sizes", lengths)
            estimate, found = jp.ForwardGradient(model.parameters(), control=False), []
            for _ in range(25):
                model.zero_grad()
                estimate(losses, x)
                found.append(weight.grad.clone())
        return float(torch.stack(found).var(0).sum())

    assert spread(sizes) < 0.5 * spread(lambda site, activation: None)


def test_a_batch_is_not_written_out() -> None:
    model = ClassToken()
    sites = jp.ForwardGradient(model.parameters()).sites(losses_of(model), torch.randn(B, TOKENS - 1, 3))
    assert {tuple(site.live.shape) for site in sites if site.live is not None} == {(1, 1, TOKENS, 1), (1, TOKENS, 1)}
