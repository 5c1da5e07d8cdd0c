"""Weights of int8 with scales: those of compressed-tensors, and bitsandbytes' ``load_in_8bit``.

Sources: ``dequantize`` in compressed_tensors/quantization/lifecycle/forward.py, version 0.20
(values less zero points, times the scale, in the scale's dtype: where that is the target, the one
rounding is the same); `int8_vectorwise_dequant` in bitsandbytes 0.50 (codes times ``SCB`` times
1/127 in float32, rounded twice there and then to the target: here ``SCB`` / 127 is rounded to
float32, so that float32 elements differ by 2 units in the last place at most, and 16-bit ones where
that is enough for the neighbour).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.decode import Read, ScaledLayout, Weight, by_blocks, floats, register
from streamload.codecs.decode_kernels import Bytes
from streamload.codecs.group import Group
from streamload.codecs.scheme import Array
from streamload.codecs.schemes.int8 import BITSANDBYTES_STEP
from streamload.errors import CheckpointError


@dataclass(frozen=True)
class _Values(Bytes):
    """Whole numbers of 8 bits, less zero points or not."""

    has_zeros: bool = False
    name = "int8"
    significant_bits = 8

    def instructions(self, v: Vector, codes: str) -> str:
        """See `Values.instructions`."""
        return v.convert("sitofp", "i8", codes, "float")

    def decoded(self, codes: Array, table: Array) -> Array:
        """See `Values.decoded`."""
        return codes.view(np.int8).astype(np.float32)


class _Compressed(ScaledLayout):
    def refused(self, group: Group) -> str:
        """See `Layout.refused`."""
        more = [role for role in ("scale_2", "global_scale", "g_idx") if role in group.members]
        return f"it has {more[0]} beside its scales" if more else ""

    def values(self, group: Group) -> _Values:
        """See `ScaledLayout.values`."""
        return _Values(has_zeros="zero_point" in group.members)

    def weight(self, group: Group, read: Read) -> Weight:
        """See `ScaledLayout.weight`."""
        scale, zero = group.members["scale"], group.members.get("zero_point")
        scales = floats(scale, read(scale))
        if zero is None:
            return by_blocks(group, self.values(group), scales)
        zeros = np.frombuffer(read(zero), zero.dtype.numpy)
        least, most = int(zeros.min(initial=0)), int(zeros.max(initial=0))
        if least < -128 or most > 127:
            problem = "a zero point is no number of 8 bits"
            found = f"{least} to {most}"
            raise CheckpointError(zero.shard, problem, "-128 to 127", found, tensor=zero.name)
        return by_blocks(group, self.values(group), scales, zeros.astype(np.float32))


class _Bitsandbytes(ScaledLayout):
    always = _Values()

    def weight(self, group: Group, read: Read) -> Weight:
        """See `ScaledLayout.weight`."""
        form = group.members.get("weight_format")
        if form is not None and any(found := read(form)):
            problem = "the rows of the weight do not follow each other"
            raise CheckpointError(form.shard, problem, [0], list(found), tensor=form.name)
        scb = group.members["SCB"]
        scales = floats(scb, read(scb)).astype(np.float64) * np.float64(BITSANDBYTES_STEP)
        members = {"weight": group.values, "scale": scb}
        group = replace(group, members=members)
        return by_blocks(group, _Values(), scales.astype(np.float32))


register("int8", _Compressed())
register("bnb-int8", _Bitsandbytes())
