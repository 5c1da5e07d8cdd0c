"""A group over MPI, by mpi4py, on a communicator of its own.

MPI's own waits keep a processor busy and have no end; here every wait is a loop of tests and naps
with a deadline. MPI is started when the first group is opened, unless the program has started it.

What MPI does about a process that died is up to it and its launcher: by default ``mpirun`` ends
all the others. Where it lets them go on (``mpirun --enable-recovery``), or where the process only
hangs, they get PeerFailedError.
"""

from __future__ import annotations

import atexit
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from streamload.distributed.group import Engine, Group, Launch, Store, check_blocks, lost
from streamload.distributed.store import open_store
from streamload.errors import NodeError

_NAPS_S = (2e-5, 1e-2)  # the shortest and the longest; between them, a thousandth of the wait

#: What a lost peer left unfinished: requests, and their memory, which MPI may still write to. If
#: there is any, MPI cannot be ended in order: that would wait for the peer.
_unfinished: list[object] = []


class MpiGroup(Engine):
    """Collectives of MPI on host memory."""

    engine = "mpi"

    def __init__(self, mpi: Any, comm: Any, timeout: float) -> None:
        super().__init__(comm, comm.Get_rank(), comm.Get_size())
        self._errors = (mpi.Exception, TimeoutError)
        self._mpi = mpi
        self._timeout = timeout
        self._shared = open_store(self, timeout)
        self.store: Store = self._shared

    def _broadcast(self, part: memoryview, root: int) -> None:
        self._begin("Ibcast", [part, self._mpi.BYTE], root)()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """See `Group.all_gather_begin`."""
        check_blocks(mine, out, self.size)
        here = self.rank * mine.nbytes
        # through its own place in the output: MPI forbids that the two overlap
        out.cast("B")[here : here + mine.nbytes] = mine.cast("B")
        return self._begin("Iallgather", self._mpi.IN_PLACE, [out, mine.nbytes, self._mpi.BYTE])

    def close(self, failed: bool = False) -> None:
        """Leave the store, rank 0 last, and give back the communicator."""
        self._shared.close()
        if failed:
            _unfinished.append(self._library)
        elif self._library is not None and not self._failed:
            self._library.Free()  # waits for nobody in Open MPI and MPICH
        self._library = None

    def _start(self, name: str, *arguments: object) -> Callable[[], None]:
        under_way = getattr(self._library, name)(*arguments), arguments
        _unfinished.append(under_way)

        def wait() -> None:
            _wait(under_way[0], self._timeout)
            _unfinished[:] = [other for other in _unfinished if other is not under_way]

        return wait

    def _told(self, error: Exception) -> str:
        return f"MPI: {error}"


def launched(launch: Launch, timeout: float) -> Group:
    """The group of all ranks that ``mpirun``, ``mpiexec`` or ``srun`` started.

    Args:
        launch: what it told.
        timeout: seconds of each collective.

    Raises:
        PeerFailedError: not all of them came.
        NodeError: the MPI library does not work with this launcher.
        ImportError, RuntimeError: mpi4py or the MPI library are not installed.
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


def wrap(comm: Any, timeout: float) -> Group:
    """A group of the ranks of an mpi4py communicator, over a duplicate of it.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``.
        timeout: seconds of each collective.

    Raises:
        PeerFailedError: a rank does not answer.
    """
    mpi = _start()
    own, request = comm.Idup()
    try:
        _wait(request, timeout)
    except (mpi.Exception, TimeoutError) as error:
        _unfinished.append(own)
        raise lost(f"the ranks did not meet: {error}") from error
    own.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiGroup(mpi, own, timeout)


def is_group(thing: object) -> bool:
    """Whether something is a communicator of mpi4py's."""
    from mpi4py import MPI

    return isinstance(thing, MPI.Intracomm)


def _start() -> Any:
    """MPI, running; it ends with the program."""
    import mpi4py

    # importing it would start it, and have it wait at exit for processes that are gone
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
    from mpi4py import MPI

    # nor after an exception that nobody caught: the others may wait for this rank
    if not _unfinished and not hasattr(sys, "last_value") and not MPI.Is_finalized():
        MPI.Finalize()


def _wait(request: Any, timeout: float) -> None:
    """Test, nap, and again; MPI moves data in the tests only."""
    shortest, longest = _NAPS_S
    began = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - began
        if waited > timeout:
            raise TimeoutError(f"a rank did not come within {timeout:g} s")
        time.sleep(min(max(waited / 1000, shortest), longest))
