"""Adam on forward gradients whose rate follows the path: the optimizer, and the parts that are its own."""

from .adam import HorizonAdam, HorizonReport

__all__ = ["HorizonAdam", "HorizonReport"]
