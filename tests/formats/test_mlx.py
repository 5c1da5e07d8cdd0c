"""Checkpoints that MLX quantised: read as mlx.core dequantises them; unknown codes are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from parameters import product
from safetensors_files import write_safetensors

import streamload
import streamload.transformers
from streamload.errors import CheckpointError, StreamloadError, UnsupportedCastError

mx = needs.runtime("mlx.core")

NAME = "model.layers.0.self_attn.q_proj"
#: Bits, groups and dtypes.
LAYOUTS = (2, 3, 4, 5, 6, 8), (32, 64, 128), ("bfloat16", "float16", "float32")


def quantised(stem: str, weight: Any, bits: int, group: int) -> tuple[dict[str, Any], Any]:
    """A weight's tensors by MLX, by names that begin with the stem, and its elements in float32."""
    codes, *others = mx.quantize(weight, group_size=group, bits=bits)
    wide = (each.astype(mx.float32) for each in others)
    elements = np.array(mx.dequantize(codes, *wide, group_size=group, bits=bits))
    names = (f"{stem}{leaf}" for leaf in ("weight", "scales", "biases"))
    return dict(zip(names, (codes, *others), strict=True)), elements


def write(
    folder: Path, bits: int, group: int, dtype: str, shape: tuple[int, ...] = (24, 256), **more: Any
) -> Any:
    mx.random.seed(bits)
    weight = mx.random.normal(shape).astype(getattr(mx, dtype))
    arrays, elements = quantised(f"{NAME}.", weight, bits, group)
    folder.mkdir(parents=True, exist_ok=True)
    norm = mx.ones((4,), dtype=mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays | {"norm.weight": norm})
    said = {"group_size": group, "bits": bits, **more}
    (folder / "config.json").write_text(json.dumps({"quantization": said}))
    return elements


def load(path: Path, dtype: str = "float32", **options: Any) -> Any:
    options = {"device": "host", "progress": False, **options}
    return streamload.load_state_dict(None, path, dtype=dtype, **options).state_dict


@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    product(
        *LAYOUTS, fast=lambda bits, group, dtype: (group, dtype) == (64, "bfloat16") or bits == 4
    ),
)
def test_what_mlx_quantised(tmp_path: Path, bits: int, group: int, dtype: str) -> None:
    expected = write(tmp_path, bits, group, dtype)
    for chunk in (None, 4096):
        found = load(tmp_path, chunk_nbytes=chunk)
        assert {*found} == {f"{NAME}.weight", "norm.weight"}
        assert np.array_equal(found[f"{NAME}.weight"], expected)
    streamload.convert(tmp_path, tmp_path / "out", dtype="float32", progress=False)
    assert np.array_equal(load(tmp_path / "out")[f"{NAME}.weight"], expected)
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_plan_is_read_in_another_process(tmp_path: Path) -> None:
    """Its JSON names a dtype of MLX, whose module that process has not imported."""
    write(tmp_path, 4, 64, "bfloat16")
    plan = streamload.plan(tmp_path, budget="1GB", device="host", dtype="float16").to_json()
    code = "import sys, streamload; print(streamload.Plan.from_json(sys.stdin.read()).to_json())"
    command = [sys.executable, "-c", code]
    again = subprocess.run(command, input=plan, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == plan


def test_experts_and_settings_of_one_module(tmp_path: Path) -> None:
    """A stack of matrices has the same layout; a module may have settings of its own."""
    own = {NAME: {"group_size": 32, "bits": 6}}
    expected = write(tmp_path, 6, 32, "bfloat16", (3, 8, 128))
    said = {"group_size": 64, "bits": 4, **own}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": said}))
    found = load(tmp_path)[f"{NAME}.weight"]
    assert found.shape == (3, 8, 128)
    assert np.array_equal(found, expected)


def test_without_a_dtype_codes_stay(tmp_path: Path) -> None:
    """A conversion without dtype= copies the weight as it is stored, which MLX opens."""
    write(tmp_path, 4, 64, "bfloat16")
    streamload.convert(tmp_path, tmp_path / "out", progress=False)
    assert streamload.open_checkpoint(tmp_path / "out")[f"{NAME}.weight"].dtype.name == "uint32"
    assert "quantization" in json.loads((tmp_path / "out" / "config.json").read_text())
    problem = r"nothing is quantised.*stored quantised \(mlx-4bit-64-bfloat16\)"
    with pytest.raises(ValueError, match=problem):
        streamload.convert(tmp_path, tmp_path / "again", quant="nf4", progress=False)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "bits and groups are not stated"),
        ({"quantization": {"group_size": 64}}, "bits and groups are not stated"),
        ({"quantization": {"group_size": 64, "bits": 8}}, "shape of a quantised weight"),
        ({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "packed in another way"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, settings: Any, problem: str) -> None:
    write(tmp_path, 4, 64, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=problem) as raised:
        load(tmp_path)
    assert raised.value.tensor in (f"{NAME}.weight", f"{NAME}.scales")


def write_model(folder: Path, bits: int = 4, group: int = 32, dtype: str = "float32") -> Any:
    """A small Llama that MLX quantised; the model of transformers with MLX's elements."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=96, num_attention_heads=4, **sizes)
    expected = transformers.LlamaForCausalLM(config).eval()
    arrays: dict[str, Any] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in expected.state_dict().items():
        array = mx.array(tensor.numpy()).astype(getattr(mx, dtype))
        if array.ndim < 2:
            arrays[name] = array
            continue
        parts, elements = quantised(name.removesuffix("weight"), array, bits, group)
        arrays |= parts
        tensor.copy_(torch.tensor(elements))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    said = {"group_size": group, "bits": bits}
    document = {**config.to_dict(), "quantization": said, "quantization_config": said}
    document["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(document))
    return expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model(tmp_path: Path) -> None:
    torch, transformers = needs.module("torch"), needs.module("transformers")
    expected, tokens = write_model(tmp_path), torch.arange(8)[None]
    own = transformers.LlamaForCausalLM(expected.config).eval()
    streamload.load_state_dict(own, tmp_path, device="cpu", progress=False)
    opened = streamload.transformers.from_pretrained(
        tmp_path, dtype="float32", device="cpu", progress=False
    )
    assert getattr(opened.config, "quantization_config", None) is None
    with torch.no_grad():
        wanted = expected(tokens).logits
        for model in (own, opened):
            assert torch.equal(model(tokens).logits, wanted)


def held(model: Any) -> dict[str, str]:
    """The layouts of the weights that modules of streamload hold, by name."""
    return {
        f"{name}.{leaf}": coded.format
        for name, module in model.named_modules()
        for leaf, coded in getattr(module, "_streamload_coded", {}).items()
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    product(
        *LAYOUTS,
        fast=lambda bits, group, dtype: (
            (bits, group, dtype) in ((3, 128, "bfloat16"), (4, 64, "bfloat16"), (8, 32, "float16"))
        ),
    ),
)
def test_codes_stay_in_modules(tmp_path: Path, bits: int, group: int, dtype: str) -> None:
    """quant="stored" keeps codes, scales and biases, and computes with MLX's elements."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    expected, tokens = write_model(tmp_path / "in", bits, group, dtype), torch.arange(8)[None]
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    opened = streamload.transformers.from_pretrained
    found = opened(tmp_path / "in", quant="stored", dtype="float32", **options)
    own = transformers.LlamaForCausalLM(expected.config).eval()
    for _ in range(2):
        streamload.load_state_dict(own, tmp_path / "in", quant="stored", **options)
    found.save_pretrained(tmp_path / "saved")
    again = opened(tmp_path / "saved", dtype="float32", **options)
    layers = opened(tmp_path / "saved", dtype="float32", offload=True, budget="1MB", **options)
    with torch.no_grad():
        wanted = expected(tokens).logits
        for model in (found, own, again, layers):
            assert torch.equal(model(tokens).logits, wanted)
    for model in (found, own, again):
        assert set(held(model).values()) == {f"mlx-{bits}bit-{group}-{dtype}"}
        assert len(held(model)) == 15
        codes = model.get_submodule(NAME).state_dict()
        assert {name: str(each.dtype) for name, each in codes.items()} == {
            "weight": "torch.uint32",
            "scales": f"torch.{dtype}",
            "biases": f"torch.{dtype}",
        }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_codes_of_another_kind(tmp_path: Path) -> None:
    """Scales of another dtype are not rounded into a model that holds such codes."""
    for dtype in ("bfloat16", "float16"):
        write_model(tmp_path / dtype, 4, 64, dtype)
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    model = streamload.transformers.from_pretrained(
        tmp_path / "bfloat16", quant="stored", dtype="float32", **options
    )
    with pytest.raises(
        StreamloadError, match=r"holds mlx-4bit-64-bfloat16 as stored, not mlx-4bit"
    ):
        streamload.load_state_dict(model, tmp_path / "float16", quant="stored", **options)


#: Names next to an integer weight that say that it is packed.
COMPANIONS = ("scales", "qzeros", "weight_scale", "weight.absmax", "weight_scales")


@pytest.mark.parametrize("companion", COMPANIONS)
@pytest.mark.parametrize("code", ["U8", "I8", "I32"])
def test_unknown_packed_weights_are_refused(tmp_path: Path, code: str, companion: str) -> None:
    nbytes = {"U8": 1, "I8": 1, "I32": 4}[code]
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            f"{NAME}.weight": (code, (2, 8), bytes(16 * nbytes)),
            f"{NAME}.{companion}": ("F64", (2,), bytes(16)),
        },
    )
    with pytest.raises((UnsupportedCastError, CheckpointError), match="weight") as raised:
        load(tmp_path)
    assert isinstance(raised.value, StreamloadError)
    with pytest.raises((UnsupportedCastError, CheckpointError), match="weight"):
        streamload.convert(tmp_path, tmp_path / "out", dtype="float16", progress=False)
    assert not (tmp_path / "out").exists()
