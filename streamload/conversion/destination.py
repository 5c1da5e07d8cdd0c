"""The destination of a conversion: checks of its contents, and publication of the new files.

All files are written below ``.streamload`` there. Once all are whole, the old checkpoint's files
are removed, and new ones renamed, indexes last: old and new files never form one checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from streamload.checkpoint.digests import SIDECAR, Digests
from streamload.conversion.blocks import InMemory
from streamload.conversion.companions import CONFIG
from streamload.conversion.disk import WORK, Folder, exists, linked, writing_to
from streamload.conversion.journal import JOURNAL
from streamload.conversion.plan import ConvertPlan, folders_above, in_folder
from streamload.core.system import filesystem_in_memory, sync_folder
from streamload.errors import CheckpointError, PlanInfeasibleError

# Names of a checkpoint's files, by any writer.
_OF_A_CHECKPOINT = re.compile(
    rf"[^.].*\.safetensors(\.index\.json)?|{re.escape(CONFIG)}|{re.escape(SIDECAR)}", re.DOTALL
)
#: Folder in a destination for files, under their planned paths, until all are whole.
OUT = f"{WORK}/out"
#: A file that is removed if the disk is full: then the journal has room for finished tensors.
RESERVE = f"{WORK}/reserve"
# Its length, and more for each tensor.
_RESERVE_NBYTES = 2**14
_LINE_NBYTES = 128
_LISTED = 8


class Destination:
    """The folder that a plan's conversion is written to."""

    def __init__(self, plan: ConvertPlan) -> None:
        self.path = plan.destination
        self.work = self.path / WORK
        self.out = self.path / OUT
        self.journal = self.path / JOURNAL
        self.root: Folder  # the open folder, while it is locked
        self.reserve_nbytes = _RESERVE_NBYTES + _LINE_NBYTES * plan.tensor_count
        self._plan = plan
        self.emptied: list[Path] = []  # folders of an old checkpoint, inner ones first

    # --- checks -----------------------------------------------------------------------------------

    def check_apart(self, shards: Collection[Path]) -> None:
        """Raise CheckpointError if files of the source would be overwritten or removed."""
        for shard in shards:
            if Path(os.path.realpath(self.work)) in Path(os.path.realpath(shard)).parents:
                raise CheckpointError(self.work, "the source is in the folder that would be made")
        # the folder of a file's path, and of the file that this links to
        read = {os.path.realpath(path.parent) for path in shards}
        read |= {os.path.dirname(os.path.realpath(path)) for path in shards}
        read_ids = {_identity(folder) for folder in read} - {None}
        nodes = (self.path / folder for folder in self._plan.folders if folder)
        for folder in (self.path, self.work, self.out, *nodes):
            if os.path.realpath(folder) in read or _identity(folder) in read_ids:
                raise CheckpointError(folder, "the source is in the folder that would be written")
        beside = [f.content for f in self._plan.small if isinstance(f.content, Path)]
        own = {_identity(path): path for path in (*shards, *beside)}
        own.pop(None, None)  # a missing file: reading it will fail
        for name in dict.fromkeys((*self._plan.paths, *self._old())):
            where = self.path / name
            if found := own.get(_identity(where)):
                raise CheckpointError(where, "a file of the source would be written", found=found)

    def check(self, *, resume: bool, overwrite: bool, finished: bool) -> None:
        """Raise CheckpointError for symlinks, or files that must not be replaced or resumed."""
        named = (*self._plan.folders, *self._plan.subfolders)
        inner = dict.fromkeys(above for name in named for above in (name, *folders_above(name)))
        for folder in (WORK, OUT, *inner):
            if folder and os.path.islink(self.path / folder):
                raise linked(self.path / folder)
        for folder in filter(None, self._plan.folders):
            if exists(self.path / folder / WORK / "journal"):
                raise CheckpointError(
                    self.path / folder,
                    "holds an unfinished conversion of its own",
                    f"a folder without one ({WORK} is what there is of it)",
                )
        if exists(self.journal):
            if not (resume or overwrite):
                raise CheckpointError(
                    self.path,
                    "holds an unfinished conversion",
                    "resume, which continues it, or overwrite, which begins again",
                )
            return
        for folder in self._plan.subfolders:
            where = self.path / folder
            if exists(where) and not where.is_dir():
                raise CheckpointError(where, "a folder would be made there", found="a file")
        for path in self._plan.paths:
            where = self.path / path
            if self._is_folder(path):
                raise CheckpointError(where, "a file would be written there", found="a folder")
        planned = (path for path in self._plan.paths if exists(self.path / path))
        there = list(dict.fromkeys((*planned, *self._old())))
        if there and not overwrite and not (resume and finished):
            problem = "holds a checkpoint already"
            if resume:
                problem = "holds a checkpoint that is not of this source and these options"
            more = f" and {len(there) - _LISTED} more" * (len(there) > _LISTED)
            raise CheckpointError(
                self.path,
                problem,
                "overwrite, which removes it, or another destination",
                ", ".join(there[:_LISTED]) + more,
            )

    def check_room(self) -> None:
        """Raise PlanInfeasibleError if the disk is too full, CheckpointError if it is read-only."""
        folder = self.path
        while not exists(folder) and folder != folder.parent:
            folder = folder.parent
        with writing_to(folder):
            found = os.statvfs(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(folder, "cannot be written", found="no leave to write there")
        free_nbytes = found.f_bavail * found.f_frsize + self._written_nbytes()
        needed_nbytes = self._plan.needed_nbytes + self.reserve_nbytes
        if needed_nbytes > free_nbytes:
            raise PlanInfeasibleError(
                str(self.path), needed_nbytes, free_nbytes, limit="free space"
            )

    def _written_nbytes(self) -> int:
        """Bytes of the files of an earlier call, which are overwritten."""
        nbytes = 0
        for root, _, names in os.walk(self.work):
            for name in names:
                with suppress(OSError):  # another conversion may remove it now
                    nbytes += (Path(root) / name).stat().st_blocks * 512
        return nbytes

    def in_memory(self) -> InMemory | None:
        """Return the files that are still to be written, if the destination is in memory."""
        filesystem = filesystem_in_memory(self.path)
        if not filesystem:
            return None
        nbytes = self._plan.needed_nbytes + self.reserve_nbytes - self._written_nbytes()
        reason = f"{self.path} is on {filesystem}, which keeps files in memory: write to a disk"
        return InMemory(max(nbytes, 0), reason)

    # --- old checkpoints --------------------------------------------------------------------------

    def folders(self) -> tuple[str, ...]:
        """Return checkpoint folders: "" (the root), the plan's, node folders of earlier calls."""
        earlier = []
        for name in self._listed(""):
            # links are not followed
            is_other = name.startswith(".") or os.path.islink(self.path / name)
            found = None if is_other else self.sidecar(name)
            nodes = found.options.get("nodes") if found else None
            # a folder with a sidecar may be the destination of another conversion instead
            if isinstance(nodes, list) and any(
                isinstance(node, list) and node[:1] == [name] for node in nodes
            ):
                earlier.append(name)
        return tuple(dict.fromkeys(("", *self._plan.folders, *earlier)))

    def sidecar(self, folder: str) -> Digests | None:
        """Return the digests in a folder's sidecar; None if it is missing or invalid."""
        with suppress(CheckpointError):
            return Digests.read(self.path / folder / SIDECAR)
        return None

    def _old(self) -> list[str]:
        """Return the paths of old checkpoints' files, in the order in which to remove them.

        Indexes come first, so that no set of shards looks whole; then weights, then small files;
        sidecars, which list all these files, last.
        """
        found = []
        for folder in self.folders():
            names = self._listed(folder)
            sidecar = self.sidecar(folder) if SIDECAR in names else None
            written = sidecar.files if sidecar else ()
            inner = (path for path in written if "/" in path and self._is_inside(folder, path))
            found += [
                in_folder(folder, name)
                for name in (*names, *inner)
                if (name in written or _OF_A_CHECKPOINT.fullmatch(name))
                and not self._is_folder(in_folder(folder, name))
            ]
        ends = (".index.json", ".safetensors", "")

        def place(path: str) -> tuple[bool, int]:
            kind = next(i for i, end in enumerate(ends) if path.endswith(end))
            return path.endswith(SIDECAR), kind

        return sorted(found, key=place)

    def _listed(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; [] if there is no such folder."""
        where = self.path / folder
        with writing_to(where), suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(where))
        return []

    def _is_folder(self, path: str) -> bool:
        """Whether a path is a folder, and no link to one."""
        where = self.path / path
        return exists(where) and where.is_dir() and not where.is_symlink()

    def _is_inside(self, folder: str, path: str) -> bool:
        """Whether a sidecar's path is of an existing file below a folder, reached without links."""
        parts = path.split("/")
        if "\0" in path or any(part.startswith(".") or not part for part in parts):
            return False
        where = self.path / folder
        parents = (where.joinpath(*parts[:end]) for end in range(1, len(parts)))
        return not any(parent.is_symlink() for parent in parents) and exists(where / path)

    # --- publishing -------------------------------------------------------------------------------

    def publish(self, waiting: Sequence[str], done: Collection[str], *, replaces: bool) -> None:
        """Remove an old checkpoint, and move files to their paths, indexes last.

        ``waiting``: those still in ``.streamload/out``; ``done``: those moved by an earlier call.
        """
        old = [path for path in self._old() if path not in done]
        there = old or [path for path in waiting if exists(self.path / path)]
        if there and not replaces:
            raise CheckpointError(
                self.path,
                "holds a checkpoint that was not there before",
                "its own files only",
                ", ".join(there[:_LISTED]),
            )
        folders = (*self._plan.folders, *self._plan.subfolders)
        emptied = {*self.folders(), *(folder for path in old for folder in folders_above(path))}
        inner_first = sorted(emptied - {"", *folders}, key=lambda folder: -folder.count("/"))
        self.emptied = [self.path / folder for folder in inner_first]
        for path in old:
            self.root.unlink(path)
        for where in (self.path, *self.emptied):
            sync_folder(where)
        for folder in filter(None, folders):
            self.root.make(folder)
            sync_folder(self.path / folder)
        lasts = {index.path for index in self._plan.indexes}
        for last in (False, True):
            for path in waiting:
                if (path in lasts) == last:
                    self.root.move(f"{OUT}/{path}", path)
            for folder in dict.fromkeys(("", *folders)):
                sync_folder(self.path / folder)

    def begin(self) -> None:
        """Remove an unfinished conversion; make folders, and a file that reserves disk space."""
        self.root.unlink(JOURNAL)
        self.root.remove_tree(OUT)
        self.check_room()
        for folder in ("", *self._plan.folders, *self._plan.subfolders):
            self.root.make(in_folder(OUT, folder).rstrip("/"))
        self.root.write(RESERVE, [bytes(self.reserve_nbytes)])

    def clean(self) -> None:
        """Remove the files of an unfinished conversion, the journal last."""
        with writing_to(self.work):
            with suppress(OSError):
                self.root.remove_tree(OUT)
            self.root.unlink(RESERVE)
            self.root.unlink(JOURNAL)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return device and inode of a file, links followed; None if it is missing or hidden."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None
