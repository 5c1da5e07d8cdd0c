"""GGUF of diffusion models: names, types and shapes are ComfyUI-GGUF's; diffusers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import needs
import numpy as np
import pytest
from conversions import quiet
from safetensors_files import write_safetensors

from streamload.errors import CheckpointError

KINDS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
FLUX = {
    "img_in.weight": (256, 64),
    "double_blocks.0.img_attn.qkv.weight": (768, 256),
    "double_blocks.0.img_attn.proj.weight": (256, 256),
    "double_blocks.0.img_mlp.0.bias": (1024,),
    "double_blocks.0.img_mlp.2.weight": (256, 1024),
    "double_blocks.0.odd.weight": (256, 96),
    "final_layer.linear.weight": (64, 256),
}
WAN = {
    "patch_embedding.weight": (64, 4, 1, 2, 2),
    "text_embedding.2.weight": (256, 256),
    "head.modulation": (1, 2, 1024),
    **{f"blocks.{i}.{n}_attn.v.weight": (256, 256) for i in range(3) for n in ("self", "cross")},
    "blocks.0.self_attn.norm_q.weight": (256,),
    "blocks.0.ffn.2.weight": (256, 512),
}
UNET = {
    **{f"input_blocks.{i}.0.op.weight": (64, 64, 3, 3) for i in (3, 6, 9)},
    **{f"output_blocks.{i}.{n}.conv.weight": (64, 32, 3, 3) for i, n in ((2, 1), (5, 2), (8, 2))},
    "input_blocks.0.0.weight": (64, 4, 3, 3),
    "middle_block.1.to_q.weight": (64, 64),
    "middle_block.1.to_v.weight": (64, 768),
    "out.2.weight": (4, 64, 3, 3),
}


def write(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str, prefix: str = "") -> None:
    """A file of random tensors, beside one of another model if names have a prefix."""
    rng = np.random.RandomState(0)
    tensors = {
        prefix + name: (dtype, shape, rng.standard_normal(shape).astype(KINDS[dtype]).tobytes())
        for name, shape in shapes.items()
    }
    if prefix:
        tensors["first_stage_model.weight"] = (dtype, (2, 2), bytes(16 if dtype == "F32" else 8))
    write_safetensors(folder / "model.safetensors", tensors)


def read(path: Path) -> tuple[dict[str, str], dict[str, Any], Any]:
    """The types of tensors, metadata, and gguf-py's tensors."""
    reader = gguf.GGUFReader(path / "model.gguf")
    fields = {f.name: f.contents() for f in reader.fields.values() if "GGUF" not in f.name}
    return {t.name: t.tensor_type.name for t in reader.tensors}, fields, reader.tensors


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_flux(tmp_path: Path, prefix: str) -> None:
    """One model of a file; both ends and vectors are floats, rows of no whole blocks float16."""
    write(tmp_path / "in", FLUX, "BF16", prefix)
    expected = {
        "q4_k_s": ("Q4_K", "Q4_K", 14),
        "q4_k_m": ("Q5_K", "Q4_K", 15),
        "q5_k_m": ("Q6_K", "Q5_K", 17),
        "q8_0": ("Q8_0", "Q8_0", 7),
    }
    for quant, (fused, other, number) in expected.items():
        quiet(tmp_path / "in", tmp_path / quant, to="gguf", quant=quant, verify=True)
        types, fields, _ = read(tmp_path / quant)
        assert types == {
            "img_in.weight": "BF16",
            "double_blocks.0.img_attn.qkv.weight": fused,
            "double_blocks.0.img_attn.proj.weight": other,
            "double_blocks.0.img_mlp.0.bias": "F32",
            "double_blocks.0.img_mlp.2.weight": other,
            "double_blocks.0.odd.weight": "Q8_0" if quant == "q8_0" else "F16",
            "final_layer.linear.weight": "BF16",
        }
        names = ("architecture", "file_type", "quantization_version")
        assert [fields[f"general.{name}"] for name in names] == ["flux", number, 2]


def test_wan(tmp_path: Path) -> None:
    """Five axes are kept; the first values of attention have more bits in q4_k_s."""
    write(tmp_path / "in", WAN, "F32")
    quiet(tmp_path / "in", tmp_path / "out", to="gguf", quant="q4_k_s")
    types, fields, tensors = read(tmp_path / "out")
    assert fields["general.architecture"] == "wan"
    wide = {n: "Q5_K" if n < "blocks.2" else "Q4_K" for n in WAN if n.endswith(".v.weight")}
    others = {"patch_embedding.weight": "F32", "text_embedding.2.weight": "F16"}
    others |= {"head.modulation": "F32", "blocks.0.self_attn.norm_q.weight": "F32"}
    assert types == {**wide, **others, "blocks.0.ffn.2.weight": "Q5_K"}
    (patch,) = (t for t in tensors if t.name == "patch_embedding.weight")
    assert patch.shape.tolist() == [2, 2, 1, 4, 64]


@pytest.mark.parametrize("dtype", KINDS)
def test_a_unet(tmp_path: Path, dtype: str) -> None:
    """Elements of convolutions are stored as rows of 256, with the shape beside them."""
    write(tmp_path / "in", UNET, dtype)
    quiet(tmp_path / "in", tmp_path / "out", to="gguf", quant="q4_k_m")
    types, fields, tensors = read(tmp_path / "out")
    plain = "BF16" if dtype == "BF16" else "F16"
    assert fields["general.architecture"] == "sd1"
    for tensor in tensors:
        shape = UNET[tensor.name]
        found = tuple(reversed(tensor.shape.tolist()))
        original = fields.get(f"comfy.gguf.orig_shape.{tensor.name}")
        assert (found, original) == (
            (shape, None) if shape[-1] == 768 else ((np.prod(shape) // 256, 256), list(shape))
        )
    left = {name: plain for name in ("input_blocks.0.0.weight", "out.2.weight")}
    left["middle_block.1.to_v.weight"] = "Q6_K"
    assert types == {name: left.get(name, "Q4_K") for name in UNET}
    quiet(tmp_path / "in", tmp_path / "plain", to="gguf")
    assert set(read(tmp_path / "plain")[0].values()) == {plain}


def test_the_layout_of_diffusers_is_refused(tmp_path: Path) -> None:
    """ComfyUI-GGUF reads the authors' files alone."""
    names = {"transformer_blocks.0.attn.norm_added_k.weight": (256,), "x.weight": (256, 256)}
    write(tmp_path / "in", names, "F16")
    with pytest.raises(CheckpointError, match="layout of diffusers: expected that of its authors"):
        quiet(tmp_path / "in", tmp_path / "out", to="gguf")


@pytest.mark.slow
def test_diffusers_reads_them(tmp_path: Path) -> None:
    needs.module("diffusers")
    from diffusers.models.model_loading_utils import load_gguf_checkpoint
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    write(tmp_path / "in", FLUX, "BF16")
    quiet(tmp_path / "in", tmp_path / "out", to="gguf", quant="q4_k_m")
    theirs = load_gguf_checkpoint(str(tmp_path / "out/model.gguf"))
    _, _, tensors = read(tmp_path / "out")
    assert theirs.keys() == FLUX.keys()
    for tensor in tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = theirs[tensor.name]
        values = dequantize_gguf_tensor(found) if hasattr(found, "quant_type") else found
        close = np.abs(values.float().numpy() - expected) <= 2e-3 * np.abs(expected).max()
        assert close.all(), tensor.name
