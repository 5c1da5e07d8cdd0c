"""Every error that streamload raises, in one tree.

Facts are attributes, and the message is built from them; every class survives pickling with its
facts, its notes and its ``state``. Errors of other libraries are translated where they enter, with
``from``.

```
StreamloadError
├─ CheckpointError (ValueError): HeaderError, TruncatedFileError, FileChangedError,
│                                ShardNotFoundError
├─ StateDictMismatchError (ValueError)
├─ ResidenceError (ValueError)
├─ BudgetError (MemoryError): PlanInfeasibleError, BudgetExceededError, MemoryTakenError
├─ CastError (ValueError): UnsupportedCastError, OutOfRangeError
├─ DeviceError (RuntimeError): DeviceNotFoundError, AllocationError
└─ NodeError (RuntimeError): PeerFailedError, PlanMismatchError
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Self


def printable(text: str) -> str:
    """Text without what a terminal would obey; all of one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printed(lines: Iterable[str]) -> str:
    """Lines as `printable`; a line break inside of one does not make two."""
    return "\n".join(map(printable, lines))


_LISTED = 8  # names shown in a message; the attribute holds all of them


@dataclass(frozen=True, slots=True)
class LoadState:
    """What a load that did not finish left behind, by parameter name.

    Attributes:
        loaded: hold the checkpoint's values.
        untouched: hold what they held before the call.
        invalid: hold nothing readable; using one raises. Calling the load again completes it.
    """

    loaded: tuple[str, ...]
    untouched: tuple[str, ...]
    invalid: tuple[str, ...]

    def __str__(self) -> str:
        parts = (("loaded", self.loaded), ("untouched", self.untouched), ("invalid", self.invalid))
        return "; ".join(f"{len(names)} {kind}{_listed(names)}" for kind, names in parts)


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """A parameter whose shape in the model is not the one in the checkpoint."""

    name: str
    expected: tuple[int, ...]  # the model's
    found: tuple[int, ...]  # the checkpoint's

    def __str__(self) -> str:
        name = printable(self.name)
        return f"{name}: expected {list(self.expected)}, found {list(self.found)}"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to write in a call, so that a model and a checkpoint match.

    Attributes:
        arguments: the arguments as source text: ``rename=lambda name: ...``, ``mapping="..."``.
        filled: how many of the model's parameters they fill.
        parameters: how many the model has.
    """

    arguments: str
    filled: int
    parameters: int

    def __str__(self) -> str:
        return f"{self.arguments} (fills {self.filled} of {self.parameters} parameters)"


def _listed(names: Sequence[object]) -> str:
    if not names:
        return ""
    rest = len(names) - _LISTED
    shown = ", ".join(printable(str(name)) for name in names[:_LISTED])
    return f" ({shown}{f', and {rest} more' if rest > 0 else ''})"


def _rebuild(cls: type[StreamloadError], facts: dict[str, Any], rest: dict[str, Any]) -> Any:
    error = cls(**facts)
    error.__dict__.update(rest)
    return error


class StreamloadError(Exception):
    """Base of all of streamload's errors.

    Attributes:
        state: the parameters loaded, untouched and invalid, where a load had begun; else None.
    """

    state: LoadState | None = None
    _has_lines = False  # whether its message may have several: of a compiler, and of no file

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(printed(message.split("\n")) if self._has_lines else printable(message))
        self._facts = facts
        for key, value in facts.items():
            setattr(self, key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # facts may have been completed after construction (a tensor's name, the state)
        facts = {key: getattr(self, key) for key in self._facts}
        rest = {k: v for k, v in self.__dict__.items() if k != "_facts" and k not in facts}
        return _rebuild, (type(self), facts, rest)


class CheckpointError(StreamloadError, ValueError):
    """A checkpoint that is not what it should be.

    Attributes:
        path: the file or folder.
        problem: what is wrong, in a few words.
        tensor: the tensor concerned, or None.
        expected: what the format or the header calls for, or None.
        found: what is there, or None.
    """

    path: str
    problem: str
    tensor: str | None
    expected: object
    found: object

    def __init__(
        self,
        path: str | PathLike[str],
        problem: str,
        expected: object = None,
        found: object = None,
        *,
        tensor: str | None = None,
    ) -> None:
        where = f"{fspath(path)}: " + (f"tensor {tensor!r}: " if tensor is not None else "")
        detail = [f"expected {expected}"] if expected is not None else []
        detail += [f"found {found}"] if found is not None else []
        super().__init__(
            where + problem + (": " + ", ".join(detail) if detail else ""),
            path=fspath(path),
            problem=problem,
            tensor=tensor,
            expected=expected,
            found=found,
        )

    def of_tensor(self, tensor: str | None) -> Self:
        """The same error, with the tensor's name."""
        facts = {key: getattr(self, key) for key in self._facts}
        return type(self)(**facts | {"tensor": tensor})

    def again(self) -> Self:
        """The same error, to be raised by another thread, or once more."""
        return self.of_tensor(self.tensor)


class HeaderError(CheckpointError):
    """A safetensors header or index that breaks the format's rules."""


class TruncatedFileError(CheckpointError):
    """A file that is shorter than its header says, or shrank while it was read.

    ``expected`` and ``found`` are file lengths in bytes.
    """


class FileChangedError(CheckpointError):
    """A file that is not what it was when its header was read, or is about to be changed.

    Attributes:
        held_back: the system held the writer back until now, so that what was read is right; else
            whatever was taken from the file may be wrong.
    """

    held_back: bool

    def __init__(
        self,
        path: str | PathLike[str],
        problem: str,
        expected: object = None,
        found: object = None,
        *,
        tensor: str | None = None,
        held_back: bool = False,
    ) -> None:
        super().__init__(path, problem, expected, found, tensor=tensor)
        self._facts["held_back"] = self.held_back = held_back


class ShardNotFoundError(CheckpointError):
    """A checkpoint, or a file that its index names, that is not there."""


class StateDictMismatchError(StreamloadError, ValueError):
    """Names or shapes of the model and the checkpoint that do not agree; raised before any I/O.

    Attributes:
        path: the checkpoint.
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
        wrong_shape: names in both, with both shapes.
        problems: anything else that stands between a parameter and its tensor, one sentence each.
        suggestions: what to write in the call instead.
        instead: the call of the model's own library that renames its tensors, or "".
    """

    path: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong_shape: tuple[ShapeMismatch, ...]
    problems: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]
    instead: str

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        wrong_shape: Sequence[ShapeMismatch] = (),
        problems: Sequence[str] = (),
        suggestions: Sequence[Suggestion] = (),
        instead: str = "",
    ) -> None:
        found = [
            f"{len(names)} {kind}{_listed(names)}"
            for kind, names in (
                ("missing from the checkpoint", missing),
                ("unexpected in the checkpoint", unexpected),
                ("of another shape", wrong_shape),
                ("that cannot be loaded", problems),
            )
            if names
        ]
        said = [f"write {each}" for each in suggestions]
        if instead:
            said.insert(0, f"its library renames tensors as it loads: write model = {instead}")
        super().__init__(
            f"{fspath(path)}: the model and the checkpoint do not match: "
            + "; ".join([*found, *said]),
            path=fspath(path),
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            wrong_shape=tuple(wrong_shape),
            problems=tuple(problems),
            suggestions=tuple(suggestions),
            instead=instead,
        )

    def or_by(self, call: str) -> StateDictMismatchError:
        """The same error with the call of a library, where names differ and no argument fills all.

        Args:
            call: the call, or "".
        """
        filled = any(s.filled == s.parameters for s in self.suggestions)
        if not call or filled or not (self.missing or self.unexpected):
            return self
        return StateDictMismatchError(**{**self._facts, "instead": call})


class ResidenceError(StreamloadError, ValueError):
    """A parameter that ``residence="mapped"`` cannot leave in its file.

    Attributes:
        parameter: its name.
        path: the file.
        reason: what keeps it from being a view.
    """

    parameter: str
    path: str
    reason: str

    def __init__(self, parameter: str, path: str | PathLike[str], reason: str) -> None:
        super().__init__(
            f"{fspath(path)}: parameter {parameter!r} cannot be a view on the mapped file: "
            f'{reason}; residence="auto" loads it',
            parameter=parameter,
            path=fspath(path),
            reason=reason,
        )


class BudgetError(StreamloadError, MemoryError):
    """More bytes than there is room for."""


class PlanInfeasibleError(BudgetError):
    """A load that cannot fit; raised before any data is read or any memory is allocated.

    Attributes:
        device: the device or node that is too small.
        needed_nbytes: the predicted peak there, in bytes.
        budget_nbytes: the bytes that it may take.
        limit: what sets ``budget_nbytes``: "budget", "free memory", "largest allocation", ....
        largest: the largest contributors, (name, bytes), largest first.
        would_fit: what would fit, one sentence each; empty where nothing would.
        reason: why more is needed than one might expect, or "".
    """

    device: str
    needed_nbytes: int
    budget_nbytes: int
    limit: str
    largest: tuple[tuple[str, int], ...]
    would_fit: tuple[str, ...]
    reason: str

    def __init__(
        self,
        device: str,
        needed_nbytes: int,
        budget_nbytes: int,
        *,
        limit: str = "budget",
        largest: Sequence[tuple[str, int]] = (),
        would_fit: Sequence[str] = (),
        reason: str = "",
    ) -> None:
        message = (
            f"does not fit on {device}: needs {_bytes(needed_nbytes)}, "
            f"but the {limit} is {_bytes(budget_nbytes)}"
        )
        if reason:
            message += f"; {reason}"
        if largest:
            message += "; largest: " + ", ".join(f"{n} {_bytes(b, False)}" for n, b in largest[:3])
        if would_fit:
            message += "; would fit: " + "; or ".join(would_fit)
        super().__init__(
            message,
            device=device,
            needed_nbytes=needed_nbytes,
            budget_nbytes=budget_nbytes,
            limit=limit,
            largest=tuple(largest),
            would_fit=tuple(would_fit),
            reason=reason,
        )

    def without(self, *beginnings: str) -> PlanInfeasibleError:
        """The same error without what would fit and begins so."""
        kept = [line for line in self.would_fit if not line.startswith(beginnings)]
        return PlanInfeasibleError(**{**self._facts, "would_fit": kept})

    def calling(self, call: str, instead: str) -> PlanInfeasibleError:
        """The same error with other words for a call that would fit; without it for ""."""
        lines = [line for line in self.would_fit if line.startswith(call)]
        said = [f"{instead} {line[line.rindex('(') :]}" for line in lines if instead]
        return self.without(call).suggesting(said)

    def suggesting(self, also: Sequence[str], reason: str = "") -> PlanInfeasibleError:
        """The same error with more that would fit, and with another reason if one is given."""
        return PlanInfeasibleError(
            self.device,
            self.needed_nbytes,
            self.budget_nbytes,
            limit=self.limit,
            largest=self.largest,
            would_fit=(*self.would_fit, *also),
            reason=reason or self.reason,
        )


class BudgetExceededError(BudgetError):
    """A reservation that the ledger refused; nothing was allocated for it.

    Attributes:
        device: the device, or "host" for staging.
        requested_nbytes: the size of the reservation.
        held_nbytes: what was reserved there already.
        budget_nbytes: the budget there.
        reason: why the plan did not foresee this, or "".
    """

    device: str
    requested_nbytes: int
    held_nbytes: int
    budget_nbytes: int
    reason: str

    def __init__(
        self,
        device: str,
        requested_nbytes: int,
        held_nbytes: int,
        budget_nbytes: int,
        *,
        reason: str = "",
    ) -> None:
        super().__init__(
            f"{device}: reserving {_bytes(requested_nbytes)} on top of {_bytes(held_nbytes)} "
            f"would exceed the budget of {_bytes(budget_nbytes)}" + (f": {reason}" * bool(reason)),
            device=device,
            requested_nbytes=requested_nbytes,
            held_nbytes=held_nbytes,
            budget_nbytes=budget_nbytes,
            reason=reason,
        )


class MemoryTakenError(BudgetError):
    """Memory that a load was promised and others took while it ran; raised while it can stop.

    Attributes:
        device: the devices that share the host's memory, or "host" for staging.
        needed_nbytes: what the load would still take.
        free_nbytes: what is free, page cache that the kernel can reclaim included.
        taken_nbytes: how much less that is than when the load began, without what it took itself.
    """

    device: str
    needed_nbytes: int
    free_nbytes: int
    taken_nbytes: int

    def __init__(
        self, device: str, needed_nbytes: int, free_nbytes: int, taken_nbytes: int
    ) -> None:
        super().__init__(
            f"{device}: others took {_bytes(taken_nbytes)} of memory while the load ran: it still "
            f"needs {_bytes(needed_nbytes)}, and {_bytes(free_nbytes)} are free",
            device=device,
            needed_nbytes=needed_nbytes,
            free_nbytes=free_nbytes,
            taken_nbytes=taken_nbytes,
        )


class CastError(StreamloadError, ValueError):
    """A dtype conversion that cannot or must not be done."""


class UnsupportedCastError(CastError):
    """No cast leads from one dtype to the other, or the device cannot hold the result.

    Attributes:
        src: name of the source dtype.
        dst: name of the target dtype.
        reason: why not, or "".
        tensor: the tensor concerned, or None.
        path: its file, or None.
    """

    src: str
    dst: str
    reason: str
    tensor: str | None
    path: str | None

    def __init__(
        self,
        src: str,
        dst: str,
        *,
        reason: str = "",
        tensor: str | None = None,
        path: str | PathLike[str] | None = None,
    ) -> None:
        where = f"{fspath(path)}: " if path is not None else ""
        where += f"tensor {tensor!r}: " if tensor is not None else ""
        what = f"cannot cast {src} to {dst}" if src != dst else f"cannot hold {src}"
        super().__init__(
            where + what + (f": {reason}" if reason else ""),
            src=src,
            dst=dst,
            reason=reason,
            tensor=tensor,
            path=None if path is None else fspath(path),
        )


class OutOfRangeError(CastError):
    """Finite values that the target dtype cannot represent, under ``out_of_range="error"``.

    Attributes:
        tensor: the tensor.
        path: its file.
        src: name of the source dtype.
        dst: name of the target dtype.
        overflowed: how many values overflowed where the load stopped (at least 1).
    """

    tensor: str
    path: str
    src: str
    dst: str
    overflowed: int

    def __init__(
        self, tensor: str, path: str | PathLike[str], src: str, dst: str, overflowed: int
    ) -> None:
        super().__init__(
            f"{fspath(path)}: tensor {tensor!r}: {overflowed} or more finite {src} values are "
            f"out of range of {dst}",
            tensor=tensor,
            path=fspath(path),
            src=src,
            dst=dst,
            overflowed=overflowed,
        )


class OffloadError(StreamloadError, RuntimeError):
    """A model whose layers stream through slots was used in a way that it cannot be.

    Attributes:
        problem: why, and what to do instead.
    """

    problem: str

    def __init__(self, problem: str) -> None:
        super().__init__(problem, problem=problem)


class DeviceError(StreamloadError, RuntimeError):
    """A device that failed, or cannot do what was asked.

    Attributes:
        device: its name.
        problem: what went wrong.
    """

    device: str
    problem: str
    _has_lines = True

    def __init__(self, device: str, problem: str) -> None:
        super().__init__(f"{device}: {problem}", device=device, problem=problem)


class DeviceNotFoundError(DeviceError):
    """A device that is not there or does not work.

    Attributes:
        working: names of the devices that do.
    """

    working: tuple[str, ...]

    def __init__(self, device: str, problem: str, *, working: Sequence[str] = ()) -> None:
        here = f"; devices that work here: {', '.join(working)}" if working else ""
        StreamloadError.__init__(
            self,
            f"device {device}: {problem}{here}",
            device=device,
            problem=problem,
            working=tuple(working),
        )


class AllocationError(DeviceError):
    """Memory that the device's allocator refused.

    Attributes:
        nbytes: the size asked for.
    """

    nbytes: int

    def __init__(self, device: str, problem: str, *, nbytes: int) -> None:
        StreamloadError.__init__(
            self,
            f"{device}: could not allocate {_bytes(nbytes)}: {problem}",
            device=device,
            problem=problem,
            nbytes=nbytes,
        )


class NodeError(StreamloadError, RuntimeError):
    """A load across nodes that failed.

    Attributes:
        node: the node concerned.
        problem: what went wrong.
    """

    node: str
    problem: str

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(f"node {node}: {problem}", node=node, problem=problem)


class PeerFailedError(NodeError):
    """Another node died, hung or left."""


class PlanMismatchError(NodeError):
    """Nodes that computed different plans."""


def _bytes(nbytes: int, exact: bool = True) -> str:
    # errors.py is a leaf: the readable form lives in units.py for everybody else
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}" + (f" ({nbytes} bytes)" if exact else "")
    return f"{nbytes} bytes"
