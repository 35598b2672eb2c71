"""Equations and geometry: deepxde, pykan, neuraloperator, torchsde, torchcde, torchdyn, geoopt, egnn-pytorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .program import Built, Ids, Program, module

__all__ = ["programs"]

_MANIFOLDS = ("Sphere", "PoincareBall", "Lorentz", "Stiefel", "SymmetricPositiveDefinite", "SphereProjection")


def programs() -> Iterator[Program]:
    """One program for each equation, operator, solver and manifold."""
    for name in ("poisson", "burgers", "wave", "DeepONet", "DeepONetCartesianProd", "PFNN"):
        yield Program(f"deepxde/{name}", partial(_equation, name))
    for name in ("plain", "multiplying", "regularised"):
        yield Program(f"pykan/{name}", partial(_spline_network, name))
    for name in ("FNO",):
        yield Program(f"neuraloperator/{name}", partial(_operator, name))
    for name in ("H1Loss", "LpLoss", "ChannelMLP", "FiniteDiff"):
        yield Program(f"neuraloperator/{name}", partial(_loss_of_functions, name))
    for name in ("euler", "milstein", "srk", "midpoint", "heun", "reversible_heun"):
        yield Program(f"torchsde/{name}", partial(_stochastic, name))
    for name in ("cubic", "linear", "rectilinear"):
        yield Program(f"torchcde/{name}", partial(_controlled, name))
    for name in ("euler", "rk4", "dopri5", "tsit5"):
        yield Program(f"torchdyn/{name}", partial(_dynamics, name))
    for name in _MANIFOLDS:
        yield Program(f"geoopt/{name}", partial(_manifold, name))
    yield Program("egnn-pytorch/EGNN", module("egnn_pytorch.EGNN", {"dim": 8, "m_dim": 4}, (1, 5, 8), (1, 5, 3)))
    yield Program(
        "egnn-pytorch/EGNN_Network",
        module("egnn_pytorch.EGNN_Network", {"num_tokens": 6, "dim": 8, "depth": 2}, Ids(6, (1, 5)), (1, 5, 3)),
    )


def _equation(name: str) -> Built:
    """The residual of an equation at a few points, with derivatives by the places inside the program."""
    import deepxde

    inner = 2 if name in ("burgers", "wave") else 1
    if name == "DeepONet":
        net = deepxde.nn.DeepONet([4, 8, 8], [1, 8, 8], "tanh", "Glorot normal")
        return Built(net, partial(net, (torch.randn(5, 4), torch.rand(5, 1))))
    if name == "DeepONetCartesianProd":
        net = deepxde.nn.DeepONetCartesianProd([4, 8, 8], [1, 8, 8], "tanh", "Glorot normal")
        return Built(net, partial(net, (torch.randn(5, 4), torch.rand(3, 1))))
    if name == "PFNN":
        net = deepxde.nn.PFNN([2, [8, 8], [8, 8], 2], "sin", "Glorot normal")
        return Built(net, partial(net, torch.randn(5, 2)))
    net = deepxde.nn.FNN([inner, 8, 8, 1], "tanh", "Glorot normal")

    def residual() -> Tensor:
        x = torch.linspace(0.1, 0.9, 5 * inner).view(5, inner).requires_grad_()
        with torch.enable_grad():
            y = net(x)
            deepxde.grad.clear()
            if name == "poisson":
                return deepxde.grad.hessian(y, x) + (3 * x).sin()
            first = deepxde.grad.jacobian(y, x, i=0, j=1)
            second = deepxde.grad.hessian(y, x, i=0, j=0)
            if name == "burgers":
                return first + y * deepxde.grad.jacobian(y, x, i=0, j=0) - 0.01 * second
            return deepxde.grad.hessian(y, x, i=1, j=1) - 2 * second

    return Built(net, residual)


def _spline_network(name: str) -> Built:
    import kan

    width: Any = [2, [3, 1], 1] if name == "multiplying" else [2, 3, 1]
    model = kan.KAN(width=width, grid=3, k=3, seed=1, auto_save=False, symbolic_enabled=False).double()
    x = 2 * torch.rand(12, 2) - 1
    if name != "regularised":
        return Built(model, partial(model, x))

    def call() -> Any:
        out = model(x)
        return out, model.get_reg("edge_forward_spline_n", 1.0, 2.0, 0.0, 0.0)

    return Built(model, call)


def _operator(name: str) -> Built:
    from neuralop import models

    options = {"n_modes": (4, 4), "in_channels": 1, "out_channels": 1, "hidden_channels": 6, "n_layers": 2}
    made = getattr(models, name)(**options).double()
    return Built(made, partial(made, torch.randn(2, 1, 8, 8)))


def _loss_of_functions(name: str) -> Built:
    from neuralop.layers.channel_mlp import ChannelMLP
    from neuralop.losses import H1Loss, LpLoss

    net, x, y = ChannelMLP(1, 1, 8, n_layers=2).double(), torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
    if name == "FiniteDiff":
        from neuralop.losses.differentiation import FiniteDiff

        return Built(net, lambda: FiniteDiff(2, h=0.1).laplacian(net(x)[:, 0]))
    measure: Any = {"H1Loss": H1Loss(d=2), "LpLoss": LpLoss(d=2, p=2), "ChannelMLP": None}[name]
    return Built(net, lambda: net(x) if measure is None else measure(net(x), y))


def _stochastic(method: str) -> Built:
    import torchsde

    class Equation(nn.Module):
        noise_type = "diagonal"
        sde_type = "stratonovich" if method in ("midpoint", "heun", "reversible_heun") else "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.spread = nn.Linear(3, 3), nn.Linear(3, 3)

        def f(self, t: Any, y: Tensor) -> Tensor:
            return self.drift(y).tanh()

        def g(self, t: Any, y: Tensor) -> Tensor:
            return 0.3 * self.spread(y).sigmoid()

    made, start = Equation(), torch.randn(2, 3)
    times = torch.linspace(0, 0.5, 3)

    def call() -> Tensor:
        path = torchsde.BrownianInterval(
            t0=0.0, t1=0.5, size=(2, 3), dtype=start.dtype, entropy=7, levy_area_approximation="space-time"
        )
        return torchsde.sdeint(made, start, times, bm=path, method=method, dt=0.1)

    return Built(made, call)


def _controlled(name: str) -> Built:
    import torchcde

    data = torch.cat([torch.linspace(0, 1, 5)[None, :, None].expand(2, 5, 1), torch.randn(2, 5, 1)], 2)
    if name == "cubic":
        path: Any = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(data))
    else:
        more = {"rectilinear": 0} if name == "rectilinear" else {}
        path = torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(data, **more))

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 6)

        def forward(self, t: Any, z: Tensor) -> Tensor:
            return self.net(z).tanh().view(*z.shape[:-1], 3, 2)

    field, start = Field(), torch.randn(2, 3)
    steps = {"method": "rk4", "options": {"step_size": 0.5}}
    return Built(field, lambda: torchcde.cdeint(path, field, start, path.interval, adjoint=False, **steps))


def _dynamics(solver: str) -> Built:
    from torchdyn.numerics import odeint

    net, start = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 2)
    times = torch.linspace(0, 1, 5)
    return Built(net, lambda: odeint(lambda t, x, args=None: net(x), start, times, solver)[1])


def _manifold(name: str) -> Built:
    import geoopt

    made = getattr(geoopt, name)()
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 9)), torch.randn(4, 3)

    def call() -> Any:
        h = net(x)
        if name == "SymmetricPositiveDefinite":
            half = h.view(4, 3, 3)
            p, q = half @ half.mT + torch.eye(3), (half.roll(1, 0) @ half.roll(1, 0).mT) + 2 * torch.eye(3)
            return made.dist(p, q)
        if name == "Stiefel":
            return made.projx(h.view(4, 3, 3)[:, :, :2])
        p, q = made.projx(0.3 * h[:, :4]), made.projx(0.3 * h[:, 4:8])
        return made.dist(p, q), made.expmap(p, made.proju(p, 0.1 * h[:, 3:7])), made.logmap(p, q)

    return Built(net, call)
