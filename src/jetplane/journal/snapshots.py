"""Snapshots: all tensors of a run after some step, one safetensors file each, written whole or not at all.

The package safetensors is imported where a snapshot is written or read, and nowhere else: it is what other programs
read, and it is kept better than a reader of our own would be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..directions import Memory
from ..errors import JetplaneError, JournalDamaged
from . import durable
from .raw_bytes import digest

__all__ = ["Standing", "bits", "export", "named", "path_of", "read", "require", "standing", "steps_of", "write"]

_NAME = re.compile(r"after-(\d+)\.safetensors")


class Standing(NamedTuple):
    """Where a run stood, apart from its tensors."""

    run: str  # which run
    step: int  # how many steps were taken
    chain: int  # CRC of the record of the last one
    bad: int
    solver_state: float | None
    size: tuple[int, float] | None
    lrs: list[float]
    decays: list[float]
    place: Any = None


def require() -> None:
    """Raise one clear sentence where safetensors is not installed."""
    try:
        import numpy  # noqa: F401
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise JetplaneError(
            f"the journal's snapshots need the packages safetensors and numpy ({error}); install them with pip install "
            "'jetplane[journal]'."
        ) from None


def path_of(folder: Path, step: int) -> Path:
    """Where the snapshot after so many steps lies."""
    return folder / f"after-{step:08}.safetensors"


def steps_of(folder: Path) -> list[int]:
    """The steps after which there are snapshots, in order."""
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name)))


def write(folder: Path, tensors: dict[str, Tensor], state: Standing) -> None:
    """Write a snapshot."""
    numbers = json.dumps(state._asdict())
    plain = _plain(tensors)
    metadata = {"state": numbers, "digest": _digest(plain, numbers)}
    durable.replace(path_of(folder, state.step), lambda path: _save(plain, path, metadata))


def standing(path: Path) -> tuple[Standing, dict[str, Tensor]]:
    """What a snapshot holds; :class:`JournalDamaged` if it is not whole."""
    tensors, metadata = read(path)
    numbers = metadata.get("state", "")
    if _digest(tensors, numbers) != metadata.get("digest"):
        raise JournalDamaged(f"{path} is damaged: the checksum of its contents is not the one that it holds.")
    found = json.loads(numbers)
    return Standing(**found | {"size": None if found["size"] is None else tuple(found["size"])}), tensors


def export(tensors: dict[str, Tensor], path: Path, steps: int) -> None:
    """Write tensors under their own names, for any reader of safetensors."""
    durable.replace(path, lambda temporary: _save(_plain(tensors), temporary, {"steps": str(steps)}))


def named(leaves: Sequence[Tensor], buffers: Sequence[Tensor], memory: Memory) -> dict[str, Tensor]:
    """All tensors of a run, by the names that they have in a snapshot."""
    parts = {"parameter": leaves, "buffer": buffers} | {f"memory {name}": kept for name, kept in memory.items()}
    return {f"{kind} {number}": one for kind, tensors in parts.items() for number, one in enumerate(tensors)}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and what stands beside them."""
    require()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise JournalDamaged(f"{path} cannot be read ({' '.join(str(error).split())}).") from error


def bits(tensor: Tensor) -> bytes:
    """A checksum of the bits of a tensor."""
    return digest([tensor])


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    require()
    from safetensors.torch import save_file

    save_file(tensors, path, metadata)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies: safetensors refuses tensors that share memory, and a parameter may be a view."""
    return {name: torch.empty(one.shape, dtype=one.dtype, device="cpu").copy_(one) for name, one in tensors.items()}


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    names = sorted(tensors)
    kinds = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    return digest([tensors[name] for name in names], json.dumps([text, kinds])).hex()
