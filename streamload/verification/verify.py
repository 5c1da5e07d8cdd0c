"""Verify a load against its checkpoint, and a checkpoint against its sidecar.

Parameters are read back from a device and compared byte by byte with `Expected`, whose file bytes
come by plain reads (those of a URL and of views by their reader). Memory is bounded to some 30 MB,
and to less if less is free.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from streamload.checkpoint.digests import SIDECAR, Digest, Digests, digest_of
from streamload.checkpoint.open import (
    Checkpoint,
    CheckpointLike,
    from_headers,
    open_checkpoint,
    opened,
)
from streamload.checkpoint.shards import Room, open_shard
from streamload.codecs.stored import by_weight
from streamload.core.chart import Shown
from streamload.core.location import Location
from streamload.core.memory import first_that_fits
from streamload.core.patterns import Patterns, Selection
from streamload.core.progress import Progress, reporting
from streamload.core.tensors import TensorInfo
from streamload.core.units import format_bytes, format_table
from streamload.devices.base import Device, Framework, Parameter
from streamload.devices.names import framework, framework_of
from streamload.errors import CheckpointError, TruncatedFileError, printable
from streamload.files.folder import folder_at
from streamload.files.header import open_regular
from streamload.files.hub import origin
from streamload.files.local import Guard
from streamload.formats.reader import FORMATS
from streamload.loading.report import LoadReport
from streamload.planning.dequantize import dequantized
from streamload.planning.moves import Kind, Move
from streamload.planning.quant_policy import coded
from streamload.verification.diff import shards_of, tensors_text, way, weights
from streamload.verification.difference import shape_text
from streamload.verification.reference import Expected, Read

_BLOCK_NBYTES = 4 * 2**20
_SMALL_BLOCK_NBYTES = 2**18
# Copies of a block: read, gathered, cast, read back and compared; and pages that are read ahead.
_BLOCKS = 7
_CAST_NBYTES = 4 * 2**20  # numpy's temporaries


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A parameter whose bytes on the device differ from the expected bytes.

    Attributes:
        element: index of the first element that differs, in row-major order.
        expected: bytes of this element from the checkpoint, in hexadecimal.
        found: bytes of this element on the device, in hexadecimal.
    """

    name: str
    element: int
    expected: str
    found: str

    def __str__(self) -> str:
        name = printable(self.name)
        return f"{name}: element {self.element}: expected {self.expected}, found {self.found}"


def verify(
    report: LoadReport,
    checkpoint: Checkpoint,
    model: Any = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Mismatch]:
    """Return the parameters of a load that differ from the checkpoint.

    ``model``: None for the report's ``state_dict``. ``progress`` gets the parameter bytes compared
    so far. Payloads of NaN are not compared after a cast. Raises ValueError if functions changed
    values.
    """
    changed = [p.name for p in report.plan.placements if p.kind.changes]
    if changed:
        raise ValueError(f"{changed[0]}: its values were changed on the way: nothing has its bytes")
    sizes = (_BLOCK_NBYTES, _SMALL_BLOCK_NBYTES)
    scales_nbytes = 2 * max((p.scales_nbytes for p, _ in report.plan.placements.counted), default=0)
    needed = [(nbytes, _BLOCKS * nbytes + _CAST_NBYTES + scales_nbytes) for nbytes in sizes]
    block_nbytes = first_that_fits(needed, [("reading back", needed[-1][1])])
    packed = [p for p in report.plan.placements if p.kind.src.is_packed]
    checkpoint = dequantized(checkpoint, dict.fromkeys(r.tensor for p in packed for r in p.source))
    out = []
    done = 0
    parts: dict[str, bytes] = {}  # by name, scales and tables: they follow their codes
    for placement, device, buffer in _buffers(report, model):
        at = 0
        found = partial(device.read, buffer)
        for expected in _blocks(placement, checkpoint, report, block_nbytes, parts, found):
            read = found(at, at + len(expected))
            element = (
                _first_difference(placement.kind, expected, read) if read != expected else None
            )
            if element is not None:
                n = placement.kind.dst.itemsize
                where = slice(element * n, (element + 1) * n)
                hexes = expected[where].hex(), read[where].hex()
                out.append(Mismatch(placement.name, at // n + element, *hexes))
                break
            at += len(expected)
            done += len(expected)
            progress(done)
    return out


def _blocks(
    move: Move,
    checkpoint: Checkpoint,
    report: LoadReport,
    block_nbytes: int,
    parts: dict[str, bytes],
    found: Callable[[int, int], bytes],
) -> Iterator[bytes]:
    """Yield blocks of the bytes that a parameter should hold.

    ``parts`` keeps scales by name, computed with their codes; ``found`` reads device bytes.
    """
    name, source, p, *_ = move
    if p.cast == "part":
        yield parts.pop(name)
        return
    sources = [(checkpoint.tensors[rows.tensor], rows) for rows in source]
    dtype, on_cuda = p.dst if p.coding is None else p.src, p.cast == "device"
    out_of_range = report.plan.out_of_range
    expected = Expected(sources, dtype, out_of_range, p.transpose, p.coding, on_cuda)
    with _plain_reads(checkpoint) as read:
        if p.coding is None:
            nbytes = block_nbytes // 2 if p.src.is_packed else block_nbytes
            yield from (expected.cast(data).tobytes() for data in expected.values(read, nbytes))
            return
        yield from expected.codes(read, block_nbytes // 8, found)
    of = {part.suffix: part.name(name) for part in coded(p.coding, p.src).parts}
    parts.update({of[suffix]: bytes(data) for suffix, data in expected.parts.items()})


def checksums(report: LoadReport, names: Set[str], model: Any = None) -> dict[str, int]:
    """Return by name the CRC-32 of the device bytes of parameters ``names``; see `verify`."""
    if not names:
        return {}
    threads = max(report.plan.threads, 1)  # 0: only the calling thread may use the devices
    block_nbytes = max(_BLOCK_NBYTES // threads, 2**20)

    def checksum(found: tuple[Move, Device, Any]) -> tuple[str, int]:
        p, device, buffer = found
        crc = 0
        for at in range(0, p.kind.nbytes, block_nbytes):
            crc = zlib.crc32(device.read(buffer, at, min(at + block_nbytes, p.kind.nbytes)), crc)
        return p.name, crc

    todo = [found for found in _buffers(report, model) if found[0].name in names]
    if threads == 1:
        return dict(map(checksum, todo))
    # one thread took 25 s for 16 GB on an H200: it copies pages and then sums them up
    todo.sort(key=lambda found: -found[0].kind.nbytes)
    with ThreadPoolExecutor(threads, "streamload-verify") as pool:
        return dict(pool.map(checksum, todo))  # an error cancels the rest


def _buffers(report: LoadReport, model: Any) -> Iterator[tuple[Move, Device, Any]]:
    """Yield every parameter of a load, its device, and its buffer; None if it has no bytes."""
    loaded = report.state_dict if model is None else model
    owner = framework(framework_of(loaded) or "host")
    if model is None:  # one by one: a name may be anything, and tinygrad strips dots from it
        found = {name: owner.parameters({"it": t})[0] for name, t in loaded.items()}
    else:
        found = {
            name + p.shard: p for p in owner.parameters(loaded) for name in (*p.names, *p.wrapped)
        }
        found |= _of_state(report, owner, loaded, found)
    for placement in report.plan.placements:
        buffer = found[placement.name].buffer() if placement.kind.nbytes else None
        yield placement, owner.device(placement.kind.device), buffer


def _of_state(
    report: LoadReport, owner: Framework, model: Any, found: Mapping[str, Parameter]
) -> dict[str, Parameter]:
    """Return, by name, parameters not in ``found`` from the state dict; ValueError if absent."""
    names = [name for name in report.plan.placements.names if name not in found]
    state = model.state_dict() if names and hasattr(model, "state_dict") else {}
    out = {name: owner.parameters({"it": state[name]})[0] for name in names if name in state}
    hidden = [name for name in names if name not in out]
    if hidden:
        raise ValueError(f"{hidden[0]}: the model does not show it: verify the load without it")
    return out


def _first_difference(p: Kind, expected: bytes, found: bytes) -> int | None:
    """Return the index of the first element that differs; None if only NaN payloads do."""
    left, right = (np.frombuffer(data, f"V{p.dst.itemsize}") for data in (expected, found))
    differs = left != right
    if p.src is not p.dst and p.coding is None:
        values, read = (np.frombuffer(data, p.dst.numpy) for data in (expected, found))
        with np.errstate(all="ignore"):
            differs &= ~(np.isnan(values) & np.isnan(read))
    where = np.flatnonzero(differs)
    return int(where[0]) if len(where) else None


@contextmanager
def _plain_reads(checkpoint: Checkpoint) -> Iterator[Read]:
    """Open files on demand; yields a function that reads them, and raises if one has changed."""
    with ExitStack() as stack:

        @cache
        def opened(shard: Location) -> Callable[[int, int], bytes]:
            header = checkpoint.headers[shard]
            if not isinstance(shard, Path) or header.views:
                reader = stack.enter_context(open_shard(header))

                def fetch(start: int, nbytes: int) -> bytes:
                    data = bytearray(min(nbytes, reader.nbytes - start))
                    reader.read_into(start, memoryview(data))
                    return bytes(data)

                return fetch
            file = stack.enter_context(open_regular(shard))
            guard = Guard(file, shard, header.state, refusal="none is needed")

            def read(start: int, nbytes: int) -> bytes:
                with guard:
                    file.seek(start)
                    return file.read(nbytes)

            return read

        @contextmanager
        def read_tensor(info: TensorInfo, start: int, stop: int) -> Iterator[memoryview]:
            data = opened(info.shard)(start, stop - start)
            if (end := start + len(data)) < stop:
                problem = "the file ended"
                raise TruncatedFileError(info.shard, problem, stop, end, tensor=info.name)
            yield memoryview(data)

        yield read_tensor


# --- a checkpoint against its sidecar -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor that differs from its entry in the sidecar."""

    name: str
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Verification(Shown):
    """The result of a check against the sidecar. Prints as a table.

    Attributes:
        path: the checkpoint.
        sidecar: the file with its digests.
        verified_count: how many tensors have the digests in the sidecar.
        changed: tensors that differ from the sidecar, in the order of the files.
        missing: names that the sidecar lists and the checkpoint lacks.
        unlisted: names that the checkpoint has and the sidecar lacks.
        nbytes: bytes of tensors read.
        seconds: wall time of the check.
        quantised: by tensor with a problem, the quantized weight that it belongs to.
    """

    path: str
    sidecar: str
    verified_count: int
    changed: tuple[Changed, ...]
    missing: tuple[str, ...]
    unlisted: tuple[str, ...]
    nbytes: int
    seconds: float
    quantised: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no tensor is changed, missing or unlisted."""
        return not (self.changed or self.missing or self.unlisted)

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)})

    def lines(self) -> Iterator[str]:
        """Yield a line for each tensor or quantized weight with a problem, and a summary."""
        rows = [(c.name, str(c)) for c in self.changed]
        rows += [(name, f"listed in {SIDECAR}, not in the checkpoint") for name in self.missing]
        rows += [(name, f"not listed in {SIDECAR}") for name in self.unlisted]
        if rows:
            listed = by_weight(rows, self.quantised)
            yield from format_table(("tensor", "problem"), listed, right=0)
        done = f"{format_bytes(self.nbytes)} in {self.seconds:.2f} s"
        if self.ok:
            yield f"verified: {tensors_text(self.verified_count)}, {done}"
        else:
            problems = f"{tensors_text(len(rows))} not as {SIDECAR} says"
            yield f"{problems}, {self.verified_count} verified, {done}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def verify_checkpoint(
    path: CheckpointLike,
    *,
    select: Patterns = (),
    exclude: Patterns = (),
    progress: Progress = "auto",
) -> Verification:
    """Read every byte of a checkpoint, and compare its tensors with the digests of its sidecar.

    Args:
        path: the checkpoint, as in `open_checkpoint`; `streamload.json` is in its folder.
        select: only tensors with a name that matches, as the files have it (GGUF its own); none
            for all.
        exclude: leave out tensors with a name that matches.
        progress: how progress is shown; see `load_state_dict`.

    Returns:
        The result; `Verification.ok` is the verdict.

    Raises:
        ShardNotFoundError: there is no sidecar, or no checkpoint.
        CheckpointError: one of them is not valid or cannot be read.
        PlanInfeasibleError: there is too little memory.
        ValueError: an argument is invalid.
    """
    begun = time.monotonic()
    chosen = Selection.parse(select, exclude)
    checkpoint = _in_files(opened(path))
    folder = folder_at(checkpoint.path).path
    digests = Digests.read(folder / SIDECAR)
    block_nbytes, kind = way([checkpoint])
    room = Room(block_nbytes, ahead=True)
    chosen.check([*checkpoint.tensors, *digests.tensors])
    tensors = [info for info in checkpoint.tensors.values() if info.name in chosen]
    listed = [info for info in tensors if info.name in digests.tensors]
    changed = []
    done = nbytes = 0
    with (
        reporting(progress, sum(info.nbytes for info in listed), "checked") as tell,
        shards_of(checkpoint, kind) as files,
    ):
        for info in listed:
            expected = digests.tensors[info.name]
            difference = _unlike(info, expected)
            if difference is None:
                found = digest_of(files.blocks(info, room), tell, done)
                nbytes += info.nbytes
                if found != expected.hex:
                    difference = Changed(info.name, "digest", expected.hex, found)
            if difference is not None:
                changed.append(difference)
            done += info.nbytes
            tell(done)
    there = _names_of_folder(checkpoint, folder)
    unlisted = tuple(info.name for info in tensors if info.name not in digests.tensors)
    of, wrong = weights(checkpoint), (*(c.name for c in changed), *unlisted)
    return Verification(
        path=str(checkpoint.path),
        sidecar=str(folder / SIDECAR),
        verified_count=len(listed) - len(changed),
        changed=tuple(changed),
        missing=tuple(name for name in digests.tensors if name not in there and name in chosen),
        unlisted=unlisted,
        nbytes=nbytes,
        seconds=time.monotonic() - begun,
        quantised={name: of[name] for name in wrong if name in of},
    )


def _in_files(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with tensors as its files have them, as a sidecar lists them."""
    headers = [FORMATS[header.format].reader().in_file(header) for header in checkpoint.shards]
    if all(new is old for new, old in zip(headers, checkpoint.shards, strict=True)):
        return checkpoint
    return from_headers(checkpoint.path, headers)


def _unlike(info: TensorInfo, digest: Digest) -> Changed | None:
    """Return how a tensor's dtype or shape differs from the sidecar's; None if both are equal."""
    if info.dtype is not digest.dtype:
        return Changed(info.name, "dtype", digest.dtype.name, info.dtype.name)
    if info.shape != digest.shape:
        return Changed(info.name, "shape", shape_text(digest.shape), shape_text(info.shape))
    return None


def _names_of_folder(checkpoint: Checkpoint, folder: Location) -> Mapping[str, TensorInfo]:
    """Return the tensors that a sidecar may list: of all shards, even if only one was opened."""
    if checkpoint.path == folder or checkpoint.path.name.endswith(".json"):
        return checkpoint.tensors
    try:
        whole = _in_files(open_checkpoint(origin(folder)))
    except CheckpointError:  # the other shards are not there
        return checkpoint.tensors
    mine = {header.path.name for header in checkpoint.shards}
    theirs = {header.path.name for header in whole.shards}
    return whole.tensors if mine <= theirs else checkpoint.tensors
