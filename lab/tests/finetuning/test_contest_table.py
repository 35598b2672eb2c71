"""The table has a row for each method, with what its rate cost, and is the same as text, Markdown and in the figure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import tiny_texts
from jetplane_lab.finetuning.contest_table import as_markdown, as_text, chosen_by, figure, grouped, records_of, table
from jetplane_lab.finetuning.contestants import CONTESTANTS
from jetplane_lab.finetuning.entry import Entry


def record(method: str, kind: str = "all", seed: int = 0, tested: bool = True, rate: float = 1.0) -> dict[str, Any]:
    """A made-up one."""
    made: dict[str, Any] = {
        "entry": dataclasses.asdict(Entry(method, kind, rate, seed, tested, tiny_texts.SETTINGS)),
        "label": CONTESTANTS[method].label,
        "steps": 1200,
        "passes_per_step": 2.5,
        "passes": 3000.0,
        "curve": [{"step": step, "validation": 0.5 + step / 4000, "loss": None} for step in (600, 1200)],
        "validation": 0.8,
        "held": 3 << 20,
        "environment": {"device": "a device", "torch": "2.13"},
    }
    if tested:
        made |= {"test": 0.7 + seed / 50, "step_ms": 1.25, "peak": 5 << 20, "peak_kind": "live tensors"}
    return made


RECORDS = [
    *(record("mezo", "lora", seed) for seed in (0, 1)),
    *(record("mezo", "lora", tested=False, rate=rate) for rate in (1e-3, 1e-4)),
    record("adamw"),
    record("adamw", tested=False),
    record("adamw-checkpointed"),
    record("horizon"),
]


def test_rows_are_in_the_order_of_the_contestants() -> None:
    keys = [("all", "horizon"), ("all", "adamw"), ("all", "adamw-checkpointed"), ("lora", "mezo")]
    assert list(grouped(RECORDS)) == keys
    assert len(grouped(RECORDS)["lora", "mezo"]) == 2


def test_what_a_rate_cost_is_of_all_that_were_tried() -> None:
    assert chosen_by(RECORDS, "lora", "mezo") == 6000
    assert chosen_by(RECORDS, "all", "adamw") == chosen_by(RECORDS, "all", "adamw-checkpointed") == 3000
    assert chosen_by(RECORDS, "all", "horizon") == chosen_by(RECORDS, "all", "mezo") == 0


def test_the_cells() -> None:
    found = table(RECORDS)
    assert [cell.text for cell in found.rows[-1]] == [
        *("LoRA", "MeZO", "1", "2", "71.0 ± 1.4%", "80.0 ± 0.0%", "1,200", "2.5", "3,000", "6,000"),
        *("1.2 ms", "5 MiB", "3 MiB"),
    ]
    assert "the peak is of live tensors." in found.note
    assert found.note.endswith("Measured on: a device, torch 2.13, rotten-tomatoes, batches of 8 x 7.")


def test_as_text_and_markdown() -> None:
    found = table(RECORDS)
    lines = as_text(found).splitlines()
    assert lines[0].split() == ["moves", "method", "rate", "test", "passes", "to", "choose", "a", "step", "peak"]
    assert len(lines) == 5 and all(len(line) <= 100 for line in lines)
    written = as_markdown(found).splitlines()
    assert written[0].count("|") == written[1].count("|") == written[-3].count("|") == 14
    assert written[1].startswith("| --- | --- | ---: |")


def test_records_of_a_folder(tmp_path: Path) -> None:
    for number, one in enumerate(RECORDS):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    (tmp_path / "damaged.json").write_text("{")
    assert records_of(tmp_path) == RECORDS


def test_the_figure_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        figure(RECORDS, tmp_path / "new" / name)
    one, two = ((tmp_path / "new" / name).read_bytes() for name in ("one.svg", "two.svg"))
    assert one == two and one.startswith(b"<?xml")
