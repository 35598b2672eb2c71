"""coverage and verify: what a user runs before trusting the engine with a program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jetplane as jp


def net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)),
    ).double()


def problem() -> tuple[nn.Sequential, dict[str, nn.Parameter], Tensor, Tensor]:
    model = net()
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    return model, dict(model.named_parameters()), x, torch.arange(5) % 3


def state(model: nn.Module) -> list[Tensor]:
    return [t.clone() for t in (*model.parameters(), *model.buffers(), torch.get_rng_state())]


# -- coverage -----------------------------------------------------------------------------------------------------


def test_coverage_names_the_rules_of_each_module() -> None:
    model, params, x, y = problem()
    report = jp.coverage(lambda: F.cross_entropy(model(x), y), params)
    assert report.complete and report.missing == ()
    found = {(row.module, row.op): row.family for row in report.rows}
    assert found["0 (Conv2d)", "aten.convolution.default"] == "bilinear"
    assert found["2 (ReLU)", "aten.relu.default"] == "elementwise"
    assert found["", "aten._log_softmax.default"] == "softmax"
    assert "every operation has a rule" in str(report)


def test_coverage_goes_on_behind_a_missing_rule() -> None:
    @torch.library.custom_op("diagnose::unknown", mutates_args=())
    def unknown(x: Tensor) -> Tensor:
        return x * 2

    class Bag(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return unknown(x)

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Bag()

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(Straight.apply(self.inner(x.sin())))

    report = jp.coverage(Model(), torch.randn(3, 3))
    assert not report.complete
    missing = {(row.module, row.op) for row in report.rows if not row.covered}
    assert missing == {("inner (Bag)", "diagnose.unknown.default"), ("Model (Model)", "Straight")}
    assert "aten.tanh.default" in {row.op for row in report.rows}
    assert "without a rule: Straight, diagnose.unknown.default" in str(report)


def test_coverage_of_a_sparse_program() -> None:
    assert jp.coverage(lambda x: x.to_sparse().to_dense().sum(), torch.eye(3)).missing == ("aten._to_sparse.default",)


def test_coverage_of_an_autograd_function() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return grad

    report = jp.coverage(lambda x: Cube.apply(x.sin()).cos().sum(), torch.randn(3))
    assert report.missing == ("Cube",)
    assert "aten.cos.default" in {row.op for row in report.rows}


def test_coverage_leaves_no_trace() -> None:
    model, params, x, y = problem()
    before = state(model)
    jp.coverage(lambda: F.cross_entropy(model(x), y), params)
    assert all(map(torch.equal, state(model), before))


# -- verify -------------------------------------------------------------------------------------------------------


def test_both_need_a_callable_and_tensors() -> None:
    with pytest.raises(TypeError, match="func is int; expected a callable"):
        jp.coverage(3, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params is empty; expected at least one tensor to perturb"):
        jp.verify(lambda: torch.ones(()), [])
    with pytest.raises(ValueError, match="primals hold no tensor"):
        jp.coverage(lambda x: x, ())


# -- lines, and what it goes on past --------------------------------------------------------------------------------


def test_coverage_gives_the_line_of_each_call() -> None:
    x = torch.rand(4)
    report = jp.coverage(lambda x: torch.special.airy_ai(x).sum() + x.square().sum(), x)
    lines = {row.op: row.line for row in report.rows}
    assert all(line.startswith(f"{__file__}:") for line in lines.values())
    assert lines["aten.special_airy_ai.default"] in str(report)


def test_coverage_names_the_line_of_a_library_that_calls(tmp_path, monkeypatch) -> None:
    (tmp_path / "a_library.py").write_text("def score(x):\n    return x.sin().sum()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import a_library

    report = jp.coverage(lambda x: a_library.score(x), torch.rand(4))
    assert {row.line for row in report.rows} == {f"{tmp_path / 'a_library.py'}:2"}


def test_coverage_goes_on_past_sparse_matrices() -> None:
    def program(x: Tensor) -> Tensor:
        f = torch.fft.rfft(x)
        spectrum = torch.view_as_real(f * f.conj()).sum(-1) + f.abs()
        return spectrum.tanh().sum() + (torch.diag(x).to_sparse() @ x[:, None]).sigmoid().sum()

    found = {row.op: row.covered for row in jp.coverage(program, torch.rand(4)).rows}
    assert not found["aten._to_sparse.default"]
    assert (
        found["aten._fft_r2c.default"]
        and found["aten.abs.default"]
        and found["aten.tanh.default"]
        and found["aten.sigmoid.default"]
        and found["aten.mm.default"]
    )
