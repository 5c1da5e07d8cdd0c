"""The quantized weights that a load dequantizes: those for which `dtype=` names a dtype.

Such a weight is then one tensor of the checkpoint, a `Packed` with the weight's name and shape; its
scales, zero points and quantization state are no longer listed as tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.scheme import CodedWeight, codec_of, is_blocks
from streamload.codecs.stored import OWN_METHOD, read_states, unknown_codes
from streamload.codecs.weights import Packed, QuantizedWeight
from streamload.core.dtypes import F64, PACKED
from streamload.core.location import Location
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.devices.base import Parameter
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.files.header import Turn
from streamload.planning.moves import DTypePolicy
from streamload.planning.sources import is_conv1d


def asked(checkpoint: Checkpoint, policy: DTypePolicy, *, blocks: bool = False) -> list[str]:
    """Return the names of quantized weights that ``dtype=`` dequantizes.

    ``blocks``: also of GGUF weights whose dtype no rule decides.
    """
    if not policy.rules and not (blocks and checkpoint.stored):
        return []
    for name, beside in unknown_codes(checkpoint.layouts, checkpoint.members).items():
        if policy.asks(name, F64):  # any but "checkpoint"
            info, wanted = checkpoint.tensors[name], policy.resolve(name, F64, native_bf16=True)
            reason = (
                f"it is packed in a layout that is not known, with {beside} next to it; leave it "
                f'as it is: dtype={{"{name}": "checkpoint", ...}}'
            )
            raise UnsupportedCastError(
                info.dtype.name, wanted.name, reason=reason, tensor=name, path=info.shard
            )
    return [
        group.name
        for group in checkpoint.groups.values()
        if (dtype := PACKED.get(group.kind)) is not None
        and (
            policy.asks(group.name, dtype)
            or (blocks and group.name in checkpoint.stored and not policy.mentions(group.name))
        )
    ]


def decoded_always(checkpoint: Checkpoint) -> list[str]:
    """Return the names of weights in blocks, GGUF's and MLX's: no module of transformers has them.

    Those that streamload wrote have modules of streamload, which `from_pretrained` makes.
    """
    if checkpoint.layouts.method == OWN_METHOD:
        return []
    return [g.name for g in checkpoint.groups.values() if g.kind in PACKED and is_blocks(g.kind)]


def kept_kinds(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the layouts of dequantized weights that ``quant="stored"`` can keep, by name."""
    if checkpoint.layouts.method == OWN_METHOD:
        return {}
    packed = (each for each in checkpoint.tensors.values() if isinstance(each, Packed))
    return {each.name: each.group.kind for each in packed if is_blocks(each.group.kind)}


def asked_by_model(
    checkpoint: Checkpoint,
    policy: DTypePolicy,
    parameters: Iterable[Parameter],
    fills: Mapping[str, Sequence[str]],
    coded: Mapping[str, CodedWeight],
) -> list[str]:
    """Return the names of quantized weights to dequantize for a model.

    Weights that the model also holds quantized (``coded``, by name), or will hold once they are
    loaded, stay as stored. ``fills`` maps each tensor to the names of the parameters that it fills.
    """
    by_name = _by_name(parameters)
    out: dict[str, None] = dict.fromkeys(asked(checkpoint, policy))
    packed: set[str] = set()
    for tensor, group in checkpoint.members.items():
        if group.kind not in PACKED:
            continue
        for name in fills.get(tensor, ()):
            parameter = by_name.get(name)
            if tensor != group.values.name:
                packed.update([group.name] if parameter is not None else [])
                continue
            suffix = group.values.name.removeprefix(group.name)
            parameter = parameter or by_name.get(name.removesuffix(suffix))
            if parameter is None:
                continue
            held = coded.get(name)
            if parameter.dtype == group.values.dtype.name or (held and held.format == group.kind):
                packed.add(group.name)
            # GGUF stores weights of floats as blocks
            elif (parameter.keeps is not None or PACKED[group.kind].block > 1) and not (
                policy.mentions(group.name)
            ):
                out[group.name] = None
    return [name for name in out if name not in packed]


def _by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    return {name: p for p in parameters for name in (*p.names, *p.wrapped)}


def dequantized(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Return the checkpoint with each named quantized weight as a `Packed`, decoded when read."""
    if not names:
        return checkpoint
    states = read_states(checkpoint.layouts, checkpoint.groups)
    chosen = {name: states[name] for name in names}
    of = {info.name: group for group in chosen.values() for info in group.members.values()}
    out: dict[str, TensorInfo] = {}
    for info in checkpoint.tensors.values():
        group = of.get(info.name)
        if group is not None and group.values is not info:
            continue
        made = info if group is None else _packed(checkpoint, group)
        if out.setdefault(made.name, made) is not made:
            problem = "it has the name of a quantised weight"
            raise CheckpointError(
                info.shard, problem, group and group.values.name, tensor=made.name
            )
    return replace(checkpoint, tensors=MappingProxyType(out))


def in_order_of(
    checkpoint: Checkpoint, parameters: Iterable[Parameter], fills: Mapping[str, Sequence[str]]
) -> Checkpoint:
    """Return the checkpoint `as_in_models`, unless a model has Linears where models have Conv1D.

    Shapes decide: a parameter fits a stored weight that is not square, and not its transpose.
    """
    by_name = _by_name(parameters)
    for info in checkpoint.tensors.values():
        if not (isinstance(info, Packed) and _is_of_linears(checkpoint, info)):
            continue
        shapes = [by_name[name].shape for name in fills.get(info.name, ()) if name in by_name]
        if any(_is_part(s, info.shape) and not _is_part(s, info.shape[::-1]) for s in shapes):
            return checkpoint
    return as_in_models(checkpoint)


def _is_part(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a shape is that of a matrix, or of its slice along one axis."""
    cut = [n for n, of in zip(shape, whole, strict=False) if n != of]
    return len(shape) == len(whole) and len(cut) < 2 and all(map(int.__le__, shape, whole))


def _is_of_linears(checkpoint: Checkpoint, info: Packed) -> bool:
    """Return whether a weight's library stores all layers as Linears, a Conv1D's transposed.

    Headers of GGUF files state their own permutations.
    """
    codec = codec_of(info.group.kind)
    return codec is not None and codec.of_linears and info.name not in checkpoint.turns


def as_in_models(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with dequantized weights in the shapes of the unquantized model.

    bitsandbytes and blocks in safetensors have a Conv1D as a Linear, with the transposed weight:
    see `Checkpoint.turns`.
    """
    turns: dict[Location, dict[str, Turn]] = {}
    for info in checkpoint.tensors.values():
        if (
            isinstance(info, Packed)
            and _is_of_linears(checkpoint, info)
            and len(info.shape) == 2
            and min(info.shape) > 1
            and is_conv1d(checkpoint.config, info.name)
        ):
            if info.shape[1] % info.dtype.unit:
                raise CheckpointError(
                    info.shard,
                    "its rows are no whole bytes, and it is not transposed: keep such weights as "
                    'they are with dtype={"*.c_*.weight": "checkpoint", "*": "float16"}',
                    f"rows of a multiple of {info.dtype.unit} values",
                    info.shape[1],
                    tensor=info.name,
                )
            order = RowTranspose(1, *info.shape)
            turns.setdefault(info.shard, {})[info.name] = Turn(order, info.shape[::-1])
    if not turns:
        return checkpoint
    shards = tuple(
        replace(header, turns={**header.turns, **turns.get(header.path, {})})
        for header in checkpoint.shards
    )
    return replace(checkpoint, shards=shards)


def with_blocks(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Undo `dequantized` for the named weights: return the checkpoint with their stored bytes."""
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        if name in names and isinstance(info, Packed):
            tensors |= {each.name: each for each in info.group.members.values()}
        else:
            tensors[name] = info
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def _packed(checkpoint: Checkpoint, group: QuantizedWeight) -> Packed:
    dtype, values, shape = PACKED[group.kind], group.values, group.shape
    assert shape is not None, group.name
    shards = dict.fromkeys(info.shard for info in group.members.values())
    packed = Packed(
        *(group.name, dtype, shape, values.shard, values.start, values.start),
        group=group,
        headers=tuple(checkpoint.headers[shard] for shard in shards),
    )
    return replace(packed, stop=values.start + dtype.nbytes(packed.numel))


def all_names(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the names of all tensors and quantized weights, as keys, for checks of patterns."""
    names: dict[str, object] = {**checkpoint.tensors, **checkpoint.groups}
    for info in checkpoint.tensors.values():
        if isinstance(info, Packed):
            names |= dict.fromkeys(member.name for member in info.group.members.values())
    return names


def all_dequantized(checkpoint: Checkpoint) -> bool:
    """Return whether weights are dequantized, and no weight stays quantized as stored."""
    packed = any(isinstance(info, Packed) for info in checkpoint.tensors.values())
    return packed and not checkpoint.groups
