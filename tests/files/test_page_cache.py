"""What is in the page cache of real files, and that a load gives back what it brought in, only."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from time import sleep

import forked
import numpy as np
import pytest
from boxes import Boxes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parameters import few
from safetensors_files import header_bytes

from streamload.core.system import filesystem_of
from streamload.files import page_cache
from streamload.files.folder import ResolvedKind, open_reader
from streamload.files.page_cache import MARGIN_NBYTES, PageCache, PageCacheKind, resident_fraction
from streamload.formats.reader import read_header

if sys.platform != "linux":
    pytest.skip("the page cache can be asked on Linux only", allow_module_level=True)

MIB = 2**20
PAGE = mmap.PAGESIZE
LARGE = 96 * MIB + 5000


def write(path: Path, nbytes: int) -> Path:
    block = np.random.default_rng(0).bytes(MIB)
    with open(path, "wb") as file:
        for _ in range(nbytes // MIB):
            file.write(block)
        file.write(block[: nbytes % MIB])
        file.flush()
        os.fsync(file.fileno())
    make_cold(path)
    return path


def make_cold(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def warm(path: Path, ranges: list[tuple[int, int]]) -> None:
    """Bring in the pages of these ranges, and none beside them."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    for start, stop in ranges:
        for at in range(start, stop, MIB):
            os.pread(fd, min(MIB, stop - at), at)
    os.close(fd)


def resident(path: Path) -> set[int]:
    """The pages that are in the page cache, as the kernel says at once (mincore of a whole map)."""
    nbytes = path.stat().st_size
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    vector = (ctypes.c_ubyte * (-(-nbytes // PAGE)))()
    with open(path, "rb") as file:
        at = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        assert libc.mincore(at, nbytes, vector) == 0
        libc.munmap(at, nbytes)
    return {page for page, code in enumerate(vector) if code & 1}


def nothing_else(before: set[int], after: set[int], lost: int) -> bool:
    """Whether the pages after are those before, ``lost`` of them perhaps not.

    A few pages in 10,000 were seen to go by themselves, without any memory being short, between
    reading a file in the plainest way and asking for it.
    """
    return after <= before and len(before - after) <= lost


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on a filesystem whose files need not be in memory."""
    folder = tmp_path_factory.mktemp("cache")
    mountinfo = Path("/proc/self/mountinfo").read_text()
    if filesystem_of(os.path.realpath(folder), mountinfo) in ("tmpfs", "ramfs"):
        pytest.skip("the folder for temporary files is in memory")
    return folder


@pytest.fixture(scope="module")
def _large(folder: Path) -> Path:
    return write(folder / "large", LARGE)


@pytest.fixture
def large(_large: Path) -> Path:
    make_cold(_large)
    assert not resident(_large)
    return _large


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 4 * MIB, 4 * MIB + 1, 20 * MIB])
def test_fraction_of_a_file(folder: Path, nbytes: int) -> None:
    path = write(folder / "f", nbytes)
    for _ in range(2):
        assert resident_fraction(path) == 0
    with open(path, "rb") as file:
        assert resident_fraction(file.fileno()) == 0
        file.seek(0, os.SEEK_END)
        assert resident_fraction(file.fileno()) == 0 and file.tell() == nbytes
    assert not resident(path)
    if nbytes > PAGE + 1:
        warm(path, [(0, nbytes // 2)])
        found = resident_fraction(str(path))
        assert found is not None and abs(found - 0.5) < 0.02
    path.read_bytes()
    found = resident_fraction(path)
    assert found is not None and found > 0.98


def test_file_without_bytes_or_without_pages(tmp_path: Path) -> None:
    """Of nothing all is there; of what is not a file, nothing is known, and nobody waits for it."""
    (tmp_path / "empty").touch()
    assert resident_fraction(tmp_path / "empty") == 1
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "fifo", Path("/dev/null"), "a\0b"):
        assert resident_fraction(path) is None


STRANGER = """
    import ctypes, os, sys
    from contextlib import closing
    from pathlib import Path
    from streamload.files.page_cache import PageCache, _is_answered, resident_fraction

    path, fd = Path(sys.argv[1]), os.open(sys.argv[1], os.O_RDONLY)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self is readable again
    print(_is_answered(fd), resident_fraction(path), resident_fraction(fd))
    if sys.argv[2] == "load":
        cache = PageCache("drop", to_read_nbytes=0, available=lambda: 0)
        with closing(cache.open(path)) as shard:
            shard.done(0, len(path.read_bytes()))
        print(cache.dropped_nbytes)
"""


def test_stranger_to_a_file() -> None:
    """Who may read a file only is told by mincore that all is resident, and is not misled.

    A disk that answers at once, as one whose host has the file in memory, makes cold pages look
    resident now and then, and the kernel may take pages: each question is asked several times.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = Path(mkdtemp(prefix="streamload-"))  # pytest's own folders are closed to others
    folder.chmod(0o755)

    def ask(path: Path, then: str) -> list[str]:
        return forked.fresh(STRANGER, path, then).split()

    def file() -> Path:
        path = write(folder / "f", 20 * MIB)
        path.chmod(0o644)
        return path

    def asked() -> object:
        # the question leaves nothing behind that misleads the next, or a load
        return ask(path := file(), "nothing"), len(resident(path))

    def loaded() -> object:
        return ask(path := file(), "load"), len(resident(path))

    def loaded_warm() -> object:
        (path := file()).read_bytes()
        _, by_path, by_fd, dropped = ask(path, "load")
        warm = min(float(by_path), float(by_fd)) > 0.95 and dropped == "0"
        return warm, len(resident(path)) > 0.98 * 20 * MIB // PAGE

    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        if filesystem_of(os.path.realpath(folder), mounts) in ("tmpfs", "ramfs"):
            pytest.skip("the folder for temporary files is in memory")
        told = ["False", "0.0", "0.0"]
        for attempt, right in (
            (asked, (told, 0)),
            (loaded, ([*told, str(20 * MIB)], 0)),
            (loaded_warm, (True, True)),
        ):
            seen: list[object] = []
            while right not in seen:
                assert len(seen) < 20, seen
                seen.append(attempt())
    finally:
        shutil.rmtree(folder)


def load(
    path: Path, cache: PageCache, kind: ResolvedKind, threads: int, stop_nbytes: int | None = None
) -> Iterator[int]:
    """Read a file as a load does, 3 MB at a time; yields the bytes read so far."""
    nbytes = path.stat().st_size
    end = nbytes if stop_nbytes is None else stop_nbytes
    ranges = [(at, min(at + 3_000_000, end)) for at in range(0, end, 3_000_000)]
    with closing(cache.open(path)) as shard, open_reader(path, nbytes, kind) as reader:

        def work(part: tuple[int, int]) -> int:
            start, stop = part
            if reader.mapped:
                with reader.view(start, stop) as view:
                    sum(view[::PAGE])
            else:
                reader.read_into(start, memoryview(bytearray(stop - start)))
            shard.done(start, stop)
            return stop

        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, ranges)


def prepare(kind: PageCacheKind, nbytes: int = LARGE, available: int | None = 0) -> PageCache:
    return PageCache(kind, to_read_nbytes=nbytes, available=lambda: available)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("kind", ["pread", "mmap", "direct"])
def test_what_the_load_brought_in_is_dropped_behind(
    large: Path, kind: ResolvedKind, threads: int
) -> None:
    """While 96 MiB are read, never more than a part of them is resident, and afterwards none."""
    cache = prepare("drop")
    peak = 0
    for read in load(large, cache, kind, threads):
        if read > 48 * MIB:
            peak = max(peak, len(resident(large)) * PAGE)
    # a block and what lags, the windows that are open, and what the kernel read ahead of them
    assert peak < (16 + 4 + 4 * 3 + 32) * MIB
    assert not resident(large)
    assert cache.dropped_nbytes == LARGE


@pytest.mark.parametrize("kind", ["pread", "mmap"])
@pytest.mark.parametrize("stop_nbytes", [8 * MIB, 48 * MIB, 60 * MIB])
def test_what_was_read_ahead_is_dropped(large: Path, kind: ResolvedKind, stop_nbytes: int) -> None:
    cache = prepare("drop")
    for _ in load(large, cache, kind, 1, stop_nbytes):
        pass
    sleep(0.05)
    assert not resident(large)
    assert cache.dropped_nbytes == stop_nbytes


def test_a_header_brings_in_nothing_else(folder: Path) -> None:
    """Pages that are read ahead of it could not be freed at once, and count in a memory limit."""
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    rest = {"dtype": "U8", "shape": [LARGE], "data_offsets": [0, LARGE]}
    head = header_bytes({f"empty.{at}": empty for at in range(20_000)} | {"rest": rest})
    path = write(folder / "one.safetensors", len(head) + LARGE)
    with open(path, "r+b") as file:
        file.write(head)
        os.fsync(file.fileno())
    make_cold(path)
    assert resident(path) <= {0}
    read_header(path)
    assert len(resident(path)) <= len(head) // PAGE + 4


@pytest.mark.parametrize("kind", ["pread", "mmap"])
def test_page_cache_that_is_kept(large: Path, kind: ResolvedKind) -> None:
    cache = prepare("keep")
    for _ in load(large, cache, kind, 2):
        pass
    assert len(resident(large)) > 0.98 * LARGE // PAGE
    assert cache.dropped_nbytes == 0 and not cache.dropping


@pytest.mark.parametrize("kind", ["pread", "mmap"])
@pytest.mark.parametrize("share", ["one page in five", "runs", "the first half", "all", "the end"])
def test_what_was_resident_before_stays(large: Path, kind: ResolvedKind, share: str) -> None:
    chance = random.Random(0)
    starts = [at for at in range(0, LARGE, 997 * PAGE)]
    ranges = {
        "one page in five": [(at, at + 1) for at in range(0, 20 * MIB, 5 * PAGE)],
        "runs": [(at, min(at + chance.randrange(1, 500 * PAGE), LARGE)) for at in starts],
        "the first half": [(0, LARGE // 2)],
        "all": [(0, LARGE)],
        "the end": [(LARGE - 1, LARGE)],
    }[share]
    warm(large, ranges)
    before = resident(large)
    assert before
    cache = prepare("drop")
    for _ in load(large, cache, kind, 3):
        pass
    assert nothing_else(before, resident(large), len(before) // 50)
    absent = set(range(-(-LARGE // PAGE))) - before
    absent_nbytes = sum(min(PAGE, LARGE - page * PAGE) for page in absent)
    # and those few that the kernel took before the load looked
    assert 0 <= cache.dropped_nbytes - absent_nbytes <= len(before) // 50 * PAGE


def test_bytes_that_are_read_again_are_dropped_again(large: Path) -> None:
    cache = prepare("drop")
    with closing(cache.open(large)) as shard, open_reader(large, LARGE, "pread") as reader:
        for _ in range(2):
            for at in range(0, 64 * MIB, 4 * MIB):
                reader.read_into(at, memoryview(bytearray(4 * MIB)))
                shard.done(at, at + 4 * MIB)
            assert len(resident(large)) * PAGE < (16 + 32) * MIB
    assert cache.dropped_nbytes == 64 * MIB


def test_file_that_was_just_written_stays(folder: Path) -> None:
    path = folder / "fresh"
    path.write_bytes(bytes(8 * MIB))
    for _ in load(path, prepare("drop"), "pread", 1):
        pass
    assert len(resident(path)) > 0.98 * 8 * MIB // PAGE


def test_file_in_more_pieces_than_are_remembered(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of a file is bounded; what is behind that counts as resident."""
    monkeypatch.setattr(page_cache, "_MAX_RUNS", 10)
    warm(large, [(at, at + 1) for at in range(PAGE, 4 * MIB, 2 * PAGE)])
    before = resident(large)
    cache = prepare("drop")
    for _ in load(large, cache, "pread", 1):
        pass
    assert cache.dropped_nbytes == 10 * PAGE
    after = resident(large)
    assert len(before - after) <= 10 and not after & set(range(0, 20, 2))


@settings(deadline=None, max_examples=few(60))
@given(
    before=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 40)), max_size=6),
    reads=st.lists(
        st.tuples(st.integers(0, 3 * MIB), st.integers(1, MIB)), min_size=1, max_size=12
    ),
)
@example(
    before=[(170, 32), (297, 32), (274, 3), (570, 27)],
    reads=[(158946, 1352), (61, 387), (3145727, 1048576), (20366, 61), (4561, 25)],
)
def test_any_reads_in_any_order(
    small: Path, before: list[tuple[int, int]], reads: list[tuple[int, int]]
) -> None:
    """Ranges that overlap, repeat and leave gaps: all that they brought in goes, nothing else."""
    nbytes = small.stat().st_size
    make_cold(small)
    warm(small, [(page * PAGE, min((page + n) * PAGE, nbytes)) for page, n in before])
    resident_before = resident(small)
    cache = prepare("drop")
    wanted: set[int] = set()
    with closing(cache.open(small)) as shard, open(small, "rb", buffering=0) as file:
        for start, length in reads:
            stop = min(start + length, nbytes)
            os.pread(file.fileno(), stop - start, start)
            shard.done(start, stop)
            wanted |= set(range(start, stop))
    assert nothing_else(resident_before, resident(small), 4)
    assert cache.dropped_nbytes == sum(at // PAGE not in resident_before for at in wanted)


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    """3 MiB and a bit."""
    return write(folder / "small", 3 * MIB + 100)


@pytest.mark.parametrize(
    ("available", "to_read", "to_allocate", "dropping"),
    [
        (10**10, 10**9, 0, False),
        (10**10, 10**10 - MARGIN_NBYTES, 0, False),
        (10**10, 10**10 - MARGIN_NBYTES + 1, 0, True),
        (10**10, 6 * 10**9, 6 * 10**9, True),
        (10**9, 0, 0, False),
        (0, 0, 0, True),
        (None, 10**15, 10**15, False),
    ],
)
def test_rule_of_auto(
    small: Path, available: int | None, to_read: int, to_allocate: int, dropping: bool
) -> None:
    """Memory is short where what is to be read and allocated does not fit, with a margin."""
    cache = PageCache(
        "auto", to_read_nbytes=to_read, to_allocate_nbytes=to_allocate, available=lambda: available
    )
    assert cache.reason == ""
    cache.open(small).close()
    assert cache.dropping == dropping
    assert cache.reason.startswith("dropped" if dropping else "kept")


def test_auto_is_decided_anew_at_each_shard(small: Path) -> None:
    """What was read needs no room any more; a load that was short once stays so."""
    nbytes = small.stat().st_size
    room = [MARGIN_NBYTES + 4 * nbytes, MARGIN_NBYTES + 2 * nbytes, 0, 10**15]
    asked = iter(room)
    cache = PageCache(
        "auto", to_read_nbytes=2 * nbytes, to_allocate_nbytes=2 * nbytes, available=asked.__next__
    )
    for _ in load(small, cache, "pread", 1):
        pass
    assert not cache.dropping  # 2 to read and 2 to allocate fit exactly
    for _ in load(small, cache, "pread", 1):
        pass
    assert not cache.dropping  # and of both, half is left
    for _ in range(2):
        cache.open(small).close()
        assert cache.dropping
    assert next(asked) == 10**15  # nobody asked after that


@pytest.mark.parametrize("kind", ["keep", "drop"])
def test_what_was_asked_for_needs_no_memory_to_be_known(small: Path, kind: PageCacheKind) -> None:
    def available() -> int:
        raise AssertionError("nobody needs to know")

    cache = PageCache(kind, to_read_nbytes=10**15, available=available)
    for _ in load(small, cache, "pread", 1):
        pass
    assert cache.dropping == (kind == "drop") and kind in cache.reason


def test_unknown_kind() -> None:
    """A kind that there is not is refused with those that there are."""
    with pytest.raises(ValueError, match="auto, keep, drop"):
        PageCache("some", to_read_nbytes=0, available=lambda: 0)  # type: ignore[arg-type]


def test_shard_that_is_not_there_or_empty(tmp_path: Path) -> None:
    """Dropping is never what fails a load; closing twice is closing once."""
    (tmp_path / "empty").touch()
    for name in ("empty", "absent"):
        shard = prepare("drop").open(tmp_path / name)
        shard.done(0, 0)
        shard.done(0, 10)
        shard.close()
        shard.close()
        shard.done(0, 10)


def test_nothing_stays_open(small: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for kind in ("keep", "drop"):
        for _ in load(small, prepare(kind), "pread", 2):
            pass
        resident_fraction(small)
    assert len(os.listdir("/proc/self/fd")) == before


IN_BOX = """
    import sys
    from contextlib import closing
    from pathlib import Path
    from streamload.files.page_cache import PageCache, resident_fraction
    from streamload.files.folder import open_reader
    from streamload.core.memory import available_host_nbytes

    path = Path(sys.argv[1])
    nbytes = path.stat().st_size
    cache = PageCache("auto", to_read_nbytes=nbytes, available=available_host_nbytes)
    out = memoryview(bytearray(2**22))
    with closing(cache.open(path)) as shard, open_reader(path, nbytes, "pread") as reader:
        for start in range(0, nbytes, 2**22):
            stop = min(start + 2**22, nbytes)
            reader.read_into(start, out[: stop - start])
            shard.done(start, stop)
    print(cache.dropping, resident_fraction(path))
"""


@pytest.mark.parametrize(("limit_nbytes", "dropping"), [(300 * MIB, True), (1000 * MIB, False)])
def test_memory_that_a_cgroup_leaves(
    cgroup: Boxes, large: Path, limit_nbytes: int, dropping: bool
) -> None:
    """In a small cgroup "auto" drops, in a large one it keeps, whatever the machine has."""
    done = cgroup.run(
        [sys.executable, "-c", textwrap.dedent(IN_BOX), str(large)], limit_nbytes, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    said, fraction = done.stdout.split()
    assert said == str(dropping)
    assert float(fraction) == 0 if dropping else float(fraction) > 0.98
