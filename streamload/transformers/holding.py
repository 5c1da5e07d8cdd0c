"""For conversions: which weights modules can hold quantized, and whether a result can be opened.

Models are built on the meta device; only headers and ``config.json`` are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.codecs.scheme import SCHEMES, CodedWeight
from streamload.core.dtypes import F32, parse_dtype
from streamload.core.tensors import whole
from streamload.devices.names import framework
from streamload.errors import StateDictMismatchError, StreamloadError
from streamload.loading.options import Options
from streamload.loading.place import open_devices
from streamload.transformers.configuration import Wanted, configuration_of, first_line, on_meta
from streamload.transformers.dtypes import COMPUTED_IN
from streamload.transformers.internals import should_convert_module
from streamload.transformers.loading import from_pretrained
from streamload.transformers.names import Names
from streamload.transformers.prepared import Prepared
from streamload.transformers.quantizers.coded import CodedCheckpoint
from streamload.transformers.quantizers.stored import method_of, missing, stated_in
from streamload.transformers.saving import left_by_theirs, own_config, would_be_floats

_LAYER = re.compile(r"(.*?)\.(\d+)\.(.*)")
_SMALL_NBYTES = 2**26  # loaded and run at once


def holding(checkpoint: Checkpoint, formats: Mapping[str, str]) -> dict[str, Any] | None:
    """Find tensors that modules can hold quantized to `formats` (format by name of the tensor).

    Returns fields of `streamload.conversion.openable.Verdict`, and ``holders``, the classes of
    modules that can hold such weights, in words; None if the model cannot be built or matched.
    """
    try:
        config = configuration_of(checkpoint, Wanted())
        stated = str(getattr(config, "dtype", None)).removeprefix("torch.")
        dtype = parse_dtype(stated) if stated in COMPUTED_IN else F32
        model = on_meta(checkpoint, config, Wanted(), dtype)
        names = Names.of(model, checkpoint)
        names.check(Options.parse())
    except Exception:  # any, from transformers or a model's own code
        return None
    alone = {
        source.rows[0].tensor: name
        for name, source in names.fill.items()
        if source.transpose is None
        and source.rows == (whole(checkpoint.tensors[source.rows[0].tensor]),)
    }
    parts = {r.tensor: name for name, source in names.fill.items() for r in source.rows}
    swap = framework("torch").swap(model, {alone[t]: f for t, f in formats.items() if t in alone})
    coded: dict[str, CodedWeight] = {}
    left: dict[str, str] = {}
    for tensor in formats:
        name = alone.get(tensor, "")
        if name in swap.coded and len(swap.coded[name].shape) == 2:
            coded[tensor] = swap.coded[name]
        elif tensor in parts:
            module = model.get_submodule(parts[tensor].rpartition(".")[0])
            left[tensor] = swap.refused.get(name, type(module).__name__)
        else:
            left[tensor] = "none of the model"
    stays = _kept_in_float32(model, {alone[t]: t for t in coded}, set(formats.values()))
    left |= dict.fromkeys(stays, "kept in float32 by transformers")
    coded = {tensor: each for tensor, each in coded.items() if tensor not in stays}
    modules = said = None
    if coded:
        modules = left_by_theirs(model, {alone[tensor]: each for tensor, each in coded.items()})
        turned = any(c.transposed and not SCHEMES[c.format].of_linears for c in coded.values())
        if not turned and not would_be_floats(coded.values()):
            said = own_config(coded)
    return {"holders": swap.holders, "left": left, "modules": modules, "said": said}


def _kept_in_float32(model: Any, tensors: Mapping[str, str], formats: set[str]) -> list[str]:
    """Return the `tensors` (by parameter) that transformers leaves in float32 for bitsandbytes."""
    said = SCHEMES[next(iter(formats))].config([], "float32") if len(formats) == 1 else None
    kept = list(model._keep_in_fp32_modules or ())
    if said is None or said["quant_method"] != "bitsandbytes" or not kept:
        return []
    modules = {name.rpartition(".")[0]: tensor for name, tensor in tensors.items()}
    return [t for module, t in modules.items() if not should_convert_module(module, kept)]


def why_not_opened(folder: Path) -> str:
    """Return why `from_pretrained` does not open a checkpoint; "" if it does.

    "" also if opening needs a package that is not installed, or another machine. A checkpoint
    without quantized weights may lack tensors, and have more, but no layers and shapes of another
    model than that of its config.json.
    """
    checkpoint, said = open_checkpoint(folder), None
    try:
        config = configuration_of(checkpoint, Wanted())
        said, stated = stated_in(config)
        if said is None:
            return _other_model(checkpoint, config)
        ours = CodedCheckpoint.of(checkpoint, config) is not None
        if missing(method_of(stated)) and not ours:
            return ""
        devices = open_devices("cpu", framework("torch"), {})
        Prepared.of(checkpoint, str(folder), Wanted(), devices, None, Options.parse())
    except StreamloadError as error:
        return "" if said is None or "does not run on" in str(error) else first_line(error)
    return ""


def _other_model(checkpoint: Checkpoint, config: Any) -> str:
    """Return why a checkpoint is of another model than ``config``: shapes, or whole layers."""
    try:
        names = Names.of(on_meta(checkpoint, config, Wanted(), F32), checkpoint)
    except Exception:  # any, from transformers or a model's own code
        return ""
    try:
        names.check(Options.parse())
    except StateDictMismatchError as error:
        filled, stored = _layers(names.fill), _layers(checkpoint.tensors)
        more = _layers(error.unexpected)
        whole = {layer for layer, inner in more.items() if inner == stored.get(layer)}
        alike = [inner for layer, inner in stored.items() if layer not in whole]
        stacks = {stack for stack, _ in filled}
        is_other = (
            error.wrong_shape
            or any(s in stacks and (s, n) not in filled for s, n in _layers(error.missing))
            or any(stored[layer] in alike for layer in whole)  # else it predicts more tokens
        )
        return first_line(error) if is_other else ""
    return ""


def _layers(names: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """Return names within layers, by the name of their list and their number."""
    out: dict[tuple[str, str], set[str]] = {}
    for found in filter(None, map(_LAYER.fullmatch, names)):
        out.setdefault((found[1], found[2]), set()).add(found[3])
    return out


def why_not_run(folder: Path) -> str:
    """Return why a checkpoint's language model does not compute two tokens on the CPU; "" if so.

    "" also for models that take no tokens, and for checkpoints that are not small.
    """
    if open_checkpoint(folder).nbytes > _SMALL_NBYTES:
        return ""
    try:
        model = from_pretrained(folder, device="cpu", progress=False)
        if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
            return ""
        with torch.inference_mode():
            found = model(input_ids=torch.tensor([[1, 2]]))[0]
    except StreamloadError:
        return ""  # `why_not_opened` reports it
    except Exception as error:  # any, from a model's own code
        return f"its model does not compute: {first_line(error)}"
    return "" if bool(found.isfinite().all()) else "its model computes NaN or infinity"
