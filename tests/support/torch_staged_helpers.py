"""Helpers that `test_torch_staged` shares with other tests."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import needs
import pytest
from plan_helpers import plan_of
from recording import Faults

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.memory import STAGING, Ledger
from streamload.errors import AllocationError, CheckpointError, DeviceError, LoadState
from streamload.planning.match import Match, ModelParameters, match
from streamload.planning.moves import DeviceSpec, DTypePolicy
from streamload.planning.plan import Plan
from streamload.planning.sources import sources
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import Transfer

torch = needs.module("torch")

nn = torch.nn
from recorded_torch import RecordedTorchDevice  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from streamload.devices.torch.device import FRAMEWORK  # noqa: E402
from streamload.devices.torch.tensors import InvalidParameter, InvalidTensor  # noqa: E402

KINDS = ("meta", "real", "mixed", "replace")

_UNTOUCHED_SEED, _NEW_SEED = 1, 2


class Net(nn.Module):  # type: ignore[name-defined, misc]
    """Many small tensors beside a large one; a tie, buffers, a scalar, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(5)
        )
        self.large = nn.Linear(40, 30, bias=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


def values(seed: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Random tensors of the same names, shapes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in like.items():
        if tensor.is_floating_point():
            out[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        else:
            out[name] = torch.randint(0, 99, tensor.shape, generator=generator, dtype=tensor.dtype)
    out["head.weight"] = out["embed.weight"]
    return out


def make(kind: str) -> Any:
    """A net of one kind: meta, real, every second tensor of each, or real in another dtype."""
    net = Net()
    net.load_state_dict(values(_UNTOUCHED_SEED, net.state_dict()))
    if kind == "meta":
        net.to("meta")
        net.head.weight = net.embed.weight
    if kind == "replace":
        return net.double()
    if kind == "mixed":
        for i, child in enumerate(net.modules()):
            if i % 2:
                for key, parameter in child._parameters.items():
                    if parameter is not None and parameter is not net.embed.weight:
                        child._parameters[key] = nn.Parameter(parameter.to("meta"))
    return net


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint: its folder, and what was written there, the tie once."""

    path: Path
    tensors: dict[str, Any] = field(repr=False)


def write(folder: Path, *, shards: int = 1, dtype: str = "float32") -> Made:
    new = values(_NEW_SEED, Net().state_dict())
    new = {
        name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
        if name != "head.weight"
    }
    folder.mkdir(exist_ok=True)
    names = list(new)
    for i in range(shards):
        part = {name: new[name] for name in names[i::shards]}
        save_file(part, folder / f"{i}.safetensors")
    return Made(folder, new)


def same_bits(a: Any, b: Any) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    one, other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(one, other))


def entries(net: Any) -> dict[str, Any]:
    """What stands under each name of the state dict, invalid or not."""
    found: dict[str, Any] = dict(net.named_parameters(remove_duplicate=False))
    return found | dict(net.named_buffers(remove_duplicate=False))


@dataclass(slots=True)
class Staged:
    """One stream of a real checkpoint into a module, through a recording staged device."""

    net: Any
    before: Mapping[str, Any]
    new: Mapping[str, Any]
    checkpoint: Checkpoint
    plan: Plan
    matched: Match
    device: RecordedTorchDevice
    ledger: Ledger
    target: ModelTarget

    def go(self, progress: Callable[[int], None] = lambda nbytes: None) -> None:
        self.target.begin_all()
        devices = {self.device.name: self.device}
        stream(
            Transfer(self.plan, self.checkpoint, devices, progress=progress),
            self.target,
            self.ledger,
        )

    def check_loaded(self) -> None:
        """All is there, each byte written once, and nothing is left over."""
        everything = tuple(p.name for p in self.plan.placements)
        self.check(LoadState(everything, (), ()))
        assert self.device.written_nbytes == sum(p.nbytes for p in self.plan.placements)

    def fail(self) -> LoadState:
        """What a load does after an error; checked in every respect."""
        assert self.device.pending == []  # before memory is given back
        state = self.target.fail()
        self.check(state)
        return state

    def check(self, state: LoadState) -> None:
        """Threads, slots and ledger are in order, and each parameter is what the state says."""
        assert [t.name for t in threading.enumerate() if t.name.startswith("streamload")] == []
        self.device.check_ended()
        placements, found = list(self.plan.placements), entries(self.net)
        names = [p.name for p in placements]
        assert sorted((*state.loaded, *state.untouched, *state.invalid)) == sorted(names)
        held = 0
        allocated = 0
        for p in placements:
            if p.action == "in_place" or p.name in state.loaded:
                held += p.resident_nbytes
                allocated += p.nbytes if p.action != "in_place" else 0
            elif p.name in state.untouched:
                held += p.released_nbytes
            self.check_parameter(p.name, getattr(torch, p.dst.name), found, state)
        assert self.ledger.held(self.device.name) == held
        assert self.ledger.held(STAGING) == 0
        assert self.device.allocated_nbytes() == allocated

    def check_parameter(
        self, name: str, dtype: Any, found: Mapping[str, Any], state: LoadState
    ) -> None:
        """All that is tied under a name is loaded, as it was, or raises when used."""
        for tied in self.matched.parameters[name].names:
            tensor = found[tied]
            if name in state.loaded:
                assert same_bits(tensor, self.new[name].to(dtype)), tied
            elif name in state.untouched:
                old = self.before[tied]
                assert not isinstance(tensor, (InvalidParameter, InvalidTensor))
                assert tensor.is_meta if old is None else same_bits(tensor, old), tied
            else:
                assert isinstance(tensor, (InvalidParameter, InvalidTensor))
                assert tensor.is_meta
                with pytest.raises(DeviceError):
                    tensor + 1
        assert len({id(found[tied]) for tied in self.matched.parameters[name].names}) == 1


def prepare(
    net: Any,
    made: Made,
    device: RecordedTorchDevice,
    *,
    dtype: Any = None,
    chunk_nbytes: int = 1000,
    threads: int = 2,
    reader: Any = "mmap",
    cast: Any = "llvm",
    out_of_range: Any = "inf",
    strict: bool = True,
) -> Staged:
    """Match and plan, as `load_state_dict` does for a device of that kind."""
    before = {n: None if t.is_meta else t.detach().clone() for n, t in entries(net).items()}
    checkpoint = open_checkpoint(made.path)
    policy = DTypePolicy.parse(dtype)
    model = ModelParameters(FRAMEWORK.parameters(net), {device.name})
    matched = match(checkpoint, model, sources(checkpoint, None, None), policy)
    matched.check(checkpoint.path, strict)
    info = device.info
    spec = DeviceSpec(
        info,
        10**9,
        native_bf16=info.native_bf16,
        device_casts=frozenset({("float32", "float16"), ("bfloat16", "float32")}),
    )
    plan = plan_of(
        checkpoint,
        spec,
        wants=matched.wants,
        dtype=dtype,
        out_of_range=out_of_range,
        cast=cast,
        readers=[reader] * len(checkpoint.shards),
        chunk_nbytes=chunk_nbytes,
        threads=threads,
    )
    peak = max(plan.devices[0].peak_nbytes, plan.devices[0].held_nbytes)
    # what was planned is all that there is: one byte more than that would be refused
    ledger = Ledger({device.name: peak, STAGING: plan.host_nbytes})
    target = ModelTarget(plan, FRAMEWORK, {device.name: device}, matched.parameters, ledger)
    return Staged(net, before, made.tensors, checkpoint, plan, matched, device, ledger, target)


class OddError(Exception):
    """An error that nobody knows."""


def fault(operation: str, odd: bool) -> BaseException:
    if odd:
        return OddError(operation)
    if operation in ("allocate", "staging"):
        return AllocationError("cpu", "injected", nbytes=1)
    if operation == "read":
        return CheckpointError("x.safetensors", "injected")
    return DeviceError("cpu", f"injected: {operation}")


def cutter(path: Path, nbytes: int, *, passing: str = "") -> Callable[[str], None]:
    """A `watch` that cuts a file at the first operation but ``passing``; all threads wait for it.

    The headers were read by then, and the file is open.
    """
    lock, left = threading.Lock(), [nbytes]

    def cut(operation: str) -> None:
        with lock:
            if left and operation != passing:
                os.truncate(path, left.pop())

    return cut


class _Shots(Faults):
    """Two signals at the n-th operation of any kind."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at_all = at
        self.fired = False

    def pass_by(self, operation: str) -> None:
        super().pass_by(operation)
        if sum(self.calls.values()) >= self._at_all and not self.fired:
            self.fired = True
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # an impatient user
