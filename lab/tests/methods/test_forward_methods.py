"""Training runs of the methods beyond the paper: forward gradients, HorizonAdam and the Gauss-Newton search."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import jetplane as jp
import tiny
from jetplane import cli
from jetplane.optim import HorizonAdam
from jetplane_lab import cost, methods, models, presets, report
from jetplane_lab.methods.forward import Horizon, OnForwardGradients
from jetplane_lab.report import tables
from jetplane_lab.training import Config, Trainer, batches, memory
from jetplane_lab.training.progress import describe
from jetplane_lab.training.tally import Tally

METHODS: dict[str, dict[str, Any]] = {
    "forward-adam": {"method": "forward-adam", "samples": 2, "lr": 1e-3, "eps": 1e-7, "weight_decay": 1e-4},
    "forward-sgd": {"method": "forward-sgd", "samples": 2, "lr": 1e-2, "momentum": 0.5},
    "forward-adam, averaged": {"method": "forward-adam", "samples": 2, "lr": 3e-3, "average": 4.0},
    "horizon": {"method": "horizon", "samples": 2, "lr": 1.0},
    "gauss-newton": {"method": "gauss-newton", "k": 8, "lr": 1.0},
    "gauss-newton, penalised": {"method": "gauss-newton", "k": 8, "lr": 1.0, "penalty": 1e-4},
}
FORWARD = [name for name in METHODS if not name.startswith("gauss-newton")]


def _net() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.Tanh(), nn.Linear(24, 10))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.03)
    return net


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A net with a hidden layer, so that a forward gradient has noise: logistic regression has none."""
    monkeypatch.setitem(models.MODELS, "small", _net)


def _trainer(folder: Path | None = None, /, **changes: Any) -> Trainer:
    return tiny.trainer(folder, **{"model": "small", **changes})


# -- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_lowers_the_loss_and_leaves_torchs_generator_alone(method: str) -> None:
    state = torch.get_rng_state()
    run = _trainer(**METHODS[method], epochs=6)
    summary = run.fit()
    assert torch.equal(torch.get_rng_state(), state)
    assert summary.reason == "finished" and len(run.history) == 6
    assert run.history[-1].train_nll < 0.97 * run.history[0].train_nll
    planes = method not in FORWARD
    rejected = {"REJECTED"} if planes else set()  # a step that would raise the loss of its batch
    assert all(metrics.steps == 3 and metrics.not_taken.keys() <= rejected for metrics in run.history)
    assert all((getattr(summary.final, name) is not None) == planes for name in ("slope", "curvature", "step_length"))


@pytest.mark.parametrize(
    "method",  # the axes of 784 inputs take long to turn
    [pytest.param(name, marks=pytest.mark.slow) if name == "horizon" else name for name in METHODS],
)
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(method: str, tmp_path: Path) -> None:
    options = METHODS[method] | {"schedule": "cosine", "epochs": 4}
    whole = _trainer(**options)
    whole.fit()
    tiny.advance(_trainer(tmp_path, **options), 2)
    tiny.advance(_trainer(tmp_path, **options), 1)
    resumed = _trainer(tmp_path, **options)
    assert resumed.epoch == 3
    resumed.fit()
    tiny.assert_same(resumed, whole)


@pytest.mark.parametrize("method", ["fgd", "fomoh-kd", *METHODS])
def test_a_backward_pass_inside_a_step_raises(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()  # a graph from before the guard

    def cheat(model: nn.Module, batch: Tensor) -> Tensor:
        loss.backward(retain_graph=True)
        return plain(model, batch)

    plain = nn.Sequential.forward
    run = _trainer(**METHODS.get(method, {"method": method}))
    monkeypatch.setattr(nn.Sequential, "forward", cheat)
    with pytest.raises(jp.BackwardPass, match=r"starts a backward pass inside jetplane.forward_only\(\)"):
        run.fit()


@pytest.mark.parametrize("method", ["backprop", "fomoh-bp"])
def test_a_method_with_a_backward_pass_is_not_guarded(method: str) -> None:
    assert _trainer(method=method, epochs=1).fit().reason == "finished"


@pytest.mark.parametrize("name", ["forward-adam", "forward-sgd"])
def test_a_step_is_torchs_on_the_estimate(name: str) -> None:
    run = _trainer(**METHODS[name], epochs=1, batch_size=50)
    model = copy.deepcopy(run.model)
    images, labels = run.data.train.images, run.data.train.labels
    index = batches.order(50, seed=3, epoch=0, device=torch.device("cpu"))
    run.fit()
    kinds: dict[str, torch.optim.Optimizer] = {
        "forward-adam": torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7, weight_decay=1e-4),
        "forward-sgd": torch.optim.SGD(model.parameters(), 1e-2, 0.5),
    }
    jp.ForwardGradient(model.parameters(), 2, seed=3)(
        lambda: functional.cross_entropy(model(images[index]), labels[index], reduction="none")
    )
    kinds[name].step()
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_horizon_is_judged_by_its_averaged_parameters() -> None:
    run = _trainer(**METHODS["horizon"], epochs=3, hold_out=10)
    run.fit()
    trained = copy.deepcopy(run.model.state_dict())
    assert isinstance(run.method, Horizon)
    last = run.history[-1]
    assert run.data.test is not None
    for samples, nll in (
        (run.data.validation, last.validation_nll),
        (run.data.train, last.train_nll_after),
        (run.data.test, last.test_nll),
    ):
        assert nll != batches.evaluate(run.model, samples)[0]
        with run.method.averaged():
            assert nll == batches.evaluate(run.model, samples)[0]
    assert all(torch.equal(trained[name], value) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize("method", ["backprop", "adam", "fomoh", "gauss-newton", "forward-adam"])
def test_a_run_with_an_average_is_judged_by_it(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": method, "lr": 3e-3, "epochs": 3}
    plain = _trainer(**options)
    plain.fit()
    run = _trainer(**options, average=2.0)
    means = [parameter.detach().clone() for parameter in run.model.parameters()]
    steps = 0
    for item in run.work():
        if item is None:
            steps += 1
            for mean, parameter in zip(means, run.model.parameters(), strict=True):
                mean += (parameter.detach() - mean) * 2 / (steps + 2)
    assert run.history[-1].train_nll == plain.history[-1].train_nll  # it trains as it did
    with run.judged():
        for mean, parameter in zip(means, run.model.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), mean)
        nll, _ = batches.evaluate(run.model, run.data.validation)
    assert nll == run.history[-1].validation_nll != plain.history[-1].validation_nll
    tiny.advance(_trainer(tmp_path, **options, average=2.0), 1)
    resumed = _trainer(tmp_path, **options, average=2.0)
    resumed.fit()
    assert resumed.history[-1].validation_nll == run.history[-1].validation_nll


def test_steps_of_horizon_that_are_not_taken_are_counted() -> None:
    run = _trainer(**METHODS["horizon"], epochs=1)
    with torch.no_grad():
        next(iter(run.model.parameters())).fill_(float("nan"))
    run.fit()
    assert run.history[0].not_taken == {"NONFINITE": 3}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if name == "horizon" else ()) for name in FORWARD]
)
def test_padded_batches_train_as_the_others_do(method: str) -> None:
    """With compile every batch has one size: the last one has 10 digits and 10 that are not there."""
    run, other = (_trainer(**METHODS[method], compile=compiled, epochs=3) for compiled in (True, False))
    index = torch.tensor([4, 7, 1, -1, -1])
    with torch.no_grad():
        padded, hits = run._padded_loss(index, batches.weights(index))
        plain, others = run._loss(index[:3])
    assert padded[3:].tolist() == [0.0, 0.0] and hits.tolist() == [*others.tolist(), False, False]
    assert float(padded.mean()) == pytest.approx(float(plain.mean()), rel=1e-6)
    run.fit()
    other.fit()
    assert run.history[-1].train_nll < run.history[0].train_nll
    # noise is numbered by element, so what is padded draws other numbers: from the first epoch's last batch on
    assert run.history[0].train_nll == pytest.approx(other.history[0].train_nll, rel=0.01)
    assert [metrics.steps for metrics in run.history] == [3] * 3


@pytest.mark.parametrize("method", FORWARD)
def test_steps_are_the_single_steps(method: str) -> None:
    once, many = (_trainer(**METHODS[method], batch_size=10) for _ in range(2))
    order = torch.arange(50).reshape(5, 10)
    single = [float(once.method.step(once._loss, index, has_aux=True)) for index in order]
    reports = many.method.steps(many._loss, order, has_aux=True)
    assert reports.loss.tolist() == single and reports.aux.shape == (5, 10) and reports.code.shape == (5,)
    assert float(many.method.report.loss) == single[-1]
    tiny.assert_equal(once.method.state_dict(), many.method.state_dict())
    tally = Tally(1.0, curved=False)
    tally.accumulate_steps(reports, [10] * 5)
    assert tally.fetch().nll == pytest.approx(sum(single) / 5) and tally.fetch().not_taken == {}
    alone = many.method.steps(lambda index: many._loss(index)[0], order[:1])
    assert alone.aux is None and alone.loss.shape == (1,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings(
    "ignore:This instance was constructed with capturable=True"
)  # the first steps are as they are
@pytest.mark.parametrize("method", [name for name in FORWARD if "average" not in METHODS[name]])
def test_graphs_take_the_same_steps(method: str, tmp_path: Path) -> None:
    """Enough steps to warm up, capture and replay, with another rate in each epoch; and gone on with."""
    options = METHODS[method] | {"device": "cuda", "batch_size": 5, "schedule": "cosine", "epochs": 4}
    run, other = (_trainer(**options, compile=compiled) for compiled in (True, False))
    run.fit()
    other.fit()
    for ours, theirs in zip(run.history, other.history, strict=True):
        assert ours.train_nll == pytest.approx(theirs.train_nll, rel=1e-3)
        assert ours.validation_nll == pytest.approx(theirs.validation_nll, rel=1e-3)
    tiny.advance(_trainer(tmp_path, **options, compile=True), 2)
    resumed = _trainer(tmp_path, **options, compile=True)
    resumed.fit()
    assert resumed.history[-1].train_nll == pytest.approx(run.history[-1].train_nll, rel=1e-3)


@pytest.mark.slow
def test_the_search_is_compiled() -> None:
    options = METHODS["gauss-newton"] | {"batch_size": 25}  # no batch is padded: its noise is that of all samples
    run, other = _trainer(**options, compile=True), _trainer(**options)
    run.fit()
    other.fit()
    for ours, theirs in zip(run.history, other.history, strict=True):
        assert ours.train_nll == pytest.approx(theirs.train_nll, rel=1e-3)


def test_there_is_no_report_before_a_step() -> None:
    weight = torch.ones(2, requires_grad=True)
    for made in (
        Horizon(HorizonAdam([weight])),
        OnForwardGradients(torch.optim.SGD([weight], lr=0.1), jp.ForwardGradient([weight])),
    ):
        with pytest.raises(RuntimeError, match=r"there is no report before the first step; expected a call of step\."):
            _ = made.report


# -- cost and memory ----------------------------------------------------------------------------------------------


def test_what_a_step_costs() -> None:
    run = _trainer(**METHODS["horizon"], batch_size=50)
    run._measure()
    (spent,) = run._costs.values()
    model, optimizer = copy.deepcopy(run.model), run.config
    method = methods.make(optimizer, model.parameters())
    index = torch.arange(50)
    counted = [
        cost.forward_equivalents(
            lambda: method.step(lambda i: run._loss_of(model, i), index, has_aux=True), model, run.data.train.images
        )
        for _ in range(9)
    ]
    every = sum(counted[5:9]) / 4
    assert counted[4] > counted[3] == counted[2]  # the fifth measures
    assert every < spent < 1.05 * every + 0.02 * counted[0]


@pytest.mark.parametrize(("method", "name"), [("forward-adam", "samples"), ("gauss-newton", "k")])
def test_what_does_not_fit_is_refused_with_what_would(method: str, name: str) -> None:
    run = _trainer(method=method)
    free = run.demand.step(6) + 10
    assert run.demand.largest_k(free, 9) == 6
    with pytest.raises(memory.TooLarge, match=rf"{name} is 9: a step needs .*; the largest {name} that fits is 6, or"):
        memory.require([(run.demand, 9)], run.device, free)


def test_the_search_has_no_second_rows_before_the_loss() -> None:
    model, images = models.build("cnn", 0), torch.zeros(20, 1, 28, 28)
    ours, exact = (memory.demand(model, images, Config(method=method)) for method in ("gauss-newton", "fomoh-kd"))
    assert 3 * ours.curved == 20 * 18  # four to five numbers for each digit and pair, and not its ten classes
    assert ours.largest == exact.largest and 4 * ours.step(32) < exact.step(32)


def test_directions_of_one_layer_have_no_rows_before_it() -> None:
    model, images = models.build("cnn", 0), torch.zeros(2048, 1, 28, 28)
    ours = memory.demand(model, images, presets.find("search-cnn").config)
    sizes = 2048 * 4 * torch.tensor([20 * 24 * 24, 50 * 8 * 8, 500, 10])  # behind each layer
    rows = 1 + 4 + torch.tensor([7, 46, 178, 21]).cumsum(0)
    pairs = 3 * (1 + 256 + 256 * 257 // 2) * 2048 * 6
    assert ours.layers == tuple(sizes.tolist())
    assert ours.step(256) == max(int((2 * rows * sizes).max()), pairs) + (4 + 7) * 4 * 431080
    assert ours.step(19) > ours.step(20)  # fewer directions than four for each layer move all of them


@pytest.mark.parametrize("padded", [False, True])
def test_a_penalty_is_a_part_of_the_plane(padded: bool) -> None:
    """The plane of the penalised loss less that of the loss alone: p V w and p V V^T, without the biases."""
    generator, index, planes = torch.Generator().manual_seed(0), torch.arange(20), []
    for penalty in (0.0, 0.3):
        run = _trainer(method="gauss-newton", penalty=penalty, dtype="float64")
        leaves = list(run.model.parameters())
        generator.manual_seed(0)
        rows = [torch.randn(3, *leaf.shape, dtype=torch.float64, generator=generator) for leaf in leaves]
        with jp.perturb(leaves, rows, curvature="ggn") as jets:
            losses, _ = run._padded_loss(index, batches.weights(index)) if padded else run._loss(index)
            loss = losses.mean()
        planes.append(jets.quadratic(loss))
    weights = torch.cat([leaf.detach().flatten() for leaf in leaves if leaf.ndim > 1])
    along = torch.cat([part.flatten(1) for part, leaf in zip(rows, leaves, strict=True) if leaf.ndim > 1], 1)
    torch.testing.assert_close(planes[1].loss - planes[0].loss, 0.15 * weights.square().sum())
    torch.testing.assert_close(planes[1].slope - planes[0].slope, 0.3 * along @ weights)
    torch.testing.assert_close(planes[1].curvature - planes[0].curvature, 0.3 * along @ along.T)


def test_a_penalty_has_rows_of_the_weights() -> None:
    model, images = models.build("cnn", 0), torch.zeros(1, 1, 28, 28)
    plain, penalised = (
        memory.demand(model, images, Config(method="gauss-newton", penalty=penalty)) for penalty in (0.0, 0.1)
    )
    assert penalised.curved == 4 * max(parameter.numel() for parameter in model.parameters()) > plain.curved


# -- configs and presets ------------------------------------------------------------------------------------------


def test_fields_that_a_method_has_its_own_default_for() -> None:
    assert (Config(method="gauss-newton").k, Config(method="gauss-newton").lr) == (64, 1.0)
    assert (Config(method="horizon").lr, Config(method="forward-adam").lr, Config(method="adam").lr) == (1.0, 2e-3, 0.1)
    assert Config(method="forward-sgd").samples is None and Config(method="fgd").k == 1
    assert Config(method="forward-sgd").tangents == 32  # at most
    assert (Config(method="horizon", samples=7).tangents, Config(method="fgd", k=3).tangents) == (7, 3)
    assert Config.from_json('{"method": "gauss-newton"}').k == 64
    assert Config.from_json('{"method": "horizon", "lr": null}').lr == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "adam", "samples": 3},
            "samples is 3, but method adam takes none; forward-adam, forward-sgd, horizon",
        ),
        (
            {"method": "horizon", "average": 8.0},
            "average is 8.0, but method horizon takes none; fgd, fomoh, fomoh-bp, fomoh-kd, backprop, sgd, adam, ",
        ),
        ({"method": "adam", "average": -1.0}, "average is -1.0; expected a finite number from 0."),
        ({"method": "forward-adam", "samples": 0}, "samples is 0; expected a whole number from 1."),
        ({"method": "forward-adam", "samples": 2.0}, "samples is 2.0; expected a whole number."),
        ({"method": "forward-adam", "k": 2}, "k is 2, but method forward-adam takes none;"),
        ({"method": "forward-adam", "momentum": 0.5}, "momentum is 0.5, but method forward-adam takes none;"),
        ({"method": "horizon", "clip": 1.0}, "clip is 1.0, but method horizon takes none;"),
        ({"method": "gauss-newton", "samples": 8}, "samples is 8, but method gauss-newton takes none;"),
        ({"method": "gauss-newton", "solver": "damped"}, "solver is 'damped', but method gauss-newton takes none;"),
        ({"method": "forward"}, "method is 'forward'; did you mean forward-"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Config(**changes)
    assert str(caught.value).startswith(message)


def test_a_run_from_before_there_were_samples_is_the_same_run() -> None:
    config = Config(method="fomoh-kd", k=3)
    fields = config.to_dict()
    assert fields.pop("samples") is None
    assert Config.from_dict(fields) == config
    assert Config.from_dict(fields | {"samples": 4}) == config  # as it was written for every method
    assert config.digest().startswith("f5d9436d")  # as it was then
    horizon = [Config(method="horizon", samples=samples).digest() for samples in (None, 4, 5, 6)]
    assert len(set(horizon)) == 4


def test_presets_beyond_the_paper() -> None:
    assert list(presets.BEYOND) == ["forward-cnn", "horizon-cnn", "search-cnn", "search-lr", "adam-cnn"]
    for preset in presets.BEYOND.values():
        config = preset.config
        assert (config.dataset, config.hold_out, config.batch_size) == ("mnist", 5000, 2048)
        assert preset.paper is None and preset.seeds == (0, 1, 2, 3, 4)
        assert preset.reverse_mode == (preset.name == "adam-cnn")
    forward, adam = presets.find("forward-cnn").config, presets.find("adam-cnn").config
    assert forward.replace(method="adam", samples=4, lr=adam.lr) == adam  # all else is the same, but what was tuned
    assert (forward.samples, forward.average, forward.epochs) == (16, 8.0, 120)
    assert presets.find("search-lr").config.model == "logistic-regression"
    assert presets.find("search-cnn").config.k == 256 and presets.find("horizon-cnn").config.lr == 1.0


@pytest.mark.parametrize("number", range(2))
def test_code_of_the_choosing_guide_runs(number: int) -> None:
    text = (Path(__file__).parents[3] / "docs" / "choosing.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    held: dict[str, Any] = {}
    exec(compile(blocks[number], "choosing.md", "exec"), held)
    assert math.isfinite(held["loss"])


def test_links_of_the_choosing_guide_lead_somewhere() -> None:
    docs = Path(__file__).parents[3] / "docs"
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", (docs / "choosing.md").read_text())
    assert targets and all((docs / target).exists() for target in targets)


# -- the test split -----------------------------------------------------------------------------------------------


def test_the_test_split_is_looked_at_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = batches.evaluate

    def watched(model: nn.Module, samples: batches.Samples) -> tuple[float, float]:
        seen.append(len(samples))
        return plain(model, samples)

    monkeypatch.setattr(batches, "evaluate", watched)
    run = _trainer(method="adam", lr=1e-3, hold_out=10, epochs=3)
    run.fit()
    assert seen == [10, 10, 10, 40, 20]
    assert [metrics.test_nll is None for metrics in run.history] == [True, True, False]
    last = run.history[-1]
    assert run.data.test is not None and (last.test_nll, last.test_accuracy) == plain(run.model, run.data.test)
    assert f"test {last.test_nll:.4f}" in describe(last) and "test" not in describe(run.history[0])
    assert _trainer(method="adam", lr=1e-3, epochs=1).fit().final.test_nll is None  # type: ignore[union-attr]


# -- commands and report ------------------------------------------------------------------------------------------


def test_the_command_trains_a_preset_and_shows_the_test_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dataset", "digits", "--hold-out", "5000", "--epochs", "1", "--device", "cpu", "--quiet"]
    asked = ["train", "search-lr", "--k", "4", "--batch-size", "500", *options, "--out", str(tmp_path / "run")]
    assert cli.main(asked) == 0
    assert cli.main([*[word for word in asked if word != "--quiet"], "--resume"]) == 0
    out = capsys.readouterr().out
    assert "test NLL" in out and "test acc." in out
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert 0.0 < line["test_nll"] < 5.0 and 0.0 < line["test_accuracy"] < 1.0


def test_another_method_than_the_presets_has_its_own_defaults(tmp_path: Path) -> None:
    options = ["--dataset", "digits", "--hold-out", "5500", "--epochs", "1", "--device", "cpu", "--quiet"]
    options += ["--batch-size", "500"]
    assert cli.main(["train", "search-lr", "--method", "forward-adam", *options, "--out", str(tmp_path)]) == 0
    config = Config.from_json((tmp_path / "config.json").read_text())
    assert (config.k, config.lr, config.samples, config.hold_out) == (1, 2e-3, None, 5500)


def test_reproduce_beyond_and_its_rows_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["reproduce", "beyond", "--quick", "--epochs", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main([*asked, "--rows", "search-lr"]) == 0
    (record,) = report.read([tmp_path])
    assert record.config.hold_out == 500 and report.slug(presets.find("forward-cnn").config) == "forward-cnn"
    (section,) = report.sections([record])
    assert [group.label for group in section.groups] == ["Gauss-Newton search (K = 64) (LR-Sch.)"]
    assert section.tested and not section.answers and "looked at once, after the last epoch" in section.validation
    table = tables.beyond(section)
    assert table is not None and len(table.rows) == 1 and table.rows[0][1].text == "ours, forward-only"
    page = (tmp_path / "report.html").read_text()
    assert "Beyond the paper" in page and "What the paper says" not in page


def test_rows_beyond_the_paper_stand_beside_the_papers(tmp_path: Path) -> None:
    from synthetic_runs import write_run

    for name in ("forward-cnn", "horizon-cnn", "adam-cnn"):
        config = presets.find(name).config.replace(epochs=3)
        folder = write_run(tmp_path / name, config)
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1] |= {"test_nll": 0.04, "test_accuracy": 0.988}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_run(tmp_path / "paper", presets.find("cnn-backprop").config.replace(epochs=3))
    papers, ours = report.sections(report.read([tmp_path]))
    assert tables.beyond(papers) is None and papers.answers
    table = tables.beyond(ours)
    assert table is not None
    assert [(row[0].text, row[1].text) for row in table.rows[:3]] == [
        ("Forward gradients, Adam (J = 16), averaged", "ours, forward-only"),
        ("HorizonAdam (J = 8)", "ours, forward-only"),
        ("Adam, averaged", "ours, backprop"),
    ]
    assert table.rows[0][-1].text == "0.9880" and len(table.rows) == 3 + 9
    assert table.rows[-1][-1].text == "0.9909 ± 0.0004" and "the paper's, backprop" in table.rows[-1][1].text
    text = report.markdown(report.read([tmp_path]))
    assert "### Beyond the paper" in text and report.page(report.read([tmp_path])).count("Beyond the paper") == 1
