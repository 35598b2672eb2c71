"""The only file that touches torch's private modules.

Everything here was checked on torch 2.11 to 2.13; when a new release moves something, this is the file to change.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch._functorch.autograd_function as _functions
import torch._functorch.vmap as _vmap
import torch.autograd.function as _function
from torch.autograd import forward_ad
from torch.fx.experimental import const_fold as _const_fold
from torch.utils import _contextlib
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CONST_FOLD",
    "CONTEXT_DECORATORS",
    "INFERENCE_SWITCHES",
    "IS_GRAD_ENABLED",
    "SET_GRAD_ENABLED",
    "AboveAutograd",
    "DispatchMode",
    "HigherOrderOperator",
    "OpOverload",
    "SingleLevelFunction",
    "apart_from_graphs",
    "are_transforms_active",
    "capture_errors",
    "captured",
    "compiled",
    "copies",
    "decomposition",
    "engine",
    "explain_capture",
    "foreach",
    "full_precision",
    "has_gradient_hooks",
    "is_composite",
    "is_fake",
    "is_forward_mode",
    "is_functorch_wrapper",
    "is_tracing",
    "made_for_transform",
    "native_losses",
    "no_function_modes",
    "op_database",
    "owns_memory",
    "plain_body",
    "prim_body",
    "pytree",
    "quiet_vmap_fallback",
    "set_engine",
    "uncompiled",
    "undispatched",
    "unfused_script",
    "unwrap_functorch",
    "without_fused_libraries",
]

log = logging.getLogger("jetplane")

_F = TypeVar("_F", bound=Callable[..., Any])


class DispatchMode(TorchDispatchMode):
    """torch's dispatch mode, without the wrapper that would import and call dynamo at every operation."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator

# What every switch of autograd calls, the file of the decorators that are made of such contexts, and how a captured
# program enters and leaves inference mode.
SET_GRAD_ENABLED = torch._C._set_grad_enabled
CONTEXT_DECORATORS = _contextlib.__file__
CONST_FOLD: Any = _const_fold  # what torch.func.linearize makes constants with
INFERENCE_SWITCHES = (torch.autograd.grad_mode._enter_inference_mode, torch.autograd.grad_mode._exit_inference_mode)
IS_GRAD_ENABLED = torch.is_grad_enabled  # torch's own: while a pass runs, another stands in its place

# Function.apply resolves `super().apply` at call time, so this base class sees every call,
# also those through a bound `MyFunction.apply` that was stored before jetplane was imported.
SingleLevelFunction = _function._SingleLevelFunction

# Arithmetic on lists of tensors, of which torch's own optimizers are made.
foreach: Any = SimpleNamespace(
    **{
        name: getattr(torch, f"_foreach_{name}")
        for name in ("add_", "div", "div_", "lerp", "mul", "mul_", "neg_", "norm", "sqrt", "sub")
    }
)

_KEYS = torch._C.DispatchKey
_AUTOCAST = reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(_KEYS, name))
        for name in dir(_KEYS)
        if name.startswith("Autocast") and name not in ("AutocastFunctionality",)
    ),
)


def is_forward_mode() -> bool:
    """Whether torch's own forward mode is active, whose tangents are kept by tensors themselves."""
    return forward_ad._current_level >= 0


class AboveAutograd:
    """The thread's dispatch state where a pass was started, to be restored inside the mode's handler.

    A dispatch handler runs below autograd and functorch. Restoring the state of the start makes vmap, composite
    operations and autograd work there; autocast stays off, for its casts happened already. Whether rows get an
    autograd graph is decided at the start too, and not by a no_grad inside the program.
    """

    def __init__(self) -> None:
        self.differentiable = IS_GRAD_ENABLED()
        self.include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set()
        self.exclude = exclude | _AUTOCAST

    def __call__(self) -> _Restored:
        """A context in which the state is restored."""
        return _Restored(self)

    def is_needless(self) -> bool:
        """Whether plain arithmetic gives the same below autograd, where it takes less time: no graph, and no casts."""
        return not self.differentiable and not torch._C._is_any_autocast_enabled()


class _Restored:
    """One use of :class:`AboveAutograd`. A class, for a generator would cost more than the operation inside."""

    def __init__(self, state: AboveAutograd) -> None:
        self._guard = torch._C._ForceDispatchKeyGuard(state.include, state.exclude)
        self._differentiable = state.differentiable

    def __enter__(self) -> None:
        self._previous = IS_GRAD_ENABLED()
        torch._C._set_grad_enabled(self._differentiable)
        self._guard.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._guard.__exit__(*exc)
        torch._C._set_grad_enabled(self._previous)


class without_fused_libraries:
    """cuDNN and oneDNN off, so that torch composes their layers of plain operations."""

    def __enter__(self) -> None:
        self._previous = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
        self._set(False, False)

    def __exit__(self, *exc: object) -> None:
        self._set(*self._previous)

    @staticmethod
    def _set(cudnn: bool, mkldnn: bool) -> None:
        torch._C._set_cudnn_enabled(cudnn)
        torch._C._set_mkldnn_enabled(mkldnn)


def is_composite(op: Any) -> bool:
    """Whether torch implements ``op`` by calling other operations (CompositeImplicitAutograd)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def plain_body(name: str) -> Callable[..., Any]:
    """What runs an operator of higher order where nothing is differentiated or traced: calls of its functions."""
    op = getattr(torch.ops.higher_order, name)
    body: Callable[..., Any] = op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return body


def decomposition(op: Any) -> Callable[..., Any] | None:
    """torch's own decomposition of ``op`` into simpler operations, or None."""
    # Lazy: the table imports sympy and takes a second.
    from torch._decomp import decomposition_table

    return decomposition_table.get(op)


def prim_body(op: Any) -> Callable[..., Any] | None:
    """The ATen implementation behind one of torch's `prims`, or None."""
    return getattr(op, "impl_aten", None) if op.namespace == "prims" else None


def are_transforms_active() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp, ...) is running."""
    return bool(torch._C._are_functorch_transforms_active())


def is_functorch_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one of torch.func's wrappers, which own no storage."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def unwrap_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor under any number of torch.func's wrappers."""
    while is_functorch_wrapper(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def made_for_transform(function: type) -> tuple[type, Callable[[Any], Any] | None] | None:
    """Of a Function that torch.func made of another one: that one, and how ``vmap`` lifts a program in its place.

    None for all others. Without a lift its forward body calls the other one, a level lower.
    """
    forward: Any = getattr(function.__dict__.get("forward"), "__func__", None)
    if getattr(forward, "__module__", None) != _functions.__name__:
        return None
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    if "batch_size" not in held:
        return held["autograd_function"], None

    def lift(body: Any) -> Any:
        def lifted(*operands: Any) -> Any:
            batched = _vmap.restore_vmap(body, held["in_dims"], held["batch_size"], held["randomness"])
            outputs, dims = batched(*operands)
            return (outputs, dims) if isinstance(outputs, torch.Tensor) else (*outputs, dims)

        return lifted

    return held["autograd_function"], lift


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a backward pass would call functions of the user's with the gradient of a leaf."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of this one."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)  # the tensor and ``storage`` here


def is_fake(kind: type) -> bool:
    """Whether tensors of this class are torch's stand-ins without values, of which a tracer makes programs."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and issubclass(kind, fake.FakeTensor)


def undispatched() -> Any:
    """A context in which no TorchDispatchMode sees the operations."""
    return torch._C._DisableTorchDispatch()


def no_function_modes() -> Any:
    """A context in which no TorchFunctionMode sees the calls."""
    return torch._C.DisableTorchFunction()


def native_losses(name: str) -> list[Any]:
    """The built-in functions behind the loss of this name in torch.nn.functional: a captured program may call them."""
    names = {"cross_entropy": ("cross_entropy_loss",), "nll_loss": ("nll_loss_nd", "nll_loss2d", "nll_loss")}
    modules = (torch, torch._C._nn)
    found = [getattr(module, one, None) for module in modules for one in names.get(name, (name,))]
    return [function for function in found if function is not None]


class unfused_script:
    """TorchScript runs operation by operation, without fused kernels. A class, for torch's own is a generator."""

    def __enter__(self) -> None:
        self._previous = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)

    def __exit__(self, *exc: object) -> None:
        torch._C._set_graph_executor_optimize(self._previous)


class uncompiled:
    """Compiled functions run as they are: ``torch.compiler.set_stance``, which would change it three times a pass.

    The stance is written as it stands, for torch refuses to change it where the pass is a part of a program that is
    being compiled, at a graph break.
    """

    # The stance is that of all threads: the first pass sets it, and the last one to end sets it back.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _running: ClassVar[int] = 0
    _previous: ClassVar[Any] = None
    _eager: ClassVar[Any] = None

    def __enter__(self) -> None:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # else nothing is compiled; it takes seconds to load
        with uncompiled._lock:
            uncompiled._running += 1
            if dynamo is not None:
                self._hold(dynamo)

    @staticmethod
    def _hold(dynamo: Any) -> None:
        if uncompiled._eager is None:
            uncompiled._eager = dynamo.DynamoStance("force_eager")
        if uncompiled._previous is None:
            uncompiled._previous, dynamo._stance = dynamo._stance, uncompiled._eager

    @staticmethod
    def begin_late() -> None:
        """The program is going to load the compiler while a pass runs."""
        from torch._dynamo import eval_frame

        with uncompiled._lock:
            if uncompiled._running:
                uncompiled._hold(eval_frame)

    def __exit__(self, *exc: object) -> None:
        with uncompiled._lock:
            uncompiled._running -= 1
            if not uncompiled._running and uncompiled._previous is not None:
                sys.modules["torch._dynamo.eval_frame"]._stance = uncompiled._previous  # type: ignore[attr-defined]
                uncompiled._previous = None


class quiet_vmap_fallback:
    """Lift by torch's loop, without its performance warning, where an operation has no batching rule."""

    def __enter__(self) -> None:
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]

    def __exit__(self, *exc: object) -> None:
        torch._C._functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


def op_database() -> list[Any]:
    """PyTorch's own table of operations with sample inputs. Needs the package `expecttest`."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


# -- the engine of backward passes ----------------------------------------------------------------------------------


def engine() -> Any:
    """What every backward pass that Python starts is run by: its ``run_backward``."""
    return torch.autograd.Variable._execution_engine


def set_engine(new: Any) -> None:
    """Let backward passes be run by ``new``."""
    torch.autograd.Variable._execution_engine = new


def is_tracing() -> bool:
    """Whether torch's compiler is making a program in this thread: what runs is not the program itself."""
    return torch._guards.TracingContext.try_get() is not None


# -- capture and compilation ----------------------------------------------------------------------------------------


def apart_from_graphs(function: _F) -> _F:
    """The function, at which torch.compile breaks the graph of a program that calls it, and runs it as it is."""
    as_it_is = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # which loads the compiler at its first call, and not before

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return as_it_is(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else function(*args, **kwargs)

    return cast(_F, call)


def captured(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under Dynamo: each graph of it is run by what ``backend`` makes of it."""
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def capture_errors() -> tuple[type[BaseException], ...]:
    """What Dynamo raises where a program cannot be captured whole."""
    from torch._dynamo import exc

    names = ("TorchDynamoException", "FailOnRecompileLimitHit", "RecompileError", "UserError")
    return tuple(getattr(exc, name) for name in names if hasattr(exc, name))


def explain_capture(error: BaseException) -> str:
    """One sentence of Dynamo's long explanation, with the user's line where it names one."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    places = [line.strip() for line in text.splitlines() if line.strip().startswith('File "')]
    return f"{first.rstrip('.')} ({places[-1]})" if places else first.rstrip(".")


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 on CUDA without TF32, where torch says what is set."""
    try:
        products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    except RuntimeError:  # its newer settings are in use
        yield
        return
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of several tensors, on CUDA by one launch where they are alike."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made


@contextlib.contextmanager
def _advice_logged() -> Iterator[None]:
    """Inductor warns of its own choices and of its own deprecated calls: not a reason to fail where warnings do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(" ".join(str(one.message).split()) for one in caught):
        log.info("torch's compiler: %s", text)


def compiled(function: Callable[..., Any], inputs: Any) -> tuple[Callable[..., Any], set[int]]:
    """``function`` of a list of tensors, traced without values and compiled by Inductor; and which inputs it writes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    plain = [tensor.detach() for tensor in inputs]
    written: set[int] = set()
    made: list[tuple[Any, int, int]] = []  # what Inductor makes, with the numbers of its inputs and outputs

    def noting(graph: Any, *args: Any, **options: Any) -> Any:
        inputs, (output,) = graph.graph.find_nodes(op="placeholder"), graph.graph.find_nodes(op="output")
        counts = len(inputs), len(output.args[0])
        made.append((compile_fx.compile_fx_inner(graph, *args, **options), *counts))
        return made[-1][0]

    def watched(*tensors: torch.Tensor) -> Any:
        before = [tensor._version for tensor in tensors]
        out = function(list(tensors))
        written.update(n for n, tensor in enumerate(tensors) if tensor._version != before[n])
        return out

    with torch.no_grad():
        traced = make_fx(watched, tracing_mode="fake")(*plain)
        (output,) = traced.graph.find_nodes(op="output")
        outputs = len(output.args[0])
        with _advice_logged():
            from torch._inductor import compile_fx

            run: Any = compile_fx.compile_fx(traced, plain, inner_compile=noting)

    def call(tensors: Any) -> Any:
        with torch.no_grad():
            return run(*[tensor.detach() for tensor in tensors])

    if len(made) != 1 or made[0][1:] != (len(plain), outputs) or torch._C._is_any_autocast_enabled():
        return call, written
    # Nothing is left to autograd's layers around it but to count the writes: they take longer than a small program.
    inner = getattr(made[0][0], "current_callable", None) or made[0][0]

    def call_inner(tensors: Any) -> Any:
        with torch.no_grad():
            torch.autograd.graph.increment_version([tensors[place] for place in written])
            return inner([tensor.detach() for tensor in tensors])

    return call_inner, written
