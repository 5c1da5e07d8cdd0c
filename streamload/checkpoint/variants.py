"""Names of variants of a checkpoint in one folder, such as ``model.fp16.safetensors``.

A variant has the same tensors, mostly in another dtype. transformers and diffusers put its name
before the ending, ``model-00001-of-00002.fp16.safetensors``, or before the number, and in the name
of an index before ``.json``. Source: their ``_add_variant`` and ``_get_checkpoint_shard_files``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from streamload.core.location import Location
from streamload.errors import HeaderError
from streamload.files.header import Header, some
from streamload.formats.reader import DEFAULT

_NUMBER = re.compile(r"-\d+-of-\d+", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)
#: Files of ranks that each hold slices: Meta's, Megatron's and DeepSpeed's, vLLM's.
_OF_RANK = re.compile(r"(consolidated\.|mp_rank_|model-rank-)(\d+)([._-].*)", re.ASCII)


def varied(name: str, variant: str | None) -> str:
    """Return a file's name in a variant: "a.fp16.bin" for "a.bin"; unchanged for None."""
    stem, dot, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}{dot}{ending}"


def is_of(name: str, variant: str) -> bool:
    """Return whether a file of weights, or an index, belongs to a variant, by its name."""
    name = _NUMBER.sub("", name)
    return name.endswith((varied(".safetensors", variant), varied(".index.json", variant)))


def plain(names: Iterable[str]) -> list[str]:
    """Return ``names`` without each variant ("a.fp16.bin") whose plain name ("a.bin") is listed."""
    plainly = {name: _NUMBER.sub("", name) for name in names}
    known = set(plainly.values())
    return [name for name, one in plainly.items() if _without(one) not in known]


def found(names: Iterable[str]) -> list[str]:
    """Return the possible variants in the names of files, sorted: "fp16" of "a.fp16.bin"."""
    parts = (_NUMBER.sub("", name).split(".") for name in names)
    return sorted({part[-2] for part in parts if len(part) > 2})


def without(folder: Location, headers: Sequence[Header], variant: str | None) -> Sequence[Header]:
    """Return the headers without variants (``a.fp16.bin``) of files that exist, too (``a.bin``).

    All stay with a ``variant`` or if no tensor repeats. Raise HeaderError if a folder holds several
    variants and no file without one, a model more than once in files of other formats, or files
    whose names differ in more than numbers: without an index these are parts of no one checkpoint.
    """
    tensors = [info.name for header in headers for info in header.tensors]
    repeat = len({*tensors}) < len(tensors)
    names = [header.path.name for header in headers]
    kept, is_other = set(names), headers[0].format != DEFAULT.name
    if repeat and not (variant or is_other):
        kept = set(plain(names))
        if len(kept) == len(names) and len(known := found(names)) > 1:
            written = " or ".join(f'open_checkpoint(path, variant="{name}")' for name in known)
            raise HeaderError(folder, "holds several variants", written, some(names))
    if repeat and set(next_rank(names[0])) & set(names):
        raise of_rank(headers[0])
    if len({_DIGITS.sub("0", name) for name in kept}) > 1 or (repeat and is_other):
        raise HeaderError(
            folder,
            "holds several checkpoints",
            "the path of one file, an index, or files that are numbered alike",
            some(names),
        )
    return [header for header in headers if header.path.name in kept]


def next_rank(name: str) -> list[str]:
    """Return the names of the files of the next and the last rank; [] if it is no rank's file."""
    match = _OF_RANK.fullmatch(name)
    if match is None:
        return []
    before, number, after = match.groups()
    others = (n for n in (int(number) + 1, int(number) - 1) if n >= 0)
    return [f"{before}{n:0{len(number)}}{after}" for n in others]


def of_rank(header: Header) -> HeaderError:
    """Return the error for a file that has one rank's slice of each tensor."""
    return HeaderError(
        header.path,
        "is one rank's part of a checkpoint: other files have slices of the same tensors",
        "whole tensors: the repository's files in Hugging Face's form, outside of original/",
        header.path.name,
    )


def _without(name: str) -> str | None:
    """Return a file's name without its variant; None if it has none."""
    stem, dot, ending = name.rpartition(".")
    head, _, _ = stem.rpartition(".")
    return f"{head}{dot}{ending}" if head else None
