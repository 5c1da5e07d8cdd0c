"""`from_pretrained` for pipelines and models of diffusers, streamed under one budget.

diffusers and transformers build the models of a pipeline and load its other components (schedulers,
tokenizers); streamload loads all models at once. Tried with diffusers 0.35.2, 0.36 and 0.42.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Unpack

import accelerate
import diffusers
import torch
import transformers

from streamload.checkpoint.fetch import download
from streamload.checkpoint.hub import keep_ref, listing
from streamload.checkpoint.open import Checkpoint, from_headers, open_checkpoint, read_json_file
from streamload.checkpoint.variants import is_of
from streamload.core.dtypes import DTypeArgument
from streamload.core.location import Location, Url
from streamload.core.memory import BudgetLike
from streamload.core.progress import Progress
from streamload.devices.names import framework
from streamload.errors import (
    CheckpointError,
    PlanInfeasibleError,
    ShapeMismatch,
    ShardNotFoundError,
    StateDictMismatchError,
)
from streamload.files.header import parse_json_object
from streamload.files.hub import cached, choose, file_of, url_of
from streamload.loading.load import load_state_dict
from streamload.loading.options import DEFAULTS, StreamOptions, takes
from streamload.loading.place import Devices, open_devices
from streamload.loading.prepare import Options
from streamload.loading.report import LoadReport
from streamload.planning.planner import Residence
from streamload.planning.sources import Source
from streamload.transformers.arguments import found_at, takes_those_of_transformers
from streamload.transformers.configuration import Wanted
from streamload.transformers.dtypes import split_rules
from streamload.transformers.names import whole
from streamload.transformers.prepared import Prepared, filling, load_untied, without_stale_notes

__all__ = ["from_pretrained"]

_PIPELINE = "model_index.json"
#: Options of other loads, which diffusers would ignore as unknown components.
_OFFLOADING = {"offload", "tokens", "stay", "layers", "host"}
#: Options for quantized weights, and the format if their value does not name it.
_QUANT = {"quant": "", "load_in_8bit": "int8", "load_in_4bit": "nf4"}
_OTHERS = DEFAULTS.keys() | _OFFLOADING | _QUANT.keys()
_MODELS = (diffusers.ModelMixin, transformers.PreTrainedModel)
_DOCUMENTS = (".json", ".txt", ".model", ".jinja", ".py")
_WEIGHTS = (".safetensors", ".bin", ".msgpack", ".onnx", ".pb", ".ckpt", ".pt", ".pth")


class PipelineOptions(StreamOptions, total=False):
    """The options of `from_pretrained`; see `streamload.loading.options.LoadOptions`."""

    budget: BudgetLike
    device: str | None
    dtype: DTypeArgument
    reserve: float | str
    residence: Residence
    progress: Progress


@takes_those_of_transformers
@takes()
def from_pretrained(
    path: str | os.PathLike[str],
    *,
    pipeline_class: Any = None,
    variant: str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    components: Mapping[str, Any] | None = None,
    **options: Unpack[PipelineOptions],
) -> Any:
    """Load a pipeline of diffusers, all of its models streamed under one budget in bytes.

    The pipeline equals that of diffusers' own ``from_pretrained``, on the device: equal images for
    equal seeds. All models must fit before any data is read.

    Args:
        path: the root of a pipeline, with its ``model_index.json``; the folder of one of its
            models, which is loaded alone; or ``org/name`` on the Hugging Face Hub.
        budget: most bytes on the device, of all models together, as in
            `streamload.load_state_dict`.
        device: "cuda:0", "cpu" or another of torch's; one for all. None: ``STREAMLOAD_DEVICE``,
            else torch's default, else the first accelerator, else the CPU.
        dtype: a dtype or its name, "checkpoint", or patterns by component and name:
            ``{"vae.*": "float32", "*": "float16"}``; diffusers' ``{"vae": ..., "default": ...}`` is
            taken too. None: each tensor as stored (diffusers casts all to float32), and bfloat16
            becomes float16 where a device does not compute in it. Weights that diffusers and
            transformers keep in float32 in a 16-bit model stay so, except under "checkpoint".
        pipeline_class: a class of diffusers; None takes the one that ``model_index.json`` names.
        variant: "fp16" for files with "fp16" in their names; a model without such files is loaded
            from files without it.
        revision: of ``org/name``: a branch, a tag or a commit.
        subfolder: the folder in ``path`` to take.
        components: objects to use in place of components, or None to leave one out. They are taken
            as arguments too: ``safety_checker=None``, ``vae=...``; so are the arguments of the
            pipeline's class.
        reserve: bytes, or a size, that stay free on the device: for activations.
        **options: see `PipelineOptions`.

    Returns:
        The pipeline, or the model; its ``streamload_report`` is the `LoadReport`.

    Raises:
        CheckpointError: there is no pipeline, or a model of it is neither of diffusers nor of
            transformers, is quantized, or invalid.
        StateDictMismatchError: names or shapes do not match; before any data is loaded.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated.
        ValueError: an argument is invalid.

    and the errors of a load: see `streamload.load_state_dict`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a pipeline, not {type(path).__name__}")
    device, given = options["device"], dict(components or {})
    if device is not None and not isinstance(device, str):
        raise ValueError(f'a pipeline goes to one device: device="cuda:0", not {device!r}')
    folder = found_at(path, revision, subfolder)
    folder = _downloaded(folder, variant, given.keys(), options)
    if not isinstance(folder, Path):
        raise CheckpointError(folder, "a pipeline is loaded from a folder on this machine")
    is_pipeline = (folder / _PIPELINE).is_file()
    _check_names(folder, given, {name: options[name] for name in ("device", "budget")})
    given = {name: value for name, value in given.items() if name not in _OTHERS}
    if not is_pipeline and (given or pipeline_class is not None):
        names = ", ".join(["pipeline_class"] * (pipeline_class is not None) + list(given))
        raise ValueError(f"{folder} holds one model, and no pipeline: leave {names} away")
    devices = open_devices(device, framework("torch"), {})
    classes = _classes(folder, given)
    if variant is not None and not any(_has(variant, where) for _, where in classes.values()):
        raise ShardNotFoundError(folder, f"holds no file of variant {variant!r}")
    checkpoints = {
        name: open_checkpoint(where, variant=variant if variant and _has(variant, where) else None)
        for name, (_, where) in classes.items()
    }
    asked = _dtypes(options["dtype"], checkpoints, given, alone=not is_pipeline)
    parts = {
        name: _part(*classes[name], checkpoint, asked[name], devices, options)
        for name, checkpoint in checkpoints.items()
    }
    report = _load(folder, parts, devices, options)
    for part in parts.values():
        part.finish(report)
    models = {name: part.model for name, part in parts.items()}
    if not is_pipeline:
        (model,) = models.values()
        return model
    owner = pipeline_class or diffusers.DiffusionPipeline
    pipeline = owner.from_pretrained(str(folder), local_files_only=True, **{**models, **given})
    pipeline.streamload_report = report
    return pipeline


def _downloaded(
    folder: Location, variant: str | None, given: Set[str], options: PipelineOptions
) -> Location:
    """Return the folder in the local cache of a pipeline of the hub, after a download.

    Only files that a load reads are downloaded. `given`: components that are not loaded.
    """
    file, listed = file_of(folder), listing(folder)
    if file is None or listed is None:
        return folder
    if options["fetch"] == "stream":
        raise CheckpointError(folder, "a pipeline is loaded from files: write fetch='cache'")
    names = [name for name in listed if name.partition("/")[0] not in given]
    wanted = [name for name in names if name.endswith(_DOCUMENTS)]
    sizes = {url_of(file._replace(path=file.path + name)): listed[name] for name in wanted}
    owners = {name.rpartition("/")[0] for name in names if name.endswith(_WEIGHTS)}
    for owner in owners - {""} if _PIPELINE in names else {""}:
        inside = f"{owner}/" * bool(owner)
        own = [name for name in names if name.startswith(inside)]
        has = variant is not None and any(is_of(name.rpartition("/")[2], variant) for name in own)
        part = url_of(file._replace(path=file.path + inside))
        shards = open_checkpoint(part, variant=variant if has else None).shards
        sizes |= {h.path: h.file_nbytes for h in shards if isinstance(h.path, Url)}
    choose("cache", sizes, folder)
    keep_ref(folder)
    download([*sizes], sum(sizes.values()), options["progress"])
    first = _PIPELINE if _PIPELINE in names else "config.json"
    return cached(url_of(file._replace(path=file.path + first))).parent


def _check_names(folder: Path, given: Mapping[str, Any], place: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of other loads among the components in `given`.

    The message has the call to write, with the options in `place`.
    """
    written = [f"{name}={value!r}" for name, value in place.items() if type(value) in (str, int)]
    for name, value in given.items():
        if name not in _OTHERS:
            continue
        instead = "leave it out"
        if value and name in ("offload", *_QUANT):
            quant = value if name == "quant" else _QUANT.get(name)
            asked = [*written, f"quant={quant!r}"] if quant else written
            instead = _alone(folder, given, bool(quant), ", ".join(["", *asked]))
        if value or name not in _QUANT:
            raise ValueError(f"{name} is no option here: {instead}")


def _alone(folder: Path, given: Mapping[str, Any], fits: bool, arguments: str) -> str:
    """Return code that loads (offloads unless `fits`) the largest model, for an error message."""
    models = {
        name: (sum(file.stat().st_size for file in where.iterdir()), where, found)
        for name, (found, where) in _classes(folder, given).items()
        if issubclass(found, diffusers.ModelMixin)
    }
    if not models:
        return "leave it out"
    name, (_, where, found) = max(models.items(), key=lambda item: item[1][0])
    path, whole = (json.dumps(str(each), ensure_ascii=False) for each in (where, folder))
    owner = f"diffusers.{found.__name__}"
    call = "streamload.load_state_dict" if fits else "offloaded = streamload.offload"
    lines = [
        f"{name} = {owner}.from_config({owner}.load_config({path})).eval()",
        f"{call}({name}, {path}{arguments})",
    ]
    if where == folder:
        return f"write {'; '.join(lines)}"
    lines.append(f"pipe = streamload.diffusers.from_pretrained({whole}, {name}={name})")
    return f"fill its largest model by itself, and pass it: write {'; '.join(lines)}"


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
    for name, entry in _read(path).items():
        is_component = isinstance(entry, list) and [type(part) for part in entry] == [str, str]
        where = folder / name
        if name.startswith("_") or name in given or not is_component or not where.is_dir():
            continue
        model_class = _class(*entry)
        if isinstance(model_class, type) and issubclass(model_class, _MODELS):
            out[name] = model_class, where
        elif any(file.name.endswith(_WEIGHTS) for file in where.iterdir()):
            # diffusers would load it outside of the budget
            raise CheckpointError(
                where,
                "a model that is neither of diffusers nor of transformers",
                f"one of these, or {name}= with the model",
                ".".join(map(str, entry)),
            )
    return out


def _read(path: Path) -> dict[str, Any]:
    return dict(parse_json_object(read_json_file(path), path))


def _class(library: str, name: str) -> Any:
    """Return a class of a package, or of a module of diffusers.pipelines; None if there is none."""
    for module in (library, f"diffusers.pipelines.{library}"):
        with suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    return None


def _has(variant: str, folder: Path) -> bool:
    return any(is_of(file.name, variant) for file in folder.iterdir())


def _dtypes(
    dtype: Any, checkpoints: Mapping[str, Checkpoint], given: Mapping[str, Any], *, alone: bool
) -> Mapping[str, Any]:
    """Split a pipeline's ``dtype=`` into one for each model, by pattern of its tensors' names.

    Args:
        dtype: as in `from_pretrained`.
        checkpoints: by model.
        given: components that are not loaded; patterns for them are ignored.
        alone: patterns do not begin with the model's name.

    Raises:
        ValueError: a pattern matches no tensor.
    """
    if not isinstance(dtype, Mapping):
        return dict.fromkeys(checkpoints, dtype)
    asked = {f"{name}.*" if name in checkpoints else name: value for name, value in dtype.items()}
    rest = asked.pop("default", None)
    out: dict[str, dict[str, Any]] = {name: {} for name in checkpoints}
    for pattern, value in [*asked.items(), *([("*", rest)] if rest is not None else [])]:
        inner = {name: _inside(pattern, "" if alone else f"{name}.") for name in checkpoints}
        found = [
            name
            for name, checkpoint in checkpoints.items()
            if any(fnmatchcase(tensor, inner[name]) for tensor in checkpoint.tensors)
        ]
        if not found and pattern != "*" and pattern.partition(".")[0] not in given:
            raise ValueError(f"dtype: no tensor's name matches {pattern!r}")
        for name in found:
            out[name].setdefault(inner[name], value)  # the first that matches decides
    return {name: rules or None for name, rules in out.items()}


def _inside(pattern: str, prefix: str) -> str:
    """Return a dtype pattern without a model's prefix; "" if it matches no name of that model."""
    literal = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    if literal.startswith(prefix):
        return pattern.removeprefix(prefix)
    after = pattern.removeprefix(literal)
    return after if prefix.startswith(literal) and after.startswith("*") else ""


@dataclass(frozen=True, slots=True)
class _Diffused:
    """A model of diffusers on the meta device, matched to a checkpoint and ready to load."""

    model: Any
    checkpoint: Checkpoint
    fill: Mapping[str, Source]
    asked: Any  # the caller's ``dtype=`` for this model

    @classmethod
    def of(cls, model_class: Any, checkpoint: Checkpoint, folder: Path, asked: Any) -> _Diffused:
        """Build and match a model as diffusers does; `asked`: its dtype; reads headers only."""
        config = model_class.load_config(str(folder), local_files_only=True)
        if config.get("quantization_config") is not None:
            raise CheckpointError(folder, "the checkpoint is quantised: diffusers alone loads it")
        with accelerate.init_empty_weights():  # buffers that the model computes have values
            model = model_class.from_config(config)
        names: dict[str, Any] = {name: name for name in checkpoint.tensors}
        if len(checkpoint.shards) == 1:
            model._fix_state_dict_keys_on_load(names)  # names of older versions
        state = model.state_dict()
        fill = {new: whole(checkpoint, old) for new, old in names.items() if new in state}
        ignored = model_class._keys_to_ignore_on_load_unexpected or ()
        unexpected = [
            name
            for name in names
            if name not in state and not any(re.search(pattern, name) for pattern in ignored)
        ]
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
        model.register_to_config(_name_or_path=str(folder))
        return cls(model, checkpoint, fill, asked)

    def rules(self) -> dict[str, Any]:
        """Return the dtypes of the load, by pattern of the checkpoint's names."""
        given, rest = split_rules(self.asked, None)
        if rest == "checkpoint":
            return {**given, "*": rest}
        kept = set(self.model._keep_in_fp32_modules or ())
        out = given | {
            glob.escape(source.rows[0].tensor): "float32"
            for name, source in self.fill.items()
            if kept.intersection(name.split("."))
            and self.checkpoint.tensors[source.rows[0].tensor].dtype.kind == "float"
        }
        return out if rest is None else {**out, "*": rest}

    def beside_nbytes(self, devices: Devices) -> int:
        """Return the bytes of the buffers that the model computes and the checkpoint lacks."""
        return sum(buffer.nbytes for name, buffer in self._computed())

    def _computed(self) -> Iterator[tuple[str, Any]]:
        return (pair for pair in self.model.named_buffers() if pair[0] not in self.fill)

    def untied(self) -> bool:
        """Return whether weights were untied: never, as models of diffusers tie none."""
        return False

    def finish(self, report: LoadReport) -> None:
        """Move computed buffers to the device; set evaluation mode and ``streamload_report``."""
        device = torch.device(report.plan.devices[0].device)
        for name, buffer in list(self._computed()):
            module, _, leaf = name.rpartition(".")
            self.model.get_submodule(module)._buffers[leaf] = buffer.to(device)
        self.model.eval()
        self.model.streamload_report = report


def _part(
    model_class: Any,
    folder: Path,
    checkpoint: Checkpoint,
    asked: Any,
    devices: Devices,
    options: PipelineOptions,
) -> _Diffused | Prepared:
    """Build one model of a pipeline on the meta device, and match it; `asked`: its ``dtype=``."""
    if issubclass(model_class, diffusers.ModelMixin):
        return _Diffused.of(model_class, checkpoint, folder, asked)
    stored: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype.kind == "float":
            stored[info.dtype.name] += info.nbytes
    # the configuration may state that of another variant
    changes = {"dtype": stored.most_common(1)[0][0]} if stored else {}
    return Prepared.of(
        checkpoint,
        str(folder),
        Wanted(model_class=model_class, changes=changes),
        devices,
        asked,
        Options.read(budget=options["budget"], cast=options["cast"]),
    )


def _load(
    folder: Path,
    parts: Mapping[str, _Diffused | Prepared],
    devices: Devices,
    options: PipelineOptions,
) -> LoadReport:
    """Load all models as one, with component names as prefixes, under one budget."""
    checkpoint = _joined(folder, parts)
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
            return load_state_dict(model, checkpoint, **asked)
        except PlanInfeasibleError as error:  # suggestions that are no options here
            raise error.without("quant", "device", "streamload.offload") from None

    return without_stale_notes(load_untied(load, *parts.values()), model)


def _joined(folder: Path, parts: Mapping[str, _Diffused | Prepared]) -> Checkpoint:
    headers = [
        replace(
            header,
            tensors=tuple(replace(info, name=f"{name}.{info.name}") for info in header.tensors),
        )
        for name, part in parts.items()
        for header in part.checkpoint.shards
    ]
    return from_headers(folder, headers)


def _below(name: str, source: Source) -> Source:
    rows = tuple(replace(row, tensor=f"{name}.{row.tensor}") for row in source.rows)
    return replace(source, rows=rows)
