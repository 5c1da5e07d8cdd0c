"""Files that another process changes while they are read: never a wrong byte, never a signal."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from adversary import ACTS, Adversary, leases
from safetensors_files import write_safetensors

import streamload
from streamload import RowRange, open_checkpoint
from streamload.checkpoint.shards import Shards
from streamload.conversion import convert, writing
from streamload.conversion.blocks import Way
from streamload.core import progress
from streamload.errors import CheckpointError, FileChangedError, TruncatedFileError
from streamload.files.folder import choose_reader, open_reader
from streamload.files.local import MmapReader
from streamload.formats.reader import read_header
from streamload.verification.diff import diff
from streamload.verification.verify import verify, verify_checkpoint

READERS = ("mmap", "pread", "direct", "auto")
COUNT, NBYTES = 32, 256 * 1024
CHUNK = 2**16


def tensors() -> dict[str, Any]:
    """Values that a change is seen in: no byte of them is 0 or 0xee."""
    values = np.random.default_rng(0).integers(1, 0x80, (COUNT, NBYTES), np.uint8)
    return {f"t{i:02}": ("I8", [NBYTES], row.tobytes()) for i, row in enumerate(values)}


VALUES = tensors()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of 8 MiB in one file, written a while ago."""
    return aged(write_safetensors(tmp_path / "in/model.safetensors", VALUES))


def aged(path: Path) -> Path:
    """A file that was written ten seconds ago: clocks of files may stand still for 10 ms."""
    os.utime(path, (time.time() - 10,) * 2)
    return path


@pytest.fixture(scope="module")
def adversary() -> Iterator[Adversary]:
    with Adversary() as made:
        yield made


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TELL_EVERY_S", 0.0)


def at(done_nbytes: int, act: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that does something once, when so many bytes are done."""
    left = [act]

    def told(done: int, _: int) -> None:
        if done >= done_nbytes and left:
            left.pop()()

    return told


def writer(path: Path, leased: bool) -> AbstractContextManager[Any]:
    """Whatever it takes for a load to have a lease, or none: a file that is open for writing."""
    return nullcontext() if leased else open(path, "r+b", buffering=0)


def is_right(name: str, value: Any) -> bool:
    return bytes(np.asarray(value).tobytes()) == VALUES[name][2]


def model(device: str) -> Any:
    if device == "host":
        return {name: np.full(NBYTES, 0x70, np.int8) for name in VALUES}
    torch = needs.module("torch")
    return {name: torch.full((NBYTES,), 0x70, dtype=torch.int8) for name in VALUES}


def load(into: Any, path: Any, device: str, **arguments: Any) -> streamload.LoadReport:
    arguments = {"chunk_nbytes": CHUNK, "threads": 2, "budget": "1GB"} | arguments
    return streamload.load_state_dict(into, path, device=device, **arguments)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize(
    ("device", "reader"), [*(("host", reader) for reader in READERS), ("cpu", "auto")]
)
def test_a_load_of_a_file_that_changes(
    path: Path, adversary: Adversary, reader: Any, device: str, leased: bool, act: str
) -> None:
    """It ends with an error that names the file, or all is right; what is loaded is right."""
    into = model(device)
    place = path.stat().st_size - 1000  # nothing of the last tensor has been read
    change = at(8 * NBYTES, lambda: adversary.act(act, path, place))
    with writer(path, leased):
        if act in ("replace", "chmod"):
            load(into, path, device, reader=reader, progress=change)
            assert all(is_right(name, value) for name, value in into.items())
            return
        if act == "touch" and leased:
            load(into, path, device, reader=reader, progress=change)
            assert all(is_right(name, value) for name, value in into.items())
            return
        with pytest.raises(CheckpointError) as caught:
            load(into, path, device, reader=reader, progress=change)
    adversary.wait()
    error = caught.value
    # "again": it is shorter for a moment
    kinds: list[type] = [FileChangedError]
    if act in ("truncate", "again") and not leased:
        kinds.append(TruncatedFileError)
    assert type(error) in kinds
    assert error.path == str(path) and str(path) in str(error)
    assert error.state is not None
    assert bool(error.state.loaded) == leased  # of one file: without a lease nothing is certain
    for name in error.state.loaded:
        assert is_right(name, into[name])
    for name in error.state.invalid:
        with pytest.raises(Exception, match="values"):
            is_right(name, into[name])
    assert set(error.state.loaded) | set(error.state.invalid) | set(error.state.untouched) == set(
        VALUES
    )
    assert not leases(path)


@pytest.mark.parametrize("act", ["rewrite", "truncate"])
@pytest.mark.parametrize("leased", [True, False])
def test_a_cast_of_a_file_that_changes(
    tmp_path: Path, adversary: Adversary, leased: bool, act: str
) -> None:
    data = np.arange(1, 500_001, dtype=np.uint16).tobytes()
    values = {f"t{i}": ("BF16", [500_000], data) for i in range(8)}
    path = aged(write_safetensors(tmp_path / "bf16.safetensors", values))
    change = at(1, lambda: adversary.act(act, path, path.stat().st_size - 1000))
    with writer(path, leased), pytest.raises(CheckpointError) as caught:
        load(None, path, "host", dtype="float32", progress=change)
    adversary.wait()
    assert caught.value.path == str(path)
    assert caught.value.state is not None and (leased or not caught.value.state.loaded)


@pytest.mark.parametrize("leased", [True, False])
def test_a_parameter_that_was_finished_is_taken_back(
    path: Path, adversary: Adversary, leased: bool
) -> None:
    torch = needs.module("torch")
    module = torch.nn.Module()
    for name in VALUES:
        empty = torch.empty(NBYTES, dtype=torch.int8, device="meta")
        module.register_buffer(name, empty)
    place = path.stat().st_size - 1000
    change = at(8 * NBYTES, lambda: adversary.act("rewrite", path, place))
    with writer(path, leased), pytest.raises(FileChangedError) as caught:
        load(module, path, "cpu", progress=change)
    adversary.wait()
    assert caught.value.held_back == leased and caught.value.state is not None
    for name in caught.value.state.loaded:
        assert is_right(name, module.get_buffer(name))
    for name in caught.value.state.invalid:
        assert module.get_buffer(name).device.type == "meta"
    assert bool(caught.value.state.loaded) == leased
    adversary.act("rewrite", path, place)
    load(module, path, "cpu", progress=False)
    assert is_right("t00", module.get_buffer("t00"))


def test_a_writer_is_not_held_back_by_a_file_that_was_read(
    tmp_path: Path, adversary: Adversary
) -> None:
    """The first of two files is written while the second is read: it was read to its end."""
    names = sorted(VALUES)
    parts = [dict.fromkeys(names[:2]), dict.fromkeys(names[2:])]
    for i, part in enumerate(parts):
        values = {name: VALUES[name] for name in part}
        aged(write_safetensors(tmp_path / f"model-{i + 1:05}-of-00002.safetensors", values))
    first = tmp_path / "model-00001-of-00002.safetensors"
    into = model("host")

    def act() -> None:
        adversary.act("again", first, 0, 100)
        adversary.wait()

    load(into, tmp_path, "host", progress=at(NBYTES * COUNT * 3 // 4, act))
    assert all(is_right(name, value) for name, value in into.items())
    assert first.stat().st_size == 100


@pytest.mark.parametrize("act", ["rewrite", "replace", "truncate", "append", "again"])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_changes_after_its_header_was_read(
    path: Path, adversary: Adversary, reader: Any, act: str
) -> None:
    """No byte of another file than the header's is read, and nothing is touched."""
    checkpoint = open_checkpoint(path)
    adversary.act(act, path, path.stat().st_size - 1000, 1000)
    adversary.wait()
    into = model("host")
    with pytest.raises(CheckpointError) as caught:
        load(into, checkpoint, "host", reader=reader, progress=False)
    assert caught.value.path == str(path)
    assert isinstance(caught.value, FileChangedError | TruncatedFileError)
    assert caught.value.state is not None and not caught.value.state.loaded


def test_a_link_that_leads_elsewhere_is_another_file(path: Path, tmp_path: Path) -> None:
    """As in the cache of Hugging Face, where snapshots are links; the file itself has a lease."""
    link = tmp_path / "snapshot/model.safetensors"
    link.parent.mkdir()
    link.symlink_to(path)
    checkpoint = open_checkpoint(link)
    with open_reader(link, checkpoint.shards[0].file_nbytes, "mmap", checkpoint.shards[0].state):
        assert leases(path)
    assert not leases(path)
    other = shutil.copy2(path, tmp_path / "other")
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(FileChangedError, match="replaced") as caught:
        load(None, checkpoint, "host")
    assert "inode" in str(caught.value.expected) and "inode" in str(caught.value.found)


@pytest.mark.parametrize("act", ["rewrite", "truncate", "again", "append"])
@pytest.mark.parametrize("leased", [True, False])
def test_a_conversion_of_a_file_that_changes(
    path: Path, tmp_path: Path, adversary: Adversary, leased: bool, act: str
) -> None:
    """It ends with an error that names the file, and nothing gets its name."""
    place = path.stat().st_size - 1000
    change = at(0, lambda: adversary.act(act, path, place))
    with writer(path, leased), pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert, "choose_way", lambda *_, **__: Way(1, CHUNK))
        real = writing.Writer._put
        acted: list[bool] = []

        def put(self: Any, block: Any, memory: memoryview) -> None:
            real(self, block, memory)
            if block.start and not acted:  # the first blocks are written
                acted.append(True)
                change(1, 1)

        patched.setattr(writing.Writer, "_put", put)
        with pytest.raises(CheckpointError) as caught:
            streamload.convert(path, tmp_path / "out", progress=False)
    adversary.wait()
    assert caught.value.path == str(path)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    if act not in ("truncate", "again") or leased:
        assert isinstance(caught.value, FileChangedError)
    assert not leases(path)


@pytest.mark.parametrize("act", ["rewrite", "truncate", "replace"])
def test_a_file_that_changes_after_the_load_is_not_what_it_is_verified_with(
    path: Path, adversary: Adversary, act: str
) -> None:
    checkpoint = open_checkpoint(path)
    report = load(None, checkpoint, "host", progress=False)
    assert verify(report, checkpoint) == []
    seen: list[int] = []

    def change(done: int) -> None:
        if not seen:
            adversary.act(act, path, checkpoint.tensors["t31"].start + 5, 100)
            adversary.wait()
        seen.append(done)

    with pytest.raises(CheckpointError) as caught:
        verify(report, checkpoint, progress=change)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("act", ["rewrite", "truncate"])
@pytest.mark.parametrize("leased", [True, False])
def test_a_comparison_with_a_file_that_changes(
    path: Path, tmp_path: Path, adversary: Adversary, leased: bool, act: str
) -> None:
    """Of digests, and of two checkpoints: it ends with an error that names the file."""
    other = shutil.copy2(path, tmp_path / "other.safetensors")
    calls: list[Callable[[Any], object]] = [lambda told: diff(path, other, progress=told)]
    if act == "rewrite":
        streamload.convert(path, tmp_path / "out", progress=False)
        path = aged(tmp_path / "out/model.safetensors")
        calls = [lambda told: verify_checkpoint(path.parent, progress=told)]
    place = path.stat().st_size - 1000
    with writer(path, leased), pytest.raises(CheckpointError) as caught:
        calls[0](at(1, lambda: adversary.act(act, path, place)))
    adversary.wait()
    assert caught.value.path == str(path)


def test_what_a_window_shows_is_there_until_it_closes(path: Path, adversary: Adversary) -> None:
    """Whoever truncates the file waits for that; then the reader gives nothing any more."""
    header = read_header(path)
    content = path.read_bytes()
    with open_reader(path, header.file_nbytes, "mmap", header.state) as reader:
        with (
            pytest.raises(FileChangedError) as caught,
            reader.view(1000, 500_000) as view,
            reader.view(400_000, 8_000_000) as other,
        ):
            adversary.act("truncate", path, 10)
            time.sleep(0.05)
            with pytest.raises(FileChangedError), reader.view(0, 10):
                raise AssertionError
            assert path.stat().st_size == len(content)
            assert view == content[1000:500_000] and other == content[400_000:8_000_000]
        adversary.wait()
        assert caught.value.held_back and path.stat().st_size == 10
        for _ in range(2):
            with pytest.raises(CheckpointError) as again:
                reader.read_into(0, memoryview(bytearray(5)))
            assert again.value.path == str(path)


def test_a_file_of_which_nothing_is_read_now_holds_nobody_for_long(
    path: Path, adversary: Adversary
) -> None:
    """The streaming thread is elsewhere, and workers have nothing to do: they look all the same."""
    held: list[float] = []

    def act() -> None:
        begun = time.monotonic()
        adversary.act("rewrite", path, path.stat().st_size - 1000)
        adversary.wait()  # in the thread that hands out the work
        held.append(time.monotonic() - begun)

    with pytest.raises(FileChangedError):
        load(None, path, "host", progress=at(NBYTES, act))
    assert held and held[0] < 20  # the kernel's own limit is 45


@pytest.mark.parametrize("leased", [True, False])
def test_a_lease_is_given_back(path: Path, leased: bool) -> None:
    header = read_header(path)
    with writer(path, leased):
        choice = choose_reader(path, "mmap")
        assert choice.kind == ("mmap" if leased else "pread")
        reader = open_reader(path, header.file_nbytes, "mmap", header.state)
        assert isinstance(reader, MmapReader)
        assert reader.mapped == leased == bool(leases(path)) == (not reader.fallback)
        with reader.view(5, 1000) as view:
            assert bytes(view) == path.read_bytes()[5:1000]
        reader.close()
        reader.close()
        assert not leases(path)
        if not leased:
            assert "open for writing" in reader.fallback and "open for writing" in choice.reason
            report = load(None, path, "host", reader="mmap", progress=False)
            assert "open for writing" in str(report.plan)


def test_no_signal_is_sent(path: Path, adversary: Adversary) -> None:
    """A program that handles the signal of leases, or another, is not called for ours."""
    got: list[int] = []
    handled = (signal.SIGIO, signal.SIGURG)
    before = [signal.signal(number, lambda number, _: got.append(number)) for number in handled]
    try:
        with pytest.raises(FileChangedError):
            place = path.stat().st_size - 1000
            load(None, path, "host", progress=at(1, lambda: adversary.act("rewrite", path, place)))
        adversary.wait()
    finally:
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)
    assert got == []


@pytest.mark.skipif(os.geteuid() != 0, reason="files of others are made by root")
@pytest.mark.parametrize("reader", ["auto", "mmap"])
def test_files_of_others_are_not_mapped(path: Path, reader: str) -> None:
    """There is no lease for who does not own a file: it is read by pread, and a change is seen."""
    program = """
        import os, sys
        from pathlib import Path
        import streamload
        from streamload.core import progress
        from streamload.errors import CheckpointError
        path, reader = sys.argv[1:]
        report = streamload.load_state_dict(
            None, path, device="host", reader=reader, budget="1GB", progress=False
        )
        print("another user's" in str(report.plan))
        progress._TELL_EVERY_S = 0.0
        def told(done, total):
            os.utime(path)
        try:
            streamload.load_state_dict(
                None, path, device="host", reader=reader, budget="1GB", progress=told,
                chunk_nbytes=65536,
            )
        except CheckpointError as error:
            print(type(error).__name__, error.path == path, error.held_back)
    """
    os.chown(path, 65534, 65534)
    library = ctypes.CDLL(None)
    root = Path(streamload.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path), reader],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        # PR_CAPBSET_DROP, CAP_LEASE: as root is in most containers
        preexec_fn=lambda: library.prctl(24, 28, 0, 0, 0),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "FileChangedError True False"]


def test_rows_are_held_to_the_file_of_the_header(path: Path, adversary: Adversary) -> None:
    checkpoint = open_checkpoint(path)
    mapping = {"rows": [RowRange("t00", 0, 100_000), RowRange("t31", 5, 100_000)]}
    place = checkpoint.tensors["t31"].start + 50_000
    change = at(1, lambda: adversary.act("rewrite", path, place))
    with pytest.raises(FileChangedError) as caught:
        load(None, checkpoint, "host", mapping=mapping, progress=change)
    adversary.wait()
    assert caught.value.path == str(path)


RACE = """
    import os, random, sys, time
    from pathlib import Path
    path, seed, load_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    data = Path(path).read_bytes()
    rng = random.Random(seed)
    parent = os.getppid()

    def put(data):
        # as if written before: clocks of files may stand still from one write to the next
        Path(path + ".new").write_bytes(data)
        os.utime(path + ".new", (time.time() - 10,) * 2)
        os.replace(path + ".new", path)

    while os.getppid() == parent:
        time.sleep(rng.random() * rng.choice((0.5, 5)) * load_s)
        act = rng.randrange(4)
        if act == 0:
            os.truncate(path, rng.randrange(len(data)))
        elif act == 1:
            with open(path, "r+b", buffering=0) as file:
                # the other way round than it is read: half of it is not what a torn read sees
                os.pwrite(file.fileno(), b"\\xee" * 4096, len(data) - 32 * 2**18)  # of t00
                os.pwrite(file.fileno(), b"\\xee" * 4096, len(data) - 4096)  # of t31
        elif act == 2:
            with open(path, "wb", buffering=0) as file:
                file.write(b"\\xee" * len(data))
        else:
            put(data[: 16 - 2**22] + b"\\xee" + data[17 - 2**22 :])
        time.sleep(rng.random() * 0.01)
        put(data)
"""


@pytest.mark.parametrize(
    ("runs", "seed"),
    [(40, 1), *(pytest.param(300, n, marks=pytest.mark.slow) for n in range(2, 6))],
)
def test_races(path: Path, runs: int, seed: int) -> None:
    """Load a file again and again that another process changes and mends all the time.

    It goes on until there were so many loads and both ends were seen, however slow the machine.
    """
    random.seed(seed)
    begun = time.monotonic()
    load(model("host"), path, "host", progress=False)
    load_s = time.monotonic() - begun
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", textwrap.dedent(RACE), str(path), str(seed), str(load_s)]
    )
    seen = {"right": 0, "error": 0}
    try:
        until = time.monotonic() + 120
        while (sum(seen.values()) < runs or not all(seen.values())) and time.monotonic() < until:
            into = model("host")
            reader = random.choice(READERS)
            try:
                with nullcontext() if random.random() < 0.7 else open(path, "r+b"):
                    load(into, path, "host", reader=reader, progress=False)
            except CheckpointError as error:
                seen["error"] += 1
                assert error.path == str(path)
                loaded = error.state.loaded if error.state is not None else ()
                assert all(is_right(name, into[name]) for name in loaded), error
            else:
                seen["right"] += 1
                # as the file was before the load, or as the other that took its name
                wrong = [name for name in VALUES if not is_right(name, into[name])]
                assert wrong in ([], ["t00"], ["t00", "t31"], ["t16"]), wrong
    finally:
        child.kill()
        child.wait()
    assert all(seen.values()), seen


@pytest.mark.slow
def test_a_thousand_truncations_under_windows(path: Path) -> None:
    """A window that was opened is there whole until it closes, whenever the file is truncated."""
    program = """
        import os, random, sys, time
        from pathlib import Path
        path = sys.argv[1]
        data = Path(path).read_bytes()
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(random.random() * 0.02)
            os.truncate(path, 100)
            Path(path + ".new").write_bytes(data)
            os.replace(path + ".new", path)
    """
    child = subprocess.Popen([sys.executable, "-S", "-c", textwrap.dedent(program), str(path)])
    content = path.read_bytes()
    ended = windows = 0
    try:
        until = time.monotonic() + 100
        while ended < 1000 and time.monotonic() < until:
            try:
                header = read_header(path)
                with open_reader(path, header.file_nbytes, "mmap", header.state) as reader:
                    while reader.mapped:
                        with reader.view(8000, header.file_nbytes) as view:
                            assert bytes(view[-1000:]) == content[-1000:]
                            assert bytes(view[::65536]) == content[8000::65536]
                        windows += 1
            except CheckpointError:
                ended += 1
    finally:
        child.kill()
        child.wait()
    assert ended and windows, (ended, windows)


def test_a_check_between_reads_names_the_tensor_that_is_cut(path: Path) -> None:
    """A thread without work looks at open files: its error names a tensor, as those of reads."""
    checkpoint = open_checkpoint(path)
    with Shards(checkpoint.shards, lambda shard: "pread") as shards:
        with open(path, "r+b") as file:  # so without a lease
            shards.reader(path)
            file.truncate(checkpoint.tensors["t05"].stop - 1)
        with pytest.raises(TruncatedFileError) as caught:
            shards.check()
    assert caught.value.tensor == "t05"
