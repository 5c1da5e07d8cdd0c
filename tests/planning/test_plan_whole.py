"""Plans for every tensor of a checkpoint: made kind by kind, and the same as made one by one."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
from plan_helpers import checkpoint_of, device_spec, plan_of

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BF16, F16, F32
from streamload.core.tensors import RowRange
from streamload.errors import PlanInfeasibleError, UnsupportedCastError
from streamload.planning.chunks import Chunk, Cut, SmallTensorBatch
from streamload.planning.moves import (
    DeviceSpec,
    DTypePolicy,
    Moves,
    TensorRequest,
    TensorRequests,
)
from streamload.planning.plan import Plan

MIB = 2**20

#: Dtype and shape: empty ones, scalars, small and large ones.
LAYOUTS: Sequence[tuple[str, tuple[int, ...]]] = (
    ("BF16", (40, 100)),
    ("BF16", (100, 40)),
    ("F16", (4000,)),
    ("F32", ()),
    ("F32", (0, 3)),
    ("I64", (7,)),
    ("U8", (1, 5)),
    ("BF16", (600, 1000)),
)


def mixed(seed: int, count: int = 200) -> Checkpoint:
    """A checkpoint of two files with tensors of few kinds, in any order, many of some in a row."""
    generator = random.Random(seed)
    shards = []
    for shard in "ab":
        tensors = {}
        while len(tensors) < count:
            layout = generator.choice(LAYOUTS)
            for _ in range(generator.choice([1, 2, 60])):
                tensors[f"layers.{len(tensors)}.{shard}"] = layout
        shards.append(tensors)
    return checkpoint_of(*shards)


def both(checkpoint: Checkpoint, *specs: DeviceSpec, **arguments: Any) -> tuple[Plan, Plan]:
    every = TensorRequests.every(checkpoint)
    return (
        plan_of(checkpoint, *specs, wants=every, **arguments),
        plan_of(checkpoint, *specs, wants=list(every), **arguments),
    )


def refused(kind: type[Exception], checkpoint: Checkpoint, spec: DeviceSpec, **more: Any) -> None:
    said = []
    for wants in (TensorRequests.every(checkpoint), list(TensorRequests.every(checkpoint))):
        with pytest.raises(kind) as caught:
            plan_of(checkpoint, spec, wants=wants, **more)
        said.append((str(caught.value), vars(caught.value)))
    assert said[0] == said[1]


def test_every_tensor_is_a_sequence_of_wants() -> None:
    checkpoint = mixed(0)
    wants = TensorRequests.every(checkpoint)
    expected = [
        TensorRequest(i.name, i.shape, (RowRange(i.name, 0, i.shape[0] if i.shape else 1),))
        for i in checkpoint.tensors.values()
    ]
    assert len(wants) == len(expected)
    assert list(wants) == [wants[at] for at in range(len(wants))] == [*wants[:]] == expected


@pytest.mark.parametrize("allocator", ["exact", "cuda_caching", "cuda_expandable", "cuda_driver"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dtype": "float16"},
        {"dtype": {"*.a": "float32", "*": "float16"}},
        {"dtype": {"*": "float32"}, "cast": "numpy"},
        {"dtype": None, "fp16_cast": "device"},
    ],
)
def test_plans_are_those_made_one_by_one(allocator: Any, more: Any) -> None:
    for seed, host_visible in ((1, True), (2, False)):
        spec = device_spec(
            "d",
            2**30,
            allocator=allocator,
            granularity_nbytes=512,
            host_visible=host_visible,
            shared_memory=host_visible,
            casts=not host_visible and "cast" not in more,
        )
        made, expected = both(mixed(seed), spec, **more)
        assert made == expected
        assert expected == made
        assert made.digest == expected.digest
        assert str(made) == str(expected)
        assert Plan.from_json(made.to_json()) == made


def test_plans_for_several_devices_are_the_same() -> None:
    made, expected = both(mixed(3), device_spec("a", 2**29), device_spec("b", 2**29))
    assert made == expected
    assert {p.device for p in made.placements} == {"a", "b"}


def test_files_are_read_in_their_order() -> None:
    checkpoint = mixed(4)
    names = list(checkpoint.tensors)
    random.Random(0).shuffle(names)
    shuffled = Checkpoint(
        checkpoint.path,
        checkpoint.shards,
        {name: checkpoint.tensors[name] for name in names},
        checkpoint.metadata,
        checkpoint.config,
    )
    made, expected = both(shuffled, device_spec("d", 2**30))
    assert made == expected
    places = [checkpoint.tensors[p.name] for p in made.placements]
    assert places == sorted(places, key=lambda info: (info.shard, info.start))


def test_placements_are_like_a_tuple() -> None:
    """Equal to one, with its slices and its hash, whatever has been asked before."""
    checkpoint = mixed(5, 20)
    spec = device_spec("d", 2**30)
    expected = tuple(both(checkpoint, spec)[1].placements)
    made = both(checkpoint, spec)[0].placements
    assert isinstance(made, Moves)
    assert made[3] == expected[3]
    assert made[-1] == expected[-1]
    assert made[3] is made[3]
    assert made[2:9] == expected[2:9]
    assert made[2:9][1] == expected[3]
    with pytest.raises(IndexError):
        made[len(expected)]
    assert sum(count for _, count in made.counted) == len(made) == len(expected)
    assert {(p.shape, p.dst) for p, _ in made.counted} == {(p.shape, p.dst) for p in expected}
    assert list(made) == list(expected)
    assert made[3] == expected[3]
    assert expected[5] in made
    assert made.index(expected[5]) == 5
    assert (made, hash(made)) == (expected, hash(expected))
    assert made != expected[1:]
    assert made != "placements"
    for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert type(copied) is Moves
        assert copied == made


def test_what_cannot_be_loaded_is_refused_alike() -> None:
    layouts = {f"layers.{i}.x": LAYOUTS[i % 3] for i in range(30)}
    scaled = layouts | {"layers.9.w": ("F8_E4M3", (4, 4)), "layers.9.w_scale": ("F32", (4,))}
    spec = device_spec("d", 2**30)
    refused(UnsupportedCastError, checkpoint_of(scaled), spec, dtype="float16")
    refused(
        UnsupportedCastError,
        checkpoint_of(layouts | {"e": ("F6_E2M3", (4,))}),
        spec,
        dtype="float16",
    )
    no_half = device_spec("d", 2**30, unsupported=frozenset({"float16"}))
    refused(UnsupportedCastError, checkpoint_of(layouts), no_half)
    refused(PlanInfeasibleError, checkpoint_of(layouts), device_spec("d", 200_000))
    refused(
        PlanInfeasibleError, checkpoint_of(layouts), device_spec("d", 2**30, free_nbytes=200_000)
    )
    small = device_spec("d", 2**30, largest_allocation_nbytes=7_999)
    refused(PlanInfeasibleError, checkpoint_of({"s": ("F32", ())} | layouts), small)


def test_small_floats_without_a_scale_are_cast() -> None:
    checkpoint = checkpoint_of({f"w{i}": ("F8_E4M3", (4, 4)) for i in range(50)})
    made, expected = both(checkpoint, device_spec("d", 2**30), dtype="float16")
    assert made == expected
    assert {p.dst.name for p in made.placements} == {"float16"}


@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
@pytest.mark.parametrize("seed", range(4))
def test_they_are_cut_alike(seed: int, dtype: str) -> None:
    def flat(plan: Plan) -> list[Any]:
        cut = Cut(plan, checkpoint).packs_and_chunks(lambda kind: 300_000, lambda p: MIB, 200)
        return [
            (p.first, p.shard, p.bounds.tolist()) if isinstance(p, SmallTensorBatch) else p
            for p in cut
        ]

    checkpoint = mixed(seed, 400)
    made, expected = map(flat, both(checkpoint, device_spec("d", 2**30), dtype=dtype))
    assert made == expected
    assert any(type(piece) is tuple for piece in made)
    assert any(isinstance(piece, Chunk) for piece in made)


@pytest.mark.parametrize("native_bf16", [True, False])
@pytest.mark.parametrize("dtype", [None, "float16", {"layers.1*": "float32", "*": "float16"}])
def test_dtypes_are_resolved_once(dtype: Any, native_bf16: bool) -> None:
    checkpoint = mixed(6)
    policy = DTypePolicy.parse(dtype)
    wants = TensorRequests.every(checkpoint)
    expected = [
        policy.resolve(info.name, info.dtype, native_bf16) for info in checkpoint.tensors.values()
    ]
    assert wants.dsts(policy, native_bf16) == expected
    pairs = {(a, b) for a, b in zip(wants.srcs, expected, strict=True) if a is not b}
    assert wants.casts(policy, native_bf16) == sorted(pairs, key=lambda x: (x[0].name, x[1].name))


def test_the_casts_of_one_device() -> None:
    """Those of what has to be there, or may be; what a model asks for goes before the policy."""
    checkpoint = checkpoint_of({"a": ("BF16", (4,)), "b": ("BF16", (4,)), "c": ("F32", (4,))})
    places = {"a": ("x", None), "b": ("y", F32), "c": (None, F16)}
    wants = TensorRequests.of(
        checkpoint,
        [
            want._replace(device=places[want.name][0], dtype=places[want.name][1])
            for want in TensorRequests.every(checkpoint)
        ],
    )
    policy = DTypePolicy()
    assert wants.needs_native_bf16(policy)
    assert wants.casts(policy, False, "x") == [(BF16, F16), (F32, F16)]
    assert wants.casts(policy, True, "x") == [(F32, F16)]
    assert wants.casts(policy, False, "y") == [(BF16, F32), (F32, F16)]
    assert not wants.needs_native_bf16(DTypePolicy.parse("float16"))
    asked = wants[0]._replace(dtype=F16), wants[1]._replace(dtype=None)
    assert TensorRequests.of(checkpoint, asked).needs_native_bf16(policy)  # the pairs are the same
    assert wants.nbytes(policy) == [8, 16, 8]


def test_tensors_longer_than_any_file_do_not_fit() -> None:
    """Their bytes cannot be counted in 64 bits: planned one by one or not, that is said."""
    giant = checkpoint_of({f"t{i}": ("U8", (2**61 - 8,)) for i in range(6)})
    refused(PlanInfeasibleError, giant, device_spec("dev", 2**30))
