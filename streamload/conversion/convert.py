"""`streamload.convert`: write a checkpoint anew, wholly or not at all.

Files are written below ``.streamload`` in the destination, with a journal of finished tensors. Once
all are whole, they are moved to their paths, indexes last, and that folder is removed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from streamload.checkpoint.digests import SIDECAR, Digest, Digests
from streamload.checkpoint.open import Checkpoint, CheckpointLike, opened
from streamload.codecs.cast_table import CastCounts, OutOfRange, cast_engine
from streamload.codecs.parts import QuantCounts
from streamload.conversion import disk
from streamload.conversion.blocks import Way, choose_way
from streamload.conversion.companions import LARGEST_COPIED_NBYTES
from streamload.conversion.destination import OUT, Destination
from streamload.conversion.disk import Folder
from streamload.conversion.journal import FORMAT, Finished, Journal, noted_verdict
from streamload.conversion.openable import Judging, asked_of_models, is_here
from streamload.conversion.plan import (
    ConvertOptions,
    ConvertPlan,
    folder_of,
    in_folder,
    plan_conversion,
)
from streamload.conversion.quantize import coded_otherwise
from streamload.conversion.writing import Writer, check_written, weight_of
from streamload.core.chart import Shown
from streamload.core.dtypes import DTypeArgument
from streamload.core.interrupt import deferred_interrupt
from streamload.core.location import Url, is_foreign, without_secrets
from streamload.core.patterns import Patterns, Selection
from streamload.core.progress import Progress, reporting
from streamload.core.system import sync_folder
from streamload.core.units import format_bytes, format_rate, format_table
from streamload.errors import CheckpointError
from streamload.files.folder import fingerprint
from streamload.files.header import SAFETENSORS, FileState, unreadable
from streamload.files.local import expanded
from streamload.formats.gguf.architectures import of_model
from streamload.loading.lora import Adapters, AdaptersArgument
from streamload.loading.report import Clock, quantized_text, warn_of_overflow
from streamload.planning.dequantize import as_in_models, asked, dequantized
from streamload.planning.partition import Node
from streamload.planning.quant_policy import QuantArgument, coded
from streamload.planning.sources import Rename
from streamload.planning.transforms import Changed, with_changes

_END_NBYTES = 2**20  # of a downloaded file, to check that its JSON ends


@dataclass(frozen=True, slots=True)
class ConvertReport(Shown):
    """The result of a conversion. Prints as a short table.

    Attributes:
        plan: the files and tensors written.
        seconds: wall time of the whole call.
        read_nbytes: bytes of the source's data that this call read.
        counts: counts of changed values of each tensor whose cast changed any, by output name.
        errors: quantization errors of each weight (codes against source values), to six digits, by
            output name of the codes.
        digests: digest of each tensor's bytes, by output name ("node/name" with nodes).
        resumed: number of tensors that earlier calls had finished.
        verified: whether the files were read back and compared.
        dry_run: whether nothing was written.
    """

    plan: ConvertPlan
    seconds: float
    read_nbytes: int = 0
    counts: Mapping[str, CastCounts] = field(default_factory=dict)
    errors: Mapping[str, QuantCounts] = field(default_factory=dict, repr=False)
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    resumed: int = 0
    verified: bool = False
    dry_run: bool = False

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes read over the time of the whole call, in GB/s."""
        return self.read_nbytes / 1e9 / self.seconds if self.seconds else 0.0

    def to_json(self) -> str:
        """Return the report as JSON."""
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
                "errors": {name: asdict(count) for name, count in self.errors.items()},
                "digests": dict(self.digests),
            }
        )

    def __str__(self) -> str:
        if self.dry_run:
            return str(self.plan)
        files, total = self.plan.files, sum(self.counts.values(), CastCounts())
        tensors = self.plan.tensor_count
        resumed = f", {self.resumed} of them finished before" * bool(self.resumed)
        read = f"{format_bytes(self.read_nbytes)} in {self.seconds:.2f} s"
        rows = [
            ("checkpoint", self.plan.path),
            ("destination", str(self.plan.destination)),
            ("tensors", f"{tensors} in {len(files)} file{'s' * (len(files) != 1)}{resumed}"),
            ("read", f"{read}, {format_rate(self.read_nbytes, self.seconds)}"),
            ("written", format_bytes(self.plan.written_nbytes)),
        ]
        if self.counts:
            lost = f"{total.overflowed} overflowed, {total.flushed} flushed to zero"
            where = f"in {len(self.counts)} tensors"
            rows.append(("changed", f"{where}: {lost}, {total.rounded} rounded"))
        if self.errors:
            rows.append(("quantised", quantized_text(self.errors)))
        if self.verified:
            rows.append(("verified", f"{tensors} tensors, read back"))
        rows += [("note", note) for note in self.plan.notes]
        return "\n".join(format_table(rows[0], rows[1:], right=0))

    __repr__ = __str__


def convert(
    source: CheckpointLike,
    destination: str | os.PathLike[str],
    *,
    to: str = SAFETENSORS,
    runtime: str | None = None,
    dtype: DTypeArgument = None,
    quant: QuantArgument = None,
    out_of_range: OutOfRange = "inf",
    max_shard_size: float | str | None = None,
    nodes: Sequence[Node] | None = None,
    select: Patterns = (),
    exclude: Patterns = (),
    rename: Rename | None = None,
    adapters: AdaptersArgument | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    progress: Progress = "auto",
) -> ConvertReport:
    """Write a checkpoint anew: with other dtypes, files or names, or split over nodes.

    It takes some tens of MB of memory for a checkpoint of any size. The result is in the layout of
    Hugging Face, with the other files of the checkpoint's folder (configuration, tokenizer) and
    small folders (``1_Pooling/``; as they are), the new dtype in config.json, and the digests of
    all tensors in ``streamload.json``. The Hugging Face Hub and buckets list their files; from
    other servers, files of usual names are copied, and notes name missing folders.

    Nothing in the destination looks finished before all is: files are written to its subfolder
    ``.streamload``, and moved to their paths at the end, indexes last. After a failure or a kill,
    ``.streamload`` holds the finished tensors, and ``resume=True`` does the rest.

    These files count as a checkpoint in the destination, in a folder that is written there, and in
    a node's folder of an earlier conversion: ``*.safetensors``, their indexes, config.json, a
    sidecar and the files that it lists, and any file of a name that is written. Without
    ``overwrite`` they are an error. With it, they are removed before the first new file is moved to
    its path, so that two checkpoints never mix, and so are folders that this empties. Nothing else
    in the destination is touched.

    Args:
        source: the checkpoint, as in `open_checkpoint`, or an open one, such as a variant.
        destination: a folder; created if missing.
        to: the format of the files: "safetensors", or another one of `streamload.formats`. The
            result above is that of safetensors: the module of a format describes its files and
            limits; config.json and tokenizer are copied for safetensors alone.
        runtime: adapt the files to "candle" or "mlx", which read safetensors: float16 unless
            ``dtype`` is given, and more keys in config.json. Notes list the changes.
        dtype: a dtype for all floats, or patterns of names (the first that matches decides):
            ``{"*norm*": "float32", "*": "float16"}``. None, and "checkpoint" in a pattern, is as
            in the checkpoint.
            Weights that are stored quantized are dequantized, as by `load_state_dict`. Blocks of
            GGUF files that no pattern matches become float16, or stay with ``to="gguf"``.
        quant: quantize the weights of layers: a format, or patterns by name, as in
            `load_state_dict`; not "auto"; a format ``to`` may have more, such as "q4_k_m" of GGUF.
            The checkpoint's own values are quantized, before any cast to ``dtype``; weights that
            ``dtype`` dequantizes cannot be quantized in one call. config.json gets the
            ``quantization_config`` by which transformers opens them (nf4, fp4, int8,
            bitsandbytes-int8).
        out_of_range: replace finite values that a dtype cannot represent by infinity ("inf") or by
            the largest finite value ("clamp"), or raise OutOfRangeError ("error").
        max_shard_size: most bytes of a file, unless one tensor alone is larger; None: the usual
            limit of the format, 5 GB for safetensors.
        nodes: split the model: a folder per node, with the layers that fit the node's budget, and
            a ``plan.json``.
        select: patterns of the tensors to convert, by their names in the checkpoint; () for all.
        exclude: patterns of tensors to leave out.
        rename: new names: a dict from old to new (others stay), or a callable that returns a name,
            or None to leave the tensor out.
        adapters: LoRA adapters as in `load_state_dict`, merged in order, before any cast or
            quantization; also with whole tensors (modules_to_save, biases, embeddings) of the
            checkpoint's shapes, which take the dtypes of those that they replace.
        imatrix: an importance matrix of llama.cpp (GGUF, or the older .dat), by which K-quants of
            ``to="gguf"`` are weighted.
        resume: continue an unfinished call with the same source and options; start a new one if
            there is none; do nothing if it is finished.
        overwrite: replace a finished checkpoint as above, or restart an unfinished conversion.
            The old checkpoint stays until the new one is whole.
        verify: read all files back from the disk, and compare digests, before they are moved.
        dry_run: plan, and check all that can be checked without writing.
        progress: as in `load_state_dict`.

    Raises:
        CheckpointError: the source is invalid; or the destination holds something
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
    options = ConvertOptions.parse(
        to,
        runtime,
        dtype,
        quant,
        out_of_range=out_of_range,
        max_shard_size=max_shard_size,
        nodes=nodes,
        imatrix=imatrix,
    )
    options = replace(options, selection=Selection.parse(select, exclude), rename=rename)
    checkpoint = opened(source)
    names = asked(checkpoint, options.policy, blocks=not options.writer.takes_blocks)
    if options.writer.takes_blocks:
        names += coded_otherwise(checkpoint, options.quant)
    checkpoint = as_in_models(dequantized(checkpoint, names))
    merged = Adapters.read(checkpoint, adapters)
    options = replace(options, adapters=tuple(merged.identity))
    checkpoint = with_changes(checkpoint, merged.changes, merged.replaced, merged.headers)
    dtypes = [wanted for _, wanted in options.policy.rules]
    way = choose_way(checkpoint, dtypes, nodes=bool(nodes))
    if is_foreign(os.fsdecode(destination)):
        shown = without_secrets(os.fsdecode(destination))
        raise ValueError(f"a conversion is written to a folder, not to {shown}")
    with closing(Judging()) as judging:  # an error does not pass through the child's `with`
        root = expanded(Path(destination))
        is_plain = options.writer.name == SAFETENSORS and rename is None
        if options.quant and is_plain:
            verdict = asked_of_models(checkpoint, options.quant, judging)
            if not (verdict is not None and verdict.known) and resume:
                verdict = noted_verdict(root) or verdict
            if verdict is not None:
                options = replace(
                    options,
                    quant=options.quant.leaving(verdict.kinds),
                    notes=(*options.notes, *verdict.notes),
                    verdict=verdict,
                )
        # the first choice of a way came before, since listing the output takes memory, too
        plan = plan_conversion(checkpoint, root, options)
        codes = [t for _, _, t in plan.tensors() if t.coding is not None and not t.is_auxiliary]
        weights = [coded(t.coding, t.src) for t in codes if t.coding is not None]
        stays = options.quant.check_meant(checkpoint, bool(codes))
        plan = replace(plan, notes=(*plan.notes, *stays))
        turned = any(
            t.turn is not None or (t.made is not None and not isinstance(t.info, Changed))
            for _, _, t in plan.tensors()
        )
        written = Destination(plan).in_memory()
        if codes or turned or written is not None:
            # compiled now, so that free memory tells how much that took
            compiled = all([cast_engine(*pair) != "numpy" for pair in plan.casts])
            way = choose_way(
                checkpoint,
                dtypes,
                weights,
                nodes=bool(nodes),
                turned=turned,
                compiled=compiled,
                written=written,
            )
        is_whole = not (nodes or options.selection.select or options.selection.exclude)
        # `check_config` knows the models of `of_model`
        unknown = is_plain and of_model(checkpoint.config) is None and is_here(checkpoint)
        opens = is_whole and (options.verdict is not None or unknown)
        job = _Conversion(checkpoint, plan, way, judging if opens else None)
        if dry_run:
            job.check(resume=resume, overwrite=overwrite)
            job.destination.check_room()
            return ConvertReport(plan, clock.seconds, dry_run=True)
        with ExitStack() as locks:
            with deferred_interrupt():  # else a traceback may keep a lock
                # the first folder is the destination
                job.destination.root, *_ = [
                    locks.enter_context(disk.locked(root / folder))
                    for folder in job.destination.folders()
                ]
            report = job.run(clock, progress, resume=resume, overwrite=overwrite, verify=verify)
        disk.remove_empty(job.destination.emptied)
        return report


class _Conversion:
    """Carries out one call of `convert` after planning: writes, verifies and publishes files."""

    def __init__(
        self, checkpoint: Checkpoint, plan: ConvertPlan, way: Way, judging: Judging | None
    ) -> None:
        self._judging = judging  # None if the output is no whole model of transformers
        self.destination = Destination(plan)
        self._checkpoint = checkpoint
        self._plan = plan
        self._way = way
        used = {path for _, _, t in plan.tensors() for info in t.infos for path in info.files}
        self._shards = [header for header in checkpoint.shards if header.path in used]
        self._source = {header.path.name: fingerprint(header) for header in self._shards}
        said = plan.verdict
        self._first = {
            "format": FORMAT,
            "plan": plan.digest,
            "options": dict(plan.options),
            "source": self._source,
            "verdict": asdict(said) if said is not None and said.known else None,
        }
        self._check_source()
        self.destination.check_apart(
            [p.path for h in checkpoint.shards for p in h.files if isinstance(p.path, Path)]
        )

    def _check_source(self) -> None:
        """Raise CheckpointError if a source file has changed since its header was read."""
        for part in (part for header in self._shards for part in header.files):
            if isinstance(part.path, Path) and part.state is not None:
                try:
                    now = FileState.of(part.path)
                except OSError as error:
                    raise unreadable(part.path, error) from error
                part.state.check(now, part.path)

    def check(self, *, resume: bool, overwrite: bool) -> dict[str, Finished] | None:
        """Raise CheckpointError if the options do not allow to write the destination.

        Returns the tensors' records by key if ``resume`` and this conversion was finished.
        """
        found = self._finished() if resume else None
        self.destination.check(resume=resume, overwrite=overwrite, finished=found is not None)
        return found

    def _finished(self) -> dict[str, Finished] | None:
        """Return the tensors' records by key if this conversion was finished before; else None."""
        finished = {}
        for folder in self._plan.folders:
            found = self.destination.sidecar(folder)
            if (
                found is None
                or found.source.get("files") != self._source
                or found.options != self._plan.options
            ):
                return None
            for name, digest in found.tensors.items():
                counts = CastCounts(*found.counts.get(name, ()))
                errors = QuantCounts.of(found.errors[name]) if name in found.errors else None
                finished[in_folder(folder, name)] = Finished(digest.hex, counts, errors)
        sizes = {file.path: file.nbytes for file in self._plan.files}
        for path in self._plan.paths:
            found_nbytes = _length(self._plan.destination / path)
            if found_nbytes is None or found_nbytes != sizes.get(path, found_nbytes):
                return None
        return finished if finished.keys() == {key for key, _, _ in self._plan.tensors()} else None

    def run(
        self, clock: Clock, progress: Progress, *, resume: bool, overwrite: bool, verify: bool
    ) -> ConvertReport:
        """Write unfinished tensors and publish all files; the caller has locked the destination."""
        found = self.check(resume=resume, overwrite=overwrite)
        read_nbytes = 0
        if found is not None and not disk.exists(self.destination.journal):
            finished, resumed = found, len(found)
            if verify:
                self._verify(finished, self._plan.destination, progress)
        else:
            with ExitStack() as opened:
                with deferred_interrupt():  # until the journal is one to close
                    journal = self._journal(opened, resume=resume, overwrite=overwrite)
                resumed = len(journal.finished)
                is_written = journal.published is not None
                try:
                    if not is_written:
                        read_nbytes, sums = self._write(journal, progress)
                        if verify:
                            self._verify(self._by_key(journal), self.destination.out, progress)
                        published = self._prepare(journal, sums)
                        self._check_opens()
                        journal.publish(published)
                    self._publish(journal, replaces=journal.replaces or overwrite)
                    finished = self._by_key(journal)
                    if verify and is_written:
                        self._verify(finished, self._plan.destination, progress)
                except OSError as error:
                    # errors of files opened in a folder have the last part of their path alone
                    path = self._plan.destination / os.fsdecode(error.filename or "")
                    raise disk.unwritable(path, error) from error
            self.destination.clean()
        counts = {key: one.counts for key, one in finished.items() if one.counts.total}
        if finished is not found:
            warn_of_overflow(self._plan.path, counts, self._plan.options["out_of_range"])
        return ConvertReport(
            self._plan,
            clock.seconds,
            read_nbytes,
            counts,
            {key: one.errors for key, one in finished.items() if one.errors is not None},
            digests={key: one.digest for key, one in finished.items()},
            resumed=resumed,
            verified=verify,
        )

    def _journal(self, opened: ExitStack, *, resume: bool, overwrite: bool) -> Journal:
        """Return the journal to resume, or a new one in an emptied folder; ``opened`` closes it."""
        to = self.destination
        with disk.writing_to(to.path):
            if resume:
                self._check_versions()
            journal = Journal.resume(opened, to.root, self._first) if resume else None
            if journal is not None:
                if journal.published is None:
                    self._forget_lost(journal)
                    to.check_room()
                return journal
            to.begin()
            journal = Journal.begin(opened, to.root, self._first, replaces=overwrite)
            sync_folder(to.work)
            sync_folder(to.path)
            return journal

    def _check_versions(self) -> None:
        """Raise CheckpointError for a server's file without a version, which may have changed."""
        for header in self._shards:
            if isinstance(header.path, Url) and not header.path.version:
                raise CheckpointError(
                    header.path,
                    "a conversion of it cannot be continued",
                    "a server that says which version of the file it has",
                    "neither ETag nor Last-Modified",
                )

    def _forget_lost(self, journal: Journal) -> None:
        """Remove tensors of missing or short files from the journal, to write them again."""
        found = {file.path: _length(self.destination.out / file.path) for file in self._plan.files}
        lost: set[int] = set()
        weights: dict[tuple[str, object], set[int]] = {}  # by folder and `weight_of`
        for i, (_, file, t) in enumerate(self._plan.tensors()):
            if i not in journal.finished or (found[file.path] or 0) < t.stop:
                lost.add(i)
            if t.coding is not None:
                weights.setdefault((folder_of(file.path), weight_of(t)), set()).add(i)
        for parts in weights.values():
            if parts & lost:
                lost |= parts
        journal.forget(sorted(lost & journal.finished.keys()))

    def _write(self, journal: Journal, progress: Progress) -> tuple[int, dict[str, str]]:
        """Write unfinished tensors; returns source bytes read, and md5 sums by path if needed."""
        root = self.destination.root
        writer = Writer(self._plan, self._checkpoint, self.destination, journal, self._way)
        with reporting(progress, writer.unread_nbytes, "converted") as tell:
            writer.run(tell)
        self._check_source()
        # users who could not read the source cannot read the copy; the owner may write
        modes = {h.path: h.state.others[1] | stat.S_IWUSR for h in self._shards if h.state}
        for file in self._plan.files:
            path, allowed = f"{OUT}/{file.path}", 0o777
            infos = [info for t in file.tensors for info in t.infos]
            for shard in {shard for info in infos for shard in info.files}:
                allowed &= modes.get(shard, allowed)
            with disk.writing_to(root.path / path), root.open(path, os.O_RDWR) as fd:
                status = os.fstat(fd)
                if status.st_size < file.nbytes:  # zeros, which padding after the last tensor needs
                    os.ftruncate(fd, file.nbytes)
                os.fchmod(fd, stat.S_IMODE(status.st_mode) & allowed)
        paths = [file.path for file in self._plan.files] if self._plan.wants_sums else []
        sums = writer.sums  # without those of files that an earlier call wrote
        sums = {p: sums.get(p) or disk.file_sum(self.destination.out / p) for p in paths}
        return writer.read_nbytes, sums

    def _by_key(self, journal: Journal) -> dict[str, Finished]:
        """Return the records of all tensors by key (NAME or NODE/NAME), once all are finished."""
        return {key: journal.finished[i] for i, (key, _, _) in enumerate(self._plan.tensors())}

    def _verify(self, finished: Mapping[str, Finished], folder: Path, progress: Progress) -> None:
        """Read files in ``folder`` back; CheckpointError if a digest differs from its record."""
        total = sum(t.nbytes for _, _, t in self._plan.tensors())
        done = 0
        with reporting(progress, total, "checked") as tell:
            for file in self._plan.files:
                path, nbytes = folder / file.path, self._way.block_nbytes
                done = check_written(file, path, finished, nbytes, tell, done)

    # --- publishing -------------------------------------------------------------------------------

    def _prepare(self, journal: Journal, sums: Mapping[str, str]) -> dict[str, str]:
        """Write small files and sidecars; returns all paths and digests ("" for tensor files)."""
        out, root = self.destination.out, self.destination.root
        for small in (*self._plan.small, *self._plan.indexes):
            path, content = f"{OUT}/{small.path}", small.content
            if isinstance(content, Url):
                _fetch(content, root, path)
            elif isinstance(content, Path):
                root.write(path, disk.pieces(content), small.mode)
            else:
                data = content if isinstance(content, bytes) else content(sums)
                root.write(path, [data], small.mode)
        for folder in self._plan.folders:
            mine = [
                (t, journal.finished[i])
                for i, (_, file, t) in enumerate(self._plan.tensors())
                if folder_of(file.path) == folder
            ]
            start = in_folder(folder, "")
            digests = Digests(
                {t.name: Digest(t.name, t.dtype, t.shape, t.nbytes, f.digest) for t, f in mine},
                source={"path": self._plan.path, "files": self._source},
                options=dict(self._plan.options),
                files=tuple(p.removeprefix(start) for p in self._plan.paths if p.startswith(start)),
                counts={t.name: astuple(one.counts) for t, one in mine if one.counts.total},
                errors={t.name: astuple(e) for t, one in mine if (e := one.errors) is not None},
            )
            root.write(f"{OUT}/{start}{SIDECAR}", (line.encode() for line in digests.lines()))
        for folder in ("", *self._plan.folders, *self._plan.subfolders):
            sync_folder(out / folder)
        large = {file.path for file in self._plan.files}
        return {p: "" if p in large else disk.file_digest(out / p) for p in self._plan.paths}

    def _check_opens(self) -> None:
        """Raise CheckpointError if transformers opened the source and cannot open the output."""
        quantizes = self._plan.verdict is not None
        source = Path(self._plan.path) if quantizes else None
        why = self._judging.why_not_opened(self.destination.out, source) if self._judging else ""
        if why:
            raise CheckpointError(
                self._plan.destination,
                "what was written is not opened again, and is not published: " + why,
                "weights that modules of the model can hold quantised: quant= takes patterns"
                if quantizes
                else "the config.json of these tensors",
            )

    def _publish(self, journal: Journal, *, replaces: bool) -> None:
        """Move all files to their paths; CheckpointError if a file moved earlier has changed."""
        published = journal.published or {}
        wanted = {in_folder(folder, SIDECAR) for folder in self._plan.folders}
        wanted |= {file.path for file in self._plan.files}
        wanted |= {index.path for index in self._plan.indexes}
        known = {*self._plan.folders, *self._plan.subfolders}
        if not (published.keys() >= wanted and known.issuperset(map(folder_of, published))):
            raise CheckpointError(
                self.destination.journal,
                "is damaged",
                "every file that is published (overwrite begins again)",
                f"{len(published)} paths",
            )
        waiting = [path for path in published if disk.exists(self.destination.out / path)]
        done = published.keys() - waiting
        finished, large = self._by_key(journal), {file.path: file for file in self._plan.files}
        for path in sorted(done):
            where = self._plan.destination / path
            try:
                if file := large.get(path):
                    check_written(file, where, finished, self._way.block_nbytes)
                elif disk.file_digest(where) != published[path]:
                    raise CheckpointError(where, "other bytes")
            except CheckpointError as error:
                raise CheckpointError(
                    where,
                    "has changed, or gone, since it was published, and other files were not yet",
                    "the file as it was (overwrite begins again)",
                    error.problem,
                ) from error
        self.destination.publish(waiting, done, replaces=replaces)


def _length(path: Path) -> int | None:
    """Return a file's length in bytes; None if it is missing or hidden."""
    with suppress(OSError):
        return path.stat().st_size
    return None


def _fetch(source: Url, root: Folder, path: str) -> None:
    """Download a small file to ``path`` in ``root``; CheckpointError if JSON is cut off."""
    root.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with root.open(path, flags) as fd, open(fd, "w+b", closefd=False) as file:
        from streamload.files import remote

        remote.download(source, file, LARGEST_COPIED_NBYTES)
        file.flush()
        if path.endswith(".json") and not _ends_as_json(file):
            raise CheckpointError(source, "is not JSON", found="another end")
        os.fsync(file.fileno())


def _ends_as_json(file: BinaryIO) -> bool:
    """Whether a file ends with a bracket, as JSON objects and lists do."""
    file.seek(-min(file.seek(0, os.SEEK_END), _END_NBYTES), os.SEEK_END)
    return file.read().rstrip()[-1:] in (b"}", b"]")
