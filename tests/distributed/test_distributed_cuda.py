"""Two ranks of one host, each with a GPU of its own. Skipped on machines without two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import needs
import pytest

torch = needs.module("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("no two CUDA devices here", allow_module_level=True)

RANK = """
import json, sys
import streamload
from streamload import distributed
from streamload.verification.verify import verify

path, options = sys.argv[1], json.loads(sys.argv[2])
report = distributed.load_state_dict(None, path, device="cuda", progress=False, **options)
compared = []
wrong = verify(report, streamload.open_checkpoint(path), progress=compared.append)
print(json.dumps({
    "names": sorted(report.state_dict),
    "devices": sorted({str(t.device) for t in report.state_dict.values()}),
    "compared": max(compared),
    "nbytes": report.plan.devices[0].resident_nbytes,
    "wrong": list(map(str, wrong)),
}))
"""


@pytest.mark.parametrize("split", ["layers", "replicate"])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
def test_each_rank_loads_to_a_gpu_of_its_own(
    tmp_checkpoint: Callable[..., Path], split: str, dtype: str
) -> None:
    """Asked for by one word; every tensor is there bit for bit, once or on both."""
    path = tmp_checkpoint(16_000_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = json.dumps({"split": split, "dtype": dtype, "timeout": 60.0})
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), options],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert [one["devices"] for one in said] == [["cuda:0"], ["cuda:1"]]
    assert not any(one["wrong"] for one in said)
    first, second = (set(one["names"]) for one in said)
    assert first == second if split == "replicate" else first.isdisjoint(second)
    assert all(0 < one["compared"] <= one["nbytes"] for one in said)
