"""The examples run, and what they assert holds."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SLOW = {"compiled_step": "compiles"}
SMALLER = {
    "any_optimizer": ["--steps", "60"],
    "forward_only_cnn": ["--steps", "70"],
    "poisson_pinn": ["--steps", "100"],
    "resnet_spectrum": ["--steps", "12"],
    "training_loop": ["--steps", "60"],
}


def main_of(path: Path) -> Callable[[list[str]], None]:
    """The main function of an example; nothing runs when it is imported."""
    main: Callable[[list[str]], None] = runpy.run_path(str(path))["main"]
    return main


def params() -> list[object]:
    paths = sorted(EXAMPLES.glob("*.py"))
    marks = {path.stem: [pytest.mark.slow] if path.stem in SLOW else [] for path in paths}
    return [pytest.param(path, id=path.stem, marks=marks[path.stem]) for path in paths]


@pytest.mark.parametrize("path", params())
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng(devices=[]):
        main_of(path)(SMALLER.get(path.stem, []))
    assert len(capsys.readouterr().out.splitlines()) >= 2  # a newcomer sees something


def test_the_plane_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    main_of(EXAMPLES / "fomoh_kd_plane.py")(["--steps", "30", "--out", str(tmp_path / "plane.svg")])
    drawn = (tmp_path / "plane.svg").read_text()
    assert "<svg" in drawn and drawn.count("<path") > 10


def test_every_example_is_listed_and_uses_public_names() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")} and len(listed) >= 8
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"jetplane\.(ad|gradients|compiler|cli)\b|jp\._|import _", text), path.name
        assert "assert" in text and '"""' in text
