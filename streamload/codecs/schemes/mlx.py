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
from itertools import product, starmap
from types import MappingProxyType
from typing import Any

import numpy as np

from streamload.codecs.cast_table import OutOfRange
from streamload.codecs.decode import floats
from streamload.codecs.decode_blocks import BlockDecoder
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import Array, Part
from streamload.codecs.scheme import Codec, Library, Quantized, Read, codec_of
from streamload.codecs.stored import own_formats
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, DType
from streamload.core.tensors import TensorInfo

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
BLOCK = 32  # codes that fill whole words; a group has one or several of them
_FLOATS = (F16, BF16, F32)  # of scales and biases
_KEY = "quantization"  # of config.json


def _unpacked(data: Array, bits: int) -> Array:
    """Return the codes in the bytes of whole blocks, a block a row."""
    if bits == 8:
        return data.reshape(-1, BLOCK)
    if bits == 4:
        return np.stack((data & 15, data >> 4), axis=1).reshape(-1, BLOCK)
    nbytes = bits * BLOCK // 8
    rows = np.zeros((data.size // nbytes, nbytes + 1), np.uint16)
    rows[:, :-1] = data.reshape(-1, nbytes)
    at, shift = np.divmod(np.arange(BLOCK) * bits, 8)
    both = rows[:, at] | rows[:, at + 1] << 8
    return (both >> shift.astype(np.uint16)) & ((1 << bits) - 1)


class Affine(Codec):
    """Decodes codes by scales and biases, on the host.

    Attributes:
        bits: of a code.
        group: codes that share a scale and a bias.
        scale: the dtype of these.
    """

    def __init__(self, bits: int, group: int, scale: DType) -> None:
        self.bits, self.group, self.scale = bits, group, scale
        self.name = self.kind = f"mlx-{bits}bit-{group}-{scale.name}"
        self.dtype = DType(f"mlx {bits} bits", "", bits * BLOCK, "float", BLOCK)

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Return the tensors of a file: words of codes, and a scale and a bias for each group."""
        *rows, width = shape
        if width % self.group:
            raise ValueError(f"{self.name} has groups of {self.group}, which do not divide {shape}")
        nbytes, groups = self.bits * BLOCK // 8, (*rows, width // self.group)
        parts = (
            Part("", BY_CODE["U32"], (*rows, width * self.bits // 32)),
            Part("scales", self.scale, groups, is_sibling=True),
            Part("biases", self.scale, groups, is_sibling=True),
        )
        return Quantized(self, shape, self.scale, parts, BLOCK, nbytes)

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> BlockDecoder:
        """Read scales and biases, and return the decoder of the codes."""
        both = (info.group.members[role] for role in ("scale", "bias"))
        scales, biases = (floats(each, read(each))[:, None] for each in both)
        blocks = info.group.block[-1] // BLOCK  # of a group

        def elements(source: Array, out: Array, first: int) -> None:
            rows = out.reshape(-1, BLOCK)
            group = np.arange(first, first + len(rows)) // blocks
            rows[:] = _unpacked(source, self.bits)
            rows *= scales[group]
            rows += biases[group]

        what, size = f"MLX's codes of {self.bits} bits", (BLOCK, self.bits * BLOCK // 8)
        return BlockDecoder(what, size, dst, elements, engine, out_of_range, alike=False)


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
    layouts.check(scales, tuple(each.code for each in _FLOATS))
    layouts.check(biases, (scales.dtype.code,), scales.shape)
    bits, group = said.get("bits"), said.get("group_size")
    if type(bits) is not int or type(group) is not int or bits not in _BITS or group not in _GROUPS:
        expected = f'"{_KEY}": {{"group_size": 32, 64 or 128, "bits": 2 to 6 or 8}} in config.json'
        layouts.refuse(name, "its bits and groups are not stated", expected, dict(said) or "none")
    *rows, words = values.shape
    shape = (*rows, words * 32 // bits)
    if words * 32 % (bits * BLOCK) or scales.shape != (*rows, shape[-1] // group):
        expected = f"a scale for each {group} codes of {bits} bits in {list(values.shape)} words"
        layouts.refuse_shape(scales, expected)
    members = {"weight": values, "scale": scales, "bias": biases}
    kind = Affine(bits, group, scales.dtype).kind
    return QuantizedWeight(kind, name, members, shape, (1, group), bits)


def _said(layouts: Layouts, module: str) -> Mapping[str, Any]:
    """Return the settings of a module's weight in config.json, MLX's or streamload's."""
    for kind, names in own_formats(layouts):
        if f"{module}.weight".removeprefix(".") in names and isinstance(
            layout := codec_of(kind), Affine
        ):
            return {"bits": layout.bits, "group_size": layout.group}
    found = layouts.config.get(_KEY) or layouts.quantization
    if not isinstance(found, Mapping):
        return MappingProxyType({})
    own = found.get(module)
    return own if isinstance(own, Mapping) else found


LIBRARY = Library(*starmap(Affine, product(_BITS, _GROUPS, _FLOATS)), find=_find)
