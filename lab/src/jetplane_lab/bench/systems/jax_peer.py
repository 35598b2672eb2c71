"""JAX: the same models written in jax.numpy with torch's weights, all inputs passed as arguments, under jit.

JAX and torch are in one process, but torch stays on the CPU there.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..problem import Derivatives, Problem
from .system import Prepared, Setting, System

__all__ = ["SYSTEMS", "configure"]

Array = Any
Apply = Callable[[list[Array], Array], Array]  # parameters in torch's order, input -> output


def configure(precision: str, device: str) -> None:
    """Set JAX's platform and precision; before its first use in the process."""
    jax = importlib.import_module("jax")
    jax.config.update("jax_platforms", "cuda" if device.startswith("cuda") else "cpu")
    jax.config.update("jax_enable_x64", precision == "float64")
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if precision == "tf32" else "highest")


class AllocatorPeak:
    """The peak of JAX's allocator on the first device above what it held when this was made, in bytes."""

    def __init__(self) -> None:
        self._before = self._stat("bytes_in_use")

    def read(self) -> int:
        """The peak until now."""
        return self._stat("peak_bytes_in_use") - self._before

    def _stat(self, name: str) -> int:
        stats = importlib.import_module("jax").devices()[0].memory_stats()
        return int((stats or {}).get(name, 0))


# -- models -------------------------------------------------------------------------------------------------------


def _window_pool(x: Array) -> Array:
    jax = importlib.import_module("jax")
    return jax.lax.reduce_window(x, -float("inf"), jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def _reshape_pool(x: Array) -> Array:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))


def _cnn(pool: Callable[[Array], Array], params: list[Array], x: Array) -> Array:
    jax = importlib.import_module("jax")
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    for weight, bias in ((w1, b1), (w2, b2)):
        x = jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = pool(jax.nn.relu(x + bias[None, :, None, None]))
    x = jax.nn.relu(x.reshape(x.shape[0], -1) @ w3.T + b3)
    return x @ w4.T + b4


def _dense(params: list[Array], x: Array) -> Array:
    """Linear layers with ReLU between them; logistic regression is one of them."""
    jax = importlib.import_module("jax")
    for number in range(0, len(params), 2):
        x = (jax.nn.relu(x) if number else x) @ params[number].T + params[number + 1]
    return x


def _tanh(params: list[Array], x: Array) -> Array:
    return importlib.import_module("jax.numpy").tanh(x @ params[0])


def _rosenbrock(params: list[Array], x: Array) -> Array:
    a, b = params[0]
    return 100 * (b - a * a) ** 2 + (1 - a) ** 2


def _loss_of(model: str, pool: Callable[[Array], Array]) -> Callable[[list[Array], Array, Array], Array]:
    jax = importlib.import_module("jax")
    applies: dict[str, Apply] = {
        "cnn": partial(_cnn, pool),
        "logistic-regression": _dense,
        "mlp": _dense,
        "tanh-regression": _tanh,
        "rosenbrock": _rosenbrock,
    }
    apply = applies[model]

    def loss(params: list[Array], x: Array, y: Array) -> Array:
        output = apply(params, x)
        if model == "rosenbrock":
            return output
        if model == "tanh-regression":
            return ((output - y) ** 2).sum() / y.shape[0]
        rows = jax.nn.log_softmax(output)
        return -jax.numpy.take_along_axis(rows, y[:, None], 1).mean()

    return loss


# -- ways ---------------------------------------------------------------------------------------------------------


def _nested(loss: Callable[..., Array], params: Any, v: Any, x: Array, y: Array) -> Any:
    jax = importlib.import_module("jax")

    def entry(a: Any, b: Any) -> Any:
        (value, first), (_, second) = jax.jvp(
            lambda p: jax.jvp(lambda q: loss(q, x, y), (p,), (a,)),
            (params,),
            (b,),
        )
        return value, first, second

    value, slope, entries = jax.vmap(lambda a: jax.vmap(lambda b: entry(a, b))(v))(v)
    return value[0, 0], slope[:, 0], entries


def _hvp(loss: Callable[..., Array], params: Any, v: Any, x: Array, y: Array) -> Any:
    jax = importlib.import_module("jax")
    numpy = jax.numpy

    def along(direction: Any) -> Any:
        (value, gradient), (_, product) = jax.jvp(jax.value_and_grad(lambda p: loss(p, x, y)), (params,), (direction,))
        return value, gradient, product

    value, gradients, products = jax.vmap(along, out_axes=(None, None, 0))(v)
    slope = sum(numpy.tensordot(a, g, g.ndim) for a, g in zip(v, gradients, strict=True))
    flat = ((a.reshape(a.shape[0], -1), h.reshape(h.shape[0], -1)) for a, h in zip(v, products, strict=True))
    return value, slope, sum(a @ h.T for a, h in flat)


def _prepare(way: Callable[..., Any], pool: Callable[[Array], Array], problem: Problem, setting: Setting) -> Prepared:
    jax = importlib.import_module("jax")

    def array(tensor: torch.Tensor) -> Array:
        return jax.device_put(tensor.detach().cpu().numpy())

    arguments = (
        [array(p) for p in problem.params.values()],
        [array(d) for d in problem.directions.values()],
        array(problem.x),
        array(problem.y.to(torch.int32) if not problem.y.is_floating_point() else problem.y),
    )
    jitted = jax.jit(partial(way, _loss_of(problem.name, pool)))
    executable: list[Any] = []  # compiled in the first call, so that its time is counted there

    def call() -> Any:
        if not executable:
            executable.append(jitted.lower(*arguments).compile())
        return executable[0](*arguments)

    def read(result: Any) -> Derivatives:
        loss, slope, curvature = (torch.from_numpy(jax.device_get(part).copy()) for part in result)
        return Derivatives(loss, slope, curvature)

    def planned() -> int | None:
        analysis = executable[0].memory_analysis() if executable else None
        return None if analysis is None else int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)

    return Prepared(call, read, jax.block_until_ready, planned)


def _missing(setting: Setting) -> str | None:
    return None if importlib.util.find_spec("jax") else "JAX is not installed"


def _only_cnn(setting: Setting) -> str | None:
    return _missing(setting) or (None if setting.model == "cnn" else "it differs from jax-nested on the CNN alone")


def _peer(name: str, about: str, way: Callable[..., Any], pool: Callable[[Array], Array] = _window_pool) -> System:
    missing = _missing if pool is _window_pool else _only_cnn
    return System(name, about, "peer", partial(_prepare, way, pool), missing, library="jax", compiled=True)


SYSTEMS = (
    _peer("jax-nested", "JAX: jit of vmap of vmap of jvp of jvp", _nested),
    _peer("jax-nested-reshape", "the same, pooling by reshape and max", _nested, _reshape_pool),
    _peer("jax-hvp", "JAX: jit of vmap of jvp of grad (needs backprop)", _hvp),
)
