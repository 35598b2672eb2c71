"""Passes over parameters of which each process has a part: the numbers are those of the whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sharded_jobs import expected

Results = list[dict[str, Any]]


def compare(found: Results, kind: str) -> None:
    for curvature in ("exact", "ggn"):
        wanted = expected(curvature)
        for process in found:
            for name, value in wanted.items():
                part = process[f"plane, {kind}"][curvature][name]
                torch.testing.assert_close(part, value, rtol=0, atol=1e-10 * float(value.abs().max()))


@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel"])
def test_slopes_and_curvatures_of_a_small_llama_are_those_of_the_whole_one(pair: Results, kind: str) -> None:
    compare(pair, kind)
    assert all(process[f"plane, {kind}"]["sharded"] for process in pair)  # also behind the pass


@pytest.mark.slow
def test_fsdp_around_tensor_parallelism(quartet: Results) -> None:
    compare(quartet, "both")


def test_closures_read_the_sharded_parameters_themselves_and_directions_are_given(pair: Results) -> None:
    """Of the last weight, which has one row, the second process has nothing."""
    for process in pair:
        whole, sharded = (process["penalised"][kind] for kind in ("whole", "fsdp"))
        for name, value in whole.items():
            torch.testing.assert_close(sharded[name], value, rtol=0, atol=1e-12 * float(value.abs().max()))


@pytest.mark.parametrize("kind", ["fsdp", "replicate"])
def test_a_derivative_along_inputs_and_a_backward_pass_behind_it(pair: Results, kind: str) -> None:
    """The step of MeanFlow: values and derivatives are each process's own, gradients the mean of them."""
    for process in pair:
        for name, value in process["flowing, whole"].items():
            torch.testing.assert_close(process[f"flowing, {kind}"][name], value, rtol=0, atol=1e-14)


def test_parameters_gathered_in_a_short_dtype(pair: Results) -> None:
    for process in pair:
        for name in ("u", "along"):
            found, value = process["flowing, short"][name], process["flowing, whole"][name]
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), value, rtol=0.02, atol=0.02)


SHARDED = "is a sharded parameter (DTensor), as FSDP's fully_shard and tensor parallelism make them of DTensor; "


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("quadratic", SHARDED),
        ("partial", "is a DTensor with the placements (Partial(sum),) on DeviceMesh("),
        (
            "uneven",
            "is a DTensor (4, 2) whose part is (1, 2) here, where its placements say (2, 2); "
            "expected parts as torch.chunk makes them.",
        ),
        ("result", "the program returned a DTensor with the placements (Shard(dim=0),), of which this process has a"),
        ("closure", "the program returned a DTensor with the placements (Partial(sum),), of which this process has a"),
    ],
)
def test_what_cannot_be_done_with_parts_is_refused(pair: Results, case: str, message: str) -> None:
    assert message in pair[0]["refusals"][case]
