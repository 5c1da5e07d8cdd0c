"""The rates of memories, kept for later processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamload.core.memory_rate import keep_rate, kept_rate


def test_a_rate_is_found_by_every_name_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_rate("cuda:0") is None
    keep_rate("CUDA", 3000.0)
    keep_rate("cuda:0", 3350.5)
    keep_rate("host", 20.25)
    found = {name: kept_rate(name) for name in ("cuda:0", "torch:cuda", "CUDA", "cuda:1", "CPU")}
    assert found == {
        **dict.fromkeys(("cuda:0", "torch:cuda", "CUDA"), 3350.5),
        "cuda:1": None,
        "CPU": 20.25,
    }
    monkeypatch.setattr("platform.node", lambda: "another machine with this home")
    assert kept_rate("cuda:0") is None
