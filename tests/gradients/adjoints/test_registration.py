"""Operations of one's own: with an adjoint, without one, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jetplane as jp
from exactness import B, check_exact, normal
from jetplane.gradients.adjoints import adjoint as table


@torch.library.custom_op("jpadjoint::times", mutates_args=())
def times(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@torch.library.custom_op("jpadjoint::known", mutates_args=())
def known(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@torch.library.custom_op("jpadjoint::pair", mutates_args=())
def pair(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, x @ (2 * w)


@torch.library.custom_op("jpadjoint::noisy", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noisy(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@torch.library.custom_op("jpadjoint::noted", mutates_args=("log",))
def noted(x: Tensor, w: Tensor, log: Tensor) -> Tensor:
    log.add_(1)
    return x @ w


for one in (times, known):
    one.register_vmap(lambda info, dims, x, w: (x @ w, 0))
known.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1].mT, ctx.saved_tensors[0].mT @ g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
OPS = torch.ops.jpadjoint
PULL = {"x": lambda g, y, x, w: g @ w.mT, "w": lambda g, y, x, w: x.mT @ g}


@pytest.fixture(autouse=True)
def clean_tables() -> Iterator[None]:
    yield
    for name in ("times", "known", "pair", "noisy", "noted"):
        with contextlib.suppress(ValueError):
            jp.register.remove(getattr(OPS, name))


class Own(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.a, self.b, self.w = op, nn.Linear(4, 3), nn.Linear(5, 2), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.op(self.a(x).tanh(), self.w).tanh()).square().sum(1)


def test_a_bilinear_operation_that_autograd_knows_works_by_default() -> None:
    jp.register.bilinear(OPS.known)
    torch.manual_seed(0)
    model = Own(known).double()
    check_exact(model, model, normal(B, 4))


def test_a_bilinear_operation_that_autograd_does_not_know_works_with_an_adjoint() -> None:
    jp.register.bilinear(OPS.times)
    torch.manual_seed(0)
    model, plain, x = Own(times).double(), Own(torch.matmul).double(), normal(B, 4)
    plain.load_state_dict(model.state_dict())
    remedy = r"jpadjoint.times.default has no local product for its parameter w \(3, 5\).*autograd cannot .*"
    remedy += r"expected an adjoint, as of jetplane.register.adjoint\(torch.ops.jpadjoint.times.default, \.\.\.\)"
    with pytest.raises(jp.MissingRule, match=remedy):
        jp.forward_gradient(model, model.named_parameters(), x)
    jp.register.adjoint(OPS.times, PULL)
    ends = []
    for one in (model, plain):
        with jp.forward_only(strict=True) as seen:
            jp.forward_gradient(one, one.parameters(), x, samples=3, control=False)
        assert not seen.defaults
        ends.append([p.grad for p in one.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_an_adjoint_is_used_for_what_varies_behind_the_last_layer() -> None:
    """Then the derivative by the layer before is exact, where noise would enter otherwise."""
    jp.register.bilinear(OPS.known)
    layer, w, x = nn.Linear(4, 3).double(), normal(3, 2), normal(B, 4)

    def losses(x: Tensor) -> Tensor:
        return known(layer(x).tanh(), w).square().sum(1)

    assert len(jp.ForwardGradient(layer.parameters()).sites(losses, x)) == 1
    jp.register.adjoint(OPS.known, PULL)
    assert check_exact(layer, losses, x) == []


def test_registering_twice_removing_and_unknown_arguments() -> None:
    jp.register.adjoint(OPS.times, PULL)
    with pytest.raises(ValueError, match=r"jpadjoint.times already has an adjoint; expected one for each"):
        jp.register.adjoint(OPS.times, PULL)
    assert table.find(OPS.times.default, (1,)).known and table.find(OPS.times.default, ("w",)).known
    jp.register.remove(OPS.times)
    assert table.lookup(OPS.times.default) is table.UNKNOWN
    with pytest.raises(ValueError, match=r"jpadjoint.times has no rule to remove"):
        jp.register.remove(OPS.times)
    with pytest.raises(ValueError, match=r"jpadjoint.times has no adjoint to remove"):
        table.remove(OPS.times)
    with pytest.raises(ValueError, match=r"pull is of the arguments \['v'\]; expected some of \['x', 'w'\], those of"):
        jp.register.adjoint(OPS.times.default, {"v": lambda g, y, x, w: g})
    with pytest.raises(ValueError, match=r"pull is of the arguments \[\]; expected some of \['x', 'w'\]"):
        jp.register.adjoint(OPS.times.default, {})
    jp.register.bilinear(OPS.times)
    jp.register.adjoint(OPS.times.default, PULL)
    jp.register.remove(OPS.times.default)  # the rule is of the packet
    jp.register.remove(OPS.times)


def _product_rule(pairs: Any, op: Any, x: Any, w: Any, *rest: Any) -> Any:
    out = op(getattr(x, "primal", x), getattr(w, "primal", w), *rest)
    rows = torch.zeros(pairs.k, *(out[0] if isinstance(out, tuple) else out).shape)
    made = [jp.Operand(one, rows, None) for one in (out if isinstance(out, tuple) else (out,))]
    return tuple(made) if isinstance(out, tuple) else made[0]


@pytest.mark.parametrize(
    ("name", "rest", "reason"),
    [("noisy", (), "it draws random numbers"), ("noted", (torch.zeros(1),), "it writes to its arguments")],
)
def test_what_cannot_be_run_again_has_no_default(name: str, rest: Any, reason: str) -> None:
    op, w = getattr(OPS, name), nn.Parameter(torch.ones(3, 2))
    jp.register.jet(op.default, _product_rule)
    try:
        with pytest.raises(jp.MissingRule, match=f"{name}.default has no local product.*: {reason}; expected an adj"):
            jp.forward_gradient(lambda x: op(x, w, *rest).sum(1), [w], torch.ones(4, 3))
    finally:
        jp.register.remove(op.default)


def test_a_layer_of_which_two_results_are_read_is_refused() -> None:
    jp.register.jet(OPS.pair, _product_rule)
    jp.register.adjoint(OPS.pair, PULL)
    w = nn.Parameter(torch.ones(3, 2))
    text = r"the losses depend on more than the first result of jpadjoint.pair.default.*expected an operation with one"
    with pytest.raises(jp.UnsupportedProgram, match=text):
        jp.forward_gradient(lambda x: sum(pair(x, w)).sum(1), [w], torch.ones(4, 3))


def test_behind_an_operation_without_a_record_everything_may_be_read() -> None:
    jp.register.bilinear(OPS.known)
    first, w = nn.Linear(3, 3), torch.ones(3, 3)

    def losses(x: Tensor, op: Any) -> Tensor:
        return op(first(x).tanh(), w)[:, 0].sin().sum(1)

    x = torch.randn(B, 2, 3)
    (plain,) = jp.ForwardGradient(first.parameters()).sites(losses, x, torch.matmul)
    (own,) = jp.ForwardGradient(first.parameters()).sites(losses, x, known)
    assert plain.live is not None and own.live is None and own.numbers == own.shape.numel()
