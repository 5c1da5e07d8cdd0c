"""Flux-shaped pipelines of random weights, and the ways to draw with them on a small device."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from make_checkpoint import make_checkpoint

from streamload.bench.processes import process_memory
from streamload.core.dtypes import DType

PROMPT = "a photo of a cat"
#: Steps of an image by a slow way: further ones are counted as long as their median.
FEW_STEPS = 3
_WARM_STEPS = 2  # of the first image, which is not counted

# --- the files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetaShape:
    """The tensors of a model of torch on the meta device, as a shape for `make_checkpoint`."""

    model: Any

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes; tied weights once."""
        return {name: tuple(each.shape) for name, each in self.model.named_parameters()}

    def config(self, dtype: DType) -> dict[str, Any]:
        """Nothing: the model writes its own."""
        return {}


def models(scale: float) -> dict[str, Any]:
    """The models of Flux on the meta device; at scale 1, 12 billion weights and T5-XXL."""
    import torch
    from diffusers import AutoencoderKL, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    def of(count: int) -> int:
        return max(math.ceil(count * scale), 1)

    width, clip = 64 * of(64), 64 * of(12)
    with torch.device("meta"):
        return {
            "transformer": FluxTransformer2DModel(
                num_layers=of(19),
                num_single_layers=of(38),
                num_attention_heads=of(24),
                joint_attention_dim=width,
                pooled_projection_dim=clip,
                guidance_embeds=True,
            ),
            "text_encoder": CLIPTextModel(
                CLIPTextConfig(
                    hidden_size=clip,
                    intermediate_size=4 * clip,
                    num_attention_heads=clip // 64,
                    num_hidden_layers=of(12),
                    bos_token_id=0,
                    eos_token_id=1,
                )
            ),
            "text_encoder_2": T5EncoderModel(
                T5Config(
                    vocab_size=32128,
                    d_model=width,
                    d_kv=64,
                    d_ff=width * 5 // 2,
                    num_layers=of(24),
                    num_heads=width // 64,
                    feed_forward_proj="gated-gelu",
                )
            ),
            "vae": AutoencoderKL(
                block_out_channels=[32 * of(n) for n in (4, 8, 16, 16)],
                down_block_types=["DownEncoderBlock2D"] * 4,
                up_block_types=["UpDecoderBlock2D"] * 4,
                latent_channels=16,
                layers_per_block=2,
                use_quant_conv=False,
                use_post_quant_conv=False,
                scaling_factor=0.3611,
                shift_factor=0.1159,
            ),
        }


def write(folder: Path, scale: float, say: Callable[[str], None], shards: int = 3) -> None:
    """Write a pipeline of random bfloat16, as diffusers does; nothing if it is there.

    ``shards``: files of its transformer.
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    if (folder / "model_index.json").is_file():
        return
    made = models(scale)
    for name, model in made.items():
        say(f"writing {name}")
        of_diffusers = name in ("transformer", "vae")
        out = folder / name
        make_checkpoint(out, MetaShape(model), shards=shards if name == "transformer" else 1)
        for file in out.glob("model.safetensors*") if of_diffusers else ():
            file.rename(out / f"diffusion_pytorch_{file.name}")
        if of_diffusers:
            model.save_config(out)
        else:
            model.config.architectures = [type(model).__name__]
            model.config.dtype = torch.bfloat16
            model.config.save_pretrained(out)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.save_pretrained(folder / "scheduler")
    for name in ("tokenizer", "tokenizer_2"):
        _tokenizer().save_pretrained(folder / name)
    found: dict[str, Any] = {name: _named(model) for name, model in made.items()}
    found |= dict.fromkeys(("tokenizer", "tokenizer_2"), _named(_tokenizer()))
    index = {"_class_name": FluxPipeline.__name__, "scheduler": _named(scheduler), **found}
    (folder / "model_index.json").write_text(json.dumps(index))


def _named(component: Any) -> list[str]:
    """Return the library and class of a component, as ``model_index.json`` has them."""
    return [type(component).__module__.partition(".")[0], type(component).__name__]


def _tokenizer() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(("<s>", "</s>", *PROMPT.split()))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=77, **special)


# --- the ways -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """A way to have a pipeline on a device.

    Attributes:
        load: from the folder, the device, the bytes of the budget, and bytes for activations.
        budgets: whether it heeds a budget.
        slow: whether an image has fewer steps.
    """

    load: Callable[[str, str, int, int], Any]
    budgets: bool = False
    slow: bool = False


def _ours(path: str, device: str, budget: int, reserve: int) -> Any:
    from streamload.diffusers import from_pretrained

    return from_pretrained(
        path, device=device, budget=budget, reserve=reserve, offload=True, progress=False
    )


def _theirs(path: str) -> Any:
    import torch
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(path, torch_dtype=torch.bfloat16)


def _resident(path: str, device: str, budget: int, reserve: int) -> Any:
    from streamload.diffusers import from_pretrained

    return from_pretrained(path, device=device, progress=False)


def _by_models(path: str, device: str, budget: int, reserve: int) -> Any:
    pipe = _theirs(path)
    pipe.enable_model_cpu_offload(device=device)
    return pipe


def _sequential(path: str, device: str, budget: int, reserve: int) -> Any:
    pipe = _theirs(path)
    pipe.enable_sequential_cpu_offload(device=device)
    return pipe


def _groups(kind: str) -> Callable[[str, str, int, int], Any]:
    def load(path: str, device: str, budget: int, reserve: int) -> Any:
        import torch

        pipe = _theirs(path)
        pipe.enable_group_offload(
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
            use_stream=True,
        )
        return pipe

    return load


def _mmgp(path: str, device: str, budget: int, reserve: int) -> Any:
    pipe = _theirs(path)
    from mmgp import offload  # afterwards: it replaces safetensors' safe_open by one of its own

    most = {"*": max((budget - reserve) // 2**20, 1)}  # mmgp 3.8.2 does not heed a number alone
    offload.all(pipe, pinnedMemory=True, quantizeTransformer=False, budgets=most, verboseLevel=0)
    return pipe


OURS = "streamload"
RESIDENT = "resident"  # all of it on the device
WAYS: Mapping[str, Way] = {
    OURS: Way(_ours, budgets=True),
    RESIDENT: Way(_resident),
    "enable_model_cpu_offload": Way(_by_models),
    "enable_group_offload, blocks, streams": Way(_groups("block_level")),
    "enable_group_offload, leaves, streams": Way(_groups("leaf_level")),
    "mmgp": Way(_mmgp, budgets=True),
    "enable_sequential_cpu_offload": Way(_sequential, slow=True),
}


def images(
    path: str, device: str, way: str, budget: int, reserve: int, steps: int, pixels: int
) -> Callable[[], dict[str, Any]]:
    """Load a pipeline, and return a function that draws; the first time only a few steps.

    It returns seconds an image, peaks of torch's allocator, the process's memory before the load,
    and a checksum of the image.
    """
    import torch

    on_cuda = device.startswith("cuda")
    torch.zeros(1, device=device)
    import diffusers  # noqa: F401

    import streamload.diffusers  # noqa: F401

    base = process_memory("self").anon_nbytes
    chosen = WAYS[way]
    pipe = chosen.load(path, device, budget, reserve)
    pipe.set_progress_bar_config(disable=True)
    done = 0

    def lap() -> dict[str, Any]:
        nonlocal done
        count = min(FEW_STEPS if chosen.slow else steps, steps)
        count, done = (min(_WARM_STEPS, steps) if not done else count), done + 1
        times: list[float] = []

        def look(pipe: Any, step: int, at: Any, given: Any) -> Any:
            if count < steps and on_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return given

        begun = time.perf_counter()
        found = (
            pipe(
                PROMPT,
                height=pixels,
                width=pixels,
                num_inference_steps=count,
                generator=torch.Generator("cpu").manual_seed(0),
                output_type="pt",
                max_sequence_length=512,
                callback_on_step_end=look,
            )
            .images.float()
            .cpu()
        )
        seconds = time.perf_counter() - begun
        each = [after - before for before, after in pairwise(times)]
        if count < steps and each:
            seconds += (steps - count) * median(each)
        said = {"seconds": seconds, "steps": count, "base_nbytes": base}
        said |= {"step_s": median(each) if each else 0.0, "finite": bool(found.isfinite().all())}
        said["image"] = zlib.crc32(found.numpy().tobytes())
        if on_cuda:
            said["device_nbytes"] = torch.cuda.max_memory_reserved(device)
            said["allocated_nbytes"] = torch.cuda.max_memory_allocated(device)
        return said

    return lap
