"""Results that are read after a pass: only tensors of this pass, as it left them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from cases import F64, along, assert_quadratic, randn
from jetplane.testing.oracle import double_backward

NOT_OURS = r"the tensor of shape \(\) was not computed in this pass.*; expected a tensor that was made inside the block"
WRITTEN = r"the tensor of shape \(\) was written in place after the pass.*; expected it as the pass left it"


def run(program: Callable[[Tensor], Tensor], **options: object) -> tuple[jp.perturb, Tensor, Tensor]:
    x = randn(3)
    with jp.perturb([x], [randn(2, 3)], **options) as jets:
        out = program(x)
    return jets, x, out


@pytest.mark.parametrize("curvature", ["exact", "ggn"])
def test_a_loss_that_is_computed_after_the_block(curvature: str) -> None:
    model, x, y = nn.Linear(3, 4).double(), randn(5, 3), torch.arange(5) % 4
    leaves = list(model.parameters())
    with jp.perturb(leaves, along(leaves, 2), curvature=curvature) as jets:
        out = model(x)
    with pytest.raises(jp.UnsupportedProgram, match=NOT_OURS):
        jets.quadratic(F.cross_entropy(out, y))


def test_arithmetic_and_writes_after_the_block() -> None:
    jets, _, loss = run(lambda x: x.square().sum())
    with pytest.raises(jp.UnsupportedProgram, match=NOT_OURS):
        jets.quadratic(loss * 10)
    loss.mul_(10)
    with pytest.raises(jp.UnsupportedProgram, match=WRITTEN):
        jets.quadratic(loss)


def test_a_tensor_of_another_pass() -> None:
    jets, _, _ = run(lambda x: x.square().sum())
    _, _, other = run(lambda x: x.square().sum())
    with pytest.raises(jp.UnsupportedProgram, match=NOT_OURS):
        jets.quadratic(other)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.ones((), dtype=F64),
        lambda x: torch.ones((), dtype=F64).mul_(2),
        lambda x: (x > 0).to(F64).sum(),
        lambda x: x.sum().fill_(1.0),
    ],
    ids=["made", "written", "of truth values", "overwritten"],
)
def test_a_constant_that_the_pass_made_is_zero(program: Callable[[Tensor], Tensor]) -> None:
    jets, _, loss = run(program, allow_unused=True)
    model = jets.quadratic(loss)
    assert not model.slope.any() and not model.curvature.any()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.square().sum().mul_(2),
        lambda x: torch.zeros(2, 3, dtype=F64).index_put_((torch.tensor(0),), x * x).sum().add_(1).view(()),
        lambda x: torch.stack([x.square().sum(), x.sum()]).mul_(3)[0],
        lambda x: F.relu(x.square(), inplace=True).sum(),
        lambda x: torch.cat([x, x]).view(2, 3).clone()[1].square_().sum().exp_(),
    ],
    ids=["in place", "scattered", "a view", "inplace module", "views"],
)
def test_writes_inside_the_block_count_as_its_own(program: Callable[[Tensor], Tensor]) -> None:
    x, v = randn(3).requires_grad_(), randn(2, 3)
    with jp.perturb([x], [v]) as jets:
        out = program(x)
    assert_quadratic(jets.quadratic(out), double_backward(lambda: program(x), [x], [v]))


def test_an_out_argument_counts_as_written_by_the_pass() -> None:
    x, v = randn(3).requires_grad_(), randn(2, 3)
    with jp.perturb([x], [v]) as jets:
        out = torch.add(x.square().sum(), x.sum(), out=torch.empty((), dtype=F64))
    assert_quadratic(jets.quadratic(out), double_backward(lambda: x.square().sum() + x.sum(), [x], [v]))


def test_leaves_data_and_views_after_the_block_can_be_read() -> None:
    x, data = randn(3), randn(3)
    with jp.perturb([x], [torch.eye(3, dtype=F64)]) as jets:
        out = x * data
    assert torch.equal(jets.of(x).tangent, torch.eye(3, dtype=F64))
    assert not jets.of(data).tangent.any()
    assert torch.equal(jets.of(out[1]).tangent, jets.of(out).tangent[:, 1])
