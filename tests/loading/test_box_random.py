"""Random loads in memory cgroups of about the size that they need: right, refused or stopped.

A case loads twice, each time in a process and a cgroup of its own: with room for all, which
measures the need, and in a box drawn from that. The model exists before the box gets its limit.

A load is measured twice: by its own report (RssAnon + RssShmem), and by the anonymous and shared
memory of the cgroup, read from outside every millisecond.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from bench_parts.boxed_section import FAILURES
from bench_parts.section import FILES, read_all
from box_load import STATES, run_boxed, tensors_of, wrong
from boxes import Boxes
from make_checkpoint import ManyTensors, make_checkpoint, shape_of_size

from streamload.core.dtypes import DType, parse_dtype

MB = 10**6
SEED, MOST_MEGABYTES = 439, 20
DTYPES = ("bfloat16", "float16", "float32")

Case = dict[str, Any]


def draw(seed: int, number: int, most: int) -> Case:
    """Draw a case of at most ``most`` megabytes: the same for the same arguments."""
    rng = random.Random(f"{seed}/{number}")
    device = rng.choice(tuple(STATES))
    src, dtype = rng.choice(DTYPES), rng.choice(("checkpoint", *DTYPES))
    wanted = src if dtype == "checkpoint" else dtype
    chunk = rng.choice((None, None, None, 1000, 2**16, 2**26))
    shape = rng.choice(("giant", "tiny", "small", "llama", "llama", "gpt2"))
    kind, state = rng.choice(("dict", "object")), rng.choice(STATES[device])
    held = wanted if rng.random() < 0.7 else rng.choice(DTYPES)
    if (device, state) == ("host", "mapped"):
        held = wanted  # numpy's views of a map are not replaced: they are refused
    sizes = {"tiny": (18,), "small": (50, 100)}.get(shape, (20, 50, 100, 200, 400))
    most = min(most, 50) if chunk == 1000 else most  # each takes tens of microseconds
    return {
        **{"device": device, "kind": kind, "state": state, "src": src, "held": held},
        **{"shape": shape, "megabytes": rng.choice([n for n in sizes if n <= most] or [most])},
        "options": {
            "reader": rng.choice(("auto", "auto", "mmap", "pread", "direct")),
            "threads": rng.choice((None, None, 1, 2, 8)),
            "chunk_nbytes": chunk,
            "page_cache": rng.choice(("auto", "auto", "keep", "drop")),
            "dtype": dtype,
        },
        "cached": rng.random() < 0.6,
        "budget": rng.choice(("stated", "80%", None)),
        # of the prediction, and of the bytes taken with room
        "budget_factor": rng.choice((1.0, rng.uniform(0.8, 1.05))),
        "box_factor": rng.uniform(0.8, 1.05),
        "slack_nbytes": rng.choice((0, rng.randrange(64 * MB), rng.randrange(32 * MB, 48 * MB))),
        # whether the reserve of a budget that is not stated is added
        "roomy": rng.random() < 0.5,
    }


@dataclass(frozen=True, slots=True)
class Named:
    named: Mapping[str, tuple[int, ...]]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        return dict(self.named)

    def config(self, dtype: DType) -> dict[str, Any]:
        return {"torch_dtype": dtype.name}


def shapes(name: str, numel: int) -> Named | ManyTensors:
    if name == "giant":
        return Named({"model.weight": (numel // 1024, 1024)})
    if name in ("tiny", "small"):
        count = 20_000 if name == "tiny" else numel // 17_000
        return ManyTensors(count, numel // count)
    dim = math.isqrt(numel // 200) // 16 * 16  # of 200 parts 144 are in the layers
    columns = {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4}
    layer = {part: (dim, n * dim) for part, n in columns.items()} | {"mlp.c_proj": (4 * dim, dim)}
    named: dict[str, tuple[int, ...]] = {"wte.weight": (56 * dim, dim), "wpe.weight": (1024, dim)}
    for i, (part, shape) in itertools.product(range(12), layer.items()):
        named |= {f"h.{i}.{part}.weight": shape, f"h.{i}.{part}.bias": shape[-1:]}
    return Named(named)


def made(folder: Path, case: Case, dtype: str, seed: int) -> Path:
    out, src = folder / f"{dtype}-{seed}", parse_dtype(case["src"])
    if not out.exists():
        nbytes, llama = case["megabytes"] * MB, case["shape"] == "llama"
        shape = (
            shape_of_size(nbytes, src) if llama else shapes(case["shape"], nbytes // src.itemsize)
        )
        make_checkpoint(out, shape, dtype=dtype, seed=seed, shards=3 if llama else 1)
    return out


def test_a_draw_is_the_same_again() -> None:
    """Number and seed determine a case; many cases have every state of every device."""
    cases = [draw(0, number, 400) for number in range(300)]
    assert draw(0, 137, 400) == cases[137] != draw(1, 137, 400)
    drawn = {(case["device"], case["state"]) for case in cases}
    assert drawn == {(device, state) for device in STATES for state in STATES[device]}


@pytest.mark.parametrize(
    "number", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, *range(2, 40)))]
)
def test_a_random_load_ends_well(cgroup: Boxes, tmp_path: Path, number: int) -> None:
    """It takes no more than predicted; in its box it loads right, is refused or is stopped."""
    case = draw(SEED, number, MOST_MEGABYTES)
    if case["device"] == "torch":
        needs.module("torch")
    elif case["device"] != "host":
        needs.device(case["device"])
    path = made(tmp_path, case, case["src"], 0)
    donor = made(tmp_path, case, case["held"], 1) if case["state"] == "mapped" else path
    job = case | {"path": str(path), "shapes": str(donor)}
    read_all(path)
    ran = room = run_boxed(cgroup, job)
    if room["outcome"] == "loaded":
        budget = case["budget"]
        if budget == "stated":
            budget = str(int(room["said"]["device_nbytes"] * case["budget_factor"]) or 1)
        job["options"] = case["options"] | {"budget": budget}
        FILES["cached" if case["cached"] else "not cached"](path)
        reserve = {None: 0.1, "80%": 0.2}.get(case["budget"], 0) if case["roomy"] else 0
        needed_nbytes = room["charged_nbytes"] / (1 - reserve)
        more_nbytes = int(needed_nbytes * case["box_factor"]) + case["slack_nbytes"]
        ran = run_boxed(cgroup, job, lambda charged: charged + more_nbytes)
    for one in (room, ran):
        assert one["outcome"] not in FAILURES, (case, one)
        if one["outcome"] == "loaded":
            assert one["said"]["reported_nbytes"] <= one["said"]["predicted_nbytes"], (case, one)


# --- the box itself -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("random") / "checkpoint"
    make_checkpoint(out, ManyTensors(3, 1000))
    return out


def plain(path: Path) -> Case:
    """A load to the host."""
    options = {"options": {"dtype": "checkpoint"}, "kind": "dict", "held": "bfloat16"}
    return {"path": str(path), "device": "host", "state": "none", **options}


def test_a_load_that_ends_well_is_measured(cgroup: Boxes, checkpoint: Path) -> None:
    found = run_boxed(cgroup, plain(checkpoint))
    assert (found["outcome"], found["why"]) == ("loaded", "")
    assert found["said"]["predicted_nbytes"] >= 6000
    assert 0 <= found["taken_nbytes"] <= found["charged_nbytes"] + 2**20


def test_a_process_that_is_killed_is_noticed(cgroup: Boxes, checkpoint: Path) -> None:
    psutil = needs.module("psutil")

    def limit(charged: int) -> int:
        children = psutil.Process().children()
        (child,) = (c for c in children if any("box_load" in word for word in c.cmdline()))
        child.kill()
        return charged + 2**30

    assert run_boxed(cgroup, plain(checkpoint), limit)["outcome"] == "killed"


def test_a_process_that_fails_is_noticed(cgroup: Boxes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]")  # no header
    found = run_boxed(cgroup, plain(tmp_path))
    assert found["outcome"] == "other"
    assert "TypeError" in found["why"]


def test_a_wrong_byte_is_noticed(checkpoint: Path) -> None:
    raws = tensors_of(checkpoint)
    tensors = {
        n: np.fromfile(raw.file, np.uint8, 2000, offset=raw.start) for n, raw in raws.items()
    }
    assert list(wrong("host", "checkpoint", tensors, raws)) == []
    name = next(reversed(raws))
    tensors[name][-1] ^= 1
    assert list(wrong("host", "checkpoint", tensors, raws)) == [f"{name}: from element 0 on"]
