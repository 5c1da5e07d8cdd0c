"""What readers have in common that have no open file on this machine."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import NoReturn, Self

from streamload.checkpoint.url import Location


@contextmanager
def filled(
    read_into: Callable[[int, memoryview], None], start: int, stop: int
) -> Iterator[memoryview]:
    """A view of bytes that are read into memory of its own; see `Reader.view`."""
    window = memoryview(bytearray(stop - start))
    try:
        read_into(start, window)
        yield window.toreadonly()
    finally:
        with suppress(BufferError):  # something of the caller's still refers to it
            window.release()


class FilelessReader(ABC):
    """A shard whose bytes come into memory by `read_into` alone; see `readers.Reader`.

    Attributes:
        path: the file.
        nbytes: its length in bytes.
    """

    mapped = False
    alignment = 1
    fallback = ""
    has_file = False

    def __init__(self, path: Location, file_nbytes: int, how: str) -> None:
        """Of a file; ``how`` it is read is for messages."""
        self.path = path
        self.nbytes = file_nbytes
        self._how = how

    def view(self, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """See `Reader.view`."""
        self._check_range(start, stop)
        return filled(self.read_into, start, stop)

    def read_into(self, start: int, out: memoryview) -> None:
        """See `Reader.read_into`."""
        self._check_range(start, start + out.nbytes)
        if out.nbytes:  # a memoryview of nothing cannot be cast
            with out.cast("B") as target:
                self._fill(start, target)

    def read_aligned(self, start: int, stop: int, out: memoryview) -> int:
        """See `Reader.read_aligned`."""
        if out.nbytes < stop - start:
            raise ValueError(f"{self.path}: {stop - start} bytes do not fit into {out.nbytes}")
        self._check_range(start, stop)
        if start < stop:
            with out.cast("B") as target, target[: stop - start] as part:
                self._fill(start, part)
        return stop - start

    def unchanged(self) -> AbstractContextManager[None]:
        """Nobody else reads the bytes: `read_into` sees to it."""
        return nullcontext()

    def fileno(self) -> NoReturn:
        """There is none."""
        raise io.UnsupportedOperation(f"{self.path} is read {self._how}")

    @abstractmethod
    def close(self) -> None:
        """See `Reader.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def _fill(self, start: int, out: memoryview) -> None:
        """Fill ``out``, bytes and not empty, from byte ``start`` on."""

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"{self.path}: no bytes {start} to {stop} in {self.nbytes}")
