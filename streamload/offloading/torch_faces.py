"""What stands in the place of a method of a user's object, and looks like that in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamload.errors import OffloadError

# What a face answers itself; all else its method answers.
_OWN = frozenset(("__call__", "__reduce_ex__", "__reduce__", "__deepcopy__"))


class Face:
    """Looks like a method, and calls something else.

    Everything that is asked of it the method answers: its class, signature, name, docstring,
    annotations, code, object. Packages read arguments of a model's ``forward`` off its signature.
    """

    __slots__ = ("__weakref__", "_call", "_method", "_refusal")

    def __init__(
        self, method: Callable[[], Any], call: Callable[..., Any], refusal: str = ""
    ) -> None:
        """Make one.

        Args:
            method: gives the method. It should not keep the object, which would keep it in turn.
            call: what is called.
            refusal: why it is neither copied nor pickled.
        """
        object.__setattr__(self, "_method", method)
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_refusal", refusal)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "_torchdynamo_disable":  # dynamo would go round it, into the method's code
            return True
        method = object.__getattribute__(self, "_method")()
        found = getattr(method, name)
        if name != "__func__":
            return found
        call, refusal = (object.__getattribute__(self, each) for each in ("_call", "_refusal"))
        owner = id(method.__self__)

        def called(*args: Any, **kwargs: Any) -> Any:
            """Call what is called, for the object itself; for another of its class the function."""
            if args and id(args[0]) == owner:
                return call(*args[1:], **kwargs)
            return found(*args, **kwargs)

        return Face(lambda: found, called, refusal)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is called instead."""
        return object.__getattribute__(self, "_call")(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        method = object.__getattribute__(self, "_method")()
        if type(other) is Face:
            other = object.__getattribute__(other, "_method")()
        return bool(method == other)

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_method")())

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "_method")())

    def __dir__(self) -> list[str]:
        return dir(object.__getattribute__(self, "_method")())

    def __deepcopy__(self, memo: Any) -> Any:
        raise OffloadError(object.__getattribute__(self, "_refusal"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError(object.__getattribute__(self, "_refusal"))
