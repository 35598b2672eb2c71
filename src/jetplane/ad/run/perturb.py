"""The engine as a context, for programs that use tensors in place: modules and their parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedProgram
from .. import _torch
from ..algebra.curvature_table import Order, entry
from ..algebra.jet import Jet, PairSet, Quadratic
from ..engine.guards import refuse_transforms
from ..engine.witness import Witness
from .directions import Directions, Given, Leaf
from .parts import is_shared_out, own, whole_like
from .passes import Pass, check_directions, check_leaf, lazily, plain_result, refuse_modules
from .tasks import quadratic_of

__all__ = ["perturb"]


_OPEN: dict[int, list[Any]] = {}  # blocks that have not ended, by thread, the innermost last


@_torch.apart_from_graphs
def _refuse_graphs() -> None:
    raise UnsupportedProgram(
        "perturb was entered inside torch.compile, which takes the program apart where the block begins; expected it "
        "outside of the compiled function, or a transform such as jetplane.quadratic, which runs as it is there."
    )


class perturb:
    """Run the program inside with ``params`` varying along K ``directions``.

    ``params`` are tensors, or a mapping of names to tensors; ``directions`` are one tensor (K, *S) for each, in the
    same form, or lazy. Inside, autograd is off; the rows can be read after the context has ended. With
    ``curvature="ggn"`` second order begins at the loss: see :func:`jetplane.mark_output`. With "fisher" and "none" the
    pass carries tangents alone, whatever the ``pairs``. Tangents stop where the program itself switches autograd off,
    as in backprop; with ``no_grad="follow"`` they do not, as in torch.func.jvp. ``allow_unused`` takes a parameter that
    the program does not use for a constant, also one that it has used on an earlier call and kept the result of: clear
    such a cache first.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with perturb(model.parameters(), [torch.eye(2).reshape(2, 1, 2)]) as jets:
        ...     loss = model(torch.tensor([[3.0, 4.0]])).square().sum() / 2
        >>> jets.quadratic(loss).curvature
        tensor([[ 9., 12.],
                [12., 16.]])
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Mapping[str, Tensor],
        directions: Any,
        pairs: str | PairSet = "all",
        *,
        curvature: str = "exact",
        allow_unused: bool = False,
        no_grad: str = "stop",
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            _refuse_graphs()
        refuse_transforms()
        labels, leaves = _named(params)
        rows = _rows(directions, leaves, labels, params)
        self._kind = entry(curvature)
        # of first order, "all" the pairs that the curvature is made of are none
        self.pairs = PairSet.of("none" if self._kind.order is Order.FIRST else pairs, rows.k)
        self._allow_unused = allow_unused
        self._pass = Pass.of(self.pairs, self._kind.late, no_grad)
        self._witness = self._pass.mode.witness = Witness()
        for position, (leaf, label) in enumerate(zip(leaves, labels, strict=True)):
            self._pass.perturb(Leaf(leaf, position, rows, tuple(range(rows.k))), label)
            self._witness.leaf(own(leaf))
        self._entered: list[Any] = []

    def __enter__(self) -> perturb:
        if self._entered:
            raise RuntimeError("this perturb is active already; expected a new one for each pass.")
        no_grad, running = torch.no_grad(), self._pass.running()
        no_grad.__enter__()
        try:
            running.__enter__()
        except BaseException:
            no_grad.__exit__(None, None, None)
            raise
        self._entered = [running, no_grad]
        self._thread = threading.get_ident()
        _OPEN.setdefault(self._thread, []).append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refuse_another_order()
        entered, self._entered = self._entered, []
        for context in entered:
            context.__exit__(kind, error, trace)
        if kind is None and not self._allow_unused:
            unused = self._pass.unused()
            if unused:
                raise ValueError(
                    f"the program never used {', '.join(unused)}{_outside(self._pass)}; expected each perturbed tensor "
                    "in it (a model that keeps what it computed on an earlier call, such as an attention bias in eval "
                    "mode, hides it), or allow_unused=True."
                )

    def _refuse_another_order(self) -> None:
        """Blocks of one thread end as they nest: each puts back what it found, which the other has changed."""
        blocks = _OPEN.get(self._thread, [])
        if blocks and blocks[-1] is not self:
            raise RuntimeError(
                "this perturb was closed before one that was opened inside it; expected blocks to end in the opposite "
                "order of their beginning."
            )
        if blocks:
            blocks.pop()
        if not blocks:
            _OPEN.pop(self._thread, None)

    def of(self, tensor: Tensor) -> Jet:
        """The jet of a tensor of the program: primal, tangent (K, *S), second (rows, *S).

        A tensor that was made outside of the block, or written after it, is refused.
        """
        if isinstance(tensor, Tensor):
            tensor = plain_result(tensor)
            self._witness.check(tensor)
        return self._pass.jet(tensor)

    def quadratic(self, loss: Tensor) -> Quadratic:
        """The quadratic model of a scalar of the program in the plane of the directions."""
        if self.pairs != self._kind.pairs(self.pairs.k):
            raise ValueError("this pass does not carry all pairs, which quadratic needs; expected pairs='all'.")
        return quadratic_of(self.of_result(loss), self.pairs, self._kind)

    def of_result(self, tensor: Tensor) -> Jet:
        """The same as :meth:`of`, of what the program is run for: no zero because the program detached it."""
        self._pass.check_followed([tensor])
        return self.of(tensor)


def _outside(one: Pass) -> str:
    return " outside of its own torch.no_grad()" if one.mode.halted else ""


def _named(params: Iterable[Tensor] | Mapping[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    if isinstance(params, Tensor):
        raise TypeError("params is a tensor; expected a list of tensors or a mapping of names to tensors.")
    refuse_modules(params)
    if isinstance(params, Mapping):
        labels, leaves = list(params.keys()), list(params.values())
    else:
        leaves = list(params)
        labels = [f"parameter {i}" for i in range(len(leaves))]
    if not leaves:
        raise ValueError("params is empty; expected at least one tensor to perturb.")
    return labels, [check_leaf(leaf, label, parts=True, real=False) for leaf, label in zip(leaves, labels, strict=True)]


def _rows(directions: Any, leaves: list[Tensor], labels: list[str], params: Any) -> Directions:
    lazy = lazily(directions)
    if lazy is not None:
        return lazy
    given = _by_name(directions, labels, params) if isinstance(directions, Mapping) else list(directions)
    if len(given) != len(leaves):
        raise ValueError(f"there are directions for {len(given)} tensors; expected {len(leaves)}, one for each.")
    given = [one.full_tensor() if is_shared_out(one) else one for one in given]
    check_directions(given, [whole_like(leaf) for leaf in leaves], labels)
    return Given(given)


def _by_name(directions: Mapping[str, Any], labels: list[str], params: Any) -> list[Any]:
    if not isinstance(params, Mapping):
        raise TypeError("directions are a mapping but params are a list; expected the same form for both.")
    missing = [name for name in labels if name not in directions]
    extra = [name for name in directions if name not in params]
    if missing or extra:
        raise ValueError(
            f"directions lack {missing or 'nothing'} and name {extra or 'nothing'} beyond params; expected the same "
            "names."
        )
    return [directions[name] for name in labels]
