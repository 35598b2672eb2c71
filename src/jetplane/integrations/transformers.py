"""The Trainer of transformers with steps that need no backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gradients import ForwardGradient
from ..optim import HorizonAdam
from . import needed
from .micro_batches import MicroBatch, report_numbers
from .sample_losses import batch_size

needed("transformers")
needed("accelerate")

from transformers import Trainer  # noqa: E402

from .accelerate import ForwardOptimizer  # noqa: E402

__all__ = ["ForwardTrainer"]


class ForwardTrainer(Trainer):
    r"""`transformers.Trainer` for optimizers of jetplane, and for any other one with forward gradients.

    Everything else is the Trainer's: arguments, data, callbacks, schedulers, gradient accumulation, checkpoints and
    resume, which goes on with the same numbers as undisturbed. ``optimizers=(optimizer, None)`` or
    ``optimizer_cls_and_kwargs=(FoMoHKD, {"k": 4, "lr": 0.5})``, as with the Trainer. An optimizer that steps along
    gradients, such as the Trainer's own AdamW, gets those of ``estimate``, by default a `jetplane.ForwardGradient` of
    its parameters.

    ``max_grad_norm`` bounds the norm of the gradient, also HorizonAdam's where that has no ``clip`` of its own; planes
    have no gradient, and their ``clip`` bounds the step. HorizonAdam is evaluated with its averaged parameters, which
    are in the model after training. A log with the loss also has the numbers of the optimizer's report, as
    ``jetplane_predicted``. With several processes, as of torchrun, make the ``TrainingArguments`` first and give the
    optimizer ``process_group=torch.distributed.group.WORLD``.

    Example:
        >>> import contextlib, io, tempfile
        >>> from jetplane.optim import FoMoHKD
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> sizes = dict(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(BertConfig(**sizes))
        >>> data = [{"input_ids": torch.arange(4) + n, "labels": torch.tensor(n % 2)} for n in range(8)]
        >>> with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ...     arguments = TrainingArguments(folder, max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True)
        ...     trainer = ForwardTrainer(model, arguments, train_dataset=data,
        ...                              optimizers=(FoMoHKD(model.parameters(), lr=0.5, k=2), None))
        ...     trained = trainer.train()
        >>> trainer.state.global_step
        2
    """

    optimizer: Any

    def __init__(self, *args: Any, estimate: ForwardGradient | None = None, **kwargs: Any) -> None:
        self._estimate = estimate
        super().__init__(*args, **kwargs)
        if self.args.fp16:
            raise ValueError("fp16 is True; expected bf16, for forward passes have no gradients that a scale saves.")
        if self.args.n_gpu > 1:
            raise ValueError(
                f"there are {self.args.n_gpu} GPUs in one process; expected one for each process, as of torchrun."
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's, which is told how to step."""
        super().create_optimizer(*args, **kwargs)
        return self._forward

    @property
    def _forward(self) -> ForwardOptimizer:
        if not isinstance(self.optimizer, ForwardOptimizer):
            self.optimizer = _Shown(self.optimizer, self._estimate)
            own = self.optimizer.optimizer
            if isinstance(own, HorizonAdam) and own.clip is None and self.args.max_grad_norm:
                own.clip = self.args.max_grad_norm
        return self.optimizer

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """A part of a batch: kept, or its gradient added, and at the last part the step; its share of the loss."""
        optimizer = self._forward
        model.train()
        optimizer.train()
        model = self.accelerator.unwrap_model(model)  # what averages gradients of processes has none to average
        inputs = self._prepare_inputs(inputs)

        def program() -> Tensor:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            assert isinstance(loss, Tensor)
            return loss

        count = self.current_gradient_accumulation_steps
        shared = self._is_share(num_items_in_batch)
        part = MicroBatch(program, batch_size(inputs))
        if optimizer.gradients:
            return optimizer.differentiate(part if shared else part._replace(scale=1.0 / count))
        part = part._replace(scale=float(count)) if shared else part  # of the mean over the parts
        if self.accelerator.sync_gradients:
            return optimizer.parts.step(part)[0]
        optimizer.parts.hold(part)
        return torch.zeros((), device=self.args.device)  # the loss of the whole batch comes with its last part

    def _is_share(self, num_items_in_batch: Any) -> bool:
        """Whether the losses of the parts are to be added up, and not averaged."""
        said: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return said
        return self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and num_items_in_batch is not None)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """None where there is no gradient."""
        if not any(p.grad is not None for p in model.parameters()):
            return None
        return super()._get_grad_norm(model, grad_norm)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's, with the numbers of the report."""
        if "loss" in logs:
            numbers = report_numbers(self._forward.optimizer)
            logs = {**logs, **{f"jetplane_{name}": number for name, number in numbers.items()}}
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's. Afterwards the averaged parameters are in the model, where the optimizer has them."""
        trained = super().train(*args, **kwargs)
        if not self.args.load_best_model_at_end:  # the best ones are there already
            self._forward.eval()
        return trained


class _Shown(ForwardOptimizer):
    """The Trainer calls ``step`` after ``training_step``, where a step without gradients was taken."""

    def step(self, closure: Any = None, *batch: Any) -> Tensor | None:
        """The step along ``.grad``, and otherwise nothing that is not done already."""
        return super().step() if self.gradients else None
