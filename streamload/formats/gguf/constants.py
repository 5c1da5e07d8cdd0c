"""GGUF's numbers: types of tensors and of metadata, magic, alignment.

Source: docs/gguf.md in github.com/ggml-org/ggml; the enums `GGMLQuantizationType`, `LlamaFileType`
and `GGUFValueType` and the table `GGML_QUANT_SIZES` in gguf/constants.py of gguf-py, version 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Where ``general.alignment`` does not say otherwise, tensors begin at multiples of this.
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors.

    Attributes:
        number: as files have it.
        name: as GGUF's programs show it ("Q4_K").
        numel: elements of a block along the last axis; 1 where elements stand alone.
        nbytes: bytes of a block.
        code: the safetensors code of elements that stand alone; "" for blocks.
    """

    number: int
    name: str
    numel: int
    nbytes: int
    code: str = ""

    @property
    def kind(self) -> str:
        """Of blocks, their key in `streamload.core.dtypes.PACKED`, where that has them."""
        return "gguf-mxfp4" if self.name == "MXFP4" else self.name.lower()


_ELEMENTS = (
    (0, "F32", 4),
    (1, "F16", 2),
    (24, "I8", 1),
    (25, "I16", 2),
    (26, "I32", 4),
    (27, "I64", 8),
    (28, "F64", 8),
    (30, "BF16", 2),
)
_BLOCKS = (
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

#: By number, the types of tensors.
TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {number: TensorType(number, name, 1, nbytes, name) for number, name, nbytes in _ELEMENTS}
    | {number: TensorType(number, *rest) for number, *rest in _BLOCKS}  # type: ignore[arg-type]
)
#: By name, the same.
TENSOR_TYPE_OF: Mapping[str, TensorType] = MappingProxyType(
    {kind.name: kind for kind in TENSOR_TYPES.values()}
)
#: By `TensorType.kind`, the types of blocks.
BLOCKS_OF: Mapping[str, TensorType] = MappingProxyType(
    {kind.kind: kind for kind in TENSOR_TYPES.values() if not kind.code}
)
#: By the name of the type that most of a file's bytes have, ``general.file_type``; of types that
#: llama.cpp mixes with others, the number of its medium mix.
FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {
        **{"F32": 0, "F16": 1, "BF16": 32},
        **{"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "MXFP4": 38},
        **{"Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30},
    }
)

#: By number, the types of metadata that are single numbers, as `struct` has them.
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
