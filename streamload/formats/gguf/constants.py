"""GGUF's constants: types of tensors and of metadata, magic, alignment.

Source: docs/gguf.md in github.com/ggml-org/ggml; the enums `GGMLQuantizationType`, `LlamaFileType`
and `GGUFValueType` in gguf/constants.py of gguf-py, version 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from streamload.core.dtypes import BY_CODE, PACKED, DType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Tensors begin at multiples of this, or of ``general.alignment``.
ALIGNMENT = 32


#: By number, the names of the types of tensors.
TYPE_NAMES: Mapping[int, str] = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


class TensorType(NamedTuple):
    """A GGUF tensor type that is read and written; of blocks if ``dtype`` is a packed one."""

    number: int
    name: str
    dtype: DType


def _dtype(name: str) -> DType | None:
    """Return the dtype of a GGUF type's name; None for a type that is not read."""
    return BY_CODE.get(name) or PACKED.get({"MXFP4": "gguf-mxfp4"}.get(name, name.lower()))


_known = [TensorType(n, name, dtype) for n, name in TYPE_NAMES.items() if (dtype := _dtype(name))]
#: By number, the types that are read and written: those of elements, then those of blocks.
TENSOR_TYPES: Mapping[int, TensorType] = {
    each.number: each for each in sorted(_known, key=lambda each: each.dtype.is_packed)
}
#: By name, the same.
TENSOR_TYPE_OF: Mapping[str, TensorType] = {each.name: each for each in TENSOR_TYPES.values()}
#: By the name of their dtype, the types of blocks.
BLOCKS_OF: Mapping[str, TensorType] = {
    each.dtype.name: each for each in TENSOR_TYPES.values() if each.dtype.is_packed
}
#: ``general.file_type`` by the name of the type that most of a file's bytes have; for types that
#: llama.cpp mixes with others, the number of its medium mix.
FILE_TYPES: Mapping[str, int] = {
    **{"F32": 0, "F16": 1, "BF16": 32},
    **{"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "MXFP4": 38},
    **{"Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30},
}

#: By number, the types of metadata that are single numbers, as `struct` has them.
SCALARS: Mapping[int, str] = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
    **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
