"""Ctrl-C, kept for a point where the books are straight."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Ctrl-C, kept until the books are straight."""

    def __init__(self, handler: Callable[[int, FrameType | None], object] | None) -> None:
        self.wake: Callable[[], None] = nothing
        self._handler = handler
        self._pending = 0

    def check(self) -> None:
        """Let the handler that was in place have what was kept; Python's raises."""
        while self._pending and self._handler is not None:
            self._pending -= 1
            self._handler(signal.SIGINT, None)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal and wake the streaming thread."""
        self._pending += 1
        self.wake()


def nothing() -> None:
    """Wake nobody."""


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Keep Ctrl-C for a point where the books are straight.

    In the main thread, the handler in place (Python's or the application's) is called from
    `Interrupt.check` instead of between any two instructions, and once more at the end of a block
    that succeeds. One that comes while an error is on its way is dropped: the block is ending
    already. Blocks nest; the outermost decides. A process that ignores SIGINT, or leaves it to
    the kernel, is left alone.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    outer = getattr(handler, "__self__", None)
    if isinstance(outer, Interrupt):
        yield outer
        return
    interrupt = Interrupt(handler if callable(handler) else None)
    if not callable(handler):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) == interrupt.handle:  # nobody else's since
            signal.signal(signal.SIGINT, handler)
    interrupt.check()
