"""Stream model weights onto devices that are too small for the usual loaders.

`load_state_dict` loads a safetensors checkpoint to a device: in chunks, with an optional dtype
cast, under a budget in bytes that it never exceeds. `streamload.transformers` does so for models of
transformers, `streamload.diffusers` for pipelines, `streamload.distributed` across nodes; they are
imported when they are first used.
"""

from streamload.core.interrupt import end_by_interrupts, is_command

if is_command():  # until `streamload.cli.main` runs
    end_by_interrupts()

from streamload.core import system as _system  # noqa: F401  (first: it names unsupported systems)

# isort: split
import importlib
from typing import TYPE_CHECKING, Any

from streamload import errors
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.codecs.cast_table import CastCounts
from streamload.conversion.openable import Judge, register_judge
from streamload.core.memory import Budget
from streamload.core.tensors import RowRange
from streamload.files.header import Limits
from streamload.loading.iterate import iterate
from streamload.loading.load import Infeasible, load_state_dict, plan, register_suggester, split
from streamload.loading.report import LoadReport
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.sources import Source

if TYPE_CHECKING:  # imported when they are first used
    from streamload.conversion.convert import ConvertReport, convert
    from streamload.distributed.offload_split import OffloadSplit, split_offload
    from streamload.offloading.offload import Offloaded, OffloadReport, offload, plan_offload
    from streamload.offloading.plan import OffloadPlan
    from streamload.offloading.stream_layers import LayerStream, stream_layers
    from streamload.verification.diff import Comparison, diff
    from streamload.verification.verify import Verification, verify_checkpoint

__version__ = "0.1.0"


def _suggest_offload(call: Infeasible) -> list[errors.Fit]:
    """Return the `Fit` of offloading a load that does not fit; imports that code when called."""
    from streamload.offloading.offload import suggest_offload

    return suggest_offload(call)


register_suggester(_suggest_offload)


#: Modules that are imported when they are first used: they need optional packages.
_LATER = ("diffusers", "distributed", "nn", "transformers")
#: Names whose modules are imported when they are first used.
_FROM_LATER = {
    "Comparison": "verification.diff",
    "ConvertReport": "conversion.convert",
    "LayerStream": "offloading.stream_layers",
    "OffloadPlan": "offloading.plan",
    "OffloadReport": "offloading.offload",
    "OffloadSplit": "distributed.offload_split",
    "Offloaded": "offloading.offload",
    "Verification": "verification.verify",
    "convert": "conversion.convert",
    "diff": "verification.diff",
    "offload": "offloading.offload",
    "plan_offload": "offloading.offload",
    "split_offload": "distributed.offload_split",
    "stream_layers": "offloading.stream_layers",
    "verify_checkpoint": "verification.verify",
}


def __getattr__(name: str) -> Any:
    """Return a public name whose module is imported when it is first used."""
    if name in _LATER:
        return importlib.import_module(f"streamload.{name}")
    if name in _FROM_LATER:
        return getattr(importlib.import_module(f"streamload.{_FROM_LATER[name]}"), name)
    raise AttributeError(f"module 'streamload' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names alone, those that are imported later, too."""
    return sorted({*__all__, *_LATER})


def _judge() -> Judge:
    """Return the module by which `convert` tests whether transformers can open its files."""
    from streamload.transformers import holding

    return holding


register_judge(_judge)

__all__ = [
    "Budget",
    "CastCounts",
    "Checkpoint",
    "Comparison",
    "ConvertReport",
    "LayerStream",
    "Limits",
    "LoadReport",
    "Node",
    "OffloadPlan",
    "OffloadReport",
    "OffloadSplit",
    "Offloaded",
    "Plan",
    "RowRange",
    "Source",
    "Verification",
    "__version__",
    "convert",
    "diff",
    "errors",
    "iterate",
    "load_state_dict",
    "offload",
    "open_checkpoint",
    "plan",
    "plan_offload",
    "split",
    "split_offload",
    "stream_layers",
    "verify_checkpoint",
]
