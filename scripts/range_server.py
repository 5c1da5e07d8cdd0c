#!/usr/bin/env python3
"""Serve the files of a folder, or one file, over HTTP with ranges, and count what is sent.

    range_server.py PATH [--address 127.0.0.1] [--port 8000]

A line on its standard input is answered by a line of JSON on its standard output: `Counts`. It ends
when its standard input does. Bodies go from the page cache to the socket within the kernel, so that
one core serves more than a gigabit a second to many clients.
"""

from __future__ import annotations

import argparse
import email.utils
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

_PIECE_NBYTES = 2**20  # handed to the kernel at once; what a client that goes away may be off by


@dataclass(slots=True)
class Counts:
    """What was sent."""

    requests: int = 0  # how many came in
    nbytes: int = 0  # of bodies, to all clients; less than was asked for where a client went away
    # by file, where each body began and stopped in it, in the order in which they ended; the stop
    # is exclusive
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class RangeHandler(BaseHTTPRequestHandler):
    """A connection that stays open, of a server that looks at Range."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def wanted(self) -> tuple[int, int] | None:
        """The range that is asked for, its stop exclusive; None: all of it.

        A server need not know other ranges than those from byte to byte (RFC 9110, 14.2).
        """
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class _Files(RangeHandler):
    server: _Server

    def do_GET(self) -> None:
        """A file, or a range of it, or the headers alone."""
        counts, name = self.server.counts, unquote(self.path.partition("?")[0])
        with self.server.lock:
            counts.requests += 1
        try:
            file = self.server.open(name)
        except OSError:
            self._begin(404, 0)
            return
        with file:
            stat = os.fstat(file.fileno())
            tag = f'"{stat.st_size:x}-{stat.st_mtime_ns:x}"'
            headers = {
                "Accept-Ranges": "bytes",
                "ETag": tag,
                "Last-Modified": email.utils.formatdate(stat.st_mtime, usegmt=True),
            }
            wanted = self.wanted if self.headers.get("If-Range", tag) == tag else None
            start, stop, total = 0, stat.st_size, stat.st_size
            if wanted is not None and not wanted[0] < min(wanted[1], total):
                self._begin(416, 0, {"Content-Range": f"bytes */{total}"})
                return
            if wanted is not None:
                start, stop = wanted[0], min(wanted[1], total)
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
            self._begin(200 if wanted is None else 206, stop - start, headers)
            if self.command == "GET":
                self._send(name, file, start, stop)

    do_HEAD = do_GET

    def _begin(self, status: int, nbytes: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(nbytes), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()

    def _send(self, name: str, file: BinaryIO, start: int, stop: int) -> None:
        to, at = self.connection.fileno(), start
        try:
            while at < stop:
                sent = os.sendfile(to, file.fileno(), at, min(_PIECE_NBYTES, stop - at))
                if not sent:  # it was cut shorter
                    break
                at += sent
        except OSError:  # the client has gone
            pass
        finally:
            counts = self.server.counts
            with self.server.lock:
                counts.nbytes += at - start
                counts.ranges.setdefault(name, []).append((start, at))
        self.close_connection = self.close_connection or at < stop


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # of all hosts at once

    def __init__(self, address: tuple[str, int], path: Path) -> None:
        self._path = path.resolve(strict=True)
        self.counts = Counts()
        self.lock = threading.Lock()
        super().__init__(address, _Files)

    def open(self, name: str) -> BinaryIO:
        """Open what is served under a name.

        Raises:
            OSError: there is no such file in the folder, or it is not the one.
        """
        folder = self._path if self._path.is_dir() else self._path.parent
        # links lead out of folders of checkpoints; dots do not
        path = folder / os.path.normpath("/" + name).lstrip("/")
        if path.is_dir() or (folder != self._path and path != self._path):
            raise FileNotFoundError(name)
        return path.open("rb")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is none."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    url: str  # of the folder, with a slash

    def counts(self) -> Counts:
        """What it has sent."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        spans = {name: [(a, b) for a, b in each] for name, each in found.pop("ranges").items()}
        return Counts(**found, ranges=spans)

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def start(path: Path, address: tuple[str, int], prefix: Sequence[str] = ()) -> Serving:
    """Start a server in a process of its own; it takes requests when this returns.

    Args:
        path: of a folder, or of a file.
        address: where to listen; at port 0, any.
        prefix: what the command is an argument of.

    Raises:
        OSError: it did not start.
    """
    where = ["--address", address[0], "--port", str(address[1])]
    process = subprocess.Popen(
        [*prefix, sys.executable, str(Path(__file__).resolve()), str(path), *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    url = process.stdout.readline().strip()
    if not url:
        raise OSError(process.communicate()[1].strip())
    return Serving(process, url)


def main() -> None:
    """Serve until the standard input ends."""
    assert __doc__
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=usage)
    parser.add_argument("path", type=Path)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any")
    args = parser.parse_args()
    try:
        server = _Server((args.address, args.port), args.path)
    except OSError as error:
        sys.exit(f"{args.path} cannot be served at {args.address}:{args.port}: {error}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://{args.address}:{server.server_address[1]}/", flush=True)
    for _ in sys.stdin:
        with server.lock:
            said = json.dumps(asdict(server.counts))
        print(said, flush=True)


if __name__ == "__main__":
    main()
