"""Reads files that torch.save wrote before version 1.6: pickles, then storages, in a row.

The pickles are a magic number, the version of the protocol, facts about the machine, the objects,
and the keys of the storages. Each storage follows in the order of the keys, in little-endian bytes
on every machine: the number of its elements as an int64, then these.

Source: ``_legacy_save`` and ``_legacy_load`` in ``torch/serialization.py`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.dtypes import BY_NAME
from streamload.core.location import Url
from streamload.errors import HeaderError, TruncatedFileError
from streamload.files.header import describe, most_nbytes
from streamload.formats.reader import File, read_exactly
from streamload.formats.torch.globals import CutOffError, Storage
from streamload.formats.torch.pickles import check_length, unpickle
from streamload.formats.torch.unpickler import Loaded
from streamload.formats.torch.zip_entries import Entry

# The opcodes that push the magic number, from protocol 2 on and before; they end in few bytes.
_MAGICS = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_MAGIC_NBYTES = 32
_PROTOCOL = 1001
_FIRST_NBYTES = 2**18  # read first; four times as many while the pickles are longer
_COUNT_NBYTES = 8
_OTHER_ITEMSIZES = {"complex128": 16, "complex32": 4, "qint32": 4}  # of those unreadable, not 1
_WHAT = "its pickle"


def is_legacy(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` has this form."""
    return any(magic in head[:_MAGIC_NBYTES] for magic in _MAGICS)


def read_legacy(file: File) -> tuple[Any, Mapping[str, Entry]]:
    """Return a file's objects, and the ranges of its storages by ``data/key``, as archives have."""
    nbytes = _FIRST_NBYTES
    while True:
        raw = file.read(0, nbytes)
        try:
            objects, keys = _pickles(file, raw)
            break
        except HeaderError as error:
            if not isinstance(error.__cause__, CutOffError) or len(raw) == file.nbytes:
                raise
            most = min(4 * nbytes, file.nbytes, most_nbytes(file.path, _WHAT))
            nbytes = max(most, nbytes + 1)
            check_length(file, nbytes, _WHAT)
    check_length(file, keys.stop, _WHAT)
    return objects.root, _entries(file, objects.storages, keys)


def _pickles(file: File, raw: bytes) -> tuple[Loaded, Loaded]:
    """Return the objects and the keys of the storages; raise HeaderError if ``raw`` is invalid."""
    magic = unpickle(file, raw, _WHAT)
    protocol = unpickle(file, raw, _WHAT, magic.stop)
    if protocol.root != _PROTOCOL:
        problem = "is of another protocol of torch.save"
        raise HeaderError(file.path, problem, _PROTOCOL, describe(protocol.root))
    machine = unpickle(file, raw, _WHAT, protocol.stop)
    objects = unpickle(file, raw, _WHAT, machine.stop)
    return objects, unpickle(file, raw, _WHAT, objects.stop)


def _entries(file: File, storages: Mapping[str, Storage], keys: Loaded) -> Mapping[str, Entry]:
    """Return the ranges of the storages that follow the list of their keys."""
    if type(keys.root) is not list:
        problem = "the keys of its storages are not valid"
        raise HeaderError(file.path, problem, "a list", type(keys.root).__name__)
    entries: dict[str, Entry] = {}
    at = keys.stop
    for key in keys.root:
        storage = storages.get(key) if type(key) is str else None
        if storage is None or f"data/{key}" in entries:
            problem = "the keys of its storages are not valid"
            raise HeaderError(file.path, problem, "each storage of a tensor once", describe(key))
        dtype = BY_NAME.get(storage.dtype)
        itemsize = dtype.itemsize if dtype else _OTHER_ITEMSIZES.get(storage.dtype, 1)
        start = at + _COUNT_NBYTES
        stop = start + storage.numel * itemsize
        if stop > file.nbytes:
            problem = f"storage {describe(key)} is cut off"
            raise TruncatedFileError(file.path, problem, stop, file.nbytes)
        # on a server each would be a request, and the length of the file has to suffice
        if not isinstance(file.path, Url):
            count = int.from_bytes(read_exactly(file, at, start, "a storage"), "little")
            if count != storage.numel:
                problem = f"storage {describe(key)} has another length than the pickle says"
                raise HeaderError(file.path, problem, storage.numel, count)
        entries[f"data/{key}"] = Entry(start, stop, 0)
        at = stop
    return entries
