"""The session of a load: ranks run its stages together; an error of one rank ends it for all."""

from __future__ import annotations

import json
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from streamload.core.bounded_json import parse_json
from streamload.distributed.group import ProcessGroup
from streamload.distributed.heartbeat import Heartbeat
from streamload.errors import NodeError, PeerFailedError, StreamloadError
from streamload.planning.shares import Member

#: The version of the messages, which all ranks must share.
PROTOCOL = 8

T = TypeVar("T")
_LISTED = 3  # failed ranks named in an error


class Session:
    """The ranks of one load: they exchange values in stages, and watch for lost ranks.

    `members`: all ranks, with unique names of their nodes.
    """

    def __init__(self, group: ProcessGroup, node: str, host: str, *, timeout_s: float) -> None:
        """Meet the other ranks; ranks with the same ``node`` get "/0", "/1" appended.

        The session does not close the group. ``timeout_s``: seconds until every rank knows a loss.
        """
        self.group = group
        self.loading = False  #: whether ranks load now: an error of one is not raised by all
        # a key of its own: the store may hold messages of an earlier session
        token = group.broadcast(secrets.token_bytes(8) if group.rank == 0 else None)
        self.heartbeat = Heartbeat(group, node, timeout_s, prefix=token.hex())
        try:
            self.members = self._meet(node, host)
        except BaseException as error:
            self._end(error)
            raise
        self.me = self.members[group.rank]
        self.heartbeat.rename([member.node for member in self.members])

    def _meet(self, node: str, host: str) -> tuple[Member, ...]:
        """Exchange names; return all ranks, or raise NodeError if versions or names conflict."""
        said = self.exchange("the greeting", lambda: [PROTOCOL, node, host])
        for other, (protocol, name, *_) in enumerate(said):  # another version may send more
            if protocol != said[0][0]:
                raise NodeError(
                    f"{name} (rank {other})",
                    f"speaks version {protocol} of streamload's protocol, and {said[0][1]} "
                    f"(rank 0) version {said[0][0]}: install the same streamload everywhere",
                )
        spelled: dict[str, tuple[int, str]] = {}
        for rank, (_, name, _) in enumerate(said):
            first, spelling = spelled.setdefault(name.casefold(), (rank, name))
            if name != spelling:
                raise NodeError(
                    f"{name} (rank {rank})",
                    f"differs in case alone from {spelling} (rank {first}), and host names that do "
                    "are one: give each node an id of its own by STREAMLOAD_NODE_ID",
                )
        names, hosts = Counter(name for _, name, _ in said), Counter(h for _, _, h in said)
        seen: Counter[str] = Counter()
        there: Counter[str] = Counter()
        members = []
        for rank, (_, name, where) in enumerate(said):
            unique = name if names[name] == 1 else f"{name}/{seen[name]}"
            members.append(Member(rank, unique, where, there[where], hosts[where]))
            seen[name] += 1
            there[where] += 1
        taken = Counter(member.node for member in members)
        for member in members:
            if taken[member.node] > 1:
                raise NodeError(member.node, f"is the id of {taken[member.node]} ranks")
        return tuple(members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """End the heartbeat; report an error to the other ranks first."""
        if error is not None:
            self.heartbeat.fail(error)
        self.heartbeat.close()

    def exchange(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Return the JSON values of ``make`` by rank; for ``what`` and errors see `stage`."""
        return self.stage(what, lambda: (None, make()))[1]

    def step(self, what: str, make: Callable[[], T]) -> T:
        """Return ``make()`` once all ranks have run it; for ``what`` and errors see `stage`."""
        return self.stage(what, lambda: (make(), None))[0]

    def stage(self, what: str, make: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Run ``make`` on all ranks; an error of one is raised by all.

        ``make`` returns a value to keep and a JSON value to exchange; returned are the first, and
        the second of all ranks. ``what`` is the subject, for errors: "its plan".
        """
        own: Exception | None = None
        try:
            kept, value = make()
            said = json.dumps({"value": value})
        except PeerFailedError:
            raise
        except Exception as error:
            own = error
            told = str(error) if isinstance(error, StreamloadError) else repr(error)
            said = json.dumps({"error": told})
        message = zlib.compress(said.encode(), 1)
        self.heartbeat.arrive()
        with self.identified():
            messages = self.group.allgather(message)
        found = [parse_json(zlib.decompress(data)) for data in messages]
        if own is not None:
            raise own
        failed = [(r, answer["error"]) for r, answer in enumerate(found) if "error" in answer]
        if failed:
            names = [peer.node for peer in self.heartbeat.peers]
            more = [f"{names[rank]}: {told}" for rank, told in failed[1:_LISTED]]
            more += [f"and {len(failed) - _LISTED} more"] if len(failed) > _LISTED else []
            rank, first = failed[0]
            raise NodeError(names[rank], f"{what}: {'; '.join([first, *more])}")
        return kept, [answer["value"] for answer in found]

    def share(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Return the bytes that ``make`` returns on rank 0; its error is raised by all ranks."""
        mine = self.step(what, lambda: make() if self.group.rank == 0 else None)
        with self.identified():
            return self.group.broadcast(mine)

    @contextmanager
    def identified(self) -> Iterator[None]:
        """Replace a PeerFailedError in this block by one that names the lost rank, if known."""
        try:
            yield
        except PeerFailedError as error:
            found = self.heartbeat.identify(error)
            if found is error:
                raise
            found.state = error.state
            for note in getattr(error, "__notes__", ()):
                found.add_note(note)
            raise found from error
