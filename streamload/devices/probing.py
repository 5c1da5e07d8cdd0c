"""Probes of devices: a device works if it has computed a correct result.

A framework's claim is no proof, and a compiler or a driver may end the process that calls it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from streamload.core.bounded_json import parse_json
from streamload.core.disk_cache import keep, read_kept
from streamload.core.dtypes import BY_NAME, DType
from streamload.core.system import KILLED_FIRST, python_command
from streamload.devices.base import Device, DTypeStatus, Framework, ProbeResult, StagedElements
from streamload.devices.names import framework

_PROBES: dict[tuple[str, str, bool], ProbeResult] = {}
_PROBE_TIMEOUT_S = 120.0
# tinygrad takes 120 MB on the CPU and 230 on OpenCL (PoCL), and 310 for a full probe.
_KILLED = (
    "its test was killed, as the kernel does if memory runs out: a test takes 120 to 310 MB in a "
    "process of its own; run `streamload devices` where so much is free, its results are kept"
)


def probe(
    framework_name: str, device: str, *, full: bool = False, timeout_s: float = _PROBE_TIMEOUT_S
) -> ProbeResult:
    """Test whether a device computes, in a child process if it is not trusted; cache the result.

    The test is an addition; ``full`` adds every dtype and the framework's own casts (seconds).

    The child uses no compile caches, since a warm one hides a missing compiler, and its stderr is
    captured. Results are cached on disk under a fingerprint of their dependencies (versions,
    drivers, GPUs, compilers): the first kernels of a process took 18 of the 50 ms before the
    first read of a load to one H200. A child that takes longer than ``timeout_s`` is killed with
    all its children, and the device counts as broken.
    """
    owner = framework(framework_name)
    key = (framework_name, owner.canonical(device), full)
    if key not in _PROBES:
        _PROBES[key] = _probed(owner, key, timeout_s)
    return _PROBES[key]


def _probed(owner: Framework, key: tuple[str, str, bool], timeout_s: float) -> ProbeResult:
    """Return the result of a probe, ``key`` being `probe`'s arguments, from disk or computed."""
    _, device, full = key
    trusted = owner.trusted(device)
    if trusted and not owner.lasting(device):
        return owner.probe(device, full)
    facts = (owner.fingerprint(device), sys.version, sys.executable)
    parts = ["probe", *map(str, key), *facts]
    more = ["probe", *key[:2], "True", *facts]  # a full probe's result serves any
    result = _read_probe(read_kept(*parts)) or _read_probe(read_kept(*more))
    if result is None:
        result = owner.probe(device, full) if trusted else _probe_in_child(*key, timeout_s)
        # a failure may be mended without a new fingerprint, and a dtype that seems broken in this
        # process may have found the device full
        if result.works and not (trusted and "broken" in result.dtypes.values()):
            keep(json.dumps(asdict(result)).encode(), *parts)
    return result


def nvidia_parts() -> list[str]:
    """Return the versions of NVIDIA's Linux driver and of each GPU, for fingerprints.

    Machines that share a cache folder may differ only in their GPUs.
    """
    root = Path("/proc/driver/nvidia")
    parts = []
    for path in (root / "version", *sorted(root.glob("gpus/*/information"))):
        with suppress(OSError):
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
    return parts


def _probe_in_child(framework_name: str, device: str, full: bool, timeout_s: float) -> ProbeResult:
    """Probe a device in a child process; if the child crashes or hangs, it does not work."""
    code = KILLED_FIRST + (
        "import json, sys; from dataclasses import asdict; from streamload.devices import names; "
        "result = names.framework(sys.argv[1]).probe(sys.argv[2], sys.argv[3] == 'True'); "
        "print('\\n' + json.dumps(asdict(result)))"
    )
    variables = os.environ | {"CACHELEVEL": "0"}  # of tinygrad's cache
    hint = ""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-probe-"))
        except OSError:
            hint = "; no folder for temporary files can be written, which compilers may need: "
            hint += "set TMPDIR to one that can"
        else:  # PoCL and others compile below XDG_CACHE_HOME
            variables |= {"XDG_CACHE_HOME": folder, "POCL_CACHE_DIR": folder}
        # files, not pipes: a compiler that outlives the child would hold a pipe open
        stdout, stderr = (stack.enter_context(_nameless_file()) for _ in range(2))
        try:
            child = subprocess.Popen(
                python_command(code, framework_name, device, str(full)),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            return ProbeResult(device, False, f"no child process could be started: {error}")
        try:
            child.wait(timeout_s)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # and its children
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return ProbeResult(device, False, f"it did not answer in {timeout_s:g} s")
        lines, said = (_lines(file) for file in (stdout, stderr))
    result = _read_probe(lines[-1].encode() if lines else None)
    if result is None:
        died = f"signal {-child.returncode}" if child.returncode < 0 else f"exit {child.returncode}"
        problem = f"{died}: {said[-1] if said else 'no message'}"
        if child.returncode == -signal.SIGKILL:
            problem = _KILLED
        result = ProbeResult(device, False, problem)
    return result if result.works else replace(result, problem=result.problem + hint)


def _nameless_file() -> BinaryIO:
    """Open a temporary file, in memory if the system can: then no folder need be writable."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("streamload"), "w+b")
    return tempfile.TemporaryFile()


def _lines(file: BinaryIO) -> list[str]:
    """Return all lines of a file as text."""
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _read_probe(data: bytes | None) -> ProbeResult | None:
    """Parse a result's JSON; None if there is none or it is invalid."""
    try:
        found = parse_json(data or b"")
        casts = tuple((src, dst) for src, dst in found.pop("device_casts"))
        return ProbeResult(**found, device_casts=casts)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class ComputingFramework(Framework):
    """Base of frameworks whose devices are probed by computing with their tensors.

    Attributes:
        held: the framework's dtypes by long name; a dtype that it lacks is "absent".
        casts: (src, dst) dtypes whose casts by the framework are worth a probe.
    """

    held: Mapping[str, Any]
    casts: Iterable[tuple[DType, DType]]

    @abstractmethod
    def _add_one(self, name: str, numbers: list[float]) -> list[float]:
        """Return the numbers plus one, computed on a device."""

    @abstractmethod
    def _problem(self, error: Exception) -> str:
        """Return the line of an error that names the problem, without the device's name."""

    @abstractmethod
    def _double(self, device: Any, dtype: DType, ones: bytes) -> tuple[bytes, DTypeStatus]:
        """Double some ones, given as the raw bytes ``ones``, on the device; bools stay True.

        Returns the raw bytes of the result, and the dtype's status if these are right.
        """

    def probe(self, name: str, full: bool) -> ProbeResult:
        name = self.canonical(name)
        try:
            device = self.device(name)
            found = self._add_one(name, [1.0, 2.0, 3.0])
        except Exception as error:  # each backend raises what it likes
            return ProbeResult(name, False, self._problem(error))
        if found != [2.0, 3.0, 4.0]:
            return ProbeResult(name, False, f"[1, 2, 3] + 1 gave {found}")
        if not full:
            return ProbeResult(name, True)
        names = (*sorted(BY_NAME.keys() - self.held.keys()), *self.held)
        statuses = {ours: self.dtype_status(name, BY_NAME[ours]) for ours in names}
        exact = [
            (src.name, dst.name) for src, dst in self.casts if _casts_exactly(device, src, dst)
        ]
        return ProbeResult(name, True, "", statuses, tuple(exact))

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        if dtype.name not in self.held:
            return "absent"
        device = self.device(name)
        one, two = (np.full(4, value).astype(dtype.numpy).tobytes() for value in (1, 2))
        try:
            doubled, status = self._double(device, dtype, one)
        except Exception:  # each backend raises what it likes
            return "broken"
        return status if doubled == (one if dtype.kind == "bool" else two) else "broken"


def _casts_exactly(device: Device, src: DType, dst: DType) -> bool:
    """Whether a device casts every bit pattern of ``src`` as numpy does, NaN payloads aside."""
    codes = np.arange(1 << src.bits, dtype=f"<u{src.itemsize}").tobytes()
    with np.errstate(all="ignore"):
        want = np.frombuffer(codes, src.numpy).astype(np.float32).astype(dst.numpy)
    staging = device.staging(len(codes))
    try:
        staging.view[:] = codes
        buffer = device.allocate(dst, (1 << src.bits,))
        device.cast_copy(StagedElements(staging, 0, len(codes), src), buffer, 0, dst)
        found = np.frombuffer(device.read(buffer, 0, want.nbytes), dst.numpy)
    except Exception:
        return False
    finally:
        staging.close()
    same = found.view(f"u{dst.itemsize}") == want.view(f"u{dst.itemsize}")
    with np.errstate(all="ignore"):
        return bool(np.all(same | (np.isnan(want) & np.isnan(found))))
