"""Second-order forward-mode AD for PyTorch: exact slopes and curvatures of unmodified programs in one forward pass."""

from .ad.directions import Directions
from .ad.jet import HyperDual, Jet, PairSet, Quadratic
from .ad.perturb import perturb
from .ad.register import register
from .ad.transforms import gradient, hessian, hvp, hyperdual, jet, jvp, laplacian, quadratic
from .errors import JetplaneError, MissingRule, UnsupportedProgram

__version__ = "0.1.0"

__all__ = [
    "Directions",
    "HyperDual",
    "Jet",
    "JetplaneError",
    "MissingRule",
    "PairSet",
    "Quadratic",
    "UnsupportedProgram",
    "gradient",
    "hessian",
    "hvp",
    "hyperdual",
    "jet",
    "jvp",
    "laplacian",
    "perturb",
    "quadratic",
    "register",
]
