"""The packages, as programs are named by, and what of each is imported once, before the processes fork."""

from __future__ import annotations

__all__ = ["PACKAGES"]

PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    "timm": ("timm",),
    "torchvision": ("torchvision.models", "torchvision.ops"),
    "diffusers": ("diffusers",),
    "peft": ("peft",),
    "torch_geometric": ("torch_geometric.nn",),
    "gpytorch": ("gpytorch",),
    "torchdiffeq": ("torchdiffeq",),
    "e3nn": ("e3nn.nn", "e3nn.o3", "e3nn.math"),
    "zuko": ("zuko",),
    "nflows": ("nflows.transforms", "nflows.flows"),
    "normflows": ("normflows",),
    "vit-pytorch": ("vit_pytorch",),
    "x-transformers": ("x_transformers",),
    "pytorch-metric-learning": ("pytorch_metric_learning.losses",),
    "kornia": ("kornia",),
    "torchmetrics": ("torchmetrics.functional",),
    "entmax": ("entmax",),
    "torchrl": ("torchrl.objectives", "torchrl.modules"),
    "stable-baselines3": ("stable_baselines3",),
}
