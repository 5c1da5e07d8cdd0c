"""The split of tensors over nodes, against brute force and on the shapes of real models."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, combinations, combinations_with_replacement, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import few
from safetensors_files import write_safetensors

import streamload
from streamload.planning.partition import (
    Item,
    Need,
    Node,
    Part,
    Unit,
    ordered,
    partition,
    smallest_count,
    units_of,
)

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def items_of(names: Iterable[str], nbytes: int = 10) -> list[Item]:
    return [Item(name, nbytes) for name in names]


def llama_3_8b(*, tied: bool = False) -> list[Item]:
    """The tensors of Llama-3-8B in a dtype of 2 bytes, in the alphabetical order of its files."""
    width, inner, vocabulary, key_value = 4096, 14336, 128256, 8 * 128
    layer = {
        "input_layernorm": width,
        "mlp.down_proj": inner * width,
        "mlp.gate_proj": inner * width,
        "mlp.up_proj": inner * width,
        "post_attention_layernorm": width,
        "self_attn.k_proj": key_value * width,
        "self_attn.o_proj": width * width,
        "self_attn.q_proj": width * width,
        "self_attn.v_proj": key_value * width,
    }
    numel = {HEAD: vocabulary * width, EMBED: vocabulary * width, NORM: width}
    for index in sorted(range(32), key=str):
        numel |= {f"model.layers.{index}.{name}.weight": n for name, n in layer.items()}
    if tied:
        del numel[HEAD]
    return [Item(name, 2 * n) for name, n in numel.items()]


def decoder(sizes: Sequence[int], *, tied: bool = False) -> tuple[list[Item], dict[str, str]]:
    """Embedding, layers and head of the sizes given; with ``tied``, a head without a tensor."""
    first, *layers, last = sizes
    items = [Item(EMBED, first)]
    items += [Item(f"model.layers.{i}.mlp.weight", size) for i, size in enumerate(layers)]
    if tied:
        return [*items, Item(NORM, last)], {HEAD: EMBED}
    return [*items, Item(HEAD, last)], {}


def run_nbytes(units: Sequence[Unit], start: int, stop: int, sizes: dict[str, int]) -> int:
    """The definition: the distinct stored tensors that live in the run or are tied to it."""
    run = units[start:stop]
    held = {item.name for unit in run for item in unit.items}
    held |= {source for unit in run for _, source in unit.tied}
    return sum(sizes[name] for name in held)


def all_cuts(units: int, nodes: int) -> Iterator[tuple[int, ...]]:
    """Every way to give contiguous units to nodes: none empty, or the ends not, or the first."""
    if units >= nodes:
        yield from ((*inner, units) for inner in combinations(range(1, units), nodes - 1))
    elif units > 1:
        for inner in combinations_with_replacement(range(1, units), nodes - 1):
            yield (*inner, units)
    else:
        yield (units,) * nodes


def brute_force(
    items: Sequence[Item], nodes: Sequence[Node], tied: dict[str, str] | None = None
) -> Fraction:
    """The least fullest share over all cuts."""
    units = units_of(items, tied=tied)
    sizes = {item.name: item.nbytes for item in items}
    return min(
        max(
            Fraction(run_nbytes(units, start, stop, sizes), node.budget)
            for node, (start, stop) in zip(nodes, pairwise((0, *cut)), strict=True)
        )
        for cut in all_cuts(len(units), len(nodes))
    )


def fullest(parts: Sequence[Part]) -> Fraction:
    return max(Fraction(part.nbytes, part.budget_nbytes) for part in parts)


def check_whole(
    items: Sequence[Item], nodes: Sequence[Node], parts: Sequence[Part], tied: dict[str, str]
) -> None:
    """Every tensor lives on one node, in whole units in order, and the bytes add up."""
    sizes = {item.name: item.nbytes for item in items}
    order = {item.name: place for place, item in enumerate(items)}
    units = units_of(items, tied=tied)
    assert [part.node for part in parts] == [node.name for node in nodes]
    assert [part.budget_nbytes for part in parts] == [node.budget for node in nodes]
    assert sorted(name for part in parts for name in part.names) == sorted(sizes)
    assert [unit for part in parts for unit in part.units] == [unit.name for unit in units]
    assert sorted(pair for part in parts for pair in part.tied) == sorted(tied.items())
    stop = 0
    for part in parts:
        assert list(part.names) == sorted(part.names, key=order.__getitem__)
        shared = {source for _, source in part.tied}
        assert set(part.copies) == shared - set(part.names)
        assert part.nbytes == sum(sizes[name] for name in (*part.names, *part.copies))
        assert part.fits == (part.nbytes <= part.budget_nbytes)
        assert part.layers.start == stop
        stop = part.layers.stop
    assert stop == sum(unit.kind == "layer" for unit in units)
    if len(units) >= len(nodes):
        assert all(part.units for part in parts)
    elif units:
        assert parts[0].units
        assert parts[-1].units or len(units) == 1


@settings(max_examples=few(300), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60) | st.sampled_from([0, 7, 1000]), min_size=3, max_size=9),
    budgets=st.lists(st.integers(1, 100) | st.sampled_from([1, 50, 2000]), min_size=1, max_size=6),
    tied=st.booleans(),
)
def test_split_is_the_best_of_all(sizes: list[int], budgets: list[int], tied: bool) -> None:
    items, ties = decoder(sizes, tied=tied)
    nodes = [Node(f"n{k}", budget) for k, budget in enumerate(budgets)]
    parts = partition(items, nodes, tied=ties)
    check_whole(items, nodes, parts, ties)
    assert fullest(parts) == brute_force(items, nodes, ties)
    assert parts[0].has_embedding
    assert parts[-1].has_head


@settings(max_examples=few(300), deadline=None)
@given(
    needs=st.lists(
        st.builds(Need, *[st.integers(0, 40) | st.sampled_from([0, 90])] * 3, st.integers(0, 9)),
        min_size=3,
        max_size=8,
    ),
    sizes=st.lists(st.integers(10, 60), min_size=8, max_size=8),
    budgets=st.lists(st.integers(30, 300), min_size=1, max_size=5),
)
def test_a_split_that_streams_leaves_each_node_its_least(
    needs: list[Need], sizes: list[int], budgets: list[int]
) -> None:
    items, ties = decoder(sizes[: len(needs)])
    units = units_of(items, tied=ties)
    nodes = [Node(f"n{k}", budget) for k, budget in enumerate(budgets)]
    of_unit = dict(zip((unit.name for unit in units), needs, strict=False))
    found = [of_unit.get(unit.name, Need()) for unit in units]

    def least(start: int, stop: int) -> int:
        mine = found[start:stop]
        slots = max((n.slot_nbytes for n in mine), default=0)
        slots += max((n.experts_nbytes for n in mine), default=0)
        return slots + sum(n.stays_nbytes for n in mine)

    def share(cut: tuple[int, ...]) -> Fraction:
        runs = zip(nodes, pairwise((0, *cut)), strict=True)
        return max(
            Fraction(sum(u.nbytes for u in units[a:b]) - rows(a, b), node.budget)
            for node, (a, b) in runs
        )

    def rows(start: int, stop: int) -> int:
        return sum(n.rows_nbytes for n in found[start:stop])

    inner = combinations_with_replacement(range(1, len(units)), len(nodes) - 1)
    cuts = [(*each, len(units)) for each in inner]
    fitting = [
        cut
        for cut in cuts
        if all(
            least(a, b) <= n.budget for n, (a, b) in zip(nodes, pairwise((0, *cut)), strict=True)
        )
    ]
    parts = partition(items, nodes, tied=ties, needs=lambda unit: of_unit.get(unit.name, Need()))
    taken = tuple(accumulate(len(part.units) for part in parts))
    if fitting:
        assert taken in fitting
        assert share(taken) == min(map(share, fitting))
    else:
        plain = partition(items, nodes, tied=ties)
        assert [part.units for part in parts] == [part.units for part in plain]


@settings(max_examples=few(200), deadline=None)
@given(data=st.data())
def test_many_ties_are_counted_once_each(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 30), min_size=4, max_size=8))
    items, _ = decoder(sizes)
    stored = [item.name for item in items]
    ties = {
        f"model.layers.{data.draw(st.integers(0, len(sizes)))}.tied{n}.weight": source
        for n, source in enumerate(data.draw(st.lists(st.sampled_from(stored), max_size=5)))
    }
    budgets = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    nodes = [Node(f"n{k}", budget) for k, budget in enumerate(budgets)]
    parts = partition(items, nodes, tied=ties)
    check_whole(items, nodes, parts, ties)
    assert fullest(parts) == brute_force(items, nodes, ties)


@settings(max_examples=few(150), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=8),
    budget=st.integers(1, 120),
    tied=st.booleans(),
)
def test_smallest_count_is_the_smallest(sizes: list[int], budget: int, tied: bool) -> None:
    items, ties = decoder(sizes, tied=tied)
    count = smallest_count(items, budget, tied=ties)
    enough = [
        nodes
        for nodes in range(1, len(sizes) + 1)
        if all(
            part.fits
            for part in partition(items, [Node(str(k), budget) for k in range(nodes)], tied=ties)
        )
    ]
    assert count == (enough[0] if enough else None)


def test_the_first_of_a_bad_pair_may_not_be_filled_up() -> None:
    """A small node in the middle gets the small layer, though the first could hold it as well."""
    items, _ = decoder([1, 1, 100, 1])
    parts = partition(items, [Node("a", 2), Node("b", 1), Node("c", 101)])
    assert [part.nbytes for part in parts] == [1, 1, 101]
    assert all(part.fits for part in parts)


def test_shares_that_floats_cannot_tell_apart() -> None:
    """Of two splits whose shares differ by less than a float's precision the lesser is taken."""
    big = 10**18
    items, _ = decoder([big, 1, big + 1, 0])
    parts = partition(items, [Node("a", 10 * big), Node("b", 10 * big)])
    assert fullest(parts) == brute_force(items, [Node("a", 10 * big), Node("b", 10 * big)])
    assert [part.nbytes for part in parts] == [big + 1, big + 1]


def test_llama_3_8b_over_14_nodes() -> None:
    """16.06 GB over 14 nodes: the fullest holds at most 1.31 GB, and the ends hold the ends."""
    items = llama_3_8b()
    assert sum(item.nbytes for item in items) == 16_060_522_496
    nodes = [Node(f"mali-{k}", "3GB") for k in range(14)]
    parts = partition(items, nodes)
    check_whole(items, nodes, parts, {})
    assert max(part.nbytes for part in parts) <= 1_310_000_000
    assert [part.has_embedding for part in parts] == [True] + [False] * 13
    assert [part.has_head for part in parts] == [False] * 13 + [True]
    assert EMBED in parts[0].names
    assert {NORM, HEAD} <= set(parts[-1].names)
    # what is left to choose is shared out: no node in between has less than two layers
    assert {len(part.layers) for part in parts[1:-1]} == {2, 3}


def test_llama_3_8b_fits_6_nodes_of_3_gb() -> None:
    items = llama_3_8b()
    assert smallest_count(items, 3_000_000_000) == 6
    six, five = (partition(items, [Node(f"n{k}", "3GB") for k in range(n)]) for n in (6, 5))
    assert all(part.fits for part in six)
    assert not all(part.fits for part in five)
    assert smallest_count(items, 1_000_000_000) is None  # the embedding alone is 1.05 GB


def test_tied_head_on_another_node_is_a_copy() -> None:
    items = llama_3_8b(tied=True)
    ties = {HEAD: EMBED}
    (alone,) = partition(items, [Node("a", "20GB")], tied=ties)
    assert (alone.copies, alone.tied) == ((), ((HEAD, EMBED),))
    assert alone.nbytes == sum(item.nbytes for item in items)
    first, last = partition(items, [Node("a", "10GB"), Node("b", "10GB")], tied=ties)
    assert (first.copies, first.tied) == ((), ())
    assert (last.copies, last.tied) == ((EMBED,), ((HEAD, EMBED),))
    assert EMBED in first.names and EMBED not in last.names
    assert first.nbytes + last.nbytes == alone.nbytes + 128256 * 4096 * 2


def test_unequal_budgets_are_filled_by_share() -> None:
    parts = partition(llama_3_8b(), [Node("a", "3GB"), Node("b", "8GB"), Node("c", "12GB")])
    assert len(parts[0].layers) < len(parts[1].layers) < len(parts[2].layers)
    assert fullest(parts) == brute_force(
        llama_3_8b(), [Node("a", "3GB"), Node("b", "8GB"), Node("c", "12GB")]
    )
    assert all(part.fits for part in parts)


def test_embedding_is_on_the_first_even_if_it_is_too_small() -> None:
    """A first node that cannot hold the embedding is given it all the same, and does not fit."""
    parts = partition(llama_3_8b(), [Node("a", "1GB"), Node("b", "30GB")])
    assert parts[0].units == ("embedding",)
    assert [part.fits for part in parts] == [False, True]
    assert parts[0].share > 1


def test_more_nodes_than_units() -> None:
    items, _ = decoder([5, 5, 5])
    parts = partition(items, [Node(str(k), 10) for k in range(6)])
    assert (parts[0].units, parts[-1].units) == (("embedding",), ("head",))
    assert sorted(len(part.units) for part in parts) == [0, 0, 0, 1, 1, 1]
    assert all(part.nbytes == 0 and not part.layers for part in parts if not part.units)
    (one, *rest) = partition([Item("w", 5)], [Node("a", 1), Node("b", 10), Node("c", 10)])
    assert one.names == ("w",)
    assert not any(part.names for part in rest)


def test_nothing_to_split() -> None:
    parts = partition([], [Node("a", 1), Node("b", 1)])
    assert [part.nbytes for part in parts] == [0, 0]
    items, _ = decoder([0, 0, 0, 0])
    assert all(part.fits and part.units for part in partition(items, [Node("a", 1), Node("b", 1)]))
    assert smallest_count([], 1) == 1


def test_the_order_of_the_files_does_not_matter() -> None:
    items = llama_3_8b()
    nodes = [Node(f"n{k}", "3GB") for k in range(7)]
    parts = partition(items, nodes)
    assert partition(list(items), nodes) == parts
    shuffled = random.Random(3).sample(items, len(items))
    again = partition(shuffled, nodes)
    assert [part.units for part in again] == [part.units for part in parts]
    assert [set(part.names) for part in again] == [set(part.names) for part in parts]
    check_whole(shuffled, nodes, again, {})


@settings(max_examples=few(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.booleans(),
)
def test_what_layers_run_with_counts_like_their_tensors(
    layers: list[tuple[int, int]], budgets: list[int], tied: bool
) -> None:
    """The cut is the one of layers that are larger by as much; the parts tell the two apart."""
    sizes, cache = [size for size, _ in layers], [beside for _, beside in layers]
    nodes = [Node(str(n), budget) for n, budget in enumerate(budgets)]
    items, ties = decoder([4, *sizes, 6], tied=tied)
    larger, _ = decoder([4, *map(sum, layers), 6], tied=tied)
    parts = partition(items, nodes, tied=ties, cache=cache)
    whole = partition(larger, nodes, tied=ties)
    assert [part.names for part in parts] == [part.names for part in whole]
    assert [part.share for part in parts] == [part.share for part in whole]
    assert [part.fits for part in parts] == [part.fits for part in whole]
    assert [part.cache_nbytes for part in parts] == [sum(cache[i] for i in p.layers) for p in parts]
    count = smallest_count(items, 20, tied=ties, cache=cache)
    assert count == smallest_count(larger, 20, tied=ties)


@pytest.mark.parametrize(
    ("names", "stack"),
    [
        (["vision.layers.{}.mlp.w", "model.layers.{}.mlp.w"], "model.layers"),
        (["model.layers.{}.mlp.w", "vision_tower.encoder.layers.{}.mlp.w"], "model.layers"),
        (["transformer.encoder.layers.{}.mlp.w"], "transformer.encoder.layers"),
        (["model.decoder.layers.{}.mlp.w"], "model.decoder.layers"),
        (["encoder.layers.{}.mlp.w", "model.layers.{}.mlp.w"], "model.layers"),
        (["h.{}.attn.w"], "h"),
    ],
    ids=str,
)
def test_the_layers_that_run_with_a_cache(names: list[str], stack: str) -> None:
    """Those of the language model, where there are others; not what comes after its last layer."""
    items = items_of(name.format(i) for name in names for i in range(4))
    items += items_of(["mtp.layers.0.norm.w", "embed.weight"])
    units = {unit.name: unit.cache_nbytes for unit in units_of(items, cache=[5, 6, 7])}
    expected = {f"{stack}.{i}": 5 + i for i in range(3)}
    assert {name: nbytes for name, nbytes in units.items() if nbytes} == expected


def test_a_part_of_a_checkpoint_has_the_cache_of_its_layers() -> None:
    items = items_of(f"model.layers.{i}.mlp.w" for i in (2, 3))
    assert [unit.cache_nbytes for unit in units_of(items, cache=[1, 2, 3, 4])] == [3, 4]
    assert [unit.cache_nbytes for unit in units_of(items_of(["w"]), cache=[1])] == [0]


def test_nodes_in_the_order_of_their_numbers() -> None:
    """board-2 before board-10, whatever the order in which they are heard of; nothing is lost."""
    names = ["10", "9a", "a", "board-2", "board-02x", "board-10", "board-10/1", "board-10/12"]
    names += ["board-0010", "board", "board-\u0662", "board-" + "9" * 5000, ""]
    expected = ["", "9a", "10", "a", "board", "board-2", "board-02x", "board-0010", "board-10"]
    expected += ["board-10/1", "board-10/12", "board-" + "9" * 5000, "board-\u0662"]
    for seed in range(20):
        random.Random(seed).shuffle(names)
        assert [node.name for node in ordered(Node(name, 1) for name in names)] == expected


def test_the_plan_is_the_same_for_any_order_of_the_answers() -> None:
    nodes = [Node(f"board-{n}", 10**9 * (2 + n % 3)) for n in range(14)]
    first = partition(llama_3_8b(), ordered(nodes))
    for seed in range(5):
        random.Random(seed).shuffle(nodes)
        assert partition(llama_3_8b(), ordered(nodes)) == first


def test_a_thousand_nodes() -> None:
    draw = random.Random(5).randrange
    items = [Item(EMBED, draw(10**9)), Item(NORM, 8192)]
    items += [
        Item(f"model.layers.{layer}.mlp.experts.{expert}.weight", draw(10**7))
        for layer in range(1000)
        for expert in range(100)
    ]
    nodes = [Node(str(k), draw(10**9, 10**10)) for k in range(1000)]
    parts = partition(items, nodes, tied={HEAD: EMBED})
    check_whole(items, nodes, parts, {HEAD: EMBED})


MODELS: dict[str, dict[str, list[str]]] = {
    "llama, in numeric order": {
        "embedding": ["model.embed_tokens.weight"],
        "model.layers.0": ["model.layers.0.mlp.up.weight"],
        "model.layers.9": ["model.layers.9.mlp.up.weight"],
        "model.layers.10": ["model.layers.10.mlp.up.weight"],
        "head": ["lm_head.weight", "model.norm.weight"],
    },
    "gpt-2": {
        "embedding": ["wpe.weight", "wte.weight"],
        "h.0": ["h.0.attn.c_attn.weight", "h.0.ln_1.weight"],
        "h.1": ["h.1.attn.c_attn.weight", "h.1.ln_1.weight"],
        "head": ["ln_f.weight"],
    },
    "gpt-neox: embed_out is the head, and one layer is a stack": {
        "embedding": ["gpt_neox.embed_in.weight"],
        "gpt_neox.layers.0": ["gpt_neox.layers.0.attention.dense.weight"],
        "head": ["embed_out.weight", "gpt_neox.final_layer_norm.weight"],
    },
    "bert": {
        "embedding": ["bert.embeddings.LayerNorm.weight", "bert.embeddings.word_embeddings.weight"],
        "bert.encoder.layer.0": ["bert.encoder.layer.0.attention.self.query.weight"],
        "bert.encoder.layer.1": ["bert.encoder.layer.1.attention.self.query.weight"],
        "head": ["bert.pooler.dense.weight", "cls.predictions.transform.dense.weight"],
    },
    "t5: encoder before decoder": {
        "embedding": ["shared.weight"],
        "encoder.block.0": ["encoder.block.0.layer.0.SelfAttention.q.weight"],
        "encoder.block.1": ["encoder.block.1.layer.0.SelfAttention.q.weight"],
        "encoder.block end": ["encoder.final_layer_norm.weight"],
        "decoder.block start": ["decoder.embed_tokens.weight"],
        "decoder.block.0": [
            "decoder.block.0.layer.0.SelfAttention.q.weight",
            "decoder.block.0.layer.2.DenseReluDense.wo.weight",
        ],
        "head": ["decoder.final_layer_norm.weight", "lm_head.weight"],
    },
    "whisper: the convolutions come first": {
        "embedding": ["model.encoder.conv1.weight", "model.encoder.embed_positions.weight"],
        "model.encoder.layers.0": ["model.encoder.layers.0.fc1.weight"],
        "model.encoder.layers end": ["model.encoder.layer_norm.weight"],
        "model.decoder.layers start": ["model.decoder.embed_tokens.weight"],
        "model.decoder.layers.0": ["model.decoder.layers.0.fc1.weight"],
        "head": ["model.decoder.layer_norm.weight", "proj_out.weight"],
    },
    "meta's own names": {
        "embedding": ["tok_embeddings.weight"],
        "layers.0": ["layers.0.attention.wq.weight"],
        "layers.1": ["layers.1.attention.wq.weight"],
        "head": ["norm.weight", "output.weight"],
    },
    "experts stay inside their layer": {
        "model.layers.0": [
            "model.layers.0.block_sparse_moe.experts.0.w1.weight",
            "model.layers.0.block_sparse_moe.experts.17.w1.weight",
        ],
        "model.layers.1": ["model.layers.1.block_sparse_moe.experts.3.w1.weight"],
    },
    "a vision tower runs first, and its merger last of it": {
        "embedding": ["visual.patch_embed.proj.weight"],
        "visual.blocks.0": ["visual.blocks.0.attn.qkv.weight"],
        "visual.blocks.1": ["visual.blocks.1.attn.qkv.weight"],
        "visual.blocks end": ["visual.merger.mlp.0.weight", "visual.merger.mlp.2.weight"],
        "model.layers start": ["model.embed_tokens.weight"],
        "model.layers.0": ["model.layers.0.mlp.up.weight"],
        "head": ["lm_head.weight", "model.norm.weight"],
    },
    "vit": {
        "embedding": ["vit.embeddings.cls_token", "vit.embeddings.patch_embeddings.weight"],
        "vit.encoder.layer.0": ["vit.encoder.layer.0.output.dense.weight"],
        "vit.encoder.layer.1": ["vit.encoder.layer.1.output.dense.weight"],
        "head": ["classifier.weight", "vit.layernorm.weight"],
    },
    "a wrapper's index does not repeat": {
        "module.0.layers.0": ["module.0.layers.0.mlp.up.weight"],
        "module.0.layers.1": ["module.0.layers.1.mlp.up.weight"],
    },
    "resnet": {
        "embedding": ["bn1.weight", "conv1.weight"],
        "layer1.0": ["layer1.0.conv1.weight"],
        "layer1.1": ["layer1.1.conv1.weight"],
        "layer2.0": ["layer2.0.conv1.weight"],
        "layer2.1": ["layer2.1.conv1.weight"],
        "head": ["fc.weight"],
    },
    "vgg: bare sequences, the classifier last": {
        "features.0": ["features.0.bias", "features.0.weight"],
        "features.2": ["features.2.weight"],
        "features.10": ["features.10.weight"],
        "classifier.0": ["classifier.0.weight"],
    },
}


@pytest.mark.parametrize("expected", MODELS.values(), ids=MODELS)
def test_units_of_model_families(expected: dict[str, list[str]]) -> None:
    """From names in a file's alphabetical order come the ends and layers, in the order they run."""
    units = units_of(items_of(sorted(name for names in expected.values() for name in names)))
    found = {unit.name: [item.name for item in unit.items] for unit in units}
    assert found == expected
    assert list(found) == list(expected)


def test_units_of_a_model_without_layers() -> None:
    """Each tensor is a unit, in the order given."""
    units = units_of(items_of(["b.weight", "a.weight", "c"]))
    assert [unit.name for unit in units] == ["b.weight", "a.weight", "c"]
    assert {unit.kind for unit in units} == {"tensor"}


def test_kinds_and_sizes_of_units() -> None:
    """Units say what they are; layers count over all stacks; sizes add up."""
    names = ["shared.weight", "encoder.block.0.layer.0.q.weight", "encoder.final_layer_norm.weight"]
    names += [
        "decoder.block.0.layer.0.q.weight",
        "decoder.block.1.layer.0.q.weight",
        "lm_head.bias",
    ]
    units = units_of(items_of(names))
    assert [unit.kind for unit in units] == (
        ["embedding", "layer", "inner", "layer", "layer", "head"]
    )
    assert [unit.nbytes for unit in units] == [10] * 6
    parts = partition(items_of(names), [Node("a", 30), Node("b", 30)])
    assert [part.layers for part in parts] == [range(0, 1), range(1, 3)]


def test_t5_ties_lead_to_each_end() -> None:
    """One stored embedding, three tied names: each node that holds one of them holds one copy."""
    names = [
        "shared.weight",
        "encoder.block.0.layer.0.q.weight",
        "encoder.block.1.layer.0.q.weight",
    ]
    names += ["decoder.block.0.layer.0.q.weight", "decoder.block.1.layer.0.q.weight"]
    names += ["decoder.final_layer_norm.weight"]
    tied_names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"]
    ties = dict.fromkeys(tied_names, "shared.weight")
    units = units_of(items_of(names), tied=ties)
    assert {unit.name: len(unit.tied) for unit in units if unit.tied} == {
        "embedding": 1,
        "decoder.block start": 1,
        "head": 1,
    }
    first, second = partition(items_of(names), [Node("a", 100), Node("b", 100)], tied=ties)
    assert first.copies == ()
    assert second.copies == ("shared.weight",)
    assert second.nbytes == 10 * (len(second.names) + 1)


def test_ties_of_a_model_without_layers() -> None:
    """A tied name without layers to go by belongs to the last tensor."""
    parts = partition(
        items_of(["emb", "mid", "end"]), [Node("a", 20), Node("b", 20)], tied={"out": "emb"}
    )
    assert parts[-1].tied == (("out", "emb"),)
    assert parts[-1].copies == ("emb",)


@pytest.mark.parametrize(
    ("items", "tied", "message"),
    [
        (items_of(["a", "b", "a"]), {}, "'a' occurs twice"),
        ([Item("a", -1)], {}, "negative size"),
        (items_of(["a", "b"]), {"b": "a"}, "'b' is stored"),
        (items_of(["a"]), {"b": "c"}, "'c', which is not stored"),
    ],
)
def test_bad_tensors_are_refused(items: list[Item], tied: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        units_of(items, tied=tied)


def test_bad_nodes_are_refused() -> None:
    assert Node("a", "2.5GiB") == Node("a", 5 * 2**29)
    for budget in (0, -1, "0", "80%", "much"):
        with pytest.raises(ValueError, match="budget"):
            Node("a", budget)
    with pytest.raises(ValueError, match="at least one node"):
        partition([], [])
    with pytest.raises(ValueError, match="two nodes of one name: a, a"):
        partition([], [Node("a", 1), Node("a", 2)])


def test_each_node_has_buffers_of_its_own(tmp_path: Path) -> None:
    """What workers read into before they cast is on every node, not on the first alone."""
    tensors = {f"model.layers.{i}.w": ("BF16", (1024, 1024), bytes(2**21)) for i in range(6)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    made = streamload.split(
        tmp_path,
        nodes=[streamload.Node(name, "100MB") for name in "abc"],
        reader="pread",
        dtype="float16",
    )
    found = [device.scratch_nbytes for device in made.devices]
    assert found[0] > 0 and len(set(found)) == 1
