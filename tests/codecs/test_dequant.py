"""Quantised weights that a dtype is asked for: dequantised on the way, rounded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dequant_samples
import distributed_helpers
import ml_dtypes
import numpy as np
import pytest
import stream_helpers
from dequant_helpers import decoders, load, view
from dequant_samples import Sample, entry, every, same, write
from recording import RecordingDevice
from safetensors_files import write_safetensors
from thread_group import World, run

import streamload
from streamload import RowRange, Source
from streamload.checkpoint.open import open_checkpoint
from streamload.codecs.cast_table import CastCounts
from streamload.codecs.decode import TARGETS
from streamload.codecs.scheme import Decoder, codec_of
from streamload.codecs.weights import Packed, read_whole
from streamload.core.dtypes import BF16, F16, F32, PACKED, DType
from streamload.core.tensors import Columns
from streamload.core.units import round_up
from streamload.errors import CheckpointError, OutOfRangeError, UnsupportedCastError
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.verification import diff as compare
from streamload.verification.verify import verify

torch = pytest.importorskip("torch")

SAMPLES = every()
IDS = [f"{s.name}" for s in SAMPLES]


def decoded(
    decoder: Decoder, info: Packed, data: bytes, dst: DType, first: int, stop: int
) -> tuple[Any, CastCounts]:
    bits = info.dtype.bits
    out = np.zeros(stop - first, dst.numpy)
    given = memoryview(data)[first * bits // 8 : (stop * bits + 7) // 8]
    return out, decoder.decode(given, memoryview(out.view(np.uint8).data), first) + CastCounts()


# --- decoders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
@pytest.mark.parametrize("dst", TARGETS, ids=str)
def test_kernel_and_oracle_agree(tmp_path: Path, sample: Sample, dst: DType) -> None:
    info, by = decoders(write(tmp_path, [sample]), sample.name, dst)
    (data,) = read_whole(info.headers, [info])
    numel = info.numel
    expected = sample.rounded(dst.name)
    if info.group.is_transposed:
        expected = np.swapaxes(expected, 1, 2)
    for first, stop in ((0, numel), (0, 1), (2, numel - 3), (5, numel), (31, 34), (64, 64)):
        found, counts = decoded(by["llvm"], info, data, dst, first, stop)
        other, also = decoded(by["numpy"], info, data, dst, first, stop)
        assert found.tobytes() == other.tobytes()
        assert counts == also
        assert np.array_equal(found, expected.reshape(-1)[first:stop])


@pytest.mark.parametrize("dst", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "nf4", "int8"])
@pytest.mark.parametrize("clamp", [False, True])
def test_scales_of_any_size(tmp_path: Path, kind: str, dst: DType, clamp: bool) -> None:
    """Subnormal, huge, short, negative and zero scales; every code, NaN and infinity included."""
    rng = np.random.default_rng(7)
    some = [1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e5, 1e36, 0.0, -1.0, 2.0**-14, 3 * 2.0**-130]
    scales = (rng.choice(some, 64) * rng.choice([1, rng.random()], 64)).astype(np.float32)
    codes = rng.integers(0, 256, (64, 256)).astype(np.uint8)
    codes[:, :] = np.where(rng.random((64, 256)) < 0.5, codes, np.arange(256, dtype=np.uint8))
    if kind == "nf4":
        sample = dequant_samples.four_bit("w.weight", (64, 64))
        sample.tensors["w.weight.absmax"] = entry(scales)
    elif kind == "int8":
        found = {"w.weight": entry(codes.view(np.int8)), "w.weight_scale": entry(scales[:, None])}
        sample = Sample("w.weight", found, codes)
    else:
        values = codes.view(getattr(ml_dtypes, kind))
        found = {"w.weight": entry(values), "w.weight_scale": entry(scales[:, None])}
        sample = Sample("w.weight", found, codes)
    out_of_range = "clamp" if clamp else "inf"
    info, by = decoders(write(tmp_path, [sample]), "w.weight", dst, out_of_range)
    (data,) = read_whole(info.headers, [info])
    one, counts = decoded(by["llvm"], info, data, dst, 0, info.numel)
    other, also = decoded(by["numpy"], info, data, dst, 0, info.numel)
    assert counts == also
    assert counts.flushed > 0  # by the scale of 0 at least
    nan = np.isnan(one.astype(np.float32)) & np.isnan(other.astype(np.float32))
    unsigned = f"u{dst.itemsize}"
    assert np.array_equal(one.view(unsigned)[~nan], other.view(unsigned)[~nan])
    assert not (clamp and kind == "int8" and np.isinf(one.astype(np.float32)).any())


@pytest.mark.parametrize(
    ("shape", "size"),
    [((64, 8192), [128, 128]), ((192, 256), [128, 128]), ((192, 256), None), ((64, 256), None)],
)
def test_blocks_of_fp8_are_those_of_the_configuration(
    tmp_path: Path, shape: tuple[int, int], size: list[int] | None
) -> None:
    """128 x 128 unless it says otherwise, even where the scales are as many as the rows."""
    sample = dequant_samples.fp8("l.0.q.weight", shape)
    stated = {} if size is None else {"weight_block_size": size}
    path = write(tmp_path, [sample], quantization_config={"quant_method": "fp8", **stated})
    found = load(path, "float32").state_dict["l.0.q.weight"]
    assert np.array_equal(found, sample.rounded("float32"))


def test_a_block_longer_than_any_matrix_is_all_of_it(tmp_path: Path) -> None:
    """The kernel counts in 64 bits, and a block of 2^64 rows is cut to those that there are."""
    sample = dequant_samples.fp8("l.0.q.weight", (64, 256))
    how = {"quant_method": "fp8", "weight_block_size": [2**64, 128]}
    path = write(tmp_path, [sample], quantization_config=how)
    found = load(path, "float32").state_dict["l.0.q.weight"]
    assert np.array_equal(found, sample.rounded("float32"))


def test_layouts_are_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = codec_of("fp8")
    monkeypatch.setattr("importlib.import_module", None)
    assert codec_of("fp8") is found is not None


def test_lines_are_those_of_their_places(tmp_path: Path) -> None:
    """Lines that were gathered have the scales of where they were."""
    sample = dequant_samples.fp8()
    info, by = decoders(write(tmp_path, [sample]), sample.name, F32)
    (data,) = read_whole(info.headers, [info])
    rows = np.frombuffer(data, np.uint8).reshape(300, 416)[100:200, 100:333]
    for decoder in by.values():
        out = np.zeros((100, 233), np.float32)
        to = memoryview(out.data).cast("B")
        decoder.decode(memoryview(rows.tobytes()), to, 100 * 416 + 100, 100, 416)
        assert np.array_equal(out, sample.rounded("float32")[100:200, 100:333])


def test_a_decoder_checks_lengths(tmp_path: Path) -> None:
    sample = dequant_samples.four_bit()
    _, by = decoders(write(tmp_path, [sample]), sample.name, F32)
    for data, out, first, lines in ((5, 44, 0, 1), (4, 33, 0, 1), (4, 28, 1, 2)):
        with pytest.raises(ValueError, match="do not become"):
            by["llvm"].decode(memoryview(bytes(data)), memoryview(bytearray(out)), first, lines, 6)
    with pytest.raises(ValueError, match="contiguous"):
        by["llvm"].decode(memoryview(bytes(4)), memoryview(bytes(32)), 0)


# --- loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_nbytes": 65536, "threads": 1},
        {"reader": "pread", "threads": 3},
        {"cast": "numpy"},
    ],
    ids=["whole", "chunks", "read", "numpy"],
)
def test_every_layout(tmp_path: Path, dtype: str, options: Any) -> None:
    """Each weight has its own name and shape, what belongs to it is gone, and each is verified."""
    path = write(tmp_path, SAMPLES, shards=3)
    report = load(path, dtype, **options)
    assert set(report.state_dict) == {*IDS, "norm.weight"}
    for sample in SAMPLES:
        found = report.state_dict[sample.name]
        assert found.dtype.name == dtype
        assert np.array_equal(found, sample.rounded(dtype)), sample.name
    assert verify(report, open_checkpoint(path)) == []
    assert Plan.from_json(report.plan.to_json()) == report.plan
    report.state_dict["l.0.experts.gate_up_proj"].reshape(-1)[77] += 1000
    (wrong,) = verify(report, open_checkpoint(path))
    assert (wrong.name, wrong.element) == ("l.0.experts.gate_up_proj", 77)


@pytest.mark.parametrize("device", ["torch:cpu", "tinygrad:CPU"])
def test_every_framework(tmp_path: Path, device: str) -> None:
    """The elements are those of the host."""
    path = write(tmp_path, SAMPLES)
    if device.startswith("tinygrad"):
        pytest.importorskip("tinygrad")
        try:
            found = load(path, "float32", device=device).state_dict
        except streamload.errors.DeviceError:
            pytest.skip("tinygrad's CPU does not work here")
        arrays = {name: tensor.numpy() for name, tensor in found.items()}
    else:
        found = load(path, "float32", device=device).state_dict
        arrays = {name: tensor.numpy() for name, tensor in found.items()}
    for sample in SAMPLES:
        assert np.array_equal(arrays[sample.name], sample.rounded("float32")), sample.name


@pytest.mark.parametrize("host_visible", [False, True])
@pytest.mark.parametrize("chunk_nbytes", [1000, 2**20])
def test_a_device_with_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_visible: bool, chunk_nbytes: int
) -> None:
    path = write(tmp_path, [s for s in SAMPLES if "experts" not in s.name], shards=2)
    monkeypatch.setattr(stream_helpers, "open_checkpoint", view)
    device = RecordingDevice(host_visible=host_visible, seed=3)
    stream = stream_helpers.prepare(path, [device], dtype="bfloat16", chunk_nbytes=chunk_nbytes)
    stream.go()
    stream.check_ended()
    assert device.wrongs == []
    for sample in SAMPLES:
        if "experts" not in sample.name:
            found = bytes(stream.loaded()[sample.name].data)
            assert found == sample.rounded("bfloat16").tobytes(), sample.name


def test_a_budget_of_the_prediction_is_enough(tmp_path: Path) -> None:
    """What the plan counts, with the scales that are held, is what a load may take."""
    path = write(tmp_path, SAMPLES)
    for options in ({}, {"reader": "pread", "threads": 1}):
        whole: Any = {"dtype": "bfloat16", "device": "host", **options}
        (device,) = streamload.plan(path, budget="1GB", **whole).devices
        report = load(path, budget=device.peak_nbytes, **options)
        assert report.held_nbytes["host"] <= device.peak_nbytes
        with pytest.raises(streamload.errors.PlanInfeasibleError):
            load(path, budget=device.resident_nbytes, **options)


def test_without_a_dtype_all_stays(tmp_path: Path) -> None:
    """Members are loaded as they are stored; so are those that a pattern does not name."""
    path = write(tmp_path, SAMPLES)
    tensors = open_checkpoint(path).tensors
    assert set(load(path, None).state_dict) == set(load(path, "checkpoint").state_dict)
    assert set(load(path, None).state_dict) == set(tensors)
    some = load(path, {"l.0.q.*": "float16", "*.experts.gate_up_proj": "bfloat16"}).state_dict
    gone = {*(n for n in tensors if n.startswith(("l.0.q.", "l.0.experts")))}
    assert set(some) == (set(tensors) - gone) | {"l.0.q.weight", "l.0.experts.gate_up_proj"}
    assert some["l.0.q.weight"].dtype == np.float16
    assert some["l.0.o.weight"].dtype == np.uint8


def test_rows_that_are_put_together(tmp_path: Path) -> None:
    """Parts, stacks and transposes of a weight have the scales of where they were."""
    samples = [
        dequant_samples.fp8("a.weight", (300, 64), seed=1),
        dequant_samples.fp8("b.weight", (200, 64), seed=2),
        dequant_samples.four_bit("c.weight", (40, 64)),
    ]
    path = write(tmp_path, samples)
    a, b, c = (s.rounded("float32") for s in samples)
    mapping = {
        "rows": Source([RowRange("a.weight", 130, 290), RowRange("b.weight", 0, 200)]),
        "columns": Source([RowRange("b.weight", 3, 200, Columns(7, 50, 64))], shape=(197, 43)),
        "turned": Source("a.weight", transpose=True),
        "turned 4": Source("c.weight", transpose=True),
        "half": Source([RowRange("c.weight", 11, 40)]),
    }
    for options in ({}, {"chunk_nbytes": 1024, "threads": 1}, {"reader": "pread"}):
        report = load(path, "float32", mapping=mapping, **options)
        found = report.state_dict
        assert np.array_equal(found["rows"], np.concatenate([a[130:290], b]))
        assert np.array_equal(found["columns"], b[3:200, 7:50])
        assert np.array_equal(found["turned"], a.T)
        assert np.array_equal(found["turned 4"], c.T)
        assert np.array_equal(found["half"], c[11:])
        assert verify(report, open_checkpoint(path)) == []
    odd = write(tmp_path / "odd", [dequant_samples.four_bit("c.weight", (40, 63))])
    with pytest.raises(streamload.errors.StateDictMismatchError, match="whole bytes"):
        load(odd, "float32", mapping={"half": Source([RowRange("c.weight", 11, 40)])})


class _Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(416, 300, bias=False)
        self.o = torch.nn.Linear(130, 37, bias=False)
        self.experts = torch.nn.Module()
        self.experts.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 192, 40))


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_model_of_plain_layers(tmp_path: Path, dtype: Any) -> None:
    """A model that does not hold weights as they are stored gets them dequantised, to its dtype."""
    samples = [dequant_samples.fp8("q.weight"), dequant_samples.four_bit("o.weight")]
    samples.append(dequant_samples.mxfp4("experts.gate_up_proj"))
    path = write(tmp_path, samples)
    (path / "0.safetensors").unlink()
    tensors = {name: given for s in samples for name, given in s.tensors.items()}
    dequant_samples.write_safetensors(path / "model.safetensors", tensors)
    model = _Model().to(torch.bfloat16)
    streamload.load_state_dict(model, path, dtype=dtype, progress=False)
    for sample in samples:
        found = model.get_parameter(sample.name)
        assert found.dtype is getattr(torch, dtype or "bfloat16")
        assert same(found, sample.rounded(dtype or "bfloat16"))


def test_a_model_that_holds_them_packed(tmp_path: Path) -> None:
    """Where a model's parameters have the stored dtypes, they get what is stored."""
    sample = dequant_samples.fp8("q.weight")
    path = tmp_path / "model.safetensors"
    dequant_samples.write_safetensors(path, sample.tensors)
    model = {
        "q.weight": torch.empty(300, 416, dtype=torch.float8_e4m3fn),
        "q.weight_scale_inv": torch.empty(3, 4),
    }
    streamload.load_state_dict(model, path, dtype="bfloat16", device="torch:cpu", progress=False)
    assert model["q.weight"].dtype is torch.float8_e4m3fn
    assert model["q.weight"].view(torch.uint8).numpy().tobytes() == sample.tensors["q.weight"][2]


def test_split_plan_and_iterate(tmp_path: Path) -> None:
    """They know the weights by their names, and count what these become and what is held."""
    path = write(tmp_path, SAMPLES)
    made = streamload.plan(path, budget="1GB", dtype="bfloat16")
    assert {p.name for p in made.placements} == {*IDS, "norm.weight"}
    kinds = {p.src.name for p in made.placements if p.src.is_packed}
    assert kinds == {d.name for d in PACKED.values() if d.block == 1}  # others are of GGUF
    sizes = [*(2 * s.exact.size for s in SAMPLES), 2 * 37]
    nbytes = sum(round_up(size, 64) for size in sizes)  # as a device that nobody looks at rounds
    assert made.resident_nbytes == nbytes
    assert "from mxfp4 to bfloat16 by llvm" in str(made)
    scales = max(p.scales_nbytes for p in made.placements)
    assert made.devices[0].peak_nbytes >= nbytes + 2 * scales > nbytes
    nodes = [Node("a", "500kB"), Node("b", "10MB")]
    parts = streamload.split(path, nodes=nodes, dtype="bfloat16")
    assert {p.name for p in parts.placements} == {*IDS, "norm.weight"}
    options: Any = {"device": "host", "budget": "10MB", "dtype": "float32"}
    for name, tensor in streamload.iterate(path, **options):
        expected = {s.name: s for s in SAMPLES}.get(name)
        assert expected is None or np.array_equal(tensor, expected.rounded("float32"))


@pytest.mark.parametrize("split", ["layers", "balanced", "replicate"])
def test_nodes(tmp_path: Path, split: str) -> None:
    """Ranks dequantise what they hold, with scales that may lie in another file."""
    path = write(tmp_path, SAMPLES, shards=3)
    load = distributed_helpers.load(path, split=split, dtype="float32")
    reports = distributed_helpers.succeeded(run(World(3), load))
    names = [name for report in reports for name in report.state_dict]
    assert sorted(names) == sorted([*IDS, "norm.weight"] * (3 if split == "replicate" else 1))
    for report in reports:
        for sample in SAMPLES:
            if sample.name in report.state_dict:
                assert np.array_equal(report.state_dict[sample.name], sample.rounded("float32"))


def test_counts_and_out_of_range(tmp_path: Path) -> None:
    """What overflows is counted, clamped or refused by name; a scale of 0 makes zeros."""
    values = np.full((2, 64), 448, ml_dtypes.float8_e4m3fn)
    scales = np.array([[1000], [0]], np.float32)
    tensors = {"w.weight": entry(values), "w.weight_scale": entry(scales)}
    path = write(tmp_path, [Sample("w.weight", tensors, values)])
    with pytest.warns(RuntimeWarning, match="infinite"):
        report = load(path, "float16")
    assert report.counts["w.weight"] == CastCounts(64, 64, 0)
    found = np.asarray(report.state_dict["w.weight"])
    assert np.isinf(found[0]).all()
    assert (found[1] == 0).all()
    with pytest.warns(RuntimeWarning, match="clamped"):
        clamped = load(path, "float16", out_of_range="clamp").state_dict["w.weight"]
    assert (np.asarray(clamped)[0] == 65504).all()
    with pytest.raises(OutOfRangeError, match=r"w\.weight"):
        load(path, "float16", out_of_range="error")


# --- bad input ------------------------------------------------------------------------------------


@np.errstate(over="ignore")
def _hostile() -> list[tuple[str, Sample, str, Any, str]]:
    """(what, weight, tensor, its new values, what the error says)."""
    nan, rng = np.float32(np.nan), np.random.default_rng(0)
    scales = dequant_samples.scales_of(rng, 3, 4)
    bad = scales.copy()
    bad[1, 2] = nan
    infinite = dequant_samples.scales_of(rng, 76)
    infinite[5] = np.inf
    nested = dequant_samples.four_bit(nested=True)
    outer = np.full(1, np.finfo(np.float32).max, np.float32)
    values = np.linspace(-2, 2, 256, dtype=np.float32)
    table = np.full(16, nan)
    exponents = np.full((3, 40, 6), 255, np.uint8)
    points = np.full((64, 1), 300, np.int32)
    return [
        ("fp8", dequant_samples.fp8(), "l.0.q.weight_scale_inv", bad, "1 of 12"),
        ("absmax", dequant_samples.four_bit(), "l.0.o.weight.absmax", infinite, "1 of 76"),
        ("map", dequant_samples.four_bit(), "l.0.o.weight.quant_map", table, "16 of 16"),
        ("nested", nested, "l.0.o.weight.nested_absmax", outer * values[-1], "finite"),
        ("mxfp4", dequant_samples.mxfp4(), "l.0.experts.gate_up_proj_scales", exponents, "720"),
        ("zeros", dequant_samples.int8(zeros=True), "l.0.k.weight_zero_point", points, "300"),
        (
            *("form", dequant_samples.bnb_int8(), "l.0.v.weight_format", np.ones((), np.uint8)),
            "rows of the weight",
        ),
    ]


@pytest.mark.parametrize("what", _hostile(), ids=lambda what: what[0])
def test_bad_scales_are_one_error(tmp_path: Path, what: tuple[str, Sample, str, Any, str]) -> None:
    """It names the file, the tensor, and what was found there; a conversion says the same."""
    _, sample, name, values, says = what
    dequant_samples._CODES["int32"] = "I32"
    with np.errstate(over="ignore"):
        sample.tensors[name] = entry(np.asarray(values))
    path = write(tmp_path / "in", [sample])
    for attempt in (
        lambda: load(path),
        lambda: streamload.convert(path, tmp_path / "out", dtype="bfloat16", progress=False),
    ):
        with pytest.raises(CheckpointError, match=says) as caught:
            attempt()
        assert caught.value.tensor == name
        assert str(caught.value.path).endswith("0.safetensors")


def test_what_cannot_be_dequantized_says_so(tmp_path: Path) -> None:
    """Other targets, other layouts and functions are refused before anything is read."""
    path = write(tmp_path / "in", [dequant_samples.fp8()])
    for dtype in ("float64", {"l.0.q.weight": "float8_e5m2"}):
        with pytest.raises(UnsupportedCastError, match="it goes to bfloat16, float16, float32"):
            load(path, dtype)
    twice = dequant_samples.fp8()
    twice.tensors["l.0.q.weight_global_scale"] = entry(np.ones(1, np.float32))
    with pytest.raises(UnsupportedCastError, match="global_scale") as caught:
        load(write(tmp_path / "two", [twice]))
    assert caught.value.tensor == "l.0.q.weight"
    other = dequant_samples.fp8()
    _, shape, data = other.tensors["l.0.q.weight"]
    other.tensors["l.0.q.weight"] = ("F8_E4M3FNUZ", shape, data)
    with pytest.raises(UnsupportedCastError, match="fnuz"):
        load(write(tmp_path / "fnuz", [other]))
    with pytest.raises(ValueError, match="convert it first"):
        load(path, transform={"l.0.q.weight": lambda name, rows: rows})
    taken = dequant_samples.mxfp4()
    taken.tensors["l.0.experts.gate_up_proj"] = entry(np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match="has the name of a quantised weight"):
        load(write(tmp_path / "taken", [taken]))


# --- convert --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_convert(tmp_path: Path, dtype: str) -> None:
    """Each weight is written once, under its name; config.json says no more how it was stored."""
    path = write(tmp_path / "in", SAMPLES, shards=2, dtype="float32")
    out = tmp_path / "out"
    report = streamload.convert(path, out, dtype=dtype, progress=False, verify=True)
    config = json.loads((out / "config.json").read_text())
    assert config == {"dtype": dtype}
    there = open_checkpoint(out).tensors
    assert set(there) == {*IDS, "norm.weight"}
    found = load(out, "checkpoint").state_dict
    for sample in SAMPLES:
        assert there[sample.name].dtype.name == dtype
        assert np.array_equal(found[sample.name], sample.rounded(dtype)), sample.name
    by_load = load(path, dtype).counts
    assert {n: c for n, c in report.counts.items() if c.total} == {
        n: c for n, c in by_load.items() if c.total
    }
    again = streamload.convert(path, out, dtype=dtype, progress=False, resume=True)
    assert again.resumed == len(there)


def test_convert_cuts_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that begin within a column, within a byte and between matrices."""
    from streamload.conversion import convert
    from streamload.conversion.blocks import Way

    monkeypatch.setattr(convert, "choose_way", lambda *_, **__: Way(2, 4096))
    path = write(tmp_path / "in", SAMPLES)
    report = streamload.convert(path, tmp_path / "out", dtype="float16", progress=False)
    found = load(tmp_path / "out", "checkpoint").state_dict
    for sample in SAMPLES:
        assert np.array_equal(found[sample.name], sample.rounded("float16")), sample.name
    by_load = load(path, "float16").counts
    assert {n: c for n, c in report.counts.items() if c.total} == {
        n: c for n, c in by_load.items() if c.total
    }


def test_convert_what_follows_in_the_file(tmp_path: Path) -> None:
    """A plain tensor right behind the values of a quantised one is read for itself."""
    sample, norm = dequant_samples.fp8(shape=(256, 384)), np.linspace(-2, 2, 64, dtype=np.float32)
    values = {sample.name: sample.tensors[sample.name]}
    tensors = {**values, "norm.weight": entry(norm), **sample.tensors}
    write_safetensors(tmp_path / "in" / "0.safetensors", tensors)
    streamload.convert(tmp_path / "in", tmp_path / "out", dtype="bfloat16", progress=False)
    found = load(tmp_path / "out", "checkpoint").state_dict
    assert np.array_equal(found[sample.name], sample.rounded("bfloat16"))
    assert np.array_equal(found["norm.weight"], norm.astype(ml_dtypes.bfloat16))


def test_convert_of_some(tmp_path: Path) -> None:
    """What stays quantised is written as it is, and config.json stays with a note."""
    path = write(tmp_path / "in", SAMPLES)
    rules = {"l.0.q.weight": "bfloat16", "*.weight_scale": "checkpoint"}
    report = streamload.convert(path, tmp_path / "out", dtype=rules, progress=False)
    there = open_checkpoint(tmp_path / "out").tensors
    assert there["l.0.q.weight"].dtype is BF16
    assert "l.0.q.weight_scale_inv" not in there
    assert "l.1.q.weight_scale" in there
    assert "quantization_config" in json.loads((tmp_path / "out/config.json").read_text())
    assert any("still says" in note for note in report.plan.notes)


def test_convert_for_nodes(tmp_path: Path) -> None:
    """Each node has its part of the weights."""
    path = write(tmp_path / "in", SAMPLES)
    nodes = [Node("a", "500kB"), Node("b", "10MB")]
    streamload.convert(path, tmp_path / "out", dtype="float16", nodes=nodes, progress=False)
    names = [n for part in ("a", "b") for n in open_checkpoint(tmp_path / "out" / part).tensors]
    assert sorted(names) == sorted({*IDS, "norm.weight"})
    for part in ("a", "b"):
        assert all(
            i.dtype is F16 for i in open_checkpoint(tmp_path / "out" / part).tensors.values()
        )


def test_planned_for_cuda(tmp_path: Path) -> None:
    """What is read in one piece is sent as it is stored; its scales are in the device's scratch."""
    path = write(tmp_path, SAMPLES)
    options: Any = {"device": "cuda:0", "budget": "1GB", "dtype": "bfloat16"}
    made = streamload.plan(path, **options)
    packed = {p.name: p for p in made.placements if p.src.is_packed}
    assert {p.cast for p in packed.values()} == {"device"}
    assert all(0 < p.there_nbytes <= p.scales_nbytes + 80 for p in packed.values())
    assert packed["l.0.experts.gate_up_proj"].order == "device"
    assert Plan.from_json(made.to_json()) == made
    by_host = streamload.plan(path, cast="llvm", **options)
    assert {p.cast for p in by_host.placements if p.src.is_packed} == {"llvm"}
    (device,) = made.devices
    slots = 2 * max(made.threads, 1) * made.slot_nbytes
    assert device.scratch_nbytes >= slots + sum(p.there_nbytes for p in packed.values())


# --- diff and verify ------------------------------------------------------------------------------


@pytest.mark.parametrize("block_nbytes", [None, 4096])
def test_diff_sees_what_dequantizing_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_nbytes: int | None
) -> None:
    """A conversion is equal to what numpy makes of the values, and one element is enough."""
    if block_nbytes is not None:
        monkeypatch.setattr(compare, "way", lambda *_: (block_nbytes, "auto"))
    path, out = write(tmp_path / "in", SAMPLES, shards=2), tmp_path / "out"
    streamload.convert(path, out, dtype="float16", progress=False)
    found = streamload.diff(path, out, dtype="float16", progress=False)
    assert found.ok, str(found)
    assert found.equal_count == len(IDS) + 1
    some = {"l.0.q.weight": "float16", "l.0.experts*": "bfloat16"}
    streamload.convert(path, tmp_path / "some", dtype=some, progress=False)
    assert streamload.diff(path, tmp_path / "some", dtype=some, progress=False).ok
    for name in IDS:
        info = open_checkpoint(out).tensors[name]
        at = info.stop - 2
        with open(info.shard, "r+b") as file:
            file.seek(at)
            last = file.read(2)
            file.seek(at)
            file.write(bytes([last[0] ^ 1, last[1]]))
        (difference,) = streamload.diff(path, out, dtype="float16", progress=False).differences
        assert difference.name == name
        assert difference.values is not None
        assert difference.values.count == 1
        assert difference.values.first == tuple(n - 1 for n in info.shape)
        with open(info.shard, "r+b") as file:
            file.seek(at)
            file.write(last)


def test_diff_of_parts_alone(tmp_path: Path) -> None:
    """Values without their scales are compared for what they are."""
    path = write(tmp_path / "in", SAMPLES)
    streamload.convert(path, tmp_path / "out", select="*.k.weight", progress=False)
    assert streamload.diff(path, tmp_path / "out", select="*.k.weight", progress=False).ok
    assert streamload.diff(tmp_path / "out", tmp_path / "out", progress=False).ok


def test_diff_by_numbers_and_out_of_range(tmp_path: Path) -> None:
    """Another dtype is compared as numbers; what overflows is an error where it is asked for."""
    sample = dequant_samples.fp8()
    path, out = write(tmp_path / "in", [sample]), tmp_path / "out"
    streamload.convert(path, out, dtype="bfloat16", progress=False)
    (weight, _) = streamload.diff(path, out, dtype="float32", progress=False).differences
    assert weight.dtypes == ("float32", "bfloat16")
    assert weight.compared
    large = {
        n: (c, s, np.full(s, 1e9, np.float32).tobytes() if "scale" in n else d)
        for n, (c, s, d) in sample.tensors.items()
    }
    path = write(tmp_path / "large", [dequant_samples.Sample(sample.name, large, sample.exact)])
    streamload.convert(path, tmp_path / "inf", dtype="float16", progress=False)
    streamload.convert(
        path, tmp_path / "most", dtype="float16", out_of_range="clamp", progress=False
    )
    assert streamload.diff(path, tmp_path / "inf", dtype="float16", progress=False).ok
    clamped = streamload.diff(
        path, tmp_path / "most", dtype="float16", out_of_range="clamp", progress=False
    )
    assert clamped.ok
    with pytest.raises(OutOfRangeError, match=sample.name):
        streamload.diff(
            path, tmp_path / "inf", dtype="float16", out_of_range="error", progress=False
        )
