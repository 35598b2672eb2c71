"""A step of MeanFlow whose model FSDP2 shares out: the derivative along the inputs is a part of the target.

The network u(z, t, r) is a mean velocity. Its total derivative along a path, du/dt = du/dz v + du/dt, comes from one
forward pass through ``fully_shard`` (or ``replicate``, with ``--replicate``), in float64 as it is and with parameters
that are gathered in bfloat16; then a backward pass goes through u, and AdamW moves the parts of each process.

Run as it is, the script starts two processes. With torchrun they are there already:
``torchrun --nproc-per-node 2 examples/meanflow_fsdp.py --replicate``.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import jetplane as jp


class Velocity(nn.Module):
    """u(z, t, r), of places z (B, 8) and two times (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 8)) for _ in range(3)
        )

    def forward(self, z: Tensor, t: Tensor, r: Tensor) -> Tensor:
        for block in self.blocks:
            z = z + block(torch.cat([z, t, r], 1))
        return z


def velocity(wrap: str | None, short: bool) -> nn.Module:
    """The network, shared out block by block."""
    torch.manual_seed(0)
    model = Velocity().float() if short else Velocity().double()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if short else MixedPrecisionPolicy()
    if wrap is not None:
        share_out = fully_shard if wrap == "fully_shard" else replicate
        for part in (*model.blocks, model):
            share_out(part, mp_policy=policy)
    return model


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Places on paths from data to noise, velocities there, and times t > r."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    data, noise = torch.randn(2, 16, 8, generator=generator).double()
    r, t = torch.rand(16, 2, generator=generator).double().sort(1).values.split(1, 1)
    return tuple(part.to(dtype) for part in ((1 - t) * data.tanh() + t * noise, t, r, noise - data.tanh()))


def derivative(model: nn.Module, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """u and du/dt along (v, 1, 0)."""
    z, t, r, v = parts
    u, along = jp.jvp(lambda z, t, r: model(z, t, r), (z, t, r), (v, torch.ones_like(t), torch.zeros_like(r)))
    return u, along


def train(wrap: str, short: bool, steps: int, rank: int) -> tuple[float, list[float]]:
    """How far the first derivatives are from those of the whole network alone, and the losses."""
    dtype = torch.float32 if short else torch.float64
    model, alone = velocity(wrap, short), velocity(None, False)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    z, t, r, v = batch(0, rank, torch.float64)
    times = torch.ones_like(t), torch.zeros_like(r)
    _, wanted = torch.func.jvp(lambda z, t, r: alone(z, t, r), (z, t, r), (v, *times))
    off = float((derivative(model, batch(0, rank, dtype))[1] - wanted).detach().abs().max())
    for step in range(steps):
        parts = batch(step, rank, dtype)
        _, t, r, v = parts
        u, along = derivative(model, parts)
        loss = (u - (v - (t - r) * along).detach()).square().mean()
        loss.backward()  # the gradients go through FSDP's own reduction
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return off, losses


def work(rank: int, options: argparse.Namespace, place: str | None) -> None:
    """What each process does."""
    if place is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    wrap = "replicate" if options.replicate else "fully_shard"
    for short, most in ((False, 1e-12), (True, 0.1)):
        off, losses = train(wrap, short, options.steps, rank)
        assert off < most
        if rank == 0:
            kind = "bfloat16" if short else "float64"
            first, last = (sum(some) / len(some) for some in (losses[:10], losses[-10:]))
            print(f"{wrap}, {kind}: off by {off:.0e} at most; mean losses {first:.3f} to {last:.3f}", flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    """Start two processes, or be one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--replicate", action="store_true", help="DDP's layout in place of shards")
    options = parser.parse_args(argv)
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), options, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, os.path.join(folder, "meeting")), nprocs=2)
    print("both processes have ended well")


if __name__ == "__main__":
    main()
