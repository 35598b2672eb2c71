"""What the library is when it is installed alone: torch and the standard library, small, without data."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())


def test_import_takes_torch_and_the_standard_library_only() -> None:
    # what torch itself imports, numpy and sympy among it, was there before
    program = (
        "import sys, torch\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        "import jetplane\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(after - before - set(sys.stdlib_module_names)), 'jetplane_lab' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['jetplane'] False"


@pytest.mark.parametrize("package", [ROOT, ROOT / "lab"], ids=["library", "study"])
def test_no_metadata_names_a_distribution_of_this_repository(package: Path) -> None:
    """No index has them: pip would look there for what somebody else may have put under the name."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in wanted}
    assert "tqdm" in names or "torch" in names
    assert names.isdisjoint({"jetplane", "jetplane-lab"})


@pytest.mark.slow
def test_what_public_functions_return_is_known_to_a_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = ROOT / "tests" / "public_types.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "--warn-unused-ignores"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    # it can fail: the same with another type
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        program.read_text().replace("assert_type(jp.hvp(f, x, x), Tensor)", "assert_type(jp.hvp(f, x, x), int)")
    )
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and 'Expression is of type "Tensor", not "int"' in done.stdout


@pytest.mark.slow
def test_the_wheel_is_small_and_holds_no_data(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("jetplane-*.whl")
    assert wheel.stat().st_size < 10**6
    with zipfile.ZipFile(wheel) as held:
        names = [name for name in held.namelist() if ".dist-info/" not in name]
        metadata = next(held.read(name).decode() for name in held.namelist() if name.endswith("/METADATA"))
    assert {Path(name).suffix for name in names} == {".py", ".typed"}
    assert {name.split("/")[0] for name in names} == {"jetplane"}
    assert "jetplane-lab" not in metadata
