"""The tensors of one quantized weight, and the checks of their headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError
from streamload.files.header import Header
from streamload.files.local import ReaderKind, open_reader


def read_whole(shards: Iterable[Header], infos: Sequence[TensorInfo]) -> Iterator[bytes]:
    """The bytes of small tensors; each file is opened once."""
    headers = {header.path: header for header in shards}
    out: dict[str, bytes] = {}
    for shard in dict.fromkeys(info.shard for info in infos):
        header = headers[shard]
        kind: ReaderKind = "pread" if isinstance(shard, Path) else "auto"
        with open_reader(shard, header.file_nbytes, kind, header.state, header.views) as reader:
            for info in infos:
                if info.shard == shard:
                    data = bytearray(info.nbytes)
                    reader.read_into(info.start, memoryview(data))
                    out[info.name] = bytes(data)
    return (out[info.name] for info in infos)


_NO_FACTS: Mapping[str, Any] = MappingProxyType({})
#: The keys of config.json for the quantization of a checkpoint.
CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The tensors of one quantized weight.

    Attributes:
        kind: how it is quantized: "bnb-nf4", "bnb-fp4", "bnb-int8", "ct-packed", "int8", "fp8",
            "mxfp4", "awq", "gptq", a block type of GGUF, or "torchao-" and torchao's class.
        name: the name of the weight.
        members: the tensors by their role, the quantized values first: "weight", "scale",
            "zero_point", "g_idx", "shape", "global_scale", "input_scale" and other "input_"s; of
            bitsandbytes "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state",
            "SCB" and "weight_format"; of torchao the names in its metadata.
        shape: of the weight, unpacked; None if only values in the file state it (see
            `stored.read_states`), or torchao alone knows its layout.
        block: how many elements share a scale, along each of the last axes of the weight; one
            number for elements in one line, the axis's length for all of it.
        bits: of one quantized value.
        dtype: the weight's before it was quantized, if that is stored.
        facts: other facts of the layout, by its own names.
        is_transposed: whether models have its transpose, of the last two axes.
    """

    kind: str
    name: str
    members: Mapping[str, TensorInfo]
    shape: tuple[int, ...] | None
    block: tuple[int, ...]
    bits: int
    dtype: DType | None = None
    facts: Mapping[str, Any] = field(default_factory=lambda: _NO_FACTS)
    is_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all of its tensors."""
        return sum(info.nbytes for info in self.members.values())

    @property
    def values(self) -> TensorInfo:
        """The tensor of the quantised values."""
        return next(iter(self.members.values()))


@dataclass(frozen=True, slots=True)
class Packed(TensorInfo):
    """A quantized weight as one tensor: its values, under its name, with its shape.

    Attributes:
        group: its tensors.
        headers: of the files that hold them.
    """

    group: QuantizedWeight = field(compare=False, repr=False)
    headers: tuple[Header, ...] = field(compare=False, repr=False)

    @property
    def lies_turned(self) -> bool:
        """See `QuantizedWeight.is_transposed`."""
        return self.group.is_transposed


def shape_in_models(info: TensorInfo) -> tuple[int, ...]:
    """A tensor's shape as models have it."""
    if isinstance(info, Packed) and info.lies_turned:
        return (*info.shape[:-2], info.shape[-1], info.shape[-2])
    return info.shape


@dataclass(frozen=True)  # no slots: a property is cached
class Layouts:
    """The headers of a checkpoint, in which quantized weights are recognized.

    Attributes:
        path: of the checkpoint, for errors.
        tensors: all of its tensors by name.
        shards: the headers of its files.
        config: its ``config.json``.
    """

    path: Location
    tensors: Mapping[str, TensorInfo]
    shards: Sequence[Header]
    config: Mapping[str, Any]

    @cached_property
    def quantization(self) -> Mapping[str, Any]:
        """The quantization settings of ``config.json``; empty if it has none."""
        return config_of(self.config)

    @property
    def method(self) -> str:
        """The quantization method of ``config.json``, or ""."""
        return str(self.quantization.get("quant_method", ""))

    def stated_weights(self) -> Iterator[Mapping[str, Any]]:
        """What the groups of compressed-tensors' settings state of weights."""
        groups = self.quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                yield weights

    def find(self, name: str) -> TensorInfo | None:
        """Return a tensor, or None."""
        return self.tensors.get(name)

    def need(self, name: str, of: str, role: str) -> TensorInfo:
        """Return a tensor that belongs to another one; raises CheckpointError if it is missing."""
        found = self.find(name)
        if found is None:
            self.refuse(of, f"its {role} is missing", name, "no such tensor")
        return found

    def refuse(self, tensor: str, problem: str, expected: object, found: object) -> NoReturn:
        """Raise CheckpointError for a tensor of a quantized weight."""
        info = self.find(tensor)
        where = self.path if info is None else info.shard
        raise CheckpointError(where, problem, expected, found, tensor=tensor)

    def check(self, info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor has one of the dtypes, and of the shapes."""
        if info.dtype.code not in dtypes:
            self.refuse(
                info.name,
                "the dtype of a quantised weight's tensor is wrong",
                " or ".join(dtypes),
                info.dtype.code,
            )
        if shapes and info.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            self.refuse_shape(info, expected)

    def refuse_shape(self, info: TensorInfo, expected: str) -> NoReturn:
        """Raise CheckpointError for the shape of a tensor of a quantized weight."""
        problem = "the shape of a quantised weight's tensor is wrong"
        self.refuse(info.name, problem, expected, list(info.shape))


def config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization settings of a configuration; empty if it has none."""
    for part in _parts(config):
        for key in CONFIG_KEYS:
            if isinstance(found := part.get(key), Mapping):
                return found
    return {}


def config_key(config: Mapping[str, Any]) -> str | None:
    """The key of the quantization settings of a configuration, or None."""
    return next((key for key in CONFIG_KEYS for part in _parts(config) if part.get(key)), None)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration, and those in it, one level down."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))


#: Names that writers of quantized checkpoints give the scale of tensor ``{module}{leaf}``.
_SCALES = (
    "{module}{leaf}_scale_inv",  # DeepSeek; transformers' fine-grained FP8
    "{module}{leaf}_scale",  # compressed-tensors, ModelOpt, FBGEMM, Quark, torchao, quanto
    "{module}{leaf}_scales",  # gpt-oss
    "{module}{leaf}.scale",
    "{module}{leaf}_scale_2",  # ModelOpt, of a weight_scale that is itself float8
    "{module}{leaf}_global_scale",  # compressed-tensors, the same
    "{module}scale_{leaf}",  # ComfyUI
)
#: The same, for a leaf called "weight" only.
_WEIGHT_SCALES = (
    "{module}scale",  # DeepSeek's own inference layout
    "{module}scale_inv",
    "{module}qscale_weight",  # Mistral
)
#: Endings of quantized values that their scale's name does not have.
_VALUES = ("_packed", "_qdata", "_data", "_blocks", "_scale")


def scale_of(layouts: Layouts, name: str) -> str | None:
    """Return why a tensor of floats of at most 8 bits must not change its dtype.

    Quantized values are wrong by a factor without their scale.

    Returns:
        The name of its scale tensor, or the key of ``config.json`` for quantization
        ("quantization_config"); None if neither exists, and for every other dtype.

    Raises:
        KeyError: there is no such tensor.
    """
    dtype = layouts.tensors[name].dtype
    if dtype.kind != "float" or dtype.bits > 8:
        return None
    return scale_beside(layouts, name) or config_key(layouts.config)


def scale_beside(layouts: Layouts, name: str) -> str | None:
    """The name of the scale tensor of tensor ``name``, or None."""
    return next((s for s in _scale_names(name) if s != name and s in layouts.tensors), None)


def _scale_names(name: str) -> Iterator[str]:
    """Names that a scale of tensor ``name`` would have."""
    stems = [name, *(name.removesuffix(ending) for ending in _VALUES if name.endswith(ending))]
    for stem in stems:
        module, dot, leaf = stem.rpartition(".")
        for pattern in _SCALES + _WEIGHT_SCALES * (leaf == "weight"):
            yield pattern.format(module=module + dot, leaf=leaf)
