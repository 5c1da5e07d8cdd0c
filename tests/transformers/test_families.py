"""Families of models as docs/models.md lists them, with the real packages."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

import streamload
from streamload.errors import StateDictMismatchError

torch = needs.module("torch")
transformers = needs.module("transformers")

from models_page import rows  # noqa: E402
from transformers_helpers import AUDIO, GROUPED, MODELS, SMALL, assert_same_bits  # noqa: E402

TOKENS = [[3, 14, 15, 9, 26, 5, 35]]
MOE: dict[str, Any] = {**GROUPED, "head_dim": 8, "num_experts_per_tok": 2}
IMAGES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}

#: By the names of docs/models.md: a class of transformers, sizes, and what the model gets.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, "text"),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, "text"),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, "text"),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, "text"),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**MOE, "moe_intermediate_size": 16, "num_experts": 4},
        "text",
    ),
    "Gemma 2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}, "text"),
    "Gemma 3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}, "text"),
    "Phi-3": ("Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}, "text"),
    "GPT-2": ("GPT2LMHeadModel", MODELS["gpt2"][2], "text"),
    "GPT-NeoX": ("GPTNeoXForCausalLM", SMALL, "text"),
    "gpt-oss": ("GptOssForCausalLM", {**MOE, "num_local_experts": 4}, "text"),
    "OPT": (
        "OPTForCausalLM",
        {
            **{name: SMALL[name] for name in SMALL if name != "intermediate_size"},
            **{"ffn_dim": 48, "word_embed_proj_dim": 32},
        },
        "text",
    ),
    "Mixtral": ("MixtralForCausalLM", MODELS["mixtral"][2], "text"),
    "Mamba": (
        "MambaForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "text",
    ),
    "BERT": ("BertForMaskedLM", SMALL, "text"),
    "RoBERTa": ("RobertaForMaskedLM", SMALL, "text"),
    "T5": ("T5ForConditionalGeneration", MODELS["t5"][2], "both"),
    "Whisper": ("WhisperForConditionalGeneration", AUDIO, "audio"),
    "ViT": ("ViTForImageClassification", IMAGES, "image"),
    "CLIP": (
        "CLIPModel",
        {
            "text_config": {**SMALL, "bos_token_id": 1, "eos_token_id": 8},
            "vision_config": IMAGES,
            "projection_dim": 16,
        },
        "text and image",
    ),
    "LLaVA": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **IMAGES},
            "image_token_id": 95,
        },
        "text",
    ),
}


def given(kind: str) -> dict[str, Any]:
    text = {"input_ids": torch.tensor([[5, 17, 3, 42, 8]])}
    image = {"pixel_values": torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32) / 3072}
    audio = {"input_features": torch.arange(8 * 32).reshape(1, 8, 32) / 256}
    decoded = {"decoder_input_ids": text["input_ids"]}
    kinds = {"text": text, "image": image, "text and image": text | image}
    return {**kinds, "both": text | decoded, "audio": audio | decoded}[kind]


def computed(model: Any, kind: str) -> Any:
    """What it computes, from weights that torch allocated: those in files round otherwise."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    with torch.no_grad():
        return model(**given(kind))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_transformers(tmp_path: Path, name: str) -> None:
    """Both first lines of a user work as docs/models.md says, or say the line that does."""
    class_name, sizes, kind = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(1)
    source = model_class(model_class.config_class(**sizes)).eval()
    with torch.no_grad():
        for parameter in source.parameters():  # norms and biases, which would be ones and zeros
            parameter.add_(torch.randn_like(parameter) * 0.05)
    source.save_pretrained(tmp_path)
    expected = model_class.from_pretrained(tmp_path)

    found = streamload.transformers.from_pretrained(tmp_path, budget="5MB")
    assert type(found) is model_class
    assert_same_bits(found, expected)
    result = computed(expected, kind)
    assert torch.equal(computed(found, kind), result)

    own = model_class(source.config).eval()
    typed = rows("transformers")[name]
    assert typed[0] == "as typed"
    try:
        streamload.load_state_dict(own, tmp_path, budget="5MB")
    except StateDictMismatchError as error:
        assert typed[1] == f"`{error.instead.replace(str(tmp_path), 'path')}`".replace('"', "")
        own = eval(error.instead, {"streamload": streamload, class_name: model_class})
    else:
        assert typed[1] == "as typed"
    assert_same_bits(own, expected)
    assert torch.equal(computed(own, kind), result)


class Linears(torch.nn.Module):  # type: ignore[misc]
    """A GPT-2 whose layers are Linear, as nanoGPT's are."""

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            linear = torch.nn.Linear
            self.heads = heads
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
            self.attn = torch.nn.ModuleDict(
                {"c_attn": linear(dim, 3 * dim), "c_proj": linear(dim, dim)}
            )
            self.mlp = torch.nn.ModuleDict(
                {"c_fc": linear(dim, 4 * dim), "c_proj": linear(4 * dim, dim)}
            )

        def forward(self, x: Any) -> Any:
            batch, length, dim = x.shape
            parts = self.attn["c_attn"](self.ln_1(x)).split(dim, dim=2)
            q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(batch, length, dim))
            wide = torch.nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
            return x + self.mlp["c_proj"](wide)

    def __init__(self, vocab: int, dim: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, dim), torch.nn.Embedding(positions, dim)
        self.h = torch.nn.ModuleList(self.Block(dim, heads) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(dim)
        self.lm_head = torch.nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_gpt2_into_linears(tmp_path: Path, whole: bool) -> None:
    """What transformers saves computes the same in a model of Linear; with and without a head."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    (theirs if whole else theirs.transformer).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Linears(64, 32, 2, 4, 16)
    tied = {} if whole else {"strict": False}
    streamload.load_state_dict(model, tmp_path, mapping="hf-gpt2", device="cpu", **tied)
    if not whole:
        model.lm_head.weight = model.wte.weight
    with torch.no_grad():
        tokens = torch.tensor(TOKENS)
        assert torch.allclose(model(tokens), theirs(tokens).logits, atol=1e-5)


def qwen(kind: str) -> tuple[Any, dict[str, Any]]:
    """A small Qwen of transformers, and what tinygrad.llm calls its sizes."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "tie_word_embeddings": kind == "qwen2"}
    ours: dict[str, Any] = {"num_blocks": 2, "dim": 32, "hidden_dim": 48, "n_heads": 4}
    ours |= {"n_kv_heads": 2, "vocab_size": 64, "head_dim": 8, "v_head_dim": 8, "rope_dim": 8}
    if kind == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)), ours | {
            "qkv_bias": True
        }
    sizes |= {"head_dim": 8}
    ours |= {"qk_norm": 8}
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)), ours
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sizes |= {"norm_topk_prob": True}
    ours |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_dim": 24}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)), ours


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe"])
def test_qwen_into_tinygrad(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers saves computes the same in tinygrad.llm, with its experts stacked."""
    pytest.importorskip("tinygrad.llm")
    from tinygrad import Tensor, nn

    if importlib.util.find_spec("tinygrad.llm.kernels") is None:  # the wheel of 0.14 lacks it
        kernels = types.ModuleType("tinygrad.llm.kernels.amd")
        never: Any = lambda *args: False  # noqa: E731
        kernels.Linear = nn.Linear  # type: ignore[attr-defined]
        for name in ("amd_custom_kernels_supported", "flash_attention", "gated_delta_prefill"):
            setattr(kernels, name, never)
        package = types.ModuleType("tinygrad.llm.kernels")
        monkeypatch.setitem(sys.modules, "tinygrad.llm.kernels", package)
        monkeypatch.setitem(sys.modules, "tinygrad.llm.kernels.amd", kernels)
    llm = importlib.import_module("tinygrad.llm.model")
    torch.manual_seed(0)
    theirs, sizes = qwen(kind)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[-1]))
    theirs.eval().save_pretrained(tmp_path)
    base = theirs.config
    theta = getattr(base, "rope_theta", None) or base.rope_parameters["rope_theta"]
    config = llm.TransformerConfig(
        norm_eps=base.rms_norm_eps, rope_theta=theta, max_context=16, **sizes
    )
    model = llm.Transformer(config)
    streamload.load_state_dict(model, tmp_path, mapping="hf-qwen", device="CPU", progress=False)
    x = model.token_embd(Tensor(TOKENS, device="CPU")).float()
    for block in model.blk:
        x = block(x, 0)
    found = model.output(model.output_norm(x)).numpy()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()  # its cache is float16
