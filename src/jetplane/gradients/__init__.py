"""Forward gradients: unbiased estimates of a gradient from forward passes, accumulated into ``.grad``."""

from .estimator import ForwardGradient, forward_gradient

__all__ = ["ForwardGradient", "forward_gradient"]
