"""Bring layers into slots of a device, pass after pass, before the device computes with them.

A pass is one call of the model. `Rounds` is a load that repeats in each. The thread that runs the
model asks for layers in an order that is learned from it. A thread of `Rounds` picks the layer that
is needed next and a slot, and the workers of `streaming.loop.Crew` fill it. A slot is filled again
once the device has computed with its layer. Experts have slots of their own, from which
`ExpertCache` evicts.

One lock, `Rounds._changed`, guards all state below. R is the thread that runs the model, S the
thread "streamload-rounds", W a worker of the crew, C the thread that waits for tickets (`Reaper`).
If the crew has no workers, S reads itself, and R the experts that it waits for: to wake another
thread takes about as long as to read one. Who reads holds `_reading`, taken before `_changed`.

| state of a layer | meaning | begins with |
|---|---|---|
| (no `HeldLayer`) | it has no slot | `_drop`, by S, R or C |
| FILLING | copies into its slot are being started | `_take`, by S |
| SENT | all were started; `unsure_nbytes` may run or fail | `_filled`, by W, or S if it is empty |
| SPOILED | it may have wrong bytes; dropped when nothing uses it | `_forget`, by S |

| field | meaning | changed by |
|---|---|---|
| `_users`, `_runner`, `_wanted` | layers in use, their thread, layers that it waits for | R |
| `_used`, `_active_s` | experts computed with until the next `ask`; the time of the last | R |
| `_held`, `_holds`, `_busy` | layers with slots; by slot; filled or computed with | S, W, C, R |
| `_error`, `_raised` | the error that ended S, for R to raise; the one that R raised | S, R |
| `_failed` | the error of what R read, to end S | R, S |
| `_thread`, `_crew` | S and its crew, while they run | R starts, S ends |
| `_closed` | why no layer can be acquired any more; "" while open | any, without the lock |
| `_paused` | whether there are no slots, until `resume` | R |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain, groupby
from typing import Any

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import open_shard
from streamload.core.interrupt import Interrupt
from streamload.core.memory import STAGING, Ledger, available_host_nbytes
from streamload.devices.base import Buffer, Device, Ticket
from streamload.errors import OffloadError
from streamload.offloading.completion import Reaper, started
from streamload.offloading.experts import ExpertCache
from streamload.offloading.holding import Holding
from streamload.offloading.layers import Layer, LayerState, RoundStats, Slots
from streamload.planning.plan import Plan
from streamload.planning.transforms import NO_CHANGES, Changes
from streamload.streaming.loop import Crew, crew_of
from streamload.streaming.state import Sink, Transfer, WorkItem, written_nbytes

# After this time without a pass, threads end, and staging and files are released until the next.
_IDLE_S = 2.0
_LOOK_S = 0.1  # interval of checks for that, and for the end of the program


class Rounds(Holding, Sink):
    """Brings layers that stream into their slots, ahead of the thread that runs the model.

    That thread, one at a time, calls `acquire` before it computes with a layer, and `release` once
    it has queued the work. Other threads start at a call, and end `_IDLE_S` seconds after the last.
    """

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        device: Device,
        layers: Sequence[Layer],
        memory: Slots,
        changes: Changes = NO_CHANGES,
        experts: ExpertCache | None = None,
    ) -> None:
        """Start no thread; ``layers``: those of a pass in the expected order, then all experts."""
        super().__init__(plan, layers, memory, experts)
        self.stats = RoundStats(stalls=[0.0] * self._first_expert)
        self._plan, self._checkpoint, self._device = plan, checkpoint, device
        self._changes = changes
        self._layer_of = {p: n for n, layer in enumerate(layers) for p in layer.placements}
        self._active_s = 0.0
        self._unproved: set[int] = set()  # layers in use or used, whose copies may still fail
        self._runner: int | None = None
        self._work: dict[int, list[WorkItem]] = {}  # by layer
        self._error: BaseException | None = None
        self._raised: BaseException | None = None
        self._failed: BaseException | None = None
        self._closed = ""
        self._paused = False
        self._process = os.getpid()
        self._reading = threading.Lock()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._crew: Crew | None = None
        self._reaper = Reaper()

    # --- the thread that runs the model -------------------------------------------------------

    def acquire(self, number: int) -> Sequence[Buffer]:
        """Wait until a layer is in its slots, and keep it until `release`.

        Returns one buffer for each tensor of the layer, on which the device may queue work.

        Raises:
            OffloadError: this was closed, or another thread computes with a layer now.
            StreamloadError: the layer could not be brought; the next call tries again.
        """
        self._check_process()
        (first,) = self._acquire([number], self.stats.stalls, number)
        self._wake()  # the next may go where the one before was
        return self.memory.buffers(number, first)

    def _acquire(self, numbers: Sequence[int], stalls: list[float], at: int) -> list[int]:
        """Wait until layers are in slots; return each one's first, add the time to ``stalls``."""
        begun = time.perf_counter()
        with self._changed:
            self._check_usable()
            self._runner = threading.get_ident()
            try:
                self._wait_for(numbers)
                held = chain.from_iterable(self._held[number].tickets for number in numbers)
                if tickets := {id(ticket): ticket for ticket in held}:  # experts share some
                    self._device.follow(tickets.values())
                for number in numbers:
                    if self._views is not None:
                        self._views.enter(number)
                    self._users.append(number)
            finally:
                self._wanted = ()
                self._leave_if_done()
            self._unproved.update(n for n in numbers if self._held[n].unsure_nbytes)
            stalls[at] += time.perf_counter() - begun
            return [self._held[number].first for number in numbers]

    def _leave_if_done(self) -> None:
        """Let other threads run the model if this one uses no layer, and waits for no experts."""
        if not (self._users or self.experts.asked):
            self._runner = None

    def _check_process(self) -> None:  # before locks, which another thread may have held
        if os.getpid() != self._process:
            raise OffloadError(
                "the model was offloaded before this process was forked, and what brings its "
                "layers is in the parent: offload it here"
            )

    def ask(self, layer: int, chosen: Sequence[int]) -> None:
        """Start to bring the experts that a layer's router chose, in the order of their use.

        Args:
            layer: the number of the layer among those that have experts.
            chosen: numbers of experts within the layer.

        Raises:
            OffloadError: this was closed, or another thread computes with a layer now.
        """
        self._check_process()
        for _, ticket in self._used:  # it has ended: the router's choice was computed after it
            with suppress(Exception):  # the thread that computes gets the same error
                ticket.wait()
        with self._changed:
            self._check_usable()
            used, self._used = self._used, []
            for number in chain.from_iterable(numbers for numbers, _ in used):
                self._settle(number)
            there = [self._is_there(number) for number in self._numbers(layer, chosen)]
            self.experts.ask(layer, chosen, sum(there))
            self._runner, self._active_s = threading.get_ident(), time.monotonic()
            self._leave_if_done()
            if not all(there):
                self._start()
                if len(there) > self.experts.together or not self._reads_here():
                    self._wake()

    def acquire_experts(self, layer: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Wait until experts of an `ask` are in slots; return the number and slot of each."""
        numbers = self._numbers(layer, chosen)
        self._bring_here(numbers)
        return [*zip(numbers, self._acquire(numbers, self.experts.stalls, layer), strict=True)]

    def release_experts(self, layer: int, chosen: Sequence[int]) -> None:
        """End `acquire_experts`: the slots may be refilled after the work queued until now."""
        self._mark_release(self._numbers(layer, chosen))

    def end_asking(self) -> None:
        """Cancel the rest of an `ask`: its layer needs no more experts."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self.experts.asked = []
            self._leave_if_done()

    def _numbers(self, layer: int, chosen: Sequence[int]) -> list[int]:
        return [self._first_expert + expert for expert in self.experts.numbers(layer, chosen)]

    def release(self, number: int) -> None:
        """End `acquire`, if it succeeded: slots may be refilled after the work queued until now."""
        self._mark_release([number])

    def _mark_release(self, numbers: Sequence[int]) -> None:
        if os.getpid() != self._process:
            return
        ticket = None
        try:
            ticket = self._device.mark()
        finally:
            with self._changed:
                self.experts.has_computed([number - self._first_expert for number in numbers])
                self._release(numbers, ticket)

    def _release(self, numbers: Sequence[int], ticket: Ticket | None) -> None:
        numbers = [number for number in numbers if number in self._users]
        if self._runner != threading.get_ident() or not numbers:
            return
        self._users.reverse()
        for number in numbers:
            self._users.remove(number)  # the innermost
        self._users.reverse()
        self._leave_if_done()
        if not self._users:
            self._changed.notify_all()
        if ticket is not None and numbers[0] >= self._first_expert and not self.experts.asked:
            self._used.append((numbers, ticket))  # until the next `ask`: no thread has to wait
        else:
            if ticket is not None:
                for number in numbers:
                    self._held[number].computing += 1
                self._busy.update(numbers)
                self._reaper.follow(numbers, ticket, self._has_computed)
            for number in numbers:
                self._settle(number)
            self._wake()
        if self._views is not None:
            self._views.leave(numbers)

    @property
    def may_pause(self) -> bool:
        """Whether `pause` leaves no device memory, and the host has room for another such load."""
        on_device = self._views is not None or any(d.scratch_nbytes for d in self._plan.devices)
        if on_device or self.experts.count or self._closed or os.getpid() != self._process:
            return False
        return available_host_nbytes() >= self._plan.host_nbytes

    def pause(self) -> None:
        """Free the slots until `resume`; threads, staging and files are released when idle.

        Raises:
            OffloadError: a thread computes with a layer now.
        """
        with self._changed:
            if self._users or self._wanted:
                raise OffloadError("it cannot be paused while a pass computes with a layer")
            self._paused = True
            self._wake()
            try:
                while self._busy or (self._thread is not None and self._crew is None):
                    self._changed.wait(_LOOK_S)
                self._forget(everything=True)
                if self._crew is not None:
                    self._crew.job.buffers.clear()  # which refer to the slots
                self._device.synchronize()  # it may compute with them
            except BaseException:
                self._paused = False
                raise
            self.memory.close()

    @property
    def is_paused(self) -> bool:
        """Whether `resume` is possible."""
        return self._paused and not self._closed and os.getpid() == self._process

    def resume(self, memory: Slots) -> None:
        """Use new slots after `pause`, of the same sizes."""
        with self._changed:
            self.memory, self._paused = memory, False
            self._wake()

    def close(self, why: str) -> None:
        """End all threads and free the slots; later calls of `acquire` raise OffloadError(why).

        Raises:
            OffloadError: a thread computes with a layer now.
        """
        if os.getpid() != self._process:
            self.memory.close()  # this process's copy; the parent has the threads
            return
        with self._changed:
            if self._users:
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
        self._device.synchronize()  # it may compute with the slots
        self.memory.close()

    def abandon(self) -> None:
        """Let all threads end, as the model is gone; any thread may call this, holding any lock."""
        self._closed = self._closed or "the model is gone"
        self._wake()

    def _check_usable(self) -> None:
        if self._closed or self._paused:
            raise OffloadError(self._closed or "its turn on the device is over")
        if self._runner not in (None, threading.get_ident()):
            at = [*self._wanted[:1], *self._users][-1:]
            where = f", one in {self._layers[at[0]].name}" if at else ""
            raise OffloadError(
                f"two threads run the model at once{where}: its layers take turns in the same "
                "memory, so let one thread run it, or offload a copy for each"
            )

    def _wait_for(self, numbers: Sequence[int]) -> None:
        """Wait until layers are in their slots; raises the error that prevents it."""
        for number in numbers:
            if number < self._first_expert and not self._order.follow(number):
                self.stats.misses += 1
        self._wanted = numbers
        while True:
            self._check_usable()
            if self._error is not None:
                error, self._error = self._error, None
                self._raised = error if self._thread is not None else None
                raise error
            if all(map(self._is_there, numbers)):
                return
            self._start()
            if numbers[0] < self._first_expert:  # there are slots for experts
                self._check_room(numbers[0])
            self._wake()
            self._changed.wait()

    def _waits_inside(self) -> bool:
        """Whether R waits for a layer inside of another, and has to check whether it has room."""
        return bool(self._users and self._wanted and self._wanted[0] < self._first_expert)

    def _check_room(self, number: int) -> None:
        """Raise OffloadError if a layer can get no slots because layers around it hold them."""
        if not self._users or number in self._held or self._busy:
            return
        if self._room_for(number, 0, {}) is not None:
            return
        outer, inner = self._layers[self._users[-1]].name, self._layers[number].name
        users, self._users = self._users, []  # this ends all uses
        if self._views is not None:
            self._views.leave(users)
        raise OffloadError(
            f"{inner} computes while {outer} does, and the slots have no room for both: let one "
            f'stay, with stay="{inner}.*"'
        )

    # --- the thread that brings layers --------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = started(self._serve, "streamload-rounds", self._wake)

    def _wake(self) -> None:
        if (crew := self._crew) is not None:
            crew.wake()

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            self._bring()
        except BaseException as failure:
            error = failure
        with self._changed:
            self._crew = self._thread = self._failed = None
            for number, held in [*self._held.items()]:  # all workers have ended
                held.unsure_nbytes = 0
                self._settle(number)
            self._forget(everything=error is not None)
            self._reaper.end()
            # if no thread waits or used wrong bytes, the next `acquire` just tries again
            waits = bool(self._wanted or self._unproved) and error is not self._raised
            self._error, self._raised = error if waits else None, None
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

    def _leave_files(self, _: Any, error: BaseException | None, __: Any) -> None:
        """Close mapped files once no layer is in use: exit callback of an `ExitStack`.

        ``error``: the exception that ended the ``with`` block, or None. If a thread waits for a
        layer inside another one, that thread raises ``error``; if there is no error, the files stay
        open for the next thread of `_bring`.
        """
        with self._changed:
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
        plan = self._plan
        ledger = Ledger(
            {d.device: d.scratch_nbytes for d in plan.devices} | {STAGING: plan.host_nbytes}
        )
        devices = {d.device: self._device for d in plan.devices}
        transfer = Transfer(
            *(plan, self._checkpoint, devices, self._changes, open_shard), refills=True
        )
        if self._views is not None:
            self.bring = self._views.bring
        with crew_of(transfer, self, ledger, Interrupt(None)) as crew, ExitStack() as stack:
            if self._views is not None:
                stack.push(self._leave_files)
            stack.callback(crew.join)
            try:
                try:
                    self._go_round(crew)
                finally:
                    with self._reading, self._changed:
                        self._crew = None  # R reads no more
                crew.drain()
            except BaseException as error:
                with self._changed:
                    self._forget(everything=True)  # before staging goes, and with it its tickets
                crew.job.fail(error)
                raise
            with self._changed:
                for held in self._held.values():
                    held.tickets.clear()
            crew.end()

    def _go_round(self, crew: Crew) -> None:
        idle_since = time.monotonic()
        with self._changed:
            self._crew = crew
        while True:
            with self._changed:
                if self._closed or (self._runner is None and _program_ends()):
                    break
                if self._failed is not None:
                    error, self._failed = self._failed, None
                    raise error
                picked = self._take_experts(self.experts.together if crew.is_inline else 1)
                if not (picked or self._paused) and (layer := self._pick_layer()) is not None:
                    self._take(*layer)
                    picked = [layer]
                if not picked and self._is_idle(idle_since):
                    self._crew = None
                    break
            if not picked:
                with self._reading:
                    came = crew.settle()
                if came or crew.listen(_LOOK_S):
                    idle_since = time.monotonic()
                continue
            with self._reading:
                self._hand_out(picked, crew)
            idle_since = time.monotonic()

    def _hand_out(self, picked: Sequence[tuple[int, int]], crew: Crew) -> None:
        """Fill layers, each with its first slot, or let workers fill them."""
        job, units = crew.job, list[WorkItem]()
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
        """Whether R reads the experts that it waits for: S has no workers."""
        return self._crew is not None and self._crew.is_inline

    def _bring_here(self, numbers: Sequence[int]) -> None:
        """Read those of some experts of an `ask` that nobody reads, unless others do it."""
        if all(number in self._held for number in numbers) or not self._reads_here():
            return
        if not self._reading.acquire(blocking=False):  # S reads, and reads these next
            return
        try:
            while (crew := self._crew) is not None:
                with self._changed:
                    lacks = sum(number not in self._held for number in numbers)
                    picked = self._take_experts(lacks)
                self._hand_out(picked, crew)
                if not picked and not (lacks and crew.settle()):  # its end may make slots free
                    break
        except BaseException as error:
            with self._changed:
                self._failed = self._raised = error
            self._wake()
            raise
        finally:
            self._reading.release()

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
        with self._changed:
            held = self._held.get(number)
            if held is None:  # forgotten
                return
            held.tickets += tickets
            held.left_nbytes -= written_nbytes(unit)
            if not held.left_nbytes:
                self._filled(number)

    def _filled(self, number: int) -> None:
        """Note that all copies of a layer have been started."""
        with self._changed:
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
        with self._changed:
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

    def _has_computed(self, numbers: Sequence[int]) -> None:
        """Note that the device has computed with layers, so that their slots can be filled."""
        with self._changed:
            for number in numbers:
                self._held[number].computing -= 1
                self._settle(number)
            self._changed.notify_all()
            self._wake()


def _program_ends() -> bool:
    return not threading.main_thread().is_alive()
