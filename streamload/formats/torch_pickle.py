"""The pickle of a torch checkpoint, read without running any of it.

A pickle is a program: opcodes that push, build and call. Python's own unpickler calls what it is
told to call, and even with a closed `find_class` it hashes keys of any depth, allocates memo
slots and buffers by numbers in the file, and sets attributes. This one interprets the opcodes
itself, with the table of `pickletools` to cut them: each opcode makes at most one object of a few
words, in a time that its own bytes justify; nothing is looked up by a name of the file but in the
table of `streamload.formats.torch_objects`, and nothing is called.

Source: the documentation of Python's `pickletools`.
"""

from __future__ import annotations

import codecs
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from streamload.formats.torch_objects import (
    ArgumentsError,
    Global,
    Opaque,
    PickleError,
    called,
    key_of,
    kind_of,
    named,
    storage_of,
)
from streamload.planning.budget import first_that_fits


def load(data: bytes) -> Any:
    """What a pickle describes: tuples, lists, dicts, strings, numbers, `Tensor` and `Opaque`.

    Its objects may refer to themselves, and to the same object many times.

    Raises:
        PickleError: it says a name or an opcode that a torch checkpoint has no use for, or is not
            a pickle.
        PlanInfeasibleError: memory has no room for its objects.
    """
    return _Machine(data).run()


# --- the machine ----------------------------------------------------------------------------------

_Action = Callable[["_Machine", memoryview], None]
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_LINES = {"GLOBAL": 2, "INST": 2}  # arguments of so many lines, of opcodes that have lines
# An opcode makes one object, and one place for it, of at most so many bytes. After so many opcodes
# free memory is looked at.
_OPCODE_NBYTES = 128
_CHECKED_OPCODES = 2**18
_MAX_INT = 2**63
_MOST_DIGITS = 20


class _Machine:
    """A stack, a memo, and what each opcode does to them."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []  # one for each mark
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Do what the opcodes say, up to the one that ends them."""
        data = self._data
        left = _CHECKED_OPCODES
        while True:
            left -= 1
            if not left:
                left = _CHECKED_OPCODES
                needed_nbytes = left * _OPCODE_NBYTES
                first_that_fits([(None, needed_nbytes)], [("objects of a pickle", needed_nbytes)])
            if self._at >= len(data):
                raise PickleError("is cut off", "an opcode", f"the end at byte {self._at}")
            opcode = _OPCODES[data[self._at]]
            if opcode is None:
                found = f"byte 0x{data[self._at]:02x} at {self._at}"
                raise PickleError("is not a pickle", "an opcode", found)
            name, argument, action = opcode
            self._at += 1
            if name == "STOP":
                break
            self.name = name
            action(self, self._argument(*argument) if argument else data[:0])
        if len(self.stack) != 1 or self._below:
            raise PickleError("does not end with one object", "one", str(len(self.stack)))
        return self.stack[0]

    def _argument(self, kind: int, lines: int) -> memoryview:
        """The bytes of an opcode's argument, without its length."""
        data, at = self._data, self._at
        if kind >= 0:
            stop = at + kind
        elif kind == pickletools.UP_TO_NEWLINE:
            stop = at
            for _ in range(lines):
                stop = data.obj.find(b"\n", stop) + 1  # type: ignore[attr-defined]
                if not stop:
                    raise PickleError("is cut off", "the end of a line", f"{self.name} at {at - 1}")
        else:
            at += _LENGTHS[kind]
            stop = at + int.from_bytes(data[self._at : at], "little")
        if stop > len(data):
            raise PickleError(
                "is cut off", f"{stop} bytes for {self.name} at {self._at - 1}", str(len(data))
            )
        self._at = stop
        return data[at:stop]

    def pop(self) -> Any:
        """Take the object on top."""
        if not self.stack:
            self.refuse("an object on the stack", "none")
        return self.stack.pop()

    def top(self, kind: type[Any]) -> Any:
        """The object on top, which stays, and is of a kind."""
        found = self.stack[-1] if self.stack else None
        if type(found) is not kind:
            self.refuse(f"a {kind.__name__} on the stack", kind_of(found))
        return found

    def mark(self) -> None:
        """Begin to collect objects."""
        self._below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """Take all objects from the last mark on."""
        if not self._below:
            self.refuse("a mark on the stack", "none")
        found, self.stack = self.stack, self._below.pop()
        return found

    def refuse(self, expected: str, found: str) -> NoReturn:
        """Raise PickleError for the opcode that is done."""
        raise PickleError(f"{self.name} at byte {self._at} is not valid", expected, found)


# --- opcodes --------------------------------------------------------------------------------------


def _nothing(machine: _Machine, raw: memoryview) -> None:
    pass


def _proto(machine: _Machine, raw: memoryview) -> None:
    if raw[0] > 5:
        machine.refuse("a protocol up to 5", str(raw[0]))


def _pushes(make: Callable[[memoryview], Any]) -> _Action:
    def action(machine: _Machine, raw: memoryview) -> None:
        try:
            machine.stack.append(make(raw))
        except (ValueError, OverflowError) as error:
            machine.refuse("a value", str(error)[:80])

    return action


def _integer(raw: memoryview) -> Any:
    """Little-endian, with a sign; opaque beyond 64 bits."""
    return int.from_bytes(raw, "little", signed=True) if len(raw) <= 8 else Opaque()


def _digits(raw: memoryview) -> Any:
    """In text; ``00`` and ``01`` are False and True."""
    text = bytes(raw[: _MOST_DIGITS + 2]).strip().removesuffix(b"L")
    if text in (b"00", b"01"):
        return text == b"01"
    found = int(text) if len(raw) <= _MOST_DIGITS + 2 else _MAX_INT
    return found if -_MAX_INT <= found < _MAX_INT else Opaque()


def _text(raw: memoryview) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _line(raw: memoryview) -> str:
    return str(raw[:-1], "raw-unicode-escape")


def _quoted(raw: memoryview) -> str:
    text = bytes(raw[:-1]).strip()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    return codecs.escape_decode(text[1:-1])[0].decode()


def _tuple(count: int) -> _Action:
    def action(machine: _Machine, raw: memoryview) -> None:
        machine.stack.append(tuple([machine.pop() for _ in range(count)][::-1]))

    return action


def _collected(make: Callable[[list[Any]], Any]) -> _Action:
    def action(machine: _Machine, raw: memoryview) -> None:
        found = machine.since_mark()
        machine.stack.append(make(found))

    return action


def _frozenset(found: list[Any]) -> Opaque:
    return Opaque()


def _pop(machine: _Machine, raw: memoryview) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.since_mark()


def _dup(machine: _Machine, raw: memoryview) -> None:
    machine.stack.append(machine.pop())
    machine.stack.append(machine.stack[-1])


def _append(machine: _Machine, raw: memoryview) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _appends(machine: _Machine, raw: memoryview) -> None:
    values = machine.since_mark()
    machine.top(list).extend(values)


def _add_items(machine: _Machine, raw: memoryview) -> None:
    machine.since_mark()
    machine.top(Opaque)


def _set_item(machine: _Machine, raw: memoryview) -> None:
    value, key = machine.pop(), machine.pop()
    machine.top(dict)[key_of(key)] = value


def _set_items(machine: _Machine, raw: memoryview) -> None:
    pairs = machine.since_mark()
    _fill(machine, machine.top(dict), pairs)


def _dict(machine: _Machine, raw: memoryview) -> None:
    pairs = machine.since_mark()
    machine.stack.append({})
    _fill(machine, machine.stack[-1], pairs)


def _fill(machine: _Machine, target: dict[Any, Any], pairs: list[Any]) -> None:
    if len(pairs) % 2:
        machine.refuse("pairs of keys and values", f"{len(pairs)} objects")
    target.update(zip(map(key_of, pairs[::2]), pairs[1::2], strict=True))


def _get(machine: _Machine, raw: memoryview) -> None:
    index = _index(machine, raw)
    if index not in machine.memo:
        machine.refuse("an object that was kept", f"number {index}")
    machine.stack.append(machine.memo[index])


def _put(machine: _Machine, raw: memoryview) -> None:
    machine.stack.append(machine.pop())
    machine.memo[_index(machine, raw)] = machine.stack[-1]


def _memoize(machine: _Machine, raw: memoryview) -> None:
    machine.stack.append(machine.pop())
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _index(machine: _Machine, raw: memoryview) -> int:
    if machine.name in ("GET", "PUT"):
        digits = bytes(raw[: _MOST_DIGITS + 1]).strip()
        if not digits.isdigit():
            machine.refuse("a number", repr(digits)[1:])
        return int(digits)
    return int.from_bytes(raw, "little")


def _refused(machine: _Machine, raw: memoryview) -> None:
    """Opcodes that build instances, or take objects from elsewhere."""
    said = f" of {kind_of(machine.stack[-1])}" if machine.stack else ""
    if machine.name == "INST":
        said = f" of {'.'.join(str(raw[:-1], 'utf-8', 'replace').split(chr(10)))}"
    elif machine.name in ("NEWOBJ", "NEWOBJ_EX", "OBJ"):
        classes = [each for each in machine.stack if isinstance(each, Global)]
        said = f" of {classes[-1].name}" if classes else ""
    machine.refuse("tensors, dicts and plain values", f"{machine.name}{said[:200]}")


def _global(machine: _Machine, raw: memoryview) -> None:
    module, _, name = str(raw[:-1], "utf-8", "replace").partition("\n")
    machine.stack.append(named(module, name))


def _stack_global(machine: _Machine, raw: memoryview) -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        machine.refuse(
            "the names of a module and a class", f"{kind_of(module)} and {kind_of(name)}"
        )
    machine.stack.append(named(module, name))


def _build(machine: _Machine, raw: memoryview) -> None:
    """Attributes of a dict, which state_dict() has (``_metadata``), are left out."""
    machine.pop()
    machine.top(dict)


def _persistent(machine: _Machine, raw: memoryview) -> None:
    machine.stack.append(_made(machine, storage_of, machine.pop()))


def _reduce(machine: _Machine, raw: memoryview) -> None:
    arguments, function = machine.pop(), machine.pop()
    machine.stack.append(_made(machine, called, function, arguments))


def _made(machine: _Machine, make: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return make(*arguments)
    except ArgumentsError as error:
        return machine.refuse(error.expected, error.found)


_NUMBER = _pushes(_integer)
_UNSIGNED = _pushes(lambda raw: int.from_bytes(raw, "little"))
_STRING = _pushes(_text)
_OPAQUE = _pushes(lambda raw: Opaque())

_ACTIONS: Mapping[str, _Action] = {
    "PROTO": _proto,
    "FRAME": _nothing,
    "STOP": _nothing,
    "NONE": _pushes(lambda raw: None),
    "NEWTRUE": _pushes(lambda raw: True),
    "NEWFALSE": _pushes(lambda raw: False),
    "INT": _pushes(_digits),
    "LONG": _pushes(_digits),
    "BININT": _NUMBER,
    "BININT1": _UNSIGNED,
    "BININT2": _UNSIGNED,
    "LONG1": _NUMBER,
    "LONG4": _NUMBER,
    "FLOAT": _OPAQUE,
    "BINFLOAT": _pushes(lambda raw: struct.unpack(">d", raw)[0]),
    "STRING": _pushes(_quoted),
    "BINSTRING": _STRING,
    "SHORT_BINSTRING": _STRING,
    "UNICODE": _pushes(_line),
    "SHORT_BINUNICODE": _STRING,
    "BINUNICODE": _STRING,
    "BINUNICODE8": _STRING,
    "BINBYTES": _OPAQUE,
    "SHORT_BINBYTES": _OPAQUE,
    "BINBYTES8": _OPAQUE,
    "BYTEARRAY8": _OPAQUE,
    "EMPTY_LIST": _pushes(lambda raw: []),
    "EMPTY_TUPLE": _pushes(lambda raw: ()),
    "EMPTY_DICT": _pushes(lambda raw: {}),
    "EMPTY_SET": _OPAQUE,
    "APPEND": _append,
    "APPENDS": _appends,
    "LIST": _collected(list),
    "TUPLE": _collected(tuple),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "DICT": _dict,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "ADDITEMS": _add_items,
    "FROZENSET": _collected(_frozenset),
    "MARK": lambda machine, raw: machine.mark(),
    "POP": _pop,
    "POP_MARK": lambda machine, raw: machine.since_mark().clear(),
    "DUP": _dup,
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _persistent,
}

#: By byte, the name of an opcode, the kind of its argument and its lines, and what it does.
_OPCODES: list[tuple[str, tuple[int, int] | None, _Action] | None] = [None] * 256
for _op in pickletools.opcodes:
    _OPCODES[ord(_op.code)] = (
        _op.name,
        None if _op.arg is None else (_op.arg.n, _LINES.get(_op.name, 1)),
        _ACTIONS.get(_op.name, _refused),
    )
