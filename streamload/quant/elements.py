"""Some elements of a weight that is dequantised, in the order in which models have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from streamload.cast.table import ZERO, CastCounts
from streamload.checkpoint.header import TensorInfo
from streamload.dtypes import DType
from streamload.quant.dequant import Decoder
from streamload.quant.group import Packed

#: Opens bytes of a file, from one to another, exclusive.
Read = Callable[[int, int], AbstractContextManager[memoryview]]


def elements(
    info: TensorInfo,
    decoder: Decoder | None,
    dtype: DType,
    read: Read,
    first: int,
    stop: int,
    out: memoryview,
    most_nbytes: int,
) -> CastCounts:
    """Dequantise some elements of a tensor, or take those of its transpose as they are.

    Args:
        info: the tensor.
        decoder: of it; None for elements of the transpose of a plain matrix.
        dtype: what elements become.
        read: reads its file.
        first: number of the first element, in the order of the output.
        stop: of the last one, exclusive.
        out: the elements, written.
        most_nbytes: the most that is read at once; of a tensor that lies as models have it, as
            much is read as the elements take.
    """
    if decoder is None or (isinstance(info, Packed) and info.lies_turned):
        return _turned(info, decoder, dtype, read, first, stop, out, most_nbytes)
    bits = info.dtype.bits
    with read(info.start + first * bits // 8, info.start + (stop * bits + 7) // 8) as data:
        return decoder.decode(data, out, first)


def _turned(
    info: TensorInfo,
    decoder: Decoder | None,
    dtype: DType,
    read: Read,
    first: int,
    stop: int,
    out: memoryview,
    most_nbytes: int,
) -> CastCounts:
    """The same of a tensor whose last two axes change places: of columns of its lines."""
    *_, lines, columns = info.shape
    matrix, bits, n = lines * columns, info.dtype.bits, dtype.itemsize
    pitch, unit = columns * bits // 8, 8 // math.gcd(8, bits)
    some = max(most_nbytes // pitch, 1)
    counts, at = ZERO, first
    while at < stop:
        number = at // matrix
        begin, end = at - number * matrix, min(stop - number * matrix, matrix)
        left = begin // lines // unit * unit
        right = min(-(-end // lines // unit) * unit, columns)
        # columns that begin before are counted by the part that has their beginning
        counted = left + unit if left * lines < begin else left
        whole = np.empty((lines, right - left), f"u{n}")
        for line in range(0, lines, some):
            upto = min(line + some, lines)
            for a, b in ((left, counted), (counted, right)):
                if a == b:
                    continue
                element = (number * lines + line) * columns + a
                start, nbytes = info.start + element * bits // 8, (b - a) * bits // 8
                with read(start, start + (upto - line - 1) * pitch + nbytes) as view:
                    apart = np.ndarray((upto - line, nbytes), np.uint8, view, strides=(pitch, 1))
                    data = np.array(apart)
                    del apart
                made = (
                    data.view(f"u{n}")
                    if decoder is None
                    else np.empty((upto - line, b - a), f"u{n}")
                )
                if decoder is not None:
                    given, to = (memoryview(each.data).cast("B") for each in (data, made))
                    found = decoder.decode(given, to, element, upto - line, columns)
                    counts += found if a == counted else ZERO
                whole[line:upto, a - left : b - left] = made
        to = out[(at - first) * n : (at - first + end - begin) * n]
        np.frombuffer(to, f"u{n}")[:] = whole.T.reshape(-1)[begin - left * lines :][: end - begin]
        at += end - begin
    return counts
