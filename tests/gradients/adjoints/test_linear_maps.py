"""The adjoints of products and convolutions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from adjoint_cases import BY_MODULE, check_record
from exactness import B, check_exact, normal
from jetplane.gradients.adjoints import adjoint as table
from jetplane.gradients.adjoints.default import vjp
from jetplane.gradients.program.done import Done

aten = torch.ops.aten


@pytest.mark.parametrize("op", BY_MODULE["linear_maps"], ids=str)
def test_a_record_equals_the_default(op: Any) -> None:
    check_record(op)


ENDS = torch.tensor([4, 4, 8]).int()
GROUPED = {
    "weights by column": (torch.randn(8, 16), torch.randn(3, 8, 16).mT, ENDS),
    "groups of columns": (torch.randn(3, 8, 16), torch.randn(16, 8), ENDS),
    "groups of inner places": (torch.randn(8, 8), torch.randn(8, 16), ENDS),
    "no groups": (torch.randn(3, 8, 16), torch.randn(3, 16, 8)),
}


@pytest.mark.parametrize("args", GROUPED.values(), ids=list(GROUPED))
def test_a_grouped_product_equals_the_default_in_all_its_forms(args: Any) -> None:
    done = Done(aten._grouped_mm.default, args, {}, aten._grouped_mm(*args))
    delta, pull = torch.randn_like(done.result), table.lookup(done.func).product
    assert pull is not None
    for path in ((0,), (1,)):
        # the same terms, which a transposed operand may add up in another order
        torch.testing.assert_close(pull(delta, done, path), vjp(delta, done, path), rtol=1e-6, atol=1e-6)


class Mixture(nn.Module):
    """Two of three experts for each token, as Mixtral has them: tokens sorted by expert, two grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.router, self.out = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.gate_up, self.down = nn.Parameter(torch.randn(3, 8, 4)), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x).tanh()
        weights, chosen = self.router(h).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=3).cumsum(0).int()
        rows = h[order // 2].float()
        gate, up = F.grouped_mm(rows, self.gate_up.float().mT, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, self.down.float().mT, offs=ends).to(h)
        made = made[order.argsort()].unflatten(0, (len(x), 2)) * weights.unsqueeze(-1)
        return self.out(h + made.sum(1))


def test_experts_of_a_grouped_product_are_exact_without_a_default() -> None:
    torch.manual_seed(0)
    model, x, y = Mixture().double(), normal(B, 3), torch.arange(B) % 3
    check_exact(model, lambda x: F.cross_entropy(model(x), y, reduction="none"), x, every_site=False, close=1e-5)
    with jp.forward_only(strict=True):  # the products are of float32
        jp.forward_gradient(lambda x: F.cross_entropy(model(x), y, reduction="none"), model.parameters(), x)
