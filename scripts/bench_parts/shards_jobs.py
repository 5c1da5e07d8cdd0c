"""What a rank does to load its shards of transformers' tensor parallelism, in three ways."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig

import streamload.transformers
from streamload.bench.processes import process_memory
from streamload.core.memory import proc_fields

_SAMPLE_S = 0.01


def by_streamload(path: str, config: Any, budget: int) -> Any:
    """Each rank streams its shards."""
    options: dict[str, Any] = {"budget": budget, "progress": False}
    return streamload.transformers.from_pretrained(path, distributed_config=config, **options)


def by_transformers(path: str, config: Any, budget: int) -> Any:
    """Each rank takes slices of mapped files."""
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype="bfloat16")


def by_checkpoint(path: str, config: Any, budget: int) -> Any:
    """torch's distributed checkpoints, into empty DTensors; buffers are left without values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype="bfloat16")
    kind = type(model)
    config, _, mesh = kind.prepare_distribute_model(config)
    kind.maybe_distribute_model(model, config, mesh)
    model.to_empty(device="cpu")
    load(model.state_dict(), storage_reader=HuggingFaceStorageReader(path))
    return model


WAYS: dict[str, Callable[[str, Any, int], Any]] = {
    "streamload": by_streamload,
    "transformers": by_transformers,
    "torch DCP": by_checkpoint,
}


def rank(way: str, begun: float, path: str, budget: int) -> Callable[[], dict[str, Any]]:
    """Meet the others, and load in a lap, one of `WAYS`; all began at ``begun`` (`time.time`)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = DistributedConfig(tp_size=dist.get_world_size())
    dist.barrier()

    def lap() -> dict[str, Any]:
        start, before = time.perf_counter(), process_memory(os.getpid()).anon_nbytes
        counted, peak, ended = proc_fields(Path("/proc/self/io")), [before], threading.Event()

        def sample() -> None:
            while not ended.wait(_SAMPLE_S):
                peak.append(max(peak.pop(), process_memory(os.getpid()).anon_nbytes))

        thread = threading.Thread(target=sample)
        thread.start()
        model = WAYS[way](path, config, budget)
        seconds = time.perf_counter() - start
        ended.set()
        thread.join()
        after = proc_fields(Path("/proc/self/io"))
        local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        said = {
            "rank": dist.get_rank(),
            "seconds": seconds,
            "grown_nbytes": max(*peak, process_memory(os.getpid()).anon_nbytes) - before,
            "weights_nbytes": sum(each.nbytes for each in local),
            "called_nbytes": after["rchar"] - counted["rchar"],
            "disk_nbytes": after["read_bytes"] - counted["read_bytes"],
        }
        dist.barrier()
        dist.destroy_process_group()
        return said

    return lap
