"""What brings layers into slots of a device: a thread, its workers, and what they share.

One lock, `Bringer._lock`, guards all state below. R is the thread that runs the model, S the
thread "streamload-rounds", W a worker of the crew, C the thread that waits for tickets (`Reaper`).
If the crew has no workers, S reads itself, and R the experts that it waits for: to wake another
thread takes about as long as to read one. Layers that the device reads itself, from locked pages,
R hands out, too, as it releases others. The device orders copies into a slot after the work that
used it (`_uses`), or else C waits for that. Who reads holds `_reading`, taken before `_lock`.

| state of a layer | meaning | begins with |
|---|---|---|
| (no `HeldLayer`) | it has no slot | `_drop`, by S, R or C |
| FILLING | copies into its slot are being started | `_take`, by S or R |
| SENT | all were started; `unsure_nbytes` may run or fail | `_filled`, by who reads |
| SPOILED | it may have wrong bytes; dropped when nothing uses it | `_forget`, by S or `pause` |

| field | meaning | changed by |
|---|---|---|
| `_users`, `_runner`, `_wanted` | layers in use, their thread, layers that it waits for | R |
| `calls` | calls of layers under way, one inside the other; see `call_layer` | R |
| `_used` | experts computed with until the next `ask` | R |
| `_active_s` | the time of R's last `ask` or `release` | R |
| `_unproved` | layers in use or used, whose copies may still fail | R, who reads |
| `_left` | the layer that R released last and left to S, to wait for the end of its copies | R |
| `_held`, `_holds`, `_busy` | layers with slots; by slot; filled or computed with | S, W, C, R |
| `_uses` | by slot and stream, the last work that used it, for copies to wait for | R, `pause` |
| `_error`, `_raised` | the error that ended S, for R to raise; the one that R raised | S, R |
| `_began_for` | `_wanted` of R's wait in which S began all that it reads; another: unknown | S |
| `_failed` | the error of what R read, to end S | R, S |
| `_thread`, `_crew` | S and its crew, while they run | R starts, S ends |
| `_reader` | R's thread while it holds `_reading` | R |
| `_closed` | why no layer can be acquired any more; "" while open | any, without the lock |
| `_paused` | whether there are no slots, until `resume` | `pause`, `resume` |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from typing import Any

from streamload.core.interrupt import Interrupt, without_locals
from streamload.core.memory import STAGING, Ledger
from streamload.devices.base import Buffer, QueuedWork, Ticket
from streamload.errors import OffloadError
from streamload.offloading.completion import Reaper, started
from streamload.offloading.holding import Holding
from streamload.offloading.slots import ExpertCache, Layer, LayerState, RoundStats, Slots
from streamload.streaming.loop import Crew, crew_of
from streamload.streaming.memory_watch import PassWatch
from streamload.streaming.state import Sink, Transfer, WorkItem, written_nbytes

# After this time without a pass, threads end, and staging and files are released until the next.
_IDLE_S = 2.0
_LOOK_S = 0.1  # interval of checks for that, and for the end of the program


class Bringer(Holding, Sink):
    """The part of `Rounds` that fills slots, in whichever thread."""

    def __init__(
        self,
        transfer: Transfer,
        layers: Sequence[Layer],
        memory: Slots,
        experts: ExpertCache | None = None,
        watch: PassWatch | None = None,
    ) -> None:
        """Start no thread.

        ``layers``: those of a pass in the expected order, then all experts; ``watch``: what R looks
        at before each layer, or None.
        """
        super().__init__(transfer.plan, layers, memory, experts)
        self.stats = RoundStats(stalls=[0.0] * self._first_expert)
        (self._device,) = transfer.devices.values()
        largest = max([1, *(layer.read_nbytes for layer in layers)])
        self._transfer, self._watch = replace(transfer, refill_nbytes=largest), watch
        self._layer_of = {p: n for n, layer in enumerate(layers) for p in layer.placements}
        self._active_s = 0.0
        self.calls = 0
        self._unproved: set[int] = set()
        self._left: int | None = None
        self._runner: int | None = None
        self._work: dict[int, list[WorkItem]] = {}  # by layer
        self._error: BaseException | None = None
        self._raised: BaseException | None = None
        self._began_for: Sequence[int] = ()
        self._failed: BaseException | None = None
        self._closed = ""
        self._paused = False
        self._process = os.getpid()
        self._reading = threading.Lock()
        self._reader: int | None = None
        self._lock = threading.RLock()  # a signal may interrupt the methods of a condition
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._crew: Crew | None = None
        self._reaper = Reaper()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = started(self._serve, "streamload-rounds", self._wake)

    def _wake(self) -> None:
        if (crew := self._crew) is not None:
            crew.wake()

    def _serve(self) -> None:
        error: BaseException | None = None
        with self._lock:
            self._began_for = self._wanted
        try:
            self._bring()
        except BaseException as failure:
            without_locals(failure)
            error = failure
        with self._lock:
            self._crew = self._thread = self._failed = None
            for number, held in [*self._held.items()]:  # all workers have ended
                held.unsure_nbytes = 0
                self._settle(number)
            self._forget(everything=error is not None)
            self._reaper.end()
            # If no thread used wrong bytes, or has waited since before the read began, `acquire`
            # just tries again: the error may be of a pass that has ended.
            waits = bool(self._wanted) and self._wanted is self._began_for
            told = (waits or bool(self._unproved)) and error is not self._raised
            self._error, self._raised, self._began_for = error if told else None, None, ()
            del error  # its traceback has this call: a cycle
            self._unproved.clear()
            self._changed.notify_all()

    def _forget(self, *, everything: bool) -> None:
        """Mark layers being filled, or all if ``everything``, as spoiled: to be read again."""
        for number, held in [*self._held.items()]:
            held.tickets.clear()
            if held.state is LayerState.FILLING:
                held.unsure_nbytes = 0
            elif not everything:
                continue
            held.state = LayerState.SPOILED
            self._settle(number)
        self.experts.keep({each - self._first_expert for each in self._held})

    def _let_go(self) -> None:
        """Wait, with the lock, until nothing is under way, and drop all that refers to slots."""
        while self._busy or (self._thread is not None and self._crew is None):
            self._changed.wait(_LOOK_S)
        self._forget(everything=True)
        if self._crew is not None:
            self._crew.job.buffers.clear()

    def _leave_files(self, _: Any, error: BaseException | None, __: Any) -> None:
        """Close mapped files once no layer is in use: exit callback of an `ExitStack`.

        ``error``: the exception that ended the ``with`` block, or None. If a thread waits for a
        layer inside another one, that thread raises ``error``; if there is no error, the files stay
        open for the next thread of `_bring`.
        """
        with self._lock:
            while self._users:
                if self._wanted and error is None:  # inside a layer: the next thread closes them
                    return
                # the waiting layer and the one around it have to end
                if self._wanted and error is not self._raised:
                    self._error = error
                    self._changed.notify_all()
                self._changed.wait(_LOOK_S)
            self._forget(everything=True)
            assert self._views is not None
            self._views.close_files()

    def _bring(self) -> None:
        """Read layers into slots with worker threads, until idle for `_IDLE_S` seconds."""
        plan = self._transfer.plan
        ledger = Ledger(
            {d.device: d.scratch_nbytes for d in plan.devices} | {STAGING: plan.host_nbytes}
        )
        if self._views is not None:
            self.bring = self._views.bring
        with crew_of(self._transfer, self, ledger, Interrupt(None)) as crew, ExitStack() as stack:
            if self._views is not None:
                stack.push(self._leave_files)
            stack.callback(crew.join)
            try:
                try:
                    self._go_round(crew)
                finally:
                    with self._reading, self._lock:
                        self._crew = None  # R reads no more
                crew.drain()
            except BaseException as error:
                with self._lock:
                    self._forget(everything=True)  # before staging goes, and with it its tickets
                crew.job.fail(error)
                raise
            with self._lock:
                for held in self._held.values():
                    held.tickets.clear()
            crew.end()

    def _go_round(self, crew: Crew) -> None:
        idle_since = time.monotonic()
        with self._lock:
            self._crew = crew
        while True:
            after = list[QueuedWork]()
            with self._lock:
                if self._closed or (self._runner is None and _program_ends()):
                    break
                if self._failed is not None:
                    error, self._failed = self._failed, None
                    raise error
                if crew.has_done():
                    self._began_for = self._wanted
                picked = self._take_experts(self.experts.together if crew.is_inline else 1)
                if not (picked or self._paused) and (layer := self._pick_layer()) is not None:
                    after = self._take(*layer)
                    picked = [layer]
                if not picked and self._is_idle(idle_since):
                    self._crew = None
                    break
            if not picked:
                with self._reading:
                    came = self._needs_ends() and crew.settle(1)
                if came or crew.listen(_LOOK_S):
                    idle_since = time.monotonic()
                continue
            with self._reading:
                self._hand_out(picked, crew, after)
            idle_since = time.monotonic()

    def _needs_ends(self) -> bool:
        """Whether S has to wait for copies under way: R did not as it released their layers."""
        with self._lock:
            waits = not all(map(self._is_there, self._wanted))
            pauses = time.monotonic() - self._active_s > _LOOK_S
            return self._is_unsure(self._left) or waits or pauses or self._paused

    def _hand_out(
        self, picked: Sequence[tuple[int, int]], crew: Crew, after: Sequence[QueuedWork] = ()
    ) -> None:
        """Fill layers, each with its first slot, or let workers fill them, ``after`` such work."""
        job, units = crew.job, list[WorkItem]()
        job.after = after if crew.is_inline else ()
        for work in after if not crew.is_inline else ():  # of a crew before
            work.wait()
        for number, first in picked:
            layer = self._layers[number]
            buffers = self.memory.to_fill(number, first)
            job.buffers.update(zip(layer.placements, buffers, strict=True))
            if number >= self._first_expert:
                self.experts.count_read(number - self._first_expert, layer.read_nbytes)
            if number not in self._work:  # made late: of very many experts few are chosen
                self._work[number] = [*job.units(layer.placements)]
            if not self._work[number]:
                self._filled(number)
            units += self._work[number]
            self.stats.read_nbytes += layer.read_nbytes
        for shard, group in groupby(units, lambda unit: unit[0].shard):
            for batch in [[*group]] if crew.is_inline else ([unit] for unit in group):
                crew.hand_out(job.open(shard), batch)

    def _reads_here(self) -> bool:
        """Whether R reads, too: S has no workers."""
        return self._crew is not None and self._crew.is_inline

    def _here(self, bring: Callable[[Crew], None], *, raises: bool) -> bool:
        """Let R bring layers itself; return False if it cannot, or S does that now.

        ``raises``: whether R raises the error that ends S.
        """
        if not self._reads_here() or self._reading.locked() or self._failed is not None:
            return False
        with self._reading:
            self._reader = threading.get_ident()
            try:
                if self._crew is None:
                    return False
                bring(self._crew)
            except BaseException as error:
                without_locals(error)
                raises = raises or not isinstance(error, Exception)
                with self._lock:
                    self._failed, self._raised = error, error if raises else self._raised
                    self._forget(everything=True)  # before another layer is used, or brought
                self._wake()
                if raises:
                    raise
            finally:
                self._reader = None
        return True

    def _check_not_reading(self, done: str) -> None:
        """Raise OffloadError if this thread brings a layer, and a signal handler calls."""
        if self._reader == threading.get_ident():
            raise OffloadError(f"it cannot be {done} while a layer is brought: let that end first")

    def _bring_here(self, numbers: Sequence[int]) -> None:
        """Read those of some experts of an `ask` that nobody reads, unless others do it."""
        if all(number in self._held for number in numbers):
            return

        def read(crew: Crew) -> None:
            while True:
                with self._lock:
                    lacks = sum(number not in self._held for number in numbers)
                    picked = self._take_experts(lacks)
                self._hand_out(picked, crew)
                if not picked and not (lacks and crew.settle()):  # its end may make slots free
                    return

        self._here(read, raises=True)

    def _bring_next(self, released: int) -> None:
        """Let the device read the next layers, in place of one that was released, if it can."""

        def settle(crew: Crew) -> None:
            while self._is_unsure(released) and crew.settle(1):
                pass

        begun = time.perf_counter()
        wakes = not self._here(settle, raises=True)
        self.stats.stalls[released] += time.perf_counter() - begun

        def hand_out(crew: Crew) -> None:
            nonlocal wakes
            while True:
                with self._lock:
                    picked = None if self._paused or self._closed else self._pick_layer()
                    if picked is None:
                        return
                    if not crew.reads_nothing(self._work.get(picked[0], ())):
                        wakes = True
                        return
                    after = self._take(*picked)
                self._hand_out([picked], crew, after)

        there = self._here(hand_out, raises=False)
        with self._lock:
            self._left = released if wakes else None
        if wakes or not there:
            self._wake()

    def _is_unsure(self, number: int | None) -> bool:
        """Whether copies to a layer may not have ended."""
        held = None if number is None else self._held.get(number)
        return held is not None and held.unsure_nbytes > 0

    def _is_idle(self, since: float) -> bool:
        computing = any(self._held[number].computing for number in self._busy)
        busy = self._runner is not None or self._fills() or computing
        idle_s = time.monotonic() - max(since, self._active_s)
        return _program_ends() or (not busy and idle_s >= _IDLE_S)

    def begin(self, indices: Sequence[int]) -> list[Buffer]:
        """Raise AssertionError (`Sink`): buffers are in slots before units are handed out."""
        raise AssertionError(f"placements {indices} have no slots")

    def sent(self, unit: WorkItem, tickets: Sequence[Ticket]) -> None:
        """Note that a unit's copies have been started (`Sink`); ``tickets``: those not ended."""
        number = self._layer_of[unit[0].placement]
        with self._lock:
            held = self._held.get(number)
            if held is None:  # forgotten
                return
            held.tickets += tickets
            held.left_nbytes -= written_nbytes(unit)
            if not held.left_nbytes:
                self._filled(number)

    def _filled(self, number: int) -> None:
        """Note that all copies of a layer have been started."""
        with self._lock:
            held = self._held[number]
            if held.state is LayerState.FILLING:
                held.state = LayerState.SENT
                if not self._fills():
                    self.stats.busy_s += time.perf_counter() - self._busy_since
            self._settle(number)
            if self._waits_inside() or all(map(self._is_there, self._wanted)):
                self._changed.notify_all()

    def ended(self, unit: WorkItem) -> None:
        """Note that a unit's copies have ended (`Sink`)."""
        number = self._layer_of[unit[0].placement]
        with self._lock:
            held = self._held.get(number)
            if held is None:  # forgotten
                return
            held.unsure_nbytes -= written_nbytes(unit)
            if not held.unsure_nbytes:  # until then the device waits before each use
                held.tickets.clear()
                self._unproved.discard(number)
                self._settle(number)
            if self._waits_inside() or self._paused:
                self._changed.notify_all()

    def _has_computed(self, numbers: Sequence[int], ticket: Ticket) -> None:
        """Note that the device has computed with layers, so that their slots can be filled."""
        with self._lock:
            for number in numbers:
                if (held := self._held.get(number)) is not None:
                    held.computing.discard(ticket)
                    self._settle(number)
            self._changed.notify_all()
            self._wake()

    def _waits_inside(self) -> bool:
        """Whether R waits for a layer inside of another, and has to check whether it has room."""
        return bool(self._users and self._wanted and self._wanted[0] < self._first_expert)


def _program_ends() -> bool:
    return not threading.main_thread().is_alive()
