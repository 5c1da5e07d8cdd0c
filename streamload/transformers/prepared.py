"""Build a model on the meta device, match it to a checkpoint, load it, and finish it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import DTypeArgument
from streamload.core.memory import BudgetLike
from streamload.core.patterns import Patterns
from streamload.core.progress import Progress
from streamload.core.units import parse_bytes
from streamload.devices.names import framework
from streamload.errors import OffloadError, PlanInfeasibleError, StateDictMismatchError
from streamload.loading.load import load_state_dict
from streamload.loading.options import (
    ChangeOptions,
    StreamOptions,
    WeightOptions,
)
from streamload.loading.place import Devices
from streamload.loading.prepare import Options, on_unstored
from streamload.loading.report import LoadReport
from streamload.offloading.offload import Offloaded, offload
from streamload.offloading.overrun import OnOverrun
from streamload.offloading.suggest import OFFLOAD
from streamload.planning.dequantize import asked, dequantized
from streamload.planning.match import Shapes, same_bytes
from streamload.planning.planner import Residence
from streamload.planning.requests import DTypePolicy
from streamload.planning.sources import Source
from streamload.transformers.configuration import Wanted, configuration_of, on_meta
from streamload.transformers.dtypes import Dtypes
from streamload.transformers.names import Names, Renames
from streamload.transformers.quantizers.coded import CodedCheckpoint
from streamload.transformers.quantizers.on_the_way import QuantizedOnLoad
from streamload.transformers.quantizers.stored import QuantizedCheckpoint
from streamload.transformers.rest import (
    beside_nbytes,
    finish,
    initialise_the_rest,
    stored_alike,
    untie,
)
from streamload.transformers.saving import as_coded

_Loaded = TypeVar("_Loaded")


class ModelOptions(WeightOptions, ChangeOptions, StreamOptions, total=False):
    """The options of `from_pretrained`; see `streamload.loading.options.LoadOptions`."""

    budget: BudgetLike
    device: str | Sequence[str] | None
    residence: Residence
    strict: bool
    shapes: Shapes
    progress: Progress


class OffloadOptions(TypedDict):
    """The options of offloading; see `streamload.offload`."""

    tokens: int | None
    stay: Patterns
    layers: Patterns
    host: float | str
    on_overrun: OnOverrun


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model on the meta device, and what fills it."""

    model: Any
    checkpoint: Checkpoint
    wanted: Wanted
    names: Names
    dtypes: Dtypes
    quantised: QuantizedCheckpoint | None = None

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
        """Build and match a model, whose ``name_or_path`` is `name`; reads headers only."""
        config = configuration_of(checkpoint, wanted)
        checkpoint = dequantized(checkpoint, asked(checkpoint, DTypePolicy(), blocks=True))
        if wanted.config is not None or wanted.changes:  # what it needs to run follows from it, too
            checkpoint = replace(checkpoint, config=config.to_dict())
        config.name_or_path = name
        quantised = quantized_as(checkpoint, config, wanted.quantization)
        dtypes = Dtypes.choose(checkpoint, config, dtype, options, devices)
        mapping, quantizer = wanted.key_mapping, None
        if quantised is not None:
            quantizer = quantised.quantizer
            dtypes = dtypes.updated(quantizer)
        model = on_meta(checkpoint, config, wanted, dtypes.main)
        if quantised is not None:
            quantised.prepare(model, devices, lambda: Renames.of(model, mapping, quantizer))
        names = Names.of(model, checkpoint, mapping, quantizer)
        if quantised is not None:
            quantised.check(model, names)
        names.check(model, checkpoint, options)
        untie(model, checkpoint, names, stored_alike)
        if quantised is not None:
            quantised.stage(model, names)
        return cls(model, checkpoint, wanted, names, dtypes, quantised)

    @property
    def fill(self) -> Mapping[str, Source]:
        """Sources by parameter name."""
        return self.names.fill

    def rules(self) -> DTypeArgument:
        """Dtypes by pattern."""
        return self.dtypes.rules(self.model, self.checkpoint, self.names)

    def beside_nbytes(self, devices: Devices) -> int:
        """Bytes per device for tensors that the checkpoint does not fill."""
        running_nbytes = 0 if self.quantised is None else self.quantised.beside_nbytes
        return beside_nbytes(self.model, self.names, devices) + running_nbytes

    def load(self, devices: Devices, beside_nbytes: int, options: ModelOptions) -> LoadReport:
        """Load the model and leave `beside_nbytes` free for an adapter."""
        asked = self._asked(devices, beside_nbytes, options)
        try:
            report = load_state_dict(self.model, self.checkpoint, **asked)
        except PlanInfeasibleError as error:
            stays = beside_nbytes or (self.quantised is not None and self.quantised.stays)
            raise error.calling(OFFLOAD, "" if stays else "offload=True") from None
        return self._noted(report)

    def _noted(self, report: LoadReport) -> LoadReport:
        """Add the notes on quantised weights."""
        notes = () if self.quantised is None else self.quantised.notes
        return replace(report, notes=(*report.notes, *notes))

    def offload(self, devices: Devices, options: ModelOptions, how: OffloadOptions) -> Offloaded:
        """Offload the model; raises OffloadError if its modules cannot compute on stored bytes."""
        if self.quantised is not None and self.quantised.stays:
            raise OffloadError(f"{self.checkpoint.path}: {self.quantised.stays}")
        asked = self._asked(devices, 0, options)
        offloaded = offload(self.model, self.checkpoint, **how, **asked)
        offloaded.load = self._noted(offloaded.load)
        return offloaded

    def _asked(self, devices: Devices, beside_nbytes: int, options: ModelOptions) -> dict[str, Any]:
        """Options of the load; `names.check` has matched names and shapes."""
        beside_nbytes += self.beside_nbytes(devices)
        return {**filling(options, self.fill, self.rules(), beside_nbytes), "shapes": "skip"}

    def untied(self) -> bool:
        """Untie weights that are stored with different values; whether there were any."""
        return untie(self.model, self.checkpoint, self.names, same_bytes)

    def finish(self, report: LoadReport) -> None:
        """Initialize what the checkpoint lacks, and make the model ready for use."""
        if self.quantised is not None:
            self.quantised.assemble(self.model)
        initialise_the_rest(self.model, self.checkpoint, report)
        finish(self.model, self.checkpoint, self.names, report, self.wanted)
        if self.quantised is not None:
            self.quantised.finish(self.model)
        as_coded(self.model, getattr(self.model, "hf_quantizer", None))


def quantized_as(checkpoint: Checkpoint, config: Any, asked: Any) -> QuantizedCheckpoint | None:
    """How a model is quantised: as its checkpoint is, else as `asked`; None for neither."""
    stored = CodedCheckpoint.of(checkpoint, config) or QuantizedCheckpoint.of(
        checkpoint, config, asked
    )
    if stored is not None or asked is None:
        return stored
    return QuantizedOnLoad.asked(checkpoint, config, asked)


def filling(
    options: Any, fill: Mapping[str, Source], dtype: DTypeArgument, beside_nbytes: int
) -> dict[str, Any]:
    """Options of a load whose names have been matched, with `beside_nbytes` more in reserve."""
    return {
        **options,
        "dtype": dtype,
        "rename": lambda name: name if name in fill else None,
        "mapping": fill,
        "strict": False,
        "reserve": parse_bytes(options["reserve"]) + beside_nbytes,
    }


def load_untied(load: Callable[[], _Loaded], *parts: Any) -> _Loaded:
    """Load, and again with weights untied if their stored values differ.

    A load compares them after planning, before it reads or allocates anything else.
    """
    try:
        return load()
    except StateDictMismatchError:
        if not any([part.untied() for part in parts]):
            raise
        return load()


def without_stale_notes(report: LoadReport, model: Any) -> LoadReport:
    """Drop the notes on buffers that get their values after the load."""
    stale = on_unstored(framework("torch").unstored(model), report.plan)
    return replace(report, notes=tuple(note for note in report.notes if note not in stale))
