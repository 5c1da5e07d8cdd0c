"""The base class of all readers of an open shard."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Self, TypeAlias

import numpy as np

from streamload.core.location import Location
from streamload.core.units import round_up

Addresses: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Reader(ABC):
    """One open shard, read by byte range. Any number of threads may use it at once.

    Close it after the calls of all threads. Subclasses implement `_read`. Reads raise
    TruncatedFileError or FileChangedError if the file has changed or another process waits to write
    to it, CheckpointError if the bytes cannot be read (the target's content is undefined then), and
    ValueError if the range is not within the file or the reader is closed.

    Attributes:
        path: the file.
        nbytes: the file's length in bytes, as its header has it.
        mapped: whether `view` is a window of a memory map, which takes no memory of the process.
        alignment: `read_aligned` takes multiples of it: a power of two up to the page, 1 for any.
            Constant while the reader is open, even if it falls back.
        has_file: whether `fileno` returns an open file on this machine.
        leased: whether a lease keeps writers from that file while a thread is in `unchanged`.
        fallback: why the file is not read as requested: a sentence, or "".
    """

    mapped = False
    alignment = 1
    has_file = False
    leased = False
    fallback = ""
    _how = "otherwise"  # how it is read if not from an open file, for messages

    def __init__(self, path: Location, file_nbytes: int) -> None:
        self.path = path
        self.nbytes = file_nbytes

    def view(self, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Return a context with bytes ``start`` to ``stop`` (exclusive), read-only, valid in it.

        Leaving the context raises as reads do, too.
        """
        self._check_range(start, stop)
        return self._filled(start, stop)

    @contextmanager
    def _filled(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``start`` to ``stop``, read into newly allocated memory."""
        window = memoryview(bytearray(stop - start))
        try:
            self.read_into(start, window)
            yield window.toreadonly()
        finally:
            with suppress(BufferError):  # the caller still refers to it
                window.release()

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` (writable, C-contiguous) with the file's bytes from ``start`` on."""
        self._check_range(start, start + out.nbytes)
        if out.nbytes:  # a memoryview of nothing cannot be cast
            with self.unchanged(), out.cast("B") as target:
                self._read(start, target, target.nbytes)

    def read_aligned(self, start: int, stop: int, out: memoryview) -> int:
        """Read bytes ``start`` to ``stop`` to the beginning of ``out`` without copy or allocation.

        The fastest read, for callers that own aligned memory and can over-read: round ``start``
        down and ``stop`` up to `alignment`, perhaps past the end of the file, and skip the rest.
        ``out`` is contiguous, its address a multiple of `alignment`, as any page; all of it may be
        overwritten.

        Returns the number of valid bytes: fewer than ``stop - start`` if the file ends before.
        """
        valid = min(stop, self.nbytes) - start
        self._check_range(start, start + valid)
        if out.nbytes < stop - start or stop - start - valid >= self.alignment:
            raise ValueError(
                f"{self.path}: bytes {start} to {stop} of its {self.nbytes} "
                f"cannot be read into {out.nbytes}"
            )
        if valid:
            with (
                self.unchanged(),
                out.cast("B") as target,
                target[: round_up(stop, self.alignment) - start] as part,
            ):
                self._read(start, part, valid)
        return valid

    def fileno(self) -> int:
        """Return the open file's descriptor, for callers that pread(2) from it themselves.

        Starts, lengths and addresses must be multiples of `alignment`. The descriptor changes at a
        `fallback`: after an EINVAL, read those bytes through the reader, which falls back if it has
        to, and call this again.

        Raises:
            io.UnsupportedOperation: there is no open file on this machine.
            ValueError: the reader is closed.
        """
        raise io.UnsupportedOperation(f"{self.path} is read {self._how}")

    def scatter(self, start: int, addresses: Addresses, sizes: Addresses) -> bool:
        """Read consecutive bytes to at most 1024 memory addresses; return whether all came.

        If not, the memory's content is undefined. ``sizes``: bytes for each address.
        """
        return False

    def stop_ahead(self) -> None:  # noqa: B027
        """Disable reading ahead: bring only requested bytes into the page cache, few at a time.

        For hosts with little memory, as pages being read cannot be reclaimed. Call this before the
        first read.
        """

    def unchanged(self) -> AbstractContextManager[None]:
        """Return a context that detects changes, for reads from `fileno` or from a map of the file.

        Entering and leaving raise CheckpointError if the file has changed since its header was
        read, or another process waits to write to it. `view`, `read_into` and `read_aligned` enter
        the context themselves.
        """
        return nullcontext()

    def stop(self) -> None:  # noqa: B027
        """Make calls that wait for a server raise soon; any thread may call this.

        Reads of local files complete. The reader must still be closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        """Read ``nbytes`` > 0 from ``start`` on to ``target``, all of which may be overwritten."""

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"{self.path}: no bytes {start} to {stop} in its {self.nbytes}")
