"""The page of what was run."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .packages import PACKAGES

__all__ = ["page", "versions"]

_ABOUT = """# Other people's programs

jetplane is run on tiny models of well-known packages, built from their configs without a download. For each, slopes
and curvature in a plane of two random directions of all parameters are computed in float64 and compared with
backprop and double backward. Where double backward has no derivative, or says otherwise, finite differences of the
gradient decide: torch's own second derivatives of hardswish, of weight norm along an inner axis, and of Functions whose
backward reads what was saved are wrong.

- **exact**: the relative error is below 1e-6 (1e-3 beside finite differences).
- **refused**: jetplane said in a sentence what it cannot do. *complex*: of an operation on complex numbers.
- **wrong**: the numbers differ. These are listed in full.
- **not built**: the config could not be made tiny by our rules, needs another package, or took more than its time.
  Nothing is known of it.

Programs' own casts to float32 are widened to float64, and mixtures of experts use their loop, since torch's grouped
product has no kernel for float64. transformers' models run in eval mode, timm's and torchvision's in training mode.

To repeat it, in an environment with the packages (torchvision must match torch):

    pip install transformers timm torchvision diffusers peft torch_geometric
    pip install gpytorch torchdiffeq e3nn zuko nflows normflows
    pip install vit-pytorch x-transformers pytorch-metric-learning kornia torchmetrics entmax torchrl stable-baselines3
    pip install botorch pyro-ppl sbi deepxde pykan neuraloperator torchsde torchcde torchdyn geoopt egnn-pytorch
    pip install segmentation-models-pytorch ncps vector-quantize-pytorch denoising-diffusion-pytorch local-attention
    pip install linear-attention-transformer nystrom-attention slot-attention siren-pytorch pytorch-crf snntorch
    pip install pytorch-tabnet piq
    python -m benchmarks.programs --out benchmarks/results/programs.json --page docs/programs.md

It runs what the file does not hold yet; `--only timm/` runs some, `--again refused wrong` those that came out so.

The results were gathered on a machine in use, in several parts. Rows with a `commit` in the JSON were run at that one,
with a plus where there were changes to it; of the others, those marked `tangents_stop_at_no_grad` ran where tangents
stop at a program's own `no_grad`, the rest where they go on, which for them came out the same as backprop. A family
whose package is not there, or does not fit torch, is left out with a word.

The backward pass of torchdiffeq's adjoint solves another equation, so that backprop's slope is an approximation, by
1e-5 for rk4 in steps of 0.01; jetplane differentiates what the solver does, and values decide.

A Function without a rule is refused, because its forward body need not be what its author differentiates. Where it is,
one line says so, for a class or for its dotted name: `jp.register.transparent("package.module.Function")`.
`jp.register.composite` takes a program in its place. Rules for well-known packages are there already, by name
(`ad/rules/well_known_functions.py`, `ad/rules/torchvision_operations.py`); the packages are not imported for them.

Some stay refused, for there is nothing that would be right. The gradients of yoso's attention are a bound in place of
the derivative, and of no function at all: their own derivatives are not symmetric. PEFT's C3A gives its input a
gradient that fails torch's gradcheck. PEFT's Shira makes a sparse tensor of its parameters, which has no memory of its
own for rows to belong to.
"""


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def page(held: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join([_ABOUT, *_counts(held), "", *_parts(held["programs"]), "", *_listed(held["programs"])]) + "\n"


def _parts(programs: dict[str, Any]) -> Iterator[str]:
    """How many were run at which commit."""
    counts = Counter(found.get("commit", "") for found in programs.values() if found["result"] != "not built")
    parts = [f"{count} ran at {commit}" for commit, count in sorted(counts.items()) if commit]
    if parts:
        yield f"Of those that were built, {', '.join(parts)}, and {counts['']} before that."


def _kind(found: dict[str, Any]) -> str:
    return "complex" if found["result"] == "refused" and "complex" in found["words"] else found["result"]


def _counts(held: dict[str, Any]) -> Iterator[str]:
    by_package: dict[str, Counter[str]] = {}
    for name, found in held["programs"].items():
        by_package.setdefault(name.split("/")[0], Counter())[_kind(found)] += 1
    by_package["all"] = sum(by_package.values(), Counter())
    kinds = ("exact", "refused", "complex", "wrong", "failed", "not built")
    yield "| package | version | exact of those built | refused | complex | wrong | other errors | not built |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for package in [name for name in (*PACKAGES, "all") if name in by_package]:
        counts = [by_package[package][kind] for kind in kinds]
        built = sum(counts[:-1])
        version = held["versions"].get(package, f"torch {held['versions']['torch']}" if package == "all" else "")
        share = f"{counts[0]} of {built} ({counts[0] / max(built, 1):.1%})"
        yield f"| {package} | {version} | {share} | {' | '.join(map(str, counts[1:]))} |"


def _listed(programs: dict[str, Any]) -> Iterator[str]:
    titles = {"wrong": "Wrong", "failed": "Other errors", "refused": "Refused", "complex": "Refused: complex numbers"}
    for kind, title in titles.items():
        rows = [(name, found) for name, found in programs.items() if _kind(found) == kind]
        if rows:
            yield from (f"## {title}", "", "| program | words |", "| --- | --- |")
            yield from (f"| {name} | {_sentence(found['words'])} |" for name, found in rows)
            yield ""
    for kind, title in (("exact", "Exact"), ("not built", "Not built")):
        yield from (f"## {title}", "")
        by_package: dict[str, list[str]] = {}
        for name, found in programs.items():
            if found["result"] == kind:
                by_package.setdefault(name.split("/")[0], []).append(name.split("/", 1)[1])
        yield from (f"**{package}**: {', '.join(names)}.\n" for package, names in by_package.items())


def _sentence(words: str) -> str:
    """Its beginning."""
    return " ".join(words.split())[:240].replace("|", "\\|").replace("<", "&lt;")
