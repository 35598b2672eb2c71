"""Batch norm: when it uses the statistics of the batch."""

from __future__ import annotations

from adjoint_cases import aten, done_of
from jetplane.gradients.adjoints import adjoint as table
from jetplane.gradients.adjoints.batch_norm import uses_batch


def test_the_batch_is_used_in_training_or_without_given_statistics() -> None:
    given = {op: done_of(op)[0].args for op, record in table.registered().items() if record.norms_batch}
    used = {op for op, args in given.items() if uses_batch(op, args)}
    assert {op for op in given if op not in used} == {
        aten.native_batch_norm.default,
        aten._batch_norm_no_update.default,
        aten._native_batch_norm_legit_no_training.default,
    }
    x, w, b, *_ = given[aten.native_batch_norm.default]
    assert uses_batch(aten.native_batch_norm.default, (x, w, b, None, None, False, 0.1, 1e-5))
    assert not uses_batch(aten.mm.default, (x, w))
