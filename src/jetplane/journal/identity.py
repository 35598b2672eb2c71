"""What identifies a run, and how two runs differ.

A replay needs the directions and the form of the update; to go on with a run, bit by bit, takes the curvature, the
solver and the options of the optimizer, too. All of it is in the header of a journal, as plain values.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import JournalRefused
from ..optim import HyperplaneSearch
from ..optim.moving import labels
from .raw_bytes import name_of
from .recipes import recipe_of

__all__ = ["Tracked", "compare", "identity", "machine", "tracked", "update_form", "versions"]

# The form of the update: another number wherever the arithmetic of optim/step.py's changes.
_UPDATES = {"cpu": 1, "cuda": 2}  # on CUDA: sums in the order of directions, by directions/weighed.py


class Tracked(NamedTuple):
    """The tensors of a run, with their names."""

    leaves: list[Tensor]  # of all groups, those that are frozen, too
    names: list[str]
    groups: list[int]  # of each leaf
    buffers: dict[str, Tensor]
    kept: set[str]  # names of the buffers that belong into a file of the model
    aliases: dict[str, int]  # further names of leaves that a model has in several places


def tracked(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> Tracked:
    """The parameters of an optimizer, by the names of a model where there is one, and that model's buffers."""
    of_model = {} if model is None else {id(leaf): name for name, leaf in model.named_parameters()}
    leaves, names, numbers = [], [], []
    for number, group in enumerate(optimizer.param_groups):
        prefix = f"group {number}'s " if len(optimizer.param_groups) > 1 else ""
        for leaf, label in zip(group["params"], labels(group, prefix), strict=True):
            if model is not None and id(leaf) not in of_model:
                raise JournalRefused(
                    f"{label} of the optimizer is no parameter of the model {type(model).__name__}; expected the model "
                    "that it trains."
                )
            leaves.append(leaf)
            names.append(of_model.get(id(leaf), label))
            numbers.append(number)
    if model is None:
        return Tracked(leaves, names, numbers, {}, set(), {})
    places, known = {id(leaf): place for place, leaf in enumerate(leaves)}, set(names)
    every = model.named_parameters(remove_duplicate=False)
    aliases = {name: places[id(leaf)] for name, leaf in every if id(leaf) in places and name not in known}
    buffers = dict(model.named_buffers())
    return Tracked(leaves, names, numbers, buffers, buffers.keys() & model.state_dict().keys(), aliases)


def identity(optimizer: Any, of: Tracked) -> dict[str, Any]:
    """What a run is, as plain values; refuses one whose steps are not made of seeds and coefficients."""
    if not isinstance(optimizer, HyperplaneSearch):
        name = type(optimizer).__name__
        raise JournalRefused(
            f"the optimizer is {name}, whose update is no sum of directions with a few coefficients; expected a "
            "HyperplaneSearch, such as FGD, FoMoH, FoMoHKD or GaussNewtonSearch."
        )
    kinds = {leaf.device.type for leaf in of.leaves}
    return {
        **versions(),
        "update": update_form(kinds),
        "optimizer": type(optimizer).__name__,
        "seed": optimizer.param_groups[0]["seed"],
        "directions": recipe_of(optimizer.directions),
        "K": optimizer.directions.count(of.leaves),
        "samples": optimizer.samples,
        "curvature": _text(optimizer.curvature),
        "solver": _text(optimizer.solver),
        "accept": _text(optimizer.accept),
        "clip": optimizer.clip,
        "maximize": optimizer.maximize,
        "compile": optimizer.compile,
        "parameters": [
            [name, list(leaf.shape), name_of(leaf.dtype), list(leaf.stride()), group]
            for name, leaf, group in zip(of.names, of.leaves, of.groups, strict=True)
        ],
        "buffers": [[name, list(one.shape), name_of(one.dtype)] for name, one in of.buffers.items()],
        "unsaved": sorted(of.buffers.keys() - of.kept),
        "aliases": of.aliases,
    }


_ALIKE = {"0.1.0", "0.2.0"}  # versions of jetplane with the same directions and updates


def versions() -> dict[str, str]:
    """The versions whose arithmetic a run is made of."""
    library = importlib.import_module(__name__.partition(".")[0])  # which is not whole when this module is imported
    return {"jetplane": library.__version__, "torch": str(torch.__version__)}


def update_form(kinds: Iterable[str]) -> str:
    """Which arithmetic an update is made by, on these kinds of devices."""
    named = sorted(kinds)
    return f"form {max(_UPDATES.get(kind, 1) for kind in named)} on {', '.join(named)}"


def machine(device: torch.device) -> dict[str, Any]:
    """Where a run was: no part of what it is, but a place to look when a replay differs."""
    found: dict[str, Any] = {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found


def compare(there: Mapping[str, Any], here: Mapping[str, Any], path: object) -> None:
    """Raise where a journal belongs to another run than this one, with what differs."""
    found = list(_differences(there, here))
    if found:
        raise JournalRefused(f"the journal {path} is that of another run: {'; '.join(found)}.")


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name, ours in here.items():
        theirs = there.get(name)
        if theirs != ours and not (name == "jetplane" and {theirs, ours} <= _ALIKE):
            if name in ("parameters", "buffers") and isinstance(theirs, Sequence):
                yield _tensors_differ(name, theirs, ours)
            else:
                yield f"{name} is {theirs!r} there and {ours!r} here"


def _tensors_differ(what: str, theirs: Sequence[Any], ours: Sequence[Any]) -> str:
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} {what} there and {len(ours)} here"
    number = next(n for n, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other)
    one, other = theirs[number], ours[number]
    return f"number {number} of the {what} is {_described(one)} there and {_described(other)} here"


def _described(entry: Sequence[Any]) -> str:
    name, shape, dtype, *rest = entry
    layout = f" with strides {tuple(rest[0])} in group {rest[1]}" if rest else ""
    return f"{name} {tuple(shape)} {dtype}{layout}"


def _text(part: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(part))
