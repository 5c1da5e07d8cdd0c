"""`limits=` of `open_checkpoint`: for services that open what others upload."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import irpa_files
import pytest
import torch_files
from safetensors_files import write_safetensors

from streamload import Limits, open_checkpoint
from streamload.errors import HeaderError
from streamload.files.header import check_nbytes, check_tensors, limited, most_nbytes

_EMPTY = struct.pack("<IQ", 0, 0)  # F32, at the beginning of the data
_ONE = ("U8", (1,), b"x")


def _sharded(folder: Path) -> Path:
    names = {f"t{i}": f"model-{i}.safetensors" for i in range(4)}
    for name, file in names.items():
        write_safetensors(folder / file, {name: _ONE})
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def _gguf(folder: Path) -> Path:
    """A set of two files, of which each is read to know the other."""
    for number in range(2):
        keys = {b"split.no": number, b"split.count": 2}
        pairs = [struct.pack("<Q", len(k)) + k + struct.pack("<IH", 2, n) for k, n in keys.items()]
        names = [b"t%d" % (2 * number + i) for i in range(2)]
        tensors = [
            struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 1, 0) + _EMPTY
            for name in names
        ]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
        path = folder / f"a-{number + 1:05}-of-00002.gguf"
        path.write_bytes(head + b"".join((*pairs, *tensors)) + bytes(64))
    return folder / "a-00001-of-00002.gguf"


def _pth(folder: Path) -> Path:
    tensors = {f"t{i}": torch_files.tensor() for i in range(4)}
    data = torch_files.archive(torch_files.state_dict(**tensors))
    return torch_files.write(folder / "model.pth", data)


def _irpa(folder: Path) -> Path:
    items = [irpa_files.Item(b"t%d" % i, b"x") for i in range(4)]
    return torch_files.write(folder / "model.irpa", irpa_files.archive(items))


_WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "safetensors": _sharded,
    "gguf": _gguf,
    "torch": _pth,
    "irpa": _irpa,
}


@pytest.mark.parametrize("name", _WRITERS)
def test_each_format_heeds_limits(tmp_path: Path, name: str) -> None:
    """Four tensors: of what is counted, the limit itself passes and one less does not."""
    path = _WRITERS[name](tmp_path)
    assert len(open_checkpoint(path)) == 4

    def opens(**limits: Any) -> bool:
        try:
            assert open_checkpoint(path, limits=Limits(**limits)) == open_checkpoint(path)
        except HeaderError as error:
            assert "limits=" in str(error.expected)
            return False
        return True

    assert [opens(tensors=n) for n in (0, 3, 4)] == [False, False, True]
    least, most = 0, 100_000
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if opens(header_nbytes=middle) else (middle + 1, most)
    # of all files, and of each once
    files = [p for p in tmp_path.iterdir() if p.is_file()]
    assert max(p.stat().st_size for p in files) // 4 < least < sum(p.stat().st_size for p in files)
    assert opens(header_nbytes=least, tensors=4)


def test_very_many_files_take_little_time(tmp_path: Path) -> None:
    begun = time.thread_time()
    with limited(Limits(header_nbytes=10**8, tensors=10**6)):
        for path in map(Path, map(str, range(20_000))):
            check_nbytes(path, "too long", 100)
            check_tensors(path, 1)
        assert most_nbytes(Path("new")) == 10**8 - 20_000 * 100
    assert time.thread_time() - begun < 2


def test_limits_are_of_one_call(tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    with pytest.raises(HeaderError, match="too many tensors"):
        open_checkpoint(path, limits=Limits(tensors=1))
    assert len(open_checkpoint(path)) == 4


@pytest.mark.parametrize("wrong", [{"tensors": -1}, {"header_nbytes": 1.5}, {"tensors": True}])
def test_invalid_limits(wrong: dict[str, Any]) -> None:
    """Only counts are limits."""
    with pytest.raises(ValueError, match="an integer of 0 or more"):
        Limits(**wrong)
