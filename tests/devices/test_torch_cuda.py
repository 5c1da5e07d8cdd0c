"""torch on CUDA: the right bits, within the prediction. Skipped on machines without a GPU."""

from __future__ import annotations

import gc
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import needs
import pytest

import streamload
from streamload.devices.allocators import taken
from streamload.devices.probing import nvidia_parts
from streamload.errors import AllocationError, PlanInfeasibleError
from streamload.verification.verify import verify

torch = needs.module("torch")
save_file = needs.module("safetensors.torch").save_file
if not torch.cuda.is_available():  # CI has none: what needs no GPU is in test_torch_staged.py
    pytest.skip("no CUDA device here", allow_module_level=True)

MIB = 2**20


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield


def nn_model(path: Path, device: str = "meta", dtype: Any = None) -> Any:
    """A module that has the parameters of a Llama-shaped checkpoint, and does not run."""
    config = json.loads((path / "config.json").read_text())
    dim, ff = config["hidden_size"], config["intermediate_size"]
    kv = dim // config["num_attention_heads"] * config["num_key_value_heads"]
    nn = torch.nn

    def linear(rows: int, columns: int) -> Any:
        return nn.Linear(columns, rows, bias=False)

    def layer() -> Any:
        attention = {"q_proj": linear(dim, dim), "k_proj": linear(kv, dim)}
        attention |= {"v_proj": linear(kv, dim), "o_proj": linear(dim, dim)}
        mlp = {"gate_proj": linear(ff, dim), "up_proj": linear(ff, dim)}
        mlp |= {"down_proj": linear(dim, ff)}
        norms = {f"{n}_layernorm": nn.RMSNorm(dim) for n in ("input", "post_attention")}
        parts = {"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)}
        return nn.ModuleDict(parts | norms)

    with torch.device(device):
        inner = {
            "embed_tokens": nn.Embedding(config["vocab_size"], dim),
            "layers": nn.ModuleList(layer() for _ in range(config["num_hidden_layers"])),
            "norm": nn.RMSNorm(dim),
        }
        model = nn.ModuleDict(
            {"model": nn.ModuleDict(inner), "lm_head": linear(config["vocab_size"], dim)}
        )
    return model if dtype is None else model.to(dtype)


def check(report: Any, path: Path, model: Any = None) -> None:
    """Bit for bit, and no growth above the prediction by torch's own counter."""
    for d in report.plan.devices:
        if d.device.startswith("cuda"):
            assert report.measured_nbytes[d.device] <= d.peak_nbytes
    assert verify(report, streamload.open_checkpoint(path), model) == []


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_a_meta_module_arrives_bit_for_bit(
    tmp_checkpoint: Callable[..., Path], dtype: str | None
) -> None:
    path = tmp_checkpoint(150_000_000, shards=3)
    model = nn_model(path)
    report = streamload.load_state_dict(model, path, budget="2GB", device="cuda:0", dtype=dtype)
    predicted = report.predicted_nbytes["cuda:0"]
    counters = report.allocators["cuda:0"]
    assert counters["max_memory_allocated"] == torch.cuda.max_memory_allocated() <= predicted
    assert torch.cuda.max_memory_reserved() <= predicted
    assert torch.cuda.memory_reserved() == report.resident_nbytes
    assert report.device_map == {"": 0}
    assert "max_memory_reserved" in str(report)
    check(report, path, model)


def test_loading_again_writes_in_place(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(100_000_000)
    model = nn_model(path)
    streamload.load_state_dict(model, path, budget="1GB", device="cuda:0")
    weight = model["lm_head"].weight
    pointers = [p.data_ptr() for p in model.parameters()]
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        x = x @ x / 64
    copy = weight.detach() * 2
    with torch.no_grad():
        weight.zero_()
    report = streamload.load_state_dict(model, path, budget="1GB")
    assert {p.action for p in report.plan.placements} == {"in_place"}
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert torch.equal(copy, weight.detach() * 2)
    check(report, path, model)


@pytest.mark.parametrize("old", ["float32", "float16"])
def test_old_weights_go_first(tmp_checkpoint: Callable[..., Path], old: str) -> None:
    path = tmp_checkpoint(400_000_000)
    others = torch.cuda.memory_reserved()  # a workspace of cuBLAS
    model = nn_model(path, "cuda", getattr(torch, old))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - others
    torch.cuda.reset_peak_memory_stats()
    new = {"float32": "bfloat16", "float16": "float32"}[old]
    report = streamload.load_state_dict(model, path, budget="2GB", dtype=new)
    most = max(before, report.predicted_nbytes["cuda:0"])
    assert torch.cuda.max_memory_reserved() - others <= most
    assert {p.action for p in report.plan.placements} == {"replace"}
    assert report.plan.device("cuda:0").release_first
    check(report, path, model)


@pytest.mark.parametrize("cast", ["llvm", "numpy", "device"])
def test_every_cast_gives_the_same_bits(tmp_checkpoint: Callable[..., Path], cast: str) -> None:
    path = tmp_checkpoint(30_000_000, plant_extremes=True)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        report = streamload.load_state_dict(
            None, path, budget="1GB", device="cuda:0", dtype="float16", cast=cast
        )
    assert all(p.cast == cast for p in report.plan.placements)
    check(report, path)


@pytest.mark.parametrize("seed", range(8))
def test_the_allocator_takes_what_was_planned(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [
        rng.choice((rng.randrange(4096), rng.randrange(3 * MIB), rng.randrange(64 * MIB)))
        for _ in range(100)
    ]
    kept = []
    for nbytes, grown in zip(sizes, taken("cuda_caching", 512, sizes), strict=True):
        before = torch.cuda.memory_reserved()
        kept.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        assert torch.cuda.memory_reserved() - before == grown, nbytes


def test_what_does_not_fit_names_what_would(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(60_000_000)
    torch.empty(1, device="cuda")
    before = torch.cuda.memory_allocated()
    with pytest.raises(PlanInfeasibleError, match=r"cuda:0.*would fit") as caught:
        streamload.load_state_dict(None, path, budget="50MB", device="cuda:0")
    assert any("'cpu'" in s or "'cuda:1'" in s for s in caught.value.would_fit)
    assert torch.cuda.memory_allocated() == before


def test_two_devices_share_a_model(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(100_000_000)
    model = nn_model(path)
    other = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    report = streamload.load_state_dict(
        model, path, device=["cuda:0", other], budget={"cuda:0": "90MB", other: "90MB"}
    )
    check(report, path, model)
    places = {p.device.type + str(p.device.index) for p in model.parameters()}
    assert len(places) == 2
    assert report.device_map["model.embed_tokens"] == 0
    assert report.device_map["lm_head"] == (1 if other == "cuda:1" else "cpu")


def test_memory_that_torch_refuses(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(200_000_000)
    model = nn_model(path)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(100_000_000 / total)
    try:
        with pytest.raises(AllocationError) as caught:
            streamload.load_state_dict(model, path, device="cuda:0", budget="1GB")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    state = caught.value.state
    loaded = {n for n, p in model.named_parameters() if not p.is_meta}
    assert set(state.loaded) == loaded
    assert set(state.untouched) == {n for n, p in model.named_parameters() if p.is_meta}
    report = streamload.load_state_dict(model, path, device="cuda:0", budget="1GB")
    check(report, path, model)


def test_the_host_holds_a_little(tmp_checkpoint: Callable[..., Path]) -> None:
    """Staging is within its budget, and given back."""
    path = tmp_checkpoint(500_000_000)
    torch.zeros(1, device="cuda")
    report = streamload.load_state_dict(
        None, path, device="cuda:0", budget=streamload.Budget("1GB", host="16MiB")
    )
    assert report.held_nbytes["staging"] <= 16 * MIB
    again = streamload.load_state_dict(None, path, device="cuda:0", budget="1GB")
    assert again.measured_nbytes["process"] <= 100_000_000
    check(again, path)


KEPT = """
import sys
import torch
from streamload.devices import probing
from streamload.devices.torch.device import FRAMEWORK

torch.empty(1, device="cuda:0")  # in this process, and not in a child
if sys.argv[1] == "again":
    FRAMEWORK.probe = None  # would fail
print(probing.probe("torch", "cuda:0").dtypes["bfloat16"])
"""


def test_what_was_seen_of_a_gpu_is_kept(tmp_path: Path) -> None:
    """A later process computes nothing before it loads; another GPU, or driver, is looked at."""
    runs = ("first", "again")
    said = [forked.fresh(KEPT, which, XDG_CACHE_HOME=str(tmp_path)) for which in runs]
    assert said[0] == said[1] != ""
    assert any("GPU UUID" in part for part in nvidia_parts()), nvidia_parts()


@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
def test_matrices_are_transposed_on_the_way(tmp_path: Path, dtype: str) -> None:
    whole = torch.randn(1501, 2003).bfloat16()
    path = tmp_path / "model.safetensors"
    save_file({"w": whole}, path)
    with torch.device("meta"):
        model = torch.nn.Linear(1501, 2003, bias=False)
    report = streamload.load_state_dict(
        model,
        path,
        mapping={"weight": streamload.Source("w", transpose=True)},
        device="cuda:0",
        dtype=dtype,
        budget="50MB",
        progress=False,
    )
    wanted = whole.T if dtype == "checkpoint" else whole.T.half()
    assert torch.equal(model.weight.cpu(), wanted)
    check(report, path, model)


def test_rows_change_on_the_way(tmp_path: Path) -> None:
    whole = torch.randn(3001, 1003).bfloat16()
    path = tmp_path / "model.safetensors"
    save_file({"w": whole, "v": whole[:7].clone()}, path)
    made = streamload.load_state_dict(
        None,
        path,
        transform={"w": lambda rows: rows.astype("float32") * 2},
        dtype={"w": "float32"},
        device="cuda:0",
        budget="50MB",
        progress=False,
    ).state_dict
    assert torch.equal(made["w"].cpu(), whole.float() * 2)
    assert torch.equal(made["v"].cpu(), whole[:7])


@pytest.mark.parametrize("there", [False, True])
def test_columns_of_a_shard_alone(tmp_path: Path, there: bool) -> None:
    """One rank of four that shard a matrix by columns: strided ranges of the file."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    whole = torch.randn(2001, 1603).bfloat16()
    path = tmp_path / "model.safetensors"
    save_file({"w": whole}, path)
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cuda", (4,))
        empty = torch.empty_like(whole, device="cuda" if there else "meta")
        model = {"w": distribute_tensor(empty, mesh, [Shard(1)])}
        report = streamload.load_state_dict(
            model, path, device="cuda:0", dtype="checkpoint", budget="50MB", progress=False
        )
        local = model["w"].to_local()
        assert torch.equal(local.cpu(), whole.chunk(4, dim=1)[1])
        assert report.read_nbytes == local.nbytes
    finally:
        dist.destroy_process_group()


def test_an_adapter_is_merged_on_the_way(tmp_path: Path) -> None:
    base, folder = tmp_path / "model.safetensors", tmp_path / "adapter"
    folder.mkdir()
    w = torch.randn(801, 603).bfloat16()
    save_file({"layer.weight": w}, base)
    down, up = torch.randn(8, 603), torch.randn(801, 8)
    prefix = "base_model.model.layer"
    save_file(
        {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["layer"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = [
        streamload.load_state_dict(
            None,
            base,
            adapters=[folder],
            device=device,
            dtype="checkpoint",
            budget="50MB",
            progress=False,
        ).state_dict["layer.weight"]
        for device in ("cpu", "cuda:0")
    ]
    assert torch.equal(merged[0], merged[1].cpu())
    assert not torch.equal(merged[0], w)
