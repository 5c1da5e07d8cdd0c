"""Dequantised weights are those of the libraries whose layouts they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dequant_samples
import needs
import numpy as np
import pytest
from dequant_helpers import load
from dequant_samples import Sample, entry, write

import streamload

torch = pytest.importorskip("torch")

#: How many elements in a million a second rounding may change, to the neighbour: those whose
#: float32 product is a midpoint between two of the target's, 1 of 65,536 for bfloat16.
_TWICE = 60


def ours(tmp_path: Path, sample: Sample, dtype: str) -> Any:
    report = load(write(tmp_path, [sample]), dtype, device="torch:cpu")
    return report.state_dict[sample.name]


def differing(one: Any, other: Any) -> int:
    """How many elements differ; each by one unit in the last place."""
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    whole = torch.int32 if one.dtype is torch.float32 else torch.int16
    apart = (one.contiguous().view(whole).long() - other.contiguous().view(whole).long()).abs()
    assert int(apart.max()) <= 1
    return int(apart.count_nonzero())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fp8_blocks(tmp_path: Path, dtype: str) -> None:
    """Equal to transformers' but for what that rounds twice; equal in float32."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    sample = dequant_samples.fp8(shape=(1024, 512))
    tensors = sample.tensors
    values = np.frombuffer(tensors[sample.name][2], np.uint8).reshape(1024, 512)
    scales = np.frombuffer(tensors["l.0.q.weight_scale_inv"][2], np.float32).reshape(8, 4)
    expected = finegrained.Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(values.copy()).view(torch.float8_e4m3fn),
        torch.from_numpy(scales.copy()),
        getattr(torch, dtype),
    )
    count = differing(ours(tmp_path, sample, dtype), expected)
    assert count <= (0 if dtype == "float32" else values.size * _TWICE // 10**6)


def test_mxfp4(tmp_path: Path) -> None:
    """Equal to transformers', with the last two axes turned."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    sample = dequant_samples.mxfp4(shape=(2, 70, 320))
    blocks, scales = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)
        for _, shape, data in sample.tensors.values()
    )
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(ours(tmp_path, sample, "bfloat16"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bit(tmp_path: Path, kind: str, nested: bool, dtype: str) -> None:
    """Equal to bitsandbytes' on the CPU but for what that rounds twice; equal in float32."""
    functional = needs.runtime("bitsandbytes.functional")
    weight = torch.randn(512, 384, generator=torch.Generator().manual_seed(1))
    weight = weight.to(getattr(torch, dtype))
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    expected = functional.dequantize_4bit(packed, state)
    name = "l.0.o.weight"
    parts = {f"{name}.{leaf}": t for leaf, t in state.as_dict(packed=True).items()}
    tensors = {n: entry(t.numpy()) for n, t in {name: packed, **parts}.items()}
    count = differing(ours(tmp_path, Sample(name, tensors, weight), dtype), expected)
    assert count <= (0 if dtype == "float32" else weight.numel() * _TWICE // 10**6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bitsandbytes_8_bit(tmp_path: Path, dtype: str) -> None:
    """Equal to bitsandbytes' on the CPU but where its two roundings to float32 reach the target."""
    functional = needs.runtime("bitsandbytes.functional")
    sample = dequant_samples.bnb_int8()
    values = np.frombuffer(sample.tensors["l.0.v.weight"][2], np.int8).reshape(48, 80)
    scb = np.frombuffer(sample.tensors["l.0.v.SCB"][2], np.float32)
    found = functional.int8_vectorwise_dequant(
        torch.from_numpy(values.copy()), torch.from_numpy(scb.copy())
    )
    count = differing(ours(tmp_path, sample, dtype), found.to(getattr(torch, dtype)))
    assert count <= values.size // 500


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
def test_compressed_tensors(tmp_path: Path, zeros: bool) -> None:
    """Equal to compressed-tensors', in the dtype of the scales."""
    forward = needs.runtime("compressed_tensors.quantization.lifecycle.forward")
    sample = dequant_samples.int8(zeros=zeros)
    name, found = sample.name, sample.tensors
    values = np.frombuffer(found[name][2], np.int8).reshape(64, 96)
    scale = torch.frombuffer(bytearray(found[f"{name}_scale"][2]), dtype=torch.bfloat16)
    point = None
    if zeros:
        point = torch.frombuffer(bytearray(found[f"{name}_zero_point"][2]), dtype=torch.int8)
        point = point.reshape(64, 1)
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=8, strategy="channel", symmetric=not zeros)
    expected = forward.dequantize(
        *(torch.from_numpy(values.copy()), scale.reshape(64, 1), point, args), dtype=torch.bfloat16
    )
    assert differing(ours(tmp_path, sample, "bfloat16"), expected) == 0


@pytest.mark.slow
def test_a_converted_checkpoint_opens_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "plain")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "layers" in name and tensor.ndim == 2:
            scale = tensor.abs().amax(1, keepdim=True) / 448
            values = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale"] = values, scale
            tensor.copy_(values.float() * scale)
        else:
            tensors[name] = tensor
    from safetensors.torch import save_file

    folder = tmp_path / "fp8"
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    streamload.convert(folder, tmp_path / "out", dtype="float32", progress=False)
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)
