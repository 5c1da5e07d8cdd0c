"""`quant=`: the tensors that a load quantizes, and the format of each."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.parts import Array, Part
from streamload.codecs.scheme import ALL_SCHEMES, SCHEMES, CodedWeight, Encoder, Quantized
from streamload.codecs.stored import OWN_METHOD
from streamload.core.dtypes import BF16, F16, F32, F64, DType
from streamload.core.patterns import did_you_mean
from streamload.core.tensors import Coding, RowTranspose, TensorInfo, whole
from streamload.core.units import format_bytes
from streamload.devices.base import NO_SWAP, Swap
from streamload.errors import Fit, PlanInfeasibleError, UnsupportedCastError
from streamload.planning.dequantize import decoded_always, kept_kinds, with_blocks
from streamload.planning.moves import DTypePolicy, Move, TensorRequest, TensorRequests
from streamload.planning.partition import Item, units_of
from streamload.planning.plan import Plan
from streamload.planning.sources import Found, Source, is_conv1d

#: The argument ``quant=``: the name of a format, or by pattern of names a format or None.
QuantArgument: TypeAlias = str | Mapping[str, str | None] | None
_Made = TypeVar("_Made")

_LISTED = 8  # weights named in a message
_MOST_AXES = 3  # of fused experts; convolutions have more, and no module holds these quantized

#: The format of least loss that fits.
AUTO = "auto"
#: Leaves weights in the blocks in which a file has them.
STORED = "stored"
# Formats that "auto" tries if the stored weights do not fit, least loss first: see
# docs/measurements.md, "Quality of formats".
_FORMATS = ("q8_0", "int8", "nf4", "nf4-nested")

# Weights that "*" leaves as they are: they are small, and much depends on them. The Linears of
# adaptive norms are large: a quarter of Flux.
_SPARED = re.compile(r"(?i)norm(?!\w*\.linear\.weight$)|(^|\.)ln_|router|(^|\.)gate\.weight$|bias$")


@dataclass(frozen=True, slots=True)
class QuantPolicy:
    """The rules of ``quant=``, by which a load quantizes tensors.

    Attributes:
        rules: (pattern, format) in order; the first match decides; None leaves a tensor as
            it is. The pattern "*" stands for the weights of layers that are no norms or routers,
            and with "stored" for all weights.
        tried: the format or dtype tried in place of "auto", or "no format"; "" without "auto".
        dtype: the dtype tried in place of "auto" for all floats without one; else None.
        by_tensor: in place of rules, the format of each quantized tensor, by name.
    """

    rules: tuple[tuple[str, str | None], ...] = ()
    tried: str = ""
    dtype: DType | None = None
    by_tensor: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: QuantArgument, of_files: Sequence[str] | None = None) -> QuantPolicy:
        """Read the name of a format, or patterns: ``{"*.mlp.*": "nf4", "*norm*": None}``.

        ``of_files``: for files, names of further formats, which models cannot have. Raises
        ValueError: the value is invalid, or no format of models or of ``of_files``; for files also
        for "auto" and "stored".
        """
        if value is None:
            return cls()
        rules = value if isinstance(value, Mapping) else {"*": value}
        more = (*(of_files or ()), STORED, AUTO)
        for pattern, name in rules.items():
            if not isinstance(pattern, str):
                raise ValueError(f"a pattern of names is a string, not {pattern!r}")
            is_text = isinstance(name, str)
            if name is not None and not (is_text and (name in more or name in SCHEMES)):
                known = (*SCHEMES, *more)
                hint = did_you_mean(name, SCHEMES) if is_text else ""
                raise ValueError(f"quant is one of {', '.join(known)}, not {name!r}{hint}")
        policy = cls(tuple(rules.items()))
        if of_files is not None and STORED in policy.names:
            raise ValueError(
                'quant="stored" leaves blocks of a file in the modules of a model; files keep '
                "theirs without quant="
            )
        if of_files is not None and AUTO in policy.names:
            raise ValueError(
                'quant="auto" takes what fits a budget, and there is none here: name the format, '
                f"one of {', '.join(SCHEMES)}"
            )
        return policy

    @classmethod
    def of_plan(cls, moves: Iterable[Move]) -> QuantPolicy:
        """Return a policy with a plan's formats, for loads of parts of the same checkpoint."""
        coded = ((m.source[0].tensor, m.kind.coding) for m in moves)
        return cls(by_tensor={tensor: coding.format for tensor, coding in coded if coding})

    def __bool__(self) -> bool:
        return bool(self.by_tensor or self.names)

    @property
    def names(self) -> list[str]:
        """The formats that rules give."""
        return [name for _, name in self.rules if name is not None]

    def least_loss(
        self,
        attempt: Callable[[QuantPolicy], _Made],
        checkpoint: Checkpoint,
        policy: DTypePolicy,
        native_bf16: Callable[[], bool],
        *,
        stored: bool = True,
    ) -> tuple[_Made, list[str]]:
        """Plan by ``attempt``; "auto" becomes the format of least loss that fits; add notes.

        Before weights are quantized again, all floats in the dtype of `narrower` are tried, and
        before that the blocks of a file if ``stored``. Raises ValueError if no format can hold the
        weights.
        """
        if AUTO not in self.names:
            return attempt(self), []
        reasons: list[str] = []
        failures: list[Exception] = []
        cast = narrower(checkpoint, policy, native_bf16)
        tries: list[tuple[str | None, DType | None]] = [(None, None)]
        tries += [(STORED, None)] * bool(stored and kept_kinds(checkpoint))
        tries += [(None, cast)] * (cast is not None)
        tries += ((name, None) for name in _FORMATS)
        for name, dtype in tries:
            rules = tuple((p, name if found == AUTO else found) for p, found in self.rules)
            tried = name or (f'dtype="{dtype}"' if dtype else "no format")
            try:
                made = attempt(QuantPolicy(rules, tried, dtype))
            except PlanInfeasibleError as error:
                failures.append(error)
                size = format_bytes(error.needed_nbytes)
                reasons.append(f"{tried} needs {size} on {error.device}")
            except ValueError as error:
                if not reasons:
                    raise
                failures.append(error)
                reasons.append(f"{tried} cannot hold every weight")
            else:
                why = ", ".join(reasons) or "all fits"
                return made, [f'quant="auto" took {tried}, for {why}']
        infeasible = [f for f in failures[1:] if isinstance(f, PlanInfeasibleError)]
        raise infeasible[-1] if infeasible else failures[-1]

    @classmethod
    def that_fits(
        cls,
        attempt: Callable[[QuantPolicy], Plan],
        checkpoint: Checkpoint,
        *,
        stored: bool = True,
    ) -> list[Fit]:
        """Return as a suggestion the ``quant=`` of least loss that fits, and its bytes; or [].

        ``stored``: whether the blocks of a file are tried first.
        """
        for name in (*[STORED] * bool(stored and kept_kinds(checkpoint)), *_FORMATS):
            # MemoryError: the plan, or the statistics alone, do not fit
            with suppress(MemoryError, UnsupportedCastError, ValueError):
                devices = attempt(cls.parse(name)).devices
                need = [format_bytes(d.needed_nbytes + d.reserve_nbytes, up=True) for d in devices]
                if len(need) > 1:
                    need = [f"{d.device} {n}" for d, n in zip(devices, need, strict=True)]
                return [Fit("quant", f'="{name}"', ", ".join(need))]
        return []

    def check_stored(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError if a rule is "stored", and a checkpoint has no blocks to keep."""
        keeps = STORED in self.names
        if not keeps or kept_kinds(checkpoint) or decoded_always(checkpoint):
            return
        method = checkpoint.layouts.method
        kinds = dict.fromkeys(g.kind for g in checkpoint.groups.values())
        if method == OWN_METHOD or not kinds:
            kinds = dict.fromkeys([method] * bool(method))
        problem = "no weight is stored quantised: leave quant= out"
        if kinds:
            problem = (
                f"its quantised weights ({', '.join(kinds)}) are no blocks of GGUF or MLX: leave "
                "quant= out, and from_pretrained keeps them as they are stored"
            )
        raise ValueError(f'quant="stored": {checkpoint.path}: {problem}')

    def check_meant(self, checkpoint: Checkpoint, quantized: bool | None = None) -> list[str]:
        """Return notes on weights that stay in another format than ``quant=`` names.

        ``quantized``: whether any weight is quantized; None looks at all tensors. Raise ValueError
        if none is, and none is stored in its format.
        """
        named = self.names
        if not named or AUTO in named or STORED in named:
            return []
        stays: dict[str, str] = {}
        is_done = False
        for group in checkpoint.groups.values():
            _, format = self.rule(group.name)
            if format is not None and not _is_of(group.kind, format):
                stays[group.name] = group.kind
            is_done |= format is not None and group.name not in stays
        kinds = ", ".join(dict.fromkeys(stays.values()))
        if quantized is None:
            quantized = any(self.formats(checkpoint, TensorRequests.every(checkpoint)))
        if not (quantized or is_done):
            problem = f"nothing is quantised: no weight of a layer is meant by quant={named[0]!r}"
            if stays:
                first = f"streamload.convert({str(checkpoint.path)!r}, out, dtype='bfloat16')"
                problem += (
                    f": {len(stays)} are stored quantised ({kinds}): dequantise them first, by "
                    f"{first}, and quantise what that writes"
                )
            raise ValueError(f"{checkpoint.path}: {problem}")
        if not stays:
            return []
        listed = ", ".join(list(stays)[:_LISTED]) + ", ..." * (len(stays) > _LISTED)
        return [f"{len(stays)} weights stay as they are stored ({kinds}): {listed}"]

    def leaving(self, patterns: Sequence[str]) -> QuantPolicy:
        """Return the policy with tensors that match ``patterns`` left as they are."""
        return replace(self, rules=(*((p, None) for p in patterns), *self.rules))

    def rule(self, name: str) -> tuple[str, str | None]:
        """Return the pattern that decides for a tensor, and its format; ("", None) without any."""
        found = (r for r in self.rules if r[0] == "*" or fnmatchcase(name, r[0]))
        return next(found, ("", None))

    def formats(self, checkpoint: Checkpoint, wants: TensorRequests) -> list[str | None]:
        """Return each tensor's format; None for vectors, stored codes and tensors left alone."""
        if not self:
            return [None] * len(wants)
        if self.by_tensor:
            return [self.by_tensor.get(info.name) for info in wants.infos]
        layers: frozenset[str] | None = None
        already = checkpoint.members
        out: list[str | None] = []
        for info, want in zip(wants.infos, wants, strict=True):
            name, shape = info.name, want.shape
            pattern, found = self.rule(name)
            is_matrix = info.dtype.kind == "float" and len(shape) > 1 and 0 not in shape
            if not is_matrix or name in already or found == STORED:
                found = None
            elif pattern == "*" and found is not None:
                layers = of_layers(checkpoint.tensors) if layers is None else layers
                spared = len(shape) > _MOST_AXES or _SPARED.search(name)
                found = found if name in layers and not spared else None
            out.append(found)
        return out


def _is_of(kind: str, format: str) -> bool:
    """Return whether a layout's kind is that of a scheme: "bnb-nf4" of "nf4-nested"."""
    return kind in (format, f"bnb-{format.removesuffix('-nested').removeprefix('bitsandbytes-')}")


def narrower(
    checkpoint: Checkpoint, policy: DTypePolicy, native_bf16: Callable[[], bool]
) -> DType | None:
    """Return the 16-bit dtype that "auto" tries for a checkpoint with float32 or float64 weights.

    float16 rounds less; bfloat16 if config.json or the other weights have it, and if the devices
    compute in it (``native_bf16``, which may probe them). None if weights have a dtype by
    ``policy``, are stored quantized, or have both 16-bit dtypes.
    """
    if checkpoint.groups or checkpoint.stored or policy.alike not in (None, F32, F64):
        return None
    tensors: Iterable[TensorInfo] = checkpoint.tensors.values()
    if policy.rules:
        every = any(pattern == "*" for pattern, _ in policy.rules)
        tensors = () if every else (i for i in tensors if not policy.mentions(i.name))
    # by id: a dtype's own hash takes ten times as long
    dtypes = {id(info.dtype): info.dtype for info in tensors}.values()
    floats = {dtype for dtype in dtypes if dtype.kind == "float"}
    stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    others = floats - {F32, F64}
    wanted = BF16 if BF16 in others or (stated == BF16.name and F16 not in others) else F16
    if not (others < floats and others <= {wanted}):
        return None
    return F16 if wanted is BF16 and (policy.fp16_cast or not native_bf16()) else wanted


def of_layers(names: Iterable[str], *more: str) -> frozenset[str]:
    """Return the names of tensors in layers; without layers, of all but embeddings and heads.

    ``more``: other kinds of units to include; see `partition.Unit`.
    """
    units = units_of([Item(name, 0) for name in dict.fromkeys(names)])
    inside = ("layer", "inner", "tensor", *more)
    return frozenset(item.name for unit in units if unit.kind in inside for item in unit.items)


@cache
def coded(coding: Coding, src: DType) -> Quantized:
    """Return the layout of the weight that a coding describes; ``src``: its stored dtype."""
    return ALL_SCHEMES[coding.format].of(coding.shape, F32 if src is F64 else src)


def coded_want(coded: CodedWeight, want: TensorRequest) -> TensorRequest:
    """Return ``want`` with the matrix shape and the transpose in which a module quantizes it.

    Raises ValueError: both the mapping and the module transpose the weight.
    """
    turned = want.transpose
    if coded.transposed and turned == RowTranspose(1, *coded.shape):  # the file has it so, too
        turned = None
    elif coded.transposed and turned is not None:
        raise ValueError(
            f"{want.name}: its module has the weight transposed, and so has the mapping: leave it "
            f'as it is: quant={{"{want.source[0].tensor}": None, "*": "{coded.format}"}}'
        )
    elif coded.transposed:
        turned = RowTranspose(1, coded.shape[1], coded.shape[0])
    return want._replace(shape=coded.matrix, transpose=turned)


def quantised(
    checkpoint: Checkpoint,
    wants: TensorRequests,
    formats: Sequence[str | None],
    changed: Collection[str] = (),
    beside: Mapping[str, TensorRequest] = MappingProxyType({}),
    policy: QuantPolicy | None = None,
) -> TensorRequests:
    """Return requests for the parts (codes, scales, ...) of quantized weights, in their place.

    ``formats``: of each of ``wants``, or None; ``changed``: tensors whose rows functions change;
    `beside`: the model's auxiliary parts, by name; ``policy``: where formats come from. The
    UnsupportedCastError for tensors that cannot be in their formats names all, and the ``quant=``
    that leaves them. Raises ValueError if parts of two tensors would have one name.
    """
    if not any(formats):
        return wants
    out: list[TensorRequest] = []
    refused: dict[str, UnsupportedCastError] = {}
    taken: list[str] = []
    for want, src, name in zip(wants, wants.srcs, formats, strict=True):
        if name is None:
            out.append(want)
            continue
        of_rows = any(r.tensor in changed for r in want.source)
        tensor = want.source[0].tensor
        try:
            parts = list(parts_of(checkpoint, want, src, name, of_rows=of_rows))
        except UnsupportedCastError as error:
            refused[tensor] = error
            continue
        taken.append(tensor)
        for each in parts:
            if (there := beside.get(each.name)) is not None:
                held, reusable = there.held, there.reusable_nbytes
                each = each._replace(device=there.device, held=held, reusable_nbytes=reusable)
            out.append(each)
    if refused:
        raise leaving(refused, taken, policy)
    check_distinct([want.name for want in out], wants.names)
    return TensorRequests.of(checkpoint, out)


def kinds_of(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return patterns for ``names`` that match no ``others``; "*" replaces numbers if possible."""
    alike: dict[str, bool] = {}
    out: dict[str, None] = {}
    for name in names:
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", escape(name))
        if kind not in alike:
            alike[kind] = len(names) > 1 and not any(fnmatchcase(each, kind) for each in others)
        out[kind if alike[kind] else escape(name)] = None
    return list(out)


def no_holder(names: Sequence[str], holders: str, classes: str) -> str:
    """Return an error's text: modules of ``names`` are ``classes``; only ``holders`` hold codes."""
    listed = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
    return (
        f"quant: cannot quantise {listed}: the modules that can hold quantised weights are "
        f"{holders}, and theirs are {classes or 'others'}"
    )


def leaving(
    refused: Mapping[str, UnsupportedCastError],
    taken: Collection[str],
    policy: QuantPolicy | None = None,
) -> UnsupportedCastError:
    """Return one error for all ``refused`` tensors, with the ``quant=`` that leaves these alone.

    ``taken`` are the tensors that can be quantized. Without a policy, all have one format.
    """
    first = next(iter(refused.values()))
    rules = dict(policy.rules) if policy is not None and policy.rules else {"*": first.dst}
    left: dict[str, str | None] = dict.fromkeys(kinds_of(list(refused), taken))
    named = ", ".join(list(refused)[1:4]) + ", ..." * (len(refused) > 4)
    others = f" (so are {len(refused) - 1} more: {named})" * (len(refused) > 1)
    written = ", ".join(
        f"{json.dumps(pattern, ensure_ascii=False)}: {json.dumps(form) if form else None}"
        for pattern, form in (left | {p: f for p, f in rules.items() if p not in left}).items()
    )
    it = "them as they are" if len(refused) > 1 else "it as it is"
    reason = f"{first.reason}{others}; leave {it}: quant={{{written}}}"
    tensor, path = first.tensor, first.path
    return UnsupportedCastError(first.src, first.dst, reason=reason, tensor=tensor, path=path)


def check_distinct(names: Collection[str], before: Collection[str]) -> None:
    """Raise ValueError if two tensors have one name after quantizing; ``before``: the old names."""
    if len(set(names)) == len(names):
        return
    ((twice, _),) = Counter(names).most_common(1)
    if twice in before:
        raise ValueError(
            f"quant: {twice!r} would be a part of a quantised weight, and the checkpoint has "
            "a tensor of that name: leave the weight as it is, or rename the tensor"
        )
    raise ValueError(
        f"quant: {twice!r} would be a part of two tensors, for their names differ in the "
        "last part alone"
    )


def encoder_of(coding: Coding, src: DType, importance: Array | None = None) -> Encoder:
    """Return the encoder that quantizes ``src`` elements, or float32 ones if ``coding.of_rows``.

    ``importance``: see `Quantized.weighted`.
    """
    made = coded(coding, src)
    if importance is not None:
        made = made.weighted(importance)
    return made.encoder(F32 if coding.of_rows else src)


def said_of_dense(nbytes: int) -> str:
    """Return a note on the memory of the largest weight when a forward pass dequantizes it."""
    size = format_bytes(nbytes, up=True)
    return f"the largest takes {size} meanwhile, which no plan counts: reserve= keeps it free"


def held_nbytes(weight: Quantized) -> int:
    """Return a weight's host bytes until it is written: maxima of blocks, and their scales."""
    return 2 * weight.statistics_nbytes + sum(part.nbytes for part in weight.parts[1:])


def turned(checkpoint: Checkpoint, want: TensorRequest, format: str | None) -> TensorRequest:
    """Return the request, transposed if the format's library quantizes a Conv1D's transpose."""
    is_such = format is not None and SCHEMES[format].of_linears and len(want.shape) == 2
    if not is_such or not is_conv1d(checkpoint.config, want.source[0].tensor):
        return want
    return want._replace(shape=want.shape[::-1], transpose=RowTranspose(1, *want.shape))


@cache
def _codings(
    name: str, shape: tuple[int, ...], src: DType, of_rows: bool, in_order: bool
) -> tuple[tuple[Part, Coding], ...]:
    """Return the tensors (codes, scales, ...) that a weight becomes in the format ``name``; cached.

    ``of_rows``: the user's functions change its rows. ``in_order``: a device may quantize it as it
    is read.
    """
    made = ALL_SCHEMES[name].of(shape, F32 if src is F64 else src)
    coding = Coding(
        *(name, shape, "", made.unit_numel),
        *(src.nbytes(made.unit_numel), made.unit_nbytes, made.statistics_nbytes, of_rows),
        made.codec.device_parts if in_order and src is not F64 else None,
    )
    return tuple((part, replace(coding, part=part.suffix)) for part in made.parts)


def parts_of(
    checkpoint: Checkpoint, want: TensorRequest, src: DType, name: str, *, of_rows: bool
) -> Iterator[TensorRequest]:
    """Yield a request for each tensor (codes, scales, ...) of a weight in format ``name``.

    ``of_rows``: whether functions change its rows.
    """
    info = checkpoint.tensors[want.source[0].tensor]
    in_order = want.transpose is None and not of_rows and want.source[0].columns is None
    if len(ALL_SCHEMES[name].device_parts or ()) > 1:  # what a device holds goes as it came
        in_order = in_order and len(want.source) == 1
    parts = codings_of(info, want.shape, src, name, of_rows=of_rows, in_order=in_order)
    if why := _unaligned(want, parts[0][1].unit_numel):
        path = info.shard
        raise UnsupportedCastError(src.name, name, reason=why, tensor=info.name, path=path)
    for part, coding in parts:
        each = want
        if part.suffix:  # not the codes: nothing is read for it
            at = replace(want.source[0], stop=want.source[0].start, columns=None)
            each = TensorRequest("", (), (at,), device=want.device, fixed=want.fixed)
        name = part.name(want.name)
        yield each._replace(name=name, shape=part.shape, dtype=part.dtype, coding=coding)


def codings_of(
    info: TensorInfo,
    shape: tuple[int, ...],
    src: DType,
    name: str,
    *,
    of_rows: bool = False,
    in_order: bool = False,
) -> Sequence[tuple[Part, Coding]]:
    """Return the tensors of a weight as `_codings`; UnsupportedCastError, if it has none."""
    reason = "this call dequantises it: quantise what convert(dtype=...) writes"
    try:
        if not src.is_packed:
            return _codings(name, shape, src, of_rows, in_order)
    except ValueError as error:
        reason = str(error)
    tensor, path = info.name, info.shard
    raise UnsupportedCastError(src.name, name, reason=reason, tensor=tensor, path=path)


def _unaligned(want: TensorRequest, unit: int) -> str:
    """Explain why the sources of a weight cannot be quantized piece by piece; "" if they can."""
    numel = math.prod(want.shape)
    rows = sum(r.stop - r.start for r in want.source)
    row_numel = numel // max(rows, 1)
    t = want.transpose
    if t is not None:
        if t.rows != want.shape[0]:  # slabs of columns are assembled
            several = "it is transposed, and put together of several tensors"
            return several if len(want.source) > 1 else ""
        if numel // t.rows % unit:
            return f"its rows are put in another order, and have no whole blocks of {unit} elements"
        return ""
    at = 0
    for r in want.source:
        if at * row_numel % unit or (r.columns is not None and row_numel % unit):
            return f"it is put together of rows that have no whole blocks of {unit} elements"
        at += r.stop - r.start
    return ""


#: The policy of a load that quantizes nothing.
NO_QUANT = QuantPolicy()


class Kept(NamedTuple):
    """A checkpoint with weights that stay in blocks.

    Attributes:
        checkpoint: has those weights as bytes.
        blocks: the parameters that hold blocks, by name; empty without a model.
    """

    checkpoint: Checkpoint
    found: Found
    blocks: Mapping[str, CodedWeight] = MappingProxyType({})
    notes: tuple[str, ...] = ()


def keep_blocks(
    checkpoint: Checkpoint,
    found: Found,
    quant: QuantPolicy,
    changed: Collection[str],
    swap: Callable[[Mapping[str, str]], Swap] | None = None,
    *,
    holds: bool = False,
) -> Kept:
    """Undo the dequantization of weights that ``quant`` keeps as stored, or in their block type.

    ``changed``: tensors whose rows functions change; ``swap`` returns modules for formats by
    parameter, None without a model; ``holds``: the model holds quantized weights already. Raises
    ValueError if no module holds or can hold any.
    """
    kinds = kept_kinds(checkpoint) if quant else {}
    if not kinds:
        return Kept(checkpoint, found)
    asked, left = _asked(checkpoint, quant, kinds, of_model=swap is not None)
    if not (asked or left):
        return Kept(checkpoint, found)
    fill = found.fill
    alone = {
        name: checkpoint.tensors[source.rows[0].tensor]
        for name, source in fill.items()
        if len(found_kinds := {asked.get(r.tensor) for r in source.rows}) == 1
        and None not in found_kinds
        and not any(r.tensor in changed for r in source.rows)
    }
    made = NO_SWAP
    if swap is not None and alone:
        made = swap({name: asked[info.name] for name, info in alone.items()})
    sources = {
        name: source
        for name, info in alone.items()
        if swap is None or name in made.coded
        if (source := _as_blocks(info, fill[name], made.coded.get(name))) is not None
    }
    while len(alike := _alone(sources, fill)) < len(sources):
        sources = alike
    kept = {r.tensor for source in sources.values() for r in source.rows}
    beside = {
        part.name(name): _beside(source, part)
        for name, source in sources.items()
        for part in CodedWeight(asked[alone[name].name], alone[name].shape).made.parts[1:]
    }
    left |= {
        name: asked[name] for name in asked if name not in kept and quant.rule(name)[1] == STORED
    }
    if swap is not None and alone and left and not (made.coded or holds):
        classes = ", ".join(dict.fromkeys(made.refused.values()))
        raise ValueError(no_holder(list(left), made.holders, classes))
    listed = ", ".join(f"{name} ({kind})" for name, kind in islice(left.items(), _LISTED))
    more = ", ..." * (len(left) > _LISTED)
    note = f"dequantised, for no module holds their blocks as they are: {listed}{more}"
    return Kept(
        with_blocks(checkpoint, kept) if kept else checkpoint,
        found._replace(fill={**fill, **sources, **beside}) if kept else found,
        {name: made.coded[name] for name in sources if swap is not None},
        (note,) if left else (),
    )


def _asked(
    checkpoint: Checkpoint, quant: QuantPolicy, kinds: Mapping[str, str], *, of_model: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the block types of dequantized weights that may stay in blocks, by tensor name.

    And those of weights that "stored" cannot keep: without a model, "*" leaves out embeddings,
    whose modules need floats.
    """
    kept: dict[str, str] = {}
    left: dict[str, str] = {}
    wants = TensorRequests.every(checkpoint)
    inside = of_layers(checkpoint.tensors, "head")
    for info, format in zip(wants.infos, quant.formats(checkpoint, wants), strict=True):
        if (kind := kinds.get(info.name)) is None:
            continue
        rule = quant.rule(info.name)
        if rule == ("*", STORED) and not of_model and info.name not in inside:
            left[info.name] = kind
        elif rule[1] == STORED or kind == format:
            kept[info.name] = kind
    return kept, left


def _alone(sources: Mapping[str, Source], fill: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources whose tensors fill no parameter of `fill` that is not in `sources`."""
    # such a tensor is dequantized for all
    others = {r.tensor for name, source in fill.items() if name not in sources for r in source.rows}
    return {
        name: source
        for name, source in sources.items()
        if others.isdisjoint(r.tensor for r in source.rows)
    }


def _beside(source: Source, part: Part) -> Source:
    """Return the source of the part of a weight that is next to its codes, by their source."""
    rows = (replace(r, tensor=part.name(r.tensor)) for r in source.rows)
    return Source(rows, source.transpose)


def _as_blocks(info: TensorInfo, source: Source, held: CodedWeight | None) -> Source | None:
    """Return the source of a weight's blocks; None if they would have to be cut.

    ``info`` may be the first of weights that are joined by rows; ``source`` is that of floats;
    ``held``: what the parameter holds instead, None without a model.
    """
    turned, of_matrix = source.transpose, len(info.shape) == 2
    found = (sum(r.stop - r.start for r in source.rows), *info.shape[1:])
    # then the file has the order of the blocks
    is_turned = of_matrix and turned == RowTranspose(1, *found)
    fits = held is None or (held.shape, held.transposed) == (found, is_turned)
    by_rows = turned is None or (of_matrix and turned.rows == found[0])
    is_cut = source.rows != (whole(info),) and not of_matrix
    if is_cut or not fits or not (is_turned or by_rows):
        return None
    shape = None if held is None or of_matrix else held.made.parts[0].shape
    return Source(source.rows, None if is_turned else turned, shape)
