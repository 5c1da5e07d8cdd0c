"""Reads the pickle of a torch checkpoint without running any of it.

A pickle is a program: opcodes that push, build and call. Python's own unpickler calls functions
that the file names, and even with a closed `find_class` it hashes keys of any depth, allocates memo
slots and buffers by numbers in the file, and sets attributes. This module interprets the opcodes
itself, cut by the table of `pickletools`: each opcode makes at most one object of a few words, in
time proportional to its own bytes; names are looked up only in the table of
`streamload.formats.torch.globals`, and nothing is called.

Source: the documentation of Python's `pickletools`.
"""

from __future__ import annotations

import codecs
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, TypeAlias

from streamload.core.memory import first_that_fits
from streamload.formats.torch.globals import (
    VERSIONS,
    CutOffError,
    Foreign,
    Global,
    Instance,
    Lookup,
    Opaque,
    PickleError,
    Storage,
    called,
    key_of,
    kind_of,
    named_or_foreign,
    storage_of,
)


class Loaded(NamedTuple):
    """The content of a pickle, the byte after it, and its storages by key."""

    root: Any
    stop: int
    storages: Mapping[str, Storage]


def load(data: bytes, at: int = 0, lookup: Lookup = named_or_foreign) -> Loaded:
    """Return the content of the pickle at byte ``at``.

    It consists of tuples, lists, dicts, strings, numbers, `Tensor`, `Instance` and `Opaque`.
    Objects may refer to themselves, and several times to one object. ``lookup`` returns the records
    of the globals that the pickle may name. Raise PickleError if the pickle is not valid, or not of
    a torch checkpoint.
    """
    machine = _Machine(data, at, lookup)
    return Loaded(machine.run(), machine.at, {**machine.empty, **machine.storages})


# --- the machine ----------------------------------------------------------------------------------

_Raw: TypeAlias = "bytes | memoryview"  # an opcode's argument, without its length
_Action = Callable[["_Machine", _Raw], None]
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_LINES = {"GLOBAL": 2, "INST": 2}  # lines of an opcode's argument; 1 for others
_OPCODE_NBYTES = 128  # most bytes of the object that an opcode makes, and of the reference to it
_SPARE_INDEXES = 2**10  # of the memo: picklers count them up from 0 or 1
_CHECKED_OPCODES = 2**18  # free memory is checked after each of these
_SHORT_NBYTES = 2**10
_MAX_INT = 2**63
_MOST_DIGITS = 20


class _Machine:
    """The state of the pickle interpreter: a stack, a memo, and the position in the pickle."""

    def __init__(self, data: bytes, at: int, lookup: Lookup) -> None:
        self._data = data
        self.at = at  # the next byte
        self.lookup = lookup
        self._byte = 0  # the current opcode
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}  # by key
        self.empty: dict[str, Storage] = {}  # those without elements, by key
        self._copied = 0  # entries of dicts copied so far

    def run(self) -> Any:
        """Interpret the opcodes up to STOP and return the object left on the stack."""
        data, end, opcodes = self._data, len(self._data), _OPCODES
        while True:
            for _ in repeat(None, _CHECKED_OPCODES):
                at = self.at
                if at >= end:
                    raise CutOffError("is cut off", "an opcode", f"the end at byte {at}")
                self._byte = byte = data[at]
                self.at = at + 1
                kind, action = opcodes[byte]
                if kind is None:
                    action(self, b"")
                    if action is _stop:
                        return self.stack[0]
                elif kind > 0 and at + kind < end:  # as `_argument` does
                    self.at = at = at + 1 + kind
                    action(self, data[at - kind : at])
                else:
                    action(self, self._argument(kind))
            self._check_memory(_CHECKED_OPCODES)

    @property
    def name(self) -> str:
        """The name of the current opcode."""
        return _NAMES[self._byte]

    def _check_memory(self, count: int) -> None:
        """Raise PlanInfeasibleError if free memory is too small for ``count`` more objects."""
        needed_nbytes = count * _OPCODE_NBYTES
        first_that_fits([(None, needed_nbytes)], [("objects of a pickle", needed_nbytes)])

    def count_copied(self, count: int) -> None:
        """Count entries of dicts to copy; raise PickleError for more than the file has bytes."""
        # torch.save's own dicts are copied once at most, so this keeps the time linear
        before, self._copied = self._copied, self._copied + count
        if self._copied > len(self._data):
            self.refuse("dicts of its own", f"copies of copies, {self._copied} entries")
        if before // _CHECKED_OPCODES < self._copied // _CHECKED_OPCODES:
            self._check_memory(max(count, _CHECKED_OPCODES))

    def storage(self, found: Storage) -> Storage:
        """Return the first storage of this key; raise PickleError if ``found`` differs from it."""
        whole = replace(found, offset=0) if found.offset else found
        if not found.numel and found.key not in self.storages:
            self.empty[found.key] = found
            return found  # of any dtype: torch does not share empty ones
        first = self.storages.setdefault(found.key, whole)
        if first != whole:
            said = (f"{each.numel} of {each.dtype}" for each in (first, found))
            self.refuse(f"one dtype and length of storage {found.key!r}", " and ".join(said))
        return found if found.offset else first

    def _argument(self, kind: int) -> _Raw:
        """Return the current opcode's argument, without its length, and move past it.

        ``kind`` is `pickletools`' number of bytes, or a negative code of a kind of argument.
        """
        data, at = self._data, self.at
        if kind >= 0:
            stop = at + kind
        elif kind == pickletools.UP_TO_NEWLINE:
            stop = at
            for _ in range(_LINES.get(self.name, 1)):
                stop = data.find(b"\n", stop) + 1
                if not stop:
                    raise CutOffError("is cut off", "the end of a line", f"{self.name} at {at - 1}")
        else:
            at += _LENGTHS[kind]
            stop = at + int.from_bytes(data[self.at : at], "little")
        if stop > len(data):
            raise CutOffError(
                "is cut off", f"{stop} bytes for {self.name} at {self.at - 1}", str(len(data))
            )
        self.at = stop
        # a view if it is long: it is copied once, into the object
        return data[at:stop] if stop - at < _SHORT_NBYTES else memoryview(data)[at:stop]

    def pop(self) -> Any:
        """Remove and return the top of the stack; raise PickleError if it is empty."""
        try:
            return self.stack.pop()
        except IndexError:
            self.refuse("an object on the stack", "none")

    def top(self, kind: type[Any]) -> Any:
        """Return the top of the stack without removing it; raise PickleError for another type."""
        found = self.stack[-1] if self.stack else None
        if type(found) is not kind:
            self.refuse(f"a {kind.__name__} on the stack", kind_of(found))
        return found

    def mark(self) -> None:
        """Start a new stack above the current one, as MARK does."""
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """Remove and return all objects above the last mark, and the mark."""
        if not self.below:
            self.refuse("a mark on the stack", "none")
        found, self.stack = self.stack, self.below.pop()
        return found

    def refuse(self, expected: str, found: str) -> NoReturn:
        """Raise PickleError about the current opcode, with ``expected`` and ``found``."""
        raise PickleError(f"{self.name} at byte {self.at} is not valid", expected, found) from None


# --- opcodes --------------------------------------------------------------------------------------


def _stop(machine: _Machine, raw: _Raw) -> None:
    if len(machine.stack) != 1 or machine.below:
        raise PickleError("does not end with one object", "one", str(len(machine.stack)))


def _unknown(machine: _Machine, raw: _Raw) -> None:
    raise PickleError("is not a pickle", "an opcode", f"{machine.name} at {machine.at - 1}")


def _proto(machine: _Machine, raw: _Raw) -> None:
    if raw[0] > 5:
        machine.refuse("a protocol up to 5", str(raw[0]))


def _pushes(make: Callable[[_Raw], Any]) -> _Action:
    """Return an opcode's action: push ``make`` called with the opcode's argument."""

    def action(machine: _Machine, raw: _Raw) -> None:
        try:
            machine.stack.append(make(raw))
        except (ValueError, OverflowError) as error:
            machine.refuse("a value", str(error)[:80])

    return action


def _integer(raw: _Raw) -> Any:
    """Return a signed little-endian integer; an `Opaque` beyond 64 bits."""
    return int.from_bytes(raw, "little", signed=True) if len(raw) <= 8 else Opaque()


def _digits(raw: _Raw) -> Any:
    """Return an integer written as text; ``00`` and ``01`` are False and True."""
    text = bytes(raw[: _MOST_DIGITS + 2]).strip().removesuffix(b"L")
    if text in (b"00", b"01"):
        return text == b"01"
    found = int(text) if len(raw) <= _MOST_DIGITS + 2 else _MAX_INT
    return found if -_MAX_INT <= found < _MAX_INT else Opaque()


def _text(raw: _Raw) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _quoted(raw: _Raw) -> str:
    """Return a quoted string with Python's escapes, up to a newline."""
    text = bytes(raw[:-1]).strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    return codecs.escape_decode(text[1:-1])[0].decode()


def _tuple_of(count: int) -> _Action:
    """Return an opcode's action: replace the top ``count`` objects by a tuple of them."""

    def action(machine: _Machine, raw: _Raw) -> None:
        stack = machine.stack
        if len(stack) < count:
            machine.refuse("an object on the stack", "none")
        stack[-count:] = [tuple(stack[-count:])]

    return action


def _collected(make: Callable[[list[Any]], Any]) -> _Action:
    """Return an opcode's action: push ``make`` called with the objects above the last mark."""

    def action(machine: _Machine, raw: _Raw) -> None:
        found = machine.since_mark()
        machine.stack.append(make(found))

    return action


def _pop(machine: _Machine, raw: _Raw) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def _dup(machine: _Machine, raw: _Raw) -> None:
    machine.stack.append(machine.pop())
    machine.stack.append(machine.stack[-1])


def _is_foreign(machine: _Machine) -> bool:
    """Whether the top of the stack is an object of another library, which keeps nothing."""
    return bool(machine.stack) and type(machine.stack[-1]) is Foreign


def _append(machine: _Machine, raw: _Raw) -> None:
    value = machine.pop()
    if not _is_foreign(machine):
        machine.top(list).append(value)


def _appends(machine: _Machine, raw: _Raw) -> None:
    values = machine.since_mark()
    if not _is_foreign(machine):
        machine.top(list).extend(values)


def _add_items(machine: _Machine, raw: _Raw) -> None:
    machine.since_mark()
    if not _is_foreign(machine):
        machine.top(Opaque)


def _set_item(machine: _Machine, raw: _Raw) -> None:
    value, key = machine.pop(), machine.pop()
    if not _is_foreign(machine):
        machine.top(dict)[key_of(key)] = value


def _set_items(machine: _Machine, raw: _Raw) -> None:
    pairs = machine.since_mark()
    if not _is_foreign(machine):
        _fill(machine, machine.top(dict), pairs)


def _dict(machine: _Machine, raw: _Raw) -> None:
    pairs = machine.since_mark()
    machine.stack.append({})
    _fill(machine, machine.stack[-1], pairs)


def _fill(machine: _Machine, target: dict[Any, Any], pairs: list[Any]) -> None:
    """Add alternating keys and values to a dict."""
    if len(pairs) % 2:
        machine.refuse("pairs of keys and values", f"{len(pairs)} objects")
    target.update(zip(map(key_of, pairs[::2]), pairs[1::2], strict=True))


def _push_kept(machine: _Machine, index: int) -> None:
    """Push the object at ``index`` of the memo."""
    if index not in machine.memo:
        machine.refuse("an object that was kept", f"number {index}")
    machine.stack.append(machine.memo[index])


def _keep(machine: _Machine, index: int) -> None:
    """Store the top of the stack in the memo at ``index``."""
    if index > 2 * len(machine.memo) + _SPARE_INDEXES:  # hashes of such numbers can collide
        machine.refuse("an index that follows those before", f"number {index}")
    machine.stack.append(machine.pop())
    machine.memo[index] = machine.stack[-1]


def _index(machine: _Machine, raw: _Raw) -> int:
    """Return an index into the memo from its text, an opcode's argument."""
    digits = bytes(raw[: _MOST_DIGITS + 1]).strip()
    if not digits.isdigit():
        machine.refuse("a number", repr(digits)[1:])
    return int(digits)


def _refused(machine: _Machine, raw: _Raw) -> None:
    """Raise PickleError for opcodes that build instances or take objects from elsewhere."""
    said = f" of {kind_of(machine.stack[-1])}" if machine.stack else ""
    if machine.name == "INST":
        said = f" of {'.'.join(str(raw[:-1], 'utf-8', 'replace').split(chr(10)))}"
    elif machine.name in ("NEWOBJ", "NEWOBJ_EX", "OBJ"):
        classes = [each for each in machine.stack if isinstance(each, Global)]
        said = f" of {classes[-1].name}" if classes else ""
    machine.refuse("tensors, dicts and plain values", f"{machine.name}{said[:200]}")


def _global(machine: _Machine, raw: _Raw) -> None:
    module, _, name = str(raw[:-1], "utf-8", "replace").partition("\n")
    machine.stack.append(machine.lookup(module, name))


def _stack_global(machine: _Machine, raw: _Raw) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        machine.refuse(
            "the names of a module and a class", f"{kind_of(module)} and {kind_of(name)}"
        )
    machine.stack.append(machine.lookup(module, name))


def _new(machine: _Machine, raw: _Raw) -> None:
    """Push the `Instance` of a class without arguments, or a `Foreign`; refuse other objects."""
    match machine.stack[-2:]:
        case [Global(role="instance", name=name), ()]:
            machine.stack[-2:] = [Instance(name)]
        case [Global(role="foreign", name=name), tuple()]:
            machine.stack[-2:] = [Foreign(name)]
        case _:
            _refused(machine, raw)


def _new_of_names(machine: _Machine, raw: _Raw) -> None:
    """Push the `Foreign` of a class and its arguments by name; refuse other objects."""
    match machine.stack[-3:]:
        case [Global(role="foreign", name=name), tuple(), dict()]:
            machine.stack[-3:] = [Foreign(name)]
        case _:
            _refused(machine, raw)


def _build(machine: _Machine, raw: _Raw) -> None:
    """Run BUILD: keep an `Instance`'s state, and of a dict's the versions; refuse other objects."""
    state = machine.pop()
    if machine.stack and type(machine.stack[-1]) is Instance:
        machine.stack[-1].state = state
    elif not _is_foreign(machine):
        found = machine.top(dict)
        if type(state) is dict and type(versions := state.get("_metadata")) is dict:
            found[VERSIONS] = versions


def _persistent(machine: _Machine, raw: _Raw) -> None:
    machine.stack.append(machine.storage(storage_of(machine.pop(), machine.refuse)))


def _reduce(machine: _Machine, raw: _Raw) -> None:
    arguments, function = machine.pop(), machine.pop()
    if type(arguments) is tuple and len(arguments) == 1 and type(arguments[0]) in (dict, list):
        machine.count_copied(len(arguments[0]))
    machine.stack.append(called(function, arguments, machine.refuse))


#: By names of opcodes, separated by spaces, their action.
_ALIKE: Mapping[str, _Action] = {
    "PROTO": _proto,
    "FRAME": lambda machine, raw: None,
    "STOP": _stop,
    "NONE": _pushes(lambda raw: None),
    "NEWTRUE": _pushes(lambda raw: True),
    "NEWFALSE": _pushes(lambda raw: False),
    "INT LONG": _pushes(_digits),
    "BININT LONG1 LONG4": _pushes(_integer),
    "BININT1 BININT2": _pushes(lambda raw: int.from_bytes(raw, "little")),
    "BINFLOAT": _pushes(lambda raw: struct.unpack(">d", raw)[0]),
    "STRING": _pushes(_quoted),
    "UNICODE": _pushes(lambda raw: str(raw[:-1], "raw-unicode-escape")),
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINSTRING SHORT_BINSTRING": _pushes(_text),
    "FLOAT BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_SET": _pushes(lambda raw: Opaque()),
    "EMPTY_LIST": _pushes(lambda raw: []),
    "EMPTY_TUPLE": _pushes(lambda raw: ()),
    "EMPTY_DICT": _pushes(lambda raw: {}),
    "APPEND": _append,
    "APPENDS": _appends,
    "LIST": _collected(list),
    "TUPLE": _collected(tuple),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "DICT": _dict,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "ADDITEMS": _add_items,
    "FROZENSET": _collected(lambda found: Opaque()),
    "MARK": lambda machine, raw: machine.mark(),
    "POP": _pop,
    "POP_MARK": lambda machine, raw: machine.since_mark().clear(),
    "DUP": _dup,
    "GET": lambda machine, raw: _push_kept(machine, _index(machine, raw)),
    "BINGET LONG_BINGET": lambda machine, raw: _push_kept(machine, int.from_bytes(raw, "little")),
    "PUT": lambda machine, raw: _keep(machine, _index(machine, raw)),
    "BINPUT LONG_BINPUT": lambda machine, raw: _keep(machine, int.from_bytes(raw, "little")),
    "MEMOIZE": lambda machine, raw: _keep(machine, len(machine.memo)),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "NEWOBJ": _new,
    "NEWOBJ_EX": _new_of_names,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _persistent,
}
_ACTIONS = {name: action for names, action in _ALIKE.items() for name in names.split()}

_NAMES = [f"byte 0x{byte:02x}" for byte in range(256)]
#: By byte: the kind of the opcode's argument (None without one), and its action.
_OPCODES: list[tuple[int | None, _Action]] = [(None, _unknown)] * 256
for _op in pickletools.opcodes:
    _NAMES[ord(_op.code)] = _op.name
    _kind = None if _op.arg is None else _op.arg.n
    _OPCODES[ord(_op.code)] = (_kind, _ACTIONS.get(_op.name, _refused))
