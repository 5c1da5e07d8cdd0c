"""Finds snapshots of repositories in the local Hugging Face cache. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from streamload.errors import ShardNotFoundError

_REPO = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?", re.ASCII)


def cached_snapshot(name: str) -> Path:
    """Return the cached snapshot of ``org/name[@revision]``; raise ShardNotFoundError for none."""
    # source: "Understand caching" in the documentation of huggingface_hub
    match = _REPO.fullmatch(name)
    if match is None or {".", ".."} & set(re.split("[/@]", name)):
        raise ShardNotFoundError(name, "no such file or folder")
    revision = match["revision"] or "main"
    root = _hub_cache() / f"models--{match['repo'].replace('/', '--')}"
    try:
        commit = (root / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision  # the hash of a commit
    snapshot = root / "snapshots" / commit
    if re.fullmatch(r"\w+", commit, re.ASCII) and snapshot.is_dir():
        return snapshot
    raise ShardNotFoundError(
        name,
        "no such file or folder, and not in the Hugging Face cache",
        f"{revision} of {root}",
        "other revisions only" if root.is_dir() else "nothing",
    )


def _hub_cache() -> Path:
    """Return the Hugging Face cache's folder, by environment variables; empty ones are ignored."""
    variable = os.environ.get
    folder = variable("HF_HUB_CACHE") or variable("HUGGINGFACE_HUB_CACHE")
    if not folder:
        caches = variable("XDG_CACHE_HOME") or "~/.cache"
        home = variable("HF_HOME") or os.path.join(caches, "huggingface")
        folder = os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))
