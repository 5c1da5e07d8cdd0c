"""Helpers that `test_nodes_group` shares with other tests."""

from __future__ import annotations

import queue

from streamload.distributed.group import Alone


class Rank(Alone):
    """One of two ranks in one process, whose broadcasts go through a queue."""

    def __init__(self, rank: int, wire: queue.SimpleQueue[bytes]) -> None:
        super().__init__()
        self.rank, self.size, self._wire = rank, 2, wire

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        if data is not None:
            self._wire.put(data)
            return data
        return self._wire.get(timeout=10)
