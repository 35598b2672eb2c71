"""Jets, and the set of second-order terms that a pass carries.

The convention, stated once. A value ``x`` perturbed along K directions carries

    primal   x                     (*S)
    tangent  d x / d e_i           (K, *S)
    second   d^2 x / d e_i d e_j   (rows, *S)   derivatives, not Taylor coefficients

with one second row per pair (i, j) of a :class:`PairSet`, or a single row that holds a weighted sum over the pairs.
``None`` stands for rows that are all zero, everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", float, Fraction)


class Lifted(Protocol):
    """A bilinear operation B lifted over leading row axes: see :meth:`PairSet.bilinear`."""

    def left(self, a: Tensor, b: Tensor) -> Tensor: ...  # (R, *A), (*B)    -> (R, *S)
    def right(self, a: Tensor, b: Tensor) -> Tensor: ...  # (*A), (R, *B)    -> (R, *S)
    def paired(self, a: Tensor, b: Tensor) -> Tensor: ...  # (R, *A), (R, *B) -> (R, *S)
    def grid(self, a: Tensor, b: Tensor) -> Tensor: ...  # (K, *A), (L, *B) -> (K, L, *S)


@dataclass(frozen=True)
class PairSet:
    """The pairs (i, j) of directions whose second-order terms v_i^T H v_j a pass computes.

    Example:
        >>> PairSet.all(2).pairs
        ((0, 0), (0, 1), (1, 1))
        >>> PairSet.laplacian(3).rows
        1
    """

    k: int
    pairs: tuple[tuple[int, int], ...]
    weights: tuple[float, ...] | None = None
    shape: str = "list"  # "none", "all", "diagonal" and "star" have cheaper products than a "list"

    def __post_init__(self) -> None:
        for i, j in self.pairs:
            if not (0 <= i < self.k and 0 <= j < self.k):
                raise ValueError(f"pair ({i}, {j}) is out of range; expected numbers from 0 to {self.k - 1}.")
        if self.weights is not None and len(self.weights) != len(self.pairs):
            raise ValueError(f"there are {len(self.weights)} weights for {len(self.pairs)} pairs; expected one each.")

    @staticmethod
    def none(k: int) -> PairSet:
        """First order only."""
        return PairSet(k, (), shape="none")

    @staticmethod
    @cache
    def all(k: int) -> PairSet:
        """All K(K+1)/2 pairs with i <= j: the projected Hessian. The only place that knows their order."""
        return PairSet(k, tuple((i, j) for i in range(k) for j in range(i, k)), shape="diagonal" if k == 1 else "all")

    @staticmethod
    def diagonal(k: int) -> PairSet:
        """The K curvatures v_i^T H v_i."""
        return PairSet(k, tuple((i, i) for i in range(k)), shape="diagonal")

    @staticmethod
    def single() -> PairSet:
        """The one pair (0, 1) of a hyper-dual number."""
        return PairSet.star(2)

    @staticmethod
    def star(k: int) -> PairSet:
        """Direction 0 against each of the others: a Hessian-vector product."""
        return PairSet(k, tuple((0, j) for j in range(1, k)), shape="star")

    @staticmethod
    def between(first: int, second: int) -> PairSet:
        """Each of the first directions against each of the second ones: an off-diagonal block."""
        pairs = tuple((i, first + j) for i in range(first) for j in range(second))
        return PairSet(first + second, pairs)

    @staticmethod
    def laplacian(k: int) -> PairSet:
        """The sum of all v_i^T H v_i, carried as a single row."""
        return PairSet(k, tuple((i, i) for i in range(k)), (1.0,) * k, shape="diagonal")

    @staticmethod
    def of(spec: str | PairSet, k: int) -> PairSet:
        """The pair set that ``spec`` names, for K directions."""
        if isinstance(spec, PairSet):
            if spec.k != k:
                raise ValueError(f"the pair set is for {spec.k} directions; there are {k}.")
            return spec
        makers: dict[str, Callable[[int], PairSet]] = {
            "all": PairSet.all,
            "diagonal": PairSet.diagonal,
            "star": PairSet.star,
            "laplacian": PairSet.laplacian,
            "none": PairSet.none,
        }
        if spec not in makers:
            raise ValueError(f"pairs is {spec!r}; expected a PairSet or one of {', '.join(map(repr, makers))}.")
        return makers[spec](k)

    @property
    def rows(self) -> int:
        """How many second rows a jet carries."""
        return 1 if self.weights is not None else len(self.pairs)

    # -- products of tangents: the only second-order arithmetic in the engine ---------------------------------------

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows a_i * b_j, (rows, *S) from (K, *S); symmetric only if a and b are proportional row by row."""
        if self.shape == "diagonal":
            if a is b and self._sums and _is_plain(a):
                return _sum_of_squares(a)
            return self._collapse(a * b)
        if self.shape == "star":
            return self._collapse(a[:1] * b[1:])
        if self.shape == "all":
            if _is_few(a):
                i, j = _places(self.k)
                return self._collapse(a.index_select(0, i) * b.index_select(0, j))
            return self._collapse(torch.cat([a[i : i + 1] * b[i:] for i in range(self.k)]))
        i, j = self._index(a.device)
        return self._collapse(a[i] * b[j])

    def inner(self, a: Tensor, b: Tensor, axis: int) -> Tensor:
        """The rows of :meth:`outer` summed over an axis, counted from the last, of which one entry is left.

        All pairs of many directions come from a batched product, and the rows of :meth:`outer` are not made.
        """
        if self.shape != "all" or self.k < _MANY:
            return self.outer(a, b).sum(axis, keepdim=True)
        left, right = a.movedim(axis, -1).movedim(0, -2), b.movedim(axis, -1).movedim(0, -1)  # (*S, K, n), (*S, n, K)
        i, j = torch.triu_indices(self.k, self.k, device=a.device)  # in the order of the pairs
        rows = torch.matmul(left, right).flatten(-2).index_select(-1, i * self.k + j)
        return self._collapse(rows.movedim(-1, 0).unsqueeze(axis))

    def cross(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows a_i * b_j + a_j * b_i, (rows, *S), with broadcasting behind the row axis."""
        if self.shape == "diagonal":
            return self._collapse(2 * (a * b))
        if self.shape == "star":
            return self._collapse(a[:1] * b[1:] + a[1:] * b[:1])
        if self.shape == "all":
            if _is_few(a):
                i, j = _places(self.k)
                both = a.index_select(0, i) * b.index_select(0, j) + a.index_select(0, j) * b.index_select(0, i)
                return self._collapse(both)
            return self._collapse(torch.cat([a[i : i + 1] * b[i:] + a[i:] * b[i : i + 1] for i in range(self.k)]))
        i, j = self._index(a.device)
        return self._collapse(a[i] * b[j] + a[j] * b[i])

    def bilinear(self, lifted: Lifted, a: Tensor, b: Tensor) -> Tensor:
        """Rows B(a_i, b_j) + B(a_j, b_i) with as few products as the shape of the set allows."""
        if self.shape == "diagonal":
            return self._collapse(2 * lifted.paired(a, b))
        if self.shape == "star":
            return self._collapse(lifted.right(a[0], b[1:]) + lifted.left(a[1:], b[0]))
        if self.shape == "all":
            return self._collapse(self.symmetrise(lifted.grid(a, b)))
        i, j = self._index(a.device)
        return self._collapse(lifted.paired(a[i], b[j]) + lifted.paired(a[j], b[i]))

    def symmetrise(self, grid: Tensor) -> Tensor:
        """Rows grid[i, j] + grid[j, i], (pairs, *S) from (K, K, *S)."""
        if grid.requires_grad:
            return torch.cat([grid[i, i:] + grid[i:, i] for i in range(self.k)])
        rows = grid.new_empty((len(self.pairs), *grid.shape[2:]))  # written in place: a cat would copy every row again
        start = 0
        for i in range(self.k):
            torch.add(grid[i, i:], grid[i:, i], out=rows[start : start + self.k - i])
            start += self.k - i
        return rows

    def matrix(self, rows: Tensor) -> Tensor:
        """The symmetric (K, K, *S) array of second rows (pairs, *S); pairs outside the set are zero."""
        if self.weights is not None:
            raise ValueError("a weighted sum of pairs is one row and has no matrix; expected a set without weights.")
        if self.shape == "all" and self.k == 2 and not rows.is_cpu:  # in fewer launches than the gather
            return torch.cat([rows[:2], rows[1:]]).reshape(2, 2, *rows.shape[1:])
        if self.shape == "all":  # a gather, with places made on the device
            place = _entries(self.k) if _is_few(rows) else _entries_on(self.k, rows.device)
            return rows.index_select(0, place).reshape(self.k, self.k, *rows.shape[1:])
        if self.shape == "diagonal":
            return rows.movedim(0, -1).diag_embed(dim1=0, dim2=1)
        out = rows.new_zeros((self.k, self.k, *rows.shape[1:]))
        if self.pairs:
            i, j = self._index(rows.device)
            out = out.index_put((i, j), rows).index_put((j, i), rows)
        return out

    def _index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        left, right = zip(*self.pairs, strict=True)
        return torch.tensor(left, device=device), torch.tensor(right, device=device)

    @cached_property
    def _sums(self) -> bool:
        """Whether the one row is the plain sum over the pairs."""
        return self.weights is not None and all(w == 1.0 for w in self.weights)

    def _collapse(self, rows: Tensor) -> Tensor:
        if self.weights is None:
            return rows
        if self._sums:
            return rows.sum(0, keepdim=True)
        weights = torch.tensor(self.weights, dtype=rows.dtype, device=rows.device)
        return torch.tensordot(weights, rows, dims=1).unsqueeze(0)


# -- places of the pairs, kept for few numbers: there slices and concatenations take longer than what they are for ---

_FEW = 256


_MANY = 8  # directions from which on a batched product of all pairs is faster than its terms


def _is_few(rows: Tensor) -> bool:
    """Whether these are few numbers on the CPU; not in a traced program, where a kept tensor would be a constant."""
    return type(rows) is Tensor and rows.is_cpu and rows.numel() <= _FEW


def _is_plain(rows: Tensor) -> bool:
    """Whether these are many real numbers of which no derivative is wanted, in no traced program, where a compiler

    makes one loop of product and sum.
    """
    return type(rows) is Tensor and rows.numel() > _FEW * len(rows) and not (rows.requires_grad or rows.is_complex())


def _sum_of_squares(rows: Tensor) -> Tensor:
    """A Laplacian's sum over the rows, (1, *S): each is read once, and no squares of all rows are written."""
    if not rows.is_cpu:  # one launch; on a CPU this reduction takes six times as long as product and sum
        return torch.linalg.vector_norm(rows, dim=0, keepdim=True).square()
    total = rows[0].square()
    for row in rows[1:]:
        total.addcmul_(row, row)
    return total.unsqueeze(0)


@cache
def _places(k: int) -> tuple[Tensor, Tensor]:
    """The first and the second directions of all pairs."""
    i, j = zip(*PairSet.all(k).pairs, strict=True)
    with torch.inference_mode(False):  # they are used outside of it, too
        return torch.tensor(i, device="cpu"), torch.tensor(j, device="cpu")


@cache
def _entries(k: int) -> Tensor:
    """For each entry of a symmetric (K, K) matrix, the place of its pair."""
    with torch.inference_mode(False):
        return _entries_on(k, torch.device("cpu"))


def _entries_on(k: int, device: torch.device) -> Tensor:
    number = torch.arange(k, device=device)
    low, high = torch.minimum(number[:, None], number), torch.maximum(number[:, None], number)
    return (low * k - low * (low - 1) // 2 + high - low).reshape(-1)


@dataclass(frozen=True, eq=False)
class Operand:
    """A perturbed value as the rules see it, where rows that are all zero are None."""

    primal: Tensor  # (*S)
    tangent: Tensor | None  # (K, *S), None for zero
    second: Tensor | None  # (rows, *S), None for zero


@dataclass(frozen=True, eq=False)
class Jet(Operand):
    """A value with its first and second directional derivatives, zeros written out.

    Example:
        >>> import jetplane as jp
        >>> j = jp.jet(lambda x: x**3, torch.tensor([1.0, 2.0]), torch.eye(2), pairs="diagonal")
        >>> j.primal.shape, j.tangent.shape, j.second.shape
        (torch.Size([2]), torch.Size([2, 2]), torch.Size([2, 2]))
        >>> j.second
        tensor([[ 6.,  0.],
                [ 0., 12.]])
    """

    primal: Tensor  # (*S)
    tangent: Tensor  # (K, *S)
    second: Tensor  # (rows, *S)


class HyperDual(NamedTuple):
    """The four parts of a hyper-dual number ``real + eps1 e1 + eps2 e2 + eps12 e1 e2``, each of the output's shape.

    Example:
        >>> import jetplane as jp
        >>> number = jp.hyperdual(lambda x: x[0] * x[1], torch.tensor([2.0, 5.0]), *torch.eye(2))
        >>> [float(part) for part in number]
        [10.0, 5.0, 2.0, 1.0]
    """

    real: Tensor
    eps1: Tensor
    eps2: Tensor
    eps12: Tensor


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The quadratic model of a scalar function in the plane of K directions.

    f(x + sum_k c_k v_k) is close to ``loss + slope @ c + c @ curvature @ c / 2``.

    Models on the same directions add up, so a batch can be split:

        >>> a = Quadratic(torch.tensor(1.0), torch.tensor([2.0]), torch.tensor([[3.0]]))
        >>> (a + a).curvature
        tensor([[6.]])

    ``noise`` is the covariance of the slope, where the losses of the single samples say how much it varies.
    """

    loss: Tensor  # ()
    slope: Tensor  # (K,)
    curvature: Tensor  # (K, K), symmetric
    noise: Tensor | None = None  # (K, K), symmetric

    @property
    def k(self) -> int:
        """The number of directions."""
        return self.slope.shape[0]

    def decrease(self, coefficients: Tensor, *, fused: bool = False) -> Tensor:
        """By how much the model falls for the step c: -(slope @ c + c @ curvature @ c / 2).

        ``fused``: by sums, of which a compiler makes one kernel; a product would be a call of a library.

            >>> model = Quadratic(torch.tensor(1.0), torch.tensor([2.0]), torch.tensor([[4.0]]))
            >>> model.decrease(torch.tensor([-0.5])), Quadratic.decrease_of([2.0], [[4.0]], [-0.5])
            (tensor(0.5000), 0.5)
        """
        c = coefficients
        if fused:
            return -((self.slope * c).sum() + ((self.curvature * c).sum(-1) * c).sum() / 2)
        return -(self.slope @ c + c @ self.curvature @ c / 2)

    @staticmethod
    def decrease_of(slope: list[Number], curvature: list[list[Number]], coefficients: list[Number]) -> Number:
        """The same in Python's own arithmetic: for a few numbers less time than tensors take, for fractions exact."""
        c, mul = coefficients, operator.mul
        bent: list[Any] = [sum(map(mul, row, c)) for row in curvature]
        return -(sum(map(mul, slope, c)) + sum(map(mul, bent, c)) / 2)

    def __add__(self, other: Quadratic) -> Quadratic:
        if not isinstance(other, Quadratic):
            return NotImplemented
        if self.k != other.k:
            raise ValueError(f"cannot add quadratics on {self.k} and {other.k} directions; expected the same ones.")
        # samples of different batches are independent, so variances add up
        noise = None if self.noise is None or other.noise is None else self.noise + other.noise
        return Quadratic(self.loss + other.loss, self.slope + other.slope, self.curvature + other.curvature, noise)

    def __radd__(self, other: object) -> Quadratic:
        # so that sum() over micro-batches works
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __mul__(self, factor: float) -> Quadratic:
        noise = None if self.noise is None else self.noise * factor**2
        return Quadratic(self.loss * factor, self.slope * factor, self.curvature * factor, noise)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Quadratic:
        return self * (1.0 / divisor)
