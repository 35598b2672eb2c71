"""Forward gradients of parameters that FSDP shares out: those of whole ones, each process's part in its ``.grad``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Results = list[dict[str, Any]]


@pytest.mark.parametrize("name", ["estimated, fsdp", "estimated, weights"])
def test_gradients_are_those_of_whole_parameters(pair: Results, name: str) -> None:
    for process in pair:
        one = process[name]
        for what in ("", ", losses"):
            torch.testing.assert_close(one[f"fsdp{what}"], one[f"whole{what}"], rtol=0, atol=1e-12)
        assert float(one["fsdp"].norm()) > 0.1


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("ForwardGradient alone", "ForwardGradient has no process_group: each process would have a gradient of its"),
        ("shared tangents", "process_group is a DeviceMesh whose processes share tangents; expected a ProcessGroup."),
        ("some processes", "and process_group has ["),
        ("its part", "reads this process's part of parameter 0, a sharded parameter; expected one that reads it"),
    ],
)
def test_what_is_refused(pair: Results, case: str, message: str) -> None:
    for process in pair:
        assert message in process["refusals"][case]
