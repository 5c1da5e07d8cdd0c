"""Threads of an open offload, and the one that waits for what a device computes with slots."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from streamload.devices.base import Ticket

_EXIT_S = 2.0  # the longest wait for a thread when the program ends

# How to stop each thread that runs. Python ends daemon threads where they take its lock again: in
# C++ code of torch, that aborts the process.
_RUNNING: dict[threading.Thread, Callable[[], None]] = {}


def started(run: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a thread that does not keep the process alive; ``stop`` is called at exit."""

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


#: Called with the layers of a ticket that has ended.
HasEnded = Callable[[Sequence[int]], None]


class Reaper:
    """Waits for tickets in order and reports each; the lock of `Rounds` guards all but `join`.

    It refers to nothing of its owner's while it waits for nothing, so no cycle keeps that.
    """

    def __init__(self) -> None:
        self._tickets: SimpleQueue[tuple[Sequence[int], Ticket, HasEnded] | None] = SimpleQueue()
        self._runs = False
        self._threads: list[threading.Thread] = []

    def follow(self, numbers: Sequence[int], ticket: Ticket, has_ended: HasEnded) -> None:
        """Wait for a ticket of layers, and report its end."""
        if not self._runs:
            self._runs = True
            alive = [thread for thread in self._threads if thread.is_alive()]
            self._threads = [*alive, started(self._run, "streamload-reaper", self.end)]
        self._tickets.put((numbers, ticket, has_ended))

    def end(self) -> None:
        """Let the thread end when it has waited for all that it follows."""
        if self._runs:
            self._tickets.put(None)
            self._runs = False

    def join(self) -> None:
        """Wait until it has ended, after `end`."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._tickets.get()) is not None:
            numbers, ticket, has_ended = item
            with suppress(BaseException):  # the thread that computes meets it too
                ticket.wait()
            has_ended(numbers)
