"""Who loads what: the same plan on every rank, for any order of the ranks."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.open import Checkpoint, from_headers, open_checkpoint
from streamload.core.dtypes import BY_CODE
from streamload.core.tensors import TensorInfo
from streamload.errors import NodeError, PlanInfeasibleError
from streamload.files.header import Header
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.shares import ClusterPlan, Member, Split, make_shares

WIDTH = 8


def llama(folder: Path, layers: int = 4, *, tied: bool = False) -> Checkpoint:
    names = ["model.embed_tokens.weight"]
    for layer in range(layers):
        names += [f"model.layers.{layer}.{part}.weight" for part in ("q", "o")]
    names += ["model.norm.weight", *["lm_head.weight"] * (not tied)]
    one = ("F32", (WIDTH, WIDTH), bytes(4 * WIDTH * WIDTH))
    write_safetensors(folder / "model.safetensors", dict.fromkeys(names, one))
    if tied:
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return open_checkpoint(folder)


def members(names: Sequence[str]) -> list[Member]:
    return [Member(rank, name, name, 0, 1) for rank, name in enumerate(names)]


def made(
    checkpoint: Checkpoint,
    nodes: Mapping[str, int],
    split: Split = "layers",
    *,
    rank: int = 0,
    **options: Any,
) -> ClusterPlan:
    def planned(nodes: Sequence[Node]) -> Plan:
        return streamload.split(checkpoint, nodes=nodes, dtype="checkpoint", **options)

    return make_shares(rank, members(list(nodes)), list(nodes.values()), split, planned, checkpoint)


def test_the_digest_is_the_same_for_any_order_of_ranks(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path, 9)
    budgets = {f"board-{n}": 2000 + 100 * n for n in (1, 2, 10, 9)}
    splits: list[Split] = ["layers", "balanced", "replicate"]
    for split in splits:
        some = dict.fromkeys(budgets, 10_000) if split == "replicate" else budgets
        digests = set()
        for seed in range(8):
            order = list(some)
            random.Random(seed).shuffle(order)
            one = made(checkpoint, {name: some[name] for name in order}, split)
            digests.add(one.digest)
            assert [s.node for s in one.shares] == ["board-1", "board-2", "board-9", "board-10"]
            assert [order[s.rank] for s in one.shares] == [s.node for s in one.shares]
            assert one.mine.rank == 0
            assert [s.index for s in one.shares] == [0, 1, 2, 3]
            ranks = [s.rank for s in one.shares]
            assert [s.previous_rank for s in one.shares] == [None, *ranks[:-1]]
            assert [s.next_rank for s in one.shares] == [*ranks[1:], None]
        assert len(digests) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"dtype": {"*norm*": "float16"}},
        {"rename": {"model.norm.weight": "norm"}},
        {"mapping": {"a": "model.norm.weight", "b": "lm_head.weight"}},
    ],
    ids=str,
)
def test_the_digest_tells_plans_apart(change: dict[str, Any], tmp_path: Path) -> None:
    """Another dtype of as many bytes, another name or another source is another plan."""
    checkpoint = llama(tmp_path)
    digests = set()
    for options in ({"dtype": "float64"}, change, {"dtype": "checkpoint"}):

        def planned(nodes: Sequence[Node], options: dict[str, Any] = options) -> Plan:
            return streamload.split(checkpoint, nodes=nodes, **options)

        one = make_shares(0, members(["a", "b"]), [9000, 9000], "layers", planned, checkpoint)
        digests.add(one.digest)
    assert len(digests) == 3


def test_float16_and_bfloat16_are_not_the_same_plan(tmp_path: Path) -> None:
    """They take the same bytes everywhere."""
    checkpoint = llama(tmp_path)
    found = []
    for dtype in ("float16", "bfloat16"):

        def planned(nodes: Sequence[Node], dtype: str = dtype) -> Plan:
            return streamload.split(checkpoint, nodes=nodes, dtype=dtype)

        found.append(make_shares(0, members(["a"]), [9000], "layers", planned, checkpoint))
    assert [s.nbytes for s in found[0].shares] == [s.nbytes for s in found[1].shares]
    assert found[0].digest != found[1].digest


def test_whole_layers_and_both_ends(tmp_path: Path) -> None:
    """Each parameter is in one share; ends are where layers begin and end."""
    checkpoint = llama(tmp_path, 6)
    one = made(checkpoint, {"a": 1600, "b": 1600, "c": 1600})
    names = [name for share in one.shares for name in share.parameters]
    assert sorted(names) == sorted(checkpoint.tensors)
    assert [s.has_embedding for s in one.shares] == [True, False, False]
    assert [s.has_head for s in one.shares] == [False, False, True]
    assert [n for s in one.shares for n in s.layers] == list(range(6))
    for share in one.shares:
        assert share.nbytes == sum(checkpoint.tensors[n].nbytes for n in share.parameters)
        assert share.nbytes == share.source_nbytes
        assert one.sources(share, checkpoint).keys() == set(share.parameters)
    assert one.replicas() == []


def test_one_node_has_it_all(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path)
    splits: list[Split] = ["layers", "balanced", "replicate", lambda nodes, sizes: {"a": sizes}]
    for split in splits:
        share = made(checkpoint, {"a": 10_000}, split).mine
        assert (share.layers, share.has_embedding, share.has_head) == (range(4), True, True)
        assert (share.previous_rank, share.next_rank) == (None, None)
        assert sorted(share.parameters) == sorted(checkpoint.tensors)


def test_more_nodes_than_layers(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path, 2)
    for split in ("layers", "balanced"):
        one = made(checkpoint, {f"n{n}": 3000 for n in range(20)}, split)  # type: ignore[arg-type]
        names = [name for share in one.shares for name in share.parameters]
        assert sorted(names) == sorted(checkpoint.tensors)
        assert any(not share.parameters and not share.nbytes for share in one.shares)
        assert "-" in str(one)
        digest = made(checkpoint, {f"n{n}": 3000 for n in range(20)}, split).digest  # type: ignore[arg-type]
        assert one.digest == digest


def test_tied_embeddings_are_on_both_ends(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path, 4, tied=True)
    one = made(checkpoint, {"a": 1700, "b": 1700})
    first, last = one.shares
    assert "model.embed_tokens.weight" in first.parameters
    assert "model.embed_tokens.weight" not in last.parameters
    assert "lm_head.weight" in last.parameters
    source = one.sources(last, checkpoint)["lm_head.weight"]
    assert [row.tensor for row in source.rows] == ["model.embed_tokens.weight"]
    assert "lm_head.weight" not in made(checkpoint, {"a": 9000}).mine.parameters


def test_balanced_fills_all_alike(tmp_path: Path) -> None:
    generator = random.Random(1)
    tensors = {
        f"t{n}": ("U8", (size,), bytes(size))
        for n in range(200)
        for size in [generator.randrange(0, 900)]
    }
    write_safetensors(tmp_path / "m.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path / "m.safetensors")
    one = made(checkpoint, {"a": 100_000, "b": 50_000, "c": 25_000}, "balanced")
    names = [name for share in one.shares for name in share.parameters]
    assert sorted(names) == sorted(tensors)
    shares = [share.nbytes / share.budget_nbytes for share in one.shares]
    assert max(shares) - min(shares) < 900 / 25_000
    for share in one.shares:  # in the order of the file
        assert list(share.parameters) == [n for n in checkpoint.tensors if n in share.parameters]


def test_replicas_are_on_every_node(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path)
    one = made(checkpoint, {"b": 10_000, "a": 20_000}, "replicate")
    assert all(sorted(s.parameters) == sorted(checkpoint.tensors) for s in one.shares)
    assert one.replicas() == [((0, 1), list(one.mine.parameters))]


def test_a_function_splits(tmp_path: Path) -> None:
    """It sees nodes in order and bytes by name; names may be on several nodes."""
    checkpoint = llama(tmp_path, 1)
    seen: list[Any] = []

    def by_hand(nodes: Sequence[Node], sizes: Mapping[str, int]) -> dict[str, Any]:
        seen.append(([node.name for node in nodes], dict(sizes)))
        return {"n2": (n for n in sizes), "n10": {"model.norm.weight"}}

    one = made(checkpoint, {"n10": 9000, "n2": 9000, "n3": 5}, by_hand)
    order = ["n2", "n3", "n10"]
    assert seen == [(order, {name: 256 for name in checkpoint.tensors})]
    assert [len(share.parameters) for share in one.shares] == [len(checkpoint.tensors), 0, 1]
    assert one.split.endswith("by_hand")
    assert one.replicas() == [((0, 1), ["model.norm.weight"])]


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "not a mapping": (lambda nodes, sizes: list(sizes), "split gave list"),
    "nothing": (lambda nodes, sizes: None, "split gave NoneType"),
    "a strange node": (lambda nodes, sizes: {"z": sizes}, "nodes that are not there: z"),
    "a strange name": (lambda nodes, sizes: {"a": ["zz", *sizes]}, "not there: zz"),
    "something left": (lambda nodes, sizes: {"a": list(sizes)[1:]}, "gives 1 parameters to no"),
    "all left": (lambda nodes, sizes: {}, "to no node"),
    "a name for names": (lambda nodes, sizes: {"a": "abc"}, "split gives a 'abc', not names"),
    "no names": (lambda nodes, sizes: {"a": None}, "split gives a None, not names"),
    "a number among names": (lambda nodes, sizes: {"a": [*sizes, 5]}, "not there: 5"),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_splits(which: str, tmp_path: Path) -> None:
    """What a function must not give is a ValueError that says so."""
    function, said = BAD[which]
    with pytest.raises(ValueError, match=said):
        made(llama(tmp_path), {"a": 9000, "b": 9000}, function)


def test_a_split_of_another_name(tmp_path: Path) -> None:
    """Anything else than the four ways is refused."""
    with pytest.raises(ValueError, match="split is layers, replicate, balanced, tensor, a mesh"):
        made(llama(tmp_path), {"a": 9000}, "rows")  # type: ignore[arg-type]


def test_budgets(tmp_path: Path) -> None:
    """The exact bytes fit; one less does not, and the node that is too small is named."""
    checkpoint = llama(tmp_path, 4)
    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    assert made(checkpoint, {"a": whole}).mine.nbytes == whole
    for split in ("layers", "balanced", "replicate"):
        with pytest.raises(PlanInfeasibleError) as raised:
            made(checkpoint, {"a": whole - 1}, split)  # type: ignore[arg-type]
        assert raised.value.device == "a"
        assert raised.value.needed_nbytes == whole
    with pytest.raises(PlanInfeasibleError) as raised:
        made(checkpoint, {"a": whole, "b": whole - 1}, "replicate")
    assert raised.value.device == "b"
    with pytest.raises(NodeError, match="node b: has no budget left"):
        made(checkpoint, {"a": whole, "b": 0})


def test_as_json_and_as_a_table(tmp_path: Path) -> None:
    one = made(llama(tmp_path), {"b2": 1700, "b10": 1700})
    said = json.loads(one.to_json())
    assert list(said["nodes"]) == ["b2", "b10"]
    assert said["digest"] == one.digest
    assert said["nodes"]["b2"]["layers"] == [0, 2]
    lines = str(one).splitlines()
    assert lines[1].split()[:2] == ["b2", "0"]
    assert "embedding, layers 0 to 1" in lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["layers", "balanced", "replicate"])
def test_a_thousand_nodes(split: Split) -> None:
    path = Path("/nowhere/model.safetensors")
    dtype = BY_CODE["BF16"]
    infos = [
        TensorInfo(f"model.layers.{n // 100}.e{n % 100}.w", dtype, (2**20,), path, at, at + 2**21)
        for n in range(100_000)
        for at in [8 + n * 2**21]
    ]
    header = Header(path, infos[-1].stop, 8, tuple(infos), {})
    checkpoint = from_headers(path, [header], {})
    nodes = {f"n{n}": 2**40 + n for n in range(1000)}
    begun = time.monotonic()
    one = made(checkpoint, nodes, split)
    digest = one.digest
    print(f"{split}: {time.monotonic() - begun:.1f} s", digest[:8])
    total = sum(len(share.parameters) for share in one.shares)
    assert total == 100_000 * (1000 if split == "replicate" else 1)
    assert streamload.__version__
