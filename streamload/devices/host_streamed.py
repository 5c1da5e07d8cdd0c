"""Arrays of numpy in slots, for loops of a user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamload.dtypes import DType
from streamload.units import round_up

_Array = np.ndarray[Any, Any]


class HostSlots:
    """Slots of host memory side by side."""

    def __init__(
        self,
        memory: _Array,
        starts: Sequence[int],
        layers: Sequence[Sequence[tuple[DType, tuple[int, ...]]]],
        alignment_nbytes: int,
    ) -> None:
        """Take memory.

        Args:
            memory: bytes of all slots.
            starts: the first byte of each slot.
            layers: dtypes and shapes of the placements of each.
            alignment_nbytes: arrays in a slot begin at multiples of this.
        """
        self._memory, self._starts = memory, starts
        self._layers, self._alignment_nbytes = layers, alignment_nbytes

    def buffers(self, layer: int, slot: int) -> Sequence[_Array]:
        """Arrays over the slot's memory."""
        at, found = self._starts[slot], []
        for dtype, shape in self._layers[layer]:
            nbytes = dtype.nbytes(math.prod(shape))
            found.append(self._memory[at : at + nbytes].view(dtype.numpy).reshape(shape))
            at += round_up(nbytes, self._alignment_nbytes)
        return found

    def close(self) -> None:
        """Let go of the memory; it goes with the last array over it."""
        del self._memory

    def lend(self, buffers: Sequence[_Array]) -> Sequence[_Array]:
        """What a loop gets of the buffers of a slot, until `take_back`."""
        return buffers

    def take_back(self) -> None:
        """The loop has gone on."""
