"""Deferral of Ctrl-C and of cancellation to safe points; threads that end with the program."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import CO_GENERATOR
from itertools import takewhile
from traceback import walk_stack, walk_tb
from types import FrameType

_Handler = Callable[[int, FrameType | None], object] | signal.Handlers

_EXIT_S = 2.0  # the longest wait for a thread when the program ends


def without_locals(error: BaseException | None) -> None:
    """Clear the variables of this package's ended calls that an error has left, and their callers'.

    Some refer to the error: until the garbage collector finds that cycle, it would keep all memory
    that they refer to. From Python 3.12 on, a generator that was closed refers to its caller, too.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in walk_tb(error.__traceback__):
            calls = takewhile(_is_own, (caller for caller, _ in walk_stack(frame)))
            with suppress(RuntimeError):  # that call, and so all around it, has not ended
                for call in calls:  # to clear a generator that waits would close it
                    if call is frame or not call.f_code.co_flags & CO_GENERATOR:
                        call.clear()
        error = error.__cause__ or error.__context__


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("streamload.")


class Interrupt:
    """A Ctrl-C or cancellation that waits for a safe point; see `deferred_interrupt`.

    `wake`: called by a signal or `cancel`, to wake the thread that is to call `check`.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object] | None) -> None:
        self.wake: Callable[[], None] = nothing
        self._handler = handler
        self._pending = 0
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the error of `cancel`, or else call SIGINT's previous handler for each signal.

        The handler may raise. Without an error or a signal since the last call, do nothing.
        """
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
        """Record a signal, as the handler of SIGINT, and call `wake`."""
        self._pending += 1
        self.wake()

    def cancel(self, error: BaseException) -> None:
        """Let the next `check` raise an error; any thread may call this."""
        self._error = error
        self.wake()


def is_command() -> bool:
    """Whether this process runs ``streamload`` or ``python -m streamload``."""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    return program == "streamload" or (program == "-m" and "streamload" in sys.orig_argv)


def end_by_interrupts() -> None:
    """Let Ctrl-C end this process at once and without a traceback, until `raise_interrupts`.

    For times when there is nothing to clean up. Other handlers, and SIG_IGN, stay.
    """
    _change_handler(signal.default_int_handler, signal.SIG_DFL)


def raise_interrupts() -> bool:
    """Let Ctrl-C raise KeyboardInterrupt again; return whether `end_by_interrupts` was active."""
    return _change_handler(signal.SIG_DFL, signal.default_int_handler)


def _change_handler(old: _Handler, new: _Handler) -> bool:
    """Replace the handler of SIGINT in the main thread, if it is ``old``; return whether it was."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) != old:
        return False
    signal.signal(signal.SIGINT, new)
    return True


def nothing() -> None:
    """Do nothing: the default of `Interrupt.wake`."""


_OUTERMOST = threading.local()


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Defer Ctrl-C inside the ``with`` to calls of `Interrupt.check`, or to the block's end.

    In the main thread, `check` calls the previous handler (Python's or the application's), and so
    does the end of a block that succeeds. A signal during an error is dropped: the block is ending
    already. Blocks of a thread nest, and share the outermost's interrupt. SIGINT that is ignored or
    left to the kernel stays so. In other threads only `Interrupt.cancel` works.
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
        # unless the application has set another one since
        if callable(handler) and signal.getsignal(signal.SIGINT) == interrupt.handle:
            signal.signal(signal.SIGINT, handler)
    interrupt.check()


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
