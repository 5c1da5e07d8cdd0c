"""Loading across nodes: each rank plans the same split and loads its own part, and all know it.

The same line runs on every rank, under torchrun, mpirun, srun or bare environment variables:

    report = streamload.distributed.load_state_dict(model, path, budget="3GB")

1. HELLO: the ranks meet, and learn each other's node ids and hosts.
2. INDEX: rank 0 reads the headers and sends them round; each rank checks that its files are those.
3. OFFER: each says what its device may hold, and whether it computes in bfloat16.
4. PLAN: each computes who loads what; the digests are compared. Then each plans its own load.
5. LOAD: each streams its part, with no collective. Replicated bytes are read once by all together.
6. VERIFY: when all are done, names, bytes and checksums of replicas are compared: each tensor is
   where it was planned, exactly once, and replicas agree.

An error of one rank before LOAD is raised by all, naming it; a rank that is lost at any time is
named by `streamload.errors.PeerFailedError` on all others within the timeout.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Unpack

from streamload.checkpoint.checkpoint import Checkpoint, locate, open_checkpoint
from streamload.checkpoint.readers import resolve_reader
from streamload.decide import Decision, Options, Place
from streamload.devices.names import framework, spelled_as, split_name
from streamload.errors import (
    LoadState,
    NodeError,
    PeerFailedError,
    PlanInfeasibleError,
    PlanMismatchError,
    StreamloadError,
)
from streamload.interrupt import deferred_interrupt
from streamload.load import run, uncollected
from streamload.load import split as split_by_layers
from streamload.nodes.gather import (
    BLOCK_NBYTES,
    BLOCKS,
    LEAST_BLOCK_NBYTES,
    Gatherer,
    held_nbytes,
    shared_ranges,
)
from streamload.nodes.group import Group
from streamload.nodes.index import Index, check_present, write_index
from streamload.nodes.launch import host_id, node_name, open_group
from streamload.nodes.session import Member, Session
from streamload.nodes.shares import ClusterPlan, Share, Split, make_shares
from streamload.options import NameOptions, SplitOptions, WeightOptions, takes
from streamload.planning.budget import MIN_HOST_NBYTES, STAGING, Budget, BudgetLike, available_cpus
from streamload.planning.demand import Wants
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.progress import Progress, reporting
from streamload.reading import open_shard
from streamload.report import Clock, LoadReport, NodeReport
from streamload.verify import checksums

Verify = Literal["crc32", "none"]

_REPLANS = 3  # how often nodes may find that a plan does not fit with their staging
_LOOK_S = 0.1  # between looks for Ctrl-C and losses, while others need what this rank reads
_LISTED = 8  # names shown in a message
_PARTS = 256  # that are compared at once, where a tensor is looked for


class ClusterPlanOptions(WeightOptions, NameOptions, total=False):
    """The options of `plan`; see `streamload.options.LoadOptions`."""

    budget: BudgetLike


class ClusterLoadOptions(SplitOptions, total=False):
    """The options of `load_state_dict`; see `streamload.options.LoadOptions`."""

    budget: BudgetLike
    strict: bool
    progress: Progress


@takes()
def plan(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    group: object = None,
    split: Split = "layers",
    timeout: float = 60.0,
    **options: Unpack[ClusterPlanOptions],
) -> ClusterPlan:
    """Plan a load across nodes; all ranks call it, and get the same plan.

    ``plan(...).mine`` tells a rank what it will load, so that it builds only that part of a model:
    ``mine.layers``, ``mine.has_embedding``, ``mine.has_head``.

    Args:
        path: as in `load_state_dict`.
        device: as in `load_state_dict`.
        group: as in `load_state_dict`.
        split: as in `load_state_dict`.
        timeout: as in `load_state_dict`.
        budget: as in `load_state_dict`; with bytes, no device is looked at.
        **options: see `ClusterPlanOptions`.

    Raises:
        PlanInfeasibleError: it does not fit.
        NodeError: another rank could not plan; see `load_state_dict`.
        CheckpointError: the checkpoint is invalid.
        ValueError: an argument is invalid.
    """

    def read(me: Member) -> _Asked:
        own = _own_device(device, me)
        return _Asked(path, Options.read(**options), split, options, own)

    with _meeting(group, timeout) as session:
        asked = session.step("its arguments", lambda: read(session.me))
        return _Agreed.reach(session, asked, None).plan


@takes()
def load_state_dict(
    model: Any,
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    group: object = None,
    split: Split = "layers",
    verify: Verify = "crc32",
    timeout: float = 60.0,
    **options: Unpack[ClusterLoadOptions],
) -> LoadReport:
    """Stream a checkpoint into a model that is spread over several nodes; all ranks call it.

    Outside a launcher it is `streamload.load_state_dict`, checked likewise.

    Args:
        model: as in `streamload.load_state_dict`: the whole model, of which what this rank does
            not own is left as it is (on the meta device, never allocated), or the part that
            `plan` said; None for a ``state_dict`` of the part.
        path: the checkpoint, where this rank finds it; it may lie elsewhere on each, and needs
            only the files that a rank reads. Rank 0 reads the headers.
        device: one device; see `streamload.load_state_dict`. With several ranks on a host, "cuda"
            is for each the GPU of its number there, if there are as many. Ranks that share a GPU
            each need a budget in bytes.
        group: who loads together. None: what the launcher says (torchrun, mpirun, srun, or the
            environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT). Or a
            torch.distributed ProcessGroup, an mpi4py communicator, or a `nodes.group.Group`.
        split: "layers": contiguous whole layers, the fullest share as small as can be, embedding
            and head where they are used. "replicate": everything on every rank. "balanced": whole
            tensors, in no order. Or a function of the nodes and of the bytes by parameter name,
            that gives the names of each node.
        verify: "crc32" reads what several ranks hold back from their devices and compares
            checksums (of ranks with the same dtype); "none" compares names and bytes alone.
        timeout: seconds within which the loss of a rank is known to all. What all do together must
            not take longer either: under "replicate", to read a block of 4 MiB.
        budget: most bytes on this rank's device; each rank may have another. Host staging is
            divided by the ranks that share a host (8 MiB at least), and so is free memory that no
            one stated. What "replicate" exchanges takes 8 to 32 MiB more of the host for each
            rank, or is part of the staging where ``Budget(..., host=...)`` stated it.
        dtype: as in `streamload.load_state_dict`; it must decide what devices that differ would do
            differently.
        strict: every parameter of the part must be in the model, and every parameter of the model
            in the checkpoint.
        progress: as in `streamload.load_state_dict`, on rank 0, for all ranks together; the others
            show nothing.
        context: as in `streamload.load_state_dict`, of the layers that each rank has.
        threads: as in `streamload.load_state_dict`; None: the CPUs are divided by the ranks that
            share a host.
        **options: see `ClusterLoadOptions`.

    Returns:
        What this rank did; ``report.nodes`` says what each did.

    Raises:
        PeerFailedError: a rank died, hung or gave up; names its node.
        PlanMismatchError: ranks computed different plans, or their devices differ in what the
            dtype leaves open.
        NodeError: a rank could not take its part; names it.
        StreamloadError: as `streamload.load_state_dict` does, for what this rank itself met.

    After an error, parameters are as `streamload.load_state_dict` says; the error's notes say how.
    """
    clock = Clock()

    def read(me: Member) -> _Asked:
        strict = options["strict"]
        for name, value, choices in (
            ("verify", verify, ("crc32", "none")),
            ("strict", strict, (True, False)),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {' or '.join(map(str, choices))}, not {value!r}")
        own = _own_device(device, me)
        return _Asked(path, Options.read(**options), split, options, own, verify, strict)

    with _meeting(group, timeout) as session:
        asked = session.step("its arguments", lambda: read(session.me))
        agreed, load = _prepared(session, asked, _Agreed.reach(session, asked, model))
        with _gathered(session, agreed, load) as gatherer:
            report = _loaded(session, agreed.plan, load, gatherer, options["progress"], clock)
            read_nbytes = gatherer.read_nbytes if gatherer is not None else report.read_nbytes
        with _stated(load):
            nodes = _verified(session, asked, agreed.plan, load, report, read_nbytes, model)
        return replace(report, nodes=nodes, seconds=clock.seconds)


@contextmanager
def _meeting(group: object, timeout: float) -> Iterator[Session]:
    """Meet the others; what this rank raises ends it for all."""
    if not (isinstance(timeout, (int, float)) and timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout is a number of seconds above zero, not {timeout!r}")
    opened = open_group(group, timeout)
    torn = True  # whether ranks may wait for each other in a collective
    try:
        with Session(opened, node_name(), host_id(), timeout_s=timeout) as session:
            try:
                yield session
            except Exception as error:  # that of a stage is raised by all
                torn = session.loading or isinstance(error, PeerFailedError)
                raise
        torn = False
    finally:
        if opened is not group:
            opened.close(torn)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a call asks for, the same on every rank but for the path, the budget and the device."""

    path: str | os.PathLike[str]
    options: Options
    split: Split
    given: ClusterPlanOptions
    device: str | None
    verify: Verify = "crc32"
    strict: bool = True

    def __post_init__(self) -> None:
        """Validate the arguments."""
        if self.options.room.cache is not None and self.split not in ("layers", "replicate"):
            raise ValueError('context= needs split="layers" or "replicate": caches are of layers')
        if not isinstance(self.path, (str, os.PathLike)):
            raise ValueError(
                f"expected the path of a checkpoint, not {type(self.path).__name__}: each rank "
                "finds its files by it"
            )
        if self.device is not None and not isinstance(self.device, str):
            raise ValueError(
                f"a rank loads to one device, not {self.device!r}: start a rank for each"
            )

    @property
    def rules(self) -> dict[str, Any]:
        """The dtype that was asked for, by pattern."""
        return {pattern: dtype or "checkpoint" for pattern, dtype in self.options.policy.rules}

    @property
    def terms(self) -> dict[str, str]:
        """What must be the same on every rank, as text, beside what a plan's digest is of."""
        said = {
            "dtype": self.rules,
            "out_of_range": self.options.knobs.out_of_range,
            "context": self.options.room.cache,
            "split": self.split if isinstance(self.split, str) else "a function",
            "verify": self.verify,
            "strict": self.strict,
        }
        return {name: str(value) for name, value in said.items()}


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What all ranks know before anyone loads.

    Attributes:
        index: the checkpoint.
        missing: its files that are not on this rank.
        place: the model and the device of this rank; None where no device was looked at.
        options: with this rank's part of the host.
        budgets: of each rank, in bytes.
        block_nbytes: most that is exchanged at once, under "replicate".
        plan: who loads what.
    """

    index: Index
    missing: Sequence[str]
    place: Place | None
    options: Options
    budgets: tuple[int, ...]
    block_nbytes: int
    plan: ClusterPlan

    @classmethod
    def reach(cls, session: Session, asked: _Asked, model: Any) -> _Agreed:
        """Go through the stages up to the plan.

        Args:
            session: the ranks.
            asked: the call.
            model: what is filled; None for a part without a model.
        """
        index, missing = _indexed(session, asked)
        looked: list[Place] = []

        def offer() -> dict[str, Any]:
            offered, place = _offer(session, asked, index.checkpoint, model)
            looked.extend([place] if place is not None else [])
            return offered

        offers = session.exchange("its device", offer)
        _check_alike(session, offers)
        budgets = tuple(offered["budget"] for offered in offers)
        room = min(offered["room"] for offered in offers)
        block_nbytes = min(max(room // BLOCKS, LEAST_BLOCK_NBYTES), BLOCK_NBYTES)
        place = looked[0] if looked else None
        made = _planned(session, asked, index.checkpoint, budgets)
        options = session.step(
            "its options",
            lambda: _mine(session, asked, index.checkpoint, budgets, block_nbytes, place),
        )
        return cls(index, missing, place, options, budgets, block_nbytes, made)


def _indexed(session: Session, asked: _Asked) -> tuple[Index, list[str]]:
    """The headers, by rank 0; and the files that this rank does not have."""
    data = session.share("the checkpoint", lambda: write_index(open_checkpoint(asked.path)))

    def check() -> tuple[Index, list[str]]:
        index = Index.read(data, *locate(asked.path))
        return index, index.check()

    return session.step("its files", check)


def _offer(
    session: Session, asked: _Asked, checkpoint: Checkpoint, model: Any
) -> tuple[dict[str, Any], Place | None]:
    """What this rank's device may hold, and how it would decide about bfloat16."""
    options, name = asked.options, asked.device or "device"
    said = {"room": _block_room(options.budget, session.me.local_size)}
    undecided = Wants.every(checkpoint).needs_native_bf16(options.policy)
    if model is None and not undecided and options.budget.is_stated(name):
        nbytes = options.budget.resolve(name, None) - options.room.reserve_nbytes
        return said | {"budget": max(nbytes, 0), "bf16": None}, None
    place = _one_device(model, options, asked.device)
    (spec,) = place.specs(options, undecided)
    nbytes, reserved = spec.budget_nbytes, options.room.reserve_nbytes
    if not options.budget.is_stated(spec.name) and spec.shared_memory:
        # all ranks of this host found the same memory free, and each keeps some of it so
        nbytes = max((nbytes + reserved) // session.me.local_size - reserved, 0)
    bf16 = spec.native_bf16 if undecided else None
    return said | {"budget": nbytes, "bf16": bf16}, place


def _block_room(budget: Budget, sharing: int) -> int:
    """Bytes of a rank's host for what is exchanged: of its part of what was stated.

    By default they are taken beside what is staged, 32 MiB of a host for all ranks there or a
    little more.
    """
    if budget.host_stated:
        return budget.host_nbytes // sharing - MIN_HOST_NBYTES
    return BLOCKS * BLOCK_NBYTES // sharing


def _own_device(device: str | None, me: Member) -> str | None:
    """A device by its number, where several ranks of a host ask for one without: each has its own.

    tinygrad does not tell how many it has, and where there are fewer than ranks they may share.
    """
    if not isinstance(device, str) or me.local_size == 1:
        return device
    named, name = split_name(device)
    if not name or ":" in name or (named or spelled_as(name)) != "torch":
        return device
    known = framework("torch").candidates()
    alike = [other for other in known if other.partition(":")[0] == name.lower()]
    return alike[me.local_rank] if len(alike) >= me.local_size else device


def _one_device(model: Any, options: Options, device: str | None) -> Place:
    """The model, and the one device that a rank loads to."""
    place = Place.look(model, options, device)
    if len(place.devices.opened) != 1:
        raise ValueError(
            f"a rank loads to one device, not {len(place.devices.opened)}: start a rank for each"
        )
    return place


def _check_alike(session: Session, offers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse devices that would not hold the same dtypes, where no dtype was asked for."""
    for member in session.members:
        here, first = offers[member.rank]["bf16"], offers[0]["bf16"]
        if here != first:
            runs = {True: "computes in bfloat16", False: "has no bfloat16", None: "was not asked"}
            raise PlanMismatchError(
                member.node,
                f"{runs[here]}, and {session.members[0].node} {runs[first]}: "
                "pass the dtype that all should have",
            )


def _mine(
    session: Session,
    asked: _Asked,
    checkpoint: Checkpoint,
    budgets: Sequence[int],
    block_nbytes: int,
    place: Place | None,
) -> Options:
    """The options with this rank's part of its host."""
    options, sharing = asked.options, session.me.local_size
    staged = place is not None and not all(
        device.info.host_visible for device in place.devices.opened.values()
    )
    stated = options.budget.host_stated
    staging, held = options.budget.host_nbytes // sharing, 0
    nbytes = max(budgets[session.me.rank] + options.room.reserve_nbytes, 1)
    names = place.devices.opened if place is not None else {}
    reader, reserve_nbytes = options.knobs.reader, options.room.reserve_nbytes
    if asked.split == "replicate" and session.group.size > 1:
        if options.knobs.reader in ("mmap", "direct"):
            raise ValueError(
                'split="replicate" reads files by pread, for all ranks together, and not with '
                f'reader="{reader}"'
            )
        if options.knobs.page_cache == "drop":
            raise ValueError('split="replicate" leaves the page cache: page_cache="drop" is not')
        reader = "pread"  # what is exchanged is read into memory
        held = held_nbytes(checkpoint, session.group.size, block_nbytes)
        if place is not None and any(d.info.shared_memory for d in place.devices.opened.values()):
            reserve_nbytes += held
    if staged and stated and staging - held < MIN_HOST_NBYTES:
        raise PlanInfeasibleError(
            STAGING,
            MIN_HOST_NBYTES + held,
            staging,
            limit=f"host budget of each of {sharing} ranks" if sharing > 1 else "host budget",
            would_fit=[f'Budget(..., host="{-(-(MIN_HOST_NBYTES + held) * sharing // 2**20)}MiB")'],
        )
    staging = max(staging - held if stated else staging, MIN_HOST_NBYTES)
    budget = Budget(dict.fromkeys(names, nbytes) or nbytes, host=staging)
    return replace(
        options,
        budget=budget,
        knobs=replace(options.knobs, reader=reader),
        room=replace(options.room, reserve_nbytes=reserve_nbytes),
        cpus=max(available_cpus() // sharing, 1),
        host_held_nbytes=held,
    )


def _planned(
    session: Session, asked: _Asked, checkpoint: Checkpoint, budgets: Sequence[int]
) -> ClusterPlan:
    """Plan, and see that all planned the same."""
    given = asked.given

    def planned(nodes: Sequence[Node]) -> Plan:
        return split_by_layers(
            checkpoint,
            nodes=nodes,
            dtype=given["dtype"],
            out_of_range=asked.options.knobs.out_of_range,
            rename=given["rename"],
            mapping=given["mapping"],
            context=given["context"],
            batch=given["batch"],
            cache_dtype=given["cache_dtype"],
        )

    made: list[ClusterPlan] = []
    problems: list[StreamloadError] = []

    def plan() -> list[Any]:
        rank, path = session.me.rank, str(checkpoint.path)
        try:
            made.append(make_shares(path, rank, session.members, budgets, asked.split, planned))
        except (PlanInfeasibleError, NodeError) as error:  # found by all, if all asked alike
            problems.append(error)
        return [made[0].digest if made else str(problems[0]), asked.terms]

    plans = session.exchange("its plan", plan)
    here, first = session.members[0].node, plans[0]
    for member in session.members:
        digest, terms = plans[member.rank]
        other = [name for name, value in terms.items() if value != first[1].get(name)]
        if other:
            name = other[0]
            raise PlanMismatchError(
                member.node,
                f"was asked for {name}={terms[name]}, and {here} for {first[1].get(name)}: "
                "ask for the same on every rank",
            )
        if digest != first[0]:
            raise PlanMismatchError(
                member.node,
                f"planned another split than {here}: rename, mapping, and the function of a split "
                "must give the same on every rank",
            )
    if problems:
        raise problems[0]
    return made[0]


def _prepared(session: Session, asked: _Asked, agreed: _Agreed) -> tuple[_Agreed, Decision]:
    """Plan this rank's own load, and see that all can.

    What a load takes beside weights (scratch, the allocator's rounding) is known to the rank
    alone. Where it does not fit, all plan again with that node's budget made smaller by as much.
    """
    stated = agreed.budgets
    again = _REPLANS if asked.split in ("layers", "balanced") else 0
    for last in (*[False] * again, True):
        made: list[Decision] = []

        def prepare(
            last: bool = last, made: list[Decision] = made, agreed: _Agreed = agreed
        ) -> int:
            place = agreed.place or _one_device(None, agreed.options, asked.device)
            try:
                made.append(_own_load(agreed, place, asked.strict))
            except PlanInfeasibleError as error:
                if last or error.device not in place.devices.opened:
                    raise
                return error.needed_nbytes - error.budget_nbytes
            return 0

        short = session.exchange("its part", prepare)
        if not any(short):
            return agreed, made[0]
        share = {s.rank: s.nbytes for s in agreed.plan.shares}
        budgets = tuple(
            max(min(budget, share[rank]) - by, 1) if by else budget
            for rank, (budget, by) in enumerate(zip(agreed.budgets, short, strict=True))
        )
        try:
            made_again = _planned(session, asked, agreed.index.checkpoint, budgets)
        except PlanInfeasibleError as error:
            rank = next((m.rank for m in session.members if m.node == error.device), None)
            if rank is None:
                raise
            raise PlanInfeasibleError(  # of what was stated, with what else the load takes there
                error.device,
                error.needed_nbytes + stated[rank] - budgets[rank],
                stated[rank],
                largest=error.largest,
                would_fit=error.would_fit,
            ) from None
        agreed = replace(agreed, budgets=budgets, plan=made_again)
    raise AssertionError("the last round raises or returns")


def _own_load(agreed: _Agreed, place: Place, strict: bool) -> Decision:
    """Plan the load of this rank's share."""
    plan, whole = agreed.plan, agreed.index.checkpoint
    fill = plan.sources(plan.mine)
    wanted = {r.tensor for source in fill.values() for r in source.rows}
    tensors = {name: info for name, info in whole.tensors.items() if name in wanted}
    shards = {info.shard for info in tensors.values()}
    part = replace(
        whole,
        shards=tuple(header for header in whole.shards if header.path in shards),
        tensors=MappingProxyType(tensors),
    )
    check_present(part, agreed.missing)
    others = plan.placements.keys() - fill.keys()
    parameters = [
        p
        for p in place.parameters
        if others.isdisjoint(p.names) or not fill.keys().isdisjoint(p.names)
    ]
    options = agreed.options
    if plan.split == "layers" and not plan.mine.layers:
        # of no layers: the names here tell of none
        options = replace(options, room=replace(options.room, cache=None))
    return Decision.make(
        replace(place, parameters=parameters), part, options, (fill, [], {}), strict
    )


@contextmanager
def _gathered(session: Session, agreed: _Agreed, load: Decision) -> Iterator[Gatherer | None]:
    """What is read by all ranks together, where all load the same."""
    if agreed.plan.split != "replicate" or session.group.size == 1:
        yield None
        return
    whole, part = agreed.index.checkpoint, load.checkpoint
    shared = shared_ranges(whole, agreed.plan.placements.values())
    mine = shared_ranges(part, load.plan.placements)
    reader = agreed.options.knobs.reader
    kinds = {header.path: resolve_reader(header.path, reader) for header in whole.shards}
    with Gatherer(session.group, whole, shared, mine, kinds, agreed.block_nbytes) as gatherer:
        yield gatherer


def _loaded(
    session: Session,
    plan: ClusterPlan,
    load: Decision,
    gatherer: Gatherer | None,
    progress: Progress,
    clock: Clock,
) -> LoadReport:
    """Stream this rank's part, and wait until all have."""
    heartbeat = session.heartbeat
    session.loading = True
    opener = gatherer.open if gatherer is not None else open_shard
    total = sum(share.source_nbytes for share in plan.shares)
    with reporting(progress if session.me.rank == 0 else False, total) as tell:
        heartbeat.on_progress = tell
        try:
            with ExitStack() as after:
                with (
                    uncollected(),
                    deferred_interrupt() as interrupt,
                    heartbeat.listening(interrupt.cancel),
                ):
                    report = run(load, heartbeat.progress, clock, opener)
                    after.enter_context(_stated(load))
                    while gatherer is not None and not gatherer.wait(_LOOK_S):
                        interrupt.check()
                        heartbeat.report()
                heartbeat.progress(load.read_nbytes, load.read_nbytes)
                heartbeat.arrive()
                tell(total)
        except PeerFailedError as error:
            found = heartbeat.identify(error)
            if found is error:
                raise
            found.state = error.state
            for note in error.__notes__:
                found.add_note(note)
            raise found from error
        finally:
            heartbeat.on_progress = _unseen
    session.loading = False
    return report


@contextmanager
def _stated(load: Decision) -> Iterator[None]:
    """Say of an error that it came when this rank's own part was done."""
    try:
        yield
    except BaseException as error:
        state = LoadState(tuple(p.name for p in load.plan.placements), (), ())
        if isinstance(error, StreamloadError):
            error.state = state
        error.add_note(f"parameters: {state}")
        raise


def _unseen(_: object) -> None:
    """Nobody looks any more."""


def _verified(
    session: Session,
    asked: _Asked,
    plan: ClusterPlan,
    load: Decision,
    report: LoadReport,
    read_nbytes: int,
    model: Any,
) -> tuple[NodeReport, ...]:
    """See that each parameter is where it was planned, and that replicas agree.

    Digests are compared, of names and of checksums: what differs is looked for only where they do.
    """
    replicas = plan.replicas()
    sums: dict[str, int | None] = {}
    dtypes = {p.name: p.dst.name for p in load.plan.placements}

    def found() -> dict[str, Any]:
        mine = plan.mine.parameters
        wrong = sorted(dtypes.keys() - set(mine))
        wrong += [name for name in mine if asked.strict and name not in dtypes]
        if wrong:
            said = f"did not load what was planned: {', '.join(wrong[:_LISTED])}"
            raise NodeError(session.me.node, said)
        sums.update(dict.fromkeys(dtypes))
        if asked.verify == "crc32":
            here = {n for owners, names in replicas if session.me.rank in owners for n in names}
            sums.update(checksums(report, here & dtypes.keys(), model))
        return {
            "tensors": len(dtypes),
            "names": _digest([name for name in mine if name in dtypes]),
            "dtypes": [_digest([dtypes.get(n) for n in names]) for _, names in replicas],
            "sums": [_digest([sums.get(n) for n in names]) for _, names in replicas],
            "read": read_nbytes,
            "resident": report.resident_nbytes,
            "seconds": report.seconds,
        }

    answers = session.exchange("what it loaded", found)
    planned: dict[int, str] = {}  # replicas have one list
    for share in plan.shares:
        digest = planned.setdefault(id(share.parameters), _digest(share.parameters))
        if asked.strict and answers[share.rank]["names"] != digest:
            raise NodeError(share.node, "did not load what was planned")
    for which, (owners, names) in enumerate(replicas):
        first = answers[owners[0]]
        alike = [r for r in owners if answers[r]["dtypes"][which] == first["dtypes"][which]]
        if any(answers[r]["sums"][which] != first["sums"][which] for r in alike):
            _raise_odd(session, alike, names, sums)
    return tuple(
        NodeReport(
            node=member.node,
            rank=member.rank,
            tensors=answers[member.rank]["tensors"],
            read_nbytes=answers[member.rank]["read"],
            resident_nbytes=answers[member.rank]["resident"],
            seconds=answers[member.rank]["seconds"],
        )
        for member in session.members
    )


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _raise_odd(
    session: Session, ranks: Sequence[int], names: Sequence[str], sums: Mapping[str, int | None]
) -> NoReturn:
    """Raise NodeError for the replica that is not as most are; all ranks call this."""
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


__all__ = ["ClusterPlan", "Group", "Share", "load_state_dict", "plan"]
