"""Before relying on a result: which operations have rules, and do the derivatives agree with finite differences?"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import jetplane as jp


def main(argv: list[str] | None = None) -> None:
    """A program that is covered, and one that loses a tangent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=16)
    width = parser.parse_args(argv).width

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 2)).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(8, 4, dtype=torch.float64)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, x).square().mean()

    covered = jp.coverage(loss, params)
    print(covered)
    assert not covered.missing

    verified = jp.verify(loss, params)
    print(verified)
    assert verified.ok

    def lost(params: dict[str, Tensor]) -> Tensor:  # .item() gives a plain number: its tangent is lost, as in autograd
        return loss(params) * params["0.bias"].exp().sum().item()

    assert not jp.verify(lost, params).ok
    print("a lost tangent is found")


if __name__ == "__main__":
    main()
