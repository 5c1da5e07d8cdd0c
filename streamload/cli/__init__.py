"""The commands: inspect, plan, load, devices, bench, verify, diff, convert.

Exit codes: 0 done, 1 bad input or a failure, 2 wrong usage, 3 does not fit, 130 Ctrl-C. Errors are
one line on stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Annotated, cast

import typer

import streamload
from streamload.cli.benching import bench
from streamload.cli.files import convert, diff, verify
from streamload.cli.flags import as_flags
from streamload.cli.loads import devices, inspect, load, plan
from streamload.cli.output import complain, print_lines, warn
from streamload.core.interrupt import end_by_interrupts, raise_interrupts
from streamload.core.location import without_secrets
from streamload.errors import BudgetError, StreamloadError

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: it pipes, greps, and fits a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},  # of the commands, too
)


def _show_version(wanted: bool) -> None:
    """Print the version and exit; the callback of ``--version``."""
    if wanted:
        print_lines(f"streamload {streamload.__version__}")
        raise typer.Exit


@app.callback()
def _program(
    show: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Stream safetensors checkpoints onto devices that are too small for the usual loaders."""


for command in (inspect, plan, load, devices, bench, verify, diff, convert):
    app.command()(command)

# typer exports only this one of click's usage errors; this is their common base
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


def _without_secrets(message: str) -> str:
    """Return an error message about arguments of the command, without secrets of their URLs."""
    for argument in sys.argv[1:]:
        for text in (argument, argument.partition("=")[2]):  # of --option=text
            if (shown := without_secrets(text)) != text:
                # as typer escapes it
                typed = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
                for each in (text, typed, repr(text)[1:-1]):
                    message = message.replace(each, shown)
    return message


def main() -> None:
    """Run a command of ``sys.argv`` and exit with its code; the entry point of ``streamload``."""
    _open_closed_streams()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("streamload").setLevel(logging.INFO)
    warnings.showwarning = warn
    if hasattr(sys.stdout, "reconfigure"):  # escape characters that the encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    ended_before = False
    try:
        ended_before = raise_interrupts()
        code = app(sys.argv[1:] or ["--help"], prog_name="streamload", standalone_mode=False)
    except BudgetError as error:
        code, message = 3, str(as_flags(error))
    except (KeyboardInterrupt, typer.Abort):
        code, message = 130, "interrupted"
    except (StreamloadError, OSError) as error:
        code, message = 1, str(error)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "streamload"
        code, message = 2, f"{_without_secrets(error.format_message())} (see {command} --help)"
    except ValueError as error:  # an argument that could not be read
        code, message = 2, _without_secrets(str(error))
    else:
        # typer itself returns an exit code for Ctrl-C
        message = "interrupted" if code == 130 else ""
    if ended_before:
        end_by_interrupts()
    if message:
        complain(message)
    sys.exit(code or 0)


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null: else other files get their descriptors 0 to 2."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
