"""The doors to torch's private names, and what they leave as it was."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import jetplane as jp
from jetplane.ad import _torch

SOURCE = Path(jp.__file__).parent


def private_torch_names(path: Path) -> list[str]:
    """Private names of torch that a file imports or reads."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        # a dotted name, and not a call with an attribute of ours among its arguments
        found += [n for n in names if re.fullmatch(r"torch(\.\w+)+", n) and _is_private(n)]
    return found


def _is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[1] == "ops":  # operations: torch.ops.aten._softmax is public enough to have a rule
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts[1:])


def test_two_files_touch_torchs_private_modules() -> None:
    """One is for what one process needs, the other for many."""
    touching = {str(p.relative_to(SOURCE)): names for p in SOURCE.rglob("*.py") if (names := private_torch_names(p))}
    doors = {"ad/_torch.py", "ad/_torch_distributed.py"}
    assert set(touching) == doors, {k: v for k, v in touching.items() if k not in doors}


def test_passes_that_overlap_leave_the_compiler_as_it_was() -> None:
    from torch._dynamo import eval_frame

    before = eval_frame._stance.stance
    first, second = _torch.uncompiled(), _torch.uncompiled()
    first.__enter__()
    second.__enter__()
    assert eval_frame._stance.stance == "force_eager"
    first.__exit__(None, None, None)  # in another thread, not in the order of a stack
    assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance.stance == before
