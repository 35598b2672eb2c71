"""Second-order forward-mode AD for PyTorch: exact slopes and curvatures of unmodified programs in one forward pass."""

from . import optim
from .ad.compile import compile
from .ad.coverage import Coverage, coverage
from .ad.directions import Directions
from .ad.jet import HyperDual, Jet, Operand, PairSet, Quadratic
from .ad.perturb import perturb
from .ad.register import register
from .ad.transforms import gradient, hessian, hvp, hyperdual, jet, jvp, laplacian, quadratic
from .ad.verify import Verification, verify
from .errors import JetplaneError, MissingRule, OptimizationStalled, UnsupportedProgram
from .optim import minimize

__version__ = "0.1.0"

__all__ = [
    "Coverage",
    "Directions",
    "HyperDual",
    "Jet",
    "JetplaneError",
    "MissingRule",
    "Operand",
    "OptimizationStalled",
    "PairSet",
    "Quadratic",
    "UnsupportedProgram",
    "Verification",
    "compile",
    "coverage",
    "gradient",
    "hessian",
    "hvp",
    "hyperdual",
    "jet",
    "jvp",
    "laplacian",
    "minimize",
    "optim",
    "perturb",
    "quadratic",
    "register",
    "verify",
]
