"""The examples run, and what they assert holds."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SLOW = {
    "compiled_step": "compiles",
    "export_step": "starts a process",
    **dict.fromkeys(["many_processes", "meanflow_fsdp"], "starts processes"),
    **dict.fromkeys(["accelerate_loop", "finetune_transformer", "hf_trainer", "lightning_module"], "imports a trainer"),
}
NEEDS = {
    "accelerate_loop": ["accelerate"],
    "finetune_transformer": ["transformers"],
    "hf_trainer": ["transformers", "accelerate"],
    "lightning_module": ["lightning"],
}
SMALLER = {
    "any_optimizer": ["--steps", "60"],
    "forward_only_cnn": ["--steps", "70"],
    "meanflow_fsdp": ["--steps", "20"],
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
    for package in NEEDS.get(path.stem, []):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        if path.stem in NEEDS:
            warnings.simplefilter("ignore")  # what the packages say about one another
        main_of(path, monkeypatch)(SMALLER.get(path.stem, []))
    if path.stem not in ("many_processes", "meanflow_fsdp"):  # whose processes write by themselves
        assert len(capsys.readouterr().out.splitlines()) >= 2  # a newcomer sees something


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fomoh_kd_plane", ["--steps", "30"]),
        pytest.param("forward_only_cnn", SMALLER["forward_only_cnn"], marks=pytest.mark.slow),
        pytest.param("network_laplacian", [], marks=pytest.mark.slow),
        pytest.param("poisson_pinn", SMALLER["poisson_pinn"], marks=pytest.mark.slow),
        pytest.param("resnet_spectrum", SMALLER["resnet_spectrum"], marks=pytest.mark.slow),
    ],
)
def test_pictures_are_drawn(name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    main_of(EXAMPLES / f"{name}.py", monkeypatch)([*options, "--out", str(tmp_path / "drawn.svg")])
    drawn = (tmp_path / "drawn.svg").read_text()
    assert "<svg" in drawn and drawn.count("<path") > 10


def test_every_example_is_listed_and_uses_public_names() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")} and len(listed) >= 12
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"jetplane\.(ad|gradients|compiler|cli)\b|jp\._|import _", text), path.name
        assert "assert" in text and '"""' in text
