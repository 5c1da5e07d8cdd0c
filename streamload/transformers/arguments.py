"""The arguments of transformers' own `from_pretrained`, as the ones that do the same here.

Each is taken, or answered by a ValueError with what to write instead. Source: its docstring and its
first lines, in transformers/modeling_utils.py.
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

from streamload.checkpoint.open import locate
from streamload.core.location import Location, Url, is_url
from streamload.devices.names import framework

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: They change nothing: nothing is downloaded or unpickled, and all is low on memory.
_WITHOUT_EFFECT = (
    *("local_files_only", "token", "use_auth_token", "proxies", "resume_download", "tqdm_class"),
    *("low_cpu_mem_usage", "weights_only", "offload_state_dict", "offload_buffers", "mirror"),
    *("_fast_init", "code_revision", "adapter_kwargs", "_commit_hash"),
    *("_from_auto", "_from_pipeline"),
)
#: What to write in place of those that are not there; None, False and "" are as if not given.
_INSTEAD: Mapping[str, str] = {
    "cache_dir": "set HF_HUB_CACHE in the environment, or give the folder of the snapshot",
    "distributed_config": "streamload.distributed.load_state_dict shares a model over ranks",
    "device_mesh": "streamload.distributed.load_state_dict shares a model over ranks",
    "force_download": "nothing is downloaded here: run `hf download org/name` first",
    "from_flax": "files of Flax are not read: leave it out where there are others",
    "from_tf": "files of TensorFlow are not read: leave it out where there are others",
    "fusion_config": "put it in the configuration: config=",
    "kernel_config": "load, and then call model.set_use_kernels(True, kernel_config)",
    "output_loading_info": "look at the model's streamload_report: its missing and skipped",
    "quantization_config": "leave it out, or let diffusers' own from_pretrained quantise",
    "state_dict": "give the path of a checkpoint",
    "tp_plan": "streamload.distributed.load_state_dict shares a model over ranks",
    "tp_size": "streamload.distributed.load_state_dict shares a model over ranks",
    "use_kernels": "load, and then call model.set_use_kernels(True)",
}
#: Those that ask for bitsandbytes' formats, and what asks for them here.
_QUANTISING = {"load_in_8bit": 'quant="int8"', "load_in_4bit": 'quant="nf4"'}
#: The file, or index, that torch.save's weights have in a folder; and with a variant.
_TORCH_FILES = (
    ("pytorch_model.bin.index.json", "pytorch_model.bin.index.{}.json"),
    ("pytorch_model.bin", "pytorch_model.{}.bin"),
)
_DISK = "disk"  # what accelerate calls it in a device_map
_FROM_FILES = "layers that do not fit stream from the checkpoint's own files"
_OTHERS = frozenset({"config_changes", "components"})
#: How like an option a name is that is taken for a slip, and not for one of the configuration.
_NEAR = 0.8
#: Values of ``device_map`` that leave the choice to accelerate.
_EVERYWHERE = ("auto", "balanced", "balanced_low_0", "sequential")


def takes_those_of_transformers(function: _Function) -> _Function:
    """Let a function take the arguments of transformers, too.

    Those that neither knows by name reach it as one dict, ``config_changes`` or ``components``:
    transformers changes its configuration by them, and diffusers takes them for components.
    """
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def entrance(*args: Any, **given: Any) -> Any:
        if (named := given.pop("pretrained_model_name_or_path", None)) is not None:
            if args or "path" in given:
                raise ValueError(
                    "pretrained_model_name_or_path and path say the same: leave one of them out"
                )
            given["path"] = named
        path = args[0] if args else given.get("path")
        return function(*args, **translated(given, known, path))

    return entrance  # type: ignore[return-value]


def translated(
    given: Mapping[str, Any], known: frozenset[str], path: object = None
) -> dict[str, Any]:
    """The arguments of ours that mean the same.

    Args:
        given: those that a caller wrote.
        known: the names of ours.
        path: the checkpoint, if it is one.

    Raises:
        ValueError: one has no counterpart, or contradicts another; says what to write.
    """
    rest = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    out = {name: rest.pop(name) for name in list(rest) if name in known}
    for name, instead in _INSTEAD.items():
        if name not in known and _is_given(rest.pop(name, None)):
            raise ValueError(f"{name} has no counterpart here: {instead}")
    _refuse_offload_folder(rest.pop("offload_folder", None), known)
    for name, instead in _QUANTISING.items():
        if not _is_given(rest.get(name)):
            rest.pop(name, None)
        elif "quant" in known:
            raise ValueError(
                f"{name} has no counterpart here: weights are quantised on the way: write {instead}"
            )
    if _is_given(file := rest.pop("gguf_file", None)):
        found = _found(path, out) / file if _is_path(path) else file
        raise ValueError(
            f"gguf_file={file!r} has no counterpart here: a GGUF is opened by its path: write "
            f"{_opening(found)}"
        )
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
    _place(out, rest.pop("device_map", None), rest.pop("max_memory", None), known)
    if any(get_close_matches(name, known, 1, _NEAR) for name in rest):
        return out | rest  # it is refused, as any unknown argument
    for others in _OTHERS & known:
        out[others] = {**(out.get(others) or {}), **rest}
        rest = {}
    return out | rest


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ""


def found_at(path: str | os.PathLike[str], revision: str | None, subfolder: str) -> Location:
    """Where the checkpoint is; a folder on this machine has no revisions."""
    name = os.fsdecode(path.href if isinstance(path, Url) else path)
    local = os.path.exists(os.path.expanduser(name)) or is_url(name)
    if revision is not None and not local and "@" not in name:
        name = f"{name}@{revision}"
    found, _ = locate(path if isinstance(path, Url) else name)
    return found / subfolder if subfolder else found


def _found(path: Any, out: Mapping[str, Any]) -> Location:
    return found_at(path, out.get("revision"), out.get("subfolder") or "")


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _opening(path: object) -> str:
    return f"streamload.transformers.from_pretrained({json.dumps(str(path), ensure_ascii=False)})"


def _check_torch_files(path: Any, out: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ValueError where use_safetensors=False chooses other files than a folder's path does.

    A folder without safetensors files is opened by those that torch.save wrote.
    """
    if "components" in known:
        raise ValueError(
            "use_safetensors=False has no counterpart here: files that torch.save wrote are read "
            "where there are no others: leave it out"
        )
    if not _is_path(path):
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
    raise ValueError(
        "use_safetensors=False has no counterpart here: a folder is opened by its safetensors "
        f"files, and those that torch.save wrote by their path: write {_opening(file)}"
    )


def _refuse_offload_folder(folder: object, known: frozenset[str]) -> None:
    if not _is_given(folder):
        return
    instead = "a pipeline fits as a whole: leave it out"
    if "offload" in known:
        instead = f"{_FROM_FILES}: write offload=True"
    raise ValueError(f"offload_folder has no counterpart here: {instead}")


def _refuse_disk(
    name: str, devices: Sequence[str], known: frozenset[str], budget: object = None
) -> None:
    """Raise ValueError for devices among which the disk is."""
    if _DISK not in devices:
        return
    others = [device for device in devices if device != _DISK]
    written = [f'device="{others[0]}"'] if others else []
    written += [f"budget={json.dumps(budget)}"] if budget is not None else []
    instead = f"write {', '.join(written)}" if written else "leave it out"
    if "offload" in known:
        instead = f"{_FROM_FILES}: write {', '.join([*written, 'offload=True'])}"
    raise ValueError(f"{name}: the disk is no device here: {instead}")


def _place(out: dict[str, Any], device_map: Any, max_memory: Any, known: frozenset[str]) -> None:
    """Read ``device_map`` and ``max_memory`` as a device and a budget."""
    if max_memory is not None:
        names = [_device(name) for name in max_memory]
        sizes = [size for name, size in max_memory.items() if name != _DISK]
        _refuse_disk("max_memory", names, known, sizes[0] if sizes else None)
        if out.get("budget") is not None:
            raise ValueError("max_memory and budget say the same: leave one of them out")
        out["budget"] = {_device(name): size for name, size in max_memory.items()}
        if device_map is None or device_map in _EVERYWHERE:
            device_map = list(max_memory)
    if device_map is not None:
        if out.get("device") is not None:
            raise ValueError("device_map and device say the same: leave one of them out")
        out["device"] = _devices(device_map, known)
    device = out.get("device")
    if isinstance(device, (torch.device, int)) and not isinstance(device, bool):
        out["device"] = _device(device)
    elif isinstance(device, Sequence) and not isinstance(device, str):
        out["device"] = [_device(one) for one in device]


def _devices(device_map: Any, known: frozenset[str]) -> Any:
    """The device, or the devices, of a ``device_map``."""
    if isinstance(device_map, str) and device_map in _EVERYWHERE:
        found = list(framework("torch").candidates()[:-1]) or ["cpu"]  # the last is the CPU
    elif isinstance(device_map, Mapping):
        found = list(dict.fromkeys(map(_device, device_map.values())))
        _refuse_disk("device_map", found, known)
        if len(found) != 1:
            budget = ", ".join(f'"{name}": "..."' for name in found)
            raise ValueError(
                "device_map places modules one by one, and layers are split by bytes here: write "
                f"device={found}".replace("'", '"')
                + f", and budget={{{budget}}} for the sizes"
            )
    elif isinstance(device_map, list):
        found = [_device(name) for name in device_map]
    else:
        _refuse_disk("device_map", [device_map] if device_map == _DISK else [], known)
        return _device(device_map)
    return found[0] if len(found) == 1 else found


def _device(device: Any) -> Any:
    """The name of a device of torch's: ``torch.device("cuda:0")``, ``"cuda:0"`` or ``0``."""
    if isinstance(device, torch.device):
        return str(device)
    if not isinstance(device, int) or isinstance(device, bool):
        return device
    kind = framework("torch").candidates()[0].partition(":")[0]
    return f"{'cuda' if kind == 'cpu' else kind}:{device}"
