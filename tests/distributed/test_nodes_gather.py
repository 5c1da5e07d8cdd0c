"""Replicated bytes: each rank reads a part of every block, and all have all of it."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors_files import write_safetensors
from thread_group import ThreadGroup, World, run

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.tensors import Region, RowRange
from streamload.distributed.gather import (
    BLOCK_NBYTES,
    BLOCKS,
    CollectiveReader,
    Ranges,
    held_nbytes,
    shared_ranges,
)
from streamload.errors import CheckpointError, PeerFailedError
from streamload.loading.load import plan

BLOCK = 64


def write(folder: Path, sizes: Sequence[Sequence[int]], seed: int = 0) -> Checkpoint:
    generator = random.Random(seed)
    for shard, lengths in enumerate(sizes):
        name = f"model-{shard + 1:05}-of-{len(sizes):05}.safetensors"
        tensors = {
            f"{shard}.{at:04}": ("U8", (nbytes,), generator.randbytes(nbytes))
            for at, nbytes in enumerate(lengths)
        }
        write_safetensors(folder / name, tensors)
    return open_checkpoint(folder)


def ranges_of(checkpoint: Checkpoint, names: Sequence[str] | None = None) -> dict[Any, Ranges]:
    """Where these tensors lie, or all."""
    wanted = checkpoint.tensors.keys() if names is None else set(names)
    placements = [p for p in plan(checkpoint, budget="1TB", dtype="checkpoint").placements]
    return dict(shared_ranges(checkpoint, [p for p in placements if p.name in wanted]))


def gatherer(
    group: ThreadGroup, checkpoint: Checkpoint, mine: Mapping[Any, Ranges] | None = None
) -> CollectiveReader:
    """All tensors are shared; this rank takes these."""
    shared = ranges_of(checkpoint)
    kinds = {header.path: "pread" for header in checkpoint.shards}
    own = lines_of(shared if mine is None else mine)
    return CollectiveReader(group, checkpoint, shared, own, kinds, BLOCK)


def lines_of(ranges: Mapping[Any, Ranges]) -> dict[Any, list[Region]]:
    """The same bytes, of which a rank needs all."""
    return {
        shard: [Region(start, stop - start) for start, stop in each]
        for shard, each in ranges.items()
    }


def take_all(
    held: CollectiveReader, checkpoint: Checkpoint, names: Sequence[str], *, threads: int, unit: int
) -> dict[str, bytes]:
    """Read tensors as a load does: front to back, by workers that each take the next unit."""
    out = {name: bytearray(checkpoint.tensors[name].nbytes) for name in names}
    work: queue.SimpleQueue[tuple[Any, int, memoryview]] = queue.SimpleQueue()
    failed: list[BaseException] = []
    readers = {header.path: held.open(header, "pread") for header in checkpoint.shards}
    for name in names:
        info = checkpoint.tensors[name]
        for at in range(0, info.nbytes, unit):
            part = memoryview(out[name])[at : at + unit]
            work.put((readers[info.shard], info.start + at, part))

    def worker() -> None:
        try:
            while True:
                reader, start, part = work.get_nowait()
                reader.read_into(start, part)
        except queue.Empty:
            return
        except BaseException as error:
            failed.append(error)
            held.stop()

    workers = [threading.Thread(target=worker) for _ in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    for reader in readers.values():
        reader.close()
    if failed:
        raise failed[0]
    return {name: bytes(data) for name, data in out.items()}


def expected(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, bytes]:
    """The same bytes, read from the file."""
    out = {}
    for name in names:
        info = checkpoint.tensors[name]
        out[name] = info.shard.read_bytes()[info.start : info.stop]
    return out


EDGES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1]


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("nbytes", EDGES)
def test_edges_of_blocks(nbytes: int, size: int, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, [[nbytes]])
    names = list(checkpoint.tensors)

    def body(group: ThreadGroup) -> dict[str, bytes]:
        with gatherer(group, checkpoint) as held:
            out = take_all(held, checkpoint, names, threads=1, unit=1 + nbytes // 2)
            assert held.wait(10)
            return out

    assert run(World(size), body) == [expected(checkpoint, names)] * size


@pytest.mark.parametrize("seed", range(6))
def test_many_tensors_and_workers(seed: int, tmp_path: Path) -> None:
    generator = random.Random(seed)
    sizes = [
        [generator.choice([0, 1, 3, 50, *EDGES]) for _ in range(generator.randrange(1, 12))]
        for _ in range(generator.randrange(1, 4))
    ]
    checkpoint = write(tmp_path, sizes, seed)
    size = generator.choice([2, 3, 5])
    every = list(checkpoint.tensors)
    wanted = [[n for n in every if generator.random() < rank / 2] for rank in range(size)]
    threads, unit = generator.choice([1, 2, 4]), generator.choice([7, BLOCK, 5 * BLOCK])

    def body(group: ThreadGroup) -> dict[str, bytes]:
        names = wanted[group.rank]
        with gatherer(group, checkpoint, ranges_of(checkpoint, names)) as held:
            out = take_all(held, checkpoint, names, threads=threads, unit=unit)
            while not held.wait(0.05):
                pass
            return out

    assert run(World(size), body) == [expected(checkpoint, names) for names in wanted]


def test_what_is_not_whole_is_read_where_it_lies(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "a": ("U8", (4, 2), b"abcdefgh"),
            "b": ("U8", (4, 2), b"ijklmnop"),
            "c": ("U8", (2, 2), b"qrst"),
            "d": ("U8", (), b"u"),
            "e": ("U8", (0, 3), b""),
        },
    )
    checkpoint = open_checkpoint(tmp_path)
    made = plan(
        checkpoint,
        budget="1GB",
        dtype="checkpoint",
        mapping={
            "rows": RowRange("a", 0, 2),
            "others": RowRange("a", 2, 4),
            "joined": ["b", "c"],
            "whole": "d",
            "empty": "e",
        },
    )
    info = checkpoint.tensors["d"]
    found = shared_ranges(checkpoint, made.placements)
    assert found == {checkpoint.shards[0].path: [(info.start, info.stop)]}


def test_bytes_of_lines() -> None:
    """How many bytes of equidistant lines are before a place in the file: by counting."""
    chance = random.Random(1)
    for _ in range(200):
        nbytes, lines = chance.randrange(1, 9), chance.randrange(1, 9)
        one = Region(chance.randrange(20), nbytes, lines, nbytes + chance.randrange(9))
        taken = {one.start + line * one.pitch + at for line in range(lines) for at in range(nbytes)}
        for at in range(200):
            assert one.before(at) == sum(each < at for each in taken), (one, at)


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_rank_that_cannot_read(wrong: int, tmp_path: Path) -> None:
    size = 3
    folders = [tmp_path / str(rank) for rank in range(size)]
    checkpoints = [write(folder, [[BLOCK * 20]]) for folder in folders]
    file = checkpoints[wrong].shards[0].path
    with file.open("r+b") as shrunk:
        shrunk.truncate(checkpoints[wrong].shards[0].data_start + BLOCK * 10)
    world = World(size, timeout_s=5)
    helds: list[CollectiveReader] = []
    raised = threading.Event()

    def body(group: ThreadGroup) -> Any:
        mine = checkpoints[group.rank]
        with gatherer(group, mine) as held:
            helds.append(held)
            try:
                take_all(held, mine, list(mine.tensors), threads=2, unit=BLOCK)
            except BaseException:
                if group.rank == wrong:
                    raised.set()
                    for other in helds:  # as the heartbeat has them cancelled
                        other.stop()
                    world.close()
                raise

    found = run(world, body)
    assert isinstance(found[wrong], CheckpointError)
    assert raised.is_set()
    assert all(isinstance(e, (OSError, PeerFailedError)) for e in found if e is not found[wrong])


def test_a_rank_that_is_lost_is_an_error_of_the_others(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, [[BLOCK * 20]])
    world = World(3)
    seen = 0

    def watch(rank: int, operation: str) -> None:
        nonlocal seen
        seen += rank == 1
        if seen == 4:
            world.kill(1)

    world.watch = watch

    def body(group: ThreadGroup) -> Any:
        names = list(checkpoint.tensors) if group.rank else []
        with gatherer(group, checkpoint, ranges_of(checkpoint, names)) as held:
            if group.rank == 1:
                world.over.wait(20)
            if names:
                return take_all(held, checkpoint, names, threads=1, unit=BLOCK)
            while not held.wait(0.05):
                pass
            return None

    found = run(world, body)
    assert isinstance(found[0], PeerFailedError)
    assert isinstance(found[2], PeerFailedError)


def test_slow_ranks_hold_back_only_what_is_ahead(tmp_path: Path) -> None:
    """A rank that takes nothing yet keeps the others at most so many blocks behind the end."""
    checkpoint = write(tmp_path, [[BLOCK * 12]])
    names = list(checkpoint.tensors)
    go = threading.Event()
    ahead: list[int] = []

    def body(group: ThreadGroup) -> Any:
        with gatherer(group, checkpoint) as held:
            if group.rank == 0:
                go.wait(20)
            else:
                info = checkpoint.tensors[names[0]]
                with held.open(checkpoint.shards[0], "pread") as reader:
                    part = memoryview(bytearray(BLOCK))
                    for block in range(BLOCKS):
                        reader.read_into(info.start + block * BLOCK, part)
                    ahead.append(BLOCKS)
                    assert not held.wait(0.05)
                    go.set()
                    for block in range(BLOCKS, 12):
                        reader.read_into(info.start + block * BLOCK, part)
                assert held.wait(20)
                return bytes(part)
            out = take_all(held, checkpoint, names, threads=1, unit=BLOCK)[names[0]]
            assert held.wait(20)
            return out[-BLOCK:]

    found = run(World(2), body)
    assert found[0] == found[1]
    assert ahead == [BLOCKS]


def test_stopping_wakes_who_waits(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, [[BLOCK * 2]])
    world = World(2)

    def body(group: ThreadGroup) -> Any:
        if group.rank == 1:
            world.over.wait(10)
            return None
        with gatherer(group, checkpoint) as held:
            timer = threading.Timer(0.05, held.stop)
            timer.start()
            try:
                take_all(held, checkpoint, list(checkpoint.tensors), threads=2, unit=BLOCK)
            finally:
                timer.join()
                world.close()

    found = run(world, body)
    assert isinstance(found[0], InterruptedError)


def test_bytes_that_are_taken_again_are_an_error(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, [[BLOCK * 9]])
    info = next(iter(checkpoint.tensors.values()))

    def body(group: ThreadGroup) -> Any:
        with gatherer(group, checkpoint) as held:
            with held.open(checkpoint.shards[0], "pread") as reader:
                out = memoryview(bytearray(info.nbytes))
                reader.read_into(info.start, out)
                with pytest.raises(ValueError, match="more than once"):
                    reader.read_into(info.start, out)
                with pytest.raises(ValueError, match="no bytes"):
                    reader.read_into(info.stop, out)
                reader.read_into(info.stop, out[:0])
            assert held.wait(10)
            return bytes(out)

    data = info.shard.read_bytes()[info.start :]
    assert run(World(2), body) == [data] * 2


def test_what_is_beside_the_blocks_comes_from_the_file(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, [[10, 20, 30, 40]])
    path = checkpoint.shards[0].path
    data = path.read_bytes()
    names = ["0.0001", "0.0003"]

    def body(group: ThreadGroup) -> Any:
        shared = ranges_of(checkpoint, names)
        with CollectiveReader(
            group, checkpoint, shared, lines_of(shared), {path: "pread"}, 8
        ) as held:
            with held.open(checkpoint.shards[0], "pread") as reader:
                assert (reader.mapped, reader.has_file, reader.nbytes) == (False, False, len(data))
                with reader.view(0, len(data)) as view:
                    seen = bytes(view)
            assert held.wait(10)
            return seen

    assert run(World(3), body) == [data] * 3


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Four blocks of 4 MiB of a large checkpoint, of a small one no more than four of it."""
    small = write(tmp_path, [[100]])
    assert held_nbytes(small, 3) == BLOCKS * 102
    assert held_nbytes(small, 3, 50) == BLOCKS * 48
    hole = tmp_path / "big"
    write_safetensors(hole / "model.safetensors", {"a": ("U8", (2**20,), bytes(2**20))})
    assert held_nbytes(open_checkpoint(hole), 14) < BLOCKS * BLOCK_NBYTES
    assert held_nbytes(open_checkpoint(hole), 2, 2**10) == BLOCKS * 2**10


def test_a_gatherer_is_given_up_at_once(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, [[BLOCK * 50]])
    world = World(2)

    def body(group: ThreadGroup) -> Any:
        if group.rank == 0:
            with gatherer(group, checkpoint) as held:
                assert held.nbytes
                time.sleep(0.02)
                world.close()
            return held.nbytes
        return None

    assert run(world, body) == [0, None]
