"""Layers in host memory, in a file that is not on a disk (memfd_create(2))."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.checkpoint.shards import BLOCK_NBYTES, Room, Shards, file_kind
from streamload.core.location import Location
from streamload.core.system import most_open_files
from streamload.errors import OffloadError
from streamload.files.guard import FileState
from streamload.files.header import Header
from streamload.files.local import ResolvedKind, choose_reader
from streamload.files.page_cache import PageCache


class HostFile:
    """Tensors of a checkpoint kept in host memory, until `close`; for ``host=`` of `offload`.

    `checkpoint`: the whole checkpoint, in which these tensors are read from host memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Collection[str], *, keeps: bool, ahead: bool = True
    ) -> None:
        """Read the tensors ``names``, with the kernel's read-ahead if ``ahead``.

        If ``keeps``, the page cache keeps their files, too.
        """
        infos = [info for name, info in checkpoint.tensors.items() if name in names]
        *starts, nbytes = accumulate((info.nbytes for info in infos), initial=0)
        cache = PageCache("keep" if keeps else "drop", to_read_nbytes=nbytes)
        room = Room(BLOCK_NBYTES)

        def kind(path: Location) -> ResolvedKind:
            if ahead or not isinstance(path, Path):
                return file_kind(path, "auto")
            return choose_reader(path, "auto").kind

        self._fd = _memory_file(nbytes)
        path = Path(f"/proc/self/fd/{self._fd}")
        try:
            with (
                path.open("r+b") as file,  # closed then: a file open for writing gets no lease
                Shards(
                    checkpoint.shards, kind, cache=cache, most_open=most_open_files(), ahead=ahead
                ) as shards,
            ):
                for info in infos:
                    for block in shards.blocks(info, room):
                        file.write(block)
            state = FileState.of(self._fd)
        except BaseException:
            self.close()
            raise
        own = (
            replace(info, shard=path, start=start, stop=start + info.nbytes)
            for info, start in zip(infos, starts, strict=True)
        )
        headers = [
            replace(each, tensors=tuple(t for t in each.tensors if t.name not in names))
            for each in checkpoint.shards
        ]
        headers.append(Header(path, nbytes, 0, tuple(own), {}, state))
        self.checkpoint = from_headers(checkpoint.path, headers, checkpoint.config)

    def close(self) -> None:
        """Free the memory, which nothing may read from now on; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _memory_file(nbytes: int) -> int:
    """Make a file of ``nbytes`` in memory, and return a read-only descriptor of it."""
    if not hasattr(os, "memfd_create"):
        raise OffloadError("host= needs Linux, whose memory can hold files (memfd_create)")
    fd = os.memfd_create("streamload", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OffloadError(f"host=: no {nbytes} bytes of host memory: {error.strerror}") from error
    finally:
        os.close(fd)
