"""A checkpoint: one safetensors file with the tensors, and all plain numbers as JSON in its metadata.

A SHA-256 over numbers and tensors stands in the metadata too, so that a file damaged anywhere is recognised.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetplane.errors import JetplaneError

from . import codec

__all__ = ["Damaged", "State", "dump", "load", "require_safetensors"]


class Damaged(JetplaneError, RuntimeError):
    """A file of a run's folder is not what was written."""


@dataclass(frozen=True)
class State:
    """Where a run stood after an epoch."""

    config: str  # digest of the config
    epoch: int  # epochs that are done
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    progress: dict[str, Any]  # running numbers of the loop: seconds, start loss, reason of the end
    metrics_size: int  # bytes of metrics.jsonl
    metrics_lines: int
    metrics_sha256: str  # of those bytes


def require_safetensors() -> None:
    """Raise one clear sentence where safetensors is not installed."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise JetplaneError(
            "checkpoints need the package safetensors; install it with pip install safetensors."
        ) from None


def dump(state: State) -> bytes:
    """The contents of the file."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    numbers = json.dumps(codec.pack(vars(state), "run", tensors))
    # clones: safetensors refuses tensors that share memory, and a parameter may be a view
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return save(plain, {"state": numbers, "sha256": _digest(numbers, plain)})


def load(path: Path) -> State:
    """The state in a file; :class:`Damaged` if it is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read ({' '.join(str(error).split())})") from error
    numbers, expected = metadata.get("state", ""), metadata.get("sha256")
    if _digest(numbers, tensors) != expected:
        raise Damaged(f"{path} is damaged: the SHA-256 of its contents is not the one that it holds")
    return State(**codec.unpack(json.loads(numbers), tensors))


def _digest(numbers: str, tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256(numbers.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return sha.hexdigest()
