"""Hosts in network namespaces, and ``scripts/cluster``."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import needs
import psutil
import pytest
from boxes import Boxes
from cluster_parts.hosts import Cluster
from cluster_parts.keeper import inside
from cluster_parts.main import main
from cluster_parts.running import Running
from nodes_scenarios import cluster, cut_link, lose_host, play, sigkill

ROOT = Path(__file__).parents[2]
INTERFACES = Path("/sys/class/net")

# The host of rank 0 waits for a line of another, and says how it ends: "closed", or "silence" where
# nothing comes. The other says when it is connected, and then sends when a file appears.
TALK = """
import os, pathlib, socket, sys, time
port, go = 7000, pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    server = socket.create_server(("", port))
    connection, _ = server.accept()
    try:
        while not go.exists():
            time.sleep(0.01)
        connection.settimeout(float(sys.argv[2]))
        print(connection.recv(100).decode() or "closed")
    except TimeoutError:
        print("silence")
elif os.environ["RANK"] == "1":
    while True:
        try:
            connection = socket.create_connection(("node-0", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    print("connected", flush=True)
    while not go.exists():
        time.sleep(0.01)
    connection.sendall(b"hello")
    time.sleep(60)
"""


def _lines(made: Cluster, host: int, *argv: str) -> list[str]:
    process = made.exec(host, argv, stdout=subprocess.PIPE, text=True)
    said: str = process.communicate()[0]
    assert not process.returncode
    return said.splitlines()


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _lives(process: psutil.Process) -> bool:
    """Whether a process is more than an entry that nobody has collected yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _boxes_of(pid: int) -> list[Path]:
    """The memory cgroups that a process made."""
    return list(Path("/sys/fs/cgroup").rglob(f"streamload-{pid}-*"))


def _command(count: int, *options: str, command: Sequence[str]) -> list[str]:
    script = str(ROOT / "scripts/cluster")
    return [sys.executable, script, str(count), *options, "--", *command]


def _run(argv: Sequence[str]) -> Any:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


# --- hosts ---------------------------------------------------------------------------------------


def test_hosts_know_themselves_and_each_other_by_name() -> None:
    """Each host has its own name, address and hosts file; the folder stays, the machine's is not.

    Nor are the machine's interfaces touched, or does any host see them.
    """
    before, name = sorted(os.listdir(INTERFACES)), os.uname().nodename
    with cluster(3) as made:
        assert sorted(os.listdir(INTERFACES)) == before
        assert os.uname().nodename == name
        assert [host.name for host in made.hosts] == ["node-0", "node-1", "node-2"]
        for index, host in enumerate(made.hosts):
            assert _lines(made, index, "hostname") == [host.name]
            assert _lines(made, index, "pwd") == [os.getcwd()]
            for other in made.hosts:
                (found,) = _lines(made, index, "getent", "ahostsv4", other.name)[:1]
                assert found.split()[0] == other.address
            shown = _lines(made, index, "ip", "-brief", "addr")
            assert [line.split()[0].partition("@")[0] for line in shown] == ["lo", "eth0"]
            assert f" {host.address}/" in shown[1]


def test_a_debian_host_finds_itself_where_no_other_can() -> None:
    """With Debian's names a host is at 127.0.1.1 for itself, and at its address for the others."""
    with cluster(2, debian_names=True) as made:
        found = {
            (index, name): _lines(made, index, "getent", "ahostsv4", name)[0].split()[0]
            for index in range(2)
            for name in ("node-0", "node-1")
        }
    addresses = [host.address for host in made.hosts]
    assert found[0, "node-0"] == found[1, "node-1"] == "127.0.1.1"
    assert [found[1, "node-0"], found[0, "node-1"]] == addresses


def test_links_have_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    """Either end of a host's cable lets the rate through; the storage's has its own."""
    with cluster(2, link="100mbit", storage=tmp_path, storage_link="1gbit") as made:
        for index in range(2):
            (line,) = _lines(made, index, "tc", "qdisc", "show", "dev", "eth0")
            assert re.search(r"\btbf\b.* rate 100Mbit\b", line)
        within = ["nsenter", "--target", str(made.switch), "--net", "tc", "qdisc", "show"]
        ports = _run(within).stdout
    found = re.findall(r"tbf .*dev (port\d) .*rate (\w+)", ports)
    assert found == [("port0", "100Mbit"), ("port1", "100Mbit"), ("port2", "1Gbit")]


def test_without_a_rate_links_are_as_fast_as_they_are() -> None:
    with cluster(1) as made:
        assert "tbf" not in "".join(_lines(made, 0, "tc", "qdisc", "show"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "from 1 to 250 hosts, not 0"),
        ({"count": 1, "link": "fast"}, "a rate is like 1gbit or 100mbit, not 'fast'"),
        ({"count": 1, "link": "0mbit"}, "a rate is like"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Counts and rates that make no sense are named before anything is made."""
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)


def test_a_program_is_what_is_started_and_can_be_killed() -> None:
    with cluster(1) as made:
        assert made.exec(0, ["sh", "-c", "exit 3"]).wait() == 3
        process = made.exec(0, ["sleep", "60"])
        while made.processes(0) != [process.pid] or psutil.Process(process.pid).name() != "sleep":
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_host_has_the_memory_that_it_is_given(cgroup: Boxes) -> None:
    take = "import sys; print(len(b'1' * int(sys.argv[1])))"
    with cluster(2, memory_nbytes=100_000_000) as made:
        fits = made.exec(0, [sys.executable, "-c", take, "50000000"], stdout=subprocess.DEVNULL)
        more = made.exec(1, [sys.executable, "-c", take, "200000000"], stdout=subprocess.DEVNULL)
        assert (fits.wait(), more.wait()) == (0, -signal.SIGKILL)
        boxes = [host.box for host in made.hosts]
        assert [box is not None and box.oom_killed for box in boxes] == [False, True]
        assert boxes[0] and (boxes[0].peak_nbytes is None or boxes[0].peak_nbytes > 50_000_000)
    assert not _boxes_of(os.getpid())


def test_the_storage_counts_what_it_sends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    read = "import os, urllib.request as r; r.urlopen(os.environ['STREAMLOAD_URL'] + 'file').read()"
    with cluster(2, storage=tmp_path) as made:
        assert made.storage_url == "http://storage:8000/"
        for index in range(2):
            _lines(made, index, sys.executable, "-S", "-c", read)
        assert made.served().nbytes == 2000
        assert made.served().requests == 2
    with cluster(1, storage=tmp_path / "file") as made:
        assert made.storage_url == "http://storage:8000/file"


def test_two_clusters_stand_side_by_side() -> None:
    with ExitStack() as one, cluster(2) as other:
        first = one.enter_context(cluster(2))
        assert first.hosts[0].address == other.hosts[0].address
        assert first.hosts[0].namespace != other.hosts[0].namespace
        one.close()
        assert _lines(other, 1, "hostname") == ["node-1"]


def test_nothing_stays_of_a_cluster_that_is_left_by_an_error() -> None:
    before = set(_descendants(os.getpid()))
    with pytest.raises(ZeroDivisionError), cluster(2, memory_nbytes=10**8) as made:
        process = made.exec(1, ["sh", "-c", "sleep 60 & sleep 60"])
        while len(made.processes(1)) < 3:
            time.sleep(0.01)
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert not list(inside({host.namespace for host in made.hosts}))
    assert not set(_descendants(os.getpid())) - before
    assert not _boxes_of(os.getpid())


def test_nothing_stays_of_a_cluster_that_fails_half_way(tmp_path: Path) -> None:
    before = set(_descendants(os.getpid()))
    with (
        pytest.raises(OSError, match="nowhere cannot be served"),
        cluster(2, memory_nbytes=10**8, storage=tmp_path / "nowhere"),
    ):
        pass
    assert not set(_descendants(os.getpid())) - before
    assert not _boxes_of(os.getpid())


# --- what befalls them ---------------------------------------------------------------------------


def _talk(go: Path, silence_s: float) -> list[str]:
    return [sys.executable, "-S", "-c", TALK, str(go), str(silence_s)]


def test_the_peers_of_a_killed_program_are_told(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def act(made: Cluster, running: Running) -> None:
        sigkill(1)(made, running)
        running.programs[1].process.wait()
        go.touch()

    with cluster(3) as made:
        after = play(made, _talk(go, 60), act, when="connected", on=1)
    assert [ending.returncode for ending in after.endings] == [0, -signal.SIGKILL, 0]
    assert after.endings[0].stdout == "closed\n"
    assert after.others(1) == [after.endings[0], after.endings[2]]
    assert after.seconds(after.endings[0]) > after.seconds(after.endings[1]) > 0


def test_the_peers_of_a_lost_host_hear_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def act(made: Cluster, running: Running) -> None:
        lose_host(1)(made, running)
        assert not made.processes(1)
        go.touch()

    with cluster(2) as made:
        after = play(made, _talk(go, 0.3), act, when="connected")
    assert [ending.returncode for ending in after.endings] == [0, -signal.SIGKILL]
    assert after.endings[0].stdout == "silence\n"


def test_a_link_that_comes_back_carries_what_was_sent(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def act(made: Cluster, running: Running) -> None:
        cut_link(1)(made, running)
        go.touch()
        (line,) = _lines(made, 1, "ip", "-brief", "link", "show", "dev", "eth0")
        assert "NO-CARRIER" in line
        made.link_up(1)

    with cluster(2) as made:
        running = _talk(go, 60)
        # rank 1 stays until it is ended
        script = running[3].replace("time.sleep(60)", "connection.recv(1)")
        after = play(made, [*running[:3], script, *running[4:]], act, when="connected")
    assert [ending.returncode for ending in after.endings] == [0, 0]
    assert after.endings[0].stdout == "hello\n"


def test_a_moment_that_does_not_come_is_an_error() -> None:
    """Where nobody says when, the test that waits for it fails with what was said instead."""
    with cluster(1) as made, pytest.raises(AssertionError, match=r"nobody said 'half'.*whole"):
        play(made, ["echo", "whole"], sigkill(0), when="half")


# --- the command ---------------------------------------------------------------------------------


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    assert "scripts/cluster N [OPTION ...] -- COMMAND" in capsys.readouterr().out


def test_lines_are_named_and_the_first_failure_is_the_exit_code() -> None:
    """Each line has its host's name before it, on its own stream; the code is the first failure's.

    The variables are those that torch.distributed reads.
    """
    with cluster(1):
        pass
    say = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR"; echo oh >&2; '
    script = say + '[ "$RANK" != 2 ] || exit 7; [ "$RANK" != 3 ] || { sleep 0.5; kill -9 $$; }'
    done = _run(_command(2, "--per-host", "2", command=["sh", "-c", script]))
    assert done.returncode == 7, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"node-{rank // 2} | {rank} {rank % 2} 4 node-0" for rank in range(4)
    ]
    assert done.stderr.splitlines().count("node-1 | oh") == 2
    ended = [line for line in done.stderr.splitlines() if "ended with" in line]
    assert [line.rpartition(" after")[0] for line in ended] == [
        "cluster: node-1 ended with 7",
        "cluster: node-1 ended with -9",
    ]


def test_a_host_can_be_killed_from_the_command_line() -> None:
    with cluster(1):
        pass
    script = '[ "$RANK" = 0 ] || sleep 60'
    done = _run(_command(2, "--kill", "node-1@0.2", command=["sh", "-c", script]))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "node-1 ended with -9" in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["2"], "no command: it follows --"),
        (["2", "--kill", "later", "--", "true"], "is like node-2@5.5, not 'later'"),
        (["2", "--memory", "3 apples", "--", "true"], "apples"),
        (["2", "--kill", "node-2@1", "--", "true"], "there are hosts node-0 to node-1"),
        (["2", "--storage", "nowhere", "--", "true"], "nowhere does not exist"),
    ],
)
def test_a_wrong_command_line_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_after_a_signal(number: signal.Signals, cgroup: Boxes) -> None:
    """After Ctrl-C, SIGTERM, and even SIGKILL, all that was made and started is gone."""
    with cluster(1):
        pass
    script = "import subprocess as s; p = s.Popen(['sleep', '60']); print('started'); p.wait()"
    command = [sys.executable, "-S", "-c", script]
    argv = _command(2, "--memory", "50MB", command=command)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _ in range(2):
            assert process.stdout.readline().endswith(" | started\n")
        started = _descendants(process.pid)
        assert len(_boxes_of(process.pid)) == 2
        # the keeper, the switch, and on each host the holder, the program and what it runs
        assert len(started) >= 2 + 2 * 3
        process.send_signal(number)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected
    deadline = time.monotonic() + 10
    while any(map(_lives, started)) or _boxes_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("torchrun-static", marks=pytest.mark.slow),
        "mpirun",
    ],
)
def test_launchers_start_each_rank_on_its_host(launcher: str) -> None:
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        needs.lacking("mpirun is not installed (Debian: openmpi-bin)")
    if launcher != "mpirun":
        needs.module("torch")
    rank = "${RANK:-$OMPI_COMM_WORLD_RANK}"
    script = f'echo "$(hostname) {rank}"; echo "oh {rank}" >&2'
    with cluster(3) as made:
        seen: list[tuple[int, str, str]] = []
        running = Running(
            made, launcher, ["sh", "-c", script], on_line=lambda *line: seen.append(line)
        )
        endings = running.wait(60)
    assert [ending.returncode for ending in endings] == [0] * len(endings)
    said = sorted(seen)
    for host in range(3):
        assert any(s == (host, "stdout", f"node-{host} {host}") for s in said)
        assert any(s[:2] == (host, "stderr") and s[2].startswith("oh ") for s in said)
