"""Readers, page cache and transfer on a real GPU. Skipped on machines without one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from bench_parts.section import forget, read_all
from safetensors_files import write_safetensors

import streamload
from streamload import Budget
from streamload.checkpoint.open import open_checkpoint
from streamload.core.system import filesystem_and_length
from streamload.errors import PlanInfeasibleError
from streamload.files.folder import DIRECT_FILESYSTEMS
from streamload.files.page_cache import resident_fraction
from streamload.loading.report import LoadReport
from streamload.planning.plan import Plan
from streamload.verification.verify import verify

torch = needs.module("torch")
if not torch.cuda.is_available():  # CI has none: what needs no GPU is in test_stream_readers.py
    pytest.skip("no CUDA device here", allow_module_level=True)

MIB = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files, 200 MB: large and tiny tensors of 1, 2 and 4 bytes, at odd places."""
    folder = tmp_path_factory.mktemp("readers")
    rng = np.random.default_rng(5)
    for shard in range(3):
        tensors: dict[str, tuple[str, list[int], bytes]] = {}
        for name, code, numel in (
            ("a", "BF16", 20_000_003),
            ("tiny", "U8", 1),
            ("b", "F32", 3_000_001),
            ("c", "F16", 4_000_000),
            ("d", "U8", 7_777_777),
        ):
            size = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}[code]
            tensors[f"{shard}.{name}"] = (code, [numel], rng.bytes(numel * size))
        tensors |= {f"{shard}.s{i}": ("BF16", [i], rng.bytes(2 * i)) for i in range(1, 200)}
        write_safetensors(folder / f"{shard}.safetensors", tensors)
    return folder


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def resident(path: Path) -> list[float | None]:
    return [resident_fraction(file) for file in files(path)]


def load(path: Path, **arguments: Any) -> LoadReport:
    """Load onto the GPU and compare every byte; what differs comes with the whole report."""
    arguments = {"dtype": "checkpoint", "progress": False, "device": "cuda:0"} | arguments
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # random bits overflow in float16
        report = streamload.load_state_dict(None, path, **arguments)
    left = resident(path)  # before the comparison reads them
    different = verify(report, open_checkpoint(path))
    about = f"{arguments}\n{report}\n{report.plan}\nresident afterwards: {left}"
    print(about)
    assert not different, f"{len(different)} differ: {[str(d) for d in different[:5]]}\n{about}"
    made = report.plan
    assert report.held_nbytes["staging"] <= made.host_nbytes <= made.host_budget_nbytes, about
    return report


def plan(path: Path, **arguments: Any) -> Plan:
    return streamload.plan(path, **({"device": "cuda:0", "dtype": "checkpoint"} | arguments))


def on_a_local_disk(path: Path) -> None:
    """Skip where files are on no disk that is read past the page cache."""
    filesystem, _ = filesystem_and_length(path)
    forget(path)
    if filesystem not in DIRECT_FILESYSTEMS or max(n or 0 for n in resident(path)) > 0.1:
        pytest.skip(f"{path} on {filesystem}: resident after dropping: {resident(path)}")


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16", "float32"])
@pytest.mark.parametrize("reader", ["auto", "mmap", "pread", "direct"])
def test_every_way_brings_the_right_bits(path: Path, reader: Any, dtype: str, cold: bool) -> None:
    (forget if cold else read_all)(path)
    load(path, reader=reader, dtype=dtype)


@pytest.mark.parametrize("cast", ["auto", "llvm", "device"])
@pytest.mark.parametrize("out_of_range", ["inf", "clamp"])
def test_casts_are_the_same_wherever_they_are_made(
    path: Path, cast: Any, out_of_range: Any
) -> None:
    read_all(path)
    report = load(path, dtype="float16", cast=cast, out_of_range=out_of_range)
    casts = {p.cast for p in report.plan.placements if p.src is not p.dst}
    assert casts == {"llvm" if cast == "llvm" else "device"}, report.plan
    reference = load(path, dtype="float16", cast="llvm", out_of_range=out_of_range)
    assert report.counts == reference.counts


def test_what_is_cold_is_read_past_the_page_cache(path: Path) -> None:
    on_a_local_disk(path)
    report = streamload.load_state_dict(
        None, path, dtype="checkpoint", device="cuda:0", progress=False
    )
    left = resident(path)
    assert report.plan.readers == ("direct",) * 3, f"{report}\n{report.plan}"
    assert not [note for note in report.notes if "files:" in note], report.notes
    assert max(n or 0 for n in left) < 0.2, left
    assert verify(report, open_checkpoint(path)) == []


@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize("page_cache", ["keep", "drop"])
def test_what_becomes_of_the_page_cache(path: Path, reader: Any, page_cache: Any) -> None:
    """Kept or dropped."""
    on_a_local_disk(path)
    report = streamload.load_state_dict(
        None,
        path,
        dtype="checkpoint",
        device="cuda:0",
        progress=False,
        reader=reader,
        page_cache=page_cache,
    )
    left = resident(path)
    about = f"{left}\n{report}\n{report.plan}"
    if page_cache == "keep":
        assert min(n or 0 for n in left) > 0.9, about
    else:
        assert max(n or 0 for n in left) < 0.2, about
        assert report.dropped_nbytes > 0.8 * report.read_nbytes, about


@pytest.mark.parametrize("host", ["8MiB", "16MiB", "64MiB", "200MiB"])
@pytest.mark.parametrize("threads", [1, 2, None])
def test_host_memory_stays_within_its_budget(path: Path, host: str, threads: int | None) -> None:
    read_all(path)
    load(path, budget=Budget(host=host), threads=threads)


def test_weights_and_scratch_are_enough_and_a_mebibyte_less_is_refused(path: Path) -> None:
    """The least that a load takes; and nothing is allocated before it is refused."""
    read_all(path)
    for dtype in ("checkpoint", "float16"):
        made = plan(path, dtype=dtype, budget="2GB")
        least = made.devices[0].resident_nbytes
        scratch = 0 if dtype == "checkpoint" else 2 * MIB
        load(path, dtype=dtype, budget=least + scratch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_reserved()
        with pytest.raises(PlanInfeasibleError):
            load(path, dtype=dtype, budget=least + scratch - MIB)
        assert torch.cuda.max_memory_reserved() == before
