"""Files of torch.save before version 1.6: as torch.load reads them, and hostile ones."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from parameters import few
from remote_server import serve
from torch_files import (
    LEGACY_HEAD,
    integer,
    legacy,
    pickle_of,
    state_dict,
    storage,
    tensor,
    text,
    tuple_of,
    write,
)
from torch_hostile import PICKLES, TENSORS, mutated, open_hostile, refused
from torch_loads import check

from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError, HeaderError, TruncatedFileError
from streamload.files.header import Limits

torch = needs.module("torch")

WHOLE = storage(view=b"N")
VALUES = np.arange(4, dtype="<f4").tobytes()


def _view(offset: int, numel: int) -> bytes:
    """A storage of 4 elements, and a view of it, as torch before 0.4 wrote it."""
    return storage(view=tuple_of(text("v"), integer(offset), integer(numel)))


def test_views_of_storages(tmp_path: Path) -> None:
    """A view has an offset of its own, before those of its tensors."""
    parts = {"a": tensor(of=WHOLE), "b": tensor((2,), of=_view(1, 3), offset=1)}
    path = write(tmp_path / "model.pth", legacy(state_dict(**parts), {"0": VALUES}))
    expected = torch.load(path, weights_only=True)
    assert expected["b"].tolist() == [2, 3]
    check(path, expected)


def test_dicts_of_python_2(tmp_path: Path) -> None:
    """Its OrderedDict is called with a list of lists."""
    pairs = b"](](" + text("a") + tensor(of=WHOLE) + b"e]("
    pairs += text("b") + tensor((2,), of=WHOLE) + b"ee"
    pickle = pickle_of(b"ccollections\nOrderedDict\n" + tuple_of(pairs) + b"R")
    path = write(tmp_path / "model.pth", legacy(pickle, {"0": VALUES}))
    check(path, torch.load(path, weights_only=True))


def test_long_pickles(tmp_path: Path) -> None:
    """More than is read at first; the limits of a user hold for them."""
    value = {f"{i:0100}": torch.full((2,), i) for i in range(3000)} | {"none": torch.zeros(0, 3)}
    path = tmp_path / "model.pth"
    torch.save(value, path, _use_new_zipfile_serialization=False)
    check(path, torch.load(path, weights_only=True))
    with pytest.raises(HeaderError, match="by limits="):
        open_checkpoint(path, limits=Limits(header_nbytes=300_000))


def test_over_http(tmp_path: Path) -> None:
    """One request for the pickles, whatever the number of storages."""
    value = {f"{i}": torch.arange(100.0) + i for i in range(50)}
    torch.save(value, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
    with serve(tmp_path) as site:
        assert len(open_checkpoint(site.url + "model.pth")) == 50
        assert len(site.asked("/model.pth")) == 1
        check(site.url + "model.pth", value)


GOOD = legacy(state_dict(a=tensor(of=WHOLE), b=tensor((2, 2), (1, 2), of=WHOLE)), {"0": VALUES})
_PICKLE = state_dict(a=tensor())


def _with_keys(keys: bytes, rest: bytes = struct.pack("<q", 4) + VALUES) -> bytes:
    return LEGACY_HEAD + _PICKLE + keys + rest


#: By name: the file, and what the error says.
FILES: Mapping[str, tuple[bytes, str]] = {
    "another protocol": (
        legacy(_PICKLE, head=LEGACY_HEAD.replace(b"\xe9\x03", b"\xea\x03")),
        "is of another protocol",
    ),
    "a protocol that is a list": (
        legacy(_PICKLE, head=LEGACY_HEAD[:15] + pickle_of(b"]") * 2),
        "is of another protocol",
    ),
    "the magic number alone": (LEGACY_HEAD[:15], "is cut off"),
    "no objects": (LEGACY_HEAD, "is cut off"),
    "no keys": (LEGACY_HEAD + _PICKLE, "is cut off"),
    "keys that are a dict": (_with_keys(pickle_of(b"}")), "the keys of its storages"),
    "keys that are numbers": (_with_keys(pickle_of(b"](K\0e")), "the keys of its storages"),
    "keys that are calls": (
        _with_keys(pickle_of(b"cos\nsystem\n" + tuple_of(text("echo")) + b"R")),
        "names os.system",
    ),
    "a fact on the machine that is called": (
        legacy(_PICKLE, head=LEGACY_HEAD[:-20] + pickle_of(b"cos\nsystem\n)R")),
        "its pickle",
    ),
    "a key of no tensor": (_with_keys(pickle_of(b"](" + text("9") + b"e")), "the keys of"),
    "a key twice": (_with_keys(pickle_of(b"](" + text("0") * 2 + b"e")), "the keys of"),
    "a key of a path": (_with_keys(pickle_of(b"](" + text("../0") + b"e")), "the keys of"),
    "a storage without a key": (_with_keys(pickle_of(b"]"), b""), "its storage is missing"),
    "a shorter storage": (
        _with_keys(pickle_of(b"](" + text("0") + b"e"), struct.pack("<q", 3) + VALUES),
        "has another length than the pickle says",
    ),
    "a huge storage": (
        _with_keys(pickle_of(b"](" + text("0") + b"e"), struct.pack("<q", 2**62) + VALUES),
        "has another length than the pickle says",
    ),
    "a length below 0": (
        _with_keys(pickle_of(b"](" + text("0") + b"e"), struct.pack("<q", -4) + VALUES),
        "has another length than the pickle says",
    ),
    "a storage beyond the file": (GOOD[:-1], "storage '0' is cut off"),
    "no storage": (_with_keys(pickle_of(b"](" + text("0") + b"e"), b""), "storage '0' is cut off"),
    "a storage of a huge length": (
        legacy(state_dict(a=tensor(of=storage(numel=2**62)))),
        "storage '0' is cut off",
    ),
    "a view beyond its storage": (legacy(state_dict(a=tensor(of=_view(2, 3)))), "BINPERSID at"),
    "a view before its storage": (legacy(state_dict(a=tensor(of=_view(-1, 3)))), "BINPERSID at"),
    "a view of a length below 0": (legacy(state_dict(a=tensor(of=_view(2, -1)))), "BINPERSID at"),
    "a tensor beyond its view": (
        legacy(state_dict(a=tensor((3,), of=_view(2, 2)))),
        "leads out of its storage",
    ),
    "a huge string": (LEGACY_HEAD + b"\x80\x02\x8d" + b"\xff" * 8, "is cut off"),
    "a pickle without an end": (LEGACY_HEAD + b"\x80\x02" + b"}0" * 200_000, "is cut off"),
}
CASES = (
    {f"file: {name}": each for name, each in FILES.items()}
    | {
        f"pickle: {name}": (legacy(data), why)
        for name, (data, why) in PICKLES.items()
        if name not in ("nothing", "a huge frame")  # another pickle follows
    }
    | {
        f"tensor: {name}": (legacy(state_dict(a=data), kept), why)
        for name, (data, kept, why) in TENSORS.items()
    }
)


@pytest.mark.parametrize("name", CASES)
def test_hostile_files(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends in one error that says what is wrong, and nothing is called."""
    data, problem = CASES[name]
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it was run"))
    error = refused(write(tmp_path / "model.pth", data))
    other = "its storage has another length", "its storage is missing", "leads out of its storage"
    said = [problem]
    if problem in other:  # the row of storages shows it first
        said += ["another length than the pickle says", "the keys of its storages", "is cut off"]
    if problem == "is cut off" and name.startswith("pickle:"):  # more bytes follow
        said += ["does not end with one object"]
    assert any(each in error.problem for each in said)
    assert type(error) in (HeaderError, TruncatedFileError)


def test_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    for stop in range(len(LEGACY_HEAD), len(GOOD)):
        with pytest.raises(CheckpointError, match="is cut off"):
            open_checkpoint(write(path, GOOD[:stop]))
    assert len(open_checkpoint(write(path, GOOD + b"beyond"))) == 2


def test_a_string_of_gigabytes(tmp_path: Path) -> None:
    """A sparse file whose pickle asks for 3 GB is refused by the limit."""
    path = write(tmp_path / "model.pth", LEGACY_HEAD + b"\x80\x04\x8d" + struct.pack("<Q", 3 << 30))
    os.truncate(path, 4 << 30)
    with pytest.raises(HeaderError, match="its pickle is too long"):
        open_checkpoint(path)


@settings(max_examples=few(1500), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=mutated((GOOD, legacy(state_dict(a=tensor(of=_view(1, 3)))))))
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Nothing but our errors comes out, and what opens can be read."""
    open_hostile(write(tmp_path_factory.getbasetemp() / "row.pth", data))


def test_the_seed_of_the_fuzzer_opens(tmp_path: Path) -> None:
    """Else it would find nothing."""
    path = write(tmp_path / "model.pth", GOOD)
    expected: dict[str, Any] = torch.load(path, weights_only=True)
    check(path, expected)
