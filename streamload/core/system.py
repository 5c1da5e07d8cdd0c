"""Calls of the C library on memory, maps and files, child processes, and differences of systems."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

if os.name != "posix":
    raise ImportError(
        "streamload needs Linux, macOS or another POSIX system, as Windows' WSL is: Windows itself "
        "lacks the calls by which streamload maps, reads and locks files (mmap, pread, fcntl)"
    )

import ctypes
import mmap
import resource
import sys
from functools import cache
from io import FileIO
from typing import Any

import numpy as np

from streamload.core.interrupt import deferred_interrupt


def install(extra: str) -> str:
    """Return the command that installs an extra's packages, by name.

    It works wherever streamload itself came from, which ``pip install 'streamload[extra]'`` does
    not: that looks for streamload in the index again.
    """
    from importlib.metadata import PackageNotFoundError, requires  # takes 10 ms

    try:
        needed = requires("streamload") or []
    except PackageNotFoundError:  # run from its sources
        needed = []
    found = [each.partition(";")[0].strip() for each in needed if f"extra == '{extra}'" in each]
    return f"pip install {shlex.join(found or [f'streamload[{extra}]'])}"


@contextmanager
def needs_extra(front: str, extra: str, *packages: str) -> Iterator[None]:
    """Name the extra in the ModuleNotFoundError for one of its packages."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise ModuleNotFoundError(
            f"streamload.{front} needs {error.name}, which is not installed; the extra {extra} has "
            f"all that it needs: {install(extra)}",
            name=error.name,
        ) from error


def callers_level() -> int:
    """Return the ``stacklevel`` at which a warning names the line that called streamload."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("streamload."):
        level, frame = level + 1, frame.f_back
    return level - 1


_ROOT = str(Path(__file__).absolute().parents[2])


def python_command(code: str, *arguments: str, sites: Sequence[str] = ()) -> list[str]:
    """Return the command of a child process that runs Python code; all children begin so.

    The child has the import path of this process, so that it imports the same streamload, after
    ``sites``; but nothing is imported from the current folder: it may be one of downloads, with a
    ``json.py``. The code gets ``arguments`` as ``sys.argv[1:]``.
    """
    here = ""
    with suppress(OSError):  # the current folder may be gone
        here = os.path.realpath(os.getcwd())
    given = [here if entry == "" else entry for entry in sys.path]
    safe = [e for e in given if os.path.isabs(e) and (e == _ROOT or os.path.realpath(e) != here)]
    path = list(dict.fromkeys([*map(os.path.abspath, sites), *safe, _ROOT]))
    # without PYTHONHOME, which -I ignores, the interpreter may not find its library
    flags = ["-P" if os.environ.get("PYTHONHOME") else "-I", *["-B"] * sys.dont_write_bytecode]
    return [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {path!a}\n{code}", *arguments]


#: Begins programs of child processes that this one can do without: if memory runs out, the kernel
#: kills them first, and not their larger parent.
KILLED_FIRST = """
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
except OSError:
    pass  # no Linux
"""
#: Begins the program of `bounded_child`.
_BOUNDED = f"""{KILLED_FIRST}
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
except (ImportError, ValueError, OSError):
    pass  # of this system, or a lower limit holds
"""


def bounded_child(code: str, given: Any, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run Python code on untrusted input in a child process, which gets 1 GiB of memory.

    ``given`` is JSON, on the standard input of the child. Raises subprocess.TimeoutExpired.
    """
    command, text = python_command(_BOUNDED + code), json.dumps(given)
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)


# Filesystems whose pages are never counted as available.
_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "devtmpfs")
_COPIED_NBYTES = 2**20  # at once, if the system cannot read into given memory
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14 and later
_MIN_POPULATED_NBYTES = 16 * mmap.PAGESIZE
_EXACT_NBYTES = 2**18  # read from a map at once, if the kernel may not read ahead
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # on Linux, macOS and the BSDs
# MAP_NORESERVE is new in Python 3.13; Linux has the same value on these machines
_SAME = ("x86_64", "i686", "aarch64", "armv7l", "riscv64", "s390x", "loongarch64")
_IS_SAME = sys.platform == "linux" and os.uname().machine in _SAME
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if _IS_SAME else 0)
_HUGE_PAGE = 2**21  # on x86-64 and AArch64; systems with larger ones give none
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

#: Whether `place_code` works here. CPUs other than x86-64 may need a call after writing code
#: (AArch64 needs its instruction cache flushed).
PLACES_CODE = (
    sys.platform == "linux"
    and os.uname().machine == "x86_64"
    and ctypes.sizeof(ctypes.c_void_p) == 8
)

_pointer, _size, _int, _i64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
# name here, names in C libraries (glibc has its own for offsets of 64 bits), arguments, result
_CALLS: tuple[tuple[str, tuple[str, ...], tuple[Any, ...], Any], ...] = (
    ("map", ("mmap64", "mmap"), (_pointer, _size, _int, _int, _int, _i64), _pointer),
    ("munmap", ("munmap",), (_pointer, _size), _int),
    ("mprotect", ("mprotect",), (_pointer, _size, _int), _int),
    ("madvise", ("madvise",), (_pointer, _size, _int), _int),
    ("mincore", ("mincore",), (_pointer, _size, _pointer), _int),
    ("statx", ("statx",), (_int, ctypes.c_char_p, _int, ctypes.c_uint, _pointer), _int),
    ("pread", ("pread64", "pread"), (_int, _pointer, _size, _i64), ctypes.c_ssize_t),
    ("preadv", ("preadv64", "preadv"), (_int, _pointer, _int, _i64), ctypes.c_ssize_t),
    ("errno", ("__errno_location",), (), _pointer),
    ("sem_init", ("sem_init",), (_pointer, _int, ctypes.c_uint), _int),
    ("sem_post", ("sem_post",), (_pointer,), _int),
    ("sem_wait", ("sem_wait",), (_pointer,), _int),
    ("malloc_trim", ("malloc_trim",), (_size,), _int),
    ("syscall", ("syscall",), (ctypes.c_long, _int, _pointer, _pointer, ctypes.c_uint), _i64),
    ("sync_file_range", ("sync_file_range",), (_int, _i64, _i64, ctypes.c_uint), _int),
)


@cache
def libc() -> Any:
    """Return the C library's functions that Python lacks, as attributes named as in `_CALLS`.

    A function that the library lacks is no attribute. Calls release the interpreter's lock; if one
    fails, `ctypes.get_errno` has the reason.
    """
    library, calls = ctypes.CDLL(None, use_errno=True), SimpleNamespace()
    for name, spellings, arguments, result in _CALLS:
        found = next((getattr(library, s) for s in spellings if hasattr(library, s)), None)
        if found is not None:
            found.argtypes, found.restype = arguments, result
            setattr(calls, name, found)
    return calls


def failure() -> OSError:
    """Return the error of this thread's last failed call of `libc`."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


_view_at: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, _pointer, ctypes.c_ssize_t, _int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_PYBUF_WRITE = 0x200


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of memory that the caller keeps alive.

    An array of ctypes would need a class of 1.9 kB for each size, until garbage is collected.
    """
    return _view_at(address, nbytes, _PYBUF_WRITE)


@contextmanager
def released(view: memoryview) -> Iterator[memoryview]:
    """Yield a view, and release it at the end, unless an error's traceback still refers to it."""
    try:
        yield view
    finally:
        with suppress(BufferError):
            view.release()


def map_file(fd: int, start: int, nbytes: int) -> int:
    """Map bytes of a file, shared and read-only; return their address, for ``munmap`` at the end.

    ``start`` is a multiple of the page. Raises OSError if the system refuses.
    """
    return _map(nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)


def _map(
    nbytes: int, protection: int, flags: int, fd: int = -1, start: int = 0, at: int | None = None
) -> int:
    address: int | None = libc().map(at, nbytes, protection, flags, fd, start)
    if address is None or address == _MAP_FAILED:
        raise failure()
    return address


def place_code(text: bytes) -> int:
    """Place machine code in memory for good, and return its address.

    Call it only if `PLACES_CODE`. The memory is never writable and executable together. Raises
    OSError: the system refuses executable memory, as SELinux does without ``execmem``, and systemd
    with ``MemoryDenyWriteExecute``.
    """
    address = _map(len(text), mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE)
    ctypes.memmove(address, text, len(text))
    if libc().mprotect(address, len(text), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        error = failure()
        libc().munmap(address, len(text))
        raise OSError(error.errno, f"no executable memory: {error.strerror}")
    return address


def direct_memory(nbytes: int) -> memoryview:
    """Allocate memory for fast direct reads, at least one byte; its last memoryview frees it.

    It begins at a page and has whole huge pages, if the system gives them (transparent_hugepage
    "madvise" or "always") and ``nbytes`` holds one. A disk splits a request by the pieces of memory
    in it: on a virtual disk with 254 pieces a request, 1 to 8 threads with 4 MiB each read 1.1 to
    1.3 GB/s with pages of 4 KiB, 2.8 to 3.4 with huge pages, for a third of the CPU time.
    """
    if nbytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, nbytes, flags=_PRIVATE))[:nbytes]
    # one huge page more, to begin at one: untouched pages take no memory
    held = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=_PRIVATE)
    memory = memoryview(held)
    start = -address_of(memory) % _HUGE_PAGE
    with suppress(OSError):  # a kernel without them
        held.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE_PAGE * _HUGE_PAGE)
    return memory[start : start + nbytes]


def trim_heap() -> None:
    """Return freed heap memory to the kernel, if the C library can."""
    if hasattr(libc(), "malloc_trim"):
        libc().malloc_trim(0)


def populate(window: memoryview) -> None:
    """Allocate a memory window's pages by one system call, if possible: page faults cost more.

    No huge pages, slower in some virtual machines: docs/measurements.md, "Fresh memory".
    """
    if window.nbytes < _MIN_POPULATED_NBYTES or sys.platform != "linux":
        return
    address = address_of(window)
    # whole pages inside the window: the pages around it belong to others
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + window.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc().madvise(first, stop - first, _MADV_POPULATE_WRITE)  # refused: pages come as touched


def populate_shared(first: int, stop: int, *, ahead: bool = True) -> int:
    """Read a mapped file's pages at addresses ``first`` to ``stop`` (exclusive) into memory.

    Waits for the disk; any thread may call this. Without ``ahead``, for a map with MADV_RANDOM, it
    reads 256 KiB at once. Returns 0, or the errno if the storage fails. Before Linux 5.14, and on
    other systems, pages are read when touched.
    """
    if sys.platform != "linux":
        return 0
    first = first // mmap.PAGESIZE * mmap.PAGESIZE
    step = stop - first if ahead else _EXACT_NBYTES
    for at in range(first, stop, max(step, 1)):
        nbytes = min(step, stop - at)
        if not ahead:
            libc().madvise(at, nbytes, mmap.MADV_WILLNEED)
        while libc().madvise(at, nbytes, _MADV_POPULATE_READ):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                return 0 if number == errno.EINVAL else number
    return 0


def unmap_pages(first: int, stop: int) -> None:
    """Unmap the pages of a mapped file at addresses ``first`` to ``stop`` (exclusive).

    Private writes there are lost. Pages up to 64 KiB around, the size that a fault maps, may be
    unmapped, too; touching a page maps it again.
    """
    first = first // mmap.PAGESIZE * mmap.PAGESIZE
    libc().madvise(first, stop - first, mmap.MADV_DONTNEED)


#: Write a file's bytes, given its descriptor, to the disk.
sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


class Descriptor:
    """An open file or folder, closed when nothing holds it: a Ctrl-C in `os.open` loses none."""

    def __init__(
        self, path: str | os.PathLike[str], flags: int, mode: int = 0o666, folder: int | None = None
    ) -> None:
        """Open a path as `os.open`, below ``folder`` if given; raises OSError."""
        self.fd = -1
        try:
            with deferred_interrupt():
                self.fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=folder)
        except BaseException:  # its traceback holds this object
            self.__del__()
            raise

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        with deferred_interrupt():
            self.__del__()

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that new names last; raises OSError if it fails."""
    with Descriptor(folder, os.O_RDONLY) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # the filesystem cannot do that for folders
                raise


def read_at(fd: int, start: int, out: memoryview) -> int:
    """Read from a file's byte ``start`` on into ``out``, which must not be empty.

    Returns the number of bytes read, perhaps fewer than fit; 0 at the end of the file.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], start)
    data = os.pread(fd, min(out.nbytes, _COPIED_NBYTES), start)
    out[: len(data)] = data
    return len(data)


def filesystem_and_length(path: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the type of a file's filesystem, "" if unknown, and the file's length in bytes."""
    try:
        nbytes = os.stat(path).st_size
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
    except OSError:  # no such file, or not Linux
        return "", 0
    return filesystem_of(os.path.realpath(path), mountinfo), nbytes


def filesystem_of(path: str, mountinfo: str) -> str:
    """Return the type of the filesystem of ``path`` (absolute, no symlinks), or "".

    By name, not by device number: files on btrfs and overlay have numbers that no mount has.
    ``mountinfo`` is the text of ``/proc/self/mountinfo`` (proc(5)): the mount point is the fifth
    field, with octal escapes, and the type the first after a lone hyphen.
    """
    return _mount_of(path, mountinfo)[0]


def _mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """Return the type of the filesystem of ``path`` and its options, as in `filesystem_of`."""
    best, found = "", ("", "")
    for _, point, kind, options in mounts(mountinfo):
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # a later mount on the same point hides the earlier
            best, found = point, (kind, options)
    return found


def filesystem_in_memory(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """Return the filesystem of ``path``, which need not exist, if it keeps its files in memory.

    "" for any other. An overlay keeps what is written in its upper folder.
    """
    if mountinfo is None:
        mountinfo = file_text(Path("/proc/self/mountinfo"))
    kind, options = _mount_of(os.path.realpath(path), mountinfo)
    if kind == "overlay":
        upper = next((o[9:] for o in options.split(",") if o.startswith("upperdir=")), "")
        kind = _mount_of(upper, mountinfo)[0]
    return kind if kind in _IN_MEMORY else ""


def file_text(path: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def mounts(mountinfo: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield (root, mount point, filesystem type, its options) for each line of a mountinfo text."""
    for line in mountinfo.split("\n"):
        before, _, after = line.partition(" - ")
        fields, source = before.split(" "), after.split(" ")
        if len(fields) > 4 and len(source) > 2:
            top, point = (
                re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
                for field in fields[3:5]
            )
            yield top, point, source[0], source[2]


def scatter(
    fd: int,
    offset: int,
    addresses: np.ndarray[Any, np.dtype[np.int64]],
    sizes: np.ndarray[Any, np.dtype[np.int64]],
) -> bool:
    """Read consecutive bytes of a file to many addresses at once, by one preadv(2).

    ``sizes`` has the bytes for each address. At most 1024 addresses, the least IOV_MAX of the
    systems that have the call. Returns whether all bytes were read. If not, the contents of the
    memory are undefined.
    """
    preadv = getattr(libc(), "preadv", None)
    if preadv is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    places = np.column_stack((addresses, sizes))  # struct iovec: an address and a size
    return bool(preadv(fd, places.ctypes.data, len(places), offset) == sizes.sum())


def map_privately(file: FileIO) -> mmap.mmap:
    """Map a file so that writes stay in this process and its memory.

    The map outlives the file's descriptor. No memory is reserved for written pages: a file may be
    longer than memory.
    """
    flags = mmap.MAP_PRIVATE | _NORESERVE
    fd, access = file.fileno(), mmap.PROT_READ | mmap.PROT_WRITE
    nbytes = os.fstat(fd).st_size
    # in the place of memory: before Python 3.13, a map of a file keeps a copy of its descriptor
    anonymous = {"flags": flags | mmap.MAP_ANONYMOUS, "prot": access}
    if sys.platform == "linux":  # it aligns whole huge pages: no fault maps pages of two layers
        held = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, **anonymous)
        held.resize(nbytes)
    else:
        held = mmap.mmap(-1, nbytes, **anonymous)
    with memoryview(held) as view:
        _map(nbytes, access, flags | _MAP_FIXED, fd, at=address_of(view))
    return held


def most_open_files() -> int:
    """Return how many files of a checkpoint to hold open at once, by RLIMIT_NOFILE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each may have three descriptors; the process needs others
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft // 8, 1)


def address_space_nbytes() -> int | None:
    """Return how many bytes of addresses this process can take still; None if nothing limits it.

    Linux counts RLIMIT_AS for all maps, of files and of memory.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    pages = file_text(Path("/proc/self/statm")).split()[:1]
    return max(soft - int(pages[0]) * mmap.PAGESIZE, 0) if pages else None


def system_free_nbytes() -> int:
    """Return the bytes free without swapping, on systems without /proc/meminfo (macOS, BSD)."""
    import psutil  # not installed on Linux

    return int(psutil.virtual_memory().available)
