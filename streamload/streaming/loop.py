"""The one loop: read, cast, place. The only threads of a load on one node are here.

The calling thread prepares parameters in plan order (old memory is released and new memory is
allocated there, since frameworks are not thread-safe) and hands units of work to a few workers
(`worker`); it reports progress and finishes parameters, too (`state`). With no workers, the
calling thread does their work as well.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import groupby, islice

from streamload.core.interrupt import Interrupt, deferred_interrupt, nothing
from streamload.core.memory import STAGING, Ledger
from streamload.files.local import Reader
from streamload.planning.plan import BATCH_UNITS, units_ahead
from streamload.streaming.device_casts import DeviceCasts
from streamload.streaming.state import Job, Sink, StreamStats, Transfer, WorkItem
from streamload.streaming.worker import Outcome, Worker

_TOLD_TOGETHER = 4  # units that a worker has finished
# The next is begun while the last units of one are under way, and as many more as it takes to keep
# the workers busy: with two, 100 files of 40 MB came to an H200 at a quarter of the rate of four.
_OPEN_SHARDS = 2
_MOST_OPEN_SHARDS = 16
# Chunks that are cut before the workers begin: while they work it took 10 ms and not 2.
_CUT_ALONE = 1024
_LOOK_S = 0.05  # while there is nothing to read


def stream(transfer: Transfer, sink: Sink, ledger: Ledger) -> StreamStats:
    """Run a plan; scratch and staging are reserved in the ledger.

    Ctrl-C, or the error of its handler in the application, comes when work under way has ended.
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
            while parts := job.parts():  # of what was quantised last
                for each in parts:
                    crew.hand_out(reader, each)
                crew.drain()
            job.stats.transfer_seconds = time.perf_counter() - job.first_read
        except BaseException as error:
            job.fail(error)
            raise
        finally:
            crew.join()  # before the readers are closed
            job.close_all()
        crew.end()
        for casts in job.casts.values():
            for index, counts in casts.all_counts().items():
                job.count(index, counts)
        interrupt.check()  # it came when the last byte had been placed
        job.stats.seconds = time.perf_counter() - begun
        return job.stats


@contextmanager
def crew_of(transfer: Transfer, sink: Sink, ledger: Ledger, interrupt: Interrupt) -> Iterator[Crew]:
    """The workers of a transfer, with its scratch and staging; at the end all of it is closed."""
    plan = transfer.plan
    with ExitStack() as stack:
        for device in plan.devices:
            stack.enter_context(ledger.lease(device.device, device.scratch_nbytes))
        if plan.host_nbytes:
            stack.enter_context(ledger.lease(STAGING, plan.host_nbytes))
        job = Job(transfer, sink)
        for name in job.casting:
            casts = DeviceCasts(name, transfer.devices[name], plan, transfer.checkpoint)
            job.casts[name] = stack.enter_context(closing(casts))
        stack.callback(job.close_all)
        crew = Crew(job, plan.threads, interrupt)
        stack.callback(crew.join)
        yield crew


def batches(units: Iterator[WorkItem], job: Job, workers: int) -> Iterator[Sequence[WorkItem]]:
    """Join units that go as they are into batches, smaller towards the end of the load.

    Waking a thread for each unit costs more than reading it.
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
    """Whether both are of one shard, and go as they are."""
    one, other = a[0], b[0]
    bulk = all(job.is_bulk(job.plan.placements[chunk.placement]) for chunk in (one, other))
    return one.shard == other.shard and bulk


class Crew:
    """The workers, and the two queues between them and the streaming thread."""

    def __init__(self, job: Job, threads: int, interrupt: Interrupt) -> None:
        self.job = job
        self._interrupt = interrupt
        self._work: queue.SimpleQueue[tuple[Reader, Sequence[WorkItem]] | None] = (
            queue.SimpleQueue()
        )
        self._done: queue.SimpleQueue[list[Outcome] | None] = queue.SimpleQueue()
        self._in_flight: Counter[int] = Counter()  # units, by shard
        staged = not all(job.host_visible.values())
        # Units for each worker: one for each of its slots and one that waits, or more where they
        # are reported or handed out together. Begun and unfinished work is lost by a failure.
        self._told_together = _TOLD_TOGETHER if staged else 1
        self._ahead = units_ahead(staged=staged)
        self._most_in_flight = self._ahead * threads
        self._stopped = threading.Event()
        self._inline = Worker(job) if threads == 0 else None
        self._threads: list[threading.Thread] = []
        self._to_start = threads
        self._failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        interrupt.wake = self.wake

    def hand_out(self, reader: Reader, batch: Sequence[WorkItem]) -> None:
        """Make room for a batch, and submit it."""
        while not self.job.has_room(batch):
            self.wait()
        self.job.begin(batch)
        self.submit(reader, batch)

    def submit(self, reader: Reader, batch: Sequence[WorkItem]) -> None:
        """Hand out units; waits while enough are under way. Raises what a worker met."""
        if self._to_start:
            self._start()
        if self._inline is not None:
            self.job.first_read = min(self.job.first_read, time.perf_counter())
            for unit in batch:
                self._take_all(self._inline.run(reader, unit))
            return
        while self._in_flight.total() >= self._most_in_flight:
            self._receive()
        self._in_flight[batch[0][0].shard] += len(batch)
        self._work.put((reader, batch))

    def _start(self) -> None:
        """Start a worker, one for each batch: to start all at first would keep the first waiting.

        Eight take 8 ms while the first works, on one H200's host.
        """
        number = len(self._threads)
        self._threads.append(threading.Thread(target=self._serve, name=f"streamload-{number}"))
        try:
            self._threads[-1].start()
            self._to_start -= 1
        except RuntimeError:  # no more threads under this limit: those that there are will do
            del self._threads[-1]
            self._to_start = 0
            self._inline = None if number else Worker(self.job)
            self._most_in_flight = self._ahead * number

    def wait(self) -> None:
        """Wait for something under way. Raises what a worker met."""
        if self._inline is not None:
            self._take_all(self._inline.settle())
        else:
            assert self._in_flight.total(), "more is held than planned"
            self._receive()

    def is_enough(self, units: int) -> bool:
        """Whether no more units than these can be under way at once."""
        return units >= self._most_in_flight

    def has_done(self, shard: int) -> bool:
        """Whether nothing of a shard is under way."""
        return not self._in_flight[shard]

    def drain(self, shard: int | None = None) -> None:
        """Wait for everything under way, or all of one shard. Raises what a worker met."""
        if self._inline is not None:
            self._take_all(self._inline.settle())
        while self._in_flight[shard] if shard is not None else self._in_flight.total():
            self._receive()

    def end(self) -> None:
        """End the crew when all is done. Raises what closing the staging met."""
        self.join()
        if not self._failures.empty():
            raise self._failures.get()

    def join(self) -> None:
        """Let the units under way end, drop the others, close all staging and end all threads.

        May be called again, and raises nothing.
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

    def _close(self, worker: Worker) -> None:
        failure = worker.close()
        if failure is not None:
            self._failures.put(failure)

    def wake(self) -> None:
        """Wake the streaming thread; called between any two instructions."""
        self._done.put(None)
        # the thread itself may wait for a server, and hold locks of that
        if self._inline is not None and self._interrupt.will_raise:
            threading.Thread(target=self.job.stop, name="streamload-stop").start()

    def listen(self, seconds: float) -> bool:
        """Wait at most so long for a finished unit, or for `wake`; whether there was either."""
        if self._inline is not None:
            self._take_all(self._inline.settle())
        try:
            self._receive(seconds)
        except queue.Empty:
            return False
        return True

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
                self._interrupt.check()  # which may be why
                raise error
            self.job.done(unit, counts)
        self.job.tell()

    def _serve(self) -> None:
        """The function of a worker's thread. Its error ends the load, which waits for it."""
        worker = Worker(self.job)
        try:
            worker.open()
            self._work_off(worker)
        except BaseException as error:
            self._done.put([((), [], error)])
        self._close(worker)

    def _wait_for_work(self) -> tuple[Reader, Sequence[WorkItem]] | None:
        """The next item; between looks, writers of open files get their turn soon."""
        while True:
            with suppress(queue.Empty):
                return self._work.get(timeout=_LOOK_S)
            self.job.check_files()

    def _work_off(self, worker: Worker) -> None:
        finished: list[Outcome] = []
        while True:
            try:
                item = self._work.get_nowait()
            except queue.Empty:
                # nothing to overlap with: hand over what is finished before going to sleep
                finished += worker.settle()
                if finished:
                    self._done.put(finished)
                    finished = []
                item = self._wait_for_work()
            if item is None or self._stopped.is_set():
                break
            reader, batch = item
            self.job.first_read = min(self.job.first_read, time.perf_counter())
            for outcome in worker.run_batch(reader, batch):
                finished.append(outcome)
                if self._stopped.is_set() or outcome[2] is not None:
                    break
            # several at once: the streaming thread wakes up for each time, and takes the lock of
            # the interpreter from workers that have just read
            failed = bool(finished) and finished[-1][2] is not None
            if failed or len(finished) >= self._told_together:
                self._done.put(finished)
                finished = []
            if failed:  # of its slots nothing is known any more
                return


def _insist(wait: Callable[[], object]) -> None:
    """Wait to the end even if a signal handler raises: threads are always joined."""
    while True:
        try:
            wait()
            return
        except BaseException:
            continue
