"""Bars of what a plan holds: on the terminal, in characters that it shows, and as SVG."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from xml.etree import ElementTree

import forked
import pytest
from safetensors_files import write_safetensors

from streamload.core.chart import ASCII, BLOCKS, Stack, draw_stacks, draw_text

SERIES = ("weights", "cache", "free")


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 8,192 bytes in float16, each with 64 bytes of cache for a token."""
    folder = tmp_path_factory.mktemp("layers")
    tensors = {f"model.layers.{i}.mlp.weight": ("F16", [64, 64], bytes(8192)) for i in range(4)}
    write_safetensors(folder / "model.safetensors", tensors)
    config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 16}))
    return folder


#: The command, with stdout in the encoding that is the first argument.
_ENCODED = """
import runpy, sys
sys.stdout.reconfigure(encoding=sys.argv.pop(1))
runpy.run_module("streamload", run_name="__main__", alter_sys=True)
"""


def plan(*arguments: object, encoding: str = "utf-8") -> list[str]:
    command = [sys.executable, "-c", _ENCODED, encoding, "plan", *arguments]
    done = forked.run(command, forked.COMMANDS, env=os.environ | {"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_bars_are_to_scale() -> None:
    rows = [Stack("a", (40, 20, 40), "60 of 100"), Stack("long", (25, 0, 25), "25 of 50")]
    first, second, legend = draw_text(SERIES, rows, width=57, marks="#=.")
    assert first == "a     " + "#" * 16 + "=" * 8 + "." * 16 + "  60 of 100"
    assert second == "long  " + "#" * 10 + "." * 10 + " " * 20 + "  25 of 50"
    assert legend == "# weights  = cache  . free"


def test_bars_of_nothing() -> None:
    assert draw_text(SERIES, [], width=80) == [""]
    assert draw_text(SERIES, [Stack("a", (0, 0, 0), "")], width=0)[-1] == ""
    assert draw_text(SERIES, [Stack("a", (1, 0, 0), "b")], width=0)[0].count(BLOCKS[0]) == 8
    assert ElementTree.fromstring(draw_stacks("a", "b", SERIES, [Stack("a", (0, 0, 0), "")]))


def test_characters_are_as_many_in_each_set() -> None:
    assert len(set(BLOCKS)) == len(set(ASCII)) == 5
    assert ASCII.isascii()


def test_the_stacks_of_a_chart_are_to_scale() -> None:
    """Parts lie end to end, what is empty is not drawn, and names are text."""
    rows = [Stack("<a>", (40, 20, 40), "60 of 100"), Stack("b", (50, 0, 50), "x")]
    root = ElementTree.fromstring(draw_stacks("t & u", "s", SERIES, rows))
    bars = [
        (float(e.get("x", "")), float(e.get("width", "")))
        for e in root
        if e.get("height") == "14" and e.get("y") != "57"
    ]
    assert len(bars) == 5
    whole = sum(width for _, width in bars[:3])
    assert [width for _, width in bars] == pytest.approx(
        [whole * share for share in (0.4, 0.2, 0.4, 0.5, 0.5)], abs=0.2
    )
    for (x, width), (following, _) in ((bars[0], bars[1]), (bars[1], bars[2]), (bars[3], bars[4])):
        assert x + width == pytest.approx(following, abs=0.2)
    texts = {e.text for e in root if e.tag.endswith("}text")}
    assert {"t & u", "<a>", "60 of 100", *SERIES} <= texts


def test_a_bar_for_each_node(layers: Path) -> None:
    """Weights, cache, reserve and what is free of the budget, with a legend; ASCII on request."""
    arguments = (layers, "--nodes", "2", "--budget", "32768", "--context", "64")
    arguments = (*arguments, "--reserve", "4096", "--bars")
    *_, first, second, legend = plan(*arguments)
    assert legend == "\u2588 weights  \u2593 KV cache  \u2591 reserve  \u00b7 free"
    name, bar, label = first.split("  ")
    assert (name, label) == ("node0", "28.67 kB of 32.77 kB")
    assert len(first) == 80
    assert [bar.count(mark) for mark in legend[::1] if mark in BLOCKS] == [
        pytest.approx(len(bar) * share, abs=1) for share in (1 / 2, 1 / 4, 1 / 8, 1 / 8)
    ]
    assert second.startswith("node1")
    plain = plan(*arguments, encoding="ascii")
    assert plain[-1] == "# weights  = KV cache  - reserve  . free"
    assert [len(line) for line in plain] == [len(line) for line in plan(*arguments)]


def test_bars_are_for_terminals(layers: Path) -> None:
    arguments = (layers, "--nodes", "2", "--budget", "32768")
    assert not any(mark in line for line in plan(*arguments) for mark in BLOCKS[:4])
    assert "\u2588" not in "".join(plan(*arguments, "--no-bars"))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    mine, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 61, 0, 0))
        with subprocess.Popen(
            [sys.executable, "-m", "streamload", "plan", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env=env | {"PYTHONIOENCODING": "utf-8"},
        ) as process:
            os.close(theirs)
            theirs = -1
            received = bytearray()
            try:
                while data := os.read(mine, 4096):
                    received += data
            except OSError:  # EIO: the other side is closed
                pass
            assert process.wait(60) == 0
    finally:
        os.close(mine)
        if theirs >= 0:
            os.close(theirs)
    bars = [line for line in received.decode().splitlines() if "\u2588" in line][:2]
    assert [len(line) for line in bars] == [61, 61]


def test_a_chart_of_a_plan(layers: Path, tmp_path: Path) -> None:
    """``--plot`` writes an SVG file with a bar for each node, beside JSON as beside the table."""
    chart = tmp_path / "plan.svg"
    arguments = (layers, "--nodes", "a,<b>", "--budget", "32768", "--json", "--plot", chart)
    (printed,) = plan(*arguments)
    assert len(json.loads(printed)["devices"]) == 2
    texts = {e.text for e in ElementTree.parse(chart).iter() if e.tag.endswith("}text")}
    assert {"a", "<b>", "weights", "free", "16.38 kB of 32.77 kB"} <= texts


def test_options_of_room_to_run(layers: Path) -> None:
    """plan and load take them alike: what is left free is in the plan that they print."""
    arguments = ("--context", "32", "--batch", "2", "--cache-dtype", "float32", "--reserve", "1kB")
    made = json.loads(plan(layers, "--nodes", "1", "--budget", "1MB", *arguments, "--json")[0])
    assert made["cache"] == {"context": 32, "batch": 2, "dtype": "float32"}
    assert made["devices"][0]["cache_nbytes"] == 4 * 64 * (2 * 16 * 4)
    assert made["devices"][0]["reserve_nbytes"] == 1000
    command = [sys.executable, "-m", "streamload", "load", layers, "--device", "host"]
    arguments = ("--budget", "100kB", "--context", "100000", "--no-progress")
    done = forked.run([*command, *arguments], forked.COMMANDS)
    assert done.returncode == 3
    assert "the KV cache" in done.stderr
