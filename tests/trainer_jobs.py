"""What each of some processes does under torchrun with a trainer: ``trainer_jobs.py PACKAGE KIND FOLDER``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import jetplane as jp

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X[:, :3].argmax(1))


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def optimizer_of(kind: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    if kind == "plane":
        return jp.optim.FoMoHKD(params, lr=0.5, k=3, solver=jp.solvers.SaddleFree(), **options)
    if kind == "horizon":
        return jp.optim.HorizonAdam(params, samples=2, **options)
    return torch.optim.AdamW(params, lr=1e-2)  # whose estimate finds the processes by itself


def together(kind: str) -> dict[str, Any]:
    return {} if kind == "adamw" else {"process_group": distributed.group.WORLD}


def accelerate(kind: str, folder: Path) -> torch.nn.Module:
    from accelerate import Accelerator

    from jetplane.integrations.accelerate import ForwardOptimizer

    accelerator, model = Accelerator(cpu=True), small()
    optimizer = ForwardOptimizer(optimizer_of(kind, model.parameters(), **together(kind)))
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(DATA, 4))
    for x, y in loader:
        with accelerator.accumulate(prepared):
            optimizer.step(lambda x, y: functional.cross_entropy(prepared(x), y), x, y)
            optimizer.zero_grad()
    return model


def transformers(kind: str, folder: Path) -> torch.nn.Module:
    import transformers as package

    from jetplane.integrations.transformers import ForwardTrainer

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = package.BertForSequenceClassification(package.BertConfig(**sizes, intermediate_size=16, num_labels=3))
    data = [{"input_ids": (torch.arange(5) * (n + 1)) % 20, "labels": torch.tensor(n % 3)} for n in range(24)]
    where = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    arguments = package.TrainingArguments(str(folder), max_steps=3, per_device_train_batch_size=4, **where)
    optimizer = optimizer_of(kind, model.parameters(), **together(kind))
    ForwardTrainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    return model


def lightning(kind: str, folder: Path) -> torch.nn.Module:
    import lightning as package

    from jetplane.integrations.lightning import ForwardStrategy

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()

        def training_step(self, batch: Any, number: int) -> Any:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer_of(kind, self.parameters(), **together(kind))

    distributed.init_process_group("gloo")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = package.Trainer(
        strategy=ForwardStrategy(), max_steps=4, accelerator="cpu", default_root_dir=folder, **dict.fromkeys(off, False)
    )
    module = Module()
    trainer.fit(module, DataLoader(DATA, 4, sampler=DistributedSampler(DATA, shuffle=False)))
    return module


def main(package: str, kind: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    model = globals()[package](kind, Path(folder))
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save(values, Path(folder) / f"{os.environ['RANK']}.pt")
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
