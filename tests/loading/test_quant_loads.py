"""`quant=`: weights that are quantised while they stream, cut anywhere, on every device."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distributed_helpers
import ml_dtypes
import needs
import numpy as np
import pytest
from quant_loads_helpers import LAYERS, NAMES, Array, found_in, load, matrix, model, write
from recording import Faults, RecordingDevice
from safetensors_files import write_arrays
from stream_helpers import Run, prepare
from thread_group import World, run

import streamload
from streamload import RowRange, Source
from streamload.cli import main
from streamload.codecs.llvm import lack
from streamload.codecs.scheme import SCHEMES
from streamload.core.dtypes import BY_NAME
from streamload.core.tensors import RowTranspose
from streamload.errors import (
    FileChangedError,
    OutOfRangeError,
    PlanInfeasibleError,
    TruncatedFileError,
    UnsupportedCastError,
)
from streamload.loading.place import Devices
from streamload.planning.fit import NUMPY_SCRATCH_NBYTES
from streamload.planning.moves import TensorRequest, TensorRequests
from streamload.planning.plan import Plan
from streamload.planning.quant_policy import QuantPolicy, quantised

ROOT = Path(__file__).parents[2]
STACKED = tuple(name for name in NAMES if name != "bitsandbytes-int8")  # that is of matrices


@pytest.fixture(autouse=True)
def any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size, so that small matrices are cut anywhere."""
    monkeypatch.setattr("streamload.loading.prepare._LEAST_CHUNK_NBYTES", 1)


def parts_of(name: str, array: Array, format_name: str) -> dict[str, bytes]:
    src = BY_NAME[array.dtype.name]
    made = SCHEMES[format_name].of(array.shape, src)
    encoder = made.encoder(src, "numpy")
    codes = bytearray(made.parts[0].nbytes)
    encoder.encode(memoryview(array.tobytes()), memoryview(codes), 0)
    others = encoder.finish()
    found = {name: bytes(codes)}
    return found | {p.name(name): bytes(others[p.suffix]) for p in made.parts[1:]}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_the_weights_of_layers_are_quantized(tmp_path: Path, name: str, dtype: Any) -> None:
    arrays = model(dtype)
    path = write(tmp_path, arrays, shards=2)
    expected: dict[str, bytes] = {}
    for tensor, array in arrays.items():
        is_coded = tensor in LAYERS
        expected |= parts_of(tensor, array, name) if is_coded else {tensor: array.tobytes()}
    for chunk_nbytes, threads, reader in ((None, 2, "mmap"), (4096, 3, "pread"), (1000, 1, "auto")):
        given = {"chunk_nbytes": chunk_nbytes, "threads": threads, "reader": reader}
        report = load(path, quant=name, **given)
        assert found_in(report) == expected
        assert set(report.errors) == set(LAYERS)
        assert all(0 < counts.relative < 0.3 for counts in report.errors.values())
    assert "quantised" in str(report)
    assert json.loads(report.to_json())["errors"].keys() == report.errors.keys()
    assert Plan.from_json(report.plan.to_json()) == report.plan


@pytest.mark.parametrize("device", ["cpu", "CPU", "CL"])
def test_every_framework(tmp_path: Path, device: str) -> None:
    """The same bytes, read back from the device."""
    if device == "cpu":
        pytest.importorskip("torch")
    path = write(tmp_path, model(), shards=2)
    for name in NAMES:
        rules = {"*.experts.*": None, "*": name} if name not in STACKED else name
        load(path, quant=rules, device=device)


def test_patterns_decide(tmp_path: Path) -> None:
    """The first that matches; "*" alone spares what is small and delicate."""
    path = write(tmp_path, model())
    rules = {"*.mlp.down_proj.*": "q4_0", "lm_head*": "int8", "*.q_proj.*": None, "*": "q8_0"}
    report = load(path, quant=rules)
    made = {p.name: p.coding.format for p in report.plan.placements if p.coding is not None}
    assert made == {
        "lm_head.weight": "int8",
        "lm_head.weight_scale": "int8",
        **{f"model.layers.{i}.mlp.down_proj.weight": "q4_0" for i in range(2)},
        **{f"model.layers.{i}.mlp.experts.weight": "q8_0" for i in range(2)},
    }
    norm = load(path, quant={"*gate.weight": "int8"})
    assert {n for n in norm.errors} == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}


def test_without_layers_all_but_the_ends(tmp_path: Path) -> None:
    arrays = {n: matrix(1, 32, 64) for n in ("embedding.weight", "body.weight", "norm.weight")}
    report = load(write(tmp_path, arrays), quant="int8")
    assert "body.weight" in report.errors
    assert "norm.weight" not in report.errors


def test_norms_and_convolutions_of_layers_stay(tmp_path: Path) -> None:
    """But for the Linears of adaptive norms; a pattern that names them takes all."""
    names = ("norm.weight", "norm1.linear.weight", "norm1_context.linear.weight", "conv.weight")
    arrays = {f"blocks.{at}.{n}": matrix(at, 32, 64) for n in names for at in range(2)}
    for at in range(2):
        arrays[f"blocks.{at}.conv.weight"] = matrix(at, 32, 64).reshape(32, 16, 2, 2)
    path = write(tmp_path, arrays)
    linears = {name for name in arrays if ".linear." in name}
    assert load(path, quant="nf4").errors.keys() == linears
    assert load(path, quant={"blocks*": "nf4"}).errors.keys() == arrays.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk_nbytes", [None, 5000])
def test_a_matrix_is_transposed_before(tmp_path: Path, name: str, chunk_nbytes: int | None) -> None:
    """GPT-2's Conv1D: slabs of columns, put together."""
    whole = matrix(3, 192, 96)
    path = write(tmp_path, {"h.0.w": whole})
    mapping = {"h.0.w": Source("h.0.w", transpose=True)}
    for reader in ("mmap", "pread"):
        given = {"chunk_nbytes": chunk_nbytes, "reader": reader}
        report = load(path, quant=name, mapping=mapping, **given)
        assert found_in(report) == parts_of("h.0.w", np.ascontiguousarray(whole.T), name)


@pytest.mark.parametrize("name", NAMES)
def test_rows_change_places_before(tmp_path: Path, name: str) -> None:
    """Query rows of a Llama; rows of several files put together."""
    a, b = matrix(3, 32, 128), matrix(4, 16, 128)
    path = write(tmp_path, {"h.0.a": a, "h.0.b": b}, shards=2)
    order = RowTranspose(2, 2, 8)
    mapping = {
        "turned.weight": Source("h.0.a", transpose=order),
        "joined.weight": Source([RowRange("h.0.b", 3, 11), "h.0.a"]),
    }
    turned = a.reshape(2, 2, 8, 128).swapaxes(1, 2).reshape(32, 128)
    joined = np.concatenate([b[3:11], a])
    expected = parts_of("turned.weight", turned, name) | parts_of("joined.weight", joined, name)
    for chunk_nbytes in (None, 3000):
        report = load(path, quant=name, mapping=mapping, strict=False, chunk_nbytes=chunk_nbytes)
        assert found_in(report) == expected


def test_what_cannot_be_cut_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, {"h.0.w": matrix(1, 8, 50), "h.0.v": matrix(1, 8, 50)})
    with pytest.raises(UnsupportedCastError, match=r'q8_0.*50.*quant=\{"h.0.w": None'):
        load(path, quant={"*w": "q8_0"})
    with pytest.raises(UnsupportedCastError, match="whole blocks"):
        mapping = {"h.0.x": Source([RowRange("h.0.w", 0, 3), "h.0.v"])}
        load(path, quant={"*": "nf4"}, mapping=mapping, strict=False)
    both = write(tmp_path / "both", {"h.0.w": matrix(1, 8, 64), "h.0.w_scale": matrix(1, 8)})
    with pytest.raises(ValueError, match=r"h\.0\.w_scale.*has a tensor of that name"):
        load(both, quant={"*w": "int8"})
    with pytest.raises(ValueError, match=r"h\.0\.SCB.*two"):
        load(path, quant={"*": "bitsandbytes-int8"})
    with pytest.raises(ValueError, match="not 'q8'"):
        load(path, quant="q8")
    with pytest.raises(ValueError, match="no tensor's name matches"):
        load(path, quant={"*.mpl.*": "nf4"})


def test_a_name_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    path = write(tmp_path, {"h[0].w": matrix(1, 8, 50), "h[1].w": matrix(1, 8, 64)})
    with pytest.raises(UnsupportedCastError) as caught:
        load(path, quant="q8_0")
    said = str(caught.value).rpartition("quant=")[2]
    assert said == '{"h[[]0].w": None, "*": "q8_0"}'
    assert set(load(path, quant={"h[[]0].w": None, "*": "q8_0"}).errors) == {"h[1].w"}


def test_formats_that_are_no_text(tmp_path: Path) -> None:
    """A list is refused as any other value."""
    path = write(tmp_path, {"h.0.w": matrix(1, 8, 64)})
    with pytest.raises(ValueError, match=r"not \['nf4'\]"):
        load(path, quant=["nf4"])


def test_functions_and_adapters_come_before(tmp_path: Path) -> None:
    """Rows are changed in float32, and quantised from there: rounded once."""
    whole = matrix(3, 40, 128, dtype=ml_dtypes.bfloat16)
    path = write(tmp_path, {"h.0.w": whole})
    wide = whole.astype(np.float32) * np.float32(1.1)
    for name in NAMES:
        for chunk_nbytes in (None, 3000):
            report = load(
                path,
                quant=name,
                transform={"h.0.w": lambda rows: rows.astype(np.float32) * np.float32(1.1)},
                chunk_nbytes=chunk_nbytes,
            )
            found, expected = found_in(report), parts_of("h.0.w", wide, name)
            state = next((part for part in expected if "quant_state" in part), "")  # has the dtype
            assert found.pop(state, b"").replace(b"bfloat16", b"float32") == expected.pop(
                state, b""
            )
            assert found == expected


@pytest.mark.parametrize("reader", ["mmap", "pread"])
def test_units_longer_than_the_longest_chunk(tmp_path: Path, reader: str) -> None:
    """Rows that stay together have slots of their own length, beside tensors that are shorter."""
    small, whole = matrix(1, 1, 16), matrix(2, 4, 1000)
    path = write(tmp_path, {"h.0.a": small, "h.0.w": whole})
    given = {"chunk_nbytes": 64, "reader": reader}
    coded = found_in(load(path, quant={"h.0.w": "int8"}, **given))
    assert coded == {"h.0.a": small.tobytes()} | parts_of("h.0.w", whole, "int8")
    changed = found_in(load(path, transform={"h.0.w": lambda rows: rows + 1}, **given))
    assert changed["h.0.w"] == (whole + 1).tobytes()


GROWN = """
import json, sys
from pathlib import Path
import streamload

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    said = dict(line.split(":") for line in lines if ":" in line)
    return sum(int(said[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))

few, many = sys.argv[1:]
given = {"device": "host", "quant": "nf4-nested", "threads": 1, "progress": False}
streamload.load_state_dict(None, few, **given)  # what is compiled and imported is no part of it
checkpoint = streamload.open_checkpoint(many)
before = held()
report = streamload.load_state_dict(None, checkpoint, **given)
print(json.dumps([held() - before, report.predicted_nbytes["process"]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counters of Linux")
def test_many_parts_are_in_the_prediction(tmp_path: Path) -> None:
    array = matrix(1, 32, 64)
    few = write(tmp_path / "few", {f"layers.{i}.weight": array for i in range(20)})
    many = write(tmp_path / "many", {f"layers.{i}.weight": array for i in range(3000)})
    command = [sys.executable, "-c", GROWN, str(few), str(many)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    grown, predicted = json.loads(done.stdout)
    assert 0.6 * predicted < grown < predicted


def test_iterate_yields_all_parts(tmp_path: Path) -> None:
    path = write(tmp_path, model())
    found = dict(streamload.iterate(path, device="host", quant="int8", budget="10MB"))
    assert {n: a.tobytes() for n, a in found.items()} == found_in(load(path, quant="int8"))


def test_iterate_takes_no_auto(tmp_path: Path) -> None:
    path = write(tmp_path, model())
    with pytest.raises(ValueError, match='quant="auto" is for loads of all at once'):
        streamload.iterate(path, device="host", quant="auto")


def test_parts_stay_together_on_several_devices(tmp_path: Path) -> None:
    path = write(tmp_path, model())
    nodes = [streamload.Node("a", 60_000), streamload.Node("b", 300_000)]
    made = streamload.split(path, nodes=nodes, quant="int8")
    where = {p.name: p.device for p in made.placements}
    assert set(where.values()) == {"a", "b"}
    for name, device in where.items():
        assert where[name.removesuffix("_scale")] == device


def test_infinities_and_nan_are_counted(tmp_path: Path) -> None:
    whole = matrix(3, 40, 128)
    whole[3, 5], whole[7, 9] = np.nan, -np.inf
    path = write(tmp_path, {"h.0.w": whole})
    report = load(path, quant="int8")
    assert (report.errors["h.0.w"].nan, report.errors["h.0.w"].inf) == (1, 1)
    assert "1 NaN became 0" in str(report)
    write(tmp_path, {"h.0.w": np.full((4, 128), 1e6, np.float32)})
    with pytest.raises(OutOfRangeError, match=r"h\.0\.w"):
        load(path, quant="bitsandbytes-int8", out_of_range="error")


def test_a_budget_of_the_prediction_is_enough(tmp_path: Path) -> None:
    path = write(tmp_path, model())
    for name in STACKED:
        (device,) = streamload.plan(path, budget="1GB", device="host", quant=name).devices
        least = device.resident_nbytes
        report = load(path, quant=name, budget=device.peak_nbytes)
        assert report.held_nbytes["host"] <= device.peak_nbytes
        with pytest.raises(PlanInfeasibleError):
            load(path, quant=name, budget=least - 1)


def staged(path: Path, name: str, device: RecordingDevice, **options: Any) -> Run:
    """A stream into a device that behaves as badly as it may."""
    checkpoint = streamload.open_checkpoint(path)
    plain = prepare(path, [device], **options)
    wants = TensorRequests.of(
        checkpoint, [TensorRequest(p.name, p.shape, p.source) for p in plain.plan.placements]
    )
    coded = quantised(checkpoint, wants, QuantPolicy.parse(name).formats(checkpoint, wants))
    return prepare(path, [device], wants=coded, **options)


@pytest.mark.parametrize("host_visible", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_late_copies(tmp_path: Path, host_visible: bool, seed: int) -> None:
    rng = random.Random(seed)
    arrays = model()
    path = write(tmp_path, arrays, shards=rng.randint(1, 3))
    name = rng.choice(STACKED)
    device = RecordingDevice(host_visible=host_visible, seed=seed)
    chunk_nbytes, threads = rng.choice([1000, 5000, 2**20]), rng.randint(0, 3)
    run = staged(path, name, device, chunk_nbytes=chunk_nbytes, threads=threads)
    run.go()
    run.check_ended()
    assert device.wrongs == []
    expected: dict[str, bytes] = {}
    for tensor, array in arrays.items():
        is_coded = tensor in LAYERS
        expected |= parts_of(tensor, array, name) if is_coded else {tensor: array.tobytes()}
    assert {n: bytes(buffer.data) for n, buffer in run.loaded().items()} == expected
    if not host_visible:
        assert all(buffer.written_once for buffer in run.loaded().values() if buffer.data)


@pytest.mark.parametrize("operation", ["allocate", "staging", "copy", "wait", "release"])
@pytest.mark.parametrize("at", [1, 4, 15])
def test_faults_leave_nothing_behind(tmp_path: Path, operation: str, at: int) -> None:
    path = write(tmp_path, model())
    device = RecordingDevice(faults=Faults({operation: at}))
    run = staged(path, "int8", device, chunk_nbytes=5000)
    try:
        run.go()
    except RuntimeError as error:
        assert str(error) == "injected"
        run.target.fail()
    assert device.wrongs == []


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    """What was quantised from it is not kept."""
    path = write(tmp_path, model())
    file = path / "0.safetensors"
    checkpoint = streamload.open_checkpoint(path)
    with file.open("r+b") as out:
        out.truncate(file.stat().st_size - 100)
    with pytest.raises((FileChangedError, TruncatedFileError)) as caught:
        streamload.load_state_dict(None, checkpoint, device="host", quant="int8", progress=False)
    assert caught.value.state is not None and not caught.value.state.loaded


def test_auto_takes_the_least_loss_that_fits(tmp_path: Path) -> None:
    path = write(tmp_path, model(np.float16))
    needs = {
        name: streamload.plan(path, budget="1GB", device="host", quant=name).devices[0].peak_nbytes
        for name in (None, "q8_0", "nf4")
    }
    for name, nbytes in needs.items():
        made = streamload.plan(path, budget=nbytes, device="host", quant="auto")
        formats = {p.coding.format for p in made.placements if p.coding is not None}
        assert formats == ({name} if name else set())
        assert any("auto" in note and (name or "all fits") in note for note in made.notes)
    report = load(path, quant="auto", budget=needs["q8_0"])
    assert all(".layers." in name for name in report.errors) and report.errors
    with pytest.raises(PlanInfeasibleError):
        load(path, quant="auto", budget=100_000)
    with pytest.raises(PlanInfeasibleError, match='quant="q8_0"'):
        load(path, budget=needs["q8_0"])


@pytest.mark.parametrize(
    ("dtypes", "config", "took"),
    [
        (("float32",), {}, "float16"),
        (("float32", "float64"), {"dtype": "bfloat16"}, "bfloat16"),
        (("float32", "bfloat16"), {}, "bfloat16"),
        (("float32", "float16"), {"torch_dtype": "bfloat16"}, "float16"),
    ],
)
def test_auto_casts_before_it_quantizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtypes: Sequence[str], config: Any, took: str
) -> None:
    """Of float32, to the 16 bits that the configuration and the other weights have."""
    monkeypatch.setattr(Devices, "_native_bf16", lambda self, name: True)
    arrays = {
        f"layers.{i}.weight": matrix(i, 2048, 1024, dtype=BY_NAME[dtypes[i % len(dtypes)]].numpy)
        for i in range(4)
    }
    path = write(tmp_path, arrays)
    (path / "config.json").write_text(json.dumps(config))
    halved = 2 * 4 * 2**21
    enough = halved + 2**20 + (NUMPY_SCRATCH_NBYTES if lack() else 0)  # and buffers
    report = load(path, quant="auto", budget=enough, dtype=None)
    assert {tensor.dtype.name for tensor in report.state_dict.values()} == {took}
    assert any(f'took dtype="{took}", for no format needs' in note for note in report.notes)
    report = load(path, quant="auto", budget=halved - 1, dtype=None)
    assert any("took q8_0, for no format needs" in note for note in report.notes)
    report = load(path, quant="auto", budget=enough, dtype="checkpoint")  # which is asked for
    assert any("took q8_0" in note and "dtype=" not in note for note in report.notes)


@pytest.mark.parametrize("device", [pytest.param("CPU", marks=pytest.mark.slow), "CL", "host"])
def test_auto_asks_the_device_for_bfloat16(tmp_path: Path, device: str) -> None:
    """It takes bfloat16 where loads of bfloat16 keep it: not where it is emulated, or broken."""
    names = {}
    for dtype, options in (("float32", {"quant": "auto"}), ("bfloat16", {})):
        (tmp_path / dtype).mkdir()
        values = matrix(0, 8192, 1024, dtype=BY_NAME[dtype].numpy)
        path = write(tmp_path / dtype, {"layers.0.weight": values})
        (path / "config.json").write_text('{"dtype": "bfloat16"}')
        budget = 2 * 2**23 + 2**20 + (NUMPY_SCRATCH_NBYTES if lack() else 0)
        report = load(path, device=device, budget=budget, dtype=None, **options)
        names[dtype] = {p.dst.name for p in report.plan.placements}
    assert names["float32"] == names["bfloat16"]


def test_auto_leaves_weights_of_both_16_bits(tmp_path: Path) -> None:
    """Neither dtype holds the other's values."""
    kinds = (np.float32, np.float16, ml_dtypes.bfloat16)
    path = write(
        tmp_path, {f"layers.{i}.weight": matrix(i, 64, 64, dtype=kinds[i % 3]) for i in range(6)}
    )
    made = streamload.plan(path, budget=6 * 64 * 64 * 2, device="host", quant="auto")
    assert any("took q8_0, for no format needs" in note for note in made.notes)


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_rounded_once_to_float32(tmp_path: Path, name: str) -> None:
    """Codes, scales and errors are those of the float32 weights; beyond float32 is infinite."""
    single = model(np.float32)
    double = {n: a.astype(np.float64) * (1 + 2.0**-30) for n, a in single.items()}
    spoilt = double["model.layers.0.mlp.down_proj.weight"]
    spoilt[3, 5:7] = 1e300, -np.inf
    with np.errstate(over="ignore"):
        single = {n: a.astype(np.float32) for n, a in double.items()}
    quant = {"*experts*": None, "*": name} if name == "bitsandbytes-int8" else name
    found = load(write(tmp_path / "64", double), quant=quant, chunk_nbytes=4096)
    expected = load(write(tmp_path / "32", single), quant=quant)
    errors = {n: e.rounded() for n, e in expected.errors.items()}
    assert {n: e.rounded() for n, e in found.errors.items()} == errors and len(errors) > 3
    for tensor, one in expected.state_dict.items():
        there = found.state_dict[tensor]
        assert there.dtype == np.float64 or there.tobytes() == one.tobytes(), tensor
    whole = streamload.convert(tmp_path / "64", tmp_path / "out", quant=quant, progress=False)
    assert whole.errors == errors


def test_auto_passes_over_formats_that_cannot_hold_a_weight(tmp_path: Path) -> None:
    """Rows of 33 elements have no blocks of 32; the plan says so."""
    names = [f"layers.{i}.weight" for i in range(8)]
    path = write(tmp_path, {name: matrix(0, 33, 33) for name in names})
    made = streamload.plan(path, budget=12_000, device="host", quant="auto")
    (note,) = (note for note in made.notes if "auto" in note)
    assert "took int8" in note and "q8_0 cannot hold every weight" in note


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format for all, or by patterns."""
    path = write(tmp_path, model())
    flags = ["--device", "host", "--quant", "*.mlp.*=none", "--quant", "int8"]
    monkeypatch.setattr(sys, "argv", ["streamload", "load", str(path), *flags])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)
    assert "2 tensors, error" in capsys.readouterr().out


@pytest.mark.parametrize("quant", ["int8", {"*.mlp.*": "nf4", "*": "q8_0"}])
@pytest.mark.parametrize("split", ["layers", "balanced", "replicate"])
def test_nodes(tmp_path: Path, split: str, quant: Any) -> None:
    """Ranks quantise what they hold, as one process would: the head's rank leaves the head."""
    path = write(tmp_path, model(), shards=3)
    whole = found_in(load(path, quant=quant))
    loading = distributed_helpers.load(path, split=split, quant=quant, dtype="checkpoint")
    reports = distributed_helpers.succeeded(run(World(3), loading))
    names = [name for report in reports for name in report.state_dict]
    assert sorted(names) == sorted([*whole] * (3 if split == "replicate" else 1))
    for report in reports:
        found = found_in(report)
        assert found == {name: whole[name] for name in found}
        for name in report.errors:  # a weight and its parts are on one node
            assert all(part in found for part in whole if part.startswith(name))


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_blocks_that_streamload_wrote_are_dequantised(tmp_path: Path, format: str) -> None:
    """config.json says which tensors are blocks: dtype= makes floats of them, as of GGUF's."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 64)).astype(np.float32)
    name = "model.layers.0.q_proj.weight"
    write_arrays(tmp_path / "in" / "model.safetensors", {name: weight})
    streamload.convert(tmp_path / "in", tmp_path / "q", quant=format, progress=False)
    streamload.convert(tmp_path / "q", tmp_path / "out", dtype="float32", progress=False)
    found = streamload.open_checkpoint(tmp_path / "out")[name]
    assert (found.dtype.name, found.shape) == ("float32", (8, 64))
    options = {"device": "host", "progress": False}
    for path in (tmp_path / "q", tmp_path / "out"):
        state = streamload.load_state_dict(None, path, dtype="float32", **options).state_dict
        assert np.abs(state[name] - weight).max() < {"q8_0": 0.02, "q4_0": 0.3}[format]
    again = streamload.load_state_dict(None, tmp_path / "q", **options).state_dict
    assert again[name].dtype == np.uint8


def test_another_format_on_a_reload_is_refused(tmp_path: Path) -> None:
    torch = needs.module("torch")
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(64, 64)])})
    path = tmp_path / "model.safetensors"
    values = {n: t.numpy() for n, t in model.state_dict().items()}
    write_arrays(path, values)
    for format in ("q8_0", "q8_0", None):
        streamload.load_state_dict(model, path, quant=format, progress=False)
    kept = model["layers"][0].state_dict()
    for format in ("int8", "nf4", "q4_0"):
        with pytest.raises(ValueError, match=r"holds 1 weights as q8_0 already.*layers\.0\.weight"):
            streamload.load_state_dict(model, path, quant=format, progress=False)

        def rank(group: Any, format: str = format) -> Any:
            load, options = streamload.distributed.load_state_dict, {"progress": False}
            return load(model, path, group=group, quant=format, device="cpu", **options)

        (found,) = run(World(1), rank)
        assert isinstance(found, ValueError) and "holds 1 weights as q8_0 already" in str(found)
    assert all(torch.equal(kept[n], t) for n, t in model["layers"][0].state_dict().items())
