"""``jetplane journal show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetplane import cli
from jetplane.journal.reader import FILE
from journaled import Run, recorded


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["journal", "show", *arguments]) == 0
    return capsys.readouterr().out


def test_header_and_records_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, steps=5, digest_every=2)
    lines = shown(capsys, str(tmp_path)).splitlines()
    assert "optimizer   FoMoHKD" in lines and 'directions  {"Gaussian": {"k": 3}}' in lines
    assert "parameters  6, 25 entries" in lines and "records     5, after step 0" in lines
    assert lines[-6].split() == ["step", "status", "loss", "lr", "coefficients"]
    first, second = lines[-5].split(), lines[-4].split()
    assert first[:2] == ["0", "OK"] and first[3] == "0.05" and len(first) == 4 + 3 + 3 + 2
    assert lines[-5].endswith('place {"batch": 0}  3 buffers') and second[-1] == "checksum"


def test_the_last_records_of_one_that_was_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, "gauss-newton", steps=5)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-7])
    lines = shown(capsys, str(tmp_path), "--last", "2").splitlines()
    assert any(
        line.startswith("torn ") and line.endswith(" bytes at the end, which a crash has left") for line in lines
    )
    assert [line.split()[0] for line in lines[-3:]] == ["step", "2", "3"]
    assert " ...  place" in lines[-1]


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("fomoh-kd")
    with run.journal(tmp_path):
        run.step()
        run.optimizer.step(lambda: next(run.model.parameters()).sum() * float("nan"))
    found = json.loads(shown(capsys, str(tmp_path), "--json"))
    assert found["header"]["K"] == 3 and found["torn"] == 0
    first, second = found["records"]
    assert first["status"] == "OK" and len(first["coefficients"][0]) == 3 and first["lrs"] == [0.05]
    assert (second["status"], second["loss"]) == ("NONFINITE", None)
    assert len(shown(capsys, str(tmp_path), "--json", "--last", "1")) < len(json.dumps(found, indent=1))


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["journal", "show", str(tmp_path), "--last", "0"])
    assert "argument --last: is '0'; expected a positive whole number" in capsys.readouterr().err
    assert cli.main(["journal", "show", str(tmp_path)]) == 2
    assert "holds no journal" in capsys.readouterr().err
