"""Models of transformers: `from_pretrained`, streamed under a budget.

transformers builds the model, names its weights, ties them, and computes the buffers that no
checkpoint holds; streamload moves the bytes. Tried with transformers 5.9, 5.17 and 5.23.
"""

from __future__ import annotations

import copy
import glob
import importlib
import importlib.util
import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
import torch
import transformers
from torch import nn
from transformers import initialization

from streamload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamload.checkpoint.url import Url
from streamload.decide import on_unstored
from streamload.devices.names import environment_fp16_cast, framework
from streamload.dtypes import BF16, F16, DType, DTypeArgument, parse_dtype
from streamload.errors import CheckpointError, DeviceError, ShapeMismatch, StateDictMismatchError
from streamload.load import load_state_dict
from streamload.lookup import Devices, open_devices
from streamload.mapping import Source
from streamload.match import same_bytes
from streamload.options import LoadOptions, StreamOptions, WeightOptions, takes
from streamload.planning.allocators import taken
from streamload.planning.budget import Budget, BudgetLike
from streamload.planning.demand import DTypePolicy
from streamload.planning.plan import RowRange
from streamload.progress import Progress
from streamload.report import LoadReport
from streamload.units import parse_bytes

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        build_glob_alternation,
        dot_natural_key,
        rename_source_key,
    )

    _plan_of_dtypes = transformers.PreTrainedModel._get_dtype_plan
    _leave_out_what_is_ignored = transformers.PreTrainedModel._adjust_missing_and_unexpected_keys
except (ImportError, AttributeError) as error:
    if error.name not in (
        *("transformers.conversion_mapping", "transformers.core_model_loading"),
        *("_get_dtype_plan", "_adjust_missing_and_unexpected_keys"),
    ):
        raise  # something that transformers itself imports is missing, or broken
    raise ImportError(
        "streamload.transformers needs transformers 5.9 or later, whose loader says how it names "
        f"and fuses weights; this is {transformers.__version__}"
    ) from error

__all__ = ["from_pretrained"]

_log = logging.getLogger("streamload")

# Columns that stand for a row of any length when transformers' operations are tried on row
# numbers: the fewest with which halving and interleaving the columns cannot be overlooked.
_COLUMNS = 4

# What is allocated for transformers to compute is filled with a mark first, and looked at again
# afterwards, a block at a time.
_BLOCK_NBYTES = 2**16
_FEWEST_MARKED = 16  # of bools and the like, whose marks are patterns: fewer could be meant
_SEED = 0x5EED

_COMPUTED_IN = ("float16", "bfloat16", "float32", "float64")  # what torch takes as its default


class ModelOptions(WeightOptions, StreamOptions, total=False):
    """The options of `from_pretrained`; see `streamload.options.LoadOptions`."""

    budget: BudgetLike
    device: str | Sequence[str] | None
    strict: bool
    progress: Progress


@takes()
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    model_class: Any = None,
    config: Any = None,
    attn_implementation: str | None = None,
    **options: Unpack[ModelOptions],
) -> Any:
    """Load a model of transformers, streamed under a budget in bytes.

    What comes back is what transformers' own ``from_pretrained`` gives: the same class, weights,
    ties, buffers and generation config, in evaluation mode. Nothing is downloaded.

    Args:
        path: a folder with ``config.json`` and safetensors files, one of those files, an index, or
            ``org/name`` in the local Hugging Face cache.
        budget: most bytes on each device, as in `streamload.load_state_dict`. What the checkpoint
            does not hold counts too: missing parameters, those of other shapes, and buffers that
            transformers computes (as many bytes stay free on each of several devices).
        device: "cuda:0", "cpu" or another of torch's; a list of devices that the layers are split
            over, dispatched by accelerate. None: ``STREAMLOAD_DEVICE``, else torch's default, else
            the first accelerator, else the CPU. In a list of GPUs and "cpu", accelerate keeps the
            CPU's share in host memory, and brings it to the first GPU a layer at a time to compute
            there: when the model runs, that layer takes memory of the GPU beyond the budget.
        dtype: a dtype or its name, "checkpoint" (each weight as it is stored), or patterns by the
            checkpoint's names, the first that matches deciding. None, and for what no pattern
            matches: what ``config.json`` says, or where it does not, the dtype of the
            checkpoint's first float, as transformers' ``dtype="auto"`` has it; bfloat16 becomes
            float16 where a device does not compute in it. What transformers keeps in float32 in a
            16-bit model stays so, except under "checkpoint" and patterns other than ``"*"``.
        model_class: a class of transformers, an Auto class or one of your own; None takes the one
            that ``config.json`` names.
        config: a configuration to use in place of ``config.json``; it is copied.
        attn_implementation: "eager", "sdpa", ...; None lets transformers choose.
        strict: missing and unexpected names and other shapes are an error, except for names that
            the model's class says may be ignored. With False, what matches is loaded, the rest is
            initialised as transformers does it, at random, and the report names it. What is
            initialised counts against the budget.
        reserve: as in `streamload.load_state_dict`; beside what the model has of its own.
        context: as in `streamload.load_state_dict`; the cache is that of transformers, full.
        **options: see `ModelOptions`.

    Returns:
        The model, a ``transformers.PreTrainedModel``; its ``streamload_report`` is the
        `LoadReport`, and with several devices its ``hf_device_map`` says what is where.

    Raises:
        CheckpointError: there is no configuration or no class for it, the checkpoint is quantised
            or needs code of its own, or is invalid.
        StateDictMismatchError: names or shapes do not match, or transformers makes a parameter of
            the checkpoint's tensors in a way that is not a choice of rows; before any data is
            loaded.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated. Where
            the checkpoint stores apart what ``config.json`` ties, and that fits once and not
            twice, both are read first, to see whether they differ.
        BudgetExceededError: something holds memory that the plan counts on.
        MemoryTakenError: others took memory meanwhile, and the load does not fit any more.
        UnsupportedCastError: a dtype cannot be cast or held.
        OutOfRangeError: under ``out_of_range="error"``.
        DeviceError: a device is not there, does not work or failed, or there are several and
            accelerate is not installed.
        ValueError: an argument is invalid.
    """
    device, strict = options["device"], options["strict"]
    if not isinstance(strict, bool):
        raise ValueError(f"strict is True or False, not {strict!r}")
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a checkpoint, not {type(path).__name__}")
    _check_accelerate(device)
    checkpoint = open_checkpoint(path)
    given = config is not None
    config = _configuration(checkpoint, config)
    if given:  # what it needs to run follows from it, too
        checkpoint = replace(checkpoint, config=config.to_dict())
    found = checkpoint.path
    config.name_or_path = str(found) if isinstance(found, Url) else os.fsdecode(path)
    devices = open_devices(device, framework("torch"), {})
    chosen = _Dtypes.choose(checkpoint, config, options, devices)
    model = _on_meta(checkpoint, config, model_class, chosen.main, attn_implementation)
    names = _Names.of(model, checkpoint)
    names.check(model, checkpoint, strict)
    _untie(model, checkpoint, names, _stored_otherwise)

    def load() -> LoadReport:
        beside = _beside_nbytes(model, names, devices)
        asked: LoadOptions = {
            **options,
            "dtype": chosen.rules(model, checkpoint, names),
            "rename": lambda name: name if name in names.fill else None,
            "mapping": names.fill,
            "strict": False,  # `names.check` knows what may be ignored
            "reserve": parse_bytes(options["reserve"]) + beside,
        }
        return load_state_dict(model, checkpoint, **asked)

    try:
        report = load()
    except StateDictMismatchError:
        # it compares what is tied and stored twice when it knows that all fits, and has read and
        # allocated nothing else; transformers leaves apart what differs
        if not _untie(model, checkpoint, names, _different_values):
            raise
        report = load()
    # what it says about buffers without values is true no longer
    stale = on_unstored(framework("torch").unstored(model), report.plan)
    report = replace(report, notes=tuple(note for note in report.notes if note not in stale))
    _initialise_the_rest(model, checkpoint, report)
    _finish(model, checkpoint, names, report)
    return model


def _check_accelerate(device: object) -> None:
    """Raise DeviceError for several devices where accelerate is not installed."""
    if device is None or isinstance(device, str) or not isinstance(device, Sequence):
        return
    if len(device) > 1 and importlib.util.find_spec("accelerate") is None:
        raise DeviceError(
            ", ".join(map(str, device)),
            "a model runs on several devices by accelerate, which is not installed "
            "(pip install accelerate)",
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- the configuration and the class ---------------------------------------------------------------


def _folder(checkpoint: Checkpoint) -> Path:
    path = checkpoint.path
    if isinstance(path, Url):
        raise CheckpointError(
            path,
            "transformers reads a model's configuration on this machine: "
            "build the model of it, and load_state_dict takes the URL",
        )
    return path if path.is_dir() else path.parent


def _configuration(checkpoint: Checkpoint, given: Any) -> Any:
    """A configuration that is ours to change."""
    if given is not None and not isinstance(given, transformers.PreTrainedConfig):
        raise ValueError(f"config is a configuration of transformers, not {given!r}")
    path = _folder(checkpoint) / "config.json"
    if given is not None:
        config = copy.deepcopy(given)
    elif not path.is_file():
        raise CheckpointError(
            checkpoint.path, "no configuration", expected=f"{path} or config=", found="neither"
        )
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(
                path.parent, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, OSError) as error:  # an unknown model, or code of its own
            raise CheckpointError(path, _first_line(error)) from error
    adapter = _folder(checkpoint) / "adapter_config.json"
    if adapter.is_file():
        raise CheckpointError(
            adapter,
            "the folder holds an adapter of peft, which is loaded by transformers on its own",
        )
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and weights != checkpoint.path.name:
        raise CheckpointError(
            path,
            "it names the file of the weights: give that",
            expected=weights,
            found=checkpoint.path,
        )
    for part in _parts(config):
        quantised = getattr(part, "quantization_config", None)
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            raise CheckpointError(
                path,
                "the checkpoint is quantised, and is loaded as it is by transformers alone",
                expected="no quantization_config",
                found=method,
            )
    return config


def _parts(config: Any) -> list[Any]:
    """The configuration, and those of the models that the model consists of."""
    inner = (getattr(config, key, None) for key in config.sub_configs)
    return [config, *(part for part in inner if part is not None)]


def _on_meta(
    checkpoint: Checkpoint,
    config: Any,
    model_class: Any,
    dtype: DType,
    attn_implementation: str | None,
) -> Any:
    """The model, tied, on the meta device: it takes no memory."""
    path = _folder(checkpoint) / "config.json"
    if model_class is None:
        named = (config.architectures or [None])[0]
        try:
            model_class = getattr(transformers, named, None) if isinstance(named, str) else None
        except ImportError as error:  # which does not say why
            problem = f"transformers cannot import {named}: {error.__cause__ or error}"
            raise ImportError(problem, name=error.name) from error
        if not _is_model_class(model_class):
            raise CheckpointError(
                path,
                "transformers has no class for the model",
                expected="architectures that it knows, or model_class=",
                found=named,
            )
    for part in _parts(config):
        part.dtype = getattr(torch, dtype.name)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype.name)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if _is_model_class(model_class):
        build = model_class._from_config
    elif hasattr(model_class, "from_config"):  # an Auto class
        build = model_class.from_config
        options["trust_remote_code"] = False
    else:
        raise ValueError(f"model_class is a class of transformers, not {model_class!r}")
    # drop-path rates and the like are read while a model is built: not from the meta device
    readable = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    with torch.device("meta"), readable():
        return build(config, **options)


def _is_model_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


# -- dtypes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Dtypes:
    """Which dtype the weights get.

    Attributes:
        asked: what the caller asked for.
        main: the dtype of the model, in which it is built.
    """

    asked: DTypeArgument
    main: DType

    @classmethod
    def choose(
        cls,
        checkpoint: Checkpoint,
        config: Any,
        options: ModelOptions,
        devices: Devices,
    ) -> _Dtypes:
        """Settle the model's dtype; computes on the devices where it depends on them."""
        asked = options["dtype"]
        policy = DTypePolicy.parse(asked, environment_fp16_cast())
        rules = dict(policy.rules)
        rest = rules.get("*")
        if rest is not None:
            if rest.name not in _COMPUTED_IN:
                raise ValueError(f"a model computes in {', '.join(_COMPUTED_IN)}, not in {rest}")
            return cls(asked, rest)
        stored = _stored(checkpoint)
        if "*" in rules and len(stored) == 1:  # "checkpoint"
            return cls(asked, stored[0])
        main = _stated(checkpoint, config) or next(iter(stored), None)
        if main is None:  # no floats
            main = parse_dtype(_name(torch.get_default_dtype()))
        if main is BF16 and "*" not in rules:
            budget, cast = Budget.parse(options["budget"]), options["cast"]
            specs = devices.specs(budget, policy, cast, {}, bf16_undecided=True)
            if policy.fp16_cast is not None or not all(spec.native_bf16 for spec in specs):
                main = F16
        return cls(asked, main)

    def rules(self, model: Any, checkpoint: Checkpoint, names: _Names) -> DTypeArgument:
        """The dtypes to load with: what is asked for, and what transformers has otherwise."""
        if isinstance(self.asked, Mapping):
            given = dict(self.asked)
        else:
            given = {} if self.asked is None else {"*": self.asked}
        rest = given.pop("*", self.main)
        if rest == "checkpoint":
            return {**given, "*": rest}
        out = dict(given)
        kept = _kept(model, getattr(torch, self.main.name))
        state = model.state_dict()
        for tensor, parameter in names.first.items():
            wanted = parse_dtype(_name(kept(parameter) or state[parameter].dtype))
            if not wanted.kind == checkpoint.tensors[tensor].dtype.kind == "float":
                continue
            if wanted is not self.main and not any(fnmatchcase(tensor, one) for one in given):
                out[glob.escape(tensor)] = wanted
        return {**out, "*": rest}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stated(checkpoint: Checkpoint, config: Any) -> DType | None:
    """The dtype in the configuration, if there is one."""
    stated = getattr(config, "dtype", None)
    if stated is None:
        return None
    if _name(stated) not in _COMPUTED_IN:
        raise CheckpointError(
            _folder(checkpoint) / "config.json",
            "the dtype is none that a model computes in",
            expected=", ".join(_COMPUTED_IN),
            found=_name(stated),
        )
    return parse_dtype(_name(stated))


def _stored(checkpoint: Checkpoint) -> list[DType]:
    """The dtypes of the checkpoint's floats, in the order in which transformers looks at them."""
    infos = sorted(checkpoint.tensors.values(), key=lambda info: (info.shard, info.name))
    return list(dict.fromkeys(info.dtype for info in infos if info.dtype.name in _COMPUTED_IN))


def _kept(model: Any, dtype: torch.dtype) -> Any:
    """A function from parameter names to the dtype that transformers keeps them in, or None."""
    plan = _plan_of_dtypes(model, dtype)
    if not plan:
        return lambda name: None
    pattern, _, of_group = build_glob_alternation(list(plan))

    def kept(name: str) -> Any:
        found = pattern.search(name)
        return plan[of_group[found.lastgroup]] if found else None

    return kept


# -- names -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Names:
    """What fills each parameter, as transformers names and fuses the checkpoint's tensors.

    Attributes:
        fill: sources by parameter name.
        first: by checkpoint tensor, the parameter that it goes to, or the first of several.
        unexpected: by checkpoint tensor, the name that the model lacks.
        refused: parameters that rows of tensors do not make up, and why.
        transforms: transformers' own that were used.
    """

    fill: dict[str, Source] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    transforms: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, checkpoint: Checkpoint) -> _Names:
        """Ask transformers for all names; nothing is read."""
        out = cls()
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {p: one for one in converters for p in one.source_patterns}
        state, prefix = model.state_dict(), model.base_model_prefix
        fused: dict[str, list[tuple[str, str]]] = {}
        plain: dict[str, str] = {}
        for tensor in sorted(checkpoint.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, state)
            if name not in state and tensor in state:  # it has its new name already
                name, pattern = rename_source_key(tensor, [], [], prefix, state)
            if name not in state:
                out.unexpected[tensor] = name
                continue
            out.first[tensor] = name
            if pattern is not None:
                fused.setdefault(name, []).append((pattern, tensor))
            elif name in plain:
                out.refused[name] = f"{plain[name]} and {tensor} would both become it"
            else:
                plain[name] = tensor
                out._add(name, _whole(checkpoint, tensor))
        for name, members in fused.items():
            out._convert(model, checkpoint, by_pattern[members[0][0]], name, members)
        out.transforms = [one for one in transforms if getattr(one, "was_used", lambda: True)()]
        return out

    def _add(self, name: str, source: Source) -> None:
        if name in self.fill:
            first, second = (s.rows[0].tensor for s in (self.fill[name], source))
            self.refused[name] = f"{first} and {second} would both become it"
        self.fill[name] = source

    def _convert(
        self,
        model: Any,
        checkpoint: Checkpoint,
        converter: Any,
        name: str,
        members: Sequence[tuple[str, str]],
    ) -> None:
        """Run transformers' operations on row numbers in place of rows, and see where they go."""

        def convert(number: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
            one = copy.deepcopy(converter)
            for index, (pattern, tensor) in enumerate(members):
                one.add_tensor(name, tensor, pattern, number(numbered.ids(index)))
            made = one.convert(name, model=_Narrow(model), config=model.config)
            return {new: ids[0] if isinstance(ids, list) else ids for new, ids in made.items()}

        try:
            numbered = _Numbered.of(checkpoint, [tensor for _, tensor in members])
            made, again = convert(lambda ids: ids), convert(_renumbered)
            if not all(torch.equal(_renumbered(ids), again[new]) for new, ids in made.items()):
                raise _NotRowsError("the values change")
            sources = {new: numbered.source(ids) for new, ids in made.items()}
        except Exception as error:  # whatever an operation of transformers raises
            operations = ", ".join(map(repr, converter.operations))
            tensors = [tensor for _, tensor in members]
            listed = ", ".join(tensors[:4]) + (", ..." if len(tensors) > 4 else "")
            first, *others = converter.target_patterns
            self.refused[name] = (
                f"transformers makes it of {listed} by {operations}, "
                f"which is not a choice of their rows ({_first_line(error)})"
            )
            for other in others:
                self.refused[name.replace(first, other)] = f"it is made together with {name}"
            return
        for new, source in sources.items():
            self._add(new, source)

    def check(self, model: Any, checkpoint: Checkpoint, strict: bool) -> None:
        """Raise StateDictMismatchError for all that is wrong, in one go.

        Args:
            model: on the meta device.
            checkpoint: the headers.
            strict: whether missing and unexpected names and other shapes are wrong.
        """
        state = model.state_dict(keep_vars=True)
        known = [*self.fill, *self.refused]
        filled = {id(state[name]) for name in known if name in state}
        info = SimpleNamespace(
            missing_keys={name for name, t in state.items() if id(t) not in filled},
            unexpected_keys={*self.unexpected.values(), *(n for n in self.fill if n not in state)},
        )
        _leave_out_what_is_ignored(model, info)
        missing = {id(t): name for name, t in reversed(state.items()) if name in info.missing_keys}
        unexpected = [t for t, name in self.unexpected.items() if name in info.unexpected_keys]
        unexpected += [n for n in self.fill if n not in state and n in info.unexpected_keys]
        shapes = [
            ShapeMismatch(name, tuple(state[name].shape), found)
            for name, source in self.fill.items()
            if name in state and (found := source.shape or ()) != tuple(state[name].shape)
        ]
        problems = [f"{name}: {why}" for name, why in self.refused.items()]
        if problems or (strict and (missing or unexpected or shapes)):
            raise StateDictMismatchError(
                checkpoint.path,
                missing=sorted(missing.values()) if strict else (),
                unexpected=unexpected if strict else (),
                wrong_shape=shapes if strict else (),
                problems=problems,
            )


def _whole(checkpoint: Checkpoint, tensor: str) -> Source:
    shape = checkpoint.tensors[tensor].shape
    return Source((RowRange(tensor, 0, shape[0] if shape else 1),), shape=shape)


class _NotRowsError(ValueError):
    """A result that is not made of whole rows."""


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Tensors that an operation puts together, with a number for each of their rows.

    A row here is everything along the last axis. It is represented by ``columns`` numbers, so that
    whatever splits, reorders or changes it shows; all other axes are as long as they really are.

    Attributes:
        tensors: their names.
        shapes: their shapes.
        bases: the number of each tensor's first row, and one past the last row of all.
        columns: how many numbers stand for a row.
        length: how many elements a row has.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bases: tuple[int, ...]
    columns: int
    length: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, tensors: Sequence[str]) -> _Numbered:
        """Number the rows of tensors, one tensor after the other.

        Raises:
            _NotRowsError: their rows are not of one length.
        """
        shapes = tuple(checkpoint.tensors[tensor].shape for tensor in tensors)
        lengths = {shape[-1] if len(shape) > 1 else 1 for shape in shapes}
        length = lengths.pop()
        if lengths or not all(map(math.prod, shapes)):
            raise _NotRowsError("rows are empty, or of different lengths")
        bases = tuple(accumulate(map(_row_count, shapes), initial=0))
        return cls(tuple(tensors), shapes, bases, min(_COLUMNS, length), length)

    def ids(self, index: int) -> torch.Tensor:
        """The numbers in place of a tensor: its shape, but for the last of several axes."""
        shape = self.shapes[index]
        start, stop = (base * self.columns for base in self.bases[index : index + 2])
        small = self.bases[-1] * self.columns < 2**29  # the other numbers fit too
        kind = torch.int32 if small else torch.int64
        numbers = torch.arange(start, stop, dtype=kind, device="cpu")
        return numbers.view(*shape[:-1], self.columns) if len(shape) > 1 else numbers.view(shape)

    def source(self, ids: torch.Tensor) -> Source:
        """Read off which rows make up a result.

        Raises:
            _NotRowsError: it is not made of whole rows along the first axis of these tensors.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise _NotRowsError("the dtype changes")
        shape = tuple(ids.shape)
        if not ids.numel() or (shape and shape[-1] % self.columns):
            raise _NotRowsError("the last axis is cut")
        rows = ids.reshape(-1, self.columns).numpy()
        first = rows[:, 0]
        if (first % self.columns).any() or (rows != first[:, None] + np.arange(self.columns)).any():
            raise _NotRowsError("the last axis is cut or reordered")
        if shape and self.length > 1:
            shape = (*shape[:-1], shape[-1] // self.columns * self.length)
        return Source(tuple(self._ranges(first // self.columns)), shape=shape)

    def _ranges(self, numbers: np.ndarray[Any, Any]) -> Iterator[RowRange]:
        """Runs of consecutive numbers as ranges along the first axes of the tensors."""
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for run in np.split(numbers, breaks):
            start, stop = int(run[0]), int(run[-1]) + 1
            while start < stop:
                index = bisect_right(self.bases, start) - 1
                tensor, base = self.tensors[index], self.bases[index]
                end = min(stop, self.bases[index + 1])
                inner = math.prod(self.shapes[index][1:-1])  # rows of one step of the first axis
                if (start - base) % inner or (end - base) % inner:
                    raise _NotRowsError(f"{tensor} is cut along its second axis")
                yield RowRange(tensor, (start - base) // inner, (end - base) // inner)
                start = end


def _renumbered(ids: torch.Tensor) -> torch.Tensor:
    """Other numbers for the same rows: what only moves them about does the same with both."""
    return ids * -3 - 7


def _row_count(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1] if len(shape) > 1 else shape)


class _Narrow:
    """A model whose parameters are as wide as numbered rows, for operations that ask for shapes."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        """A parameter's stand-in, on the meta device."""
        shape = tuple(self._model.get_parameter(name).shape)
        narrow = (*shape[:-1], min(_COLUMNS, shape[-1])) if len(shape) > 1 else shape
        return torch.empty(narrow, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# -- ties, buffers, and what comes after the load --------------------------------------------------


def _slot(model: Any, name: str) -> tuple[Any, str]:
    module, _, leaf = name.rpartition(".")
    return model.get_submodule(module), leaf


def _untie(
    model: Any,
    checkpoint: Checkpoint,
    names: _Names,
    differ: Callable[[Checkpoint, Source, Source], bool],
) -> bool:
    """Leave apart what the configuration ties and the checkpoint stores twice and differently.

    So does transformers. What is stored twice and is the same is loaded once.

    Returns:
        Whether anything was.
    """
    found = False
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in names.fill or source not in names.fill:
            continue
        if not differ(checkpoint, names.fill[target], names.fill[source]):
            continue
        found = True
        _log.warning(
            "%s: %s and %s are stored with different values: they are not tied, though "
            "config.json says so",
            checkpoint.path,
            target,
            source,
        )
        module, leaf = _slot(model, target)
        old = getattr(module, leaf)
        setattr(module, leaf, nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad))
        del model.all_tied_weights_keys[target]
    return found


def _stored_otherwise(checkpoint: Checkpoint, a: Source, b: Source) -> bool:
    """Whether the headers say that two sources are not the same; reads no data."""
    one, other = (checkpoint.tensors[source.rows[0].tensor].dtype for source in (a, b))
    return a.shape != b.shape or one is not other


def _different_values(checkpoint: Checkpoint, a: Source, b: Source) -> bool:
    return not same_bytes(checkpoint, a, b)


def _beside_nbytes(model: Any, names: _Names, devices: Devices) -> int:
    """Bytes that will be allocated on a device beside what the checkpoint fills.

    For parameters that it does not hold or holds in another shape, and for buffers that no
    checkpoint holds. All of them are counted for each device: where they go is not known yet.

    Args:
        model: on the meta device, with the dtypes that it will have.
        names: what fills it.
        devices: where it goes.
    """
    state = model.state_dict(keep_vars=True)
    filled = {
        id(state[name])
        for name, source in names.fill.items()
        if name in state and source.shape == tuple(state[name].shape)
    }
    rest = [t.nbytes for t in (*model.parameters(), *model.buffers()) if id(t) not in filled]
    infos = [device.info for device in devices.opened.values()]
    return max(sum(taken(info.allocator, info.granularity_nbytes, rest)) for info in infos)


def _initialise_the_rest(model: Any, checkpoint: Checkpoint, report: LoadReport) -> None:
    """Let transformers compute what no checkpoint holds, where the load has put its module.

    Raises:
        StateDictMismatchError: something has no values after that.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old one: its id stays taken
    for prefix, module in model.named_modules():
        for entries in (module._parameters, module._buffers):
            for key, old in entries.items():
                if old is None:
                    continue
                if old.device.type != "meta" and key not in module._non_persistent_buffers_set:
                    old._is_hf_initialized = True  # transformers leaves it as it is
                    continue
                if id(old) not in made:
                    name = f"{prefix}.{key}" if prefix else key
                    made[id(old)] = old, _on(torch.device(_device_of(name, report)), old)
                entries[key] = made[id(old)][1]
    model.initialize_weights()
    model.tie_weights(recompute_mapping=False)
    unset = {id(new) for old, new in made.values() if old.device.type == "meta" and _is_unset(new)}
    left = [*model.named_parameters(), *model.named_buffers()]
    problems = [
        f"{name}: the checkpoint does not hold it, and transformers does not compute it"
        for name, tensor in left
        if tensor.device.type == "meta" or id(tensor) in unset
    ]
    if problems:
        raise StateDictMismatchError(checkpoint.path, problems=problems)


def _on(device: torch.device, old: torch.Tensor) -> torch.Tensor:
    """A tensor in the place of one of the meta device; what it holds shows that nobody set it."""
    if old.device.type == "meta":
        new = torch.empty_like(old, device=device, memory_format=torch.contiguous_format)
        for block, mark in _marked(new):
            block.copy_(mark)
    else:
        new = old.to(device)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _is_unset(tensor: torch.Tensor) -> bool:
    """Whether a tensor still holds what `_on` put there: every byte of it."""
    if not tensor.numel() or (not _has_mark(tensor.dtype) and tensor.numel() < _FEWEST_MARKED):
        return False
    return all(torch.equal(block, mark) for block, mark in _marked(tensor))


def _has_mark(dtype: torch.dtype) -> bool:
    """Whether a dtype has a value that nothing is expected to compute: NaN, or the least integer.

    Floats of 8 bits may have no NaN, and the least unsigned integer is 0.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return bool(dtype.itemsize > 1)
    return bool(dtype.is_signed)


def _marked(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of a contiguous tensor in blocks, and for each those that mark it as unset.

    They are one value where the dtype has one that nothing computes, else a fixed pattern that
    looks random, else, where a few elements may be anything, zeros. In blocks: a model's mask may
    be large, and is not to be held twice.
    """
    dtype = tensor.dtype
    if _has_mark(dtype):
        floats = dtype.is_floating_point or dtype.is_complex
        value = math.nan if floats else torch.iinfo(dtype).min
        count = _BLOCK_NBYTES // dtype.itemsize
        mark = torch.full((count,), value, dtype=dtype, device="cpu").view(torch.uint8)
    elif tensor.numel() < _FEWEST_MARKED:
        mark = torch.zeros(tensor.nbytes, dtype=torch.uint8, device="cpu")
    else:
        # numbers of its own: those with which transformers initialises are the caller's
        numbers = np.random.default_rng(_SEED)
        most = 2 if dtype is torch.bool else 256
        mark = torch.from_numpy(numbers.integers(most, size=_BLOCK_NBYTES, dtype=np.uint8))
    mark = mark.to(tensor.device)
    # contiguous again, where transformers has put other data in its place
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for block in flat.split(_BLOCK_NBYTES):
        yield block, mark[: block.numel()]


def _device_of(name: str, report: LoadReport) -> str | int:
    """Where a tensor belongs: with the smallest module around it whose place is known.

    Where none is, since nothing was loaded: on the first device.
    """
    parts = name.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    places = report.device_map
    known = (places[module] for module in around if module in places)
    return next(known, report.plan.devices[0].device)


def _finish(model: Any, checkpoint: Checkpoint, names: _Names, report: LoadReport) -> None:
    """Make the model ready for use, as transformers' own ``from_pretrained`` does."""
    model._weight_conversions = names.transforms  # `save_pretrained` goes back by them
    model.eval()
    folder = _folder(checkpoint)
    # before transformers 5 wrote a file of their own, generation settings were in config.json
    known = any((folder / name).is_file() for name in ("generation_config.json", "config.json"))
    if known and model.can_generate() and hasattr(model, "adjust_generation_fn"):
        model.adjust_generation_fn(
            None,
            False,
            None,
            folder,
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision="main",
            subfolder="",
            trust_remote_code=False,
        )
    model.streamload_report = report
    places = dict(report.device_map)
    if len(set(places.values())) > 1:
        accelerate = importlib.import_module("accelerate")
        skip = sorted(model._skip_keys_device_placement or ())
        accelerate.dispatch_model(model, device_map=places, skip_keys=skip)
