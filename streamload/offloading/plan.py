"""The plan of an offload: which layers stay on a device, which stream, and the bytes of both."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from streamload.core.chart import Shown
from streamload.core.units import format_bytes, format_table
from streamload.errors import printed
from streamload.offloading.groups import ROOT, LayerGroup
from streamload.offloading.residency import LayerSize, Residency, worth_streaming
from streamload.planning.plan import Plan
from streamload.planning.requests import TensorRequests

# A note for layers that the CPU can use as stored, and that fit into the page cache.
_MAPPED_IS_FASTER = (
    'residence="mapped" is faster while the page cache holds the files: a load with it leaves all '
    "weights there, of which the budget counts nothing (a pass took 0.55 of the time, a token 0.78)"
)


@dataclass(frozen=True, slots=True)
class OffloadPlan(Shown):
    """Which layers stay on a device, which stream through its slots, and the memory of both.

    Attributes:
        device: name of the device.
        budget_nbytes: budget of the device, as given.
        residency: which layers stay and which stream.
        groups: the layers, in the order in which they run.
        sizes: sizes of each layer in ``groups``.
        stream: the plan of streaming, in the order of the layers, and then of the experts; None if
            all layers stay.
        load_nbytes: peak device bytes of loading the resident layers, before there are slots.
        cache_nbytes: room for the KV cache.
        activation_nbytes: room for activations.
        reserve_nbytes: bytes of the budget that stay free, as asked.
        host: names of the layers, or of the layers of experts, that come from host memory.
        host_nbytes: bytes of host memory for them, as in the files.
        views: whether the device computes on the files: slots are mapped pages, and no memory.
        unaligned: a tensor whose start in its file prevents ``views``; "" for none.
        mappable: whether a load could leave the layers in their files, to compute on these.
        cached: whether the page cache has room for all that streams, so that only the first pass
            reads the disk.
        notes: for the user, one sentence each.
        tokens: most tokens of a pass that there is room for; None: no room for activations.
        cached_tokens: most tokens of the KV cache, of all sequences together.
    """

    device: str
    budget_nbytes: int
    residency: Residency
    groups: tuple[LayerGroup, ...]
    sizes: tuple[LayerSize, ...]
    stream: Plan | None
    load_nbytes: int
    cache_nbytes: int
    activation_nbytes: int
    reserve_nbytes: int
    host: tuple[str, ...] = ()
    host_nbytes: int = 0
    views: bool = False
    unaligned: str = ""
    mappable: bool = False
    cached: bool = True
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    cached_tokens: int = 0

    @property
    def layer_placements(self) -> list[range]:
        """Indices in ``stream.placements`` for each layer that streams, then for each expert."""
        by_name = {group.name: group for group in self.groups}
        counts = [len(by_name[name].wants) for name in self.residency.streams]
        for name in self.residency.experts:
            counts += [by_name[name].parts] * by_name[name].experts
        return [range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]

    @property
    def experts(self) -> list[int]:
        """Number of experts of each layer with cached experts."""
        count = {group.name: group.experts for group in self.groups}
        return [count[name] for name in self.residency.experts]

    @property
    def token_nbytes(self) -> int:
        """File bytes of the experts that one token uses, in all layers with cached experts."""
        cached = {*self.residency.experts}
        sizes = [size for size in self.sizes if size.name in cached]
        return sum(size.read_nbytes * size.chosen // size.experts for size in sizes)

    @property
    def read_nbytes(self) -> int:
        """File bytes that a pass of one token reads, with all its experts."""
        return self.residency.pass_nbytes + self.token_nbytes

    def tensors_of(self, layers: Collection[str], wants: TensorRequests) -> set[str]:
        """Return names of the checkpoint's tensors that the named layers are read from."""
        found = (at for group in self.groups if group.name in layers for at in group.wants)
        return {row.tensor for at in found for row in wants.sources[at]}

    @property
    def places(self) -> dict[str, int]:
        """Bytes by place ("resident", "disk", ...) of weights, without embeddings read by rows."""
        rest = self.residency.file_nbytes - self.host_nbytes
        found = {"resident": self.residency.resident_nbytes, "host memory": self.host_nbytes}
        return found | {"page cache": rest * self.cached, "disk": rest * (not self.cached)}

    @property
    def bounded(self) -> list[str]:
        """Names of the layers that stay, and would stream under a smaller budget."""
        worth = worth_streaming(self.sizes)
        stays = {*self.residency.stays}
        return [size.name for size in self.sizes if size.name in stays and size.name in worth]

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes of scratch memory for streaming, besides the slots."""
        return self.stream.devices[0].scratch_nbytes if self.stream else 0

    @property
    def passes_nbytes(self) -> int:
        """Process memory of slots and staging, which passes take besides weights that stay."""
        if self.stream is None:
            return 0
        there, nbytes = self.stream.devices[0], self.stream.host_nbytes
        if there.shared_memory and there.charged:
            nbytes += there.scratch_nbytes + (0 if self.views else self.residency.arena_nbytes)
        return nbytes

    @property
    def peak_nbytes(self) -> int:
        """Device bytes of weights and slots, or of loading resident layers if that takes more."""
        return max(self.residency.taken_nbytes + self.scratch_nbytes, self.load_nbytes)

    @property
    def needed_nbytes(self) -> int:
        """Bytes of the budget taken in all: `peak_nbytes`, KV cache, activations, reserve."""
        return self.peak_nbytes + self.cache_nbytes + self.activation_nbytes + self.reserve_nbytes

    def seconds(self, rate: float) -> float:
        """Return seconds that the transfers of a pass of one token take, at ``rate`` bytes/s."""
        return self.read_nbytes / rate

    def to_json(self) -> str:
        """Return sizes and residency as a JSON object."""
        names = (
            *("device", "budget_nbytes", "peak_nbytes", "scratch_nbytes", "cache_nbytes"),
            *("activation_nbytes", "reserve_nbytes", "needed_nbytes", "token_nbytes", "views"),
            *("host", "places"),
        )
        found = {name: getattr(self, name) for name in names}
        return json.dumps(found | asdict(self.residency), separators=(",", ":"))

    def __str__(self) -> str:
        """A table of the layers that stay and stream, with their memory."""
        found = self.residency
        if not found.absent:
            return (
                f"{self.device}: all of it stays: {format_bytes(found.resident_nbytes)} of "
                f"{format_bytes(self.budget_nbytes)}; a pass reads nothing"
            )
        rows = [("stay", *_listed(found.stays), format_bytes(found.resident_nbytes))]
        if found.streams:
            rows.append(("stream", *_listed(found.streams), format_bytes(found.pass_nbytes)))
        if found.experts:
            rows.append(("experts in a cache", *_listed(found.experts), "as chosen"))
        if found.gathers:
            rows.append(("rows from the file", *_listed(found.gathers), "-"))
        room = [
            ("slots", found.arena_nbytes - found.cache_nbytes),
            ("experts", found.cache_nbytes),
            ("streaming", self.scratch_nbytes),
            ("KV cache", self.cache_nbytes),
            ("activations", self.activation_nbytes),
            ("reserve", self.reserve_nbytes),
        ]
        lines = [*format_table(("what", "layers", "which", "bytes"), rows, right=0)]
        parts = [f"{name} {format_bytes(n)}" for name, n in room if n]
        lines.append(
            f"{self.device}: {format_bytes(self.needed_nbytes)} of "
            f"{format_bytes(self.budget_nbytes)}: weights "
            f"{format_bytes(found.resident_nbytes)}, {', '.join(parts)}"
        )
        pages = ", pages of the mapped files" if self.views else ""
        if found.slots or not found.experts:
            lines.append(
                f"{found.slots} slots of {format_bytes(found.slot_nbytes)}{pages}; a pass reads "
                f"{format_bytes(found.pass_nbytes)}"
            )
        if found.experts:
            lines.append(
                f"{found.cache_slots} slots of experts of "
                f"{format_bytes(found.cache_slot_nbytes)}{pages}, for "
                f"{found.cache_slots / found.experts_total:.0%} of the {found.experts_total} "
                "experts; a pass reads those of the chosen ones that are not there, for a token up "
                f"to {format_bytes(self.token_nbytes)}"
            )
        places = [f"{where} {format_bytes(n)}" for where, n in self.places.items() if n]
        if self.unaligned:
            lines.append(
                f"{self.unaligned} does not begin at a multiple of 64 in its file, so each pass "
                "copies what streams: `streamload convert PATH OUT` writes files that passes "
                "compute on as they lie"
            )
        return printed([*lines, f"from {', '.join(places)}", *self.notes, *self.faster])

    @property
    def faster(self) -> list[str]:
        """A list: a note if a load that leaves weights in mapped files would be faster."""
        return [_MAPPED_IS_FASTER] if self.mappable and self.cached else []

    __repr__ = __str__


def _listed(names: Sequence[str]) -> tuple[str, str]:
    shown = ", ".join(name or ROOT for name in names[:4]) + (", ..." if len(names) > 4 else "")
    return str(len(names)), shown
