"""The command line of ``scripts/cluster``."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from boxes import NoBoxesError

from cluster_parts.hosts import Cluster, NoClusterError
from cluster_parts.launchers import LAUNCHERS
from cluster_parts.running import Running
from streamload.core.units import format_bytes, parse_bytes

_EPILOG = """
The hosts are named node-0 and so on, and know each other by name; node-0 has rank 0. They share
this machine's files and processors, and reach nothing outside.

    scripts/cluster 4 --link 1gbit --storage Llama-3-8B --memory 3GB -- \\
        sh -c 'streamload load "$STREAMLOAD_URL" --budget 2.5GB'
    scripts/cluster 2 --launcher mpirun -- python program.py
    scripts/cluster 4 --kill node-2@5 -- python program.py

The exit code is that of the program which failed first (128 + n for signal n), or 0. Needs root,
and Debian's iproute2.
"""
_INTERRUPT_S = 5.0
_FAULT = re.compile(r"(?:node-)?(\d+)@(\d+(?:\.\d+)?)")


def main(argv: Sequence[str]) -> NoReturn:
    """Make hosts, run a command on each, remove them, and exit."""
    parser = _parser()
    options, command = list(argv), list[str]()
    if "--" in options:
        at = options.index("--")
        options, command = options[:at], options[at + 1 :]
    args = parser.parse_args(options)
    if not command:
        parser.error("no command: it follows --")
    acts = (Cluster.kill, Cluster.link_down, Cluster.link_up)
    faults = [(act, *fault) for act in acts for fault in getattr(args, act.__name__)]
    if any(host >= args.count for _, host, _ in faults):
        parser.error(f"there are hosts node-0 to node-{args.count - 1}")
    if args.storage is not None and not args.storage.exists():
        parser.error(f"{args.storage} does not exist")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        make = partial(
            Cluster,
            args.count,
            link=args.link,
            memory_nbytes=args.memory,
            storage=args.storage,
            storage_link=args.storage_link,
            debian_names=args.debian_names,
        )
        with make() as cluster:
            sys.exit(_run(cluster, args.launcher, command, args.per_host, faults))
    except ValueError as error:
        parser.error(str(error))
    except (NoClusterError, NoBoxesError, OSError) as error:
        sys.exit(f"cluster: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(
    cluster: Cluster,
    launcher: str,
    command: list[str],
    per_host: int,
    faults: list[tuple[Callable[[Cluster, int], None], int, float]],
) -> int:
    """Run a command on all hosts, and say how it went; the exit code."""
    names = [host.name for host in cluster.hosts]
    width = max(map(len, names))
    lock = threading.Lock()

    def show(host: int, stream: str, line: str) -> None:
        with lock:
            print(f"{names[host]:{width}} | {line}", file=getattr(sys, stream), flush=True)

    if cluster.storage_url is not None:
        _say(f"storage at {cluster.storage_url}")
    began_s = time.monotonic()
    running = Running(cluster, launcher, command, on_line=show, per_host=per_host)
    timers = [threading.Timer(at_s, act, (cluster, host)) for act, host, at_s in faults]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        endings = running.wait()
    except KeyboardInterrupt:
        running.interrupt()
        try:
            running.wait(_INTERRUPT_S)
        except TimeoutError as error:
            _say(str(error))
        raise
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()  # what has begun ends before its cluster does
    failed = [ending for ending in sorted(endings, key=lambda e: e.ended_s) if ending.returncode]
    for ending in failed:
        after = f"after {ending.ended_s - began_s:.1f} s"
        _say(f"{names[ending.host]} ended with {ending.returncode} {after}")
    for host in cluster.hosts:
        if host.box is not None and host.box.peak_nbytes is not None:
            killed = "; a program was killed for memory" if host.box.oom_killed else ""
            _say(f"{host.name} took at most {format_bytes(host.box.peak_nbytes)}{killed}")
    if cluster.storage_url is not None:
        counts = cluster.served()
        _say(f"storage sent {counts.nbytes} bytes in {counts.requests} requests")
    if not failed:
        return 0
    code = failed[0].returncode
    return code if code > 0 else 128 - code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        usage="%(prog)s N [OPTION ...] -- COMMAND ...",
        description="Make N hosts in network namespaces, and run a command on each.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("count", type=int, metavar="N", help="hosts")
    add(
        "--launcher",
        choices=LAUNCHERS,
        default="env",
        help="env sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; torchrun meets "
        "by c10d (default: %(default)s)",
    )
    add("--per-host", type=int, default=1, metavar="K", help="ranks of each host (%(default)s)")
    add("--link", metavar="RATE", help="of each host's cable, either way: 1gbit, 100mbit")
    add("--memory", type=_nbytes, metavar="BYTES", help="of each host, page cache included: 3GB")
    add(
        "--storage",
        type=Path,
        metavar="PATH",
        help="a folder or file that another host serves over HTTP; its URL is in STREAMLOAD_URL",
    )
    add("--storage-link", metavar="RATE", help="of its cable (default: that of --link)")
    add(
        "--debian-names",
        action="store_true",
        help="each host finds its own name at 127.0.1.1, as Debian's installer has it",
    )
    for name, what in (
        ("--kill", "take a host away after so many seconds, as a power cut does; repeatable"),
        ("--link-down", "pull its cable; repeatable"),
        ("--link-up", "plug it in again; repeatable"),
    ):
        add(name, type=_fault, action="append", default=[], metavar="HOST@SECONDS", help=what)
    return parser


def _nbytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fault(text: str) -> tuple[int, float]:
    found = _FAULT.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"is like node-2@5.5, not {text!r}")
    return int(found[1]), float(found[2])


def _say(what: str) -> None:
    print(f"cluster: {what}", file=sys.stderr, flush=True)
