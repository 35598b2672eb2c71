"""The command: run what has not been run, write the results and the page."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the processes fork

from .comparison import compare
from .forked import forked
from .listing import page, versions
from .packages import PACKAGES
from .program import Program

_FAMILIES = (
    *("transformers", "vision", "diffusion", "adapters", "graphs", "scientific", "flows", "attention", "losses"),
    *("reinforcement", "bayesian", "physics", "parts"),
)


_PATH = re.compile(r"/\S*/(?=(?:site-packages|benchmarks|src)/)")  # of the machine, up to what any other has


def _programs(families: tuple[str, ...], only: tuple[str, ...]) -> Iterator[Program]:
    """Those of packages that are there, and fit torch."""
    there: dict[str, bool] = {}
    for name in families:
        module = importlib.import_module(f".families_{name}", __package__)
        try:
            for program in module.programs():
                package = program.name.split("/")[0]
                if package not in there:
                    there[package] = _is_there(package)
                if there[package] and program.name.startswith(only):
                    yield program
        except (ImportError, RuntimeError) as error:  # of a package that is not there, or does not fit torch
            print(f"{name}: left out, {error}", flush=True)


def _is_there(package: str) -> bool:
    try:
        for name in PACKAGES[package]:
            importlib.import_module(name)
    except Exception as error:  # a package that does not fit another raises anything
        print(f"{package}: left out, {type(error).__name__}: {error}", flush=True)
        return False
    return True


def main() -> int:
    """Run, and write; 1 where a program came out wrong."""
    arguments = _arguments()
    warnings.simplefilter("ignore")
    held = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"versions": {}, "programs": {}}
    known = held["programs"]
    left = (
        (program.name, lambda build=program.build: compare(build)._asdict())
        for program in _programs(tuple(arguments.family), tuple(arguments.only))
        if program.name not in known or known[program.name]["result"] in arguments.again
    )
    until = None if arguments.within is None else time.monotonic() + arguments.within
    commit = _commit()
    for name, found in forked(left, arguments.jobs, arguments.seconds, until):
        found["words"] = _PATH.sub("", found.get("words", ""))
        known[name] = found | commit
        print(f"{name}: {found['result']} {found['words'][:200]} ({found['seconds']} s)", flush=True)
        _write(arguments.out, {"versions": held["versions"] | versions(), "programs": dict(sorted(known.items()))})
    if arguments.page:
        arguments.page.write_text(page(json.loads(arguments.out.read_text())))
    wrong = [name for name, found in known.items() if found["result"] == "wrong"]
    if wrong:
        print(f"wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


def _commit() -> dict[str, str]:
    """That of the tree, with a plus where there are changes; nothing outside of git."""
    try:
        changed = subprocess.check_output(["git", "status", "--porcelain", "src", "benchmarks/programs"], text=True)
        name = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": name.strip() + ("+" if changed else "")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/programs.json"))
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--family", nargs="*", default=[*_FAMILIES], choices=_FAMILIES, help="default: all")
    parser.add_argument("--only", nargs="*", default=[""], metavar="PREFIX", help="programs whose names begin so")
    parser.add_argument("--again", nargs="*", default=[], metavar="RESULT", help="run those again that came out so")
    parser.add_argument("--seconds", type=float, default=60, help="for one program (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (default: %(default)s)")
    parser.add_argument("--within", type=float, help="seconds for all: what is left then is not run")
    return parser.parse_args()


def _write(path: Path, held: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(held, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
