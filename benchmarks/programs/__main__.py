"""The command: run what has not been run, write the results and the page."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the processes fork

from .comparison import compare
from .forked import forked
from .listing import page, versions
from .program import Program

_FAMILIES = ("transformers", "vision", "diffusion", "adapters", "graphs", "scientific", "flows")


def _programs(only: tuple[str, ...]) -> Iterator[Program]:
    for name in _FAMILIES:
        module = importlib.import_module(f".families_{name}", __package__)
        try:
            yield from (program for program in module.programs() if program.name.startswith(only))
        except (ImportError, RuntimeError) as error:  # of a package that is not there, or does not fit torch
            print(f"{name}: left out, {error}", flush=True)


def main() -> None:
    """Run, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/programs.json"))
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--only", nargs="*", default=[""], metavar="PREFIX", help="programs whose names begin so")
    parser.add_argument("--again", nargs="*", default=[], metavar="RESULT", help="run those again that came out so")
    parser.add_argument("--seconds", type=float, default=60, help="for one program (default: %(default)s)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(arguments.out.read_text())["programs"] if arguments.out.exists() else {}
    for program in _programs(tuple(arguments.only)):
        if program.name in known and known[program.name]["result"] not in arguments.again:
            continue
        found = forked(lambda build=program.build: compare(build)._asdict(), arguments.seconds)
        known[program.name] = found
        print(f"{program.name}: {found['result']} {found['words'][:200]} ({found['seconds']} s)", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        part = arguments.out.with_suffix(".part")
        part.write_text(json.dumps({"versions": versions(), "programs": dict(sorted(known.items()))}, indent=1) + "\n")
        part.replace(arguments.out)
    if arguments.page:
        arguments.page.write_text(page(json.loads(arguments.out.read_text())))


main()
