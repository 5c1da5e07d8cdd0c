"""Ctrl-C, and being told to stop by another thread, kept until the books are straight."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Ctrl-C or a cancellation, kept until the books are straight."""

    def __init__(self, handler: Callable[[int, FrameType | None], object] | None) -> None:
        self.wake: Callable[[], None] = nothing
        self._handler = handler
        self._pending = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what `cancel` was given; let the handler in place have its signal, which raises."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._pending and self._handler is not None:
            self._pending -= 1
            self._handler(signal.SIGINT, None)

    @property
    def will_raise(self) -> bool:
        """Whether `check` is sure to raise; of an application's handler nobody knows."""
        ends = self._pending > 0 and self._handler is signal.default_int_handler
        return ends or self._error is not None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal and wake the streaming thread."""
        self._pending += 1
        self.wake()

    def cancel(self, error: BaseException) -> None:
        """Have the thread of this interrupt raise an error; from any thread."""
        self._error = error
        self.wake()


def nothing() -> None:
    """Wake nobody."""


_OUTERMOST = threading.local()


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Keep Ctrl-C for a point where the books are straight.

    In the main thread, the handler in place (Python's or the application's) is called from
    `Interrupt.check` instead of between any two instructions, and once more at the end of a block
    that succeeds. One that comes while an error is on its way is dropped: the block is ending
    already. Blocks of a thread nest; the outermost decides. A process that ignores SIGINT, or
    leaves it to the kernel, is left alone. In other threads there is `Interrupt.cancel` alone.
    """
    outer: Interrupt | None = getattr(_OUTERMOST, "interrupt", None)
    if outer is not None:
        yield outer
        return
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    interrupt = Interrupt(handler if callable(handler) else None)
    if callable(handler):
        signal.signal(signal.SIGINT, interrupt.handle)
    _OUTERMOST.interrupt = interrupt
    try:
        yield interrupt
    finally:
        _OUTERMOST.interrupt = None
        # nobody else's since
        if callable(handler) and signal.getsignal(signal.SIGINT) == interrupt.handle:
            signal.signal(signal.SIGINT, handler)
    interrupt.check()
