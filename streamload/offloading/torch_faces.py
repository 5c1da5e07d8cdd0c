"""An object that stands in the place of a method of a user's object, and looks like it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from streamload.errors import OffloadError

# Attributes that a face has itself; its method answers for all others.
_OWN = frozenset(("__call__", "__reduce_ex__", "__reduce__", "__deepcopy__"))


class Face:
    """Looks like a method, and calls something else.

    Its method answers for its class, signature, name, docstring, annotations, code and object.
    Packages read arguments of a model's ``forward`` off its signature.
    """

    __slots__ = ("__weakref__", "_call", "_function", "_method", "_refusal")

    def __new__(cls, method: Callable[..., Any], call: Any, refusal: str = "") -> Any:
        """Make a face, or bind its function to an object as `weakref.WeakMethod` does."""
        if type(method) is Face:
            return MethodType(method, call)
        return object.__new__(cls)

    def __init__(
        self, method: Callable[[], Any], call: Callable[..., Any], refusal: str = ""
    ) -> None:
        """Call ``call`` for the method that ``method`` returns, which must not keep the object."""
        own = {"_method": method, "_call": call, "_refusal": refusal, "_function": None}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "_torchdynamo_disable":  # dynamo would go round it, into the method's code
            return True
        method = object.__getattribute__(self, "_method")()
        if name != "__func__":
            return getattr(method, name)
        function = object.__getattribute__(self, "_function")
        if function is None:  # one object each time: packages keep weak references to it
            call, refusal = (object.__getattribute__(self, each) for each in ("_call", "_refusal"))
            function = _function_of(method, call, refusal)
            object.__setattr__(self, "_function", function)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is called instead."""
        return object.__getattribute__(self, "_call")(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        other = object.__getattribute__(other, "_method")() if type(other) is Face else other
        return bool(object.__getattribute__(self, "_method")() == other)

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


def _function_of(method: Any, call: Callable[..., Any], refusal: str) -> Face:
    """A face of a method's function; for another object of the class it is that function."""
    function, owner = method.__func__, id(method.__self__)

    def called(*args: Any, **kwargs: Any) -> Any:
        if args and id(args[0]) == owner:
            return call(*args[1:], **kwargs)
        return function(*args, **kwargs)

    found: Face = Face(lambda: function, called, refusal)
    return found
