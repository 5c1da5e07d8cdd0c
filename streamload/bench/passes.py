"""Passes (forward calls) of a model larger than its device: jobs of `streamload.bench.offloading`.

Each function loads a model and returns a function that runs a pass and returns figures of it.
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

    model = from_pretrained(
        path,
        device=device,
        budget=budget,
        dtype=dtype,
        offload=True,
        tokens=tokens,
        progress=False,
        **how,
    )
    report = model.streamload_offload.report
    return _lap(model, device, tokens, {"pass_nbytes": report.pass_nbytes})


def accelerate_passes(path: str, device: str, budget: int, tokens: int) -> Lap:
    """Return a function that runs a pass by accelerate, with weights beyond ``budget`` on disk."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tempfile.mkdtemp(prefix="streamload-bench-")
    room: dict[int | str, int] = {"cpu": budget}
    if device.startswith("cuda"):
        room = {torch.device(device).index or 0: budget, "cpu": 0}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype="auto", device_map="auto", max_memory=room, offload_folder=folder
    )
    return _lap(model, device, tokens, {})


def group_passes(path: str, device: str, budget: int, tokens: int, low_memory: bool = False) -> Lap:
    """Return a function that runs a pass with group offloading of diffusers, of any budget."""
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
    return _lap(model, device, tokens, {})


def layered_passes(path: str, device: str, budget: int, tokens: int) -> Lap:
    """Return a function that runs a pass by AirLLM, from a file per layer that it writes first."""
    from airllm import AutoModel
    from airllm.airllm_base import AirLLMBaseModel

    AirLLMBaseModel.get_tokenizer = lambda self, hf_token=None: None  # passes need none
    folder = tempfile.mkdtemp(prefix="streamload-bench-")
    model = AutoModel.from_pretrained(path, device=device, layer_shards_saving_path=folder)
    return _lap(model, device, tokens, {})


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
