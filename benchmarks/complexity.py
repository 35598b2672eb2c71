"""Cyclomatic complexity by room, as radon counts it (pip install radon).

    python benchmarks/complexity.py src/jetplane/ad src/jetplane/gradients src/jetplane/optim

Functions, methods and inner functions each count once; boolean operators and comprehensions count as branches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGE = 10

try:
    from radon.complexity import cc_visit
    from radon.visitors import Class
except ImportError:
    raise SystemExit("radon is not installed; expected it beside this script: pip install radon") from None


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """The name and the complexity of each function of ``file``."""
    for block in cc_visit(file.read_text()):
        if isinstance(block, Class):
            for method in block.methods:
                yield from _with_inner(file, method)
        elif block.classname is None:  # methods are listed a second time
            yield from _with_inner(file, block)


def _with_inner(file: Path, function: Any) -> Iterator[tuple[str, int]]:
    yield f"{file.name}:{function.lineno} {function.name}", function.complexity
    for inner in function.closures:
        yield from _with_inner(file, inner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", type=Path)
    parser.add_argument("--above", type=int, default=20, help="also name the functions above this (20)")
    arguments = parser.parse_args()
    print("| room | lines | functions | mean | above 10 | worst |\n| --- | ---: | ---: | ---: | ---: | --- |")
    large = []
    for room in arguments.rooms:
        if not room.exists():
            parser.error(f"{room} is not there; expected a folder or a file of the tree.")
        files = list(room.rglob("*.py")) if room.is_dir() else [room]
        lines = sum(len(file.read_text().splitlines()) for file in files)
        found = dict(one for file in files for one in functions(file))
        worst = max(found, key=lambda name: found[name])
        above, mean = sum(value > LARGE for value in found.values()) / len(found), sum(found.values()) / len(found)
        print(f"| {room.name} | {lines:,} | {len(found)} | {mean:.2f} | {above:.1%} | `{worst}` {found[worst]} |")
        large += [f"{value:3d} {name}" for name, value in found.items() if value > arguments.above]
    print("\n".join(sorted(large, reverse=True)))


if __name__ == "__main__":
    main()
