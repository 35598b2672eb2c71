"""Whatever byte is lost or changed: the good records before it, or a refusal with the byte's position."""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from jetplane.errors import JournalDamaged, JournalRefused
from jetplane.journal import frames, opened, snapshots
from jetplane.journal.frames import FramedBytes, begin, enframed, scan
from jetplane.journal.reader import FILE
from journaled import recorded, same

PATH = Path("steps.journal")


class Written(NamedTuple):
    """A journal, with what is true of it."""

    folder: Path
    data: bytes
    frames: list[FramedBytes]
    states: list[dict[str, Tensor]]  # after each number of steps

    @property
    def header_end(self) -> int:
        return self.frames[0].position


@pytest.fixture(scope="module", params=[1, 5], ids=["each step", "five at a time"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("journal")
    states = recorded(folder, "previous", 23, commit_every=request.param, snapshot_every=10, digest_every=7)
    data = (folder / FILE).read_bytes()
    return Written(folder, data, scan(data, PATH).records, states)


def damaged(written: Written, data: bytes, folder: Path) -> Path:
    """The journal with other bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for step in snapshots.steps_of(written.folder):
        os.link(snapshots.path_of(written.folder, step), snapshots.path_of(folder, step))
    (folder / FILE).write_bytes(data)
    return folder


def outcome(written: Written, data: bytes, folder: Path) -> int | str:
    """How many steps are there, or the message of the refusal; parameters and buffers that are there are right."""
    try:
        journal = opened(damaged(written, data, folder))
        found = journal.replica(journal.last).exported
    except (JournalDamaged, JournalRefused) as error:
        return str(error)
    assert same({name: found[name] for name in written.states[0]}, written.states[journal.last])
    return journal.last


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def cut(written: Written, chance: random.Random, folder: Path) -> None:
    """Cut off anywhere: all whole records are there."""
    size = chance.randrange(len(written.data))
    found = outcome(written, written.data[:size], folder)
    if size < written.header_end:
        assert isinstance(found, str) and re.search(r"at byte \d+", found)
    else:
        assert found == sum(frame.end <= size for frame in written.frames)


def flip(written: Written, chance: random.Random, folder: Path) -> None:
    """A bit changed anywhere: in the last commit what is before it is there, elsewhere it is refused with its place."""
    bit = chance.randrange(8 * len(written.data))
    found = outcome(written, flipped(written.data, bit), folder)
    if bit // 8 < written.header_end:
        assert isinstance(found, str) and re.search(r"at byte (0|\d+)\b", found)
        return
    number = next(n for n, frame in enumerate(written.frames) if bit // 8 < frame.end)
    if written.frames[number].commit == written.frames[-1].commit:
        assert found == number
    else:
        assert f"is damaged at byte {written.frames[number].position}: " in str(found)


def spoil(written: Written, chance: random.Random, folder: Path) -> None:
    """Several of all: zeros, bits, bytes put in, taken out or repeated, and cut off. Nothing wrong comes out."""
    data = written.data
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data))
        length = chance.randint(1, 200)
        part = data[start : start + length]
        data = chance.choice(
            [
                data[:start] + bytes(len(part)) + data[start + length :],
                data[:start] + data[start + length :],
                data[:start] + part + data[start:],
                data[:start] + chance.randbytes(length) + data[start:],
                flipped(data, 8 * start),
                data[: start + 1],
            ]
        )
    found = outcome(written, data, folder)
    assert isinstance(found, int) or re.search(r"at byte \d+", found)


KINDS: list[Callable[[Written, random.Random, Path], None]] = [cut, flip, spoil]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_recovered_from_or_refused(
    kind: Callable[[Written, random.Random, Path], None], written: Written, tmp_path: Path
) -> None:
    chance = random.Random(0)
    for _ in range(50):
        kind(written, chance, tmp_path / "damaged")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_damages(
    kind: Callable[[Written, random.Random, Path], None], written: Written, tmp_path: Path
) -> None:
    chance = random.Random(1)
    for _ in range(10_000 // 6 + 1):  # three kinds, two journals
        kind(written, chance, tmp_path / "damaged")


def test_every_place_to_cut_off_the_last_three_records(written: Written, tmp_path: Path) -> None:
    for size in range(written.frames[-3].position, len(written.data), 23):
        found = outcome(written, written.data[:size], tmp_path / "cut")
        assert found == sum(frame.end <= size for frame in written.frames)


def test_a_damaged_snapshot_is_passed_over(written: Written, tmp_path: Path) -> None:
    chance, passed = random.Random(2), 0
    newest = snapshots.path_of(written.folder, 20).read_bytes()
    for _ in range(20):
        folder = damaged(written, written.data, tmp_path / "snapshot")
        path = snapshots.path_of(folder, 20)
        path.unlink()  # it is a link
        path.write_bytes(flipped(newest, chance.randrange(8 * len(newest))))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = opened(folder).replica(23).exported
        assert same({name: found[name] for name in written.states[0]}, written.states[23])
        passed += bool(caught)
    assert passed > 15  # else the bit was one that says nothing, as of a space


# -- single cases ---------------------------------------------------------------------------------------------------


def chained(*commits: list[bytes]) -> bytes:
    """A file of these bodies, by commits."""
    data = begin(b"{}")
    crc = scan(data, PATH).header.crc
    for bodies in commits:
        commit = len(data)
        for body in bodies:
            frame, crc = enframed(body, crc, commit)
            data += frame
    return data


def test_what_was_written_comes_back() -> None:
    found = scan(chained([b"one"], [b"", b"three" * 100]), PATH)
    assert found.header.body == b"{}"
    assert [frame.body for frame in found.records] == [b"one", b"", b"three" * 100]
    assert found.torn == 0 and found.end == len(chained([b"one"], [b"", b"three" * 100]))


def test_pages_of_the_last_commit_may_be_lost_in_any_order() -> None:
    data = chained([b"a" * 50], [b"b" * 50, b"c" * 50, b"d" * 50])
    places = [frame.position for frame in scan(data, PATH).records]
    lost = data[: places[1] + 20] + bytes(20) + data[places[1] + 40 :]  # and the records behind it are good
    found = scan(lost, PATH)
    assert [frame.body for frame in found.records] == [b"a" * 50]
    assert found.torn == len(data) - places[1]


def test_a_good_record_of_a_later_commit_proves_damage() -> None:
    data = chained([b"a" * 50], [b"b" * 50], [b"c" * 50])
    _, second, third = (frame.position for frame in scan(data, PATH).records)
    message = (
        f"steps.journal is damaged at byte {second}: the record there is not what was written, and that at byte "
        f"{third}, which was written later, is good."
    )
    with pytest.raises(JournalDamaged, match=re.escape(message)):
        scan(flipped(data, 8 * second + 170), PATH)


def test_a_record_that_is_missing_is_noticed() -> None:
    data = chained([b"a" * 50], [b"b" * 50], [b"c" * 50])
    _, second, third = (frame.position for frame in scan(data, PATH).records)
    with pytest.raises(JournalDamaged, match=f"damaged at byte {second}: a record is not the one after that before it"):
        scan(data[:second] + data[third:], PATH)


@pytest.mark.parametrize("data, place", [(b"", 0), (b"\x89JP", 3), (b"\x89JPX\r\n\x1a\n    ", 3), (b"text" * 5, 0)])
def test_other_files_are_refused(data: bytes, place: int) -> None:
    message = f"steps.journal is no journal, or damaged at byte {place}; expected one that a Journal wrote."
    with pytest.raises(JournalDamaged, match=re.escape(message)):
        scan(data, PATH)


def test_another_format_is_refused() -> None:
    data = chained()
    with pytest.raises(JournalRefused, match=r"steps.journal has format 7 at byte 8; expected format 1\."):
        scan(data[:8] + struct.pack("<I", 7) + data[12:], PATH)
    assert frames.FORMAT == 1


def test_a_damaged_header_is_refused() -> None:
    data = begin(b'{"a": 1}')
    for broken in (data[:-1], flipped(data, 8 * 14), flipped(data, 8 * len(data) - 1)):
        with pytest.raises(JournalDamaged, match="damaged at byte 12: its header is not what was written"):
            scan(broken, PATH)
