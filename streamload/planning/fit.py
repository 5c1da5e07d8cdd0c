"""Choose threads and chunk size of a load such that it fits, and predict its memory by device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from streamload.codecs.schemes.bitsandbytes_nested import MAP_NBYTES
from streamload.core.units import round_up
from streamload.devices.allocators import (
    DRIVER_BLOCK_NBYTES,
    DRIVER_SHARED_NBYTES,
    TRIM_NBYTES,
)
from streamload.files.local import BOUNCE_NBYTES, EXACT_NBYTES
from streamload.planning.cache_room import CacheRoom
from streamload.planning.moves import HOST_CASTS, Kind, Moves
from streamload.planning.partition import Part
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
from streamload.planning.requests import DeviceSpec

MIN_CHUNK_NBYTES = 64 * 2**10
_LEAST_READ_FROM_NBYTES = 16 * 2**20
_SHARED_CHUNK_NBYTES = 2**20  # fewer threads before shorter chunks: each chunk costs calls
_CHANGED_ARRAYS = 3  # of changed rows, in float32 or a wider dtype
# Process memory of an auxiliary tensor (scales, for one) of a quantized weight: its request, name
# and placement. Measured: 330 to 840 bytes on the host, up to 860 elsewhere.
_PART_NBYTES = 900
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
            p.cast in HOST_CASTS or (p.transpose and not p.turned_there)
            for p, _ in self.placements.counted
        )

    @cached_property
    def own_casts(self) -> Sequence[tuple[Kind, int]]:
        """(placement, count) of each kind of parameter that the device's cast kernels cast."""
        cast = ((p, n) for p, n in self.placements.counted if p.cast == "device")
        return [*cast] if self.spec.casts else []

    @cached_property
    def _changed(self) -> Sequence[Kind]:
        return [p for p, _ in self.placements.counted if p.changes]

    @cached_property
    def _packed(self) -> Sequence[Kind]:
        return [p for p, _ in self.placements.counted if p.scales_nbytes]

    @cached_property
    def _whole(self) -> Sequence[Kind]:
        counted = self.placements.counted
        return [p for p, _ in counted if p.coding and not p.coding.part]

    @cached_property
    def row_nbytes(self) -> int:
        """Most bytes, as read or placed, of a row, column or quantized block that no chunk cuts."""
        turned = (p for p, _ in self.placements.counted if p.src.is_packed and p.turned)
        rows = [
            *(p.row_numel * _widest(p) for p in self._changed),
            *(p.src.nbytes(p.unit_numel) for p in self._whole),
            *(p.dst.nbytes(p.column_numel * p.least_columns) for p in turned),
        ]
        return max(rows, default=0)

    @cached_property
    def changed_nbytes(self) -> int:
        """Most bytes of a thread's arrays while ``transform=`` or adapters change rows."""
        sizes = (_CHANGED_ARRAYS * p.changed_numel * max(_widest(p), 4) for p in self._changed)
        return max(sizes, default=0)

    @cached_property
    def gathers(self) -> bool:
        """Whether pieces of rows are joined in a buffer, which takes memory, to (de)quantize."""
        whole = any(p.turned or p.strided for p in self._whole)
        return whole or any(p.strided for p in self._packed)

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
        scales = (p.scales_nbytes for p in self._packed if p.cast == "device")
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
    if any(p.turned for p, _ in plan.placements.counted):
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
