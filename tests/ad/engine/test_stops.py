"""The program's own calls that end tangents, or would lose them."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from test_guards import _seeded
from torch import Tensor

import jetplane as jp
from cases import F64, assert_close, assert_quadratic, check_against_oracle, randn
from jetplane.testing.oracle import double_backward

STOPS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("detach", lambda x: x.detach() * x),
    ("torch.detach", lambda x: torch.detach(x) * x),
    ("data", lambda x: x.data * x),
    ("torch.tensor", lambda x: torch.tensor(x) * x),
    ("item", lambda x: x * x[0].item()),
    ("tolist", lambda x: x * torch.tensor(x.tolist(), dtype=F64)),
    ("view-of-detached", lambda x: (x * 2).detach()[1:].view(-1, 1)[:, 0].sum() * x),
    ("detached-view", lambda x: x[1:].detach().sum() * x),
    ("op-of-detached", lambda x: x.detach().sin().exp() * x),
    ("detach-of-intermediate", lambda x: x.sin().detach() * x.sin()),
    ("detached-twice", lambda x: x.detach().detach().clone() * x),
    ("straight-through", lambda x: (x + (x.round() - x).detach()) ** 2),
    ("detach_", lambda x: (x * 1.0).detach_() * x),
    ("split-of-detached", lambda x: sum(part.sum() for part in x.detach().split(2)) * x),
    ("kept-while-it-lives", lambda x: (lambda d: (x.sin() * d).cos() * d)(x.detach())),
    ("gumbel-hard", lambda x: _seeded(lambda: F.gumbel_softmax(x, hard=True) * torch.arange(5, dtype=F64))),
]


@pytest.mark.filterwarnings("ignore:.*copy construct from a tensor")
@pytest.mark.parametrize(("name", "program"), STOPS, ids=[row[0] for row in STOPS])
def test_the_users_own_detach_stops_tangents(name: str, program) -> None:
    # the oracle sees the same constants
    check_against_oracle(lambda x: program(x).sum(), randn(5))


def program_value(write, x: Tensor) -> Tensor:
    """What the write leaves in memory."""
    y = (x * 2).detach()
    write(y, x.detach().sin())
    return y


class _Moved(torch.autograd.Function):
    """Another value with the derivatives of the first, twice."""

    @staticmethod
    def forward(ctx, y: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _moved(y: Tensor, value: Tensor) -> Tensor:
    return _Moved.apply(y, value)


@pytest.mark.parametrize(
    "write",
    [
        lambda alias, value: alias.copy_(value),
        lambda alias, value: alias.__setitem__(0, value[1]),
        lambda alias, value: alias.mul_(value),
        lambda alias, value: torch.mul(value, value, out=alias),
        lambda alias, value: alias[1:].add_(value[1:]),
    ],
)
def test_writing_a_perturbed_value_through_a_detached_alias_moves_the_value_alone(write) -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        write(y.detach(), x.sin())
        return (y * x).sum()

    check_against_oracle(program, randn(3), twin=lambda x: (_moved(x * 2, program_value(write, x)) * x).sum())


@pytest.mark.parametrize("of", ["itself", "a view from before", "a view of it", "written again"])
def test_reading_a_detached_alias_after_such_a_write_is_refused(of: str) -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        alias = y.detach()
        view = alias[1:]
        alias.mul_(x)
        if of == "written again":
            alias.add_(1.0)
        return ({"itself": alias, "a view from before": view}.get(of, alias.view(3)) * y[0]).sum()

    with pytest.raises(
        jp.UnsupportedProgram,
        match=r"reads a detached tensor after it has written a perturbed value into it.*expected a write into a clone",
    ):
        jp.gradient(program, randn(3))


def test_a_write_into_several_of_which_one_is_a_detached_alias_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        values = torch.zeros(3, dtype=F64)
        y = x * 2
        torch.sort(x.sin(), out=(y.detach(), torch.zeros(3, dtype=torch.long)))
        return values.sum() + y.sum()

    with pytest.raises(jp.UnsupportedProgram, match="writes into several tensors, some of them detached"):
        jp.gradient(program, randn(3))


def test_an_average_that_is_kept_through_data_is_a_constant() -> None:
    buffer = torch.ones(3, dtype=F64)

    def program(x: Tensor) -> Tensor:
        buffer.fill_(1.0)
        buffer.data.lerp_(x.sin(), 0.1)  # as the codebooks of quantised autoencoders are
        return (buffer.square() * x).sum()

    check_against_oracle(program, randn(3))
    with pytest.raises(ValueError, match="detaches its result from all that varies"):
        jp.gradient(lambda x: buffer.data.copy_(x.sin()) is not None and buffer.square().sum(), randn(3))


def constants_through_a_detached_alias(x: Tensor) -> Tensor:
    y = x * 2
    y.detach()[0] = 7.0
    y.data[1:] = 5.0
    return y.square().sum()


def update_through_data(x: Tensor) -> Tensor:
    y = x * 2
    y.data.add_(1.0)
    return y.square().sum()


@pytest.mark.parametrize("program", [constants_through_a_detached_alias, update_through_data])
def test_writes_of_constants_through_data_move_the_value_and_keep_the_tangent(program) -> None:
    check_against_oracle(program, randn(3))  # as autograd has it


@pytest.mark.parametrize(
    ("name", "export"),
    [
        ("numpy", lambda x: x.numpy()),
        ("asarray", lambda x: numpy.asarray(x)),
        ("numpy-of-view", lambda x: (x * 2)[1:].numpy()),
        ("dlpack", lambda x: torch.from_dlpack(x)),
        ("dlpack-numpy", lambda x: numpy.from_dlpack(x)),
    ],
)
def test_leaving_torch_is_refused(name: str, export) -> None:
    with pytest.raises(
        jp.UnsupportedProgram, match=r"on a perturbed tensor loses its tangents.*expected \.detach\(\) before it"
    ):
        jp.gradient(lambda x: torch.as_tensor(export(x)).sum() + x.sum(), randn(3))


def test_leaving_torch_after_detach_is_fine() -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum() * float(numpy.sum(x.detach().numpy()))

    x = randn(3)
    assert_close(jp.gradient(program, x), x.sum().expand(3))


def test_assigning_other_data_to_a_perturbed_tensor_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.data = torch.zeros(3, dtype=F64)
        return y.sum()

    with pytest.raises(
        jp.UnsupportedProgram,
        match=r"an assignment to \.data.*puts other memory under a perturbed tensor, which loses its tangents; "
        "expected an assignment of the tensor itself",
    ):
        jp.gradient(program, randn(3))


def data_of_its_own(x: Tensor) -> Tensor:
    y = x * 2
    y.data = y  # as Module.to does where nothing changes
    y.data = y.data
    return y.sin().sum()


def data_that_depends_on_it(x: Tensor) -> Tensor:
    y = torch.zeros(3, dtype=F64)
    y.data = x * 2
    return (y.sin() * x).sum()


def its_own_data_written(x: Tensor) -> Tensor:
    y = (x * 2).detach()
    y *= x
    return y.sin().sum()


def rows_of_a_table_written(x: Tensor) -> Tensor:
    table = torch.linspace(0, 1, 12, dtype=F64).view(4, 3)
    places = table.index_select(0, torch.tensor([1])).view(3).detach()  # as positions are looked up
    places += x * x
    return places.sin().sum()


@pytest.mark.parametrize(
    "program", [data_of_its_own, data_that_depends_on_it, its_own_data_written, rows_of_a_table_written]
)
def test_detached_data_is_data_until_the_program_writes_to_it(program) -> None:
    check_against_oracle(program, randn(3))


@pytest.mark.parametrize(
    "value", [lambda x: x * 2, lambda x: (x * 2).detach(), lambda x: x[1:2]], ids=["made", "detached", "view"]
)
def test_what_is_given_perturbed_memory_by_data_is_a_constant(value: Callable[[Tensor], Tensor]) -> None:
    def buffered(x: Tensor) -> Tensor:
        buffer = torch.zeros(3, dtype=F64)
        buffer.data = value(x)
        return buffer

    check_against_oracle(lambda x: (buffered(x) * x + buffered(x).view(-1).sin()).sum(), randn(3))
    with pytest.raises(ValueError, match="detaches its result from all that varies"):
        jp.gradient(lambda x: buffered(x).sum(), randn(3))


def test_a_zero_derivative_by_a_rule_that_detaches_is_a_zero() -> None:
    image, grid = randn(1, 1, 4, 4), randn(1, 2, 2, 2)
    check_against_oracle(lambda grid: F.grid_sample(image, grid * 1.3, mode="nearest", align_corners=True).sum(), grid)


def test_views_of_a_detached_tensor_are_detached_through_undeclared_views_too() -> None:
    w = torch.randn(2, 3, dtype=torch.float64)

    def program(w: torch.Tensor) -> torch.Tensor:
        return (torch.ops.aten._unsafe_view(w.detach(), [3, 2]) * w.reshape(3, 2)).sum()

    torch.testing.assert_close(jp.gradient(program, w), w)


@pytest.mark.parametrize(
    "start", [lambda x: torch.tensor([0.0, 1.0, 2.0], dtype=F64), lambda x: torch.tensor(x.detach())]
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_new_tensor_may_be_written_to(start: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor) -> Tensor:
        total = start(x)
        total += x.sin()
        total[0] = x.prod()
        return (total * x).sum()

    check_against_oracle(program, randn(3))


def _slope_inside(w: Tensor, x: Tensor) -> Tensor:
    """As flows by derivatives do it: a graph is made where one of the parameters requires grad."""
    scale = w.tanh()
    kept = [one for one in (scale,) if one.requires_grad]
    graph = torch.is_grad_enabled() and (x.requires_grad or bool(kept))
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        y = (scale * x**3).sum()
    return torch.autograd.grad(y, x, create_graph=graph)[0].square().sum()


def _told(w: Tensor) -> Tensor:
    """What it is told of tensors that vary, and of those that do not."""
    inner = w * 2
    with torch.no_grad():
        constant = inner * 2
        said = [inner.requires_grad]
    said += [inner.requires_grad, constant.requires_grad, torch.ones(3).requires_grad, inner.detach().requires_grad]
    assert said == [True, True, False, False, False]
    return (inner * constant).sum()


def test_what_depends_on_a_parameter_requires_grad_as_in_backprop() -> None:
    x = randn(3)
    check_against_oracle(lambda w: _slope_inside(w, x), randn(3))


def test_a_perturbed_tensor_says_that_it_requires_grad() -> None:
    leaf, v = randn(3).requires_grad_(), randn(2, 3)
    expected = double_backward(lambda: (leaf * 8 * leaf.detach()).sum(), [leaf], [v])
    with jp.perturb([leaf], [v]) as jets:
        loss = _told(leaf)
    assert_quadratic(jets.quadratic(loss), expected)
    assert not (leaf * 1).detach().requires_grad
    assert jp.jvp(lambda x: x * float((x * 1).requires_grad), randn(3), v[0], no_grad="follow")[1].any() == 0


def test_a_hook_of_a_package_that_only_looks_is_left_out() -> None:
    def warn(gradient: Tensor) -> None:
        raise AssertionError("no backward pass comes")

    warn.__module__ = "pyro.util"

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(warn)
        return y.sum()

    assert_close(jp.gradient(program, torch.zeros(3, dtype=F64)), torch.ones(3, dtype=F64))


def test_hooks_on_gradients_that_are_not_there() -> None:
    def kept(x: Tensor) -> Tensor:
        y = x * x
        y.retain_grad()
        return y.sum()

    check_against_oracle(kept, randn(3))
    with pytest.raises(jp.UnsupportedProgram, match=r"puts a hook on the gradient of a perturbed tensor"):
        jp.gradient(lambda x: (x * 1).register_hook(lambda g: g / 2) and x.sum(), randn(3))
