"""Compiled code that later processes take over: who may have written it, and that it runs."""

from __future__ import annotations

import ctypes
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_stand_in
import needs
import numpy as np
import pytest
from safetensors_files import write_safetensors

from streamload.codecs import cast_cuda as ptx
from streamload.codecs.llvm import compile_object, host_target, movable_code
from streamload.core import disk_cache as _kept
from streamload.core.disk_cache import keep, read_kept
from streamload.core.dtypes import BF16, F16
from streamload.core.system import PLACES_CODE, place_code
from streamload.devices import bulk

keeps_loops = pytest.mark.skipif(not PLACES_CODE, reason="code is placed on x86-64 Linux only")

NBYTES = 12_345
LOOP = """
import ctypes, hashlib, json, os, sys
path, *without = sys.argv[1:]
for name in without:
    sys.modules[name] = None  # as good as not installed
from streamload.devices import bulk
from streamload.devices.base import Copy, Read

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
def copy(target, source, nbytes, stream):
    ctypes.memmove(target, source, nbytes)
    return 0

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def record(event, stream):
    return 0

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def wait(event):
    return 0

nbytes = os.path.getsize(path)
device, slot = (ctypes.create_string_buffer(n) for n in (nbytes, 1000))
base = ctypes.addressof(device)
calls = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in
         (("copy", copy), ("record", record), ("wait", wait))}
sizes = [(at, min(1000, nbytes - at)) for at in range(0, nbytes, 1000)]
reads = [Read(at, n, n, (Copy(0, n, base + at),)) for at, n in sizes]
{change}
loop = bulk.Loop(bulk.libc_calls() | calls)
failure = loop(os.open(path, os.O_RDONLY), reads, [(ctypes.addressof(slot), 1, 2, False, 0)])
print(json.dumps([failure is None and device.raw[:nbytes] == open(path, "rb").read(),
                  "llvmlite.binding" in sys.modules]))
"""
BY_LLVM, BY_WHAT_WAS_KEPT = [True, True], [True, False]  # the bytes arrived, with llvmlite or not


def start(code: str, cache: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(child: subprocess.Popen[str]) -> Any:
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, (child.returncode, err)
    return json.loads(out)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(NBYTES))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run_loop(cache: Path, data: Path, *without: str, change: str = "") -> Any:
    """Run the loop in a process of its own; whether the bytes arrived, and llvmlite was there."""
    return said(start(LOOP.replace("{change}", change), cache, str(data), *without))


def kept_files(cache: Path) -> list[Path]:
    """The files of the cache, of processes that have not finished writing too."""
    return sorted(path for path in cache.rglob("*") if not path.is_dir())


@keeps_loops
def test_a_later_process_runs_the_loop_without_llvmlite(cache: Path, data: Path) -> None:
    assert run_loop(cache, data) == BY_LLVM
    (file,) = kept_files(cache)
    assert run_loop(cache, data, "llvmlite") == BY_WHAT_WAS_KEPT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@keeps_loops
def test_a_damaged_loop_is_compiled_again(cache: Path, data: Path) -> None:
    bulk._compiled.__wrapped__()
    (file,) = kept_files(cache)
    whole = file.read_bytes()
    file.write_bytes(whole[:-400] + b"\xcc" * 400)
    assert run_loop(cache, data) == BY_LLVM
    assert file.read_bytes() == whole
    assert kept_files(cache) == [file]


@keeps_loops
def test_processes_that_begin_together(cache: Path, data: Path) -> None:
    code = LOOP.replace("{change}", "")
    children = [start(code, cache, str(data)) for _ in range(2)]
    assert [said(child)[0] for child in children] == [True] * 2
    assert len(kept_files(cache)) == 1
    assert run_loop(cache, data, "llvmlite") == BY_WHAT_WAS_KEPT


@keeps_loops
def test_a_loop_with_a_constant_outside_is_not_kept(cache: Path, data: Path) -> None:
    """It would have to be linked; llvmlite does that, in each process."""
    change = """
outside = "@outside = internal constant [2 x i64] [i64 0, i64 9]"
there = "start: %there = load volatile i64, ptr @outside"
bulk._IR = outside + bulk._IR.replace("start:", there, 1)
"""
    assert run_loop(cache, data, change=change) == BY_LLVM
    assert kept_files(cache) == []


def test_nothing_can_be_kept(tmp_path: Path, data: Path) -> None:
    """A home that cannot be written costs later processes time, and nobody is told."""
    (tmp_path / "file").touch()
    child = start(LOOP.replace("{change}", ""), tmp_path / "file", str(data))
    out, err = child.communicate(timeout=100)
    assert (json.loads(out), err) == (BY_LLVM, "")


REFUSED = """
import ctypes, json, sys
from streamload.codecs.cast_table import cast_engine, make_cast
from streamload.devices.bulk import Loop
from streamload.core.dtypes import BF16, F16
refused = ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE: nothing becomes executable
try:
    why = str(Loop({}))
except OSError as error:
    why = str(error)
out = bytearray(2)
make_cast(BF16, F16)(memoryview(b"\\x80\\x3f"), memoryview(out))
print(json.dumps([refused, why, cast_engine(BF16, F16), out.hex()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="this is about a setting of Linux")
def test_a_system_that_refuses_executable_memory(cache: Path) -> None:
    """There is no loop then, compiled or kept, and numpy casts: nothing jumps into plain memory."""
    for _ in range(2):
        refused, why, engine, cast = said(start(REFUSED, cache))
        if not refused:
            pytest.skip("this kernel cannot be told to refuse (Linux 6.3 can)")
        assert "no executable memory" in why
        assert (engine, cast) == ("numpy", "003c")
        bulk._compiled.__wrapped__()  # this process may: the next one finds a loop that was kept


PTX = """
import json, sys
sys.modules[sys.argv[1]] = None
from streamload.codecs.cast_cuda import cast_ptx
from streamload.core.dtypes import BF16, F16, F32
from streamload.errors import UnsupportedCastError
def ptx(src, dst):
    try:
        return cast_ptx(src, dst, clamp=False)
    except UnsupportedCastError as error:
        return str(error)
texts = [ptx(*pair) for pair in [(BF16, F16), (F16, F32)]]
print(json.dumps([texts, "llvmlite.binding" in sys.modules]))
"""


def test_a_later_process_has_the_kernels_of_earlier_ones(cache: Path) -> None:
    """Their text is kept for each cast; another cast needs llvmlite."""
    text = ptx.cast_ptx.__wrapped__(BF16, F16, clamp=False)
    assert ".entry cast" in text
    assert len(kept_files(cache)) == 1
    (again, other), compiled = said(start(PTX, cache, "llvmlite"))
    assert again == text
    assert "no CUDA kernel without llvmlite" in other
    assert not compiled


WHOLE_LOAD = """
import ctypes, json, os, sys
sys.modules["llvmlite"] = None
import numpy as np
from cuda_stand_in import Kernels
import streamload
from streamload.devices import base, probing
from streamload.core.dtypes import BF16, F16

driver = ctypes.CDLL("libcuda.so.1")
kernels = Kernels(driver, [(BF16, F16)])
probing._PROBES["tinygrad", "CUDA", False] = base.ProbeResult("CUDA", True)
for dtype in ("checkpoint", "float16"):
    report = streamload.load_state_dict(
        None, sys.argv[1], device="CUDA", dtype=dtype, budget="10MB", progress=False
    )
    (loaded,) = report.state_dict.values()
    buffer = loaded.uop.base.buffer
    print(report.plan.placements[0].cast, ctypes.string_at(buffer._buf.value, buffer.nbytes).hex())
"""


@keeps_loops
def test_a_whole_load_does_without_llvmlite(cache: Path, tmp_path: Path) -> None:
    needs.module("tinygrad")
    values = np.arange(1000, dtype=np.float32)
    data = values.view("<u2")[1::2].tobytes()
    path = write_safetensors(tmp_path / "x.safetensors", {"w": ("BF16", (1000,), data)})
    bulk._compiled.__wrapped__()
    for clamp in (False, True):  # the stand-in for the driver knows both
        ptx.cast_ptx.__wrapped__(BF16, F16, clamp=clamp)
    cuda_stand_in.build(tmp_path)
    said = cuda_stand_in.run(tmp_path, WHOLE_LOAD, path, XDG_CACHE_HOME=str(cache))
    rounded = np.frombuffer(data, "<u2").astype("<u4") << 16
    half = rounded.view("<f4").astype("<f2").tobytes()
    assert said.split() == ["copy", data.hex(), "device", half.hex()]


@pytest.mark.parametrize("code", [b"", b"\0" * 100, os.urandom(5000)])
def test_what_is_kept_comes_back(cache: Path, code: bytes) -> None:
    assert read_kept("loop", "x86_64", "text") is None
    keep(code, "loop", "x86_64", "text")
    assert read_kept("loop", "x86_64", "text") == code
    assert read_kept("ptx", "x86_64", "text") is None
    assert read_kept("loop", "aarch64", "text") is None
    assert read_kept("loop", "x86_64", "texts") is None
    keep(b"other", "loop", "x86_64", "text")
    assert read_kept("loop", "x86_64", "text") == b"other"
    assert len(kept_files(cache)) == 1


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32, 33, 131])
def test_a_file_that_is_cut_short(cache: Path, nbytes: int) -> None:
    """It counts for nothing, and is written anew."""
    keep(b"c" * 100, "loop", "text")
    (file,) = kept_files(cache)
    whole = file.read_bytes()
    assert len(whole) == 132
    file.write_bytes(whole[:nbytes])
    assert read_kept("loop", "text") is None
    keep(b"c" * 100, "loop", "text")
    assert file.read_bytes() == whole


@pytest.mark.parametrize("at", [0, 31, 32, 131])
def test_a_file_with_another_byte(cache: Path, at: int) -> None:
    """In the code or in its digest."""
    keep(b"c" * 100, "loop", "text")
    (file,) = kept_files(cache)
    damaged = bytearray(file.read_bytes())
    damaged[at] ^= 1
    file.write_bytes(damaged)
    assert read_kept("loop", "text") is None
    file.write_bytes(damaged + b"c")
    assert read_kept("loop", "text") is None


def test_a_file_under_the_name_of_another(cache: Path) -> None:
    """What was kept for one thing is not taken for another by being moved there."""
    keep(b"one", "loop", "one")
    (one,) = kept_files(cache)
    keep(b"two", "loop", "two")
    (two,) = {*kept_files(cache)} - {one}
    os.replace(one, two)
    assert read_kept("loop", "two") is None


def test_a_stale_format(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a version kept that compiled otherwise stays for that version."""
    with monkeypatch.context() as before:
        before.setattr(_kept, "_FORMAT", "0")
        keep(b"old", "loop", "text")
    assert read_kept("loop", "text") is None
    keep(b"new", "loop", "text")
    assert read_kept("loop", "text") == b"new"
    assert len(kept_files(cache)) == 2


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write(cache: Path, mode: int) -> None:
    """It counts for nothing, and one that only this user can write takes its place."""
    keep(b"code", "loop", "text")
    (file,) = kept_files(cache)
    file.chmod(mode)
    assert read_kept("loop", "text") is None
    keep(b"code", "loop", "text")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_kept("loop", "text") == b"code"
    file.chmod(0o644)  # to read it is no harm
    assert read_kept("loop", "text") == b"code"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write(cache: Path, mode: int) -> None:
    """Nothing in it counts, and nothing is written there."""
    keep(b"code", "loop", "text")
    (file,) = kept_files(cache)
    file.parent.chmod(mode)
    assert read_kept("loop", "text") is None
    file.unlink()
    keep(b"code", "loop", "text")
    assert kept_files(cache) == []


def test_a_folder_made_under_a_loose_umask(cache: Path) -> None:
    """The folder is this user's alone whatever the umask lets others do."""
    before = os.umask(0)
    try:
        keep(b"code", "loop", "text")
    finally:
        os.umask(before)
    assert read_kept("loop", "text") == b"code"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_belongs_to_somebody_else(cache: Path, what: str) -> None:
    """A file of another user's is replaced, a folder of another user's left alone."""
    keep(b"code", "loop", "text")
    (file,) = kept_files(cache)
    os.chown(file if what == "file" else file.parent, 54321, 54321)
    assert read_kept("loop", "text") is None
    keep(b"new", "loop", "text")
    assert read_kept("loop", "text") == (b"new" if what == "file" else None)
    assert kept_files(cache) == [file]
    assert b"new" in file.read_bytes() or what == "folder"


def test_a_disk_that_is_full(cache: Path) -> None:
    """A file that cannot be written whole leaves nothing behind."""
    program = """
import resource, signal
from streamload.core.disk_cache import keep, read_kept
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
keep(b"c" * 100, "loop", "text")
print("null" if read_kept("loop", "text") is None else "kept")
"""
    assert said(start(program, cache)) is None
    assert kept_files(cache) == []


FUNCTION = "define i64 @{name}(i64 %x) noinline {{\n{body}\n}}\n"
PLAIN = "  %y = mul i64 %x, 7\n  ret i64 %y"
TABLE = "  %p = getelementptr i64, ptr @table, i64 %x\n  %y = load i64, ptr %p\n  ret i64 %y"
CALL = "  %y = call i64 @{other}(i64 %x)\n  %z = add i64 %y, 1\n  ret i64 %z"


def compiled(*functions: tuple[str, str], before: str = "") -> bytes:
    """An object of functions, by name and body."""
    ir = before + "".join(FUNCTION.format(name=name, body=body) for name, body in functions)
    return compile_object(ir, host_target())


@keeps_loops
def test_moved_code_runs() -> None:
    code = movable_code(compiled(("f", PLAIN)))
    assert code is not None
    function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)(place_code(code))
    assert function(6) == 42


@keeps_loops
def test_placed_code_cannot_be_written() -> None:
    code = movable_code(compiled(("f", PLAIN)))
    assert code is not None
    address = place_code(code)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            assert line.split()[1] == "r-xp"
            return
    pytest.fail("the code is nowhere")


@pytest.mark.parametrize(
    ("before", "body"),
    [
        ("@table = internal constant [4 x i64] [i64 3, i64 1, i64 4, i64 1]\n", TABLE),
        ("@table = external constant [4 x i64]\n", TABLE),
        ("declare i64 @other(i64)\n", CALL.format(other="other")),
    ],
    ids=["constants", "data of others", "a call"],
)
def test_code_that_needs_more_is_not_moved(before: str, body: str) -> None:
    """Constants lie in a section of their own, and names have to be looked up."""
    assert movable_code(compiled(("f", body), before=before)) is None


def test_another_format_has_no_code_to_move() -> None:
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF object"):
        movable_code(b"\xcf\xfa\xed\xfe" * 20)
