"""How many threads and blocks a conversion has memory for, or a refusal.

What counts is all that a memory cgroup charges and the kernel cannot take back at once: memory of
the process, pages that are being read, and pages that are written and not yet on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.readers import BOUNCE_NBYTES
from streamload.checkpoint.url import Url
from streamload.dtypes import DType
from streamload.planning.budget import available_cpus, first_that_fits
from streamload.reading import AHEAD_NBYTES, BLOCK_NBYTES

# More threads wait for the disk, or take memory; one would not read while it writes.
_THREADS = range(2, 5)
_REMOTE_THREADS = 8  # each waits for a server most of the time

# Each is a little more than was measured in memory cgroups, by their own counters.
_RUN_NBYTES = 2 * 2**20  # the journal, and what the kernel keeps for open files: 1.5 MB
_CAST_NBYTES = 7 * 2**20  # LLVM compiles the first kernel in 6.3 MB; numpy casts in 2 MB a thread
_THREAD_NBYTES = 2**18  # stack, heap and page tables of a thread: 0.1 MB; with a connection 0.2
_TENSOR_NBYTES = 600  # plan, state, journal and report of a tensor: 310 to 540, most for JSON
_NODE_TENSOR_NBYTES = 400  # its placement on a node, beside that: 150 to 350
_TEXTS = 4  # names are in headers, journal, sidecar and in the JSON of the report


@dataclass(frozen=True, slots=True)
class Way:
    """How the bytes are moved.

    Attributes:
        threads: how many.
        block_nbytes: most bytes that a thread reads, and writes, at once.
        behind: blocks that the disk is busy with before one is waited for.
        direct: read files past the page cache, of which nothing is read ahead then; as of servers.
    """

    threads: int
    block_nbytes: int = BLOCK_NBYTES
    behind: int = 6
    direct: bool = False

    @property
    def nbytes(self) -> int:
        """Most memory that it takes."""
        reading = BOUNCE_NBYTES if self.direct else AHEAD_NBYTES
        mine = self.threads * (2 * self.block_nbytes + _THREAD_NBYTES + reading)
        dirty = (self.threads + self.behind) * self.block_nbytes
        return mine + dirty * 9 // 8  # what the kernel keeps for each dirty page: 2 to 10%


def choose_way(checkpoint: Checkpoint, dtypes: Sequence[DType | None], *, nodes: bool) -> Way:
    """The fastest way that free memory is enough for; asked before anything is planned.

    Args:
        checkpoint: what is converted.
        dtypes: what floats become; None stands for what they are.
        nodes: whether it is split over nodes.

    Raises:
        PlanInfeasibleError: there is too little memory for any.
    """
    threads = min(max(available_cpus(), _THREADS.start), _THREADS.stop - 1)
    remote = any(isinstance(header.path, Url) for header in checkpoint.shards)
    if remote:
        threads = _REMOTE_THREADS
    ways = [
        Way(threads, direct=remote),
        Way(2, direct=remote),
        Way(threads, 2**20, 2, direct=True),
        Way(2, 2**20, 2, direct=True),
        Way(1, 2**20, 1, direct=True),
        Way(1, 2**18, 1, direct=True),
    ]
    each_nbytes = _TENSOR_NBYTES + _NODE_TENSOR_NBYTES * nodes
    tensors_nbytes = each_nbytes * len(checkpoint.tensors)
    tensors_nbytes += _TEXTS * sum(header.data_start for header in checkpoint.shards)
    floats = {info.dtype for info in checkpoint.tensors.values() if info.dtype.kind == "float"}
    casts_nbytes = _CAST_NBYTES * any(d is not None and floats - {d} for d in dtypes)
    always_nbytes = _RUN_NBYTES + casts_nbytes + tensors_nbytes
    largest = [
        ("names and places of tensors", tensors_nbytes),
        ("casts", casts_nbytes),
        ("threads and their blocks", _RUN_NBYTES + ways[-1].nbytes),
    ]
    return first_that_fits(
        [(way, always_nbytes + way.nbytes) for way in ways],
        sorted((one for one in largest if one[1]), key=lambda one: -one[1]),
    )
