"""Rules from outside: ``jetplane.register``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import rules
from ..algebra import families, registry


class Register:
    """Enters rules into the engine's table, by family.

    Example:
        >>> @torch.library.custom_op("docs::cube", mutates_args=())
        ... def cube(x: torch.Tensor) -> torch.Tensor:
        ...     return x**3
        >>> register.elementwise(torch.ops.docs.cube, first=lambda x, y: 3 * x**2, second=lambda x, y, d: 6 * x)
        >>> register.remove(torch.ops.docs.cube)
    """

    def elementwise(self, op: Any, first: Callable[..., Any], second: Callable[..., Any] | None = None) -> None:
        """f(x) element by element: ``first(x, y, *rest)`` is f', ``second(x, y, d, *rest)`` is f'' or None for zero."""
        rules.load()
        families.elementwise(op, first, second)

    def linear(self, op: Any, over: str | Sequence[str] | None = None) -> None:
        """Jointly linear in the arguments named by ``over``, by default in the first one."""
        rules.load()
        families.linear(op, over)

    def bilinear(self, op: Any) -> None:
        """Linear in the first and in the second argument."""
        rules.load()
        families.bilinear(op)

    def constant(self, op: Any) -> None:
        """Derivative zero wherever it exists."""
        rules.load()
        families.constant(op)

    def composite(self, op: Any, body: Callable[..., Any]) -> None:
        """Equal to ``body``, a function of the same arguments made of operations that have rules.

        ``op`` may also be a subclass of torch.autograd.Function.
        """
        rules.load()
        families.composite(op, body)
        registry.add_for_complex(op)  # the body is a program, whose operations say for themselves what they know

    def transparent(self, function: type | str) -> None:
        """Differentiate the forward body of this torch.autograd.Function, a class or its dotted name.

        Example:
            >>> register.transparent("somebody.layers.FastGelu")  # need not be imported yet
            >>> register.remove("somebody.layers.FastGelu")
        """
        rules.load()
        families.transparent(function)

    def jet(self, op: Any, rule: Callable[..., Any]) -> None:
        """A rule in full, ``rule(pairs, op, *args, **kwargs)``: perturbed tensors arrive, and go back, as Operands."""
        rules.load()
        families.jet_rule(op)(rule)

    def remove(self, op: Any) -> None:
        """Take a rule out again."""
        registry.remove(op)


register = Register()
