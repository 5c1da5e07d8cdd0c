"""Progress as a bar on a terminal or in a notebook, log lines, or calls of a function."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from streamload.core.units import format_bytes

Progress = bool | Literal["auto"] | Callable[[int, int], None]

_log = logging.getLogger("streamload")
_LOG_EVERY_S = 10.0
_TELL_EVERY_S = 0.1


@contextmanager
def reporting(
    progress: Progress, total_nbytes: int, done_word: str = "loaded"
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes done so far.

    "auto" is a bar on a terminal or in a notebook, and a log line every 10 s elsewhere; True is a
    bar on any stderr, and log lines without one; False is silence; a callable gets (bytes done,
    bytes in all), at most ten times a second and at the end. Else ValueError. ``done_word`` is the
    verb.
    """
    if progress is False:
        yield lambda done: None
        return
    if callable(progress):
        tell = progress
        yield _limited(lambda done: tell(done, total_nbytes), _TELL_EVERY_S, total_nbytes)
        return
    if progress is not True and progress != "auto":
        raise ValueError(f"progress is auto, True, False or a callable, not {progress!r}")
    display, begun = _notebook_display(), time.monotonic()

    def said(done: int) -> str:
        seconds = max(time.monotonic() - begun, 1e-9)
        rate = done / seconds
        left = (total_nbytes - done) / rate if rate else 0.0
        return (
            f"{done_word} {format_bytes(done)} of {format_bytes(total_nbytes)}, "
            f"{format_bytes(rate)}/s, {left:.0f} s left"
        )

    if display is not None:
        shown = display(_notebook_bar(0, total_nbytes, said(0)), raw=True, display_id=True)

        def draw(done: int) -> None:
            shown.update(_notebook_bar(done, total_nbytes, said(done)), raw=True)

        yield _limited(draw, _TELL_EVERY_S, total_nbytes)
    elif sys.stderr is not None and (progress is True or sys.stderr.isatty()):
        with _bar(total_nbytes) as update:
            yield _limited(update, _TELL_EVERY_S, total_nbytes)
    else:

        def line(done: int) -> None:
            if time.monotonic() - begun >= _LOG_EVERY_S:
                _log.info(said(done))

        yield _limited(line, _LOG_EVERY_S, total_nbytes)


def _notebook_display() -> Any:
    """Return IPython's ``display`` inside of a notebook, else None; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return ipython.display.display if ipython is not None and hasattr(shell, "kernel") else None


def _notebook_bar(done: int, total_nbytes: int, said: str) -> dict[str, str]:
    """Return a bar by MIME type: as HTML, which needs no widgets, and as text."""
    bar = f'<progress value="{done}" max="{max(total_nbytes, 1)}"></progress>'
    return {"text/html": f"{bar} {said}", "text/plain": said}


def _limited(
    tell: Callable[[int], None], every_s: float, total_nbytes: int
) -> Callable[[int], None]:
    """Return a function that calls ``tell`` at most once in ``every_s``, and once at the end."""
    last, told = time.monotonic() - (every_s if every_s < 1 else 0), -1

    def update(done: int) -> None:
        nonlocal last, told
        now = time.monotonic()
        if now - last >= every_s or done == total_nbytes != told:
            last, told = now, done
            tell(done)

    return update


@contextmanager
def _bar(total_nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr; yield the function that takes the bytes done so far."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    text = Column(no_wrap=True)  # on a narrow terminal the bar gets shorter instead
    bar = progress.Progress(
        progress.BarColumn(),
        progress.DownloadColumn(table_column=text.copy()),
        progress.TransferSpeedColumn(table_column=text.copy()),
        progress.TimeRemainingColumn(table_column=text.copy()),
        console=Console(stderr=True),
        auto_refresh=False,  # no thread of its own
        transient=sys.stderr.isatty(),  # elsewhere the bar is one line, written at the end
    )
    with bar:
        task = bar.add_task("load", total=total_nbytes)

        def update(done: int) -> None:
            bar.update(task, completed=done, refresh=True)

        yield update
