"""Telling how far something is: a bar on a terminal, log lines elsewhere, or a callable."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from streamload.units import format_bytes

Progress = bool | Literal["auto"] | Callable[[int, int], None]

_log = logging.getLogger("streamload")
_LOG_EVERY_S = 10.0
_TELL_EVERY_S = 0.1


@contextmanager
def reporting(
    progress: Progress, total_nbytes: int, done_word: str = "loaded"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the bytes done so far.

    Args:
        progress: "auto" is a bar on a terminal and a log line every 10 s elsewhere; True is a bar
            wherever stderr goes, and log lines where there is none; False is silence; a callable
            gets (bytes done, bytes in all), at most ten times a second and at the end.
        total_nbytes: bytes in all.
        done_word: what has been done to them, for the log.

    Raises:
        ValueError: ``progress`` is none of these.
    """
    if progress is False:
        yield lambda done: None
    elif callable(progress):
        tell = progress
        yield _limited(lambda done: tell(done, total_nbytes), _TELL_EVERY_S, total_nbytes)
    elif progress is not True and progress != "auto":
        raise ValueError(f"progress is auto, True, False or a callable, not {progress!r}")
    elif sys.stderr is not None and (progress is True or sys.stderr.isatty()):
        with _bar(total_nbytes) as update:
            yield _limited(update, _TELL_EVERY_S, total_nbytes)
    else:
        begun = time.monotonic()

        def line(done: int) -> None:
            seconds = max(time.monotonic() - begun, 1e-9)
            if seconds < _LOG_EVERY_S:
                return
            rate = done / seconds
            left = (total_nbytes - done) / rate if rate else 0.0
            _log.info(
                "%s %s of %s, %s/s, %.0f s left",
                done_word,
                format_bytes(done),
                format_bytes(total_nbytes),
                format_bytes(rate),
                left,
            )

        yield _limited(line, _LOG_EVERY_S, total_nbytes)


def _limited(
    tell: Callable[[int], None], every_s: float, total_nbytes: int
) -> Callable[[int], None]:
    last = time.monotonic() - (every_s if every_s < 1 else 0)

    def update(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= every_s or done == total_nbytes:
            last = now
            tell(done)

    return update


@contextmanager
def _bar(total_nbytes: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,  # no thread of its own
        transient=sys.stderr.isatty(),  # elsewhere the bar is one line, written at the end
    )
    with bar:
        task = bar.add_task("load", total=total_nbytes)

        def update(done: int) -> None:
            bar.update(task, completed=done, refresh=True)

        yield update
