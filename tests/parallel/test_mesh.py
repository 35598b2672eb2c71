"""What is a mesh, and what is not."""

from __future__ import annotations

from jetplane.parallel.mesh import mesh_of


def test_a_group_or_nothing_is_no_mesh() -> None:
    assert mesh_of(None) is None and mesh_of("data") is None
