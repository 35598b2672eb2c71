"""What a step holds at most, in bytes of live tensors: the same number on any machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["held_tensors", "live_bytes", "step_bytes", "tensors_of"]


def live_bytes(step: Callable[[], object], held: Callable[[], Iterable[Tensor]] = tuple) -> int:
    """The largest number of bytes in live tensors during ``step``, those of ``held()`` among them.

    ``held`` gives what is there before: parameters, their ``.grad``, an optimizer's state. It is called and forgotten,
    so that what the step lets go no longer counts. Tensors that are there and are not named do not count, either.
    Counted are storages, each once, however many views of it there are; workspaces within an operation are not seen.

    Example:
        >>> x = torch.zeros(1000)
        >>> live_bytes(lambda: (x + 1).mul_(2).sum(), lambda: [x])  # x, x + 1, and the sum
        8004
    """
    mode = _Storages(held())
    with mode:
        step()
    return mode.peak


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in lists, tuples and mappings, as states of optimizers are."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def held_tensors(model: nn.Module, state: Callable[[], Any]) -> Iterator[Tensor]:
    """What stays between steps: parameters, their gradients, buffers, and the optimizer's ``state()``."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    yield from tensors_of(state())


def step_bytes(step: Callable[[], object], model: nn.Module, state: Callable[[], Any]) -> int:
    """The largest number of bytes in live tensors during a step, with all that stays between steps.

    A state may hand out copies. They are kept during the step, in the place of what they are copies of; where the step
    puts something new in its place that counts beside it.
    """
    copies = _copies(list(tensors_of(state())), list(tensors_of(state())))
    return live_bytes(step, lambda: [*held_tensors(model, state), *copies])


def _copies(first: list[Tensor], again: list[Tensor]) -> list[Tensor]:
    return [
        one
        for one, other in zip(first, again, strict=True)
        if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    ]


class _Storages(TorchDispatchMode):
    """Counts storages from the operation that makes them until nothing refers to them."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        for tensor in held:
            self._enter(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of((args, kwargs or {})):  # there before, and not named: a view of it is not new
            self._known[tensor.untyped_storage()] = None
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_of(out):
            self._enter(tensor)
        return out

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known or tensor.device.type == "meta":
            return
        self._known[storage] = None
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._leave, size).atexit = False

    def _leave(self, size: int) -> None:
        self.now -= size
