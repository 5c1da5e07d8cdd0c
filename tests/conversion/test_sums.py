"""The sums of files that are written in parts (`streamload.conversion.disk`)."""

from __future__ import annotations

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamload.conversion.disk import FileSum

NBYTES = 1_000_000
#: What is in the file before, or zeros: its end, too.
LEFT = ((100_000, 160_000), (300_001, 300_002), (999_000, NBYTES))


class Written:
    """A file whose parts come one by one, and what is read back of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.data = bytearray(self.chance.randbytes(NBYTES))
        self.data[LEFT[-1][0] :] = bytes(NBYTES - LEFT[-1][0])
        self.file = bytearray(NBYTES)
        coming, at = [], 0
        for start, stop in LEFT:
            coming.append((at, start))
            self.file[start:stop] = self.data[start:stop]
            at = stop
        self.sum = FileSum(NBYTES, coming)
        self.parts = [
            (first, min(first + 7001, stop))
            for start, stop in coming
            for first in range(start, stop, 7001)
        ]
        self.read_nbytes = 0
        self._lock = threading.Lock()

    def add(self, part: tuple[int, int]) -> None:
        start, stop = part
        self.file[start:stop] = self.data[start:stop]
        self.sum.add(start, memoryview(self.data)[start:stop], self.read)

    def read(self, start: int, out: memoryview) -> None:
        out[:] = self.file[start : start + out.nbytes]
        with self._lock:
            self.read_nbytes += out.nbytes

    def check(self) -> None:
        """The sum is that of the whole file."""
        expected = hashlib.md5(self.data, usedforsecurity=False).hexdigest()
        assert self.sum.has(NBYTES) and self.sum.hexdigest() == expected


def test_parts_in_their_order_are_not_read_back() -> None:
    written = Written(0)
    for part in written.parts:
        written.add(part)
    written.check()
    assert written.read_nbytes == sum(stop - start for start, stop in LEFT)


@pytest.mark.parametrize("seed", range(5))
def test_parts_in_any_order(seed: int) -> None:
    for threads in (1, 4):
        written = Written(seed)
        written.chance.shuffle(written.parts)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(written.add, written.parts))
        written.check()
