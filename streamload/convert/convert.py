"""`streamload.convert`: a checkpoint becomes another one on disk, whole or not at all.

Everything is written below ``.streamload`` in the destination. What is finished there is in a
journal; when all is, the files get their names, the index last, and the folder is gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

from streamload.cast.table import CastCounts, OutOfRange
from streamload.checkpoint import remote
from streamload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamload.checkpoint.guard import FileState
from streamload.checkpoint.header import Header, is_there, unreadable
from streamload.checkpoint.readers import fingerprint
from streamload.checkpoint.url import Location, Url, is_foreign, without_secrets
from streamload.convert.journal import Began, Journal
from streamload.convert.memory import Way, choose_way
from streamload.convert.planning import (
    CONFIG,
    LARGEST_COPIED_NBYTES,
    WORK,
    ConvertPlan,
    Copied,
    Options,
    OutFile,
    OutTensor,
    all_paths,
    folder_of,
    in_folder,
    plan_conversion,
)
from streamload.convert.writing import Writer, check_written, unwritable
from streamload.digests import SIDECAR, Digest, Digests, hasher
from streamload.dtypes import DTypeArgument
from streamload.errors import CheckpointError, PlanInfeasibleError
from streamload.mapping import Rename
from streamload.plan.partition import Node
from streamload.plan.planner import DTypePolicy
from streamload.progress import Progress, reporting
from streamload.report import Clock, warn_of_overflow
from streamload.selection import Patterns, Selection
from streamload.units import format_bytes, format_table, parse_bytes

#: Most bytes of a file where nothing else is said: what huggingface_hub splits at.
DEFAULT_SHARD_SIZE = "5GB"

# Of a checkpoint in a folder, whoever wrote it.
_OF_A_CHECKPOINT = re.compile(
    rf"[^.].*\.safetensors(\.index\.json)?|{re.escape(CONFIG)}|{re.escape(SIDECAR)}", re.DOTALL
)
_COPIED_AT_ONCE_NBYTES = 2**20
# Given up where the disk is full, so that what is finished then can still be journaled.
_RESERVE_NBYTES = 2**14
_LINE_NBYTES = 128

# Of a filesystem that has no locks, as some of networks: who writes there must see to it.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did. Prints as a short table.

    Attributes:
        plan: what was planned.
        seconds: wall time of the whole call.
        read_nbytes: bytes of the source's data that this call read.
        counts: of each tensor whose cast changed a value, by its name in the output.
        digests: of each tensor's bytes, by its name in the output ("node/name" with nodes).
        resumed: how many tensors had been finished before.
        verified: the files were read back and compared.
        dry_run: nothing was written.
    """

    plan: ConvertPlan
    seconds: float
    read_nbytes: int = 0
    counts: Mapping[str, CastCounts] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    resumed: int = 0
    verified: bool = False
    dry_run: bool = False

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes read over the time of the whole call, in GB/s."""
        return self.read_nbytes / 1e9 / self.seconds if self.seconds else 0.0

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(
            {
                "plan": json.loads(self.plan.to_json()),
                "dry_run": self.dry_run,
                "seconds": self.seconds,
                "read_nbytes": self.read_nbytes,
                "written_nbytes": 0 if self.dry_run else self.plan.written_nbytes,
                "gigabytes_per_second": self.gigabytes_per_second,
                "resumed": self.resumed,
                "verified": self.verified,
                "counts": {name: asdict(count) for name, count in self.counts.items()},
                "digests": dict(self.digests),
            }
        )

    def __str__(self) -> str:
        if self.dry_run:
            return str(self.plan)
        files, total = self.plan.files, sum(self.counts.values(), CastCounts())
        tensors = sum(len(file.tensors) for file in files)
        rows = [
            ("checkpoint", self.plan.path),
            ("destination", str(self.plan.destination)),
            (
                "tensors",
                f"{tensors} in {len(files)} file{'s' * (len(files) != 1)}"
                + f", {self.resumed} of them finished before" * bool(self.resumed),
            ),
            (
                "read",
                f"{format_bytes(self.read_nbytes)} in {self.seconds:.2f} s, "
                f"{self.gigabytes_per_second:.2f} GB/s",
            ),
            ("written", format_bytes(self.plan.written_nbytes)),
        ]
        if self.counts:
            rows.append(
                (
                    "changed",
                    f"in {len(self.counts)} tensors: {total.overflowed} overflowed, "
                    f"{total.flushed} flushed to zero, {total.rounded} rounded",
                )
            )
        if self.verified:
            rows.append(("verified", f"{tensors} tensors, read back"))
        rows += [("note", note) for note in self.plan.notes]
        return "\n".join(format_table(rows[0], rows[1:], right=0))


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: DTypeArgument = None,
    out_of_range: OutOfRange = "inf",
    max_shard_size: float | str = DEFAULT_SHARD_SIZE,
    nodes: Sequence[Node] | None = None,
    select: Patterns = (),
    exclude: Patterns = (),
    rename: Rename | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    progress: Progress = "auto",
) -> ConvertReport:
    """Write a checkpoint anew: with other dtypes, files or names, or split over nodes.

    It takes some tens of MB of memory, whatever the checkpoint's size. The result is in the layout
    of Hugging Face, with the files that lie beside the checkpoint (configuration, tokenizer), the
    dtype in config.json as it is then, and the digests of all tensors in ``streamload.json``.

    Nothing in the destination looks finished before all is: files are written in a folder
    ``.streamload`` there, and named at the end, the index last. After a failure, or when the
    process was killed, that folder holds what was finished, and ``resume=True`` does the rest.

    A destination holds a checkpoint when there is, in it or in a folder that is written or that an
    earlier conversion made there for a node: a ``*.safetensors``, an index of such, a config.json,
    a sidecar or a file that the sidecar lists, or any file of a name that is written. Without
    ``overwrite`` that is refused. With it, all of that is removed before the first new file gets
    its name: what is there then is of one conversion. Nothing else in the destination is touched.

    Args:
        source: the checkpoint, as in `open_checkpoint`.
        destination: a folder; it is made where there is none.
        dtype: a dtype for all floats, or patterns of names (the first that matches decides):
            ``{"*norm*": "float32", "*": "float16"}``. None, and "checkpoint" in a pattern, is as
            in the checkpoint.
        out_of_range: what becomes of finite values that a dtype cannot represent: infinity
            ("inf"), the largest finite value ("clamp"), or an error ("error").
        max_shard_size: most bytes of a file, unless one tensor alone is larger.
        nodes: one folder for each, with the layers that fit its budget and their ``plan.json``.
        select: patterns of the tensors to be converted, by their names in the checkpoint; none
            stands for all.
        exclude: patterns of those that are not.
        rename: what names become: a dict (others stay), or a callable that returns a name, or
            None to leave the tensor out.
        resume: continue what an earlier call with the same source and options left unfinished;
            begin where there is nothing, and do nothing where all is finished.
        overwrite: replace a finished checkpoint as said above, or begin an unfinished one again.
            The old one stays until the new one is whole.
        verify: read all that was written back from the disk, before it gets its names.
        dry_run: plan, and check all that can be checked without writing.
        progress: as in `load_state_dict`.

    Raises:
        CheckpointError: the source is not what it should be; or the destination holds something
            else, overlaps the source, is being written by another conversion, or cannot be
            written.
        PlanInfeasibleError: there is not enough room on the disk, or in memory, or a node cannot
            hold its part.
        UnsupportedCastError: a dtype cannot be cast, or must not be.
        OutOfRangeError: a value does not fit, under ``out_of_range="error"``.
        ValueError: an argument is invalid.
    """
    clock = Clock()
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    options = _options(dtype, out_of_range, max_shard_size, nodes, select, exclude, rename)
    checkpoint = open_checkpoint(source)
    dtypes = [wanted for _, wanted in options.policy.rules]
    way = choose_way(checkpoint, dtypes, nodes=bool(options.nodes))
    if is_foreign(os.fsdecode(destination)):
        shown = without_secrets(os.fsdecode(destination))
        raise ValueError(f"a conversion is written to a folder, not to {shown}")
    plan = plan_conversion(checkpoint, Path(destination), options)
    job = _Conversion(checkpoint, plan, options, way)
    job.check_apart()
    if dry_run:
        job.check_destination(resume=resume, overwrite=overwrite)
        job.check_room()
        return ConvertReport(plan, clock.seconds, dry_run=True)
    with ExitStack() as locks:
        for folder in job.folders():
            locks.enter_context(_locked(plan.destination / folder))
        report = job.run(clock, progress, resume=resume, overwrite=overwrite, verify=verify)
    job.remove_empty_folders()
    return report


def _options(
    dtype: DTypeArgument,
    out_of_range: OutOfRange,
    max_shard_size: float | str,
    nodes: Sequence[Node] | None,
    select: Patterns,
    exclude: Patterns,
    rename: Rename | None,
) -> Options:
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(f"out_of_range is one of {get_args(OutOfRange)}, not {out_of_range!r}")
    max_nbytes = parse_bytes(max_shard_size)
    if not max_nbytes:
        raise ValueError("max_shard_size is at least 1 byte")
    if nodes is not None and not (nodes and all(isinstance(node, Node) for node in nodes)):
        raise ValueError("nodes is a list of Node, and each has a budget of its own")
    return Options(
        policy=DTypePolicy.parse(dtype),
        out_of_range=out_of_range,
        max_shard_nbytes=max_nbytes,
        nodes=tuple(nodes or ()),
        selection=Selection.parse(select, exclude),
        rename=rename,
    )


def _state(header: Header) -> dict[str, Any]:
    """What a file is known by: when it is another one, what was read of it counts no more.

    A local file is that wherever it is moved to and however it is called. Of its times one can be
    set by hand, and the other cannot. (Its device is left out: many filesystems get another number
    each time that they are mounted.) A file on a server is the one at its address.
    """
    state: dict[str, Any] = dict(fingerprint(header))
    if header.state is not None:
        del state["path"]
        state["ctime_ns"] = header.state.changed_ns
    return state


def _check_unchanged(header: Header) -> None:
    """Refuse a file that is not there any more as it was when its header was read.

    Raises:
        CheckpointError: it is not.
    """
    if isinstance(header.path, Path) and header.state is not None:
        try:
            now = FileState.of(header.path)
        except OSError as error:
            raise unreadable(header.path, error) from error
        header.state.check(now, header.path)


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from error


class _Conversion:
    """One call of `convert`, planned."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: ConvertPlan,
        options: Options,
        way: Way,
    ) -> None:
        self._way = way
        self._checkpoint = checkpoint
        self._plan = plan
        self._options = options
        used = {t.info.shard for file in plan.files for t in file.tensors}
        self._shards = [header for header in checkpoint.shards if header.path in used]
        self._source = {header.path.name: _state(header) for header in self._shards}
        for header in self._shards:
            _check_unchanged(header)
        self._modes: dict[Location, int] = {
            header.path: _status(header.path).st_mode
            for header in self._shards
            if isinstance(header.path, Path)
        }
        self._began = Began(plan.digest, plan.options, self._source)
        self._work = plan.destination / WORK
        self._out = self._work / "out"
        self._journal_path = self._work / "journal"
        self._reserve = self._work / "reserve"
        self._emptied: list[str] = []

    # --- before anything is written ---------------------------------------------------------------

    def check_apart(self) -> None:
        """Refuse a destination that is where the source is.

        Raises:
            CheckpointError: it is.
        """
        written = [self._plan.destination, self._work, self._out]
        written += [self._plan.destination / folder for folder in self._plan.folders if folder]
        # also those of which nothing is read: they are the source's, and what is old goes
        local = [h.path for h in self._checkpoint.shards if isinstance(h.path, Path)]
        for shard in local:
            if Path(os.path.realpath(self._work)) in Path(os.path.realpath(shard)).parents:
                raise CheckpointError(self._work, "the source is in the folder that would be made")
        read = {folder for path in local for folder in _folders_of(path)}
        for folder in written:
            if os.path.realpath(folder) in read or any(_same(folder, other) for other in read):
                raise CheckpointError(folder, "the source is in the folder that would be written")
        beside = [c.source for c in self._plan.copied if isinstance(c.source, Path)]
        own: dict[tuple[int, int], Path] = {}
        for path in (*local, *beside):
            with suppress(OSError):  # gone: who reads it will tell
                status = path.stat()
                own[status.st_dev, status.st_ino] = path
        for name in dict.fromkeys((*all_paths(self._plan), *self._old())):
            with suppress(OSError):  # there is nothing of that name, or it is told by who writes
                status = (self._plan.destination / name).stat()
                if found := own.get((status.st_dev, status.st_ino)):
                    raise CheckpointError(
                        self._plan.destination / name,
                        "a file of the source would be written",
                        found=found,
                    )

    def check_destination(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse a destination that holds what is not to be touched.

        Raises:
            CheckpointError: it does.
        """
        destination = self._plan.destination
        for folder in filter(None, self._plan.folders):
            if _exists(destination / folder / WORK / "journal"):
                raise CheckpointError(
                    destination / folder,
                    "holds an unfinished conversion of its own",
                    expected=f"a folder without one ({WORK} is what there is of it)",
                )
        if _exists(self._journal_path):
            if not (resume or overwrite):
                raise CheckpointError(
                    destination,
                    "holds an unfinished conversion",
                    expected="resume, which continues it, or overwrite, which begins again",
                )
            return
        for path in all_paths(self._plan):
            if _is_folder(destination / path):
                raise CheckpointError(
                    destination / path, "a file would be written there", found="a folder"
                )
        there = self._there()
        if there and not overwrite and not (resume and self._finished() is not None):
            raise CheckpointError(
                destination,
                "holds a checkpoint already"
                if not resume
                else "holds a checkpoint that is not of this source and these options",
                expected="overwrite, which removes it, or another destination",
                found=", ".join(there[:8]) + f" and {len(there) - 8} more" * (len(there) > 8),
            )

    def check_room(self) -> None:
        """Refuse a disk that cannot take all of it.

        Raises:
            CheckpointError: nothing may be written there.
            PlanInfeasibleError: there is too little free space.
        """
        folder = self._plan.destination
        while not _exists(folder) and folder != folder.parent:
            folder = folder.parent
        try:
            found = os.statvfs(folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(folder, "cannot be written", found="no leave to write there")
        free_nbytes = found.f_bavail * found.f_frsize
        # what an earlier call left is taken already
        for root, _, names in os.walk(self._work):
            for name in names:
                with suppress(OSError):  # another conversion may be at its end
                    free_nbytes += (Path(root) / name).stat().st_blocks * 512
        needed_nbytes = self._plan.needed_nbytes + self._reserve_nbytes
        if needed_nbytes > free_nbytes:
            raise PlanInfeasibleError(
                str(self._plan.destination), needed_nbytes, free_nbytes, limit="free space"
            )

    def folders(self) -> tuple[str, ...]:
        """Where a checkpoint counts: the destination, what is written in it, and earlier nodes.

        Raises:
            CheckpointError: the destination cannot be read.
        """
        earlier = []
        for name in self._listed(""):
            found = None if name.startswith(".") else self._sidecar(name)
            nodes = found.options.get("nodes") if found else None
            # a folder with a sidecar may as well be the destination of another conversion
            if isinstance(nodes, list) and any(
                isinstance(node, list) and node[:1] == [name] for node in nodes
            ):
                earlier.append(name)
        return tuple(dict.fromkeys(("", *self._plan.folders, *earlier)))

    def remove_empty_folders(self) -> None:
        """Remove what is left of the folders of nodes that there are no more."""
        for folder in self._emptied:
            with suppress(OSError):  # it holds something that is not ours
                (self._plan.destination / folder).rmdir()

    def _there(self) -> list[str]:
        """What of a checkpoint is in the destination under names that count."""
        planned = [p for p in all_paths(self._plan) if _exists(self._plan.destination / p)]
        return list(dict.fromkeys((*planned, *self._old())))

    def _old(self) -> list[str]:
        """Files of a checkpoint in the destination, in the order in which they may go.

        An index comes first, so that no set of shards looks whole, and what belongs to weights not
        before them; a sidecar last, which says what else there is.
        """
        found = []
        for folder in self.folders():
            names = self._listed(folder)
            sidecar = self._sidecar(folder) if SIDECAR in names else None
            written = sidecar.files if sidecar else ()
            found += [
                in_folder(folder, name)
                for name in names
                if (name in written or _OF_A_CHECKPOINT.fullmatch(name))
                and not _is_folder(self._plan.destination / folder / name)
            ]
        ends = (".index.json", ".safetensors", "")

        def place(path: str) -> tuple[bool, int]:
            kind = next(i for i, end in enumerate(ends) if path.endswith(end))
            return path.endswith(SIDECAR), kind

        return sorted(found, key=place)

    def _tensors(self) -> Iterator[tuple[OutFile, OutTensor]]:
        """All that are written, in the order in which the journal counts them."""
        for file in self._plan.files:
            for tensor in file.tensors:
                yield file, tensor

    def _listed(self, folder: str) -> list[str]:
        where = self._plan.destination / folder
        try:
            return sorted(os.listdir(where))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unwritable(where, error) from error

    def _sidecar(self, folder: str) -> Digests | None:
        """A folder's sidecar; None where there is none that can be read."""
        try:
            return Digests.read(self._plan.destination / folder / SIDECAR)
        except CheckpointError:
            return None

    @property
    def _reserve_nbytes(self) -> int:
        return _RESERVE_NBYTES + _LINE_NBYTES * sum(len(file.tensors) for file in self._plan.files)

    def _finished(self) -> dict[str, Digests] | None:
        """The sidecars of a destination that this very conversion finished before, else None."""
        sidecars = {}
        for folder in self._plan.folders:
            found = self._sidecar(folder)
            if (
                found is None
                or found.source.get("files") != _plain(self._source)
                or found.options != _plain(self._plan.options)
            ):
                return None
            sidecars[folder] = found
        wanted = {self._key(file, t.name) for file, t in self._tensors()}
        sizes = {file.path: file.nbytes for file in self._plan.files}
        for path in all_paths(self._plan):
            with suppress(OSError):
                found_nbytes = (self._plan.destination / path).stat().st_size
                if found_nbytes == sizes.get(path, found_nbytes):
                    continue
            return None
        finished = {in_folder(f, name) for f, found in sidecars.items() for name in found.tensors}
        return sidecars if finished == wanted else None

    def _report_finished(
        self, clock: Clock, progress: Progress, sidecars: Mapping[str, Digests], *, verify: bool
    ) -> ConvertReport:
        """What the report of a conversion says that had finished before."""
        digests = {
            in_folder(folder, name): digest.hex
            for folder, found in sidecars.items()
            for name, digest in found.tensors.items()
        }
        if verify:
            self._verify(digests, self._plan.destination, progress)
        return ConvertReport(
            self._plan,
            clock.seconds,
            counts={
                in_folder(folder, name): CastCounts(*counts)
                for folder, found in sidecars.items()
                for name, counts in found.counts.items()
            },
            digests=digests,
            resumed=len(digests),
            verified=verify,
        )

    # --- the run ----------------------------------------------------------------------------------

    def run(
        self, clock: Clock, progress: Progress, *, resume: bool, overwrite: bool, verify: bool
    ) -> ConvertReport:
        """Write what is not finished, and publish all; the destination is locked."""
        self.check_destination(resume=resume, overwrite=overwrite)
        if resume and not _exists(self._journal_path):
            sidecars = self._finished()
            if sidecars is not None:
                return self._report_finished(clock, progress, sidecars, verify=verify)
        journal = self._journal(resume=resume, overwrite=overwrite)
        try:
            resumed = len(journal.finished)
            read_nbytes, verified = 0, False
            if journal.published is None:
                read_nbytes = self._write(journal, progress)
                if verify:
                    self._verify(self._digests(journal), self._out, progress)
                    verified = True
                journal.publish(self._prepare(journal))
            self._publish(journal, replaces=journal.replaces or overwrite)
            if verify and not verified:  # an earlier call had begun to publish
                self._verify(self._digests(journal), self._plan.destination, progress)
                verified = True
            finished = {
                self._key(file, t.name): journal.finished[i]
                for i, (file, t) in enumerate(self._tensors())
            }
        except OSError as error:
            raise unwritable(error.filename or self._plan.destination, error) from error
        finally:
            journal.close()
        self._clean()
        counts = {name: one.counts for name, one in finished.items() if one.counts.total}
        warn_of_overflow(self._plan.path, counts, self._options.out_of_range)
        return ConvertReport(
            self._plan,
            clock.seconds,
            read_nbytes=read_nbytes,
            counts=counts,
            digests={name: one.digest for name, one in finished.items()},
            resumed=resumed,
            verified=verified,
        )

    @staticmethod
    def _key(file: OutFile, name: str) -> str:
        return in_folder(folder_of(file.path), name)

    def _journal(self, *, resume: bool, overwrite: bool) -> Journal:
        """The journal to go on with, or a new one in an empty folder."""
        try:
            if resume:
                self._check_versions()
            journal = Journal.resume(self._journal_path, self._began) if resume else None
            if journal is not None:
                if journal.published is None:
                    self._forget_lost(journal)
                    self.check_room()
                return journal
            self._journal_path.unlink(missing_ok=True)
            if _exists(self._out):
                shutil.rmtree(self._out)
            self.check_room()
            for folder in ("", *self._plan.folders):
                (self._out / folder).mkdir(parents=True, exist_ok=True)
            _write_file(self._reserve, [bytes(self._reserve_nbytes)])
            journal = Journal.begin(self._journal_path, self._began, replaces=overwrite)
            _sync_folder(self._work)
            _sync_folder(self._plan.destination)
            return journal
        except OSError as error:
            raise unwritable(self._plan.destination, error) from error

    def _check_versions(self) -> None:
        """Refuse to go on with what a server may have replaced meanwhile without a word."""
        for header in self._shards:
            if isinstance(header.path, Url) and not header.path.version:
                raise CheckpointError(
                    header.path,
                    "a conversion of it cannot be continued",
                    expected="a server that says which version of the file it has",
                    found="neither ETag nor Last-Modified",
                )

    def _forget_lost(self, journal: Journal) -> None:
        """Do tensors again whose file is not there any more, or has become shorter.

        The journal says so before anything is written: the file will be long enough again.
        """
        lost = []
        for i, (file, tensor) in enumerate(self._tensors()):
            try:
                found_nbytes = (self._out / file.path).stat().st_size
            except FileNotFoundError:
                found_nbytes = 0
            if found_nbytes < tensor.stop and i in journal.finished:
                lost.append(i)
        journal.forget(lost)

    def _write(self, journal: Journal, progress: Progress) -> int:
        writer = Writer(
            self._plan,
            self._checkpoint,
            self._out,
            journal,
            self._options.out_of_range,
            self._reserve,
            self._way,
        )
        with reporting(progress, writer.unread_nbytes, "converted") as tell:
            writer.run(tell)
        for header in self._shards:
            _check_unchanged(header)
        return writer.read_nbytes

    def _digests(self, journal: Journal) -> dict[str, str]:
        return {
            self._key(file, t.name): journal.finished[i].digest
            for i, (file, t) in enumerate(self._tensors())
        }

    def _verify(self, digests: Mapping[str, str], folder: Path, progress: Progress) -> None:
        """Compare the files in a folder with the digests that their bytes had."""
        before = 0
        with reporting(progress, sum(t.nbytes for _, t in self._tensors()), "checked") as tell:
            for file in self._plan.files:
                own = {t.name: digests[self._key(file, t.name)] for t in file.tensors}
                path, block_nbytes = folder / file.path, self._way.block_nbytes
                check_written(file, path, own, _from(before, tell), block_nbytes)
                before += file.nbytes - len(file.header)

    # --- publishing -------------------------------------------------------------------------------

    def _prepare(self, journal: Journal) -> dict[str, str]:
        """Write all that is small, with its permissions, and bring every name to the disk.

        Returns:
            What `Journal.published` is.
        """
        for document in (*self._plan.documents, *self._plan.indexes):
            _write_file(self._out / document.path, [document.data], document.mode)
        for copied in self._plan.copied:
            if isinstance(copied.source, Path):
                _write_file(self._out / copied.path, _pieces(copied.source), copied.mode)
            else:
                _fetch(copied, self._out / copied.path)
        for folder in self._plan.folders:
            self._write_sidecar(folder, journal)
        for file in self._plan.files:
            path = self._out / file.path
            # nobody may read what he could not read at the source; the owner may write
            allowed = 0o777
            for shard in {t.info.shard for t in file.tensors}:
                allowed &= self._modes.get(shard, allowed) | stat.S_IWUSR
            path.chmod(stat.S_IMODE(path.stat().st_mode) & allowed)
        for folder in ("", *self._plan.folders):
            _sync_folder(self._out / folder)
        large = {file.path for file in self._plan.files}
        return {
            path: "" if path in large else _digest_of(self._out / path)
            for path in all_paths(self._plan)
        }

    def _write_sidecar(self, folder: str, journal: Journal) -> None:
        mine = [
            (t, journal.finished[i])
            for i, (file, t) in enumerate(self._tensors())
            if folder_of(file.path) == folder
        ]
        Digests.of(
            (Digest(t.name, t.dtype, t.info.shape, t.nbytes, one.digest) for t, one in mine),
            source={"path": self._plan.path, "files": self._source},
            options=_plain(self._plan.options),
            files=[path.rpartition("/")[2] for path in self._plan.names(folder)],
            counts={t.name: astuple(one.counts) for t, one in mine if one.counts.total},
        ).write(self._out / folder / SIDECAR)

    def _publish(self, journal: Journal, *, replaces: bool) -> None:
        """Give every file its name; again, where that was begun before.

        An old checkpoint goes first, its index before all: at no time is there one of old files
        and new.
        """
        destination = self._plan.destination
        published = self._published(journal)
        waiting = [path for path in published if _exists(self._out / path)]
        done = list(published.keys() - waiting)
        self._check_published(journal, done)
        old = [path for path in self._old() if path not in done]
        there = [path for path in waiting if _exists(destination / path)]
        if (old or there) and not replaces:
            raise CheckpointError(
                destination,
                "holds a checkpoint that was not there before",
                expected="its own files only",
                found=", ".join((old or there)[:8]),
            )
        self._emptied = [f for f in self.folders() if f not in ("", *self._plan.folders)]
        for path in old:
            (destination / path).unlink()
        for folder in ("", *self._emptied):
            _sync_folder(destination / folder)
        for folder in self._plan.folders:
            (destination / folder).mkdir(exist_ok=True)
            _sync_folder(destination / folder)
        lasts = {index.path for index in self._plan.indexes}
        for path in waiting:
            if path not in lasts:
                os.replace(self._out / path, destination / path)
        self._sync_folders()
        for path in waiting:
            if path in lasts:
                os.replace(self._out / path, destination / path)
        self._sync_folders()

    def _published(self, journal: Journal) -> Mapping[str, str]:
        """What the journal says is published; of a file beside the source, as it was then.

        Raises:
            CheckpointError: it is not of this conversion.
        """
        published = journal.published or {}
        wanted = {in_folder(folder, SIDECAR) for folder in self._plan.folders}
        wanted |= {file.path for file in self._plan.files}
        wanted |= {index.path for index in self._plan.indexes}
        whole = published.keys() >= wanted
        if not whole or not {folder_of(path) for path in published} <= {*self._plan.folders}:
            raise CheckpointError(
                self._journal_path,
                "is damaged",
                expected="every file that is published (overwrite begins again)",
                found=f"{len(published)} paths",
            )
        return published

    def _check_published(self, journal: Journal, done: Collection[str]) -> None:
        """Hold what an earlier call published to be what was prepared, byte for byte.

        Raises:
            CheckpointError: a file is gone, or is another one.
        """
        published, digests = journal.published or {}, self._digests(journal)
        large = {file.path: file for file in self._plan.files}
        for path in sorted(done):
            where = self._plan.destination / path
            try:
                if file := large.get(path):
                    own = {t.name: digests[self._key(file, t.name)] for t in file.tensors}
                    check_written(file, where, own, lambda _: None, self._way.block_nbytes)
                    as_written = _status(where).st_size == file.nbytes
                else:
                    as_written = _digest_of(where) == published[path]
            except CheckpointError as error:
                raise _not_ours(where, error.problem) from error
            if not as_written:
                raise _not_ours(where, "other bytes")

    def _sync_folders(self) -> None:
        for folder in dict.fromkeys(("", *self._plan.folders)):
            _sync_folder(self._plan.destination / folder)

    def _clean(self) -> None:
        """Remove what only an unfinished conversion has; the journal goes last."""
        try:
            shutil.rmtree(self._out, ignore_errors=True)
            self._reserve.unlink(missing_ok=True)
            self._journal_path.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self._work, error) from error


def _not_ours(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        path,
        "has changed, or gone, since it was published, and other files were not yet",
        expected="the file as it was (overwrite begins again)",
        found=found,
    )


def _from(before: int, tell: Callable[[int], None]) -> Callable[[int], None]:
    return lambda done: tell(before + done)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it when it is read back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return plain


def _folders_of(path: Path) -> set[str]:
    """The folder that a file is in by its name, and the one that it is in by its links."""
    return {os.path.realpath(path.parent), os.path.dirname(os.path.realpath(path))}


def _same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


def _exists(path: Path) -> bool:
    """Whether there is something of that name, as far as one may know.

    Raises:
        CheckpointError: one may not, or the name is too long.
    """
    try:
        return is_there(path)
    except OSError as error:
        raise unwritable(path, error) from error


def _is_folder(path: Path) -> bool:
    """Whether there is a folder of that name; not where a link leads to one.

    Raises:
        CheckpointError: see `_exists`.
    """
    return _exists(path) and path.is_dir() and not path.is_symlink()


def _write_file(path: Path, pieces: Iterable[bytes], mode: int | None = None) -> None:
    path.unlink(missing_ok=True)  # of an earlier run, and perhaps not to be written to
    with open(path, "wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
    if mode is not None:
        path.chmod(mode)


def _pieces(source: Path) -> Iterator[bytes]:
    """A file's bytes, a few at a time."""
    try:
        with open(source, "rb") as file:
            while piece := file.read(_COPIED_AT_ONCE_NBYTES):
                yield piece
    except OSError as error:
        raise unreadable(source, error) from error


def _digest_of(path: Path) -> str:
    digest = hasher()
    for piece in _pieces(path):
        digest.update(memoryview(piece))
    return digest.hexdigest()


def _fetch(copied: Copied, path: Path) -> None:
    """Write a file that a server has."""
    assert isinstance(copied.source, Url), "others are on this machine"
    path.unlink(missing_ok=True)
    with open(path, "w+b") as file:
        remote.download(copied.source, file, LARGEST_COPIED_NBYTES)
        file.flush()
        if copied.path.endswith(".json") and not _ends_as_json(file):
            raise CheckpointError(copied.source, "is not JSON", found="another end")
        os.fsync(file.fileno())


def _ends_as_json(file: BinaryIO) -> bool:
    file.seek(-min(file.seek(0, os.SEEK_END), _COPIED_AT_ONCE_NBYTES), os.SEEK_END)
    return file.read().rstrip()[-1:] in (b"}", b"]")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a filesystem whose folders cannot be
            raise
    finally:
        os.close(fd)


@contextmanager
def _locked(destination: Path) -> Iterator[None]:
    """Keep others out of a destination, which is made where it is not there.

    What was made and is empty is removed again.

    Raises:
        CheckpointError: another conversion is in it, or it cannot be written.
    """
    made = [p for p in (destination, *destination.parents) if not _exists(p)]
    work = destination / WORK
    try:
        fd = _lock(work)
    except OSError as error:
        with suppress(OSError):
            _remove_empty(made)
        raise unwritable(destination, error) from error
    try:
        try:
            for folder in reversed(made):
                with suppress(PermissionError):  # it may be written and not read
                    _sync_folder(folder.parent)
        except OSError as error:
            raise unwritable(destination, error) from error
        yield
    finally:
        with suppress(OSError):
            if os.listdir(work) == ["lock"]:
                (work / "lock").unlink()
                work.rmdir()
                _remove_empty(made)
        os.close(fd)


def _lock(work: Path) -> int:
    """The descriptor that holds the lock."""
    while True:
        work.parent.mkdir(parents=True, exist_ok=True)
        # nobody reads there what he might not read when it is finished
        work.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another one has just finished and cleaned up
            continue
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if _is_at(fd, work / "lock"):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(
                work.parent, "another conversion is being written there"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one of that name; not where it was removed meanwhile."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        folder.rmdir()
