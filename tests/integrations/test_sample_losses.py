"""The losses of single samples of programs that return one number: against autograd, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import jetplane as jp
from jetplane.integrations import needed
from jetplane.integrations.sample_losses import batch_size, losses_of_samples

B, C, T = 6, 4, 3
LABELS = torch.tensor([0, 3, 1, 2, 2, 1])
SOME = torch.tensor([[0, -100, 1], [1, 1, -100], [2, 3, 0], [-100, -100, 2], [0, 1, 2], [3, 3, 3]])  # (B, T)
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)

# a loss as people write it, of logits (B, C) or (B, T, C), and the rows that it is the mean of, by hand
Case = tuple[str, tuple[int, ...], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def tokens(z: Tensor) -> Tensor:
    """Cross entropies (B, T), zero where a label is ignored."""
    return F.cross_entropy(z.transpose(1, 2), SOME, reduction="none")


CASES: list[Case] = [
    ("mean", (B, C), lambda z: F.cross_entropy(z, LABELS), lambda z: F.cross_entropy(z, LABELS, reduction="none")),
    (
        "module",
        (B, C),
        lambda z: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(z, LABELS),
        lambda z: F.cross_entropy(z, LABELS, reduction="none", label_smoothing=0.1),
    ),
    (
        "weights",
        (B, C),
        lambda z: F.cross_entropy(z, LABELS, weight=WEIGHT),
        lambda z: F.cross_entropy(z, LABELS, weight=WEIGHT, reduction="none") * B / WEIGHT[LABELS].sum(),
    ),
    ("tokens", (B, T, C), lambda z: F.cross_entropy(z.view(-1, C), SOME.view(-1)), lambda z: tokens(z).sum(1) * B / 14),
    (
        "sum",
        (B, T, C),
        lambda z: F.cross_entropy(z.view(-1, C), SOME.view(-1), reduction="sum") / torch.tensor(14),
        lambda z: tokens(z).sum(1) * B / 14,
    ),
    ("square", (B, C), lambda z: (z.tanh() ** 2).mean(), lambda z: (z.tanh() ** 2).mean(1)),
    (
        "together",
        (B, C),
        lambda z: F.cross_entropy(z, LABELS) + 0.5 * F.mse_loss(z, z.new_ones(B, C)) - z.sum() / 7,
        lambda z: F.cross_entropy(z, LABELS, reduction="none") + 0.5 * (z - 1).square().mean(1) - z.sum(1) * B / 7,
    ),
    (
        "in place",
        (B, C),
        lambda z: F.cross_entropy(z, LABELS).mul_(3.0),
        lambda z: 3 * F.cross_entropy(z, LABELS, reduction="none"),
    ),
    (
        "probabilities",
        (B, C),
        lambda z: F.kl_div(z.log_softmax(1), z.new_full((B, C), 0.25), reduction="batchmean"),
        lambda z: F.kl_div(z.log_softmax(1), z.new_full((B, C), 0.25), reduction="none").sum(1),
    ),
    ("as they are", (B, C), lambda z: z.square().sum(1), lambda z: z.square().sum(1)),
]


@pytest.mark.parametrize(("shape", "loss", "rows"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_rows_are_those_of_the_samples_and_their_mean_is_the_loss(
    shape: tuple[int, ...], loss: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor]
) -> None:
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found, returned = losses_of_samples(lambda: loss(z), B)
    torch.testing.assert_close(found, rows(z))
    torch.testing.assert_close(found.mean(), loss(z).mean())
    (ours,), (exact,) = (torch.autograd.grad(one, z) for one in (found.mean(), loss(z).mean()))
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(returned, loss(z))


def test_a_forward_gradient_of_the_mean_is_that_of_the_losses() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, C)).double()
    x, grads = torch.randn(B, 5, dtype=torch.float64), []
    for program in (
        lambda x: losses_of_samples(lambda: F.cross_entropy(model(x), LABELS), B)[0],
        lambda x: F.cross_entropy(model(x), LABELS, reduction="none"),
    ):
        model.zero_grad()
        jp.ForwardGradient(model.parameters(), 4)(program, x)
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("program", "samples", "text"),
    [
        (
            lambda z: z.exp().mean().log(),
            None,
            "the loss is one number, .*, and how the samples make it cannot be seen",
        ),
        (lambda z: z.mean() * z.mean(), None, "expected a mean of losses of samples"),
        (lambda z: F.l1_loss(z, z + 1), 5, "expected a mean of losses of samples"),
    ],
)
def test_a_number_that_is_no_mean_of_samples_is_refused(program: Any, samples: int | None, text: str) -> None:
    z = torch.randn(B, C)
    with pytest.raises(ValueError, match=text):
        losses_of_samples(lambda: program(z), samples)


def test_the_loss_is_found_in_what_a_program_returns() -> None:
    z = torch.randn(B, C)
    losses, returned = losses_of_samples(lambda: {"loss": F.cross_entropy(z, LABELS), "logits": z})
    assert returned["logits"] is z and losses.shape == (B,)
    assert losses_of_samples(lambda: (F.cross_entropy(z, LABELS), z))[0].equal(losses)
    with pytest.raises(TypeError, match="the program returned dict without a loss; expected a tensor"):
        losses_of_samples(lambda: {})


def test_the_batch_size_is_that_of_the_first_tensor_with_axes() -> None:
    assert batch_size({"scale": torch.tensor(1.0), "x": torch.zeros(3, 2)}) == 3
    assert batch_size([1, "a"]) is None


def test_a_missing_package_is_named_with_the_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"needs the package no_such, .* pip install 'jetplane\[no_such\]'"):
        needed("no_such")
