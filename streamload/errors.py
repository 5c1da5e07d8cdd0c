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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from os import PathLike, fspath
from typing import Any, Generic, Self, TypeAlias, TypeVar


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


class Fit(str):
    """A change to a call with which its load fits, as source text or in words.

    Attributes:
        option: the option, or the function to call instead.
        rest: its value or its arguments, from "=" or "(" on.
        needs: the bytes that it needs then, in words, or "".
    """

    option: str
    rest: str
    needs: str

    def __new__(cls, option: str, rest: str = "", needs: str = "") -> Self:
        """Join the parts to one text."""
        made = super().__new__(cls, f"{option}{rest}" + (f" ({needs})" if needs else ""))
        made.option, made.rest, made.needs = option, rest, needs
        return made

    def __getnewargs__(self) -> Any:
        return self.option, self.rest, self.needs


_Given = TypeVar("_Given")
_Kept = TypeVar("_Kept")
_T = TypeVar("_T")


class _Converted(Generic[_Given, _Kept]):
    """A fact of an error that is converted as it is set; without a default it is required."""

    def __init__(self, convert: Callable[[_Given], _Kept], *default: _Kept) -> None:
        self._convert, self._default = convert, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, error: object, owner: type) -> _Kept:
        if error is not None:
            return error.__dict__[self._name]  # type: ignore[no-any-return]
        if not self._default:
            raise AttributeError(self._name)
        return self._default[0]

    def __set__(self, error: object, value: _Given) -> None:
        error.__dict__[self._name] = self._convert(value)


def _text(path: str | PathLike[str]) -> str:
    return fspath(path)


def _optional_text(path: str | PathLike[str] | None) -> str | None:
    return None if path is None else fspath(path)


_Path: TypeAlias = _Converted[str | PathLike[str], str]
_OptionalPath: TypeAlias = _Converted[str | PathLike[str] | None, str | None]
_Tuple: TypeAlias = _Converted[Sequence[_T], tuple[_T, ...]]


def _rebuild(cls: type[StreamloadError], facts: dict[str, Any], rest: dict[str, Any]) -> Any:
    error = cls(**facts)
    error.__dict__.update(rest)
    return error


def _where(path: str | None, tensor: str | None) -> str:
    """The beginning of a message about a tensor of a file."""
    at = f"{path}: " if path is not None else ""
    return at + (f"tensor {tensor!r}: " if tensor is not None else "")


class StreamloadError(Exception):
    """Base of all of streamload's errors.

    Attributes:
        state: the parameters loaded, untouched and invalid, where a load had begun; else None.
    """

    state: LoadState | None = None
    _has_lines = False  # whether its message may have several: of a compiler, and of no file

    def __init__(self, message: str) -> None:
        self._show(message)

    def __post_init__(self) -> None:
        self._show(self._message())

    def _message(self) -> str:
        raise NotImplementedError  # each class with facts builds its message from them

    def _show(self, message: str) -> None:
        text = printed(message.split("\n")) if self._has_lines else printable(message)
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # facts may have been completed after construction (a tensor's name, the state)
        names = getattr(self, "__dataclass_fields__", {})
        facts = {name: getattr(self, name) for name in names}
        rest = {name: value for name, value in vars(self).items() if name not in facts}
        return _rebuild, (type(self), facts, rest)


@dataclass(eq=False, repr=False)
class CheckpointError(StreamloadError, ValueError):
    """A checkpoint that is not what it should be.

    Attributes:
        path (str): the file or folder.
        problem: what is wrong, in a few words.
        tensor: the tensor concerned, or None.
        expected: what the format or the header calls for, or None.
        found: what is there, or None.
    """

    path: _Path = _Converted(_text)
    problem: str = ""
    expected: object = None
    found: object = None
    _: KW_ONLY
    tensor: str | None = None

    def _message(self) -> str:
        detail = [f"expected {self.expected}"] * (self.expected is not None)
        detail += [f"found {self.found}"] * (self.found is not None)
        said = self.problem + (": " + ", ".join(detail) if detail else "")
        return _where(self.path, self.tensor) + said

    def of_tensor(self, tensor: str | None) -> Self:
        """The same error, with the tensor's name."""
        return replace(self, tensor=tensor)


class HeaderError(CheckpointError):
    """A safetensors header or index that breaks the format's rules."""


class TruncatedFileError(CheckpointError):
    """A file that is shorter than its header requires, or shrank while it was read.

    ``expected`` and ``found`` are file lengths in bytes.
    """


@dataclass(eq=False, repr=False)
class FileChangedError(CheckpointError):
    """A file that is not what it was when its header was read, or is about to be changed.

    Attributes:
        held_back: the system held the writer back until now, so that what was read is right; else
            all bytes read from the file may be wrong.
    """

    _: KW_ONLY
    held_back: bool = False


class ShardNotFoundError(CheckpointError):
    """A checkpoint, or a file that its index names, that is not there."""


@dataclass(eq=False, repr=False)
class StateDictMismatchError(StreamloadError, ValueError):
    """Names or shapes of the model and the checkpoint that do not agree; raised before any I/O.

    Attributes:
        path (str): the checkpoint.
        missing (tuple[str, ...]): names that the model has and the checkpoint lacks.
        unexpected (tuple[str, ...]): names that the checkpoint has and the model lacks.
        wrong_shape (tuple[ShapeMismatch, ...]): names in both, with both shapes.
        problems (tuple[str, ...]): any other reason why a parameter cannot be loaded, one sentence
            each.
        suggestions (tuple[Suggestion, ...]): what to write in the call instead.
        instead: the call of the model's own library that renames its tensors, or "".
    """

    path: _Path = _Converted(_text)
    _: KW_ONLY
    missing: _Tuple[str] = _Converted(tuple, ())
    unexpected: _Tuple[str] = _Converted(tuple, ())
    wrong_shape: _Tuple[ShapeMismatch] = _Converted(tuple, ())
    problems: _Tuple[str] = _Converted(tuple, ())
    suggestions: _Tuple[Suggestion] = _Converted(tuple, ())
    instead: str = ""

    def _message(self) -> str:
        kinds: list[tuple[str, Sequence[object]]] = [
            ("missing from the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("of another shape", self.wrong_shape),
            ("that cannot be loaded", self.problems),
        ]
        parts = [f"{len(names)} {kind}{_listed(names)}" for kind, names in kinds if names]
        if self.instead:
            parts.append(f"its library renames tensors as it loads: write model = {self.instead}")
        parts += [f"write {each}" for each in self.suggestions]
        return f"{self.path}: the model and the checkpoint do not match: " + "; ".join(parts)

    def or_by(self, call: str) -> StateDictMismatchError:
        """The same error with the call of a library, where names differ and no argument fills all.

        Args:
            call: the call, or "".
        """
        filled = any(s.filled == s.parameters for s in self.suggestions)
        if not call or filled or not (self.missing or self.unexpected):
            return self
        return replace(self, instead=call)


@dataclass(eq=False, repr=False)
class ResidenceError(StreamloadError, ValueError):
    """A parameter that ``residence="mapped"`` cannot leave in its file.

    Attributes:
        parameter: its name.
        path (str): the file.
        reason: what keeps it from being a view.
    """

    parameter: str
    path: _Path = _Converted(_text)
    reason: str = ""

    def _message(self) -> str:
        return (
            f"{self.path}: parameter {self.parameter!r} cannot be a view on the mapped file: "
            f'{self.reason}; residence="auto" loads it'
        )


class BudgetError(StreamloadError, MemoryError):
    """More bytes than there is room for."""


@dataclass(eq=False, repr=False)
class PlanInfeasibleError(BudgetError):
    """A load that cannot fit; raised before any data is read or any memory is allocated.

    Attributes:
        device: the device or node that is too small.
        needed_nbytes: the predicted peak there, in bytes.
        budget_nbytes: the bytes that it may take.
        limit: what sets ``budget_nbytes``: "budget", "free memory", "largest allocation", ....
        largest (tuple[tuple[str, int], ...]): the largest contributors first, as (name, bytes).
        would_fit (tuple[str, ...]): what would fit, one sentence each; empty where nothing would.
        reason: why more is needed than one might expect, or "".
    """

    device: str
    needed_nbytes: int
    budget_nbytes: int
    _: KW_ONLY
    limit: str = "budget"
    largest: _Tuple[tuple[str, int]] = _Converted(tuple, ())
    would_fit: _Tuple[str] = _Converted(tuple, ())
    reason: str = ""

    def _message(self) -> str:
        parts = [
            f"does not fit on {self.device}: needs {_bytes(self.needed_nbytes)}, "
            f"but the {self.limit} is {_bytes(self.budget_nbytes)}"
        ]
        if self.reason:
            parts.append(self.reason)
        if self.largest:
            shown = (f"{name} {_bytes(nbytes, False)}" for name, nbytes in self.largest[:3])
            parts.append("largest: " + ", ".join(shown))
        if self.would_fit:
            parts.append("would fit: " + "; or ".join(self.would_fit))
        return "; ".join(parts)

    def without(self, *options: str) -> PlanInfeasibleError:
        """The same error without changes of these options or calls."""
        fits = [fit for fit in self.would_fit if getattr(fit, "option", "") not in options]
        return replace(self, would_fit=fits)

    def calling(self, call: str, instead: str) -> PlanInfeasibleError:
        """The same error with ``instead`` for a call that would fit; without it for ""."""
        fits = [fit for fit in self.would_fit if isinstance(fit, Fit) and fit.option == call]
        others = [Fit(instead, "", fit.needs) for fit in fits if instead]
        return self.without(call).suggesting(others)

    def suggesting(self, also: Sequence[str], reason: str = "") -> PlanInfeasibleError:
        """The same error with more that would fit, and with another reason if one is given."""
        fits = (*self.would_fit, *also)
        return replace(self, would_fit=fits, reason=reason or self.reason)


@dataclass(eq=False, repr=False)
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
    _: KW_ONLY
    reason: str = ""

    def _message(self) -> str:
        return (
            f"{self.device}: reserving {_bytes(self.requested_nbytes)} on top of "
            f"{_bytes(self.held_nbytes)} would exceed the budget of {_bytes(self.budget_nbytes)}"
            + (f": {self.reason}" if self.reason else "")
        )


@dataclass(eq=False, repr=False)
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

    def _message(self) -> str:
        return (
            f"{self.device}: others took {_bytes(self.taken_nbytes)} of memory while the load ran: "
            f"it still needs {_bytes(self.needed_nbytes)}, and {_bytes(self.free_nbytes)} are free"
        )


class CastError(StreamloadError, ValueError):
    """A dtype conversion that cannot or must not be done."""


@dataclass(eq=False, repr=False)
class UnsupportedCastError(CastError):
    """No cast leads from one dtype to the other, or the device cannot hold the result.

    Attributes:
        src: name of the source dtype.
        dst: name of the target dtype.
        reason: why not, or "".
        tensor: the tensor concerned, or None.
        path (str | None): its file, or None.
    """

    src: str
    dst: str
    _: KW_ONLY
    reason: str = ""
    tensor: str | None = None
    path: _OptionalPath = _Converted(_optional_text, None)

    def _message(self) -> str:
        same = self.src == self.dst
        what = f"cannot hold {self.src}" if same else f"cannot cast {self.src} to {self.dst}"
        return _where(self.path, self.tensor) + what + (f": {self.reason}" if self.reason else "")


@dataclass(eq=False, repr=False)
class OutOfRangeError(CastError):
    """Finite values that the target dtype cannot represent, under ``out_of_range="error"``.

    Attributes:
        tensor: the tensor.
        path (str): its file.
        src: name of the source dtype.
        dst: name of the target dtype.
        overflowed: how many values overflowed where the load stopped (at least 1).
    """

    tensor: str
    path: _Path = _Converted(_text)
    src: str = ""
    dst: str = ""
    overflowed: int = 1

    def _message(self) -> str:
        return _where(self.path, self.tensor) + (
            f"{self.overflowed} or more finite {self.src} values are out of range of {self.dst}"
        )


@dataclass(eq=False, repr=False)
class OffloadError(StreamloadError, RuntimeError):
    """A model whose layers stream through slots was used in a way that it cannot be.

    Attributes:
        problem: why, and what to do instead.
    """

    problem: str

    def _message(self) -> str:
        return self.problem


@dataclass(eq=False, repr=False)
class DeviceError(StreamloadError, RuntimeError):
    """A device that failed, or cannot do what was asked.

    Attributes:
        device: its name.
        problem: what went wrong.
    """

    device: str
    problem: str
    _has_lines = True

    def _message(self) -> str:
        return f"{self.device}: {self.problem}"


@dataclass(eq=False, repr=False)
class DeviceNotFoundError(DeviceError):
    """A device that is not there or does not work.

    Attributes:
        working (tuple[str, ...]): names of the devices that do.
    """

    _: KW_ONLY
    working: _Tuple[str] = _Converted(tuple, ())

    def _message(self) -> str:
        here = f"; devices that work here: {', '.join(self.working)}" if self.working else ""
        return f"device {self.device}: {self.problem}{here}"


@dataclass(eq=False, repr=False)
class AllocationError(DeviceError):
    """Memory that the device's allocator refused.

    Attributes:
        nbytes: the size asked for.
    """

    _: KW_ONLY
    nbytes: int

    def _message(self) -> str:
        return f"{self.device}: could not allocate {_bytes(self.nbytes)}: {self.problem}"


@dataclass(eq=False, repr=False)
class NodeError(StreamloadError, RuntimeError):
    """A load across nodes that failed.

    Attributes:
        node: the node concerned.
        problem: what went wrong.
    """

    node: str
    problem: str

    def _message(self) -> str:
        return f"node {self.node}: {self.problem}"


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
