"""``jetplane journal show``: what stands in the journal of a run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetplane.journal import JournalRun, StepRecord, opened

_HEADER = ("jetplane", "torch", "update", "optimizer", "seed", "K", "samples", "curvature", "solver")
_WIDTH = 60  # of the coefficients in the table


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "journal", help="print what stands in the journal of a run", description="Look into the journal of a run."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print header and records", description="Print header and records.")
    show.add_argument("folder", type=Path, metavar="FOLDER", help="of the journal")
    show.add_argument("--last", type=_whole, metavar="N", help="the last N records only")
    show.add_argument("--json", action="store_true", help="as JSON; numbers that are not finite are null")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print."""
    journal = opened(arguments.folder)
    start = journal.first if arguments.last is None else max(journal.first, journal.last - arguments.last)
    records = journal.records(start, journal.last)
    print(as_json(journal, records) if arguments.json else "\n".join(as_text(journal, records)))
    return 0


def as_json(journal: JournalRun, records: Iterator[StepRecord]) -> str:
    """Header and records for programs."""
    found = {"header": journal.header, "torn": journal.frames.torn, "records": [_plain(one) for one in records]}
    return json.dumps(found, indent=1, allow_nan=False)


def as_text(journal: JournalRun, records: Iterator[StepRecord]) -> Iterator[str]:
    """Header and records for people."""
    header = journal.header
    entries = sum(math.prod(shape) for _, shape, *_ in header["parameters"])
    yield from (f"{name:<12}{header[name]}" for name in _HEADER)
    yield f"{'directions':<12}{json.dumps(header['directions'])}"
    yield f"{'parameters':<12}{len(header['parameters'])}, {entries} entries"
    yield f"{'records':<12}{journal.last - journal.first}, after step {journal.first}"
    if journal.frames.torn:
        yield f"{'torn':<12}{journal.frames.torn} bytes at the end, which a crash has left"
    yield ""
    yield f"{'step':>8}  {'status':<9}  {'loss':>11}  {'lr':>9}  coefficients"
    for record in records:
        rates = " ".join(f"{lr:.3g}" for lr in record.lrs)
        line = f"{record.step:>8}  {record.status.name:<9}  {record.loss:>11.5g}  {rates:>9}  {_numbers(record)}"
        yield "  ".join([line, *_notes(record)])


def _notes(record: StepRecord) -> Iterator[str]:
    if record.place is not None:
        yield f"place {json.dumps(record.place)}"
    if record.absent:
        yield f"without {', '.join(map(str, record.absent))}"
    if record.buffers:
        yield f"{len(record.buffers)} buffers"
    if record.digest is not None:
        yield "checksum"


def _numbers(record: StepRecord) -> str:
    text = " ".join(f"{number:.4g}" for number in record.coefficients.flatten().tolist())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 4].rpartition(" ")[0] + " ..."


def _plain(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "status": record.status.name,
        "loss": _finite(record.loss),
        "lrs": list(record.lrs),
        "weight_decays": list(record.decays),
        "coefficients": [[_finite(number) for number in plane] for plane in record.coefficients.tolist()],
        "factor": record.factor,
        "solver_state": None if record.solver_state is None else _finite(record.solver_state),
        "size": record.size,
        "place": record.place,
        "buffers": {str(number): data.hex() for number, data in record.buffers.items()},
        "checksum": None if record.digest is None else record.digest.hex(),
        "absent": list(record.absent),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)
