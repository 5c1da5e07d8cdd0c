"""Match tensors of a checkpoint to parameters, as transformers renames and fuses them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from streamload.checkpoint.open import Checkpoint
from streamload.core.system import callers_level
from streamload.core.tensors import whole as all_of
from streamload.errors import ShapeMismatch, StateDictMismatchError, listed
from streamload.loading.options import Options
from streamload.planning.match import skipping_shapes
from streamload.planning.sources import Source, model_shape
from streamload.transformers.configuration import first_line
from streamload.transformers.internals import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    leave_out_what_is_ignored,
    rename_source_key,
)
from streamload.transformers.rows import Converted, StandIns

#: Parts of names that torch.compile, peft, FSDP and activation checkpointing add around a module.
_WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|base_layer|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


@dataclass(frozen=True, slots=True)
class Renames:
    """The rules by which transformers maps tensors of a checkpoint to names of a model."""

    transforms: list[Any]  # transformers' own: `renamings` and `converters`
    renamings: list[Any]  # change names alone
    converters: list[Any]  # fuse, split or reorder values
    prefix: str  # of the names of the model without its head
    state: Mapping[str, Any]  # the model's tensors by name
    outer: Renames | None = None  # of the multimodal model that the model is a part of
    part: str = ""  # the prefix of the model's body there
    body: str = ""  # and in the model

    @classmethod
    def of(
        cls,
        model: Any,
        key_mapping: Mapping[str, str] | None,
        quantizer: Any,
        outer: tuple[Any, str] | None = None,
    ) -> Renames:
        """Return transformers' rules for a model, without its quantizers', which change values.

        `outer`: the multimodal model that the checkpoint holds, and the name of `model`'s body
        in it.
        """
        transforms = get_model_conversion_mapping(model, key_mapping, quantizer)
        transforms = [
            one
            for one in transforms
            if isinstance(one, WeightRenaming) or not all(map(_of_quantizer, one.operations))
        ]
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        rules = (transforms, renamings, converters, model.base_model_prefix, model.state_dict())
        if outer is None:
            return cls(*rules)
        body = "" if model.base_model is model else f"{model.base_model_prefix}."
        return cls(*rules, cls.of(outer[0], None, None), f"{outer[1]}.", body)

    def is_elsewhere(self, tensor: str) -> bool:
        """Return whether a tensor belongs to another part of a multimodal model."""
        return self.outer is not None and not self.outer.plain(tensor).startswith(self.part)

    def plain(self, tensor: str) -> str:
        """Return a tensor's name in the model before values are converted."""
        return str(rename_source_key(tensor, self.renamings, [], self.prefix, self.state)[0])

    def __call__(self, tensor: str) -> tuple[str, str | None]:
        """Return a tensor's name in the model, and the pattern of its value conversion or None."""
        if self.outer is not None and (name := self.outer.plain(tensor)).startswith(self.part):
            tensor = self.body + name.removeprefix(self.part)
        lists, rest = (self.renamings, self.converters), (self.prefix, self.state)
        found: tuple[str, str | None] = rename_source_key(tensor, *lists, *rest)
        if found[0] not in self.state and tensor in self.state:  # it has its new name already
            found = rename_source_key(tensor, [], [], *rest)
        if found[0] not in self.state and (plain := _WRAPPERS.sub("", tensor)) != tensor:
            return self(plain)
        return found


def _of_quantizer(operation: Any) -> bool:
    """Return whether an operation on weights belongs to a quantizer of transformers."""
    return hasattr(operation, "hf_quantizer")


@dataclass(slots=True)
class Names:
    """The rows of a checkpoint that fill each parameter of a model, and the mismatches."""

    model: Any  # on the meta device
    checkpoint: Checkpoint
    fill: dict[str, Source] = field(default_factory=dict)  # by parameter
    first: dict[str, str] = field(default_factory=dict)  # by tensor, its first parameter
    unexpected: dict[str, str] = field(default_factory=dict)  # by tensor, the name that is missing
    refused: dict[str, str] = field(default_factory=dict)  # by parameter, why rows do not fill it
    transforms: list[Any] = field(default_factory=list)  # those of transformers that were used
    computed: dict[str, Any] = field(default_factory=dict)  # values by parameter, of no checkpoint

    @classmethod
    def of(
        cls,
        model: Any,
        checkpoint: Checkpoint,
        key_mapping: Mapping[str, str] | None = None,
        quantizer: Any = None,
        outer: tuple[Any, str] | None = None,
    ) -> Names:
        """Match all tensors of a checkpoint to a model by transformers' rules; reads nothing.

        `outer`: as in `Renames.of`; tensors of its other parts are left out.
        """
        out, renames = cls(model, checkpoint), Renames.of(model, key_mapping, quantizer, outer)
        by_pattern = {p: one for one in renames.converters for p in one.source_patterns}
        fused: dict[str, list[tuple[str, str]]] = {}
        for tensor in sorted(checkpoint.tensors, key=dot_natural_key):
            name, pattern = renames(tensor)
            if name not in renames.state:
                if not renames.is_elsewhere(tensor):
                    out.unexpected[tensor] = name
                continue
            out.first[tensor] = name
            if pattern is not None:
                fused.setdefault(name, []).append((pattern, tensor))
            else:
                out._add(name, whole(checkpoint, tensor))
        for name, members in fused.items():
            out._convert(by_pattern[members[0][0]], name, members)
        out.transforms = [
            one for one in renames.transforms if getattr(one, "was_used", lambda: True)()
        ]
        return out

    @classmethod
    def of_converted(cls, model: Any, checkpoint: Checkpoint, made: Converted) -> Names:
        """Match a model to the rows of a conversion; names that it has no use for are ignored."""
        state = model.state_dict()
        fill = {name: source for name, source in made.fill.items() if name in state}
        computed = {name: value for name, value in made.computed.items() if name in state}
        first = {row.tensor: name for name, source in fill.items() for row in source.rows}
        return cls(model, checkpoint, fill, first, computed=computed)

    def _add(self, name: str, source: Source) -> None:
        if (first := self.fill.setdefault(name, source)) is not source:
            both = " and ".join(each.rows[0].tensor for each in (first, source))
            self.refused[name] = f"{both} would both become it"

    def _convert(self, converter: Any, name: str, members: Sequence[tuple[str, str]]) -> None:
        """Add to `fill`, for parameter `name`, rows of `members` (pattern, tensor) to be joined."""
        if any(map(_of_quantizer, converter.operations)):
            self.refused[name] = (
                "transformers dequantises its parts to put them together: such experts are opened "
                "in FP8 and MXFP4, and in others by transformers alone"
            )
            return

        one, stand_ins = copy.deepcopy(converter), StandIns(self.checkpoint)
        try:
            for pattern, tensor in members:
                one.add_tensor(name, tensor, pattern, stand_ins.of(tensor))
            with stand_ins:
                made = one.convert(name, model=self.model, config=self.model.config)
            sources = {
                new: stand_ins.source(found[0] if isinstance(found, list) else found)
                for new, found in made.items()
            }
        except Exception as error:  # any, from an operation of transformers
            operations = ", ".join(map(repr, converter.operations))
            listed = ", ".join([tensor for _, tensor in members[:4]] + ["..."] * (len(members) > 4))
            first, *others = converter.target_patterns
            self.refused[name] = (
                f"transformers makes it of {listed} by {operations}, "
                f"which is not a choice of their rows ({first_line(error)})"
            )
            for other in others:
                self.refused[name.replace(first, other)] = f"it is made together with {name}"
            return
        for new, source in sources.items():
            self._add(new, source)

    def check(self, options: Options) -> None:
        """Raise one StateDictMismatchError for all mismatches that the options do not allow."""
        path, strict = self.checkpoint.path, options.strict
        state = self.model.state_dict(keep_vars=True)
        known = (*self.fill, *self.refused, *self.computed)
        filled = {id(state[name]) for name in known if name in state}
        info = SimpleNamespace(
            missing_keys={name for name, t in state.items() if id(t) not in filled},
            unexpected_keys={*self.unexpected.values(), *(n for n in self.fill if n not in state)},
        )
        leave_out_what_is_ignored(self.model, info)
        missing = {id(t): name for name, t in reversed(state.items()) if name in info.missing_keys}
        unexpected = [t for t, name in self.unexpected.items() if name in info.unexpected_keys]
        unexpected += [n for n in self.fill if n not in state and n in info.unexpected_keys]
        if not missing:
            unexpected = self._of_the_body(unexpected)
        shapes = [
            ShapeMismatch(name, tuple(state[name].shape), found)
            for name, source in self.fill.items()
            if name in state and (found := source.shape or ()) != tuple(state[name].shape)
        ]
        problems = [f"{name}: {why}" for name, why in self.refused.items()]
        problems += self._lacking_scales(state, unexpected)
        loaded, left_out = len(filled) - len(shapes), shapes
        if options.shapes == "skip":
            shapes = []
        refused = problems or (strict and (missing or unexpected))
        if refused or shapes:
            raise StateDictMismatchError(
                path,
                missing=sorted(missing.values()) if strict else (),
                unexpected=unexpected if strict else (),
                wrong_shape=shapes,
                problems=problems,
                suggestions=() if refused else skipping_shapes(loaded, len(missing) + len(shapes)),
            )
        kinds: dict[str, Sequence[object]] = {
            "not in the checkpoint, and initialized as in a new model": sorted(missing.values()),
            "of another shape, and initialized likewise": left_out,
            "not in the model, and ignored": unexpected,
        }
        parts = [f"{len(names)} {kind}{listed(names)}" for kind, names in kinds.items() if names]
        if parts and loaded:  # the load itself warns if nothing matches
            said = f"{path}: not all of {type(self.model).__name__} matches: {'; '.join(parts)}"
            said += "; strict=True makes that an error" * bool(missing or unexpected)
            warnings.warn(said, UserWarning, stacklevel=callers_level())

    def _lacking_scales(self, state: Mapping[str, Any], unexpected: list[str]) -> list[str]:
        """Return why packed weights of float parameters cannot load: their scales match nothing."""
        modules: dict[str, list[str]] = {}
        for tensor in unexpected:
            owner = self.checkpoint.members.get(tensor)
            name = tensor if owner is None else owner.name
            modules.setdefault(name.rpartition(".")[0], []).append(tensor)
        out = []
        for tensor, name in self.first.items():
            stored, module = self.checkpoint.tensors[tensor].dtype, tensor.rpartition(".")[0]
            if module not in modules or (stored.kind == "float" and stored.bits > 8):
                continue
            dtype = state[name].dtype
            if dtype.is_floating_point and str(dtype) != f"torch.{stored.name}":
                lost = ", ".join(modules[module])
                out.append(
                    f"{name}: it is stored as {stored}, and {lost} has no place in the model"
                )
        return out

    def _of_the_body(self, unexpected: list[str]) -> list[str]:
        """Return unexpected tensors, without those of a head if only the body is to be loaded.

        In a checkpoint with a head, names of the body have a prefix that names of the head lack.
        """
        prefix = f"{self.model.base_model_prefix}."
        is_body = bool(self.model.base_model_prefix) and self.model.base_model is self.model
        if not is_body or not any(name.startswith(prefix) for name in self.checkpoint.tensors):
            return unexpected
        return [name for name in unexpected if name.startswith(prefix)]


def whole(checkpoint: Checkpoint, tensor: str) -> Source:
    """Return a `Source` of all rows of a tensor, unchanged."""
    return Source((all_of(checkpoint.tensors[tensor]),), shape=model_shape(checkpoint, tensor))
