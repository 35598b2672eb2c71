"""A forward-only training step as one file: exported by ``torch.export``, and run where no backward pass exists.

The step is slope, curvature and move along K directions. Its graph has plain operations alone, none of them of a
backward pass, so a runtime that can do inference can train. Here another process loads the file: it imports torch
alone, and is in inference mode throughout.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import jetplane as jp

SHAPES = [(8, 4), (8,), (3, 8), (3,)]  # of a network with one hidden layer
K = 8

# what the other side needs to know: the order of the inputs, and nothing of derivatives
OTHER_SIDE = """
import sys, torch
assert "jetplane" not in sys.modules
step = torch.export.load(sys.argv[1]).module()
torch.manual_seed(0)
shapes, k, count = eval(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with torch.inference_mode():
    params = [torch.randn(shape) / 2 for shape in shapes]
    for number in range(count):
        x = torch.randn(256, 4)
        *params, loss = step(*params, *(torch.randn(k, *shape) for shape in shapes), x, x[:, :3].argmax(1))
        if number % (count // 3) == 0 or number == count - 1:
            print(f"step {number:3}: loss {float(loss):.3f}")
"""


def step(*inputs: Tensor) -> list[Tensor]:
    """Parameters, directions (K, ...) for each, and a batch; the parameters after the step, and the loss before it."""
    params, directions, (x, y) = list(inputs[:4]), list(inputs[4:8]), inputs[8:]

    def loss(params: list[Tensor]) -> Tensor:
        hidden = functional.linear(x, params[0], params[1]).tanh()
        return functional.cross_entropy(functional.linear(hidden, params[2], params[3]), y)

    plane = jp.quadratic(loss, params, directions)  # slope (K,), curvature (K, K)
    values, vectors = torch.linalg.eigh(plane.curvature)
    move = vectors @ ((vectors.T @ plane.slope) / values.abs().clamp(min=0.1))  # saddle-free Newton in the plane
    move = 0.5 * move / (move.norm() / 0.3).clamp(min=1)
    return [*(p - torch.tensordot(move, v, 1) for p, v in zip(params, directions, strict=True)), plane.loss]


def main(argv: list[str] | None = None) -> None:
    """Export, compare, and train on the other side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args(argv).steps

    torch.manual_seed(0)
    inputs = [torch.randn(shape) / 2 for shape in SHAPES] + [torch.randn(K, *shape) for shape in SHAPES]
    inputs += [torch.randn(256, 4), torch.arange(256) % 3]
    exported = torch.export.export(make_fx(step, tracing_mode="fake")(*inputs), tuple(inputs))
    for ours, theirs in zip(step(*inputs), exported.module()(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    operations = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert not [name for name in operations if "backward" in name]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.pt2"
        torch.export.save(exported, path)
        print(f"{len(operations)} kinds of operations, none of a backward pass; {path.stat().st_size / 1000:.0f} kB")
        command = [sys.executable, "-c", OTHER_SIDE, str(path), str(SHAPES), str(K), str(steps)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    print(said, end="")
    losses = [float(line.split()[-1]) for line in said.splitlines()]
    assert losses[-1] < 0.7 * losses[0]


if __name__ == "__main__":
    main()
