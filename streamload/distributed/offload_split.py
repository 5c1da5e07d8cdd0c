"""`split_offload`: plan a model over nodes that offload their shares if these do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from streamload.checkpoint.open import Checkpoint, CheckpointLike
from streamload.core.chart import Shown
from streamload.core.patterns import check_patterns
from streamload.core.units import format_bytes, format_table
from streamload.loading.load import check_nodes, node_specs, read_call, uncollected
from streamload.loading.options import CHANGES, OF_MODELS, PLACE, OffloadOptions, Options, takes
from streamload.loading.place import engine_of
from streamload.loading.prepare import plan_within, request_of, specs_under
from streamload.offloading.layers import groups_of_checkpoint
from streamload.offloading.offload import for_passes
from streamload.offloading.plan import ENDLESS_NBYTES, LEAST_CHUNK_NBYTES, OffloadPlan, Problem
from streamload.planning.fit import CacheRoom
from streamload.planning.match import wants_of
from streamload.planning.moves import DeviceSpec, TensorRequests
from streamload.planning.partition import Need, Node, Part, Unit
from streamload.planning.plan import DevicePlan, Plan
from streamload.planning.planner import assign
from streamload.planning.shares import holds

_THREADS = 2
_Assigned = tuple[dict[str, Part], TensorRequests, list[str]]


@dataclass(frozen=True, slots=True)
class OffloadSplit(Shown):
    """The plan of a model over nodes that may stream a part of their share; prints as a table.

    Attributes:
        plan: the share of each node. Its devices are the nodes; their budgets are unlimited.
        offloads: for each node, the weights that stay and those that stream, in layer order.
    """

    plan: Plan
    offloads: tuple[OffloadPlan, ...]

    @property
    def pass_nbytes(self) -> dict[str, int]:
        """File bytes that a pass reads on each node, by its name, with the experts of one token."""
        return {made.device: made.read_nbytes for made in self.offloads}

    def to_json(self, rate: float | None = None) -> str:
        """Return the plan as JSON, keyed by node.

        ``rate``, in bytes a second, adds the seconds of a pass on each node.
        """
        nodes = {}
        for mine, made in zip(self.plan.devices, self.offloads, strict=True):
            has = {"layers": mine.layers, "embedding": mine.embedding, "head": mine.head}
            facts = json.loads(made.to_json())
            for key in ("device", "host", "places", "views"):  # known on an opened machine only
                del facts[key]
            seconds = {} if rate is None else {"seconds": made.seconds(rate)}
            nodes[made.device] = has | facts | seconds
        return json.dumps({"path": self.plan.path, "nodes": nodes}, separators=(",", ":"))

    def table(self, rate: float | None = None) -> str:
        """Return a line for each node; ``rate``, in bytes a second, adds the seconds of a pass."""
        rows = []
        for mine, made in zip(self.plan.devices, self.offloads, strict=True):
            found, read = made.residency, self.pass_nbytes[made.device]
            slots = f"{found.slots} x {format_bytes(found.slot_nbytes)}" if found.slots else "-"
            has = holds(range(*mine.layers or (0, 0)), mine.embedding, mine.head)
            row = [
                *(made.device, has or ("all" if len(self.offloads) == 1 else "-"), _streams(made)),
                *(format_bytes(mine.resident_nbytes), format_bytes(found.resident_nbytes)),
                *(slots, format_bytes(read) if read else "-"),
                *(format_bytes(made.needed_nbytes), format_bytes(made.budget_nbytes)),
            ]
            rows.append(row if rate is None else [*row, f"{made.seconds(rate):.3g} s"])
        titles = ["node", "holds", "streams", "weights", "stay", "slots", "a pass reads", "needs"]
        titles += ["budget"] if rate is None else ["budget", "a pass takes"]
        reads = [nbytes for nbytes in self.pass_nbytes.values() if nbytes]
        fits = not any(made.residency.absent for made in self.offloads)
        summary = "all shares fit: nothing streams" if fits else "a pass reads rows alone"
        if reads:
            summary = (
                f"{len(reads)} of {len(self.offloads)} nodes stream; a pass reads "
                f"{format_bytes(sum(reads))}, at most {format_bytes(max(reads))} on a node"
            )
        return "\n".join([*format_table(titles, rows, right=len(titles) - 3), summary])

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def _streams(made: OffloadPlan) -> str:
    """Return the part of a node's share that streams, in words, for `OffloadSplit.table`."""
    found = made.residency
    layers = f"{len(found.streams)} of {len(made.bounded) + len(found.streams)} layers"
    experts = f"experts of {len(found.experts)} layers"
    parts = ((layers, found.streams), (experts, found.experts), ("rows", found.gathers))
    return ", ".join(text for text, streams in parts if streams) or "-"


@takes(without=(*OF_MODELS, *CHANGES, *PLACE, "layers", "host", "on_overrun"))
@uncollected()
def split_offload(
    path: CheckpointLike, *, nodes: Sequence[Node], **options: Unpack[OffloadOptions]
) -> OffloadSplit:
    """Plan to split a model over nodes that are too small for it, without reading any data.

    Layers are split in proportion to the budgets, so that each node has the least that it needs: a
    slot for its largest layer, and memory for weights that cannot stream. A node whose share does
    not fit offloads it; see `streamload.offload`. If all shares fit, the plan is that of
    `streamload.split`. The same input gives the same plan on any machine.

    Args:
        path: as in `streamload.load_state_dict`, or an open checkpoint.
        nodes: the nodes in the order of the layers, each with its own budget.
        **options: see `OffloadOptions`.

    Raises:
        PlanInfeasibleError: a node has too little memory for the least that its share needs.
        CheckpointError: the checkpoint is invalid, or lacks the facts to size ``tokens``.
        UnsupportedCastError: a dtype cannot be cast or held.
        ValueError: an argument is invalid.
    """
    return split_offload_under(path, nodes, for_passes(Options.parse(options)))


def split_offload_under(
    path: CheckpointLike, nodes: Sequence[Node], options: Options
) -> OffloadSplit:
    """Plan to split a model over nodes; see `split_offload`."""
    check_nodes(nodes)
    checkpoint, read, (fill, _, tied) = read_call(path, options)
    kept = read.stay
    # nodes do not read as this machine does: assume the least memory for reading
    read = replace(read, reader="pread", page_cache="keep", threads=_THREADS)
    read = replace(read, chunk_nbytes=read.chunk_nbytes or LEAST_CHUNK_NBYTES)
    wants = wants_of(checkpoint, fill)
    check_patterns("stay", kept, wants.names)
    specs = specs_under(read, node_specs(nodes))
    problem = Problem(read, checkpoint, wants, specs[0])
    parts, placed, where = _assigned(problem, specs, tied, kept)
    numbers: dict[str, list[int]] = {spec.name: [] for spec in specs}
    for at, name in enumerate(where):
        numbers[name].append(at)
    offloads = []
    for spec in specs:
        part = parts.get(spec.name)
        mine = TensorRequests.of(checkpoint, [placed[at] for at in numbers[spec.name]])
        here, pairs = {*mine.names}, tied.items() if part is None else part.tied
        shared = {name: source for name, source in pairs if source in here and name not in here}
        own = replace(
            problem,
            wants=mine,
            spec=spec,
            has_layers=part is None or bool(part.layers),
            has_head=part is None or part.has_head,
        )
        groups = groups_of_checkpoint(mine, own.nbytes, shared, kept, checkpoint.config)
        offloads.append(replace(own, groups=groups).decide())
    return OffloadSplit(_whole(checkpoint, read, placed, where, specs, parts), tuple(offloads))


def _assigned(
    problem: Problem, specs: Sequence[DeviceSpec], tied: Mapping[str, str], stay: Sequence[str]
) -> _Assigned:
    """Assign parameters to nodes: as a load does if all shares fit, else by their least needs.

    Returns the part of each node, the placed parameters, and the node's name for each of them.
    """
    checkpoint, wants, policy = problem.checkpoint, problem.wants, problem.options.policy
    less = replace(problem, has_head=False).activation_nbytes
    logits_nbytes = problem.activation_nbytes - less
    cache, caches = problem.cache, []
    if cache is not None:
        caches = CacheRoom.of(checkpoint, wants, policy, cache, problem.spec.native_bf16).layers

    def assigned(needs: Callable[[Unit], Need] | None) -> _Assigned:
        rooms = [replace(each, budget_nbytes=max(each.budget_nbytes - less, 1)) for each in specs]
        return assign(checkpoint, wants, rooms, policy, tied, caches, needs)

    found = assigned(None)
    if all(part.fits for part in found[0].values()):
        return found
    groups = groups_of_checkpoint(wants, problem.nbytes, {}, stay, checkpoint.config)
    problem = replace(problem, groups=groups)
    less += problem.least_scratch_nbytes
    return assigned(_needs(problem, logits_nbytes))


def _needs(problem: Problem, logits_nbytes: int) -> Callable[[Unit], Need]:
    """Return a function from a unit of a split (a layer, embedding or head) to its least memory."""
    names, sizes = problem.wants.names, problem.sizes
    group_of = {names[at]: n for n, group in enumerate(problem.groups) for at in group.wants}
    resident = {
        name: problem.spec.resident(nbytes)
        for name, nbytes in zip(names, problem.nbytes, strict=True)
    }

    def needs(unit: Unit) -> Need:
        items = [item.name for item in unit.items]
        mine = [sizes[n] for n in dict.fromkeys(group_of[name] for name in items)]
        copies = [sizes[group_of[source]] for _, source in unit.tied]
        streams = [size.nbytes for size in mine if size.kind == "layer"]
        streams += [size.nbytes for size in copies]
        # a group of these may be of several units
        fixed = sum(resident[name] for name in items if sizes[group_of[name]].kind == "fixed")
        logits = logits_nbytes if unit.kind == "head" else 0
        return Need(
            fixed + unit.cache_nbytes + logits,
            max(streams, default=0),
            max((s.chosen * s.expert_nbytes for s in mine if s.kind == "experts"), default=0),
            sum(size.resident_nbytes for size in mine if size.kind == "rows"),
        )

    return needs


def _whole(
    checkpoint: Checkpoint,
    read: Options,
    wants: TensorRequests,
    where: Sequence[str],
    specs: Sequence[DeviceSpec],
    parts: Mapping[str, Part],
) -> Plan:
    """Return the plan of all parameters on their nodes, under unlimited budgets."""
    here = [want._replace(device=name) for want, name in zip(wants, where, strict=True)]
    endless = [
        replace(spec, budget_nbytes=ENDLESS_NBYTES, free_nbytes=None, reserve_nbytes=0)
        for spec in specs
    ]
    free = replace(read, cache=None, reserve_nbytes=0)
    made = plan_within(free, request_of(free, checkpoint, here, endless, engine_of(read.cast)))

    def with_part(mine: DevicePlan) -> DevicePlan:
        if (part := parts.get(mine.device)) is None:
            return mine
        layers = part.layers.start, part.layers.stop
        return replace(mine, layers=layers, embedding=part.has_embedding, head=part.has_head)

    return replace(made, devices=tuple(map(with_part, made.devices)))
