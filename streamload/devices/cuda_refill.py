"""Fill the same buffers of a CUDA device again and again, by threads that share each call.

What is read again and again, the device copies from the page cache, if it may be locked there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from streamload.devices.base import BulkFailure, QueuedWork, ReadTable
from streamload.devices.bulk import Loop, Team
from streamload.devices.cuda import Context, Event, PinnedStaging, _driver, allow_captures
from streamload.devices.cuda_locked import LockedReads
from streamload.errors import DeviceError

_MARKS = 3  # runs whose copies may be under way


class Mark:
    """A ticket of copies started on streams before it was recorded last; it may outlive these."""

    def __init__(self, context: Context, streams: Iterable[int]) -> None:
        """Create an event for each stream, in the current context; raises DeviceError."""
        self._context, self._streams = context, [*streams]
        self.events = tuple(Event(context) for _ in self._streams)

    def record(self) -> None:
        """Include the copies that have been started until now, in the current context."""
        for event, stream in zip(self.events, self._streams, strict=True):
            self._context.check(_driver().quick.cuEventRecord(event, stream), "cuEventRecord")

    def wait(self) -> None:
        """Wait for the copies; raises DeviceError if one failed."""
        allow_captures()
        for event in self.events:
            event.wait()


class Refiller:
    """Page-locked slots that threads fill together, without the interpreter's lock, and copy.

    One thread at a time may call it.
    """

    def __init__(self, context: Context, loop: Loop, count: int, slots: int, nbytes: int) -> None:
        """Start ``count`` threads, with the caller's, each with so many ``slots`` of ``nbytes``.

        No read may be longer than a slot.
        """
        self._context = context
        self._marks: deque[Mark] = deque()
        self._locked = LockedReads(context)
        with ExitStack() as made:
            made.callback(self._unlock)
            rows = []
            for _ in range(slots * count):
                slot = PinnedStaging(context, nbytes)
                made.callback(slot.close)
                rows.append((slot.address, slot.stream, slot.event.value or 0))
            self._streams = dict.fromkeys(stream for _, stream, _ in rows)
            made.callback(self._marks.clear)
            with context.current():
                for _ in range(_MARKS):
                    self._marks.append(Mark(context, self._streams))
            self._team = Team(loop, rows, count, self._inside)
            made.callback(self._team.close)
            self._made = made.pop_all()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        allow_captures()
        with self._context.current():
            yield

    @property
    def next(self) -> Mark:
        """The ticket of the next run: until then, of the last but two."""
        return self._marks[0]

    def is_locked(self, reads: ReadTable) -> bool:
        """Whether the device copies these reads from pages that are locked."""
        return self._locked.find(reads) is not None

    def run(
        self,
        fd: int,
        parts: Sequence[tuple[ReadTable, int]],
        locks: bool,
        after: Sequence[QueuedWork] = (),
    ) -> BulkFailure | None:
        """Read into the slots and start the copies; return the first failure, or None.

        `next`, as it was before, is the ticket of the copies. After a failure none is under way.
        ``parts`` are reads, the same objects each time, and the shift of their copies' addresses;
        ``locks``: whether pages of the file may be locked; ``after``: work that copies have to wait
        for.
        """
        failure = None
        events = [event for work in after for event in work.events]
        with self._inside():
            for stream in self._streams if events else ():
                self._context.order(stream, events)
            if self._locked.is_short():
                self._synchronize()
                self._locked.shrink()
            locked = [(self._locked.find(reads), shift) for reads, shift in parts]
            rest = [part for part, (found, _) in zip(parts, locked, strict=True) if found is None]
            there = [(found, shift) for found, shift in locked if found is not None]
            for file, some in (
                (-1, [(found.direct, shift) for found, shift in there]),
                (fd, [(found.small, shift) for found, shift in there if len(found.small.rows)]),
            ):
                if some and failure is None:
                    failure = self._team.run(file, ReadTable.joined(some), alone=True)
            if rest and failure is None:
                failure = self._team.run(fd, ReadTable.joined(rest))
            if failure is None:
                self._marks[0].record()
                self._marks.rotate(-1)
                if locks:
                    self._locked.note(fd, (reads for reads, _ in rest))
        if failure is not None:
            self.wait()
        return failure

    def wait(self) -> None:
        """Wait for the end of all copies, also if some fail."""
        with self._inside():
            self._synchronize()

    def _synchronize(self) -> None:
        for stream in self._streams:
            _driver().slow.cuStreamSynchronize(stream)

    def _unlock(self) -> None:
        with suppress(DeviceError), self._inside():
            self._locked.close()

    def close(self) -> None:
        """End the threads, and free the slots; waits for copies under way."""
        self._made.close()
