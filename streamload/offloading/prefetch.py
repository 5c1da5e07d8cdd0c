"""Bring layers into slots of a device, pass after pass, before the device computes with them.

A pass is one call of the model. `Rounds` is a load that repeats in each. The thread that runs the
model asks for layers in an order that is learned from it. Another thread picks the layer that is
needed next and a slot, and the workers of `streaming.loop.Crew` fill it, after the device has
computed with the layer that was there. Experts have slots of their own, from which `ExpertCache`
evicts.

One lock, `Rounds._lock`, guards all state below. R is the thread that runs the model, S the thread
"streamload-rounds", W a worker of the crew, C the thread that waits for tickets (`Reaper`). If the
crew has no workers, S reads itself, and R the experts that it waits for: to wake another thread
takes about as long as to read one. Layers that the device reads itself, from locked pages, R hands
out, too, as it releases others. The device orders copies into a slot after the work that used it
(`_uses`), or else C waits for that. Who reads holds `_reading`, taken before `_lock`.

| state of a layer | meaning | begins with |
|---|---|---|
| (no `HeldLayer`) | it has no slot | `_drop`, by S, R or C |
| FILLING | copies into its slot are being started | `_take`, by S or R |
| SENT | all were started; `unsure_nbytes` may run or fail | `_filled`, by who reads |
| SPOILED | it may have wrong bytes; dropped when nothing uses it | `_forget`, by S or `pause` |

| field | meaning | changed by |
|---|---|---|
| `users`, `_runner`, `_wanted` | layers in use, their thread, layers that it waits for | R |
| `calls` | calls of layers under way, one inside the other; see `call` | R |
| `_used` | experts computed with until the next `ask` | R, `pause` |
| `_active_s` | the time of R's last `ask` or `release` | R |
| `_unproved` | layers in use or used, whose copies may still fail | R, who reads |
| `_left` | the layer that R released last and left to S, to wait for the end of its copies | R |
| `_held`, `_holds`, `_busy` | layers with slots; by slot; filled or computed with | S, W, C, R |
| `_uses` | by slot and stream, the last work that used it, for copies to wait for | R, `open` |
| `_error`, `_raised` | the error that ended S, for R to raise; the one that R raised | S, R |
| `_began_for` | `_wanted` of R's wait in which S began all that it reads; another: unknown | S |
| `_failed` | the error of what R read, to end S | R, S |
| `_thread`, `_crew` | S and its crew, while they run | R starts, S ends |
| `_reader` | R's thread while it holds `_reading` | R |
| `_closed` | why no layer can be acquired any more; "" while open | any, without the lock |
| `_paused`, `_ends` | whether there are no slots; whether S has to end | `pause`, `open` |
| `memory`, `_host`, `_transfer`, `_views`, `_nbytes`, `_work` | slots and their layers | `open` |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from queue import SimpleQueue
from typing import Any

from streamload.core.interrupt import Interrupt, started, without_locals
from streamload.core.memory import STAGING, Ledger, available_host_nbytes
from streamload.devices.base import Buffer, Device, QueuedWork, Ticket
from streamload.errors import OffloadError
from streamload.offloading.slots import (
    ExpertCache,
    FileViews,
    HeldLayer,
    HostFile,
    Layer,
    LayerState,
    Order,
    Slots,
)
from streamload.planning.moves import UNREAD
from streamload.streaming.loop import Crew, crew_of
from streamload.streaming.memory_watch import PassWatch
from streamload.streaming.state import Sink, Transfer, WorkItem, written_nbytes

# After this time without a pass, threads end, and staging and files are released until the next.
_IDLE_S = 2.0
_LOOK_S = 0.1  # interval of checks for that, and for the end of the program


class Rounds(Sink):
    """Brings layers that stream into their slots, ahead of the thread that runs the model.

    That thread, one at a time, calls `acquire` before it computes with a layer, and `release` once
    it has queued the work. Other threads start at a call, and end some time after the last. There
    are no slots before `open`, and after `pause`.

    Attributes:
        experts: their cache.
        read_nbytes: file bytes read in all passes.
        stalls: by layer, seconds that passes waited for it.
        misses: how often another layer was asked for than expected.
        busy_s: seconds in which copies of a layer were being started.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[Layer],
        experts: ExpertCache | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Start no thread.

        ``layers``: those of a pass in the expected order, then all experts; ``within``: entered by
        R while it asks for layers: it may `open` the slots.
        """
        self._device, self._layers, self._within = device, layers, within
        self.experts = experts if experts is not None else ExpertCache((), 0, len(layers))
        self._first_expert = len(layers) - self.experts.count
        self._layer_of = {p: n for n, layer in enumerate(layers) for p in layer.placements}
        self.read_nbytes, self.misses, self.busy_s = 0, 0, 0.0
        self.stalls = [0.0] * self._first_expert
        self._order = Order(self._first_expert)
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._reading = threading.Lock()
        self._lock = threading.RLock()  # a signal may interrupt the methods of a condition
        self._changed = threading.Condition(self._lock)
        self.users: list[int] = []  # each called inside the one before
        self._runner: int | None = None
        self._wanted: Sequence[int] = ()
        self.calls = 0
        self._used: list[tuple[Sequence[int], Ticket]] = []
        self._active_s = 0.0
        self._unproved: set[int] = set()
        self._left: int | None = None
        self._held: dict[int, HeldLayer] = {}
        self._holds: list[int | None] = []
        self._busy: set[int] = set()
        self._busy_since = 0.0
        self._uses: list[dict[int, QueuedWork]] = []
        self._error: BaseException | None = None
        self._raised: BaseException | None = None
        self._began_for: Sequence[int] = ()
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._crew: Crew | None = None
        self._reader: int | None = None
        self._reaper = Reaper()
        self._closed = ""
        self._paused, self._ends = True, False
        self._host: HostFile | None = None
        self._work: dict[int, list[WorkItem]] = {}  # by layer
        self.experts.keep(self._held)

    def open(
        self,
        transfer: Transfer,
        memory: Slots,
        watch: PassWatch | None = None,
        host: HostFile | None = None,
    ) -> None:
        """Use new slots, at first or after `pause`, of the same sizes each time.

        ``watch``: what R looks at before each layer; ``host``: closed with the slots.
        """
        if os.getpid() != self._process:
            self._reset()
        with self._lock:
            if self._thread is None:  # otherwise that goes on with its files and staging
                largest = max([1, *(layer.read_nbytes for layer in self._layers)])
                self._transfer, self._watch = replace(transfer, refill_nbytes=largest), watch
                kinds = [move.kind for move in transfer.plan.placements]
                copied = [0 if kind.cast in UNREAD else kind.nbytes for kind in kinds]
                self._nbytes = [sum(copied[at] for at in each.placements) for each in self._layers]
                self._work.clear()
            self._views = memory if isinstance(memory, FileViews) else None
            self._holds = [None] * (memory.count - self.experts.slots)
            self._uses = [{} for _ in self._holds]
            self.memory, self._host, self._paused = memory, host, False
            self._wake()

    # --- the thread that runs the model -----------------------------------------------------------

    def call(self, compute: Callable[[], Any]) -> Any:
        """Call a layer that streams; after the outermost call, end what interrupted ones left.

        Ctrl-C comes at the begin of a function, or after a call: the count is never left wrong.
        """
        self.calls += 1
        try:
            return compute()
        finally:
            self.calls -= 1
            if not self.calls:
                self.end_calls()

    def acquire(self, number: int) -> Sequence[Buffer]:
        """Wait until a layer is in its slots, and keep it until `release`.

        Returns one buffer for each tensor of the layer, on which the device may queue work.
        """
        with self._within():
            (first,) = self._acquire([number], self.stalls, number)
        if not self._reads_here():
            self._wake()  # the next may go where the one before was
        return self.memory.views(number, first)[0]

    def _acquire(self, numbers: Sequence[int], stalls: list[float], at: int) -> list[int]:
        """Wait until layers are in slots; return each one's first; add seconds to ``stalls``."""
        self._check_process()
        begun = time.perf_counter()
        if self._watch is not None:
            self._watch.look()
        with self._lock:
            self._check_usable()
            self._runner = threading.get_ident()
            try:
                for number in numbers:
                    if number < self._first_expert and not self._order.follow(number):
                        self.misses += 1
                self._wanted = numbers
                self._wait()
                held = chain.from_iterable(self._held[number].tickets for number in numbers)
                if tickets := {id(ticket): ticket for ticket in held}:  # experts share some
                    self._device.follow(tickets.values())
                for number in numbers:
                    if self._views is not None:
                        self._views.enter(number)
                    self.users.append(number)
            finally:
                self._wanted, self._error = (), None  # Ctrl-C: it is not for the next pass
                self._leave_if_done()
            self._unproved.update(n for n in numbers if self._held[n].unsure_nbytes)
            stalls[at] += time.perf_counter() - begun
            return [self._held[number].first for number in numbers]

    def _leave_if_done(self) -> None:
        if not (self.users or self.experts.asked):
            self._runner = None

    def _check_process(self) -> None:  # before locks, which another thread may have held
        if os.getpid() != self._process:
            raise OffloadError(
                "the model was offloaded before this process was forked, and what brings its "
                "layers is in the parent: offload it here"
            )

    def _check_usable(self) -> None:
        if not self.is_open:
            raise OffloadError(self._closed or "its turn on the device is over")
        if self._runner not in (None, threading.get_ident()):
            at = [*self._wanted[:1], *self.users][-1:]
            where = f", one in {self._layers[at[0]].name}" if at else ""
            raise OffloadError(
                f"two threads run the model at once{where}: its layers take turns in the same "
                "memory, so let one thread run it, or offload a copy for each"
            )

    def _wait(self) -> None:
        while True:
            self._check_usable()
            if self._error is not None:
                error, self._error = self._error, None
                self._raised = error if self._thread is not None else None
                try:
                    raise error
                finally:
                    del error  # its traceback has this call: a cycle
            if all(map(self._is_there, self._wanted)):
                return
            self._start()
            number = self._wanted[0]
            waits_inside = self._waits_inside() and number not in self._held and not self._busy
            if waits_inside and self._room_for(number, 0, {}) is None:
                outer, inner = self._layers[self.users[-1]].name, self._layers[number].name
                raise OffloadError(
                    f"{inner} computes while {outer} does, and the slots have no room for both: "
                    f'let one stay, with stay="{inner}.*"'
                )
            self._wake()
            self._changed.wait()

    def ask(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """Start to bring the experts that a layer's router chose, in the order of their use.

        ``layer`` counts those that have experts, ``chosen`` experts within the layer. Returns the
        experts that a call around this one still needs, for `end_asking`.
        """
        with self._within():
            self._check_process()
        for _, ticket in self._used:  # it has ended: the router's choice was computed after it
            with suppress(Exception):  # the thread that computes gets the same error
                ticket.wait()
        with self._within(), self._lock:
            self._check_usable()
            used, self._used = self._used, []
            for number in chain.from_iterable(numbers for numbers, _ in used):
                self._settle(number)
            before = self.experts.asked
            there = [*map(self._is_there, self.experts.numbers(layer, chosen))]
            self.experts.ask(layer, chosen, sum(there))
            self._runner, self._active_s = threading.get_ident(), time.monotonic()
            self._leave_if_done()
            if not all(there):
                self._start()
                if len(there) > self.experts.together or not self._reads_here():
                    self._wake()
            return before

    def acquire_experts(self, layer: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Wait until experts of an `ask` are in slots; return the number and slot of each."""
        numbers = self.experts.numbers(layer, chosen)
        with self._within():
            self._bring_here(numbers)
            return [*zip(numbers, self._acquire(numbers, self.experts.stalls, layer), strict=True)]

    def end_asking(self, before: Sequence[int] = ()) -> None:
        """Cancel the rest of an `ask`, which returned ``before``: its layer needs no more."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.experts.asked = [*before]
            self._leave_if_done()

    def release(self, *numbers: int) -> None:
        """End `acquire` of a layer, or of experts, if it succeeded.

        Slots may be refilled after the work queued until now.
        """
        if os.getpid() != self._process:
            return
        ticket, released = None, False
        try:
            ticket = self._device.mark()
        finally:
            with self._lock:
                self.experts.asked = [each for each in self.experts.asked if each not in numbers]
                released = self._release(numbers, ticket)
        if released and numbers[0] < self._first_expert and self._reads_here():
            self._bring_next(numbers[0])

    def _release(self, numbers: Sequence[int], ticket: QueuedWork | None) -> bool:
        """Return whether the thread was computing with any of these; ``ticket``: its work."""
        numbers = [number for number in numbers if number in self.users]
        if self._runner != threading.get_ident() or not numbers:
            return False
        self._active_s = time.monotonic()
        is_ordered = numbers[0] < self._first_expert and self._reads_here()
        if ticket is not None and is_ordered:  # copies into the slots of the layer wait for it
            first = self._held[numbers[0]].first
            for at in range(first, first + self._layers[numbers[0]].slots):
                self._uses[at][ticket.stream] = ticket
        self.users.reverse()
        for number in numbers:
            self.users.remove(number)  # the innermost
        self.users.reverse()
        self._leave_if_done()
        if not self.users:
            self._changed.notify_all()
        if ticket is not None and numbers[0] >= self._first_expert and not self.experts.asked:
            self._used.append((numbers, ticket))  # until the next `ask`: no thread has to wait
        elif ticket is not None and is_ordered:
            self._settle(numbers[0])
        else:
            if ticket is not None:
                has_computed = partial(self._has_computed, numbers, ticket)
                try:  # C waits for the work that uses the layers
                    for number in numbers:
                        self._held[number].computing.add(ticket)
                    self._busy.update(numbers)
                    self._reaper.follow(ticket, has_computed)
                except BaseException:  # Ctrl-C: perhaps C does not
                    wait_for(ticket)
                    has_computed()
                    raise
            for number in numbers:
                self._settle(number)
            self._wake()
        if self._views is not None:
            self._views.leave(numbers)
        return True

    def end_calls(self) -> None:
        """End what interrupted calls left: uses of layers, and a choice of experts.

        For the thread that runs the model, when no call of a layer is under way: `call`.
        """
        if self._runner != threading.get_ident() or os.getpid() != self._process:
            return
        if self.users:
            self._device.synchronize()  # it may compute with them
            with self._lock:
                for number in reversed([*self.users]):
                    self._release([number], None)
        self.end_asking()

    # --- who reads: S and its workers, or R -------------------------------------------------------

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

    def _bring(self) -> None:
        """Read layers into slots with worker threads, until idle for `_IDLE_S` seconds."""
        plan = self._transfer.plan
        scratch = {each.device: each.scratch_nbytes for each in plan.devices}
        ledger = Ledger(scratch | {STAGING: plan.host_nbytes})
        self.bring = self._views.bring if self._views is not None else None
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
            program_ends = not threading.main_thread().is_alive()
            with self._lock:
                if self._closed or self._ends or (self._runner is None and program_ends):
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
                if not picked:
                    computing = any(self._held[number].computing for number in self._busy)
                    busy = self._runner is not None or self._fills() or computing
                    idle_s = time.monotonic() - max(idle_since, self._active_s)
                    if program_ends or (not busy and idle_s >= _IDLE_S):
                        self._crew = None
                        break
            if not picked:
                with self._reading:
                    with self._lock:  # whether R has not waited for copies that end now
                        waits = not all(map(self._is_there, self._wanted))
                        pauses = time.monotonic() - self._active_s > _LOOK_S
                        waits = waits or pauses or self._paused or self._is_unsure(self._left)
                    came = waits and crew.settle(1)
                if came or crew.listen(_LOOK_S):
                    idle_since = time.monotonic()
                continue
            with self._reading:
                self._hand_out(picked, crew, after)
            idle_since = time.monotonic()

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
            _, to_fill = self.memory.views(number, first)
            job.buffers.update(zip(layer.placements, to_fill, strict=True))
            if number >= self._first_expert:
                self.experts.count_read(number, layer.read_nbytes)
            if number not in self._work:  # made late: of very many experts few are chosen
                self._work[number] = [*job.units(layer.placements)]
            if not self._work[number]:
                self._filled(number)
            units += self._work[number]
            self.read_nbytes += layer.read_nbytes
        for shard, group in groupby(units, lambda unit: unit[0].shard):
            for batch in [[*group]] if crew.is_inline else ([unit] for unit in group):
                crew.hand_out(job.open(shard), batch)

    def _reads_here(self) -> bool:
        return self._crew is not None and self._crew.is_inline

    def _here(self, bring: Callable[[Crew], None], *, raises: bool) -> bool:
        """Return False if R cannot bring layers itself; ``raises``: R raises what ends S."""
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
        self.stalls[released] += time.perf_counter() - begun

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

    def _leave_files(self, _: Any, error: BaseException | None, __: Any) -> None:
        """Close mapped files once no layer is in use.

        If R waits for a layer inside another one, it raises ``error``; if there is none, the files
        stay open for the next thread of `_bring`.
        """
        with self._lock:
            while self.users:
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
        self.experts.keep(self._held)

    def begin(self, indices: Sequence[int]) -> list[Buffer]:
        raise AssertionError(f"placements {indices} have no slots")  # they are there before units

    def sent(self, unit: WorkItem, tickets: Sequence[Ticket]) -> None:
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
        with self._lock:
            held = self._held[number]
            if held.state is LayerState.FILLING:
                held.state = LayerState.SENT
                if not self._fills():
                    self.busy_s += time.perf_counter() - self._busy_since
            self._settle(number)
            if self._waits_inside() or all(map(self._is_there, self._wanted)):
                self._changed.notify_all()

    def ended(self, unit: WorkItem) -> None:
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
        with self._lock:
            for number in numbers:
                if (held := self._held.get(number)) is not None:
                    held.computing.discard(ticket)
                    self._settle(number)
            self._changed.notify_all()
            self._wake()

    def _is_unsure(self, number: int | None) -> bool:
        held = None if number is None else self._held.get(number)
        return held is not None and held.unsure_nbytes > 0

    def _waits_inside(self) -> bool:  # and has to check whether there is room
        return bool(self.users and self._wanted and self._wanted[0] < self._first_expert)

    # --- which layers are in slots, which comes next, and in whose place --------------------------

    def _is_there(self, number: int) -> bool:
        held = self._held.get(number)
        if held is None or held.state is LayerState.FILLING:
            return False
        return held.state is not LayerState.SPOILED or number in self.users

    def _pick_layer(self) -> tuple[int, int] | None:
        """Return (layer to read next, its first slot); None if none is needed, or no slot free."""
        wanted = [number for number in self._wanted[:1] if number < self._first_expert]
        order = self._order.ahead(wanted[0] if wanted else None)
        distance = {number: at for at, number in enumerate(order)}
        for at, number in enumerate(order):
            if number not in self._held:
                first = self._room_for(number, at, distance)
                return None if first is None else (number, first)
        return None

    def _take_experts(self, most: int) -> list[tuple[int, int]]:
        """Give slots to up to ``most`` experts to be read next, if any; return them with these."""
        picked = list[tuple[int, int]]()
        while len(picked) < most and self.experts.asked:  # else no layer waits for them
            found = self.experts.next(self._in_use())
            if found is None:
                break
            picked.append((found[0], len(self._holds) + found[1]))
            self._take(*picked[-1])
        return picked

    def _room_for(self, number: int, at: int, distance: Mapping[int, int]) -> int | None:
        """Return the first of the adjacent slots that layer ``number`` gets.

        Free slots, else the slots of layers that are needed latest; None if all hold layers in use,
        or needed earlier than this layer. ``at``: this layer's position in the order of use;
        ``distance``: the position of each layer by number.
        """
        best, best_distance = None, at
        slots = self._layers[number].slots
        for first in range(len(self._holds) - slots + 1):
            inside = {each for each in self._holds[first : first + slots] if each is not None}
            held = inside & self._held.keys()  # without what an interrupted call left
            if any(each in self._busy or each in self.users for each in held):
                continue
            distances = [distance.get(each, len(self._layers)) for each in held]
            nearest = min(distances, default=len(self._layers) + 1)
            if nearest > best_distance:
                best, best_distance = first, nearest
        return best

    def _take(self, number: int, first: int) -> list[QueuedWork]:
        """Give a layer the slots from ``first`` on (an expert: that slot); drop former holders.

        Returns the queued work that copies into the slots have to wait for.
        """
        uses = list[QueuedWork]()
        if number >= self._first_expert:
            slot = first - len(self._holds)
            self._drop(self.experts.holder(slot))
            self.experts.take(number, slot)
        else:
            for at in range(first, first + self._layers[number].slots):
                self._drop(self._holds[at])
                self._holds[at] = number
                uses += self._uses[at].values()
        if not self._fills():
            self._busy_since = time.perf_counter()
        self._held[number] = HeldLayer(first, self._nbytes[number], self._nbytes[number])
        self._busy.add(number)
        return [*dict.fromkeys(uses)]

    def _fills(self) -> bool:
        return any(self._held[number].state is LayerState.FILLING for number in self._busy)

    def _in_use(self) -> set[int]:
        return {*self._busy, *self.users, *chain.from_iterable(each for each, _ in self._used)}

    def _drop(self, number: int | None) -> None:
        if number is None:
            return
        self._busy.discard(number)
        if self._held.pop(number, None) is not None and number >= self._first_expert:
            self.experts.drop(number)
        if number < self._first_expert:
            self._holds = [None if held == number else held for held in self._holds]
        if self._views is not None:
            self._views.let_go(number)

    def _settle(self, number: int) -> None:
        """Let a layer be evicted once copies to it and awaited uses ended; evict a spoiled one."""
        held = self._held.get(number)
        if held is None or held.state is LayerState.FILLING or held.unsure_nbytes or held.computing:
            return
        self._busy.discard(number)
        if held.state is LayerState.SPOILED and number not in self._in_use():
            self._drop(number)

    # --- slots that come and go -------------------------------------------------------------------

    def pause(self) -> None:
        """Free the slots until `open`; threads, staging and files are released when idle.

        They are at once if they hold device memory, or if the host has no room for another load.
        """
        if os.getpid() != self._process:
            self._paused = True
            self._free()  # this process's copy; the parent has the threads
            return
        self._check_not_reading("paused")
        plan, ends = self._transfer.plan, bool(self._views or self._host or self.experts.count)
        ends = ends or any(each.scratch_nbytes for each in plan.devices)
        with self._lock:
            if self.users or self._wanted:
                raise OffloadError("it cannot be paused while a pass computes with a layer")
            self._paused = True
            self._ends = ends or available_host_nbytes() < plan.host_nbytes
            self._wake()
            try:
                while self._busy or (self._thread and (self._ends or not self._crew)):
                    self._changed.wait(_LOOK_S)
                self._device.synchronize()  # it may compute with the slots
            except BaseException:
                self._paused = False
                raise
            finally:
                self._ends = False
            # drop all that refers to slots
            self._used.clear()
            self._uses.clear()
            self._forget(everything=True)
            if self._crew is not None:
                self._crew.job.buffers.clear()
            self._free()

    @property
    def is_open(self) -> bool:
        return not (self._closed or self._paused)

    def close(self, why: str) -> None:
        """End all threads and free the slots; later calls of `acquire` raise OffloadError(why)."""
        if os.getpid() == self._process:  # otherwise the parent has the threads
            self._check_not_reading("closed")
            with self._lock:
                if self.users:
                    raise OffloadError("it cannot be closed while a pass computes with a layer")
                if self._closed:
                    return
                self._closed = why
                self._changed.notify_all()
                self._wake()
                thread = self._thread
                if thread is None:  # otherwise that ends the reaper
                    self._reaper.end()
            if thread is not None:
                thread.join()
            self._reaper.join()
            if not self._paused:
                self._device.synchronize()  # it may compute with the slots
        if not self._paused:
            self._free()

    def _free(self) -> None:
        self.memory.close()
        if self._host is not None:
            self._host.close()

    def abandon(self) -> None:
        """Let all threads end, as the model is gone; any thread may call this, holding any lock."""
        self._closed, self._within = self._closed or "the model is gone", nullcontext
        self._wake()
        if self._host is not None:
            self._host.close()


class Reaper:
    """Waits in a thread for tickets (pending work of a device) in order, and calls back for each.

    The lock of `Rounds` guards all calls but `join`. An idle reaper has no reference to its owner,
    so no cycle keeps the owner alive.
    """

    def __init__(self) -> None:
        self._tickets: SimpleQueue[tuple[Ticket, Callable[[], None]] | None] = SimpleQueue()
        self._runs = False
        self._threads: list[threading.Thread] = []

    def follow(self, ticket: Ticket, has_ended: Callable[[], None]) -> None:
        """Call ``has_ended`` in the thread once the ticket has ended."""
        if not self._runs:
            self._runs = True
            alive = [thread for thread in self._threads if thread.is_alive()]
            try:
                self._threads = [*alive, started(self._run, "streamload-reaper", self.end)]
            except BaseException as error:
                self._runs = False
                if not isinstance(error, RuntimeError):
                    raise
                wait_for(ticket)  # the limit of threads is reached
                has_ended()
                return
        self._tickets.put((ticket, has_ended))

    def end(self) -> None:
        """Let the thread end after all tickets that it follows; return at once."""
        if self._runs:
            self._tickets.put(None)
            self._runs = False

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (item := self._tickets.get()) is not None:
            ticket, has_ended = item
            wait_for(ticket)
            has_ended()
            del item, ticket, has_ended  # not kept while it waits


def wait_for(ticket: Ticket) -> None:
    """Wait for the end of a ticket, by success or failure."""
    with suppress(BaseException):  # the thread that computes gets the same error
        ticket.wait()
