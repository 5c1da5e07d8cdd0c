"""Choose threads and block lengths of a conversion that fit into free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import AHEAD_NBYTES, BLOCK_NBYTES
from streamload.codecs.decode import scales_nbytes
from streamload.codecs.encode import Quantized
from streamload.codecs.weights import Packed
from streamload.conversion.assembler import CHANGED_NBYTES
from streamload.core.dtypes import F64, DType
from streamload.core.location import Url
from streamload.core.memory import available_cpus, first_that_fits
from streamload.core.units import round_up
from streamload.files.local import BOUNCE_NBYTES
from streamload.planning.quant_policy import held_nbytes
from streamload.planning.transforms import Changed

_PAGE = 4096

# Counted is all that a memory cgroup charges and the kernel cannot reclaim at once: memory of the
# process, pages that are being read, and dirty pages.

# More threads wait for the disk, or take memory; one would not read while it writes.
_THREADS = range(2, 5)
_REMOTE_THREADS = 8  # each waits for a server most of the time

# Each is a little more than the counters of memory cgroups showed.
_RUN_NBYTES = 2 * 2**20  # the journal, and what the kernel keeps for open files: 1.5 MB
_OPEN_NBYTES = 2**19  # without the journal, which counts with the files in memory: 0.1 to 0.4 MB
_CAST_NBYTES = 7 * 2**20  # LLVM compiles the first kernel in 6.3 MB; numpy casts in 2 MB a thread
_THREAD_NBYTES = 2**18  # stack, heap and page tables of a thread: 0.1 MB; with a connection 0.2
_TENSOR_NBYTES = 720  # a tensor in plan, journal and report: 310 to 700, most for JSON
_NODE_TENSOR_NBYTES = 400  # its placement on a node, in addition: 150 to 350
_QUANT_NBYTES = 4 * 2**20  # more kernels: 1 MB each; numpy's temporaries, 1 MB a thread
_CHANGED_COPIES = 3  # arrays of float64 in which values change: the old, the new, their products
_KEPT_SHARE = 256  # the kernel keeps 576 bytes for 64 pages of a file in memory: 1/455
_TURNED_BLOCKS = 12  # blocks of permuted elements, of all threads together
_TEXTS = 5  # names are in headers, journal, sidecar and its dirty pages, the report's JSON


@dataclass(frozen=True, slots=True)
class InMemory:
    """Bytes of files, still to be written, that stay in memory until removed, and the reason."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Way:
    """Number of threads and sizes of blocks with which a conversion reads and writes."""

    threads: int
    block_nbytes: int = BLOCK_NBYTES  # most bytes that a thread reads, and writes, at once
    behind: int = 6  # blocks that the disk writes before a thread waits for one
    direct: bool = False  # whether files are read past the page cache, without read-ahead

    @property
    def turned_nbytes(self) -> int:
        """Most bytes of a permuted tensor that a thread writes at once, gathered from all rows."""
        # blocks that a long unit made longer are long enough
        usual_nbytes = min(self.block_nbytes, BLOCK_NBYTES)
        return max(_TURNED_BLOCKS // self.threads * usual_nbytes, self.block_nbytes)

    @property
    def nbytes(self) -> int:
        """Most bytes of host memory that threads take."""
        reading = min(BOUNCE_NBYTES, self.block_nbytes) if self.direct else AHEAD_NBYTES
        return self.threads * (2 * self.block_nbytes + _THREAD_NBYTES + reading)

    @property
    def dirty_nbytes(self) -> int:
        """Most bytes of dirty pages, with what the kernel keeps for each: 2 to 10%."""
        return (self.threads + self.behind) * self.block_nbytes * 9 // 8


def choose_way(
    checkpoint: Checkpoint,
    dtypes: Sequence[DType | None],
    weights: Sequence[Quantized] = (),
    *,
    nodes: bool,
    turned: bool = False,
    compiled: bool = False,
    written: InMemory | None = None,
) -> Way:
    """Return the fastest `Way` that fits into free memory; PlanInfeasibleError if none does.

    ``dtypes`` are all that tensors may be cast to, ``weights`` those to quantize; ``nodes``: the
    output is split over nodes; ``turned``: some tensors are joined from others, or permuted;
    ``compiled``: all casts are compiled already; ``written``: the files, if they go to memory.
    """
    threads = min(max(available_cpus(), _THREADS.start), _THREADS.stop - 1)
    remote = any(isinstance(header.path, Url) for header in checkpoint.shards)
    packed = [info for info in checkpoint.tensors.values() if isinstance(info, Packed)]
    # columns are gathered, and perhaps quantized
    any_turned = turned or any(info.group.is_transposed for info in packed)
    if remote:  # tensors that are permuted in several blocks are requested as often
        threads = _REMOTE_THREADS // 2 if any_turned else _REMOTE_THREADS
    ways = [
        Way(threads, direct=remote),
        Way(2, direct=remote),
        Way(threads, 2**20, 2, direct=True),
        Way(2, 2**20, 2, direct=True),
        Way(1, 2**20, 1, direct=True),
        Way(1, 2**18, 1, direct=True),
    ]
    # a unit is read and quantized at once
    unit_nbytes = max((w.unit_numel * w.dtype.itemsize for w in weights), default=0)
    ways = [
        replace(way, block_nbytes=max(way.block_nbytes, round_up(unit_nbytes, _PAGE)))
        for way in ways
    ]
    under_way = sorted(map(held_nbytes, weights), reverse=True)  # each thread has one weight
    each_nbytes = _TENSOR_NBYTES + _NODE_TENSOR_NBYTES * nodes
    beside = [len(part.suffix) for weight in weights for part in weight.parts[1:]]
    tensors_nbytes = each_nbytes * (len(checkpoint.tensors) + len(beside))
    texts_nbytes = sum(header.data_start for header in checkpoint.shards)
    entry_nbytes = texts_nbytes // max(len(checkpoint.tensors), 1)  # of a part, with its suffix
    tensors_nbytes += _TEXTS * (texts_nbytes + entry_nbytes * len(beside) + sum(beside))
    floats = {info.dtype for info in checkpoint.tensors.values() if info.dtype.kind == "float"}
    is_cast = any(d is not None and floats - {d} for d in dtypes)
    casts_nbytes = _QUANT_NBYTES * bool(weights)
    changed = [info for info in checkpoint.tensors.values() if isinstance(info, Changed)]
    is_compiling = is_cast and not compiled
    casts_nbytes += _CAST_NBYTES * (is_compiling or bool(weights) or any_turned or bool(changed))
    row_nbytes = F64.itemsize * max((info.row_numel for info in changed), default=0)
    changing_nbytes = _CHANGED_COPIES * max(CHANGED_NBYTES, row_nbytes) * bool(changed)
    changing_nbytes += max((info.changes.thread_nbytes for info in changed), default=0)
    decoding_nbytes = 2 * max((scales_nbytes(info.group) for info in packed), default=0)
    stay_nbytes = written.nbytes + written.nbytes // _KEPT_SHARE if written is not None else 0
    run_nbytes = _RUN_NBYTES if written is None else _OPEN_NBYTES
    always_nbytes = run_nbytes + casts_nbytes + tensors_nbytes + decoding_nbytes + stay_nbytes

    def blocks_nbytes(way: Way) -> int:
        return way.nbytes + (way.dirty_nbytes if written is None else 0)

    largest = [
        ("files that are written to memory", stay_nbytes),
        ("names and places of tensors", tensors_nbytes),
        ("casts", casts_nbytes),
        ("values that adapters change", ways[-1].threads * changing_nbytes),
        ("scales of quantised weights", decoding_nbytes),
        ("statistics of weights that are quantised", sum(under_way[: ways[-1].threads])),
        ("threads and their blocks", run_nbytes + blocks_nbytes(ways[-1])),
    ]
    return first_that_fits(
        [
            (
                way,
                always_nbytes
                + way.threads * changing_nbytes
                + blocks_nbytes(way)
                + sum(under_way[: way.threads])
                + 2 * way.threads * way.turned_nbytes * any_turned,
            )
            for way in ways
        ],
        sorted((one for one in largest if one[1]), key=lambda one: -one[1]),
        reason="" if written is None else written.reason,
    )
