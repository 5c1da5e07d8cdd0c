"""`streamload.transformers.from_pretrained`: what transformers itself loads, bit for bit."""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import needs
import pytest
from hub_server import use_hub

from streamload.checkpoint.open import open_checkpoint
from streamload.conversion.convert import convert
from streamload.errors import CheckpointError, PlanInfeasibleError, StateDictMismatchError
from streamload.loading.report import device_map
from streamload.verification.verify import verify

torch = needs.module("torch")
transformers = needs.module("transformers")

import safetensors.torch as st  # noqa: E402
from transformers import conversion_mapping, core_model_loading  # noqa: E402
from transformers_helpers import (  # noqa: E402
    MODELS,
    assert_same,
    assert_same_bits,
    load,
    new_model,
    quiet,
    raw,
    reconfigure,
    reference,
    rewrite,
    saved,
    tensors_of,
)

from streamload.transformers import internals  # noqa: E402
from streamload.transformers.rest import device_of  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "transformers_model.py"

__all__ = ["quiet"]


#: Rotary embeddings, as config.json has them.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    "yarn": {
        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    },
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "max_shard_size"), [(torch.float32, "5GB"), (torch.bfloat16, "20KB")]
)
def test_gives_what_transformers_gives(
    tmp_path: Path, name: str, dtype: Any, max_shard_size: str
) -> None:
    """One file or shards, float32 or bfloat16: weights, ties, buffers and settings are the same."""
    new_model(name, dtype).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or max_shard_size == "20KB"
    found = load(tmp_path, budget="2MB")
    assert_same(found, reference(tmp_path, name))
    assert verify(found.streamload_report, open_checkpoint(tmp_path), found) == []
    assert "meta" not in str(found.streamload_report)


@pytest.mark.parametrize("name", MODELS)
def test_float16_is_the_reference_cast(tmp_path: Path, name: str) -> None:
    saved(tmp_path, name, torch.bfloat16)
    found = load(tmp_path, dtype="float16")
    assert_same(found, reference(tmp_path, name, dtype=torch.float16))
    assert verify(found.streamload_report, open_checkpoint(tmp_path), found) == []


@pytest.mark.parametrize("name", MODELS)
def test_computes_the_same(tmp_path: Path, name: str) -> None:
    """Greedy tokens, or logits where a model generates none, are those of transformers' model."""
    saved(tmp_path, name)
    found, expected = load(tmp_path), reference(tmp_path, name)
    ids = torch.tensor([[5, 17, 3, 42, 8]])
    if name == "bert":
        with torch.no_grad():
            assert torch.equal(found(ids).logits, expected(ids).logits)
        return
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    tokens = found.generate(ids, **options)
    assert tokens.shape[1] > 1
    assert torch.equal(tokens, expected.generate(ids, **options))


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_are_computed(tmp_path: Path, rope: str) -> None:
    """Frequencies that no checkpoint holds are those of transformers, for each way to scale."""
    saved(tmp_path, "llama", torch.bfloat16, rope_parameters=ROPES[rope])
    found, expected = load(tmp_path), reference(tmp_path, "llama")
    assert_same(found, expected)
    mine, theirs = found.model.rotary_emb, expected.model.rotary_emb
    assert mine.attention_scaling == theirs.attention_scaling
    assert mine.inv_freq.dtype == torch.float32
    assert mine.inv_freq.isfinite().all()
    assert raw(mine.original_inv_freq) == raw(theirs.original_inv_freq)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_stored_one_by_one_are_fused(tmp_path: Path, name: str) -> None:
    """A tensor for each expert becomes one for all, without one expert being held in between."""
    saved(tmp_path, name)
    stored = open_checkpoint(tmp_path).tensors
    assert sum(".experts.3." in tensor for tensor in stored) == 3 * 2
    found = load(tmp_path)
    sources = {p.name: p.source for p in found.streamload_report.plan.placements}
    assert len(sources["model.layers.1.mlp.experts.gate_up_proj"]) == 2 * 4
    assert len(sources["model.layers.1.mlp.experts.down_proj"]) == 4


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_stored_fused_stay_so(tmp_path: Path, name: str) -> None:
    """A checkpoint that has transformers 5's own names is loaded as it is."""
    folder = saved(tmp_path, name)
    fused = new_model(name).state_dict()
    rewrite(folder, lambda tensors: fused)
    assert_same(load(folder), reference(folder, name))


def test_old_names_are_renamed(tmp_path: Path) -> None:
    """BERT's old gamma and beta become weight and bias, as transformers has it."""
    folder = saved(tmp_path, "bert")

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        )

    rewrite(folder, lambda tensors: {old(name): t for name, t in tensors.items()})
    assert_same(load(folder), reference(folder, "bert"))


def test_old_buffers_may_be_ignored(tmp_path: Path) -> None:
    """Buffers that older checkpoints hold and transformers computes now are not unexpected."""
    folder = saved(tmp_path / "bert", "bert")
    ids = {"bert.embeddings.position_ids": torch.arange(64)[None]}
    rewrite(folder, lambda tensors: tensors | ids)
    found = load(folder)
    assert_same(found, reference(folder, "bert"))
    assert found.streamload_report.skipped == ("bert.embeddings.position_ids",)
    folder = saved(tmp_path / "llama", "llama")
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for i in (0, 1)}
    rewrite(folder, lambda tensors: tensors | old)
    assert_same(load(folder), reference(folder, "llama"))


def test_tied_weights_are_loaded_once(tmp_path: Path) -> None:
    """A tied head takes no bytes of its own, whether or not the checkpoint stores it too."""
    folder = saved(tmp_path, "llama-tied")
    one = load(folder).streamload_report
    assert one.tied == ("lm_head.weight",)
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    found = load(folder)
    assert_same(found, reference(folder, "llama-tied"))
    both = found.streamload_report
    assert both.resident_nbytes == one.resident_nbytes
    assert both.read_nbytes == one.read_nbytes
    assert both.skipped == ("lm_head.weight",)


def test_a_tied_embedding_may_be_stored_as_the_head(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama-tied")

    def moved(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        return tensors

    rewrite(folder, moved)
    assert_same(load(folder), reference(folder, "llama-tied"))


def test_ties_that_the_checkpoint_breaks_are_not_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tied by config.json, stored with different values: both are loaded, and a warning says so."""
    folder = saved(tmp_path, "llama-tied")
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    found = load(folder)
    assert "they are not tied" in caplog.text
    assert_same(found, reference(folder, "llama-tied"))
    assert found.lm_head.weight is not found.model.embed_tokens.weight


def test_names_must_match(tmp_path: Path) -> None:
    """``strict=True``: missing, unexpected and misshapen tensors are one error that lists them."""
    folder = saved(tmp_path, "llama")

    def spoilt(tensors: dict[str, Any]) -> dict[str, Any]:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.extra"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(16)
        return tensors

    rewrite(folder, spoilt)
    with pytest.raises(StateDictMismatchError) as caught:
        load(folder, strict=True)
    assert caught.value.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert caught.value.unexpected == ("model.layers.0.extra",)
    assert [(w.name, w.expected, w.found) for w in caught.value.wrong_shape] == [
        ("model.norm.weight", (32,), (16,))
    ]
    with pytest.raises(StateDictMismatchError, match='shapes="skip"') as caught:
        load(folder)  # as transformers: a wrong shape alone is an error
    assert not caught.value.missing
    assert not caught.value.unexpected
    with pytest.warns(UserWarning) as warned:
        load(folder, shapes="skip")
    (said,) = [str(each.message) for each in warned]
    for name in ("layers.1.mlp.up_proj.weight", "layers.0.extra", "model.norm.weight: expected"):
        assert name in said


def test_what_is_missing_is_initialised(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    lost = "model.layers.1.mlp.up_proj.weight"

    def without(tensors: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in tensors.items() if k not in (lost, "model.norm.weight")}

    rewrite(folder, without)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=f"2 not in the checkpoint.*{lost}") as warned:
        found = load(folder)
    assert warned[0].filename.endswith("transformers_helpers.py")  # the line that called
    torch.manual_seed(3)
    assert_same(found, reference(folder, "llama"))
    assert set(found.streamload_report.missing) == {lost, "model.norm.weight"}
    assert found.model.norm.weight.eq(1).all()


def test_a_base_gets_a_head_of_another_task(tmp_path: Path) -> None:
    """A base under an Auto class of a task: the head is transformers' own, and is warned of."""
    folder = saved(tmp_path, "bert")
    auto = transformers.AutoModelForSequenceClassification
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=r"strict=True") as warned:
        found = load(folder, model_class=auto, num_labels=3)
    (said,) = [str(each.message) for each in warned]
    assert "not all of BertForSequenceClassification matches" in said
    assert "classifier.bias, classifier.weight" in said
    assert "cls.predictions.bias" in said
    torch.manual_seed(3)
    assert_same(found, auto.from_pretrained(folder, num_labels=3))
    with pytest.raises(StateDictMismatchError) as caught:
        load(folder, model_class=auto, num_labels=3, strict=True)
    assert "classifier.weight" in caught.value.missing
    with pytest.warns(UserWarning, match=r"classifier\.weight"):
        streamed = load(folder, model_class=auto, num_labels=3, offload=True)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert streamed(ids).logits.isfinite().all()


@pytest.mark.parametrize("given", ["argument", "config"])
def test_fewer_layers_may_be_asked_for(tmp_path: Path, given: str) -> None:
    folder = saved(tmp_path, "llama")
    fewer: dict[str, Any] = {"num_hidden_layers": 1}
    if given == "config":
        fewer = {"config": transformers.AutoConfig.from_pretrained(folder, **fewer)}
    with pytest.warns(UserWarning, match=r"9 not in the model, and ignored \(model\.layers\.1\."):
        found = load(folder, **fewer)
    assert_same(found, reference(folder, "llama", **fewer))
    with pytest.warns(UserWarning, match=r"model\.layers\.1\."):
        streamed = load(folder, offload=True, **fewer)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, found(ids).logits)
    notes = " ".join(streamed.streamload_offload.report.notes)
    assert "without values" not in notes  # buffers are computed after the load
    with pytest.raises(StateDictMismatchError) as caught:
        load(folder, strict=True, **fewer)
    assert len(caught.value.unexpected) == 9


def test_a_body_gives_a_model_with_a_new_head(tmp_path: Path) -> None:
    """The names of a model without its head get the prefix that they lack, and the other way."""
    body = tmp_path / "body"
    model = new_model("bert")
    model.bert.save_pretrained(body)
    with pytest.raises(StateDictMismatchError) as caught:
        load(body, model_class=transformers.BertForMaskedLM, strict=True)
    assert all(name.startswith("cls.") for name in caught.value.missing)
    assert not caught.value.unexpected
    found = load(body, model_class=transformers.BertForMaskedLM, strict=False)
    inner = {k: raw(t) for k, t in model.bert.state_dict().items() if "pooler" not in k}
    assert inner.items() <= {k: raw(t) for k, t in found.bert.state_dict().items()}.items()
    assert all(t.device.type == "cpu" and t.isfinite().all() for t in tensors_of(found).values())

    whole = tmp_path / "whole"
    model.save_pretrained(whole)
    with pytest.raises(StateDictMismatchError) as caught:
        load(whole, model_class=transformers.AutoModel, strict=True)
    assert "cls.predictions.bias" in caught.value.unexpected
    found = load(whole, model_class=transformers.AutoModel, strict=False)
    assert type(found) is transformers.BertModel
    assert inner.items() <= {k: raw(t) for k, t in found.state_dict().items()}.items()


class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose checkpoints are odd: the tests register how."""


class Changed(core_model_loading.ConversionOps):  # type: ignore[misc]
    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, Any]:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: self._change(tensors[0])}

    @property
    def reverse_op(self) -> Any:
        return self


def odd(folder: Path, *converters: Any, **changes: Any) -> Path:
    """A Llama's checkpoint, to be loaded as `Odd`, with conversions registered for that alone."""
    conversion_mapping.register_checkpoint_conversion_mapping(
        "Odd", list(converters), overwrite=True
    )
    return saved(folder, "llama", **changes)


def converter(sources: list[str], targets: list[str], *operations: Any) -> Any:
    return core_model_loading.WeightConverter(sources, targets, operations=list(operations))


ATTENTION = "model.layers.0.self_attn"
QKV = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]


def stored_as(folder: Path, make: Callable[[dict[str, Any]], Mapping[str, Any]], *old: str) -> None:
    """Put tensors that are made of layer 0's into a checkpoint, in the place of ``old``."""

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        made = make(tensors)
        return {k: v for k, v in tensors.items() if k not in old} | dict(made)

    rewrite(folder, change)


def test_a_fused_tensor_is_split_by_rows(tmp_path: Path) -> None:
    """Rows of one tensor become three parameters, as transformers' own operation cuts them."""
    folder = odd(
        tmp_path,
        converter(["qkv.weight"], QKV, core_model_loading.Chunk(dim=0)),
        num_key_value_heads=4,
    )
    names = [f"{ATTENTION}.{leaf}" for leaf in QKV]
    stored_as(
        folder, lambda t: {f"{ATTENTION}.qkv.weight": torch.cat([t[n] for n in names])}, *names
    )
    found = load(folder, model_class=Odd)
    assert_same(found, Odd.from_pretrained(folder))
    sources = {p.name: p.source for p in found.streamload_report.plan.placements}
    assert [(r.start, r.stop) for n in names for r in sources[n]] == [(0, 32), (32, 64), (64, 96)]


def test_rows_that_are_reordered_come_in_order(tmp_path: Path) -> None:
    permute = core_model_loading.PermuteForRope(permute_layer_names=["q_proj"])
    folder = odd(
        tmp_path,
        converter(["q_proj.weight"], ["q_proj.weight"], permute),
        converter(["q_proj.bias"], ["q_proj.bias"], permute),
        attention_bias=True,
    )
    assert_same(load(folder, model_class=Odd), Odd.from_pretrained(folder))


def test_an_operation_may_look_at_the_models_shapes(tmp_path: Path) -> None:
    folder = odd(
        tmp_path,
        converter(
            ["o_proj.weight"],
            ["o_proj.weight"],
            core_model_loading.Transpose(0, 1, check_dims=True),
        ),
    )
    assert_same(load(folder, model_class=Odd), Odd.from_pretrained(folder))


def test_a_transposed_weight_is_transposed_on_the_way(tmp_path: Path) -> None:
    """A matrix whose axes transformers exchanges streams as any other."""
    turn = core_model_loading.Transpose(0, 1)
    folder = odd(tmp_path, converter(["down_proj.weight"], ["down_proj.weight"], turn))
    name = "model.layers.0.mlp.down_proj.weight"
    names = [name.replace("0", str(layer)) for layer in range(2)]
    stored_as(folder, lambda t: {name: t[name].T.contiguous() for name in names})
    found = load(folder, model_class=Odd)
    assert_same(found, Odd.from_pretrained(folder))
    assert tuple(found.get_parameter(name).shape) == (32, 48)


def test_other_axes_may_be_joined(tmp_path: Path) -> None:
    """Axes after the first are joined, and parameters cut from one tensor along the first."""
    split = core_model_loading.Chunk(dim=0)
    squeeze = core_model_loading.Conv3dToLinear(1, (1, 1, 1))
    folder = odd(
        tmp_path,
        converter(["wide.weight"], ["o_proj.weight"], squeeze),
        converter(["stack"], ["gate_proj.weight", "up_proj.weight"], split),
    )
    name = f"{ATTENTION}.o_proj.weight"
    mlp = [f"model.layers.0.mlp.{leaf}_proj.weight" for leaf in ("gate", "up")]
    stored_as(
        folder,
        lambda t: {
            f"{ATTENTION}.wide.weight": t[name].view(32, 2, 4, 2, 2),
            "model.layers.0.mlp.stack": torch.cat([t[n] for n in mlp]),
        },
        *(name, *mlp),
    )
    assert_same(load(folder, model_class=Odd), Odd.from_pretrained(folder))


@pytest.mark.parametrize(
    ("leaf", "operation", "why"),
    [
        ("self_attn.q_proj", lambda: core_model_loading.Interleave(dim=1), "Interleave"),
        ("self_attn.q_proj", lambda: Changed(lambda t: t * 2), "(mul of {} computes values)"),
        ("self_attn.q_proj", lambda: Changed(lambda t: t.double()), "_to_copy of {} computes"),
        ("input_layernorm", lambda: Changed(lambda t: t.mul_(0)), "mul_ of {} computes values"),
        ("input_layernorm", lambda: Changed(lambda t: t.clamp(max=3)), "clamp of {} computes"),
        ("input_layernorm", lambda: Changed(torch.zeros_like), "zeros_like of {} computes"),
        ("input_layernorm", lambda: Changed(lambda t: torch.zeros(64)), "(it is computed)"),
    ],
)
def test_what_is_no_choice_of_rows_is_refused(
    tmp_path: Path, leaf: str, operation: Callable[[], Any], why: str
) -> None:
    """A conversion along the rows, or of the values, is refused by names before any data moves."""
    pattern = f"{leaf.rpartition('.')[2]}.weight"
    folder = odd(tmp_path, converter([pattern], [pattern], operation()))
    with pytest.raises(StateDictMismatchError, match="is not a choice of their rows") as caught:
        load(folder, model_class=Odd, strict=False)
    assert not (caught.value.missing or caught.value.unexpected)
    assert len(caught.value.problems) == 2
    name = f"model.layers.0.{leaf}.weight"
    assert caught.value.problems[0].startswith(f"{name}: transformers makes it of {name} by ")
    assert why.format(name) in caught.value.problems[0]


def test_a_cut_through_the_second_of_three_axes_is_refused(tmp_path: Path) -> None:
    """Stacked matrices that would be cut inside each matrix are refused, with every target."""
    folder = odd(tmp_path, converter(["both"], ["q_proj", "o_proj"], core_model_loading.Chunk(1)))
    names = [f"{ATTENTION}.{leaf}_proj.weight" for leaf in "qo"]
    stored_as(
        folder,
        lambda t: {f"{ATTENTION}.both.weight": torch.stack([t[n] for n in names], 1)},
        *names,
    )
    with pytest.raises(StateDictMismatchError, match="cut along its second axis") as caught:
        load(folder, model_class=Odd)
    assert len(caught.value.problems) == 2
    assert caught.value.missing == ()


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert")
    name = "bert.embeddings.LayerNorm"
    rewrite(folder, lambda t: t | {f"{name}.gamma": t[f"{name}.weight"]})
    with pytest.raises(StateDictMismatchError, match=r"gamma and .*\.weight would both become it"):
        load(folder)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    reconfigure(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match=r"quantised.*found fp8"):
        load(folder)


def test_what_the_checkpoint_is_not_alone_is_refused(tmp_path: Path) -> None:
    """An adapter beside the model, or weights in a file of another name, are not passed over."""
    folder = saved(tmp_path, "llama")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="adapter"):
        load(folder)
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    reconfigure(folder, transformers_weights="other.safetensors")
    with pytest.raises(CheckpointError, match=r"expected other\.safetensors"):
        load(folder)
    assert_same_bits(load(folder / "other.safetensors"), reference(folder, "llama"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["NoSuchModel"]}, r"no class for the model.*NoSuchModel"),
        ({"architectures": None}, "no class for the model"),
        ({"architectures": ["LlamaConfig"]}, "no class for the model"),
        ({"model_type": "no-such"}, "no-such"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}},
            "custom code",
        ),
    ],
)
def test_unknown_models_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = saved(tmp_path, "llama")
    reconfigure(folder, **changes)
    with pytest.raises(CheckpointError, match=f"(?s){said}"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "no-such"}, "no attribute 'no-such'"),
        ({"num_attention_heads": 0}, "zero"),
        ({"num_hidden_layers": "2"}, "'num_hidden_layers' expected int, got str"),
        ({"quantization_config": [1]}, "list"),
    ],
)
def test_settings_that_are_invalid_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """What transformers raises for them, of many classes, is one error that names config.json."""
    folder = saved(tmp_path, "llama")
    reconfigure(folder, **changes)
    with pytest.raises(
        CheckpointError, match=rf"config\.json: the model's configuration is not valid: .*{said}"
    ):
        load(folder)


def test_invalid_settings_of_gguf_are_refused(tmp_path: Path) -> None:
    """The error names the file, which takes the place of config.json."""
    convert(saved(tmp_path / "in", "llama"), tmp_path / "out", to="gguf", progress=False)
    with pytest.raises(
        CheckpointError, match=r"out: the model's configuration is not valid: .*int"
    ):
        load(tmp_path / "out", num_hidden_layers="2")


class Broken(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == self.name:
            raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'dep'", name="dep"), "No module named 'dep'"),
        (AttributeError("numpy has no attribute 'x'", name="x"), "numpy has no attribute 'x'"),
        (
            ModuleNotFoundError("it is not there", name="transformers.conversion_mapping"),
            "needs transformers 5.9 or later",
        ),
    ],
)
def test_a_wrong_version_is_told_from_a_broken_one(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    module = "transformers.conversion_mapping"
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(module, error), *sys.meta_path])
    spec = importlib.util.spec_from_file_location("again", internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises((ImportError, AttributeError), match=said):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_model_whose_file_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "llama")
    monkeypatch.delitem(sys.modules, "transformers.models.llama.modeling_llama")
    monkeypatch.delitem(vars(transformers), "LlamaForCausalLM", raising=False)
    broken = Broken(
        "transformers.models.llama.modeling_llama",
        ModuleNotFoundError("No module named 'dep'", name="dep"),
    )
    monkeypatch.setattr(sys, "meta_path", [broken, *sys.meta_path])
    with pytest.raises(ImportError, match="cannot import LlamaForCausalLM: No module named 'dep'"):
        load(folder)


def test_a_configuration_must_be_there(tmp_path: Path) -> None:
    """Without config.json a configuration is asked for; one that is given is left as it was."""
    folder = saved(tmp_path, "llama", torch.bfloat16)
    expected = reference(folder, "llama")
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="no configuration"):
        load(folder)
    config = transformers.LlamaConfig(**MODELS["llama"][2])
    before = config.to_dict()
    found = load(folder, config=config, model_class=transformers.LlamaForCausalLM)
    assert config.to_dict() == before
    assert_same_bits(found, expected)


def test_arguments_are_checked(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"strict": 1}, "strict is True or False, not 1"),
        ({"config": {}}, "config is a configuration of transformers"),
        ({"model_class": dict}, "model_class is a class of transformers"),
        ({"dtype": "int8"}, "not to int8"),
        ({"dtype": "float8_e4m3fn"}, "computes in .* not in float8_e4m3fn"),
        ({"reader": "tape"}, "tape"),
        ({"page_cache": "tape"}, "page_cache is one of auto, keep, drop"),
    ]
    for given, said in wrong:
        with pytest.raises(ValueError, match=said):
            load(folder, **given)
    with pytest.raises(ValueError, match="path"):
        load(7)  # type: ignore[arg-type]


def test_how_files_are_read_is_passed_on(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    model = load(folder, device="cpu", reader="direct", page_cache="drop")
    made = model.streamload_report.plan
    assert (set(made.readers), made.page_cache) == ({"direct"}, "drop")


def test_auto_classes_choose_the_class(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen2")
    found = load(folder, model_class=transformers.AutoModelForCausalLM)
    assert_same(found, transformers.AutoModelForCausalLM.from_pretrained(folder))
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        load(folder, model_class=transformers.AutoModelForMaskedLM)


def test_attention_is_chosen(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"


def test_a_model_comes_from_a_file_an_index_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, an index, and a name in the local Hugging Face cache find the configuration too."""
    folder = tmp_path / "hub" / "models--me--tiny" / "snapshots" / "0123abc"
    new_model("llama").save_pretrained(folder, max_shard_size="20KB")
    expected = reference(folder, "llama")
    single = saved(tmp_path / "single", "llama")
    refs = folder.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path, offline=True)
    for path in (single / "model.safetensors", folder / "model.safetensors.index.json", "me/tiny"):
        found = load(path)
        assert_same_bits(found, expected)
        assert found.config._name_or_path == str(path)


def test_modules_that_stay_in_float32_do(tmp_path: Path) -> None:
    """T5's ``wo`` is float32 in a float16 model, also where the checkpoint is float16."""
    folder = saved(tmp_path, "t5", torch.float16)
    assert (
        open_checkpoint(folder)
        .tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"]
        .dtype.name
        == "float16"
    )
    found = load(folder)
    assert found.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert found.shared.weight.dtype == torch.float16
    assert_same(found, reference(folder, "t5"))


def test_dtypes_that_are_asked_for(tmp_path: Path) -> None:
    """A dtype of torch, patterns, and "checkpoint" decide; buffers are as the model's dtype."""
    folder = saved(tmp_path, "t5", torch.bfloat16)
    for asked in (torch.float16, "float16", {"*": torch.float16}):
        assert_same(load(folder, dtype=asked), reference(folder, "t5", dtype=torch.float16))
    found = load(folder, dtype={"*.wo.weight": "float16", "*": "float32"})
    dtypes = {k: t.dtype for k, t in found.state_dict().items()}
    assert {t for k, t in dtypes.items() if k.endswith(".wo.weight")} == {torch.float16}
    assert {t for k, t in dtypes.items() if not k.endswith(".wo.weight")} == {torch.float32}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "stated"),
    [("llama", "float32"), ("llama", "bfloat16"), ("t5", "float16"), ("llama", None)],
)
def test_the_dtype_is_the_configurations(
    tmp_path: Path, name: str, stored: Any, stated: str | None
) -> None:
    """config.json's dtype wins over the one that is stored, which "checkpoint" keeps."""
    folder = saved(tmp_path, name, stored)
    reconfigure(folder, dtype=stated)
    expected = reference(folder, name, dtype="auto")
    assert expected.dtype == (stored if stated is None else getattr(torch, stated))
    assert_same(load(folder), expected)
    kept = load(folder, dtype="checkpoint")
    assert {t.dtype for t in kept.parameters()} == {kept.dtype} == {kept.config.dtype} == {stored}


def test_without_a_stated_dtype_the_first_stored_decides(tmp_path: Path) -> None:
    for lone in ("lm_head.weight", "model.norm.weight"):
        folder = saved(tmp_path / lone, "llama", torch.float16)
        rewrite(folder, lambda t, lone=lone: t | {lone: t[lone].float()})
        reconfigure(folder, dtype=None)
        assert_same(load(folder), reference(folder, "llama", dtype="auto"))


def test_a_stated_dtype_that_no_model_computes_in_is_refused(tmp_path: Path) -> None:
    """A dtype of config.json that torch cannot take as its default is named."""
    folder = saved(tmp_path, "llama")
    reconfigure(folder, dtype="float8_e4m3fn")
    with pytest.raises(CheckpointError, match=r"none that a model computes in.*float8_e4m3fn"):
        load(folder)
    assert_same_bits(load(folder, dtype="float32"), new_model("llama"))


def test_several_dtypes_become_the_configurations(tmp_path: Path) -> None:
    """A checkpoint of mixed dtypes has the one of config.json then, unless it is to stay mixed."""
    folder = saved(tmp_path, "llama", torch.bfloat16)
    rewrite(folder, lambda t: t | {"lm_head.weight": t["lm_head.weight"].float()})
    found = load(folder)
    assert found.lm_head.weight.dtype == torch.bfloat16
    assert_same(found, reference(folder, "llama"))
    found = load(folder, dtype="checkpoint")
    assert found.lm_head.weight.dtype == torch.float32
    assert found.model.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("asked", ["0", "1"])
def test_bfloat16_becomes_float16_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("SUPPORT_BF16", asked)
    folder = saved(tmp_path, "t5", torch.bfloat16)
    assert_same(load(folder), reference(folder, "t5", dtype=torch.float16))
    reconfigure(folder, dtype="float32")
    assert_same(load(folder), reference(folder, "t5", dtype=torch.float32))
    folder = saved(tmp_path / "wide", "t5")
    reconfigure(folder, dtype="bfloat16")
    assert_same(load(folder), reference(folder, "t5", dtype=torch.float16))


def test_generation_settings_come_along(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"max_length": 77, "eos_token_id": [3, 4], "do_sample": True}))
    found = load(folder)
    assert_same(found, reference(folder, "llama"))
    assert found.generation_config.max_length == 77
    path.unlink()
    reconfigure(folder, max_length=55, num_beams=3)
    assert_same(load(folder), reference(folder, "llama"))


def test_saving_goes_back_to_the_stored_names(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", "qwen3-moe")
    load(folder).save_pretrained(tmp_path / "out")
    before, after = (st.load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert {k: raw(t) for k, t in before.items()} == {k: raw(t) for k, t in after.items()}


def test_what_does_not_fit_is_told_before_anything_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama-tied")
    needed = load(folder, budget="1MB").streamload_report
    assert needed.held_nbytes["cpu"] <= 10**6
    with pytest.raises(PlanInfeasibleError, match="does not fit on cpu") as caught:
        load(folder, budget=needed.resident_nbytes // 2)
    assert caught.value.needed_nbytes >= needed.resident_nbytes


class Headless(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose checkpoints may lack the head."""

    _keys_to_ignore_on_load_missing = ("lm_head",)


@pytest.mark.parametrize(
    ("left", "model_class", "strict"),
    [
        ({}, transformers.LlamaForCausalLM, False),
        ({"lm_head.weight": torch.zeros(3, 32)}, transformers.LlamaForCausalLM, False),
        ({}, Headless, True),
    ],
    ids=["missing", "misshapen", "ignored"],
)
def test_what_is_initialised_counts_against_the_budget(
    tmp_path: Path, left: dict[str, Any], model_class: Any, strict: bool
) -> None:
    """A head that is not loaded is held all the same: a budget without it is refused."""
    folder = saved(tmp_path, "llama", vocab_size=4000)
    head_nbytes = 4000 * 32 * 4
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"} | left)
    whole = sum(t.nbytes for t in tensors_of(new_model("llama", vocab_size=4000)).values())
    shapes = "skip" if left else "error"
    arguments = {"strict": strict, "shapes": shapes, "model_class": model_class}
    with pytest.raises(PlanInfeasibleError, match=r"budget less 512\.\d* kB|budget less 512 kB"):
        load(folder, budget=whole - head_nbytes + 100_000, **arguments)
    found = load(folder, budget=whole + 10_000, **arguments)
    assert found.streamload_report.missing == ("lm_head.weight",)
    assert sum(t.nbytes for t in tensors_of(found).values()) <= whole + 10_000
    assert found.lm_head.weight.isfinite().all()


class Masked(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A Llama with buffers that no checkpoint holds, which it computes or which nobody does."""

    buffers_made: Mapping[str, Any] = {}
    computed = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, value in self.buffers_made.items():
            self.register_buffer(name, value.to(self.lm_head.weight.device), persistent=False)

    def _init_weights(self, module: Any) -> None:
        super()._init_weights(module)
        if module is self and self.computed:
            for name, value in self.buffers_made.items():
                importlib.import_module("transformers.initialization").copy_(
                    getattr(self, name), value
                )


def masked(computed: bool, **made: Any) -> Any:
    """A class of models with such buffers."""
    return type("Masked", (Masked,), {"buffers_made": made, "computed": computed})


def pattern_of(dtype: Any, count: int) -> Any:
    """A tensor with something else in each place, as far as the dtype goes."""
    return (torch.arange(count) % (2 if dtype is torch.bool else 97)).to(dtype)


BUFFER_DTYPES = (
    *(torch.bool, torch.uint8, torch.uint16, torch.int8, torch.int64),
    *(torch.float8_e4m3fn, torch.float16, torch.float64, torch.complex64),
)


def test_buffers_that_a_model_computes_are_kept(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    values = {}
    for i, dtype in enumerate(BUFFER_DTYPES):
        values |= {
            f"many_{i}": pattern_of(dtype, 100_000),
            f"zeros_{i}": torch.zeros(64, 3).to(dtype),
            f"ones_{i}": torch.ones(16).to(dtype),
            f"few_{i}": torch.ones(2, 2).to(dtype),
            f"turned_{i}": pattern_of(dtype, 300).view(30, 10).t(),
            f"none_{i}": torch.zeros(0, 5).to(dtype),
        }
    model_class = masked(True, **values)
    found = load(folder, model_class=model_class)
    for name, value in values.items():
        assert getattr(found, name).dtype == value.dtype, name
        assert raw(getattr(found, name)) == raw(value), name
    assert_same_bits(found, model_class.from_pretrained(folder))


def test_buffers_that_nobody_computes_are_refused(tmp_path: Path) -> None:
    """A buffer that neither the checkpoint nor the class has values for is refused by its name."""
    folder = saved(tmp_path, "llama")
    values = {
        f"mask_{i}_{count}": pattern_of(dtype, count).view(2, -1)
        for i, dtype in enumerate(BUFFER_DTYPES)
        for count in (16, 100_000)
    }
    with pytest.raises(StateDictMismatchError) as caught:
        load(folder, model_class=masked(False, **values))
    assert list(caught.value.problems) == [
        f"{name}: the checkpoint does not hold it, and transformers does not compute it"
        for name in values
    ]


def test_a_few_bools_that_nobody_computes_are_zeros(tmp_path: Path) -> None:
    """Too few bools or unsigned integers to be told from computed ones are never garbage."""
    folder = saved(tmp_path, "llama")
    filled = [torch.full((15,), 255, dtype=torch.uint8) for _ in range(50)]
    del filled  # memory that is handed out again, as it is
    made = {"flag": torch.tensor(True), "codes": torch.ones(15, dtype=torch.uint8)}
    found = load(folder, model_class=masked(False, **made))
    assert not found.flag
    assert not found.codes.any()


def test_buffers_that_are_computed_count_against_the_budget(tmp_path: Path) -> None:
    """A mask that the model computes is refused with the weights, before anything is loaded."""
    folder = saved(tmp_path, "llama")
    weights_nbytes = load(folder).streamload_report.resident_nbytes
    mask = pattern_of(torch.bool, 10**6)
    model_class = masked(True, mask=mask)
    with pytest.raises(PlanInfeasibleError):
        load(folder, model_class=model_class, budget=weights_nbytes + 900_000)
    found = load(folder, model_class=model_class, budget=weights_nbytes + 1_100_000)
    assert torch.equal(found.mask, mask)


def read_nbytes() -> int:
    fields = Path("/proc/self/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts reads by Linux's /proc")
def test_ties_are_compared_when_it_is_known_that_all_fits(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama-tied", vocab_size=50_000)
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    nbytes = 50_000 * 32 * 4
    one = load(folder, reader="mmap").streamload_report.resident_nbytes
    before = read_nbytes()
    load(folder, reader="mmap")
    assert read_nbytes() - before >= 2 * nbytes  # it counts what the comparison reads
    before = read_nbytes()
    with pytest.raises(PlanInfeasibleError):
        load(folder, reader="mmap", budget=one - 100_000)
    assert read_nbytes() - before < nbytes // 4
    assert load(folder, budget=one + 1_000_000).lm_head.weight.nbytes == nbytes


def test_ties_of_different_shapes_or_dtypes_are_not_made(tmp_path: Path) -> None:
    """Stored in two dtypes, both are loaded as one each; in another shape, a head is made anew."""
    folder = saved(tmp_path, "llama-tied")
    rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].half() + 1})
    assert_same(load(folder), reference(folder, "llama-tied"))
    rewrite(folder, lambda t: t | {"lm_head.weight": torch.zeros(3, 32)})
    with pytest.raises(StateDictMismatchError) as caught:
        load(folder)
    assert [wrong.name for wrong in caught.value.wrong_shape] == ["lm_head.weight"]
    embedding = st.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with pytest.raises(StateDictMismatchError, match="lm_head"):
        load(folder, strict=False)
    found = load(folder, shapes="skip")
    assert torch.equal(found.model.embed_tokens.weight, embedding)
    assert found.streamload_report.missing == ("lm_head.weight",)


def split_map(model: Any, lost: Sequence[str]) -> dict[str, str | int]:
    """The device map of a model in two halves, of which some was not loaded."""
    names = [name for name in model.state_dict() if name not in lost]
    half = len(names) // 2
    where = {name: "cuda:0" if i < half else "cpu" for i, name in enumerate(names)}
    buffers = [name for name, _ in model.named_buffers()]
    return device_map(where, [*lost, *buffers])


def test_what_is_missing_has_a_place_in_the_device_map(tmp_path: Path) -> None:
    """Split over devices, each tensor of a model is made where accelerate expects it."""
    accelerate = needs.module("accelerate")
    folder = saved(tmp_path, "llama")
    found = load(folder)
    lost = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
    places = split_map(found, lost)
    assert set(places.values()) == {0, "cpu"}
    accelerate.utils.modeling.check_device_map(found, places)
    report = dataclasses.replace(found.streamload_report, device_map=places)
    for name in tensors_of(found):
        around = [key for key in places if key in ("", name) or name.startswith(f"{key}.")]
        assert [device_of(name, report)] == [places[key] for key in around], name


def test_a_checkpoint_with_nothing_of_the_model_makes_a_new_one(tmp_path: Path) -> None:
    """``strict=False`` and no name that matches: all is initialised, on the device asked for."""
    folder = saved(tmp_path, "llama")
    rewrite(folder, lambda t: {f"other.{k}": v for k, v in t.items()})
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="fills 0 of the model's .* 21 of its 21 tens") as warned:
        found = load(folder, strict=False)
    assert len(warned) == 1
    torch.manual_seed(3)
    assert_same(found, reference(folder, "llama"))


def test_several_devices_need_accelerate(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    code = (
        "import sys; sys.modules['accelerate'] = None\n"
        "from streamload.transformers import from_pretrained\n"
        "from streamload.errors import DeviceError\n"
        "try: from_pretrained(sys.argv[1], device=['cpu', 'cuda:0'])\n"
        "except DeviceError as error: print(error)\n"
    )
    done = forked.run([sys.executable, "-c", code, folder], forked.TORCH)
    assert "pip install accelerate" in done.stdout, done.stderr


def test_the_example_generates(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    arguments = ["--budget", "1MB", "--device", "cpu", "--count", "6", "--tokens", "5", "17", "3"]
    done = forked.run([sys.executable, EXAMPLE, folder, *arguments], forked.TORCH)
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([[5, 17, 3]])
    expected = reference(folder, "llama").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6
    )
    assert "budget 1000 kB" in done.stdout  # 1 MB, less 128 bytes of rotary frequencies
    assert done.stdout.splitlines()[-1] == "tokens: " + " ".join(map(str, expected[0].tolist()))
