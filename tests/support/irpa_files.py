"""IREE's parameter archives for tests, built field by field from the format's description."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

SKIPPED, SPLAT, DATA, EXTERNAL = range(4)
_HEADER = ("magic", "major", "minor", "size", "next", "flags", "count")
_SEGMENTS = ("entries", "metadata", "storage")


@dataclass
class Item:
    name: bytes
    data: bytes = b""  # of a splat, the pattern
    metadata: bytes = b""
    nbytes: int | None = None  # of a splat, its length
    # in place of the right ones: "size", "type", "name", "name_nbytes", "metadata",
    # "metadata_nbytes", "alignment", "at", "nbytes" and "pattern"
    fields: dict[str, int] = field(default_factory=dict)


def said(dtype: object, shape: object, prefix: bytes = b"TENSORv0:") -> bytes:
    return prefix + json.dumps({"type": "Tensor", "dtype": dtype, "shape": shape}).encode()


def archive(items: Sequence[Item], *, start: int = 0, **fields: int | bytes) -> bytes:
    """An archive that begins at file byte ``start``, which alignment is counted from.

    ``fields`` replace those of the header; of a segment its name is the offset, and with "_nbytes"
    the length.
    """
    table, texts, storage = bytearray(), bytearray(), bytearray()
    for item in items:
        table += bytes(-len(table) % 16)
        name = len(texts)
        texts += item.name + item.metadata
        is_splat = item.nbytes is not None
        if not is_splat:
            storage += bytes(-len(storage) % 64)
        known = {
            "size": 85 if is_splat else 76,
            "type": SPLAT if is_splat else DATA,
            "flags": 0,
            "name": name,
            "name_nbytes": len(item.name),
            "metadata": name + len(item.name),
            "metadata_nbytes": len(item.metadata),
            "alignment": 0 if is_splat else 64,
            "at": len(storage),
            "nbytes": item.nbytes if is_splat else len(item.data),
            "pattern": len(item.data),
        } | item.fields
        first = ("size", "type", "flags", "name", "name_nbytes", "metadata", "metadata_nbytes")
        table += struct.pack("<QI6Q", *(known[key] for key in (*first, "alignment")))
        if is_splat:
            table += struct.pack("<Q16sB", known["nbytes"], item.data, known["pattern"])
        else:
            table += struct.pack("<QQ", known["at"], known["nbytes"])
            storage += item.data
    begin = 96 + len(table) + len(texts)
    begin += -(start + begin) % 64
    numbers: dict[str, int | bytes] = {
        **{"magic": b"IRPA", "major": 0, "minor": 0, "size": 88, "next": 0, "flags": 0},
        **{"count": len(items), "entries": 96, "entries_nbytes": len(table)},
        **{"metadata": 96 + len(table), "metadata_nbytes": len(texts)},
        **{"storage": begin, "storage_nbytes": len(storage)},
        **fields,
    }
    ranges = (each for name in _SEGMENTS for each in (name, f"{name}_nbytes"))
    header = struct.pack("<4sHHQQQ7Q", *(numbers[key] for key in (*_HEADER, *ranges)))
    return (header.ljust(96, b"\0") + table + texts).ljust(begin, b"\0") + storage
