"""The arguments of transformers' own `from_pretrained`, as the ones that do the same here.

Each is taken, or answered by a ValueError with what to write instead. Source: its docstring and its
first lines, in transformers/modeling_utils.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

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
    "from_flax": "only safetensors files are read",
    "from_tf": "only safetensors files are read",
    "fusion_config": "put it in the configuration: config=",
    "gguf_file": "only safetensors files are read: transformers' own from_pretrained takes it",
    "kernel_config": "load, and then call model.set_use_kernels(True, kernel_config)",
    "offload_folder": 'the disk is no device here: write device=["cuda:0", "cpu"]',
    "output_loading_info": "look at the model's streamload_report: its missing and skipped",
    "quantization_config": (
        "weights are not quantised on the way: leave it out, "
        "or let transformers' own from_pretrained do it"
    ),
    "state_dict": "give the path of a checkpoint",
    "tp_plan": "streamload.distributed.load_state_dict shares a model over ranks",
    "tp_size": "streamload.distributed.load_state_dict shares a model over ranks",
    "use_kernels": "load, and then call model.set_use_kernels(True)",
}
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
        return function(*args, **translated(given, known))

    return entrance  # type: ignore[return-value]


def translated(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The arguments of ours that mean the same.

    Args:
        given: those that a caller wrote.
        known: the names of ours.

    Raises:
        ValueError: one has no counterpart, or contradicts another; says what to write.
    """
    rest = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    out = {name: rest.pop(name) for name in list(rest) if name in known}
    for name, instead in _INSTEAD.items():
        if name not in known and _is_given(rest.pop(name, None)):
            raise ValueError(f"{name} has no counterpart here: {instead}")
    if rest.pop("use_safetensors", None) is False:
        raise ValueError("use_safetensors=False: only safetensors files are read; leave it out")
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
        out[others] = {**(out.get(others) or {}), **rest}
        rest = {}
    return out | rest


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ""


def _place(out: dict[str, Any], device_map: Any, max_memory: Any) -> None:
    """Read ``device_map`` and ``max_memory`` as a device and a budget."""
    if max_memory is not None:
        if out.get("budget") is not None:
            raise ValueError("max_memory and budget say the same: leave one of them out")
        out["budget"] = {_device(name): size for name, size in max_memory.items()}
        if device_map is None or device_map in _EVERYWHERE:
            device_map = list(max_memory)
    if device_map is not None:
        if out.get("device") is not None:
            raise ValueError("device_map and device say the same: leave one of them out")
        out["device"] = _devices(device_map)
    device = out.get("device")
    if isinstance(device, (torch.device, int)) and not isinstance(device, bool):
        out["device"] = _device(device)
    elif isinstance(device, Sequence) and not isinstance(device, str):
        out["device"] = [_device(one) for one in device]


def _devices(device_map: Any) -> Any:
    """The device, or the devices, of a ``device_map``."""
    if isinstance(device_map, str) and device_map in _EVERYWHERE:
        found = list(framework("torch").candidates()[:-1]) or ["cpu"]  # the last is the CPU
    elif isinstance(device_map, Mapping):
        found = list(dict.fromkeys(map(_device, device_map.values())))
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
