"""Every model type of transformers whose config can be made tiny."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .program import Built, Program

__all__ = ["programs"]

_LARGEST = 3_000_000  # parameters of what counts as tiny
_WORDS = 99  # of every vocabulary
_EXACT = {  # sizes by the whole name of a field
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "attention_head_dim", "global_head_dim"), 8),
    **{"qk_rope_head_dim": 8, "qk_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "index_head_dim": 16},
    **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "first_k_dense_replace": 1},
    **{"num_codebooks": 2, "codebook_size": 32, "codebook_dim": 16, "image_size": 32, "patch_size": 8},
    **{"vocab_size": _WORDS, "entity_vocab_size": 20, "num_queries": 4, "num_mel_bins": 16, "max_source_positions": 30},
    **{"max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_target_positions": 30, "num_labels": 3},
    **{"conv_dim": [16, 16], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8, "mamba_dt_rank": 4},
    **{"state_size": 8, "time_step_rank": 4, "conv_kernel_size": 3, "chunk_size": 8, "window_size": 4},
    **{"sliding_window": 8, "local_attention_window": 8, "num_buckets": 8, "relative_attention_num_buckets": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "lru_width": 32, "block_size": 8},
    **{"num_latents": 4, "d_latents": 32, "frequency_stride": 8, "time_stride": 8, "max_length": 32, "num_frames": 4},
    **{"context_length": 16, "prediction_length": 4, "lags_sequence": [1, 2, 3], "num_input_channels": 2},
    **{
        "patch_length": 4,
        "patch_stride": 4,
        "horizon_length": 8,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
    },
    **{"temporal_patch_size": 1, "spatial_merge_size": 2, "tubelet_size": [2, 8, 8], "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": _WORDS, "laurel_rank": 4, "altup_num_inputs": 2, "num_kv_shared_layers": 0},
    **{"max_2d_position_embeddings": 64, "attention_window": 4, "num_pos_feats": 16, "encoder_layers": 2},
    **{"n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1},
    **{"upsample_initial_channel": 16, "num_groups": 4, "stem_hidden_channels": 16, "embedding_dynamic_scale": 1},
}
_ENDINGS: tuple[tuple[tuple[str, ...], int], ...] = (  # by how the name ends, the first that fits
    (("attention_heads", "num_heads", "n_head", "n_heads", "_heads"), 4),
    (("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "feedforward", "mlp_dim", "ffn_hidden_size"), 64),
    (("num_hidden_layers", "n_layer", "n_layers", "num_layers", "_layers", "num_blocks", "depth"), 2),
    (("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "_dim", "embedding_size", "_size"), 32),
    (("projection_dim", "proj_dim", "dim", "embed_channels", "hidden_channels"), 32),
)
_KEPT = ("patch_size", "kernel_size", "image_size", "crop_size", "type_vocab_size", "stride", "sampling_rate")
_LISTS = {"depths": 1, "num_blocks": 1, "layer_depths": 1, "num_layers": 1, "num_encoder_blocks": 1, "mlp_ratios": 2}


def programs() -> Iterator[Program]:
    """One program for each model type."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind in sorted(MODEL_MAPPING_NAMES):
        yield Program(f"transformers/{kind}", partial(_build, kind))


def _build(kind: str) -> Built:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    config = CONFIG_MAPPING[kind]()
    shrink(config)
    _in_double(config)
    found = MODEL_MAPPING[type(config)]
    classes = found if isinstance(found, (list, tuple)) else [found]
    with torch.device("meta"):
        size = sum(p.numel() for p in classes[0](config).parameters())
    if size > _LARGEST:
        raise ValueError(f"it has {size:,} parameters after its config was made small")
    model = classes[0](config).double().eval()
    return Built(model, _call(model, config))


def shrink(config: Any) -> None:
    """Make a config and those inside it tiny."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrink(value)
        elif name.startswith("_") or isinstance(value, (bool, str)) or value is None:
            continue
        else:
            _set(config, name, _small(name, value))
    _consistent(config)


def _in_double(config: Any) -> None:
    """Experts one after another: the grouped product has no kernel for float64."""
    from transformers import PretrainedConfig

    config._experts_implementation = "eager"
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            _in_double(value)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a field that its config computes or checks: it stays
        return


def _small(name: str, value: Any) -> Any:
    if name.endswith("token_id") or name.endswith("token_index"):
        return value if not isinstance(value, int) or value < _WORDS else _WORDS - 1
    if name in _EXACT and type(value) is type(_EXACT[name]):
        return _EXACT[name]
    if isinstance(value, int):
        return _whole(name, value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
        return type(value)(_listed(name, value))
    return value


def _whole(name: str, value: int) -> int:
    if name.endswith(_KEPT) or value <= 1:
        return value
    if "key_value_heads" in name or "kv_heads" in name:
        return min(value, 2)
    return next((min(value, small) for ends, small in _ENDINGS if name.endswith(ends)), value)


def _listed(name: str, value: Any) -> list[int]:
    if name in _LISTS:
        return [min(item, _LISTS[name]) for item in value]
    if "head" in name:
        return [min(item, 2) for item in value]
    if name.endswith(("sizes", "dims", "dim", "channels")):
        return [16 * 2 ** min(i, 1) for i, _ in enumerate(value)]
    return list(value)


def _consistent(config: Any) -> None:
    """Lists with an entry for each layer, and rotations, that fit the sizes."""
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple)) and isinstance(layers, int) and kinds:
            distinct = list(dict.fromkeys(kinds))
            _set(config, name, list(itertools.islice(itertools.cycle(distinct), layers)))
    for name in ("rope_parameters", "rope_scaling"):
        rotation = getattr(config, name, None)
        if isinstance(rotation, dict) and "mrope_section" in rotation:
            rotation["mrope_section"] = [2, 1, 1]


# -- what it is called with -----------------------------------------------------------------------------------------


def _call(model: nn.Module, config: Any) -> Callable[[], Any]:
    """The first of the inputs that the model takes."""
    takes = inspect.signature(model.forward).parameters
    errors = []
    for inputs in _inputs(config, getattr(model, "main_input_name", "input_ids")):
        if not all(name in takes for name in inputs) and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            inputs = {name: value for name, value in inputs.items() if name in takes}
        call = partial(model, **inputs, **({"use_cache": False} if "use_cache" in takes else {}))
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            errors.append(f"{'+'.join(inputs)}: {type(error).__name__} {error}")
        else:
            return call
    raise ValueError("; ".join(error[:150] for error in errors))


def _inputs(config: Any, main: str) -> Iterator[dict[str, Any]]:
    ids = torch.randint(3, 90, (2, 8))
    text = {"input_ids": ids, "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    image = torch.randn(2, _field(config, "num_channels", 3), *(_image(config),) * 2)
    mel = _field(config, "num_mel_bins", 16)
    offered: dict[str, list[dict[str, Any]]] = {
        "input_ids": [
            {**text, "decoder_input_ids": ids[:, :5]},
            text,
            {**text, "pixel_values": image},
            {"input_ids": ids},
            {"input_ids": ids, "bbox": torch.randint(0, 30, (2, 8, 1)).expand(2, 8, 4).contiguous()},
        ],
        "pixel_values": [
            {"pixel_values": image},
            {"pixel_values": image, "input_ids": ids},
            {"pixel_values": torch.randn(2, 3, 64, 64)},
            {"pixel_values": torch.randn(2, 3, 224, 224)},
            {"pixel_values": torch.randn(2, 4, 3, 32, 32)},
        ],
        "input_values": [
            {"input_values": torch.randn(2, 200)},
            {"input_values": torch.randn(2, 1, 400)},
            {"input_values": torch.randn(2, 32, mel)},
            {"input_values": torch.randn(2, 200), "decoder_input_values": torch.randn(2, 5, mel)},
        ],
        "input_features": [
            {"input_features": torch.randn(2, mel, 60), "decoder_input_ids": ids[:, :5]},
            {"input_features": torch.randn(2, 40, mel), "decoder_input_ids": ids[:, :5]},
            {"input_features": torch.randn(2, 40, _field(config, "hidden_size", 32))},
        ],
        "hidden_states": [{"hidden_states": torch.randn(16, 192), "grid_thw": torch.tensor([[1, 4, 4]])}],
        "past_values": [
            {"past_values": torch.randn(2, 16, 2)},
            {"past_values": torch.randn(2, 512, 7)},
            {
                **{"past_values": torch.randn(2, 19), "past_time_features": torch.randn(2, 19, 0)},
                **{"past_observed_mask": torch.ones(2, 19), "future_values": torch.randn(2, 4)},
                **{"future_time_features": torch.randn(2, 4, 0)},
            },
        ],
    }
    yield from offered.get(main, [])
    for name, several in offered.items():
        if name != main:
            yield from several


def _image(config: Any) -> int:
    size = _field(config, "image_size", 32)
    return size if isinstance(size, int) else size[0]


def _field(config: Any, name: str, default: Any) -> Any:
    for one in (
        config,
        *(getattr(config, part, None) for part in ("vision_config", "backbone_config", "audio_config")),
    ):
        if one is not None and getattr(one, name, None) is not None:
            return getattr(one, name)
    return default
