"""The box that kills, for torch on the CPU: what others hold twice, and streamload once."""

from __future__ import annotations

import zlib
from pathlib import Path

import needs
import numpy as np
import pytest
from bench_parts.section import forget, measure
from bench_parts.torch_jobs import WAYS
from boxes import Boxes, BoxRun
from make_checkpoint import make_checkpoint, shape_of_size
from safetensors import safe_open

from streamload.bench.processes import call, command
from streamload.core.dtypes import BF16

torch = needs.module("torch")
needs.module("transformers")

WEIGHTS_NBYTES = 300_000_000
BUDGET_NBYTES = 305_000_000
TINY_NBYTES = 1_000_000
META, META_FLOAT16 = "streamload, meta", "streamload, meta, float16"
#: What a model's class makes unless told otherwise takes twice the file before it is loaded.
FULL_SIZE = "float32 model, load_file, load_state_dict"
MAPPED = "transformers, float16"
JOB = "bench_parts.torch_jobs:load"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16 whose data begins at 8 modulo 16."""
    out = tmp_path_factory.mktemp("box") / "checkpoint"
    make_checkpoint(out, shape_of_size(WEIGHTS_NBYTES, BF16), offset_mod_16=8)
    return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "checkpoint"
    make_checkpoint(out, shape_of_size(TINY_NBYTES, BF16))
    return out


@pytest.fixture(scope="module")
def base_nbytes(tiny: Path) -> int:
    """RSS of a process that has imported transformers and loaded a tiny model, with a cast."""
    return _peak_nbytes(tiny, META_FLOAT16)


@pytest.fixture(scope="module")
def checksums(checkpoint: Path) -> dict[str, int]:
    """CRC-32 of all weights in the order of their names, as they are and as float16."""
    found = {"bfloat16": 0, "float16": 0}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            raw = file.get_tensor(name).view(torch.uint16).numpy()
            with np.errstate(all="ignore"):
                half = raw.view(BF16.numpy).astype(np.float16)
            found["bfloat16"] = zlib.crc32(raw.tobytes(), found["bfloat16"])
            found["float16"] = zlib.crc32(half.tobytes(), found["float16"])
    return found


def _peak_nbytes(path: Path, way: str) -> int:
    """The most RSS, pages of the mapped file included, that a load has with room for all."""
    return int(measure(call(JOB, path=str(path), way=way)).first["rss_peak_nbytes"])


def _run(
    cgroup: Boxes, path: Path, way: str, limit_nbytes: int, budget_nbytes: int = BUDGET_NBYTES
) -> BoxRun:
    job = call(JOB, path=str(path), way=way, budget_nbytes=budget_nbytes)
    return cgroup.run(command(job, at_once=True), limit_nbytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=pytest.mark.slow) for way in (META, "streamload, in place")),
        META_FLOAT16,
    ],
)
def test_streamload_finishes_in_the_weights_and_a_base(
    cgroup: Boxes, checkpoint: Path, base_nbytes: int, checksums: dict[str, int], way: str
) -> None:
    """In a cgroup of the weights and what a process takes anyway, the bits arrive and are right."""
    forget(checkpoint)
    done = _run(cgroup, checkpoint, way, WEIGHTS_NBYTES + base_nbytes)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert done.said["crc32"] == checksums[WAYS[way].dtype]


@pytest.mark.slow
def test_what_is_built_before_it_is_loaded_is_killed(
    cgroup: Boxes, checkpoint: Path, base_nbytes: int
) -> None:
    done = _run(cgroup, checkpoint, FULL_SIZE, WEIGHTS_NBYTES + base_nbytes)
    assert done.oom_killed


@pytest.mark.slow
def test_streamload_holds_once_what_transformers_holds_twice(
    checkpoint: Path, tiny: Path, base_nbytes: int
) -> None:
    """With a cast, transformers keeps the file mapped beside the weights; streamload does not."""
    theirs_nbytes = _peak_nbytes(checkpoint, MAPPED) - _peak_nbytes(tiny, MAPPED)
    ours_nbytes = _peak_nbytes(checkpoint, META_FLOAT16) - base_nbytes
    assert theirs_nbytes > 1.9 * WEIGHTS_NBYTES
    assert ours_nbytes < 1.1 * WEIGHTS_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "budget_nbytes"),
    [(META, 10**9), (f"{META}, no budget", 10**9)],
    ids=["a budget beyond the box", "no budget"],
)
def test_twice_of_what_is_left_is_refused(
    cgroup: Boxes, checkpoint: Path, base_nbytes: int, way: str, budget_nbytes: int
) -> None:
    """Where half of the weights would fit, the load is refused, and not killed."""
    done = _run(cgroup, checkpoint, way, base_nbytes, budget_nbytes)
    assert (done.returncode, done.oom_killed) == (1, False), done.stderr
    assert "streamload.errors.PlanInfeasibleError: does not fit on cpu" in done.stderr
