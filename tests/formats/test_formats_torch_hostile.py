"""Hostile files of torch.save: one clear error each, nothing is run, and little memory is taken."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few
from torch_files import archive, integer, pickle_of, state_dict, storage, tensor, text, write
from torch_hostile import PICKLES, TENSORS, little_memory, mutated, named, open_hostile, refused

from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError, HeaderError
from streamload.formats.reader import read_header
from streamload.formats.torch import unpickler as torch_pickle
from streamload.formats.torch.globals import Number, PickleError, key_of

# --- pickles --------------------------------------------------------------------------------------


def test_numbers_are_no_keys() -> None:
    """A file can choose numbers whose hashes collide, which takes a dict quadratic time."""
    numbers = (0, -1, 2**70, 0.5, float("inf"), True)
    assert all(type(key_of(key)) is Number for key in numbers)
    assert len({key_of(key) for key in numbers}) == len(numbers)
    assert key_of(1) == key_of(True) == key_of(1.0)
    assert [key_of(key) for key in ("a", None)] == ["a", None]


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends in one error that says what is wrong, and nothing is called."""
    data, problem = PICKLES[name]
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it was run"))
    error = refused(write(tmp_path / "model.pth", archive(data)))
    assert problem in error.problem
    assert type(error) is HeaderError


@pytest.mark.parametrize("name", TENSORS)
def test_hostile_tensors(tmp_path: Path, name: str) -> None:
    """A tensor that does not lie within its storage is named."""
    data, storages, problem = TENSORS[name]
    error = refused(write(tmp_path / "model.pth", archive(state_dict(a=data), storages)))
    assert problem in error.problem
    assert type(error) is HeaderError
    assert error.tensor == ("a" if "at byte" not in problem else None)


def test_what_refers_to_itself(tmp_path: Path) -> None:
    """Dicts inside themselves are looked at once."""
    body = (
        b"}q\0" + text("self") + b"h\0s" + text("list") + b"]q\1h\1as" + text("a") + tensor() + b"s"
    )
    path = write(tmp_path / "model.pth", archive(pickle_of(body)))
    assert [*open_checkpoint(path).tensors] == ["a"]


@pytest.mark.slow
def test_keys_of_any_depth(tmp_path: Path) -> None:
    """Tuples inside tuples as a key: to hash these would end the process."""
    deep = b")" + b"\x85" * 2_000_000
    body = b"}(" + deep + b"N" + text("a") + tensor() + b"u"
    path = write(tmp_path / "model.pth", archive(pickle_of(body)))
    assert [*open_checkpoint(path).tensors] == ["a"]


@pytest.mark.parametrize(
    ("opcode", "least"),
    [(b"}", 64), (b"(", 64), (b"]", 56), (b"N\x94", 40), (b")R", 0), (b"\x85", 0), (b"2", 0)],
)
def test_memory_of_a_long_pickle(tmp_path: Path, opcode: bytes, least: int) -> None:
    """An opcode takes as much memory as is counted for it; `least` shows that it was run."""
    head = b"ccollections\nOrderedDict\n" if opcode == b")R" else b"}"
    data = b"\x80\x02" + head + opcode * 200_000
    tracemalloc.start()
    with pytest.raises(PickleError):
        torch_pickle.load(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert least * 200_000 <= peak <= torch_pickle._OPCODE_NBYTES * 200_000 * len(opcode) + 10**6


def test_a_pickle_that_memory_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would take is compared with what is free while it is read."""
    from streamload.core import memory as budget
    from streamload.errors import PlanInfeasibleError

    monkeypatch.setattr(budget, "available_host_nbytes", lambda: 2**24)
    small = b"}(" + b"".join(b"K" + bytes([n]) + b"N" for n in range(200)) + b"u"
    copies = b"q\0" + b"ccollections\nOrderedDict\nq\1" + b"h\1h\0\x85R" * 1500 + bytes(2**19)
    for body in (b"}" * 2**19, small + copies):
        path = write(tmp_path / "model.pth", archive(pickle_of(body)))
        with pytest.raises(PlanInfeasibleError, match="objects of a pickle"):
            open_checkpoint(path)


# --- archives -------------------------------------------------------------------------------------

GOOD = archive(state_dict(a=tensor(), b=tensor((2, 2), (1, 2))))
_END_AT = len(GOOD) - 22
_DIRECTORY = struct.unpack_from("<I", GOOD, _END_AT + 16)[0]
_ENTRIES = 4


def _put(data: bytes, at: int, form: str, *values: Any) -> bytes:
    out = bytearray(data)
    struct.pack_into(f"<{form}", out, at, *values)
    return bytes(out)


def _entry(number: int) -> int:
    """Where an entry of the directory begins."""
    at = _DIRECTORY
    for _ in range(number):
        at += 46 + sum(struct.unpack_from("<3H", GOOD, at + 28))
    return at


def _local(number: int) -> int:
    """Where an entry begins."""
    at: int = struct.unpack_from("<I", GOOD, _entry(number) + 42)[0]
    return at


def _with_end_64(start: int, nbytes: int, count: int, **changed: int) -> bytes:
    """An archive whose end has numbers of 64 bits."""
    given = {"size": 44, "disk": 0, "at": _END_AT, "disks": 1} | changed
    end = struct.pack(
        "<4sQ2H2I4Q",
        *(b"PK\6\6", given["size"], 45, 45, given["disk"], 0, count, count, nbytes, start),
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, given["at"], given["disks"])
    return GOOD[:_END_AT] + end + locator + GOOD[_END_AT:]


def _made(write_entries: Callable[[zipfile.ZipFile], None]) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        write_entries(made)
    return out.getvalue()


def _twice(made: zipfile.ZipFile) -> None:
    for data in (state_dict(a=tensor()), state_dict(b=tensor())):
        with pytest.warns(UserWarning) if "archive/data.pkl" in made.namelist() else nullcontext():
            made.writestr("archive/data.pkl", data)
    made.writestr("archive/data/0", bytes(16))


def _folders(made: zipfile.ZipFile) -> None:
    for folder in ("one", "two"):
        made.writestr(f"{folder}/data.pkl", state_dict(a=tensor()))


_SIZE = _END_AT - _DIRECTORY

#: By name: the archive, and what the error says.
ARCHIVES: Mapping[str, tuple[bytes, str]] = {
    "cut in the middle": (GOOD[: len(GOOD) // 2], "cut off"),
    "cut in the directory": (GOOD[: _DIRECTORY + 20], "cut off"),
    "cut in the end": (GOOD[:-1], "cut off"),
    "only a beginning": (GOOD[:40], "cut off"),
    "bytes after the end": (GOOD + b"x", "cut off"),
    "bytes before the beginning": (GOOD[:4] + b"x" + GOOD[4:], "does not end where it should"),
    "a comment that is longer": (_put(GOOD, _END_AT + 20, "H", 9), "cut off"),
    "of several disks": (_put(GOOD, _END_AT + 4, "H", 1), "one part of a zip"),
    "more entries": (_put(GOOD, _END_AT + 8, "2H", 9, 9), "its directory is not valid"),
    "fewer entries": (_put(GOOD, _END_AT + 8, "2H", 1, 1), "its directory is not valid"),
    "a directory elsewhere": (_put(GOOD, _END_AT + 16, "I", 0), "does not end where"),
    "a directory beyond the end": (_put(GOOD, _END_AT + 16, "I", 2**32 - 2), "does not end"),
    "a directory that is longer": (_put(GOOD, _END_AT + 12, "I", 2**31), "does not end where"),
    "no entry in the directory": (_put(GOOD, _DIRECTORY, "4s", b"PK\0\0"), "not valid"),
    "a name beyond the directory": (_put(GOOD, _entry(3) + 28, "H", 60000), "cut off"),
    "an extra field beyond it": (_put(GOOD, _entry(3) + 30, "H", 60000), "cut off"),
    "an encrypted entry": (_put(GOOD, _entry(2) + 8, "H", 1), "is encrypted"),
    "a compressed storage": (
        _put(_put(GOOD, _entry(2) + 10, "H", 8), _local(2) + 8, "H", 8),
        "data/0 is compressed",
    ),
    "a method of the entry alone": (_put(GOOD, _local(2) + 8, "H", 8), "not as its directory"),
    "sizes that do not agree": (_put(GOOD, _entry(2) + 24, "I", 15), "sizes of an entry"),
    "an entry on another disk": (_put(GOOD, _entry(2) + 34, "H", 3), "sizes of an entry"),
    "an entry beyond the end": (_put(GOOD, _entry(3) + 42, "I", 2**31), "overlap"),
    "an entry in the directory": (_put(GOOD, _entry(3) + 42, "I", _DIRECTORY), "overlap"),
    "an entry at another's place": (_put(GOOD, _entry(2) + 42, "I", _local(1)), "overlap"),
    "entries that overlap": (_put(GOOD, _entry(0) + 20, "2I", _local(1), _local(1)), "overlap"),
    "an entry of 4 GiB": (_put(GOOD, _entry(2) + 20, "2I", 2**31, 2**31), "overlap"),
    "another entry's header": (_put(GOOD, _local(2), "4s", b"xxxx"), "not where its directory"),
    "another name in the entry": (
        GOOD.replace(b"archive/data/0", b"archive/data/1", 1),
        "not where its directory",
    ),
    "an extra field over the data": (_put(GOOD, _local(2) + 28, "H", 9000), "overlap"),
    "sizes of 64 bits without any": (_put(GOOD, _entry(2) + 24, "I", 2**32 - 1), "are missing"),
    "sizes of 64 bits that are cut": (
        _put(GOOD, _entry(2) + 20, "2I", 2**32 - 1, 2**32 - 1),
        "are missing",
    ),
    "an end of 64 bits beyond the file": (
        _with_end_64(_DIRECTORY, _SIZE, _ENTRIES, at=2**60),
        "the end of its directory is missing",
    ),
    "an end of 64 bits that is longer": (
        _with_end_64(_DIRECTORY, _SIZE, _ENTRIES, size=2**40),
        "the end of its directory is not valid",
    ),
    "an end of 64 bits of several disks": (
        _with_end_64(_DIRECTORY, _SIZE, _ENTRIES, disks=2),
        "the end of its directory is missing",
    ),
    "a directory of 2**63 bytes": (
        _with_end_64(_DIRECTORY, 2**63, _ENTRIES),
        "does not end where it should",
    ),
    "2**60 entries": (_with_end_64(_DIRECTORY, _SIZE, 2**60), "its directory is not valid"),
    "no entries": (
        b"PK\3\4" + bytes(26) + struct.pack("<4s4H2IH", b"PK\5\6", *[0] * 5, 30, 0),
        "not of",
    ),
    "two pickles": (_made(_twice), "an entry is not unique"),
    "two folders": (_made(_folders), "not of torch.save"),
    "no pickle": (_made(lambda z: z.writestr("archive/data/0", b"")), "not of torch.save"),
    "a pickle at the top": (_made(lambda z: z.writestr("data.pkl", b"")), "not of torch.save"),
    "a path out of the archive": (
        _made(lambda z: z.writestr("archive/../../etc/passwd", b"")),
        "leads out of the archive",
    ),
    "an absolute path": (_made(lambda z: z.writestr("/etc/passwd", b"")), "leads out of"),
    "a path of Windows": (
        GOOD.replace(b"archive/data/0", b"archive\\data/0"),
        "leads out of the archive",
    ),
    "a name that is not UTF-8": (
        _put(GOOD.replace(b"archive/data/0", b"archive/data/\xff"), _entry(2) + 8, "H", 1 << 11),
        "the name of an entry is not valid",
    ),
    "a name that ends early": (GOOD.replace(b"archive/version", b"archive/ver\0ion"), "leads out"),
    "another byte order": (GOOD.replace(b"little", b"bigbig"), "another byte order"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_hostile_archives(tmp_path: Path, name: str) -> None:
    """Each ends in one error that says what is wrong."""
    data, problem = ARCHIVES[name]
    error = refused(write(tmp_path / "model.pth", data))
    assert problem in error.problem
    assert error.path == str(tmp_path / "model.pth")


def test_the_archives_are_good_but_for_that(tmp_path: Path) -> None:
    """What hostile archives are made of opens, also with an end of 64 bits."""
    for data in (GOOD, _with_end_64(_DIRECTORY, _SIZE, _ENTRIES)):
        path = write(tmp_path / "model.pth", data)
        assert {*open_checkpoint(path).tensors} == {"a", "b"}


def test_a_pickle_of_gigabytes(tmp_path: Path) -> None:
    """It is refused by its length, before a byte of it is read."""
    path = tmp_path / "model.pth"
    name = b"archive/data.pkl"
    nbytes = 3 * 2**30
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, nbytes, nbytes, len(name), 0)
    central = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, nbytes, nbytes, len(name), 0, 0, 0, 0, 0, 0),
    )
    start = len(local) + len(name) + nbytes
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central) + len(name), start, 0)
    with path.open("wb") as file:
        file.write(local + name)
        file.seek(start)
        file.write(central + name + end)
    error = refused_in_little(path)
    assert error.problem == "data.pkl is too long"
    assert error.found == nbytes


def refused_in_little(path: Path) -> CheckpointError:
    """The error of opening a file, in little memory whatever its length."""
    with little_memory(), pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    return raised.value


def test_a_directory_of_gigabytes(tmp_path: Path) -> None:
    """It is refused by its length."""
    path = tmp_path / "model.pth"
    nbytes = 2**30
    with path.open("wb") as file:
        file.write(b"PK\3\4" + bytes(30))
        file.seek(nbytes + 34)
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 9, 9, nbytes, 34, 0))
    assert refused_in_little(path).problem == "its directory is too long"


# --- fuzzers --------------------------------------------------------------------------------------

_SEEDS = (
    GOOD,
    archive(pickle_of(b"}" + text("model") + b"}" + text("a") + tensor() + b"ss")),
    _with_end_64(_DIRECTORY, _SIZE, _ENTRIES),
)


@st.composite
def pickles(draw: st.DrawFn) -> bytes:
    parts = st.sampled_from(
        [
            *(b"(", b"}", b"]", b")", b"N", b"K\1", b"q\0", b"h\0", b"\x94", b"0", b"1", b"2"),
            *(b"t", b"u", b"s", b"a", b"e", b"d", b"l", b"\x85", b"\x86", b"R", b"b", b"Q"),
            *(text("a"), tensor(), storage(), integer(-1), integer(2**80), b"\x8f", b"\x90"),
            *(named("torch", "Size"), named("os", "system"), b"\x81", b"o", b"\x93"),
            *(named("collections", "OrderedDict"), named("torch._utils", "_rebuild_tensor_v2")),
            *(named("torch._utils", "_rebuild_parameter"), b"\x91", b"I1\n", b"F1\n", b"Vx\n"),
        ]
    )
    return pickle_of(b"".join(draw(st.lists(parts, max_size=30))))


@settings(max_examples=few(1500), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=mutated(_SEEDS))
def test_mutated_archives(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Nothing but our errors comes out, and what opens can be read."""
    open_hostile(write(tmp_path_factory.getbasetemp() / "mutated.pth", data))


@settings(max_examples=few(1500), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=pickles())
def test_pickles_of_any_opcodes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    open_hostile(write(tmp_path_factory.getbasetemp() / "opcodes.pth", archive(data)))


def test_the_seeds_of_the_fuzzer_open(tmp_path: Path) -> None:
    """Else it would find nothing."""
    for data in _SEEDS:
        path = write(tmp_path / "model.pth", data)
        header = read_header(path)
        assert header.tensors and np.all([info.nbytes == 16 for info in header.tensors])
