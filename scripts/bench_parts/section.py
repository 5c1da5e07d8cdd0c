"""What a section of the bench is given and what it finds, and what several of them do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from boxes import Boxes, BoxRun, NoBoxesError
from make_checkpoint import Shape, make_checkpoint, shape_of_size

from streamload.bench import compare
from streamload.bench.processes import Measured, command
from streamload.dtypes import BF16
from streamload.planning.budget import available_host_nbytes
from streamload.units import format_bytes

SMALL_NBYTES = 1_000_000


class NotHereError(Exception):
    """A section cannot be run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bounds.

    Attributes:
        what: in words.
        value: as measured.
        at_least: the least that is good, or None.
        at_most: the most that is good, or None.
    """

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

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
    """What a section found.

    Attributes:
        name: the section.
        note: how to read its rows.
        rows: one measurement or median each, by column.
        targets: figures and their bounds.
        raw: all that was measured, where that is more than the rows.
        charts: SVG files, by name.
        tables: more rows, by title.
        failures: what must not be: the command ends with an error.
    """

    name: str
    note: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    charts: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def target(
        self, what: str, value: float, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Add a `Target`."""
        self.targets.append(Target(what, value, at_least, at_most))

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        targets = [asdict(target) | {"met": target.met} for target in self.targets]
        more = {"tables": self.tables} if self.tables else {}
        found = {"note": self.note, "rows": self.rows, "targets": targets, "raw": self.raw}
        return found | more


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    Attributes:
        nbytes: size of the checkpoint; of the sections gpu-...: of the large ones.
        runs: how many processes of each kind.
        work: a folder for checkpoints.
        say: told what is being done.
        devices: names of the devices, as far as they work here.
        ways: names, or parts of names, of the ways to load that the section torch takes.
        tensors: how many small ones the sections many and gpu-small have.
        seed: of the random loads of the section torture.
        only: the number of the one that it runs; None: the first ``runs``.
        usable: what it tells is how much of a box can be used, and nothing else.
        cold_nbytes: size of the checkpoints that are read from the disk, and of variants.
        shards: of the large checkpoint.
        seconds: of one comparison; it begins no further round then.
        torch_device: in torch's spelling.
        tinygrad_device: in tinygrad's.
        sites: for a loader, a folder that comes first on its import path.
        keep: where the sections gpu-... leave their checkpoints for the next time, or None.
    """

    nbytes: int
    runs: int
    work: Path
    say: Callable[[str], None]
    devices: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    tensors: int = 50_000
    seed: int = 0
    only: int | None = None
    usable: bool = False
    cold_nbytes: int = 4_000_000_000
    shards: int = 4
    seconds: float = 60.0
    torch_device: str = "cuda:0"
    tinygrad_device: str = "CUDA"
    sites: Mapping[str, str] = field(default_factory=dict)
    keep: Path | None = None


@contextmanager
def cached_checkpoint(
    options: Options, nbytes: int, shape: Shape | None = None, **arguments: Any
) -> Iterator[Path]:
    """A bf16 checkpoint in the page cache, data at 8 modulo 16; removed afterwards.

    Args:
        options: where.
        nbytes: of its tensors.
        shape: another than a Llama's.
        **arguments: of `make_checkpoint`.
    """
    out = options.work / f"checkpoint-{nbytes}"
    options.say(f"writing a checkpoint of {format_bytes(nbytes)}")
    make_checkpoint(out, shape or shape_of_size(nbytes, BF16), **arguments)
    try:
        read_all(out)
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


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
    options: Options, what: str, path: Path | None, jobs: Mapping[str, Callable[[], Measured]]
) -> dict[str, list[Measured]]:
    """Run jobs in turn, as often as asked for, with the checkpoint ``path`` in the page cache."""
    found: dict[str, list[Measured]] = {name: [] for name in jobs}
    for number in range(options.runs):
        for name, job in jobs.items():
            options.say(f"{what}: run {number + 1} of {options.runs}, {name}")
            if path is not None:
                read_all(path)
            found[name].append(job())
    return found
