"""The command line of ``scripts/gpu``: tests, then rows one by one, until its minutes are over."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_parts.state import (
    KINDS,
    ROOT,
    ROWS,
    SHARDS,
    digest,
    digests,
    row_problem,
    test_files,
    test_problem,
)
from streamload.bench.processes import Child, MeasurementError, call
from streamload.core.units import format_bytes, format_table

_TESTS_SHARE = 0.6  # of the minutes
# one that measures the memory that all processes have taken of the device, and one that takes none
_MEASURES, _STANDS_IN = re.compile(r"device_meter|info\.free_nbytes"), re.compile("cuda_stand_in")
_LONG = ("stream_readers", "offload", "dequant", "product", "quant", "diffusers")  # longest first
_ROW_S = 75.0  # most seconds for a step of a row
_PREPARE_S = 200.0  # for a step
_LAST_S = 15.0  # kept for the end
_LEAST_ROW_S = 20.0  # a row begins only if as much is left
_MOST_TRACE = 4000  # characters of a row's error
_ROOM_NBYTES = 56_000_000_000  # of the checkpoints, with some to spare
_MIXTURE_NBYTES = 4_000_000_000
_NF4_BUDGET, _BUDGET = 2_000_000_000, 3_000_000_000
_TINY_NBYTES, _TINY_SCALE, _SCALE = 8_000_000, 0.02, 0.1
_SHARE = 9_000_000_000  # of each of two GPUs
_TINY_TWO_NBYTES, _TINY_BUDGET = 60_000_000, 30_000_000


@dataclass(slots=True)
class Run:
    """A run, whose results are written as they come.

    Attributes:
        out: the file for results, or None.
        until: the end, on the monotonic clock.
        work: the folder for checkpoints.
        device: of torch.
        rehearsed: whether models are tiny.
        two: whether rows are those of two GPUs.
        found: the results.
        failed: by name of what could not be prepared, the reason.
        lock: is held while results change.
        device_is_free: is set once no test asks for the memory of all processes.
        children: processes of jobs.
        processes: those of tests.
    """

    out: Path | None
    until: float
    work: Path
    device: str
    rehearsed: bool
    found: dict[str, Any]
    two: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    device_is_free: threading.Event = field(default_factory=threading.Event)
    children: set[Child] = field(default_factory=set)
    processes: set[int] = field(default_factory=set)

    @property
    def shards(self) -> tuple[int, ...]:
        """Numbers of files of each checkpoint."""
        return SHARDS[1:] if self.two else SHARDS

    @property
    def tiny_nbytes(self) -> int:
        """Bytes of a model in a rehearsal."""
        return _TINY_TWO_NBYTES if self.two else _TINY_NBYTES

    @property
    def left_s(self) -> float:
        """Seconds until results must be ready."""
        return self.until - time.monotonic()

    def add(self, kind: str, name: str, facts: Mapping[str, Any]) -> None:
        """Put a row or test in the place of one of that name, and write all results."""
        with self.lock:
            kept = [each for each in self.found[kind] if each[name] != facts[name]]
            self.found[kind] = sorted([*kept, dict(facts)], key=lambda each: str(each[name]))
            self.write()

    def write(self) -> None:
        """Write all results, under the lock."""
        if self.out is not None:
            partial = self.out.with_name(self.out.name + ".partial")
            # traces name no folder of one machine
            text = json.dumps(self.found, indent=1).replace(f"{ROOT}/", "")
            partial.write_text(text + "\n")
            partial.replace(self.out)

    @contextmanager
    def child(self, function: str, timeout_s: float, **arguments: Any) -> Iterator[Child]:
        """Run a job of `jobs` in a process."""
        job = call(f"gpu_parts.jobs:{function}", **arguments)
        with Child(job, timeout_s=max(min(timeout_s, self.left_s), 1.0), sample_s=0.02) as child:
            self.children.add(child)
            try:
                yield child
            finally:
                self.children.discard(child)

    @contextmanager
    def threads(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """Give threads; Ctrl-C ends the processes that they wait for."""
        with ThreadPoolExecutor(count) as pool:
            try:
                yield pool
            except BaseException:
                self.until = time.monotonic()
                self.kill()
                raise

    def kill(self) -> None:
        """End all processes, and what waits for the device."""
        self.device_is_free.set()
        for pid in list(self.processes):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for child in list(self.children):
            child.kill()


def main(args: argparse.Namespace) -> int:
    """Run what is asked for; return the exit status."""
    begun = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    room = args.work or _room(0 if args.rehearse else _ROOM_NBYTES)
    with tempfile.TemporaryDirectory(prefix="streamload-gpu-", dir=room) as work:
        until = begun + args.minutes * 60 - _LAST_S
        device = "cpu" if args.rehearse else "cuda:0"
        found = _before(args)
        run = Run(args.json, until, Path(work), device, args.rehearse, found, args.two)
        ends = [threading.Timer(max(run.left_s, 0), run.kill)]
        ends.append(threading.Timer(max(run.left_s, 0) + _LAST_S * 2 / 3, _give_up, (run,)))
        for end in ends:
            end.daemon = True
            end.start()
        _say(f"files in {work}")
        try:
            status = _run(run, args.only)
        finally:
            run.kill()
    for end in ends:
        end.cancel()
    return status


def _give_up(run: Run) -> None:
    """End, whatever hangs: results are in their file."""
    subprocess.Popen(["rm", "-rf", run.work], start_new_session=True)
    os._exit(1)


def _run(run: Run, only: str) -> int:
    """Run tests and rows, and print; return the exit status."""
    begun = time.monotonic()
    if not _facts(run):
        _say("gpu: torch finds no CUDA device; --rehearse runs tiny models on the CPU")
        return 2
    with run.threads(1) as pool:
        prepared = pool.submit(_prepare, run, only)
        _test(run, only)
        prepared.result()
    _rows(run, only)
    with run.lock:
        run.found["seconds"] = round(time.monotonic() - begun, 1)
        run.write()
    return _print(run)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _room(nbytes: int) -> Path:
    """Return a folder with so many bytes free, in memory if it can be; else the one with most."""
    free_nbytes: dict[str, int] = {}
    for name in ("/dev/shm", tempfile.gettempdir()):
        with suppress(OSError):
            free_nbytes[name] = shutil.disk_usage(name).free
    enough = [name for name, free in free_nbytes.items() if free >= nbytes]
    return Path(enough[0] if enough else max(free_nbytes, key=free_nbytes.__getitem__))


def _before(args: argparse.Namespace) -> dict[str, Any]:
    """Return results to begin with: those of the same sources, if only some are to run."""
    rooms = digests()
    found: dict[str, Any] = {"rows": [], "tests": []}
    if args.only != "*" and args.json is not None and not args.two:
        with suppress(OSError, ValueError):
            before = json.loads(args.json.read_text())
            if before["rooms"] == rooms and before["rehearsed"] == args.rehearse:
                found = {kind: before[kind] for kind in found}
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    command += ["--exclude=*"]
    commit = args.commit or ""
    if not commit:
        with suppress(OSError):
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    facts = {"commit": commit, "digest": digest(rooms), "rooms": rooms, "rehearsed": args.rehearse}
    return {**facts, "date": time.strftime("%Y-%m-%d"), **found}


def _facts(run: Run) -> bool:
    """Add facts of the machine; return whether the device is there."""
    try:
        with run.child("versions", 60.0) as child:
            said = child.lap()[0]
    except MeasurementError as error:
        said = {"versions": str(error)}
    with run.lock:
        run.found |= {key: said[key] for key in said if key not in ("seconds", "cpu_s")}
        run.write()
    return run.rehearsed or "device" in said


# --- tests ----------------------------------------------------------------------------------------


def _test(run: Run, only: str) -> None:
    """Run test files, one for two CPUs at once; those that measure the device's memory, alone."""
    files = [file for file in test_files() if fnmatch.fnmatch(file, only)]
    if run.two:
        files = [file for file in files if "device_count()" in (ROOT / file).read_text()]
    if run.rehearsed:
        files = files[:0]
    until = time.monotonic() + run.left_s * _TESTS_SHARE
    alone, beside, others = parted(files)
    with run.threads(max((os.cpu_count() or 1) // 2, 1)) as pool:
        begun = [pool.submit(_tested, run, file, until) for file in beside]
        try:
            for file in alone:
                _tested(run, file, until)
        finally:
            run.device_is_free.set()
        begun += [pool.submit(_tested, run, file, until) for file in others]
        for one in begun:
            one.result()


def parted(files: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return test files that run alone, those beside them, which use no device, and the others."""
    alone, beside, others = list[str](), list[str](), list[str]()
    for file in files:
        text = (ROOT / file).read_text()
        if _STANDS_IN.search(text):
            beside.append(file)
        else:
            (alone if _MEASURES.search(text) else others).append(file)
    names = [f"test_{name}_cuda.py" for name in _LONG]
    others.sort(key=lambda file: [*names, Path(file).name].index(Path(file).name))
    return alone, beside, others


def _tested(run: Run, file: str, until: float) -> None:
    """Run a test file in a process, and add its outcomes."""
    facts: dict[str, Any] = {"file": file, "passed": 0, "failed": 0, "skipped": 0}
    facts |= {"ended": "", "skips": {}, "failures": {}, "seconds": 0.0}
    left_s = min(until - time.monotonic(), run.left_s)
    if left_s < 1:
        run.add("tests", "file", facts | {"ended": "not run: out of time"})
        return
    with tempfile.TemporaryDirectory(prefix="streamload-gpu-") as folder:  # on a disk, if it can be
        outcomes = Path(folder, "outcomes")
        paths = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"STREAMLOAD_GPU_OUTCOMES": str(outcomes)}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        options = ["-q", "-p", "no:cacheprovider", "-p", "gpu_parts.outcomes", "--tb=short"]
        command = [sys.executable, "-m", "pytest", *options, f"--basetemp={folder}/tests", file]
        begun = time.monotonic()
        with open(Path(folder, "log"), "w+b") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )
            run.processes.add(process.pid)
            try:
                process.wait(left_s)
            except subprocess.TimeoutExpired:
                facts["ended"] = "out of time"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                run.processes.discard(process.pid)
            facts["seconds"] = round(time.monotonic() - begun, 1)
            log.seek(0)
            said = log.read().decode(errors="replace")
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    begun_last = _count(facts, lines)
    code = process.returncode
    if not facts["ended"] and code < 0:
        facts["ended"] = f"killed by {signal.Signals(-code).name}"
    elif not facts["ended"] and code not in (0, 1, 5):
        facts["ended"] = f"pytest: exit status {code}"
    if facts["ended"]:
        facts["ended"] += f" in {begun_last}" * bool(begun_last)
        facts["log"] = said[-_MOST_TRACE:]
    run.add("tests", "file", facts)
    counts = ", ".join(f"{facts[key]} {key}" for key in ("passed", "failed", "skipped"))
    _say(f"{file}: {counts} in {facts['seconds']} s {facts['ended']}".rstrip())


def _count(facts: dict[str, Any], lines: Sequence[str]) -> str:
    """Add what a file's tests said: counts and reasons; return the test that began last."""
    begun = ""
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:  # it was killed as it wrote
            break
        outcome, why = one["outcome"], one.get("why", "")
        if outcome == "begun":
            begun = one["test"]
        elif outcome in ("passed", "failed", "skipped"):
            facts[outcome] += 1
        if outcome == "skipped":
            facts["skips"][why] = facts["skips"].get(why, 0) + 1
        elif outcome == "failed":
            facts["failures"][one["test"]] = why
    return begun


# --- files and what plain torch computes ----------------------------------------------------------


def _prepare(run: Run, only: str) -> None:
    """Write checkpoints, and what plain torch computes; reasons of failures go to `Run.failed`."""
    rows = _chosen(run, only)
    needs = {need for row in rows for need in row.needs}
    others = sorted(needs - {"llama", "llama-nf4"})
    nbytes, mixture = (run.tiny_nbytes, 0) if run.rehearsed else (0, _MIXTURE_NBYTES)
    scale = _TINY_SCALE if run.rehearsed else _SCALE
    where = {"folder": str(run.work), "shards": run.shards}
    with run.threads(4) as pool:

        def llama() -> None:
            _finish(run, "llama", "write_llamas", nbytes=nbytes, **where)
            if "llama-nf4" in needs and "llama" not in run.failed:
                pool.submit(_finish, run, "llama-nf4", "write_nf4", **where)
            if any("llama" in row.needs and "expected" in row.arguments for row in rows):
                _expect(run, "llama")

        def write_others() -> None:
            _finish(run, "mixture", "write_others", nbytes=mixture, scale=scale, **where)
            for kind in others:
                _expect(run, kind)

        begun = [pool.submit(llama)] if "llama" in needs else []
        begun += [pool.submit(write_others)] if others else []
        for one in begun:
            one.result()  # `llama` submits, too


def _expect(run: Run, name: str) -> None:
    run.device_is_free.wait()
    path = run.work / f"{name}-{run.shards[0]}"
    if path.exists():
        given: dict[str, Any] = {"path": str(path), "device": run.device}
        if run.two:
            given["kinds"] = ["bfloat16", "nf4"]
        _finish(run, name, f"expect_{name}", **given, out=str(run.work / f"expected-{name}"))


def _finish(run: Run, name: str, function: str, **arguments: Any) -> None:
    """Run a job to its end."""
    try:
        with run.child(function, _PREPARE_S, **arguments) as child:
            while "end" not in (said := child.lap()[0]):
                _say(f"made {Path(said['made']).name} in {said['seconds']:.1f} s")
    except MeasurementError as error:
        run.failed[name] = f"{function}: {error}"
        _say(f"{function}: {error}")


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A row: its process, and what it needs.

    Attributes:
        function: "module:function" of a job.
        needs: names of what is prepared.
        each: arguments of each of several processes that run steps together, ranks that meet.
    """

    name: str
    function: str
    arguments: dict[str, Any]
    needs: tuple[str, ...]
    each: Sequence[Mapping[str, Any]] = ({},)


def _all_rows(run: Run, only: str) -> Iterator[_Row]:
    tiny = run.rehearsed
    plain: dict[str, Any] = {"count": 128, "exact": True}
    near = plain | {"exact": False}
    budget = {"budget": 0 if tiny else _BUDGET}
    models: dict[str, tuple[str, str, dict[str, Any]]] = {
        "from_pretrained": ("llama", "llama-bfloat16", plain),
        "offload, 1 token": ("llama", "llama-bfloat16", plain | budget | {"count": 1}),
        "offload, 128 tokens": ("llama", "llama-bfloat16", plain | budget),
        "stored nf4": ("llama-nf4", "llama-nf4", near | {"budget": 0 if tiny else _NF4_BUDGET}),
        "quant=nf4": ("llama", "llama-nf4", near | {"options": {"quant": "nf4"}}),
        "quant=int8": ("llama", "llama-int8", near | {"options": {"quant": "int8"}}),
        "mixture": (
            "mixture",
            "mixture-bfloat16",
            plain | {"budget": 0 if tiny else _MIXTURE_NBYTES // 4},
        ),
    }
    for kind in KINDS:
        for count, name in zip(SHARDS, (n for n in ROWS if n.startswith(f"{kind}, ")), strict=True):
            if not fnmatch.fnmatch(name, only):
                continue
            trace = str(run.work / f"trace-{kind}-{count}".replace(" ", "-"))
            given: dict[str, Any] = {"device": run.device, "trace": trace}
            if kind == "load":
                given["path"] = str(run.work / f"llama-{count}")
                yield _Row(name, "gpu_parts.jobs:load", given, ("llama",))
            elif kind == "pipeline":
                given["path"] = str(run.work / f"pipeline-{count}")
                given["expected"] = str(run.work / "expected-pipeline.pt")
                yield _Row(name, "gpu_parts.jobs:pipeline", given, ("pipeline",))
            else:
                files, expected, more = models[kind]
                given |= more | {"path": str(run.work / f"{files}-{count}")}
                given["expected"] = str(run.work / f"expected-{expected}.pt")
                needs = (files.partition("-")[0], files)
                yield _Row(name, "gpu_parts.jobs:model", given, needs)


def _chosen(run: Run, only: str) -> list[_Row]:
    return list(_two_rows(run, only) if run.two else _all_rows(run, only))


def _two_rows(run: Run, only: str) -> Iterator[_Row]:
    """Yield the rows of two GPUs: spread over both, and beside them one GPU and transformers."""
    devices = ["cpu"] if run.rehearsed else ["cuda:0", "cuda:1"]
    ranks: Sequence[Mapping[str, Any]] = ({}, {})
    llama, nf4 = str(run.work / "llama-4"), str(run.work / "llama-nf4-4")
    expected = str(run.work / "expected-llama-bfloat16.pt")
    exact = {"path": llama, "expected": expected, "count": 128, "exact": True}
    near = {"path": nf4, "expected": str(run.work / "expected-llama-nf4.pt"), "exact": False}
    tiny = run.rehearsed
    budget, nf4_budget = (_TINY_BUDGET, _TINY_BUDGET) if tiny else (_BUDGET, _NF4_BUDGET)
    share = run.tiny_nbytes if tiny else _SHARE
    split = {
        "": {},
        ", equal": dict.fromkeys(devices, share),
        ", 6 and 11 GB": dict(zip(devices, (share * 2 // 3, share * 11 // 9), strict=False)),
    }
    found: list[tuple[str, str, dict[str, Any], Sequence[Mapping[str, Any]]]] = []
    for how, budgets in split.items():
        where = {"device": devices, "budget": budgets} if budgets else {}
        found.append((f"load{how}", "jobs:load", {"path": llama} | where, ({},)))
    for whose in ("streamload", "transformers"):
        for how, budgets in split.items():
            options = {"device": devices, "budget": budgets} if budgets else {}
            given = exact | {"options": options, "whose": whose}
            found.append((f"from_pretrained of {whose}{how}", "jobs:model", given, ({},)))
    for way in ("layers", "balanced", "tensor"):
        given = {"path": llama, "split": way, "budget": share}
        found.append((f"two ranks, {way}", "two_jobs:rank_load", given, ranks))
    for whose in ("transformers", "streamload"):
        given = {"path": llama, "expected": expected, "whose": whose, "budget": share * 10 // 9}
        found.append((f"two ranks, tp_size=2 of {whose}", "two_jobs:rank_model", given, ranks))
    own = [{"device": name} for name in devices]
    given = exact | {"budget": 0 if tiny else budget}  # 0: the least
    found.append(("offload", "jobs:model", given, ({},)))
    found.append(("offload, two processes", "jobs:model", given, own))
    given = exact | near | {"budget": 0 if tiny else nf4_budget}
    found.append(("offload nf4, two processes", "jobs:model", given, own))
    given = {"path": llama, "expected": expected, "budget": budget, "devices": devices}
    found.append(("offload, two models of a process", "two_jobs:both", given, ({},)))
    given = {"path": llama, "expected": expected, "exact": True, "budget": budget}
    found.append(("two ranks, offload", "two_jobs:rank_offload", given, ranks))
    given = near | {"budget": nf4_budget}
    found.append(("two ranks, offload nf4", "two_jobs:rank_offload", given, ranks))
    for name, function, arguments, each in found:
        if fnmatch.fnmatch(name, only):
            trace = str(run.work / f"trace-{name}".replace(" ", "-"))
            given = {"device": run.device, "trace": trace} | arguments
            needs = ("llama", "llama-nf4") if "nf4" in name else ("llama",)
            yield _Row(name, f"gpu_parts.{function}", given, needs, each)


def _rows(run: Run, only: str) -> None:
    """Run rows one by one, each in processes that imported what they need during the last one."""
    rows = _chosen(run, only)
    ready: list[Child] = []
    for at, row in enumerate(rows):
        facts: dict[str, Any] = {"name": row.name, "right": False}
        if run.left_s < _LEAST_ROW_S:
            facts["wrong"] = "not run: out of time"
        elif lacking := [need for need in row.needs if need in run.failed]:
            facts["wrong"] = run.failed[lacking[0]]
        else:
            children, ready = ready or _begun(run, row), []
            following = rows[at + 1 : at + 2]
            if following and run.failed.keys().isdisjoint(following[0].needs):
                ready = _begun(run, following[0])
            _measure(run, row, children, facts)
        run.add("rows", "name", facts)
        _say(_line(facts))
    for child in ready:
        child.close(at_once=True)
        run.children.discard(child)


def _begun(run: Run, row: _Row) -> list[Child]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"WORLD_SIZE": len(row.each), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found = []
    for rank, own in enumerate(row.each):
        given = {**row.arguments, **own}
        given["trace"] += f"-{rank}"
        names = environ | {"RANK": rank, "LOCAL_RANK": rank}  # as torchrun sets them
        prefix = ["env", *(f"{name}={value}" for name, value in names.items())]
        job = call(row.function, **given)
        alone = len(row.each) == 1
        child = Child(job, timeout_s=_ROW_S, sample_s=0.01, prefix=() if alone else prefix)
        run.children.add(child)
        found.append(child)
    return found


def _measure(run: Run, row: _Row, children: Sequence[Child], facts: dict[str, Any]) -> None:
    """Run a row's steps, and add to its facts what they say: the most of its processes."""
    seconds: dict[str, float] = {}
    wrong: list[str] = []
    with ExitStack() as stack, run.threads(len(children)) as pool:
        for child in children:
            stack.enter_context(child)
        try:
            while True:
                laps = [pool.submit(child.lap) for child in children]
                every = [said for lap in laps if "end" not in (said := lap.result()[0])]
                if not every:
                    break
                for said in every:
                    step = said.pop("step")
                    took = round(said.pop("seconds"), 4)
                    seconds[step] = max(seconds.get(step, 0.0), took)
                    if why := said.pop("wrong", ""):
                        wrong.append(f"{step}: {why}")
                    for key in said.keys() - {"cpu_s"}:
                        facts[key] = max(facts.get(key, 0), said[key])
        except MeasurementError as error:
            why = "out of time" if run.left_s <= 0 else str(error)
            wrong.append(f"{why} after {list(seconds)[-1]}" if seconds else why)
            for child in children:  # one that waits for another
                child.kill()
            traces = [Path(f"{row.arguments['trace']}-{rank}") for rank in range(len(children))]
            texts = [trace.read_text(errors="replace") for trace in traces if trace.exists()]
            parts = [text.partition("\nExtension modules")[0][-_MOST_TRACE:] for text in texts]
            facts["trace"] = "\n".join(filter(None, parts))
    run.children.difference_update(children)
    facts |= {"seconds": seconds, "host_nbytes": max(c.peak.anon_nbytes for c in children)}
    facts |= {"right": not wrong, "wrong": "; ".join(wrong)}


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['name']}: {row_problem(row) or 'right'}"


def _print(run: Run) -> int:
    """Print tables of what was found; return the exit status."""
    rows = run.found["rows"]
    table = []
    names = [row.name for row in _chosen(run, "*")]
    for row in sorted(rows, key=lambda row: names.index(row["name"])):
        seconds = row.get("seconds", {})
        steps = ("open", "first pass", "pass", "idle pass", "generate")
        if "load" in seconds:
            steps = ("load", "", "load again", "", "")
        took = [f"{seconds[step]:.3f}" if step in seconds else "" for step in steps]
        error = f"{row['error']:.2g}" if "error" in row else ""
        sizes = [
            format_bytes(row[key]) if row.get(key) else ""
            for key in ("device_nbytes", "host_nbytes")
        ]
        said = "right" if row["right"] else "WRONG"
        table.append((row["name"], said, *took, error, *sizes))
    titles = ("row", "", "open, s", "first", "pass", "idle", "generate", "error", "device", "host")
    print(f"\n{run.found.get('device', run.device)}, {run.found['seconds']} s")
    if table:
        print(*format_table(titles, table, right=8), sep="\n")
    tests = run.found["tests"]
    counted = [
        (test["file"], *(str(test[key]) for key in ("passed", "failed", "skipped", "seconds")))
        for test in tests
    ]
    if counted:
        print(*format_table(("", "passed", "failed", "skipped", "s"), counted, right=4), sep="\n")
    for test in tests:
        for name, why in test["failures"].items():
            print(f"{name}: {' '.join(why.split())[-300:]}")
    wrong = [f"{row['name']}: {why}" for row in rows if (why := row_problem(row))]
    wrong += [f"{test['file']}: {why}" for test in tests if (why := test_problem(test))]
    print(*wrong, sep="\n")
    return 1 if wrong else 0
