"""The training loop: what it measures, its schedules, several runs together, divergence, cost and memory."""

from __future__ import annotations

import copy
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiny
from jetplane.optim.reports import Packing, Reports
from jetplane.solvers import Status
from jetplane_lab import cost, methods, models
from jetplane_lab.methods.backprop import Backprop
from jetplane_lab.training import (
    Callback,
    Config,
    Metrics,
    Summary,
    Trainer,
    memory,
    progress,
    schedules,
    train_together,
)
from jetplane_lab.training import batches as batching
from jetplane_lab.training.precision import arithmetic
from jetplane_lab.training.progress import Bar, Lines, describe
from jetplane_lab.training.stopping import stop_signals
from jetplane_lab.training.tally import Tally

METHODS: dict[str, dict[str, Any]] = {
    "fgd": {"method": "fgd", "k": 2, "lr": 1e-4},
    "fomoh": {"method": "fomoh", "eps": 1e-4, "clip": 1.0},
    "fomoh-bp": {"method": "fomoh-bp"},
    "fomoh-kd": {"method": "fomoh-kd", "k": 3, "weight_decay": 1e-3},
    "trust-region": {"method": "fomoh-kd", "solver": "trust-region", "start": 0.001, "lr": 0.1},
    "backprop": {"method": "backprop"},
    "sgd": {"method": "sgd", "momentum": 0.9},
    "adam": {"method": "adam", "lr": 1e-3},
}


# -- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_lowers_the_loss_and_leaves_torchs_generator_alone(method: str) -> None:
    state = torch.get_rng_state()
    run = tiny.trainer(**METHODS[method], epochs=6)
    summary = run.fit()
    assert torch.equal(torch.get_rng_state(), state)
    assert (summary.reason, summary.message, summary.epochs) == ("finished", "finished 6 epochs.", 6)
    assert [metrics.epoch for metrics in run.history] == [1, 2, 3, 4, 5, 6]
    assert run.history[-1].train_nll < run.history[0].train_nll
    assert summary.final == run.history[-1]
    assert summary.best_validation_nll == min(metrics.validation_nll for metrics in run.history)
    assert all(metrics.steps == 3 and metrics.not_taken == {} for metrics in run.history)


def test_running_values_are_those_of_a_loop_written_out() -> None:
    run = tiny.trainer(method="backprop", epochs=2)
    model = copy.deepcopy(run.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = run.data.train.images, run.data.train.labels
    run.fit()
    for epoch in range(2):
        total, hits = 0.0, 0
        for index in batching.order(50, seed=3, epoch=epoch, device=torch.device("cpu")).split(20):
            logits = model(images[index])
            loss = functional.cross_entropy(logits, labels[index])
            total += float(loss.detach()) * len(index)
            hits += int((logits.argmax(1) == labels[index]).sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert run.history[epoch].train_nll == pytest.approx(total / 50, rel=1e-7)
        assert run.history[epoch].train_accuracy == hits / 50
    for ours, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for samples, nll, accuracy in (
        (run.data.validation, run.history[-1].validation_nll, run.history[-1].validation_accuracy),
        (run.data.train, run.history[-1].train_nll_after, run.history[-1].train_accuracy_after),
    ):
        with torch.no_grad():
            logits = model(samples.images)
        assert nll == pytest.approx(float(functional.cross_entropy(logits.double(), samples.labels)), rel=1e-6)
        assert accuracy == float((logits.argmax(1) == samples.labels).double().mean())


def test_evaluation_in_chunks_counts_every_digit_once() -> None:
    model = models.build("logistic-regression", 0)
    samples = batching.Samples(torch.randn(2_300, 1, 28, 28), torch.arange(2_300) % 10)
    nll, accuracy = batching.evaluate(model, samples)
    with torch.no_grad():
        logits = model(samples.images)
    assert nll == pytest.approx(float(functional.cross_entropy(logits.double(), samples.labels)), rel=1e-6)
    assert accuracy == float((logits.argmax(1) == samples.labels).double().mean())


def test_the_training_split_is_evaluated_as_often_as_asked() -> None:
    run = tiny.trainer(method="sgd", epochs=5, evaluate_train=2)
    run.fit()
    assert [metrics.train_nll_after is not None for metrics in run.history] == [False, True, False, True, True]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    device = torch.device("cpu")

    def order(seed: int, epoch: int) -> list[int]:
        return batching.order(50, seed, epoch, device).tolist()

    assert order(0, 0) == order(0, 0)
    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(one) for one in orders}) == 9
    assert all(sorted(one) == list(range(50)) for one in orders)


def test_statistics_of_a_step() -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def batch(self, run: Trainer, done: int, total: int) -> None:
            seen.append(run.method.report)

    run = tiny.trainer(callbacks=[Watch()], epochs=1)
    run.fit()
    (metrics,) = run.history
    assert metrics.slope == pytest.approx(float(torch.stack([r.slope.abs() for r in seen]).mean()))
    diagonals = torch.stack([r.curvature.diagonal() for r in seen])
    assert metrics.curvature == pytest.approx(float(diagonals.mean()))
    assert metrics.negative_curvature == float((diagonals < 0).double().mean())
    lengths = torch.stack([r.coefficients.norm() for r in seen])
    assert metrics.step_length == pytest.approx(0.05 * float(lengths.mean()), rel=1e-6)
    assert tiny.trainer(method="sgd", epochs=1).fit().final.slope is None  # type: ignore[union-attr]
    first_order = tiny.trainer(method="fgd", lr=1e-4, epochs=1).fit().final
    assert first_order is not None and first_order.slope is not None and first_order.curvature is None


def test_steps_that_are_not_taken_are_counted_by_status() -> None:
    run = tiny.trainer(method="fomoh", epochs=1)
    with torch.no_grad():
        next(iter(run.model.parameters())).fill_(1e38)  # the logits overflow
    run.fit()
    assert run.history[0].not_taken == {"NONFINITE": 3}
    assert "3 of 3 steps not taken" in describe(run.history[0])


def test_the_statuses_of_compiled_steps_are_read_with_the_rest() -> None:
    codes = [list(Status).index(status) for status in (Status.OK, Status.FLAT, Status.FLAT)]
    tally = Tally(lr=2.0, curved=True)
    buffer = torch.zeros(3, 6, dtype=torch.float64)
    for losses in ((1.0, 2.0, 6.0), (3.0, 3.0, 3.0)):  # the memory of a report may be used again
        buffer.copy_(
            torch.tensor([[loss, 0.0, code, -3.0, 0.5, 4.0] for loss, code in zip(losses, codes, strict=True)])
        )
        tally.accumulate_steps(Reports(buffer, Packing(1, torch.float32), torch.ones(3, dtype=torch.int64)), [2, 2, 2])
    running = tally.fetch()
    assert running.not_taken == {"FLAT": 4}
    assert (running.nll, running.accuracy, running.first_loss) == (3.0, 0.5, 1.0)
    assert (running.slope, running.curvature, running.step_length) == (3.0, 4.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fomoh-kd", "backprop", "adam"])
def test_compiled_steps_train_as_the_others_do(method: str) -> None:
    run, other = tiny.trainer(method=method, compile=True), tiny.trainer(method=method)
    run.fit()
    other.fit()
    for ours, theirs in zip(run.history, other.history, strict=True):
        assert ours.steps == theirs.steps == 3
        for name in ("train_nll", "validation_nll", "slope", "curvature", "step_length", "forward_equivalents"):
            if getattr(theirs, name) is None:  # a torch optimizer measures no plane
                assert getattr(ours, name) is None and method != "fomoh-kd"
            else:
                assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-4), name


def test_epochs_yields_the_metrics_and_a_run_can_be_stopped_and_gone_on_with() -> None:
    whole = tiny.trainer()
    whole.fit()
    run = tiny.trainer()
    seen = []
    for metrics in run.epochs():
        seen.append(metrics)
        if metrics.epoch == 2:
            run.stop.by = "a test"
    assert run.summary is not None
    assert (run.summary.reason, run.summary.message) == ("interrupted", "stopped by a test after epoch 2 of 4.")
    assert run.fit().reason == "finished"
    assert seen == run.history[:2]
    tiny.assert_same(run, whole)


def test_a_run_left_in_the_middle_of_an_epoch_is_refused() -> None:
    run = tiny.trainer()
    work = run.work()
    assert next(work) is None
    work.close()
    with pytest.raises(RuntimeError, match=r"left in the middle of an epoch; expected a new Trainer"):
        run.fit()


def test_callbacks_see_the_whole_run(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def begin(self, run: Trainer) -> None:
            seen.append(("begin", run.epoch))

        def epoch(self, run: Trainer, metrics: Metrics) -> None:
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            seen.append(("epoch", metrics.epoch, len(lines)))

        def end(self, run: Trainer, summary: Summary) -> None:
            seen.append(("end", summary.reason, (tmp_path / "summary.json").exists()))

    tiny.trainer(tmp_path, callbacks=[Watch()], epochs=2).fit()
    assert seen == [("begin", 0), ("epoch", 1, 1), ("epoch", 2, 2), ("end", "finished", True)]


def test_float64_and_hold_out() -> None:
    run = tiny.trainer(method="sgd", dtype="float64", hold_out=10, epochs=1)
    run.fit()
    assert next(run.model.parameters()).dtype == torch.float64
    assert (len(run.data.train), len(run.data.validation)) == (40, 10)


def test_data_is_loaded_by_name_where_none_is_given() -> None:
    run = Trainer(Config(model="logistic-regression", method="backprop", dataset="digits", epochs=1, batch_size=3000))
    assert run.fit().epochs == 1
    assert (len(run.data.train), len(run.data.validation)) == (6000, 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "meta"}, r"device is 'meta'; expected cpu or cuda\."),
        ({"dataset": "mnist"}, r"the data given has dataset tiny, but the config mnist; expected the same\."),
        ({"hold_out": 50}, r"hold_out is 50, but the training split of tiny has 50 digits; expected fewer\."),
        ({"schedule": "custom"}, r"schedule is 'custom' and no scheduler was given; expected 'custom' together with"),
        ({"k": 8000}, r"k is 8000, but the parameters have 7850 entries; expected at most as many\."),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.trainer(**changes)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the validation split of tiny is empty; expected at least one digit\."):
        Trainer(tiny.config(), tiny.dataset(test=0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"device is 'cuda', but torch finds no CUDA device; expected cpu\."):
        tiny.trainer(device="cuda")


# -- several runs together ----------------------------------------------------------------------------------------


def test_together_is_each_alone(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{"seed": 0}, {"seed": 1, "epochs": 2}, {"method": "adam", "lr": 1e-3}]
    alone = [tiny.trainer(**kind) for kind in kinds]
    for run in alone:
        run.fit()
    runs = [tiny.trainer(tmp_path / str(number), **kind) for number, kind in enumerate(kinds)]
    summaries = train_together(runs)
    assert [summary.epochs for summary in summaries] == [4, 2, 4]
    assert all(metrics.together == 3 for run in runs for metrics in run.history)
    for run, other in zip(runs, alone, strict=True):
        for ours, theirs in zip(run.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert [m.train_nll for m in run.history] == [m.train_nll for m in other.history]


def test_together_nothing_is_nothing() -> None:
    assert train_together([]) == []


# -- schedules ----------------------------------------------------------------------------------------------------


def _rates(config: Config, losses: list[float], scheduler: schedules.MakeScheduler | None = None) -> list[float]:
    """The lr of each epoch, and of the one after the last; the schedule is saved and loaded on the way."""
    weights = [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=config.lr)
    schedule = schedules.make(config, optimizer, scheduler)
    rates = [config.lr]
    for loss in losses:
        optimizer.step()
        schedule.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
        state, group = copy.deepcopy(schedule.state_dict()), copy.deepcopy(optimizer.state_dict())
        optimizer = torch.optim.SGD(weights, lr=config.lr)
        schedule = schedules.make(config, optimizer, scheduler)
        schedule.load_state_dict(state)
        optimizer.load_state_dict(group)
    return rates


@pytest.mark.parametrize(
    ("changes", "losses", "expected"),
    [
        ({"schedule": "none"}, [1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "step", "period": 2}, [1.0] * 4, [1.0, 1.0, 0.1, 0.1, 0.01]),
        ({"schedule": "milestone3", "period": 2}, [1.0] * 5, [1.0, 1.0, 0.001, 0.001, 0.001, 0.001]),
        ({"schedule": "cosine", "epochs": 2}, [1.0] * 2, [1.0, 0.5, 0.0]),
        # patience 1: above the epoch before, and never in the epoch after a reduction
        ({"schedule": "rise", "patience": 1}, [3.0, 2.0, 2.5, 9.0, 9.5], [1.0, 1.0, 1.0, 0.1, 0.1, 0.01]),
        # patience 2: the mean of two epochs above the mean of the two before
        ({"schedule": "rise", "patience": 2, "gamma": 0.8}, [3.0, 2.0, 1.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0, 1.0, 0.8]),
        ({"schedule": "rise", "patience": 1}, [math.nan, math.nan], [1.0, 1.0, 1.0]),
    ],
)
def test_schedules(changes: dict[str, Any], losses: list[float], expected: list[float]) -> None:
    assert _rates(tiny.config(lr=1.0, **changes), losses) == pytest.approx(expected)


def test_any_torch_scheduler() -> None:
    config = tiny.config(lr=1.0, schedule="custom")
    exponential = _rates(config, [1.0] * 2, lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
    assert exponential == [1.0, 0.5, 0.25]

    def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    assert _rates(config, [1.0, 0.9, 0.95], plateau) == [1.0, 1.0, 1.0, 0.5]
    with pytest.raises(ValueError, match=r"schedule is 'none' and a scheduler was given; expected 'custom' together"):
        tiny.trainer(scheduler=plateau)


def test_the_schedule_sets_the_lr_of_the_epochs() -> None:
    run = tiny.trainer(schedule="step", period=2, gamma=0.5)
    run.fit()
    assert [metrics.lr for metrics in run.history] == [0.05, 0.05, 0.025, 0.025]


# -- divergence ---------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run_with_a_word(tmp_path: Path) -> None:
    run = tiny.trainer(tmp_path, method="backprop", lr=1e38, epochs=9)
    summary = run.fit()
    assert summary.reason == "diverged"
    assert summary.message == f"diverged in epoch {summary.epochs}: the running train NLL is nan."
    assert summary.epochs < 9
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == summary.epochs and '"train_nll":null' in lines[-1]
    assert math.isnan(Metrics.from_json(lines[-1]).train_nll)
    again = tiny.trainer(tmp_path, method="backprop", lr=1e38, epochs=9)
    assert again.fit().message == summary.message and again.epoch == summary.epochs
    found = Summary.from_json((tmp_path / "summary.json").read_text())
    assert (found.reason, found.epochs, found.seconds) == ("diverged", summary.epochs, summary.seconds)


def test_a_loss_far_above_the_start_for_three_epochs_ends_the_run() -> None:
    run = tiny.trainer(method="backprop", lr=1e4, epochs=9)
    summary = run.fit()
    assert summary.reason == "diverged" and summary.epochs == 3
    start = run._progress.start_loss
    assert f"for 3 epochs the running train NLL, now {run.history[-1].train_nll:.4g}, was" in summary.message
    assert summary.message.endswith(f"was above 10 times the loss at the start, {start:.4g}.")
    assert tiny.trainer(method="backprop", lr=1e4, epochs=5, divergence=None).fit().reason == "finished"
    assert tiny.trainer(method="backprop", lr=1e4, epochs=5, divergence=1e9).fit().reason == "finished"


# -- backprop -----------------------------------------------------------------------------------------------------


def test_backprop_has_no_report_before_a_step() -> None:
    opt = Backprop(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    with pytest.raises(RuntimeError, match=r"there is no report before the first step"):
        _ = opt.report


def test_backprop_without_aux() -> None:
    x = torch.ones(1, requires_grad=True)
    opt = Backprop(torch.optim.SGD([x], lr=0.25))
    with torch.no_grad():  # a caller's no_grad does not keep it from working
        assert float(opt.step(lambda y: (x * y).square().sum(), 1.0)) == 1.0
    assert x.tolist() == [0.5] and opt.report.aux is None and opt.report.status is Status.OK


# -- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({"method": "backprop", "k": 1}, 2.8, 3.0),  # the first layer's input needs no gradient
        ({"method": "fgd", "k": 1}, 2.8, 3.1),
        ({"method": "fomoh", "k": 1}, 3.8, 4.2),
        ({"method": "fomoh-kd", "k": 3}, 15.0, 16.5),
        ({"method": "fomoh-bp", "k": 1}, 6.5, 7.0),
    ],
)
def test_forward_equivalents_of_the_cnn(changes: dict[str, Any], low: float, high: float) -> None:
    model = models.build("cnn", 0)
    config = tiny.config(model="cnn", **changes)
    method = methods.make(config, model.parameters())
    images, labels = torch.randn(8, 1, 28, 28), torch.arange(8)

    def step() -> Tensor:
        return method.step(lambda: (functional.cross_entropy(model(images), labels), torch.zeros(())), has_aux=True)

    assert low < cost.forward_equivalents(step, model, images) < high


def test_forward_equivalents_of_a_linear_layer_by_hand() -> None:
    model, batch = nn.Linear(30, 20), torch.randn(100, 30)
    config = tiny.config(k=3)
    method = methods.make(config, model.parameters())
    found = cost.forward_equivalents(lambda: method.step(lambda: model(batch).square().mean()), model, batch)
    # the value and three tangents, and the update: three rows of 620 numbers against 100 products with 600
    assert found == pytest.approx(4.0, abs=2 * 3 * 620 / (100 * 600))


def test_a_model_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model's forward pass has no matrix product or convolution"):
        cost.forward_equivalents(lambda: None, nn.ReLU(), torch.zeros(2))


def test_forward_equivalents_add_up_and_measuring_changes_nothing() -> None:
    run = tiny.trainer(method="sgd", epochs=2)
    before = copy.deepcopy(run.model.state_dict())
    state = copy.deepcopy(run.method.state_dict())
    run._measure()
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert run.method.state_dict() == state
    assert run.fit().forward_equivalents_per_step == 2.0
    assert [metrics.forward_equivalents for metrics in run.history] == [2.0, 4.0]


# -- memory -------------------------------------------------------------------------------------------------------


def _measured(model: str, method: str, k: int, batch: int) -> tuple[float, float]:
    """The estimate, and what a step really takes in a process of its own."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import tiny, torch
from jetplane_lab import methods
from jetplane_lab.training import memory
from jetplane_lab import models
from torch.nn import functional
config = tiny.config(model={model!r}, method={method!r}, k={k})
model = models.build(config.model, 0)
images, labels = torch.randn({batch}, 1, 28, 28), torch.zeros({batch}, dtype=torch.int64)
step = methods.make(config, model.parameters()).step
step(lambda n: functional.cross_entropy(model(images[:n]), labels[:n]), 1)
peak = memory.Peak(torch.device("cpu"))
step(lambda n: functional.cross_entropy(model(images[:n]), labels[:n]), {batch})
print(memory.demand(model, images, config).step({k}), peak.read())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    estimate, real = map(float, done.stdout.split())
    return estimate, real


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "k", "batch"),
    [
        ("cnn", "fgd", 1, 512),
        ("cnn", "fomoh", 1, 512),
        ("cnn", "fomoh-bp", 1, 512),
        ("cnn", "backprop", 1, 512),
        ("cnn", "fomoh-kd", 3, 256),
        ("cnn", "fomoh-kd", 8, 256),
        ("logistic-regression", "fomoh-kd", 60, 512),
        ("logistic-regression", "gauss-newton", 60, 512),
        ("cnn", "gauss-newton", 16, 128),
        ("cnn", "gauss-newton", 256, 128),
    ],
)
def test_the_estimate_of_memory_is_right_within_a_factor(model: str, method: str, k: int, batch: int) -> None:
    estimate, real = _measured(model, method, k, batch)
    assert 0.5 < estimate / real < 2.0


def test_a_k_that_does_not_fit_is_refused_with_the_k_that_does() -> None:
    demand = memory.Demand(largest=2**21, curved=2**20, all=2**22, parameters=2**20, method="fomoh-kd")
    device = torch.device("cpu")
    fits = demand.largest_k(2**30, 100)
    assert demand.step(fits) <= 2**30 < demand.step(fits + 1)
    memory.require([(demand, fits)], device, free=2**30)
    with pytest.raises(memory.TooLarge) as caught:
        memory.require([(demand, 100)], device, free=2**30)
    assert str(caught.value) == (
        f"k is 100: a step needs about 15.2 GiB on cpu, which has 1 GiB free; the largest k that fits is {fits}, or "
        "take a smaller batch."
    )
    with pytest.raises(memory.TooLarge, match=r"3 runs together need about .* free; the largest k that fits is "):
        memory.require([(demand, fits)] * 3, device, free=2**30)
    backward = memory.Demand(largest=2**30, curved=2**30, all=2**32, parameters=2**20, method="sgd")
    with pytest.raises(memory.TooLarge, match=r"a step needs about 5 GiB on cpu, which has 1 GiB free; expected a sm"):
        memory.require([(backward, 1)], device, free=2**30)
    assert memory.Demand(2**40, 2**40, 2**40, 1, "fomoh-kd").largest_k(2**30, 100) == 0


def test_memory_is_looked_at_before_training() -> None:
    config = Config(model="logistic-regression", k=7850, batch_size=6000, dataset="digits")
    with pytest.raises(memory.TooLarge, match=r"k is 7850: a step needs about .* GiB on cpu, which has "):
        Trainer(config)


def test_peak_memory_is_what_was_held_in_between() -> None:
    peak = memory.Peak(torch.device("cpu"))
    block = torch.ones(2**26)  # 256 MiB
    del block
    assert 2**28 * 0.9 < peak.read() < 2**28 * 1.5
    peak.clear()
    assert peak.read() < 2**27


# -- precision, signals, progress ---------------------------------------------------------------------------------


def test_arithmetic_is_set_for_the_time_of_training_alone() -> None:
    def settings() -> tuple[bool, bool, bool]:
        cudnn = torch.backends.cudnn
        return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic

    before = settings()
    with arithmetic(tf32=True):
        assert settings() == (True, True, True)
    with arithmetic(tf32=False):
        assert settings() == (False, False, True)
    assert settings() == before
    inside = []

    class Watch(Callback):
        def batch(self, run: Trainer, done: int, total: int) -> None:
            inside.append(settings())

    for _ in tiny.trainer(callbacks=[Watch()], tf32=True, epochs=1).epochs():
        assert settings() == before
    assert inside == [(True, True, True)] * 3


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_after_the_epoch_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    class Kill(Callback):
        def batch(self, run: Trainer, done: int, total: int) -> None:
            if run.epoch == 1 and done == 1:
                os.kill(os.getpid(), number)

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run = Trainer(tiny.config(), tiny.dataset(), tmp_path, [Kill()])  # no checkpoint is due for 30 s
    summary = run.fit()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert (summary.reason, summary.message) == ("interrupted", f"stopped by {number.name} after epoch 2 of 4.")
    assert not (tmp_path / "summary.json").exists()
    resumed = tiny.trainer(tmp_path)
    assert resumed.epoch == 2
    assert resumed.fit().reason == "finished"
    whole = tiny.trainer()
    whole.fit()
    tiny.assert_same(resumed, whole)


def test_a_signal_after_the_epoch_was_judged_still_has_its_checkpoint(tmp_path: Path) -> None:
    class Ask(Callback):
        def epoch(self, run: Trainer, metrics: Metrics) -> None:
            run.stop.by = "a test"

    run = Trainer(tiny.config(), tiny.dataset(), tmp_path, [Ask()])
    run.fit()
    assert tiny.trainer(tmp_path).epoch == 1


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_is_at_once() -> None:
    with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.by == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.by is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_seconds_between_checkpoints_are_a_number_from_zero(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"checkpoint_seconds is (nan|-1\.0); expected a number from 0\."):
        Trainer(tiny.config(), tiny.dataset(), checkpoint_seconds=seconds)


def test_outside_the_main_thread_there_are_no_handlers() -> None:
    found: list[Summary] = []
    thread = threading.Thread(target=lambda: found.append(tiny.trainer(epochs=1).fit()))
    thread.start()
    thread.join()
    assert found[0].reason == "finished"


def test_lines_say_where_the_run_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.trainer(tmp_path, callbacks=[Lines("here", seconds=0.0)], method="sgd", epochs=2).fit()
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"here: epoch 1/2: 1 of 3 steps, loss \d\.\d{4}", lines[0])
    assert lines[3].startswith("here: epoch 1/2: lr 0.05, train ") and lines[3].endswith(" s")
    tiny.trainer(tmp_path, callbacks=[Lines("here")], method="sgd", epochs=2).fit()
    assert capsys.readouterr().err == "here: goes on after epoch 2 of 2\n"


def test_every_epoch_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(callbacks=[Lines("here", seconds=math.inf)], method="sgd", epochs=5).fit()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == [f" epoch {n}/5" for n in range(1, 6)]


def test_the_bar_ends_full(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(callbacks=[Bar("there", columns=120)], method="sgd", epochs=2).fit()
    last = capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith("there |") and "2.0/2" in last and "valid. " in last and "loss " in last


WORDS = r"loss \d+\.\d{4}|[\d.e+]+ steps/s|valid\. \d+\.\d%|lr [\d.e-]+|measuring the cost of a step"
LINE = re.compile(rf"a label \|.{{6}}\| \d\.\d/3 (\d\d:\d\d|\?) left(, ({WORDS}))*")


@pytest.mark.parametrize(
    ("columns", "words"),
    [(45, []), (56, ["loss"]), (80, ["loss", "steps/s"]), (120, ["loss", "steps/s", "valid.", "lr"])],
)
def test_nothing_of_a_bar_is_cut(columns: int, words: list[str], capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(progress, "_FETCH_EVERY", 0.0)
    bar = Bar("a label", columns=columns)
    bar.MIN_SECONDS = 0.0
    tiny.trainer(callbacks=[bar], method="sgd", epochs=3).fit()
    lines = [line.rstrip() for line in capsys.readouterr().err.replace("\r", "\n").splitlines() if line.strip()]
    assert len(lines) >= 9 and max(map(len, lines)) <= columns
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    shown = [word for word in ("loss", "steps/s", "valid.", "lr") if any(word in line for line in lines)]
    assert shown[: len(words)] == words and (columns == 80 or shown == words)  # how long a speed is there varies


def test_the_loss_in_the_bar_is_that_of_the_last_step() -> None:
    seen: list[tuple[float, float]] = []

    class Look(Callback):
        def batch(self, run: Trainer, done: int, total: int) -> None:
            seen.append((run.current_loss(), float(run.method.report.loss)))

    run = tiny.trainer(callbacks=[Look()], method="sgd", epochs=2)
    assert math.isnan(run.current_loss()) and run.current_lr() == 0.05
    run.fit()
    assert len(seen) == 6 and all(shown == pytest.approx(true) for shown, true in seen)
    assert len({shown for shown, _ in seen}) == 6


def test_a_bar_may_be_wiped_away(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(callbacks=[Bar("there", keep=False, columns=80)], method="sgd", epochs=1).fit()
    err = capsys.readouterr().err
    assert err.endswith("\r") and "\n" not in err
