"""What responses of servers state: the version of a file, when to ask again, a status."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from streamload.files.header import describe

NUMBER = r"\d{1,19}"  # Python reads no integer of 5,000 digits, and no file has more than these
DIGITS = re.compile(NUMBER, re.ASCII)
#: Statuses that a later try may not get, and the longest ``Retry-After`` that is waited for.
PASSING = (408, 425, 429, 500, 502, 503, 504)
MOST_WAIT_SECONDS = 120.0
_VALIDATORS = ("ETag", "Last-Modified")  # headers that identify a version; the first one is used
_STATUSES = frozenset(HTTPStatus)


def version(headers: Mapping[str, str], known: str) -> str:
    """Return a file's version, such as "ETag: ...", of the kind of ``known``; "" without any."""
    kinds = (known.partition(": ")[0],) if known else _VALIDATORS
    for kind in kinds:
        if value := headers.get(kind, "").removeprefix("W/"):
            return f"{kind}: {value}"
    return ""


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a response asks to wait, by a number or a date; 0 for none."""
    value = headers.get("Retry-After", "").strip()
    if DIGITS.fullmatch(value):
        return float(value)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def said(value: str) -> str:
    """Return a header's value for an error; "an address" for a URL, which may hold secrets."""
    return "an address" if re.search(r"@|\?|//", value) else describe(value)


def status_text(status: int) -> str:
    """Return a status with its standard phrase: the server's own may hold secrets."""
    return f"{status} {HTTPStatus(status).phrase}" if status in _STATUSES else str(status)
