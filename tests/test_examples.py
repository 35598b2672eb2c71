"""The examples run, and what they assert holds."""

from __future__ import annotations

import importlib.util
import re
import sys
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


def main_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """The main function of an example; nothing runs when it is imported. The compiler looks its module up by name."""
    name = f"example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], None] = module.main
    return main


def params() -> list[object]:
    paths = sorted(EXAMPLES.glob("*.py"))
    marks = {path.stem: [pytest.mark.slow] if path.stem in SLOW else [] for path in paths}
    return [pytest.param(path, id=path.stem, marks=marks[path.stem]) for path in paths]


@pytest.mark.parametrize("path", params())
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng(devices=[]):
        main_of(path, monkeypatch)(SMALLER.get(path.stem, []))
    assert len(capsys.readouterr().out.splitlines()) >= 2  # a newcomer sees something


def test_the_plane_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    main_of(EXAMPLES / "fomoh_kd_plane.py", monkeypatch)(["--steps", "30", "--out", str(tmp_path / "plane.svg")])
    drawn = (tmp_path / "plane.svg").read_text()
    assert "<svg" in drawn and drawn.count("<path") > 10


def test_every_example_is_listed_and_uses_public_names() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")} and len(listed) >= 8
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"jetplane\.(ad|gradients|compiler|cli)\b|jp\._|import _", text), path.name
        assert "assert" in text and '"""' in text
