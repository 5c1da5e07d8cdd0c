"""The planner's input: parameters to load, devices to hold them, and their dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Literal, NamedTuple

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.stored import kept_dtype
from streamload.core.dtypes import BF16, F16, DType, DTypeArgument, parse_dtype
from streamload.core.tensors import Coding, RowRange, RowTranspose, TensorInfo, all_rows
from streamload.core.units import format_bytes, round_up
from streamload.devices.allocators import NO_OBJECTS, ObjectCosts, taken
from streamload.devices.base import DeviceInfo
from streamload.planning.moves import Rows, rows_of


def kept_free(nbytes: int) -> str:
    """Return what follows the name of a limit that is less by ``nbytes``."""
    return f" less {format_bytes(nbytes)} kept free" if nbytes else ""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device (or a node), and the memory that a load may take there, in bytes.

    Attributes:
        budget_nbytes: most bytes that may be held there, without ``reserve_nbytes``.
        limit: the source of the budget: "budget" if the user stated it, else "free memory".
        free_nbytes: free memory now; None if unknown.
        host_free_nbytes: free memory of the host, which all devices with shared memory draw on;
            None if unknown.
        native_bf16: whether bfloat16 stays bfloat16 there unless another dtype is requested.
        device_casts: (src, dst) names of the dtype pairs that the framework casts exactly there.
        casts: whether streamload's kernels cast floats there, exactly and counted, called by the
            thread that reads.
        reserve_nbytes: bytes that were subtracted from budget and free memory, to stay free.
        objects: host memory of tensor objects besides their elements.
        own_host: whether it is a node, with a host whose memory no other node uses.
        alone: whether the caller can use no other device.
        held: of a node, names of parameters that it holds already.
    """

    info: DeviceInfo
    budget_nbytes: int
    limit: str = "budget"
    free_nbytes: int | None = None
    host_free_nbytes: int | None = None
    native_bf16: bool = False
    device_casts: frozenset[tuple[str, str]] = frozenset()
    casts: bool = False
    reserve_nbytes: int = 0
    objects: ObjectCosts = NO_OBJECTS
    own_host: bool = False
    alone: bool = False
    held: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Canonical name of the device."""
        return self.info.name

    @property
    def free_limit(self) -> str:
        """The source of ``free_nbytes``, for messages."""
        return "free memory" + kept_free(self.reserve_nbytes)

    def within(self, host_nbytes: int | None) -> DeviceSpec:
        """Return the device with at most so much free memory, less the reserve, of its host."""
        if host_nbytes is None or not (self.info.shared_memory and self.info.charged):
            return self
        free, most = self.free_nbytes, max(host_nbytes - self.reserve_nbytes, 0)
        host_free = self.host_free_nbytes
        return replace(
            self,
            free_nbytes=most if free is None else min(free, most),
            host_free_nbytes=host_nbytes if host_free is None else min(host_free, host_nbytes),
        )

    def resident(self, nbytes: int) -> int:
        """Return the bytes that the allocator counts for a tensor of ``nbytes``."""
        return round_up(nbytes, self.info.granularity_nbytes)

    def taken(self, sizes: Iterable[int]) -> Iterator[int]:
        """Yield the bytes that the allocator newly takes for each of consecutive allocations."""
        return taken(self.info.allocator, self.info.granularity_nbytes, sizes)


@dataclass(frozen=True, slots=True)
class DTypePolicy:
    """The rules of ``dtype=``, which give each tensor its dtype.

    Attributes:
        rules: (pattern, dtype) in order; the first whose pattern matches the name decides. A
            dtype of None stands for "as in the checkpoint".
        fp16_cast: the engine, "device" or "llvm", if the user requested bf16 to become fp16 by it
            (SUPPORT_BF16); else None.
        alike: the stored dtype that all floats are taken to have if no rule decides; None: each
            its own.
    """

    rules: tuple[tuple[str, DType | None], ...] = ()
    fp16_cast: Literal["device", "llvm"] | None = None
    alike: DType | None = None

    @classmethod
    def parse(
        cls,
        value: DTypeArgument,
        fp16_cast: Literal["device", "llvm"] | None = None,
    ) -> DTypePolicy:
        """Read a dtype name, "checkpoint", or patterns such as ``{"*norm*": "float32"}``.

        Raises ValueError if the value is invalid or not of floats.
        """
        if value is None:
            return cls((), fp16_cast)
        rules = value if isinstance(value, Mapping) else {"*": value}
        read: list[tuple[str, DType | None]] = []
        for pattern, wanted in rules.items():
            if not isinstance(pattern, str):
                raise ValueError(f"a pattern of names is a string, not {pattern!r}")
            dtype = None if wanted == "checkpoint" else parse_dtype(wanted)
            if dtype is not None and dtype.kind != "float":
                raise ValueError(f"only floats are cast, and only to floats: not to {dtype}")
            read.append((pattern, dtype))
        return cls(tuple(read), fp16_cast)

    def mentions(self, name: str) -> bool:
        """Return whether a rule decides the dtype of tensor ``name``."""
        rules = self.rules  # usually there is none, and this is called for every parameter
        return bool(rules) and any(p == "*" or fnmatchcase(name, p) for p, _ in rules)

    def asks(self, name: str, src: DType) -> bool:
        """Return whether a rule gives tensor ``name`` another dtype than ``src``."""
        return self.mentions(name) and self.resolve(name, src, native_bf16=True) is not src

    def resolve(self, name: str, src: DType, native_bf16: bool) -> DType:
        """Return the dtype of tensor ``name`` on a device; only floats differ from ``src``."""
        if src.kind != "float":
            return src
        for pattern, dtype in self.rules:
            if pattern == "*" or fnmatchcase(name, pattern):
                return src if dtype is None else dtype
        src = self.alike or src
        if src.is_packed:  # of blocks with scales of float16
            return F16
        if src is BF16 and (self.fp16_cast is not None or not native_bf16):
            return F16
        return src


class TensorRequest(NamedTuple):
    """One parameter to load: its source, and the model's demands.

    Attributes:
        source: row ranges, concatenated in order.
        transpose: a permutation of the concatenated rows, or None.
        device: its device by name; None lets the planner split over the devices.
        held: (device, dtype, bytes) of the parameter in the model now; None if it has no memory.
        dtype: the dtype that it must have; None lets the `DTypePolicy` decide.
        reusable_nbytes: bytes of ``held`` that the load takes over; None for all.
        coding: which part of a quantized weight it is; None for any other tensor.
        fixed: why it can only be written in place, or "".
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[RowRange, ...]
    transpose: RowTranspose | None = None
    device: str | None = None
    held: tuple[str, str, int] | None = None
    dtype: DType | None = None
    reusable_nbytes: int | None = None
    coding: Coding | None = None
    fixed: str = ""

    @property
    def rows(self) -> int:
        """Number of rows of the source."""
        return sum(r.stop - r.start for r in self.source)

    @property
    def strided(self) -> bool:
        """Whether only some columns of the source's rows are read."""
        return self.source[0].columns is not None


class TensorRequests(Rows[TensorRequest]):
    """Parameters to load, and the first tensor in the source of each."""

    infos: Sequence[TensorInfo]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        rows: Sequence[TensorRequest],
        infos: Sequence[TensorInfo] | None = None,
    ) -> TensorRequests:
        """Return requests with their tensors; members of quantized weights keep their dtype."""
        if isinstance(rows, TensorRequests):
            return rows
        infos = infos or [checkpoint.tensors[row.source[0].tensor] for row in rows]
        if members := checkpoint.members:
            kept = [kept_dtype(members, info) for info in infos]
            each = zip(rows, kept, strict=True)
            rows = [row._replace(dtype=dtype) if dtype else row for row, dtype in each]
        made = cls(rows)
        made.infos = infos
        return made

    @classmethod
    def every(cls, checkpoint: Checkpoint) -> TensorRequests:
        """Return a request for every tensor of a checkpoint, under its own name."""
        infos = tuple(checkpoint.tensors.values())
        names, shapes = (list(map(attrgetter(field), infos)) for field in ("name", "shape"))
        rest = map(repeat, TensorRequest._field_defaults.values())
        rows = [*rows_of(TensorRequest, names, shapes, zip(all_rows(infos)), *rest)]
        return cls.of(checkpoint, rows, infos)

    @cached_property
    def srcs(self) -> Sequence[DType]:
        """The stored dtype of each."""
        return [info.dtype for info in self.infos]

    @cached_property
    def any_packed(self) -> bool:
        """Whether some are dequantized during the load."""
        return any(src.is_packed for src in {id(src): src for src in self.srcs}.values())

    @cached_property
    def _dsts(self) -> dict[tuple[DTypePolicy, bool], Sequence[DType]]:
        return {}

    def dsts(self, policy: DTypePolicy, native_bf16: bool) -> Sequence[DType]:
        """Return each parameter's dtype on a device; ``native_bf16``: it computes in bfloat16."""
        found = self._dsts.get((policy, native_bf16))
        if found is None:
            if any(pattern != "*" for pattern, _ in policy.rules):
                resolved = [policy.resolve(i.name, i.dtype, native_bf16) for i in self.infos]
            else:  # by id: a dtype's own hash takes ten times as long
                known = dict(zip(map(id, self.srcs), self.srcs, strict=True))
                to = {key: policy.resolve("", src, native_bf16) for key, src in known.items()}
                resolved = [to[id(src)] for src in self.srcs]
            asked = list(map(attrgetter("dtype"), self))
            found = [dtype or dst for dtype, dst in zip(asked, resolved, strict=True)]
            self._dsts[policy, native_bf16] = found
        return found

    def casts(
        self, policy: DTypePolicy, native_bf16: bool, device: str | None = None
    ) -> list[tuple[DType, DType]]:
        """Return the distinct (src, dst) dtypes of casts; ``device``: only of parameters for it."""
        rows = zip(self.srcs, self.dsts(policy, native_bf16), self, strict=True)
        pairs = {
            (src.name, dst.name): (src, dst)
            for src, dst, row in rows
            if src is not dst and row.coding is None
            if device is None or row.device in (None, device)
        }
        return [pair for _, pair in sorted(pairs.items())]

    def needs_native_bf16(self, policy: DTypePolicy) -> bool:
        """Return whether a dtype depends on whether the device computes in bfloat16 natively."""
        return self.dsts(policy, True) != self.dsts(policy, False)

    def nbytes(self, policy: DTypePolicy, native_bf16: bool = False) -> list[int]:
        """Return each parameter's bytes on a device; ``native_bf16``: it computes in bfloat16."""
        dsts = self.dsts(policy, native_bf16)
        return [dst.nbytes(math.prod(w.shape)) for dst, w in zip(dsts, self, strict=True)]
