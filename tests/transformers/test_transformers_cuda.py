"""Models of transformers on a GPU, and in 4 bits with bitsandbytes. Skipped on machines without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

torch = needs.module("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
transformers = needs.module("transformers")

from transformers_helpers import (  # noqa: E402
    MODELS,
    assert_same,
    load,
    quiet,
    reference,
    rewrite,
    saved,
    tensors_of,
)

import streamload.transformers as ours  # noqa: E402

__all__ = ["quiet"]

CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4-nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}
IDS = torch.arange(1, 33)[None]


@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(tmp_path: Path, name: str) -> None:
    """On a GPU are the same bits, computed buffers among them, and a model that runs."""
    saved(tmp_path, name, torch.bfloat16)
    found = load(tmp_path, device="cuda:0", budget="100MB")
    assert {str(t.device) for t in tensors_of(found).values()} == {"cuda:0"}
    ids = torch.tensor([[5, 17, 3, 42, 8]], device="cuda:0")
    if name != "bert":
        found.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert_same(found.cpu(), reference(tmp_path, name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "llama-tied",
            {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 8, "head_dim": 128},
        ),
        ("qwen3-moe", {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 6}),
        ("gpt2", {"n_embd": 512, "n_layer": 8}),
        ("t5", {"d_model": 512, "d_kv": 128, "d_ff": 1024, "num_layers": 4}),
    ],
)
def test_layers_over_two_gpus(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Layers split over two GPUs by budget run there, and give the same tokens as on one."""
    needs.module("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip("no two CUDA devices here")
    folder = saved(tmp_path, name, **changes)
    names = ["cuda:0", "cuda:1"]
    whole = load(folder, device="cuda:0")
    budget = dict.fromkeys(names, whole.streamload_report.resident_nbytes * 7 // 10)
    found = load(folder, device=names, budget=budget)
    assert set(found.hf_device_map.values()) == {0, 1}
    assert {str(t.device) for t in tensors_of(found).values()} == set(names)
    ids = torch.tensor([[5, 17, 3, 42, 8]], device="cuda:0")
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    assert found.generate(ids, **options).tolist() == whole.generate(ids, **options).tolist()


def test_a_model_with_a_new_head_runs_on_a_gpu_and_the_cpu(tmp_path: Path) -> None:
    needs.module("accelerate")
    changes = {"vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "head_dim": 128}
    folder = saved(tmp_path, "llama", **changes)
    lost = ("lm_head.weight", "model.layers.7.mlp.up_proj.weight")
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k not in lost})
    found = load(folder, device=["cuda:0", "cpu"], budget={"cuda:0": "52MB"}, strict=False)
    assert set(found.hf_device_map.values()) == {0, "cpu"}
    ids = torch.tensor([[5, 17, 3, 42, 8]], device="cuda:0")
    assert found(ids).logits.isfinite().all()


# --- with bitsandbytes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs.module("bitsandbytes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def both(path: Path, **config: Any) -> tuple[Any, Any]:
    more = {"quantization_config": transformers.BitsAndBytesConfig(**config)} if config else {}
    found = ours.from_pretrained(path, device="cuda:0", budget="2GB", progress=False, **more)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map="cuda:0", dtype="auto", **more
    )
    return found, theirs


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS.cuda()).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
def test_quantized_on_the_way(llama: Path, name: str) -> None:
    """State and logits equal transformers' own."""
    found, theirs = both(llama, **CONFIGS[name])
    mine, other = found.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for key, tensor in other.items():
        assert torch.equal(mine[key], tensor), key
    assert torch.equal(logits(found), logits(theirs))


@pytest.mark.slow
def test_nested_on_the_way(llama: Path) -> None:
    """Nested, state is equal but for the mean's last place and what hangs on it."""
    found, theirs = both(llama, **CONFIGS["nf4-nested"])
    mine, other = found.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    states = [key for key in mine if "quant_state" in key]
    assert states
    apart = 0
    for key in states:
        name = key[: key.index(".quant_state")]
        a, b = (
            np.float32(json.loads(bytes(some[key].cpu().numpy()))["nested_offset"])
            for some in (mine, other)
        )
        assert abs(a - b) <= np.spacing(b), key
        apart += a != b
        assert torch.equal(mine[name], other[name]), name
        if a == b:
            for part in ("absmax", "nested_absmax", "nested_quant_map"):
                assert torch.equal(mine[f"{name}.{part}"], other[f"{name}.{part}"]), (name, part)
    print(f"{apart} of {len(states)} means differ in their last place")
    if not apart:
        assert torch.equal(logits(found), logits(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONFIGS))
def test_stored(llama: Path, tmp_path: Path, name: str) -> None:
    """A checkpoint that transformers saved with bitsandbytes has its state and logits."""
    config = transformers.BitsAndBytesConfig(**CONFIGS[name])
    made = transformers.AutoModelForCausalLM.from_pretrained(
        llama, device_map="cuda:0", dtype="auto", quantization_config=config
    )
    made.save_pretrained(tmp_path)
    found, theirs = both(tmp_path)
    mine, other = found.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for key, tensor in other.items():
        assert torch.equal(mine[key], tensor), key
    assert torch.equal(logits(found), logits(theirs))
