"""A thread that waits for what a device computes with slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from streamload.devices.base import Ticket


def started(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that does not keep the process alive."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Reaper:
    """Waits for tickets in turn, and tells of each; the lock of `Rounds` guards all calls."""

    def __init__(self, ended: Callable[[Sequence[int]], None]) -> None:
        """Start nothing yet; ``ended``: told the layers that a ticket was of."""
        self._has_ended = ended
        self._tickets: SimpleQueue[tuple[Sequence[int], Ticket] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def follow(self, numbers: Sequence[int], ticket: Ticket) -> None:
        """Wait for what computes with some layers."""
        if self.thread is None:
            self.thread = started(self._run, "streamload-reaper")
        self._tickets.put((numbers, ticket))

    def end(self) -> None:
        """Let the thread end when it has waited for all that it follows."""
        if self.thread is not None:
            self._tickets.put(None)
            self.thread = None

    def _run(self) -> None:
        while (item := self._tickets.get()) is not None:
            numbers, ticket = item
            with suppress(BaseException):  # the thread that computes meets it too
                ticket.wait()
            self._has_ended(numbers)
