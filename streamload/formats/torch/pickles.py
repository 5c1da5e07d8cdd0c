"""Reads pickles in files: bounded in length, with errors that name the file."""

from __future__ import annotations

from streamload.core.memory import first_that_fits
from streamload.errors import HeaderError
from streamload.files.header import check_nbytes
from streamload.formats.reader import File
from streamload.formats.torch.choosing import SAVE
from streamload.formats.torch.globals import Lookup, PickleError, named_or_foreign
from streamload.formats.torch.unpickler import Loaded, load

_LONG_NBYTES = 2**20  # free memory is checked before a longer pickle is read


def check_length(file: File, nbytes: int, what: str) -> None:
    """Raise HeaderError if a pickle is too long, PlanInfeasibleError if for memory."""
    check_nbytes(file.path, f"{what} is too long", nbytes, what)
    if nbytes > _LONG_NBYTES:
        first_that_fits([(None, nbytes)], [(f"{what} of {file.path}", nbytes)])


def unpickle(
    file: File, raw: bytes, what: str, at: int = 0, lookup: Lookup = named_or_foreign
) -> Loaded:
    """Return the content of the pickle at byte ``at`` of ``raw``; nothing in it is run."""
    try:
        return load(raw, at, lookup)
    except PickleError as error:
        expected = f"{error.expected} ({SAVE} writes them)" if error.named else error.expected
        raise HeaderError(file.path, f"{what} {error}", expected, error.found) from error
