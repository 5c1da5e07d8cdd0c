"""Linear layers of tinygrad whose weights stay quantized; the product's kernel dequantizes them.

`replace_linears` puts a `QuantLinear` in place of each `tinygrad.nn.Linear` of a model that has not
been loaded yet. Its tensors have the names, dtypes and shapes that the format defines, so that a
load fills them like any other tensor::

    model = Transformer(...)
    replace_linears(model, lambda name: "q8_0" if ".layers." in name else None)
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from tinygrad import Tensor, dtypes, nn

from streamload.codecs.decode_blocks import WIDTH as BLOCK
from streamload.codecs.product import operands
from streamload.codecs.scheme import SCHEMES, CodedWeight
from streamload.core.dtypes import F32
from streamload.devices.base import Swap
from streamload.devices.tinygrad.product import Weight, product
from streamload.devices.tinygrad.tensors import TO_TINYGRAD, tensors_of, tie_key

_NF4_BLOCK = 64  # elements
_Module = TypeVar("_Module")


class _Decoded(NamedTuple):
    """Values and scales of a layer's blocks.

    Attributes:
        pieces: of each block, as float32 of (out, blocks, width).
        scales: broadcast to (out, blocks).
        interleaved: whether piece i has elements i, i + n, ... of a block, for n pieces; else they
            are consecutive.
    """

    pieces: list[Tensor]
    scales: Tensor
    interleaved: bool = False


class QuantLinear:
    """A Linear over a quantized weight, which tinygrad dequantizes inside the product's kernel.

    Nothing as large as the weight is ever realized. Sums are in float32 for any dtype of the
    activations; the result has their dtype. A few tokens on CUDA take another kernel
    (`tinygrad.product`).

    Attributes:
        format: "int8", "q8_0", "q4_0" or "nf4".
        shape: shape of the weight before quantizing: (out, in).
        weight: the quantized values, without memory until they are loaded. int8: (out, in) of int8.
            q8_0 and q4_0: (out, bytes of a row's blocks) of uint8. nf4: (out * in / 2, 1) of uint8,
            with its scales and table as ``weight.absmax`` and ``weight.quant_map``.
        weight_scale: int8 only: (out, 1) of float32.
        bias: (out,), or None.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(
        self,
        format: str,
        in_features: int,
        out_features: int,
        *,
        bias: Tensor | None = None,
        device: str | None = None,
    ) -> None:
        """Make the tensors without values or memory.

        Raises ValueError: there is no layer for the format, or the format cannot hold the weight.
        """
        if format not in _DECODED:
            raise ValueError(f"tinygrad computes with {', '.join(_DECODED)} only")
        if format == "nf4" and in_features % _NF4_BLOCK:
            raise ValueError(f"rows of {in_features} have no whole blocks of {_NF4_BLOCK} elements")
        self.format, self.shape, self.bias = format, (out_features, in_features), bias
        for part in SCHEMES[format].of(self.shape, F32).parts:
            kind = TO_TINYGRAD[part.dtype.name]
            setattr(self, part.name("weight"), Tensor.empty(*part.shape, dtype=kind, device=device))

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``: (..., in) becomes (..., out), in the dtype of ``x``."""
        names = [part.name("weight") for part in operands(CodedWeight(self.format, self.shape))]
        weight = Weight(self.format, self.shape, [getattr(self, n) for n in names], self.bias)
        found = product(x, weight, _expression)
        return _expression(x, weight) if found is None else found


def _expression(x: Tensor, weight: Weight) -> Tensor:
    """Return ``x @ weight.T + bias`` in the dtype of ``x``, for tinygrad to compile."""
    pieces, scales, interleaved = _DECODED[weight.format](weight)
    blocks, width = pieces[0].shape[1:]
    # contiguous: otherwise each row of the weight computes and converts the activations again
    wide = x.cast(dtypes.float32).contiguous()
    shape = (width, len(pieces)) if interleaved else (len(pieces), width)
    parted = wide.reshape(*x.shape[:-1], 1, blocks, *shape)
    parts = [parted[..., i] if interleaved else parted[..., i, :] for i in range(len(pieces))]
    # the scale multiplies a block's sum, not its elements
    products = [part * piece for part, piece in zip(parts, pieces, strict=True)]
    y = (sum(products[1:], products[0]).sum(-1) * scales).sum(-1)
    if weight.bias is not None:
        y = y + weight.bias
    return y.cast(x.dtype)


def _int8(weight: Weight) -> _Decoded:
    codes, scales = weight.parts
    rows, width = codes.shape
    # a row needs no blocks, but kernels that sum 32 elements at a time are faster
    if width % BLOCK:
        return _Decoded([codes.reshape(rows, 1, width).cast(dtypes.float32)], scales)
    return _Decoded(_halves(codes.reshape(rows, -1, BLOCK)), scales)


def _q8_0(weight: Weight) -> _Decoded:
    codes, scales = _blocks(weight.parts[0], BLOCK)
    return _Decoded(_halves(codes.bitcast(dtypes.int8)), scales)


def _q4_0(weight: Weight) -> _Decoded:
    codes, scales = _blocks(weight.parts[0], BLOCK // 2)
    halves = (codes.bitwise_and(15), codes.rshift(4))
    return _Decoded([half.cast(dtypes.float32) - 8 for half in halves], scales)


def _nf4(weight: Weight) -> _Decoded:
    rows, width = weight.shape
    packed, absmax, table = weight.parts
    codes = packed.reshape(rows, -1, _NF4_BLOCK // 2)
    halves = codes.rshift(4), codes.bitwise_and(15)
    scales = absmax.reshape(rows, width // _NF4_BLOCK)
    return _Decoded([_looked_up(half, table) for half in halves], scales, interleaved=True)


def _looked_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return the elements of a table of 16 for codes, by choosing among them bit by bit.

    An index of tinygrad compares with each of the 16.
    """
    values = [table[i] for i in range(16)]
    for bit in range(4):
        is_set = codes.bitwise_and(1 << bit) != 0
        values = [is_set.where(b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _blocks(rows: Tensor, code_nbytes: int) -> tuple[Tensor, Tensor]:
    """Split GGUF blocks into values (out, blocks, ``code_nbytes``) and scales (out, blocks)."""
    blocks = rows.reshape(rows.shape[0], -1, 2 + code_nbytes)
    return blocks[..., 2:], blocks[..., :2].bitcast(dtypes.float16).cast(dtypes.float32).squeeze(-1)


def _halves(codes: Tensor) -> list[Tensor]:
    """Slice the values of each block, along the last axis, into two float32 halves."""
    middle = BLOCK // 2
    return [half.cast(dtypes.float32) for half in (codes[..., :middle], codes[..., middle:])]


_DECODED: dict[str, Callable[[Weight], _Decoded]] = {
    "int8": _int8,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "nf4": _nf4,
}
#: The formats that layers can have.
FORMATS = tuple(_DECODED)


@dataclass(frozen=True, slots=True)
class Replacement:
    """The result of `replace_linears`.

    Attributes:
        replaced: the format of each weight that a `QuantLinear` now holds, by the weight's name.
        kept: names of matrices for which a format was requested, but which are unchanged: they are
            no weight of a Linear inside the model, or something else holds the same tensor (a tied
            embedding), or they are on several devices.
    """

    replaced: Mapping[str, str]
    kept: tuple[str, ...]


def replace_linears(
    model: Any, formats: Callable[[str], str | None] | Mapping[str, str | None]
) -> Replacement:
    """Put a `QuantLinear` in place of Linears, before the model is loaded; return the changes.

    The new layers have no values or memory yet, are on the same device, and keep the biases.
    Linears and weights that several names share stay shared.

    Args:
        model: walked as `tinygrad.nn.state.get_state_dict` does.
        formats: returns the format for the name of a weight (``"layers.0.q.weight"``), or None to
            leave it. It is called with the names of all tensors of two axes or more. Or formats
            by pattern of names, as ``quant=`` takes them: the first that matches decides.

    Raises:
        ValueError: a format does not exist or cannot hold the weight, or names that share a weight
            have different formats. The model is as it was.
    """
    tensors = tensors_of(model)
    matrices = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) > 1}
    if isinstance(formats, Mapping):
        rules = formats.items()
        chosen = {n: [f for p, f in rules if fnmatchcase(n, p)] for n in matrices}
        wanted = {name: next(iter(found), None) for name, found in chosen.items()}
    else:
        wanted = {name: formats(name) for name in matrices}
    replaced, pairs = _chosen(model, _tied(matrices), wanted)
    put_into(model, {id(linear): layer for linear, layer in pairs})
    kept = (name for name, format in wanted.items() if format is not None)
    return Replacement(replaced, tuple(name for name in kept if name not in replaced))


def swapping(model: Any, formats: Mapping[str, str]) -> Swap:
    """Return the `Swap` by which Linears of a model hold weights quantized."""
    tensors = tensors_of(model)
    shared = _tied(tensors)
    wanted: dict[str, str | None] = {}
    for tied in shared:  # a checkpoint may have any one of the names
        found = {name: formats[name] for name in tied if name in formats}
        wanted |= {name: found.get(name, next(iter(found.values()), None)) for name in tied}
    replaced, pairs = _chosen(model, shared, wanted)
    for name in replaced:
        if tensors[name].uop.is_realized:
            raise ValueError(
                f"quant: {name} holds values already: quantize a model when it is loaded first, "
                "before anything has computed with it"
            )
    shapes = {name: tuple(map(int, tensors[name].shape)) for name in replaced}

    def put() -> Callable[[], None]:
        put_into(model, {id(linear): layer for linear, layer in pairs})
        return lambda: put_into(model, {id(layer): linear for linear, layer in pairs})

    coded = {name: CodedWeight(form, shapes[name]) for name, form in replaced.items()}
    owners = {prefix: type(obj).__name__ for prefix, obj in walk(model, Tensor)}
    plain = type(model).__name__  # of a flat dict, whose names may have dots
    refused: dict[str, str] = {}
    for name in (name for name in formats if name not in coded):
        whole = name if name in tensors else name.partition("[")[0]  # of a shard
        if whole in tensors:
            refused[name] = owners.get("".join(whole.rpartition(".")[:2]), plain)
            if isinstance(tensors[whole].device, tuple):
                refused[name] += " on several devices (shard_), whose weights stay floats"
    return Swap(coded, put, holders="tinygrad's nn.Linear", refused=refused)


def _tied(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return a list of names for each tensor; tied names are in one list."""
    key, names = tie_key(tensors.values()), dict[Any, list[str]]()
    for name, tensor in tensors.items():
        names.setdefault(key(tensor), []).append(name)
    return list(names.values())


def _chosen(
    model: Any, shared: Iterable[Sequence[str]], wanted: Mapping[str, str | None]
) -> tuple[dict[str, str], list[tuple[nn.Linear, QuantLinear]]]:
    """Return weights' formats by name, and (Linear, its new layer) pairs; change nothing yet.

    ``shared`` has the names of each tensor, ``wanted`` the requested format of each name.
    """
    found = _modules(model, nn.Linear)
    linears = {f"{prefix}weight": linear for prefix, linear in found if linear is not model}
    replaced: dict[str, str] = {}
    pairs: list[tuple[nn.Linear, QuantLinear]] = []
    for tied in shared:
        held = [linears[name] for name in tied if name in linears]
        if len(held) < len(tied) or isinstance(held[0].weight.device, tuple):
            continue
        format = _agreed({name: wanted[name] for name in tied})
        if format is not None:
            layer = _quantized(tied[0], held[0], format)
            for linear in {id(linear): linear for linear in held}.values():
                pairs.append((linear, copy.copy(layer)))
                pairs[-1][1].bias = linear.bias
            replaced |= dict.fromkeys(tied, format)
    return replaced, pairs


def coded(model: Any) -> dict[str, CodedWeight]:
    """Return format and shape of each weight that a `QuantLinear` of the model holds, by name."""
    found = _modules(model, QuantLinear)
    return {f"{prefix}weight": CodedWeight(layer.format, layer.shape) for prefix, layer in found}


def _agreed(formats: dict[str, str | None]) -> str | None:
    """Return the one format of a weight's several names; raises ValueError if they differ."""
    (first, format), *others = formats.items()
    for name, other in others:
        if other != format:
            raise ValueError(
                f"{first!r} and {name!r} are one weight, and their formats are {format!r} and "
                f"{other!r}: write the same format for both"
            )
    return format


def _quantized(name: str, linear: nn.Linear, format: str) -> QuantLinear:
    """Return a `QuantLinear` without values, in the shape of a Linear named ``name``."""
    out_features, in_features = linear.weight.shape
    try:
        return QuantLinear(format, in_features, out_features, device=linear.weight.device)
    except ValueError as error:
        raise ValueError(
            f"{name!r} cannot be {format!r}: {error}; write {{{name!r}: 'int8'}}, which any Linear "
            f"can be, or {{{name!r}: None}} to leave it as it is"
        ) from error


def _holder(obj: Any) -> Any:
    """Return the dict, list or tuple in which `get_state_dict` finds members, or None."""
    if isinstance(obj, Tensor):
        return None
    if not isinstance(obj, OrderedDict) and not hasattr(obj, "_asdict"):
        obj = getattr(obj, "__dict__", obj)
    return obj if isinstance(obj, (dict, list, tuple)) else None


def _entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    """Return the (key, member) pairs of a holder, with keys as tensors' names have them."""
    if hasattr(holder, "_asdict"):
        holder = holder._asdict()
    return holder.items() if isinstance(holder, dict) else enumerate(holder or ())


def walk(obj: Any, leaf: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield an object and all its members, with the prefixes of their tensors' names.

    Members of objects of the class ``leaf`` are left out.
    """
    yield prefix, obj
    for key, value in () if type(obj) is leaf else _entries(_holder(obj)):
        yield from walk(value, leaf, f"{prefix}{key}.")


def _modules(model: Any, kind: type[_Module]) -> list[tuple[str, _Module]]:
    """Return (prefix of names, module) for a model's modules of exactly this class."""
    return [(prefix, obj) for prefix, obj in walk(model, kind) if type(obj) is kind]


def put_into(obj: Any, others: Mapping[int, Any]) -> Any:
    """Replace an object or its members by ``others``, keyed by the old id; return the result."""
    if id(obj) in others:
        return others[id(obj)]
    holder = _holder(obj)
    changed = {
        key: new for key, value in _entries(holder) if (new := put_into(value, others)) is not value
    }
    if not changed:
        return obj
    if hasattr(holder, "_replace"):
        return holder._replace(**changed)
    if isinstance(holder, tuple):
        return type(holder)(changed.get(key, value) for key, value in _entries(holder))
    for key, new in changed.items():
        holder[key] = new
    return obj
