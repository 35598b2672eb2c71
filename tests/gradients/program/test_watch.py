"""The engine, watched: which values depend on parameters, and what may not be done to those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_of_rows

import jetplane as jp
from classifiers import X
from exactness import check_exact

PARAMETER = nn.Parameter(torch.ones(4, 3))
OTHER = nn.Parameter(torch.ones(3))


def written(x: Tensor) -> Tensor:
    PARAMETER.mul_(x.sum(1)[:4, None].abs().sum() * OTHER)
    return (x @ PARAMETER).sum(1)


def test_writing_into_a_parameter_is_refused() -> None:
    with pytest.raises(jp.UnsupportedProgram, match="writes into a parameter"):
        jp.forward_gradient(written, {"weight": PARAMETER, "other": OTHER}, X)


WIDE = nn.Parameter(torch.arange(16.0).reshape(4, 4).sin())


def layer(x: Tensor) -> Tensor:
    return x @ WIDE


EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
LAYOUT = "{} at .* makes a {} tensor of what depends on parameters; expected a dense one"
REFUSED = [
    (lambda x: layer(x).to_sparse().to_dense(), LAYOUT.format("aten._to_sparse.default", "sparse_coo")),
    (lambda x: layer(x).to_sparse_csr() @ torch.ones(4, 1), LAYOUT.format("aten._to_sparse_csr.*", "sparse_csr")),
    (
        lambda x: torch.sparse_coo_tensor(EDGES, OTHER, (3, 3)).to_dense()[0].sum() * x,
        LAYOUT.format("aten._sparse_coo_tensor.*", "sparse_coo"),
    ),
    (lambda x: layer(x).to_mkldnn().to_dense(), LAYOUT.format("aten.to_mkldnn.default", "mkldnn")),
    (
        lambda x: torch.nested.as_nested_tensor([*layer(x)]).to_padded_tensor(0.0),
        LAYOUT.format("aten._nested_tensor_from_tensor_list.*", "nested"),
    ),
    (lambda x: layer(x).view(torch.int32).view(torch.float32), "reinterprets perturbed memory as torch.int32"),
]


@pytest.mark.parametrize(("part", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_tangent_can_stand_beside_is_no_constant(part: Callable[[Tensor], Tensor], words: str) -> None:
    """All of these have been taken for constants, or raised an error of torch's own."""
    with pytest.raises(jp.JetplaneError, match=words):
        jp.forward_gradient(
            lambda x: layer(x).square().sum(1) * OTHER.sum() + part(x).sum(1), [WIDE, OTHER], X, allow_unused=True
        )


def test_complex_numbers_of_parameters_alone_are_differentiated() -> None:
    def losses(x: Tensor) -> Tensor:
        filters = torch.fft.irfft(torch.fft.rfft(WIDE) * torch.fft.rfft(WIDE[0].sin()), 4)
        return (x @ filters).square().sum(1)

    (wanted,) = torch.autograd.grad(losses(X).mean(), [WIDE])
    jp.forward_gradient(losses, [WIDE], X)
    torch.testing.assert_close(WIDE.grad, wanted)
    WIDE.grad = None


def branching(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.cond(x.sum() > -1e9, lambda x: model[0](x), lambda x: -model[0](x), (x,))
    return model[2](h.tanh()).square().sum(1)


def mapping(model: nn.Module, x: Tensor) -> Tensor:
    return model[2](map_of_rows(lambda row: model[0](row).tanh(), x)).square().sum(1)


@pytest.mark.parametrize("program", [branching, mapping])
def test_operators_of_higher_order_are_what_their_functions_do(program: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    check_exact(model, lambda x: program(model, x), torch.randn(4, 3, dtype=torch.float64))
