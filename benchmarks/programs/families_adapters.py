"""PEFT: its methods on a tiny Llama."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .families_transformers import shrink
from .program import Built, Program

__all__ = ["programs"]

_TARGETS = ["q_proj", "v_proj"]
_METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "target_modules": _TARGETS},
    "LoraConfig:dora": {"r": 4, "target_modules": _TARGETS, "use_dora": True},
    "LoraConfig:rslora": {"r": 4, "target_modules": _TARGETS, "use_rslora": True},
    "LoHaConfig": {"r": 4, "target_modules": _TARGETS},
    "LoKrConfig": {"r": 4, "target_modules": _TARGETS},
    "AdaLoraConfig": {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": _TARGETS},
    "IA3Config": {"target_modules": _TARGETS, "feedforward_modules": []},
    "OFTConfig": {"r": 4, "target_modules": _TARGETS, "oft_block_size": 0},
    "BOFTConfig": {"boft_block_size": 4, "target_modules": _TARGETS},
    "HRAConfig": {"r": 4, "target_modules": _TARGETS},
    "VeraConfig": {"r": 4, "target_modules": _TARGETS},
    "FourierFTConfig": {"n_frequency": 10, "target_modules": _TARGETS},
    "RandLoraConfig": {"r": 4, "target_modules": _TARGETS},
    "C3AConfig": {"block_size": 8, "target_modules": _TARGETS},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "BoneConfig": {"r": 4, "target_modules": _TARGETS},
    "MissConfig": {"r": 4, "target_modules": _TARGETS},
    "ShiraConfig": {"r": 2, "target_modules": _TARGETS},
    "VBLoRAConfig": {"r": 4, "num_vectors": 16, "vector_length": 8, "topk": 2, "target_modules": _TARGETS},
    "TrainableTokensConfig": {"token_indices": [3, 5], "target_modules": ["embed_tokens"]},
    "PromptTuningConfig": {"num_virtual_tokens": 3, "task_type": "FEATURE_EXTRACTION"},
    "PrefixTuningConfig": {"num_virtual_tokens": 3, "task_type": "FEATURE_EXTRACTION"},
    "PromptEncoderConfig": {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "task_type": "FEATURE_EXTRACTION"},
}


def programs() -> Iterator[Program]:
    """One program for each method."""
    for name, options in _METHODS.items():
        yield Program(f"peft/{name}", partial(_build, name.split(":")[0], options))


def _build(name: str, options: dict[str, Any]) -> Built:
    import peft
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig()
    shrink(config)
    base = LlamaModel(config).double()
    model = peft.get_peft_model(base, getattr(peft, name)(**options)).double().eval()
    ids = torch.randint(3, 90, (2, 8))
    return Built(model, partial(model, input_ids=ids, attention_mask=torch.ones_like(ids)))
