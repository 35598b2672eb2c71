"""What one step of training costs with and without a backward pass: counted passes, and bytes of live tensors.

    python benchmarks/avoided_backprop.py --out benchmarks/results/avoided_backprop_cpu.json

The question of "The Cost of Avoiding Backpropagation" (arXiv 2506.21833) on its terms: memory is all that training
holds at once, parameters, gradients and the optimizer's state among it, and the rival is backprop with checkpoints, one
for each block, or for each layer with what follows it up to the next one where a model has no blocks. Nothing
here is a time, so any machine gives the same numbers. Steps are uncompiled; the second of each method is measured, and
of HorizonAdam, which measures its path in some steps, passes are the mean over a round. Workspaces inside an operation
are not seen. The file is written after each row, and what it holds is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from forward_steps import ROWS as MODELS
from forward_steps import checkpointed, losses_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import jetplane as jp
from jetplane import optim
from jetplane_lab.bench.machine import environment
from jetplane_lab.cost import forward_equivalents
from jetplane_lab.data import files
from jetplane_lab.finetuning.encoder import Classifier, Encoder, Shape
from jetplane_lab.live_bytes import live_bytes, step_bytes
from jetplane_lab.methods import Method, scheduled
from jetplane_lab.methods.backprop import Backprop
from jetplane_lab.methods.forward import Horizon, OnForwardGradients

_PARTS = 8  # micro-batches


class Way(NamedTuple):
    """A method: how it is made, and whether it is given one loss for each sample."""

    label: str
    make: Callable[[nn.Module], Method]
    per_sample: bool = False
    backward: bool = False


class MicroBatches(Backprop):
    """Backprop by parts of a batch, one after the other: what the forward-only methods do with theirs."""

    def step(self, loss_fn: Callable[..., Any], *batch: Any, has_aux: bool = False) -> Tensor:
        """Take one step, and return the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in zip(*(one.chunk(_PARTS) for one in batch), strict=True):
            with torch.enable_grad():
                loss = loss_fn(*part) / _PARTS
                loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses).sum()


def _adam(model: nn.Module) -> Method:
    return Backprop(torch.optim.Adam(model.parameters()))


def _micro(model: nn.Module) -> Method:
    return MicroBatches(torch.optim.Adam(model.parameters()))


def _sgd(model: nn.Module) -> Method:
    return Backprop(torch.optim.SGD(model.parameters(), 1e-3))


def _forward(samples: int, **options: Any) -> Callable[[nn.Module], Method]:
    def make(model: nn.Module) -> Method:
        leaves = list(model.parameters())
        return OnForwardGradients(torch.optim.Adam(leaves), jp.ForwardGradient(leaves, samples, **options))

    return make


def _horizon(samples: int, **options: Any) -> Callable[[nn.Module], Method]:
    return lambda model: Horizon(optim.HorizonAdam(model.parameters(), samples=samples, **options))


WAYS = {
    "backprop": Way("backprop, Adam", _adam, backward=True),
    "checkpointed": Way("backprop with checkpoints, Adam", _adam, backward=True),
    "checkpointed-sgd": Way("backprop with checkpoints, SGD", _sgd, backward=True),
    "micro": Way("backprop in 8 micro-batches, Adam", _micro, backward=True),
    "forward-4": Way("ForwardGradient, J = 4, Adam", _forward(4), per_sample=True),
    "forward-4-small": Way("the same, with memory for 16 MiB", _forward(4, memory="16MiB"), per_sample=True),
    "forward-4-whole": Way("the same, all samples and tangents at once", _forward(4, chunk_size=4), per_sample=True),
    "forward-4-chunks": Way("the same, a tangent at a time", _forward(4, chunk_size=1), per_sample=True),
    "horizon-4": Way("HorizonAdam, J = 4", _horizon(4), per_sample=True),
    "horizon-4-small": Way("the same, with memory for 16 MiB", _horizon(4, memory="16MiB"), per_sample=True),
    "fgd": Way("FGD, K = 1", lambda model: optim.FGD(model.parameters(), 1e-6)),
    "fomoh-3d": Way("FoMoH-3D", lambda model: optim.FoMoHKD(model.parameters(), 1e-6, 3)),
    "mezo": Way("MeZO", lambda model: optim.MeZO(model.parameters(), 1e-9)),
    "fzoo": Way("FZOO, K = 8", lambda model: optim.FZOO(model.parameters(), 1e-9)),
}


def minilm() -> nn.Module:
    """Of MiniLM's size, its weights drawn."""
    shape = Shape()
    return Classifier(Encoder(shape), shape.width, 2)


TITLES = {
    "cnn": "CNN, three convolutions, 32 x 32, batch 256",
    "residual": "residual network with group norm, 28 x 28, batch 512",
    "mlp": "MLP with layer norms, batch 512",
    "minilm": "MiniLM, 32 x 64 word pieces",
}
_MAKE = {"minilm": minilm}
_BLOCKS = {"minilm": "Layer"}


def _with_checkpoints(model: nn.Module, block: str) -> None:
    """A checkpoint for each block; of a plain sequence for each layer and what follows, but for the last, of which
    nothing would be saved. A checkpoint around a layer alone keeps its input, which is what the layer keeps anyway."""
    if not isinstance(model, nn.Sequential):
        checkpointed(model, block)
        return
    parts: list[list[nn.Module]] = [[]]
    for module in model:
        if list(module.parameters()) and not isinstance(module, nn.LayerNorm):
            parts.append([])
        parts[-1].append(module)

    def forward(x: Tensor) -> Tensor:
        for number, part in enumerate(parts):
            layers = nn.Sequential(*part)
            x = layers(x) if number == len(parts) - 1 else checkpoint(layers, x, use_reentrant=False)
        return x

    model.forward = forward  # type: ignore[method-assign]


def measured(model_name: str, way_name: str) -> dict[str, Any]:
    """One row: passes and bytes of a step."""
    row, way = MODELS["bert" if model_name == "minilm" else model_name], WAYS[way_name]
    torch.manual_seed(0)
    model = _MAKE.get(model_name, row.make)().train()
    x, y = (one[0] for one in row.batch(1))
    if way_name.startswith("checkpointed"):
        _with_checkpoints(model, _BLOCKS.get(model_name, row.block))
    method = way.make(model)
    losses = losses_of(model)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return losses(x, y) if way.per_sample else losses(x, y).mean()

    def step() -> None:
        with contextlib.nullcontext() if way.backward else jp.forward_only():
            method.step(function, x, y)

    step()
    counted = range(getattr(scheduled(method), "every", 1))
    passes = statistics.mean(forward_equivalents(step, model, x) for _ in counted)
    with torch.no_grad():
        forward = live_bytes(lambda: losses(x, y), model.parameters)
    return {
        "model": model_name,
        "way": way_name,
        "parameters": sum(one.numel() * one.element_size() for one in model.parameters()),
        "forward": forward,  # parameters, and what a pass without autograd holds
        "peak": step_bytes(step, model, method.state_dict),
        "passes": passes,
    }


def table(whole: dict[str, Any]) -> str:
    """In Markdown: for each model a part, memory beside that of checkpointed backprop."""
    lines = []
    for name, title in TITLES.items():
        rows = {row["way"]: row for row in whole["results"] if row["model"] == name}
        if not rows:
            continue
        first = next(iter(rows.values()))
        lines += [
            f"**{title}**: parameters {_mib(first['parameters'])}, with a forward pass {_mib(first['forward'])}",
            "",
        ]
        lines += ["| | passes of a step | peak | over checkpointed backprop |", "| --- | ---: | ---: | ---: |"]
        rival = rows.get("checkpointed")
        for way, row in sorted(rows.items(), key=lambda item: list(WAYS).index(item[0])):
            ratio = "-" if rival is None else f"{row['peak'] / rival['peak']:.2f}"
            lines.append(f"| {WAYS[way].label} | {row['passes']:.1f} | {_mib(row['peak'])} | {ratio} |")
        lines.append("")
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def main(argv: list[str] | None = None) -> int:
    """Measure what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--show", action="store_true", help="the table of the file, and nothing measured")
    arguments = parser.parse_args(argv)
    whole = {"environment": environment("cpu", torch.get_num_threads()), "results": []}
    if arguments.out.exists():
        whole = json.loads(arguments.out.read_text(encoding="utf-8"))
    there = {(row["model"], row["way"]) for row in whole["results"]}
    for model in () if arguments.show else arguments.models:
        for way in arguments.ways:
            if (model, way) not in there:
                whole["results"].append(measured(model, way))
                files.write(arguments.out, (json.dumps(whole, indent=1) + "\n").encode())
                print(f"{model}, {way}: done", file=sys.stderr, flush=True)
    print(table(whole))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
