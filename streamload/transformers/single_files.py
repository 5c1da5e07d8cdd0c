"""Models of diffusers in one file, in the layout of their authors: found, and matched by rows.

diffusers' own conversions run on stand-ins, so that the rows of its models stream from the file.
Source: `diffusers.loaders.single_file_utils`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import diffusers
import transformers
from diffusers.loaders import single_file, single_file_model, single_file_utils

from streamload.checkpoint.fetch import download
from streamload.checkpoint.open import Checkpoint, from_headers, open_checkpoint
from streamload.core.dtypes import F16
from streamload.core.location import Location, Url
from streamload.errors import CheckpointError
from streamload.files import hub
from streamload.files.folder import locate
from streamload.files.hub import Repository
from streamload.loading.options import Options
from streamload.loading.place import Devices
from streamload.planning.dequantize import decoded_always, dequantized
from streamload.transformers.configuration import first_line
from streamload.transformers.dtypes import split_rules
from streamload.transformers.pipeline_models import Diffused, Part, in_dtype, on_meta, part_of
from streamload.transformers.rows import Converted, StandIns

_KINDS = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
_OPTIONAL = single_file.SINGLE_FILE_OPTIONAL_COMPONENTS
_LISTED = 4  # names shown in a message
#: A tensor of a UNet whose file has no prefix, as those of ComfyUI-GGUF.
_UNET = "input_blocks.0.0.weight"
#: Ends of names of scales, which diffusers' conversions drop.
_SCALES = (".scale_weight", ".weight_scale", ".comfy_quant")
#: Ends of names of a pipeline's files besides weights.
DOCUMENTS = (".json", ".txt", ".model", ".jinja", ".py")


class Contents(NamedTuple):
    """What a file holds.

    Attributes:
        folder: of the pipeline; None if there is one model, and no pipeline.
        left_out: components that diffusers leaves out.
    """

    folder: Location | None
    models: Mapping[str, InFile] = MappingProxyType({})
    left_out: Mapping[str, None] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InFile:
    """A model that a file holds, and the rows that fill its parameters."""

    model_class: Any
    config: Path | Mapping[str, Any]  # or its folder
    model: Any  # on the meta device; None for those of transformers
    checkpoint: Checkpoint  # its tensors alone
    converted: Converted


def is_file(found: Location) -> bool:
    """Return whether a path is that of a file, and not of a folder."""
    return bool(found.name) if isinstance(found, Url) else found.is_file()


def configured(checkpoint: Checkpoint, config: Any) -> Path | Mapping[str, Any]:
    """Return the folder of a file's configuration, or the configuration of its one model.

    ``config``: a folder, a repository, or a model's configuration; None: the repository in which
    diffusers looks, if the cache has it.
    """
    if isinstance(config, Mapping):
        return config
    if config is not None:
        folder = locate(config).path
        return _documents(folder) if isinstance(folder, Url) else folder
    stand_ins = StandIns(checkpoint)
    tensors = _named(stand_ins, checkpoint)
    known = single_file_utils.DIFFUSERS_DEFAULT_PIPELINE_PATHS
    try:
        with stand_ins:
            usual = single_file_utils.fetch_diffusers_config(tensors)
    except Exception:  # any: it looks for a few tensors, and trusts the rest
        usual = known["v1"]
    if (
        usual == known["v1"] and single_file_utils.CHECKPOINT_KEY_NAMES["v1"] not in tensors
    ):  # its answer for any file
        listed = ", ".join(list(tensors)[:_LISTED])
        problem = f"diffusers does not know what model it is ({listed}, ...)"
        instead = "write config= with the folder of a pipeline, or of the model's config.json"
        raise CheckpointError(checkpoint.path, f"{problem}; {instead}")
    name = usual["pretrained_model_name_or_path"]
    snapshot = hub.snapshot(Repository.parse(name))
    if snapshot is None:
        raise CheckpointError(
            checkpoint.path,
            f"the model's configuration is that of {name}, which the cache of the Hugging Face Hub "
            f'lacks: write config="{name}" to download it, or config= with a folder that has it',
        )
    return snapshot / str(usual.get("subfolder", ""))


def contents(
    checkpoint: Checkpoint, classes: Mapping[str, tuple[Any, Path | Mapping[str, Any]]]
) -> tuple[dict[str, InFile], dict[str, str], dict[str, str]]:
    """Return the models that a file holds, by component, and why others are not read or converted.

    `classes`: the class and the configuration, or its folder, of each model.
    """
    floats = dequantized(checkpoint, decoded_always(checkpoint))
    stand_ins = StandIns(floats)
    tensors = _named(stand_ins, floats)
    held: dict[str, InFile] = {}
    unread: dict[str, str] = {}
    broken: dict[str, str] = {}
    for name, (model_class, config) in classes.items():
        is_theirs = issubclass(model_class, diffusers.ModelMixin)
        if is_theirs and _kind(model_class) is None:
            unread[name] = f"diffusers reads no {model_class.__name__} from a single file"
            continue
        model = on_meta(model_class, config) if is_theirs else None
        try:
            with stand_ins:
                if is_theirs:
                    state = _of_diffusers(model, dict(tensors))
                else:
                    state = _of_transformers(model_class, config, dict(tensors))
            made = stand_ins.converted(state)
        except KeyError as error:
            broken[name] = f"the file lacks {error}"
        except Exception as error:  # any, from a conversion of diffusers
            broken[name] = f"it is not converted: {first_line(error)}"
        else:
            if made.fill:
                held[name] = InFile(model_class, config, model, _only(floats, made), made)
    return held, unread, broken


def _named(stand_ins: StandIns, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return stand-ins for all tensors, by the names that diffusers looks for."""
    prefix = single_file_utils.LDM_UNET_KEY * (_UNET in checkpoint.tensors)
    return {prefix + name: stand_ins.of(name) for name in checkpoint.tensors}


def _kind(model_class: Any) -> Any:
    """Return the key of `_KINDS` for a class of diffusers; None if there is none."""
    return single_file_model._get_single_file_loadable_mapping_class(model_class)


def _of_diffusers(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a model's tensors by name, as diffusers converts those of a file."""
    state = model.state_dict()
    if not single_file_model._should_convert_state_dict_to_diffusers(state, tensors):
        return tensors
    convert = _KINDS[_kind(type(model))]["checkpoint_mapping_fn"]
    found: dict[str, Any] = convert(config=dict(model.config), checkpoint=tensors)
    return found if state.keys() & found.keys() else {}


def _of_transformers(model_class: Any, folder: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a text encoder's tensors by name, as diffusers converts those of a file."""
    files = single_file_utils
    if files.is_clip_model_in_single_file(model_class, tensors):
        load = files.create_diffusers_clip_model_from_ldm
    elif issubclass(model_class, transformers.T5EncoderModel) and (
        files.is_t5_in_single_file(tensors)
    ):
        load = files.create_diffusers_t5_model_from_checkpoint
    else:
        return {}
    out: dict[str, Any] = {}

    def take(model: Any, state: Mapping[str, Any], **_: Any) -> None:
        out.update(state)

    # the conversion is a part of diffusers' loading: the other part takes its result here
    scope = {**load.__globals__, "load_model_dict_into_meta": take}
    load = types.FunctionType(load.__code__, scope, None, load.__defaults__)
    load(model_class, tensors, config=str(folder), local_files_only=True)
    return out


def _only(checkpoint: Checkpoint, made: Converted) -> Checkpoint:
    """Return a checkpoint with the tensors that fill a model alone."""
    used = {row.tensor for source in made.fill.values() for row in source.rows}
    headers = [
        replace(
            header,
            tensors=tuple(info for info in header.tensors if info.name in used),
            stored={name: one for name, one in header.stored.items() if name in used},
            turns={name: one for name, one in header.turns.items() if name in used},
        )
        for header in checkpoint.shards
    ]
    tensors = {name: info for name, info in checkpoint.tensors.items() if name in used}
    return replace(from_headers(checkpoint.path, headers), tensors=MappingProxyType(tensors))


def in_file(
    found: Location,
    config: Any,
    given: Mapping[str, Any],
    classes_of: Callable[[Path], Mapping[str, tuple[Any, Path]]],
) -> Contents:
    """Return the models that a file holds, and where the rest of their pipeline is.

    ``config``: as in `configured`; None: the folder of the others, if any. ``given``: components of
    the caller; "*" is the folder of all others. ``classes_of``: class and folder of each model in a
    folder, but given ones.
    """
    others = given.get("*")
    checkpoint = open_checkpoint(found)
    scaled = next((name for name in checkpoint.tensors if name.endswith(_SCALES)), None)
    scaled = scaled or next((n for n in checkpoint.groups if n not in checkpoint.stored), None)
    if scaled is not None:
        problem = "is quantised, and diffusers' conversions drop its scales: take floats, or a GGUF"
        raise CheckpointError(found, problem, tensor=scaled)
    documents = configured(checkpoint, others if config is None else config)
    classes: dict[str, tuple[Any, Path | Mapping[str, Any]]]
    if isinstance(documents, Path):
        classes = {**classes_of(documents)}
    elif given:
        raise ValueError("config is of one model, and no pipeline: write the folder of a pipeline")
    else:
        classes = {"model": (_class_in(documents), documents)}
    left_out = {name: None for name in _OPTIONAL if classes.pop(name, None) is not None}
    held, unread, broken = contents(checkpoint, classes)
    used = {name for one in held.values() for name in one.checkpoint.tensors}
    unused = checkpoint.tensors.keys() - used
    # else the file does not hold that model, and the rest is of no use, such as averaged weights
    is_broken = bool(broken) and any(
        len(checkpoint.tensors[name].shape) > 1 and not name.startswith("model_ema.")
        for name in unused
    )
    if len(held) == 1 and not given and not is_broken:
        return Contents(None, held)
    if not held or is_broken or (others is None and held.keys() < classes.keys()):
        reasons = {name: f" ({why})" for name, why in (unread | broken).items()}
        listed = ", ".join(name + reasons.get(name, "") for name in classes if name not in held)
        problem = f"it holds {', '.join(held) or 'nothing that diffusers reads'}, and not {listed}"
        instead = "; write components= with the folder of a pipeline that has the others, or each "
        instead += "as an argument, None to leave it out"
        raise CheckpointError(found, problem + instead * bool(held and not is_broken))
    folder: Location | None = documents if isinstance(documents, Path) else None
    if others is not None:
        folder = locate(others).path
    return Contents(folder, held, left_out)


def _class_in(config: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that a configuration names."""
    found = getattr(diffusers, str(config.get("_class_name")), None)
    if not isinstance(found, type) or not issubclass(found, diffusers.ModelMixin):
        raise ValueError('config: a dict has the "_class_name" of a model of diffusers')
    return found


def part_in_file(held: InFile, dtype: Any, devices: Devices, options: Options) -> Part:
    """Build one model in a file on the meta device, and match it; `dtype`: the caller's for it."""
    checkpoint, made = held.checkpoint, held.converted
    if checkpoint.stored:  # as transformers' models of GGUF files
        given, rest = split_rules(dtype, F16)
        dtype = {**given, "*": rest}
    if held.model is not None:
        model = in_dtype(held.model, checkpoint, dtype)
        buffers = dict(model.named_buffers())
        return Diffused.matched(model, checkpoint, made.fill, dtype, buffers)
    folder = held.config
    assert isinstance(folder, Path), "a configuration that is a dict is of diffusers"
    if isinstance(checkpoint.path, Url):  # transformers looks for documents in its folder
        checkpoint = replace(checkpoint, path=folder)
    return part_of(held.model_class, folder, checkpoint, dtype, devices, options, made)


def _documents(folder: Url) -> Path:
    """Download the configurations and tokenizers of a repository's folder; return its path."""
    listed = hub.listing(folder)
    names = [name for name in listed or () if name.endswith(DOCUMENTS)]
    if listed is None or not names:
        raise CheckpointError(folder, "holds no configuration: write a folder, or a repository")
    urls = [folder / name for name in names]
    paths = download(urls, sum(listed[name] for name in names), progress=False)
    return paths[0].parents[names[0].count("/")]
