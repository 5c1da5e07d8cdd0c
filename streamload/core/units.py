"""Byte sizes as people write them, GB is 10^9, GiB is 2^30 (IEC 80000-13); ranges; text tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from numbers import Integral, Real

from streamload.errors import printable

_UNITS = {"": 1, "B": 1} | {
    letter + binary + suffix: base**power
    for power, letter in enumerate("KMGTP", start=1)
    for base, binary in ((1000, ""), (1024, "I"))
    for suffix in ("", "B")
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``nbytes``."""
    return -(-nbytes // multiple) * multiple


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (start, stop exclusive) ranges in order; those that overlap or adjoin become one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def as_number(value: object) -> float | None:
    """Return a number of Python or numpy as an int or float; None for all else, and for bools."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return int(value) if isinstance(value, Integral) else float(value)


def parse_bytes(text: str | float) -> int:
    """Read a size in bytes; a fraction of a byte is dropped; ValueError if it is none.

    A whole number (``3e9`` is one, and numpy's are), or a number with an optional unit: B, kB, MB,
    GB, TB, PB (powers of 1000), KiB, MiB, GiB, TiB, PiB (powers of 1024); the final B may be left
    out and case does not matter.
    """
    number = as_number(text)
    if number is not None:
        if number < 0:
            raise ValueError(f"a size in bytes cannot be negative: {text}")
        if isinstance(number, int) or number.is_integer():
            return int(number)
    match = _SIZE.fullmatch(text) if isinstance(text, str) and len(text) < 100 else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"not a size in bytes: {text!r} (write 3GB, 2.5GiB, 500MB or a number)")
    return int(Fraction(match[1].rstrip(".")) * _UNITS[match[2].upper()])


def format_bytes(nbytes: float, *, up: bool = False) -> str:
    """Return a size as text in powers of 1000, with three digits: "3.00 GB"; ``up`` rounds up."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            value = nbytes / size
            digits = 2 if value < 100 else 0
            if up:
                value = math.ceil(Fraction(nbytes) / Fraction(size) * 10**digits) / 10**digits
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def format_rate(nbytes: float, seconds: float) -> str:
    """Return a rate as text: "1.25 GB/s", and from 0.1 GB/s down "12.5 MB/s"."""
    rate = nbytes / seconds if seconds else 0.0
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.3g} MB/s"


def format_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: int
) -> Iterator[str]:
    """Yield a table's lines with aligned columns; the last ``right`` columns are flush right."""
    shown = [[printable(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    left = len(titles) - right
    for row in shown:
        cells = [
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
