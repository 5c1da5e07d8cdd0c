"""A new scheme is one file: a stored layout and a block type that this file adds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dequant_samples import Array, Sample, entry, write
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.codecs.decode import ScaledLayout, Weight, by_blocks, decoder_of, floats
from streamload.codecs.decode_blocks import WIDTH, Blocks, BlockWriter
from streamload.codecs.scheme import LIBRARIES, Library, LibraryRow, Read, codec_of
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core import dtypes
from streamload.core.dtypes import F32, DType
from streamload.core.registry import load
from streamload.core.tensors import TensorInfo
from streamload.planning import dequantize


class _Layout(ScaledLayout):
    """int8 under other names: ``weight.codes`` and ``weight.step``."""

    name = kind = "stepped"
    dtype = DType("codes with a step", "", 8, "float")

    def values(self, weight: QuantizedWeight) -> Any:
        known = codec_of("int8")
        assert isinstance(known, ScaledLayout)
        return known.values(weight)

    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        step = weight.members["scale"]
        return by_blocks(weight, self.values(weight), floats(step, read(step)))


def _find(layouts: Layouts, codes: TensorInfo) -> QuantizedWeight:
    name = codes.name.removesuffix(".codes")
    members = {"weight": codes, "scale": layouts.need(f"{name}.step", name, "scale")}
    return QuantizedWeight("stepped", name, members, codes.shape, codes.shape, 8)


class _Signs(Blocks):
    """Blocks of a float16 and 32 bytes that are 0 or 1."""

    def decoded(self, blocks: Array) -> Array:
        d = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return np.asarray(blocks[:, 2:].view(np.int8) * d, np.float32)

    def instructions(self, b: BlockWriter) -> None:
        b.store(b.scaled(b.load(2, WIDTH), b.half(0), WIDTH))


@pytest.fixture(autouse=True)
def _added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_PACKED", dtypes._PACKED.copy())
    monkeypatch.setattr(dequantize, "PACKED", dtypes._PACKED)
    signs = _Signs("signs", DType("signs", "", 8 * (2 + WIDTH), "float", WIDTH))
    library = Library(_Layout(), signs, find=_find)
    monkeypatch.setattr(sys.modules[__name__], "LIBRARY", library, raising=False)
    target = f"{__name__}:LIBRARY"
    row = LibraryRow(name="new", library=target, kinds="stepped|signs", leaves="codes")
    monkeypatch.setitem(LIBRARIES.others, "new", row)
    load.cache_clear()


@pytest.mark.parametrize("name", LIBRARIES.ours)
def test_a_row_states_what_its_library_has(name: str) -> None:
    row = LIBRARIES[name]
    library = row.load()
    assert {*row.schemes, *row.of_files} <= {codec.name for codec in library.codecs.values()}
    assert all(codec_of(name) is codec for name, codec in library.codecs.items())
    assert row.states == tuple(library.complete)


def test_a_stored_layout_loads_and_converts(tmp_path: Path) -> None:
    values = np.arange(-64, 64, dtype=np.int8).reshape(4, 32)
    tensors = {"w.codes": entry(values), "w.step": entry(np.array([0.5], np.float32))}
    path = write(tmp_path / "in", [Sample("w", tensors, values * 0.5)])
    assert open_checkpoint(path).groups["w"].kind == "stepped"
    (weight,) = (t for n, t in streamload.iterate(path, dtype="float32", device="host") if n == "w")
    assert np.array_equal(np.asarray(weight), values * np.float32(0.5))
    streamload.convert(path, tmp_path / "out", dtype="float16", progress=False, verify=True)
    assert "w" in open_checkpoint(tmp_path / "out").tensors


def test_a_block_type_is_decoded(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"w": ("U8", (34,), bytes([0, 60, *range(32)]))})
    (info,) = open_checkpoint(tmp_path).tensors.values()
    layout = codec_of("signs")
    assert isinstance(layout, Blocks)
    weight = QuantizedWeight("signs", "w", {"weight": info}, (32,), (32,), 8)
    packed = Packed("w", layout.dtype, (32,), info.shard, info.start, info.stop, weight, ())
    for engine in ("llvm", "numpy"):
        decoder = decoder_of(packed, F32, lambda _: b"", engine=engine, out_of_range="inf")  # type: ignore[arg-type]
        out = np.zeros(32, np.float32)
        decoder.decode(memoryview(bytes([0, 60, *range(32)])), memoryview(out).cast("B"), 0)
        assert np.array_equal(out, np.arange(32, dtype=np.float32))
