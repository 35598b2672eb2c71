"""Which operations of a program have rules, before any training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingRule, UnsupportedProgram
from .. import _torch
from ..algebra.jet import Operand, PairSet
from ..algebra.registry import Kind, Treatment
from ..engine.interpreter import JetMode
from ..engine.locate import current_line, current_module
from .directions import Given, Leaf
from .passes import Pass, check_leaf
from .program import as_closure
from .replay import Replay

__all__ = ["Coverage", "CoverageRow", "coverage"]


@dataclass(frozen=True)
class CoverageRow:
    """One operation in one module of the program."""

    module: str  # path and class, empty outside of modules
    op: str
    family: str  # the rule's family, "missing" where there is no rule
    calls: int
    line: str = ""  # file and line of the call, innermost outside of torch: it may be another library's

    @property
    def covered(self) -> bool:
        """Whether the operation has a rule."""
        return self.family != "missing"


@dataclass(frozen=True)
class Coverage:
    """The operations through which the perturbed tensors' derivatives pass.

    Example:
        >>> import jetplane as jp
        >>> found = jp.coverage(lambda x: x.sin().sum(), torch.ones(3))
        >>> found.complete, found.missing, [row.op for row in found.rows]
        (True, (), ['aten.sin.default', 'aten.sum.default'])
    """

    rows: tuple[CoverageRow, ...]

    @property
    def complete(self) -> bool:
        """Whether every operation has a rule."""
        return all(row.covered for row in self.rows)

    @property
    def missing(self) -> tuple[str, ...]:
        """The operations without a rule."""
        return tuple(sorted({row.op for row in self.rows if not row.covered}))

    def __str__(self) -> str:
        table = [("module", "operation", "rule", "calls", "line")]
        table += [(row.module or "-", row.op, row.family, str(row.calls), row.line) for row in self.rows]
        widths = [max(len(line[column]) for line in table) for column in range(5)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        verdict = "every operation has a rule" if self.complete else f"without a rule: {', '.join(self.missing)}"
        return "\n".join([*lines, verdict])


@_torch.apart_from_graphs
def coverage(func: Callable[..., Any], primals: Any) -> Coverage:
    """Run ``func(*primals)`` once and list the operations that the primals' derivatives pass through, per module.

    A ``func`` without arguments is a closure that uses ``primals`` (a list of tensors or a mapping) in place. Where an
    operation has no rule the survey goes on, so all of them are found in one run.

    Example:
        >>> report = coverage(lambda x: torch.tanh(x).sum(), torch.ones(3))
        >>> report.complete, [row.op for row in report.rows]
        (True, ['aten.tanh.default', 'aten.sum.default'])
    """
    program, named = as_closure(func, primals)
    one = Pass(PairSet.all(1))
    mode = _Survey(one.pairs)
    one.mode = mode
    for position, (label, tensor) in enumerate(named.items()):
        rows = torch.ones_like(check_leaf(tensor, label, real=False)).unsqueeze(0)
        one.perturb(Leaf(tensor, position, Given([rows] * len(named)), (0,)), label)
    replay = Replay(tensor.device for tensor in named.values())
    try:
        replay.run(lambda: _run(one, program))
    finally:
        replay.rewind()  # a survey leaves no trace in buffers and random state
    return Coverage(tuple(CoverageRow(*key[:3], calls, key[3]) for key, calls in mode.seen.items()))


def _run(one: Pass, program: Callable[[], Any]) -> None:
    with torch.no_grad(), one.running():
        program()


class _Survey(JetMode):
    """The engine, going on with zero rows where a rule is missing."""

    def __init__(self, pairs: PairSet) -> None:
        super().__init__(pairs)
        self.seen: dict[tuple[str, str, str, str], int] = {}
        self._depth = 0

    def run_function(self, name: str, call: Callable[[], Any]) -> Any:
        self._note(name, "missing")
        self._depth += 1
        try:
            out = call()
        finally:
            self._depth -= 1
        self._return(_with_zero_rows(out), ())
        return out

    def _note(self, op: str, family: str) -> None:
        key = (current_module(), op, family, current_line())
        self.seen[key] = self.seen.get(key, 0) + 1

    def _follow(self, step: Treatment, func: Any, args: Any, kwargs: Any, tracked: list[Tensor]) -> Any:
        self._depth += 1
        try:
            out = super()._follow(step, func, args, kwargs, tracked)
        except (MissingRule, UnsupportedProgram):
            return self._passed_over(func, args, kwargs)
        finally:
            self._depth -= 1
        # a composite's own operations are its business, unless one of them is missing
        if self._depth == 0 and step.kind is not Kind.VIEW:
            self._note(str(func), step.family)
        return out

    def _passed_over(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._note(str(func), "missing")
        return self._return(_with_zero_rows(func(*args, **kwargs)), args)


def _with_zero_rows(out: Any) -> Any:
    """Outputs that stay perturbed, so that what follows is surveyed too."""
    if isinstance(out, tuple | list):
        return type(out)(map(_with_zero_rows, out))
    varies = isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex())
    if varies and out.layout is torch.strided:
        return Operand(out, torch.zeros_like(out).unsqueeze(0), None)
    return out
