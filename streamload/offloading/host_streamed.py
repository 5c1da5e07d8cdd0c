"""Arrays of numpy in slots, for loops of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamload.offloading.residency import SlotPlaces

_Array = np.ndarray[Any, Any]


class HostSlots:
    """Slots of host memory side by side."""

    def __init__(self, memory: _Array, places: SlotPlaces) -> None:
        """Take the bytes of all slots."""
        self._memory, self._places = memory, places

    def to_fill(self, layer: int, slot: int) -> Sequence[_Array]:
        """The same."""
        return self.buffers(layer, slot)

    def buffers(self, layer: int, slot: int) -> Sequence[_Array]:
        """Arrays over the slot's memory."""
        return [
            self._memory[start:stop].view(dtype.numpy).reshape(shape)
            for start, stop, dtype, shape in self._places.of(layer, slot)
        ]

    def close(self) -> None:
        """Let go of the memory; it goes with the last array over it."""
        del self._memory

    def lend(self, buffers: Sequence[_Array]) -> Sequence[_Array]:
        """What a loop gets of the buffers of a slot, until `take_back`."""
        return buffers

    def take_back(self) -> None:
        """The loop has gone on."""
