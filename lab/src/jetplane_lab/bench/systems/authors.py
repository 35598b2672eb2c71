"""The code of the paper's authors (SRI-CSL/fomoh), from a checkout that the user names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..problem import WIDTH, Derivatives, Problem
from .system import Prepared, Setting, System, as_plane, torch_wait

__all__ = ["SYSTEMS", "load", "model_of"]

_MODELS = ("cnn", "logistic-regression", "mlp")
_ACCURACY = 1e-6  # its matrix products keep second derivatives in the default dtype, float32


def source(path: Path) -> Path | None:
    """The folder of a checkout that holds the package, if it is one."""
    return next((folder for folder in (path / "src", path) if (folder / "fomoh" / "hyperdual.py").is_file()), None)


def load(path: Path | None, module: str) -> Any:
    """Import a module of the authors' package."""
    folder = None if path is None else source(path)
    if folder is None:
        raise ImportError(f"there is no fomoh package in {path}; expected a checkout of SRI-CSL/fomoh.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"fomoh.{module}")


def model_of(problem: Problem, path: Path | None) -> tuple[Any, Any]:
    """The problem's model in the authors' classes with the same weights, and its loss."""
    nn = load(path, "nn")
    if problem.name == "cnn":
        model = nn.CNNModel()
    elif problem.name == "mlp":
        model = nn.DenseModel([784, *[WIDTH] * problem.depth, 10])
    else:
        model = nn.LogisticRegressionModel(784, 10)
    model.nn_module_to_htorch_model(problem.model, verbose=False)

    def loss(prediction: Any, target: Any) -> Any:
        rows = prediction if problem.name == "logistic-regression" else prediction.logsoftmax(-1)
        return nn.nll_loss(rows, target)

    return model, loss


def _transposed(rows: Tensor) -> Tensor:
    """Rows of directions in the authors' layout, which keeps the weights of a linear layer as (in, out)."""
    return rows.transpose(1, 2).contiguous() if rows.ndim == 3 else rows


def _prepare(vectorised: bool, problem: Problem, setting: Setting) -> Prepared:
    hyper = load(setting.fomoh, "hyperdual").HyperTensor
    model, loss_of = model_of(problem, setting.fomoh)
    x, y = hyper(problem.x), hyper(problem.y)
    k = problem.k
    rows = [_transposed(d) for d in problem.directions.values()]
    i, j = torch.triu_indices(k, k, device=problem.x.device)
    pairs = list(zip(i.tolist(), j.tolist(), strict=True))
    diagonal = (i == j).nonzero().squeeze(1)

    def one_by_one() -> Any:
        outputs = [loss_of(model(x, [d[a] for d in rows], [d[b] for d in rows]), y) for a, b in pairs]
        first, second = (torch.stack([getattr(o, part) for o in outputs]) for part in ("eps1", "eps1eps2"))
        return outputs[0].real, first, second

    def together() -> Any:
        output = loss_of(model(x[None], [d[i] for d in rows], [d[j] for d in rows]), y[None])
        return output.real.reshape(-1)[0], output.eps1.reshape(-1), output.eps1eps2.reshape(-1)

    def call() -> Derivatives:
        with torch.no_grad():
            value, first, second = together() if vectorised else one_by_one()
            curvature = second.new_zeros(k, k)
            curvature[i, j] = curvature[j, i] = second
            return Derivatives(value, first[diagonal], curvature)

    return Prepared(call, as_plane, torch_wait(setting.device))


def _missing(setting: Setting) -> str | None:
    if setting.fomoh is None:
        return "no checkout of the authors' code was named with --peer-fomoh"
    if setting.model not in _MODELS:
        return f"the authors' code has no {setting.model}"
    return None


SYSTEMS = (
    System(
        "fomoh",
        "the authors' code, one pair after the other",
        "peer",
        lambda problem, setting: _prepare(False, problem, setting),
        _missing,
        accuracy=_ACCURACY,
    ),
    System(
        "fomoh-vectorised",
        "the authors' code, all pairs in one batch",
        "peer",
        lambda problem, setting: _prepare(True, problem, setting),
        _missing,
        accuracy=_ACCURACY,
    ),
)
