"""What an offloaded model did: what stays, what streamed, and what was waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamload.core.units import format_bytes
from streamload.errors import printable
from streamload.loading.report import LoadReport
from streamload.offloading.model import Timed
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """What the experts of a layer did so far.

    Attributes:
        hits: how many chosen experts were in the cache when the router had chosen.
        misses: how many were read.
        stall: seconds that the layer waited for experts.
        read_nbytes: file bytes read for them.
    """

    hits: int
    misses: int
    stall: float
    read_nbytes: int

    @property
    def hit_rate(self) -> float:
        """The share of the chosen experts that were in the cache."""
        return self.hits / max(self.hits + self.misses, 1)


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What an offloaded model did so far. Prints as a short table.

    Attributes:
        plan: what stays and what streams.
        load: what loading that which stays did.
        passes: how many passes there were.
        read_nbytes: file bytes that passes read, without those of gathered rows.
        seconds: wall time of the passes; 0 where the model's own call is not one.
        stalls: seconds that each layer was waited for.
        misses: how often another layer was asked for than was expected.
        wire_nbytes_per_s: the rate at which layers came while some were on their way.
        experts: by layer, what its experts did, where a cache holds them.
        overrun: what passes had more tokens than the plan has room for, in words; "" if none had.
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
        """Read the counts; ``rounds`` is None if nothing streams."""
        if rounds is None:
            return cls(plan, load, timed.passes, 0, timed.seconds, {}, 0, 0.0, {}, overrun)
        stats, cache = rounds.stats, rounds.experts
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
        """Bytes of the weights that stay."""
        return self.plan.residency.resident_nbytes

    @property
    def pass_nbytes(self) -> int:
        """Bytes that a pass reads, without experts."""
        return self.plan.residency.pass_nbytes

    @property
    def hit_rate(self) -> float:
        """The share of the experts chosen by all layers that were in the cache."""
        layers = self.experts.values()
        return sum(e.hits for e in layers) / max(sum(e.hits + e.misses for e in layers), 1)

    @property
    def wire_share(self) -> float:
        """The share of the rate of transfers that passes had; 0 if unknown."""
        if not self.seconds or not self.wire_nbytes_per_s:
            return 0.0
        return self.read_nbytes / self.seconds / self.wire_nbytes_per_s

    def __str__(self) -> str:
        """What stays, what streamed, and how long passes took."""
        lines = [str(self.plan)]
        if self.passes:
            each = self.seconds / self.passes
            lines.append(
                f"{self.passes} passes, {each:.3f} s each; {format_bytes(self.read_nbytes)} read; "
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
                f"layers came at {self.wire_nbytes_per_s / 1e9:.1f} GB/s; passes had "
                f"{self.wire_share:.0%} of that"
            )
        if self.overrun:
            lines.append(f"beyond the budget: {self.overrun}")
        return "\n".join(lines)

    __repr__ = __str__
