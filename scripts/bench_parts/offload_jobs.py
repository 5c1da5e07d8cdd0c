"""A mixture of experts of random weights, and the tokens that it makes under a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_checkpoint import make_checkpoint

from bench_parts.diffusers_jobs import MetaShape

_PROMPT = 16  # tokens
_LAYER_NBYTES = 840_000_000  # about, of 64 experts of 12.6 MB


def write_mixture(out: Path, nbytes: int, shards: int = 5, **sizes: int) -> None:
    """Write a Qwen3-MoE of about so many bytes of bfloat16: 64 experts a layer, 8 chosen.

    ``sizes`` replace those of its configuration.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    given: dict[str, Any] = {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": max(round(nbytes / _LAYER_NBYTES), 1),
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
    }
    config = Qwen3MoeConfig(**given | sizes)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    make_checkpoint(out, MetaShape(model), shards=shards)
    config.save_pretrained(out)


def tokens(path: str, device: str, budget: int, count: int) -> Callable[[], dict[str, Any]]:
    """Load a model, and return a function that generates ``count`` tokens after 16.

    Args:
        path: the model's folder.
        device: of torch.
        budget: bytes of the device, or 0: all of it stays there.
        count: tokens.

    Returns:
        A function that returns tokens a second, seconds until the model was ready, and bytes of the
        page cache that are locked.
    """
    import torch
    import transformers.generation  # noqa: F401

    from streamload.core.memory import LOCKED
    from streamload.transformers import from_pretrained

    begun = time.perf_counter()
    options: dict[str, Any] = {"budget": budget, "offload": True} if budget else {}
    model = from_pretrained(path, device=device, progress=False, **options)
    ready_s = time.perf_counter() - begun
    ids = torch.arange(_PROMPT, device=device)[None]
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    asked |= {"pad_token_id": 0, "attention_mask": torch.ones_like(ids)}

    def lap() -> dict[str, Any]:
        begun = time.perf_counter()
        found = model.generate(ids, **asked).tolist()
        rate = count / (time.perf_counter() - begun)
        return {"rate": rate, "ready_s": ready_s, "locked": LOCKED.nbytes, "sum": sum(found[0])}

    return lap
