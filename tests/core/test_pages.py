"""Which memory of a process can be written without taking more."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import forked
import pytest
from pages_helpers import NBYTES, _address, _own, _reusable

from streamload.core.pagemap import reusable_nbytes

if not Path("/proc/self/pagemap").exists():
    pytest.skip("this system has no page map", allow_module_level=True)


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
def test_pages_count_when_they_were_written(flags: int) -> None:
    own = _own(flags)
    assert _reusable(own) == 0
    own[: NBYTES // 2] = b"x" * (NBYTES // 2)
    assert _reusable(own) == NBYTES // 2
    own[:] = b"x" * NBYTES
    assert _reusable(own) == NBYTES


def test_the_zero_page_does_not_count() -> None:
    """Private memory that was read and never written stands on the zero page."""
    own = _own()
    assert sum(own[:]) == 0
    assert _reusable(own) == 0


def test_parts_of_pages_count_by_bytes() -> None:
    """A range that begins and ends within pages has just its own bytes."""
    own = _own()
    own[: 2 * mmap.PAGESIZE] = b"x" * (2 * mmap.PAGESIZE)
    assert _reusable(own, 10, 100) == 100
    assert _reusable(own, 10, NBYTES - 20) == 2 * mmap.PAGESIZE - 10
    assert _reusable(own, 3 * mmap.PAGESIZE, 7) == 0


def test_files_do_not_count_until_they_were_copied(tmp_path: Path) -> None:
    """Pages of a mapped file are the page cache's; those written in a private map are ours."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * NBYTES)
    with path.open("r+b") as file:
        private = mmap.mmap(file.fileno(), NBYTES, access=mmap.ACCESS_COPY)
        shared = mmap.mmap(file.fileno(), NBYTES)
    assert sum(private[:]) == sum(shared[:])
    assert _reusable(private) == 0
    private[: NBYTES // 2] = b"y" * (NBYTES // 2)
    assert _reusable(private) == NBYTES // 2
    shared[:] = b"y" * NBYTES
    assert _reusable(shared) == 0


def test_what_a_fork_shares_does_not_count() -> None:
    """In parent and child pages do not count while both have them, and again when one is gone."""
    code = """
import mmap, os, sys
sys.path.insert(0, sys.argv[1])
import pages_helpers as t
own = t._own()
own[:] = b"x" * t.NBYTES
asked, told = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    before = t._reusable(own)
    own[: t.NBYTES // 4] = b"y" * (t.NBYTES // 4)
    print(before, t._reusable(own), flush=True)
    os.write(told[1], b".")
    os.read(asked[0], 1)
    os._exit(0)
os.read(told[0], 1)
print(t._reusable(own), flush=True)
os.write(asked[1], b".")
os.waitpid(pid, 0)
print(t._reusable(own))
"""
    folder = str(Path(__file__).parents[1] / "support")
    said = forked.fresh(code, folder)
    # what the child has copied is its own, and the parent's again
    quarter = NBYTES // 4
    assert said.split() == ["0", str(quarter), str(quarter), str(NBYTES)]


def test_many_ranges_in_any_order() -> None:
    """Each range has its own answer, whatever lies between them and in which order they come."""
    maps = [_own() for _ in range(6)]
    for own in maps[::2]:
        own[:] = b"x" * NBYTES
    order = [3, 0, 5, 2, 1, 4]
    found = reusable_nbytes([(_address(maps[i]) + i, 1000) for i in order])
    assert found == [0 if i % 2 else 1000 for i in order]
    assert reusable_nbytes([]) == []
    assert reusable_nbytes([(_address(maps[0]), 0), (0, 10)]) == [0, 0]


def test_without_a_page_map_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **options: object) -> int:
        raise FileNotFoundError("/proc/self/pagemap")

    monkeypatch.setattr(os, "open", absent)
    assert reusable_nbytes([(0, 10)]) is None
