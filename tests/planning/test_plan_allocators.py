"""What allocators take: torch's rules for CUDA, followed by hand, by chance and by the planner.

And CUDA's driver: what was measured of it, and plans held against a small model of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_checkpoint import shape_of_size
from parameters import few
from plan_helpers import checkpoint_of, device_spec, plan_of, wants_of

from streamload.core.dtypes import BF16
from streamload.devices.allocators import AllocatorKind, ObjectCosts, round_up, taken
from streamload.errors import PlanInfeasibleError
from streamload.planning.moves import DeviceSpec, TensorRequest

KIB, MIB = 2**10, 2**20
GIB = 2**30


def cuda(*sizes: int) -> list[int]:
    """What torch's caching allocator takes, with fixed segments."""
    return list(taken("cuda_caching", 512, sizes))


# --- sequences by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "grown"),
    [
        # up to 1 MiB: blocks of 512 bytes in segments of 2 MiB
        ([1], [2 * MIB]),
        ([1] * 4096, [2 * MIB] + [0] * 4095),
        ([1] * 4097, [2 * MIB] + [0] * 4095 + [2 * MIB]),
        ([512] * 4096 + [513], [2 * MIB] + [0] * 4095 + [2 * MIB]),
        ([MIB, MIB, MIB], [2 * MIB, 0, 2 * MIB]),
        ([700 * KIB] * 5, [2 * MIB, 0, 2 * MIB, 0, 2 * MIB]),
        # what is left of a segment serves smaller ones, the least that will do first
        ([700 * KIB, 700 * KIB, 648 * KIB, 1], [2 * MIB, 0, 0, 2 * MIB]),
        ([MIB, 900 * KIB, MIB, 900 * KIB, 124 * KIB, 124 * KIB], [2 * MIB, 0, 2 * MIB, 0, 0, 0]),
        # above, and below 10 MiB: segments of 20 MiB
        ([MIB + 1], [20 * MIB]),
        ([8 * MIB] * 3, [20 * MIB, 0, 20 * MIB]),
        ([8 * MIB, 8 * MIB, 4 * MIB], [20 * MIB, 0, 0]),
        ([10 * MIB - 512] * 2, [20 * MIB, 0]),
        # a rest of at most 1 MiB is not cut off: the block keeps it
        ([9 * MIB, 10 * MIB, MIB + 512], [20 * MIB, 0, 20 * MIB]),
        ([9 * MIB, 10 * MIB - 512, MIB + 512], [20 * MIB, 0, 0]),
        ([9 * MIB, 9 * MIB, 2 * MIB], [20 * MIB, 0, 0]),
        ([9 * MIB + 512, 9 * MIB, MIB + 512], [20 * MIB, 0, 0]),
        # from 10 MiB on: segments of their own, in steps of 2 MiB
        ([10 * MIB] * 2, [10 * MIB] * 2),
        ([16 * MIB], [16 * MIB]),
        ([16 * MIB + 1], [18 * MIB]),
        ([16 * MIB + 512], [18 * MIB]),
        ([3 * GIB + 1], [3 * GIB + 2 * MIB]),
        # of which more than 1 MiB left over serves others, and less does not
        ([16 * MIB + 512, MIB + 512], [18 * MIB, 0]),
        ([17 * MIB, MIB + 512], [18 * MIB, 20 * MIB]),
        # and a large one goes into what is free of 20 MiB, where it fits
        ([8 * MIB, 12 * MIB, 12 * MIB], [20 * MIB, 0, 12 * MIB]),
        # the pools are apart
        ([8 * MIB, MIB], [20 * MIB, 2 * MIB]),
        ([MIB, 1536 * KIB], [2 * MIB, 20 * MIB]),
        # nothing takes nothing
        ([0], [0]),
        ([0, 1, 0, 1], [0, 2 * MIB, 0, 0]),
        ([], []),
    ],
)
def test_segments_by_hand(sizes: Sequence[int], grown: Sequence[int]) -> None:
    """The rules of c10/cuda/CUDACachingAllocator.cpp, followed with pencil and paper."""
    assert cuda(*sizes) == list(grown)


@pytest.mark.parametrize(
    ("sizes", "grown"),
    [
        ([1], [2 * MIB]),
        ([MIB, MIB, 1], [2 * MIB, 0, 2 * MIB]),
        # small blocks may lie across the pages of one segment
        ([700 * KIB] * 5, [2 * MIB, 0, 2 * MIB, 0, 0]),
        ([8 * MIB] * 5, [20 * MIB, 0, 20 * MIB, 0, 0]),
        ([100 * MIB + 1, 19 * MIB], [120 * MIB, 0]),
        ([100 * MIB, 1], [100 * MIB, 2 * MIB]),
        ([0, 45 * MIB], [0, 60 * MIB]),
        # however small a rest is, it is cut off: the last of these needs a page less
        ([39 * MIB + 512 * KIB] * 41, [40 * MIB] * 39 + [20 * MIB, 40 * MIB]),
    ],
)
def test_expandable_segments_by_hand(sizes: Sequence[int], grown: Sequence[int]) -> None:
    """One segment a pool that grows by pages of 2 MiB (small) or 20 MiB (large)."""
    assert list(taken("cuda_expandable", 512, sizes)) == list(grown)


@pytest.mark.parametrize(
    ("granularity", "sizes", "grown"),
    [
        (1, [0, 1, 7], [0, 1, 7]),
        (64, [0, 1, 64, 65], [0, 64, 64, 128]),
        (4096, [10**9], [1_000_001_536]),
    ],
)
def test_other_allocators_round(
    granularity: int, sizes: Sequence[int], grown: Sequence[int]
) -> None:
    """Each allocation by itself, up to the granularity."""
    assert list(taken("exact", granularity, sizes)) == list(grown)


def driver(*sizes: int) -> list[int]:
    return list(taken("cuda_driver", 512, sizes))


@pytest.mark.parametrize(
    ("count", "nbytes", "total"),
    [
        (1, 1, 2 * MIB),
        (8, 1, 2 * MIB),
        (1, 65536, 2 * MIB),
        (8, 65536, 2 * MIB),
        (1, 524_288, 2 * MIB),
        (8, 524_288, 4 * MIB),
        (1, MIB, 2 * MIB),
        (8, MIB, 8 * MIB),
        (1, MIB + 1, 2 * MIB),
        (8, MIB + 1, 16 * MIB),
        (8, 2 * MIB, 16 * MIB),
        (1, 2 * MIB + 1, 4 * MIB),
        (8, 2 * MIB + 1, 32 * MIB),
        (8, 5 * MIB, 48 * MIB),
    ],
)
def test_the_driver_takes_what_was_measured(count: int, nbytes: int, total: int) -> None:
    """cuMemAlloc on one H200 with driver 580, one allocation after the other."""
    assert sum(driver(*[nbytes] * count)) == total


def test_the_driver_takes_what_was_measured_of_a_llama() -> None:
    """120 tensors: what it took, and a block for the small ones, which found room in another."""
    sizes = [2 * math.prod(shape) for shape in shape_of_size(10**9, BF16).tensors().values()]
    assert (len(sizes), sum(sizes)) == (120, 999_994_368)
    assert sum(driver(*sizes)) == 1_077_936_128 + 2 * MIB


@pytest.mark.parametrize(
    ("sizes", "grown"),
    [
        ([1] * 4097, [2 * MIB] + [0] * 4095 + [2 * MIB]),  # 512 bytes each
        ([MIB, MIB + 1, MIB], [2 * MIB, 2 * MIB, 0]),  # what a large one leaves serves nobody
        ([700 * KIB, 700 * KIB, 648 * KIB, 1], [2 * MIB, 0, 0, 2 * MIB]),
        ([0, 1, 0, 3 * GIB + 1], [0, 2 * MIB, 0, 3 * GIB + 2 * MIB]),
    ],
)
def test_the_drivers_blocks_by_hand(sizes: Sequence[int], grown: Sequence[int]) -> None:
    """Small ones share blocks of 2 MiB; each large one has blocks of its own."""
    assert driver(*sizes) == list(grown)


# --- by chance ------------------------------------------------------------------------------------


def by_address(sizes: Iterable[int]) -> list[int]:
    """The fixed segments once more, slowly: each segment with the blocks in it, by address."""
    segments: list[tuple[bool, list[tuple[int, int]]]] = []  # (small, free (first, stop) in it)
    grown = []
    for nbytes in sizes:
        if nbytes == 0:
            grown.append(0)
            continue
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        fits = [
            (stop - first, number, at)
            for number, (kind, free) in enumerate(segments)
            for at, (first, stop) in enumerate(free)
            if kind is small and stop - first >= size
        ]
        if fits:
            grown.append(0)
            _, number, at = min(fits)
        else:
            whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // 2**21) * 2**21
            segments.append((small, [(0, whole)]))
            grown.append(whole)
            number, at = len(segments) - 1, 0
        first, stop = segments[number][1].pop(at)
        if stop - first - size >= 512 if small else stop - first - size > MIB:
            segments[number][1].append((first + size, stop))
    return grown


SIZES = st.lists(
    st.tuples(
        st.one_of(
            st.integers(0, 3000),
            st.integers(0, 3 * MIB),
            st.integers(0, 64 * MIB),
            st.sampled_from([MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB, 20 * MIB]),
        ),
        st.sampled_from([1, 1, 1, 2, 30]),  # many of one size are taken together
    ),
    max_size=40,
).map(lambda runs: [nbytes for nbytes, count in runs for _ in range(count)])

KINDS = st.sampled_from(["exact", "cuda_caching", "cuda_expandable", "cuda_driver"])


@settings(max_examples=few(300), deadline=None)
@given(sizes=SIZES)
def test_segments_are_those_of_a_model_with_addresses(sizes: list[int]) -> None:
    assert cuda(*sizes) == by_address(sizes)


@settings(max_examples=few(300), deadline=None)
@given(sizes=SIZES, kind=st.sampled_from(["cuda_caching", "cuda_expandable"]))
def test_what_is_taken_is_enough_and_not_much_more(
    sizes: list[int], kind: Literal["cuda_caching", "cuda_expandable"]
) -> None:
    total = 0
    small: list[int] = []
    large: list[int] = []
    for nbytes, grown in zip(sizes, taken(kind, 512, sizes), strict=True):
        block = round_up(nbytes, 512)
        (small if block <= MIB else large).append(block)
        total += grown
        assert grown >= 0
        assert grown % (2 * MIB) == 0
        assert grown == 0 or nbytes > 0
        assert sum(small) + sum(large) <= total
        if kind == "cuda_expandable":
            assert total == round_up(sum(small), 2 * MIB) + round_up(sum(large), 20 * MIB)
            continue
        # a small segment is opened where no other has room: at most one of them is half empty.
        # A large one is at most 20 MiB, or the block's own to the next 2 MiB.
        most = 2 * sum(small) + 2 * MIB if any(small) else 0
        most += sum(20 * MIB if b < 10 * MIB else round_up(b, 2 * MIB) for b in large)
        assert total <= most


@settings(max_examples=few(100), deadline=None)
@given(sizes=SIZES, more=SIZES, kind=KINDS)
def test_what_comes_later_changes_nothing_before(
    sizes: list[int], more: list[int], kind: AllocatorKind
) -> None:
    first = list(taken(kind, 512, sizes))
    assert list(taken(kind, 512, [*sizes, *more]))[: len(sizes)] == first
    assert list(taken(kind, 512, iter(sizes))) == first


# --- in plans -------------------------------------------------------------------------------------


def spec(
    budget_nbytes: int, allocator: AllocatorKind = "cuda_caching", **changes: Any
) -> DeviceSpec:
    arguments: dict[str, Any] = {
        "host_visible": False,
        "shared_memory": False,
        "granularity_nbytes": 512,
        "allocator": allocator,
    }
    return device_spec(**{"name": "cuda:0", "budget_nbytes": budget_nbytes} | arguments | changes)


SHAPES = {
    "a": ("U8", (8 * MIB,)),
    "b": ("U8", (700 * KIB,)),
    "c": ("U8", (8 * MIB,)),
    "d": ("U8", (8 * MIB,)),
    "e": ("U8", (16 * MIB + 512,)),
    "f": ("U8", (1,)),
    "g": ("U8", (0,)),
}


@pytest.mark.parametrize("allocator", ["cuda_caching", "cuda_expandable"])
def test_peaks_are_those_of_the_allocator(allocator: AllocatorKind) -> None:
    checkpoint = checkpoint_of(SHAPES)
    plan = plan_of(checkpoint, spec(GIB, allocator))
    sizes = [p.nbytes for p in plan.placements]
    assert [p.resident_nbytes for p in plan.placements] == list(taken(allocator, 512, sizes))
    (mine,) = plan.devices
    assert mine.resident_nbytes == mine.peak_nbytes == sum(taken(allocator, 512, sizes))
    if allocator == "cuda_caching":
        assert mine.peak_nbytes == (20 + 2 + 20 + 18) * MIB
    else:
        assert mine.peak_nbytes == (60 + 2) * MIB


def test_a_budget_counts_whole_segments() -> None:
    checkpoint = checkpoint_of(SHAPES)
    assert plan_of(checkpoint, spec(60 * MIB)).devices[0].peak_nbytes == 60 * MIB
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(checkpoint, spec(60 * MIB - 1))
    assert caught.value.needed_nbytes == 60 * MIB
    assert caught.value.budget_nbytes == 60 * MIB - 1
    # an allocator that only rounds would do with less
    exact = plan_of(checkpoint, spec(60 * MIB, "exact")).devices[0].peak_nbytes
    assert exact == (8 * 3 + 16) * MIB + 512 + 700 * KIB + 512


def test_what_is_written_in_place_is_not_allocated() -> None:
    checkpoint = checkpoint_of(SHAPES)
    wants = [
        TensorRequest(w.name, w.shape, w.source, held=("cuda:0", "uint8", 8 * MIB))
        if w.name in ("a", "c")
        else w
        for w in wants_of(checkpoint)
    ]
    plan = plan_of(checkpoint, spec(GIB), wants=wants)
    by_name = {p.name: p for p in plan.placements}
    assert {n for n, p in by_name.items() if p.action == "in_place"} == {"a", "c"}
    assert by_name["a"].resident_nbytes == by_name["c"].resident_nbytes == 8 * MIB
    fresh = [p for p in plan.placements if p.action == "new"]
    expected = list(taken("cuda_caching", 512, [p.nbytes for p in fresh]))
    assert [p.resident_nbytes for p in fresh] == expected
    (mine,) = plan.devices
    assert mine.held_nbytes == 16 * MIB
    assert mine.peak_nbytes == 16 * MIB + sum(expected)
    assert mine.fresh_nbytes == sum(expected)


@pytest.mark.parametrize("allocator", ["exact", "cuda_caching", "cuda_expandable", "cuda_driver"])
def test_old_weights_leave_all_at_once_where_segments_would_have_holes(
    allocator: AllocatorKind,
) -> None:
    """The peak is then what the new ones take; elsewhere they go one by one."""
    shapes = {f"t{i}": ("F32", (1024, 1024)) for i in range(4)}
    checkpoint = checkpoint_of(shapes)
    wants = [
        TensorRequest(w.name, w.shape, w.source, held=("cuda:0", "float16", 2 * MIB))
        for w in wants_of(checkpoint)
    ]
    (mine,) = plan_of(checkpoint, spec(GIB, allocator), wants=wants).devices
    assert mine.release_first is (allocator in ("cuda_caching", "cuda_expandable"))
    assert mine.held_nbytes == 8 * MIB
    sizes = [4 * MIB] * 4
    assert mine.peak_nbytes == sum(taken(allocator, 512, sizes))


@dataclass(slots=True)
class Driver:
    """A model of CUDA's driver: blocks of 2 MiB with addresses, given back when empty."""

    blocks: int = 0  # how many are taken
    peak: int = 0  # the most that there were
    _free: list[list[tuple[int, int]]] = field(default_factory=list)  # (first, stop), by address

    def allocate(self, nbytes: int) -> tuple[int, int, int]:
        """Allocate; returns (number of a shared block or -1, first byte in it, bytes)."""
        size = -(-nbytes // 512) * 512
        if size > MIB:
            self._take(-(-size // (2 * MIB)))
            return -1, 0, size
        holes = [
            (stop - first, number, first)
            for number, free in enumerate(self._free)
            for first, stop in free
            if stop - first >= size
        ]
        if not holes:
            self._take(1)
            self._free.append([(0, 2 * MIB)])
            holes = [(2 * MIB, len(self._free) - 1, 0)]
        room, number, first = min(holes)
        self._free[number].remove((first, first + room))
        if room > size:
            self._free[number].append((first + size, first + room))
        return number, first, size

    def free(self, memory: tuple[int, int, int]) -> None:
        number, first, size = memory
        if number < 0:
            self.blocks -= -(-size // (2 * MIB))
            return
        merged = [(first, first + size)]
        for hole in self._free[number]:
            if hole[1] == merged[0][0]:
                merged[0] = (hole[0], merged[0][1])
            elif hole[0] == merged[0][1]:
                merged[0] = (merged[0][0], hole[1])
            else:
                merged.append(hole)
        self._free[number] = merged
        if merged == [(0, 2 * MIB)]:
            self._free[number] = []
            self.blocks -= 1

    def _take(self, count: int) -> None:
        self.blocks += count
        self.peak = max(self.peak, self.blocks)


TENSORS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3000), st.integers(0, 3 * MIB // 2), st.integers(0, 12 * MIB)).map(
            lambda nbytes: nbytes // 4
        ),
        st.sampled_from(["new", "in_place", "half", "double"]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=few(300), deadline=None)
@given(tensors=TENSORS, kinds=st.sampled_from([("new",), ("new", "in_place"), None]))
def test_the_driver_never_takes_more_than_was_planned(
    tensors: list[tuple[int, str]], kinds: tuple[str, ...] | None
) -> None:
    """New, written in place, and in the place of smaller and larger ones, as a load goes about it.

    All new, exactly what was planned is there in the end.
    """
    shapes = {f"t{i:02}": ("F32", (numel,)) for i, (numel, _) in enumerate(tensors)}
    how = {f"t{i:02}": kind for i, (_, kind) in enumerate(tensors)}
    if kinds is not None:
        how = {name: kind if kind in kinds else kinds[-1] for name, kind in how.items()}
    held = {"in_place": ("float32", 1), "half": ("float16", 2), "double": ("float64", 0.5)}
    checkpoint = checkpoint_of(shapes)
    wants = [
        want
        if how[want.name] == "new"
        else want._replace(
            held=(
                "cuda:0",
                held[how[want.name]][0],
                int(4 * math.prod(want.shape) / held[how[want.name]][1]),
            )
        )
        for want in wants_of(checkpoint)
    ]
    roomy = plan_of(checkpoint, spec(GIB * 4, "cuda_driver"), wants=wants)
    for budget in (4 * GIB, roomy.devices[0].peak_nbytes - 1):
        try:
            plan = plan_of(checkpoint, spec(budget, "cuda_driver"), wants=wants)
        except PlanInfeasibleError:
            continue
        (mine,) = plan.devices
        there = Driver()
        old = {
            want.name: there.allocate(want.held[2])
            for want in wants
            if want.held is not None and want.held[2]
        }
        before = there.blocks
        assert mine.held_nbytes == 2 * MIB * before
        if mine.release_first:
            for p in plan.placements:
                if p.action == "replace" and p.name in old:
                    there.free(old.pop(p.name))
        there.peak = there.blocks
        for p in plan.placements:
            if p.action == "replace" and p.name in old:
                there.free(old.pop(p.name))
            if p.action != "in_place" and p.nbytes:
                there.allocate(p.nbytes)
        assert 2 * MIB * there.peak <= mine.peak_nbytes <= budget
        if not wants or all(want.held is None for want in wants):
            assert 2 * MIB * there.blocks == mine.peak_nbytes == mine.resident_nbytes


def driver_plan(*tensors: tuple[int, int | None], budget_nbytes: int = GIB) -> Any:
    """A plan of tensors of float16: bytes of each, and of what stands in its place already."""
    shapes = {f"t{i:02}": ("F16", (nbytes // 2,)) for i, (nbytes, _) in enumerate(tensors)}
    checkpoint = checkpoint_of(shapes)
    wants = [
        want
        if held is None
        else want._replace(held=("cuda:0", "float16" if held == nbytes else "float32", held))
        for want, (nbytes, held) in zip(wants_of(checkpoint), tensors, strict=True)
    ]
    return plan_of(checkpoint, spec(budget_nbytes, "cuda_driver"), wants=wants).devices[0]


def test_large_weights_leave_the_driver_one_by_one_and_small_ones_together() -> None:
    large = driver_plan(*[(3 * MIB, 6 * MIB)] * 4)
    assert not large.release_first
    assert (large.held_nbytes, large.peak_nbytes, large.resident_nbytes) == tuple(
        n * MIB for n in (24, 24, 16)
    )
    both = driver_plan(*[(3 * MIB, 6 * MIB)] * 4, (2 * KIB, 4 * KIB))
    assert both.release_first
    assert (both.held_nbytes, both.peak_nbytes) == (26 * MIB, 18 * MIB)
    # where a small one is written in place, its block stays, and a new one may have to be taken
    kept = driver_plan((3 * MIB, 6 * MIB), (2 * KIB, 4 * KIB), (6 * KIB, 6 * KIB))
    assert kept.release_first
    assert (kept.held_nbytes, kept.peak_nbytes) == (8 * MIB, (4 + 2 + 2) * MIB)


def test_small_weights_are_replaced_where_their_old_blocks_would_not_fit_beside_new_ones() -> None:
    tensors = [(MIB // 2, MIB), (6 * KIB, 6 * KIB)] * 8
    assert driver_plan(*tensors).peak_nbytes == (10 + 4) * MIB
    assert driver_plan(*tensors, budget_nbytes=6 * MIB).peak_nbytes == 6 * MIB
    with pytest.raises(PlanInfeasibleError):
        driver_plan(*tensors, budget_nbytes=6 * MIB - 1)


def test_the_drivers_budget_is_exact() -> None:
    """What is taken fits, one byte less does not; what stands there already is the same again."""
    tensors = [(MIB + 2, None), (5 * MIB, None), (700, None)]
    assert driver_plan(*tensors, budget_nbytes=10 * MIB).peak_nbytes == 10 * MIB
    with pytest.raises(PlanInfeasibleError) as caught:
        driver_plan(*tensors, budget_nbytes=10 * MIB - 1)
    assert caught.value.needed_nbytes == 10 * MIB
    again = driver_plan(*[(nbytes, nbytes) for nbytes, _ in tensors], budget_nbytes=10 * MIB)
    assert (again.held_nbytes, again.peak_nbytes, again.fresh_nbytes) == (10 * MIB, 10 * MIB, 0)


def test_each_device_has_segments_of_its_own() -> None:
    shapes = {f"model.layers.{i}.w": ("U8", (8 * MIB,)) for i in range(6)}
    checkpoint = checkpoint_of(shapes)
    wants = wants_of(checkpoint)
    wants = [
        TensorRequest(w.name, w.shape, w.source, device=f"cuda:{i % 2}")
        for i, w in enumerate(wants)
    ]
    specs = [spec(GIB), spec(GIB, "exact", name="cuda:1")]
    plan = plan_of(checkpoint, *specs, wants=wants)
    assert plan.device("cuda:0").peak_nbytes == 40 * MIB
    assert plan.device("cuda:1").peak_nbytes == 24 * MIB
    assert type(plan).from_json(plan.to_json()) == plan


def test_tensors_that_are_alike_share_what_is_kept_for_each_kind() -> None:
    """A view, a kind, a shape and a size count where they differ; a flat one is no view."""
    costs = ObjectCosts(1000, 100, 30, 7, 1)
    flat = ("float32", (8,), 32, 5)
    assert costs.of([]) == 0
    assert costs.of([flat]) == 5 * 1000 + 30 + 1
    assert costs.of([flat, flat]) == 10 * 1000 + 30 + 1
    others = [("float16", (4, 4), 32, 2), ("float32", (4, 4), 64, 1)]
    assert costs.of([flat, *others]) == 8 * 1000 + 3 * 100 + 3 * 30 + 7 + 2
    assert costs.most_nbytes == costs.of([("float32", (), 4, 1)])
