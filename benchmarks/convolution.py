"""The jet of the paper's second convolution (20 to 50 channels, 5 x 5, 12 x 12 to 8 x 8) on a GPU, all rows at once.

    python benchmarks/convolution.py --out benchmarks/results/convolution_h200.json
    python benchmarks/convolution.py --plane          also the exact plane of the CNN with and without the kernel

For each K: the library's convolutions and sums, eager and compiled; the kernel, with the tiles and plans that it uses
and with others; and, as a ceiling, one matrix product of as many operations. The kernel is compared with float64 before
it is timed, and what does not compile, does not fit or is wrong is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from triton.testing import do_bench

import jetplane as jp
from jetplane.ad.algebra.families import joint_product
from jetplane.ad.algebra.jet import Operand, PairSet
from jetplane.ad.kernels import convolution_kernel
from jetplane.ad.kernels.convolution_triton import DIAGONAL, SQUARE, TRIANGLE, Pattern, Tile, convolve, plan, tile_of
from jetplane.ad.kernels.halves import halves
from jetplane.ad.rules.products import Convolution
from jetplane_lab import models
from jetplane_lab.bench.machine import environment

INPUTS, OUTPUTS, SIZE, WINDOW, OUT = 20, 50, 12, 5, 8
LAYOUT = ([1, 1], [0, 0], [1, 1])
DEVICE = "cuda"
FEW = 129  # images of the comparison with float64: the last tile is not full
TOLERANCE = 2e-3  # of the largest entry of a row, as TF32 rounds factors to 11 significant bits

# other ways to share out the pairs: both terms of a sum in one pass, which reads less and waits more
CHAINED = Pattern((SQUARE.phases[0] + SQUARE.phases[1],), SQUARE.sums)
CHAINED = replace(CHAINED, phases=(tuple(sorted(CHAINED.phases[0])),))
STAR = Pattern(
    (((0, 0, 3), (0, 3, 0), (1, 1, 3), (1, 3, 1), (2, 2, 3), (2, 3, 2), (3, 3, 3)),), ((0, 3), (1, 3), (2, 3), (3, 3))
)

Tiles = Callable[[Pattern], Tile]
Call = Callable[[], Any]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def variants(k: int) -> Iterator[tuple[str, dict[Pattern, Any], Tiles]]:
    """Names, plans and tiles; the first is the one in use."""
    mine = plan(k + 1)
    yield "in use", mine, tile_of
    yield "past the L1 cache", mine, lambda pattern: replace(tile_of(pattern), near=False)
    if k == 3:
        other = {TRIANGLE: ((0, 1, 2),), STAR: ((0, 1, 2, 3),)}
        yield "triangle and star", other, lambda pattern: Tile(depth=64)
    if SQUARE in mine and k > 3:
        other = {CHAINED if pattern is SQUARE else pattern: groups for pattern, groups in mine.items()}
        yield "chained squares", other, lambda pattern: Tile(depth=64)
    yield "4 stages", mine, lambda pattern: replace(tile_of(pattern), stages=4)
    yield "2 stages", mine, lambda pattern: replace(tile_of(pattern), stages=2)
    yield "64 bytes at a time", mine, lambda pattern: Tile(depth=64)
    if set(mine) <= {SQUARE, DIAGONAL}:
        yield "64 positions, 4 warps", mine, lambda pattern: Tile(positions=64, warps=4)


def rows_of(k: int, images: int, second: bool = False) -> Inputs:
    """x, w, bias and second rows as the kernel takes them, of the sizes they have in the network at its start."""
    made = torch.Generator(DEVICE).manual_seed(k)
    x = torch.randn(k + 1, images, SIZE, SIZE, INPUTS, device=DEVICE, generator=made)
    w = torch.randn(k + 1, OUTPUTS, WINDOW, WINDOW, INPUTS, device=DEVICE, generator=made)
    w[0] /= (INPUTS * WINDOW * WINDOW) ** 0.5
    bias = torch.randn(k + 1, OUTPUTS, device=DEVICE, generator=made)
    more = torch.randn(k * (k + 1) // 2, *x.shape[1:], device=DEVICE, generator=made) if second else None
    return x, w, bias, more


def operands(x: Tensor, w: Tensor, second: Tensor | None) -> tuple[Operand, Operand]:
    """The same as jets, channels last in memory."""
    x, w = x.permute(0, 1, 4, 2, 3), w.permute(0, 1, 4, 2, 3)
    more = None if second is None else second.permute(0, 1, 4, 2, 3)
    return Operand(x[0], x[1:], more), Operand(w[0], w[1:], None)


def library(k: int) -> Callable[..., Any]:
    """The present way: all products in one call, and then the sums."""
    lifted = Convolution(*LAYOUT, False, [0, 0], 1)

    def jet(x: Tensor, w: Tensor, bias: Tensor, second: Tensor | None) -> Any:
        out = joint_product(PairSet.all(k), lifted, *operands(x, w, second))
        shape = (-1, 1, OUTPUTS, 1, 1)
        return out.primal + bias[0].reshape(shape[1:]), out.tangent + bias[1:].reshape(shape), out.second

    return jet


def kernel(x: Tensor, w: Tensor, bias: Tensor, second: Tensor | None) -> Any:
    """The kernel's way as a traced program takes it, from the jets on."""
    added = Operand(bias[0], bias[1:], None)
    out = convolution_kernel.convolution_jet(*operands(x, w, second), added, *LAYOUT)
    return out.primal, out.tangent, out.second


def convolved(
    x: Tensor, w: Tensor, bias: Tensor, second: Tensor | None, patterns: Any = None, tiles: Tiles = tile_of
) -> Tensor:
    shape = (x.shape[1], OUT, OUT, OUTPUTS)
    return convolve(*halves(x, w, second), bias, [1, 1], [1, 1], shape, None, patterns, tiles)


def error(made: Call, inputs: Inputs) -> float:
    """The largest difference from float64 in any row, relative to its largest entry."""
    x, w, bias, second = (None if part is None else part.double() for part in inputs)
    out, worst = made(), 0.0

    def product(one: Tensor, other: Tensor) -> Tensor:  # im2col: cuDNN has no float64 worth waiting for
        patches = one.unfold(1, WINDOW, 1).unfold(2, WINDOW, 1).permute(0, 1, 2, 4, 5, 3).flatten(3)
        return patches @ other.flatten(1).T

    for number, (i, j) in enumerate(PairSet.all(x.shape[0]).pairs):
        row = product(x[i], w[j]) + (product(x[j], w[i]) if j else 0)
        row = row + (bias[j] if i == 0 else 0 if second is None else product(second[number - x.shape[0]], w[0]))
        worst = max(worst, float((out[number] - row).abs().max() / row.abs().max()))
    return worst


def gigaflops(k: int, images: int, second: bool = False) -> float:
    """Operations of all products, 2 for each multiplication."""
    products = (k + 1) ** 2 + (k * (k + 1) // 2 if second else 0)
    return products * 2e-9 * images * OUT * OUT * OUTPUTS * INPUTS * WINDOW * WINDOW


def median(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, between events, with a cold L2 cache."""
    return float(do_bench(call, warmup=10, rep=60, return_mode="median"))


Check = Callable[[], float]


def measured(name: str, k: int, flops: float | None, make: Callable[[], Call], check: Check | None) -> dict[str, Any]:
    """One row: time, rate and peak memory of what ``make`` makes, or why there are none."""
    row: dict[str, Any] = {"k": k, "way": name}
    try:
        if check is not None:
            row["error"] = check()
            if not row["error"] <= TOLERANCE:
                return row | {"failed": f"wrong: {row['error']:.1e} from float64"}
        call = make()
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - held) / 2**20)
        row["ms"] = round(median(call), 4)
        if flops is not None:
            row["tflops"] = round(flops / row["ms"], 1)
    except Exception as reason:  # a tile may not compile or not fit: say so and go on
        row["failed"] = f"{type(reason).__name__}: {(str(reason).splitlines() or [''])[0][:160]}"
        torch.cuda.empty_cache()
    return row


def rows(k: int, images: int, ends: float) -> Iterator[dict[str, Any]]:
    """The measurements of one K, the important ones first."""
    flops = gigaflops(k, images)
    inputs, few = rows_of(k, images), rows_of(k, FEW)
    for number, (name, patterns, tiles) in enumerate(variants(k)):
        if number and time.monotonic() > ends:
            yield {"k": k, "way": f"kernel, {name}", "failed": "left out: no time"}
            continue
        x, w, bias, second = inputs
        made = (*halves(x, w, second), bias, [1, 1], [1, 1], (images, OUT, OUT, OUTPUTS))
        once = partial(convolve, *made, patterns=patterns, tiles=tiles)
        check = partial(error, partial(convolved, *few, patterns=patterns, tiles=tiles), few)
        yield measured(f"kernel, {name}", k, flops, lambda once=once: once, check)
        if number == 0:
            yield from others(k, images, inputs, flops)


def others(k: int, images: int, inputs: Inputs, flops: float) -> Iterator[dict[str, Any]]:
    """What the kernel is compared with."""
    present = library(k)
    yield measured("library, eager", k, flops, lambda: partial(present, *inputs), None)
    for name, way in (("library, compiled", present), ("kernel, compiled", kernel)):
        yield measured(name, k, flops, lambda way=way: compiled(way, inputs), None)

    def product() -> Call:
        length = INPUTS * WINDOW * WINDOW
        a = torch.randn(images * OUT * OUT, length, device=DEVICE)
        b = torch.randn(length, OUTPUTS * (k + 1) ** 2, device=DEVICE)
        return lambda: a @ b

    yield measured("one matrix product", k, flops, product, None)
    if k == 3:
        full, few = rows_of(k, images, second=True), rows_of(k, FEW, second=True)
        more = gigaflops(k, images, second=True)
        yield measured("library, compiled, second rows", k, more, lambda: compiled(present, full), None)
        check = partial(error, partial(convolved, *few), few)
        yield measured("kernel, compiled, second rows", k, more, lambda: compiled(kernel, full), check)


def compiled(way: Callable[..., Any], inputs: Inputs) -> Call:
    """A way as a part of a compiled step: traced without values first."""
    given = [part for part in inputs if part is not None]
    trace = make_fx(lambda *parts: way(*parts, *[None] * (4 - len(parts))), tracing_mode="fake")(*given)
    torch._dynamo.reset()
    return partial(torch.compile(trace, fullgraph=True), *given)


def planes(k: int, images: int) -> Iterator[dict[str, Any]]:
    """The exact plane of the whole network, compiled, with the kernel and without."""
    model = models.build("cnn", 0).cuda()
    values = {name: p.detach() for name, p in model.named_parameters()}
    directions = {name: torch.randn(k, *p.shape, device="cuda") for name, p in values.items()}
    x, y = torch.randn(images, 1, 28, 28, device="cuda"), torch.randint(10, (images,), device="cuda")

    def loss(values: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)

    results = {}
    for enabled in (False, True):
        convolution_kernel.ENABLED = enabled
        fast = jp.compile(jp.quadratic)
        results[enabled] = fast(loss, values, directions).curvature
        name = "plane, kernel" if enabled else "plane, library"
        yield measured(name, k, None, lambda fast=fast: partial(fast, loss, values, directions), None)
    apart = (results[True] - results[False]).abs().max() / results[False].abs().max()
    yield {"k": k, "way": "plane, curvatures apart", "error": float(apart)}


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"K={row['k']:<3} {row['way']:<46} {row['failed']}"
    shown = [f"{row[name]:{form}} {unit}" for name, form, unit in COLUMNS if name in row]
    return f"K={row['k']:<3} {row['way']:<46} {'  '.join(shown)}"


COLUMNS = (("ms", "8.4f", "ms"), ("tflops", "6.1f", "TFLOP/s"), ("peak_mib", "6d", "MiB"), ("error", "8.1e", "error"))


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 10, 1])
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=100, help="after which no other tiles are tried")
    parser.add_argument("--plane", action="store_true", help="time the whole network's plane, too (minutes)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; the kernel is for one.")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_grad_enabled(False)
    start, found = time.monotonic(), []
    for number, k in enumerate(options.k):
        share = start + options.seconds * (number + 1) / len(options.k)
        for row in rows(k, options.images, share):
            found.append(row)
            print(line(row), flush=True)
            write(options.out, found, options)
    for k in options.k if options.plane else ():
        for row in planes(k, options.images):
            found.append(row)
            print(line(row), flush=True)
            write(options.out, found, options)
    print(f"{time.monotonic() - start:.0f} s")


def write(out: Path | None, found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """What is known so far, whole or not at all."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    shape = {"images": options.images, "inputs": INPUTS, "outputs": OUTPUTS, "size": SIZE, "window": WINDOW}
    result = {"environment": environment("cuda", torch.get_num_threads()), "shape": shape, "results": found}
    with tempfile.NamedTemporaryFile("w", dir=out.parent, delete=False) as file:
        json.dump(result, file, indent=1)
    os.replace(file.name, out)


if __name__ == "__main__":
    main()
