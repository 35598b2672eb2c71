"""The closures of one step, run as one program: for their quadratic model, their gradient, or their loss alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ad import _torch
from ..ad.algebra.jet import Jet, Quadratic
from ..ad.run.auxiliary import split_aux, told
from ..ad.run.budget import fit
from ..ad.run.directions import Directions, Leaf
from ..ad.run.parts import own
from ..ad.run.passes import Chunk, Gathered, assemble, plain_result
from ..ad.run.replay import Replay
from ..curvature import Curvature, is_late
from ..parallel.averages import Averages
from .batch_parts import parts_of
from .fitting import ambient, shapes
from .scaled import Unwatched

Closure = Callable[[], Any]


class Measured(NamedTuple):
    """What compiled passes found (:mod:`.compiled_sweep`)."""

    model: Quadratic
    samples: int  # those whose losses it is the mean of; 0: of one number
    used: Sequence[bool]  # of each leaf
    aux: Any


_NO_GRAPH = "does not require grad and does not have a grad_fn"
_BACKWARD = (
    "the closure calls backward, which a step does not use; expected a closure that only returns the loss "
    "(derivatives inside the loss itself need torch.autograd.grad under torch.enable_grad())."
)


def as_closures(closure: Any, batch: tuple[Any, ...]) -> list[Closure]:
    """The closures that the arguments of ``step`` mean: a closure, a function with its batch, or a list of closures."""
    parts = parts_of(closure, batch, "a closure that returns the loss")
    return [partial(one, *given) if given else one for one, given in parts]


class Closures:
    """The mean of the closures' losses as a function of the leaves. A loss for each sample (B,) counts as their mean,
    and is refused unless ``samples_apart``.

    Every run sees the same random numbers and buffers, which afterwards are as after a single run. ``repeats`` says
    that there will be more than one run: only then is the memory that the closures write watched. ``compiled`` gives
    what the passes of a plane would find, or None where they have to be run as they are.
    """

    def __init__(
        self,
        closures: Sequence[Closure],
        leaves: Sequence[Tensor],
        labels: Sequence[str],
        repeats: bool,
        has_aux: bool = False,
        samples_apart: bool = True,
        averages: Averages | None = None,
        compiled: Callable[[], Measured | None] | None = None,
    ) -> None:
        self._closures, self._compiled = closures, compiled
        self.averages = Averages() if averages is None else averages
        self._has_aux = has_aux
        self._samples_apart = samples_apart
        self._aux: list[Any] = []  # of the first run of each closure
        self._leaves = leaves
        self._labels = labels
        self._repeats = repeats or self.averages.repeats
        self._casts = ambient(leaves[0].device) if leaves else None  # around the step, inside of which it is off
        self._unused = set(labels)
        self._graphless = False
        self.evaluations = 0

    @cached_property
    def _replay(self) -> Replay:
        return Replay(leaf.device for leaf in self._leaves)

    @property
    def aux(self) -> Any:
        """What the closure returned beside its loss, before the step; a list of it where there are several closures."""
        return self._aux[0] if len(self._closures) == 1 and self._aux else self._aux or None

    @property
    def used(self) -> list[bool]:
        """For each leaf, whether the closures have read it."""
        return [label not in self._unused for label in self._labels]

    def quadratic(self, directions: Directions, curvature: Curvature, chunk_size: int | None) -> Quadratic:
        """The quadratic model of the mean loss in the plane of ``directions``."""
        if self._repeats:
            directions = Unwatched(directions, self._replay)
        used = self.used
        known = self.averages.known(directions.k, curvature, used, self._leaves[0].device)
        if known is not None:
            self._note_used(used)
            return known
        with self.averages.planes(curvature, directions.k):
            models, counts = self._models(directions, curvature, chunk_size)
        used = self.used
        model = self.averages.model(models, counts, curvature, used)
        self._note_used(used)
        return model

    def _models(
        self, directions: Directions, curvature: Curvature, chunk_size: int | None
    ) -> tuple[list[Quadratic], list[int]]:
        """The model of each closure, and the number of samples whose losses it is the mean of, or 0."""
        found = None if self._compiled is None else self._compiled()
        if found is not None:
            self.evaluations += 1
            self._note_used(found.used)
            if self._has_aux and not self._aux:
                self._aux.append(_torch.pytree.tree_map_only(Tensor, _detached, found.aux))
            return [found.model], [found.samples]
        pairs = curvature.pairs(directions.k)
        work = self.averages.work(pairs, chunk_size, is_late(curvature))
        parts = self.averages.passes(work, lambda chunk: self._run(partial(self._jet, directions, chunk)))
        models = [
            curvature.model(assemble(pairs, list(zip(work, jets, strict=True))), pairs)
            for jets in zip(*parts, strict=True)
        ]
        if self._graphless and any(self.used):
            raise ValueError(
                "the loss has no graph for the backward pass, though it uses the parameters; expected a closure "
                "that does not switch autograd off."
            )
        return models, [jet.primal.numel() * jet.primal.ndim for jet in parts[0]]

    def _note_used(self, used: Sequence[bool]) -> None:
        """Go on with these as the parameters that any process uses."""
        self._unused = {label for label, one in zip(self._labels, used, strict=True) if not one}

    def kind(self, directions: Directions, curvature: Curvature) -> Any:
        """What the memory that a pass holds depends on, as far as it is known without running the closures."""
        pairs, leaves = curvature.pairs(directions.k), self._leaves
        parameters = tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves)
        work = pairs.k, pairs.rows, pairs.shape, is_late(curvature)
        return work, parameters, shapes(self._closures), self._casts

    def chunk_size(self, directions: Directions, curvature: Curvature, limit: int) -> int | None:
        """The number of directions that may travel together for a pass to hold ``limit`` bytes; None: all of them.

        Runs the closures a few times, whose traces on memory and random numbers are taken back.
        """
        directions = Unwatched(directions, self._replay)

        def one(chunk: Chunk) -> list[Jet]:
            with _no_backward(self._leaves):
                return [self._jet(directions, chunk, closure) for closure in self._closures]

        pairs, devices = curvature.pairs(directions.k), [leaf.device for leaf in self._leaves]
        return fit(limit, pairs, one, devices, is_late(curvature), self._replay)

    def gradient(self) -> list[Tensor]:
        """The gradient of the mean loss, by one backward pass."""
        self._repeats = True
        total: list[Tensor] = []

        weights = iter(self.averages.weights or ())

        def add(closure: Closure) -> None:
            parts = self._gradient(closure)
            weight = next(weights, None)
            if weight is not None:
                parts = [weight * part if weight else torch.zeros_like(part) for part in parts]
            total[:] = [a + b for a, b in zip(total, parts, strict=True)] if total else parts

        with self.averages.single("its gradient"):
            count = len(self._run(add))
        return self.averages.gradient(total, count)

    @contextlib.contextmanager
    def trials(self) -> Iterator[Callable[[Sequence[Tensor], float], Tensor]]:
        """A function for the loss at leaves + scale * deltas; leaves and buffers are put back afterwards."""
        leaves = list(map(own, self._leaves))
        saved = [leaf.detach().clone() for leaf in leaves]
        self._replay.keep()

        def loss_at(deltas: Sequence[Tensor], scale: float) -> Tensor:
            for leaf, start, delta in zip(leaves, saved, deltas, strict=True):
                leaf.copy_(start + scale * delta)
            torch.clear_autocast_cache()  # it would hold casts of the parameters before they moved
            return self.loss()

        try:
            yield loss_at
        finally:
            for leaf, start in zip(leaves, saved, strict=True):
                leaf.copy_(start)
            torch.clear_autocast_cache()
            self._replay.settle()

    def loss(self) -> Tensor:
        """The mean loss where the leaves are."""
        with self.averages.single("its loss"):
            losses = self._run(self._loss)
        return self.averages.loss(losses)

    def _run(self, one: Callable[[Closure], Any]) -> list[Any]:
        """``one`` for each of the closures."""

        def program() -> list[Any]:
            return [one(closure) for closure in self._closures]

        with _no_backward(self._leaves):
            return self._replay.run(program) if self._repeats else program()

    def _jet(self, directions: Directions, chunk: Chunk, closure: Closure) -> Jet:
        one = chunk.begin()
        for position, (leaf, label) in enumerate(zip(self._leaves, self._labels, strict=True)):
            one.perturb(Leaf(leaf, position, directions, chunk.rows), label)
        with torch.no_grad(), one.running():
            loss = self._call(closure)
            if self._is_leaf(loss):
                loss = loss.clone()  # which reads it, so that the leaf is known to be used
        one.check_followed([loss])
        self._unused &= set(one.unused())
        jet = one.jet(loss)
        return Jet(loss.clone(), jet.tangent, jet.second)  # it may be a tensor of the user's, which is going to change

    def _is_leaf(self, loss: Tensor) -> bool:
        """Whether the loss is a leaf itself, or a view of one."""
        place = own(loss).untyped_storage().data_ptr()
        return any(own(leaf).untyped_storage().data_ptr() == place for leaf in self._leaves)

    def _gradient(self, closure: Closure) -> list[Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            loss = self._call(closure)
            if not loss.requires_grad:
                self._graphless = True
                return [torch.zeros_like(leaf) for leaf in self._leaves]
            parts = torch.autograd.grad(loss.mean(), list(self._leaves), allow_unused=True, materialize_grads=True)
        return list(parts)

    def _loss(self, closure: Closure) -> Tensor:
        with torch.no_grad(), Gathered.of(self._leaves):
            loss: Tensor = self._call(closure).detach().mean()
            return loss

    def _call(self, closure: Closure) -> Any:
        self.evaluations += 1
        loss, aux = split_aux(closure(), self._has_aux, "the closure", "loss")
        if self._has_aux and len(self._aux) < len(self._closures):
            self._aux.append(_torch.pytree.tree_map_only(Tensor, _detached, aux))
        _check_loss(loss)
        loss = plain_result(loss)
        check_single(loss, self._samples_apart)
        return loss


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"the closure returned {told(loss)}; expected the loss as a scalar tensor.")
    if loss.ndim and not len(loss):
        raise ValueError(f"the closure returned no loss, {tuple(loss.shape)}; expected at least one sample in a batch.")
    if loss.numel() != 1 and loss.ndim != 1:
        raise ValueError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}; expected a scalar loss, or one for each "
            "sample (B,)."
        )
    if not loss.is_floating_point():
        raise TypeError(f"the closure returned a tensor of dtype {loss.dtype}; expected a floating-point loss.")


def check_single(loss: Tensor, samples_apart: bool) -> None:
    """Raise for the losses of single samples, (B,), where no part can do anything with them."""
    if loss.numel() != 1 and not samples_apart:
        raise ValueError(
            f"the closure returned a tensor of shape {tuple(loss.shape)}, and this curvature and solver have no use "
            "for the losses of single samples; expected a scalar, as their mean() is, or a part that has: "
            "GaussNewton(), EmpiricalFisher() or LevenbergMarquardt()."
        )


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()  # it may be a parameter or a buffer, which are going to change


class _no_backward:
    """Refuse closures that call backward, and keep the leaves' ``grad`` as it is. A class, for it is entered often."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves

    def __enter__(self) -> None:
        self._grads = [leaf.grad for leaf in self._leaves]
        for leaf, grad in zip(self._leaves, self._grads, strict=True):
            if grad is not None:
                leaf.grad = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        called = any(leaf.grad is not None for leaf in self._leaves)
        for leaf, grad in zip(self._leaves, self._grads, strict=True):
            if called or grad is not None:
                leaf.grad = grad
        if error is None and called:
            raise ValueError(_BACKWARD)
        if isinstance(error, RuntimeError) and (called or _NO_GRAPH in str(error)):
            raise ValueError(_BACKWARD) from error
