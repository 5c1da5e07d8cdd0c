"""What a load really takes, by the kernel's counters as another process reads them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import needs
import pytest
from make_checkpoint import make_checkpoint, shape_of_size
from parameters import product

from streamload.bench.processes import call, measure
from streamload.core.dtypes import BF16
from streamload.devices.probing import probe

NBYTES = 200_000_000
MEDIUM_NBYTES = 20_000_000
SMALL_NBYTES = 1_000_000
SLACK_NBYTES = 64_000_000
DEVICES = ("CL", "CPU", "host")
# in the fast suite one device of tinygrad stands for both
FEWER_DEVICES = ("CL", pytest.param("CPU", marks=pytest.mark.slow), "host")
READERS = ("mmap", "pread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints: "large", "sharded" (as large, in five files), "medium" and "small"."""
    root = tmp_path_factory.mktemp("memory")
    for name, nbytes, shards in (
        ("large", NBYTES, 1),
        ("sharded", NBYTES, 5),
        ("medium", MEDIUM_NBYTES, 1),
        ("small", SMALL_NBYTES, 1),
    ):
        make_checkpoint(root / name, shape_of_size(nbytes, BF16), shards=shards)
    return root


def _peak_nbytes(path: Path, device: str, loads: int = 1, **arguments: Any) -> int:
    """Peak RssAnon + RssShmem of a process that loads a checkpoint, from its start to its end."""
    framework = "host" if device == "host" else "tinygrad"
    result = probe(framework, device)
    if not result.works:
        needs.lacking(f"{device}: {result.problem}")
    job = call("bench_parts.jobs:streamload", path=str(path), device=device, **arguments)
    return measure(job, laps=loads, sample_s=0.0005).peak_nbytes


@cache
def _least_nbytes(path: Path, device: str, reader: str) -> int:
    """The peak of loading almost nothing: interpreter, libraries, drivers, the same casts."""
    return _peak_nbytes(path, device, reader=reader)


@pytest.mark.parametrize(
    ("device", "reader", "threads"),
    product(
        DEVICES,
        READERS,
        [1, 2],
        fast=lambda device, reader, threads: (device, reader, threads) == ("CL", "mmap", 2),
    ),
)
def test_a_load_takes_the_weights_and_little_more(
    folder: Path, device: str, reader: str, threads: int
) -> None:
    """The peak is the weights and at most 64 MB over that of a load of 1 MB."""
    least = _least_nbytes(folder / "small", device, reader)
    peak = _peak_nbytes(folder / "large", device, reader=reader, threads=threads)
    assert peak <= least + NBYTES + SLACK_NBYTES


@pytest.mark.parametrize("device", FEWER_DEVICES)
def test_shards_take_no_more(folder: Path, device: str) -> None:
    """A checkpoint in several files takes what one in a single file takes."""
    least = _least_nbytes(folder / "small", device, "mmap")
    peak = _peak_nbytes(folder / "sharded", device, reader="mmap")
    assert peak <= least + NBYTES + SLACK_NBYTES


def test_chunks_take_no_memory(folder: Path) -> None:
    """Of 20,000 chunks that a load is cut into only those under way are there.

    All of them would take 8 MB and more.
    """
    least = _least_nbytes(folder / "medium", "host", "mmap")
    peak = _peak_nbytes(folder / "medium", "host", reader="mmap", chunk_nbytes=1000)
    assert peak <= least + 3_000_000


@pytest.mark.parametrize("device", FEWER_DEVICES)
def test_loading_again_takes_no_more(folder: Path, device: str) -> None:
    """A second load writes the weights of the first in place."""
    least = _least_nbytes(folder / "small", device, "mmap")
    peak = _peak_nbytes(folder / "large", device, reader="mmap", loads=2)
    assert peak <= least + NBYTES + SLACK_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("device", FEWER_DEVICES)
def test_old_weights_do_not_stand_beside_new_ones(folder: Path, device: str) -> None:
    """float32 weights that become float16 are released as these are made, not afterwards."""
    least = _least_nbytes(folder / "small", device, "mmap")
    # twice: a model's kernels are compiled once on a machine, by a compiler that takes 70 MB
    times = 1 if device == "host" else 2
    peaks = [
        _peak_nbytes(folder / "large", device, reader="mmap", model="float32") for _ in range(times)
    ]
    peak = min(peaks)
    assert peak <= least + 2 * NBYTES + SLACK_NBYTES
