"""One rank of a load into DTensors: ``python sharded_rank.py CASE FOLDER`` with torch's variables.

The checkpoint is FOLDER/model.safetensors. It writes FOLDER/RANK.json when all is as it should be.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import streamload
from streamload.errors import StateDictMismatchError
from streamload.verification.verify import verify

IN, MIDDLE, OUT = 601, 1002, 777  # no axis divides by four ranks; tensor parallelism halves one


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(IN, MIDDLE), nn.ReLU(), nn.Linear(MIDDLE, OUT))


def read_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def check(model: nn.Module, path: Path, **options: Any) -> streamload.LoadReport:
    """Load, and compare: each part with that of the whole, the whole, and what was read."""
    before = read_nbytes()
    options = {"device": "cpu", "progress": False, "reader": "pread"} | options
    report = streamload.load_state_dict(model, path, **options)
    read = read_nbytes() - before
    mine = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    assert report.read_nbytes == mine, (report.read_nbytes, mine)
    assert read < mine + 500_000, (read, mine)  # of 5.5 MB; the rest is what is imported
    assert verify(report, streamload.open_checkpoint(path), model) == []
    same(dict(model.named_parameters()), path)
    return report


def same(found: dict[str, Any], path: Path) -> None:
    """Assert that DTensors are those of the full load, sharded afterwards."""
    whole = load_file(path)
    assert found.keys() == whole.keys()
    for name, tensor in found.items():
        data = tensor.detach()
        if any("Strided" in type(p).__name__ for p in data.placements):
            assert torch.equal(data.full_tensor(), whole[name]), name
            continue
        expected = distribute_tensor(whole[name], data.device_mesh, data.placements)
        assert torch.equal(data.to_local(), expected.to_local()), name
        assert torch.equal(data.full_tensor(), whole[name]), name


def runs(sharded: nn.Module, path: Path) -> None:
    """A forward pass, and a step of an optimizer, as of the model in one piece."""
    whole = model()
    whole.load_state_dict(load_file(path), assign=True)
    batch = torch.randn(8, IN, generator=torch.Generator().manual_seed(1))
    found = sharded(batch)
    assert torch.allclose(found, whole(batch), rtol=1e-3, atol=0.1)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    found.sum().backward()
    optimizer.step()


def fsdp(path: Path, *, there: bool) -> None:
    made = model()
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(made)
    if there:
        made.to_empty(device="cpu")
    before = [p.to_local().data_ptr() for p in made.parameters()]
    report = check(made, path)
    assert {p.action for p in report.plan.placements} == {"in_place" if there else "new"}
    if there:
        assert [p.to_local().data_ptr() for p in made.parameters()] == before
    runs(made, path)
    if there:
        check(made, path)
        # the last rank's shards are shorter, and views of what is padded to the others' length
        streamload.load_state_dict(made, path, residence="auto", device="cpu", progress=False)
        same(dict(made.named_parameters()), path)


def both(path: Path, *, there: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    made = model()
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(made, mesh["tensor"], styles)
    fully_shard(made, mesh=mesh["data"])
    if there:
        made.to_empty(device="cpu")
    check(made, path)
    runs(made, path)


def tensors(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = load_file(path)
    for placements in ([Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(1)]):
        for dtype in (torch.float32, torch.bfloat16):
            made = {
                name: distribute_tensor(
                    torch.zeros_like(t, dtype=dtype),
                    mesh,
                    placements if t.ndim > 1 else [Replicate(), Replicate()],
                )
                for name, t in whole.items()
            }
            streamload.load_state_dict(made, path, device="cpu", progress=False)
            for name, tensor in made.items():
                assert torch.equal(tensor.full_tensor(), whole[name].to(dtype)), name
    name = "0.weight"
    summed = DTensor.from_local(torch.zeros_like(whole[name]), mesh, [Partial(), Replicate()])
    try:
        streamload.load_state_dict({**whole, name: summed}, path, device="cpu", progress=False)
    except StateDictMismatchError as error:
        assert "0.weight: it is a DTensor of partial sums" in str(error)
    else:
        raise AssertionError("partial sums were loaded")


CASES: dict[str, Any] = {
    "fsdp": lambda path: fsdp(path, there=True),
    "fsdp on meta": lambda path: fsdp(path, there=False),
    "both": lambda path: both(path, there=True),
    "both on meta": lambda path: both(path, there=False),
    "tensors": tensors,
}


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    CASES[case](folder / "model.safetensors")
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
