"""A Hugging Face Hub on this machine: its addresses, signed URLs on another port, and its refusals.

Source: what huggingface_hub 2.4 asks for, and the headers that it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from remote_server import Answer, Handler, Request, Site, _Server, _serving

TOKEN = "hf_a-secret-token"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "fedcba9876543210fedcba9876543210fedcba98"
_LARGE = (".safetensors", ".gguf", ".bin")  # stored apart, at signed URLs


@dataclass
class Repo:
    """A repository: its files by commit, the commits of its branches, and who may read it."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    private: bool = False  # 401 without the token
    gated: bool = False  # lists its files to all, and gives them to none but who has the token


class _HubHandler(Handler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: Hub = self.server.site.hub  # type: ignore[attr-defined]
        with hub.site.lock:
            port = self.client_address[1]
            request = Request(self.path, self.wanted, port, {**self.headers, ":": self.command})
            hub.site.requests.append(request)
            fault = hub.faults.popleft() if hub.faults else None
        if fault is not None:
            fault(self, b"a fault")
            return
        status, headers, body = hub.answer(self.path, self.headers.get("Authorization"))
        if status == 200:
            Answer(headers={"ETag": None, "Last-Modified": None, **headers})(self, body)
        else:
            Answer(status, {"ETag": None, **headers}, ranges=False, body=body)(self, b"")

    def send_body(self, answer: Answer, body: bytes) -> None:
        if self.command != "HEAD":
            super().send_body(answer, body)


class _SignedHandler(Handler):
    def do_GET(self) -> None:
        hub: Hub = self.server.site.hub  # type: ignore[attr-defined]
        hub.seen_by_storage.append(dict(self.headers))
        (signature,) = parse_qs(urlsplit(self.path).query).get("Signature", [""])
        if signature != hub.signature:
            Answer(403, ranges=False, body=b"<Error>Request has expired</Error>")(self, b"")
            return
        if hub.expires_after is not None:
            hub.expires_after -= 1
            if hub.expires_after < 0:
                hub.expires_after = None
                hub.expire()
        super().do_GET()


class Hub:
    def __init__(self, site: Site, storage: Site) -> None:
        self.site, self.storage = site, storage
        self.repos: dict[str, Repo] = {}
        self.faults: deque[Any] = deque()  # acts that replace the next answers of the hub itself
        self.signature = "se-cret0"
        self.expires_after: int | None = None  # requests to the storage until signatures expire
        self.seen_by_storage: list[Mapping[str, str]] = []  # headers
        self.renamed: dict[str, str] = {}  # repositories, by their former names
        self.size: int | None = None  # that its list gives for every file, instead of its own
        self.xet = False  # whether files are said to be in Xet's storage, too

    @property
    def url(self) -> str:
        """Of the server, without a slash at the end, as in HF_ENDPOINT."""
        return self.site.url.rstrip("/")

    def add(self, name: str, files: Mapping[str, bytes], commit: str = COMMIT) -> Repo:
        repo = self.repos.setdefault(name, Repo({}))
        repo.commits[commit] = dict(files)
        repo.refs["main"] = commit
        for data in files.values():
            self.storage.files[f"/{hashlib.sha256(data).hexdigest()}"] = data
        return repo

    def expire(self) -> None:
        self.signature = f"se-cret{int(self.signature[7:]) + 1}"

    def paths(self, command: str = "") -> list[str]:
        return [r.path for r in self.site.requests if command in (r.headers[":"], "")]

    def ranges(self, data: bytes) -> list[tuple[int, int] | None]:
        path = f"/{hashlib.sha256(data).hexdigest()}"
        return [r.range for r in self.storage.requests if r.path.startswith(path)]

    def environment(self, home: Path) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "STREAMLOAD_HTTP_TRIES": "3",
        }

    def answer(self, path: str, sent: str | None) -> tuple[int, dict[str, str | None], bytes]:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        lists_tree = is_api and "tree" in parts
        mark = "tree" if lists_tree else "revision" if is_api else "resolve"
        at = parts.index(mark) if mark in parts else len(parts)
        revision, *inside = parts[at + 1 :] or ["main"]
        name = "/".join(parts[:at])
        if name in self.renamed:
            return 307, {"Location": path.replace(name, self.renamed[name])}, b""
        repo = self.repos.get(name)
        allowed = sent == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = repo.commits[commit]
        if lists_tree:
            tree = [_entry(path, data) for path, data in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if is_api:
            siblings = [_sibling(name, data, self.size) for name, data in files.items()]
            said = {"id": name, "sha": commit, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()
        name = "/".join(inside)
        if repo.gated and not allowed:
            code = {"X-Error-Code": "GatedRepo"}
            return 403 if sent else 401, {**code, "X-Repo-Commit": commit}, b""
        headers: dict[str, str | None] = {"X-Repo-Commit": commit}
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", **headers}, b""
        data, etag = files[name], hashlib.sha256(files[name]).hexdigest()
        if self.xet:
            headers |= {"X-Xet-Hash": etag, "X-Xet-Refresh-Route": "/api/xet"}
        if not name.endswith(_LARGE):
            return 200, {"ETag": f'"{_blob_id(data)}"', **headers}, data
        location = f"{self.storage.url}{etag}?Signature={self.signature}"
        linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        return 302, {"Location": location, **linked, **headers}, b""


def _sibling(name: str, data: bytes, size: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": size or len(data)}
    found["blobId"] = _blob_id(data)
    if name.endswith(_LARGE):
        sha256 = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 134}
    return found


def _entry(name: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
    found["oid"] = _blob_id(data)
    if name.endswith(_LARGE):
        oid = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
    return found


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    servers = [_Server(("127.0.0.1", 0), kind) for kind in (_HubHandler, _SignedHandler)]
    with _serving(servers[0], {}) as site, _serving(servers[1], {}) as storage:
        hub = Hub(site, storage)
        site.hub = storage.hub = hub  # type: ignore[attr-defined]
        yield hub


def use_hub(
    monkeypatch: pytest.MonkeyPatch, url: str, home: Path, *, offline: bool = False
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DOWNLOAD_TIMEOUT": 2,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "3")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve_hub() as served:
        use_hub(monkeypatch, served.url, tmp_path / "home")
        yield served


__all__ = ["COMMIT", "LATER", "TOKEN", "Hub", "Repo", "hub", "serve_hub"]
