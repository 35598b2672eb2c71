"""The parameters of a program, and what the program makes of parameters alone: transposes, casts, parametrisations."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ... import guard
from ...ad import _torch
from ...ad.run.parts import Wholes, is_shared_out, like_part, own, part_of
from ...ad.run.passes import check_leaf, refuse_modules
from ...ad.storage_geometry import geometry, inside, overlap, place, span
from ...errors import UnsupportedProgram

__all__ = ["Gradients", "Parameters", "accumulate", "local_derivative", "pulled_back"]

_inside = lru_cache(1024)(inside)  # the same views of a weight are met in every pass


class Parameters:
    """The tensors whose gradients are wanted, with their names, found by the memory that they own.

    Where processes share some out, ``tensors`` are the wholes that the program reads, and ``given`` the parts.
    """

    def __init__(self, params: Iterable[Any] | Mapping[str, Tensor]) -> None:
        self.names, self.given = _named(params)
        self.wholes = Wholes(self.given, self.names)
        self.tensors = self.wholes.tensors
        self.places: dict[Any, list[int]] = {}  # by storage
        self.parts: dict[Any, str] = {}  # likewise, of what is shared out: its name

    def at(self, tensors: list[Tensor]) -> Parameters:
        """The same ones in other tensors: those of a captured program, or of its trace."""
        other = copy.copy(self)
        other.tensors = other.given = tensors
        other.refresh()
        return other

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: where memory is, is found again."""
        return self.__dict__ | {"places": {}, "parts": {}}

    @property
    def everywhere(self) -> tuple[list[Tensor], list[str]]:
        """Those that every process has, with their names."""
        found = [one for one in zip(self.given, self.names, strict=True) if not is_shared_out(one[0])]
        return [tensor for tensor, _ in found], [name for _, name in found]

    @contextlib.contextmanager
    def apart(self) -> Iterator[Callable[[], list[Tensor]]]:
        """Inside, gradients are added to nothing, and the function gives them; ``.grad`` is then as before."""
        kept = [tensor.grad for tensor in self.tensors]
        for tensor in self.tensors:
            tensor.grad = None

        def found() -> list[Tensor]:
            grads = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in self.tensors]
            # FSDP may gather in a shorter dtype
            return [grad.to(given.dtype) for grad, given in zip(grads, self.given, strict=True)]

        try:
            yield found
        finally:
            for tensor, grad in zip(self.tensors, kept, strict=True):
                tensor.grad = grad

    @property
    def kept_apart(self) -> int:
        """How many bytes :meth:`apart` takes: those of every ``.grad`` that there is already."""
        return sum(tensor.grad.nbytes for tensor in self.tensors if tensor.grad is not None)

    def accumulate(self, gradients: Iterable[Tensor]) -> None:
        """Add to every ``.grad``."""
        for number, gradient in enumerate(gradients):
            self.add(number, gradient)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add the gradient of a whole parameter to ``.grad``, of a shared one the part that this process has."""
        given = self.given[number]
        if is_shared_out(given):
            part = like_part(given, part_of(gradient, given).to(given.dtype))
            given.grad = part if given.grad is None else given.grad.add_(part)
        else:
            accumulate(given, gradient)

    def hand_over(self, gradients: Iterable[Tensor | None]) -> None:
        """The same with what was in ``.grad`` :meth:`apart`, which becomes ``.grad`` itself where there is none."""
        for tensor, gradient in zip(self.tensors, gradients, strict=True):
            if tensor.grad is None:
                tensor.grad = gradient
            elif gradient is not None:
                tensor.grad.add_(gradient)

    def refresh(self) -> None:
        """Look where the parameters' memory is now: ``.data`` may have been assigned."""
        if self.wholes.any:
            self.tensors = self.wholes.tensors
            parts = zip(self.given, self.names, strict=True)
            self.parts = {own(one).untyped_storage(): name for one, name in parts if is_shared_out(one)}
        self.places = {}
        for index, tensor in enumerate(self.tensors):
            self.places.setdefault(tensor.untyped_storage(), []).append(index)

    def find(self, tensor: Tensor) -> int | None:
        """The number of the parameter that ``tensor`` is, or is a view of."""
        for index in self.places.get(tensor.untyped_storage(), ()):
            own = self.tensors[index]
            if tensor is own or _inside(place(tensor), geometry(own)):
                return index
        return None

    def check_whole(self, tensor: Tensor) -> None:
        """Raise where ``tensor`` is a process's part of a parameter."""
        name = self.parts.get(tensor.untyped_storage())
        if name is not None:
            raise UnsupportedProgram(
                f"the program reads this process's part of {name}, a sharded parameter; expected one that reads it "
                "through the modules that it belongs to, which gather it."
            )

    def hooked(self) -> list[str]:
        """The names of those with hooks for their gradients."""
        return [name for name, tensor in zip(self.names, self.given, strict=True) if _torch.has_gradient_hooks(tensor)]

    def touched(self, tensor: Tensor) -> list[str]:
        """The names of the parameters that have an element in common with ``tensor``."""
        near = self.places.get(tensor.untyped_storage(), ())
        return [self.names[index] for index in near if overlap(place(tensor), geometry(self.tensors[index]))]


def _named(params: Iterable[Any] | Mapping[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    wanted = [(name, tensor) for name, tensor in _leaves(params) if tensor.requires_grad]
    if not wanted:
        raise ValueError("params holds no tensor that requires grad; expected at least one.")
    _refuse_repeated(wanted)
    return [name for name, _ in wanted], [tensor for _, tensor in wanted]


def _leaves(params: Iterable[Any] | Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor):
        raise TypeError("params is a tensor; expected tensors, a mapping of names to tensors, or named_parameters().")
    refuse_modules(params)
    return [(name, check_leaf(tensor, name, parts=True)) for name, tensor in _pairs(params)]


def _pairs(params: Iterable[Any] | Mapping[str, Tensor]) -> list[tuple[str, Any]]:
    """Names and tensors; those without a name are numbered."""
    entries = params.items() if isinstance(params, Mapping) else params
    return [entry if isinstance(entry, tuple) else (f"parameter {n}", entry) for n, entry in enumerate(entries)]


def _refuse_repeated(named: Iterable[tuple[str, Tensor]]) -> None:
    seen: dict[int, str] = {}
    for name, tensor in named:
        if id(tensor) in seen:
            raise ValueError(f"{name} is {seen[id(tensor)]}; expected each parameter once.")
        seen[id(tensor)] = name


class Gradients:
    """Collects the gradients of one pass, into ``.grad``; those of what is made of parameters are pulled back last."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._tape: list[tuple[Any, Any, Any, Any]] = []  # what the program did with parameters alone, in order
        self._made: dict[int, Tensor] = {}  # results on the tape by identity, alive as long as it
        self._wanted: dict[int, tuple[Tensor, Tensor]] = {}  # results with their gradients

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation on parameters alone has run."""
        self._tape.append((func, args, kwargs, out))
        for tensor in _torch.pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._made[id(tensor)] = tensor

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """Add the gradient of ``tensor``: a parameter, a view of one, or something made of parameters."""
        index = self._parameters.find(tensor)
        if index is not None:
            view, of_memory = _as_real_memory(tensor, gradient)
            if self._scatter(self._parameters.tensors[index], view, of_memory):
                return
        if id(tensor) in self._wanted:
            self._wanted[id(tensor)][1].add_(gradient)
        else:
            self._wanted[id(tensor)] = tensor, gradient.to(tensor.dtype).clone()

    def finish(self) -> None:
        """Pull the gradients of what was made of parameters back to the parameters."""
        if not self._wanted:
            return
        results, gradients = zip(*self._wanted.values(), strict=True)
        used = self._leaves(results)

        def parametrisation(*leaves: Tensor) -> list[Tensor]:
            return self._again(dict(zip(used, leaves, strict=True)), results)

        leaves = [self._parameters.tensors[index] for index in used]
        for leaf, gradient in zip(leaves, local_derivative(parametrisation, leaves, list(gradients)), strict=True):
            accumulate(leaf, gradient)
        self._wanted.clear()

    def _leaves(self, results: Iterable[Tensor]) -> list[int]:
        found = {self._parameters.find(t) for entry in self._tape for t in _tensors(entry[1:3])}
        found |= {self._parameters.find(t) for t in results}
        return sorted(index for index in found if index is not None)

    def _again(self, leaves: dict[int, Tensor], results: Iterable[Tensor]) -> list[Tensor]:
        """The tape on other leaves, and what ``results`` become."""
        values: dict[int, Tensor] = {}

        def look(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in values:
                return values[id(value)]
            index = self._parameters.find(value)
            if index is None:
                return value
            parameter, leaf = self._parameters.tensors[index], leaves[index]
            if value is parameter:
                return leaf
            shape, strides, offset = place(value)
            view = _like(leaf, parameter).as_strided(shape, strides, offset - int(parameter.storage_offset()))
            view = torch.view_as_complex(view) if value.is_complex() else view
            view = view.conj() if value.is_conj() else view
            return -view if value.is_neg() else view

        for func, args, kwargs, out in self._tape:
            again = func(*_torch.pytree.tree_map(look, args), **_torch.pytree.tree_map(look, kwargs))
            for old, new in zip(_torch.pytree.tree_leaves(out), _torch.pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    values[id(old)] = new
        return [look(result) for result in results]

    def _scatter(self, parameter: Tensor, view: Tensor, gradient: Tensor) -> bool:
        """Add to the part of ``parameter.grad`` that ``view`` is; False where that part is not plain memory."""
        if view.shape == parameter.shape and view.stride() == parameter.stride():
            accumulate(parameter, gradient)
            return True
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            return False
        gradient = _of_memory(gradient, view)
        grad = _grad_of(parameter)
        if grad.stride() != parameter.stride():
            return False
        offset = int(view.storage_offset()) - int(parameter.storage_offset()) + int(grad.storage_offset())
        grad.as_strided(gradient.shape, view.stride(), offset).add_(gradient)
        return True


def _as_real_memory(view: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A view of real memory as real numbers, with the derivative by what the memory holds."""
    if view.is_conj():
        view, gradient = view.conj(), gradient.conj()
    gradient = (-gradient if view.is_neg() else gradient).to(view.dtype)
    return (
        (torch.view_as_real(view), torch.view_as_real(gradient.resolve_conj()))
        if view.is_complex()
        else (view, gradient)
    )


def _of_memory(gradient: Tensor, view: Tensor) -> Tensor:
    """The gradient of the elements that an expanded view has, each once."""
    for axis, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[axis] > 1:
            gradient = gradient.sum(axis, keepdim=True)
    return gradient


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _torch.pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _like(leaf: Tensor, parameter: Tensor) -> Tensor:
    """``leaf`` in memory that is laid out as the parameter's."""
    if leaf.stride() == parameter.stride() and leaf.storage_offset() == 0:
        return leaf
    low, high = span(geometry(parameter))
    flat = leaf.new_zeros(high - low + 1)
    flat.as_strided(parameter.shape, parameter.stride(), 0).copy_(leaf)
    return flat


def _grad_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad``, as a backward pass does."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
    else:
        parameter.grad.add_(gradient)


def pulled_back(outputs: list[Tensor], inputs: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    """J^T g by autograd; None for an input that nothing depends on.

    By the derivative of g . y, the same bits: where torch is handed gradients, it imports its symbolic shapes, which
    takes longer than to plan a transformer.

    Example:
        >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> pulled_back([w.square()], [w], [torch.ones(2)])
        (tensor([6., 8.]),)
    """
    if any(output.is_complex() for output in outputs):
        return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    sums = [(output * gradient).sum() for output, gradient in zip(outputs, gradients, strict=True)]
    return torch.autograd.grad(sums, inputs, allow_unused=True)


def local_derivative(
    function: Callable[..., list[Tensor]], leaves: list[Tensor], gradients: list[Tensor]
) -> list[Tensor]:
    """J^T g of a function of parameters alone (weight norm, a merged adapter): never of the network.

    Example:
        >>> w = torch.tensor([3.0, 4.0])
        >>> local_derivative(lambda w: [w.square()], [w], [torch.ones(2)])
        [tensor([6., 8.])]
    """
    inputs = [leaf.detach().requires_grad_() for leaf in leaves]
    with guard.local(), torch.enable_grad():
        found = pulled_back(function(*inputs), inputs, gradients)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
