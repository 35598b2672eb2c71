"""Processes that share a journal begin where it ends, whatever they held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"
Results = list[dict[str, Any]]


def test_all_processes_go_on_where_the_journal_ends(two: Results) -> None:
    (one, refused, end), (other, told, other_end) = (found["shared_journal"] for found in two)
    parameters = 4 * 5 + 4 + 2 * 4 + 3 * 4 + 3
    assert torch.equal(one[0][:parameters], other[0][:parameters])  # batch norm's statistics are each process's own
    assert one[1:] == other[1:] == ({"step": 2}, 3)
    weights = torch.cat([tensor.flatten() for tensor in end[:2]])
    assert torch.equal(one[0][:24], weights) and all(map(torch.equal, end, other_end))
    assert refused.startswith("JournalRefused: the journal FOLDER/journal/steps.journal is that of another run: ")
    assert told == "LostProcess: process 0 raised an error at the beginning of the journal"


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
def test_parameters_that_are_shared_out_have_one_journal(pair: Results, kind: str) -> None:
    """It is that of the whole model, which goes on with it."""
    for process in pair:
        found = process[f"journal, {kind}"]
        assert [found[f"{until}, from"] for until in (3, 5, 6)] == [0, 3, 5]
        for until in (3, 5, 6):
            assert torch.equal(found[f"{until}, model"], found[f"{until}, replay"])
            assert torch.equal(found[f"{until}, model"], pair[0][f"journal, {kind}"][f"{until}, model"])
        assert found["checked"] == [6, 6, 2] and found["own"] and found["own, steps"] == 3
    assert not torch.equal(found["3, model"], found["5, model"])


@pytest.mark.slow
def test_fifty_kills_of_workers_that_are_started_again(tmp_path: Path) -> None:
    """By the agent of torchrun; parameters, records and snapshots are those of runs that nobody disturbed."""
    options = ["--kills", "50", "--launcher", "forked", "--processes", "2", "--steps", "100", "--longest", "2"]
    done = subprocess.run(
        [sys.executable, KILLS, *options, "--out", tmp_path / "kills.json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "kills.json").read_text())
    assert found["kills"] == 50 and all(run["steps"] == 100 for run in found["runs"])
