"""Where a checkpoint's file is: a path on this machine, or a URL."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from streamload.errors import CheckpointError

_SCHEMES = ("http", "https")
_URL = re.compile(r"https?://", re.IGNORECASE)
_HALF = re.compile(r"https?:/[^/]", re.IGNORECASE)


@dataclass(frozen=True, slots=True, order=True, repr=False)
class Url:
    """A file or a folder that is read over HTTP, with the part of `pathlib.PurePath` that is asked.

    It is no `pathlib.Path`, which makes one slash of two, and every other method of which would
    look for it on this machine's disk. As text (str, repr, os.fspath, and so in errors, reports and
    plans) it has neither the user and password nor the query, which may be a signature.

    Attributes:
        href: all of it, for requests only.
        version: of the file, what its server called it when its header was read: a line of the
            response, ETag or else Last-Modified; "" where neither was sent, or nothing read yet.
    """

    href: str
    version: str = ""

    @classmethod
    def parse(cls, text: str) -> Url:
        """Read a URL; a fragment is dropped.

        Raises:
            CheckpointError: it is none of HTTP, or names no host.
        """
        try:
            parts = urlsplit(text)
            whole = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets, or a port that is no number
            whole = False
        if not whole or not text.isprintable() or " " in text:
            # of a broken one nobody knows where the password ends
            shown = text.split("?")[0].rpartition("@")[2]
            raise CheckpointError(shown, "is not a URL", expected="http(s)://host/path")
        return cls(parts._replace(path=parts.path or "/", fragment="").geturl())

    @property
    def name(self) -> str:
        """The last part of its path: the file's name; "" for a folder."""
        return unquote(self._parts.path.rpartition("/")[2])

    @property
    def parent(self) -> Url:
        """The folder that it is in; a folder is its own. With the same query."""
        return self._with_path(self._parts.path.rpartition("/")[0] + "/")

    @property
    def host(self) -> str:
        """The host's name, in lower case."""
        return self._parts.hostname or ""

    @property
    def scheme(self) -> str:
        """Either "http" or "https"."""
        return self._parts.scheme

    def of_version(self, version: str) -> Url:
        """The same, of this version."""
        return replace(self, version=version)

    def __truediv__(self, name: str) -> Url:
        """A file of the folder, by its name as it is (not as a URL has it)."""
        folder = self._parts.path
        return self._with_path(f"{folder.rstrip('/')}/{quote(name, safe='')}")

    def __fspath__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return _without_secrets(self.href)

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.href)

    def _with_path(self, path: str) -> Url:
        return Url(self._parts._replace(path=path).geturl())


#: Where a file of a checkpoint is; text, names, folders and order are asked of both alike.
Location = Path | Url


def is_url(text: str) -> bool:
    """Whether text is meant to be a URL of HTTP."""
    return _URL.match(text) is not None


def lost_a_slash(text: str) -> bool:
    """Whether text was a URL before somebody made a path of it."""
    return _HALF.match(text) is not None


def _without_secrets(text: str) -> str:
    """A URL without user, password and query."""
    scheme, colon, rest = text.partition("://")
    rest, mark, _ = rest.partition("?")
    host, slash, path = rest.partition("/")
    return scheme + colon + host.rpartition("@")[2] + slash + path + "?..." * bool(mark)
