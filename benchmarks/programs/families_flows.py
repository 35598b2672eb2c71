"""Normalizing flows: zuko, nflows and normflows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .program import Built, Program

__all__ = ["programs"]


def programs() -> Iterator[Program]:
    """The log-density of a small flow of each kind."""
    for name in ("NICE", "MAF", "NSF", "NCSF", "SOSPF", "NAF", "UNAF", "BPF", "GF", "CNF", "RealNVP", "GMM"):
        yield Program(f"zuko/{name}", partial(_zuko, name))
    for name in _NFLOWS:
        yield Program(f"nflows/{name}", partial(_nflows, name))
    for name in (
        "Planar",
        "Radial",
        "MaskedAffine",
        "Spline",
        "AutoregressiveSpline",
        "ActNorm",
        "Invertible",
        "Residual",
    ):
        yield Program(f"normflows/{name}", partial(_normflows, name))


def _zuko(name: str) -> Built:
    import zuko

    options: dict[str, Any] = {} if name == "GMM" else {"transforms": 2}
    if name == "CNF":
        options = {"hidden_features": (4,), "atol": 1e-9, "rtol": 1e-9}
    if name not in ("GMM", "CNF", "GF"):
        options |= {"hidden_features": (16,)}
    flow = getattr(zuko.flows, name)(3, 2, **options)
    x, given = 0.5 * torch.randn(4, 3), torch.randn(4, 2)
    return Built(flow, lambda: flow(given).log_prob(x), approximate=name == "CNF")  # it solves another one backwards


_NFLOWS = (
    *("MaskedAffineAutoregressive", "MaskedPiecewiseLinear", "MaskedPiecewiseQuadratic", "MaskedRationalQuadratic"),
    *("MaskedPiecewiseCubic", "LULinear", "QRLinear", "SVDLinear", "Householder", "BatchNorm", "ActNorm"),
)


def _nflows(name: str) -> Built:
    from nflows import distributions, flows, transforms

    bounded = {"tails": "linear", "tail_bound": 3.0, "num_bins": 4}
    made: dict[str, Any] = {
        "MaskedAffineAutoregressive": lambda: transforms.MaskedAffineAutoregressiveTransform(3, 16),
        "MaskedPiecewiseLinear": lambda: transforms.MaskedPiecewiseLinearAutoregressiveTransform(4, 3, 16),
        "MaskedPiecewiseQuadratic": lambda: transforms.MaskedPiecewiseQuadraticAutoregressiveTransform(
            3, 16, **bounded
        ),
        "MaskedRationalQuadratic": lambda: transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
            3, 16, **bounded
        ),
        "MaskedPiecewiseCubic": lambda: transforms.MaskedPiecewiseCubicAutoregressiveTransform(4, 3, 16),
        "LULinear": lambda: transforms.LULinear(3),
        "QRLinear": lambda: transforms.QRLinear(3, 2),
        "SVDLinear": lambda: transforms.SVDLinear(3, 2),
        "Householder": lambda: transforms.HouseholderSequence(3, 2),
        "BatchNorm": lambda: transforms.BatchNorm(3),
        "ActNorm": lambda: transforms.ActNorm(3),
    }
    unit = name in ("MaskedPiecewiseLinear", "MaskedPiecewiseCubic")  # defined on the unit cube
    x = torch.rand(4, 3) if unit else 0.5 * torch.randn(4, 3)
    base = distributions.StandardNormal([3])
    flow = flows.Flow(made[name](), base).double()
    flow.eval() if name == "BatchNorm" else flow.train()
    with torch.no_grad():
        flow.log_prob(x)
    return Built(flow, partial(flow.log_prob, x))


def _normflows(name: str) -> Built:
    import normflows as nf

    def net(out: int) -> nn.Module:
        return nf.nets.MLP([4, 8, out], init_zeros=False)

    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    made: dict[str, Any] = {
        "Planar": lambda: nf.flows.Planar((4,)),
        "Radial": lambda: nf.flows.Radial((4,)),
        "MaskedAffine": lambda: nf.flows.MaskedAffineFlow(mask, net(4), net(4)),
        "Spline": lambda: nf.flows.CoupledRationalQuadraticSpline(4, 1, 8),
        "AutoregressiveSpline": lambda: nf.flows.AutoregressiveRationalQuadraticSpline(4, 1, 8),
        "ActNorm": lambda: nf.flows.ActNorm((4,)),
        "Invertible": lambda: nf.flows.InvertibleAffine(4),
        "Residual": lambda: nf.flows.Residual(nf.nets.LipschitzMLP([4, 8, 4]), reduce_memory=False),
    }
    flow = made[name]().double().train(name == "Residual")  # which cuts its graph in eval mode
    x = 0.5 * torch.randn(5, 4)
    call = flow.forward if name in ("Planar", "Radial") else flow.inverse
    with torch.no_grad():
        call(x)
    return Built(flow, partial(call, x))
