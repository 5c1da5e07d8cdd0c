"""Reads importance matrices of llama.cpp: for each matrix of a model, a weight for each column.

A weight is the mean square of the inputs that the column was multiplied with on some text. A file
is GGUF, with the sums of squares in ``NAME.in_sum2`` (float32, a row for each matrix of a stack of
experts) and the number of inputs in ``NAME.counts``; or, by older versions, a list of entries: the
length of the name and the name, the number of calls, the number of sums, and float32 sums, which
are divided by the number of calls. Numbers have 32 bits, little-endian; other data may follow.

Source: ``common_imatrix_load`` in common/imatrix-loader.cpp and ``load_imatrix`` in
tools/quantize/quantize.cpp of llama.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamload.codecs.parts import Array
from streamload.codecs.weights import read_whole
from streamload.core.dtypes import F32
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, HeaderError
from streamload.files.header import Header, is_text
from streamload.files.local import open_file
from streamload.formats.gguf.constants import MAGIC
from streamload.formats.reader import File, Format, FormatReader, read_exactly, read_header

_SUMS, _COUNTS = ".in_sum2", ".counts"
_NUMBER, _NUMBERS = struct.Struct("<i"), struct.Struct("<ii")
_LONGEST_NAME = 2**16
_FAR = 40  # exponents beyond which weights are scaled


class Importance(NamedTuple):
    """The weights of a matrix's columns, in a file; the sums of several matrices may follow.

    `counts`: the tensor of divisors, or the divisor of all sums.
    """

    header: Header
    sums: TensorInfo
    counts: TensorInfo | int

    def read(self) -> Array:
        """Return the float32 weights, one row for each matrix.

        Raises CheckpointError if some are negative or not finite.
        """
        if isinstance(self.counts, int):
            self._check(np.array([self.counts]), "number of calls")
            (raw,) = read_whole([self.header], [self.sums])
            found = np.frombuffer(raw, "<f4")[None] / np.float32(max(self.counts, 1))
        else:
            raw, divisors = read_whole([self.header], [self.sums, self.counts])
            stored = np.frombuffer(divisors, "<f4")
            self._check(stored, "count")
            counts = np.floor(stored + np.float32(0.5))[:, None]
            sums = np.frombuffer(raw, "<f4").reshape(len(counts), -1)
            with np.errstate(all="ignore"):
                found = np.where(counts > 0, sums / counts, np.float32(1))
        self._check(found, "weight")
        # searches square them; a power of two changes no result
        most = found.max(axis=1, keepdims=True)
        _, exponents = np.frexp(most)
        scaled: Array = np.ldexp(found, np.where(abs(exponents) > _FAR, -exponents, 0))
        return np.where(most > 0, scaled, np.float32(1))  # zeros alone would make all codes zero

    def _check(self, values: Array, what: str) -> None:
        bad = ~np.isfinite(values) | (values < 0)
        if bad.any():
            raise CheckpointError(
                self.header.path,
                f"the importance matrix has an invalid {what}; leave imatrix= out, or make the "
                "file again with llama-imatrix",
                expected="a finite number of at least 0",
                found=f"{values[bad][0]:g}",
                tensor=self.sums.name,
            )


def read_imatrix(path: Path) -> Mapping[str, Importance]:
    """Return the importance of each matrix in a file, by GGUF's name; reads no weight."""
    with open_file(path) as file:
        is_gguf = file.read(0, len(MAGIC)) == MAGIC
    header = read_header(path, format=None if is_gguf else _FORMAT)
    if not is_gguf:
        return {t.name: Importance(header, t, int(header.metadata[t.name])) for t in header.tensors}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    found = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        counts = tensors.get(owner := name.removesuffix(_SUMS) + _COUNTS)
        if counts is None or sums.dtype is not F32 or counts.dtype is not F32:
            what = "float32 sums and counts"
            raise CheckpointError(path, "is no importance matrix", what, tensor=owner)
        if not counts.numel or sums.numel % counts.numel:
            numbers = f"{sums.numel} sums and {counts.numel} counts"
            raise CheckpointError(path, "has sums without counts", found=numbers, tensor=name)
        found[name.removesuffix(_SUMS)] = Importance(header, sums, counts)
    if not found:
        raise CheckpointError(path, "is no importance matrix", f"tensors NAME{_SUMS}", "none")
    return found


class _Entries(FormatReader):
    """Reads the older files, a list of entries."""

    def read_header(self, file: File) -> Header:
        at = _NUMBER.size
        (count,) = _NUMBER.unpack(read_exactly(file, 0, at, "the number of entries"))
        self._check(file, "the number of entries", count, file.nbytes // _NUMBERS.size)
        tensors: dict[str, TensorInfo] = {}
        calls: dict[str, str] = {}
        for index in range(count):
            what = f"entry {index}"
            (length,) = _NUMBER.unpack(read_exactly(file, at, at + _NUMBER.size, what))
            self._check(file, f"the length of a name of {what}", length, _LONGEST_NAME)
            at += _NUMBER.size
            raw = read_exactly(file, at, at + length + _NUMBERS.size, what)
            name, at = raw[:length].decode("utf-8", "replace"), at + len(raw)
            if not is_text(name) or name in tensors:
                raise HeaderError(file.path, f"{what} has no name of its own", found=repr(name))
            number, values = _NUMBERS.unpack(raw[length:])
            self._check(file, f"the number of sums of {what}", values, (file.nbytes - at) // 4)
            stop = at + 4 * values
            tensors[name] = TensorInfo(name, F32, (values,), file.path, at, stop)
            calls[name], at = str(number), stop
        return Header(file.path, file.nbytes, _NUMBER.size, tuple(tensors.values()), calls)

    @staticmethod
    def _check(file: File, what: str, found: int, most: int) -> None:
        if not 0 < found <= most:
            expected = f"{what} from 1 to {most}"
            raise HeaderError(file.path, "is no importance matrix", expected, found)


_FORMAT = Format(name="imatrix", reads=f"{__name__}:_Entries")
