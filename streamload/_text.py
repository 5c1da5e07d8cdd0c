"""Text from files for people: names of tensors and metadata may hold any character."""

from __future__ import annotations

from collections.abc import Iterable


def printable(text: str) -> str:
    """Text without what a terminal would obey; all of one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printed(lines: Iterable[str]) -> str:
    """Lines as `printable`; a line break inside of one does not make two."""
    return "\n".join(map(printable, lines))
