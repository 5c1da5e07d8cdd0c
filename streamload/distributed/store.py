"""The key-value store of a group: kept by rank 0; the others have one connection each.

MPI has no store, and that of torch waits without end for a silent host. Here every wait of a client
has a timeout. Messages are framed as in ``multiprocessing.connection``, and both ends prove that
they know a key. They are JSON, no pickles: the answer to ``{"set": key, "value": text}`` is
``null``, to ``{"get": [key, ...]}`` a list of texts and nulls. A text holds bytes as Latin-1.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

from streamload.core.bounded_json import parse_json
from streamload.distributed.group import MemoryStore, ProcessGroup, Store, lost
from streamload.errors import NodeError

_LARGEST_NBYTES = 1 << 30  # most bytes of a message
_PART_NBYTES = 1 << 20  # bytes received at once: memory grows with data, not with a stated length
_PROOF_S = 10.0  # for a connection to prove that it knows the key
_STRANGERS = 64  # most unproven connections besides those of the ranks
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.05  # for the kernel to release resources
_CONNECT_S = 3.0  # for one of several addresses to answer
_LAST_PORT = 65535
_FAREWELL_S = 5.0  # at most, for the others to leave before the keeper does
_FAREWELL_SHARE = 0.1  # of the group's timeout
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, netdevice(7)

#: Errors of a broken, silent or foreign connection.
# (AssertionError: Python 3.11 asserts how a challenge begins)
_BROKEN = (OSError, EOFError, ValueError, AuthenticationError, AssertionError)


class _Channel:
    """A socket that sends and receives messages, each after its length, within a deadline."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.connected = connected
        self.allow(seconds)

    def allow(self, seconds: float | None) -> None:
        """Set the deadline of all following calls, ``seconds`` from now; None: no deadline."""
        self._end = None if seconds is None else time.monotonic() + seconds

    def send_bytes(self, data: bytes) -> None:
        """Send a message; TimeoutError after the deadline."""
        self._limit()
        self.connected.sendall(struct.pack("!i", len(data)) + data)

    def recv_bytes(self, most_nbytes: int) -> bytes:
        """Return the next message; ValueError if it is longer than ``most_nbytes``."""
        (nbytes,) = struct.unpack("!i", self._exactly(4))
        if not 0 <= nbytes <= most_nbytes:
            raise ValueError(f"a message of {nbytes} bytes, expected at most {most_nbytes}")
        return self._exactly(nbytes)

    def _exactly(self, nbytes: int) -> bytes:
        """Receive so many bytes; EOFError if the connection ends before."""
        data = bytearray()
        while len(data) < nbytes:
            self._limit()
            part = self.connected.recv(min(nbytes - len(data), _PART_NBYTES))
            if not part:
                raise EOFError("the connection was closed")
            data += part
        return bytes(data)

    def _limit(self) -> None:
        """Limit the next call of the socket to the deadline; raise TimeoutError if that is past."""
        left = None if self._end is None else self._end - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("no answer")
        self.connected.settimeout(left)


class _Keeper(MemoryStore):
    """The store in rank 0's memory, with threads that serve the other ranks."""

    def __init__(self, key: bytes, size: int, timeout: float, address: str, port: int = 0) -> None:
        super().__init__()
        self._key = key
        self._most_unproven = size + _STRANGERS
        self._farewell_s = min(_FAREWELL_S, timeout * _FAREWELL_SHARE)
        both = not address and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            (address, port),
            family=socket.AF_INET6 if both or ":" in address else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
        self._listener.settimeout(None)  # despite a default of the program
        self._unproven: dict[socket.socket, None] = {}  # the oldest first
        self._clients: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._closed = False
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="streamload-store", daemon=True).start()

    def _accept(self) -> None:
        """Accept connections, and start a thread for each."""
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError as error:  # closed, or the client is gone again
                if error.errno in _EXHAUSTED:
                    self._drop_strangers(len(self._unproven) // 2)
                    time.sleep(_PAUSE_S)
                continue
            self._drop_strangers(self._most_unproven - 1)
            with self._changed:
                self._unproven[client] = None
            try:
                threading.Thread(
                    target=self._serve, args=(client,), name="streamload-store", daemon=True
                ).start()
            except RuntimeError:  # there can be no more threads now
                self._forget(client)

    def _drop_strangers(self, most: int) -> None:
        """Disconnect all clients without proof of the key but the newest ``most``."""
        with self._changed:
            for client in list(self._unproven)[: max(len(self._unproven) - most, 0)]:
                _hang_up(client)

    def _forget(self, client: socket.socket) -> None:
        """Close a connection whose thread ends."""
        with self._changed:
            self._unproven.pop(client, None)
            self._clients.discard(client)
            client.close()
            self._changed.notify_all()

    def _serve(self, client: socket.socket) -> None:
        """Let a client prove that it knows the key, and answer its requests."""
        try:
            # broken: the client left, or is not of the group
            with contextlib.suppress(*_BROKEN):
                channel = _Channel(client, _PROOF_S)
                _prove(channel, self._key, first=True)
                channel.allow(None)
                with self._changed:
                    self._unproven.pop(client)
                    if self._closed:
                        return
                    self._clients.add(client)
                while True:
                    request = parse_json(channel.recv_bytes(_LARGEST_NBYTES))
                    channel.send_bytes(json.dumps(self._answer(request)).encode())
        finally:
            self._forget(client)

    def _answer(self, request: dict[str, object]) -> list[str | None] | None:
        """Return the answer to a client's request; ValueError for an unknown one."""
        match request:
            case {"set": str(key), "value": str(text)}:
                self.set(key, text.encode("latin-1"))
                return None
            case {"get": list(keys)}:
                values = self.get_many([str(key) for key in keys])
                return [None if value is None else value.decode("latin-1") for value in values]
        raise ValueError(f"not a request: {request}")

    def close(self) -> None:
        """Wait some seconds until all clients have left, then stop serving."""
        with self._changed:
            if not self._closed:
                # also after a failure: the others may still have to read which rank was lost
                self._changed.wait_for(lambda: not self._clients, self._farewell_s)
            self._closed = True
            for client in (*self._clients, *self._unproven):
                _hang_up(client)
        _hang_up(self._listener)
        self._listener.close()


class _Client(Store):
    """The store of ranks besides 0: requests over one connection to rank 0."""

    def __init__(self, addresses: Sequence[str], port: int, key: bytes, timeout: float) -> None:
        self._lock = threading.Lock()
        self._timeout = timeout
        problems = []
        for address in addresses:
            try:
                self._channel = _connect(address, port, key, min(timeout, _CONNECT_S))
            except _BROKEN as error:
                problems.append(f"{address}: {error}")
            else:
                self._ask({"get": []})  # answered once the keeper counts this client
                return
        tried = "; ".join(problems)
        raise lost(f"its store on port {port} cannot be reached ({tried})", rank=0)

    def _ask(self, request: dict[str, object]) -> list[str | None] | None:
        """Send a request and return the answer; PeerFailedError if none comes in time."""
        try:
            with self._lock:
                self._channel.allow(self._timeout)
                self._channel.send_bytes(json.dumps(request).encode())
                answer: list[str | None] | None
                answer = parse_json(self._channel.recv_bytes(_LARGEST_NBYTES))
                return answer
        except _BROKEN as error:
            # a late answer must not answer the next request
            _hang_up(self._channel.connected)
            raise lost("its store does not answer", rank=0) from error

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`; returns once rank 0 has the value."""
        self._ask({"set": key, "value": value.decode("latin-1")})

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`."""
        texts = self._ask({"get": list(keys)}) or []
        return [None if text is None else text.encode("latin-1") for text in texts]

    def close(self) -> None:
        """Disconnect; a thread that waits for an answer raises PeerFailedError at once."""
        _hang_up(self._channel.connected)
        with self._lock:
            self._channel.connected.close()


SharedStore = _Keeper | _Client


def open_store(group: ProcessGroup, timeout: float, address: str = "") -> SharedStore:
    """Return the store of a group; all ranks call this, and rank 0 broadcasts its address.

    The group's collectives work already. ``timeout``: seconds for an answer of rank 0; ``address``:
    the only one on which it listens; "" for the interface of ``GLOO_SOCKET_IFNAME``, or all.
    """
    if group.rank == 0:
        key = secrets.token_bytes(32)
        address = address or next(filter(None, map(interface_address, gloo_interfaces())), "")
        try:
            keeper = _Keeper(key, group.size, timeout, address, _chosen_port())
        except (OSError, ValueError) as error:
            port = os.environ.get("STREAMLOAD_STORE_PORT", "")
            chosen = f" with STREAMLOAD_STORE_PORT={port}" if port else ""
            problem = f"its store cannot listen{chosen}: {error}"
            group.broadcast(json.dumps({"problem": problem}).encode())
            raise NodeError("rank 0", problem) from error
        addresses = [address] if address else _addresses()
        where = {"addresses": addresses, "port": keeper.port, "key": key.hex()}
        try:
            group.broadcast(json.dumps(where).encode())
        except BaseException:
            keeper.close()
            raise
        return keeper
    found = parse_json(group.broadcast(None))
    if "problem" in found:
        raise NodeError("rank 0", found["problem"])
    return _Client(found["addresses"], found["port"], bytes.fromhex(found["key"]), timeout)


def _chosen_port() -> int:
    """Return the port of ``STREAMLOAD_STORE_PORT``; 0 if unset: the system then chooses one."""
    text = os.environ.get("STREAMLOAD_STORE_PORT", "") or "0"
    if not text.isascii() or not text.isdecimal() or int(text) > _LAST_PORT:
        raise ValueError(f"{text!r} is no port: expected a number up to {_LAST_PORT}")
    return int(text)


def _connect(address: str, port: int, key: bytes, seconds: float) -> _Channel:
    """Connect to rank 0's store, and exchange proofs of the key."""
    client = socket.create_connection((address, port), seconds)
    try:
        channel = _Channel(client, seconds)
        _prove(channel, key, first=False)
        return channel
    except BaseException:
        client.close()
        raise


def _prove(channel: Any, key: bytes, *, first: bool) -> None:
    """Prove to the other end that this one knows the key, and vice versa, or raise an error.

    ``first``: ask the other end for its proof first, as the keeper does.
    """
    for step in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
        step(channel, key)  # uses send_bytes and recv_bytes alone


def _hang_up(connected: socket.socket) -> None:
    """Shut a socket down; unlike close, that wakes threads that wait in accept or read."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def gloo_interfaces() -> list[str]:
    """Return the names of network interfaces in ``GLOO_SOCKET_IFNAME``."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:  # no such interface, or one without an IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])


def _addresses() -> list[str]:
    """Return the addresses of this host, loopback last, for other ranks to connect to."""
    found = [address for _, name in socket.if_nameindex() if (address := interface_address(name))]
    with contextlib.suppress(OSError):  # a host whose name does not resolve
        own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(sockaddr[0]) for *_, sockaddr in own]
    found += ["127.0.0.1", "::1"]
    return sorted(
        dict.fromkeys(found), key=lambda a: ipaddress.ip_address(a.partition("%")[0]).is_loopback
    )
