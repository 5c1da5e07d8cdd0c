"""Variants of a checkpoint in one folder, by their names: ``model.fp16.safetensors``.

The same tensors, mostly in another dtype. transformers and diffusers put the variant before the
ending, ``model-00001-of-00002.fp16.safetensors``, or before the number, and in the name of an index
before ``.json``. Source: ``_add_variant`` in both, and ``_get_checkpoint_shard_files``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"-\d+-of-\d+", re.ASCII)


def varied(name: str, variant: str | None) -> str:
    """The name that a file has in a variant; its own in none."""
    stem, dot, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}{dot}{ending}"


def is_of(name: str, variant: str) -> bool:
    """Whether a file of weights, or an index, is of a variant."""
    name = _NUMBER.sub("", name)
    return name.endswith((varied(".safetensors", variant), varied(".index.json", variant)))


def plain(names: Iterable[str]) -> list[str]:
    """Files without those of which there is one without a variant, too."""
    plainly = {name: _NUMBER.sub("", name) for name in names}
    known = set(plainly.values())
    return [name for name, one in plainly.items() if _without(one) not in known]


def found(names: Iterable[str]) -> list[str]:
    """The possible variants of files, by their names."""
    parts = (_NUMBER.sub("", name).split(".") for name in names)
    return sorted({part[-2] for part in parts if len(part) > 2})


def _without(name: str) -> str | None:
    stem, dot, ending = name.rpartition(".")
    head, _, _ = stem.rpartition(".")
    return f"{head}{dot}{ending}" if head else None
