"""`from_pretrained`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from streamload.checkpoint.checkpoint import open_checkpoint
from streamload.checkpoint.url import Url
from streamload.decide import on_unstored
from streamload.devices.names import framework
from streamload.errors import DeviceError, StateDictMismatchError
from streamload.load import load_state_dict
from streamload.lookup import open_devices
from streamload.options import ChangeOptions, LoadOptions, StreamOptions, WeightOptions, takes
from streamload.planning.budget import BudgetLike
from streamload.planning.planner import Residence
from streamload.progress import Progress
from streamload.report import LoadReport
from streamload.transformers.configuration import configuration_of, on_meta
from streamload.transformers.dtypes import Dtypes
from streamload.transformers.names import Names
from streamload.transformers.rest import (
    beside_nbytes,
    different_values,
    finish,
    initialise_the_rest,
    stored_otherwise,
    untie,
)
from streamload.units import parse_bytes


class ModelOptions(WeightOptions, ChangeOptions, StreamOptions, total=False):
    """The options of `from_pretrained`; see `streamload.options.LoadOptions`."""

    budget: BudgetLike
    device: str | Sequence[str] | None
    residence: Residence
    strict: bool
    progress: Progress


@takes()
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    model_class: Any = None,
    config: Any = None,
    attn_implementation: str | None = None,
    **options: Unpack[ModelOptions],
) -> Any:
    """Load a model of transformers, streamed under a budget in bytes.

    What comes back is what transformers' own ``from_pretrained`` gives: the same class, weights,
    ties, buffers and generation config, in evaluation mode. Nothing is downloaded.

    Args:
        path: a folder with ``config.json`` and safetensors files, one of those files, an index, or
            ``org/name`` in the local Hugging Face cache.
        budget: most bytes on each device, as in `streamload.load_state_dict`. What the checkpoint
            does not hold counts too: missing parameters, those of other shapes, and buffers that
            transformers computes (as many bytes stay free on each of several devices).
        device: "cuda:0", "cpu" or another of torch's; a list of devices that the layers are split
            over, dispatched by accelerate. None: ``STREAMLOAD_DEVICE``, else torch's default, else
            the first accelerator, else the CPU. In a list of GPUs and "cpu", accelerate keeps the
            CPU's share in host memory, and brings it to the first GPU a layer at a time to compute
            there: when the model runs, that layer takes memory of the GPU beyond the budget.
        dtype: a dtype or its name, "checkpoint" (each weight as it is stored), or patterns by the
            checkpoint's names, the first that matches deciding. None, and for what no pattern
            matches: what ``config.json`` says, or where it does not, the dtype of the
            checkpoint's first float, as transformers' ``dtype="auto"`` has it; bfloat16 becomes
            float16 where a device does not compute in it. What transformers keeps in float32 in a
            16-bit model stays so, except under "checkpoint" and patterns other than ``"*"``.
        model_class: a class of transformers, an Auto class or one of your own; None takes the one
            that ``config.json`` names.
        config: a configuration to use in place of ``config.json``; it is copied.
        attn_implementation: "eager", "sdpa", ...; None lets transformers choose.
        strict: missing and unexpected names and other shapes are an error, except for names that
            the model's class says may be ignored. With False, what matches is loaded, the rest is
            initialised as transformers does it, at random, and the report names it. What is
            initialised counts against the budget.
        reserve: as in `streamload.load_state_dict`; beside what the model has of its own.
        context: as in `streamload.load_state_dict`; the cache is that of transformers, full.
        **options: see `ModelOptions`.

    Returns:
        The model, a ``transformers.PreTrainedModel``; its ``streamload_report`` is the
        `LoadReport`, and with several devices its ``hf_device_map`` says what is where.

    Raises:
        CheckpointError: there is no configuration or no class for it, the checkpoint is quantised
            or needs code of its own, or is invalid.
        StateDictMismatchError: names or shapes do not match, or transformers makes a parameter of
            the checkpoint's tensors in a way that is not a choice of rows; before any data is
            loaded.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated. Where
            the checkpoint stores apart what ``config.json`` ties, and that fits once and not
            twice, both are read first, to see whether they differ.
        BudgetExceededError: something holds memory that the plan counts on.
        MemoryTakenError: others took memory meanwhile, and the load does not fit any more.
        UnsupportedCastError: a dtype cannot be cast or held.
        OutOfRangeError: under ``out_of_range="error"``.
        DeviceError: a device is not there, does not work or failed, or there are several and
            accelerate is not installed.
        ValueError: an argument is invalid.
    """
    device, strict = options["device"], options["strict"]
    if not isinstance(strict, bool):
        raise ValueError(f"strict is True or False, not {strict!r}")
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a checkpoint, not {type(path).__name__}")
    _check_accelerate(device)
    checkpoint = open_checkpoint(path)
    given = config is not None
    config = configuration_of(checkpoint, config)
    if given:  # what it needs to run follows from it, too
        checkpoint = replace(checkpoint, config=config.to_dict())
    found = checkpoint.path
    config.name_or_path = str(found) if isinstance(found, Url) else os.fsdecode(path)
    devices = open_devices(device, framework("torch"), {})
    chosen = Dtypes.choose(
        checkpoint, config, options["dtype"], options["budget"], options["cast"], devices
    )
    model = on_meta(checkpoint, config, model_class, chosen.main, attn_implementation)
    names = Names.of(model, checkpoint)
    names.check(model, checkpoint, strict)
    untie(model, checkpoint, names, stored_otherwise)

    def load() -> LoadReport:
        beside = beside_nbytes(model, names, devices)
        asked: LoadOptions = {
            **options,
            "dtype": chosen.rules(model, checkpoint, names),
            "rename": lambda name: name if name in names.fill else None,
            "mapping": names.fill,
            "strict": False,  # `names.check` knows what may be ignored
            "reserve": parse_bytes(options["reserve"]) + beside,
        }
        return load_state_dict(model, checkpoint, **asked)

    try:
        report = load()
    except StateDictMismatchError:
        # it compares what is tied and stored twice when it knows that all fits, and has read and
        # allocated nothing else; transformers leaves apart what differs
        if not untie(model, checkpoint, names, different_values):
            raise
        report = load()
    # what it says about buffers without values is true no longer
    stale = on_unstored(framework("torch").unstored(model), report.plan)
    report = replace(report, notes=tuple(note for note in report.notes if note not in stale))
    initialise_the_rest(model, checkpoint, report)
    finish(model, checkpoint, names, report)
    return model


def _check_accelerate(device: object) -> None:
    """Raise DeviceError for several devices where accelerate is not installed."""
    if device is None or isinstance(device, str) or not isinstance(device, Sequence):
        return
    if len(device) > 1 and importlib.util.find_spec("accelerate") is None:
        raise DeviceError(
            ", ".join(map(str, device)),
            "a model runs on several devices by accelerate, which is not installed "
            "(pip install accelerate)",
        )
