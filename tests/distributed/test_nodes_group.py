"""Groups: how a process was launched, and the same body under every launcher and engine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import needs
import pytest
from distributed_helpers import environment
from nodes_group_helpers import Rank

from streamload.distributed import store as stores
from streamload.distributed.group import Alone, ProcessGroup
from streamload.distributed.launch import find_launch, node_name, open_group
from streamload.distributed.store import SharedStore, open_store
from streamload.errors import NodeError, PeerFailedError

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
BODY = str(SUPPORT / "nodes_body.py")
END_S = 120.0


def ended(processes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    try:
        said = [process.communicate(timeout=END_S)[0] for process in processes]
        return [process.returncode for process in processes], "".join(said)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def started(command: list[str], **variables: str) -> subprocess.Popen[str]:
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
        pytest.param(torchrun, 2, "away", id="torchrun-away", marks=pytest.mark.slow),
        pytest.param(mpirun, 3, "away", id="mpirun-away", marks=pytest.mark.slow),
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
                *((bare, 4, "away"), (bare, 2, "killed"), (bare, 3, "killed")),
                *((bare, 2, "stopped"), (bare, 2, "none")),
                *((torchrun, 4, "away"), (torchrun, 2, "none")),
                *((mpirun, 4, "away"), (mpirun, 3, "killed"), (mpirun, 2, "stopped")),
            ]
        ),
    ],
)
def test_the_same_body_under_every_launcher(
    launcher: Launcher, size: int, loss: str, tmp_path: Path
) -> None:
    """Collectives, the store and the program's own groups work; the loss of a rank is an error."""
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
    assert isinstance(group, ProcessGroup)
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
    with pytest.raises(NodeError, match=problem):
        find_launch(environ)


OPENED = "from streamload.distributed.launch import open_group; print(open_group(timeout=5).engine)"


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
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    codes, said = ended([started([sys.executable, "-c", OPENED], **environ, PYTHONPATH=path)])
    assert codes == [1]
    assert "streamload.errors.NodeError" in said.splitlines()[-1]
    assert all(problem in said.splitlines()[-1] for problem in problems)


@pytest.mark.slow
def test_an_mpi_that_is_not_the_launchers() -> None:
    """Where MPI counts fewer ranks than the launcher, it says so instead of loading alone."""
    needs.module("mpi4py")
    (code,), said = ended([started([sys.executable, "-c", OPENED], **OPEN_MPI)])
    assert code == 1
    assert "MPI counts 1 ranks and the launcher 3" in said.splitlines()[-1]
    assert "set MASTER_ADDR and MASTER_PORT" in said.splitlines()[-1]


def test_node_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMLOAD_NODE_ID", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("STREAMLOAD_NODE_ID", "board-7")
    assert node_name() == "board-7"


def test_a_rank_that_raises_waits_for_nobody(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from streamload.distributed.launch import open_group\n"
        "group = open_group(timeout=3)\n"
        "group.allgather(b'')\n"
        "if group.rank == 0: raise OSError('of the program')\n"
        "try: group.allgather(b'')\n"
        "except RuntimeError as error: print('PEER', error)\n"
    )
    _, said = mpirun(2, str(program))
    assert "of the program" in said
    assert "PEER" in said


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
    keeper, store, _ = two_stores(60.0)
    keeper.set("last words", b"done")
    closing = threading.Thread(target=keeper.close)
    closing.start()
    assert store.get("last words") == b"done"
    assert closing.is_alive()
    store.close()
    closing.join()


def test_many_threads_share_a_store() -> None:
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
    wire: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"addresses": ["127.0.0.1", "::1"], "port": port, "key": "00"}
    wire.put(json.dumps(where).encode())
    with pytest.raises(PeerFailedError, match=r"cannot be reached \(127.0.0.1: .*; ::1: "):
        open_store(Rank(1, wire), 1.0)


KEEPER = """
import json, queue, resource, sys, threading
sys.path.insert(0, sys.argv[1])
from nodes_group_helpers import Rank
from streamload.distributed.store import open_store
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
wire = queue.SimpleQueue()
keeper = open_store(Rank(0, wire), 10.0)
print(wire.get().decode(), flush=True)
sys.stdin.read()
"""


def test_a_store_survives_strangers_that_take_all_descriptors() -> None:
    """Those that came first are dropped, and a rank that comes meanwhile is answered."""
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(SUPPORT)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    strangers = []
    try:
        said = keeper.stdout.readline()
        where = json.loads(said)
        for _ in range(200):
            strangers.append(socket.create_connection(("127.0.0.1", where["port"])))
        wire: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        wire.put(json.dumps(where | {"addresses": ["127.0.0.1"]}).encode())
        store = open_store(Rank(1, wire), 30.0)
        store.set("key", b"value")
        assert store.get("key") == b"value"
        store.close()
    finally:
        for stranger in strangers:
            stranger.close()
        keeper.communicate(timeout=END_S)


def is_hung_up(stranger: socket.socket) -> bool:
    """Whether the other end has closed a connection, within a time."""
    stranger.settimeout(5.0)
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1000):
            pass
    return True


def test_strangers_are_bounded() -> None:
    keeper, store, port = two_stores()
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)
        ]
        assert is_hung_up(strangers[0])
        strangers[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):  # has been asked for the key, and has time to answer
            while strangers[-1].recv(1000):
                pass
        store.set("key", b"value")
    store.close()
    keeper.close()


def test_a_proof_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_PROOF_S", 1.0)
    keeper, store, port = two_stores()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\0\0\0\x10")  # a proof of 16 bytes
        with contextlib.suppress(ConnectionError):
            for _ in range(15):
                time.sleep(0.3)
                stranger.sendall(b"x")
            pytest.fail("the store still listens")
    store.close()
    keeper.close()


def test_a_rank_takes_one_descriptor() -> None:
    """On either side: a group of 900 works under the usual limit of 1,024."""
    wire: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    keeper = open_store(Rank(0, wire), 10.0)
    said = wire.get()
    folder = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")
    before = len(list(folder.iterdir()))
    clients = []
    for _ in range(10):
        wire.put(said)
        clients.append(open_store(Rank(1, wire), 10.0))
    assert len(list(folder.iterdir())) == before + 2 * len(clients)
    for client in clients:
        client.close()
    keeper.close()


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this host on Linux")
def test_the_store_listens_on_the_interface_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    keeper, store, port = two_stores()
    store.set("key", b"value")
    assert keeper.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    store.close()
    keeper.close()


MEET = """
import json, os, sys
from streamload.distributed import launch
launch.engine_module("torch")
print("here", flush=True)
sys.stdin.readline()
os.write(2, b"mine\\n")
error = ["", ""]
try:
    group = launch.open_group(timeout=float(sys.argv[1]))
    group.close()
except RuntimeError as raised:
    error = [raised.node, raised.problem]
os.write(2, b"mine\\n")
print(json.dumps(error))
"""


class Meeting:
    """Ranks that come to a place one by one."""

    def __init__(
        self, size: int, timeout: float, named: Mapping[int, int] | None = None, **variables: str
    ) -> None:
        """Of so many ranks; of some processes, another rank than their number is named."""
        needs.module("torch")
        self.named = named or {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.timeout, self.variables = timeout, meeting | variables
        self.ranks: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Meeting:
        """Start all; none is there yet."""
        for rank in range(int(self.variables["WORLD_SIZE"])):
            self.ranks[rank] = subprocess.Popen(
                [sys.executable, "-c", MEET, str(self.timeout)],
                env=environment(**self.variables, RANK=str(self.named.get(rank, rank))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        for process in self.ranks.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks.values():
            process.kill()
            process.communicate()

    def come(self, *ranks: int) -> None:
        for rank in ranks:
            stdin = self.ranks[rank].stdin
            assert stdin is not None
            stdin.write("\n")
            stdin.flush()

    def said(self, rank: int) -> tuple[str, str]:
        """Node and problem of the error that a rank got, which says nothing else on stderr."""
        out, err = self.ranks[rank].communicate(timeout=END_S)
        assert err == "mine\nmine\n"
        node, problem = json.loads(out)
        return node, problem


@pytest.mark.slow
def test_who_did_not_come_is_named_by_all() -> None:
    """Not the rank that waits, too; and c10d tells the terminal nothing."""
    with Meeting(3, 2.0) as meeting:
        meeting.come(0, 2)
        expected = ("rank 1", "did not come in time (not here: 1 of 3)")
        assert [meeting.said(0), meeting.said(2)] == [expected] * 2


def test_a_rank_that_another_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    needs.module("torch")
    import torch.distributed as dist

    from streamload.distributed import torch as engine

    where = ("127.0.0.1", 0, None, True, timedelta(seconds=10))
    store = dist.TCPStore(*where, wait_for_workers=False)
    told = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (told | {"MASTER_PORT": str(store.port)}).items():
        monkeypatch.setenv(name, value)
    launch = find_launch()
    assert launch is not None
    for _ in range(2):  # one process may come again
        engine._claim(store, launch)
    assert store.add("streamload/0/1", 1) == 1
    monkeypatch.setattr(engine, "_ME", "another")
    said = f"node rank 1: at 127.0.0.1, port {store.port}, two processes say that they are rank 1"
    with pytest.raises(PeerFailedError, match=said):
        engine._claim(store, launch)
    waiting = dist.PrefixStore("streamload/0/1", store)
    with pytest.raises(PeerFailedError, match=said):
        engine._roll_call(waiting, "did not come", 0, 3, "", time.monotonic() + 60)


TWICE = """
import time
from streamload.distributed import launch, torch
group = torch.launched(launch.find_launch(), 30.0)
print("met", group.rank, flush=True)
time.sleep(1)
group.close()
"""


@pytest.mark.slow
def test_one_program_after_another_has_the_rank() -> None:
    """The store of torchrun's agent outlives the first one of them."""
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(TWICE)}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--no-python", "bash", "-c", f"{program} && {program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not done.returncode, done.stderr
    assert sorted(re.findall(r"met \d", done.stdout)) == ["met 0"] * 2 + ["met 1"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank(rank: int) -> None:
    """Both learn it at once, with where they meet, and so do those that wait with them."""
    # somebody has to keep the store, and one rank does not come: else two may meet before
    with Meeting(3, 60.0, {0: 1, 2: 0} if rank else {1: 0}) as meeting:
        began = time.monotonic()
        if rank:
            meeting.come(2)
        meeting.come(0, 1)
        found = [meeting.said(process) for process in (0, 1)]
        assert time.monotonic() - began < 60
    port = meeting.variables["MASTER_PORT"]
    for node, problem in found:
        assert node == f"rank {rank}"
        assert (
            f"at 127.0.0.1, port {port}, two processes say that they are rank {rank} of" in problem
        )
        assert "give each a number of its own (RANK and WORLD_SIZE)" in problem


@pytest.mark.slow
def test_a_port_that_another_program_has() -> None:
    """The error has the port, and the variables that choose it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with Meeting(2, 20.0) as meeting:
            pass
        meeting.variables["MASTER_PORT"] = port
        with meeting:
            meeting.come(0)
            node, problem = meeting.said(0)
    assert node == "rank 0"
    assert f"127.0.0.1, port {port} (MASTER_ADDR and MASTER_PORT): another process" in problem


def test_the_port_of_the_store_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    monkeypatch.setenv("STREAMLOAD_STORE_PORT", str(free))
    for _ in range(2):  # it can be had again at once
        keeper, store, port = two_stores()
        assert port == free
        store.set("key", b"value")
        assert keeper.get("key") == b"value"
        store.close()
        keeper.close()
    with socket.create_server(("", 0)) as taken:
        for wrong in (str(taken.getsockname()[1]), "65536", "-1", "http"):
            monkeypatch.setenv("STREAMLOAD_STORE_PORT", wrong)
            wire: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            for rank in (0, 1):
                with pytest.raises(NodeError, match=f"STREAMLOAD_STORE_PORT={wrong}: "):
                    open_store(Rank(rank, wire), 10.0)


@pytest.mark.slow
def test_rank_0_did_not_come() -> None:
    """It keeps the store that the others would meet in."""
    with Meeting(3, 2.0) as meeting:
        meeting.come(1, 2)
        for rank in (1, 2):
            node, problem = meeting.said(rank)
            assert node == "rank 0"
            assert "cannot be reached" in problem


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_while_others_are_still_to_come(victim: int) -> None:
    """It is named by those that waited with it, and by the one that comes later."""
    with Meeting(3, 5.0) as meeting:
        meeting.come(0, 1)
        time.sleep(2)  # they wait for each other
        meeting.ranks[victim].kill()
        meeting.ranks[victim].wait()
        meeting.come(2)
        found = [meeting.said(rank)[0] for rank in (0, 1, 2) if rank != victim]
        assert found == [f"rank {victim}"] * 2


@pytest.mark.slow
def test_an_interface_that_is_not_there() -> None:
    """Each rank says so, instead of taking another interface."""
    with Meeting(2, 2.0, GLOO_SOCKET_IFNAME="nowhere") as meeting:
        meeting.come(0, 1)
        for rank in (0, 1):
            assert "GLOO_SOCKET_IFNAME=nowhere: " in meeting.said(rank)[1]
