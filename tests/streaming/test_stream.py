"""The stream: right bytes, one shard at a time, and a clean end whatever happens."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import needs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few
from plan_helpers import chunks
from recording import Faults, RecordingDevice
from safetensors_files import write_safetensors
from stream_helpers import prepare

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.core.dtypes import BY_CODE
from streamload.core.interrupt import deferred_interrupt
from streamload.core.location import Location
from streamload.core.memory import STAGING, Ledger
from streamload.core.tensors import RowRange, RowTranspose
from streamload.errors import (
    BudgetExceededError,
    FileChangedError,
    OutOfRangeError,
    TruncatedFileError,
)
from streamload.files.folder import ResolvedKind
from streamload.files.header import Header
from streamload.files.local import PreadReader
from streamload.files.reader import Reader
from streamload.planning.moves import TensorRequest
from streamload.planning.transforms import NO_CHANGES
from streamload.streaming.loop import stream
from streamload.streaming.state import Transfer

ROOT = str(Path(streamload.__file__).parent.parent)
Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]


def reference(tensors: Tensors, want: TensorRequest, dst: Any) -> np.ndarray[Any, Any]:
    """What a parameter must become, by numpy alone: rows, permutation, cast."""
    rows = []
    for r in want.source:
        code, shape, data = tensors[r.tensor]
        array = np.frombuffer(data, BY_CODE[code].numpy).reshape(shape or (1,))
        rows.append(array[r.start : r.stop])
    whole = np.concatenate(rows)
    if want.transpose is not None:
        t = want.transpose
        split = whole.reshape(t.groups, t.outer, t.inner, -1 if whole.size else 0)
        whole = np.swapaxes(split, 1, 2)
    whole = np.ascontiguousarray(whole).reshape(want.shape)
    if dst.kind != "float" or whole.dtype == dst.numpy:
        return whole
    with np.errstate(all="ignore"):
        if whole.dtype.name not in ("float64", "float32", "float16"):
            whole = whole.astype(np.float32)  # exact; ml_dtypes casts from and to this
        return whole.astype(dst.numpy)


def assert_same(got: bytes, expected: np.ndarray[Any, Any]) -> None:
    """Equal bits, the payload of a NaN aside."""
    raw = expected.reshape(-1)
    found = np.frombuffer(got, raw.dtype)
    bits = f"u{raw.dtype.itemsize}"
    same = found.view(bits) == raw.view(bits)
    if raw.dtype.kind in "fV":
        with np.errstate(all="ignore"):
            same |= np.isnan(found.astype(np.float64)) & np.isnan(raw.astype(np.float64))
    assert same.all()


def random_bytes(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def some_tensors(count: int, nbytes: int = 1000, code: str = "F32") -> dict[str, Any]:
    numel = nbytes // BY_CODE[code].itemsize
    out = {}
    for i in range(count):
        values = np.random.default_rng(i).standard_normal(numel).astype(np.float32)
        out[f"t{i:03d}"] = (code, (numel,), values.astype(BY_CODE[code].numpy).tobytes())
    return out


# --- right bytes --------------------------------------------------------------------------------


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[TensorRequest]]:
    """Shards of random tensors, and parameters made of them: whole, concatenated, permuted."""
    shards: list[dict[str, Any]] = [{} for _ in range(draw(st.integers(1, 3)))]
    wants = []
    for i in range(draw(st.integers(1, 4))):
        # a family: tensors of one dtype and one row shape, spread over the shards
        code = draw(st.sampled_from(["U8", "BOOL", "I32", "F16", "BF16", "F32", "F8_E4M3", "I64"]))
        tail = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
        width = math.prod(tail)
        rows: list[RowRange] = []
        for k in range(draw(st.integers(1, 3))):
            count = draw(st.integers(0, 7))
            name = f"{i}.{k}"
            data = random_bytes(draw(st.integers(0, 99)), BY_CODE[code].nbytes(count * width))
            if code == "BOOL":
                data = bytes(b & 1 for b in data)
            draw(st.sampled_from(shards))[name] = (code, (count, *tail), data)
            start = draw(st.integers(0, count))
            rows.append(RowRange(name, start, draw(st.integers(start, count))))
        total = sum(r.stop - r.start for r in rows)
        transpose = None
        if total and draw(st.booleans()):
            groups = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
            rest = total // groups
            outer = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
            transpose = RowTranspose(groups, outer, rest // outer)
        elif total and width and draw(st.booleans()):  # parts of rows change places
            parts = draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))
            inner = draw(st.sampled_from([n for n in range(1, parts + 1) if parts % n == 0]))
            lines = total * parts // inner
            outer = draw(st.sampled_from([n for n in range(1, lines + 1) if lines % n == 0]))
            transpose = RowTranspose(lines // outer, outer, inner)
        wants.append(TensorRequest(f"p{i}", (total, *tail), tuple(rows), transpose))
    if draw(st.booleans()):
        shards[0]["scalar"] = ("F32", (), b"\x00\x00\x80\x3f")
        wants.append(TensorRequest("scalar", (), (RowRange("scalar", 0, 1),)))
    return shards, wants


@settings(max_examples=few(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    made=checkpoints(),
    chunk_nbytes=st.sampled_from([1, 2, 3, 7, 16, 64, 100, 1000, 2**20]),
    threads=st.integers(0, 4),
    reader=st.sampled_from(["mmap", "pread"]),
    host_visible=st.booleans(),
    shared_memory=st.booleans(),
    dtype=st.sampled_from(["checkpoint", "float16", "float32", "bfloat16"]),
    cast=st.sampled_from(["llvm", "numpy", "device"]),
    seed=st.integers(0, 9),
)
def test_every_byte_is_that_of_an_independent_reference(
    made: tuple[list[dict[str, Any]], list[TensorRequest]],
    chunk_nbytes: int,
    threads: int,
    reader: str,
    host_visible: bool,
    shared_memory: bool,
    dtype: str,
    cast: str,
    seed: int,
) -> None:
    shards, wants = made
    device = RecordingDevice(
        host_visible=host_visible, shared_memory=shared_memory, threads=threads, seed=seed
    )
    with tempfile.TemporaryDirectory() as folder:
        for i, shard in enumerate(shards):
            write_safetensors(Path(folder, f"{i}.safetensors"), shard)
        run = prepare(
            Path(folder),
            [device],
            wants=wants,
            dtype=dtype,
            chunk_nbytes=chunk_nbytes,
            threads=threads,
            reader=reader,
            cast=cast,
        )
        cut = list(chunks(run.plan, run.checkpoint))
        stats = run.go()
    tensors = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert sorted(run.loaded()) == sorted(want.name for want in wants)
    for want in wants:
        buffer = run.loaded()[want.name]
        assert buffer.written_once
        assert_same(bytes(buffer.data), reference(tensors, want, buffer.dtype))
    assert stats.read_nbytes == sum(chunk.read_nbytes for chunk in cut)
    run.check_ended()
    if "device" not in {p.cast for p in run.plan.placements}:
        assert max((s.view.nbytes for s in device.stagings), default=0) <= run.plan.slot_nbytes
        assert len(device.stagings) <= 2 * max(run.plan.threads, 1)


def test_small_chunks_of_one_parameter_share_a_slot_that_holds_them(tmp_path: Path) -> None:
    data = random_bytes(1, 60)
    for i in range(2):
        write_safetensors(tmp_path / f"{i}.safetensors", {f"t{i}": ("U8", (30, 2), data)})
    rows = (RowRange("t0", 0, 30), RowRange("t1", 0, 30))
    want = TensorRequest("w", (60, 2), rows, RowTranspose(1, 2, 30))
    device = RecordingDevice()
    run = prepare(tmp_path, [device], wants=[want])
    run.go()
    tensors = {f"t{i}": ("U8", (30, 2), data) for i in range(2)}
    assert_same(bytes(run.loaded()["w"].data), reference(tensors, want, BY_CODE["U8"]))
    run.check_ended()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_permuted_rows_that_the_device_casts_are_staged_in_their_order(
    tmp_path: Path, dtype: str
) -> None:
    """Rows take their places before the cast, though those are measured after it."""
    values = np.random.default_rng(1).standard_normal(12 * 3).astype(np.float32)
    data = values.astype(ml_dtypes.bfloat16).tobytes()
    tensors = {"w": ("BF16", (12, 3), data)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    for transpose in (RowTranspose(2, 2, 3), RowTranspose(1, 3, 4), RowTranspose(3, 4, 1)):
        want = TensorRequest("w", (12, 3), (RowRange("w", 0, 12),), transpose)
        for chunk_nbytes in (10, 60, 2**20):
            device = RecordingDevice()
            run = prepare(
                path, [device], wants=[want], dtype=dtype, cast="device", chunk_nbytes=chunk_nbytes
            )
            assert [p.cast for p in run.plan.placements] == ["device"]
            run.go()
            buffer = run.loaded()["w"]
            assert buffer.written_once
            assert_same(bytes(buffer.data), reference(tensors, want, buffer.dtype))


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("cast", ["llvm", "device"])
def test_rows_that_change_are_staged_as_they_become(
    tmp_path: Path, cast: str, shared_memory: bool
) -> None:
    """A function's rows are cast on the host, whatever casts; permuted ones take their places."""
    values = np.random.default_rng(1).standard_normal((12, 30)).astype(ml_dtypes.bfloat16)
    path = write_safetensors(
        tmp_path / "x.safetensors", {"w": ("BF16", (12, 30), values.tobytes())}
    )
    changed = (values.astype(np.float32) * 3).astype(np.float16)
    checkpoint = open_checkpoint(path)
    changes = NO_CHANGES.then(checkpoint, {"w": lambda rows: rows.astype(np.float32) * 3})
    for transpose in (None, RowTranspose(2, 2, 3)):
        for chunk_nbytes in (10, 130, 2**20):
            device = RecordingDevice(host_visible=False, shared_memory=shared_memory)
            want = TensorRequest("w", (12, 30), (RowRange("w", 0, 12),), transpose)
            options: dict[str, Any] = {"dtype": "float16", "cast": cast, "changes": changes}
            run = prepare(path, [device], wants=[want], chunk_nbytes=chunk_nbytes, **options)
            assert [p.cast for p in run.plan.placements] == ["rows"]
            run.go()
            buffer = run.loaded()["w"]
            assert buffer.written_once
            expected = changed
            if transpose is not None:
                expected = changed.reshape(2, 2, 3, 30).swapaxes(1, 2)
            assert bytes(buffer.data) == np.ascontiguousarray(expected).tobytes()
            run.check_ended()


@pytest.mark.parametrize(("tensors", "most"), [(40, 2), (1, 16)])
def test_few_shards_are_open_at_a_time(tmp_path: Path, tensors: int, most: int) -> None:
    """Two files, where one keeps the workers busy; of small ones as many as do, and at most 16."""
    for i in range(20):
        data = {f"t{i}.{k}": ("U8", (1000,), bytes(1000)) for k in range(tensors)}
        write_safetensors(tmp_path / f"{i:02}.safetensors", data)
    open_now: set[Location] = set()
    seen: list[int] = []

    class Watched(PreadReader):
        def close(self) -> None:
            super().close()
            open_now.discard(self.path)

    def opener(header: Header, kind: ResolvedKind) -> Reader:
        assert isinstance(header.path, Path)
        open_now.add(header.path)
        seen.append(len(open_now))
        return Watched(header.path, header.file_nbytes)

    run = prepare(tmp_path, [RecordingDevice()], chunk_nbytes=1000, threads=3, reader="pread")
    run.go(opener=opener)
    assert 2 <= max(seen) <= most
    assert not open_now
    run.check_ended()


def test_several_devices_get_what_is_theirs(tmp_path: Path) -> None:
    tensors = some_tensors(6)
    write_safetensors(tmp_path / "x.safetensors", tensors)
    devices = [RecordingDevice("A"), RecordingDevice("B", host_visible=True), RecordingDevice("C")]
    wants = [
        TensorRequest(n, tuple(t[1]), (RowRange(n, 0, t[1][0]),), device="ABC"[i % 3])
        for i, (n, t) in enumerate(tensors.items())
    ]
    run = prepare(tmp_path, devices, wants=wants, chunk_nbytes=100)
    run.go()
    for i, want in enumerate(wants):
        assert run.loaded()[want.name] in devices[i % 3].buffers
        assert bytes(run.loaded()[want.name].data) == tensors[want.name][2]
    run.check_ended()


# --- faults -------------------------------------------------------------------------------------

OPERATIONS = {True: ("allocate", "window"), False: ("allocate", "staging", "copy", "wait", "close")}


class OddError(Exception):
    """An error that nobody knows."""


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize(
    ("host_visible", "operation"), [(kind, op) for kind, ops in OPERATIONS.items() for op in ops]
)
def test_a_failing_operation_ends_the_stream_cleanly(
    tmp_path: Path, host_visible: bool, operation: str, threads: int
) -> None:
    write_safetensors(tmp_path / "x.safetensors", some_tensors(8))
    for at in (1, 2, 5):
        error = OddError(f"{operation} {at}")
        faults = Faults({operation: at}, error)
        device = RecordingDevice(host_visible=host_visible, threads=threads, faults=faults, seed=at)
        run = prepare(tmp_path, [device], chunk_nbytes=600, threads=threads, dtype="float16")
        happens = operation not in ("staging", "close") or at <= 2 * max(threads, 1)
        try:
            run.go()
        except OddError as raised:
            assert raised is error
        else:
            # threads that never get a unit have no staging that could fail
            assert not happens or (operation in ("staging", "close") and threads > 1)
        faults = device.faults = Faults()
        state = run.target.fail()
        assert not device.pending
        assert device.wrongs == []
        assert sorted((*state.loaded, *state.untouched, *state.invalid)) == sorted(
            p.name for p in run.plan.placements
        )
        assert set(state.loaded) == set(run.loaded())
        run.check_ended()


@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_file_truncated_under_the_stream_is_named(
    tmp_path: Path, reader: str, threads: int
) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", some_tensors(50, 100_000))
    whole = path.stat().st_size
    device = RecordingDevice(host_visible=True, threads=threads)
    run = prepare(path, [device], chunk_nbytes=50_000, threads=threads, reader=reader)

    def truncate(done: int) -> None:
        os.truncate(path, whole // 2)

    kinds = (TruncatedFileError, FileChangedError)  # the time of a file changes before its length
    with open(path, "r+b"), pytest.raises(kinds) as caught:  # so without a lease
        run.go(truncate)
    assert caught.value.path == str(path)
    assert caught.value.tensor in run.checkpoint.tensors
    if isinstance(caught.value, TruncatedFileError):
        assert (caught.value.expected, caught.value.found) == (whole, whole // 2)
    assert run.target.fail().loaded == () == tuple(run.loaded())
    for buffer in device.buffers:  # of tensors that were finished, and go with their last user
        if not buffer.released:
            device.release(buffer)
    run.check_ended()


def test_values_out_of_range_stop_the_stream_by_name(tmp_path: Path) -> None:
    tensors = some_tensors(4)
    big = np.full(250, 1e6, np.float32).tobytes()
    tensors["t002"] = ("F32", (250,), big)
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    run = prepare(path, [RecordingDevice()], dtype="float16", out_of_range="error")
    with pytest.raises(OutOfRangeError) as caught:
        run.go()
    assert (caught.value.tensor, caught.value.src, caught.value.dst) == (
        "t002",
        "float32",
        "float16",
    )
    assert caught.value.overflowed >= 1
    run.target.fail()
    run.check_ended()


def test_an_error_in_progress_comes_out(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", some_tensors(8))

    def complain(done: int) -> None:
        raise OddError(str(done))

    run = prepare(path, [RecordingDevice()], chunk_nbytes=500)
    with pytest.raises(OddError):
        run.go(complain)
    run.target.fail()
    run.check_ended()


def test_a_ledger_without_room_for_staging_refuses_before_anything(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", some_tensors(3))
    device = RecordingDevice()
    run = prepare(path, [device])
    run.ledger = Ledger({"REC": 10**9, STAGING: run.plan.host_nbytes - 1})
    with pytest.raises(BudgetExceededError) as caught:
        stream(Transfer(run.plan, run.checkpoint, run.devices), run.target, run.ledger)
    assert caught.value.requested_nbytes == run.plan.host_nbytes
    assert device.events == []


# --- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("operation", ["allocate", "staging", "copy", "wait", "close"])
def test_an_interrupt_at_any_operation_ends_the_stream_cleanly(
    tmp_path: Path, operation: str, threads: int
) -> None:
    """A real SIGINT that comes while the device works is a KeyboardInterrupt, once, at the end."""
    path = write_safetensors(tmp_path / "x.safetensors", some_tensors(8))
    sent = []

    def watch(now: str) -> None:
        if now == operation and not sent:
            sent.append(now)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # an impatient user

    device = RecordingDevice(threads=threads, watch=watch)
    device.faults = _Watched(watch)
    run = prepare(path, [device], chunk_nbytes=300, threads=threads)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    run.target.fail()
    run.check_ended()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Watched(Faults):
    """Shows the operations of tickets and staging, too."""

    def __init__(self, watch: Callable[[str], None]) -> None:
        super().__init__()
        self._watch = watch

    def pass_by(self, operation: str) -> None:
        super().pass_by(operation)
        self._watch(operation)


def test_the_applications_handler_decides(tmp_path: Path) -> None:
    """A handler of the application's own is called when the books are straight, not in between."""
    path = write_safetensors(tmp_path / "x.safetensors", some_tensors(8))
    calls = []

    def note(signum: int, frame: Any) -> None:
        calls.append(signum)

    def refuse(signum: int, frame: Any) -> None:
        raise OddError

    before = signal.getsignal(signal.SIGINT)
    for handler, threads in ((note, 0), (note, 2), (refuse, 0), (refuse, 2)):
        signal.signal(signal.SIGINT, handler)
        try:
            calls.clear()
            run = prepare(path, [RecordingDevice()], chunk_nbytes=500, threads=threads)
            raised = False
            try:
                run.go(lambda done: signal.raise_signal(signal.SIGINT))
            except OddError:
                raised = True
            assert raised is (handler is refuse)
            assert bool(calls) is (handler is note)
            if handler is note:
                assert len(run.loaded()) == 8
            run.target.fail()
            run.check_ended()
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_without_a_handler_is_left_alone(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupt():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_deferred_interrupts_nest() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append("inside")
        reached.append("between")
    assert reached == ["inside", "between"]
    with deferred_interrupt() as outer, deferred_interrupt() as inner:
        assert inner is outer
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            inner.check()


def test_a_stream_in_another_thread_leaves_interrupts_to_the_main_one(tmp_path: Path) -> None:
    """Ctrl-C goes to the main thread; a stream elsewhere runs to its end."""
    path = write_safetensors(tmp_path / "x.safetensors", some_tensors(8))
    run = prepare(path, [RecordingDevice()], chunk_nbytes=500)
    begun, go_on = threading.Event(), threading.Event()
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def progress(done: int) -> None:
        begun.set()
        go_on.wait()

    def load() -> None:
        try:
            run.go(progress)
        except BaseException as error:
            failures.put(error)

    thread = threading.Thread(target=load)
    thread.start()
    begun.wait()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    go_on.set()
    thread.join()
    assert failures.empty()
    assert len(run.loaded()) == 8
    run.check_ended()


INTERRUPTED = """
import os, random, signal, sys, threading, time
import numpy as np
import streamload
from streamload.errors import DeviceError

path, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
framework = sys.argv[4]
entries, arguments = dict, {"chunk_nbytes": 30_000, "progress": False}
if framework == "torch":
    import torch
    torch.set_num_threads(1)
    entries, arguments = torch.nn.ParameterDict, arguments | {"device": "cpu", "dtype": "float32"}

    def old(i):
        # written in place, replaced, on meta
        dtype = torch.float16 if i % 3 == 1 else torch.float32
        full = torch.full((50_000,), float(-1 - i), dtype=dtype)
        return full.to("meta") if i % 3 == 2 else full

    def numbers(tensor):
        found = (tensor + 0).float().detach()
        return None if found.is_meta else found.numpy()
elif framework == "tinygrad":
    from tinygrad import Tensor, dtypes

    def old(i):
        # every second one is replaced, for it has another dtype
        dtype = dtypes.float32 if i % 2 else dtypes.float16
        full = Tensor.full((50_000,), float(-1 - i), dtype=dtype, device="CL")
        return full.contiguous().realize()

    def numbers(tensor):
        return tensor.float().numpy()
else:
    def old(i):
        return np.full(50_000, -1 - i, np.float32 if i % 2 else np.float16)

    def numbers(array):
        return np.asarray(array)

COUNT = 20
generator = random.Random(seed)
for _ in range(2):  # the first is slower
    model = entries({f"t{i:03d}": old(i) for i in range(COUNT)})
    begun = time.perf_counter()
    streamload.load_state_dict(model, path, **arguments)
    usual_s = time.perf_counter() - begun
interrupted = 0

def handle(signum, frame):
    # as Python's own, but for a shot that comes after the load; streamload hands on without a frame
    while frame is not None and frame.f_code is not streamload.load_state_dict.__code__:
        frame = frame.f_back
        if frame is None:
            return
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, handle)
for _ in range(rounds):
    model = entries({f"t{i:03d}": old(i) for i in range(COUNT)})
    after_s = generator.uniform(0, usual_s)
    armed = threading.Event()

    def shoot():
        armed.wait()
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(generator.uniform(0, usual_s / 10))
        os.kill(os.getpid(), signal.SIGINT)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    caught = None
    try:
        armed.set()
        streamload.load_state_dict(model, path, threads=generator.randint(1, 3), **arguments)
    except KeyboardInterrupt as error:
        caught = error
    shooter.join()
    assert not [t for t in threading.enumerate() if t.name.startswith("streamload")]
    kinds = set()
    for i in range(COUNT):
        try:
            values = numbers(model[f"t{i:03d}"])
        except DeviceError:
            kinds.add("invalid")
            continue
        if values is None:
            assert i % 3 == 2
            kinds.add("untouched")
        elif (values == -1 - i).all():
            kinds.add("untouched")
        else:
            assert (values == i).all(), (i, values)
            kinds.add("loaded")
    while caught is not None and not hasattr(caught, "__notes__") and caught.__context__:
        caught = caught.__context__  # the second came when the load was already on its way out
    notes = getattr(caught, "__notes__", [])
    if caught is not None and notes:
        interrupted += 1
        assert len(notes) == 1 and notes[0].startswith("parameters: "), notes
        for kind in ("loaded", "untouched", "invalid"):
            assert (f"0 {kind}" not in f" {notes[0]}".replace("10 ", "1x ").replace("20 ", "2x ")) \
                == (kind in kinds), (notes, kinds)
    else:
        assert len(kinds) == 1 and "invalid" not in kinds, (kinds, caught)
    streamload.load_state_dict(model, path, **arguments)
    for i in range(COUNT):
        assert (numbers(model[f"t{i:03d}"]) == i).all()
print(interrupted)
"""


@pytest.mark.parametrize(
    "framework", ["host", pytest.param("tinygrad", marks=pytest.mark.slow), "torch"]
)
def test_interrupts_at_random_moments_leave_what_is_promised(
    tmp_path: Path, framework: str
) -> None:
    """Two real SIGINTs at random moments of real loads, the second while the first is dealt with.

    Each parameter is then loaded, untouched or invalid, as the note says; threads have ended; and
    calling again completes the load.
    """
    if framework == "torch":
        needs.module("torch")
    tensors = {
        f"t{i:03d}": ("F32", (50_000,), np.full(50_000, i, np.float32).tobytes()) for i in range(20)
    }
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    rounds = str({"host": few(40), "tinygrad": 15, "torch": few(30)}[framework])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, path, "1", rounds, framework],
        env=os.environ | {"PYTHONPATH": ROOT},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout) >= 3
