"""A group over MPI, by mpi4py, on a new communicator.

MPI's own waits spin without end; here every wait is a loop of tests and sleeps with a deadline.
The first group initializes MPI, unless the program did.

If a process dies, ``mpirun`` by default ends all others. If it lets them run
(``mpirun --enable-recovery``), or the process hangs, they get PeerFailedError.
"""

from __future__ import annotations

import atexit
import socket
import sys
from collections.abc import Callable
from typing import Any

from streamload.distributed.group import (
    Engine,
    Launch,
    Met,
    ProcessGroup,
    check_blocks,
    lost,
    poll,
    unmet,
)
from streamload.distributed.store import SharedStore, open_store
from streamload.errors import NodeError

_NAPS_S = (2e-5, 1e-2)  # shortest and longest sleep between tests, in which alone MPI moves data
_NAP_SHARE = 1e-3  # length of a sleep, as a share of the time waited so far

#: Requests that a lost peer left unfinished, with their memory, which MPI may still write to.
#: If there are any, MPI is not finalized: that would wait for the peer.
_unfinished: list[object] = []


class MpiGroup(Engine):
    """A group by MPI's collectives on host memory."""

    engine = "mpi"

    def __init__(self, mpi: Any, comm: Any, timeout: float) -> None:
        super().__init__(comm, comm.Get_rank(), comm.Get_size())
        self._errors = (mpi.Exception, TimeoutError)
        self._mpi = mpi
        self._timeout = timeout
        self.store: SharedStore = open_store(self, timeout)

    def _broadcast(self, part: memoryview, root: int) -> None:
        self._begin("Ibcast", [part, self._mpi.BYTE], root)()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """See `ProcessGroup.all_gather_begin`."""
        check_blocks(mine, out, self.size)
        here = self.rank * mine.nbytes
        # in place: MPI forbids that input and output overlap
        out.cast("B")[here : here + mine.nbytes] = mine.cast("B")
        return self._begin("Iallgather", self._mpi.IN_PLACE, [out, mine.nbytes, self._mpi.BYTE])

    def close(self, failed: bool = False) -> None:
        """Leave the store, rank 0 last, and free the communicator."""
        self.store.close()
        if failed:
            _unfinished.append(self._library)
        elif self._library is not None and not self._failed:
            self._library.Free()  # waits for nobody in Open MPI and MPICH
        self._library = None

    def _start(self, name: str, *arguments: object) -> Callable[[], None]:
        under_way = getattr(self._library, name)(*arguments), arguments
        _unfinished.append(under_way)

        def wait() -> None:
            poll(under_way[0].Test, _NAP_SHARE, _NAPS_S, self._timeout)
            _unfinished[:] = [other for other in _unfinished if other is not under_way]

        return wait

    def _message(self, error: Exception) -> str:
        return f"MPI: {error}"


def launched(launch: Launch, timeout: float, met: Met = unmet) -> ProcessGroup:
    """Return the group of all ranks of ``mpirun``, ``mpiexec`` or ``srun``; ``met`` is not called.

    Raises ImportError or RuntimeError if mpi4py or the MPI library are not installed.
    """
    mpi = _start()
    world = mpi.COMM_WORLD
    if launch.size not in (None, world.Get_size()):
        library = mpi.Get_library_version().splitlines()[0].split(",")[0]
        raise NodeError(
            launch.host,
            f"MPI counts {world.Get_size()} ranks and the launcher {launch.size}: mpi4py has "
            f"loaded {library}, and the launcher seems to be of another MPI",
        )
    return wrap(world, timeout)


def wrap(comm: Any, timeout: float, met: Met = unmet) -> ProcessGroup:
    """Return a group over a duplicate of an ``mpi4py.MPI.Intracomm``; ``timeout`` in seconds."""
    mpi = _start()
    own, request = comm.Idup()
    try:
        poll(request.Test, _NAP_SHARE, _NAPS_S, timeout)
    except (mpi.Exception, TimeoutError) as error:
        _unfinished.append(own)
        raise lost(f"the ranks did not meet: {error}") from error
    own.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiGroup(mpi, own, timeout)


def is_group(thing: object) -> bool:
    """Return whether ``thing`` is a communicator of mpi4py."""
    from mpi4py import MPI

    return isinstance(thing, MPI.Intracomm)


def _start() -> Any:
    """Initialize MPI, to be finalized at exit, and return the module ``mpi4py.MPI``."""
    import mpi4py

    # by default the import initializes MPI, and exit waits for lost processes
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finish)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise NodeError(
            socket.gethostname(),
            "MPI runs for one thread alone, and a load has several: begin it with "
            "MPI.Init_thread(MPI.THREAD_SERIALIZED) or leave that to streamload",
        )
    return MPI


def _finish() -> None:
    """Finalize MPI at exit, unless that would wait for other ranks."""
    from mpi4py import MPI

    # nor after an uncaught exception: the others may wait for this rank
    if not _unfinished and not hasattr(sys, "last_value") and not MPI.Is_finalized():
        MPI.Finalize()
