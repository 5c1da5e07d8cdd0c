"""The journal by which an unfinished conversion is resumed: a line of JSON for each tensor.

The first line identifies the source and the options. The line of a tensor is written once its
bytes are on the disk: a resumed conversion skips all tensors in the journal. A torn last line is
ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Self

from streamload.checkpoint.digests import HEX
from streamload.codecs.cast_table import CastCounts
from streamload.codecs.parts import QuantCounts
from streamload.conversion.disk import WORK, Folder
from streamload.conversion.openable import Verdict
from streamload.core.bounded_json import parse_json
from streamload.core.system import sync
from streamload.errors import CheckpointError

#: Version of the journal, in its first line.
FORMAT = 2  # 1 lacked the times of files' last changes, and published files

#: Path of the journal in a destination.
JOURNAL = f"{WORK}/journal"
_WHAT = {"options": "option", "source": "state of the source's"}


@dataclass(frozen=True, slots=True)
class Finished:
    """The journal's record of an output tensor whose bytes are on the disk."""

    digest: str  # of its bytes, in hexadecimal
    counts: CastCounts  # values that its cast changed
    errors: QuantCounts | None = None  # errors of quantization, if it has a weight's codes


def _difference(now: Mapping[str, Any], earlier: Mapping[str, Any]) -> str | None:
    """Return in words the first difference of two journals' first lines; None if they are equal."""
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


def noted_verdict(folder: Path) -> Verdict | None:
    """Return the `Verdict` in the journal of an unfinished conversion; None if none."""
    lines = []
    with suppress(OSError), (folder / JOURNAL).open("rb") as file:
        lines = _whole_lines(file.readline())
    found = lines[0][0].get("verdict") if lines else None
    return Verdict(**found) if found and type(found) is dict else None


class Journal:
    """A log file of a conversion's finished tensors, by which a later call resumes it."""

    def __init__(self, fd: int) -> None:
        # by the tensor's number in `ConvertPlan.tensors`
        self.finished: dict[int, Finished] = {}
        # Once all tensors are finished: the path of each file to publish, in order, and its digest;
        # "" for files of tensors, which have digests of their own.
        self.published: dict[str, str] | None = None
        self.replaces = False  # whether a checkpoint in the destination may be replaced
        self._fd = fd

    @classmethod
    def begin(
        cls, opened: ExitStack, folder: Folder, first: Mapping[str, Any], *, replaces: bool
    ) -> Self:
        """Start a new journal in a destination, closed by ``opened``; an older one is removed.

        ``first`` is its first line, as plain JSON values: the `FORMAT`, the plan's digest, the
        options, and by name the state of each source file; ``replaces``: the call's ``overwrite``.
        """
        folder.unlink(JOURNAL)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        made = cls(opened.enter_context(folder.open(JOURNAL, flags)))
        made._write([{**first, "replaces": replaces}])
        made.replaces = replaces
        return made

    @classmethod
    def resume(cls, opened: ExitStack, folder: Folder, first: Mapping[str, Any]) -> Self | None:
        """Open the journal of an unfinished conversion; None if there is none, or no whole line.

        Raises CheckpointError if its first line, see `begin`, differs from ``first``.
        """
        try:
            fd = opened.enter_context(folder.open(JOURNAL, os.O_RDWR | os.O_APPEND))
        except FileNotFoundError:
            return None
        with open(fd, "rb", closefd=False) as file:
            whole = _whole_lines(file.read())
        if not whole:
            return None
        if changed := _difference(first, whole[0][0]):
            raise CheckpointError(
                folder.path,
                "the unfinished conversion there cannot be continued",
                "the same source and options (overwrite begins again)",
                f"another {changed}",
            )
        made = cls(fd)
        made.replaces = whole[0][0].get("replaces") is True
        end = whole[0][1]
        for line, line_end in whole[1:]:
            try:
                made._take(line)
            except (TypeError, ValueError):  # damaged: the lines after it are ignored
                break
            end = line_end
        os.ftruncate(fd, end)
        return made

    def add(self, finished: Mapping[int, Finished]) -> None:
        """Record tensors whose bytes are on the disk; an OSError leaves the journal as it was."""
        self._write(
            {"tensor": [i, one.digest, *astuple(one.counts)]}
            | ({} if one.errors is None else {"errors": astuple(one.errors)})
            for i, one in finished.items()
        )
        self.finished.update(finished)

    def forget(self, indices: Sequence[int]) -> None:
        """Record that the tensors ``indices`` are not finished after all; raises OSError."""
        if indices:
            self._write([{"lost": list(indices)}])
            for index in indices:
                self.finished.pop(index, None)

    def publish(self, files: Mapping[str, str]) -> None:
        """Record that all is written; ``files`` to publish: digest by path ("": tensor files)."""
        self._write([{"publish": dict(files)}])
        self.published = dict(files)

    def _take(self, line: Mapping[str, Any]) -> None:
        """Update this journal by a line that was read; TypeError or ValueError if it is damaged."""
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
        """Append lines and sync them to the disk, or raise OSError and append nothing."""
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
    """Parse lines up to the first incomplete one; return each with its end in bytes, exclusive."""
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
