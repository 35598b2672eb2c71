"""torch's private names of many processes: groups by name, finished work, and parameters of which each has a part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter}  # what is around nothing
_WRAPPERS = {  # tensors around tensors, which send their operations on to those: by module and name
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
}


# -- what programs do -------------------------------------------------------------------------------------------


class _Seen:
    """Whether programs exchange something themselves, and a process that waits may wait inside of one."""

    inside_programs = False


SEEN = _Seen()


# -- groups ---------------------------------------------------------------------------------------------------------


def has_others() -> bool:
    """Whether this process is one of several."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def group_named(name: Any) -> Any:
    """The process group of an operation's argument ``group_name``."""
    if not isinstance(name, str):
        return name
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, attr-defined]


def group_behind(script: Any) -> Any:
    """The process group that an operation of c10d is given, as the dispatcher hands it over."""
    return torch._C._distributed_c10d.ProcessGroup.unbox(script) if isinstance(script, torch.ScriptObject) else script


def reduction_behind(script: Any) -> str:
    """The name of a ReduceOp that an operation of c10d is given: "sum", "avg", "product", "min", "max" or another."""
    names = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
    code = int(script.op())
    return names[code] if code < len(names) else "unused"


def finished(results: Sequence[Tensor]) -> Any:
    """The handle of work that is done, as the dispatcher hands it back."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(results))
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def holders(tensor: Tensor) -> int:
    """How many hold a tensor: Python as a whole, and each thread of C++ that works on it."""
    return int(tensor._use_count())  # type: ignore[attr-defined]


# -- tensors around tensors -----------------------------------------------------------------------------------------


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class send their operations on to tensors inside, where a mode sees them."""
    return _WRAPPERS.get(kind.__module__) == kind.__name__


def is_dtensor(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor. Imports nothing."""
    if type(tensor) in _PLAIN:
        return False  # as nearly always
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def inside(tensor: Tensor) -> Tensor:
    """The plain tensor inside of wrappers: of a DTensor the part that this process has."""
    while is_wrapper(type(tensor)):
        tensor = tensor._local_tensor if is_dtensor(tensor) else tensor.elem  # type: ignore[attr-defined]
    return tensor


# -- parts ----------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """One axis of a tensor cut into so many ``parts`` as torch.chunk does, of which this process has one."""

    axis: int
    parts: int
    number: int


def cuts(tensor: Any) -> list[Stretch] | None:
    """The cuts that make a process's part of a DTensor, in their order; None where its parts are not that."""
    mesh = tensor.device_mesh
    found: list[Stretch] = []
    last: list[Stretch] = []
    place = mesh.get_coordinate()
    if place is None:
        return None
    for number, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            return None
        one = Stretch(placement.dim % tensor.ndim, mesh.size(number), place[number])
        # a strided one cuts what the others leave: FSDP around tensor parallelism
        (last if kind == "_StridedShard" else found).append(one)
    return found + last


# -- FSDP -----------------------------------------------------------------------------------------------------------


class Managed(NamedTuple):
    """A parameter that ``fully_shard`` manages, and the group of parameters that it is gathered with."""

    parameter: Any
    group: Any

    def whole(self) -> Tensor:
        """The tensor that modules use, in whose memory the gathered parameter is put each time."""
        if not hasattr(self.parameter, "_unsharded_param"):
            with torch.no_grad():  # the first time it is made
                self.group.lazy_init()
                self.group.unshard()
                self.group.wait_for_unshard()
                self.group.reshard()
        whole: Tensor = self.parameter._unsharded_param
        return whole


def managed() -> dict[int, Managed]:
    """What FSDP manages, by the ids of the sharded parameters."""
    states = sys.modules.get("torch.distributed._composable_state")
    found: dict[int, Managed] = {}
    for reference in [] if states is None else list(states._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.13 a state has one
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                found[id(parameter.sharded_param)] = Managed(parameter, group)
    return found


def free(found: Sequence[Managed]) -> None:
    """Let what was gathered go, so that it is gathered anew, and modules have their sharded parameters."""
    for group in {id(one.group): one.group for one in found}.values():
        group.reshard()


@contextlib.contextmanager
def kept_whole(found: Sequence[Managed]) -> Iterator[None]:
    """Inside, modules have these parameters whole, and all others of the same root, however often they run.

    They are gathered once, of the parts as they are now.
    """
    with torch.no_grad():
        wanted = {id(one.group.comm_ctx) for one in found}
        near = [one.group for one in managed().values()] + [one.group for one in found]
        gathered = list({id(group): group for group in near if id(group.comm_ctx) in wanted}.values())
        layouts = [group.post_forward_mesh_info for group in gathered]
        try:
            for group in gathered:
                group.lazy_init()
                group.reshard()
                group.unshard()
                group.wait_for_unshard()
                group.post_forward_mesh_info = None  # a forward pass leaves them whole
            yield
        finally:
            for group, layout in zip(gathered, layouts, strict=True):
                group.post_forward_mesh_info = layout
                group.reshard()
