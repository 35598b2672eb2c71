"""diffusers: denoising networks and autoencoders from small configs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .program import Built, Program

__all__ = ["programs"]

_BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
_SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # class: options, and shapes of what it is called with
    "UNet2DModel": (
        {
            **_BLOCKS,
            **{"sample_size": 16, "in_channels": 3, "out_channels": 3, "attention_head_dim": 8},
            **{
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            },
        },
        {"sample": (1, 3, 16, 16), "timestep": 7},
    ),
    "UNet2DConditionModel": (
        {
            **_BLOCKS,
            **{"sample_size": 16, "cross_attention_dim": 12, "attention_head_dim": 8},
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        {"sample": (1, 4, 16, 16), "timestep": 7, "encoder_hidden_states": (1, 5, 12)},
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (16, 32),
            "sample_size": 32,
            "in_channels": 14,
            "out_channels": 14,
            "extra_in_channels": 0,
        }
        | {"down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"), "up_block_types": ("UpResnetBlock1D",)}
        | {"mid_block_type": "MidResTemporalBlock1D", "out_block_type": "OutConv1DBlock", "act_fn": "swish"}
        | {"use_timestep_embedding": True, "time_embedding_type": "positional", "norm_num_groups": 4},
        {"sample": (1, 14, 16), "timestep": 7},
    ),
    "UNet3DConditionModel": (
        {
            **_BLOCKS,
            **{"sample_size": 16, "cross_attention_dim": 12, "attention_head_dim": 4},
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        {"sample": (1, 4, 2, 16, 16), "timestep": 7, "encoder_hidden_states": (1, 5, 12)},
    ),
    "ControlNetModel": (
        {
            **_BLOCKS,
            **{"cross_attention_dim": 12, "attention_head_dim": 8, "conditioning_embedding_out_channels": (8, 8)},
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        },
        {"sample": (1, 4, 16, 16), "timestep": 7, "encoder_hidden_states": (1, 5, 12)}
        | {"controlnet_cond": (1, 3, 32, 32)},
    ),
    "AutoencoderKL": (
        {**_BLOCKS, "latent_channels": 4}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (1, 3, 16, 16)},
    ),
    "VQModel": (
        {**_BLOCKS, "latent_channels": 4, "num_vq_embeddings": 8}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (1, 3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
        | {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1), "upsampling_scaling_factor": 2},
        {"sample": (1, 3, 16, 16)},
    ),
    "AsymmetricAutoencoderKL": (
        {"down_block_types": ("DownEncoderBlock2D",), "down_block_out_channels": (16,), "layers_per_down_block": 1}
        | {"up_block_types": ("UpDecoderBlock2D",), "up_block_out_channels": (16,), "layers_per_up_block": 1}
        | {"norm_num_groups": 4},
        {"sample": (1, 3, 16, 16)},
    ),
    "Transformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 8, "num_layers": 1, "norm_num_groups": 4},
        {"hidden_states": (1, 8, 8, 8)},
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
        | {"patch_size": 2, "num_embeds_ada_norm": 20, "norm_num_groups": 4},
        {"hidden_states": (1, 4, 8, 8), "timestep": [3], "class_labels": [2]},
    ),
    "PixArtTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8}
        | {"cross_attention_dim": 16, "caption_channels": 12},
        {"hidden_states": (1, 4, 8, 8), "timestep": [3], "encoder_hidden_states": (1, 5, 12)},
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4}
        | {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 10, "out_channels": 4},
        {"hidden_states": (1, 4, 8, 8), "timestep": [3], "encoder_hidden_states": (1, 5, 12)}
        | {"pooled_projections": (1, 10)},
    ),
    "FluxTransformer2DModel": (
        {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
        | {
            "joint_attention_dim": 12,
            "pooled_projection_dim": 10,
            "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": False,
        },
        {"hidden_states": (1, 16, 4), "timestep": [3], "encoder_hidden_states": (1, 5, 12)}
        | {"pooled_projections": (1, 10), "txt_ids": (5, 3), "img_ids": (16, 3)},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1}
        | {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16}
        | {"pos_embed_max_size": 16},
        {"hidden_states": (1, 4, 8, 8), "timestep": [3], "encoder_hidden_states": (1, 5, 12)},
    ),
    "SanaTransformer2DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
        | {"caption_channels": 12, "sample_size": 8},
        {"hidden_states": (1, 4, 8, 8), "timestep": [3], "encoder_hidden_states": (1, 5, 12)},
    ),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8}
        | {"text_embed_dim": 12, "num_layers": 1, "sample_width": 8, "sample_height": 8, "sample_frames": 9}
        | {"max_text_seq_length": 5},
        {"hidden_states": (1, 3, 4, 8, 8), "timestep": [3], "encoder_hidden_states": (1, 5, 12)},
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
        | {"cross_attention_dim": 16, "caption_channels": 12},
        {"hidden_states": (1, 16, 4), "timestep": [3], "encoder_hidden_states": (1, 5, 12)}
        | {"encoder_attention_mask": None, "num_frames": 1, "height": 4, "width": 4},
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "embedding_dim": 8, "num_embeddings": 5}
        | {"additional_embeddings": 4},
        {"hidden_states": (1, 8), "timestep": 3, "proj_embedding": (1, 8), "encoder_hidden_states": (1, 5, 8)},
    ),
    "T2IAdapter": ({"channels": (8, 8), "num_res_blocks": 1, "downscale_factor": 2}, {"x": (1, 3, 16, 16)}),
}


def programs() -> Iterator[Program]:
    """One program for each class."""
    for name, (options, inputs) in _SMALL.items():
        yield Program(f"diffusers/{name}", partial(_build, name, options, inputs))


def _build(name: str, options: dict[str, Any], inputs: dict[str, Any]) -> Built:
    import diffusers

    model = getattr(diffusers, name)(**options).double().eval()
    given = {key: _given(value) for key, value in inputs.items()}
    return Built(model, partial(model, **given))


def _given(value: Any) -> Any:
    if isinstance(value, tuple):
        return torch.randn(value)
    return torch.tensor(value) if isinstance(value, list) else value
