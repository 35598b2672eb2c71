"""A batch norm over all processes is one over the whole batch."""

from __future__ import annotations

from typing import Any

import torch

from collective_jobs import synchronised


def test_steps_are_those_of_one_process_with_the_whole_batch(pair: list[dict[str, Any]]) -> None:
    wanted = synchronised()
    for process in pair:
        for name, value in wanted.items():
            torch.testing.assert_close(process["synchronised"][name], value, rtol=0, atol=1e-12)
