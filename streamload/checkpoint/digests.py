"""Digests of a checkpoint's tensors, in a sidecar: `streamload.json`, in the same folder.

Each digest is of a tensor's bytes, whichever file has them: shards may be renamed, cut and joined,
and the digests stay valid.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import xxhash

from streamload.core.dtypes import BY_CODE, DType
from streamload.core.location import Location, Url, is_url, local
from streamload.errors import HeaderError
from streamload.files.folder import folder_at
from streamload.files.header import check_entry, check_object, describe, parse_json_object

#: The sidecar's name, in the folder of the checkpoint.
SIDECAR = "streamload.json"
#: The algorithm of the digests, as a sidecar names it.
ALGORITHM = "xxh3_128"

_FORMAT = 1
_INFINITY = "inf"  # JSON has no number for it
_MAX_U64 = 2**64 - 1


#: Quantization errors of a weight: the fields of `streamload.codecs.scheme.QuantCounts`.
Errors = tuple[float, ...]
#: Numbers of values that a cast made infinite, made zero, or changed in any other way.
Counts = tuple[int, int, int]


#: Starts a digest of bytes given piece by piece; releases the GIL for many bytes.
hasher = xxhash.xxh3_128
#: A digest in lower-case hexadecimal.
HEX = re.compile("[0-9a-f]{32}", re.ASCII)


def digest_of(
    pieces: Iterable[memoryview], tell: Callable[[int], None] = lambda done: None, done: int = 0
) -> str:
    """Return the XXH3-128 digest of the joined pieces; each is read before the next is requested.

    ``tell`` is called after each piece with the bytes so far, counted from ``done``.
    """
    found = hasher()
    for piece in pieces:
        found.update(piece)
        done += piece.nbytes
        tell(done)
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a tensor's bytes, with its name, dtype, shape and length."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    hex: str  # the digest, in lower-case hexadecimal

    @classmethod
    def from_json(cls, name: str, entry: object, path: Location) -> Self:
        """Return the digest in an entry of `Digests.lines`; unknown keys are ignored."""
        fail = partial(HeaderError, path, tensor=name)
        fields = check_entry(name, entry, path)
        code, shape, nbytes, digest = map(fields.get, ("dtype", "shape", "nbytes", "digest"))
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
    """The content of `streamload.json`: digests of all tensors, and how they were converted."""

    tensors: Mapping[str, Digest] = field(repr=False)  # by name
    # the converted files and their states, and the options: plain JSON values
    source: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    # all files written into the folder and below it (with "/"), the sidecar included
    files: tuple[str, ...] = ()
    # by name of each tensor that a cast changed
    counts: Mapping[str, Counts] = field(default_factory=dict, repr=False)
    # by name of the tensor that holds a quantized weight's values
    errors: Mapping[str, Errors] = field(default_factory=dict, repr=False)

    def to_json(self) -> str:
        """Return the sidecar's text."""
        return "".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the sidecar's text in pieces, one for each tensor: there may be very many."""
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
            listed = {
                n: [_INFINITY if x == math.inf else x for x in e] for n, e in self.errors.items()
            }
            yield from _object("errors", listed.items())
        entries = (
            (n, {"dtype": d.dtype.code, "shape": d.shape, "nbytes": d.nbytes, "digest": d.hex})
            for n, d in self.tensors.items()
        )
        yield from _object("tensors", entries)
        yield "\n}\n"

    @classmethod
    def read(cls, path: str | os.PathLike[str] | Url) -> Self:
        """Read a sidecar file; ``path`` may be its folder, whose URL ends with ``/``."""
        text = os.fsdecode(path)
        found = path if isinstance(path, Url) else Url.parse(text) if is_url(text) else local(path)
        folder = folder_at(found)
        name = folder.name or SIDECAR
        return cls.from_json(folder.read(name), folder.file(name))

    @classmethod
    def from_json(cls, raw: bytes, path: Location) -> Self:
        """Parse a sidecar's text, in UTF-8; raise HeaderError, which names ``path``; see `read`."""
        fail = partial(HeaderError, path)
        document = check_object(parse_json_object(raw, path), path, "the sidecar")
        version = document.get("format")
        if type(version) is not int or version < 1:
            raise fail("is no sidecar of streamload", '"format": 1', describe(version))
        if version > _FORMAT:
            raise fail("was written by a newer streamload", f"format {_FORMAT}", version)
        if (algorithm := document.get("algorithm")) != ALGORITHM:
            raise fail("unknown algorithm", ALGORITHM, describe(algorithm))
        source, options, tensors = (
            check_object(document.get(key), path, key) for key in ("source", "options", "tensors")
        )
        digests = {name: Digest.from_json(name, entry, path) for name, entry in tensors.items()}
        files = document.get("files", [])
        if type(files) is not list or not all(type(name) is str for name in files):
            raise fail("files is not valid", "a list of names", describe(files))
        counts = check_object(document.get("counts", {}), path, "counts")
        for name, found in counts.items():
            if type(found) is not list or [type(n) is int and n >= 0 for n in found] != 3 * [True]:
                raise fail("counts are not valid", "three of 0 or more", describe(name))
        counts = {name: tuple(found) for name, found in counts.items()}
        errors = check_object(document.get("errors", {}), path, "errors")
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


def _object(name: str, items: Iterable[tuple[str, object]]) -> Iterator[str]:
    yield f',\n "{name}": {{'
    before = "\n  "
    for key, value in items:
        yield f"{before}{json.dumps(key)}: {json.dumps(value)}"
        before = ",\n  "
    yield "\n }"
