"""`from_pretrained` for pipelines and models of diffusers, streamed under one budget.

diffusers and transformers build the models of a pipeline and load its other components (schedulers,
tokenizers); streamload loads all models at once. Tried with diffusers 0.35.2, 0.36 and 0.42.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

import diffusers
import torch
import transformers

from streamload.checkpoint.fetch import download
from streamload.checkpoint.open import Checkpoint, from_headers, is_of_variant, open_checkpoint
from streamload.codecs.weights import Packed
from streamload.core.dtypes import DTypeArgument
from streamload.core.location import Location, Url
from streamload.devices.names import framework
from streamload.errors import CheckpointError, PlanInfeasibleError, ShardNotFoundError
from streamload.files.folder import folder_at
from streamload.files.header import Header, parse_json_object
from streamload.files.hub import cached, choose, file_of, listing, url_of
from streamload.loading.load import load_under
from streamload.loading.options import (
    CACHE,
    CHANGES,
    NAMES,
    OPTIONS,
    OffloadOptions,
    Options,
    takes,
)
from streamload.loading.place import Devices, open_devices
from streamload.loading.report import LoadReport
from streamload.offloading.offload import OFFLOAD, for_passes
from streamload.planning.dequantize import dequantized
from streamload.planning.quant_policy import QuantPolicy
from streamload.planning.sources import Source
from streamload.transformers.arguments import by_name, found_at, takes_those_of_transformers
from streamload.transformers.pipeline_models import Part, part_of
from streamload.transformers.pipeline_offload import fits_in_turns, take_turns
from streamload.transformers.pipeline_patterns import by_model, formats_of
from streamload.transformers.prepared import filling, load_untied, without_stale_notes
from streamload.transformers.single_files import (
    DOCUMENTS,
    Contents,
    InFile,
    in_file,
    is_file,
    part_in_file,
)

__all__ = ["from_pretrained"]

_T = TypeVar("_T")

_PIPELINE = "model_index.json"
_MODELS = (diffusers.ModelMixin, transformers.PreTrainedModel)
_WEIGHTS = (".safetensors", ".bin", ".msgpack", ".onnx", ".pb", ".ckpt", ".pt", ".pth")


_OF_MODELS = ("strict", "shapes", "tokens", "layers", "host", "on_overrun")


@takes_those_of_transformers
@takes(without=(*NAMES, *CHANGES, *CACHE, *_OF_MODELS))
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    pipeline_class: Any = None,
    variant: str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    components: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    config: Any = None,
    offload: bool = False,
    **options: Unpack[OffloadOptions],
) -> Any:
    """Load a pipeline of diffusers, all of its models streamed under one budget in bytes.

    The pipeline equals that of diffusers' own ``from_pretrained``, on the device: equal images for
    equal seeds. All models must fit before any data is read; with ``offload`` each model alone, or
    its largest layer.

    Args:
        path: the root of a pipeline, with its ``model_index.json``; the folder of one of its
            models, which is loaded alone; or ``org/name`` on the Hugging Face Hub. Or a single file
            in the layout of the model's authors, or a GGUF of ComfyUI-GGUF: the models that it
            holds are a pipeline; one model alone comes back as that, or with ``components`` as the
            pipeline.
        budget: most bytes on the device, of all models together, as in
            `streamload.load_state_dict`.
        device: "cuda:0", "cpu" or another of torch's; one for all. None: ``STREAMLOAD_DEVICE``,
            else torch's default, else the first accelerator, else the CPU.
        dtype: a dtype or its name, "checkpoint", or patterns by component and name:
            ``{"vae.*": "float32", "*": "float16"}``; diffusers' ``{"vae": ..., "default": ...}`` is
            taken too. None: each tensor as stored (diffusers casts all to float32), and bfloat16
            becomes float16 where a device does not compute in it. Weights that diffusers and
            transformers keep in float32 in a 16-bit model stay so, except under "checkpoint".
        quant: quantize the weights of layers on the way, as in `streamload.load_state_dict`: a
            format for all models, or by component or pattern:
            ``{"transformer": "nf4", "text_encoder_2": "int8"}``. A component that is stored
            quantized stays so.
        pipeline_class: a class of diffusers; None takes the one that ``model_index.json`` names.
        variant: "fp16" for files with "fp16" in their names; a model without such files is loaded
            from files without it.
        revision: of ``org/name``: a branch, a tag or a commit.
        subfolder: the folder in ``path`` to take.
        components: objects to use in place of components, or None to leave one out. They are taken
            as arguments too: ``safety_checker=None``, ``vae=...``; so are the arguments of the
            pipeline's class. With a single file also "*", or a path in place of the dict: the
            folder of a pipeline that has the components that the file lacks, or ``org/name``.
        config: of a single file, its configuration: the folder of a pipeline or of the model, or
            ``org/name``, of which weights are not downloaded; or the model's configuration as a
            dict. None: ``components``, if that is a folder, else what the local cache has of the
            repository in which diffusers looks for it.
        offload: one model at a time is on the device. It has the whole budget from its call
            until another needs the room; if it does not fit, layers stream from its files at
            every pass, as with `streamload.offload`. ``streamload_offload`` of the pipeline or
            model is the handle, with ``plans``, ``reports`` and ``close()``.
        stay: with ``offload``, patterns of names of weights that do not stream, with or without
            the component's name before them.
        reserve: bytes, or a size, that stay free on the device: for activations, and LoRAs.
        **options: see `OffloadOptions`.

    Returns:
        The pipeline, or the model; without ``offload`` its ``streamload_report`` is the
        `LoadReport`.

    Raises:
        CheckpointError: there is no pipeline, or a model of it is neither of diffusers nor of
            transformers, or is invalid.
        StateDictMismatchError: names or shapes do not match; before any data is loaded.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated.
        OffloadError: with ``offload``, a model cannot be offloaded.
        ValueError: an argument is invalid.

    and the errors of a load: see `streamload.load_state_dict`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a pipeline, not {type(path).__name__}")
    read, given = Options.parse(options), by_name(components)
    device = read.device
    if device is not None and not isinstance(device, str):
        raise ValueError(f'a pipeline goes to one device: device="cuda:0", not {device!r}')
    if offload:
        for_passes(read)
    elif read.stay:
        raise ValueError("stay says how a model is offloaded: write offload=True")
    if others := sorted(given.keys() & OPTIONS.keys()):  # else diffusers would ignore them
        raise ValueError(f"{others[0]} is no option here: leave it out")
    found = found_at(path, revision, subfolder)
    inside = Contents(found)
    if is_file(found):
        inside = in_file(found, config, given, lambda folder: _classes(folder, given))
        given = {**inside.left_out, **given}
    elif config is not None or "*" in given:
        name = "components with a folder" if config is None else "config"
        raise ValueError(f"{name} is for a single file, and {found} is none: leave it away")
    given.pop("*", None)
    folder = inside.folder
    if folder is not None:
        folder = _downloaded(folder, variant, {*given, *inside.models}, read)
    if isinstance(folder, Url):
        raise CheckpointError(folder, "a pipeline is loaded from a folder on this machine")
    is_pipeline = folder is not None and (folder / _PIPELINE).is_file()
    if not is_pipeline and (given or pipeline_class is not None):
        names = ", ".join(["pipeline_class"] * (pipeline_class is not None) + list(given))
        raise ValueError(f"{found} holds one model, and no pipeline: leave {names} away")
    devices = open_devices(device, framework("torch"), {})
    parts = _parts(folder, inside.models, variant, given, devices, options["dtype"], read)
    models = {name: part.model for name, part in parts.items()}
    report = offloaded = None
    if offload:
        offloaded = take_turns(parts, devices, read)
    else:
        tensors = {name: part.checkpoint.tensors for name, part in parts.items()}
        asked = by_model("quant", options["quant"], tensors, given, alone=not is_pipeline)
        quant, notes = formats_of(parts, asked)
        named = found if folder is None or inside.models else folder
        report = _load(named, parts, devices, replace(read, quant=QuantPolicy.parse(quant)))
        report = replace(report, notes=(*report.notes, *notes))
        for part in parts.values():
            part.finish(report)
    if folder is None or not is_pipeline:
        (made,) = models.values()
    else:
        kind = str(_read(folder / _PIPELINE).get("_class_name"))
        # the base class does not know which components are optional, and would load these itself
        owner = pipeline_class or getattr(diffusers, kind, diffusers.DiffusionPipeline)
        made = owner.from_pretrained(str(folder), local_files_only=True, **{**models, **given})
    if report is not None:
        made.streamload_report = report
    if offloaded is not None:
        offloaded.put_into(made)
    return made


def _downloaded(
    folder: Location, variant: str | None, given: Set[str], options: Options
) -> Location:
    """Return the folder in the local cache of a pipeline of the hub, after a download.

    Only files that a load reads are downloaded. `given`: components that are not loaded.
    """
    file, listed = file_of(folder), listing(folder)
    if file is None or listed is None:
        return folder
    if options.fetch == "stream":
        raise CheckpointError(folder, "a pipeline is loaded from files: write fetch='cache'")
    owners, names = [""], [*listed]
    if _PIPELINE in listed:
        entries = _components(url_of(file._replace(path=file.path + _PIPELINE)), given)
        names = [name for name in listed if name.partition("/")[0] in (name, *entries)]
        files = {owner: [n for n in names if n.startswith(f"{owner}/")] for owner in entries}
        owners = [
            f"{owner}/"
            for owner, entry in entries.items()
            if files[owner] and _model_class(folder, owner, entry, files[owner]) is not None
        ]
    wanted = [name for name in names if name.endswith(DOCUMENTS)]
    sizes = {url_of(file._replace(path=file.path + name)): listed[name] for name in wanted}
    for inside in owners:
        own = [name for name in names if name.startswith(inside)]
        has = variant is not None and any(
            is_of_variant(name.rpartition("/")[2], variant) for name in own
        )
        part = url_of(file._replace(path=file.path + inside))
        shards = open_checkpoint(part, variant=variant if has else None).shards
        sizes |= {h.path: h.file_nbytes for h in shards if isinstance(h.path, Url)}
    choose("cache", sizes, folder)
    download([*sizes], sum(sizes.values()), options.progress)
    first = _PIPELINE if _PIPELINE in names else "config.json"
    return cached(url_of(file._replace(path=file.path + first))).parent


def _classes(folder: Path, given: Mapping[str, Any]) -> dict[str, tuple[Any, Path]]:
    """Return class and folder of each model in a pipeline, except `given` ones, or of one model."""
    path = folder / _PIPELINE
    if not path.is_file():
        config = folder / "config.json"
        named = _read(config).get("_class_name") if config.is_file() else None
        model_class = getattr(diffusers, str(named), None)
        if model_class is None:
            expected = f"{_PIPELINE}, or a config.json with a _class_name of diffusers"
            raise CheckpointError(folder, "is no pipeline of diffusers", expected, named)
        return {"model": (model_class, folder)}
    out = {}
    for name, entry in _components(path, given.keys()).items():
        where = folder / name
        files = [file.name for file in where.iterdir()] if where.is_dir() else []
        if files and (model_class := _model_class(where, name, entry, files)) is not None:
            out[name] = model_class, where
    return out


def _components(path: Location, given: Set[str]) -> dict[str, tuple[str, str]]:
    """Return library and class of each component in a ``model_index.json``, but `given` ones."""
    return {
        name: (entry[0], entry[1])
        for name, entry in _read(path).items()
        if not name.startswith("_") and name not in given
        if isinstance(entry, list) and [type(part) for part in entry] == [str, str]
    }


def _model_class(where: Location, name: str, entry: tuple[str, str], files: list[str]) -> Any:
    """Return the class of component ``name`` if it is a model; None for a scheduler and the like.

    Raises:
        CheckpointError: it is a model of another library, which would load it outside the budget.
    """
    found = _class(*entry)
    if isinstance(found, type) and issubclass(found, _MODELS):
        return found
    if any(file.endswith(_WEIGHTS) for file in files):
        raise CheckpointError(
            where,
            "a model that is neither of diffusers nor of transformers",
            f"one of these, or {name}= with the model",
            ".".join(entry),
        )
    return None


def _read(path: Location) -> dict[str, Any]:
    return dict(parse_json_object(folder_at(path).read(path.name), path))


def _class(library: str, name: str) -> Any:
    """Return a class of a package, or of a module of diffusers.pipelines; None if there is none."""
    for module in (library, f"diffusers.pipelines.{library}"):
        with suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    return None


def _has(variant: str, folder: Path) -> bool:
    return any(is_of_variant(file.name, variant) for file in folder.iterdir())


def _parts(
    folder: Path | None,
    held: Mapping[str, InFile],
    variant: str | None,
    given: Mapping[str, Any],
    devices: Devices,
    dtype: DTypeArgument,
    options: Options,
) -> dict[str, Part]:
    """Build the models `held` in a file and those of a folder, but `given` ones, and match them."""
    classes = {} if folder is None else _classes(folder, {**given, **held})
    if variant and classes and not any(_has(variant, where) for _, where in classes.values()):
        raise ShardNotFoundError(folder or "", f"holds no file of variant {variant!r}")
    checkpoints = {
        name: open_checkpoint(where, variant=variant if variant and _has(variant, where) else None)
        for name, (_, where) in classes.items()
    }
    every = {**checkpoints, **{name: one.checkpoint for name, one in held.items()}}
    tensors = {name: each.tensors for name, each in every.items()}
    alone = folder is None or not (folder / _PIPELINE).is_file()
    asked = by_model("dtype", dtype, tensors, given, alone=alone)
    return {
        name: part_in_file(held[name], asked[name], devices, options)
        if name in held
        else part_of(*classes[name], checkpoint, asked[name], devices, options)
        for name, checkpoint in every.items()
    }


def _load(
    path: Location,
    parts: Mapping[str, Part],
    devices: Devices,
    options: Options,
) -> LoadReport:
    """Load all models as one, with component names as prefixes, under one budget."""
    checkpoint = _joined(path, parts)
    model = torch.nn.ModuleDict({name: part.model for name, part in parts.items()})

    def load() -> LoadReport:
        rules: dict[str, Any] = {}
        fill: dict[str, Source] = {}
        for name, part in parts.items():
            rules |= {f"{name}.{pattern}": dtype for pattern, dtype in part.rules().items()}
            fill |= {f"{name}.{key}": _below(name, source) for key, source in part.fill.items()}
        beside_nbytes = sum(part.beside_nbytes(devices) for part in parts.values())
        try:
            asked = filling(options, fill, rules or None, beside_nbytes)
            return load_under(model, checkpoint, asked, {"path": path})
        except PlanInfeasibleError as error:
            fits = fits_in_turns(parts, devices, options)
            # others are of all models as one
            raise error.without("quant", "device", OFFLOAD).suggesting(fits) from None

    return without_stale_notes(load_untied(load, *parts.values()), model)


def _joined(path: Location, parts: Mapping[str, Part]) -> Checkpoint:
    headers: dict[Location, Header] = {}
    for name, part in parts.items():
        for header in part.checkpoint.shards:
            first = headers.get(header.path, replace(header, tensors=(), stored={}, turns={}))
            mine = (replace(info, name=f"{name}.{info.name}") for info in header.tensors)
            headers[header.path] = replace(
                first,
                tensors=(*first.tensors, *mine),
                stored={**first.stored, **_prefixed(name, header.stored)},
                turns={**first.turns, **_prefixed(name, header.turns)},
            )
    packed = [
        f"{name}.{info.name}"
        for name, part in parts.items()
        for info in part.checkpoint.tensors.values()
        if isinstance(info, Packed)
    ]
    return dequantized(from_headers(path, headers.values()), packed)


def _prefixed(name: str, entries: Mapping[str, _T]) -> dict[str, _T]:
    return {f"{name}.{key}": one for key, one in entries.items()}


def _below(name: str, source: Source) -> Source:
    rows = tuple(replace(row, tensor=f"{name}.{row.tensor}") for row in source.rows)
    return replace(source, rows=rows)
