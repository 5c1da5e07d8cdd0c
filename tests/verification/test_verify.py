"""`verify`: finds every difference, by bytes of its own reading, in bounded memory."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import dequant_samples
import forked
import ml_dtypes
import needs
import numpy as np
import pytest
from safetensors_files import write_arrays, write_safetensors

import streamload
from streamload import RowRange, Source, open_checkpoint
from streamload.core.tensors import RowTranspose
from streamload.planning.quant_policy import coded
from streamload.verification.verify import Mismatch, _blocks, verify

TENSORS = {
    "bf": ("BF16", (4, 8), np.arange(32, dtype=np.float32).astype(ml_dtypes.bfloat16).tobytes()),
    "f32": ("F32", (3, 8), np.linspace(-3, 3, 24, dtype=np.float32).tobytes()),
    "ids": ("I64", (5,), np.arange(5).tobytes()),
    "nan": ("BF16", (2,), b"\xff\x7f\x81\xff"),
    "one": ("F16", (), b"\x00\x3c"),
    "none": ("F32", (0, 3), b""),
}


def load(path: Path, device: str = "host", **arguments: Any) -> streamload.LoadReport:
    return streamload.load_state_dict(
        None, path, device=device, budget="1MB", progress=False, **arguments
    )


@pytest.mark.parametrize("device", ["host", "CPU", "CL"])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16", "float32"])
def test_a_load_is_verified(tmp_path: Path, device: str, dtype: str) -> None:
    if device != "host":
        needs.device(device)
    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    report = load(path, device, dtype=dtype)
    done: list[int] = []
    assert verify(report, open_checkpoint(path), progress=done.append) == []
    assert done[-1] == sum(p.nbytes for p in report.plan.placements)


@pytest.mark.parametrize("name", ["bf", "f32", "ids", "one"])
def test_one_byte_is_enough(tmp_path: Path, name: str) -> None:
    """A bit that flips on the device is found, with the element and both values."""
    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    report = load(path, dtype="float16")
    array = report.state_dict[name].reshape(-1)
    element = len(array) - 1
    before = array[element:].tobytes()
    array.view(np.uint8)[-1] ^= 1
    after = array[element:].tobytes()
    assert verify(report, open_checkpoint(path)) == [
        Mismatch(name, element, before.hex(), after.hex())
    ]


@pytest.mark.parametrize("device", ["CPU", "CL"])
def test_a_byte_in_the_memory_of_a_device(tmp_path: Path, device: str) -> None:
    needs.device(device)
    from tinygrad import Tensor, dtypes

    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    report = load(path, device)
    value = report.state_dict["ids"]
    changed = [0, 1, 2, 7, 4]
    value.assign(Tensor(changed, device=device, dtype=dtypes.int64)).realize()
    (found,) = verify(report, open_checkpoint(path))
    assert (found.name, found.element) == ("ids", 3)
    assert str(found) == f"ids: element 3: expected {'03':0<16}, found {'07':0<16}"


def test_a_difference_beyond_the_first_block(tmp_path: Path) -> None:
    """Elements are counted over the blocks in which a tensor is compared."""
    values = np.arange(5_000_000, dtype=np.uint16)
    path = write_arrays(tmp_path / "m.safetensors", {"w": values})
    report = streamload.load_state_dict(None, path, device="host", progress=False)
    report.state_dict["w"][4_500_001] += 1
    (found,) = verify(report, open_checkpoint(path))
    assert found.element == 4_500_001


def test_a_checkpoint_that_changed(tmp_path: Path) -> None:
    """The file is read again, not remembered: what it says now is what is expected."""
    path = write_safetensors(tmp_path / "m.safetensors", TENSORS)
    report = load(path)
    code, shape, data = TENSORS["ids"]
    write_safetensors(path, TENSORS | {"ids": (code, shape, data[::-1])})
    assert [m.name for m in verify(report, open_checkpoint(path))] == ["ids"]


@pytest.mark.parametrize("device", ["host", "CPU"])
def test_names_may_be_anything(tmp_path: Path, device: str) -> None:
    """Empty names and dots at either end are legal, and tinygrad strips them."""
    if device != "host":
        needs.device(device)
    tensors = {name: ("F32", (2,), np.full(2, i, "<f4").tobytes()) for i, name in enumerate(NAMES)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    report = load(tmp_path, device)
    assert sorted(report.state_dict) == sorted(NAMES)
    assert verify(report, open_checkpoint(tmp_path)) == []


NAMES = ("", "a.", ".b", "a", "..")


def test_into_a_model(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"w": TENSORS["f32"]})
    model = {"w": np.zeros((3, 8), np.float32)}
    report = streamload.load_state_dict(model, path, progress=False)
    assert verify(report, open_checkpoint(path), model) == []
    model["w"][1, 1] = np.nan
    assert [m.element for m in verify(report, open_checkpoint(path), model)] == [9]


@pytest.mark.parametrize("out_of_range", ["inf", "clamp"])
@pytest.mark.filterwarnings("ignore:.*finite values")
def test_values_out_of_range(tmp_path: Path, out_of_range: Any) -> None:
    """What was clamped is compared with what is clamped."""
    data = np.array([1e6, -1e30, np.inf, np.nan, 3], np.float32)
    path = write_arrays(tmp_path / "m.safetensors", {"w": data})
    report = load(path, dtype="float16", out_of_range=out_of_range)
    assert verify(report, open_checkpoint(path)) == []
    report.state_dict["w"][0] = np.inf if out_of_range == "clamp" else 65504
    assert [m.element for m in verify(report, open_checkpoint(path))] == [0]


def test_sources_put_together_and_permuted(tmp_path: Path) -> None:
    """Row ranges of several tensors and permuted rows are read in their own order."""
    rng = np.random.default_rng(0)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = {
        n: ("F32", (8, 6), rng.standard_normal((8, 6)).astype(np.float32).tobytes())
        for n in (name, "a", "b")
    }
    path = write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    for mapping, changed in (
        ("hf-llama", "layers.0.attention.wq.weight"),
        ({"ab": ["b", RowRange("a", 2, 7), "b"]}, "ab"),
        ({"ab": Source([RowRange("a", 0, 0), "b"], RowTranspose(2, 2, 2))}, "ab"),
    ):
        report = load(path, mapping=mapping)
        assert verify(report, open_checkpoint(path)) == []
        array = report.state_dict[changed]
        array[[3, 4]] = array[[4, 3]]
        (found,) = verify(report, open_checkpoint(path))
        assert (found.name, found.element) == (changed, 18)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Comparing a tensor of 300 MB takes less than 40 MB beside it."""
    values = np.ones(75_000_000, np.float32)
    path = write_arrays(tmp_path / "m.safetensors", {"w": values})
    del values
    code = (
        "import resource, sys, streamload\n"
        "from streamload.verification.verify import verify\n"
        "c = streamload.open_checkpoint(sys.argv[1])\n"
        "r = streamload.load_state_dict(None, c.path, device='host', dtype='float16',"
        " progress=False)\n"
        "def anon(key):\n"
        "    return sum(int(l.split()[1]) for l in open('/proc/self/status') if key in l)\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # starts VmHWM again
        "before = anon('VmRSS')\n"
        "print(verify(r, c), anon('VmHWM') - before)\n"
    )
    found, _, grown_kib = forked.fresh(code, path).rpartition(" ")
    assert found == "[]"
    assert int(grown_kib) < 40_000


# --- quantised on the way, and dequantised --------------------------------------------------------


@pytest.mark.slow
def test_what_is_dequantized_streams(tmp_path: Path) -> None:
    """A weight of 64 MB of elements takes a few blocks; its values and scales stay as stored."""
    sample = dequant_samples.fp8(shape=(4096, 8192))
    path = dequant_samples.write(tmp_path, [sample, dequant_samples.mxfp4(shape=(2, 256, 4096))])
    report = streamload.load_state_dict(None, path, device="host", dtype="bfloat16", progress=False)
    del sample
    tracemalloc.start()
    try:
        assert verify(report, open_checkpoint(path)) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40_000_000
    array = report.state_dict["l.0.q.weight"]
    array[4000, 77] += 1
    (found,) = verify(report, open_checkpoint(path))
    assert (found.name, found.element) == ("l.0.q.weight", 4000 * 8192 + 77)


@pytest.mark.parametrize("format", ["nf4", "fp4", "bitsandbytes-int8", "int8"])
def test_codes_of_cuda_are_those_of_a_near_reciprocal(tmp_path: Path, format: str) -> None:
    x = np.random.default_rng(0).standard_normal((512, 384)).astype(np.float32)
    # elements at the bounds of codes, which hang on the last bit of the reciprocal
    scales = np.random.default_rng(1).uniform(0.5, 2, (512, 1)).astype(np.float32)
    x[:, ::2] = scales * np.float32(0.8833333) if format == "fp4" else scales * np.float32(0.5)
    x[:, ::64] = scales
    path = write_arrays(tmp_path / "m.safetensors", {"l.0.w.weight": x})
    report = streamload.load_state_dict(None, path, device="host", quant=format, progress=False)
    (p,) = (p for p in report.plan.placements if p.coding is not None and not p.coding.part)
    assert p.coding is not None
    made = coded(p.coding, p.src)
    rng = np.random.default_rng(2)
    ways = []
    for codec in made.codec.on_cuda:
        out = bytearray(p.nbytes)
        codec.encoder(made, p.src, "numpy").encode(memoryview(x.tobytes()), memoryview(out), 0)
        ways.append(np.frombuffer(out, np.uint8).reshape(-1, made.unit_nbytes))
    codes = np.array(ways)[rng.integers(0, len(ways), len(ways[0])), np.arange(len(ways[0]))]

    def found(there: bytes) -> bytes:
        beside: dict[str, bytes] = {}
        placed = p._replace(kind=replace(p.kind, cast="device"))
        read = lambda start, stop: there[start:stop]  # noqa: E731
        made = b"".join(_blocks(placed, open_checkpoint(path), report, 2**19, beside, read))
        assert len(beside) == len(made_parts)
        return made

    made_parts = made.parts[1:]
    assert found(codes.tobytes()) == codes.tobytes()
    wrong = codes.copy()
    wrong[5, 3] ^= 0x51
    assert found(wrong.tobytes()) != wrong.tobytes()
