"""``jetplane reproduce minilm``: a pretrained transformer, fine-tuned with forward passes and without."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from jetplane_lab.data import files
from jetplane_lab.finetuning import contest, contest_table
from jetplane_lab.finetuning.contest_run import Settings
from jetplane_lab.finetuning.contestants import CONTESTANTS, MOVING
from jetplane_lab.finetuning.reviews import SOURCES
from jetplane_lab.finetuning.turns_on_device import Turns

__all__ = ["add_options", "run"]

_DEFAULTS = ("rows", "together", "methods", "moving", "texts")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that only this study has."""
    add = parser.add_argument_group("of minilm").add_argument
    add("--methods", nargs="+", metavar="NAME", help=f"some of {' '.join(CONTESTANTS)} (default: all)")
    add("--moving", nargs="+", choices=MOVING, help="all weights, or LoRA adapters (default: both)")
    add(
        "--turns",
        type=Path,
        metavar="DIR",
        help="processes that name it let one of them alone to take times (OUT/minilm)",
    )
    add("--texts", choices=tuple(SOURCES), help="(default: rotten-tomatoes)")


def run(arguments: argparse.Namespace, out: Path) -> int:
    """Fine-tune what is not there yet; then the table and the figure of all that is."""
    settings = Settings(
        source=arguments.texts or "rotten-tomatoes",
        device=arguments.device,
        compile=arguments.compile,
        tf32=arguments.tf32,
    )
    changes: dict[str, Any] = {} if arguments.epochs is None else {"epochs": arguments.epochs}
    settings = contest.quick(settings) if arguments.quick else settings
    settings = Settings(**{**vars(settings), **changes})
    folder = out / "minilm"
    seeds = tuple(dict.fromkeys(arguments.seeds or ((0,) if arguments.quick else contest.SEEDS)))
    turns = Turns(arguments.turns or folder)
    methods, kinds = arguments.methods or list(CONTESTANTS), arguments.moving or list(MOVING)
    contest.hold(methods, kinds, seeds, settings, contest.load(settings, arguments.data_dir), folder, _say, turns)
    write(folder, out)
    return 0


def write(folder: Path, out: Path) -> None:
    """The table and, where matplotlib is installed, the figure of all runs of a folder."""
    records = contest_table.records_of(folder)
    table = contest_table.markdown(records)
    files.write(out / "minilm.md", table.encode())
    print(table)
    try:
        contest_table.figures(records, out / "minilm.svg")
    except ImportError as error:
        logging.getLogger(__name__).warning("there is no figure: %s; expected the extra 'plots'", error)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
