"""Random families: chunks, lengths, frames and counts."""

from __future__ import annotations

import re

import pytest
import torch

import jetplane as jp
from cases import F64
from jetplane.directions import (
    Gaussian,
    Orthonormal,
    Sphere,
)
from test_directions import RANDOM, all_rows, leaves, plane

F32 = torch.float32


@pytest.mark.parametrize("family", RANDOM)
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.float16])
def test_rows_in_any_chunks_are_the_same(family: type, dtype: torch.dtype) -> None:
    made = plane(leaves(dtype), seed=3, step=4, sample=1)
    drawn = family(6).draw(made)
    assert isinstance(drawn, jp.Directions) and drawn.k == 6 == family(6).count(made.leaves)
    for position, leaf in enumerate(made.leaves):
        whole = drawn.rows(position, leaf, 0, 6)
        assert whole.shape == (6, *leaf.shape) and whole.dtype == dtype and whole.device == leaf.device
        parts = [family(6).draw(made).rows(position, leaf, a, b) for a, b in [(0, 1), (1, 4), (4, 6)]]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(drawn.rows(position, leaf, 0, 6), whole)


@pytest.mark.parametrize("family", RANDOM)
def test_every_number_of_the_plane_matters_and_torch_is_left_alone(family: type) -> None:
    x = [torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)]
    before = torch.get_rng_state()
    planes = [plane(x), plane(x, seed=1), plane(x, seed=2**32), plane(x, step=1), plane(x, sample=1)]
    rows = [all_rows(family(2), made) for made in planes]
    blocks = [half for drawn in rows for row in drawn for half in (row[:40], row[40:])]
    for i, a in enumerate(blocks):
        for b in blocks[:i]:
            assert not torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(all_rows(family(2), plane(x, seed=-1)), all_rows(family(2), plane(x, seed=2**64 - 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_rounded_float32(dtype: torch.dtype) -> None:
    long, short = (all_rows(Gaussian(3), plane([torch.zeros(50, dtype=d)])) for d in (F32, dtype))
    assert torch.equal(long.to(dtype), short)


def test_sphere_rows_have_unit_length_over_all_parameters() -> None:
    rows = all_rows(Sphere(5), plane(leaves()))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-14)
    normal_rows = all_rows(Gaussian(5), plane(leaves()))
    torch.testing.assert_close(rows, normal_rows / normal_rows.norm(dim=1, keepdim=True))


@pytest.mark.parametrize("k", [1, 4, 23])
def test_orthonormal_rows_are_gram_schmidt_of_the_normal_ones(k: int) -> None:
    made = plane(leaves())
    rows, raw = all_rows(Orthonormal(k), made), all_rows(Gaussian(k), made)
    torch.testing.assert_close(rows @ rows.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-13)
    triangle = raw @ rows.T
    assert float(triangle.triu(1).abs().max()) < 1e-12 and bool((triangle.diagonal() > 0).all())


def test_mixed_dtypes_in_one_frame() -> None:
    made = plane([torch.zeros(4, dtype=F32), torch.zeros(6, dtype=torch.float64)])
    drawn = Orthonormal(3).draw(made)
    parts = [drawn.rows(i, x, 0, 3) for i, x in enumerate(made.leaves)]
    assert [part.dtype for part in parts] == [F32, F64]
    rows = torch.cat([part.double() for part in parts], dim=1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", RANDOM)
@pytest.mark.parametrize(
    ("k", "error", "message"),
    [
        (0, ValueError, "k is 0; expected at least one direction."),
        (-3, ValueError, "k is -3; expected at least one direction."),
        (2.0, TypeError, "k is float; expected a whole number of directions."),
        (True, TypeError, "k is bool; expected a whole number of directions."),
    ],
)
def test_bad_counts(family: type, k: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        family(k)


def test_more_orthonormal_directions_than_dimensions() -> None:
    with pytest.raises(ValueError, match=r"^k is 24; expected at most 23 orthonormal directions in 23 dimensions\.$"):
        Orthonormal(24).draw(plane(leaves()))
