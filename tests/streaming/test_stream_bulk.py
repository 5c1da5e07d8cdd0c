"""Many reads and copies in one call, as the stream uses it, without a GPU.

The device keeps copies for as long as the protocol allows and checks who fills what under them;
its loop is the compiled one, with functions of the device as its driver.
"""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import enough, few
from plan_helpers import device_spec, plan_of
from recording import Disk, Faults, recorded

import streamload
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.memory import STAGING, Ledger
from streamload.core.tensors import RowRange
from streamload.errors import (
    CheckpointError,
    DeviceError,
    FileChangedError,
    StreamloadError,
    TruncatedFileError,
)
from streamload.planning.plan import Plan
from streamload.planning.requests import TensorRequest
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import Transfer

torch = needs.module("torch")

import torch_staged_helpers as staged  # noqa: E402
from recorded_torch import RecordedTorchDevice  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch_staged_helpers import Made, OddError, Staged, make, same_bits, write  # noqa: E402

from streamload.devices.torch import device as devices_torch  # noqa: E402
from streamload.devices.torch.device import FRAMEWORK  # noqa: E402

CUT = (TruncatedFileError, FileChangedError)  # the time changes before the length
KINDS = staged.KINDS
_DTYPES = {"replace": "checkpoint"}  # of a double, which would keep its dtype


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Float32, one file."""
    return write(tmp_path_factory.mktemp("raw") / "x")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Bfloat16, three files."""
    return write(tmp_path_factory.mktemp("sharded") / "x", shards=3, dtype="bfloat16")


@pytest.fixture
def disk() -> Iterator[Disk]:
    """The files are real; what can be read of them is what this disk says."""
    with recorded() as made:
        yield made


def prepare(net: Any, made: Made, device: RecordedTorchDevice, **arguments: Any) -> Staged:
    """Plan a load in small chunks, so that there are many units."""
    return staged.prepare(net, made, device, **({"chunk_nbytes": 200} | arguments))


def completes(failed: Staged, made: Made, **arguments: Any) -> None:
    """Calling again completes the load, in bulk as well."""
    device = RecordedTorchDevice(seed=7, in_bulk=True)
    again = prepare(failed.net, made, device, **arguments)
    again.go()
    again.check_loaded()


def in_bulk(device: RecordedTorchDevice) -> int:
    """How many reads were handed over in bulk."""
    return sum(int(str(detail)) for operation, detail in device.events if operation == "run")


# --- right bytes ----------------------------------------------------------------------------------


@settings(max_examples=few(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    narrow=st.booleans(),
    dtype=st.sampled_from([None, None, "checkpoint", {"*running*": "float16"}]),
    chunk_nbytes=st.sampled_from([24, 64, 100, 200, 1000]),
    threads=st.integers(1, 4),
    reader=st.sampled_from(["mmap", "pread", "direct"]),
    cast=st.sampled_from(["llvm", "device"]),
    seed=st.integers(0, 99),
)
def test_late_copies_fill_modules_right(
    raw: Made,
    sharded: Made,
    kind: str,
    narrow: bool,
    dtype: Any,
    chunk_nbytes: int,
    threads: int,
    reader: str,
    cast: str,
    seed: int,
) -> None:
    """Whatever the module holds, and whatever is cast between: each byte arrives once, right."""
    made = sharded if narrow else raw
    device = RecordedTorchDevice(threads=threads, seed=seed, in_bulk=True)
    run = prepare(
        make(kind),
        made,
        device,
        dtype=dtype,
        chunk_nbytes=chunk_nbytes,
        threads=threads,
        reader=reader,
        cast=cast,
    )
    run.go()
    run.check_loaded()


@pytest.mark.parametrize("threads", [1, 3])
def test_most_is_handed_over_in_bulk(raw: Made, disk: Disk, threads: int) -> None:
    """What is read in bulk is read once, and the rest one by one: every byte once in all."""
    device = RecordedTorchDevice(threads=threads, in_bulk=True, disk=disk)
    run = prepare(make("meta"), raw, device, threads=threads)
    run.go()
    run.check_loaded()
    assert in_bulk(device) >= 20
    done: set[int] = set()
    for _, start, stop in disk.reads:
        assert done.isdisjoint(range(start, stop))
        done.update(range(start, stop))
    spans = [range(info.start, info.stop) for info in run.checkpoint.tensors.values()]
    assert done == {at for span in spans for at in span}


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_left_out_is_not_read(raw: Made, disk: Disk, threads: int) -> None:
    """Tensors that the module lacks part what is read at once; what is around them is right."""
    for chunk_nbytes in (64, 200, 1000):
        net = make("real")
        net.layers[1] = net.layers[3][1] = torch.nn.Identity()
        device = RecordedTorchDevice(threads=threads, in_bulk=True, disk=disk)
        disk.reads.clear()
        run = prepare(net, raw, device, threads=threads, strict=False, chunk_nbytes=chunk_nbytes)
        run.go()
        run.check_loaded()
        infos = run.checkpoint.tensors
        left_out = [i for n, i in infos.items() if n.startswith(("layers.1.", "layers.3.1."))]
        assert len(left_out) == 12
        for info in left_out:
            assert not any(a < info.stop and info.start < b for _, a, b in disk.reads)


# --- several devices ------------------------------------------------------------------------------


@dataclass(slots=True)
class Spread:
    """One stream of tensors to several devices."""

    tensors: dict[str, Any]
    checkpoint: Checkpoint
    plan: Plan
    devices: dict[str, RecordedTorchDevice]
    ledger: Ledger
    target: ModelTarget

    def go(self) -> None:
        """Stream, the way a load does."""
        self.target.begin_all()
        devices: Any = self.devices
        stream(Transfer(self.plan, self.checkpoint, devices), self.target, self.ledger)

    def check(self, *, whole: bool) -> None:
        """What is there is right and on its device, and no byte went to another one."""
        found = self.target.state_dict
        for name, device in self.devices.items():
            device.check_ended()
            mine = [p for p in self.plan.placements if p.device == name]
            if whole:
                assert device.written_nbytes == sum(p.nbytes for p in mine)
            kept = sum(p.resident_nbytes for p in mine if p.name in found)
            assert self.ledger.held(name) == kept
            assert device.allocated_nbytes() == sum(p.nbytes for p in mine if p.name in found)
        assert self.ledger.held(STAGING) == 0
        assert not whole or set(found) == set(self.tensors)
        for name, tensor in found.items():
            assert same_bits(tensor, self.tensors[name].to(tensor.dtype)), name


def spread(
    folder: Path,
    devices: Sequence[RecordedTorchDevice],
    turn: Callable[[int], int],
    *,
    count: int = 60,
    shards: int = 1,
    threads: int = 2,
    chunk_nbytes: int = 256,
    dtype: Any = "checkpoint",
) -> Spread:
    """Tensors of several sizes, one after the other in the files, on devices as ``turn`` says."""
    generator = torch.Generator().manual_seed(count)
    sizes = [1, 16, 64, 64, 64, 200]
    tensors = {
        f"t{i:03d}": torch.randn(sizes[i % len(sizes)], generator=generator) for i in range(count)
    }
    names = sorted(tensors)
    for i in range(shards):
        part = names[i * count // shards : (i + 1) * count // shards]
        save_file({name: tensors[name] for name in part}, folder / f"{i}.safetensors")
    checkpoint = open_checkpoint(folder)
    specs = [
        device_spec(d.name, 10**6, host_visible=d.host_visible, shared_memory=False, threads=16)
        for d in devices
    ]
    wants = [
        TensorRequest(
            name,
            tuple(tensors[name].shape),
            (RowRange(name, 0, len(tensors[name])),),
            device=devices[turn(i)].name,
        )
        for i, name in enumerate(names)
    ]
    plan = plan_of(
        checkpoint,
        *specs,
        wants=wants,
        dtype=dtype,
        readers=["pread"] * shards,
        chunk_nbytes=chunk_nbytes,
        threads=threads,
    )
    ledger = Ledger({s.name: s.budget_nbytes for s in specs} | {STAGING: plan.host_nbytes})
    by_name = {d.name: d for d in devices}
    devices_by_name: Any = by_name
    target = ModelTarget(plan, FRAMEWORK, devices_by_name, None, ledger)
    return Spread(tensors, checkpoint, plan, by_name, ledger, target)


_TURNS: dict[str, Callable[[int], int]] = {
    "halves": lambda i: i // 30,
    "by fives": lambda i: i // 5 % 2,
    "alternating": lambda i: i % 2,
    "one between": lambda i: int(i % 7 == 0),
}


@pytest.mark.parametrize("other", ["one by one", "bulk", "host-visible"])
@pytest.mark.parametrize("turn", _TURNS)
def test_each_device_gets_its_own(tmp_path: Path, other: Any, turn: str) -> None:
    """Two that take in bulk, or one beside one that does not, in one file: none gets another's."""
    for threads in (1, 3):
        for seed in range(2):
            one = RecordedTorchDevice(name="ONE", in_bulk=True, seed=seed)
            visible = other == "host-visible"
            two = RecordedTorchDevice(
                name="TWO", in_bulk=other == "bulk", seed=seed, host_visible=visible
            )
            folder = tmp_path / f"{threads} {seed}"
            folder.mkdir()
            run = spread(
                folder, [one, two], _TURNS[turn], threads=threads, shards=1 + seed, chunk_nbytes=96
            )
            run.go()
            run.check(whole=True)
            assert set(run.target.state_dict) == set(run.tensors)
            if turn != "alternating":
                assert in_bulk(one) > 0


def test_a_device_that_fails_beside_another(tmp_path: Path) -> None:
    """The error names the device; what is loaded on the other one is right, the rest is gone."""
    happened = 0
    for seed in range(16):
        if enough(happened >= 5):
            break
        generator = random.Random(seed)
        operation = generator.choice(("copy", "wait", "record"))
        faults = Faults({operation: generator.randint(1, 20)}, DeviceError("TWO", "injected"))
        one = RecordedTorchDevice(name="ONE", in_bulk=generator.random() < 0.5, seed=seed)
        two = RecordedTorchDevice(name="TWO", in_bulk=True, seed=seed, faults=faults)
        folder = tmp_path / str(seed)
        folder.mkdir()
        turn = _TURNS[generator.choice(("halves", "by fives"))]
        run = spread(folder, [one, two], turn, threads=generator.randint(1, 3), chunk_nbytes=128)
        try:
            run.go()
        except DeviceError as error:
            happened += 1
            assert error.device == "TWO"
            run.target.fail()
            run.check(whole=False)
        else:
            run.check(whole=True)
    assert happened >= 5


# --- faults ---------------------------------------------------------------------------------------

FAULTS = ("allocate", "staging", "copy", "wait", "record", "close", "read", "run", "ran")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", FAULTS)
def test_a_failing_operation_leaves_every_parameter_in_a_stated_condition(
    raw: Made, disk: Disk, kind: str, operation: str
) -> None:
    """The error comes out; threads and slots end; what is not loaded is as it was or raises.

    An error of storage may go by: what could not be read in bulk is read once more.
    """
    dtype = _DTYPES.get(kind)
    happened = by_bulk = 0
    for seed in range(12):
        if enough(happened >= 3 and by_bulk > 0):
            break
        generator = random.Random(f"{kind} {operation} {seed}")
        threads = generator.choice((1, 1, 2, 4))
        most = {"allocate": 20, "staging": 2, "close": 2, "run": 4, "ran": 4}.get(operation, 30)
        error = staged.fault(operation, odd=seed % 2 == 0)
        at = generator.randint(1, most)
        faults = Faults({operation: at}, error)
        device = RecordedTorchDevice(
            threads=threads, seed=seed, in_bulk=True, disk=disk, faults=faults
        )
        disk.faults = faults
        chunk_nbytes = generator.choice((64, 200, 1000))
        run = prepare(
            make(kind), raw, device, threads=threads, dtype=dtype, chunk_nbytes=chunk_nbytes
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
        # or that of another copy of the slot, which is lost as well
        assert isinstance(caught, (type(error), DeviceError)), caught
        happened += 1
        run.fail()
        completes(run, raw, dtype=dtype)
    assert by_bulk or operation == "staging"  # all of that is taken before the first read
    assert happened >= 2 or operation == "read" or (kind, operation) == ("real", "allocate")


@pytest.mark.parametrize("operation", ["copy", "record", "wait", "ran"])
@pytest.mark.parametrize("at", range(1, 7))
def test_the_first_calls_of_a_driver_that_fail(raw: Made, operation: str, at: int) -> None:
    """Copies of slots that no unit was told to be in have ended too, before memory goes."""
    for chunk_nbytes in (200, 640):
        for odd in (False, True):
            faults = Faults({operation: at}, staged.fault(operation, odd=odd))
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


@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_tensor_that_cannot_be_read_is_named(
    raw: Made, disk: Disk, reader: str, threads: int
) -> None:
    """Among many in one call the one with the bad bytes is named; other slots are right."""
    infos = [info for info in open_checkpoint(raw.path).tensors.values() if info.nbytes]
    generator = random.Random(f"{reader} {threads}")
    for chunk_nbytes in (64, 200, 1000):
        for info in generator.sample(infos, few(5)):
            at = generator.randrange(info.start, info.stop)
            disk.bad = range(at, at + 1)
            device = RecordedTorchDevice(threads=threads, seed=at, in_bulk=True, disk=disk)
            kind = generator.choice(("meta", "real"))
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


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_that_come_at_the_second_time_are_right(raw: Made, disk: Disk, threads: int) -> None:
    """Storage that fails once: what was read in bulk is read again, and all is loaded right."""
    infos = [info for info in open_checkpoint(raw.path).tensors.values() if info.nbytes]
    again = 0
    for seed, info in enumerate(infos):
        disk.bad, disk.forgiving = range(info.stop - 1, info.stop), True
        device = RecordedTorchDevice(threads=threads, seed=seed, in_bulk=True, disk=disk)
        run = prepare(make("real"), raw, device, threads=threads)
        try:
            run.go()
        except CheckpointError as error:
            assert error.tensor == info.name
            run.fail()
            assert "unread" not in [operation for operation, _ in device.events]
        else:
            run.check_loaded()
            again += [operation for operation, _ in device.events].count("unread")
    assert again >= 8


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_is_cut_names_the_tensor(tmp_path: Path, threads: int) -> None:
    """A real truncation before the first read: the file is named, and a tensor that is not read."""
    made = write(tmp_path / "x")
    path = made.path / "0.safetensors"
    whole = path.read_bytes()
    infos = sorted(
        (i for i in open_checkpoint(made.path).tensors.values() if i.nbytes), key=lambda i: i.start
    )
    names = [info.name for info in infos]
    for info in infos[1::4]:
        cut = staged.cutter(path, info.stop - 1, passing="staging")
        device = RecordedTorchDevice(threads=threads, watch=cut, in_bulk=True)
        run = prepare(make("meta"), made, device, threads=threads)
        with open(path, "r+b"), pytest.raises(CUT) as caught:  # so without a lease
            run.go()
        path.write_bytes(whole)
        found = caught.value
        assert found.path == str(path) and found.tensor in names
        if isinstance(found, TruncatedFileError):
            assert (found.expected, found.found) == (len(whole), info.stop - 1)
        run.fail()
        completes(run, made)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_says_in_its_error_what_is_what(
    raw: Made, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """`load_state_dict` over such a device: the error's state and note are true, and it mends."""
    dtype = _DTYPES.get(kind)
    happened = 0
    for seed in range(8):
        if enough(happened >= 3):
            break
        generator = random.Random(f"{kind} {seed}")
        operation = generator.choice(("copy", "wait", "record"))
        faults = Faults({operation: generator.randint(1, 20)}, staged.fault(operation, odd=False))
        device = RecordedTorchDevice(faults=faults, seed=seed, in_bulk=True)
        monkeypatch.setitem(devices_torch._WAYS, "cpu", lambda name, device=device: device)
        net = make(kind)
        arguments: dict[str, Any] = {
            "device": "cpu",
            "dtype": dtype,
            "budget": "1MB",
            "progress": False,
            "chunk_nbytes": 200,
        }
        try:
            streamload.load_state_dict(net, raw.path, threads=generator.choice((1, 3)), **arguments)
        except StreamloadError as caught:
            happened += 1
            state = caught.state
            assert state is not None
            assert caught.__notes__ == [f"parameters: {state}"]
            found = staged.entries(net)
            for name in state.loaded:
                assert same_bits(found[name], raw.tensors[name])
            for name in state.invalid:
                with pytest.raises(DeviceError):
                    found[name] + 1
            device.faults = Faults()
            streamload.load_state_dict(net, raw.path, **arguments)
        device.check_ended()
        found = staged.entries(net)
        assert all(same_bits(found[name], tensor) for name, tensor in raw.tensors.items())
        assert net.head.weight is net.embed.weight
    assert happened >= 2


# --- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_an_interrupt_at_any_operation_leaves_a_stated_condition(
    raw: Made, disk: Disk, kind: str, threads: int
) -> None:
    """Real SIGINTs, at operations chosen at random: KeyboardInterrupt, once, and all in order."""
    interrupted = 0
    for seed in range(8):
        if enough(interrupted >= 3):
            break
        generator = random.Random(f"{kind} {threads} {seed}")
        shots = staged._Shots(generator.randint(1, 120))
        disk.faults = shots
        device = RecordedTorchDevice(
            threads=threads, faults=shots, seed=seed, in_bulk=True, disk=disk
        )
        dtype = _DTYPES.get(kind)
        run = prepare(make(kind), raw, device, threads=threads, dtype=dtype)
        try:
            run.go()
        except KeyboardInterrupt:
            interrupted += 1
            run.fail()
            disk.faults = Faults()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                completes(run, raw, dtype=dtype)
        else:
            run.check_loaded()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted >= 3
