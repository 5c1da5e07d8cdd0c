"""The plan: every decision about a load, as frozen data, before anything moves.

A `Plan` says which rows of which checkpoint tensors become which parameter, where, in which
dtype, by which cast, and what the peak will be on each device and in host staging. It can be
printed, saved as JSON, compared between nodes, and held against what was then measured.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from operator import attrgetter
from typing import Any, Literal, overload

from streamload.codecs.cast_table import OutOfRange
from streamload.codecs.encode_kernels import Tally
from streamload.core.bounded_json import parse_json
from streamload.core.chart import Stack, as_html
from streamload.core.dtypes import BY_NAME, DType, named
from streamload.core.tensors import Coding, Columns, RowRange, RowTranspose, records
from streamload.core.units import format_bytes, format_table, round_up
from streamload.devices.allocators import AllocatorKind
from streamload.errors import printed
from streamload.files.local import ResolvedKind
from streamload.files.page_cache import PageCacheKind
from streamload.planning.device_plan import DevicePlan
from streamload.planning.kv_cache import CacheRequest

Action = Literal["new", "in_place", "replace"]

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
# Most bytes of rows that are changed at once, but for a row that is longer.
CHANGE_NBYTES = 2**20
# What a device that casts keeps of each parameter: how many elements overflowed, vanished, changed.
TALLY_NBYTES = 3 * 8
# Of a unit that it quantises: a float32.
STATISTIC_NBYTES = 4
# What a load takes of the process beside what grows with its tensors: stacks of threads, readers,
# the first chunks. Seen were 0.1 to 1.2 MB with 1 to 8 threads, 2.9 MB with tinygrad's devices, and
# 2.6 MB on the way to CUDA, where a driver takes more beside it.
LOAD_NBYTES = 3 * 2**20
_STAGED_LOAD_NBYTES = 4 * 2**20
# A thread's connection to a server, with what it has received: seen were 0.5 MB each.
_CONNECTION_NBYTES = 2**20
# Allocators that take segments of the device's memory, which many tensors share.
SEGMENTS: frozenset[AllocatorKind] = frozenset({"cuda_caching", "cuda_expandable"})
_SCALES_NBYTES = 2**24  # on the host, on their way to a device
_MOST_SENDERS = 4
_LISTED = 8  # placements that are printed


def units_ahead(*, staged: bool) -> int:
    """Most units of a thread under way: one for each slot and one that waits; staged ones more.

    Those are handed out and told several at a time.
    """
    return STAGING_SLOTS + (_STAGED_AHEAD if staged else 1)


def senders(scales_nbytes: int) -> int:
    """How many threads send scales ahead to a device, of weights with up to so many bytes."""
    return max(min(_SCALES_NBYTES // max(scales_nbytes, 1), _MOST_SENDERS), 1)


def slot_nbytes(nbytes: int) -> int:
    """Bytes that a chunk of ``nbytes`` takes up in a staging slot."""
    return round_up(nbytes, SLOT_ALIGNMENT)


#: Casts that the host makes.
HOST_CASTS = frozenset({"llvm", "numpy", "rows", "quant"})
#: Casts of what nothing is read for while a load streams.
UNREAD = frozenset({"mapped", "part"})


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter of the plan.

    Attributes:
        name: the parameter's name.
        device: where it goes.
        shape: its shape.
        src: dtype in the checkpoint.
        dst: dtype on the device.
        source: row ranges, concatenated in order.
        transpose: a permutation of those rows, or None.
        action: "new", "in_place" (the bytes it holds now are overwritten) or "replace" (what it
            holds is released first).
        cast: "copy", "llvm", "numpy", "device", "rows" where functions change values, "mapped" for
            a view on the file, which is not read, "quant" where it is quantised, or "part" for what
            belongs to that: it is not read, and made when the codes are there.
        resident_nbytes: bytes that it takes of the device, as the allocator rounds; 0 where it
            fits into what the allocator took for an earlier one.
        released_nbytes: bytes that it gives back on that device first, under "replace".
        reusable_nbytes: of the bytes that it holds, those whose memory the load takes over: to be
            written in place, or really given back. The others have none yet, or share it.
        coding: what it is of a quantised tensor; None of any other.
        scales_nbytes: what the host holds while its values are dequantised; 0 of any other.
        there_nbytes: what a device that casts it holds until all of it is there: scales, or
            statistics that are quantised then.
    """

    name: str
    device: str
    shape: tuple[int, ...]
    src: DType
    dst: DType
    source: tuple[RowRange, ...]
    transpose: RowTranspose | None
    action: Action
    cast: str
    resident_nbytes: int
    released_nbytes: int = 0
    reusable_nbytes: int = 0
    coding: Coding | None = None
    scales_nbytes: int = 0
    there_nbytes: int = 0

    @property
    def numel(self) -> int:
        """Elements of what is read for it."""
        if self.coding is None:
            return math.prod(self.shape)
        return 0 if self.coding.part else math.prod(self.coding.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter's elements on the device."""
        return self.dst.nbytes(math.prod(self.shape))

    @property
    def src_nbytes(self) -> int:
        """Bytes of its elements in the checkpoint."""
        return self.stored_nbytes(self.numel)

    @property
    def row_numel(self) -> int:
        """Elements of one row of its source."""
        return self.numel // max(sum(r.stop - r.start for r in self.source), 1)

    @property
    def tally_nbytes(self) -> int:
        """Bytes of what a device counts of it."""
        return TALLY_NBYTES if self.coding is None else ctypes.sizeof(Tally)

    @property
    def unit_numel(self) -> int:
        """Elements of the least that becomes bytes of the parameter by itself."""
        if self.coding is None:
            own = self.src.unit if self.src.is_packed else 1
            return self.row_numel if self.cast == "rows" else own
        unit = self.coding.unit_numel
        if self.transpose is not None and self.turned:  # whole columns of the file
            return math.lcm(unit, self.column_numel)
        return math.lcm(unit, self.row_numel) if self.coding.of_rows else unit

    @property
    def changes(self) -> bool:
        """Whether functions change its rows on the way."""
        return self.cast == "rows" or (self.coding is not None and self.coding.of_rows)

    def stored_nbytes(self, numel: int) -> int:
        """Bytes of so many of its elements in the checkpoint."""
        return self.src.nbytes(numel)

    def placed_nbytes(self, numel: int) -> int:
        """Bytes of so many of its elements on the device: of the first ones, whole units."""
        coding = self.coding
        if coding is None:
            return self.dst.nbytes(numel)
        units, rest = divmod(numel, coding.unit_numel)
        last = -(-rest * coding.dst_unit_nbytes // coding.unit_numel)
        return units * coding.dst_unit_nbytes + last

    def numel_at(self, nbytes: int) -> int:
        """The number of the element whose unit begins at a byte on the device, if quantised."""
        coding = self.coding
        assert coding is not None, self.name
        return nbytes // coding.dst_unit_nbytes * coding.unit_numel

    @property
    def part_numel(self) -> int:
        """Elements that a transpose moves together."""
        assert self.transpose is not None, self.name
        return self.numel // self.transpose.rows

    @property
    def column_numel(self) -> int:
        """Elements of a column of lines that become columns."""
        assert self.transpose is not None, self.name
        return self.part_numel * self.transpose.outer

    @property
    def least_columns(self) -> int:
        """How many columns of lines that become columns are read together at least."""
        unit = self.unit_numel
        if self.coding is not None:
            return max(unit // self.column_numel, 1)
        return unit // math.gcd(unit, self.part_numel)

    @property
    def changed_numel(self) -> int:
        """Most elements that are changed at once."""
        fitting = CHANGE_NBYTES // max(self.src.itemsize, self.dst.itemsize)
        return min(max(fitting, self.row_numel), self.numel)

    @property
    def strided(self) -> bool:
        """Whether only some columns of its rows are read."""
        return any(r.columns is not None for r in self.source)

    @property
    def turned_there(self) -> bool:
        """Whether it is read in its order, and the device that dequantises it transposes it."""
        return self.cast == "device" and self.src.is_packed and self.transpose is not None

    @property
    def turned(self) -> bool:
        """Whether the transpose may move parts of rows, as that of a matrix does."""
        shape = self.shape if self.coding is None else self.coding.shape
        if self.transpose is None or self.turned_there:
            return False
        return self.transpose.rows != (shape or (1,))[0]


class Placements(Sequence[Placement]):
    """Placements in columns, one for each fact that differs between them.

    There may be very many, of few kinds. A `Placement` is made when it is asked for, which a load
    of small tensors does for few. They compare, hash and pickle like a tuple of the same.

    Attributes:
        names: of the parameters.
        kinds: for each a placement that has all that is not in another column; one object for all
            that are alike.
        sources: the row ranges of each.
        resident_nbytes: what each takes of its device.
        reusable_nbytes: of the bytes that each holds, what the load takes over.
    """

    __slots__ = (
        *("_counted", "_made", "kinds", "names"),
        *("resident_nbytes", "reusable_nbytes", "sources"),
    )

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[Placement],
        sources: Sequence[tuple[RowRange, ...]],
        resident_nbytes: Sequence[int],
        reusable_nbytes: Sequence[int],
    ) -> None:
        self.names = names
        self.kinds = kinds
        self.sources = sources
        self.resident_nbytes = resident_nbytes
        self.reusable_nbytes = reusable_nbytes
        self._counted: tuple[tuple[Placement, int], ...] | None = None
        self._made: dict[int, Placement] = {}

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> Placements:
        """Put placements into columns, each as a kind of its own."""
        kinds = tuple(placements)
        fields = ("name", "source", "resident_nbytes", "reusable_nbytes")
        names, sources, resident, reusable = (list(map(attrgetter(f), kinds)) for f in fields)
        return cls(names, kinds, sources, resident, reusable)

    @property
    def counted(self) -> tuple[tuple[Placement, int], ...]:
        """The different kinds, and how many placements are of each."""
        if self._counted is None:
            keys = list(map(id, self.kinds))
            count, kind = Counter(keys), dict(zip(keys, self.kinds, strict=True))
            self._counted = tuple((kind[key], count[key]) for key in count)
        return self._counted

    @property
    def all_new(self) -> bool:
        """Whether nothing is held: all are "new"."""
        return all(kind.action == "new" for kind, _ in self.counted)

    def on(self, device: str) -> Placements:
        """Those on one device."""
        if all(kind.device == device for kind, _ in self.counted):
            return self
        return self.chosen([at for at, kind in enumerate(self.kinds) if kind.device == device])

    def chosen(self, places: Sequence[int]) -> Placements:
        """Those of these numbers, in this order."""
        return Placements(*([column[at] for at in places] for column in self._columns))

    @property
    def _columns(self) -> tuple[Sequence[Any], ...]:
        sizes = self.resident_nbytes, self.reusable_nbytes
        return self.names, self.kinds, self.sources, *sizes

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> Placement: ...
    @overload
    def __getitem__(self, at: slice) -> Placements: ...
    def __getitem__(self, at: int | slice) -> Placement | Placements:
        """One placement, or several."""
        if isinstance(at, slice):
            return Placements(*(column[at] for column in self._columns))
        found = self._made.get(at)
        if found is None:
            found = self._made[at] = replace(
                self.kinds[at],
                name=self.names[at],
                source=self.sources[at],
                resident_nbytes=self.resident_nbytes[at],
                reusable_nbytes=self.reusable_nbytes[at],
            )
        return found

    def __iter__(self) -> Iterator[Placement]:
        columns: dict[str, Sequence[Any]] = {
            "name": self.names,
            "source": self.sources,
            "resident_nbytes": self.resident_nbytes,
            "reusable_nbytes": self.reusable_nbytes,
        }
        for field in Placement.__slots__:
            if field not in columns:
                columns[field] = list(map(attrgetter(field), self.kinds))
        return iter(records(Placement, *(columns[field] for field in Placement.__slots__)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, Placements)):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        """A table of the first: all are 300 characters each."""
        rows = [
            (p.name, p.device, str(list(p.shape)), p.src.name, p.dst.name, p.cast, p.action)
            for p in self[:_LISTED]
        ]
        titles = ("parameter", "device", "shape", "stored as", "becomes", "by", "action")
        rest = len(self) - len(rows)
        more = [f"and {rest} more"] * bool(rest)
        return "\n".join([*format_table(titles, rows, right=0), *more])

    def __reduce__(self) -> tuple[Any, ...]:
        return Placements.of, (tuple(self),)


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
        reader_reasons: why each shard is read as it is, one sentence each; () where nobody said.
        cache: the KV cache that there is room for when the load is done, with its dtype, or None.
        change_nbytes: what functions that change values hold for all threads.
        change_thread_nbytes: what they take in each thread, beside its rows, and what reading views
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
        for device in self.devices:
            if device.device == name:
                return device
        raise KeyError(name)

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
        rows = [
            (
                d.device,
                *([d.holds or "-"] if split else []),
                str(count[d.device]),
                format_bytes(d.resident_nbytes, up=True),  # a budget of what is shown is enough
                *([format_bytes(d.cache_nbytes, up=True)] if cached else []),
                format_bytes(d.peak_nbytes, up=True),
                *([format_bytes(d.reserve_nbytes, up=True)] if reserved else []),
                format_bytes(d.stated_nbytes),
                f"{(d.needed_nbytes + d.reserve_nbytes) / d.stated_nbytes:.0%}"
                if d.stated_nbytes
                else "-",
            )
            for d in self.devices
        ]
        titles = (
            *("device", *["holds"] * split, "tensors", "resident", *["cache"] * cached, "peak"),
            *(*["reserve"] * reserved, "budget", "share"),
        )
        return printed(
            [
                *format_table(titles, rows, right=5 + cached + reserved),
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
