"""The adjoint of attention, whichever kernel it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint_cases import BY_MODULE, check_record
from jetplane.gradients.adjoints import attending
from jetplane.gradients.adjoints.adjoint import find
from jetplane.gradients.program.done import Done

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
HEADS, TALL, WIDE = 6, 5, 7
MASKS = {
    "none": None,
    "of all": (TALL, WIDE),
    "of samples": (2, 1, TALL, WIDE),
    "of heads": (HEADS, TALL, WIDE),
    "of each": (2, HEADS, TALL, WIDE),
}


@pytest.mark.parametrize("op", BY_MODULE["attending"], ids=str)
def test_a_record_equals_the_default(op: Any) -> None:
    check_record(op)


class Softmaxes(TorchDispatchMode):
    """How often weights are made."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._safe_softmax.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shared", [1, 2, 6])
@pytest.mark.parametrize("at_once", [1, 4, 6])
def test_heads_are_taken_some_at_a_time(at_once: int, shared: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=made)

    query, delta = normal(2, HEADS, TALL, 4), normal(2, HEADS, TALL, 4)
    key, value = normal(2, HEADS // shared, WIDE, 4), normal(2, HEADS // shared, WIDE, 4)
    bias = None if MASKS[mask] is None else normal(*MASKS[mask])
    given = [one.requires_grad_() for one in (query, key, value)]
    out = F.scaled_dot_product_attention(*given, attn_mask=bias, enable_gqa=shared > 1)
    wanted = torch.autograd.grad(out, given, delta)
    # one head more than the query's own bytes allow, in bytes of a head's weights
    monkeypatch.setattr(attending, "_SMALL", at_once * 2 * TALL * WIDE * 8)
    args = [one.detach() for one in given]
    done = Done(KERNEL, args, {} if bias is None else {"attn_mask": bias}, (out.detach(), None))
    for place, gradient in enumerate(wanted):
        pull = find(KERNEL, (place,)).pull
        assert pull is not None
        with Softmaxes() as made_weights:
            found = pull(delta, done, (place,))
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
        most = max(at_once, args[0].nbytes // (2 * TALL * WIDE * 8))
        least = -(-HEADS // most)
        assert least <= made_weights.count <= (least if shared == 1 else HEADS)
