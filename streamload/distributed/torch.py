"""A group over torch.distributed: a gloo group of its own, with a timeout of its own.

It is made next to whatever the program does with torch.distributed, from a store alone: that of
the program's own process group where there is one, else that of the launcher (``env://``). No
group of the program's is used, counted or changed, and none has to exist.
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
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from streamload.distributed.group import Engine, Group, Launch, Store, check_blocks, lost
from streamload.distributed.store import gloo_interfaces, interface_address, open_store
from streamload.errors import NodeError, PeerFailedError

_NAPS_S = (2e-4, 5e-3)  # between looks at what is under way, the shortest and the longest
_NAP_SHARE = 0.1  # of the time waited so far
_LOOK_S = 0.05  # between looks for ranks that are to come
_FAREWELL_S = 3.0  # at most, for the others to see which ranks did not come
_AWAY = "away"  # in the place of what a rank says when it comes
_TWICE = "twice"  # why two processes cannot meet as one rank
_ME = secrets.token_hex(8)  # tells processes of one number, in containers, from each other

#: The launcher's store, by (meeting, rank, size): kept for good. Rank 0 may be its server, on a
#: port that the program's own init_process_group shares, before or after.
_launched: dict[tuple[str, int, int], Any] = {}


class TorchGroup(Engine):
    """Gloo collectives on host memory."""

    engine = "torch"
    _errors = (RuntimeError,)  # gloo's only kind: a timeout, a broken connection

    def __init__(self, gloo: Any, timeout: float, address: str = "") -> None:
        super().__init__(gloo, gloo.rank(), gloo.size())
        self._shared = open_store(self, timeout, address)
        self.store: Store = self._shared

    def _broadcast(self, part: memoryview, root: int) -> None:
        self._begin("broadcast", _bytes_of(part), root)()

    def all_gather_begin(self, mine: memoryview, out: memoryview) -> Callable[[], None]:
        """See `Group.all_gather_begin`; a thread of gloo's does it."""
        check_blocks(mine, out, self.size)
        if not mine.nbytes:
            return lambda: None
        newer, older = "all_gather_single", "_allgather_base"
        name = newer if hasattr(self._library, newer) else older
        return self._begin(name, _bytes_of(out), _bytes_of(mine))

    def close(self, failed: bool = False) -> None:
        """Leave the store, rank 0 last, and let go of gloo."""
        self._shared.close()
        if failed and self._library is not None:
            # its end would wait for what is under way with the rank that is lost, until the timeout
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._library))
        self._library = None

    def _start(self, name: str, *arguments: object) -> Callable[[], None]:
        work = getattr(self._library, name)(*arguments)

        def wait() -> None:
            # Not in gloo: when the program ends, Python ends a thread of its own that comes
            # back from C++ in a way that C++ takes for a crash.
            began = time.monotonic()
            while not work.is_completed():
                waited = time.monotonic() - began
                time.sleep(min(max(waited * _NAP_SHARE, _NAPS_S[0]), _NAPS_S[1]))
            work.wait()

        return wait

    def _told(self, error: Exception) -> str:
        return f"gloo: {_summary(error)}"


def launched(launch: Launch, timeout: float) -> Group:
    """The group of all ranks that a launcher started.

    Args:
        launch: what it told; ``meeting`` is for ``torch.distributed.rendezvous``.
        timeout: seconds, of the meeting and of each collective.

    Raises:
        PeerFailedError: not all of them came.
        NodeError: nothing says where to meet, or it cannot be there.
    """
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
            # Of one rank: the server would wait until all have come, and this rank could not say
            # that it has.
            met = dist.rendezvous(*found[:2], 1, timeout=timedelta(seconds=timeout))
            _launched[found] = _store(launch, met, timeout, serves=launch.rank == keeper)
        _claim(_launched[found], launch, outlived=agents)
    except ValueError as error:
        raise NodeError(launch.host, _summary(error)) from error
    except PeerFailedError:
        raise
    except RuntimeError as error:
        raise lost(f"the ranks did not meet: {_summary(error)}") from error
    prefix = _prefix(launch)
    return _group(_launched[found], prefix, launch.rank, launch.size, timeout, end, keeper)


def _prefix(launch: Launch) -> str:
    return f"streamload/{launch.attempt}"


def _store(launch: Launch, met: Any, timeout: float, *, serves: bool) -> Any:
    """The store of a meeting; raises PeerFailedError where it cannot be served here."""
    try:
        store, *_ = next(met)
    except RuntimeError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        host, port = _where(launch.meeting)
        if (other := _connected(host, port, min(timeout, _FAREWELL_S))) is not None:
            _claim(other, launch)  # where the server is another rank 0, it says so
        problem = (
            f"its store cannot be at {host}, port {port} (MASTER_ADDR and MASTER_PORT): another "
            "process listens there: choose another port, on all ranks"
        )
        raise lost(problem, launch.rank) from error
    return store


def _connected(host: str, port: int, seconds: float) -> Any:
    """The store that is served there; None if there is none, or it does not answer in time."""
    found: list[Any] = []

    def connect() -> None:  # c10d waits without end for a server of another kind
        with suppress(RuntimeError):
            found.append(dist.TCPStore(host, port, None, False, timedelta(seconds=seconds)))

    connecting = threading.Thread(target=connect, name="streamload-connect", daemon=True)
    connecting.start()
    connecting.join(seconds)
    return found[0] if found else None


def _claim(store: Any, launch: Launch, *, outlived: bool = False) -> None:
    """Say that this process has its rank.

    Args:
        store: where ranks meet.
        launch: what the launcher told.
        outlived: the store stays when this process ends, and another may have the rank then.

    Raises:
        PeerFailedError: another process has; all that wait for others learn of it, too.
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
    with suppress(RuntimeError):
        store.compare_set(place, key, "")


def _where(meeting: str) -> tuple[str, int]:
    """Host and port of a meeting; raises ValueError where nothing says them."""
    where = urlsplit(meeting)
    if where.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return where.hostname or "", where.port or 0


def _await_server(meeting: str, keeper: int | None, end: float) -> None:
    """Wait until the store's server can be reached; c10d would complain to the terminal meanwhile.

    Raises:
        PeerFailedError: it cannot be in time.
        ValueError: nothing says where it is.
    """
    host, port = _where(meeting)
    while True:
        try:
            socket.create_connection((host, port), max(end - time.monotonic(), _NAPS_S[1])).close()
        except OSError as error:  # also of a name that is not known yet
            if time.monotonic() > end:
                problem = f"its store at {host}, port {port}, cannot be reached: {error}"
                raise lost(problem, keeper) from error
            time.sleep(_LOOK_S)
        else:
            return


def wrap(group: Any, timeout: float) -> Group:
    """A group of the ranks of a process group, over a gloo group of its own.

    The ranks meet in the store of the group given, which itself is not used: its timeout (30
    minutes unless set) and its order of collectives are the program's.

    Args:
        group: a ``torch.distributed.ProcessGroup`` of any backend.
        timeout: seconds, of the meeting and of each collective.

    Raises:
        PeerFailedError: not all of them came.
        NodeError: the group has no store.
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
    return _group(store, "streamload", rank, size, timeout, time.monotonic() + timeout)


def is_group(thing: object) -> bool:
    """Whether something is a process group of torch's."""
    return isinstance(thing, dist.ProcessGroup)


def _group(
    store: Any,
    prefix: str,
    rank: int,
    size: int,
    timeout: float,
    end: float,
    keeper: int | None = None,
) -> Group:
    """Meet in a store of all ranks; ``end`` is until when the others are waited for."""
    interfaces = gloo_interfaces()
    try:
        # first: a rank that cannot take part does not say that it has come
        devices = [c10d.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    except RuntimeError as error:
        problem = f"GLOO_SOCKET_IFNAME={','.join(interfaces)}: {_summary(error)}"
        raise NodeError(socket.gethostname(), problem) from error
    try:
        # a connection of our own: a wait on one holds up every other thread that uses it
        store = store.clone() if hasattr(store, "clone") else store
        # each rank counts for itself how often it was here: no message, and the same number
        opened = store.add(f"{prefix}/{rank}", 1)
        store = dist.PrefixStore(f"{prefix}/{opened}", store)
        # Gloo alone takes what the host's name resolves to, which on many systems is 127.0.1.1.
        # Each rank takes the address from which it reaches the server of the store; on the server's
        # own host, that from which it reaches the others.
        server = _server(store)
        mine = _way_to(*server) if server is not None else _own_address()
        addresses = _roll_call(store, "did not come in time", rank, size, mine, end)
        if interfaces:
            mine = interface_address(interfaces[0])
        else:
            if server is not None and ipaddress.ip_address(mine).is_loopback:
                remote = [a for a in addresses if not ipaddress.ip_address(a).is_loopback]
                mine = _way_to(remote[0], server[1]) if remote else mine
            devices = [c10d.ProcessGroupGloo.create_device(hostname=mine)]
        # one that was lost while others were still to come is found here, and not by gloo
        late = time.monotonic() + timeout
        _roll_call(store, "came, and does not answer any more", rank, size, "", late)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = devices
        gloo = c10d.ProcessGroupGloo(store, rank, size, options)
    except PeerFailedError:
        raise
    except dist.DistNetworkError as error:
        raise lost(f"the store of the meeting is gone: {_summary(error)}", keeper) from error
    except RuntimeError as error:
        raise lost(f"the ranks did not meet: {_summary(error)}") from error
    return TorchGroup(gloo, timeout, mine)


def _roll_call(store: Any, missed: str, rank: int, size: int, said: str, end: float) -> list[str]:
    """Wait until all ranks have come here; what they said, by rank.

    Looks again and again, since a wait that fails is told to the terminal by c10d. The first rank
    whose time is over writes that down in the place of each that is missing: all name the same.

    Args:
        store: where they meet.
        missed: what a rank is said to have done that is not here; no two calls have the same.
        rank: this one.
        size: how many there are.
        said: what the others are told.
        end: until when they are waited for.
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
    # with rank 0 the store may go: it waits for the others to see this
    store.set(f"{missed}/seen/{rank}", "")
    seen = [f"{missed}/seen/{other}" for other in range(size) if other not in away]
    until = time.monotonic() + _FAREWELL_S
    while rank == 0 and not store.check(seen) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    raise lost(f"{missed} (not here: {', '.join(map(str, away))} of {size})", away[0])


def _server(store: Any) -> tuple[str, int] | None:
    """Host and port of the store's server, where it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _own_address() -> str:
    """What the host's name resolves to, if that is this host's, else loopback."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            socket.gethostname(), 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind) as own:
                own.bind(address)
                return str(address[0])
    return "127.0.0.1"


def _way_to(host: str, port: int) -> str:
    """The address of this host from which packets to another leave; none is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unsent:
        unsent.connect(address)
        return str(unsent.getsockname()[0])


def _bytes_of(memory: memoryview) -> torch.Tensor:
    """A tensor over memory, of its bytes."""
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so; what is sent is only read
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _summary(error: BaseException) -> str:
    """What an error of torch's says, without its place in C++, advice and trace."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[[^\]]*\] ", "", line).partition(" This is typically")[0].rstrip(".")
