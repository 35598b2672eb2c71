"""Steps of parameters that processes share out: those of the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sharded_jobs import SEARCHES

Results = list[dict[str, Any]]


def compare(found: Results, name: str, kind: str) -> None:
    for process in found:
        one = process[name]
        assert torch.equal(one[kind], found[0][name][kind])  # bit by bit among each other
        torch.testing.assert_close(one[kind], one["whole"], rtol=0, atol=1e-12)
        torch.testing.assert_close(one[f"{kind}, losses"], one["whole, losses"], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FoMoHKD, fsdp", "fsdp"),
        ("FoMoHKD, tensor parallel", "tensor parallel"),
        ("clipped", "fsdp"),
    ],
)
def test_steps_are_those_of_whole_parameters(pair: Results, name: str, kind: str) -> None:
    compare(pair, name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
@pytest.mark.parametrize("name", SEARCHES)
def test_more_steps_are_those_of_whole_parameters(pair_steps: Results, name: str, kind: str) -> None:
    compare(pair_steps, f"{name}, {kind}", kind)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("alone", "there is no process_group: each process would move its part by coefficients of its own"),
        ("mesh", "process_group is a DeviceMesh whose processes share the directions: they would not run the same"),
        ("gradient", "Gradient needs a backward pass through it; expected directions that are drawn, as Gaussian(k)."),
        ("memory", "directions that remember have no memory of parts yet; expected ones that are drawn, as Gaussian"),
    ],
)
def test_what_a_search_refuses(pair: Results, case: str, message: str) -> None:
    for process in pair:
        said = process["refusals"][case]
        assert message in said and "is a sharded parameter, as FSDP's fully_shard and tensor parallelism make" in said
