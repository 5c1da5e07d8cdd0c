"""The globals that a torch checkpoint's pickle may name, and the records that replace their calls.

Strings, numbers, tuples, lists and dicts are read as such; `Tensor` describes a tensor, and
`Opaque` replaces plain values that are not read (bytes, sets, floats in text), `Foreign` objects of
other libraries. Any other name of Python or torch outside of the table is an error.

Sources, of torch 2.13: ``torch/_utils.py`` (the ``_rebuild_`` functions and their arguments),
``torch/serialization.py`` (persistent ids) and ``torch/_weights_only_unpickler.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from streamload.core.dtypes import BY_NAME

_MOST_AXES = 64  # as torch has
_LONGEST_KEY = 64  # of a storage: torch uses small numbers


class PickleError(ValueError):
    """Raised for a pickle that is no torch checkpoint; if ``named``, ``found`` names a global."""

    def __init__(self, problem: str, expected: str, found: str, *, named: bool = False) -> None:
        super().__init__(problem)
        self.expected = expected
        self.found = found
        self.named = named


class CutOffError(PickleError):
    """Raised for a pickle that ends before its last opcode."""


#: Raises PickleError for invalid arguments of a function: called with expected, found.
Refuse = Callable[[str, str], NoReturn]


class Opaque:
    """Replaces a plain value that is not read; equal only to itself."""

    __slots__ = ()


class Foreign(Opaque):
    """Replaces an object of a class that is never imported or called, such as settings.

    ``name`` is that of the class or function.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


#: Key, in a dict of tensors, of its attribute ``_metadata``: facts by name of a module.
VERSIONS = Opaque()


@dataclass(frozen=True, slots=True)
class Global:
    """A global that a pickle may name, as a record: the Python object is never imported."""

    name: str
    role: str  # decides in `called` how its call is read
    value: str = ""  # the dtype of a storage, or why a tensor cannot be read


#: Returns the record of a global by module and name; raises PickleError if it must not be named.
Lookup = Callable[[str, str], Global]


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a class with this name, and its state; no attribute is set."""

    name: str
    state: Any = None


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory of tensors: ``numel`` elements of a torch dtype, in the archive's ``data/key``.

    ``offset``: the elements before a view of it, which torch before 0.4 has.
    """

    key: str
    dtype: str
    numel: int
    offset: int = 0


_SIMPLE = frozenset((str, type(None), Instance))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the pickle describes it; only the types of the fields are checked."""

    storage: Storage | None
    dtype: str
    offset: int = 0  # in elements, as strides
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    problem: str = ""  # why it cannot be read


#: By the prefix of a storage class's name, torch's name of its dtype.
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
}
#: Names of torch's dtypes.
DTYPES = (
    *BY_NAME,
    *("complex32", "complex128", "quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8"),
    *("float4_e2m1fn_x2", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)
_UNREADABLE = {
    "_rebuild_sparse_tensor": "it is sparse",
    "_rebuild_nested_tensor": "it is nested: a list of tensors",
    "_rebuild_qtensor": "torch quantised it",
    "_rebuild_meta_tensor_no_storage": "it is on the meta device, and has no values",
    "_rebuild_wrapper_subclass": "it is a subclass of Tensor without memory of its own",
    "_rebuild_device_tensor_from_numpy": "it is stored as an array of numpy",
    "_rebuild_device_tensor_from_cpu_tensor": "it is of a device that wraps other tensors",
}
_TENSOR_ROLES = ("tensor", "parameter", "unreadable")
_QSCHEMES = ("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric")

#: By module and name, the role and the value of each global that a pickle may name.
_GLOBALS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("collections", "OrderedDict"): ("dict", ""),
    ("collections", "Counter"): ("dict", ""),
    ("torch", "Size"): ("size", ""),
    ("torch", "device"): ("plain", ""),
    ("torch", "Tensor"): ("class", ""),
    ("torch.nn.parameter", "Parameter"): ("class", ""),
    ("torch.nn.parameter", "Buffer"): ("class", ""),
    ("torch.serialization", "_get_layout"): ("plain", ""),
    ("_codecs", "encode"): ("plain", ""),
    ("torch._utils", "_rebuild_tensor"): ("tensor", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"): ("tensor", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"): ("tensor", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"): ("parameter", ""),
    ("torch._utils", "_rebuild_parameter_with_state"): ("parameter", ""),
    ("torch._tensor", "_rebuild_from_type_v2"): ("from_type", ""),
    ("torch.storage", "UntypedStorage"): ("storage", "uint8"),  # torch has bytes there
    **{("torch", f"{kind}Storage"): ("storage", dtype) for kind, dtype in _STORAGES.items()},
    **{("torch", name): ("dtype", name) for name in DTYPES},
    **{("torch._utils", name): ("unreadable", why) for name, why in _UNREADABLE.items()},
    **{("torch", name): ("plain", "") for name in _QSCHEMES},
    **{
        (module, name): (role, "")
        for module in ("builtins", "__builtin__")
        for role, names in (
            ("plain", ("set", "frozenset", "bytearray", "complex", "bytes")),
            ("foreign", ("bool", "dict", "float", "int", "list", "object", "str", "tuple")),
        )
        for name in names
    },
}

#: Modules of Python and torch whose classes may be named: they hold plain values or settings.
_PLAIN_MODULES = (
    *("argparse", "collections", "copyreg", "copy_reg", "dataclasses", "datetime", "decimal"),
    *("enum", "fractions", "functools", "pathlib", "types", "typing", "uuid"),
    *("torch.nn.", "torch.optim."),
)


def named(
    module: str, name: str, table: Mapping[tuple[str, str], tuple[str, str]] = _GLOBALS
) -> Global:
    """Return the record of a global; raise PickleError if it is not in the table."""
    found = table.get((module, name))
    if found is None:
        said = f"{module[:100]}.{name[:100]}"
        raise PickleError(
            f"names {said}, which is never called",
            "tensors, dicts and plain values",
            said,
            named=True,
        )
    return Global(f"{module}.{name}", *found)


def named_or_foreign(module: str, name: str) -> Global:
    """Return the record of a global, of the role "foreign" for a class of some other library.

    Raise PickleError for names of Python and torch that are not in the table, but for plain data.
    """
    root = module.partition(".")[0]
    is_own = root in sys.stdlib_module_names or root in ("__builtin__", "torch")
    if (module, name) in _GLOBALS or (is_own and not module.startswith(_PLAIN_MODULES)):
        return named(module, name)
    return Global(f"{module[:100]}.{name[:100]}", "foreign")


def kind_of(value: object) -> str:
    """Return the name of an object's type for an error, since its content may be endless."""
    return value.name if isinstance(value, (Global, Foreign)) else type(value).__name__


class Number(str):
    """A number as a dict's key: a file can choose numbers, but not texts, whose hashes collide."""

    __slots__ = ()


def key_of(key: Any) -> Any:
    """Return a dict's key if its hash is simple, a `Number`, or else an `Opaque`.

    Hashing tuples may recurse.
    """
    if type(key) in (bool, int, float):
        return Number(hex(int(key)) if key == key // 1 else float(key).hex())
    return key if type(key) in _SIMPLE else Opaque()


def storage_of(found: Any, refuse: Refuse) -> Storage:
    """Return the storage of a persistent id; call ``refuse`` for anything else."""
    # before version 1.6, a sixth item is None, or the key, offset and length of a view
    match found:
        case ("storage", Global(role="storage", value=dtype), str(key), str(), int(numel), *rest):
            match rest:
                case [] | [None]:
                    offset = 0
                case [(str(), int(offset), int(length))] if 0 <= offset <= numel - length <= numel:
                    pass
                case _:
                    refuse("a view inside its storage", "another")
            if numel < 0 or len(key) > _LONGEST_KEY:
                refuse(
                    f"a length of 0 or more, of a key of {_LONGEST_KEY} letters or fewer",
                    f"{numel} of {key[:_LONGEST_KEY]!r}",
                )
            return Storage(key, dtype, numel, offset)
    refuse("a storage: its class, key, device and length", kind_of(found))


def called(function: Any, arguments: Any, refuse: Refuse) -> Any:
    """Return the result of a call in a pickle as a `Tensor`, `Opaque`, dict or tuple; call nothing.

    ``refuse`` raises PickleError for an unknown function or invalid arguments.
    """
    if type(arguments) is not tuple or not isinstance(function, Global):
        found = f"{kind_of(function)} and {kind_of(arguments)}"
        refuse("one of torch's functions, and a tuple", found)
    match function.role, arguments:
        case "dict", () | (dict(),):
            return dict(*arguments)  # a copy, as torch makes it: either may change afterwards
        case "dict", (list(pairs),) if all(type(p) in (list, tuple) and len(p) == 2 for p in pairs):
            return {key_of(key): value for key, value in pairs}  # as Python 2 wrote it
        case "size", () | (tuple(),):
            return tuple(*arguments)
        case "plain", _:
            return Opaque()
        case "foreign", _:
            return Foreign(function.name)
        case "unreadable", _:
            return Tensor(None, "", problem=function.value)
        case "tensor", (Storage(), *_):
            return _tensor(function, arguments, refuse)
        case "parameter", (Tensor() as data, *_):
            return data
        case "from_type", (Global() as inner, Global(role="class"), tuple(given), *_):
            if inner.role in _TENSOR_ROLES:  # not "from_type" again: unbounded recursion
                return called(inner, given, refuse)
    refuse(f"arguments of {function.name}", f"{len(arguments)} others")


def _tensor(function: Global, arguments: tuple[Any, ...], refuse: Refuse) -> Tensor:
    """Return the tensor that ``_rebuild_tensor*`` would make of these arguments."""
    storage, offset, shape, strides = (*arguments, None, None, None)[:4]
    rest = arguments[4:]
    dtype = storage.dtype
    if function.value == "_rebuild_tensor_v3":
        given = rest[2] if len(rest) > 2 else None
        dtype = given.value if isinstance(given, Global) and given.role == "dtype" else ""
    metadata = rest[-1] if len(rest) > 2 and type(rest[-1]) is dict else {}
    if type(offset) is not int or not all(
        type(each) is tuple
        and len(each) <= _MOST_AXES  # first: many tensors may share one long tuple
        and all(type(number) is int for number in each)
        for each in (shape, strides)
    ):
        expected = f"an offset, a shape and strides of integers, for {_MOST_AXES} axes or fewer"
        refuse(expected, "others")
    if not dtype:
        refuse("the dtype of a tensor", "none")
    made = Tensor(storage, dtype, offset, shape, strides)
    if metadata.get("conj") or metadata.get("neg"):
        return replace(made, problem="it is a view that is conjugated or negated")
    return made
