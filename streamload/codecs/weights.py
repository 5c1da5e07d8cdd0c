"""The tensors of one quantized weight, and the checks of their headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError
from streamload.files.folder import open_reader
from streamload.files.header import Header


def read_whole(shards: Iterable[Header], infos: Sequence[TensorInfo]) -> Iterator[bytes]:
    """Read small tensors wholly, in the order of ``infos``; each file is opened once."""
    headers = {header.path: header for header in shards}
    out: dict[str, bytes] = {}
    for shard in dict.fromkeys(info.shard for info in infos):
        header = headers[shard]
        with open_reader(
            shard, header.file_nbytes, "pread", header.state, header.views, header.parts
        ) as reader:
            for info in infos:
                if info.shard == shard:
                    data = bytearray(info.nbytes)
                    reader.read_into(info.start, memoryview(data))
                    out[info.name] = bytes(data)
    return (out[info.name] for info in infos)


_NO_FACTS: Mapping[str, Any] = MappingProxyType({})
#: The keys of config.json for the quantization of a checkpoint.
CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")


def is_text(name: str) -> bool:
    """Whether a tensor is the JSON of a 4-bit weight's state: its length depends on the dtype."""
    return ".quant_state.bitsandbytes__" in name


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The stored tensors of one quantized weight, and facts from headers and config.

    Attributes:
        kind: the layout: "bnb-nf4", "bnb-fp4", "bnb-int8", "ct-packed", "int8", "fp8",
            "mxfp4", "awq", "gptq", "mlx-4bit-64-bfloat16" (bits, group, dtype of scales), a block
            type of GGUF, or "torchao-" and torchao's class.
        members: the tensors by role, the quantized values first: "weight", "scale",
            "zero_point", "bias", "g_idx", "shape", "global_scale", "input_scale" and other
            "input_"s; of bitsandbytes "absmax", "quant_map", "nested_absmax", "nested_quant_map",
            "quant_state", "SCB" and "weight_format"; of torchao the names in its metadata.
        shape: the unpacked weight's shape; None if only values in the file state it (see
            `stored.read_states`), or torchao alone knows its layout.
        block: how many elements share a scale, along each of the last axes of the weight; one
            number for elements in one line, the axis's length for all of it.
        dtype: the weight's dtype before quantization, if that is stored.
        facts: other facts of the layout, by its own names.
        is_transposed: whether models have the last two axes exchanged.
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
        """Bytes of all tensors of the weight."""
        return sum(info.nbytes for info in self.members.values())

    @property
    def values(self) -> TensorInfo:
        """The tensor of the quantized values."""
        return next(iter(self.members.values()))


@dataclass(frozen=True, slots=True)
class Packed(TensorInfo):
    """A quantized weight listed as one tensor, with the weight's name and unpacked shape."""

    group: QuantizedWeight = field(compare=False, repr=False)
    headers: tuple[Header, ...] = field(compare=False, repr=False)

    @property
    def is_computed(self) -> bool:
        """True: elements are decoded."""
        return True

    @property
    def files(self) -> tuple[Location, ...]:
        """The files of all stored tensors."""
        return tuple(header.path for header in self.headers)

    def read(self, member: TensorInfo) -> bytes:
        """Return all bytes of one of the weight's tensors, read from its file."""
        return next(read_whole(self.headers, [member]))


def shape_in_models(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape that models have of a tensor; quantized weights may be stored transposed."""
    if isinstance(info, Packed) and info.group.is_transposed:
        return (*info.shape[:-2], info.shape[-1], info.shape[-2])
    return info.shape


@dataclass(frozen=True)  # no slots: a property is cached
class Layouts:
    """The headers of a checkpoint, in which quantized weights are recognized."""

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
        """Yield the ``weights`` settings of each config group of compressed-tensors."""
        groups = self.quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                yield weights

    def find(self, name: str) -> TensorInfo | None:
        """Return the tensor called ``name``; None if the checkpoint has none."""
        return self.tensors.get(name)

    def need(self, name: str, of: str, role: str) -> TensorInfo:
        """Return tensor ``name``, the ``role`` of tensor ``of``, or raise CheckpointError."""
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
        """Raise CheckpointError unless a tensor has one of the dtype codes and of the shapes."""
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
    """Return the quantization settings in the content of a ``config.json``; {} if it has none."""
    found = (part.get(key) for part in _parts(config) for key in CONFIG_KEYS)
    return next((settings for settings in found if isinstance(settings, Mapping)), {})


def config_key(config: Mapping[str, Any]) -> str | None:
    """Return the key of the quantization settings in a ``config.json``, or None."""
    return next((key for key in CONFIG_KEYS for part in _parts(config) if part.get(key)), None)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration, and the configurations nested directly in it."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))


#: Names that quantized checkpoints use for the scale of tensor ``{module}{leaf}``.
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
#: Endings of the names of quantized values that the names of their scales lack.
_VALUES = ("_packed", "_qdata", "_data", "_blocks", "_scale")


def scale_of(layouts: Layouts, name: str) -> str | None:
    """Return the scale without which tensor ``name`` must not be cast: values would lack a factor.

    That is the scale tensor of floats of at most 8 bits, or the key of ``config.json`` for
    quantization; None if neither exists, and for every other dtype.
    """
    dtype = layouts.tensors[name].dtype
    if dtype.kind != "float" or dtype.bits > 8:
        return None
    return scale_beside(layouts, name) or config_key(layouts.config)


def scale_beside(layouts: Layouts, name: str) -> str | None:
    """Return the name of the scale tensor of tensor ``name``, or None."""
    return next((s for s in _scale_names(name) if s != name and s in layouts.tensors), None)


def _scale_names(name: str) -> Iterator[str]:
    """Yield the names that the scale of tensor ``name`` may have."""
    stems = [name, *(name.removesuffix(ending) for ending in _VALUES if name.endswith(ending))]
    for stem in stems:
        module, dot, leaf = stem.rpartition(".")
        for pattern in _SCALES + _WEIGHT_SCALES * (leaf == "weight"):
            yield pattern.format(module=module + dot, leaf=leaf)
