"""Reports of steps: packed into one vector, and read again."""

from __future__ import annotations

import pytest
import torch

from cases import F64, randn
from jetplane.ad.algebra.jet import Quadratic
from jetplane.optim.reports import LateReport, Packing, Report, Reports
from jetplane.solvers import Status
from jetplane.solvers.traced import CODES


def number() -> torch.Tensor:
    return randn(1)[0]


def report(status: Status, actual: float | None = None, k: int = 3) -> Report:
    known = None if actual is None else torch.tensor(actual, dtype=F64)
    return Report(*(number(), randn(k), randn(k, k), randn(k), number()), known, status, 1)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_what_is_packed_is_read_again(k: int, dtype: torch.dtype) -> None:
    model = Quadratic(number().to(dtype), randn(k).to(dtype), randn(k, k).to(dtype))
    coefficients, predicted, actual = randn(k).to(dtype), number().to(dtype), number().to(dtype)
    for status in Status:
        code = torch.tensor(CODES.index(status))
        for end in (None, actual):
            packed = Packing.pack(model, coefficients, predicted, code, end)
            found = LateReport(packed, Packing(k, dtype, end is not None), "aux")
            for one, other in (
                *((found.loss, model.loss), (found.slope, model.slope), (found.curvature, model.curvature)),
                *((found.coefficients, coefficients), (found.predicted, predicted)),
            ):
                assert one.dtype == dtype and torch.equal(one, other)
            assert found.status is status and found.aux == "aux"
            assert found.evaluations == (1 if end is None else 2)
            assert found.actual is None if end is None else torch.equal(found.actual, end)


def test_reports_of_steps_are_stacked() -> None:
    first, second = report(Status.OK, 0.5), report(Status.FLAT)
    reports = Reports.of([first, second], {"x": torch.tensor([1.0, 2.0])})
    assert len(reports) == 2 and reports.status == [Status.OK, Status.FLAT]
    for name in ("loss", "slope", "curvature", "coefficients", "predicted"):
        both = torch.stack([getattr(first, name), getattr(second, name)])
        assert torch.equal(getattr(reports, name), both) and torch.equal(getattr(reports[1], name), both[1])
    assert float(reports.actual[0]) == 0.5 and reports.actual[1].isnan()  # it was not evaluated
    assert float(reports[1].aux["x"]) == 2.0
    assert Reports.of([second], None).actual is None
