"""`make_plan`: from headers and a few numbers about devices to the plan of a load, without I/O.

The same checkpoint and specs give the same plan on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.cast_table import cast_engine, supported
from streamload.codecs.decode import MOST_NUMEL, check_target, scales_nbytes, there_nbytes
from streamload.codecs.llvm import lack
from streamload.codecs.stored import check_cast, together
from streamload.codecs.weights import Packed
from streamload.core.dtypes import BF16, F16, DType
from streamload.core.tensors import first_byte
from streamload.core.units import round_up
from streamload.devices.allocators import DRIVER_BLOCK_NBYTES, DRIVER_SHARED_NBYTES
from streamload.errors import ResidenceError, UnsupportedCastError
from streamload.planning.cache_room import CacheRoom
from streamload.planning.cuts import Need
from streamload.planning.feasible import check
from streamload.planning.fit import DeviceShare, fit
from streamload.planning.kv_cache import KvCache
from streamload.planning.partition import Item, Node, Part, Unit, partition
from streamload.planning.placement import Action, Placement, Placements
from streamload.planning.plan import Plan
from streamload.planning.requests import DeviceSpec, DTypePolicy, TensorRequest, TensorRequests
from streamload.planning.tokens import token_nbytes

CastChoice = Literal["llvm", "numpy", "device"]
#: Where weights stay: in memory of their own, in the mapped file, or mapped if possible.
Residence = Literal["memory", "mapped", "auto"]

DEFAULT_CHUNK_NBYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A load to be planned.

    Attributes:
        draft: the plan without placements and devices. Its chunk and threads are upper bounds:
            budgets or devices may need less.
        devices: the devices to use; several are split by layers, in this order.
        cast: the engine that casts: "llvm", "numpy" or "device".
        tied: by name that is not stored, the parameter whose tensor it shares; under a split, a
            head gets a copy if its embedding is on another device.
        host_limit: the source of `Plan.host_budget_nbytes`: "budget" or "free memory".
        cache: the KV cache for which each device keeps room when the load is done, for the layers
            that it holds; None for none.
        residence: whether parameters are views on mapped files: "memory" none, "mapped" all,
            "auto" those that can be.
        mappable: whether each shard can be mapped; only read under "mapped" and "auto".
        changed: names of tensors whose values functions change on the way.
    """

    checkpoint: Checkpoint
    draft: Plan
    wants: Sequence[TensorRequest]
    devices: Sequence[DeviceSpec]
    dtype: DTypePolicy
    cast: CastChoice
    tied: Mapping[str, str]
    host_limit: str = "budget"
    cache: KvCache | None = None
    residence: Residence = "memory"
    mappable: Sequence[bool] = ()
    changed: Collection[str] = ()


def make_plan(request: PlanRequest) -> Plan:
    """Return the plan of a load; raises PlanInfeasibleError if a budget is too small."""
    checkpoint, devices, policy = request.checkpoint, request.devices, request.dtype
    specs = {spec.name: spec for spec in devices}
    cache, room = request.cache, None
    notes = dict.fromkeys(cache.notes if cache is not None else ())
    wants = TensorRequests.of(checkpoint, request.wants)
    if cache is not None:
        native = any(spec.native_bf16 for spec in devices)
        room = CacheRoom.of(checkpoint, wants, policy, cache, native)
    by_layer = room.layers if room is not None else ()
    parts, wants, where = assign(checkpoint, wants, devices, policy, request.tied, by_layer)
    if room is not None:
        room = room.placed(checkpoint, wants, where, policy)
    placements = _place(request, wants, where, notes)
    placements = _allocated(_settled(placements, specs, notes), specs)
    kept = room.request if room is not None else None
    draft = replace(request.draft, placements=placements, notes=tuple(notes), cache=kept)
    shares = [DeviceShare(spec, placements.on(spec.name)) for spec in devices]
    plan = fit(draft, shares, parts, room)
    read = token_nbytes(checkpoint, placements)
    mine = (replace(d, token_nbytes=read.get(d.device, 0)) for d in plan.devices)
    plan = replace(plan, devices=tuple(mine))
    check(plan, shares, room, request.host_limit)
    return plan


def _place(
    request: PlanRequest,
    wants: TensorRequests,
    where: Sequence[str],
    notes: dict[str, None],
) -> Placements:
    """Return the placements of requests, in the order of the files; appends to ``notes``.

    ``where`` names the device of each request. Requests that are equal but for name, source and
    sizes share one `Placement` as their kind.
    """
    checkpoint = request.checkpoint
    specs = {spec.name: spec for spec in request.devices}
    native = {specs[name].native_bf16 for name in set(where)}
    dsts = wants.dsts(request.dtype, True in native)
    if len(native) > 1:
        other = wants.dsts(request.dtype, False)
        dsts = [(dsts if specs[name].native_bf16 else other)[at] for at, name in enumerate(where)]
    changed = [False] * len(wants)
    if request.changed:
        changed = [any(r.tensor in request.changed for r in rows) for rows in wants.sources]
    mapped = _mapped(request, wants, where, dsts, changed)
    stored = checkpoint.stored  # blocks that are no floats of this load
    kept = [
        stored[info.name].kind if info.name in stored and not src.is_packed else ""
        for info, src in zip(wants.infos, wants.srcs, strict=True)
    ]
    scales = _scales_nbytes(checkpoint, wants)
    there = _there_nbytes(wants)
    keys = list(
        zip(
            *(map(id, wants.srcs), map(id, dsts)),
            *(where, wants.shapes, wants.transposes, wants.held, wants.codings),
            *(mapped, changed, scales, there, kept),
            strict=True,
        )
    )
    kinds: dict[Any, Placement] = {}
    doubtful = set()
    for at, key in enumerate(keys):
        if key in kinds:
            continue
        spec, coding = specs[where[at]], wants.codings[at]
        if coding is not None:
            on_device = spec.casts and coding.device_parts is not None
            cast = "part" if coding.part else "device" if on_device else "quant"
        elif spec.casts and there[at]:
            cast = "device"
        elif mapped[at] or changed[at]:
            cast = "mapped" if mapped[at] else "rows"
        else:
            cast = _engine(request, wants.srcs[at], dsts[at], spec, notes)
        kinds[key] = kind = replace(
            _kind(wants[at], wants.srcs[at], dsts[at], spec, cast),
            stored=kept[at],
            scales_nbytes=scales[at],
            there_nbytes=there[at] if cast == "device" else 0,
        )
        is_cast = coding is None and kind.src is not kind.dst
        small = kind.src.bits <= 8 or not supported(kind.src, kind.dst)  # the small have scales
        if kind.dst.name in spec.info.unsupported or kind.dst.is_packed or (is_cast and small):
            doubtful.add(key)
    for at in [at for at, key in enumerate(keys) if key in doubtful] if doubtful else ():
        kind = kinds[keys[at]]
        _check_dtypes(checkpoint, wants[at], kind.src, kind.dst, specs[where[at]])
    places = _first_bytes(checkpoint, wants)
    order = sorted(range(len(keys)), key=places.__getitem__)  # stable
    found = [kinds[key] for key in keys]
    resident = [kind.resident_nbytes for kind in found]
    reusable = [
        nbytes if nbytes is not None and kind.reusable_nbytes else kind.reusable_nbytes
        for kind, nbytes in zip(found, wants.reusable_nbytes, strict=True)
    ]
    return Placements(found, wants.names, wants.sources, resident, reusable).chosen(order)


def _scales_nbytes(checkpoint: Checkpoint, wants: TensorRequests) -> Sequence[int]:
    """Return the host bytes of each request's scales while it is dequantized; 0 without scales."""
    if not wants.any_packed:
        return [0] * len(wants)
    found = ([checkpoint.tensors[r.tensor] for r in source] for source in wants.sources)
    return [sum(scales_nbytes(i.group) for i in each if isinstance(i, Packed)) for each in found]


def _there_nbytes(wants: TensorRequests) -> Sequence[int]:
    """Return the bytes of each request's scales on a device that (de)quantizes it; 0 without.

    A device dequantizes only tensors that are read in one piece, in order.
    """
    found = [0] * len(wants)
    if not wants.any_packed and not any(wants.codings):
        return found
    for at, (info, coding) in enumerate(zip(wants.infos, wants.codings, strict=True)):
        if coding is not None and coding.nests and not coding.part:
            found[at] = round_up(coding.statistics_nbytes, 8)
        if not isinstance(info, Packed) or coding is not None:
            continue
        rows, *more = wants.sources[at]
        t = wants.transposes[at]
        by_element = t is None or (t.rows == math.prod(wants.shapes[at]) and not rows.start)
        if by_element and not more and rows.columns is None and info.numel <= MOST_NUMEL:
            found[at] = there_nbytes(info.group)
    return found


def _mapped(
    request: PlanRequest,
    wants: TensorRequests,
    where: Sequence[str],
    dsts: Sequence[DType],
    changed: Sequence[bool],
) -> Sequence[bool]:
    """Return whether each request becomes a view on its file; ResidenceError if "mapped" fails."""
    if request.residence == "memory":
        return [False] * len(wants)
    out = []
    shards = request.checkpoint.shard_numbers(wants.infos).tolist()
    specs = {spec.name: spec for spec in request.devices}
    for at, (info, dst, name) in enumerate(zip(wants.infos, dsts, where, strict=True)):
        row, *others = wants.sources[at]
        start = first_byte(info, row)
        why = ""
        if not specs[name].info.maps:
            why = f"{name} does not compute on mapped files"
        elif not request.mappable[shards[at]]:
            why = "the file is not on this machine"
        elif info.stop > request.checkpoint.shards[shards[at]].file_nbytes:
            why = "its elements do not follow each other in the file"
        elif changed[at]:
            why = "its values change on the way"
        elif wants.codings[at] is not None:
            why = "it is quantised on the way"
        elif wants.fixed[at]:
            why = wants.fixed[at]
        elif others or row.columns is not None or wants.transposes[at] is not None:
            why = "its rows do not follow each other in the file"
        elif info.dtype is not dst:
            why = f"{info.dtype} becomes {dst}"
        elif dst.bits < 8 or start % dst.itemsize:
            why = f"its bytes begin at {start}, no multiple of the {dst.bits} bits of {dst}"
        empty = not math.prod(wants.shapes[at])
        if why and request.residence == "mapped" and not empty:
            raise ResidenceError(wants.names[at], info.shard, why)
        out.append(not why and not empty)
    return out


def _kind(want: TensorRequest, src: DType, dst: DType, spec: DeviceSpec, cast: str) -> Placement:
    """Return the placement that requests like ``want`` share; ``cast``: as in `Placement.cast`."""
    dst_nbytes = dst.nbytes(math.prod(want.shape))
    mapped = cast == "mapped"
    resident = 0 if mapped else spec.resident(dst_nbytes)
    action: Action = "new"
    released = reusable = 0
    if want.held is not None:
        where, what, nbytes = want.held
        reusable = nbytes if where == spec.name else 0
        if (where, what, nbytes) == (spec.name, dst.name, dst_nbytes) and not mapped:
            action, resident = "in_place", _as_given(resident, spec)
        else:
            action, released = "replace", _as_given(reusable, spec)
    return Placement(
        *("", spec.name, want.shape, src, dst, (), want.transpose),
        *(action, cast, resident, released, reusable, want.coding),
    )


def _as_given(nbytes: int, spec: DeviceSpec) -> int:
    """Return the bytes that the allocator took for ``nbytes`` of an old parameter.

    Only CUDA's driver rounds: a large allocation has whole blocks, which it keeps or gives back.
    Small allocations share blocks, and count unrounded; see `DeviceShare.timeline`.
    """
    large = spec.info.allocator == "cuda_driver" and nbytes > DRIVER_SHARED_NBYTES
    return round_up(nbytes, DRIVER_BLOCK_NBYTES) if large else nbytes


def _first_bytes(checkpoint: Checkpoint, wants: TensorRequests) -> list[tuple[int, int]]:
    """Return (shard number, file byte) at which reading each request begins."""
    shards = checkpoint.shard_numbers(wants.infos).tolist()
    places = list(zip(shards, map(attrgetter("start"), wants.infos), strict=True))
    number_of = {header.path: number for number, header in enumerate(checkpoint.shards)}
    for at, source in enumerate(wants.sources):
        if len(source) > 1 or source[0].start or source[0].columns:
            parts = [(checkpoint.tensors[r.tensor], r) for r in source]
            places[at] = min((number_of[info.shard], first_byte(info, r)) for info, r in parts)
    return places


def _settled(
    placements: Placements, specs: Mapping[str, DeviceSpec], notes: dict[str, None]
) -> Placements:
    """Return placements that replace all parameters of a device if only that fits its budget.

    An allocator with segments frees no segment in which a tensor stays, nor does CUDA's driver free
    a block that small tensors share. So writing some parameters in place may need more memory.
    """
    for name, spec in specs.items():
        mine = [kind for kind, _ in placements.counted if kind.device == name]
        kept = {id(kind): kind for kind in mine if kind.action == "in_place"}
        released = any(kind.released_nbytes for kind in mine)
        if spec.info.allocator == "exact" or not kept or not released:
            continue
        mixed = DeviceShare(spec, _allocated(placements.on(name), specs))
        if mixed.timeline.peak_nbytes <= spec.budget_nbytes:
            continue
        instead = {
            key: replace(
                kind,
                action="replace",
                resident_nbytes=spec.resident(kind.nbytes),
                released_nbytes=kind.resident_nbytes,
            )
            for key, kind in kept.items()
        }
        kinds = [instead.get(id(kind), kind) for kind in placements.kinds]
        resident = [kind.resident_nbytes for kind in kinds]
        placements = replace(placements, kinds=kinds, resident_nbytes=resident)
        notes[f"{name}: all parameters are replaced, for not all can be written in place"] = None
    return placements


def _allocated(placements: Placements, specs: Mapping[str, DeviceSpec]) -> Placements:
    """Return placements whose resident bytes are rounded as their devices' allocators do."""
    resident = list(placements.resident_nbytes)
    for name, spec in specs.items():
        if spec.info.allocator == "exact":
            continue
        sizes = {
            id(kind): kind.nbytes
            for kind, _ in placements.counted
            if kind.device == name and kind.action != "in_place"
        }
        kinds = enumerate(map(id, placements.kinds))
        fresh = {at: sizes[kind] for at, kind in kinds if kind in sizes}
        for at, nbytes in zip(fresh, spec.taken(fresh.values()), strict=True):
            resident[at] = nbytes
    return replace(placements, resident_nbytes=resident)


def assign(
    checkpoint: Checkpoint,
    wants: TensorRequests,
    devices: Sequence[DeviceSpec],
    dtype: DTypePolicy,
    tied: Mapping[str, str],
    cache: Sequence[int] = (),
    needs: Callable[[Unit], Need] | None = None,
) -> tuple[dict[str, Part], TensorRequests, list[str]]:
    """Give each parameter a device: the requested or only device, or by a split over several.

    ``cache`` (extra bytes by layer) and ``needs`` (least memory of a unit) are for `partition`.
    Returns the part of each device under a split; the parameters; each one's device name.
    """
    if len(devices) == 1 or None not in wants.devices:
        name = devices[0].name
        return {}, wants, [device or name for device in wants.devices]
    nbytes = dict(zip(wants.names, wants.nbytes(dtype), strict=True))
    fixed = [(want, want.device) for want in wants if want.device is not None]
    free = {want.name: want for want in wants if want.device is None}
    taken = {spec.name: 0 for spec in devices}
    for want, name in fixed:
        taken[name] += nbytes[want.name]
    # what belongs to one quantised weight is one item, by the name of its first tensor
    rows = ((want.source[0].tensor, name) for name, want in free.items())
    alike = {names[0]: names for names in together(checkpoint.members, rows)}
    parts = partition(
        [Item(name, sum(nbytes[each] for each in names)) for name, names in alike.items()],
        [Node(s.name, max(s.budget_nbytes - taken[s.name], 1), s.held) for s in devices],
        tied={k: v for k, v in tied.items() if v in free and k not in free},
        cache=cache,
        needs=needs,
    )
    assigned = list(fixed)
    for part in parts:
        assigned += [(free[each], part.node) for name in part.names for each in alike[name]]
        # a head whose embedding is on another device has a copy there, under its own name
        assigned += [
            (replace(free[source], name=name, held=None), part.node)
            for name, source in part.tied
            if source in part.copies
        ]
    placed = TensorRequests.of(checkpoint, [want for want, _ in assigned])
    return {part.node: part for part in parts}, placed, [name for _, name in assigned]


def _check_dtypes(
    checkpoint: Checkpoint, want: TensorRequest, src: DType, dst: DType, spec: DeviceSpec
) -> None:
    """Raise UnsupportedCastError if a parameter cannot be cast to ``dst`` or held in it there."""
    name = want.source[0].tensor
    info = checkpoint.tensors[name]
    refused = partial(UnsupportedCastError, tensor=name, path=info.shard)
    if isinstance(info, Packed) and want.coding is None:
        _check_packed(checkpoint, want, dst)
    elif src is not dst and want.coding is None:
        if not supported(src, dst):
            reason = f'the model has {want.name} in {dst}; dtype="checkpoint" replaces it'
            raise refused(src.name, dst.name, reason=reason if want.dtype is not None else "")
        for part in dict.fromkeys(r.tensor for r in want.source):
            check_cast(checkpoint.layouts, part, dst, 'load it with dtype="checkpoint"')
    if dst.name in spec.info.unsupported:
        raise refused(dst.name, dst.name, reason=f"{spec.name} has no such dtype")


def _check_packed(checkpoint: Checkpoint, want: TensorRequest, dst: DType) -> None:
    """Raise UnsupportedCastError if a parameter's tensors cannot be dequantized to ``dst``."""
    infos = [checkpoint.tensors[r.tensor] for r in want.source]
    for info in infos:
        if not isinstance(info, Packed):
            continue
        check_target(info, dst)
        why = ""
        if any(other.dtype is not info.dtype for other in infos):
            why = f"{want.name} is put together of weights that are stored differently"
        elif info.dtype.unit > 1 and want.transpose is not None and len(infos) > 1:
            why = f"{want.name} is put together of several weights of {info.dtype}, and transposed"
        if why:
            raise UnsupportedCastError(
                info.dtype.name, dst.name, reason=why, tensor=info.name, path=info.shard
            )


def _engine(
    request: PlanRequest, src: DType, dst: DType, spec: DeviceSpec, notes: dict[str, None]
) -> str:
    """Return the engine that casts, such as "llvm"; adds a note if it is not the requested one."""
    cast, fp16_cast = request.cast, request.dtype.fp16_cast
    if src is dst:
        return "copy"
    if src.is_packed:
        return "numpy" if cast == "numpy" or lack() else "llvm"
    if spec.casts and not (fp16_cast == "llvm" and (src, dst) == (BF16, F16)):
        return "device"
    wanted = fp16_cast if fp16_cast is not None and (src, dst) == (BF16, F16) else cast
    if wanted == "llvm" and cast == "numpy":
        wanted = cast  # asked for, or all there is: no kernel can be compiled here
    if wanted != "device":
        return wanted
    fallback = cast_engine(src, dst) if cast == "device" else cast
    if (src.name, dst.name) not in spec.device_casts:
        why = f"{spec.name} does not cast {src} to {dst} exactly"
    elif (out_of_range := request.draft.out_of_range) != "inf":
        why = f'only the host can do out_of_range="{out_of_range}"'
    else:
        notes[f"{src} is cast to {dst} on the device: overflows there are not counted"] = None
        return "device"
    notes[f"{src} is cast to {dst} on the host ({fallback}), not on the device: {why}"] = None
    return fallback
