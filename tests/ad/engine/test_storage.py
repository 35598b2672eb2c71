"""Memory: in-place operations, views, aliases and out= arguments, each against a functional twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetplane as jp
from cases import F64, along, assert_close, assert_quadratic, check_against_oracle, randn

MASK = torch.tensor([True, False, True])
ROWS = torch.arange(12, dtype=F64).view(3, 4) / 7


def finish(*tensors: Tensor) -> Tensor:
    """A scalar in which every entry counts differently, and not linearly."""
    return sum((t.sin() * torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in tensors)


def written(*steps: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """A program that makes a buffer (3, 4) and applies ``steps(buffer, w)`` to it."""

    def program(w: Tensor) -> Tensor:
        buffer = ROWS.clone()
        for step in steps:
            step(buffer, w)
        return finish(buffer)

    return program


def put(buffer: Tensor, index: object, value: object) -> None:
    buffer[index] = value


def rows(*parts: Tensor) -> Tensor:
    return torch.stack(parts)


def out_of(function: Callable[..., object], *shape: int) -> Callable[[Tensor], Tensor]:
    def program(w: Tensor) -> Tensor:
        target = torch.full(shape, 9.0, dtype=F64)
        function(w, target)
        return finish(target)

    return program


# w is (4,). Each row: name, the program with writes, and its functional twin.
W_ROWS: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    ("row", written(lambda b, w: put(b, 0, w.tanh())), lambda w: finish(rows(w.tanh(), ROWS[1], ROWS[2]))),
    (
        "column-slice",
        written(lambda b, w: put(b, (slice(None), 1), w[:3])),
        lambda w: finish(torch.cat([ROWS[:, :1], w[:3, None], ROWS[:, 2:]], 1)),
    ),
    (
        "broadcast",
        written(lambda b, w: put(b, slice(1, None), w.exp())),
        lambda w: finish(rows(ROWS[0], w.exp(), w.exp())),
    ),
    (
        "number-over-tangent",
        written(lambda b, w: b.copy_(w * b), lambda b, w: put(b, 1, 3.0)),
        lambda w: finish(rows(ROWS[0] * w, torch.full_like(w, 3.0), ROWS[2] * w)),
    ),
    (
        "zero_",
        written(lambda b, w: b.mul_(w), lambda b, w: b[0].zero_()),
        lambda w: finish(rows(0 * w, ROWS[1] * w, ROWS[2] * w)),
    ),
    (
        "fill_",
        written(lambda b, w: b.mul_(w), lambda b, w: b[:, 0].fill_(2.0)),
        lambda w: finish(torch.cat([torch.full((3, 1), 2.0, dtype=F64), (ROWS * w)[:, 1:]], 1)),
    ),
    ("fill_-tensor", written(lambda b, w: b[0].fill_(w[1])), lambda w: finish(rows(w[1].expand(4), ROWS[1], ROWS[2]))),
    ("copy_", written(lambda b, w: b.copy_(w.exp())), lambda w: finish(w.exp().expand(3, 4))),
    ("copy_-transposed", written(lambda b, w: b.t()[:, 0].copy_(w)), lambda w: finish(rows(w, ROWS[1], ROWS[2]))),
    (
        "copy_-constant",
        written(lambda b, w: b.mul_(w), lambda b, w: b.copy_(ROWS), lambda b, w: b[0].add_(w)),
        lambda w: finish(rows(ROWS[0] + w, ROWS[1], ROWS[2])),
    ),
    (
        "plus-equals-slice",
        written(lambda b, w: b[1].__iadd__(w**2), lambda b, w: b[:, 2].__imul__(w[:3])),
        lambda w: finish(
            (ROWS + rows(0 * w, w**2, 0 * w))
            * torch.cat([torch.ones(3, 2, dtype=F64), w[:3, None], torch.ones(3, 1, dtype=F64)], 1)
        ),
    ),
    (
        "chain-in-place",
        written(lambda b, w: b.mul_(w).add_(1).sin_().div_(2)),
        lambda w: finish((ROWS * w + 1).sin() / 2),
    ),
    (
        "self-in-place",
        written(lambda b, w: b.mul_(w), lambda b, w: b.mul_(b), lambda b, w: b.add_(b[0])),
        lambda w: finish((ROWS * w) ** 2 + (ROWS * w)[0] ** 2),
    ),
    (
        "index_put_",
        written(lambda b, w: b.index_put_((torch.tensor([0, 2]), torch.tensor([1, 3])), w[:2])),
        lambda w: finish(ROWS.index_put((torch.tensor([0, 2]), torch.tensor([1, 3])), w[:2])),
    ),
    (
        "index_put_-accumulate",
        written(lambda b, w: b.index_put_((torch.tensor([1, 1]),), w, accumulate=True)),
        lambda w: finish(ROWS + rows(0 * w, 2 * w, 0 * w)),
    ),
    (
        "index_add_",
        written(lambda b, w: b.index_add_(0, torch.tensor([2, 2]), rows(w, w.sin()))),
        lambda w: finish(ROWS + rows(0 * w, 0 * w, w + w.sin())),
    ),
    (
        "index_copy_",
        written(lambda b, w: b.index_copy_(0, torch.tensor([2, 0]), rows(w, w.sin()))),
        lambda w: finish(rows(w.sin(), ROWS[1], w)),
    ),
    (
        "scatter_",
        written(lambda b, w: b.scatter_(0, torch.zeros(1, 4, dtype=torch.long), w[None])),
        lambda w: finish(rows(w, ROWS[1], ROWS[2])),
    ),
    (
        "scatter_add_",
        written(lambda b, w: b.scatter_add_(0, torch.ones(1, 4, dtype=torch.long), w[None])),
        lambda w: finish(rows(ROWS[0], ROWS[1] + w, ROWS[2])),
    ),
    ("masked-write", written(lambda b, w: put(b, MASK, w.exp())), lambda w: finish(rows(w.exp(), ROWS[1], w.exp()))),
    (
        "masked-write-entries",
        written(lambda b, w: put(b, ROWS > 1, w[2])),
        lambda w: finish(torch.where(ROWS > 1, w[2], ROWS)),
    ),
    (
        "masked_fill_",
        written(lambda b, w: b.mul_(w).masked_fill_(MASK[:, None], -1.0)),
        lambda w: finish((ROWS * w).masked_fill(MASK[:, None], -1.0)),
    ),
    (
        "masked_scatter_",
        written(lambda b, w: b.masked_scatter_(MASK[:, None], torch.cat([w, w.sin()]))),
        lambda w: finish(rows(w, ROWS[1], w.sin())),
    ),
    ("where-in-place", written(lambda b, w: b.mul_(w).clamp_(max=0.5)), lambda w: finish((ROWS * w).clamp(max=0.5))),
    (
        "chunk-views",
        written(lambda b, w: [part.add_(w[i]) for i, part in enumerate(b.chunk(2, 1))]),
        lambda w: finish(ROWS + w[:2].repeat_interleave(2)),
    ),
    ("split-views", written(lambda b, w: [part.mul_(w) for part in b.split([1, 2])]), lambda w: finish(ROWS * w)),
    (
        "unbind-views",
        written(lambda b, w: [part.mul_(w[i]) for i, part in enumerate(b.unbind(0))]),
        lambda w: finish(ROWS * w[:3, None]),
    ),
    (
        "diagonal-view",
        written(lambda b, w: b.diagonal().copy_(w[:3])),
        lambda w: finish(torch.diagonal_scatter(ROWS, w[:3])),
    ),
    (
        "view-of-view",
        written(lambda b, w: b.view(2, 6)[1].view(3, 2).t()[0].add_(w[:3])),
        lambda w: finish(
            ROWS + torch.cat([torch.zeros(6, dtype=F64), torch.stack([w[:3], 0 * w[:3]], 1).flatten()]).view(3, 4)
        ),
    ),
    (
        "unsqueeze_-transpose_",
        written(lambda b, w: b.mul_(w).t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1)),
        lambda w: finish(ROWS * w),
    ),
    (
        "swap-rows",
        written(lambda b, w: b.mul_(w), lambda b, w: put(b, [0, 1], b[[1, 0]])),
        lambda w: finish((ROWS * w)[[1, 0, 2]]),
    ),
    (
        "lerp_-addcmul_",
        written(lambda b, w: b.lerp_(w.expand(3, 4), 0.3).addcmul_(w, w, value=2.0)),
        lambda w: finish(ROWS + 0.3 * (w - ROWS) + 2 * w * w),
    ),
    ("out-add", out_of(lambda w, out: torch.add(w, 1.0, out=out), 4), lambda w: finish(w + 1)),
    (
        "out-mul-strided",
        out_of(lambda w, out: torch.mul(w, w, out=out[:, 1]), 4, 2),
        lambda w: finish(torch.stack([torch.full_like(w, 9.0), w * w], 1)),
    ),
    (
        "out-matmul",
        out_of(lambda w, out: torch.mm(w.view(2, 2), w.view(2, 2), out=out), 2, 2),
        lambda w: finish(w.view(2, 2) @ w.view(2, 2)),
    ),
    ("out-cat", out_of(lambda w, out: torch.cat([w, w.exp()], out=out), 8), lambda w: finish(torch.cat([w, w.exp()]))),
    (
        "out-stack",
        out_of(lambda w, out: torch.stack([w, w.exp()], out=out), 2, 4),
        lambda w: finish(torch.stack([w, w.exp()])),
    ),
    ("out-sum", out_of(lambda w, out: torch.sum(w * w, 0, out=out)), lambda w: finish((w * w).sum(0))),
    (
        "out-constant",
        out_of(lambda w, out: (torch.mul(w, w, out=out), torch.add(ROWS[0], 1, out=out)), 4),
        lambda w: finish(ROWS[0] + 1) + 0 * w.sum(),
    ),
]


@pytest.mark.parametrize(("program", "twin"), [row[1:] for row in W_ROWS], ids=[row[0] for row in W_ROWS])
def test_writes(program, twin) -> None:
    check_against_oracle(program, randn(4) / 2 + 1, twin=twin)


def test_max_writes_two_outputs() -> None:
    values, indices = torch.empty(2, dtype=F64), torch.empty(2, dtype=torch.long)

    def program(w: Tensor) -> Tensor:
        torch.max(w.view(2, 2), 1, out=(values, indices))
        return finish(values)

    check_against_oracle(program, randn(4), twin=lambda w: finish(w.view(2, 2).max(1).values))


def test_out_is_resized() -> None:
    def program(w: Tensor) -> Tensor:
        target = torch.empty(0, dtype=F64)
        torch.mul(w, w, out=target)
        return finish(target)

    check_against_oracle(program, randn(4), twin=lambda w: finish(w * w))


def test_every_alias_of_a_written_storage_agrees() -> None:
    w, v = randn(8), randn(2, 8)
    with jp.perturb([w], [v]) as jets:
        b = torch.zeros(3, 8, dtype=F64)
        first, column, flat = b[0], b[:, 3], b.view(-1)
        b[0] = w.tanh()
    slope = (1 - w.tanh() ** 2) * v
    assert_close(jets.of(first).tangent, slope)
    assert_close(jets.of(flat).tangent[:, :8], slope)
    assert_close(jets.of(column).tangent, torch.stack([slope[:, 3], 0 * slope[:, 3], 0 * slope[:, 3]], 1))
    assert not jets.of(b).tangent[:, 1:].any() and not jets.of(b).second[:, 1:].any()
    assert_close(jets.of(b).second[:, 0], jets.of(first).second)


def test_a_write_after_a_read_does_not_reach_back() -> None:
    def program(w: Tensor) -> Tensor:
        a = w * 2
        b = a + 0  # may share its rows with a
        c = a.clone()
        a[0] = 5.0
        a.mul_(3)
        return finish(a, b, c)

    def twin(w: Tensor) -> Tensor:
        return finish(torch.cat([torch.full((1,), 15.0, dtype=F64), 6 * w[1:]]), 2 * w, 2 * w)

    check_against_oracle(program, randn(4), twin=twin)


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("transposed", lambda w: finish(w.view(2, 3).t() * 2, w.view(2, 3).t().contiguous())),
        ("expanded", lambda w: finish(w.expand(4, 6) * torch.arange(4, dtype=F64)[:, None])),
        ("expanded-sum", lambda w: (w.view(6, 1).expand(6, 3).sin() ** 2).sum()),
        ("strided", lambda w: finish(w[::2] * w[1::2])),
        ("as_strided", lambda w: finish((w * w).as_strided((2, 3), (1, 2), 0))),
        ("as_strided-of-leaf", lambda w: finish(w.as_strided((2, 2), (1, 2), 1))),
        ("unfold-overlapping", lambda w: finish(w.sin().unfold(0, 3, 1))),
        ("permute-reshape", lambda w: finish(w.exp().view(1, 2, 3).permute(2, 0, 1).reshape(2, 3))),
        ("flip-roll", lambda w: finish(w.flip(0).roll(2).view(2, 3).rot90())),
        ("select-narrow", lambda w: finish(w.sin().view(2, 3).select(1, 2), w.narrow(0, 1, 3) ** 2)),
        ("view-then-use-base", lambda w: (lambda a: finish(a, a.view(2, 3)[1]))(w.exp())),
        ("tensor-split", lambda w: finish(*w.exp().tensor_split(4))),
        ("unbind", lambda w: sum(finish(t) for t in w.exp().unbind())),
        ("diagonal", lambda w: finish(torch.outer(w, w).diagonal(1))),
        ("real-view-of-slices", lambda w: finish(w[None, :, None].squeeze().unsqueeze(-1).movedim(0, 1))),
    ],
)
def test_views(name: str, program) -> None:
    check_against_oracle(program, randn(6))


def test_channels_last() -> None:
    weight = randn(4, 3, 3, 3)

    def program(x: Tensor) -> Tensor:
        y = F.conv2d(x.to(memory_format=torch.channels_last), weight, padding=1)
        y = y.contiguous(memory_format=torch.channels_last)
        y[:, 1].mul_(2)
        return finish(F.max_pool2d(y.tanh(), 2), y.flatten(1))

    def twin(x: Tensor) -> Tensor:
        y = F.conv2d(x, weight, padding=1) * torch.tensor([1.0, 2, 1, 1], dtype=F64).view(4, 1, 1)
        return finish(F.max_pool2d(y.tanh(), 2), y.flatten(1))

    check_against_oracle(program, randn(2, 3, 4, 4), twin=twin)


def test_a_channels_last_leaf() -> None:
    x = randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    v = randn(2, 2, 3, 4, 4)
    with jp.perturb([x], [v]) as jets:
        y = x.permute(0, 2, 3, 1)[:, 1:].square()
    assert_close(jets.of(y).tangent, 2 * (x * v).permute(0, 1, 3, 4, 2)[:, :, 1:])


def test_cat_of_buffers_written_in_place() -> None:
    def program(w: Tensor) -> Tensor:
        a, b = torch.zeros(2, 4, dtype=F64), torch.ones(2, 4, dtype=F64)
        a[0] = w
        b[1] += w**2
        return finish(torch.cat([a, b, a]))

    def twin(w: Tensor) -> Tensor:
        one, zero = torch.ones(4, dtype=F64), torch.zeros(4, dtype=F64)
        a, b = rows(w, zero), rows(one, one + w**2)
        return finish(torch.cat([a, b, a]))

    check_against_oracle(program, randn(4), twin=twin)


def test_a_cache_filled_step_by_step() -> None:
    def program(w: Tensor) -> Tensor:
        cache = torch.empty(3, 4, dtype=F64)
        state = w
        for t in range(3):
            state = (state * w).tanh()
            cache[t] = state
            state = cache[: t + 1].mean(0)
        return finish(cache)

    def twin(w: Tensor) -> Tensor:
        kept: list[Tensor] = []
        state = w
        for _ in range(3):
            kept.append((state * w).tanh())
            state = torch.stack(kept).mean(0)
        return finish(torch.stack(kept))

    check_against_oracle(program, randn(4), twin=twin)


def test_writing_into_a_perturbed_leaf() -> None:
    x, v = torch.tensor([1.0, 2.0, 3.0], dtype=F64), randn(2, 3)
    with jp.perturb([x], [v]) as jets:
        view = x[1:]
        x[0] = 5.0
        view.mul_(x[1])
        y = x.square()
    assert x.tolist() == [5.0, 4.0, 6.0]
    # x1 -> x1**2, x2 -> x1 x2 (torch reads the factor first)
    slope = torch.stack([0 * v[:, 0], 4 * v[:, 1], 2 * v[:, 2] + 3 * v[:, 1]], 1)
    assert_close(jets.of(x).tangent, slope)
    assert_close(jets.of(y).tangent, 2 * x * slope)
    assert_close(jets.of(x).second[0], torch.stack([0 * v[0, 0], 2 * v[0, 1] ** 2, 2 * v[0, 1] * v[0, 2]]))


def test_views_of_one_storage_that_do_not_overlap() -> None:
    base, v = randn(6), randn(2, 6)
    for a, b, va, vb in (
        (base[:3], base[3:], v[:, :3], v[:, 3:]),
        (base[3:], base[:3], v[:, 3:], v[:, :3]),
    ):
        with jp.perturb([a, b], [va, vb]) as jets:
            y = (a * b).sum() + base.prod()
        whole = jp.quadratic(lambda t: (t[:3] * t[3:]).sum() + t.prod(), base, v)
        assert_quadratic(jets.quadratic(y), whole)


def test_interleaved_columns_of_one_matrix_are_right_or_refused() -> None:
    base, v = randn(3, 2), randn(2, 3, 2)
    try:
        columns = jp.perturb([base[:, 0], base[:, 1]], [v[:, :, 0], v[:, :, 1]])
    except ValueError as error:
        assert "memory with parameter 0" in str(error)
        return
    with columns as jets:
        y = finish(base)
    assert_quadratic(jets.quadratic(y), jp.quadratic(finish, base, v))


def test_a_perturbed_part_of_a_larger_storage() -> None:
    base, v = randn(6), randn(2, 3)
    with jp.perturb([base[1:4]], [v]) as jets:
        y = finish(base)
    wide = torch.cat([torch.zeros(2, 1, dtype=F64), v, torch.zeros(2, 2, dtype=F64)], 1)
    assert_quadratic(jets.quadratic(y), jp.quadratic(finish, base, wide))


@pytest.mark.parametrize("cut", [slice(0, 4), slice(None), slice(2, 3)])
def test_overlapping_leaves_are_refused(cut: slice) -> None:
    base = randn(6)
    with pytest.raises(ValueError, match=r"shares .*memory with parameter 0"):
        jp.perturb([base[:3], base[cut]], [randn(1, 3), torch.randn(1, *base[cut].shape, dtype=F64)])


def test_tied_parameters_are_perturbed_once() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)).double()
    net[1].weight = net[0].weight
    leaves = list(net.parameters())
    assert len(leaves) == 1
    with jp.perturb(leaves, along(leaves, 2)) as jets:
        loss = net(randn(2, 3)).square().sum()
    assert jets.quadratic(loss).curvature.abs().max() > 0


def test_set_and_resize_are_right_or_refused() -> None:
    def resized(w: Tensor) -> Tensor:
        return finish((w * 2).resize_(2, 2))

    def replaced(w: Tensor) -> Tensor:
        t = torch.zeros(4, dtype=F64)
        t.set_(w * 2)
        return finish(t.view(2, 2))

    for program in (resized, replaced):
        w = randn(4)
        try:
            actual = jp.gradient(program, w)
        except jp.JetplaneError:
            continue
        assert_close(actual, jp.gradient(lambda w: finish((w * 2).view(2, 2)), w))
