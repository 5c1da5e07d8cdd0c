"""Tiny pipelines of diffusers with random weights: Stable Diffusion, SDXL, SD3, Flux and Wan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import tokenizers
import torch
import transformers

PROMPT = "a photo of a cat"


def tokenizer() -> Any:
    """One of CLIP's form, whose words are letters."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    model = tokenizers.models.BPE(
        {word: number for number, word in enumerate(words)},
        [],
        unk_token="<|endoftext|>",
        end_of_word_suffix="</w>",
    )
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_max_length=77,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
    )


def clip(model_class: Any = transformers.CLIPTextModel, hidden_size: int = 32) -> Any:
    config = transformers.CLIPTextConfig(
        bos_token_id=52,
        eos_token_id=53,
        hidden_size=hidden_size,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=54,
        projection_dim=32,
    )
    return model_class(config).eval()


def vae(**config: Any) -> Any:
    return diffusers.AutoencoderKL(
        **config,
        block_out_channels=[32, 64],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=4,
    ).eval()


def unet(**config: Any) -> Any:
    """What takes noise away, in two blocks, with attention in one."""
    return diffusers.UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **config,
    ).eval()


def stable_diffusion() -> Any:
    return diffusers.StableDiffusionPipeline(
        unet=unet(
            block_out_channels=(4, 8), layers_per_block=1, cross_attention_dim=32, norm_num_groups=2
        ),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False),
        vae=vae(),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    """Stable Diffusion XL: two text encoders."""
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(
            block_out_channels=(32, 64),
            layers_per_block=2,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=80,
            cross_attention_dim=64,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(),
        vae=vae(),
        text_encoder=clip(),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        add_watermarker=False,
    )


def t5(model_class: Any = transformers.T5EncoderModel) -> Any:
    sizes = {"vocab_size": 54, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
    return model_class(model_class.config_class(num_layers=2, **sizes)).eval()


def sd3() -> Any:
    """Stable Diffusion 3: a transformer, two of CLIP and T5."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=32,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.06),
        text_encoder=clip(transformers.CLIPTextModelWithProjection),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
        text_encoder_3=t5(),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        tokenizer_3=tokenizer(),
    )


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return diffusers.WanPipeline(
        transformer=transformer.eval(),
        scheduler=diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0),
        vae=diffusers.AutoencoderKLWan(
            base_dim=3,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ).eval(),
        text_encoder=t5(transformers.UMT5EncoderModel),
        tokenizer=tokenizer(),
    )


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.FluxPipeline(
        transformer=transformer.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(4,),
            sample_size=32,
            in_channels=3,
            out_channels=3,
            latent_channels=1,
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5035,
        ).eval(),
        text_encoder=clip(),
        text_encoder_2=t5(),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
    )


PIPELINES: dict[str, Callable[[], Any]] = {
    "Stable Diffusion": stable_diffusion,
    "SDXL": sdxl,
    "SD3": sd3,
    "Flux": flux,
    "Wan": wan,
}


def saved(folder: Path, name: str, **arguments: Any) -> Path:
    torch.manual_seed(0)
    pipeline = PIPELINES[name]()
    for model in models(pipeline).values():  # norms and biases too, which would be ones and zeros
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
    pipeline.save_pretrained(folder, **arguments)
    return folder


def models(pipeline: Any) -> dict[str, Any]:
    found = pipeline.components.items()
    return {name: value for name, value in found if isinstance(value, torch.nn.Module)}


def image(pipeline: Any, **more: Any) -> Any:
    """What it draws for a prompt and a seed, as an array; ``more``: arguments of the pipeline."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator(device="cpu").manual_seed(7)
    size = {"height": 64, "width": 64}
    if isinstance(pipeline, diffusers.FluxPipeline):
        size = {"height": 8, "width": 8, "max_sequence_length": 48}
    if isinstance(pipeline, diffusers.WanPipeline):
        size = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
    given = {"generator": generator, "num_inference_steps": 2, "output_type": "np"}
    out = pipeline(PROMPT, **given, **(more | size if len(size) > 2 else size | more))
    return out.frames if isinstance(pipeline, diffusers.WanPipeline) else out.images
