"""What an error says to quantise, where that makes a load fit: followed as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

import streamload
from streamload import Node
from streamload.errors import Fit, PlanInfeasibleError

torch = needs.module("torch")
st = needs.module("safetensors.torch")

LAYERS = 4
WIDTH = 256  # a matrix of 131 kB as bfloat16


def module(device: str = "meta") -> Any:
    with torch.device(device):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)}).to(torch.bfloat16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    st.save_file(module("cpu").state_dict(), tmp_path / "m.safetensors")
    return tmp_path


def suggested(call: Callable[..., Any], budget: Any) -> tuple[str, list[str]]:
    with pytest.raises(PlanInfeasibleError) as caught:
        call(budget)
    lines = [line for line in caught.value.would_fit if line.startswith("quant=")]
    if not lines:
        return "", []
    (line,) = lines
    found = re.fullmatch(r'quant="([a-z0-9_-]+)" \((.+)\)', line)
    assert found is not None, line
    return found[1], [
        need.rpartition(" ")[0].split()[-1] + need.split()[-1] for need in found[2].split(", ")
    ]


def into_arrays(path: Path, **options: Any) -> Any:
    """Load into arrays, which hold no codes."""
    arrays = {name: np.zeros(t.shape, np.float16) for name, t in module().state_dict().items()}
    return streamload.load_state_dict(arrays, path, progress=False, **options)


#: Calls of one device, and the budgets at which they name a format.
CALLS: dict[str, Callable[..., Any]] = {
    "plan": lambda path, **given: streamload.plan(path, **given),
    "plan cpu": lambda path, **given: streamload.plan(path, device="cpu", **given),
    "load": lambda path, **given: streamload.load_state_dict(
        None, path, device="host", progress=False, **given
    ),
    "torch": lambda path, **given: streamload.load_state_dict(
        module(), path, device="cpu", progress=False, **given
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("budget", "format"), [(300_000, "q8_0"), (200_000, "nf4")])
def test_one_device(path: Path, name: str, budget: int, format: str) -> None:
    """The format of least loss that fits, with the bytes that are enough for it."""
    call = CALLS[name]
    found, (need,) = suggested(lambda budget: call(path, budget=budget), budget)
    assert found == format
    for enough in (budget, need):
        made = call(path, budget=enough, quant=found)
        plan = made if isinstance(made, streamload.Plan) else made.plan
        assert any(p.coding is not None for p in plan.placements)
    assert suggested(lambda budget: call(path, budget=budget), 50_000) == ("", [])


def test_nodes(path: Path) -> None:
    """With what each of them takes."""

    def split(budgets: list[Any], **given: Any) -> Any:
        nodes = [Node(f"n{i}", budget) for i, budget in enumerate(budgets)]
        return streamload.split(path, nodes=nodes, **given)

    found, nbytes = suggested(split, [200_000] * 2)
    assert (found, len(nbytes)) == ("q8_0", 2)
    split(nbytes, quant=found)


def test_only_what_works_is_said(path: Path) -> None:
    """Not to arrays, which no module decodes, nor where weights are quantised already."""
    assert suggested(lambda budget: into_arrays(path, budget=budget), 300_000) == ("", [])
    call = CALLS["torch"]
    assert suggested(lambda budget: call(path, budget=budget, quant="int8"), 100_000) == ("", [])
    model = module()
    streamload.load_state_dict(model, path, device="cpu", quant="q8_0", progress=False)

    def again(budget: Any) -> Any:
        return streamload.load_state_dict(model, path, budget=budget, progress=False)

    assert suggested(again, 100_000) == ("", [])


def test_models_of_transformers(tmp_path: Path) -> None:
    """`from_pretrained` takes quant= as well, with what the model needs beside its weights."""
    transformers = needs.module("transformers")
    from streamload.transformers import from_pretrained

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)

    def load(budget: Any, **given: Any) -> Any:
        return from_pretrained(tmp_path, device="cpu", budget=budget, progress=False, **given)

    found, (need,) = suggested(load, "500KB")
    assert found == "q8_0"
    assert load(need, quant=found).streamload_report.errors
    assert load("500KB", quant=found)


def test_pipelines_are_told_of_their_own_options_alone() -> None:
    fits = [Fit("quant", '="nf4"', "1 B"), Fit("residence", '="auto"')]
    error = PlanInfeasibleError("cpu", 2, 1, would_fit=fits)
    assert error.without("quant", "device").would_fit == ('residence="auto"',)
