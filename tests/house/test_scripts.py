"""The commands that people and CI run, and the checkpoints that make_checkpoint.py writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_checkpoint as mk
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from streamload.core.dtypes import BF16, parse_dtype

ROOT = Path(__file__).parents[2]
SCRIPTS = ("setup", "demo", "test", "check")


def _run(*argv: object, env: dict[str, str] | None = None, **options: Any) -> Any:
    return subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=600, env=env, **options
    )


def _bits(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a checkpoint as its raw bytes, by way of the header."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, stop = entry["data_offsets"]
                found[name] = np.frombuffer(data[start + first : start + stop], np.uint8)
    return found


# --- make_checkpoint.py --------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", mk.DTYPES)
def test_safetensors_reads_what_is_written(
    tmp_checkpoint: Callable[..., Path], dtype: str, shards: int
) -> None:
    folder = tmp_checkpoint(200_000, dtype=dtype, shards=shards)
    config = json.loads((folder / "config.json").read_text())
    shape = mk.LlamaShape(
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    found: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == shards
    for file in files:
        with safe_open(file, "np") as reader:
            names = list(reader.keys())
            found |= {name: tuple(reader.get_slice(name).get_shape()) for name in names}
            assert {reader.get_slice(name).get_dtype() for name in names} == {
                parse_dtype(dtype).code
            }
    assert found == shape.tensors()
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (shards > 1)
    if shards > 1:
        content = json.loads(index.read_text())
        assert set(content["weight_map"]) == set(found)
        assert set(content["weight_map"].values()) == {file.name for file in files}
        assert content["metadata"]["total_size"] == sum(map(len, _bits(folder).values()))


@pytest.mark.parametrize("modulo", [0, 8])
def test_data_begins_where_it_is_asked_to(tmp_checkpoint: Callable[..., Path], modulo: int) -> None:
    folder = tmp_checkpoint(200_000, shards=3, offset_mod_16=modulo)
    for file in folder.glob("*.safetensors"):
        header_nbytes = int.from_bytes(file.read_bytes()[:8], "little")
        assert (8 + header_nbytes) % 16 == modulo


def test_the_seed_decides_the_values(tmp_checkpoint: Callable[..., Path]) -> None:
    one, same, other = (
        _bits(tmp_checkpoint(seed=seed, shards=shards)) for seed, shards in ((1, 1), (1, 2), (2, 1))
    )
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


def test_values_are_those_of_a_model(tmp_checkpoint: Callable[..., Path]) -> None:
    tensors = _bits(tmp_checkpoint(2_000_000))
    values = {name: bits.view(BF16.numpy).astype(np.float32) for name, bits in tensors.items()}
    assert all(np.isfinite(v).all() for v in values.values())
    embedding = values["model.embed_tokens.weight"]
    assert abs(embedding.std() - mk.SIGMA) < 1e-3
    assert abs(embedding.mean()) < 1e-3
    assert abs(values["model.norm.weight"].mean() - 1) < 0.02
    beginnings = {bits[:64].tobytes() for bits in tensors.values()}
    assert len(beginnings) == len(tensors)


@pytest.mark.parametrize("dtype", mk.DTYPES)
def test_extremes_are_in_the_named_places_only(
    tmp_checkpoint: Callable[..., Path], dtype: str
) -> None:
    """`--extremes` plants NaNs, infinities and subnormals in `EXTREME_TENSORS` and nowhere else."""
    tensors = _bits(tmp_checkpoint(2_000_000, dtype=dtype, plant_extremes=True))
    unsigned = np.dtype(f"u{parse_dtype(dtype).itemsize}")
    planted = mk.extremes(parse_dtype(dtype))
    for name, bits in tensors.items():
        values = bits.view(parse_dtype(dtype).numpy).astype(np.float32)
        if name in mk.EXTREME_TENSORS:
            assert np.array_equal(bits.view(unsigned)[: len(planted)], planted)
            values = values[len(planted) :]
        assert np.isfinite(values).all()
    held = planted.view(parse_dtype(dtype).numpy).astype(np.float32)
    assert np.isnan(held).any()
    assert np.isinf(held).any()


@given(nbytes=st.integers(30_000, 100 * 10**9), dtype=st.sampled_from(mk.DTYPES))
@settings(max_examples=200)
def test_the_size_is_met(nbytes: int, dtype: str) -> None:
    if dtype == "float32":
        nbytes *= 2
    shape = mk.shape_of_size(nbytes, parse_dtype(dtype))
    itemsize = parse_dtype(dtype).itemsize
    assert 0 <= nbytes - shape.numel * itemsize < (2 * shape.dim + 1) * itemsize
    assert shape.dim % shape.heads == 0
    assert shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize(
    ("preset", "numel"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("tinyllama-1.1b", 1_100_048_384),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset: str, numel: int) -> None:
    """Presets count as many parameters as their models: llama-3-8b is 16.06 GB in bf16."""
    assert mk.PRESETS[preset].numel == numel


def test_what_is_there_is_not_overwritten(small_checkpoint: Path) -> None:
    before = {f: hashlib.sha256(f.read_bytes()).digest() for f in small_checkpoint.iterdir()}
    done = _run(
        sys.executable, ROOT / "scripts/make_checkpoint.py", small_checkpoint, "--size", "1MB"
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert str(small_checkpoint) in done.stderr
    assert before == {
        f: hashlib.sha256(f.read_bytes()).digest() for f in small_checkpoint.iterdir()
    }


def test_a_size_that_is_too_small_is_refused(tmp_path: Path) -> None:
    done = _run(
        sys.executable, ROOT / "scripts/make_checkpoint.py", tmp_path / "out", "--size", "1kB"
    )
    assert done.returncode == 1
    assert done.stderr == "make_checkpoint: no Llama of bfloat16 is as small as 1.00 kB\n"
    assert not list(tmp_path.iterdir())


# --- the commands --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SCRIPTS, "../.ci/run"])
def test_a_script_is_executable_and_stops_at_the_first_error(name: str) -> None:
    """Every command is executable, is valid bash, and runs with ``set -euo pipefail``."""
    script = ROOT / "scripts" / name
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()
    assert _run("bash", "-n", script).returncode == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_itself(name: str) -> None:
    done = _run(ROOT / "scripts" / name, "--help")
    assert done.returncode == 0
    assert f"scripts/{name}" in done.stdout
    assert not done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what setup and the wheel are made of, with nothing installed."""
    copy = tmp_path / "repository"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("streamload", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    return copy


def _as_nobody(command: list[str], home: Path, env: dict[str, str]) -> Any:
    """Run a command as a user without rights, whose home is read-only, if this is root."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home.parent), **env}
    kept = ("PIP_", "SSL_", "REQUESTS_", "HTTP", "http", "no_proxy", "NO_PROXY", "LANG")
    environment |= {k: v for k, v in os.environ.items() if k.startswith(kept)}
    options: dict[str, Any] = {"cwd": home.parent}
    if os.geteuid() == 0:
        options |= {"user": 65534, "group": 65534, "extra_groups": []}
    return _run(*command, env=environment, **options)


def _read_only_home(tmp_path: Path) -> Path:
    """A folder for that user, with a home inside that cannot be written."""
    place = tmp_path / "place"
    home = place / "home"
    home.mkdir(parents=True)
    home.chmod(0o555)
    place.chmod(0o777)
    for parent in place.parents:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    return home


SHOW = """
import sys, streamload
report = streamload.load_state_dict(None, sys.argv[1], budget="8MB", device=sys.argv[2])
print(report)
"""


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(
    repository: Path, tmp_path: Path, tmp_checkpoint: Callable[..., Path]
) -> None:
    """The wheel builds, holds the package and its licence, and works for a user with no rights."""
    home = _read_only_home(tmp_path)
    python = _system_python()
    dist = home.parent / "dist"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(dist)]
    done = _run(*build, repository)
    assert done.returncode == 0, done.stderr
    (wheel,) = dist.glob("streamload-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "streamload/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"streamload"}

    venv = home.parent / "venv"
    checkpoint = home.parent / "checkpoint"
    shutil.copytree(tmp_checkpoint(), checkpoint)
    for command in (
        [python, "-m", "venv", str(venv)],
        [str(venv / "bin/pip"), "install", "-q", "--no-cache-dir", str(wheel)],
        [str(venv / "bin/streamload"), "inspect", str(checkpoint)],
        [str(venv / "bin/python"), "-c", SHOW, str(checkpoint), "host"],
        [str(venv / "bin/python"), "-c", SHOW, str(checkpoint), "CPU"],
    ):
        done = _as_nobody(command, home, {})
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert not list(home.iterdir())


@pytest.mark.slow
def test_setup_without_rights_says_what_to_install(repository: Path, tmp_path: Path) -> None:
    """Without root, setup names the Debian packages that are not there, and goes on."""
    home = _read_only_home(tmp_path)
    mine = home.parent / "repository"
    shutil.copytree(repository, mine)
    if os.geteuid() == 0:
        for path in (mine, *mine.rglob("*")):
            os.chown(path, 65534, 65534)
    # a PATH of the few programs that setup calls: no clang
    tools = home.parent / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "dirname", "env", "id", "mkdir", "sed", "sha256sum"):
        found = shutil.which(tool)
        assert found
        (tools / tool).symlink_to(found)
    env = {"PATH": str(tools), "PYTHON": _system_python()}
    setup = [str(mine / "scripts/setup")]

    first = _as_nobody(setup, home, env)
    assert first.returncode == 0, first.stderr
    assert "sudo apt-get install clang" in first.stderr
    assert "installing streamload" in first.stderr
    second = _as_nobody(setup, home, env)
    assert second.returncode == 0, second.stderr
    assert "installing" not in second.stderr
    with (mine / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    third = _as_nobody(setup, home, env)
    assert "installing streamload" in third.stderr


def _system_python() -> str:
    """A Python outside any virtual environment, that another user may run too."""
    for name in ("/usr/bin/python3", getattr(sys, "_base_executable", ""), "python3"):
        found = shutil.which(name)
        if found and _run(found, "-c", "import ensurepip, sys; assert sys.version_info >= (3, 11)"):
            return found
    pytest.skip("no Python with ensurepip outside the virtual environment")
