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


#: Told the layers that a ticket was of.
HasEnded = Callable[[Sequence[int]], None]


class Reaper:
    """Waits for tickets in turn, and tells of each; the lock of `Rounds` guards all but `join`.

    It refers to nothing of its owner's while it waits for nothing, so no cycle keeps that.
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._tickets: SimpleQueue[tuple[Sequence[int], Ticket, HasEnded] | None] = SimpleQueue()
        self._runs = False
        self._threads: list[threading.Thread] = []

    def follow(self, numbers: Sequence[int], ticket: Ticket, has_ended: HasEnded) -> None:
        """Wait for what computes with some layers, and then tell of it."""
        if not self._runs:
            self._runs = True
            alive = [thread for thread in self._threads if thread.is_alive()]
            self._threads = [*alive, started(self._run, "streamload-reaper")]
        self._tickets.put((numbers, ticket, has_ended))

    def end(self) -> None:
        """Let the thread end when it has waited for all that it follows."""
        if self._runs:
            self._tickets.put(None)
            self._runs = False

    def join(self) -> None:
        """Wait until it has ended, which it was told."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._tickets.get()) is not None:
            numbers, ticket, has_ended = item
            with suppress(BaseException):  # the thread that computes meets it too
                ticket.wait()
            has_ended(numbers)
