"""A strategy for Lightning's Trainer: optimizers of jetplane, or any other one with forward gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gradients import ForwardGradient
from ..optim import HorizonAdam
from . import needed
from .micro_batches import MicroBatch, MicroBatches, report_numbers
from .sample_losses import batch_size, loss_in

needed("lightning")

from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

__all__ = ["ForwardStrategy"]


class ForwardStrategy(SingleDeviceStrategy):
    r"""``Trainer(strategy=ForwardStrategy())``: the module stays as it is, with its optimizer swapped.

    ``training_step`` returns a loss, or a mapping with it, as ever; no backward pass runs. Gradient accumulation,
    schedulers, precision "bf16-mixed", ``global_step``, checkpoints and resume are Lightning's. An optimizer that steps
    along gradients gets those of ``estimate``, by default a `jetplane.ForwardGradient` of its parameters; the losses of
    single samples that it needs are read off the mean
    (:func:`~jetplane.integrations.sample_losses.losses_of_samples`), or ``training_step`` returns them.

    ``gradient_clip_val`` bounds the gradient, also HorizonAdam's; planes have no gradient, and their ``clip`` bounds
    the step. HorizonAdam is validated and tested with its averaged parameters, while checkpoints have both. Numbers of
    the optimizer's report are logged as "jetplane/predicted", unless ``log_report`` is False.

    ``training_step`` may run several times in a step; only the first run logs. Modules that optimize by hand
    (``automatic_optimization = False``) are left alone. One device; with several see docs/parallel.md.

    Example:
        >>> import lightning, warnings
        >>> from jetplane.optim import FoMoHKD
        >>> class Classifier(lightning.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(4, 3)
        ...     def training_step(self, batch, number):
        ...         return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return FoMoHKD(self.parameters(), lr=0.5, k=2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
        >>> names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        >>> quiet = dict.fromkeys(names, False)
        >>> trainer = lightning.Trainer(strategy=ForwardStrategy(), max_steps=2, accelerator="cpu", **quiet)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # of workers for the data
        ...     trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 4))
        >>> trainer.global_step
        2
    """

    strategy_name = "jetplane_forward"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        estimate: Callable[[torch.optim.Optimizer], ForwardGradient] | None = None,
        log_report: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(device, **options)
        self._make_estimate, self._log_report = estimate, log_report
        self._parts: MicroBatches | None = None
        self._found: list[Tensor | None] = []  # gradients of the last part, to be added after zero_grad
        self._at_end = False  # this part of the batch is the last one
        self._clip: tuple[Any, ...] = ()

    # -- setting up -------------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """As ever, for one optimizer that is looked at."""
        super().setup_optimizers(trainer)
        self._parts = None
        if not trainer.lightning_module.automatic_optimization:
            return
        if len(self.optimizers) != 1:
            raise ValueError(f"there are {len(self.optimizers)} optimizers; expected one, or to optimize by hand.")
        if trainer.precision.startswith("16"):
            raise ValueError(f"precision is {trainer.precision!r}; expected '32-true', '64-true' or 'bf16-mixed'.")
        optimizer = self.optimizers[0]
        estimate = None if self._make_estimate is None else self._make_estimate(optimizer)
        self._parts = MicroBatches(optimizer, estimate)
        if trainer.gradient_clip_val and not self._parts.gradients:
            self._clip_own(trainer, optimizer)

    def _clip_own(self, trainer: Any, optimizer: Any) -> None:
        """Have HorizonAdam clip its gradient as the trainer says."""
        if not isinstance(optimizer, HorizonAdam):
            raise ValueError(
                f"gradient_clip_val is {trainer.gradient_clip_val} and {type(optimizer).__name__} has no gradient; "
                "expected the optimizer's own clip, which bounds the step."
            )
        if optimizer.clip is None:
            named = {name: getattr(trainer, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
            optimizer.clip = lambda _: trainer.lightning_module.configure_gradient_clipping(optimizer, **named)

    # -- a step -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's; where it is the last one of a batch, the optimizer takes its step with it."""
        parts = self._parts
        if parts is None:
            return super().training_step(*args, **kwargs)
        run, logged = partial(super().training_step, *args, **kwargs), list[_Logged]()

        def program() -> Any:
            logged.append(_Logged())
            with logged[-1].of(self.lightning_module):
                return run()

        part = MicroBatch(program, batch_size(args[0] if args else kwargs))
        if parts.gradients:
            returned = self._differentiated(part)
        elif self._at_end:
            _, returned = parts.step(part, has_aux=True)
        else:
            _, returned = parts.look(part)
            parts.hold(part)
        logged[0].hand_over(self.lightning_module)
        if self._log_report and self._at_end and not parts.gradients:
            numbers = report_numbers(parts.optimizer)
            self.lightning_module.log_dict({f"jetplane/{name}": number for name, number in numbers.items()})
        return _with_mean(returned)

    def _differentiated(self, part: MicroBatch) -> Any:
        """What a part returns; its forward gradient is kept beside what ``.grad`` holds of those before it."""
        assert self._parts is not None
        leaves = [p for group in self._parts.optimizer.param_groups for p in group["params"]]
        before = [leaf.grad for leaf in leaves]
        try:
            for leaf in leaves:
                leaf.grad = None
            _, returned = self._parts.differentiate(part, has_aux=True)
            self._found = [leaf.grad for leaf in leaves]
        finally:
            for leaf, grad in zip(leaves, before, strict=True):
                leaf.grad = grad
        return returned

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Add the forward gradient to ``.grad``; the hooks around a backward pass are called."""
        if self._parts is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._parts.gradients:
            leaves = [p for group in self._parts.optimizer.param_groups for p in group["params"]]
            for leaf, found in zip(leaves, self._found, strict=True):
                if found is not None:
                    share = found / module.trainer.accumulate_grad_batches
                    leaf.grad = share if leaf.grad is None else leaf.grad + share
            self._found = []
        return self.precision_plugin.post_backward(closure_loss, module)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The step of a batch, by ``training_step`` itself where no gradient is needed."""
        if self._parts is None or self._parts.gradients:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._at_end = True
        try:
            return closure()
        finally:
            self._at_end = False

    # -- the averaged parameters, and the state ---------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with averaged parameters."""
        return self._averaged(partial(super().validation_step, *args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with averaged parameters."""
        return self._averaged(partial(super().test_step, *args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with averaged parameters."""
        return self._averaged(partial(super().predict_step, *args, **kwargs))

    def _averaged(self, step: Callable[[], Any]) -> Any:
        if self._parts is None:
            return step()
        with self._parts.averaged():
            return step()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's, with that of the forward gradient."""
        return super().optimizer_state(optimizer) if self._parts is None else self._parts.state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        if self._parts is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self._parts.load_state_dict(checkpoint["optimizer_states"][0])


class _Logged:
    """What a module logs in a run of ``training_step``, to be logged after the step: logging is no part of the loss."""

    def __init__(self) -> None:
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def of(self, module: Any) -> Iterator[None]:
        """Keep what the module logs inside."""
        own = vars(module).get("log")  # of this very module
        module.log = self._keep
        try:
            yield
        finally:
            if own is None:
                del module.log
            else:
                module.log = own

    def _keep(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append((args, kwargs))

    def hand_over(self, module: Any) -> None:
        """Log it."""
        for args, kwargs in self._calls:
            module.log(*args, **kwargs)


def _with_mean(returned: Any) -> Any:
    """What ``training_step`` returned, with the loss of its part as one number."""
    loss = loss_in(returned).detach().mean()
    return {**returned, "loss": loss} if isinstance(returned, Mapping) else loss
