"""The plan: every decision about a load, as frozen data, before anything moves.

A `Plan` maps rows of checkpoint tensors to parameters: where, in which
dtype, by which cast, and what the peak will be on each device and in host staging. It can be
printed, saved as JSON, compared between nodes, and held against what was then measured.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from typing import Any

from streamload.codecs.cast_table import OutOfRange
from streamload.core.bounded_json import parse_json
from streamload.core.chart import Stack, as_html
from streamload.core.dtypes import BY_NAME, DType, named
from streamload.core.tensors import Coding, Columns, RowRange, RowTranspose
from streamload.core.units import format_bytes, format_table, round_up
from streamload.devices.allocators import AllocatorKind
from streamload.errors import printed
from streamload.files.local import ResolvedKind
from streamload.files.page_cache import PageCacheKind
from streamload.planning.kv_cache import CacheRequest
from streamload.planning.placement import Placement, Placements

#: The parts of a device's budget, from left to right.
PARTS = ("weights", "KV cache", "while loading", "reserve", "free")

STAGING_SLOTS = 2  # per thread: one is filled while the other's copy is under way
_STAGED_AHEAD = 8
SLOT_ALIGNMENT = 64  # chunks in a staging slot begin at multiples of this
# What a slot has beyond its chunks for reads past the page cache: they begin at a multiple of the
# reader's alignment before the first byte that is wanted, and end at one after the last.
DIRECT_ROOM_NBYTES = 2 * 4096
# Most bytes that a worker is handed at once where they go as they are, piece by piece through its
# slots, without the interpreter; fewer of a load that has little for each.
BULK_NBYTES = 2**24
# Most units that a worker is handed at once.
BATCH_UNITS = 4
# Most bytes of a block of lines that become columns; a thread holds two.
TURN_NBYTES = 2**19
# Of a unit that it quantises: a float32.
STATISTIC_NBYTES = 4
# Process memory of a load that does not grow with its tensors: stacks of threads, readers,
# the first chunks. Seen were 0.1 to 1.2 MB with 1 to 8 threads, 2.9 MB with tinygrad's devices, and
# 2.6 MB on the way to CUDA, where a driver adds to it.
LOAD_NBYTES = 3 * 2**20
_STAGED_LOAD_NBYTES = 4 * 2**20
# A thread's connection to a server, with what it has received: seen were 0.5 MB each.
_CONNECTION_NBYTES = 2**20
# Allocators that take segments of the device's memory, which many tensors share.
SEGMENTS: frozenset[AllocatorKind] = frozenset({"cuda_caching", "cuda_expandable"})
_SCALES_NBYTES = 2**24  # on the host, on their way to a device
_MOST_SENDERS = 4


def units_ahead(*, staged: bool) -> int:
    """Most units of a thread under way: one for each slot and one that waits; staged ones more.

    Those are handed out and reported several at a time.
    """
    return STAGING_SLOTS + (_STAGED_AHEAD if staged else 1)


def senders(scales_nbytes: int) -> int:
    """How many threads send scales ahead to a device, of weights with up to so many bytes."""
    return max(min(_SCALES_NBYTES // max(scales_nbytes, 1), _MOST_SENDERS), 1)


def slot_nbytes(nbytes: int) -> int:
    """Bytes that a chunk of ``nbytes`` takes up in a staging slot."""
    return round_up(nbytes, SLOT_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What a plan takes on one device.

    Attributes:
        device: its name.
        budget_nbytes: what the load may take: the budget, less `reserve_nbytes`.
        resident_nbytes: parameters, when the load is done.
        scratch_nbytes: temporary device memory (and host staging, on shared memory).
        peak_nbytes: predicted peak: parameters, scratch, and old parameters not yet released.
        fresh_nbytes: how much memory the load newly takes at its peak, scratch included.
        held_nbytes: what the parameters hold there when the load begins; more than the peak where
            old parameters are larger than the budget, and go first.
        layers: first and last (exclusive) layer, under a split; None without one.
        embedding: holds the embedding, under a split.
        head: holds the head, under a split.
        release_first: old parameters go all at once before the first is loaded.
        cache_nbytes: the KV cache of its layers, which is allocated when the load is done.
        reserve_nbytes: bytes kept free in addition, of the budget and of what is free.
        reusable_nbytes: of `held_nbytes`, memory that the load takes over.
        object_nbytes: memory of the process for tensors besides their bytes.
        kernel_nbytes: what the kernel takes for them.
        shared_memory: its memory is the host's.
        mapped_nbytes: what stays in the mapped files: the kernel can take its pages back.
    """

    device: str
    budget_nbytes: int
    resident_nbytes: int
    scratch_nbytes: int
    peak_nbytes: int
    fresh_nbytes: int
    held_nbytes: int
    layers: tuple[int, int] | None = None
    embedding: bool = False
    head: bool = False
    release_first: bool = False
    cache_nbytes: int = 0
    reserve_nbytes: int = 0
    reusable_nbytes: int = 0
    object_nbytes: int = 0
    kernel_nbytes: int = 0
    shared_memory: bool = True
    mapped_nbytes: int = 0

    @property
    def run_nbytes(self) -> int:
        """Bytes of the parameters and of the cache that they run with."""
        return self.resident_nbytes + self.cache_nbytes

    @property
    def needed_nbytes(self) -> int:
        """The most of the budget that is taken: by the load, or by what runs afterwards."""
        return max(self.peak_nbytes, self.run_nbytes)

    @property
    def fresh_needed_nbytes(self) -> int:
        """How much of that is newly taken."""
        return max(self.fresh_nbytes, self.run_nbytes - self.reusable_nbytes)

    @property
    def host_needed_nbytes(self) -> int:
        """Host bytes for tensors, with their own bytes if the device shares the host's memory."""
        beside = self.object_nbytes + self.kernel_nbytes
        return beside + (self.fresh_needed_nbytes if self.shared_memory else 0)

    @property
    def stated_nbytes(self) -> int:
        """The budget as it was given, with what stays free of it."""
        return self.budget_nbytes + self.reserve_nbytes

    @property
    def holds(self) -> str:
        """Which parts of the model it holds under a split, in words."""
        first, stop = self.layers or (0, 0)
        layers = f"layers {first}-{stop - 1}" if stop - first > 1 else f"layer {first}"
        parts = [(self.embedding, "embedding"), (stop > first, layers), (self.head, "head")]
        return ", ".join(name for there, name in parts if there)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a load will do.

    Attributes:
        path: the checkpoint.
        placements: parameters in the order in which they are streamed.
        devices: what each device holds.
        host_nbytes: predicted peak of host staging that no device's budget covers.
        host_budget_nbytes: the budget for that.
        chunk_nbytes: most bytes in one chunk, of source or of result, whichever is larger.
        slot_nbytes: bytes of one staging slot or source buffer: a chunk, or less where all
            parameters together are smaller.
        threads: streaming threads; 0 streams in the calling thread.
        readers: "mmap", "pread", "direct" or "http", for each shard.
        out_of_range: "inf", "clamp" or "error".
        notes: choices that a user may want to know of, one sentence each.
        page_cache: what becomes of the page cache that the load brings in: "auto", "keep", "drop".
        reader_reasons: why each shard is read as it is, one sentence each; () if unknown.
        cache: the KV cache that there is room for when the load is done, with its dtype, or None.
        change_nbytes: what functions that change values hold for all threads.
        change_thread_nbytes: memory of each thread besides its rows, and for reading views
            of files takes there.
        ahead: the kernel may read ahead of what is read of files; false where the host has too
            little memory for pages that are on their way.
    """

    path: str
    placements: Placements
    devices: tuple[DevicePlan, ...]
    host_nbytes: int
    host_budget_nbytes: int
    chunk_nbytes: int
    slot_nbytes: int
    threads: int
    readers: tuple[ResolvedKind, ...]
    out_of_range: OutOfRange
    notes: tuple[str, ...] = ()
    page_cache: PageCacheKind = "auto"
    reader_reasons: tuple[str, ...] = ()
    cache: CacheRequest | None = None
    change_nbytes: int = 0
    change_thread_nbytes: int = 0
    ahead: bool = True

    @property
    def staging_nbytes(self) -> int:
        """Bytes of one staging slot as it is allocated: chunks, and what is read around them."""
        return self.slot_nbytes + (DIRECT_ROOM_NBYTES if "direct" in self.readers else 0)

    @property
    def turn_nbytes(self) -> int:
        """Bytes of a block of lines that become columns."""
        return min(TURN_NBYTES, self.slot_nbytes)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of all parameters on all devices when the load is done."""
        return sum(d.resident_nbytes for d in self.devices)

    @property
    def process_nbytes(self) -> int:
        """By how much the process will grow at most: RssAnon + RssShmem, in bytes."""
        fresh = sum(d.fresh_nbytes for d in self.devices if d.shared_memory)
        shared = all(d.shared_memory for d in self.devices)
        load = LOAD_NBYTES if shared else _STAGED_LOAD_NBYTES
        load += self.threads * _CONNECTION_NBYTES if "http" in self.readers else 0
        return load + fresh + self.host_nbytes + sum(d.object_nbytes for d in self.devices)

    @property
    def reading(self) -> list[str]:
        """How the shards are read and why, one line for all that are read alike."""
        reasons = self.reader_reasons or [""] * len(self.readers)
        alike = Counter(zip(self.readers, reasons, strict=True))
        return [
            f"{kind}: {n} {'files' if n > 1 else 'file'}" + f" ({reason})" * bool(reason)
            for (kind, reason), n in alike.items()
        ]

    def device(self, name: str) -> DevicePlan:
        """The plan of one device; KeyError if it has none."""
        return {d.device: d for d in self.devices}[name]

    @property
    def digest(self) -> str:
        """SHA-256 of the plan's JSON, without what differs between machines: path and readers."""
        same = replace(self, path="", readers=(), reader_reasons=(), ahead=True)
        return hashlib.sha256(same.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        """A table of what each device holds, and what is cast."""
        split = len(self.devices) > 1
        cached = any(d.cache_nbytes for d in self.devices)
        reserved = any(d.reserve_nbytes for d in self.devices)
        mapped = sum(d.mapped_nbytes for d in self.devices)
        count: Counter[str] = Counter()
        casts: Counter[tuple[str, str, str]] = Counter()
        for p, n in self.placements.counted:
            count[p.device] += n
            casts[p.src.name, p.dst.name, p.cast] += n
        up = partial(format_bytes, up=True)  # a budget of what is shown is enough
        taken = [(d.needed_nbytes + d.reserve_nbytes, d.stated_nbytes) for d in self.devices]
        columns = {
            "device": [d.device for d in self.devices],
            "holds": [d.holds or "-" for d in self.devices if split],
            "tensors": [str(count[d.device]) for d in self.devices],
            "resident": [up(d.resident_nbytes) for d in self.devices],
            "cache": [up(d.cache_nbytes) for d in self.devices if cached],
            "peak": [up(d.peak_nbytes) for d in self.devices],
            "reserve": [up(d.reserve_nbytes) for d in self.devices if reserved],
            "budget": [format_bytes(stated) for _, stated in taken],
            "share": [f"{n / stated:.0%}" if stated else "-" for n, stated in taken],
        }
        columns = {title: column for title, column in columns.items() if column}
        rows = list(zip(*columns.values(), strict=True))
        return printed(
            [
                *format_table(list(columns), rows, right=5 + cached + reserved),
                *(
                    f"{n} tensors from {src} to {dst} by {by}"
                    for (src, dst, by), n in casts.items()
                    if src != dst
                ),
                *([f"{format_bytes(mapped)} stay in the mapped files"] if mapped else []),
                f"{format_bytes(self.resident_nbytes)} in all; {self.threads} threads, chunks of "
                f"{format_bytes(self.chunk_nbytes)}, host staging "
                f"{format_bytes(self.host_nbytes)}",
                *([self._cache_line(self.cache)] if self.cache else []),
                *(f"read by {line}" for line in self.reading),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__  # a prompt shows the table: all placements are 100 characters a tensor

    @property
    def bars(self) -> list[Stack]:
        """What becomes of each device's budget, in `PARTS`; a load may use the cache's part."""
        stacks = []
        for d in self.devices:
            free = d.budget_nbytes - d.needed_nbytes
            loading = d.needed_nbytes - d.run_nbytes
            parts = (d.resident_nbytes, d.cache_nbytes, loading, d.reserve_nbytes, free)
            label = f"{format_bytes(d.stated_nbytes - free)} of {format_bytes(d.stated_nbytes)}"
            stacks.append(Stack(d.device, parts, label))
        return stacks

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, and the bars."""
        return as_html(str(self), PARTS, self.bars)

    def _cache_line(self, cache: CacheRequest) -> str:
        nbytes = sum(d.cache_nbytes for d in self.devices)
        many = f"{cache.batch} sequences of " if cache.batch > 1 else ""
        return (
            f"room to run: {format_bytes(nbytes)} of KV cache in {cache.dtype}, for {many}"
            f"{cache.context} tokens"
        )

    def to_json(self) -> str:
        """Write the plan as JSON; `Plan.from_json` reads it back equal."""

        def plain(value: Any) -> Any:
            return value.name if isinstance(value, DType) else value

        def record(obj: Any, **special: Any) -> dict[str, Any]:
            return {f: plain(getattr(obj, f)) for f in obj.__slots__} | special

        return json.dumps(
            record(
                self,
                placements=[
                    record(
                        p,
                        source=[
                            [r.tensor, r.start, r.stop, r.columns and list(astuple(r.columns))]
                            for r in p.source
                        ],
                        transpose=p.transpose
                        and [p.transpose.groups, p.transpose.outer, p.transpose.inner],
                        coding=p.coding and asdict(p.coding),
                    )
                    for p in self.placements
                ],
                devices=[asdict(d) for d in self.devices],
                cache=self.cache and record(self.cache),
            ),
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not such JSON.
        """
        try:
            data = parse_json(text)
            data["placements"] = Placements.of(
                Placement(
                    **p
                    | {
                        "shape": tuple(p["shape"]),
                        "src": named(p["src"]),
                        "dst": BY_NAME[p["dst"]],
                        "source": tuple(
                            RowRange(n, i, j, Columns(*c) if c else None)
                            for n, i, j, c in p["source"]
                        ),
                        "transpose": RowTranspose(*p["transpose"]) if p["transpose"] else None,
                        "coding": _coding(p["coding"]) if p.get("coding") else None,
                    }
                )
                for p in data["placements"]
            )
            data["devices"] = tuple(
                DevicePlan(**d | {"layers": tuple(d["layers"]) if d["layers"] else None})
                for d in data["devices"]
            )
            cache = data.get("cache")
            if cache is not None:
                dtype = cache["dtype"] and BY_NAME[cache["dtype"]]
                data["cache"] = CacheRequest(cache["context"], cache["batch"], dtype)
            lists = ("readers", "notes", "reader_reasons")
            data |= {key: tuple(data[key]) for key in lists if key in data}  # or has a default
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a plan: {error}") from error


def _coding(found: dict[str, Any]) -> Coding:
    there = found["device_parts"]
    parts = None if there is None else tuple(there)
    return Coding(**found | {"shape": tuple(found["shape"]), "device_parts": parts})
