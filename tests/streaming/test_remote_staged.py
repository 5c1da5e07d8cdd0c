"""Checkpoints over HTTP to devices that take many reads in one call, from files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
import pytest
from remote_server import Answer, serve

needs.module("httpx2")
needs.module("torch")

from recorded_torch import RecordedTorchDevice  # noqa: E402
from torch_staged_helpers import Made, make, prepare, write  # noqa: E402

from streamload.checkpoint.open import open_checkpoint  # noqa: E402
from streamload.errors import CheckpointError  # noqa: E402


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("cast", ["llvm", "device"])
def test_staged_devices_are_loaded_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, cast: str
) -> None:
    """There is no file to hand over: bytes come by the reader, through the slots; an error ends it.

    Calling again completes the load.
    """
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "1")
    made = write(tmp_path / "x", shards=2, dtype="bfloat16")
    names = {info.name: info.shard.name for info in open_checkpoint(made.path).tensors.values()}
    index = json.dumps({"weight_map": names})
    (made.path / "model.safetensors.index.json").write_text(index)
    with serve(made.path) as site:
        there = Made(site.url, made.tensors)  # type: ignore[arg-type]
        options: Any = {"threads": threads, "reader": "http", "cast": cast, "chunk_nbytes": 200}
        first = prepare(make("meta"), there, RecordedTorchDevice(seed=1, in_bulk=True), **options)
        site.always["/" + first.checkpoint.shards[1].path.name] = Answer(503, body=b"later")
        with pytest.raises(CheckpointError, match="503 Service Unavailable"):
            first.go()
        site.always.clear()
        again = prepare(first.net, there, RecordedTorchDevice(seed=2, in_bulk=True), **options)
        again.go()
        again.check_loaded()
