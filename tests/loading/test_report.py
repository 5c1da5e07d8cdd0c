"""The report of a load: right fields, a short table, and JSON."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import needs
import numpy as np
import pytest
from safetensors_files import write_safetensors

import streamload
from streamload import CastCounts, Plan
from streamload.core.units import format_bytes
from streamload.loading.report import device_map


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two tensors of float32, one of which rounds and flushes as float16, and one of ids."""
    tensors = {
        "exact": ("F32", (2, 2), np.ones(4, np.float32).tobytes()),
        "ids": ("I64", (3,), np.arange(3).tobytes()),
        "inexact": ("F32", (3,), np.array([0.1, 1e-30, 2], np.float32).tobytes()),
    }
    return write_safetensors(tmp_path / "m.safetensors", tensors)


def load(path: Path, device: str = "host") -> streamload.LoadReport:
    return streamload.load_state_dict(
        None, path, device=device, dtype="float16", budget="1MB", progress=False
    )


@pytest.mark.parametrize("device", ["host", "CPU", "CL"])
def test_numbers(path: Path, device: str) -> None:
    """What was read, what is resident, what was predicted, held and measured, and the counts."""
    if device != "host":
        needs.device(device)
    report = load(path, device)
    assert report.path == str(path)
    assert report.read_nbytes == 16 + 24 + 12
    assert report.resident_nbytes == report.plan.resident_nbytes >= 8 + 24 + 6
    peak_nbytes = report.plan.device(device).peak_nbytes
    process_nbytes = report.plan.process_nbytes
    before = report.predicted_nbytes["process"] - process_nbytes  # the plan, the compiler
    predicted = {device: peak_nbytes, "staging": 0, "process": process_nbytes + before}
    assert report.predicted_nbytes == predicted
    assert 0 <= before < 50_000_000
    assert peak_nbytes < process_nbytes < peak_nbytes + 900_000
    assert report.held_nbytes[device] <= report.predicted_nbytes[device]
    assert 0 < report.stream_seconds <= report.seconds
    assert report.gigabytes_per_second == report.read_nbytes / 1e9 / report.seconds
    assert report.counts == {"inexact": CastCounts(overflowed=0, flushed=1, rounded=1)}
    assert (report.skipped, report.missing, report.tied) == ((), (), ())
    assert report.state_dict.keys() == {"exact", "ids", "inexact"}
    if device != "host":
        assert 0 < report.measured_nbytes[device] <= report.predicted_nbytes[device]


def test_the_table_is_short(path: Path) -> None:
    report = load(path)
    lines = str(report).splitlines()
    assert lines[0].split(None, 1) == ["checkpoint", str(path)]
    assert len({len(line) - len(line.split("  ", 1)[1].lstrip()) for line in lines}) == 1
    assert len(lines) <= 8
    assert all(len(line) <= 120 for line in lines[1:])
    for told in ("tensors", "3", "budget 1.00 MB", "1 flushed to zero, 1 rounded"):
        assert told in str(report)


def test_json(path: Path) -> None:
    """All but the tensors; numbers are numbers."""
    report = load(path)
    data = json.loads(report.to_json())
    assert data["digest"] == report.plan.digest
    assert data["budget_nbytes"] == {"host": 10**6}
    assert data["counts"] == {"inexact": {"overflowed": 0, "flushed": 1, "rounded": 1}}
    assert data["tensors"] == 3
    for name in ("read_nbytes", "resident_nbytes", "seconds", "held_nbytes", "measured_nbytes"):
        assert data[name] == getattr(report, name)
    assert "state_dict" not in data


def test_what_the_process_grew_by_stands_beside_what_was_predicted(tmp_path: Path) -> None:
    numel = 8_000_000
    tensors = {"w": ("F32", [numel], np.arange(numel, dtype=np.float32).tobytes())}
    report = streamload.load_state_dict(
        None, write_safetensors(tmp_path / "m.safetensors", tensors), device="host", progress=False
    )
    measured, predicted = report.measured_nbytes["process"], report.predicted_nbytes["process"]
    assert predicted >= 32_000_000
    assert report.process_ratio == measured / predicted
    assert report.process_ratio == pytest.approx(1, abs=0.3)
    (line,) = (line for line in str(report).splitlines() if line.startswith("process grew by"))
    told = (
        format_bytes(measured),
        f"predicted {format_bytes(predicted)}",
        f"({measured / predicted:.1%})",
    )
    assert all(text in line for text in told)
    data = json.loads(report.to_json())
    assert data["predicted_nbytes"]["process"] == predicted
    assert data["process_ratio"] == report.process_ratio


def test_a_report_does_not_print_its_tensors(path: Path) -> None:
    assert "array" not in repr(load(path))


def test_a_prompt_and_a_notebook_show_the_table(tmp_path: Path) -> None:
    """Report and plan print alike however many tensors there are; a notebook has bars below."""
    tensors = {f"layers.{n}.<w>": ("F32", (2,), bytes(8)) for n in range(300)}
    report = load(write_safetensors(tmp_path / "m.safetensors", tensors))
    for shown in (report, report.plan):
        assert repr(shown) == str(shown)
        assert len(repr(shown)) < 1000
        html = shown._repr_html_()
        assert html.startswith(f"<pre>{escape(str(shown))}</pre>")
        assert ElementTree.fromstring(html[html.index("<svg") :]).tag.endswith("svg")
        assert "1.00 MB" in html[html.index("<svg") :]
    shown = repr(report.plan.placements)
    assert len(shown) < 1000
    assert "layers.0.<w>" in shown
    assert shown.endswith("and 292 more")


def test_every_report_has_html(tmp_path: Path) -> None:
    source = write_safetensors(tmp_path / "m.safetensors", {"<w>": ("F32", (2,), bytes(8))})
    out = tmp_path / "out"
    shown = [
        streamload.convert(source, out, dry_run=True, progress=False).plan,
        streamload.convert(source, out, progress=False),
        streamload.verify_checkpoint(out, progress=False),
        streamload.diff(source, out, progress=False),
        streamload.split(source, nodes=[streamload.Node("a", "1GB")]),
        streamload.plan_offload(source, device="host", budget="1GB"),
    ]
    for each in shown:
        assert each._repr_html_().startswith(f"<pre>{escape(str(each))}</pre>"), type(each)


def test_json_holds_the_plan(path: Path) -> None:
    report = load(path)
    data = json.loads(report.to_json())
    assert Plan.from_json(json.dumps(data["plan"])) == report.plan


def test_what_was_left_out_is_in_the_table(path: Path) -> None:
    array = np.zeros((2, 2), np.float32)
    model = {"exact": array, "again": array, "more": np.zeros(1)}
    report = streamload.load_state_dict(model, path, strict=False, progress=False)
    assert report.missing == ("more",)
    assert report.tied == ("again",)
    assert set(report.skipped) == {"ids", "inexact"}
    assert "1 (1 tied, 2 skipped, 1 missing)" in str(report)


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    report = load(write_safetensors(tmp_path / "m.safetensors", {}))
    assert (report.read_nbytes, report.resident_nbytes, report.state_dict) == (0, 0, {})
    assert report.process_ratio == 0.0
    assert json.loads(report.to_json())["gigabytes_per_second"] == 0.0
    assert "tensors" in str(report)


def test_a_device_map_names_the_largest_modules_in_one_place() -> None:
    """In the form of accelerate: numbers for CUDA's devices, "" for a model in one place."""
    assert device_map({"a.weight": "cuda:0", "b.c.weight": "cuda:0"}) == {"": 0}
    assert device_map({"weight": "cpu"}) == {"": "cpu"}
    split = {
        "model.embed.weight": "cuda:0",
        "model.layers.0.a.weight": "cuda:0",
        "model.layers.0.b.weight": "cuda:0",
        "model.layers.1.a.weight": "cuda:1",
        "model.norm.weight": "cuda:1",
        "head.weight": "cpu",
    }
    assert device_map(split) == {
        "model.embed": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "head": "cpu",
    }


def test_a_module_in_two_places_names_its_own_tensors() -> None:
    split = {"a.weight": "cuda:0", "a.bias": "cuda:1", "scale": "cpu"}
    assert device_map(split) == {"a.weight": 0, "a.bias": 1, "scale": "cpu"}


def test_a_device_map_covers_what_is_not_stored() -> None:
    """Buffers that are computed go where the first tensor of the module around them is."""
    split = {"model.embed.weight": "cuda:0", "model.norm.weight": "cuda:1"}
    found = device_map(split, ["model.rotary.inv_freq", "model.norm.other", "top"])
    assert found == {"model.embed": 0, "model.norm": 1, "model.rotary": 0, "top": 0}
