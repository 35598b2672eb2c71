"""Derivatives of functions, shaped like torch.func: ``func(*primals)``, pytrees, forward passes only.

``primals`` is a tuple of arguments, or a single argument that is not a tuple. Directions have the primals' structure
with a leading axis K, or are lazy (:class:`jetplane.Directions`). ``chunk_size`` bounds how many directions travel
together; the result is the same, random numbers are drawn once, and buffers such as batch-norm statistics are updated
once. ``memory``, a number of bytes or a text such as "4GiB", chooses it: a few small passes are measured for that.
Results can be differentiated by backprop: ``laplacian(u, x).mean().backward()``.

``batch_ndim`` leading axes of every primal number samples that do not interact, as in ``u(x)`` with x (batch, dim).
They share the coordinate directions, so that K is the size of one sample, and each one's derivatives are by its own
entries.

Where ``func`` itself switches autograd off, by ``torch.no_grad()`` or the like, tangents stop, as those of backprop and
of torch.func.grad do; with ``no_grad="follow"`` they go on, as torch.func.jvp's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from torch import Tensor

from .. import _torch
from ..algebra.jet import HyperDual, Jet, PairSet, Quadratic
from . import tasks
from .problem import Problem

__all__ = ["gradient", "hessian", "hvp", "hyperdual", "jet", "jvp", "laplacian", "quadratic"]

Out = TypeVar("Out")
Aux = TypeVar("Aux")
Primals = TypeVar("Primals")
Func = Callable[..., Out]
WithAux = Callable[..., tuple[Out, Aux]]
Plain = Literal[False]  # has_aux
Paired = Literal[True]


class _Chunked(TypedDict, total=False):
    """Options of all transforms that may take several passes."""

    chunk_size: int | None
    memory: int | str | None
    no_grad: str


class _Planes(_Chunked, total=False):
    curvature: str


class _Sampled(_Chunked, total=False):
    batch_ndim: int


class _Sums(_Sampled, total=False):
    directions: Any


@overload
def jvp(
    func: Func[Out], primals: Any, tangents: Any, *, has_aux: Plain = False, no_grad: str = "stop"
) -> tuple[Out, Out]: ...
@overload
def jvp(
    func: WithAux[Out, Aux], primals: Any, tangents: Any, *, has_aux: Paired, no_grad: str = "stop"
) -> tuple[Out, Out, Aux]: ...
@_torch.apart_from_graphs
def jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False, no_grad: str = "stop"
) -> tuple[Any, ...]:
    """The value of ``func`` and its derivative along ``tangents``: ``(output, J v)``.

    As torch.func.jvp; also where ``func`` switches autograd off, with ``no_grad="follow"``.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> jvp(torch.square, (x,), (torch.ones(2),))
        (tensor([1., 4.]), tensor([2., 4.]))
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.jvp(problem, tangents))


@overload
def hyperdual(
    func: Func[Any], primals: Any, v1: Any, v2: Any, v12: Any = None, *, has_aux: Plain = False, no_grad: str = "stop"
) -> HyperDual: ...
@overload
def hyperdual(
    func: WithAux[Any, Aux], primals: Any, v1: Any, v2: Any, v12: Any = None, *, has_aux: Paired, no_grad: str = "stop"
) -> tuple[HyperDual, Aux]: ...
@_torch.apart_from_graphs
def hyperdual(
    func: Callable[..., Any],
    primals: Any,
    v1: Any,
    v2: Any,
    v12: Any = None,
    *,
    has_aux: bool = False,
    no_grad: str = "stop",
) -> HyperDual | tuple[HyperDual, Any]:
    """``func`` of the hyper-dual number x + v1 e1 + v2 e2 + v12 e1 e2, for outputs of any shape.

    eps12 = grad f . v12 + v1^T H v2.

    Example:
        >>> x = torch.tensor(2.0, dtype=torch.float64)
        >>> one = torch.ones_like(x)
        >>> float(hyperdual(lambda x: x**3, x, one, one).eps12)
        12.0
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.hyperdual(problem, v1, v2, v12))


@overload
def jet(
    func: Func[Any],
    primals: Any,
    directions: Any,
    pairs: str | PairSet = "all",
    *,
    has_aux: Plain = False,
    **options: Unpack[_Chunked],
) -> Jet: ...
@overload
def jet(
    func: WithAux[Any, Aux],
    primals: Any,
    directions: Any,
    pairs: str | PairSet = "all",
    *,
    has_aux: Paired,
    **options: Unpack[_Chunked],
) -> tuple[Jet, Aux]: ...
@_torch.apart_from_graphs
def jet(
    func: Callable[..., Any],
    primals: Any,
    directions: Any,
    pairs: str | PairSet = "all",
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Jet | tuple[Jet, Any]:
    """The value, the K first and the chosen second derivatives of ``func`` along ``directions``, in one pass.

    ``pairs`` is "all", "diagonal", "star", "laplacian", "none" or a :class:`PairSet`. The fields of the Jet have the
    structure of the output: tangent (K, *out), second (rows, *out).

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> j = jet(lambda x: x[0] * x[1], x, torch.eye(2))
        >>> j.tangent, j.second
        (tensor([2., 1.]), tensor([0., 1., 0.]))
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.jet(problem, directions, pairs), chunk_size, memory)


@overload
def quadratic(
    func: Func[Tensor], primals: Any, directions: Any, *, has_aux: Plain = False, **options: Unpack[_Planes]
) -> Quadratic: ...
@overload
def quadratic(
    func: WithAux[Tensor, Aux], primals: Any, directions: Any, *, has_aux: Paired, **options: Unpack[_Planes]
) -> tuple[Quadratic, Aux]: ...
@_torch.apart_from_graphs
def quadratic(
    func: Callable[..., Any],
    primals: Any,
    directions: Any,
    *,
    curvature: str = "exact",
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Quadratic | tuple[Quadratic, Any]:
    """The quadratic model of a scalar function in the plane of ``directions``: loss, slope V g, curvature V H V^T.

    With ``curvature="ggn"`` the curvature is Gauss-Newton's, V J^T (Hess loss) J V^T with J of the model's output; see
    :func:`jetplane.mark_output`. With "fisher" the function returns the losses of single samples (B,), and the
    curvature is the second moment of their slopes; with "none" it is zero. Both cost a pass of first order.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> quadratic(lambda x: (x**3).sum(), x, torch.eye(2)).curvature
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.quadratic(problem, directions, curvature=curvature), chunk_size, memory)


@overload
def gradient(
    func: Func[Tensor], primals: Primals, *, has_aux: Plain = False, **options: Unpack[_Sampled]
) -> Primals: ...
@overload
def gradient(
    func: WithAux[Tensor, Aux], primals: Primals, *, has_aux: Paired, **options: Unpack[_Sampled]
) -> tuple[Primals, Aux]: ...
@overload
def gradient(func: Func[Any], primals: Any, *, has_aux: bool = False, **options: Unpack[_Sampled]) -> Any: ...
@_torch.apart_from_graphs
def gradient(
    func: Callable[..., Any],
    primals: Any,
    *,
    batch_ndim: int = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """All first derivatives of ``func``, without a backward pass: the primals' structure, each (*out, *S).

    With ``batch_ndim=1`` those of each sample: u(x) of shape (B,) and x (B, D) give (B, D).

    Example:
        >>> gradient(lambda x: (x**2).sum(), torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.gradient(problem, batch_ndim=batch_ndim), chunk_size, memory)


@overload
def hvp(
    func: Func[Tensor], primals: Primals, v: Any, *, has_aux: Plain = False, **options: Unpack[_Sampled]
) -> Primals: ...
@overload
def hvp(
    func: WithAux[Tensor, Aux], primals: Primals, v: Any, *, has_aux: Paired, **options: Unpack[_Sampled]
) -> tuple[Primals, Aux]: ...
@overload
def hvp(func: Func[Any], primals: Any, v: Any, *, has_aux: bool = False, **options: Unpack[_Sampled]) -> Any: ...
@_torch.apart_from_graphs
def hvp(
    func: Callable[..., Any],
    primals: Any,
    v: Any,
    *,
    batch_ndim: int = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """The Hessian times ``v``, without a backward pass: one star of pairs, ``v`` against each coordinate.

    With ``batch_ndim=1`` each sample's Hessian times its own v: (B, D).

    Example:
        >>> hvp(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
        tensor([ 6., 12.])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.hvp(problem, v, batch_ndim=batch_ndim), chunk_size, memory)


@overload
def hessian(func: Func[Tensor], primals: Tensor, *, has_aux: Plain = False, **options: Unpack[_Sampled]) -> Tensor: ...
@overload
def hessian(
    func: WithAux[Tensor, Aux], primals: Tensor, *, has_aux: Paired, **options: Unpack[_Sampled]
) -> tuple[Tensor, Aux]: ...
@overload
def hessian(
    func: Func[Tensor], primals: dict[str, Tensor], *, has_aux: Plain = False, **options: Unpack[_Sampled]
) -> dict[str, dict[str, Tensor]]: ...
@overload
def hessian(func: Func[Any], primals: Any, *, has_aux: bool = False, **options: Unpack[_Sampled]) -> Any: ...
@_torch.apart_from_graphs
def hessian(
    func: Callable[..., Any],
    primals: Any,
    *,
    batch_ndim: int = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """All second derivatives of ``func``: (*out, *S, *S), or the primals' structure twice over.

    With ``batch_ndim=1`` the Hessian of each sample by its own entries, (B, D, D) for u(x) of shape (B,) and x (B, D):
    one pass with D directions for all samples.

    Example:
        >>> hessian(lambda x: x[0] ** 2 * x[1], torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    return problem.take(tasks.hessian(problem, batch_ndim=batch_ndim), chunk_size, memory)


@overload
def laplacian(func: Func[Out], primals: Any, *, has_aux: Plain = False, **options: Unpack[_Sums]) -> Out: ...
@overload
def laplacian(
    func: WithAux[Out, Aux], primals: Any, *, has_aux: Paired, **options: Unpack[_Sums]
) -> tuple[Out, Aux]: ...
@_torch.apart_from_graphs
def laplacian(
    func: Callable[..., Any],
    primals: Any,
    *,
    directions: Any = None,
    batch_ndim: int = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """The sum of the second derivatives of ``func`` along all coordinates, carried as a single row.

    With ``directions``, the sum of v_k^T H v_k over those instead. With ``batch_ndim=1``, that of each sample.

    Example:
        >>> laplacian(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        tensor(18.)
    """
    problem = Problem(func, primals, has_aux, no_grad)
    task = tasks.laplacian(problem, directions=directions, batch_ndim=batch_ndim)
    return problem.take(task, chunk_size, memory)
