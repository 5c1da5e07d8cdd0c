"""Detect the launcher of this process (torchrun, mpirun, srun), and open its group of processes."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamload.core.registry import Registry, Row, load
from streamload.core.system import file_text
from streamload.distributed.group import Alone, Launch, Met, ProcessGroup, unmet
from streamload.errors import NodeError, PeerFailedError

_TORCH_LOG = "TORCH_CPP_LOG_LEVEL"
_PORTS = range(20_000, 32_000)  # free of services, and below what systems hand out


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables that a launcher sets for each process, by their names."""

    name: str  # of the launcher, for messages
    engine: str  # the engine that fits
    rank: str
    size: str
    local_rank: tuple[str, ...]  # the first that is set counts
    local_size: str = ""
    needs: tuple[str, ...] = ()  # variables without which it is not this launcher


_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")  # set by srun, and not in a batch script

#: The most specific first: a program under torchrun under srun sees both.
_LAUNCHERS = (
    _Launcher(
        "RANK and WORLD_SIZE",
        "torch",
        "RANK",
        "WORLD_SIZE",
        ("LOCAL_RANK",),
        "LOCAL_WORLD_SIZE",
        needs=("WORLD_SIZE",),
    ),
    _Launcher(
        "Open MPI",
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("PMIx", "mpi", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",)),
    _Launcher(
        "PMI",
        "mpi",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "SLURM_LOCALID"),
        "MPI_LOCALNRANKS",
        needs=("PMI_SIZE",),
    ),
    _Launcher(
        "Slurm", "torch", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), needs=_STEP
    ),
)


@dataclass(frozen=True, kw_only=True)
class EngineRow(Row):
    """An engine of groups of processes.

    Attributes:
        engine: the module to import: its ``is_group(thing)`` recognizes the library's own groups,
            ``wrap(group, timeout, met)`` makes a `ProcessGroup` of one, and
            ``launched(launch, timeout, met)`` that of all ranks.
        library: the module that a program has imported if it has such groups.
        hints: each `Launch.engine_hint` for which ``launched`` is called.
        needs: the packages to install, for errors.
    """

    engine: str
    library: str
    hints: tuple[str, ...]
    needs: str


#: The engines, in the order in which they are tried.
ENGINES = Registry(
    "streamload.engines",
    EngineRow,
    EngineRow(
        name="mpi",
        engine="streamload.distributed.mpi",
        library="mpi4py.MPI",
        hints=("mpi",),
        needs="mpi4py and an MPI library (pip install mpi4py)",
    ),
    EngineRow(
        name="torch",
        engine="streamload.distributed.torch",
        library="torch",
        hints=("torch", "mpi"),
        needs="torch",
    ),
)


def find_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return the launcher's variables, parsed; None if no launcher started this process."""
    env = os.environ if environ is None else environ
    set_up = (each for each in _LAUNCHERS if all(name in env for name in (each.rank, *each.needs)))
    if (launcher := next(set_up, None)) is None:
        return None
    rank = _number(env, launcher.rank) or 0
    size = _number(env, launcher.size)
    host = socket.gethostname()
    if size is not None and not 0 <= rank < size:
        raise NodeError(host, f"{launcher.name} say rank {rank} of {size}")
    return Launch(
        launcher.name,
        launcher.engine,
        rank,
        size,
        _number(env, *launcher.local_rank),
        _number(env, launcher.local_size),
        host,
        _meeting(env),
        env.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def node_name() -> str:
    """Return this process's node name for plans: ``STREAMLOAD_NODE_ID``, else the host's name."""
    return os.environ.get("STREAMLOAD_NODE_ID") or socket.gethostname()


def host_id() -> str:
    """Return a unique id of this host: boards with one disk image have the same name."""
    boot = file_text(Path("/proc/sys/kernel/random/boot_id"))  # "" if this is not Linux
    return f"{socket.gethostname()} {boot.strip()}"


def open_group(group: object = None, timeout: float = 60.0, met: Met = unmet) -> ProcessGroup:
    """Open the group of processes for a load; the caller closes it, unless it was given.

    ``group``: a ``distributed.Group``, returned as it is; a ``torch.distributed.ProcessGroup``; an
    mpi4py communicator; or None: torch's default group (``init_process_group``) if it exists, else
    the launcher's. TypeError for others. ``timeout``: seconds for the ranks to meet, and for each
    collective. ``met`` gets the `Meeting` before the group opens, if there is one.
    """
    if group is None:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not getattr(distributed, "is_initialized", bool)():
            launch = find_launch()
            if launch is None or launch.size == 1:
                return Alone()
            return _launched(launch, timeout, met)
        group = distributed.group.WORLD
    if isinstance(group, ProcessGroup):
        meeting = getattr(group, "meeting", None)
        if meeting is not None:
            met(meeting)
        return group
    for engine, row in ENGINES.items():
        if row.library in sys.modules and engine_module(engine).is_group(group):
            wrapped: ProcessGroup = engine_module(engine).wrap(group, timeout, met)
            return wrapped
    raise TypeError(
        f"{type(group).__name__} is not a group: give a streamload Group, a "
        "torch.distributed.ProcessGroup or an mpi4py communicator"
    )


def _launched(launch: Launch, timeout: float, met: Met) -> ProcessGroup:
    """Return the launcher's group, by the first engine that works; else raise NodeError."""
    problems = []
    for engine, row in ENGINES.items():
        if launch.engine_hint not in row.hints:
            continue
        try:
            opened: ProcessGroup = engine_module(engine).launched(launch, timeout, met)
            return opened
        except PeerFailedError:
            raise
        except NodeError as error:
            problems.append(f"{engine}: {error.problem}")
        except (ImportError, OSError, RuntimeError) as error:  # it or its library is missing
            problems.append(f"{engine}: {error}: install {row.needs}")
    raise NodeError(
        launch.host, f"launched by {launch.launcher}, but no engine works: " + "; ".join(problems)
    )


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of these variables that is set; None if none is."""
    for name in names:
        if name in env:
            if not env[name].isdecimal():
                raise NodeError(socket.gethostname(), f"{name} is not a number: {env[name]!r}")
            return int(env[name])
    return None


def _meeting(env: Mapping[str, str]) -> str:
    """Return the URL at which torch's ranks meet; "" if unknown."""
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return "env://"
    if not all(name in env for name in (*_STEP, "SLURM_JOB_ID", "SLURM_STEP_NODELIST")):
        return ""
    # rank 0 runs on the first of the step's nodes; "rack[2-4,7]-a,x" begins with "rack2-a"
    nodes = re.match(r"(?:[^,\[]|\[[^\]]*\])*", env["SLURM_STEP_NODELIST"])
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes[0] if nodes else "")
    job, step = (_number(env, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return f"tcp://{first}:{_PORTS[(16 * job + step) % len(_PORTS)]}"


def engine_module(name: str) -> Any:
    """Import the module of engine ``name``, with torch's log off: streamload raises its errors."""
    quiet = _TORCH_LOG not in os.environ and "torch" not in sys.modules
    if quiet:
        os.environ[_TORCH_LOG] = "ERROR"
    try:
        return load(ENGINES[name].engine)
    finally:
        if quiet:
            del os.environ[_TORCH_LOG]
