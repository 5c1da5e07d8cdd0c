"""A check, while a load runs, that the host still has the memory that the plan counts on."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from streamload.core.memory import HostMemory, overhead_nbytes
from streamload.errors import DeviceError, MemoryTakenError
from streamload.planning.plan import Plan

# Bytes given to workers and bytes written by them, together, between two checks while free memory
# is short. A check takes 70 microseconds, 250 in a cgroup with a limit; a load's reserve is larger.
_LOOK_NBYTES = 2**24
_LOOK_EVERY_S = 0.01
# With more memory left, checks are rarer: as if others took it at this rate.
_TAKEN_NBYTES_PER_S = 2**33
_LOOK_AT_LEAST_EVERY_S = 0.1
# Checks by the clock take at most 1 / _LOOKS_SHARE of the time: in a forked process one takes some
# 20 milliseconds a gigabyte.
_LOOKS_SHARE = 10

_forked = False  # whether this process is a fork of one that had imported this


def _is_forked() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_is_forked)


class Headroom:
    """Compares the host memory that a load has still to touch with the memory that is free.

    Create it before the load touches memory. Growth of the process since then counts as touched by
    the load, up to the bytes that workers were given; more counts as taken by other threads. Page
    cache that the kernel can reclaim is free. Nothing is checked if free memory is unknown.
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
        # writing a page shared with a fork takes memory, and releasing it frees none
        may_share = _forked or any(d.held_nbytes > d.reusable_nbytes for d in on_host)
        shares = may_share and (_status_nbytes("smaps_rollup", b"Shared_Dirty:") or 0) >= 2**20
        self._own_nbytes = exclusive_nbytes if shares else process_nbytes
        self._held_nbytes = self._own_nbytes()
        self._memory = HostMemory()
        self._free_nbytes = self._available_nbytes()
        # stopping takes memory, too, since units under way are finished; the other half of the
        # reserve is for other growth of the process
        self._margin_nbytes = overhead_nbytes(self._free_nbytes or 0) // 2
        self._taken_nbytes = 0
        self._unseen_nbytes = self._next_nbytes = 0
        self._next_s = 0.0

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
        if self._unseen_nbytes < self._next_nbytes and time.monotonic() < self._next_s:
            return
        self._unseen_nbytes = 0
        begun_s = time.monotonic()
        free = self._available_nbytes()
        if free is None or self._free_nbytes is None:
            return
        handed_out = self._handed_out_nbytes
        grown = handed_out
        if self._held_nbytes is not None and (held := self._own_nbytes()) is not None:
            grown = held - self._held_nbytes
        touched = min(grown, handed_out + self._scratch_nbytes)
        # memory for a peak that is over is not needed any more
        needed = min(
            self._promised_nbytes - touched, self._nbytes - self._done_nbytes + self._scratch_nbytes
        ) + max(self._staging_nbytes - handed_out, 0)
        needed = max(needed, 0)
        # expect others to take as much as since the last check, and if they are such a load, too,
        # as much as is written here before this one can stop
        taken = max(self._free_nbytes - free - grown, 0)
        others = max(taken - self._taken_nbytes, min(taken, handed_out - self._done_nbytes))
        margin = self._margin_nbytes + others
        self._taken_nbytes = taken
        spare = free - needed - min(needed, margin)
        if spare < 0:
            raise MemoryTakenError(self._device, needed, free, taken)
        self._next_nbytes = max(_LOOK_NBYTES, spare // 2)
        now_s = time.monotonic()
        wait_s = max(_LOOK_EVERY_S, spare / _TAKEN_NBYTES_PER_S)
        wait_s = max(min(wait_s, _LOOK_AT_LEAST_EVERY_S), _LOOKS_SHARE * (now_s - begun_s))
        self._next_s = now_s + wait_s

    def _available_nbytes(self) -> int | None:
        try:
            return self._memory.available_nbytes()
        except DeviceError:
            return None


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
