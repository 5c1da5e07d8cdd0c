"""The key-value store of a group: kept by rank 0, asked by the others over one connection each.

Engines bring collectives only. MPI has no store, and that of torch waits without end for a host
that has gone silent; here every wait of a client ends at its timeout, by the kernel's clock. The
connections are those of ``multiprocessing.connection`` with its mutual proof of a shared key, and
carry JSON and no pickles: ``{"set": key, "value": text}`` is answered by ``null``, ``{"get":
[key, ...]}`` by a list of texts and nulls. A text holds bytes as Latin-1.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import math
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Protocol

from streamload.nodes.group import Group, MemoryStore, Store, lost

_LARGEST_NBYTES = 1 << 30  # of one message
_PROOF_S = 10.0  # for a connection to prove that it knows the key
_CONNECT_S = 3.0  # for one of several addresses to answer
_FAREWELL_S = 5.0  # at most, for the others to leave before the keeper does
_FAREWELL_SHARE = 0.1  # of the group's timeout, which is a promise
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, netdevice(7)

#: What a broken, silent or foreign connection raises.
# (AssertionError: Python 3.11 asserts how a challenge begins)
_BROKEN = (OSError, EOFError, ValueError, AuthenticationError, AssertionError)


class SharedStore(Store, Protocol):
    """A store, and the way to leave it."""

    def close(self) -> None:
        """Leave; takes seconds at most, and may be called twice."""


class _Keeper(MemoryStore):
    """The store of rank 0, and the threads that answer for it."""

    def __init__(self, key: bytes, timeout: float) -> None:
        super().__init__()
        self._key = key
        self._farewell_s = min(_FAREWELL_S, timeout * _FAREWELL_SHARE)
        both = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
        self._clients: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._closed = False
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="streamload-store", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(client,), name="streamload-store", daemon=True
            ).start()

    def _serve(self, client: socket.socket) -> None:
        # what is broken here: the client left, or never was one of ours
        with contextlib.suppress(*_BROKEN), client, _channel(client, _PROOF_S) as channel:
            deliver_challenge(channel, self._key)
            answer_challenge(channel, self._key)
            _wait_at_most(client, 0)
            with self._changed:
                if self._closed:
                    return
                self._clients.add(client)
            try:
                while True:
                    request = json.loads(channel.recv_bytes(_LARGEST_NBYTES))
                    channel.send_bytes(json.dumps(self._answer(request)).encode())
            finally:
                with self._changed:
                    self._clients.discard(client)
                    self._changed.notify_all()

    def _answer(self, request: dict[str, object]) -> list[str | None] | None:
        match request:
            case {"set": str(key), "value": str(text)}:
                self.set(key, text.encode("latin-1"))
                return None
            case {"get": list(keys)}:
                values = self.get_many([str(key) for key in keys])
                return [None if value is None else value.decode("latin-1") for value in values]
        raise ValueError(f"not a request: {request}")

    def close(self) -> None:
        """Stop answering, when the others have left or after a few seconds."""
        with self._changed:
            if not self._closed:
                # also after a failure: the others may not have read here yet who was lost
                self._changed.wait_for(lambda: not self._clients, self._farewell_s)
            self._closed = True
            for client in self._clients:
                _hang_up(client)
        _hang_up(self._listener)
        self._listener.close()


class _Client:
    """The store as the other ranks see it."""

    def __init__(self, addresses: Sequence[str], port: int, key: bytes, timeout: float) -> None:
        self._lock = threading.Lock()
        problems = []
        for address in addresses:
            try:
                self._socket, self._channel = _connect(address, port, key, min(timeout, _CONNECT_S))
            except _BROKEN as error:
                silent = isinstance(error, BlockingIOError)
                problems.append(f"{address}: {'no answer' if silent else error}")
            else:
                _wait_at_most(self._socket, timeout)
                self._ask({"get": []})  # answered when the keeper counts this client as one
                return
        tried = "; ".join(problems)
        raise lost(f"its store on port {port} cannot be reached ({tried})", rank=0)

    def _ask(self, request: dict[str, object]) -> list[str | None] | None:
        try:
            with self._lock:
                self._channel.send_bytes(json.dumps(request).encode())
                answer: list[str | None] | None = json.loads(
                    self._channel.recv_bytes(_LARGEST_NBYTES)
                )
        except _BROKEN as error:
            # a late answer must not be taken for that to another question
            _hang_up(self._socket)
            raise lost("its store does not answer", rank=0) from error
        return answer

    def set(self, key: str, value: bytes) -> None:
        """Write a value; it is there when this returns."""
        self._ask({"set": key, "value": value.decode("latin-1")})

    def get(self, key: str) -> bytes | None:
        """A value, or None."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of several keys, as they were at one moment, in one message."""
        texts = self._ask({"get": list(keys)}) or []
        return [None if text is None else text.encode("latin-1") for text in texts]

    def close(self) -> None:
        """Leave; a thread that waits for an answer ends at once."""
        _hang_up(self._socket)
        with self._lock:
            self._channel.close()
            self._socket.close()


def open_store(group: Group, timeout: float) -> SharedStore:
    """Make the store of a group with a broadcast of its own: every rank calls this.

    Args:
        group: the group, whose collectives work already.
        timeout: seconds that an answer of rank 0 may take.

    Raises:
        PeerFailedError: rank 0 is gone, or cannot be reached from here.
    """
    if group.rank == 0:
        key = secrets.token_bytes(32)
        keeper = _Keeper(key, timeout)
        where = {"addresses": _addresses(), "port": keeper.port, "key": key.hex()}
        try:
            group.broadcast(json.dumps(where).encode())
        except BaseException:
            keeper.close()
            raise
        return keeper
    found = json.loads(group.broadcast(None))
    return _Client(found["addresses"], found["port"], bytes.fromhex(found["key"]), timeout)


def _connect(
    address: str, port: int, key: bytes, timeout: float
) -> tuple[socket.socket, Connection]:
    client = socket.create_connection((address, port), timeout)
    try:
        channel = _channel(client, timeout)
        try:
            answer_challenge(channel, key)
            deliver_challenge(channel, key)
        except BaseException:
            channel.close()
            raise
    except BaseException:
        client.close()
        raise
    return client, channel


def _channel(connected: socket.socket, timeout: float) -> Connection:
    """Messages over a socket; the socket stays, to set its timeout and to hang up."""
    connected.setblocking(True)  # also where the program has a default timeout for sockets
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _wait_at_most(connected, timeout)
    return Connection(os.dup(connected.fileno()))


def _wait_at_most(connected: socket.socket, seconds: float) -> None:
    """Let the kernel end reads and writes that take longer, with EAGAIN; 0 for never."""
    fraction, whole = math.modf(seconds)
    timeval = struct.pack("@ll", int(whole), int(fraction * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, timeval)


def _hang_up(connected: socket.socket) -> None:
    # close alone does not wake a thread that waits in accept or read
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _addresses() -> list[str]:
    """Where this host may be reached, loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # a host whose name does not resolve
        own = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(sockaddr[0]) for *_, sockaddr in own]
    found += ["127.0.0.1", "::1"]
    return sorted(
        dict.fromkeys(found), key=lambda a: ipaddress.ip_address(a.partition("%")[0]).is_loopback
    )
