"""Processes in two dimensions: those with different parts of a batch, and those that share the directions of one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import distributed

from .processes import Processes

__all__ = ["Mesh", "mesh_of"]

_NAMES = ("data", "directions")


class Mesh(NamedTuple):
    """The place of a process."""

    everyone: Processes
    data: Processes  # with the same directions to run, each with another part of the batch
    directions: Processes  # with the same part of the batch


def mesh_of(process_group: Any) -> Mesh | None:
    """The place in a mesh, where it was one that was given.

    Example:
        >>> assert mesh_of(None) is None
    """
    if process_group is None or not distributed.is_available():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(process_group, DeviceMesh):
        return None
    names = process_group.mesh_dim_names
    if names != _NAMES:
        raise ValueError(f"process_group is a DeviceMesh with the dimensions {names}; expected {_NAMES}.")
    if process_group.size() != distributed.get_world_size():
        raise ValueError(
            f"process_group is a DeviceMesh of {process_group.size()} processes; expected all "
            f"{distributed.get_world_size()} of them."
        )
    groups = (process_group.get_group(name) for name in _NAMES)
    return Mesh(Processes(distributed.group.WORLD), *map(Processes, groups))
