"""Helpers that `test_distributed` shares with other tests."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from safetensors_files import write_safetensors
from thread_group import ThreadGroup

from streamload import distributed

ROOT = Path(__file__).parents[2]

LAYERS, WIDTH = 5, 16

PLENTY = 10**8


def llama(
    folder: Path, *, dtype: str = "F32", shards: int = 2, seed: int = 0, width: int = WIDTH
) -> Path:
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (4 * width, width)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for part in "qkvo":
            shapes[f"{at}self_attn.{part}_proj.weight"] = (width, width)
        shapes[f"{at}mlp.up_proj.weight"] = (3 * width, width)
        shapes[f"{at}input_layernorm.weight"] = (width,)
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (4 * width, width)}
    numpy = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype]
    tensors = {}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape, np.float32)
        if dtype == "BF16":
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        tensors[name] = (dtype, shape, values.astype(numpy).tobytes())
    names = list(tensors)
    per = -(-len(names) // shards)
    weight_map = {}
    for shard in range(shards):
        part = names[shard * per : (shard + 1) * per]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": width}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return llama(tmp_path / "model")


def load(path: Path, *, model: Any = None, timeout: float = 20.0, **options: Any) -> Any:
    options = {"budget": PLENTY, "device": "host", "progress": False} | options

    def body(group: ThreadGroup) -> Any:
        return distributed.load_state_dict(
            model if hasattr(model, "parameters") or model is None else model(group.rank),
            path,
            group=group,
            timeout=timeout,
            **options,
        )

    return body


def succeeded(found: Sequence[Any]) -> list[Any]:
    """Reports, of a run in which nothing failed."""
    for said in found:
        if isinstance(said, BaseException):
            raise said
    return list(found)


def environment(**more: str) -> dict[str, str]:
    prefixes = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    python = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return clean | {"PYTHONPATH": python, "OMP_NUM_THREADS": "1"} | more


def run_ranks(command: Sequence[object], codes: Sequence[int], timeout: float = 240) -> list[str]:
    """Run a command as ranks of torch.distributed on loopback; gives what each wrote to stdout.

    Their exit codes must be ``codes``.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(codes)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        forked.start(
            command,
            forked.TORCH,
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **variables),
        )
        for rank in range(len(codes))
    ]
    try:
        said = [rank.communicate(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [*codes], said[0][1][-3000:]
    return [out for out, _ in said]
