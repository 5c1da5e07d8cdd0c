"""All errors that streamload raises.

Facts are attributes, and the message is built from them. Pickling keeps an error's facts, notes and
``state``. An error of another library is the ``__cause__`` of one of these.

```
StreamloadError
├─ CheckpointError (ValueError): HeaderError, TruncatedFileError, FileChangedError,
│                                ShardNotFoundError
├─ StateDictMismatchError (ValueError)
├─ ResidenceError (ValueError)
├─ BudgetError (MemoryError): PlanInfeasibleError, BudgetExceededError, MemoryTakenError
├─ OffloadError (RuntimeError)
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
    """Return text for one line of a terminal: characters that may control it are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printed(lines: Iterable[str]) -> str:
    """Join lines by line breaks, each escaped by `printable`."""
    return "\n".join(map(printable, lines))


_LISTED = 8  # names shown in a message; the attribute holds all of them


@dataclass(frozen=True, slots=True)
class LoadState:
    """The state of a model's parameters after a load failed, by their names.

    Attributes:
        loaded: parameters that hold the checkpoint's values.
        untouched: parameters that hold the values from before the call.
        invalid: parameters whose memory is gone or half written; using one raises an error.
            Calling the load again fills them.
    """

    loaded: tuple[str, ...]
    untouched: tuple[str, ...]
    invalid: tuple[str, ...]

    def __str__(self) -> str:
        parts = (("loaded", self.loaded), ("untouched", self.untouched), ("invalid", self.invalid))
        return "; ".join(f"{len(names)} {kind}{listed(names)}" for kind, names in parts)


@dataclass(frozen=True, slots=True)
class ShapeMismatch:
    """A parameter whose shapes in the model and the checkpoint differ."""

    name: str  # of the parameter
    expected: tuple[int, ...]  # the model's
    found: tuple[int, ...]  # the checkpoint's

    def __str__(self) -> str:
        name = printable(self.name)
        return f"{name}: expected {list(self.expected)}, found {list(self.found)}"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Arguments of a load with which more names of a model and a checkpoint match.

    Attributes:
        arguments: Python source: ``rename=lambda name: ...``, ``mapping="..."``.
        filled: number of the model's parameters that the checkpoint fills then.
        parameters: number of the model's parameters.
    """

    arguments: str
    filled: int
    parameters: int

    def __str__(self) -> str:
        return f"{self.arguments} (fills {self.filled} of {self.parameters} parameters)"


def listed(names: Sequence[object]) -> str:
    """Return " (a, b, ..., and 3 more)" for a message; "" if there are no names."""
    if not names:
        return ""
    rest = len(names) - _LISTED
    shown = ", ".join(printable(str(name)) for name in names[:_LISTED])
    return f" ({shown}{f', and {rest} more' if rest > 0 else ''})"


class Fit(str):
    """A change to a call with which its load fits into memory, as source text or in words.

    Attributes:
        option: name of the option to change, or of the function to call instead.
        rest: the option's value or the function's arguments, from "=" or "(" on.
        needs: memory that the load needs then, in words ("needs 3.00 GB"), or "".
    """

    option: str
    rest: str
    needs: str

    def __new__(cls, option: str, rest: str = "", needs: str = "") -> Self:
        """Return the text "option=value (needs)", with its three parts as attributes."""
        fit = super().__new__(cls, f"{option}{rest}" + (f" ({needs})" if needs else ""))
        fit.option, fit.rest, fit.needs = option, rest, needs
        return fit

    def __getnewargs__(self) -> Any:
        return self.option, self.rest, self.needs


_Given = TypeVar("_Given")
_Kept = TypeVar("_Kept")
_T = TypeVar("_T")


class _Converted(Generic[_Given, _Kept]):
    """Descriptor of an error's field: ``convert`` is applied to every value that is set.

    A field without ``default`` is a required argument of the dataclass.
    """

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


def _optional_text(path: str | PathLike[str] | None) -> str | None:
    return None if path is None else fspath(path)


_Path: TypeAlias = _Converted[str | PathLike[str], str]
_OptionalPath: TypeAlias = _Converted[str | PathLike[str] | None, str | None]
_Tuple: TypeAlias = _Converted[Sequence[_T], tuple[_T, ...]]


def _rebuild(cls: type[StreamloadError], facts: dict[str, Any], rest: dict[str, Any]) -> Any:
    """Rebuild a pickled error from its dataclass fields and the rest of its ``__dict__``."""
    error = cls(**facts)
    error.__dict__.update(rest)
    return error


def _where(path: str | None, tensor: str | None) -> str:
    """Return the start of an error's message: "PATH: tensor 'NAME': ", as far as known."""
    at = f"{path}: " if path is not None else ""
    return at + (f"tensor {tensor!r}: " if tensor is not None else "")


class StreamloadError(Exception):
    """Base class of all errors of streamload.

    Attributes:
        state: which parameters are loaded, if the error stopped a load; else None.
    """

    state: LoadState | None = None
    _has_lines = False  # whether the message may have several lines, as a compiler's has

    def __post_init__(self) -> None:
        message = self._message()
        text = printed(message.split("\n")) if self._has_lines else printable(message)
        super().__init__(text)

    def _message(self) -> str:
        raise NotImplementedError  # each class with facts builds its message from them

    def __reduce__(self) -> tuple[Any, ...]:
        # facts may have been completed after construction (a tensor's name, the state)
        names = getattr(self, "__dataclass_fields__", {})
        facts = {name: getattr(self, name) for name in names}
        rest = {name: value for name, value in vars(self).items() if name not in facts}
        return _rebuild, (type(self), facts, rest)


@dataclass(eq=False, repr=False)
class CheckpointError(StreamloadError, ValueError):
    """An invalid or unreadable checkpoint.

    Attributes:
        path (str): the file or folder.
        problem: the defect, in a few words.
        tensor: name of the tensor concerned, or None.
        expected: the value required by the format or the header, or None.
        found: the value in the file, or None.
    """

    path: _Path = _Converted(str)
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
        """Return a copy of this error that names a tensor."""
        return replace(self, tensor=tensor)


class HeaderError(CheckpointError):
    """A file's header, an index or other JSON that breaks its format's rules or exceeds limits."""


class TruncatedFileError(CheckpointError):
    """A file that is shorter than its header requires, or shrank while it was read.

    ``expected`` and ``found`` are file lengths in bytes.
    """


@dataclass(eq=False, repr=False)
class FileChangedError(CheckpointError):
    """A file that was changed since its header was read, or that another process wants to change.

    Attributes:
        held_back: True: the kernel blocked the writer until now, and all bytes read are right.
            False: any byte read from the file may be wrong.
    """

    _: KW_ONLY
    held_back: bool = False


class ShardNotFoundError(CheckpointError):
    """A missing checkpoint, or a missing file that a checkpoint's index names."""


@dataclass(eq=False, repr=False)
class StateDictMismatchError(StreamloadError, ValueError):
    """Names or shapes of model and checkpoint that differ; raised before tensors are read.

    Attributes:
        path (str): the checkpoint.
        missing (tuple[str, ...]): names that the model has and the checkpoint lacks.
        unexpected (tuple[str, ...]): names that the checkpoint has and the model lacks.
        wrong_shape (tuple[ShapeMismatch, ...]): parameters whose shapes differ.
        problems (tuple[str, ...]): other reasons why a parameter cannot be loaded, one sentence
            each.
        suggestions (tuple[Suggestion, ...]): arguments with which more names match.
        instead: a call of the model's own library, which renames tensors as it loads, or "".
    """

    path: _Path = _Converted(str)
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
        parts = [f"{len(names)} {kind}{listed(names)}" for kind, names in kinds if names]
        if self.instead:
            parts.append(f"its library renames tensors as it loads: write model = {self.instead}")
        parts += [f"write {each}" for each in self.suggestions]
        return f"{self.path}: the model and the checkpoint do not match: " + "; ".join(parts)

    def or_by(self, call: str) -> StateDictMismatchError:
        """Return a copy with ``instead=call``, a call of the model's own library, which renames.

        Return self if ``call`` is "", no names differ, or a suggestion fills all parameters.
        """
        filled = any(s.filled == s.parameters for s in self.suggestions)
        if not call or filled or not (self.missing or self.unexpected):
            return self
        return replace(self, instead=call)


@dataclass(eq=False, repr=False)
class ResidenceError(StreamloadError, ValueError):
    """A parameter that cannot be a view on the mapped file, under ``residence="mapped"``.

    Attributes:
        parameter: name of the parameter.
        path (str): the file with its tensor.
        reason: why a view is impossible.
    """

    parameter: str
    path: _Path = _Converted(str)
    reason: str = ""

    def _message(self) -> str:
        return (
            f"{self.path}: parameter {self.parameter!r} cannot be a view on the mapped file: "
            f'{self.reason}; residence="auto" loads it'
        )


class BudgetError(StreamloadError, MemoryError):
    """Base class of errors about too little memory."""


@dataclass(eq=False, repr=False)
class PlanInfeasibleError(BudgetError):
    """A load that needs more memory than allowed; raised before data is read or memory allocated.

    Attributes:
        device: the device or node that is too small.
        needed_nbytes: predicted peak memory there, in bytes.
        budget_nbytes: most bytes allowed there.
        limit: origin of ``budget_nbytes``: "budget", "free memory", "largest allocation", ....
        largest (tuple[tuple[str, int], ...]): the largest contributors first, as (name, bytes).
        would_fit (tuple[str, ...]): changes with which the load fits, one sentence each; empty if
            none is known.
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

    def of_model(self, model: str) -> PlanInfeasibleError:
        """Return a copy that names one of several models, and its contributors by it."""
        largest = [(f"{model}.{name}", nbytes) for name, nbytes in self.largest]
        return replace(self, largest=largest)

    def without(self, *options: str) -> PlanInfeasibleError:
        """Return a copy without the `Fit` suggestions that change these options or calls."""
        fits = [fit for fit in self.would_fit if getattr(fit, "option", "") not in options]
        return replace(self, would_fit=fits)

    def calling(self, call: str, instead: str) -> PlanInfeasibleError:
        """Return a copy with suggestions of ``call`` replaced by ``instead``; "": removed."""
        fits = [fit for fit in self.would_fit if isinstance(fit, Fit) and fit.option == call]
        others = [Fit(instead, "", fit.needs) for fit in fits if instead]
        return self.without(call).suggesting(others)

    def suggesting(self, also: Sequence[str], reason: str = "") -> PlanInfeasibleError:
        """Return a copy with more suggestions in ``would_fit``, and with ``reason`` if given."""
        fits = (*self.would_fit, *also)
        return replace(self, would_fit=fits, reason=reason or self.reason)


@dataclass(eq=False, repr=False)
class BudgetExceededError(BudgetError):
    """A reservation of memory above the budget while a load runs; nothing was allocated for it.

    Attributes:
        device: the device, or "staging" for host staging.
        requested_nbytes: size of the refused reservation.
        held_nbytes: bytes reserved there already.
        budget_nbytes: most bytes allowed there.
        reason: why the plan did not predict this, or "".
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
    """Others took memory that a running load, or pass, still needs; it stopped in time.

    Attributes:
        device: the devices that share the host's memory, or "host" for staging.
        needed_nbytes: bytes that the load would still take.
        free_nbytes: free bytes, including page cache that the kernel can reclaim, and without
            bytes that other loads of this process need.
        taken_nbytes: decrease of free bytes since the load began, without bytes that it took.
        is_limited: whether the process got another limit of its memory, or another cgroup.
    """

    device: str
    needed_nbytes: int
    free_nbytes: int
    taken_nbytes: int
    _: KW_ONLY
    is_limited: bool = False

    def _message(self) -> str:
        limited = ", and its limit changed" if self.is_limited else ""
        return (
            f"{self.device}: others took {_bytes(self.taken_nbytes)} of memory while the load ran"
            f"{limited}: it still needs {_bytes(self.needed_nbytes)}, "
            f"and {_bytes(self.free_nbytes)} are free"
        )


class CastError(StreamloadError, ValueError):
    """Base class of errors about dtype conversions that are impossible or refused."""


@dataclass(eq=False, repr=False)
class UnsupportedCastError(CastError):
    """There is no cast between two dtypes, or the device cannot hold the result.

    Attributes:
        src: name of the source dtype.
        dst: name of the target dtype.
        reason: why not, or "".
        tensor: name of the tensor concerned, or None.
        path (str | None): the tensor's file, or None.
    """

    src: str
    dst: str
    _: KW_ONLY
    reason: str = ""
    tensor: str | None = None
    path: _OptionalPath = _Converted(_optional_text, None)

    def _message(self) -> str:
        same = self.src == self.dst
        problem = f"cannot hold {self.src}" if same else f"cannot cast {self.src} to {self.dst}"
        return _where(self.path, self.tensor) + problem + f": {self.reason}" * bool(self.reason)


@dataclass(eq=False, repr=False)
class OutOfRangeError(CastError):
    """Finite values that the target dtype cannot represent, under ``out_of_range="error"``.

    Attributes:
        tensor: name of the tensor.
        path (str): the tensor's file.
        src: name of the source dtype.
        dst: name of the target dtype.
        overflowed: values out of range until the load stopped, at least 1.
    """

    tensor: str
    path: _Path = _Converted(str)
    src: str = ""
    dst: str = ""
    overflowed: int = 1

    def _message(self) -> str:
        return _where(self.path, self.tensor) + (
            f"{self.overflowed} or more finite {self.src} values are out of range of {self.dst}"
        )


@dataclass(eq=False, repr=False)
class OffloadError(StreamloadError, RuntimeError):
    """A model that cannot be offloaded, or a use that offloading (layers stream) forbids.

    Attributes:
        problem: the reason, and what to do instead.
    """

    problem: str

    def _message(self) -> str:
        return self.problem


@dataclass(eq=False, repr=False)
class DeviceError(StreamloadError, RuntimeError):
    """A device that failed, or that lacks a required ability.

    Attributes:
        device: the device's name.
        problem: the failure, in words.
    """

    device: str
    problem: str
    _has_lines = True

    def _message(self) -> str:
        return f"{self.device}: {self.problem}"


@dataclass(eq=False, repr=False)
class DeviceNotFoundError(DeviceError):
    """A device that is missing or does not work.

    Attributes:
        working (tuple[str, ...]): names of this machine's devices that work.
    """

    _: KW_ONLY
    working: _Tuple[str] = _Converted(tuple, ())

    def _message(self) -> str:
        here = f"; devices that work here: {', '.join(self.working)}" if self.working else ""
        return f"device {self.device}: {self.problem}{here}"


@dataclass(eq=False, repr=False)
class AllocationError(DeviceError):
    """An allocation of memory that a device refused.

    Attributes:
        nbytes: the requested size.
    """

    _: KW_ONLY
    nbytes: int

    def _message(self) -> str:
        return f"{self.device}: could not allocate {_bytes(self.nbytes)}: {self.problem}"


@dataclass(eq=False, repr=False)
class NodeError(StreamloadError, RuntimeError):
    """A failed load across nodes.

    Attributes:
        node: name of the node that caused the failure.
        problem: the failure, in words.
    """

    node: str
    problem: str

    def _message(self) -> str:
        return f"node {self.node}: {self.problem}"


@dataclass(eq=False, repr=False)
class PeerFailedError(NodeError):
    """Another node died, hangs or left the group while this one waited for it.

    Attributes:
        node (str): its name.
        problem (str): the failure, in words.
        rank: its rank in the group; None if unknown.
    """

    rank: int | None = None


class PlanMismatchError(NodeError):
    """Nodes computed different plans of one load: their arguments or devices differ."""


def _bytes(nbytes: int, exact: bool = True) -> str:
    # as `core.units.format_bytes`, which this file must not import
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}" + (f" ({nbytes} bytes)" if exact else "")
    return f"{nbytes} bytes"
