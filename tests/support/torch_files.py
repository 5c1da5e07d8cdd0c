"""Files that torch.save writes, or could be taken for it: pickles and archives by hand."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path


def integer(number: int) -> bytes:
    raw = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage", view: bytes = b"") -> bytes:
    """Opcodes of a storage: its persistent id; ``view`` is None or a view in the old form."""
    named = f"ctorch\n{kind}\n".encode()
    return tuple_of(text("storage"), named, text(key), text("cpu"), integer(numel), view) + b"Q"


def tensor(
    shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,), offset: int = 0, of: bytes = b""
) -> bytes:
    numbers = (tuple_of(*map(integer, each)) for each in (shape, strides))
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = tuple_of(of or storage(), integer(offset), *numbers, b"\x89", hooks)
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"


def pickle_of(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def state_dict(**tensors: bytes) -> bytes:
    pairs = b"".join(text(name) + value for name, value in tensors.items())
    return pickle_of(b"}(" + pairs + b"u")


def archive(
    pickle: bytes, storages: Mapping[str, bytes] | None = None, prefix: str = "archive"
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr(f"{prefix}/data.pkl", pickle)
        made.writestr(f"{prefix}/byteorder", b"little")
        for key, data in ({"0": bytes(16)} if storages is None else storages).items():
            made.writestr(f"{prefix}/data/{key}", data)
        made.writestr(f"{prefix}/version", b"3\n")
    return out.getvalue()


#: The first three pickles of the form before version 1.6.
LEGACY_HEAD = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    + pickle_of(integer(1001))
    + pickle_of(b"}" + text("little_endian") + b"\x88s")
)


def legacy(
    pickle: bytes, storages: Mapping[str, bytes] | None = None, itemsize: int = 4, head: bytes = b""
) -> bytes:
    """A file as torch wrote it before version 1.6."""
    storages = {"0": bytes(16)} if storages is None else storages
    keys = pickle_of(b"](" + b"".join(map(text, storages)) + b"e")
    counted = (struct.pack("<q", len(data) // itemsize) + data for data in storages.values())
    return (head or LEGACY_HEAD) + pickle + keys + b"".join(counted)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
