"""What differs between the systems that streamload runs on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

if os.name != "posix":
    raise ImportError(
        "streamload needs Linux, macOS or another POSIX system, as Windows' WSL is: Windows itself "
        "lacks the calls by which streamload maps, reads and locks files (mmap, pread, fcntl)"
    )

_COPIED_NBYTES = 2**20  # at a time, where the system reads into memory of its own


#: Bring a file's bytes to the disk.
sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk.

    Raises:
        OSError: the disk said so.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a filesystem whose folders cannot be
            raise
    finally:
        os.close(fd)


def read_at(fd: int, start: int, out: memoryview) -> int:
    """Read from a file's byte ``start`` on into ``out``, which is not empty.

    Returns:
        How many bytes were read: perhaps fewer than fit; 0 at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], start)
    data = os.pread(fd, min(out.nbytes, _COPIED_NBYTES), start)
    out[: len(data)] = data
    return len(data)


def system_free_nbytes() -> int:
    """Memory that can be taken without swapping, on systems without /proc/meminfo (macOS, BSD)."""
    import psutil  # not installed on Linux

    return int(psutil.virtual_memory().available)
