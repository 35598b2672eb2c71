"""Federated training: clients keep their samples, and say a few numbers of them in each step.

All clients draw the same K directions from the number of the step. A client takes each of its samples with probability
q, finds every sample's slopes and curvatures along the directions in one forward pass, clips them sample by sample,
adds them up, and with ``--noise`` adds Gaussian noise from a generator that nobody else knows. The sums go over the
wire, K + K(K+1)/2 numbers whatever the size of the model; everybody solves the same small model and takes the same
step.

With noise the run is differentially private for each sample, also against the other clients: a sample changes what its
client says by at most sqrt(2) in units in which both clipped parts have length 1, so a step is a Poisson-sampled
Gaussian mechanism with the multiplier ``noise``, and dp-accounting (pip install dp-accounting) says what all steps come
to. Generator and noise are those of torch; a deployment wants a secure generator, and noise that is not drawn in
floating point.

Run as it is, the script starts four clients, who train twice: without noise, where the end is compared with one process
that has all the data, and with it. With torchrun the clients are there already.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import jetplane as jp
from jetplane.directions import Gaussian, Plane

CLIENTS, SAMPLES, CLASSES = 4, 500, 4
K, RATE = 6, 0.2  # directions; the share of its samples that a client takes in a step
SLOPE, CURVATURE = 2.0, 8.0  # the lengths to which one sample's parts are clipped
STEP = 0.3  # the longest step
DELTA = 1e-5


def shard(client: int) -> tuple[Tensor, Tensor]:
    """A client's own samples: each client has mostly one class."""
    generator = torch.Generator().manual_seed(100 + client)
    mostly = torch.rand(SAMPLES, generator=generator) < 0.6
    y = torch.where(mostly, client % CLASSES, torch.randint(CLASSES, (SAMPLES,), generator=generator))
    centres = torch.randn(CLASSES, 10, generator=torch.Generator().manual_seed(0)).double()
    return centres[y] + torch.randn(SAMPLES, 10, generator=generator).double(), y


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def directions(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """K directions (K, *S) for each parameter: a function of the step, the same for all clients."""
    drawn = Gaussian(K).draw(Plane(0, step, 0, [p.detach() for p in params], list))
    return [drawn.rows(place, p.detach(), 0, K) for place, p in enumerate(params)]


def sample_parts(model: nn.Module, rows: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample's slopes (B, K) and curvatures (B, K(K+1)/2), from one forward pass."""
    with jp.perturb(list(model.parameters()), rows) as jets:
        losses = functional.cross_entropy(model(x), y, reduction="none")
    jet = jets.of(losses)
    return jet.tangent.T, jet.second.T


def clipped(parts: Tensor, most: float) -> Tensor:
    """Each row scaled down to a length of at most ``most``, in units of ``most``."""
    lengths = parts.norm(dim=1, keepdim=True)
    return parts / torch.maximum(lengths, lengths.new_tensor(most))


def move(model: nn.Module, rows: list[Tensor], total: Tensor) -> None:
    """The step that follows from the sums of all clients. The divisor is public: the expected number of samples."""
    mean = total / (CLIENTS * SAMPLES * RATE)
    slope, upper = SLOPE * mean[:K], CURVATURE * mean[K:]
    curvature = slope.new_zeros(K, K)
    curvature[tuple(torch.triu_indices(K, K))] = upper
    curvature = curvature + curvature.triu(1).T
    step = jp.solvers.SaddleFree(floor=0.3)(jp.Quadratic(slope.new_zeros(()), slope, curvature))
    shares = step.coefficients
    shares = shares * min(1.0, STEP / float(shares.norm()))
    with torch.no_grad():
        for parameter, row in zip(model.parameters(), rows, strict=True):
            parameter += torch.tensordot(shares, row, 1)


class Client:
    """A client's samples, and a generator that nobody else knows."""

    def __init__(self, number: int, secret: int, noise: float) -> None:
        self.x, self.y = shard(number)
        self._hidden = torch.Generator().manual_seed(secret)
        self._noise = noise

    def says(self, model: nn.Module, rows: list[Tensor]) -> Tensor:
        """In a step, (K + K(K+1)/2,): sums over the samples that it takes, with noise."""
        mine = torch.rand(SAMPLES, generator=self._hidden) < RATE
        slopes, curvatures = sample_parts(model, rows, self.x[mine], self.y[mine])
        found = torch.cat([clipped(slopes, SLOPE).sum(0), clipped(curvatures, CURVATURE).sum(0)])
        if self._noise:
            found += self._noise * math.sqrt(2) * torch.randn(len(found), generator=self._hidden, dtype=found.dtype)
        return found


def train(steps: int, clients: Sequence[Client], exchange: Callable[[Tensor], Tensor]) -> nn.Module:
    """Steps of the ``clients`` that are here; ``exchange`` adds up what all of them say."""
    model = network()
    for step in range(steps):
        rows = directions(list(model.parameters()), step)
        first, *others = (client.says(model, rows) for client in clients)
        move(model, rows, exchange(sum(others, first)))
    return model


def over_the_wire(numbers: Tensor) -> Tensor:
    """The sum over all clients, in the order of their numbers."""
    heard = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(heard, numbers)
    total = heard[0]
    for one in heard[1:]:
        total = total + one
    return total


def epsilon(noise: float, steps: int) -> float | None:
    """What all steps cost of privacy, by dp-accounting (add or remove one sample); None where it is not installed."""
    try:
        accounting, rdp = importlib.import_module("dp_accounting"), importlib.import_module("dp_accounting.rdp")
    except ImportError:
        return None
    accountant = rdp.RdpAccountant(range(2, 64))
    accountant.compose(accounting.PoissonSampledDpEvent(RATE, accounting.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(DELTA))


def accuracy(model: nn.Module) -> float:
    """On new samples of all classes."""
    x, y = (torch.cat(parts) for parts in zip(*(shard(50 + client) for client in range(CLIENTS)), strict=True))
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def work(rank: int, options: argparse.Namespace, place: str | None) -> None:
    """What each client does."""
    if place is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=CLIENTS)
    if dist.get_world_size() != CLIENTS:
        raise SystemExit(f"there are {dist.get_world_size()} processes; expected {CLIENTS} clients.")
    numbers = K + K * (K + 1) // 2
    model = train(options.steps, [Client(rank, rank, 0.0)], over_the_wire)
    if rank == 0:
        alone = train(options.steps, [Client(number, number, 0.0) for number in range(CLIENTS)], lambda total: total)
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        distance = max(float((a - b).detach().abs().max()) for a, b in pairs)
        print(f"{numbers} numbers of each client a step; accuracy {accuracy(network()):.2f} at first", flush=True)
        print(f"without noise: {accuracy(model):.2f}; one process with all data differs by {distance:.0e}", flush=True)
        assert distance < 1e-9
    secret = int.from_bytes(os.urandom(7), "big")  # of each client its own
    model = train(options.steps, [Client(rank, secret, options.noise)], over_the_wire)
    if rank == 0:
        cost = epsilon(options.noise, options.steps)
        private = "dp-accounting is not installed" if cost is None else f"epsilon {cost:.2f} at delta {DELTA:.0e}"
        print(f"with noise {options.noise}: {accuracy(model):.2f}; {private}", flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    """Start four clients, or be one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--noise", type=float, default=4.0, help="multiplier of the Gaussian noise (default: 4)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), options, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, os.path.join(folder, "meeting")), nprocs=CLIENTS)
    print("all clients have ended well")


if __name__ == "__main__":
    main()
