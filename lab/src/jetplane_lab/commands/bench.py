"""``jetplane bench``: the projected Hessian and whole steps, timed against the peers found on the machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jetplane_lab.bench import curves as plots
from jetplane_lab.bench import growth, turns, two_commits
from jetplane_lab.bench import printed as table
from jetplane_lab.bench.grids import GRIDS, WHATS, points
from jetplane_lab.bench.machine import environment
from jetplane_lab.bench.problem import MODELS
from jetplane_lab.bench.run import CHECKS, Plan, Progress, Row, describe, measure
from jetplane_lab.bench.steps import STEPS
from jetplane_lab.bench.systems import SYSTEMS, Setting, authors, find
from jetplane_lab.bench.task import PRECISIONS, Point, Task
from jetplane_lab.data import files
from jetplane_lab.devices import AUTO, HELP, device
from jetplane_lab.records import Records

_INTERRUPTED = 130  # as a shell reports it


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Enter the command into the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="time the projected Hessian and whole steps against other ways to compute them",
        description="Time the exact projected Hessian (loss, slope V g, curvature V H V^T), or whole steps of the\n"
        "optimizers, against the peers found on this machine: torch.func, forward-over-reverse products, JAX,\n"
        "torch-jet, and the code of the paper's authors.\n"
        "\n"
        "Every result is compared with double backward first, and a wrong one is not timed. Every measurement has a\n"
        "process of its own. Use an idle machine: what else runs on it is measured as well. With --ahead N, up to N\n"
        "processes prepare and compile at the same time; each measures while the others wait.",
        epilog="examples:\n"
        "  jetplane bench                                    a look, some minutes on two cores\n"
        "  jetplane bench --grid paper --peer-fomoh ~/fomoh  the CNN with K = 1, 3, 10\n"
        "  jetplane bench --grid full --out runs/full        growth with K, batch and depth, with figures\n"
        "  jetplane bench --grid paper --device cuda --systems jetplane jetplane-compiled jax-nested\n"
        "  jetplane bench --what step eager-overhead         whole steps of FoMoH-KD\n"
        "  jetplane bench --show results.json                tables and figures again\n"
        "  jetplane bench --compare main .                   what became slower since the commit main\n"
        "  jetplane bench --list                             the systems, and which of them can run here",
    )
    add = parser.add_argument
    add("--grid", choices=GRIDS, default="quick", help="what is measured (default: %(default)s)")
    add("--what", choices=WHATS, nargs="+", default=["quadratic"], help="(default: quadratic)")
    add("--models", choices=MODELS, nargs="+", metavar="NAME", help=f"in place of the grid's: {', '.join(MODELS)}")
    add("--k", type=_positive, nargs="+", metavar="K", help="directions, in place of the grid's")
    add("--batch", type=_positive, nargs="+", metavar="N", help="in place of the grid's")
    add("--depth", type=_positive, nargs="+", metavar="L", help="hidden layers of the mlp, in place of the grid's")
    add("--precision", choices=PRECISIONS, nargs="+", help="(default: tf32 on CUDA, float32 on the CPU)")
    add("--systems", nargs="+", metavar="NAME", help="only these (--list shows all)")
    add("--device", metavar="NAME", type=device, default=AUTO, help=HELP)
    add("--threads", type=_positive, metavar="N", help="of the CPU (default: all cores that this process may use)")
    add("--repeats", type=_positive, default=7, metavar="N", help="samples at least (default: %(default)s)")
    add("--seconds", type=_seconds, default=0.5, metavar="T", help="of sampling at least (default: %(default)s)")
    add("--check", choices=CHECKS, default="auto", help="against double backward in float64 (default: %(default)s)")
    add("--memory-processes", type=_count, default=1, metavar="N", help="on the CPU, for each system (default: 1)")
    add("--timeout", type=_seconds, default=900.0, metavar="T", help="seconds of a process (default: %(default)s)")
    add(
        "--ahead",
        type=_positive,
        default=1,
        metavar="N",
        help="processes at once; one alone looks at a clock (default: 1)",
    )
    add("--peer-fomoh", type=Path, metavar="PATH", help="checkout of the authors' code (SRI-CSL/fomoh)")
    add("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="(default: %(default)s)")
    add("--resume", action="store_true", help="go on with the measurements in DIR")
    add("--show", type=Path, metavar="FILE", help="tables and figures of a results.json, without measuring")
    add(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="time two commits of this checkout; . is its files as they are",
    )
    add("--rounds", type=_positive, default=5, metavar="N", help="of --compare (default: %(default)s)")
    add(
        "--slower",
        type=_seconds,
        default=1.1,
        metavar="X",
        help="ratio from which --compare fails (default: %(default)s)",
    )
    add("--list", action="store_true", help="show the systems and whether they can run here")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure, and show and write what was found."""
    _check(arguments)
    if arguments.list:
        return _list(arguments)
    if arguments.show is not None:
        return _again(arguments.show)
    if arguments.compare is not None:
        return _compare(arguments)
    threads = arguments.threads or _cores()
    wanted = [point for what in arguments.what for point in _points(arguments, what)]
    if not wanted:
        raise ValueError("nothing is to be measured; expected models that the grid has")
    plan = Plan(
        points=wanted,
        systems=arguments.systems,
        device=arguments.device,
        threads=threads,
        repeats=arguments.repeats,
        seconds=arguments.seconds,
        check=arguments.check,
        memory=arguments.memory_processes,
        timeout=arguments.timeout,
        ahead=arguments.ahead,
        fomoh=arguments.peer_fomoh,
        # compiling every peer takes minutes, which a first look should not
        leave_out=frozenset(n for n, s in SYSTEMS.items() if s.twin) if arguments.grid == "quick" else frozenset(),
    )
    where = environment(arguments.device, threads, arguments.peer_fomoh)
    records = _records(arguments.out / "measurements.jsonl", where, arguments.resume)
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    found = measure(plan, records, _Lines(), _show)
    rows, laws = found.rows, growth.laws(found.rows)
    whole = {
        "environment": where,
        "command": _command(arguments),
        "ceilings": found.ceilings,
        "results": rows,
        "growth": laws,
    }
    files.write(arguments.out / "results.json", (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())
    _draw(rows, laws, arguments.out)
    print(f"results: {arguments.out / 'results.json'}")
    if found.interrupted:
        print("interrupted; --resume goes on with what is missing.", file=sys.stderr)
        return _INTERRUPTED
    wrong = [row for row in rows if row["kind"] == "ours" and row["status"] != "ok"]
    return 1 if wrong else 0


def _compare(arguments: argparse.Namespace) -> int:
    """Time two commits; 1 where one of the jobs became slower."""
    old, new = arguments.compare
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    if top.returncode:
        raise ValueError("--compare needs a checkout of the repository, and this folder is in none")
    with two_commits.trees_of(Path(top.stdout.strip()), (old, new)) as trees:
        found = two_commits.compare(trees, arguments.rounds, arguments.seconds, partial(print, file=sys.stderr))
    for name, row in found["rows"].items():
        before, after = 1e3 * row["old_seconds"], 1e3 * row["new_seconds"]
        print(f"{name:<33} {before:9.3f} ms  {after:9.3f} ms  ratio {row['ratio']:.3f}")
    whole = {"commits": {"old": old, "new": new}, **found}
    files.write(arguments.out / "compare.json", (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())
    worse = two_commits.slower(found, arguments.slower)
    print(f"slower: {', '.join(worse)}" if worse else f"nothing is slower by more than {arguments.slower:g} times")
    return 1 if worse else 0


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(arguments: argparse.Namespace) -> None:
    for name in arguments.systems or ():
        if name not in STEPS:
            find(name)  # says which names there are
    if arguments.ahead > 1 and not turns.AVAILABLE:
        raise ValueError(f"--ahead is {arguments.ahead}, but there are no file locks here; expected 1")
    cuda = arguments.device.startswith("cuda")
    if not cuda and arguments.device != "cpu":
        raise ValueError(f"--device is {arguments.device!r}; expected cpu, cuda or cuda:0")
    if cuda and not torch.cuda.is_available():
        raise ValueError(f"--device is {arguments.device}, but torch finds no CUDA device here")
    if not cuda and "tf32" in (arguments.precision or ()):
        raise ValueError("--precision tf32 needs --device cuda; expected float32 or float64 on the CPU")
    path = arguments.peer_fomoh
    if path is not None and authors.source(path) is None:
        raise ValueError(f"--peer-fomoh {path} holds no fomoh package; expected a checkout of SRI-CSL/fomoh")


def _points(arguments: argparse.Namespace, what: str) -> list[Point]:
    given = arguments.models, arguments.k, arguments.batch, arguments.depth, arguments.precision
    return points(what, arguments.grid, arguments.device.startswith("cuda"), *given)


def _records(path: Path, where: dict[str, Any], resume: bool) -> Records:
    """The measurements of a folder, which are neither overwritten nor mixed with those of another machine or commit."""
    if path.exists():
        if not resume:
            raise ValueError(f"{path} holds measurements; expected --resume to go on with them, or another --out")
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        try:
            before = json.loads(first)["settings"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged in its first line; expected another --out") from None
        for name in {**before, **where}:
            if before.get(name) != where.get(name):
                raise ValueError(
                    f"the measurements in {path} were made with {name} {before.get(name)}, and this is "
                    f"{where.get(name)}; expected the same, or another --out"
                )
    return Records(path, where)


def _command(arguments: argparse.Namespace) -> str:
    """What repeats the run, without paths of this machine."""
    words = ["jetplane", "bench", "--grid", arguments.grid, "--what", *arguments.what, "--device", arguments.device]
    for name in ("models", "k", "batch", "depth", "precision", "systems"):
        values = getattr(arguments, name)
        if values is not None:
            words += [f"--{name}", *(str(value) for value in values)]
    for name in ("repeats", "seconds", "check"):
        words += [f"--{name}", str(getattr(arguments, name))]
    if arguments.threads is not None:
        words += ["--threads", str(arguments.threads)]
    if arguments.ahead > 1:
        words += ["--ahead", str(arguments.ahead)]
    words += ["--memory-processes", str(arguments.memory_processes)]
    if arguments.peer_fomoh is not None:
        words += ["--peer-fomoh", "PATH"]
    return " ".join(words)


def _list(arguments: argparse.Namespace) -> int:
    for title, systems in (("quadratic", SYSTEMS), ("step", STEPS)):
        print(f"{title}:")
        for system in systems.values():
            models = [
                model
                for model in arguments.models or MODELS
                if system.missing(Setting(model, arguments.device, arguments.peer_fomoh)) is None
            ]
            setting = Setting((arguments.models or MODELS)[0], arguments.device, arguments.peer_fomoh)
            state = ", ".join(models) if models else f"cannot run: {system.missing(setting)}"
            print(f"  {system.name:<22} {system.about}  [{state}]")
    return 0


def _again(path: Path) -> int:
    """Show the results of an earlier run, perhaps of another machine, with figures beside them."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        rows, laws, where = whole["results"], whole["growth"], whole["environment"]
        points = dict.fromkeys(Point(*(row[name] for name in Point._fields)) for row in rows)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of jetplane bench ({type(error).__name__}: {error})") from None
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    for point in points:
        _show(point, [row for row in rows if all(row[name] == value for name, value in point._asdict().items())])
    _draw(rows, laws, path.parent)
    return 0


def _draw(rows: list[Row], laws: list[dict[str, Any]], out: Path) -> None:
    if not laws:
        return
    for path in plots.draw(rows, laws, out):
        print(f"figure: {path}")


# -- what is seen while it runs -----------------------------------------------------------------------------------


class _Lines(Progress):
    """A line on the standard error for every process."""

    def begin(self, total: int, seconds: float) -> None:
        self.total = total
        self.told: set[tuple[str, str]] = set()
        print(f"{total} processes, roughly {_duration(seconds)}", file=sys.stderr)

    def skipped(self, point: Point, system: str, why: str) -> None:
        if (system, why) not in self.told:  # once, not for every K
            self.told.add((system, why))
            print(f"  without {system}: {why}", file=sys.stderr)

    def done(self, task: Task, result: dict[str, Any], number: int, left: float) -> None:
        if result["status"] == "ok":
            said = table.milliseconds(result["median_ms"]) if "median_ms" in result else "ok"
        else:
            said = f"{result['status']}: {result['reason']}"
        name = task.does if task.does in ("oracle", "ceilings") else f"{task.does} {task.system}"
        what = "" if task.does == "ceilings" else f" ({describe(task.point)})"
        print(f"[{number}/{self.total}] {name}{what}: {said}; {_duration(left)} left", file=sys.stderr, flush=True)


def _show(point: Point, rows: list[Row]) -> None:
    print(f"\n{describe(point)}\n{table.text(rows)}", flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# -- arguments ----------------------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a positive whole number")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a number of seconds")
    return value
