"""Laplacians of a network beside other ways to compute them, in one run on one machine.

    python benchmarks/laplacians.py --out benchmarks/results/laplacians_cpu.json

A tanh network of 50 inputs, widths 768, 768, 512, 512 and one output, as in the measurements of torch-jet: the sum of
its second derivatives by its inputs at each point of a batch. What a system gives is compared in float64 with the trace
of the Hessian by double backward, then it is timed in float32, in a process of its own. Peak memory is by torch's
allocator, above what was there; of JAX it is not known.

torch-jet is found through --peer-torch-jet, a checkout; folx (JAX) where it is installed. What is not there is left out
with a message.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import jetplane as jp
from jetplane_lab.bench.clock import first_call, sample, summary
from jetplane_lab.bench.machine import environment
from jetplane_lab.bench.peak import CudaPeak, tensor_peak

INPUTS, WIDTHS = 50, (768, 768, 512, 512)
Laplacian = Callable[[], Tensor]


def network(dtype: torch.dtype, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for size, width in zip((INPUTS, *WIDTHS), WIDTHS, strict=False):
        layers += [nn.Linear(size, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 1)).to(device, dtype).requires_grad_(False)


# -- systems: each makes a function without arguments of (network, points) ---------------------------------------------


def jetplane(net: nn.Module, x: Tensor) -> Laplacian:
    return lambda: jp.laplacian(lambda x: net(x).squeeze(-1), x, batch_ndim=1)


def jetplane_compiled(net: nn.Module, x: Tensor) -> Laplacian:
    fast = jp.compile(jp.laplacian)
    return lambda: fast(lambda x: net(x).squeeze(-1), x, batch_ndim=1)


def by_backprop(net: nn.Module, x: Tensor) -> Laplacian:
    """The trace of the Hessian by forward over reverse, sample by sample under vmap."""
    each = torch.func.vmap(lambda x: torch.func.hessian(lambda x: net(x).squeeze(-1))(x).trace())
    return lambda: each(x)


def by_backprop_compiled(net: nn.Module, x: Tensor) -> Laplacian:
    call = torch.compile(lambda x: by_backprop(net, x)())
    return lambda: call(x)


def torch_jet(net: nn.Module, x: Tensor) -> Laplacian:
    """Taylor mode of torch-jet, with sums pulled up as far as they go."""
    from jet.laplacian import laplacian
    from jet.simplify import simplify

    one = simplify(laplacian(lambda x: net(x).squeeze(-1), x[0]), x[0], pull_sum=True)
    each = torch.func.vmap(lambda x: one(x)[2])
    return lambda: each(x)


def torch_jet_compiled(net: nn.Module, x: Tensor) -> Laplacian:
    call = torch.compile(torch_jet(net, x))
    return lambda: call()


def folx(net: nn.Sequential, x: Tensor) -> Laplacian:
    """The forward Laplacian of folx, compiled by JAX."""
    import jax
    from folx import forward_laplacian

    jax.config.update("jax_enable_x64", x.dtype == torch.float64)
    pairs = [(jax.numpy.asarray(m.weight.cpu().numpy()), jax.numpy.asarray(m.bias.cpu().numpy())) for m in net[::2]]

    def function(x: Any) -> Any:
        *hidden, (weight, bias) = pairs
        for w, b in hidden:
            x = jax.numpy.tanh(w @ x + b)
        return (weight @ x + bias)[0]

    call = jax.jit(jax.vmap(lambda x: forward_laplacian(function)(x).laplacian))
    points = jax.numpy.asarray(x.cpu().numpy())

    def run() -> Tensor:
        return torch.from_numpy(jax.device_get(call(points)).copy())

    return run


SYSTEMS: dict[str, Callable[[Any, Tensor], Laplacian]] = {
    "jetplane": jetplane,
    "jetplane, compiled": jetplane_compiled,
    "torch.func": by_backprop,
    "torch.func, compiled": by_backprop_compiled,
    "torch-jet": torch_jet,
    "torch-jet, compiled": torch_jet_compiled,
    "folx": folx,
}


# -- one system, in a process of its own -------------------------------------------------------------------------------


def checked(system: str, device: str) -> float:
    """The largest error in float64, relative to the largest number."""
    net = network(torch.float64, device)
    x = torch.randn(3, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    traces = []
    for point in x:
        leaf = point.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(leaf).squeeze(), leaf, create_graph=True)
        traces.append(sum(torch.autograd.grad(slope[i], leaf, retain_graph=True)[0][i] for i in range(INPUTS)))
    wanted = torch.stack(traces).detach()  # type: ignore[arg-type]
    error = float((SYSTEMS[system](net, x)().to(device) - wanted).abs().max() / wanted.abs().max())
    if not error < 1e-10:
        raise SystemExit(f"{system} is wrong: an error of {error:.1e}; expected less than 1e-10.")
    return error


def measured(system: str, batch: int, device: str, seconds: float) -> dict[str, Any]:
    """Error, first call, times and peak of one system."""
    error = checked(system, device)
    cuda = device.startswith("cuda")
    net = network(torch.float32, device)
    x = torch.randn(batch, INPUTS, generator=torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        held = CudaPeak() if cuda else None  # before graphs are recorded: what they run in is not seen when they replay
        call = SYSTEMS[system](net, x)
        wait = (lambda _: torch.cuda.synchronize()) if cuda else (lambda _: None)
        _, first = first_call(call, wait)
        times, _ = sample(call, wait, 7, seconds)
        peak: int | None = None
        if system != "folx":
            peak = tensor_peak(call) if held is None else held.read()
    return {"system": system, "error": error, "first_s": round(first, 2), **summary(times), "peak_bytes": peak}


# -- all of them -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="of sampling at least")
    parser.add_argument("--peer-torch-jet", type=Path, help="a checkout of torch-jet")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer_torch_jet is not None:
        sys.path.insert(0, str(given.peer_torch_jet))
    torch.set_num_threads(given.threads)
    if given.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    if given.one is not None:
        print(json.dumps(measured(given.one, given.batch, given.device, given.seconds)))
        return
    rows = []
    for system in given.systems:
        words = [sys.executable, __file__, "--one", system, "--batch", str(given.batch), "--device", given.device]
        words += ["--threads", str(given.threads), "--seconds", str(given.seconds)]
        words += [] if given.peer_torch_jet is None else ["--peer-torch-jet", str(given.peer_torch_jet)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"{system}: left out, {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        peak = rows[-1]["peak_bytes"]
        held = "" if peak is None else f", {peak / 2**20:.0f} MiB"
        print(f"{system}: {rows[-1]['median_ms']:.2f} ms{held}, error {rows[-1]['error']:.0e}", flush=True)
    if given.out is not None:
        command = {"batch": given.batch, "inputs": INPUTS, "widths": WIDTHS}
        found = {"environment": environment(given.device, given.threads), **command, "results": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
