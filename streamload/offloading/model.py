"""Find the layers of a model and let them stream: the code that all frameworks share."""

from __future__ import annotations

import importlib
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import open_shard
from streamload.codecs.cast_table import OutOfRange, make_cast
from streamload.core.dtypes import DType
from streamload.core.location import Url
from streamload.core.patterns import matches
from streamload.core.tensors import TensorInfo
from streamload.devices.base import Device, Framework, Parameter
from streamload.errors import CheckpointError, OffloadError
from streamload.loading.options import OnOverrun, Options
from streamload.loading.place import host_engine, host_room_nbytes
from streamload.loading.prepare import Place
from streamload.offloading.layers import (
    LayerGroup,
    LayerKind,
    Module,
    grouped,
    groups_by_name,
    outer_modules,
    without,
    without_small,
)
from streamload.offloading.plan import OffloadPlan, Problem
from streamload.offloading.prefetch import Rounds
from streamload.offloading.slots import Slots
from streamload.planning.match import Match
from streamload.planning.moves import DeviceSpec, TensorRequests

# Arguments of models with a shape (sequences, tokens), or with one axis more.
_IDS, _STATES = ("input_ids", "decoder_input_ids"), ("inputs_embeds", "decoder_inputs_embeds")

# The KV cache: transformers 5.24 renamed it.
_CACHES = ("past_key_values", "cache")
# The output of an encoder, for the decoder.
_ENCODED = "encoder_outputs"


@dataclass(slots=True)
class Passes:
    """Passes (calls of a model), and the tokens that a plan leaves room for in each.

    Attributes:
        count: number of ended passes.
        seconds: their time.
        running: passes under way.
        tokens: planned most tokens of one pass, all sequences together; None: no room is planned.
        cached: planned most tokens of the KV cache, likewise; 0: no room is planned.
        most_tokens: the most tokens that a pass had.
        most_cached: the most tokens that the cache had at the end of a pass.
    """

    count: int = 0
    seconds: float = 0.0
    running: int = 0
    tokens: int | None = None
    cached: int = 0
    on_overrun: OnOverrun = "warn"
    most_tokens: int = 0
    most_cached: int = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count and time a pass."""
        begun = time.perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.count += 1
            self.seconds += time.perf_counter() - begun

    @property
    def has_room(self) -> bool:
        """Whether any room is planned, so that tokens are counted."""
        return self.tokens is not None or self.cached > 0

    @property
    def overrun(self) -> str:
        """In words, the most tokens that exceeded the plan's room; "" for none."""
        return self._over(self.most_tokens, self.most_cached)

    def see(self, tokens: int, cached: int) -> None:
        """Check a pass that begins, of ``tokens``, with ``cached`` in the KV cache at its end."""
        over = self._over(tokens, cached)
        first = over and not self.overrun
        if over and self.on_overrun == "error":
            raise OffloadError(f"{over}: {self._instead(tokens, cached)}")
        self.most_tokens = max(self.most_tokens, tokens)
        self.most_cached = max(self.most_cached, cached)
        if first:
            said = f"{over}: it takes memory beyond the budget; {self._instead(tokens, cached)}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    def _over(self, tokens: int, cached: int) -> str:
        if self.tokens is not None and tokens > self.tokens:
            return f"a pass of {tokens} tokens, and the plan has room for {self.tokens}"
        if self.cached and cached > self.cached:
            return f"a KV cache of {cached} tokens, and the plan has room for {self.cached}"
        return ""

    def _instead(self, tokens: int, cached: int) -> str:
        if self.tokens is not None and self.cached == self.tokens:
            most = max(tokens, cached)
            return f"offload the model with tokens={most} or more: all of prompts and answers"
        if self.tokens is not None and tokens > self.tokens:
            return f"offload the model with tokens={tokens} or more"
        return "offload the model with a larger context= (or batch=)"


def tokens_of(arguments: Mapping[str, Any], is_ids: Callable[[Any], bool]) -> tuple[int, int]:
    """Return how many tokens a pass computes, and how many the KV cache has then, in all sequences.

    Counts ids of tokens (integers, by ``is_ids``) and states of shape (sequences, tokens, width)
    among the model's ``arguments``; both counts are 0 if there are none.
    """
    shapes = []
    for name, value in arguments.items():
        given = _first(value) if name == _ENCODED else value
        if name in (*_IDS, *_STATES, _ENCODED) and hasattr(given, "shape"):
            shapes.append((name, tuple(given.shape if name in _IDS else given.shape[:-1])))
    if not shapes:
        first = next((each for each in arguments.values() if hasattr(each, "shape")), None)
        if first is None or not (is_ids(first) or len(first.shape) == 3):
            return 0, 0
        shapes.append(("", tuple(first.shape if is_ids(first) else first.shape[:-1])))
    counts = [math.prod(map(int, shape)) for _, shape in shapes]
    decoded = [shape for name, shape in shapes if name.startswith("decoder")]
    shape = (decoded or [shape for _, shape in shapes])[-1]
    past = next((arguments[name] for name in _CACHES if arguments.get(name) is not None), None)
    if past is None and arguments.get("use_cache") is False:
        return max(counts), 0
    sequences = math.prod(map(int, shape[:-1]))
    length = max(int(shape[-1]) + _length(past), _allocated(past))
    return max(counts), sequences * length


def _first(outputs: Any) -> Any:
    with suppress(TypeError, IndexError, KeyError):
        return outputs[0]
    return None


def _allocated(past: Any) -> int:
    """Return the tokens of each sequence that a KV cache of fixed size holds; 0 if it grows."""
    layers = getattr(past, "layers", ())
    return max((int(getattr(each, "max_cache_len", 0) or 0) for each in layers), default=0)


def _length(past: Any) -> int:
    if hasattr(past, "get_seq_length"):
        return int(past.get_seq_length())
    with suppress(TypeError, IndexError, AttributeError, KeyError):
        return int(past[0][0].shape[-2])  # of older models: pairs of keys and values
    return 0


class RowReader:
    """Reads rows of a tensor and casts them. Between two calls it holds no memory and no file."""

    def __init__(
        self, checkpoint: Checkpoint, info: TensorInfo, dst: DType, out_of_range: OutOfRange
    ) -> None:
        """Read nothing yet; ``info``: a tensor of at least one axis; ``dst``: dtype of results."""
        self.row_shape, self.dst = info.shape[1:], dst
        self._info = info
        self._header = checkpoint.headers[info.shard]
        self._numel = math.prod(self.row_shape)
        self._nbytes = info.dtype.nbytes(self._numel)  # of a row
        self._cast = make_cast(info.dtype, dst, out_of_range=out_of_range)

    def read(self, rows: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return rows as a flat array of bytes, cast to the reader's `dst`; ``rows``: ascending."""
        count = self._info.shape[0]
        if rows and not 0 <= rows[0] <= rows[-1] < count:
            wrong = next(row for row in rows if not 0 <= row < count)
            raise IndexError(f"{self._info.name} has {count} rows, and not row {wrong}")
        data = np.empty(len(rows) * self._nbytes, np.uint8)
        view = memoryview(data.data)
        reader = open_shard(self._header)
        try:
            reader.stop_ahead()  # rows are scattered in the file
            breaks = [at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1]
            for at, stop in pairwise([0, *breaks, len(rows)] if rows else []):
                start = self._info.start + rows[at] * self._nbytes
                reader.read_into(start, view[at * self._nbytes : stop * self._nbytes])
        except CheckpointError as error:
            raise error.of_tensor(self._info.name) from error
        finally:
            reader.close()
        if self.dst is self._info.dtype:
            return data
        out = np.empty(self.dst.nbytes(len(rows) * self._numel), np.uint8)
        if len(rows):
            self._cast(view, memoryview(out.data))
        return out


P = TypeVar("P", bound=Parameter)
LayerWeights = Sequence[tuple[int, str]]  # of each weight, the index of its buffer, and its name
ExpertWeights = Sequence[Mapping[str, int]]  # of each expert, by weight, the index of its buffer


class Wrapped(Protocol):
    """A substitute for a method of a module, in place while the model is offloaded."""

    def put(self) -> None:
        """Put the substitute in place of the method."""

    def take_out(self) -> None:
        """Restore the module's own method."""


class ModelAdapter(ABC, Generic[P]):
    """Finds the layers of a model, and makes its modules fetch their weights when called.

    Each framework has a subclass. ``parameters`` are by their names in plans, ``modules`` by their
    names without wrappers, and ``layers`` are patterns of names of layers.
    """

    slots: type[Slots]

    def __init__(
        self,
        model: Any,
        parameters: Mapping[str, P],
        modules: dict[str, Any],
        layers: Sequence[str],
    ) -> None:
        self.passes, self.notes = Passes(), list[str]()
        self._model, self._parameters, self._modules = model, parameters, modules
        self._layers = layers
        self._wrapped: list[Wrapped] = []
        self._emptied: list[str] = []  # names of parameters without memory, as they stream
        for name, parameter in parameters.items():
            if parameter.block is not None:
                raise OffloadError(f"{name} is sharded: offload the model of each process whole")
            if parameter.fixed:
                raise OffloadError(f"{name} cannot be offloaded: {parameter.fixed}")

    # --- of each framework --------------------------------------------------------------------

    @abstractmethod
    def can_stream(self, module: Any) -> bool:
        """Whether a module's weights are used only when it is called."""

    def only_holds(self, module: Any) -> bool:
        """Whether a module only contains others, and is not called itself."""
        return False

    @abstractmethod
    def is_embedding(self, module: Any) -> bool:
        """Whether a module only looks up rows of its weight."""

    @abstractmethod
    def must_stay(self, name: str) -> bool:
        """Whether the parameter of this name has to stay, even if its module streams."""

    @abstractmethod
    def begin_streaming(self, plan: OffloadPlan, problem: Problem, device: Device) -> None:
        """Put placeholders without memory in place of all weights that stream."""

    @abstractmethod
    def stream_layer(self, name: str, number: int, weights: LayerWeights, rounds: Rounds) -> None:
        """Make a module get its weights from ``rounds``, as layer ``number``, at each call."""

    def experts(self, problem: Problem, stay: Sequence[str]) -> list[LayerGroup]:
        """Return groups of experts that can be cached one by one; ``stay``: patterns that stay."""
        return []

    def stream_experts(self, name: str, layer: int, weights: ExpertWeights, rounds: Rounds) -> None:
        """Make a module fetch only chosen experts; ``layer``: its number among such modules."""
        raise AssertionError(f"{type(self).__name__} has no experts")

    @abstractmethod
    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        """Make an embedding read only the rows that it looks up, from the file to the device."""

    @abstractmethod
    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """End `put`: make the model count passes, and refuse to be saved or moved.

        Without ``rounds``, if nothing streams, only the tokens of passes are counted.
        """

    def take_out(self) -> None:
        """Restore the modules; streamed weights hold no values until the model is loaded again."""
        for wrapped in reversed(self._wrapped):
            wrapped.take_out()
        self._wrapped.clear()
        for name in self._emptied:
            self._parameters[name].invalidate(keep=False)
        self._emptied.clear()

    def _wrap(self, wrapped: Wrapped) -> None:
        wrapped.put()
        self._wrapped.append(wrapped)

    # --- planning -----------------------------------------------------------------------------

    def groups(self, problem: Problem, stay: Sequence[str]) -> list[LayerGroup]:
        """Return the layers in running order; ``stay``: patterns of parameters that stay."""
        wants = problem.wants
        found = self._called(groups_by_name(wants.names, problem.nbytes, self._layers), wants.names)
        layers = [name for name, _, in_layer in found if in_layer]
        outer = outer_modules(found)
        experts = self.experts(problem, stay)
        taken = {at for group in experts for at in group.wants}
        fixed: set[int] = set()
        heads: list[LayerGroup] = []
        for at in [at for module in without(found, taken) for at in module.numbers]:
            named: dict[str, None] = {}  # the layers, or else parent modules, that hold it
            for each in self._parameters[wants.names[at]].names:
                layer = next((layer for layer in layers if each.startswith(f"{layer}.")), None)
                named[layer or each.rpartition(".")[0]] = None
            modules = list(named)
            if self.stays(wants.names[at], stay):
                fixed.add(at)
            elif len(modules) > 1:
                if head := self._head_with(at, modules, problem, layers):
                    heads.append(head)
                    taken.add(at)
                else:
                    fixed.add(at)

        def group_of(name: str, numbers: tuple[int, ...], _: bool) -> LayerGroup:
            module = self._modules.get(name)
            kind: LayerKind = "fixed"
            if self._is_gathered(module, numbers, problem):
                kind = "rows"
            elif module is not None and self.can_stream(module) and name not in outer:
                kind = "layer"
            return LayerGroup(name, numbers, kind)

        rest, small = without_small(without(found, taken), problem.nbytes)
        groups = grouped(rest, fixed.__contains__, group_of)
        return _joined([*groups], heads) + experts + small

    def _called(self, groups: Sequence[Module], names: Sequence[str]) -> list[Module]:
        """Return ``groups``, with each layer that is never called replaced by its children."""
        found = []
        for name, numbers, in_layer in groups:
            parts: dict[str, list[int]] = {}
            if in_layer and self.only_holds(self._modules.get(name)):
                for at in numbers:
                    child, dot, _ = names[at].removeprefix(f"{name}.").partition(".")
                    parts.setdefault(f"{name}.{child}" if dot else "", []).append(at)
            if not parts or "" in parts:
                found.append(Module(name, numbers, in_layer))
            else:
                found += self._called([Module(*part, True) for part in parts.items()], names)
        return found

    def stays(self, name: str, stay: Sequence[str]) -> bool:
        """Whether a parameter has to stay, or matches one of the patterns of ``stay``."""
        names = self._parameters[name].names
        return self.must_stay(name) or any(matches(each, stay) for each in names)

    def _head_with(
        self, at: int, names: Sequence[str], problem: Problem, layers: Sequence[str]
    ) -> LayerGroup | None:
        """Return the head that shares weight ``at`` with an embedding; None if it has to stay.

        ``names``: the modules that hold the weight; ``layers``: names of layers.
        """
        rows = [n for n in names if self._is_gathered(self._modules.get(n), [at], problem)]
        heads = [name for name in names if name not in rows]
        if len(rows) != 1 or len(heads) != 1 or heads[0] in layers:
            return None
        module = self._modules.get(heads[0])
        if module is None or not self.can_stream(module):
            return None
        return LayerGroup(heads[0], (at,), "layer", rows[0])

    def _is_gathered(self, module: Any, numbers: Sequence[int], problem: Problem) -> bool:
        """Whether a module is an embedding whose rows can be read from the file in a pass."""
        if len(numbers) != 1 or not self.is_embedding(module):
            return False
        want = problem.wants[numbers[0]]
        if len(want.source) != 1 or want.transpose is not None or want.coding is not None:
            return False
        (row,) = want.source
        info = problem.checkpoint.tensors[row.tensor]
        whole = row.start == 0 and row.stop == info.shape[0] and row.columns is None
        plain = whole and info.shape == want.shape and problem.is_plain(numbers[0])
        return plain and not isinstance(info.shard, Url)

    # --- running ------------------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: TensorRequests) -> None:
        """Free the weights that stream; raises OffloadError if something else holds their bytes."""
        absent = plan.residency.absent
        numbers = (at for group in plan.groups if group.name in absent for at in group.wants)
        for name in (wants.names[at] for at in numbers):
            if reason := self._parameters[name].release():
                raise OffloadError(f"{name} streams, and {reason}")
            self._emptied.append(name)

    def put(self, plan: OffloadPlan, problem: Problem, device: Device, rounds: Rounds) -> None:
        wants, dsts = problem.wants, problem.dsts
        self.begin_streaming(plan, problem, device)
        by_name = {group.name: group for group in plan.groups}

        def gather(name: str, group: LayerGroup) -> None:
            each = ((at, self._parameters[wants.names[at]].names) for at in group.wants)
            at = next(at for at, names in each if name in {n.rpartition(".")[0] for n in names})
            info = problem.checkpoint.tensors[wants[at].source[0].tensor]
            reader = RowReader(problem.checkpoint, info, dsts[at], problem.options.out_of_range)
            self.gather_rows(name, reader, device)

        order = plan.stream.placements.names if plan.stream is not None else ()
        placements = iter(plan.layer_placements)
        for number, name in enumerate(plan.residency.streams):
            group = by_name[name]
            place = {order[at]: n for n, at in enumerate(next(placements))}
            weights = [(place[wants.names[at]], wants.names[at]) for at in group.wants]
            self.stream_layer(name, number, weights, rounds)
            if group.rows:
                gather(group.rows, group)
        for name in plan.residency.gathers:
            gather(name, by_name[name])
        for number, name in enumerate(plan.residency.experts):
            each = [
                {order[at].rpartition("[")[0]: n for n, at in enumerate(next(placements))}
                for _ in range(by_name[name].experts)
            ]
            self.stream_experts(name, number, each, rounds)
        self.end_putting(plan, rounds)


def _joined(groups: Sequence[LayerGroup], heads: Sequence[LayerGroup]) -> list[LayerGroup]:
    found = {group.name: group for group in groups}
    for head in heads:
        own = found.pop(head.name, None)
        if own is not None and own.kind == "layer":
            head = replace(head, wants=head.wants + own.wants)
        elif own is not None:
            found[f"{own.name} (stays)"] = replace(own, name=f"{own.name} (stays)")
        found[head.name] = head
    return [*found.values()]


# By framework, module and name of its `ModelAdapter`.
_MODELS: Mapping[str, tuple[str, str]] = {
    "torch": ("streamload.offloading.torch", "TorchModel"),
    "tinygrad": ("streamload.offloading.tinygrad", "TinygradModel"),
}


def adapter_of(place: Place, match: Match, layers: Sequence[str] = ()) -> ModelAdapter[Any]:
    """Return the adapter that offloads a model; raises OffloadError if it cannot be offloaded."""
    module, kind = _MODELS[check_place(place).name]
    adapter: ModelAdapter[Any] = getattr(importlib.import_module(module), kind)(
        place.model, match.parameters, layers
    )
    return adapter


def check_place(place: Place) -> Framework:
    """Return a model's framework; raises OffloadError if it is unknown, or devices are several."""
    if place.owner is None:
        raise OffloadError("offload needs a model: its layers are brought when they compute")
    if place.owner.name not in _MODELS:
        raise OffloadError(f"models of {type(place.model).__module__} are not offloaded here")
    if len(names := place.devices.opened) != 1:
        raise OffloadError(f"a model is offloaded to one device, not to {', '.join(names)}")
    return place.owner


def device_of(place: Place, options: Options, wants: TensorRequests) -> DeviceSpec:
    """Return the spec of a load's single device, after compiling the casts of all weights."""
    policy = options.policy
    specs = place.specs(options, wants.needs_native_bf16(policy))
    clamp, required = options.out_of_range == "clamp", options.cast == "device"
    (spec,), _ = place.devices.compile_casts(specs, wants, policy, clamp=clamp, required=required)
    host_engine(wants, policy, [spec], options.cast, clamp=clamp)
    free = host_room_nbytes()  # to compile took some of it
    return spec.within(None if free is None else max(free - place.host_held_nbytes, 0))
