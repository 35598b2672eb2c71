"""The two passes: noise enters in the first, and the second turns what came of it into gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ad.registry import Kind
from ..ad.registry import plan as engine_plan
from ..errors import UnsupportedProgram
from . import local, pullback
from .noise import Noise
from .parameters import Gradients
from .plan import Changed, Group, Plan, Site, signature
from .pullback import Done
from .watch import Path, Visit, WatchMode, at, functional, replaced

__all__ = ["Collector", "Injector"]

Rows = Callable[[Site, Tensor], Tensor | None]  # of a site and its activation: tangents (K, *S)


class _Follower:
    """A phase that follows a plan: every node must be the one that was planned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._before: dict[int, tuple[Any, Any]] = {}  # arguments of a node in hand, as they are before a write

    def before(self, mode: WatchMode, visit: Visit) -> None:
        keys = self._plan.keys
        if visit.number >= len(keys) or keys[visit.number] != signature(mode, visit):
            raise Changed
        if self._follows(visit.number):
            self._before = {visit.number: self._arguments(visit)}

    def _follows(self, number: int) -> bool:
        return number in self._plan.member

    def _arguments(self, visit: Visit) -> tuple[Any, Any]:
        """The arguments; what the operation is about to overwrite, and is needed later, as a copy."""
        if engine_plan(visit.func).kind is not Kind.INPLACE:
            return visit.args, visit.kwargs
        path: Path = (0,)
        found = pullback.find(visit.func, path)
        if found is not None and not found.reads_input:
            return visit.args, visit.kwargs
        return replaced(path, visit.args, visit.kwargs, visit.args[0].clone())

    def _done(self, visit: Visit, out: Any) -> Done:
        return Done(functional(visit.func), *self._before.pop(visit.number), out)

    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        pass

    def same(self, tensor: Tensor, other: Tensor) -> None:
        pass

    def wrote(self, tensor: Tensor) -> None:
        pass

    def seen(self, func: Any) -> None:
        pass


class Injector(_Follower):
    """The first pass: tangents enter at the sites."""

    def __init__(self, plan: Plan, rows: Rows, masked: bool = True) -> None:
        super().__init__(plan)
        self._rows = rows
        self._masked = masked  # zero where the site's own functions have no derivative
        self._alive: dict[int, Tensor | None] = {}  # by node: where the site's layers reach its result

    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        site = self._plan.member.get(visit.number)
        if site is None:
            return
        done = self._done(visit, out)
        with mode.above():
            alive = self._mask(site.group, visit, done) if self._masked else None
            if visit.number != site.end:
                self._alive[visit.number] = alive
                return
            rows = self._rows(site, done.result)
            if rows is not None and alive is not None:
                rows = rows * alive
        if rows is not None:
            mode.inject(done.result, rows)

    def _mask(self, group: Group, visit: Visit, done: Done) -> Tensor | None:
        if visit.number in group.calls:
            return None
        masks = []
        for path, source in group.links[visit.number]:
            found = pullback.find(done.func, path)
            assert found is not None
            masks.append(found.alive(self._alive.pop(source), done, path))
        if any(mask is None for mask in masks):
            return None
        return torch.stack(masks).any(0) if len(masks) > 1 else masks[0]  # type: ignore[arg-type]


class Collector(_Follower):
    """The second pass: the same noise, weighted by what it did to the losses, gives each layer its derivative."""

    def __init__(self, plan: Plan, gradients: Gradients, noise: Noise, scalars: Tensor | None, chunk: int) -> None:
        super().__init__(plan)
        self._gradients = gradients
        self._noise = noise
        self._scalars = scalars  # (J, B), over J and B
        self._chunk = chunk
        self._exact = set() if plan.exact is None else set(plan.exact.nodes)
        self._held: dict[int, tuple[Done, list[Tensor]]] = {}  # with the tensors that will be read
        self._versions: dict[int, list[int]] = {}  # theirs

    def parametrised(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._gradients.record(func, args, kwargs, out)

    def _follows(self, number: int) -> bool:
        return number in self._plan.member or number in self._exact

    def before(self, mode: WatchMode, visit: Visit) -> None:
        last = visit.number - 1
        if last in self._held:  # only now: torch counts a write after the operation has returned
            self._versions[last] = [tensor._version for tensor in self._held[last][1]]
        super().before(mode, visit)

    def after(self, mode: WatchMode, visit: Visit, out: Any) -> None:
        if not self._follows(visit.number):
            return
        done = self._done(visit, out)
        self._held[visit.number] = done, self._watched(visit.number, done)
        site = self._plan.ends.get(visit.number)
        if site is not None:
            with mode.above():
                self._pull(site.group, self._delta(site, done.result))

    def finish(self, losses: Tensor) -> None:
        """The part behind the last layers, whose derivative is exact; and the parametrisations."""
        if self._plan.exact is not None:
            group = self._plan.exact
            self._pull(group, torch.full_like(losses, 1 / losses.shape[0]))
        self._gradients.finish()

    def _delta(self, site: Site, activation: Tensor) -> Tensor:
        """mean_j s_jb u_jb / B, the estimate of the derivative of the mean loss at an activation."""
        assert self._scalars is not None
        total: Tensor | None = None
        for start in range(0, self._scalars.shape[0], self._chunk):
            scalars = self._scalars[start : start + self._chunk]
            rows = self._noise.rows(site.number, start, start + scalars.shape[0], activation)
            if site.layout is None:
                factor = scalars.sum(1).reshape(-1, *(1,) * activation.ndim)
            else:
                factor = site.layout.spread(scalars, activation.shape)
            part = (rows * factor.to(rows.dtype)).sum(0)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _pull(self, group: Group, delta: Tensor) -> None:
        """Take the derivative at the last node of a group back to its layers, and do their products."""
        deltas = {group.nodes[-1]: delta}
        for number in reversed(group.nodes):
            done, watched = self._held.pop(number)
            here = deltas.pop(number)
            _refuse_overwritten(done, watched, self._versions.pop(number, []))
            for path in group.calls.get(number, ()):
                self._gradients.add(at(path, done.args, done.kwargs), local.product(here, done, path))
            for path, source in group.links.get(number, ()):
                found = pullback.find(done.func, path)
                assert found is not None
                part = found.pull(here, done, path)
                deltas[source] = deltas[source] + part if source in deltas else part

    def _watched(self, number: int, done: Done) -> list[Tensor]:
        """The tensors that a product or a pull-back will read."""
        group = self._group(number)
        rules = [pullback.find(done.func, path) for path, _ in group.links.get(number, ())]
        found: list[Tensor] = []
        if number in group.calls or any(rule is not None and rule.reads_input for rule in rules):
            found += [tensor for tensor in (*done.args, *done.kwargs.values()) if isinstance(tensor, Tensor)]
        if any(rule is not None and rule.reads_result for rule in rules):
            found.append(done.result)
        return found

    def _group(self, number: int) -> Group:
        site = self._plan.member.get(number)
        group = self._plan.exact if site is None else site.group
        assert group is not None
        return group


def _refuse_overwritten(done: Done, tensors: list[Tensor], versions: list[int]) -> None:
    for tensor, version in zip(tensors, versions, strict=False):
        if tensor._version != version:
            raise UnsupportedProgram(
                f"the {tuple(tensor.shape)} that {done.func} read or made was overwritten before its gradient was "
                "formed; expected an operation that does not write in place there."
            )
