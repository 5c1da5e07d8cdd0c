"""Budgets (how many bytes streamload may hold), free host memory, and the ledger that counts.

A device's budget covers the bytes resident after the load, scratch, and staging if the device's
memory counts as the process's. The staging of other devices is counted separately, under the name
`STAGING`.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

from streamload.core.system import (
    address_space_nbytes,
    file_text,
    mounts,
    system_free_nbytes,
)
from streamload.core.units import as_number, parse_bytes
from streamload.errors import BudgetExceededError, DeviceError, Fit, PlanInfeasibleError

#: The ledger's name for host staging of devices with memory of their own.
STAGING = "staging"
#: Default host staging, in bytes.
DEFAULT_HOST_NBYTES = 64 * 2**20
#: The least host staging that a user may request, in bytes: two threads with slots of a megabyte.
#: With less, copies of some kilobytes take longer to start than to run.
MIN_HOST_NBYTES = 8 * 2**20

_Hierarchy = Literal["cgroup", "cgroup2"]  # as their mounts are named: v1 and v2
_FRAMEWORK = re.compile(r"\w+:(?=[a-z]|$)")  # before a device's own name
_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)

_Way = TypeVar("_Way")


@cache
def canonical_device(name: str) -> str:
    """Return the spelling that device names compare by: lower case, no framework, no index 0.

    ``CL``, ``cl:0`` and ``tinygrad:CL`` are all ``cl``; ``torch:cuda:1`` is ``cuda:1``.
    """
    name = name.strip().lower()
    framework = _FRAMEWORK.match(name)
    return name[framework.end() if framework else 0 :].removesuffix(":0")


@dataclass(frozen=True, slots=True)
class Size:
    """One device's part of a budget: bytes, or a fraction of free memory. Exactly one is set.

    Attributes:
        nbytes: bytes, at least 1.
        fraction: above 0, at most 1.

    Raises:
        ValueError: both, none, or out of range.
    """

    nbytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.nbytes is None) == (self.fraction is None):
            raise ValueError(f"a size is either bytes or a fraction: {self}")
        if self.nbytes is not None and self.nbytes < 1:
            raise ValueError(f"a budget must be more than 0 bytes, not {self.nbytes}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"a budget must be above 0% and at most 100%, not {self.fraction:%}")

    def __str__(self) -> str:
        """The size as `parse` reads it, as Python source text: ``3000`` or ``"80.0%"``."""
        if self.fraction is None:
            return str(self.nbytes)
        return f'"{float(Fraction(str(self.fraction)) * 100)!r}%"'

    @classmethod
    def parse(cls, value: float | str) -> Size:
        """Read bytes (``3_000_000_000``, ``"3GB"``, ``"2.5GiB"``) or a percentage (``"80%"``).

        A number may be a float or numpy's, as ``0.8 * free`` is: a fraction of a byte is dropped.

        Raises:
            ValueError: the value is neither, or not above zero, or above 100%.
        """
        percent = _PERCENT.fullmatch(value) if isinstance(value, str) and len(value) < 100 else None
        if percent is not None:
            exact = Fraction(percent[1].rstrip(".")) / 100
            if exact > 1:  # before rounding to a float, which may be 1.0
                raise ValueError(f"a budget must be above 0% and at most 100%, not {value!r}")
            return cls(fraction=float(exact))
        number = as_number(value)
        if number is not None and 0 < number < 1:
            raise ValueError(
                f'a budget of {number} bytes (write "{number * 100:g}%" for that part)'
            )
        try:
            if number is not None and 1 <= number < math.inf:
                return cls(nbytes=math.floor(number))
            return cls(nbytes=parse_bytes(value))
        except ValueError as error:
            raise ValueError(
                f"not a budget: {value!r} (write 3GB, 2.5GiB, 80% or a number of bytes)"
            ) from error


@dataclass(frozen=True, slots=True, init=False)
class Budget:
    """How many bytes may be held, per device and for host staging.

    ``Budget("3GB")`` is for every device; ``Budget({"CL": "3GB", "CPU": "80%"})`` names them, and a
    device that is not named, like ``None``, gets its free memory less a reserve (see
    `reserve_nbytes`). Device names compare as in `canonical_device`.

    Attributes:
        default: for devices that are not named; None: free memory less a reserve.
        named: (canonical device name, size or None), sorted by name.
        host_nbytes: bytes of host staging for devices with memory of their own.
        host_stated: whether the user stated ``host_nbytes``.
    """

    default: Size | None
    named: tuple[tuple[str, Size | None], ...]
    host_nbytes: int
    host_stated: bool

    def __init__(
        self,
        devices: float | str | Mapping[str, float | str | None] | None = None,
        *,
        host: float | str | None = None,
    ) -> None:
        """Read a budget.

        Args:
            devices: bytes, a size such as "3GB", a percentage of free memory such as "80%", a
                mapping from device names to these, or None.
            host: bytes of host staging, or a size such as "64MiB", at least `MIN_HOST_NBYTES`;
                None: `DEFAULT_HOST_NBYTES`.

        Raises:
            ValueError: a value that is none of these, zero or negative; a percentage that is 0 or
                above 100, or for the host; too little for the host; a device named twice; an
                empty name.
        """
        named: dict[str, Size | None] = {}
        for device, value in devices.items() if isinstance(devices, Mapping) else ():
            key = canonical_device(device) if isinstance(device, str) else ""
            if not key:
                raise ValueError(f"not the name of a device: {device!r}")
            if key == STAGING:
                raise ValueError("host staging is not a device: write Budget(..., host=...)")
            if key in named:
                raise ValueError(f"a budget names device {device!r} twice")
            named[key] = None if value is None else Size.parse(value)
        default = None if devices is None or isinstance(devices, Mapping) else Size.parse(devices)
        staging = Size(DEFAULT_HOST_NBYTES) if host is None else Size.parse(host)
        if staging.nbytes is None:
            raise ValueError(f"host staging is a size in bytes, not a percentage: {host!r}")
        if staging.nbytes < MIN_HOST_NBYTES:
            raise ValueError(f"host staging takes at least 8MiB, not {host!r}")
        object.__setattr__(self, "default", default)
        object.__setattr__(self, "named", tuple(sorted(named.items(), key=lambda pair: pair[0])))
        object.__setattr__(self, "host_nbytes", staging.nbytes)
        object.__setattr__(self, "host_stated", host is not None)

    @classmethod
    def parse(cls, value: BudgetLike) -> Budget:
        """Return a `Budget` as it is, or make one of a value that its constructor takes.

        Raises:
            ValueError: see the constructor.
        """
        return value if isinstance(value, Budget) else cls(value)

    @property
    def devices(self) -> Mapping[str, Size | None]:
        """The sizes of named devices, by canonical name."""
        return dict(self.named)

    def for_device(self, device: str) -> Size | None:
        """Return the size for a device, or `STAGING` (host); None: free memory less a reserve."""
        key = canonical_device(device)
        return Size(self.host_nbytes) if key == STAGING else self.devices.get(key, self.default)

    def with_host(self, nbytes: int) -> Fit:
        """Return an error's suggestion: this budget with at least ``nbytes`` of host staging."""
        given = [str(self.default)] if self.default is not None else []
        if self.named:
            given = ["{" + ", ".join(f'"{name}": {size}' for name, size in self.named) + "}"]
        mib = max(-(-nbytes // 2**20), MIN_HOST_NBYTES // 2**20)
        given.append(f'host="{mib}MiB"')
        return Fit("budget", f"=streamload.Budget({', '.join(given)})")

    def is_stated(self, device: str) -> bool:
        """Whether a device's budget is in bytes, so that its free memory need not be known."""
        size = self.for_device(device)
        return size is not None and size.nbytes is not None

    def resolve(self, device: str, free_nbytes: int | None, held_nbytes: int = 0) -> int:
        """Return the budget of one device, or of host staging (`STAGING`), in bytes.

        Args:
            device: the device's name.
            free_nbytes: free bytes there; used only if `is_stated` is false.
            held_nbytes: bytes that the model already holds there, added to the free ones.

        Raises:
            ValueError: the free bytes are needed, and unknown or negative.
        """
        size = self.for_device(device)
        if size is not None and size.nbytes is not None:
            return size.nbytes
        if free_nbytes is None or free_nbytes < 0:
            raise ValueError(
                f"the budget of {device} depends on what is free there, and that is "
                f"{'unknown' if free_nbytes is None else free_nbytes}: state it in bytes"
            )
        if size is None:
            return held_nbytes + free_nbytes - reserve_nbytes(free_nbytes)
        # str: the shortest decimal, as the user wrote it; 0.8 as a double is a bit more
        return held_nbytes + int(Fraction(str(size.fraction)) * free_nbytes)


BudgetLike: TypeAlias = float | str | Mapping[str, float | str | None] | Budget | None

#: Host bytes that a load never uses, at least.
OVERHEAD_NBYTES = 12 * 2**20


def overhead_nbytes(free_nbytes: int) -> int:
    """Return the host bytes that a load never uses, of ``free_nbytes`` free now.

    12 MiB are for memory that no plan counts: compiled kernels take 6.4 MB, and in a memory
    cgroup of the predicted size loads by pread needed 2 MB more, and loads by a map 4 to 8 MB.
    1/256 is for page tables, which are 1/512 of mapped memory with 4 KiB pages.
    """
    return min(OVERHEAD_NBYTES + free_nbytes // 256, free_nbytes)


def reserve_nbytes(free_nbytes: int) -> int:
    """Return the bytes that a default budget never uses, of ``free_nbytes``; at most half of them.

    16 MiB and 2%, which leaves 96% of 1 GB and 97% of 3 GB. Beyond 4 GiB an eighth of the excess is
    added, up to max(5%, 1 GiB) in all, for other users of a large device. Both the reserve and the
    rest grow with ``free_nbytes``.
    """
    large = max(free_nbytes // 20, 2**30)
    small = 2**24 + free_nbytes // 50 + max(free_nbytes - 2**32, 0) // 8
    return min(large, small, free_nbytes // 2)


@dataclass(frozen=True, slots=True)
class _Controller:
    """Names of a memory cgroup's files for limits and usage, and of fields of its memory.stat."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_NO_LIMIT_NBYTES = 2**60  # v1 writes no limit as 2**63 less a page

_CONTROLLERS: Mapping[_Hierarchy, _Controller] = MappingProxyType(
    {
        "cgroup": _Controller(
            limits=("memory.limit_in_bytes",),
            usage="memory.usage_in_bytes",
            reclaimable=("total_inactive_file", "total_active_file"),
        ),
        "cgroup2": _Controller(
            limits=("memory.max", "memory.high"),
            usage="memory.current",
            reclaimable=("inactive_file", "active_file", "slab_reclaimable"),
        ),
    }
)


class LockedPages:
    """Counts pages of files that this process has locked for a device.

    The kernel counts them as available, and cannot free them.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count more bytes, or fewer if ``nbytes`` is negative."""
        with self._lock:
            self.nbytes += nbytes

    def may_add(self, nbytes: int) -> bool:
        """Whether locked pages, with ``nbytes`` more, are at most half of what is available.

        What other processes have locked counts, too, of files or not (/proc/vmstat:
        ``nr_foll_pin_acquired`` less ``nr_foll_pin_released``).
        """
        counts = proc_fields(Path("/proc/vmstat"))
        pinned = counts.get("nr_foll_pin_acquired", 0) - counts.get("nr_foll_pin_released", 0)
        own = self.nbytes
        locked_nbytes = max(own, pinned * mmap.PAGESIZE)
        return locked_nbytes + nbytes <= (available_host_nbytes() + own) // 2


#: Those of this process.
LOCKED = LockedPages()


def available_host_nbytes(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can take without swapping or being killed.

    The least of MemAvailable and, for this process's memory cgroup and each visible ancestor (v1
    and v2; both in a hybrid system), the limit minus the usage without pages on file lists:

    - v1: ``memory.usage_in_bytes`` - ``total_inactive_file`` - ``total_active_file``; the limit is
      the lesser of ``memory.limit_in_bytes`` and ``hierarchical_memory_limit``, which includes
      groups outside of a container;
    - v2: ``memory.current`` - ``inactive_file`` - ``active_file`` - ``slab_reclaimable``; the limit
      is the lesser of ``memory.max`` (killed above it) and ``memory.high`` (throttled above it).

    The lists, not the ``cache`` or ``file`` counters: tmpfs and shared memory count as cache but
    are on the anon lists, and cannot be reclaimed without swap. Mapped and dirty file pages are on
    the file lists and can be reclaimed; locked pages are unevictable. Swap is never counted.
    Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst (5.2 stat file) and
    cgroup-v2.rst (Memory Interface Files); proc_pid_mountinfo(5), cgroups(7).

    RLIMIT_AS counts, too, less what the process has mapped.

    Raises:
        DeviceError: Linux without /proc/meminfo.
    """
    free, addresses = HostMemory(root).available_nbytes(), address_space_nbytes()
    return free if addresses is None else min(free, addresses)


def available_system_nbytes(root: Path = Path("/")) -> int:
    """Return MemAvailable less `LOCKED`: `available_host_nbytes` without cgroups.

    Raises:
        DeviceError: Linux without /proc/meminfo.
    """
    path = root / "proc/meminfo"
    meminfo = proc_fields(path)
    # kernels before 3.14 have no MemAvailable; MemFree understates it
    kib = meminfo.get("MemAvailable", meminfo.get("MemFree"))
    if kib is not None:
        return max(kib * 1024 - LOCKED.nbytes, 0)
    if sys.platform == "linux":
        raise DeviceError("host", f"{path} does not say what is free: state the budget in bytes")
    return system_free_nbytes()


class HostMemory:
    """A faster `available_host_nbytes` for repeated calls: groups are found when they change."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Look for groups under ``root``, which has ``/proc`` and the mount points."""
        self._root = root
        self._text = ""  # that names the process's groups
        self._groups: list[tuple[Path, _Hierarchy]] = []
        self._limits: list[list[int]] = []  # stated limits of each group
        self.changes = 0  # how often `is_changed` was true

    def available_nbytes(self) -> int:
        """Return `available_host_nbytes` now; raises the same error."""
        system_nbytes = available_system_nbytes(self._root)
        self.is_changed()
        locked_nbytes, innermost = LOCKED.nbytes, self._groups[:1]
        left = (
            _cgroup_available_nbytes(*group, limits)
            for group, limits in zip(self._groups, self._limits, strict=True)
            # the innermost knows limits of groups that are not visible
            if limits or group in innermost
        )
        return min([system_nbytes, *(max(n - locked_nbytes, 0) for n in left if n is not None)])

    def is_changed(self) -> bool:
        """Whether the process's groups, or their limits, have changed since the last call."""
        before = self._groups, self._limits
        text = file_text(self._root / "proc/self/cgroup")
        if text != self._text:
            self._text, self._groups = text, list(_cgroups(self._root, "memory"))
        self._limits = [_stated_limits(*group) for group in self._groups]
        is_changed = before != (self._groups, self._limits)
        self.changes += is_changed
        return is_changed


def first_that_fits(
    ways: Sequence[tuple[_Way, int]],
    largest: Sequence[tuple[str, int]] = (),
    *,
    reason: str = "",
) -> _Way:
    """Return the first alternative whose bytes fit into free host memory.

    ``ways`` lists (alternative, bytes needed), the preferred one first, which is returned if free
    memory is unknown. For the error: ``largest`` lists (name, bytes) of the largest allocations of
    the last alternative, and ``reason`` is its attribute.

    Raises:
        PlanInfeasibleError: none fits.
    """
    try:
        free_nbytes = available_host_nbytes()
    except DeviceError:
        return ways[0][0]
    for way, needed_nbytes in ways:
        if needed_nbytes <= free_nbytes:
            return way
    raise PlanInfeasibleError(
        "host", ways[-1][1], free_nbytes, limit="free memory", largest=largest, reason=reason
    )


def _stated_limits(directory: Path, kind: _Hierarchy) -> list[int]:
    """Return the limits in bytes that one cgroup has."""
    limits = (_number(directory / name) for name in _CONTROLLERS[kind].limits)
    return [limit for limit in limits if limit is not None and limit < _NO_LIMIT_NBYTES]


def _cgroup_available_nbytes(
    directory: Path, kind: _Hierarchy, limits: Sequence[int]
) -> int | None:
    """Return the free bytes of one cgroup with these limits; None if it has no limit."""
    controller = _CONTROLLERS[kind]
    before = _number(directory / controller.usage) or 0
    stat = proc_fields(directory / "memory.stat")
    after = _number(directory / controller.usage) or 0
    above = stat.get("hierarchical_memory_limit", _NO_LIMIT_NBYTES)  # v1 alone has it
    stated = [*limits, *([above] if above < _NO_LIMIT_NBYTES else [])]
    if not stated:
        return None
    # usage is read before and after: page cache may come or go between two reads
    usage_nbytes = min(before, after)
    reclaimable_nbytes = sum(stat.get(name, 0) for name in controller.reclaimable)
    return max(0, min(stated) - max(0, usage_nbytes - reclaimable_nbytes))


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process can keep busy: at least 1.

    The least of its affinity and, for its cpu cgroup and each visible ancestor (v1 and v2), the
    group's CPU time in a period, in CPUs, rounded up: half a CPU is worth another thread.

    - v1: ``cpu.cfs_quota_us`` / ``cpu.cfs_period_us``; a quota of -1 is no limit;
    - v2: the two numbers of ``cpu.max``, of which the first may be "max".

    Source: Linux, Documentation/scheduler/sched-bwc.rst and admin-guide/cgroup-v2.rst (CPU).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for directory, kind in _cgroups(root, "cpu"):
        names = ("cpu.max",) if kind == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        time = [_decimal(text) for name in names for text in file_text(directory / name).split()]
        quota, period = time if len(time) == 2 else (None, None)
        if quota and period:  # microseconds
            count = min(count, -(-quota // period))
    return max(1, count)


def _cgroups(root: Path, controller: str) -> Iterator[tuple[Path, _Hierarchy]]:
    """Yield this process's cgroups that may have a controller, innermost first, and their kinds."""
    own_paths: dict[_Hierarchy, str] = {}
    for line in file_text(root / "proc/self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own_paths["cgroup2"] = path
        elif controller in controllers.split(","):
            own_paths["cgroup"] = path
    mounted = list(mounts(file_text(root / "proc/self/mountinfo")))
    for kind, path in own_paths.items():
        inside = [
            (root / at.lstrip("/"), _below(path, top))
            for top, at, found, options in mounted
            if found == kind and (kind == "cgroup2" or controller in options.split(","))
        ]
        visible = [(at, below) for at, below in inside if below is not None]
        # if no mount shows this process's group (a namespace hides its path), the mount point is
        # the container's group
        for at, below in visible or [(at, ()) for at, _ in inside]:
            for depth in range(len(below), -1, -1):
                yield at.joinpath(*below[:depth]), kind


def _below(path: str, top: str) -> tuple[str, ...] | None:
    """Return the components of cgroup ``path`` below ``top``; None if it is not below."""
    parts, tops = ([part for part in text.split("/") if part] for text in (path, top))
    below = tuple(parts[len(tops) :])
    return below if parts[: len(tops)] == tops and ".." not in below else None


def _number(path: Path) -> int | None:
    """Return the number in a one-line file; None for "max", or if there is no such file."""
    return _decimal(file_text(path).strip())


def _decimal(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def proc_fields(path: Path) -> dict[str, int]:
    """Return a file's numbers by name; 12 for a line ``name 12`` or ``name: 12 kB``."""
    lines = (line.split() for line in file_text(path).split("\n"))
    return {
        line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()
    }


class Ledger:
    """The count of bytes held on each device, which refuses more than the budget; thread-safe.

    Bytes are reserved before they are allocated, at the size that the allocator takes, and
    released after they are freed. Device names compare as in `canonical_device`.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        """Open an account for each device, or for host staging (`STAGING`), with its most bytes.

        Raises:
            ValueError: a negative budget, or two names of one device.
        """
        self._budgets = dict(budgets)
        self._limits = {canonical_device(name): nbytes for name, nbytes in budgets.items()}
        if len(self._limits) < len(budgets):
            raise ValueError(f"two budgets for one device: {', '.join(budgets)}")
        for name, nbytes in budgets.items():
            if nbytes < 0:
                raise ValueError(f"the budget of {name} is negative: {nbytes}")
        self._held = dict.fromkeys(self._limits, 0)
        self._peak = dict.fromkeys(self._limits, 0)
        self._lock = Lock()

    @property
    def budgets(self) -> Mapping[str, int]:
        """Bytes that may be held, by device name as given."""
        return MappingProxyType(self._budgets)

    def held(self, device: str) -> int:
        """Return the bytes reserved on a device now."""
        return self._held[self._key(device)]

    def peak(self, device: str) -> int:
        """Return the most bytes that were ever reserved on a device at once."""
        return self._peak[self._key(device)]

    def reserve(self, device: str, nbytes: int, *, reason: str = "") -> None:
        """Count bytes before they are allocated; ``reason`` is for the error.

        Raises:
            BudgetExceededError: they do not fit; nothing was counted.
            LookupError: the ledger has no such device.
            ValueError: ``nbytes`` is negative.
        """
        key = self._key(device)
        if nbytes < 0:
            raise ValueError(f"{device}: cannot reserve {nbytes} bytes")
        with self._lock:
            held = self._held[key]
            if held + nbytes > self._limits[key]:
                raise BudgetExceededError(device, nbytes, held, self._limits[key], reason=reason)
            self._held[key] = held + nbytes
            self._peak[key] = max(self._peak[key], held + nbytes)

    def release(self, device: str, nbytes: int) -> None:
        """Subtract bytes after they are freed.

        Raises:
            LookupError: the ledger has no such device.
            ValueError: ``nbytes`` is negative or more than is held; nothing was counted.
        """
        key = self._key(device)
        with self._lock:
            if not 0 <= nbytes <= self._held[key]:
                raise ValueError(
                    f"{device}: cannot release {nbytes} bytes, {self._held[key]} are held"
                )
            self._held[key] -= nbytes

    @contextmanager
    def lease(self, device: str, nbytes: int, *, reason: str = "") -> Iterator[None]:
        """Reserve bytes inside the ``with``; see `reserve` for the errors."""
        self.reserve(device, nbytes, reason=reason)
        try:
            yield
        finally:
            self.release(device, nbytes)

    def _key(self, device: str) -> str:
        """Return a device's canonical name; raises LookupError if it has no budget."""
        key = canonical_device(device)
        if key not in self._limits:
            raise LookupError(
                f"the ledger has no budget for {device}; it has: {', '.join(self._budgets)}"
            )
        return key
