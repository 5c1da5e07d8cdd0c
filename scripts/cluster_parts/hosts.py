"""Hosts in network namespaces: a network of Linux machines, on one.

    with Cluster(4, link="1gbit", storage=Path("Llama-3-8B")) as cluster:
        process = cluster.exec(2, ["python", "program.py"])

Each host is a namespace for the network, for the host name and for what is mounted (its own
/etc/hosts), and one process that holds them. A cable (a veth pair) leads from its eth0 to a switch
(a bridge) in a namespace that has nothing else, so that nothing here has a name that the machine or
another cluster could know, and no packet leaves. Files and processes are the machine's.

Needs root (CAP_SYS_ADMIN), and Debian's iproute2, mount and util-linux.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import range_server
from boxes import Box, Boxes

from cluster_parts.keeper import inside, kill_inside, namespace

SCRIPTS = Path(__file__).resolve().parent.parent

#: Starts a command on a host, by the host's name and the environment that hosts have: for `mpirun`.
ENTER = SCRIPTS / "cluster_parts/enter"

STORAGE_NAME = "storage"
STORAGE_PORT = 8000
MOST_HOSTS = 250

_PREFIX_LEN = 16
_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "mount", "hostname")
_SYSTEM_PATHS = ("/usr/sbin", "/sbin")  # where Debian has `ip` and `tc`; not in every user's PATH
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")

# The name and the hosts file of a host; then it stays until its standard input ends. A file that is
# mounted stays when its name goes, so that there is no name to be removed later.
_HOLD = """
set -e
if [ -n "$1" ]; then
    hostname "$1"
    file="$(mktemp)"
    trap 'rm -f "$file"' EXIT
    printf '%s' "$2" >"$file"
    chmod 644 "$file"
    mount --bind "$file" /etc/hosts
    rm -f "$file"
    trap - EXIT
fi
echo ready
exec cat
"""

# In bits per second; a part of what tc(8) takes.
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit", re.IGNORECASE)
_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_BURST_S = 0.002
_LEAST_BURST_NBYTES = 2**17  # two of the largest packets that a veth pair carries
_QUEUE_MS = 50  # of a full queue; what comes then is lost, as in a switch


class NoClusterError(Exception):
    """No hosts can be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host."""

    name: str  # its host name; all know it
    address: str  # its IPv4 address, on eth0
    holder: int  # the process that holds its namespaces
    namespace: str  # its network namespace, as the kernel names it
    box: Box | None = None  # its memory cgroup, if memory is limited


class Cluster:
    """Hosts, a switch between them, and storage; removed on leaving, or when this process ends.

    Args:
        count: hosts, named node-0 and so on.
        link: the rate of each cable in either direction, as tc has it ("1gbit"); None: as it is.
        memory_nbytes: of each host, page cache included; None: the machine's.
        storage: a folder or a file that another host serves over HTTP, with ranges.
        storage_link: the rate of its cable, if another.
        debian_names: each host finds itself at 127.0.1.1, as Debian's installer writes it, and so
            not at an address that others can use.

    Attributes:
        hosts: by rank.
        switch: the process that holds the switch's namespace; host i is at its port i.
        storage_url: what is served there.

    Raises:
        NoClusterError: there is no right to make namespaces, or a program is not installed.
        boxes.NoBoxesError: memory is limited, and cgroups cannot be made.
    """

    def __init__(
        self,
        count: int,
        *,
        link: str | None = None,
        memory_nbytes: int | None = None,
        storage: Path | None = None,
        storage_link: str | None = None,
        debian_names: bool = False,
    ) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"from 1 to {MOST_HOSTS} hosts, not {count}")
        rates = [_bits_per_second(rate) for rate in (link, storage_link or link)]
        self.hosts: tuple[Host, ...] = ()
        self.storage_url: str | None = None
        _need_programs()
        self._holders: list[subprocess.Popen[str]] = []
        self._programs: list[tuple[int, subprocess.Popen[Any]]] = []
        self._server: range_server.Serving | None = None
        self._keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "cluster_parts.keeper"],
            env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            names = [f"node-{index}" for index in range(count)]
            if storage is not None:
                names.append(STORAGE_NAME)
            made = self._make(names, debian_names)
            self._connect(made, rates)
            self.hosts = made[:count]
            if memory_nbytes is not None:
                boxes = Boxes()
                self.hosts = tuple(self._boxed(host, boxes, memory_nbytes) for host in self.hosts)
            if storage is not None:
                where, within = (made[count].address, STORAGE_PORT), _within(made[count].holder)
                self._server = range_server.start(storage, where, prefix=within)
                part = storage.name if storage.is_file() else ""
                self.storage_url = f"http://{STORAGE_NAME}:{STORAGE_PORT}/{part}"
        except BaseException:
            self.close()
            raise

    def exec(
        self,
        host: int,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host; the process is the program itself, and can be killed.

        Args:
            host: its number.
            argv: the program and its arguments.
            env: more environment variables than `environment` has.
            **options: of `subprocess.Popen`.
        """
        process = subprocess.Popen(
            [ENTER, self.hosts[host].name, "exec " + shlex.join(os.fspath(word) for word in argv)],
            env={**self.environment(), **(env or {})},
            start_new_session=True,  # Ctrl-C at the terminal goes to the maker of the cluster
            **options,
        )
        self._programs.append((host, process))
        return process

    def environment(self) -> dict[str, str]:
        """The environment of programs on hosts: this process's, but for proxies, and the storage.

        With what `ENTER` needs to know.
        """
        env = {name: v for name, v in os.environ.items() if name.lower() not in _PROXIES}
        env["PATH"] = _path()
        env["CLUSTER_HOSTS"] = "\n".join(
            f"{host.name} {host.holder} {host.box.procs if host.box else '-'}"
            for host in self.hosts
        )
        if self.storage_url is not None:
            env["STREAMLOAD_URL"] = self.storage_url
        return env

    def kill(self, host: int) -> None:
        """Take a host away as a power cut does: the others hear nothing more of it."""
        self.link_down(host)  # the kernel says good-bye for processes that are killed
        for where, program in self._programs:
            if where == host:
                program.kill()  # it may be on its way in
        kill_inside({self.hosts[host].namespace}, {self.hosts[host].holder})

    def link_down(self, host: int) -> None:
        """Pull the cable of a host."""
        self._ip(self.switch, f"link set port{host} down")

    def link_up(self, host: int) -> None:
        """Plug it in again."""
        self._ip(self.switch, f"link set port{host} up")

    def processes(self, host: int) -> list[int]:
        """The ids of the processes that run on a host."""
        found = self.hosts[host]
        return [pid for pid in inside({found.namespace}) if pid != found.holder]

    def served(self) -> range_server.Counts:
        """What the storage has sent."""
        if self._server is None:
            raise ValueError("this cluster has no storage")
        return self._server.counts()

    def close(self) -> None:
        """Remove all of it, and end what runs there."""
        assert self._keeper.stdin
        self._keeper.stdin.close()
        self._keeper.wait()
        for holder in self._holders:
            holder.communicate()  # closes its input: one that never was ready ends by that
        if self._server is not None:
            self._server.close()
        for _, program in self._programs:
            program.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    # -- how it is made --------------------------------------------------------------------------

    def _make(self, names: Sequence[str], debian_names: bool) -> tuple[Host, ...]:
        """Hosts without a network, and the switch."""
        addresses = {name: f"10.77.{n >> 8}.{n & 255}" for n, name in enumerate(names, start=1)}
        self.switch = self._hold("", "")
        hosts = []
        for name, address in addresses.items():
            known = addresses | ({name: "127.0.1.1"} if debian_names else {})
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            content = "\n".join(lines + [f"{where} {who}" for who, where in known.items()]) + "\n"
            hosts.append(Host(name, address, self._hold(name, content), ""))
        for holder in self._holders:
            assert holder.stdout
            said = holder.stdout.readline()
            if said != "ready\n":
                said += holder.communicate()[0]
                raise NoClusterError(f"no namespaces can be made: {said.strip()}")
            self._remember("namespace", namespace(holder.pid))
        return tuple(replace(host, namespace=namespace(host.holder)) for host in hosts)

    def _connect(self, hosts: Sequence[Host], rates: Sequence[float | None]) -> None:
        """Cables and addresses; rates are of a node's cable and of the storage's, in bit/s."""
        self._ip(
            self.switch,
            "link set lo up",
            "link add bridge type bridge",
            "link set bridge up",
            *(
                line
                for index, host in enumerate(hosts)
                for line in (
                    f"link add port{index} type veth peer name eth0 netns {host.holder}",
                    f"link set port{index} master bridge up",
                )
            ),
        )
        for index, host in enumerate(hosts):
            self._ip(
                host.holder,
                "link set lo up",
                f"addr add {host.address}/{_PREFIX_LEN} dev eth0",
                "link set eth0 up",
            )
            rate = rates[host.name == STORAGE_NAME]
            if rate is not None:
                self._shape(host.holder, "eth0", rate)
                self._shape(self.switch, f"port{index}", rate)

    def _hold(self, name: str, hosts_file: str) -> int:
        """Begin namespaces; the process that holds them."""
        kinds = ("--net", "--uts", "--mount", "--propagation", "private")
        holder = subprocess.Popen(
            ["unshare", *kinds, "--", "sh", "-c", _HOLD, "sh", name, hosts_file],
            env=os.environ | {"PATH": _path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._holders.append(holder)
        return holder.pid

    def _remember(self, kind: str, what: str) -> None:
        assert self._keeper.stdin
        self._keeper.stdin.write(f"{kind} {what}\n")
        self._keeper.stdin.flush()

    def _boxed(self, host: Host, boxes: Boxes, memory_nbytes: int) -> Host:
        box = boxes.make(memory_nbytes)
        self._remember("box", str(box.folder))
        return replace(host, box=box)

    def _ip(self, holder: int, *lines: str) -> None:
        self._configure("ip", holder, *lines)

    def _shape(self, holder: int, device: str, bits_per_second: float) -> None:
        """Let no more than this leave by a device; source: tc-tbf(8)."""
        burst = max(_LEAST_BURST_NBYTES, math.ceil(bits_per_second / 8 * _BURST_S))
        self._configure(
            "tc",
            holder,
            f"qdisc add dev {device} root tbf "
            f"rate {bits_per_second:.0f}bit burst {burst} latency {_QUEUE_MS}ms",
        )

    def _configure(self, tool: str, holder: int, *lines: str) -> None:
        done = subprocess.run(
            [*_within(holder), tool, "-batch", "-"],
            env=os.environ | {"PATH": _path()},
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise NoClusterError(f"{tool} failed: {(done.stderr or done.stdout).strip()}")


def _within(holder: int) -> tuple[str, ...]:
    """What a command is an argument of that runs on a host."""
    return ("nsenter", "--target", str(holder), "--net", "--uts", "--")


def _path() -> str:
    return os.pathsep.join((os.environ.get("PATH", os.defpath), *_SYSTEM_PATHS))


def _need_programs() -> None:
    """Raise NoClusterError where a program is missing that makes networks."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        raise NoClusterError(
            f"not installed: {', '.join(missing)} (Debian: iproute2, mount, util-linux, hostname)"
        )


def _bits_per_second(rate: str | None) -> float | None:
    if rate is None:
        return None
    found = _RATE.fullmatch(rate)
    if found is None or not float(found[1]):
        raise ValueError(f"a rate is like 1gbit or 100mbit, not {rate!r}")
    return float(found[1]) * _RATE_UNITS[found[2].lower()]
