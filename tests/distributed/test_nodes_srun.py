"""The same body under Slurm's srun, on a cluster of this one machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import needs
import pytest
from distributed_rank import asking, holds, told

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
BODY = str(SUPPORT / "nodes_body.py")
END_S = 120.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "scancel")

CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""

pytestmark = pytest.mark.slow


def said(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        command,
        env=environment,
        text=True,
        timeout=END_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:  # not in CI: Slurm is heavy
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root runs tasks for slurmd and proves itself to munged")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    controller, daemon = free_ports(2)
    facts = {"host": socket.gethostname().partition(".")[0], "folder": folder}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(**facts, controller=controller, daemon=daemon))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment = clean | {
        **{"SLURM_CONF": str(configuration), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    }
    munge = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid"}
    munge |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    with ExitStack() as stack, (folder / "log").open("w") as log:
        for command in (
            [
                "munged",
                "--force",
                "--foreground",
                *(f"--{k}={folder}/{v}" for k, v in munge.items()),
            ],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D"],
        ):
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        end = time.monotonic() + 30
        while "idle" not in said(environment, "sinfo", "--noheader"):
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.1)
        yield environment
        said(environment, "scancel", "--user=root")


def need_mpi(environment: dict[str, str], mpi: str) -> None:
    """What tells tasks of each other."""
    if mpi != "none" and mpi in said(environment, "srun", f"--mpi={mpi}", "-n", "1", "true"):
        pytest.skip(f"this Slurm has no working {mpi}: libpmix-dev")


@pytest.mark.parametrize(
    ("mpi", "engine", "size", "loss"),
    [("none", "torch", 2, "none"), ("none", "torch", 3, "killed"), ("pmix", "mpi", 2, "none")],
)
def test_the_same_body_under_srun(
    cluster: dict[str, str], mpi: str, engine: str, size: int, loss: str, tmp_path: Path
) -> None:
    """Torch's ranks meet on the step's first node; with PMIx the engine is MPI."""
    needs.module("torch" if engine == "torch" else "mpi4py")
    need_mpi(cluster, mpi)
    output = said(
        cluster,
        *("srun", f"--mpi={mpi}", "-n", str(size), "--overcommit"),
        *(sys.executable, BODY, str(tmp_path), loss),
    )
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    survivors = size if loss == "none" else size - 1
    assert [one["rank"] for one in found] == list(range(survivors)), output
    assert {(one["engine"], one["size"]) for one in found} == {(engine, size)}
    assert all(bool(one["error"]) == (loss != "none") for one in found)


@pytest.mark.parametrize(("mpi", "engine"), [("none", "torch"), ("pmix", "mpi")])
def test_a_load_under_srun(
    cluster: dict[str, str], mpi: str, engine: str, small_checkpoint: Path, tmp_path: Path
) -> None:
    """Two tasks of a step load a checkpoint, each its own part, bit for bit."""
    needs.module("torch" if engine == "torch" else "mpi4py")
    need_mpi(cluster, mpi)
    argv = asking(tmp_path, small_checkpoint)
    output = said(cluster, "srun", f"--mpi={mpi}", "-n", "2", "--overcommit", *argv)
    found = told(tmp_path)
    assert [one["rank"] for one in found] == [0, 1], output
    holds(found, small_checkpoint, "layers", engine)
    names = [node["node"].rpartition("/") for node in found[0]["nodes"]]
    assert [local for _, _, local in names] == ["0", "1"]
