"""Groups of processes: the interface of engines, their common base, and the group of one.

A group is a fixed set of processes, its ranks. Every rank calls the same collectives in the same
order, from one thread at a time; the key-value store serves any thread at any time. Engines:
``torch.py`` and ``mpi.py``.
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

_SHORT_NBYTES = 1016
_PART_NBYTES = 2**30  # of a broadcast at once: a count of MPI is an int


class Store(Protocol):
    """A key-value store for all ranks and threads.

    Every method raises PeerFailedError if the rank that keeps the store does not answer.
    """

    def set(self, key: str, value: bytes) -> None:
        """Write a value, replacing an earlier one."""

    def get(self, key: str) -> bytes | None:
        """A value, or None if there is none yet; does not wait."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of several keys, by position, as they were at one moment."""


@runtime_checkable
class ProcessGroup(Protocol):
    """The ranks that load together.

    A collective that fails, or takes longer than the group's timeout, raises PeerFailedError from
    the engine's own error; then the group failed and only ``close`` may be called.

    Attributes:
        rank: this process, from 0.
        size: how many ranks there are, at least 1.
        engine: "none", "torch" or "mpi", for messages.
        store: the key-value store.
    """

    rank: int
    size: int
    engine: str
    store: Store

    def allgather(self, data: bytes) -> list[bytes]:
        """Everyone's bytes, by rank; lengths may differ. For small messages."""

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """The root's bytes, of any length; ``data`` of the other ranks is ignored."""

    def all_gather_into(self, mine: memoryview, out: memoryview) -> None:
        """Everyone's block, by rank, into one buffer.

        Args:
            mine: contiguous bytes, of the same length on every rank; may be a part of ``out``.
            out: contiguous writable bytes; ``len(out) == size * len(mine)``.
        """
        self.all_gather_begin(mine, out)()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """Start `all_gather_into`; the returned function waits for its end.

        Several may run, and are waited for in their order, before any other collective.
        """

    def close(self, failed: bool = False) -> None:
        """Release the engine within seconds; closing twice does nothing.

        Args:
            failed: a rank is known to be lost: nothing waits for it, at exit either.
        """


@dataclass(frozen=True, slots=True)
class Launch:
    """The variables of a launcher, read."""

    launcher: str  # for messages
    engine_hint: str  # "torch" or "mpi"
    rank: int  # this process, from 0
    size: int | None  # None if only the engine knows
    local_rank: int | None  # on this host, if known
    local_size: int | None  # ranks on this host, if known
    host: str  # the name of this host
    meeting: str = ""  # the URL at which torch's ranks meet, if known
    attempt: str = "0"  # counts restarts by the launcher


class MemoryStore(Store):
    """A store of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        with self._lock:
            self._values[key] = bytes(value)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of several keys, as they were at one moment."""
        with self._lock:
            return [self._values.get(key) for key in keys]


class Engine(ProcessGroup):
    """The collectives of a `ProcessGroup` over the two of a library; the first failure is final.

    A subclass sets `engine`, `store`, and these.
    """

    _errors: tuple[type[Exception], ...]  # of the library
    _message: Callable[[Exception], str]
    _start: Callable[..., Callable[[], None]]  # as `_begin`, raising the library's errors

    def __init__(self, library: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._library = library  # None once the group is closed
        self._failed = False

    def allgather(self, data: bytes) -> list[bytes]:
        """Everyone's bytes, by one collective if all are short, else by two."""
        head = len(data).to_bytes(8, "little") + data[:_SHORT_NBYTES]
        found = self._blocks(head, 8 + _SHORT_NBYTES)
        lengths = [int.from_bytes(block[:8], "little") for block in found]
        longest = max(lengths)
        if longest > _SHORT_NBYTES:
            rest = self._blocks(data[_SHORT_NBYTES:], longest - _SHORT_NBYTES)
            found = [first + more for first, more in zip(found, rest, strict=True)]
        return [block[8 : 8 + length] for block, length in zip(found, lengths, strict=True)]

    def _blocks(self, data: bytes, nbytes: int) -> list[bytes]:
        """Everyone's bytes, each padded to ``nbytes``."""
        out = bytearray(self.size * nbytes)
        self.all_gather_into(memoryview(data.ljust(nbytes, b"\0")), memoryview(out))
        return [bytes(out[rank * nbytes : (rank + 1) * nbytes]) for rank in range(self.size)]

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """The root's bytes, after their length."""
        data = sent(data, root, self)
        length = memoryview(bytearray(len(data).to_bytes(8, "little")))
        self._broadcast(length, root)
        nbytes = int.from_bytes(length, "little")
        found = data if self.rank == root else bytearray(nbytes)
        for start in range(0, nbytes, _PART_NBYTES):
            self._broadcast(memoryview(found)[start : start + _PART_NBYTES], root)
        return bytes(found)

    def _broadcast(self, part: memoryview, root: int) -> None:
        """Send bytes, or receive them in place."""

    def _begin(self, name: str, *arguments: object) -> Callable[[], None]:
        """Start a call of the library; the returned function waits for its end."""
        if self._library is None:
            raise NodeError(f"rank {self.rank}", "the group is closed")
        if self._failed:
            raise lost("the group is of no use after a failure")
        with self._losses():
            end = self._start(name, *arguments)

        def wait() -> None:
            with self._losses():
                end()

        return wait

    @contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            self._failed = True
            raise lost(self._message(error)) from error


class Alone(Engine):
    """The group of one rank."""

    engine = "none"

    def __init__(self) -> None:
        super().__init__(None, 0, 1)
        self.store = MemoryStore()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """Copy the block."""
        check_blocks(mine, out, self.size)
        out.cast("B")[:] = mine.cast("B")
        return lambda: None

    def close(self, failed: bool = False) -> None:
        """Nothing to release."""


def sent(data: bytes | None, root: int, group: ProcessGroup) -> bytes:
    """Check the arguments of a broadcast; the bytes that this rank sends."""
    if not 0 <= root < group.size:
        raise ValueError(f"root {root} of a group of {group.size}")
    if group.rank != root:
        return b""
    if data is None:
        raise ValueError("the root of a broadcast has nothing to send")
    return data


def check_blocks(mine: memoryview, out: memoryview, size: int) -> None:
    """Refuse blocks that are not contiguous, not writable or of wrong lengths, before waiting."""
    if not (mine.c_contiguous and out.c_contiguous) or out.readonly:
        raise ValueError("blocks are contiguous bytes, and the output is writable")
    if out.nbytes != size * mine.nbytes:
        raise ValueError(f"{size} blocks of {mine.nbytes} bytes do not make {out.nbytes}")


def poll(
    is_done: Callable[[], bool], share: float, naps_s: tuple[float, float], most_s: float = math.inf
) -> None:
    """Test and sleep in a loop, for a share of the time waited, within the limits ``naps_s``."""
    began = time.monotonic()
    while not is_done():
        waited = time.monotonic() - began
        if waited > most_s:
            raise TimeoutError(f"a rank did not come within {most_s:g} s")
        time.sleep(min(max(waited * share, naps_s[0]), naps_s[1]))


def lost(problem: str, rank: int | None = None) -> PeerFailedError:
    """The error of a lost peer; an engine may not know its rank."""
    return PeerFailedError("unknown" if rank is None else f"rank {rank}", problem)
