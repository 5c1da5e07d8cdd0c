"""What a device holds beside parameters that it casts."""

from __future__ import annotations

import random

from streamload.streaming.device_casts import _Ring


def test_what_is_taken_never_overlaps() -> None:
    """Memory that was given back in any order is taken again, and none that is still held."""
    some = random.Random(0)
    ring = _Ring(1000)
    held: dict[int, tuple[int, int]] = {}
    waits = 0
    for index in range(5000):
        nbytes = some.randint(1, 320)
        while not ring.take(index, nbytes):
            waits += 1
            gone = some.choice(sorted(held)[:3])
            ring.give_back(gone)
            del held[gone]
        start = ring.taken[index]
        assert start >= 0 and start + nbytes <= 1000
        assert all(start >= stop or start + nbytes <= begin for begin, stop in held.values())
        held[index] = start, start + nbytes
    assert waits > 1000


def test_all_is_free_again() -> None:
    """When nothing is held, all of it can be taken at once."""
    ring = _Ring(64)
    assert ring.take(0, 40)
    assert ring.take(1, 24)
    assert not ring.take(2, 1)
    ring.give_back(1)  # what was taken first is held still
    assert not ring.take(2, 24)
    ring.give_back(0)
    assert ring.take(2, 64)
