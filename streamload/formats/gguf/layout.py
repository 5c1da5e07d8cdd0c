"""Writes the bytes of a GGUF file up to its data, from metadata and tensors.

A file has the magic, the version, the number of tensors and of keys, the metadata, an entry for
each tensor (name, lengths of the axes from the last to the first, type, offset from the start of
the data), and the data. The data and each tensor begin at a multiple of the alignment; zeros fill
the gaps, and the end of the file up to such a multiple.

Source: docs/gguf.md in github.com/ggml-org/ggml. The bytes equal those of `GGUFWriter` of gguf-py
0.19 for the same keys and tensors in the same order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.core.units import round_up
from streamload.formats.gguf.constants import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    FLOAT32,
    MAGIC,
    SCALARS,
    STRING,
    UINT32,
    TensorType,
)

_VERSION = 3
_NUMBER_OF = {np.dtype(f"<{code}"): number for number, code in SCALARS.items()}
#: Keys and values to write: numpy's scalars and arrays keep their type, an int becomes UINT32, a
#: float FLOAT32, and a list holds strings.
Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as a file's header describes it: name, shape in elements and GGUF type."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return self.kind.dtype.nbytes(math.prod(self.shape))


def metadata_bytes(metadata: Metadata) -> bytes:
    """Return the bytes of keys and values, as a GGUF header has them."""
    out = bytearray()
    for key, value in metadata.items():
        out += _text(key)
        if isinstance(value, list):
            out += struct.pack("<IIQ", ARRAY, STRING, len(value))
            for text in value:  # there may be very many
                out += _text(text)
        elif isinstance(value, np.ndarray):
            out += struct.pack("<IIQ", ARRAY, _NUMBER_OF[value.dtype], value.size)
            out += value.tobytes()
        else:
            out += _scalar(value)
    return bytes(out)


def _text(value: str) -> bytes:
    """Return a GGUF string: its length in 64 bits, and UTF-8."""
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _scalar(value: Any) -> bytes:
    """Return the type number and the bytes of a string or a number."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, np.generic):
        number, value = _NUMBER_OF[value.dtype], value.item()
    else:
        number = {bool: BOOL, int: UINT32, float: FLOAT32}[type(value)]
    return struct.pack(f"<I{SCALARS[number]}", number, value)


def header(metadata: bytes, keys: int, entries: Sequence[Described]) -> bytes:
    """Return a file's bytes up to the data; ``keys`` is the number of keys in ``metadata``."""
    offset = 0
    out = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(entries), keys))
    out += metadata
    for entry in entries:
        axes = entry.shape[::-1]
        out += _text(entry.name)
        out += struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, entry.kind.number, offset)
        offset = round_up(offset + entry.nbytes, ALIGNMENT)
    out += bytes(-len(out) % ALIGNMENT)
    return bytes(out)


def split_metadata(number: int, count: int, tensors: int) -> dict[str, Any]:
    """Return the keys of file ``number`` (from 0) of ``count``; ``tensors`` counts all files'."""
    return {
        "split.no": np.uint16(number),
        "split.count": np.uint16(count),
        "split.tensors.count": np.int32(tensors),
    }


#: Most bytes of a file of a set besides its tensors and the model's metadata.
OVERHEAD_NBYTES = len(metadata_bytes(split_metadata(0, 0, 0))) + 2 * ALIGNMENT


def file_nbytes(entry: Described) -> int:
    """Return the most bytes that a tensor takes in a file: its header entry, and its data."""
    return len(_text(entry.name)) + 16 + 8 * len(entry.shape) + round_up(entry.nbytes, ALIGNMENT)
