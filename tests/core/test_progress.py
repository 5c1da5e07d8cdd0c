"""Progress: what is told, how often, and where it goes."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors_files import write_safetensors

from streamload.core import progress as module
from streamload.core.progress import reporting


class Stderr(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_a_callable_is_told_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, then at most every tenth of a second, and always at the end."""
    clock = Clock(monkeypatch)
    told: list[tuple[int, int]] = []
    with reporting(lambda done, total: told.append((done, total)), 100) as tell:
        for done in range(1, 101):
            clock.now += 0.03
            tell(done)
    assert told[0] == (1, 100)
    assert told[-1] == (100, 100)
    assert 25 <= len(told) <= 30


def test_off(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """False is silence."""
    with caplog.at_level(logging.DEBUG), reporting(False, 10) as tell:
        tell(5)
        tell(10)
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


def test_elsewhere_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a terminal "auto" writes to the log: done, all, rate and time left; short loads none.

    The rate is what was done over the time that it took.
    """
    clock = Clock(monkeypatch)
    monkeypatch.setattr("sys.stderr", Stderr(False))
    with caplog.at_level(logging.INFO, "streamload"):
        with reporting("auto", 4_000_000_000) as tell:
            for second in range(1, 41):
                clock.now += 1
                tell(100_000_000 * second)
            tell(4_000_000_000)  # as some do after their last part
        with reporting("auto", 10) as tell:
            clock.now += 3
            tell(10)
    messages = [record.message for record in caplog.records]
    assert messages[0] == "loaded 1.00 GB of 4.00 GB, 100 MB/s, 30 s left"
    assert len(messages) == 4


@pytest.mark.parametrize("columns", [40, 100])
@pytest.mark.parametrize("progress", ["auto", True])
def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, progress: Any, columns: int) -> None:
    """Bytes done, bytes in all, whole and on one line; it goes when the load is done."""
    stderr = Stderr(True)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    with reporting(progress, 200_000_000) as tell:
        tell(110_000_000)
        assert "110.0/200.0 MB" in stderr.getvalue()
        tell(200_000_000)
        assert "\n" not in stderr.getvalue()
    assert stderr.getvalue().rstrip("\n").endswith("\x1b[2K")


@pytest.mark.parametrize("progress", ["auto", True])
def test_without_stderr_there_is_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, progress: Any
) -> None:
    monkeypatch.setattr(module.sys, "stderr", None)
    clock = Clock(monkeypatch)
    with caplog.at_level(logging.INFO), reporting(progress, 100) as tell:
        clock.now += 20
        tell(50)
    assert len(caplog.records) == 1


def test_a_bar_in_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """True writes wherever stderr goes: what came of it, once, without terminal codes."""
    stderr = Stderr(False)
    monkeypatch.setattr("sys.stderr", stderr)
    with reporting(True, 2_000_000) as tell:
        tell(1_000_000)
        tell(2_000_000)
    assert stderr.getvalue().count("\n") == 1
    assert "2.0/2.0 MB" in stderr.getvalue()
    assert "\x1b" not in stderr.getvalue()


def test_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of no bytes at all draws a bar and divides by nothing."""
    monkeypatch.setattr("sys.stderr", Stderr(True))
    with reporting(True, 0) as tell:
        tell(0)


@pytest.mark.parametrize("progress", ["yes", None, 0.5, []])
def test_what_is_no_progress(progress: Any) -> None:
    """Anything else is a ValueError that says what there is."""
    with (
        pytest.raises(ValueError, match="auto, True, False or a callable"),
        reporting(progress, 10),
    ):
        pytest.fail("was let in")


def test_a_notebook_shows_a_bar_without_widgets(tmp_path: Path) -> None:
    """A real kernel: one output that is drawn anew, and no log line, and no word of ipywidgets."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    tensors = {f"layers.{n}.w": ("F32", (64, 64), bytes(4 * 64 * 64)) for n in range(500)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    source = (
        "import streamload\n"
        f"report = streamload.load_state_dict(None, {str(path)!r}, device='host')\n"
        "report"
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(book, kernel_name="python3", timeout=120).execute()
    bar, table = book.cells[0].outputs
    total = 500 * 4 * 64 * 64
    assert bar.output_type == "display_data"
    assert f'<progress value="{total}" max="{total}"></progress>' in bar.data["text/html"]
    assert bar.data["text/plain"].startswith("loaded 8.19 MB of 8.19 MB, ")
    assert table.output_type == "execute_result"
    assert table.data["text/plain"].startswith("checkpoint ")
    assert len(table.data["text/plain"]) < 1000
    assert "<svg" in table.data["text/html"]
