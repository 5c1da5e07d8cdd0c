"""`convert(adapters=)`: LoRA merged into a checkpoint, cast or quantised after that."""

from __future__ import annotations

import json
import random as chances
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import needs
import numpy as np
import pytest
from bench_parts.section import forget
from boxes import Boxes
from conversions import files_of, make_gguf, make_gpt2, quiet, tensors_of
from convert_crash_helpers import Start, duration, kill_and_resume, start
from lora_files import BASE, Array, adapter, assert_nearest, of_layers, pair, random
from make_checkpoint import make_checkpoint, shape_of_size
from remote_server import serve
from safetensors_files import write_arrays

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.conversion.disk import WORK
from streamload.core.dtypes import BF16
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.planning.partition import Node

__all__ = ["start"]

Q, V = "model.layers.0.q_proj", "model.layers.0.v_proj"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    kind = ml_dtypes.bfloat16
    arrays = {f"{Q}.weight": random(0, 300, 1000, dtype=kind), "head.weight": random(1, 9, 12)}
    arrays |= {f"{V}.weight": random(2, 40, 40, dtype=kind), f"{V}.bias": random(3, 40, dtype=kind)}
    write_arrays(tmp_path / "base" / "model.safetensors", arrays)
    (tmp_path / "base" / "config.json").write_text('{"dtype": "bfloat16"}')
    return tmp_path / "base"


def values(path: Path) -> dict[str, Array]:
    return {
        name: np.frombuffer(data, dtype.numpy).reshape(shape)
        for name, (dtype, shape, data) in tensors_of(path).items()
    }


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def wide(array: Array) -> Array:
    return array.astype(np.float64)


@pytest.mark.parametrize("dtype", [None, "float16", "float32"])
def test_merged_and_rounded_once(base: Path, tmp_path: Path, dtype: str | None) -> None:
    """Two adapters, one scaled: the nearest numbers to the sums; all else as without them."""
    first, second = pair(Q, 300, 1000), pair(Q, 300, 1000, seed=9) | pair(V, 40, 40)
    folders = [adapter(tmp_path / "a", first), adapter(tmp_path / "b", second, use_rslora=True)]
    given = [folders[0], (folders[1], -0.5)]
    report = quiet(base, tmp_path / "out", adapters=given, dtype=dtype, verify=True)
    quiet(base, tmp_path / "plain", dtype=dtype)
    found, plain = values(tmp_path / "out"), values(tmp_path / "plain")
    source = values(base)
    (a1, b1), (a2, b2, a3, b3) = (map(wide, each.values()) for each in (first, second))
    q = wide(source[f"{Q}.weight"]) + b1 @ a1 * 1.5 - b2 @ a2 * 1.5
    assert_nearest(found[f"{Q}.weight"], q)
    assert_nearest(found[f"{V}.weight"], wide(source[f"{V}.weight"]) - b3 @ a3 * 1.5)
    for name in ("head.weight", f"{V}.bias"):
        assert np.array_equal(found[name], plain[name])
    assert report.plan.options["adapters"][1][:2] == [str(folders[1]), -0.5]
    configs = [(tmp_path / each / "config.json").read_bytes() for each in ("out", "plain")]
    assert configs[0] == configs[1]
    loaded = streamload.load_state_dict(
        None, base, adapters=given, device="host", dtype=dtype or "checkpoint", progress=False
    )
    for name, array in loaded.state_dict.items():
        assert array.tobytes() == found[name].tobytes(), name


def test_an_adapter_that_holds_more(base: Path, tmp_path: Path) -> None:
    """DoRA, biases of lora_B, biases and whole modules; whole tensors keep the base's dtype."""
    lengths, bias = random(6, 300), random(7, 40)
    head, whole = random(8, 9, 12), random(9, 40)
    a, b = (wide(each) for each in pair(Q, 300, 1000).values())
    dora = pair(Q, 300, 1000) | {f"{BASE}{Q}.lora_magnitude_vector": lengths}
    first = adapter(tmp_path / "a", dora, use_dora=True)
    named = pair(V, 40, 40) | {f"{BASE}{V}.lora_B.bias": bias, f"{BASE}head.weight": head}
    second = adapter(tmp_path / "b", named, lora_bias=True, modules_to_save=["head"])
    third = adapter(tmp_path / "c", pair(V, 40, 40) | {f"{BASE}{V}.base_layer.bias": whole})
    quiet(base, tmp_path / "out", adapters=[first, second])
    found, source = values(tmp_path / "out"), values(base)
    merged = wide(source[f"{Q}.weight"]) + b @ a * 1.5
    merged *= (wide(lengths) / np.linalg.norm(merged, axis=1))[:, None]
    assert_nearest(found[f"{Q}.weight"], merged)
    assert_nearest(found[f"{V}.bias"], wide(source[f"{V}.bias"]) + wide(bias) * 1.5)
    assert np.array_equal(found["head.weight"], head)
    quiet(base, tmp_path / "third", adapters=[third])
    assert_nearest(values(tmp_path / "third")[f"{V}.bias"], wide(whole))
    with pytest.raises(CheckpointError, match="write streamload"):
        streamload.load_state_dict(None, base, adapters=[third], device="host")


def test_trained_tokens(tmp_path: Path) -> None:
    """Rows of an embedding are replaced, by index."""
    write_arrays(tmp_path / "base" / "model.safetensors", {"m.embed.weight": random(0, 70, 8)})
    rows = {f"{BASE}m.embed.token_adapter.trainable_tokens_delta": random(1, 3, 8)}
    for stated in ([69, 0, 5], {"embed": [69, 0, 5]}):
        folder = adapter(tmp_path / "a", rows, trainable_token_indices=stated)
        quiet(tmp_path / "base", tmp_path / "out", adapters=[folder], overwrite=True)
        expected = random(0, 70, 8)
        expected[[69, 0, 5]] = random(1, 3, 8)
        assert np.array_equal(values(tmp_path / "out")["m.embed.weight"], expected)
    with pytest.raises(CheckpointError, match=r"trainable_token_indices.* no scale.*found 0\.5"):
        quiet(tmp_path / "base", tmp_path / "no", adapters=[(folder, 0.5)])
    other = adapter(tmp_path / "b", rows, trainable_token_indices=[1, 5, 69])
    with pytest.raises(CheckpointError, match="trained some of the same tokens"):
        quiet(tmp_path / "base", tmp_path / "no", adapters=[folder, other])
    folder = adapter(tmp_path / "a", rows, trainable_token_indices=[70, 0, 5])
    with pytest.raises(CheckpointError, match="below 70"):
        quiet(tmp_path / "base", tmp_path / "no", adapters=[folder])


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "nf4", "dtype": "float32"},
        {"quant": {"*.down_proj.weight": "int8"}, "dtype": "float32", "max_shard_size": "1MB"},
        {"to": "gguf", "dtype": "float32"},
        {"to": "gguf", "quant": "q8_0"},
        {"to": "mlc", "quant": "q0f32"},
        {"to": "mlc", "quant": "q4f16_0"},
        {"nodes": [Node("a", 3_000_000), Node("b", "1GB")], "dtype": "float32"},
    ],
    ids=str,
)
def test_merged_before_all_else(tmp_path: Path, options: dict[str, Any]) -> None:
    """In one call as in two, the first of which writes the sums in float32."""
    shape = shape_of_size(3_000_000, BF16)
    make_checkpoint(tmp_path / "base", shape)
    change_config(tmp_path / "base", architectures=[])  # transformers is not asked
    folder = of_layers(tmp_path / "lora", shape.tensors(), 4)
    quiet(tmp_path / "base", tmp_path / "sums", adapters=[folder], dtype="float32")
    one = quiet(tmp_path / "base", tmp_path / "one", adapters=[folder], **options)
    two = quiet(tmp_path / "sums", tmp_path / "two", **options)
    without = quiet(tmp_path / "base", tmp_path / "without", **options)
    assert one.digests == two.digests
    changed = [name for name in one.digests if one.digests[name] != without.digests[name]]
    assert len(changed) > len(shape.tensors()) // 3


def test_a_conv1d(tmp_path: Path) -> None:
    """GPT-2 keeps inputs along the first axis, also in square matrices; its formats transpose."""
    make_gpt2(tmp_path / "base", 400_000)
    change_config(tmp_path / "base", layer_norm_epsilon=1e-5)
    source = values(tmp_path / "base")
    names = [n for n in source if n.endswith("attn.c_proj.weight") or n.endswith("c_fc.weight")]
    factors: dict[str, Array] = {}
    for name in names:
        factors |= pair(name.removesuffix(".weight"), *source[name].shape[::-1])
    folder = adapter(tmp_path / "lora", factors)
    quiet(tmp_path / "base", tmp_path / "out", adapters=[folder], dtype="float32")
    found = values(tmp_path / "out")
    for name in names:
        a, b = (wide(factors[f"{BASE}{name[:-7]}.lora_{part}.weight"]) for part in "AB")
        assert_nearest(found[name], wide(source[name]) + (b @ a).T * 1.5)
    for to in ("gguf", "llm.c"):
        options = {"to": to, "dtype": "float32"}
        quiet(tmp_path / "base", tmp_path / f"{to}1", adapters=[folder], **options)
        quiet(tmp_path / "out", tmp_path / f"{to}2", **options)
        one, two = (files_of(tmp_path / f"{to}{i}") for i in "12")
        assert [n for n in one if one[n] != two[n]] in ([], ["streamload.json"]), to


@pytest.mark.parametrize(
    ("arrays", "config", "message"),
    [
        (pair("nowhere", 9, 12), {}, "tensor 'base_model.model.nowhere.lora_A.weight'.*'nowhere"),
        ({f"{BASE}nowhere.weight": random(0, 9, 12)}, {}, "tensor 'base_model.model.nowhere.w"),
        ({f"{BASE}head.weight": random(0, 10, 12)}, {}, r"grown vocabulary.*\[9, 12\].*\[10, 12\]"),
        (pair("head", 9, 12), {"use_dora": True}, "lora_magnitude_vector of 'head'"),
        (pair("head", 9, 12), {"lora_bias": True}, "lora_bias True"),
        (pair("head", 9, 12), {"target_parameters": ["x"]}, "target_parameters"),
        (pair("head", 9, 12), {"layer_replication": [[0, 1]]}, "layer_replication"),
        (pair("head", 9, 12), {"modules_to_save": ["score"]}, "lacks tensors: expected score"),
        (pair("head", 9, 12), {"lora_alpha": "x"}, "lora_alpha"),
        (pair("head", 9, 12), {"alpha_pattern": {"(": 3}}, "alpha_pattern is invalid"),
        (pair("head", 9, 12, rank=0), {}, "A and B of two axes"),
        ({}, {}, "lacks tensors: expected lora_A"),
        (
            pair("head", 12, 9) | {f"{BASE}head.lora_magnitude_vector": random(0, 12)},
            {"use_dora": True},
            "use_dora is merged into a Linear",
        ),
    ],
)
def test_refused_by_name_before_anything_is_written(
    base: Path, tmp_path: Path, arrays: Mapping[str, Array], config: dict[str, Any], message: str
) -> None:
    folder = adapter(tmp_path / "a", arrays, **config)
    with pytest.raises(CheckpointError, match=message):
        quiet(base, tmp_path / "out", adapters=[folder])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["a", [1], [("a", "b")], [("a", float("nan"))], {"a": 1}])
def test_an_invalid_argument(base: Path, tmp_path: Path, given: Any) -> None:
    """Adapters are a list of paths, or of paths and scales."""
    adapter(tmp_path / "a", pair(V, 40, 40))
    with pytest.raises(ValueError, match="adapter"):
        quiet(base, tmp_path / "out", adapters=given)


def test_tied_weights(tmp_path: Path) -> None:
    """An embedding that is the head, too: merged if stored once, refused if replaced."""
    embed, config = "model.embed_tokens", {"architectures": ["LlamaForCausalLM"]}
    embedded = {f"{BASE}{embed}.lora_embedding_A": random(1, 4, 20)}
    embedded[f"{BASE}{embed}.lora_embedding_B"] = random(2, 12, 4)
    lora = adapter(tmp_path / "a", embedded)
    whole = adapter(tmp_path / "b", {f"{BASE}{embed}.weight": random(3, 20, 12)})
    arrays = {f"{embed}.weight": random(0, 20, 12)}
    path = tmp_path / "base"
    write_arrays(path / "model.safetensors", arrays)
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.warns(UserWarning, match="lm_head.weight is tied to.*tie_word_embeddings = False"):
        quiet(path, tmp_path / "out", adapters=[lora])
    a, b = (wide(each) for each in embedded.values())
    exact = wide(arrays[f"{embed}.weight"]) + (b @ a).T * 1.5
    assert_nearest(values(tmp_path / "out")[f"{embed}.weight"], exact)
    with pytest.raises(CheckpointError, match=r"are tied: .*tie_word_embeddings = False"):
        quiet(path, tmp_path / "no", adapters=[whole])
    for arrays_of_head in ({f"{BASE}lm_head.weight": random(3, 20, 12)}, pair("lm_head", 20, 12)):
        head = adapter(tmp_path / "c", arrays_of_head, modules_to_save=None)
        with pytest.raises(CheckpointError, match=r"head is tied to .*tie_word_embeddings = False"):
            quiet(path, tmp_path / "no", adapters=[head])
    write_arrays(path / "model.safetensors", arrays | {"lm_head.weight": random(0, 20, 12)})
    with pytest.raises(CheckpointError, match="both are stored"):
        quiet(path, tmp_path / "no", adapters=[lora])


@pytest.mark.parametrize("name", ["adapter_model", "pytorch_lora_weights"])
def test_lora_that_peft_has_not_saved(base: Path, tmp_path: Path, name: str) -> None:
    """Of kohya or diffusers: the line for pipelines; of peft's names: what the file lacks."""
    folder = tmp_path / "a"
    write_arrays(folder / f"{name}.safetensors", {"lora_unet_x.lora_down.weight": random(0, 4, 40)})
    for path in (folder, folder / f"{name}.safetensors"):
        with pytest.raises(ShardNotFoundError, match=r"pipe.load_lora_weights\(.*\"LORA\""):
            quiet(base, tmp_path / "out", adapters=[path])


@pytest.mark.slow
def test_the_line_for_a_tied_base_works(tmp_path: Path) -> None:
    """The base that it saves has a head of its own, which an adapter may change."""
    torch, transformers = (needs.module(name) for name in ("torch", "transformers"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    head = adapter(tmp_path / "a", pair("lm_head", 64, 32))
    with pytest.raises(CheckpointError) as caught:
        quiet(tmp_path / "base", tmp_path / "out", adapters=[head])
    line = caught.value.problem.partition("first: ")[2].partition(", and give")[0]
    names = {"torch": torch, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    line = line.replace("BASE", "base").replace('"UNTIED"', "untied")
    exec(line, names | {"base": tmp_path / "base", "untied": tmp_path / "untied"})
    quiet(tmp_path / "untied", tmp_path / "out", adapters=[head])
    found, before = (values(tmp_path / each) for each in ("out", "untied"))
    changed = {n for n, v in found.items() if not np.array_equal(v, before[n])}
    assert changed == {"lm_head.weight"}


def test_bases_in_another_form(base: Path, tmp_path: Path) -> None:
    """Bases of codes are refused, and rows of GGUF are merged; no adapter's folder is written."""
    folder = adapter(tmp_path / "a", pair(V, 40, 40))
    quiet(base, tmp_path / "int8", quant={f"{V}.weight": "int8"})
    with pytest.raises(CheckpointError, match="dequantise the base first"):
        quiet(tmp_path / "int8", tmp_path / "no", adapters=[folder])
    make_gguf(tmp_path / "gguf", 400_000, "F16")
    tensors = open_checkpoint(tmp_path / "gguf").tensors
    quiet(tmp_path / "gguf", tmp_path / "plain")
    for name in ("self_attn.q_proj", "mlp.down_proj"):  # whose rows are interleaved there, or not
        module = f"model.layers.0.{name}"
        other = adapter(tmp_path / name, pair(module, *tensors[f"{module}.weight"].shape))
        found = quiet(tmp_path / "gguf", tmp_path / f"{name}-out", adapters=[other])
        expected = quiet(tmp_path / "plain", tmp_path / f"{name}-again", adapters=[other])
        assert found.digests == expected.digests
    before = files_of(folder)
    with pytest.raises(CheckpointError, match="the source is in the folder"):
        quiet(base, folder, adapters=[folder], overwrite=True)
    assert files_of(folder) == before


def test_where_an_adapter_is(base: Path, tmp_path: Path) -> None:
    """A file, torch.save's, beside its base, on a server; the output is no more readable."""
    torch = needs.module("torch")
    factors = pair(V, 40, 40)
    folder, other = adapter(tmp_path / "a", factors), tmp_path / "b"
    shutil.copytree(base, other)
    shutil.copy(folder / "adapter_config.json", other)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        quiet(base, tmp_path / "no", adapters=[other])
    arrays = {name: torch.from_numpy(array.copy()) for name, array in factors.items()}
    torch.save(arrays, other / "adapter_model.bin")
    expected = quiet(base, tmp_path / "out", adapters=[folder]).digests
    with serve(folder) as site:
        for i, each in enumerate([other, folder / "adapter_model.safetensors", site.url]):
            assert quiet(base, tmp_path / f"out{i}", adapters=[each]).digests == expected
    (folder / "adapter_model.safetensors").chmod(0o600)
    quiet(base, tmp_path / "private", adapters=[folder])
    assert (tmp_path / "private" / "model.safetensors").stat().st_mode & 0o777 == 0o600


class _StopError(Exception):
    """Raised by a test in the middle of a conversion."""


def _stop(done: int, total: int) -> None:
    if done == total:
        raise _StopError


def test_resumed_with_the_same_adapters_alone(base: Path, tmp_path: Path) -> None:
    folder, out = adapter(tmp_path / "a", pair(V, 40, 40)), tmp_path / "out"
    with pytest.raises(_StopError):
        quiet(base, out, adapters=[folder], progress=_stop)
    assert (out / WORK / "journal").exists()

    def others() -> None:
        for given in ([], [(folder, 0.5)], [folder, folder]):
            with pytest.raises(CheckpointError, match=refused):
                quiet(base, out, adapters=given, resume=True)
        kept = files_of(folder)
        for arrays, config in ((pair(V, 40, 40, seed=1), {}), (pair(V, 40, 40), {"lora_alpha": 5})):
            adapter(folder, arrays, **config)
            with pytest.raises(CheckpointError, match=refused):
                quiet(base, out, adapters=[folder], resume=True)
        for name, data in kept.items():
            (folder / name).write_bytes(data)

    refused = "another option 'adapters'"
    others()
    shutil.copytree(out, tmp_path / "again")
    adapter(folder, pair(V, 40, 40))
    with pytest.raises(CheckpointError, match="state of the source's 'adapter_model"):
        quiet(base, out, adapters=[folder], resume=True)  # written anew
    quiet(base, out, adapters=[folder], overwrite=True)
    assert quiet(base, out, adapters=[folder], resume=True).resumed == 4
    refused = "checkpoint"
    others()


def test_the_command(base: Path, tmp_path: Path, here: Callable[..., tuple[str, str]]) -> None:
    """``--adapter PATH[=SCALE]``, any number of them."""
    first, second = (adapter(tmp_path / name, pair(V, 40, 40)) for name in ("a", "b=c"))
    quiet(base, tmp_path / "out", adapters=[first, (second, 0.5)])
    flags = ["--adapter", first, "--adapter", f"{second}=0.5", "--quiet"]
    here("convert", base, tmp_path / "command", *flags)
    assert files_of(tmp_path / "command") == files_of(tmp_path / "out")


@pytest.mark.slow
def test_killed_while_it_merges(start: Start, tmp_path: Path) -> None:
    """SIGKILL at random points: the bytes of a whole run."""
    path, shape = tmp_path / "in", shape_of_size(24_000_000, BF16)
    make_checkpoint(path, shape, shards=3)
    folder = of_layers(tmp_path / "lora", shape.tensors())
    options: dict[str, object] = {"adapters": [str(folder)], "max_shard_size": "5MB"}
    chance = chances.Random(11)
    longest_s = duration(start, path, tmp_path / "first", options)
    whole = files_of(tmp_path / "first")
    for i in range(20):
        kill_and_resume(start, path, tmp_path / f"out{i}", whole, chance, longest_s, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nbytes", "limit_nbytes"), [(300_000_000, 2**27), (2_270_000_000, 256_000_000)]
)
def test_it_needs_little_memory(
    cgroup: Boxes, tmp_path: Path, nbytes: int, limit_nbytes: int
) -> None:
    """A checkpoint larger than the memory that there is, page cache and all."""
    shape = shape_of_size(nbytes, BF16)
    make_checkpoint(tmp_path / "in", shape)
    folder = of_layers(tmp_path / "lora", shape.tensors())
    forget(tmp_path / "in")
    command = [sys.executable, "-m", "streamload", "convert", tmp_path / "in", tmp_path / "out"]
    done = cgroup.run([*command, "--adapter", folder, "--no-progress"], limit_nbytes)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr


#: What peft trains in a small model of a family, and its settings.
OF_PEFT: list[tuple[str, list[str] | str, dict[str, Any]]] = [
    ("Llama", ["q_proj", "down_proj", "embed_tokens"], {}),
    ("Llama", "all-linear", {"use_rslora": True, "alpha_pattern": {"q_proj": 3}}),
    ("Llama", ["q_proj", "down_proj"], {"use_dora": True}),
    ("Llama", ["q_proj"], {"modules_to_save": ["lm_head", "embed_tokens"]}),
    ("Llama", ["q_proj"], {"trainable_token_indices": [3, 40]}),
    ("Qwen2", "all-linear", {"rank_pattern": {"up_proj": 2}}),
    ("Qwen2", ["q_proj", "v_proj"], {"lora_bias": True}),
    ("Qwen2", ["q_proj", "o_proj"], {"bias": "all"}),
    ("GPT2", "all-linear", {}),
    ("GPT2", ["c_attn", "c_proj"], {"bias": "lora_only"}),
    ("Mixtral", ["q_proj", "k_proj", "o_proj"], {}),
]
SCALED = [
    (*case, scale)
    for case in OF_PEFT
    for scale in (1, 0.5)
    if scale == 1 or "trainable_token_indices" not in case[2]
]
#: The same of settings that are refused.
REFUSED: list[tuple[str, list[str] | str, dict[str, Any]]] = [
    ("GPT2", ["c_attn"], {"use_dora": True}),
    ("Llama", ["q_proj"], {"layer_replication": [[0, 2], [1, 2]]}),
    ("Mixtral", ["q_proj"], {"target_parameters": ["mlp.experts.down_proj"]}),
]


def of_peft(folder: Path, family: str, targets: list[str] | str, settings: dict[str, Any]) -> Any:
    """Save a small model of bf16 and an adapter; returns the model's class."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    peft = needs.runtime("peft")
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    config = getattr(transformers, f"{family}Config")(vocab_size=64, **sizes)
    kind(config).to(torch.bfloat16).save_pretrained(folder / "base")
    model = kind.from_pretrained(folder / "base", dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=4, lora_alpha=7, target_modules=targets, **settings)
    model = peft.get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1.3
        elif parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "lora")
    return kind


@pytest.mark.slow
@pytest.mark.parametrize(("family", "targets", "settings", "scale"), SCALED, ids=str)
def test_as_peft_merges(
    tmp_path: Path, family: str, targets: list[str] | str, settings: dict[str, Any], scale: float
) -> None:
    """Its merge of base and adapter in float64, rounded once; transformers opens the result."""
    kind = of_peft(tmp_path, family, targets, settings)
    torch, peft = needs.module("torch"), needs.runtime("peft")
    exact = kind.from_pretrained(tmp_path / "base", dtype=torch.float64)
    exact = peft.PeftModel.from_pretrained(exact, tmp_path / "lora").double()
    for module in exact.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_scale("default", scale)
    exact = exact.merge_and_unload()
    exact.save_pretrained(tmp_path / "exact")
    quiet(tmp_path / "base", tmp_path / "out", adapters=[(tmp_path / "lora", scale)])
    found, wanted = values(tmp_path / "out"), values(tmp_path / "exact")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == ml_dtypes.bfloat16
        assert_nearest(found[name], array)
    opened = kind.from_pretrained(tmp_path / "out", dtype=torch.float32)
    away = opened(torch.arange(10)[None]).logits - exact.float()(torch.arange(10)[None]).logits
    assert away.abs().max() < 0.2


@pytest.mark.slow
def test_experts_as_transformers_4_names_them(tmp_path: Path) -> None:
    """An adapter of each expert's matrices, which peft brings into the fused ones."""
    kind = of_peft(tmp_path, "Mixtral", ["q_proj"], {})
    torch, peft = needs.module("torch"), needs.runtime("peft")
    factors: dict[str, Array] = {}
    for name, (_, shape, _) in tensors_of(tmp_path / "base").items():
        if ".experts." in name:
            factors |= pair(name.removesuffix(".weight"), *shape, seed=len(factors))
    folder = adapter(tmp_path / "experts", factors, target_modules=["w1", "w2", "w3"])
    quiet(tmp_path / "base", tmp_path / "out", adapters=[folder])
    exact = kind.from_pretrained(tmp_path / "base", dtype=torch.float64)
    exact = peft.PeftModel.from_pretrained(exact, folder).double().merge_and_unload()
    exact.save_pretrained(tmp_path / "exact")
    found, source = values(tmp_path / "out"), values(tmp_path / "base")
    for name, array in values(tmp_path / "exact").items():
        assert_nearest(found[name], array)
        assert np.array_equal(found[name], source[name]) == (".experts." not in name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "targets", "settings"), REFUSED, ids=str)
def test_refused_of_peft(
    tmp_path: Path, family: str, targets: list[str] | str, settings: dict[str, Any]
) -> None:
    """By the name of the setting."""
    of_peft(tmp_path, family, targets, settings)
    with pytest.raises(CheckpointError, match=next(iter(settings))):
        quiet(tmp_path / "base", tmp_path / "out", adapters=[tmp_path / "lora"])
