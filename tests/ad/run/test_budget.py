"""A budget of bytes chooses the chunk size: the numbers stay, and what is held stays within it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import jetplane as jp
from jetplane.ad import _torch
from jetplane.ad.run import budget
from jetplane.ad.run.budget import Trace, parse_bytes, readable
from jetplane.ad.run.directions import Given, Leaf
from jetplane.ad.run.passes import Chunk, assemble
from jetplane.ad.run.replay import Replay

F64 = torch.float64


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MB", 512 * 10**6),
        ("1.5MiB", 3 * 2**19),
        (" 10 kb ", 10_000),
        ("7", 7),
        ("7B", 7),
        ("2k", 2000),
        ("1TiB", 2**40),
        (123, 123),
    ],
)
def test_texts_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "4 GiBs", "-1", "1e9", "4 iB", "four", "0", 0, -5])
def test_other_texts_are_refused(text: str | int) -> None:
    with pytest.raises(
        ValueError, match=rf"memory is {text!r}; expected a positive number of bytes, or a text such as"
    ):
        parse_bytes(text)


@pytest.mark.parametrize("value", [1.5, True, None, [1]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="expected a positive number of bytes, or a text such as '4GiB' or '512 MB'"):
        parse_bytes(value)


@given(st.integers(1, 10**15))
def test_what_is_said_is_what_is_meant(count: int) -> None:
    assert parse_bytes(readable(count)) == pytest.approx(count, rel=0.01)


# -- what is held -----------------------------------------------------------------------------------------------------


def test_storages_are_counted_while_they_live() -> None:
    outside = torch.zeros(100, dtype=F64)
    with Trace.of([]) as trace:
        a = outside + 1  # 800
        b = a.view(10, 10)[2:].t()  # no memory
        c = torch.empty(50, dtype=F64)  # 400
        del a
        c.add_(1)
        del b
        d = outside * 2  # 800, in place of a
    assert trace.peak() == 1200 and trace.held == 1200
    del c, d
    assert trace.peak() == 1200 and trace.held == 1200  # what goes later is no part of it


def test_values_do_not_grow_with_the_rows() -> None:
    x, directions = torch.zeros(1000, dtype=F64), torch.ones(3, 1000, dtype=F64)
    with Trace.of([]) as trace:
        jp.jet(lambda x: (x * x).sum(), x, directions, "none")
    values = trace.peak(0.0)  # the copy of x, its square, their sum
    assert 2 * 8000 <= values < 3 * 8000
    assert trace.peak(2.0) - values == pytest.approx(2 * (trace.peak() - values), rel=0.4)


# -- transforms -------------------------------------------------------------------------------------------------------


def wide(x: Tensor) -> Tensor:
    return (torch.sin(x[:, None] * torch.linspace(0.5, 1.5, 300, dtype=F64)).sum(1) ** 2).sum() + x.prod()


def two(x: Tensor) -> Tensor:
    return torch.stack([wide(x), x.exp().sum()])


X = torch.linspace(-1, 1, 12, dtype=F64)
V = torch.stack([torch.roll(torch.linspace(-1, 1, 12, dtype=F64), n) for n in range(9)])

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "quadratic": lambda **o: jp.quadratic(wide, X, V, **o),
    "jet all": lambda **o: jp.jet(two, X, V, **o),
    "jet diagonal": lambda **o: jp.jet(two, X, V, "diagonal", **o),
    "jet star": lambda **o: jp.jet(two, X, V, "star", **o),
    "jet none": lambda **o: jp.jet(two, X, V, "none", **o),
    "jet list": lambda **o: jp.jet(two, X, V, jp.PairSet(9, ((7, 8), (8, 8), (2, 7), (6, 8))), **o),
    "hessian": lambda **o: jp.hessian(two, X, **o),
    "hvp": lambda **o: jp.hvp(wide, X, V[0], **o),
    "gradient": lambda **o: jp.gradient(two, X, **o),
    "laplacian": lambda **o: jp.laplacian(wide, X, **o),
}


def tensors(result: Any) -> list[Tensor]:
    parts = vars(result).values() if isinstance(result, jp.Quadratic | jp.Jet) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


def needed(call: Callable[..., Any], **options: Any) -> int:
    with Trace.of([]) as trace:
        kept = call(**options)
    del kept
    return int(trace.peak())


def chosen(caplog: pytest.LogCaptureFixture) -> str:
    (message,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("chunk_size is"))
    return message.split()[2]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_numbers_are_the_same_and_the_budget_is_kept(name: str, caplog: pytest.LogCaptureFixture) -> None:
    call = TRANSFORMS[name]
    whole, least = needed(call), needed(call, chunk_size=1)
    expected = tensors(call())
    sizes = set()
    for share in (0.02, 0.3, 0.6, 1.5, 15.0):
        limit = int(1.2 * least + share * whole)
        caplog.clear()
        with caplog.at_level(logging.INFO, "jetplane"), Trace.of([]) as trace:
            result = call(memory=limit)
        assert trace.peak() <= limit
        for actual, one in zip(tensors(result), expected, strict=True):
            torch.testing.assert_close(actual, one, rtol=1e-12, atol=1e-12)
        sizes.add(chosen(caplog))
    assert "None" in sizes and len(sizes) > 1  # all at once where there is room, and not where there is none


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_budget_for_less_than_one_direction_says_what_one_needs(name: str) -> None:
    call = TRANSFORMS[name]
    with pytest.raises(ValueError, match=r"memory is 100 B \(100 bytes\), but one direction at a time needs") as error:
        call(memory="100 B")
    enough = int(str(error.value).split("(")[2].split()[0])
    call(memory=enough)
    with pytest.raises(ValueError, match="but one direction at a time needs"):
        call(memory=enough - 1)


def test_both_are_too_much() -> None:
    with pytest.raises(ValueError, match="chunk_size is 2 and memory is '4GiB'; expected one of them"):
        jp.hessian(wide, X, chunk_size=2, memory="4GiB")


def test_a_budget_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="memory is '4GiB', which needs several passes; expected None where compiled"):
        jp.compile(jp.quadratic)(wide, X, V, memory="4GiB")
    with pytest.raises(ValueError, match="memory is 100, which needs several passes; expected None where compiled"):
        jp.compile(jp.jet)(wide, X, V, memory=100)


def test_measuring_leaves_no_trace() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).double()
    data = torch.randn(20, 12, dtype=F64)
    start = {name: buffer.clone() for name, buffer in net.named_buffers()}
    runs = []
    for options in ({}, {"memory": 40_000}, {"memory": "1GiB"}):
        net.load_state_dict(start, strict=False)
        torch.manual_seed(5)
        with torch.no_grad():
            model = jp.quadratic(lambda x: net(data + x).square().sum(), X, V, **options)
        buffers = [buffer.clone() for buffer in net.buffers()]
        runs.append((model.loss, model.slope, model.curvature, buffers, torch.get_rng_state()))
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=1e-12, atol=1e-12)


def test_a_program_that_asks_for_values_is_measured_too() -> None:
    def branching(x: Tensor) -> Tensor:
        return wide(x) if float(x.sum()) > 100 else wide(x) * 2

    limit = 2 * needed(lambda **o: jp.hessian(branching, X, **o), chunk_size=1)
    torch.testing.assert_close(jp.hessian(branching, X, memory=limit), 2 * jp.hessian(wide, X), rtol=1e-12, atol=1e-12)


def test_results_that_autograd_differentiates_are_within_the_budget() -> None:
    x = X.clone().requires_grad_()

    def call(**options: Any) -> Tensor:
        return jp.laplacian(wide, x, **options)

    (expected,) = torch.autograd.grad(call(), x)
    limit = 2 * needed(call, chunk_size=4)
    with Trace.of([]) as trace:
        result = call(memory=limit)
    assert trace.peak() <= limit
    torch.testing.assert_close(torch.autograd.grad(result, x)[0], expected, rtol=1e-12, atol=1e-12)


def test_an_error_of_the_program_is_the_programs() -> None:
    def failing(x: Tensor) -> Tensor:
        raise ZeroDivisionError("the program's own")

    with pytest.raises(ZeroDivisionError, match="the program's own"):
        jp.hessian(failing, X, memory="1GiB")


# -- Gauss-Newton -----------------------------------------------------------------------------------------------------


def classifier() -> tuple[Callable[[Any], Tensor], Any, Any]:
    net = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    x, y = torch.randn(25, 6, dtype=F64), torch.randint(4, (25,))
    params = {name: p.detach() for name, p in net.named_parameters()}
    directions = {name: torch.randn(8, *p.shape, dtype=F64) for name, p in params.items()}
    return (lambda p: F.cross_entropy(torch.func.functional_call(net, p, (x,)), y)), params, directions


def test_gauss_newton_within_a_budget() -> None:
    func, params, directions = classifier()

    def call(**options: Any) -> jp.Quadratic:
        return jp.quadratic(func, params, directions, curvature="ggn", **options)

    expected = call()
    exact = jp.quadratic(func, params, directions)
    assert not torch.allclose(expected.curvature, exact.curvature)
    torch.testing.assert_close((expected.loss, expected.slope), (exact.loss, exact.slope), rtol=1e-12, atol=1e-12)
    assert float(torch.linalg.eigvalsh(expected.curvature)[0]) > -1e-10
    whole, least = needed(call), needed(call, chunk_size=1)
    assert least < whole
    for limit in (int(1.05 * least), (least + whole) // 2, 3 * whole):
        with Trace.of([]) as trace:
            model = call(memory=limit)
        assert trace.peak() <= limit
        for actual, one in zip(tensors(model), tensors(expected), strict=True):
            torch.testing.assert_close(actual, one, rtol=1e-12, atol=1e-12)


def test_gauss_newton_of_a_linear_model_is_the_hessian() -> None:
    x, y = torch.randn(10, 3, dtype=F64), torch.randint(4, (10,))
    weight, directions = torch.randn(4, 3, dtype=F64), torch.randn(5, 4, 3, dtype=F64)
    models = [
        jp.quadratic(lambda w: F.cross_entropy(x @ w.t(), y), weight, directions, curvature=name)
        for name in ("exact", "ggn")
    ]
    torch.testing.assert_close(models[0].curvature, models[1].curvature, rtol=1e-12, atol=1e-12)


def test_gauss_newton_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(function: Callable[..., Any], inputs: Any) -> Any:  # the compiler itself takes its time
        with torch.no_grad():
            run = make_fx(lambda *t: function(list(t)), tracing_mode="fake")(*(t.detach() for t in inputs))
        return (lambda tensors: run(*(t.detach() for t in tensors))), set()

    monkeypatch.setattr(_torch, "compiled", traced)
    func, params, directions = classifier()
    fast = jp.compile(jp.quadratic)
    for name in ("ggn", "exact", "ggn"):
        actual, one = (
            fast(func, params, directions, curvature=name),
            jp.quadratic(func, params, directions, curvature=name),
        )
        for a, b in zip(tensors(actual), tensors(one), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_other_curvatures_are_refused() -> None:
    with pytest.raises(ValueError, match="curvature is 'gnn'; expected one of 'exact', 'ggn'"):
        jp.quadratic(wide, X, V, curvature="gnn")


# -- the search, on invented programs ---------------------------------------------------------------------------------


class Invented:
    """Passes that hold a value, rows for each direction and for each pair."""

    def __init__(self, value: int, row: int, pair: int) -> None:
        self.sizes = value, row, pair

    def __call__(self, chunk: Any) -> jp.Jet:
        value, row, pair = self.sizes
        program = torch.zeros(value, dtype=torch.uint8)
        with _torch.no_function_modes():  # as in a rule
            rows = torch.zeros(len(chunk.rows) * row + chunk.pairs.rows * pair, dtype=torch.uint8)
        del program, rows
        out = torch.zeros(())
        return jp.Jet(out, out, out)

    def bytes(self, chunk: Any) -> int:
        value, row, pair = self.sizes
        return value + len(chunk.rows) * row + chunk.pairs.rows * pair


@settings(deadline=None, max_examples=30)
@given(
    k=st.integers(1, 20),
    pairs=st.sampled_from(["all", "none", "diagonal", "star", "laplacian"]),
    value=st.integers(0, 10_000),
    row=st.integers(1, 10_000),
    pair=st.integers(0, 10_000),
    budget_of=st.integers(1, 500_000),
)
def test_what_is_chosen_fits_and_what_is_refused_does_not(
    k: int, pairs: str, value: int, row: int, pair: int, budget_of: int
) -> None:
    run, whole = Invented(value, row, pair), jp.PairSet.of(pairs, k)

    def largest(size: int | None) -> int:
        return max(run.bytes(chunk) for chunk in budget.chunks(whole, size))

    slack = 3 * 4 * 4 * (k + whole.rows) + 4096  # results of chunks, and of the pass that is measured
    try:
        size = budget.fit(budget_of, whole, run, [])
    except ValueError:
        assert largest(1) + slack > budget_of
        return
    assert largest(size) <= budget_of
    if size is None:
        return
    # not far from the best: rows of a size that is half as large again would be twice as many
    assert largest(min(2 * size + 1, k)) + slack > budget_of / 2


def test_passes_over_parameters_in_place_with_a_replay_of_the_callers() -> None:
    """As an optimizer does it: the parameters themselves are perturbed, and further runs follow."""
    net = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 1)).double()
    data, leaves = torch.randn(30, 6, dtype=F64), list(net.parameters())
    rows = Given([torch.randn(6, *leaf.shape, dtype=F64) for leaf in leaves])
    start, random = [buffer.clone() for buffer in net.buffers()], torch.get_rng_state()
    whole, replay = jp.PairSet.all(6), Replay([leaf.device for leaf in leaves])

    def one(chunk: Chunk) -> jp.Jet:
        each = chunk.begin()
        for position, leaf in enumerate(leaves):
            each.perturb(Leaf(leaf, position, rows, chunk.rows), str(position))
        with torch.no_grad(), each.running():
            loss = net(data).square().mean()
        return each.jet(loss)

    expected = one(budget.chunks(whole, None)[0])
    after = [buffer.clone() for buffer in net.buffers()]
    for buffer, before in zip(net.buffers(), start, strict=True):
        buffer.copy_(before)
    torch.set_rng_state(random)
    size = budget.fit(1_000_000, whole, one, [leaf.device for leaf in leaves], replay=replay)
    assert size is not None and 1 <= size < 6
    assert all(map(torch.equal, net.buffers(), start)) and torch.equal(torch.get_rng_state(), random)
    work = budget.chunks(whole, size)
    jet = assemble(whole, [(chunk, replay.run(partial(one, chunk))) for chunk in work])
    torch.testing.assert_close((jet.tangent, jet.second), (expected.tangent, expected.second), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(net.buffers()), after, rtol=1e-12, atol=1e-12)
