"""Losses and what is made of images on the way to them: pytorch-metric-learning, torchmetrics, kornia, entmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .program import Built, Program

__all__ = ["programs"]

_CLASSES = {"num_classes": 3, "embedding_size": 6}
_METRIC: dict[str, dict[str, Any]] = {
    **{f"{name}Loss": {} for name in ("Angular", "Circle", "Contrastive", "DynamicSoftMargin", "FastAP")},
    **{
        f"{name}Loss": {} for name in ("GeneralizedLiftedStructure", "Instance", "IntraPairVariance", "LiftedStructure")
    },
    **{f"{name}Loss": {} for name in ("Margin", "MultiSimilarity", "NCA", "NPairs", "NTXent", "PNP", "RankedList")},
    **{f"{name}Loss": {} for name in ("SignalToNoiseRatioContrastive", "SupCon", "TripletMargin", "TupletMargin")},
    **{f"{name}Loss": _CLASSES for name in ("ArcFace", "CosFace", "LargeMarginSoftmax", "NormalizedSoftmax")},
    **{f"{name}Loss": _CLASSES for name in ("ProxyAnchor", "ProxyNCA", "SoftTriple", "SphereFace", "SubCenterArcFace")},
    **{"RankedListLoss": {"margin": 0.5, "Tn": 0}, "HistogramLoss": {"n_bins": 4}},
    "P2SGradLoss": {"num_classes": 3, "descriptors_dim": 6},
    "SmoothAPLoss": {},
}
_IMAGES: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {  # where it is found, and how it is called
    "ssim_loss": ("losses", lambda f, x: f(x, _other(x), 5)),
    "MS_SSIMLoss": ("losses", lambda f, x: f().double()(x, _other(x))),
    "psnr_loss": ("losses", lambda f, x: f(x, _other(x), 1.0)),
    "total_variation": ("losses", lambda f, x: f(x)),
    "charbonnier_loss": ("losses", lambda f, x: f(x, _other(x))),
    "cauchy_loss": ("losses", lambda f, x: f(x, _other(x))),
    "welsch_loss": ("losses", lambda f, x: f(x, _other(x))),
    "geman_mcclure_loss": ("losses", lambda f, x: f(x, _other(x))),
    "focal_loss": ("losses", lambda f, x: f(x, _labels(x), 0.5, 2.0)),
    "binary_focal_loss_with_logits": ("losses", lambda f, x: f(x, (_other(x) > 0.5).double())),
    "dice_loss": ("losses", lambda f, x: f(x, _labels(x))),
    "tversky_loss": ("losses", lambda f, x: f(x, _labels(x), 0.3, 0.7)),
    "lovasz_softmax_loss": ("losses", lambda f, x: f(x, _labels(x))),
    "lovasz_hinge_loss": ("losses", lambda f, x: f(x[:, :1], _labels(x) % 2)),
    "js_div_loss_2d": ("losses", lambda f, x: f(x.softmax(-1), _other(x).softmax(-1))),
    "HausdorffERLoss": ("losses", lambda f, x: f().double()(x, _labels(x)[:, None])),
    "inverse_depth_smoothness_loss": ("losses", lambda f, x: f(x[:, :1], _other(x))),
    "gaussian_blur2d": ("filters", lambda f, x: f(x, (5, 5), (1.0, 1.0))),
    "bilateral_blur": ("filters", lambda f, x: f(x, (3, 3), 0.3, (1.0, 1.0))),
    "median_blur": ("filters", lambda f, x: f(x, (3, 3))),
    "sobel": ("filters", lambda f, x: f(x)),
    "canny": ("filters", lambda f, x: f(x)[0]),
    "guided_blur": ("filters", lambda f, x: f(x, _other(x), 3, 0.1)),
    "unsharp_mask": ("filters", lambda f, x: f(x, (3, 3), (1.0, 1.0))),
    "rgb_to_lab": ("color", lambda f, x: f(x.sigmoid())),
    "rgb_to_hsv": ("color", lambda f, x: f(x.sigmoid())),
    "rgb_to_luv": ("color", lambda f, x: f(x.sigmoid())),
    "adjust_gamma": ("enhance", lambda f, x: f(x.sigmoid(), 0.7)),
    "image_histogram2d": ("enhance", lambda f, x: f(x, n_bins=4)[0]),
    "dilation": ("morphology", lambda f, x: f(x, torch.ones(3, 3))),
    "opening": ("morphology", lambda f, x: f(x, torch.ones(3, 3))),
    "distance_transform": ("contrib", lambda f, x: f(x.sigmoid())),
    "spatial_soft_argmax2d": ("geometry", lambda f, x: f(x)),
    "harris_response": ("feature", lambda f, x: f(x)),
    "hessian_response": ("feature", lambda f, x: f(x)),
}
_GEOMETRY: dict[str, Callable[[Any, Tensor], Any]] = {  # of nine numbers that are parameters
    "warp_affine": lambda g, p: g.warp_affine(_picture(), (torch.eye(3)[:2] + 0.1 * p[:6].view(2, 3))[None], (8, 8)),
    "warp_perspective": lambda g, p: g.warp_perspective(_picture(), (torch.eye(3) + 0.02 * p.view(3, 3))[None], (8, 8)),
    "rotate": lambda g, p: g.rotate(_picture(), 20 * p[:1]),
    "get_perspective_transform": lambda g, p: g.get_perspective_transform(
        torch.tensor([[[0.0, 0], [1, 0], [1, 1], [0, 1]]]),
        (p[:8].view(1, 4, 2) * 0.1 + 1) * torch.tensor([[[0.1, 0.2], [1, 0], [1, 1], [0, 1]]]),
    ),
    "axis_angle_to_rotation_matrix": lambda g, p: g.axis_angle_to_rotation_matrix(p.view(3, 3)),
    "rotation_matrix_to_quaternion": lambda g, p: g.rotation_matrix_to_quaternion(
        g.axis_angle_to_rotation_matrix(p.view(3, 3))
    ),
    "quaternion_log_to_exp": lambda g, p: g.quaternion_log_to_exp(p.view(3, 3)),
    "find_homography_dlt": lambda g, p: g.find_homography_dlt(
        torch.tensor([[[0.0, 0], [1, 0], [1, 1], [0, 1]]]),
        0.05 * p[:8].view(1, 4, 2) + torch.tensor([[[0.1, 0.2], [1, 0], [1.1, 1], [0, 1.3]]]),
    ),
    "Se3.exp": lambda g, p: g.liegroup.Se3.exp(p[:6].view(1, 6)).matrix(),
    "So3.log": lambda g, p: g.liegroup.So3.exp(p[:3].view(1, 3)).log(),
}
_FUNCTIONAL: dict[str, Callable[[Any, Tensor], Any]] = {  # of a batch of twelve numbers each
    "image.structural_similarity_index_measure": lambda f, x: f(_pictures(x), _other(_pictures(x)), data_range=1.0),
    "image.total_variation": lambda f, x: f(_pictures(x)),
    "image.spectral_angle_mapper": lambda f, x: f(_pictures(x).sigmoid(), _other(_pictures(x)).sigmoid()),
    "audio.scale_invariant_signal_distortion_ratio": lambda f, x: f(x, _other(x)),
    "audio.signal_noise_ratio": lambda f, x: f(x, _other(x)),
    "regression.pearson_corrcoef": lambda f, x: f(x, _other(x)),
    "regression.r2_score": lambda f, x: f(x[:, 0], _other(x)[:, 0]),
    "regression.kl_divergence": lambda f, x: f(x.softmax(1), _other(x).softmax(1)),
    "regression.cosine_similarity": lambda f, x: f(x, _other(x)),
    "regression.tweedie_deviance_score": lambda f, x: f(x.exp(), _other(x).exp(), power=1.5),
    "regression.log_cosh_error": lambda f, x: f(x, _other(x)),
    "regression.concordance_corrcoef": lambda f, x: f(x, _other(x)),
    "classification.multiclass_hinge_loss": lambda f, x: f(x, torch.arange(len(x)) % 12, num_classes=12),
    "pairwise.pairwise_cosine_similarity": lambda f, x: f(x, _other(x)),
    "pairwise.pairwise_euclidean_distance": lambda f, x: f(x, _other(x)),
}
_MAPS = ("entmax15", "sparsemax", "entmax_bisect", "sparsemax_bisect", "normmax_bisect", "budget_bisect")


def programs() -> Iterator[Program]:
    """The losses of each package by name."""
    for name, options in _METRIC.items():
        yield Program(f"pytorch-metric-learning/{name}", partial(_metric, name, options))
    for name in _IMAGES:
        yield Program(f"kornia/{name}", partial(_image, name))
    for name in _GEOMETRY:
        yield Program(f"kornia/{name}", partial(_geometry, name))
    for name in _FUNCTIONAL:
        yield Program(f"torchmetrics/{name}", partial(_functional, name))
    for name in _MAPS:
        yield Program(f"entmax/{name}", partial(_sparse_map, name))
    for name in ("Entmax15Loss", "SparsemaxLoss", "EntmaxBisectLoss"):
        yield Program(f"entmax/{name}", partial(_sparse_loss, name))


def _metric(name: str, options: dict[str, Any]) -> Built:
    from pytorch_metric_learning import losses

    labels = torch.arange(9) % 3
    loss, net, x = getattr(losses, name)(**options), nn.Sequential(nn.Linear(4, 6), nn.Tanh()), torch.randn(9, 4)
    return Built(nn.ModuleList([net, loss]), lambda: loss(net(x), labels))


class _Picture(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(shape))


def _other(x: Tensor) -> Tensor:
    """Data of the same shape, always the same."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(3))


def _labels(x: Tensor) -> Tensor:
    return (3 * _other(x[:, 0])).long()


def _picture() -> Tensor:
    return _other(torch.zeros(1, 2, 8, 8)).cumsum(-1)


def _pictures(x: Tensor) -> Tensor:
    return (x[:, :, None, None] * torch.linspace(0.3, 2, 256).view(16, 16).cos()).sin()[:, :3]


def _image(name: str) -> Built:
    import kornia

    where, use = _IMAGES[name]
    side = 96 if name == "MS_SSIMLoss" else 8
    model = _Picture(2, 3, side, side)
    function = getattr(getattr(kornia, where), name)
    return Built(model, lambda: use(function, model.x * model.x + 0.5 * model.x))


def _geometry(name: str) -> Built:
    from kornia import geometry

    model = _Picture(9)
    return Built(model, lambda: _GEOMETRY[name](geometry, model.x.sin()))


def _functional(name: str) -> Built:
    from torchmetrics import functional

    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 12)), torch.randn(7, 4)
    found = functional
    for part in name.split("."):
        found = getattr(found, part)
    return Built(net, lambda: _FUNCTIONAL[name](found, net(x)))


def _sparse_map(name: str) -> Built:
    import entmax

    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(7, 4)
    more = {"budget": 2} if name == "budget_bisect" else {"alpha": 1.6} if name == "entmax_bisect" else {}
    return Built(net, lambda: getattr(entmax, name)(net(x), **more))


def _sparse_loss(name: str) -> Built:
    import entmax

    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)), torch.randn(7, 4)
    loss = getattr(entmax, name)()
    return Built(net, lambda: loss(net(x), torch.arange(7) % 6))
