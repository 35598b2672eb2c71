"""``jetplane rosenbrock``: the Rosenbrock study as data, figures and a page, and the table of all solvers."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import jetplane
from jetplane_lab import functions, page, plots, records, rosenbrock, table
from jetplane_lab.data import files

_QUICK = {"seeds": 3, "samples": 500, "draws": 1, "steps": 60}  # in place of what was not given


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rosenbrock",
        help="compare the optimizers on the Rosenbrock function, or another",
        description="Run the Rosenbrock study and write its data (JSONL), figures (PNG, SVG) and one HTML page:\n"
        "\n"
        "  single-step  samples of a step of FGD, FoMoH and FoMoH-2D in 2D, with FoMoH-BP and Newton; histograms\n"
        "  comparison   FGD, FoMoH, FoMoH-2D, FoMoH-BP, SGD, Adam and Newton in 2D from common starts\n"
        "  planes       FoMoH-KD for every K, and Newton, in D dimensions\n"
        "  descending   the same with a solver that never ascends\n"
        "\n"
        "Rows that are already in DIR with the same settings are not run again.",
        epilog="examples:\n"
        "  jetplane rosenbrock --quick                      a look in half a minute\n"
        "  jetplane rosenbrock --out runs/rosenbrock        the whole study, some minutes\n"
        "  jetplane rosenbrock --function levy --dim 6 --k 2 4 6\n"
        "  jetplane rosenbrock --table docs/rosenbrock.md   all solvers on all functions (scipy's too, if installed)",
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder for the results (default: runs/ and the function's name)")
    add("--function", choices=functions.FUNCTIONS, default="rosenbrock", help="what to minimise (default: %(default)s)")
    add("--dim", type=_positive, default=10, metavar="D", help="dimension of the planes (default: %(default)s)")
    add("--k", type=_positive, nargs="+", metavar="K", help="directions of the planes (default: 2 to D)")
    add("--seeds", type=_positive, metavar="N", help="common starts, seeds 0 to N - 1 (default: 10)")
    add("--draws", type=_positive, metavar="N", help="draws of directions from each start in planes (default: 10)")
    add(
        "--steps", type=_positive, metavar="N", help="of every run (default: 1000 in 2D, 100 in planes, 150 in a table)"
    )
    add("--samples", type=_positive, metavar="N", help="of the single step (default: 10000)")
    add("--quick", action="store_true", help="few seeds, steps and samples, where they are not given")
    add("--fresh", action="store_true", help="run everything again")
    add("--table", type=Path, metavar="FILE.md", help="write the table of all solvers on all functions instead")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the study, or the table."""
    if arguments.quick:
        for name, value in _QUICK.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, value)
    if arguments.out is None:
        arguments.out = Path("runs") / ("table" if arguments.table else arguments.function)
    return _table(arguments) if arguments.table else _study(arguments)


def _study(arguments: argparse.Namespace) -> int:
    entry = functions.find(arguments.function)
    out, seeds, dim = arguments.out, arguments.seeds or 10, entry.dim(arguments.dim)
    if entry.dimension is not None and arguments.dim not in (10, entry.dimension):
        raise ValueError(f"--dim is {arguments.dim}, but the {entry.name} function has {entry.dimension} dimensions")
    steps, k_steps = arguments.steps or 1000, arguments.steps or 100
    draws = arguments.draws or 10
    ks = sorted(set(arguments.k or ()))
    parts = [
        rosenbrock.single_step(entry, arguments.samples or 10_000),
        rosenbrock.comparison(entry, seeds, steps),
        rosenbrock.planes(entry, dim, ks, seeds, k_steps, draws),
        rosenbrock.descending(entry, dim, ks, seeds, k_steps),
    ]
    single, compared, planes, descended = (_collect(part, out, arguments.fresh) for part in parts)
    histograms = list(rosenbrock.histograms(single))
    records.Records(out / "histograms.jsonl", parts[0].settings, fresh=True).extend(histograms)
    verdicts = rosenbrock.claims(entry, single, compared, planes, descended, steps, k_steps)
    _draw(
        out,
        {
            "single-step": lambda dark: plots.single_step(entry, single, dark),
            "histograms": lambda dark: plots.histograms(histograms, dark),
            "comparison": lambda dark: plots.comparison(entry, compared, steps, entry.dim(2), dark),
            "planes": lambda dark: plots.planes(entry, planes, k_steps, dim, "FoMoH-KD", dark),
            "descending": lambda dark: plots.planes(entry, descended, k_steps, dim, "descending steps", dark),
        },
    )
    study = page.Study(
        *(entry, single, histograms, compared, steps, planes, k_steps, dim, descended),
        claims=verdicts,
        versions=_versions(),
    )
    files.write(out / "index.html", page.page(study, out).encode())
    for claim in verdicts:
        print(f"{'holds ' if claim.holds else 'FAILS '} {claim.text} {claim.numbers}.")
    print(f"page: {out / 'index.html'}")
    return 0


def _table(arguments: argparse.Namespace) -> int:
    seeds, steps = arguments.seeds or 10, arguments.steps or 150
    if table.scipy() is None:
        print("scipy is not installed, so its trust-ncg is left out.", file=sys.stderr)
    rows = _collect(table.table(seeds, steps), arguments.out, arguments.fresh)
    also = ("scipy",) if table.scipy() is not None else ()
    files.write(arguments.table, table.markdown(rows, _versions(*also), seeds, steps).encode())
    print(f"wrote {arguments.table}")
    return 0


def _versions(*packages: str) -> dict[str, str]:
    found = {"jetplane": jetplane.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in packages}


def _draw(out: Path, figures: dict[str, Callable[[bool], Any]]) -> None:
    for name in figures:
        for suffix in plots.SUFFIXES:  # a page must not show the figures of an earlier study
            (out / f"{name}{suffix}").unlink(missing_ok=True)
    bar = _Bar("figures", len(figures))
    for name, draw in figures.items():
        plots.save(draw, out, name)
        bar.advance()


# -- progress -----------------------------------------------------------------------------------------------------


def _collect(part: rosenbrock.Part, out: Path, fresh: bool) -> list[records.Row]:
    """The rows of a part: those of an earlier run, and the rest."""
    store = records.Records(out / f"{part.name}.jsonl", part.settings, fresh)
    done = sum(key in store.rows for key in part.keys)
    bar = _Bar(part.name, len(part.keys), done)
    for row in part.rows(store.rows.keys()):
        store.add(row)
        bar.advance(row["key"])
    return store.pick(part.keys)


class _Bar:
    """A progress bar on the standard error: one line that is redrawn, or a few lines where that is no terminal."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done, self.skipped = name, total, done, done
        self.start = time.monotonic()
        self._shown = -1
        self._show(f"{done} from an earlier run" if done else "")

    def advance(self, what: str = "") -> None:
        """One more is done."""
        self.done += 1
        self._show(what)

    def _show(self, what: str) -> None:
        seconds = time.monotonic() - self.start
        filled = 24 * self.done // max(1, self.total)
        fresh = self.done - self.skipped
        left = f", {seconds / fresh * (self.total - self.done):.0f} s left" if fresh and self.done < self.total else ""
        line = f"{self.name:<12} [{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total} {seconds:.0f} s{left}"
        if sys.stderr.isatty():
            end = "\n" if self.done == self.total else ""
            print(
                f"\r\033[K{f'{line}  {what}'[: shutil.get_terminal_size().columns - 1]}",
                end=end,
                file=sys.stderr,
                flush=True,
            )
        elif self.done == self.total or 4 * self.done // self.total > self._shown:
            self._shown = 4 * self.done // max(1, self.total)
            print(line, file=sys.stderr, flush=True)


# -- arguments ----------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)
