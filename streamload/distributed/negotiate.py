"""Agree on one plan for all ranks: the stages INDEX, OFFER and PLAN of `streamload.distributed`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.dtypes import BY_NAME
from streamload.core.memory import MIN_HOST_NBYTES, STAGING, Budget, available_cpus
from streamload.core.units import format_bytes
from streamload.devices.base import Parameter
from streamload.devices.names import (
    default_framework,
    framework,
    framework_of,
    spelled_as,
    split_name,
)
from streamload.distributed.gather import BLOCK_NBYTES, BLOCKS, LEAST_BLOCK_NBYTES, held_nbytes
from streamload.distributed.index import SAMPLED, Index, check_present, write_index
from streamload.distributed.offload_split import split_offload_under
from streamload.distributed.replan import Held, OnLoss
from streamload.distributed.session import Session
from streamload.distributed.tensor_split import styles_of
from streamload.errors import (
    Fit,
    NodeError,
    PlanInfeasibleError,
    PlanMismatchError,
    StateDictMismatchError,
    StreamloadError,
    Suggestion,
)
from streamload.files.folder import is_slow, locate
from streamload.files.hub import HubFile, file_of
from streamload.loading.load import as_model_reads, of_one_dtype, split_under
from streamload.loading.options import Options
from streamload.loading.prepare import Call, Decision, Place
from streamload.offloading.offload import Prepared
from streamload.planning.dequantize import as_in_models, dequantized, in_order_of
from streamload.planning.dequantize import asked as weights_asked
from streamload.planning.match import whole_shape
from streamload.planning.moves import TensorRequests
from streamload.planning.partition import Node, ordered
from streamload.planning.plan import Plan
from streamload.planning.quant_policy import QuantPolicy
from streamload.planning.shares import (
    LOCAL_LAYERS,
    ClusterPlan,
    LayerNumbers,
    Member,
    Mesh,
    Split,
    make_shares,
)
from streamload.planning.sources import Found, Source, named_by_user, parameters_of
from streamload.planning.suggest import Wanted

_Suggest = Callable[[], Sequence[Suggestion]]
_REPLANS = 3  # most further plans, if one does not fit with a node's auxiliary memory


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a call on this rank; path, budget and device may differ by rank."""

    path: str | os.PathLike[str]
    options: Options
    split: Split
    verify: str = "crc32"
    layers: LayerNumbers | None = None
    offload: bool = False  # whether a rank may stream its share
    on_loss: OnLoss = "raise"

    def __post_init__(self) -> None:
        """Raise ValueError if arguments exclude each other or have a wrong type."""
        if self.layers is not None and not callable(self.layers):
            raise ValueError(f"layers is a function of the part, such as {LOCAL_LAYERS}")
        is_mesh = isinstance(self.split, str) and self.split[:1].isdigit()
        if self.layers is not None and self.split != "layers" and not is_mesh:
            raise ValueError(
                'layers= needs split="layers" or a mesh: only then a part has some of the layers'
            )
        if self.options.cache is not None and self.split not in ("layers", "replicate"):
            raise ValueError('context= needs split="layers" or "replicate": caches are of layers')
        if self.options.quant and (is_mesh or self.split == "tensor"):
            raise ValueError('quant= quantizes whole weights: write split="layers"')
        if self.on_loss not in ("raise", "replan"):
            raise ValueError(f"on_loss is raise or replan, not {self.on_loss!r}")
        if self.on_loss == "replan" and (is_mesh or self.split == "tensor"):
            raise ValueError(
                f'on_loss="replan" keeps whole tensors, and split="{self.split}" cuts them: with '
                'fewer ranks every slice is another; write on_loss="raise", and load again'
            )
        if self.on_loss == "replan" and (self.layers is not None or self.options.quant):
            raise ValueError(
                'on_loss="replan" needs the names and values of the checkpoint: leave out layers= '
                "and quant="
            )
        if not isinstance(self.path, (str, os.PathLike)):
            raise ValueError(
                f"expected the path of a checkpoint, not {type(self.path).__name__}: each rank "
                "finds its files by it"
            )
        device = self.options.device
        if device is not None and not isinstance(device, str):
            raise ValueError(f"a rank loads to one device, not {device!r}: start a rank for each")

    @property
    def device(self) -> str | None:
        """The device of this rank."""
        return self.options.device if isinstance(self.options.device, str) else None

    @property
    def terms(self) -> dict[str, str]:
        """Arguments that all ranks must agree on and the plan's digest lacks, as text by name."""
        rules = {p: dtype.name if dtype else "checkpoint" for p, dtype in self.options.policy.rules}
        dtype: object = rules or None
        if rules.keys() == {"*"}:
            dtype = rules["*"]
        terms = {
            "dtype": dtype,
            "out_of_range": self.options.out_of_range,
            "context": self.options.cache,
            "split": self.split if isinstance(self.split, str) else "a function",
            "verify": self.verify,
            "strict": self.options.strict,
            "shapes": self.options.shapes,
            "on_loss": self.on_loss,
            "offload": self.offload,
            "tokens": self.options.tokens,
            "stay": self.options.stay,
        }
        return {name: repr(value) for name, value in terms.items()}


class Agreement:
    """The plan that all ranks have agreed on, and this rank's part of it.

    Attributes:
        index: the checkpoint, as rank 0 described it.
        place: the model and the device of this rank; None if no device was opened.
        options: the options of the call, with this rank's share of its host's memory and CPUs.
        exchanges: whether ranks read together what several need: under "replicate", and of slices
            if the files of a rank are far away.
        block_nbytes: most bytes of a file exchanged at once.
        names: names of parameters in the plan that this rank loads, by their names in its model.
        held: the parameters that this rank held before, in a load that lost a rank.
        everywhere: names of parameters that all ranks held before.
    """

    def __init__(self, session: Session, asked: Asked, model: Any, held: Held) -> None:
        """Exchange headers, budgets and plans with the other ranks; all construct it together."""
        self.session, self.asked, self.held = session, asked, held
        self.place: Place | None = None
        mesh = session.step("its split", lambda: Mesh.of(asked.split, session.group.size))

        def in_order(made: Checkpoint) -> Checkpoint:
            if model is None:
                return as_in_models(made)
            fills = parameters_of(asked.options.mapping, asked.options.rename, made.tensors)
            owner = framework(framework_of(model) or default_framework())
            return in_order_of(made, owner.parameters(model), fills)

        def write() -> bytes:
            """Return rank 0's message: a line of JSON with what it decides, and the index.

            "dequantized": weights; "file": the commit if it is a repository's; "styles":
            transformers' plan for tensor parallelism if tensors are split; "in_order": whether a
            Conv1D's weights are in the order of models; "alike": the dtype of
            `DTypePolicy.alike`, or None.
            """
            there = locate(asked.path).found
            found = open_checkpoint(there)
            # rank 0 decides for all; plans are compared later
            blocks = model is not None  # a model has floats, unless a dtype is given
            weights = weights_asked(found, asked.options.policy, blocks=blocks)
            styles = {} if mesh is None else styles_of(found.config)
            made = dequantized(found, weights)
            alike = of_one_dtype(model, made, asked.options.policy).alike
            decided = {
                "dequantized": weights,
                "file": file_of(there),
                "styles": styles,
                "in_order": in_order(made) is not made,
                "alike": alike and alike.name,
            }
            return json.dumps(decided).encode() + b"\n" + write_index(found, session.me.host)

        line, _, data = session.share("the checkpoint", write).partition(b"\n")
        decided: dict[str, Any] = json.loads(line)

        def check() -> tuple[tuple[Index, list[str]], bool]:
            """Return the index and missing files, and whether files were compared only in parts."""
            file = decided["file"]
            pinned = HubFile(*file) if file else None  # all ranks read one commit
            index = Index.read(data, locate(asked.path, pinned))
            missing = index.check()
            made = dequantized(index.checkpoint, decided["dequantized"])
            made = as_in_models(made) if decided["in_order"] else made
            return (replace(index, checkpoint=made), missing), index.is_sampled(session.me.host)

        (self.index, self._missing), sampled = session.stage("its files", check)
        self.mesh = mesh and replace(mesh, styles=decided["styles"])
        alike = BY_NAME[decided["alike"]] if decided["alike"] else None
        policy = replace(asked.options.policy, alike=alike)
        self.asked = asked = replace(asked, options=replace(asked.options, policy=policy))
        nodes = [member.node for member in session.members if sampled[member.rank]]
        self.notes = (f"{', '.join(nodes)}: {SAMPLED}",) if nodes else ()
        slow = any(map(is_slow, (header.path for header in self.index.checkpoint.shards)))
        names = held.names(self.index.checkpoint) if not asked.offload else []
        known = {"terms": asked.terms, "slow": slow, "held": names}
        offers = session.exchange("its device", lambda: self._offer(model) | known)
        self._check_offers(offers)
        self._offered = tuple(offered["budget"] for offered in offers)  # in bytes, by rank
        held.budget_nbytes = self._offered[session.me.rank]
        self.each_held = [frozenset(offered["held"]) for offered in offers]
        self.everywhere = frozenset.intersection(*self.each_held)
        shared = asked.split == "replicate" or (
            self.mesh is not None and self.mesh.size > 1 and any(o["slow"] for o in offers)
        )
        self.exchanges = shared and session.group.size > 1
        room = min(offered["room"] for offered in offers)
        self.block_nbytes = min(max(room // BLOCKS, LEAST_BLOCK_NBYTES), BLOCK_NBYTES)
        self.plan = self._planned(self._offered)
        self.names: Mapping[str, str] = {}
        self._host_held_nbytes = 0  # for blocks that ranks exchange
        self.options = session.step("its options", self._mine)

    def _offer(self, model: Any) -> dict[str, Any]:
        """Return this rank's "budget", its "room" (memory for exchanged blocks), and its "bf16".

        Both sizes are in bytes. "bf16": whether its device computes in bfloat16; None if no dtype
        depends on that.
        """
        options, name = self.asked.options, self.asked.device or "device"
        checkpoint, sharing = self.index.checkpoint, self.session.me.local_size
        # blocks are part of a stated host budget; else they add about 32 MiB a host to the staging
        room = BLOCKS * BLOCK_NBYTES // sharing
        if options.budget.host_stated:
            room = options.budget.host_nbytes // sharing - MIN_HOST_NBYTES
        undecided = TensorRequests.every(checkpoint).needs_native_bf16(options.policy)
        before = self.held.budget_nbytes
        if model is None and not undecided and options.budget.is_stated(name):
            nbytes = options.budget.resolve(name, None) - options.reserve_nbytes
            return {"room": room, "budget": before or max(nbytes, 0), "bf16": None}
        self.place = self._look(model, options)
        (spec,) = self.place.specs(options, undecided)
        nbytes, reserved = spec.budget_nbytes, options.reserve_nbytes
        if not options.budget.is_stated(spec.name) and spec.info.shared_memory:
            # all ranks of this host see the same free memory
            nbytes = max((nbytes + reserved) // sharing - reserved, 0)
        native = spec.native_bf16 if undecided else None
        return {"room": room, "budget": before or nbytes, "bf16": native}

    def _look(self, model: Any, options: Options) -> Place:
        """Open this rank's device, which must be one, and list the model's parameters."""
        place = Place.look(model, self.index.checkpoint, options)
        if len(place.devices.opened) != 1:
            raise ValueError(
                f"a rank loads to one device, not {len(place.devices.opened)}: start a rank for "
                "each"
            )
        return place

    def _check_offers(self, offers: Sequence[Mapping[str, Any]]) -> None:
        """Raise PlanMismatchError if ranks' arguments, or dtypes that devices choose, differ."""
        members, first = self.session.members, offers[0]
        here, wanted = members[0].node, first["terms"]
        for member in members:
            terms = offers[member.rank]["terms"]
            for name in (name for name in terms if terms[name] != wanted[name]):
                raise PlanMismatchError(
                    member.node,
                    f"was asked for {name}={terms[name]}, and {here} for {name}={wanted[name]}: "
                    "ask for the same on every rank",
                )
        runs = {True: "computes in bfloat16", False: "has no bfloat16", None: "was not asked"}
        for member in members:
            native = offers[member.rank]["bf16"]
            if native != first["bf16"]:
                raise PlanMismatchError(
                    member.node,
                    f"{runs[native]}, and {here} {runs[first['bf16']]}: pass the dtype that all "
                    "should have",
                )

    def _mine(self) -> Options:
        """Return the options with this rank's share of its host's memory and CPUs."""
        options, session = self.asked.options, self.session
        sharing = session.me.local_size
        opened = self.place.devices.opened if self.place is not None else {}
        infos = [device.info for device in opened.values()]
        stated = options.budget.host_stated
        staging, held = options.budget.host_nbytes // sharing, 0
        nbytes = max(self._offered[session.me.rank] + options.reserve_nbytes, 1)
        reader, reserve_nbytes = options.reader, options.reserve_nbytes
        if self.exchanges:
            if reader in ("mmap", "direct"):
                raise ValueError(
                    f'split="{self.asked.split}" reads files by pread, for all ranks together, and '
                    f'not with reader="{reader}"'
                )
            if options.page_cache == "drop":
                raise ValueError(
                    f'split="{self.asked.split}" leaves the page cache: page_cache="drop" is not'
                )
            reader = "pread"  # bytes to exchange are read into memory
            held = held_nbytes(self.index.checkpoint, session.group.size, self.block_nbytes)
            if any(info.shared_memory for info in infos):
                reserve_nbytes += held
        self._host_held_nbytes = held
        needed = MIN_HOST_NBYTES + held
        if stated and staging < needed and not all(info.host_visible for info in infos):
            raise PlanInfeasibleError(
                STAGING,
                needed,
                staging,
                limit=f"host budget of each of {sharing} ranks" if sharing > 1 else "host budget",
                would_fit=[options.budget.with_host(needed * sharing)],
            )
        staging = max(staging - held if stated else staging, MIN_HOST_NBYTES)
        return replace(
            options,
            budget=Budget(dict.fromkeys(opened, nbytes) or nbytes, host=staging),
            reader=reader,
            reserve_nbytes=reserve_nbytes,
            rank_cpus=max(available_cpus() // sharing, 1),
        )

    def _planned(self, budgets: Sequence[int]) -> ClusterPlan:
        """Return the plan for budgets in bytes by rank; PlanMismatchError if ranks disagree."""
        session, asked, checkpoint = self.session, self.asked, self.index.checkpoint
        members = [m._replace(held=self.each_held[m.rank]) for m in session.members]
        passes: dict[str, int] = {}

        def planned(nodes: Sequence[Node]) -> Plan:
            if not asked.offload:
                return split_under(checkpoint, nodes, self._shared)
            found = split_offload_under(checkpoint, nodes, self._shared)
            passes.update(found.pass_nbytes)
            return found.plan

        def plan() -> tuple[ClusterPlan | StreamloadError, str]:
            try:
                rank, fits = session.me.rank, not asked.offload
                wanted = self.mesh or asked.split
                found = make_shares(
                    rank, members, budgets, wanted, planned, checkpoint, fits=fits
                ).with_passes(passes)
            except (PlanInfeasibleError, NodeError) as error:  # of all ranks, if arguments agree
                return error, str(error)
            return found, found.digest

        made, plans = session.stage("its plan", plan)
        for member in members:
            if plans[member.rank] != plans[0]:
                raise PlanMismatchError(
                    member.node,
                    f"planned another split than {members[0].node}: rename, mapping, and the "
                    "function of a split must give the same on every rank; if each rank's model "
                    f"numbers its own layers, write {LOCAL_LAYERS}",
                )
        if isinstance(made, StreamloadError):
            raise self._or_offload(made)
        return made

    @property
    def source_nbytes(self) -> int:
        """File bytes of the parameters that all ranks are to load."""
        kept = [
            self.plan.placements[name].kind.src_nbytes
            for share in self.plan.shares
            for name in self.each_held[share.rank].intersection(share.parameters)
        ]
        return sum(share.source_nbytes for share in self.plan.shares) - sum(kept)

    @property
    def _shared(self) -> Options:
        """The options of the call that all ranks have, and that determine a plan for nodes."""
        mine = self.asked.options
        return replace(
            Options.parse(),
            policy=mine.policy,
            quant=mine.quant,
            out_of_range=mine.out_of_range,
            rename=mine.rename,
            mapping=mine.mapping,
            cache=mine.cache,
            tokens=mine.tokens,
            stay=mine.stay,
        )

    def _or_offload(self, error: StreamloadError) -> StreamloadError:
        """Return an error of a load; if `offload` would fit, the error then suggests it."""
        asked, members = self.asked, self.session.members
        layers = asked.split == "layers" and not asked.offload and not asked.options.quant
        if not isinstance(error, PlanInfeasibleError) or not layers:
            return error
        try:
            nodes = ordered(Node(m.node, self._offered[m.rank]) for m in members)
            found = split_offload_under(self.index.checkpoint, nodes, self._shared)
        except (StreamloadError, ValueError):  # it would not, either
            return error
        read = format_bytes(max(found.pass_nbytes.values()))
        needs = f"a pass reads at most {read} on a node"
        return error.suggesting([Fit("streamload.distributed.offload", "", needs)])

    def prepare(self) -> Decision:
        """Return the plan of this rank's own load; all ranks call it together.

        Only the rank knows the auxiliary memory of a load (scratch, the allocator's rounding). If
        that does not fit, all plan again with that node's budget reduced by the difference.
        """

        def prepare(last: bool) -> tuple[Decision | None, int]:
            """Return this rank's load and 0; if too large, None and the lacking bytes."""
            place = self.place or self._look(None, self.options)
            self.held.free(self.plan.mine.parameters, place)
            try:
                own, part, options, fill, suggest = self._own(place)
                call = Call(part, options, Found(fill))
                load = Decision.make(own, call, own.match(call, suggest), ())
            except PlanInfeasibleError as error:
                if last or error.device not in place.devices.opened:
                    raise self._or_offload(error) from None
                return None, error.needed_nbytes - error.budget_nbytes
            return load, 0

        moves = self.asked.split in ("layers", "balanced") or (self.mesh and self.mesh.groups > 1)
        again = _REPLANS if moves else 0
        budgets = self._offered
        for left in range(again, -1, -1):
            load, short = self.session.stage("its part", partial(prepare, not left))
            if load is not None and not any(short):
                break
            share = {s.rank: s.nbytes for s in self.plan.shares}
            budgets = tuple(
                max(min(budget, share[rank]) - by, 1) if by else budget
                for rank, (budget, by) in enumerate(zip(budgets, short, strict=True))
            )
            try:
                self.plan = self._planned(budgets)
            except PlanInfeasibleError as error:
                members = self.session.members
                rank = next((m.rank for m in members if m.node == error.device), None)
                if rank is None:
                    raise
                offered = self._offered[rank]
                needed = error.needed_nbytes + offered - budgets[rank]  # with auxiliary memory
                whole = replace(error, needed_nbytes=needed, budget_nbytes=offered)
                raise replace(whole, limit="budget", reason="") from None
        assert load is not None
        return load

    def prepare_offload(self) -> tuple[Prepared, int]:
        """Return this rank's planned offload, and the file bytes that all ranks load first."""

        def prepare() -> tuple[Prepared, int]:
            place = self.place or self._look(None, self.options)
            self.held.free(self.plan.mine.parameters, place)
            own, part, options, fill, suggest = self._own(place)
            found = Prepared.make(
                own, part, options, Found(fill), suggest=suggest, part=self.plan.mine
            )
            return found, found.load.read_nbytes

        found, nbytes = self.session.stage("its part", prepare)
        return found, sum(nbytes)

    def _own(
        self, place: Place
    ) -> tuple[Place, Checkpoint, Options, Mapping[str, Source], _Suggest]:
        """Return model, checkpoint, options and sources, cut to this rank's share.

        And a function that lists suggestions if names of the model do not match.
        """
        plan, whole, options = self.plan, self.index.checkpoint, self.options
        mine, of_model = plan.mine, self.asked.layers
        kept = {} if self.asked.offload else self.held.placements
        self.names = {name: name for name in mine.parameters if name not in kept}
        if kept:
            nbytes = self.held.budget_nbytes or 0
            nbytes += options.reserve_nbytes - sum(p.resident_nbytes for p in kept.values())
            budgets = dict.fromkeys(place.devices.opened, max(nbytes, 1))
            options = replace(options, budget=Budget(budgets, host=options.budget.host_nbytes))
        if of_model is not None:
            self.names = plan.renumbered(mine, list(of_model(mine)))
        planned = plan.sources(mine, whole)
        fill = {new: planned[name] for new, name in self.names.items() if name in planned}
        wanted = {r.tensor for source in fill.values() for r in source.rows}
        tensors = {name: info for name, info in whole.tensors.items() if name in wanted}
        shards = {info.shard for info in tensors.values()}
        part = replace(
            whole,
            shards=tuple(header for header in whole.shards if header.path in shards),
            tensors=MappingProxyType(tensors),
        )
        check_present(part, self._missing)
        options = replace(options, quant=QuantPolicy.of_plan(plan.placements.values()))
        others = plan.placements.keys() - self.names.keys()
        if of_model is not None:  # the model has no layers of others
            others -= {item.name for unit in plan.layers() for item in unit.items}
        parameters = [
            p
            for p in place.parameters
            for names in [(*p.names, *p.wrapped)]
            if others.isdisjoint(names) or not self.names.keys().isdisjoint(names)
        ]
        if plan.split == "layers" and not plan.mine.layers:
            # names without layers: no cache
            options = replace(options, cache=None)
        names = options.mapping, options.rename
        asked = Wanted(whole, place.parameters, *names, is_part=True)
        own = replace(place, parameters=parameters, host_held_nbytes=self._host_held_nbytes)
        explicit = named_by_user(*names)
        if place.owner is not None and (read := as_model_reads(place.model, part, fill, explicit)):
            problems = [
                f"{fill[old].rows[0].tensor}: the model's own code renames it: write rename="
                for old in fill.keys() - read.keys()
            ]
            if problems:
                raise StateDictMismatchError(part.path, problems=sorted(problems))

        def suggest() -> tuple[Suggestion, ...]:
            found = (*self._local_layers(place.parameters), *self._of_slices(place.parameters))
            return (*found, *asked.suggestions())

        return own, part, options, fill, suggest

    def _of_slices(self, parameters: Sequence[Parameter]) -> Iterator[Suggestion]:
        """Suggest modules for slices, if parameters have the shapes of whole tensors."""
        plan, sliced = self.plan, self.plan.slices(self.plan.mine)
        whole = [
            p
            for p in parameters
            for name in map(self.names.get, (*p.names, *p.wrapped))
            if name in sliced and whole_shape(p) == plan.placements[name].kind.shape
        ]
        write = "modules for slices, of the shapes found: see plan().slices"
        if any(p.block is not None for p in whole):
            write = "streamload.load_state_dict, which loads the shards of DTensors"
        if whole:
            yield Suggestion(write, len(parameters), len(parameters))

    def _local_layers(self, parameters: Sequence[Parameter]) -> Iterator[Suggestion]:
        """Suggest ``layers=`` if more parameters match with layers numbered from 0 on each rank."""
        plan, mine = self.plan, self.plan.mine
        if self.asked.layers is not None or not mine.layers:
            return
        needed = [{*p.names, *p.wrapped} for p in parameters if not p.is_computed()]
        local = plan.renumbered(mine, range(len(mine.layers)))
        now, then = (
            sum(not names.isdisjoint(there) for names in needed)
            for there in (set(mine.parameters), local.keys())
        )
        if then > now:
            yield Suggestion(LOCAL_LAYERS, then, len(needed))


def own_device(device: str | None, me: Member) -> str | None:
    """Return a device of torch with the number of this rank on its host ("cuda" as "cuda:1").

    Return other devices unchanged: of another framework, with a number, or too few for all ranks.
    """
    if not isinstance(device, str) or me.local_size == 1:
        return device
    named, name = split_name(device)
    if not name or ":" in name or (named or spelled_as(name)) != "torch":
        return device
    known = framework("torch").candidates()
    alike = [other for other in known if other.partition(":")[0] == name.lower()]
    return alike[me.local_rank] if len(alike) >= me.local_size else device
