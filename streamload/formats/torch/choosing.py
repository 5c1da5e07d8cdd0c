"""Finds the tensors by name among the objects of a pickle: the one dict of a model's weights.

A trainer's checkpoint has its weights under any key, with counters, scores and an optimizer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from streamload.errors import HeaderError
from streamload.files.header import describe, some
from streamload.formats.reader import File
from streamload.formats.torch.globals import VERSIONS, Foreign, Tensor

#: The call that writes a checkpoint, for errors.
SAVE = 'torch.save(model.state_dict(), "model.pth")'
#: The key of the outermost dict.
ROOT = "."
_DEEPEST = 8  # levels of nested dicts that are searched
_LISTED = 8
_SHOWN = 80  # letters of a key
_OPTIMIZER = ("state", "param_groups")  # keys of torch.optim.Optimizer.state_dict

#: The keys that lead to a dict, as a linked list: (last key, those before); None for the outermost.
_Way: TypeAlias = "tuple[str, _Way] | None"


def chosen(file: File, root: Any, key: str | None) -> Mapping[str, Tensor]:
    """Return the tensors of the dict at ``key``, or of the model's weights; raise HeaderError.

    These are the only dict of tensors by name; single elements (scores, counters) do not count if
    there are others, and optimizers never.
    """
    if key is not None and (tensors := _tensors_at(root, key)):
        return _complete(file, tensors)
    found = sorted(_holders(root), key=lambda one: -len(one[1]))
    if key is None:
        found = [one for one in found if not all(map(_is_single, one[1].values()))] or found
    shown = [
        f"{describe(_key(way))} ({len(tensors)} tensor{'s' * (len(tensors) != 1)})"
        for way, tensors in found[:_LISTED]
    ]
    listed = some(shown, len(found))
    if key is not None:
        problem = f"key {describe(key)} holds no tensors by name"
        raise HeaderError(file.path, problem, listed or "a dict of tensors", "no such dict")
    if not found and (other := _foreign_in(root)) is not None:
        problem = f"is a pickled object, of {other.name}: no code is run to open a file"
        raise HeaderError(file.path, problem, SAVE, other.name)
    if not found:
        what = "one tensor without a name" if isinstance(root, Tensor) else type(root).__name__
        raise HeaderError(file.path, "holds no tensors by name", SAVE, what)
    if len(found) > 1:
        most = _key(found[0][0])[:_SHOWN]
        expected = f"open_checkpoint(path, key={most!r}), or --key {most}"
        raise HeaderError(file.path, "holds several dicts of tensors", expected, listed)
    return _complete(file, found[0][1])


def _complete(file: File, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a dict; raise HeaderError if an object in it may be a tensor, too."""
    other = next((key for key, value in found.items() if type(value) is Foreign), None)
    if other is not None:
        problem = f"names {found[other].name}, which is never called"
        expected = f"tensors, dicts and plain values ({SAVE} writes them)"
        raise HeaderError(file.path, problem, expected, found[other].name, tensor=other)
    return {k: v for k, v in found.items() if type(v) is Tensor}


def _foreign_in(root: Any) -> Foreign | None:
    """Return the first object of another library: ``root``, or a value of it."""
    values = root.values() if type(root) is dict else [root]
    return next((each for each in values if type(each) is Foreign), None)


def versions_beside(root: Any, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return by name of a module the numbers that torch wrote for it with these tensors."""
    same = (
        each[VERSIONS]
        for _, each in _dicts(root)
        if VERSIONS in each and all(each.get(name) is tensor for name, tensor in tensors.items())
    )
    return {
        name: {k: v for k, v in facts.items() if type(k) is str and type(v) in (int, bool)}
        for name, facts in next(same, {}).items()
        if type(name) is str and type(facts) is dict
    }


def _holders(root: Any) -> Iterator[tuple[_Way, dict[str, Tensor | Foreign]]]:
    """Yield each dict that holds tensors by name, with the string keys that lead to it."""
    held = ((way, _tensors_in(each)) for way, each in _dicts(root))
    yield from ((way, tensors) for way, tensors in held if tensors)


def _dicts(root: Any) -> Iterator[tuple[_Way, dict[Any, Any]]]:
    """Yield each dict, but no optimizer's, with the string keys that lead to it."""
    # other keys are not followed: an optimizer's tensors are below numbers of parameters
    seen: set[int] = set()
    level: list[tuple[_Way, Any]] = [(None, root)] if type(root) is dict else []
    for _ in range(_DEEPEST):
        below: list[tuple[_Way, Any]] = []
        for way, each in level:
            if id(each) in seen or _is_optimizer(each):
                continue
            seen.add(id(each))
            yield way, each
            below += [((k, way), v) for k, v in each.items() if type(k) is str and type(v) is dict]
        level = below


def _is_single(tensor: Tensor | Foreign) -> bool:
    """Return whether a tensor has one element; objects of other libraries count as one."""
    if type(tensor) is Foreign:
        return True
    assert isinstance(tensor, Tensor)
    return not tensor.problem and all(length == 1 for length in tensor.shape)


def _is_optimizer(found: Mapping[Any, Any]) -> bool:
    """Return whether a dict is the state of an optimizer, nested or with dotted keys."""
    keys = [key for key in found if type(key) is str]
    return all(any(k == part or k.startswith(f"{part}.") for k in keys) for part in _OPTIMIZER)


def _tensors_at(root: Any, key: str) -> dict[str, Tensor | Foreign]:
    """Return the tensors of the dict at a dotted key, whose parts may have dots; {} for none."""
    ends = [at for at, letter in enumerate(key) if letter == "."] + [len(key)]
    level = {(id(root), 0): root} if type(root) is dict else {}
    if key == ROOT:
        return _tensors_in(root) if level else {}
    for _ in range(_DEEPEST):
        below: dict[tuple[int, int], Any] = {}
        for (_, start), each in level.items():
            for end in ends[bisect_left(ends, start) :]:
                found = each.get(key[start:end])
                if type(found) is dict:
                    if end == len(key) and (tensors := _tensors_in(found)):
                        return tensors
                    below[id(found), end + 1] = found
        level = below
    return {}


def _tensors_in(found: Mapping[Any, Any]) -> dict[str, Tensor | Foreign]:
    """Return the members of a dict with string keys, tensors and foreign; {} without tensors."""
    kept = {k: v for k, v in found.items() if type(k) is str and type(v) in (Tensor, Foreign)}
    return kept if any(type(v) is Tensor for v in kept.values()) else {}


def _key(way: _Way) -> str:
    """Return the dotted key of a dict; computed when needed, since keys may be long and shared."""
    keys: list[str] = []
    while way is not None:
        key, way = way
        keys.append(key)
    return ".".join(reversed(keys)) or ROOT
