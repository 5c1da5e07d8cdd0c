"""Loads over a Ray cluster: three nodes on loopback addresses, by ``ray start``."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import needs
import numpy as np
import psutil
import pytest
from distributed_helpers import PLENTY, llama
from remote_server import Answer, Handler, no_proxy, serve

import streamload
from streamload.errors import NodeError, PeerFailedError, PlanInfeasibleError

__all__ = ["no_proxy"]

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")  # Ray replaces 127.0.0.1
BUDGET = dict.fromkeys(NODES, PLENTY)
SOON_S = 15.0  # for a loss to be named, and for processes to end
START_S = 60.0


class Cluster:
    """Nodes, each in a folder of its own: relative paths are files of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        with socket.create_server((NODES[0], 0)) as server:
            self.address = f"{NODES[0]}:{server.getsockname()[1]}"

    def start(self, node: str) -> None:
        place = self.folder / node
        place.mkdir(exist_ok=True)
        head = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        head += [f"--temp-dir={self.folder}/ray"]
        options = head if node == NODES[0] else [f"--address={self.address}"]
        with (place / "log").open("wb") as log:
            self.nodes[node] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options),
                    *(f"--node-ip-address={node}", "--num-cpus=1", "--disable-usage-stats"),
                    *("--object-store-memory=80000000", "--include-log-monitor=false"),
                ],
                cwd=place,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_S
        while b"Ray runtime started" not in (place / "log").read_bytes():
            assert time.monotonic() < end, (place / "log").read_text()
            time.sleep(0.1)

    def signal(self, node: str, number: int) -> None:
        started = psutil.Process(self.nodes[node].pid)
        for process in [started, *started.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self, node: str) -> None:
        self.signal(node, signal.SIGKILL)
        self.nodes.pop(node).wait()

    def actors(self) -> list[str]:
        found = []
        for node in self.nodes.values():
            for process in psutil.Process(node.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found.append(f"{process.name()} {process.pid}")
        return [name for name in found if name.startswith("ray::_Rank")]

    def nothing_left(self) -> None:
        end = time.monotonic() + SOON_S
        while found := self.actors():
            assert time.monotonic() < end, found
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    ray = needs.runtime("ray")
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: it has sockets
        made = Cluster(Path(folder))
        try:
            for node in NODES:
                made.start(node)
            ray.init(made.address, _node_ip_address=NODES[0], log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            for node in list(made.nodes):
                made.kill(node)


@pytest.fixture
def load(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`streamload.distributed.ray.load` of a small checkpoint; no actor is left afterwards."""
    path = llama(tmp_path / "model")
    for node in NODES:
        if node not in cluster.nodes:
            cluster.start(node)
    loads = importlib.import_module("streamload.distributed.ray")

    def small(model_fn: Any = lambda share: None, path: Any = path, **options: Any) -> Any:
        return loads.load(
            model_fn, path, **{"budget": BUDGET, "device": "host", "progress": False} | options
        )

    yield small
    cluster.nothing_left()


def plain(path: Any) -> dict[str, np.ndarray[Any, Any]]:
    report = streamload.load_state_dict(None, path, budget=PLENTY, device="host", progress=False)
    return report.state_dict


def held(loaded: Any) -> dict[str, np.ndarray[Any, Any]]:
    parts = loaded.get([actor.call.remote("copy") for actor in loaded.actors.values()])
    whole = {name: array for part in parts for name, array in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_each_node_holds_its_part(load: Callable[..., Any], tmp_path: Path) -> None:
    with load() as loaded:
        assert [*loaded.actors] == [*loaded.reports] == [*NODES]
        parts = loaded.get([actor.call.remote("copy") for actor in loaded.actors.values()])
        for part, node in zip(parts, NODES, strict=True):
            report = loaded.reports[node]
            assert {placement.name for placement in report.plan.placements} == part.keys()
            assert not report.state_dict
            assert [each.node for each in report.nodes] == [*NODES]
        equal(held(loaded), plain(tmp_path / "model"))


@pytest.mark.slow
def test_models_are_called(load: Callable[..., Any]) -> None:
    def build(share: Any) -> Any:
        import torch

        class Model(torch.nn.Module):  # every rank has a slice of the head, and it whole
            def __init__(self) -> None:
                super().__init__()
                self.lm_head = torch.nn.Linear(16, 64 // share.parts, False, device="meta")

            def total(self) -> float:
                torch.distributed.init_process_group("gloo")
                part = self.lm_head.weight.double().abs().sum()
                torch.distributed.all_reduce(part)
                torch.distributed.destroy_process_group()
                return float(part)

        return Model()

    options = {"budget": dict.fromkeys(NODES[:2], PLENTY), "device": "cpu", "strict": False}
    with load(build, split="tensor", **options) as loaded:
        found = loaded.get([actor.call.remote("total") for actor in loaded.actors.values()])
        whole = np.abs(plain(loaded.reports[NODES[0]].path)["lm_head.weight"].astype("f8")).sum()
        np.testing.assert_allclose(found, [whole] * 2)


@contextmanager
def losing(cluster: Cluster, node: str, folder: Path) -> Iterator[tuple[str, list[float]]]:
    """The URL of a checkpoint, and when a node was killed: as soon as data of tensors is asked for.

    None is sent before that.
    """
    reached, killed, times = threading.Event(), threading.Event(), list[float]()

    def hold(handler: Handler, content: bytes) -> None:
        if handler.wanted is not None and handler.wanted[0] > 0:  # behind the header
            reached.set()
            killed.wait(START_S)
        Answer()(handler, content)

    def kill() -> None:
        if reached.wait(5 * START_S):  # its actors may start late
            times.append(time.monotonic())
            cluster.kill(node)
            killed.set()

    with serve(folder) as site:
        site.always |= {f"/model-0000{n}-of-00002.safetensors": hold for n in (1, 2)}
        killing = threading.Thread(target=kill)
        killing.start()
        yield site.url, times
        killing.join()


@pytest.mark.slow
def test_a_node_is_killed_during_a_load(
    load: Callable[..., Any], cluster: Cluster, tmp_path: Path
) -> None:
    """The driver names it within seconds, and no actor runs on."""
    with losing(cluster, NODES[2], tmp_path / "model") as (url, killed):
        with pytest.raises(PeerFailedError) as raised:
            load(path=url)
        assert time.monotonic() - killed[0] < SOON_S
        assert raised.value.node == NODES[2]


@pytest.mark.slow
def test_loads_go_on_without_lost_nodes(
    load: Callable[..., Any], cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    for nodes, lost in ((NODES[1:], NODES[1]), (NODES, NODES[1])):
        if lost not in cluster.nodes:
            cluster.start(lost)
        options = {"budget": dict.fromkeys(nodes, PLENTY), "on_loss": "replan", "timeout": 10}
        with losing(cluster, lost, path) as (url, _), load(path=url, **options) as loaded:
            assert [*loaded.actors] == [node for node in nodes if node != lost]
            assert all(report.lost == (lost,) for report in loaded.reports.values())
            equal(held(loaded), plain(path))
            if nodes == NODES:
                cluster.kill(NODES[2])
                again = loaded.recover()
                assert [*again.actors] == [*again.reports] == [NODES[0]]
                equal(held(again), plain(path))


@pytest.mark.slow
def test_a_node_is_killed_after_a_load(load: Callable[..., Any], cluster: Cluster) -> None:
    """Calls that wait and later ones name it within seconds; other nodes answer on."""
    with load() as loaded:
        lost = loaded.actors[NODES[1]]
        waiting = lost.__ray_call__.remote(lambda rank: __import__("time").sleep(START_S))
        time.sleep(0.5)
        cluster.kill(NODES[1])
        began = time.monotonic()
        for answer in (waiting, lost.call.remote("copy")):
            with pytest.raises(PeerFailedError) as raised:
                loaded.get(answer)
            assert raised.value.node == NODES[1]
        assert time.monotonic() - began < SOON_S
        for node in (NODES[0], NODES[2]):
            assert loaded.get(loaded.actors[node].call.remote("copy"))


@pytest.mark.slow
def test_plans_that_do_not_fit(load: Callable[..., Any], tmp_path: Path) -> None:
    """The plan's numbers arrive as they are on one process."""
    budget = BUDGET | {NODES[1]: 5000}
    nodes = [streamload.Node(name, nbytes) for name, nbytes in budget.items()]
    with pytest.raises(PlanInfeasibleError) as expected:
        streamload.split(tmp_path / "model", nodes=nodes)
    with pytest.raises(PlanInfeasibleError) as raised:
        load(budget=budget)
    assert type(raised.value) is PlanInfeasibleError
    for fact in ("device", "needed_nbytes", "budget_nbytes", "limit", "largest"):
        assert getattr(raised.value, fact) == getattr(expected.value, fact)
    assert not any("offload" in fit for fit in raised.value.would_fit)


@pytest.mark.slow
def test_errors_name_the_node(load: Callable[..., Any], cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"127\.0\.0\.9: .*has 127\.0\.0\.2, .*ray start"):
        load(budget=BUDGET | {"127.0.0.9": PLENTY})
    with pytest.raises(NodeError, match=r"127\.0\.0\.4: .* 2 CPUs .* write num_cpus="):
        load(num_cpus=2, timeout=1)
    with pytest.raises(NodeError, match="ZeroDivisionError: ") as raised:
        load(lambda share: 1 // (1 - share.rank))
    assert raised.value.node == NODES[1]
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    for node in NODES[:2]:
        (cluster.folder / node / "model").symlink_to(tmp_path / "model")
    with pytest.raises(NodeError, match="no such file or folder") as raised:
        load(path="model")
    assert raised.value.node == NODES[2]


def test_without_ray_its_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "streamload.distributed.ray", raising=False)
    with pytest.raises(ImportError, match=r"^cannot .*; write pip install 'ray>=.* 'torch>=.*'$"):
        importlib.import_module("streamload.distributed.ray")
