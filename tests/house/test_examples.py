"""The examples: each is run as people run it, as a process, on a tiny checkpoint."""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import forked
import needs
import pytest

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"

# what an example imports beyond the library's own dependencies
NEEDED = {
    "bert.py": ("tokenizers",),
    "own_loop.py": ("torch",),
    "pipeline.py": ("torch",),
    "torch_dispatch.py": ("torch", "accelerate"),
    "torch_module.py": ("torch",),
    "transformers_model.py": ("torch", "transformers"),
}


def _start(name: str, *arguments: object, env: Mapping[str, str] | None = None) -> forked.Process:
    imported = forked.TORCH if "torch" in NEEDED.get(name, ()) else forked.COMMANDS
    command = [sys.executable, EXAMPLES / name, *arguments]
    return forked.start(command, imported, env={**os.environ, **(env or {})})


def _said(*processes: forked.Process) -> list[str]:
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, complaints) in zip(processes, said, strict=True):
        assert process.returncode == 0, complaints
    return [printed for printed, _ in said]


def _run(name: str, *arguments: object) -> str:
    (said,) = _said(_start(name, *arguments))
    return said


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--help` of each example says what it does, in the words of its docstring."""
    for module in NEEDED.get(name, ()):
        needs.module(module)
    first = (EXAMPLES / name).read_text().split('"""')[1].partition("\n\n")[0]
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert not ended.value.code
    assert " ".join(first.split()) in " ".join(capsys.readouterr().out.split())


def test_llama_loads_and_predicts(small_checkpoint: Path) -> None:
    needs.device("CPU")
    said = _run("llama.py", small_checkpoint, "--budget", "2MB", "--device", "CPU")
    assert "budget 2.00 MB" in said
    assert said.splitlines()[-1].startswith("next token: ")


def test_plain_state_dict_lists_every_tensor(small_checkpoint: Path) -> None:
    arguments = ("--device", "host", "--budget", "2MB", "--dtype", "float32")
    said = _run("plain_state_dict.py", small_checkpoint, *arguments)
    listed = [line.split()[:2] for line in said.splitlines() if line.startswith(("model.", "lm_"))]
    assert ["model.embed_tokens.weight", "float32"] in listed
    assert len(listed) == 12


def test_two_devices_prints_the_plan_and_where_things_are(small_checkpoint: Path) -> None:
    needs.device("CPU")
    said = _run("two_devices.py", small_checkpoint, "--budgets", "500kB", "500kB")
    assert "CPU     embedding, layer" in said
    counts = [int(line.split()[1]) for line in said.splitlines() if line.endswith(" tensors")]
    assert sum(counts) == 12
    assert len(counts) == 2


def test_too_small_prints_one_error_with_the_numbers(small_checkpoint: Path) -> None:
    said = _run("too_small.py", small_checkpoint, "--budget", "10kB", "--device", "host")
    assert "but the budget is 10.00 kB (10000 bytes)" in said
    assert said.splitlines()[-1].startswith("short by ")


@pytest.mark.slow
def test_bert_compares_sentences(minilm: Path) -> None:
    needs.device("CPU")
    needs.module("tokenizers")
    sentences = ("A man is eating.", "Someone has a meal.", "The stock market fell.")
    arguments = (minilm, *sentences, "--device", "CPU", "--budget", "50MB")
    # without tinygrad's optimisations its kernels take a third of the time to compile
    (said,) = _said(_start("bert.py", *arguments, env={"NOOPT": "1"}))
    rows = [[float(x) for x in line.split()[:3]] for line in said.splitlines()[-3:]]
    assert rows[0][0] == pytest.approx(1, abs=1e-3)
    assert rows[0][1] > 0.5 > 0.3 > rows[0][2]


def test_torch_module_loads_and_predicts_as_transformers_does(small_checkpoint: Path) -> None:
    torch = needs.module("torch")
    transformers = needs.module("transformers")
    arguments = ("--device", "cpu", "--budget", "2MB", "--dtype", "float32")
    said = _run("torch_module.py", small_checkpoint, *arguments)
    assert "budget 2.00 MB" in said
    theirs = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype="float32")
    with torch.no_grad():
        logits = theirs(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
    assert said.splitlines()[-1].split()[2::2] == [str(t) for t in logits.topk(5).indices.tolist()]


def test_own_loop_predicts_as_transformers_does(small_checkpoint: Path) -> None:
    torch = needs.module("torch")
    transformers = needs.module("transformers")
    arguments = ("--device", "cpu", "--budget", "160kB", "--dtype", "float32")
    said = _run("own_loop.py", small_checkpoint, *arguments)
    assert "3 passes" in said and "stream " in said
    theirs = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype="float32")
    ids = torch.tensor([[1, 2, 3, 4]])
    for _ in range(3):
        with torch.no_grad():
            ids = torch.cat((ids, theirs(ids).logits[:, -1:].argmax(-1)), dim=1)
    assert said.splitlines()[-1].split()[1:] == [str(token) for token in ids[0].tolist()]


@pytest.mark.slow
def test_two_devices_plans_without_them(small_checkpoint: Path) -> None:
    needs.module("torch")
    devices = ("--devices", "cuda:98", "cuda:99", "--budgets", "5MB", "5MB")
    *plan, last = _run("two_devices.py", small_checkpoint, *devices).splitlines()
    assert plan[1].startswith("cuda:98  embedding, layer")
    assert plan[2].startswith("cuda:99  ") and "head" in plan[2]
    assert last.startswith("The plan alone, since it takes two devices to load: device cuda:98: ")


@pytest.mark.slow  # the README runs the same
def test_torch_dispatch_runs_what_accelerate_dispatched(small_checkpoint: Path) -> None:
    """The report's device map is what accelerate takes; one device is enough."""
    needs.module("torch")
    needs.module("accelerate")
    said = _run("torch_dispatch.py", small_checkpoint, "--devices", "cpu", "--budgets", "2MB")
    assert "everything: cpu" in said
    assert said.splitlines()[-1].startswith("next token: ")


def test_transformers_model_generates_what_transformers_does(small_checkpoint: Path) -> None:
    torch = needs.module("torch")
    transformers = needs.module("transformers")
    arguments = ("--device", "cpu", "--budget", "2MB", "--dtype", "float32", "--count", "4")
    said = _run("transformers_model.py", small_checkpoint, *arguments)
    assert "budget 2.00 MB" in said
    theirs = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint, dtype="float32")
    tokens = theirs.generate(torch.tensor([[1, 2, 3, 4]]), do_sample=False, max_new_tokens=4)
    assert said.splitlines()[-1].split() == ["tokens:", *map(str, tokens[0].tolist())]


def test_pipeline_predicts_the_same_in_one_process_and_in_two(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    torch = needs.module("torch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    one, two = tmp_path / "one", tmp_path / "two"
    alone, first, last = _said(
        _start("pipeline.py", small_checkpoint, "--budget", "210kB", "--logits", one),
        *(
            _start(
                *("pipeline.py", small_checkpoint, "--budget", "150kB", "--logits", two),
                env={"RANK": rank, **meeting},
            )
            for rank in "01"
        ),
    )
    assert "next token" not in first
    assert last.splitlines()[-1:] == alone.splitlines()[-1:]
    assert last.startswith("next token: ")
    assert torch.equal(torch.load(one), torch.load(two))


def test_pipeline_says_where_ranks_of_mpirun_meet(small_checkpoint: Path) -> None:
    needs.module("torch")
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    process = _start(
        "pipeline.py", small_checkpoint, env={**rank, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    )
    _, complaint = process.communicate()
    assert process.returncode == 1
    assert "write mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500" in complaint


@pytest.mark.slow
def test_pipeline_under_mpirun(small_checkpoint: Path) -> None:
    """Two ranks of one host need no more than the command."""
    needs.module("torch")
    if shutil.which("mpirun") is None:
        needs.lacking("mpirun is not installed (Debian: openmpi-bin)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, EXAMPLES / "pipeline.py", small_checkpoint, "--budget", "150kB"]
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *command],
        env={**os.environ, "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("next token: ") == 1
