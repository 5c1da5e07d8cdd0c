"""The section quant with --run: products of quantised weights in torch, beside 16 bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from bench_parts.section import Options, Section, in_turns
from streamload.codecs.product import operands
from streamload.codecs.scheme import CodedWeight
from streamload.devices.torch.product import Operand, form_of, linear

_FORMATS = (
    "int8",
    "bitsandbytes-int8",
    "q8_0",
    "q4_0",
    "nf4",
    "nf4-nested",
    "q4_k",
    "q5_k",
    "q6_k",
)
_TOKENS = (1, 2, 4, 16, 64)
_SHAPES = {"cpu": ((4096, 4096),), "cuda": ((14336, 4096), (4096, 4096), (4096, 14336))}
_MORE_TOKENS = {"cpu": (), "cuda": (256, 2048)}
_CACHE_NBYTES = {"cpu": 2**25, "cuda": 50 * 2**20}  # of the last cache, about
#: The most of bf16's time that one token may take.
_WANTED = {
    "cpu": {"int8": 0.3, "q8_0": 0.45, "q4_0": 0.5, "q4_k": 0.5, "nf4": 0.5, "q6_k": 0.7},
    "cuda": {"int8": 0.65, "q8_0": 0.8, "q4_0": 0.8, "q4_k": 0.8, "nf4": 0.8},
}
_Product = Callable[[torch.Tensor], torch.Tensor]


def products(options: Options) -> Section:
    """Seconds of a Linear, by format and tokens, as parts of bfloat16's in the same run."""
    device = torch.device(options.torch_device if torch.cuda.is_available() else "cpu")
    kind = device.type
    section = Section(
        "quant --run",
        f"microseconds of torch's Linear on {_name(device)}, {torch.get_num_threads()} threads; "
        "for each number of tokens the time and, in brackets, its part of bfloat16's in the same "
        f"run; medians of {options.runs}, in turn; weights of four times the last cache",
    )
    for threads in (1, os.cpu_count() or 1) if kind == "cpu" else (1,):
        torch.set_num_threads(threads)
        for rows, width in _SHAPES[kind]:
            where = f"{rows} x {width}" + (f", {threads} threads" if kind == "cpu" else "")
            _rows(section, options, device, (rows, width), where)
    return section


def _rows(
    section: Section, options: Options, device: torch.device, shape: tuple[int, int], where: str
) -> None:
    """Add the rows of one shape, and its targets."""
    kind = device.type
    tokens = (*_TOKENS, *_MORE_TOKENS[kind])
    taken: dict[tuple[str, int], list[float]] = {}
    made = dict(_weights(device, shape))
    with torch.inference_mode():
        for count in tokens:
            x = torch.randn(count, shape[1], device=device).to(torch.bfloat16)
            jobs = {
                name: partial(_seconds, weights, x.half() if name == "float16" else x)
                for name, weights in made.items()
            }
            for name, (_, *seconds) in in_turns(jobs, options.runs + 1).items():
                taken[name, count] = seconds  # without the first, which compiles
    for name in made:
        row: dict[str, Any] = {"format": name, "weight": where}
        for count in tokens:
            mine, base = (median(taken[of, count]) for of in (name, "bfloat16"))
            row[f"{count}"] = f"{mine * 1e6:.1f} ({mine / base:.2f})"
        section.rows.append(row)
        if name in _WANTED[kind]:
            part = median(taken[name, 1]) / median(taken["bfloat16", 1])
            section.target(f"{name}, {where}: of bf16's time", part, at_most=_WANTED[kind][name])


def _weights(device: torch.device, shape: tuple[int, int]) -> Iterator[tuple[str, list[_Product]]]:
    """Name and products of weights of each format, as many as the caches do not hold."""
    rows, width = shape
    least = 4 * _CACHE_NBYTES[device.type]
    for dtype in (torch.bfloat16, torch.float16):
        count = -(-least // (2 * rows * width))
        held = [torch.randn(rows, width, device=device).to(dtype) for _ in range(count)]
        name = str(dtype).removeprefix("torch.")
        yield name, [lambda x, w=w: torch.nn.functional.linear(x, w) for w in held]  # type: ignore[misc]
    for name in _FORMATS:
        form = form_of(name, width)
        assert form is not None
        count = -(-least // (rows * form.row_nbytes(width)))
        operands = [_operand(name, rows, width, device) for _ in range(count)]
        yield name, [lambda x, of=of: linear(x, of, None) for of in operands]  # type: ignore[misc]


def _operand(format: str, rows: int, width: int, device: torch.device) -> Operand:
    """A weight of random codes and scales."""
    coded = CodedWeight(format, (rows, width))
    arrays = []
    for part in operands(coded):
        suffix = part.suffix
        dtype = getattr(torch, part.dtype.name)
        if suffix.startswith(".quant_state"):
            state = b'{"nested_offset": 0.01}'
            arrays.append(torch.frombuffer(bytearray(state), dtype=torch.uint8).to(device))
        elif dtype.is_floating_point:
            arrays.append(torch.rand(part.shape, device=device).to(dtype))
        else:  # float16 scales among them are small and finite
            arrays.append(torch.randint(0, 60, part.shape, device=device).to(dtype))
    return Operand(format, arrays, 0, rows, width)


def _seconds(weights: list[_Product], x: torch.Tensor) -> float:
    """Seconds of a product: of the device as a graph, of one thread by its own clock."""
    if x.is_cuda:
        for product in weights:  # compiles, and reads what a capture cannot read
            product(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for product in weights:
                product(x)
        graph.replay()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / len(weights)
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    at = clock()
    for product in weights:
        product(x)
    return (clock() - at) / len(weights)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
