"""HorizonAdam on parameters that FSDP shares out: the steps are those of whole ones, and what it keeps is in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Results = list[dict[str, Any]]


def compare(found: Results, name: str, kind: str) -> None:
    for process in found:
        one = process[name]
        assert torch.equal(one[kind], found[0][name][kind])  # bit by bit among each other
        for what in ("", ", losses", ", averaged"):
            torch.testing.assert_close(one[f"{kind}{what}"], one[f"whole{what}"], rtol=0, atol=1e-12)


def test_steps_are_those_of_whole_parameters(pair: Results) -> None:
    """Of a small Llama, with uneven shards of the batch, clipped, with a decay, and gone on with from a state."""
    compare(pair, "held, fsdp", "fsdp")
    kept, whole = (sum(one["held, fsdp"][f"{kind}, numbers"] for one in pair) for kind in ("fsdp", "whole"))
    axes = kept - whole / 2  # are everywhere, all else is in parts
    assert 0 < axes < whole / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "hybrid"])
def test_steps_of_four_processes_and_of_copies_that_are_shared_out(quartet: Results, kind: str) -> None:
    compare(quartet, f"held, {kind}", kind)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("HorizonAdam alone", "HorizonAdam has no process_group: each process would have a gradient of its own"),
        ("not managed", "parameter 0 is a DTensor that FSDP's fully_shard does not manage, as tensor parallelism"),
        ("inputs cut", "which cut the inputs that HorizonAdam has axes of; expected Shard(0), as fully_shard makes"),
        ("inputs cut, own axes", "nothing was raised"),
    ],
)
def test_what_is_refused(pair: Results, case: str, message: str) -> None:
    for process in pair:
        assert message in process["refusals"][case]
