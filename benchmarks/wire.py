"""The bytes that a step of many processes puts on the wire, as the kernel counts them, beside those of DDP.

    python benchmarks/wire.py --out benchmarks/results/wire_cpu.json

The script starts itself again in a network namespace of its own (``unshare -rn``), in which nothing but its processes
talks. They meet over gloo on the loopback device, whose counter of received bytes in /proc/net/dev is read between two
barriers: so all that the processes send is counted, with the headers of TCP and IP and with what the group's store is
told. A step's bytes are the difference of long and short runs over the difference of their steps, so that barriers and
first steps are none of it. Before anything is counted, the parameters of all processes must be the same after the
steps, and have moved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import jetplane as jp
from jetplane import optim

INSIDE = "JETPLANE_WIRE"
SHORT, LONG = 1, 3  # times four steps; the first four are not counted
BATCH, INPUTS, CLASSES = 4, 16, 4
WIDTHS = {10**4: 89, 10**5: 306, 10**6: 990, 10**7: 3152, 10**8: 9990}  # of a hidden layer, by about how many numbers

Make = Callable[[nn.Module, Any], Any]
METHODS: dict[str, Make] = {
    "FGD": lambda model, group: optim.FGD(model.parameters(), 1e-4, process_group=group, check_every=None),
    "FoMoH": lambda model, group: optim.FoMoH(model.parameters(), 0.1, process_group=group, check_every=None),
    "FoMoH-2D": lambda model, group: optim.FoMoHKD(model.parameters(), 0.1, 2, process_group=group, check_every=None),
    "FoMoH-10D": lambda model, group: optim.FoMoHKD(model.parameters(), 0.1, 10, process_group=group, check_every=None),
    "GaussNewtonSearch, K = 16": lambda model, group: optim.GaussNewtonSearch(
        model.parameters(), k=16, process_group=group, check_every=None
    ),
    "HorizonAdam": lambda model, group: optim.HorizonAdam(
        model.parameters(), samples=2, rotate=False, process_group=group, check_every=None
    ),
}
LARGEST = {"FoMoH-10D": 10**6, "GaussNewtonSearch, K = 16": 10**6, "HorizonAdam": 10**6}  # for they take long
DDP = "DistributedDataParallel and SGD"


def network(width: int) -> nn.Module:
    """A perceptron with two hidden layers of this width."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


def received() -> int:
    """The bytes that the loopback device has taken in."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def stepper(method: str, model: nn.Module, group: Any, batch: tuple[Tensor, Tensor]) -> Callable[[], Any]:
    """One step of a method."""
    if method == DDP:
        wrapped = DistributedDataParallel(model, process_group=group)
        sgd = torch.optim.SGD(wrapped.parameters(), 1e-3)

        def step() -> None:
            sgd.zero_grad()
            F.cross_entropy(wrapped(batch[0]), batch[1]).backward()
            sgd.step()

        return step
    opt = METHODS[method](model, group)
    each = isinstance(opt, optim.HorizonAdam | optim.GaussNewtonSearch)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none" if each else "mean")

    return lambda: opt.step(loss, *batch)


def counted(step: Callable[[], Any], steps: int) -> int:
    """The bytes of so many steps, and of two barriers."""
    distributed.barrier()
    before = received()
    distributed.barrier()
    for _ in range(steps):
        step()
    distributed.barrier()
    after = received()
    distributed.barrier()
    return after - before


def work(rank: int, size: int, folder: str, rows: list[tuple[str, int]]) -> None:
    torch.set_num_threads(1)
    # over TCP, as on a cluster: a file would hide the store
    address = "tcp://127.0.0.1:29500"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(BATCH, INPUTS, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)
    for method, about in rows:
        model = network(WIDTHS[about])
        first = [p.detach()[:1].clone() for p in model.parameters()]
        step = stepper(method, model, distributed.group.WORLD, batch)
        for _ in range(4):  # HorizonAdam looks at its path in every fourth
            step()
        short, long = counted(step, 4 * SHORT), counted(step, 4 * LONG)
        _check(model, first)
        if rank == 0:
            row = {
                "method": method,
                "processes": size,
                "parameters": sum(p.numel() for p in model.parameters()),
                "bytes_per_step": (long - short) / (4 * (LONG - SHORT)),
            }
            with open(f"{folder}/rows.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
    distributed.destroy_process_group()


def _check(model: nn.Module, first: list[Tensor]) -> None:
    """Raise unless all processes have the same parameters, and other ones than before."""
    mine = [p.detach() for p in model.parameters()]
    assert any(not torch.equal(p[:1], start) for p, start in zip(mine, first, strict=True)), "nothing has moved"
    for part in mine:
        theirs = part.clone()
        distributed.broadcast(theirs, 0)
        assert torch.equal(theirs, part), "the processes have other parameters"


def measured(size: int, rows: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """The rows of so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (size, folder, rows), size)
        return [json.loads(line) for line in Path(folder, "rows.jsonl").read_text().splitlines()]


def main() -> None:
    """Measure all rows, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--largest", type=int, default=10**7, choices=sorted(WIDTHS), help="number of parameters, about"
    )
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    environment = {"torch": torch.__version__, "jetplane": jp.__version__, "commit": commit}
    environment |= {"device": platform.machine() + " CPU", "backend": "gloo", "batch": str(BATCH)}
    found: list[dict[str, Any]] = []
    for size in options.processes:
        sizes = [about for about in sorted(WIDTHS) if about <= options.largest and (size == 2 or about <= 10**6)]
        rows = [(name, about) for name in [*METHODS, DDP] for about in sizes if about <= LARGEST.get(name, about)]
        found += measured(size, rows)
    for row in found:
        print(row)
    if options.out:
        text = json.dumps({"environment": environment, "results": found}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=options.out.parent, delete=False) as file:
            file.write(text + "\n")
        os.replace(file.name, options.out)


if __name__ == "__main__":
    if os.environ.get(INSIDE) != "yes":
        apart = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(apart, env=os.environ | {INSIDE: "yes"}, check=False).returncode)
    main()
