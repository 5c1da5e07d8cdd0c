"""What differs between the systems that streamload runs on."""

from __future__ import annotations

import os

if os.name != "posix":
    raise ImportError(
        "streamload needs Linux, macOS or another POSIX system, as Windows' WSL is: Windows itself "
        "lacks the calls by which streamload maps, reads and locks files (mmap, pread, fcntl)"
    )

_COPIED_NBYTES = 2**20  # at a time, where the system reads into memory of its own


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
