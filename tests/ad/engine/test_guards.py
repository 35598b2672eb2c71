"""Where tangents get lost in silence: each place is right, or refused."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp
from cases import F64, along, assert_close, assert_quadratic, check_against_oracle, randn
from jetplane.testing.oracle import double_backward

# -- detach -----------------------------------------------------------------------------------------------------------


def _seeded(program: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(11)
    return program()


def test_no_grad_and_enable_grad_around_a_pass_change_nothing() -> None:
    x = randn(4)
    f = lambda x: (x.sin() * x).sum() ** 2  # noqa: E731
    expected = jp.hessian(f, x)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            assert_close(jp.hessian(f, x.clone()), expected)

        def inside(x: Tensor, context=context) -> Tensor:
            with context():
                return f(x)

        assert_close(jp.hessian(inside, x, no_grad="follow"), expected)


def test_a_custom_operation_with_a_rule_where_autograd_is_on() -> None:
    w, v = nn.Parameter(randn(4)), [randn(2, 4)]
    with jp.perturb([w], v) as jets, torch.enable_grad():
        loss = jp.mark_output(w.sin() * w).sum()
    assert_quadratic(jets.quadratic(loss), double_backward(lambda: (w.sin() * w).sum(), [w], v))


def test_a_parameter_that_requires_grad_under_no_grad() -> None:
    w = nn.Parameter(randn(4))
    v = [randn(2, 4)]
    with torch.no_grad(), jp.perturb([w], v) as jets:
        loss = (w.sin() * w).sum() ** 2
    assert_quadratic(jets.quadratic(loss), double_backward(lambda: (w.sin() * w).sum() ** 2, [w], v))


# -- autocast -------------------------------------------------------------------------------------------------------


def test_autocast_equals_the_manual_cast_even_with_a_warm_cache() -> None:
    net, x = nn.Linear(8, 4), torch.randn(3, 8)
    leaves = list(net.parameters())
    v = [torch.randn(2, *p.shape) for p in leaves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(x)  # fills the cache
        with jp.perturb(leaves, v) as jets:
            loss = net(x).float().square().sum()
        auto = jets.quadratic(loss)
        assert torch.is_autocast_cache_enabled()
    cast = lambda t: t.to(torch.bfloat16)  # noqa: E731
    with jp.perturb(leaves, v) as jets:
        loss = F.linear(cast(x), cast(net.weight), cast(net.bias)).float().square().sum()
    assert auto.slope.abs().max() > 1
    by_hand = jets.quadratic(loss)
    for a, b in zip(
        (auto.loss, auto.slope, auto.curvature), (by_hand.loss, by_hand.slope, by_hand.curvature), strict=True
    ):
        assert torch.equal(a, b)


def test_autocast_inside_the_program() -> None:
    w, x = torch.randn(4, 8), torch.randn(3, 8)

    def program(w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ w.T).float().square().sum()

    twin = lambda w: (x.bfloat16() @ w.bfloat16().T).float().square().sum()  # noqa: E731
    v = torch.randn(2, 4, 8)
    assert torch.equal(jp.quadratic(program, w, v).curvature, jp.quadratic(twin, w, v).curvature)


# -- autograd.Function ---------------------------------------------------------------------------------------------


class Step(torch.autograd.Function):
    """A straight-through estimator: its forward body has derivative zero."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


stored = Step.apply


@pytest.mark.parametrize(
    "apply", [lambda x: Step.apply(x), stored, lambda x: NewStyle.apply(x)], ids=["direct", "stored", "new-style"]
)
def test_a_function_without_a_rule_is_refused(apply) -> None:
    with pytest.raises(
        jp.MissingRule,
        match=r"torch.autograd.Function (Step|NewStyle) has no rule, and differentiating its forward body could contradict its backward.*test_guards.py:\d+.*register.composite.*register.transparent",  # noqa: E501
    ):
        jp.gradient(lambda x: apply(x).sum(), randn(3))


def test_a_function_of_constants_is_fine() -> None:
    c = randn(3)
    check_against_oracle(lambda x: (Step.apply(c) * x**2).sum(), randn(3))


def test_a_function_that_captures_a_perturbed_tensor_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        class Captures(torch.autograd.Function):
            @staticmethod
            def forward(ctx, c: Tensor) -> Tensor:
                return c * x

            @staticmethod
            def backward(ctx, grad: Tensor) -> Tensor:
                return grad

        return Captures.apply(torch.ones(3, dtype=F64)).sum()

    with pytest.raises(
        jp.UnsupportedProgram, match=r"Captures uses a perturbed tensor that is not one of its arguments"
    ):
        jp.gradient(program, randn(3))


# -- threads -------------------------------------------------------------------------------------------------------


def in_a_thread(x: Tensor) -> Tensor:
    out: list[Tensor] = []
    worker = threading.Thread(target=lambda: out.append(x.sin().sum()))
    worker.start()
    worker.join()
    return out[0]


class Worker(threading.Thread):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def run(self) -> None:
        self.y = self.x.sin().sum()


def in_a_subclass(x: Tensor) -> Tensor:
    worker = Worker(x)
    worker.start()
    worker.join()
    return worker.y


def in_a_pool(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x.sin().sum()).result()


def in_a_map(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return sum(pool.map(lambda part: part.sin(), list(x)))


WARM = ThreadPoolExecutor(1)
WARM.submit(lambda: None).result()


def in_a_warm_pool(x: Tensor) -> Tensor:
    return WARM.submit(lambda: x.sin().sum()).result()


@pytest.mark.parametrize("program", [in_a_thread, in_a_subclass, in_a_pool, in_a_map, in_a_warm_pool])
def test_threads_are_refused(program) -> None:
    with pytest.raises(jp.UnsupportedProgram, match=r"starts a thread.*expected it to run in the thread of the pass"):
        jp.gradient(program, randn(3))


def test_other_threads_may_start_threads_while_a_pass_runs() -> None:
    go, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        go.wait(10)
        inner = threading.Thread(target=done.set)
        inner.start()
        inner.join()

    other = threading.Thread(target=elsewhere)
    other.start()

    def program(x: Tensor) -> Tensor:
        go.set()
        assert done.wait(10)
        return (x**2).sum()

    x = randn(3)
    assert_close(jp.gradient(program, x), 2 * x)
    other.join()


def test_two_passes_in_two_threads() -> None:
    results: dict[int, Tensor] = {}
    both = threading.Barrier(2)

    def work(number: int) -> None:
        def program(x: Tensor) -> Tensor:
            both.wait(10)
            return (x ** (number + 2)).sum()

        results[number] = jp.gradient(program, torch.tensor([2.0], dtype=F64))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert float(results[0]) == 4 and float(results[1]) == 12


def test_a_data_loader_with_threads_or_workers_is_fine() -> None:
    x = randn(2)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(4.0, dtype=F64).view(2, 2)), batch_size=1
    )
    f = lambda x: sum((x * row).sum() ** 2 for (row,) in data)  # noqa: E731
    check_against_oracle(f, x)


# -- inference_mode, fast paths, compiled code --------------------------------------------------------------------------  # noqa: E501


def layer_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("outside", [True, False])
def test_inference_mode_gives_the_same_numbers(outside: bool) -> None:
    net, x = layer_norm_net(), randn(5, 4)
    leaves = list(net.parameters())
    v = along(leaves, 2)
    loss = lambda: F.cross_entropy(net(x), torch.arange(5) % 3)  # noqa: E731
    expected = double_backward(loss, leaves, v)
    if outside:
        with torch.inference_mode(), jp.perturb(leaves, v) as jets:
            actual = jets.quadratic(loss())
    else:
        with jp.perturb(leaves, v, no_grad="follow") as jets, torch.inference_mode():
            actual = jets.quadratic(loss())
    assert_quadratic(jp.Quadratic(actual.loss.clone(), actual.slope.clone(), actual.curvature.clone()), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu"),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    ],
)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_encoder_layers_in_eval_mode_under_no_grad(make) -> None:
    net, x = make().double().eval(), randn(2, 3, 8)
    leaves = list(net.parameters())
    v = along(leaves, 2)
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), jp.perturb(leaves, v) as jets:
        actual = jets.quadratic(net(x).square().mean())
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    assert_quadratic(actual, double_backward(lambda: net(x).square().mean(), leaves, v))


def test_multihead_attention_in_eval_mode_under_no_grad() -> None:
    net, x = nn.MultiheadAttention(8, 2, batch_first=True).double().eval(), randn(2, 3, 8)
    leaves = list(net.parameters())
    v = along(leaves, 2)
    loss = lambda: net(x, x, x, need_weights=False)[0].square().mean()  # noqa: E731
    with torch.no_grad(), jp.perturb(leaves, v) as jets:
        actual = jets.quadratic(loss())
    assert_quadratic(actual, double_backward(loss, leaves, v))


def right_or_refused(program: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor], x: Tensor) -> None:
    v = randn(2, *x.shape)
    expected = jp.quadratic(twin, x, v)
    assert expected.slope.abs().max() > 1e-3
    try:
        actual = jp.quadratic(program, x, v)
    except jp.JetplaneError:
        return
    assert_quadratic(actual, expected)


def formula(x: Tensor) -> Tensor:
    return (x.sin() * x + x.exp()).sum() ** 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_inside(backend: str, warm: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(formula, backend=backend)
    if warm:
        compiled(randn(4))
        compiled(randn(4).requires_grad_()).backward()
    right_or_refused(compiled, formula, randn(4))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_under_perturb() -> None:
    net, x = layer_norm_net(), randn(5, 4)
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
    leaves = list(net.parameters())
    v = along(leaves, 2)
    try:
        with jp.perturb(leaves, v) as jets:
            actual = jets.quadratic(compiled(x).square().mean())
    except jp.JetplaneError:
        return
    assert_quadratic(actual, double_backward(lambda: net(x).square().mean(), leaves, v))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("warm", [False, True])
def test_a_scripted_function_inside(warm: bool) -> None:
    scripted = torch.jit.script(formula)
    traced = torch.jit.trace(formula, (randn(4),))
    if warm:
        for _ in range(3):
            scripted(randn(4))
            traced(randn(4))
    right_or_refused(scripted, formula, randn(4))
    right_or_refused(traced, formula, randn(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("warm", [0, 1, 3])
def test_a_scripted_module_inside(warm: int, autograd: bool) -> None:
    # TorchScript calls operations with function modes on, so the engine's own detach must not count as the program's
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.LayerNorm(3)).double()
    scripted = torch.jit.script(net)
    for _ in range(warm):
        scripted(randn(2, 4))
    x, v = randn(2, 4), randn(2, 2, 4)
    leaf = x.clone().requires_grad_()
    with torch.set_grad_enabled(autograd):
        found = jp.quadratic(lambda x: scripted(x).pow(3).sum(), x, v)
    assert_quadratic(found, double_backward(lambda: net(leaf).pow(3).sum(), [leaf], [v]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_fx_graph_inside() -> None:
    graph = torch.fx.symbolic_trace(formula)
    check_against_oracle(graph, randn(4), twin=formula)


# -- subclasses, numpy, integers ---------------------------------------------------------------------------------


class Wrapper(Tensor):
    """A subclass with its own dispatch: operations on what it wraps are hidden."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = torch.utils._pytree.tree_map_only(Wrapper, lambda w: w.inner, args)
        return func(*plain, **(kwargs or {}))


class Named(Tensor):
    """A subclass that only has a name."""


def test_a_subclass_with_its_own_dispatch_is_refused_or_right() -> None:
    c = randn(3)
    with pytest.raises(
        jp.UnsupportedProgram,
        match=r"uses the tensor subclass Wrapper, whose own dispatch hides its operations.*expected plain tensors",
    ):
        jp.gradient(lambda x: (x * Wrapper(c)).sum(), randn(3))
    right_or_refused(lambda x: Wrapper(x * 2).sin().sum(), lambda x: (x * 2).sin().sum(), randn(3))


def test_a_subclass_without_dispatch_works() -> None:
    c = randn(3).as_subclass(Named)
    check_against_oracle(lambda x: (x * c).sin().sum().as_subclass(Tensor), randn(3))
    x = randn(3)
    gradient = jp.gradient(lambda x: (x**3).sum(), x.as_subclass(Named))
    assert_close(gradient.as_subclass(Tensor), 3 * x**2)


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("argmax", lambda x: x[x.argmax()] ** 2),
        ("argsort", lambda x: (x[x.argsort()] * torch.arange(4)).sin().sum()),
        ("long", lambda x: (x * (x * 3).long()).sum()),
        ("bucketize", lambda x: (x**2 * torch.bucketize(x, torch.tensor([0.0, 0.5], dtype=F64))).sum()),
        ("comparison", lambda x: (x * (x > 0) * (x != 1)).square().sum()),
        ("nonzero", lambda x: x[(x > 0).nonzero()[:, 0]].square().sum() + x.sum()),
        ("unique", lambda x: x.square().sum() * len(torch.unique(x.round()))),
        ("isfinite", lambda x: torch.where(torch.isfinite(x), x, 0.0).square().sum()),
        ("one-hot", lambda x: (F.one_hot(x.argmax(), 4) * x).square().sum()),
        ("searchsorted", lambda x: x.square().sum() * torch.searchsorted(x.sort().values, 0.1)),
        ("allclose", lambda x: x.square().sum() * (2.0 if torch.allclose(x, x) and torch.equal(x, x) else 3.0)),
        ("multinomial", lambda x: _seeded(lambda: x[torch.multinomial(x.softmax(0), 2)].square().sum())),
        ("bernoulli", lambda x: _seeded(lambda: (torch.bernoulli(x.sigmoid()) * x**2).sum() + x.sum())),
    ],
)
def test_integers_and_truth_values_pass(name: str, program) -> None:
    check_against_oracle(program, randn(4))


# -- an exception leaves nothing behind -----------------------------------------------------------------------------------  # noqa: E501


def state() -> tuple:
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        threading.Thread.start,
        ThreadPoolExecutor.submit,
        queue.Queue.put,
        ThreadPool.imap,
        torch.autograd.function._SingleLevelFunction.__dict__.get("apply"),
        torch.is_autocast_cache_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_default_dtype(),
    )


class Stop(Exception):
    """Raised by the program."""


def failing(x: Tensor) -> Tensor:
    x.sin()
    raise Stop


def failing_deep_inside(x: Tensor) -> Tensor:
    return jp.gradient(lambda y: jp.hessian(failing, y), x)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("fastpath", [True, False])
def test_an_exception_leaves_no_state(cached: bool, fastpath: bool) -> None:
    x = randn(3)
    torch.set_autocast_cache_enabled(cached)
    torch.backends.mha.set_fastpath_enabled(fastpath)
    try:
        before = state()
        for program in (failing, failing_deep_inside):
            for run in (
                lambda p: jp.gradient(p, x),
                lambda p: jp.hessian(p, x, chunk_size=1),
                lambda p: jp.jvp(p, (x,), (x,)),
                lambda p: _in_context(p, x),
            ):
                with pytest.raises(Stop):
                    run(program)
                assert state() == before
        with pytest.raises(jp.MissingRule):
            jp.gradient(lambda x: Step.apply(x).sum(), x)
        assert state() == before
    finally:
        torch.set_autocast_cache_enabled(True)
        torch.backends.mha.set_fastpath_enabled(True)
    assert_close(jp.gradient(lambda x: (x**2).sum(), x), 2 * x)


def _in_context(program, x: Tensor) -> None:
    with jp.perturb([x], [randn(1, 3)]):
        program(x)


def test_no_unused_complaint_hides_the_programs_own_exception() -> None:
    x, y = randn(3), randn(3)
    with pytest.raises(Stop), jp.perturb([x, y], [randn(1, 3), randn(1, 3)]):
        failing(x)


def test_a_pass_is_quiet() -> None:
    net, x = nn.LSTM(3, 4).double(), randn(5, 2, 3)
    leaves = list(net.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jp.perturb(leaves, along(leaves, 1)) as jets:
            loss = net(x)[0].square().sum()
        jets.quadratic(loss)


# -- house rules ------------------------------------------------------------------------------------------------------
