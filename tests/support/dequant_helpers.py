"""Helpers that `test_dequant` shares with other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamload
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.codecs.decode import decoder_of
from streamload.codecs.weights import Packed, read_whole
from streamload.core.dtypes import DType
from streamload.planning.dequantize import asked, dequantized
from streamload.planning.moves import DTypePolicy


def load(path: Any, dtype: Any = "bfloat16", **options: Any) -> Any:
    options = {"device": "host", "progress": False} | options
    return streamload.load_state_dict(None, path, dtype=dtype, **options)


def view(path: Path, dtype: Any = "bfloat16") -> Checkpoint:
    checkpoint = open_checkpoint(path)
    return dequantized(checkpoint, asked(checkpoint, DTypePolicy.parse(dtype)))


def decoders(path: Path, name: str, dst: DType, out_of_range: Any = "inf") -> tuple[Packed, Any]:
    info = view(path, dst.name).tensors[name]
    assert isinstance(info, Packed)

    def read(member: Any) -> bytes:
        return next(read_whole(info.headers, [member]))

    return info, {
        engine: decoder_of(info, dst, read, engine=engine, out_of_range=out_of_range)
        for engine in ("llvm", "numpy")
    }
