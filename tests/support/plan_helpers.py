"""Helpers that `test_plan` shares with other tests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.core.dtypes import BY_CODE
from streamload.core.memory import DEFAULT_HOST_NBYTES
from streamload.core.tensors import RowRange, TensorInfo
from streamload.devices.base import DeviceInfo
from streamload.files.header import Header
from streamload.planning.chunks import Chunk, Cut
from streamload.planning.moves import DeviceSpec, DTypePolicy, Moves, TensorRequest
from streamload.planning.plan import Plan
from streamload.planning.planner import DEFAULT_CHUNK_NBYTES, PlanRequest, make_plan


def checkpoint_of(
    *shards: Mapping[str, tuple[str, Sequence[int]]], config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """A checkpoint of headers alone: (dtype code, shape) by name, for each shard."""
    headers = []
    for number, tensors in enumerate(shards):
        path = Path(f"shard-{number}.safetensors")
        infos, at = [], 1000
        for name, (code, shape) in tensors.items():
            nbytes = BY_CODE[code].nbytes(math.prod(shape))
            infos.append(TensorInfo(name, BY_CODE[code], tuple(shape), path, at, at + nbytes))
            at += nbytes
        headers.append(Header(path, at, 1000, tuple(infos), {}))
    return from_headers(Path("model"), headers, config or {})


def wants_of(checkpoint: Checkpoint, **changes: Any) -> list[TensorRequest]:
    return [
        TensorRequest(
            info.name,
            info.shape,
            (RowRange(info.name, 0, info.shape[0] if info.shape else 1),),
            **changes,
        )
        for info in checkpoint.tensors.values()
    ]


def device_spec(name: str, budget_nbytes: int, **given: Any) -> DeviceSpec:
    """A device for two threads with these fields of `DeviceInfo` or `DeviceSpec`."""
    own = {key: given.pop(key) for key in DeviceSpec.__slots__ if key in given}
    return DeviceSpec(DeviceInfo(name, "", **{"threads": 2, **given}), budget_nbytes, **own)


def plan_of(
    checkpoint: Checkpoint,
    *specs: DeviceSpec,
    wants: Sequence[TensorRequest] | None = None,
    dtype: Any = "checkpoint",
    fp16_cast: Any = None,
    **changes: Any,
) -> Plan:
    """`make_plan` with defaults for what a test is not about."""
    own = {key: changes.pop(key) for key in PlanRequest.__slots__ if key in changes}
    draft = replace(draft_of(checkpoint), **changes)
    request = PlanRequest(
        checkpoint,
        replace(draft, readers=tuple(draft.readers), reader_reasons=tuple(draft.reader_reasons)),
        wants_of(checkpoint) if wants is None else wants,
        devices=specs,
        dtype=DTypePolicy.parse(dtype, fp16_cast),
        cast="llvm",
        tied={},
    )
    return make_plan(replace(request, **own))


def draft_of(checkpoint: Checkpoint) -> Plan:
    return Plan(
        path=str(checkpoint.path),
        placements=Moves(),
        devices=(),
        host_nbytes=0,
        host_budget_nbytes=DEFAULT_HOST_NBYTES,
        chunk_nbytes=DEFAULT_CHUNK_NBYTES,
        slot_nbytes=DEFAULT_CHUNK_NBYTES,
        threads=2,
        readers=("mmap",) * len(checkpoint.shards),
        out_of_range="inf",
    )


def chunks(plan: Plan, checkpoint: Checkpoint) -> Iterator[Chunk]:
    """The chunks of a plan, of at most ``plan.chunk_nbytes`` each, without batches."""
    cut = Cut(plan, checkpoint)
    for piece in cut.packs_and_chunks(lambda p: plan.chunk_nbytes, lambda p: 0, 1):
        assert isinstance(piece, Chunk)
        yield piece
