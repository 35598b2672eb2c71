"""One training loop for all methods: the forward-only ones and torch's optimizers."""

from .callbacks import Callback
from .config import Config
from .metrics import Metrics, Summary
from .together import train_together
from .trainer import Trainer

__all__ = ["Callback", "Config", "Metrics", "Summary", "Trainer", "train_together"]
