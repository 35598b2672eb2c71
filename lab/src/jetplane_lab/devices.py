"""Where commands run: one default for all of them."""

from __future__ import annotations

import torch

__all__ = ["AUTO", "HELP", "device"]

AUTO = "auto"
HELP = "cpu, cuda, cuda:1, ..., or auto: cuda where there is one (default: auto)"


def device(name: str | None) -> str:
    """The device of this name; what "auto", or no name, is on this machine.

    Example:
        >>> device("cpu")
        'cpu'
        >>> device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
        True
    """
    return ("cuda" if torch.cuda.is_available() else "cpu") if name in (None, AUTO) else name
