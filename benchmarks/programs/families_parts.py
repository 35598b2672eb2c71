"""Parts and small models of many packages, each by its class and what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .program import Built, Ids, Program, module

__all__ = ["programs"]

_NETS = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet")
_SMP = {"encoder_name": "timm-mobilenetv3_small_minimal_100", "encoder_weights": None, "classes": 3}
_SMP_LOSSES = ("DiceLoss", "JaccardLoss", "LovaszLoss", "FocalLoss", "TverskyLoss", "MCCLoss", "SoftBCEWithLogitsLoss")
_WHOLE: dict[str, Callable[[], Built]] = {
    **{
        f"segmentation-models-pytorch/{name}": module(
            f"segmentation_models_pytorch.{name}", {**_SMP, "encoder_name": "resnet18"}, (2, 3, 64, 64)
        )
        for name in _NETS
    },
    "ncps/LTC": lambda: _recurrent("LTC"),
    "ncps/CfC": lambda: _recurrent("CfC"),
    "vector-quantize-pytorch/FSQ": lambda: _behind_a_layer("vector_quantize_pytorch", "FSQ", {"levels": [3, 3, 3]}, 3),
    "vector-quantize-pytorch/LFQ": lambda: _behind_a_layer(
        "vector_quantize_pytorch", "LFQ", {"codebook_size": 8, "dim": 3, "entropy_loss_weight": 0.1}, 3
    ),
    "vector-quantize-pytorch/ResidualFSQ": lambda: _behind_a_layer(
        "vector_quantize_pytorch", "ResidualFSQ", {"dim": 3, "levels": [3, 3, 3], "num_quantizers": 2}, 3
    ),
    "vector-quantize-pytorch/SimVQ": lambda: _behind_a_layer(
        "vector_quantize_pytorch", "SimVQ", {"dim": 4, "codebook_size": 6}, 4
    ),
    "vector-quantize-pytorch/train": lambda: _behind_a_layer(
        "vector_quantize_pytorch", "VectorQuantize", {"dim": 4, "codebook_size": 6, "rotation_trick": False}, 4
    ),
    "vector-quantize-pytorch/rotation_trick": lambda: _behind_a_layer(
        "vector_quantize_pytorch", "VectorQuantize", {"dim": 4, "codebook_size": 6, "rotation_trick": True}, 4
    ),
    "denoising-diffusion-pytorch/Unet": lambda: _denoiser("Unet", (2, 3, 16, 16)),
    "denoising-diffusion-pytorch/GaussianDiffusion": lambda: _denoiser("GaussianDiffusion", (2, 3, 16, 16)),
    "denoising-diffusion-pytorch/Unet1D": lambda: _denoiser("Unet1D", (2, 3, 16)),
    "local-attention/LocalTransformer": lambda: module(
        "local_attention.LocalTransformer",
        {
            "num_tokens": 20,
            "dim": 16,
            "depth": 2,
            "max_seq_len": 16,
            "local_attn_window_size": 4,
            "heads": 2,
            "dim_head": 8,
        },
        Ids(20, (2, 8)),
    )(),
    "linear-attention-transformer/LM": module(
        "linear_attention_transformer.LinearAttentionTransformerLM",
        {"num_tokens": 20, "dim": 16, "heads": 2, "depth": 2, "max_seq_len": 8, "causal": True, "blindspot_size": 1},
        Ids(20, (2, 8)),
    ),
    "nystrom-attention/Nystromformer": module(
        "nystrom_attention.Nystromformer",
        {"dim": 16, "dim_head": 8, "heads": 2, "depth": 1, "num_landmarks": 4},
        (2, 8, 16),
    ),
    "slot-attention/SlotAttention": module("slot_attention.SlotAttention", {"num_slots": 3, "dim": 8}, (2, 6, 8)),
    "siren-pytorch/SirenNet": module(
        "siren_pytorch.SirenNet", {"dim_in": 2, "dim_hidden": 8, "dim_out": 3, "num_layers": 3}, (5, 2)
    ),
    "pytorch-crf/CRF": lambda: _tags(),
    **{
        f"snntorch/{name}": partial(lambda name: _spiking(name), name)
        for name in ("Leaky", "Synaptic", "Lapicque", "Alpha")
    },
    "pytorch-tabnet/TabNet": lambda: _tabnet("sparsemax"),
    "pytorch-tabnet/TabNet.entmax": lambda: _tabnet("entmax"),
}
_PICTURES = (
    "SSIMLoss",
    "MultiScaleSSIMLoss",
    "VIFLoss",
    "GMSDLoss",
    "FSIMLoss",
    "VSILoss",
    "TVLoss",
    "MDSILoss",
    "HaarPSILoss",
)


def programs() -> Iterator[Program]:
    """All by name, and the losses of two packages for pictures."""
    for name, build in _WHOLE.items():
        yield Program(name, build)
    for name in _SMP_LOSSES:
        yield Program(f"segmentation-models-pytorch/{name}", partial(_segments, name))
    for name in _PICTURES:
        yield Program(f"piq/{name}", partial(_alike, name))


def _behind_a_layer(package: str, name: str, options: dict[str, Any], width: int) -> Built:
    """In training, behind a layer whose output is quantised; what it learns beside gradients is kept as it is."""
    import copy
    import importlib

    made, first, x = (
        getattr(importlib.import_module(package), name)(**options),
        nn.Linear(4, width),
        torch.randn(2, 6, 4),
    )
    made = made.double().train()
    with torch.no_grad():
        made(first(x))
    kept = copy.deepcopy(dict(made.named_buffers()))

    def call() -> Any:
        with torch.no_grad():
            for key, value in made.named_buffers():
                value.copy_(kept[key])
        return made(first(x).tanh())

    return Built(nn.ModuleList([first, made]), call)


def _recurrent(name: str) -> Built:
    from ncps import torch as layers
    from ncps.wirings import AutoNCP

    made = getattr(layers, name)(3, AutoNCP(8, 2)).double()
    return Built(made, partial(made, torch.randn(2, 5, 3)))


def _denoiser(name: str, shape: tuple[int, ...]) -> Built:
    import denoising_diffusion_pytorch as package

    kind = package.Unet1D if name == "Unet1D" else package.Unet
    more = {"flash_attn": False} if kind is package.Unet else {}
    net = kind(dim=8, dim_mults=(1, 2), channels=3, **more).double()
    if name != "GaussianDiffusion":
        return Built(net, partial(net, torch.randn(shape), torch.tensor([3, 7])))
    made = package.GaussianDiffusion(net, image_size=16, timesteps=10).double()
    return Built(made, partial(made, torch.rand(shape)))


def _tags() -> Built:
    from torchcrf import CRF

    crf, net, x = CRF(4, batch_first=True).double(), nn.Linear(3, 4), torch.randn(2, 5, 3)
    tags = torch.randint(4, (2, 5))
    return Built(nn.ModuleList([crf, net]), lambda: crf(net(x), tags))


def _spiking(name: str) -> Built:
    import snntorch
    from snntorch import utils

    options: dict[str, Any] = {"Synaptic": {"alpha": 0.8}, "Alpha": {"alpha": 0.9}}.get(name, {})
    cell = getattr(snntorch, name)(beta=0.7, init_hidden=True, **options).double()
    first, x = nn.Linear(4, 6), torch.randn(5, 3, 4) + 0.5

    def call() -> Tensor:
        utils.reset(cell)
        return torch.stack([cell(2 * first(step)) for step in x]).sum(0)

    return Built(first, call)


def _tabnet(mask: str) -> Built:
    from pytorch_tabnet.tab_network import TabNet

    made = (
        TabNet(
            5,
            3,
            n_d=4,
            n_a=4,
            n_steps=2,
            virtual_batch_size=8,
            momentum=0.0,
            mask_type=mask,
            group_attention_matrix=torch.eye(5),
        )
        .double()
        .train()
    )
    return Built(made, partial(made, torch.randn(8, 5)))


def _segments(name: str) -> Built:
    from segmentation_models_pytorch import losses

    mode = () if name in ("MCCLoss", "SoftBCEWithLogitsLoss") else ("binary",)
    loss, net, x = getattr(losses, name)(*mode), nn.Conv2d(3, 1, 3), torch.randn(2, 3, 8, 8)
    target = (torch.rand(2, 1, 6, 6) > 0.5).double()
    return Built(net, lambda: loss(net(x), target))


def _alike(name: str) -> Built:
    import piq

    side = 180 if name == "MultiScaleSSIMLoss" else 48
    net, x = nn.Conv2d(3, 3, 3, padding=1), torch.rand(1, 3, side, side)
    loss, other = getattr(piq, name)(), torch.rand(1, 3, side, side)
    return Built(net, lambda: loss(net(x).sigmoid()) if name == "TVLoss" else loss(net(x).sigmoid(), other))
