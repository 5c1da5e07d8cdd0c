"""What a section of the bench is given and what it finds, and what several of them do."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from boxes import Boxes, BoxRun, NoBoxesError
from make_checkpoint import Shape, make_checkpoint, shape_of_size

from streamload.bench import compare
from streamload.bench.machine import installed_version
from streamload.bench.processes import SAMPLE_S, Child, Memory, command
from streamload.core.dtypes import BF16
from streamload.core.memory import available_host_nbytes
from streamload.core.units import format_bytes

SMALL_NBYTES = 1_000_000
_Found = TypeVar("_Found")


class NotHereError(Exception):
    """A section cannot be run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bounds."""

    what: str  # in words
    value: float  # as measured
    at_least: float | None = None  # the least that is good, or None
    at_most: float | None = None  # the most that is good, or None

    @property
    def met(self) -> bool:
        """Whether the value is within its bounds."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    @property
    def wanted(self) -> str:
        """The bounds in words."""
        low = "" if self.at_least is None else f">= {self.at_least:.4g}"
        high = "" if self.at_most is None else f"<= {self.at_most:.4g}"
        return " ".join(filter(None, (low, high)))


@dataclass(slots=True)
class Section:
    """What a section found."""

    name: str  # the section
    note: str  # how to read its rows
    # one measurement or median each, by column
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)  # figures and their bounds
    # all that was measured, where that is more than the rows
    raw: list[dict[str, Any]] = field(default_factory=list)
    charts: dict[str, str] = field(default_factory=dict)  # SVG files, by name
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # more rows, by title
    # what must not be: the command ends with an error
    failures: list[str] = field(default_factory=list)

    def target(self, what: str, value: float, *bounds: float | None, **named: float | None) -> None:
        """Add a `Target`."""
        self.targets.append(Target(what, value, *bounds, **named))

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        targets = [asdict(target) | {"met": target.met} for target in self.targets]
        more = {"tables": self.tables} if self.tables else {}
        found = {"note": self.note, "rows": self.rows, "targets": targets, "raw": self.raw}
        return found | more


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for: see ``scripts/bench --help``."""

    nbytes: int
    runs: int
    work: Path  # a folder for checkpoints
    say: Callable[[str], None]  # told what is being done
    devices: tuple[str, ...] = ()  # names of the devices, as far as they work here
    ways: Sequence[str] = ()
    tensors: int = 50_000
    scale: float = 1.0  # of the section diffusers, like the next
    steps: int = 20
    pixels: int = 1024
    budgets: Sequence[str] = ()
    run: bool = False  # the section quant: products of quantised weights
    cold_nbytes: int = 4_000_000_000
    shards: int = 4
    seconds: float = 60.0
    torch_device: str = "cuda:0"
    tinygrad_device: str = "CUDA"
    # for a loader, a folder that comes first on its import path
    sites: Mapping[str, str] = field(default_factory=dict)
    # where the sections gpu-... and diffusers leave their checkpoints for the next time, or None
    keep: Path | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a child process from its start to its end."""

    laps: tuple[dict[str, Any], ...]  # the answers of laps: "seconds", "cpu_s", and more
    cpu_s: float  # user and system seconds, with children that it waited for
    peak: Memory

    @property
    def first(self) -> dict[str, Any]:
        """The answer of the first lap."""
        return self.laps[0]


def measure(
    job: Mapping[str, Any], *, laps: int = 1, sample_s: float = SAMPLE_S, timeout_s: float = 1800.0
) -> Measured:
    """Run a job in a child process to its end, and return its figures; raises MeasurementError."""
    used = _children_s()
    with Child(job, timeout_s=timeout_s, sample_s=sample_s) as child:
        answers = tuple(child.lap()[0] for _ in range(laps))
    return Measured(answers, _children_s() - used, child.peak)


def _children_s() -> float:
    """CPU seconds of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def checkpoint(
    options: Options,
    nbytes: int,
    shape: Shape | None = None,
    *,
    folder: Path | None = None,
    name: str = "checkpoint",
    keep: bool = False,
    **arguments: Any,
) -> Iterator[Path]:
    """A checkpoint in the page cache; removed afterwards unless it is to be kept.

    By default it is a Llama of bf16, with its data at 8 modulo 16. One that is in the folder by its
    name and size is not made again. More arguments are those of `make_checkpoint`.

    Raises:
        NotHereError: there is no room for it.
    """
    out = (folder or options.work) / f"{name}-{nbytes}"
    if not out.exists():  # complete, or not there
        need_disk(out.parent, nbytes + 2**28)
        options.say(f"writing a checkpoint of {format_bytes(nbytes)}: {name}")
        make_checkpoint(out, shape or shape_of_size(nbytes, BF16), **arguments)
    try:
        read_all(out)
        yield out
    finally:
        if not keep:
            shutil.rmtree(out, ignore_errors=True)


def need_packages(*names: str) -> None:
    """Raise NotHereError unless all of these packages are installed."""
    for name in names:
        if not installed_version(name):
            raise NotHereError(f"{name} is not installed")


def files_nbytes(path: Path) -> int:
    """Return the bytes of all safetensors files in a folder and those in it."""
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


def read_all(path: Path) -> None:
    """Bring a checkpoint into the page cache, and its dirty pages to the disk."""
    compare.warm(sorted(path.glob("*.safetensors")))


def forget(path: Path) -> None:
    """Drop a checkpoint from the page cache."""
    compare.forget(sorted(path.glob("*.safetensors")))


#: What is done before a load, by what is then said of the file.
FILES: Mapping[str, Callable[[Path], None]] = {"cached": read_all, "not cached": forget}


def need_memory(nbytes: int) -> None:
    """Raise NotHereError where less is free."""
    free_nbytes = available_host_nbytes()
    if free_nbytes < nbytes:
        raise NotHereError(
            f"needs {format_bytes(nbytes)} of free memory, there are {format_bytes(free_nbytes)}: "
            "choose a smaller --size"
        )


def need_disk(folder: Path, nbytes: int) -> None:
    """Raise NotHereError where a folder's disk has less room."""
    free_nbytes = shutil.disk_usage(folder).free
    if free_nbytes < nbytes:
        raise NotHereError(f"{folder} has {format_bytes(free_nbytes)} free")


def boxes_here() -> Boxes:
    """What makes memory cgroups.

    Raises:
        NotHereError: none can be made.
    """
    try:
        return Boxes()
    except (NoBoxesError, OSError) as error:
        raise NotHereError(str(error)) from error


def in_box(
    options: Options, what: str, path: Path, job: Mapping[str, Any], maker: Boxes, limit_nbytes: int
) -> Iterator[tuple[str, BoxRun]]:
    """Run a job in a box with a checkpoint in each of the states of `FILES`; what became of it."""
    for state, prepare in FILES.items():
        options.say(f"{what}, in the box, file {state}")
        prepare(path)
        yield state, maker.run(command(job, at_once=True), limit_nbytes, timeout_s=1800)


def in_turns(
    jobs: Mapping[str, Callable[[], _Found]],
    runs: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[_Found]]:
    """Run jobs in turn, each ``runs`` times after ``before``, which gets its name."""
    found: dict[str, list[_Found]] = {name: [] for name in jobs}
    for name in [*jobs] * runs:
        before(name)
        found[name].append(jobs[name]())
    return found


def cached(options: Options, path: Path) -> Callable[[str], None]:
    """A function to call before each of several jobs: it brings a checkpoint into the cache."""

    def prepare(name: str) -> None:
        options.say(name)
        read_all(path)

    return prepare
