"""The plane that families draw."""

from __future__ import annotations

import re

import pytest
import torch

from jetplane.directions import (
    Plane,
)
from test_directions import RANDOM, plane


@pytest.mark.parametrize("family", RANDOM)
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (plane([torch.zeros(9)], step=-1), "step is -1; expected 0 to 2**32 - 1."),
        (plane([torch.zeros(9)], step=2**32), "step is 4294967296; expected 0 to 2**32 - 1."),
        (plane([torch.zeros(9)], sample=2**16), "sample is 65536; expected 0 to 2**16 - 1."),
        (plane([torch.zeros(1)] * 65537), "there are 65537 parameters; expected at most 2**16."),
    ],
    ids=["step-low", "step-high", "sample", "parameters"],
)
def test_planes_out_of_range(family: type, made: Plane, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        family(2).draw(made)
