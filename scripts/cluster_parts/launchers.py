"""Starting one program on all hosts of a cluster, as clusters do it."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster_parts.hosts import ENTER, Cluster, NoClusterError

MASTER_PORT = 29500


@dataclass(slots=True)
class Program:
    """A process that was started: a rank, or what has started some."""

    host: int  # where it runs
    process: subprocess.Popen[Any]
    # what it printed, by stream
    lines: dict[str, list[str]] = field(default_factory=lambda: {"stdout": [], "stderr": []})
    ended_s: float = math.inf  # when it ended, by `time.monotonic`

    @property
    def returncode(self) -> int:
        """Its exit status; negative for a signal."""
        return int(self.process.returncode)

    @property
    def stdout(self) -> str:
        """What it printed."""
        return "".join(self.lines["stdout"])

    @property
    def stderr(self) -> str:
        """What it complained of."""
        return "".join(self.lines["stderr"])


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be started."""

    cluster: Cluster  # on which hosts
    argv: Sequence[str | os.PathLike[str]]  # the program that each rank is, and its arguments
    per_host: int  # ranks of a host
    env: Mapping[str, str]  # more environment variables

    def start(
        self, host: int, argv: Sequence[str | os.PathLike[str]], env: Mapping[str, str]
    ) -> Program:
        """Start one program, with pipes for what it says."""
        process = self.cluster.exec(
            host,
            argv,
            env={**env, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return Program(host, process)


def _bare(job: Job) -> list[Program]:
    """Environment variables; the names are those of torch.distributed's ``env://``."""
    count = len(job.cluster.hosts)
    common = {
        "WORLD_SIZE": str(count * job.per_host),
        "LOCAL_WORLD_SIZE": str(job.per_host),
        "MASTER_ADDR": job.cluster.hosts[0].name,
        "MASTER_PORT": str(MASTER_PORT),
    }
    return [
        job.start(
            host,
            job.argv,
            {**common, "RANK": str(host * job.per_host + local), "LOCAL_RANK": str(local)},
        )
        for host in range(count)
        for local in range(job.per_host)
    ]


def _torchrun(job: Job, static: bool = False) -> list[Program]:
    """A torchrun a host. By c10d ranks follow from hosts' names, as text: node-10, then node-2."""
    hosts = job.cluster.hosts
    met = ["--rdzv-backend=c10d", f"--rdzv-endpoint=node-0:{MASTER_PORT}", "--rdzv-id=job"]
    if static:  # the ranks are those of the hosts
        met = [f"--master-addr={hosts[0].name}", f"--master-port={MASTER_PORT}"]
    shape = [f"--nnodes={len(hosts)}", f"--nproc-per-node={job.per_host}", "--no-python"]
    run = [sys.executable, "-P", "-m", "torch.distributed.run", *shape, *met]
    return [
        job.start(host, [*run, *[f"--node-rank={host}"] * static, *job.argv], {})
        for host in range(len(hosts))
    ]


# No binding to cores, since each host takes all of the machine's for its own; names of ranks at the
# begin of lines; and namespaces are made by root.
_OF_OPEN_MPI = ("--bind-to", "none", "--tag-output", "--allow-run-as-root")

#: How each family of mpirun is told: words of what it says of its version, its option for hosts and
#: others, and the environment that has it call `ENTER` in place of ssh, with its arguments.
#: Sources: mpirun(1) of Open MPI 4.1 and 5.0, mpiexec.hydra --help of MPICH 4.
_MPIRUNS: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    (r"\(Open MPI\) [1-4]\.", ("--host", *_OF_OPEN_MPI), {"OMPI_MCA_plm_rsh_agent": str(ENTER)}),
    (r"\(Open MPI\)", ("--host", *_OF_OPEN_MPI), {"PRTE_MCA_plm_ssh_agent": str(ENTER)}),
    (
        r"HYDRA|MPICH|Intel",
        ("-hosts", "-prepend-rank"),
        {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(ENTER)},
    ),
)

#: What mpirun puts before a line: "[1,3]<stderr>: ", "[prterun-node-0-17@1,3]<stdout>: ", "[3] ".
MPI_TAG = re.compile(rb"\[(?:[^\]\s]*,)?(\d+)\](?:<(stdout|stderr)>:)? ?")


def _mpirun(job: Job) -> list[Program]:
    """The ranks are those of the hosts; their daemons are started by `ENTER`."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise NoClusterError("not installed: mpirun (Debian: openmpi-bin)")
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    for known, (hosts_option, *more), env in _MPIRUNS:
        if re.search(known, said):
            hosts = ",".join(f"{host.name}:{job.per_host}" for host in job.cluster.hosts)
            ranks = str(len(job.cluster.hosts) * job.per_host)
            options = ["-n", ranks, hosts_option, hosts, *more]
            return [job.start(0, [mpirun, *options, *job.argv], env)]
    raise NoClusterError(f"an mpirun that is not known: {said.strip()[:100]}")


#: Each starts a job and returns its programs: "env" every rank, "torchrun" a torchrun a host,
#: "mpirun" one on the first host. They raise NoClusterError where the launcher is not installed.
LAUNCHERS: dict[str, Callable[[Job], list[Program]]] = {
    "env": _bare,
    "torchrun": _torchrun,
    "torchrun-static": partial(_torchrun, static=True),
    "mpirun": _mpirun,
}
