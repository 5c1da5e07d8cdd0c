"""Loads across hosts in network namespaces: what arrives, what is read, and what befalls them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import pytest
from bench_parts.section import forget
from boxes import Boxes
from cluster_parts.hosts import Cluster
from cluster_parts.launchers import Program
from cluster_parts.running import Running
from distributed_rank import FAILED, asking, holds, told
from make_checkpoint import LlamaShape, make_checkpoint, shape_of_size
from nodes_scenarios import Act, Aftermath, cluster, cut_link, lose_host, play, sigkill

import streamload
from streamload.core.dtypes import parse_dtype
from streamload.distributed.gather import BLOCK_NBYTES, UNDER_WAY
from streamload.distributed.tensor_split import split_tensors
from streamload.planning.partition import Node

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
EXAMPLES = ROOT / "scripts" / "examples"
ENGINES = {"env": "torch", "torchrun": "torch", "mpirun": "mpi"}
END_S = 240.0

#: Losses: how soon they must be known.
TIMEOUT_S = 10.0

#: What a rank may keep of a load that failed: code, and blocks whose exchange with a lost rank is
#: under way, which the engine lets go of by its own timeout. 30% of the checkpoint is more.
KEPT_NBYTES = 24_000_000 + UNDER_WAY * BLOCK_NBYTES

#: What a process takes that is not the budget's: the interpreter, torch or MPI, tinygrad, PoCL and
#: LLVM, staging, windows of mapped files.
BASE_NBYTES = 400_000_000

#: Read of each file from its begin, where a server may be slow to answer: the header is in there.
HEAD_NBYTES = 2**18
#: Read of each file by each rank before a load, and by rank 0 twice: 16 blocks, to be compared.
SAMPLED_NBYTES = 16 * 4096
#: Of each rank, on average: beats, messages, and what the kernel says of its memory, again and
#: again while others load. The smallest matrix of the checkpoint is larger.
BESIDE_NBYTES = 1_000_000


def launchers(*quick: str) -> list[Any]:
    """The launchers; those that are not quick enough for CI are marked."""
    return [
        launcher if launcher in quick else pytest.param(launcher, marks=pytest.mark.slow)
        for launcher in ENGINES
    ]


def need(launcher: str) -> None:
    needs.module("mpi4py" if launcher == "mpirun" else "torch")
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        needs.lacking("mpirun is not installed (Debian: openmpi-bin)")


def made(folder: Path, nbytes: int, shards: int = 3, **arguments: Any) -> Path:
    """A Llama-shaped checkpoint of bfloat16, of values that float16 does not hold too."""
    arguments = {"plant_extremes": True, **arguments}
    shape = shape_of_size(nbytes, parse_dtype("bfloat16"))
    make_checkpoint(folder, shape, shards=shards, **arguments)
    return folder


def loaded(
    hosts: Cluster, launcher: str, out: Path, path: object, /, per_host: int = 1, **asked: Any
) -> list[dict[str, Any]]:
    running = Running(hosts, launcher, asking(out, path, **asked), per_host=per_host)
    endings = running.wait(END_S)
    complaints = [ending.stderr for ending in endings if ending.returncode]
    assert not complaints, complaints
    found = told(out)
    assert [said["rank"] for said in found] == list(range(len(hosts.hosts) * per_host))
    assert [said["message"] for said in found if said["error"]] == []
    return found


def files(path: Path) -> tuple[int, int]:
    headers = [header.data_start for header in streamload.open_checkpoint(path).shards]
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return total - sum(headers), sum(headers)


# --- what arrives --------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", launchers("mpirun"))
def test_the_same_body_under_every_launcher(launcher: str, tmp_path: Path) -> None:
    """Two hosts load a checkpoint from a server: bit for bit, each byte of it sent once."""
    need(launcher)
    needs.module("httpx2")
    path = made(tmp_path / "model", 8_000_000)
    with cluster(2, storage=path) as hosts:
        found = loaded(hosts, launcher, tmp_path / "out", hosts.storage_url, split="layers")
        holds(found, path, "layers", ENGINES[launcher])
        assert {said["host"] for said in found} == {"node-0", "node-1"}
        assert [node["node"] for node in found[0]["nodes"]] == [said["host"] for said in found]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["env", "mpirun"])
def test_two_ranks_on_each_host(launcher: str, tmp_path: Path) -> None:
    """Ranks that share a host are nodes of their own, and load as others do."""
    need(launcher)
    path = made(tmp_path / "model", 8_000_000)
    with cluster(2) as hosts:
        found = loaded(hosts, launcher, tmp_path / "out", path, per_host=2)
    holds(found, path, "layers", ENGINES[launcher])
    nodes = [node["node"] for node in found[0]["nodes"]]
    assert nodes == ["node-0/0", "node-0/1", "node-1/0", "node-1/1"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.2 GB in four files: more than any of the hosts may hold."""
    return made(tmp_path_factory.mktemp("large") / "model", 1_200_000_000, shards=4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["env", "mpirun"])
@pytest.mark.parametrize(("count", "budget"), [(4, 400_000_000), (14, 150_000_000)])
def test_hosts_of_their_budget_load_what_none_of_them_could(
    count: int, budget: int, launcher: str, large: Path, cgroup: Boxes, tmp_path: Path
) -> None:
    """OpenCL devices, bit for bit; the files are read once, and nobody is killed for memory."""
    need(launcher)
    needs.device("CL")
    small = made(tmp_path / "small", 500_000)
    forget(large)
    with cluster(count, memory_nbytes=budget + BASE_NBYTES) as hosts:
        found = loaded(
            hosts,
            launcher,
            tmp_path / "out",
            large,
            warm=str(small),
            reader="pread",
            device="CL",
            budget=budget,
        )
        boxes = [host.box for host in hosts.hosts]
        assert [box is not None and box.oom_killed for box in boxes] == [False] * count
    holds(found, large, "layers", ENGINES[launcher])
    assert all(said["resident_nbytes"] <= budget for said in found)
    tensors_nbytes, headers_nbytes = files(large)
    read = sum(said["rchar"] for said in found)
    sampled = 4 * (count + 1) * SAMPLED_NBYTES
    least = tensors_nbytes + headers_nbytes + sampled
    assert least <= read <= least + count * BESIDE_NBYTES
    assert sum(said["read_nbytes"] for said in found) == tensors_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["env", "mpirun"])
@pytest.mark.parametrize("count", [4, 14])
@pytest.mark.parametrize("split", ["layers", "replicate"])
def test_storage_sends_the_model_once(
    split: str, count: int, launcher: str, tmp_path: Path
) -> None:
    need(launcher)
    needs.module("httpx2")
    path = made(tmp_path / "model", 50_000_000, shards=4)
    with cluster(count, storage=path) as hosts:
        # compared with the folder: what is read for that is not of the load
        asked = {"split": split, "reference": str(path)}
        found = loaded(hosts, launcher, tmp_path / "out", hosts.storage_url, **asked)
        served = hosts.served()
    holds(found, path, split, ENGINES[launcher])
    tensors_nbytes, _ = files(path)
    for header in streamload.open_checkpoint(path).shards:
        ranges = served.ranges["/" + header.path.name]
        assert ranges.count((0, HEAD_NBYTES)) == 1
        ranges.remove((0, HEAD_NBYTES))
        ends = sorted(ranges)
        assert ends[0][0] == header.data_start
        assert [start for start, _ in ends[1:]] == [stop for _, stop in ends[:-1]]
        assert ends[-1][1] == header.file_nbytes
    others = sum(
        stop - start
        for name, ranges in served.ranges.items()
        if name.endswith(".json")
        for start, stop in ranges
    )
    assert served.nbytes == tensors_nbytes + 4 * HEAD_NBYTES + others


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["env", "mpirun"])
@pytest.mark.parametrize("split", ["2x2", "tensor"])
def test_slices_on_hosts_of_their_budget(
    split: str, launcher: str, cgroup: Boxes, tmp_path: Path
) -> None:
    """Each rank reads its slices as planned, from files and from storage, which sends all once."""
    need(launcher)
    needs.module("httpx2")
    path, budget = tmp_path / "model", 100_000_000
    make_checkpoint(path, LlamaShape(1024, 1024, 4096, 8, 8, 4), shards=2, dtype="float16")
    make_checkpoint(tmp_path / "small", LlamaShape(64, 64, 128, 2, 8, 4), dtype="float16")
    nodes = [Node(f"node-{n}", budget) for n in range(4)]
    planned = [
        share.source_nbytes for share in split_tensors(path, nodes=nodes, split=split).shares
    ]
    tensors_nbytes, _ = files(path)
    asked: dict[str, Any] = {"split": split, "budget": budget, "reference": str(path)}
    asked["warm"] = str(tmp_path / "small")
    with cluster(4, storage=path, memory_nbytes=budget + BASE_NBYTES) as hosts:
        found = loaded(hosts, launcher, tmp_path / "out", path, reader="pread", **asked)
        before = hosts.served().nbytes
        there = loaded(hosts, launcher, tmp_path / "there", hosts.storage_url, **asked)
        served = hosts.served().nbytes - before
        boxes = [host.box for host in hosts.hosts]
        assert [box is not None and box.oom_killed for box in boxes] == [False] * 4
    assert [said["differ"] for said in (*found, *there)] == [[]] * 8
    assert [said["read_nbytes"] for said in found] == planned
    assert [said["resident_nbytes"] for said in (*found, *there)] == planned * 2
    for said, nbytes in zip(found, planned, strict=True):
        assert nbytes <= said["rchar"] <= nbytes + 8 * SAMPLED_NBYTES + BESIDE_NBYTES
        assert said["grown_nbytes"] <= nbytes + KEPT_NBYTES
    assert sum(node["read_nbytes"] for node in there[0]["nodes"]) == tensors_nbytes
    assert served <= tensors_nbytes + 2 * HEAD_NBYTES + 2**16


@pytest.mark.slow
def test_a_plan_that_says_yes_holds_weights_and_cache(cgroup: Boxes, tmp_path: Path) -> None:
    """With the cache of its own layers beside its weights each host stays within its box."""
    need("mpirun")
    path = made(tmp_path / "model", 600_000_000)
    config = json.loads((path / "config.json").read_text())
    head_nbytes = config["hidden_size"] // config["num_attention_heads"] * 2
    context, batch = 4096, 8
    # of a layer, in float16: keys and values
    cache_nbytes = 2 * batch * context * config["num_key_value_heads"] * head_nbytes
    everything = cache_nbytes * config["num_hidden_layers"] + files(path)[0]
    base = 250_000_000
    asked = {"context": context, "batch": batch, "cache_nbytes": cache_nbytes}
    budget = everything // 3 + 2 * cache_nbytes
    forget(path)
    with cluster(3, memory_nbytes=budget + base) as hosts:
        found = loaded(hosts, "mpirun", tmp_path / "out", path, budget=budget, **asked)
        assert not any(host.box and host.box.oom_killed for host in hosts.hosts)
        argv = asking(tmp_path / "no", path, budget=everything // 3 - cache_nbytes, **asked)
        Running(hosts, "mpirun", argv).wait(END_S)
    holds(found, path, "layers", "mpi")
    taken = [said["resident_nbytes"] + said["cache_nbytes"] for said in found]
    assert sum(taken) >= everything
    assert all(nbytes <= budget for nbytes in taken)
    assert files(path)[0] // 3 < everything // 3 - cache_nbytes
    assert {said["error"] for said in told(tmp_path / "no")} == {"PlanInfeasibleError"}


# --- losses --------------------------------------------------------------------------------------

#: What happens at 30% of a load, to which host, and what its peers call it.
LOSSES: dict[str, tuple[Callable[[int], Act], int]] = {
    "a rank is killed": (sigkill, 2),
    "a host is lost": (lose_host, 2),
    "a link goes down": (cut_link, 2),
    "rank 0 is killed": (sigkill, 0),
    "the host of rank 0 is lost": (lose_host, 0),
    "the link of rank 0 goes down": (cut_link, 0),
}


def knows(said: Mapping[str, Any], node: str, after: Aftermath) -> None:
    """Assert that a rank raised in time that a node is lost, says what it has, and kept none."""
    assert said["error"] == "PeerFailedError", said
    assert said["node"] == node
    assert said["raised_s"] - after.happened_s <= TIMEOUT_S
    assert said["state"] is not None
    assert sum(said["state"].values()) > 0
    assert said["grown_nbytes"] <= KEPT_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("split", ["layers", "replicate"])
@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_at_30_percent(what: str, split: str, tmp_path: Path) -> None:
    """Everyone else raises PeerFailedError that names the node, within the timeout."""
    need("env")
    needs.module("httpx2")
    act, lost = LOSSES[what]
    path, small = made(tmp_path / "model", 160_000_000), made(tmp_path / "small", 500_000)
    out = tmp_path / "out"
    with cluster(4, storage=path, storage_link="100mbit") as hosts:
        asked = {"split": split, "timeout": TIMEOUT_S, "warm": str(small)}
        argv = asking(out, hosts.storage_url, **asked)
        after = play(hosts, argv, act(lost), when="at 30%", timeout_s=END_S)
    found = {said["rank"]: said for said in told(out)}
    assert set(found) == set(range(4)) - (set() if act is cut_link else {lost})
    for rank, said in found.items():
        if rank != lost:
            knows(said, f"node-{lost}", after)
    if act is cut_link and lost != 0:
        knows(found[lost], "node-0", after)
    elif act is cut_link:  # it hears of nobody
        knows(found[0], found[0]["node"], after)
        assert found[0]["node"] in ("node-1", "node-2", "node-3")
    codes = {ending.host: ending.returncode for ending in after.endings}
    assert codes == {rank: FAILED if rank in found else -signal.SIGKILL for rank in range(4)}


@pytest.mark.slow
def test_a_rank_of_mpi_is_killed(tmp_path: Path) -> None:
    """Where mpirun lets the others go on, they raise PeerFailedError that names the node."""
    need("mpirun")
    needs.module("httpx2")
    path, small = made(tmp_path / "model", 160_000_000), made(tmp_path / "small", 500_000)
    out = tmp_path / "out"
    with cluster(4, storage=path, storage_link="100mbit") as hosts:
        argv = asking(out, hosts.storage_url, timeout=TIMEOUT_S, warm=str(small))
        after = play(
            hosts,
            argv,
            sigkill(2),
            when="at 30%",
            launcher="mpirun",
            env={"OMPI_MCA_orte_enable_recovery": "1"},
            timeout_s=END_S,
        )
    found = told(out)
    assert [said["rank"] for said in found] == [0, 1, 3]
    for said in found:
        knows(said, "node-2", after)


# --- nodes that differ ---------------------------------------------------------------------------


def refused(hosts: Cluster, out: Path, path: object, /, **asked: Any) -> list[dict[str, Any]]:
    """Load where it cannot be: all ranks raise, and none had begun."""
    endings = Running(hosts, "env", asking(out, path, **asked)).wait(END_S)
    assert [ending.returncode for ending in endings] == [FAILED] * len(endings), endings
    found = told(out)
    assert [said["state"] for said in found] == [None] * len(endings)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("split", ["layers", "replicate"])
def test_a_node_with_another_file(split: str, tmp_path: Path) -> None:
    need("env")
    path = made(tmp_path / "model", 8_000_000)
    other = made(tmp_path / "other", 8_000_000, seed=1)
    assert files(path) == files(other)
    with cluster(3) as hosts:
        odd = {"node-1": {"path": str(other)}}
        found = refused(hosts, tmp_path / "out", path, split=split, hosts=odd)
    assert [said["error"] for said in found] == ["NodeError", "CheckpointError", "NodeError"]
    assert all("is not the file that rank 0 has" in said["message"] for said in found)
    assert [found[0]["node"], found[2]["node"]] == ["node-1"] * 2
    assert str(other) in found[1]["message"]


@pytest.mark.slow
def test_a_node_of_another_version(tmp_path: Path) -> None:
    """Another version of the protocol ends it for all, naming the node and both versions."""
    need("env")
    path = made(tmp_path / "model", 500_000)
    with cluster(3, storage=path) as hosts:
        odd = {"node-1": {"protocol": 1000}}
        found = refused(hosts, tmp_path / "out", hosts.storage_url, hosts=odd)
        assert hosts.served().nbytes == 0
    assert {said["error"] for said in found} == {"NodeError"}
    assert {said["node"] for said in found} == {"node-1 (rank 1)"}
    assert all("speaks version 1000" in said["message"] for said in found)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["layers", "replicate"])
def test_a_node_of_another_dtype_support(split: str, tmp_path: Path) -> None:
    """A device that computes in bfloat16 among others that do not ends it, if no dtype is asked."""
    need("env")
    needs.module("httpx2")
    path = made(tmp_path / "model", 8_000_000)
    odd = {"node-1": {"options": {"device": "cpu"}}}
    with cluster(3, storage=path) as hosts:
        asked = {"split": split, "hosts": odd}
        found = refused(hosts, tmp_path / "out", hosts.storage_url, dtype=None, **asked)
        sent = [r for name, r in hosts.served().ranges.items() if name.endswith(".safetensors")]
        assert sent == [[(0, HEAD_NBYTES)]] * 3
        loaded(hosts, "env", tmp_path / "yes", path, **asked)
    assert {said["error"] for said in found} == {"PlanMismatchError"}
    assert {said["node"] for said in found} == {"node-1"}
    assert all("computes in bfloat16" in said["message"] for said in found)


# --- the command and the example -----------------------------------------------------------------


def commanded(hosts: Cluster, launcher: str, *options: str) -> list[Program]:
    assert hosts.storage_url is not None
    command = [sys.executable, "-m", "streamload", "load", hosts.storage_url, "--device", "host"]
    return Running(hosts, launcher, [*command, "--dtype", "float16", *options]).wait(END_S)


@pytest.mark.slow
def test_the_command_loads_over_nodes(tmp_path: Path) -> None:
    """Rank 0 reports for all, as a table or as JSON; the others say nothing."""
    need("env")
    needs.module("httpx2")
    path = made(tmp_path / "model", 20_000_000, plant_extremes=False)
    with cluster(2, storage=path) as hosts:
        table = commanded(hosts, "env", "--budget", "15MB")
        as_json = commanded(hosts, "env", "--budget", "15MB", "--json", "--verify")
        before = hosts.served().nbytes
        small = commanded(hosts, "env", "--budget", "5MB")
        assert hosts.served().nbytes - before < files(path)[0] / 10
    assert [ending.returncode for ending in [*table, *as_json, *small]] == [0, 0, 0, 0, 3, 3]
    for said in (table, as_json):
        complaints = [line for line in said[1].stderr.splitlines() if "[c10d]" not in line]
        assert (said[1].stdout, complaints) == ("", [])  # torch has its own about names of hosts
    lines = table[0].stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("node ")] == ["node-0", "node-1"]
    report = json.loads(as_json[0].stdout)
    assert [node["node"] for node in report["nodes"]] == ["node-0", "node-1"]
    assert sum(node["read_nbytes"] for node in report["nodes"]) == files(path)[0]
    assert report["verified"] is True
    for ending in small:
        assert ending.stdout == ""
        (line,) = (line for line in ending.stderr.splitlines() if "[c10d]" not in line)
        assert line.startswith("streamload: ") and "5.00 MB" in line


@pytest.mark.slow
def test_the_command_under_mpirun(tmp_path: Path) -> None:
    """The same over MPI: one table for all."""
    need("mpirun")
    needs.module("httpx2")
    path = made(tmp_path / "model", 20_000_000, plant_extremes=False)
    with cluster(2, storage=path) as hosts:
        (ending,) = commanded(hosts, "mpirun", "--budget", "15MB", "--split", "replicate")
        assert ending.returncode == 3
        (ending,) = commanded(hosts, "mpirun", "--budget", "25MB", "--split", "replicate")
    assert ending.returncode == 0, ending.stderr
    nodes = [line for line in ending.stdout.splitlines() if line.startswith("node ")]
    assert [line.split()[1] for line in nodes] == ["node-0", "node-1"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "torchrun-static"])
def test_a_llama_in_two_parts_gives_the_same_logits(launcher: str, tmp_path: Path) -> None:
    """The pipeline example on two hosts computes, bit for bit, what one process does."""
    torch = needs.module("torch")
    path = made(tmp_path / "model", 8_000_000, plant_extremes=False)
    example = [sys.executable, str(EXAMPLES / "pipeline.py"), str(path)]
    two, one = tmp_path / "two", tmp_path / "one"
    with cluster(2) as hosts:
        # in float32 the whole is 16 MB: neither host may hold it
        argv = [*example, "--budget", "12MB", "--logits", str(two)]
        endings = Running(hosts, launcher, argv).wait(END_S)
        assert not any(ending.returncode for ending in endings), endings
        argv = [*example, "--budget", "17MB", "--logits", str(one)]
        said = hosts.exec(0, argv, stdout=subprocess.PIPE, text=True).communicate(timeout=END_S)[0]
    tokens = [line for e in endings for line in e.stdout.splitlines() if "next token: " in line]
    assert len(tokens) == 1
    assert tokens[0].endswith(said.splitlines()[-1])
    logits = [torch.load(file) for file in (one, two)]
    assert logits[0].numel() > 1
    assert torch.equal(*logits)
