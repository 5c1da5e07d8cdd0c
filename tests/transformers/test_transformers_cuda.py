"""Models in 4 bits on a GPU, beside transformers with bitsandbytes. Skipped on machines without."""

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
needs.module("bitsandbytes")
transformers = needs.module("transformers")

import streamload.transformers as ours  # noqa: E402

pytestmark = pytest.mark.slow
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of bf16."""
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
    """The model as it is loaded here, and by transformers alone."""
    more = {"quantization_config": transformers.BitsAndBytesConfig(**config)} if config else {}
    found = ours.from_pretrained(path, device="cuda:0", budget="2GB", progress=False, **more)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map="cuda:0", dtype="auto", **more
    )
    return found, theirs


def logits(model: Any) -> Any:
    """What a model says of some tokens."""
    with torch.no_grad():
        return model(IDS.cuda()).logits


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
def test_quantized_on_the_way(llama: Path, name: str) -> None:
    """State and logits equal transformers' own."""
    found, theirs = both(llama, **CONFIGS[name])
    mine, other = found.state_dict(), theirs.state_dict()
    assert mine.keys() == other.keys()
    for key, tensor in other.items():
        assert torch.equal(mine[key], tensor), key
    assert torch.equal(logits(found), logits(theirs))


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
