"""Loading across nodes: threads of this process as ranks, and a few real processes."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
import pytest
from distributed_helpers import (
    LAYERS,
    PLENTY,
    WIDTH,
    environment,
    llama,
    load,
    path,
    run_ranks,
    succeeded,
)
from safetensors_files import write_arrays, write_safetensors
from thread_group import ThreadGroup, World, run

import streamload
from streamload import distributed
from streamload.distributed import negotiate as agreement
from streamload.distributed.gather import CollectiveReader
from streamload.errors import (
    CheckpointError,
    NodeError,
    PeerFailedError,
    PlanInfeasibleError,
    ShardNotFoundError,
    StateDictMismatchError,
    StreamloadError,
)
from streamload.planning.partition import Node
from streamload.planning.shares import Member

__all__ = ["path"]

ROOT = Path(__file__).parents[2]
LOSS_S = 0.8
SPLITS = ("layers", "balanced", "replicate")


def alone(path: Path, **options: Any) -> dict[str, Any]:
    options = {"budget": PLENTY, "device": "host", "progress": False} | options
    found: dict[str, Any] = dict(streamload.load_state_dict(None, path, **options).state_dict)
    return found


def equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, array in found.items():
        assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
        assert array.tobytes() == expected[name].tobytes(), name


def kinds(found: Sequence[Any]) -> list[str]:
    return [type(said).__name__ for said in found]


def open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return {name for name in found if name.endswith(".safetensors")}


def nothing_left() -> None:
    """Assert that no file is open and no ring of blocks is held; `run` looks at threads."""
    gc.collect()
    assert open_files() == set()
    assert sum(held.nbytes for held in gc.get_objects() if type(held) is CollectiveReader) == 0


def everything(nodes: Sequence[Node], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """A split by which each rank reads all for itself."""
    return {node.name: list(sizes) for node in nodes}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("split", SPLITS)
def test_every_parameter_is_loaded_as_by_one_process(split: str, size: int, path: Path) -> None:
    reports = succeeded(run(World(size), load(path, split=split)))
    expected = alone(path)
    names = [name for report in reports for name in report.state_dict]
    times = size if split == "replicate" else 1
    assert sorted(names) == sorted([*expected] * times)
    for rank, report in enumerate(reports):
        equal(report.state_dict, expected)
        assert [node.rank for node in report.nodes] == list(range(size))
        assert report.nodes == reports[0].nodes
        assert report.nodes[rank].tensors == len(report.state_dict)
        assert report.read_nbytes == sum(array.nbytes for array in report.state_dict.values())
    assert open_files() == set()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mapping", [None, "hf-llama"])
@pytest.mark.parametrize("dtype", [None, {"*norm*": "float32", "*": "float16"}], ids=str)
def test_casts_and_mappings(split: str, mapping: Any, dtype: Any, tmp_path: Path) -> None:
    path = llama(tmp_path / "m", dtype="BF16", shards=3)
    options = {"mapping": mapping, "dtype": dtype}
    reports = succeeded(run(World(3), load(path, split=split, **options)))
    expected = alone(path, **options)
    assert {name for report in reports for name in report.state_dict} == expected.keys()
    for report in reports:
        equal(report.state_dict, expected)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("chunk", [512, 3000, None])
def test_replicas_by_small_chunks_and_several_threads(
    chunk: int | None, threads: int, path: Path
) -> None:
    options = {"split": "replicate", "chunk_nbytes": chunk, "threads": threads}
    reports = succeeded(run(World(3), load(path, **options)))
    for report in reports:
        equal(report.state_dict, alone(path))


@pytest.mark.parametrize(
    ("hosts", "block_nbytes"),
    [
        ([None] * 3, 4 * 2**20 // 3),
        (["64MiB", "8MiB", "1GB"], 2**20),
        (["300MB"] * 3, 4 * 2**20),
        (["64MiB"] * 3, (2**26 // 3 - 2**23) // 8),
    ],
    ids=str,
)
def test_replicas_larger_than_all_blocks(
    hosts: Sequence[str | None], block_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MB of one tensor and some around it: more than the ring holds at once."""
    held: list[int] = []

    class Seen(CollectiveReader):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            longest = max(block.stop - block.start for block in self._blocks[file])
            held.append(longest)

    monkeypatch.setattr("streamload.distributed.load.CollectiveReader", Seen)
    generator = np.random.default_rng(0)
    tensors = {
        "a": ("U8", (5,), generator.bytes(5)),
        "b": ("U8", (40_000_001,), generator.bytes(40_000_001)),
        "c": ("U8", (2**22,), generator.bytes(2**22)),
        "d": ("U8", (1,), b"d"),
    }
    file = write_safetensors(tmp_path / "m.safetensors", tensors)
    budgets = [streamload.Budget(PLENTY, host=host) for host in hosts]
    for report in succeeded(with_budgets(file, budgets, split="replicate")):
        for name, array in report.state_dict.items():
            assert array.tobytes() == tensors[name][2]
    assert held == [block_nbytes // 3 * 3] * 3
    nothing_left()


@pytest.mark.parametrize(
    ("device", "gpus", "own"),
    [
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("torch:CUDA", 3, ["cuda:0", "cuda:1"]),
        ("cuda", 1, ["cuda", "cuda"]),  # they share it, or a launcher shows each its own
        ("cuda:1", 2, ["cuda:1", "cuda:1"]),
        ("cpu", 2, ["cpu", "cpu"]),
        ("torch", 2, ["torch", "torch"]),  # what the program has chosen
        ("CUDA", 2, ["CUDA", "CUDA"]),  # tinygrad does not say how many there are
        (None, 2, [None, None]),
    ],
)
def test_ranks_of_a_host_have_gpus_of_their_own(
    device: str | None, gpus: int, own: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = needs.module("streamload.devices.torch.device").FRAMEWORK
    names = [*(f"cuda:{number}" for number in range(gpus)), "cpu"]
    monkeypatch.setattr(type(framework), "candidates", lambda self: names)
    ranks = [Member(rank, f"n/{rank}", "n", rank, 2) for rank in range(2)]
    assert [agreement.own_device(device, rank) for rank in ranks] == own
    assert agreement.own_device(device, Member(0, "n", "n", 0, 1)) == device


def test_a_plan_says_what_a_rank_will_load(path: Path) -> None:
    def body(group: ThreadGroup) -> Any:
        planned = distributed.plan(path, budget=PLENTY, group=group, timeout=20)
        report = load(path)(group)
        return planned, tuple(report.state_dict)

    found = succeeded(run(World(3), body))
    assert len({planned.digest for planned, _ in found}) == 1
    for rank, (planned, names) in enumerate(found):
        assert planned.mine.rank == rank
        assert sorted(planned.mine.parameters) == sorted(names)
    layers = [n for planned, _ in found for n in planned.mine.layers]
    assert sorted(layers) == list(range(LAYERS))


def test_the_group_that_was_given_is_not_closed(path: Path) -> None:
    world = World(2)
    calls = iter(range(10))
    lock = threading.Lock()

    def split(nodes: Sequence[Node], sizes: Mapping[str, int]) -> Any:
        with lock:
            if next(calls) == 1:
                raise ValueError("not this time")
        return {nodes[0].name: list(sizes)}

    def body(group: ThreadGroup) -> Any:
        load(path)(group)
        with pytest.raises((ValueError, NodeError), match="not this time"):
            load(path, split=split)(group)
        return load(path, split=split)(group)

    reports = succeeded(run(world, body))
    assert world.closed == set()
    equal(reports[0].state_dict, alone(path))


def test_outside_a_launcher_it_is_a_load(path: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    code = """
import json, sys
from streamload import distributed
told = []
report = distributed.load_state_dict(
    None, sys.argv[1], budget="1GB", device="host", progress=lambda *a: told.append(a)
)
print(json.dumps([len(report.state_dict), [n.tensors for n in report.nodes], told[-1]]))
"""
    count, tensors, last = json.loads(forked.fresh(code, path, env=environment()))
    assert tensors == [count]
    assert last[0] == last[1] > 0
    assert told == []


def test_progress_is_shown_once_for_all(path: Path) -> None:
    world = World(3)
    told: list[tuple[int, int, int]] = []

    def body(group: ThreadGroup) -> Any:
        def progress(done: int, total: int) -> None:
            told.append((group.rank, done, total))
            assert threading.current_thread().name == "rank-0"

        return load(path, progress=progress)(group)

    reports = succeeded(run(world, body))
    total = sum(report.read_nbytes for report in reports)
    assert {rank for rank, _, _ in told} == {0}
    assert told[-1] == (0, total, total)


# --- models ---------------------------------------------------------------------------------------


def torch_llama(
    width: int = WIDTH, *, device: str = "meta", only: Any = None, first: int | None = None
) -> Any:
    torch = needs.module("torch")
    nn = torch.nn

    def linear(inner: int, outer: int) -> Any:
        return nn.Linear(inner, outer, bias=False, device=device)

    def layer() -> Any:
        attention = nn.ModuleDict({f"{part}_proj": linear(width, width) for part in "qkvo"})
        return nn.ModuleDict(
            {
                "self_attn": attention,
                "mlp": nn.ModuleDict({"up_proj": linear(width, 3 * width)}),
                "input_layernorm": nn.RMSNorm(width, device=device),
            }
        )

    layers = range(LAYERS) if only is None else only.layers
    if first is not None:
        layers = range(first, first + len(layers))
    inner: dict[str, Any] = {"layers": nn.ModuleDict({str(n): layer() for n in layers})}
    if only is None or only.has_embedding:
        inner["embed_tokens"] = nn.Embedding(4 * width, width, device=device)
    if only is None or only.has_head:
        inner["norm"] = nn.RMSNorm(width, device=device)
    whole: dict[str, Any] = {"model": nn.ModuleDict(inner)}
    if only is None or only.has_head:
        whole["lm_head"] = linear(width, 4 * width)
    return nn.ModuleDict(whole)


def test_a_whole_model_on_meta_gets_its_part(path: Path) -> None:
    needs.module("torch")
    models = [torch_llama() for _ in range(3)]
    reports = succeeded(run(World(3), load(path, model=models.__getitem__, device="cpu")))
    expected = alone(path)
    owned: list[str] = []
    for model, report in zip(models, reports, strict=True):
        for name, parameter in model.named_parameters():
            if name in {p.name for p in report.plan.placements}:
                owned.append(name)
                assert parameter.detach().numpy().tobytes() == expected[name].tobytes()
            else:
                assert parameter.is_meta
    assert sorted(owned) == sorted(expected)


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_of_the_part_alone(strict: bool, path: Path) -> None:
    needs.module("torch")
    models: dict[int, Any] = {}

    def body(group: ThreadGroup) -> Any:
        mine = distributed.plan(path, budget=PLENTY, group=group).mine
        models[group.rank] = torch_llama(only=mine)
        return load(path, model=models[group.rank], device="cpu", strict=strict)(group)

    succeeded(run(World(2), body))
    expected = alone(path)
    found = {n: p for model in models.values() for n, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.detach().numpy().tobytes() == expected[name].tobytes()


def parts_of(path: Path, *, first: int, size: int = 3, **options: Any) -> tuple[Any, list[Any]]:
    """What ranks return that each build their part with layers numbered from ``first``."""
    models: dict[int, Any] = {}

    def body(group: ThreadGroup) -> Any:
        mine = distributed.plan(path, budget=PLENTY, group=group).mine
        models[group.rank] = mine, torch_llama(only=mine, first=first)
        return load(path, model=models[group.rank][1], device="cpu", **options)(group)

    return run(World(size), body), [models[rank] for rank in range(size)]


@pytest.mark.parametrize("first", [0, 7])
def test_layers_numbered_by_each_rank(first: int, path: Path) -> None:
    """``layers=`` says which numbers a rank's model has for its own layers."""
    needs.module("torch")

    def numbers(part: Any) -> range:
        return range(first, first + len(part.layers))

    found, models = parts_of(path, first=first, layers=numbers)
    reports = succeeded(found)
    expected = alone(path)
    loaded = set()
    for (mine, model), report in zip(models, reports, strict=True):
        back = {str(first + at): str(layer) for at, layer in enumerate(mine.layers)}
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = back[parts[2]]
            whole = ".".join(parts)
            assert parameter.detach().numpy().tobytes() == expected[whole].tobytes()
            loaded.add(whole)
        assert set(report.plan.placements.names) == {n for n, _ in model.named_parameters()}
    assert loaded == expected.keys()
    assert sum(node.tensors for node in reports[0].nodes) == len(expected)


def test_a_model_with_own_numbers_is_told_what_to_write(path: Path) -> None:
    """The error names the argument, for a model of the part and for a rename by rank."""
    needs.module("torch")
    found, _ = parts_of(path, first=0)
    own = [error for error in found if isinstance(error, StateDictMismatchError)]
    assert own
    for error in own:
        assert "write layers=lambda part: range(len(part.layers)) (fills " in str(error)
        (hint,) = error.suggestions
        assert hint.arguments == "layers=lambda part: range(len(part.layers))"
        assert hint.filled == hint.parameters > 0

    def rename(rank: int) -> Any:
        return lambda name: name.replace("layers.", f"layers.{rank}")

    def body(group: ThreadGroup) -> Any:
        return load(path, rename=rename(group.rank))(group)

    for error in run(World(2), body):
        assert isinstance(error, NodeError)
        assert "layers=lambda part: range(len(part.layers))" in str(error)


def test_a_layer_too_many_is_missing(path: Path) -> None:
    """With ``layers=`` a model has its own layers alone: a layer more is missing."""
    needs.module("torch")
    options = {"layers": lambda part: range(len(part.layers))}
    found = run(World(2), load(path, model=lambda rank: torch_llama(), device="cpu", **options))
    errors = [error for error in found if isinstance(error, StateDictMismatchError)]
    assert errors
    assert all("model.layers.4.input_layernorm.weight" in error.missing for error in errors)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": 3}, "layers is a function"),
        ({"layers": lambda part: [0]}, "a whole number for each"),
        ({"layers": lambda part: [0] * len(part.layers)}, "names two parameters"),
        ({"layers": lambda part: part.layers, "split": "balanced"}, 'needs split="layers"'),
    ],
    ids=["no function", "too few", "twice", "another split"],
)
def test_wrong_numbers_of_layers(options: dict[str, Any], said: str, path: Path) -> None:
    """Each is refused before anything is read."""
    found = run(World(2), load(path, **options))
    errors = [error for error in found if type(error) is ValueError]
    assert errors
    assert all(said in str(error) for error in errors)


def test_the_cache_is_that_of_the_layers_that_a_rank_has(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    windows = ["full_attention"] * 2 + ["sliding_attention"] * (LAYERS - 2)
    config |= {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": LAYERS,
        "layer_types": windows,
        "sliding_window": 8,
        "head_dim": WIDTH // 4,
    }
    (path / "config.json").write_text(json.dumps(config))
    own = {"layers": lambda part: range(len(part.layers)), "context": 1000}
    plans = [
        [
            report.plan.devices[0].cache_nbytes
            for report in succeeded(run(World(2), load(path, **o)))
        ]
        for o in (own, {"context": 1000})
    ]
    assert plans[0] == plans[1]
    assert plans[0][0] > plans[0][1] > 0


def test_models_that_hold_memory_are_overwritten(path: Path) -> None:
    torch = needs.module("torch")
    models = [torch_llama(device="cpu") for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 7)
    reports = succeeded(run(World(2), load(path, model=models.__getitem__, device="cpu")))
    expected = alone(path)
    for model, report in zip(models, reports, strict=True):
        mine = {p.name for p in report.plan.placements}
        for name, parameter in model.named_parameters():
            if name in mine:
                assert parameter.detach().numpy().tobytes() == expected[name].tobytes()
            else:
                assert bool((parameter == 7).all())


def test_dicts_of_arrays(path: Path) -> None:
    """A dict with all names is filled where this rank owns them, and is left alone elsewhere."""
    expected = alone(path)
    models = [{n: np.zeros_like(a) for n, a in expected.items()} for _ in range(2)]
    reports = succeeded(run(World(2), load(path, model=models.__getitem__, device=None)))
    for model, report in zip(models, reports, strict=True):
        mine = {p.name for p in report.plan.placements}
        assert mine
        for name, array in model.items():
            wanted = expected[name] if name in mine else np.zeros_like(expected[name])
            assert array.tobytes() == wanted.tobytes()


def test_names_that_do_not_match(path: Path) -> None:
    expected = alone(path)

    def model(rank: int) -> dict[str, Any]:
        names = [name for name in expected if name != "lm_head.weight"]
        return {name: np.zeros_like(expected[name]) for name in [*names]}

    found = run(World(2), load(path, model=model, device=None))
    assert sorted(kinds(found)) == ["NodeError", "StateDictMismatchError"]
    (own,) = (e for e in found if isinstance(e, StateDictMismatchError))
    assert own.unexpected == ("lm_head.weight",)
    reports = succeeded(run(World(2), load(path, model=model, device=None, strict=False)))
    assert sum(len(r.plan.placements) for r in reports) == len(expected) - 1

    def more(rank: int) -> dict[str, Any]:
        return {n: np.zeros_like(a) for n, a in expected.items()} | {"extra": np.zeros(3)}

    found = run(World(2), load(path, model=more, device=None))
    assert kinds(found) == ["StateDictMismatchError"] * 2
    succeeded(run(World(2), load(path, model=more, device=None, strict=False)))


@pytest.mark.parametrize("part", [False, True])
def test_names_that_differ_are_judged_by_the_whole_checkpoint(part: bool, path: Path) -> None:
    """Whatever part a rank loads, and a model has, every rank is told the same line."""
    expected = alone(path)

    def model(rank: int) -> dict[str, Any]:
        names = [n for n in expected if not part or f"layers.{rank}." in n]
        return {n.removeprefix("model."): np.zeros_like(expected[n]) for n in names}

    found = run(World(2), load(path, model=model, device=None, shapes="skip"))
    assert kinds(found) == ["StateDictMismatchError"] * 2
    lines = {each.arguments for error in found for each in error.suggestions}
    assert lines == {'rename=lambda name: name.removeprefix("model.")'}
    if not part:
        rename = eval(f"dict({lines.pop()})", {})
        reports = succeeded(run(World(2), load(path, model=model, device=None, **rename)))
        assert sum(len(r.plan.placements) for r in reports) == len(expected)


def test_shapes_that_differ(path: Path) -> None:
    """An error, or left as they are where that is asked for; what is computed is not missing."""
    expected = alone(path)

    def model(rank: int) -> dict[str, Any]:
        arrays = {n: np.zeros_like(a) for n, a in expected.items()}
        return arrays | {"lm_head.weight": np.zeros((3, WIDTH), np.float32)}

    found = run(World(2), load(path, model=model, device=None, strict=False))
    assert sorted(kinds(found)) == ["NodeError", "StateDictMismatchError"]
    reports = succeeded(run(World(2), load(path, model=model, device=None, shapes="skip")))
    assert sorted(name for r in reports for name in r.missing) == ["lm_head.weight"]


def test_a_tied_module_is_filled_on_both_ends(tmp_path: Path) -> None:
    """One parameter for embedding and head: each end has it under its own name."""
    needs.module("torch")
    whole = llama(tmp_path / "m", shards=1)
    expected = alone(whole)
    tied = tmp_path / "tied"
    stored = {n: a for n, a in expected.items() if n != "lm_head.weight"}
    write_arrays(tied / "model.safetensors", stored)
    (tied / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    models = [torch_llama() for _ in range(3)]
    for model in models:
        model["lm_head"].weight = model["model"]["embed_tokens"].weight
    reports = succeeded(run(World(3), load(tied, model=models.__getitem__, device="cpu")))
    embedding = expected["model.embed_tokens.weight"].tobytes()
    where = [not m["lm_head"].weight.is_meta for m in models]
    assert where == [True, False, True]
    assert models[0]["lm_head"].weight is models[0]["model"]["embed_tokens"].weight
    assert models[2]["lm_head"].weight.detach().numpy().tobytes() == embedding
    assert sum(len(r.plan.placements) for r in reports) == len(stored) + 1
    # and without a model
    reports = succeeded(run(World(3), load(tied)))
    assert reports[2].state_dict["lm_head.weight"].tobytes() == embedding


# --- budgets --------------------------------------------------------------------------------------


def with_budgets(path: Path, budgets: Sequence[Any], **options: Any) -> list[Any]:
    def body(group: ThreadGroup) -> Any:
        return load(path, budget=budgets[group.rank], **options)(group)

    return run(World(len(budgets)), body)


def test_the_budget_is_exact(path: Path) -> None:
    low, high = 0, PLENTY
    while high - low > 1:  # the least that both can do with
        middle = (low + high) // 2
        found = with_budgets(path, [middle, middle])
        if all(isinstance(said, PlanInfeasibleError) for said in found):
            low = middle
        else:
            succeeded(found)
            high = middle
    for report in with_budgets(path, [high, high]):
        for name, nbytes in report.held_nbytes.items():
            assert nbytes <= (high if name != "staging" else PLENTY)
    both = with_budgets(path, [high, low])
    assert kinds(both) in (["PlanInfeasibleError"] * 2, ["LoadReport"] * 2)


def test_what_a_load_takes_beside_weights_moves_layers(path: Path) -> None:
    """Where a node finds that its part does not fit with its scratch, all plan again."""
    whole = sum(array.nbytes for array in alone(path, dtype="float16").values())
    found: list[Any] = []
    for part in range(50, 101, 5):
        small = whole * part // 100
        found = with_budgets(path, [small, PLENTY], dtype="float16")
        if not isinstance(found[0], Exception):
            names = sorted(n for report in found for n in report.state_dict)
            assert names == sorted(alone(path))
    succeeded(found)


def test_other_budgets_on_other_ranks(path: Path) -> None:
    """A percentage on one, bytes on another: each holds what it may."""
    budgets = ["50%", 30_000, None]
    reports = succeeded(with_budgets(path, budgets))
    assert reports[1].resident_nbytes <= 30_000
    assert sorted(n for r in reports for n in r.state_dict) == sorted(alone(path))


def test_a_cluster_that_is_too_small(path: Path) -> None:
    """Everyone raises that it does not fit, and where."""
    found = run(World(3), load(path, budget=4000))
    assert kinds(found) == ["PlanInfeasibleError"] * 3
    assert len({str(error) for error in found}) == 1


def test_what_stays_free_does(path: Path) -> None:
    """The reserve is off every node's budget."""
    total = sum(array.nbytes for array in alone(path).values())
    reports = succeeded(run(World(2), load(path, budget=2 * total, reserve=total)))
    assert all(r.resident_nbytes <= total for r in reports)
    found = run(World(2), load(path, budget=2 * total, reserve=2 * total))
    assert kinds(found) == ["NodeError"] * 2


# --- what one rank meets --------------------------------------------------------------------------


def at_odds(path: Path, odd: Mapping[int, Mapping[str, Any]], size: int = 3) -> list[Any]:
    """All load alike but for what some do otherwise."""

    def body(group: ThreadGroup) -> Any:
        options = dict(odd.get(group.rank, {}))
        where = options.pop("path", path)
        return load(where, **options)(group)

    found = run(World(size), body)
    assert open_files() == set()
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_no_file_on_one_rank(rank: int, path: Path) -> None:
    """It says that nothing is there; the others name it."""
    found = at_odds(path, {rank: {"path": path / "nowhere"}})
    assert isinstance(found[rank], ShardNotFoundError)
    others = [said for other, said in enumerate(found) if other != rank]
    assert kinds(others) == ["NodeError"] * 2
    assert all(said.node.endswith(f"/{rank}") and "nowhere" in str(said) for said in others)


def test_a_file_that_this_rank_does_not_need_may_be_missing(path: Path, tmp_path: Path) -> None:
    """A rank with the files that it reads loads; one that lacks one of those says which."""
    part = tmp_path / "part"
    shutil.copytree(path, part)
    (part / "model-00001-of-00002.safetensors").unlink()
    succeeded(at_odds(path, {1: {"path": part}}, size=2))
    found = at_odds(path, {0: {"path": path}, 1: {"path": part}}, size=2)
    succeeded(found)
    gone = tmp_path / "gone"
    shutil.copytree(path, gone)
    (gone / "model-00002-of-00002.safetensors").unlink()
    found = at_odds(path, {1: {"path": gone}}, size=2)
    assert kinds(found) == ["NodeError", "ShardNotFoundError"]
    assert "model-00002-of-00002" in str(found[0])


@pytest.mark.parametrize("split", SPLITS)
def test_another_file_on_one_rank(split: str, path: Path, tmp_path: Path) -> None:
    """A checkpoint of the same shapes and other values is refused before anything is loaded."""
    other = llama(tmp_path / "other", seed=1)
    found = at_odds(
        path, {2: {"path": other, "split": split}, 0: {"split": split}, 1: {"split": split}}
    )
    assert kinds(found) == ["NodeError", "NodeError", "CheckpointError"]
    assert "though it is as long" in str(found[2])
    assert all(said.node.endswith("/2") for said in found[:2])


@pytest.mark.parametrize(
    "odd",
    [
        {"dtype": "float16"},
        {"dtype": {"*norm*": "float16"}},
        {"out_of_range": "clamp"},
        {"split": "balanced"},
        {"split": "replicate"},
        pytest.param({"split": everything}, id="a function"),
        {"verify": "none"},
        {"strict": False},
        {"shapes": "skip"},
        {"rename": {"model.norm.weight": "norm"}},
        {"mapping": "hf-llama"},
    ],
    ids=str,
)
def test_another_argument_on_one_rank(odd: dict[str, Any], path: Path) -> None:
    found = at_odds(path, {1: odd})
    assert kinds(found) == ["PlanMismatchError"] * 3
    assert all(said.node.endswith("/1") for said in found)
    ((name, value),) = odd.items()
    assert name in str(found[0])
    if name not in ("rename", "mapping"):  # which plans differ by
        said = "a function" if callable(value) else value
        assert f"was asked for {name}={said!r}, and " in str(found[0])
        assert re.search(rf"/0 for {name}=\S", str(found[0]))


def test_a_dtype_on_one_rank_alone(tmp_path: Path) -> None:
    """Also where the others leave it to their devices, which then are not blamed."""
    path = llama(tmp_path, dtype="BF16")
    for rank in (0, 1):
        found = at_odds(path, {rank: {"dtype": "float16"}}, size=2)
        assert kinds(found) == ["PlanMismatchError"] * 2
        there, here = ("None", "'float16'")[:: -1 if rank else 1]
        assert f"was asked for dtype={there}, and " in str(found[0])
        assert f"/0 for dtype={here}: ask for the same" in str(found[0])
        assert "bfloat16" not in str(found[0])


def test_files_that_were_sampled_are_named(path: Path, tmp_path: Path) -> None:
    """A rank with files of its own, without digests of both, stands in every rank's report."""
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    for report in succeeded(at_odds(path, {1: {"path": copy}})):
        (note,) = (note for note in report.notes if "blocks of 4 KiB" in note)
        assert re.match(r"\S+/1: files were compared with rank 0's by", note)
    for report in succeeded(at_odds(path, {})):
        assert not any("blocks of 4 KiB" in note for note in report.notes)


def test_bfloat16_beside_float16(path: Path) -> None:
    """Two dtypes of as many bytes are not the same plan."""
    found = at_odds(path, {rank: {"dtype": d} for rank, d in enumerate(["float16", "bfloat16"])}, 2)
    assert kinds(found) == ["PlanMismatchError"] * 2


def test_devices_that_differ_in_bfloat16(tmp_path: Path) -> None:
    """Without a dtype, a device that computes in bfloat16 and one that has none do not mix."""
    needs.module("torch")
    path = llama(tmp_path / "m", dtype="BF16")
    found = at_odds(path, {0: {"device": "cpu", "model": lambda rank: torch_llama()}}, size=2)
    assert kinds(found) == ["PlanMismatchError"] * 2
    assert "has no bfloat16" in str(found[0])
    assert "pass the dtype" in str(found[0])
    assert found[0].node.endswith("/1")
    options = {"dtype": "float16"}
    succeeded(
        at_odds(
            path,
            {0: {"device": "cpu", "model": lambda rank: torch_llama(), **options}, 1: options},
            size=2,
        )
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": "3GBB"},
        {"budget": {"cuda:7": 5}},
        {"split": "rows"},
        {"verify": "md5"},
        {"strict": "yes"},
        {"shapes": "ignore"},
        {"reader": "tape"},
        {"device": ["host", "host"]},
        pytest.param({"device": "NOSUCH"}, marks=pytest.mark.slow),
        {"threads": 0},
        {"mapping": "no-family"},
        {"rename": 5},
    ],
    ids=str,
)
def test_a_wrong_argument_of_one_rank(wrong: dict[str, Any], path: Path) -> None:
    """That rank raises it, the others name that rank; nobody waits for anybody."""
    found = at_odds(path, {1: wrong})
    assert isinstance(found[1], (ValueError, StreamloadError)), found[1]
    for said in (found[0], found[2]):
        assert isinstance(said, NodeError), said
        assert not isinstance(said, PeerFailedError), said
        assert said.node.endswith("/1")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", None])
def test_timeouts_are_seconds(timeout: Any, path: Path) -> None:
    with pytest.raises(ValueError, match="timeout is a number of seconds above zero"):
        distributed.load_state_dict(None, path, timeout=timeout)


@pytest.mark.parametrize("options", [{"reader": "mmap"}, {"reader": "direct"}], ids=str)
def test_replicas_are_read_in_one_way(options: dict[str, str], path: Path) -> None:
    found = run(World(2), load(path, split="replicate", **options))
    assert kinds(found) == ["ValueError"] * 2
    assert "reads files by pread" in str(found[0])
    assert kinds(run(World(1), load(path, split="replicate", reader="mmap"))) == ["LoadReport"]


def test_what_is_no_group(path: Path) -> None:
    """Is refused."""
    with pytest.raises(TypeError, match="is not a group"):
        distributed.load_state_dict(None, path, group="world")


@pytest.mark.parametrize("verify", ["crc32", "none"])
def test_a_replica_that_differs_is_named(verify: str, tmp_path: Path) -> None:
    path = llama(tmp_path / "model", shards=1, width=64)
    other = tmp_path / "other"
    shutil.copytree(path, other)
    file = other / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    last = len(data) - 4096
    at = next(
        at
        for at in range(len(data) // 2, len(data))
        if not any(last * k // 15 - 1 <= at <= last * k // 15 + 4096 for k in range(16))
    )
    data[at] ^= 1
    file.write_bytes(data)
    options = {"split": everything, "verify": verify}
    found = at_odds(path, {0: options, 1: {**options, "path": other}, 2: options})
    if verify == "none":
        succeeded(found)
        return
    assert kinds(found) == ["NodeError"] * 3
    changed = next(n for n, a in alone(other).items() if a.tobytes() != alone(path)[n].tobytes())
    for said in found:
        assert said.node.endswith("/1")
        assert f"its replica of {changed} is not that of" in said.problem
        assert said.state is not None
        assert len(said.state.loaded) == len(alone(path))


# --- loss -----------------------------------------------------------------------------------------


class Falls:
    """Ends a rank at its n-th call of a kind."""

    def __init__(self, world: World, rank: int, operation: str, number: int, *, silent: bool):
        self.world, self.rank, self.operation, self.number = world, rank, operation, number
        self.silent = silent
        self.count = 0

    def __call__(self, rank: int, operation: str) -> None:
        if rank == self.rank and operation == self.operation:
            self.count += 1
            if self.count == self.number:
                self.world.kill(rank, silent=self.silent)


def lose(
    path: Path, rank: int, operation: str, number: int, *, silent: bool = False, **options: Any
) -> tuple[list[Any], Falls]:
    """Load on three ranks, of which one falls silent at some moment."""
    world = World(3, timeout_s=LOSS_S)
    world.watch = falls = Falls(world, rank, operation, number, silent=silent)
    found = run(world, load(path, timeout=LOSS_S, **options))
    nothing_left()
    return found, falls


@pytest.mark.parametrize(
    "number", [1, 5, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 6, 7, 9, 10))]
)
def test_a_loss_in_every_stage(number: int, path: Path) -> None:
    """Whichever message is the last one of a rank, all others raise and name it, stage by stage."""
    rank = number % 3
    found, falls = lose(path, rank, "allgather", number)
    if falls.count < number:
        succeeded(found)
        return
    others = [said for other, said in enumerate(found) if other != rank]
    assert kinds(others) == ["PeerFailedError"] * 2
    named = (f"/{rank}", f"(rank {rank})")  # before they have met, and after
    assert all(said.node.endswith(named) for said in others), [str(o) for o in others]
    if any(said.state is not None for said in others):  # all had been loaded
        assert all(len(said.state.loaded) and not said.state.invalid for said in others)


@pytest.mark.parametrize(
    ("rank", "silent"),
    [
        (0, False),
        (2, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_a_loss_while_replicas_are_exchanged(rank: int, silent: bool, tmp_path: Path) -> None:
    tensors = {f"t{n}": ("U8", (2**21,), bytes([n]) * 2**21) for n in range(12)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    models = [{name: np.zeros(2**21, np.uint8) for name in tensors} for _ in range(3)]
    options = {"split": "replicate", "device": None, "model": models.__getitem__}
    found, _ = lose(path, rank, "all_gather_into", 4, silent=silent, **options)
    for other in {0, 1, 2} - {rank}:
        error, model = found[other], models[other]
        assert type(error) is PeerFailedError
        assert error.node.endswith(f"/{rank}")
        assert f"parameters: {error.state}" in error.__notes__
        state = error.state
        assert sorted((*state.loaded, *state.untouched, *state.invalid)) == sorted(tensors)
        assert len(state.loaded) < len(tensors)
        for name in state.loaded:
            assert model[name].tobytes() == tensors[name][2]
        for name in state.untouched:
            assert not model[name].any()
    world = World(3)  # and again
    succeeded(run(world, load(path, **options)))
    for model in models:
        for name, array in model.items():
            assert array.tobytes() == tensors[name][2]
    nothing_left()


def test_a_loss_while_a_rank_loads_ends_its_load(tmp_path: Path) -> None:
    big = {f"t{n}": ("U8", (2**20,), bytes([n]) * 2**20) for n in range(40)}
    path = write_safetensors(tmp_path / "m.safetensors", {**big, "z": ("U8", (1,), b"z")})
    begun, fallen = threading.Event(), threading.Event()

    def first(nodes: Sequence[Node], sizes: Mapping[str, int]) -> dict[str, list[str]]:
        return {nodes[0].name: [n for n in sizes if n != "z"], nodes[1].name: ["z"]}

    def progress(done: int, total: int) -> None:
        begun.set()
        fallen.wait(10)

    world = World(2)

    def watch(rank: int, operation: str) -> None:
        if rank == 1 and begun.is_set() and not fallen.is_set():
            world.kill(1)
            fallen.set()

    world.watch = watch
    options = {"split": first, "progress": progress, "chunk_nbytes": 2**16, "threads": 1}

    found = run(world, load(path, timeout=LOSS_S, **options))
    assert type(found[0]) is PeerFailedError
    assert found[0].node.endswith("/1")
    assert found[0].state is not None
    nothing_left()


@pytest.mark.parametrize("split", SPLITS)
def test_a_rank_that_fails_to_read_ends_it_for_all(split: str, path: Path, tmp_path: Path) -> None:
    """Its own error there, with the parameters' condition; elsewhere that it gave up, and why."""
    copy = tmp_path / split
    shutil.copytree(path, copy)

    def cut(name: str) -> str:
        """When the plan is made, its files have been looked at already."""
        for file in copy.glob("*.safetensors"):
            os.truncate(file, 3000)
        return name

    def body(group: ThreadGroup) -> Any:
        if group.rank != 1:
            return load(path, split=split)(group)
        return load(copy, split=split, rename=cut)(group)

    found = run(World(3, timeout_s=LOSS_S), body)
    assert isinstance(found[1], CheckpointError), found[1]
    assert found[1].state is not None
    for said in (found[0], found[2]):
        assert type(said) is PeerFailedError, said
        assert said.node.endswith("/1")
        assert said.problem == f"gave up: {type(found[1]).__name__}: {found[1]}"
        assert said.state is not None
    nothing_left()


def test_ctrl_c_on_one_rank(tmp_path: Path) -> None:
    """It raises KeyboardInterrupt with the parameters' condition; the others say who gave up."""
    tensors = {f"t{n}": ("U8", (2**18,), bytes([n]) * 2**18) for n in range(24)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    for split in SPLITS:

        def progress(done: int, total: int) -> None:
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGINT)

        found = run(World(3), load(path, split=split, progress=progress, threads=1), main=0)
        assert kinds(found) == ["KeyboardInterrupt", "PeerFailedError", "PeerFailedError"]
        assert any(note.startswith("parameters: ") for note in found[0].__notes__)
        for said in found[1:]:
            assert said.node.endswith("/0")
            assert "gave up: KeyboardInterrupt" in str(said)
            assert said.state is not None
        nothing_left()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_a_progress_function_raises(path: Path) -> None:
    """Is raised on rank 0 as it is; the others hear of it."""

    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError("shown")

    found = run(World(3), load(path, progress=progress))
    assert kinds(found) == ["ZeroDivisionError", "PeerFailedError", "PeerFailedError"]
    assert any(note.startswith("parameters: ") for note in found[0].__notes__)


def test_warnings_that_are_errors(tmp_path: Path) -> None:
    """An overflow that the application makes an error is one on that rank, and told to all."""
    import warnings

    tensors = {n: ("F32", (2,), np.array([1e9, 1], np.float32).tobytes()) for n in "ab"}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    with warnings.catch_warnings(action="error"):
        found = run(World(2), load(path, split="balanced", dtype="float16"))
    assert set(kinds(found)) <= {"RuntimeWarning", "PeerFailedError"}
    assert "RuntimeWarning" in kinds(found)


# --- processes ------------------------------------------------------------------------------------


BODY = """
import hashlib, json, os, signal, sys
from streamload import distributed
from streamload.errors import PeerFailedError
path, rank = sys.argv[1], int(os.environ["RANK"])
common = dict(budget="1GB", device="host", progress=False, timeout=20)
out = {}
for split in ("layers", "replicate"):
    part = distributed.plan(path, budget="1GB", split=split, timeout=20)
    report = distributed.load_state_dict(None, path, split=split, **common)
    assert sorted(report.state_dict) == sorted(part.mine.parameters)
    out[split] = {
        name: hashlib.sha256(array.tobytes()).hexdigest()
        for name, array in report.state_dict.items()
    }
def killed(nodes, sizes):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {nodes[0].name: list(sizes)}
try:
    distributed.load_state_dict(None, path, split=killed, **common | {"timeout": 2})
except PeerFailedError as error:
    out["lost"] = error.node
print(json.dumps(out))
"""


def test_real_processes(path: Path) -> None:
    """Several loads of one launch, and then the loss of a rank, over torch's engine."""
    import hashlib

    needs.module("torch")
    said = run_ranks([sys.executable, "-c", BODY, path], [0, -signal.SIGKILL, 0], 60)
    hashes = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in alone(path).items()}
    found = [json.loads(said[rank]) for rank in (0, 2)]
    for one in found:
        assert one["replicate"] == hashes
        assert one["lost"].endswith("/1")
        assert one["layers"].items() <= hashes.items()
    assert not found[0]["layers"].keys() & found[1]["layers"].keys()


# --- fuzz -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_clusters_and_faults(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    path = llama(
        tmp_path / "m",
        dtype=str(random.choice(["F32", "F16", "BF16"])),
        shards=int(random.integers(1, 4)),
        seed=seed,
    )
    size = int(random.integers(2, 6))
    split = str(random.choice(SPLITS))
    total = sum(array.nbytes for array in alone(path, dtype="float16").values())
    need = total if split == "replicate" else total // size
    budgets = [int(need * random.uniform(0.9, 4)) + 20_000 for _ in range(size)]
    options: dict[str, Any] = {
        "split": split,
        "dtype": "float16",
        "mapping": random.choice(np.array([None, "hf-llama"], object)),
        "threads": int(random.integers(1, 4)),
        "chunk_nbytes": int(random.integers(512, 10_000)),
    }
    world = World(size, timeout_s=LOSS_S)
    fault = str(random.choice(["none", "kill", "silent", "store", "raise"]))
    victim, moment = int(random.integers(size)), int(random.integers(1, 60))
    calls = 0
    lock = threading.Lock()

    def watch(rank: int, operation: str) -> None:
        nonlocal calls
        if rank != victim:
            return
        with lock:
            calls += 1
            now = calls == moment
        if now and fault in ("kill", "silent"):
            world.kill(rank, silent=fault == "silent")
        if now and fault == "store":
            world.stop_store()
        if now and fault == "raise" and operation not in ("set", "get"):
            raise MemoryError("no more")

    world.watch = watch

    def body(group: ThreadGroup) -> Any:
        return load(path, budget=budgets[group.rank], timeout=LOSS_S, **options)(group)

    found = run(world, body)
    expected = alone(path, dtype="float16", mapping=options["mapping"])
    survivors = [said for rank, said in enumerate(found) if rank not in world.lost]
    reports = [said for said in survivors if not isinstance(said, BaseException)]
    for report in reports:
        equal(report.state_dict, expected)
    raised = [said for said in survivors if isinstance(said, BaseException)]
    allowed = (PeerFailedError, PlanInfeasibleError, NodeError, MemoryError)
    assert all(isinstance(said, allowed) for said in raised), raised
    if fault == "none" and raised:
        assert kinds(raised) == ["PlanInfeasibleError"] * size
    if reports:  # they had heard that all is loaded everywhere
        assert all(len(said.state.loaded) and not said.state.invalid for said in raised)
    nothing_left()
