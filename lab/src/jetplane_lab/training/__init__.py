"""One training loop for all methods: the forward-only ones and torch's optimizers."""

from ..config import Config
from .callbacks import Callback
from .metrics import Metrics, Summary
from .together import train_together
from .trainer import Trainer

__all__ = ["Callback", "Config", "Metrics", "Summary", "Trainer", "train_together"]
