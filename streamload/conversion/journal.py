"""What a conversion has finished, so that it can be continued: one line of JSON each.

The first line identifies the source and the options. The line of a tensor is written once its
bytes are on the disk, so that no tensor in the journal is converted again. A torn last line does
not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Self

from streamload.checkpoint.digests import HEX
from streamload.codecs.cast_table import CastCounts
from streamload.codecs.parts import QuantCounts
from streamload.conversion.disk import WORK, Folder
from streamload.core.bounded_json import parse_json
from streamload.core.system import sync
from streamload.errors import CheckpointError

#: In each first line.
FORMAT = 2  # 1 had no time of a file's last change, and nothing of what was published

#: Its name, in a destination.
JOURNAL = f"{WORK}/journal"
_WHAT = {"options": "option", "source": "state of the source's"}


@dataclass(frozen=True, slots=True)
class Finished:
    """A tensor whose bytes are on the disk."""

    digest: str  # of its bytes, in hexadecimal
    counts: CastCounts  # what its cast did not keep
    errors: QuantCounts | None = None  # of codes, what quantising did not keep

    def to_json(self, index: int) -> dict[str, Any]:
        """A line of the journal, for the tensor of that place in the plan."""
        line: dict[str, Any] = {"tensor": [index, self.digest, *astuple(self.counts)]}
        return line if self.errors is None else line | {"errors": astuple(self.errors)}


def _difference(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> str | None:
    """What differs between the first lines of two conversions, in words; None for nothing."""
    if earlier.get("format") != FORMAT:
        return f"format of the journal, {earlier.get('format')!r} and not {FORMAT}"
    for what, word in _WHAT.items():
        before = earlier.get(what)
        before = before if isinstance(before, dict) else {}
        for key in dict.fromkeys((*now[what], *before)):
            if before.get(key) != now[what].get(key):
                return f"{word} {key!r}"
    if earlier.get("plan") != now["plan"]:
        return "layout of the files, by another version of streamload"
    return None


def noted_verdict(folder: Path) -> dict[str, Any]:
    """Facts of the `Verdict` of an unfinished conversion in a folder; {} if there is none."""
    lines = []
    with suppress(OSError), (folder / JOURNAL).open("rb") as file:
        lines = _whole_lines(file.readline())
    found = lines[0][0].get("verdict") if lines else None
    return found if type(found) is dict else {}


class Journal:
    """The journal of one conversion, open for more."""

    def __init__(self, fd: int) -> None:
        # by the tensor's place in the plan, over all files
        self.finished: dict[int, Finished] = {}
        # When all is finished, every path that gets its name, in that order, with the digest of its
        # bytes; "" for a file of tensors, which have digests of their own.
        self.published: dict[str, str] | None = None
        self.replaces = False  # whether a checkpoint that is there may be replaced
        self._fd = fd

    @classmethod
    def begin(cls, folder: Folder, first: Mapping[str, Any], *, replaces: bool) -> Self:
        """Make a new one in a destination; what was there is gone.

        ``first`` is its first line, as plain JSON values: the `FORMAT`, the plan's digest, the
        options, and by name the state of each file that is read.
        """
        folder.unlink(JOURNAL)
        made = cls(folder.open(JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND))
        try:
            made._write([{**first, "replaces": replaces}])
            made.replaces = replaces
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def resume(cls, folder: Folder, first: Mapping[str, Any]) -> Self | None:
        """Open the journal of a conversion that did not finish, or raise CheckpointError.

        None where there is no journal, or its first line was never whole: nothing was begun.
        """
        try:
            fd = folder.open(JOURNAL, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return None
        made = cls(fd)
        try:
            with open(fd, "rb", closefd=False) as file:
                raw = file.read()
            whole = _whole_lines(raw)
            if not whole:
                made.close()
                return None
            if changed := _difference(first, whole[0][0]):
                raise CheckpointError(
                    folder.path,
                    "the unfinished conversion there cannot be continued",
                    "the same source and options (overwrite begins again)",
                    f"another {changed}",
                )
            made.replaces = whole[0][0].get("replaces") is True
            end = whole[0][1]
            for line, line_end in whole[1:]:
                try:
                    made._take(line)
                except (TypeError, ValueError):  # damaged: what comes after it counts no more
                    break
                end = line_end
            os.ftruncate(fd, end)
        except BaseException:
            made.close()
            raise
        return made

    def add(self, finished: Mapping[int, Finished]) -> None:
        """Write tensors whose bytes are on the disk; an OSError leaves the journal as it was."""
        self._write(one.to_json(i) for i, one in finished.items())
        self.finished.update(finished)

    def forget(self, indices: Sequence[int]) -> None:
        """Note that tensors are not finished after all; raises OSError."""
        if indices:
            self._write([{"lost": list(indices)}])
            for index in indices:
                self.finished.pop(index, None)

    def publish(self, files: Mapping[str, str]) -> None:
        """Note that all is finished, and ``files`` (see `published`) will get their names."""
        self._write([{"publish": dict(files)}])
        self.published = dict(files)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "tensor" in line:
            index, digest, *counts = line["tensor"]
            if not (
                all(type(n) is int and n >= 0 for n in (index, *counts))
                and len(counts) == len(fields(CastCounts))
                and HEX.fullmatch(digest)
            ):
                raise ValueError(f"not a finished tensor: {line}")
            errors = QuantCounts.of(line["errors"]) if "errors" in line else None
            self.finished[index] = Finished(digest, CastCounts(*counts), errors)
        for index in line.get("lost", ()):
            self.finished.pop(index, None)
        if "publish" in line:
            files = line["publish"]
            if not (type(files) is dict and all(type(digest) is str for digest in files.values())):
                raise ValueError(f"not what is published: {line}")
            self.published = files

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        before = os.fstat(self._fd).st_size
        try:
            done = 0
            while done < len(data):
                done += os.write(self._fd, data[done:])
            sync(self._fd)
        except OSError:
            os.ftruncate(self._fd, before)  # a full disk may have taken half a line
            raise


def _whole_lines(raw: bytes) -> list[tuple[dict[str, Any], int]]:
    """The lines up to the first that is torn, each with the byte at which it ends."""
    out: list[tuple[dict[str, Any], int]] = []
    end = 0
    for line in raw.splitlines(keepends=True):
        end += len(line)
        try:
            read = parse_json(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            read = None
        if type(read) is not dict:
            break
        out.append((read, end))
    return out
