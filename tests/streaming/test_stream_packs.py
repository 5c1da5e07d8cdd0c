"""Many small tensors: packs of them are read, placed and finished together, with equal care."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from plan_helpers import chunks, device_spec, plan_of
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.dtypes import DType
from streamload.core.memory import STAGING, Ledger
from streamload.devices.base import BulkFailure, Copy, DeviceInfo, Read, Staging, Ticket
from streamload.devices.host import HostDevice, HostFramework
from streamload.devices.staging import DONE, HostStaging
from streamload.errors import AllocationError, TruncatedFileError
from streamload.planning.chunks import Chunk, Cut, SmallTensorBatch
from streamload.planning.moves import DeviceSpec, TensorRequest, TensorRequests
from streamload.planning.plan import Plan
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import Transfer

MIB = 2**20


def write(folder: Path, sizes: Sequence[int], *, shards: int = 1) -> Mapping[str, bytes]:
    rng = np.random.default_rng(len(sizes))
    values = {f"t{i:04}": rng.bytes(n) for i, n in enumerate(sizes)}
    names = list(values)
    for shard in range(shards):
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        tensors = {name: ("U8", (len(values[name]),), values[name]) for name in mine}
        write_safetensors(folder / f"{shard}.safetensors", tensors)
    return values


def planned(checkpoint: Checkpoint, spec: DeviceSpec, skipped: Sequence[str] = ()) -> Plan:
    wants: Sequence[TensorRequest] = TensorRequests.every(checkpoint)
    if skipped:
        wants = [want for want in wants if want.name not in skipped]
    return plan_of(
        checkpoint, spec, wants=wants, dtype=None, readers=["pread"] * len(checkpoint.shards)
    )


@pytest.mark.parametrize("seed", range(10))
def test_packs_are_the_chunks_of_small_neighbours(tmp_path: Path, seed: int) -> None:
    """The same bytes in the same order, of one file, without a gap, and never too many."""
    generator = random.Random(seed)
    sizes = [generator.choice([0, 1, 7, 4096, 200_000][not seed % 2 :]) for _ in range(300)]
    write(tmp_path, sizes, shards=2)
    checkpoint = open_checkpoint(tmp_path)
    names = list(checkpoint.tensors)
    skipped = generator.sample(names, seed % 5)
    plan = planned(checkpoint, device_spec("d", 2**40), skipped)
    most, room = generator.choice([40, 256]), generator.choice([3000, MIB])
    cut = Cut(plan, checkpoint).packs_and_chunks(
        lambda p: plan.chunk_nbytes, lambda p: max(room, p.nbytes), most
    )
    flat: list[Chunk] = []
    for piece in cut:
        flat += piece if isinstance(piece, SmallTensorBatch) else [piece]
        if isinstance(piece, SmallTensorBatch):
            assert 32 <= len(piece) <= most
            assert sum(-(-(c.stop - c.start) // 64) * 64 for c in piece) <= room
            assert all(a.runs[0].stop == b.runs[0].start for a, b in pairwise(piece))
            assert {c.shard for c in piece} == {piece.shard}
            assert [c.placement for c in piece] == list(piece.placements)
            assert (piece.start, piece.stop) == (piece[0].runs[0].start, piece[-1].runs[0].stop)
    assert flat == list(chunks(plan, checkpoint))


@pytest.mark.parametrize("reader", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("device", ["host", "cpu"])
def test_small_tensors_are_loaded_exactly(tmp_path: Path, device: str, reader: Any) -> None:
    if device == "cpu":
        needs.module("torch")
    values = write(tmp_path, [1 + 37 * i % 5000 for i in range(1000)], shards=3)
    report = streamload.load_state_dict(
        None, tmp_path, device=device, reader=reader, progress=False
    )
    assert {
        name: bytes(memoryview(t.numpy() if device == "cpu" else t))
        for name, t in report.state_dict.items()
    } == values
    assert report.read_nbytes == sum(map(len, values.values()))
    assert report.predicted_nbytes.items() >= report.held_nbytes.items()


def test_tensors_of_a_pack_have_memory_of_their_own(tmp_path: Path) -> None:
    torch = needs.module("torch")
    write(tmp_path, [256] * 100)
    for setting in (False, True):  # in its deterministic mode torch would fill new memory
        torch.use_deterministic_algorithms(setting)
        with torch.inference_mode():
            report = streamload.load_state_dict(None, tmp_path, device="cpu", progress=False)
        torch.use_deterministic_algorithms(False)
        for tensor in report.state_dict.values():
            assert tensor.untyped_storage().nbytes() == 256
            assert not tensor.is_inference()


@pytest.mark.parametrize("left", [0, 1, 40_000, 99_999])
def test_a_file_that_is_cut_names_the_tensor(tmp_path: Path, left: int) -> None:
    values = write(tmp_path, [1000] * 100)
    checkpoint = open_checkpoint(tmp_path)
    plan = planned(checkpoint, device_spec("host", 2**30, granularity_nbytes=16))

    class Cut(HostDevice):
        def allocate_all(self, kinds: Any) -> list[Any]:
            """As the host does."""
            header = checkpoint.shards[0]
            os.truncate(header.path, header.data_start + left)
            return super().allocate_all(kinds)

    device = Cut()
    ledger = Ledger({"host": 2**30, STAGING: 2**20})
    target = ModelTarget(plan, HostFramework(), {"host": device}, None, ledger)
    # without a lease, since the file is open for writing
    with open(checkpoint.shards[0].path, "r+b"), pytest.raises(TruncatedFileError) as caught:
        stream(Transfer(plan, checkpoint, {"host": device}), target, ledger)
    assert caught.value.tensor == f"t{left // 1000:04}"
    state = target.fail()
    assert sorted((*state.loaded, *state.untouched, *state.invalid)) == sorted(values)
    assert ledger.held("host") == sum(1008 for _ in state.loaded)


@pytest.mark.parametrize("at", [0, 40, 150, 299])
def test_memory_that_cannot_be_had_names_the_tensor(tmp_path: Path, at: int) -> None:
    """Also where many are asked for at once; the ledger has those that are there, and no more."""
    write(tmp_path, [100] * 300)
    checkpoint = open_checkpoint(tmp_path)
    plan = planned(checkpoint, device_spec("host", 2**30, granularity_nbytes=16))

    class Full(HostDevice):
        left = at

        def allocate(self, dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
            if not self.left:
                raise AllocationError("host", "it is full", nbytes=100)
            self.left -= 1
            return super().allocate(dtype, shape)

        def allocate_all(self, kinds: Any) -> list[Any]:
            """All or none."""
            if len(kinds) > self.left:
                raise AllocationError("host", "it is full", nbytes=100)
            return super().allocate_all(kinds)

    device = Full()
    ledger = Ledger({"host": 2**30, STAGING: 2**20})
    target = ModelTarget(plan, HostFramework(), {"host": device}, None, ledger)
    with pytest.raises(AllocationError, match=rf"it is full \(for 't{at:04}'\)"):
        stream(Transfer(plan, checkpoint, {"host": device}), target, ledger)
    state = target.fail()
    assert ledger.held("host") == 112 * len(state.loaded) <= 112 * at


@dataclass
class Segments:
    """A staged device that puts small buffers side by side into segments of 2 MiB."""

    info: DeviceInfo = field(
        default_factory=lambda: DeviceInfo(
            "d", "host", host_visible=False, shared_memory=False, allocator="cuda_caching"
        )
    )
    memory: bytearray = field(default_factory=lambda: bytearray(12 * MIB))
    used: int = 0  # bytes
    copies: list[tuple[int, int]] = field(default_factory=list)  # (first byte, stop)

    BASE = 2**40

    @property
    def bulk(self) -> Any:
        return self

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> range:
        """The next bytes, rounded up to 512, within one segment."""
        nbytes = dtype.nbytes(math.prod(shape))
        if self.used // (2 * MIB) < (self.used + nbytes - 1) // (2 * MIB):
            self.used = -(-self.used // (2 * MIB)) * 2 * MIB
        start = self.used
        self.used += -(-nbytes // 512) * 512
        return range(start, start + nbytes)

    def address(self, buffer: range) -> int:
        return self.BASE + buffer.start

    def staging(self, nbytes: int) -> Staging:
        return HostStaging(nbytes)

    def ticket(self, slot: Staging) -> Ticket:
        return DONE

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """Read and copy; a copy that leaves its segment is refused."""
        for i, read in enumerate(reads):
            view = slots[i % len(slots)].view
            data = os.pread(fd, read.asked, read.offset)
            assert len(data) >= read.needed
            view[: len(data)] = data
            assert isinstance(read.copies, np.ndarray)
            for copy in map(Copy._make, read.copies.tolist()):
                start, stop = copy.address - self.BASE, copy.address - self.BASE + copy.nbytes
                if start // (2 * MIB) != (stop - 1) // (2 * MIB):
                    return BulkFailure(i, "copy", 1)
                self.memory[start:stop] = view[copy.at : copy.at + copy.nbytes]
                self.copies.append((start, stop))
        return None


class _Ranges(HostFramework):
    def tensor(self, device: Any, buffer: Any, dtype: DType, shape: tuple[int, ...]) -> Any:
        return buffer


@pytest.mark.parametrize(("size", "joined"), [(20_480, True), (20_000, False)])
def test_neighbours_in_a_segment_are_copied_together(
    tmp_path: Path, size: int, joined: bool
) -> None:
    values = write(tmp_path, [size] * 400)
    checkpoint = open_checkpoint(tmp_path)
    device: Any = Segments()
    spec = device_spec(
        "d", 2**40, host_visible=False, shared_memory=False, allocator="cuda_caching", threads=1
    )
    plan = planned(checkpoint, spec)
    ledger = Ledger({"d": 2**40, STAGING: plan.host_nbytes})
    target = ModelTarget(plan, _Ranges(), {"d": device}, None, ledger)
    stream(Transfer(plan, checkpoint, {"d": device}), target, ledger)
    assert len(target.state_dict) == 400
    for name, where in target.state_dict.items():
        assert device.memory[where.start : where.stop] == values[name]
    assert sum(stop - start for start, stop in device.copies) == 400 * size
    if joined:
        assert len(device.copies) < 40
    else:
        assert len(device.copies) >= 400
