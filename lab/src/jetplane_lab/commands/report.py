"""``jetplane report``: runs as one HTML page, as Markdown, and as thinned JSON."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jetplane_lab import report
from jetplane_lab.data import files
from jetplane_lab.markup import anchor


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="make a page of runs, beside the paper's tables",
        description="Read the runs under RUNS and write one HTML page that needs no other file: the result in a\n"
        "sentence and a figure, curves against steps, passes and seconds, the paper's tables with ours beside\n"
        "theirs, its claims answered, cost against backprop, and what it took to reach given accuracies.\n"
        "Runs that differ in the seed alone are one row.\n"
        "\n"
        "RUNS are run folders, folders that hold some, and JSON files made with --json. What is damaged is\n"
        "named and left out; runs that are going on are shown as such.",
        epilog="examples:\n"
        "  jetplane report runs                                  writes report.html\n"
        "  jetplane report runs/reproduce --out report.html --open\n"
        "  jetplane report runs --json results --markdown docs/results.md",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or what holds them")
    add = parser.add_argument
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help="the page (default: %(default)s)")
    add("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown, too")
    add("--json", type=Path, metavar="DIR", help="write each run to DIR as JSON with a few hundred epochs, too")
    add("--export", type=Path, metavar="DIR", help="write every table as CSV and every figure as SVG, too")
    add("--points", type=_positive, default=300, metavar="N", help="epochs kept by --json (default: %(default)s)")
    add("--open", action="store_true", help="open the page in a browser")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Read, write, and say where."""
    records = report.read(arguments.runs, warn)
    write_page(records, arguments.out)
    if arguments.markdown is not None:
        files.write(arguments.markdown, report.markdown(records).encode())
        print(f"tables: {arguments.markdown}")
    if arguments.export is not None:
        print(f"tables and figures: {len(report.export(records, arguments.export))} files in {arguments.export}")
    if arguments.json is not None:
        names = _names(records)
        for record, name in zip(records, names, strict=True):
            text = json.dumps(report.thin(record, arguments.points), allow_nan=False, separators=(",", ":"))
            files.write(arguments.json / name, (text + "\n").encode())
        print(f"thinned runs: {len(names)} in {arguments.json}")
    if arguments.open:
        webbrowser.open(arguments.out.resolve().as_uri())
    return 0


def write_page(records: Sequence[report.RunRecord], path: Path, after: Sequence[report.Chapter] = ()) -> None:
    """Write the page and say where it is."""
    files.write(path, report.page(records, after=after).encode())
    print(f"report: {path}")


def warn(line: str) -> None:
    """A warning on the standard error."""
    print(f"warning: {line}", file=sys.stderr)


def _names(records: Sequence[report.RunRecord]) -> list[str]:
    """A file name for each record: its row and seed, and the config's hash where two would be the same."""
    slugs = [anchor(report.slug(record.config), "seed", record.config.seed) for record in records]
    hashes = [f"-{record.config.digest()[:8]}" for record in records]
    return [f"{slug}{digest if slugs.count(slug) > 1 else ''}.json" for slug, digest in zip(slugs, hashes, strict=True)]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)
