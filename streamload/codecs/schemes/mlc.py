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

from streamload.codecs.encode import (
    Encoded,
    Encoder,
    Quantized,
    Units,
    as_bytes,
    checked_numel,
)
from streamload.codecs.encode_kernels import Packing, Recipe, Scalars
from streamload.codecs.ir import NARROW, WIDEN, Vector, minimum
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import Array, Part, QuantCounts, check_source
from streamload.codecs.scheme import Library, Scheme
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


def _recipe(bits: int, scale: DType) -> _Recipe:
    """Return the recipe of a number of bits of a code, and of a dtype of scales."""
    packing: Packing = "tens" if bits == 3 else "low pairs"
    return _Recipe(bits, 2 ** (bits - 1) - 1, 32 // bits * _WORDS, scale, packing)


@dataclass(frozen=True)
class _Groups(Units):
    """A tensor encoded as consecutive whole groups, each a scale followed by words of codes."""

    group: _Recipe

    @property
    def recipe(self) -> _Recipe:
        return self.group

    @property
    def unit_numel(self) -> int:
        return self.recipe.numel

    @property
    def unit_nbytes(self) -> int:
        return self.recipe.group.itemsize

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", BY_CODE["U8"], (self.units, self.unit_nbytes)),)

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
        overflowed = self.unit_numel * int(np.count_nonzero(np.isinf(kept)))
        return Encoded(both, decoded, overflowed=overflowed)


@dataclass(frozen=True)
class _Weight(Quantized):
    """A tensor ``layer.q_weight`` quantized to separate arrays of words and scales.

    Its shape ends in the row's length, or is (groups of a row, rows, 32) if stored transposed.
    `is_transposed`: whether words and scales are stored transposed.
    """

    recipe: _Recipe
    is_transposed: bool

    @property
    def group_numel(self) -> int:
        return self.recipe.numel

    @property
    def row_groups(self) -> int:
        return -(-self.shape[-1] // self.group_numel)

    @property
    def group_count(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_groups

    @property
    def has_short_groups(self) -> bool:
        return self.shape[-1] % self.group_numel != 0

    @property
    def groups(self) -> _Groups:
        """The tensor with rows padded to whole groups, for the kernel."""
        shape = self.group_count, self.group_numel
        return _Groups(self.format, shape, self.dtype, self.recipe)

    @property
    def unit_numel(self) -> int:
        """Elements of a group; of a row if its last group is short, of all rows if transposed."""
        if self.is_transposed:
            return math.prod(self.shape[1:])
        return self.shape[-1] if self.has_short_groups else self.group_numel

    @property
    def unit_groups(self) -> int:
        return -(-self.unit_numel // self.group_numel)

    @property
    def unit_nbytes(self) -> int:
        return 4 * _WORDS * self.unit_groups

    @property
    def parts(self) -> tuple[Part, ...]:
        *rows, groups = *self.shape[:-1], self.row_groups
        scales = tuple(rows) if self.is_transposed else (*rows, groups)
        words = (_WORDS * rows[0], *rows[1:]) if self.is_transposed else (*rows, _WORDS * groups)
        sibling = Part(SCALES, self.recipe.scale, scales, is_sibling=True)
        return Part("", BY_CODE["U32"], words), sibling

    def encoder(self, src: DType, engine: Engine = "auto") -> _Encoder:
        return _Encoder(self, src, engine)


class _Encoder(Encoder):
    """Quantizes a tensor by groups, whose words of codes and scales go to separate arrays."""

    def __init__(self, tensor: _Weight, src: DType, engine: Engine) -> None:
        self._tensor, self._src = tensor, src
        self._groups = tensor.groups.encoder(src, engine)
        self._group = tensor.recipe.group
        self._scales = np.zeros(tensor.group_count, self._group["scale"])

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor, unit = self._tensor, self._tensor.unit_numel
        numel = checked_numel(tensor, self._src, data, out, first)
        at = first // unit * tensor.unit_groups
        found = np.empty(numel // unit * tensor.unit_groups, self._group)
        whole = self._filled(data) if tensor.has_short_groups else data
        made = as_bytes(found)
        counts = self._groups.encode(whole, made, at * tensor.group_numel)
        self._scales[at : at + len(found)] = found["scale"]
        if tensor.has_short_groups:
            counts = self._emptied(found, counts, numel)
        words = np.frombuffer(out, "<u4")
        if tensor.is_transposed:
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
        tensor = self._tensor
        rows = np.frombuffer(data, f"V{self._src.itemsize}").reshape(-1, tensor.shape[-1])
        filled = np.zeros((len(rows), tensor.row_groups * tensor.group_numel), rows.dtype)
        filled[:, : tensor.shape[-1]] = rows
        return as_bytes(filled)

    def _emptied(self, found: Array, counts: QuantCounts, numel: int) -> QuantCounts:
        """Clear in ``found`` the codes of zeros from `_filled`; return ``counts`` without them."""
        tensor = self._tensor
        last = found.reshape(-1, tensor.row_groups)[:, -1]
        bits = tensor.recipe.bits
        per_word = 32 // bits
        left = tensor.shape[-1] % tensor.group_numel
        codes = np.clip(left - per_word * np.arange(_WORDS), 0, per_word)
        kept = (1 << bits * codes.astype(np.int64)) - 1
        last["words"] &= kept.astype("<u4")
        infinite = last["scale"] == _INFINITE if counts.overflowed else 0
        filled = (tensor.group_numel - left) * int(np.count_nonzero(infinite))
        return replace(counts, numel=numel, overflowed=counts.overflowed - filled)


@dataclass(frozen=True)
class _Scheme(Scheme):
    """A group quantization of MLC-LLM, such as "q4f16_1"; transformers cannot read it."""

    name: str
    bits: int
    scale: DType
    is_transposed: bool = False

    def of(self, shape: tuple[int, ...], src: DType) -> _Weight:
        check_source(self.name, shape, src)
        recipe = _recipe(self.bits, self.scale)
        group = recipe.numel
        if not shape or (self.is_transposed and (len(shape) != 3 or shape[-1] != group)):
            of = f"(groups, rows, {group})" if self.is_transposed else "rows"
            raise ValueError(f"{self.name} is made from a tensor of {of}, not of shape {shape}")
        return _Weight(self.name, shape, src, recipe, self.is_transposed)


_SCHEMES = (
    _Scheme("q4f16_1", 4, F16),
    _Scheme("q4f16_0", 4, F16, is_transposed=True),
    _Scheme("q3f16_1", 3, F16),
    _Scheme("q4f32_1", 4, F32),
    _Scheme("q4bf16_1", 4, BF16),
)
LIBRARY = Library(*_SCHEMES)

#: The dtype of scales, and of all that is not quantized, by the name of a scheme.
DTYPES = {scheme.name: scheme.scale for scheme in _SCHEMES}
