"""Files of diffusion models in the layout of their authors, made of models of diffusers."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.loaders import single_file_model

State = dict[str, Any]
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.*)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d)\.(.*)")


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


def unet(model: Any) -> State:
    state, per = model.state_dict(), model.config.layers_per_block + 1
    out = {}
    for name, tensor in state.items():
        new = _renamed(name, _UNET)
        if match := _BLOCK.fullmatch(name):
            way, block, kind, index, rest = match.groups()
            number = int(block) * per + int(index)
            side = "output_blocks" if way == "up" else "input_blocks"
            number += way == "down"
            if kind == "resnets":
                new = f"{side}.{number}.0.{_renamed(rest, _RESNET)}"
            elif kind == "attentions":
                new = f"{side}.{number}.1.{rest}"
            elif kind == "downsamplers":
                new = f"{side}.{number + per - 1}.0.op.{rest.removeprefix('conv.')}"
            else:
                after = 1 + any(n.startswith(f"up_blocks.{block}.attentions") for n in state)
                new = f"{side}.{number + per - 1}.{after}.{rest}"
        elif match := _MIDDLE.fullmatch(name):
            kind, index, rest = match.groups()
            rest = _renamed(rest, _RESNET) if kind == "resnets" else rest
            new = f"middle_block.{2 * int(index) if kind == 'resnets' else 1}.{rest}"
        out[f"model.diffusion_model.{new}"] = tensor
    return out


_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out", "group_norm": "norm"}


def vae(model: Any, prefix: str = "first_stage_model.") -> State:
    """The autoencoder of all of these; its attention was made of convolutions."""
    last = len(model.config.block_out_channels) - 1
    out = {}
    for name, tensor in model.state_dict().items():
        side, _, rest = name.partition(".")
        rest = rest.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        if match := _BLOCK.fullmatch(rest):
            way, block, kind, index, rest = match.groups()
            number = last - int(block) if way == "up" else block
            inner = f"block.{index}" if kind == "resnets" else kind.removesuffix("rs")
            rest = f"{way}.{number}.{inner}.{rest}"
        elif match := _MIDDLE.fullmatch(rest):
            kind, index, rest = match.groups()
            if kind == "attentions":
                rest = f"mid.attn_1.{_renamed(rest, _ATTENTION)}"
                tensor = tensor[:, :, None, None] if tensor.dim() == 2 else tensor
            else:
                rest = f"mid.block_{int(index) + 1}.{rest}"
        out[f"{prefix}{side}.{rest}"] = tensor
    return out


def text(model: Any, prefix: str) -> State:
    """A text encoder under its own names, which begin with "text_model." if it is CLIP's."""
    out = {}
    for name, tensor in model.state_dict().items():
        wrapped = name.startswith(("text_model.", "text_projection.")) or "t5" in prefix
        out[prefix + ("" if wrapped else "text_model.") + name] = tensor
    return out


def open_clip(model: Any, prefix: str) -> State:
    """A text encoder with a projection, in OpenCLIP's layout: queries, keys and values as one."""
    state = {n.removeprefix("text_model."): t for n, t in model.state_dict().items()}
    names = {
        "embeddings.position_embedding.weight": "positional_embedding",
        "embeddings.token_embedding.weight": "token_embedding.weight",
        "final_layer_norm.weight": "ln_final.weight",
        "final_layer_norm.bias": "ln_final.bias",
    }
    out = {new: state.pop(old) for old, new in names.items()}
    out["text_projection"] = state.pop("text_projection.weight").T.contiguous()
    parts = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for name, tensor in state.items():
        layer, rest = re.fullmatch(r"encoder\.layers\.(\d+)\.(.*)", name).groups()  # type: ignore[union-attr]
        start = f"transformer.resblocks.{layer}."
        if match := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", rest):
            if match[1] == "q":
                three = [state[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
                out[f"{start}attn.in_proj_{match[2]}"] = torch.cat(three)
        else:
            out[start + _renamed(rest, parts).replace("self_attn", "attn")] = tensor
    return {prefix + name: tensor for name, tensor in out.items()}


def _swapped(tensor: Any) -> Any:
    """The two halves of the rows, exchanged."""
    return torch.cat(tensor.chunk(2)[::-1])


def _joint(
    state: State, out: State, names: Mapping[str, str], fused: Mapping[str, list[str]]
) -> None:
    """Add tensors under other names, and those that are one tensor in the file."""
    for new, old in names.items():
        for leaf in ("weight", "bias"):
            if f"{old}.{leaf}" in state:
                out[f"{new}.{leaf}"] = state.pop(f"{old}.{leaf}")
    for new, parts in fused.items():
        for leaf in ("weight", "bias"):
            if f"{parts[0]}.{leaf}" in state:
                out[f"{new}.{leaf}"] = torch.cat([state.pop(f"{part}.{leaf}") for part in parts])


def sd3(model: Any, prefix: str = "model.diffusion_model.") -> State:
    state, out = model.state_dict(), {}
    out["pos_embed"] = state.pop("pos_embed.pos_embed")
    embed = "time_text_embed"
    names = {
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": f"{embed}.timestep_embedder.linear_1",
        "t_embedder.mlp.2": f"{embed}.timestep_embedder.linear_2",
        "y_embedder.mlp.0": f"{embed}.text_embedder.linear_1",
        "y_embedder.mlp.2": f"{embed}.text_embedder.linear_2",
        "context_embedder": "context_embedder",
        "final_layer.linear": "proj_out",
    }
    fused = {}
    swapped = {"final_layer.adaLN_modulation.1": "norm_out.linear"}
    for layer in range(model.config.num_layers):
        old, new = f"transformer_blocks.{layer}", f"joint_blocks.{layer}"
        for side, own in (("x_block", ""), ("context_block", "_context")):
            attention = (
                ["to_q", "to_k", "to_v"] if not own else ["add_q_proj", "add_k_proj", "add_v_proj"]
            )
            fused[f"{new}.{side}.attn.qkv"] = [f"{old}.attn.{part}" for part in attention]
            names[f"{new}.{side}.attn.proj"] = f"{old}.attn.{'to_add_out' if own else 'to_out.0'}"
            names[f"{new}.{side}.mlp.fc1"] = f"{old}.ff{own}.net.0.proj"
            names[f"{new}.{side}.mlp.fc2"] = f"{old}.ff{own}.net.2"
            modulation = f"{new}.{side}.adaLN_modulation.1"
            is_last = own and layer == model.config.num_layers - 1
            (swapped if is_last else names)[modulation] = f"{old}.norm1{own}.linear"
    _joint(state, out, names | swapped, fused)
    for name in swapped:
        out |= {f"{name}.{leaf}": _swapped(out[f"{name}.{leaf}"]) for leaf in ("weight", "bias")}
    assert not state, state.keys()
    return {prefix + name: tensor for name, tensor in out.items()}


def flux(model: Any, prefix: str = "") -> State:
    state, out = model.state_dict(), {}
    embed = "time_text_embed"
    names = {
        "time_in.in_layer": f"{embed}.timestep_embedder.linear_1",
        "time_in.out_layer": f"{embed}.timestep_embedder.linear_2",
        "vector_in.in_layer": f"{embed}.text_embedder.linear_1",
        "vector_in.out_layer": f"{embed}.text_embedder.linear_2",
        "guidance_in.in_layer": f"{embed}.guidance_embedder.linear_1",
        "guidance_in.out_layer": f"{embed}.guidance_embedder.linear_2",
        "txt_in": "context_embedder",
        "img_in": "x_embedder",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
    }
    fused, scales = {}, {}
    for layer in range(model.config.num_layers):
        old, new = f"transformer_blocks.{layer}", f"double_blocks.{layer}"
        for side, own in (("img", ""), ("txt", "_context")):
            attention = (
                ["add_q_proj", "add_k_proj", "add_v_proj"] if own else ["to_q", "to_k", "to_v"]
            )
            fused[f"{new}.{side}_attn.qkv"] = [f"{old}.attn.{part}" for part in attention]
            names[f"{new}.{side}_attn.proj"] = f"{old}.attn.{'to_add_out' if own else 'to_out.0'}"
            names[f"{new}.{side}_mod.lin"] = f"{old}.norm1{own}.linear"
            names[f"{new}.{side}_mlp.0"] = f"{old}.ff{own}.net.0.proj"
            names[f"{new}.{side}_mlp.2"] = f"{old}.ff{own}.net.2"
            added = "added_" if own else ""
            for kind in ("query", "key"):
                scales[f"{new}.{side}_attn.norm.{kind}_norm"] = f"{old}.attn.norm_{added}{kind[0]}"
    for layer in range(model.config.num_single_layers):
        old, new = f"single_transformer_blocks.{layer}", f"single_blocks.{layer}"
        parts = ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
        fused[f"{new}.linear1"] = [f"{old}.{part}" for part in parts]
        names[f"{new}.linear2"] = f"{old}.proj_out"
        names[f"{new}.modulation.lin"] = f"{old}.norm.linear"
        for kind in ("query", "key"):
            scales[f"{new}.norm.{kind}_norm"] = f"{old}.attn.norm_{kind[0]}"
    _joint(state, out, names, fused)
    out |= {f"{new}.scale": state.pop(f"{old}.weight") for new, old in scales.items()}
    for leaf in ("weight", "bias"):
        name = f"final_layer.adaLN_modulation.1.{leaf}"
        out[name] = _swapped(out[name])
    assert not state, state.keys()
    return {prefix + name: tensor for name, tensor in out.items()}


def flux_of_width(width: int) -> dict[str, Any]:
    """diffusers' entry for Flux, whose conversion is of one width, for another."""
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    convert = entry["checkpoint_mapping_fn"]
    code = convert.__code__
    assert 3072 in code.co_consts
    consts = tuple(width if const == 3072 else const for const in code.co_consts)
    narrow = types.FunctionType(code.replace(co_consts=consts), convert.__globals__)
    return {**entry, "checkpoint_mapping_fn": narrow}


def wan(model: Any, prefix: str = "") -> State:
    pairs = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "scale_shift_table": "head.modulation",
        "proj_out": "head.head",
        "attn1": "self_attn",
        "attn2": "cross_attn",
        ".to_q.": ".q.",
        ".to_k.": ".k.",
        ".to_v.": ".v.",
        ".to_out.0.": ".o.",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
    }
    out = {}
    for name, tensor in model.state_dict().items():
        new = name
        for old, original in pairs.items():
            new = new.replace(old, original)
        if name.startswith("blocks."):
            new = new.replace("head.modulation", "modulation").replace("norm2", "norm3")
        out[prefix + new] = tensor
    return out
