"""Loads that lose ranks and go on: what moves, what stays, and what is refused."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from distributed_helpers import PLENTY, environment, llama, path, run_ranks
from safetensors_files import write_safetensors
from thread_group import ThreadGroup, World, run

import streamload
from streamload import distributed
from streamload.errors import NodeError, PeerFailedError, PlanInfeasibleError, StreamloadError
from streamload.loading.report import LoadReport
from streamload.planning.partition import Node

__all__ = ["path"]

LOSS_S = 1.0  # the timeout where a rank is lost
Body = Callable[[ThreadGroup], Any]


def alone(where: Path) -> dict[str, bytes]:
    report = streamload.load_state_dict(None, where, device="host", progress=False)
    return {name: array.tobytes() for name, array in report.state_dict.items()}


def loading(
    where: Path,
    *,
    after: Callable[[LoadReport, ThreadGroup], LoadReport] = lambda report, _: report,
    model: Callable[[int], Any] = lambda _: None,
    budget: Callable[[int], int] = lambda _: PLENTY,
    **options: Any,
) -> Body:
    """A rank that plans again if another is lost; ``after`` gets its report."""
    options = {"device": "host", "progress": False, "timeout": LOSS_S, **options}

    def body(group: ThreadGroup) -> Any:
        report = distributed.load_state_dict(
            model(group.rank),
            where,
            group=group,
            on_loss="replan",
            budget=budget(group.rank),
            **options,
        )
        try:
            found = after(report, group)
            found.recovery.close()
        finally:
            report.recovery.close()
        return found

    return body


def falling(world: World, *deaths: tuple[int, str, int], silent: bool = False) -> None:
    """Lose ranks at their n-th call of an operation: (rank, operation, n)."""
    counts: dict[tuple[int, str], int] = {}

    def watch(rank: int, operation: str) -> None:
        key = rank, operation
        counts[key] = counts.get(key, 0) + 1
        if (*key, counts[key]) in deaths:
            world.kill(rank, silent=silent)

    world.watch = watch


def left(world: World, found: Sequence[Any]) -> list[Any]:
    """The reports of those that were not lost."""
    reports = [said for rank, said in enumerate(found) if rank not in world.lost]
    for said in reports:
        if isinstance(said, BaseException):
            raise said
    return reports


def whole(reports: Sequence[LoadReport], where: Path, *, times: int = 1) -> None:
    """Assert that every tensor is there, as one process loads it, as often as it should be."""
    expected = alone(where)
    names = [name for report in reports for name in report.state_dict]
    assert sorted(names) == sorted([*expected] * times)
    for report in reports:
        assert {n: a.tobytes() for n, a in report.state_dict.items()}.items() <= expected.items()
        assert set(report.plan.placements.names) == set(report.state_dict)
        assert [node.tensors for node in report.nodes] == [len(r.state_dict) for r in reports]


# --- while they load ------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["layers", "balanced", "replicate"])
@pytest.mark.parametrize("number", [1, 2, 6, pytest.param(9, marks=pytest.mark.slow), 10])
def test_a_loss_in_every_stage(number: int, split: str, path: Path) -> None:
    """Whatever message is the last of a rank, the two others load everything, and name it."""
    rank = number % 3
    world = World(3, timeout_s=LOSS_S)
    falling(world, (rank, "allgather", number))
    reports = left(world, run(world, loading(path, split=split)))
    whole(reports, path, times=2 if split == "replicate" else 1)
    for report in reports:
        assert len(report.lost) == 1 and report.lost[0].endswith(str(rank))
        (note,) = [note for note in report.notes if note.startswith("lost ")]
        assert "planned again and loaded in" in note
        assert note == f"{note.partition(' stayed')[0]} stayed where they were"


def test_two_losses_one_after_the_other(path: Path) -> None:
    """The second comes while those that are left plan again; the last rank loads everything."""
    world = World(3, timeout_s=LOSS_S)
    falling(world, (1, "allgather", 6), (0, "allgather", 9))
    (report,) = left(world, run(world, loading(path)))
    whole([report], path)
    assert [name[-1] for name in report.lost] == ["1", "0"]


def test_two_losses_at_once_that_nobody_hears_of(path: Path) -> None:
    """One is named, the other does not come to the meeting."""
    world = World(4, timeout_s=LOSS_S)
    falling(world, (1, "allgather", 7), (3, "allgather", 7), silent=True)
    reports = left(world, run(world, loading(path)))
    whole(reports, path)
    assert all(sorted(name[-1] for name in report.lost) == ["1", "3"] for report in reports)


def test_parts_that_are_loaded_stay(tmp_path: Path) -> None:
    tensors = {f"t{n:02}": ("U8", (2**18,), bytes([n]) * 2**18) for n in range(40)}
    where = write_safetensors(tmp_path / "m.safetensors", tensors)
    world = World(2, timeout_s=LOSS_S)
    stopped = False

    def progress(done: int, total: int) -> None:
        nonlocal stopped
        if done >= 2**20 and not stopped:
            stopped = True
            world.kill(1)
            time.sleep(LOSS_S)

    options = {"progress": progress, "chunk_nbytes": 2**18, "threads": 1, "split": "balanced"}
    (report,) = left(world, run(world, loading(where, **options)))
    whole([report], where)
    assert 0 < report.read_nbytes <= 2**18 * 40 - 2**20
    assert report.resident_nbytes == 2**18 * 40


@pytest.mark.parametrize("split", ["layers", "balanced"])
def test_models_of_arrays_are_filled_in_place(split: str, path: Path) -> None:
    expected = alone(path)
    shapes = streamload.load_state_dict(None, path, device="host", progress=False).state_dict
    models = [{n: np.zeros_like(a) for n, a in shapes.items()} for _ in range(3)]
    world = World(3, timeout_s=LOSS_S)
    falling(world, (2, "allgather", 10))
    body = loading(path, split=split, device=None, model=models.__getitem__)
    reports = left(world, run(world, body))
    for rank, report in enumerate(reports):
        for name in report.plan.placements.names:
            assert models[rank][name].tobytes() == expected[name]
    names = [name for report in reports for name in report.plan.placements.names]
    assert sorted(names) == sorted(expected)


# --- after the load -------------------------------------------------------------------------------


def recovering(world: World, *lost: int) -> Callable[[LoadReport, ThreadGroup], LoadReport]:
    """Lose ranks after the load; the others recover, once they have noticed."""

    def after(report: LoadReport, group: ThreadGroup) -> LoadReport:
        group.allgather(b"")
        if group.rank in lost:
            world.kill(group.rank)
            group.store.get("x")
        until = time.monotonic() + LOSS_S
        with pytest.raises(PeerFailedError, match=f"/{lost[0]}: "):
            while time.monotonic() < until:
                report.recovery.check()
                time.sleep(0.01)
        before = dict(report.state_dict)
        found: LoadReport = report.recovery.recover()
        for name, array in found.state_dict.items():
            assert array is before.get(name, array)
        assert report.state_dict is found.state_dict  # what moved is freed
        return found

    return after


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("split", ["layers", "balanced", "replicate"])
def test_a_loss_after_the_load(split: str, lost: int, path: Path) -> None:
    expected = alone(path)
    world = World(3, timeout_s=LOSS_S)
    reports = left(world, run(world, loading(path, split=split, after=recovering(world, lost))))
    whole(reports, path, times=2 if split == "replicate" else 1)
    read = sum(report.read_nbytes for report in reports)
    assert read < sum(map(len, expected.values())) / 2
    assert split != "replicate" or not read
    for report in reports:
        assert [name[-1] for name in report.lost] == [str(lost)]


def test_a_loss_that_leaves_too_little_memory(path: Path) -> None:
    total = sum(map(len, alone(path).values()))
    world = World(3, timeout_s=LOSS_S)

    def after(report: LoadReport, group: ThreadGroup) -> LoadReport:
        with pytest.raises(PlanInfeasibleError) as raised:
            recovering(world, 1)(report, group)
        assert raised.value.needed_nbytes > raised.value.budget_nbytes
        assert raised.value.state is not None
        assert set(raised.value.state.loaded) == set(report.state_dict)
        assert "streamload.distributed.offload" in str(raised.value)
        return report

    left(world, run(world, loading(path, after=after, budget=lambda _: total // 3 + 6000)))


@pytest.mark.parametrize("late", [0, 2])
def test_a_recovery_that_failed_is_tried_again(late: int, tmp_path: Path) -> None:
    where = llama(tmp_path / "m", shards=3)
    shard = sorted(where.glob("*.safetensors"))[1]
    away = shard.with_suffix(".away")
    both = threading.Barrier(2, timeout=4 * LOSS_S)
    world = World(3, timeout_s=LOSS_S)
    again = recovering(world, 1)

    def after(report: LoadReport, group: ThreadGroup) -> LoadReport:
        if group.rank == 1:
            shard.rename(away)
        with pytest.raises(StreamloadError, match="shards are missing"):
            again(report, group)
        for _ in range(2):
            with pytest.raises(StreamloadError, match="shards are missing"):
                report.recovery.recover()
        if both.wait() == 0:
            away.rename(shard)
        both.wait()
        if group.rank == late:
            time.sleep(LOSS_S / 2)
        found: LoadReport = report.recovery.recover()
        return found

    reports = left(world, run(world, loading(where, after=after)))
    whole(reports, where)
    for report in reports:
        assert [name[-1] for name in report.lost] == ["1"]
        assert any(note.startswith(f"lost {report.lost[0]}; planned") for note in report.notes)


def test_layers_move_where_budgets_demand_it(tmp_path: Path) -> None:
    where = llama(tmp_path / "m", width=32)
    total = sum(map(len, alone(where).values()))
    world = World(3, timeout_s=LOSS_S)
    body = loading(where, after=recovering(world, 0), budget=lambda _: int(total * 0.6))
    reports = left(world, run(world, body))
    whole(reports, where)
    assert any("away" in note for note in reports[0].notes)
    assert all(report.resident_nbytes <= total * 0.6 for report in reports)


# --- processes ------------------------------------------------------------------------------------

BODY = """
import hashlib, json, os, sys, time
import torch.distributed
from streamload import distributed
from streamload.errors import PeerFailedError
path, fate = sys.argv[1:]
def load():
    return distributed.load_state_dict(
        None, path, budget="1GB", device="host", progress=False, timeout=4, on_loss="replan"
    )
def say(report):
    hashes = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in report.state_dict.items()}
    print(json.dumps({"lost": report.lost, "read": report.read_nbytes, "hashes": hashes}))
    sys.stdout.flush()
print("ready", flush=True)
sys.stdin.readline()
report = load()
say(report)
if fate == "dies":
    sys.stdin.read()
while fate == "stays":
    try:
        report.recovery.check()
        time.sleep(0.01)
    except PeerFailedError:
        recovered = report.recovery.recover()
        say(recovered)
        sys.stdin.readline()
        say(load())
        fate = "done"
"""


@pytest.mark.slow
def test_a_process_that_is_killed_comes_back(path: Path) -> None:
    """Rank 0 goes after a load, the others recover, and the next load is of all three."""
    dist = needs.module("torch").distributed
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = environment(
        WORLD_SIZE="3",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )

    def start(rank: int, fate: str) -> Any:
        return subprocess.Popen(
            [sys.executable, "-c", BODY, path, fate],
            env=env | {"RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go() -> None:
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()

    expected = {n: hashlib.sha256(data).hexdigest() for n, data in alone(path).items()}
    processes = [start(rank, "dies" if rank == 0 else "stays") for rank in range(3)]

    def said(*ranks: int) -> list[Any]:
        found = [json.loads(processes[rank].stdout.readline()) for rank in ranks]
        names = [name for one in found for name in one["hashes"]]
        assert sorted(names) == sorted(expected)
        assert all(one["hashes"].items() <= expected.items() for one in found)
        return found

    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        go()
        said(0, 1, 2)
        processes[0].kill()
        processes[0].wait()
        for one in said(1, 2):
            assert [name[-1] for name in one["lost"]] == ["0"]
        processes[0] = start(0, "returns")
        assert processes[0].stdout.readline() == "ready\n"
        go()
        assert all(one["lost"] == [] for one in said(0, 1, 2))
    finally:
        for process in processes:
            process.kill()
            process.communicate()


DIES = """
import hashlib, json, os, signal, sys
from streamload import distributed
path, rank = sys.argv[1], int(os.environ["RANK"])
def split(nodes, sizes):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    names = list(sizes)
    return {node.name: names[at :: len(nodes)] for at, node in enumerate(nodes)}
report = distributed.load_state_dict(
    None, path, split=split, budget="1GB", device="host", progress=False, timeout=3,
    on_loss="replan",
)
hashes = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in report.state_dict.items()}
print(json.dumps([report.lost, hashes]))
"""


def test_a_process_that_is_killed(path: Path) -> None:
    """Over torch's engine; rank 0 keeps the store."""
    needs.module("torch")
    said = run_ranks([sys.executable, "-c", DIES, path], [0, -signal.SIGKILL, 0], 60)
    found = [json.loads(said[rank]) for rank in (0, 2)]
    assert all([name[-1] for name in lost] == ["1"] for lost, _ in found)
    hashes = {n: hashlib.sha256(data).hexdigest() for n, data in alone(path).items()}
    assert found[0][1] | found[1][1] == hashes
    assert not found[0][1].keys() & found[1][1].keys()


# --- any loss -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_losses(seed: int, tmp_path: Path) -> None:
    chance = np.random.default_rng(seed)
    where = llama(tmp_path / "m", shards=int(chance.integers(1, 4)), seed=seed)
    expected = alone(where)
    total = sum(map(len, expected.values()))
    size, split = (
        int(chance.integers(2, 6)),
        str(chance.choice(["layers", "balanced", "replicate"])),
    )
    need = total if split == "replicate" else total // size
    budgets = [int(need * chance.uniform(1.2, 5)) + 20_000 for _ in range(size)]
    operations = ["allgather", "set", "get", "broadcast", "first", "find", "all_gather_into"]
    deaths = [
        (int(chance.integers(size)), str(chance.choice(operations)), int(chance.integers(1, 12)))
        for _ in range(int(chance.integers(1, 3)))
    ]
    world = World(size, timeout_s=LOSS_S)
    falling(world, *deaths, silent=bool(chance.integers(2)))
    found = run(world, loading(where, split=split, budget=budgets.__getitem__))
    others = [said for rank, said in enumerate(found) if rank not in world.lost]
    reports = [said for said in others if isinstance(said, LoadReport)]
    raised = [said for said in others if not isinstance(said, LoadReport)]
    assert all(isinstance(e, (PeerFailedError, PlanInfeasibleError)) for e in raised), raised
    for report in reports:
        assert {n: a.tobytes() for n, a in report.state_dict.items()}.items() <= expected.items()
    names = [name for report in reports for name in report.state_dict]
    if not raised and any(report.lost for report in reports):
        assert sorted(names) == sorted([*expected] * (len(reports) if split[0] == "r" else 1))
    if any(isinstance(error, PlanInfeasibleError) for error in raised):
        assert not reports


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "tensor"}, 'split="tensor" cuts them'),
        ({"split": "3x1"}, 'split="3x1" cuts them'),
        ({"quant": "int8"}, "leave out layers= and quant="),
        ({"layers": lambda part: range(len(part.layers))}, "leave out layers= and quant="),
        ({"on_loss": "retry"}, "on_loss is raise or replan, not 'retry'"),
    ],
)
def test_what_cannot_be_planned_again(options: dict[str, Any], said: str, path: Path) -> None:
    """Is refused before anything is read."""

    def body(group: ThreadGroup) -> Any:
        asked = {"on_loss": "replan", "budget": PLENTY, "device": "host", **options}
        return distributed.load_state_dict(None, path, group=group, **asked)

    for error in run(World(3), body):
        assert isinstance(error, ValueError)
        assert said in str(error)


def test_engines_that_lose_all_ranks_are_refused(path: Path) -> None:
    def body(group: ThreadGroup) -> Any:
        del group.meeting
        return loading(path)(group)

    for error in run(World(2), body):
        assert isinstance(error, NodeError)
        assert 'write on_loss="raise", or start the ranks with torchrun' in str(error)


def test_a_rank_that_comes_too_late_is_left_out(path: Path) -> None:
    world = World(3, timeout_s=LOSS_S)

    def late(report: LoadReport, group: ThreadGroup) -> LoadReport:
        group.allgather(b"")
        if group.rank == 1:
            time.sleep(2 * LOSS_S)
        found: LoadReport = report.recovery.recover()
        return found

    found = run(world, loading(path, after=late))
    assert isinstance(found[1], PeerFailedError)
    assert "the others went on without this rank, which came too late" in str(found[1])
    assert found[1].state is not None and found[1].state.loaded
    whole([found[0], found[2]], path)


def test_functions_split_again(path: Path) -> None:
    asked: list[list[Node]] = []

    def first(nodes: Sequence[Node], sizes: Mapping[str, int]) -> dict[str, list[str]]:
        asked.append([*nodes])
        return {nodes[0].name: list(sizes)}

    world = World(3, timeout_s=LOSS_S)
    reports = left(world, run(world, loading(path, split=first, after=recovering(world, 2))))
    whole(reports, path)
    assert sum(report.read_nbytes for report in reports) == 0
    assert [len(nodes) for nodes in asked] == [3, 3, 3, 2, 2]
    assert asked[-1][0].held == {*alone(path)}
