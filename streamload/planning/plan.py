"""The plan: every decision about a load, as frozen data, before anything moves.

A `Plan` maps rows of checkpoint tensors to parameters: the device, dtype and cast of each, and the
predicted peak of each device and of host staging. It can be printed, saved as JSON, compared
between nodes and with the measured load.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamload.codecs.cast_table import OutOfRange
from streamload.codecs.scheme import LIBRARIES
from streamload.core.bounded_json import parse_json
from streamload.core.chart import Stack, as_html
from streamload.core.dtypes import BY_NAME, DType, named
from streamload.core.tensors import Coding, Columns, RowRange, RowTranspose
from streamload.core.units import format_bytes, format_table, round_up
from streamload.devices.allocators import AllocatorKind
from streamload.errors import printed
from streamload.files.folder import ResolvedKind
from streamload.files.page_cache import PageCacheKind
from streamload.planning.kv_cache import CacheRequest
from streamload.planning.moves import Kind, Move, Moves

#: Parts of a device's budget in a chart, from left to right.
PARTS = ("weights", "KV cache", "while loading", "reserve", "free")

STAGING_SLOTS = 2  # per thread: one is filled while the other's copy is under way
_STAGED_AHEAD = 8  # work items of a thread beyond its slots, on devices that need staging
SLOT_ALIGNMENT = 64  # chunks in a staging slot begin at multiples of this
# Bytes of a slot besides its chunks, for reads past the page cache: they begin at a multiple of the
# reader's alignment before the first requested byte, and end at one after the last.
DIRECT_ROOM_NBYTES = 2 * 4096
# Most bytes that a worker copies unchanged in one call through its slots, without Python's
# interpreter; a load with little for each worker takes fewer.
BULK_NBYTES = 2**24
# Most work items that a worker gets at once.
BATCH_UNITS = 4
# Most bytes of a block that a transpose moves at once; a thread holds two.
TURN_NBYTES = 2**19
# Bytes of the statistic of each quantized unit: a float32.
STATISTIC_NBYTES = 4
# Process memory of a load that does not grow with its tensors: stacks of threads, readers,
# the first chunks. Measured: 0.1 to 0.4 MB with 2 threads, 1.2 MB with 8, 2.9 MB with thousands of
# tensors, and 2.6 MB on the way to CUDA, where a driver adds to it.
_LOAD_NBYTES = 3 * 2**18
_LOAD_MANY = 1000  # tensors
_LOAD_MANY_NBYTES = 9 * 2**18
_LOAD_THREADS = 4  # more take more
_LOAD_THREAD_NBYTES = 2**17
_STAGED_LOAD_NBYTES = 4 * 2**20
# What servers' clients take of the process, and each thread's connection with its received bytes.
# A download by huggingface_hub, with the pieces of 10 MB that it receives, took 41 MiB.
_CLIENT_NBYTES = {"http": 0, "store": 20 * 2**20, "cache": 48 * 2**20}
_CONNECTION_NBYTES = {"http": 2**20, "store": 2**21, "cache": 0}
# Allocators that take segments of the device's memory, which many tensors share.
SEGMENTS: frozenset[AllocatorKind] = frozenset({"cuda_caching", "cuda_expandable"})
_SCALES_NBYTES = 2**24  # on the host, on their way to a device
_MOST_SENDERS = 4


def load_nbytes(tensors: int) -> int:
    """Return the process memory of a load of so many tensors besides theirs."""
    return _LOAD_NBYTES + (_LOAD_MANY_NBYTES if tensors > _LOAD_MANY else 0)


def units_ahead(*, staged: bool) -> int:
    """Return the most work items of one thread at a time: one for each slot, and one that waits.

    If the device needs staging (``staged``) there are more: they are handed out in batches.
    """
    return STAGING_SLOTS + (_STAGED_AHEAD if staged else 1)


def senders(scales_nbytes: int) -> int:
    """Return how many threads, 1 to 4, send scales ahead; ``scales_nbytes``: largest weight's."""
    return max(min(_SCALES_NBYTES // max(scales_nbytes, 1), _MOST_SENDERS), 1)


def slot_nbytes(nbytes: int) -> int:
    """Return the bytes that a chunk of ``nbytes`` takes in a staging slot: whole 64 bytes."""
    return round_up(nbytes, SLOT_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Memory that a plan takes on one device, in bytes.

    Attributes:
        device: name of the device.
        budget_nbytes: bytes that the load may take: the budget, less `reserve_nbytes`.
        resident_nbytes: parameters, when the load is done.
        scratch_nbytes: temporary device memory (and host staging, on shared memory).
        peak_nbytes: predicted peak: parameters, scratch, and old parameters not yet released.
        fresh_nbytes: memory that the load newly takes at its peak, scratch included.
        held_nbytes: bytes that the parameters hold there when the load begins; more than the peak
            if old parameters are larger than the budget, and are freed first.
        layers: first and last (exclusive) layer, under a split; None without one.
        embedding: whether the device holds the embedding, under a split.
        head: whether the device holds the head, under a split.
        release_first: whether all old parameters are freed before the first is loaded.
        cache_nbytes: the KV cache of the device's layers, which is allocated after the load.
        reserve_nbytes: bytes kept free in addition, of the budget and of free memory.
        reusable_nbytes: bytes of `held_nbytes` that the load takes over.
        object_nbytes: process memory of tensor objects, besides the tensors' bytes.
        kernel_nbytes: memory of the operating system's kernel for the tensors.
        shared_memory: whether the device's memory is host memory.
        charged: whether such memory counts as this process's.
        mapped_nbytes: bytes that stay in mapped files: the kernel can take their pages back.
        token_nbytes: bytes of weights that a forward pass of one token reads; see `tokens`.
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
    charged: bool = True
    mapped_nbytes: int = 0
    token_nbytes: int = 0

    @property
    def run_nbytes(self) -> int:
        """Bytes of parameters and KV cache, which the model needs to run."""
        return self.resident_nbytes + self.cache_nbytes

    @property
    def needed_nbytes(self) -> int:
        """Most bytes of the budget in use: by the load, or by the model that runs afterwards."""
        return max(self.peak_nbytes, self.run_nbytes)

    @property
    def fresh_needed_nbytes(self) -> int:
        """Bytes of `needed_nbytes` that are newly taken, and not held by old parameters."""
        return max(self.fresh_nbytes, self.run_nbytes - self.reusable_nbytes)

    @property
    def host_needed_nbytes(self) -> int:
        """Host bytes for tensor objects, and for elements if the device shares host memory."""
        own = self.fresh_needed_nbytes if self.shared_memory else 0
        return self.object_nbytes + self.kernel_nbytes + own

    @property
    def stated_nbytes(self) -> int:
        """The budget as the user stated it, with the bytes kept free."""
        return self.budget_nbytes + self.reserve_nbytes

    @property
    def holds(self) -> str:
        """The parts of the model here in a split, such as "embedding, layer 0"; "" if none."""
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
        devices: the memory that each device needs.
        host_nbytes: predicted peak of host staging that no device's budget covers.
        host_budget_nbytes: the budget of `host_nbytes`.
        chunk_nbytes: most bytes in one chunk, of source or of result, whichever is larger.
        slot_nbytes: bytes of one staging slot or source buffer: a chunk, or less if all
            parameters together are smaller.
        threads: streaming threads; 0 streams in the calling thread.
        readers: "mmap", "pread", "direct", "http", "store" or "cache", for each shard.
        out_of_range: casts of values that the target dtype cannot represent: "inf", "clamp" or
            "error".
        notes: choices that a user may want to know of, one sentence each.
        page_cache: treatment of pages that the load brings into the page cache: "auto", "keep" or
            "drop".
        reader_reasons: why each shard gets its reader, one sentence each; () if unknown.
        cache: the KV cache for which the plan keeps room, with its dtype, or None.
        change_nbytes: bytes that functions that change values (transform=, adapters) hold for all
            threads.
        change_thread_nbytes: bytes of each thread for those functions, besides its rows, and for
            strided views of files.
        ahead: whether the kernel may read ahead in files; false if the host has too little memory
            for such pages.
    """

    path: str
    placements: Moves
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
        """Allocated bytes of one staging slot: chunks, and the margins of reads past the cache."""
        return self.slot_nbytes + (DIRECT_ROOM_NBYTES if "direct" in self.readers else 0)

    @property
    def turn_nbytes(self) -> int:
        """Bytes of the block that the host transposes at once."""
        return min(TURN_NBYTES, self.slot_nbytes)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of all parameters on all devices when the load is done."""
        return sum(d.resident_nbytes for d in self.devices)

    @property
    def token_nbytes(self) -> int:
        """Bytes of weights that a forward pass of one token reads, on all devices."""
        return sum(d.token_nbytes for d in self.devices)

    @property
    def process_nbytes(self) -> int:
        """Most bytes by which the process will grow: RssAnon + RssShmem."""
        fresh = sum(d.fresh_nbytes for d in self.devices if d.shared_memory and d.charged)
        shared = all(d.shared_memory and d.charged for d in self.devices)
        load = load_nbytes(len(self.placements)) if shared else _STAGED_LOAD_NBYTES
        load += max(self.threads - _LOAD_THREADS, 0) * _LOAD_THREAD_NBYTES
        for kind in _CLIENT_NBYTES.keys() & set(self.readers):
            load += _CLIENT_NBYTES[kind] + self.threads * _CONNECTION_NBYTES[kind]
        return load + fresh + self.host_nbytes + sum(d.object_nbytes for d in self.devices)

    @property
    def machine_nbytes(self) -> int:
        """Bytes of host memory that the load needs, page tables included."""
        return self.process_nbytes + sum(d.kernel_nbytes for d in self.devices)

    @property
    def reading(self) -> list[str]:
        """A line for each reader and reason, with the number of shards that it reads."""
        reasons = self.reader_reasons or [""] * len(self.readers)
        alike = Counter(zip(self.readers, reasons, strict=True))
        return [
            f"{kind}: {n} {'files' if n > 1 else 'file'}" + f" ({reason})" * bool(reason)
            for (kind, reason), n in alike.items()
        ]

    def device(self, name: str) -> DevicePlan:
        """Return the plan of one device by name; raises KeyError if there is none."""
        return {d.device: d for d in self.devices}[name]

    @property
    def digest(self) -> str:
        """SHA-256 of the plan's JSON without facts of a machine: path, readers, read-ahead."""
        same = replace(self, path="", readers=(), reader_reasons=(), ahead=True)
        return hashlib.sha256(same.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        """Return a table with a row for each device, then casts, totals and notes."""
        split = len(self.devices) > 1
        cached = any(d.cache_nbytes for d in self.devices)
        reserved = any(d.reserve_nbytes for d in self.devices)
        mapped = sum(d.mapped_nbytes for d in self.devices)
        read = self.token_nbytes > 0
        count: Counter[str] = Counter()
        casts: Counter[tuple[str, str, str]] = Counter()
        stored: Counter[str] = Counter()
        for p, n in self.placements.counted:
            count[p.device] += n
            stored[p.stored] += n
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
            "per token": [up(d.token_nbytes) for d in self.devices if read],
        }
        columns = {title: column for title, column in columns.items() if column}
        rows = list(zip(*columns.values(), strict=True))
        room = []
        if (cache := self.cache) is not None:
            many = f"{cache.batch} sequences of " if cache.batch > 1 else ""
            nbytes = format_bytes(sum(d.cache_nbytes for d in self.devices))
            room = [
                f"room to run: {nbytes} of KV cache in {cache.dtype}, for {many}{cache.context} "
                "tokens"
            ]
        return printed(
            [
                *format_table(list(columns), rows, right=5 + read + cached + reserved),
                *(
                    f"{n} tensors from {src} to {dst} by {by}"
                    for (src, dst, by), n in casts.items()
                    if src != dst
                ),
                *(f"{n} tensors stay {kind}, as stored" for kind, n in stored.items() if kind),
                *([f"{format_bytes(mapped)} stay in the mapped files"] if mapped else []),
                f"{format_bytes(self.resident_nbytes)} in all; {self.threads} threads, chunks of "
                f"{format_bytes(self.chunk_nbytes)}, host staging "
                f"{format_bytes(self.host_nbytes)}",
                *room,
                *(f"read by {line}" for line in self.reading),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__  # a prompt shows the table: all placements are 100 characters a tensor

    @property
    def bars(self) -> list[Stack]:
        """Chart bars, one a device: its budget by `PARTS`; a load may use the KV cache's bytes."""
        stacks = []
        for d in self.devices:
            free = d.budget_nbytes - d.needed_nbytes
            loading = d.needed_nbytes - d.run_nbytes
            parts = (d.resident_nbytes, d.cache_nbytes, loading, d.reserve_nbytes, free)
            label = f"{format_bytes(d.stated_nbytes - free)} of {format_bytes(d.stated_nbytes)}"
            stacks.append(Stack(d.device, parts, label))
        return stacks

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the table and the bars."""
        return as_html(str(self), PARTS, self.bars)

    def to_json(self) -> str:
        """Write the plan as JSON; `Plan.from_json` reads it back equal."""
        rows = [{name: getattr(p, name) for name in _FACTS} for p in self.placements]
        fields = _plain(self) | {"placements": rows}
        fields["token_nbytes"] = self.token_nbytes
        return json.dumps(fields, default=_plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the JSON of `to_json`.

        Raises:
            ValueError: the text is not such JSON.
        """
        try:
            data = parse_json(text)
            data.pop("token_nbytes", None)  # the sum over devices
            data["placements"] = Moves(map(_move, data["placements"]))
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


# The facts of a move in JSON, in this order.
_FACTS = (
    *("name", "device", "shape", "src", "dst", "source", "transpose", "action", "cast"),
    *("resident_nbytes", "released_nbytes", "reusable_nbytes"),
    *("coding", "scales_nbytes", "there_nbytes", "stored"),
)


def _move(found: dict[str, Any]) -> Move:
    facts = found | {
        "shape": tuple(found["shape"]),
        "src": _dtype(found["src"]),
        "dst": BY_NAME[found["dst"]],
        "transpose": RowTranspose(*found["transpose"]) if found["transpose"] else None,
    }
    if coding := found.get("coding"):
        parts = None if coding["device_parts"] is None else tuple(coding["device_parts"])
        facts["coding"] = Coding(
            **coding | {"shape": tuple(coding["shape"]), "device_parts": parts}
        )
    rows = ((n, i, j, Columns(*c) if c else None) for n, i, j, c in facts.pop("source"))
    source = tuple(RowRange(*each) for each in rows)
    sizes = facts.pop("resident_nbytes"), facts.pop("reusable_nbytes", 0)
    name, count = facts.pop("name"), sum(r.stop - r.start for r in source)
    strided = any(r.columns is not None for r in source)
    return Move(name, source, Kind(**facts, rows=count, strided=strided), *sizes)


def _plain(value: Any) -> Any:
    """Return an object of a plan for JSON: a dtype's name, a list, or a dict of fields."""
    if isinstance(value, DType):
        return value.name
    fields = {name: getattr(value, name) for name in value.__slots__}
    return [*fields.values()] if isinstance(value, RowRange) else fields


def _dtype(name: str) -> DType:
    """Return the dtype with a long name; imports all libraries of quantized weights for theirs."""
    with suppress(KeyError):
        return named(name)
    for row in LIBRARIES.values():
        row.load()
    return named(name)
