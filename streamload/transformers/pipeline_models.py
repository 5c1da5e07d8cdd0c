"""The models of a pipeline of diffusers, built on the meta device and matched to checkpoints."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import accelerate
import diffusers
import torch

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.weights import Packed
from streamload.core.dtypes import parse_dtype
from streamload.errors import ShapeMismatch, StateDictMismatchError
from streamload.loading.options import Options
from streamload.loading.place import Devices
from streamload.loading.report import LoadReport
from streamload.planning.sources import Source
from streamload.transformers.configuration import Wanted
from streamload.transformers.dtypes import split_rules
from streamload.transformers.names import whole
from streamload.transformers.prepared import Prepared
from streamload.transformers.quantizers.coded import CodedCheckpoint, held_as_stored
from streamload.transformers.rows import Converted


@dataclass(frozen=True, slots=True)
class Diffused:
    """A model of diffusers on the meta device, matched to a checkpoint and ready to load."""

    model: Any
    checkpoint: Checkpoint
    fill: Mapping[str, Source]
    asked: Any  # the caller's ``dtype=`` for this model
    computed: Mapping[str, torch.Tensor]  # buffers that the checkpoint lacks, by name

    @classmethod
    def of(cls, model_class: Any, checkpoint: Checkpoint, folder: Path, asked: Any) -> Diffused:
        """Build and match a model as diffusers does; `asked`: its dtype; reads headers only."""
        model = in_dtype(on_meta(model_class, folder), checkpoint, asked)
        checkpoint, formats = held_as_stored(checkpoint, model)
        names: dict[str, Any] = {name: name for name in checkpoint.tensors}
        if len(checkpoint.shards) == 1:
            model._fix_state_dict_keys_on_load(names)  # names of older versions
        new = {old: (name, None) for name, old in names.items()}
        buffers = dict(model.named_buffers())
        CodedCheckpoint(checkpoint, formats=formats).put(model, new.__getitem__)
        model.register_to_config(_name_or_path=str(folder))
        fill = {new: whole(checkpoint, old) for new, old in names.items()}
        return cls.matched(model, checkpoint, fill, asked, buffers)

    @classmethod
    def matched(
        cls,
        model: Any,
        checkpoint: Checkpoint,
        fill: Mapping[str, Source],
        asked: Any,
        buffers: Mapping[str, torch.Tensor],
    ) -> Diffused:
        """Match a model on the meta device to the rows of a checkpoint, by the model's names.

        `buffers`: the model's own, with values.
        """
        state, ignored = model.state_dict(), model._keys_to_ignore_on_load_unexpected or ()
        unexpected = [
            name
            for name in fill
            if name not in state and not any(re.search(pattern, name) for pattern in ignored)
        ]
        fill = {name: source for name, source in fill.items() if name in state}
        missing = [name for name in state if name not in fill]
        shapes = [
            ShapeMismatch(name, tuple(state[name].shape), source.shape or ())
            for name, source in fill.items()
            if tuple(state[name].shape) != source.shape
        ]
        if missing or unexpected or shapes:
            raise StateDictMismatchError(
                checkpoint.path, missing=missing, unexpected=unexpected, wrong_shape=shapes
            )
        for name, buffer in buffers.items():
            if name in fill:  # its values come from the checkpoint
                _put(model, name, buffer.to("meta"))
        computed = {name: buffer for name, buffer in buffers.items() if name not in fill}
        return cls(model, checkpoint, fill, asked, computed)

    @property
    def kept(self) -> set[str]:
        """The tensors of modules that diffusers keeps in float32 in a 16-bit model."""
        kept = set(self.model._keep_in_fp32_modules or ())
        return {
            source.rows[0].tensor
            for name, source in self.fill.items()
            if kept.intersection(name.split("."))
        }

    def rules(self) -> dict[str, Any]:
        """Return the dtypes of the load, by pattern of the checkpoint's names."""
        given, rest = split_rules(self.asked, None)
        if rest == "checkpoint":
            return {**given, "*": rest}
        tensors, kept = self.checkpoint.tensors, self.kept
        fixed: dict[str, str] = {}
        for name, source in self.fill.items():
            info = tensors[source.rows[0].tensor]
            if info.name in kept and info.dtype.kind == "float":
                fixed[glob.escape(info.name)] = "float32"
            elif isinstance(info, Packed) and rest is None:
                dtype = self.model.get_parameter(name).dtype
                fixed[glob.escape(info.name)] = str(dtype).removeprefix("torch.")
        return given | fixed if rest is None else {**given, **fixed, "*": rest}

    def beside_nbytes(self, devices: Devices) -> int:
        """Return the bytes of the buffers that the model computes and the checkpoint lacks."""
        return sum(buffer.nbytes for buffer in self.computed.values())

    def untied(self) -> bool:
        """Return whether weights were untied: never, as models of diffusers tie none."""
        return False

    def finish(self, report: LoadReport) -> None:
        """Move computed buffers to the device; set evaluation mode and ``streamload_report``."""
        device = torch.device(report.plan.devices[0].device)
        for name, buffer in self.computed.items():
            _put(self.model, name, buffer.to(device))
        self.model.eval()
        self.model.streamload_report = report


def _put(model: Any, name: str, buffer: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    model.get_submodule(module)._buffers[leaf] = buffer


#: A model of a pipeline, of diffusers or of transformers.
Part: TypeAlias = Diffused | Prepared


def part_of(
    model_class: Any,
    folder: Path,
    checkpoint: Checkpoint,
    asked: Any,
    devices: Devices,
    options: Options,
    converted: Converted | None = None,
) -> Part:
    """Build one model of a pipeline on the meta device, and match it.

    ``folder`` has the configuration. ``converted``: rows that fill a model of transformers; None:
    by name.
    """
    if issubclass(model_class, diffusers.ModelMixin):
        return Diffused.of(model_class, checkpoint, folder, asked)
    main = _main(checkpoint)
    # the configuration may state that of another variant
    changes = {"dtype": main} if main else {}
    return Prepared.of(
        checkpoint,
        str(folder),
        Wanted(model_class=model_class, config=folder, changes=changes, converted=converted),
        devices,
        asked,
        options,
    )


def on_meta(model_class: Any, config: Path | Mapping[str, Any]) -> Any:
    """Build a model of diffusers without values; `config`: its configuration, or the folder."""
    if not isinstance(config, Mapping):
        config = model_class.load_config(str(config), local_files_only=True)
    with accelerate.init_empty_weights():  # buffers that the model computes have values
        return model_class.from_config(config)


def in_dtype(model: Any, checkpoint: Checkpoint, asked: Any) -> Any:
    """Return a model with empty parameters in a dtype: `asked`, or that of most tensors."""
    main, (_, rest) = _main(checkpoint), split_rules(asked, None)
    if rest not in (None, "checkpoint"):
        main = parse_dtype(rest).name
    for parameter in model.parameters() if main else ():
        parameter.data = parameter.data.to(getattr(torch, main))
    return model


def _main(checkpoint: Checkpoint) -> str:
    """Return the name of the dtype of most bytes of a checkpoint's floats; "" without floats."""
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype.kind == "float" and info.name not in checkpoint.members:
            stored[info.dtype.name] += info.nbytes
    return stored.most_common(1)[0][0] if stored else ""
