"""Choose threads and chunk size of a load such that it fits, and predict its memory by device.

What cannot fit is refused with the numbers, and with arguments with which it would fit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest
from itertools import starmap
from typing import NamedTuple

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.schemes.bitsandbytes_nested import MAP_NBYTES
from streamload.core.dtypes import DType
from streamload.core.memory import STAGING
from streamload.core.units import format_bytes, round_up
from streamload.devices.allocators import (
    DRIVER_BLOCK_NBYTES,
    DRIVER_SHARED_NBYTES,
    TRIM_NBYTES,
)
from streamload.errors import CheckpointError, Fit, PlanInfeasibleError
from streamload.files.local import BOUNCE_NBYTES, EXACT_NBYTES
from streamload.planning.kv_cache import COMPUTED_IN, CacheRequest, KvCache
from streamload.planning.moves import (
    HOST_CASTS,
    DeviceSpec,
    DTypePolicy,
    Kind,
    Moves,
    TensorRequests,
    kept_free,
)
from streamload.planning.partition import Item, Part, smallest_count, units_of
from streamload.planning.plan import (
    BATCH_UNITS,
    BULK_NBYTES,
    SEGMENTS,
    STAGING_SLOTS,
    DevicePlan,
    Plan,
    load_nbytes,
    senders,
    slot_nbytes,
    units_ahead,
)


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """The KV cache for which a plan leaves memory free after the load.

    `on`: the layer numbers on each device, by device name; empty until `placed`.
    """

    cache: KvCache
    dtype: DType
    on: Mapping[str, Sequence[int]]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        wants: TensorRequests,
        policy: DTypePolicy,
        cache: KvCache,
        native_bf16: bool,
    ) -> CacheRoom:
        """Return the cache with a dtype: the requested, else the weights', else config.json's.

        The weights' dtype is that of most bytes, and counts only if models compute in it.
        """
        dtype = cache.request.dtype
        if dtype is None:
            nbytes: dict[str, int] = {}  # by name: a dtype's own hash takes ten times as long
            dsts = wants.dsts(policy, native_bf16)
            for dst, size in zip(dsts, wants.nbytes(policy, native_bf16), strict=True):
                nbytes[dst.name] = nbytes.get(dst.name, 0) + size
            most = max(nbytes, key=lambda name: nbytes[name], default="")
            dtype = next((one for one in COMPUTED_IN if one.name == most), cache.configured)
        if dtype is None:
            raise CheckpointError(
                str(checkpoint.path),
                "the dtype of the KV cache is not known",
                expected="cache_dtype=",
                found="none",
            )
        return cls(cache, dtype, {})

    @property
    def request(self) -> CacheRequest:
        """The user's request for a cache, with the chosen dtype filled in."""
        return replace(self.cache.request, dtype=self.dtype)

    @property
    def layers(self) -> list[int]:
        """Bytes of each layer's cache."""
        asked = self.cache.request
        return [
            sum(map(self.dtype.nbytes, layer.elements(asked.context, asked.batch)))
            for layer in self.cache.layers
        ]

    def placed(
        self,
        checkpoint: Checkpoint,
        wants: TensorRequests,
        devices: Sequence[str],
        policy: DTypePolicy,
    ) -> CacheRoom:
        """Return the cache with each layer on the device that holds most of the layer's weights.

        ``devices`` names the device of each of ``wants``.
        """
        # by the checkpoint's names, whose layers config.json counts
        names = [info.name for info in wants.infos]
        where = dict(zip(names, devices, strict=True))
        items = list(starmap(Item, dict(zip(names, wants.nbytes(policy), strict=True)).items()))
        on: dict[str, list[int]] = {}
        # in place of bytes the layers' numbers, from 1, so that units name their layers
        numbers = range(1, len(self.cache.layers) + 1)
        for unit in units_of(items, cache=numbers):
            if unit.cache_nbytes:
                weights: dict[str, int] = defaultdict(int)
                for item in unit.items:
                    weights[where[item.name]] += item.nbytes
                most = max(weights, key=weights.__getitem__)
                on.setdefault(most, []).append(unit.cache_nbytes - 1)
        # the load may be of the end of a model; the checkpoint has layers
        everything = (Item(name, 0) for name in checkpoint.tensors if not on)
        if not on and not any(unit.cache_nbytes for unit in units_of([*everything], cache=numbers)):
            raise CheckpointError(
                str(checkpoint.path),
                "cannot place the KV cache: no tensor's name has the number of a layer",
                expected="names of layers, such as model.layers.0",
                found="none",
            )
        return replace(self, on=on)

    def nbytes(self, spec: DeviceSpec, context: int) -> int:
        """Return a device's bytes for the cache of ``context`` tokens, as its allocator rounds."""
        batch = self.cache.request.batch
        sizes = (
            self.dtype.nbytes(elements)
            for layer in self.on.get(spec.name, ())
            for elements in self.cache.layers[layer].elements(context, batch)
        )
        return sum(spec.taken(sizes))

    def most_context(self, devices: Iterable[DevicePlan], specs: Mapping[str, DeviceSpec]) -> int:
        """Return the most tokens, up to the requested number, whose cache fits on all devices."""
        rooms = []
        for d in devices:
            spec = specs[d.device]
            room = spec.budget_nbytes - d.resident_nbytes
            if spec.free_nbytes is not None:
                room = min(room, spec.free_nbytes + d.reusable_nbytes - d.resident_nbytes)
            rooms.append((spec, room))

        def too_long(context: int) -> bool:
            return any(self.nbytes(spec, context) > room for spec, room in rooms)

        return bisect_right(range(1, self.cache.request.context + 1), False, key=too_long)


MIN_CHUNK_NBYTES = 64 * 2**10
_LEAST_READ_FROM_NBYTES = 16 * 2**20
_SHARED_CHUNK_NBYTES = 2**20  # fewer threads before shorter chunks: each chunk costs calls
_CHANGED_ARRAYS = 3  # of changed rows, in float32 or a wider dtype
# Process memory of an auxiliary tensor (scales, for one) of a quantized weight: its request, name
# and move. Measured: up to 740 bytes, by framework.
_PART_NBYTES = 780
# Most bytes on a device for scales and statistics of tensors ahead of the current ones.
_THERE_NBYTES = 16 * 2**20
NUMPY_SCRATCH_NBYTES = 4 * 2**20  # temporaries of one numpy cast call of any length


class Timeline(NamedTuple):
    """Bytes of the parameters on a device in a load: when it begins and at the peak."""

    held_nbytes: int  # at the beginning
    peak_nbytes: int
    release_first: bool  # whether all old parameters must be freed before the first is loaded


@dataclass(frozen=True)
class DeviceShare:
    """The placements of a load on one device, and their memory there without staging.

    `all_first`: whether to free all old parameters before the first is loaded, in any case.
    """

    spec: DeviceSpec
    placements: Moves
    all_first: bool = False

    @cached_property
    def timeline(self) -> Timeline:
        """Memory of the parameters during the load: at the beginning and at the peak."""
        spec, placements = self.spec, self.placements
        budget_nbytes = max(spec.budget_nbytes, 0)
        total = placements.resident_nbytes
        if placements.all_new:  # no old parameters
            return Timeline(0, total, total > budget_nbytes)
        rows = [(move.kind, move.resident_nbytes) for move in placements]
        stays = [resident for kind, resident in rows if kind.action == "in_place"]
        goes = [kind.released_nbytes for kind, _ in rows]
        held = sum(stays) + sum(goes)
        fresh = total - sum(stays)
        if spec.info.allocator == "cuda_driver":
            # Blocks of large tensors go back one by one, each for the next. A block that small ones
            # share goes back with the last of them, and were they released one by one, new ones
            # would be put between the remaining: then no block might ever go back.
            kept, released = _in_shared_blocks(placements)
            shared = sum(spec.taken((*kept, *released)))
            held += shared - sum(kept) - sum(released)
            if released:
                # if some of them stay, none of their blocks may go back at all
                return Timeline(held, total - sum(kept) + (shared if kept else 0), True)
        now = peak = held
        for kind, resident in rows:
            now -= kind.released_nbytes
            now += resident if kind.action != "in_place" else 0
            peak = max(peak, now)
        if spec.info.allocator in SEGMENTS and any(goes):
            # tensors that go one by one leave holes in segments, too small for larger ones; and
            # if a tensor stays in its place, no segment may go back to the device at all
            if not stays:
                return Timeline(held, now, True)
            sizes = (r if kind.action == "in_place" else kind.released_nbytes for kind, r in rows)
            return Timeline(held, sum(spec.taken(sizes)) + fresh, True)
        if self.all_first or peak > max(held, budget_nbytes) or (held > budget_nbytes >= now):
            # growing parameters come before shrinking ones, or the old ones alone are too large:
            # released together they make room for the new ones
            return Timeline(held, now, True)
        return Timeline(held, peak, False)

    @cached_property
    def fresh_nbytes(self) -> int:
        """Bytes that parameters newly take at their peak, besides memory that the model holds."""
        spec, placements, parameters = self.spec, self.placements, self.timeline
        if not spec.info.in_process:
            shares = spec.info.allocator == "cuda_driver" and _in_shared_blocks(placements)[1]
            # released blocks may stay taken, if the process has other tensors in them: on an H200,
            # of 515 blocks that a model's weights take if they come first, 514 came back
            grown = parameters.peak_nbytes - parameters.held_nbytes
            return max(grown + (DRIVER_BLOCK_NBYTES if shares else 0), 0)
        if placements.all_new:
            return placements.resident_nbytes
        rows = [move[2:] for move in placements]
        replaced = [reusable for kind, _, reusable in rows if kind.released_nbytes]
        now = peak = -sum(replaced) if parameters.release_first else 0
        for kind, resident, reusable in rows:
            if kind.action == "in_place":
                now += 0 if reusable >= kind.nbytes else resident - reusable
            else:
                now += resident - (0 if parameters.release_first else reusable)
            peak = max(peak, now)
        costs = spec.info.costs
        refit = math.inf if costs.refit_nbytes is None else costs.refit_nbytes
        apart = [  # replaced by tensors elsewhere in the heap
            reusable
            for kind, _, reusable in rows
            if kind.released_nbytes and kind.nbytes + refit > kind.released_nbytes
        ]
        left = sum(min(costs.left_nbytes, reusable) for reusable in apart)
        return max(peak, 0) + min(TRIM_NBYTES, sum(apart)) + left

    @cached_property
    def casts(self) -> Set[str]:
        """The different values of `Kind.cast` on the device."""
        return {p.cast for p, _ in self.placements.counted}

    @cached_property
    def host_moves(self) -> bool:
        """Whether the host casts or reorders bytes, so that no file is read right to its place."""
        return any(
            p.cast in HOST_CASTS or p.order in ("rows", "columns")
            for p, _ in self.placements.counted
        )

    @cached_property
    def own_casts(self) -> Sequence[tuple[Kind, int]]:
        """(placement, count) of each kind of parameter that the device's cast kernels cast."""
        cast = ((p, n) for p, n in self.placements.counted if p.cast == "device")
        return [*cast] if self.spec.casts else []

    @cached_property
    def row_nbytes(self) -> int:
        """Most bytes, as read or placed, of a row, column or quantized block that no chunk cuts."""
        kinds = [p for p, _ in self.placements.counted]
        turned = (p for p in kinds if p.src.is_packed and p.order == "columns")
        rows = [
            *(p.row_numel * _widest(p) for p in kinds if p.changes),
            *(p.src.nbytes(p.unit_numel) for p in kinds if p.coding and not p.coding.part),
            *(p.dst.nbytes(p.column_numel * p.least_columns) for p in turned),
        ]
        return max(rows, default=0)

    @cached_property
    def changed_nbytes(self) -> int:
        """Most bytes of a thread's arrays while ``transform=`` or adapters change rows."""
        changed = (p for p, _ in self.placements.counted if p.changes)
        sizes = (_CHANGED_ARRAYS * p.changed_numel * max(_widest(p), 4) for p in changed)
        return max(sizes, default=0)

    @cached_property
    def gathers(self) -> bool:
        """Whether pieces of rows are joined in a buffer, which takes memory, to (de)quantize."""
        return any(
            p.order in ("columns", "lines")
            if p.coding and not p.coding.part
            else p.strided and p.scales_nbytes
            for p, _ in self.placements.counted
        )

    @cached_property
    def _statistics(self) -> Sequence[tuple[Kind, int, int]]:
        """(placement, host bytes, count) of each kind of parameter that the device does not cast.

        They are for scales (to dequantize) or block maxima (to quantize), until the tensor is done.
        """
        return [
            (
                p,
                p.coding.statistics_nbytes if p.coding and p.cast == "quant" else p.scales_nbytes,
                n,
            )
            for p, n in self.placements.counted
            if p.cast != "device"
        ]

    @property
    def tally_nbytes(self) -> int:
        """Device bytes of counters (overflowed, flushed, changed) of casts by the device."""
        return sum(p.tally_nbytes * count for p, count in self.own_casts)

    @property
    def object_nbytes(self) -> int:
        """Host bytes of the device's tensor objects, besides their elements."""
        counted = self.placements.counted
        parts = sum(n for p, n in counted if p.cast == "part")
        objects = self.spec.objects.of((p.dst.name, p.shape, p.nbytes, n) for p, n in counted)
        return objects + parts * _PART_NBYTES

    def statistics_under_way(self, nbytes: int) -> int:
        """Return the most host bytes of scales and maxima; ``nbytes``: one slot of each thread."""
        most = max((n for _, n, _ in self._statistics), default=0)
        share = max((n / max(p.src_nbytes, 1) for p, n, _ in self._statistics), default=0)
        total = sum(n * count for _, n, count in self._statistics)
        scales = (p.scales_nbytes for p, _ in self.placements.counted if p.cast == "device")
        sent = max(scales, default=0)
        ahead = nbytes * units_ahead(staged=not self.spec.info.host_visible)
        under_way = 2 * most + int(ahead * share)  # at either end
        return min(under_way, total) + senders(sent) * sent

    def there_under_way(self, slot_nbytes: int, workers: int) -> int:
        """Return the most bytes of scales and maxima on the device while it (de)quantizes weights.

        Work that needs more waits. A batch always fits, with the tensors cut at its two ends, and
        with a tensor's room lost at the ring buffer's end. Workers have slots of ``slot_nbytes``.
        """
        own = self.own_casts
        most = max((p.there_nbytes for p, _ in own), default=0)
        share = max((p.there_nbytes / max(p.src_nbytes, 1) for p, _ in own), default=0)
        total = sum(p.there_nbytes * count for p, count in own)
        nests = any(p.coding is not None and p.coding.nests for p, _ in own)
        ahead = int(workers * slot_nbytes * units_ahead(staged=True) * share)
        batch = int(BATCH_UNITS * max(BULK_NBYTES, slot_nbytes) * share)
        held = 3 * most + max(batch, min(ahead, _THERE_NBYTES))
        return min(held, total) + MAP_NBYTES * nests

    def has_room(self, scratch_nbytes: int) -> bool:
        """Return whether the device has memory for the parameters and ``scratch_nbytes`` more."""
        spec = self.spec
        room = spec.budget_nbytes - self.timeline.peak_nbytes
        if spec.free_nbytes is not None:
            free = spec.free_nbytes - self.fresh_nbytes
            if spec.info.shared_memory:
                free -= load_nbytes(len(self.placements)) + self.object_nbytes + self.kernel_nbytes
            room = min(room, free)
        return scratch_nbytes <= room

    @property
    def kernel_nbytes(self) -> int:
        """Bytes that the operating system's kernel takes to manage the tensors."""
        return len(self.placements) * self.spec.info.costs.kernel_nbytes

    def planned(
        self, scratch_nbytes: int, part: Part | None, cache: CacheRoom | None
    ) -> DevicePlan:
        """Return the device's part of a plan; ``part``: its layers under a split, else None."""
        spec, placements = self.spec, self.placements
        reusable = self.timeline.held_nbytes
        if spec.info.in_process and not placements.all_new:
            reusable = sum(move.reusable_nbytes for move in placements)
        return DevicePlan(
            device=spec.name,
            budget_nbytes=spec.budget_nbytes,
            resident_nbytes=placements.resident_nbytes,
            scratch_nbytes=scratch_nbytes,
            peak_nbytes=self.timeline.peak_nbytes + scratch_nbytes,
            fresh_nbytes=self.fresh_nbytes + scratch_nbytes,
            held_nbytes=self.timeline.held_nbytes,
            layers=(part.layers.start, part.layers.stop) if part else None,
            embedding=bool(part and part.has_embedding),
            head=bool(part and part.has_head),
            release_first=self.timeline.release_first,
            cache_nbytes=cache.nbytes(spec, cache.request.context) if cache else 0,
            reserve_nbytes=spec.reserve_nbytes,
            reusable_nbytes=reusable,
            object_nbytes=self.object_nbytes,
            kernel_nbytes=self.kernel_nbytes,
            shared_memory=spec.info.shared_memory,
            charged=spec.info.charged,
            mapped_nbytes=sum(p.nbytes * n for p, n in placements.counted if p.cast == "mapped"),
        )


def fit(
    draft: Plan, shares: Sequence[DeviceShare], parts: Mapping[str, Part], cache: CacheRoom | None
) -> Plan:
    """Return the plan with threads, chunk size and peaks that fit; ``draft`` has upper bounds.

    ``parts``: the layers of each device under a split; ``cache``: the KV cache to leave room for.
    """
    filled = (share.spec.info for share in shares if share.placements)
    threads = min([draft.threads, *(info.threads for info in filled)])
    if any("device" in share.casts and not share.spec.casts for share in shares):
        threads = 0  # the framework launches kernels from the calling thread
    most = (share.spec.info.max_transfer_nbytes for share in shares)
    longest = min([draft.chunk_nbytes, *(nbytes for nbytes in most if nbytes)])
    row = max((share.row_nbytes for share in shares), default=0)
    read = ((p, n) for p, n in draft.placements.counted if p.cast != "mapped")
    whole = sum(n * slot_nbytes(max(p.nbytes, p.src_nbytes)) for p, n in read)
    chunk = _host_chunk(draft, shares, threads)
    while chunk < min(_SHARED_CHUNK_NBYTES, longest) and threads > 1:
        threads -= 1
        chunk = _host_chunk(draft, shares, threads)
    chunk = max(min(longest, chunk), min(longest, MIN_CHUNK_NBYTES), row)
    while True:
        slot = min(slot_nbytes(chunk), whole)
        plan = replace(draft, threads=threads, chunk_nbytes=chunk, slot_nbytes=slot)
        scratch, host = _staging(plan, shares)
        fits = host <= draft.host_budget_nbytes and all(
            not nbytes or share.has_room(nbytes)
            for share, nbytes in zip(shares, scratch, strict=True)
        )
        if fits or (chunk <= max(MIN_CHUNK_NBYTES, row) and threads <= 1):
            break
        # fewer threads before chunks below 1 MiB: a chunk costs tens of microseconds in calls
        if chunk > max(_SHARED_CHUNK_NBYTES, row) or threads <= 1:
            chunk = max(chunk // 2, row)
        else:
            threads -= 1
    small = [
        replace(share, all_first=True)
        if nbytes and not share.timeline.release_first and not share.has_room(nbytes)
        else share
        for share, nbytes in zip(shares, scratch, strict=True)
    ]
    peaks = ([share.timeline.peak_nbytes for share in each] for each in (small, shares))
    if any(new < old for new, old in zip(*peaks, strict=True)):
        return fit(draft, small, parts, cache)  # releasing first makes room for scratch
    devices = [
        share.planned(nbytes, parts.get(share.spec.name), cache)
        for share, nbytes in zip(shares, scratch, strict=True)
    ]
    return replace(plan, devices=tuple(devices), host_nbytes=host)


def _widest(p: Kind) -> int:
    """Return the bytes of an element, in the file or as placed, whichever is more."""
    return max(p.src.itemsize, p.dst.itemsize)


def _host_chunk(draft: Plan, shares: Sequence[DeviceShare], threads: int) -> int:
    """Return the chunk size, in bytes, with which all staging slots fill the host's budget."""
    fixed, with_one = (
        _staging(replace(draft, threads=threads, slot_nbytes=nbytes), shares)[1]
        for nbytes in (0, MIN_CHUNK_NBYTES)
    )
    if with_one == fixed:
        return draft.chunk_nbytes
    return (draft.host_budget_nbytes - fixed) // (with_one - fixed) * MIN_CHUNK_NBYTES


def _staging(plan: Plan, shares: Sequence[DeviceShare]) -> tuple[list[int], int]:
    """Return the scratch bytes of each device and the bytes of host staging.

    Devices that share the host's memory have their staging in their scratch.
    """
    workers = max(plan.threads, 1)
    slots = workers * STAGING_SLOTS
    scratch = [0] * len(shares)
    host = own = 0
    for at, share in enumerate(shares):
        spec = share.spec
        if share.tally_nbytes:
            resizes = any(p.src.bits != p.dst.bits for p, _ in share.own_casts)
            before = slots * plan.slot_nbytes if resizes else 0
            before += share.there_under_way(plan.slot_nbytes, workers)
            scratch[at] += round_up(before + share.tally_nbytes, DRIVER_BLOCK_NBYTES)
        elif "device" in share.casts:
            # raw bits, and the cast before it is in place
            nbytes = plan.slot_nbytes
            if spec.info.allocator == "cuda_driver":
                nbytes = round_up(nbytes, DRIVER_BLOCK_NBYTES)
            scratch[at] += 2 * nbytes
        if "device" in share.casts or (share.casts and not spec.info.host_visible):
            staged = slots * plan.staging_nbytes
            scratch[at] += staged if spec.info.in_process else 0
            host += 0 if spec.info.in_process else staged
    # each worker's memory: a source buffer, temporaries of a numpy cast, two blocks to transpose
    host_moves = any(share.host_moves for share in shares)
    if host_moves and any(kind != "mmap" for kind in plan.readers):
        own += workers * plan.slot_nbytes
    if "direct" in plan.readers and plan.placements:
        own += workers * (BOUNCE_NBYTES if plan.ahead else EXACT_NBYTES)
    if any("numpy" in share.casts for share in shares):
        own += workers * NUMPY_SCRATCH_NBYTES
    order = {share.spec.name: at for at, share in enumerate(shares)}
    used = [order[name] for name in dict.fromkeys(p.device for p, _ in plan.placements.counted)]
    on_host = [at for at in used if shares[at].spec.info.in_process]
    if on_host and host_moves and not own and not any(scratch[at] for at in on_host):
        own = least_read_nbytes(plan.placements)
    if any(p.order == "columns" for p, _ in plan.placements.counted):
        own += workers * 2 * plan.turn_nbytes
    changed = max((share.changed_nbytes for share in shares), default=0)
    own += plan.change_nbytes + workers * (changed + plan.change_thread_nbytes)
    if any(share.gathers for share in shares):
        own += workers * plan.slot_nbytes
    own += max(share.statistics_under_way(workers * plan.slot_nbytes) for share in shares)
    for at in on_host if any(shares[n].spec.own_host for n in on_host) else on_host[:1]:
        scratch[at] += own  # shared memory counts once
    return scratch, host if on_host else host + own


def least_read_nbytes(placements: Moves) -> int:
    """Return the least host bytes of a load that casts and reads files, 0 for small checkpoints.

    Files that are planned to be mapped may have to be read if little memory is free. All plans that
    cast count these bytes, so that a budget of exactly the peak is enough for either. For
    checkpoints of a few megabytes they would be a large share.
    """
    nbytes = sum(p.nbytes * count for p, count in placements.counted)
    return MIN_CHUNK_NBYTES if nbytes >= _LEAST_READ_FROM_NBYTES else 0


def _in_shared_blocks(placements: Moves) -> tuple[list[int], list[int]]:
    """Return sizes of small old parameters, which share CUDA's blocks: (kept, released)."""
    if placements.all_new:
        return [], []
    kept = [move.resident_nbytes for move in placements if move.kind.action == "in_place"]
    released = [move.kind.released_nbytes for move in placements]
    small = range(1, DRIVER_SHARED_NBYTES + 1)
    return [n for n in kept if n in small], [n for n in released if n in small]


def check(
    plan: Plan, shares: Sequence[DeviceShare], cache: CacheRoom | None, host_limit: str
) -> None:
    """Raise PlanInfeasibleError if a plan exceeds the memory of a device or of the host.

    ``shares``: the devices and their placements, in the plan's order; ``cache``: the KV cache to
    leave room for, or None; ``host_limit``: the source of the host's budget, for the message.
    """
    specs = {share.spec.name: share.spec for share in shares}
    for mine, share in zip(plan.devices, shares, strict=True):
        _check_device(plan, mine, share, specs, cache)
    sharing = [d for d in plan.devices if d.shared_memory and d.host_needed_nbytes]
    reserved = sum(each.reserve_nbytes for each in specs.values() if each.info.shared_memory)
    # memory that no cgroup is charged leaves the cgroup's rest to the others
    for some in ([d for d in sharing if d.charged], sharing):
        known = [specs[d.device].host_free_nbytes for d in some]
        free = max((nbytes for nbytes in known if nbytes is not None), default=None)
        largest = [(d.device, d.host_needed_nbytes) for d in some]
        if not all(d.charged for d in some):
            largest.append((STAGING, plan.host_nbytes))
        needed = sum(nbytes for _, nbytes in largest)
        if free is None or needed <= free:
            continue
        raise PlanInfeasibleError(
            ", ".join(d.device for d in some),
            needed,
            free,
            limit="free memory" + " that they share" * (len(some) > 1) + kept_free(reserved),
            largest=sorted(largest, key=lambda x: (-x[1], x[0])),
        )
    if plan.host_nbytes > plan.host_budget_nbytes:
        raise PlanInfeasibleError(
            STAGING, plan.host_nbytes, plan.host_budget_nbytes, limit=host_limit
        )


def _check_device(
    plan: Plan,
    mine: DevicePlan,
    share: DeviceShare,
    specs: Mapping[str, DeviceSpec],
    cache: CacheRoom | None,
) -> None:
    """Raise PlanInfeasibleError if ``mine``, the plan of one device, exceeds its memory."""
    spec, placements = share.spec, share.placements
    most = spec.info.largest_allocation_nbytes
    if most is not None and any(p.nbytes > most for p, _ in placements.counted):
        largest = [next((p.name, p.kind.nbytes) for p in placements if p.kind.nbytes > most)]
        raise PlanInfeasibleError(
            spec.name, largest[0][1], most, limit="largest allocation", largest=largest
        )
    limit, available, needed = spec.limit, spec.budget_nbytes, mine.needed_nbytes
    new = mine.host_needed_nbytes if spec.info.shared_memory else mine.fresh_needed_nbytes
    if spec.free_nbytes is not None and new > spec.free_nbytes and needed <= available:
        limit, available, needed = spec.free_limit, spec.free_nbytes, new
    if needed <= available:
        return
    largest = [("the KV cache", mine.cache_nbytes)] if mine.cache_nbytes else []
    if limit == spec.free_limit:
        other = mine.object_nbytes + mine.kernel_nbytes
        largest += [(f"what {len(placements)} tensors take beside their bytes", other)]
    named = ((move.name, move.kind.nbytes) for move in placements)
    parameters = nsmallest(8 - len(largest), named, key=lambda x: (-x[1], x[0]))
    raise PlanInfeasibleError(
        spec.name,
        needed,
        available,
        limit=limit,
        largest=sorted([*largest, *parameters], key=lambda x: -x[1]),
        would_fit=[*_suggestions(plan, mine, share, specs, cache, needed, available)],
        reason=_why_new(mine) if limit == spec.free_limit else "",
    )


def _suggestions(
    plan: Plan,
    mine: DevicePlan,
    share: DeviceShare,
    specs: Mapping[str, DeviceSpec],
    cache: CacheRoom | None,
    needed: int,
    available: int,
) -> Iterator[Fit]:
    """Yield arguments that would fit: the load takes ``needed`` of ``available`` device bytes."""
    spec, placements = share.spec, share.placements
    sizes = (move.kind.nbytes // _shrunk(move.kind) for move in placements)
    small = sum(spec.taken(sizes))
    small += needed - mine.resident_nbytes
    if spec.info.in_process and not mine.scratch_nbytes:
        small += least_read_nbytes(placements)
    if cache is not None and cache.cache.request.dtype is None:  # it would shrink as well
        shrunk = mine.cache_nbytes - mine.cache_nbytes // _shrink(cache.dtype)
        small -= min(shrunk, max(mine.run_nbytes - mine.peak_nbytes, 0))
    if any(_shrunk(p) > 1 for p, _ in placements.counted) and small <= available:
        yield Fit("dtype", '="float16"', format_bytes(small))
    if cache is not None and mine.peak_nbytes <= spec.budget_nbytes:
        context = cache.most_context(plan.devices, specs)
        if 0 < context < cache.cache.request.context:
            yield Fit("context", f"={context}")
    if not spec.alone and len({spec.budget_nbytes for spec in specs.values()}) == 1:
        count = smallest_count(
            [Item(move.name, move.resident_nbytes) for move in plan.placements],
            max(available - mine.scratch_nbytes, 0),
            cache=cache.layers if cache is not None else (),
        )
        if count is not None and count > len(plan.devices):
            yield Fit(f"{count} devices or nodes", f" of {format_bytes(available)}")


def _why_new(mine: DevicePlan) -> str:
    """Explain why overwriting a model's weights needs new memory; "" if it does not."""
    absent = mine.held_nbytes - mine.reusable_nbytes
    if absent <= 0:
        return ""
    return (
        f"of the {format_bytes(mine.held_nbytes)} that the model holds, {format_bytes(absent)} "
        "count as new: they were never written, are mapped from a file, or are shared with another "
        "process"
    )


def _shrunk(kind: Kind) -> int:
    """Return how many times smaller a parameter is in float16: 1 if it is quantized."""
    return 1 if kind.coding is not None else _shrink(kind.dst)


def _shrink(dtype: DType) -> int:
    """Return how many times smaller an element of this dtype is in float16; 1 for integers."""
    return max(dtype.bits // 16, 1) if dtype.kind == "float" else 1
