"""Processes that share a journal begin where it ends, whatever they held."""

from __future__ import annotations

from typing import Any

import torch

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
