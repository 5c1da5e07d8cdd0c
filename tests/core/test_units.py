"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.core.units import format_bytes, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (3_000_000_000, 3 * 10**9),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("3GB", 3 * 10**9),
        ("3G", 3 * 10**9),
        ("3gb", 3 * 10**9),
        (" 3 GB ", 3 * 10**9),
        ("3GiB", 3 * 2**30),
        ("3Gi", 3 * 2**30),
        ("2.5GiB", 5 * 2**29),
        (".5kB", 500),
        ("1.kB", 1000),
        ("1.9999", 1),
        ("0.1GB", 10**8),
        ("1.1TB", 11 * 10**11),
        ("64MiB", 2**26),
        ("1KiB", 1024),
        ("7PB", 7 * 10**15),
        ("7PiB", 7 * 2**50),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    """Units of 1000 and of 1024, in any case, exact beyond what a float holds."""
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GB", "-1", "-3GB", "3 parsecs", "3GBB", "3iB", "1e9", "1,5GB", "3 G B", "٣GB"),
        *("nan", "inf", "3" * 200, "1..5GB", "0x10", "3GB\x00"),
        *(-1, True, 2.5, None, b"3GB"),
    ],
)
def test_what_is_no_size(text: Any) -> None:
    """Other units, signs, separators, digits and types are a ValueError that says how to write."""
    with pytest.raises(ValueError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1536, "1.54 kB"),
        (99_990, "99.99 kB"),
        (123_456_789, "123 MB"),
        (3 * 10**9, "3.00 GB"),
        (2.27e12, "2.27 TB"),
        (10**18, "1000 PB"),
        (-2500, "-2.50 kB"),
    ],
)
def test_formatting(nbytes: float, text: str) -> None:
    """Units of 1000, and no more digits than one reads."""
    assert format_bytes(nbytes) == text


@given(st.integers(0, 10**18))
def test_formatted_sizes_are_read_back(nbytes: int) -> None:
    again = parse_bytes(format_bytes(nbytes))
    assert abs(again - nbytes) <= 0.005 * nbytes


@pytest.mark.parametrize(
    ("nbytes", "seconds", "said"),
    [
        *((5_440, 0.1, "0.0544 MB/s"), (99_000_000, 1, "99 MB/s"), (0, 0, "0 MB/s")),
        *((100_000_000, 1, "0.10 GB/s"), (2.5e9, 2, "1.25 GB/s")),
    ],
)
def test_rates_as_people_read_them(nbytes: float, seconds: float, said: str) -> None:
    """Never 0.00: slow ones in MB/s."""
    assert format_rate(nbytes, seconds) == said
