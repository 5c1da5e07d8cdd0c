"""The reads and copies of a unit, for the compiled copy loop of `devices.bulk`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from streamload.core.units import round_up
from streamload.devices.allocators import DRIVER_BLOCK_NBYTES
from streamload.devices.base import Copy, Read, ReadTable, Staging, Table
from streamload.planning.chunks import Chunk, SmallTensorBatch
from streamload.planning.plan import SEGMENTS
from streamload.streaming.state import Job, Refill, WorkItem

# Most bytes between tensors that are read though nobody needs them, if memory is filled repeatedly.
_GAP_NBYTES = 2**17
_TURNS = 8  # reads of each thread that shares a unit, if they are long enough
_LEAST_NBYTES = 3 * 2**17  # of such a read: a copy costs some 10 microseconds besides its bytes


class Slot(NamedTuple):
    """A worker's staging memory, and the device address of scratch for its casts; 0 for none."""

    staging: Staging
    scratch: int


def reads_of(
    job: Job, device: str, unit: WorkItem, alignment: int, slots: Sequence[Slot], index: int
) -> list[Read]:
    """Return the reads of a unit, each of at most a slot, with the copies of their bytes.

    The reads begin and end at multiples of ``alignment``. The first has the number ``index``; read
    ``i`` goes to slot ``i % len(slots)``, if it matters: not without casts.
    """
    if isinstance(unit, SmallTensorBatch):
        whole = unit.read_nbytes
        return list(_pack_reads(job, device, unit, alignment, _read_nbytes(job, whole)))
    refills = job.transfer.refill_nbytes > 0
    gap_nbytes = _GAP_NBYTES if refills else 0
    gaps = (b.runs[0].start - a.runs[0].stop for a, b in pairwise(unit))
    whole = sum(chunk.read_nbytes for chunk in unit) + sum(n for n in gaps if n <= gap_nbytes)
    size = _read_nbytes(job, whole)
    reads: list[Read] = []
    copies: list[Copy] = []
    start = at = unit[0].runs[0].start  # first byte of this read, and of its next copy
    for chunk in unit:
        (run,) = chunk.runs
        width = 1
        p = job.plan.placements[chunk.placement].kind
        if p.cast == "device":
            width = p.src.nbytes(p.unit_numel)
        if at != run.start and not at < run.start <= min(at + gap_nbytes, start + size - width):
            reads.append(_read(start, at, alignment, copies))
            copies, start = [], run.start
        at = run.start
        while at < run.stop:
            room = (size - (at - start)) // width * width
            if not room:
                reads.append(_read(start, at, alignment, copies))
                copies, start = [], at
                continue
            n = min(room, run.stop - at)
            scratch = slots[(index + len(reads)) % len(slots)].scratch if slots else 0
            lead = start % alignment
            copy = copy_of(job, device, chunk, at, n, at - start + lead, scratch)
            if refills and copies and _follows(copies[-1], copy):
                copies[-1] = copies[-1]._replace(nbytes=copies[-1].nbytes + n)
            else:
                copies.append(copy)
            at += n
    reads.append(_read(start, at, alignment, copies))
    return reads


def refill_of(job: Job, unit: WorkItem, alignment: int) -> tuple[ReadTable, int]:
    """Return a unit's reads, and how far from the addresses of their copies its buffers are.

    The unit is read repeatedly: its reads are kept. Its buffers move together, from slot to slot of
    the device.
    """
    first = job.address_of(unit[0].placement)
    known = job.refills.get(id(unit))
    if known is None:
        device = job.plan.placements[unit[0].placement].kind.device
        reads = ReadTable.of(reads_of(job, device, unit, alignment, (), 0))
        assert reads.rows[:, 1].max() <= refill_slot_nbytes(job)
        known = job.refills[id(unit)] = Refill(unit, first, reads)
    return known.reads, first - known.address


def refill_slot_nbytes(job: Job) -> int:
    """Return the bytes of a slot that threads share, for the longest read of any unit."""
    margin_nbytes = job.plan.staging_nbytes - job.plan.slot_nbytes
    return _most_nbytes(job, job.transfer.refill_nbytes) + margin_nbytes


def _most_nbytes(job: Job, whole: int) -> int:
    """Return the most bytes of a read, at most a slot.

    Reads that threads share are shorter, for none to wait long for the last.
    """
    if job.lanes == 1:
        return job.plan.slot_nbytes
    share = max(min(whole, job.transfer.refill_nbytes) // (_TURNS * job.lanes), _LEAST_NBYTES)
    return min(round_up(share, mmap.PAGESIZE), job.plan.slot_nbytes)


def _read_nbytes(job: Job, whole: int) -> int:
    """Return the bytes of each read of a unit of ``whole`` bytes.

    They are of one size: a small one at the end would cost as much as the others.
    """
    count = -(-whole // _most_nbytes(job, whole))
    return min(round_up(-(-whole // count), mmap.PAGESIZE), job.plan.slot_nbytes)


def _follows(a: Copy, b: Copy) -> bool:
    return not (a.kernel or b.kernel) and a.nbytes == b.at - a.at == b.address - a.address


def _pack_reads(
    job: Job, device: str, pack: SmallTensorBatch, alignment: int, size: int
) -> Iterator[Read]:
    """Yield the reads of a batch of small tensors, ``size`` bytes each; they may cut tensors."""
    addresses = job.addresses(pack)
    assert addresses is not None, device
    firsts = np.arange(pack.start, pack.stop, size)
    begin = np.union1d(pack.bounds[:-1], firsts)  # of each copy from one read to one parameter
    of = np.searchsorted(pack.bounds, begin, "right") - 1
    target = addresses[of] + (begin - pack.bounds[of])
    nbytes = np.diff(begin, append=pack.stop)
    at = (begin - pack.start) % size  # in its read
    if job.infos[device].allocator in SEGMENTS:
        # neighbours in one segment by one copy; segments begin at a multiple of the block
        new = np.empty(len(begin), bool)
        new[0] = True
        new[1:] = target[1:] != target[:-1] + nbytes[:-1]
        new |= (at == 0) | (target % DRIVER_BLOCK_NBYTES == 0)
        where = np.flatnonzero(new)
        at, target, nbytes = at[where], target[where], np.add.reduceat(nbytes, where)
    rows = np.zeros((len(at), len(Copy._fields)), np.int64)
    rows[:, 1] = nbytes
    rows[:, 2] = target
    ends = [*np.flatnonzero(at == 0).tolist(), len(at)]
    for first, (begun, end) in zip(firsts.tolist(), pairwise(ends), strict=True):
        rows[begun:end, 0] = at[begun:end] + first % alignment
        last = min(first + size, pack.stop)
        yield _read(first, last, alignment, rows[begun:end])


def copy_of(
    job: Job, device: str, chunk: Chunk, start: int, nbytes: int, at: int, scratch: int
) -> Copy:
    """Return the copy of a chunk's ``nbytes`` from file byte ``start`` on, at ``at`` in a slot.

    ``scratch``: device address of memory for the cast, or 0.
    """
    bulk, casts = job.devices[device].bulk, job.casts.get(device)
    assert bulk is not None, device
    address = bulk.address(job.buffers[chunk.placement]) + chunk.start
    offset = start - chunk.runs[0].start if chunk.runs else 0
    p = job.plan.placements[chunk.placement].kind
    if p.cast == "device" and casts is not None:
        numel = p.src.numel(offset)
        first = chunk.start // p.dst.itemsize if p.coding is None else p.numel_at(chunk.start)
        first += numel
        address += -chunk.start if p.order == "device" else p.placed_nbytes(numel)
        auxiliary = job.auxiliary_address(chunk.placement)
        return casts.copy(chunk.placement, Copy(at, nbytes, address), scratch, auxiliary, first)
    return Copy(at, nbytes, address + offset)


def _read(start: int, stop: int, alignment: int, copies: Sequence[Copy] | Table) -> Read:
    """Return the read of file bytes ``start`` to ``stop`` (exclusive), rounded to ``alignment``."""
    first = start // alignment * alignment
    return Read(first, round_up(stop, alignment) - first, stop - first, copies)
