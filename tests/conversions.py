"""Converting in tests, and reading what came of it by plain reads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from streamload.cast.reference import cast_array
from streamload.checkpoint.checkpoint import open_checkpoint
from streamload.conversion.convert import ConvertReport, convert
from streamload.dtypes import DType


def quiet(source: Path, destination: Path, **arguments: Any) -> ConvertReport:
    """Convert without telling how far it is, or what overflowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that values overflowed
        return convert(source, destination, **({"progress": False} | arguments))


def tensors_of(path: Path) -> dict[str, tuple[DType, tuple[int, ...], bytes]]:
    """Every tensor by plain reads: dtype, shape, bytes."""
    found = {}
    for info in open_checkpoint(path).tensors.values():
        assert isinstance(info.shard, Path)
        with open(info.shard, "rb") as file:
            file.seek(info.start)
            found[info.name] = (info.dtype, info.shape, file.read(info.nbytes))
    return found


def reference(data: bytes, src: DType, dst: DType) -> bytes:
    """The bytes that numpy casts them to."""
    if src is dst:
        return data
    return bytes(cast_array(np.frombuffer(data, src.numpy), dst).tobytes())


def same_values(found: bytes, expected: bytes, dtype: DType) -> bool:
    """The same bits, payloads of NaN aside."""
    left, right = (np.frombuffer(data, dtype.numpy) for data in (found, expected))
    if dtype.kind != "float":
        return found == expected
    with np.errstate(invalid="ignore"):  # a signalling NaN
        nan = np.isnan(left) & np.isnan(right)
    bits = np.frombuffer(found, f"V{dtype.itemsize}") == np.frombuffer(
        expected, f"V{dtype.itemsize}"
    )
    return bool(np.all(nan | bits))


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def visible(folder: Path) -> list[str]:
    """What others see in a folder."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]
