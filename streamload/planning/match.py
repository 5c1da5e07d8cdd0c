"""Match a model's parameters to a checkpoint's tensors, by name and shape, from headers alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from types import MappingProxyType
from typing import Any, Literal

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import open_shard
from streamload.codecs.scheme import SCHEMES, CodedWeight
from streamload.codecs.weights import Packed, is_text, shape_in_models
from streamload.core.computed import is_computed
from streamload.core.dtypes import BY_NAME
from streamload.core.location import Location
from streamload.core.system import callers_level
from streamload.core.tensors import (
    Block,
    Columns,
    RowRange,
    RowTranspose,
    TensorInfo,
    region_of,
    whole,
)
from streamload.core.units import format_bytes
from streamload.devices.base import Parameter, Swap
from streamload.errors import ShapeMismatch, StateDictMismatchError, Suggestion
from streamload.planning.moves import DTypePolicy, Moves, TensorRequest, TensorRequests
from streamload.planning.quant_policy import QuantPolicy, coded_want, no_holder, quantised
from streamload.planning.sources import (
    HEADS,
    Found,
    Source,
    Unchanged,
    embedding_of,
    is_language_model,
)


def cut(rows: Sequence[RowRange], row_numel: int, block: Block) -> tuple[RowRange, ...] | None:
    """Return row ranges with exactly a block's elements, in order; None if there are none.

    ``rows`` are of the whole tensor, in order and without columns, of ``row_numel`` elements each.
    """
    block = block.unfolded
    if block.is_all:
        return tuple(rows)
    if 0 in block.shape:
        return (RowRange(rows[0].tensor, 0, 0),)
    sizes = zip(block.whole, block.shape, strict=True)
    last = max(axis for axis, (whole, part) in enumerate(sizes) if whole != part)
    inner = math.prod(block.whole[last + 1 :])
    if last == 0:  # whole rows
        width, columns = inner, None
    else:
        width = block.whole[last] * inner
        begin = block.first[last] * inner
        columns = Columns(begin, begin + block.shape[last] * inner, width)
    out: list[RowRange] = []
    unit = row_numel if columns is None else width
    for start, stop in _lines(block, max(last, 1)):
        found = list(_within(rows, row_numel, start * width, stop * width, unit, columns))
        if sum(r.stop - r.start for r in found) * unit != (stop - start) * width:
            return None  # a line spans two tensors, or a part of a row
        out += found
    return tuple(out)


def _lines(block: Block, axes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop exclusive) of consecutive lines of a block.

    A line is one index into the first ``axes`` axes of the whole tensor, flattened.
    """
    last = max((axis for axis in range(axes) if block.shape[axis] != block.whole[axis]), default=0)
    inner = math.prod(block.whole[last + 1 : axes])
    before = zip(block.first[:last], block.shape[:last], strict=True)
    for index in product(*(range(first, first + length) for first, length in before)):
        at = 0
        for number, length in zip((*index, block.first[last]), block.whole, strict=False):
            at = at * length + number
        yield at * inner, (at + block.shape[last]) * inner


def _within(
    rows: Sequence[RowRange],
    row_numel: int,
    start: int,
    stop: int,
    unit: int,
    columns: Columns | None,
) -> Iterator[RowRange]:
    """Yield elements ``start`` to ``stop`` of the concatenated rows as row ranges.

    ``unit``: elements of a row of the result, which has ``columns`` of the tensor's rows. A range
    that would cut a row of the result is left out.
    """
    at = 0
    for r in rows:
        end = at + (r.stop - r.start) * row_numel
        first, last = max(start, at), min(stop, end)
        shift = r.start * row_numel - at  # to elements of the tensor
        if first < last and not ((first + shift) % unit or (last + shift) % unit):
            yield RowRange(r.tensor, (first + shift) // unit, (last + shift) // unit, columns)
        at = end


Shapes = Literal["error", "skip"]

_BLOCK_NBYTES = 2**20
_FLOATS = frozenset(name for name, dtype in BY_NAME.items() if dtype.kind == "float")
#: Endings of `Parameter.dtype` for memory that cannot be filled, and the new parameters.
_REPLACED = {
    "(not contiguous)": "contiguous ones (a memory format such as channels_last is lost)",
    "(not writable in place)": "others, for they are read-only or of the other byte order",
}


def shape_of(checkpoint: Checkpoint, source: Source) -> tuple[int, ...]:
    """Return a source's shape: its ``shape`` if given, else the shape of its concatenated rows."""
    whole = _whole(checkpoint, source)
    if whole is not None:
        return whole.shape
    return _rows_shape(checkpoint, source) if source.shape is None else source.shape


def _whole(checkpoint: Checkpoint, source: Source) -> TensorInfo | None:
    """Return the tensor if a source is one whole tensor, unchanged; else None.

    Most sources are whole tensors, for which callers skip further checks.
    """
    r = source.rows[0]
    info = checkpoint.tensors[r.tensor]
    is_all = r.start == 0 and r.stop == (info.shape[0] if info.shape else 1) and not r.columns
    if len(source.rows) > 1 or source.transpose is not None or source.shape is not None:
        return None
    return info if is_all else None


def _rows_shape(checkpoint: Checkpoint, source: Source) -> tuple[int, ...]:
    first = checkpoint.tensors[source.rows[0].tensor].shape
    if not first:
        return ()
    columns = source.rows[0].columns
    rest = first[1:] if columns is None else (columns.stop - columns.start,)
    return (sum(r.stop - r.start for r in source.rows), *rest)


def incoherent(checkpoint: Checkpoint, source: Source) -> str:
    """Explain why a source's row ranges are invalid or do not fit together; "" if they do."""
    if _whole(checkpoint, source) is not None:
        return ""
    first = checkpoint.tensors[source.rows[0].tensor]
    for r in source.rows:
        info = checkpoint.tensors[r.tensor]
        if (info.dtype, info.shape[1:]) != (first.dtype, first.shape[1:]):
            return (
                f"{r.tensor} ({info.dtype}, {list(info.shape)}) does not continue "
                f"{first.name} ({first.dtype}, {list(first.shape)})"
            )
        rows = info.shape[0] if info.shape else 1
        if (c := r.columns) != source.rows[0].columns:
            return f"the columns of {r.tensor} are not those of {first.name}"
        if c is not None:
            rows, rest = divmod(math.prod(info.shape), max(c.width, 1))
            if rest or not 0 <= c.start < c.stop <= c.width or source.transpose is not None:
                return f"{r.tensor} ({list(info.shape)}) has no rows with {c}"
        if not 0 <= r.start <= r.stop <= rows:
            return f"{r.tensor} has no rows {r.start} to {r.stop}, but {rows}"
        is_cut = (r.start, r.stop) != (0, rows) or source.transpose is not None or c is not None
        if is_cut and not _begin_at_bytes(info, c):
            return f"rows of {r.tensor} ({info.dtype}) are not whole bytes or blocks"
    found = _rows_shape(checkpoint, source)
    if source.shape is not None and math.prod(source.shape) != math.prod(found):
        return f"rows of shape {list(found)} are not a tensor of shape {list(source.shape)}"
    if source.transpose is not None and not _fits(source.transpose, found):
        t = source.transpose
        return (
            f"rows of shape {list(found)} are not ({t.groups}, {t.outer}, {t.inner}) rows, whose "
            "last two axes are exchanged"
        )
    return ""


def wants_of(checkpoint: Checkpoint, fill: Mapping[str, Source]) -> TensorRequests:
    """Return a request for each source in ``fill``; StateDictMismatchError if one is invalid."""
    if isinstance(fill, Unchanged):
        return TensorRequests.every(checkpoint)
    problems = [
        f"{name}: {why}" for name, source in fill.items() if (why := incoherent(checkpoint, source))
    ]
    if problems:
        raise StateDictMismatchError(checkpoint.path, problems=problems)
    wants = (
        TensorRequest(name, shape_of(checkpoint, source), source.rows, source.transpose)
        for name, source in fill.items()
    )
    return TensorRequests.of(checkpoint, [*wants])


def _begin_at_bytes(info: TensorInfo, columns: Columns | None) -> bool:
    """Return whether rows, or columns of them, begin at whole bytes or blocks, to be read alone."""
    unit = info.dtype.unit
    if unit == 1:
        return True
    if not info.dtype.is_packed or len(info.shape) < 2 or info.shape[-1] % unit:
        return False
    return columns is None or not any(
        at % unit for at in (columns.start, columns.stop, columns.width)
    )


def part_of(checkpoint: Checkpoint, source: Source, block: Block | None) -> Source | None:
    """Return the source of a block (a shard) of a parameter; None if row ranges cannot hold it."""
    if block is None or block.is_all:
        return source
    rows, t = source.rows, source.transpose
    if rows[0].columns is not None:
        return None
    found = _rows_shape(checkpoint, source)
    row_numel = math.prod(found[1:])
    if t is not None:
        # rows of whole groups change places among themselves, and keep their columns
        per_group = t.outer * t.inner
        size = block.shape[0]
        if t.rows != found[0] or source.shape not in (None, found) or block.parts > 1:
            return None
        if block.shape[1:] != block.whole[1:] or block.first[0] % per_group or size % per_group:
            return None
        t = RowTranspose(size // per_group, t.outer, t.inner) if size else None
    made = cut(rows, row_numel, block)
    begin = (_begin_at_bytes(checkpoint.tensors[r.tensor], r.columns) for r in made or ())
    return Source(made, t, block.shape) if made is not None and all(begin) else None


def _fits(t: RowTranspose, shape: tuple[int, ...]) -> bool:
    """Return whether ``t`` permutes the rows of a tensor of this shape, or parts of them."""
    rows, numel = (shape or (1,))[0], math.prod(shape)
    if t.rows == rows or not numel:
        return True
    parts, rest = divmod(t.rows, rows)
    return not rest and parts > 0 and numel % t.rows == 0 and parts % t.inner == 0


@dataclass(slots=True)
class Match:
    """The result of matching: requests for parameters, and all mismatches by kind."""

    wants: list[TensorRequest] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[ShapeMismatch] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)  # all names of parameters not loaded
    # devices of parameters that the model computes and the checkpoint lacks, by name
    computed: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ties: list[tuple[str, Source, str, Source]] = field(default_factory=list)
    # auxiliary tensors (scales, ...) in modules of weights that the load quantizes, by name
    beside: dict[str, TensorRequest] = field(default_factory=dict)
    # parameters of floats whose tensors, of another shape, are codes
    codes: list[str] = field(default_factory=list)

    @property
    def filled(self) -> int:
        """Number of parameters that are loaded; all shards of one count once."""
        return len({parameter.names for parameter in self.parameters.values()})

    @property
    def left_out(self) -> list[str]:
        """Names of parameters that are not loaded: missing, or of another shape."""
        return self.missing + [mismatch.name for mismatch in self.wrong_shape]

    def quantised(
        self,
        checkpoint: Checkpoint,
        coded: Mapping[str, CodedWeight],
        changed: Collection[str],
        policy: QuantPolicy | None = None,
    ) -> TensorRequests:
        """Return the requests; each weight held quantized (``coded``) has one for each part.

        ``changed``: tensors whose values functions change. ``policy``: the formats, for messages.
        """
        if not coded:
            return TensorRequests.of(checkpoint, self.wants)
        forms = [
            coded.get(want.name) if _is_float(checkpoint, want.source) else None
            for want in self.wants
        ]
        formats = [form and form.format for form in forms]
        wants = [coded_want(f, w) if f else w for w, f in zip(self.wants, forms, strict=True)]
        requests = TensorRequests.of(checkpoint, wants)
        return quantised(checkpoint, requests, formats, changed, self.beside, policy)

    def formats(
        self, checkpoint: Checkpoint, quant: QuantPolicy, coded: Mapping[str, CodedWeight]
    ) -> dict[str, str]:
        """Return the format that ``quant=`` gives parameters, by name; not those in ``coded``.

        Raises ValueError if a module holds a weight in another format already.
        """
        wants = TensorRequests.of(checkpoint, self.wants)
        found = dict(zip(wants.names, quant.formats(checkpoint, wants), strict=True))
        others = [n for n, form in found.items() if form and n in coded and coded[n].format != form]
        if others:
            held = ", ".join(dict.fromkeys(coded[name].format for name in others))
            listed = ", ".join(others[:8]) + ", ..." * (len(others) > 8)
            raise ValueError(
                f"quant={found[others[0]]!r}: the model holds {len(others)} weights as {held} "
                f"already, and modules keep their format: leave quant= out, or load into a new "
                f"model: {listed}"
            )
        return {name: form for name, form in found.items() if form and name not in coded}

    def not_swapped(
        self,
        checkpoint: Checkpoint,
        formats: Mapping[str, str],
        swap: Swap,
        coded: Mapping[str, CodedWeight],
    ) -> list[str]:
        """Return notes on weights in ``formats`` that no module in ``swap`` can hold quantized.

        ``coded``: weights that the model holds quantized. Raises ValueError if a weight has no
        module, and both ``swap`` and ``coded`` are empty.
        """
        wants = TensorRequests.of(checkpoint, self.wants)
        kept = {
            want.name: src.nbytes(math.prod(want.shape))
            for want, src in zip(wants, wants.srcs, strict=True)
            if want.name in formats and want.name not in swap.coded
        }
        if not formats and not coded:
            return ["nothing is quantised: no weight of a layer is meant by quant="]
        if not kept:
            return []
        listed = ", ".join(list(kept)[:8]) + (", ..." if len(kept) > 8 else "")
        if not swap.coded and not coded:
            classes = ", ".join(dict.fromkeys(swap.refused[n] for n in kept if n in swap.refused))
            why = no_holder(list(kept), swap.holders, classes)
            raise ValueError(f"{why}; without a model (model=None) the parts of each come by name")
        return [
            f"not quantised, {len(kept)} tensors of {format_bytes(sum(kept.values()))}, for their "
            "modules compute with them as they are, others share them, or they are sharded: "
            f"{listed}"
        ]

    def check(
        self,
        path: Location,
        strict: bool,
        shapes: Shapes = "error",
        suggest: Callable[[], Sequence[Suggestion]] = tuple,
    ) -> None:
        """Raise one StateDictMismatchError for all mismatches; ``suggest`` is called only then."""
        wrong_shape = self.wrong_shape if shapes == "error" else []
        missing = self.missing if strict else []
        unexpected = self.unexpected if strict else []
        if not (self.problems or wrong_shape or missing or unexpected):
            return
        suggestions = suggest()
        if not (suggestions or self.problems or missing or unexpected or self.codes):
            suggestions = skipping_shapes(self.filled, len(self.left_out))
        raise StateDictMismatchError(
            path,
            missing=missing,
            unexpected=unexpected,
            wrong_shape=wrong_shape,
            problems=self.problems,
            suggestions=suggestions,
        )

    def warn_of_little(
        self, path: Location, suggest: Callable[[], Sequence[Suggestion]], skipped: int
    ) -> None:
        """Warn if the load fills little of the model; see the function `warn_of_little`."""
        filled = self.filled
        tensors = filled + len(self.unexpected) + len(self.wrong_shape) or skipped
        warn_of_little(path, filled, filled + len(self.left_out), tensors, suggest)

    def check_ties(self, checkpoint: Checkpoint) -> None:
        """Raise StateDictMismatchError if the checkpoint has other values for a tied name.

        This reads the tensors: call it last, after all other checks.
        """
        problems = [
            f"{other} is tied to {name}, but their values differ"
            for name, source, other, theirs in self.ties
            if not same_bytes(checkpoint, source, theirs)
        ]
        if problems:
            raise StateDictMismatchError(checkpoint.path, problems=problems)

    def check_views(self, path: Location, moves: Moves) -> None:
        """Raise StateDictMismatchError if a plan replaces a view's memory or moves a shard."""
        problems = []
        for name, _, kind, *_ in moves:
            p = self.parameters.get(name)  # auxiliary parts may be to come
            if p is not None and kind.action != "in_place" and p.fixed:
                problems.append(
                    f"{name}: {p.fixed}: written in place it stays {p.dtype}, and is not "
                    f"replaced by {kind.dst} on {kind.device}"
                )
            if p is not None and p.shard and p.device != kind.device:
                problems.append(f"{name}: it is a shard on {p.device}: leave device= away")
        if problems:
            raise StateDictMismatchError(path, problems=problems)


def _is_float(checkpoint: Checkpoint, rows: Sequence[RowRange]) -> bool:
    """Return whether rows are of floats, and not of codes of a quantized weight."""
    return checkpoint.tensors[rows[0].tensor].dtype.kind == "float"


def skipping_shapes(filled: int, left_out: int) -> tuple[Suggestion, ...]:
    """Return the suggestion of ``shapes="skip"``, for a load in which only shapes mismatch."""
    return (Suggestion('shapes="skip"', filled, filled + left_out),)


def warn_of_little(
    path: Location,
    filled: int,
    parameters: int,
    tensors: int,
    suggest: Callable[[], Sequence[Suggestion]] = tuple,
) -> None:
    """Warn of a load that fills less than half of the model, from less than half of the tensors.

    A part of a model from all tensors is usual (an adapter), and so is all of it from some tensors.
    ``filled`` counts loaded parameters; ``suggest`` returns arguments that would match better.
    """
    if not parameters or (filled and 2 * filled >= min(parameters, tensors)):
        return
    warnings.warn(
        f"{path}: strict=False: the checkpoint fills {filled} of the model's {parameters} "
        f"parameters, and {tensors - filled} of its {tensors} tensors are in no parameter"
        + "".join(f"; write {each}" for each in suggest()),
        UserWarning,
        stacklevel=callers_level(),
    )


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """The parameters of a model, and their memory.

    Attributes:
        keep: names of devices on which the parameters stay if they are there.
        reusable: bytes of a parameter that the load takes over, by the parameter's index; if the
            index is missing, all its bytes.
        coded: parameters that hold the codes of weights, by name; a load of floats quantizes them.
    """

    parameters: Sequence[Parameter]
    keep: Set[str] = frozenset()
    reusable: Mapping[int, int] = field(default_factory=dict)
    coded: Mapping[str, CodedWeight] = field(default_factory=dict)


def match(
    checkpoint: Checkpoint,
    model: ModelParameters,
    found: Found,
    policy: DTypePolicy,
    blocks: Mapping[str, CodedWeight] = MappingProxyType({}),
) -> Match:
    """Match parameters to sources by name, and collect all mismatches.

    A parameter with a dtype (`Parameter.keeps`) keeps it unless the policy mentions its tensor.
    ``blocks`` are the parameters that will hold the stored codes of weights, by name.
    """
    out = Match()
    used: set[str] = set()
    fill, _, tied = found
    coded = {
        n: c for n, c in model.coded.items() if n in fill and _is_float(checkpoint, fill[n].rows)
    }
    beside = {part for name, form in coded.items() for part in form.names(name)[1:]}
    stored_packed = checkpoint.members
    alone: dict[str, str] = {}  # by tensor that may be codes, the parameter of floats that it fills
    for number, parameter in enumerate(model.parameters):
        where = parameter.device if parameter.device in model.keep else None
        held = None
        if parameter.device is not None and (parameter.nbytes or not parameter.invalid):
            held = (parameter.device, parameter.dtype, parameter.nbytes)
        made = next((n for n in parameter.names if n in beside), None) if beside else None
        if made is not None:
            there = model.reusable.get(number)
            out.beside[made] = TensorRequest(made, (), (), None, where, held, None, there)
            out.parameters[made] = parameter
            continue
        matched = [name for name in (*parameter.names, *parameter.wrapped) if name in fill]
        head = None if matched else next((name for name in parameter.names if name in tied), None)
        if not matched and head is None:
            out.unfilled += parameter.names
            if not parameter.is_computed():
                out.missing.append(parameter.names[0])
            elif parameter.device is not None:
                out.computed[parameter.names[0]] = parameter.device
            continue
        used.update(matched)
        name = matched[0] if matched else parameter.names[0]
        source = fill[matched[0]] if matched else fill[tied[head or ""]]
        if not matched:
            out.notes.append(f"{name} is tied to {tied[head or '']} by config.json: it is a copy")
        stored = _whole(checkpoint, source)  # most are: they need no further checks
        problem = "" if stored is not None else incoherent(checkpoint, source)
        problem = problem or parameter.refused
        if model.coded and not problem:
            problem = _held_otherwise(checkpoint, source, parameter, model)
        if problem:
            out.problems.append(f"{name}: {problem}")
            continue
        shape = stored.shape if stored is not None else shape_of(checkpoint, source)
        block = parameter.block
        form = next((coded[n] for n in parameter.names if n in coded), None) if coded else None
        wanted = whole_shape(parameter) if form is None else form.stored_shape
        if matched and matched[0] in blocks:
            form = blocks[matched[0]]
            wanted = form.made.parts[0].shape
        held_as = next((model.coded[n] for n in parameter.names if n in model.coded), None)
        if form is None and held_as is not None and parameter.dtype in _FLOATS:
            # a load that was broken off put the module there, and not yet its blocks
            form, wanted = held_as, held_as.made.parts[0].shape
            if math.prod(shape) == math.prod(wanted):
                source, shape = replace(source, shape=wanted), wanted
        given = parameter.shape if form is None else wanted
        if form is None and is_text(name) and len(shape) == len(wanted) == 1:
            given = wanted = shape  # of any length
        if not fits(shape, wanted):
            out.wrong_shape.append(ShapeMismatch(name, wanted, shape))
            if parameter.dtype in _FLOATS and not _is_float(checkpoint, source.rows):
                out.codes.append(name)
            out.unfilled += parameter.names
            continue
        filled = part_of(checkpoint, source, block)
        if filled is None:
            out.problems.append(
                f"{name}: it is sharded, and what fills it is put in another order: load the whole,"
                " and shard it then"
            )
            continue
        for other in matched[1:]:
            why = incoherent(checkpoint, fill[other])
            theirs = None if why else part_of(checkpoint, fill[other], block)
            if theirs is None:
                out.problems.append(f"{other}: {why or 'its values are in another order'}")
            else:
                out.ties.append((name, filled, other, theirs))
        own = name if name in parameter.names else parameter.names[0]  # or a wrapper's
        out.tied += [o for o in parameter.names if o != own and o not in out.tied]
        name += parameter.shard
        first = checkpoint.tensors[source.rows[0].tensor]
        dtype = None if policy.mentions(first.name) else parameter.keeps
        held_so = form is not None and form is held_as
        is_same = parameter.dtype == first.dtype.name or name in blocks or held_so
        if is_same and first.name in stored_packed:
            dtype = first.dtype  # a module for quantized weights, which has the stored dtype
        if parameter.dtype in _FLOATS and not is_same and not policy.mentions(first.name):
            alone[first.name] = name
        there = model.reusable.get(number)
        out.wants.append(
            TensorRequest(
                *(name, given, filled.rows, filled.transpose),
                *(where, held, dtype, there),
                fixed=parameter.fixed,
            )
        )
        out.parameters[name] = parameter
        if form is not None and name in blocks:
            beside_it = [part.name(name) for part in form.made.parts[1:]]
            used.update(beside_it)
            for each in beside_it:  # scales stay as they are stored, in a module that is to come
                rows, turn, dims = (
                    fill[each].rows,
                    fill[each].transpose,
                    shape_of(checkpoint, fill[each]),
                )
                dtype = checkpoint.tensors[rows[0].tensor].dtype
                out.wants.append(TensorRequest(each, dims, rows, turn, where, None, dtype))
    for end, said in _REPLACED.items():
        replaced = [name for name, p in out.parameters.items() if p.dtype.endswith(end)]
        if replaced:
            listed = ", ".join(replaced[:8])
            out.notes.append(f"{len(replaced)} parameters are replaced by {said}: {listed}")
    out.problems += _without_scales(checkpoint, out.wants, alone)
    # shards share their errors
    out.missing, out.problems = (list(dict.fromkeys(x)) for x in (out.missing, out.problems))
    out.wrong_shape = list(dict.fromkeys(out.wrong_shape))
    out.problems += _overlaps(out.parameters)
    out.unexpected = [
        name
        for name in fill
        if name not in used and not is_computed(name, shape_of(checkpoint, fill[name]))
    ]
    return out


def _without_scales(
    checkpoint: Checkpoint, wants: Iterable[TensorRequest], alone: Mapping[str, str]
) -> list[str]:
    """Return an error's line for each parameter of floats that codes without their scales fill."""
    members = checkpoint.members
    groups = {tensor: members[tensor] for tensor in alone if tensor in members}
    taken = {r.tensor for want in wants for r in want.source} if groups else ()
    out = []
    for tensor, group in groups.items():
        scales = (
            info.name
            for role, info in group.members.items()
            if info is not group.values and info.dtype.kind == "float" and role[:6] != "input_"
        )
        left = next((name for name in scales if name not in taken), None)
        if left is not None and tensor == group.values.name:
            out.append(
                f"{alone[tensor]}: it is of floats, {tensor} has codes of {group.kind}, and no "
                f"parameter takes {left}"
            )
    return out


def _held_otherwise(
    checkpoint: Checkpoint, source: Source, parameter: Parameter, model: ModelParameters
) -> str:
    """Explain why a source cannot overwrite a parameter's blocks of another type; "" if it can."""
    held = next((model.coded[n] for n in parameter.names if n in model.coded), None)
    if held is None:
        return ""
    info = checkpoint.tensors[source.rows[0].tensor]
    kind = info.dtype.name
    if info.dtype.kind == "float":
        same = held.format in SCHEMES
    else:
        of_library = {} if held.format in SCHEMES else checkpoint.members  # has its own names
        known = checkpoint.stored.get(info.name) or of_library.get(info.name)
        kind = held.format if known is None else known.kind
        same = kind == held.format
    return "" if same else f"it holds {held.format} as stored, not {kind}: load it into a new model"


def whole_shape(parameter: Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter in a checkpoint, also if it is one shard of several."""
    return parameter.shape if parameter.block is None else parameter.block.whole


def fits(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a tensor has a parameter's shape; a scalar may be stored as shape (1,)."""
    return stored == wanted or {stored, wanted} == {(), (1,)}


def _overlaps(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return an error's line for each parameter whose memory overlaps another parameter's."""
    spans = sorted((p.span, name) for name, p in parameters.items() if p.span is not None)
    out = []
    last, owner = (0, 0, 0), ""
    for span, name in spans:
        if owner and span[0] == last[0] and span[1] < last[2]:
            out.append(f"{name}: it shares memory with {owner}, and is not the same parameter")
        if span[0] != last[0] or span[2] > last[2]:
            last, owner = span, name
    return out


def same_bytes(checkpoint: Checkpoint, a: Source, b: Source) -> bool:
    """Return whether two sources of one tied parameter have the same bytes; reads the files."""
    if a == b:
        return True
    if a.transpose != b.transpose or shape_of(checkpoint, a) != shape_of(checkpoint, b):
        return False
    if checkpoint.tensors[a.rows[0].tensor].dtype != checkpoint.tensors[b.rows[0].tensor].dtype:
        return False
    left, right = _blocks(checkpoint, a), _blocks(checkpoint, b)
    return all(one == other for one, other in zip_longest(left, right))


def _blocks(checkpoint: Checkpoint, source: Source) -> Iterator[bytes]:
    """Yield the bytes of a source's rows in order, in blocks of 1 MiB."""
    held = bytearray()
    for r in source.rows:
        info = checkpoint.tensors[r.tensor]
        with open_shard(checkpoint.headers[info.shard]) as reader:
            for start, stop in region_of(info, r).ranges():
                while start < stop:
                    out = bytearray(min(_BLOCK_NBYTES - len(held), stop - start))
                    reader.read_into(start, memoryview(out))
                    start += len(out)
                    held += out
                    if len(held) == _BLOCK_NBYTES:
                        yield bytes(held)
                        held.clear()
    yield bytes(held)


def stated_by_tensors(checkpoint: Checkpoint) -> dict[str, tuple[Any, str]]:
    """Return settings of a language model that config.json has otherwise than its tensors.

    By key: the value that the tensors state, and the reason for users. Reads a head and an
    embedding that are both stored, until they differ: `Match.check_ties` compares them alike.
    """
    config, name = checkpoint.config, embedding_of(checkpoint)
    is_other = bool(config.get("architectures")) and not is_language_model(checkpoint)
    if name is None or is_other or not config:
        return {}
    embedding, out = checkpoint.tensors[name], dict[str, tuple[Any, str]]()
    shape = shape_in_models(embedding)
    head = next((each for each in HEADS if each in checkpoint.tensors), None)
    stated, is_packed = config.get("vocab_size"), isinstance(embedding, Packed)
    has_rows = len(shape) == 2 and (is_packed or name not in checkpoint.members)  # else of codes
    if has_rows and type(stated) is int and stated != shape[0]:
        out["vocab_size"] = shape[0], f"{name} has {shape[0]} rows"
    if head is not None and config.get("tie_word_embeddings") is not False:
        both = (Source(whole(checkpoint.tensors[each])) for each in (head, name))
        computed = embedding.is_computed or checkpoint.tensors[head].is_computed
        if computed or not same_bytes(checkpoint, *both):
            out["tie_word_embeddings"] = False, f"{head} is stored, and is not {name}"
    return out
