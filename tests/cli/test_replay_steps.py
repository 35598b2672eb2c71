"""``jetplane replay``."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from jetplane import cli
from jetplane.journal import snapshots
from jetplane.journal.reader import FILE
from journaled import Run, recorded, same


def test_the_parameters_of_any_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, out = recorded(tmp_path / "run", steps=6), tmp_path / "made" / "step.safetensors"
    for step, options in ((4, ["--step", "4"]), (6, [])):
        assert cli.main(["replay", str(tmp_path / "run"), *options, "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"wrote {out}: parameters and buffers after {step} steps\n"
        assert same(load_file(out), states[step])
    model = Run("fomoh-kd").model
    model.load_state_dict(load_file(out))
    assert same(model.state_dict(), states[6])


def test_a_run_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, steps=6, snapshot_every=4, digest_every=2)
    assert cli.main(["replay", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 6 steps replayed; 3 checksums and 1 later snapshots agree.\n"
    path = snapshots.path_of(tmp_path, 4)
    state, tensors = snapshots.standing(path)
    tensors["buffer 0"][0] = 0.5
    snapshots.write(tmp_path, tensors, state)
    assert cli.main(["replay", str(tmp_path), "--verify"]) == 1
    assert "has other numbers for buffer 0 than the replay of 4 steps" in capsys.readouterr().err


def test_a_short_run_may_have_nothing_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, steps=3)
    assert cli.main(["replay", str(tmp_path), "--verify"]) == 0
    assert (
        "3 steps replayed; there is no checksum and no later snapshot to compare them with." in capsys.readouterr().out
    )


def test_records_travel_without_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, base, end = (
        recorded(tmp_path / "run", "grown", 6),
        tmp_path / "base.safetensors",
        tmp_path / "end.safetensors",
    )
    assert cli.main(["replay", str(tmp_path / "run"), "--step", "0", "--out", str(base)]) == 0
    snapshots.path_of(tmp_path / "run", 0).unlink()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FILE]
    assert cli.main(["replay", str(tmp_path / "run"), "--start", str(base), "--out", str(end), "--verify"]) == 0
    assert same(load_file(end), states[6])
    assert cli.main(["replay", str(tmp_path / "run"), "--start", str(end), "--out", str(end)]) == 2
    assert "end.safetensors holds other numbers than those that the run began with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "nothing to do; expected --out FILE.safetensors, --verify, or both"),
        (["--out", "."], "--out is ., which is a folder; expected a file to write"),
        (["--out", "a", "--step", "9"], "goes from 0 to 3; expected a number of steps within"),
    ],
)
def test_bad_arguments(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, steps=3)
    assert cli.main(["replay", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_damage_is_told_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, steps=3)
    data = bytearray((tmp_path / FILE).read_bytes())
    data[40] ^= 1
    (tmp_path / FILE).write_bytes(data)
    assert cli.main(["replay", str(tmp_path), "--verify"]) == 1
    assert "is damaged at byte 12" in capsys.readouterr().err
