"""Models of torch that share a device and one budget: one at a time is on it.

A model is brought when it is called, or when something else needs the values of its weights, and
dropped when another model needs the memory. Until then placeholders stand in for its weights.

One lock, `Turns.lock`, guards the state of all models.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from streamload.core.interrupt import deferred_interrupt
from streamload.core.units import format_bytes
from streamload.devices.parameters import Slot
from streamload.devices.torch.tensors import TO_TORCH, TorchParameter, changes_nothing
from streamload.errors import OffloadError
from streamload.loading.load import run
from streamload.loading.report import Clock, LoadReport
from streamload.offloading import torch_modules
from streamload.offloading.model import Passes
from streamload.offloading.offload import OffloadReport, Prepared, begin, rounds_of

# Methods of models that compute: pipelines call a VAE by the last two.
_METHODS = ("forward", "encode", "decode")


class Turns:
    """The order in which models were last used, within ``room_nbytes`` of a device."""

    def __init__(self, room_nbytes: int) -> None:
        self.lock = threading.RLock()
        self._room_nbytes = room_nbytes
        self._used: list[weakref.ref[Turn]] = []  # last those that were used last

    def begin(self, turn: Turn) -> None:
        """Bring a model's weights to the device if they are away; errors as in `make_room`."""
        self._used = [weakref.ref(each) for each in (*self._others(turn), turn)]
        if not turn.is_here:
            with deferred_interrupt(), torch.inference_mode(False), torch.no_grad():
                self.make_room(turn, turn.plan.peak_nbytes + turn.more_nbytes)
                turn.bring()

    def make_room(self, turn: Turn, needed_nbytes: int) -> None:
        """Let other models leave the device, as far as one needs so many bytes."""
        others = self._others(turn)
        for other in others:
            if not other.uses and self._room_nbytes < needed_nbytes + self._held_nbytes(others):
                other.leave()
        left_nbytes = self._room_nbytes - self._held_nbytes(others)
        if left_nbytes < needed_nbytes:
            busy = ", ".join(other.name for other in others if other.uses)
            said = f"while {busy} computes " if busy else ""
            raise OffloadError(
                f"{turn.name} needs {format_bytes(needed_nbytes)}, and {said}the budget has "
                f"{format_bytes(left_nbytes)} for it"
            )

    @staticmethod
    def _held_nbytes(turns: Sequence[Turn]) -> int:
        return sum(turn.held_nbytes for turn in turns)

    def _others(self, turn: Turn) -> list[Turn]:
        return [each for ref in self._used if (each := ref()) is not None and each is not turn]


class Turn:
    """A model that shares a device with others.

    Attributes:
        name: the model's, for errors.
        plan: which layers stay while the model is there, and which stream.
        uses: the calls under way.
        held_nbytes: device bytes that the model holds now.
    """

    def __init__(self, name: str, model: nn.Module, prepared: Prepared, turns: Turns) -> None:
        """Put placeholders into ``model``, on the meta device, whose offload is ``prepared``."""
        self.name, self.plan, self.held_nbytes = name, prepared.plan, 0
        self.uses: set[object] = set()
        self._turns, self._passes, self._closed = turns, Passes(), False
        self._problem, self._adapter, load = prepared.problem, prepared.adapter, prepared.load
        self._load = replace(load, place=replace(load.place, model=None))  # it may be freed
        ((_, self._device),) = load.place.devices.opened.items()
        self._is_loaded, self._report = False, cast(LoadReport | None, None)
        self._rounds = rounds_of(self.plan, self._device, self._there)
        parameters = load.match.parameters if load.match is not None else {}
        self._stays = {cast(TorchParameter, p): name for name, p in parameters.items()}
        dtypes = dict(zip(self._problem.wants.names, self._problem.dsts, strict=True))
        self._dtypes = {p: TO_TORCH[dtypes[name].name] for p, name in self._stays.items()}
        self._cast: dict[TorchParameter, torch.dtype] = {}  # weights that have another dtype now
        self._away: list[tuple[Slot, Any]] = []  # the tensors that placeholders stand in for
        self._loaded: list[tuple[Slot, Any, int]] = []  # with torch's count of writes
        self._adapter.empty(self.plan, self._problem.wants)
        self._adapter.put(self.plan, self._problem, self._device, self._rounds)
        weakref.finalize(model, self._abandon)
        methods = [method for method in _METHODS if hasattr(type(model), method)]
        self._calls: list[torch_modules.Wrapped] = [_Called(model, each, self) for each in methods]
        if not self.plan.residency.absent:
            self._calls.append(_Applied(model, "_apply", self))
        for each in self._calls:
            each.put()
        self._put_away()

    def _abandon(self) -> None:
        for name in ("_load", "_adapter", "_stays", "_dtypes", "_cast", "_loaded", "_away"):
            self.__dict__.pop(name, None)

    # --- with the lock held ----------------------------------------------------------------------

    @property
    def is_here(self) -> bool:
        """Whether the model is on the device; not if a signal handler's error ended `leave`."""
        return self._is_loaded and (self.plan.stream is None or self._rounds.is_open)

    @property
    def more_nbytes(self) -> int:
        """Device bytes that the weights take beyond the plan, as they have been cast."""
        return self._more_nbytes(self._cast)

    def _more_nbytes(self, dtypes: Mapping[TorchParameter, torch.dtype]) -> int:
        return sum(
            math.prod(each.shape) * (dtype.itemsize - self._dtypes[each].itemsize)
            for each, dtype in dtypes.items()
        )

    def bring(self) -> None:
        """Load the weights that stay, and open the slots of those that stream."""
        if self._closed:
            raise OffloadError(f"the offload of {self.name} was closed: load it again")
        if self._is_loaded or self._rounds.is_open:
            self.leave()
        self._take_back()
        try:
            self._report = run(self._load, False, Clock())
            for parameter, dtype in self._cast.items():
                for held, key in parameter.slots:
                    held[key].data = held[key].data.to(dtype)
            begin(self._rounds, self.plan, self._problem, self._device, self._adapter.slots)
            self._is_loaded = True
        except BaseException:
            self.leave()
            raise
        self._note()

    def _note(self) -> None:
        slots = [(each, slot) for each in self._stays for slot in each.slots]
        self._loaded = [((held, key), held[key], held[key]._version) for _, (held, key) in slots]
        now = {each: held[key].dtype for each, (held, key) in slots}
        self._cast = {each: now[each] for each, dtype in self._dtypes.items() if now[each] != dtype}
        taken = self.plan.residency.taken_nbytes + self.plan.scratch_nbytes
        self.held_nbytes = taken + self.more_nbytes

    def apply(self, model: nn.Module, change: Callable[[Any], Any]) -> None:
        """Cast the model for ``.to(dtype)`` and the like, now and whenever it is brought."""
        with self._turns.lock, torch.inference_mode(False):
            self._turns.begin(self)
            probes = {dtype: torch.empty(0, dtype=dtype) for dtype in self._dtypes.values()}
            dtypes = {each: change(probes[dtype]).dtype for each, dtype in self._dtypes.items()}
            self._turns.make_room(self, self.plan.peak_nbytes + self._more_nbytes(dtypes))
            type(model)._apply(model, change)
            self._note()

    def leave(self) -> None:
        """Free all memory of the model on the device, and put placeholders in place of weights."""
        if self.plan.stream is not None and (self._is_loaded or self._rounds.is_open):
            self._rounds.pause()
        self._is_loaded = False
        self._take_back()
        loaded = self._loaded
        changed = [key for (of, key), own, n in loaded if of[key] is not own or own._version != n]
        if loaded:
            self._note()  # parts of the model may have been cast
        self._loaded = []
        left = [each for each in self._stays if each.release()]
        if left:
            gc.collect()
            left = [each for each in left if each.release()]
        nbytes = dict(zip(self._problem.wants.names, self._problem.nbytes, strict=True))
        self.held_nbytes = sum(nbytes[self._stays[each]] for each in left)
        self._put_away()
        self._device.trim()
        if left:
            raise OffloadError(
                f"{self.name} cannot leave the device: something still refers to the memory of "
                f"{self._stays[left[0]]} (a graph, a view, the traceback of an error): delete that"
            )
        if changed:
            raise OffloadError(
                f"{self.name}: something has changed a weight ({changed[0]}), and the change is "
                "lost: a model that is offloaded cannot be changed; close() the offload first"
            )

    def close(self) -> None:
        """Free all memory of the model, which has no values until it is loaded again."""
        with self._turns.lock:
            if self._closed:
                return
            self.leave()
            self._closed = True
            self._rounds.close(f"the offload of {self.name} was closed")
            self._take_back()
            for each in reversed(self._calls):
                each.take_out()
            for parameter in self._stays:
                parameter.invalidate(keep=False)
            self._adapter.take_out()

    def _put_away(self) -> None:
        where = torch.device(self._device.info.name)
        for parameter, name in self._stays.items():
            dtype = self._cast.get(parameter, self._dtypes[parameter])
            absent = _Away(name, tuple(parameter.shape), dtype, where)
            absent._streamload_turn = weakref.ref(self), parameter.slots[0]
            for container, key in parameter.slots:
                self._away.append(((container, key), container[key]))
                container[key] = absent

    def _take_back(self) -> None:
        for (container, key), own in self._away:
            container[key] = own
        self._away.clear()

    # --- uses -----------------------------------------------------------------------------------

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Bring the model, and keep it there until the end."""
        with self._turns.lock:
            self._turns.begin(self)
            yield

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the model on the device for a call."""
        use = object()
        try:
            with self._there():
                outermost = not self.uses
                self.uses.add(use)
            with self._passes.timed() if outermost else nullcontext():
                yield
        finally:
            with self._turns.lock:
                self.uses.discard(use)

    def begin(self) -> None:
        """Bring the model, until another one needs the memory."""
        with self._there():
            pass

    @property
    def report(self) -> OffloadReport | None:
        """Counts and times so far; None before the first call."""
        if self._report is None:
            return None
        return OffloadReport.of(self.plan, self._report, self._passes, self._rounds)


class _Called(torch_modules.Wrapped):
    """A substitute for a method of a model, which brings the model first."""

    def __init__(self, model: nn.Module, name: str, turn: Turn) -> None:
        super().__init__(model, name)
        self._turn = turn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method, without a graph of autograd, which would keep weights."""
        torch_modules.refuse_training(self._module)
        with self._turn.used(), torch.no_grad():
            return self._own()(*args, **kwargs)


class _Applied(_Called):
    """A substitute for ``_apply`` of a model without layers that stream, which may be cast."""

    def __call__(self, change: Callable[[Any], Any], *args: Any) -> Any:
        """Cast all weights; raises OffloadError if they were to move."""
        model = self._module
        probe = torch.empty(0, device=next(model.parameters()).device)
        if change(probe).device != probe.device or changes_nothing(model, change):
            return self._own()(change, *args)
        self._turn.apply(model, change)
        return model


class _Away(torch_modules.StreamedParameter):
    """Placeholder of a weight whose model is not there; functions that need values bring it.

    It keeps no reference to the model.
    """

    _streamload_turn: tuple[weakref.ref[Turn], Slot]

    def values(self, what: str, *, writes: bool = False) -> torch.Tensor:
        """Bring the model for function ``what``, and return the weight."""
        name = self._streamload_streamed
        if writes or what == ".data":  # which others write to
            raise OffloadError(
                f"{name}: a model that is offloaded cannot be changed ({what}): close() the "
                "offload first"
            )
        refer, (container, key) = self._streamload_turn
        if (turn := refer()) is None:
            raise OffloadError(f"{name} is a weight of a model that is gone")
        turn.begin()
        return cast(torch.Tensor, container[key])
