"""What a plan says that it needs is enough: as a budget of the plan, and of the load."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from parameters import few
from safetensors_files import write_safetensors

import streamload
from streamload import Node
from streamload.core.dtypes import BY_CODE, BY_NAME
from streamload.errors import PlanInfeasibleError

needs.module("torch")

FORMATS = (None, "auto", "nf4", "nf4-nested", "fp4", "int8", "bitsandbytes-int8", "q8_0", "q4_0")
IN_BLOCKS = ("q8_0", "q4_0")
DTYPES = (None, "float16", "float32", "bfloat16", "checkpoint")

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of(numbers: random.Random, quant: str | None) -> Shapes:
    """Those of a small model with layers, most of them multiples of nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(numbers.randint(1, 4)):
        for name in ("q", "up", "down")[: numbers.randint(1, 3)]:
            columns = 32 * numbers.randint(1, 5) if quant in IN_BLOCKS else numbers.randint(1, 160)
            shapes[f"model.layers.{layer}.{name}.weight"] = (numbers.randint(1, 40), columns)
        shapes[f"model.layers.{layer}.norm.weight"] = (numbers.randint(1, 77),)
    return shapes | {"embed.weight": (numbers.randint(1, 50), numbers.randint(1, 50))}


def written(numbers: random.Random, path: Path, shapes: Shapes) -> Path:
    """Write tensors of random floats' dtypes; all are zeros."""
    codes = {name: numbers.choice(("F32", "F16", "BF16")) for name in shapes}
    nbytes = {n: BY_CODE[codes[n]].nbytes(math.prod(shape)) for n, shape in shapes.items()}
    tensors = {n: (codes[n], shape, bytes(nbytes[n])) for n, shape in shapes.items()}
    return write_safetensors(path, tensors)


def needed(call: Callable[[int], Any]) -> int:
    with pytest.raises(PlanInfeasibleError) as caught:
        call(1)
    return caught.value.needed_nbytes


def check_device(numbers: random.Random, path: Path, options: Mapping[str, Any]) -> None:
    """A plan for one device, which is looked at by the load alone."""
    device = numbers.choice(("host", "cpu", None))

    def plan(budget: int | str) -> streamload.Plan:
        return streamload.plan(path, budget=budget, device=device, **options)

    made = plan("1GB")
    size, unit = str(made).splitlines()[1].split()[4:6]
    for budget in (made.devices[0].needed_nbytes, needed(plan), f"{size}{unit}"):
        plan(budget)
        on = {"device": device or "cpu", "progress": False, **options}
        report = streamload.load_state_dict(None, path, budget=budget, **on)
        assert report.held_nbytes[on["device"]] <= report.plan.devices[0].budget_nbytes


def check_nodes(numbers: random.Random, path: Path, options: Mapping[str, Any]) -> None:
    """A plan for several nodes, each with a budget of what it needs."""
    names = [f"n{i}" for i in range(numbers.randint(1, 3))]

    def split(budgets: list[int]) -> streamload.Plan:
        nodes = [Node(name, nbytes) for name, nbytes in zip(names, budgets, strict=True)]
        return streamload.split(path, nodes=nodes, **options)

    split([max(d.needed_nbytes, 1) for d in split([10**9] * len(names)).devices])
    if len(names) == 1:
        split([needed(lambda nbytes: split([nbytes]))])


def check_model(
    numbers: random.Random, path: Path, shapes: Shapes, options: Mapping[str, Any]
) -> None:
    """A load into arrays that are there, which are overwritten or replaced."""
    kinds = {name: BY_NAME[numbers.choice(("float16", "float32"))].numpy for name in shapes}

    def load(budget: int) -> None:
        model = {name: np.zeros(shape, kinds[name]) for name, shape in shapes.items()}
        streamload.load_state_dict(model, path, budget=budget, progress=False, **options)

    load(needed(load))


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (50, 100, 150))]
)
def test_what_is_needed_is_enough(first: int, tmp_path: Path) -> None:
    """Of 200 random plans: by the plan, by its table, and by the error of too small a budget."""
    for seed in range(first, first + few(50)):
        numbers = random.Random(seed)
        quant = numbers.choice(FORMATS)
        shapes = shapes_of(numbers, quant)
        path = written(numbers, tmp_path / f"{seed}.safetensors", shapes)
        options = {
            "quant": quant,
            "dtype": numbers.choice(DTYPES),
            "chunk_nbytes": numbers.choice((None, 65536 if quant else 4096, 65536)),
            "threads": numbers.choice((None, 1, 3)),
            "reader": numbers.choice(("auto", "pread")),
        }
        (check_nodes if numbers.random() < 0.3 else check_device)(numbers, path, options)
        check_model(numbers, path, shapes, {**options, "quant": None})
