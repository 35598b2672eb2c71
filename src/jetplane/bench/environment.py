"""Where and with what the numbers were measured."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import jetplane

__all__ = ["environment"]

_PACKAGES = ("jax", "jaxlib", "jet-for-pytorch", "triton")


def environment(device: str, threads: int, fomoh: Path | None = None) -> dict[str, Any]:
    """Versions, commit, device and threads; nothing of the host or the time."""
    cuda = device.startswith("cuda")
    found: dict[str, Any] = {
        "jetplane": jetplane.__version__,
        **_commit(Path(jetplane.__file__).parent),
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
        found["fomoh"] = _commit(fomoh).get("commit", "unknown")
    return found


def _commit(folder: Path) -> dict[str, Any]:
    """The commit of a folder, and whether files that it tracks were changed since."""

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": "unknown"}
    return {"commit": commit, "changed": bool(git("status", "--porcelain", "--untracked-files=no", "."))}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return f"{platform.machine()} CPU"
