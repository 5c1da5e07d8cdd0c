"""Quantised bytes are those of the libraries whose layouts they have."""

from __future__ import annotations

import json
from typing import Any

import needs
import numpy as np
import pytest
from quant_bounds import elements_of
from quant_samples import Sample, samples

from streamload.codecs.scheme import SCHEMES, Codec
from streamload.codecs.schemes import bitsandbytes_nested as dynamic
from streamload.codecs.schemes.bitsandbytes import VALUES, FourBit
from streamload.core.dtypes import BF16, F16, F32

Array = np.ndarray[Any, np.dtype[Any]]


def quantised(form: Codec, sample: Sample) -> tuple[dict[str, Array], Any]:
    tensor = form.of(sample.x.shape, sample.src)
    encoder = tensor.encoder(sample.src)
    out = bytearray(tensor.parts[0].nbytes)
    encoder.encode(memoryview(sample.x.tobytes()), memoryview(out), 0)
    found = {"": out, **encoder.finish()}
    parts = {
        part.suffix: np.frombuffer(found[part.suffix], part.dtype.numpy).reshape(part.shape)
        for part in tensor.parts
    }
    return parts, tensor


def torched(torch: Any, sample: Sample) -> Any:
    if sample.src == BF16:
        return torch.from_numpy(sample.x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(sample.x.copy())


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_gguf(name: str) -> None:
    """Blocks equal gguf-py's for finite tensors, and decode to the same elements."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kind = gguf.GGMLQuantizationType[name.upper()]
    for sample in samples(columns=32, non_finite=False):
        parts, tensor = quantised(SCHEMES[name], sample)
        with np.errstate(all="ignore"):
            expected = gguf.quants.quantize(sample.x.astype(np.float32), kind)
            decoded = gguf.quants.dequantize(expected, kind)
        assert np.array_equal(parts[""], expected), sample.name
        assert np.array_equal(elements_of(tensor, parts), decoded, equal_nan=True), sample.name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_bitsandbytes_4_bit(kind: Any, nested: bool) -> None:
    """Every part equals bitsandbytes' on the CPU for finite tensors; nested, given its mean."""
    bitsandbytes = needs.runtime("bitsandbytes")
    torch = pytest.importorskip("torch")
    form = FourBit(kind, nested)
    for sample in samples(non_finite=False):
        packed, state = bitsandbytes.functional.quantize_4bit(
            torched(torch, sample), blocksize=64, compress_statistics=nested, quant_type=kind
        )
        expected = {f".{key}": value.numpy() for key, value in state.as_dict(packed=True).items()}
        parts, _ = quantised(form, sample)
        assert np.array_equal(parts[""], packed.numpy()), sample.name
        expected_state = json.loads(bytes(expected.pop(f".quant_state.bitsandbytes__{kind}")))
        found_state = json.loads(bytes(parts.pop(f".quant_state.bitsandbytes__{kind}")))
        if nested:
            offset = np.float32(expected_state.pop("nested_offset"))
            ours = np.float32(found_state.pop("nested_offset"))
            if np.isinf(offset):  # torch's sum is beyond float32, and ours is not
                assert np.isfinite(ours), sample.name
                continue
            # torch's float32 sum is further from the mean where magnitudes differ widely
            units = 1 if "kind 0" in sample.name else 4
            assert abs(ours - offset) <= units * np.spacing(abs(offset)), sample.name
            codes, scales = dynamic.quantized(_absmax(kind, sample) - offset, "cpu")
            assert np.array_equal(codes, expected.pop(".absmax")), sample.name
            assert np.array_equal(scales, expected.pop(".nested_absmax")), sample.name
            for name in (".absmax", ".nested_absmax"):
                parts.pop(name)
        assert found_state == expected_state, sample.name
        assert parts.keys() - {""} == expected.keys()
        for name, value in expected.items():
            assert np.array_equal(parts[name], value), (sample.name, name)


def _absmax(kind: Any, sample: Sample) -> Array:
    parts, _ = quantised(FourBit(kind), sample)
    return parts[".absmax"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "fp4", "fp4-nested"])
def test_bitsandbytes_reads_it(name: str) -> None:
    """Its `QuantState` takes our parts, and decodes the elements that we do."""
    bitsandbytes = needs.runtime("bitsandbytes")
    torch = pytest.importorskip("torch")
    sample = Sample("", F32, np.random.default_rng(1).standard_normal((70, 128), np.float32), True)
    parts, tensor = quantised(SCHEMES[name], sample)
    given = {key[1:]: torch.from_numpy(value.copy()) for key, value in parts.items() if key}
    state = bitsandbytes.functional.QuantState.from_dict(given, device=torch.device("cpu"))
    codes = torch.from_numpy(parts[""].copy())
    decoded = bitsandbytes.functional.dequantize_4bit(codes, state).numpy()
    np.testing.assert_allclose(decoded, elements_of(tensor, parts), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_bitsandbytes_int8() -> None:
    """Codes and statistics equal bitsandbytes' on the CPU, float16's overflow included."""
    bitsandbytes = needs.runtime("bitsandbytes")
    torch = pytest.importorskip("torch")
    for sample in samples(non_finite=False):
        sample = sample._replace(x=sample.x.reshape(-1, sample.x.shape[-1]))
        codes, statistics, _ = bitsandbytes.functional.int8_vectorwise_quant(
            torched(torch, sample).to(torch.float16)
        )
        parts, tensor = quantised(SCHEMES["bitsandbytes-int8"], sample)
        assert np.array_equal(parts[""], codes.numpy()), sample.name
        assert np.array_equal(parts["SCB"], statistics.numpy()), sample.name
        decoded = bitsandbytes.functional.int8_vectorwise_dequant(codes, statistics).numpy()
        assert np.array_equal(elements_of(tensor, parts), decoded, equal_nan=True), sample.name


@pytest.mark.slow
def test_bitsandbytes_names() -> None:
    """The parts have the names of its modules' state dicts."""
    bitsandbytes = needs.runtime("bitsandbytes")
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(64, 8, bias=False)
    modules = {
        "bitsandbytes-int8": bitsandbytes.nn.Linear8bitLt(
            64, 8, bias=False, has_fp16_weights=False, threshold=6.0
        ),
        **{
            name: bitsandbytes.nn.Linear4bit(
                *(64, 8),
                bias=False,
                quant_type=name[:3],
                compress_statistics=name.endswith("nested"),
            )
            for name in ("nf4", "nf4-nested", "fp4", "fp4-nested")
        },
    }
    for name, module in modules.items():
        module.load_state_dict(layer.state_dict())
        state = module.to("cpu").state_dict()
        tensor = SCHEMES[name].of((8, 64), F32)
        found = {part.name("weight"): (part.dtype.name, part.shape) for part in tensor.parts}
        expected = {
            key: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for key, value in state.items()
        }
        if name.endswith("nested"):  # ours is padded
            key = f"weight.quant_state.bitsandbytes__{name[:3]}"
            del found[key], expected[key]
        assert found == expected, name


@pytest.mark.slow
def test_bitsandbytes_maps() -> None:
    """The maps of values are its own, bit for bit."""
    bitsandbytes = needs.runtime("bitsandbytes")
    dynamic_map = bitsandbytes.functional.create_dynamic_map().numpy()
    assert np.array_equal(dynamic.dynamic_map(), dynamic_map)
    for kind, values in VALUES.items():
        expected = bitsandbytes.functional.get_4bit_type(kind, device="cpu").numpy()
        assert np.array_equal(np.array(values, np.float32), expected), kind


@pytest.mark.slow
@pytest.mark.parametrize("src", [F32, BF16, F16], ids=lambda src: str(src))
def test_large_nested_mean(src: Any) -> None:
    """The mean of many blocks is torch's within a unit in the last place."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    x = random.standard_normal(64 * 100_003).astype(np.float32).astype(src.numpy)
    parts, _ = quantised(SCHEMES["nf4-nested"], Sample("", src, x, True))
    state = json.loads(bytes(parts[".quant_state.bitsandbytes__nf4"]))
    absmax = np.abs(x.astype(np.float32)).reshape(-1, 64).max(axis=1)
    expected = torch.from_numpy(absmax).mean().item()
    assert abs(state["nested_offset"] - expected) <= np.spacing(np.float32(expected))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("scale", [1e-38, 2.9e-39, 1e-39, 1e-42, 1e-45, 0.0])
def test_statistics_below_the_reciprocal(kind: Any, scale: float) -> None:
    """Nested, of scales whose reciprocal is infinite: codes and scales are bitsandbytes'."""
    torch = needs.module("torch", needed=False)
    functional = needs.module("bitsandbytes", needed=False).functional
    x = np.random.default_rng(1).standard_normal((64, 320)).astype(np.float32)
    x *= np.float32(scale)
    x[:8] = 0
    _, state = functional.quantize_4bit(
        torch.from_numpy(x), blocksize=64, compress_statistics=True, quant_type=kind
    )
    expected = state.as_dict(packed=True)
    parts, _ = quantised(SCHEMES[f"{kind}-nested"], Sample("", F32, x, True))
    assert np.array_equal(parts[".absmax"], expected["absmax"].numpy())
    assert np.allclose(parts[".nested_absmax"], expected["nested_absmax"].numpy(), rtol=1e-6)
