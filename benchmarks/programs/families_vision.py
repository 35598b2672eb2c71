"""timm and torchvision: one small model of each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .program import Built, Program

__all__ = ["programs"]

_LARGEST = 12_000_000


def programs() -> Iterator[Program]:
    """The families of timm, then torchvision's models and operations."""
    yield from _timm()
    yield from _torchvision()


# -- timm -----------------------------------------------------------------------------------------------------------


def _timm() -> Iterator[Program]:
    import timm

    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if "." not in name]
        if names:
            yield Program(f"timm/{module}", partial(_image_model, tuple(names)))


_KINDS = (
    "test_",
    "femto",
    "atto",
    "pico",
    "nano",
    "xxs",
    "xxt",
    "_xs",
    "tiny",
    "mobile",
    "small",
    "_s",
    "18",
    "b0",
    "",
)


def _image_model(names: tuple[str, ...]) -> Built:
    """The smallest of a module's models that can be made and run on a small image."""
    import timm

    ordered = sorted(names, key=lambda name: next(i for i, kind in enumerate(_KINDS) if kind in name))
    errors: list[str] = []
    for name in ordered[:4]:
        with torch.device("meta"):
            try:
                size = sum(p.numel() for p in timm.create_model(name, num_classes=5).parameters())
            except Exception as error:
                errors.append(f"{name}: {error}")
                continue
        if size > _LARGEST:
            errors.append(f"{name} has {size:,} parameters")
            continue
        for options, side in (({"img_size": 64}, 64), ({}, 64), ({}, 0)):
            try:
                model = timm.create_model(name, num_classes=5, **options).double()
                side = side or model.default_cfg["input_size"][-1]
                return _on_image(model, side)
            except Exception as error:
                errors.append(f"{name}: {error}")
    raise ValueError("; ".join(error[:120] for error in errors))


def _on_image(model: nn.Module, side: int, channels: int = 3) -> Built:
    """In training, with its dropout and its batch norms."""
    x = torch.randn(4, channels, side, side)  # with two, batch norms of one place give plus and minus one
    model.train()
    with torch.no_grad():
        model(x)
    return Built(model, _statistics_kept(model, partial(model, x)))


def _statistics_kept(model: nn.Module, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call whose running statistics go no further: every call sees the same model."""
    norms = [one for one in model.modules() if isinstance(getattr(one, "momentum", None), float)]
    for norm in norms:
        if hasattr(norm, "running_mean"):
            norm.momentum = 0.0
    return call


# -- torchvision ----------------------------------------------------------------------------------------------------


def _torchvision() -> Iterator[Program]:
    from torchvision import models

    for name in models.list_models(module=models):
        yield Program(f"torchvision/{name}", partial(_classifier, name))
    for name in models.list_models(module=models.segmentation):
        yield Program(f"torchvision/{name}", partial(_segmentation, name))
    for name in models.list_models(module=models.detection):
        yield Program(f"torchvision/{name}", partial(_detection, name))
    for name in models.list_models(module=models.optical_flow):
        yield Program(f"torchvision/{name}", partial(_flow, name))
    for name in models.list_models(module=models.video):
        yield Program(f"torchvision/{name}", partial(_video, name))
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
        yield Program(f"torchvision/ops.{name}", partial(_operation, name))


def _small(name: str, limit: int = 40_000_000, **options: Any) -> nn.Module:
    from torchvision import models

    with torch.device("meta"):
        size = sum(p.numel() for p in models.get_model(name, weights=None, **options).parameters())
    if size > limit:
        raise ValueError(f"it has {size:,} parameters")
    return models.get_model(name, weights=None, **options).double()


def _classifier(name: str) -> Built:
    options: dict[str, Any] = {"image_size": 32} if name.startswith("vit") else {}
    side = 32 if name.startswith("vit") else 96 if name.startswith(("inception", "googlenet", "alexnet")) else 64
    if name.startswith("maxvit"):
        options, side = {"input_size": (224, 224)}, 224
    if name.startswith(("inception", "googlenet")):
        options = {"init_weights": False, "aux_logits": False}
    return _on_image(_small(name, num_classes=5, **options), side)


def _segmentation(name: str) -> Built:
    return _on_image(_small(name, weights_backbone=None, num_classes=3), 64)


def _detection(name: str) -> Built:
    size = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    model = _small(name, weights_backbone=None, num_classes=3, **size).train()
    images = [torch.rand(3, 64, 64) for _ in range(2)]
    boxes = torch.tensor([[5.0, 6.0, 40.0, 50.0], [10.0, 20.0, 30.0, 60.0]])
    target: dict[str, Any] = {"boxes": boxes, "labels": torch.tensor([1, 2])}
    if name.startswith("mask"):
        target["masks"] = (torch.rand(2, 64, 64) > 0.5).to(torch.uint8)
    if name.startswith("keypoint"):
        target["labels"] = torch.tensor([1, 1])
        target["keypoints"] = torch.cat([torch.rand(2, 17, 2) * 30 + 10, torch.ones(2, 17, 1)], 2)
    return Built(model, _statistics_kept(model, lambda: model(list(images), [dict(target) for _ in images])))


def _flow(name: str) -> Built:
    model = _small(name).train()
    first, second = torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)
    return Built(model, _statistics_kept(model, partial(model, first, second, num_flow_updates=2)))


def _video(name: str) -> Built:
    model = _small(name, num_classes=3).train()
    side = 224 if name.startswith(("mvit", "s3d")) else 32
    clip = torch.rand(2, 3, 16 if side == 224 else 8, side, side)
    return Built(model, _statistics_kept(model, partial(model, clip)))


class _Operation(nn.Module):
    """An operation on features and a place that are parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.features = nn.Parameter(torch.randn(1, 8, 12, 12))
        self.weight = nn.Parameter(torch.randn(4, 8, 3, 3))
        self.offset = nn.Parameter(0.3 * torch.randn(1, 18, 12, 12) + 0.21)
        self.mask = nn.Parameter(torch.rand(1, 9, 12, 12))

    def forward(self) -> torch.Tensor:
        from torchvision import ops

        x = self.features.sin()
        if self.name == "deform_conv2d":
            return ops.deform_conv2d(x, self.offset.tanh(), self.weight.sin(), padding=1, mask=self.mask.sigmoid())
        rois = torch.tensor([[0.0, 1.3, 2.1, 8.4, 9.2], [0.0, 0.2, 0.4, 5.5, 6.3]])
        return getattr(ops, self.name)(x, rois, (2, 2), 1.0)


def _operation(name: str) -> Built:
    model = _Operation(name)
    return Built(model, model)
