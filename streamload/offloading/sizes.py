"""What layers, their cache and what a pass computes take of a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from streamload.checkpoint.open import Checkpoint
from streamload.core.units import round_up
from streamload.errors import CheckpointError
from streamload.loading.prepare import Options
from streamload.offloading.groups import Group
from streamload.offloading.residency import LayerSize, Residency
from streamload.planning.cache_room import CacheRoom
from streamload.planning.kv_cache import CacheRequest, KvCache
from streamload.planning.plan import SEGMENTS
from streamload.planning.requests import DeviceSpec, TensorRequests
from streamload.planning.room import CUDA_WORKSPACE_NBYTES, HOST_WORKSPACE_NBYTES, activation_nbytes

# Tensors in a slot begin at multiples of this: what torch's allocator for CUDA rounds to. What a
# matrix product gives may depend on where its weights begin.
SLOT_ALIGNMENT_NBYTES = 512
_SEGMENT_NBYTES = 2**21  # what an allocator with segments rounds a large piece to


def layer_sizes(
    options: Options, wants: TensorRequests, spec: DeviceSpec, groups: Sequence[Group]
) -> list[LayerSize]:
    """What each group takes of a device."""
    dsts = wants.dsts(options.policy, spec.native_bf16)
    nbytes = [dst.nbytes(math.prod(shape)) for dst, shape in zip(dsts, wants.shapes, strict=True)]
    read = [src.nbytes(math.prod(s)) for src, s in zip(wants.srcs, wants.shapes, strict=True)]
    return [
        LayerSize(
            group.name,
            group.kind,
            sum(round_up(nbytes[at], SLOT_ALIGNMENT_NBYTES) for at in group.wants),
            sum(spec.resident(nbytes[at]) for at in group.wants),
            sum(read[at] for at in group.wants),
            group.experts,
            group.chosen,
            _expert_nbytes(group, nbytes),
        )
        for group in groups
    ]


def _expert_nbytes(group: Group, nbytes: Sequence[int]) -> int:
    """What one of a group's experts takes in a slot."""
    share = 1 if group.apart else max(group.experts, 1)
    mine = group.wants[: group.parts]
    return sum(round_up(nbytes[at] // share, SLOT_ALIGNMENT_NBYTES) for at in mine)


def computed_nbytes(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    tokens: int,
    *,
    has_head: bool = True,
) -> int:
    """What a pass of so many tokens computes on a device beside weights and cache, in bytes."""
    dsts = wants.dsts(options.policy, spec.native_bf16)
    wide = max((dst.itemsize for dst in dsts if dst.kind == "float"), default=2)
    reused = spec.info.allocator in SEGMENTS
    found = activation_nbytes(
        *(checkpoint.config, tokens, wide), path=checkpoint.path, reused=reused, has_head=has_head
    )
    return found + (CUDA_WORKSPACE_NBYTES if reused else HOST_WORKSPACE_NBYTES)


def cache_nbytes_of(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    tokens: int | None,
) -> int:
    """What the KV cache of all layers takes: as asked for, or that of a pass of so many tokens."""
    cache = cache_of(options, checkpoint, tokens)
    if cache is None:
        return 0
    room = CacheRoom.of(checkpoint, wants, options.policy, cache, spec.native_bf16)
    room = room.placed(checkpoint, wants, [spec.name] * len(wants), options.policy)
    return room.nbytes(spec, cache.request.context)


def cache_of(options: Options, checkpoint: Checkpoint, tokens: int | None) -> KvCache | None:
    """The KV cache to leave room for: as asked for, or that of a pass of so many tokens.

    Raises:
        CheckpointError: one was asked for, and how much it takes is not known.
    """
    asked, config = options.cache, checkpoint.config
    if asked is not None:
        return KvCache.of(config, asked, path=checkpoint.path)
    if tokens is None or config.get("use_cache") is False:
        return None
    try:
        return KvCache.of(config, CacheRequest(tokens), path=checkpoint.path)
    except CheckpointError:  # a model without a cache, or nobody knows of one
        return None


def rounded(found: Residency, spec: DeviceSpec) -> Residency:
    """The same with slots as an allocator with segments takes them."""
    if spec.info.allocator not in SEGMENTS or not found.arena_nbytes:
        return found
    if found.experts:
        pad_nbytes = round_up(found.arena_nbytes, _SEGMENT_NBYTES) - found.arena_nbytes
        return replace(found, pad_nbytes=pad_nbytes)
    arena = round_up(found.arena_nbytes, _SEGMENT_NBYTES)
    slot_nbytes = arena // found.slots // SLOT_ALIGNMENT_NBYTES * SLOT_ALIGNMENT_NBYTES
    return replace(found, slot_nbytes=slot_nbytes)
