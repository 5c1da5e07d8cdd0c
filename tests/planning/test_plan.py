"""The planner: pure, exact about bytes, and never over a budget."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_checkpoint import PRESETS
from parameters import few
from plan_helpers import checkpoint_of, chunks, device_spec, plan_of, wants_of
from safetensors_files import write_safetensors, write_sparse

import streamload
from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BF16, BY_CODE, BY_NAME, F16, F32, DType
from streamload.core.tensors import RowRange, RowTranspose
from streamload.errors import PlanInfeasibleError, UnsupportedCastError
from streamload.planning.moves import DeviceSpec, DTypePolicy, Kind, Move, Moves, TensorRequest
from streamload.planning.plan import DevicePlan, Plan

MIB = 2**20
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def sparse_llama(path: Path) -> Path:
    """Llama-3-8B in bfloat16, whose data are a hole."""
    return write_sparse(path, {n: ("BF16", s) for n, s in PRESETS["llama-3-8b"].tensors().items()})


# --- the plan as data -----------------------------------------------------------------------------

names = st.text(max_size=20)
sizes = st.integers(0, 2**60)
dtypes = st.sampled_from(list(BY_NAME.values()))
sources = st.lists(st.builds(RowRange, names, sizes, sizes), max_size=3).map(tuple)
kinds = st.builds(
    Kind,
    device=names,
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    src=dtypes,
    dst=dtypes,
    rows=sizes,
    transpose=st.none() | st.builds(RowTranspose, sizes, sizes, sizes),
    action=st.sampled_from(["new", "in_place", "replace"]),
    cast=st.sampled_from(["copy", "llvm", "numpy", "device"]),
    released_nbytes=sizes,
)


def _counted(name: str, source: tuple[RowRange, ...], kind: Kind, nbytes: int) -> Move:
    return Move(name, source, replace(kind, rows=sum(r.stop - r.start for r in source)), nbytes)


placements = st.builds(_counted, names, sources, kinds, sizes)
device_plans = st.builds(
    DevicePlan,
    device=names,
    budget_nbytes=sizes,
    resident_nbytes=sizes,
    scratch_nbytes=sizes,
    peak_nbytes=sizes,
    fresh_nbytes=sizes,
    held_nbytes=sizes,
    layers=st.none() | st.tuples(sizes, sizes),
    embedding=st.booleans(),
    head=st.booleans(),
    release_first=st.booleans(),
    token_nbytes=sizes,
)
plans = st.builds(
    Plan,
    path=names,
    placements=st.lists(placements, max_size=4).map(Moves),
    devices=st.lists(device_plans, max_size=3).map(tuple),
    host_nbytes=sizes,
    host_budget_nbytes=sizes,
    chunk_nbytes=sizes,
    slot_nbytes=sizes,
    threads=st.integers(0, 64),
    readers=st.lists(st.sampled_from(["mmap", "pread"]), max_size=3).map(tuple),
    out_of_range=st.sampled_from(["inf", "clamp", "error"]),
    notes=st.lists(names, max_size=2).map(tuple),
)


@settings(max_examples=few(150), deadline=None)
@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert repr(again) == repr(plan)
    assert again.digest == plan.digest


@settings(max_examples=few(50), deadline=None)
@given(plans, plans)
def test_digest_tells_plans_apart(a: Plan, b: Plan) -> None:
    """Two plans have one digest exactly if they differ in the path and the readers at the most."""
    same = replace(b, path=a.path, readers=a.readers, reader_reasons=a.reader_reasons)
    assert (a.digest == b.digest) == (a == same)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"path": "x"}', '{"placements": 1}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Plan.from_json(text)


def test_a_plan_of_another_version_is_refused() -> None:
    plan = plan_of(checkpoint_of({"w": ("F32", [3])}), device_spec("d", 100))
    data = json.loads(plan.to_json()) | {"wings": 2}
    with pytest.raises(ValueError, match="wings"):
        Plan.from_json(json.dumps(data))


def test_unknown_device_of_a_plan() -> None:
    """`Plan.device` knows the devices of the plan, and raises KeyError for others."""
    plan = plan_of(checkpoint_of({"w": ("F32", [3])}), device_spec("d", 100))
    assert plan.device("d").resident_nbytes == plan.resident_nbytes == 12
    with pytest.raises(KeyError):
        plan.device("e")


def test_the_same_input_gives_the_same_plan(tmp_path: Path) -> None:
    digests = set()
    for folder in ("a", "b"):
        path = sparse_llama(tmp_path / folder / "model.safetensors")
        for _ in range(2):
            plan = streamload.plan(path, budget="20GB", dtype="float16", reader="mmap", threads=2)
            digests.add(plan.digest)
            assert plan.path == str(path)
    assert len(digests) == 1


def test_planning_touches_no_data_and_no_file(tmp_path: Path) -> None:
    """A plan can be made of a checkpoint whose file is gone by now."""
    path = write_safetensors(tmp_path / "m.safetensors", {"w": ("F32", (32,), bytes(128))})
    checkpoint = streamload.open_checkpoint(path)
    path.unlink()
    plan = streamload.plan(checkpoint, budget="1MB", dtype="float16", reader="pread")
    assert plan.resident_nbytes == 64


def test_stated_budget_and_dtype_probe_nothing(tmp_path: Path) -> None:
    path = sparse_llama(tmp_path / "model.safetensors")
    code = (
        "import sys, streamload\n"
        "a = streamload.plan(sys.argv[1], budget='20GB', dtype='float16')\n"
        "n = [streamload.Node('a', '9GB'), streamload.Node('b', '9GB')]\n"
        "b = streamload.split(sys.argv[1], nodes=n, dtype='checkpoint')\n"
        "c = streamload.plan(sys.argv[1], device=['CL', 'CPU'], budget='9GB', dtype='float16')\n"
        "print(len(a.devices), len(b.devices), len(c.devices))\n"
        "print([m for m in ('tinygrad', 'torch') if m in sys.modules])\n"
    )
    assert forked.fresh(code, path).splitlines() == ["1 2 2", "[]"]


# --- peaks ----------------------------------------------------------------------------------------


def held(name: str, nbytes: int, *, dtype: str = "float32", where: str = "d") -> TensorRequest:
    """A want of tensor ``name``, of 4 floats, whose parameter holds ``nbytes`` now."""
    return TensorRequest(name, (4,), (RowRange(name, 0, 4),), held=(where, dtype, nbytes))


FOUR = checkpoint_of({name: ("F32", [4]) for name in "abcd"})  # 16 bytes each


def test_fresh_parameters_add_up() -> None:
    d = plan_of(FOUR, device_spec("d", 64)).device("d")
    assert (d.resident_nbytes, d.scratch_nbytes, d.peak_nbytes, d.fresh_nbytes) == (64, 0, 64, 64)
    assert not d.release_first


def test_in_place_takes_nothing_more() -> None:
    plan = plan_of(FOUR, device_spec("d", 64, free_nbytes=0), wants=[held(n, 16) for n in "abcd"])
    assert {p.action for p in plan.placements} == {"in_place"}
    d = plan.device("d")
    assert (d.resident_nbytes, d.peak_nbytes, d.fresh_nbytes) == (64, 64, 0)


def test_replacing_never_holds_old_and_new() -> None:
    wants = [held(name, 16, dtype="int32") for name in "abcd"]
    plan = plan_of(FOUR, device_spec("d", 64), wants=wants)
    assert {(p.action, p.released_nbytes) for p in plan.placements} == {("replace", 16)}
    d = plan.device("d")
    # freed heap goes back to the kernel later: as much again may be taken meanwhile
    assert (d.peak_nbytes, d.fresh_nbytes, d.release_first) == (64, 64, False)


def test_growing_parameters_go_first_where_that_makes_room() -> None:
    """Small ones that grow come before a large one that shrinks: all are released at once."""
    wants = [held("a", 4, dtype="int8"), held("b", 4, dtype="int8"), held("c", 40, dtype="int64")]
    loose = plan_of(FOUR, device_spec("d", 72), wants=wants).device("d")
    # 48 held; a: 48 - 4 + 16 = 60; b: 72; c: 72 - 40 + 16 = 48
    assert (loose.peak_nbytes, loose.fresh_nbytes, loose.release_first) == (72, 24 + 48, False)
    tight = plan_of(FOUR, device_spec("d", 48), wants=wants).device("d")
    assert (tight.peak_nbytes, tight.release_first) == (48, True)
    assert tight.fresh_nbytes == 48


def test_old_parameters_above_the_budget_go_first() -> None:
    wants = [held(name, 32, dtype="float64") for name in "ab"]
    d = plan_of(FOUR, device_spec("d", 40), wants=wants).device("d")
    assert (d.resident_nbytes, d.peak_nbytes, d.release_first) == (32, 32, True)
    assert d.held_nbytes == 64


def test_parameters_on_another_device_give_nothing_back_here() -> None:
    plan = plan_of(FOUR, device_spec("d", 64), wants=[held("a", 99, where="e")])
    assert [(p.action, p.released_nbytes) for p in plan.placements] == [("replace", 0)]
    assert plan.device("d").fresh_nbytes == 16


def test_allocations_are_counted_as_the_allocator_rounds() -> None:
    plan = plan_of(FOUR, device_spec("d", 400, granularity_nbytes=100))
    assert plan.resident_nbytes == 400
    with pytest.raises(PlanInfeasibleError):
        plan_of(FOUR, device_spec("d", 399, granularity_nbytes=100))


def test_placements_follow_the_files() -> None:
    checkpoint = checkpoint_of(
        {"b": ("F32", [4]), "a": ("F32", [4, 2])}, {"c": ("F32", [4]), "z": ("F32", [0])}
    )
    late = TensorRequest("late", (2, 2), (RowRange("a", 2, 4),))
    early = TensorRequest("early", (2, 2), (RowRange("a", 0, 2),))
    wants = [*wants_of(checkpoint)[::-1][:2], late, early, wants_of(checkpoint)[0]]
    plan = plan_of(checkpoint, device_spec("d", 1000), wants=wants)
    assert [p.name for p in plan.placements] == ["b", "early", "late", "c", "z"]


# --- staging --------------------------------------------------------------------------------------

BIG = checkpoint_of({f"w{i}": ("BF16", [8 * MIB]) for i in range(4)})  # 16 MiB each


@pytest.mark.parametrize(
    ("spec", "changes", "scratch_nbytes", "host_nbytes"),
    [
        # straight from the map into the device; the shortest reads if it must not be mapped
        (device_spec("d", 10**9), {}, 64 * 2**10, 0),
        (device_spec("d", 10**9, host_visible=False), {}, 2 * 2 * 8 * MIB, 0),
        (device_spec("d", 10**9, host_visible=False, shared_memory=False), {}, 0, 2 * 2 * 8 * MIB),
        (device_spec("d", 10**9), {"readers": ["pread"]}, 2 * 8 * MIB, 0),
        (device_spec("d", 10**9), {"readers": ["http"]}, 2 * 8 * MIB, 0),
        (device_spec("d", 10**9), {"readers": ["pread"], "dtype": "checkpoint"}, 0, 0),
        (device_spec("d", 10**9), {"cast": "numpy"}, 2 * 4 * MIB, 0),
        (
            device_spec("d", 10**9, device_casts=frozenset({("bfloat16", "float16")})),
            {"cast": "device"},
            2 * 8 * MIB + 2 * 8 * MIB,  # on the device, and two slots of the one worker
            0,
        ),
    ],
    ids=[
        *("mapped", "staged, shared", "staged", "pread"),
        *("http", "pread, no cast", "numpy", "device"),
    ],
)
def test_staging(
    spec: DeviceSpec, changes: dict[str, Any], scratch_nbytes: int, host_nbytes: int
) -> None:
    """Slots, source buffers and temporaries count where they are, and only where there are any."""
    plan = plan_of(BIG, spec, **{"dtype": "float16"} | changes)
    d = plan.device("d")
    assert (d.scratch_nbytes, plan.host_nbytes) == (scratch_nbytes, host_nbytes)
    assert d.peak_nbytes == d.resident_nbytes + scratch_nbytes


def test_small_models_take_small_slots() -> None:
    plan = plan_of(FOUR, device_spec("d", 10**9, host_visible=False))
    assert plan.slot_nbytes == 4 * 64
    assert plan.device("d").scratch_nbytes == 2 * 2 * 4 * 64


def test_chunks_and_threads_shrink_until_it_fits() -> None:
    """Tight budgets mean smaller chunks, then fewer threads, then 64 KiB, then refusal."""
    weights = 4 * 16 * MIB
    seen = []
    for room in (64 * MIB, 8 * MIB, 4 * MIB, 2 * MIB, 128 * 2**10):
        spec = device_spec("d", weights + room, host_visible=False, threads=16)
        plan = plan_of(BIG, spec, threads=2)
        assert plan.device("d").peak_nbytes <= weights + room
        seen.append((plan.chunk_nbytes, plan.threads))
    assert seen == [(8 * MIB, 2), (2 * MIB, 2), (MIB, 2), (MIB, 1), (64 * 2**10, 1)]
    with pytest.raises(PlanInfeasibleError):
        plan_of(BIG, device_spec("d", weights + 128 * 2**10 - 1, host_visible=False))


def test_staging_shrinks_to_what_is_free_too() -> None:
    weights = 4 * 16 * MIB
    spec = device_spec("d", 10**9, free_nbytes=weights + 4 * MIB, host_visible=False)
    plan = plan_of(BIG, spec)
    assert plan.device("d").fresh_nbytes <= weights + 4 * MIB


def test_the_host_budget_bounds_staging() -> None:
    """Staging that no device covers stays within the host's budget, or is refused with both."""
    spec = device_spec("d", 10**9, host_visible=False, shared_memory=False)
    plan = plan_of(BIG, spec, host_budget_nbytes=3 * MIB)
    assert plan.host_nbytes <= 3 * MIB
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(BIG, spec, host_budget_nbytes=100_000)
    error = caught.value
    assert (error.device, error.needed_nbytes, error.budget_nbytes) == ("staging", 131072, 100_000)
    assert plan_of(BIG, spec, host_budget_nbytes=131072)


GPU = device_spec("cuda:0", 10**9, host_visible=False, shared_memory=False, threads=16)


@pytest.mark.parametrize("host_mib", [8, 12, 64, 100])
@pytest.mark.parametrize("reader", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
def test_slots_share_the_host_budget(host_mib: int, reader: str, dtype: str) -> None:
    many = checkpoint_of({f"w{i}": ("BF16", [64 * MIB]) for i in range(4)})
    plan = plan_of(
        many,
        GPU,
        dtype=dtype,
        readers=[reader],
        threads=12,
        chunk_nbytes=64 * MIB,
        host_budget_nbytes=host_mib * MIB,
    )
    assert 0.7 * host_mib * MIB < plan.host_nbytes <= host_mib * MIB
    assert plan.chunk_nbytes >= MIB
    room = plan.staging_nbytes - plan.slot_nbytes
    assert room == (2 * 4096 if reader == "direct" else 0)
    assert plan.threads * 2 * plan.staging_nbytes <= plan.host_nbytes


def test_room_for_direct_reads_is_there_where_any_shard_has_them() -> None:
    """Slots are all alike: one shard that is read past the page cache gives room to all."""
    two = checkpoint_of({"a": ("BF16", [8 * MIB])}, {"b": ("BF16", [8 * MIB])})
    mixed = plan_of(two, GPU, readers=["mmap", "direct"])
    assert mixed.staging_nbytes == mixed.slot_nbytes + 8192
    assert mixed.host_nbytes == 2 * 2 * mixed.staging_nbytes + 2 * MIB  # and each thread's own
    plain = plan_of(two, GPU, readers=["mmap", "pread"])
    assert plain.staging_nbytes == plain.slot_nbytes
    assert Plan.from_json(mixed.to_json()).staging_nbytes == mixed.staging_nbytes


def test_how_shards_are_read_is_said_in_few_lines() -> None:
    shards = [{f"w{i}": ("BF16", [8])} for i in range(100)]
    plan = plan_of(
        checkpoint_of(*shards),
        device_spec("d", 10**6),
        readers=["mmap"] * 99 + ["pread"],
        reader_reasons=["in the page cache"] * 99 + ["nfs is read through the page cache"],
    )
    lines = [line for line in str(plan).splitlines() if line.startswith("read by")]
    assert lines == [
        "read by mmap: 99 files (in the page cache)",
        "read by pread: 1 file (nfs is read through the page cache)",
    ]
    assert Plan.from_json(plan.to_json()) == plan
    assert replace(plan, readers=("mmap",) * 100, reader_reasons=()).digest == plan.digest


# --- casts on the device --------------------------------------------------------------------------

CASTS = replace(GPU, casts=True)


@pytest.mark.parametrize("out_of_range", ["inf", "clamp", "error"])
@pytest.mark.parametrize("fp16_cast", [None, "device"])
def test_a_device_that_casts_casts(out_of_range: Any, fp16_cast: Any) -> None:
    """Exactly and counted, whatever becomes of what is out of range; there is nothing to note."""
    plan = plan_of(
        checkpoint_of({"w": ("BF16", [4]), "x": ("F32", [4]), "i": ("I8", [4])}),
        CASTS,
        dtype="float16",
        fp16_cast=fp16_cast,
        out_of_range=out_of_range,
    )
    assert {p.name: p.cast for p in plan.placements} == {"w": "device", "x": "device", "i": "copy"}
    assert plan.notes == ()


def test_what_functions_change_is_no_cast_of_a_device() -> None:
    casts = frozenset({("bfloat16", "float16")})
    plan = plan_of(
        checkpoint_of({"w": ("BF16", [4])}),
        device_spec("d", 10**9, device_casts=casts),
        dtype="float16",
        cast="device",
        changed={"w"},
    )
    assert [p.cast for p in plan.placements] == ["rows"]
    assert plan.notes == ()


def test_fp16_by_the_host_is_kept_where_it_was_asked_for() -> None:
    """`SUPPORT_BF16=0` means the host's cast, of that pair alone."""
    plan = plan_of(
        checkpoint_of({"w": ("BF16", [4]), "x": ("F32", [4])}),
        CASTS,
        dtype={"w": "float16", "x": "float16"},
        fp16_cast="llvm",
    )
    assert {p.name: p.cast for p in plan.placements} == {"w": "llvm", "x": "device"}


@pytest.mark.parametrize(
    ("tensors", "dtype", "slots", "tallies"),
    [
        ({"a": "BF16", "b": "BF16"}, "float16", False, 2),  # in place, two bytes to two
        ({"a": "BF16", "b": "F16"}, "float16", False, 1),
        ({"a": "BF16", "b": "F32"}, "float16", True, 2),
        ({"a": "F8_E4M3", "b": "I8"}, "float16", True, 1),
        ({"a": "BF16", "b": "I8"}, "checkpoint", False, 0),
    ],
)
def test_scratch_of_casts_on_the_device(
    tensors: dict[str, str], dtype: str, slots: bool, tallies: int
) -> None:
    """A tally for each, and a slot's worth for each slot where elements change their size."""
    checkpoint = checkpoint_of({name: (code, [16 * MIB]) for name, code in tensors.items()})
    plan = plan_of(checkpoint, CASTS, dtype=dtype, threads=3)
    needed = 24 * tallies + (3 * 2 * plan.slot_nbytes if slots else 0)
    d = plan.device("cuda:0")
    assert d.scratch_nbytes == -(-needed // (2 * MIB)) * 2 * MIB
    assert d.peak_nbytes == d.resident_nbytes + d.scratch_nbytes
    assert plan.threads == 3  # kernels are launched by who reads
    for chunk in chunks(plan, checkpoint):
        assert chunk.read_nbytes <= plan.slot_nbytes
        assert chunk.staged_nbytes(plan.placements[chunk.placement]) <= plan.slot_nbytes


def test_weights_and_scratch_are_all_that_a_device_needs() -> None:
    """That much is enough, down to one slot in one thread; one MiB less is refused beforehand."""
    checkpoint = checkpoint_of({"a": ("F32", [16 * MIB]), "b": ("BF16", [16 * MIB])})
    weights = 2 * 32 * MIB
    exact = plan_of(checkpoint, replace(CASTS, budget_nbytes=weights + 2 * MIB), dtype="float16")
    assert exact.device("cuda:0").peak_nbytes == weights + 2 * MIB
    roomy = plan_of(checkpoint, CASTS, dtype="float16").device("cuda:0").peak_nbytes
    assert plan_of(checkpoint, replace(CASTS, budget_nbytes=roomy), dtype="float16")
    with pytest.raises(PlanInfeasibleError):
        plan_of(checkpoint, replace(CASTS, budget_nbytes=weights + MIB), dtype="float16")


def test_no_transfer_above_the_largest() -> None:
    specs = [device_spec("d", 10**9, max_transfer_nbytes=300_000), device_spec("e", 10**9)]
    assert plan_of(BIG, *specs).chunk_nbytes == 300_000


def test_threads_are_what_all_devices_take() -> None:
    assert plan_of(FOUR, device_spec("d", 64, threads=16), threads=3).threads == 3
    assert plan_of(FOUR, device_spec("d", 64, threads=0), threads=3).threads == 0


# --- refusals -------------------------------------------------------------------------------------


def test_an_infeasible_plan_says_what_would_fit() -> None:
    layers = {f"model.layers.{i}.w": ("F32", [1000_000]) for i in range(8)}
    checkpoint = checkpoint_of(
        {EMBED: ("F32", [500_000]), **layers, "model.norm.weight": ("F32", [1])}
    )
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(checkpoint, device_spec("CL", 18_000_000))
    error = caught.value
    assert (error.device, error.limit) == ("CL", "budget")
    assert (error.needed_nbytes, error.budget_nbytes) == (34_000_004, 18_000_000)
    assert error.largest[0] == ("model.layers.0.w", 4_000_000)
    assert len(error.largest) == 8
    assert error.would_fit == ('dtype="float16" (17.07 MB)', "2 devices or nodes of 18.00 MB")
    for told in ("CL", "34000004", "18000000", "model.layers.0.w", 'dtype="float16"', "2 devices"):
        assert told in str(error)
    assert plan_of(checkpoint, device_spec("CL", 18_000_000), dtype="float16")
    assert plan_of(checkpoint, device_spec("a", 18_000_000), device_spec("b", 18_000_000))


def test_what_would_not_fit_either_is_not_suggested() -> None:
    """No smaller dtype where there is none, no more devices where one layer alone is too large."""
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(checkpoint_of({"w": ("F16", [1000])}), device_spec("d", 1999))
    assert caught.value.would_fit == ()


def test_more_nodes_than_there_are_is_the_suggestion() -> None:
    checkpoint = checkpoint_of({f"layers.{i}.w": ("F16", [500]) for i in range(12)})
    specs = [device_spec(f"n{i}", 3000) for i in range(3)]
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(checkpoint, *specs)
    assert caught.value.would_fit == ("4 devices or nodes of 3.00 kB",)
    assert plan_of(checkpoint, *specs, device_spec("n3", 3000))


def test_a_budget_above_what_is_free() -> None:
    """A stated budget that is not there is refused by what is free, and what is held helps."""
    spec = device_spec("d", 1000, free_nbytes=60)
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(FOUR, spec)
    error = caught.value
    assert (error.needed_nbytes, error.budget_nbytes, error.limit) == (64, 60, "free memory")
    wants = [held("a", 16), *(w for w in wants_of(FOUR) if w.name != "a")]
    assert plan_of(FOUR, spec, wants=wants).device("d").fresh_nbytes == 48


def test_devices_that_share_memory_share_what_is_free() -> None:
    checkpoint = checkpoint_of({f"layers.{i}.w": ("F32", [25]) for i in range(8)})
    specs = [device_spec(n, 600, free_nbytes=700, host_free_nbytes=700) for n in ("CPU", "CPU:1")]
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(checkpoint, *specs)
    error = caught.value
    assert (error.device, error.needed_nbytes, error.budget_nbytes) == ("CPU, CPU:1", 800, 700)
    assert plan_of(checkpoint, *(replace(s, host_free_nbytes=800) for s in specs))
    assert plan_of(
        checkpoint, *(replace(s, info=replace(s.info, shared_memory=False)) for s in specs)
    )


def test_a_tensor_above_the_largest_allocation() -> None:
    """Refused with both numbers, even where the budget is large."""
    spec = device_spec("CL", 10**9, largest_allocation_nbytes=15)
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_of(FOUR, spec)
    error = caught.value
    assert (error.needed_nbytes, error.budget_nbytes) == (16, 15)
    assert (error.limit, error.largest) == ("largest allocation", (("a", 16),))
    assert plan_of(FOUR, device_spec("CL", 10**9, largest_allocation_nbytes=16))


# --- random plans ---------------------------------------------------------------------------------


def recount(plan: Plan, spec: DeviceSpec) -> tuple[int, int]:
    """(peak, fresh peak) of a device by playing the plan through, staging by its definition."""
    mine = [p for p in plan.placements if p.device == spec.name]

    def taken(nbytes: int) -> int:
        whole, rest = divmod(nbytes, spec.info.granularity_nbytes)
        return (whole + bool(rest)) * spec.info.granularity_nbytes

    old = {p.name: p.released_nbytes for p in mine if p.action == "replace"}
    untrimmed = min(sum(old.values()), 4 * MIB) if spec.info.shared_memory else 0
    new = {p.name: taken(p.dst.bits * math.prod(p.shape) // 8) for p in mine}
    now = sum(old.values()) + sum(new[p.name] for p in mine if p.action == "in_place")
    begun = now
    peak = now
    if plan.device(spec.name).release_first:
        now -= sum(old.values())
        old, peak = {}, now
    for p in mine:
        if p.action == "in_place":
            continue
        now -= old.pop(p.name, 0)
        now += new[p.name]
        peak = max(peak, now)
    host = recount_host(plan, mine, spec) if mine else 0
    scratch = host if spec.info.shared_memory else 0
    there = [p for p in mine if p.cast == "device"]
    if there and spec.casts:
        resized = any(p.src.bits != p.dst.bits for p in there)
        slots = max(plan.threads, 1) * 2 * plan.slot_nbytes * resized
        scratch += -(-(slots + 24 * len(there)) // (2 * MIB)) * 2 * MIB
    elif there:
        scratch += 2 * plan.slot_nbytes
    if spec.info.shared_memory and not scratch and {p.cast for p in mine} & {"llvm", "numpy"}:
        large = sum(p.nbytes for p in plan.placements) >= 16 * MIB
        scratch = 65536 if large else 0
    return peak + scratch, max(peak - begun, 0) + untrimmed + scratch


def recount_host(plan: Plan, mine: list[Move], spec: DeviceSpec) -> int:
    """Host memory of a plan for one device: slots or windows, and each worker's own."""
    workers = max(plan.threads, 1)
    casts = {p.cast for p in mine}
    on_host = bool(casts & {"llvm", "numpy"})
    room = 2 * 4096 * ("direct" in plan.readers)
    slots = 0
    if not spec.info.host_visible or "device" in casts:
        slots = 2
    total = workers * slots * (plan.slot_nbytes + room)
    if {"pread", "direct"} & set(plan.readers) and on_host:
        total += workers * plan.slot_nbytes
    if "direct" in plan.readers:
        total += workers * MIB
    return total + workers * 4 * MIB * ("numpy" in casts)


def random_case(rng: random.Random) -> tuple[Checkpoint, list[DeviceSpec], dict[str, Any]]:
    codes = ("BF16", "F32", "F16", "I64", "BOOL", "F8_E4M3", "F64")
    shards: list[dict[str, tuple[str, list[int]]]] = [{} for _ in range(rng.randint(1, 3))]
    for i in range(rng.randint(0, 12)):
        shape = [rng.choice((0, 1, 3, 17, 256, 5000)) for _ in range(rng.randint(0, 2))]
        rng.choice(shards)[f"layers.{i % 4}.w{i}"] = (rng.choice(codes), shape)
    checkpoint = checkpoint_of(*shards)
    total = checkpoint.nbytes
    spec = device_spec(
        "d",
        max(1, int(total * rng.uniform(0.3, 3)) + rng.choice((0, 10**4, 10**6, 10**8))),
        free_nbytes=rng.choice((None, total, 4 * total + 10**8)),
        host_visible=rng.random() < 0.5,
        shared_memory=rng.random() < 0.7,
        granularity_nbytes=rng.choice((1, 16, 4096)),
        max_transfer_nbytes=rng.choice((None, None, 100_000)),
        threads=rng.choice((0, 1, 16)),
        native_bf16=rng.random() < 0.3,
        device_casts=frozenset({("bfloat16", "float16")}),
    )
    spec = replace(spec, casts=rng.random() < 0.3 and not spec.info.host_visible)
    reader = rng.choice(("mmap", "pread", "direct"))
    wants = []
    for want in wants_of(checkpoint):
        if rng.random() < 0.4:
            old = rng.choice(("float32", "float16", "int8"))
            nbytes = BY_NAME[old].nbytes(math.prod(want.shape))
            want = want._replace(held=(rng.choice(("d", "other")), old, nbytes))
        wants.append(want)
    return (
        checkpoint,
        [spec],
        {
            "wants": wants,
            "dtype": rng.choice((None, "checkpoint", "float16", "float32")),
            "cast": rng.choice(("llvm", "numpy", "device")),
            "readers": [reader] * len(checkpoint.shards),
            "chunk_nbytes": rng.choice((1, 5000, MIB, 8 * MIB)),
            "threads": rng.randint(1, 8),
        },
    )


def test_a_thousand_random_plans() -> None:
    made = refused = 0
    for seed in range(1000):
        checkpoint, (spec,), arguments = random_case(random.Random(seed))
        try:
            plan = plan_of(checkpoint, spec, **arguments)
        except PlanInfeasibleError as error:
            assert error.needed_nbytes > error.budget_nbytes
            assert error.device in ("d", "staging")
            refused += 1
            continue
        peak, fresh = recount(plan, spec)
        d = plan.device("d")
        assert (d.peak_nbytes, d.fresh_nbytes) == (peak, fresh), seed
        assert peak <= spec.budget_nbytes
        assert spec.free_nbytes is None or fresh <= spec.free_nbytes
        assert plan.host_nbytes <= plan.host_budget_nbytes
        if not spec.info.shared_memory:
            host = recount_host(plan, list(plan.placements), spec) if plan.placements else 0
            assert plan.host_nbytes == host, seed
        assert sorted(p.name for p in plan.placements) == sorted(checkpoint.tensors)
        assert plan == plan_of(checkpoint, spec, **arguments) == Plan.from_json(plan.to_json())
        made += 1
    assert made > 300
    assert refused > 100


def test_bad_numbers_are_refused() -> None:
    for arguments in ({"chunk_nbytes": 0}, {"chunk_nbytes": -1}, {"threads": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            streamload.plan(FOUR, budget=100, dtype="checkpoint", reader="mmap", **arguments)  # type: ignore[arg-type]


# --- splits ---------------------------------------------------------------------------------------


def test_llama_3_8b_over_14_nodes(tmp_path: Path) -> None:
    """In bf16 the fullest of 14 nodes of 3 GB holds at most 1.31 GB; 6 are enough, 5 are not."""
    path = sparse_llama(tmp_path / "model.safetensors")

    def split(count: int) -> Plan:
        nodes = [streamload.Node(f"n{i}", "3GB") for i in range(count)]
        return streamload.split(path, nodes=nodes, dtype="checkpoint")

    made = split(14)
    assert max(d.resident_nbytes for d in made.devices) <= 1_310_000_000
    assert made.resident_nbytes == streamload.open_checkpoint(path).nbytes
    assert [d.embedding for d in made.devices] == [True] + [False] * 13
    assert [d.head for d in made.devices] == [False] * 13 + [True]
    layers = [layer for d in made.devices for layer in range(*(d.layers or (0, 0)))]
    assert layers == list(range(32))
    assert all(d.peak_nbytes <= 3 * 10**9 for d in split(6).devices)
    with pytest.raises(PlanInfeasibleError) as caught:
        split(5)
    nodes, quant = caught.value.would_fit
    assert nodes == "6 devices or nodes of 3.00 GB"
    assert quant.startswith('quant="q8_0" (n0 1.98 GB, n1 1.86 GB, ')


def test_unequal_devices_take_their_share() -> None:
    checkpoint = checkpoint_of({f"layers.{i}.w": ("F32", [250]) for i in range(9)})
    plan = plan_of(checkpoint, device_spec("a", 4000), device_spec("b", 8000))
    assert [plan.device(n).resident_nbytes for n in "ab"] == [3000, 6000]
    assert [plan.device(n).layers for n in "ab"] == [(0, 3), (3, 9)]


@pytest.mark.parametrize("apart", [True, False])
def test_a_tied_head_away_from_its_embedding_is_a_copy(apart: bool) -> None:
    """On another device the head is a tensor of its own, under its own name; otherwise none is."""
    checkpoint = checkpoint_of(
        {EMBED: ("F32", [100])} | {f"model.layers.{i}.w": ("F32", [100]) for i in range(4)}
    )
    specs = [device_spec("a", 2500), device_spec("b", 2500)][: 1 + apart]
    plan = plan_of(checkpoint, *specs, tied={HEAD: EMBED})
    heads = [p for p in plan.placements if p.name == HEAD]
    assert [(p.device, p.source) for p in heads] == [("b", (RowRange(EMBED, 0, 100),))] * apart
    assert plan.resident_nbytes == 400 * (5 + apart)


def test_parameters_that_have_a_place_stay_there() -> None:
    checkpoint = checkpoint_of({f"layers.{i}.w": ("F32", [100]) for i in range(4)})
    wants = [w._replace(device="b") if i < 2 else w for i, w in enumerate(wants_of(checkpoint))]
    plan = plan_of(checkpoint, device_spec("a", 900), device_spec("b", 1300), wants=wants)
    where = {p.name: p.device for p in plan.placements}
    assert (where["layers.0.w"], where["layers.1.w"]) == ("b", "b")
    assert where["layers.2.w"] == "a"
    assert [plan.device(n).resident_nbytes for n in "ab"] == [400, 1200]


# --- dtypes ---------------------------------------------------------------------------------------

KINDS = checkpoint_of(
    {
        "model.norm.weight": ("BF16", [4]),
        "model.w": ("BF16", [4]),
        "model.f32": ("F32", [4]),
        "model.ids": ("I64", [4]),
        "model.mask": ("BOOL", [4]),
    }
)


@pytest.mark.parametrize(
    ("dtype", "native", "fp16_cast", "expected"),
    [
        (None, False, None, "float16 float16 float32 int64 bool"),
        (None, True, None, "bfloat16 bfloat16 float32 int64 bool"),
        (None, True, "llvm", "float16 float16 float32 int64 bool"),
        (None, True, "device", "float16 float16 float32 int64 bool"),
        ("checkpoint", False, None, "bfloat16 bfloat16 float32 int64 bool"),
        ("checkpoint", False, "llvm", "bfloat16 bfloat16 float32 int64 bool"),
        ("float16", True, None, "float16 float16 float16 int64 bool"),
        (BF16, False, None, "bfloat16 bfloat16 bfloat16 int64 bool"),
        ({"*norm*": "float32", "*": "float16"}, False, None, "float32 float16 float16 int64 bool"),
        ({"*": "float16", "*norm*": "float32"}, False, None, "float16 float16 float16 int64 bool"),
        (
            {"*.f32": "float64", "*norm*": "checkpoint"},
            False,
            None,
            "bfloat16 float16 float64 int64 bool",
        ),
    ],
)
def test_dtype_policy(dtype: Any, native: bool, fp16_cast: Any, expected: str) -> None:
    """Names, patterns (the first that matches decides), "checkpoint", and what None means."""
    policy = DTypePolicy.parse(dtype, fp16_cast)
    found = [policy.resolve(i.name, i.dtype, native).name for i in KINDS.tensors.values()]
    assert found == expected.split()


@pytest.mark.parametrize("dtype", ["int8", "floaty", {"*": "bool"}, {"*": 3}, {3: "float16"}, 3.5])
def test_dtypes_that_nothing_is_cast_to(dtype: Any) -> None:
    """A dtype of integers, one that is none, and patterns that are no strings are ValueErrors."""
    with pytest.raises(ValueError):
        DTypePolicy.parse(dtype)


@pytest.mark.parametrize(
    ("cast", "fp16_cast", "exact", "out_of_range", "expected"),
    [
        ("llvm", None, True, "inf", "llvm"),
        ("numpy", None, True, "inf", "numpy"),
        ("device", None, True, "inf", "device"),
        ("device", None, False, "inf", "llvm"),
        ("device", None, True, "clamp", "llvm"),
        ("device", None, True, "error", "llvm"),
        ("llvm", "device", True, "inf", "device"),
        ("llvm", "device", False, "inf", "llvm"),
        ("numpy", "device", False, "inf", "numpy"),
        ("llvm", "llvm", True, "inf", "llvm"),
        ("numpy", "llvm", True, "inf", "numpy"),
    ],
)
def test_who_casts(
    cast: Any, fp16_cast: Any, exact: bool, out_of_range: Any, expected: str
) -> None:
    """The device where it was asked for and is exact; a note says where it is not."""
    exactly = frozenset({("bfloat16", "float16")} if exact else ())
    plan = plan_of(
        checkpoint_of({"w": ("BF16", [4]), "i": ("I8", [4])}),
        device_spec("d", 10**9, device_casts=exactly),
        dtype=None,
        cast=cast,
        fp16_cast=fp16_cast,
        out_of_range=out_of_range,
    )
    assert {p.name: p.cast for p in plan.placements} == {"w": expected, "i": "copy"}
    asked = "device" in (cast, fp16_cast)
    assert bool(plan.notes) == asked
    assert any("not counted" in note for note in plan.notes) == (expected == "device")


def test_a_cast_without_its_scale_is_refused() -> None:
    """A float8 tensor with a scale beside it keeps its dtype, or is refused by name."""
    quantised = checkpoint_of({"w": ("F8_E4M3", [4, 4]), "w_scale_inv": ("F32", [1, 1])})
    with pytest.raises(UnsupportedCastError, match="w_scale_inv") as caught:
        plan_of(quantised, device_spec("d", 1000), dtype="float16")
    assert (caught.value.tensor, caught.value.src) == ("w", "float8_e4m3fn")
    assert plan_of(quantised, device_spec("d", 1000), dtype=None).placements[0].cast == "copy"
    only_rest = {"w": "checkpoint", "*": "float16"}
    assert plan_of(quantised, device_spec("d", 1000), dtype=only_rest)
    bare = checkpoint_of({"w": ("F8_E4M3", [4, 4])})
    assert plan_of(bare, device_spec("d", 1000), dtype="float16").placements[0].dst is F16


def test_every_part_of_a_parameter_is_asked_for_its_scale() -> None:
    """Where rows are put together, the scale of the second tensor counts like the first one's."""
    checkpoint = checkpoint_of(
        {"a": ("F8_E4M3", [2]), "b": ("F8_E4M3", [2]), "b_scale": ("F32", [1])}
    )
    want = TensorRequest("ab", (4,), (RowRange("a", 0, 2), RowRange("b", 0, 2)))
    with pytest.raises(UnsupportedCastError) as caught:
        plan_of(checkpoint, device_spec("d", 1000), wants=[want], dtype="float16")
    assert caught.value.tensor == "b"


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "C64"])
def test_what_a_device_cannot_hold_is_refused_by_name(code: str) -> None:
    checkpoint = checkpoint_of({"fine": ("F32", [4]), "odd": (code, [8])})
    spec = device_spec("CL", 1000, unsupported=frozenset({BY_CODE[code].name}))
    with pytest.raises(UnsupportedCastError) as caught:
        plan_of(checkpoint, spec)
    error = caught.value
    assert (error.tensor, error.dst) == ("odd", BY_CODE[code].name)
    assert "CL" in error.reason
    assert error.path == "shard-0.safetensors"


@pytest.mark.parametrize("dst", ["float8_e4m3fn", "float4_e2m1fn"])
def test_nothing_narrows_to_less_than_two_bytes(dst: str) -> None:
    with pytest.raises(UnsupportedCastError) as caught:
        plan_of(checkpoint_of({"w": ("F32", [4])}), device_spec("d", 1000), dtype=dst)
    assert (caught.value.tensor, caught.value.src, caught.value.dst) == ("w", "float32", dst)


def test_a_dtype_that_is_asked_for_is_had() -> None:
    checkpoint = checkpoint_of({"w": ("BF16", [4])})
    wanted: DType = F32
    plan = plan_of(checkpoint, device_spec("d", 99), wants=wants_of(checkpoint, dtype=wanted))
    assert plan.placements[0].dst is F32


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 300])
def test_a_hundred_thousand_tensors(nodes: int) -> None:
    tensors = {f"layers.{i // 100}.experts.{i % 100}.w": ("BF16", [8, 8]) for i in range(100_000)}
    specs = [device_spec(f"n{i}", 100_000_000 // nodes) for i in range(nodes)]
    plan = plan_of(checkpoint_of(tensors), *specs, dtype="float16")
    assert len({p.name for p in plan.placements}) == 100_000
    assert plan.resident_nbytes == 100_000 * 128


def _cuda(budget_nbytes: int) -> DeviceSpec:
    return device_spec(
        "cuda:0",
        budget_nbytes,
        host_visible=False,
        shared_memory=False,
        granularity_nbytes=512,
        allocator="cuda_caching",
    )


def test_what_stays_in_place_keeps_its_segments() -> None:
    """Beside it, nothing that is released counts as given back; where that does not fit, all go."""
    mib = 2**20
    shapes = {
        f"{k}{i}": ("F16" if k == "a" else "F32", (4 * mib,)) for i in range(10) for k in "ab"
    }
    checkpoint = checkpoint_of(shapes)
    wants = [want._replace(held=("cuda:0", "float16", 8 * mib)) for want in wants_of(checkpoint)]
    roomy = plan_of(checkpoint, _cuda(1000 * mib), wants=wants)
    assert {p.action for p in roomy.placements} == {"in_place", "replace"}
    # ten segments of 20 MiB with one of each in them, and ten blocks of 16 MiB
    assert roomy.devices[0].peak_nbytes == 360 * mib
    tight = plan_of(checkpoint, _cuda(300 * mib), wants=wants)
    assert {p.action for p in tight.placements} == {"replace"}
    assert tight.devices[0].peak_nbytes == 260 * mib
    assert "cuda:0: all parameters are replaced" in tight.notes[0]


def test_a_suggested_dtype_fits_by_the_allocators_rules() -> None:
    """What six blocks of 8 MiB take is 60 MiB: float16 is not suggested for 50."""
    mib = 2**20
    checkpoint = checkpoint_of({f"t{i}": ("F32", (4 * mib,)) for i in range(6)})
    for budget_nbytes, suggested in ((50 * mib, False), (60 * mib, True)):
        with pytest.raises(PlanInfeasibleError) as caught:
            plan_of(checkpoint, _cuda(budget_nbytes))
        assert any("float16" in s for s in caught.value.would_fit) == suggested
