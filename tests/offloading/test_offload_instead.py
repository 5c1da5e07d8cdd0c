"""An error about too little room names offloading, where that fits."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import offloading_models as models
import pytest
import torch
from torch import nn

import streamload
from streamload.errors import PlanInfeasibleError
from streamload.transformers import from_pretrained


def _suggested(error: PlanInfeasibleError, begins: str) -> str | None:
    found = [line for line in error.would_fit if line.startswith(begins)]
    assert len(found) < 2
    return found[0] if found else None


def _nbytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3-moe", "llama tied", "gpt2", "bert")
        ),
    ],
)
def test_the_suggested_call_runs_under_random_budgets(name: str, tmp_path: Path) -> None:
    """It is never refused, it takes and reads what it says, and small budgets have none."""
    path = models.save(models.built(name), tmp_path / "model")
    resident = models.built(name)
    everything = streamload.load_state_dict(resident, path, device="cpu").resident_nbytes
    expected = models.logits(resident)
    rng = random.Random(name)
    budgets = [rng.randrange(1, everything) for _ in range(20)]
    said = set()
    for budget in sorted(budgets):
        model = models.built(name)
        with pytest.raises(PlanInfeasibleError) as caught:
            streamload.load_state_dict(model, path, device="cpu", budget=budget, cast="numpy")
        line = _suggested(caught.value, "streamload.offload(")
        said.add(line is not None)
        if line is None:
            assert said == {False}, "a larger budget had none"
            with pytest.raises(PlanInfeasibleError):
                streamload.offload(model, path, device="cpu", budget=budget, cast="numpy")
            continue
        call, numbers = line.rsplit(" (", 1)
        assert f"budget={budget}" in call and 'cast="numpy"'.replace('"', "'") in call
        with eval(call, {"streamload": streamload, "model": model}) as offloaded:
            needs, reads = re.findall(r"[\d.]+ [kM]?B", numbers)
            assert _nbytes(needs) == pytest.approx(offloaded.plan.needed_nbytes, rel=0.01)
            whole = offloaded.plan.residency.pass_nbytes + offloaded.plan.token_nbytes
            assert _nbytes(reads) == pytest.approx(whole, rel=0.01)
            assert torch.equal(models.logits(model), expected)
    assert said == {False, True}


def test_a_plan_and_from_pretrained_name_theirs(llama: Path) -> None:
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.plan(llama, budget="500kB", device="cpu", dtype="float32")
    line = _suggested(caught.value, "streamload.plan_offload(")
    assert line is not None
    made = eval(line.rsplit(" (", 1)[0], {"streamload": streamload})
    assert made.residency.absent and made.needed_nbytes <= 500_000
    with pytest.raises(PlanInfeasibleError) as caught:
        from_pretrained(llama, budget="900kB", device="cpu")
    line = _suggested(caught.value, "offload=True (")
    assert line is not None and "streamload.offload" not in str(caught.value)
    model = from_pretrained(llama, budget="900kB", device="cpu", offload=True)
    assert model.streamload_offload.plan.residency.absent
    model.streamload_offload.close()


def test_nothing_is_said_where_offload_would_be_refused(llama: Path) -> None:
    state = dict(models.built("llama").state_dict())

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in models.built("llama").named_parameters():
                self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))

    def flat(name: str) -> str:
        return name.replace(".", "_")

    refused: list[tuple[Any, dict[str, Any]]] = [
        (state, {"device": "cpu"}),
        (None, {"device": "cpu"}),
        (models.built("llama"), {"device": "cpu", "quant": {"*up_proj*": "int8"}}),
        (Flat(), {"device": "cpu", "rename": flat}),
    ]
    for model, options in refused:
        with pytest.raises(PlanInfeasibleError) as caught:
            streamload.load_state_dict(model, llama, budget=500_000, **options)
        assert "streamload.offload" not in str(caught.value)
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.plan(llama, device=["cpu", "host"], budget={"cpu": 10_000, "host": 10_000})
    assert "offload" not in str(caught.value)


def test_arguments_that_are_long_are_left_to_the_caller(llama: Path) -> None:
    names = {name: name for name in models.built("llama").state_dict()}
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.load_state_dict(
            models.built("llama"), llama, device="cpu", budget="500kB", rename=names, strict=False
        )
    line = _suggested(caught.value, "streamload.offload(")
    assert line is not None
    assert "budget='500kB', device='cpu', rename=..., strict=False)" in line
