"""Slots of tensors in models, their ties, and the base of parameters over them."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from functools import cache
from typing import Any, TypeVar

from streamload.devices.base import Parameter

Slot = tuple[MutableMapping[str, Any], str]  # where a model keeps a tensor: a dict and a key in it
_Entry = TypeVar("_Entry")
_Parameter = TypeVar("_Parameter", bound=Parameter)


class EntryParameter(Parameter):
    """A parameter over entries of a model; ``collect`` collects garbage cycles."""

    def __init__(
        self,
        names: tuple[str, ...],
        entries: list[Any],
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        self.names, self._entries, self._collect = names, entries, collect
        self._look()

    @abstractmethod
    def _look(self) -> None:
        """Read the entries, and find the memory that they hold."""


class SlotParameter(EntryParameter):
    """A parameter whose entries are slots: other objects can be put into them."""

    def _objects(self) -> list[Any]:
        """The objects in the slots now, each once."""
        if len(self._entries) == 1:
            container, key = self._entries[0]
            return [container[key]]
        return list({id(c[k]): c[k] for c, k in self._entries}.values())

    @property
    def slots(self) -> Sequence[Slot]:
        """(dict, key) of each entry."""
        return self._entries

    def _swap(self, new: Callable[[Any], Any]) -> None:
        """Replace each object by ``new(object)``."""
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
    """The tensors of a nested dict, by dotted name; ``inside`` has the ids of the dicts around it.

    Raises:
        ValueError: the dict holds itself.
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
    """Make one parameter for all entries with the same key, in order.

    ``make`` gets names, entries and a function that collects garbage once for all parameters:
    it is slow, and nothing creates cycles in between.

    Raises:
        ValueError: two entries have one name.
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
