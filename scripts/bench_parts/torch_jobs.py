"""Ways to get a checkpoint into a torch model on the CPU: what people write, and streamload's."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHECKED_NBYTES = 2**22  # what is looked at in one go: it may be copied


@dataclass(frozen=True, slots=True)
class Way:
    """One way to load.

    Attributes:
        load: from the folder of a checkpoint and a budget in bytes to the model.
        dtype: what the weights are afterwards; those of the file are bfloat16.
        ours: it is streamload's.
        needs: the modules that it takes.
    """

    load: Callable[[Path, int], Any]
    dtype: str = "bfloat16"
    ours: bool = False
    needs: tuple[str, ...] = ("torch", "transformers")

    @property
    def works(self) -> bool:
        """Whether all modules are here."""
        return all(_is_there(name) for name in self.needs)


def _is_there(name: str) -> bool:
    package = name.partition(".")[0]
    return importlib.util.find_spec(package) is not None and (
        package == name or importlib.util.find_spec(name) is not None
    )


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def _built(path: Path, dtype: str = "bfloat16") -> Any:
    """The model on the CPU, with the random weights that its class gives it."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(_config(path), dtype=getattr(torch, dtype))


def _meta(path: Path, dtype: str = "bfloat16") -> Any:
    """The model without memory."""
    import torch

    with torch.device("meta"):
        return _built(path, dtype)


def _load_file(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(path / "model.safetensors")
    return found


def _copied(path: Path, budget_nbytes: int) -> Any:
    model = _built(path)
    model.load_state_dict(_load_file(path))
    return model


def _copied_into_float32(path: Path, budget_nbytes: int) -> Any:
    """The model as ``LlamaForCausalLM(config)`` makes it: torch's default dtype is float32."""
    model = _built(path, "float32")
    model.load_state_dict(_load_file(path))
    return model


def _assigned(path: Path, budget_nbytes: int) -> Any:
    model = _meta(path)
    model.load_state_dict(_load_file(path), assign=True)
    return model


def _assigned_as_float16(path: Path, budget_nbytes: int) -> Any:
    model = _meta(path)
    state = {name: tensor.half() for name, tensor in _load_file(path).items()}
    model.load_state_dict(state, assign=True)
    return model


def _from_pretrained(dtype: str, **options: Any) -> Callable[[Path, int], Any]:
    def load(path: Path, budget_nbytes: int) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)

    return load


def _accelerate(dtype: str) -> Callable[[Path, int], Any]:
    def load(path: Path, budget_nbytes: int) -> Any:
        accelerate = importlib.import_module("accelerate")
        with accelerate.init_empty_weights():
            model = _built(path, dtype)
        return accelerate.load_checkpoint_and_dispatch(
            model, path, device_map={"": "cpu"}, dtype=dtype
        )

    return load


def _streamload(
    build: Callable[[Path, str], Any], dtype: str, budgeted: bool = True
) -> Callable[[Path, int], Any]:
    def load(path: Path, budget_nbytes: int) -> Any:
        from streamload import load_state_dict

        model = build(path, dtype)
        load_state_dict(
            model,
            path,
            budget=budget_nbytes if budgeted else None,
            device="cpu",
            dtype=dtype,
            progress=False,
        )
        return model

    return load


def _streamload_from_pretrained(dtype: str) -> Callable[[Path, int], Any]:
    def load(path: Path, budget_nbytes: int) -> Any:
        from streamload.transformers import from_pretrained

        return from_pretrained(path, budget=budget_nbytes, device="cpu", dtype=dtype)

    return load


_ACCELERATE = ("torch", "transformers", "accelerate")
_OURS_TOO = ("torch", "transformers", "streamload.transformers")

#: By name. The default float32 is there since that is what a model's class makes unless told.
WAYS: dict[str, Way] = {
    "float32 model, load_file, load_state_dict": Way(_copied_into_float32, "float32"),
    "model, load_file, load_state_dict": Way(_copied),
    "meta, load_file, assign": Way(_assigned),
    "transformers": Way(_from_pretrained("auto")),
    "transformers, device_map": Way(_from_pretrained("auto", device_map="cpu")),
    "accelerate": Way(_accelerate("bfloat16"), needs=_ACCELERATE),
    "streamload, meta": Way(_streamload(_meta, "bfloat16"), ours=True),
    "streamload, meta, no budget": Way(_streamload(_meta, "bfloat16", False), ours=True),
    "streamload, in place": Way(_streamload(_built, "bfloat16"), ours=True),
    "streamload.transformers": Way(
        _streamload_from_pretrained("bfloat16"), ours=True, needs=_OURS_TOO
    ),
    "meta, load_file, half, assign": Way(_assigned_as_float16, "float16"),
    "transformers, float16": Way(_from_pretrained("float16"), "float16"),
    "transformers, float16, device_map": Way(
        _from_pretrained("float16", device_map="cpu"), "float16"
    ),
    "accelerate, float16": Way(_accelerate("float16"), "float16", needs=_ACCELERATE),
    "streamload, meta, float16": Way(_streamload(_meta, "float16"), "float16", ours=True),
    "streamload, in place, float16": Way(_streamload(_built, "float16"), "float16", ours=True),
    "streamload.transformers, float16": Way(
        _streamload_from_pretrained("float16"), "float16", ours=True, needs=_OURS_TOO
    ),
}


def torch_load(path: str, way: str, budget_nbytes: int = 2**62) -> dict[str, Any]:
    """Load a checkpoint into a model of transformers, on the CPU.

    Args:
        path: the folder of a Llama in one file, with its config.json.
        way: one of `WAYS`.
        budget_nbytes: for streamload.

    Returns:
        The time of the load, building the model included; the peak of RSS until it was done and
        until all weights were looked at; by how much the load made anonymous memory grow; a
        checksum of the weights.
    """
    importlib.import_module("transformers")
    begun = _status()
    wall = time.perf_counter()
    model = WAYS[way].load(Path(path), budget_nbytes)
    wall_s = time.perf_counter() - wall
    gc.collect()
    loaded = _status()
    crc32 = _crc32(model)  # reads what is mapped
    return {
        "laps": [{"wall_s": wall_s}],
        "rss_peak_nbytes": loaded["VmHWM"],
        "anon_nbytes": loaded["RssAnon"] - begun["RssAnon"],
        "rss_used_nbytes": _status()["VmHWM"],
        "crc32": crc32,
    }


def _status() -> dict[str, int]:
    """Fields of /proc/self/status in bytes; VmHWM is the kernel's own peak of RSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = (line.partition(":") for line in lines if line.startswith(("Rss", "VmHWM")))
    return {name: int(value.split()[0]) * 1024 for name, _, value in fields}


def _crc32(model: Any) -> int:
    """A checksum of all weights in the order of their names, looked at piece by piece."""
    import torch

    found = 0
    for _, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHECKED_NBYTES):
            found = zlib.crc32(flat[start : start + _CHECKED_NBYTES].numpy(), found)
    return found


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"torch_load": torch_load}
