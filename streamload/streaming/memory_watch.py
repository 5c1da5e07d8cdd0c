"""Checks, while bytes move, that the host still has the memory that plans count on."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from threading import Condition
from weakref import WeakKeyDictionary

from streamload.core.memory import HostMemory, overhead_nbytes
from streamload.errors import DeviceError, MemoryTakenError
from streamload.planning.plan import Plan

# Bytes given to workers and bytes written by them, together, between two checks while free memory
# is short; a load's reserve is larger. A check takes 100 microseconds, 250 in a cgroup with a
# limit, and half of that if only groups and limits are compared.
_LOOK_NBYTES = 2**24
_LOOK_EVERY_S = 0.01
# With more memory left, checks are rarer: as if others took it at this rate.
_TAKEN_NBYTES_PER_S = 2**33
_LOOK_AT_LEAST_EVERY_S = 0.1
# Checks by the clock take at most 1 / _LOOKS_SHARE of the time: in a forked process one takes some
# 20 milliseconds a gigabyte.
_LOOKS_SHARE = 10

_STOPS_S = 5.0  # to wait for another load that stops

_forked = False  # whether this process is a fork of one that had imported this


def _is_forked() -> None:
    global _forked, _account
    _forked, _account = True, _Account()  # the loads that run are the parent's


os.register_at_fork(after_in_child=_is_forked)


def process_nbytes() -> int | None:
    """Return the bytes of RssAnon + RssShmem of this process from /proc; None without it."""
    return _status_nbytes("status", b"RssAnon:", b"RssShmem:")


def exclusive_nbytes() -> int | None:
    """Return the bytes of written pages that this process shares with no other, as forks do.

    None before Linux 4.14. Source: proc_pid_smaps(5).
    """
    return _status_nbytes("smaps_rollup", b"Private_Dirty:")


def _status_nbytes(name: str, *fields: bytes) -> int | None:
    """Return the sum of fields in /proc/self/``name``, in bytes; None if there is no such file."""
    try:
        status = Path("/proc/self", name).read_bytes()
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith(fields)]
    return sum(int(line.split()[1]) for line in lines) * 1024


class _Watch:
    """Free host memory, and growth of this process, since this was created.

    Nothing is checked if free memory is unknown.
    """

    def __init__(self, *, may_share: bool = False) -> None:
        """Note both; ``may_share``: whether memory that is overwritten may be shared by a fork."""
        # writing a page shared with a fork takes memory, and releasing it frees none
        may_share = _forked or may_share
        self.shares = may_share and (_status_nbytes("smaps_rollup", b"Shared_Dirty:") or 0) >= 2**20
        self._own_nbytes = exclusive_nbytes if self.shares else process_nbytes
        self._held_nbytes = self._own_nbytes()
        self._memory = HostMemory()
        self._free_nbytes = self._available_nbytes()
        self._changes = self._memory.changes
        self._is_limited = False  # whether limits have changed
        self._next_s = self._next_limits_s = 0.0

    def _grown_nbytes(self) -> int | None:
        if self._held_nbytes is None or (held := self._own_nbytes()) is None:
            return None
        return held - self._held_nbytes

    def _taken(self, free_nbytes: int, grown_nbytes: int, before_nbytes: int) -> int:
        """Return the bytes that others took until now; ``before_nbytes``: until the last check."""
        assert self._free_nbytes is not None
        if self._changes != self._memory.changes:  # a limit has changed: nobody took that
            self._changes = self._memory.changes
            self._free_nbytes = free_nbytes + grown_nbytes + before_nbytes
            self._is_limited = True
        return max(self._free_nbytes - free_nbytes - grown_nbytes, 0)

    @property
    def _margin_nbytes(self) -> int:
        # stopping takes memory, too, since units under way are finished; the other half of the
        # reserve is for other growth of the process
        return overhead_nbytes(self._free_nbytes or 0) // 2

    def _is_due(self) -> bool:
        """Whether the clock demands a check: of limits, or of all that is free."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            return True
        if now_s < self._next_limits_s:
            return False
        self._next_limits_s = now_s + _LOOK_EVERY_S
        return self._memory.is_changed()

    def _looked(self, begun_s: float, spare_nbytes: int) -> None:
        """Set the time of the next check, after one with so many bytes to spare."""
        now_s = time.monotonic()
        wait_s = max(_LOOK_EVERY_S, spare_nbytes / _TAKEN_NBYTES_PER_S)
        wait_s = max(min(wait_s, _LOOK_AT_LEAST_EVERY_S), _LOOKS_SHARE * (now_s - begun_s))
        self._next_s, self._next_limits_s = now_s + wait_s, now_s + _LOOK_EVERY_S

    def _available_nbytes(self) -> int | None:
        try:
            return self._memory.available_nbytes()
        except DeviceError:
            return None


class Headroom(_Watch):
    """Compares the host memory that a load has still to touch with the memory that is free.

    Create it before the load touches memory. What the process grows by since `begin` counts as
    touched by its loads, up to the bytes that their workers were given; more counts as taken by
    other threads. Page cache that the kernel can reclaim is free, but what other loads of this
    process have still to touch.
    """

    def __init__(self, plan: Plan, shared: Collection[str]) -> None:
        """Note free memory and this process's memory; ``shared``: devices in host memory."""
        on_host = [d for d in plan.devices if d.device in shared]
        self._device = ", ".join(d.device for d in on_host) or "host"
        self._promised_nbytes = sum(d.fresh_nbytes for d in on_host)
        self._scratch_nbytes = sum(d.scratch_nbytes for d in on_host)
        self._staging_nbytes = plan.host_nbytes
        self._nbytes = sum(
            p.nbytes * count for p, count in plan.placements.counted if p.cast != "mapped"
        )
        self._handed_out_nbytes = self._done_nbytes = 0
        self.is_stopped = False
        self._taken_nbytes = self._unseen_nbytes = self._next_nbytes = 0
        super().__init__(may_share=any(d.held_nbytes > d.reusable_nbytes for d in on_host))

    def begin(self) -> None:
        """Count as a load that runs, until `end`."""
        _account.join(self)

    def end(self) -> None:
        """Count no more, once the load is done, or has freed what it took."""
        _account.leave(self)

    def hand_out(self, nbytes: int) -> None:
        """Check free memory, if due, before workers get ``nbytes`` of parameters to write."""
        self._look(nbytes)
        self._handed_out_nbytes += nbytes

    def done(self, nbytes: int) -> None:
        """Check free memory, if due, after workers wrote ``nbytes`` of parameters."""
        self._done_nbytes += nbytes
        self._look(nbytes)

    def _look(self, nbytes: int) -> None:
        """Add to the progress; if a check is due, raise MemoryTakenError if too little is free."""
        self._unseen_nbytes += nbytes
        if self._unseen_nbytes < self._next_nbytes and not self._is_due():
            return
        self._unseen_nbytes = 0
        begun_s = time.monotonic()
        free = self._available_nbytes()
        if free is None or self._free_nbytes is None:
            return
        needs = _account.needs()
        needed = needs.pop(self)
        others_need = sum(needs.values())
        handed_out = self._handed_out_nbytes
        grown = self._grown_nbytes()
        grown = handed_out if grown is None else grown
        # expect other processes to take as much as since the last check, and if they are such a
        # load, too, as much as is written here before this one can stop
        before, taken = self._taken_nbytes, self._taken(free, grown, self._taken_nbytes)
        self._taken_nbytes = taken
        others = max(taken - before, min(taken, handed_out - self._done_nbytes))
        margin = self._margin_nbytes + others
        free, taken = max(free - others_need, 0), taken + others_need
        spare = free - needed - min(needed, margin)
        if spare < 0:
            if not _account.stop(self):
                return self._look(self._next_nbytes)
            raise MemoryTakenError(self._device, needed, free, taken, is_limited=self._is_limited)
        self._next_nbytes = max(_LOOK_NBYTES, spare // 2)
        self._looked(begun_s, spare)

    def may_touch_nbytes(self, *, known: bool) -> int:
        """Return the most bytes that the load may have touched; ``known``: by what has grown."""
        return self._handed_out_nbytes + (self._scratch_nbytes if known else 0)

    def needed_nbytes(self, touched_nbytes: int) -> int:
        """Return the bytes that the load has still to touch."""
        # memory for a peak that is over is not needed any more
        needed = min(
            self._promised_nbytes - touched_nbytes,
            self._nbytes - self._done_nbytes + self._scratch_nbytes,
        ) + max(self._staging_nbytes - self._handed_out_nbytes, 0)
        if self.is_stopped:  # what is under way is finished
            needed = min(needed, self._handed_out_nbytes - self._done_nbytes)
        return max(needed, 0)


class _Account:
    """The loads that run in this process, and the part of its growth that each of them explains."""

    def __init__(self) -> None:
        self._changed = Condition()  # its lock may be taken again, by a handler of a signal
        # bytes that each had touched at `_begin`; weak: Ctrl-C may come before `leave`
        self._loads = WeakKeyDictionary[Headroom, int]()
        self._own_nbytes = process_nbytes
        self._held_nbytes: int | None = None

    def join(self, load: Headroom) -> None:
        """Add a load, which has touched nothing."""
        with self._changed:
            self._begin({**self._touched(), load: 0})

    def leave(self, load: Headroom) -> None:
        """Remove a load, which keeps what it touched, or frees it from now on."""
        with self._changed:
            self._begin({each: n for each, n in self._touched().items() if each is not load})
            self._changed.notify_all()

    def stop(self, load: Headroom) -> bool:
        """Mark a load as one that stops; if another does, wait for its memory and return False."""
        with self._changed:
            if any(each.is_stopped for each in self._loads) and self._changed.wait(_STOPS_S):
                return False
            load.is_stopped = True
            return True

    def needs(self) -> dict[Headroom, int]:
        """Return the bytes that each load has still to touch."""
        with self._changed:
            return {load: load.needed_nbytes(n) for load, n in self._touched().items()}

    def _begin(self, touched: dict[Headroom, int]) -> None:
        self._loads = WeakKeyDictionary(touched)
        shares = any(load.shares for load in touched)
        self._own_nbytes = exclusive_nbytes if shares else process_nbytes
        self._held_nbytes = self._own_nbytes() if touched else None

    def _touched(self) -> dict[Headroom, int]:
        """Return the bytes that each load has touched, as far as the process has grown."""
        if not self._loads:
            return {}
        held = None if self._held_nbytes is None else self._own_nbytes()
        touched = {}
        left = None if held is None or self._held_nbytes is None else held - self._held_nbytes
        for load, before in self._loads.items():
            most = load.may_touch_nbytes(known=left is not None) - before
            touched[load] = before + (most if left is None else min(left, most))
            left = None if left is None else left - min(left, most)
        return touched


_account = _Account()


def needed_by_loads() -> int:
    """Return the host bytes that loads of this process, in other threads, have still to touch."""
    return sum(_account.needs().values())


class PassWatch(_Watch):
    """Watches the host's free memory while layers stream, pass after pass, through slots.

    Create it before the slots are allocated. What the process grows by, in addition, counts as
    the user's.
    """

    def __init__(self, device: str, promised_nbytes: int) -> None:
        """``promised_nbytes``: host memory of slots and staging on ``device``, not yet touched."""
        super().__init__()
        self._device, self._promised_nbytes = device, promised_nbytes
        self._taken_nbytes, self._looked_s = 0, time.monotonic()

    def look(self) -> None:
        """If a check is due, raise MemoryTakenError if others have left too little memory."""
        if not self._is_due():
            return
        begun_s = time.monotonic()
        free, grown = self._available_nbytes(), self._grown_nbytes()
        if free is None or self._free_nbytes is None or grown is None:
            return
        taken = self._taken(free, grown, self._taken_nbytes)
        needed = max(self._promised_nbytes - max(grown, 0), 0) + self._margin_nbytes
        # expect others to take as much as lately
        lately = _LOOK_AT_LEAST_EVERY_S / max(begun_s - self._looked_s, _LOOK_AT_LEAST_EVERY_S)
        needed += int(max(taken - self._taken_nbytes, 0) * lately)
        self._taken_nbytes, self._looked_s = taken, begun_s
        if free < needed and (self._is_limited or taken > self._margin_nbytes // 2):
            raise MemoryTakenError(self._device, needed, free, taken, is_limited=self._is_limited)
        self._looked(begun_s, max(free - needed, 0))
