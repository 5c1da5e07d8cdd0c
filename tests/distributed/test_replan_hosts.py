"""Loads over hosts that lose ranks and go on: killed, stopped, or behind a cut link."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import needs
import pytest
from cluster_parts.hosts import Cluster
from distributed_rank import asking, expected, told
from make_checkpoint import make_checkpoint, shape_of_size
from nodes_scenarios import cluster

from streamload.core.dtypes import parse_dtype

RANKS = 4
TIMEOUT_S = 6.0
MOST_S = 10.0  # from the notice of a loss to the end of the load; nobody may know who is lost
END_S = 60.0
NBYTES = 24_000_000  # of the checkpoint: 2 s by the storage's link
LINK = "100mbit"

#: A store for ranks to meet in, in a process of its own.
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", 29500, None, True, wait_for_workers=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs.module("torch")
    needs.module("httpx2")
    folder = tmp_path_factory.mktemp("replan") / "model"
    make_checkpoint(folder, shape_of_size(NBYTES, parse_dtype("bfloat16")), shards=3)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replan") / "small"
    make_checkpoint(folder, shape_of_size(500_000, parse_dtype("bfloat16")))
    return folder


class Ranks:
    """Processes on hosts 0 to 3; host 4 has the store."""

    def __init__(self, hosts: Cluster, argv: Sequence[str], *, keeper: int = RANKS) -> None:
        self.hosts, self.store = hosts, None
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        if keeper == RANKS:
            self.store = hosts.exec(RANKS, [sys.executable, "-c", STORE], text=True, **pipes)
            assert self.store.stdout and self.store.stdout.readline() == "ready\n"
        common = {
            **{"WORLD_SIZE": str(RANKS), "MASTER_ADDR": f"node-{keeper}", "MASTER_PORT": "29500"},
            "TORCHELASTIC_USE_AGENT_STORE": str(keeper == RANKS),
        }
        self.processes = [self._start(argv, rank, common) for rank in range(RANKS)]

    def _start(self, argv: Sequence[str], rank: int, env: Mapping[str, str]) -> Any:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.hosts.exec(rank, argv, env={**env, "RANK": str(rank)}, text=True, **pipes)

    def await_line(self, rank: int, line: str) -> None:
        """Wait until a rank prints a line."""
        found = ""
        while line not in found:
            found = self.processes[rank].stdout.readline()
            assert found, self.processes[rank].stderr.read()

    def end(self, *stopped: int) -> list[float]:
        """Wait for the ends of the others; their times."""
        ends = []
        for rank, process in enumerate(self.processes):
            if rank not in stopped:
                process.communicate(timeout=END_S)
            ends.append(time.monotonic())
        for rank in stopped:
            self.processes[rank].kill()
        return ends


def kill(ranks: Ranks, rank: int) -> None:
    ranks.processes[rank].kill()


def stop(ranks: Ranks, rank: int) -> None:
    os.kill(ranks.processes[rank].pid, signal.SIGSTOP)


def cut(ranks: Ranks, rank: int) -> None:
    ranks.hosts.link_down(rank)


def lose(
    act: Callable[[Ranks, int], None],
    rank: int,
    delay_s: float,
    where: Path,
    small: Path,
    out: Path,
    *,
    keeper: int = RANKS,
    recovers: bool = False,
) -> tuple[list[dict[str, Any]], float]:
    """Lose a rank after its load begins, or once it has loaded; what the others say, and when."""
    with cluster(RANKS + 1, storage=where, storage_link=LINK) as hosts:
        asked = {"on_loss": "replan", "timeout": TIMEOUT_S, "warm": str(small)}
        argv = asking(out, hosts.storage_url, reference=str(where), recovers=recovers, **asked)
        ranks = Ranks(hosts, argv, keeper=keeper)
        for each in range(RANKS) if recovers else [rank]:
            ranks.await_line(each, "loaded" if recovers else "begun")
        time.sleep(delay_s)
        began = time.monotonic()
        act(ranks, rank)
        gone = [] if act is kill else [rank]
        ends = ranks.end(*gone)
    found = told(out)
    return found, max(end for r, end in enumerate(ends) if r != rank) - began


def outcome(found: Sequence[Mapping[str, Any]], rank: int, where: Path) -> str:
    """Assert that the ranks that are left have loaded all and the right values, or refused alike.

    Returns which, in a word, with the seconds from the notice on if there was one.
    """
    others = [said for said in found if said["rank"] != rank]
    assert [said["rank"] for said in others] == [r for r in range(RANKS) if r != rank]
    errors = [said["message"] for said in others if said["error"]]
    if errors:
        assert len(errors) == len(others), errors
        assert all("not here" in error or "cannot plan again" in error for error in errors), errors
        return f"refused: {errors[0]}"
    reference = expected(where)
    names = [name for said in others for name in said["hashes"]]
    if any(said["lost"] for said in others):
        assert sorted(names) == sorted(reference)
    for said in others:
        assert said["differ"] == []
        assert said["hashes"] == {name: reference[name] for name in said["hashes"]}
        assert said["lost"] in ([], [f"node-{rank}"], [f"rank {rank}"])
    seconds = [
        s
        for said in others
        for note in said["notes"]
        for s in re.findall(r"loaded in ([\d.]+) s", note)
    ]
    assert all(float(s) < MOST_S + TIMEOUT_S for s in seconds)
    return f"replanned in {max(map(float, seconds)):.1f} s" if seconds else "had loaded"


#: Seconds after the begin of a load: the meeting, the plan, the load itself, and its end.
MOMENTS = [n * 0.17 for n in range(20)]


def lost(what: str, rank: int) -> tuple[Callable[[Ranks, int], None], int]:
    """An act, and the rank."""
    return {"killed": kill, "stopped": stop, "cut": cut}[what], rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "moment"),
    [
        *(("killed", n) for n in range(20)),
        *((what, n) for what in ("stopped", "cut") for n in (4, 7, 9, 12, 16)),
    ],
)
def test_a_loss_while_they_load(
    what: str, moment: int, path: Path, small: Path, tmp_path: Path
) -> None:
    """Those that are left load everything, with the right values, or refuse in one line."""
    act, rank = lost(what, moment % RANKS)
    found, seconds = lose(act, rank, MOMENTS[moment], path, small, tmp_path / "out")
    said = outcome(found, rank, path)
    print(f"{what} after {MOMENTS[moment]:.2f} s: {said}; {seconds:.1f} s in all")
    assert seconds < END_S / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank"),
    [*(("killed", rank) for rank in (0, 1, 2, 3, 1)), ("stopped", 0), ("stopped", 3), ("cut", 0)],
)
def test_a_loss_after_the_load(
    what: str, rank: int, path: Path, small: Path, tmp_path: Path
) -> None:
    act, _ = lost(what, rank)
    found, seconds = lose(act, rank, 0.3, path, small, tmp_path / "out", recovers=True)
    said = outcome(found, rank, path)
    print(f"{what} after the load: {said}; {seconds:.1f} s in all")
    assert said.startswith("replanned")
    assert float(said.split()[2]) < MOST_S
    assert all(one["lost"] == [f"node-{rank}"] for one in found if one["rank"] != rank)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "stopped", "cut"])
def test_a_loss_of_the_rank_that_keeps_the_store(
    what: str, path: Path, small: Path, tmp_path: Path
) -> None:
    """It is refused by all others, in one line each, and nobody hangs."""
    act, rank = lost(what, 0)
    found, seconds = lose(act, rank, 1.4, path, small, tmp_path / "out", keeper=0)
    others = [said for said in found if said["rank"] != 0]
    assert len(others) == RANKS - 1
    for said in others:
        assert said["error"] == "PeerFailedError"
        assert "cannot plan again without it: the store in which ranks meet" in said["message"]
        assert "\n" not in said["message"]
    assert seconds < END_S / 2
