"""What an offloaded model did: what stays, what streamed, and what was waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamload.offloading.deciding import OffloadPlan
from streamload.report import LoadReport
from streamload.units import format_bytes


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
    """

    plan: OffloadPlan
    load: LoadReport
    passes: int
    read_nbytes: int
    seconds: float
    stalls: Mapping[str, float]
    misses: int
    wire_nbytes_per_s: float

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the weights that stay."""
        return self.plan.residency.resident_nbytes

    @property
    def pass_nbytes(self) -> int:
        """Bytes that a pass reads."""
        return self.plan.residency.pass_nbytes

    @property
    def wire_share(self) -> float:
        """Of the rate at which layers can come, what passes had; 0 where that is not known."""
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
        if self.wire_share:
            lines.append(
                f"layers came at {self.wire_nbytes_per_s / 1e9:.1f} GB/s; passes had "
                f"{self.wire_share:.0%} of that"
            )
        return "\n".join(lines)

    __repr__ = __str__
