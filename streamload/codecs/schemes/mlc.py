"""MLC-LLM's group quantization: groups of 32 or 40 elements of a row, in words of 32 bits.

A group has a scale, and codes of b bits, 4 or 3. With M = 2^(b - 1) - 1 the scale is the largest
magnitude divided by M, rounded to the dtype in the scheme's name; a code is an element divided by
the scale, plus M, to nearest, ties to even, from 0 to 2 M; it decodes to (code - M) times the
scale. A little-endian uint32 holds 32 // b codes, the first in its low bits. A group has words of
its own: where a row ends within its last group, the bits that are left are 0. Codes are M where the
scale is rounded to 0, and where it is infinite in float16: the group's elements count as overflowed
then.

Names that end in ``_1`` keep the rows: words and scales are matrices with a row for each of the
weight's. ``q4f16_0`` stores both transposed, for weights (not embeddings) alone: its tensor is
(groups of a row, rows, 32), which is a permutation of the weight that has runs of 32.

Source: github.com/mlc-ai/mlc-llm, group_quantization.py (``_quantize``, ``_dequantize``), utils.py
(``pack_weight``) and quantization.py (the names) of python/mlc_llm/quantization. MLC divides and
adds in the scale's dtype, here it is float32: where that rounds differently, the code here is the
nearer one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamload.codecs.encode import Encoded, Units, as_bytes, checked_numel
from streamload.codecs.encode_kernels import Packing, Recipe, Scalars
from streamload.codecs.ir import NARROW, WIDEN, Vector, minimum
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import Array, Part, QuantCounts, check_source
from streamload.codecs.scheme import Codec, Encoder, Library, Quantized
from streamload.codecs.schemes.gguf import half_scale
from streamload.codecs.schemes.scaled import nearest
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, DType

#: Last name components of the arrays of words and of scales, in place of "weight".
CODES, SCALES = "q_weight", "q_scale"
_WORDS = 4  # uint32 words of a group
_INFINITE = 0x7C00  # bits of float16


@dataclass(frozen=True)
class _Recipe(Recipe):
    """Instructions that quantize a group to codes of ``bits`` bits; ``most`` is the code of 0."""

    bits: int
    most: int
    numel: int
    scale: DType
    packing: Packing

    @property
    def header_nbytes(self) -> int:  # type: ignore[override]
        return self.scale.itemsize

    @property
    def group(self) -> np.dtype[Any]:
        """A group as the kernel writes it, the scale as bits."""
        return np.dtype([("scale", f"<u{self.scale.itemsize}"), ("words", "<u4", _WORDS)])

    def scalars(self, one: Vector, largest: str) -> Scalars:
        d = one.op("fdiv", "float", largest, float(self.most))
        overflowed = ""  # of 16 bits, bfloat16 has float32's exponents
        if self.scale is F16:
            header, kept, overflowed, _ = half_scale(one, d)
        elif self.scale is F32:
            header, kept = one.as_bits(d), d
        else:
            header = NARROW[self.scale.code](one, one.as_bits(d))
            kept = one.as_float(WIDEN[self.scale.code](one, header))
        is_zero = one.op("fcmp oeq", "float", kept, 0.0)
        divisor = one.select(is_zero, "float", math.inf, kept)
        return Scalars((divisor, kept), header=header, overflowed=overflowed)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        divisor, d = scalars
        steps = v.op("fadd", "float", v.op("fdiv", "float", x, divisor), float(self.most))
        code, _ = nearest(v, steps)
        code = v.select(v.op("icmp slt", "i32", code, 0), "i32", 0, code)
        code = minimum(v, "i32", code, 2 * self.most)
        value = v.convert("sitofp", "i32", v.op("sub", "i32", code, self.most), "float")
        return code, v.op("fmul", "float", value, d)


class _Groups(Units):
    """A group quantization of MLC-LLM, such as "q4f16_1"; transformers cannot read it.

    A tensor ``layer.q_weight`` is stored as arrays of words and of scales. Its shape ends in the
    row's length, or is (groups of a row, rows, 32) if both arrays are stored transposed.
    """

    device_parts = None
    recipe: _Recipe

    def __init__(self, name: str, bits: int, scale: DType, *, is_transposed: bool = False) -> None:
        self.name, self.is_transposed = name, is_transposed
        packing: Packing = "tens" if bits == 3 else "low pairs"
        self.recipe = _Recipe(bits, 2 ** (bits - 1) - 1, 32 // bits * _WORDS, scale, packing)

    @property
    def on_cuda(self) -> tuple[Codec, ...]:
        return ()

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        check_source(self.name, shape, src)
        group = self.recipe.numel
        if not shape or (self.is_transposed and (len(shape) != 3 or shape[-1] != group)):
            of = f"(groups, rows, {group})" if self.is_transposed else "rows"
            raise ValueError(f"{self.name} is made from a tensor of {of}, not of shape {shape}")
        *rows, width = shape
        groups = -(-width // group)  # of a row
        scales = tuple(rows) if self.is_transposed else (*rows, groups)
        words = (_WORDS * rows[0], *rows[1:]) if self.is_transposed else (*rows, _WORDS * groups)
        sibling = Part(SCALES, self.recipe.scale, scales, is_sibling=True)
        # a group; a row if its last group is short, all rows if transposed
        unit = math.prod(shape[1:]) if self.is_transposed else width if width % group else group
        nbytes = 4 * _WORDS * -(-unit // group)
        return Quantized(self, shape, src, (Part("", BY_CODE["U32"], words), sibling), unit, nbytes)

    def encoder(self, tensor: Quantized, src: DType, engine: Engine) -> Encoder:
        # rows padded to whole groups, each a scale followed by words of codes
        count = math.prod(tensor.shape[:-1]) * -(-tensor.shape[-1] // self.recipe.numel)
        shape, nbytes = (count, self.recipe.numel), self.recipe.group.itemsize
        groups = replace(tensor, shape=shape, unit_numel=self.recipe.numel, unit_nbytes=nbytes)
        return _Encoder(self, tensor, src, super().encoder(groups, src, engine))

    def encoded(self, x: Array) -> Encoded:
        bits, most, scale = self.recipe.bits, np.float32(self.recipe.most), self.recipe.scale
        with np.errstate(over="ignore"):
            header = (np.abs(x).max(axis=1, keepdims=True) / most).astype(scale.numpy)
        kept = header.astype(np.float32)
        divisor = np.where(kept == 0, np.float32(np.inf), kept)
        codes = np.clip(np.rint(x / divisor + most), 0, 2 * most)
        with np.errstate(invalid="ignore"):
            decoded = (codes - most) * kept
        shifts = bits * np.arange(32 // bits, dtype=np.uint32)
        by_word = codes.astype(np.uint32).reshape(len(x), _WORDS, -1) << shifts
        words = np.bitwise_or.reduce(by_word, axis=2)
        both = np.concatenate([header.view(np.uint8), words.view(np.uint8)], axis=1)
        overflowed = self.recipe.numel * int(np.count_nonzero(np.isinf(kept)))
        return Encoded(both, decoded, overflowed=overflowed)


class _Encoder(Encoder):
    """Quantizes a tensor by groups, whose words of codes and scales go to separate arrays."""

    def __init__(self, codec: _Groups, tensor: Quantized, src: DType, groups: Encoder) -> None:
        self._codec, self._tensor, self._src, self._groups = codec, tensor, src, groups
        self._group, self._width = codec.recipe.group, codec.recipe.numel
        self._of_row = -(-tensor.shape[-1] // self._width)
        count = math.prod(tensor.shape[:-1]) * self._of_row
        self._scales = np.zeros(count, self._group["scale"])

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor, unit = self._tensor, self._tensor.unit_numel
        numel = checked_numel(tensor, self._src, data, out, first)
        each, is_short = -(-unit // self._width), tensor.shape[-1] % self._width != 0
        at = first // unit * each
        found = np.empty(numel // unit * each, self._group)
        whole = self._filled(data) if is_short else data
        counts = self._groups.encode(whole, as_bytes(found), at * self._width)
        self._scales[at : at + len(found)] = found["scale"]
        if is_short:
            counts = self._emptied(found, counts, numel)
        words = np.frombuffer(out, "<u4")
        if self._codec.is_transposed:
            rows = tensor.shape[1]
            by_strip = found["words"].reshape(-1, rows, _WORDS)
            words.reshape(-1, _WORDS, rows)[...] = by_strip.transpose(0, 2, 1)
        else:
            scale = self._group["scale"].itemsize
            as_bytes_alone = [("scale", f"V{scale}"), ("words", f"V{4 * _WORDS}")]
            # numpy copies bytes faster
            words.view(f"V{4 * _WORDS}")[...] = found.view(as_bytes_alone)["words"]
        return counts

    def finish(self) -> dict[str, memoryview]:
        return {SCALES: as_bytes(self._scales)}

    def _filled(self, data: memoryview) -> memoryview:
        """Return the rows of ``data``, each padded with zeros to whole groups."""
        width = self._tensor.shape[-1]
        rows = np.frombuffer(data, f"V{self._src.itemsize}").reshape(-1, width)
        filled = np.zeros((len(rows), self._of_row * self._width), rows.dtype)
        filled[:, :width] = rows
        return as_bytes(filled)

    def _emptied(self, found: Array, counts: QuantCounts, numel: int) -> QuantCounts:
        """Clear in ``found`` the codes of zeros from `_filled`; return ``counts`` without them."""
        last = found.reshape(-1, self._of_row)[:, -1]
        bits = self._codec.recipe.bits
        per_word = 32 // bits
        left = self._tensor.shape[-1] % self._width
        codes = np.clip(left - per_word * np.arange(_WORDS), 0, per_word)
        kept = (1 << bits * codes.astype(np.int64)) - 1
        last["words"] &= kept.astype("<u4")
        infinite = last["scale"] == _INFINITE if counts.overflowed else 0
        filled = (self._width - left) * int(np.count_nonzero(infinite))
        return replace(counts, numel=numel, overflowed=counts.overflowed - filled)


_CODECS = (
    _Groups("q4f16_1", 4, F16),
    _Groups("q4f16_0", 4, F16, is_transposed=True),
    _Groups("q3f16_1", 3, F16),
    _Groups("q4f32_1", 4, F32),
    _Groups("q4bf16_1", 4, BF16),
)
LIBRARY = Library(*_CODECS)

#: The dtype of scales, and of all that is not quantized, by the name of a scheme.
DTYPES = {codec.name: codec.recipe.scale for codec in _CODECS}
