"""Helpers that `test_stream` shares with other tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_helpers import plan_of
from recording import RecordedBuffer, RecordingDevice, RecordingFramework

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.checkpoint.shards import Opener, open_shard
from streamload.core.memory import STAGING, Ledger
from streamload.core.tensors import RowRange
from streamload.planning.moves import DeviceSpec, TensorRequest
from streamload.planning.plan import Plan
from streamload.planning.transforms import NO_CHANGES, Changes
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import StreamStats, Transfer


@dataclass(slots=True)
class Run:
    checkpoint: Checkpoint
    plan: Plan
    devices: dict[str, RecordingDevice]
    ledger: Ledger
    target: ModelTarget
    changes: Changes = NO_CHANGES

    def go(
        self, progress: Callable[[int], None] = lambda nbytes: None, opener: Opener = open_shard
    ) -> StreamStats:
        self.target.begin_all()
        transfer = Transfer(
            *(self.plan, self.checkpoint, self.devices, self.changes, opener), progress=progress
        )
        return stream(transfer, self.target, self.ledger)

    def loaded(self) -> dict[str, RecordedBuffer]:
        return self.target.state_dict

    def check_ended(self) -> None:
        """No thread is left, no staging open, and the ledger holds what is loaded, no more."""
        assert_no_threads()
        for name, device in self.devices.items():
            device.check_ended()
            held = [p for p in self.plan.placements if p.device == name]
            loaded = sum(p.resident_nbytes for p in held if p.name in self.loaded())
            assert self.ledger.held(name) == loaded
            assert device.allocated_nbytes() == loaded
        assert self.ledger.held(STAGING) == 0


def assert_no_threads() -> None:
    """No thread of a stream is left."""
    assert [t.name for t in threading.enumerate() if t.name.startswith("streamload")] == []


def prepare(
    path: Path,
    devices: Sequence[RecordingDevice],
    *,
    wants: Sequence[TensorRequest] | None = None,
    dtype: Any = "checkpoint",
    chunk_nbytes: int = 2**20,
    threads: int = 2,
    reader: Any = "mmap",
    cast: Any = "llvm",
    out_of_range: Any = "inf",
    budget_nbytes: int = 10**9,
    changes: Changes = NO_CHANGES,
) -> Run:
    checkpoint = open_checkpoint(path)
    if wants is None:
        wants = [
            TensorRequest(
                name, info.shape, (RowRange(name, 0, info.shape[0] if info.shape else 1),)
            )
            for name, info in checkpoint.tensors.items()
        ]
    specs = [
        DeviceSpec(
            d.info,
            budget_nbytes,
            device_casts=frozenset({("bfloat16", "float16"), ("bfloat16", "float32")}),
        )
        for d in devices
    ]
    plan = plan_of(
        checkpoint,
        *specs,
        wants=wants,
        dtype=dtype,
        out_of_range=out_of_range,
        cast=cast,
        readers=[reader] * len(checkpoint.shards),
        chunk_nbytes=chunk_nbytes,
        threads=threads,
        changed=changes.by_tensor,
    )
    ledger = Ledger({s.name: s.budget_nbytes for s in specs} | {STAGING: plan.host_nbytes})
    by_name = {d.name: d for d in devices}
    framework: Any = RecordingFramework()
    target = ModelTarget(plan, framework, by_name, None, ledger)
    return Run(checkpoint, plan, by_name, ledger, target, changes)
