"""Hostile files of torch: pickles and tensors by hand, changed files, and what opening may take."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from torch_files import integer, pickle_of, state_dict, storage, tensor, text, tuple_of

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.checkpoint.shards import open_shard
from streamload.errors import CheckpointError, StreamloadError

# What opening takes, whatever is in a small file.
_FEW_NBYTES = 4 * 2**20


@contextmanager
def little_memory(nbytes: int = _FEW_NBYTES) -> Iterator[None]:
    """Fail where more was allocated at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def refused(path: Path) -> CheckpointError:
    most_nbytes = _FEW_NBYTES + 20 * path.stat().st_size
    with little_memory(most_nbytes), pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2000
    return raised.value


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo run >/dev/null",)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def called(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + tuple_of(*arguments) + b"R"


def _bomb() -> bytes:
    """Lists of the list before, twice each: 2**50 names, in 50 lists."""
    body = b"}" + text("a") + tensor() + b"s"
    for i in range(50):
        body = b"(d" + text("x") + body + b"q" + bytes([i]) + b"s" + text("y") + b"h" + bytes([i])
        body += b"s"
    return body


_TYPE = b"\x8c\x05torch\x8c\x06Tensor\x93"
_ARGUMENTS = tuple_of(storage(), integer(0), tuple_of(integer(4)), tuple_of(integer(1)))

#: By name: the pickle, and what the error says.
PICKLES: Mapping[str, tuple[bytes, str]] = {
    "REDUCE of os.system": (pickle.dumps({"a": _Runs()}, 2), "names posix.system"),
    "REDUCE of os.system, protocol 4": (pickle.dumps({"a": _Runs()}, 4), "names posix.system"),
    "REDUCE of eval": (pickle_of(called("builtins", "eval", text("1"))), "names builtins.eval"),
    "GLOBAL alone": (pickle_of(named("subprocess", "Popen")), "names subprocess.Popen"),
    "GLOBAL through an attribute": (
        pickle_of(text("torch") + text("load.__globals__") + b"\x93"),
        "names torch.load.__globals__",
    ),
    "a function of torch that loads": (
        pickle_of(called("torch", "load", text("/etc/passwd"))),
        "names torch.load",
    ),
    "a function of torch._utils": (
        pickle_of(called("torch._utils", "_import_dotted_name", text("os.system"))),
        "names torch._utils._import_dotted_name",
    ),
    "STACK_GLOBAL of no names": (pickle_of(b"K\x01K\x02\x93"), "STACK_GLOBAL at byte"),
    "INST": (pickle_of(b"(V1\nios\nsystem\n"), "INST at byte"),
    "OBJ": (pickle_of(b"(" + named("torch", "Size") + b"o"), "OBJ at byte"),
    "NEWOBJ": (pickle_of(named("torch", "Size") + b")\x81"), "NEWOBJ at byte"),
    "NEWOBJ_EX": (pickle_of(named("torch", "Size") + b")}\x92"), "NEWOBJ_EX at byte"),
    "BUILD of a tensor": (state_dict(a=tensor() + b"}b"), "BUILD at byte"),
    "BUILD of a list": (pickle_of(b"]}b"), "BUILD at byte"),
    "EXT1": (pickle_of(b"\x82\x01"), "EXT1 at byte"),
    "EXT4": (pickle_of(b"\x84\x01\x00\x00\x00"), "EXT4 at byte"),
    "PERSID in text": (pickle_of(b"Psomething\n"), "PERSID at byte"),
    "a persistent id of no storage": (
        pickle_of(tuple_of(text("module"), text("os"), text("x")) + b"Q"),
        "BINPERSID at byte",
    ),
    "a persistent id of another class": (
        state_dict(a=tensor(of=storage(kind="Tensor"))),
        "BINPERSID at byte",
    ),
    "REDUCE of a string": (pickle_of(text("eval") + b")R"), "REDUCE at byte"),
    "REDUCE of a tensor": (state_dict(a=tensor() + b")R"), "REDUCE at byte"),
    "a tensor of another's storage": (
        state_dict(a=called("torch._utils", "_rebuild_tensor_v2", text("0"))),
        "REDUCE at byte",
    ),
    "a type that rebuilds itself": (
        state_dict(
            a=called(
                "torch._tensor",
                "_rebuild_from_type_v2",
                named("torch._tensor", "_rebuild_from_type_v2"),
                _TYPE,
                _ARGUMENTS,
                b"}",
            )
        ),
        "REDUCE at byte",
    ),
    "a huge LONG4": (pickle_of(b"\x8b\xff\xff\xff\x7f"), "is cut off"),
    "a LONG4 below 0": (pickle_of(b"\x8b\xff\xff\xff\xff"), "is cut off"),
    "a huge string": (pickle_of(b"\x8d" + b"\xff" * 8), "is cut off"),
    "a huge bytearray": (pickle_of(b"\x96" + b"\xff" * 7 + b"\x7f"), "is cut off"),
    "a huge frame": (b"\x80\x04\x95" + b"\xff" * 8, "is cut off"),
    "a number without an end": (pickle_of(b"I" + b"9" * 99), "is cut off"),
    "a LONG that is no number": (pickle_of(b"Lx\n"), "LONG at byte"),
    "an object kept far from others": (pickle_of(b"Nr\xff\xff\xff\x7f"), "LONG_BINPUT at byte"),
    "an object that was never kept": (pickle_of(b"j\xff\xff\xff\x7f"), "LONG_BINGET at byte"),
    "an empty stack": (b"\x80\x020.", "POP at byte"),
    "a mark that is not there": (pickle_of(b"t"), "TUPLE at byte"),
    "a mark that stays": (pickle_of(b"(}"), "does not end with one object"),
    "two objects": (pickle_of(b"}}"), "does not end with one object"),
    "nothing": (b"", "is cut off"),
    "no STOP": (b"\x80\x02}", "is cut off"),
    "an unknown opcode": (b"\x80\x02\xff.", "is not a pickle"),
    "protocol 9": (b"\x80\x09}.", "PROTO at byte"),
    "a dict of odd length": (pickle_of(b"}(" + text("a") + b"u"), "SETITEMS at byte"),
    "SETITEMS of a list": (pickle_of(b"](" + text("a") + b"Nu"), "SETITEMS at byte"),
    "buffers out of band": (pickle_of(b"\x97"), "NEXT_BUFFER at byte"),
    "a string that is not UTF-8": (pickle_of(b"\x8c\x01\xff"), "SHORT_BINUNICODE at byte"),
    "a name of half a surrogate": (
        state_dict(a=tensor()).replace(b"\x01\0\0\0a", b"\x03\0\0\0\xed\xa0\x80"),
        "the name is not valid",
    ),
    "one list for many dicts": (
        pickle_of(
            named("collections", "OrderedDict")
            + b"q\0"
            + tuple_of(b"](" + tuple_of(text("a"), b"N") * 2000 + b"e")
            + b"q\1"
            + b"]("
            + b"h\0h\1R" * 2000
            + b"e"
        ),
        "REDUCE at byte",
    ),
    "a long key on many ways": (
        pickle_of(
            b"}"
            + text("k" * 10**5)
            + b"}("
            + b"".join(text(str(i)) + b"}" + text("a") + tensor() + b"s" for i in range(2000))
            + b"us"
        ),
        "holds several dicts of tensors",
    ),
    "many names on many ways": (pickle_of(_bomb()), "holds no tensors by name"),
}

#: By name: the tensor, the storages, and what the error says.
TENSORS: Mapping[str, tuple[bytes, dict[str, bytes], str]] = {
    "beyond its storage": (tensor((5,)), {"0": bytes(16)}, "leads out of its storage"),
    "an offset beyond it": (tensor(offset=1), {"0": bytes(16)}, "leads out of its storage"),
    "a huge offset": (tensor(offset=2**62), {"0": bytes(16)}, "leads out of its storage"),
    "an offset below 0": (tensor(offset=-1), {"0": bytes(16)}, "an offset, length or stride"),
    "strides beyond it": (tensor((2, 2), (3, 1)), {"0": bytes(16)}, "leads out of its storage"),
    "a stride below 0": (tensor((4,), (-1,)), {"0": bytes(16)}, "an offset, length or stride"),
    "a length below 0": (tensor((-4,)), {"0": bytes(16)}, "an offset, length or stride"),
    "a huge length": (tensor((2**70,), (0,)), {"0": bytes(16)}, "REDUCE at byte"),
    "a huge shape": (tensor((2**31, 2**31), (0, 0)), {"0": bytes(16)}, "the shape is too large"),
    "fewer strides": (tensor((2, 2), (1,)), {"0": bytes(16)}, "the shape and the strides"),
    "a thousand axes": (tensor((1,) * 1000, (1,) * 1000), {"0": bytes(16)}, "REDUCE at byte"),
    "no such storage": (tensor(of=storage("7")), {"0": bytes(16)}, "its storage is missing"),
    "a path for a storage": (
        tensor(of=storage("../../etc/passwd")),
        {"0": bytes(16)},
        "its storage is missing",
    ),
    "a key of 1 kB": (tensor(of=storage("7" * 1000)), {"0": bytes(16)}, "BINPERSID at byte"),
    "a storage that is shorter": (tensor(), {"0": bytes(8)}, "its storage has another length"),
    "a storage that is longer": (tensor(), {"0": bytes(64)}, "its storage has another length"),
    "a storage of a huge length": (
        tensor(of=storage(numel=2**62)),
        {"0": bytes(16)},
        "its storage has another length",
    ),
    "a length of a storage below 0": (
        tensor(of=storage(numel=-4)),
        {"0": bytes(16)},
        "BINPERSID at byte",
    ),
    "an empty storage": (tensor((1,), of=storage(numel=0)), {"0": b""}, "leads out"),
}


_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, *b"PK}]()tuqhQRbc.j\x8a\x8d\x95")


@st.composite
def mutated(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A file with some bytes changed, cut, doubled or moved."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.integers(0, 5))
        if kind <= 2:
            data[at] = draw(st.sampled_from(_INTERESTING) | st.integers(0, 255))
        elif kind == 3:
            count = draw(st.sampled_from((2, 4, 8)))
            number = draw(st.sampled_from((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data))))
            data[at : at + count] = (number % 2 ** (8 * count)).to_bytes(count, "little")
        elif kind == 4:
            stop = at + draw(st.integers(1, 40))
            data[at:stop] = b"" if draw(st.booleans()) else bytes(data[at:stop]) * 2
        else:
            del data[at:]
        if not data:
            return b""
    return bytes(data)


def read_all(checkpoint: Checkpoint) -> None:
    """Read every byte of what opened: no tensor leads out of the file."""
    (header,) = checkpoint.shards
    with open_shard(header) as reader:
        for info in header.tensors:
            if info.nbytes <= 2**20:
                out = bytearray(info.nbytes)
                reader.read_into(info.start, memoryview(out))


def open_hostile(path: Path) -> None:
    """Open a file in little memory, and read what opens; our errors are right."""
    with little_memory():
        try:
            checkpoint = open_checkpoint(path)
        except StreamloadError as error:
            assert len(str(error)) < 2000
            return
        read_all(checkpoint)
