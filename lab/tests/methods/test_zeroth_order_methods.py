"""MeZO and FZOO in the training loop: passes are counted, runs are resumed, the command takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from jetplane.cli import main
from jetplane.optim import FZOO, MeZO
from jetplane_lab import methods, models
from jetplane_lab.config import Config
from jetplane_lab.report.groups import method_label, slug
from jetplane_lab.training import Trainer

OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "mezo": ({"k": 2, "lr": 1e-2}, 4.0),
    "fzoo": ({"k": 5, "eps": 1e-4, "weight_decay": 0.1}, 6.0),
}


@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_counts_its_passes_and_is_resumed_bit_by_bit(method: str, tmp_path: Path) -> None:
    options, passes = OPTIONS[method]
    whole = tiny.trainer(method=method, **options)
    assert whole.fit().forward_equivalents_per_step == passes
    part = tiny.trainer(tmp_path, method=method, **options)
    tiny.advance(part, 2)
    rest = tiny.trainer(tmp_path, method=method, **options)
    assert rest.epoch == 2
    rest.fit()
    tiny.assert_same(whole, rest)
    assert rest.history[-1].not_taken == {} and rest.history[-1].slope is not None


def test_what_a_config_makes() -> None:
    parameters = list(models.build("logistic-regression", 0).parameters())
    mezo, fzoo = (methods.make(Config(method=name, weight_decay=0.1), parameters) for name in ("mezo", "fzoo"))
    assert isinstance(mezo, MeZO) and isinstance(fzoo, FZOO)
    assert (mezo.directions.count([]), fzoo.directions.count([]), mezo.eps) == (1, 8, 1e-3)
    assert [one.param_groups[0]["weight_decay"] for one in (mezo, fzoo)] == [0.1, 0.1]
    assert [method_label(Config(method=name)) for name in ("mezo", "fzoo")] == ["MeZO", "FZOO (K = 8)"]
    assert slug(Config(method="mezo")) == "cnn-mezo-mnist"
    with pytest.raises(ValueError, match=r"^compile is True, but method mezo takes none; "):
        Config(method="mezo", compile=True)


def test_a_step_needs_the_memory_of_a_forward_pass() -> None:
    demands = [Trainer(tiny.config(method=name, k=k), tiny.dataset()).demand for name, k in (("mezo", 1), ("fgd", 1))]
    assert demands[0].step(1) < demands[1].step(1)
    assert demands[0].step(1) == demands[0].step(8)


def test_the_command_takes_them(tmp_path: Path) -> None:
    options = ["--dataset", "digits", "--hold-out", "5500", "--epochs", "1", "--device", "cpu", "--batch-size", "250"]
    for method in OPTIONS:
        folder = tmp_path / method
        command = ["train", "--method", method, "--model", "logistic-regression", *options, "--out", str(folder)]
        assert main([*command, "--quiet"]) == 0 and (folder / "summary.json").exists()
