"""Models that ``quant=`` loaded, saved: who opens them, and what they say of themselves."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import needs
import pytest
from transformers_quantized_helpers import load, logits, needs_library, plain, quiet, raw, reference
from transformers_quantizing_helpers import EXPERTS, error, make, said_in

torch = needs.module("torch")
transformers = needs.module("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.integrations.peft import MIN_PEFT_VERSION  # noqa: E402
from transformers.utils.peft_utils import check_peft_version  # noqa: E402

import streamload  # noqa: E402
from streamload.devices.torch.quantized import Coded  # noqa: E402
from streamload.errors import CheckpointError, StateDictMismatchError  # noqa: E402
from streamload.transformers.quantizers import stored  # noqa: E402

__all__ = ["quiet"]

#: Who opens what is saved: a method of transformers, or streamload alone.
METHODS = {
    ("Llama", "int8"): "compressed-tensors",
    ("Llama", "bitsandbytes-int8"): "bitsandbytes",
    **{("Llama", name): "bitsandbytes" for name in ("nf4", "nf4-nested", "fp4", "fp4-nested")},
    **{("Llama", name): "streamload" for name in ("q8_0", "q4_0")},
    ("GPT2", "nf4"): "bitsandbytes",
    ("GPT2", "bitsandbytes-int8"): "bitsandbytes",
    **{("GPT2", name): "streamload" for name in ("int8", "q8_0")},
    **{("Mixtral", name): "streamload" for name in ("int8", "nf4-nested", "q4_0")},
    ("Qwen3Moe", "nf4"): "streamload",
}
LIBRARIES = {"bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}


def bytes_of(model: Any) -> dict[str, Any]:
    return {name: raw(tensor) for name, tensor in model.state_dict().items()}


def contents_of(model: Any) -> dict[str, Any]:
    return {name: raw(tensor)[-1] for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("name", "format"), METHODS)
def test_what_is_saved_is_opened(tmp_path: Path, name: str, format: str) -> None:
    """By us with the same bytes, and by transformers with the same logits where it has modules."""
    make(tmp_path / "in", name, torch.float32)
    model = load(tmp_path / "in", quant=format)
    model.save_pretrained(tmp_path / "out")
    method = METHODS[name, format]
    assert said_in(tmp_path / "out")["quant_method"] == method
    assert model.config.quantization_config.to_dict() == said_in(tmp_path / "out")
    if method == "streamload":
        again = load(tmp_path / "out")
        assert contents_of(again) == contents_of(model)
        assert torch.equal(logits(again), logits(model))
        again.save_pretrained(tmp_path / "again")
        assert said_in(tmp_path / "again") == said_in(tmp_path / "out")
        with pytest.raises((RuntimeError, ValueError)):  # and not noise
            reference(tmp_path / "out")
        return
    needs_library(LIBRARIES[method])
    expected = logits(model)
    near = 0.02 if format == "bitsandbytes-int8" else 1e-3  # it quantises activations, too
    for opened in (reference(tmp_path / "out", device_map="cpu"), load(tmp_path / "out")):
        assert error(logits(opened), expected) < near


@pytest.mark.parametrize(("name", "format"), [k for k, v in METHODS.items() if v != "streamload"])
def test_what_is_saved_is_opened_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, format: str
) -> None:
    """In modules of streamload, with the same bytes and logits; what `convert` writes, too."""
    monkeypatch.setattr(stored, "_installed", lambda package: False)
    make(tmp_path / "in", name, torch.float32)
    model = load(tmp_path / "in", quant=format)
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert contents_of(again) == contents_of(model)
    assert torch.equal(logits(again), logits(model))
    assert any("modules of streamload hold" in note for note in again.streamload_report.notes)
    again.save_pretrained(tmp_path / "again")
    assert said_in(tmp_path / "again") == said_in(tmp_path / "out")
    if not format.endswith("nested"):
        streamload.convert(tmp_path / "in", tmp_path / "made", quant=format, progress=False)
        assert torch.equal(logits(load(tmp_path / "made")), logits(model))
    if METHODS[name, format] == "bitsandbytes":
        asked = transformers.BitsAndBytesConfig(load_in_4bit=True)
        with pytest.raises((CheckpointError, ImportError), match="bitsandbytes"):
            load(tmp_path / "out", quantization_config=asked)


@pytest.mark.parametrize("format", ["nf4", "fp4", "int8", "q8_0"])
def test_stored_weights_of_another_shape_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Two weights, of shapes (a, b) and (b, a), are stored under each other's names."""
    monkeypatch.setattr(stored, "_installed", lambda package: False)
    make(tmp_path / "in", "Llama", torch.float32)
    streamload.convert(tmp_path / "in", tmp_path / "out", quant=format, progress=False)
    [path] = (tmp_path / "out").glob("*.safetensors")
    other = {"up_proj": "down_proj", "down_proj": "up_proj"}
    state = {
        re.sub("up_proj|down_proj", lambda found: other[found[0]], name): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(state, path, metadata={"format": "pt"})
    (tmp_path / "out" / "streamload.json").unlink()
    for options in ({}, {"offload": True, "budget": "10MB"}):
        with pytest.raises(StateDictMismatchError, match=r"of another shape \(.*_proj"):
            load(tmp_path / "out", **options)


def test_in_several_files_and_with_what_is_skipped(tmp_path: Path) -> None:
    """A tied head, patterns, several formats, a generation config, and files of 30 kB."""
    plain(tmp_path / "in", tie_word_embeddings=True)
    quant = {"*q_proj*": None, "*.mlp.*": "q8_0", "*": "nf4"}
    model = load(tmp_path / "in", quant=quant)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "out", max_shard_size="30kB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    again = load(tmp_path / "out")
    assert bytes_of(again) == bytes_of(model)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.generation_config.max_new_tokens == 7
    assert not isinstance(again.model.layers[0].self_attn.q_proj, Coded)


def test_codes_are_not_taken_for_floats(tmp_path: Path) -> None:
    """By transformers, which skips a method that it does not know: their shape is another."""
    make(tmp_path / "in", "Llama")
    model = load(tmp_path / "in", quant={"*.mlp.*": "int8", "*": "bitsandbytes-int8"})
    model.save_pretrained(tmp_path / "out")
    with pytest.raises((RuntimeError, ValueError)):
        reference(tmp_path / "out")
    again = load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))
    assert torch.equal(logits(again.dequantize()), logits(model))


def test_the_state_that_is_given_is_saved(tmp_path: Path) -> None:
    make(tmp_path / "in", "Llama")
    model = load(tmp_path / "in", quant="q8_0")
    state = model.state_dict()
    state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], 3.0)
    model.save_pretrained(tmp_path / "changed", state_dict=state)
    assert load(tmp_path / "changed").model.norm.weight.unique().tolist() == [3.0]
    floats = copy.deepcopy(model).dequantize().state_dict()
    model.save_pretrained(tmp_path / "floats", state_dict=floats)
    assert said_in(tmp_path / "floats") is None
    assert bytes_of(reference(tmp_path / "floats")) == {n: raw(t) for n, t in floats.items()}
    assert model.config.quantization_config.quant_method == "streamload"
    model = load(tmp_path / "in", quant="int8")
    state = {n: t for n, t in model.state_dict().items() if not n.endswith("_scale")}
    with pytest.raises(ValueError, match=r"state_dict has its codes, and no .*_scale"):
        model.save_pretrained(tmp_path / "codes", state_dict=state)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2"])
def test_what_it_says_of_itself(tmp_path: Path, name: str) -> None:
    """Its parameters, its bytes, its class; and it is a model of floats when it is dequantised."""
    make(tmp_path, name)
    model, plain_model = load(tmp_path, quant="q8_0"), load(tmp_path)
    assert isinstance(model, type(plain_model))
    assert type(model).__name__ == type(plain_model).__name__
    for method in ("save_pretrained", "num_parameters", "forward"):
        found, own = getattr(model, method), getattr(plain_model, method)
        assert inspect.signature(found) == inspect.signature(own)
        assert (found.__name__, found.__doc__) == (own.__name__, own.__doc__)
    assert model.is_quantized and not getattr(plain_model, "is_quantized", False)
    for options in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**options) == plain_model.num_parameters(**options)
    held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert model.get_memory_footprint() == sum(held.values())
    rest = sum(t.nbytes for n, t in model.named_buffers() if "rotary" in n)
    assert model.get_memory_footprint(return_buffers=False) == sum(held.values()) - rest
    expected = logits(model)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(other) is type(model)
        assert torch.equal(logits(other), expected)
        other.half()
        assert other.to(torch.float32).dtype is torch.float32
        assert error(logits(other), expected) < 0.02
    dense = model.dequantize()
    assert type(dense) is type(plain_model)
    assert not any(isinstance(module, Coded) for module in dense.modules())
    assert not dense.is_quantized and getattr(dense, "hf_quantizer", None) is None
    assert bytes_of(dense).keys() == bytes_of(plain_model).keys()
    kwargs = {"experts_implementation": "eager"} if name in EXPERTS else {}
    dense.save_pretrained(tmp_path / "dense")
    assert said_in(tmp_path / "dense") is None
    assert error(logits(reference(tmp_path / "dense", **kwargs)), expected) < 0.02


def test_a_model_in_a_model_is_saved(tmp_path: Path) -> None:
    make(tmp_path / "in", "Llama")
    model = load(tmp_path / "in", quant="q8_0")
    said = model.config.quantization_config.to_dict()
    model.model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert type(again).__name__ == "LlamaModel"
    assert bytes_of(again) == bytes_of(model.model)
    assert model.config.quantization_config.to_dict() == said
    other = type(model)(model.config)  # of the class alone, without codes
    assert other.num_parameters() == model.num_parameters()


def test_a_model_that_does_not_say_that_it_holds_codes_is_not_saved(tmp_path: Path) -> None:
    """It was filled by `streamload.load_state_dict`; a state that is given changes nothing."""
    make(tmp_path / "in", "Llama")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    options: Any = {"device": "cpu", "progress": False}
    streamload.load_state_dict(model, file, quant="int8", **options)
    for each in (model, model.model, copy.deepcopy(model)):
        for given in ({}, {"state_dict": each.state_dict()}):
            with pytest.raises(ValueError, match=f"cannot save {type(each).__name__}.*from_pre"):
                each.save_pretrained(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["int8", "nf4-nested"])
def test_weights_of_a_quantized_model_are_tied_again(tmp_path: Path, format: str) -> None:
    sizes = {"num_hidden_layers": 4, "layers_block_type": ["hybrid", "mamba"] * 2}
    small = {"mamba_d_state": 8, "n_mamba_heads": 2, "num_key_value_heads": 4}
    tied = {"num_mem_blocks": 1, "tie_word_embeddings": True}
    plain(tmp_path, "Zamba2", torch.float32, **sizes, **small, **tied)
    model = load(tmp_path, quant=format)
    expected = logits(model)
    model.tie_weights()
    assert torch.equal(logits(model), expected)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    assert torch.equal(logits(model)[..., :-8], expected)


def test_modules_of_two_libraries_are_not_saved(tmp_path: Path) -> None:
    needs_library("bitsandbytes")
    make(tmp_path / "in", "Mixtral")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model = load(tmp_path / "in", quantization_config=config)
    with pytest.raises(ValueError, match=r"cannot save MixtralForCausalLM.*quant=\"nf4\""):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_it_is_trained_and_saved_by_a_trainer(tmp_path: Path) -> None:
    make(tmp_path / "in", "Llama", torch.float32)
    model = load(tmp_path / "in", quant="q8_0")
    before = raw(model.model.norm.weight)
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 4
    options = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(
        model, options, transformers.default_data_collator, train_dataset=rows
    )
    trainer.train()
    assert raw(model.model.norm.weight) != before
    trainer.save_model(str(tmp_path / "out"))
    assert bytes_of(load(tmp_path / "out")) == bytes_of(model)


def test_adapters_of_peft(tmp_path: Path) -> None:
    """They train on it, and are saved alone; under checkpoints of activations, too."""
    needs_library("peft")
    import peft

    make(tmp_path / "in", "Llama", torch.float32)
    model = load(tmp_path / "in", quant="q8_0")
    model.gradient_checkpointing_enable()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    adapted.train()
    ids = torch.arange(8)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for n, p in adapted.named_parameters() if "lora_B" in n]
    assert all(g is not None and g.abs().sum() > 0 for g in gradients)
    adapted.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    assert load(tmp_path / "in", quant="q8_0").generate(ids, max_new_tokens=2).shape == (1, 10)


def test_adapters_that_transformers_adds(tmp_path: Path) -> None:
    """`add_adapter` takes models in whose modules weights are quantised; the adapter is saved."""
    needs_library("peft")
    import peft

    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        pytest.skip(
            f"add_adapter of the installed transformers refuses the installed peft: {error}"
        )
    make(tmp_path / "in", "Llama", torch.float32)
    model = load(tmp_path / "in", quant="q8_0")
    filled = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "in")
    streamload.load_state_dict(filled, tmp_path / "in", quant="q8_0", progress=False)
    for name, each in {"own": model, "filled": filled, "copied": copy.deepcopy(filled)}.items():
        each.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
        each.save_pretrained(tmp_path / name)
        files = [path.name for path in (tmp_path / name).glob("*.safetensors")]
        assert files == ["adapter_model.safetensors"]


def test_what_is_saved_is_offloaded(tmp_path: Path) -> None:
    make(tmp_path / "in", "Llama")
    model = load(tmp_path / "in", quant="q8_0")
    model.save_pretrained(tmp_path / "out")
    opened = load(tmp_path / "out", offload=True, budget="75kB")
    assert "\nstream" in str(opened.streamload_offload.plan)
    assert torch.equal(logits(opened), logits(model))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"formats": {}}, "has no formats"),
        ({"formats": {"nf5": []}}, "'nf5' is no format"),
        ({"formats": {"q8_0": ["model.x.weight"]}}, "names a tensor that is not there"),
        ({"formats": {"q8_0": ["model.norm.weight"]}}, "no module can hold model.norm.weight"),
    ],
)
def test_wrong_configurations_are_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    from streamload.errors import CheckpointError

    make(tmp_path / "in", "Llama")
    load(tmp_path / "in", quant="q8_0").save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "out")
