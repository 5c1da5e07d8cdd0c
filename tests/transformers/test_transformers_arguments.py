"""What transformers' `from_pretrained` takes, ours takes, or says what to write instead."""

from __future__ import annotations

import json
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hub_server import COMMIT, TOKEN, Hub, hub, use_hub

from streamload.errors import (
    CheckpointError,
    PlanInfeasibleError,
    ShardNotFoundError,
    StateDictMismatchError,
)

torch = needs.module("torch")
transformers = needs.module("transformers")

__all__ = ["hub"]

import safetensors.torch as st  # noqa: E402
from transformers_helpers import (  # noqa: E402
    GROUPED,
    MODELS,
    assert_same,
    assert_same_bits,
    load,
    new_model,
    raw,
    reconfigure,
    reference,
    rewrite,
    saved,
    tensors_of,
)

import streamload  # noqa: E402
import streamload.transformers as ours  # noqa: E402
from streamload.transformers import prepared  # noqa: E402
from streamload.transformers.arguments import translated  # noqa: E402
from streamload.transformers.distribution import Distribution  # noqa: E402

#: Arguments that transformers takes on a machine without a GPU; the result is to be its own.
TAKEN: dict[str, dict[str, Any]] = {
    "torch_dtype": {"torch_dtype": torch.float16},
    "dtype as text": {"dtype": "float16"},
    "dtype auto": {"dtype": "auto"},
    "torch_dtype auto": {"torch_dtype": "auto"},
    "device_map auto": {"device_map": "auto"},
    "device_map balanced": {"device_map": "balanced", "torch_dtype": torch.bfloat16},
    "device_map name": {"device_map": "cpu"},
    "device_map device": {"device_map": torch.device("cpu")},
    "device_map dict": {"device_map": {"": "cpu"}},
    "max_memory": {"device_map": "auto", "max_memory": {"cpu": "1GB"}},
    "without effect": {
        **{"trust_remote_code": True, "local_files_only": True, "low_cpu_mem_usage": True},
        **{"token": None, "use_safetensors": True, "weights_only": True, "revision": "main"},
        **{"quantization_config": None, "force_download": False, "output_loading_info": False},
        **{"gguf_file": None, "offload_folder": None},
    },
    "attention": {"attn_implementation": "eager"},
    "configuration": {"use_cache": False, "attention_dropout": 0.5},
    "disable_mmap": {"disable_mmap": True},
    "generation": {"generation_config": transformers.GenerationConfig(max_length=77)},
}


@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_what_transformers_takes(tmp_path: Path, given: dict[str, Any]) -> None:
    """As a user of transformers passes it, without a word of ours: the same model."""
    folder = saved(tmp_path, "llama", torch.bfloat16)
    assert_same(ours.from_pretrained(folder, **given), reference(folder, "llama", **given))


@pytest.mark.parametrize(
    "given",
    [
        {"budget": 2e6, "device": torch.device("cpu")},
        {"budget": np.int64(2_000_000), "device": [torch.device("cpu")]},
        {"budget": 0.8 * 2_500_001},
    ],
)
def test_budgets_and_devices_as_they_come(tmp_path: Path, given: dict[str, Any]) -> None:
    """Numbers of numpy's, floats, and torch's devices."""
    folder = saved(tmp_path, "llama")
    found = ours.from_pretrained(folder, **given)
    assert_same(found, reference(folder, "llama"))
    assert found.streamload_report.plan.devices[0].budget_nbytes <= 2_000_001
    small = new_model("llama")
    streamload.load_state_dict(small, folder, device=torch.device("cpu"), budget=2e6)
    assert_same_bits(small, found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_dir": "/x"}, "set HF_HUB_CACHE"),
        ({"force_download": True}, "hf cache rm"),
        ({"gguf_file": "x.gguf"}, r'write streamload.transformers.from_pretrained\(".*/x.gguf"\)'),
        ({"output_loading_info": True}, "streamload_report"),
        ({"offload_folder": "x"}, "write offload=True$"),
        ({"device_map": {"": "disk"}}, "write offload=True$"),
        ({"device_map": "disk"}, "write offload=True$"),
        ({"device_map": {"a": "cpu", "b": "disk"}}, 'write device="cpu", offload=True$'),
        (
            {"device_map": "auto", "max_memory": {"cpu": "1GB", "disk": "9GB"}},
            'write device="cpu", budget="1GB", offload=True$',
        ),
        ({"load_in_8bit": True}, 'write quant="int8"$'),
        ({"load_in_4bit": True}, 'write quant="nf4"$'),
        ({"pretrained_model_name_or_path": "x"}, "leave one of them out"),
        (
            {"tp_plan": "auto", "tp_size": 2},
            r"write distributed_config=DistributedConfig\(tp_plan='auto', tp_size=2\)$",
        ),
        ({"distributed_config": {}, "quant": "nf4"}, "cannot use quant= with distributed_config="),
        ({"distributed_config": {}, "device": "cpu"}, "cannot use device= with distributed"),
        ({"distributed_config": {}, "offload": True}, "cannot use offload= with distributed"),
        (
            {"distributed_config": transformers.DistributedConfig(pp_size=2)},
            'write split="layers" or a mesh such as "2x4" of streamload.distributed',
        ),
        ({"state_dict": {}}, "the path of a checkpoint"),
        (
            {"device_map": {"model": 0, "lm_head": "cpu"}},
            r'device=\["cuda:0", "cpu"\], and budget={"cuda:0": "...", "cpu": "..."}',
        ),
        ({"device_map": "cpu", "device": "cpu"}, "leave one of them out"),
        ({"max_memory": {"cpu": "1GB"}, "budget": "1GB"}, "leave one of them out"),
    ],
    ids=str,
)
def test_what_is_answered(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    """What has no counterpart is an error with what to write, before anything is looked at."""
    with pytest.raises(ValueError, match=said):
        ours.from_pretrained(tmp_path, **given)


def test_a_rank_loads_to_the_device_that_transformers_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def load_under(model: Any, checkpoint: Any, options: Any, changed: Any) -> None:
        raise Asked(options.device)

    monkeypatch.setattr(prepared, "load_under", load_under)
    mine = Distribution(transformers.DistributedConfig(), None, "cpu")
    monkeypatch.setattr(Distribution, "of", lambda config: mine)
    monkeypatch.setattr(Distribution, "apply", lambda self, model: model)
    with pytest.raises(Asked, match=r"^cpu$"):
        ours.from_pretrained(saved(tmp_path, "llama"), distributed_config={}, progress=False)


def test_the_path_by_the_name_that_transformers_has(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    found = ours.from_pretrained(pretrained_model_name_or_path=folder, load_in_8bit=False)
    assert_same(found, reference(folder, "llama"))
    with ours.streamed(budget="1GB"):
        auto = transformers.AutoModelForCausalLM
        inside = auto.from_pretrained(pretrained_model_name_or_path=str(folder))
        own = transformers.LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=folder)
    for model in (inside, own):
        assert model.streamload_report.plan.devices[0].budget_nbytes <= 10**9
        assert_same(model, found)


def test_files_that_torch_wrote_where_they_are_asked_for(tmp_path: Path) -> None:
    """``use_safetensors=False`` is taken where they are alone; else the error has their path."""
    folder = saved(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"holds no .*pytorch_model\.bin: leave it out"):
        load(folder, use_safetensors=False)
    other = {n: t + 1 for n, t in new_model("llama").state_dict().items()}
    torch.save(other, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="write ") as caught:
        load(folder, use_safetensors=False)
    line = str(caught.value).partition("write ")[2]
    found = eval(line, {"streamload": streamload})
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in other.items())
    (folder / "model.safetensors").unlink()
    assert_same_bits(load(folder, use_safetensors=False), found)


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ("LlamaForCausalLM", "model_class=transformers.LlamaForCausalLM"),
        ("transformers.AutoModel", "model_class=transformers.AutoModel"),
        ("LlamaForCasualLM", "model_class=transformers.LlamaForCausalLM"),
        ("nothing like it", ""),
    ],
)
def test_a_class_by_its_name(tmp_path: Path, named: str, line: str) -> None:
    """The error has the class of that name, or the nearest."""
    with pytest.raises(ValueError, match=f"^model_class is a class of .*, not {named!r}") as caught:
        load(saved(tmp_path, "llama"), model_class=named)
    assert str(caught.value).partition("write ")[2] == line


def test_unknown_arguments(tmp_path: Path) -> None:
    """A slip is refused as Python does; what the configuration does not know either, by name."""
    folder = saved(tmp_path, "llama")
    with pytest.raises(TypeError, match=r"^from_pretrained\(\) got .* argument 'budgte'$"):
        load(folder, budgte="3GB")
    with pytest.raises(TypeError, match=r"'num_labls': .* near: num_labels"):
        load(folder, num_labls=3)
    with pytest.raises(TypeError, match="'nothing_like_it': neither an option"):
        load(folder, config=transformers.LlamaConfig(), nothing_like_it=3)


def test_gpus_by_number() -> None:
    known = frozenset({"device", "budget", "dtype", "strict"})
    assert translated({"device_map": 1}, known)["device"] == "cuda:1"
    assert translated({"device_map": {"": 0}}, known)["device"] == "cuda:0"
    one = {"model": torch.device("cpu"), "lm_head": "cpu"}
    assert translated({"device_map": one}, known)["device"] == "cpu"
    given = {"device_map": "auto", "max_memory": {0: "10GB", "cpu": "30GB"}}
    out = translated(given, known)
    assert out["device"] == ["cuda:0", "cpu"]
    assert out["budget"] == {"cuda:0": "10GB", "cpu": "30GB"}
    assert translated({"ignore_mismatched_sizes": True}, known)["strict"] is False


def test_a_new_head(tmp_path: Path) -> None:
    """``num_labels=`` reaches the configuration; the head is made anew where that is allowed."""
    folder = saved(tmp_path, "bert")
    given = {"num_labels": 7, "ignore_mismatched_sizes": True}
    torch.manual_seed(3)
    auto = transformers.AutoModelForSequenceClassification
    found = load(folder, model_class=auto, **given)
    torch.manual_seed(3)
    assert_same(found, auto.from_pretrained(folder, **given))
    assert found.classifier.out_features == 7


def test_a_body_out_of_a_larger_checkpoint(tmp_path: Path) -> None:
    """BertModel takes its part of a classifier's checkpoint; what it lacks of its own is told."""
    config = transformers.BertConfig(**MODELS["bert"][2], num_labels=3)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    for model_class in (transformers.BertModel, transformers.AutoModel):
        found = load(tmp_path, model_class=model_class)
        assert_same(found, transformers.BertModel.from_pretrained(tmp_path))
        assert found.streamload_report.skipped == ("classifier.bias", "classifier.weight")
    reconfigure(tmp_path, num_hidden_layers=1)  # layers of its own are left over
    with pytest.raises(StateDictMismatchError) as caught:
        load(tmp_path, model_class=transformers.BertModel, strict=True)
    assert all(name.startswith("bert.encoder.layer.1.") for name in caught.value.unexpected)
    llama = saved(tmp_path / "llama", "llama")
    found = load(llama, model_class=transformers.AutoModel)
    assert_same(found, transformers.LlamaModel.from_pretrained(llama))


_TEXT = {**GROUPED, "head_dim": 8}
_SEES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_SEES |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
#: Class and configuration of a multimodal model, and classes of its parts.
MULTIMODAL: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": _TEXT, "vision_config": _SEES, "mm_tokens_per_image": 4},
        ("Gemma3ForCausalLM", "Gemma3TextModel"),
    ),
    "Gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **{**_TEXT, "global_head_dim": 8, "hidden_size_per_layer_input": 8},
                **{"vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0},
            },
            "vision_config": {**_SEES, "num_key_value_heads": 2, "head_dim": 16},
            "audio_config": None,
        },
        ("Gemma4ForCausalLM", "Gemma4TextModel"),
    ),
    "Qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                **{**_TEXT, **_LINEAR, "linear_value_head_dim": 8},
                "layer_types": ["linear_attention", "full_attention"],
            },
            "vision_config": {
                **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
                **{"patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 16},
            },
        },
        ("Qwen3_5ForCausalLM", "Qwen3_5TextModel", "Qwen3_5VisionModel", "AutoModelForCausalLM"),
    ),
    "Llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **_TEXT, "tie_word_embeddings": True},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_SEES},
        },
        ("LlamaForCausalLM", "CLIPVisionModel"),
    ),
}


@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_part_of_a_multimodal_model(tmp_path: Path, family: str) -> None:
    """A class of its text or its eyes takes its configuration and its tensors, and no others."""
    class_name, settings, parts = MULTIMODAL[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**settings)
    getattr(transformers, class_name)(config).save_pretrained(tmp_path)
    whole = load(tmp_path)
    held = {raw(tensor) for tensor in tensors_of(whole).values()}
    ids = torch.arange(6)[None]
    for name in parts:
        for given in ({}, {"config": whole.config}):
            part = load(tmp_path, model_class=getattr(transformers, name), strict=True, **given)
            assert part.config.name_or_path == str(tmp_path)
            assert not part.streamload_report.missing
            assert {raw(tensor) for tensor in part.state_dict().values()} <= held
            if name.endswith("ForCausalLM"):
                with torch.no_grad():
                    assert torch.equal(part(ids).logits, whole(ids).logits)
    if family != "Gemma4":  # fewer layers of that share caches that are not there
        fewer: dict[str, Any] = {"num_hidden_layers": 1}
        fewer |= {"layer_types": ["linear_attention"]} if family == "Qwen3_5" else {}
        with pytest.warns(UserWarning, match=r"not in the model, and ignored \(.*layers\.1\."):
            part = load(tmp_path, model_class=getattr(transformers, parts[0]), **fewer)
        assert part.config.num_hidden_layers == 1


@pytest.mark.parametrize("quant", ["q8_0", pytest.param("nf4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["Gemma3", "Llava"])
def test_a_part_of_a_quantised_model(tmp_path: Path, family: str, quant: str) -> None:
    """It has the whole model's quantised weights, under its own names, and is saved with them."""
    class_name, settings, parts = MULTIMODAL[family]
    torch.manual_seed(1)
    text = {"text_config": {**settings["text_config"], "intermediate_size": 64}}
    config = getattr(transformers, f"{family}Config")(**settings | text)
    getattr(transformers, class_name)(config).save_pretrained(tmp_path / "in")
    streamload.convert(tmp_path / "in", tmp_path / "q", quant=quant, progress=False)
    whole = load(tmp_path / "q")
    ids = torch.arange(6)[None]
    for name in parts:
        part = load(tmp_path / "q", model_class=getattr(transformers, name))
        assert part.is_quantized
        part.save_pretrained(tmp_path / name)
        assert_same_bits(load(tmp_path / name), part)
        if name.endswith("ForCausalLM"):
            with torch.no_grad():
                assert torch.equal(part(ids).logits, whole(ids).logits)


def test_a_class_for_another_configuration_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**GROUPED)
    with pytest.raises(CheckpointError, match=r"built.*expected T5Config.*found LlamaConfig"):
        load(saved(tmp_path, "llama"), model_class=transformers.T5Model, config=config)


@pytest.mark.parametrize("name", ["cls", "config_dict"])
def test_names_of_transformers_own_parameters_are_no_settings(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        load(saved(tmp_path, "llama"), **{name: 1})


@pytest.mark.parametrize("options", [{}, {"offload": True}, {"quant": "nf4"}])
def test_inside_of_a_meta_device(tmp_path: Path, options: dict[str, Any]) -> None:
    """Under ``torch.device("meta")`` a model comes to its device, with values."""
    folder = saved(tmp_path, "llama", intermediate_size=64)
    with torch.device("meta"):
        found, default = load(folder, **options), load(folder, device=None)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, load(folder, **options)(ids).logits)
    assert default.device.type != "meta"


@pytest.mark.parametrize("infix", ["_orig_mod", "base_layer", "_checkpoint_wrapped_module"])
def test_wrappers_leave_names(tmp_path: Path, infix: str) -> None:
    folder = saved(tmp_path, "llama")
    expected = reference(folder, "llama")

    def wrapped(tensors: dict[str, Any]) -> dict[str, Any]:
        names = {name: re.sub(r"(layers\.\d+\.)", rf"\1{infix}.", name) for name in tensors}
        return {names[n].replace(".mlp.", f".mlp.{infix}."): t for n, t in tensors.items()}

    rewrite(folder, wrapped)
    assert_same(load(folder, strict=True), expected)


def test_variants_and_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder in a folder, of two variants, by ``~``: as transformers reads them."""
    folder = tmp_path / "pipeline" / "text"
    saved(folder, "llama")
    half = new_model("llama", torch.float16)
    half.save_pretrained(folder, variant="fp16")
    assert {p.name for p in folder.glob("*.safetensors")} == {
        *("model.safetensors", "model.fp16.safetensors")
    }
    monkeypatch.setenv("HOME", str(tmp_path))
    given = {"subfolder": "text", "variant": "fp16", "dtype": torch.float16}
    found = load("~/pipeline", **given)
    assert_same_bits(found, reference(tmp_path / "pipeline", "llama", **given))
    assert found.streamload_report.read_nbytes == half.num_parameters() * 2
    plain = load("~/pipeline/text")
    assert plain.streamload_report.plan.readers == ("mmap",)
    assert plain.dtype == reference(folder, "llama").dtype


def test_revisions_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``revision=`` chooses the snapshot in the cache; it means nothing for a folder."""
    hub = tmp_path / "hub" / "models--me--tiny"
    for name, commit in (("main", "0" * 40), ("refs/pr/1", "1" * 40)):
        folder = hub / "snapshots" / commit
        saved(folder, "llama", num_hidden_layers=2 - int(commit[0]))
        (hub / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (hub / "refs" / name).write_text(commit)
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path, offline=True)
    assert len(load("me/tiny").model.layers) == 2
    assert len(load("me/tiny", revision="refs/pr/1").model.layers) == 1
    assert len(load("me/tiny", revision="1" * 40).model.layers) == 1
    assert load("me/tiny", revision="1" * 40).name_or_path == "me/tiny"
    assert len(load(folder, revision="main").model.layers) == 1


@pytest.mark.parametrize("fetch", ["stream", "cache"])
def test_a_repository_of_the_hub(hub: Hub, tmp_path: Path, fetch: str) -> None:
    """The model comes from the hub by name, revision and subfolder; a stream leaves no file."""
    folder = saved(tmp_path / "a", "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add("me/tiny", files | {f"sub/{name}": data for name, data in files.items()})
    reference = new_model("llama")
    for options in ({}, {"revision": COMMIT}, {"subfolder": "sub"}):
        found = streamload.transformers.from_pretrained("me/tiny", fetch=fetch, **options)
        assert_same_bits(found, reference)
        assert found.name_or_path == "me/tiny"
        assert found.generation_config.to_dict() == reference.generation_config.to_dict()
    whole = {path.name for path in (tmp_path / "home").rglob("*") if "snapshots" in path.parts}
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    assert expected <= whole if fetch == "cache" else not whole
    with streamload.transformers.from_pretrained(
        "me/tiny", offload=True, budget="10MB", tokens=1
    ).streamload_offload:
        pass


def test_a_repository_that_is_cached(hub: Hub, tmp_path: Path) -> None:
    """``local_files_only=True`` asks no hub; the error for what the cache lacks says what to do."""
    huggingface_hub = needs.module("huggingface_hub")
    folder = saved(tmp_path / "a", "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add("me/tiny", files | {f"sub/{name}": data for name, data in files.items()})
    for given in ({}, {"revision": COMMIT}):
        with pytest.raises(
            ShardNotFoundError, match="leave local_files_only out, or write `hf dow"
        ):
            ours.from_pretrained("me/tiny", local_files_only=True, **given)
    assert not hub.site.requests
    huggingface_hub.snapshot_download("me/tiny")
    before = len(hub.site.requests)
    for given in ({}, {"revision": "main"}, {"subfolder": "sub"}):
        found = ours.from_pretrained("me/tiny", local_files_only=True, token=TOKEN, **given)
        assert_same_bits(found, new_model("llama"))
        assert found.name_or_path == "me/tiny"
    ours.from_pretrained(f"hf://me/tiny@{COMMIT}/sub", local_files_only=True)
    assert len(hub.site.requests) == before
    with pytest.raises(ValueError, match="set HF_HUB_OFFLINE=1"):
        translated({"local_files_only": True}, frozenset({"components"}), "me/tiny")
    translated({"local_files_only": True}, frozenset({"components"}), folder)


@pytest.mark.parametrize("argument", ["token", "use_auth_token"])
def test_a_token(hub: Hub, tmp_path: Path, monkeypatch: Any, argument: str) -> None:
    """Another than that of the environment is refused for a repository, and not shown."""
    folder = saved(tmp_path / "a", "llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add("me/tiny", files).private = True
    for path in ("me/tiny", "hf://me/tiny"):
        with pytest.raises(ValueError, match="set HF_TOKEN in the environment, or run") as caught:
            ours.from_pretrained(path, **{argument: TOKEN})
        assert TOKEN not in str(caught.value)
    assert not hub.site.requests
    assert_same_bits(ours.from_pretrained(folder, **{argument: TOKEN}), new_model("llama"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for token in (TOKEN, True, None):
        assert_same_bits(ours.from_pretrained("me/tiny", **{argument: token}), new_model("llama"))


def test_a_configuration_by_path(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", "llama")
    shutil.copytree(folder, tmp_path / "b")
    (folder / "config.json").unlink()
    for config in (tmp_path / "b", str(tmp_path / "b" / "config.json")):
        found = load(folder, config=config, model_class=transformers.LlamaForCausalLM)
        assert_same_bits(found, new_model("llama"))


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine-of-the-tests"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_code_beside_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where that is asked for; where it is not, the error names the argument."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder = saved(tmp_path / "in", "llama")
    (folder / "mine.py").write_text(CODE)
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    changes = {"model_type": "mine-of-the-tests", "architectures": ["MineForCausalLM"]}
    reconfigure(folder, auto_map=auto_map, **changes)
    with pytest.raises(CheckpointError, match="trust_remote_code=True"):
        load(folder)
    auto = transformers.AutoModelForCausalLM
    expected = auto.from_pretrained(folder, trust_remote_code=True)
    for model_class in (None, auto):
        found = load(folder, trust_remote_code=True, model_class=model_class)
        assert type(found).__name__ == "MineForCausalLM"
        assert_same_bits(found, expected)


def test_names_that_are_mapped(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    expected = reference(folder, "llama")
    rewrite(folder, lambda t: {f"wrapped.{name}": tensor for name, tensor in t.items()})
    given = {"key_mapping": {r"^wrapped\.": ""}}
    assert_same_bits(load(folder, **given), expected)
    assert_same_bits(reference(folder, "llama", **given), expected)


@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "gpt2"])
def test_values_that_change_on_the_way(tmp_path: Path, name: str) -> None:
    """``transform=`` by the checkpoint's names, of tensors that are tied, fused or turned too."""
    folder = saved(tmp_path, name)
    changed = {
        "llama-tied": ("*embed_tokens.weight", "*norm.weight"),
        "mixtral": ("*.experts.*.w1.weight", "*.experts.2.w2.weight"),
        "gpt2": ("*.c_attn.weight", "*.wte.weight"),
    }[name]
    found = load(folder, transform=dict.fromkeys(changed, lambda rows: rows * 3 + 1))

    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        wanted = {n for n in tensors for pattern in changed if fnmatchcase(n, pattern)}
        assert len(wanted) >= 2
        return {n: t * 3 + 1 if n in wanted else t for n, t in tensors.items()}

    rewrite(folder, change)
    assert_same(found, reference(folder, name))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_adapters_are_merged(tmp_path: Path, dtype: str) -> None:
    """``adapters=`` leaves a plain model whose weights are those that were merged beforehand."""
    folder = saved(tmp_path / "base", "llama")
    rng, factors, merged = np.random.default_rng(0), {}, {}
    stored = st.load_file(folder / "model.safetensors")
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = stored[f"{module}.weight"]
        b, a = (
            rng.standard_normal(s, np.float32) for s in ((len(weight), 4), (4, weight.shape[1]))
        )
        factors |= {f"base_model.model.{module}.lora_A.weight": torch.from_numpy(a)}
        factors |= {f"base_model.model.{module}.lora_B.weight": torch.from_numpy(b)}
        exact = weight.double() + torch.from_numpy(b).double() @ torch.from_numpy(a).double() * 2
        merged[f"{module}.weight"] = exact.to(getattr(torch, dtype))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    st.save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    found = load(folder, adapters=[adapter], dtype=dtype)
    assert type(found) is transformers.LlamaForCausalLM
    expected = reference(folder, "llama", dtype=getattr(torch, dtype))
    for name, weight in merged.items():
        difference = (found.get_parameter(name) - weight).abs()
        assert (difference > 0).float().mean() < 0.01  # two orders of adding, rounded once
        assert (difference <= weight.abs() * torch.finfo(weight.dtype).eps).all()
        expected.get_parameter(name).data = found.get_parameter(name).data
    assert_same(found, expected)
    own = new_model("llama", getattr(torch, dtype))
    streamload.load_state_dict(own, folder, adapters=[adapter])
    wanted = found.state_dict()
    assert all(raw(t) == raw(wanted[name]) for name, t in own.state_dict().items())


def test_an_adapter_is_invalid(tmp_path: Path) -> None:
    """Its configuration names a base and a type, or the error says what it lacks."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(CheckpointError, match=r"the adapter is invalid.*base_model_name_or_path"):
        load(tmp_path)


def test_a_peft_that_is_too_old(tmp_path: Path, monkeypatch: Any) -> None:
    """It is refused before the base is looked for, with what to write."""
    folder = saved(tmp_path / "a", "llama")
    config = {"peft_type": "LORA", "base_model_name_or_path": "/not/there"}
    (tmp_path / "peft.dist-info").mkdir()
    said = "Metadata-Version: 2.1\nName: peft\nVersion: 0.18.1\n"
    (tmp_path / "peft.dist-info" / "METADATA").write_text(said)
    monkeypatch.syspath_prepend(tmp_path)
    for path in (folder, tmp_path / "lora"):
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(
            CheckpointError, match=r"-U peft, or load .*expected peft 0\.19 or later"
        ):
            load(path)


def test_the_folder_of_an_adapter(tmp_path: Path) -> None:
    """The base is streamed, and peft adds the adapter: the model that transformers gives."""
    peft = needs.runtime("peft")
    base = saved(tmp_path / "base", "llama")
    torch.manual_seed(2)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    # one line, the folder of an adapter; one line, a base for peft
    found = streamload.transformers.from_pretrained(tmp_path / "adapter", budget="2MB")
    theirs = peft.PeftModel.from_pretrained(ours.from_pretrained(base), tmp_path / "adapter")
    assert {k: raw(t) for k, t in tensors_of(found).items()} == {
        k: raw(t) for k, t in tensors_of(expected).items()
    }
    ids = torch.tensor([[5, 17, 3, 42, 8]])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)
        assert torch.equal(found(ids).logits, theirs(ids).logits)
    plain = ours.from_pretrained(base).streamload_report.plan.devices[0].peak_nbytes
    adapter_nbytes = sum(t.nbytes for name, t in tensors_of(found).items() if "lora" in name)
    with pytest.raises(PlanInfeasibleError):
        ours.from_pretrained(tmp_path / "adapter", budget=plain + adapter_nbytes - 1000)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace(str(base), "/weights/llama"))
    with pytest.raises(CheckpointError, match=r"^/weights/llama: no such .*BASE, adapters=\["):
        ours.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("fetch", ["stream", "cache"])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_repository_of_an_adapter(hub: Hub, tmp_path: Path, suffix: str, fetch: str) -> None:
    """Beside a model or without one, its base is the one it names, as for transformers."""
    peft = needs.runtime("peft")
    for seed, name in enumerate(("base", "both")):
        torch.manual_seed(seed)
        folder = tmp_path / name
        new_model("llama").save_pretrained(folder)
        rewrite(folder, lambda tensors, seed=seed: {n: t + seed for n, t in tensors.items()})
        hub.add(f"me/{name}", {path.name: path.read_bytes() for path in folder.iterdir()})
    both, base = (dict(hub.repos[f"me/{name}"].commits[COMMIT]) for name in ("both", "base"))
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained("me/base"),
        peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False),
    )
    model.save_pretrained(tmp_path / "lora", safe_serialization=suffix == "safetensors")
    lora = {path.name: path.read_bytes() for path in (tmp_path / "lora").iterdir()}
    assert f"adapter_model.{suffix}" in lora
    config = json.loads(lora["adapter_config.json"])
    assert config["base_model_name_or_path"] == "me/base"
    for files in (lora, both | lora):
        hub.add("me/lora", files)
        expected = transformers.AutoModelForCausalLM.from_pretrained("me/lora")
        found = streamload.transformers.from_pretrained("me/lora", fetch=fetch)
        assert {k: raw(t) for k, t in tensors_of(found).items()} == {
            k: raw(t) for k, t in tensors_of(expected).items()
        }
        assert found.name_or_path == expected.name_or_path == "me/base"
    config["base_model_name_or_path"] = None
    hub.add("me/own", base | lora | {"adapter_config.json": json.dumps(config).encode()})
    own = streamload.transformers.from_pretrained("me/own", fetch=fetch)
    assert own.name_or_path == "me/own"
    assert all(raw(t) == raw(tensors_of(found)[k]) for k, t in tensors_of(own).items())
