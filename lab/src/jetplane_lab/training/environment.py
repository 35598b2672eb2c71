"""Where a run takes place: versions, device, commit and command."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import jetplane

from ..commit import own_commit

__all__ = ["describe"]


def describe(device: torch.device) -> dict[str, Any]:
    """Facts that explain a result and do not name the host."""
    return {
        "jetplane": jetplane.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "safetensors": importlib.metadata.version("safetensors"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


@functools.cache
def _commit() -> str | None:
    """The commit of the source tree, with "+" where files differ from it; None outside a repository."""
    found = own_commit()
    return None if found is None else found.name + ("+" if found.changed else "")
