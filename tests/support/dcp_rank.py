"""One rank that saves by torch.distributed.checkpoint: ``python dcp_rank.py FOLDER``.

It takes torch's variables. The folders in FOLDER are named for the forms of the checkpoint.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import streamload

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose axes no number of ranks divides, after a step of FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5, bias=False), nn.BatchNorm1d(5)
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def meshes(ranks: int) -> dict[str, Any]:
    """Tensors sharded over one axis and over two, by rows, columns and both, and replicated."""
    ways = (Shard(0), Shard(1), Shard(2), Replicate())
    whole = torch.arange(7 * 9 * 3).reshape(7, 9, 3)
    found = {}
    for shape in [(ranks,), (2, ranks // 2)][: 1 + (ranks > 2)]:
        mesh = init_device_mesh("cpu", shape)
        for number, each in enumerate(itertools.product(ways, repeat=len(shape))):
            values = whole.to([torch.float32, torch.bfloat16, torch.int64][number % 3]) + number
            found[f"{len(shape)}.{number}"] = distribute_tensor(values, mesh, each)
    return found


def check_reload(folder: Path) -> None:
    """Load into a sharded model; compare with dcp.load into another one."""
    mine, _ = trained()
    streamload.load_state_dict(mine, folder, device="cpu", progress=False)
    theirs = {"model": get_model_state_dict(trained()[0])}
    dcp.load(theirs, checkpoint_id=folder)
    for name, tensor in get_model_state_dict(mine).items():
        other = theirs["model"][name]
        if isinstance(tensor, DTensor):
            tensor, other = tensor.to_local(), other.to_local()
        assert torch.equal(tensor, other), name


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    weights["0.weight"].to_local().mul_(3)  # unlike those of any new model
    step = {"step": torch.tensor(3, dtype=torch.int32)}
    dcp.save(
        {"model": weights, "optimizer": state, "epoch": 3, "name": ["a"]},
        checkpoint_id=folder / "nested",
    )
    check_reload(folder / "nested")
    # as torchtitan: the model's tensors at the top, the optimizer's under flat names
    dcp.save({**weights, "optimizer": flat, "train_state": step}, checkpoint_id=folder / "titan")
    dcp.save({"model": weights, "ema": weights}, checkpoint_id=folder / "two")
    many = meshes(dist.get_world_size())
    dcp.save(many, checkpoint_id=folder / "meshes")
    files = {name: 1 + number % 2 for number, name in enumerate(many)}
    for form, options in {"hf": {}, "hf_files": {"fqn_to_index_mapping": files}}.items():
        writer = HuggingFaceStorageWriter(str(folder / form), save_distributed=True, **options)
        dcp.save(many, storage_writer=writer)
    whole = {n: t for n, t in many.items() if t.is_floating_point()}  # torch consolidates these
    writer = HuggingFaceStorageWriter(
        str(folder / "hf_whole"), save_distributed=True, enable_consolidation=True
    )
    dcp.save(whole, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
