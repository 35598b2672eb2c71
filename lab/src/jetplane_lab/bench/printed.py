"""The rows of a run as tables for the terminal and for documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ranked", "text"]

Row = dict[str, Any]

HEAD = ("system", "median", "quartiles", "/ best peer", "peak", "first call", "/ floor")


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The fastest first; what is for scale alone, wrong or failed is after the others."""
    order = {"ok": 0, "wrong": 1, "failed": 2}
    return sorted(
        rows, key=lambda row: (order[row["status"]], row["kind"] == "scale", row.get("median_ms") or float("inf"))
    )


def cells(row: Row) -> list[str]:
    """One row, formatted."""
    if row["status"] != "ok":
        return [row["system"], f"{row['status'].upper()}: {row['reason']}"]
    peer = row.get("to_best_peer")
    over = row.get("over_floor")
    peak = row.get("peak_mib")
    return [
        row["system"],
        milliseconds(row["median_ms"]),
        f"{milliseconds(row['q1_ms'])} .. {milliseconds(row['q3_ms'])}",
        "" if peer is None else f"{peer:.2f}",
        "" if peak is None else f"{peak:.1f} MiB",
        f"{row['first_call_s']:.1f} s",
        "" if over is None else f"{over:.1f}",
    ]


def text(rows: Sequence[Row]) -> str:
    """A table in plain text, the fastest system first."""
    lines = [list(HEAD), *(cells(row) for row in ranked(rows))]
    full = [line for line in lines if len(line) == len(HEAD)]
    widths = [max(len(line[column]) for line in full) for column in range(len(HEAD))]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join(_line(line, widths) for line in lines)


def _line(line: list[str], widths: list[int]) -> str:
    if len(line) != len(widths):
        return f"  {line[0]:<{widths[0]}}  {line[1]}"
    numbers = "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
    return f"  {line[0]:<{widths[0]}}  {numbers}".rstrip()


def milliseconds(value: float) -> str:
    """A time in a unit that suits it.

    Example:
        >>> milliseconds(0.0421), milliseconds(3.14159), milliseconds(251.2)
        ('42.1 us', '3.14 ms', '251 ms')
    """
    if value < 1:
        return f"{1e3 * value:.3g} us"
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1e3:.3g} s"
