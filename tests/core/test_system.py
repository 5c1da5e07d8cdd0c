"""Systems other than Linux, as far as a child of this process can look like one."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import forked
import ml_dtypes
import needs
import numpy as np
import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.bench.processes import Child, call
from streamload.conversion import openable
from streamload.core.system import address_of, bytes_at, python_command, read_at
from streamload.devices import probing
from streamload.formats.mlc import chat

_VALUES = np.random.default_rng(1).standard_normal((3, 2**19 + 1))
TENSORS = {"large": _VALUES.astype(ml_dtypes.bfloat16), "small": np.arange(7, dtype=np.int64)}
CODES = {"large": "BF16", "small": "I64"}

#: Takes away what Linux has and macOS has not, before streamload is imported.
MACOS = """
import fcntl, importlib.util, mmap, os, sys, sysconfig, tempfile

import llvmlite.binding, numpy, psutil, rich.console, typer
if importlib.util.find_spec("torch"):
    import torch
sysconfig.get_config_vars()  # read from a file of this platform's name

ONLY_ON_LINUX = {
    os: ("preadv", "pwritev", "preadv2", "posix_fadvise", "posix_fallocate", "fdatasync", "waitid",
         "sched_getaffinity", "sched_setaffinity", "copy_file_range", "memfd_create", "splice",
         "O_DIRECT", "O_TMPFILE", "O_PATH", "RWF_NOWAIT", "POSIX_FADV_DONTNEED",
         "POSIX_FADV_RANDOM", "POSIX_FADV_SEQUENTIAL"),
    mmap: ("MAP_POPULATE", "MAP_STACK", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK",
           "MADV_DOFORK", "MADV_REMOVE", "MADV_DONTDUMP", "MADV_DODUMP", "MADV_HWPOISON",
           "MADV_MERGEABLE", "MADV_UNMERGEABLE"),
    fcntl: ("F_SETLEASE", "F_GETLEASE", "F_SETSIG", "F_GETSIG", "F_NOTIFY", "F_OFD_SETLK",
            "F_OFD_GETLK", "F_OFD_SETLKW", "F_ADD_SEALS", "F_GET_SEALS", "F_SETPIPE_SZ"),
}
tempfile._O_TMPFILE_WORKS = False  # it has looked for it already
for module, names in ONLY_ON_LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
psutil.PROCFS_PATH = "/./proc"  # it asks macOS by other calls

def no_proc(event, arguments):
    paths = [os.fsdecode(a) for a in arguments[:1] if isinstance(a, (str, bytes, os.PathLike))]
    if event in ("open", "os.listdir", "os.scandir") and paths and paths[0].startswith("/proc/"):
        raise FileNotFoundError(2, "No such file or directory", paths[0])

sys.addaudithook(no_proc)
"""


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run([sys.executable, "-c", textwrap.dedent(code), *arguments], forked.TORCH)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of more bytes than are copied at a time, and of few."""
    return write_safetensors(
        tmp_path_factory.mktemp("system") / "model.safetensors",
        {name: (CODES[name], a.shape, a.tobytes()) for name, a in TENSORS.items()},
    )


LOAD = """
import hashlib, json
import streamload
import torch

def raw(value, device):
    value = value.view(torch.uint8).numpy() if device == "cpu" else value
    return hashlib.sha256(value.tobytes()).hexdigest()

path, cases = sys.argv[1:]
for device, dtype, budget in json.loads(cases):
    options = {"dtype": dtype, "budget": budget, "progress": False}
    first = streamload.load_state_dict(None, path, device=device, **options)
    again = streamload.load_state_dict(first.state_dict, path, **options)
    assert {p.action for p in again.plan.placements} == {"in_place"}
    assert set(first.plan.readers) == {"pread"}
    streamload.convert(path, f"{path}.out", dtype=dtype, overwrite=True, progress=False)
    other = streamload.load_state_dict(
        None, f"{path}.out", device=device, budget=None, progress=False
    )
    for report in (first, other):
        print(json.dumps({name: raw(value, device) for name, value in report.state_dict.items()}))
"""


def test_loads_without_what_only_linux_has(checkpoint: Path) -> None:
    """macOS: the right bytes reach the host and torch, and a converted file, with no budget too."""
    needs.module("torch")
    cases = [("host", "float16", None), ("cpu", "checkpoint", "80%")]
    done = child(MACOS + LOAD, checkpoint, json.dumps(cases))
    assert done.returncode == 0, done.stderr
    expected = []
    for _, dtype, _ in cases:
        large = TENSORS["large"] if dtype == "checkpoint" else TENSORS["large"].astype(dtype)
        found = {"large": large, "small": TENSORS["small"]}
        hashes = {n: hashlib.sha256(a.tobytes()).hexdigest() for n, a in found.items()}
        expected += [hashes, hashes]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_the_commands_without_what_only_linux_has(checkpoint: Path) -> None:
    """macOS: a load on the command line needs no budget, and none of the calls that are missing."""
    code = MACOS + "from streamload.cli import main; main()"
    done = child(code, "load", checkpoint, "--device", "host", "--verify", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_what_psutil_says_is_free_is_free() -> None:
    """Without /proc, what is available is what the system says by other means."""
    code = """
    from streamload.core.memory import available_host_nbytes
    print(available_host_nbytes(), psutil.virtual_memory().available)
    """
    done = child(MACOS + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    found, available = map(int, done.stdout.split())
    assert abs(found - available) < available / 4  # others work on this machine meanwhile


def test_views_of_many_lengths_leave_nothing() -> None:
    """No class for each length stays, also where garbage is not collected; bytes are written."""
    memory = bytearray(3000)
    address = address_of(memoryview(memory))
    classes = len(gc.get_objects())
    gc.disable()
    try:
        for nbytes in range(1, 3000):
            with bytes_at(address, nbytes) as view:
                view[-1] = 7
        assert len(gc.get_objects()) < classes + 100
    finally:
        gc.enable()
    assert memory == b"\7" * 2999 + b"\0"
    assert bytes_at(address, 0).nbytes == 0


def test_reading_at_a_place_without_preadv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    data = np.random.default_rng(2).bytes(2**20 + 5)
    (tmp_path / "file").write_bytes(data)
    out = bytearray(2**20 + 100)
    with open(tmp_path / "file", "rb", buffering=0) as file, memoryview(out) as view:
        done = 0
        while read := read_at(file.fileno(), done, view[done:]):
            done += read
    assert out == data + bytes(95)


def test_windows_is_told_what_is_missing() -> None:
    code = """
    import mmap, os, sys
    sys.modules["fcntl"] = None
    for name in [n for n in dir(mmap) if n.startswith(("MAP_", "PROT_", "MADV_"))]:
        delattr(mmap, name)
    for name in ("pread", "preadv", "posix_fadvise", "O_CLOEXEC", "geteuid", "killpg"):
        delattr(os, name)
    os.name, sys.platform = "nt", "win32"
    try:
        import streamload
    except ImportError as error:
        print(error)
    """
    done = child(code)
    assert done.returncode == 0, done.stderr
    (sentence,) = done.stdout.splitlines()
    assert "Windows" in sentence and "POSIX" in sentence


def _judge(folder: Path) -> None:
    with openable._child() as ask, suppress(ChildProcessError):  # without transformers
        assert "holds no file" in ask(
            json.dumps({"question": "why_not_opened", "path": str(folder)})
        )


def _bench(folder: Path) -> None:
    with Child(call("platform:system"), timeout_s=60) as child:
        child.ready()


#: Every child process of Python that streamload starts, by the file that does.
CHILDREN = {
    "conversion.openable": _judge,
    "formats.mlc.chat": lambda folder: chat._rendered("{{ messages }}", {}),
    "devices.probing": lambda folder: probing._probe_in_child("host", "host", False, 60),
    "bench.processes": _bench,
}


@pytest.mark.slow
@pytest.mark.parametrize("child", CHILDREN.values(), ids=CHILDREN)
def test_a_child_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[[Path], None]
) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in ("json", "os", "numpy", "jinja2", "torch", "platform", "streamload"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "."]))
    for entry in (str(folder), ".", ""):  # as of `python -m`, of PYTHONPATH, and of `python -c`
        monkeypatch.syspath_prepend(entry)
    child(folder)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_child_imports_the_same_streamload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is reached by PYTHONPATH, or lies in the current folder, is the child's, too."""
    copy = tmp_path / "copy"
    shutil.copytree(Path(streamload.__file__).parent, copy / "streamload")
    code = (
        "import subprocess, sys; from streamload.core.system import python_command as command; "
        "print(sys.modules['streamload'].__file__, flush=True); "
        "subprocess.run(command('import streamload; print(streamload.__file__)'), check=True)"
    )
    for where, folder, flags in ((copy, "", []), (tmp_path, copy, ["-P"]), (copy, "", ["-B"])):
        environment = os.environ | {"PYTHONPATH": str(folder)}
        command = [sys.executable, *flags, "-c", code]
        out = subprocess.run(
            command, cwd=where, env=environment, check=True, capture_output=True, text=True
        )
        assert out.stdout.split() == [str(copy / "streamload/__init__.py")] * 2
    monkeypatch.chdir(copy)
    shutil.rmtree(copy)  # the current folder may be gone
    subprocess.run(python_command("import streamload"), check=True, cwd=tmp_path)
