"""Two processes take each step together: numbers go over the wire, and no gradients. The same step as by one process.

Run as it is, the script starts both. With torchrun the processes are there already:
``torchrun --nproc-per-node 2 examples/many_processes.py``.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import jetplane as jp


def train(steps: int, group: dist.ProcessGroup | None) -> tuple[list[float], nn.Module]:
    """FoMoH-KD on this process's part of each batch."""
    torch.manual_seed(0)  # the same initial values everywhere: they are compared
    rank, world = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    solver = jp.solvers.SaddleFree()
    optimizer = jp.optim.FoMoHKD(model.parameters(), lr=0.5, k=4, solver=solver, clip=0.5, process_group=group)
    losses, generator = [], torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 4, dtype=torch.float64, generator=generator)[rank::world]
        loss = optimizer.step(lambda x, y: functional.cross_entropy(model(x), y), x, x[:, :3].argmax(1))
        losses.append(float(loss))
    return losses, model


def work(rank: int, steps: int, place: str | None) -> None:
    """What each process does; the first one has run by itself before, and compares."""
    first = int(os.environ.get("RANK", rank)) == 0
    alone, other = train(steps, None) if first else ([], nn.Identity())
    if place is None:  # torchrun has said who is who
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    losses, model = train(steps, dist.group.WORLD)
    if first:
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        distance = max(float((a - b).detach().abs().max()) for a, b in pairs)
        print(
            f"{dist.get_world_size()} processes: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end", flush=True
        )
        print(f"one process: {alone[-1]:.4f}; the parameters differ by {distance:.0e} at most", flush=True)
        assert distance < 1e-9
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    """Start two processes, or be one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(argv).steps
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), steps, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (steps, os.path.join(folder, "meeting")), nprocs=2)
    print("both processes have ended well")


if __name__ == "__main__":
    main()
