"""Steps taken once more from their records have the bits of those that were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from jetplane.directions import Gaussian, Plane
from jetplane.errors import JournalDamaged, JournalRefused, ReplayDiffers
from jetplane.journal import Journal, identity, opened, replay, snapshots, verify
from jetplane.journal.plain_steps import kind_of
from jetplane.journal.retake import Replica
from jetplane.journal.step_record import StepRecord
from jetplane.optim import FGD
from jetplane.solvers import Status
from journaled import METHODS, Run, assert_replayed, convolutional, recorded, same, same_bits

STEPS = 20


@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_replayed_bit_by_bit(method: str, tmp_path: Path) -> None:
    states = recorded(tmp_path, method, STEPS, snapshot_every=9, digest_every=4)
    assert not same(states[0], states[-1])
    assert_replayed(tmp_path, states)
    assert verify(tmp_path) == (STEPS, 5, 2)


@pytest.mark.parametrize(
    "method, dtype",
    [("fgd", torch.float32), ("groups", torch.float64), ("groups", torch.bfloat16), ("gauss-newton", torch.bfloat16)],
)
def test_a_cnn_in_all_dtypes(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run = Run(method, dtype, convolutional)
    with run.journal(tmp_path, snapshot_every=100):
        states = run.states(20)
    assert not same(states[0], states[-1])
    assert_replayed(tmp_path, states)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", ["fgd", "fomoh-kd", "gauss-newton", "groups", "cubic"])
def test_a_cnn_on_cuda(method: str, tmp_path: Path) -> None:
    run = Run(method, torch.float32, convolutional, "cuda")
    with run.journal(tmp_path, digest_every=5, snapshot_every=8):
        states = run.states(20)
    assert not same(states[0], states[-1])
    assert_replayed(tmp_path, states)
    assert verify(tmp_path) == (20, 4, 2)
    again = Run(method, torch.float32, convolutional, "cuda")
    again.resumed(tmp_path).close()
    assert same(again.state, states[-1])


def test_parameters_that_are_frozen_for_a_while_and_those_that_are_not_read(tmp_path: Path) -> None:
    run = Run("previous")
    run.model.register_parameter("idle", torch.nn.Parameter(torch.full((3,), torch.inf, dtype=torch.float64)))
    run.optimizer.add_param_group({"params": [run.model.idle], "weight_decay": 0.5})
    run.rates.append(0.05)
    states = [run.state]
    with run.journal(tmp_path):
        for number in range(12):
            run.model[0].weight.requires_grad_(not 3 <= number < 7)
            run.step()
            states.append(run.state)
    assert torch.equal(states[3]["0.weight"], states[7]["0.weight"])
    assert states[-1]["idle"].isinf().all()  # nobody looks at it
    assert_replayed(tmp_path, states)


def test_steps_that_are_not_taken_leave_all_but_the_buffers(tmp_path: Path) -> None:
    run = Run("fgd")
    x = torch.randn(8, 2, dtype=torch.float64)
    with run.journal(tmp_path):
        for number in range(6):
            factor = float("nan") if number in (2, 3) else 1.0
            run.optimizer.step(lambda factor=factor: run.model(x).square().mean() * factor)
    assert [one.status.name for one in opened(tmp_path).records(2, 5)] == ["NONFINITE", "NONFINITE", "OK"]
    assert same(replay(tmp_path), run.state)
    before, after = replay(tmp_path, 2), replay(tmp_path, 3)
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert [int(one["1.num_batches_tracked"]) for one in (before, after)] == [2, 3]


def test_a_strided_parameter_and_one_that_is_empty(tmp_path: Path) -> None:
    leaf = torch.randn(5, 3, dtype=torch.float32).T.requires_grad_()
    empty = torch.zeros(0, 2, requires_grad=True)
    opt = FGD([leaf, empty], lr=0.1, k=2, weight_decay=0.3)
    with Journal(tmp_path, opt):
        for _ in range(5):
            opt.step(lambda: leaf.cos().sum() + empty.sum())
    found = opened(tmp_path).replica(5)
    assert found.leaves[0].stride() == leaf.stride()
    assert torch.equal(found.leaves[0], leaf)


def test_what_is_replayed_is_what_a_model_loads(tmp_path: Path) -> None:
    def tied() -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        model[2].weight = model[0].weight
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        return model

    model = tied()
    opt = FGD(model.parameters(), lr=0.1)
    with Journal(tmp_path, opt, model=model):
        for _ in range(3):
            opt.step(lambda: model(torch.randn(4, 2)).square().mean() + model.scratch.add_(1.0).sum())
    other = tied()
    other.load_state_dict(replay(tmp_path))
    assert same(other.state_dict(), model.state_dict())
    assert opened(tmp_path).replica(3).buffers["scratch"].tolist() == [3.0, 3.0]


def test_another_machine_is_named(tmp_path: Path) -> None:
    recorded(tmp_path, "fomoh-kd", 3, digest_every=1)
    journal = opened(tmp_path)
    replica = journal.replica(1)
    replica.header["machine"] = {"processor": "other", "threads": 99}
    replica.leaves[0].add_(1.0)
    message = (
        r"or this machine rounds otherwise \({'processor': 'other', 'threads': 99} there, {'processor': '.*', 'thr"
    )
    with pytest.raises(ReplayDiffers, match=message):
        replica.take_all(journal.records(1, 2))


def test_parameters_that_something_else_changed_are_found_out(tmp_path: Path) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path, digest_every=5), torch.no_grad():
        for number in range(12):
            if number == 7:
                run.model[0].weight.mul_(1.001)
            run.step()
    replay(tmp_path, 9)  # nothing is known to be wrong before the checksum
    with pytest.raises(ReplayDiffers, match="after step 9 the replay has other parameters than training had: they "):
        replay(tmp_path, 10)


def test_a_replay_that_ends_at_infinity_differs(tmp_path: Path) -> None:
    recorded(tmp_path, "fomoh-kd", 3)
    journal = opened(tmp_path)
    replica = journal.replica(1)
    replica.leaves[0].fill_(float("inf"))
    with pytest.raises(
        ReplayDiffers, match="after 2 steps the replay has numbers that are not finite, and training had"
    ):
        replica.take_all(journal.records(1, 2))


def test_records_out_of_order_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path, "fomoh-kd", 3)
    journal = opened(tmp_path)
    with pytest.raises(JournalDamaged, match="the record after step 0 is that of step 1"):
        journal.replica(0).take_all(journal.records(1, 2))


def test_a_start_that_does_not_fit(tmp_path: Path) -> None:
    recorded(tmp_path, "fomoh-kd", 2)
    tensors, start = replay(tmp_path, 0), tmp_path / "start"
    for name, other, message in (
        (
            "0.bias",
            torch.zeros(3, dtype=torch.float64),
            r"0.bias is \(3,\) torch.float64 in .*start; expected \(4,\) torch",
        ),
        (
            "1.running_mean",
            torch.zeros(4),
            r"is \(4,\) torch.float32 in .*; expected \(4,\) torch.float64, as the run began",
        ),
        ("3.weight", None, r"3.weight is not there in .*; expected \(1, 4\) torch.float64, as the run began"),
    ):
        changed = {key: one for key, one in (tensors | {name: other}).items() if one is not None}
        snapshots.export(changed, start, 0)
        with pytest.raises(JournalRefused, match=message):
            replay(tmp_path, start=start)


def test_the_form_of_the_update(tmp_path: Path) -> None:
    """Whoever changes it raises its number in _UPDATES of journal/identity.py, so that earlier journals are refused.

    One rounding after the other; with one direction there is no sum that a library could order otherwise.
    """
    model = torch.nn.Linear(50, 40)
    with Journal(tmp_path, FGD(model.parameters(), seed=5), model=model):
        pass
    replica = Replica(opened(tmp_path).header, torch.device("cpu"))
    expected = [torch.randn(leaf.shape) for leaf in replica.leaves]
    for leaf, start in zip(replica.leaves, expected, strict=True):
        leaf.copy_(start)
    for number in range(3):
        c, lr, factor = torch.tensor([-0.3]), 0.1 + number, 0.7
        replica.take([StepRecord(number, 5, Status.OK, 0.0, c.unsqueeze(0), factor, None, [lr], [0.0], 0)])
        rows = Gaussian(1).draw(Plane(5, number, 0, expected, list))
        for position, leaf in enumerate(expected):
            expected[position] = leaf + c * lr * rows.rows(position, leaf, 0, 1)[0] * factor
    assert identity._UPDATES == {"cpu": 1, "cuda": 2}
    assert all(same_bits(leaf, other) for leaf, other in zip(replica.leaves, expected, strict=True))


def test_steps_taken_together_have_the_bits_of_single_ones(tmp_path: Path) -> None:
    run = Run("gaussian", torch.float32, convolutional)
    with run.journal(tmp_path, snapshot_every=100, digest_every=7):
        states = run.states(20)
    run_of = opened(tmp_path)
    alone = run_of.replica(0)
    for number, record in enumerate(run_of.records(0, 20)):
        assert kind_of(record, run_of.header, alone.groups) is not None
        alone._move(record) if record.status is Status.OK else None
        assert all(
            same_bits(leaf, states[number + 1][name]) for name, leaf in zip(alone.names, alone.leaves, strict=True)
        )
    together = run_of.replica(0)
    together.take(list(run_of.records(0, 6)))
    assert same(together.exported, states[6])
    assert_replayed(tmp_path, states)


def test_the_default_device_and_inference_mode_change_nothing(tmp_path: Path) -> None:
    run, again = Run("gauss-newton"), Run("gauss-newton")
    x, y = torch.ones(8, 2, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)
    with run.journal(tmp_path, snapshot_every=3, digest_every=2), torch.inference_mode():
        run.step()
        with torch.device("meta"):  # what is made on it by mistake is refused
            run.optimizer.step(lambda: functional.mse_loss(run.model(x), y))
        run.step()
        run.step()
    with torch.device("meta"):
        assert same(replay(tmp_path), run.state) and verify(tmp_path) == (4, 2, 1)
        again.resumed(tmp_path).close()
    assert same(again.state, run.state)


def test_autocast_around_a_replay_changes_nothing(tmp_path: Path) -> None:
    run = Run("fgd", torch.float32)
    with run.journal(tmp_path):
        for _ in range(3):
            run.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(replay(tmp_path), run.state)
