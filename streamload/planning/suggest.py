"""Suggest arguments with which a model and a checkpoint match: renamings, families, typos.

The search covers the whole checkpoint, also if a rank loads a part, and only after a mismatch.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.scheme import SCHEMES
from streamload.codecs.weights import QuantizedWeight
from streamload.core.computed import is_computed
from streamload.core.dtypes import F32, PACKED
from streamload.core.location import Location
from streamload.devices.base import Parameter
from streamload.errors import CheckpointError, Suggestion
from streamload.planning.dequantize import as_in_models, dequantized
from streamload.planning.match import fits, shape_of, whole_shape
from streamload.planning.quant_policy import kinds_of
from streamload.planning.sources import (
    FAMILIES,
    MAPPINGS,
    MappingArgument,
    Rename,
    renamed,
    sources,
)

_MOST_RULES = 4  # prefixes that one line changes, and parts of names
_MOST_NAMES = 8  # names that one line changes one by one
_TRIED = 16  # changes that are tried, those of most names first
_HEADS = 64  # most prefixes of one ending that are tried
_MOST_SLIPS = 64  # parameters that are compared with all unused tensors, letter by letter
_NEAR = 0.75  # least likeness (0 to 1) of a typo
_MOST = 0.9  # least share of a model's parameters that a suggestion fills
_CLEAR = 0.1  # by how much the best candidate is more alike than the others
_TRANSFORMERS = "streamload.transformers.from_pretrained({path}, model_class={name}"
#: Base classes of libraries that rename tensors as they load, and streamload's calls for them.
_CALLS = {
    "transformers.modeling_utils.PreTrainedModel": f"{_TRANSFORMERS})",
    "diffusers.models.modeling_utils.ModelMixin": "streamload.diffusers.from_pretrained({path})",
}
#: The same for models that are offloaded.
_OFFLOADING_CALLS = {name: call[:-1] + ", offload=True)" for name, call in _CALLS.items()}
#: The line that gives a model of tinygrad layers for stored codes.
_REPLACING = "streamload.nn.replace_linears(model, {})  # before this call"
#: By (prefix of tensors, prefix of parameters), the names for which it holds, best first.
_Prefixes: TypeAlias = Mapping[tuple[str, str], int]
_ALSO = {"gamma": "weight", "beta": "bias"}  # TensorFlow's names for parameters of a norm


def call_of_library(model: object, path: Location, *, offload: bool = False) -> str:
    """Return the call for a model whose library renames tensors, as source text; "" for others."""
    bases = (f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__)
    calls = _OFFLOADING_CALLS if offload else _CALLS
    call = next((calls[base] for base in bases if base in calls), "")
    return call.format(path=_text(str(path)), name=type(model).__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A call whose model and checkpoint mismatch, for which better arguments are searched.

    Attributes:
        is_part: whether other ranks load tensors that are in no parameter here.
        layers: returns the formats that `streamload.nn.replace_linears` can give its layers.
    """

    checkpoint: Checkpoint
    parameters: Sequence[Parameter]
    mapping: MappingArgument | None
    rename: Rename | None
    is_part: bool = False
    strict: bool = True
    layers: Callable[[], Sequence[str]] = tuple

    def suggestions(self) -> tuple[Suggestion, ...]:
        """Return the arguments that fill most parameters, if more than the call's arguments.

        Several, if several parts of the checkpoint fit equally well, or if quantized weights may
        be dequantized or held as they are.
        """
        model = _Model.of(self.parameters)
        best, lines = self._best(model)
        found = dict.fromkeys(lines, best)
        codes = [group.name for group in self.checkpoint.groups.values() if self._is_left(group)]
        if codes and best < len(model.needed):
            whole = as_in_models(dequantized(self.checkpoint, codes))
            filled, more = replace(self, checkpoint=whole)._best(model)
            if filled > best:
                asked = 'dtype="float16"'
                found = {f"{line}, {asked}" if line else asked: filled for line in more or [""]}
        formats, filled = self._held(model)
        if formats and filled >= _MOST * len(model.needed):
            found[_REPLACING.format(json.dumps(formats))] = filled
        return tuple(Suggestion(line, n, len(model.needed)) for line, n in found.items() if line)

    def _is_left(self, group: QuantizedWeight) -> bool:
        """Return whether a quantized weight is listed as it is stored, and can be dequantized."""
        values = group.values
        return group.kind in PACKED and self.checkpoint.tensors.get(values.name) is values

    def _held(self, model: _Model) -> tuple[dict[str, str], int]:
        """Return by pattern of weights' names the formats of layers that hold what is stored.

        And the number of parameters that the checkpoint then fills.
        """
        kinds = {name: (info.dtype, info.shape) for name, info in self.checkpoint.tensors.items()}
        names = [name for name, shape in model.shapes.items() if len(shape) == 2]
        formats: dict[str, str] = {}
        for name, format in ((n, f) for n in names if n in kinds for f in self.layers()):
            with suppress(ValueError):  # the format cannot hold the shape
                parts = SCHEMES[format].of(model.shapes[name], F32).parts
                if all(kinds.get(p.name(name)) == (p.dtype, p.shape) for p in parts):
                    formats[name] = format
        filled = {
            model.number[name]
            for name, (_, shape) in kinds.items()
            if name in formats or model.takes(name, shape)
        }
        patterns = {
            pattern: format
            for format in dict.fromkeys(formats.values())
            for pattern in kinds_of(
                [name for name, f in formats.items() if f == format],
                [name for name in names if formats.get(name) != format],
            )
        }
        return patterns, len(filled & model.needed)

    def _best(self, model: _Model) -> tuple[int, list[str]]:
        """Return the most parameters that arguments fill, and these arguments, as source text."""
        needed = len(model.needed)
        best, lines = -1, list[str]()
        for mapping in self._mappings(model):
            stored = self._stored(mapping)
            if stored is None:
                continue
            if mapping == self.mapping:
                best, unexpected = model.judge(stored, self._given)
                if best == needed:  # unused tensors are the only mismatch
                    lines = ["strict=False"] * bool(unexpected and self._may_loosen)
                    break
            found = [
                self._judged(mapping, model, stored, pairs) for pairs in _orders(model, stored)
            ]
            plain = self._judged(mapping, model, stored, {("", ""): 1})
            most = max(filled for filled, _ in found)
            if plain[0] >= most:
                most, found = plain[0], [plain]
            if most > best and most >= _MOST * needed:
                best, lines = most, [line for filled, line in found if filled == most]
        if best < needed and self.mapping is None:
            most, line = self._turned(model)
            if most > best:
                best, lines = most, [line]
        return best, [line for line in dict.fromkeys(lines) if line]

    @property
    def _may_loosen(self) -> bool:
        """Whether ``strict=False`` would help: the call is strict, and this rank loads all."""
        return self.strict and not self.is_part

    def _judged(
        self,
        mapping: MappingArgument | None,
        model: _Model,
        stored: _Stored,
        prefixes: _Prefixes,
    ) -> tuple[int, str]:
        """Return how many parameters the best renaming fills, and its arguments as source text."""
        # the call's rename is for the names of its own mapping
        given = self._given if mapping == self.mapping else lambda name: name
        found = _Search(model, stored, given).renaming(prefixes)
        filled, unexpected = model.judge(stored, found)
        if unexpected and filled == len(model.needed) and not self.is_part:
            fewer = replace(found, skips=True)
            if model.judge(stored, fewer) == (filled, 0):
                found, unexpected = fewer, 0
        arguments = []
        if mapping != self.mapping:
            arguments.append(f"mapping={'None' if mapping is None else json.dumps(mapping)}")
        if found or self.rename is not None:
            arguments.append(f"rename={found}")
        if (unexpected or filled < len(model.needed)) and self._may_loosen:
            arguments.append("strict=False")
        return filled, ", ".join(arguments)

    def _turned(self, model: _Model) -> tuple[int, str]:
        """Return (parameters filled if matrices are transposed, arguments as text), or (-1, "")."""
        stored = self._stored(None)
        if stored is None:
            return -1, ""
        # names are searched with shapes that a matrix and its transpose share
        either_way = replace(model, shapes=_either_way(model.shapes))
        loose = stored._replace(shapes=_either_way(stored.shapes))
        first = _orders(either_way, loose)[0]
        found = _Search(either_way, loose, self._given).renaming(first)
        names = _stored_transposed(
            stored.shapes, {n: model.shapes.get(found(n) or "") for n in loose.shapes}
        )
        source = _listed(names)
        if not source:
            return -1, ""
        turned = {name: stored.shapes[name][::-1] for name in names}
        shapes = stored._replace(shapes={**stored.shapes, **turned})
        filled, line = self._judged(None, model, shapes, first)
        mapping = f"mapping={{name: streamload.Source(name, transpose=True) {source}}}"
        return filled, ", ".join([mapping, line] if line else [mapping])

    def _mappings(self, model: _Model) -> list[MappingArgument | None]:
        """Return the mappings to try, the call's first; only the call's if it has a dict.

        A family is tried if most of its new names are names of the model.
        """
        if self.mapping is not None and not isinstance(self.mapping, str):
            return [self.mapping]
        model_type = str(self.checkpoint.config.get("model_type", ""))
        endings = {name[at:] for name in model.shapes for at in _starts(name)}
        families = []
        for mapping in MAPPINGS:
            family = FAMILIES[mapping]
            changed = [family.name(n) for n in self.checkpoint.tensors if family.matches(n)]
            kept = [name for name in changed if name]  # without dropped tensors
            there = [n for n in kept if not endings.isdisjoint((n, n.partition(".")[2]))]
            if 2 * len(there) > len(kept):
                families.append(mapping)
        # those of the model's own family first
        families.sort(key=lambda name: not model_type.startswith(name.split("-")[1]))
        return list(dict.fromkeys([self.mapping, None, *families]))

    def _stored(self, mapping: MappingArgument | None) -> _Stored | None:
        """Return names and shapes under a mapping; None if it is invalid for this checkpoint."""
        try:
            fill, _, tied = sources(self.checkpoint, mapping, None)
        except (CheckpointError, ValueError):
            return None
        shapes = {name: shape_of(self.checkpoint, source) for name, source in fill.items()}
        heads = {head: shapes[name] for head, name in tied.items() if name in shapes}
        groups = (g for g in self.checkpoint.groups.values() if self._is_left(g))
        parts = {m.name: g.values.name for g in groups for m in [*g.members.values()][1:]}
        first = {source.rows[0].tensor: name for name, source in fill.items()}
        named = {first[part]: first[of] for part, of in parts.items() if {part, of} <= first.keys()}
        return _Stored({**heads, **shapes}, frozenset(heads.keys() - shapes.keys()), named)

    def _given(self, name: str) -> str | None:
        """Return a name after the call's own ``rename``; None if its tensor is skipped."""
        return renamed(name, self.rename)


class _Stored(NamedTuple):
    """The names and shapes of a checkpoint's tensors under some mapping."""

    shapes: Mapping[str, tuple[int, ...]]  # by name
    heads: frozenset[str]  # names that are not stored: config.json ties them to another
    parts: Mapping[str, str] = MappingProxyType({})  # by name of scales, ..., that of the codes


@dataclass(frozen=True, slots=True)
class _Model:
    """The names and shapes of a model's parameters.

    Attributes:
        shapes: the shape in checkpoints, by each of a parameter's names.
        number: the parameter's number, by each of its names.
        needed: the numbers of parameters that the model does not compute itself.
    """

    shapes: Mapping[str, tuple[int, ...]]
    number: Mapping[str, int]
    needed: Set[int]

    @classmethod
    def of(cls, parameters: Sequence[Parameter]) -> _Model:
        """Return the names and shapes of parameters; all shards of a tensor count as one."""
        once = list({p.names: p for p in parameters}.values())
        names = [(n, p, name) for n, p in enumerate(once) for name in (*p.names, *p.wrapped)]
        return cls(
            {name: whole_shape(p) for _, p, name in names},
            {name: n for n, _, name in names},
            {n for n, p in enumerate(once) if not p.is_computed()},
        )

    def takes(self, name: str | None, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this name and shape fills a parameter."""
        return name is not None and name in self.shapes and fits(shape, self.shapes[name])

    def judge(self, stored: _Stored, rename: Callable[[str], str | None]) -> tuple[int, int]:
        """Return the number of filled parameters and of unused tensors.

        (-1, 0) if names clash, or codes would be loaded without their scales.
        """
        filled, seen, unexpected = set(), set(), 0
        taken, left = set(), set()
        for name, shape in stored.shapes.items():
            new = rename(name)
            if new is None:
                continue
            if new in seen:
                return -1, 0
            seen.add(new)
            if self.takes(new, shape):
                filled.add(self.number[new])
                taken.add(name)
            elif name not in stored.heads and not is_computed(name, shape):
                unexpected += 1
                left.add(stored.parts.get(name))
        if not taken.isdisjoint(left):
            return -1, 0  # codes without their scales
        return len(filled & self.needed), unexpected


@dataclass(frozen=True, slots=True)
class _Renaming:
    """A function for ``rename=``; `str` gives its source text.

    Attributes:
        prefixes: old and new prefix of names, longest first; the first that matches is replaced.
        parts: (old, new) text, replaced after that.
        names: new names of single tensors, which take precedence.
        skips: whether names with none of the prefixes are skipped.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    skips: bool = False

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.parts or self.names)

    def __call__(self, name: str) -> str | None:
        if name in self.names:
            return self.names[name]
        for before, after in self.prefixes:
            if name.startswith(before):
                name = after + name.removeprefix(before)
                break
        else:
            if self.skips:
                return None
        for old, new in self.parts:
            name = name.replace(old, new)
        return name

    def __str__(self) -> str:
        if not self:
            return "None"
        names = ", ".join(f"{_text(old)}: {_text(new)}" for old, new in self.names.items())
        if not self.prefixes and not self.parts:
            return f"{{{names}}}"
        line = "None" if self.skips else self._changed("name")
        for before, after in reversed(self.prefixes):
            changed = f"name.removeprefix({_text(before)})" if before else "name"
            if not after and line == "name" and not self.parts:  # it leaves other names as they are
                line = changed
                continue
            changed = self._changed(f"{_text(after)} + {changed}" if after else changed)
            line = (
                f"{changed} if name.startswith({_text(before)}) else {line}" if before else changed
            )
        return f"lambda name: {{{names}}}.get(name, {line})" if names else f"lambda name: {line}"

    def _changed(self, expression: str) -> str:
        if not self.parts:
            return expression
        inner = f"({expression})" if "+" in expression else expression
        return inner + "".join(f".replace({_text(old)}, {_text(new)})" for old, new in self.parts)


def _text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


class _Search:
    """A search for a renaming of tensors to parameters: common prefixes first, typos last."""

    def __init__(self, model: _Model, stored: _Stored, given: Callable[[str], str | None]) -> None:
        self._model, self._given = model, given
        self._left = dict(stored.shapes)  # tensors that fill nothing yet
        self._free = set(model.number.values())  # parameters that nothing fills yet
        self._filled: dict[str, str] = {}  # tensors to parameters

    def renaming(self, prefixes: _Prefixes) -> _Renaming:
        """Return the best renaming that begins with these prefixes; it may change nothing."""
        found = _Renaming(self._prefixes(prefixes))
        found = replace(found, parts=self._parts(found))
        self._slips(found)
        odd = {name: new for name, new in self._filled.items() if found(name) != new}
        return replace(found, names=dict(list(odd.items())[:_MOST_NAMES]))

    def _take(self, rename: Callable[[str], str | None], *, least: int) -> bool:
        """Fill parameters by a renaming of unused tensors; return False if fewer than ``least``."""
        got = {}
        free = set(self._free)
        for name, shape in self._left.items():
            new = rename(name)
            if new is not None and self._model.takes(new, shape):
                number = self._model.number[new]
                if number in free:
                    free.discard(number)
                    got[name] = new
        if len(got) < least:
            return False
        self._free = free
        self._filled |= got
        for name in got:
            del self._left[name]
        return True

    def _prefixes(self, pairs: _Prefixes) -> tuple[tuple[str, str], ...]:
        """Return (old, new) prefixes of names that fill most parameters, longest first."""
        chosen: dict[str, str] = {}
        for pair in pairs:
            before, after = pair
            if before in chosen or len(chosen) == _MOST_RULES:
                continue
            rivals = (
                r
                for r, names in pairs.items()
                if (r[0] == before) != (r[1] == after) and 2 * names >= pairs[pair]
            )
            if chosen and any(_likeness(*pair) < _likeness(*r) + _CLEAR for r in rivals):
                continue  # the choice is not clear
            one, filled = _Renaming((pair,), skips=True), dict(self._filled)
            if not self._take(one, least=2 if chosen else 1):
                continue
            more = _Renaming(_longest_first({**chosen, before: after}))
            broken = sum(more(name) != new for name, new in filled.items())
            if broken < len(self._filled) - len(filled):
                chosen[before] = after  # if not, its names are changed one by one
        if chosen.get("") == "":
            del chosen[""]  # names without a rule stay as they are anyway
        return _longest_first(chosen)

    def _parts(self, found: _Renaming) -> tuple[tuple[str, str], ...]:
        """Return (old, new) components of names that many tensors and parameters differ in.

        A new component "" leaves the old one out.
        """
        places: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in self._left:
            for before, part, after in _split(found(name) or name):
                places[before, after].append(part)
        votes = Counter(
            (part, wanted, bool(after))
            for name, number in self._model.number.items()
            if number in self._free
            for before, wanted, after in _split(name)
            for part in places.get((before, after), ())
            if before and not part.isdigit() and part != wanted
        )
        for name in self._left:
            name = found(name) or name
            for part in {p for before, p, after in _split(name) if before and after}:
                if self._model.number.get(name.replace(f".{part}.", ".")) in self._free:
                    votes[part, "", True] += 1  # a wrapper's, such as torch.compile's
        chosen: list[tuple[str, str]] = []
        for change, count in votes.most_common(_TRIED):
            old, new, is_inner = change
            rivals = (r for r, n in votes.items() if n >= count and (r[0] == old) != (r[1] == new))
            if new and any(_likeness(old, new) < _likeness(r[0], r[1]) + _CLEAR for r in rivals):
                continue  # the choice is not clear
            dot = "." if is_inner else ""
            one = (f".{old}{dot}", f".{new}{dot}" if new else dot)
            more = replace(found, parts=(*chosen, one))
            broken = sum(more(name) != new for name, new in self._filled.items())
            if broken <= _MOST_NAMES and self._take(more, least=2):
                chosen.append(one)
            if len(chosen) == _MOST_RULES:
                break
        return tuple(chosen)

    def _slips(self, found: _Renaming) -> None:
        """Fill single parameters by unused tensors whose names are nearly the same."""
        free = [name for name, n in self._model.number.items() if n in self._free]
        spelled: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for tensor in self._left:
            for text in {tensor, found(tensor) or tensor, self._given(tensor) or tensor}:
                spelled[_digits(text)].append((text, tensor))
        for name in free[:_MOST_SLIPS]:
            near: dict[str, float] = {}
            for text, tensor in spelled[_digits(name)][:_MOST_SLIPS]:
                if tensor in self._left and self._model.takes(name, self._left[tensor]):
                    if _ends(tensor, name):  # a prefix, and no slip; nor is another name one
                        near.clear()
                        break
                    near[tensor] = max(near.get(tensor, 0), _likeness(text, name))
            nearest = sorted(near, key=near.__getitem__)[-2:]
            is_clear = len(nearest) < 2 or near[nearest[1]] >= near[nearest[0]] + _CLEAR
            if nearest and is_clear and near[nearest[-1]] >= _NEAR:
                self._take({nearest[-1]: name}.get, least=1)


def _longest_first(rules: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(rules.items(), key=lambda each: -len(each[0])))


def _orders(model: _Model, stored: _Stored) -> list[_Prefixes]:
    """Return pairs of prefixes in the order in which to try them, those of most names first.

    If parts of the checkpoint, or of the model, are alike, each of them comes first in one order.
    """
    votes = Counter(_different_heads(model, stored))
    likeness = {pair: _likeness(*pair) for pair, _ in votes.most_common(_TRIED)}
    pairs = sorted(likeness, key=lambda p: (-votes[p], p != ("", ""), -likeness[p]))
    if not pairs or pairs[0] == ("", ""):
        return [{pair: votes[pair] for pair in pairs}]
    top = pairs[0]
    alike = [
        pair
        for pair in pairs
        if votes[pair] == votes[top] and likeness[pair] > likeness[top] - _CLEAR
        if (pair[0] == top[0]) != (pair[1] == top[1])
    ]
    return [{each: votes[each] for each in (pair, *pairs)} for pair in (top, *alike)]


def _different_heads(model: _Model, stored: _Stored) -> Iterator[tuple[str, str]]:
    """Yield (prefix of a tensor, prefix of a parameter) for pairs with the same rest of the name.

    A parameter is paired with the tensors of fitting shape that share its longest ending.
    """
    heads: dict[str, list[str]] = defaultdict(list)
    for name in stored.shapes:
        for at in _starts(name):
            if len(heads[name[at:]]) < _HEADS:
                heads[name[at:]].append(name[:at])
    for name, shape in model.shapes.items():
        for at in _starts(name):
            end = name[at:]
            found = [h for h in heads.get(end, ()) if fits(stored.shapes[h + end], shape)]
            yield from ((head, name[:at]) for head in found)
            if found:
                break


def _either_way(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes with matrices' axes sorted: a matrix and its transpose get equal shapes."""
    return {n: tuple(sorted(s)) if len(s) == 2 else s for n, s in shapes.items()}


def _stored_transposed(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...] | None]
) -> list[str]:
    """Return the matrices that a checkpoint has transposed; [] if a square matrix is ambiguous.

    A square matrix counts as transposed if all oblong matrices of its stack of layers are.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name, shape in stored.items():
        if len(shape) == 2 and wanted[name] is not None:
            layers[re.split(r"\.\d+\.", name)[0]].append(name)
    out = []
    for names in layers.values():
        oblong = [name for name in names if len(set(stored[name])) == 2]
        turned = [name for name in oblong if stored[name] != wanted[name]]
        if turned and len(oblong) < len(names) and len(turned) < len(oblong):
            return []
        out += names if turned and len(turned) == len(oblong) else turned
    return out


def _listed(names: Sequence[str]) -> str:
    """Return source text of a loop over names, those of layers by numbers; "" if too many."""
    if 0 < len(names) <= _MOST_RULES:
        return f"for name in [{', '.join(map(_text, names))}]"
    found = [(re.sub(r"\.\d+\.", ".{i}.", n, count=1), re.search(r"\.(\d+)\.", n)) for n in names]
    layers = {(pattern, int(match[1])) for pattern, match in found if match}
    patterns, count = dict.fromkeys(p for p, _ in found), 1 + max((n for _, n in layers), default=0)
    complete = len(names) == len(layers) == len(patterns) * count
    if not names or not complete or any("{" in name for name in names):
        return ""
    listed = ", ".join("f" + _text(pattern) for pattern in patterns)
    return f"for i in range({count}) for name in [{listed}]"


def _starts(name: str) -> list[int]:
    """Return the indices at which the components of a dotted name begin."""
    return [0, *(match.end() for match in re.finditer(r"\.", name))]


def _ends(name: str, other: str) -> bool:
    """Return whether one of two names is the other with a prefix."""
    short, long = sorted((name, other), key=len)
    return long.endswith(f".{short}")


def _split(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (components before, component, components after) by component of a dotted name."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        yield ".".join(parts[:at]), part, ".".join(parts[at + 1 :])


def _digits(name: str) -> str:
    return "".join(c for c in name if c.isdigit())


def _likeness(name: str, other: str) -> float:
    """Return the likeness of two names without their common ends, 0 to 1; 0 if digits differ."""
    if _ALSO.get(name) == other:
        return 1.0
    if _digits(name) != _digits(other):
        return 0.0
    a, b = name.split("."), other.split(".")
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return SequenceMatcher(None, ".".join(a), ".".join(b)).ratio() if a or b else 1.0
