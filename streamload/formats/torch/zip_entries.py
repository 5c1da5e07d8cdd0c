"""Finds the file ranges of the entries of a zip archive.

The directory at the end of an archive names the entries. Each entry has a header before its data,
whose length is only in that header. Entries that are encrypted, that overlap, or whose header
contradicts the directory are refused.

Source: PKWARE's APPNOTE.TXT, version 6.3.10, sections 4.3 to 4.5.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, NoReturn

from streamload.core.location import Url
from streamload.core.memory import first_that_fits
from streamload.errors import HeaderError
from streamload.files.header import check_nbytes, describe
from streamload.formats.reader import File, read_exactly

#: The first bytes of an archive that has an entry.
MAGIC = b"PK\x03\x04"

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_MAX_16, _MAX_32 = 2**16 - 1, 2**32 - 1
_ENCRYPTED = 1 | 1 << 6 | 1 << 13
_DESCRIPTOR = 1 << 3  # the sizes are repeated after the data
_UTF8 = 1 << 11
_EXTRA_64 = 1

# Free memory is checked before a directory longer than this is read.
_LONG_NBYTES = 2**20
_COPIES = 12  # bytes of memory for each byte of the directory, entries and names together

# Torch aligns the data of its entries to this. The most bytes of extra fields that it writes: the
# padding, and the sizes of an entry beyond 4 GiB.
_TORCH_ALIGNMENT = 64
_MOST_EXTRA_NBYTES = _TORCH_ALIGNMENT + 4 + 32


class Entry(NamedTuple):
    """File bytes ``start`` to ``stop`` (exclusive) of an entry; ``method`` 0 is uncompressed."""

    start: int
    stop: int
    method: int

    @property
    def nbytes(self) -> int:
        """Length of the entry in bytes."""
        return self.stop - self.start


class _Listed(NamedTuple):
    """An entry as the archive's directory lists it."""

    name: bytes
    flags: int
    method: int
    nbytes: int  # compressed
    at: int  # first file byte of the entry's header
    large: bool  # whether its sizes have 64 bits


def entries(file: File) -> Mapping[str, Entry]:
    """Return the entries of an archive by name; no data is read; raise HeaderError if invalid."""
    # of an archive on a server, an entry's header is read only if the layout differs from torch's:
    # each would be a request
    file = _WithTail(file)
    start, stop, count = _directory(file)
    check_nbytes(file.path, "its directory is too long", stop - start, "directory")
    if stop - start > _LONG_NBYTES:
        needed_nbytes = _COPIES * (stop - start)
        first_that_fits([(None, needed_nbytes)], [(f"the directory of {file.path}", needed_nbytes)])
    raw = read_exactly(file, start, stop, "its directory")
    listed = sorted(_listed(file, raw, count), key=lambda entry: entry.at)
    found: dict[str, Entry] = {}
    ends = [*(entry.at for entry in listed), start][1:]
    for entry, end in zip(listed, ends, strict=True):
        name = _name(file, entry)
        if name in found:
            _fail(file, "an entry is not unique", "each name once", f"{name!r} more than once")
        found[name] = _placed(file, entry, name, end)
    return found


class _WithTail:
    """A `File` that reads its last 64 KiB once: an archive's end, and most directories."""

    def __init__(self, file: File) -> None:
        self.path, self.nbytes = file.path, file.nbytes
        self._file = file
        self.tail_start = max(file.nbytes - _END.size - _MAX_16, 0)
        self.tail = file.read(self.tail_start, file.nbytes)

    def read(self, start: int, stop: int) -> bytes:
        if start >= self.tail_start:
            return self.tail[start - self.tail_start : stop - self.tail_start]
        return self._file.read(start, stop)


def _fail(file: File, problem: str, expected: object, found: object) -> NoReturn:
    raise HeaderError(file.path, problem, expected, found)


def _directory(file: _WithTail) -> tuple[int, int, int]:
    """Return the first file byte of the directory, its end (exclusive), and its entry count."""
    tail = file.tail
    at = len(tail)
    while (at := tail.rfind(b"PK\x05\x06", 0, at)) >= 0:
        if len(tail) - at >= _END.size:
            _, disk, first_disk, here, count, nbytes, start, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == len(tail):
                break
    if at < 0:
        _fail(file, "is a zip archive without its end: it is cut off", "a directory", "none")
    stop = file.tail_start + at
    if tail[max(at - _LOCATOR.size, 0) : at].startswith(b"PK\x06\x07"):  # torch writes it always
        stop, disk, first_disk, here, count, nbytes, start = _end_64(file, stop)
    if disk or first_disk or here != count:
        _fail(file, "is one part of a zip archive", "an archive in one file", f"disk {disk}")
    if start + nbytes != stop:
        _fail(file, "its directory does not end where it should", stop, start + nbytes)
    return start, stop, count


def _end_64(file: File, stop: int) -> tuple[int, ...]:
    """Return the directory's numbers from the 64-bit end record, which precedes byte ``stop``.

    They are the record's first byte, two disk numbers, two entry counts, the length and the start.
    """
    at = stop - _LOCATOR.size
    _, disk, end, disks = _LOCATOR.unpack(read_exactly(file, at, stop, "its directory"))
    if disk or disks > 1 or end + _END64.size > at:
        _fail(file, "the end of its directory is missing", f"it before byte {at}", f"byte {end}")
    magic, size, _, _, disk, first_disk, here, count, nbytes, start = _END64.unpack(
        read_exactly(file, end, end + _END64.size, "its directory")
    )
    if magic != b"PK\x06\x06" or end + 12 + size != at:
        _fail(file, "the end of its directory is not valid", "56 bytes", repr(magic)[1:])
    return end, disk, first_disk, here, count, nbytes, start


def _listed(file: File, raw: bytes, count: int) -> list[_Listed]:
    """Return the entries of the directory ``raw``, each checked alone; raise HeaderError."""
    fail = partial(_fail, file)
    found = []
    at = 0
    while at < len(raw):
        if len(raw) - at < _CENTRAL.size or raw[at : at + 4] != b"PK\x01\x02":
            fail("its directory is not valid", "an entry", describe(raw[at : at + 4]))
        fields = _CENTRAL.unpack_from(raw, at)
        _, _, _, flags, method, _, _, _, packed, nbytes, *lengths, disk, _, _, start = fields
        at += _CENTRAL.size
        stop = at + sum(lengths)
        if stop > len(raw):
            fail("its directory is cut off", f"{stop} bytes", len(raw))
        name, extra = raw[at : at + lengths[0]], raw[at + lengths[0] : stop - lengths[2]]
        at = stop
        large = _MAX_32 in (packed, nbytes, start)
        if large:
            nbytes, packed, start = _sizes_64(file, name, extra, nbytes, packed, start)
        shown = describe(name.decode("utf-8", "replace"))
        if flags & _ENCRYPTED:
            fail("an entry is encrypted", "none that is", shown)
        if (packed != nbytes and not method) or disk:
            fail("the sizes of an entry do not agree", packed, f"{nbytes} of {shown}")
        found.append(_Listed(name, flags, method, packed, start, large))
    if len(found) != count:
        fail("its directory is not valid", f"{count} entries", len(found))
    return found


def _sizes_64(file: File, name: bytes, extra: bytes, *given: int) -> tuple[int, ...]:
    """Return ``given`` (length, compressed length, start) with 64-bit values from ``extra``.

    Those are the values given as 2**32 - 1; raise HeaderError if they are missing.
    """
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == _EXTRA_64 and at + 4 + nbytes <= len(extra):
            wide = [number == _MAX_32 for number in given]
            if nbytes < 8 * sum(wide):
                break
            numbers = iter(struct.unpack_from(f"<{sum(wide)}Q", extra, at + 4))
            pairs = zip(given, wide, strict=True)
            return tuple(next(numbers) if is_wide else number for number, is_wide in pairs)
        at += 4 + nbytes
    shown = describe(name.decode("utf-8", "replace"))
    _fail(file, "the sizes of an entry are missing", "sizes of 64 bits", shown)


def _name(file: File, entry: _Listed) -> str:
    """Return the name of an entry; raise HeaderError for a path that leads out of the archive."""
    try:
        name = entry.name.decode("utf-8" if entry.flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        _fail(file, "the name of an entry is not valid", "UTF-8", describe(entry.name))
    if "\\" in name or "\0" in name or name.startswith("/") or ".." in name.split("/"):
        _fail(file, "the name of an entry leads out of the archive", "a path inside", repr(name))
    return name


def _placed(file: File, entry: _Listed, name: str, end: int) -> Entry:
    """Return the file range of an entry's data; the next entry begins at byte ``end``."""
    start = entry.at + _LOCAL.size + len(entry.name)  # of the extra fields
    descriptor = (24 if entry.large else 16) if entry.flags & _DESCRIPTOR else 0
    if isinstance(file.path, Url):
        data = end - descriptor - entry.nbytes
        if data % _TORCH_ALIGNMENT == 0 and 0 < data - start <= _MOST_EXTRA_NBYTES:
            return Entry(data, end - descriptor, entry.method)
    if end - entry.at < _LOCAL.size + len(entry.name) + entry.nbytes:
        _fail(
            file,
            "entries overlap each other or the directory",
            f"{_LOCAL.size + len(entry.name) + entry.nbytes} bytes for {describe(name)}",
            max(end - entry.at, 0),
        )
    raw = read_exactly(file, entry.at, start, "an entry")
    magic, _, flags, method, _, _, _, _, _, name_nbytes, extra_nbytes = _LOCAL.unpack_from(raw)
    if magic != MAGIC or raw[_LOCAL.size :] != entry.name or name_nbytes != len(entry.name):
        _fail(file, "an entry is not where its directory says", describe(name), describe(raw[:4]))
    if method != entry.method or flags & _ENCRYPTED:
        _fail(file, "an entry is not as its directory says", f"method {entry.method}", method)
    start += extra_nbytes
    if start + entry.nbytes > end:
        _fail(file, "entries overlap", f"{end} or less", f"{start + entry.nbytes} in {name!r}")
    return Entry(start, start + entry.nbytes, method)
