"""Derivatives of functions, shaped like torch.func: ``func(*primals)``, pytrees, forward passes only.

``primals`` is a tuple of arguments, or a single argument that is not a tuple. Directions have the primals' structure
with a leading axis K, or are lazy (:class:`jetplane.Directions`). ``chunk_size`` bounds how many directions travel
together; the result is the same, random numbers are drawn once, and buffers such as batch-norm statistics are updated
once. ``memory``, a number of bytes or a text such as "4GiB", chooses it: a few small passes are measured for that.
Results can be differentiated by backprop: ``laplacian(u, x).mean().backward()``.

Where ``func`` itself switches autograd off, by ``torch.no_grad()`` or the like, tangents stop, as those of backprop and
of torch.func.grad do; with ``no_grad="follow"`` they go on, as torch.func.jvp's do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from .. import _torch
from ..algebra.curvature_table import Entry, entry
from ..algebra.jet import HyperDual, Jet, PairSet, Quadratic
from ..engine.guards import refuse_transforms
from .auxiliary import split_aux
from .budget import chunk_size_of
from .directions import Basis, Directions, Given, Joined, Leaf
from .passes import Chunk, assemble, check_directions, check_leaf, chunks, lazily
from .replay import Replay

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


class _Sums(_Chunked, total=False):
    directions: Any
    batch_ndim: int


_map, _leaves, _unflatten = _torch.pytree.tree_map, _torch.pytree.tree_leaves, _torch.pytree.tree_unflatten


class Problem:
    """A function with its primals laid out flat."""

    def __init__(self, func: Callable[..., Any], primals: Any, has_aux: bool, no_grad: str = "stop") -> None:
        if not callable(func):
            raise TypeError(f"func is {type(func).__name__}; expected a callable.")
        refuse_transforms()
        self.func = func
        self.has_aux = has_aux
        self.no_grad = no_grad
        self.bare = not isinstance(primals, tuple)
        self.leaves, self.structure = _torch.pytree.tree_flatten(primals)
        if not self.leaves:
            raise ValueError("primals hold no tensor; expected at least one to perturb.")
        self.labels = [f"primal {i}" if len(self.leaves) > 1 else "the primal" for i in range(len(self.leaves))]
        for leaf, label in zip(self.leaves, self.labels, strict=True):
            check_leaf(leaf, label, real=False)
        self.aux: Any = None

    def directions(self, given: Any) -> Directions:
        """The user's directions, checked, or their lazy directions."""
        lazy = lazily(given)
        if lazy is not None:
            return lazy
        leaves, structure = _torch.pytree.tree_flatten(given)
        if structure != self.structure:
            raise ValueError(f"directions have the structure {structure}; expected the primals' {self.structure}.")
        check_directions(leaves, self.leaves, self.labels)
        return Given(leaves)

    def single(self, given: Any, name: str) -> list[Tensor]:
        """One direction, without the leading axis, as rows of one."""
        leaves, structure = _torch.pytree.tree_flatten(given)
        if structure != self.structure:
            raise ValueError(f"{name} has the structure {structure}; expected the primals' {self.structure}.")
        rows = []
        for leaf, primal, label in zip(leaves, self.leaves, self.labels, strict=True):
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{name} for {label} is {type(leaf).__name__}; expected a tensor.")
            if leaf.shape != primal.shape:
                raise ValueError(f"{name} for {label} has shape {tuple(leaf.shape)}; expected {tuple(primal.shape)}.")
            rows.append(leaf.unsqueeze(0))
        check_directions(rows, self.leaves, self.labels)
        return rows

    def basis(self, batch_ndim: int = 0) -> Basis:
        """The coordinate directions of the primals."""
        for leaf, label in zip(self.leaves, self.labels, strict=True):
            check_leaf(leaf, label)
            if not 0 <= batch_ndim <= leaf.ndim:
                shape = tuple(leaf.shape)
                raise ValueError(f"batch_ndim is {batch_ndim}; expected 0 to {leaf.ndim} for {label} {shape}.")
        return Basis([leaf.shape for leaf in self.leaves], batch_ndim)

    def run(
        self,
        directions: Directions,
        pairs: PairSet,
        chunk_size: int | None = None,
        memory: int | str | None = None,
        late: bool = False,
        curve: list[Tensor] | None = None,
    ) -> Any:
        """The jets of all outputs, as a tree."""
        one = partial(self._pass, directions, curve)
        devices = [leaf.device for leaf in self.leaves]
        work = chunks(pairs, chunk_size_of(memory, chunk_size, pairs, one, devices, late), late)
        if len(work) == 1:
            return one(work[0])
        replay = Replay(devices)
        trees = [replay.run(partial(one, chunk)) for chunk in work]
        flat = [_leaves(tree, is_leaf=_is_jet) for tree in trees]
        structure = _torch.pytree.tree_structure(trees[0], is_leaf=_is_jet)
        jets = [assemble(pairs, list(zip(work, parts, strict=True))) for parts in zip(*flat, strict=True)]
        return _unflatten(jets, structure)

    def _pass(self, directions: Directions, curve: list[Tensor] | None, chunk: Chunk) -> Any:
        # Clones: a tensor that the function also captures is a constant there, and must not be perturbed.
        clones = [leaf.clone() for leaf in self.leaves]
        one = chunk.begin(self.no_grad)
        for position, (clone, label) in enumerate(zip(clones, self.labels, strict=True)):
            second = None if curve is None else curve[position]
            one.perturb(Leaf(clone, position, directions, chunk.rows, second), label)
        arguments = _unflatten(clones, self.structure)
        with one.running():
            out = self.func(arguments) if self.bare else self.func(*arguments)
        out, self.aux = split_aux(out, self.has_aux)
        one.check_followed(_leaves(out))
        return _map(one.jet, out)

    def finish(self, *result: Any) -> Any:
        """The result, with the auxiliary output behind it where there is one."""
        result = (*result, self.aux) if self.has_aux else result
        return result[0] if len(result) == 1 else result


def _is_jet(value: Any) -> bool:
    return isinstance(value, Jet)


def _part(tree: Any, read: Callable[[Any], Any]) -> Any:
    return _map(read, tree, is_leaf=_is_jet)


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
    tree = problem.run(Given(problem.single(tangents, "tangents")), PairSet.none(1))
    return problem.finish(_part(tree, lambda j: j.primal), _part(tree, lambda j: j.tangent[0]))


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
    first, second = problem.single(v1, "v1"), problem.single(v2, "v2")
    rows = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    curve = None if v12 is None else problem.single(v12, "v12")
    tree = problem.run(Given(rows), PairSet.single(), curve=curve)
    number = HyperDual(
        _part(tree, lambda j: j.primal),
        _part(tree, lambda j: j.tangent[0]),
        _part(tree, lambda j: j.tangent[1]),
        _part(tree, lambda j: j.second[0]),
    )
    return problem.finish(number)


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
    rows = problem.directions(directions)
    tree = problem.run(rows, PairSet.of(pairs, rows.k), chunk_size, memory)
    return problem.finish(
        Jet(_part(tree, lambda j: j.primal), _part(tree, lambda j: j.tangent), _part(tree, lambda j: j.second))
    )


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
    rows, kind = problem.directions(directions), entry(curvature)
    pairs = kind.pairs(rows.k)
    tree = problem.run(rows, pairs, chunk_size, memory, kind.late)
    return problem.finish(quadratic_of(tree, pairs, kind))


def quadratic_of(result: Any, pairs: PairSet, kind: Entry) -> Quadratic:
    """The quadratic model from the jet of a scalar, or of one loss for each sample where the curvature asks for it."""
    if not isinstance(result, Jet):
        raise ValueError(f"the function returned {type(result).__name__}; expected one scalar tensor.")
    if result.primal.numel() != 1 and not kind.each:
        raise ValueError(f"the loss has shape {tuple(result.primal.shape)}; expected a scalar.")
    if result.primal.is_complex():
        raise ValueError(
            f"the loss has dtype {result.primal.dtype}; expected a real number, such as loss.real or loss.abs()."
        )
    if not result.primal.is_floating_point():
        raise ValueError(f"the loss has dtype {result.primal.dtype}; expected a floating-point scalar.")
    return kind.read(result, pairs)


@overload
def gradient(
    func: Func[Tensor], primals: Primals, *, has_aux: Plain = False, **options: Unpack[_Chunked]
) -> Primals: ...
@overload
def gradient(
    func: WithAux[Tensor, Aux], primals: Primals, *, has_aux: Paired, **options: Unpack[_Chunked]
) -> tuple[Primals, Aux]: ...
@overload
def gradient(func: Func[Any], primals: Any, *, has_aux: bool = False, **options: Unpack[_Chunked]) -> Any: ...
@_torch.apart_from_graphs
def gradient(
    func: Callable[..., Any],
    primals: Any,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """All first derivatives of ``func``, without a backward pass: the primals' structure, each (*out, *S).

    Example:
        >>> gradient(lambda x: (x**2).sum(), torch.tensor([1.0, 2.0]))
        tensor([2., 4.])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    basis = problem.basis()
    tree = problem.run(basis, PairSet.none(basis.k), chunk_size, memory)
    return problem.finish(_part(tree, lambda j: _by_primal(problem, j.tangent.movedim(0, -1))))


@overload
def hvp(
    func: Func[Tensor], primals: Primals, v: Any, *, has_aux: Plain = False, **options: Unpack[_Chunked]
) -> Primals: ...
@overload
def hvp(
    func: WithAux[Tensor, Aux], primals: Primals, v: Any, *, has_aux: Paired, **options: Unpack[_Chunked]
) -> tuple[Primals, Aux]: ...
@overload
def hvp(func: Func[Any], primals: Any, v: Any, *, has_aux: bool = False, **options: Unpack[_Chunked]) -> Any: ...
@_torch.apart_from_graphs
def hvp(
    func: Callable[..., Any],
    primals: Any,
    v: Any,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """The Hessian times ``v``, without a backward pass: one star of pairs, ``v`` against each coordinate.

    Example:
        >>> hvp(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
        tensor([ 6., 12.])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    rows = Joined(Given(problem.single(v, "v")), problem.basis())
    tree = problem.run(rows, PairSet.star(rows.k), chunk_size, memory)
    return problem.finish(_part(tree, lambda j: _by_primal(problem, j.second.movedim(0, -1))))


@overload
def hessian(func: Func[Tensor], primals: Tensor, *, has_aux: Plain = False, **options: Unpack[_Chunked]) -> Tensor: ...
@overload
def hessian(
    func: WithAux[Tensor, Aux], primals: Tensor, *, has_aux: Paired, **options: Unpack[_Chunked]
) -> tuple[Tensor, Aux]: ...
@overload
def hessian(
    func: Func[Tensor], primals: dict[str, Tensor], *, has_aux: Plain = False, **options: Unpack[_Chunked]
) -> dict[str, dict[str, Tensor]]: ...
@overload
def hessian(func: Func[Any], primals: Any, *, has_aux: bool = False, **options: Unpack[_Chunked]) -> Any: ...
@_torch.apart_from_graphs
def hessian(
    func: Callable[..., Any],
    primals: Any,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory: int | str | None = None,
    no_grad: str = "stop",
) -> Any:
    """All second derivatives of ``func``: (*out, *S, *S), or the primals' structure twice over.

    Example:
        >>> hessian(lambda x: x[0] ** 2 * x[1], torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])
    """
    problem = Problem(func, primals, has_aux, no_grad)
    basis = problem.basis()
    pairs = PairSet.all(basis.k)
    tree = problem.run(basis, pairs, chunk_size, memory)

    def blocks(j: Jet) -> Any:
        full = pairs.matrix(j.second).movedim((0, 1), (-2, -1))
        parts = full.split(basis.sizes, -2)
        shaped = [p.unflatten(-2, leaf.shape or (1,)) for p, leaf in zip(parts, problem.leaves, strict=True)]
        rows = [p if leaf.ndim else p.squeeze(-2) for p, leaf in zip(shaped, problem.leaves, strict=True)]
        trees = [_by_primal(problem, row) for row in rows]
        return trees[0] if problem.bare and len(trees) == 1 else _unflatten(trees, problem.structure)

    return problem.finish(_part(tree, blocks))


def _by_primal(problem: Problem, flat: Tensor) -> Any:
    """(..., D) as the primals' structure, each leaf (..., *S)."""
    parts = flat.split([leaf.numel() for leaf in problem.leaves], -1)
    shaped = [p.reshape((*p.shape[:-1], *leaf.shape)) for p, leaf in zip(parts, problem.leaves, strict=True)]
    return _unflatten(shaped, problem.structure)


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

    With ``directions``, the sum of v_k^T H v_k over those instead. ``batch_ndim`` leading axes of every primal number
    samples that do not interact, as in ``u(x)`` with x (batch, dim): they share the coordinate directions.

    Example:
        >>> laplacian(lambda x: (x**3).sum(), torch.tensor([1.0, 2.0]))
        tensor(18.)
    """
    problem = Problem(func, primals, has_aux, no_grad)
    rows = problem.basis(batch_ndim) if directions is None else problem.directions(directions)
    tree = problem.run(rows, PairSet.laplacian(rows.k), chunk_size, memory)
    return problem.finish(_part(tree, lambda j: j.second[0]))
