"""Forward gradients: unbiased estimates of a gradient from forward passes, accumulated into ``.grad``."""

from .as_function import forward_gradient
from .estimator import ForwardGradient

__all__ = ["ForwardGradient", "forward_gradient"]
