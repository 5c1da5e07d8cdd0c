"""Another process that changes files while they are read, and waits where a lease holds it back."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_PROGRAM = """
import json, os, sys

def rewrite(path, at, nbytes):
    with open(path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\\xee" * nbytes, at)

def again(path, at, nbytes):  # as a program that saves over a file does
    with open(path, "wb", buffering=0) as file:
        os.pwrite(file.fileno(), b"\\xee" * nbytes, at)

def replace(path, at, nbytes):
    with open(path, "rb") as file:
        data = file.read()
    with open(path + ".new", "wb") as file:
        file.write(data[:at] + b"\\xee" * nbytes + data[at + nbytes :])
    os.replace(path + ".new", path)

def truncate(path, at, nbytes):
    os.truncate(path, at)

def append(path, at, nbytes):
    with open(path, "ab", buffering=0) as file:
        file.write(b"\\xee" * nbytes)

def touch(path, at, nbytes):
    os.utime(path)

def chmod(path, at, nbytes):
    os.chmod(path, 0o640)
    os.link(path, path + ".link")

for line in sys.stdin:
    act, path, at, nbytes = json.loads(line)
    globals()[act](path, at, nbytes)
    print(json.dumps(act), flush=True)
"""
ACTS = ("rewrite", "again", "replace", "truncate", "append", "touch", "chmod")


class Adversary:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._pending = 0

    def act(self, act: str, path: Path, at: int, nbytes: int = 1) -> None:
        """Do one of `ACTS` to a file from a byte on; returns when done, or held back by a lease."""
        self.wait()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([act, str(path), at, nbytes]) + "\n")
        self._process.stdin.flush()
        self._pending += 1
        while not self._is_done() and not is_held_back(path):
            time.sleep(0.001)

    def wait(self) -> None:
        """Wait for all that it was told; it must not be held back for as long as a lease may."""
        assert self._process.stdout is not None
        begun = time.monotonic()
        while self._pending:
            self._pending -= bool(self._process.stdout.readline())
            assert self._process.poll() is None
        assert time.monotonic() - begun < 20  # the kernel ends a lease after 45

    def _is_done(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def is_held_back(path: Path) -> bool:
    """Whether somebody waits for a lease on a file to end."""
    return any("BREAKING" in lease for lease in leases(path))


def leases(path: Path) -> list[str]:
    inode = f":{os.stat(path).st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return [line for line in lines if "LEASE" in line and inode in line]
