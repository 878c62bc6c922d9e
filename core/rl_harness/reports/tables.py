"""Numbers as people read them, and small tables that any view can show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The first column is aligned left, the others right."""

    title: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_GAP = "  "


def text_of(table: Table) -> str:
    """The table in plain characters, without trailing blanks."""
    widths = _widths(table)
    out = [table.title] if table.title else []
    for line in (table.columns, *table.rows):
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        out.append(_GAP.join(cells).rstrip())
    return "\n".join(out)


def fitting(table: Table, width: int) -> Table:
    """The table without the last columns that do not fit into ``width`` characters; two columns always stay."""
    widths = _widths(table)
    keep = len(widths)
    while keep > 2 and sum(widths[:keep]) + len(_GAP) * (keep - 1) > width:
        keep -= 1
    return msgspec.structs.replace(table, columns=table.columns[:keep], rows=tuple(row[:keep] for row in table.rows))


def _widths(table: Table) -> list[int]:
    return [max(len(line[i]) for line in (table.columns, *table.rows)) for i in range(len(table.columns))]


def number(value: float | None) -> str:
    """Four significant digits at most; a dash for what is not known."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def rate(value: float | None, low: float | None = None, high: float | None = None, *, sign: bool = False) -> str:
    """``0.11 [0.06, 0.19]``; with ``sign`` a difference, ``+0.83 [+0.75, +0.90]``."""
    if value is None:
        return "-"
    form = "+.2f" if sign else ".2f"
    interval = "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
    return f"{value:{form}}{interval}"


def counts(items: Mapping[str, int]) -> str:
    """``sandbox_error 2, verifier_timeout 1``."""
    return ", ".join(f"{name} {count}" for name, count in items.items())


def duration(seconds: float | None) -> str:
    """``7.2 s``, ``12:30``, ``1:02:03``."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
