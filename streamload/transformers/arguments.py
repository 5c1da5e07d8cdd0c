"""Translate the arguments of transformers' own `from_pretrained` to those of streamload's.

An argument without a counterpart raises a ValueError that names the argument to write. Source:
`PreTrainedModel.from_pretrained` in transformers/modeling_utils.py.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch

from streamload.core.location import Location
from streamload.devices.names import framework
from streamload.errors import ShardNotFoundError
from streamload.files.folder import is_of_hub, locate
from streamload.files.hub import Repository, library, repository_of, revised, settings

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Arguments without effect here, if the function does not take them: nothing is unpickled, all is
#: low on memory, and the environment of huggingface_hub holds.
_WITHOUT_EFFECT = (
    *("local_files_only", "token", "use_auth_token", "proxies", "resume_download", "tqdm_class"),
    *("low_cpu_mem_usage", "weights_only", "offload_state_dict", "offload_buffers", "mirror"),
    *("_fast_init", "code_revision", "adapter_kwargs", "_commit_hash"),
    *("_from_auto", "_from_pipeline"),
)
#: Arguments that are refused, and why; None, False and "" count as not given.
_INSTEAD: Mapping[str, str] = {
    "cache_dir": "set HF_HUB_CACHE in the environment, or give the folder of the snapshot",
    "device_mesh": "a DistributedConfig has sizes, and transformers makes the mesh of them",
    "distributed_config": "streamload.distributed.load_state_dict shares a model over ranks",
    "force_download": "whole files of the cache are right: remove them by `hf cache rm`",
    "from_flax": "files of Flax are not read: leave it out where there are others",
    "from_tf": "files of TensorFlow are not read: leave it out where there are others",
    "fusion_config": "put it in the configuration: config=",
    "kernel_config": "load, and then call model.set_use_kernels(True, kernel_config)",
    "output_loading_info": "look at the model's streamload_report: its missing and skipped",
    "quantization_config": 'write quant="nf4", or let diffusers\' own from_pretrained quantise',
    "state_dict": "give the path of a checkpoint",
    "use_kernels": "load, and then call model.set_use_kernels(True)",
}
#: Arguments that belong into a ``DistributedConfig``.
_OF_A_MESH = ("tp_plan", "tp_size")
#: Arguments for bitsandbytes' formats, and the argument to write in place of each.
_QUANTIZING = {"load_in_8bit": 'quant="int8"', "load_in_4bit": 'quant="nf4"'}
#: Indexes and files that torch.save wrote, by name; then the same with a variant in the name.
_TORCH_FILES = (
    ("pytorch_model.bin.index.json", "pytorch_model.bin.index.{}.json"),
    ("pytorch_model.bin", "pytorch_model.{}.bin"),
)
_DISK = "disk"  # accelerate's name in a device_map
_FROM_FILES = "layers that do not fit stream from the checkpoint's own files"
#: Parameters that take all arguments of unknown names, as one dict.
_OTHERS = frozenset({"config_changes", "components"})
#: Similarity (`difflib`, 0 to 1) from which an unknown name counts as a misspelled option.
_NEAR = 0.8
#: Values of ``device_map`` that leave the choice to accelerate.
_EVERYWHERE = ("auto", "balanced", "balanced_low_0", "sequential")


def takes_those_of_transformers(function: _Function) -> _Function:
    """Return a function that takes arguments of transformers' own ``from_pretrained``, too.

    Others reach ``function`` as its dict ``config_changes`` (for diffusers, ``components``).
    """
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def entrance(*args: Any, **given: Any) -> Any:
        if (named := given.pop("pretrained_model_name_or_path", None)) is not None:
            if args or "path" in given:
                raise _twice("pretrained_model_name_or_path", "path")
            given["path"] = named
        path = args[0] if args else given.get("path")
        return function(*args, **translated(given, known, path))

    return entrance  # type: ignore[return-value]


def translated(
    given: Mapping[str, Any], known: frozenset[str], path: object = None
) -> dict[str, Any]:
    """Translate transformers' arguments to those in `known`; ValueError if one has no counterpart.

    `path`: the checkpoint, for error messages.
    """
    _check_hub(given, known, path)
    rest = {n: value for n, value in given.items() if n in known or n not in _WITHOUT_EFFECT}
    out = {name: rest.pop(name) for name in list(rest) if name in known}
    tensors = {n: value for n in _OF_A_MESH if _is_given(value := rest.pop(n, None))}
    if tensors:
        arguments = ", ".join(f"{name}={value!r}" for name, value in tensors.items())
        write = f"write distributed_config=DistributedConfig({arguments})"
        shares = _INSTEAD["distributed_config"]
        raise _unknown(next(iter(tensors)), write if "distributed_config" in known else shares)
    for name, instead in _INSTEAD.items():
        if name not in known and _is_given(rest.pop(name, None)):
            raise _unknown(name, instead)
    if _is_given(rest.pop("offload_folder", None)):
        raise _unknown("offload_folder", f"{_FROM_FILES}: write offload=True")
    for name, instead in _QUANTIZING.items():
        if not _is_given(rest.get(name)):
            rest.pop(name, None)
        else:
            raise _unknown(name, f"weights are quantised on the way: write {instead}")
    if _is_given(file := rest.pop("gguf_file", None)):
        found = _found(path, out) / file if isinstance(path, (str, os.PathLike)) else file
        instead = f"a GGUF is opened by its path: write {_opening(found)}"
        raise _unknown(f"gguf_file={file!r}", instead)
    if rest.pop("use_safetensors", None) is False:
        _check_torch_files(path, out, known)
    if rest.pop("disable_mmap", None):
        out.setdefault("reader", "pread")
    if rest.pop("ignore_mismatched_sizes", False):
        out.setdefault("strict", False)
        if "shapes" in known:
            out.setdefault("shapes", "skip")
    dtype = rest.pop("torch_dtype", None)
    if out.get("dtype") is None:
        out["dtype"] = dtype
    if isinstance(out["dtype"], str) and out["dtype"] == "auto":
        out["dtype"] = None
    _place(out, rest.pop("device_map", None), rest.pop("max_memory", None))
    if any(get_close_matches(name, known, 1, _NEAR) for name in rest):
        return out | rest  # it is refused, as any unknown argument
    for others in _OTHERS & known:
        out[others] = {**by_name(out.get(others)), **rest}
        rest = {}
    return out | rest


def by_name(components: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return components by name; "*" is the folder of all others, if a folder is given."""
    if isinstance(components, (str, os.PathLike)):
        return {"*": components}
    return dict(components or {})


def _unknown(name: str, instead: str) -> ValueError:
    return ValueError(f"{name} has no counterpart here: {instead}")


def _twice(name: str, ours: str) -> ValueError:
    return ValueError(f"{name} and {ours} say the same: leave one of them out")


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ""


def _check_hub(given: Mapping[str, Any], known: frozenset[str], path: object) -> None:
    """Raise ValueError if another token would be used for a repository, or a hub be asked."""
    token = given.get("token") or given.get("use_auth_token")
    is_local = bool(given.get("local_files_only"))
    if (is_local and "local_files_only" in known) or not (is_local or isinstance(token, str)):
        return
    repository = repository_of(path) if isinstance(path, (str, os.PathLike)) else None
    if repository is None or settings().is_offline_mode():
        return
    if is_local:
        raise _unknown("local_files_only", "set HF_HUB_OFFLINE=1 in the environment")
    if token != library(repository.name).get_token():
        raise _unknown("token", "set HF_TOKEN in the environment, or run `hf auth login`")


def found_at(
    path: str | os.PathLike[str],
    revision: str | None,
    subfolder: str = "",
    *,
    local_files_only: bool = False,
) -> Location:
    """Return the folder, file or URL of a checkpoint; `revision` holds for ``org/name`` only.

    `local_files_only`: take a repository's folder in the local cache, and ask no hub.
    """
    path = revised(path, revision)
    asked = repository_of(path) if local_files_only else None
    found = locate(path).found if asked is None else _in_cache(asked)
    if subfolder and is_of_hub(found):
        return found / f"{subfolder.strip('/')}/"
    return found / subfolder if subfolder else found


def _in_cache(asked: Repository) -> Path:
    hub = library(str(asked))
    try:
        folder = hub.snapshot_download(asked.name, revision=asked.revision, local_files_only=True)
    except hub.errors.LocalEntryNotFoundError:
        raise ShardNotFoundError(
            str(asked),
            "is not in the Hugging Face cache: leave local_files_only out, or write "
            f"`hf download {asked.name}`",
            found=str(settings().HF_HUB_CACHE),
        ) from None
    return Path(folder, asked.path)


def _found(path: Any, out: Mapping[str, Any]) -> Location:
    local_files_only = bool(out.get("local_files_only"))
    subfolder = out.get("subfolder") or ""
    return found_at(path, out.get("revision"), subfolder, local_files_only=local_files_only)


def _opening(path: object) -> str:
    return f"streamload.transformers.from_pretrained({json.dumps(str(path), ensure_ascii=False)})"


def _check_torch_files(path: Any, out: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ValueError if ``use_safetensors=False`` asks for other files than would be opened.

    Without safetensors files in it, a folder is opened by the files that torch.save wrote.
    """
    if "components" in known:
        instead = "files that torch.save wrote are read where there are no others: leave it out"
        raise _unknown("use_safetensors=False", instead)
    if not isinstance(path, (str, os.PathLike)):
        return
    folder = _found(path, out)
    if not isinstance(folder, Path) or not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return
    variant = out.get("variant")
    names = [plain if variant is None else other.format(variant) for plain, other in _TORCH_FILES]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(
            f"use_safetensors=False: {folder} holds no {' and no '.join(names)}: leave it out"
        )
    raise _unknown(
        "use_safetensors=False",
        "a folder is opened by its safetensors files, and those that torch.save wrote by their "
        f"path: write {_opening(file)}",
    )


def _refuse_disk(name: str, devices: Sequence[str], budget: object = None) -> None:
    """Raise ValueError, with the arguments to write for `name`, if the disk is among `devices`."""
    if _DISK not in devices:
        return
    others = [device for device in devices if device != _DISK]
    written = [f'device="{others[0]}"'] if others else []
    written += [f"budget={json.dumps(budget)}"] if budget is not None else []
    instead = f"{_FROM_FILES}: write {', '.join([*written, 'offload=True'])}"
    raise ValueError(f"{name}: the disk is no device here: {instead}")


def _place(out: dict[str, Any], device_map: Any, max_memory: Any) -> None:
    """Replace ``device_map`` and ``max_memory`` by entries "device" and "budget" in `out`."""
    if max_memory is not None:
        sizes = {_device(name): size for name, size in max_memory.items()}
        first = next((size for name, size in sizes.items() if name != _DISK), None)
        _refuse_disk("max_memory", list(sizes), first)
        if out.get("budget") is not None:
            raise _twice("max_memory", "budget")
        out["budget"] = sizes
        if device_map is None or device_map in _EVERYWHERE:
            device_map = list(sizes)
    if device_map is not None:
        if out.get("device") is not None:
            raise _twice("device_map", "device")
        out["device"] = _devices(device_map)
    device = out.get("device")
    if isinstance(device, Sequence) and not isinstance(device, str):
        out["device"] = [_device(one) for one in device]
    else:
        out["device"] = _device(device)


def _devices(device_map: Any) -> Any:
    """Return the device, or the list of devices, that a ``device_map`` names."""
    if isinstance(device_map, Mapping):
        found = list(dict.fromkeys(map(_device, device_map.values())))
        _refuse_disk("device_map", found)
        if len(found) != 1:
            budget = ", ".join(f'"{name}": "..."' for name in found)
            raise ValueError(
                "device_map places modules one by one, and layers are split by bytes here: write "
                f"device={found}".replace("'", '"')
                + f", and budget={{{budget}}} for the sizes"
            )
    elif isinstance(device_map, str) and device_map in _EVERYWHERE:
        found = list(framework("torch").candidates()[:-1]) or ["cpu"]  # the last is the CPU
    elif isinstance(device_map, list):
        found = device_map
    else:
        found = [device_map]
        _refuse_disk("device_map", found)
    return found[0] if len(found) == 1 else found


def _device(device: Any) -> Any:
    """Return the name of torch's device: "cuda:0" for ``torch.device("cuda:0")`` or ``0``."""
    if isinstance(device, torch.device):
        return str(device)
    if not isinstance(device, int) or isinstance(device, bool):
        return device
    kind = framework("torch").candidates()[0].partition(":")[0]
    return f"{'cuda' if kind == 'cpu' else kind}:{device}"
