"""Ranks that meet, wait for each other, and notice who is lost."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from thread_group import ThreadGroup, World, run

from streamload.distributed.group import Alone
from streamload.distributed.heartbeat import Heartbeat
from streamload.distributed.session import PROTOCOL, Session
from streamload.errors import CheckpointError, NodeError, PeerFailedError, StreamloadError
from streamload.planning.shares import Member

PATIENT_S = 20.0  # where nobody is to be found lost
SHORT_S = 0.4  # where someone is


def meet(
    body: Callable[[Session], Any] = lambda session: session.members,
    *,
    names: tuple[str, ...] = ("board-10", "board-2", "x"),
    hosts: tuple[str, ...] | None = None,
    timeout_s: float = PATIENT_S,
) -> Callable[[ThreadGroup], Any]:
    def one(group: ThreadGroup) -> Any:
        name = names[group.rank]
        host = hosts[group.rank] if hosts else name
        with Session(group, name, host, timeout_s=timeout_s) as session:
            return body(session)

    return one


def lost_ones(found: list[Any]) -> list[tuple[str, str]]:
    assert all(type(error) is PeerFailedError for error in found), found
    return [(error.node, error.problem) for error in found]


def test_members_are_known_by_name_and_host() -> None:
    """All get the same members; ranks of one name are numbered, those of one host counted."""
    body = meet(names=("a", "b", "a"), hosts=("h", "i", "h"))
    found = run(World(3), body)
    assert found[0] == found[1] == found[2]
    assert found[0] == (
        Member(0, "a/0", "h", 0, 2),
        Member(1, "b", "i", 0, 1),
        Member(2, "a/1", "h", 1, 2),
    )


def test_a_name_that_two_ranks_end_up_with_is_refused() -> None:
    found = run(World(3), meet(names=("a", "a", "a/1")))
    assert {str(error) for error in found} == {"node a/1: is the id of 2 ranks"}
    assert all(type(error) is NodeError for error in found)


def test_names_that_differ_in_case_alone_are_refused() -> None:
    """To host names and budgets case says nothing: all say which ranks, and what to set."""
    found = run(World(3), meet(names=("Board", "x", "board")))
    assert {type(error) for error in found} == {NodeError}
    assert {error.node for error in found} == {"board (rank 2)"}
    (problem,) = {error.problem for error in found}
    assert "case alone from Board (rank 0)" in problem
    assert "STREAMLOAD_NODE_ID" in problem


@pytest.mark.parametrize("more", [[], ["something new", 3]], ids=["same length", "longer"])
def test_another_version_is_refused_by_all(more: list[object]) -> None:
    def body(group: ThreadGroup) -> Any:
        if group.rank != 1:
            return meet()(group)
        token = group.broadcast(None)
        heart = Heartbeat(group, "y", PATIENT_S, prefix=token.hex())
        heart.arrive()
        said = {"value": [PROTOCOL + 1, "y", "y", *more]}
        group.allgather(zlib.compress(json.dumps(said).encode()))
        heart.close()
        return None

    found = run(World(3), body)
    for error in (found[0], found[2]):
        assert type(error) is NodeError
        assert error.node == "y (rank 1)"
        assert f"version {PROTOCOL + 1}" in error.problem


def test_an_exchange_gives_everyones_by_rank() -> None:
    def body(session: Session) -> list[list[Any]]:
        rank = session.me.rank
        return [session.exchange("it", lambda n=n: [rank, n]) for n in range(20)]

    found = run(World(3), meet(body))
    expected = [[[rank, n] for rank in range(3)] for n in range(20)]
    assert found == [expected] * 3


def test_an_error_of_one_is_raised_by_all() -> None:
    own = CheckpointError("/m", "is not there")

    def body(session: Session) -> Any:
        def make() -> None:
            if session.me.rank == 2:
                raise own

        return session.exchange("its files", make)

    found = run(World(4), meet(body, names=("a", "b", "c", "d")))
    assert found[2] is own
    for rank in (0, 1, 3):
        assert type(found[rank]) is NodeError
        assert (found[rank].node, found[rank].problem) == ("c", "its files: /m: is not there")


def test_errors_of_several_are_told_together() -> None:
    """The first is named; a few more are told, and how many there are beside."""

    def body(session: Session) -> Any:
        def make() -> None:
            if session.me.rank:
                raise ValueError(f"no {session.me.rank}")

        return session.exchange("it", make)

    size = 6
    found = run(World(size), meet(body, names=tuple("abcdef")))
    assert [type(error) for error in found] == [NodeError, *[ValueError] * (size - 1)]
    assert str(found[0]) == (
        "node b: it: ValueError('no 1'); c: ValueError('no 2'); d: ValueError('no 3'); and 2 more"
    )


def test_what_json_does_not_have_ends_it_for_all() -> None:
    def body(session: Session) -> Any:
        return session.exchange("it", lambda: {1, 2} if session.me.rank == 1 else 0)

    found = run(World(3), meet(body))
    assert type(found[1]) is TypeError
    assert {(type(error), error.node) for error in (found[0], found[2])} == {(NodeError, "board-2")}


def test_rank_0_shares_bytes() -> None:
    data = bytes(range(256)) * 5000

    def body(session: Session) -> Any:
        got = session.share("it", lambda: data)
        assert session.share("nothing", lambda: b"") == b""

        def fail() -> bytes:
            raise StreamloadError("it broke")

        with pytest.raises(StreamloadError, match="it broke"):
            session.share("this", fail)
        return got

    assert run(World(3), meet(body)) == [data] * 3


def test_a_group_of_one() -> None:
    before = threading.active_count()
    with Session(Alone(), "me", "h", timeout_s=1) as session:
        assert threading.active_count() == before
        assert session.members == (Member(0, "me", "h", 0, 1),)
        assert session.exchange("it", lambda: 5) == [5]
        seen: list[int] = []
        session.heartbeat.on_progress = seen.append
        session.heartbeat.progress(3, 7)
        assert seen == [3]
        session.heartbeat.arrive()
        with pytest.raises(ValueError, match="mine"):
            session.exchange("it", fail_with(ValueError("mine")))


def fail_with(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def test_sessions_of_a_group_follow_each_other() -> None:
    def body(group: ThreadGroup) -> Any:
        said = []
        for n in range(3):
            try:
                with Session(group, "n", "h", timeout_s=PATIENT_S) as session:
                    if n == 1 and group.rank == 1:
                        raise ValueError("once")
                    session.heartbeat.arrive()
                    said.append(session.exchange("it", lambda n=n: n))
            except (ValueError, PeerFailedError) as error:
                said.append(type(error).__name__)
        return said

    found = run(World(3), body)
    assert [said[1] for said in found] == ["PeerFailedError", "ValueError", "PeerFailedError"]
    assert all((said[0], said[2]) == ([0] * 3, [2] * 3) for said in found)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("silent", [False, True], ids=["killed", "silent"])
def test_a_rank_that_stops_beating_is_named_by_all(lost: int, silent: bool) -> None:
    """Every survivor raises within the timeout, and names the node."""
    world = World(4, timeout_s=SHORT_S)

    def body(session: Session) -> Any:
        session.exchange("before", int)
        if session.me.rank == lost:
            world.kill(lost, silent=silent)
        session.heartbeat.arrive()
        return session.exchange("after", int)

    names = ("a", "a", "b", "c")
    found = run(world, meet(body, names=names, timeout_s=SHORT_S))
    survivors = [found[rank] for rank in range(4) if rank != lost]
    node = ("a/0", "a/1", "b")[lost]
    assert {said[0] for said in lost_ones(survivors)} == {node}


def test_a_rank_lost_inside_a_collective_is_named() -> None:
    world = World(3, timeout_s=SHORT_S)

    def watch(rank: int, operation: str) -> None:
        if rank == 2 and operation == "allgather":
            world.kill(2)

    world.watch = watch

    def body(session: Session) -> Any:
        return session.exchange("it", int)

    def one(group: ThreadGroup) -> Any:
        names = ("a", "b", "c")
        with Session(group, names[group.rank], "h", timeout_s=SHORT_S) as session:
            return body(session)

    found = run(world, one)
    assert {said[0] for said in lost_ones(found[:2])} == {"c (rank 2)"}  # not yet agreed on
    assert "collective" in str(found[0].__cause__)


def test_a_collective_that_breaks_and_nobody_is_lost() -> None:
    world = World(2, timeout_s=SHORT_S)

    def body(session: Session) -> Any:
        if session.me.rank == 0:
            world.broken = True
        error = PeerFailedError("unknown", "it broke")
        with pytest.raises(PeerFailedError) as raised, session.identified():
            raise error from OSError("why")
        assert raised.value is error
        return repr(raised.value.__cause__)

    found = run(world, meet(body, timeout_s=SHORT_S))
    assert found == ["OSError('why')"] * 2


def test_a_store_that_answers_nobody() -> None:
    world = World(3)

    def body(session: Session) -> Any:
        session.exchange("before", int)
        if session.me.rank == 0:
            world.stop_store()
        session.heartbeat.arrive()
        return session.exchange("after", int)

    found = run(world, meet(body, names=("a", "b", "c"), timeout_s=SHORT_S))
    assert [error.node for error in found[1:]] == ["a", "a"]
    assert all("has not answered" in error.problem for error in found[1:])
    assert found[0].node in ("b", "c")


def test_who_gives_up_is_named_with_its_reason() -> None:
    def body(session: Session) -> Any:
        if session.me.rank == 1:
            raise KeyboardInterrupt
        if session.me.rank == 2:
            raise ValueError("its reason")
        session.heartbeat.arrive()

    found = run(World(4), meet(body, names=("a", "b", "c", "d")))
    assert isinstance(found[1], KeyboardInterrupt)
    assert type(found[2]) in (ValueError, PeerFailedError)
    for error in (found[0], found[3]):
        assert (error.node, error.problem) in (
            ("b", "gave up: KeyboardInterrupt"),
            ("c", "gave up: ValueError: its reason"),
        )


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_leave_in_any_order(first: int) -> None:
    going = threading.Event()

    def body(session: Session) -> Any:
        session.heartbeat.arrive()
        if session.me.rank != first:
            going.wait(PATIENT_S)
        else:
            going.set()
        return "done"

    assert run(World(3), meet(body)) == ["done"] * 3


def test_a_rank_that_comes_much_later_is_waited_for() -> None:
    late = threading.Event()

    def body(session: Session) -> Any:
        if session.me.rank == 2:
            late.wait(4 * SHORT_S)
        session.heartbeat.arrive()
        return session.exchange("it", lambda: session.me.rank)

    assert run(World(3), meet(body, timeout_s=2 * SHORT_S)) == [[0, 1, 2]] * 3


def test_beats_that_are_late_are_no_alarm() -> None:
    world = World(3)
    delay = threading.Event()

    def watch(rank: int, operation: str) -> None:
        if rank == 1 and operation == "set":
            delay.wait(SHORT_S / 4)

    world.watch = watch

    def body(session: Session) -> Any:
        for _ in range(3):
            session.heartbeat.arrive()
        return "done"

    assert run(world, meet(body, timeout_s=4 * SHORT_S)) == ["done"] * 3


def test_an_observer_that_was_stopped_accuses_nobody() -> None:
    world = World(2)
    stopped = threading.Event()

    def watch(rank: int, operation: str) -> None:
        if operation == "get" and rank == 0 and not stopped.is_set():
            stopped.set()
            time.sleep(1.5 * SHORT_S)  # nobody is: the beat of rank 1 is as old when it looks

    def body(session: Session) -> Any:
        session.exchange("before", int)
        world.watch = watch
        stopped.wait(PATIENT_S)
        session.heartbeat.arrive()
        return "done"

    assert run(world, meet(body, timeout_s=4 * SHORT_S)) == ["done"] * 2


def test_a_loss_is_told_to_who_listens() -> None:
    world = World(3)

    def body(session: Session) -> Any:
        heart = session.heartbeat
        if session.me.rank == 2:
            raise ValueError("gone")
        heard: list[Any] = []
        came = threading.Event()

        def listener(error: PeerFailedError) -> None:
            heard.append(error)
            came.set()

        with heart.listening(listener):
            assert came.wait(PATIENT_S)
        with heart.listening(heard.append):
            assert len(heard) == 2
        assert heard[0] is heard[1]
        with pytest.raises(PeerFailedError) as raised:
            heart.check()
        assert raised.value is heard[0]
        return heard[0].node

    assert run(world, meet(body, names=("a", "b", "c")))[:2] == ["c", "c"]


def test_progress_is_told_on_rank_0_by_the_thread_that_loads() -> None:
    def body(session: Session) -> Any:
        heart = session.heartbeat
        told: list[tuple[int, bool]] = []
        own = threading.current_thread()
        heart.on_progress = lambda n: told.append((n, threading.current_thread() is own))
        heart.progress(10 * (session.me.rank + 1), 100)
        heart.arrive()
        return told

    found = run(World(3), meet(body))
    assert found[1:] == [[], []]
    assert found[0][-1] == (60, True)
    assert all(here for _, here in found[0])


def test_what_a_progress_function_raises_is_its_own_error() -> None:
    """It is raised where it was called; the others hear that the node gave up."""

    def body(session: Session) -> Any:
        session.heartbeat.on_progress = lambda n: fail_with(ZeroDivisionError("shown"))()
        session.heartbeat.arrive()

    found = run(World(3), meet(body, names=("a", "b", "c")))
    assert type(found[0]) is ZeroDivisionError
    assert lost_ones(found[1:]) == [("a", "gave up: ZeroDivisionError: shown")] * 2


def test_stages_take_few_calls_of_the_store() -> None:
    """A rank that waits asks less and less often, and writes only what is new."""
    calls: dict[tuple[int, str], int] = {}
    lock = threading.Lock()

    def watch(rank: int, operation: str) -> None:
        with lock:
            calls[rank, operation] = calls.get((rank, operation), 0) + 1

    world = World(5, watch=watch)

    def body(session: Session) -> Any:
        session.exchange("before", int)
        if session.me.rank == 0:
            with lock:
                calls.clear()
            time.sleep(0.5)
        session.heartbeat.arrive()

    run(world, meet(body, names=tuple("abcde")))
    waiting = [calls.get((rank, "get"), 0) for rank in range(1, 5)]
    assert max(waiting) < 60, waiting


@pytest.mark.parametrize("rank", [0, 1])
def test_closing_twice_does_nothing(rank: int) -> None:
    def body(session: Session) -> Any:
        session.heartbeat.arrive()
        if session.me.rank == rank:
            session.heartbeat.close()
            session.heartbeat.close()
        return "done"

    assert run(World(2), meet(body)) == ["done"] * 2


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_that_ends_before_the_others_is_lost(early: int) -> None:
    def body(session: Session) -> None:
        if session.group.rank != early:
            session.exchange("one more stage", lambda: None)

    found = run(World(3), meet(body))
    others = [error for rank, error in enumerate(found) if rank != early]
    assert found[early] is None
    assert {name for name, _ in lost_ones(others)} == {("board-10", "board-2", "x")[early]}
    assert all("ended before the others" in problem for _, problem in lost_ones(others))
