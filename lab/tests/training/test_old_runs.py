"""Run folders that version 0.1.0 wrote go on as they would have there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from jetplane_lab.training import Trainer

OLD = Path(__file__).parents[1] / "data" / "v0.1.0"  # each left after two epochs of four
RUNS: dict[str, dict[str, Any]] = {"fomoh-kd": {}, "gauss-newton": {"lr": 1.0}}


@pytest.mark.parametrize("method", RUNS)
def test_a_run_of_version_0_1_0_goes_on(method: str, tmp_path: Path) -> None:
    """ends/ has the parameters with which version 0.1.0 came to the end: equal but for how a processor rounds."""
    folder = shutil.copytree(OLD / method, tmp_path / "run")
    said: list[str] = []
    config = tiny.config(method=method, **RUNS[method])
    run = Trainer(config, tiny.dataset(), folder, checkpoint_seconds=0.0, warn=said.append)
    begun = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    list(run.epochs())
    assert all("was begun with" in sentence for sentence in said), said  # another commit, which is true
    assert len(run.history) == config.epochs
    for name, expected in load_file(OLD / "ends" / f"{method}.safetensors").items():
        torch.testing.assert_close(run.model.state_dict()[name], expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(begun[name], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("method", RUNS)
def test_it_is_the_run_from_the_start(method: str, tmp_path: Path) -> None:
    folder = shutil.copytree(OLD / method, tmp_path / "run")
    run = Trainer(tiny.config(method=method, **RUNS[method]), tiny.dataset(), folder, checkpoint_seconds=0.0)
    list(run.epochs())
    whole = tiny.trainer(method=method, **RUNS[method])
    list(whole.epochs())
    assert [one.epoch for one in run.history] == [one.epoch for one in whole.history]
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
