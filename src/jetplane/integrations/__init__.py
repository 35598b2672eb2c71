"""jetplane's optimizers in the trainers that people use: :mod:`.transformers`, :mod:`.lightning`, :mod:`.accelerate`.

Nothing is imported here: each module needs its package, which is an extra of the same name.
"""

from __future__ import annotations

import importlib.util

__all__ = ["needed"]


def needed(package: str) -> None:
    """Raise where a module's package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"jetplane.integrations.{package} needs the package {package}, which is not installed; expected "
            f"pip install 'jetplane[{package}]', or {package} beside jetplane.",
            name=package,
        )
