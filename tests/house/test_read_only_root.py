"""A root that cannot be written, as Kubernetes gives it to containers that ask for one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import needs
import pytest

CLUSTERS = Path(__file__).parents[2] / "docs/start/clusters.md"
MODEL = "/mnt/llama"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")

#: Shows a checkpoint at MODEL, makes every mount read-only, and then empty folders of some.
SANDBOX = """
mount -t tmpfs tmpfs /mnt && mkdir "$MODEL" && mount --bind "$CHECKPOINT" "$MODEL" || exit 77
for mount in $(cut -d " " -f 5 /proc/self/mountinfo); do
    mount -o remount,bind,ro "$mount" 2>/dev/null
done
touch /tmp/x /dev/shm/x "$HOME/x" /var/tmp/x ./x "$MODEL/x" 2>/dev/null && exit 77
for folder in $WRITABLE; do mount -t tmpfs tmpfs "$folder" || exit 77; done
exec "$@"
"""


def start(
    checkpoint: Path, *command: str, writable: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start a command under a root that cannot be written but for some folders."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        needs.lacking("mount namespaces need root and unshare")
    clean = {k: v for k, v in os.environ.items() if not k.startswith((*LAUNCHERS, "XDG_", "TMP"))}
    own = {"CHECKPOINT": str(checkpoint), "MODEL": MODEL, "WRITABLE": " ".join(writable)}
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", SANDBOX, "sh", *command],
        env=clean | own | variables,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=300)
    if child.returncode == 77:
        needs.lacking(f"mounts cannot be made here: {err}")
    return child.returncode, out, err


def load(checkpoint: Path, device: str, *, writable: Sequence[str] = ()) -> tuple[int, str, str]:
    streamload = (sys.executable, "-m", "streamload", "load", MODEL, "--budget", "1GB", "--json")
    options = ("--device", device, "--dtype", "float16")
    return ended(start(checkpoint, *streamload, *options, writable=writable))


def devices_of(out: str) -> list[str]:
    return list(json.loads(out)["budget_nbytes"])


@pytest.mark.parametrize(
    "device", ["host", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu", "CPU"))]
)
def test_nothing_can_be_written(small_checkpoint: Path, device: str) -> None:
    """No folder for temporary files, no home, no shared memory: it loads, and keeps nothing."""
    code, out, err = load(small_checkpoint, device)
    assert (code, err) == (0, ""), err
    assert devices_of(out) == [device]


@pytest.mark.slow
def test_a_driver_that_compiles_to_files(small_checkpoint: Path) -> None:
    """PoCL computes nothing without a folder, and one line says what it lacks; with one it does."""
    needs.device("CL")
    code, out, err = load(small_checkpoint, "CL")
    if code:  # another driver than PoCL
        assert (code, out) == (1, "")
        assert "set TMPDIR to one that can" in err
        assert err.count("\n") == 1
    code, out, err = load(small_checkpoint, "CL", writable=["/tmp"])
    assert (code, err) == (0, ""), err
    assert devices_of(out) == ["CL"]


def manifest() -> Mapping[str, Any]:
    """The job that users are told to copy."""
    yaml = needs.module("yaml")
    (block,) = (
        part for part in CLUSTERS.read_text().split("```") if part.startswith("yaml\napiVersion")
    )
    _, job = yaml.safe_load_all(block.removeprefix("yaml\n"))
    assert isinstance(job, dict)
    return job


@pytest.mark.slow
def test_the_manifest_of_the_readme(small_checkpoint: Path) -> None:
    """Its containers, as they are but for the model's place and their meeting, load together."""
    job = manifest()["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    mounts = container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == empty
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    variables = {variable["name"]: variable["value"] for variable in container["env"]} | meeting
    shell, option, line = container["command"]
    line = line.replace("/models/llama", MODEL)
    line = line.replace("streamload ", f"{sys.executable} -m streamload ")
    assert int(variables["WORLD_SIZE"]) == job["completions"] == job["parallelism"]
    ranks = [
        start(
            small_checkpoint,
            *(shell, option, f"{line} --json"),
            writable=[mount["mountPath"] for mount in mounts],
            JOB_COMPLETION_INDEX=str(index),
            **variables,
        )
        for index in range(job["completions"])
    ]
    found = [ended(rank) for rank in ranks]
    assert [code for code, _, _ in found] == [0] * len(ranks), found
    report = json.loads(found[0][1])  # of all
    assert len(report["nodes"]) == len(ranks)


@pytest.mark.slow
def test_ranks_without_any_folder(small_checkpoint: Path) -> None:
    """Two of a launcher's meet and load where nothing at all can be written."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    streamload = (sys.executable, "-m", "streamload", "load", MODEL, "--budget", "1GB", "--json")
    options = ("--device", "host", "--dtype", "float16")
    ranks = [
        start(small_checkpoint, *streamload, *options, RANK=str(r), WORLD_SIZE="2", **meeting)
        for r in range(2)
    ]
    assert [ended(rank)[0] for rank in ranks] == [0, 0]
