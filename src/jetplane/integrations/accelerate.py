"""jetplane's optimizers under accelerate: gradient accumulation, mixed precision, schedulers, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gradients import ForwardGradient
from . import needed
from .micro_batches import MicroBatch, MicroBatches, report_numbers
from .sample_losses import batch_size

needed("accelerate")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

__all__ = ["ForwardOptimizer", "report_numbers"]


class ForwardOptimizer(AcceleratedOptimizer):
    r"""An optimizer whose steps need no backward pass, for ``accelerator.prepare``.

    ``step(closure)`` or ``step(function, *batch)`` in place of ``accelerator.backward(loss)`` and ``step()`` returns
    the loss. Inside ``accelerator.accumulate(model)`` the parts of a batch are kept, and the step is taken with the
    last one: it returns the loss of the batch, and the earlier calls return those of their parts. Mixed precision is
    accelerate's own, in the model that it prepared.

    ``optimizer`` is one of `jetplane.optim`, or any other one of torch with forward gradients: ``estimate`` is by
    default a `jetplane.ForwardGradient` of its parameters, and ``clip`` bounds the norm of that gradient. Where the
    losses of single samples are needed they are read off a mean
    (:func:`~jetplane.integrations.sample_losses.losses_of_samples`), or the closure returns them.

    Make it after the ``Accelerator``, and before ``prepare``. With several processes, give the optimizer a
    ``process_group``; its model is prepared with ``evaluation_mode=True``, for there are no gradients to be averaged.

    Example:
        >>> from accelerate import Accelerator
        >>> from jetplane.optim import FoMoHKD
        >>> accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 3)
        >>> optimizer = ForwardOptimizer(FoMoHKD(model.parameters(), lr=0.5, k=2))
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> x, y = torch.randn(8, 4), torch.arange(8) % 3
        >>> with accelerator.accumulate(model):
        ...     loss = optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
    """

    _is_accelerate_prepared = True  # prepare leaves it as it is, but for remembering it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        estimate: ForwardGradient | None = None,
        *,
        clip: float | None = None,
    ) -> None:
        if clip is not None and not clip > 0:
            raise ValueError(f"clip is {clip!r}; expected a positive norm or None.")
        self.parts = MicroBatches(optimizer, estimate)
        if clip is not None and not self.parts.gradients:
            raise ValueError(
                f"clip is {clip}; expected it as an argument of {type(optimizer).__name__}, which has one."
            )
        self.clip = clip
        super().__init__(optimizer)

    @property
    def report(self) -> Any:
        """What the last step found and did."""
        return self.optimizer.report

    def averaged(self) -> Any:
        """A context with the averaged parameters of `HorizonAdam` in the model; for others it does nothing."""
        return self.parts.averaged()

    def step(self, closure: Callable[..., Any] | None = None, *batch: Any) -> Tensor | None:
        """Take a step, or keep a part of a batch for it; the loss.

        Without a closure: what was differentiated is used, by an optimizer that steps along gradients.
        """
        if closure is None:
            self._finish()
            return None
        part = MicroBatch(partial(closure, *batch) if batch else closure, batch_size(batch))
        if self.gradients:
            steps = self.gradient_state.num_steps
            loss = self.differentiate(part._replace(scale=1.0 / steps)) * steps
            if self.gradient_state.sync_gradients:
                self._finish()
            return loss
        if not self.gradient_state.sync_gradients:
            loss, _ = self.parts.look(part)
            self.parts.hold(part)
            return loss
        return self.parts.step(part)[0]

    @property
    def gradients(self) -> bool:
        """Whether the optimizer steps along ``.grad``."""
        return self.parts.gradients

    def differentiate(self, part: MicroBatch) -> Tensor:
        """Add the forward gradient of a part of a batch to ``.grad``; its loss."""
        return self.parts.differentiate(part)[0]

    def _finish(self) -> None:
        """The step of an optimizer along ``.grad``."""
        if not self.gradients:
            name = type(self.optimizer).__name__
            raise TypeError(f"step of {name} got no closure; expected step(closure) or step(function, *batch).")
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.clip)
        super().step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As ever: at the end of a batch, and not between its parts."""
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with that of the forward gradient."""
        return self.parts.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        self.parts.load_state_dict(state_dict)
