"""``jetplane bench``: systems give the reference's numbers, wrong ones are not timed, runs go on where they stood."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from jetplane_lab.bench import clock, growth, measure, oracle, process, roofline, run, steps, turns
from jetplane_lab.bench import curves as plots
from jetplane_lab.bench import peak as memory
from jetplane_lab.bench import printed as table
from jetplane_lab.bench.grids import points
from jetplane_lab.bench.machine import environment
from jetplane_lab.bench.problem import MODELS, Derivatives, Problem
from jetplane_lab.bench.systems import SYSTEMS, Prepared, Setting, System, authors, find, jax_peer, taylor
from jetplane_lab.bench.task import Point, Task
from jetplane_lab.bench.tolerances import tolerance
from jetplane_lab.commands import bench
from jetplane_lab.commit import commit_of
from jetplane_lab.records import Records

UNTWINNED = [name for name, system in SYSTEMS.items() if system.kind != "scale" and not system.twin]
FOMOH = Path(os.environ["JETPLANE_FOMOH"]) if "JETPLANE_FOMOH" in os.environ else None  # the authors' code, if at hand
needs_locks = pytest.mark.skipif(not turns.AVAILABLE or sys.platform != "linux", reason="needs Linux's file locks")
TINY = Task("check", "quadratic", "jetplane", "mlp", k=2, batch=4, depth=2, precision="float64")


def order(*words: str) -> argparse.Namespace:
    top = argparse.ArgumentParser()
    bench.add_parser(top.add_subparsers())
    return top.parse_args(["bench", *words])


def case(name: str, model: str) -> Any:
    """A system and a model; slow where the compiler takes its time."""
    slow = SYSTEMS[name].compiled and model != "rosenbrock"
    return pytest.param(name, model, marks=pytest.mark.slow if slow else ())


def nothing(result: Any) -> None:
    """There is no device to wait for."""


# -- systems ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def global_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch's operation database forbids global flags, and a process that measures sets them."""
    module = getattr(torch.backends, "m", torch.backends)  # behind what torch puts in its place
    monkeypatch.setattr(module, "__allow_nonbracketed_mutation_flag", True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's compiler
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")  # torch's compiler
@pytest.mark.parametrize(("name", "model"), [case(name, model) for name in UNTWINNED for model in MODELS])
def test_a_system_gives_the_numbers_of_double_backward(name: str, model: str) -> None:
    why = SYSTEMS[name].missing(Setting(model, "cpu", FOMOH))
    if why is not None:
        pytest.skip(why)
    task = TINY.but(system=name, model=model, depth=2 if model == "mlp" else 0)
    expected = measure.run(task.but(does="oracle"))
    result = measure.run(task, expected, FOMOH)
    assert result["status"] == "ok" and result["error"] <= SYSTEMS[name].accuracy <= 1e-6, result


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, system in SYSTEMS.items() if system.twin])
def test_a_compiled_peer_gives_the_numbers_of_double_backward(name: str) -> None:
    why = SYSTEMS[name].missing(Setting("cnn", "cpu", None))
    if why is not None:
        pytest.skip(why)
    task = TINY.but(system=name, model="cnn", depth=0)
    result = process.run(task, measure.run(task.but(does="oracle")), None, timeout=300)
    assert result["status"] == "ok" and result["error"] < 1e-9, result


def test_a_wrong_system_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = find("jetplane")

    def prepare(problem: Problem, setting: Setting) -> Prepared:
        inner = right.prepare(problem, setting)

        def call() -> Derivatives:
            found = inner.call()
            return found._replace(curvature=1.001 * found.curvature)

        return inner._replace(call=call)

    monkeypatch.setitem(SYSTEMS, "off", System("off", "off by a thousandth", "peer", prepare))
    task = TINY.but(does="time", system="off")
    result = measure.run(task, measure.run(task.but(does="oracle")))
    assert result["status"] == "wrong" and "median_ms" not in result
    assert result["reason"] == "it differs from double backward by 1.0e-03, and 1.0e-09 is allowed"


def test_a_result_that_is_not_finite_is_wrong() -> None:
    plane = Derivatives(torch.tensor(1.0), torch.ones(2), torch.eye(2))
    assert math.isinf(oracle.relative_error(plane._replace(slope=torch.tensor([1.0, math.nan])), plane))
    assert measure._judged(math.inf, 1.0)["status"] == "wrong"
    json.dumps(measure._judged(math.inf, 1.0), allow_nan=False)


def test_a_result_of_another_shape_is_an_error() -> None:
    plane = Derivatives(torch.tensor(1.0), torch.ones(2), torch.eye(2))
    with pytest.raises(ValueError, match=r"the slope has shape \(3,\); expected \(2,\)"):
        oracle.relative_error(plane._replace(slope=torch.ones(3)), plane)


def test_the_tolerance_follows_the_rounding_of_double_backward() -> None:
    assert tolerance("float64") == 1e-9
    assert tolerance("float32", 0.01) == 0.1


def test_systems_that_cannot_run_say_why(tmp_path: Path) -> None:
    assert authors.SYSTEMS[0].missing(Setting("cnn", "cpu", None)) is not None
    assert authors.SYSTEMS[0].missing(Setting("rosenbrock", "cpu", tmp_path)) == "the authors' code has no rosenbrock"
    assert find("func-nested-graph").missing(Setting("cnn", "cpu", None)) == "CUDA graphs need a CUDA device"
    if importlib.util.find_spec("jax") is None:
        assert jax_peer.SYSTEMS[0].missing(Setting("cnn", "cpu", None)) == "JAX is not installed"
    if importlib.util.find_spec("jet") is None:
        assert "is not installed" in str(taylor.SYSTEMS[0].missing(Setting("tanh-regression", "cpu", None)))
    with pytest.raises(ImportError, match="there is no fomoh package in"):
        authors.load(tmp_path, "nn")
    with pytest.raises(RuntimeError, match="no checkout of the authors' code was named"):
        measure.run(TINY.but(system="fomoh"))


def test_another_package_of_the_name_jet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jet.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jet", raising=False)
    problem = Problem("tanh-regression", 2, 4)
    with pytest.raises(ImportError, match=r"is not torch-jet; expected jet-for-pytorch"):
        find("torch-jet").prepare(problem, Setting("tanh-regression", "cpu", None))
    monkeypatch.delitem(sys.modules, "jet", raising=False)


def test_an_unknown_system_is_answered_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"there is no system 'jaxnested' \(did you mean jax-nested\?\)"):
        find("jaxnested")


# -- problems and tasks -------------------------------------------------------------------------------------------


def test_a_problem_is_the_same_in_every_process_and_precision() -> None:
    state = torch.get_rng_state()
    one, two = Problem("mlp", 2, 4, 3), Problem("mlp", 2, 4, 3, torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a.double(), b) for a, b in zip(one.params.values(), two.params.values(), strict=True))
    assert torch.equal(one.directions["0.weight"].double(), two.directions["0.weight"])
    assert len(one.params) == 8  # three hidden layers and the output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Problem("resnet", 1, 1), "the model is 'resnet'; expected one of cnn"),
        (lambda: Problem("mlp", 1, 1), "the depth of the MLP is 0; expected at least 1"),
        (lambda: TINY.but(does="sing"), "does is 'sing'; expected one of oracle"),
        (lambda: TINY.but(k=0), "k is 0; expected a whole number of at least 1"),
        (lambda: TINY.but(precision="tf32"), "the precision is tf32 on cpu; expected a CUDA device"),
        (lambda: Task.of({**TINY.plain(), "colour": 1}), "a task has no colour; expected batch"),
    ],
)
def test_bad_tasks_say_what_is_wrong(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_grids_name_each_point_once() -> None:
    full = points("quadratic", "full", cuda=False)
    assert len(full) == len(set(full))
    assert {point.depth for point in full if point.model == "mlp"} == {1, 2, 4, 8, 16}
    assert [p.precision for p in points("quadratic", "paper", cuda=True)] == ["tf32"] * 3
    assert [p.batch for p in points("step", "paper", cuda=True)] == [2048, 512]
    (only,) = points("eager-overhead", "paper", cuda=False, models=["cnn"], batches=[64])
    assert only == Point("step", "rosenbrock", 0, 2, 1, "float32")
    (mlp,) = points("quadratic", "quick", cuda=False, models=["mlp"], ks=[2], depths=[3])
    assert (mlp.depth, mlp.k) == (3, 2)


# -- clock, memory, roofline --------------------------------------------------------------------------------------


def test_samples_are_at_least_as_many_as_asked_and_short_calls_are_grouped() -> None:
    calls = []
    times, inner = clock.sample(lambda: calls.append(1), nothing, repeats=5, seconds=0.0)
    assert len(times) == 5 and inner > 1 and len(calls) >= 5 * inner
    times, inner = clock.sample(lambda: time.sleep(0.01), nothing, repeats=2, seconds=0.1)
    assert inner == 1 and min(times) >= 0.01 and sum(times) >= 0.1
    found = clock.summary([0.004, 0.001, 0.002, 0.003])
    assert (found["q1_ms"], found["median_ms"], found["q3_ms"]) == (1.75, 2.5, 3.25)
    assert clock.summary([0.5])["q3_ms"] == 500.0


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_resident_peak_is_exact_in_a_process_of_its_own() -> None:
    code = (
        "import torch; from jetplane_lab.bench import peak\n"
        "def call():\n"
        "    a = torch.ones(2**22); b = a + 1; del a; c = b + 1; return float(c[0])\n"  # two of 16 MiB at a time
        "print(peak.resident_peak(call, lambda r: None), peak.tensor_peak(call))"
    )
    environ = os.environ | memory.ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    resident, tensors = (int(word) / 2**20 for word in found.stdout.split()[-2:])
    assert abs(resident - 32) < 0.5
    assert abs(tensors - 32) < 0.1


def test_memory_that_cannot_be_reset_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> int:
        raise OSError("read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(RuntimeError, match=r"cannot be reset here \(read-only\); expected Linux"):
        memory._reset()


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_process_that_wants_more_memory_than_there_is_fails_with_words() -> None:
    huge = TINY.but(does="time", system="func-nested", batch=10**9, precision="float32")
    result = process.run(huge, None, None, timeout=60)
    assert result["status"] == "failed" and "allocate" in result["reason"]


def test_the_floor_counts_what_cannot_be_avoided() -> None:
    k, batch = 3, 16
    problem = Problem("mlp", k, batch, 2)
    counted = roofline.count(problem, "cpu")
    first, second, third = 784 * 256, 256 * 256, 256 * 10
    # value and tangents in the first layer; 1 + 2K + K^2 products in the second, whose input has no second rows
    # yet; all of them in the third
    products = first * (1 + k) + second * (1 + 2 * k + k * k) + third * (1 + 2 * k + k * k + k * (k + 1) // 2)
    assert counted["flops"] == 2 * batch * products
    parameters = first + second + third + 256 + 256 + 10
    rows = 256 * batch * ((1 + k) + (1 + k + 6))
    assert counted["bytes"] == 4 * ((1 + k) * parameters + 784 * batch + 2 * rows)


# -- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["logistic-regression", "rosenbrock"])
def test_the_timed_step_is_newtons_step_in_the_plane(model: str) -> None:
    assert steps.step_error("jetplane", 2, model, 0, 8, "cpu") < 1e-9


def test_many_compiled_steps_in_one_call_are_checked_as_a_step() -> None:
    assert steps.step_error("jetplane-compiled-steps", 2, "rosenbrock", 0, 8, "cpu") < 1e-9


def test_the_time_of_many_steps_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(problem: Problem, setting: Setting) -> Prepared:
        return Prepared(lambda: time.sleep(0.02), steps.as_plane, lambda result: None, steps=10)

    monkeypatch.setitem(steps.STEPS, "ten", System("ten", "ten steps a call", "peer", prepare))
    result = measure.run(TINY.but(does="time", what="step", system="ten", model="rosenbrock", depth=0))
    assert result["steps_per_call"] == 10 and 2.0 <= result["min_ms"] < 20.0


def test_the_authors_step_is_checked_by_their_plane_and_ours_as_a_step() -> None:
    plan = run.Plan([])
    point = Point("step", "cnn", 0, 3, 64, "float32")
    theirs, ours = (plan.check_of(point, steps.STEPS[name]) for name in ("fomoh", "jetplane"))
    assert theirs is not None and ours is not None
    assert (theirs.what, ours.what, ours.precision) == ("quadratic", "step", "float64")
    assert run.Plan([], check="timed").check_of(point, steps.STEPS["jetplane"]) is not None
    quadratic = point._replace(what="quadratic")
    assert run.Plan([], check="timed").check_of(quadratic, SYSTEMS["jetplane"]) is None
    twin = plan.check_of(quadratic, SYSTEMS["func-loop-compiled"])
    assert twin is not None and twin.system == "func-loop"


# -- growth, tables, figures --------------------------------------------------------------------------------------


def synthetic(system: str, kind: str, law: Callable[[int], float]) -> list[dict[str, Any]]:
    common = {"what": "quadratic", "model": "cnn", "depth": 0, "batch": 8, "precision": "float32", "status": "ok"}
    spread = {"q1_ms": 1.0, "q3_ms": 2.0, "first_call_s": 0.1}
    return [
        {**common, **spread, "system": system, "kind": kind, "k": k, "median_ms": law(k), "peak_mib": 2.0 * k}
        for k in (1, 2, 4, 8)
    ]


def test_laws_are_found_again() -> None:
    rows = synthetic("jetplane", "ours", lambda k: 5 + 3 * k + 2 * k * k) + synthetic(
        "other", "peer", lambda k: 4 * k**3
    )
    found = {(law["system"], law["quantity"]): law for law in growth.laws(rows)}
    assert found["jetplane", "median_ms"]["polynomial"]["coefficients"] == pytest.approx([5, 3, 2])
    assert found["other", "median_ms"]["power"]["exponent"] == pytest.approx(3)
    assert found["other", "median_ms"]["power"]["factor"] == pytest.approx(4)
    assert found["other", "peak_mib"]["power"]["exponent"] == pytest.approx(1)
    assert all(law["axis"] == "k" for law in growth.laws(rows))
    assert growth.laws(rows[:2]) == []
    assert "power" not in growth.fit([(1, 0.0), (2, 1.0), (3, 2.0)], 1)  # no logarithm of zero


def test_figures_are_drawn_for_what_grows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = synthetic("jetplane", "ours", lambda k: 1.0 + k) + synthetic("other", "peer", lambda k: 1.0 + k * k)
    for row in rows[4:]:
        del row["peak_mib"]  # a memory process that failed
    paths = plots.draw(rows, growth.laws(rows), tmp_path)
    assert {path.name for path in paths} == {
        f"k-quadratic-cnn-batch8-float32{s}" for s in (".png", ".svg", "-dark.png")
    }
    assert all(path.stat().st_size > 1000 for path in paths)


def test_wrong_systems_are_not_ranked() -> None:
    rows = [synthetic(name, "peer", lambda k: 1.0)[0] for name in ("slow", "wrong")]
    ours = synthetic("jetplane", "ours", lambda k: 0.5)[0]
    rows[1] |= {"status": "wrong", "reason": "it differs"}
    rows[1].pop("median_ms")
    run._ranked([*rows, ours])
    assert (ours["best_peer"], ours["to_best_peer"]) == ("slow", 0.5)
    assert "to_best_peer" not in rows[1]
    text = table.text([*rows, ours]).splitlines()
    assert [line.split()[0] for line in text[1:]] == ["jetplane", "slow", "wrong"]
    assert "WRONG: it differs" in text[3]


# -- processes ----------------------------------------------------------------------------------------------------


def test_a_process_that_begins_with_the_interrupt_is_ended() -> None:
    """`end_all` was called a moment before there was such a process."""
    start = time.monotonic()
    result = process.run(TINY, None, None, timeout=60, interrupted=lambda: True)
    assert result["status"] == "failed" and "SIGKILL" in result["reason"]
    assert time.monotonic() - start < 30 and not process._running


def test_a_process_that_takes_too_long_is_ended() -> None:
    result = process.run(TINY, None, None, timeout=0.05)
    assert result == {"status": "failed", "reason": "it took longer than 0.05 s"}


def test_a_process_that_dies_is_a_result() -> None:
    assert "SIGKILL, perhaps for want of memory" in process._answer(-signal.SIGKILL, "", "")["reason"]
    assert process._answer(1, "", "Traceback\nNameError: x\n")["reason"].endswith("status 1: NameError: x")
    assert process._answer(0, "no JSON", "")["status"] == "failed"


def test_what_goes_wrong_in_a_process_is_said_in_its_answer() -> None:
    result = process.run(TINY.but(model="nothing"), None, None, timeout=60)
    assert result["status"] == "failed"
    assert result["reason"].startswith("ValueError: the model is 'nothing'; expected one of")


@needs_locks
def test_one_process_measures_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "path", lambda: tmp_path / "lock")
    told: list[str] = []

    def measure_alone() -> None:
        with turns.Turn() as turn:
            turn.together()  # as often as there are others
            told.append("prepared")
            turn.alone()
            told.append("begin")
            time.sleep(0.05)
            told.append("end")

    with turns.Turn() as other:
        other.together()
        threads = [threading.Thread(target=measure_alone) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(told) < 3:
            time.sleep(0.01)
        time.sleep(0.05)
        assert told == ["prepared"] * 3  # one that is not done keeps them from their clocks
    for thread in threads:
        thread.join()
    assert told[3:] == ["begin", "end"] * 3


@needs_locks
@pytest.mark.parametrize(
    ("does", "system", "kinds"), [("time", "jetplane", ["SH", "EX"]), ("check", "jetplane", ["SH"])]
)
def test_what_a_process_does_alone(
    does: str, system: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(turns, "path", lambda: tmp_path / "lock")
    monkeypatch.setattr(turns.Turn, "together", lambda turn: asked.append("SH"))
    monkeypatch.setattr(turns.Turn, "alone", lambda turn: asked.append("EX"))
    task = TINY.but(does=does, system=system, repeats=1, seconds=0.0)
    assert measure.run(task, measure.run(task.but(does="oracle")))["status"] == "ok"
    assert asked == ["SH", *kinds]  # the reference, then the task
    asked.clear()
    measure.run(task.but(does="ceilings", precision="float32"))
    assert asked == ["EX"]


# -- the command --------------------------------------------------------------------------------------------------


SMALL = "--models logistic-regression --k 2 --batch 4 --systems jetplane func-loop --threads 1 --repeats 2 --seconds 0"


@pytest.fixture(scope="module")
def where() -> dict[str, Any]:
    """Read once: a commit made while a test runs is another environment."""
    return environment("cpu", 1)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: dict[str, Any]) -> list[str]:
    monkeypatch.setattr(bench, "environment", lambda *arguments: where)
    return [*SMALL.split(), "--out", str(tmp_path / "run")]


def in_this_process(task: Task, expected: dict[str, Any] | None, fomoh: Path | None, *rest: Any) -> dict[str, Any]:
    """What a process of its own answers, less the second that torch's import takes there."""
    return json.loads(json.dumps(measure.run(task, expected, fomoh)))


class Measured(NamedTuple):
    """A run of the command in processes of its own, which several tests look at."""

    words: list[str]
    folder: Path
    out: str
    most: int  # processes at a time


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, where: dict[str, Any]) -> Measured:
    folder = tmp_path_factory.mktemp("bench") / "run"
    words = [*SMALL.split(), "--out", str(folder), "--ahead", "4" if turns.AVAILABLE else "1"]
    inner, running, most, lock = process.run, [0], [0], threading.Lock()

    def counted(*order: Any) -> dict[str, Any]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        result = inner(*order)
        with lock:
            running[0] -= 1
        return result

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(bench, "environment", lambda *arguments: where)
        patch.setattr(process, "run", counted)
        assert bench.run(order(*words)) == 0
    return Measured(words, folder, out.getvalue(), most[0])


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_command_measures_writes_and_goes_on(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = measured.out
    assert "quadratic, logistic-regression, K=2, batch 4, float32" in seen and "func-loop" in seen
    whole = json.loads((measured.folder / "results.json").read_text())
    rows = {row["system"]: row for row in whole["results"]}
    ours, peer = rows["jetplane"], rows["func-loop"]
    assert ours["status"] == peer["status"] == "ok" and ours["error"] < 1e-3
    assert ours["to_best_peer"] == pytest.approx(ours["median_ms"] / peer["median_ms"], abs=1e-4)
    assert ours["over_floor"] > 0 and ours["peak_mib"] >= 0 and ours["q1_ms"] <= ours["median_ms"] <= ours["q3_ms"]
    assert whole["environment"]["torch"] == torch.__version__ and whole["ceilings"]["float32"]["flops_per_s"] > 0
    assert whole["command"].startswith("jetplane bench --grid quick") and str(measured.folder) not in json.dumps(whole)

    assert bench.run(order("--show", str(measured.folder / "results.json"))) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines() == seen.splitlines()[: len(shown.splitlines())]

    shutil.copytree(measured.folder, tmp_path / "run")
    words = [*measured.words, "--out", str(tmp_path / "run")]
    lines = (tmp_path / "run" / "measurements.jsonl").read_text().splitlines()
    with pytest.raises(ValueError, match="holds measurements; expected --resume"):
        bench.run(order(*words))
    # one measurement is lost half-way: it alone is repeated, with the same result files
    (tmp_path / "run" / "measurements.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    done: list[Task] = []
    inner = process.run

    def counted(task: Task, *rest: Any) -> dict[str, Any]:
        done.append(task)
        return inner(task, *rest)

    monkeypatch.setattr(process, "run", counted)
    assert bench.run(order(*words, "--resume")) == 0
    assert [task.key for task in done] == [json.loads(lines[-1])["key"]]


def test_what_was_measured_before_an_interruption_is_written(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(task: Task, *rest: Any) -> dict[str, Any]:
        if task.system == "func-loop":
            raise KeyboardInterrupt
        return in_this_process(task, *rest)

    small.append("--check=timed")
    monkeypatch.setattr(process, "run", impatient)
    assert bench.run(order(*small)) == 130
    assert "interrupted; --resume goes on with what is missing." in capsys.readouterr().err
    whole = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["system"] for row in whole["results"]] == ["jetplane"] and whole["ceilings"]
    monkeypatch.setattr(process, "run", in_this_process)
    assert bench.run(order(*small, "--resume")) == 0
    whole = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["system"] for row in whole["results"]] == ["jetplane", "func-loop"]


@needs_locks
@pytest.mark.slow
def test_processes_that_prepare_at_the_same_time_give_the_same_rows(measured: Measured) -> None:
    assert 1 < measured.most <= 4
    whole = json.loads((measured.folder / "results.json").read_text())
    assert [(row["system"], row["status"]) for row in whole["results"]] == [("jetplane", "ok"), ("func-loop", "ok")]
    assert "--ahead 4" in whole["command"] and whole["results"][0]["over_floor"] > 0
    lines = (measured.folder / "measurements.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines[1:]]
    # ceilings, two references, and of both systems a check, a time and a peak, each once
    assert len(keys) == len(set(keys)) == 9


@needs_locks
def test_an_interrupted_command_leaves_no_process_behind(small: list[str], tmp_path: Path) -> None:
    small[small.index("--batch") + 1] = "60000"  # it takes its time
    command = [sys.executable, "-m", "jetplane", "bench", *small, "--ahead", "3", "--seconds", "60"]
    # where a shell has started these tests in the background, they ignore interrupts, and so would the command
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    children = Path(f"/proc/{running.pid}/task")
    try:
        while not (found := [pid for c in children.glob("*/children") for pid in c.read_text().split()]):
            assert running.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130 and "interrupted; --resume goes on" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in found)


def test_a_folder_inside_another_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "one.py").write_text("1")
    (inner / "two.py").write_text("2")
    git("init")
    git("add", "one.py")
    git("commit", "-m", "one")
    found = commit_of(tmp_path)
    assert found is not None and len(found.name) == 40 and not found.changed
    assert commit_of(inner) is None
    assert environment("cpu", 1, inner)["fomoh"] == "unknown"
    (tmp_path / "one.py").write_text("3")
    assert commit_of(tmp_path) == (found.name, True)
    monkeypatch.setenv("PATH", str(inner))  # where there is no git
    assert commit_of(tmp_path) is None


def test_measurements_of_another_machine_are_not_mixed(small: list[str], tmp_path: Path) -> None:
    where = environment("cpu", 1) | {"torch": "1.0"}
    Records(tmp_path / "run" / "measurements.jsonl", where)
    with pytest.raises(ValueError, match=r"were made with torch 1\.0, and this is .*; expected the same"):
        bench.run(order(*small, "--resume"))
    (tmp_path / "run" / "measurements.jsonl").write_text("{")
    with pytest.raises(ValueError, match="is damaged in its first line"):
        bench.run(order(*small, "--resume"))


def test_what_failed_is_tried_again_and_a_failure_of_ours_is_an_exit_status(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def fail(task: Task, *rest: Any) -> dict[str, Any]:
        tried.append(task.does)
        return {"status": "failed", "reason": "no luck"}

    monkeypatch.setattr(process, "run", fail)
    assert bench.run(order(*small)) == 1
    assert "FAILED: there is no reference: no luck" in capsys.readouterr().out
    assert tried == ["ceilings", "oracle"]  # what needs the reference is not tried
    assert bench.run(order(*small, "--resume")) == 1
    assert tried == ["ceilings", "oracle"] * 2


def test_a_system_that_is_wrong_in_float64_is_not_timed(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []

    def answer(task: Task, *rest: Any) -> dict[str, Any]:
        tried.append(f"{task.does} {task.system}")
        if task.does == "check" and task.system == "func-loop":
            return {"status": "wrong", "reason": "it differs", "error": 1.0}
        if task.does in ("oracle", "check"):
            return {"status": "ok", "count": {"flops": 8, "bytes": 4}, "plane": {}, "rounding": 0.0}
        if task.does == "ceilings":
            return {"status": "failed", "reason": "no luck"}
        return {"status": "ok", "first_call_s": 1.0, **clock.summary([0.001]), "peak_bytes": 2**20}

    monkeypatch.setattr(process, "run", answer)
    assert bench.run(order(*small)) == 0  # a peer's mistake is not ours, and without ceilings there is no floor
    assert "time jetplane" in tried and "check func-loop" in tried and "time func-loop" not in tried
    out = capsys.readouterr().out
    assert "WRONG: its check in float64: it differs" in out and "1.0 MiB" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--systems", "jaxx"], "there is no system 'jaxx'"),
        (["--device", "tpu"], "--device is 'tpu'; expected cpu, cuda or cuda:0"),
        (["--precision", "tf32"], "--precision tf32 needs --device cuda"),
        (["--peer-fomoh", "/nowhere"], "--peer-fomoh /nowhere holds no fomoh package"),
    ],
)
def test_bad_arguments_say_what_is_wrong(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.run(order(*words))


def test_without_file_locks_processes_come_one_after_the_other(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "AVAILABLE", False)
    with pytest.raises(ValueError, match="--ahead is 2, but there are no file locks here; expected 1"):
        bench.run(order(*small, "--ahead", "2"))
    with turns.Turn() as turn:
        turn.together()
        turn.alone()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", "0"], "argument --k: is '0'; expected a positive whole number"),
        (["--seconds", "nan"], "argument --seconds: is 'nan'; expected a number of seconds"),
        (["--memory-processes=-1"], "argument --memory-processes: is '-1'; expected a whole number"),
    ],
)
def test_arguments_that_are_no_numbers_end_the_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        order(*words)
    assert message in capsys.readouterr().err


def test_a_file_without_results_is_said(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"results": [{}]}')
    with pytest.raises(ValueError, match=r"results\.json holds no results of jetplane bench \(KeyError: 'growth'\)"):
        bench.run(order("--show", str(tmp_path / "results.json")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_said() -> None:
    with pytest.raises(ValueError, match="--device is cuda, but torch finds no CUDA device here"):
        bench.run(order("--device", "cuda"))


def test_the_list_says_what_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(order("--list", "--models", "cnn")) == 0
    out = capsys.readouterr().out
    assert "func-nested-graph" in out and "cannot run: CUDA graphs need a CUDA device" in out
    assert "[cannot run: no checkout of the authors' code was named with --peer-fomoh]" in out
