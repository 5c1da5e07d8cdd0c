"""What a destination holds before, beside and during a conversion: never old and new together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from conversions import files_of, quiet, tensors_of
from safetensors_files import write_safetensors

from streamload.checkpoint.digests import SIDECAR
from streamload.conversion import convert as module
from streamload.conversion.disk import WORK
from streamload.errors import CheckpointError
from streamload.formats.safetensors import INDEX, SINGLE
from streamload.planning.partition import Node


def checkpoint(folder: Path, seed: int = 0, layers: int = 4) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.layers.{i}.w": ("F32", (1000,), rng.standard_normal(1000).astype("<f4").tobytes())
        for i in range(layers)
    }
    write_safetensors(folder / SINGLE, tensors)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "source", 1)


TWO = [Node("a", "9KB"), Node("b", "9KB")]


class _StopError(Exception):
    """Ends a conversion where a test wants it."""


def stopped_at(method: str, source: Path, out: Path, **arguments: Any) -> None:
    """Convert up to one of the steps."""

    def stop(*_: Any, **__: Any) -> None:
        raise _StopError

    with pytest.MonkeyPatch.context() as patched, pytest.raises(_StopError):
        patched.setattr(module._Conversion, method, stop)
        quiet(source, out, **arguments)


# --- what counts as a checkpoint, and goes with overwrite -----------------------------------------


@pytest.mark.parametrize(
    "name", ["adapter.safetensors", "other.safetensors.index.json", "config.json", SIDECAR]
)
def test_files_of_another_checkpoint_are_refused(source: Path, tmp_path: Path, name: str) -> None:
    """Of any name: with the new files they would look like one; overwrite removes them."""
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text('{"model_type": "other"}')
    (out / "mine.txt").write_text("mine")
    for how in ({}, {"resume": True}, {"dry_run": True}):
        with pytest.raises(CheckpointError, match=f"holds a checkpoint.*{name}"):
            quiet(source, out, **how)
    assert {p.name for p in out.iterdir()} == {name, "mine.txt"}
    quiet(source, out, overwrite=True)
    assert {p.name for p in out.iterdir()} == {SINGLE, SIDECAR, "mine.txt"}


def test_what_was_copied_goes_with_the_weights(source: Path, tmp_path: Path) -> None:
    """A tokenizer that an earlier conversion copied is not that of the next checkpoint."""
    other, out = checkpoint(tmp_path / "other", 2), tmp_path / "out"
    (other / "tokenizer.json").write_text("{}")
    quiet(other, out)
    assert (out / "tokenizer.json").exists()
    quiet(source, out, overwrite=True)
    assert {p.name for p in out.iterdir()} == {SINGLE, SIDECAR}


def test_folders_of_nodes_that_there_are_no_more_go(source: Path, tmp_path: Path) -> None:
    """With overwrite; without, they are a reason to refuse. What is not ours in them stays."""
    other, out = checkpoint(tmp_path / "other", 2, layers=1), tmp_path / "out"
    quiet(source, out, nodes=TWO)
    quiet(source, out / "own")  # a conversion of its own, whose folder is no node's
    (out / "b" / "mine.txt").write_text("mine")
    for nodes in ([Node("a", "90KB")], None):
        with pytest.raises(CheckpointError, match=r"holds a checkpoint.*b/model"):
            quiet(other, out, nodes=nodes)
    before = files_of(out)
    quiet(other, out, nodes=[Node("a", "90KB")], overwrite=True)
    assert tensors_of(out / "a") == tensors_of(other)
    assert [p.name for p in (out / "b").iterdir()] == ["mine.txt"]
    quiet(other, out, overwrite=True)
    assert not (out / "a").exists()
    assert tensors_of(out) == tensors_of(other)
    own = {path: data for path, data in before.items() if path.startswith("own/")}
    assert own == {p: data for p, data in files_of(out).items() if p.startswith("own/")}


def test_nodes_where_a_checkpoint_is(source: Path, tmp_path: Path) -> None:
    """Its weights are not left beside the folders of the nodes."""
    out = tmp_path / "out"
    quiet(checkpoint(tmp_path / "other", 2), out, max_shard_size="5KB")
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        quiet(source, out, nodes=TWO)
    assert (out / INDEX).exists()
    quiet(source, out, nodes=TWO, overwrite=True)
    assert {p.name for p in out.iterdir()} == {"a", "b"}


def test_a_folder_where_a_file_would_be_is_seen_at_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / SINGLE).mkdir(parents=True)
    for how in ({}, {"overwrite": True}, {"dry_run": True}):
        with pytest.raises(CheckpointError, match="a file would be written there"):
            quiet(source, out, **how)
    assert [p.name for p in out.iterdir()] == [SINGLE]


def test_a_config_that_links_into_the_destination_is_a_file_of_the_source(
    source: Path, tmp_path: Path
) -> None:
    """It would be gone before it is read again."""
    out = source / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (source / "config.json").symlink_to(out / "config.json")
    with pytest.raises(CheckpointError, match="a file of the source would be written"):
        quiet(source, out, overwrite=True)
    assert (out / "config.json").exists()


# --- what was published is looked at again --------------------------------------------------------


def test_old_files_are_not_taken_for_new_ones(source: Path, tmp_path: Path) -> None:
    """Where what was to be published is lost, files of the same names and lengths are no proof."""
    other, out = checkpoint(tmp_path / "other", 2), tmp_path / "out"
    quiet(other, out)
    stopped_at("_publish", source, out, overwrite=True)
    shutil.rmtree(out / WORK / "out")
    with pytest.raises(CheckpointError, match="since it was published"):
        quiet(source, out, resume=True)
    quiet(source, out, overwrite=True)
    assert tensors_of(out) == tensors_of(source)


def _replaced(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _longer(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("change", [_replaced, _longer, os.unlink])
@pytest.mark.parametrize("name", [SINGLE, SIDECAR, "tokenizer.json"])
def test_a_published_file_that_changed_between_two_calls(
    source: Path, tmp_path: Path, change: Callable[[Path], None], name: str
) -> None:
    """It is noticed, whichever file it is; a file that is as it was is published."""
    out = tmp_path / "out"
    (source / "tokenizer.json").write_text('{"some": "words"}')
    stopped_at("_publish", source, out)
    os.rename(out / WORK / "out" / name, out / name)
    change(out / name)
    with pytest.raises(CheckpointError, match="since it was published") as raised:
        quiet(source, out, resume=True)
    assert raised.value.path == str(out / name)

    shutil.rmtree(out)
    stopped_at("_publish", source, out)
    os.rename(out / WORK / "out" / name, out / name)
    (source / "tokenizer.json").write_text("changed since it was prepared")
    quiet(source, out, resume=True)
    assert (out / "tokenizer.json").read_text() == '{"some": "words"}'
    assert tensors_of(out) == tensors_of(source)


@pytest.mark.parametrize("damage", [{}, {"../stolen": ""}, {"more/" + SINGLE: ""}])
def test_a_journal_that_publishes_something_else(
    source: Path, tmp_path: Path, damage: dict[str, str]
) -> None:
    """Less than all, or a file elsewhere: nothing is published, and nothing finished is lost."""
    out = tmp_path / "out"
    stopped_at("_publish", source, out)
    journal = out / WORK / "journal"
    *lines, last = journal.read_text().splitlines()
    published = json.loads(last)["publish"] | damage if damage else {}
    journal.write_text("\n".join([*lines, json.dumps({"publish": published})]) + "\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        quiet(source, out, resume=True)
    assert [p.name for p in out.iterdir()] == [WORK]
    assert (out / WORK / "out" / SINGLE).exists()


# --- two at once ----------------------------------------------------------------------------------


def test_a_conversion_into_the_folder_of_a_node(source: Path, tmp_path: Path) -> None:
    """It and the conversion for nodes see each other, whichever was first."""
    other, out = checkpoint(tmp_path / "other", 2), tmp_path / "out"
    problems = []

    def second(into: Path, **arguments: Any) -> Callable[[int, int], None]:
        def convert(done: int, total: int) -> None:
            with pytest.raises(CheckpointError) as raised:
                quiet(other, into, overwrite=True, **arguments)
            problems.append(raised.value.problem)

        return convert

    quiet(source, out, nodes=TWO, progress=second(out / "a"))
    assert set(problems) == {"another conversion is being written there"}
    assert tensors_of(out / "a") | tensors_of(out / "b") == tensors_of(source)
    shutil.rmtree(out)
    problems.clear()
    quiet(source, out / "a", progress=second(out, nodes=TWO))
    assert set(problems) == {"another conversion is being written there"}
    assert tensors_of(out / "a") == tensors_of(source)
    assert {p.name for p in out.iterdir()} == {"a"}


def test_an_unfinished_conversion_in_the_folder_of_a_node(source: Path, tmp_path: Path) -> None:
    """It would continue amid the files of another one."""
    out = tmp_path / "out"
    stopped_at("_publish", source, out / "a")
    with pytest.raises(CheckpointError, match="unfinished conversion of its own"):
        quiet(source, out, nodes=TWO, overwrite=True)
    quiet(source, out / "a", resume=True)
    assert tensors_of(out / "a") == tensors_of(source)


# --- what may not be looked at --------------------------------------------------------------------

_AS_NOBODY = """
import os, sys
from streamload.conversion.convert import convert  # from where others may not read
from streamload.errors import CheckpointError
from streamload.formats.reader import FORMATS
list(FORMATS)
os.setgid(65534), os.setuid(65534)
try:
    convert(sys.argv[1], sys.argv[2], dry_run=sys.argv[3] == "dry", progress=False)
except CheckpointError as error:
    sys.exit(str(error))
"""


def _as_nobody(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Convert as a user who owns nothing."""
    return forked.run([sys.executable, "-c", _AS_NOBODY, *arguments], forked.COMMANDS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("how", ["dry", "wet"])
def test_folders_that_may_not_be_searched(how: str) -> None:
    """Above the destination, in it, and above the source: one clear error."""
    # not below pytest's folders, which are their owner's alone
    base = Path(tempfile.mkdtemp())
    try:
        base.chmod(0o755)
        source = checkpoint(base / "source")
        closed = base / "closed"
        (closed / "below").mkdir(parents=True)
        checkpoint(closed / "below")
        closed.chmod(0o700)
        own = base / "own"
        (own / WORK).mkdir(parents=True)
        (own / WORK).chmod(0o700)
        own.chmod(0o777)
        (base / "shown").mkdir(mode=0o755)
        cases = [
            (source, base / "shown", "cannot be written"),
            (source, base / "shown" / "out", "cannot be written"),
            (source, closed / "below" / "out", "cannot be written: found Permission denied"),
            (source, own, "cannot be written: found Permission denied"),
            (closed / "below", own, "cannot be read: found Permission denied"),
        ]
        for from_, to, problem in cases:
            done = _as_nobody(from_, to, how)
            assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
            assert problem in done.stderr
    finally:
        shutil.rmtree(base)


def test_names_that_are_too_long(source: Path, tmp_path: Path) -> None:
    """Of a destination, in a dry run too: one clear error."""
    for how in ({}, {"dry_run": True}, {"resume": True}):
        with pytest.raises(CheckpointError, match="File name too long"):
            quiet(source, tmp_path / ("x" * 300) / "out", **how)


def test_what_vanishes_while_room_is_counted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stopped_at("_publish", source, out)
    real = os.walk

    def walk(top: Path) -> Any:
        for found in list(real(top)):
            shutil.rmtree(top, ignore_errors=True)
            yield found

    monkeypatch.setattr(module.os, "walk", walk)
    assert quiet(source, out, dry_run=True, resume=True).dry_run


@pytest.mark.skipif(sys.platform != "linux", reason="what a descriptor is of is seen in /proc")
def test_folders_above_a_destination_reach_the_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    sync = os.fsync

    def recorded(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    above = tmp_path / "a"
    quiet(source, above / "b" / "c" / "out")
    assert {tmp_path, above, above / "b", above / "b" / "c"} <= set(synced)
    synced.clear()
    quiet(source, above / "b" / "other", nodes=TWO)
    assert above / "b" in synced
    assert above not in synced


# --- links ----------------------------------------------------------------------------------------


def _precious(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A folder of somebody's, with names that a conversion has; and what is in it."""
    folder = tmp_path / "precious"
    for name in ("out/thesis.txt", "journal", "reserve", "lock", SINGLE, "mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder, files_of(folder)


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}, {"dry_run": True}])
@pytest.mark.parametrize("link", [WORK, f"{WORK}/out", "a"])
def test_no_folder_is_written_through_a_link(
    source: Path, tmp_path: Path, link: str, how: dict[str, bool]
) -> None:
    out, (precious, before) = tmp_path / "out", _precious(tmp_path)
    (out / link).parent.mkdir(parents=True)
    (out / link).symlink_to(precious)
    with pytest.raises(CheckpointError) as raised:
        quiet(source, out, nodes=TWO if link == "a" else None, **how)
    assert raised.value.path == str(out / link)
    assert raised.value.problem == "would be written through a link"
    assert raised.value.found == f"a link to {precious}"
    assert files_of(precious) == before


def test_folders_of_earlier_nodes_that_are_links(source: Path, tmp_path: Path) -> None:
    """What they lead to is nobody's but the user's."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    quiet(source, out, nodes=TWO)
    (out / "a").rename(elsewhere)
    (out / "a").symlink_to(elsewhere)
    before = files_of(elsewhere)
    quiet(source, out, overwrite=True)
    assert files_of(elsewhere) == before
    assert not (out / "b").exists()


def test_a_journal_that_is_a_link(source: Path, tmp_path: Path) -> None:
    """It is not continued; to begin again removes the link alone."""
    out, (precious, before) = tmp_path / "out", _precious(tmp_path)
    (out / WORK).mkdir(parents=True)
    (out / WORK / "journal").symlink_to(precious / "journal")
    with pytest.raises(CheckpointError, match="written through a link"):
        quiet(source, out, resume=True)
    quiet(source, out, overwrite=True)
    assert files_of(precious) == before
    assert tensors_of(out) == tensors_of(source)


def test_files_that_are_links_are_not_written_through(source: Path, tmp_path: Path) -> None:
    """Neither an unfinished file of tensors, nor one that gets its name."""
    out, (precious, before) = tmp_path / "out", _precious(tmp_path)
    stopped_at("_prepare", source, out)
    (out / WORK / "out" / SINGLE).unlink()
    (out / WORK / "out" / SINGLE).symlink_to(precious / SINGLE)
    with pytest.raises(CheckpointError, match="written through a link"):
        quiet(source, out, resume=True)
    assert files_of(precious) == before
    shutil.rmtree(out)
    out.mkdir()
    (out / SINGLE).symlink_to(precious / SINGLE)
    quiet(source, out, overwrite=True)  # the link is replaced
    assert files_of(precious) == before
    assert tensors_of(out) == tensors_of(source)


@pytest.mark.parametrize("moment", ["_write", "_prepare", "_publish"])
def test_a_link_that_comes_while_it_runs(
    source: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the work is replaced by a link under way: what that leads to stays."""
    out, (precious, before) = tmp_path / "out", _precious(tmp_path)
    done = getattr(module._Conversion, moment)

    def swapped(self: module._Conversion, *arguments: Any, **named: Any) -> Any:
        (out / WORK).rename(tmp_path / "moved")
        (out / WORK).symlink_to(precious)
        return done(self, *arguments, **named)

    monkeypatch.setattr(module._Conversion, moment, swapped)
    with pytest.raises(CheckpointError):
        quiet(source, out)
    assert files_of(precious) == before
