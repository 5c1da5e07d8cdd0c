"""The output of commands: results on stdout, errors and warnings on stderr."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import textwrap
import warnings
from contextlib import suppress
from typing import Any

import typer

from streamload.errors import printable

_MEASURE = re.compile(r"(\d) (?=(?:[kMGTP]?B|[kMG]?B/s|s|GiB|MiB)\b)")
_CLOSED_PIPE = 141  # a shell's exit status for SIGPIPE


def print_lines(*lines: str) -> None:
    """Write lines to stdout; exit without a message if the reader of the pipe has ended.

    A terminal gets lines that fit it, broken between words and numbers; JSON stays as it is.
    """
    if sys.stdout is None:  # closed by the shell
        return
    try:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        for line in map(printable, lines):
            fits = not columns or len(line) <= columns or line.startswith("{")
            for part in (line,) if fits else _broken(line, columns):
                print(part)
        sys.stdout.flush()
    except BrokenPipeError:
        # the buffer must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_CLOSED_PIPE) from None


def _broken(line: str, columns: int) -> list[str]:
    """Break a line at spaces, but not between a number and its unit; the rest is indented."""
    text = _MEASURE.sub("\\1\0", line)
    kept = textwrap.wrap(
        *(text, columns),
        subsequent_indent="  ",
        expand_tabs=False,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace("\0", " ") for part in kept]


def print_json(data: Any) -> None:
    """Write data to stdout as one line of JSON."""
    print_lines(json.dumps(data))


def complain(message: str) -> None:
    """Write an error, warning or note to stderr, as one line."""
    if sys.stderr is None:  # closed by the shell
        return
    with suppress(OSError):  # a full disk must not change the exit code
        print(f"streamload: {printable(' '.join(message.split()))}", file=sys.stderr)


def warn(message: Warning | str, *rest: object, **more: object) -> None:
    """Write a warning to stderr as one line; `main` sets it as ``warnings.showwarning``."""
    complain(f"warning: {message}")


def be_quiet(wanted: bool) -> bool:
    """Silence warnings and notes if ``wanted``, and return it; the callback of ``--quiet``."""
    if wanted:
        logging.getLogger("streamload").setLevel(logging.ERROR)
        warnings.showwarning = lambda *rest, **more: None
    return wanted
