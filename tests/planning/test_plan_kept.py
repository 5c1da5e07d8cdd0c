"""Splits over nodes that hold tensors already, as those have that are left of a larger group."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.errors import PlanInfeasibleError
from streamload.planning.partition import Item, Node, partition, units_of
from streamload.planning.plan import Plan
from streamload.planning.shares import ClusterPlan, Member, make_shares

PLANS = 1000


def items_of(chance: random.Random, layers: int) -> list[Item]:
    """Tensors of a model with so many layers."""
    names = ["model.embed_tokens.weight"]
    names += [f"model.layers.{n}.{part}.weight" for n in range(layers) for part in "ab"]
    names += ["model.norm.weight", "lm_head.weight"]
    return [Item(name, chance.randint(1, 9)) for name in names]


def left_of(chance: random.Random, nodes: Sequence[Node], items: Sequence[Item]) -> list[Node]:
    """The nodes after a loss: of their parts under a split they hold all, or what had come."""
    parts = partition(items, nodes)
    lost = set(chance.sample(range(len(nodes)), chance.randint(1, len(nodes) - 1)))
    after = chance.random() < 0.5  # the load
    return [
        Node(n.name, n.budget, [x for x in part.names if after or chance.random() < 0.6])
        for at, (n, part) in enumerate(zip(nodes, parts, strict=True))
        if at not in lost
    ]


def reads(items: Sequence[Item], nodes: Sequence[Node], names: Sequence[Sequence[str]]) -> int:
    """Bytes that nodes with these tensors have to read."""
    pairs = zip(nodes, names, strict=True)
    new = [set(mine) - node.held for node, mine in pairs]
    return sum(item.nbytes for item in items for each in new if item.name in each)


def cuts(items: Sequence[Item], nodes: Sequence[Node]) -> Iterator[list[list[str]]]:
    """Every split in runs of units that leaves no node empty and fits."""
    units = units_of(items)
    for stops in combinations(range(1, len(units)), len(nodes) - 1):
        runs = [units[a:b] for a, b in pairwise((0, *stops, len(units)))]
        sizes = [sum(unit.nbytes for unit in run) for run in runs]
        if all(size <= node.budget for size, node in zip(sizes, nodes, strict=True)):
            yield [[item.name for unit in run for item in unit.items] for run in runs]


def test_layers_stay_where_they_are_as_far_as_budgets_allow() -> None:
    """Of 1,000 losses: every tensor is on one node, in runs, and no split reads fewer bytes."""
    chance = random.Random(7)
    feasible = moved = 0
    for _ in range(PLANS):
        items = items_of(chance, chance.randint(3, 7))
        total = sum(item.nbytes for item in items)
        count = chance.randint(2, 4)
        least = total // count + 9
        nodes = [Node(f"n{i}", chance.randint(least, 2 * total)) for i in range(count)]
        left = left_of(chance, nodes, items)
        parts = partition(items, left)
        names = [part.names for part in parts]
        assert sorted(name for mine in names for name in mine) == sorted(i.name for i in items)
        best = min((reads(items, left, cut) for cut in cuts(items, left)), default=None)
        assert all(part.fits for part in parts) == (best is not None)
        if best is not None:
            feasible += 1
            assert reads(items, left, names) == best
            held = [item.nbytes for item in items if any(item.name in node.held for node in left)]
            moved += best > total - sum(held)
    assert feasible > PLANS / 2
    assert moved  # budgets made some give layers away


def test_nothing_held_means_the_split_of_before() -> None:
    """Of cuts that read the same, the fullest node is as empty as it can be."""
    chance = random.Random(8)
    for _ in range(100):
        items = items_of(chance, 8)
        nodes = [Node(f"n{i}", chance.randint(60, 200)) for i in range(3)]
        plain = partition(items, nodes)
        held = [Node(n.name, n.budget, ["of no model"]) for n in nodes]
        if all(part.fits for part in plain):
            found = partition(items, held)
            assert max(part.share for part in found) == max(part.share for part in plain)


def test_a_model_without_layers_has_many_units() -> None:
    """Nodes end in steps then, and keep what they hold up to a step."""
    items = [Item(f"t{n:05}", 1) for n in range(20_000)]
    first = partition(items, [Node(name, 10_000) for name in "abc"])
    left = [Node(part.node, 12_000, part.names) for part in first if part.node != "b"]
    parts = partition(items, left)
    assert all(part.fits for part in parts)
    assert reads(items, left, [part.names for part in parts]) < 6667 + 2 * 20_000 / 256


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    chance = random.Random(1)
    tensors = {
        i.name: ("U8", (i.nbytes, 4096), bytes(i.nbytes * 4096)) for i in items_of(chance, 6)
    }
    return open_checkpoint(write_safetensors(tmp_path / "m.safetensors", tensors))


@pytest.mark.parametrize("split", ["layers", "balanced", "replicate"])
def test_shares_of_what_is_left(split: str, checkpoint: Checkpoint) -> None:
    """Tensors that are held stay, and each is on one node, or on all; else the numbers are told."""
    chance = random.Random(split)
    total = sum(info.nbytes for info in checkpoint.tensors.values())

    def planned(nodes: Sequence[Node]) -> Plan:
        return streamload.split(checkpoint, nodes=nodes, dtype="checkpoint")

    def made(budgets: Sequence[int], held: Sequence[Sequence[str]]) -> ClusterPlan:
        members = [Member(r, f"n{r}", "h", 0, 1, frozenset(h)) for r, h in enumerate(held)]
        return make_shares(0, members, budgets, split, planned, checkpoint)

    plans = 0
    for _ in range(40):
        count = chance.randint(2, 4)
        budgets = [chance.randint(total // 2, 2 * total) for _ in range(count)]
        if split == "replicate":
            budgets = [total] * count
        try:
            shares = sorted(made(budgets, [()] * count).shares, key=lambda share: share.rank)
            left = shares[1:]
            after = made(budgets[1:], [share.parameters for share in left])
        except PlanInfeasibleError as error:
            assert error.needed_nbytes > error.budget_nbytes
            continue
        plans += 1
        names = [name for share in after.shares for name in share.parameters]
        times = count - 1 if split == "replicate" else 1
        assert sorted(names) == sorted([*checkpoint.tensors] * times)
        assert all(share.nbytes <= share.budget_nbytes for share in after.shares)
        kept = {(f"n{at}", name) for at, share in enumerate(left) for name in share.parameters}
        if split != "layers":
            assert kept <= {(share.node, n) for share in after.shares for n in share.parameters}
    assert plans > 10
