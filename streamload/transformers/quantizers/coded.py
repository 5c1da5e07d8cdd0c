"""Open checkpoints in the quantized layout that streamload alone reads.

`save_pretrained` writes it for weights for which transformers has no modules: fused experts, blocks
of GGUF, several formats in one model. Weights for bitsandbytes and compressed-tensors open so, too,
if these packages are not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.parts import Part
from streamload.codecs.scheme import SCHEMES, CodedWeight
from streamload.codecs.stored import read_states
from streamload.codecs.weights import QuantizedWeight
from streamload.core.dtypes import F32, PACKED
from streamload.devices.names import framework
from streamload.devices.torch.quantized import computed
from streamload.errors import CheckpointError, ShapeMismatch, StateDictMismatchError, listed
from streamload.loading.place import Devices
from streamload.planning.dequantize import dequantized
from streamload.transformers.configuration import folder_of, placeholder
from streamload.transformers.names import Renames
from streamload.transformers.quantizers.stored import (
    QuantizedCheckpoint,
    method_of,
    missing,
    stated_in,
)
from streamload.transformers.saving import METHOD, CodedConfig, CodedQuantizer, formats_of


@dataclass(slots=True)
class CodedCheckpoint(QuantizedCheckpoint):
    """The steps of `from_pretrained` for a checkpoint in streamload's own quantized layout."""

    formats: dict[str, str] = field(default_factory=dict)  # by tensor

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: Any, asked: Any = None) -> CodedCheckpoint | None:
        """Return the steps for weights in modules of streamload, or None.

        These are weights in streamload's own layout, and those of another method whose package is
        not installed, if modules of streamload hold all of them as they are stored. None if a
        caller `asked` for the method's own modules. CheckpointError if `config` is bad.
        """
        said, stated = stated_in(config)
        if said is None:
            return None
        if (method := method_of(stated)) != METHOD:
            packages = missing(method) if asked is None else []
            found = _formats_of(checkpoint) if packages else {}
            if not found:
                return None
            quantizer = CodedQuantizer(CodedConfig(**stated))
            note = f"{' and '.join(packages)} not installed: modules of streamload hold the weights"
            return cls(checkpoint, quantizer, formats=found, notes=[note])
        try:
            formats = formats_of(stated)
        except ValueError as error:
            raise CheckpointError(folder_of(checkpoint) / "config.json", str(error)) from error
        lacking = next((name for name in formats if name not in checkpoint.tensors), None)
        if lacking is not None:
            raise CheckpointError(
                checkpoint.path, "quantization_config names a tensor that is not there", lacking
            )
        return cls(checkpoint, CodedQuantizer(CodedConfig(**stated)), formats=formats)

    def prepare(self, model: Any, devices: Devices, renames: Callable[..., Renames]) -> None:
        """Put meta buffers for weights into modules; CheckpointError if no module can hold one.

        Blocks of parameters that modules need as floats, such as embeddings, are dequantized.
        """
        named = renames()
        self.formats = {
            tensor: format
            for tensor, format in self.formats.items()
            if named(tensor)[0] in named.state or not named.is_elsewhere(tensor)
        }
        self.put(model, named)

    def put(self, model: Any, named: Callable[[str], tuple[str, Any]]) -> None:
        """Do so by the names in the model that ``named`` returns, first of a pair, for tensors."""
        formats = {named(tensor)[0]: format for tensor, format in self.formats.items()}
        swap = framework("torch").swap(model, formats)
        floats = [
            tensor
            for tensor in self.formats
            if tensor in self.checkpoint.groups
            and (named(tensor)[1] is not None or named(tensor)[0] in swap.refused)
        ]
        if floats:
            self.checkpoint = dequantized(self.checkpoint, floats)
            self.formats = {t: format for t, format in self.formats.items() if t not in floats}
            formats = {named(tensor)[0]: format for tensor, format in self.formats.items()}
            swap = framework("torch").swap(model, formats)
            self.notes.append(f"dequantised, for no module holds their blocks{listed(floats)}")
        for tensor in self.formats:
            name, _ = named(tensor)
            if name not in swap.coded:
                raise CheckpointError(
                    self.checkpoint.tensors[tensor].shard,
                    f"no module can hold {name} quantised",
                    swap.holders,
                    swap.refused.get(name, "no such parameter"),
                    tensor=tensor,
                )
        groups = {name: one for name, one in self.checkpoint.groups.items() if name in self.formats}
        wrong = [
            ShapeMismatch(name, said.matrix, weight.shape or ())
            for tensor, weight in read_states(self.checkpoint.layouts, groups).items()
            if not _fits(said := swap.coded[name := named(tensor)[0]], weight)
        ]
        if wrong:
            raise StateDictMismatchError(self.checkpoint.path, wrong_shape=wrong)
        swap.put()
        stored = {named(tensor)[0]: tensor for tensor in self.formats}
        made: dict[int, list[torch.Tensor]] = {}  # by the id of codes, which modules may share
        held: list[Any] = []  # so that no id is used again
        for name in sorted(swap.coded, key=lambda each: each not in stored):
            prefix, _, leaf = name.rpartition(".")
            buffers: dict[str, Any] = model.get_submodule(prefix)._buffers
            said, old = swap.coded[name], buffers[leaf]
            held.append(old)
            parts = made.get(id(old)) or self._empty(said, stored.get(name, name))
            made[id(old)] = made[id(parts[0])] = parts
            buffers.update(zip(said.names(leaf), parts, strict=True))

    def _empty(self, said: CodedWeight, tensor: str) -> list[torch.Tensor]:
        """Return meta tensors for a weight's codes and scales, in stored shapes."""
        out = []
        for part in said.made.parts:
            info = self.checkpoint.tensors.get(part.name(tensor))
            shape = part.shape  # or with one axis more: see `layout`
            if info is not None and (_is_state(part) or (*shape, 1) == info.shape):
                shape = info.shape
            out.append(placeholder(shape, part.dtype))
        return out

    def finish(self, model: Any) -> None:
        """Do nothing: `as_coded` marks the model as quantized afterwards."""


def held_as_stored(checkpoint: Checkpoint, model: Any) -> tuple[Checkpoint, dict[str, str]]:
    """Find stored weights that modules of a model can hold as they are; dequantize the others.

    Returns the checkpoint, and the formats of those weights by tensor.
    """
    groups = read_states(checkpoint.layouts, checkpoint.groups)
    found = {name: format for name, one in groups.items() if (format := _format_of(one))}
    coded = framework("torch").swap(model, found).coded
    held = {name for name, said in coded.items() if name in groups and _fits(said, groups[name])}
    others = [name for name, one in groups.items() if name not in held and one.kind in PACKED]
    return dequantized(checkpoint, others), {name: found[name] for name in found if name in held}


def _fits(said: CodedWeight, weight: QuantizedWeight) -> bool:
    """Return whether flat codes are of a weight of the shape that a module expects.

    Axes but the last are joined. Codes with a shape of their own are compared by it elsewhere.
    """
    if weight.shape is None or weight.values.shape == weight.shape:
        return True
    stored = math.prod(weight.shape[:-1]), weight.shape[-1]
    return stored in (said.matrix, said.matrix[::-1] if said.transposed else said.matrix)


def _formats_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the format of each stored weight that modules can hold; {} if one has another."""
    groups = read_states(checkpoint.layouts, checkpoint.groups)
    found = {name: _format_of(weight) for name, weight in groups.items()}
    return found if all(found.values()) else {}


def _format_of(weight: QuantizedWeight) -> str:
    """Return the format whose parts are the stored tensors of a weight; "" if none has these."""
    stored = {each.name: (each.dtype, each.numel) for each in weight.members.values()}
    for format in computed():
        with suppress(ValueError):  # it cannot have this shape
            parts = SCHEMES[format].of(weight.shape or (), F32).parts
            wanted = {each.name(weight.name): each for each in parts}
            if wanted.keys() == stored.keys() and all(
                _is_state(each) or stored[name] == (each.dtype, math.prod(each.shape))
                for name, each in wanted.items()
            ):
                return format
    return ""


def _is_state(part: Part) -> bool:
    """Return whether a part is a state in JSON, whose length depends on the dtype that it names."""
    return part.suffix.startswith(".quant_state")
