"""Processes of Python that begin at once: forked off one that has imported what is slow to import.

`start` and `run` take what `subprocess.Popen` and `subprocess.run` do, of what is needed. Each
process is a real one, with its own memory, working directory, environment, output and exit code; it
only finds third-party modules imported, and ``streamload`` for its commands. What is about a
process's start, its imports or the memory that it takes needs a fresh one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

#: What can have been imported: what the commands need; torch and all that comes with it.
COMMANDS = ("streamload.cli",)
TORCH = ("safetensors.torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama")


class Process:
    """A process that was started; like a `subprocess.Popen` whose output is kept."""

    def __init__(
        self, args: Sequence[str], status: socket.socket, files: Sequence[IO[str]]
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        self._status, self._files = status, files
        self._pid = int(status.recv(64))

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Wait for its end; gives what it wrote to stdout and stderr."""
        self._status.settimeout(timeout)
        self.returncode = int(self._status.recv(64) or -9)
        self._status.close()
        for file in self._files:
            file.seek(0)
        out, err = (file.read() for file in self._files)
        return out, err

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, 9)
            self.communicate()


def start(
    # Python with ``-c`` and code, ``-m`` and a module, or a file; then arguments
    command: Sequence[object],
    imported: tuple[str, ...],  # the modules that have been imported: `COMMANDS` or `TORCH`
    *,
    # all of its environment. What is read while the modules are imported has no effect
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,  # where it runs
    input: str = "",  # what it reads
) -> Process:
    """Start a command of Python: ``[sys.executable, "-m", "streamload", ...]``."""
    args = [str(part) for part in command]
    assert args[0] == sys.executable
    names = ["stdin", "stdout", "stderr"]
    files = [tempfile.TemporaryFile("w+", prefix=name) for name in names]  # noqa: SIM115
    files[0].write(input)
    files[0].seek(0)
    request = {"args": args[1:], "env": dict(env or os.environ), "cwd": str(cwd or os.getcwd())}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fds = [theirs.fileno(), *(file.fileno() for file in files)]
        socket.send_fds(_server(imported), [json.dumps(request).encode()], fds)
    files[0].close()
    return Process(args, ours, files[1:])


def run(
    command: Sequence[object], imported: tuple[str, ...], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command of Python to its end; the arguments are those of `start`."""
    process = start(command, imported, **options)
    try:
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fresh(
    code: str,
    *arguments: object,
    options: Sequence[str] = (),
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,  # all of its environment, but for ``more``
    timeout: float = 300.0,
    **more: str,
) -> str:
    """What code prints in a process of Python of its own, not forked, which has to succeed."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**(os.environ if env is None else env), **more},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    command = [sys.executable, __file__, str(theirs.fileno()), *imported]
    # threads of OpenBLAS and OpenMP do not outlive a fork
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns it in the new process only."""
    while True:
        text, fds, _, _ = socket.recv_fds(requests, 2**20, 4)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if text else 0)[0]:
                pass
        if not text:
            sys.exit()
        if not os.fork():
            break
        for fd in fds:
            os.close(fd)
    with socket.socket(fileno=fds[0]) as status:
        if pid := os.fork():  # this one waits for it, and says how it ended
            status.send(str(pid).encode())
            _, code = os.waitpid(pid, 0)
            status.send(str(os.waitstatus_to_exitcode(code)).encode())
            os._exit(0)
    requests.close()
    for number, fd in enumerate(fds[1:]):
        os.dup2(fd, number)
        os.close(fd)
    request: dict[str, Any] = json.loads(text)
    return request


def _run(args: list[str], env: Mapping[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.orig_argv = [sys.executable, *args]
    option, *rest = args
    if option == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(rest[0], "<string>", "exec"), names)
    elif option == "-m":
        sys.argv, sys.path[0] = ["-m", *rest[1:]], cwd
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = args, str(Path(option).parent)
        runpy.run_path(option, run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        with suppress(ImportError):  # what is not installed is missed where it is needed
            importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        found = _serve(asked)
    _run(**found)
