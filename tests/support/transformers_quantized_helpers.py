"""Helpers that `test_transformers_quantized` shares with other tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

torch = needs.module("torch")
transformers = needs.module("transformers")
import safetensors.torch as st  # noqa: E402
from transformers_helpers import load, quiet, reconfigure  # noqa: E402

__all__ = ["load", "quiet"]

SMALL: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 64, "tie_word_embeddings": False},
}

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

Make = Callable[[Path], None]


def plain(folder: Path, name: str = "Llama", dtype: Any = torch.bfloat16, **changes: Any) -> None:
    """A small model, with random weights of 16 bits."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**SMALL | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder)


def rewrite(folder: Path, change: Callable[[str, Any], Mapping[str, Any]], **config: Any) -> None:
    """Put other tensors in the place of each, and say in config.json how they are quantised."""
    path = folder / "model.safetensors"
    tensors: dict[str, Any] = {}
    for name, tensor in st.load_file(path).items():
        tensors |= change(name, tensor)
    st.save_file(tensors, path, metadata={"format": "pt"})
    reconfigure(folder, quantization_config=config)


def in_fp8(weight: Any, tall: int, wide: int) -> tuple[Any, Any]:
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // tall), -(-columns // wide))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            at = (slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide))
            scales[i, j] = weight[at].float().abs().max() / 448
            values[at] = (weight[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def fp8(block: tuple[int, int] | None, name: str = "Llama", **changes: Any) -> Make:
    def change(name: str, tensor: Any) -> dict[str, Any]:
        if not name.endswith("proj.weight"):
            return {name: tensor}
        values, scales = in_fp8(tensor, *(block or tensor.shape))
        return {name: values, f"{name}_scale_inv": scales if block else scales.reshape(())}

    def make(folder: Path) -> None:
        plain(folder, name, **changes)
        size = list(block) if block else None
        rewrite(
            folder, change, quant_method="fp8", activation_scheme="dynamic", weight_block_size=size
        )

    return make


def mxfp4(folder: Path) -> None:
    plain(
        folder,
        "GptOss",
        **MOE,
        num_local_experts=4,
        sliding_window=16,
        intermediate_size=64,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )

    def change(name: str, tensor: Any) -> dict[str, Any]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewrite(folder, change, quant_method="mxfp4", modules_to_not_convert=["lm_head"])


def reference(path: Path, **arguments: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", **arguments)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


def same_modules(found: Any, expected: Any) -> None:
    """Of the same classes; bitsandbytes' 4-bit modules of one that computes by our kernels."""
    for mine, theirs in zip(found.modules(), expected.modules(), strict=True):
        assert isinstance(mine, type(theirs)) and type(mine).__name__ == type(theirs).__name__


def raw(tensor: Any) -> tuple[Any, Any, bytes]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


#: Checkpoints that no library is needed for.
OWN: dict[str, Make] = {
    "fp8-blocks": fp8((32, 32)),
    "fp8-cut-blocks": fp8((48, 48)),
    "fp8-tensor": fp8(None),
    "mxfp4": mxfp4,
}


def by_transformers(make: Callable[[], Any], **changes: Any) -> Make:
    def made(folder: Path) -> None:
        plain(folder / "plain", **changes)
        model = reference(folder / "plain", quantization_config=make(), device_map="cpu")
        model.save_pretrained(folder)
        shutil.rmtree(folder / "plain")

    return made


def bitsandbytes(**config: Any) -> Make:
    return by_transformers(lambda: transformers.BitsAndBytesConfig(**config))


def torchao(name: str, **config: Any) -> Make:
    def make() -> Any:
        quantization = importlib.import_module("torchao.quantization")
        return transformers.TorchAoConfig(getattr(quantization, name)(**config))

    return by_transformers(make)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Make:
    def make(folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
        from compressed_tensors.quantization.utils import calculate_qparams

        plain(folder / "plain")
        model = reference(folder / "plain")
        group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
        group |= {} if inputs is None else {"input_activations": {"symmetric": True, **inputs}}
        groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        apply_quantization_config(model, QuantizationConfig.model_validate(groups))
        for module in model.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is None:
                continue
            rows, columns = module.weight.shape
            size = {"tensor": None, "channel": columns, "group": scheme.weights.group_size}
            length = size[scheme.weights.strategy]
            parts = module.weight.data.float()
            parts = parts.reshape(1, -1) if length is None else parts.reshape(rows, -1, length)
            ends = (parts.amin(-1), parts.amax(-1))
            scale, zeros = calculate_qparams(*ends, scheme.weights)
            shape = module.weight_scale.shape
            module.weight_scale.data = scale.to(torch.bfloat16).reshape(shape)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zeros.to(torch.int8).reshape(shape)
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.05)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)
        shutil.rmtree(folder / "plain")

    return make


def by_columns(kind: str) -> Make:
    """A checkpoint as GPTQ or AWQ write it, of random words."""

    def change(name: str, tensor: Any) -> dict[str, Any]:
        if not name.endswith("proj.weight"):
            return {name: tensor}
        module, (outputs, inputs) = name.removesuffix("weight"), tensor.shape
        groups = inputs // 32
        numbers = np.random.default_rng(len(name))

        def words(rows: int, columns: int) -> Any:
            found = numbers.integers(-(2**31), 2**31, (rows, columns), dtype=np.int32)
            return torch.from_numpy(found)

        scales = torch.rand(groups, outputs) * 0.01
        out = {f"{module}scales": scales.to(torch.float16)}
        if kind == "awq":
            out[f"{module}qweight"] = words(inputs, outputs // 8)
            out[f"{module}qzeros"] = words(groups, outputs // 8)
            return out
        out[f"{module}qweight"] = words(inputs // 8, outputs)
        out[f"{module}qzeros"] = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
        out[f"{module}g_idx"] = torch.arange(inputs, dtype=torch.int32) // 32
        return out

    def make(folder: Path) -> None:
        plain(folder, dtype=torch.float16)
        more = {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}
        if kind == "awq":
            more = {"zero_point": True, "version": "gemm"}
        rewrite(folder, change, quant_method=kind, bits=4, group_size=32, **more)

    return make


_GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}

_TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}


#: Checkpoints, and the module that makes or opens them.
MADE: dict[str, tuple[str, Make]] = {
    "nf4": ("bitsandbytes", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "nf4-nested": (
        "bitsandbytes",
        bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
    "nf4-in-bf16": (
        "bitsandbytes",
        bitsandbytes(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16),
    ),
    "fp4": ("bitsandbytes", bitsandbytes(load_in_4bit=True)),
    "int8": ("bitsandbytes", bitsandbytes(load_in_8bit=True)),
    "pack-quantized": ("compressed_tensors", compressed(_GROUPS)),
    "int-quantized": (
        "compressed_tensors",
        compressed(
            {"num_bits": 8, "type": "int", "strategy": "channel"}, {"type": "int", **_TOKENS}
        ),
    ),
    "float-quantized": (
        "compressed_tensors",
        compressed(
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
        ),
    ),
    "float-quantized-rows": (
        "compressed_tensors",
        compressed(
            {"num_bits": 8, "type": "float", "strategy": "channel"}, {"type": "float", **_TOKENS}
        ),
    ),
    "torchao-int8": ("torchao", torchao("Int8WeightOnlyConfig", version=2)),
    "torchao-float8": ("torchao", torchao("Float8WeightOnlyConfig")),
    "gptq": ("gptqmodel", by_columns("gptq")),
    "awq": ("gptqmodel", by_columns("awq")),
}


def needs_library(name: str) -> None:
    """Need a library; gptqmodel, which is built for a GPU, is no part of the set-up."""
    if name != "gptqmodel":
        needs.runtime(name)
        return
    for module in (name, "optimum.gptq"):
        pytest.importorskip(module, exc_type=ImportError)
