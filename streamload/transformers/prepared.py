"""The steps of `from_pretrained`: build on the meta device, match, load or offload, finish."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.weights import CONFIG_KEYS
from streamload.core.dtypes import DTypeArgument
from streamload.devices.names import framework
from streamload.errors import (
    CheckpointError,
    OffloadError,
    PlanInfeasibleError,
    StateDictMismatchError,
)
from streamload.loading.load import load_under
from streamload.loading.options import Options
from streamload.loading.place import Devices, on_unstored
from streamload.loading.report import LoadReport
from streamload.offloading.offload import OFFLOAD, Offloaded, offload_under
from streamload.planning.dequantize import all_dequantized, decoded_always, dequantized
from streamload.planning.match import same_bytes
from streamload.planning.moves import DTypePolicy
from streamload.planning.sources import Source
from streamload.transformers.configuration import Wanted, configuration_of, on_meta, outer_of
from streamload.transformers.dtypes import Dtypes
from streamload.transformers.names import Names, Renames
from streamload.transformers.quantizers.coded import CodedCheckpoint
from streamload.transformers.quantizers.on_the_way import QuantizedOnLoad
from streamload.transformers.quantizers.stored import Quantization, QuantizedCheckpoint
from streamload.transformers.rest import (
    beside_nbytes,
    finish,
    initialise_the_rest,
    stored_alike,
    untie,
)
from streamload.transformers.saving import as_coded

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model on the meta device, matched to a checkpoint and ready to load or offload."""

    model: Any
    checkpoint: Checkpoint
    wanted: Wanted
    names: Names
    dtypes: Dtypes
    quantized: Quantization

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        name: str,
        wanted: Wanted,
        devices: Devices,
        dtype: DTypeArgument,
        options: Options,
    ) -> Prepared:
        """Build a model on the meta device, and match it to a checkpoint; reads headers only.

        `name`: the configuration's ``name_or_path``; `dtype`: the caller's ``dtype=``.
        """
        config, stored = configuration_of(checkpoint, wanted), checkpoint
        checkpoint = dequantized(checkpoint, decoded_always(checkpoint))
        if all_dequantized(checkpoint):
            for key in CONFIG_KEYS:
                config.__dict__.pop(key, None)
        elif stored.config.get("model_type") not in (None, config.model_type):
            for key in CONFIG_KEYS:  # of a whole, for one of its parts
                if key in stored.config and getattr(config, key, None) is None:
                    setattr(config, key, copy.deepcopy(stored.config[key]))
        if wanted.config is not None or wanted.changes:  # the size of the KV cache depends on it
            checkpoint = replace(checkpoint, config=config.to_dict())
        config.name_or_path = name
        quantized = quantized_as(checkpoint, config, wanted.quantization)
        mapping, quantizer = wanted.key_mapping, quantized.quantizer
        dtypes = Dtypes.choose(checkpoint, config, dtype, options, devices).updated(quantizer)
        model = on_meta(checkpoint, config, wanted, dtypes.main)
        model.config.name_or_path = name  # an Auto class may have taken a part of `config`
        outer = outer_of(stored, model, wanted, dtypes.main)
        if wanted.distribution is not None:
            if type(quantized) is not Quantization:
                raise CheckpointError(
                    checkpoint.path,
                    "cannot load quantized weights with distributed_config=",
                    expected="weights of floats",
                )
            model = wanted.distribution.apply(model)

        def renames(*, of_quantizer: bool = True) -> Renames:
            return Renames.of(model, mapping, quantizer if of_quantizer else None, outer)

        quantized.prepare(model, devices, renames)
        checkpoint = quantized.checkpoint
        if wanted.converted is not None:
            names = Names.of_converted(model, checkpoint, wanted.converted)
        else:
            names = Names.of(model, checkpoint, mapping, quantizer, outer)
        quantized.check(model, names)
        names.check(options)
        untie(names, stored_alike)
        quantized.stage(model, names)
        return cls(model, checkpoint, wanted, names, dtypes, quantized)

    @property
    def fill(self) -> Mapping[str, Source]:
        """The rows of the checkpoint that fill each parameter, by its name."""
        return self.names.fill

    def rules(self) -> dict[str, Any]:
        """Return the ``dtype=`` of the load: dtypes by pattern of the checkpoint's names."""
        return self.dtypes.rules(self.names)

    def beside_nbytes(self, devices: Devices) -> int:
        """Return the bytes to keep free on each device for tensors that the checkpoint lacks."""
        return beside_nbytes(self.names, devices) + self.quantized.beside_nbytes

    def load(self, devices: Devices, adapter_nbytes: int, options: Options) -> LoadReport:
        """Load the model, and keep `adapter_nbytes` free on each device for an adapter."""
        asked = self._asked(devices, adapter_nbytes, options)
        try:
            report = load_under(self.model, self.checkpoint, asked, {"path": self.checkpoint.path})
        except PlanInfeasibleError as error:
            stays = adapter_nbytes or self.quantized.stays
            raise error.calling(OFFLOAD, "" if stays else "offload=True") from None
        return self._noted(report)

    def _noted(self, report: LoadReport) -> LoadReport:
        """Return a load's report with the notes on quantized weights added."""
        return replace(report, notes=(*report.notes, *self.quantized.notes))

    def offload(self, devices: Devices, options: Options) -> Offloaded:
        """Offload the model; OffloadError if quantized weights cannot stream."""
        self.check_streams()
        offloaded = offload_under(self.model, self.checkpoint, self._asked(devices, 0, options))
        offloaded.load = self._noted(offloaded.load)
        return offloaded

    def check_streams(self) -> None:
        """Raise OffloadError if quantized weights cannot stream."""
        if self.quantized.stays:
            raise OffloadError(f"{self.checkpoint.path}: {self.quantized.stays}")

    def _asked(self, devices: Devices, beside_nbytes: int, options: Options) -> Options:
        """Return the options of a load, which skips wrong shapes that `Names.check` allowed."""
        beside_nbytes += self.beside_nbytes(devices)
        return replace(filling(options, self.fill, self.rules(), beside_nbytes), shapes="skip")

    def untied(self) -> bool:
        """Untie weights whose two stored copies differ; return whether there were any."""
        return untie(self.names, same_bytes)

    def finish(self, report: LoadReport) -> None:
        """Initialize tensors that the checkpoint lacks, and make the loaded model ready for use."""
        is_meta = torch.get_default_device().type == "meta"  # where nothing can be computed
        with torch.device("cpu") if is_meta else nullcontext():
            self.quantized.assemble(self.model)
            initialise_the_rest(self.model, self.checkpoint, report)
            finish(self.names, report, self.wanted)
            self.quantized.finish(self.model)
            as_coded(self.model, getattr(self.model, "hf_quantizer", None))


def quantized_as(checkpoint: Checkpoint, config: Any, asked: Any) -> Quantization:
    """Return the `Quantization` of stored weights, else of the caller's `asked`, else no steps."""
    stored = CodedCheckpoint.of(checkpoint, config, asked) or QuantizedCheckpoint.of(
        checkpoint, config, asked
    )
    if stored is None and asked is not None:
        return QuantizedOnLoad.asked(checkpoint, config, asked)
    return stored or Quantization(checkpoint)


def filling(
    options: Options, fill: Mapping[str, Source], dtype: DTypeArgument, beside_nbytes: int
) -> Options:
    """Return `options` of a load that fills the names in `fill`, reserving `beside_nbytes` more."""
    return replace(
        options,
        policy=DTypePolicy.parse(dtype, options.policy.fp16_cast),
        rename=lambda name: name if name in fill else None,
        mapping=fill,
        strict=False,
        reserve_nbytes=options.reserve_nbytes + beside_nbytes,
    )


def load_untied(load: Callable[[], _Loaded], *models: Any) -> _Loaded:
    """Return `load()`; if tied weights are stored with two values, untie `models` and load again.

    A load compares the two copies after planning, before it reads or allocates anything else.
    """
    try:
        return load()
    except StateDictMismatchError:
        if not any([model.untied() for model in models]):
            raise
        return load()


def without_stale_notes(report: LoadReport, model: Any) -> LoadReport:
    """Return a report without notes on buffers that are empty now, and computed after the load."""
    stale = on_unstored(framework("torch").unstored(model), report.plan)
    return replace(report, notes=tuple(note for note in report.notes if note not in stale))
