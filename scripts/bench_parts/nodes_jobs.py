"""What a rank does in the section "nodes": one way to load, timed from when all ranks are ready."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import streamload.distributed
from streamload.bench.processes import process_memory
from streamload.distributed.gather import BLOCK_NBYTES, UNDER_WAY
from streamload.distributed.group import ProcessGroup
from streamload.distributed.launch import open_group
from streamload.files.folder import open_reader
from streamload.loading.place import open_devices


def by_layers(group: ProcessGroup, path: str, **asked: Any) -> int:
    """Whole layers to each rank."""
    report = streamload.distributed.load_state_dict(
        None, path, group=group, progress=False, **asked
    )
    return report.read_nbytes


def by_everyone(group: ProcessGroup, path: str, **asked: Any) -> int:
    """All to every rank, and each reads all by itself."""
    del asked["verify"], asked["timeout"]
    return streamload.load_state_dict(None, path, progress=False, **asked).read_nbytes


def by_broadcast(group: ProcessGroup, path: str, **asked: Any) -> int:
    """All to every rank: rank 0 reads, block by block, and the engine broadcasts."""
    checkpoint = streamload.open_checkpoint(path) if group.rank == 0 else None
    headers = [] if checkpoint is None else [(h.path, h.file_nbytes) for h in checkpoint.shards]
    lengths = json.loads(group.broadcast(json.dumps([n for _, n in headers]).encode()))
    done = 0
    for index, file_nbytes in enumerate(lengths):
        whole = memoryview(bytearray(file_nbytes))
        reader = open_reader(*headers[index]) if headers else None
        for start in range(0, file_nbytes, BLOCK_NBYTES):
            block = whole[start : start + BLOCK_NBYTES]
            if reader is not None:
                reader.read_into(start, block)
            block[:] = group.broadcast(bytes(block) if reader is not None else None)
        if reader is not None:
            reader.close()
        done += file_nbytes
    return done


def by_exchange(group: ProcessGroup, path: str, nbytes: int) -> int:
    """A model's bytes, in whole blocks, from everyone to everyone, out of and into one memory."""
    part = BLOCK_NBYTES // group.size
    rooms = [memoryview(bytearray(part * group.size)) for _ in range(UNDER_WAY + 1)]
    waits: deque[Callable[[], None]] = deque()
    for index in range(nbytes // (part * group.size)):
        if len(waits) == UNDER_WAY:
            waits.popleft()()
        room = rooms[index % len(rooms)]
        mine = room[group.rank * part : (group.rank + 1) * part]
        waits.append(group.all_gather_begin(mine, room))
    for wait in waits:
        wait()
    return 0


WAYS: dict[str, Callable[..., int]] = {
    "layers": by_layers,
    "replicate": partial(by_layers, split="replicate"),  # all to every rank, read once by all
    "every rank reads all": by_everyone,
    "rank 0 broadcasts": by_broadcast,
    "exchange alone": by_exchange,
    "nothing": lambda group, path: 0,  # meet, and part: what an engine takes
}


def rank(way: str, begun: float, path: str = "", **asked: Any) -> Callable[[], dict[str, Any]]:
    """Meet the others, and load in a lap, one of `WAYS`; all began at ``begun`` (`time.time`)."""
    if "device" in asked:  # a program that runs a model has imported its framework
        open_devices(asked["device"], None, {})
    group = open_group(None, 120.0)
    group.allgather(b"")
    ready_s = time.time() - begun
    before = process_memory(os.getpid()).anon_nbytes

    def lap() -> dict[str, Any]:
        start = time.perf_counter()
        read_nbytes = WAYS[way](group, path, **asked)
        said = {
            "rank": group.rank,
            "engine": group.engine,
            "ready_s": ready_s,
            "ready_nbytes": before,
            "seconds": time.perf_counter() - start,
            "read_nbytes": read_nbytes,
        }
        group.allgather(b"")  # the first rank that is done takes no time or store from the others
        group.close()
        return said

    return lap
