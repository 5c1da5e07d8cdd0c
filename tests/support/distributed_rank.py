"""One rank of a load across hosts: ``python distributed_rank.py ASKED``.

ASKED is JSON:
    out: a folder; the rank writes OUT/RANK.json there when it has loaded, or has raised.
    path: the checkpoint.
    warm: a small one that is loaded before, so that what is imported and opened is there; or null.
    reference: what the tensors are compared with; where left out, the checkpoint.
    options: of `streamload.distributed.load_state_dict`.
    cache_nbytes: of each of its layers the rank takes so many bytes more, as a model that runs.
    hosts: what is otherwise on a host, by its name: path, options, or protocol (its version).
    recovers: once it has loaded and the others have, it prints "loaded", waits until a rank is
        lost, and recovers.

It prints "begun" when the load begins. Rank 0 prints "at 10%" and so on while all load.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np

import streamload
from streamload import distributed
from streamload.core.system import trim_heap
from streamload.devices.names import framework, framework_of
from streamload.distributed import session
from streamload.distributed.launch import find_launch
from streamload.errors import NodeError, PeerFailedError, StreamloadError
from streamload.loading.report import LoadReport
from streamload.verification.verify import verify

FAILED = 9
PLENTY = 10**9


def counter(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"/proc/self/{file} has no {name}")


def anonymous_nbytes() -> int:
    return counter("status", "RssAnon") * 1024 + counter("status", "RssShmem") * 1024


def digest(half: np.ndarray[Any, np.dtype[np.float16]]) -> str:
    """SHA-256 of values of float16, of all NaNs alike: what a cast makes of their bits is free."""
    return hashlib.sha256(np.where(np.isnan(half), np.float16("nan"), half).tobytes()).hexdigest()


def hashes(report: LoadReport) -> dict[str, str]:
    """The `digest` of each tensor's bytes, as they are on the device."""
    owner = framework(framework_of(report.state_dict) or "host")
    found = {}
    for p in report.plan.placements:
        (parameter,) = owner.parameters({"it": report.state_dict[p.name]})
        data = owner.device(p.device).read(parameter.buffer(), 0, p.nbytes)
        found[p.name] = digest(np.frombuffer(data, np.float16))
    return found


def steps() -> Callable[[int, int], None]:
    """Says each tenth of the way, once."""
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        while total and said < 10 * done // total:
            said += 1
            print(f"at {said}0%", flush=True)

    return tell


def load(asked: dict[str, Any]) -> dict[str, Any]:
    options = {"timeout": 60.0, **asked["options"]}
    before = counter("io", "rchar")
    print("begun", flush=True)
    report = distributed.load_state_dict(None, asked["path"], progress=steps(), **options)
    if asked.get("recovers"):
        print("loaded", flush=True)
        report = recovered(report)
    read = counter("io", "rchar") - before
    layers = {name.split(".")[2] for name in report.state_dict if name.startswith("model.layers.")}
    # every byte is written, so that there is memory behind it
    taken = [np.full(asked.get("cache_nbytes", 0), 1, np.uint8) for _ in layers]
    reference = streamload.open_checkpoint(asked.get("reference", asked["path"]))
    return {
        "rchar": read,
        "lost": list(report.lost),
        "notes": list(report.notes),
        "read_nbytes": report.read_nbytes,
        "resident_nbytes": report.resident_nbytes,
        "cache_nbytes": sum(array.nbytes for array in taken),
        "nodes": [asdict(node) for node in report.nodes],
        "hashes": hashes(report),
        "differ": [str(mismatch) for mismatch in verify(report, reference)],
    }


def recovered(report: LoadReport) -> LoadReport:
    while True:
        try:
            report.recovery.check()
        except PeerFailedError:
            found: LoadReport = report.recovery.recover()
            return found
        time.sleep(0.01)


def failed(error: StreamloadError, raised_s: float) -> dict[str, Any]:
    return {
        "error": type(error).__name__,
        "node": error.node if isinstance(error, NodeError) else None,
        "message": str(error),
        "state": error.state and {kind: len(n) for kind, n in asdict(error.state).items()},
        "raised_s": raised_s,
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    other = asked.get("hosts", {}).get(gethostname(), {})
    asked["options"] |= other.pop("options", {})
    session.PROTOCOL = other.pop("protocol", session.PROTOCOL)
    asked |= other
    launch = find_launch()
    assert launch is not None
    said: dict[str, Any] = {"rank": launch.rank, "host": gethostname(), "error": None}
    if asked.get("warm"):
        distributed.load_state_dict(None, asked["warm"], progress=False, **asked["options"])
        gc.collect()
    before = anonymous_nbytes()
    try:
        said |= load(asked)
    except StreamloadError as error:
        said |= failed(error, time.monotonic())
    gc.collect()
    trim_heap()
    said["grown_nbytes"] = anonymous_nbytes() - before
    engines = {"torch.distributed": "torch", "mpi4py.MPI": "mpi"}
    said["engines"] = [engine for module, engine in engines.items() if module in sys.modules]
    partial = Path(asked["out"], f"{launch.rank}.partial")
    partial.write_text(json.dumps(said))
    partial.rename(partial.with_suffix(".json"))
    sys.stdout.flush()
    sys.exit(FAILED if said["error"] else 0)


# --- for the tests that start it -----------------------------------------------------------------


def asking(out: Path, path: object, **asked: Any) -> list[str]:
    """The command of a rank; what is not the program's own are options of the load."""
    out.mkdir(exist_ok=True)
    names = ("reference", "warm", "cache_nbytes", "hosts", "recovers")
    own = {name: asked.pop(name) for name in names if name in asked}
    options = {"budget": PLENTY, "device": "host", "dtype": "float16"} | asked
    said = {"out": str(out), "path": str(path), "options": options, **own}
    return [sys.executable, __file__, json.dumps(said)]


def told(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in files]


def expected(path: Path) -> dict[str, str]:
    """The `digest` of each tensor as float16, by numpy alone."""
    found = {}
    for info in streamload.open_checkpoint(path).tensors.values():
        bits = np.fromfile(info.shard, np.uint16, info.nbytes // 2, offset=info.start)
        with np.errstate(over="ignore", invalid="ignore"):
            half = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float16)
        found[info.name] = digest(half)
    return found


def holds(found: Sequence[Mapping[str, Any]], path: Path, split: str, engine: str) -> None:
    """Assert that every tensor is there, bit for bit, once or on every rank."""
    reference = expected(path)
    names = [name for said in found for name in said["hashes"]]
    assert sorted(names) == sorted([*reference] * (len(found) if split == "replicate" else 1))
    for said in found:
        assert said["engines"] == [engine]
        assert said["differ"] == []
        assert said["hashes"] == {name: reference[name] for name in said["hashes"]}
        assert said["nodes"] == found[0]["nodes"]
        assert [node["tensors"] for node in said["nodes"]] == [len(f["hashes"]) for f in found]


if __name__ == "__main__":
    main()
