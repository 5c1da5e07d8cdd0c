"""A model on the meta device, what fills it, and what makes it ready for use after the load."""

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
    LoadOptions,
    StreamOptions,
    WeightOptions,
)
from streamload.loading.place import Devices
from streamload.loading.prepare import Options, on_unstored
from streamload.loading.report import LoadReport
from streamload.offloading.offload import Offloaded, offload
from streamload.offloading.overrun import OnOverrun
from streamload.offloading.suggest import OFFLOAD
from streamload.planning.dequantise import asked, dequantised
from streamload.planning.match import Shapes
from streamload.planning.planner import Residence
from streamload.planning.requests import DTypePolicy
from streamload.planning.sources import Source
from streamload.transformers.configuration import Wanted, configuration_of, on_meta
from streamload.transformers.dtypes import Dtypes
from streamload.transformers.names import Names, Renames
from streamload.transformers.quantizers.coded import CodedCheckpoint
from streamload.transformers.quantizers.on_the_way import Quantising
from streamload.transformers.quantizers.stored import Quantised
from streamload.transformers.rest import (
    beside_nbytes,
    different_values,
    finish,
    initialise_the_rest,
    stored_otherwise,
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
    """What says how a model is offloaded; see `streamload.offload`."""

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
    quantised: Quantised | None = None

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
        """Build a model and match it; nothing is read but headers and ``config.json``.

        Args:
            checkpoint: the headers.
            name: what the model calls the place that it comes from.
            wanted: see `Wanted`.
            devices: where it goes.
            dtype: as in `from_pretrained`.
            options: the budget, what casts, and whether names and shapes must match.
        """
        config = configuration_of(checkpoint, wanted)
        blocks = asked(checkpoint, DTypePolicy(), blocks=True)
        checkpoint = dequantised(checkpoint, blocks)
        if wanted.config is not None or wanted.changes:  # what it needs to run follows from it, too
            checkpoint = replace(checkpoint, config=config.to_dict())
        config.name_or_path = name
        quantised = quantised_as(checkpoint, config, wanted.quantization)
        dtypes = Dtypes.choose(checkpoint, config, dtype, options, devices)
        if quantised is not None:
            dtypes = dtypes.updated(quantised.quantizer)
        model = on_meta(checkpoint, config, wanted, dtypes.main)
        mapping, quantizer = wanted.key_mapping, None
        if quantised is not None:
            quantizer = quantised.quantizer
            quantised.prepare(model, devices, lambda: Renames.of(model, mapping, quantizer))
        names = Names.of(model, checkpoint, mapping, quantizer)
        if quantised is not None:
            quantised.check(model, names)
        names.check(model, checkpoint, options)
        untie(model, checkpoint, names, stored_otherwise)
        if quantised is not None:
            quantised.stage(model, names)
        return cls(model, checkpoint, wanted, names, dtypes, quantised)

    @property
    def fill(self) -> Mapping[str, Source]:
        """Sources by parameter name."""
        return self.names.fill

    def rules(self) -> DTypeArgument:
        """The dtypes to load with."""
        return self.dtypes.rules(self.model, self.checkpoint, self.names)

    def beside_nbytes(self, devices: Devices) -> int:
        """Bytes that it takes on a device beside what the checkpoint fills."""
        running_nbytes = 0 if self.quantised is None else self.quantised.beside_nbytes
        return beside_nbytes(self.model, self.names, devices) + running_nbytes

    def load(self, devices: Devices, beside_nbytes: int, options: ModelOptions) -> LoadReport:
        """Fill it.

        Args:
            devices: where it goes.
            beside_nbytes: what else will be added to it.
            options: those of the load, as the caller gave them.
        """
        asked = self._asked(devices, beside_nbytes, options)
        try:
            report = load_state_dict(self.model, self.checkpoint, **asked)
        except PlanInfeasibleError as error:
            streams = self.quantised is None or not self.quantised.stays
            whole = streams and not beside_nbytes
            raise error.calling(OFFLOAD, "offload=True" if whole else "") from None
        return self._noted(report)

    def _noted(self, report: LoadReport) -> LoadReport:
        """A report with what is said of quantised weights."""
        notes = () if self.quantised is None else self.quantised.notes
        return replace(report, notes=(*report.notes, *notes))

    def offload(self, devices: Devices, options: ModelOptions, how: OffloadOptions) -> Offloaded:
        """Let what does not fit stream; the arguments are those of `load` and `offload`.

        Raises:
            OffloadError: its modules do not compute on the stored bytes.
        """
        if self.quantised is not None and self.quantised.stays:
            raise OffloadError(f"{self.checkpoint.path}: {self.quantised.stays}")
        asked = self._asked(devices, 0, options)
        offloaded = offload(self.model, self.checkpoint, **how, **asked)
        offloaded.load = self._noted(offloaded.load)
        return offloaded

    def _asked(self, devices: Devices, beside_nbytes: int, options: ModelOptions) -> LoadOptions:
        """What a load is asked for."""
        fill = self.fill
        asked: LoadOptions = {
            **options,
            "dtype": self.rules(),
            "rename": lambda name: name if name in fill else None,
            "mapping": fill,
            "strict": False,  # `names.check` knows what may be ignored
            "shapes": "skip",
            "reserve": parse_bytes(options["reserve"])
            + beside_nbytes
            + self.beside_nbytes(devices),
        }
        return asked

    def untied(self) -> bool:
        """Leave apart what is tied and stored with different values; whether anything was."""
        return untie(self.model, self.checkpoint, self.names, different_values)

    def finish(self, report: LoadReport) -> None:
        """Compute what no checkpoint holds, and make the model ready for use."""
        if self.quantised is not None:
            self.quantised.assemble(self.model)
        initialise_the_rest(self.model, self.checkpoint, report)
        finish(self.model, self.checkpoint, self.names, report, self.wanted)
        if self.quantised is not None:
            self.quantised.finish(self.model)
        as_coded(self.model, getattr(self.model, "hf_quantizer", None))


def quantised_as(checkpoint: Checkpoint, config: Any, asked: Any) -> Quantised | None:
    """How a model is quantised: as its checkpoint is, or as a caller asks; None where neither."""
    stored = CodedCheckpoint.of(checkpoint, config) or Quantised.of(checkpoint, config, asked)
    if stored is not None or asked is None:
        return stored
    return Quantising.asked(checkpoint, config, asked)


def load_untied(load: Callable[[], _Loaded], *parts: Any) -> _Loaded:
    """Load; again, where what is tied turned out to be stored with different values.

    A load compares it when it knows that all fits, and has read and allocated nothing else.
    transformers leaves apart what differs.
    """
    try:
        return load()
    except StateDictMismatchError:
        if not any([part.untied() for part in parts]):
            raise
        return load()


def without_stale_notes(report: LoadReport, model: Any) -> LoadReport:
    """A report without what it says about buffers that have values by now, or will have."""
    stale = on_unstored(framework("torch").unstored(model), report.plan)
    return replace(report, notes=tuple(note for note in report.notes if note not in stale))
