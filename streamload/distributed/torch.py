"""A group over torch.distributed: a new gloo group, with a timeout of its own.

Ranks meet in a store: that of the program's process group, if there is one, else that of the
launcher (``env://``). No group of the program is used, counted or changed.
"""

from __future__ import annotations

import atexit
import ctypes
import ipaddress
import os
import re
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from streamload.distributed.group import (
    Engine,
    Launch,
    Met,
    ProcessGroup,
    check_blocks,
    lost,
    poll,
    unmet,
)
from streamload.distributed.store import SharedStore, gloo_interfaces, interface_address, open_store
from streamload.errors import NodeError, PeerFailedError

_NAPS_S = (2e-4, 5e-3)  # shortest and longest sleep between polls of a collective
_NAP_SHARE = 0.1  # length of a sleep, as a share of the time waited so far
_LOOK_S = 0.05  # between polls for other ranks
_FAREWELL_S = 3.0  # at most, for the others to see which ranks did not come
_AWAY = "away"  # value of a rank that did not come
_TWICE = "twice"  # key of the error "two processes have one rank"
_ME = secrets.token_hex(8)  # distinguishes processes with equal ids, in containers

#: The launcher's stores, by (meeting, rank, size), never closed: rank 0 may serve one on a port
#: that the program's own init_process_group shares, before or after.
_launched: dict[tuple[str, int, int], Any] = {}


class TorchGroup(Engine):
    """A group by gloo's collectives on host memory."""

    engine = "torch"
    _errors = (RuntimeError,)  # gloo's only kind: a timeout, a broken connection

    def __init__(self, gloo: Any, timeout: float, address: str = "") -> None:
        super().__init__(gloo, gloo.rank(), gloo.size())
        self.store: SharedStore = open_store(self, timeout, address)

    def _broadcast(self, part: memoryview, root: int) -> None:
        self._begin("broadcast", _bytes_of(part), root)()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """See `ProcessGroup.all_gather_begin`; a thread of gloo runs it."""
        check_blocks(mine, out, self.size)
        if not mine.nbytes:
            return lambda: None
        newer, older = "all_gather_single", "_allgather_base"
        name = newer if hasattr(self._library, newer) else older
        return self._begin(name, _bytes_of(out), _bytes_of(mine))

    def close(self, failed: bool = False) -> None:
        """Leave the store, rank 0 last, and release gloo."""
        self.store.close()
        if failed and self._library is not None:
            # its destructor would wait for the lost rank until the timeout
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._library))
        self._library = None

    def rest(self) -> None:
        """Release gloo, and keep the store."""
        self._library = None

    def _start(self, name: str, *arguments: object) -> Callable[[], None]:
        work = getattr(self._library, name)(*arguments)

        def wait() -> None:
            # not in gloo: at exit Python ends a thread that returns from C++, which then aborts
            poll(work.is_completed, _NAP_SHARE, _NAPS_S)
            work.wait()

        return wait

    def _message(self, error: Exception) -> str:
        return f"gloo: {_summary(error)}"


@dataclass(frozen=True, slots=True)
class TorchMeeting:
    """See `Meeting`: in a store of torch, which ends with the process that serves it.

    Attributes:
        store: a store with this meeting's keys alone.
        claims: the launcher's store, and in it the key of each rank's claim (see `_claim`), if any.
        keeper: rank of the store's server, for errors; None if unknown.
    """

    store: Any
    rank: int
    size: int
    claims: tuple[Any, tuple[str, ...]] = (None, ())
    keeper: int | None = None

    def first(self, key: str, value: str) -> str:
        """See `Meeting.first`."""
        with _answered():
            return str(self.store.compare_set(key, "", value).decode())

    def find(self, keys: Sequence[str]) -> list[str | None]:
        """See `Meeting.find`."""
        with _answered():
            return [self.store.get(k).decode() if self.store.check([k]) else None for k in keys]

    def among(self, members: Sequence[int]) -> TorchMeeting:
        """See `Meeting.among`; processes that replace the others may claim their ranks."""
        launcher, claims = self.claims
        if members[0] == self.rank:
            with _answered():
                for rank, key in enumerate(claims):
                    if rank not in members:
                        launcher.set(key, "")
        left = tuple(claims[rank] for rank in members) if claims else ()
        return replace(
            self,
            store=dist.PrefixStore("next", self.store),
            rank=members.index(self.rank),
            size=len(members),
            claims=(launcher, left),
            keeper=None,
        )

    def open(self, timeout: float, end: float = 0.0) -> ProcessGroup:
        """See `Meeting.open`; ``end``: deadline for all to come, by `time.monotonic`; 0: none."""
        store, rank, size = self.store, self.rank, self.size
        interfaces = gloo_interfaces()
        try:
            # first: a rank that cannot take part does not announce itself
            devices = [c10d.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
        except RuntimeError as error:
            problem = f"GLOO_SOCKET_IFNAME={','.join(interfaces)}: {_summary(error)}"
            raise NodeError(socket.gethostname(), problem) from error
        try:
            # Gloo alone takes what the host's name resolves to, which on many systems is 127.0.1.1.
            # Each rank takes the address from which it reaches the server of the store; on the
            # server's own host, that from which it reaches the others.
            server = _server(store)
            mine = _way_to(*server) if server is not None else _own_address()
            end = end or time.monotonic() + timeout
            addresses = _roll_call(store, "did not come in time", rank, size, mine, end)
            if interfaces:
                mine = interface_address(interfaces[0])
            else:
                if server is not None and ipaddress.ip_address(mine).is_loopback:
                    remote = [a for a in addresses if not ipaddress.ip_address(a).is_loopback]
                    mine = _way_to(remote[0], server[1]) if remote else mine
                devices = [c10d.ProcessGroupGloo.create_device(hostname=mine)]
            # finds a rank that was lost while others were still to come, before gloo waits for it
            late = time.monotonic() + timeout
            _roll_call(store, "came, and does not answer any more", rank, size, "", late)
            options = c10d.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=timeout)
            options._devices = devices
            gloo = c10d.ProcessGroupGloo(store, rank, size, options)
        except PeerFailedError:
            raise
        except dist.DistNetworkError as error:
            problem = f"the store of the meeting is gone: {_summary(error)}"
            raise lost(problem, self.keeper) from error
        except RuntimeError as error:
            raise lost(f"the ranks did not meet: {_summary(error)}") from error
        group = TorchGroup(gloo, timeout, mine)
        group.meeting = self
        return group


@contextmanager
def _answered() -> Iterator[None]:
    """Raise PeerFailedError if the store of a meeting has ended."""
    try:
        yield
    except RuntimeError as error:
        raise lost(
            f"the store in which ranks meet has ended ({_summary(error)}): serve a "
            "torch.distributed.TCPStore at MASTER_ADDR by a process that is no rank, and set "
            "TORCHELASTIC_USE_AGENT_STORE=True"
        ) from error


def launched(launch: Launch, timeout: float, met: Met = unmet) -> ProcessGroup:
    """Return the group of all ranks that a launcher started."""
    if not launch.meeting or launch.size is None:
        raise NodeError(launch.host, "set MASTER_ADDR and MASTER_PORT, so that ranks can meet")
    found = (launch.meeting, launch.rank, launch.size)
    # torchrun's agent may keep the store: then no rank does
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = None if agents else 0
    end = time.monotonic() + timeout
    try:
        if found not in _launched:
            if launch.rank != keeper:
                _await_server(launch.meeting, keeper, end)
            # of size 1: else the server waits for all before this rank can announce itself
            stores = dist.rendezvous(*found[:2], 1, timeout=timedelta(seconds=timeout))
            _launched[found] = _store(launch, stores, timeout, serves=launch.rank == keeper)
        _claim(_launched[found], launch, outlived=agents)
    except ValueError as error:
        raise NodeError(launch.host, _summary(error)) from error
    except PeerFailedError:
        raise
    except RuntimeError as error:
        raise lost(f"the ranks did not meet: {_summary(error)}") from error
    store, prefix = _launched[found], _prefix(launch)
    claims = tuple(f"{prefix}/process/{rank}" for rank in range(launch.size))
    meeting = _meeting(store, prefix, launch.rank, launch.size)
    meeting = replace(meeting, claims=(store, claims), keeper=keeper)
    met(meeting)
    return meeting.open(timeout, end)


def _prefix(launch: Launch) -> str:
    """Return the prefix of this module's keys in the launcher's store."""
    return f"streamload/{launch.attempt}"


def _store(launch: Launch, met: Any, timeout: float, *, serves: bool) -> Any:
    """Return the store of a rendezvous; PeerFailedError if another process has its port."""
    try:
        return next(met)[0]
    except RuntimeError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        host, port = _where(launch.meeting)
        if (other := _connected(host, port, min(timeout, _FAREWELL_S))) is not None:
            _claim(other, launch)  # raises if the server is another rank 0
        problem = (
            f"its store cannot be at {host}, port {port} (MASTER_ADDR and MASTER_PORT): another "
            "process listens there: choose another port, on all ranks"
        )
        raise lost(problem, launch.rank) from error


def _connected(host: str, port: int, seconds: float) -> Any:
    """Return the c10d store served at an address; None if none answers in ``seconds``."""
    found: list[Any] = []

    def connect() -> None:  # c10d waits without end for a server of another kind
        with suppress(RuntimeError):
            found.append(dist.TCPStore(host, port, None, False, timedelta(seconds=seconds)))

    connecting = threading.Thread(target=connect, name="streamload-connect", daemon=True)
    connecting.start()
    connecting.join(seconds)
    return found[0] if found else None


def _claim(store: Any, launch: Launch, *, outlived: bool = False) -> None:
    """Claim this process's rank in the store, so that no other process takes the same.

    With ``outlived`` the rank is released at exit, since the store stays. If another process has
    it, waiting ranks raise PeerFailedError, too.
    """
    prefix, rank = _prefix(launch), launch.rank
    mine = f"{launch.host}, process {os.getpid()}"
    key = f"{_ME} {mine}"
    place = f"{prefix}/process/{rank}"
    first = store.compare_set(place, "", key).decode()
    if first == key:
        if outlived:
            atexit.unregister(_give_back)
            atexit.register(_give_back, store, place, key)
        return
    host, port = _where(launch.meeting)
    problem = (
        f"at {host}, port {port}, two processes say that they are rank {rank} of {launch.size}: "
        f"{first.partition(' ')[2]}, and {mine}: give each a number of its own ({launch.launcher})"
    )
    opened = max(store.add(f"{prefix}/{rank}", 0), 1)
    store.set(f"{prefix}/{opened}/{_TWICE}", f"{rank} {problem}")
    raise lost(problem, rank)


def _give_back(store: Any, place: str, key: str) -> None:
    """Release this process's rank, claimed by `_claim`, at exit."""
    with suppress(RuntimeError):
        store.compare_set(place, key, "")


def _where(meeting: str) -> tuple[str, int]:
    """Return host and port of the URL at which ranks meet; ValueError if unknown."""
    where = urlsplit(meeting)
    if where.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return where.hostname or "", where.port or 0


def _await_server(meeting: str, keeper: int | None, end: float) -> None:
    """Wait until ``end`` for the store's server to accept connections; else PeerFailedError.

    c10d would print warnings while it waits. ``keeper`` is the rank of the server, if known.
    """
    host, port = _where(meeting)
    while True:
        try:
            socket.create_connection((host, port), max(end - time.monotonic(), _NAPS_S[1])).close()
            return
        except OSError as error:  # also if a name does not resolve yet
            if time.monotonic() > end:
                problem = f"its store at {host}, port {port}, cannot be reached: {error}"
                raise lost(problem, keeper) from error
            time.sleep(_LOOK_S)


def wrap(group: Any, timeout: float, met: Met = unmet) -> ProcessGroup:
    """Return a gloo group of the ranks of a ``torch.distributed.ProcessGroup`` of any backend.

    The ranks meet in that group's store. The group itself is not used: its timeout (30 minutes
    unless set) and its order of collectives belong to the program. ``timeout`` is in seconds.
    """
    rank, size = group.rank(), group.size()
    try:
        if hasattr(group, "get_group_store"):
            store = group.get_group_store()
        else:  # torch before 2.7
            store = c10d._world.pg_map[group][1]
    except (RuntimeError, KeyError) as error:
        problem = f"the process group has no store to meet in: {_summary(error)}"
        raise NodeError(f"rank {rank}", problem) from error
    meeting = _meeting(store, "streamload", rank, size)
    met(meeting)
    return meeting.open(timeout)


def serve(address: str) -> Any:
    """Return a store for ranks to meet in, served by this process, which is none of them."""
    return dist.TCPStore(address, 0, None, True, wait_for_workers=False)


def is_group(thing: object) -> bool:
    """Return whether ``thing`` is a process group of torch."""
    return isinstance(thing, dist.ProcessGroup)


def _meeting(store: Any, prefix: str, rank: int, size: int) -> TorchMeeting:
    """Return the next meeting of ``size`` ranks in a store; ``prefix``: of the keys of all."""
    with _answered():
        # a connection of its own: a wait blocks all other threads on the same one
        store = store.clone() if hasattr(store, "clone") else store
        # each rank counts its own meetings: equal numbers without a message
        opened = store.add(f"{prefix}/{rank}", 1)
    return TorchMeeting(dist.PrefixStore(f"{prefix}/{opened}", store), rank, size)


def _roll_call(store: Any, missed: str, rank: int, size: int, said: str, end: float) -> list[str]:
    """Wait until all ranks have come; return their texts, by rank; ``said`` is this one's.

    Polls until ``end`` (`time.monotonic`), since c10d prints each failed wait. The first rank to
    time out marks all missing ones in the store under ``missed``, the error of a missing rank, so
    that all ranks name the same in their PeerFailedError.
    """
    keys = [f"{missed}/{other}" for other in range(size)]
    if store.check([keys[rank]]):
        raise lost("came when the others had ceased to wait for it", rank)
    store.set(keys[rank], f"+{said}")
    found = []
    for key in keys:
        while not store.check([key]):
            if store.check([_TWICE]):
                twice, _, problem = store.get(_TWICE).decode().partition(" ")
                raise lost(problem, int(twice))
            if time.monotonic() > end:
                store.set(key, _AWAY)
            else:
                time.sleep(_LOOK_S)
        found.append(store.get(key).decode())
    away = [other for other in range(size) if found[other] == _AWAY]
    if not away:
        return [answer[1:] for answer in found]
    # the store may end with rank 0: it waits until the others have seen this
    store.set(f"{missed}/seen/{rank}", "")
    seen = [f"{missed}/seen/{other}" for other in range(size) if other not in away]
    until = time.monotonic() + _FAREWELL_S
    while rank == 0 and not store.check(seen) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    raise lost(f"{missed} (not here: {', '.join(map(str, away))} of {size})", away[0])


def _server(store: Any) -> tuple[str, int] | None:
    """Return host and port of a store's server; None if the store has none."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _own_address() -> str:
    """Return the address to which the host's name resolves, if it is this host's, else loopback."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            socket.gethostname(), 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind) as own:
                own.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _way_to(host: str, port: int) -> str:
    """Return the address of this host on the route to another; no packet is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        unsent.connect(address)
        return str(unsent.getsockname()[0])


def _bytes_of(memory: memoryview) -> torch.Tensor:
    """Return a uint8 tensor over memory, without a copy."""
    with warnings.catch_warnings():
        # torch warns that it has no read-only tensors; sent memory is only read
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _summary(error: BaseException) -> str:
    """Return the first line of an error of torch, without its C++ location and general advice."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] ", "", line).partition(" This is typically")[0].rstrip(".")
