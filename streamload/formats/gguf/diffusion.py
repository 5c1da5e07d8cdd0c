"""Diffusion models in the GGUF layout of ComfyUI-GGUF, which diffusers reads, too.

A file has one model, with its authors' names. Vectors, small tensors and a few others are F32, the
rest bfloat16 or float16. Matrices are quantized, but for those at both ends of the model; in
mixtures, values of attention and the second matrices of feed-forward layers have more bits.
Matrices whose rows are no whole blocks are float16. Convolutions of UNets have few columns: their
elements are stored as rows of 256, and their shapes in the metadata.

Source: tools/convert.py, tools/lcpp.patch (``img_tensor_get_type``) and tools/fix_5d_tensors.py of
github.com/city96/ComfyUI-GGUF at 795e451.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.core.dtypes import BF16, F16, F32
from streamload.formats.gguf.constants import TENSOR_TYPE_OF
from streamload.formats.gguf.mixture import MIXTURES
from streamload.formats.writer import Model, OutTensor

_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
_PREFIXES = ("model.diffusion_model.", "model.", "net.")
_SMALL_NUMEL, _RESHAPED_NUMEL, _WIDTH = 1024, 512, 256
_MOST_AXES = 4  # of tensors that ComfyUI-GGUF casts; others are F32
_FIRST = 4  # values of attention that have more bits in q4_k_s
# ends of names
_VALUES = "attn_v .to_v .v .attn.w1v .attn.w2v _attn.v_proj"
_FUSED = "attn_qkv attn.qkv attention.qkv"
_SECOND = ".ffn.2 .ff.net.2 .mlp.layer2 .adaln_modulation_mlp.2 .feed_forward.w2"


@dataclass(frozen=True)
class Family:
    """A family of models; names and parts of names are separated by spaces.

    Attributes:
        marks: tensors that a model of the family has; "|" separates layouts.
        left: parts of the names of matrices that are not quantized.
        theirs: a tensor of diffusers' own layout, which ComfyUI-GGUF does not read; or "".
        precise: parts of the names of tensors that are F32.
        reshapes: whether rows of other lengths become rows of 256.
    """

    name: str
    marks: str
    left: str
    theirs: str = ""
    precise: str = ""
    reshapes: bool = False


_ENDS = "txt_in. img_in. time_in. vector_in. guidance_in. final_layer."
_UNET = (
    "class_embedding. time_embedding. add_embedding. time_embed. label_emb. conv_in. conv_out. "
    "input_blocks.0.0.weight out.2.weight"
)
_DOWN = "down_blocks.0.downsamplers.0.conv.weight"
_OPS = "input_blocks.3.0.op.weight input_blocks.6.0.op.weight"
#: In the order in which they are tried.
FAMILIES = (
    Family(
        "flux",
        "double_blocks.0.img_attn.proj.weight",
        _ENDS,
        "transformer_blocks.0.attn.norm_added_k.weight",
    ),
    Family(
        "sd3",
        "joint_blocks.0.x_block.attn.qkv.weight",
        "final_layer. context_embedder. t_embedder. y_embedder. x_embedder. pos_embed",
        "transformer_blocks.0.attn.add_q_proj.weight",
    ),
    Family(
        "aura",
        "double_layers.3.modX.1.weight",
        "t_embedder. init_x_linear. modF.1.weight cond_seq_linear.weight final_linear.weight",
        "joint_transformer_blocks.3.ff_context.out_projection.weight",
    ),
    Family(
        "hidream",
        "caption_projection.0.linear.weight "
        "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight",
        "p_embedder. t_embedder. x_embedder. final_layer. .ff_i.gate.weight caption_projection.",
        precise=".ff_i.gate.weight img_emb.emb_pos",
    ),
    Family(
        "ltxv",
        "adaln_single.emb.timestep_embedder.linear_2.weight "
        "transformer_blocks.27.scale_shift_table caption_projection.linear_2.weight",
        "adaln_single. caption_projection. patchify_proj. proj_out. scale_shift_table",
        precise="scale_shift_table",
    ),
    Family(
        "hyvid",
        "double_blocks.0.img_attn_proj.weight "
        "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight",
        _ENDS,
    ),
    Family(
        "wan",
        "blocks.0.self_attn.norm_q.weight text_embedding.2.weight head.modulation",
        "modulation. patch_embedding. text_embedding. time_projection. time_embedding. img_emb. "
        "head.",
        precise=".modulation",
    ),
    Family(
        "sdxl",
        f"{_DOWN} add_embedding.linear_1.weight|{_OPS} output_blocks.2.2.conv.weight "
        "output_blocks.5.2.conv.weight|label_emb.0.0.weight",
        _UNET,
        reshapes=True,
    ),
    Family(
        "sd1",
        f"{_DOWN}|{_OPS} input_blocks.9.0.op.weight output_blocks.2.1.conv.weight "
        "output_blocks.5.2.conv.weight output_blocks.8.2.conv.weight",
        _UNET,
        reshapes=True,
    ),
    Family(
        "lumina2",
        "cap_embedder.1.weight context_refiner.0.attention.qkv.weight",
        "t_embedder. x_embedder. final_layer. cap_embedder. context_refiner. noise_refiner.",
    ),
)


class Diffusion:
    """A diffusion model to write: its tensors, and the metadata of its file."""

    def __init__(self, model: Model, family: Family, prefix: str) -> None:
        """Prepare for the tensors of ``model`` whose names begin with ``prefix``."""
        self._model, self._family = model, family
        self._tensors = {
            name.removeprefix(prefix): target
            for name, target in model.tensors.items()
            if name.startswith(prefix)
        }
        values = sorted(name for name in self._tensors if _ends(name, _VALUES))
        self._first = values[:_FIRST]

    @classmethod
    def of(cls, model: Model) -> Diffusion | None:
        """Return the diffusion model of a file, which may hold others too; or None."""
        for prefix in (*_PREFIXES, ""):
            names = {n.removeprefix(prefix) for n in model.tensors if n.startswith(prefix)}
            for family in FAMILIES:
                if family.theirs in names:
                    model.refuse("is in the layout of diffusers", "that of its authors")
                if any(names.issuperset(marks.split()) for marks in family.marks.split("|")):
                    return cls(model, family, prefix)
        return None

    def targets(self) -> dict[str, OutTensor]:
        """Return the tensors to write, by name."""
        return {name: self._target(name, target) for name, target in self._tensors.items()}

    def metadata(self) -> dict[str, Any]:
        """Return the file's metadata, but for the numbers that every file has."""
        shapes = {
            _ORIGINAL_SHAPE + name: np.array(target.shape, "<i4")
            for name, target in self._tensors.items()
            if self._shape(target) != target.shape
        }
        return {"general.architecture": self._family.name, **shapes}

    def _shape(self, target: OutTensor) -> tuple[int, ...]:
        """Return the shape in the file: that of rows of 256, if others could not be quantized."""
        shape, numel = target.shape, target.numel
        fits = len(shape) > 1 and numel >= _RESHAPED_NUMEL and not numel % _WIDTH
        if not (self._family.reshapes and fits and shape[-1] % _WIDTH):
            return shape
        return numel // _WIDTH, _WIDTH

    def _target(self, name: str, target: OutTensor) -> OutTensor:
        """Return a tensor to write, in its type and shape."""
        shape = self._shape(target)
        dtype = self._model.dtype or (BF16 if target.info.dtype is BF16 else F16)
        is_wide = target.info.dtype in (F32, BF16)
        is_small = len(shape) == 1 or target.numel <= _SMALL_NUMEL
        is_precise = is_small or any(part in name for part in self._family.precise.split())
        if len(shape) > _MOST_AXES or (is_wide and is_precise):
            dtype = F32
        kind = TENSOR_TYPE_OF[dtype.code]
        if target.quant is not None and self._is_quantized(name, shape):
            kind = TENSOR_TYPE_OF[self._chosen(name, target.quant)]
            if shape[-1] % kind.dtype.block:
                kind = TENSOR_TYPE_OF["F16"]
        if not kind.dtype.is_packed:
            return OutTensor(name, target.info, kind.dtype, shape, None, target.made)
        return OutTensor(name, target.info, F16, shape, kind.dtype.name, target.made)

    def _is_quantized(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor is a matrix inside of the model; axes of 1 in front count not."""
        if not name.endswith("weight") or "_norm.weight" in name:
            return False
        if any(part in name for part in self._family.left.split()):
            return False
        return len(shape) > 1 and shape[-2] > 1 and math.prod(shape[:-2]) == 1

    def _chosen(self, name: str, quant: str) -> str:
        """Return the name of a matrix's type in a format, or in a mixture."""
        if quant not in MIXTURES:
            return quant.upper()
        most = MIXTURES[quant].kind
        is_medium, is_least = quant.endswith("_m"), quant == "q4_k_s"
        if _ends(name, _VALUES):
            return "Q6_K" if is_medium else "Q5_K" if is_least and name in self._first else most
        if _ends(name, _FUSED):
            return {"q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}.get(quant, most)
        if _ends(name, _SECOND) or ("experts." in name and _ends(name, ".w2")):
            return "Q6_K" if is_medium else "Q5_K" if is_least else most
        return most


def _ends(name: str, ends: str) -> bool:
    return name.endswith(tuple(f"{end}.weight" for end in ends.split()))
