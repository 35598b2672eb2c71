"""Places that all that depends on a layer passes."""

from __future__ import annotations

import torch
from test_liveness import TOKENS, WIDTH, ClassToken, losses_of
from torch import Tensor, nn
from torch.nn import functional as F

import jetplane as jp
from exactness import LABELS, B, check_exact, normal


def test_noise_enters_behind_the_gates_of_a_cell() -> None:
    cells, out = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3)
    module = nn.ModuleList([cells, out])

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out(cells(x)[0][:, -1]), y, reduction="none")

    sites = jp.ForwardGradient(module.parameters()).sites(losses, torch.randn(B, 3, 5), LABELS)
    # and does for the product with all inputs as well
    assert [tuple(site.shape) for site in sites] == [(B, 6)] * 3


def test_patches_and_class_token_share_a_site() -> None:
    model = ClassToken()
    first, *others = jp.ForwardGradient(model.parameters()).sites(losses_of(model), torch.randn(B, TOKENS - 1, 3))
    assert first.shape == (B, TOKENS, WIDTH) and "patch" in first.where and "ClassToken" in first.where
    assert not any("patch" in site.where for site in others)


def test_layers_that_are_concatenated_share_a_site_and_keep_their_dead_units() -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(3, 5), "out": nn.Linear(11, 3)}).double()

    def losses(x: Tensor) -> Tensor:
        joined = torch.cat([model["a"](x).relu(), x[:, :2], model["b"](x)], 1)
        return F.cross_entropy(model["out"](joined.tanh()), LABELS, reduction="none")

    (site,) = check_exact(model, losses, normal(B, 3))
    assert site.shape == (B, 11) and site.where.count("addmm") == 2
