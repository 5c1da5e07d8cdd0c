"""Modules of torch through the staged pipeline, without a GPU: late copies, faults, Ctrl-C.

Copies are made one by one, or many reads and copies in one call ("bulk"), as the stream uses it:
the loop is the compiled one, with functions of the device as its driver.
"""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import enough, few, product
from recording import Disk, Faults, recorded

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import (
    CheckpointError,
    DeviceError,
    FileChangedError,
    OutOfRangeError,
    StreamloadError,
    TruncatedFileError,
)

torch = needs.module("torch")

from recorded_torch import RecordedTorchDevice  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch_staged_helpers import (  # noqa: E402
    KINDS,
    Made,
    OddError,
    Staged,
    _Shots,
    cutter,
    entries,
    fault,
    make,
    nn,
    prepare,
    same_bits,
    write,
)

from streamload.devices.torch import device as devices_torch  # noqa: E402

ROOT = str(Path(streamload.__file__).parent.parent)
CUT = (TruncatedFileError, FileChangedError)  # the time changes before the length
_DTYPES = {"replace": "checkpoint"}  # of a double, which would keep its dtype
#: Threads, and whether many reads and copies are made in one call; that takes a thread.
_FEW = [(0, False), (3, False), (1, True), (3, True)]
WAYS = pytest.mark.parametrize(("threads", "bulk"), _FEW)
MORE_WAYS = pytest.mark.parametrize(("threads", "bulk"), [*_FEW, (1, False)])
READERS = pytest.mark.parametrize("reader", ["mmap", "pread"])


def completes(failed: Staged, made: Made, **arguments: Any) -> None:
    bulk = failed.device.in_bulk
    device = RecordedTorchDevice(seed=7, in_bulk=bulk)
    again = prepare(failed.net, made, device, chunk_nbytes=200 if bulk else 1000, **arguments)
    again.go()
    again.check_loaded()


def in_bulk(device: RecordedTorchDevice) -> int:
    """How many reads were handed over in bulk."""
    return sum(int(str(detail)) for operation, detail in device.events if operation == "run")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return write(tmp_path_factory.mktemp("raw") / "x")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return write(tmp_path_factory.mktemp("sharded") / "x", shards=3, dtype="bfloat16")


@pytest.fixture
def disk() -> Iterator[Disk]:
    """The files are real; what can be read of them is what this disk says."""
    with recorded() as made:
        yield made


# --- right bytes ----------------------------------------------------------------------------------


@settings(max_examples=few(220), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    narrow=st.booleans(),
    bulk=st.booleans(),
    shared_memory=st.booleans(),
    threads=st.integers(0, 4),
    arguments=st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(
                [None, "float32", "float16", "checkpoint", {"*running*": "float16"}]
            ),
            "chunk_nbytes": st.sampled_from([24, 64, 100, 200, 1000, 2**20]),
            "reader": st.sampled_from(["mmap", "pread", "direct"]),
            "cast": st.sampled_from(["llvm", "numpy", "device"]),
        }
    ),
    seed=st.integers(0, 99),
)
def test_late_copies_in_any_order_fill_modules_right(
    raw: Made,
    sharded: Made,
    kind: str,
    narrow: bool,
    bulk: bool,
    shared_memory: bool,
    threads: int,
    arguments: dict[str, Any],
    seed: int,
) -> None:
    threads = max(threads, bulk)
    device = RecordedTorchDevice(
        threads=threads, shared_memory=shared_memory, seed=seed, in_bulk=bulk
    )
    run = prepare(make(kind), sharded if narrow else raw, device, threads=threads, **arguments)
    run.go()
    run.check_loaded()


@READERS
@pytest.mark.parametrize("threads", [0, 3])
def test_what_lies_together_is_read_at_once(
    raw: Made, disk: Disk, reader: str, threads: int
) -> None:
    device = RecordedTorchDevice(threads=threads)
    run = prepare(make("meta"), raw, device, threads=threads, reader=reader)
    run.go()
    run.check_loaded()
    copies = [detail for operation, detail in device.events if operation == "copy"]
    assert len(disk.reads) < len(copies)
    spans = [(info.start, info.stop) for info in run.checkpoint.tensors.values()]
    inside = [sum(a <= s and t <= b and s < t for s, t in spans) for _, a, b in disk.reads]
    assert max(inside) >= 5
    assert all(b - a <= run.plan.slot_nbytes for _, a, b in disk.reads)
    # every byte was read once
    assert sum(b - a for _, a, b in disk.reads) == sum(b - a for a, b in spans)


@pytest.mark.parametrize("threads", [1, 3])
def test_most_is_handed_over_in_bulk(raw: Made, disk: Disk, threads: int) -> None:
    device = RecordedTorchDevice(threads=threads, in_bulk=True, disk=disk)
    run = prepare(make("meta"), raw, device, threads=threads, chunk_nbytes=200)
    run.go()
    run.check_loaded()
    assert in_bulk(device) >= 20
    done: set[int] = set()
    for _, start, stop in disk.reads:
        assert done.isdisjoint(range(start, stop))
        done.update(range(start, stop))
    spans = [range(info.start, info.stop) for info in run.checkpoint.tensors.values()]
    assert done == {at for span in spans for at in span}


@WAYS
@pytest.mark.parametrize("kind", ["meta", "real"])
def test_what_is_left_out_is_not_read(
    raw: Made, disk: Disk, kind: str, threads: int, bulk: bool
) -> None:
    """Tensors that the module lacks part what is read at once; what is around them is right."""
    for chunk_nbytes in (64, 200, 1000):
        net = make(kind)
        net.layers[1] = net.layers[3][1] = nn.Identity()
        device = RecordedTorchDevice(threads=threads, in_bulk=bulk, disk=disk)
        disk.reads.clear()
        run = prepare(net, raw, device, threads=threads, strict=False, chunk_nbytes=chunk_nbytes)
        run.go()
        run.check_loaded()
        infos = run.checkpoint.tensors
        left_out = [i for n, i in infos.items() if n.startswith(("layers.1.", "layers.3.1."))]
        assert len(left_out) == 12
        for info in left_out:
            assert not any(a < info.stop and info.start < b for _, a, b in disk.reads)
        read_nbytes = sum(b - a for _, a, b in disk.reads)
        assert bulk or read_nbytes == sum(p.nbytes for p in run.plan.placements)


def test_a_cast_between_raw_tensors_is_read_one_by_one(raw: Made, disk: Disk) -> None:
    """A unit of which one tensor is cast goes the other way, and arrives as right."""
    run = prepare(make("meta"), raw, RecordedTorchDevice(), dtype={"*bias*": "float16"})
    assert {p.cast for p in run.plan.placements} == {"copy", "llvm"}
    run.go()
    run.check_loaded()


# --- faults ---------------------------------------------------------------------------------------


FAULTS = [
    *((name, False) for name in ("allocate", "staging", "copy", "wait", "close", "read")),
    ("cast_copy", False),
    *((name, True) for name in ("allocate", "staging", "copy", "wait", "close", "read")),
    *((name, True) for name in ("record", "run", "ran")),
]


@pytest.mark.parametrize(
    ("operation", "bulk", "kind"),
    product(FAULTS, KINDS, fast=lambda op, bulk, kind: kind == KINDS[FAULTS.index((op, bulk)) % 4]),
)
def test_a_failing_operation_leaves_every_parameter_in_a_stated_condition(
    raw: Made, disk: Disk, kind: str, operation: str, bulk: bool
) -> None:
    """The error comes out; threads and slots end; what is not loaded is as it was or raises."""
    cast = "device" if operation == "cast_copy" else "llvm"
    dtype = "float16" if cast == "device" else _DTYPES.get(kind)
    happened = by_bulk = 0
    for seed in range(12 if bulk else 14):
        if enough(happened >= 4 - bulk and by_bulk >= bulk):
            break
        generator = random.Random(f"{kind} {operation} {seed}")
        threads = generator.choice((1, 1, 2, 4) if bulk else (0, 1, 2, 4))
        most = {"allocate": 20, "staging": 2, "close": 2, "run": 4, "ran": 4}
        if not bulk:
            most["read"] = 14
        error = fault(operation, odd=seed % 2 == 0)
        faults = Faults(
            {operation: generator.randint(1, most.get(operation, 40 - 10 * bulk))}, error
        )
        device = RecordedTorchDevice(
            threads=threads, faults=faults, seed=seed, in_bulk=bulk, disk=disk
        )
        disk.faults = faults
        run = prepare(
            make(kind),
            raw,
            device,
            chunk_nbytes=generator.choice((64, 200, 1000) if bulk else (200, 1000)),
            threads=threads,
            reader="mmap" if bulk else generator.choice(("mmap", "pread")),
            dtype=dtype,
            cast=cast,
        )
        caught: Exception | None = None
        try:
            run.go()
        except (OddError, StreamloadError) as raised:
            caught = raised
        disk.faults = device.faults = Faults()
        by_bulk += in_bulk(device) > 0
        if caught is None:
            run.check_loaded()
            continue
        # in bulk or that of another copy of the slot, which is lost as well
        assert isinstance(caught, (type(error), DeviceError) if bulk else type(error)), caught
        happened += 1
        run.fail()
        completes(run, raw, dtype=dtype)
    # all staging is taken before the first read
    assert by_bulk or not bulk or operation == "staging"
    refused = (kind, operation) == ("real", "allocate") or (bulk and operation == "read")
    assert refused or happened >= (2 if bulk else 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_copy_that_fails_among_those_of_one_slot(raw: Made, kind: str, threads: int) -> None:
    """At its beginning or at its end: the others of the slot end first, and none is lost sight of.

    All is in one slot here, so that every copy has others beside it.
    """
    for operation in ("copy", "wait"):
        for at in (1, 2, 11, 25):
            error = DeviceError("cpu", f"{operation} {at}")
            faults = Faults({operation: at}, error)
            device = RecordedTorchDevice(threads=threads, faults=faults, seed=at)
            dtype = _DTYPES.get(kind)
            run = prepare(make(kind), raw, device, threads=threads, dtype=dtype, chunk_nbytes=2**20)
            with pytest.raises(DeviceError, match=f"{operation} {at}"):
                run.go()
            state = run.fail()
            assert state.loaded == ()
            assert state.invalid or kind == "meta"
            completes(run, raw, dtype=dtype)


@pytest.mark.parametrize(
    ("operation", "at"),
    product(["copy", "record", "wait", "ran"], range(1, 7), fast=lambda _, at: at in (1, 2, 6)),
)
def test_the_first_calls_of_a_driver_that_fail(raw: Made, operation: str, at: int) -> None:
    """Copies of slots that no unit was told to be in have ended too, before memory goes."""
    for chunk_nbytes in (200, 640):
        for odd in (False, True):
            faults = Faults({operation: at}, fault(operation, odd=odd))
            device = RecordedTorchDevice(seed=at, in_bulk=True, faults=faults)
            run = prepare(make("meta"), raw, device, threads=1, chunk_nbytes=chunk_nbytes)
            caught: Exception | None = None
            try:
                run.go()
            except (OddError, DeviceError) as raised:
                caught = raised
            if caught is None:
                assert operation == "ran"
                run.check_loaded()
                continue
            run.fail()
            device.faults = Faults()
            completes(run, raw)


@MORE_WAYS
@pytest.mark.parametrize(
    ("reader", "kind"),
    product(["mmap", "pread"], ["meta", "real"], fast=lambda r, k: (r == "mmap") == (k == "real")),
)
def test_a_tensor_that_cannot_be_read_is_named(
    raw: Made, disk: Disk, reader: str, threads: int, bulk: bool, kind: str
) -> None:
    infos = [info for info in open_checkpoint(raw.path).tensors.values() if info.nbytes]
    generator = random.Random(f"{reader} {threads} {kind}")
    for chunk_nbytes in (64, 200, 1000) if bulk else (300, 1000, 2**20):
        for info in generator.sample(infos, few(4)):
            at = generator.randrange(info.start, info.stop)
            disk.bad = range(at, at + 1)
            device = RecordedTorchDevice(threads=threads, seed=at, in_bulk=bulk, disk=disk)
            run = prepare(
                make(kind), raw, device, threads=threads, reader=reader, chunk_nbytes=chunk_nbytes
            )
            with pytest.raises(CheckpointError) as caught:
                run.go()
            assert caught.value.tensor == info.name
            assert caught.value.path == str(info.shard)
            state = run.fail()
            assert info.name not in state.loaded
            disk.bad = range(0)
            completes(run, raw)


@READERS
@MORE_WAYS
def test_bytes_that_come_at_the_second_time_are_right_or_an_error(
    raw: Made, disk: Disk, reader: str, threads: int, bulk: bool
) -> None:
    infos = [info for info in open_checkpoint(raw.path).tensors.values() if info.nbytes]
    again = 0
    for seed, info in enumerate(infos):
        disk.bad, disk.forgiving = range(info.stop - 1, info.stop), True
        device = RecordedTorchDevice(threads=threads, seed=seed, in_bulk=bulk, disk=disk)
        nbytes = 200 if bulk else 400
        run = prepare(
            make("real"), raw, device, threads=threads, reader=reader, chunk_nbytes=nbytes
        )
        try:
            run.go()
        except CheckpointError as error:
            assert error.tensor == info.name
            run.fail()
            assert "unread" not in [operation for operation, _ in device.events]
        else:
            run.check_loaded()
            again += [operation for operation, _ in device.events].count("unread")
    assert again >= 8 or not bulk


@WAYS
@pytest.mark.parametrize(
    ("reader", "dtype"),
    product(["mmap", "pread"], [None, "float16"], fast=lambda r, d: (r == "mmap") == (d is None)),
)
def test_a_file_cut_in_the_middle_of_a_slot_names_the_tensor(
    tmp_path: Path, reader: str, threads: int, bulk: bool, dtype: str | None
) -> None:
    made = write(tmp_path / "x")
    path = made.path / "0.safetensors"
    whole = path.read_bytes()
    checkpoint = open_checkpoint(made.path)
    infos = sorted((i for i in checkpoint.tensors.values() if i.nbytes), key=lambda i: i.start)
    nbytes = 200 if bulk else 2**20
    for info in infos[1::3]:
        watch = cutter(path, info.stop - 1, passing="staging" if bulk else "")
        device = RecordedTorchDevice(threads=threads, watch=watch, in_bulk=bulk)
        arguments = {"reader": reader, "dtype": dtype, "chunk_nbytes": nbytes}
        run = prepare(make("meta"), made, device, threads=threads, **arguments)
        with open(path, "r+b"), pytest.raises(CUT) as caught:  # so without a lease
            run.go()
        path.write_bytes(whole)
        assert caught.value.path == str(path) and caught.value.tensor in checkpoint.tensors
        if isinstance(caught.value, TruncatedFileError):
            assert (caught.value.expected, caught.value.found) == (len(whole), info.stop - 1)
        run.fail()
        completes(run, made, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [0, 3])
def test_values_out_of_range_stop_the_stream_by_name(
    tmp_path: Path, kind: str, threads: int
) -> None:
    """A cast that finds an overflow fails as any other operation does."""
    made = write(tmp_path / "x")
    made.tensors["layers.3.0.bias"][3] = 1e30
    save_file(made.tensors, made.path / "0.safetensors")
    device = RecordedTorchDevice(threads=threads)
    run = prepare(make(kind), made, device, threads=threads, dtype="float16", out_of_range="error")
    with pytest.raises(OutOfRangeError) as caught:
        run.go()
    assert caught.value.tensor == "layers.3.0.bias"
    state = run.fail()
    assert "layers.3.0.bias" not in state.loaded
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        completes(run, made, dtype="float16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bulk", [False, True])
def test_a_load_says_in_its_error_what_is_what(
    raw: Made, monkeypatch: pytest.MonkeyPatch, kind: str, bulk: bool
) -> None:
    """`load_state_dict` over such a device: the error's state and note are true, and it mends."""
    dtype = _DTYPES.get(kind)
    happened = 0
    operations = ("copy", "wait", "record") if bulk else ("allocate", "copy", "wait", "staging")
    for seed in range(12):
        if enough(happened >= 3):
            break
        generator = random.Random(f"{kind} {seed}")
        operation = generator.choice(operations)
        most = {"allocate": 12, "staging": 2}.get(operation, 20 if bulk else 30)
        error = fault(operation, odd=False)
        faults = Faults({operation: generator.randint(1, most)}, error)
        device = RecordedTorchDevice(faults=faults, seed=seed, in_bulk=bulk)
        monkeypatch.setitem(devices_torch._WAYS, "cpu", lambda name, device=device: device)
        net = make(kind)
        before = {n: None if t.is_meta else t.detach().clone() for n, t in entries(net).items()}
        arguments: dict[str, Any] = {
            "device": "cpu",
            "dtype": dtype,
            "budget": "1MB",
            "progress": False,
            "chunk_nbytes": 200 if bulk else 500,
        }
        try:
            streamload.load_state_dict(net, raw.path, threads=generator.choice((1, 3)), **arguments)
        except StreamloadError as caught:
            happened += 1
            device.check_ended()
            state = caught.state
            assert state is not None
            assert caught.__notes__ == [f"parameters: {state}"]
            names = (*state.loaded, *state.untouched, *state.invalid)
            found = entries(net)
            assert sorted(names) == sorted(set(found) - {"head.weight"})
            for name in state.loaded:
                assert same_bits(found[name], raw.tensors[name])
            for name in state.untouched:
                old = before[name]
                assert found[name].is_meta if old is None else same_bits(found[name], old)
            for name in state.invalid:
                with pytest.raises(DeviceError):
                    found[name] + 1
            # the error is at hand still, and with it all that its traceback refers to
            device.faults = Faults()
            streamload.load_state_dict(net, raw.path, **arguments)
        device.check_ended()
        found = entries(net)
        assert all(same_bits(found[name], tensor) for name, tensor in raw.tensors.items())
        assert net.head.weight is net.embed.weight
    assert happened >= 3


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@MORE_WAYS
def test_an_interrupt_at_any_operation_leaves_a_stated_condition(
    raw: Made, disk: Disk, kind: str, threads: int, bulk: bool
) -> None:
    """Real SIGINTs, at operations chosen at random: KeyboardInterrupt, once, and all in order."""
    interrupted = 0
    for seed in range(12):
        if enough(interrupted >= (3 if bulk else 5)):
            break
        generator = random.Random(f"{kind} {threads} {seed}")
        shots = _Shots(generator.randint(1, 120 if bulk else 90))
        disk.faults = shots
        device = RecordedTorchDevice(
            threads=threads, faults=shots, seed=seed, in_bulk=bulk, disk=disk
        )
        dtype, nbytes = _DTYPES.get(kind), 200 if bulk else 300
        run = prepare(make(kind), raw, device, threads=threads, dtype=dtype, chunk_nbytes=nbytes)
        try:
            run.go()
        except KeyboardInterrupt:
            interrupted += 1
            run.fail()
            disk.faults = Faults()
            with warnings.catch_warnings(action="error"):
                completes(run, raw, dtype=dtype)
        else:
            run.check_loaded()
            assert bulk or not shots.fired
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted >= (3 if bulk else 5)
