"""Deferral of Ctrl-C and of cancellation to safe points."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class Interrupt:
    """Ctrl-C or a cancellation, deferred to a safe point."""

    def __init__(self, handler: Callable[[int, FrameType | None], object] | None) -> None:
        self.wake: Callable[[], None] = nothing
        self._handler = handler
        self._pending = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the error of `cancel`, or pass the signal to the previous handler, which raises."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        while self._pending and self._handler is not None:
            self._pending -= 1
            self._handler(signal.SIGINT, None)

    @property
    def will_raise(self) -> bool:
        """Whether `check` is sure to raise; an application's handler may not."""
        ends = self._pending > 0 and self._handler is signal.default_int_handler
        return ends or self._error is not None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal and wake the streaming thread."""
        self._pending += 1
        self.wake()

    def cancel(self, error: BaseException) -> None:
        """Raise an error in the thread of this interrupt; from any thread."""
        self._error = error
        self.wake()


def is_command() -> bool:
    """Whether this process runs ``streamload`` or ``python -m streamload``."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return program == "streamload" or (program == "-m" and "streamload" in sys.orig_argv)


def end_by_interrupts() -> None:
    """Let Ctrl-C end this process at once and without a traceback, until `raise_interrupts`.

    For times without anything to clean up. Other handlers, and SIG_IGN, stay.
    """
    _change_handler(signal.default_int_handler, signal.SIG_DFL)


def raise_interrupts() -> bool:
    """Let Ctrl-C raise KeyboardInterrupt again; returns whether it ended the process before."""
    return _change_handler(signal.SIG_DFL, signal.default_int_handler)


def _change_handler(old: _Handler, new: _Handler) -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) != old:
        return False
    signal.signal(signal.SIGINT, new)
    return True


def nothing() -> None:
    """Do nothing."""


_OUTERMOST = threading.local()


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Defer Ctrl-C to a safe point.

    In the main thread, `Interrupt.check` calls the previous handler (Python's or the
    application's), and so does the end of a block that succeeds. A signal during an error is
    dropped: the block is ending already. Blocks of a thread nest; the outermost decides. SIGINT
    that is ignored or left to the kernel stays so. Other threads have `Interrupt.cancel` alone.
    """
    outer: Interrupt | None = getattr(_OUTERMOST, "interrupt", None)
    if outer is not None:
        yield outer
        return
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main else None
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
