"""Every entry of PyTorch's operation database, forward over forward, against double backward."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.algebra.jet import Quadratic
from ..ad.run.perturb import perturb
from ..errors import JetplaneError, MissingRule
from .oracle import double_backward

EXACT, WRONG, MISSING, UNTESTED, REFUSED = "exact", "wrong", "missing", "untested", "refused"
TOLERANCE = {
    torch.float64: 1e-7,
    torch.float32: 2e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-1,
}  # of a complex, its real
FLOOR = {torch.float64: 1e-5}  # of the largest number; a smaller one is compared as if it were as large
_SHORT_FLOOR = 1e-2
_UNCHECKED = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")  # read behind small tensors


@dataclass
class Outcome:
    """What became of one entry."""

    name: str
    status: str = UNTESTED
    samples: int = 0  # compared with the oracle
    worst: float = 0.0  # largest relative error among them
    note: str = ""
    skipped: int = field(default=0, repr=False)


def entries(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Any]:
    """The entries with autograd and double backward for ``dtype``."""
    kind = torch.device(device).type
    return [
        op
        for op in _torch.op_database()
        if dtype in op.supported_dtypes(kind) and op.supports_autograd and op.supports_gradgrad
    ]


def name_of(op: Any) -> str:
    """The entry's name with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def check(
    op: Any,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    limit: int | None = None,
    *,
    k: int = 2,
    alone: bool = False,
    small: bool = False,
) -> Outcome:
    """Compare up to ``limit`` of the entry's samples with the oracle, along ``k`` directions.

    ``alone``: each tensor of a sample is perturbed by itself, the others being constants. ``small``: each sample is
    also tried with one tensor, and with all of them, as a number and as a single entry, where the operation takes that.
    """
    outcome = Outcome(name_of(op))
    with warnings.catch_warnings(), torch.backends.cudnn.flags(allow_tf32=False):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = op.sample_inputs(device, dtype, requires_grad=True)
        for sample in _tried(op, itertools.islice(samples, limit), small and op.name not in _UNCHECKED):
            for number in range(len(_leaves(sample))) if alone else [None]:
                _check_sample(op, sample, outcome, dtype, k, number)
            if outcome.status in (WRONG, MISSING, REFUSED):
                break
    return outcome


def _tried(op: Any, samples: Iterator[Any], small: bool) -> Iterator[Any]:
    """The samples; where ``small``, each is followed by its forms with fewer entries that the entry takes."""
    for sample in samples:
        yield sample
        leaves = _leaves(sample)
        if not small:
            continue
        for chosen in ([leaf] for leaf in leaves), [leaves] if len(leaves) > 1 else ():
            for few in chosen:
                for ndim in (lambda t: 0, lambda t: t.ndim or 1):
                    less = _with_one_entry(sample, few, ndim)
                    if _runs(op, less):
                        yield less


def _with_one_entry(sample: Any, chosen: list[Tensor], ndim: Callable[[Tensor], int]) -> Any:
    """The sample with one entry left of each of these tensors."""
    which = {id(tensor) for tensor in chosen}

    def shrink(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) not in which or not value.numel():
            return value
        return value.detach().reshape(-1)[0].clone().reshape((1,) * ndim(value)).requires_grad_()

    return sample.transform(shrink)


def _runs(op: Any, sample: Any) -> bool:
    try:
        with torch.no_grad():
            return bool(torch.isfinite(_program(op, sample)()))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError):
        return False


def _check_sample(op: Any, sample: Any, outcome: Outcome, dtype: torch.dtype, k: int, number: int | None) -> None:
    """Compare one sample, of which leaf ``number`` alone is perturbed, or all of them."""
    leaves = _leaves(sample)
    if not leaves:
        outcome.skipped += 1
        return
    if any(t.is_conj() for t in leaves):
        sample = _moved(sample, lambda t: t.resolve_conj())  # a leaf is memory, and no view of what it does not hold
        leaves = _leaves(sample)
    if dtype.to_real() == torch.float64 and any(t.dtype.to_real() != torch.float64 for t in leaves):
        sample = _upcast(sample)  # some samples mix dtypes, and float32 would hide what is compared here
        leaves = _leaves(sample)
    if number is not None:
        leaves = leaves[number : number + 1]
    directions = _directions(leaves, k)
    wanted = _wanted(op, sample, outcome, leaves, directions, number)
    actual = None if wanted is None else _actual(op, sample, outcome, leaves, directions)
    if wanted is None or actual is None:
        return
    if not bool(wanted.truth.loss.isfinite()):
        outcome.skipped += 1  # derivatives of nan
        return
    outcome.samples += 1
    distance = _distance(actual, wanted.truth)
    dtypes = [kind.to_real() for kind in (dtype, actual.loss.dtype, *(t.dtype for t in leaves))]
    coarsest = max(dtypes, key=lambda d: torch.finfo(d).eps)
    # In short dtypes cancellation can leave few digits; then backward over backward has no more of them.
    tolerance = max(TOLERANCE[coarsest], wanted.spread)
    if distance > tolerance and _settled_by_differences(op, sample, actual, wanted.truth, number):
        outcome.note = "double backward contradicts finite differences, which agree with jetplane"
        distance = 0.0
    outcome.worst = max(outcome.worst, distance)
    outcome.status = EXACT if distance <= tolerance else WRONG


class _Wanted(NamedTuple):
    """What an oracle says of a sample."""

    truth: Quadratic
    spread: float  # how far its own dtype may be from it


def _wanted(
    op: Any, sample: Any, outcome: Outcome, leaves: list[Tensor], directions: list[Tensor], number: int | None
) -> _Wanted | None:
    """What to compare with; None where there is no oracle, which is noted."""
    try:
        expected = double_backward(_program(op, sample), leaves, directions)
        truth = _truth(op, sample, expected, directions, number)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        outcome.skipped += 1
        outcome.note = outcome.note or f"no oracle: {str(error).splitlines()[0][:80]}"
        return None
    return _Wanted(truth, 0.0 if truth is expected else 10 * _distance(expected, truth))


def _actual(op: Any, sample: Any, outcome: Outcome, leaves: list[Tensor], directions: list[Tensor]) -> Quadratic | None:
    """What the engine says; None where it refuses, which is noted."""
    try:
        with perturb(leaves, directions, allow_unused=True) as jets:
            loss = _program(op, sample)()
        return jets.quadratic(loss)
    except MissingRule as error:
        outcome.status, outcome.note = MISSING, error.op
    except JetplaneError as error:
        outcome.status, outcome.note = REFUSED, str(error)[:80]
    return None


def _truth(op: Any, sample: Any, expected: Quadratic, directions: list[Tensor], number: int | None) -> Quadratic:
    """What to compare with: ``expected``, or for a short dtype the result on the same inputs in float64."""
    if all(t.dtype.to_real() == torch.float64 for t in _leaves(sample)):
        return expected
    long = _upcast(sample)
    try:
        leaves = _leaves(long) if number is None else _leaves(long)[number : number + 1]
        truth = double_backward(_program(op, long), leaves, [_long(d) for d in directions])
    except (RuntimeError, NotImplementedError, ValueError):
        return expected  # the entry insists on its dtype
    # far apart, they are not one function: random numbers drawn for another dtype
    return truth if _distance(expected, truth) < 0.05 else expected


def _leaves(sample: Any) -> list[Tensor]:
    """The differentiable dense tensors of a sample, each once; complex ones too."""
    tensors = [
        t
        for t in _torch.pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(t, Tensor) and t.requires_grad and t.layout is torch.strided
    ]
    return list({id(t): t for t in tensors}.values())


def _directions(leaves: list[Tensor], k: int) -> list[Tensor]:
    generator = torch.Generator(device=leaves[0].device).manual_seed(1)
    return [torch.randn((k, *t.shape), dtype=t.dtype, device=t.device, generator=generator) for t in leaves]


def _long(tensor: Tensor) -> Tensor:
    """The tensor in float64, or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _upcast(sample: Any) -> Any:
    """The sample with all its floating-point and complex tensors in double precision."""
    return _moved(sample, _long)


def _moved(sample: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """The sample with leaves of its own in place of its floating-point and complex tensors."""
    done: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = move(tensor.detach()).requires_grad_(tensor.requires_grad)
        return done[id(tensor)]

    return sample.transform(lambda value: convert(value) if isinstance(value, Tensor) else value)


def _program(op: Any, sample: Any) -> Callable[[], Tensor]:
    """The entry as a scalar program: a random real-linear form of its differentiable outputs."""

    def program() -> Tensor:
        torch.manual_seed(2)
        with _private_inputs(sample):
            # the wrapper makes an entry's inputs valid, e.g. symmetric, as PyTorch's own gradient checks do
            out = op.gradcheck_wrapper(op.op, sample.input, *sample.args, **sample.kwargs)
        out = sample.output_process_fn_grad(out)
        tensors = [t for t in _torch.pytree.tree_leaves(out) if isinstance(t, Tensor)]
        terms = []
        for index, tensor in enumerate(t for t in tensors if t.is_floating_point() or t.is_complex()):
            dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
            generator = torch.Generator(device=dense.device).manual_seed(3 + index)
            # drawn in float64 for every dtype, so that a float32 program and its float64 truth are one function
            kind = torch.complex128 if dense.is_complex() else torch.float64
            weights = torch.randn(dense.shape, dtype=kind, device=dense.device, generator=generator)
            terms.append((dense * weights.to(dense.dtype)).sum().real)
        return sum(terms[1:], terms[0]) if terms else torch.zeros(())

    return program


@contextlib.contextmanager
def _private_inputs(sample: Any) -> Iterator[None]:
    """Buffers that the entry writes to (running statistics) are put back afterwards."""
    tensors = [
        t
        for t in _torch.pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(t, Tensor) and not t.requires_grad and t.layout is torch.strided
    ]
    saved = [t.clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, contents in zip(tensors, saved, strict=True):
                if not torch.equal(tensor, contents) and tensor.shape == contents.shape:
                    tensor.copy_(contents)


def _distance(actual: Quadratic, expected: Quadratic) -> float:
    """The largest error of loss, slope and curvature, each relative to its own size or to a floor below the largest."""
    floor = FLOOR.get(actual.loss.dtype, _SHORT_FLOOR)
    parts = [
        (actual.loss, expected.loss),
        (actual.slope, expected.slope),
        (actual.curvature, expected.curvature),
    ]
    sizes = [float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 0.0 for _, b in parts]
    worst = 0.0
    for (a, b), size in zip(parts, sizes, strict=True):
        # where backward over backward gives nan there is nothing to compare
        error = torch.where(b.isfinite(), (a.to(b.dtype) - b).abs(), 0.0).nan_to_num(nan=math.inf)
        largest = float(error.max())
        worst = max(worst, 0.0 if largest == 0.0 else largest / max(size, floor * max(sizes), 1e-30))
    return worst


def _settled_by_differences(op: Any, sample: Any, actual: Quadratic, truth: Quadratic, number: int | None) -> bool:
    """Whether finite differences along each direction agree with ours and contradict double backward."""
    long = _upcast(sample)
    which = slice(None) if number is None else slice(number, number + 1)
    leaves = _leaves(long)[which]
    program = _program(op, long)
    directions = [_long(d) for d in _directions(_leaves(sample)[which], actual.k)]
    step = 1e-4
    numbers = []
    # the sum of two directions stands for their mixed term
    unit = torch.eye(actual.k, dtype=torch.float64, device=leaves[0].device)
    mixed = [(unit[i] + unit[j]).unsqueeze(0) for i, j in itertools.combinations(range(actual.k), 2)]
    combinations = torch.cat([unit, *mixed])
    for row in combinations:
        along = [torch.tensordot(row.to(d.dtype), d, dims=1) for d in directions]
        below, here, above = (_shifted(program, leaves, along, sign * step) for sign in (-1, 0, 1))
        numbers += [(above - below) / (2 * step), (above - 2 * here + below) / step**2]

    def apart(model: Quadratic) -> float:
        c = combinations.to(model.slope)
        flat = torch.stack([c @ model.slope, (c @ model.curvature * c).sum(1)], 1).flatten().tolist()
        return max(abs(a - b) / (1 + abs(b)) for a, b in zip(flat, numbers, strict=True))

    ours, theirs = apart(actual), apart(truth)
    return ours < 1e-3 < theirs and 100 * ours < theirs


def _shifted(program: Callable[[], Tensor], leaves: list[Tensor], direction: list[Tensor], step: float) -> float:
    saved = [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad():
        try:
            for leaf, d in zip(leaves, direction, strict=True):
                leaf.add_(d, alpha=step)
            return float(program())
        finally:
            for leaf, contents in zip(leaves, saved, strict=True):
                leaf.copy_(contents)
