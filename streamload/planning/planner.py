"""Making a plan: pure, and fast.

`make_plan` decides everything from headers and a few numbers about devices. The same checkpoint and
specs give the same plan on every machine.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from heapq import nsmallest
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeVar, overload

from streamload.cast.table import OutOfRange, supported
from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.header import TensorInfo
from streamload.checkpoint.page_cache import PageCacheKind
from streamload.checkpoint.readers import BOUNCE_NBYTES, ResolvedKind
from streamload.dtypes import BF16, F16, DType, DTypeArgument, parse_dtype
from streamload.errors import CheckpointError, PlanInfeasibleError, UnsupportedCastError
from streamload.planning.allocators import (
    DRIVER_BLOCK_NBYTES,
    DRIVER_SHARED_NBYTES,
    TRIM_NBYTES,
    AllocatorKind,
    taken,
)
from streamload.planning.budget import DEFAULT_HOST_NBYTES, STAGING
from streamload.planning.kv_cache import COMPUTED_IN, CacheRequest, KvCache
from streamload.planning.partition import Item, Node, Part, partition, smallest_count, units_of
from streamload.planning.plan import (
    LOAD_NBYTES,
    SEGMENTS,
    STAGING_SLOTS,
    TALLY_NBYTES,
    Action,
    DevicePlan,
    Placement,
    Placements,
    Plan,
    RowRange,
    RowTranspose,
    all_rows,
    slot_nbytes,
)
from streamload.units import format_bytes, round_up

CastChoice = Literal["llvm", "numpy", "device"]
_Key = TypeVar("_Key")

DEFAULT_CHUNK_NBYTES = 8 * 2**20
MIN_CHUNK_NBYTES = 64 * 2**10
_LEAST_READ_FROM_NBYTES = 16 * 2**20
_SHARED_CHUNK_NBYTES = 2**20  # fewer threads before shorter chunks: each costs calls

NUMPY_SCRATCH_NBYTES = 4 * 2**20  # temporaries of one numpy cast call, whatever its length


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the planner needs to know of a device (or a node), in bytes.

    Attributes:
        name: canonical name.
        budget_nbytes: the most that may be held there, without ``reserve_nbytes``.
        limit: what sets the budget: "budget" where it was stated, "free memory" where it was not.
        free_nbytes: what is really free now; None where nobody looked.
        host_free_nbytes: what is free of the memory that all devices with ``shared_memory`` draw
            on; None where nobody looked.
        host_visible: the CPU writes its memory directly; no staging.
        shared_memory: its memory is the host's, so staging counts against its budget.
        granularity_nbytes: allocations are rounded up to a multiple of this.
        allocator: how its allocator takes memory from the device.
        largest_allocation_nbytes: the largest single allocation; None for no limit.
        max_transfer_nbytes: the largest single transfer; None for no limit.
        threads: how many threads may write at once; 0 for the calling thread only.
        native_bf16: it computes in bfloat16 natively.
        unsupported: names of dtypes that it cannot hold.
        device_casts: (src, dst) names of the dtype pairs that its own cast gets exactly right.
        casts: it casts floats in kernels of streamload's, exactly and counted, in the calls of the
            thread that reads.
        reserve_nbytes: what was taken off the budget and off what is free, to stay free.
        object_nbytes: what the process takes for each tensor beside its bytes.
        kernel_nbytes: what the kernel takes for each.
        left_nbytes: what stays taken of each that is released.
        own_host: it is a node, on whose memory no other one draws.
    """

    name: str
    budget_nbytes: int
    limit: str = "budget"
    free_nbytes: int | None = None
    host_free_nbytes: int | None = None
    host_visible: bool = True
    shared_memory: bool = True
    granularity_nbytes: int = 1
    allocator: AllocatorKind = "exact"
    largest_allocation_nbytes: int | None = None
    max_transfer_nbytes: int | None = None
    threads: int = 2
    native_bf16: bool = False
    unsupported: frozenset[str] = frozenset()
    device_casts: frozenset[tuple[str, str]] = frozenset()
    casts: bool = False
    reserve_nbytes: int = 0
    object_nbytes: int = 0
    kernel_nbytes: int = 0
    left_nbytes: int = 0
    own_host: bool = False

    def resident(self, nbytes: int) -> int:
        """Bytes that the allocator counts for a tensor of ``nbytes``."""
        return round_up(nbytes, self.granularity_nbytes)


@dataclass(frozen=True, slots=True)
class Want:
    """One parameter to be filled, as the model (or the checkpoint alone) asks for it.

    Attributes:
        name: the parameter's name.
        shape: its shape.
        source: row ranges, concatenated in order.
        transpose: a permutation of the concatenated rows, or None.
        device: where it must go; None lets the planner split over the devices.
        held: (device, dtype, bytes) that the parameter holds now; None where it holds nothing.
        dtype: the dtype it must have; None asks the policy.
        reusable_nbytes: of what it holds, for `Placement.reusable_nbytes`; None for all.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[RowRange, ...]
    transpose: RowTranspose | None = None
    device: str | None = None
    held: tuple[str, str, int] | None = None
    dtype: DType | None = None
    reusable_nbytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wants(Sequence[Want]):
    """Parameters to be filled, in columns: the fields of `Want`, and the tensors.

    Attributes:
        infos: the tensors that the first rows of each are from.
    """

    infos: Sequence[TensorInfo]
    names: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    sources: Sequence[tuple[RowRange, ...]]
    transposes: Sequence[RowTranspose | None]
    devices: Sequence[str | None]
    held: Sequence[tuple[str, str, int] | None]
    dtypes: Sequence[DType | None]
    reusable_nbytes: Sequence[int | None]

    @classmethod
    def of(cls, checkpoint: Checkpoint, wants: Sequence[Want]) -> Wants:
        """Put wants into columns."""
        if isinstance(wants, Wants):
            return wants
        columns = [list(map(attrgetter(field), wants)) for field in Want.__slots__]
        tensors = checkpoint.tensors
        return cls([tensors[want.source[0].tensor] for want in wants], *columns)

    @classmethod
    def every(cls, checkpoint: Checkpoint) -> Wants:
        """Every tensor of a checkpoint, under its own name."""
        infos = tuple(checkpoint.tensors.values())
        names, shapes = ([*map(attrgetter(field), infos)] for field in ("name", "shape"))
        none = [None] * len(infos)
        sources = list(zip(all_rows(infos), strict=True))
        return cls(infos, names, shapes, sources, none, none, none, none, none)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Want: ...
    @overload
    def __getitem__(self, at: slice) -> list[Want]: ...
    def __getitem__(self, at: int | slice) -> Want | list[Want]:
        """One, or several."""
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        columns: tuple[Sequence[Any], ...] = (
            *(self.names, self.shapes, self.sources, self.transposes),
            *(self.devices, self.held, self.dtypes, self.reusable_nbytes),
        )
        return Want(*(column[at] for column in columns))


@dataclass(frozen=True, slots=True)
class DTypePolicy:
    """Which dtype each tensor gets.

    Attributes:
        rules: (pattern, dtype) in order; the first whose pattern matches the name decides. A
            dtype of None stands for "as in the checkpoint".
        fp16_cast: "device" or "llvm" where bf16 was asked to become fp16 that way, else None.
    """

    rules: tuple[tuple[str, DType | None], ...] = ()
    fp16_cast: Literal["device", "llvm"] | None = None

    @classmethod
    def parse(
        cls,
        value: DTypeArgument,
        fp16_cast: Literal["device", "llvm"] | None = None,
    ) -> DTypePolicy:
        """Read a dtype name, "checkpoint", or patterns: ``{"*norm*": "float32", "*": "float16"}``.

        Raises:
            ValueError: a dtype is unknown, or is not one of floats.
        """
        if value is None:
            return cls((), fp16_cast)
        rules = value if isinstance(value, Mapping) else {"*": value}
        read: list[tuple[str, DType | None]] = []
        for pattern, wanted in rules.items():
            if not isinstance(pattern, str):
                raise ValueError(f"a pattern of names is a string, not {pattern!r}")
            dtype = None if wanted == "checkpoint" else parse_dtype(wanted)
            if dtype is not None and dtype.kind != "float":
                raise ValueError(f"only floats are cast, and only to floats: not to {dtype}")
            read.append((pattern, dtype))
        return cls(tuple(read), fp16_cast)

    @property
    def by_name(self) -> bool:
        """Whether tensors of one dtype may get different ones."""
        return any(pattern != "*" for pattern, _ in self.rules)

    def mentions(self, name: str) -> bool:
        """Whether a rule decides the dtype of tensor ``name``."""
        rules = self.rules  # without any, which is usual, this is asked of every parameter
        return bool(rules) and any(p == "*" or fnmatchcase(name, p) for p, _ in rules)

    def resolve(self, name: str, src: DType, native_bf16: bool) -> DType:
        """The dtype of tensor ``name`` on a device; integers, bools and complex pass unchanged."""
        if src.kind != "float":
            return src
        for pattern, dtype in self.rules:
            if pattern == "*" or fnmatchcase(name, pattern):
                return src if dtype is None else dtype
        if src is BF16 and (self.fp16_cast is not None or not native_bf16):
            return F16
        return src


def different(wants: Wants, policy: DTypePolicy) -> Sequence[Want]:
    """The first want of each kind: by its dtypes and its device, all that are the same.

    All wants, where a rule may tell them apart by name.
    """
    if policy.by_name:
        return wants
    dtypes = [dtype and dtype.name for dtype in wants.dtypes]
    keys = zip(map(attrgetter("dtype.name"), wants.infos), dtypes, wants.devices, strict=True)
    return [wants[at] for at in _firsts(list(keys)).values()]


def _firsts(keys: Sequence[_Key]) -> dict[_Key, int]:
    """Where each key stands first, in that order."""
    backwards = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
    return dict(sorted(backwards.items(), key=itemgetter(1)))


def make_plan(
    checkpoint: Checkpoint,
    *,
    wants: Sequence[Want],
    devices: Sequence[DeviceSpec],
    dtype: DTypePolicy,
    out_of_range: OutOfRange,
    cast: CastChoice,
    readers: Sequence[ResolvedKind],
    tied: Mapping[str, str],
    host_budget_nbytes: int = DEFAULT_HOST_NBYTES,
    host_limit: str = "budget",
    chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
    threads: int = 2,
    page_cache: PageCacheKind = "auto",
    reader_reasons: Sequence[str] = (),
    cache: KvCache | None = None,
) -> Plan:
    """Decide a load.

    Args:
        checkpoint: the headers.
        wants: the parameters; names are unique.
        devices: where they may go; several are split by layers, in this order.
        dtype: the policy.
        out_of_range: what happens to finite values that the target dtype cannot represent.
        cast: which cast engine.
        readers: how each shard is read, in order.
        tied: names that share another name's tensor, for a split: a head on another device than
            its embedding gets a copy.
        host_budget_nbytes: most bytes of host staging that no device's budget covers.
        host_limit: what sets that: "budget" or "free memory".
        chunk_nbytes: most bytes in a chunk; made smaller where budgets or devices ask for it.
        threads: most streaming threads; made fewer likewise.
        page_cache: what becomes of the page cache; for `Plan.page_cache`.
        reader_reasons: why each shard is read so; for `Plan.reader_reasons`.
        cache: the KV cache that each device is to have room for when the load is done, for the
            layers that it holds.

    Raises:
        PlanInfeasibleError: the parameters do not fit, or not with the cache.
        UnsupportedCastError: a dtype cannot be had, or a device cannot hold it.
        CheckpointError: there is a cache, and it is not known in which dtype or of which tensors.
    """
    specs = {spec.name: spec for spec in devices}
    notes = dict.fromkeys(cache.notes if cache is not None else ())
    engine = partial(
        _engine, cast=cast, fp16_cast=dtype.fp16_cast, out_of_range=out_of_range, notes=notes
    )
    wants = Wants.of(checkpoint, wants)
    native = any(spec.native_bf16 for spec in devices)
    room = _Room.of(checkpoint, wants, dtype, cache, native) if cache is not None else None
    by_layer = room.layers if room is not None else ()
    parts, wants, where = _assign(checkpoint, wants, devices, dtype, tied, by_layer)
    room = room.placed(checkpoint, wants, where, dtype) if room is not None else None
    placements = _place(checkpoint, wants, [specs[name] for name in where], dtype, engine)
    placements = _allocated(_settled(placements, specs, notes), specs)
    draft = Plan(
        path=str(checkpoint.path),
        placements=placements,
        devices=(),
        host_nbytes=0,
        host_budget_nbytes=host_budget_nbytes,
        chunk_nbytes=chunk_nbytes,
        slot_nbytes=chunk_nbytes,
        threads=threads,
        readers=tuple(readers),
        out_of_range=out_of_range,
        notes=tuple(notes),
        page_cache=page_cache,
        reader_reasons=tuple(reader_reasons),
        cache=room.request if room is not None else None,
    )
    by_device = {name: placements.on(name) for name in specs}
    plan = _fit(draft, specs, by_device, parts, room)
    same_budget = len({spec.budget_nbytes for spec in devices}) == 1
    for mine in plan.devices:
        here = by_device[mine.device]
        _check(plan, mine, specs, here, same_budget=same_budget, room=room)
    _check_pool(plan, specs)
    if plan.host_nbytes > plan.host_budget_nbytes:
        raise PlanInfeasibleError(
            STAGING,
            plan.host_nbytes,
            plan.host_budget_nbytes,
            limit=host_limit,
            would_fit=[f'Budget(..., host="{-(-plan.host_nbytes // 2**10)}KiB")']
            if host_limit == "budget"
            else (),
        )
    return plan


def _place(
    checkpoint: Checkpoint,
    wants: Wants,
    specs: Sequence[DeviceSpec],
    policy: DTypePolicy,
    engine: _EngineChoice,
) -> Placements:
    """Place wants on a device each, in the order of the files, so that each is read once.

    Those of one kind are alike in all that a kind says: it is made once.
    """
    by_name = [info.name if policy.by_name else "" for info in wants.infos]
    keys = list(
        zip(
            map(attrgetter("dtype.name"), wants.infos),
            *(by_name, wants.shapes, wants.transposes, map(attrgetter("name"), specs)),
            *(wants.held, [dtype and dtype.name for dtype in wants.dtypes]),
            strict=True,
        )
    )
    kinds: dict[Any, Placement] = {}
    doubtful = set()
    for key, at in _firsts(keys).items():
        kind = kinds[key] = _kind(checkpoint, wants[at], specs[at], policy, engine)
        small = kind.src.bits <= 8 or not supported(kind.src, kind.dst)  # the small have scales
        if kind.dst.name in specs[at].unsupported or (kind.src is not kind.dst and small):
            doubtful.add(key)
    for at in [at for at, key in enumerate(keys) if key in doubtful] if doubtful else ():
        kind = kinds[keys[at]]
        _check_dtypes(checkpoint, wants[at], kind.src, kind.dst, specs[at])
    places = _first_bytes(checkpoint, wants)
    order = sorted(range(len(keys)), key=places.__getitem__)  # stable
    found = [kinds[keys[at]] for at in order]
    reusable = [kind.reusable_nbytes for kind in found]
    for n, at in enumerate(order):
        there = wants.reusable_nbytes[at]
        if reusable[n] and there is not None:
            reusable[n] = there
    return Placements(
        [wants.names[at] for at in order],
        found,
        [wants.sources[at] for at in order],
        [kind.resident_nbytes for kind in found],
        reusable,
    )


def _kind(
    checkpoint: Checkpoint,
    want: Want,
    spec: DeviceSpec,
    policy: DTypePolicy,
    engine: _EngineChoice,
) -> Placement:
    """What wants of a kind have in common, with all of what they hold as reusable."""
    src, dst = _want_dtypes(checkpoint, want, policy, spec.native_bf16)
    dst_nbytes = dst.nbytes(math.prod(want.shape))
    resident = spec.resident(dst_nbytes)
    action: Action = "new"
    released = reusable = 0
    if want.held is not None:
        where, what, nbytes = want.held
        reusable = nbytes if where == spec.name else 0
        if (where, what, nbytes) == (spec.name, dst.name, dst_nbytes):
            action, resident = "in_place", _as_given(resident, spec)
        else:
            action, released = "replace", _as_given(reusable, spec)
    cast = engine(src, dst, spec)
    return Placement(
        *("", spec.name, want.shape, src, dst, (), want.transpose),
        *(action, cast, resident, released, reusable),
    )


def _as_given(nbytes: int, spec: DeviceSpec) -> int:
    """What an allocator has given for bytes that are held.

    Only CUDA's driver tells: a large one has blocks of its own, which it keeps or gives back. Small
    ones share theirs, and stand at their own size; `_timeline` knows of their blocks.
    """
    large = spec.allocator == "cuda_driver" and nbytes > DRIVER_SHARED_NBYTES
    return round_up(nbytes, DRIVER_BLOCK_NBYTES) if large else nbytes


def _first_bytes(checkpoint: Checkpoint, wants: Wants) -> list[tuple[int, int]]:
    """(shard, file byte) at which reading each begins."""
    shards = checkpoint.shard_numbers(wants.infos).tolist()
    places = list(zip(shards, map(attrgetter("start"), wants.infos), strict=True))
    number_of = {header.path: number for number, header in enumerate(checkpoint.shards)}
    for at, source in enumerate(wants.sources):
        if len(source) > 1 or source[0].start:
            rows = sum(r.stop - r.start for r in source)
            numel = math.prod(wants.shapes[at])
            row_nbytes = wants.infos[at].dtype.nbytes(numel) // rows if rows else 0
            infos = [(checkpoint.tensors[r.tensor], r.start * row_nbytes) for r in source]
            places[at] = min((number_of[info.shard], info.start + n) for info, n in infos)
    return places


def _settled(
    placements: Placements, specs: Mapping[str, DeviceSpec], notes: dict[str, None]
) -> Placements:
    """Replace what could be written in place, where that is the way to fit.

    An allocator with segments gives none back in which something stays, nor does CUDA's driver with
    the blocks that small ones share. Where parameters to be written in place and others to be
    replaced would not fit on those terms, all are replaced.
    """
    for name, spec in specs.items():
        mine = [kind for kind, _ in placements.counted if kind.device == name]
        kept = {id(kind): kind for kind in mine if kind.action == "in_place"}
        if spec.allocator == "exact" or not kept or not any(kind.released_nbytes for kind in mine):
            continue
        if _timeline(_allocated(placements.on(name), specs), spec)[1] <= spec.budget_nbytes:
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
        placements = Placements(
            *(placements.names, kinds, placements.sources),
            *([kind.resident_nbytes for kind in kinds], placements.reusable_nbytes),
        )
        notes[f"{name}: all parameters are replaced, for not all can be written in place"] = None
    return placements


def _allocated(placements: Placements, specs: Mapping[str, DeviceSpec]) -> Placements:
    """Say what each takes of its device, where allocators take more than is asked."""
    resident = list(placements.resident_nbytes)
    for name, spec in specs.items():
        if spec.allocator == "exact":
            continue
        fresh = [
            at
            for at, kind in enumerate(placements.kinds)
            if kind.device == name and kind.action != "in_place"
        ]
        sizes = (placements.kinds[at].nbytes for at in fresh)
        takes = taken(spec.allocator, spec.granularity_nbytes, sizes)
        for at, nbytes in zip(fresh, takes, strict=True):
            resident[at] = nbytes
    columns = (placements.names, placements.kinds, placements.sources)
    return Placements(*columns, resident, placements.reusable_nbytes)


def _assign(
    checkpoint: Checkpoint,
    wants: Wants,
    devices: Sequence[DeviceSpec],
    dtype: DTypePolicy,
    tied: Mapping[str, str],
    cache: Sequence[int] = (),
) -> tuple[dict[str, Part], Wants, list[str]]:
    """Give each parameter a device: its own, the only one, or by a split over several.

    Returns:
        What each device has under a split; the parameters, and the device of each.
    """
    if len(devices) == 1 or None not in wants.devices:
        return {}, wants, [device or devices[0].name for device in wants.devices]
    fixed = [(want, want.device) for want in wants if want.device is not None]
    free = {want.name: want for want in wants if want.device is None}
    taken = {spec.name: 0 for spec in devices}
    for want, name in fixed:
        taken[name] += _want_nbytes(checkpoint, want, dtype)
    parts = partition(
        [Item(name, _want_nbytes(checkpoint, want, dtype)) for name, want in free.items()],
        [Node(spec.name, max(spec.budget_nbytes - taken[spec.name], 1)) for spec in devices],
        tied={k: v for k, v in tied.items() if v in free and k not in free},
        cache=cache,
    )
    assigned = list(fixed)
    for part in parts:
        assigned += [(free[name], part.node) for name in part.names]
        # a head whose embedding is on another device has a copy there, under its own name
        assigned += [
            (replace(free[source], name=name, held=None), part.node)
            for name, source in part.tied
            if source in part.copies
        ]
    placed = Wants.of(checkpoint, [want for want, _ in assigned])
    return {part.node: part for part in parts}, placed, [name for _, name in assigned]


@dataclass(frozen=True, slots=True)
class _Room:
    """The KV cache that there has to be room for when the load is done.

    Attributes:
        cache: what each layer keeps.
        dtype: its dtype.
        path: of the checkpoint, for errors.
        on: which layers each device holds, when that is known.
    """

    cache: KvCache
    dtype: DType
    path: str
    on: Mapping[str, Sequence[int]]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        wants: Wants,
        policy: DTypePolicy,
        cache: KvCache,
        native_bf16: bool,
    ) -> _Room:
        """Say in which dtype a cache is.

        What was asked for, or what most bytes of the weights become, if models compute in that,
        or what the configuration names.

        Raises:
            CheckpointError: none of them is there.
        """
        dtype = cache.request.dtype
        if dtype is None:
            nbytes: dict[str, int] = {}  # by name: a dtype's own hash takes ten times as long
            for want in wants:
                dst = _want_dtypes(checkpoint, want, policy, native_bf16)[1]
                nbytes[dst.name] = nbytes.get(dst.name, 0) + dst.nbytes(math.prod(want.shape))
            most = max(nbytes, key=lambda name: nbytes[name], default="")
            dtype = next((one for one in COMPUTED_IN if one.name == most), cache.configured)
        path = str(checkpoint.path)
        if dtype is None:
            raise CheckpointError(
                path,
                "the dtype of the KV cache is not known",
                expected="cache_dtype=",
                found="none",
            )
        return cls(cache, dtype, path, {})

    @property
    def request(self) -> CacheRequest:
        """What was asked for, with the dtype."""
        return replace(self.cache.request, dtype=self.dtype)

    @property
    def layers(self) -> list[int]:
        """Bytes of the cache of each layer."""
        asked = self.request
        return [
            sum(map(self.dtype.nbytes, layer.elements(asked.context, asked.batch)))
            for layer in self.cache.layers
        ]

    def placed(
        self, checkpoint: Checkpoint, wants: Wants, devices: Sequence[str], policy: DTypePolicy
    ) -> _Room:
        """The same with the layers on devices: each where most of its weights are.

        Raises:
            CheckpointError: the checkpoint has layers, and none is known by its name.
        """
        where = dict(zip(wants.names, devices, strict=True))
        items = [Item(want.name, _want_nbytes(checkpoint, want, policy)) for want in wants]
        on: dict[str, list[int]] = {}
        # in place of bytes the layers' numbers, from 1, so that units tell which they are
        numbers = range(1, len(self.cache.layers) + 1)
        for unit in units_of(items, cache=numbers):
            if unit.cache_nbytes:
                weights = dict.fromkeys((where[item.name] for item in unit.items), 0)
                for item in unit.items:
                    weights[where[item.name]] += item.nbytes
                most = max(weights, key=lambda name: weights[name])
                on.setdefault(most, []).append(unit.cache_nbytes - 1)
        # what is loaded may be the end of a model; all of it has layers
        everything = (Item(name, 0) for name in checkpoint.tensors if not on)
        if not on and not any(unit.cache_nbytes for unit in units_of([*everything], cache=numbers)):
            raise CheckpointError(
                self.path,
                "which layer of the KV cache belongs where, the names of the tensors tell",
                expected="names of layers, such as model.layers.0",
                found="none",
            )
        return replace(self, on=on)

    def nbytes(self, spec: DeviceSpec, context: int) -> int:
        """Bytes that the cache of so many tokens takes of a device, as its allocator rounds."""
        batch = self.cache.request.batch
        sizes = (
            self.dtype.nbytes(elements)
            for layer in self.on.get(spec.name, ())
            for elements in self.cache.layers[layer].elements(context, batch)
        )
        return sum(taken(spec.allocator, spec.granularity_nbytes, sizes))

    def most_context(self, devices: Iterable[DevicePlan], specs: Mapping[str, DeviceSpec]) -> int:
        """For how many tokens, at most, there is room on all devices; 0 for none."""
        rooms = []
        for d in devices:
            spec = specs[d.device]
            room = spec.budget_nbytes - d.resident_nbytes
            if spec.free_nbytes is not None:
                room = min(room, spec.free_nbytes + d.reusable_nbytes - d.resident_nbytes)
            rooms.append((spec, room))
        contexts = range(1, self.cache.request.context + 1)
        return bisect_right(
            contexts,
            False,
            key=lambda context: any(self.nbytes(spec, context) > room for spec, room in rooms),
        )


def _want_dtypes(
    checkpoint: Checkpoint, want: Want, dtype: DTypePolicy, native_bf16: bool = False
) -> tuple[DType, DType]:
    src = checkpoint.tensors[want.source[0].tensor].dtype
    dst = want.dtype or dtype.resolve(want.source[0].tensor, src, native_bf16)
    return src, dst


def _want_nbytes(checkpoint: Checkpoint, want: Want, dtype: DTypePolicy) -> int:
    numel = math.prod(want.shape)
    return _want_dtypes(checkpoint, want, dtype)[1].nbytes(numel)


def _check_dtypes(
    checkpoint: Checkpoint, want: Want, src: DType, dst: DType, spec: DeviceSpec
) -> None:
    """Raise UnsupportedCastError for a parameter that cannot be cast so, or not held there."""
    name = want.source[0].tensor
    info = checkpoint.tensors[name]
    if src is not dst:
        if not supported(src, dst):
            raise UnsupportedCastError(src.name, dst.name, tensor=name, path=info.shard)
        for part in dict.fromkeys(r.tensor for r in want.source):
            scale = checkpoint.scale_of(part)
            if scale is not None:
                raise UnsupportedCastError(
                    src.name,
                    dst.name,
                    reason=f"its values mean nothing without their scale ({scale}); "
                    'load it with dtype="checkpoint"',
                    tensor=part,
                    path=checkpoint.tensors[part].shard,
                )
    if dst.name in spec.unsupported:
        raise UnsupportedCastError(
            dst.name,
            dst.name,
            reason=f"{spec.name} has no such dtype",
            tensor=name,
            path=info.shard,
        )


def _engine(
    src: DType,
    dst: DType,
    spec: DeviceSpec,
    *,
    cast: CastChoice,
    fp16_cast: str | None,
    out_of_range: OutOfRange,
    notes: dict[str, None],
) -> str:
    """The cast of one pair; notes where it is not the one that was asked for."""
    if src is dst:
        return "copy"
    if spec.casts and not (fp16_cast == "llvm" and (src, dst) == (BF16, F16)):
        return "device"
    wanted = fp16_cast if fp16_cast is not None and (src, dst) == (BF16, F16) else cast
    if wanted == "llvm" and cast == "numpy":
        wanted = cast  # asked for, or all there is: no kernel can be compiled here
    if wanted != "device":
        return wanted
    fallback = "llvm" if cast == "device" else cast
    if (src.name, dst.name) not in spec.device_casts:
        why = f"{spec.name} does not cast {src} to {dst} exactly"
    elif out_of_range != "inf":
        why = f'only the host can do out_of_range="{out_of_range}"'
    else:
        notes[f"{src} is cast to {dst} on the device: overflows there are not counted"] = None
        return "device"
    notes[f"{src} is cast to {dst} on the host ({fallback}), not on the device: {why}"] = None
    return fallback


#: The cast of one pair on a device.
_EngineChoice = Callable[[DType, DType, DeviceSpec], str]


def _fit(
    draft: Plan,
    specs: Mapping[str, DeviceSpec],
    by_device: Mapping[str, Placements],
    parts: Mapping[str, Part],
    room: _Room | None,
) -> Plan:
    """Choose threads and chunk size so that staging fits, and predict the peaks."""
    threads = min([draft.threads, *(specs[n].threads for n, ps in by_device.items() if ps)])
    needs = _needs(draft.placements, specs)
    if any("device" in casts and not specs[n].casts for n, casts in needs.casts.items()):
        threads = 0  # the framework launches kernels from the calling thread
    chunk = min(
        [draft.chunk_nbytes]
        + [spec.max_transfer_nbytes for spec in specs.values() if spec.max_transfer_nbytes]
    )
    most_host_nbytes = draft.host_budget_nbytes
    base = {name: _timeline(ps, specs[name]) for name, ps in by_device.items()}
    fresh = {name: _fresh(ps, specs[name], *base[name]) for name, ps in by_device.items()}
    whole = 0
    for p in draft.placements.kinds:
        whole += slot_nbytes(max(p.nbytes, p.src_nbytes))
        if whole >= slot_nbytes(chunk):  # no slot is larger
            break
    share = _share(draft, specs, needs, threads, most_host_nbytes)
    while share < min(_SHARED_CHUNK_NBYTES, chunk) and threads > 1:
        threads -= 1
        share = _share(draft, specs, needs, threads, most_host_nbytes)
    chunk = max(min(chunk, share), min(chunk, MIN_CHUNK_NBYTES))
    while True:
        slot = min(slot_nbytes(chunk), whole)
        plan = replace(draft, threads=threads, chunk_nbytes=chunk, slot_nbytes=slot)
        scratch, host = _staging(plan, specs, needs)
        tight = host > most_host_nbytes or any(
            nbytes and nbytes > _room(specs[name], base[name][1], fresh[name], by_device[name])
            for name, nbytes in scratch.items()
        )
        if not tight or (chunk <= MIN_CHUNK_NBYTES and threads <= 1):
            break
        # fewer threads before chunks below 1 MiB: a chunk costs tens of microseconds in calls
        if chunk > _SHARED_CHUNK_NBYTES:
            chunk //= 2
        elif threads > 1:
            threads -= 1
        else:
            chunk //= 2
    out = []
    for name, ps in by_device.items():
        held, peak, release_first = base[name]
        part = parts.get(name)
        out.append(
            DevicePlan(
                device=name,
                budget_nbytes=specs[name].budget_nbytes,
                resident_nbytes=sum(ps.resident_nbytes),
                scratch_nbytes=scratch[name],
                peak_nbytes=peak + scratch[name],
                fresh_nbytes=fresh[name] + scratch[name],
                held_nbytes=held,
                layers=(part.layers.start, part.layers.stop) if part else None,
                embedding=bool(part and part.has_embedding),
                head=bool(part and part.has_head),
                release_first=release_first,
                cache_nbytes=room.nbytes(specs[name], room.request.context) if room else 0,
                reserve_nbytes=specs[name].reserve_nbytes,
                reusable_nbytes=_reusable(ps, specs[name], held),
                object_nbytes=len(ps) * specs[name].object_nbytes,
                kernel_nbytes=len(ps) * specs[name].kernel_nbytes,
                shared_memory=specs[name].shared_memory,
            )
        )
    return replace(plan, devices=tuple(out), host_nbytes=host)


def _share(
    draft: Plan,
    specs: Mapping[str, DeviceSpec],
    needs: _Needs,
    threads: int,
    host_nbytes: int,
) -> int:
    """The chunk with which all slots together fill the host's bytes, however many there are."""
    fixed, with_one = (
        _staging(replace(draft, threads=threads, slot_nbytes=nbytes), specs, needs)[1]
        for nbytes in (0, MIN_CHUNK_NBYTES)
    )
    if with_one == fixed:
        return draft.chunk_nbytes
    return (host_nbytes - fixed) // (with_one - fixed) * MIN_CHUNK_NBYTES


def _room(spec: DeviceSpec, peak_nbytes: int, fresh_nbytes: int, placements: Placements) -> int:
    """Bytes that are left for scratch on a device beside its parameters."""
    room = spec.budget_nbytes - peak_nbytes
    if spec.free_nbytes is not None:
        beside = 0
        if spec.shared_memory:
            beside = LOAD_NBYTES + len(placements) * (spec.object_nbytes + spec.kernel_nbytes)
        room = min(room, spec.free_nbytes - fresh_nbytes - beside)
    return room


def _timeline(placements: Placements, spec: DeviceSpec) -> tuple[int, int, bool]:
    """(held at the beginning, peak, whether all old parameters must go first), in bytes."""
    budget_nbytes = max(spec.budget_nbytes, 0)
    total = sum(placements.resident_nbytes)
    if placements.all_new:  # nothing is held, nothing goes
        return 0, total, total > budget_nbytes
    rows = list(zip(placements.kinds, placements.resident_nbytes, strict=True))
    stays = [resident for kind, resident in rows if kind.action == "in_place"]
    goes = [kind.released_nbytes for kind, _ in rows]
    held = sum(stays) + sum(goes)
    fresh = total - sum(stays)
    if spec.allocator == "cuda_driver":
        # Blocks of large ones go back one by one, each for the next. One that small ones share goes
        # back when the last of them is gone, and were they released one by one, new ones would be
        # put between those that are left: then none might ever go back.
        kept, released = _in_shared_blocks(placements)
        shared = sum(taken(spec.allocator, spec.granularity_nbytes, (*kept, *released)))
        held += shared - sum(kept) - sum(released)
        if released:
            # beside what stays of them, none of their blocks may go back at all
            return held, total - sum(kept) + (shared if kept else 0), True
    now = peak = held
    for kind, resident in rows:
        now -= kind.released_nbytes
        now += resident if kind.action != "in_place" else 0
        peak = max(peak, now)
    if spec.allocator in SEGMENTS and any(goes):
        # what goes one by one leaves holes in segments, which larger ones do not fit into; and
        # beside what stays where it is, none of it may go back to the device at all
        if not stays:
            return held, now, True
        sizes = (r if kind.action == "in_place" else kind.released_nbytes for kind, r in rows)
        return held, sum(taken(spec.allocator, spec.granularity_nbytes, sizes)) + fresh, True
    if peak > max(held, budget_nbytes) or (held > budget_nbytes >= now):
        # growing parameters come before shrinking ones, or the old ones alone are too large:
        # released together they make room for the new ones
        return held, now, True
    return held, peak, False


def _fresh(
    placements: Placements,
    spec: DeviceSpec,
    held_nbytes: int,
    peak_nbytes: int,
    release_first: bool,
) -> int:
    """Bytes that parameters newly take at their peak, of a device on which some may be held."""
    if not spec.shared_memory:
        shares = spec.allocator == "cuda_driver" and _in_shared_blocks(placements)[1]
        # what is released may stay taken, for others of the process are there too: on an H200, of
        # 515 blocks that a model's weights take where they come first, 514 came back
        return max(peak_nbytes - held_nbytes + (DRIVER_BLOCK_NBYTES if shares else 0), 0)
    if placements.all_new:
        return sum(placements.resident_nbytes)
    columns = (placements.kinds, placements.resident_nbytes, placements.reusable_nbytes)
    rows = list(zip(*columns, strict=True))
    replaced = [reusable for kind, _, reusable in rows if kind.released_nbytes]
    now = peak = -sum(replaced) if release_first else 0
    for kind, resident, reusable in rows:
        if kind.action == "in_place":
            now += 0 if reusable >= kind.nbytes else resident - reusable
        else:
            now += resident - (0 if release_first else reusable)
        peak = max(peak, now)
    left = sum(min(spec.left_nbytes, reusable) for reusable in replaced)
    return max(peak, 0) + min(TRIM_NBYTES, sum(replaced)) + left


def _reusable(placements: Placements, spec: DeviceSpec, held_nbytes: int) -> int:
    """How many of the bytes that are held on a device the load takes over."""
    if not spec.shared_memory or placements.all_new:
        return held_nbytes
    return sum(placements.reusable_nbytes)


def _in_shared_blocks(placements: Placements) -> tuple[list[int], list[int]]:
    """Sizes of what shares blocks of CUDA's driver now: of those that stay, of those that go."""
    if placements.all_new:
        return [], []
    rows = zip(placements.kinds, placements.resident_nbytes, strict=True)
    kept = [resident for kind, resident in rows if kind.action == "in_place"]
    released = [kind.released_nbytes for kind in placements.kinds]
    small = range(1, DRIVER_SHARED_NBYTES + 1)
    return [n for n in kept if n in small], [n for n in released if n in small]


@dataclass(frozen=True, slots=True)
class _Needs:
    """What staging depends on.

    Attributes:
        casts: the casts on each device that has any placements.
        moves: the devices for which some bytes are cast or reordered by the host: they cannot be
            read to where they go.
        tallies: by device, how many placements it casts and counts.
        resizes: the devices on which such casts change the size of the elements.
        least_read: see `_least_read`.
    """

    casts: Mapping[str, Set[str]]
    moves: Set[str]
    tallies: Mapping[str, int]
    resizes: Set[str]
    least_read: int


def _needs(placements: Placements, specs: Mapping[str, DeviceSpec]) -> _Needs:
    casts: dict[str, set[str]] = {}
    moves: set[str] = set()
    tallies: dict[str, int] = {}
    resizes: set[str] = set()
    for p, count in placements.counted:
        casts.setdefault(p.device, set()).add(p.cast)
        if p.cast in ("llvm", "numpy") or p.transpose:
            moves.add(p.device)
        if p.cast == "device" and specs[p.device].casts:
            tallies[p.device] = tallies.get(p.device, 0) + count
            if p.src.bits != p.dst.bits:
                resizes.add(p.device)
    return _Needs(casts, moves, tallies, resizes, _least_read(placements) if moves else 0)


def _staging(
    plan: Plan, specs: Mapping[str, DeviceSpec], needs: _Needs
) -> tuple[dict[str, int], int]:
    """Scratch per device (staging included, where it shares memory) and host staging, in bytes."""
    workers = max(plan.threads, 1)
    slots = workers * STAGING_SLOTS
    scratch = dict.fromkeys(specs, 0)
    host = own = 0
    shares = []
    for name, casts in needs.casts.items():
        spec = specs[name]
        if spec.shared_memory:
            shares.append(name)
        if name in needs.tallies:
            before = slots * plan.slot_nbytes if name in needs.resizes else 0
            scratch[name] += round_up(
                before + TALLY_NBYTES * needs.tallies[name], DRIVER_BLOCK_NBYTES
            )
        elif "device" in casts:
            # raw bits, and the cast before it is in place
            nbytes = plan.slot_nbytes
            if spec.allocator == "cuda_driver":
                nbytes = round_up(nbytes, DRIVER_BLOCK_NBYTES)
            scratch[name] += 2 * nbytes
        if "device" in casts or not spec.host_visible:
            staged = slots * plan.staging_nbytes
            scratch[name] += staged if spec.shared_memory else 0
            host += 0 if spec.shared_memory else staged
    # what a worker holds of its own: a source buffer, the temporaries of a numpy cast
    if needs.moves and not {"pread", "direct"}.isdisjoint(plan.readers):
        own += workers * plan.slot_nbytes
    if "direct" in plan.readers and needs.casts:
        own += workers * BOUNCE_NBYTES
    if any("numpy" in casts for casts in needs.casts.values()):
        own += workers * NUMPY_SCRATCH_NBYTES
    if shares and needs.moves and not own and not any(scratch[name] for name in shares):
        own = needs.least_read
    for name in shares if any(specs[n].own_host for n in shares) else shares[:1]:
        scratch[name] += own  # of one memory it counts once
    if not shares:
        host += own
    return scratch, host


def _least_read(placements: Placements) -> int:
    """What a cast takes at least of files that are read and not mapped, in bytes.

    Files that are planned to be mapped may have to be read, where little memory is free: with this
    in every plan that casts, a budget of exactly its peak is enough for either. Checkpoints of a
    few megabytes do without: it would be a good part of them.
    """
    nbytes = sum(p.nbytes * count for p, count in placements.counted)
    return MIN_CHUNK_NBYTES if nbytes >= _LEAST_READ_FROM_NBYTES else 0


def _check(
    plan: Plan,
    mine: DevicePlan,
    specs: Mapping[str, DeviceSpec],
    placements: Placements,
    *,
    same_budget: bool,
    room: _Room | None,
) -> None:
    """Refuse a plan that does not fit one device, with the numbers and with what would fit."""
    spec = specs[mine.device]
    most = spec.largest_allocation_nbytes
    if most is not None and any(p.nbytes > most for p, _ in placements.counted):
        at = next(at for at, kind in enumerate(placements.kinds) if kind.nbytes > most)
        largest = [(placements.names[at], placements.kinds[at].nbytes)]
        raise PlanInfeasibleError(
            spec.name, largest[0][1], most, limit="largest allocation", largest=largest
        )
    limit, available, needed = spec.limit, spec.budget_nbytes, mine.needed_nbytes
    new = mine.host_needed_nbytes if spec.shared_memory else mine.fresh_needed_nbytes
    if spec.free_nbytes is not None and new > spec.free_nbytes and needed <= available:
        limit, available, needed = "free memory", spec.free_nbytes, new
    if needed <= available:
        return
    suggestions = []
    sizes = (kind.nbytes // _shrink(kind.dst) for kind in placements.kinds)
    small = sum(taken(spec.allocator, spec.granularity_nbytes, sizes))
    small += needed - mine.resident_nbytes
    small += _least_read(placements) if spec.shared_memory and not mine.scratch_nbytes else 0
    if room is not None and room.cache.request.dtype is None:  # it would shrink as well
        shrunk = mine.cache_nbytes - mine.cache_nbytes // _shrink(room.dtype)
        small -= min(shrunk, max(mine.run_nbytes - mine.peak_nbytes, 0))
    if any(_shrink(p.dst) > 1 for p, _ in placements.counted) and small <= available:
        suggestions.append(f'dtype="float16" ({format_bytes(small)})')
    if room is not None and mine.peak_nbytes <= spec.budget_nbytes:
        context = room.most_context(plan.devices, specs)
        if 0 < context < room.cache.request.context:
            suggestions.append(f"context={context}")
    if same_budget:
        count = smallest_count(
            list(map(Item, plan.placements.names, plan.placements.resident_nbytes)),
            max(available - mine.scratch_nbytes, 0),
            cache=room.layers if room is not None else (),
        )
        if count is not None and count > len(plan.devices):
            suggestions.append(f"{count} devices or nodes of {format_bytes(available)}")
    largest = [("the KV cache", mine.cache_nbytes)] if mine.cache_nbytes else []
    if limit == "free memory":
        beside = mine.object_nbytes + mine.kernel_nbytes
        largest += [(f"what {len(placements)} tensors take beside their bytes", beside)]
    named = zip(placements.names, (kind.nbytes for kind in placements.kinds), strict=True)
    parameters = nsmallest(8 - len(largest), named, key=lambda x: (-x[1], x[0]))
    largest = sorted([*largest, *parameters], key=lambda x: -x[1])
    raise PlanInfeasibleError(
        spec.name,
        needed,
        available,
        limit=limit,
        largest=largest,
        would_fit=suggestions,
        reason=_why_new(mine) if limit == "free memory" else "",
    )


def _why_new(mine: DevicePlan) -> str:
    """Why writing to memory that a model holds takes memory, or ""."""
    absent = mine.held_nbytes - mine.reusable_nbytes
    if absent <= 0:
        return ""
    return (
        f"of the {format_bytes(mine.held_nbytes)} that the model holds, {format_bytes(absent)} "
        "count as new: they were never written, are mapped from a file, or are shared with another "
        "process"
    )


def _check_pool(plan: Plan, specs: Mapping[str, DeviceSpec]) -> None:
    """Refuse a plan whose devices fit one by one, but not together in the memory they share."""
    sharing = [d for d in plan.devices if specs[d.device].shared_memory and d.host_needed_nbytes]
    known = [specs[d.device].host_free_nbytes for d in sharing]
    free = min((nbytes for nbytes in known if nbytes is not None), default=None)
    needed = sum(d.host_needed_nbytes for d in sharing)
    if free is None or needed <= free:
        return
    largest = [(d.device, d.host_needed_nbytes) for d in sharing]
    raise PlanInfeasibleError(
        ", ".join(d.device for d in sharing),
        needed,
        free,
        limit="free memory that they share",
        largest=sorted(largest, key=lambda x: (-x[1], x[0])),
    )


def _shrink(dtype: DType) -> int:
    """How many times smaller a float of this dtype becomes in float16."""
    return max(dtype.bits // 16, 1) if dtype.kind == "float" else 1
