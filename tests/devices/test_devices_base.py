"""Finding devices: names, and probes that compute instead of believing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.core import disk_cache as _kept
from streamload.core.registry import load
from streamload.devices import names, probing
from streamload.devices.base import ProbeResult
from streamload.errors import DeviceNotFoundError

ROOT = str(Path(streamload.__file__).parent.parent)


def child(
    code: str, folder: Path, *argv: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with a cache below ``folder``."""
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env=os.environ | {"PYTHONPATH": ROOT, "XDG_CACHE_HOME": str(folder / "cache")} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )


def said(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line that a child printed, as JSON; the child must have ended well."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    data = np.arange(4, dtype=np.float32).tobytes()
    return write_safetensors(tmp_path / "x.safetensors", {"w": ("F32", (4,), data)})


@pytest.fixture
def bare_path(tmp_path: Path) -> str:
    """A PATH with the usual programs but no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "ld", "ld.bfd", "uname", "cat", "env"):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return str(folder)


LOAD = """
import json, sys, streamload
try:
    report = streamload.load_state_dict(
        None, sys.argv[1], device=sys.argv[2], budget="1MB", progress=False
    )
    print(json.dumps({"notes": report.notes, "devices": [d.device for d in report.plan.devices]}))
except streamload.errors.DeviceNotFoundError as error:
    print(json.dumps({"error": str(error), "device": error.device, "working": error.working}))
"""


@pytest.mark.slow
def test_a_device_whose_compiler_is_missing_is_not_found(
    tmp_path: Path, checkpoint: Path, bare_path: str
) -> None:
    warm = child(LOAD, tmp_path, checkpoint, "CPU", CACHEDB=str(tmp_path / "tinygrad.db"))
    assert said(warm)["devices"] == ["CPU"]
    cold = child(
        LOAD, tmp_path, checkpoint, "CPU", PATH=bare_path, CACHEDB=str(tmp_path / "tinygrad.db")
    )
    answer = said(cold)
    assert answer["device"] == "CPU"
    assert "clang" in answer["error"]
    assert "host" in answer["working"]
    assert "CPU" not in answer["working"]
    assert f"devices that work here: {', '.join(answer['working'])}" in answer["error"]
    assert cold.stderr == ""


@pytest.mark.slow
def test_auto_takes_what_works_down_to_the_host(
    tmp_path: Path, checkpoint: Path, bare_path: str
) -> None:
    (tmp_path / "no drivers").mkdir()
    nothing = {"PATH": bare_path, "OCL_ICD_VENDORS": str(tmp_path / "no drivers")}
    answer = said(child(LOAD, tmp_path, checkpoint, "auto", **nothing))
    assert answer["devices"] == ["host"]
    assert any('device="auto" took host' in note and "CPU: " in note for note in answer["notes"])


FULL = """
import json, sys
from dataclasses import asdict
from streamload.devices import probing
print(json.dumps(asdict(probing.probe("tinygrad", sys.argv[1], full=sys.argv[2:] == ["full"]))))
"""


@pytest.mark.slow
def test_a_full_probe_computes_in_every_dtype(tmp_path: Path) -> None:
    done = child(FULL, tmp_path, "CPU", "full")
    found = said(done)
    assert found["works"]
    assert found["dtypes"]["float32"] == "native"
    assert found["dtypes"]["complex64"] == found["dtypes"]["float4_e2m1fn"] == "absent"
    version = subprocess.run(["clang", "--version"], capture_output=True, text=True).stdout
    if "version 14." in version:  # it has no __bf16 arithmetic
        assert found["dtypes"]["bfloat16"] == "broken"
    assert done.stderr == ""
    done = child(FULL, tmp_path, "CL", "full")
    found = said(done)
    assert found["dtypes"]["float32"] == "native"
    assert found["dtypes"]["bfloat16"] == "emulated"
    assert ["bfloat16", "float32"] in found["device_casts"]
    assert done.stderr == ""


FAKE = """
from streamload.devices.base import ProbeResult

class Framework:
    def canonical(self, name): return name
    def trusted(self, name): return True
    def lasting(self, name): return name == "lasting"
    def fingerprint(self, name): return "one"
    def probe(self, name, full):
        probed.append(name)
        return ProbeResult(name, True, "", {"bfloat16": "native"})

probed = []
FRAMEWORK = Framework()
"""


def test_what_lasts_is_remembered_on_disk_from_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a child's probe is; of a device that is trusted and does not last, each process asks."""
    probed = fake(tmp_path, monkeypatch)
    first = {name: probing.probe("fake", name) for name in ("lasting", "passing")}
    probing._PROBES.clear()
    assert {name: probing.probe("fake", name) for name in first} == first
    assert probed() == ["lasting", "passing", "passing"]


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A framework of that name, and a cache of its own; gives what was probed so far."""
    (folder / "fake_framework.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    row = names.FrameworkRow(name="fake", framework="fake_framework:FRAMEWORK")
    monkeypatch.setitem(names.FRAMEWORKS.others, "fake", row)
    load.cache_clear()
    monkeypatch.delitem(sys.modules, "fake_framework", raising=False)
    monkeypatch.setattr(probing, "_PROBES", {})
    return lambda: list(vars(sys.modules["fake_framework"])["probed"])


def kept_probe(folder: Path, framework: str, name: str) -> tuple[ProbeResult, Path]:
    """What a probe found, and the file that it is kept in, below a cache of its own."""
    result = probing.probe(framework, name)
    (file,) = (folder / "cache" / "streamload" / "kept").iterdir()
    return result, file


def test_a_probe_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "_PROBES", {})
    first, file = kept_probe(tmp_path, "tinygrad", "PYTHON")
    assert probing.probe("tinygrad", "PYTHON") is first
    inode = file.stat().st_ino
    probing._PROBES.clear()
    assert probing.probe("tinygrad", "PYTHON") == first
    assert file.stat().st_ino == inode


def test_a_damaged_probe_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = fake(tmp_path, monkeypatch)
    first, file = kept_probe(tmp_path, "fake", "lasting")
    good = file.read_bytes()
    for times, damaged in enumerate((b"", good[:-1], good.replace(b"true", b"null")), 2):
        file.write_bytes(damaged)
        probing._PROBES.clear()
        assert probing.probe("fake", "lasting") == first
        assert probed() == ["lasting"] * times
        assert file.read_bytes() == good
    assert list(file.parent.iterdir()) == [file]


def test_a_probe_that_others_could_have_written_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = fake(tmp_path, monkeypatch)
    first, file = kept_probe(tmp_path, "fake", "lasting")
    inode = file.stat().st_ino
    file.chmod(0o666)
    probing._PROBES.clear()
    assert probing.probe("fake", "lasting") == first
    assert probed() == ["lasting"] * 2
    assert (file.stat().st_ino, file.stat().st_mode & 0o777) != (inode, 0o666)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_folders_are_this_users_alone_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    before = os.umask(umask)
    try:
        _kept.lend_caches.__wrapped__()
        _kept.keep(b"x", "it")
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) == 4
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert _kept.read_kept("it") == b"x"


def test_a_user_without_a_home_keeps_nothing(tmp_path: Path) -> None:
    code = "from streamload.core import disk_cache as _kept; "
    code += "_kept.lend_caches(); _kept.keep(b'x', 'it'); "
    code += "print(_kept.read_kept('it'))"
    done = child(code, tmp_path, XDG_CACHE_HOME="", HOME="relative")
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert list(tmp_path.iterdir()) == []


def test_what_a_probe_depends_on_is_in_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers, drivers and settings; not which device tinygrad made its default."""
    owner = names.framework("tinygrad")
    for name in ("DEV", "CC", "POCL_DEBUG", "OCL_ICD_VENDORS"):
        monkeypatch.delenv(name, raising=False)
    plain = owner.fingerprint("CPU")
    assert owner.fingerprint("CPU") == plain
    monkeypatch.setenv("DEV", "CL")
    assert owner.fingerprint("CPU") == plain
    monkeypatch.setenv("DEV", "CPU:LLVM")
    seen = {plain, owner.fingerprint("CPU")}
    monkeypatch.delenv("DEV")
    monkeypatch.setenv("POCL_DEBUG", "1")
    seen.add(owner.fingerprint("CPU"))
    (tmp_path / "pocl.icd").write_text("libpocl.so")
    monkeypatch.setenv("OCL_ICD_VENDORS", str(tmp_path))
    seen.add(owner.fingerprint("CPU"))
    (tmp_path / "pocl.icd").write_text("another.so")
    seen.add(owner.fingerprint("CPU"))
    monkeypatch.setenv("PATH", str(tmp_path))
    seen.add(owner.fingerprint("CPU"))
    assert len(seen) == 6


@pytest.mark.parametrize("device", ["CL", pytest.param("CPU", marks=pytest.mark.slow)])
def test_a_home_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, checkpoint: Path, device: str
) -> None:
    """Nothing is remembered then, and the folder that compilers were lent is gone at the end."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    home = {"XDG_CACHE_HOME": str(tmp_path / "file" / "cache"), "HOME": str(tmp_path / "file")}
    done = child(LOAD, tmp_path, checkpoint, device, TMPDIR=str(tmp_path / "tmp"), **home)
    assert said(done)["devices"] == [device]
    assert done.stderr == ""
    assert (tmp_path / "file").read_bytes() == b""
    assert list((tmp_path / "tmp").iterdir()) == []


def _runs(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path("/proc", pid, "status").read_text()
    except OSError:  # gone, and ESRCH if it goes while it is read
        return False


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clang = tmp_path / "clang"
    clang.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 600\n")
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = probing.probe("tinygrad", "CPU:3", timeout_s=3)
    assert result == ProbeResult("CPU:3", False, "it did not answer in 3 s")
    pids = (tmp_path / "pids").read_text().split()
    assert pids
    until = time.monotonic() + 10  # who was killed may still run for a moment
    while any(map(_runs, pids)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not (tmp_path / "cache").exists()
    assert probing.probe("tinygrad", "CPU:3", timeout_s=3) is result  # once a process is enough


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import os; os.kill(os.getpid(), 11)", "signal 11: no message"),
        ("import os; os.kill(os.getpid(), 9)", probing._KILLED),
        ("import sys; sys.stderr.write('first\\nlast\\n'); sys.exit(3)", "exit 3: last"),
        ("print('[1, 2]', flush=True); import os; os._exit(0)", "exit 0: no message"),
        ("raise ValueError('odd')", "exit 1: ValueError: odd"),
    ],
)
def test_a_child_that_dies_is_a_device_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    """The signal or exit code is said, with the last that the child complained of."""
    (tmp_path / "tinygrad").mkdir()  # what the child imports; this process has the real one
    (tmp_path / "tinygrad" / "__init__.py").write_text(code)
    names.framework("tinygrad")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "_PROBES", {})
    assert probing.probe("tinygrad", "CPU") == ProbeResult("CPU", False, problem)
    assert not (tmp_path / "cache").exists()


def test_the_host_needs_no_compiler() -> None:
    assert probing.probe("host", "host").works


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("CL", (None, "CL")),
        ("CPU:1", (None, "CPU:1")),
        ("tinygrad:CL", ("tinygrad", "CL")),
        ("tinygrad:CPU:1", ("tinygrad", "CPU:1")),
        ("TinyGrad:cl", ("tinygrad", "cl")),
        ("tinygrad", ("tinygrad", "")),
        ("host", ("host", "host")),
        ("Host", ("host", "host")),
        ("", (None, "")),
    ],
)
def test_a_name_may_carry_its_framework(name: str, expected: tuple[str | None, str]) -> None:
    assert names.split_name(name) == expected


def test_a_framework_that_is_not_known_is_refused() -> None:
    with pytest.raises(DeviceNotFoundError, match="no such framework") as caught:
        names.framework("jax")
    assert {"tinygrad", "host"} <= set(caught.value.working)


def test_the_framework_of_a_model_is_seen_from_its_tensors() -> None:
    from tinygrad import Tensor

    class Model:
        def __init__(self, inside: Any) -> None:
            self.me = self
            self.inside = inside

    assert names.framework_of({"a": np.zeros(1)}) == "host"
    assert names.framework_of(Model([(Model({"x": Tensor([1])}),)])) == "tinygrad"
    assert names.framework_of({}) is None
    assert names.framework_of(Model("nothing")) is None
    code = "import sys; from streamload.devices.names import framework_of; framework_of({'a': 1}); "
    code += "print('tinygrad' in sys.modules)"
    assert forked.fresh(code) == "False\n"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, None)),
        ({"STREAMLOAD_DEVICE": "CL", "SUPPORT_BF16": "1"}, ("CL", "device")),
        ({"STREAMLOAD_DEVICE": "", "SUPPORT_BF16": "0"}, (None, "llvm")),
    ],
)
def test_the_environment_is_read_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    variables: Mapping[str, str],
    expected: tuple[str | None, str | None],
) -> None:
    for name in ("STREAMLOAD_DEVICE", "SUPPORT_BF16", "STREAMLOAD_TEST_RUNTIMES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (names.environment_device(), names.environment_fp16_cast()) == expected
    assert names.environment(("STREAMLOAD_",)).keys() <= {"STREAMLOAD_DEVICE"}


def test_a_wrong_setting_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPPORT_BF16", "yes")
    with pytest.raises(ValueError, match="'yes'; expected 0 or 1"):
        names.environment_fp16_cast()


def test_a_probe_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "downloads").mkdir()
    for name in ("json", "numpy", "sitecustomize", "subprocess"):
        text = f"open({str(tmp_path / 'run')!r}, 'w'); raise SystemExit(7)\n"
        (tmp_path / "downloads" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path / "downloads")
    for entry in ("", ".", "../downloads"):
        monkeypatch.syspath_prepend(entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "_PROBES", {})
    assert probing.probe("host", "host").works
    assert not (tmp_path / "run").exists()


LATE = """
import os, sys, warnings
import tinygrad.helpers
before = tinygrad.helpers.CACHEDB
from streamload.devices import names
names.framework("tinygrad")
print(tinygrad.helpers.CACHEDB != before, tinygrad.helpers.CACHEDB == os.environ["CACHEDB"])
"""


def test_caches_are_lent_to_a_tinygrad_that_is_loaded_already(tmp_path: Path) -> None:
    """It has read its settings; and the folder goes without a warning at the end."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    variables = {key: value for key, value in os.environ.items() if key != "CACHEDB"}
    variables |= {
        "PYTHONPATH": ROOT,
        "XDG_CACHE_HOME": str(tmp_path / "file" / "cache"),
        "TMPDIR": str(tmp_path / "tmp"),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", LATE],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")
    assert list((tmp_path / "tmp").iterdir()) == []
