"""A group whose ranks are threads of this process: real collectives and a store, in milliseconds.

Ranks can be lost: what a lost rank calls does not return until the world is closed. Either its
peers hear of it at once, as they do of a killed process, or they wait until their timeout, as they
do for a host that has gone silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamload.distributed.group import MemoryStore, check_blocks, lost, sent
from streamload.errors import PeerFailedError

#: Told the rank and the operation, before it is done: "set", "get", "allgather", ....
Watch = Callable[[int, str], None]
END_S = 30.0


def _unwatched(rank: int, operation: str) -> None:
    """Nobody looks."""


@dataclass(eq=False)
class World:
    size: int  # how many ranks there are
    timeout_s: float = 10.0  # of a collective
    watch: Watch = _unwatched  # told of every call
    groups: list[ThreadGroup] = field(default_factory=list)  # one for each rank
    closed: set[int] = field(default_factory=set)  # ranks whose group was closed

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.changed = threading.Condition()
        self.said: dict[int, dict[int, bytes]] = {}  # by collective, by rank
        self.taken: dict[int, int] = {}
        self.lost: set[int] = set()
        self.broken = False
        self.gone = threading.Event()  # the store
        self.over = threading.Event()
        self.next: dict[tuple[int, ...], World] = {}  # worlds of those that go on, by rank here
        self.groups = [ThreadGroup(self, rank) for rank in range(self.size)]

    def kill(self, rank: int, *, silent: bool = False) -> None:
        """Lose a rank; where it is not silent, collectives of the others fail at once."""
        with self.changed:
            self.lost.add(rank)
            self.broken |= not silent
            self.changed.notify_all()
        for members, world in list(self.next.items()):
            if rank in members:
                world.kill(members.index(rank), silent=silent)

    def stop_store(self) -> None:
        self.gone.set()

    def close(self) -> None:
        for world in self.next.values():
            world.close()
        self.over.set()
        with self.changed:
            self.changed.notify_all()

    def enter(self, rank: int, operation: str) -> None:
        """A call begins: those of the lost end here."""
        self.watch(rank, operation)
        stuck = operation in ("set", "get") and self.gone.is_set() and rank != 0
        if rank in self.lost or stuck:
            self.over.wait(END_S)
            raise lost("was lost", rank)

    def together(self, rank: int, number: int, data: bytes) -> list[bytes]:
        until = time.monotonic() + self.timeout_s
        with self.changed:
            self.said.setdefault(number, {})[rank] = data
            self.changed.notify_all()
            while len(self.said[number]) < self.size:
                left_s = until - time.monotonic()
                if self.broken or left_s <= 0 or self.over.is_set():
                    raise lost("a collective failed")
                self.changed.wait(left_s)
            out = [self.said[number][other] for other in range(self.size)]
            self.taken[number] = self.taken.get(number, 0) + 1
            if self.taken[number] == self.size:
                del self.said[number], self.taken[number]
        return out


class ThreadGroup:
    """One rank; see `streamload.distributed.group.Group`."""

    engine = "threads"

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.size = world.size
        self.store = self
        self.meeting = ThreadMeeting(world, rank, world.size)
        self._number = 0
        self._failed = False
        self._inside = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self.world.enter(self.rank, "set")
        self.world.store.set(key, value)

    def get(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.world.enter(self.rank, "get")
        return self.world.store.get_many(keys)

    def _together(self, operation: str, data: bytes) -> list[bytes]:
        assert self._inside.acquire(blocking=False), "two threads in collectives"
        try:
            if self._failed:
                raise lost("the group failed and cannot be used again")
            self.world.enter(self.rank, operation)
            self._number += 1
            return self.world.together(self.rank, self._number, operation.encode() + b" " + data)
        except PeerFailedError:
            self._failed = True
            raise
        finally:
            self._inside.release()

    def _collective(self, operation: str, data: bytes) -> list[bytes]:
        found = [said.partition(b" ") for said in self._together(operation, data)]
        assert {said[0] for said in found} == {operation.encode()}, "other collectives elsewhere"
        return [said[2] for said in found]

    def allgather(self, data: bytes) -> list[bytes]:
        return self._collective("allgather", data)

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        return self._collective("broadcast", sent(data, root, self))[root]

    def all_gather_into(self, mine: memoryview, out: memoryview) -> None:
        check_blocks(mine, out, self.size)
        blocks = self._collective("all_gather_into", bytes(mine))
        assert len({len(block) for block in blocks}) == 1, "blocks of different lengths"
        out[:] = b"".join(blocks)

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        return lambda: self.all_gather_into(mine, out)

    def close(self, failed: bool = False) -> None:
        self.world.closed.add(self.rank)


@dataclass(frozen=True)
class ThreadMeeting:
    world: World
    rank: int
    size: int

    def first(self, key: str, value: str) -> str:
        self.world.enter(self.rank, "first")
        with self.world.changed:
            found = self.world.store.get(f"meeting/{key}")
            if found is None:
                found = value.encode()
                self.world.store.set(f"meeting/{key}", found)
        return found.decode()

    def find(self, keys: Sequence[str]) -> list[str | None]:
        self.world.enter(self.rank, "find")
        found = self.world.store.get_many([f"meeting/{key}" for key in keys])
        return [None if value is None else value.decode() for value in found]

    def among(self, members: Sequence[int]) -> ThreadMeeting:
        key = tuple(members)

        def watch(rank: int, operation: str) -> None:
            self.world.watch(key[rank], operation)

        with self.world.changed:
            world = self.world.next.setdefault(key, World(len(key), self.world.timeout_s, watch))
        for rank in self.world.lost.intersection(key):
            world.kill(key.index(rank))
        return ThreadMeeting(world, members.index(self.rank), len(members))

    def open(self, timeout: float) -> ThreadGroup:
        return self.world.groups[self.rank]


def run(world: World, body: Callable[[ThreadGroup], Any], *, main: int | None = None) -> list[Any]:
    """Run a function as every rank, ``main`` in this thread; results and errors, None of the lost.

    No thread that they started is left.
    """
    before = set(threading.enumerate())
    found: list[Any] = [None] * world.size

    def one(group: ThreadGroup) -> None:
        try:
            said = body(group)
        except BaseException as error:
            said = error
        if group.rank not in world.lost:
            found[group.rank] = said

    threads = {
        group.rank: threading.Thread(target=one, args=(group,), name=f"rank-{group.rank}")
        for group in world.groups
        if group.rank != main
    }
    with ending(world):
        for thread in threads.values():
            thread.start()
        if main is not None:
            one(world.groups[main])
        until = time.monotonic() + END_S
        for rank, thread in threads.items():
            while thread.is_alive() and rank not in world.lost:
                assert time.monotonic() < until, f"rank {rank} does not end"
                thread.join(0.02)
    for thread in threads.values():
        thread.join(END_S)
    until = time.monotonic() + END_S
    while left := {t.name for t in threading.enumerate() if t not in before}:
        assert time.monotonic() < until, f"threads are left: {left}"
        time.sleep(0.005)
    return found


@contextmanager
def ending(world: World) -> Iterator[World]:
    try:
        yield world
    finally:
        world.close()
