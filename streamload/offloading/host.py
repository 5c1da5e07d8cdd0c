"""Layers in host memory: their bytes in a safetensors file of the kernel's (memfd_create(2))."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.checkpoint.shards import BLOCK_NBYTES, Room, Shards, file_kind, page_cache
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.errors import OffloadError
from streamload.files.local import ResolvedKind, choose_reader
from streamload.formats.reader import default_reader, read_header

# The data begins at a page, so that a view or a direct copy has it as aligned as can be.
_ALIGNMENT_NBYTES = 4096


class HostFile:
    """Tensors of a checkpoint in host memory, until `close`."""

    def __init__(
        self, checkpoint: Checkpoint, names: Collection[str], *, keeps: bool, ahead: bool = True
    ) -> None:
        """Read tensors; if ``keeps``, leave them in the page cache, too.

        Raises:
            CheckpointError: they cannot be read.
            OffloadError: the system has no such files, or no memory for this one.
        """
        infos = [info for name, info in checkpoint.tensors.items() if name in names]
        header = _header(infos)
        nbytes = sum(info.nbytes for info in infos)
        cache = page_cache("keep" if keeps else "drop", to_read_nbytes=nbytes)
        room = Room(BLOCK_NBYTES)

        def kind(path: Location) -> ResolvedKind:
            if ahead or not isinstance(path, Path):
                return file_kind(path, "auto")
            return choose_reader(path, "auto").kind

        self._fd = _memory_file(len(header) + nbytes)
        path = Path(f"/proc/self/fd/{self._fd}")
        try:
            with (
                path.open("r+b") as file,  # closed then: no lease is given on what can be written
                Shards(checkpoint.shards, kind, cache=cache, ahead=ahead) as shards,
            ):
                file.write(header)
                for info in infos:
                    for block in shards.blocks(info, room):
                        file.write(block)
            own = read_header(path, reader=default_reader())
        except BaseException:
            self.close()
            raise
        rest = (
            replace(each, tensors=tuple(t for t in each.tensors if t.name not in names))
            for each in checkpoint.shards
        )
        #: The checkpoint with these tensors in this file.
        self.checkpoint = from_headers(checkpoint.path, [*rest, own], checkpoint.config)

    def close(self) -> None:
        """Give the memory back, when nothing reads it any more; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _memory_file(nbytes: int) -> int:
    """A descriptor, for reading alone, of a new file in memory with room for so many bytes."""
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


def _header(infos: Collection[TensorInfo]) -> bytes:
    """The header of a safetensors file of tensors, one after the other, with its length."""
    stops = accumulate(info.nbytes for info in infos)
    entries = {
        each.name: {
            "dtype": each.dtype.code,
            "shape": each.shape,
            "data_offsets": [stop - each.nbytes, stop],
        }
        for each, stop in zip(infos, stops, strict=True)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_NBYTES)
    return struct.pack("<Q", len(text)) + text
