"""Second-order forward-mode AD for PyTorch: exact slopes and curvatures of unmodified programs in one forward pass."""

from . import curvature, journal, optim
from .ad.algebra.jet import HyperDual, Jet, Operand, PairSet, Quadratic
from .ad.rules.mark import mark_output
from .ad.run.coverage import Coverage, coverage
from .ad.run.directions import Directions
from .ad.run.perturb import perturb
from .ad.run.transforms import gradient, hessian, hvp, hyperdual, jet, jvp, laplacian, quadratic
from .ad.run.verify import Verification, verify
from .compiler.buckets import Buckets
from .compiler.compile import compile
from .errors import (
    BackwardPass,
    CoupledSamples,
    JetplaneError,
    JournalDamaged,
    JournalRefused,
    LostProcess,
    MissingBoundary,
    MissingRule,
    OptimizationStalled,
    ProcessesDiffer,
    ReplayDiffers,
    UnsupportedProgram,
)
from .gradients import ForwardGradient, forward_gradient
from .gradients.adjoints.registration import register
from .guard import forward_only
from .optim import minimize

__version__ = "0.2.0"

__all__ = [
    "BackwardPass",
    "Buckets",
    "CoupledSamples",
    "Coverage",
    "Directions",
    "ForwardGradient",
    "HyperDual",
    "Jet",
    "JetplaneError",
    "JournalDamaged",
    "JournalRefused",
    "LostProcess",
    "MissingBoundary",
    "MissingRule",
    "Operand",
    "OptimizationStalled",
    "PairSet",
    "ProcessesDiffer",
    "Quadratic",
    "ReplayDiffers",
    "UnsupportedProgram",
    "Verification",
    "compile",
    "coverage",
    "curvature",
    "forward_gradient",
    "forward_only",
    "gradient",
    "hessian",
    "hvp",
    "hyperdual",
    "jet",
    "journal",
    "jvp",
    "laplacian",
    "mark_output",
    "minimize",
    "optim",
    "perturb",
    "quadratic",
    "register",
    "verify",
]
