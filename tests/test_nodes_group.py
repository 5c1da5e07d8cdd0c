"""Groups: how a process was launched, and the same body under every launcher and engine."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import needs
import pytest

from streamload.errors import NodeError, PeerFailedError
from streamload.nodes.group import Alone, Group
from streamload.nodes.launch import find_launch, node_name, open_group
from streamload.nodes.store import SharedStore, open_store

HERE = Path(__file__).parent
BODY = str(HERE / "nodes_body.py")
END_S = 120.0
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher says."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return clean | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Exit codes, and all that was said."""
    try:
        said = [process.communicate(timeout=END_S)[0] for process in processes]
        return [process.returncode for process in processes], "".join(said)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def started(command: list[str], **variables: str) -> subprocess.Popen[str]:
    """A process, its output in one pipe."""
    return subprocess.Popen(
        command,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def bare(size: int, *command: str) -> tuple[list[int], str]:
    """Ranks with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, started one by one."""
    needs.module("torch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = range(size)
    return ended([started([sys.executable, *command], RANK=str(r), **meeting) for r in ranks])


def torchrun(size: int, *command: str) -> tuple[list[int], str]:
    """Ranks started by torchrun, which keeps the store that they meet in."""
    needs.module("torch")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return ended([started([*launcher, f"--nproc-per-node={size}", *command])])


def mpirun(size: int, *command: str) -> tuple[list[int], str]:
    """Ranks started by Open MPI, as root too and on fewer cores, that may outlive each other."""
    needs.module("mpi4py")
    if shutil.which("mpirun") is None:
        needs.lacking("mpirun is not installed")
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--enable-recovery"]
    # containers forbid one process to read another's memory
    options = ["--mca", "btl_vader_single_copy_mechanism", "none", "-n", str(size)]
    return ended([started([*launcher, *options, sys.executable, *command])])


Launcher = Callable[..., tuple[list[int], str]]
ENGINES: dict[Launcher, str] = {bare: "torch", torchrun: "torch", mpirun: "mpi"}


@pytest.mark.parametrize(
    ("launcher", "size", "loss"),
    [
        pytest.param(bare, 2, "killed", id="environment-killed"),
        pytest.param(torchrun, 2, "away", id="torchrun-away"),
        pytest.param(mpirun, 3, "away", id="mpirun-away"),
        pytest.param(mpirun, 2, "none", id="mpirun-none"),
        *(
            pytest.param(
                launcher,
                size,
                loss,
                id=f"{launcher.__name__}-{loss}-{size}",
                marks=pytest.mark.slow,
            )
            for launcher, size, loss in [
                *((bare, 4, "away"), (bare, 3, "killed"), (bare, 2, "stopped"), (bare, 2, "none")),
                *((torchrun, 4, "away"), (torchrun, 2, "none")),
                *((mpirun, 4, "away"), (mpirun, 3, "killed"), (mpirun, 2, "stopped")),
            ]
        ),
    ],
)
def test_the_same_body_under_every_launcher(
    launcher: Launcher, size: int, loss: str, tmp_path: Path
) -> None:
    """Collectives, the store and the program's own groups work; the loss of a rank is an error.

    The body is nodes_body.py: every rank that is not lost holds all of it, and gets
    PeerFailedError within the timeout where one is lost.
    """
    codes, said = launcher(size, BODY, str(tmp_path), loss)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    lost = {"none": None, "stopped": 0}.get(loss, size - 1)
    whole = [rank for rank in range(size) if not (loss == "killed" and rank == lost)]
    assert [one["rank"] for one in found] == whole, said
    assert {(one["engine"], one["size"]) for one in found} == {(ENGINES[launcher], size)}
    raised = [one["rank"] for one in found if one["error"]]
    assert raised == ([] if lost is None else [rank for rank in range(size) if rank != lost]), said
    if loss == "none":
        assert set(codes) == {0}, said


def test_alone() -> None:
    """Without a launcher there is a group of one, whose collectives copy."""
    group = open_group() if find_launch() is None else Alone()
    assert isinstance(group, Group)
    assert (group.rank, group.size, group.engine) == (0, 1, "none")
    assert group.allgather(b"x") == [b"x"]
    assert group.broadcast(b"y") == b"y"
    out = bytearray(2)
    group.all_gather_into(memoryview(b"zz"), memoryview(out))
    assert out == b"zz"
    group.store.set("key", b"1")
    group.store.set("key", b"\xff")
    assert group.store.get("key") == b"\xff"
    assert group.store.get_many(["none", "key"]) == [None, b"\xff"]
    with pytest.raises(ValueError, match="root 1 of a group of 1"):
        group.broadcast(b"", root=1)
    with pytest.raises(ValueError, match="nothing to send"):
        group.broadcast(None)
    with pytest.raises(ValueError, match="do not make"):
        group.all_gather_into(memoryview(b"zz"), memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="writable"):
        group.all_gather_into(memoryview(b"zz"), memoryview(b"zz"))
    assert open_group(group) is group
    group.close()
    group.close()


def test_what_is_no_group_is_refused() -> None:
    """A group of a kind that is not known is a TypeError that names the kinds."""
    with pytest.raises(TypeError, match="str is not a group: give a streamload Group, a torch"):
        open_group("gloo")


RANKED = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
STEP = {
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "2", "SLURM_JOB_ID": "7"},
    **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "rack[02-04,7]-a,x9"},
}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),
        (RANKED, ("torch", 2, 4, 0, 2, "")),
        (RANKED | MEETING | OPEN_MPI | STEP, ("torch", 2, 4, 0, 2, "env://")),
        (OPEN_MPI, ("mpi", 1, 3, None, None, "")),
        (OPEN_MPI | MEETING | STEP, ("mpi", 1, 3, None, None, "env://")),
        ({"PMIX_RANK": "3"}, ("mpi", 3, None, None, None, "")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, ("mpi", 3, 4, None, None, "")),
        (STEP, ("torch", 5, 8, 1, None, "tcp://rack02-a:20114")),
        (STEP | {"PMIX_RANK": "5"}, ("mpi", 5, 8, 1, None, "tcp://rack02-a:20114")),
        (STEP | MEETING, ("torch", 5, 8, 1, None, "env://")),
    ],
)
def test_what_launchers_tell(environ: Mapping[str, str], expected: tuple[object, ...]) -> None:
    """RANK and WORLD_SIZE count first, then Open MPI, PMIx and PMI, then Slurm within a step."""
    launch = find_launch(environ)
    if launch is None:
        assert expected is None
        return
    told = (launch.engine_hint, launch.rank, launch.size, launch.local_rank, launch.local_size)
    assert (*told, launch.meeting) == expected
    assert launch.host == socket.gethostname()


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (RANKED | {"RANK": "4"}, "RANK and WORLD_SIZE say rank 4 of 4"),
        (RANKED | {"WORLD_SIZE": "many"}, "WORLD_SIZE is not a number: 'many'"),
    ],
)
def test_a_launcher_that_makes_no_sense(environ: Mapping[str, str], problem: str) -> None:
    """A rank outside of the group and variables that are no numbers are named."""
    with pytest.raises(NodeError, match=problem):
        find_launch(environ)


OPENED = "from streamload.nodes.launch import open_group; print(open_group(timeout=5).engine)"


@pytest.mark.parametrize(
    ("environ", "problems"),
    [
        (RANKED, ("launched by RANK and WORLD_SIZE", "no torch here: install torch")),
        (OPEN_MPI, ("launched by Open MPI", "no mpi4py here: install mpi4py and an MPI library")),
    ],
)
def test_no_engine_is_installed(
    environ: dict[str, str], problems: tuple[str, ...], tmp_path: Path
) -> None:
    """Under a launcher without an engine, one error says what to install."""
    for name in ("torch", "mpi4py"):  # found before those that are installed
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    path = os.pathsep.join([str(tmp_path), str(HERE.parent)])
    codes, said = ended([started([sys.executable, "-c", OPENED], **environ, PYTHONPATH=path)])
    assert codes == [1]
    assert "streamload.errors.NodeError" in said.splitlines()[-1]
    assert all(problem in said.splitlines()[-1] for problem in problems)


def test_an_mpi_that_is_not_the_launchers() -> None:
    """Where MPI counts fewer ranks than the launcher, it says so instead of loading alone."""
    needs.module("mpi4py")
    (code,), said = ended([started([sys.executable, "-c", OPENED], **OPEN_MPI)])
    assert code == 1
    assert "MPI counts 1 ranks and the launcher 3" in said.splitlines()[-1]
    assert "set MASTER_ADDR and MASTER_PORT" in said.splitlines()[-1]


def test_node_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is called as STREAMLOAD_NODE_ID says, else as its host."""
    monkeypatch.delenv("STREAMLOAD_NODE_ID", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("STREAMLOAD_NODE_ID", "board-7")
    assert node_name() == "board-7"


def test_a_rank_that_raises_waits_for_nobody(tmp_path: Path) -> None:
    """A program that ends with an exception ends, while other ranks of MPI wait for it."""
    program = tmp_path / "program.py"
    program.write_text(
        "from streamload.nodes.launch import open_group\n"
        "group = open_group(timeout=3)\n"
        "group.allgather(b'')\n"
        "if group.rank == 0: raise OSError('of the program')\n"
        "try: group.allgather(b'')\n"
        "except RuntimeError as error: print('PEER', error)\n"
    )
    _, said = mpirun(2, str(program))
    assert "of the program" in said
    assert "PEER" in said


class Rank(Alone):
    """One of two ranks in one process, whose broadcasts go through a queue."""

    def __init__(self, rank: int, wire: queue.SimpleQueue[bytes]) -> None:
        super().__init__()
        self.rank, self.size, self._wire = rank, 2, wire

    def broadcast(self, data: bytes | None, root: int = 0) -> bytes:
        """Put or get."""
        if data is not None:
            self._wire.put(data)
            return data
        return self._wire.get(timeout=10)


def two_stores(timeout: float = 10.0) -> tuple[SharedStore, SharedStore, int]:
    """The store as rank 0 has it and as rank 1 does, and its port."""
    wire: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    keeper = open_store(Rank(0, wire), timeout)
    said = wire.get()
    wire.put(said)
    return keeper, open_store(Rank(1, wire), timeout), json.loads(said)["port"]


def test_a_store_answers_those_who_know_its_key() -> None:
    """Strangers who say nothing, or the wrong key, get nothing and hold up nobody."""
    keeper, store, port = two_stores()
    with socket.create_connection(("127.0.0.1", port)):  # silent
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            Client(("127.0.0.1", port), authkey=b"wrong")
        store.set("key", bytes(range(256)))
        assert keeper.get("key") == bytes(range(256))
        keeper.set("other", b"")
        assert store.get_many(["other", "key", "none"]) == [b"", bytes(range(256)), None]
    store.close()
    store.close()
    keeper.close()
    keeper.close()
    with pytest.raises(PeerFailedError, match="node rank 0: its store does not answer"):
        store.get("key")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_rank_0_leaves_its_store_last() -> None:
    """Closing waits for the other ranks, who can read to their end."""
    keeper, store, _ = two_stores(60.0)
    keeper.set("last words", b"done")
    closing = threading.Thread(target=keeper.close)
    closing.start()
    assert store.get("last words") == b"done"
    assert closing.is_alive()
    store.close()
    closing.join()


def test_many_threads_share_a_store() -> None:
    """Answers go to the thread that asked."""
    keeper, store, _ = two_stores()
    names = [str(number) for number in range(200)]

    def round_trip(name: str) -> bytes | None:
        store.set(name, name.encode())
        return store.get(name)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(round_trip, names)) == [name.encode() for name in names]
    assert keeper.get_many(names) == [name.encode() for name in names]
    store.close()
    keeper.close()


def test_a_store_that_is_gone_is_an_error() -> None:
    """Without a keeper nobody can join, and the error lists the addresses that were tried."""
    wire: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"addresses": ["127.0.0.1", "::1"], "port": port, "key": "00"}
    wire.put(json.dumps(where).encode())
    with pytest.raises(PeerFailedError, match=r"cannot be reached \(127.0.0.1: .*; ::1: "):
        open_store(Rank(1, wire), 1.0)
