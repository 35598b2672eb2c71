"""Where and with what the numbers were measured."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

import jetplane
from jetplane_lab.commit import commit_of, own_commit

__all__ = ["environment"]

_PACKAGES = ("jax", "jaxlib", "jet-for-pytorch", "triton")


def environment(device: str, threads: int, fomoh: Path | None = None) -> dict[str, Any]:
    """Versions, commit, device and threads; nothing of the host or the time."""
    cuda = device.startswith("cuda")
    ours = own_commit()
    found: dict[str, Any] = {
        "jetplane": jetplane.__version__,
        **({"commit": "unknown"} if ours is None else {"commit": ours.name, "changed": ours.changed}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else _processor(),
        "threads": threads,
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if fomoh is not None:
        theirs = commit_of(fomoh)
        found["fomoh"] = "unknown" if theirs is None else theirs.name
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return f"{platform.machine()} CPU"
