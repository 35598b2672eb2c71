"""Random kills of random processes over runs of torchrun: what is left of the runs is compared with undisturbed ones.

    python benchmarks/kills.py --kills 200 --out benchmarks/results/kills_cpu.json

Each run trains a network with a batch norm on several processes over gloo, with the journal that they share
(``jetplane.journal.SharedJournal``). One worker after the other, at random, is sent SIGKILL at a random moment:
while it starts, takes up the journal, steps, or writes. torchrun starts all of them again (--max-restarts), and they go
on. At the end of each run

- the parameters of every process, and the buffers of the first, are bit by bit those of a run that nobody disturbed;
- the journal holds every step once, with the bytes of that run's records;
- it is replayed from its first snapshot and compared with its checksums and all its snapshots; every snapshot is read.

With ``--launcher forked`` workers are forked from torchrun's own agent (``elastic_launch``), which has imported torch,
in place of being started anew: the same restarts in a fraction of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F

from jetplane import journal
from jetplane.journal import SharedJournal
from jetplane.optim import FoMoHKD
from jetplane.solvers import SaddleFree
from jetplane_lab.bench.machine import environment

SAMPLES, BATCH = 96, 24
# torchrun hands the addresses of processes that are gone to those that it starts again, unless it is told not to share
# its store with them (pytorch#135712)
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def train(folder: Path, steps: int, seed: int, commit_every: int) -> None:
    """What a worker does: begin, or go on where the journal ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # one that is forked has the agent's own
    rank, size, restart = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    _write(folder / f"pid-{restart}-{rank}", str(os.getpid()))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(seed)
    x, y = torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    opt = FoMoHKD(
        model.parameters(), lr=0.1, k=3, solver=SaddleFree(), seed=seed, process_group=distributed.group.WORLD
    )
    options = {"snapshot_every": 20, "commit_every": commit_every, "digest_every": 10}
    with SharedJournal(folder / "journal", opt, model=model, **options) as kept:
        for step in range(kept.step, steps):
            generator = torch.Generator().manual_seed(step)  # the order of the data is a function of the step
            mine = torch.randperm(SAMPLES, generator=generator)[:BATCH].tensor_split(size)[rank]
            kept.place = {"step": step}
            opt.step(lambda x, y: F.cross_entropy(model(x), y), x[mine], y[mine])
    torch.save(model.state_dict(), folder / f"unfinished-{rank}.pt")
    os.replace(folder / f"unfinished-{rank}.pt", folder / f"final-{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def launch(folder: Path, options: argparse.Namespace, seed: int, commit_every: int) -> subprocess.Popen[bytes]:
    """A run of torchrun."""
    work = [str(Path(__file__)), "--work", str(folder), "--steps", str(options.steps)]
    work += ["--seed", str(seed), "--commit-every", str(commit_every)]
    if options.launcher == "torchrun":
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
        command = [sys.executable, *agent, "--max-restarts=1000000", "--monitor-interval=0.1", *work]
    else:
        command = [sys.executable, *work, "--fork", str(options.processes)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | APART)


def forked(options: argparse.Namespace) -> None:
    """The agent of torchrun, whose workers are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.fork,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        max_restarts=10**6,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(config, train)(options.work, options.steps, options.seed, options.commit_every)


def disturb(
    run: subprocess.Popen[bytes], folder: Path, chance: random.Random, options: argparse.Namespace, kills: int
) -> list[dict[str, Any]]:
    """Kill random workers at random moments until there were so many, or the run is done."""
    done: list[dict[str, Any]] = []
    for restart in range(kills):
        rank = chance.randrange(options.processes)
        path = folder / f"pid-{restart}-{rank}"
        while not path.exists():
            if run.poll() is not None:
                return done
            time.sleep(0.01)
        moment = chance.random() * options.longest
        time.sleep(moment)
        if run.poll() is not None or (folder / f"final-{rank}.pt").exists():  # it may have taken leave
            return done
        length = _length(folder)
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            return done
        done.append({"rank": rank, "seconds_after_start": round(moment, 3), "steps_written": length})
    return done


def _length(folder: Path) -> int:
    """How many steps the journal holds; 0 where it has not begun."""
    try:
        return journal.opened(folder / "journal").last
    except (OSError, ValueError, RuntimeError):
        return 0


def finished(run: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the end of a run."""
    if run.wait(1800):
        raise RuntimeError(f"the run failed with {run.returncode}:\n{(folder / 'log').read_text()[-4000:]}")


def same(folder: Path, other: Path, processes: int) -> dict[str, int]:
    """Raise where a run that was disturbed differs from one that was not. Returns how much was compared."""
    for rank in range(processes):
        ours, theirs = (torch.load(where / f"final-{rank}.pt", weights_only=True) for where in (folder, other))
        for name, value in ours.items():
            if (rank == 0 or "running" not in name) and not torch.equal(value, theirs[name]):
                raise RuntimeError(f"process {rank} ends with another {name}; expected the bits of the other run.")
    one, two = (journal.opened(where / "journal") for where in (folder, other))
    bodies = [[frame.body for frame in each.frames.records] for each in (one, two)]
    if bodies[0] != bodies[1]:
        raise RuntimeError("the journals hold other records; expected each step once, as in the other run.")
    checked = journal.verify(folder / "journal")
    end = journal.replay(folder / "journal")
    last = torch.load(folder / "final-0.pt", weights_only=True)
    if not all(torch.equal(end[name], value) for name, value in last.items()):
        raise RuntimeError("a replay of the journal ends elsewhere; expected the last parameters.")
    return {"steps": checked.steps, "checksums": checked.digests, "snapshots": checked.snapshots}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs."""
    chance = random.Random(options.seed)
    runs: list[dict[str, Any]] = []
    undisturbed: dict[tuple[int, int], Path] = {}
    found: dict[str, Any] = {"environment": environment("cpu", 1), "launcher": options.launcher}
    found |= {"processes": options.processes, "steps_of_a_run": options.steps, "kills": 0, "runs": runs}
    with tempfile.TemporaryDirectory() as base:
        while found["kills"] < options.kills:
            seed, commit_every = len(runs) % 2, (1, 7)[len(runs) // 2 % 2]
            if (seed, commit_every) not in undisturbed:
                quiet = Path(base, f"quiet-{seed}-{commit_every}")
                quiet.mkdir()
                finished(launch(quiet, options, seed, commit_every), quiet)
                undisturbed[seed, commit_every] = quiet
            folder = Path(base, f"run-{len(runs)}")
            folder.mkdir()
            run = launch(folder, options, seed, commit_every)
            try:
                left = min(options.each, options.kills - found["kills"])
                killed = disturb(run, folder, chance, options, left)
                finished(run, folder)
            finally:
                run.kill()
            compared = same(folder, undisturbed[seed, commit_every], options.processes)
            runs.append({"seed": seed, "commit_every": commit_every, **compared, "kills": killed})
            shutil.rmtree(folder)
            found["kills"] += len(killed)
            print(f"run {len(runs)}: {len(killed)} kills, {found['kills']} in all; {compared}", flush=True)
            if options.out:
                _write(options.out, json.dumps(found, indent=1) + "\n")
    return found


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def main() -> None:
    """Disturb runs, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--each", type=int, default=20, help="kills of a run at most (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="of a run (default: %(default)s)")
    parser.add_argument("--longest", type=float, default=8.0, help="seconds from start to kill (default: %(default)s)")
    parser.add_argument("--launcher", choices=["torchrun", "forked"], default="torchrun", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    inner = parser.add_argument_group("for the workers that it launches")
    inner.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    inner.add_argument("--fork", type=int, help=argparse.SUPPRESS)
    inner.add_argument("--commit-every", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fork:
        forked(options)
    elif options.work:
        train(options.work, options.steps, options.seed, options.commit_every)
    else:
        measure(options)


if __name__ == "__main__":
    main()
