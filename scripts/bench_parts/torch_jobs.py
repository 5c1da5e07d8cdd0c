"""Ways to get a checkpoint into a torch model on the CPU: what people write, and streamload's."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamload.bench.processes import proc_nbytes

_CHECKED_NBYTES = 2**22  # what is looked at in one go: it may be copied


@dataclass(frozen=True, slots=True)
class Way:
    """One way to load."""

    # from the folder of a checkpoint, a dtype and a budget in bytes to the model
    load: Callable[[Path, str, int], Any]
    dtype: str = "bfloat16"  # what the weights are afterwards; those of the file are bfloat16
    ours: bool = False  # it is streamload's
    needs: str = ""  # a module that it takes besides torch and transformers, or ""

    @property
    def works(self) -> bool:
        """Whether all modules are here."""
        names = ("torch", "transformers", *filter(None, [self.needs]))
        return all(importlib.util.find_spec(name) is not None for name in names)


def _built(path: Path, dtype: str) -> Any:
    """The model on the CPU, with the random weights that its class gives it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def _meta(path: Path, dtype: str) -> Any:
    """The model without memory."""
    import torch

    with torch.device("meta"):
        return _built(path, dtype)


def _load_file(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(path / "model.safetensors")
    return found


def _copied(path: Path, dtype: str, budget_nbytes: int) -> Any:
    """Into a model of that dtype; ``LlamaForCausalLM(config)`` makes one of torch's, float32."""
    model = _built(path, dtype)
    model.load_state_dict(_load_file(path))
    return model


def _assigned(path: Path, dtype: str, budget_nbytes: int) -> Any:
    model, state = _meta(path, "bfloat16"), _load_file(path)
    if dtype == "float16":
        state = {name: tensor.half() for name, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    return model


def _from_pretrained(path: Path, dtype: str, budget_nbytes: int, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    wanted = "auto" if dtype == "bfloat16" else dtype
    return AutoModelForCausalLM.from_pretrained(path, dtype=wanted, **options)


def _accelerate(path: Path, dtype: str, budget_nbytes: int) -> Any:
    accelerate = importlib.import_module("accelerate")
    with accelerate.init_empty_weights():
        model = _built(path, dtype)
    return accelerate.load_checkpoint_and_dispatch(model, path, device_map={"": "cpu"}, dtype=dtype)


def _streamload(
    build: Callable[[Path, str], Any], path: Path, dtype: str, budget_nbytes: int | None
) -> Any:
    from streamload import load_state_dict

    model = build(path, dtype)
    load_state_dict(model, path, budget=budget_nbytes, device="cpu", dtype=dtype, progress=False)
    return model


def _ours_from_pretrained(path: Path, dtype: str, budget_nbytes: int) -> Any:
    from streamload.transformers import from_pretrained

    return from_pretrained(path, budget=budget_nbytes, device="cpu", dtype=dtype)


_mapped = partial(_from_pretrained, device_map="cpu")
_into_meta, _in_place = partial(_streamload, _meta), partial(_streamload, _built)

#: By name. The default float32 is there since that is what a model's class makes unless told.
WAYS: dict[str, Way] = {
    "float32 model, load_file, load_state_dict": Way(_copied, "float32"),
    "model, load_file, load_state_dict": Way(_copied),
    "meta, load_file, assign": Way(_assigned),
    "transformers": Way(_from_pretrained),
    "transformers, device_map": Way(_mapped),
    "accelerate": Way(_accelerate, needs="accelerate"),
    "streamload, meta": Way(_into_meta, ours=True),
    "streamload, meta, no budget": Way(
        lambda path, dtype, _: _into_meta(path, dtype, None), ours=True
    ),
    "streamload, in place": Way(_in_place, ours=True),
    "streamload.transformers": Way(_ours_from_pretrained, ours=True),
    "meta, load_file, half, assign": Way(_assigned, "float16"),
    "transformers, float16": Way(_from_pretrained, "float16"),
    "transformers, float16, device_map": Way(_mapped, "float16"),
    "accelerate, float16": Way(_accelerate, "float16", needs="accelerate"),
    "streamload, meta, float16": Way(_into_meta, "float16", ours=True),
    "streamload, in place, float16": Way(_in_place, "float16", ours=True),
    "streamload.transformers, float16": Way(_ours_from_pretrained, "float16", ours=True),
}


def load(path: str, way: str, budget_nbytes: int = 2**62) -> Callable[[], dict[str, Any]]:
    """Load a Llama in one file, with its config.json, into a model of transformers, on the CPU.

    Returns:
        A lap of one of `WAYS`, which says the time of the load, building the model included; the
        peak of RSS until it was done and until all weights were looked at; by how much the load
        made anonymous memory grow; a checksum of the weights.
    """
    importlib.import_module("transformers")

    def lap() -> dict[str, Any]:
        begun, wall = proc_nbytes("/proc/self/status"), time.perf_counter()
        model = WAYS[way].load(Path(path), WAYS[way].dtype, budget_nbytes)
        seconds = time.perf_counter() - wall
        gc.collect()
        loaded = proc_nbytes("/proc/self/status")
        crc32 = _crc32(model)  # reads what is mapped
        return {  # VmHWM is the kernel's own peak of RSS
            "seconds": seconds,
            "rss_peak_nbytes": loaded["VmHWM"],
            "anon_nbytes": loaded["RssAnon"] - begun["RssAnon"],
            "rss_used_nbytes": proc_nbytes("/proc/self/status")["VmHWM"],
            "crc32": crc32,
        }

    return lap


def _crc32(model: Any) -> int:
    """A checksum of all weights in the order of their names, looked at piece by piece."""
    import torch

    found = 0
    for _, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHECKED_NBYTES):
            found = zlib.crc32(flat[start : start + _CHECKED_NBYTES].numpy(), found)
    return found
