"""The model of a step of many workers: what was measured, and what must hold of any such model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jetplane_lab.bench import scaling

WIRE = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "wire_cpu.json").read_text())["results"]
PLANES = {"FGD": (1, False), "FoMoH": (1, True), "FoMoH-2D": (2, True), "FoMoH-10D": (10, True)}


def cases() -> list[tuple[int, int, float]]:
    found = []
    for row in WIRE:
        if row["method"] in PLANES:
            k, curved = PLANES[row["method"]]
            known = scaling.plane_bytes(row["processes"], *scaling.numbers_of(k, curved=curved))
            found.append((row["processes"], known, row["bytes_per_step"]))
    return found


def test_two_constants_give_all_measured_bytes_of_planes() -> None:
    message, visit = scaling.fitted_bytes(cases())
    assert len(cases()) == 27 and 500 < message < 1000 and 200 < visit < 600
    for processes, known, seen in cases():
        assert known + processes * (processes - 1) * message + processes * visit == pytest.approx(seen, rel=0.07)


def test_constants_of_two_processes_give_the_bytes_of_four() -> None:
    """But for the share of the store, which two processes alone do not tell from the messages."""
    message, visit = scaling.fitted_bytes(cases())
    for processes, known, seen in cases():
        if processes == 4:
            assert known + 12 * message + 4 * visit == pytest.approx(seen, rel=0.04)


def test_an_all_reduce_has_the_measured_bytes_of_a_gradient() -> None:
    """2 (N - 1) / N of the gradient to and from each of N processes."""
    for row in WIRE:
        if row["method"].startswith("Distributed") and row["parameters"] > 10**6:
            link = scaling.Link(0.0, 1.0)
            each = scaling.all_reduce_seconds(row["processes"], 4 * row["parameters"], link)
            assert each * row["processes"] == pytest.approx(row["bytes_per_step"], rel=0.01)


def test_a_quorum_waits_no_longer_than_it_has_to() -> None:
    times = scaling.computes(50, 1.0, scaling.Straggling(share=0.05), 400, torch.Generator().manual_seed(0))
    (everybody, all_of_them), (most, some) = (
        scaling.step(times, 0.1, **given) for given in ({}, {"least": 40, "wait": 0.2})
    )
    assert all_of_them == 1.0 and 0.9 < some < 1.0
    assert 1.1 < most < 2.2 < everybody < 12  # the first process is slow in a twentieth of all steps
    assert scaling.step(times, 0.1, least=50, wait=0.2)[0] == pytest.approx(everybody)


def test_jitter_has_the_mean_that_was_asked_for() -> None:
    times = scaling.computes(1000, 2.0, scaling.Straggling(jitter=0.3), 200, torch.Generator().manual_seed(0))
    assert float(times.mean()) == pytest.approx(2.0, rel=0.01)


def test_planes_pay_the_more_the_larger_the_model_and_the_slower_the_link() -> None:
    def ratio(parameters: float, bandwidth: float) -> float:
        link = scaling.Link(1e-5, bandwidth)
        return scaling.ratio(parameters, 100, link, flops=4e14, tokens=4096)

    assert ratio(1e9, 1e8) > ratio(1e9, 1e10) >= 1.0
    one, hundred = (scaling.ratio(p, 100, scaling.Link(0.0, 1e8), flops=p, tokens=1.0) for p in (1e9, 1e11))
    assert hundred > 10 * one > 10.0
