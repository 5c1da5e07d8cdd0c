"""The code of torch's modules that changes state dicts before they are loaded, or follows a load.

`nn.Module.load_state_dict` calls overrides of ``_load_from_state_dict`` and hooks. Here these get
tensors without values. What only renames, copies or drops names is followed; other code is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from streamload.core.computed import is_computed
from streamload.devices.base import Seen
from streamload.devices.torch.tensors import (
    FACTS,
    TO_TORCH,
    InvalidTensor,
    four_bit_state,
    mark_unstored,
    unwrapped_names,
)

#: Functions of tensors that need no values.
_FACTS = frozenset(
    (
        *("__get__", "__hash__", "__len__", "dim", "element_size", "is_complex"),
        *("is_contiguous", "is_floating_point", "numel", "size", "stride"),
    )
)
_EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX


_READ = "_streamload_read"  # on a tensor: a function that reads its bytes, or None


class _ReadError(Exception):
    """Code that read or wrote a tensor without values."""


class _Named(torch.Tensor):
    """A tensor of a checkpoint, with shape and dtype and without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return facts, and a value that is alone in its tensor; raise `_ReadError` for others."""
        if func.__name__ == "resize_" and tuple(args[1]) == tuple(args[0].shape):
            return args[0]  # as modules that observe ranges do before they copy
        read = getattr(args[0], _READ, None)
        if func.__name__ == "item" and read is not None and args[0].numel() == 1:
            dtype = args[0].dtype
            return torch.frombuffer(bytearray(read()), dtype=dtype).item()
        if func.__name__ in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **(kwargs or {}))
            if not isinstance(out, torch.Tensor):
                return out
        cls._refuse(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise `_ReadError`, for what torch calls itself."""
        cls._refuse(func)

    @staticmethod
    def _refuse(func: Any) -> NoReturn:
        raise _ReadError(f"it calls {func.__name__} of a tensor")


def _named(
    shape: Sequence[int], dtype: torch.dtype, read: Callable[[], bytes] | None = None
) -> torch.Tensor:
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _Named, tuple(shape), dtype=dtype, device="cpu"
    )
    made.__dict__[_READ] = read
    return made


def _ids(tensors: Mapping[str, Any]) -> dict[str, int]:
    return {name: id(each) for name, each in tensors.items()}


class _Recorder(nn.Module):
    """A base that overrides reach by ``super()`` in place of `nn.Module`: it copies nothing."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *rest)
        self.__dict__["called"].append((state_dict, prefix, _ids(state_dict)))


def changed_names(
    model: Any,
    tensors: Callable[[], Mapping[str, Seen]],
    versions: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, str], Sequence[str]] | None:
    """Return names as `Framework.changed_names`; see there."""
    if not isinstance(model, nn.Module) or not (inside := _with_code(model)):
        return None
    found = {
        name: _named(shape, TO_TORCH.get(dtype, torch.float32), read)
        for name, (dtype, shape, read) in tensors().items()
    }
    before = {id(tensor): name for name, tensor in found.items()}
    unwrapped, problems = unwrapped_names(model), list[str]()

    def walk(module: nn.Module, path: str, local: dict[str, Any]) -> dict[str, Any]:
        prefix = path if any(name.startswith(path) for name in local) else unwrapped(path)
        if _has_code(module):
            given = dict(local)
            try:
                if _takes_extra(module) and (extra := f"{prefix}{_EXTRA}") in local:
                    raise _ReadError(f"it takes {extra}")
                local = _run(module, given, prefix, dict(versions.get(prefix[:-1], {})))
                _check(local, given, before, prefix)
            except Exception as error:
                name = prefix[:-1] or "the model"
                why = error if isinstance(error, _ReadError) else f"{type(error).__name__}: {error}"
                problems.append(
                    f"{name} ({type(module).__name__}): {_code_of(module)} changes what is "
                    f"loaded, and streamload cannot run it without the values: {why}"
                )
                return given
            local = {name: each for name, each in local.items() if id(each) in before}
        for name, child in module._modules.items():
            if child is not None and id(child) in inside:
                below = f"{path}{name}."
                of = tuple(dict.fromkeys((below, unwrapped(below))))
                part = {key: each for key, each in local.items() if key.startswith(of)}
                new = walk(child, below, part)
                if _ids(new) != _ids(part):
                    local = {k: each for k, each in local.items() if k not in part} | new
        return local

    after = walk(model, "", found)
    return {name: before[id(tensor)] for name, tensor in after.items()}, problems


def _run(
    module: nn.Module, local: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> dict[str, Any]:
    """Return the state dict that a module loads, after its own code.

    Raises:
        Exception: any that the code raises.
        _ReadError: the code needs values, or changes the module.
    """
    errors, called = list[str](), list[Any]()
    state = dict(local)
    rest: tuple[Any, ...] = metadata, True, [], [], errors
    if not _overrides(module):
        for hook in module._load_state_dict_pre_hooks.values():
            hook(state, prefix, *rest)
    else:
        kind = type(module)
        shadow: Any = object.__new__(type(kind.__name__, (kind, _Recorder), {}))
        kept = dict(module.__dict__)
        for key in ("_parameters", "_buffers"):
            twins = {k: t if t is None else _named(t.shape, t.dtype) for k, t in kept[key].items()}
            kept[key] = twins
        kept["_modules"] = dict(module._modules)
        whole = {key: _ids(kept[key]) for key in ("_parameters", "_buffers", "_modules")}
        shadow.__dict__.update(kept)
        shadow.__dict__["called"] = called
        shadow._load_from_state_dict(state, prefix, *rest)
        if len(called) != 1 or called[0][0] is not state or called[0][1] != prefix:
            raise _ReadError("it does not call nn.Module's own with its arguments")
        now = {key: each for key, each in shadow.__dict__.items() if key != "called"}
        if any(now.get(key) is not each for key, each in kept.items()) or len(now) != len(kept):
            raise _ReadError("it sets attributes of the module")
        if any(_ids(now[key]) != before for key, before in whole.items()):
            raise _ReadError("it replaces tensors of the module")
        if called[0][2] != _ids(state):
            raise _ReadError("it changes the state dict after the load")
    if errors:
        raise _ReadError("; ".join(errors))
    return state


def _check(
    local: Mapping[str, Any], given: Mapping[str, Any], before: Mapping[int, str], prefix: str
) -> None:
    """Raise `_ReadError` if code replaced a tensor, or added one that no model computes."""
    for name, each in local.items():
        if id(each) not in before and (
            name in given or not is_computed(name, tuple(getattr(each, "shape", ())))
        ):
            raise _ReadError(f"it {'replaces' if name in given else 'adds'} {name}")


def _has_code(module: nn.Module) -> bool:
    """Whether loading a state dict into a module, apart from its children, runs code of its own."""
    hooks = module._load_state_dict_pre_hooks
    return bool(hooks) or _overrides(module) or _takes_extra(module)


def _takes_extra(module: nn.Module) -> bool:
    """Whether a module sets a state of its own, which a file may have."""
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _overrides(module: nn.Module) -> bool:
    """Whether a class loads its tensors in its own way; streamload's modules take them as torch."""
    own = type(module)._load_from_state_dict
    named = getattr(own, "__module__", "")
    return own is not nn.Module._load_from_state_dict and not named.startswith("streamload.")


def _with_code(model: nn.Module) -> set[int]:
    """Return the ids of modules with code of their own, and of those that they are inside of."""
    found: set[int] = set()

    def look(module: nn.Module) -> bool:
        below = [look(child) for child in module._modules.values() if child is not None]
        if has := _has_code(module) or any(below):
            found.add(id(module))
        return has

    look(model)
    return found


def _code_of(module: nn.Module) -> str:
    """Return what changes a module's state dict, by name."""
    if _overrides(module):
        return f"{type(module).__qualname__}._load_from_state_dict"
    if not module._load_state_dict_pre_hooks:
        return f"{type(module).__qualname__}.set_extra_state"
    hooks = (getattr(h, "hook", h) for h in module._load_state_dict_pre_hooks.values())
    names = (getattr(each, "__qualname__", type(each).__qualname__) for each in hooks)
    return f"the pre-hook {', '.join(names)}"


def followed_by(model: Any) -> list[str]:
    """Return the names of modules with hooks that are called after a load."""
    named = model.named_modules() if isinstance(model, nn.Module) else ()
    return [name or "the model" for name, each in named if each._load_state_dict_post_hooks]


def after_load(model: Any, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Call the hooks that modules want called after a load, those of inner modules first.

    Buffers that have no values still raise from then on. Means of nested scales are set.
    """
    if isinstance(model, nn.Module):
        mark_unstored(model)
        for module in model.modules():
            _read_facts(four_bit_state(module))
    if not followed_by(model):
        return
    keys = _IncompatibleKeys(list(missing), list(unexpected))
    for module in _inner_first(model):
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, keys)


def _read_facts(state: Any) -> None:
    """Set what a `QuantState` keeps as numbers from the JSON that was loaded, if any was."""
    facts = None if state is None else vars(state).get(FACTS)
    if facts is None or isinstance(facts, InvalidTensor):
        return
    said = json.loads(bytes(facts.cpu().tolist()))
    if state.nested and float(state.offset) != (mean := said["nested_offset"]):
        state.offset = torch.full_like(state.offset, mean)
    state.dtype = getattr(torch, str(said["dtype"]))
    delattr(state, FACTS)  # made anew: code may change the weight


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module._modules.values():
        if child is not None:
            yield from _inner_first(child)
    yield module
