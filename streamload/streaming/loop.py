"""The loop of a load (read, cast, place) and the threads that run it.

The calling thread prepares parameters in plan order (it releases old memory and allocates new
memory, since frameworks are not thread-safe) and hands units of work to a few workers (`worker`);
it reports progress and finishes parameters, too (`state`). Without workers, the calling thread also
does the work of a worker.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby, islice

from streamload.core.interrupt import Interrupt, deferred_interrupt, nothing, without_locals
from streamload.core.memory import STAGING, Ledger
from streamload.files.reader import Reader
from streamload.planning.plan import BATCH_UNITS, units_ahead
from streamload.streaming.device_casts import DeviceCasts
from streamload.streaming.state import Job, Sink, StreamStats, Transfer, WorkItem
from streamload.streaming.worker import Outcome, Worker

_Batch = tuple[Reader, Sequence[WorkItem]]  # the open file, and units of it for one worker

_REPORTED_TOGETHER = 4  # units that a worker has finished
# Files open at once, at least and at most: the next one is begun while the last units of one are
# under way. With two, 100 files of 40 MB came to an H200 at a quarter of the rate of four.
_OPEN_SHARDS = 2
_MOST_OPEN_SHARDS = 16
# Chunks that are cut before the workers begin: while they work, it took 10 ms instead of 2.
_CUT_ALONE = 1024
_LOOK_S = 0.05  # between two checks of open files, while there is nothing to read


def stream(transfer: Transfer, sink: Sink, ledger: Ledger) -> StreamStats:
    """Run a plan and return its statistics; the ledger counts scratch and staging.

    Ctrl-C, or the error of the application's handler for it, is raised after work under way.
    """
    begun = time.perf_counter()
    with deferred_interrupt() as interrupt, crew_of(transfer, sink, ledger, interrupt) as crew:
        job, plan = crew.job, transfer.plan
        units = job.units()
        opened: deque[int] = deque()  # shards
        submitted: Counter[int] = Counter()  # units, by shard
        try:
            together = batches(units, job, plan.threads)
            for shard, of_shard in groupby(together, lambda batch: batch[0][0].shard):
                while len(opened) >= _OPEN_SHARDS and (
                    len(opened) >= _MOST_OPEN_SHARDS
                    or crew.is_enough(sum(submitted[other] for other in opened))
                    or crew.has_done(opened[0])
                ):
                    crew.drain(opened.popleft())
                opened.append(shard)
                reader = job.open(shard)
                for batch in of_shard:
                    interrupt.check()
                    for each in (batch, *job.parts()):
                        crew.hand_out(reader, each)
                        submitted[shard] += len(each)
                job.has_begun(shard)
            crew.drain()
            while parts := job.parts():  # of the weights that were quantized last
                for each in parts:
                    crew.hand_out(reader, each)
                crew.drain()
            if job.first_reads:
                job.stats.transfer_seconds = time.perf_counter() - min(job.first_reads)
        except BaseException as error:
            job.fail(error)
            raise
        crew.end()  # before the files are closed
        job.close_all()
        for casts in job.casts.values():
            for index, counts in casts.all_counts().items():
                job.count(index, counts)
        interrupt.check()  # it came when the last byte had been placed
        job.stats.seconds = time.perf_counter() - begun
        return job.stats


@contextmanager
def crew_of(transfer: Transfer, sink: Sink, ledger: Ledger, interrupt: Interrupt) -> Iterator[Crew]:
    """Yield the workers of a transfer, with scratch and staging; close all of it at the end."""
    plan = transfer.plan
    with ExitStack() as stack:
        stack.push(lambda _, error, __: without_locals(error))  # last, when all threads have ended
        for device in plan.devices:
            stack.enter_context(ledger.lease(device.device, device.scratch_nbytes))
        if plan.host_nbytes:
            stack.enter_context(ledger.lease(STAGING, plan.host_nbytes))
        job = Job(transfer, sink)
        stack.callback(job.close_all)  # after the threads of workers and casts, which read
        for name in job.casting:
            casts = DeviceCasts(name, transfer.devices[name], plan, transfer.checkpoint)
            job.casts[name] = stack.enter_context(closing(casts))
        crew = Crew(job, plan.threads, interrupt)
        stack.callback(crew.join)
        yield crew


def batches(units: Iterator[WorkItem], job: Job, workers: int) -> Iterator[Sequence[WorkItem]]:
    """Yield batches of units for one worker each, smaller towards the end of the load.

    Only units that a device copies in bulk are joined: waking a thread costs more than reading one.
    """
    share = 2 * max(workers, 1)
    ahead: deque[WorkItem] = deque()
    chunks = 0
    while chunks < _CUT_ALONE and (unit := next(units, None)) is not None:
        ahead.append(unit)
        chunks += len(unit)
    ahead.extend(islice(units, max(BATCH_UNITS * share - len(ahead), 0)))
    while ahead:
        most = min(BATCH_UNITS, len(ahead) // share)
        batch = [ahead.popleft()]
        while len(batch) < most and _go_together(batch[0], ahead[0], job):
            batch.append(ahead.popleft())
        yield batch
        ahead.extend(islice(units, len(batch)))


def _go_together(a: WorkItem, b: WorkItem, job: Job) -> bool:
    """Whether two units are of one shard, and a device copies both in bulk."""
    one, other = a[0], b[0]
    bulk = all(job.is_bulk(job.plan.placements[chunk.placement].kind) for chunk in (one, other))
    return one.shard == other.shard and bulk


class Crew:
    """The workers of a load, and the two queues between them and the streaming thread."""

    def __init__(self, job: Job, threads: int, interrupt: Interrupt) -> None:
        self.job = job
        self._interrupt = interrupt
        self._work: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[Outcome] | None] = queue.SimpleQueue()
        self._in_flight: Counter[int] = Counter()  # units, by shard
        staged = not all(info.host_visible for info in job.infos.values())
        # Units for each worker: one for each of its slots and one that waits, or more if they
        # are reported or handed out together. A failure loses begun and unfinished work.
        self._reported_together = _REPORTED_TOGETHER if staged else 1
        self._ahead = units_ahead(staged=staged)
        self._most_in_flight = self._ahead * threads
        self._stopped = threading.Event()
        if job.lanes > 1:  # these threads are the calling one's, which waits for no lock then
            threads = 0
        self._inline = Worker(job) if threads == 0 else None
        self._threads: list[threading.Thread] = []
        self._to_start = threads
        self._failures: list[BaseException] = []
        interrupt.wake = self.wake

    def hand_out(self, reader: Reader, batch: Sequence[WorkItem]) -> None:
        """Allocate a batch's parameters, and submit it; waits for device memory that it needs."""
        while not self.job.has_room(batch):
            self.wait()
        self.job.begin(batch)
        self.submit(reader, batch)

    def submit(self, reader: Reader, batch: Sequence[WorkItem]) -> None:
        """Queue units for the workers; waits while enough are under way. Raises workers' errors."""
        if self._to_start:
            self._start()
        if self._inline is not None:
            self._note_read()
            self._take_all(self._inline.run_batch(reader, batch))
            return
        while self._in_flight.total() >= self._most_in_flight:
            self._receive()
        self._in_flight[batch[0][0].shard] += len(batch)
        self._work.put((reader, batch))

    def _start(self) -> None:
        """Start one more worker; called for each batch, so that the first read waits for one start.

        Starting eight workers takes 8 ms while the first works, on one H200's host.
        """
        number = len(self._threads)
        self._threads.append(threading.Thread(target=self._serve, name=f"streamload-{number}"))
        try:
            self._threads[-1].start()
            self._to_start -= 1
        except RuntimeError:  # the limit of threads is reached: go on with those that run
            del self._threads[-1]
            self._to_start = 0
            self._inline = None if number else Worker(self.job)
            self._most_in_flight = self._ahead * number

    def wait(self) -> None:
        """Wait until some work item under way has finished; raises workers' errors."""
        if self._inline is not None:
            self._take_all(self._inline.settle())
        else:
            assert self._in_flight.total(), "more is held than planned"
            self._receive()

    def is_enough(self, units: int) -> bool:
        """Whether ``units`` work items keep all workers busy: no more are under way at once."""
        return units >= self._most_in_flight

    def has_done(self, shard: int | None = None) -> bool:
        """Whether workers have no work item under way, at all or of a shard, given by index."""
        return not (self._in_flight.total() if shard is None else self._in_flight[shard])

    def drain(self, shard: int | None = None) -> None:
        """Wait for all work items under way, or all of one shard; raises workers' errors."""
        if self._inline is not None:
            self._take_all(self._inline.settle())
        while self._in_flight[shard] if shard is not None else self._in_flight.total():
            self._receive()

    def end(self) -> None:
        """End the threads after the last work item; raises the error of closing their staging."""
        self.join()
        if self._failures:
            raise self._failures[0]

    def join(self) -> None:
        """Wait for work items under way, drop queued ones, close all staging and end all threads.

        May be called again; raises nothing.
        """
        self._stopped.set()
        self._interrupt.wake = nothing
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                _insist(thread.join)
        if self._inline is not None:
            self._close(self._inline)
        errors: list[BaseException | None] = [*self._failures]
        while not self._done.empty():  # nobody receives those
            errors += [error for _, _, error in self._done.get() or ()]
        for error in errors:
            without_locals(error)  # they refer to the crew: a cycle

    def _close(self, worker: Worker) -> None:
        failure = worker.close()
        if failure is not None:
            self._failures.append(failure)

    def wake(self) -> None:
        """Wake the streaming thread for Ctrl-C; may interrupt that thread at any instruction."""
        self._done.put(None)
        # this thread may be waiting for a server, and hold its locks
        if self._inline is not None and self._interrupt.will_raise:
            threading.Thread(target=self.job.shards.stop, name="streamload-stop").start()

    @property
    def is_inline(self) -> bool:
        """Whether `hand_out` does the work itself, in the thread that calls it."""
        return self._inline is not None

    def settle(self, most: int | None = None) -> bool:
        """Take what is under way of an inline worker, after its end; return whether any was.

        ``most``: units, the first ones; None: all.
        """
        outcomes = [] if self._inline is None else [*islice(self._inline.settle(), most)]
        self._take_all(outcomes)
        return bool(outcomes)

    def reads_nothing(self, units: Sequence[WorkItem]) -> bool:
        """Whether an inline worker lets the device read these units, of which there are some."""
        return self._inline is not None and self._inline.reads_nothing(units)

    def listen(self, seconds: float) -> bool:
        """Wait for finished work items or `wake`; return whether any came within ``seconds``."""
        came = False
        with suppress(queue.Empty):
            while True:
                self._receive(0.0 if came else seconds)
                came = True
        return came

    def _receive(self, seconds: float | None = None) -> None:
        outcomes = self._done.get(timeout=seconds)
        if outcomes is None:  # woken by Ctrl-C
            self._interrupt.check()
            return
        for unit, _, _ in outcomes:
            if unit:  # a worker that died has none
                self._in_flight[unit[0].shard] -= 1
        self._take_all(outcomes)

    def _take_all(self, outcomes: Iterable[Outcome]) -> None:
        for unit, counts, error in outcomes:
            if error is not None:
                self._interrupt.check()  # Ctrl-C may be the cause
                raise error
            self.job.done(unit, counts)
        self.job.transfer.progress(self.job.stats.read_nbytes)

    def _note_read(self) -> None:
        """Record the time of the first read; several workers may do so at the same time."""
        if not self.job.first_reads:
            self.job.first_reads.append(time.perf_counter())

    def _serve(self) -> None:
        """Run a worker in its thread until `join`; its error goes to the streaming thread."""
        worker = Worker(self.job)
        try:
            worker.open()
            self._work_off(worker)
        except BaseException as error:
            self._done.put([((), [], error)])
        self._close(worker)

    def _work_off(self, worker: Worker) -> None:
        finished: list[Outcome] = []
        while True:
            try:
                item = self._work.get_nowait()
            except queue.Empty:
                # nothing to overlap with: report finished units before waiting
                finished += worker.settle()
                if finished:
                    self._done.put(finished)
                    finished = []
                while True:
                    with suppress(queue.Empty):
                        item = self._work.get(timeout=_LOOK_S)
                        break
                    self.job.shards.check()  # files may change while the thread waits
            if item is None or self._stopped.is_set():
                break
            reader, batch = item
            self._note_read()
            for outcome in worker.run_batch(reader, batch):
                finished.append(outcome)
                if self._stopped.is_set() or outcome[2] is not None:
                    break
            # several at once: each report wakes the streaming thread, which takes the
            # interpreter's lock from workers that have just read
            failed = bool(finished) and finished[-1][2] is not None
            if failed or len(finished) >= self._reported_together:
                self._done.put(finished)
                finished = []
            if failed:  # the state of its slots is unknown
                return


def _insist(wait: Callable[[], object]) -> None:
    """Call ``wait`` until it returns, even if a signal handler raises: threads must be joined."""
    while True:
        try:
            wait()
            return
        except BaseException:
            continue
