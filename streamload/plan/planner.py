"""Making a plan: pure, and fast.

`make_plan` decides everything from headers and a few numbers about devices. The same checkpoint and
specs give the same plan on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from streamload.cast.table import OutOfRange, supported
from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.readers import BOUNCE_NBYTES, ResolvedKind
from streamload.dtypes import BF16, F16, DType, parse_dtype
from streamload.errors import PlanInfeasibleError, UnsupportedCastError
from streamload.plan.allocators import AllocatorKind, taken
from streamload.plan.budget import DEFAULT_HOST_NBYTES, STAGING
from streamload.plan.partition import Item, Node, Part, partition, smallest_count
from streamload.plan.plan import (
    STAGING_SLOTS,
    Action,
    DevicePlan,
    Placement,
    Plan,
    RowRange,
    RowTranspose,
    slot_nbytes,
)
from streamload.units import format_bytes, round_up

CastChoice = Literal["llvm", "numpy", "device"]

DEFAULT_CHUNK_NBYTES = 8 * 2**20
MIN_CHUNK_NBYTES = 64 * 2**10
NUMPY_SCRATCH_NBYTES = 4 * 2**20  # temporaries of one numpy cast call, whatever its length


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the planner needs to know of a device (or a node), in bytes.

    Attributes:
        name: canonical name.
        budget_nbytes: the most that may be held there.
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
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[RowRange, ...]
    transpose: RowTranspose | None = None
    device: str | None = None
    held: tuple[str, str, int] | None = None
    dtype: DType | None = None


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
        value: str | DType | Mapping[str, str | DType] | None,
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

    def mentions(self, name: str) -> bool:
        """Whether a rule decides the dtype of tensor ``name``."""
        return any(pattern == "*" or fnmatchcase(name, pattern) for pattern, _ in self.rules)

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

    Raises:
        PlanInfeasibleError: the parameters do not fit.
        UnsupportedCastError: a dtype cannot be had, or a device cannot hold it.
    """
    specs = {spec.name: spec for spec in devices}
    parts, assigned = _assign(checkpoint, wants, devices, dtype, tied)
    shard_of = {header.path: index for index, header in enumerate(checkpoint.shards)}
    placed: list[tuple[int, int, Placement]] = []
    notes: dict[str, None] = {}
    for want, device in assigned:
        placement, note = _place(checkpoint, want, specs[device], dtype, cast, out_of_range)
        placed.append((*_first_byte(placement, checkpoint, shard_of), placement))
        if note:
            notes[note] = None
    # stable: in the order in which the chunks come, so that each shard is read once
    placed.sort(key=lambda entry: entry[:2])
    draft = Plan(
        path=str(checkpoint.path),
        placements=_allocated(_settled([p for _, _, p in placed], specs, notes), specs),
        devices=(),
        host_nbytes=0,
        host_budget_nbytes=host_budget_nbytes,
        chunk_nbytes=chunk_nbytes,
        slot_nbytes=chunk_nbytes,
        threads=threads,
        readers=tuple(readers),
        out_of_range=out_of_range,
        notes=tuple(notes),
    )
    by_device: dict[str, list[Placement]] = {name: [] for name in specs}
    for placement in draft.placements:
        by_device[placement.device].append(placement)
    plan = _fit(draft, specs, by_device, parts)
    same_budget = len({spec.budget_nbytes for spec in devices}) == 1
    for mine in plan.devices:
        spec = specs[mine.device]
        _check(plan, mine, spec, by_device[mine.device], same_budget=same_budget)
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


def _settled(
    placements: Sequence[Placement], specs: Mapping[str, DeviceSpec], notes: dict[str, None]
) -> list[Placement]:
    """Replace what could be written in place, where that is the way to fit.

    An allocator with segments gives none back in which something stays. Where parameters to be
    written in place and others to be replaced would not fit on those terms, all are replaced.
    """
    out = list(placements)
    for name, spec in specs.items():
        mine = [i for i, p in enumerate(out) if p.device == name]
        kept = [i for i in mine if out[i].action == "in_place"]
        if spec.allocator == "exact" or not kept or not any(out[i].released_nbytes for i in mine):
            continue
        allocated = _allocated([out[i] for i in mine], specs)
        if _timeline(allocated, spec)[1] <= spec.budget_nbytes:
            continue
        for i in kept:
            out[i] = replace(out[i], action="replace", released_nbytes=out[i].resident_nbytes)
        notes[f"{name}: all parameters are replaced, for not all can be written in place"] = None
    return out


def _allocated(
    placements: Sequence[Placement], specs: Mapping[str, DeviceSpec]
) -> tuple[Placement, ...]:
    """Say what each placement takes of its device, where allocators take more than is asked."""
    out = list(placements)
    for name, spec in specs.items():
        if spec.allocator == "exact":
            continue  # `_place` has rounded
        fresh = [i for i, p in enumerate(out) if p.device == name and p.action != "in_place"]
        sizes = (out[i].nbytes for i in fresh)
        for i, nbytes in zip(
            fresh, taken(spec.allocator, spec.granularity_nbytes, sizes), strict=True
        ):
            out[i] = replace(out[i], resident_nbytes=nbytes)
    return tuple(out)


def _first_byte(
    p: Placement, checkpoint: Checkpoint, shard_of: Mapping[Path, int]
) -> tuple[int, int]:
    """(shard, file byte) at which reading a placement begins."""
    if len(p.source) == 1 and p.source[0].start == 0:
        info = checkpoint.tensors[p.source[0].tensor]
        return shard_of[info.shard], info.start
    rows = sum(r.stop - r.start for r in p.source)
    row_nbytes = p.src.nbytes(math.prod(p.shape)) // rows if rows else 0
    infos = [(checkpoint.tensors[r.tensor], r.start * row_nbytes) for r in p.source]
    return min((shard_of[info.shard], info.start + offset) for info, offset in infos)


def _assign(
    checkpoint: Checkpoint,
    wants: Sequence[Want],
    devices: Sequence[DeviceSpec],
    dtype: DTypePolicy,
    tied: Mapping[str, str],
) -> tuple[dict[str, Part], list[tuple[Want, str]]]:
    """Give each parameter a device: its own, the only one, or by a split over several."""
    if len(devices) == 1 or all(want.device is not None for want in wants):
        return {}, [(want, want.device or devices[0].name) for want in wants]
    fixed = [(want, want.device) for want in wants if want.device is not None]
    free = {want.name: want for want in wants if want.device is None}
    taken = {spec.name: 0 for spec in devices}
    for want, name in fixed:
        taken[name] += _want_nbytes(checkpoint, want, dtype)
    parts = partition(
        [Item(name, _want_nbytes(checkpoint, want, dtype)) for name, want in free.items()],
        [Node(spec.name, max(spec.budget_nbytes - taken[spec.name], 1)) for spec in devices],
        tied={k: v for k, v in tied.items() if v in free and k not in free},
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
    return {part.node: part for part in parts}, assigned


def _want_dtypes(
    checkpoint: Checkpoint, want: Want, dtype: DTypePolicy, native_bf16: bool = False
) -> tuple[DType, DType]:
    src = checkpoint.tensors[want.source[0].tensor].dtype
    dst = want.dtype or dtype.resolve(want.source[0].tensor, src, native_bf16)
    return src, dst


def _want_nbytes(checkpoint: Checkpoint, want: Want, dtype: DTypePolicy) -> int:
    numel = math.prod(want.shape)
    return _want_dtypes(checkpoint, want, dtype)[1].nbytes(numel)


def _place(
    checkpoint: Checkpoint,
    want: Want,
    spec: DeviceSpec,
    dtype: DTypePolicy,
    cast: CastChoice,
    out_of_range: OutOfRange,
) -> tuple[Placement, str]:
    name = want.source[0].tensor
    src, dst = _want_dtypes(checkpoint, want, dtype, spec.native_bf16)
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
    engine, note = _engine(src, dst, spec, cast, dtype.fp16_cast, out_of_range)
    numel = math.prod(want.shape)
    resident = spec.resident(dst.nbytes(numel))
    action: Action = "new"
    released = 0
    if want.held is not None:
        where, what, nbytes = want.held
        same = (where, what, nbytes) == (spec.name, dst.name, dst.nbytes(numel))
        action = "in_place" if same else "replace"
        released = nbytes if not same and where == spec.name else 0
    return (
        Placement(
            name=want.name,
            device=spec.name,
            shape=want.shape,
            src=src,
            dst=dst,
            source=want.source,
            transpose=want.transpose,
            action=action,
            cast=engine,
            resident_nbytes=resident,
            released_nbytes=released,
        ),
        note,
    )


def _engine(
    src: DType,
    dst: DType,
    spec: DeviceSpec,
    cast: CastChoice,
    fp16_cast: str | None,
    out_of_range: OutOfRange,
) -> tuple[str, str]:
    """The cast of one pair, and a note where it is not the one that was asked for."""
    if src is dst:
        return "copy", ""
    wanted = fp16_cast if fp16_cast is not None and (src, dst) == (BF16, F16) else cast
    if wanted == "llvm" and cast == "numpy":
        wanted = cast  # asked for, or all there is: no kernel can be compiled here
    if wanted != "device":
        return wanted, ""
    fallback = "llvm" if cast == "device" else cast
    if (src.name, dst.name) not in spec.device_casts:
        why = f"{spec.name} does not cast {src} to {dst} exactly"
    elif out_of_range != "inf":
        why = f'only the host can do out_of_range="{out_of_range}"'
    else:
        return "device", f"{src} is cast to {dst} on the device: overflows there are not counted"
    return fallback, f"{src} is cast to {dst} on the host ({fallback}), not on the device: {why}"


def _fit(
    draft: Plan,
    specs: Mapping[str, DeviceSpec],
    by_device: Mapping[str, Sequence[Placement]],
    parts: Mapping[str, Part],
) -> Plan:
    """Choose threads and chunk size so that staging fits, and predict the peaks."""
    threads = min([draft.threads, *(specs[n].threads for n, ps in by_device.items() if ps)])
    if any(p.cast == "device" for p in draft.placements):
        threads = 0  # kernels are launched from the calling thread
    chunk = min(
        [draft.chunk_nbytes]
        + [spec.max_transfer_nbytes for spec in specs.values() if spec.max_transfer_nbytes]
    )
    # all slots together fill the staging budget, however many there are
    slots = max(threads, 1) * STAGING_SLOTS
    share = draft.host_budget_nbytes // slots // MIN_CHUNK_NBYTES * MIN_CHUNK_NBYTES
    if share >= 2**20 and any(not specs[n].host_visible for n, ps in by_device.items() if ps):
        chunk = min(chunk, share)
    base = {name: _timeline(ps, specs[name]) for name, ps in by_device.items()}
    whole = sum(
        slot_nbytes(max(p.nbytes, p.src.nbytes(math.prod(p.shape)))) for p in draft.placements
    )
    needs = _needs(draft.placements)
    while True:
        slot = min(slot_nbytes(chunk), whole)
        plan = replace(draft, threads=threads, chunk_nbytes=chunk, slot_nbytes=slot)
        scratch, host = _staging(plan, specs, needs)
        tight = host > draft.host_budget_nbytes or any(
            nbytes and nbytes > _room(specs[name], *base[name][:2])
            for name, nbytes in scratch.items()
        )
        if not tight or (chunk <= MIN_CHUNK_NBYTES and threads <= 1):
            break
        # fewer threads before chunks below 1 MiB: a chunk costs tens of microseconds in calls
        if chunk > 2**20:
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
                resident_nbytes=sum(p.resident_nbytes for p in ps),
                scratch_nbytes=scratch[name],
                peak_nbytes=peak + scratch[name],
                fresh_nbytes=max(peak - held, 0) + scratch[name],
                held_nbytes=held,
                layers=(part.layers.start, part.layers.stop) if part else None,
                embedding=bool(part and part.has_embedding),
                head=bool(part and part.has_head),
                release_first=release_first,
            )
        )
    return replace(plan, devices=tuple(out), host_nbytes=host)


def _room(spec: DeviceSpec, held_nbytes: int, peak_nbytes: int) -> int:
    """Bytes that are left for scratch on a device beside its parameters."""
    room = spec.budget_nbytes - peak_nbytes
    if spec.free_nbytes is not None:
        room = min(room, spec.free_nbytes - max(peak_nbytes - held_nbytes, 0))
    return room


def _timeline(placements: Sequence[Placement], spec: DeviceSpec) -> tuple[int, int, bool]:
    """(held at the beginning, peak, whether all old parameters must go first), in bytes."""
    budget_nbytes = max(spec.budget_nbytes, 0)
    held = sum(
        p.released_nbytes + (p.resident_nbytes if p.action == "in_place" else 0) for p in placements
    )
    now = peak = held
    for p in placements:
        now -= p.released_nbytes
        now += p.resident_nbytes if p.action != "in_place" else 0
        peak = max(peak, now)
    if spec.allocator != "exact" and any(p.released_nbytes for p in placements):
        # what goes one by one leaves holes in segments, which larger ones do not fit into; and
        # beside what stays where it is, none of it may go back to the device at all
        if not any(p.action == "in_place" for p in placements):
            return held, now, True
        sizes = (
            p.resident_nbytes if p.action == "in_place" else p.released_nbytes for p in placements
        )
        stays = sum(taken(spec.allocator, spec.granularity_nbytes, sizes))
        fresh = sum(p.resident_nbytes for p in placements if p.action != "in_place")
        return held, stays + fresh, True
    if peak > max(held, budget_nbytes) or (held > budget_nbytes >= now):
        # growing parameters come before shrinking ones, or the old ones alone are too large:
        # released together they make room for the new ones
        return held, now, True
    return held, peak, False


@dataclass(frozen=True, slots=True)
class _Needs:
    """What staging depends on: the casts on each device that has any, and whether bytes move."""

    casts: Mapping[str, Set[str]]
    moves: bool  # some bytes cannot be read to where they go: they are cast or reordered


def _needs(placements: Sequence[Placement]) -> _Needs:
    casts: dict[str, set[str]] = {}
    for p in placements:
        casts.setdefault(p.device, set()).add(p.cast)
    return _Needs(casts, any(p.cast != "copy" or p.transpose for p in placements))


def _staging(
    plan: Plan, specs: Mapping[str, DeviceSpec], needs: _Needs
) -> tuple[dict[str, int], int]:
    """Scratch per device (staging included, where it shares memory) and host staging, in bytes."""
    workers = max(plan.threads, 1)
    scratch = dict.fromkeys(specs, 0)
    host = own = 0
    shares = []
    for name, casts in needs.casts.items():
        spec = specs[name]
        if spec.shared_memory:
            shares.append(name)
        if "device" in casts:
            scratch[name] += 2 * plan.slot_nbytes  # raw bits, and the cast before it is in place
        if "device" in casts or not spec.host_visible:
            slots = workers * STAGING_SLOTS * plan.slot_nbytes
            scratch[name] += slots if spec.shared_memory else 0
            host += 0 if spec.shared_memory else slots
    # what a worker holds of its own: a source buffer, the temporaries of a numpy cast
    if needs.moves and not {"pread", "direct"}.isdisjoint(plan.readers):
        own += workers * plan.slot_nbytes
    if "direct" in plan.readers:
        own += workers * BOUNCE_NBYTES
    if any("numpy" in casts for casts in needs.casts.values()):
        own += workers * NUMPY_SCRATCH_NBYTES
    if shares:
        scratch[shares[0]] += own  # one memory: it counts once
    else:
        host += own
    return scratch, host


def _check(
    plan: Plan,
    mine: DevicePlan,
    spec: DeviceSpec,
    placements: Sequence[Placement],
    *,
    same_budget: bool,
) -> None:
    """Refuse a plan that does not fit one device, with the numbers and with what would fit."""
    most = spec.largest_allocation_nbytes
    for p in placements:
        if most is not None and p.nbytes > most:
            raise PlanInfeasibleError(
                spec.name, p.nbytes, most, limit="largest allocation", largest=[(p.name, p.nbytes)]
            )
    limit, available, needed = spec.limit, spec.budget_nbytes, mine.peak_nbytes
    if (
        spec.free_nbytes is not None
        and mine.fresh_nbytes > spec.free_nbytes
        and needed <= available
    ):
        limit, available, needed = "free memory", spec.free_nbytes, mine.fresh_nbytes
    if needed <= available:
        return
    suggestions = []
    sizes = (p.dst.nbytes(math.prod(p.shape)) // _shrink(p.dst) for p in placements)
    small = sum(taken(spec.allocator, spec.granularity_nbytes, sizes))
    small += needed - mine.resident_nbytes
    if any(_shrink(p.dst) > 1 for p in placements) and small <= available:
        suggestions.append(f'dtype="float16" ({format_bytes(small)})')
    if same_budget:
        count = smallest_count(
            [Item(p.name, p.resident_nbytes) for p in plan.placements],
            max(available - mine.scratch_nbytes, 0),
        )
        if count is not None and count > len(plan.devices):
            suggestions.append(f"{count} devices or nodes of {format_bytes(available)}")
    raise PlanInfeasibleError(
        spec.name,
        needed,
        available,
        limit=limit,
        largest=sorted(((p.name, p.nbytes) for p in placements), key=lambda x: (-x[1], x[0]))[:8],
        would_fit=suggestions,
    )


def _check_pool(plan: Plan, specs: Mapping[str, DeviceSpec]) -> None:
    """Refuse a plan whose devices fit one by one, but not together in the memory they share."""
    sharing = [d for d in plan.devices if specs[d.device].shared_memory and d.fresh_nbytes]
    known = [specs[d.device].host_free_nbytes for d in sharing]
    free = min((nbytes for nbytes in known if nbytes is not None), default=None)
    needed = sum(d.fresh_nbytes for d in sharing)
    if free is None or needed <= free:
        return
    raise PlanInfeasibleError(
        ", ".join(d.device for d in sharing),
        needed,
        free,
        limit="free memory that they share",
        largest=sorted(((d.device, d.fresh_nbytes) for d in sharing), key=lambda x: (-x[1], x[0])),
    )


def _shrink(dtype: DType) -> int:
    """How many times smaller a float of this dtype becomes in float16."""
    return max(dtype.bits // 16, 1) if dtype.kind == "float" else 1
