"""FP8 with scales: one for all, for each row, or for each block such as 128 x 128.

Source: ``Fp8Dequantize`` in transformers/integrations/finegrained_fp8.py (``weight_scale_inv``, by
which values are multiplied, too), and compressed-tensors' float-quantized format. They multiply in
float32 and then round to the target: where the float32 product is a midpoint of that, or a number
of it that the exact product is not, theirs may be the neighbour of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamload.codecs.cast import WIDEN, Vector
from streamload.codecs.decode import Read, ScaledLayout, Weight, by_blocks, floats, register
from streamload.codecs.decode_kernels import Bytes
from streamload.codecs.floats import FORMATS
from streamload.codecs.group import Group
from streamload.codecs.scheme import Array
from streamload.core.dtypes import BY_CODE


@dataclass(frozen=True)
class _Values(Bytes):
    """Floats of 8 bits.

    Attributes:
        code: of their dtype.
    """

    code: str
    name = "fp8"

    @property
    def significant_bits(self) -> int:
        """See `Values.significant_bits`."""
        return FORMATS[self.code].mantissa_bits + 1

    def instructions(self, v: Vector, codes: str) -> str:
        """See `Values.instructions`."""
        return v.convert("bitcast", "i32", WIDEN[self.code](v, codes), "float")

    def decoded(self, codes: Array, table: Array) -> Array:
        """See `Values.decoded`."""
        every = np.arange(256, dtype=np.uint8).view(BY_CODE[self.code].numpy).astype(np.float32)
        found: Array = every[codes]
        return found


class _Layout(ScaledLayout):
    def refused(self, group: Group) -> str:
        """See `Layout.refused`."""
        if group.values.dtype.code not in FORMATS:
            return f"{group.values.dtype.name} is only passed unchanged"
        more = [role for role in ("scale_2", "global_scale", "zero_point") if role in group.members]
        return f"it has {more[0]} beside its scales" if more else ""

    def values(self, group: Group) -> _Values:
        """See `ScaledLayout.values`."""
        return _Values(group.values.dtype.code)

    def weight(self, group: Group, read: Read) -> Weight:
        """See `ScaledLayout.weight`."""
        scale = group.members["scale"]
        return by_blocks(group, self.values(group), floats(scale, read(scale)))


register("fp8", _Layout())
