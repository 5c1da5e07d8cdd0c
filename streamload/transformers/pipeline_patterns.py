"""Arguments of a pipeline by model: patterns of names that begin with a model's name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

from streamload.codecs.scheme import SCHEMES
from streamload.core.dtypes import F32
from streamload.core.patterns import fits
from streamload.planning.match import wants_of
from streamload.planning.quant_policy import STORED, QuantPolicy, kinds_of
from streamload.transformers.pipeline_models import Diffused, Part


def by_model(
    what: str,
    value: Any,
    models: Mapping[str, Collection[str]],
    given: Mapping[str, Any],
    *,
    alone: bool,
) -> Mapping[str, Any]:
    """Split ``dtype=`` or ``quant=`` into one for each model, by pattern of its tensors' names.

    ``models``: the names of each model's tensors; ``given``: components that are not loaded, whose
    patterns are ignored; ``alone``: patterns do not begin with the model's name. Raises ValueError
    for a pattern that matches no tensor.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(models, value)
    asked = {f"{name}.*" if name in models else name: value for name, value in value.items()}
    rest = asked.pop("default", None)
    out: dict[str, dict[str, Any]] = {name: {} for name in models}
    for pattern, each in [*asked.items(), *([("*", rest)] if rest is not None else [])]:
        inner = {name: inside(pattern, "" if alone else f"{name}.") for name in models}
        found = [
            name
            for name, tensors in models.items()
            if any(fnmatchcase(tensor, inner[name]) for tensor in tensors)
        ]
        if not found and pattern != "*" and pattern.partition(".")[0] not in given:
            raise ValueError(f"{what}: no tensor's name matches {pattern!r}")
        for name in found:
            out[name].setdefault(inner[name], each)  # the first that matches decides
    return {name: rules or None for name, rules in out.items()}


def inside(pattern: str, prefix: str) -> str:
    """Return a pattern without a model's prefix; "" if it matches no name of that model."""
    literal = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    if literal.startswith(prefix):
        return pattern.removeprefix(prefix)
    after = pattern.removeprefix(literal)
    return after if prefix.startswith(literal) and after.startswith("*") else ""


def stay_in(stay: Sequence[str], models: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Split ``stay=`` into patterns for each model, whose parameters are ``models``.

    Raises ValueError: a pattern matches no parameter.
    """
    out: dict[str, list[str]] = {name: [] for name in models}
    for pattern in stay:
        for name, parameters in models.items():
            both = dict.fromkeys((pattern, inside(pattern, f"{name}.")))  # errors lack the prefix
            out[name] += [each for each in both if each and fits(each, parameters)]
        if not any(any(fits(each, models[name]) for each in out[name]) for name in models):
            raise ValueError(f"stay: no tensor's name matches {pattern!r}")
    return out


def formats_of(
    parts: Mapping[str, Part], asked: Mapping[str, Any]
) -> tuple[dict[str, str] | None, list[str]]:
    """Return the ``quant=`` of a load of all models as one, or None, and notes."""
    out: dict[str, str] = {}
    left: list[str] = []
    for name, part in parts.items():
        policy = QuantPolicy.parse(asked[name])
        policy.check_stored(part.checkpoint)
        wants = wants_of(part.checkpoint, part.fill)
        kept = part.kept if isinstance(part, Diffused) else ()
        by_format: dict[str, list[str]] = {}
        formats = policy.formats(part.checkpoint, wants)
        blocks = part.checkpoint.stored
        for want, info, format in zip(wants, wants.infos, formats, strict=True):
            if info.name in blocks and policy.rule(info.name)[1] == STORED:
                format = STORED
            if format is None or info.name in kept:
                continue
            if policy.rule(info.name) == ("*", format) and not _holds(format, want.shape):
                left.append(f"{name}.{info.name}")
            else:
                by_format.setdefault(format, []).append(info.name)
        for format, some in by_format.items():
            others = {info.name for info in wants.infos}.difference(some)
            out |= {f"{escape(name)}.{kind}": format for kind in kinds_of(some, others)}
    kinds = ", ".join(kinds_of(left, ()))
    return out or None, [f"not quantised, for no format asked holds their shapes: {kinds}"] * bool(
        left
    )


def _holds(format: str, shape: tuple[int, ...]) -> bool:
    with suppress(ValueError):
        return format not in SCHEMES or SCHEMES[format].of(shape, F32) is not None
    return False
