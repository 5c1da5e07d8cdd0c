"""``scripts/bench experts``: hit rates of the cache of experts on traces of routing."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_parts import experts_section
from bench_parts.section import Options


@pytest.mark.parametrize("kind", ["skewed", "drifting", "uniform"])
def test_hit_rates_on_traces(kind: str) -> None:
    """Above least-recently-used where experts are scarce, and never above the best there can be."""
    passes = experts_section.trace(kind)
    for slots in (48, 96):
        found = {name: way(passes, slots) for name, way in experts_section.WAYS.items()}
        assert found["ours"] >= found["least recent"], slots
        assert all(rate <= found["the best there can be"] for rate in found.values()), slots
        if kind != "uniform":
            assert found["ours"] > found["least recent"] + 0.1, slots
            assert found["ours"] > found["the best there can be"] * 0.7, slots


def test_the_section_has_a_row_for_each_trace_and_budget(tmp_path: Path) -> None:
    """Ways side by side; more slots never lower the best that there can be."""
    section = experts_section.experts(Options(0, 1, tmp_path, lambda text: None))
    for kind in ("skewed", "drifting", "uniform"):
        best = [row["the best there can be"] for row in section.rows if row["trace"] == kind]
        assert len(best) == 6
        assert best == sorted(best)
