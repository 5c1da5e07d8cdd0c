"""Passes (forward calls) of a model larger than its device: jobs of `streamload.bench.offloading`.

Each job loads a model and returns a function that runs a pass and returns figures of it.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

from streamload.errors import DeviceError

Lap = Callable[[], dict[str, Any]]


def passes(path: str, device: str, budget: int, tokens: int, dtype: str, **how: Any) -> Lap:
    """Return a function that runs a pass of a streamload-offloaded model; ``how``: its options."""
    from streamload.transformers import from_pretrained

    asked: dict[str, Any] = {"device": device, "budget": budget, "dtype": dtype, "tokens": tokens}
    model = from_pretrained(path, offload=True, progress=False, **asked, **how)
    report = model.streamload_offload.report
    return _lap(model, device, tokens, {"pass_nbytes": report.pass_nbytes})


def peer_passes(peer: str, path: str, device: str, budget: int, tokens: int) -> Lap:
    """Return a function that runs a pass by another library; accelerate alone heeds ``budget``."""
    if peer == "accelerate":
        model = _by_accelerate(path, device, budget)
    elif peer == "AirLLM":
        model = _by_airllm(path, device)
    else:
        model = _by_diffusers(path, device, low_memory=peer.endswith("low memory"))
    return _lap(model, device, tokens, {})


def _by_accelerate(path: str, device: str, budget: int) -> Any:
    """Load with the weights beyond ``budget`` on disk."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tempfile.mkdtemp(prefix="streamload-bench-")
    room: dict[int | str, int] = {"cpu": budget}
    if device.startswith("cuda"):
        room = {torch.device(device).index or 0: budget, "cpu": 0}
    return AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", device_map="auto", max_memory=room, offload_folder=folder
    )


def _by_diffusers(path: str, device: str, low_memory: bool) -> Any:
    import torch
    from diffusers.hooks import apply_group_offloading
    from transformers import AutoModelForCausalLM

    if not device.startswith("cuda"):
        raise DeviceError(device, "group offload with streams is for CUDA")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    # groups are the modules of lists in the module itself: the whole model has none
    model.get_output_embeddings().to(device)
    apply_group_offloading(
        model.base_model,
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        low_cpu_mem_usage=low_memory,
    )
    return model


def _by_airllm(path: str, device: str) -> Any:
    """Load from a file per layer that AirLLM writes first."""
    from airllm import AutoModel
    from airllm.airllm_base import AirLLMBaseModel

    AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None  # passes need none
    folder = tempfile.mkdtemp(prefix="streamload-bench-")
    return AutoModel.from_pretrained(path, device=device, layer_shards_saving_path=folder)


def _lap(model: Any, device: str, tokens: int, facts: dict[str, Any]) -> Lap:
    """Return a function that runs a pass and returns ``facts`` with the peak of device memory."""
    import torch

    on_cuda = device.startswith("cuda")
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, tokens), generator=generator).to(device)
    if hasattr(model, "eval"):
        model.eval()
    gc.collect()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)

    def lap() -> dict[str, Any]:
        with torch.no_grad():
            model(ids, use_cache=False)
        if not on_cuda:
            return facts
        torch.cuda.synchronize(device)
        return {**facts, "device_nbytes": torch.cuda.max_memory_allocated(device)}

    return lap
