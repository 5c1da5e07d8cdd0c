"""The report of an offload: passes, bytes read, waits for layers and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamload.core.chart import Shown
from streamload.core.units import format_bytes, format_rate
from streamload.errors import printable
from streamload.loading.report import LoadReport
from streamload.offloading.experts import ExpertCache
from streamload.offloading.layers import RoundStats
from streamload.offloading.model import Timed
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.planning.plan import load_nbytes


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Counts of the experts of a layer so far.

    Attributes:
        hits: number of chosen experts that were in the cache when the router had chosen.
        misses: number of chosen experts that were read.
        stall: seconds that the layer waited for experts.
        read_nbytes: file bytes read for experts.
    """

    hits: int
    misses: int
    stall: float
    read_nbytes: int

    @property
    def hit_rate(self) -> float:
        """The share of the chosen experts that were in the cache, 0 to 1."""
        return self.hits / max(self.hits + self.misses, 1)


@dataclass(frozen=True, slots=True)
class OffloadReport(Shown):
    """Counts and times of an offload so far. Prints as a short table.

    Attributes:
        plan: which layers stay and which stream.
        load: the report of loading the layers that stay.
        passes: number of passes.
        read_nbytes: file bytes that passes read, without single rows of embeddings.
        seconds: wall time of the passes; 0 if only parts of the model were called.
        stalls: by layer, seconds that passes waited for it.
        misses: how often another layer was asked for than expected.
        wire_nbytes_per_s: file bytes read per second while any layer was being read.
        experts: by layer whose experts are in a cache, their counts.
        overrun: in words, the passes with more tokens than the plan has room for; "" if none.
    """

    plan: OffloadPlan
    load: LoadReport
    passes: int
    read_nbytes: int
    seconds: float
    stalls: Mapping[str, float]
    misses: int
    wire_nbytes_per_s: float
    experts: Mapping[str, ExpertReport] = field(default_factory=dict)
    overrun: str = ""

    @classmethod
    def of(
        cls,
        plan: OffloadPlan,
        load: LoadReport,
        timed: Timed,
        rounds: Rounds | None,
        overrun: str = "",
    ) -> OffloadReport:
        """Return the counts of ``timed`` and ``rounds``, which is None if nothing streams."""
        stats = rounds.stats if rounds is not None else RoundStats()
        cache = rounds.experts if rounds is not None else ExpertCache((), 0)
        rows = zip(cache.hits, cache.misses, cache.stalls, cache.read_nbytes, strict=True)
        experts = (ExpertReport(*row) for row in rows)
        return cls(
            plan=plan,
            load=load,
            passes=timed.passes,
            read_nbytes=stats.read_nbytes,
            seconds=timed.seconds,
            stalls=dict(zip(plan.residency.streams, stats.stalls, strict=True)),
            misses=stats.misses,
            wire_nbytes_per_s=stats.read_nbytes / stats.busy_s if stats.busy_s else 0.0,
            experts=dict(zip(plan.residency.experts, experts, strict=True)),
            overrun=overrun,
        )

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of the weights that stay."""
        return self.plan.residency.resident_nbytes

    @property
    def process_nbytes(self) -> int:
        """Predicted growth of the process: the load, slots, and KV cache and activations there.

        As `LoadReport.predicted_nbytes`, from the begin of the call on.
        """
        plan = self.plan
        nbytes = self.load.predicted_nbytes["process"] + plan.passes_nbytes + plan.host_nbytes
        if plan.stream is not None:
            nbytes += load_nbytes(0)
        if all(d.shared_memory and d.charged for d in self.load.plan.devices):
            nbytes += plan.cache_nbytes + plan.activation_nbytes
        return nbytes

    @property
    def pass_nbytes(self) -> int:
        """File bytes that a pass reads, without experts and single rows of embeddings."""
        return self.plan.residency.pass_nbytes

    @property
    def hit_rate(self) -> float:
        """The share of the experts chosen by all layers that were in the cache, 0 to 1."""
        layers = self.experts.values()
        return sum(e.hits for e in layers) / max(sum(e.hits + e.misses for e in layers), 1)

    @property
    def wire_share(self) -> float:
        """Bytes read per second of passes, as a share of ``wire_nbytes_per_s``; 0 if unknown."""
        if not self.seconds or not self.wire_nbytes_per_s:
            return 0.0
        return self.read_nbytes / self.seconds / self.wire_nbytes_per_s

    def __str__(self) -> str:
        """A table of the plan, with times of passes and bytes read."""
        lines = [str(self.plan)]
        if self.passes:
            each = self.seconds / self.passes
            lines.append(
                f"{self.passes} pass{'es' * (self.passes > 1)}, {each:.3f} s each; "
                f"{format_bytes(self.read_nbytes)} read; "
                f"waited {sum(self.stalls.values()) / self.passes:.3f} s a pass for layers"
            )
        if self.passes and self.experts:
            found = self.experts.values()
            name, worst = min(self.experts.items(), key=lambda item: item[1].hit_rate)
            lines.append(
                f"experts: {self.hit_rate:.0%} of the chosen ones were in the cache (least in "
                f"{printable(name)}: {worst.hit_rate:.0%}); "
                f"{format_bytes(sum(e.read_nbytes for e in found))} read; waited "
                f"{sum(e.stall for e in found) / self.passes:.3f} s a pass for them"
            )
        if self.wire_share:
            lines.append(
                f"layers came at {format_rate(self.wire_nbytes_per_s, 1)}; passes had "
                f"{self.wire_share:.0%} of that"
            )
        if self.overrun:
            lines.append(f"beyond the budget: {self.overrun}")
        return "\n".join(lines)

    __repr__ = __str__
