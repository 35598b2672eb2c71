"""The floor of a pass: operations and bytes that cannot be avoided, over what the machine reaches.

Operations are those of jetplane's eager pass, counted by ``torch.utils.flop_counter`` (products and convolutions).
Bytes are parameters, directions and data read once, and, for every layer with parameters but the first, its input
written once and read once in all rows: value, K tangents, and K(K+1)/2 second rows where there are any. All else, such
as activation functions, pooling and the loss, is taken to be fused into its neighbours, so this is a floor and no
estimate. Ceilings are measured in the same run with a large copy and a large matrix product at the same precision.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .problem import Problem
from .systems import Setting, find
from .tolerances import dtype

__all__ = ["ceilings", "count", "floor_ms"]

# Functions that leave the second row of a linear function zero.
_PIECEWISE_LINEAR = (nn.ReLU, nn.MaxPool2d, nn.Flatten)


def count(problem: Problem, device: str) -> dict[str, int]:
    """Operations and bytes of one pass."""
    call = find("jetplane").prepare(problem, Setting(problem.name, device, None)).call
    with FlopCounterMode(display=False) as counter:
        call()
    return {"flops": counter.get_total_flops(), "bytes": _bytes(problem)}


def _bytes(problem: Problem) -> int:
    k = problem.k
    inputs: list[tuple[int, bool]] = []  # entries of a layer's input, and whether it has second rows
    curved = [False]

    def before(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if any(True for _ in module.parameters(recurse=False)):
            inputs.append((arguments[0].numel(), curved[0]))
            curved[0] = curved[0] or len(inputs) > 1
        elif not isinstance(module, _PIECEWISE_LINEAR) and inputs:
            curved[0] = True

    leaves = [module for module in problem.model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_pre_hook(before) for module in leaves]
    try:
        with torch.no_grad():
            problem.loss()
    finally:
        for handle in handles:
            handle.remove()
    rows = {False: 1 + k, True: 1 + k + k * (k + 1) // 2}
    parameters = sum(p.numel() for p in problem.params.values())
    activations = sum(2 * entries * rows[second] for entries, second in inputs[1:])
    return problem.x.element_size() * ((1 + k) * parameters + problem.x.numel() + activations)


def ceilings(precision: str, device: str) -> dict[str, float]:
    """Bytes a second of a large copy (read and written), and operations a second of a large matrix product."""
    cuda = device.startswith("cuda")
    entries = 2**28 if cuda else 2**25
    source = torch.ones(entries, dtype=dtype(precision), device=device)
    target = torch.empty_like(source)
    copy = _seconds(lambda: target.copy_(source), cuda)
    size = 8192 if cuda else 2048
    a, b = (torch.randn(size, size, dtype=dtype(precision), device=device) for _ in range(2))
    product = _seconds(lambda: a @ b, cuda)
    return {
        "bytes_per_s": 2 * source.numel() * source.element_size() / copy,
        "flops_per_s": 2 * size**3 / product,
    }


def _seconds(call: Any, cuda: bool) -> float:
    times = []
    for repeat in range(10):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        if repeat > 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def floor_ms(counted: dict[str, int], machine: dict[str, float]) -> float:
    """Milliseconds below which no pass with these counts can be: arithmetic and traffic at once, the slower of both.

    Example:
        >>> floor_ms({"flops": 4, "bytes": 1}, {"flops_per_s": 1000.0, "bytes_per_s": 1000.0})
        4.0
    """
    return 1e3 * max(counted["flops"] / machine["flops_per_s"], counted["bytes"] / machine["bytes_per_s"])
