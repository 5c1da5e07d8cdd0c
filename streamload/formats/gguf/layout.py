"""The bytes of a GGUF file up to its data, from metadata and tensors.

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
#: Numpy's scalars and arrays have their type, an int is a UINT32, a float a FLOAT32, and a list
#: holds strings.
Metadata = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor in a file's header."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.kind.dtype.nbytes(math.prod(self.shape))


def metadata_bytes(metadata: Metadata) -> bytes:
    """Keys and values, one after the other."""
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
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _scalar(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, np.generic):
        number, value = _NUMBER_OF[value.dtype], value.item()
    else:
        number = {bool: BOOL, int: UINT32, float: FLOAT32}[type(value)]
    return struct.pack(f"<I{SCALARS[number]}", number, value)


def header(metadata: bytes, keys: int, entries: Sequence[Described]) -> bytes:
    """A file's bytes up to the data; ``metadata`` has so many keys."""
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
    """The keys of one of several files, counted from 0; ``tensors`` are those of all files."""
    return {
        "split.no": np.uint16(number),
        "split.count": np.uint16(count),
        "split.tensors.count": np.int32(tensors),
    }


#: What a file of a set has besides its tensors and the metadata of the model, at most.
OVERHEAD_NBYTES = len(metadata_bytes(split_metadata(0, 0, 0))) + 2 * ALIGNMENT


def file_nbytes(entry: Described) -> int:
    """The most bytes that a tensor takes of a file: its entry in the header, and its data."""
    return len(_text(entry.name)) + 16 + 8 * len(entry.shape) + round_up(entry.nbytes, ALIGNMENT)
