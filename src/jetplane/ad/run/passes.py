"""One pass of the engine over a program, and how a large set of directions is split into several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from .. import _torch
from .. import _torch_distributed as groups
from ..algebra.jet import Jet, PairSet
from ..engine.boundary import Boundary
from ..engine.crossing import Crossing, crossings
from ..engine.guards import guarded
from ..engine.interpreter import JetMode
from ..engine.rows import Seed, Source
from ..finite import finite
from ..storage_geometry import geometry, overlap
from .directions import Checked, Directions, Leaf, check_kind
from .parts import check_parts, images, is_shared_out, own


class Pass:
    """Perturbed leaves and the mode that follows them. The rows can be read after the pass, too.

    With a ``boundary`` second order begins there, and ``pairs`` are those of the loss. Where the program switches
    autograd off itself, tangents stop, or with ``no_grad="follow"`` do not.
    """

    def __init__(self, pairs: PairSet, boundary: Boundary | None = None, no_grad: str = "stop") -> None:
        self.pairs = pairs
        self.mode = JetMode(pairs, boundary, no_grad)
        self._seeds: list[Seed] = []
        self._leaves: dict[Any, list[tuple[Tensor, str]]] = {}  # by storage
        self._managed: dict[int, groups.Managed] | None = None  # what FSDP manages; None: nobody has asked
        self._gathered: list[groups.Managed] = []  # of it, what is perturbed

    def perturb(self, leaf: Leaf, label: str) -> None:
        """Let ``leaf``'s tensor vary along its directions."""
        if not is_shared_out(leaf.tensor):
            self.mode.earlier.begin(leaf.tensor)
            self._seed(leaf.tensor, leaf, label)
            return
        groups.SEEN.inside_programs = True
        self._managed = groups.managed() if self._managed is None else self._managed
        managed = self._managed.get(id(leaf.tensor))
        if managed is not None:
            self._gathered.append(managed)
        for tensor, source in images(leaf, managed):
            self._seed(tensor, source, label)

    def _seed(self, tensor: Tensor, source: Source, label: str) -> None:
        if tensor.is_conj() or tensor.is_neg():
            raise TypeError(
                f"{label} is a conjugate or negative view, which shows what its memory does not hold; expected "
                ".resolve_conj().resolve_neg() of it."
            )
        neighbours = self._leaves.setdefault(tensor.untyped_storage(), [])
        for other, name in neighbours:
            if overlap(geometry(tensor), geometry(other)):
                raise ValueError(f"{label} shares memory with {name}; expected each tensor to be perturbed once.")
        neighbours.append((tensor, label))
        seed = Seed(tensor, source, label)
        self._seeds.append(seed)
        self.mode.seed(tensor, seed)

    @staticmethod
    def of(pairs: PairSet, late: bool, no_grad: str = "stop") -> Pass:
        """A pass over all directions at once; ``late``: second order begins at the loss."""
        return Pass(pairs, Boundary(PairSet.none(pairs.k), pairs) if late else None, no_grad)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the engine is active."""
        return self._freed() if self._gathered else guarded(self.mode)

    @contextlib.contextmanager
    def _freed(self) -> Iterator[None]:
        with Gathered(self._gathered), guarded(self.mode):
            yield

    def unused(self) -> list[str]:
        """Labels of the leaves that no operation has read."""
        used = {seed.label for seed in self._seeds if seed.used}
        return [label for label in dict.fromkeys(seed.label for seed in self._seeds) if label not in used]

    def check_followed(self, results: Iterable[Any]) -> None:
        """Raise where the program stopped tangents itself and none reaches a result: no silent zero."""
        mode = self.mode
        if not (mode.halted or mode.detached) or any(isinstance(x, Tensor) and mode.tracks(x) for x in results):
            return
        if mode.halted:
            raise ValueError(
                "the program computes its result under its own torch.no_grad() or inference_mode, or by a backward "
                "pass without create_graph=True, where tangents stop as backprop's gradients do; expected it outside "
                "of them and with a graph, or a pass with no_grad='follow'."
            )
        raise ValueError(
            "the program detaches its result from all that varies, by .detach(), .data, .item() or "
            "torch.tensor(), where tangents stop as backprop's gradients do; expected a result that depends on what is "
            "differentiated."
        )

    def jet(self, tensor: Tensor) -> Jet:
        """The jet of ``tensor``, with zeros written out."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"the program returned {type(tensor).__name__} {tensor!r}; expected a tensor.")
        tensor = plain_result(tensor)
        self.mode.boundary.check_result(tensor, self.mode.tracks)
        jet = self.mode.jet(tensor)
        dtype = tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.get_default_dtype()

        def full(rows: Tensor | None, count: int) -> Tensor:
            if rows is not None:
                return rows
            return torch.zeros((count, *tensor.shape), dtype=dtype, device=tensor.device)

        return Jet(tensor, full(jet.tangent, self.pairs.k), full(jet.second, self.pairs.rows))


class Gathered:
    """Before and after a run of the program FSDP's parameters are parts: without a backward pass a root stays whole,

    and would be what it was before its parts moved.
    """

    def __init__(self, managed: Sequence[groups.Managed]) -> None:
        self._managed = managed

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Gathered:
        """Around a run that reads these parameters."""
        if not any(map(is_shared_out, tensors)):
            return Gathered(())
        known = groups.managed()
        return Gathered([known[id(tensor)] for tensor in tensors if id(tensor) in known])

    def __enter__(self) -> None:
        groups.free(self._managed)

    def __exit__(self, *exc: object) -> None:
        groups.free(self._managed)


# -- checks of what the user gives --------------------------------------------------------------------------------


def refuse_modules(params: object) -> None:
    """Raise for a module in place of its parameters: some can be iterated over, which gives other modules."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is {type(params).__name__}, a module; expected its parameters, module.parameters(), or by name, "
            "dict(module.named_parameters())."
        )


def check_leaf(tensor: object, label: str, *, parts: bool = False, real: bool = True) -> Tensor:
    """``tensor`` if it can be perturbed; ``parts``: also one of which each process has a part.

    ``real``: none of complex numbers, whose coordinates are two for each entry.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{label} is {type(tensor).__name__}; expected a tensor to perturb.")
    if _is_sharded(tensor) and not (parts and is_shared_out(tensor)):
        raise UnsupportedProgram(
            f"{label} is a sharded parameter ({type(tensor).__name__}), as FSDP's fully_shard and tensor parallelism "
            "make them of DTensor; expected parameters that every process has whole, as with DistributedDataParallel, "
            "or one of what takes sharded ones: jetplane.perturb, and optimizers that search a plane."
        )
    if is_shared_out(tensor):
        check_parts(tensor, label)
    if tensor.is_complex() and real:
        raise TypeError(
            f"{label} has dtype {tensor.dtype}; expected real numbers here, of which the program makes complex ones by "
            "torch.view_as_complex."
        )
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"{label} has dtype {tensor.dtype}; only floating-point tensors can be perturbed.")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{label} has layout {tensor.layout}; expected torch.strided.")
    return tensor


def plain_result(tensor: Tensor) -> Tensor:
    """A result of the program as a plain tensor, where this process has all of it."""
    if is_shared_out(tensor) and groups.cuts(tensor) != []:
        raise UnsupportedProgram(
            f"the program returned a DTensor with the placements {tensor.placements}, of which "  # type: ignore[attr-defined]
            "this process has a part; expected .full_tensor() of it."
        )
    return own(tensor)


def _is_sharded(tensor: Tensor) -> bool:
    """Whether a process has only a part of it: a DTensor, or FSDP's flat parameter. Imports nothing."""
    names = [kind.__name__ for kind in type(tensor).__mro__]
    return "DTensor" in names or getattr(tensor, "_is_flat_param", False) is True


def check_directions(directions: Sequence[Tensor], leaves: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Raise unless each of ``directions`` has the shape (K, *S), dtype and device of its tensor, and one K."""
    for direction, leaf, label in zip(directions, leaves, labels, strict=True):
        _check_direction(direction, leaf, label)
        found, first = direction.shape[0], directions[0].shape[0]
        if found != first:
            raise ValueError(f"directions for {label} have K = {found}; expected {first} as for {labels[0]}.")
    if any(_torch.is_fake(type(direction)) for direction in directions):
        return  # traced with tensors that have no values
    if not finite(directions):
        bad = next(label for label, direction in zip(labels, directions, strict=True) if not finite([direction]))
        raise ValueError(f"directions for {bad} hold values that are not finite; expected finite numbers.")


def _check_direction(direction: Tensor, leaf: Tensor, label: str) -> None:
    shape = tuple(leaf.shape)
    if not isinstance(direction, Tensor):
        raise TypeError(f"directions for {label} are {type(direction).__name__}; expected a tensor (K, *{shape}).")
    if direction.ndim != leaf.ndim + 1 or tuple(direction.shape[1:]) != shape:
        expected = ", ".join(["K", *map(str, shape)])
        raise ValueError(f"directions for {label} {shape} have shape {tuple(direction.shape)}; expected ({expected}).")
    check_kind(f"directions for {label}", direction, leaf)
    if direction.shape[0] == 0:
        raise ValueError(f"directions for {label} have K = 0; expected at least one direction.")


# -- chunks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A part of the work: some directions and some pairs, numbered within the chunk and within the whole."""

    rows: tuple[int, ...]  # which directions
    pairs: PairSet  # pairs of them, numbered within the chunk
    positions: tuple[int, ...]  # where those pairs stand in the whole set
    crossing: Crossing | None = None  # where second order begins at the loss: what the chunks hand over there

    def begin(self, no_grad: str = "stop") -> Pass:
        """A pass over the chunk."""
        if self.crossing is None:
            return Pass(self.pairs, None, no_grad)
        return Pass(self.pairs, Boundary(PairSet.none(len(self.rows)), self.pairs, self.crossing), no_grad)


def chunks(pairs: PairSet, size: int | None, late: bool = False) -> list[Chunk]:
    """Split a pair set so that each chunk touches at most two blocks of ``size`` directions.

    Where second order begins at the loss (``late``) a chunk is one block: the tangents of the model's output are kept,
    and the last chunk has all pairs, of which the loss alone knows. The chunks must be run in their order.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ValueError(f"chunk_size is {size!r}; expected a positive integer or None.")
    if late:
        return _late_chunks(pairs, pairs.k if size is None else size)
    if size is None or size >= pairs.k:
        return [Chunk(tuple(range(pairs.k)), pairs, tuple(range(len(pairs.pairs))))]
    blocks: dict[tuple[int, int], list[int]] = {}
    for position, (i, j) in enumerate(pairs.pairs):
        blocks.setdefault((i // size, j // size), []).append(position)
    result = [_chunk(pairs, positions) for positions in blocks.values()]
    covered = {row for chunk in result for row in chunk.rows}
    missing = [row for row in range(pairs.k) if row not in covered]
    return [*result, *(Chunk(rows, PairSet.none(len(rows)), ()) for rows in _blocks(missing, size))]


def _late_chunks(pairs: PairSet, size: int) -> list[Chunk]:
    parts = _blocks(range(pairs.k), size)
    *before, last = zip(parts, crossings(len(parts)), strict=True)
    first_order = [Chunk(rows, PairSet.none(len(rows)), (), crossing) for rows, crossing in before]
    return [*first_order, Chunk(last[0], pairs, tuple(range(len(pairs.pairs))), last[1])]


def _blocks(rows: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]


def _chunk(pairs: PairSet, positions: list[int]) -> Chunk:
    chosen = [pairs.pairs[p] for p in positions]
    rows = tuple(sorted({row for pair in chosen for row in pair}))
    number = {row: n for n, row in enumerate(rows)}
    local = tuple((number[i], number[j]) for i, j in chosen)
    weights = None if pairs.weights is None else tuple(pairs.weights[p] for p in positions)
    known = (make(len(rows)) for make in (PairSet.all, PairSet.diagonal, PairSet.star))
    shape = next((known_set.shape for known_set in known if known_set.pairs == local), "list")
    return Chunk(rows, PairSet(len(rows), local, weights, shape), tuple(positions))


def assemble(pairs: PairSet, parts: Sequence[tuple[Chunk, Jet]]) -> Jet:
    """The jet of the whole set from the jets of its chunks."""
    if len(parts) == 1 or parts[-1][0].crossing is not None:
        return parts[-1][1]
    primal = parts[0][1].primal
    tangents: dict[int, Tensor] = {}
    seconds: dict[int, Tensor] = {}
    for chunk, jet in parts:
        for number, row in enumerate(chunk.rows):
            tangents.setdefault(row, jet.tangent[number])
        if pairs.weights is None:
            seconds |= dict(zip(chunk.positions, jet.second, strict=True))
    tangent = torch.stack([tangents[row] for row in range(pairs.k)])
    if pairs.weights is not None:
        return Jet(primal, tangent, torch.stack([jet.second for chunk, jet in parts if chunk.positions]).sum(0))
    rows = [seconds[position] for position in range(len(pairs.pairs))]
    return Jet(primal, tangent, torch.stack(rows) if rows else tangent.new_zeros((0, *primal.shape)))


def lazily(directions: object) -> Directions | None:
    """``directions`` if they are lazy ones."""
    if type(directions) in (dict, list, tuple):  # as nearly always; to ask for a protocol takes long
        return None
    lazy = isinstance(directions, Directions) and not isinstance(directions, Tensor)
    return Checked(directions) if lazy else None  # type: ignore[arg-type]
