"""Groups of processes: the interface, a base class of engines, and the group of one process.

A group is a fixed set of processes, its ranks. Every rank calls the same collectives in the same
order, from one thread at a time; any thread may use the key-value store at any time. An engine is a
group over a communication library: ``torch.py``, ``mpi.py``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from streamload.errors import NodeError, PeerFailedError

_SHORT_NBYTES = 1016  # longest message of an `Engine.allgather` that is one collective
_PART_NBYTES = 2**30  # of a broadcast, sent at once: MPI counts by a C int


class Store(Protocol):
    """A key-value store shared by all ranks of a group, for any thread.

    Every method raises PeerFailedError if the rank that keeps the store does not answer.
    """

    def set(self, key: str, value: bytes) -> None:
        """Write a value, replacing an earlier one."""

    def get(self, key: str) -> bytes | None:
        """Return the value of a key at once, or None if there is none yet."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of several keys in their order, None for missing ones, atomically."""


@runtime_checkable
class ProcessGroup(Protocol):
    """A group of processes (ranks) that load together, with the collectives that a load uses.

    A collective that fails, or takes longer than the group's timeout, raises PeerFailedError from
    the engine's own error; then the group failed and only ``close`` may be called.

    Attributes:
        engine: the communication library, for messages: "none", "torch" or "mpi".
        store: the key-value store of all ranks.
    """

    rank: int
    size: int
    engine: str
    store: Store

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the small messages of all ranks, by rank; their lengths may differ."""

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Return ``data`` of rank ``root``, of any length; ``data`` of other ranks is ignored."""

    def all_gather_into(self, mine: memoryview, out: memoryview) -> None:
        """Write the blocks of all ranks into one buffer, ordered by rank.

        ``mine`` has the same length on every rank, and may be a part of ``out``; both are
        contiguous.
        """
        self.all_gather_begin(mine, out)()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """Start `all_gather_into`; return a function that waits for its end.

        Several may run at once. Wait for them in their order, and before any other collective.
        """

    def close(self, failed: bool = False) -> None:
        """Release the engine within seconds; closing twice does nothing.

        Args:
            failed: a rank is known to be lost: do not wait for it, neither now nor at exit.
        """


class Meeting(Protocol):
    """A store that outlives a group, in which the ranks that are left form another.

    Every method raises PeerFailedError if the store has ended; it may wait without end if the
    store's host is silent.
    """

    @property
    def rank(self) -> int:
        """Number of this process in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def first(self, key: str, value: str) -> str:
        """Write a value unless the key has one; return the one that it has then."""

    def find(self, keys: Sequence[str]) -> list[str | None]:
        """Return the values of keys in their order, None for missing ones."""

    def among(self, members: Sequence[int]) -> Meeting:
        """Return the meeting of some of the ranks, in this order; this one is one of them."""

    def open(self, timeout: float) -> ProcessGroup:
        """Return the group once all ranks of this meeting have come, or raise PeerFailedError.

        ``timeout``: seconds for the ranks to come, and for each collective.
        """


#: Called with the meeting of a group, before it opens, so that its ranks can regroup.
Met = Callable[[Meeting], None]


def unmet(meeting: Meeting) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The environment of a process that a launcher (torchrun, mpirun, srun) started, parsed."""

    launcher: str  # name of the launcher, for messages
    engine_hint: str  # the engine that fits: "torch" or "mpi"
    rank: int  # number of this process, from 0
    size: int | None  # number of processes; None if only the engine knows
    local_rank: int | None  # number of this process on its host; None if unknown
    local_size: int | None  # number of processes on this host; None if unknown
    host: str  # name of this host
    meeting: str = ""  # URL of the store at which torch's ranks meet; "" if unknown
    attempt: str = "0"  # number of restarts by the launcher


class MemoryStore(Store):
    """A key-value store in this process's memory."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with self._lock:
            self._values[key] = bytes(value)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`."""
        with self._lock:
            return [self._values.get(key) for key in keys]


class Engine(ProcessGroup):
    """Base class of groups over a library that has a broadcast and an all-gather.

    After a failure, all collectives raise PeerFailedError. A subclass sets `engine` and `store`.
    `meeting`: where the ranks regroup after a loss; None if they cannot.
    """

    meeting: Meeting | None = None

    _errors: tuple[type[Exception], ...]  # exceptions of the library
    _message: Callable[[Exception], str]  # the message of one of these
    _start: Callable[..., Callable[[], None]]  # as `_begin`, raising the library's errors

    def __init__(self, library: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._library = library  # None once the group is closed
        self._failed = False

    def allgather(self, data: bytes) -> list[bytes]:
        """See `ProcessGroup.allgather`: one collective if all messages are short, else two."""
        head = len(data).to_bytes(8, "little") + data[:_SHORT_NBYTES]
        found = self._blocks(head, 8 + _SHORT_NBYTES)
        lengths = [int.from_bytes(block[:8], "little") for block in found]
        longest = max(lengths)
        if longest > _SHORT_NBYTES:
            rest = self._blocks(data[_SHORT_NBYTES:], longest - _SHORT_NBYTES)
            found = [first + more for first, more in zip(found, rest, strict=True)]
        return [block[8 : 8 + length] for block, length in zip(found, lengths, strict=True)]

    def _blocks(self, data: bytes, nbytes: int) -> list[bytes]:
        """All-gather ``data``, padded to ``nbytes``; return the blocks of all ranks, by rank."""
        out = bytearray(self.size * nbytes)
        self.all_gather_into(memoryview(data.ljust(nbytes, b"\0")), memoryview(out))
        return [bytes(out[rank * nbytes : (rank + 1) * nbytes]) for rank in range(self.size)]

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """See `ProcessGroup.broadcast`: the length goes first, then the bytes."""
        data = sent(data, root, self)
        length = memoryview(bytearray(len(data).to_bytes(8, "little")))
        self._broadcast(length, root)
        nbytes = int.from_bytes(length, "little")
        found = data if self.rank == root else bytearray(nbytes)
        for start in range(0, nbytes, _PART_NBYTES):
            self._broadcast(memoryview(found)[start : start + _PART_NBYTES], root)
        return bytes(found)

    def _broadcast(self, part: memoryview, root: int) -> None:
        """Send ``part`` to all ranks if this one is the root, else fill it with the root's."""

    def _begin(self, name: str, *arguments: object) -> Callable[[], None]:
        """Start the library's collective ``name``; return a function that waits for its end."""
        if self._library is None:
            raise NodeError(f"rank {self.rank}", "the group is closed")
        if self._failed:
            raise lost("the group failed and cannot be used again")
        with self._losses():
            end = self._start(name, *arguments)

        def wait() -> None:
            with self._losses():
                end()

        return wait

    def rest(self) -> None:
        """Release what only collectives need; the store stays."""

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Raise PeerFailedError for the library's errors in the with, and mark the group failed."""
        try:
            yield
        except self._errors as error:
            self._failed = True
            raise lost(self._message(error)) from error


class Alone(Engine):
    """The group of a single process, for a program without a launcher."""

    engine = "none"

    def __init__(self) -> None:
        super().__init__(None, 0, 1)
        self.store = MemoryStore()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """Copy ``mine`` to ``out``; return a function that does nothing."""
        check_blocks(mine, out, self.size)
        out.cast("B")[:] = mine.cast("B")
        return lambda: None

    def close(self, failed: bool = False) -> None:
        """Do nothing: there is no engine."""


def sent(data: bytes | None, root: int, group: ProcessGroup) -> bytes:
    """Check the arguments of a broadcast; return the bytes to send: b"" unless this is the root."""
    if not 0 <= root < group.size:
        raise ValueError(f"root {root} of a group of {group.size}")
    if group.rank != root:
        return b""
    if data is None:
        raise ValueError("the root of a broadcast has nothing to send")
    return data


def check_blocks(mine: memoryview, out: memoryview, size: int) -> None:
    """Raise ValueError if ``size`` ranks cannot all-gather ``mine`` into ``out``."""
    if not (mine.c_contiguous and out.c_contiguous) or out.readonly:
        raise ValueError("blocks are contiguous bytes, and the output is writable")
    if out.nbytes != size * mine.nbytes:
        raise ValueError(f"{size} blocks of {mine.nbytes} bytes do not make {out.nbytes}")


def poll(
    is_done: Callable[[], bool], share: float, naps_s: tuple[float, float], most_s: float = math.inf
) -> None:
    """Call ``is_done`` until it returns True, sleeping between calls.

    A sleep is ``share`` of the time waited so far, within ``naps_s``; TimeoutError after
    ``most_s``.
    """
    began = time.monotonic()
    while not is_done():
        waited = time.monotonic() - began
        if waited > most_s:
            raise TimeoutError(f"a rank did not come within {most_s:g} s")
        time.sleep(min(max(waited * share, naps_s[0]), naps_s[1]))


def lost(problem: str, rank: int | None = None) -> PeerFailedError:
    """Return the error for a lost rank; None: unknown, as engines often do not report the rank."""
    return PeerFailedError("unknown" if rank is None else f"rank {rank}", problem, rank)
