"""Fixtures that several test modules share."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import minilm as minilm_model
import needs
import parameters
import pytest
import suggested
from boxes import Boxes, NoBoxesError
from make_checkpoint import make_checkpoint, shape_of_size

from streamload.core.dtypes import parse_dtype

ROOT = Path(__file__).parent.parent

# processes that tests start import the package that is tested, whether or not it is installed
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

# no test asks the hub; those of a hub on this machine say so (`hub_server`)
os.environ["HF_HUB_OFFLINE"] = "1"

# hundreds of them: they compile the package once, and not each anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# a shell ignores Ctrl-C in what it runs in the background, and children inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

suggested.record()

#: rooms of whose tests each error's suggestions are executed
_SUGGESTING = ("loading", "planning")

#: names in the repository's root before the tests
_ROOT_NAMES = pytest.StashKey[set[str]]()

#: how many modules were imported when the garbage collector last looked at all of them
_seen_modules = 0


def _freeze() -> None:
    """Take what is imported by now out of what the garbage collector looks at.

    With torch, transformers and tinygrad that is half a million objects, and tests and loads ask
    for hundreds of full collections.
    """
    global _seen_modules
    if len(sys.modules) != _seen_modules:
        _seen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Let tests know, before they are imported, whether they are the fast suite."""
    parameters.fast_suite = config.option.markexpr == "not slow"
    config.stash[_ROOT_NAMES] = {path.name for path in ROOT.iterdir()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if tests wrote to the repository's root: they write to their own folders."""
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    if written := names - session.config.stash[_ROOT_NAMES]:
        print(f"tests wrote {sorted(written)} into {ROOT}", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """Leave what is imported to itself; tame torch.

    torch computes by one thread: several tests run at a time, and threads that wait for each other
    on busy cores take 40 ms for what takes microseconds.
    """
    _freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_runtest_logfinish() -> None:
    """Leave what the test has imported to itself."""
    _freeze()


@pytest.fixture(autouse=True)
def suggestions_help(request: pytest.FixtureRequest) -> Iterator[None]:
    suggested.raised.clear()
    yield
    if request.path.parent.name in _SUGGESTING:
        assert not list(suggested.useless())
    suggested.raised.clear()


@pytest.fixture
def tmp_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A factory of Llama-shaped checkpoints: ``tmp_checkpoint(nbytes, dtype=..., shards=...)``.

    Takes the keyword arguments of `make_checkpoint` and gives the folder.
    """

    def make(nbytes: int = 100_000, *, dtype: str = "bfloat16", **arguments: Any) -> Path:
        out = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        shape = shape_of_size(nbytes, parse_dtype(dtype))
        make_checkpoint(out, shape, dtype=dtype, **arguments)
        return out

    return make


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped bf16 checkpoint of 100 kB in two shards, for reading only."""
    out = tmp_path_factory.mktemp("small") / "checkpoint"
    make_checkpoint(out, shape_of_size(100_000, parse_dtype("bfloat16")), shards=2)
    return out


@pytest.fixture
def folder(tmp_checkpoint: Callable[..., Path]) -> Path:
    """A Llama-shaped bf16 checkpoint of 2 MB in three shards, which a test may change."""
    return tmp_checkpoint(2_000_000, shards=3)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in float32, for reading only: layers of 172 kB, embedding and head of 131 kB."""
    out = tmp_path_factory.mktemp("llama") / "model"
    importlib.import_module("offloading_models").built("llama").save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for the library of CUDA's driver."""
    stand_in = importlib.import_module("cuda_stand_in")
    return stand_in.build(tmp_path_factory.mktemp("driver")).parent


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2; the test is skipped where it cannot be had, but not in CI."""
    try:
        return minilm_model.folder()
    except OSError as error:
        needs.lacking(str(error))


@pytest.fixture(scope="session")
def cgroup() -> Boxes:
    """Memory cgroups: ``cgroup.run(argv, limit_nbytes)``.

    Where none can be made the test is skipped; in CI, as root on Linux, it fails.
    """
    try:
        return Boxes()
    except (NoBoxesError, OSError) as error:
        if sys.platform == "linux" and os.geteuid() == 0:
            needs.lacking(str(error))
        pytest.skip(str(error))


@pytest.fixture
def here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Run a command in this process and expect an exit code; gives stdout and stderr."""

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        from streamload.cli import main

        monkeypatch.setattr(sys, "argv", ["streamload", *map(str, arguments)])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, (out, err)
        return out, err

    return call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A filesystem in memory of a given size: ``small_disk("4m")``, again to change it."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / "disk"
        point.mkdir(exist_ok=True)
        how = f"remount,{options}" if mounted else options
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(point)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"cannot mount: {error}")
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        mounted.append(point)
        return point

    yield mount
    if mounted:
        subprocess.run(["umount", mounted[0]], check=True)
