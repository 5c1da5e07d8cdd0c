"""Locations of a checkpoint's files: paths on this machine, and URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from streamload.errors import CheckpointError, ShardNotFoundError

_STORES = ("s3", "gs", "az")
_SCHEMES = ("http", "https", *_STORES)
_URL = re.compile(rf"({'|'.join(_SCHEMES)})://", re.IGNORECASE)
_FOREIGN = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_HALF = re.compile(rf"({'|'.join((*_SCHEMES, 'hf'))}):/[^/]", re.IGNORECASE)
#: The URLs that are read, for errors.
URL_FORMS = "http(s)://host/path, s3://bucket/path, gs://bucket/path or az://container/path"
# text without secrets; name@revision, org/name@revision, hf://org/name@revision/file
_PLAIN = re.compile(r"[\w:/.,\[\] +-]*|(hf://)?[\w.-]+(/[\w.-]+)?@[\w./%-]+", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,4}:(?=/)")  # a longer one may be a user


@dataclass(frozen=True, slots=True, order=True, repr=False)
class Url:
    """The URL of a file or folder on a server, with some methods of `pathlib.PurePath`.

    It is read over HTTP; with the scheme s3, gs or az, its host is a bucket of an object store.

    It is no `pathlib.Path`, which collapses ``//`` to ``/`` and accesses this machine's disk. As
    text (str, repr, os.fspath, and so in errors, reports and plans) it shows nothing before an @,
    and not the query, which may be a signature.

    Attributes:
        href: the whole URL, with secrets, for requests only.
        version: the file's version when its header was read, a line of the server's response: ETag
            or else Last-Modified; "" if neither was sent, or nothing was read yet.
        is_shown: whether pickling removed secrets from ``href``: reading it is an error then.
    """

    href: str
    version: str = ""
    is_shown: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without secrets, since pickles are stored and sent."""
        shown = str(self)
        return Url, (shown, self.version, self.is_shown or shown != self.href)

    def __deepcopy__(self, memo: object) -> Url:
        """Return the object itself, with its secrets: within a process it can be read."""
        return self

    __copy__ = __deepcopy__

    @classmethod
    def parse(cls, text: str) -> Url:
        """Parse a URL, without its fragment."""
        try:
            parts = urlsplit(text)
            whole = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
            # only IPv6 hosts have %: elsewhere it may be an escaped @, the end of a password
            whole = whole and ("%" not in parts.netloc.rpartition("@")[2] or "[" in parts.netloc)
            # after a port, "#" before an @ is part of a password
            whole = whole and (parts.port is None or bool(parts.path) or "@" not in parts.fragment)
            if parts.scheme in _STORES:
                whole = whole and not parts.query and not set("@:") & set(parts.netloc)
        except ValueError:  # brackets, or a port that is no number
            whole = False
        if not whole or not text.isprintable() or " " in text:
            shown = without_secrets(text)
            raise CheckpointError(shown, "is not a URL", URL_FORMS)
        return cls(parts._replace(path=parts.path or "/", fragment="").geturl())

    @property
    def name(self) -> str:
        """The file's name, the last part of the path; "" for a folder."""
        return unquote(self._parts.path.rpartition("/")[2])

    @property
    def parent(self) -> Url:
        """The folder of a file, with the same query; a folder is its own parent."""
        return self._with_path(self._parts.path.rpartition("/")[0] + "/")

    @property
    def host(self) -> str:
        """The host's name, or the bucket's, in lower case."""
        return self._parts.hostname or ""

    @property
    def scheme(self) -> str:
        """One of http, https, s3, gs and az."""
        return self._parts.scheme

    @property
    def is_store(self) -> bool:
        """Whether this names an object, or a folder of objects, in a bucket."""
        return self.scheme in _STORES

    @property
    def bucket(self) -> str:
        """The host as it is written: the name of the bucket or container."""
        return self._parts.netloc

    @property
    def key(self) -> str:
        """The path without URL escapes and without the first slash, as object stores name it."""
        return unquote(self._parts.path[1:])

    def of_version(self, version: str) -> Url:
        """Return the same URL with a version."""
        return replace(self, version=version)

    def __truediv__(self, name: str) -> Url:
        """Return a file of the folder, by its name or path without URL escapes."""
        folder = self._parts.path
        return self._with_path(f"{folder.rstrip('/')}/{quote(name)}")

    def __fspath__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        parts = self._parts
        host, path = parts.netloc.rpartition("@")[2], parts.path
        if "@" in path:  # the host may be a user, and what follows it a password with a slash
            host, path = "...", path[path.rindex("@") :]
        elif "@" in parts.query and parts.netloc == host and ":" in host:  # or one with ?
            host, path = "...", ""
        return f"{parts.scheme}://{host}{path}" + "?..." * bool(parts.query)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.href)

    def _with_path(self, path: str) -> Url:
        return Url(self._parts._replace(path=path).geturl(), is_shown=self.is_shown)


#: The place of a checkpoint's file; both kinds have text, names and parents. Each has an order of
#: its own: sort places of both kinds by their text.
Location = Path | Url


def is_url(text: str) -> bool:
    """Whether text begins like a URL that is read."""
    return _URL.match(text) is not None


def is_foreign(text: str) -> bool:
    """Whether text begins like a URL of any scheme, even a broken one."""
    return _FOREIGN.match(text) is not None


def local(path: str | os.PathLike[str]) -> Path:
    """Return a path on this machine, or the name of a repository, as a `Path`."""
    text = os.fsdecode(path)
    # raised here: the operating system's errors would show secrets
    if not os.path.lexists(text) and (is_foreign(text) or without_secrets(text) != text):
        shown = without_secrets(text)
        went = "a URL that went through Path: give it as a str" if _HALF.match(text) else None
        raise ShardNotFoundError(shown, "no such file or folder", f"{URL_FORMS}, for a URL", went)
    return Path(path)


def without_secrets(text: str) -> str:
    """Return a perhaps broken URL with "..." for possible secrets: passwords may end anywhere."""
    if _PLAIN.fullmatch(text):
        return text
    scheme = _SCHEME.match(text.lstrip())
    if scheme is not None:
        return f"{scheme[0]}..."
    before, at, _ = text.rpartition("@")
    if at and (":" in before or "//" in before or "/" not in text.partition("@")[0]):
        return "..."
    before, mark, _ = text.partition("?")
    return before + "?..." * bool(mark)
