"""Bases of parameters over a model's tensors, and the search for tied tensors."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any, TypeVar

from streamload.devices.base import Parameter

Slot = tuple[MutableMapping[str, Any], str]  # the dict in which a model keeps a tensor, and its key
_Entry = TypeVar("_Entry")
_Parameter = TypeVar("_Parameter", bound=Parameter)


class EntryParameter(Parameter):
    """A parameter over one or more tied entries of a model: tensors, or slots (dict, key)."""

    def __init__(
        self, names: tuple[str, ...], entries: list[Any], collect: Callable[[], object] = gc.collect
    ) -> None:
        self.names, self._entries, self._collect = names, entries, collect
        self._look()

    @abstractmethod
    def _look(self) -> None:
        """Read the entries when the parameter is made, and set its attributes from them."""


class SlotParameter(EntryParameter):
    """A parameter over slots (dict, key), so that other tensors can be put into the model."""

    def _objects(self) -> list[Any]:
        """Return the tensors that the slots hold now, each once."""
        if len(self._entries) == 1:
            container, key = self._entries[0]
            return [container[key]]
        return list({id(c[k]): c[k] for c, k in self._entries}.values())

    @property
    def slots(self) -> Sequence[Slot]:
        """The (dict, key) of each entry."""
        return self._entries

    def _swap(self, new: Callable[[Any], Any]) -> None:
        """Replace each tensor by ``new(tensor)``, in all slots."""
        made: dict[int, Any] = {}
        for container, key in self._entries:
            old = container[key]
            if id(old) not in made:
                made[id(old)] = new(old)
            container[key] = made[id(old)]


def dict_slots(
    model: MutableMapping[str, Any],
    kinds: tuple[type, ...],
    prefix: str = "",
    inside: tuple[int, ...] = (),
) -> Iterator[tuple[str, Slot]]:
    """Yield (dotted name, slot) for values of the classes ``kinds`` in a nested dict.

    ``prefix`` and ``inside`` are for recursion: the name so far, and the ids of the outer dicts.
    Raises ValueError: the dict holds itself.
    """
    for key, value in model.items():
        if isinstance(value, MutableMapping):
            if id(value) in (*inside, id(model)):
                raise ValueError(f"the dict {prefix + str(key)!r} holds itself")
            yield from dict_slots(value, kinds, f"{prefix}{key}.", (*inside, id(model)))
        elif isinstance(value, kinds):
            yield f"{prefix}{key}", (model, key)


def make_parameters(
    entries: Iterable[tuple[str, _Entry]],
    key: Callable[[_Entry], Hashable],
    make: Callable[[tuple[str, ...], list[_Entry], Callable[[], object]], _Parameter],
) -> list[_Parameter]:
    """Make and return one parameter for all entries with the same key, in order.

    ``make`` gets names, entries and a function that collects garbage, which is slow and therefore
    runs once for all parameters: nothing creates cycles in between. Raises ValueError: two entries
    have one name.
    """
    groups: dict[Hashable, tuple[list[str], list[_Entry]]] = {}
    seen: set[str] = set()
    for name, entry in entries:
        if name in seen:
            raise ValueError(f"two tensors of the model are named {name!r}")
        seen.add(name)
        names, found = groups.setdefault(key(entry), ([], []))
        names.append(name)
        found.append(entry)
    collect = cache(gc.collect)
    return [make(tuple(names), found, collect) for names, found in groups.values()]
