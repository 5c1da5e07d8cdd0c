"""Threads of an open offload, among them the one that waits until a device has computed."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from streamload.devices.base import Ticket

_EXIT_S = 2.0  # the longest wait for a thread when the program ends

# By running thread, the function that stops it. At exit Python ends a daemon thread when it takes
# the interpreter's lock again; inside C++ code of torch, that aborts the process.
_RUNNING: dict[threading.Thread, Callable[[], None]] = {}


def started(run: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start and return a daemon thread that runs ``run``; process exit calls ``stop`` to end it."""

    def body() -> None:
        try:
            run()
        finally:
            _RUNNING.pop(thread, None)

    thread = threading.Thread(target=body, name=name, daemon=True)
    _RUNNING[thread] = stop
    try:
        thread.start()
    except BaseException:
        del _RUNNING[thread]
        raise
    return thread


@atexit.register
def _end_threads() -> None:
    found = [(thread, stop) for thread, stop in [*_RUNNING.items()] if thread.is_alive()]
    for _, stop in found:
        stop()
    for thread, _ in found:
        thread.join(_EXIT_S)


class Reaper:
    """Waits in a thread for tickets (pending work of a device) in order, and calls back for each.

    The lock of `Rounds` guards all calls but `join`. An idle reaper has no reference to its owner,
    so no cycle keeps the owner alive.
    """

    def __init__(self) -> None:
        self._tickets: SimpleQueue[tuple[Ticket, Callable[[], None]] | None] = SimpleQueue()
        self._runs = False
        self._threads: list[threading.Thread] = []

    def follow(self, ticket: Ticket, has_ended: Callable[[], None]) -> None:
        """Call ``has_ended`` in the thread once the ticket has ended."""
        if not self._runs:
            self._runs = True
            alive = [thread for thread in self._threads if thread.is_alive()]
            try:
                self._threads = [*alive, started(self._run, "streamload-reaper", self.end)]
            except BaseException as error:
                self._runs = False
                if isinstance(error, RuntimeError):  # the limit of threads is reached
                    wait_for(ticket)
                    has_ended()
                    return
                raise
        self._tickets.put((ticket, has_ended))

    def end(self) -> None:
        """Let the thread end after all tickets that it follows; return at once."""
        if self._runs:
            self._tickets.put(None)
            self._runs = False

    def join(self) -> None:
        """Wait until the threads have ended; call `end` first."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._tickets.get()) is not None:
            ticket, has_ended = item
            wait_for(ticket)
            has_ended()
            del item, ticket, has_ended  # not kept while it waits


def wait_for(ticket: Ticket) -> None:
    """Wait for the end of a ticket, by success or failure."""
    with suppress(BaseException):  # the thread that computes gets the same error
        ticket.wait()
