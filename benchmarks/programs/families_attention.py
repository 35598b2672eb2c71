"""Transformers for images and text from packages of many variants: vit-pytorch and x-transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .program import Built, Ids, Program, module

__all__ = ["programs"]

_IMAGE = (2, 3, 32, 32)
_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
_STAGES = {
    f"s{i}_{key}": value
    for i, width in ((1, 8), (2, 16), (3, 16))
    for key, value in (("emb_dim", width), ("heads", 2), ("depth", 1), ("emb_kernel", 3), ("emb_stride", 2))
}
_VITS: dict[str, Callable[[], Built]] = {
    **{
        name: module(f"vit_pytorch.{path}", _VIT, _IMAGE)
        for name, path in (("ViT", "vit.ViT"), ("SimpleViT", "simple_vit.SimpleViT"))
    },
    "ViT.train": module("vit_pytorch.vit.ViT", {**_VIT, "dropout": 0.1, "emb_dropout": 0.1}, _IMAGE, train=True),
    "DeepViT": module("vit_pytorch.deepvit.DeepViT", _VIT, _IMAGE),
    "CaiT": module("vit_pytorch.cait.CaiT", {**_VIT, "cls_depth": 1}, _IMAGE),
    "ParallelViT": module("vit_pytorch.parallel_vit.ViT", {**_VIT, "num_parallel_branches": 2}, _IMAGE),
    "PatchMerger": module(
        "vit_pytorch.vit_with_patch_merger.ViT", {**_VIT, "patch_merge_layer": 1, "patch_merge_num_tokens": 4}, _IMAGE
    ),
    "SmallDataset": module("vit_pytorch.vit_for_small_dataset.ViT", _VIT, _IMAGE),
    "RegisterTokens": module("vit_pytorch.simple_vit_with_register_tokens.SimpleViT", _VIT, _IMAGE),
    "QKNorm": module("vit_pytorch.simple_vit_with_qk_norm.SimpleViT", _VIT, _IMAGE),
    "FFT": module("vit_pytorch.simple_vit_with_fft.SimpleViT", {**_VIT, "freq_patch_size": 8}, _IMAGE),
    "ValueResidual": module("vit_pytorch.simple_vit_with_value_residual.SimpleViT", _VIT, _IMAGE),
    "HyperConnections": module(
        "vit_pytorch.simple_vit_with_hyper_connections.SimpleViT", {**_VIT, "num_residual_streams": 2}, _IMAGE
    ),
    "PatchDropout": module("vit_pytorch.simple_vit_with_patch_dropout.SimpleViT", _VIT, _IMAGE, train=True),
    "NormalizedViT": module("vit_pytorch.normalized_vit.nViT", {**_VIT}, _IMAGE),
    "LookViT": module(
        "vit_pytorch.look_vit.LookViT",
        {"dim": 16, "image_size": 32, "num_classes": 5, "depth": 1, "patch_size": 8, "heads": 2, "dim_head": 8}
        | {"highres_patch_size": 4, "cross_attn_heads": 2, "cross_attn_dim_head": 8},
        _IMAGE,
    ),
    "CCT": module(
        "vit_pytorch.cct.CCT",
        {"img_size": (32, 32), "embedding_dim": 16, "n_conv_layers": 2, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2}
        | {"kernel_size": 3, "stride": 2, "padding": 1, "num_classes": 5, "positional_embedding": "learnable"},
        _IMAGE,
    ),
    "T2T": module(
        "vit_pytorch.t2t.T2TViT",
        {"dim": 16, "image_size": 32, "depth": 1, "heads": 2, "mlp_dim": 32, "num_classes": 5}
        | {"t2t_layers": ((7, 4), (3, 2))},
        _IMAGE,
    ),
    "CrossViT": module(
        "vit_pytorch.cross_vit.CrossViT",
        {"image_size": 32, "num_classes": 5, "depth": 1, "sm_dim": 16, "sm_patch_size": 8, "sm_enc_depth": 1}
        | {"sm_enc_heads": 2, "sm_enc_mlp_dim": 32, "lg_dim": 24, "lg_patch_size": 16, "lg_enc_depth": 1}
        | {"lg_enc_heads": 2, "lg_enc_mlp_dim": 32, "cross_attn_depth": 1, "cross_attn_heads": 2},
        _IMAGE,
    ),
    "PiT": module("vit_pytorch.pit.PiT", {**_VIT, "depth": (1, 1)}, _IMAGE),
    "LeViT": module(
        "vit_pytorch.levit.LeViT",
        {"image_size": 32, "num_classes": 5, "stages": 2, "dim": (16, 24), "depth": 1, "heads": (2, 2), "mlp_mult": 2},
        (4, 3, 32, 32),
        train=True,
    ),
    "CvT": module("vit_pytorch.cvt.CvT", {"num_classes": 5, **_STAGES}, (4, 3, 32, 32), train=True),
    "TwinsSVT": module(
        "vit_pytorch.twins_svt.TwinsSVT",
        {"num_classes": 5}
        | {f"s{i}_{key}": value for i in (1, 2, 3, 4) for key, value in (("emb_dim", 8), ("depth", 1))}
        | {"s1_patch_size": 4, "s1_local_patch_size": 4, "s2_local_patch_size": 4, "s3_local_patch_size": 2}
        | {"s4_local_patch_size": 1, "s1_global_k": 4, "s2_global_k": 2, "s3_global_k": 2, "s4_global_k": 1},
        (2, 3, 64, 64),
    ),
    "NesT": module(
        "vit_pytorch.nest.NesT",
        {"image_size": 32, "patch_size": 4, "dim": 8, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)}
        | {"num_classes": 5},
        _IMAGE,
    ),
    "MobileViT": module(
        "vit_pytorch.mobile_vit.MobileViT",
        {"image_size": (64, 64), "dims": [16, 16, 16], "channels": [8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 32]}
        | {"num_classes": 5, "depths": (1, 1, 1)},
        (4, 3, 64, 64),
        train=True,
    ),
    "XCiT": module("vit_pytorch.xcit.XCiT", {**_VIT, "cls_depth": 1}, (4, 3, 32, 32), train=True),
    "MaxViT": module(
        "vit_pytorch.max_vit.MaxViT",
        {"num_classes": 5, "dim": 16, "depth": (1,), "dim_head": 8, "window_size": 2, "dim_conv_stem": 8},
        _IMAGE,
    ),
    "RvT": module("vit_pytorch.rvt.RvT", _VIT, _IMAGE),
    "ATSViT": module("vit_pytorch.ats_vit.ViT", {**_VIT, "max_tokens_per_depth": (8, 4)}, _IMAGE),
    "SepViT": module(
        "vit_pytorch.sep_vit.SepViT",
        {"num_classes": 5, "dim": 8, "depth": (1, 1), "heads": (1, 2), "window_size": 2, "dim_head": 8},
        (2, 3, 56, 56),
    ),
    "RegionViT": module(
        "vit_pytorch.regionvit.RegionViT",
        {"dim": (8, 8, 16, 16), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 5},
        (2, 3, 64, 64),
    ),
    "ScalableViT": module(
        "vit_pytorch.scalable_vit.ScalableViT",
        {
            "num_classes": 5,
            "dim": 8,
            "depth": (1, 1),
            "heads": (2, 2),
            "reduction_factor": (2, 1),
            "window_size": (4, None),
        }
        | {"iwsa_dim_key": 8, "iwsa_dim_value": 8, "ssa_dim_key": (8, 8), "ssa_dim_value": (8, 8)},
        _IMAGE,
    ),
    "ViViT": module(
        "vit_pytorch.vivit.ViViT",
        {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 16}
        | {"spatial_depth": 1, "temporal_depth": 1, "heads": 2, "mlp_dim": 32},
        (2, 3, 4, 16, 16),
    ),
}
_DECODER = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
_VARIANTS: dict[str, dict[str, Any]] = {
    "Decoder": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True},
    "t5_bias": {"rel_pos_bias": True},
    "dynamic_bias": {"dynamic_pos_bias": True},
    "rmsnorm_glu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "simple_rmsnorm": {"use_simple_rmsnorm": True},
    "qk_norm": {"attn_qk_norm": True},
    "talking_heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "memory_kv": {"attn_num_mem_kv": 4},
    "sparse_topk": {"attn_sparse_topk": 3},
    "gate_values": {"attn_gate_values": True},
    "one_kv_head": {"attn_one_kv_head": True},
    "residual_gate": {"gate_residual": True},
    "shift_tokens": {"shift_tokens": 1},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "hybrid_learned_values": {"learned_value_residual_mix": True, "add_value_residual": True},
    "relu_squared": {"ff_relu_squared": True},
    "sigmoid_attention": {"attn_sigmoid": True},
    "selective": {"attn_selective": True},
    "laser": {"attn_laser": True},
    "softclamp": {"attn_softclamp_logits": True},
    "hyper_connections": {"num_residual_streams": 2},
    "dynamic_tanh": {"use_dynamic_tanh": True},
    "data_dependent_alibi": {"attn_data_dependent_alibi": True},
}


def programs() -> Iterator[Program]:
    """The variants by name."""
    for name, build in _VITS.items():
        yield Program(f"vit-pytorch/{name}", build)
    for name, options in _VARIANTS.items():
        yield Program(f"x-transformers/{name}", partial(_decoder, options))
    yield Program("x-transformers/Encoder.images", _encoder)
    yield Program("x-transformers/XTransformer", _both)
    yield Program("x-transformers/Continuous", _continuous)


def _decoder(options: dict[str, Any]) -> Built:
    """Its loss for the next word, in training."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(**_DECODER, **options)
    made = AutoregressiveWrapper(TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers))
    made.double().train()
    ids = torch.randint(0, 20, (2, 9))
    return Built(made, lambda: made(ids))


def _encoder() -> Built:
    from x_transformers import Encoder

    options = {"image_size": 16, "patch_size": 4, "num_classes": 5, "attn_layers": Encoder(**_DECODER)}
    return module("x_transformers.ViTransformerWrapper", options, (2, 3, 16, 16))()


def _both() -> Built:
    sizes = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in (("num_tokens", 20), ("depth", 1))}
    sizes |= {f"{side}_{key}": value for side in ("enc", "dec") for key, value in (("heads", 2), ("max_seq_len", 8))}
    return module("x_transformers.XTransformer", {"dim": 16, **sizes}, Ids(20, (2, 6)), Ids(20, (2, 7)))()


def _continuous() -> Built:
    from x_transformers import Decoder

    options = {"dim_in": 3, "dim_out": 3, "max_seq_len": 8, "attn_layers": Decoder(**_DECODER)}
    return module("x_transformers.ContinuousTransformerWrapper", options, (2, 6, 3))()
