"""torch-jet (``pip install jet-for-pytorch``): second-order Taylor mode along each direction, pairs by polarisation.

It takes one tensor and has rules for some fourteen operations, so of our models it runs the one made for it alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..problem import Derivatives, Problem
from .system import Prepared, Setting, System, as_plane, torch_wait

__all__ = ["SYSTEMS"]


def _prepare(problem: Problem, setting: Setting) -> Prepared:
    package = importlib.import_module("jet")
    if not hasattr(package, "rev_jet"):
        raise ImportError(f"the package jet at {package.__file__} is not torch-jet; expected jet-for-pytorch.")
    (name, weight), k = next(iter(problem.constants.items())), problem.k
    v = problem.directions[name]
    second_order = package.jet(lambda w: problem.loss_of({name: w}, problem.x, problem.y), 2, weight)
    zero = torch.zeros_like(weight)
    i, j = torch.triu_indices(k, k, offset=1, device=v.device)

    def along(direction: Tensor) -> Any:
        return second_order(weight, direction, zero)

    def call() -> Derivatives:
        with torch.no_grad():
            # v_i^T H v_j = ((v_i + v_j)^T H (v_i + v_j) - v_i^T H v_i - v_j^T H v_j) / 2
            loss, slope, second = vmap(along)(torch.cat([v, v[i] + v[j]]))
            diagonal = second[:k]
            curvature = diagonal.diag()
            curvature[i, j] = curvature[j, i] = (second[k:] - diagonal[i] - diagonal[j]) / 2
            return Derivatives(loss[0], slope[:k], curvature)

    return Prepared(call, as_plane, torch_wait(setting.device))


def _missing(setting: Setting) -> str | None:
    if importlib.util.find_spec("jet") is None:
        return "torch-jet is not installed (jet-for-pytorch)"
    if setting.model != "tanh-regression":
        return f"torch-jet takes one tensor and lacks rules for the operations of {setting.model}"
    return None


SYSTEMS = (System("torch-jet", "torch-jet: Taylor mode along K(K+1)/2 directions", "peer", _prepare, _missing),)
