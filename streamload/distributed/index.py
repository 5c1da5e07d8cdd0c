"""The message (index) by which rank 0 sends a checkpoint's headers to all other ranks.

The tensors of a safetensors file have no gaps between them: order, dtypes and shapes determine
their offsets, and 60,000 tensors take 0.4 MB. Other formats add offsets.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streamload.checkpoint.digests import SIDECAR, Digests, hasher
from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import BY_CODE
from streamload.core.location import Location, Url
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files.folder import Folder, folder_at
from streamload.files.header import (
    SAFETENSORS,
    Chunk,
    FileState,
    Header,
    Part,
    Stored,
    Turn,
    View,
    open_regular,
    unreadable,
)

_SAMPLES = 16
_SAMPLE_NBYTES = 4096
_DIGITS = 16  # leading digits of each tensor's digest that are compared

#: A note of the report, on files that were compared in parts.
SAMPLED = (
    f"files were compared with rank 0's by their lengths and {_SAMPLES} blocks of 4 KiB of each: "
    f"where both have a {SIDECAR} (which `streamload convert` writes) the digests of all tensors "
    "are compared"
)


def write_index(checkpoint: Checkpoint, host: str = "") -> bytes:
    """Return the message: headers and config.json of a checkpoint, as compressed JSON.

    By ``host``, a unique id, others recognize that they see the same disk.
    """
    shards = []
    folder = folder_at(checkpoint.path).path
    for header in checkpoint.shards:
        codes: dict[str, int] = {}
        shards.append(
            {
                "name": _name(header, folder),
                "nbytes": header.file_nbytes,
                "data_start": header.data_start,
                "metadata": dict(header.metadata),
                "names": [info.name for info in header.tensors],
                "dtypes": [codes.setdefault(i.dtype.code, len(codes)) for i in header.tensors],
                "codes": list(codes),
                "shapes": [info.shape for info in header.tensors],
                "sample": sample(header),
                "place": _place(header, host),
                "version": header.path.version if isinstance(header.path, Url) else "",
                **_other_than_safetensors(header),
            }
        )
    config, digests = dict(checkpoint.config), _digests(checkpoint)
    document = {"shards": shards, "config": config, "digests": digests}
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)


def _name(header: Header, folder: Location) -> str:
    """Return the path of a file from the folder on: an index may name files of subfolders."""
    path = header.path
    if isinstance(path, Path) and isinstance(folder, Path) and path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return path.name


def _other_than_safetensors(header: Header) -> dict[str, Any]:
    """Return the fields of a header that only formats besides safetensors need, for the message."""
    if header.format == SAFETENSORS:
        return {}
    return {
        "format": header.format,
        "starts": [info.start for info in header.tensors],
        "stored": {name: astuple(one) for name, one in header.stored.items()},
        "turns": dict(header.turns),
        "versions": dict(header.versions),
        "views": [astuple(view) for view in header.views],
        "parts": [(part.path.name, part.nbytes) for part in header.parts],
    }


@dataclass(frozen=True, slots=True)
class Index:
    """The checkpoint that rank 0 described in its message, with this rank's paths."""

    checkpoint: Checkpoint  # the headers of rank 0, with paths of this rank
    shards: Mapping[str, Mapping[str, Any]]  # the facts of `write_index` on each file, by its name
    digests: str = ""  # rank 0's digests of all tensors; see `_digests`

    @classmethod
    def read(cls, data: bytes, folder: Folder) -> Index:
        """Return the index of a message of `write_index`, without opening files."""
        document = parse_json(zlib.decompress(data))
        shards = document["shards"]
        # its name may differ here
        is_alone = len(shards) == 1 and folder.name and not folder.name.endswith(".json")
        headers = [
            _header(shard, folder.found if is_alone else folder.place(shard["name"]))
            for shard in shards
        ]
        named = {h.path.name: shard for h, shard in zip(headers, shards, strict=True)}
        return cls(
            from_headers(folder.found, headers, document["config"]), named, document["digests"]
        )

    def check(self) -> list[str]:
        """Compare the files of this rank with those of rank 0; return the names of missing ones.

        Lengths are compared, and blocks of 4 KiB spread over each file, since training changes all
        values. If both have a sidecar, so are the digests of all tensors. URLs are not opened.
        Raises CheckpointError: a file differs.
        """
        missing = []
        problem = "is not the file that rank 0 has"
        for header in self.checkpoint.shards:
            path = header.path
            if isinstance(path, Url):
                continue
            try:
                nbytes = os.stat(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                missing.append(path.name)
                continue
            except OSError as error:
                raise unreadable(path, error) from error
            if nbytes != header.file_nbytes:
                raise CheckpointError(path, problem, f"{header.file_nbytes} bytes", nbytes)
            digest = self.shards[path.name]["sample"]
            if digest and (found := sample(header)) != digest:
                expected = f"blocks of 4 KiB with the digest {digest}"
                raise CheckpointError(path, f"{problem}, though it is as long", expected, found)
        self._check_digests()
        return missing

    def _check_digests(self) -> None:
        """Raise CheckpointError if rank 0 and this one have sidecars with different digests."""
        found = _digests(self.checkpoint) if self.digests else ""
        if not found or found == self.digests:
            return
        pairs = zip(range(0, len(found), _DIGITS), self.checkpoint.tensors, strict=True)
        name = next(n for at, n in pairs if not self.digests.startswith(found[at:][:_DIGITS], at))
        raise CheckpointError(
            _folder(self.checkpoint) / SIDECAR,
            "says other bytes than that of rank 0: the checkpoints differ",
            tensor=name,
        )

    def is_sampled(self, host: str) -> bool:
        """Return whether `check` compared only parts of files that are not on rank 0's disk."""
        local = [h for h in self.checkpoint.shards if not isinstance(h.path, Url) and h.state]
        alike = all(_place(h, host) == self.shards[h.path.name]["place"] for h in local)
        return not alike and not (self.digests and _digests(self.checkpoint))


def _header(shard: Mapping[str, Any], path: Location) -> Header:
    """Return the header of a file at ``path`` from rank 0's facts on it."""
    state = _state(path)
    if isinstance(path, Url):  # every answer must have this version
        path = path.of_version(shard["version"])
    dtypes = [BY_CODE[code] for code in shard["codes"]]
    at = shard["data_start"]
    columns = shard["names"], shard["dtypes"], shard["shapes"]
    starts = shard.get("starts", [None] * len(shard["names"]))
    tensors = []
    for name, which, shape, known in zip(*columns, starts, strict=True):
        start = at if known is None else known
        at = start + dtypes[which].nbytes(math.prod(shape))
        tensors.append(TensorInfo(name, dtypes[which], tuple(shape), path, start, at))
    return Header(
        path,
        shard["nbytes"],
        shard["data_start"],
        tuple(tensors),
        MappingProxyType(shard["metadata"]),
        state,
        shard.get("format", SAFETENSORS),
        stored={name: Stored(*_tuples(one)) for name, one in shard.get("stored", {}).items()},
        turns={
            name: Turn(order and RowTranspose(*order), None if shape is None else tuple(shape))
            for name, (order, shape) in shard.get("turns", {}).items()
        },
        versions=shard.get("versions", {}),
        views=tuple(
            View(start, itemsize, tuple(shape), tuple(Chunk(*_tuples(c)) for c in chunks), shift)
            for start, itemsize, shape, chunks, shift in shard.get("views", [])
        ),
        parts=tuple(
            Part(path.parent / name, nbytes, _state(path.parent / name))
            for name, nbytes in shard.get("parts", [])
        ),
    )


def _state(path: Location) -> FileState | None:
    """Return a local file's state; None if it is missing, as `Index.check` finds out."""
    with suppress(OSError):
        return FileState.of(path) if isinstance(path, Path) else None
    return None


def _place(header: Header, host: str) -> list[Any]:
    """Return host, filesystem and inode number, which identify a file; [] for a URL."""
    return [host, header.state.device, header.state.inode] if header.state is not None else []


def _folder(checkpoint: Checkpoint) -> Location:
    return checkpoint.shards[0].path.parent


def _digests(checkpoint: Checkpoint) -> str:
    """Return the digests of all tensors, joined, each cut to `_DIGITS`; "" if any is unknown.

    The sidecar, which `streamload convert` writes, has them for safetensors files.
    """
    folder = _folder(checkpoint) if checkpoint.shards else None
    if not isinstance(folder, Path) or not (folder / SIDECAR).is_file():
        return ""
    try:
        known = Digests.read(folder / SIDECAR).tensors
    except CheckpointError:  # of a newer version, or unreadable
        return ""
    infos = checkpoint.tensors.values()
    found = [known.get(info.name) for info in infos]
    alike = (
        d and (d.dtype, d.shape) == (i.dtype, i.shape) for d, i in zip(found, infos, strict=True)
    )
    return "".join(d.hex[:_DIGITS] for d in found if d) if all(alike) else ""


def _tuples(values: Sequence[Any]) -> Iterator[Any]:
    """Yield values from JSON, with lists as tuples, as fields of a record are."""
    return (tuple(value) if isinstance(value, list) else value for value in values)


def check_present(checkpoint: Checkpoint, missing: Sequence[str]) -> None:
    """Raise ShardNotFoundError if tensors are in files that `Index.check` found missing."""
    wanted = {info.shard.name for info in checkpoint.tensors.values()}
    gone = [name for name in missing if name in wanted]
    if gone:
        raise ShardNotFoundError(
            checkpoint.path, "shards that this node needs are missing", expected=", ".join(gone)
        )


def sample(header: Header) -> str:
    """Return a hexadecimal digest of blocks spread over a file, to compare copies; "" for a URL."""
    digest = hasher()
    for path, nbytes, _ in header.files:
        if not isinstance(path, Path):
            return ""
        last = max(nbytes - _SAMPLE_NBYTES, 0)
        with open_regular(path) as file:
            for at in dict.fromkeys(last * k // (_SAMPLES - 1) for k in range(_SAMPLES)):
                try:
                    digest.update(memoryview(os.pread(file.fileno(), _SAMPLE_NBYTES, at)))
                except OSError as error:
                    raise unreadable(path, error) from error
    return digest.hexdigest()
