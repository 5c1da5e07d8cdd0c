"""What a worker has read, the copies of it that may be running, and errors' tensors."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from streamload.devices.base import Staging, Ticket
from streamload.errors import CheckpointError
from streamload.planning.chunks import Chunk
from streamload.streaming.state import Counts, Job, WorkItem

#: A unit, the counts of its chunks, and the error that ended it, if any.
Outcome = tuple[WorkItem, list[Counts], BaseException | None]


class SlotTicket(NamedTuple):
    """A copy that may be running, and the staging slot that it reads."""

    staging: Staging
    ticket: Ticket


@dataclass(slots=True)
class UnderWay:
    """A work item that has been read, and the tickets of its copies that may be running."""

    unit: WorkItem
    counts: list[Counts]
    tickets: list[SlotTicket]
    ticket: Ticket | None = None  # of copies from slots that threads share
    held: ExitStack = field(default_factory=ExitStack)  # closed when the ticket's copies have ended

    def outcome(self) -> Outcome:
        """Wait for the copies; return the work item, its counts, and an error or None."""
        failure: BaseException | None = None
        shared = [] if self.ticket is None else [self.ticket]
        for ticket in [*shared, *(ticket for _, ticket in self.tickets)]:
            try:
                ticket.wait()
            except BaseException as error:
                failure = error
        try:
            self.held.close()
        except BaseException as error:  # the file has changed
            failure = failure or error
        try:
            return self.unit, self.counts, failure
        finally:
            del failure  # its traceback has this call: a cycle


def named(job: Job, unit: WorkItem, error: BaseException) -> BaseException:
    """Return the error; a `CheckpointError` without a tensor gets the tensor at fault."""
    if not isinstance(error, CheckpointError) or error.tensor is not None:
        return error
    found = error.of_tensor(job.tensor(_at_fault(unit, error)).name)
    found.__cause__ = error
    return found


def _at_fault(unit: WorkItem, error: CheckpointError) -> Chunk:
    """Return the first chunk that ends beyond the file's end (``error.found``), else the first."""
    end = error.found if isinstance(error.found, int) else 0
    return next((chunk for chunk in unit if chunk.runs and chunk.runs[-1].stop > end), unit[0])
