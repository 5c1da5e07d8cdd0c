"""Models over nodes that are too small for their shares: the split, and ranks that offload."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import needs
import pytest
from make_checkpoint import PRESETS, make_checkpoint
from safetensors_files import write_sparse
from thread_group import ThreadGroup, World, run

import streamload
from streamload import distributed
from streamload.core.dtypes import BF16
from streamload.errors import (
    CheckpointError,
    NodeError,
    OffloadError,
    PeerFailedError,
    PlanInfeasibleError,
    PlanMismatchError,
    ShardNotFoundError,
)
from streamload.offloading.offload import Prepared
from streamload.planning.partition import Node

torch = needs.module("torch")
needs.module("transformers")
import offloading_models as models  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
import pipeline  # noqa: E402
from torch_module import on_meta  # noqa: E402

LLAMA_3_8B = PRESETS["llama-3-8b"]
FILE = "model.safetensors"


# --- the split ------------------------------------------------------------------------------------


def hollow(folder: Path, shape: Any) -> Path:
    """A checkpoint of any size in bfloat16 whose data are a hole."""
    write_sparse(folder / FILE, {name: ("BF16", dims) for name, dims in shape.tensors().items()})
    (folder / "config.json").write_text(json.dumps(shape.config(BF16)))
    return folder


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow(tmp_path_factory.mktemp("eight"), LLAMA_3_8B)


def boards(count: int, budget: str = "3GB") -> list[Node]:
    """Nodes of one size."""
    return [Node(f"board-{i}", budget) for i in range(count)]


def over(path: Path, nodes: Sequence[Node], **options: Any) -> Any:
    return streamload.split_offload(path, nodes=nodes, dtype="checkpoint", **options)


def test_14_boards_of_3_gb_take_what_needs_16(tmp_path: Path) -> None:
    """92 layers of Llama-3-8B, 42 GB: loads need 16 boards, and with 14 some layers stream."""
    path = hollow(tmp_path / "model", replace(LLAMA_3_8B, layers=92))
    with pytest.raises(PlanInfeasibleError, match=r"16 devices or nodes of 3\.00 GB"):
        streamload.split(path, nodes=boards(15), dtype="checkpoint")
    found = over(path, boards(14))
    layers = [layer for d in found.plan.devices for layer in range(*d.layers)]
    assert layers == list(range(92))
    names = [p.name for p in found.plan.placements]
    assert sorted(names) == sorted(streamload.open_checkpoint(path).tensors)
    for made in found.offloads:
        assert made.needed_nbytes <= 3 * 10**9
    streams = [len(made.residency.streams) for made in found.offloads]
    assert 0 in streams  # what fits is loaded
    assert max(streams) == 2
    assert max(found.pass_nbytes.values()) < 10**9
    assert sum(found.pass_nbytes.values()) == 436_207_616 * sum(streams)  # without norms
    # and where all fits, it is the split of a load
    enough = over(path, boards(16))
    plain = streamload.split(path, nodes=boards(16), dtype="checkpoint")
    assert set(enough.pass_nbytes.values()) == {0}
    assert [d.layers for d in enough.plan.devices] == [d.layers for d in plain.devices]
    assert "nothing streams" in str(enough)


def test_the_command_shows_what_stays_and_streams_on_each_node(
    eight: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streamload.cli import main

    def command(*arguments: str) -> str:
        given = ["plan", str(eight), "--nodes", "3", "--budget", "3GB", "--offload", *arguments]
        monkeypatch.setattr(sys, "argv", ["streamload", *given])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    titles, *nodes, last = command("--dtype", "checkpoint").splitlines()
    assert titles.split()[:4] == ["node", "holds", "streams", "weights"]
    assert nodes[0].startswith("node0  embedding, layers 0 to ")
    assert "rows" in nodes[0]
    assert "layers 23 to 31, head" in nodes[2]
    assert last.startswith("3 of 3 nodes stream; a pass reads ")
    assert "a pass takes" not in titles
    titles, *nodes, _ = command("--rate", "1GB").splitlines()
    assert titles.endswith("a pass takes")
    assert all(line.endswith(" s") for line in nodes)
    found = json.loads(command("--json", "--rate", "1GB"))["nodes"]
    assert [*found] == ["node0", "node1", "node2"]
    assert found["node1"]["streams"]
    assert found["node1"]["seconds"] == found["node1"]["pass_nbytes"] / 10**9


def test_each_node_has_what_it_needs_at_least(eight: Path) -> None:
    small = [*boards(2), Node("board-1a", "300MB"), Node("board-2", "1.6GB")]
    found = over(eight, small)
    assert found.plan.devices[2].layers[0] == found.plan.devices[2].layers[1]
    assert found.plan.devices[2].resident_nbytes == 0
    assert all(made.needed_nbytes <= made.budget_nbytes for made in found.offloads)
    with pytest.raises(PlanInfeasibleError) as caught:  # the head alone is 1.05 GB
        over(eight, boards(3, "1GB"))
    assert caught.value.device == "board-2"
    assert caught.value.budget_nbytes == 10**9
    assert 1_050_000_000 < caught.value.needed_nbytes < 1_100_000_000
    enough = over(eight, boards(3, str(caught.value.needed_nbytes)))
    assert all(made.needed_nbytes <= made.budget_nbytes for made in enough.offloads)
    with pytest.raises(PlanInfeasibleError):  # even with the norms of its layers elsewhere
        over(eight, boards(3, str(caught.value.needed_nbytes - 200_000)))


def test_cache_activations_and_reserve_are_counted_where_they_are(eight: Path) -> None:
    plain, context = over(eight, boards(3)), over(eight, boards(3), context=8192)
    per_layer = 8192 * 2 * 8 * 128 * 2
    for mine, made in zip(context.plan.devices, context.offloads, strict=True):
        assert made.cache_nbytes == per_layer * (mine.layers[1] - mine.layers[0])
        assert made.needed_nbytes <= 3 * 10**9
    assert sum(context.pass_nbytes.values()) > sum(plain.pass_nbytes.values())
    first, second, last = over(eight, boards(3), tokens=2048).offloads
    assert first.activation_nbytes == second.activation_nbytes
    assert last.activation_nbytes - first.activation_nbytes == 2048 * 128256 * 2
    kept = over(eight, boards(3), reserve="500MB")
    assert all(made.reserve_nbytes == 500_000_000 for made in kept.offloads)
    assert all(made.needed_nbytes <= 3 * 10**9 for made in kept.offloads)


def test_one_node_is_a_device_and_bad_arguments_are_refused(eight: Path) -> None:
    (alone,) = over(eight, boards(1)).offloads
    plan = streamload.plan_offload(eight, budget="3GB", dtype="checkpoint", device="cpu")
    assert alone.residency.streams == plan.residency.streams
    assert alone.residency.slots == plan.residency.slots
    for options, said in (
        ({"tokens": 0}, "tokens"),
        ({"stay": ["nothing*"]}, "stay"),
        ({"quant": "nf4"}, "quant"),
    ):
        with pytest.raises(ValueError, match=said):
            over(eight, boards(2), **options)
    with pytest.raises(ValueError, match="Node"):
        over(eight, ["3GB"])  # type: ignore[list-item]


# --- ranks ----------------------------------------------------------------------------------------


def expected(path: Path) -> Any:
    whole = on_meta(path)
    streamload.load_state_dict(whole, path, device="cpu", progress=False)
    with torch.no_grad():
        return whole(models.IDS)


def stage_of(path: Path, share: Any) -> Any:
    """A rank's part of the model, on the meta device."""
    config = json.loads((path / "config.json").read_text())
    with torch.device("meta"):
        return pipeline.Stage(config, share).eval()


def begun(path: Path, budgets: Sequence[Any], **options: Any) -> list[Any]:
    """What ranks of these budgets return that offload: their parts, and what streams them."""
    options = {"device": "cpu", "progress": False, "timeout": 20.0, **options}

    def body(group: ThreadGroup) -> Any:
        mine = {"budget": budgets[group.rank], "group": group, "device": "cpu"}
        plan = distributed.plan(path, offload=True, tokens=options.get("tokens"), **mine)
        stage = stage_of(path, plan.mine)
        return plan, stage, distributed.offload(stage, path, **mine, **options)

    del options["device"]
    found = run(World(len(budgets)), body)
    for said in found:
        if isinstance(said, BaseException):
            close(found)
            raise said
    return found


def close(found: Sequence[Any]) -> None:
    for said in found:
        if isinstance(said, tuple):
            said[2].close()
    gc.collect()
    for thread in threading.enumerate():  # of tests before, too
        if thread.name.startswith("streamload"):
            thread.join(5)
            assert not thread.is_alive(), thread.name


def computed(found: Sequence[Any]) -> Any:
    x = models.IDS
    with torch.no_grad():
        for _, stage, _ in sorted(found, key=lambda each: each[0].mine.index):
            x = stage(x)
    return x


@pytest.mark.parametrize(
    "budgets",
    [
        [174_000] * 2,
        [250_000] * 2,
        [400_000] * 2,
        [10**7] * 2,
        [200_000, 700_000],
        [700_000, 200_000],
        [180_000] * 3,
        [174_000] * 6,
    ],
    ids=str,
)
def test_logits_are_those_of_the_model_that_is_resident(llama: Path, budgets: list[int]) -> None:
    found = begun(llama, budgets)
    try:
        logits = expected(llama)
        for _ in range(3):
            assert torch.equal(computed(found), logits)
        assert len({plan.digest for plan, _, _ in found}) == 1
        nodes = found[0][2].load.nodes
        assert sum(node.tensors for node in nodes) == 39
        for rank, (plan, _, offloaded) in enumerate(found):
            assert offloaded.load.nodes == nodes
            assert offloaded.plan.needed_nbytes <= budgets[rank]
            assert (nodes[rank].pass_nbytes > 0) == bool(offloaded.plan.residency.streams)
            assert nodes[rank].pass_nbytes == offloaded.plan.residency.pass_nbytes
            fits = plan.mine.nbytes <= budgets[rank]
            assert fits == (not offloaded.plan.residency.absent)
            assert ("a pass reads" in str(plan)) == any(node.pass_nbytes for node in nodes)
    finally:
        close(found)


@pytest.mark.parametrize("budgets", [[200_000] * 2, [174_000] * 3], ids=str)
def test_a_head_that_is_the_embedding_streams_on_its_own_rank(
    budgets: list[int], tmp_path: Path
) -> None:
    """The last rank has a copy under the head's name; the first one reads rows."""
    tied = models.save(models.built("llama tied"), tmp_path / "tied")
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    found = begun(tied, budgets)
    try:
        assert torch.equal(computed(found), expected(tied))
        assert found[0][2].plan.residency.gathers
        assert "lm_head" in found[-1][2].plan.residency.streams
    finally:
        close(found)


@pytest.mark.slow
def test_14_ranks_run_what_loads_on_16(tmp_path: Path) -> None:
    """At a small scale: 44 layers, of which a rank has room for three."""
    shape = replace(LLAMA_3_8B, vocab=512, dim=64, ff=160, layers=44, heads=4, kv_heads=2)
    path, budget = tmp_path / "model", 530_000
    make_checkpoint(path, shape, dtype="float32")
    with pytest.raises(PlanInfeasibleError, match="16 devices or nodes"):
        streamload.split(path, nodes=boards(15, str(budget)))
    assert streamload.split(path, nodes=boards(16, str(budget)))
    found = begun(path, [budget] * 14)
    try:
        logits = expected(path)
        for _ in range(2):
            assert torch.equal(computed(found), logits)
        assert all(offloaded.plan.needed_nbytes <= budget for _, _, offloaded in found)
        assert sum(bool(offloaded.plan.residency.streams) for _, _, offloaded in found) > 1
    finally:
        close(found)


def test_a_rank_may_have_the_whole_model_on_the_meta_device(llama: Path) -> None:
    def body(group: ThreadGroup) -> Any:
        mine = {"budget": 250_000, "group": group, "device": "cpu"}
        plan = distributed.plan(llama, offload=True, **mine)
        whole = on_meta(llama)
        return plan, whole, distributed.offload(whole, llama, progress=False, **mine)

    found = run(World(2), body)
    try:
        x = models.IDS
        with torch.no_grad():
            for plan, whole, _ in found:
                x = whole.model["embed_tokens"](x) if plan.mine.has_embedding else x
                for number in plan.mine.layers:
                    x = whole.model["layers"][number](x)
                if plan.mine.has_head:
                    x = whole.lm_head(whole.model["norm"](x))
        assert torch.equal(x, expected(llama))
        assert found[0][1].lm_head.weight.is_meta
        assert found[1][1].model["embed_tokens"].weight.is_meta
    finally:
        close(found)


def test_experts_are_in_a_cache_of_each_node(tmp_path: Path) -> None:
    """A node needs as many slots of experts as a token chooses, and not whole layers of them."""
    mixtral = models.save(models.built("mixtral"), tmp_path / "mixtral")
    nbytes = streamload.open_checkpoint(mixtral).nbytes
    found = over(mixtral, boards(2, str(nbytes // 3)))
    for made in found.offloads:
        assert made.residency.experts
        assert made.residency.cache_slots >= 2
        assert made.needed_nbytes <= nbytes // 3
        assert made.read_nbytes == made.residency.pass_nbytes + made.token_nbytes
    assert "experts of 2 layers" in str(found)


def test_what_was_closed_can_be_offloaded_again_and_tokens_are_room(llama: Path) -> None:
    """With room for what 64 tokens take, of which logits are the last rank's alone."""
    for _ in range(2):
        found = begun(llama, [10**7] * 2, tokens=64)
        try:
            assert torch.equal(computed(found), expected(llama))
            first, last = (each[2].plan for each in found)
            assert last.activation_nbytes - first.activation_nbytes == 64 * 512 * 4
            assert first.cache_nbytes > 0
        finally:
            close(found)


def test_a_rank_without_layers_needs_no_cache(llama: Path) -> None:
    found = begun(llama, [9_000_000] * 6, tokens=16)
    try:
        without = [each for each in found if not each[0].mine.layers]
        assert without
        assert all(offloaded.plan.cache_nbytes == 0 for _, _, offloaded in without)
        assert torch.equal(computed(found), expected(llama))
    finally:
        close(found)


def test_a_model_may_number_its_own_layers(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())

    def body(group: ThreadGroup) -> Any:
        mine = {"budget": 250_000, "group": group, "device": "cpu"}
        plan = distributed.plan(llama, offload=True, **mine)
        local = replace(plan.mine, layers=range(len(plan.mine.layers)))
        with torch.device("meta"):
            stage = pipeline.Stage(config, local).eval()
        numbers = {"layers": lambda part: range(len(part.layers)), "progress": False}
        return plan, stage, distributed.offload(stage, llama, **mine, **numbers)

    found = run(World(2), body)
    try:
        assert torch.equal(computed(found), expected(llama))
        for _, _, offloaded in found:
            assert "model.layers.0" in offloaded.plan.residency.streams
    finally:
        close(found)


def failed(path: Path, size: int = 2, **options: Any) -> list[Any]:
    """What ranks raise; options that are lists have one for each rank."""

    def body(group: ThreadGroup) -> Any:
        mine = {n: v[group.rank] if isinstance(v, list) else v for n, v in options.items()}
        mine = {"budget": 250_000, "device": "cpu", "progress": False, "timeout": 20.0} | mine
        here = mine.pop("folder", path)
        offloads = {"tokens": mine.get("tokens"), "stay": mine.get("stay", ())}
        plan = distributed.plan(
            path, offload=True, budget=250_000, device="cpu", group=group, **offloads
        )
        stage = mine.pop("model", None) or stage_of(path, plan.mine)
        return plan, stage, distributed.offload(stage, here, group=group, **mine)

    found = run(World(size), body)
    close(found)
    return found


def test_a_budget_below_the_least_is_refused_by_all_with_the_numbers(llama: Path) -> None:
    """Before anything is read; and the error of a load names what would run."""
    errors = failed(llama, budget=100_000)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, PlanInfeasibleError)
        assert (error.needed_nbytes, error.budget_nbytes) == (173_056, 100_000)
        assert error.device.endswith("/0")

    def load(group: ThreadGroup) -> Any:
        options: Any = {"device": "cpu", "progress": False, "group": group}
        budgets = 250_000 if group.rank else 251_000
        return distributed.load_state_dict(on_meta(llama), llama, budget=budgets, **options)

    for error in run(World(2), load):
        assert isinstance(error, PlanInfeasibleError)
        assert error.would_fit[-1].startswith("streamload.distributed.offload (a pass reads at mo")


def test_ranks_that_ask_for_different_things_are_told(llama: Path) -> None:
    def body(group: ThreadGroup) -> Any:
        options: Any = {"budget": 250_000, "device": "cpu", "group": group, "offload": True}
        return distributed.plan(llama, tokens=(8, 16)[group.rank], **options)

    for error in run(World(2), body):
        assert isinstance(error, PlanMismatchError)
        assert "tokens=16" in str(error)

    def either(group: ThreadGroup) -> Any:
        options: Any = {"budget": 10**7, "device": "cpu", "group": group}
        return distributed.plan(llama, offload=group.rank == 0, **options)

    assert all("offload=False" in str(error) for error in run(World(2), either))
    for options in ({"tokens": 3}, {"offload": True, "split": "replicate"}, {"stay": "*norm*"}):
        with pytest.raises(ValueError, match="offload=True"):
            distributed.plan(llama, budget=10**7, device="cpu", **options)  # type: ignore[arg-type]


def test_what_is_no_model_of_layers_is_refused(llama: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(512, 64)}
    own, other = failed(llama, model=[tensors, None], strict=False)
    assert isinstance(own, OffloadError)
    assert "a module, not a dict" in str(own)
    assert isinstance(other, NodeError)
    assert other.node.endswith("/0")
    with pytest.raises(OffloadError, match="needs a model"):
        distributed.offload(None, llama, budget=10**7, device="cpu")


def test_a_rank_whose_file_is_gone_is_named(llama: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    shutil.copytree(llama, away)
    (away / FILE).unlink()
    other, own = failed(llama, folder=[llama, away])
    assert isinstance(own, ShardNotFoundError)
    assert isinstance(other, NodeError)
    assert other.node.endswith("/1")
    assert FILE in str(other)


def test_what_began_ends_where_another_rank_cannot(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    run_ = Prepared.run

    def broken(self: Any, progress: Any, clock: Any) -> Any:
        if self.plan.residency.gathers:  # the rank that has the embedding
            raise CheckpointError(str(llama), "cannot be read", expected="bytes", found="an error")
        made.append(run_(self, progress, clock))
        return made[-1]

    monkeypatch.setattr(Prepared, "run", broken)
    own, other = failed(llama)
    assert isinstance(own, CheckpointError)
    assert isinstance(other, PeerFailedError)
    assert len(made) == 1


# --- processes ------------------------------------------------------------------------------------


def start(*arguments: object, ranks: int = 2, folders: Sequence[Path]) -> list[forked.Process]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        forked.start(
            [sys.executable, EXAMPLES / "pipeline.py", folders[rank], "--offload", *arguments],
            forked.TORCH,
            env={**os.environ, **meeting, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def test_two_processes_compute_what_one_does(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits"
    asked = ("--budget", "200kB", "--count", "3", "--logits", out)
    processes = start(*asked, folders=[llama, llama])
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    tokens = [1, 2, 3, 4]
    whole = on_meta(llama)
    streamload.load_state_dict(whole, llama, device="cpu", progress=False)
    for _ in range(3):
        with torch.no_grad():
            logits = whole(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits.argmax()))
    assert torch.equal(torch.load(out), logits)
    assert said[1][0].splitlines()[-1] == f"next token: {' '.join(map(str, tokens[4:]))}"
    for printed, _ in said:
        assert "3 passes" in printed


def test_a_file_that_goes_between_passes_is_named_and_no_rank_hangs(
    llama: Path, tmp_path: Path
) -> None:
    """The rank raises what it met; the other one's next message does not come."""
    own = tmp_path / "own"
    shutil.copytree(llama, own)
    code = (EXAMPLES / "pipeline.py").read_text()
    # the first rank's file goes after the first pass
    gone = "        tokens.append(int(token))\n"
    assert gone in code
    there = tmp_path / "gone.py"
    there.write_text(
        f"import sys\nsys.path.append({str(EXAMPLES)!r})\n"
        + code.replace("from __future__ import annotations\n", "").replace(
            gone, gone + f"        (args.dir / '{FILE}').rename(args.dir / 'away')\n"
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    script, asked = [there, EXAMPLES / "pipeline.py"], ["--offload", "--budget=200kB", "--count=20"]
    processes = [
        forked.start(
            [sys.executable, script[rank], (own, other)[rank], *asked],
            forked.TORCH,
            env={**os.environ, **meeting, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    said = [process.communicate(60) for process in processes]
    assert all(process.returncode for process in processes)
    assert f"ShardNotFoundError: {own / FILE}: no such file" in said[0][1]
