"""Weights of MLX, which mlx-lm and mlx-vlm write: codes of 2 to 8 bits, scales and biases.

``weight`` has words of 32 bits, whose bits are a row's codes one after the other, the lowest bits
first; ``scales`` and ``biases`` have one number for each group of a row. An element is its code
times the scale, plus the bias: in float32 here, and rounded once to the target. MLX rounds product
and sum to the dtype of the scales, so its elements of 16 bits may differ by a step. config.json
states bits and the length of groups under "quantization", also for single modules.

Source: ``affine_quantize`` and ``dequantize`` in mlx/ops.cpp of MLX 0.32, and ``load_model`` in
mlx_lm/utils.py of mlx-lm 0.32. The modes without biases (mxfp4, nvfp4, mxfp8) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from streamload.codecs.cast_table import ZERO, Cast, CastCounts, OutOfRange, make_cast
from streamload.codecs.decode import check_lengths, floats
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import Array
from streamload.codecs.scheme import Decoder, Layout, Read, register
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core.dtypes import F32, DType
from streamload.core.tensors import TensorInfo

_BITS = (2, 3, 4, 5, 6, 8)
_BLOCK = 32  # codes that fill whole words; a group has one or several of them
_STEP = 1 << 11  # blocks decoded at once
_FLOATS = ("F16", "BF16", "F32")
_KEY = "quantization"  # of config.json


def _unpacked(data: Array, bits: int) -> Array:
    """Return the codes in the bytes of whole blocks, a block a row."""
    if bits == 8:
        return data.reshape(-1, _BLOCK)
    if bits == 4:
        return np.stack((data & 15, data >> 4), axis=1).reshape(-1, _BLOCK)
    nbytes = bits * _BLOCK // 8
    rows = np.zeros((data.size // nbytes, nbytes + 1), np.uint16)
    rows[:, :-1] = data.reshape(-1, nbytes)
    at, shift = np.divmod(np.arange(_BLOCK) * bits, 8)
    both = rows[:, at] | rows[:, at + 1] << 8
    return (both >> shift.astype(np.uint16)) & ((1 << bits) - 1)


class _Decoder(Decoder):
    def __init__(
        self, bits: int, dst: DType, cast: Cast | None, scales: Array, biases: Array, group: int
    ) -> None:
        self._bits, self._dst, self._cast = bits, dst, cast
        self._scales, self._biases, self._blocks = scales, biases, group // _BLOCK

    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        numel, odd = divmod(out.nbytes, self._dst.itemsize * lines)
        skipped = first % _BLOCK
        nbytes = -(-(skipped + numel) // _BLOCK) * self._bits * _BLOCK // 8
        is_cut = lines > 1 and (skipped or pitch % _BLOCK)
        fits = not odd and data.nbytes == nbytes * lines and not is_cut
        what = f"MLX's codes of {self._bits} bits"
        check_lengths(what, data, out, self._dst, first, lines, fits)
        counts, width = ZERO, numel * self._dst.itemsize
        for line in range(lines):
            codes = np.frombuffer(data[line * nbytes : (line + 1) * nbytes], np.uint8)
            to = out[line * width : (line + 1) * width]
            counts += self._line(codes, to, first + line * pitch)
        return counts

    def _line(self, data: Array, out: memoryview, first: int) -> CastCounts:
        """Decode consecutive elements from element ``first`` on."""
        counts, done, n = ZERO, 0, self._dst.itemsize
        block, skipped = divmod(first, _BLOCK)
        step = _STEP * self._bits * _BLOCK // 8
        for at in range(0, data.size, step):
            codes = _unpacked(data[at : at + step], self._bits)
            group = np.arange(block, block + len(codes)) // self._blocks
            elements = codes.astype(np.float32)
            elements *= self._scales[group, None]
            elements += self._biases[group, None]
            block += len(codes)
            wanted = elements.reshape(-1)[skipped:][: out.nbytes // n - done]
            to = out[done * n : (done + wanted.size) * n]
            if self._cast is None:
                np.frombuffer(to, np.uint8)[:] = wanted.view(np.uint8)
            else:
                counts += self._cast(memoryview(wanted.data).cast("B"), to)
            done, skipped = done + wanted.size, 0
        return counts


class _Affine(Layout):
    """Decodes codes of some bits by scales and biases, on the host."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.dtype = DType(f"mlx {bits} bits", "", bits * _BLOCK, "float", _BLOCK)

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> _Decoder:
        cast = None
        if dst is not F32:
            cast = make_cast(F32, dst, engine=engine, out_of_range=out_of_range)
        both = (info.group.members[role] for role in ("scale", "bias"))
        scales, biases = (floats(each, read(each)) for each in both)
        return _Decoder(self.bits, dst, cast, scales, biases, info.group.block[-1])

    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> None:
        """Compile nothing: numpy decodes."""


def _find(layouts: Layouts, scales: TensorInfo) -> QuantizedWeight | None:
    """Return the weight whose scales a tensor holds, next to words of codes; else None."""
    module = scales.name.removesuffix("scales")
    values = layouts.find(f"{module}weight")
    if values is None or values.dtype.code != "U32" or not values.shape:
        return None
    name = values.name
    said = _said(layouts, module.removesuffix("."))
    if said.get("mode", "affine") != "affine":
        modes = f"MLX's mode {said['mode']}, of which only affine is read"
        layouts.refuse(name, "it is packed in another way", "affine", modes)
    biases = layouts.need(f"{module}biases", name, "biases")
    layouts.check(scales, _FLOATS)
    layouts.check(biases, (scales.dtype.code,), scales.shape)
    bits, group = said.get("bits"), said.get("group_size")
    if type(bits) is not int or type(group) is not int or bits not in _BITS or group % _BLOCK:
        expected = f'"{_KEY}": {{"group_size": 32, 64 or 128, "bits": 2 to 6 or 8}} in config.json'
        layouts.refuse(name, "its bits and groups are not stated", expected, dict(said) or "none")
    *rows, words = values.shape
    shape = (*rows, words * 32 // bits)
    if words * 32 % (bits * _BLOCK) or scales.shape != (*rows, shape[-1] // group):
        expected = f"a scale for each {group} codes of {bits} bits in {list(values.shape)} words"
        layouts.refuse_shape(scales, expected)
    members = {"weight": values, "scale": scales, "bias": biases}
    return QuantizedWeight(f"mlx-{bits}bit", name, members, shape, (1, group), bits)


def _said(layouts: Layouts, module: str) -> Mapping[str, Any]:
    """Return the settings of a module's weight in config.json."""
    found = layouts.config.get(_KEY) or layouts.quantization
    if not isinstance(found, Mapping):
        return MappingProxyType({})
    own = found.get(module)
    return own if isinstance(own, Mapping) else found


register(
    layouts={f"mlx-{bits}bit": _Affine(bits) for bits in _BITS},
    find=_find,
    marks=lambda leaf: leaf == "scales",
)
