"""Where in the user's program something happened. Walks the Python stack, so it costs nothing until it is asked."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = Path(torch.__file__).parent
_LIBRARIES = (str(_TORCH), str(Path(__file__).parents[2]))
_OURS = str(Path(__file__).parents[2]) + os.sep
_RULES = str(Path(__file__).parents[1] / "rules")
_BACKWARD = tuple(str(_TORCH / part) for part in ("autograd" + os.sep + "__init__.py", "overrides.py"))
_TRANSFORMS = str(_TORCH / "_functorch")
_DIFFERENTIATION = tuple(str(_TORCH / part) for part in ("autograd", "_functorch", "utils/checkpoint.py"))


def call_site(what: str) -> str:
    """``what`` with the user's module path and source line, as far as the stack tells them."""
    line, modules = _walk()
    where = module_path(modules)
    return what + (f" in module {where}" if where else "") + (f" at {line}" if line else "")


def current_module() -> str:
    """The path of the innermost module that is running, empty outside of modules."""
    return module_path(_walk()[1])


def current_line() -> str:
    """The innermost file and line outside of torch and jetplane: the program's, or that of a library that it calls."""
    return _walk()[0]


def called_by_autograd() -> bool:
    """Whether the innermost caller outside of jetplane is torch's own differentiation code, not the program.

    A rule that is a program takes the place of the user's: what it calls, the program calls.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code):
        if frame.f_code.co_filename.startswith(_RULES):
            return False
        frame = frame.f_back
    return frame is not None and is_differentiation(frame.f_code)


def called_by_transform() -> bool:
    """Whether it is a transform of torch.func that asks for a backward pass, not the program.

    The backward pass itself is torch.autograd's, whose lines are passed over.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_ours(frame.f_code) or frame.f_code.co_filename.startswith(_BACKWARD)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TRANSFORMS)


def users_level() -> int:
    """The ``stacklevel`` at which a warning of the one who calls this names the first line outside of libraries.

    Counting frames goes wrong where torch wraps a step once more, as its schedulers and hooks do.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_code):
        level, frame = level + 1, frame.f_back
    return level


def is_ours(code: CodeType) -> bool:
    """Whether code is jetplane's own."""
    return code.co_filename.startswith(_OURS)


def is_differentiation(code: CodeType) -> bool:
    """Whether code is a part of torch's own differentiation."""
    return code.co_filename.startswith(_DIFFERENTIATION)


def is_library(code: CodeType) -> bool:
    """Whether code is torch's or jetplane's."""
    return code.co_filename.startswith(_LIBRARIES)


def _walk() -> tuple[str, list[torch.nn.Module]]:
    """The innermost source line outside of libraries, and the modules on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    line = ""
    modules: list[torch.nn.Module] = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and (not modules or modules[-1] is not owner):
            modules.append(owner)
        filename = frame.f_code.co_filename
        if not line and not filename.startswith(_LIBRARIES) and not filename.startswith("<frozen"):
            line = f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return line, modules


def module_path(modules: list[torch.nn.Module]) -> str:
    """The innermost of ``modules`` (innermost first) as a path below the outermost one."""
    if not modules:
        return ""
    inner, root = modules[0], modules[-1]
    name = next((name for name, module in root.named_modules() if module is inner), "")
    return f"{name or type(inner).__name__} ({type(inner).__name__})"
