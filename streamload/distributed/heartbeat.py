"""Heartbeats: each rank notices within the timeout if another one is lost (dead or hanging).

A thread of every rank writes a beat (a counter and the rank's state) into the group's store twice a
second. Rank 0 reads all beats and writes the first loss; the others read that, and rank 0's beat. A
second thread watches the first: if the store's host is lost, a request may never return. Only the
first thread uses the store, so that a rank's messages stay in order.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from streamload.core.bounded_json import parse_json
from streamload.distributed.group import ProcessGroup
from streamload.errors import PeerFailedError

T = TypeVar("T")

#: Seconds between beats; fewer if the timeout is a few seconds.
EVERY_S = 0.5

_BEATS = 20  # least number of beats within the timeout
_QUICK_S = 2.5e-4  # seconds between polls while a rank waits for others, times the ranks
#: The fields of a `Peer` in a beat.
_WRITTEN = ("beat", "node", "stage", "all_at", "left", "done_nbytes", "total_nbytes")


@dataclass(slots=True)
class Peer:
    """The state of a rank, as known to this process."""

    node: str  # name of the rank's node, or "rank 3" until known
    beat: int = -1  # number of the rank's last beat
    silent_s: float = 0.0  # seconds since that beat in which this process polled
    done_nbytes: int = 0  # file bytes that the rank has loaded
    total_nbytes: int = 0  # file bytes that the rank has to load
    stage: int = 0  # how often the rank called `Heartbeat.arrive`
    all_at: int = 0  # of rank 0: the last stage at which all ranks have arrived
    left: bool = False  # whether the rank has ended


class Heartbeat:
    """Write this rank's beats (signs of life), and watch those of others, to detect lost ranks."""

    def __init__(
        self, group: ProcessGroup, node: str, timeout_s: float, *, prefix: str = ""
    ) -> None:
        """Start both threads; every rank knows a loss within ``timeout_s``.

        ``prefix``, of all keys in the store, is unique for each use of a group.
        """
        self.peers = [Peer(f"rank {rank}") for rank in range(group.size)]
        self.peers[group.rank].node = node
        #: On rank 0, the loading thread calls this with the bytes that all ranks have loaded.
        self.on_progress: Callable[[int], None] = _ignore
        self._group = group
        self._prefix = prefix
        self._lost_key = f"{prefix}/lost"  # key of the first loss
        self._mine = self.peers[group.rank]
        # half of the time to notice missing beats; the rest to spread the loss and to stop
        self._stale_s = timeout_s / 2
        self._every_s = min(EVERY_S, timeout_s / _BEATS)
        self._most_s = self._stale_s / 4  # most time counted at once: this process was suspended
        self._quick_s = min(_QUICK_S * group.size, self._every_s / 2)
        self._named = False  # whether all ranks know each other's nodes
        self._loss: PeerFailedError | None = None
        self._listener: Callable[[PeerFailedError], None] = _ignore
        self._to_write: tuple[str, str, int] | None = None  # the loss to write
        self._news = threading.Condition()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._closing_s: float | None = None  # when `close` began
        self._answers = 0  # of the store
        self._looked_s = self._spoke_s = time.monotonic()
        self._said: Sequence[object] = ()
        self._threads = [
            threading.Thread(target=work, name=f"streamload-{what}", daemon=True)
            for what, work in (("beat", self._beat), ("watchdog", self._watch))
        ]
        if group.size > 1:
            for thread in self._threads:
                thread.start()

    def rename(self, nodes: Sequence[str]) -> None:
        """Set the nodes' names by rank, once all ranks have agreed on unique ones."""
        with self._news:
            self._named = True
            for peer, node in zip(self.peers, nodes, strict=True):
                peer.node = node

    def progress(self, done_nbytes: int, total_nbytes: int) -> None:
        """Set the file bytes that this rank has loaded and has to load; call `report`."""
        self._mine.done_nbytes, self._mine.total_nbytes = done_nbytes, total_nbytes
        self.report()

    def report(self) -> None:
        """On rank 0, call `on_progress` with the sum of bytes that all ranks have loaded."""
        if self._group.rank == 0:
            self.on_progress(sum(peer.done_nbytes for peer in self.peers))

    def check(self) -> None:
        """Raise PeerFailedError if a rank was lost."""
        if self._loss is not None:
            raise self._loss

    @contextmanager
    def listening(self, listener: Callable[[PeerFailedError], None]) -> Iterator[None]:
        """Call ``listener`` at once if a rank was lost, or when one is lost, from any thread."""
        with self._news:
            self._listener = listener
            loss = self._loss
        try:
            if loss is not None:
                listener(loss)
            yield
        finally:
            with self._news:
                self._listener = _ignore

    def arrive(self) -> None:
        """Wait until all ranks have called this as often as this rank, however long that takes."""
        self._mine.stage += 1
        if self._group.size == 1:
            return
        self._wake.set()
        while True:
            self.check()
            self.report()
            with self._news:
                if self.peers[0].all_at >= self._mine.stage:
                    return
                if self._loss is None:
                    self._news.wait(self._every_s)

    def fail(self, error: BaseException) -> None:
        """Report this rank lost by ``error``; all ranks raise PeerFailedError of the first loss."""
        reason = ": ".join(filter(None, (type(error).__name__, str(error))))
        self._lose(self._group.rank, f"gave up: {reason}")

    def identify(self, error: PeerFailedError) -> PeerFailedError:
        """Wait for the lost rank's name; return an error with it, or ``error`` without."""
        with self._news:
            self._news.wait_for(lambda: self._loss is not None, self._stale_s + 2 * self._every_s)
        return self._loss or error

    def close(self) -> None:
        """Write that this rank has ended, and stop the threads.

        Rank 0 may keep the store in its own process. So it waits until the other ranks have ended,
        or, after a loss, for as long as they need to read of the loss in the store.
        """
        with self._news:
            if self._closing_s is None:
                self._closing_s = time.monotonic()
            self._mine.left = True
        self._wake.set()
        if self._group.size == 1:
            return
        # a thread that waits for a lost host is abandoned
        patient = self._loss is None or self._group.rank == 0
        self._threads[0].join(self._stale_s if patient else 2 * self._every_s)
        self._ended.set()
        self._threads[1].join(self._every_s)
        with self._news:
            # a raised error refers to the load's memory: an abandoned thread must not keep it
            if self._loss is not None:
                self._loss = replace(self._loss)

    def _beat(self) -> None:
        """Write and read beats until this rank ends; the first thread's work."""
        pause_s = 0.0
        try:
            while not self._ended.is_set():
                if self._wake.wait(pause_s):
                    self._wake.clear()
                    pause_s = 0.0
                self._speak()
                self._look()
                self._speak()  # rank 0: that all have arrived
                if self._is_over():
                    break
                waiting = self._mine.stage > self.peers[0].all_at or self._closing_s is not None
                slower_s = max(min(pause_s * 1.5, self._every_s / 4), self._quick_s)
                pause_s = slower_s if waiting else self._every_s
        except PeerFailedError as error:
            self._lost(error)
        except Exception as error:  # a waiter would wait for ever
            rank = self._group.rank
            self._lost(PeerFailedError(self._node(rank), f"its beat failed: {error!r}", rank))
        self._ended.set()

    def _watch(self) -> None:
        """Record rank 0 as lost if its store stops answering `_beat`; the second thread's work."""
        answers, silent_s, before = -1, 0.0, time.monotonic()
        while not self._ended.wait(self._every_s / 2):
            now = time.monotonic()
            silent_s = silent_s + min(now - before, self._most_s) if answers == self._answers else 0
            answers, before = self._answers, now
            if silent_s > self._stale_s:
                problem = f"has not answered for {silent_s:.0f} s"
                self._lost(PeerFailedError(self._node(0), problem, 0))
                return

    def _speak(self) -> None:
        """Write a new loss to the store, and a beat if it is due or the state has changed."""
        store = self._group.store
        with self._news:
            loss, self._to_write = self._to_write, None
        # the first loss is the reason of the others
        if loss is not None and self._ask(store.get, self._lost_key) is None:
            self._ask(store.set, self._lost_key, json.dumps(loss).encode())
        now = time.monotonic()
        with self._news:
            said = [getattr(self._mine, field) for field in _WRITTEN[1:5]]
            if said == self._said and now - self._spoke_s < self._every_s:
                return
            self._said, self._spoke_s = said, now
            self._mine.beat += 1
            record = [getattr(self._mine, field) for field in _WRITTEN]
        self._ask(store.set, self._key(self._group.rank), json.dumps(record).encode())

    def _look(self) -> None:
        """Read the beats that this rank watches, and record ranks that stopped as lost."""
        rank_0 = self._group.rank == 0
        watched = range(self._group.size if rank_0 else 1)
        keys = [*map(self._key, watched), self._lost_key]
        found = self._ask(self._group.store.get_many, keys)
        now = time.monotonic()
        passed_s, self._looked_s = min(now - self._looked_s, self._most_s), now
        silent = gone = None
        with self._news:
            for rank, value in zip(watched, found[:-1], strict=True):
                peer = self.peers[rank]
                if peer is self._mine:
                    continue
                last = peer.beat
                for field, said in zip(_WRITTEN, parse_json(value) if value else (), strict=False):
                    if field != "node" or not self._named:
                        setattr(peer, field, said)
                peer.silent_s = 0.0 if peer.beat != last else peer.silent_s + passed_s
                if silent is None and not peer.left and peer.silent_s > self._stale_s:
                    silent = rank
                if gone is None and peer.left and peer.stage < self._mine.stage:
                    gone = rank  # it skipped a stage, for which the others wait
            if rank_0:
                self._mine.all_at = min(peer.stage for peer in self.peers)
            self._news.notify_all()
        if found[-1] is not None:
            self._lost(PeerFailedError(*parse_json(found[-1])))
        elif silent is not None:
            self._lose(silent, f"has not been heard of for {self.peers[silent].silent_s:.0f} s")
        elif gone is not None:
            self._lose(gone, "ended before the others: every rank makes the same calls")

    def _is_over(self) -> bool:
        """Return whether this rank has ended and has nothing more to write for others."""
        if self._closing_s is None or not self._said[3] or self._to_write is not None:
            return False
        if self._group.rank != 0:
            return True
        most_s = self._stale_s if self._loss is None else 4 * self._every_s
        return time.monotonic() - self._closing_s > most_s or all(
            peer.left or peer.silent_s > self._stale_s for peer in self.peers
        )

    def _node(self, rank: int) -> str:
        """Return a rank's name for an error, with its number until names are unique."""
        node = self.peers[rank].node
        return node if self._named or node == f"rank {rank}" else f"{node} (rank {rank})"

    def _key(self, rank: int) -> str:
        """Return the key of a rank's beat in the store."""
        return f"{self._prefix}/beat/{rank}"

    def _ask(self, call: Callable[..., T], *arguments: object) -> T:
        """Call the store, which rank 0 keeps; count answers, so that `_watch` sees it is alive."""
        try:
            answer = call(*arguments)
        except PeerFailedError as error:
            problem = f"does not answer any more: {error.problem}"
            raise PeerFailedError(self._node(0), problem, 0) from error
        self._answers += 1
        return answer

    def _lose(self, rank: int, problem: str) -> None:
        """Record a rank as lost, unless one is already; `_speak` writes it for the others."""
        error = PeerFailedError(self._node(rank), problem, rank)
        self._lost(error, (error.node, problem, rank))
        self._wake.set()

    def _lost(self, error: PeerFailedError, to_write: tuple[str, str, int] | None = None) -> None:
        """Record the first loss and call the listener; ``to_write``: its facts for the others."""
        with self._news:
            if self._loss is not None:
                return
            self._loss, self._to_write = error, to_write
            listener = self._listener
            self._news.notify_all()
        listener(error)


def _ignore(_: object) -> None:
    """Do nothing."""
