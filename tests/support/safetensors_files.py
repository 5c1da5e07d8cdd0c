"""Safetensors files written by hand, valid ones and broken ones."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamload.core.dtypes import BY_CODE

#: By the dtype of numpy.
CODES = {dtype.numpy: code for code, dtype in BY_CODE.items() if dtype.numpy is not None}


def header_bytes(header: object, *, pad_nbytes: int = 0) -> bytes:
    """The length prefix and the header (bytes, text, or a value to be serialised), then spaces."""
    if isinstance(header, str):
        header = header.encode()
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":")).encode()
    header += b" " * pad_nbytes
    return struct.pack("<Q", len(header)) + header


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],  # name to (dtype code, shape, data)
    *,
    metadata: Mapping[str, str] | None = None,
    align: int | None = None,  # where the data starts, modulo 16, by spaces after the header
    pad_nbytes: int = 0,  # spaces after the header before that
) -> Path:
    """Write a valid file, with the tensors' data in the order given; its folder is made."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name, (code, shape, data) in tensors.items():
        stop = start + len(data)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    if align is not None:
        pad_nbytes += (align - len(header_bytes(header, pad_nbytes=pad_nbytes))) % 16
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(header_bytes(header, pad_nbytes=pad_nbytes))
        for _, _, data in tensors.values():
            file.write(data)
    return path


def write_arrays(path: Path, arrays: Mapping[str, Any], **options: Any) -> Path:
    """Write arrays of numpy in their own dtypes; options are those of `write_safetensors`."""
    tensors = {n: (CODES[a.dtype], a.shape, a.tobytes()) for n, a in arrays.items()}
    return write_safetensors(path, tensors, **options)


def write_sparse(path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Path:
    """Write a valid file of any size whose data are a hole, of names to (dtype code, shape)."""
    header: dict[str, object] = {}
    at = 0
    for name, (code, shape) in tensors.items():
        stop = at + BY_CODE[code].nbytes(math.prod(shape))
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    raw = header_bytes(header)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(raw)
        file.truncate(len(raw) + at)
    return path
