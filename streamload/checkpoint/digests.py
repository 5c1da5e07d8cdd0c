"""Digests of a checkpoint's tensors, in a sidecar: `streamload.json`, in the same folder.

They are of the bytes that a tensor has in its file, whichever file that is: shards may be renamed,
cut and joined, and the digests stay right.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import xxhash

from streamload.checkpoint.open import read_json_file
from streamload.core.dtypes import BY_CODE, DType
from streamload.core.location import Location, Url, is_url, local
from streamload.errors import HeaderError
from streamload.files.header import RepeatedNames, describe, is_text, parse_json_object

#: The sidecar's name, in the folder of the checkpoint.
SIDECAR = "streamload.json"
#: The algorithm of the digests, as a sidecar names it.
ALGORITHM = "xxh3_128"

_FORMAT = 1
_INFINITY = "inf"  # JSON has no number for it
_MAX_U64 = 2**64 - 1


#: Errors of quantization: the fields of `streamload.codecs.scheme.QuantCounts`.
Errors = tuple[float, ...]
#: Values that overflowed, that became zero, and that changed in any other way.
Counts = tuple[int, int, int]


#: Begins a digest of bytes that come piece by piece; drops the GIL for many bytes.
hasher = xxhash.xxh3_128
#: A digest in lower-case hexadecimal.
HEX = re.compile("[0-9a-f]{32}", re.ASCII)


def digest_of(
    pieces: Iterable[memoryview], tell: Callable[[int], None] = lambda done: None, done: int = 0
) -> str:
    """The digest of pieces, each of which may be gone when the next one comes.

    ``tell`` is called with the bytes so far, ``done`` before included.
    """
    found = hasher()
    for piece in pieces:
        found.update(piece)
        done += piece.nbytes
        tell(done)
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a tensor's bytes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    hex: str  # the digest, in lower-case hexadecimal

    def to_json(self) -> dict[str, Any]:
        """Everything but the name, as JSON has it."""
        return {
            "dtype": self.dtype.code,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "digest": self.hex,
        }

    @classmethod
    def from_json(cls, name: str, entry: object, path: Location) -> Self:
        """Read the result of `to_json`; unknown keys are ignored."""
        fail = partial(HeaderError, path, tensor=name)
        if type(entry) is not dict:
            if isinstance(entry, RepeatedNames):
                raise fail("a key is not unique", "each key once", f"{describe(entry.name)} twice")
            raise fail("the entry is not an object", "an object", describe(entry))
        if not is_text(name):
            raise fail("the name is not valid", "Unicode text", "half a surrogate pair")
        code, shape, nbytes, digest = (entry.get(k) for k in ("dtype", "shape", "nbytes", "digest"))
        dtype = BY_CODE.get(code) if type(code) is str else None
        if dtype is None:
            raise fail("unknown dtype", f"one of {', '.join(BY_CODE)}", describe(code))
        if type(shape) is not list:
            raise fail("the shape is not a list", "a list", describe(shape))
        numel = 1
        for dim in shape:
            if type(dim) is not int or dim < 0 or (numel := numel * dim) > _MAX_U64:
                raise fail("the shape is not valid", "at most 2**64 - 1 elements", describe(dim))
        if type(nbytes) is not int or nbytes != dtype.nbytes(numel):
            raise fail("nbytes and the shape do not agree", dtype.nbytes(numel), describe(nbytes))
        if type(digest) is not str or not HEX.fullmatch(digest):
            raise fail("the digest is not valid", f"one of {ALGORITHM}", describe(digest))
        return cls(name, dtype, tuple(shape), nbytes, digest)


@dataclass(frozen=True, slots=True)
class Digests:
    """The content of `streamload.json`."""

    tensors: Mapping[str, Digest] = field(repr=False)  # by name
    # the converted files and their states, and the options: plain JSON values
    source: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    # all that was written into the folder and below it (with "/"), the sidecar included
    files: tuple[str, ...] = ()
    # of each tensor that a cast changed
    counts: Mapping[str, Counts] = field(default_factory=dict, repr=False)
    # of each weight that was quantised, by the name of its codes
    errors: Mapping[str, Errors] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """The sidecar's text."""
        return "".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The text, a line for each tensor: there may be very many."""
        document = {
            "format": _FORMAT,
            "algorithm": ALGORITHM,
            "source": dict(self.source),
            "options": dict(self.options),
            "files": list(self.files),
        }
        yield json.dumps(document, indent=1, allow_nan=False).removesuffix("\n}")
        yield from _object("counts", self.counts.items())
        if self.errors:
            yield from _object("errors", ((n, [*map(_number, e)]) for n, e in self.errors.items()))
        yield from _object("tensors", ((n, digest.to_json()) for n, digest in self.tensors.items()))
        yield "\n}\n"

    @classmethod
    def read(cls, path: str | os.PathLike[str] | Url) -> Self:
        """Read a sidecar.

        Args:
            path: the file, or the folder that it is in; a folder's URL ends with ``/``.

        Raises:
            ShardNotFoundError: there is none.
            HeaderError: it is not what `to_json` writes, or is of a format or an algorithm that
                this version does not know.
            CheckpointError: it cannot be read.
        """
        found: Location
        if isinstance(path, Url) or is_url(os.fsdecode(path)):
            found = path if isinstance(path, Url) else Url.parse(os.fsdecode(path))
            inside = not found.name
        else:
            found, inside = local(path), False
            with suppress(OSError):  # reading it will raise
                inside = found.is_dir()
        found = found / SIDECAR if inside else found
        return cls.from_json(read_json_file(found), found)

    @classmethod
    def from_json(cls, raw: bytes, path: Location) -> Self:
        """Read a sidecar's text, in UTF-8; raises HeaderError, which names ``path``; see `read`."""
        fail = partial(HeaderError, path)
        document = _unique(parse_json_object(raw, path), path, "the sidecar")
        version = document.get("format")
        if type(version) is not int or version < 1:
            raise fail("is no sidecar of streamload", '"format": 1', describe(version))
        if version > _FORMAT:
            raise fail("was written by a newer streamload", f"format {_FORMAT}", version)
        if (algorithm := document.get("algorithm")) != ALGORITHM:
            raise fail("unknown algorithm", ALGORITHM, describe(algorithm))
        source, options, tensors = (
            _unique(document.get(key), path, key) for key in ("source", "options", "tensors")
        )
        digests = {name: Digest.from_json(name, entry, path) for name, entry in tensors.items()}
        files = document.get("files", [])
        if type(files) is not list or not all(type(name) is str for name in files):
            raise fail("files is not valid", "a list of names", describe(files))
        counts = _unique(document.get("counts", {}), path, "counts")
        for name, found in counts.items():
            if type(found) is not list or [type(n) is int and n >= 0 for n in found] != 3 * [True]:
                raise fail("counts are not valid", "three of 0 or more", describe(name))
        counts = {name: tuple(found) for name, found in counts.items()}
        errors = _unique(document.get("errors", {}), path, "errors")
        for name, found in errors.items():
            if (
                type(found) is not list
                or len(found) != 8
                or not all(x == _INFINITY or (type(x) in (int, float) and x >= 0) for x in found)
                or not all(type(x) is int for x in found[4:])
            ):
                raise fail("errors are not valid", "four numbers and four counts", describe(name))
        errors = {
            name: tuple(float(x) if x == _INFINITY else x for x in found)
            for name, found in errors.items()
        }
        return cls(digests, source, options, tuple(files), counts, errors)


def _number(value: float) -> float | str:
    """A number as JSON has it."""
    return _INFINITY if value == math.inf else value


def _object(name: str, items: Iterable[tuple[str, object]]) -> Iterator[str]:
    """A member of the sidecar that is an object, a line for each of its own."""
    yield f',\n "{name}": {{'
    before = "\n  "
    for key, value in items:
        yield f"{before}{json.dumps(key)}: {json.dumps(value)}"
        before = ",\n  "
    yield "\n }"


def _unique(value: object, path: Location, what: str) -> dict[str, Any]:
    """A JSON object in which no name occurs twice."""
    if type(value) is dict:
        return value
    found = describe(value)
    if isinstance(value, RepeatedNames):
        found = f"{describe(value.name)} more than once"
    raise HeaderError(path, f"{what} is not valid", "an object, each name once", found)
