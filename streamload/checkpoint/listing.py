"""Lists the files of folders: on this machine, of repositories of the hub, in buckets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamload.checkpoint import hub
from streamload.core.bounded_json import parse_json
from streamload.core.location import Location, Url
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files import remote
from streamload.files.header import unreadable
from streamload.files.limits import most_nbytes


def list_folder(folder: Url) -> dict[str, int] | None:
    """Return bytes of a folder's files by path, but hidden ones; None if it is not listed."""
    listed = _of_bucket(folder) if folder.is_store else hub.listing(folder)
    if listed is None:
        return None
    return {path: n for path, n in listed.items() if _is_shown(path)}


def _is_shown(path: str) -> bool:
    return "\0" not in path and all(p and not p.startswith(".") for p in path.split("/"))


def _of_bucket(folder: Url) -> Mapping[str, int] | None:
    """Return lengths by path of a bucket's folder, which the reader of buckets lists as JSON."""
    try:
        document = parse_json(remote.read_file(folder, most_nbytes(folder)))
        return {entry["rfilename"]: entry["size"] for entry in document["siblings"]}
    except ShardNotFoundError:
        return None
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, RecursionError, TypeError, KeyError):
        return None


def names_in(folder: Location) -> list[str] | None:
    """Return names in a folder, in order, of folders on servers with a slash; None if unlisted."""
    if isinstance(folder, Url):
        paths = list_folder(folder)
        return None if paths is None else sorted({"".join(p.partition("/")[:2]) for p in paths})
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error


def folders_in(folder: Location, names: Sequence[str]) -> list[str]:
    """Return how a user writes those of `names_in` that are folders."""
    if isinstance(folder, Url):
        where = f"{folder}" if folder.is_store else hub.written(folder)
        return [f"{where}{name.rstrip('/')}" for name in names if name.endswith("/")]
    return [str(folder / name) for name in names if Path(folder / name).is_dir()]
