"""The KV cache: the bytes of transformers' own caches, and room for them in a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import pytest
from plan_helpers import device_spec, plan_of
from safetensors_files import write_safetensors

import streamload
from streamload import Node
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.core.dtypes import BF16, F16, F32
from streamload.core.tensors import RowRange
from streamload.errors import CheckpointError, PlanInfeasibleError
from streamload.planning import kv_cache
from streamload.planning.kv_cache import CacheRequest, KvCache
from streamload.planning.moves import DeviceSpec, TensorRequest
from streamload.planning.plan import Plan

#: A config.json of each kind, with the keys that published ones have; small.
GROUPED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALONE = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
MOE = {"num_experts_per_tok": 1, "num_local_experts": 2, "num_experts": 2}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "heads without groups": {"model_type": "llama", **ALONE},
    "grouped heads": {"model_type": "llama", **GROUPED},
    "heads longer than the width": {"model_type": "qwen3", **GROUPED, "head_dim": 32},
    "a length of heads that the class has": {"model_type": "gemma", **GROUPED},
    "names of GPT-2": {"model_type": "gpt2", **GPT2, "n_positions": 64},
    "one head for all": {"model_type": "gpt_bigcode", **GPT2, "multi_query": True},
    "not one head for all": {"model_type": "gpt_bigcode", **GPT2, "multi_query": False},
    "Falcon": {"model_type": "falcon", **ALONE, "multi_query": True},
    "Falcon, second architecture": {
        "model_type": "falcon",
        **ALONE,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "names of MPT": {
        "model_type": "mpt",
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "vocab_size": 48,
    },
    "a window everywhere": {"model_type": "mistral", **GROUPED, "sliding_window": 8},
    "no window": {"model_type": "mistral", **GROUPED, "sliding_window": None},
    "windows in the last layers": {
        "model_type": "qwen2",
        **GROUPED,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 4,
    },
    "windows that are not used": {
        "model_type": "qwen2",
        **GROUPED,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 4,
    },
    "every other layer": {"model_type": "gemma2", **GROUPED, "head_dim": 16, "sliding_window": 8},
    "a pattern, in a model of parts": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 8,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "vocab_size": 48,
        },
    },
    "types of layers": {
        "model_type": "gpt_oss",
        **GROUPED,
        **MOE,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 2,
    },
    "chunks": {
        "model_type": "llama4_text",
        **GROUPED,
        **MOE,
        "head_dim": 16,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 1, 0, 1, 0, 1],
        "intermediate_size_mlp": 32,
    },
    "layers that use the cache of others": {
        "model_type": "gemma3n_text",
        **GROUPED,
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 48,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 10,
    },
    "other heads in layers without a window": {
        "model_type": "gemma4_text",
        **GROUPED,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "latent attention": {
        "model_type": "deepseek_v3",
        **ALONE,
        **LATENT,
        "n_routed_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "latent attention without experts": {"model_type": "minicpm3", **ALONE, **LATENT},
}

LLAMA: dict[str, Any] = {"model_type": "llama", **GROUPED, "num_hidden_layers": 4}


def cache_of(config: Mapping[str, Any], context: int, batch: int = 1) -> KvCache:
    return KvCache.of(config, CacheRequest(context, batch), path="model")


def nbytes_of(cache: KvCache) -> list[int]:
    context, batch = cache.request.context, cache.request.batch
    return [4 * sum(layer.elements(context, batch)) for layer in cache.layers]


def model_of(config: Mapping[str, Any], folder: Path) -> Any:
    transformers = needs.module("transformers")
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    return transformers.AutoModelForCausalLM.from_config(read).eval()


def held(cache: Any) -> list[int]:
    """Bytes that each layer of a cache of transformers holds, also where it shows a slice."""
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    return [sum(0 if t is None else t.untyped_storage().nbytes() for t in pair) for pair in tensors]


def run_on(model: Any, cache: Any, tokens: int) -> Any:
    torch = needs.module("torch")
    with torch.no_grad():
        model(torch.ones((2, tokens), dtype=torch.long), past_key_values=cache, use_cache=True)
    return cache


#: Configurations that share their rule with another one.
SIMILAR = (
    "a length of heads that the class has",
    "not one head for all",
    "Falcon, second architecture",
    "no window",
    "windows that are not used",
    "every other layer",
    "latent attention without experts",
)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[pytest.mark.slow] * (name in SIMILAR))
        for name, config in CONFIGS.items()
    ],
)
def test_the_bytes_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """Layer by layer, exactly: after a prompt of the whole context, and nothing takes more."""
    model = model_of(config, tmp_path)
    caches = needs.module("transformers")
    for context in (7, 20):  # within the windows, and beyond them
        found = nbytes_of(cache_of(config, context, 2))
        assert found == held(run_on(model, caches.DynamicCache(config=model.config), context))
        static = caches.StaticCache(config=model.config, max_cache_len=context)
        assert math.fsum(held(run_on(model, static, 3))) <= math.fsum(found)
        step_by_step = caches.DynamicCache(config=model.config)
        for tokens in (context - 2, 1, 1):
            run_on(model, step_by_step, tokens)
            assert math.fsum(held(step_by_step)) <= math.fsum(found)


def test_a_window_that_is_shorter_than_the_context_is_told() -> None:
    """A note names the model, what is counted and the window; none where nothing is cut."""
    config = CONFIGS["a window everywhere"]
    (note,) = cache_of(config, 20).notes
    assert note == "mistral: the cache holds all 20 tokens after the prompt, not the window of 8"
    assert cache_of(config, 8).notes == cache_of(LLAMA, 20).notes == ()


def test_a_saved_configuration_says_the_same(tmp_path: Path) -> None:
    transformers = needs.module("transformers")
    for name, config in CONFIGS.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        full = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert cache_of(full, 20, 2).layers == cache_of(config, 20, 2).layers, name


def test_what_a_file_may_leave_out_is_as_in_transformers() -> None:
    """Every number that is taken from here where config.json has none is that of the class."""
    from_class = needs.module("transformers").AutoConfig.for_model
    for kind, numbers in kv_cache._DEFAULTS.items():
        config = from_class(kind)
        found = config.to_dict()  # some may not be asked for as attributes, as layers differ
        assert {key: found[key] for key in numbers} == dict(numbers), kind


#: Whose defaults make no model, or none without memory: they are in `CONFIGS`, or are one of those.
_OTHERWISE = {
    *("deepseek_v2", "dots1", "gemma3n_text", "kimi_k2", "ministral", "mpt"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron"),
    *("qwen2_5_vl", "qwen2_vl", "qwen2_5_vl_text", "qwen2_vl_text"),
    *("qwen3_vl_moe_text", "qwen3_vl_text", "aria_text", "emu3_text_model"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted((kv_cache._BY_HEADS | kv_cache._LATENT) - _OTHERWISE))
def test_every_model_that_is_known(kind: str) -> None:
    """At the full size of its class, on the meta device: the same tensors as its static cache."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    config = transformers.AutoConfig.for_model(kind)
    text = config.get_text_config(decoder=True)
    with torch.device("meta"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)
        cache = transformers.StaticCache(config=model.config, max_cache_len=100)
        model(torch.zeros((2, 7), dtype=torch.long), past_key_values=cache, use_cache=True)
    elements = [[layer.keys.numel(), layer.values.numel()] for layer in cache.layers]
    found = cache_of(config.to_dict(), 100, 2)
    assert [layer.elements(100, 2) for layer in found.layers] == elements


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "config.json beside the tensors"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "model_type 'mamba'"),
        ({"model_type": ["llama"]}, "model_type"),
        ({**LLAMA, "model_type": "t5"}, "model_type 't5'"),
        ({**LLAMA, "is_encoder_decoder": True}, "not known"),
        ({"model_type": "new", "text_config": {"hidden_size": 3}}, "new_text"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "a type for each of 4 layers"),
        ({**LLAMA, "layer_types": "full_attention"}, "a type for each of 4 layers"),
        ({**LLAMA, "layer_types": [["x"]] * 4}, "x"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads"),
        ({**LLAMA, "num_key_value_heads": "8"}, "num_key_value_heads"),
        ({**LLAMA, "head_dim": 1.5}, "head_dim"),
        ({"model_type": "qwen2", "num_hidden_layers": 2}, "num_attention_heads"),
        ({"model_type": "mixtral", **GROUPED, "sliding_window": -1}, "sliding_window"),
        ({"model_type": "deepseek_v3", **ALONE}, "kv_lora_rank"),
    ],
    ids=str,
)
def test_what_does_not_tell_is_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError, match=r"^model: ") as raised:
        cache_of(config, 10)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 1, None), "context"),
        ((1.5, 1, None), "context"),
        ((True, 1, None), "context"),
        ((8, 0, None), "batch"),
        ((8, None, None), "batch"),
        ((None, 2, None), "need context"),
        ((None, 1, "float16"), "need context"),
        ((8, 1, "int8"), "cache_dtype"),
        ((8, 1, "float4_e2m1fn"), "cache_dtype"),
        ((8, 1, "float17"), "float17"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: tuple[Any, ...], told: str) -> None:
    """What is no size of a cache is refused, with the argument's name."""
    with pytest.raises(ValueError, match=told):
        CacheRequest.read(*arguments)


def test_an_engine_that_expands_latent_attention_is_warned_of() -> None:
    """How many times as much it takes: heads of 32 and 16 elements for each token, not 24 + 8."""
    config = CONFIGS["latent attention"]
    (note,) = cache_of(config, 10).notes
    assert f"{4 * (16 + 8 + 16) / (24 + 8):.0f} times" in note
    assert cache_of(LLAMA, 10).notes == ()


# --- in a plan ------------------------------------------------------------------------------------


Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Write a checkpoint of four layers of 2,048 bytes each, embedding and head, in float16."""

    def write(config: Mapping[str, Any] | None = None, dtype: str = "F16") -> Path:
        element = {"F16": 2, "BF16": 2, "F32": 4, "I8": 1}[dtype]
        shapes = {"model.embed_tokens.weight": 64}
        shapes |= {f"model.layers.{i}.mlp.weight": 32 for i in range(4)}
        shapes["lm_head.weight"] = 64
        tensors = {
            name: (dtype, [rows, 32], bytes(element * 32 * rows)) for name, rows in shapes.items()
        }
        write_safetensors(tmp_path / "model.safetensors", tensors)
        (tmp_path / "config.json").write_text(json.dumps(LLAMA if config is None else config))
        return tmp_path

    return write


def planned(
    checkpoint: Checkpoint, places: Mapping[str, str], devices: list[DeviceSpec], cache: KvCache
) -> Plan:
    wants = [
        TensorRequest(
            info.name,
            info.shape,
            (RowRange(info.name, 0, info.shape[0]),),
            device=places.get(info.name),
        )
        for info in checkpoint.tensors.values()
    ]
    return plan_of(checkpoint, *devices, wants=wants, dtype=None, cache=cache)


#: Of `LLAMA`, of one layer and token in float16: keys and values of 2 heads of 16 elements.
ROW_NBYTES = 2 * 2 * 16 * 2


def test_each_node_has_room_for_the_cache_of_its_layers(saved: Saved) -> None:
    nodes = [Node(name, "1MB") for name in "abc"]
    made = streamload.split(saved(), nodes=nodes, context=100, batch=3)
    sizes = {d.device: (d.layers, d.cache_nbytes) for d in made.devices}
    for layers, nbytes in sizes.values():
        assert layers is not None
        assert nbytes == (layers[1] - layers[0]) * 300 * ROW_NBYTES
    assert made.cache == CacheRequest(100, 3, F16)
    assert Plan.from_json(made.to_json()) == made
    assert "3 sequences of 100 tokens" in str(made)


def test_the_cut_knows_the_cache(saved: Saved) -> None:
    """Without one the ends, which are heavy, hold fewer layers; a long context evens that out."""
    nodes = [Node(name, 10**9) for name in "abc"]
    for context, most in ((None, 3), (10**4, 2)):
        made = streamload.split(saved(), nodes=nodes, context=context)
        layers = [d.layers for d in made.devices if d.layers is not None]
        assert max(stop - start for start, stop in layers) == most
        assert [layers[0][0], layers[-1][1]] == [0, 4]


def test_what_does_not_fit_says_what_context_would(saved: Saved) -> None:
    path = saved()
    nodes = [Node("a", 10**5)]
    weights = 16384
    most = (10**5 - weights) // (4 * ROW_NBYTES)
    with pytest.raises(PlanInfeasibleError) as raised:
        streamload.split(path, nodes=nodes, context=1000)
    error = raised.value
    assert error.needed_nbytes == weights + 4 * 1000 * ROW_NBYTES
    assert error.largest[0] == ("the KV cache", 4 * 1000 * ROW_NBYTES)
    assert f"context={most}" in error.would_fit
    assert streamload.split(path, nodes=nodes, context=most).devices[0].cache_nbytes
    with pytest.raises(PlanInfeasibleError):
        streamload.split(path, nodes=nodes, context=most + 1)


def test_a_small_cache_is_named_too(saved: Saved) -> None:
    with pytest.raises(PlanInfeasibleError) as raised:
        streamload.split(saved(), nodes=[Node("a", 10**4)], context=1)
    assert ("the KV cache", 4 * ROW_NBYTES) in raised.value.largest
    assert not any("context" in one for one in raised.value.would_fit)


def test_how_many_nodes_would_do_counts_the_cache(saved: Saved) -> None:
    """As many as are proposed hold it, where the weights alone would need fewer."""
    path = saved()
    with pytest.raises(PlanInfeasibleError) as raised:
        streamload.split(path, nodes=[Node("a", 30_000)], context=100)
    (count,) = [int(one.split()[0]) for one in raised.value.would_fit if "nodes" in one]
    assert count > 1
    nodes = [Node(str(i), 30_000) for i in range(count)]
    assert streamload.split(path, nodes=nodes, context=100).devices
    with pytest.raises(PlanInfeasibleError):
        streamload.split(path, nodes=nodes[1:], context=100)


def test_bytes_in_reserve_on_nodes(saved: Saved) -> None:
    """They are of the budget of each node; the error and the table tell them."""
    path = saved()
    made = streamload.split(path, nodes=[Node("a", 20_000)], reserve=3616)
    (a,) = made.devices
    assert (a.reserve_nbytes, a.budget_nbytes, a.stated_nbytes) == (3616, 16384, 20_000)
    titles, row, *_ = str(made).splitlines()
    assert titles.split()[-5:] == ["reserve", "budget", "share", "per", "token"]
    assert "3.62 kB  20.00 kB   100%" in row
    with pytest.raises(PlanInfeasibleError, match="kept free"):
        streamload.split(path, nodes=[Node("a", 20_000)], reserve=3617)


def test_the_load_itself_may_use_the_bytes_of_the_cache(saved: Saved) -> None:
    """They are needed when the load is done: what it takes meanwhile is not added to them."""
    made = streamload.plan(saved(), budget=10**7, device="cpu", dtype="float32", context=100)
    (cpu,) = made.devices
    assert cpu.run_nbytes == cpu.resident_nbytes + cpu.cache_nbytes
    assert cpu.needed_nbytes == max(cpu.peak_nbytes, cpu.run_nbytes)
    exact = streamload.plan(
        saved(), budget=cpu.needed_nbytes, device="cpu", dtype="float32", context=100
    )
    assert exact.devices[0].needed_nbytes == cpu.needed_nbytes


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({}, F16),
        ({"dtype": "float32"}, F32),
        ({"dtype": {"*head*": "float32", "*": "float16"}}, F16),
        ({"cache_dtype": "bfloat16"}, BF16),
    ],
    ids=str,
)
def test_the_dtype_is_that_of_the_weights(
    saved: Saved, arguments: dict[str, Any], dtype: object
) -> None:
    made = streamload.split(saved(), nodes=[Node("a", "1MB")], context=10, **arguments)
    assert made.cache is not None
    assert made.cache.dtype is dtype


def test_bfloat16_that_stays_is_the_dtype_of_the_cache(saved: Saved) -> None:
    checkpoint = open_checkpoint(saved(dtype="BF16"))
    for native, dtype in ((True, BF16), (False, F16)):
        device = device_spec("a", 10**6, native_bf16=native)
        made = planned(checkpoint, {}, [device], cache_of(LLAMA, 10))
        assert made.cache == CacheRequest(10, 1, dtype)


def test_quantized_weights_leave_the_dtype_to_the_configuration(saved: Saved) -> None:
    """What nobody computes in is not the cache's dtype; without another, it is asked for."""
    nodes = [Node("a", "1MB")]
    path = saved({**LLAMA, "torch_dtype": "bfloat16"}, "I8")
    made = streamload.split(path, nodes=nodes, context=10)
    assert made.cache == CacheRequest(10, 1, BF16)
    with pytest.raises(CheckpointError, match="cache_dtype="):
        streamload.split(saved(LLAMA, "I8"), nodes=nodes, context=10)


def test_a_checkpoint_without_its_configuration(saved: Saved) -> None:
    """An error that says what to give instead; without ``context`` it is not asked for."""
    path = saved()
    (path / "config.json").unlink()
    nodes = [Node("a", "1MB")]
    with pytest.raises(CheckpointError, match="reserve="):
        streamload.split(path, nodes=nodes, context=10)
    assert streamload.split(path, nodes=nodes).cache is None


def test_tensors_that_belong_to_no_layer(tmp_path: Path) -> None:
    """Where no name tells a layer, it is not known what cache belongs where."""
    write_safetensors(tmp_path / "model.safetensors", {"w": ("F16", [2], bytes(4))})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0"):
        streamload.split(tmp_path, nodes=[Node("a", "1MB")], context=10)


def test_layers_that_have_a_place_have_their_cache_there(saved: Saved) -> None:
    """Where most of the layer's weights are, as in a model whose parameters are placed already."""
    checkpoint = open_checkpoint(saved())
    devices = [device_spec("a", 10**6), device_spec("b", 10**6)]
    places = {name: "b" if "layers.3" in name else "a" for name in checkpoint.tensors}
    made = planned(checkpoint, places, devices, cache_of(LLAMA, 10))
    cached = {d.device: d.cache_nbytes for d in made.devices}
    assert cached == {"a": 3 * 10 * ROW_NBYTES, "b": 10 * ROW_NBYTES}


def test_the_end_of_a_model_needs_no_cache(saved: Saved) -> None:
    """Where what is loaded has no layers, and the checkpoint has."""
    made = streamload.split(
        saved(),
        nodes=[Node("a", "1MB")],
        context=10**6,
        rename=lambda name: name if name == "lm_head.weight" else None,
    )
    assert made.devices[0].cache_nbytes == 0


def test_a_smaller_dtype_makes_the_cache_smaller_too(saved: Saved) -> None:
    path = saved(dtype="F32")
    half = 16384 + 4 * 100 * ROW_NBYTES
    nodes = [Node("a", half)]
    with pytest.raises(PlanInfeasibleError, match=r'would fit: dtype="float16"'):
        streamload.split(path, nodes=nodes, context=100)
    made = streamload.split(path, nodes=nodes, context=100, dtype="float16")
    assert made.devices[0].run_nbytes == half


def test_a_cuda_device_takes_the_cache_in_segments(saved: Saved) -> None:
    made = streamload.plan(
        saved(), budget="1GB", device="cuda:0", dtype="checkpoint", context=2**14
    )
    assert made.devices[0].cache_nbytes == 4 * 2 * 2**20 * 1  # 8 tensors of 1 MiB, two a segment


def test_a_load_leaves_room_and_reports_it(saved: Saved) -> None:
    path = saved()
    report = streamload.load_state_dict(
        None, path, device="host", budget="10MB", context=100, batch=2, reserve="1MB"
    )
    (host,) = report.plan.devices
    assert host.cache_nbytes == 4 * 200 * ROW_NBYTES
    assert host.reserve_nbytes == 10**6
    with pytest.raises(PlanInfeasibleError, match="KV cache"):
        streamload.load_state_dict(None, path, device="host", budget="10MB", context=10**5)


def test_a_model_that_was_loaded_can_run(tmp_path: Path) -> None:
    """transformers' cache takes what was left free for it, on the device of the layers."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    from streamload.transformers import from_pretrained

    model_of(LLAMA, tmp_path).to(torch.float16).save_pretrained(tmp_path)
    model = from_pretrained(
        tmp_path, budget="20MB", device="cpu", context=500, batch=2, reserve="1MB"
    )
    (cpu,) = model.streamload_report.plan.devices
    cache = transformers.StaticCache(config=model.config, max_cache_len=500)
    assert math.fsum(held(run_on(model, cache, 5))) == cpu.cache_nbytes
    assert cpu.reserve_nbytes >= 10**6
    with pytest.raises(PlanInfeasibleError, match="KV cache"):
        from_pretrained(tmp_path, budget="20MB", device="cpu", context=10**5)


def test_a_configuration_that_is_given_decides(tmp_path: Path) -> None:
    """``config=`` in place of config.json tells the cache of ``from_pretrained``, too."""
    transformers = needs.module("transformers")
    from streamload.transformers import from_pretrained

    model_of({"model_type": "mistral", **GROUPED}, tmp_path).save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.sliding_window = 4
    model = from_pretrained(
        tmp_path, budget="20MB", device="cpu", dtype="float32", config=config, context=500
    )
    made = model.streamload_report.plan
    assert made.devices[0].cache_nbytes == 6 * 500 * (2 * 2 * 16 * 4)
    assert any("not the window of 4" in note for note in made.notes)
