"""`load_state_dict`, `offload` and `plan` for models that are spread over several nodes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Unpack

from streamload.checkpoint.shards import open_shard
from streamload.core.interrupt import deferred_interrupt
from streamload.core.patterns import Patterns
from streamload.core.progress import Progress, reporting
from streamload.distributed.gather import CollectiveReader, exchanged, own_lines, shared_ranges
from streamload.distributed.group import Engine
from streamload.distributed.launch import host_id, node_name, open_group
from streamload.distributed.negotiate import Agreement, Asked, own_device
from streamload.distributed.replan import Held, OnLoss, Recovery, replanned
from streamload.distributed.session import Session
from streamload.errors import LoadState, NodeError, PeerFailedError, StreamloadError
from streamload.files.folder import resolve_reader
from streamload.loading.load import run, uncollected
from streamload.loading.options import (
    CHANGES,
    OF_MODELS,
    LoadOptions,
    OffloadOptions,
    OnOverrun,
    Options,
    takes,
)
from streamload.loading.prepare import Decision
from streamload.loading.report import Clock, LoadReport, NodeReport
from streamload.offloading.offload import Offloaded, for_passes
from streamload.planning.shares import ClusterPlan, LayerNumbers, Split
from streamload.verification.verify import checksums

Verify = Literal["crc32", "none"]

_LOOK_S = 0.1  # between checks for Ctrl-C and losses, while others need this rank's blocks
_LISTED = 8  # names in a message
_REPORTED = ("tensors", "read", "resident", "seconds", "pass")  # as fields of `NodeReport`
_PARTS = 256  # lists of names compared in each step of the search for a tensor that differs


_NO_OPTIONS = ("residence", *CHANGES)
_OF_READS = ("out_of_range", "cast", "reader", "fetch", "page_cache", "chunk_nbytes", "threads")


@takes(without=(*_NO_OPTIONS, *OF_MODELS, *_OF_READS, "layers", "host", "on_overrun"))
def plan(
    path: str | os.PathLike[str],
    *,
    group: object = None,
    split: Split = "layers",
    timeout: float = 60.0,
    offload: bool = False,
    **options: Unpack[OffloadOptions],
) -> ClusterPlan:
    """Return the plan of a load across nodes; all ranks call it, and get the same plan.

    ``plan(...).mine`` is the share of a rank, so that it can build that part of a model alone:
    ``mine.layers``, ``mine.has_embedding``, ``mine.has_head``.

    Args:
        path: as in `load_state_dict`.
        device: as in `load_state_dict`.
        group: as in `load_state_dict`.
        split: as in `load_state_dict`.
        timeout: as in `load_state_dict`.
        offload: plan for `offload`, with the same ``tokens`` and ``stay``: a share may be larger
            than its budget.
        budget: as in `load_state_dict`; if it is in bytes, no device is opened.
        **options: see `OffloadOptions`.

    Raises:
        PlanInfeasibleError: it does not fit.
        NodeError: another rank could not plan; see `load_state_dict`.
        CheckpointError: the checkpoint is invalid.
        ValueError: an argument is invalid.
    """

    def read() -> Asked:
        known = Options.parse(options)
        known = for_passes(known) if offload else known
        if not offload and (known.tokens is not None or known.stay):
            raise ValueError("tokens= and stay= need offload=True: a load leaves them out")
        if offload and split != "layers":
            raise ValueError('offload=True needs split="layers": only layers stream')
        return Asked(path, known, split, offload=offload)

    with _agreed(group, Held("raise", timeout), read, None) as (agreed, _):
        return agreed.plan


@takes(without=_NO_OPTIONS)
def load_state_dict(
    model: Any,
    path: str | os.PathLike[str],
    *,
    group: object = None,
    split: Split = "layers",
    verify: Verify = "crc32",
    timeout: float = 60.0,
    on_loss: OnLoss = "raise",
    layers: LayerNumbers | None = None,
    **options: Unpack[LoadOptions],
) -> LoadReport:
    """Stream a checkpoint into a model that is spread over several nodes; all ranks call it.

    Without a launcher it works like `streamload.load_state_dict`, with the checks of ``verify``.

    Args:
        model: as in `streamload.load_state_dict`: the whole model, where this rank leaves the
            parts of others as they are (on the meta device, never allocated), or the part that
            `plan` gave; None for a ``state_dict`` of the part.
        path: the checkpoint on this rank; each rank may have it elsewhere, and needs only the files
            that it reads. Rank 0 reads the headers.
        device: one device; see `streamload.load_state_dict`. With several ranks on a host, "cuda"
            is the GPU with the rank's number on its host, if there are enough. Ranks that share a
            GPU each need a budget in bytes.
        group: all ranks. None: those of the launcher (torchrun, mpirun, srun, or the
            environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT). Or a
            torch.distributed ProcessGroup, an mpi4py communicator, or a `Group`.
        split: "layers": contiguous whole layers, the fullest share as small as possible, embedding
            and head on the ranks that use them. "replicate": everything on every rank. "balanced":
            whole tensors, in no order. "tensor": an equal slice of every layer, of embedding and
            head on each rank, as `ClusterPlan.slices` lists them. A mesh such as "2x4": layers over
            2 groups of ranks, tensors over the 4 ranks of each; of a group, the smallest budget
            counts. Or a function of the nodes and of the bytes by parameter name, that returns the
            parameter names of each node.
        layers: the numbers that this rank's model has for its layers, if they differ from those of
            the whole model: a function of the rank's `Share`, for ``split="layers"`` or a mesh.
            With ``layers=lambda part: range(len(part.layers))`` each rank's model numbers its own
            layers from 0. Names of layers and reports are then the rank's own.
        verify: "crc32" reads parameters that several ranks have back from their devices and
            compares checksums (of ranks with the same dtype); "none" compares names and bytes
            alone.
        timeout: seconds within which all ranks know the loss of one. A collective must not take
            longer either: under "replicate", to read a block of 4 MiB.
        on_loss: "raise": if a rank is lost, the others raise PeerFailedError. "replan": they plan
            again over the ranks and budgets that are left, keep the parameters that they hold, and
            read what is missing; ``report.lost`` names the lost nodes, the notes list what moved,
            and ``report.recovery.recover()`` does the same after the load. Needs torch's engine,
            a ``model`` that can hold other layers (the whole on the meta device, or None), and a
            store for the ranks to meet in that outlives the lost rank.
        budget: most bytes on this rank's device; each rank may have another. Ranks on one host
            divide its staging memory (8 MiB at least), and its free memory unless a budget is
            given. Blocks that ranks exchange (under "replicate", and for slices of files behind a
            URL or on a network filesystem) take 8 to 32 MiB more of the host for each rank, or are
            part of the staging if ``Budget(..., host=...)`` is given.
        dtype: as in `streamload.load_state_dict`; required if the ranks' devices would choose
            different dtypes.
        strict: every parameter of the part must be in the model, and every parameter of the model
            in the checkpoint.
        progress: as in `streamload.load_state_dict`, on rank 0, for all ranks together; the others
            show nothing.
        context: as in `streamload.load_state_dict`, of the layers that each rank has.
        threads: as in `streamload.load_state_dict`; None: the CPUs are divided by the ranks that
            share a host.
        **options: see `LoadOptions`.

    Returns:
        The report of this rank; ``report.nodes`` has the reports of all.

    Raises:
        PeerFailedError: a rank died, hung or gave up; names its node.
        PlanMismatchError: ranks computed different plans, or their devices would choose different
            dtypes.
        NodeError: a rank could not load its part; names it.
        StreamloadError: as `streamload.load_state_dict`, for errors of this rank itself.

    After an error, parameters are as `streamload.load_state_dict` describes; its notes list them.
    """
    clock = Clock()

    def read() -> Asked:
        if verify not in ("crc32", "none"):
            raise ValueError(f"verify is crc32 or none, not {verify!r}")
        known = Options.parse(options)
        return Asked(path, known, split, verify, layers, on_loss=on_loss)

    held = Held(on_loss, timeout)

    def attempt() -> LoadReport:
        with _agreed(group, held, read, model) as (agreed, stack):
            load, plan = agreed.prepare(), agreed.plan
            with held.kept(load):
                with _gathered(agreed, load) as gatherer:
                    opener = gatherer.open if gatherer is not None else open_shard

                    def begin(progress: Progress) -> LoadReport:
                        report = run(load, progress, clock, opener, held.left)
                        return held.whole(load, report, plan)

                    report = _loaded(agreed, load, begin, agreed.source_nbytes, gatherer)
                    read_nbytes = report.read_nbytes
                    if gatherer is not None:
                        read_nbytes = gatherer.read_nbytes
                dtypes = {p.name: p.kind.dst.name for p in report.plan.placements}
                with _stated(load):
                    nodes = _verified(agreed, dtypes, report, (read_nbytes, 0), model)
                    _committed(agreed)
                if load.place.owner is not None:
                    load.place.owner.after_load(model, report.missing, report.skipped)
            report = replace(report, nodes=nodes, seconds=clock.seconds)
            return _watched(agreed, report, again, stack)

    def again() -> LoadReport:
        return replanned(attempt, held)

    return again()


@takes(without=_NO_OPTIONS)
def offload(
    model: Any,
    path: str | os.PathLike[str],
    *,
    group: object = None,
    timeout: float = 60.0,
    layers: LayerNumbers | None = None,
    tokens: int | None = None,
    stay: Patterns = (),
    host: float | str = 0,
    on_overrun: OnOverrun = "warn",
    on_loss: OnLoss = "raise",
    **options: Unpack[LoadOptions],
) -> Offloaded:
    """Let a model run that is spread over several nodes and larger than all of them.

    Layers are split in proportion to the budgets. A rank loads its share if it fits, and else
    offloads it, as `streamload.offload` does: weights that fit stay on its device, the rest stream
    through it at every pass. All ranks call it, and each runs its own part:

        with streamload.distributed.offload(part, path, budget="3GB") as offloaded:
            hidden = part(hidden)

    Args:
        model: this rank's part, as `plan` gives it, or the whole model with the parts of other
            ranks on the meta device; never None, since layers stream when the model computes.
        path: as in `load_state_dict`. Each rank reads it at every pass.
        device: as in `load_state_dict`.
        group: as in `load_state_dict`; passes do not use it.
        timeout: as in `load_state_dict`.
        layers: as in `load_state_dict`.
        tokens: as in `streamload.offload`; so are ``stay`` and ``host``, which is each rank's own.
        stay: see ``tokens``.
        host: see ``tokens``.
        on_overrun: as in `streamload.offload`, of this rank's part.
        on_loss: as in `load_state_dict`, but weights that stay are read again: the plan may need
            their memory for slots. ``offloaded.load.recovery.recover()`` closes the handle, and
            returns another.
        budget: as in `load_state_dict`; it holds while passes run.
        **options: see `LoadOptions`.

    Returns:
        The handle of this rank's part. Its ``load.nodes`` has the bytes of each rank.

    Raises:
        PlanInfeasibleError: a node has too little memory for the least that its share needs: a slot
            for its largest layer, and weights that must stay; before any data is read.
        OffloadError: the model cannot be offloaded.
        PeerFailedError: as `load_state_dict` does; so do PlanMismatchError, NodeError and others.

    A pass raises errors of this rank's own layers alone. Passes do not use the group: the program
    has to inform the other ranks.
    """
    clock = Clock()

    def read() -> Asked:
        how = {"tokens": tokens, "stay": stay, "host": host, "on_overrun": on_overrun}
        known = for_passes(Options.parse({**options, **how}))
        return Asked(path, known, "layers", "none", layers, offload=True, on_loss=on_loss)

    held = Held(on_loss, timeout)
    begun: list[Offloaded] = []

    def close() -> None:
        while begun:
            begun.pop().close()

    def attempt() -> Offloaded:
        close()  # the handle of the attempt before
        with _agreed(group, held, read, model) as (agreed, stack):
            prepared, total = agreed.prepare_offload()
            load = prepared.load

            def begin(progress: Progress) -> LoadReport:
                begun.append(prepared.run(progress, clock))
                return begun[0].load

            with held.kept(load):
                report = _loaded(agreed, load, begin, total, None)
                problem = prepared.problem
                dtypes = dict(zip(problem.wants.names, (d.name for d in problem.dsts), strict=True))
                each_nbytes = report.read_nbytes, prepared.plan.read_nbytes
                with _stated(load):
                    nodes = _verified(agreed, dtypes, report, each_nbytes, model)
                    _committed(agreed)
            held.keep(load, load.plan.placements)
            if load.place.owner is not None:
                load.place.owner.after_load(model, (), ())
            report = replace(report, nodes=nodes, seconds=clock.seconds)
            begun[0].load = _watched(agreed, report, again, stack)
        return begun[0]

    def again() -> Offloaded:
        try:
            return replanned(attempt, held)
        except BaseException:
            close()
            raise

    return again()


def _committed(agreed: Agreement) -> None:
    """Under "replan" end the load on all ranks alike; see `Held.commit`."""
    if agreed.held.on_loss == "raise":
        return
    agreed.held.commit()
    with suppress(PeerFailedError):  # the store may end with a rank that returns
        agreed.session.heartbeat.arrive()


def _watched(
    agreed: Agreement, report: LoadReport, again: Callable[[], Any], stack: ExitStack
) -> LoadReport:
    """Return the report with the ranks that were lost; the ranks stay in touch under "replan"."""
    held = agreed.held
    if held.on_loss == "raise":
        return report
    kept = stack.pop_all()
    if held.owned and isinstance(agreed.session.group, Engine):
        agreed.session.group.rest()
    notes = (*report.notes, *held.story(agreed.plan, agreed.each_held))
    recovery = Recovery(again, held, agreed.session, kept)
    report = replace(report, notes=notes, lost=tuple(held.lost), recovery=recovery)
    held.lost.clear()
    return report


@contextmanager
def _agreed(
    group: object, held: Held, read: Callable[[], Asked], model: Any
) -> Iterator[tuple[Agreement, ExitStack]]:
    """Meet all ranks and yield their common plan; an error of one rank ends the call on all.

    ``read`` returns the checked arguments of the call. ``held``: what the rank has of an attempt
    that lost a rank. The stack, if it is kept, closes session and group.
    """
    timeout = held.timeout
    if not (isinstance(timeout, (int, float)) and timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout is a number of seconds above zero, not {timeout!r}")
    opened = held.group or open_group(group, timeout, held.meets)
    torn = True  # whether ranks may still wait in a collective
    with ExitStack() as stack:
        if opened is not group:
            stack.callback(lambda: opened.close(torn))
        node = held.met(opened, owned=opened is not group) or node_name()
        session = stack.enter_context(Session(opened, node, host_id(), timeout_s=timeout))

        def arguments() -> Asked:
            asked = read()
            held.named([member.node for member in session.members])
            held.device = held.device or own_device(asked.device, session.me)
            return replace(asked, options=replace(asked.options, device=held.device))

        try:
            yield Agreement(session, session.step("its arguments", arguments), model, held), stack
        except Exception as error:  # all raise the error of a stage
            torn = session.loading or isinstance(error, PeerFailedError)
            raise
        torn = False


def _gathered(agreed: Agreement, load: Decision) -> AbstractContextManager[CollectiveReader | None]:
    """Return a context: a reader for all ranks, or None if each reads alone."""
    group = agreed.session.group
    if not agreed.exchanges:
        return nullcontext()
    whole = agreed.index.checkpoint
    missing = [p for p in exchanged(agreed.plan) if p.name not in agreed.everywhere]
    shared = shared_ranges(whole, missing)
    mine = own_lines(load.call.checkpoint, load.plan.placements)
    reader = agreed.options.reader
    kinds = {header.path: resolve_reader(header.path, reader) for header in whole.shards}
    return CollectiveReader(group, whole, shared, mine, kinds, agreed.block_nbytes)


def _loaded(
    agreed: Agreement,
    load: Decision,
    begin: Callable[[Progress], LoadReport],
    total: int,
    gatherer: CollectiveReader | None,
) -> LoadReport:
    """Load this rank's part, wait for all ranks; return this rank's report, with the plan's notes.

    ``begin`` runs the load and reports progress to its argument; ``total``: file bytes that all
    ranks load; ``gatherer``: the collective reader, or None.
    """
    session = agreed.session
    heartbeat, progress = session.heartbeat, agreed.asked.options.progress
    session.loading = True
    with reporting(progress if session.me.rank == 0 else False, total) as tell:
        heartbeat.on_progress = tell
        try:
            with session.identified(), ExitStack() as after:
                with (
                    uncollected(),
                    deferred_interrupt() as interrupt,
                    heartbeat.listening(interrupt.cancel),
                ):
                    report = begin(heartbeat.progress)
                    after.enter_context(_stated(load))
                    while gatherer is not None and not gatherer.wait(_LOOK_S):
                        interrupt.check()
                        heartbeat.report()
                heartbeat.progress(load.read_nbytes, load.read_nbytes)
                heartbeat.arrive()
                tell(total)
        finally:
            heartbeat.on_progress = lambda _: None
    session.loading = False
    return replace(report, notes=(*report.notes, *agreed.notes))


@contextmanager
def _stated(load: Decision) -> Iterator[None]:
    """Set the `LoadState` of errors in the with: this rank's part is loaded, but the call fails."""
    try:
        yield
    except BaseException as error:
        state = LoadState(tuple(p.name for p in load.plan.placements), (), ())
        if isinstance(error, StreamloadError):
            error.state = state
        error.add_note(f"parameters: {state}")
        raise


def _verified(
    agreed: Agreement,
    dtypes: Mapping[str, str],
    report: LoadReport,
    read_nbytes: tuple[int, int],
    model: Any,
) -> tuple[NodeReport, ...]:
    """Check that each parameter is on its planned rank and that replicas agree; return all reports.

    Ranks exchange digests of names and checksums, and search for tensors only if digests differ.

    Args:
        agreed: the plan of all ranks.
        dtypes: the dtype of each parameter of this rank's model that is loaded, or streams.
        report: the report of this rank.
        read_nbytes: file bytes that this rank read, and that a pass reads.
        model: the model of this rank.
    """
    session, asked = agreed.session, agreed.asked
    complete = asked.options.strict and asked.options.shapes == "error"
    plan, name_of = agreed.plan, agreed.names
    replicas = plan.replicas()
    sums: dict[str, int | None] = {}
    dtypes = {name_of.get(name, name): dtype for name, dtype in dtypes.items()}

    def loaded() -> dict[str, Any]:
        mine = plan.mine.parameters
        wrong = sorted(dtypes.keys() - set(mine))
        wrong += [name for name in mine if complete and name not in dtypes]
        if wrong:
            problem = f"did not load what was planned: {', '.join(wrong[:_LISTED])}"
            raise NodeError(session.me.node, problem)
        sums.update(dict.fromkeys(dtypes))
        if asked.verify == "crc32":
            here = {n for owners, names in replicas if session.me.rank in owners for n in names}
            here = {new for new, name in name_of.items() if name in here & dtypes.keys()}
            found = checksums(report, here, model)
            sums.update({name_of[new]: crc for new, crc in found.items()})
        return {
            "tensors": len(dtypes),
            "names": _digest([name for name in mine if name in dtypes]),
            "dtypes": [_digest([dtypes.get(n) for n in names]) for _, names in replicas],
            "sums": [_digest([sums.get(n) for n in names]) for _, names in replicas],
            "read": read_nbytes[0],
            "resident": report.resident_nbytes,
            "seconds": report.seconds,
            "pass": read_nbytes[1],
        }

    answers = session.exchange("what it loaded", loaded)
    planned: dict[int, str] = {}  # replicas share a list
    for share in plan.shares:
        digest = planned.setdefault(id(share.parameters), _digest(share.parameters))
        if complete and answers[share.rank]["names"] != digest:
            raise NodeError(share.node, "did not load what was planned")
    for which, (owners, names) in enumerate(replicas):
        first = answers[owners[0]]
        alike = [r for r in owners if answers[r]["dtypes"][which] == first["dtypes"][which]]
        if any(answers[r]["sums"][which] != first["sums"][which] for r in alike):
            _raise_odd(session, alike, names, sums)
    return tuple(
        NodeReport(m.node, m.rank, *(said[key] for key in _REPORTED))
        for m, said in zip(session.members, answers, strict=True)
    )


def _digest(values: Sequence[object]) -> str:
    """Return the SHA-256 of values as JSON."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _raise_odd(
    session: Session, ranks: Sequence[int], names: Sequence[str], sums: Mapping[str, int | None]
) -> NoReturn:
    """Find the tensor, of ``names``, whose replicas on ``ranks`` differ, and raise NodeError.

    All ranks call this together; ``sums`` are the checksums of this rank's tensors.
    """
    while len(names) > 1:
        step = -(-len(names) // _PARTS)
        parts = [names[at : at + step] for at in range(0, len(names), step)]
        digests = [_digest([sums.get(name) for name in part]) for part in parts]
        said = session.exchange("its checksums", partial(list, digests))
        names = next(p for at, p in enumerate(parts) if len({said[r][at] for r in ranks}) > 1)
    (name,) = names
    found = session.exchange("its checksum", partial(sums.get, name))
    ((most, _),) = Counter(found[rank] for rank in ranks).most_common(1)
    rank, like = (next(r for r in ranks if (found[r] == most) is same) for same in (False, True))
    raise NodeError(
        session.members[rank].node,
        f"its replica of {name} is not that of {session.members[like].node}: CRC-32 "
        f"{found[rank]}, there {most}",
    )
