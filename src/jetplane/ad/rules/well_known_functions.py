"""Rules of other packages' autograd.Functions, by name: no package is imported for them.

A Function is transparent where its backward is the derivative of its forward body, written out to save time or memory.
Where the two differ on purpose, the rule is a program whose derivative is that of the backward. Where they differ by
mistake there is none: PEFT's BlockCircularConvolution (0.21) gives its input a gradient that fails torch's gradcheck.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..algebra.families import composite, transparent

transparent(
    "transformers.models.bloom.modeling_bloom.GeLUFunction",
    "transformers.models.sew_d.modeling_sew_d.XSoftmax",
    "transformers.models.sew_d.modeling_sew_d.XDropout",
    "peft.tuners.loha.layer.HadaWeight",
    "peft.tuners.loha.layer.HadaWeightCP",
    "peft.tuners.randlora.layer.UniqueBaseGrad",
    "gpytorch.functions.rbf_covariance.RBFCovariance",
    "gpytorch.functions.matern_covariance.MaternCovariance",
    "gpytorch.variational.variational_strategy.ComputePredictiveUpdates",  # for symmetric matrices, as it is given
    "gpytorch.variational.large_batch_variational_strategy.QuadFormDiagonal",  # and this
    "linear_operator.functions._matmul.Matmul",
    "timm.layers.activations_me.SwishAutoFn",
    "timm.layers.activations_me.MishAutoFn",
    "timm.layers.activations_me.HardSigmoidAutoFn",
    "timm.layers.activations_me.HardSwishAutoFn",
    "timm.layers.activations_me.HardMishAutoFn",
    "e3nn.math._soft_unit_step._SoftUnitStep",
    "entmax.activations.SparsemaxFunction",
    "entmax.activations.Entmax15Function",
    "entmax.losses.SparsemaxLossFunction",
    "entmax.losses.SparsemaxBisectLossFunction",
    "entmax.losses.Entmax15LossFunction",
    "entmax.losses.EntmaxBisectLossFunction",
    "pytorch_tabnet.sparsemax.SparsemaxFunction",
    "pytorch_tabnet.sparsemax.Entmax15Function",
    "torchrl.modules.distributions.utils._SafeTanh",
    "torchrl.modules.distributions.utils._SafeTanhNoEps",
)


class _Context(SimpleNamespace):
    """What a Function's forward hands to its backward, both as parts of the program."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


# -- torchdiffeq ----------------------------------------------------------------------------------------------------


def _assigned(scratch: Tensor, value: Tensor, index: Any) -> Tensor:
    """``scratch`` with an entry replaced; its own body writes through ``.data``, behind autograd's back."""
    scratch = scratch.clone()
    scratch[index] = value
    return scratch


def _stitched(varies: Tensor, value: Tensor) -> Tensor:
    """The value of one tensor with the derivatives of the other."""
    return value.detach() + (varies - varies.detach())


def _solved(
    shapes: Any, func: Any, y0: Any, t: Any, rtol: Any, atol: Any, method: Any, options: Any, *rest: Any
) -> Any:
    """The solver's own steps are differentiated; the adjoint equation, solved backwards, gives the same within its
    tolerance."""
    odeint = sys.modules["torchdiffeq._impl.adjoint"].odeint
    return odeint(func, y0, t, rtol=rtol, atol=atol, method=method, options=options, event_fn=rest[0])


composite("torchdiffeq._impl.rk_common._UncheckedAssign", _assigned)
composite("torchdiffeq._impl.misc._StitchGradient", _stitched)
composite("torchdiffeq._impl.adjoint.OdeintAdjointMethod", _solved)


# -- transformers ---------------------------------------------------------------------------------------------------


def _bounded_sqrt(x: Tensor) -> Tensor:
    """A square root whose slope goes no higher than a bound: where it would, it goes on as a line."""
    bound = sys.modules["transformers.models.recurrent_gemma.modeling_recurrent_gemma"]._MAX_SQRT_GRADIENT
    steep = 4 * x.detach() < bound**-2
    root = torch.where(steep, torch.ones_like(x), x).sqrt()
    return torch.where(steep, x.detach().sqrt() + bound * (x - x.detach()), root)


composite("transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative", _bounded_sqrt)


# -- zuko -----------------------------------------------------------------------------------------------------------


def _integral(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, n: int, *_: Any) -> Tensor:
    """The quadrature between fixed ends, and how the integral varies with them: by f there, as its backward says.

    (b - b0) (f(b) + f(b0)) / 2 has, at b = b0, the slope f(b0) and the curvature f'(b0).
    """
    quadrature = sys.modules["zuko.utils"].GaussLegendre.quadrature
    ends = [(end - end.detach()) * (f(end) + f(end.detach())) / 2 for end in (a, b)]
    return quadrature(f, a.detach(), b.detach(), n) + ends[1] - ends[0]


composite("zuko.utils.GaussLegendre", _integral)


# -- linear_operator --------------------------------------------------------------------------------------------------


def _system(tree: Callable[..., Any], has_left: bool, *args: Any) -> Tensor:
    """A^-1 b as its own solver finds it, Cholesky's or iterations; how it varies is the exact solution's way.

    A step with the matrix there moves no solution, and each one makes another order of how it varies right.
    """
    left, b, *matrix = args if has_left else (None, *args)
    own = sys.modules["linear_operator.functions._solve"].Solve.forward
    fixed = [one.detach() if isinstance(one, Tensor) else one for one in matrix]
    columns = b if b.ndim > 1 else b[:, None]
    x, operator, dense = own(_Context(), tree, False, columns.detach(), *fixed), tree(*matrix), tree(*fixed).to_dense()
    for _ in range(2):
        gap = columns - operator.matmul(x)
        x = x + torch.linalg.solve(dense, gap - gap.detach())
    x = x if left is None else left @ x
    return x if b.ndim > 1 else x[..., 0]


composite("linear_operator.functions._solve.Solve", _system)


# -- entmax ---------------------------------------------------------------------------------------------------------


def _entmax(x: Tensor, alpha: Any = 1.5, dim: int = -1, *rest: Any, **options: Any) -> Tensor:
    """((a x - t)+)^(1/a), a = alpha - 1, where t is found by bisection and varies so that the sum stays one.

    A step with the slope there moves no t that fits, and each one makes another order of how it varies right.
    """
    function = sys.modules["entmax.root_finding"].EntmaxBisectFunction
    power = alpha - 1
    fixed = power.detach() if isinstance(power, Tensor) else power
    p = function.forward(_Context(), x.detach(), fixed + 1, dim, *rest, **options)
    largest, at = p.max(dim, keepdim=True)
    inside, scaled = p > 0, power * x
    t = scaled.detach().gather(dim, at) - largest**fixed

    def result(t: Tensor) -> Tensor:
        return torch.where(inside, torch.where(inside, scaled - t, 1.0) ** (1 / power), 0.0)

    slope = (torch.where(inside, p, 1.0) ** (1 - fixed) / fixed * inside).sum(dim, keepdim=True)
    for _ in range(2):
        total = result(t).sum(dim, keepdim=True)
        t = t + (total - total.detach()) / slope
    return result(t)


composite("entmax.root_finding.EntmaxBisectFunction", _entmax)
composite("entmax.root_finding.SparsemaxBisectFunction", lambda x, *rest, **options: _entmax(x, 2.0, *rest, **options))


# -- slopes that only the backward knows ----------------------------------------------------------------------------


def _by_its_backward(name: str) -> None:
    """An elementwise Function whose slope is its backward's and not its body's.

    (x - x0) (b(x) + b(x0)) / 2 has, at x = x0, the slope b(x0) and the curvature b'(x0).
    """
    module, _, own = name.rpartition(".")

    def body(x: Tensor, *others: Any) -> Tensor:
        function, context = getattr(sys.modules[module], own), _Context()
        value = function.forward(context, x, *others)
        slope = function.backward(context, torch.ones_like(value))
        slope = slope[0] if isinstance(slope, tuple) else slope
        return value.detach() + (x - x.detach()) * (slope + slope.detach()) / 2

    composite(name, body)


_by_its_backward("gpytorch.functions._log_normal_cdf.LogNormalCDF")  # its body is off by 0.002 below -1
