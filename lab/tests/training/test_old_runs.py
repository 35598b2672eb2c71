"""Run folders that version 0.1.0 wrote go on as they would have there."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiny
from jetplane_lab.training import Trainer

OLD = Path(__file__).parents[1] / "data" / "v0.1.0"  # each left after two epochs of four
CLOSE = 1e-6  # of parameters that move by 1e-2: what rounding does on another processor
# SHA-256 of the parameters' bytes after version 0.1.0 went on to the end: torch 2.13, CPU, one thread
ENDS = {
    "fomoh-kd": ({}, "54d1f7d241499cbaa3625ad5a615e8e9c3a2d96f8e0c755b7d6356b96e8b6c0c"),
    "gauss-newton": ({"lr": 1.0}, "3707fb7de5ba9e75066c6753977da6303ebad0a3a55683e737d49c7b69f4d3cf"),
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The bits were those of one thread: sums over several are taken in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ENDS)
def test_a_run_of_version_0_1_0_goes_on(method: str, tmp_path: Path) -> None:
    changes, expected = ENDS[method]
    whole = tiny.trainer(method=method, **changes)
    list(whole.epochs())
    folder = shutil.copytree(OLD / method, tmp_path / "run")
    said: list[str] = []
    config = tiny.config(method=method, **changes)
    run = Trainer(config, tiny.dataset(), folder, checkpoint_seconds=0.0, warn=said.append)
    list(run.epochs())
    assert all("was begun with" in sentence for sentence in said), said  # another commit, which is true
    for ours, theirs in zip(run.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)
    # a processor that rounds as the one that wrote the file comes to the same end by itself
    if _hashed(whole) == expected:
        tiny.assert_same(run, whole)
        assert _hashed(run) == expected


def _hashed(run: Trainer) -> str:
    made = hashlib.sha256()
    for tensor in run.model.state_dict().values():
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ENDS)
def test_without_what_was_saved_it_ends_elsewhere(method: str) -> None:
    """The tolerance tells a run that went on from one that began anew."""
    ends = []
    for epochs in (2, 4):
        run = tiny.trainer(method=method, **ENDS[method][0])
        tiny.advance(run, epochs)
        ends.append(run.model.state_dict()["linear.weight"])
    assert float((ends[0] - ends[1]).abs().max()) > 1000 * CLOSE
