"""Small random models of many families of transformers, and what a processor would give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

#: What sizes become, by their names in any configuration. Rows hold whole blocks of q8_0.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "decoder_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "ffn_hidden_size"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 128),
    **dict.fromkeys(("shared_expert_intermediate_size", "mlp_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 6),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **{"vocab_size": 96, "embedding_size": 32, "projection_dim": 32, "state_size": 8},
    **{"image_size": 32, "patch_size": 8, "sliding_window": 8, "rotary_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}


@dataclass(frozen=True, slots=True)
class Family:
    """A class of transformers, what it gets, and what `SIZES` does not know."""

    class_name: str  # of the model
    kind: str = "text"  # a key of `INPUTS`
    # arguments of the configuration; a mapping goes into the configuration of that name
    sizes: Mapping[str, Any] = field(default_factory=dict)


def small(config_class: Any, sizes: Mapping[str, Any]) -> Any:
    default = config_class()
    known = default.to_dict()
    given = {
        key: value
        for key, value in SIZES.items()
        if isinstance(known.get(key), int) or (key.endswith("token_id") and key in known)
    }
    for name in getattr(config_class, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None:
            given[name] = small(type(inner), sizes.get(name, {})).to_dict()
    given |= {key: value for key, value in sizes.items() if not isinstance(value, dict)}
    given |= {key: value for key, value in sizes.items() if key not in given}
    return config_class(**given)


def built(family: Family, seed: int = 1) -> Any:
    """The model with random weights: norms and biases too, which would be ones and zeros."""
    model_class = getattr(transformers, family.class_name)
    torch.manual_seed(seed)
    model = model_class(small(model_class.config_class, family.sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for module in model.modules():  # transformers makes zeros of these rows when it loads
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    return model


_IDS = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))


def _settings(config: Any) -> dict[str, Any]:
    """Those of the part that reads text."""
    settings: dict[str, Any] = config.get_text_config().to_dict()
    return settings


def _text(config: Any) -> dict[str, Any]:
    """A padded batch, as a tokenizer gives it to a model that generates: pads come first."""
    ids, mask = _IDS.clone(), torch.ones_like(_IDS)
    ids[1, :3], mask[1, :3] = _settings(config).get("pad_token_id") or 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _padded(config: Any) -> dict[str, Any]:
    """A padded batch, as a tokenizer gives it to an encoder: pads come last."""
    return {name: tensor.flip(1) for name, tensor in _text(config).items()}


def _both(config: Any) -> dict[str, Any]:
    """The same for an encoder with a decoder."""
    return _padded(config) | {"decoder_input_ids": _IDS[:, :4]}


def _image(config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}


def _wave(config: Any) -> dict[str, Any]:
    """Two recordings, the second of which is shorter."""
    wave = torch.sin(torch.arange(2 * 2000).view(2, 2000) / 7)
    mask = torch.ones(2, 2000, dtype=torch.long)
    wave[1, 1600:], mask[1, 1600:] = 0, 0
    return {"input_values": wave, "attention_mask": mask}


def _features(config: Any) -> dict[str, Any]:
    """Two spectrograms of the width that the configuration says."""
    width = getattr(config, "num_mel_bins", 16)
    return {"input_values": torch.linspace(-1, 1, 2 * 32 * width).view(2, 32, width)}


def _told(config: Any, count: int, **images: Any) -> dict[str, Any]:
    """A padded batch with the places of an image in each text."""
    text = _text(config)
    places = torch.full((2, count), config.image_token_id)
    ones = torch.ones_like(places)
    text["input_ids"] = torch.cat([text["input_ids"][:, :4], places, _IDS[:, 4:]], 1)
    mask = text["attention_mask"]
    text["attention_mask"] = torch.cat([mask[:, :4], ones, mask[:, 4:]], 1)
    return text | images


def _patches(config: Any) -> dict[str, Any]:
    """Texts with an image of 4 x 4 patches each, of which four become one token."""
    vision = config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.linspace(-1, 1, 2 * 16 * width).view(2 * 16, width)
    told = _told(config, 4, pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
    kinds = (told["input_ids"] == config.image_token_id).int()
    return told | {"mm_token_type_ids": kinds}


#: What a model computes with, from its configuration.
INPUTS: Mapping[str, Any] = {
    "text": _text,
    "encoder": _padded,
    "both": _both,
    "image": _image,
    "wave": _wave,
    "features": _features,
    "speech": lambda config: _wave(config) | {"decoder_input_ids": _IDS[:, :4]},
    "text and image": lambda config: _padded(config) | _image(config),
    "16 places": lambda config: _told(config, 16, **_image(config)),
    "4 places": lambda config: _told(config, 4, **_image(config)),
    "1 place, images": lambda config: _told(
        config, 1, pixel_values=_image(config)["pixel_values"][:, None]
    ),
    "patches": _patches,
}

_DEEPSEEK = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 2, "num_experts_per_tok": 2},
}
_LISTENS = {
    **{"conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2]},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}
_WINDOWS = {
    **{"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
}
_STAGES = {"hidden_sizes": [32, 64, 64, 64], "depths": [1, 1, 2, 1], "embedding_size": 32}
_SEES_PATCHES = {
    "image_token_id": 95,
    **{"vision_start_token_id": 94, "vision_end_token_id": 93, "video_token_id": 92},
    "text_config": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
    },
    "vision_config": {"depth": 2, "patch_size": 8, "embed_dim": 64},
}
_HYBRID = ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"]

#: By the names of docs/models.md.
FAMILIES: Mapping[str, Family] = {
    # dense
    "Apertus": Family("ApertusForCausalLM"),
    "Arcee": Family("ArceeForCausalLM"),
    "BioGPT": Family("BioGptForCausalLM"),
    "BitNet": Family("BitNetForCausalLM"),
    "BLOOM": Family("BloomForCausalLM"),
    "CodeGen": Family("CodeGenForCausalLM"),
    "Cohere": Family("CohereForCausalLM"),
    "Cohere 2": Family("Cohere2ForCausalLM"),
    "CTRL": Family("CTRLLMHeadModel", sizes={"dff": 128}),
    "DiffLlama": Family("DiffLlamaForCausalLM"),
    "ERNIE 4.5": Family("Ernie4_5ForCausalLM"),
    "EXAONE 4": Family("Exaone4ForCausalLM"),
    "Falcon": Family("FalconForCausalLM"),
    "Gemma": Family("GemmaForCausalLM"),
    "GLM": Family("GlmForCausalLM"),
    "GLM-4": Family("Glm4ForCausalLM"),
    "GPT-J": Family("GPTJForCausalLM"),
    "GPT-Neo": Family(
        "GPTNeoForCausalLM", sizes={"attention_types": [[["global", "local"], 3]], "window_size": 8}
    ),
    "GPTBigCode": Family("GPTBigCodeForCausalLM"),
    "Granite": Family("GraniteForCausalLM"),
    "Helium": Family("HeliumForCausalLM"),
    "HunYuan": Family("HunYuanDenseV1ForCausalLM", sizes={"head_dim": 16}),
    "MPT": Family("MptForCausalLM"),
    "OLMo": Family("OlmoForCausalLM"),
    "OLMo 2": Family("Olmo2ForCausalLM"),
    "OLMo 3": Family("Olmo3ForCausalLM"),
    "Persimmon": Family("PersimmonForCausalLM"),
    "Phi": Family("PhiForCausalLM"),
    "Seed-OSS": Family("SeedOssForCausalLM"),
    "SmolLM3": Family("SmolLM3ForCausalLM"),
    "StableLM": Family("StableLmForCausalLM"),
    "StarCoder 2": Family("Starcoder2ForCausalLM"),
    "XGLM": Family("XGLMForCausalLM"),
    # mixtures of experts
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", sizes=_DEEPSEEK),
    "ERNIE 4.5 MoE": Family("Ernie4_5_MoeForCausalLM"),
    "FlexOlmo": Family("FlexOlmoForCausalLM"),
    "GLM-4 MoE": Family("Glm4MoeForCausalLM"),
    "Granite MoE": Family("GraniteMoeForCausalLM"),
    "MiniMax": Family("MiniMaxForCausalLM", sizes={"block_size": 16}),
    "OLMoE": Family("OlmoeForCausalLM"),
    "Phi-3.5 MoE": Family("PhimoeForCausalLM"),
    "Qwen2-MoE": Family("Qwen2MoeForCausalLM"),
    # state spaces and what mixes them with attention
    "Bamba": Family(
        "BambaForCausalLM",
        sizes={
            **{"attn_layer_indices": [1, 4], "mamba_n_heads": 8, "mamba_d_head": 16},
            **{"mamba_n_groups": 1, "mamba_d_state": 16},
        },
    ),
    "Falcon-H1": Family(
        "FalconH1ForCausalLM", sizes={"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16}
    ),
    "FalconMamba": Family("FalconMambaForCausalLM", sizes={"time_step_rank": 32}),
    "Jamba": Family(
        "JambaForCausalLM",
        sizes={"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 32},
    ),
    "LFM2": Family("Lfm2ForCausalLM"),
    "Mamba-2": Family("Mamba2ForCausalLM", sizes={"num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "Nemotron-H": Family(
        "NemotronHForCausalLM",
        sizes={
            "layers_block_type": ["mamba", "attention", "moe"] * 2,
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
            "moe_shared_expert_intermediate_size": 128,
        },
    ),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM",
        sizes={
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
    ),
    "RecurrentGemma": Family(
        "RecurrentGemmaForCausalLM", sizes={"lru_width": 64, "attention_window_size": 8}
    ),
    "RWKV": Family("RwkvForCausalLM", sizes={"attention_hidden_size": 64}),
    "Zamba": Family("ZambaForCausalLM", sizes={"layer_types": _HYBRID, "mamba_dt_rank": 32}),
    "Zamba2": Family(
        "Zamba2ForCausalLM",
        sizes={
            **{"layers_block_type": [*_HYBRID, *["mamba"] * 4], "hybrid_layer_ids": [1, 4]},
            "num_hidden_layers": 10,
        },
    ),
    # encoders
    "ALBERT": Family(
        "AlbertForMaskedLM", "encoder", {"num_hidden_layers": 12, "num_hidden_groups": 6}
    ),
    "ConvBERT": Family("ConvBertForMaskedLM", "encoder"),
    "DeBERTa": Family("DebertaForMaskedLM", "encoder"),
    "DeBERTa-v2": Family("DebertaV2ForMaskedLM", "encoder"),
    "DistilBERT": Family("DistilBertForMaskedLM", "encoder"),
    "ELECTRA": Family("ElectraForMaskedLM", "encoder"),
    "Funnel": Family(
        "FunnelForMaskedLM", "encoder", {"d_inner": 128, "d_head": 16, "block_sizes": [2, 2]}
    ),
    "ModernBERT": Family("ModernBertForMaskedLM", "encoder"),
    "MPNet": Family("MPNetForMaskedLM", "encoder"),
    "XLNet": Family("XLNetLMHeadModel", "encoder", {"d_inner": 128}),
    # encoders with decoders
    "BART": Family("BartForConditionalGeneration", "both"),
    "Blenderbot": Family("BlenderbotForConditionalGeneration", "both"),
    "LED": Family(
        "LEDForConditionalGeneration",
        "both",
        {
            **{"attention_window": 4, "max_encoder_position_embeddings": 64},
            "max_decoder_position_embeddings": 64,
        },
    ),
    "LongT5": Family("LongT5ForConditionalGeneration", "both"),
    "M2M100": Family("M2M100ForConditionalGeneration", "both"),
    "Marian": Family("MarianMTModel", "both"),
    "Pegasus": Family("PegasusForConditionalGeneration", "both"),
    "Switch": Family("SwitchTransformersForConditionalGeneration", "both"),
    "T5Gemma": Family("T5GemmaForConditionalGeneration", "both"),
    "UMT5": Family("UMT5ForConditionalGeneration", "both"),
    # vision
    "BEiT": Family("BeitForImageClassification", "image"),
    "DeiT": Family("DeiTForImageClassification", "image"),
    "DINOv2": Family("Dinov2ForImageClassification", "image"),
    "MobileNetV2": Family("MobileNetV2ForImageClassification", "image", {"depth_multiplier": 0.25}),
    "RegNet": Family("RegNetForImageClassification", "image", _STAGES | {"groups_width": 16}),
    "ResNet": Family("ResNetForImageClassification", "image", _STAGES | {"layer_type": "basic"}),
    "SegFormer": Family(
        "SegformerForImageClassification",
        "image",
        {
            **{"hidden_sizes": [32, 32, 64, 64], "num_attention_heads": [1, 2, 2, 4]},
            **{"depths": [1, 1, 2, 2], "decoder_hidden_size": 64},
        },
    ),
    "Swin": Family("SwinForImageClassification", "image", _WINDOWS),
    "Swin v2": Family("Swinv2ForImageClassification", "image", _WINDOWS),
    # audio
    "AST": Family(
        "ASTForAudioClassification",
        "features",
        {"num_mel_bins": 32, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
    ),
    "HuBERT": Family("HubertForCTC", "wave", _LISTENS),
    "Moonshine": Family(
        "MoonshineForConditionalGeneration",
        "speech",
        {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    ),
    "SEW": Family("SEWForCTC", "wave", _LISTENS | {"squeeze_factor": 2}),
    "VITS": Family(
        "VitsModel",
        "encoder",
        {
            **{"flow_size": 64, "spectrogram_bins": 33, "upsample_initial_channel": 64},
            **{"prior_encoder_num_flows": 2, "posterior_encoder_num_wavenet_layers": 2},
            **{"prior_encoder_num_wavenet_layers": 2, "duration_predictor_filter_channels": 64},
            **{
                "wavenet_dilation_rate": 1,
                "upsample_rates": [4, 4],
                "depth_separable_num_layers": 2,
            },
            **{"upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3]},
            **{
                "resblock_dilation_sizes": [[1, 3]],
                "noise_scale": 0.0,
                "noise_scale_duration": 0.0,
            },
        },
    ),
    "Wav2Vec2": Family(
        "Wav2Vec2ForCTC",
        "wave",
        _LISTENS | {"feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    "WavLM": Family("WavLMForCTC", "wave", _LISTENS),
    # images and text
    "GIT": Family("GitForCausalLM", "text and image"),
    "Idefics3": Family(
        "Idefics3ForConditionalGeneration",
        "1 place, images",
        {"image_token_id": 95, "scale_factor": 4},
    ),
    "InternVL": Family(
        "InternVLForConditionalGeneration",
        "4 places",
        {"image_token_id": 95, "vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    ),
    "PaliGemma": Family(
        "PaliGemmaForConditionalGeneration",
        "16 places",
        {"image_token_id": 95, "projection_dim": 64, "vision_config": {"projection_dim": 64}},
    ),
    "Qwen2-VL": Family("Qwen2VLForConditionalGeneration", "patches", _SEES_PATCHES),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLForConditionalGeneration",
        "patches",
        _SEES_PATCHES
        | {
            "vision_config": {"depth": 2, "out_hidden_size": 64, "window_size": 16, "patch_size": 8}
        },
    ),
    "SigLIP": Family("SiglipModel", "text and image"),
}
