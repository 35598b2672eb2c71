"""``jetplane replay``: any step's parameters from the journal of a run, bit by bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jetplane import journal

_ALONE = "there is no checksum and no later snapshot to compare them with"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="rebuild the parameters of any step of a run from its journal",
        description="Take the steps of a journal once more, from the newest snapshot before the one that is wanted: "
        "without data, model or passes, and bit by bit. The exit status is 1 where the journal is damaged, or the "
        "replay differs from what was written while training.",
        epilog="example: jetplane replay runs/one/journal --step 1200 --out step-1200.safetensors",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of the journal")
    parser.add_argument("--step", type=int, metavar="N", help="how many steps are taken (default: all there are)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.safetensors", help="write parameters and buffers here, under their names"
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="FILE.safetensors",
        help="what the run began with, in place of a snapshot: --step 0 --out writes it",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="replay the whole run from its first snapshot, and compare it with all checksums and later snapshots",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Verify, rebuild and export."""
    if arguments.out is None and not arguments.verify:
        raise ValueError("nothing to do; expected --out FILE.safetensors, --verify, or both")
    if arguments.out is not None and arguments.out.is_dir():
        raise ValueError(f"--out is {arguments.out}, which is a folder; expected a file to write")
    if arguments.verify:
        steps, digests, snapshots = journal.verify(arguments.folder, arguments.start)
        agreed = f"{digests} checksums and {snapshots} later snapshots agree"
        print(f"{arguments.folder}: {steps} steps replayed; {agreed if digests or snapshots else _ALONE}.")
    if arguments.out is not None:
        step = journal.export(arguments.folder, arguments.out, arguments.step, arguments.start)
        print(f"wrote {arguments.out}: parameters and buffers after {step} steps")
    return 0
