"""Repositories of the Hugging Face Hub: their names, commits and files. Nothing is downloaded.

A name becomes the `Url` of a folder or file at a commit, or a path in the local cache if the hub
cannot be asked. Source: the documentation of huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote
from uuid import uuid4

from streamload.core.location import Location, Url, is_url
from streamload.core.units import format_bytes
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files import hub
from streamload.files.header import describe, some
from streamload.files.hub import HubFile

#: Begins the name of a repository, or of one of its files, where a path could be meant as well.
SCHEME = "hf://"

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+(/[\w.-]+)*)?", re.ASCII)
_CONFIG = "config.json"
_A_FILE = re.compile(r".*\.(safetensors|gguf|bin|pth?|irpa|npz|json)", re.IGNORECASE)
_RESOLVED = re.compile(r"(?P<name>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<path>.*)")
_COMMIT = re.compile("[0-9a-f]{40}")
_FORM = f"{SCHEME}org/name[@revision][/file]"


class Repository(NamedTuple):
    """A repository of a model, the revision asked for (None: the default), and a path in it."""

    name: str
    revision: str | None
    path: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{SCHEME}{self.name}{revision}" + f"/{self.path}" * bool(self.path)

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Parse ``org/name[@revision]``, ``hf://org/name[@revision][/path]`` or a hub's URL."""
        if is_url(text):
            root = hub.settings().ENDPOINT + "/"
            match = _RESOLVED.fullmatch(text.removeprefix(root))
            assert match is not None, "is_named"
            found = cls(match["name"], unquote(match["revision"]), unquote(match["path"]))
        elif text.startswith(SCHEME):
            found = cls._of_uri(text)
        else:
            name, _, revision = text.partition("@")
            found = cls(name, revision or None)
            if not _NAME.fullmatch(text) or _A_FILE.fullmatch(name):
                raise ShardNotFoundError(text, "no such file or folder")
        library = hub.library(text)
        inside = (*(found.revision or "").split("/"), *found.path.rstrip("/").split("/"))
        try:
            library.utils.validate_repo_id(found.name)
        except ValueError:
            inside = ("..",)
        if {".", ".."}.intersection(inside):
            raise ShardNotFoundError(text, "no such file or folder", f"a path, or {_FORM}")
        return found

    @classmethod
    def _of_uri(cls, text: str) -> Repository:
        body = text.removeprefix(SCHEME).strip("/")
        # the library parses no names without an owner
        owner = "" if "/" in body.partition("@")[0] else "x/"
        library = hub.library(text)
        try:
            uri = library.utils.parse_hf_uri(f"{SCHEME}{owner}{body}")
        except ValueError as error:
            raise ShardNotFoundError(text, "is no repository of the hub", _FORM) from error
        if uri.type != "model":
            raise ShardNotFoundError(text, "is no repository of a model", _FORM, f"a {uri.type}")
        return cls(uri.id.removeprefix(owner), uri.revision, uri.path_in_repo)


class _Listing(NamedTuple):
    files: Mapping[str, int]  # lengths in bytes, by path
    revision: str | None  # that was asked for


_listings: dict[tuple[str, str, str], _Listing] = {}  # by server, repository and commit


def _known(file: HubFile | None) -> _Listing | None:
    if file is None or (known := hub.settings()) is None:
        return None
    return _listings.get((known.ENDPOINT, file.repo, file.commit))


def is_named(text: str) -> bool:
    """Return whether text names a repository: by ``hf://``, or as a URL of the hub's server."""
    if not is_url(text):
        return text.startswith(SCHEME)
    known = hub.settings()
    root = known.ENDPOINT + "/" if known is not None else ""
    path = text.removeprefix(root)
    return path != text and not {"?", "#"}.intersection(path) and bool(_RESOLVED.fullmatch(path))


def origin(path: Location) -> Location:
    """Return the URL of a path in the local cache if this process has listed its repository."""
    file = hub.identity(path) if isinstance(path, Path) else None
    known = _known(file)
    inside = _inside(known.files, file.path) if file and known else None
    return path if file is None or inside is None else hub.url_of(file._replace(path=inside))


def locate(text: str) -> Location:
    """Return the folder or file that a repository's name means, of a commit or in the cache."""
    asked = Repository.parse(text)
    try:
        return _located(text, asked)
    except CheckpointError as error:
        if is_named(text):
            raise
        problem = f"no such file or folder; as a repository: {error.problem}"
        raise replace(error, problem=problem) from error.__cause__


def _located(text: str, asked: Repository) -> Location:
    if hub.settings().is_offline_mode():
        if (kept := snapshot(asked)) is None:
            raise hub.offline(text, asked.name)
        return kept
    found = _listed(text, asked, partial(snapshot, asked))
    return found if isinstance(found, Path) else hub.url_of(found)


def _listed(
    text: Location | str, asked: Repository, instead: Callable[[], Path | None] = lambda: None
) -> HubFile | Path:
    """Ask the hub for a repository's commit and files; return the file or folder, or `instead`."""
    found = hub.described(text, asked.name, asked.revision, instead)
    if isinstance(found, Path):
        return found
    commit, siblings = found.get("sha"), found.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _invalid(text, "sha", "40 hexadecimal digits", commit)
    files = {}
    for number, each in enumerate(siblings if isinstance(siblings, list) else [siblings]):
        if not isinstance(each, dict) or not isinstance(name := each.get("rfilename"), str):
            raise _invalid(text, f"siblings[{number}]", "an object with a rfilename", each)
        nbytes = each.get("size") or 0
        if type(nbytes) is not int or nbytes < 0:
            raise _invalid(text, f"the size of {name!r}", "a number of bytes", nbytes)
        files[name] = nbytes
    _listings[hub.settings().ENDPOINT, asked.name, commit] = _Listing(files, asked.revision)
    path = _inside(files, asked.path.rstrip("/"))
    if path is None:
        problem = "no such file in the repository"
        raise ShardNotFoundError(text, problem, found=some(sorted(files)))
    return HubFile(asked.name, commit, path)


def _invalid(where: Location | str, field: str, expected: str, found: object) -> CheckpointError:
    problem = f"{field} in the hub's answer is invalid"
    return CheckpointError(where, problem, expected, describe(found))


def _inside(files: Mapping[str, int], path: str) -> str | None:
    """Return the path of a file, or of a folder with a slash at its end; None if it is neither."""
    if not path or path in files:
        return path
    path += "/"
    return path if any(each.startswith(path) for each in files) else None


def snapshot(asked: Repository) -> Path | None:
    """Return the path of a repository, or of its file, in the local cache; None if it is absent."""
    library = hub.library(asked.name)
    try:
        found = library.HfApi().resolve_revision(
            asked.name, revision=asked.revision, local_files_only=True
        )
    except (library.errors.RevisionResolutionError, OSError, ValueError):
        return None
    if not re.fullmatch(r"\w+", found.resolved, re.ASCII):
        return None
    path = hub.repo_folder(asked.name) / "snapshots" / found.resolved / asked.path
    return path if path.exists() else None


def listing(folder: Location) -> Mapping[str, int] | None:
    """Return lengths in bytes of a repository's files in a folder, by path; None if it is none."""
    file = hub.file_of(folder)
    if file is None:
        return None
    if _known(file) is None:  # another process has found the commit
        _listed(folder, Repository(file.repo, file.commit))
    known = _known(file)
    assert known is not None, folder
    inside = file.path.rpartition("/")[0] + "/" * ("/" in file.path)
    return {path[len(inside) :]: n for path, n in known.files.items() if path.startswith(inside)}


def written(folder: Location) -> str:
    """Return how a user writes a folder of the hub, with a slash at its end."""
    file = hub.file_of(folder)
    assert file is not None, folder
    known = _known(file)
    revision = known.revision if known else file.commit
    return f"{Repository(file.repo, revision, file.path)}".rstrip("/") + "/"


def explained(error: ShardNotFoundError, found: Location) -> CheckpointError:
    """Return an error of opening a location with what to write instead, if that is known."""
    if isinstance(found, Path):
        return hub.of_part(error, found)
    if not found.name or _A_FILE.fullmatch(found.name) or error.expected is not None:
        return error
    return replace(error, expected=f"{found}/ for a folder")


def check_single(folder: Location, shards: Sequence[str]) -> None:
    """Raise ShardNotFoundError, with what to write, if a repository holds several GGUF files."""
    listed = listing(folder) or {}
    found = [name for name in shards or listed if name.lower().endswith(".gguf")]
    models = {re.sub(r"-\d+-of-\d+", "", name) for name in found}
    if listed and len(models) > bool(shards):
        lines = [f"{written(folder)}{name} ({format_bytes(listed[name])})" for name in found]
        problem = "holds several GGUF files, or has them in folders"
        raise ShardNotFoundError(folder, problem, "the path of one", ", ".join(lines))


def path_of(found: Location, folder: Location, shards: Sequence[Location]) -> Location:
    """Return the path of a checkpoint: one in the local cache if all of its files are there."""
    listed = listing(folder) if isinstance(folder, Url) else None
    needed = [*shards, *(hub.cached(folder / name) for name in listed or () if name == _CONFIG)]
    if listed is None or not shards or any(isinstance(path, Url) for path in needed):
        return found
    parent = shards[0].parent
    return parent / found.name if found.name else parent


def keep_ref(url: Location) -> None:
    """Note in the local cache the commit of the revision asked for, for loads without the hub."""
    file = hub.file_of(url)
    known = _known(file)
    if file is None or known is None or known.revision == file.commit:
        return
    revision = (known.revision or hub.settings().DEFAULT_REVISION).strip("/")
    ref = hub.repo_folder(file.repo) / "refs" / revision
    made = ref.with_name(f"{ref.name}.{uuid4().hex}")
    with suppress(OSError):  # this load does not need it
        ref.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(file.commit)
        made.replace(ref)
