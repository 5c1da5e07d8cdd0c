"""The tensors of one quantised weight, and the checks of their headers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn

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


#: How the values of a weight lie in its first member: as the weight itself, as its transpose, or
#: as all of its elements in one line.
Order = Literal["rows", "columns", "flat"]

_NO_FACTS: Mapping[str, Any] = MappingProxyType({})
#: Where config.json says how a checkpoint is quantised.
CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors of one quantised weight.

    Attributes:
        kind: how it is quantised: "bnb-nf4", "bnb-fp4", "bnb-int8", "ct-packed", "int8", "fp8",
            "mxfp4", "awq", "gptq" or "torchao-" and the name of torchao's class.
        name: the name of the weight that they stand for.
        members: the tensors by their role, the quantised values first: "weight", "scale",
            "zero_point", "g_idx", "shape", "global_scale", "input_scale" and other "input_"s; of
            bitsandbytes "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state",
            "SCB" and "weight_format"; of torchao the names that its metadata give.
        shape: of the weight, unpacked; None where only values in the file say it (see
            `streamload.codecs.stored.read_states`), or torchao alone knows its layout.
        block: how many elements share a scale, along each of the last axes of the weight; one
            number for elements in one line, all of it where the number is the axis's own.
        bits: of one quantised value.
        order: how the values lie.
        dtype: what the weight was before, where that is stored.
        facts: what else the layout says, by its own names.
    """

    kind: str
    name: str
    members: Mapping[str, TensorInfo]
    shape: tuple[int, ...] | None
    block: tuple[int, ...]
    bits: int
    order: Order = "rows"
    dtype: DType | None = None
    facts: Mapping[str, Any] = field(default_factory=lambda: _NO_FACTS)

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
    """A quantised weight as one tensor: its values, under its name, with its shape.

    Attributes:
        group: what belongs to it.
        headers: of the files that these are in.
    """

    group: Group = field(compare=False, repr=False)
    headers: tuple[Header, ...] = field(compare=False, repr=False)

    @property
    def lies_turned(self) -> bool:
        """Whether models have its transpose, of the last two axes."""
        return self.group.kind == "mxfp4"


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

    def find(self, name: str) -> TensorInfo | None:
        """Return a tensor, or None."""
        return self.tensors.get(name)

    def need(self, name: str, of: str, role: str) -> TensorInfo:
        """A tensor that belongs to another one; raises CheckpointError where it is missing."""
        found = self.find(name)
        if found is None:
            self.refuse(of, f"its {role} is missing", name, "no such tensor")
        return found

    def refuse(self, tensor: str, problem: str, expected: object, found: object) -> NoReturn:
        """Raise CheckpointError for a tensor of a quantised weight."""
        info = self.find(tensor)
        where = self.path if info is None else info.shard
        raise CheckpointError(where, problem, expected, found, tensor=tensor)

    def check(self, info: TensorInfo, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise CheckpointError unless a tensor has one of the dtypes, and of the shapes.

        Args:
            info: the tensor.
            dtypes: their safetensors codes.
            shapes: that it may have; none for any.
        """
        if info.dtype.code not in dtypes:
            self.refuse(
                info.name,
                "the dtype of a quantised weight's tensor is wrong",
                " or ".join(dtypes),
                info.dtype.code,
            )
        if shapes and info.shape not in shapes:
            self.refuse(
                info.name,
                "the shape of a quantised weight's tensor is wrong",
                " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes)),
                list(info.shape),
            )


def config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that says how the checkpoint is quantised; empty without one."""
    for part in _parts(config):
        for key in CONFIG_KEYS:
            if isinstance(found := part.get(key), Mapping):
                return found
    return {}


def config_key(config: Mapping[str, Any]) -> str | None:
    """The key by which a configuration says that the checkpoint is quantised, or None."""
    return next((key for key in CONFIG_KEYS for part in _parts(config) if part.get(key)), None)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration, and the configurations inside it, one level down."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))
