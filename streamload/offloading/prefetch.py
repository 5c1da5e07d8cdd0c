"""Bring layers into slots of a device, pass after pass, before the device computes with them.

A pass is one call of the model. `Rounds` is a load that repeats in each. The thread that runs the
model asks for layers in an order that is learned from it. A thread of `Rounds` picks the layer that
is needed next and a slot, and the workers of `streaming.loop.Crew` fill it, after the device has
computed with the layer that was there. Experts have slots of their own, from which `ExpertCache`
evicts.

R is the thread that runs the model; the other threads are those of `bringing`, whose table lists
the state.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TypeVar

from streamload.core.memory import available_host_nbytes
from streamload.devices.base import Buffer, QueuedWork
from streamload.errors import OffloadError
from streamload.offloading.bringing import Bringer
from streamload.offloading.completion import wait_for
from streamload.offloading.slots import Slots

T = TypeVar("T")


def call_layer(rounds: Rounds, compute: Callable[[], T]) -> T:
    """Call a layer whose weights stream; after the outermost call, end what interrupted ones left.

    Ctrl-C comes at the begin of a function, or after a call: the count is never left wrong.
    """
    rounds.calls += 1
    try:
        return compute()
    finally:
        rounds.calls -= 1
        if not rounds.calls:
            rounds.end_calls()


class Rounds(Bringer):
    """Brings layers that stream into their slots, ahead of the thread that runs the model.

    That thread, one at a time, calls `acquire` before it computes with a layer, and `release` once
    it has queued the work. Other threads start at a call, and end some time after the last.
    """

    def acquire(self, number: int) -> Sequence[Buffer]:
        """Wait until a layer is in its slots, and keep it until `release`.

        Returns one buffer for each tensor of the layer, on which the device may queue work.
        """
        self._check_process()
        (first,) = self._acquire([number], self.stats.stalls, number)
        if not self._reads_here():
            self._wake()  # the next may go where the one before was
        return self.memory.buffers(number, first)

    def computes_with(self, number: int) -> bool:
        """Whether the thread that runs the model computes with a layer."""
        return number in self._users

    def _acquire(self, numbers: Sequence[int], stalls: list[float], at: int) -> list[int]:
        """Wait until layers are in slots; return each one's first, add the time to ``stalls``."""
        begun = time.perf_counter()
        if self._watch is not None:
            self._watch.look()
        with self._lock:
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
                self._wanted, self._error = (), None  # Ctrl-C: it is not for the next pass
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

    def ask(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """Start to bring the experts that a layer's router chose, in the order of their use.

        ``layer`` counts those that have experts, ``chosen`` experts within the layer. Returns the
        experts that a call around this one still needs, for `end_asking`.
        """
        self._check_process()
        for _, ticket in self._used:  # it has ended: the router's choice was computed after it
            with suppress(Exception):  # the thread that computes gets the same error
                ticket.wait()
        with self._lock:
            self._check_usable()
            used, self._used = self._used, []
            for number in chain.from_iterable(numbers for numbers, _ in used):
                self._settle(number)
            before = self.experts.asked
            there = [self._is_there(number) for number in self._numbers(layer, chosen)]
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
        numbers = self._numbers(layer, chosen)
        self._bring_here(numbers)
        return [*zip(numbers, self._acquire(numbers, self.experts.stalls, layer), strict=True)]

    def release_experts(self, layer: int, chosen: Sequence[int]) -> None:
        """End `acquire_experts`: the slots may be refilled after the work queued until now."""
        self._mark_release(self._numbers(layer, chosen))

    def end_asking(self, before: Sequence[int] = ()) -> None:
        """Cancel the rest of an `ask`, which returned ``before``: its layer needs no more."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.experts.asked = [*before]
            self._leave_if_done()

    def _numbers(self, layer: int, chosen: Sequence[int]) -> list[int]:
        return [self._first_expert + expert for expert in self.experts.numbers(layer, chosen)]

    def release(self, number: int) -> None:
        """End `acquire`, if it succeeded: slots may be refilled after the work queued until now."""
        if self._mark_release([number]) and self._reads_here():
            self._bring_next(number)

    def _mark_release(self, numbers: Sequence[int]) -> bool:
        """Return whether the thread was computing with any of these."""
        if os.getpid() != self._process:
            return False
        ticket, released = None, False
        try:
            ticket = self._device.mark()
        finally:
            with self._lock:
                self.experts.has_computed([number - self._first_expert for number in numbers])
                released = self._release(numbers, ticket)
        return released

    def _release(self, numbers: Sequence[int], ticket: QueuedWork | None) -> bool:
        numbers = [number for number in numbers if number in self._users]
        if self._runner != threading.get_ident() or not numbers:
            return False
        self._active_s = time.monotonic()
        is_ordered = numbers[0] < self._first_expert and self._reads_here()
        if ticket is not None and is_ordered:
            self._note_use(numbers[0], ticket)
        self._users.reverse()
        for number in numbers:
            self._users.remove(number)  # the innermost
        self._users.reverse()
        self._leave_if_done()
        if not self._users:
            self._changed.notify_all()
        if ticket is not None and numbers[0] >= self._first_expert and not self.experts.asked:
            self._used.append((numbers, ticket))  # until the next `ask`: no thread has to wait
        elif ticket is not None and is_ordered:
            self._settle(numbers[0])
        else:
            if ticket is not None:
                self._follow(numbers, ticket)
            for number in numbers:
                self._settle(number)
            self._wake()
        if self._views is not None:
            self._views.leave(numbers)
        return True

    def _follow(self, numbers: Sequence[int], ticket: QueuedWork) -> None:
        """Let C wait for the work that uses layers."""
        has_computed = partial(self._has_computed, numbers, ticket)
        try:
            for number in numbers:
                self._held[number].computing.add(ticket)
            self._busy.update(numbers)
            self._reaper.follow(ticket, has_computed)
        except BaseException:  # Ctrl-C: perhaps C does not
            wait_for(ticket)
            has_computed()
            raise

    def end_calls(self) -> None:
        """End what interrupted calls left: uses of layers, and a choice of experts.

        For the thread that runs the model, when no call of a layer is under way: `call_layer`.
        """
        if self._runner != threading.get_ident() or os.getpid() != self._process:
            return
        if self._users:
            self._device.synchronize()  # it may compute with them
            with self._lock:
                for number in reversed([*self._users]):
                    self._release([number], None)
        self.end_asking()

    @property
    def may_pause(self) -> bool:
        """Whether `pause` leaves no device memory, and the host has room for another such load."""
        on_device = self._views is not None or any(
            d.scratch_nbytes for d in self._transfer.plan.devices
        )
        if on_device or self.experts.count or self._closed or os.getpid() != self._process:
            return False
        return available_host_nbytes() >= self._transfer.plan.host_nbytes

    def pause(self) -> None:
        """Free the slots until `resume`; threads, staging and files are released when idle."""
        self._check_not_reading("paused")
        with self._lock:
            if self._users or self._wanted:
                raise OffloadError("it cannot be paused while a pass computes with a layer")
            self._paused = True
            self._wake()
            try:
                self._let_go()
                self._device.synchronize()  # it may compute with the slots
            except BaseException:
                self._paused = False
                raise
            for uses in self._uses:
                uses.clear()
            self.memory.close()

    @property
    def is_open(self) -> bool:
        """Whether layers can be acquired."""
        return not (self._closed or self._paused)

    @property
    def is_paused(self) -> bool:
        """Whether `resume` is possible."""
        return self._paused and not self._closed and os.getpid() == self._process

    def resume(self, memory: Slots) -> None:
        """Use new slots after `pause`, of the same sizes."""
        with self._lock:
            self.memory, self._paused = memory, False
            self._wake()

    def close(self, why: str) -> None:
        """End all threads and free the slots; later calls of `acquire` raise OffloadError(why)."""
        if os.getpid() != self._process:
            self.memory.close()  # this process's copy; the parent has the threads
            return
        self._check_not_reading("closed")
        with self._lock:
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
        if not self.is_open:
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
                try:
                    raise error
                finally:
                    del error  # its traceback has this call: a cycle
            if all(map(self._is_there, numbers)):
                return
            self._start()
            if numbers[0] < self._first_expert:  # there are slots for experts
                self._check_room(numbers[0])
            self._wake()
            self._changed.wait()

    def _check_room(self, number: int) -> None:
        """Raise OffloadError if a layer can get no slots because layers around it hold them."""
        if not self._users or number in self._held or self._busy:
            return
        if self._room_for(number, 0, {}) is not None:
            return
        outer, inner = self._layers[self._users[-1]].name, self._layers[number].name
        raise OffloadError(
            f"{inner} computes while {outer} does, and the slots have no room for both: let one "
            f'stay, with stay="{inner}.*"'
        )
