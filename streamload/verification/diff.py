"""`streamload.diff`: compare two checkpoints tensor by tensor.

A block of each file is held at a time: 20 MB, and less if memory is short. One thread is enough:
digests run at 30 GB/s and comparisons at 19 (casts by ml_dtypes, which keeps the GIL, at 2), and
disks are slower.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, get_args

import numpy as np

from streamload.checkpoint.digests import SIDECAR, Digests
from streamload.checkpoint.open import Checkpoint, CheckpointLike, opened
from streamload.checkpoint.shards import AHEAD_NBYTES, BLOCK_NBYTES, Room, Shards, cut
from streamload.codecs.cast_table import OutOfRange, supported
from streamload.codecs.decode import check_target, scales_nbytes
from streamload.codecs.scheme import SCHEMES
from streamload.codecs.stored import by_weight, kept_dtype
from streamload.codecs.weights import Packed, shape_in_models
from streamload.core.chart import Shown
from streamload.core.dtypes import DType, DTypeArgument
from streamload.core.location import Location, Url
from streamload.core.memory import first_that_fits
from streamload.core.patterns import Patterns, Selection, check_names, check_patterns
from streamload.core.progress import Progress, reporting
from streamload.core.tensors import Coding, RowTranspose, TensorInfo, whole
from streamload.core.units import format_bytes, format_table, round_up
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.files.folder import ReaderKind, ResolvedKind, choose_reader, folder_at
from streamload.formats.gguf.names import is_computed
from streamload.formats.writer import FUSED_EXPERTS
from streamload.planning.dequantize import all_names, as_in_models, asked, dequantized
from streamload.planning.match import stated_by_tensors
from streamload.planning.moves import DTypePolicy, TensorRequest, TensorRequests
from streamload.planning.quant_policy import (
    QuantArgument,
    QuantPolicy,
    coded,
    held_nbytes,
    quantised,
    turned,
)
from streamload.planning.sources import HEADS, Rename, model_shape, sources
from streamload.verification.difference import TensorDifference, ValueComparison
from streamload.verification.reference import PART_NUMEL, Expected, Read

#: (bytes to compare at once, how files are read): the first that fits into memory is used.
_WAYS: Sequence[tuple[int, ReaderKind]] = (
    (BLOCK_NBYTES, "auto"),
    (2**20, "direct"),
    (2**18, "direct"),
)
# Each is a little more than was measured in memory cgroups.
_RUN_NBYTES = 2 * 2**20  # the thread that shows progress, open files
_PARTS_NBYTES = 6 * 2**20  # numpy's temporaries of `PART_NUMEL`: 3.5 MB, 5.5 with a cast
_TENSOR_NBYTES = 300  # a tensor of either checkpoint: half of a `Pair`, or of a difference
_QUANT_NBYTES = 12 * 2**20  # numpy's temporaries of quantizing
_PACKED_BLOCKS = 4
_PAGE = 4096
_GGUF = "gguf"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_OPEN = 16  # files of one checkpoint at once


@dataclass(frozen=True, slots=True)
class Comparison(Shown):
    """The differences between two checkpoints. Prints as a table.

    Attributes:
        a: path of the first checkpoint.
        b: path of the second.
        only_a: names of tensors that only the first has (after `rename`), in order.
        only_b: names of tensors that only the second has, in order.
        differences: tensors of both that differ, in the order of the first.
        equal_count: how many tensors of both are equal.
        nbytes: bytes of tensors read, of both.
        seconds: wall time of the comparison.
        quantised: by tensor that differs, the quantized weight that it belongs to.
    """

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differences: tuple[TensorDifference, ...]
    equal_count: int
    nbytes: int
    seconds: float
    quantised: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all tensors are equal and both checkpoints have the same names."""
        return not (self.only_a or self.only_b or self.differences)

    def to_json(self) -> str:
        """Return the result as JSON; a largest difference that is infinite is the text "inf"."""
        data = {"ok": self.ok, **asdict(self)}
        for difference in data["differences"]:
            values = difference["values"]
            if values is not None and values["largest"] == math.inf:
                values["largest"] = "inf"
        return json.dumps(data, allow_nan=False)

    def lines(self) -> Iterator[str]:
        """Yield a line for each tensor or quantized weight that differs, and a summary."""
        rows = [(name, f"only in {self.a}") for name in self.only_a]
        rows += [(name, f"only in {self.b}") for name in self.only_b]
        rows += [(d.name, str(d)) for d in self.differences]
        if rows:
            listed = alike(by_weight(rows, self.quantised))
            yield from format_table(("tensor", "difference"), listed, right=0)
        done = f"{format_bytes(self.nbytes)} in {self.seconds:.2f} s"
        if self.ok:
            yield f"equal: {tensors_text(self.equal_count)}, {done}"
        else:
            yield f"{tensors_text(len(rows))} different, {self.equal_count} equal, {done}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def diff(
    a: CheckpointLike,
    b: CheckpointLike,
    *,
    dtype: DTypeArgument = None,
    quant: QuantArgument = None,
    out_of_range: OutOfRange = "inf",
    rename: Rename | None = None,
    select: Patterns = (),
    exclude: Patterns = (),
    progress: Progress = "auto",
) -> Comparison:
    """Compare two checkpoints tensor by tensor; their files may be cut differently.

    Bits are compared, so that 0 and -0 differ, and NaN is equal to the same NaN. With ``dtype`` the
    first checkpoint is cast, and its quantized weights are dequantized, by numpy and not by the
    kernels of streamload: the result is then whether the second is a right conversion of the first.
    The payload of a NaN is not compared after a cast. With ``quant``, numpy quantizes weights of
    the first as well.

    Args:
        a: the first checkpoint, as in `open_checkpoint`.
        b: the second.
        dtype: the dtype that floats of the first are cast to, or patterns of names; None to leave
            them. Weights that are stored quantized are dequantized, as by `convert`.
        quant: the formats that weights of the first are quantized to, as in `streamload.convert`.
        out_of_range: the result of finite values that the dtype cannot represent: "inf",
            "clamp", or "error".
        rename: new names for tensors of the first: a dict (missing names stay), or a callable that
            returns a name, or None to skip the tensor.
        select: only tensors with a name that matches, as the first has it; none for all.
        exclude: leave out tensors with a name that matches.
        progress: how progress is shown; see `load_state_dict`.

    Returns:
        The result; `Comparison.ok` is the verdict.

    Raises:
        CheckpointError: a checkpoint is not valid or cannot be read.
        PlanInfeasibleError: there is too little memory.
        UnsupportedCastError: a tensor cannot be cast to its dtype.
        OutOfRangeError: under "error", a value cannot be represented.
        ValueError: an argument is invalid.
    """
    begun = time.monotonic()
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(f"out_of_range is one of {get_args(OutOfRange)}, not {out_of_range!r}")
    chosen = Selection.parse(select, exclude)
    policy = DTypePolicy.parse("checkpoint" if dtype is None else dtype)
    formats = QuantPolicy.parse(quant, ())
    first, second = opened(a), opened(b)
    if dtype is not None:
        first = as_in_models(dequantized(first, asked(first, policy)))
    if isinstance(rename, Mapping):
        check_names("rename", rename, first.tensors)
    names = _names(first)
    check_patterns("dtype", (pattern for pattern, _ in policy.rules), names)
    check_patterns("quant", (pattern for pattern, _ in formats.rules), names)
    formats = formats.leaving(_left(second)) if formats else formats
    named, _, _ = sources(first, None, rename)
    infos = {name: first.tensors[source.rows[0].tensor] for name, source in named.items()}
    wants = _quantized(first, second, formats, infos) if formats else None
    if wants is not None:
        infos = dict(zip(wants.names, wants.infos, strict=True))
    block_nbytes, kind = way([first, second], wants)
    chosen.check([*names, *_names(second)])
    only_b = [name for name in second.tensors if name not in infos and name in chosen]

    found = _pairs(first, second, infos, wants, policy, out_of_range)
    pairs = deque(pair for pair in found if pair.left.name in chosen)
    total = sum(pair.read_nbytes for pair in pairs)
    differences: list[TensorDifference] = []
    equal_count = done = nbytes = 0
    codes: Pair | None = None
    with (
        reporting(progress, total, "compared") as tell,
        shards_of(first, kind) as files_a,
        shards_of(second, kind) as files_b,
    ):
        mine, theirs = reads(files_a, block_nbytes), reads(files_b, block_nbytes)
        while pairs:
            pair = pairs.popleft()  # freed soon: there may be very many
            if codes is not None and pair.codes is not codes:
                codes.expected.parts.clear()
            codes = pair.codes or pair
            with closing(pair.compare(mine, theirs, block_nbytes)) as steps:
                for part_nbytes in steps:
                    tell(done + part_nbytes)
            done += pair.read_nbytes
            nbytes += (pair.read_nbytes + pair.right.nbytes) * pair.compared
            difference = pair.difference()
            differences += [difference] if difference is not None else []
            equal_count += difference is None
            tell(done)
    infos = {name: info for name, info in infos.items() if info.name in chosen}
    only_a = tuple(name for name in infos if name not in second.tensors)
    of_first, of_second = weights(first), weights(second)
    listed = {name: of_first.get(infos[name].name) for name in only_a}
    listed |= {name: of_second.get(name) for name in (*only_b, *(d.name for d in differences))}
    return Comparison(
        a=str(first.path),
        b=str(second.path),
        only_a=only_a,
        only_b=tuple(only_b),
        differences=tuple(differences),
        equal_count=equal_count,
        nbytes=nbytes,
        seconds=time.monotonic() - begun,
        quantised={name: weight for name, weight in listed.items() if weight is not None},
    )


def _names(checkpoint: Checkpoint) -> Collection[str]:
    """Return names that patterns may match: tensors and, if all are valid, quantized weights."""
    try:
        return all_names(checkpoint)
    except CheckpointError:  # its tensors are compared as they are
        return checkpoint.tensors


def _wanted(checkpoint: Checkpoint, policy: DTypePolicy, info: TensorInfo) -> DType:
    """Return the dtype that a tensor of the first checkpoint is cast to before the comparison."""
    wanted = policy.resolve(info.name, info.dtype, True)
    if isinstance(info, Packed):
        check_target(info, wanted)
        return wanted
    if wanted is not info.dtype:
        wanted = kept_dtype(checkpoint.members, info) or wanted
    if not supported(info.dtype, wanted):
        raise UnsupportedCastError(info.dtype.name, wanted.name, tensor=info.name, path=info.shard)
    return wanted


def _left(converted: Checkpoint) -> list[str]:
    """Return patterns of weights that `convert` left unquantized, from its sidecar; [] if none."""
    if isinstance(converted.path, Url):
        return []
    try:
        left = Digests.read(folder_at(converted.path).path / SIDECAR).options.get("left")
    except CheckpointError:
        return []
    return [each for each in left if isinstance(each, str)] if isinstance(left, list) else []


def _quantized(
    checkpoint: Checkpoint,
    second: Checkpoint,
    formats: QuantPolicy,
    infos: Mapping[str, TensorInfo],
) -> TensorRequests:
    """Return the tensors (codes, scales) that quantization makes of ``infos``, by final name.

    Blocks have the rows in the order in which ``second`` stores them.
    """
    listed = [TensorRequest(name, info.shape, (whole(info),)) for name, info in infos.items()]
    wants = TensorRequests.of(checkpoint, listed)
    found = formats.formats(checkpoint, wants)
    listed = [turned(checkpoint, *each) for each in zip(listed, found, strict=True)]
    stored = {name: one for header in second.shards for name, one in header.stored.items()}
    for at, (want, format) in enumerate(zip(listed, found, strict=True)):
        turn = second.turns.get(want.name)
        if format is not None and turn is not None and want.name in stored:
            shape = tuple(stored[want.name].shape)
            order = turn.transpose and turn.transpose.inverse
            listed[at] = want._replace(shape=shape, transpose=order)
    return quantised(checkpoint, TensorRequests.of(checkpoint, listed), found)


def made_by(a: CheckpointLike, b: CheckpointLike) -> dict[str, Any]:
    """Return the arguments of `diff` by which ``b`` was made, according to its sidecar.

    Without a sidecar, {}. GGUF files have types that their writer chose: these are taken over.
    """
    first, second = opened(a), opened(b)
    try:
        options = Digests.read(folder_at(second.path).path / SIDECAR).options
    except CheckpointError:
        return {}
    is_gguf = any(header.format == _GGUF for header in second.shards)
    lacking = [key for key in ("adapters", "imatrix") if options.get(key)]
    if options.get("rename") == "by a function" or (is_gguf and options.get("rename")):
        lacking.append("rename")
    if is_gguf and any(FUSED_EXPERTS.fullmatch(name) for name in first.tensors):
        lacking.append("experts taken apart")
    mine, theirs = (
        {name: one.kind for header in each.shards for name, one in header.stored.items()}
        for each in (first, second)
    )
    if any(mine.get(name, kind) != kind for name, kind in theirs.items()):
        lacking.append("blocks quantised again")
    if any(view.shift for header in second.shards for view in header.views):
        lacking.append("1 added to norms")
    if lacking:
        raise CheckpointError(
            second.path,
            f"was made with {' and '.join(lacking)}, which a comparison does not compute: "
            f"`streamload verify {second.path}` checks its digests",
        )
    if options.get("nodes"):
        raise CheckpointError(
            second.path,
            f"holds the tensors of one node, not all of {first.path}: "
            f"`streamload verify {second.path}` checks its digests",
        )
    rules = {key: _pairs_of(options.get(key)) for key in ("dtype", "quant", "rename")}
    lists = {key: options.get(key) or () for key in ("select", "exclude")}
    if not is_gguf:  # blocks whose dtype no rule decides become float16
        rules["dtype"] += [(name, "float16") for name in mine if name in first.tensors]
    out: dict[str, Any] = {key: dict(found) for key, found in rules.items() if found}
    out |= {key: list(found) for key, found in lists.items() if found}
    out["out_of_range"] = options.get("out_of_range", "inf")
    return out | _of_gguf(first, second) if is_gguf else out


def _of_gguf(first: Checkpoint, second: Checkpoint) -> dict[str, Any]:
    """Return the names, dtypes and formats that a GGUF file has for the tensors of ``first``."""
    is_tied = "tie_word_embeddings" not in stated_by_tensors(first)
    named: dict[str, str | None] = {}
    for name in first.tensors:
        tried = (name, f"model.{name}", f"transformer.{name}")
        named[name] = next((each for each in tried if each in second.tensors), name)
        if is_computed(name) or (name in HEADS and is_tied and named[name] not in second.tensors):
            named[name] = None
    stored = {name: one.kind for header in second.shards for name, one in header.stored.items()}
    own = {name for header in first.shards for name in header.stored}
    both = {n: new for n, new in named.items() if new and new in second.tensors and n not in own}
    codes = {name: stored[new] for name, new in both.items() if stored.get(new) in SCHEMES}
    floats = {n: second.tensors[new].dtype.name for n, new in both.items() if new not in stored}
    return {
        "rename": named.get,
        "dtype": _shortest(floats) or None,
        "quant": _shortest(codes) or None,
    }


def _pairs_of(value: object) -> list[tuple[str, Any]]:
    """Return the pairs of a JSON list of pairs; [] for anything else."""
    rules = value if isinstance(value, list) else []
    return [(rule[0], rule[1]) for rule in rules if isinstance(rule, list) and len(rule) == 2]


def _shortest(values: Mapping[str, str]) -> dict[str, str]:
    """Return values by pattern of names, one for all whose names differ in numbers alone."""
    groups: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        groups.setdefault(_NUMBER.sub("*", name), {})[name] = value
    out: dict[str, str] = {}
    for pattern, members in groups.items():
        alone = len(members) == 1 or len(set(members.values())) > 1
        out |= members if alone else {pattern: next(iter(members.values()))}
    return dict(sorted(out.items(), key=lambda rule: "*" in rule[0]))


@dataclass(slots=True)
class Pair:
    """Two tensors of one name, compared block by block.

    Attributes:
        expected: computes the bytes that the second should hold.
        codes: the pair of a quantized weight's codes, if this is for its scales or tables.
    """

    left: TensorInfo
    right: TensorInfo
    expected: Expected
    dtype: DType
    shape: tuple[int, ...]
    codes: Pair | None
    _values: ValueComparison | None = field(init=False, default=None)

    @property
    def _part(self) -> str:
        """Suffix of a tensor that quantization makes next to the codes (scales); else ""."""
        return self.expected.coding.part if self.expected.coding is not None else ""

    @property
    def read_nbytes(self) -> int:
        """Bytes of ``left`` to read; 0 for scales, made with their codes, and if shapes differ."""
        return 0 if self._part or self.shape != self.right.shape else self.left.nbytes

    @property
    def compared(self) -> bool:
        """Whether the values can be compared: the shapes are equal, and so are the dtypes.

        Unquantized floats of whole bytes may differ in dtype. Scales need codes that are compared.
        """
        if self.shape != self.right.shape:
            return False
        if self.dtype is self.right.dtype:
            return not self._part or (self.codes is not None and self.codes.compared)
        both = (self.dtype, self.right.dtype)
        floats = all(d.kind == "float" and d.numpy is not None for d in both)
        return floats and self.expected.coding is None

    def compare(self, mine: Read, theirs: Read, block_nbytes: int) -> Generator[int]:
        """Compare the values, if possible, and yield the bytes of ``left`` compared so far."""
        at = self.right.start
        for data in self._blocks(mine, block_nbytes) if self.compared else ():
            numel = len(data) * 8 // self._read_as.bits
            stop = at + self.right.dtype.nbytes(numel)
            with theirs(self.right, at, stop) as other:
                self._compare(data, other, (at - self.right.start) * 8 // self.right.dtype.bits)
            at = stop
            yield self.read_nbytes * (at - self.right.start) // self.right.nbytes

    @property
    def _read_as(self) -> DType:
        """Dtype of the elements that `_blocks` yields."""
        return self.expected.src if self.expected.coding is None else self.dtype

    def _blocks(self, read: Read, block_nbytes: int) -> Iterator[memoryview | bytes]:
        """Yield the bytes that ``right`` should hold in order, before any cast."""
        if self._part:
            assert self.codes is not None, self.right.name
            data = self.codes.expected.parts[self._part]
            return (data[start:stop] for start, stop in cut(0, len(data), block_nbytes))
        if self.expected.coding is not None:
            return self.expected.codes(read, block_nbytes)
        src = self.expected.src  # blocks of both files are at most `block_nbytes`
        return self.expected.values(
            read, block_nbytes * src.bits // max(src.bits, self.right.dtype.bits)
        )

    def _compare(self, mine: memoryview | bytes, theirs: memoryview, first: int) -> None:
        """Record the differences of blocks of both tensors that begin at element ``first``."""
        x, y = np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8)
        src, right = self._read_as, self.right.dtype
        if src is self.dtype is right and np.array_equal(x, y):
            return
        if self._values is None:
            payloads = self.expected.coding is not None or self.dtype is self.left.dtype
            self._values = ValueComparison(self.dtype, right, payloads)
        for start, stop in cut(0, len(x) * 8 // src.bits, PART_NUMEL):
            # copies: numpy is only fast, or right, on aligned elements
            part = x[src.nbytes(start) : src.nbytes(stop)].copy()
            other = y[right.nbytes(start) : right.nbytes(stop)].copy()
            if src is not self.dtype:
                part = self.expected.cast(part)
            self._values.compare(part, other, first + start)

    def difference(self) -> TensorDifference | None:
        """Return how the tensors differ, after `compare`; None if they are equal."""
        right, values = self.right, None
        if self._values is not None:
            values = self._values.difference(math.prod(self.shape), self.shape)
        same_dtype, same_shape = self.dtype is right.dtype, self.shape == right.shape
        if values is None and same_shape and same_dtype:
            return None
        return TensorDifference(
            right.name,
            None if same_dtype else (self.dtype.name, right.dtype.name),
            None if same_shape else (self.shape, right.shape),
            values,
            self.compared,
        )


def _pairs(
    first: Checkpoint,
    second: Checkpoint,
    infos: Mapping[str, TensorInfo],
    wants: TensorRequests | None,
    policy: DTypePolicy,
    out_of_range: OutOfRange,
) -> Iterator[Pair]:
    """Yield a `Pair` for each tensor that both checkpoints have; codes before their scales.

    ``infos``: tensors of the first, by their names in the second. ``wants``: with ``quant=``, the
    tensors (codes, scales) that quantization makes of them; else None.
    """
    codes: Pair | None = None
    quantized: Iterable[tuple[Coding | None, RowTranspose | None]] = repeat((None, None))
    if wants is not None:
        quantized = ((want.coding, want.transpose) for want in wants)
    for (name, info), (coding, transpose) in zip(infos.items(), quantized, strict=False):
        right = second.tensors.get(name)
        if coding is not None and not coding.part:
            codes = None
        if right is None:
            continue
        order, shape = _order(first, second, info, right)
        source, range_ = [(info, whole(info))], out_of_range
        if coding is None:
            wanted = _wanted(first, policy, info)
            if info.name not in first.turns and shape == model_shape(second, name):
                shape = right.shape  # which its file may have transposed
            if isinstance(info, Packed) and info.group.is_transposed and order is None:
                order = RowTranspose(math.prod(info.shape[:-2]), *info.shape[-2:])
            yield Pair(info, right, Expected(source, wanted, range_, order), wanted, shape, None)
            continue
        parts = coded(coding, info.dtype).parts
        part = next(part for part in parts if part.suffix == coding.part)
        made = Expected(source, info.dtype, range_, transpose or order, coding)
        pair = Pair(info, right, made, part.dtype, part.shape, codes if coding.part else None)
        codes = codes if coding.part else pair
        yield pair


def _order(
    first: Checkpoint, second: Checkpoint, info: TensorInfo, right: TensorInfo
) -> tuple[RowTranspose | None, tuple[int, ...]]:
    """Return the row permutation from the first file's order to the second's, and the shape."""
    mine, theirs = first.turns.get(info.name), second.turns.get(right.name)
    if mine == theirs:
        return None, shape_in_models(info)
    if mine is None and theirs is not None:
        order = theirs.transpose and theirs.transpose.inverse
        return order, info.shape if order is not None else shape_in_models(info)
    if theirs is not None:
        problem = "its rows lie in another order than models have them: give this checkpoint first"
        raise CheckpointError(right.shard, problem, tensor=right.name)
    blocks = not isinstance(info, Packed) and info.name in first.stored
    if mine is None or (blocks and mine.shape is not None):
        return None, shape_in_models(info)
    return mine.transpose, model_shape(first, info.name)


# --- reading --------------------------------------------------------------------------------------


def shards_of(checkpoint: Checkpoint, kind: ReaderKind) -> Shards:
    """Return a checkpoint's files, opened on demand by a reader of ``kind``, few at once."""

    def choose(shard: Location) -> ResolvedKind:
        return choose_reader(shard, kind if isinstance(shard, Path) else "auto").kind

    return Shards(checkpoint.shards, choose, most_open=_MOST_OPEN)


def reads(files: Shards, block_nbytes: int) -> Read:
    """Return a function for one thread that reads file bytes, at most ``block_nbytes`` at once."""
    room = Room(block_nbytes, ahead=True)
    return lambda info, start, stop: files.block(info.shard, start, stop, room, info.name)


def way(
    checkpoints: Sequence[Checkpoint], wants: TensorRequests | None = None
) -> tuple[int, ReaderKind]:
    """Return the bytes to compare at once and the kind of reader; PlanInfeasibleError if none fits.

    ``checkpoints``: two to compare, or one to check; ``wants``: tensors to quantize.
    """
    compared = len(checkpoints) > 1
    tensors_nbytes = _TENSOR_NBYTES * sum(len(one.tensors) for one in checkpoints)
    asked = zip(wants, wants.srcs, strict=True) if wants is not None else ()
    weights = {
        (want.coding, src.name): coded(want.coding, src)
        for want, src in asked
        if want.coding is not None and not want.coding.part
    }.values()
    quant_nbytes = max(map(held_nbytes, weights), default=0) + _QUANT_NBYTES * bool(weights)
    unit_nbytes = max((w.unit_numel * w.dtype.itemsize for w in weights), default=0)
    packed = [i for one in checkpoints for i in one.tensors.values() if isinstance(i, Packed)]
    any_turned = wants is not None and any(want.transpose is not None for want in wants)
    any_turned = any_turned or any(one.turns for one in checkpoints)
    scale_nbytes = 2 * max((scales_nbytes(info.group) for info in packed), default=0)
    ways = []
    for least_nbytes, kind in _WAYS:
        block_nbytes = max(least_nbytes, round_up(unit_nbytes, _PAGE))
        each_nbytes = block_nbytes + AHEAD_NBYTES * (kind == "auto")
        needed_nbytes = _RUN_NBYTES + tensors_nbytes + len(checkpoints) * each_nbytes
        if compared:  # a block's elements that differ, and numbers of `PART_NUMEL`
            needed_nbytes += block_nbytes + _PARTS_NBYTES + quant_nbytes
        if packed or any_turned:  # elements, and columns before and after the transpose
            needed_nbytes += scale_nbytes + _PACKED_BLOCKS * block_nbytes
        ways.append(((block_nbytes, kind), needed_nbytes))
    rest_nbytes = ways[-1][1] - tensors_nbytes
    largest = [("what is found of tensors", tensors_nbytes), ("blocks and numbers", rest_nbytes)]
    return first_that_fits(ways, sorted(largest, key=lambda one: -one[1]))


def alike(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join rows of one text whose names differ in numbers alone: ``layers.*.weight (32 alike)``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        groups.setdefault((_NUMBER.sub("*", name), text), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)} alike)", text)
        for (pattern, text), names in groups.items()
    ]


def tensors_text(count: int) -> str:
    """Return "1 tensor", or the count and "tensors", for messages."""
    return f"{count} tensor{'s' * (count != 1)}"


def weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Return by tensor the name and format of its quantized weight; {} if a weight is invalid."""
    try:
        return {name: f"{group.name} ({group.kind})" for name, group in checkpoint.members.items()}
    except CheckpointError:
        return {}
