"""gpytorch, torchdiffeq and e3nn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .program import Built, Program

__all__ = ["programs"]


def programs() -> Iterator[Program]:
    """Kernels and likelihoods of gpytorch, solvers of torchdiffeq, layers of e3nn."""
    for name in ("RBFKernel", "MaternKernel", "PeriodicKernel", "LinearKernel", "RQKernel", "CosineKernel"):
        yield Program(f"gpytorch/{name}", partial(_process, name))
    for name in ("PolynomialKernel", "PiecewisePolynomialKernel", "SpectralMixtureKernel"):
        yield Program(f"gpytorch/{name}", partial(_process, name))
    for name in ("Bernoulli", "Student"):
        yield Program(f"gpytorch/variational.{name}", partial(_variational, name))
    for method in ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun", "euler", "midpoint", "rk4", "heun3"):
        yield Program(f"torchdiffeq/{method}", partial(_equation, method, False))
    for method in ("explicit_adams", "implicit_adams"):
        yield Program(f"torchdiffeq/{method}", partial(_equation, method, False))
    for method in ("rk4", "dopri5"):
        yield Program(f"torchdiffeq/adjoint.{method}", partial(_equation, method, True))
    for name in ("Linear", "FullyConnectedTensorProduct", "NormActivation", "Gate", "BatchNorm", "SphericalHarmonics"):
        yield Program(f"e3nn/{name}", partial(_equivariant, name))
    for name in (
        "FullyConnectedNet",
        "ElementwiseTensorProduct",
        "Dropout",
        "S2Activation",
        "SoftOneHot",
        "SoftUnitStep",
    ):
        yield Program(f"e3nn/{name}", partial(_equivariant, name))


# -- gpytorch -------------------------------------------------------------------------------------------------------


def _process(name: str) -> Built:
    """An exact Gaussian process: the marginal likelihood, in training."""
    import gpytorch

    x, y = torch.linspace(0, 1, 7)[:, None], torch.randn(7)
    made: dict[str, dict[str, Any]] = {
        "PolynomialKernel": {"power": 2},
        "SpectralMixtureKernel": {"num_mixtures": 2},
        "MaternKernel": {"nu": 2.5},
    }
    kernel = getattr(gpytorch.kernels, name)(**made.get(name, {}))

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, at: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(at), self.kernel(at))

    model = Process().double().train()
    score = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return Built(model, lambda: score(model(x), y))


def _variational(name: str) -> Built:
    import gpytorch

    x = torch.linspace(0, 1, 7)[:, None]
    y = (torch.rand(7) > 0.5).double() if name == "Bernoulli" else torch.randn(7)

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            chosen = gpytorch.variational.CholeskyVariationalDistribution(4)
            super().__init__(gpytorch.variational.VariationalStrategy(self, x[:4].clone(), chosen))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            kinds = gpytorch.likelihoods
            self.likelihood = kinds.BernoulliLikelihood() if name == "Bernoulli" else kinds.StudentTLikelihood()

        def forward(self, at: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(at), self.kernel(at))

    model = Process().double().train()
    model(x)  # the first call sets the variational mean
    score = gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=7)
    return Built(model, lambda: score(model(x), y))


# -- torchdiffeq ----------------------------------------------------------------------------------------------------


def _equation(method: str, adjoint: bool) -> Built:
    import torchdiffeq

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, t: Any, y: Any) -> Any:
            return self.net(y) + 0.1 * t

    field = Field()
    start, times = torch.randn(3, 2), torch.linspace(0, 1, 4)
    solve = torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint
    exactly = {"rtol": 1e-10, "atol": 1e-12} if adjoint and method == "dopri5" else {}
    options = {"step_size": 0.01} if adjoint and method == "rk4" else None  # the adjoint's error falls with its steps
    call = lambda: solve(field, start, times, method=method, options=options, **exactly)  # noqa: E731
    return Built(field, call, approximate=adjoint)  # it solves another equation backwards


# -- e3nn -----------------------------------------------------------------------------------------------------------


def _equivariant(name: str) -> Built:
    from e3nn import math, o3
    from e3nn import nn as layers

    kinds = o3.Irreps("4x0e + 2x1o")
    x = torch.randn(5, kinds.dim)
    first = o3.Linear(kinds, kinds)
    made: dict[str, Any] = {
        "Linear": lambda: (o3.Linear(kinds, "3x0e + 2x1o"), lambda m, h: m(h)),
        "FullyConnectedTensorProduct": lambda: (
            o3.FullyConnectedTensorProduct(kinds, kinds, "2x0e + 1x1o"),
            lambda m, h: m(h, h),
        ),
        "ElementwiseTensorProduct": lambda: (o3.ElementwiseTensorProduct(kinds, kinds), lambda m, h: m(h, h)),
        "NormActivation": lambda: (layers.NormActivation(kinds, torch.sigmoid), lambda m, h: m(h)),
        "Gate": lambda: (layers.Gate("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o"), lambda m, h: m(h)),
        "BatchNorm": lambda: (layers.BatchNorm(kinds, momentum=0.0), lambda m, h: m(h)),
        "Dropout": lambda: (layers.Dropout(kinds, 0.3), lambda m, h: m(h)),
        "FullyConnectedNet": lambda: (layers.FullyConnectedNet([10, 8, 4], torch.tanh), lambda m, h: m(h)),
        "S2Activation": lambda: (layers.S2Activation("0e + 1o", torch.tanh, 6), lambda m, h: m(h[:, 3:7])),
        "SphericalHarmonics": lambda: (nn.Identity(), lambda m, h: o3.spherical_harmonics([0, 1, 2], h[:, 4:7], True)),
        "SoftOneHot": lambda: (
            nn.Identity(),
            lambda m, h: math.soft_one_hot_linspace(h[:, 0], -3, 3, 6, "smooth_finite", cutoff=True),
        ),
        "SoftUnitStep": lambda: (nn.Identity(), lambda m, h: math.soft_unit_step(h)),
    }
    layer, use = made[name]()
    model = nn.ModuleList([first, layer]).train()
    return Built(model, lambda: use(layer, first(x)))
