"""Substitutes for methods of users' objects that look like these methods."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from streamload.errors import OffloadError

# Attributes of the face itself; all others are those of its method.
_OWN = frozenset(("__call__", "__reduce_ex__", "__reduce__", "__deepcopy__"))


class Face:
    """Looks like a method, and calls another function.

    Class, signature, name, docstring, annotations, code and object are those of the method:
    packages read arguments of a model's ``forward`` from its signature.
    """

    __slots__ = ("__weakref__", "_call", "_function", "_method", "_refusal")

    def __new__(cls, method: Callable[..., Any], call: Any, refusal: str = "") -> Any:
        """Make a face; if ``method`` is a face, bind it to the object ``call`` (for WeakMethod)."""
        if type(method) is Face:
            return MethodType(method, call)
        return object.__new__(cls)

    def __init__(
        self, method: Callable[[], Any], call: Callable[..., Any], refusal: str = ""
    ) -> None:
        """Call ``call`` in place of the method that ``method`` returns.

        ``method`` must not keep the object alive. ``refusal``: the error of a copy or pickle.
        """
        self._method, self._call, self._refusal = method, call, refusal
        self._function: Face | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "_torchdynamo_disable":  # dynamo would bypass the face, and run the method
            return True
        method = _method_of(self)
        if name != "__func__":
            return getattr(method, name)
        function = object.__getattribute__(self, "_function")
        if function is None:  # kept: packages have weak references to it
            call, refusal = (object.__getattribute__(self, each) for each in ("_call", "_refusal"))
            function = self._function = _function_of(method, call, refusal)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that replaces the method."""
        return object.__getattribute__(self, "_call")(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(_method_of(self) == (_method_of(other) if type(other) is Face else other))

    def __hash__(self) -> int:
        return hash(_method_of(self))

    def __repr__(self) -> str:
        return repr(_method_of(self))

    def __dir__(self) -> list[str]:
        return dir(_method_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError(object.__getattribute__(self, "_refusal"))

    __deepcopy__ = __reduce_ex__


def _method_of(face: Face) -> Any:
    return object.__getattribute__(face, "_method")()


def _function_of(method: Any, call: Callable[..., Any], refusal: str) -> Face:
    """Return a `Face` of a method's function; for the method's own object it runs ``call``."""
    function, owner = method.__func__, id(method.__self__)

    def called(*args: Any, **kwargs: Any) -> Any:
        if args and id(args[0]) == owner:
            return call(*args[1:], **kwargs)
        return function(*args, **kwargs)

    found: Face = Face(lambda: function, called, refusal)
    return found
