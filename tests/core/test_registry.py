"""A package of a stranger: what its entry points lead to is found, and used."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import forked
import pytest
from safetensors_files import write_safetensors

from streamload.core.registry import Registry
from streamload.devices.names import FrameworkRow

DEVICE = """
from dataclasses import replace

from streamload.devices.host import HostDevice, HostFramework
from streamload.devices.names import FrameworkRow

ROW = FrameworkRow(
    name="acme", framework="acme.device:FRAMEWORK", tensors=("acme.Chip",), spelling="chip"
)

class Chip(HostDevice):
    name = "chip"

    @property
    def info(self):
        return replace(super().info, name="chip", framework="acme")

class Acme(HostFramework):
    name = "acme"

    def canonical(self, name):
        return "chip"

    def device(self, name):
        return Chip()

    def candidates(self):
        return ("chip",)

FRAMEWORK = Acme()
"""
ENGINE = """
from streamload.distributed.group import Alone
from streamload.distributed.launch import EngineRow

ROW = EngineRow(
    name="wire", engine="acme.engine", library="acme.engine", hints=("torch",), needs="acme"
)

class Wire:
    pass

def is_group(thing):
    return isinstance(thing, Wire)

def wrap(group, timeout, met):
    return Alone()
"""
FORMAT = """
from streamload.formats.reader import Format

ROW = Format(
    name="acme",
    reads="acme.reader:Reader",
    writes="acme.writer:Writer",
    suffixes=(".acme",),
    magic=b"ACME",
)
"""
READER = """
from streamload.core.dtypes import BY_CODE
from streamload.core.tensors import TensorInfo
from streamload.files.header import Header
from streamload.formats.reader import FormatReader

class Reader(FormatReader):
    def read_header(self, file):
        info = TensorInfo("w", BY_CODE["F16"], (2,), file.path, 4, file.nbytes)
        return Header(file.path, file.nbytes, 4, (info,), {}, format="acme")
"""
WRITER = """
from streamload.formats.writer import FormatWriter, placed

class Writer(FormatWriter):
    name = "acme"

    def files(self, lists, max_nbytes):
        return [placed("model.acme", b"ACME", [each for listed in lists for each in listed])]
"""
SCHEMES = """
from streamload.codecs.scheme import LibraryRow

ROW = LibraryRow(
    name="acme", library="acme.library:LIBRARY", schemes=("acme8",), leaves="acme_codes"
)
"""
LIBRARY = """
from streamload.codecs.scheme import SCHEMES, Codec, Library
from streamload.codecs.weights import QuantizedWeight

class Acme8(Codec):
    name = "acme8"

    def of(self, shape, src):
        return SCHEMES["int8"].of(shape, src)

def find(layouts, codes):
    return QuantizedWeight("acme", "w", {"weight": codes}, codes.shape, (1,), 8)

LIBRARY = Library(Acme8(), find=find)
"""
#: What a program does with each, and the modules of the package that it imports.
USES = {
    "schemes": (
        "from streamload.codecs.scheme import SCHEMES\n"
        "assert streamload.open_checkpoint('codes.safetensors').groups['w'].kind == 'acme'\n"
        "assert 'acme8' in SCHEMES\n"
        "streamload.convert('floats.safetensors', 'out', quant='acme8', progress=False)\n"
        "assert 'w_scale' in streamload.open_checkpoint('out').tensors\n",
        {"acme.schemes", "acme.library"},
    ),
    "formats": (
        "streamload.convert('m.safetensors', 'out', to='acme', progress=False)\n"
        "assert open('out/model.acme', 'rb').read() == b'ACME\\0\\x3c\\0\\x40'\n"
        "for path in ('out', 'out/model.acme'):\n"
        "    report = streamload.load_state_dict(None, path, device='host')\n"
        "    assert report.state_dict['w'].tolist() == [1, 2]",
        {"acme.format", "acme.reader", "acme.writer"},
    ),
    "devices": (
        "for name in ('chip', 'acme:chip'):\n"
        "    report = streamload.load_state_dict(None, 'm.safetensors', device=name)\n"
        "    assert [d.device for d in report.plan.devices] == ['chip']\n"
        "    assert report.state_dict['w'].tolist() == [1, 2]\n"
        "try:\n"
        "    streamload.stream_layers('m.safetensors', device='chip', budget='8MB')\n"
        "except streamload.errors.OffloadError as error:\n"
        "    assert 'not acme' in str(error), error\n"
        "from streamload.devices.names import framework_of\n"
        "from acme.device import Chip\n"
        "assert framework_of({'layers': [Chip()]}) == 'acme'",
        {"acme.device"},
    ),
    "engines": (
        "from acme.engine import Wire\n"
        "report = streamload.distributed.load_state_dict(\n"
        "    None, 'm.safetensors', device='host', group=Wire())\n"
        "assert report.state_dict['w'].tolist() == [1, 2]",
        {"acme.engine"},
    ),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "acme").mkdir()
    codes = {"__init__": "", "device": DEVICE, "engine": ENGINE}
    codes |= {"format": FORMAT, "reader": READER, "writer": WRITER}
    codes |= {"schemes": SCHEMES, "library": LIBRARY}
    for name, code in codes.items():
        (tmp_path / "acme" / f"{name}.py").write_text(code)
    points = {"devices": "device", "engines": "engine", "formats": "format", "schemes": "schemes"}
    lines = (f"[streamload.{group}]\nacme = acme.{name}:ROW" for group, name in points.items())
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(lines))
    write_safetensors(tmp_path / "m.safetensors", {"w": ("F16", (2,), b"\0\x3c\0\x40")})
    write_safetensors(tmp_path / "codes.safetensors", {"acme_codes": ("U8", (2,), b"\1\2")})
    write_safetensors(tmp_path / "floats.safetensors", {"w": ("F32", (2, 64), bytes(512))})
    return tmp_path


def run(site: Path, code: str) -> None:
    forked.fresh(code, cwd=site)


@pytest.mark.parametrize("group", USES)
def test_a_strangers_row_is_met(site: Path, group: str) -> None:
    """By a name or by a file's facts; modules of its other rows stay where they are."""
    code, modules = USES[group]
    seen = "{name for name in sys.modules if name.startswith('acme.')}"
    run(site, f"import sys, streamload\n{code}\nassert {seen} == {modules}, {seen}")


def test_a_plain_load_looks_for_no_entry_point(site: Path) -> None:
    run(
        site,
        "import importlib.metadata as metadata, streamload\n"
        "metadata.entry_points = None\n"
        "streamload.load_state_dict(None, 'm.safetensors', device='host')\n",
    )


def test_a_row_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint("one", "sys:nothing", "streamload.devices"),
        metadata.EntryPoint("two", "sys:path", "streamload.devices"),
        metadata.EntryPoint("three", "acme_lacks_this", "streamload.devices"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    host = FrameworkRow(name="host", framework="")
    rows = Registry("streamload.devices", FrameworkRow, host)
    with pytest.warns(UserWarning) as caught:
        assert list(rows.values()) == [host]
    said = [str(warned.message) for warned in caught]
    reasons = (
        "one = sys:nothing: ",
        "two = sys:path: it is no FrameworkRow, but list",
        "acme_lacks",
    )
    for text, reason in zip(said, reasons, strict=True):
        assert "cannot use the entry point streamload.devices: " in text and reason in text
