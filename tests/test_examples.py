"""The examples run, and what they assert holds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from jetplane.testing.oracle import double_backward

EXAMPLES = Path(__file__).parents[1] / "examples"
SLOW = {
    "compiled_step": "compiles",
    "export_step": "starts a process",
    **dict.fromkeys(["federated_clients", "many_processes", "meanflow_fsdp"], "starts processes"),
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
    "federated_clients": ["--steps", "20"],
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


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return sys.modules[main_of(EXAMPLES / f"{name}.py", monkeypatch).__module__]


def params() -> list[object]:
    paths = sorted(EXAMPLES.glob("*.py"))
    marks = {path.stem: [pytest.mark.slow] if path.stem in SLOW else [] for path in paths}
    return [pytest.param(path, id=path.stem, marks=marks[path.stem]) for path in paths]


@pytest.mark.parametrize("path", params())
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDS.get(path.stem, []):
        pytest.importorskip(package, reason=f"{package} is not installed")
    if SLOW.get(path.stem) == "starts processes":  # which import the script by its name
        done = subprocess.run([sys.executable, path, *SMALLER.get(path.stem, [])], capture_output=True, text=True)
        assert done.returncode == 0 and len(done.stdout.splitlines()) >= 2, done.stderr
        return
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        if path.stem in NEEDS:
            warnings.simplefilter("ignore")  # what the packages say about one another
        main_of(path, monkeypatch)(SMALLER.get(path.stem, []))
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


def test_a_client_says_clipped_sums_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """By double backward of each sample, clipped by hand; a sample changes what is said by sqrt(2) at most."""
    example = module_of("federated_clients", monkeypatch)
    with torch.random.fork_rng(devices=[]):
        model = example.network()
    params = list(model.parameters())
    rows = example.directions(params, 3)
    x, y = (part[:4] for part in example.shard(1))
    total = torch.zeros(example.K + example.K * (example.K + 1) // 2, dtype=torch.float64)
    for a, b in zip(x, y, strict=True):
        quadratic = double_backward(lambda a=a, b=b: functional.cross_entropy(model(a), b), params, rows)
        upper = quadratic.curvature[tuple(torch.triu_indices(example.K, example.K))]
        parts = [(quadratic.slope, example.SLOPE), (upper, example.CURVATURE)]
        said = torch.cat([part / max(float(part.norm()), most) for part, most in parts])
        assert said.norm() <= 2**0.5 + 1e-12
        total += said
    slopes, curvatures = (
        example.clipped(part, most).sum(0)
        for part, most in zip(example.sample_parts(model, rows, x, y), (example.SLOPE, example.CURVATURE), strict=True)
    )
    torch.testing.assert_close(torch.cat([slopes, curvatures]), total, rtol=0, atol=1e-12)


def test_noise_is_secret_and_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    example = module_of("federated_clients", monkeypatch)
    with torch.random.fork_rng(devices=[]):
        model = example.network()
    rows = example.directions(list(model.parameters()), 0)
    quiet, noisy, other = (example.Client(0, secret, noise) for secret, noise in ((1, 0.0), (1, 4.0), (2, 4.0)))
    (said, one, two) = (client.says(model, rows) for client in (quiet, noisy, other))
    assert 1 < float((one - said).std()) / (4 * 2**0.5) * 2 < 4 and not torch.equal(one, two)
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    assert 2.2 < example.epsilon(4.0, 100) < 2.5 < example.epsilon(2.0, 100)


def test_every_example_is_listed_and_uses_public_names() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")} and len(listed) >= 12
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"jetplane\.(ad|gradients|compiler|cli)\b|jp\._|import _", text), path.name
        assert "assert" in text and '"""' in text
