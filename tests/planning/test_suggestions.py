"""What errors say to write, is executed as it stands: each line goes further than its call did.

A row is a call that fails. The lines are those of ``suggestions``, ``would_fit``, ``instead`` and
``working``, and what stands behind "write" in the message.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import needs
import pytest
from safetensors_files import write_sparse

import streamload
from streamload.errors import DeviceNotFoundError, PlanInfeasibleError, StateDictMismatchError

torch = needs.module("torch")
transformers = needs.module("transformers")

import streamload.transformers as ours  # noqa: E402

LLAMA = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=64,
)
#: What lines may name.
NAMES = {"streamload": streamload, "transformers": transformers, "torch": torch}
NAMES |= {"LlamaForCausalLM": transformers.LlamaForCausalLM}
#: What a line ends with: how much it takes, or how many parameters it fills.
_FIGURES = re.compile(r" \([^()]*\)$")
#: Lines of prose, which name no argument.
_PROSE = re.compile(r"^\d+ devices or nodes of ")


def llama() -> Any:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(LLAMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suggestions") / "llama"
    llama().save_pretrained(path)
    return path


@dataclass(frozen=True)
class Failing:
    """A call that fails, and how many lines its error has to have."""

    call: Callable[..., Any]  # what is called; most take a path first
    given: Mapping[str, Any] = field(default_factory=dict)  # its arguments
    lines: int = 1  # how many lines it has at least
    model: Callable[[], Any] | None = None  # makes its first argument, or None
    prepare: Callable[[Path], Any] | None = None  # changes the checkpoint before

    def run(self, path: Path, **given: Any) -> Any:
        first = () if self.model is None else (self.model(),)
        return self.call(*first, path, **given)


def renamed(path: Path) -> None:
    load, save = (needs.module("safetensors.torch").__dict__[n] for n in ("load_file", "save_file"))
    (file,) = path.glob("*.safetensors")
    save({f"module.{name}": tensor for name, tensor in load(file).items()}, file)


def with_torch_file(path: Path) -> None:
    torch.save(llama().state_dict(), path / "pytorch_model.bin")


def with_gguf(path: Path) -> None:
    gguf_models = needs.module("gguf_models")
    source = gguf_models.write_model(path.parent / "of", "llama")
    streamload.convert(source, path.parent / "gguf", to="gguf", progress=False)
    (path.parent / "gguf" / "model.gguf").rename(path / "x.gguf")


def without_rows(path: Path) -> None:
    """Give the checkpoint a head of other classes than the model's."""
    load, save = (needs.module("safetensors.torch").__dict__[n] for n in ("load_file", "save_file"))
    (file,) = path.glob("*.safetensors")
    tensors = load(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:7].clone()
    save(tensors, file)


def with_long_rows(path: Path) -> None:
    """Replace the weights by one whose rows take more to quantise than the host may have."""
    (file,) = path.glob("*.safetensors")
    write_sparse(file, {"w.weight": ("F16", [8, 2**22])})


GPU = {"device": "cuda:0", "quant": "int8"}
LITTLE_HOST = streamload.Budget({"cuda:0": "9GB"}, host="8MiB")
load, pretrained = streamload.load_state_dict, ours.from_pretrained
ON_CPU = {"device": "cpu", "progress": False}
TIGHT = {**ON_CPU, "budget": 150_000}
CALLS: dict[str, Failing] = {
    "gguf_file": Failing(pretrained, {"gguf_file": "x.gguf"}, prepare=with_gguf),
    "use_safetensors": Failing(pretrained, {"use_safetensors": False}, prepare=with_torch_file),
    "offload_folder": Failing(pretrained, {"offload_folder": "x"}),
    "device_map": Failing(pretrained, {"device_map": {"": "disk"}}),
    "device_map of two": Failing(pretrained, {"device_map": {"model": "cpu", "lm_head": "disk"}}),
    "max_memory": Failing(pretrained, {"max_memory": {"cpu": "1MB", "disk": "9GB"}}),
    "load_in_8bit": Failing(pretrained, {"load_in_8bit": True}),
    "load_in_4bit": Failing(pretrained, {"load_in_4bit": True}),
    "a class": Failing(pretrained, {"model_class": "LlamaForCausalLM"}),
    "tokens": Failing(pretrained, {"tokens": 5}),
    "a device": Failing(pretrained, {"device": "gpu"}),
    "from_pretrained in little": Failing(pretrained, TIGHT, lines=3),
    "a load in little": Failing(load, TIGHT, lines=4, model=llama),
    "a plan in little": Failing(streamload.plan, {"device": "cpu", "budget": 150_000}, lines=2),
    "a host in little": Failing(
        streamload.plan, {**GPU, "budget": LITTLE_HOST}, prepare=with_long_rows
    ),
    "names": Failing(load, ON_CPU, model=llama, prepare=renamed),
    "names of an offload": Failing(streamload.offload, ON_CPU, model=llama, prepare=renamed),
    "shapes": Failing(load, {**ON_CPU, "strict": False}, model=llama, prepare=without_rows),
    "a family": Failing(load, {**ON_CPU, "mapping": "hf-llama"}, model=llama),
    "devices without a model": Failing(load, {"device": "gpu"}, model=lambda: None),
}
#: Arguments that a line takes the place of, by the row.
REPLACED = {
    "offload_folder": ("offload_folder",),
    "device_map": ("device_map",),
    "device_map of two": ("device_map",),
    "max_memory": ("max_memory",),
    "load_in_8bit": ("load_in_8bit",),
    "load_in_4bit": ("load_in_4bit",),
}


def lines_of(error: Exception) -> Iterator[str]:
    said = str(error)
    if isinstance(error, StateDictMismatchError):
        yield from (each.arguments for each in error.suggestions)
        yield from [error.instead] * bool(error.instead)
    elif isinstance(error, PlanInfeasibleError):
        lines = [line for line in error.would_fit if not _PROSE.match(line)]
        yield from (_FIGURES.sub("", line) for line in lines)
    elif isinstance(error, DeviceNotFoundError):
        yield from (f"device={name!r}" for name in error.working)
    elif "write " in said:
        yield said.partition("write ")[2]
    yield from re.findall(r'; (\w+="\w+") loads it$', said)


def follow(name: str, line: str, path: Path) -> Any:
    """Do what a line says: a call as it stands, or arguments in the call that failed."""
    row = CALLS[name]
    scope = {**NAMES, "model": row.model() if row.model is not None else None}
    if re.match(r"[\w.]+\(", line):
        return eval(line, scope)
    changed = eval(f"dict({line})", scope)
    rest = {key: value for key, value in row.given.items() if key not in REPLACED.get(name, ())}
    return row.run(path, **rest | changed)


#: Rows whose error takes seconds: tinygrad's devices are looked at, each in a process.
SLOW = {"devices without a model"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CALLS]
)
def test_each_line_goes_further(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMLOAD_DEVICE", "cpu")
    row, path = CALLS[name], tmp_path / "model"
    shutil.copytree(folder, path)
    if row.prepare is not None:
        row.prepare(path)
    with pytest.raises(Exception) as caught:
        row.run(path, **row.given)
    lines = list(lines_of(caught.value))
    assert len(lines) >= row.lines, caught.value
    for line in lines:
        made = follow(name, line, path)
        for offloaded in (made, getattr(made, "streamload_offload", None)):
            if hasattr(offloaded, "close"):
                offloaded.close()
