"""Lists the files of a server's folder, where the server does so."""

from __future__ import annotations

from streamload.core.bounded_json import parse_json
from streamload.core.location import Url
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files import remote
from streamload.files.limits import most_nbytes


def list_folder(folder: Url) -> dict[str, int] | None:
    """Return lengths in bytes of files in a server's folder, by path; None without a listing."""
    if (where := folder.listing) is None:
        return None
    listing, inside = where
    try:
        document = parse_json(remote.read_file(listing, most_nbytes(listing)))
        entries = [(entry["rfilename"], entry["size"]) for entry in document["siblings"]]
    except ShardNotFoundError:
        return None
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    found = {}
    for path, nbytes in entries:
        if type(path) is not str or type(nbytes) is not int or not path.startswith(inside):
            continue
        path = path.removeprefix(inside)
        if "\0" not in path and all(p and not p.startswith(".") for p in path.split("/")):
            found[path] = nbytes
    return found
