"""Who reads which value, and where the losses' derivative is known."""

from __future__ import annotations

from torch import Tensor, nn

from classifiers import X, off


def test_tangents_are_not_counted_twice() -> None:
    # z enters the loss itself and, with something that is not exact, once more
    a, b, c = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleList([a, b, c])

    def losses(x: Tensor) -> Tensor:
        h = a(x)
        z = b(h)
        return z.square().sum(1) + (z * h).sum(1) + c(h.tanh()).sum(1)

    assert off(model, losses, X)
