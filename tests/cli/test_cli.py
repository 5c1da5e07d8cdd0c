"""The commands, as people run them: real processes, their output, their exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import needs
import pytest
from make_checkpoint import PRESETS
from safetensors_files import write_safetensors, write_sparse

import streamload

COMMANDS = ("inspect", "plan", "load", "devices", "verify", "diff", "convert")


def run(*arguments: object, env: Mapping[str, str] | None = None, code: int = 0) -> tuple[str, str]:
    """Run a command and expect an exit code; gives stdout and stderr."""
    command = [sys.executable, "-m", "streamload", *arguments]
    done = forked.run(command, forked.COMMANDS, env=os.environ | (env or {}))
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def refused(*arguments: object, code: int) -> str:
    """Run a command that fails: nothing on stdout, one line on stderr, which is given."""
    return complaint(*run(*arguments, code=code))


def complaint(out: str, err: str) -> str:
    """Stderr of a command that failed, where that is one line and all that was printed."""
    assert out == ""
    assert err.startswith("streamload: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 6 layers of 4 kB in bfloat16, and its embedding."""
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.w" for i in range(6))]
    values = bytes(range(62)) * 66 + bytes(4)  # below 1: nothing overflows
    path = tmp_path_factory.mktemp("layers") / "model.safetensors"
    tensors = {name: ("BF16", (64, 32), values) for name in names}
    return write_safetensors(path, tensors, metadata={"format": "pt"})


# --- help and usage -------------------------------------------------------------------------------


def test_without_arguments_there_is_help() -> None:
    out, err = run()
    assert err == ""
    assert out == run("--help")[0]
    assert all(f"  {command} " in out for command in COMMANDS)
    assert not any(line.endswith("...") for line in out.splitlines()[1:])


def test_what_every_command_understands(
    here: Callable[..., tuple[str, str]], layers: Path, tmp_path: Path
) -> None:
    """-h is --help; --version; --quiet leaves results and errors, and --json what it asks for."""
    assert here("--version")[0] == here("-V")[0] == f"streamload {streamload.__version__}\n"
    assert here("-h") == here("--help")
    for command in (*COMMANDS, "bench"):
        said, _ = here(command, "-h")
        assert said == here(command, "--help")[0]
        assert "-q, --quiet" in said
    place = ("--device", "host", "--budget", "1GB")
    for quiet in ("-q", "--quiet"):
        assert here("load", layers, *place, "--verify", quiet) == ("", "")
        assert json.loads(here("load", layers, *place, quiet, "--json")[0])["tensors"] == 7
        assert here("convert", layers, tmp_path / quiet, "--dtype", "float16", quiet) == ("", "")
        asked = (layers, tmp_path / quiet, "--dtype", "float16", quiet)
        assert here("verify", *asked) == here("diff", *asked) == ("", "")
        assert here("diff", layers, tmp_path / quiet, quiet, code=1) == ("", "")
        other = ("--dtype", "bfloat16", quiet)
        said, complained = here("verify", layers, tmp_path / quiet, *other, code=1)
        assert said == "" and complained.count("\n") == 1
        assert here("inspect", layers, quiet) == here("inspect", layers)
        assert here("plan", layers, *place, quiet) == here("plan", layers, *place)
        assert complaint(*here("load", tmp_path / "nothing", quiet, code=1))
    assert here("load", layers, *place)[0].startswith("checkpoint ")  # the next is not quiet


def test_quiet_about_warnings(tmp_path: Path) -> None:
    """What overflows is a warning; asked to be quiet, the command does not mention it."""
    path = write_safetensors(
        tmp_path / "x.safetensors", {"w": ("F32", (2,), b"\xff\xff\x7f\x7f" * 2)}
    )
    asked = ("load", path, "--device", "host", "--dtype", "float16")
    assert "warning: " in run(*asked)[1]
    assert run(*asked, "--quiet") == ("", "")


def test_a_variant_of_a_folder(
    here: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out, fp16 = tmp_path / "in", tmp_path / "out", ("--variant", "fp16")
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {"w": ("F32", (48,), bytes(192))})
    write_safetensors(folder / "model.fp16.safetensors", {"w": ("F16", (48,), bytes(96))})
    for variant, nbytes in (((), 192), (fp16, 96)):
        assert json.loads(here("inspect", folder, "--json", *variant)[0])["nbytes"] == nbytes
        place = ("--device", "host", "--budget", "1GB")
        made = json.loads(here("plan", folder, "--json", *place, *variant)[0])
        loaded = json.loads(here("load", folder, "--json", "--verify", *place, *variant)[0])
        assert made["devices"][0]["resident_nbytes"] == loaded["read_nbytes"] == nbytes
    here("convert", folder, out, *fp16)
    assert here("verify", folder, out, *fp16)[0].startswith("equal: 1 tensor")
    here("verify", folder, out, code=1)
    assert "variant 'bf16'" in here("inspect", folder, "--variant", "bf16", code=1)[1]
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "leave --variant away" in here("load", folder, *fp16, code=2)[1]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_help_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
    here: Callable[..., tuple[str, str]],
    command: str,
    columns: str,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out, _ = here(command, "--help")
    assert f"Usage: streamload {command}" in out
    assert "--json" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "nope"),
        (["inspect"], "PATH"),
        (["inspect", "PATH", "more"], "more"),
        (["plan", "PATH", "--budgte", "3GB"], "--budgte"),
        (["plan", "PATH", "--budget", "3 parsecs", "--dtype", "float16"], "3 parsecs"),
        (["plan", "PATH", "--budget", "0", "--dtype", "float16"], "not a budget"),
        (["plan", "PATH", "--budget", "=3GB"], "DEVICE=SIZE"),
        (["plan", "PATH", "--nodes", "3"], "--budget"),
        (["plan", "PATH", "--nodes", "0", "--budget", "3GB"], "from 1 to"),
        (["plan", "PATH", "--nodes", "-2", "--budget", "3GB"], "from 1 to"),
        (["plan", "PATH", "--nodes", "a,,b", "--budget", "3GB"], "a,,b"),
        (["plan", "PATH", "--nodes", "a,a", "--budget", "3GB", "--dtype", "float16"], "a"),
        (["plan", "PATH", "--nodes", "3", "--budget", "3GB,4GB"], "2 budgets for 3 nodes"),
        (["plan", "PATH", "--nodes", "2", "--budget", "80%"], "80%"),
        (["plan", "PATH", "--split", "tensor", "--budget", "1GB"], "--split needs --nodes"),
        (["plan", "PATH", "--nodes", "2", "--budget", "1GB", "--split", "x"], "mesh such as 2x4"),
        (["plan", "PATH", "--nodes", "2", "--budget", "1GB", "--device", "CL"], "exclude"),
        (["plan", "PATH", "--budget", "1GB", "--device", "CL,,CPU"], "CL,,CPU"),
        (["load", "PATH", "--budget", "1GB,2GB"], "2 sizes for 0 devices"),
        (["load", "PATH", "--dtype", "int8"], "int8"),
        (["load", "PATH", "--dtype", "x=float99"], "float99"),
        (["load", "PATH", "--cast", "gpu"], "gpu"),
        (["load", "PATH", "--mapping", "gpt"], "gpt"),
        (["load", "PATH", "--device", "host"], "SUPPORT_BF16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
    here: Callable[..., tuple[str, str]],
    layers: Path,
    arguments: Sequence[str],
    message: str,
) -> None:
    """Exit code 2, one line that names what is wrong."""
    if message == "SUPPORT_BF16":
        monkeypatch.setenv("SUPPORT_BF16", "maybe")
    given = [str(layers) if argument == "PATH" else argument for argument in arguments]
    assert message in complaint(*here(*given, code=2))


def test_usage_from_outside(layers: Path) -> None:
    """The same as a process: exit code 2 and one line, with where to read on."""
    assert refused("plan", layers, "--budgte", "3GB", code=2).endswith(
        "(see streamload plan --help)\n"
    )


# --- inspect --------------------------------------------------------------------------------------


def test_inspect(layers: Path) -> None:
    """A line for each tensor, then how much there is, then the metadata."""
    out, err = run("inspect", layers)
    lines = out.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "shape", "bytes"]
    assert lines[1].split() == [
        "model.embed_tokens.weight",
        "bfloat16",
        "64",
        "x",
        "32",
        "4.10",
        "kB",
    ]
    assert lines[-2:] == ["7 tensors in 1 file, 28.67 kB: bfloat16 28.67 kB", "metadata format: pt"]
    assert (len(lines), err) == (10, "")


def test_inspect_as_json(layers: Path) -> None:
    """Everything that the headers say."""
    data = json.loads(run("inspect", layers, "--json")[0])
    assert (data["nbytes"], data["metadata"]) == (7 * 4096, {"format": "pt"})
    assert [t["name"] for t in data["tensors"]] == list(streamload.open_checkpoint(layers).tensors)
    first = data["tensors"][0]
    assert (first["dtype"], first["shape"], first["nbytes"]) == ("bfloat16", [64, 32], 4096)
    assert first["stop"] - first["start"] == 4096
    assert data["shards"][0]["file_nbytes"] == layers.stat().st_size


ODD = (
    "[bold]w[/bold]",
    ":smile:",
    "a\nb",
    "\x1b[31mred",
    "w\u202e",
    "Gewicht.ä",
    "重み",
    "",
    " x ",
)


def test_names_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    write_safetensors(path, {name: ("U8", (2,), bytes(2)) for name in ODD}, metadata={"a\x07": "b"})
    for encoding in ("utf-8", "ascii"):
        env = {"PYTHONIOENCODING": encoding}
        out, _ = run("inspect", path, env=env)
        assert len(out.splitlines()) == len(ODD) + 3
        assert "\x1b" not in out
        assert "\x07" not in out
        for shown in ("[bold]w[/bold]", ":smile:", r"a\nb", r"\x1b[31mred", r"w\u202e"):
            assert shown in out
        data = json.loads(run("inspect", path, "--json", env=env)[0])
        assert {t["name"] for t in data["tensors"]} == set(ODD)
    err = refused("load", path, "--device", "host", "--budget", "17", code=3)
    assert "\x1b" not in err


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["plan", "--json"]])
def test_a_reader_that_goes_away(tmp_path: Path, arguments: list[str]) -> None:
    """Like any other program: it ends, and says nothing."""
    path = tmp_path / "many.safetensors"
    write_safetensors(path, {f"layers.{i}.w": ("U8", (1,), b"0") for i in range(5000)})
    command, *rest = arguments
    argv = [sys.executable, "-m", "streamload", command, str(path), *rest]
    argv += ["--budget", "1GB", "--dtype", "float16"] * (command == "plan")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()


@pytest.mark.parametrize("what", ["nothing", "not safetensors", "truncated", "a folder without"])
def test_bad_input(
    here: Callable[..., tuple[str, str]], tmp_path: Path, layers: Path, what: str
) -> None:
    """Exit code 1, one line with the path."""
    path = tmp_path / "x.safetensors"
    if what == "not safetensors":
        path.write_bytes(b"hello, world")
    elif what == "truncated":
        path.write_bytes(layers.read_bytes()[:-1])
    elif what == "a folder without":
        path.mkdir()
    for command in ("inspect", "plan", "load"):
        assert str(path) in complaint(*here(command, path, code=1))
    assert str(path) in refused("inspect", path, code=1)


# --- plan -----------------------------------------------------------------------------------------


def test_plan_over_nodes(layers: Path) -> None:
    """A line for each node with what it holds, and how full it gets."""
    out, _ = run("plan", layers, "--nodes", "3", "--budget", "20kB", "--dtype", "float16")
    rows = [line.split() for line in out.splitlines()]
    titles = ["device", "holds", "tensors", "resident", "peak", "budget", "share", "per", "token"]
    assert rows[0] == titles
    assert [row[0] for row in rows[1:4]] == ["node0", "node1", "node2"]
    assert "node0   embedding, layer" in out
    assert "7 tensors from bfloat16 to float16 by llvm" in out
    assert all(row[-3].endswith("%") for row in rows[1:4])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--budget", "1MB"], {"device": 10**6}),
        (["--budget", "1MB,2MB"], {"node0": 10**6, "node1": 2 * 10**6}),
        (["--nodes", "a,b", "--budget", "1MB"], {"a": 10**6, "b": 10**6}),
        (["--nodes", "a, b", "--budget", "1MB, 3MB"], {"a": 10**6, "b": 3 * 10**6}),
        (["--device", "CL,CPU", "--budget", "1MB,2MB"], {"CL": 10**6, "CPU": 2 * 10**6}),
        (["--device", "CL,CPU", "--budget", "CPU=1MB,CL=2MB"], {"CL": 2 * 10**6, "CPU": 10**6}),
        (["--device", "CL", "--budget", "CL=1MB"], {"CL": 10**6}),
    ],
    ids=" ".join,
)
def test_budgets_and_where_they_go(
    here: Callable[..., tuple[str, str]],
    layers: Path,
    arguments: list[str],
    expected: dict[str, int],
) -> None:
    """One size for all, one for each, or by name; the JSON is a plan."""
    out, err = here("plan", layers, "--dtype", "float16", "--json", *arguments)
    plan = streamload.Plan.from_json(out)
    assert {d.device: d.budget_nbytes for d in plan.devices} == expected
    assert err == ""


def test_patterns_of_dtypes(layers: Path) -> None:
    out, _ = run(
        *("plan", layers, "--budget", "1MB", "--json"),
        *("--dtype", "*embed*=float32", "--dtype", "float16"),
    )
    plan = streamload.Plan.from_json(out)
    assert [p.dst.name for p in plan.placements] == ["float32"] + ["float16"] * 6


def test_what_does_not_fit(layers: Path) -> None:
    """Exit code 3, both numbers, and what would fit."""
    err = refused("plan", layers, "--budget", "10kB", "--dtype", "float16", code=3)
    for told in ("28672", "10000", "4 devices or nodes"):
        assert told in err
    refused("load", layers, "--budget", "10kB", "--device", "host", code=3)


def test_what_would_fit_is_said_in_flags(
    here: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    values = bytes(4 * 64 * 64)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6)]
    path = write_safetensors(
        tmp_path / "model.safetensors", {name: ("F32", (64, 64), values) for name in names}
    )
    for command in ("plan", "load"):
        asked = (command, path, "--device", "host", "--budget", "60kB")
        _, said = here(*asked, code=3)
        lines = re.findall(r"--\w+ \w+", said.partition("would fit: ")[2])
        assert "--dtype float16" in lines and "--quant q8_0" in lines
        assert not re.search(r"\w+=", said)
        for line in lines:
            here(*asked, *line.split())


def test_llama_3_8b_over_nodes(tmp_path: Path) -> None:
    """14 nodes of 3 GB hold it with at most 1.31 GB each, 6 hold it, 5 do not: exit code 3."""
    shapes = PRESETS["llama-3-8b"].tensors()
    path = write_sparse(tmp_path / "model.safetensors", {n: ("BF16", s) for n, s in shapes.items()})
    common = ("plan", path, "--budget", "3GB", "--dtype", "float16", "--nodes")
    plan = streamload.Plan.from_json(run(*common, 14, "--json")[0])
    assert max(d.resident_nbytes for d in plan.devices) <= 1_310_000_000
    assert len(streamload.Plan.from_json(run(*common, 6, "--json")[0]).devices) == 6
    assert "6 devices or nodes of 3.00 GB" in refused(*common, 5, code=3)
    heads = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(heads))
    for split, layers in (("tensor", "embedding, layers 0 to 31, head"), ("2x4", "layers 16 to")):
        lines = run(*common, 8, "--split", split)[0].splitlines()
        assert len(lines) == 9 and layers in lines[8] and "2.01 GB  3.00 GB" in lines[8]
    shares = json.loads(run(*common, 8, "--split", "2x4", "--json")[0])
    down = shares["first_slices"]["model.layers.0.mlp.down_proj.weight"]
    assert down == [[1, 0, 3584]] and shares["nodes"]["node5"]["part"] == 1
    said = refused(*common, 16, "--split", "tensor", code=2)
    assert "16 does not divide num_key_value_heads 8: sizes that divide: 2, 4, 8" in said
    small = ("plan", path, "--nodes", 8, "--split", "tensor", "--budget", "1GB")
    assert "does not fit on node0: needs 2.0" in refused(*small, code=3)


# --- load -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["host", "CPU", "CL", "CPU,CPU:1"])
def test_load_and_verify(layers: Path, name: str) -> None:
    if name != "host":
        needs.device(name.partition(",")[0])
    out, err = run("load", layers, "--device", name, "--budget", "1MB", "--verify")
    assert out.splitlines()[-1] == "verified: 7 tensors, byte by byte"
    assert all(len(line.split(None, 1)) == 2 for line in out.splitlines())
    assert "budget 1.00 MB" in out
    assert err == ""


def test_load_as_json(layers: Path) -> None:
    """The report and the verdict, nothing else on stdout."""
    budget = ("--budget", "1MB", "--device", "host")
    data = json.loads(run("load", layers, "--verify", "--json", *budget)[0])
    assert (data["tensors"], data["read_nbytes"]) == (7, 7 * 4096)
    assert (data["verified"], data["mismatches"]) == (True, [])
    assert data["budget_nbytes"] == {"host": 10**6}
    assert "verified" not in json.loads(run("load", layers, "--json", *budget)[0])


def test_warnings_are_one_line(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "m.safetensors", {"big": ("F32", (1,), b"\xff\xff\x7f\x7f")}
    )
    out, err = run("load", path, "--device", "host", "--dtype", "float16", "--json")
    assert json.loads(out)["counts"]["big"]["overflowed"] == 1
    assert err.startswith("streamload: warning: ")
    assert "big" in err
    assert err.count("\n") == 1
    out_of_range = ("--dtype", "float16", "--out-of-range", "error")
    assert "big" in refused("load", path, "--device", "host", *out_of_range, code=1)


def test_the_environment_chooses_the_device(layers: Path) -> None:
    env = {"STREAMLOAD_DEVICE": "host"}
    assert list(json.loads(run("load", layers, "--json", env=env)[0])["budget_nbytes"]) == ["host"]


def rest_of(terminal: int) -> bytes:
    seen = b""
    with suppress(OSError):  # the other end is closed
        while True:
            seen += os.read(terminal, 1000)
    os.close(terminal)
    return seen


def test_ctrl_c(tmp_path: Path) -> None:
    """In the middle of a load: the bar goes, one line says so, and the exit code is 130."""
    path = write_sparse(tmp_path / "big.safetensors", {"w": ("F32", [10**8])})
    arguments = ["load", str(path), "--device", "host", "--dtype", "float16", "--cast", "numpy"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "streamload", *arguments],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    seen = os.read(ours, 1000)  # the bar is there
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    seen += rest_of(ours)
    assert process.returncode == 130, seen
    assert seen.decode().rstrip().endswith("streamload: interrupted")
    assert b"Traceback" not in seen
    assert out == b""


@pytest.mark.parametrize("columns", [80, 40])
def test_lines_fit_the_terminal(tmp_path: Path, columns: int) -> None:
    names = {f"model.layers.{n}.mlp.weight": ("F32", (64, 64), bytes(4 * 64**2)) for n in range(4)}
    path = write_safetensors(tmp_path / "m.safetensors", names)
    arguments = ["plan", str(path), "--device", "host", "--budget", "1234.56MB"]
    plain, _ = run(*arguments)
    assert max(map(len, plain.splitlines())) > 80
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    command = [sys.executable, "-m", "streamload", *arguments]
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = rest_of(ours)
    assert process.wait(timeout=60) == 0
    lines = seen.decode().splitlines()
    words = plain.split()
    assert " ".join(lines).split()[: len(words)] == words  # a chart follows
    long = [line for line in lines if len(line) > columns]
    assert not [line for line in long if " " in line.strip()]
    sizes = re.findall(r"\d[\d.]* [kMG]?B\b", plain)
    assert sizes and all(any(size in line for line in lines) for size in sizes)


@pytest.mark.parametrize("entrance", ["module", "script"])
@pytest.mark.parametrize(("slow", "code"), [("numpy", -signal.SIGINT), ("torch", 130)])
def test_ctrl_c_while_modules_are_imported(
    layers: Path, tmp_path: Path, entrance: str, slow: str, code: int
) -> None:
    """The command's own end it at once; those of a framework end it as a load does."""
    (tmp_path / f"{slow}.py").write_text("import time; print('here', flush=True); time.sleep(60)")
    script = tmp_path / "streamload"  # as pip writes it
    script.write_text("from streamload.cli import main\nmain()\n")
    process = subprocess.Popen(
        [
            *(sys.executable, *(["-m", "streamload"] if entrance == "module" else [str(script)])),
            *("load", str(layers), "--device", "cpu"),
        ],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert err == ("" if code < 0 else "streamload: interrupted\n")


def test_a_program_that_calls_the_command_keeps_its_ctrl_c(
    here: Callable[..., tuple[str, str]], layers: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    here("inspect", layers)
    assert signal.getsignal(signal.SIGINT) is before


def closed(streams: str, *arguments: object) -> tuple[int, str]:
    """Run a command with streams that a shell closed; its exit code and what it printed."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {streams}', "sh", *(sys.executable, "-m", "streamload")]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_streams_that_are_closed(layers: Path, tmp_path: Path) -> None:
    """Daemons have none: everything works as ever, and what nobody reads is not said."""
    load = ("load", layers, "--device", "host", "--dtype", "float16")
    code, said = closed("2>&-", *load, "--json")
    assert (code, list(json.loads(said)["budget_nbytes"])) == (0, ["host"])
    assert closed(">&-", *load) == (0, "")
    assert closed("2>&-", *load, "--budget", "1kB") == (3, "")
    assert closed("2>&-", "load") == (2, "")
    assert closed("<&- >&- 2>&-", "convert", layers, tmp_path / "out", "--dtype", "float16")[0] == 0
    run("verify", layers, tmp_path / "out", "--dtype", "float16")


def test_files_do_not_take_the_place_of_streams(layers: Path) -> None:
    """What libraries in C say to a stderr that was closed goes nowhere, and not into a file."""
    code = (
        "import os, sys\n"
        "from streamload import cli\n"
        "cli.app = lambda *_, **__: [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)] != 3 *"
        " ['/dev/null']\n"
        "cli.main()\n"
    )
    command = f'{sys.executable} -c "$CODE" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], env=os.environ | {"CODE": code}).returncode == 0


# --- devices --------------------------------------------------------------------------------------


def test_devices_by_name() -> None:
    """What works, its memory, and what each dtype is there; other spellings are the same device."""
    needs.device("CPU")
    rows: list[dict[str, Any]] = json.loads(run("devices", "tinygrad:cpu:0", "host", "--json")[0])
    assert [(row["device"], row["works"]) for row in rows] == [("CPU", True), ("host", True)]
    assert rows[0]["dtypes"]["float32"] == "native"
    assert rows[0]["dtypes"]["complex64"] == "absent"
    out, _ = run("devices", "CPU", "host")
    assert out.splitlines()[0].startswith("CPU (tinygrad): works.")
    assert "  native: " in out


def test_a_device_by_a_wrong_name() -> None:
    """It is listed as what does not work, and the exit code says so."""
    out, _ = run("devices", "NOPE", code=1)
    assert out.startswith("NOPE: does not work: ")


# --- start-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_reading_headers_imports_no_framework(layers: Path, command: str) -> None:
    code = (
        "import sys\n"
        "from streamload.cli import main\n"
        "try: main()\n"
        "except SystemExit as done: assert done.code in (0, None), done.code\n"
        "for name in ('tinygrad', 'torch', 'rich.console'): assert name not in sys.modules, name\n"
    )
    stated = ["--budget", "1MB", "--dtype", "float16"] * (command == "plan")
    forked.fresh(code, command, layers, *stated)
