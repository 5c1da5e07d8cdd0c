"""What refers to the same dict, list or storage in a pickle, as torch's own unpickler has it."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from parameters import few
from torch_files import archive, integer, pickle_of, storage, tensor, text, tuple_of, write

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import HeaderError
from streamload.formats.torch import unpickler as torch_pickle
from streamload.formats.torch.globals import Opaque, PickleError, Tensor, key_of

torch = needs.module("torch")

_ORDERED = b"ccollections\nOrderedDict\n"
_COUNTER = b"ccollections\nCounter\n"
_STORAGES = {str(key): np.arange(4, dtype="<f4").tobytes() for key in range(3)}


def _of(key: int, kind: str = "FloatStorage") -> bytes:
    """A tensor whose only element is the first but ``key`` of its storage."""
    of = storage(str(key), kind=kind)
    return tensor((1,), (1,), offset=key, of=of)


def _copied(kind: bytes = _ORDERED) -> bytes:
    """``{"a": 0}``, a copy of it as the result, and ``"a": 1`` set in the first afterwards."""
    first = b"}q\0" + text("a") + _of(0) + b"s"
    copy = kind + tuple_of(b"h\0") + b"Rq\1"
    changed = b"h\0" + text("a") + _of(1) + b"s"
    return b"}(" + text("x") + first + text("y") + copy + text("z") + changed + b"u"


@pytest.mark.parametrize("kind", [_ORDERED, _COUNTER], ids=["OrderedDict", "Counter"])
def test_a_dict_of_another_is_a_copy(tmp_path: Path, kind: bytes) -> None:
    path = write(tmp_path / "model.pth", archive(pickle_of(_copied(kind)), _STORAGES))
    theirs = torch.load(path, weights_only=True)
    for key in "xyz":
        info = open_checkpoint(path, key=key).tensors["a"]
        at = open_checkpoint(path, key="y").tensors["a"].start
        same = float(theirs[key]["a"]) == float(theirs["y"]["a"])
        assert (info.start == at) == same


def test_copies_take_linear_time(tmp_path: Path) -> None:
    """A dict of many entries that is copied again and again is refused."""
    many = b"}(" + b"".join(text(str(i)) + b"N" for i in range(2000)) + b"uq\1"
    body = _ORDERED + b"q\0" + tuple_of(many) + b"q\2](" + b"h\0h\2R" * 2000 + b"e"
    path = write(tmp_path / "model.pth", archive(pickle_of(b"}" + text("a") + body + b"s")))
    with pytest.raises(HeaderError, match=r"REDUCE at byte.*copies of copies"):
        open_checkpoint(path)


@pytest.mark.parametrize(("other", "numel"), [("IntStorage", 4), ("HalfStorage", 8)])
def test_a_storage_has_one_dtype(tmp_path: Path, other: str, numel: int) -> None:
    """Where a file says two of one, torch reads both as the first: it is refused."""
    first, second = tensor(), tensor(of=storage(kind=other, numel=numel))
    body = b"}(" + text("a") + first + text("b") + second + b"u"
    path = write(tmp_path / "model.pth", archive(pickle_of(body)))
    assert torch.load(path, weights_only=True)["b"].dtype == torch.float32
    with pytest.raises(HeaderError, match=r"one dtype and length of storage '0'"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "views", [("float8_e4m3fn", "uint8"), ("uint8", "uint16"), ("uint16", "uint32")]
)
def test_dtypes_that_may_share_a_storage(tmp_path: Path, views: tuple[str, str]) -> None:
    """What torch.save writes of several dtypes in one storage: those it stores as bytes."""
    path = tmp_path / "model.pth"
    data = torch.arange(16, dtype=torch.uint8)
    torch.save({name: data.view(getattr(torch, name)) for name in views}, path)
    report = streamload.load_state_dict(None, path, device="cpu", progress=False)
    for name, tensor_there in torch.load(path, weights_only=True).items():
        mine = report.state_dict[name]
        assert mine.dtype == tensor_there.dtype
        assert torch.equal(mine.view(torch.uint8), tensor_there.view(torch.uint8))


# --- any pickle -----------------------------------------------------------------------------------


class _Writer:
    """Writes pickles whose dicts and lists refer to each other, and change after they are used."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kept: list[str] = []  # by number of the memo, what is there

    def pickle(self) -> bytes:
        """A dict of all that was made."""
        made = [self._value(3) for _ in range(self._random.randint(2, 8))]
        pairs = b"".join(text(str(i)) + value for i, value in enumerate(made))
        return pickle_of(b"}(" + pairs + b"u")

    def _key(self) -> bytes:
        one = b"G\x3f\xf0" + bytes(6)  # 1.0: the same key as 1 and True
        return self._random.choice([*map(text, "abc"), integer(1), b"\x88", one, b"N"])

    def _value(self, depth: int) -> bytes:
        kind = self._random.choice(("tensor", "dict", "list", "copy", "kept", "kept", "tuple"))
        if not depth or kind == "tensor":
            wrong = self._random.random() < 0.02
            return _of(self._random.randrange(3), "IntStorage" if wrong else "FloatStorage")
        if kind == "kept" and self._kept:
            number = self._random.randrange(len(self._kept))
            return b"h" + bytes([number]) + self._changes(self._kept[number], depth)
        if kind == "dict":
            made = self._random.choice((b"}", _ORDERED + b")R", _COUNTER + b")R"))
            return self._keep(made, "dict" if made == b"}" else "ordered", depth)
        if kind == "list":
            return self._keep(b"]", "list", depth)
        if kind == "tuple":
            return tuple_of(*(self._value(depth - 1) for _ in range(2)))
        class_ = self._random.choice((_ORDERED, _COUNTER))
        dicts = [i for i, kept in enumerate(self._kept) if kept != "list"]
        if dicts and self._random.random() < 0.7:
            given = b"h" + bytes([self._random.choice(dicts)])
        else:
            given = self._keep(b"}", "dict", depth - 1)
        return self._keep(class_ + tuple_of(given) + b"R", "ordered", depth)

    def _keep(self, made: bytes, kind: str, depth: int) -> bytes:
        """An object that is kept before it is filled, as picklers do."""
        if len(self._kept) == 200:
            return made
        self._kept.append(kind)
        number = bytes([len(self._kept) - 1])
        return made + b"q" + number + self._changes(kind, depth)

    def _changes(self, kind: str, depth: int) -> bytes:
        out = b""
        for _ in range(self._random.choice((0, 0, 1, 1, 2))):
            values = [self._value(depth - 1) for _ in range(self._random.randint(1, 2))]
            if kind == "list":
                out += b"(" + b"".join(values) + b"e" if len(values) > 1 else values[0] + b"a"
            elif len(values) > 1:
                out += b"(" + b"".join(self._key() + value for value in values) + b"u"
            else:
                out += self._key() + values[0] + b"s"
        if kind == "ordered" and self._random.random() < 0.2:
            out += b"}" + text("attribute") + self._value(0) + b"sb"
        return out


def _check_same(mine: Any, theirs: Any, same: dict[int, int]) -> None:
    """Hold what we read to what torch does: types, order, values, and which are the same object."""
    if isinstance(theirs, torch.Tensor):
        assert type(mine) is Tensor and mine.storage is not None
        elements = np.frombuffer(_STORAGES[mine.storage.key], mine.dtype)
        assert str(theirs.dtype) == f"torch.{mine.dtype}"
        assert elements[mine.offset] == theirs[0]
    elif isinstance(theirs, (dict, list)):
        if id(theirs) in same:
            assert same[id(theirs)] == id(mine)
            return
        assert id(mine) not in same.values()
        same[id(theirs)] = id(mine)
        pairs = zip(theirs, mine, strict=True)
        if isinstance(theirs, dict):
            assert [key_of(key) for key in theirs] == [*mine]
            pairs = zip(theirs.values(), mine.values(), strict=True)
        for their, my in pairs:
            _check_same(my, their, same)
    elif isinstance(theirs, tuple):
        for my, their in zip(mine, theirs, strict=True):
            _check_same(my, their, same)
    else:
        assert type(mine) is Opaque or mine == theirs


def test_pickles_of_shared_objects() -> None:
    both = 0
    for seed in range(few(900)):
        data = _Writer(seed).pickle()
        try:
            theirs = torch.load(BytesIO(archive(data, _STORAGES)), weights_only=True)
        except Exception:  # torch's own checks; then there is nothing to compare
            continue
        try:
            mine = torch_pickle.load(data).root
        except PickleError as error:
            assert "one dtype" in error.expected or "of its own" in error.expected
            continue
        _check_same(mine, theirs, {})
        both += 1
    assert both > few(900) // 2
