"""What every engine must do, run as one rank of a group: ``python nodes_body.py OUT LOSS``.

Writes ``OUT/RANK.json`` when all of it held. LOSS is how a rank is lost at the end: the last one
"away" (it does not come) or "killed", rank 0 of two "stopped" (by SIGSTOP), or "none".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamload.distributed.group import ProcessGroup
from streamload.distributed.launch import open_group
from streamload.errors import PeerFailedError

WAIT_S = 60.0
SHORT_S = 2.0


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.005)


def raised(call: Callable[[], object]) -> PeerFailedError:
    try:
        call()
    except PeerFailedError as error:
        return error
    raise AssertionError("no error")


def collectives(group: ProcessGroup) -> None:
    assert group.allgather(b"x" * group.rank) == [b"x" * rank for rank in range(group.size)]
    assert group.allgather(b"") == [b""] * group.size
    for root in (0, group.size - 1):
        for nbytes in (0, 1, 30_000_000):
            pattern = bytes([root, 255, nbytes % 251]) * (nbytes // 3 + 1)
            sent = pattern[:nbytes]
            assert group.broadcast(sent if group.rank == root else None, root) == sent
    for nbytes in (0, 1, 7, 1_000_003):
        blocks = [bytes([rank + 1]) * nbytes for rank in range(group.size)]
        out = bytearray(b"\xff" * nbytes * group.size)
        group.all_gather_into(memoryview(blocks[group.rank]), memoryview(out))
        assert out == b"".join(blocks)
        # in place: the block is a part of the output already
        out = bytearray(nbytes * group.size)
        mine = memoryview(out)[group.rank * nbytes : (group.rank + 1) * nbytes]
        mine[:] = blocks[group.rank]
        group.all_gather_into(mine, memoryview(out))
        assert out == b"".join(blocks)
    for block, whole in ((b"12", bytearray(3)), (b"12", bytes(2 * group.size))):
        try:
            group.all_gather_into(memoryview(block), memoryview(whole))
        except ValueError:
            continue
        raise AssertionError("blocks that do not fit were taken")


def store_while_a_collective_waits(group: ProcessGroup) -> None:
    """Rank 0 joins the collective only after the others' threads have used the store."""
    done = [f"done/{rank}" for rank in range(1, group.size)]

    def from_another_thread() -> None:
        group.store.set(f"here/{group.rank}", bytes(range(256)))
        until(lambda: group.store.get("go") == b"")
        group.store.set(f"done/{group.rank}", b"%d" % group.rank)

    if group.rank == 0:
        here = [f"here/{rank}" for rank in range(1, group.size)]
        until(lambda: group.store.get_many(here) == [bytes(range(256))] * len(here))
        assert group.store.get_many([*here, "go"])[-1] is None
        group.store.set("go", b"")
        until(lambda: None not in group.store.get_many(done))
        group.allgather(b"")
    else:
        thread = threading.Thread(target=from_another_thread)
        thread.start()
        group.allgather(b"")
        thread.join()
    assert group.store.get_many(done) == [b"%d" % rank for rank in range(1, group.size)]
    assert group.store.get_many([]) == []
    assert group.store.get("nobody") is None
    group.allgather(b"")
    group.store.set("go", b"again")
    assert group.store.get("go") == b"again"


def beside_torch() -> None:
    """The program's own process groups: made before and after, given, and not disturbed."""
    import torch
    import torch.distributed as dist

    def theirs(group: Any = None) -> int:
        value = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(value, group=group)
        return int(value)

    before = open_group(timeout=WAIT_S)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # srun tells torch nothing
        meeting = f"file://{sys.argv[1]}/meeting"
        dist.init_process_group("gloo", meeting, rank=before.rank, world_size=before.size)
    world, everyone = dist.get_world_size(), theirs()
    assert everyone == world * (world + 1) // 2
    after = open_group(timeout=WAIT_S)
    assert after.engine == "torch"
    part = dist.new_group([0, world - 1])
    if dist.get_rank() in (0, world - 1):
        given = open_group(part, timeout=WAIT_S)
        assert given.size == 2
        assert given.allgather(b"%d" % dist.get_rank()) == [b"0", b"%d" % (world - 1)]
        assert theirs(part) == 1 + world
        given.close()
        assert theirs(part) == 1 + world
    for group in (after, before):
        assert group.allgather(b"%d" % group.rank) == [b"%d" % rank for rank in range(world)]
        assert theirs() == everyone
        group.close()
    assert theirs() == everyone
    assert dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    again = open_group(timeout=WAIT_S)
    assert again.allgather(b"") == [b""] * world
    again.close()


def beside_mpi() -> None:
    """The program's own communicators: given, and not disturbed."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    part = world.Split(color=world.rank % 2)
    for _ in range(2):
        given = open_group(part, timeout=WAIT_S)
        assert (given.rank, given.size) == (part.rank, part.size)
        theirs = array("q", bytes(8 * part.size))
        request = part.Iallgather(array("q", [world.rank]), theirs)  # in flight while ours runs
        names = [b"%d" % rank for rank in range(world.rank % 2, world.size, 2)]
        assert given.allgather(b"%d" % world.rank) == names
        request.Wait()
        assert [b"%d" % rank for rank in theirs] == names
        given.close()
    part.Free()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped: the state behind its name, proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def loss(how: str) -> str:
    """Lose a rank; what the others' error says."""
    group = open_group(timeout=SHORT_S)
    lost = 0 if how == "stopped" else group.size - 1
    pids = [int(pid) for pid in group.allgather(b"%d" % os.getpid())]
    told = [f"told/{rank}" for rank in range(group.size) if rank != lost]
    woken = Path(sys.argv[1], "woken")
    if group.rank == lost:
        group.store.set("ready", b"")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "away":
            until(lambda: None not in group.store.get_many(told))
        else:
            until(woken.exists)
        group.close(failed=True)  # it knows, though no collective told it
        return ""
    until(lambda: group.store.get("ready") is not None)
    if how == "stopped":
        os.kill(pids[lost], signal.SIGSTOP)
        until(lambda: is_stopped(pids[lost]))
        assert "does not answer" in str(raised(lambda: group.store.get("x")))
        assert "does not answer" in str(raised(lambda: group.store.set("x", b"")))
    error = raised(lambda: group.allgather(b"x"))
    assert error.__cause__ is not None
    assert "cannot be used again" in str(raised(lambda: group.broadcast(b"x")))
    if how != "stopped":
        group.store.set(f"told/{group.rank}", b"")
    group.close()
    group.close()
    if how == "stopped":
        woken.touch()
        os.kill(pids[lost], signal.SIGCONT)
    return str(error)


def main() -> None:
    assert not {"torch", "mpi4py"} & set(sys.modules)
    out, how = sys.argv[1:]
    group = open_group(timeout=WAIT_S)
    collectives(group)
    store_while_a_collective_waits(group)
    group.close()
    group.close()
    {"torch": beside_torch, "mpi": beside_mpi}[group.engine]()
    error = "" if how == "none" else loss(how)
    held = {"engine": group.engine, "rank": group.rank, "size": group.size, "error": error}
    Path(out, f"{group.rank}.json").write_text(json.dumps(held))


main()
