"""Budgets as users write them, what is free in real and laid-out systems, and the ledger."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamload
from streamload.core.memory import (
    DEFAULT_HOST_NBYTES,
    STAGING,
    Budget,
    Ledger,
    Size,
    available_cpus,
    available_host_nbytes,
    canonical_device,
    reserve_nbytes,
)
from streamload.errors import BudgetExceededError, DeviceError

MIB, GIB = 2**20, 2**30
V1_UNLIMITED = 2**63 - 4096

# --- Budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "device", "size"),
    [
        (3_000_000_000, "CL", Size(3_000_000_000)),
        ("3GB", "anything", Size(3_000_000_000)),
        (" 2.5 gib ", "CL", Size(5 * 2**29)),
        ("80%", "CL", Size(fraction=0.8)),
        (" 33.3 % ", "CL", Size(fraction=0.333)),
        ("100%", "CL", Size(fraction=1.0)),
        (None, "CL", None),
        ({}, "CL", None),
        ({"CL": "3GB", "CPU": "80%"}, "CPU", Size(fraction=0.8)),
        ({"CL": "3GB", "CPU": "80%"}, "CUDA", None),
        ({"CL": None}, "CL", None),
        ({"CL:0": "1GB", "CL:1": "2GB"}, "tinygrad:cl", Size(10**9)),
        ({"CL:0": "1GB", "CL:1": "2GB"}, "cl:1", Size(2 * 10**9)),
        ({"torch:cuda": "1GB"}, "CUDA:0", Size(10**9)),
        ("3GB", STAGING, Size(DEFAULT_HOST_NBYTES)),
    ],
)
def test_what_users_write(value: object, device: str, size: Size | None) -> None:
    assert Budget.parse(value).for_device(device) == size  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        *((3e9, 3 * 10**9), (0.8 * 7_000_000_003, 5_600_000_002), (1.5, 1)),
        *((np.int64(3 * 10**9), 3 * 10**9), (np.uint8(7), 7), (np.float32(2**30), 2**30)),
    ],
)
def test_numbers_are_budgets(value: float, nbytes: int) -> None:
    """Floats and numpy's numbers too, as they come out of a computation; fractions are dropped."""
    size = Budget.parse(value).default
    assert size == Size(nbytes)
    assert size is not None and type(size.nbytes) is int


def test_a_part_of_what_is_free_is_written_with_a_percent_sign() -> None:
    """A number below 1 is no number of bytes: the error says what is."""
    with pytest.raises(ValueError, match='write "80%"'):
        Budget(0.8)


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, 0.8, True, b"3GB", ["3GB"], ("CL", "3GB")),
        *("0", "0GB", "-3GB", "0%", "101%", "100.00000000000000000001%", "-5%", "%", ""),
        *("3 XB", "80 percent", "nan", "1e9"),
        *({"CL": 0}, {"CL": "0%"}, {"CL": 0.5}, {"CL": {"a": 1}}, {"CL": "3GB", "cl:0": "2GB"}),
        *({1: "3GB"}, {"": "3GB"}, {"torch:": "3GB"}, {"staging": "64MiB"}),
    ],
    ids=repr,
)
def test_what_is_no_budget(value: object) -> None:
    """Everything else is one ValueError that says what is wrong."""
    with pytest.raises(ValueError, match=r"budget|device|host"):
        Budget.parse(value)  # type: ignore[arg-type]


def test_host_staging_has_a_side_of_its_own() -> None:
    """It is 64 MiB unless stated, in bytes, whatever the devices get."""
    assert Budget("3GB").host_nbytes == 64 * MIB
    budget = Budget(None, host="32MiB")
    assert (budget.host_nbytes, budget.default) == (32 * MIB, None)
    assert budget.resolve(STAGING, None) == 32 * MIB
    for host in (0, "0", "50%", "lots"):
        with pytest.raises(ValueError, match=r"budget|staging"):
            Budget("3GB", host=host)


def test_host_staging_is_never_under_eight_mebibytes() -> None:
    """Less is refused with both numbers, not planned as something that nobody asked for."""
    assert Budget(host="8MiB").host_nbytes == 8 * MIB
    for host in (1, "8MB", 8 * MIB - 1):
        with pytest.raises(ValueError, match="at least 8MiB") as caught:
            Budget("3GB", host=host)
        assert str(host) in str(caught.value)


@pytest.mark.parametrize("devices", [None, "3GB", "33.3%", {"CL:0": "80%", "CPU": 5, "x": None}])
def test_the_line_that_gives_the_host_more(devices: Any) -> None:
    """It is source text: the same budget, with as many MiB, and never fewer than it takes."""
    for nbytes, host in ((1, 8), (9 * MIB + 1, 10)):
        line = Budget(devices, host="8MiB").with_host(nbytes)
        found = eval(f"dict({line})", {"streamload": streamload})["budget"]
        assert found == Budget(devices, host=host * MIB)


def test_a_budget_is_plain_frozen_data() -> None:
    budget = Budget({"CPU": "80%", "CL:0": "3GB"}, host="32MiB")
    assert budget == Budget({"tinygrad:CL": 3 * 10**9, "cpu": "80.0%"}, host=32 * MIB)
    assert hash(budget) == hash(pickle.loads(pickle.dumps(budget)))
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert Budget.parse(budget) is budget
    assert budget.devices == {"cl": Size(3 * 10**9), "cpu": Size(fraction=0.8)}
    with pytest.raises(AttributeError):
        budget.host_nbytes = 1  # type: ignore[misc]


def test_resolving_needs_what_is_free_only_where_it_matters() -> None:
    budget = Budget({"CL": "3GB", "CPU": "80%"})
    assert [budget.is_stated(device) for device in ("CL", "CPU", "CUDA", STAGING)] == (
        [True, False, False, True]
    )
    assert budget.resolve("CL:0", None) == 3 * 10**9
    assert budget.resolve("CPU", 10**10 + 7) == 8 * 10**9 + 5  # 0.8 of 7 is 5.6
    assert budget.resolve("CUDA", 100 * 10**9) == 95 * 10**9
    assert budget.resolve("CPU", 0) == budget.resolve("CUDA", 0) == 0
    for device in ("CPU", "CUDA"):
        for free in (None, -1):
            with pytest.raises(ValueError, match=f"{device}.*state it in bytes"):
                budget.resolve(device, free)


@given(percent=st.integers(1, 10_000), free=st.integers(0, 2**60))
def test_percentages_are_exact(percent: int, free: int) -> None:
    text = f"{percent // 100}.{percent % 100:02}%"
    assert Budget(text).resolve("CL", free) == percent * free // 10_000


@pytest.mark.parametrize("size", [{}, {"nbytes": 1, "fraction": 0.5}, {"nbytes": 0}])
def test_a_size_is_one_of_two(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"size|budget"):
        Size(**size)


@given(free=st.integers(0, 2**50), more=st.integers(0, 2**50))
def test_the_reserve_leaves_room_on_both_sides(free: int, more: int) -> None:
    """At least half is left for the load; with more free, neither side shrinks."""
    kept, left = reserve_nbytes(free), free - reserve_nbytes(free)
    assert 0 <= kept <= left + 1
    assert kept <= reserve_nbytes(free + more)
    assert left <= free + more - reserve_nbytes(free + more)


def test_the_reserve_of_known_boxes() -> None:
    """A large device keeps 5% and at least 1 GiB; a small one 16 MiB and 2%; none over half."""
    assert reserve_nbytes(80 * 10**9) == 4 * 10**9
    assert reserve_nbytes(16 * GIB) == GIB
    assert reserve_nbytes(3 * 10**9) == 16 * MIB + 60 * 10**6
    assert reserve_nbytes(500 * 10**6) == 16 * MIB + 10 * 10**6
    assert reserve_nbytes(20 * MIB) == 10 * MIB


def test_canonical_names() -> None:
    """Case, a framework's prefix and the index 0 make no other device; other indices do."""
    same = ("CL", "cl", "CL:0", "tinygrad:CL", "Tinygrad:cl:0", " CL ")
    assert {canonical_device(name) for name in same} == {"cl"}
    assert canonical_device("torch:cuda:1") == "cuda:1"
    assert canonical_device("CL:10") == "cl:10"
    assert canonical_device(STAGING) == STAGING


# --- what is free: laid-out systems ---------------------------------------------------------------


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available_nbytes: int) -> dict[str, str]:
    return {
        "proc/meminfo": f"MemTotal:       99999999 kB\nMemFree:        12 kB\n"
        f"MemAvailable:   {available_nbytes // 1024} kB\nHugePages_Total:       0\n"
    }


def v1(group: str, limit: int, usage: int, *, file: int = 0, hierarchical: int = V1_UNLIMITED,
       at: str = "sys/fs/cgroup/memory") -> dict[str, str]:  # fmt: skip
    """The files of a v1 group; all of the file pages are in groups below it."""
    return {
        f"{at}{group}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}{group}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}{group}/memory.stat": f"cache {file + 999}\ninactive_file 0\nactive_file 0\n"
        f"hierarchical_memory_limit {hierarchical}\ntotal_cache {file + 999}\n"
        f"total_inactive_file {file // 2}\ntotal_active_file {file - file // 2}\n",
    }


def v2(group: str, limit: int | str, usage: int, *, file: int = 0, high: int | str = "max",
       at: str = "sys/fs/cgroup") -> dict[str, str]:  # fmt: skip
    """The files of a v2 group."""
    return {
        f"{at}{group}/memory.max": f"{limit}\n",
        f"{at}{group}/memory.high": f"{high}\n",
        f"{at}{group}/memory.current": f"{usage}\n",
        f"{at}{group}/memory.stat": f"anon 1\nfile {file + 999}\nshmem 999\n"
        f"inactive_file {file // 2}\nactive_file {file - file // 2}\nslab_reclaimable 0\n",
    }


def mount(kind: str, at: str, top: str = "/") -> str:
    """A line of /proc/self/mountinfo for the memory controller."""
    source = "cgroup2 cgroup2 rw,nsdelegate" if kind == "v2" else "cgroup cgroup rw,memory"
    return f"35 31 0:32 {top} {at} rw,relatime shared:9 - {source}\n"


V1_MOUNT = mount("v1", "/sys/fs/cgroup/memory")
V2_MOUNT = mount("v2", "/sys/fs/cgroup")
OTHER_MOUNTS = (
    "23 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
)

SYSTEMS: dict[str, tuple[dict[str, str], int]] = {
    "no cgroups at all": (meminfo(5 * GIB), 5 * GIB),
    "v1 without limits": (
        meminfo(5 * GIB)
        | {"proc/self/cgroup": "4:memory:/\n1:cpu:/\n", "proc/self/mountinfo": V1_MOUNT}
        | v1("", V1_UNLIMITED, 7 * GIB),
        5 * GIB,
    ),
    "v1, page cache does not count and shared memory does": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "4:cpu,memory:/box\n", "proc/self/mountinfo": V1_MOUNT}
        | v1("/box", 3 * GIB, 2 * GIB, file=GIB),
        2 * GIB,
    ),
    "v1, nested: the fuller group above is the limit": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "4:memory:/pod/a/b\n",
            "proc/self/mountinfo": OTHER_MOUNTS + V1_MOUNT,
        }
        | v1("/pod", 4 * GIB, 3 * GIB)
        | v1("/pod/a", V1_UNLIMITED, 100 * MIB)
        | v1("/pod/a/b", 2 * GIB, 100 * MIB),
        GIB,
    ),
    "v1, a limit above the mount, which only memory.stat knows": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            "proc/self/mountinfo": mount("v1", "/sys/fs/cgroup/memory", "/docker/abc"),
        }
        | v1("", V1_UNLIMITED, GIB, hierarchical=3 * GIB),
        2 * GIB,
    ),
    "v1, a path that is not visible under the mount": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "4:memory:/docker/abc/init\n",
            "proc/self/mountinfo": mount("v1", "/sys/fs/cgroup/memory", "/docker/xyz"),
        }
        | v1("", 2 * GIB, GIB),
        GIB,
    ),
    "v2 with max": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/user.slice/x\n", "proc/self/mountinfo": V2_MOUNT}
        | v2("/user.slice", "max", 9 * GIB)
        | v2("/user.slice/x", "max", GIB),
        50 * GIB,
    ),
    "v2, nested limits, the reclaimable apart": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": OTHER_MOUNTS + V2_MOUNT}
        | v2("/a", 6 * GIB, 5 * GIB, file=3 * GIB)
        | v2("/a/b", 5 * GIB, 4 * GIB, file=3 * GIB),
        4 * GIB,
    ),
    "v2, memory.high throttles before memory.max kills": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
        | v2("/a", 6 * GIB, GIB, high=3 * GIB),
        2 * GIB,
    ),
    "v2 in a cgroup namespace: the mount point is the container": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT}
        | v2("", 3 * GIB, GIB),
        2 * GIB,
    ),
    "v2, moved out of the namespace's root": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": V2_MOUNT}
        | v2("", 3 * GIB, GIB)
        | v2("", 1, 1, at="sys/fs/other"),
        2 * GIB,
    ),
    "v2, mounted from above the namespace": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "0::/in\n",
            "proc/self/mountinfo": mount("v2", "/sys/fs/cgroup", "/../.."),
        }
        | v2("", 3 * GIB, GIB),
        2 * GIB,
    ),
    "hybrid: memory in v1, v2 there without it": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "4:memory:/box\n0::/session\n",
            "proc/self/mountinfo": V1_MOUNT + mount("v2", "/sys/fs/cgroup/unified"),
            "sys/fs/cgroup/unified/session/cgroup.procs": "1\n",
        }
        | v1("/box", 3 * GIB, GIB),
        2 * GIB,
    ),
    "hybrid: memory in v2": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "1:name=systemd:/\n0::/box\n",
            "proc/self/mountinfo": OTHER_MOUNTS + mount("v2", "/sys/fs/cgroup/unified"),
        }
        | v2("/box", 3 * GIB, GIB, at="sys/fs/cgroup/unified"),
        2 * GIB,
    ),
    "another container's mount does not count where the own group is visible": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "0::/a\n",
            "proc/self/mountinfo": V2_MOUNT + mount("v2", "/var/merged/cgroup", "/b"),
        }
        | v2("/a", 3 * GIB, GIB)
        | v2("", MIB, MIB, at="var/merged/cgroup"),
        2 * GIB,
    ),
    "a group that was removed, and a mount point with a space": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "0::/a/gone (deleted)\n",
            "proc/self/mountinfo": mount("v2", "/my\\040cgroups"),
        }
        | v2("/a", 3 * GIB, GIB, at="my cgroups"),
        2 * GIB,
    ),
    "a name that begins like another": (
        meminfo(50 * GIB)
        | {
            "proc/self/cgroup": "0::/box2\n",
            "proc/self/mountinfo": mount("v2", "/sys/fs/cgroup", "/box") + V2_MOUNT,
        }
        | v2("/box2", 3 * GIB, GIB)
        | v2("", 2 * MIB, MIB, at="sys/fs/cgroup/2"),
        2 * GIB,
    ),
    "more is used than allowed": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
        | v2("/a", GIB, 2 * GIB),
        0,
    ),
    "stat ran ahead of usage": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
        | v2("/a", GIB, MIB, file=2 * MIB),
        GIB,
    ),
    "a limit without usage or stat": (
        meminfo(50 * GIB)
        | {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
        | {"sys/fs/cgroup/a/memory.max": str(GIB)},
        GIB,
    ),
    "lines that are not understood": (
        meminfo(5 * GIB)
        | {"proc/self/cgroup": "\nx\n4:memory\n", "proc/self/mountinfo": "\n1 2 3\na - b\n"},
        5 * GIB,
    ),
    "a kernel without MemAvailable": ({"proc/meminfo": "MemFree:  1024 kB\n"}, MIB),
}


@pytest.mark.parametrize(("files", "expected_nbytes"), SYSTEMS.values(), ids=SYSTEMS)
def test_what_is_available(tmp_path: Path, files: dict[str, str], expected_nbytes: int) -> None:
    """The least over the system and every group above the process, in every layout."""
    assert available_host_nbytes(lay_out(tmp_path, files)) == expected_nbytes


def test_a_system_that_does_not_say_what_is_free(tmp_path: Path) -> None:
    """Without /proc/meminfo there is no guess: the error asks for bytes."""
    with pytest.raises(DeviceError, match="state the budget in bytes"):
        available_host_nbytes(tmp_path)


# --- what is free: this system --------------------------------------------------------------------

BOX_NBYTES = 300 * 10**6

CHILD = """
import json, mmap, os, sys
from pathlib import Path
from typing import Any
procs, data, usage_file = sys.argv[1:]
Path(procs).write_text(str(os.getpid()))
from streamload.core.memory import available_host_nbytes
def usage(): return int(Path(usage_file).read_text())
out = {"start": available_host_nbytes(), "start_usage": usage()}
block = os.urandom(2**20)
with open(data, "wb") as file:
    for _ in range(150): file.write(block)
    file.flush()
    os.fsync(file.fileno())
with open(data, "rb") as file:
    while file.read(2**20): pass
out |= {"cached": available_host_nbytes(), "cached_usage": usage()}
anon = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 2**26, 4096): anon[at] = 1
out["anon"] = available_host_nbytes()
shared = mmap.mmap(-1, 2**26)  # shared anonymous memory lives in tmpfs
for at in range(0, 2**26, 4096): shared[at] = 1
out["shared"] = available_host_nbytes()
print(json.dumps(out))
"""


@contextmanager
def own_group(controller: str, *limits: tuple[str, str]) -> Iterator[tuple[Path, int]]:
    """A cgroup below this process's own, by v1 or by v2: its folder, and the number of its limit.

    ``limits`` are the files of either, and what is written there.
    """
    own = dict.fromkeys((controller, ""), "/")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    parents = (f"/sys/fs/cgroup/{controller}{own[controller]}", f"/sys/fs/cgroup{own['']}")
    reasons = []
    for number, (parent, (file, text)) in enumerate(zip(parents, limits, strict=True)):
        folder = Path(parent) / f"streamload-{controller}-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        try:
            try:
                (folder / file).write_text(text)
                (folder / "cgroup.procs").read_text()
            except OSError as error:  # v2 where the controller is not delegated
                reasons.append(str(error))
                continue
            yield folder, number
            return
        finally:
            folder.rmdir()
    pytest.skip(f"no {controller} cgroup can be made here: {'; '.join(reasons)}")


def test_inside_a_real_cgroup(tmp_path: Path) -> None:
    """A box limits what is available; page cache does not take from it, memory in use does."""
    limits = (("memory.limit_in_bytes", str(BOX_NBYTES)), ("memory.max", str(BOX_NBYTES)))
    with own_group("memory", *limits) as (folder, number):
        usage = folder / ("memory.usage_in_bytes", "memory.current")[number]
        found = json.loads(forked.fresh(CHILD, folder / "cgroup.procs", tmp_path / "data", usage))
    slack_nbytes = 16 * 10**6  # the interpreter, counters kept per CPU, pages under writeback
    assert BOX_NBYTES - 100 * 10**6 < found["start"] < BOX_NBYTES
    if found["cached_usage"] - found["start_usage"] < 100 * MIB:
        pytest.skip("the temporary directory keeps nothing in this box's page cache")
    assert abs(found["cached"] - found["start"]) < slack_nbytes
    assert abs(found["cached"] - found["anon"] - 64 * MIB) < slack_nbytes
    assert abs(found["anon"] - found["shared"] - 64 * MIB) < slack_nbytes


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc here")
def test_this_system() -> None:
    """On this very system: more than nothing, and less than all of its memory."""
    assert 0 < available_host_nbytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- CPUs -----------------------------------------------------------------------------------------


def cpu_v1(group: str, quota: object, period: object = 100_000) -> dict[str, str]:
    at = f"sys/fs/cgroup/cpu{group}"
    return {f"{at}/cpu.cfs_quota_us": f"{quota}\n", f"{at}/cpu.cfs_period_us": f"{period}\n"}


def cpu_v2(group: str, quota: object, period: object = 100_000) -> dict[str, str]:
    return {f"sys/fs/cgroup{group}/cpu.max": f"{quota} {period}\n"}


CPU_MOUNT = V1_MOUNT.replace("memory", "cpu")
MANY = 10**9  # as many as there are
CPUS = {
    "no cgroups at all": ({}, MANY),
    "v1: no limit": (
        {"proc/self/cgroup": "1:cpu:/\n", "proc/self/mountinfo": CPU_MOUNT} | cpu_v1("", -1),
        MANY,
    ),
    "v1: one and a half are two threads' worth": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/box\n", "proc/self/mountinfo": CPU_MOUNT}
        | cpu_v1("/box", 150_000),
        2,
    ),
    "v1: a tenth is one": (
        {"proc/self/cgroup": "4:cpu:/box\n", "proc/self/mountinfo": CPU_MOUNT}
        | cpu_v1("/box", 5000, 50_000),
        1,
    ),
    "v1: the parent has less": (
        {"proc/self/cgroup": "4:cpu:/pod/a\n", "proc/self/mountinfo": CPU_MOUNT}
        | cpu_v1("/pod/a", 10**9)
        | cpu_v1("/pod", 100_000)
        | cpu_v1("", -1),
        1,
    ),
    "v1: the group of another controller does not count": (
        {
            "proc/self/cgroup": "5:memory:/box\n4:cpu:/\n",
            "proc/self/mountinfo": V1_MOUNT + CPU_MOUNT,
        }
        | cpu_v1("", -1)
        | {"sys/fs/cgroup/memory/box/cpu.cfs_quota_us": "1000\n"},
        MANY,
    ),
    "v2: no limit": (
        {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT} | cpu_v2("/a", "max"),
        MANY,
    ),
    "v2: two, above one without a limit": (
        {"proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": V2_MOUNT}
        | cpu_v2("/a", 100_001)
        | cpu_v2("/a/b", "max"),
        2,
    ),
    "v2: a file that is not understood": (
        {"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNT}
        | {"sys/fs/cgroup/a/cpu.max": "some 0\n"},
        MANY,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CPUS.values(), ids=CPUS)
def test_cpus(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """The least over the affinity and every group above the process; never none."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert available_cpus(lay_out(tmp_path, files)) == min(expected, here or 1)


IN_CPU_BOX = """
import os, sys
from pathlib import Path
from typing import Any
from streamload.core.memory import available_cpus
Path(sys.argv[1]).write_text(str(os.getpid()))
print(available_cpus())
"""


def test_cpus_inside_a_real_cgroup() -> None:
    """A group with the time of one CPU has one, whatever the machine has."""
    with own_group("cpu", ("cpu.cfs_quota_us", "100000"), ("cpu.max", "100000 100000")) as group:
        assert forked.fresh(IN_CPU_BOX, group[0] / "cgroup.procs") == "1\n"


# --- Ledger ---------------------------------------------------------------------------------------


def test_the_ledger_counts_and_refuses() -> None:
    ledger = Ledger({"CL": 100, STAGING: 10})
    ledger.reserve("CL", 60)
    ledger.reserve("tinygrad:cl:0", 40)
    with pytest.raises(BudgetExceededError, match="grew since") as caught:
        ledger.reserve("CL", 1, reason="it grew since the plan was made")
    error = caught.value
    assert (error.device, error.requested_nbytes, error.held_nbytes, error.budget_nbytes) == (
        ("CL", 1, 100, 100)
    )
    assert (ledger.held("CL"), ledger.held(STAGING)) == (100, 0)
    ledger.release("CL", 70)
    ledger.reserve("CL", 0)
    assert (ledger.held("CL"), ledger.peak("CL"), ledger.peak(STAGING)) == (30, 100, 0)
    assert ledger.budgets == {"CL": 100, STAGING: 10}


def test_a_lease_ends_with_its_block() -> None:
    ledger = Ledger({"CL": 100})
    with ledger.lease("CL", 80):
        assert ledger.held("CL") == 80
        with pytest.raises(BudgetExceededError), ledger.lease("CL", 21):
            pytest.fail("was let in")
        assert ledger.held("CL") == 80
    with pytest.raises(KeyError), ledger.lease("CL", 100):
        raise KeyError
    assert (ledger.held("CL"), ledger.peak("CL")) == (0, 100)


def test_misuse_of_the_ledger() -> None:
    ledger = Ledger({"CL": 100, "CPU": 5})
    ledger.reserve("CL", 10)
    with pytest.raises(LookupError, match="no budget for CUDA; it has: CL, CPU"):
        ledger.reserve("CUDA", 1)
    for call, nbytes in ((ledger.reserve, -1), (ledger.release, -1), (ledger.release, 11)):
        with pytest.raises(ValueError, match=f"CL.*{nbytes} bytes"):
            call("CL", nbytes)
    assert ledger.held("CL") == 10
    with pytest.raises(ValueError, match="two budgets for one device"):
        Ledger({"CL": 1, "cl:0": 1})
    with pytest.raises(ValueError, match="negative"):
        Ledger({"CL": -1})


class Yielding(int):
    """A size that lets other threads run in the middle of each sum that it is part of."""

    def __radd__(self, other: int) -> int:
        time.sleep(0)
        return other + int(self)

    def __rsub__(self, other: int) -> int:
        time.sleep(0)
        return other - int(self)


def test_the_ledger_under_threads() -> None:
    ledger = Ledger({"CL": 1000})
    start = threading.Barrier(8)
    refused = [False] * 8
    seen_nbytes = [0] * 8

    def work(me: int) -> None:
        start.wait()
        for turn in range(500):
            nbytes = Yielding((turn * 37 + me * 101) % 400)
            try:
                with ledger.lease("CL", nbytes):
                    seen_nbytes[me] = max(seen_nbytes[me], ledger.held("CL"))
                    time.sleep(0)
            except BudgetExceededError:
                refused[me] = True

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert ledger.held("CL") == 0
    assert 0 < max(seen_nbytes) <= ledger.peak("CL") <= 1000
    assert any(refused)
