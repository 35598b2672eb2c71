"""``jetplane coverage``: every entry of PyTorch's operation database against double backward."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import platform
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import jetplane
from jetplane.testing import opdb

from . import files

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.complex128)}
_MEANING = {
    opdb.EXACT: "every sample compared agrees with double backward; a note names exceptions",
    opdb.MISSING: "an operation has no rule: the pass raises `MissingRule`",
    opdb.REFUSED: "refused with an error that says why",
    opdb.UNTESTED: "no sample has a dense input and an oracle to compare with",
    opdb.WRONG: "a result differs from double backward, or the pass crashed",
}

_EXPLANATION = """\
Each entry is run on its sample inputs with two random directions; loss, slope and curvature are compared with double
backward, each relative to its own size (or, where it nearly vanishes, to a small fraction of the largest). In dtypes
shorter than float64 the truth is the float64 result on the same inputs. Where double backward and the pass disagree and
finite differences in float64 side with the pass, the sample counts as exact, and the note says so. Written by
`jetplane coverage`; do not edit."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "coverage",
        help="check every entry of PyTorch's operation database",
        description="Compare slope and curvature of every entry of PyTorch's operation database that has a double "
        "backward with that double backward, and write the result as a Markdown table. Needs the package expecttest. "
        "The exit status is 1 if any entry is wrong.",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float64", help="of the inputs (default: %(default)s)")
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        help="where to run, cpu, cuda or auto: cuda where there is one (default: %(default)s)",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="compare at most N samples of each entry")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="entries whose name matches a shell pattern, as in --only 'nn.functional.*' mul",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.md", help="write the table here (default: to the standard output)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON, too")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Sweep, write, and return 1 if anything is wrong."""
    try:
        entries = opdb.entries(_DTYPES[arguments.dtype], arguments.device)
    except ImportError as error:
        raise RuntimeError(f"PyTorch's operation database cannot be imported: {error}") from error
    if arguments.only:
        entries = [e for e in entries if any(fnmatch.fnmatchcase(opdb.name_of(e), p) for p in arguments.only)]
        if not entries:
            raise ValueError(f"no entry matches --only {' '.join(arguments.only)}")
    outcomes = _sweep(entries, arguments)
    facts = _facts(arguments)
    table = markdown(outcomes, facts)
    if arguments.out is None:
        print(table, end="")
    else:
        files.write(arguments.out, table)
        print(f"wrote {arguments.out}: {_summary(outcomes)}")
    if arguments.json is not None:
        files.write(arguments.json, as_json(outcomes, facts))
    wrong = [outcome.name for outcome in outcomes if outcome.status == opdb.WRONG]
    if wrong:
        print(f"jetplane coverage: wrong: {', '.join(wrong)}.", file=sys.stderr)
    return 1 if wrong else 0


def _sweep(entries: Sequence[Any], arguments: argparse.Namespace) -> list[opdb.Outcome]:
    outcomes: list[opdb.Outcome] = []
    start = time.monotonic()
    for number, entry in enumerate(entries, 1):
        _progress(number, len(entries), opdb.name_of(entry), time.monotonic() - start)
        outcomes.append(_check(entry, arguments))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(f"{len(outcomes)} entries in {time.monotonic() - start:.0f} s: {_summary(outcomes)}", file=sys.stderr)
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _check(entry: Any, arguments: argparse.Namespace) -> opdb.Outcome:
    try:
        return opdb.check(entry, _DTYPES[arguments.dtype], arguments.device, arguments.limit)
    except ImportError as error:  # the samples of some entries need further packages
        return opdb.Outcome(opdb.name_of(entry), opdb.UNTESTED, note=str(error))
    except Exception as error:
        if arguments.debug:
            raise
        # One bad entry must not end the sweep; a crash is counted as wrong, never left out.
        return opdb.Outcome(opdb.name_of(entry), opdb.WRONG, note=f"crashed: {type(error).__name__}: {error}")


def _progress(number: int, total: int, name: str, seconds: float) -> None:
    line = f"{number:4d}/{total} {seconds:5.0f} s  {name}"
    if sys.stderr.isatty():
        print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
    elif number == total or number % 50 == 1:
        print(line, file=sys.stderr, flush=True)


# -- results ------------------------------------------------------------------------------------------------------


def markdown(outcomes: Sequence[opdb.Outcome], facts: dict[str, Any]) -> str:
    """The results as a page: counts first, then one row for each entry."""
    counts = Counter(outcome.status for outcome in outcomes)
    lines = [
        "# Coverage of PyTorch's operation database",
        "",
        _EXPLANATION,
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        f"| entries | {len(outcomes)} |",
        f"| samples compared | {sum(o.samples for o in outcomes)} |",
        f"| samples without an oracle | {sum(o.skipped for o in outcomes)} |",
        f"| exact entries with a note | {sum(o.status == opdb.EXACT and bool(o.note) for o in outcomes)} |",
        "",
        "| status | entries | meaning |",
        "| --- | ---: | --- |",
        *(f"| {status} | {counts[status]} | {meaning} |" for status, meaning in _MEANING.items()),
        "",
        "## Entries",
        "",
        "| entry | status | samples compared | worst relative error | note |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for o in outcomes:
        worst = f"{o.worst:.1e}" if o.samples else ""
        lines.append(f"| `{o.name}` | {o.status} | {o.samples} | {worst} | {_cell(o.note)} |")
    return "\n".join(lines) + "\n"


def as_json(outcomes: Sequence[opdb.Outcome], facts: dict[str, Any]) -> str:
    """The results for programs; an error that is not finite is written as null."""
    counts = Counter(outcome.status for outcome in outcomes)
    page = {
        **facts,
        "counts": {status: counts[status] for status in _MEANING},
        "entries": [
            {
                "name": o.name,
                "status": o.status,
                "samples": o.samples,
                "skipped": o.skipped,
                "worst": o.worst if math.isfinite(o.worst) else None,
                "note": _plain(o.note),
            }
            for o in outcomes
        ],
    }
    return json.dumps(page, indent=1, allow_nan=False) + "\n"


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.device(arguments.device).type == "cuda"
    facts = {
        "jetplane": jetplane.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": torch.cuda.get_device_name(arguments.device) if on_gpu else arguments.device,
        "dtype": arguments.dtype,
        "tolerance": f"{opdb.TOLERANCE[_DTYPES[arguments.dtype].to_real()]:.0e} relative",
    }
    if arguments.limit is not None:
        facts["samples of each entry"] = f"at most {arguments.limit}"
    if arguments.only:
        facts["only"] = " ".join(arguments.only)
    return facts


def _summary(outcomes: Sequence[opdb.Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in _MEANING)


def _plain(note: str) -> str:
    """A note in one line, without the place in the source, which is another on every machine."""
    return re.sub(r" at /\S*", "", " ".join(note.split()))


def _cell(note: str) -> str:
    return _plain(note)[:160].replace("|", "\\|").replace("<", "&lt;")


# -- arguments ----------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)


def _device(text: str) -> str:
    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"is {text!r}, but torch sees no CUDA device here")
    return text
