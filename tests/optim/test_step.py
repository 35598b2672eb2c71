"""The eager step and the traced one are twins, and the predicted decrease is one formula."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest
import torch

from jetplane import Quadratic
from jetplane.directions import Coordinate
from jetplane.optim import HyperplaneSearch, step, step_traced
from jetplane.solvers import Status, Step

ORDER = ["draw", "sweep", "solve", "accept", "apply", "learn", "report"]


@pytest.mark.parametrize("module", [step, step_traced])
def test_a_step_is_the_same_functions_in_the_same_order(module: ModuleType) -> None:
    (take,) = ast.parse(inspect.getsource(module.take)).body
    calls = [node for node in ast.walk(take) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    places = {call.func.id: (call.lineno, call.col_offset) for call in calls if call.func.id in ORDER}  # type: ignore[attr-defined]
    assert sorted(places, key=lambda name: places[name]) == ORDER
    assert [name for name in vars(module) if name in ORDER] == ORDER  # as they stand in the file


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_decrease_is_the_same_in_each_arithmetic(k: int) -> None:
    slope, half, c = torch.randn(k).double(), torch.randn(k, k).double(), torch.randn(k).double()
    model = Quadratic(torch.tensor(3.0).double(), slope, half + half.T)
    expected = -sum(slope[i] * c[i] + sum(c[i] * model.curvature[i, j] * c[j] / 2 for j in range(k)) for i in range(k))
    torch.testing.assert_close(model.decrease(c), expected)
    torch.testing.assert_close(model.decrease(c, fused=True), expected)
    numbers = Quadratic.decrease_of(slope.tolist(), model.curvature.tolist(), c.tolist())
    assert numbers == pytest.approx(float(expected))


def test_a_decrease_whose_products_are_too_large_for_the_dtype_is_finite() -> None:
    """By two large curvatures that cancel, in float32 and with more directions than Python's arithmetic is used for."""
    k, size = 6, 1e30
    curvature = torch.zeros(k, k)
    curvature[0, 0], curvature[1, 1] = size, -size
    x = torch.zeros(k, requires_grad=True)

    def solver(model: Quadratic) -> Step:
        return Step(torch.tensor([-1e5, 1e5, 0.0, 0.0, 0.0, 0.0]), Status.OK, torch.zeros(()))

    search = HyperplaneSearch([x], 1.0, Coordinate(), "exact", solver)
    search.step(lambda: x.sum() + (x @ curvature @ x) / 2)
    assert search.report.status is Status.OK and float(search.report.predicted) == 0.0
