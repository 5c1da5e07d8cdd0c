"""Weights quantised on CUDA in the calls that copy. Skipped on machines without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from quant_bounds import bound, elements_of
from quant_kernels_helpers import SEARCHED

import streamload
from streamload.codecs.scheme import SCHEMES
from streamload.planning.quant_policy import coded
from streamload.verification.verify import verify

torch = needs.module("torch")
save_file = needs.module("safetensors.torch").save_file
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

#: Formats whose arithmetic on a GPU is that of the host.
EXACT = ("int8", "q8_0", "q4_0")


def checkpoint(folder: Path, dtype: Any) -> dict[str, Any]:
    """Matrices larger than a slot and smaller than a block, with extremes and empty blocks."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3001, 1408), "b": (1, 64), "c": (7, 96), "d": (513, 4096), "e": (64, 32)}
    tensors = {}
    for name, shape in shapes.items():
        scale = 10 ** (torch.rand(shape[0], 1, generator=generator) * 6 - 3)
        found = torch.randn(shape, generator=generator) * scale
        if name == "a":
            found[5] = 0
            found[7, 3], found[9, 4], found[11, 5] = 1e4, 1e-30, -0.0
        tensors[f"h.0.{name}.weight"] = found.to(dtype)
    tensors["norm.weight"] = torch.randn(64, generator=generator).to(dtype)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(path: Path, device: str, **options: Any) -> streamload.LoadReport:
    given: dict[str, Any] = {"dtype": "checkpoint", "budget": "200MB", "progress": False}
    return streamload.load_state_dict(None, path, device=device, **given | options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in SEARCHED])
def test_codes_of_the_gpu(tmp_path: Path, name: str, dtype: Any) -> None:
    """Those of the host where arithmetic is the same, and else within the format's error."""
    tensors = checkpoint(tmp_path, dtype)
    for options in ({}, {"chunk_nbytes": 2**20, "threads": 1}):
        gpu, host = (
            load(tmp_path, "cuda:0", quant=name, **options),
            load(tmp_path, "cpu", quant=name),
        )
        casts = {p.cast for p in gpu.plan.placements if p.coding and not p.coding.part}
        assert casts == {"device"}
        for d in gpu.plan.devices:
            assert gpu.measured_nbytes[d.device] <= d.peak_nbytes
        assert gpu.state_dict.keys() == host.state_dict.keys()
        assert verify(gpu, streamload.open_checkpoint(tmp_path)) == []
        for key, tensor in gpu.state_dict.items():
            if name in EXACT:
                assert torch.equal(tensor.cpu(), host.state_dict[key]), key
        for p in gpu.plan.placements:
            if p.coding is None or p.coding.part:
                continue
            made = coded(p.coding, p.src)
            parts = {
                part.suffix: gpu.state_dict[part.name(p.name)].cpu().numpy() for part in made.parts
            }
            whole = tensors[p.name].double().numpy()
            error = np.abs(elements_of(made, parts) - whole)
            assert (error <= bound(made, parts) * (1 + 1e-5) + 1e-37).all(), p.name
            counts, expected = gpu.errors[p.name], host.errors[p.name]
            assert counts.numel == expected.numel
            assert counts.largest == expected.largest
            assert counts.relative == pytest.approx(expected.relative, rel=1e-3)
            assert counts.squared == pytest.approx(expected.squared, rel=1e-9)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bytes_of_bitsandbytes(tmp_path: Path, name: str) -> None:
    """Codes and absmax are those of its CUDA kernel."""
    functional = needs.module("bitsandbytes.functional")
    tensors = checkpoint(tmp_path, torch.bfloat16)
    found = load(tmp_path, "cuda:0", quant=name).state_dict
    for key, tensor in tensors.items():
        if key not in found or tensor.ndim < 2:
            continue
        packed, state = functional.quantize_4bit(tensor.cuda(), blocksize=64, quant_type=name)
        assert torch.equal(found[key], packed), key
        assert torch.equal(found[f"{key}.absmax"], state.absmax), key


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_nested_bytes_of_bitsandbytes(tmp_path: Path, name: str) -> None:
    """The mean of absmax is that of its CUDA kernels within a unit in the last place.

    All codes are those that these make of absmax less our mean.
    """
    functional = needs.module("bitsandbytes.functional")
    tensors = checkpoint(tmp_path, torch.bfloat16)
    plain = load(tmp_path, "cuda:0", quant=name).state_dict
    for options in ({}, {"chunk_nbytes": 2**20, "threads": 1}):
        found = load(tmp_path, "cuda:0", quant=f"{name}-nested", **options).state_dict
        for key, tensor in tensors.items():
            if f"{key}.nested_absmax" not in found:
                continue
            packed, state = functional.quantize_4bit(
                tensor.cuda(), blocksize=64, quant_type=name, compress_statistics=True
            )
            assert torch.equal(found[key], packed), key
            said = bytes(found[f"{key}.quant_state.bitsandbytes__{name}"].cpu().numpy())
            offset = np.float32(json.loads(said)["nested_offset"])
            theirs = np.float32(state.offset.item())
            assert abs(offset - theirs) <= np.spacing(theirs), key
            less = plain[f"{key}.absmax"] - torch.tensor(offset, device="cuda")
            codes, inner = functional.quantize_blockwise(less, blocksize=256)
            assert torch.equal(found[f"{key}.absmax"], codes), key
            assert torch.equal(found[f"{key}.nested_absmax"], inner.absmax), key
            assert torch.equal(found[f"{key}.nested_quant_map"], state.state2.code), key
            if offset == theirs:
                assert torch.equal(found[f"{key}.absmax"], state.absmax), key


def test_statistics_of_many_weights_are_not_held_at_once(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"h.{n}.w.weight": torch.randn(1024, 2048, generator=generator).bfloat16()
        for n in range(40)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    one, some = (
        load(tmp_path, "cuda:0", quant="nf4-nested", **options)
        for options in ({"threads": 1, "chunk_nbytes": 2**20}, {})
    )
    nbytes = [report.plan.devices[0].scratch_nbytes for report in (one, some)]
    assert nbytes[0] <= 6 * 2**20 and nbytes[1] <= 72 * 2**20
    for key, tensor in one.state_dict.items():
        assert torch.equal(tensor, some.state_dict[key]), key


def test_bytes_of_int8(tmp_path: Path) -> None:
    """Codes and statistics of bitsandbytes' CUDA kernel, but for its approximate division."""
    functional = needs.module("bitsandbytes.functional")
    tensors = checkpoint(tmp_path, torch.bfloat16)
    found = load(tmp_path, "cuda:0", quant="bitsandbytes-int8").state_dict
    for key, tensor in tensors.items():
        if tensor.ndim < 2:
            continue
        codes, stats, _ = functional.int8_vectorwise_quant(tensor.half().cuda())
        assert torch.equal(found[key.replace("weight", "SCB")], stats), key
        away = (found[key].int() - codes.int()).abs()
        assert away.max() <= 1 and (away > 0).float().mean() < 1e-3, key


def test_a_file_in_chunks_equals_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, torch.bfloat16)
    first = load(tmp_path, "cuda:0", quant="int8").state_dict
    for nbytes in (2**16, 2**18, 2**22):
        again = load(tmp_path, "cuda:0", quant="int8", chunk_nbytes=nbytes).state_dict
        assert all(torch.equal(again[key], tensor) for key, tensor in first.items())


def test_beyond_float16_is_refused(tmp_path: Path) -> None:
    whole = torch.full((4, 128), 1e6, dtype=torch.bfloat16)
    save_file({"h.0.w": whole}, tmp_path / "model.safetensors")
    with pytest.raises(streamload.errors.OutOfRangeError, match=r"h\.0\.w"):
        load(tmp_path, "cuda:0", quant="bitsandbytes-int8", out_of_range="error")
