"""Many reads and copies in one call, to several devices, without a GPU.

The devices keep copies for as long as the protocol allows and check who fills what under them; the
loop is the compiled one, with functions of the device as its driver.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs
import pytest
from parameters import enough
from plan_helpers import device_spec, plan_of
from recording import Faults

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.memory import STAGING, Ledger
from streamload.core.tensors import RowRange
from streamload.errors import DeviceError
from streamload.planning.moves import TensorRequest
from streamload.planning.plan import Plan
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import Transfer

torch = needs.module("torch")

from recorded_torch import RecordedTorchDevice  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch_staged_helpers import same_bits  # noqa: E402

from streamload.devices.torch.device import FRAMEWORK  # noqa: E402


@dataclass(slots=True)
class Spread:
    tensors: dict[str, Any]
    checkpoint: Checkpoint
    plan: Plan
    devices: dict[str, RecordedTorchDevice]
    ledger: Ledger
    target: ModelTarget

    def go(self) -> None:
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
                assert "run" in [operation for operation, _ in one.events]


def test_a_device_that_fails_beside_another(tmp_path: Path) -> None:
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
