"""``jetplane reproduce minilm``: a pretrained transformer, fine-tuned with forward passes and without."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from jetplane_lab import report
from jetplane_lab.data import files
from jetplane_lab.finetuning import contest, contest_table
from jetplane_lab.finetuning.contestants import CONTESTANTS, MOVING
from jetplane_lab.finetuning.entry import Settings
from jetplane_lab.finetuning.reviews import SOURCES
from jetplane_lab.finetuning.turns_on_device import Turns

__all__ = ["OPTIONS", "add_options", "run"]

OPTIONS = ("methods", "moving", "texts", "length", "batch", "layers")  # that only this study has


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that only this study has."""
    add = parser.add_argument_group("of minilm").add_argument
    add("--methods", nargs="+", metavar="NAME", help=f"some of {' '.join(CONTESTANTS)} (default: all)")
    add("--moving", nargs="+", choices=MOVING, help="all weights, or LoRA adapters (default: both)")
    add("--texts", choices=tuple(SOURCES), help="(default: rotten-tomatoes)")
    add("--length", type=int, metavar="N", help="word pieces of a text (default: 64)")
    add("--batch", type=int, metavar="N", help="texts of a batch (default: 32)")
    add("--layers", type=int, metavar="N", help="of the encoder, the first ones (default: all 6)")


def run(arguments: argparse.Namespace, out: Path) -> int:
    """Fine-tune what is not there yet; then the table and the figure of all that is."""
    settings = Settings(
        source=arguments.texts or "rotten-tomatoes",
        device=arguments.device,
        compile=arguments.compile,
        tf32=arguments.tf32,
    )
    settings = contest.quick(settings) if arguments.quick else settings
    given = {name: getattr(arguments, name) for name in ("epochs", "length", "batch", "layers")}
    settings = dataclasses.replace(settings, **{name: value for name, value in given.items() if value is not None})
    folder = out / "minilm"
    seeds = tuple(dict.fromkeys(arguments.seeds or ((0,) if arguments.quick else contest.SEEDS)))
    methods, kinds = arguments.methods or list(CONTESTANTS), arguments.moving or list(MOVING)
    turns = Turns(arguments.turns or folder)
    data = contest.load(settings, arguments.data_dir)
    held = contest.Contest(settings, data, folder, _say, turns, arguments.debug)
    try:
        held.hold(methods, kinds, seeds)
    except KeyboardInterrupt:
        _say("jetplane reproduce: minilm was stopped; the same command goes on from here.")
        raise
    write(folder, out)
    return int(bool(held.failures))


def write(folder: Path, out: Path) -> None:
    """All runs of a folder as one file; the table, as text, Markdown and on a page, and the figure of them."""
    records = contest_table.records_of(folder)
    if not contest_table.grouped(records):
        return
    files.write(out / "minilm.json", (json.dumps(records, allow_nan=False, indent=1) + "\n").encode())
    table = contest_table.table(records)
    files.write(out / "minilm.md", contest_table.as_markdown(table).encode())
    page = report.page([], title=table.title, after=[report.Chapter("All runs", "", [], [table])])
    files.write(out / "minilm.html", page.encode())
    print(f"{contest_table.as_text(table)}\n\ntable: {out / 'minilm.md'} and {out / 'minilm.html'}")
    contest_table.figure(records, out / "minilm.svg")
    print(f"figure: {out / 'minilm.svg'}\nall runs: {out / 'minilm.json'}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
