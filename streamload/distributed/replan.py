"""Loads that go on without lost ranks: what a rank holds, and how the ranks that are left regroup.

1. On PeerFailedError, each rank that is left comes to the `Meeting` of its group, and names the
   ranks that it knows to be lost. Once all others have come, or after the timeout, the first rank
   to notice decides who goes on. One key of the store holds this decision, or else the outcome of a
   load that has ended. So no two sets of ranks go on, and no rank ends a load that others repeat.
2. These ranks form a new group. If another rank is lost before that, they meet again.
3. They repeat all stages of the load, with the budgets of before. The plan lets each rank keep its
   complete parameters if it can. A rank frees the others, and reads what it lacks.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from streamload.checkpoint.open import Checkpoint
from streamload.core.bounded_json import parse_json
from streamload.core.location import Location
from streamload.core.units import format_bytes
from streamload.distributed.group import Meeting, ProcessGroup, lost
from streamload.distributed.session import Session
from streamload.errors import LoadState, NodeError, PeerFailedError, StreamloadError
from streamload.files.header import FileState
from streamload.loading.prepare import Decision, Place
from streamload.loading.report import LoadReport
from streamload.planning.moves import Move, Moves
from streamload.planning.shares import ClusterPlan

OnLoss = Literal["raise", "replan"]
T = TypeVar("T")

_LOADED = "loaded"  # the decision that nobody is to go on: the load has ended
_LOOK_S = 0.05  # between polls for other ranks
_SLACK_S = 5.0  # for a store to answer, beyond the timeout


@dataclass(slots=True)
class Held:
    """The state of a rank in a load that may be repeated without lost ranks.

    Attributes:
        on_loss: "replan" to repeat the load.
        device: the device of the first attempt; it stays.
        budget_nbytes: the budget of the first attempt; None until it is known.
        placements: the complete parameters that this rank holds, by name.
        tensors: without a model, their tensors: the ``state_dict`` of the reports.
        lost: the names of nodes lost since the last load that succeeded.
        group: the group of the next attempt; None: that of the call.
        meeting: where the ranks of the last attempt regroup; None if they cannot.
        owned: whether the group of the last attempt is the load's own, not the program's.
        noticed_s: when the first loss was known, by `time.monotonic`; 0: none was lost.
    """

    on_loss: OnLoss
    timeout: float
    device: str | None = None
    budget_nbytes: int | None = None
    placements: dict[str, Move] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    group: ProcessGroup | None = None
    meeting: Meeting | None = None
    owned: bool = True
    noticed_s: float = 0.0
    _files: dict[Location, FileState | None] = field(default_factory=dict)
    _shards: dict[str, set[Location]] = field(default_factory=dict)  # of each parameter
    _nodes: list[str] = field(default_factory=list)  # by rank there
    _named: bool = False  # whether these are the nodes' own names
    _begun: bool = False  # whether a group was ever open
    _part: int = 0  # decisions of that meeting so far: the load's end, then each recovery
    _vain: int = 0  # regroupings in a row in which no rank was lost

    @property
    def left(self) -> dict[str, Any] | None:
        """A dict for the tensors of an attempt that fails; None: they are freed."""
        return self.tensors if self.on_loss == "replan" else None

    def meets(self, meeting: Meeting) -> None:
        """Record the meeting of the first attempt, before its group opens."""
        self.meeting, self._nodes = meeting, [f"rank {rank}" for rank in range(meeting.size)]

    def met(self, group: ProcessGroup, *, owned: bool) -> str:
        """Record the group of an attempt; return the name that this node had before, or ""."""
        self.owned, self._begun = owned, True
        return self._nodes[group.rank] if self._named else ""

    def named(self, nodes: Sequence[str]) -> None:
        """Record the names of nodes, by rank; raise NodeError if a loss could not be handled."""
        self._nodes, self._named = list(nodes), True
        if self.on_loss == "replan" and self.meeting is None and len(nodes) > 1:
            raise NodeError(
                nodes[0],
                'on_loss="replan" needs torch\'s engine: under MPI the loss of a rank ends all '
                'others; write on_loss="raise", or start the ranks with torchrun',
            )

    def names(self, checkpoint: Checkpoint) -> list[str]:
        """Return the parameters held, without those of files that have changed since."""
        headers = checkpoint.headers
        changed = {p for p, s in self._files.items() if p not in headers or headers[p].state != s}
        for name in [n for n in self.placements if not changed.isdisjoint(self._shards[n])]:
            del self.placements[name]
            self.tensors.pop(name, None)
        return list(self.placements)

    def free(self, mine: Sequence[str], place: Place) -> None:
        """Free the parameters that this rank holds and that the plan gives to others."""
        here = set(mine)
        away = [name for name in self.placements if name not in here]
        for name in away:
            del self.placements[name]
            self.tensors.pop(name, None)
        for p in place.parameters if place.model is not None else ():
            names = {*p.names, *p.wrapped}
            if not names.isdisjoint(away) and names.isdisjoint(here):
                p.release()
                p.invalidate(keep=False)

    @contextmanager
    def kept(self, load: Decision) -> Iterator[None]:
        """Keep the parameters that an attempt has loaded when a rank is lost in the ``with``."""
        try:
            yield
        except PeerFailedError as error:
            loaded = set(error.state.loaded if error.state is not None else ())
            self.keep(load, [p for p in load.plan.placements if p.name in loaded])
            raise

    def keep(self, load: Decision, placements: Iterable[Move]) -> None:
        """Record complete parameters of a load."""
        checkpoint = load.call.checkpoint
        self._files |= {header.path: header.state for header in checkpoint.shards}
        for p in placements:
            self.placements[p.name] = p
            self._shards[p.name] = {checkpoint.tensors[r.tensor].shard for r in p.source}

    def whole(self, load: Decision, report: LoadReport, plan: ClusterPlan) -> LoadReport:
        """Return the report of an attempt with the parameters that were held before."""
        if self.on_loss == "raise":
            return report
        nbytes = sum(p.resident_nbytes for p in self.placements.values())
        self.keep(load, load.plan.placements)
        order = [name for name in plan.mine.parameters if name in self.placements]
        every = Moves(self.placements[name] for name in order)
        found = {**self.tensors, **report.state_dict}
        self.tensors.clear()
        self.tensors.update({name: found[name] for name in order if name in found})
        (mine,) = report.plan.devices
        sizes = ("budget_nbytes", "resident_nbytes", "peak_nbytes")
        whole = replace(mine, **{size: getattr(mine, size) + nbytes for size in sizes})
        more = {mine.device: nbytes}
        return replace(
            report,
            plan=replace(report.plan, placements=every, devices=(whole,)),
            resident_nbytes=report.resident_nbytes + nbytes,
            predicted_nbytes=_sum(report.predicted_nbytes, more),
            held_nbytes=_sum(report.held_nbytes, more),
            state_dict=self.tensors,
        )

    def story(self, plan: ClusterPlan, held: Sequence[frozenset[str]]) -> list[str]:
        """Return notes on who was lost, what moved, and the seconds; [] if no rank was lost."""
        if not self.noticed_s:
            return []
        seconds, rows, stayed = time.monotonic() - self.noticed_s, [], 0
        for share in plan.shares:
            sizes = {n: plan.placements[n].kind.nbytes for n in share.parameters}
            new = [nbytes for name, nbytes in sizes.items() if name not in held[share.rank]]
            gone = len(held[share.rank] - sizes.keys())
            stayed += sum(sizes.values()) - sum(new)
            said = f"read {len(new)} tensors ({format_bytes(sum(new))})"
            said += f" and gave {gone} away" if gone else ""
            rows += [f"{share.node} {said}"] if new or gone else []
        who = f"lost {', '.join(self.lost)}" if self.lost else "lost a connection, and no rank"
        moved = "; ".join([*rows, f"{format_bytes(stayed)} stayed where they were"])
        return [f"{who}; planned again and loaded in {seconds:.1f} s on {len(held)} ranks: {moved}"]

    # --- regrouping -------------------------------------------------------------------------------

    def commit(self) -> None:
        """End the load on all ranks alike, unless others have decided to go on without this one."""
        if self.meeting is None:
            return
        if _in_time(self.meeting.first, 0.0, f"decided/{self._part}", _LOADED) != _LOADED:
            raise lost("the others went on without this rank, which was late", self.meeting.rank)
        self._part += 1
        self._vain = 0

    def recover(self, error: PeerFailedError) -> None:
        """Regroup for the program, which may do so any number of times."""
        self.noticed_s, self._vain = 0.0, 0
        self.regroup(error)

    def regroup(self, error: PeerFailedError) -> None:
        """Form the group of the ranks that are left, or raise ``error`` with why that failed."""
        self.noticed_s = self.noticed_s or time.monotonic()
        suspect = error.rank
        try:
            while True:
                members, meeting = _in_time(self._decide, self.timeout, suspect)
                self._go_on(members, meeting)
                try:
                    self.group = _in_time(meeting.open, 4 * self.timeout, self.timeout)
                    return
                except PeerFailedError as again:
                    suspect = again.rank
        except PeerFailedError as why:
            problem = f"{error.problem}; cannot plan again without it: {why.problem}"
            refused = PeerFailedError(error.node, problem, error.rank)
            refused.state = self.state(error)
            raise refused from error

    def state(self, error: StreamloadError) -> LoadState | None:
        """Return the state of this rank's parameters after ``error``, with those held before."""
        state = error.state
        if state is None:
            return LoadState(tuple(self.placements), (), ()) if self.placements else None
        return replace(state, loaded=tuple(dict.fromkeys((*self.placements, *state.loaded))))

    def _decide(self, suspect: int | None) -> tuple[list[int], Meeting]:
        """Decide with the other ranks who goes on; return these ranks and their meeting.

        Changes nothing here: its thread may outlive `regroup`. ``suspect``: a rank that seems to be
        lost.
        """
        meeting, part = self.meeting, self._part
        assert meeting is not None
        key = f"decided/{part}"
        meeting.first(f"came/{part}/{meeting.rank}", json.dumps(suspect))
        end = time.monotonic() + self.timeout
        said: dict[int, int | None] = {}  # by rank that came, the one that seems lost to it
        decided: str | None = None
        while decided is None:
            others = [rank for rank in range(meeting.size) if rank not in said]
            keys = [f"came/{part}/{rank}" for rank in others]
            *came, decided = meeting.find([*keys, key])
            pairs = zip(others, came, strict=True)
            said |= {rank: parse_json(text) for rank, text in pairs if text is not None}
            known = len(said.keys() | {rank for rank in said.values() if rank is not None})
            if decided is None and (known == meeting.size or time.monotonic() > end):
                decided = meeting.first(key, json.dumps(sorted(said)))
            elif decided is None:
                time.sleep(_LOOK_S)
        if decided == _LOADED:
            raise lost("the others have ended this load already")
        members = parse_json(decided)
        if meeting.rank not in members:
            raise lost("the others went on without this rank, which came too late", meeting.rank)
        if not self._begun and 2 * len(members) <= meeting.size:
            raise lost(f"only {len(members)} of {meeting.size} ranks came, which is not most")
        return members, meeting.among(members)

    def _go_on(self, members: Sequence[int], meeting: Meeting) -> None:
        """Go on in ``meeting`` with ``members`` of the last one, and record the others as lost."""
        away = [node for rank, node in enumerate(self._nodes) if rank not in members]
        self._vain = 0 if away else self._vain + 1
        if self._vain > 1:
            raise lost("all ranks are there, and cannot reach each other")
        self.lost += away
        self._nodes = [self._nodes[rank] for rank in members]
        self.meeting, self._part = meeting, 0


def _sum(nbytes: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: n + more.get(name, 0) for name, n in nbytes.items()}


def _in_time(call: Callable[..., T], seconds: float, *arguments: Any) -> T:
    """Return the result of a call, or raise PeerFailedError if it takes much longer than planned.

    A store of torch lets its clients wait without end if its host is silent.
    """
    found: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call(*arguments))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="streamload-regroup", daemon=True)
    thread.start()
    thread.join(seconds + _SLACK_S)
    if errors:
        raise errors.pop()
    if not found:
        raise lost("the store in which ranks meet does not answer")
    return found.pop()


def replanned(attempt: Callable[[], T], held: Held) -> T:
    """Call ``attempt`` until it returns, without the ranks that were lost in the one before."""
    while True:
        try:
            return attempt()
        except PeerFailedError as error:
            if held.on_loss == "raise" or held.meeting is None:
                raise
            held.regroup(error)
        except StreamloadError as error:
            error.state = held.state(error)
            raise


class Recovery(Generic[T]):
    """Watches the ranks after a load, and loads again without those that are lost.

    All ranks that are left call `recover`, within the load's ``timeout`` of each other.
    """

    def __init__(
        self, again: Callable[[], T], held: Held, session: Session, stack: ExitStack
    ) -> None:
        """Watch the ranks of a session, until `close`; ``stack`` closes it and its group."""
        self._again, self._held, self._session, self._stack = again, held, session, stack
        self._meeting = held.meeting  # of the session's ranks
        # rank 0 waits in there: not when the garbage collector runs, nor at exit
        later = threading.Thread(target=stack.close, name="streamload-leave", daemon=True)
        weakref.finalize(self, later.start).atexit = False

    def check(self) -> None:
        """Raise PeerFailedError if a rank was lost since the load."""
        self._session.heartbeat.check()

    def recover(self) -> T:
        """Plan again over the ranks that are left, and load what is missing on this one.

        Returns:
            The new report, or of an offload the new handle. Parameters that this rank keeps are not
            read or compared again: they have the values that the program has given them. Parameters
            that moved to another rank raise if a model uses them. The ``state_dict`` is that of the
            first report, changed.

        Raises:
            PeerFailedError: the ranks cannot meet, or this one came too late.
            PlanInfeasibleError: the model does not fit any more; all raise it.
            StreamloadError: as the load.

        After an error all ranks that are left may call it again.
        """
        error = PeerFailedError("unknown", "the program has asked for another plan")
        try:
            self.check()
        except PeerFailedError as found:
            # after a recovery that failed, ranks have other numbers
            rank = found.rank if self._held.meeting is self._meeting else None
            error = PeerFailedError(found.node, found.problem, rank)
        self.close()
        self._held.recover(error)
        return self._again()

    def close(self) -> None:
        """Stop watching; rank 0 waits for the others to do so, for half of the timeout at most."""
        self._stack.close()
