"""What holds for every format that is read or written, and how tensors are put together for it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_parts.section import forget, measure
from boxes import Boxes
from conversions import WRITTEN, files_of, quiet
from convert_crash_helpers import (
    Start,
    await_beginning,
    duration,
    journaled,
    kill_and_resume,
    start,
)
from parameters import product
from remote_server import serve
from safetensors_files import write_safetensors

from streamload.bench.processes import call
from streamload.codecs.scheme import SCHEMES
from streamload.conversion import convert as conversion
from streamload.conversion.blocks import Way
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.formats.reader import FORMATS, Format
from streamload.formats.writer import (
    FormatWriter,
    Joined,
    Model,
    OutFile,
    OutTensor,
    placed,
)

__all__ = ["start"]  # a fixture

Array = np.ndarray[Any, Any]
#: Of these others of the same format are tried at once.
_LATER = ("llm.c-bf16", "gguf-q4_0", "mlc-q4f16_0", "mlc-q3f16_1", "mlc-q4f32_1", "mlc-q0f16")
_LATER += tuple(name for name in WRITTEN if name.startswith("from "))


def _several(*later: str) -> pytest.MarkDecorator:
    """What is written; the slow tests try `later` of it, and those of `_LATER`."""
    slow = (*_LATER, *later)
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in WRITTEN]
    )


SEVERAL = _several()


# --- what holds for all formats -------------------------------------------------------------------


@_several("gguf-q8_0", "mlc-q4f16_1")
@pytest.mark.parametrize(
    "kills", [2, pytest.param(30, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_killed_at_random_points(start: Start, tmp_path: Path, name: str, kills: int) -> None:
    """SIGKILL at some points: the same bytes in the end, and what was finished is not read."""
    written, path = WRITTEN[name], tmp_path / "in"
    written.make(path, 24_000_000)
    chance, longest_s = random.Random(3), duration(start, path, tmp_path / "a", written.options)
    whole = files_of(tmp_path / "a")
    for i in range(kills):
        out = tmp_path / f"out{i}"
        kill_and_resume(start, path, out, whole, chance, longest_s, written.options)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A folder for many GB, which are gone after the test: pytest would keep them all."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@SEVERAL
def test_killed_at_size(start: Start, large: Path, name: str) -> None:
    """2.27 GB, and 30 kills, of one conversion until it is whole, and then of another one."""
    written, path, out = WRITTEN[name], large / "in", large / "out"
    written.make(path, 2_270_000_000)
    chance, longest_s = random.Random(4), duration(start, path, out, written.options)
    whole = sums_of(out)
    shutil.rmtree(out)
    for _ in range(30):
        pid, wait = start(path, out, written.options | {"resume": True})
        await_beginning(out)
        time.sleep(chance.random() * longest_s / 5)
        os.kill(pid, signal.SIGKILL)
        if wait() == 0:  # it was quicker
            assert sums_of(out) == whole
            shutil.rmtree(out)
    finished = len(journaled(out)) if out.exists() else 0
    report = quiet(path, out, **written.options, resume=True)
    assert report.resumed >= finished  # all, where only its names were missing
    assert sums_of(out) == whole


def sums_of(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()
            found[str(path.relative_to(folder))] = digest
    return found


@SEVERAL
def test_over_http(tmp_path: Path, name: str) -> None:
    """The same files from a server, read by ranges, and checked on the disk."""
    written, path = WRITTEN[name], tmp_path / "in"
    written.make(path, 3_000_000)
    quiet(path, tmp_path / "local", **written.options)
    with serve(path) as site:
        url = site.url + written.file
        report = quiet(url, tmp_path / "remote", **written.options, verify=True)
    assert report.verified
    local, remote = (files_of(tmp_path / each) for each in ("local", "remote"))
    del local["streamload.json"], remote["streamload.json"]  # they name the source
    assert local == remote


@pytest.mark.parametrize("name", product(WRITTEN, fast={"safetensors", "mlc-q4f16_1"}.__contains__))
def test_it_needs_little_memory(cgroup: Boxes, large: Path, name: str) -> None:
    """A checkpoint larger than the memory that there is, page cache and all, is converted."""
    in_a_box(cgroup, large, name, 300_000_000, 2**27)


@pytest.mark.slow
@SEVERAL
def test_a_small_machine(cgroup: Boxes, large: Path, name: str) -> None:
    """2.27 GB in a box of 256 MB."""
    in_a_box(cgroup, large, name, 2_270_000_000, 256_000_000)


def in_a_box(cgroup: Boxes, folder: Path, name: str, nbytes: int, limit_nbytes: int) -> None:
    WRITTEN[name].make(folder / "in", nbytes)
    forget(folder / "in")
    options = (f"--{key}={value}" for key, value in WRITTEN[name].options.items())
    command = [sys.executable, "-m", "streamload", "convert", folder / "in", folder / "out"]
    done = cgroup.run([*command, *options, "--verify", "--no-progress"], limit_nbytes)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert "verified" in done.stdout


@pytest.mark.slow
@SEVERAL
def test_memory_and_speed(large: Path, name: str) -> None:
    """2.27 GB: at most 100 MB over what 1 MB takes, and the speed that it must have."""
    peaks = []
    for nbytes in (1_000_000, 2_270_000_000):
        WRITTEN[name].make(large / f"{nbytes}", nbytes)
        job = convert_job(large / f"{nbytes}", large / f"out{nbytes}", name)
        peaks.append(measure(job, sample_s=0.0005).peak.anon_nbytes)
    assert 0 < peaks[0] <= peaks[1] <= peaks[0] + 100_000_000
    WRITTEN["safetensors"].make(large / "plain", 2_270_000_000)
    seconds: dict[str, list[float]] = {name: [], "safetensors": []}
    for i in range(3):
        for each, path in ((name, f"{2_270_000_000}"), ("safetensors", "plain")):
            job = convert_job(large / path, large / f"{each}{i}", each)
            seconds[each].append(measure(job).laps[0]["seconds"])
            shutil.rmtree(large / f"{each}{i}")
    mine, plain = (statistics.median(seconds[each]) for each in (name, "safetensors"))
    assert mine <= plain * WRITTEN[name].decoded / WRITTEN[name].speed, seconds


def convert_job(path: Path, out: Path, name: str) -> Mapping[str, Any]:
    """A conversion in a process of its own."""
    options = json.dumps(WRITTEN[name].options)
    paths = {"path": str(path), "out": str(out)}
    return call("bench_parts.jobs:convert", way="streamload", options=options, **paths)


# --- how tensors are put together -----------------------------------------------------------------


class Puzzle(FormatWriter):
    """A format for these tests: what a function makes of a model, in one file after a header."""

    name = "puzzle"
    wants_sums = True
    make: Callable[[Model], Sequence[OutTensor]]

    def tensors(self) -> Sequence[Sequence[OutTensor]]:
        return [[wanted] for wanted in type(self).make(self.model)]

    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        """A file for every two lists, at multiples of 32, and as long as a multiple of it."""
        flat = [each for listed in lists for each in listed]
        return [
            placed(f"{at // 2}.puzzle", b"header", flat[at : at + 2], 32, 32)
            for at in range(0, len(flat), 2)
        ]

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        places = {t.name: [f.path, t.start, t.stop] for f in files for t in f.tensors}
        return {"note.txt": b"note", "index.json": json.dumps([places, dict(sums)]).encode()}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The format, known during a test."""
    row = Format(name="puzzle", writes=f"{__name__}:Puzzle")
    monkeypatch.setitem(FORMATS.others, "puzzle", row)
    yield


@pytest.fixture(params=[None, 2**12, 2**15], ids=["whole", "4 KiB", "32 KiB"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are longer than tensors, or cut them anywhere, by several threads."""
    if request.param is not None:
        way = Way(3, block_nbytes=request.param, behind=1)
        monkeypatch.setattr(conversion, "choose_way", lambda *_, **__: way)


KINDS = {"f32": F32, "f16": F16, "bf16": BF16}
SHAPES = {
    "q": ("bf16", (64, 96)),
    "k": ("bf16", (16, 96)),
    "v": ("f16", (16, 96)),
    "odd": ("f32", (37, 53)),
    "wide": ("f32", (3, 7000)),
    "stack": ("bf16", (4, 33, 21)),
    "norm": ("f32", (97,)),
}


def source(folder: Path) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(KINDS[kind].numpy)
        for name, (kind, shape) in SHAPES.items()
    }
    for i in range(2):
        some = dict(list(arrays.items())[i::2])
        entries = {n: (KINDS[SHAPES[n][0]].code, a.shape, a.tobytes()) for n, a in some.items()}
        write_safetensors(folder / f"{i}.safetensors", entries)
    return arrays


def convert(
    folder: Path, out: Path, make: Callable[[Model], Sequence[OutTensor]], **options: Any
) -> dict[str, bytes]:
    Puzzle.make = staticmethod(make)
    quiet(folder, out, to="puzzle", verify=True, **options)
    places, sums = json.loads((out / "index.json").read_text())
    for path, found in sums.items():
        data = (out / path).read_bytes()
        assert hashlib.md5(data, usedforsecurity=False).hexdigest() == found
        assert data[:6] == b"header" and len(data) % 32 == 0
    assert (out / "note.txt").read_bytes() == b"note"
    return {n: (out / path).read_bytes()[a:z] for n, (path, a, z) in places.items()}


def wanted(model: Model, name: str, of: str, made: Joined, dtype: DType = F32) -> OutTensor:
    """A tensor of one axis that is made of others."""
    return OutTensor(name, model.tensors[of].info, dtype, (made.numel,), made=made)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [F32, F16])
def test_elements_are_those_of_numpy(tmp_path: Path, dtype: DType) -> None:
    arrays = source(tmp_path / "in")

    def make(model: Model) -> list[OutTensor]:
        q, k, v, odd, wide, stack = (model.tensors[name].source for name in list(SHAPES)[:6])
        permuted = q.permuted(4, 2, 8)
        made = {
            "permuted": permuted,
            "back": permuted.permuted(4, 8, 2),
            "transposed": odd.transposed(37, 53),
            "wide": wide.transposed(3, 7000),
            "stack": stack.permuted(4, 33, 21),
            "joined": Joined.joined([permuted, k, v]),
            "joined, transposed": Joined.joined([q, k, v]).transposed(96, 96),
            "permuted, joined, transposed": Joined.joined([permuted, k, v]).transposed(96, 96),
            "padded": odd.padded(1000),
            "constant": Joined.constant(3, np.array([1, 2, 3], dtype.numpy).tobytes()),
        }
        return [wanted(model, name, "q", one, dtype) for name, one in made.items()]

    found = convert(tmp_path / "in", tmp_path / "out", make)
    q, k, v, odd, wide, stack = (arrays[name].astype(dtype.numpy) for name in list(SHAPES)[:6])
    permuted = q.reshape(4, 2, 8, 96).transpose(0, 2, 1, 3).reshape(64, 96)
    expected = {
        "permuted": permuted,
        "back": q,
        "transposed": odd.T,
        "wide": wide.T,
        "stack": stack.transpose(0, 2, 1),
        "joined": np.concatenate([permuted, k, v]),
        "joined, transposed": np.concatenate([q, k, v]).T,
        "permuted, joined, transposed": np.concatenate([permuted, k, v]).T,
        "padded": np.append(odd, np.zeros(1000, dtype.numpy)),
        "constant": np.array([1, 2, 3], dtype.numpy),
    }
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name] == array.tobytes(), name


@pytest.mark.usefixtures("blocks")
def test_what_is_put_together_is_quantized(tmp_path: Path) -> None:
    """The codes of joined, transposed and plain tensors are those of the whole."""
    arrays = source(tmp_path / "in")

    def make(model: Model) -> list[OutTensor]:
        q, k, v = (model.tensors[name].source for name in "qkv")
        info, joined = model.tensors["q"].info, Joined.joined([q.permuted(4, 2, 8), k, v])
        return [
            OutTensor("qkv", info, F32, (96, 96), "q8_0", joined),
            OutTensor("turned", info, F32, (96, 64), "q4_0", q.transposed(64, 96)),
            OutTensor("int8", info, F32, (96, 64), "int8", q.transposed(64, 96)),
            OutTensor("plain", info, F32, (64, 96), "q8_0"),
        ]

    found = convert(tmp_path / "in", tmp_path / "out", make)
    q, k, v = (arrays[name] for name in "qkv")
    permuted = q.reshape(4, 2, 8, 96).transpose(0, 2, 1, 3).reshape(64, 96)
    joined = np.concatenate([each.astype(np.float32) for each in (permuted, k, v)])
    expected = {"qkv": ("q8_0", F32, joined), "plain": ("q8_0", BF16, q)}
    expected |= {"turned": ("q4_0", BF16, q.T), "int8": ("int8", BF16, q.T)}
    for name, (format, src, array) in expected.items():
        made = SCHEMES[format].of(array.shape, src)
        encoder = made.encoder(src, "numpy")
        codes = memoryview(bytearray(made.parts[0].nbytes))
        encoder.encode(memoryview(np.ascontiguousarray(array).tobytes()), codes, 0)
        parts = {made.parts[0].name(name): codes}
        parts |= {p.name(name): encoder.finish()[p.suffix] for p in made.parts[1:]}
        for part, data in parts.items():
            assert found[part] == bytes(data), part


def test_a_conversion_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    source(tmp_path / "in")

    def make(model: Model) -> list[OutTensor]:
        return list(model.tensors.values())

    whole = convert(tmp_path / "in", tmp_path / "whole", make)

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quiet(tmp_path / "in", tmp_path / "out", to="puzzle", progress=stop)
    assert convert(tmp_path / "in", tmp_path / "out", make, resume=True) == whole
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_what_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    """Dtypes that cannot be cast, two turns, two names, an unknown format."""
    source(tmp_path / "in")
    write_safetensors(tmp_path / "in" / "2.safetensors", {"ids": ("I64", (4,), bytes(32))})

    def cast(model: Model) -> list[OutTensor]:
        return [wanted(model, "ids", "ids", model.tensors["ids"].source)]

    with pytest.raises(UnsupportedCastError, match=r"ids.*cannot cast int64 to float32"):
        convert(tmp_path / "in", tmp_path / "out", cast)

    def twice(model: Model) -> list[OutTensor]:
        return [model.tensors["q"], model.tensors["q"]]

    with pytest.raises(CheckpointError, match="2 tensors would be called 'q'"):
        convert(tmp_path / "in", tmp_path / "out", twice)

    def refuse(model: Model) -> list[OutTensor]:
        model.refuse("puzzles have no such tensor", "none", "one", "odd")

    with pytest.raises(CheckpointError, match=r"odd.*no such tensor"):
        convert(tmp_path / "in", tmp_path / "out", refuse)
    with pytest.raises(ValueError, match=r"to is one of safetensors, .*puzzle.*, not 'nothing'"):
        quiet(tmp_path / "in", tmp_path / "out", to="nothing")
    with pytest.raises(ValueError, match="turned twice"):
        Joined.of(TensorInfo("a", F32, (6, 4), tmp_path, 0, 96)).permuted(1, 2, 3).permuted(1, 3, 3)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("blocks")
def test_integers_and_odd_dtypes_pass(tmp_path: Path) -> None:
    tensors = {}
    for i, (code, dtype) in enumerate(BY_CODE.items()):
        data = bytes((i + k) % 2 for k in range(dtype.nbytes(24)))
        tensors[f"t.{code}"] = (code, (2, 3, 4), data)
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors)
    found = convert(tmp_path / "in", tmp_path / "out", lambda model: list(model.tensors.values()))
    assert found == {name: data for name, (_, _, data) in tensors.items()}
