"""PyTorch Geometric: convolutions, models and pooling on a small graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .program import Built, Program

__all__ = ["programs"]

_PLAIN: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("GCNConv", "SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "TransformerConv", "TAGConv")},
    "ARMAConv": {},
    **{key: {} for key in ("LEConv", "SuperGATConv", "ClusterGCNConv", "MFConv", "GeneralConv", "FiLMConv", "SGConv")},
    **{key: {} for key in ("SSGConv", "EGConv", "FeaStConv", "GENConv", "ResGatedGraphConv", "HypergraphConv")},
    **{"ChebConv": {"K": 3}, "SSGConv": {"alpha": 0.1}, "AntiSymmetricConv": {}, "WLConvContinuous": {}},
}
_MODELS = {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {}, "PNA": {}, "EdgeCNN": {}, "MLP": {}, "LINKX": {}}
_ATOMS = {
    "SchNet": {"hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 8},
    "DimeNetPlusPlus": {
        **{"hidden_channels": 16, "out_channels": 1, "num_blocks": 1, "int_emb_size": 8, "basis_emb_size": 4},
        **{"out_emb_channels": 16, "num_spherical": 3, "num_radial": 3},
    },
    "ViSNet": {"hidden_channels": 16, "num_layers": 1, "num_rbf": 8, "num_heads": 2},
}


def programs() -> Iterator[Program]:
    """One program for each layer and model."""
    for name, options in _PLAIN.items():
        yield Program(f"torch_geometric/{name}", partial(_layer, name, options))
    for name in ("GINConv", "EdgeConv", "NNConv", "GatedGraphConv", "GCN2Conv", "APPNP", "RGCNConv", "PNAConv"):
        yield Program(f"torch_geometric/{name}", partial(_special, name))
    for name in _MODELS:
        yield Program(f"torch_geometric/models.{name}", partial(_model, name))
    for name, options in _ATOMS.items():
        yield Program(f"torch_geometric/models.{name}", partial(_atoms, name, options))


def _graph() -> tuple[torch.Tensor, torch.Tensor]:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2, 4], [1, 2, 3, 4, 5, 0, 3, 5, 1]])
    return torch.randn(6, 8), torch.cat([edges, edges.flip(0)], 1)


def _layer(name: str, options: dict[str, Any]) -> Built:
    from torch_geometric import nn as layers

    x, edges = _graph()
    sizes = () if name == "WLConvContinuous" else (8,) if name == "AntiSymmetricConv" else (8, 8)
    layer = getattr(layers, name)(*sizes, **options)
    mixed = nn.ModuleList([nn.Linear(8, 8), layer])
    return Built(mixed, lambda: layer(mixed[0](x).tanh(), edges))


def _special(name: str) -> Built:
    from torch_geometric import nn as layers

    x, edges = _graph()
    kinds = torch.arange(edges.shape[1]) % 2
    made: dict[str, Any] = {
        "GINConv": lambda: (layers.GINConv(nn.Linear(8, 4)), ()),
        "EdgeConv": lambda: (layers.EdgeConv(nn.Sequential(nn.Linear(16, 8), nn.Tanh())), ()),
        "NNConv": lambda: (layers.NNConv(8, 4, nn.Linear(2, 32)), (torch.randn(edges.shape[1], 2),)),
        "GatedGraphConv": lambda: (layers.GatedGraphConv(8, 2), ()),
        "GCN2Conv": lambda: (layers.GCN2Conv(8, 0.1, 0.5, 1), None),
        "APPNP": lambda: (layers.APPNP(3, 0.1), ()),
        "RGCNConv": lambda: (layers.RGCNConv(8, 4, 2), (kinds,)),
        "PNAConv": lambda: (
            layers.PNAConv(8, 4, ["mean", "std"], ["identity", "amplification"], torch.ones(8).long()),
            (),
        ),
    }
    layer, more = made[name]()
    mixed = nn.ModuleList([nn.Linear(8, 8), layer])

    def call() -> Any:
        hidden = mixed[0](x).tanh()
        return layer(hidden, x, edges) if more is None else layer(hidden, edges, *more)

    return Built(mixed, call)


def _model(name: str) -> Built:
    from torch_geometric import nn as layers

    x, edges = _graph()
    if name == "MLP":
        model = layers.MLP([8, 16, 4])
        return Built(model.eval(), partial(model, x))
    if name == "LINKX":
        model = layers.LINKX(6, 8, 8, 4, 2)
        return Built(model.eval(), partial(model, x, edges))
    more = (
        {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8).long()} if name == "PNA" else {}
    )
    model = getattr(layers, name)(8, 16, 2, 4, **more)
    return Built(model.eval(), partial(model, x, edges))


def _atoms(name: str, options: dict[str, Any]) -> Built:
    from torch_geometric import nn as layers

    model = getattr(layers, name)(**options).eval()
    kinds, places = torch.tensor([6, 1, 1, 8, 1]), torch.randn(5, 3) * 1.5
    return Built(model, partial(model, kinds, places, torch.zeros(5, dtype=torch.long)))
