"""`make_plan`: from headers and a few numbers about devices to the plan of a load, without I/O.

The same checkpoint and specs give the same plan on every machine. Memory is read at most once a
token at the device's rate: of one sequence, KV cache and arithmetic not counted, a token takes at
least its bytes (`token_nbytes`) over that rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.cast_table import cast_engine, supported
from streamload.codecs.decode import MOST_NUMEL, check_target, scales_nbytes, there_nbytes
from streamload.codecs.llvm import lack
from streamload.codecs.stored import check_cast, together
from streamload.codecs.weights import Packed
from streamload.core.dtypes import BF16, F16, DType
from streamload.core.model_config import integer, language_part
from streamload.core.tensors import TensorInfo, region_of
from streamload.core.units import format_bytes, round_up
from streamload.devices.allocators import DRIVER_BLOCK_NBYTES, DRIVER_SHARED_NBYTES
from streamload.errors import ResidenceError, UnsupportedCastError
from streamload.planning.fit import CacheRoom, DeviceShare, check, fit
from streamload.planning.kv_cache import KvCache
from streamload.planning.moves import (
    Action,
    DeviceSpec,
    DTypePolicy,
    Kind,
    Move,
    Moves,
    TensorRequest,
    TensorRequests,
    rows_of,
)
from streamload.planning.partition import Item, Need, Node, Part, Unit, partition
from streamload.planning.plan import Plan
from streamload.planning.sources import tied_names

_EXPERTS = re.compile(r"\bexperts\.")
# A tensor of a module such as "embed_tokens" or "wte", and not of "embed_out" or "embed_proj".
_TABLE = re.compile(
    r"(?i)(?:^|[._])(?:(?:emb|embed|embeds|embeddings?|wte|wpe)"
    r"(?:_(?!out|proj|norm|layernorm|hidden)[^.]*)?|(?<![^.])shared)(?:\.weight\..+|\.[^.]+)$"
)
# Stacks that run once for a prompt: an encoder, or what reads images and sound.
_ENCODER = re.compile(r"(?:^|\.)encoder\.")
_TOWERS = re.compile(r"(?i)vision|visual|image|audio|speech|multi_modal|mm_projector")
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_OF_TOWERS = ("vision_config", "audio_config", "speech_config")


def token_nbytes(checkpoint: Checkpoint, placements: Moves) -> Mapping[str, int]:
    """Return the bytes of weights that one token reads, by device, as they are held there.

    An embedding counts one row, or all if the head shares its weight. Of experts the share counts
    that a token chooses by config.json, else all. Encoders, and towers for images and sound, do
    not count. Models of diffusers compute no tokens: 0 bytes.
    """
    if "_class_name" in checkpoint.config:
        return {}
    values, _ = language_part(checkpoint.config)
    chosen, count = (integer(values, key) for key in ("num_experts_per_tok", "num_experts"))
    once = _ENCODER if checkpoint.config.get("is_encoder_decoder") is True else None
    if any(key in checkpoint.config for key in _OF_TOWERS):
        once = _TOWERS
    tied: Sequence[tuple[str, str]] = ()  # the head has no tensor of its own
    has_own = any(name.endswith(".lm_head.weight") for name in checkpoint.tensors)
    if not has_own and values.get("tie_word_embeddings") is not False:
        tied = tied_names(checkpoint, _GENERATING)
    shared = tied[0][1] if tied else ""
    devices = [kind.device for kind, _ in placements.counted]
    out, experts = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    tables: list[tuple[str, int, int]] = []  # of the shared weight: device, bytes, bytes of a row
    has_copy = False
    sizes = {id(kind): (kind.nbytes, kind.device) for kind, _ in placements.counted}
    for name, source, kind, _, _ in placements:
        nbytes, device = sizes[id(kind)]
        if once is not None and once.search(name):
            continue
        if "experts" in name and _EXPERTS.search(name):
            experts[device] += nbytes
            continue
        of_table = "mb" in name or "wte" in name or "wpe" in name or "shared" in name
        tensor = source[0].tensor
        if of_table and _TABLE.search(name) and (rows := _rows(checkpoint, kind, tensor)):
            row_nbytes = -(-nbytes // rows)
            if tensor == shared:
                tables.append((device, nbytes, row_nbytes))
            else:
                out[device] += row_nbytes
        else:
            out[device] += nbytes
            has_copy |= tensor == shared
    for device, nbytes, row_nbytes in tables:
        out[device] += row_nbytes if has_copy else nbytes
    for device, nbytes in experts.items():
        out[device] += nbytes * min(chosen, count) // count if chosen and count else nbytes
    return out


def speed_line(plan: Plan, rates: Mapping[str, float | None]) -> str:
    """Return a line on the bytes that a token reads, and the most tokens a second; "" without.

    ``rates``: GB/s of each device's memory by name, None if it is not known; empty for nodes.
    """
    line = f"a token reads {format_bytes(plan.token_nbytes)} of weights"
    reading = [d for d in plan.devices if d.token_nbytes]
    if not reading or not rates:
        return line if reading else ""
    if unknown := [d.device for d in reading if not rates.get(d.device)]:
        named = "" if unknown[0] == "device" else f" --device {unknown[0]}"
        return f"{line}; streamload bench PATH{named} measures how many a second at most"
    each = [(d.token_nbytes, rates[d.device] or 0.0) for d in reading]
    tokens = 1 / sum(nbytes / 1e9 / rate for nbytes, rate in each)
    most = f"{tokens:,.{0 if tokens >= 100 else 1 if tokens >= 1 else 3}f}"
    shown = dict.fromkeys(f"{rate:,.{1 if rate < 100 else 0}f}" for _, rate in each)
    measured = f"{', '.join(shown)} GB/s measured by streamload bench"
    return f"{line}: at most {most} tokens a second ({measured})"


def _rows(checkpoint: Checkpoint, kind: Kind, tensor: str) -> int:
    """Return the rows of the matrix that a tensor of a table belongs to; 0 if it is no matrix."""
    shape = kind.shape if kind.coding is None else kind.coding.shape
    if kind.stored:
        shape = checkpoint.stored[tensor].shape or ()
    return shape[0] if len(shape) == 2 else 0


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
    moves = _allocated(_settled(_place(request, wants, where, notes), specs, notes), specs)
    kept = room.request if room is not None else None
    draft = replace(request.draft, placements=moves, notes=tuple(notes), cache=kept)
    shares = [DeviceShare(spec, moves.on(spec.name)) for spec in devices]
    plan = fit(draft, shares, parts, room)
    read = token_nbytes(checkpoint, moves)
    mine = (replace(d, token_nbytes=read.get(d.device, 0)) for d in plan.devices)
    plan = replace(plan, devices=tuple(mine))
    check(plan, shares, room, request.host_limit)
    return plan


def _place(
    request: PlanRequest,
    wants: TensorRequests,
    where: Sequence[str],
    notes: dict[str, None],
) -> Moves:
    """Return the moves of requests, in the order of the files; appends to ``notes``.

    ``where`` names the device of each request.
    """
    checkpoint, infos = request.checkpoint, wants.infos
    specs = {spec.name: spec for spec in request.devices}
    native = {specs[name].native_bf16 for name in set(where)}
    dsts = wants.dsts(request.dtype, True in native)
    if len(native) > 1:
        other = wants.dsts(request.dtype, False)
        dsts = [(dsts if specs[name].native_bf16 else other)[at] for at, name in enumerate(where)]
    shards = checkpoint.shard_numbers(infos).tolist()
    facts: Iterable[_Facts | None] = repeat(None)
    plain = request.residence == "memory" and not (request.changed or checkpoint.stored)
    if not plain or wants.any_packed or any(map(attrgetter("coding"), wants)):
        items = rows_of(_Item, wants, infos, dsts, map(specs.__getitem__, where), shards)
        facts = [_facts(request, item) for item in items]
    # in C where all are whole tensors: a load may have very many
    sources = list(map(attrgetter("source"), wants))
    firsts = [source[0] for source in sources]
    starts, stops, columns = (map(attrgetter(f), firsts) for f in ("start", "stop", "columns"))
    whole = max(map(len, sources), default=1) == 1 and not (any(starts) or any(columns))
    reads: Iterable[object] = (
        stops if whole else ((w.rows, w.source[0].columns is None) for w in wants)
    )
    # those with one key share a kind; dtypes by id: their own hash takes ten times as long
    own = map(attrgetter("shape", "transpose", "held", "coding"), wants)
    keys = list(zip(map(id, wants.srcs), map(id, dsts), where, own, reads, facts, strict=False))
    kinds: dict[Any, tuple[Kind, int, int]] = {}
    found: list[tuple[Kind, int, int]] = []
    doubtful = set[int]()
    for at, key in enumerate(keys):
        same = kinds.get(key)
        if same is None:
            dst, spec, src = dsts[at], specs[where[at]], wants.srcs[at]
            item = _Item(wants[at], infos[at], dst, spec, shards[at])
            same = kinds[key] = _kind(request, item, key[-1] or _PLAIN, notes)
            is_cast = item.want.coding is None and src is not dst
            small = src.bits <= 8 or not supported(src, dst)  # the small have scales
            if dst.name in spec.info.unsupported or dst.is_packed or (is_cast and small):
                doubtful.add(id(same[0]))
        found.append(same)
    for want, (kind, *_) in zip(wants, found, strict=True) if doubtful else ():
        if id(kind) in doubtful:
            _check_dtypes(checkpoint, want, kind, specs[kind.device])
    reusable: Iterable[int] = map(itemgetter(2), found)
    if any(nbytes for *_, nbytes in kinds.values()):
        given = zip((want.reusable_nbytes for want in wants), reusable, strict=True)
        reusable = (most if nbytes is None or not most else nbytes for nbytes, most in given)
    resident = map(itemgetter(1), found)
    own_kinds = map(itemgetter(0), found)
    moves = Moves(rows_of(Move, wants.names, sources, own_kinds, resident, reusable))
    places = list(zip(shards, map(attrgetter("start"), infos), strict=True))
    number_of = {header.path: number for number, header in enumerate(checkpoint.shards)}
    for at, source in enumerate(sources) if not whole else ():
        if len(source) > 1 or source[0].start or source[0].columns:
            parts = [(checkpoint.tensors[r.tensor], r) for r in source]
            places[at] = min((number_of[part.shard], region_of(part, r).start) for part, r in parts)
    return moves.chosen(sorted(range(len(moves)), key=places.__getitem__))  # stable


class _Item(NamedTuple):
    """A request, the first tensor that fills it, its dtype and device, and the shard's number."""

    want: TensorRequest
    info: TensorInfo
    dst: DType
    spec: DeviceSpec
    shard: int


class _Facts(NamedTuple):
    """What is decided of a request besides its dtype; see `Kind`."""

    mapped: bool
    changed: bool
    stored: str
    scales_nbytes: int
    there_nbytes: int


_PLAIN = _Facts(False, False, "", 0, 0)


def _facts(request: PlanRequest, item: _Item) -> _Facts:
    checkpoint, want, info, coding = request.checkpoint, item.want, item.info, item.want.coding
    changed = any(r.tensor in request.changed for r in want.source)
    stored = checkpoint.stored.get(info.name)  # blocks that are no floats of this load
    scales = there = 0
    if coding is not None and coding.nests and not coding.part:
        there = round_up(coding.statistics_nbytes, 8)
    if info.dtype.is_packed:
        infos = (checkpoint.tensors[r.tensor] for r in want.source)
        scales = sum(scales_nbytes(each.group) for each in infos if isinstance(each, Packed))
    if isinstance(info, Packed) and coding is None:
        # a device dequantizes only tensors that are read in one piece, in order
        rows, *more = want.source
        t = want.transpose
        by_element = t is None or (t.rows == math.prod(want.shape) and not rows.start)
        if by_element and not more and rows.columns is None and info.numel <= MOST_NUMEL:
            there = there_nbytes(info.group)
    mapped = request.residence != "memory" and _is_mapped(request, item, changed)
    kind = stored.kind if stored is not None and not info.dtype.is_packed else ""
    return _Facts(mapped, changed, kind, scales, there)


def _is_mapped(request: PlanRequest, item: _Item, changed: bool) -> bool:
    """Return whether a request becomes a view on its file; ResidenceError if "mapped" fails."""
    want, info, dst, spec, shard = item
    row, *others = want.source
    start = region_of(info, row).start if row.start else info.start
    why = ""
    if not spec.info.maps:
        why = f"{spec.name} does not compute on mapped files"
    elif not request.mappable[shard]:
        why = "the file is not on this machine"
    elif info.stop > request.checkpoint.shards[shard].file_nbytes:
        why = "its elements do not follow each other in the file"
    elif changed:
        why = "its values change on the way"
    elif want.coding is not None:
        why = "it is quantised on the way"
    elif want.fixed:
        why = want.fixed
    elif others or row.columns is not None or want.transpose is not None:
        why = "its rows do not follow each other in the file"
    elif info.dtype is not dst:
        why = f"{info.dtype} becomes {dst}"
    elif dst.bits < 8 or start % dst.itemsize:
        why = f"its bytes begin at {start}, no multiple of the {dst.bits} bits of {dst}"
    empty = not math.prod(want.shape)
    if why and request.residence == "mapped" and not empty:
        raise ResidenceError(want.name, info.shard, why)
    return not why and not empty


def _kind(
    request: PlanRequest, item: _Item, facts: _Facts, notes: dict[str, None]
) -> tuple[Kind, int, int]:
    """Return the kind of moves for requests like ``item``; appends to ``notes``.

    Also returns the bytes that each takes of the device alone, and those it can take over.
    """
    want, info, dst, spec, _ = item
    src, coding, mapped = info.dtype, want.coding, facts.mapped
    if coding is not None:
        on_device = spec.casts and coding.device_parts is not None
        cast = "part" if coding.part else "device" if on_device else "quant"
    elif spec.casts and facts.there_nbytes:
        cast = "device"
    elif mapped or facts.changed:
        cast = "mapped" if mapped else "rows"
    else:
        cast = _engine(request, src, dst, spec, notes)
    dst_nbytes = dst.nbytes(math.prod(want.shape))
    resident = 0 if mapped else spec.resident(dst_nbytes)
    action: Action = "new"
    released = reusable = 0
    if want.held is not None:
        device, what, nbytes = want.held
        reusable = nbytes if device == spec.name else 0
        if (device, what, nbytes) == (spec.name, dst.name, dst_nbytes) and not mapped:
            action, resident = "in_place", _as_given(resident, spec)
        else:
            action, released = "replace", _as_given(reusable, spec)
    kind = Kind(
        *(spec.name, want.shape, src, dst, want.rows, want.transpose, action, cast, released),
        coding,
        facts.scales_nbytes,
        facts.there_nbytes if cast == "device" else 0,
        facts.stored,
        want.source[0].columns is not None,
    )
    return kind, resident, reusable


def _as_given(nbytes: int, spec: DeviceSpec) -> int:
    """Return the bytes that the allocator took for ``nbytes`` of an old parameter.

    Only CUDA's driver rounds: a large allocation has whole blocks, which it keeps or gives back.
    Small allocations share blocks, and count unrounded; see `DeviceShare.timeline`.
    """
    large = spec.info.allocator == "cuda_driver" and nbytes > DRIVER_SHARED_NBYTES
    return round_up(nbytes, DRIVER_BLOCK_NBYTES) if large else nbytes


def _settled(moves: Moves, specs: Mapping[str, DeviceSpec], notes: dict[str, None]) -> Moves:
    """Return moves that replace all parameters of a device if only that fits its budget.

    An allocator with segments frees no segment in which a tensor stays, nor does CUDA's driver free
    a block that small tensors share. So writing some parameters in place may need more memory.
    """
    for name, spec in specs.items():
        mine = [kind for kind, _ in moves.counted if kind.device == name]
        kept = [kind for kind in mine if kind.action == "in_place"]
        is_mixed = bool(kept) and any(kind.released_nbytes for kind in mine)
        if spec.info.allocator == "exact" or not is_mixed:
            continue
        mixed = DeviceShare(spec, _allocated(moves.on(name), specs))
        if mixed.timeline.peak_nbytes <= spec.budget_nbytes:
            continue
        released = {id(move.kind): move.resident_nbytes for move in moves}
        instead = {
            id(kind): replace(kind, action="replace", released_nbytes=released[id(kind)])
            for kind in kept
        }
        moves = Moves(
            m._replace(kind=instead[id(m.kind)], resident_nbytes=spec.resident(m.kind.nbytes))
            if id(m.kind) in instead
            else m
            for m in moves
        )
        notes[f"{name}: all parameters are replaced, for not all can be written in place"] = None
    return moves


def _allocated(moves: Moves, specs: Mapping[str, DeviceSpec]) -> Moves:
    """Return moves whose resident bytes are rounded as their devices' allocators do."""
    for name, spec in specs.items():
        if spec.info.allocator == "exact":
            continue
        sizes = {
            id(kind): kind.nbytes
            for kind, _ in moves.counted
            if kind.device == name and kind.action != "in_place"
        }
        taken = spec.taken(sizes[id(m.kind)] for m in moves if id(m.kind) in sizes)
        moves = Moves(
            Move(m.name, m.source, m.kind, next(taken), m.reusable_nbytes)
            if id(m.kind) in sizes
            else m
            for m in moves
        )
    return moves


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
    if len(devices) == 1 or all(want.device is not None for want in wants):
        name = devices[0].name
        return {}, wants, [want.device or name for want in wants]
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
            (free[source]._replace(name=name, held=None), part.node)
            for name, source in part.tied
            if source in part.copies
        ]
    placed = TensorRequests.of(checkpoint, [want for want, _ in assigned])
    return {part.node: part for part in parts}, placed, [name for _, name in assigned]


def _check_dtypes(
    checkpoint: Checkpoint, want: TensorRequest, kind: Kind, spec: DeviceSpec
) -> None:
    """Raise UnsupportedCastError if a parameter cannot be cast as in ``kind``, or held there."""
    name, src, dst = want.source[0].tensor, kind.src, kind.dst
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
