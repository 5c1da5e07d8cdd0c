"""Groups across hosts: network namespaces with a wire between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
END_S = 120.0

pytestmark = pytest.mark.slow

#: Rank 1 takes its wire down where asked to; both tell what they got.
RANK = """
import json, subprocess, sys
from streamload.errors import PeerFailedError
from streamload.distributed.launch import open_group

group = open_group(timeout=20)
said = [data.decode() for data in group.allgather(b"%d" % group.rank)]
group.store.set(str(group.rank), b"here")
group.allgather(b"")
found = [group.store.get(key) == b"here" for key in said]
group.close()
group = open_group(timeout=2)
group.allgather(b"")
if group.rank == 1:
    subprocess.run(["ip", "link", "set", sys.argv[1], "down"], check=True)
errors = []
for call in (lambda: group.store.get("0"), lambda: group.allgather(b"")):
    try:
        call()
    except PeerFailedError as error:
        errors.append(str(error))
group.close()
print(json.dumps([said, found, errors]))
"""


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, whose wires are called as they are."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        needs.lacking("network namespaces need root and ip")
    names = (f"sl{os.getpid()}a", f"sl{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1])
        ip("link", "set", names[1], "netns", names[1])
        for number, name in enumerate(names, start=1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", name)
            for interface in ("lo", name):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("address", ["first", "10.77.0.1"])
def test_a_host_name_that_is_loopback(hosts: tuple[str, str], address: str, tmp_path: Path) -> None:
    """Ranks meet where host names resolve to 127.0.1.1, that of MASTER_ADDR on its host too."""
    needs.module("torch")
    processes = []
    for rank, host in enumerate(hosts):
        # as Debian installs it; "first" is rank 0's host
        names = f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"
        names += f"{('127.0.1.1', '10.77.0.1')[rank]} first\n"
        (tmp_path / host).write_text(names)
        script = 'mount --bind "$0" /etc/hosts && exec ip netns exec "$@"'
        variables = {
            **{"RANK": str(rank), "WORLD_SIZE": "2"},
            **{"MASTER_ADDR": address, "MASTER_PORT": "29500", "PYTHONPATH": str(ROOT)},
        }
        processes.append(
            subprocess.Popen(
                [
                    *("unshare", "--mount", "sh", "-c", script, str(tmp_path / host), host),
                    *(sys.executable, "-c", RANK, host),
                ],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        answers = [process.communicate(timeout=END_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, answer in enumerate(answers):
        said, found, errors = json.loads(answer)
        assert said == ["0", "1"]
        assert found == [True, True]
        assert len(errors) == 1 + rank  # rank 0 has the store itself
