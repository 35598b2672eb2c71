"""Rules of other packages' autograd.Functions, by name: no package is imported for them.

A Function is transparent where its backward is the derivative of its forward body, written out to save time or memory.
Where the two differ on purpose, the rule is a program whose derivative is that of the backward. Where they differ by
mistake there is none: PEFT's BlockCircularConvolution (0.21) gives its input a gradient that fails torch's gradcheck.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
    "timm.layers.activations_me.SwishAutoFn",
    "timm.layers.activations_me.MishAutoFn",
    "timm.layers.activations_me.HardSigmoidAutoFn",
    "timm.layers.activations_me.HardSwishAutoFn",
    "timm.layers.activations_me.HardMishAutoFn",
    "e3nn.math._soft_unit_step._SoftUnitStep",
)


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
