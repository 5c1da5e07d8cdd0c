"""Renames of tensors by patterns, and checks of the ``rename`` argument."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from streamload.core.patterns import check_names
from streamload.planning.sources import Rename


@dataclass(frozen=True, slots=True)
class RenamePatterns:
    """Renames by patterns: the first that matches a whole name decides; other names stay.

    A ``*`` in a pattern stands for any text, and the n-th ``*`` in the new name for the text of
    the pattern's n-th ``*``: ``model.*`` to ``*`` removes a prefix.
    """

    rules: tuple[tuple[str, str], ...]  # (pattern, new name), in order

    @classmethod
    def parse(cls, texts: Iterable[str]) -> RenamePatterns:
        """Parse ``FROM=TO`` texts; ValueError for another text, or more ``*`` in TO than FROM."""
        rules = []
        for text in texts:
            before, equals, after = text.partition("=")
            if not equals or not before or not after:
                raise ValueError(f"expected FROM=TO, found {text!r}")
            if after.count("*") > before.count("*"):
                raise ValueError(f"{text!r} has more * in what names become than in the pattern")
            rules.append((before, after))
        return cls(tuple(rules))

    @staticmethod
    def match(before: str, name: str) -> re.Match[str] | None:
        """Match a name with the pattern ``before``; the result has a group for each ``*``."""
        pattern = "(.*)".join(re.escape(part) for part in before.split("*"))
        return re.fullmatch(pattern, name, re.DOTALL)

    def __call__(self, name: str) -> str:
        """Return the new name of a tensor."""
        for before, after in self.rules:
            if match := self.match(before, name):
                first, *rest = after.split("*")
                texts = zip(match.groups(), rest, strict=False)
                return first + "".join(text + part for text, part in texts)
        return name


def rules_of(rename: Rename | None) -> Iterable[tuple[str, str]] | None:
    """Return (old, new) names or patterns of ``rename``; None for other callables and for None."""
    if isinstance(rename, RenamePatterns):
        return rename.rules
    return rename.items() if isinstance(rename, Mapping) else None


def check_rename(rename: Rename | None, names: Collection[str]) -> None:
    """Raise ValueError for the first rule that matches no tensor; callables are not checked."""
    if isinstance(rename, Mapping):
        check_names("rename", rename, names)
    if isinstance(rename, RenamePatterns):
        for before, _ in rename.rules:
            if not any(rename.match(before, name) for name in names):
                raise ValueError(f"rename: no tensor's name matches {before!r}")
