"""GGUF files: what is read, what becomes of it, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_files import (
    MODELS,
    gguf,
    in_blocks,
    quantized_types,
    random_blocks,
    small_model,
    tensors_of,
    write,
)
from needs import module
from parameters import product
from remote_server import serve
from thread_group import World, run

import streamload
from streamload.core.dtypes import PACKED
from streamload.core.tensors import RowTranspose
from streamload.errors import (
    CheckpointError,
    HeaderError,
    ShardNotFoundError,
    StateDictMismatchError,
)
from streamload.verification.verify import verify

torch = module("torch")
transformers = module("transformers")

Array = np.ndarray[Any, np.dtype[Any]]
IDS = torch.arange(40)[None] % 96
#: Types that gguf-py can quantise to.
MADE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.float()(IDS).logits


def stacks_experts(model: Any) -> bool:
    """Whether transformers stacks tensors of single experts, which files of its own have."""
    return bool(model.config.model_type.endswith("_moe"))


def loaded(model: Any, path: Path, **options: Any) -> Any:
    if stacks_experts(model):
        return streamload.transformers.from_pretrained(path, **options)
    other = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    streamload.load_state_dict(other, path, **options)
    return other


@pytest.fixture(scope="module", params=MODELS)
def source(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


def test_a_model_is_the_source_in_every_entrance(source: Any, tmp_path: Path) -> None:
    path, expected = tmp_path / "model.gguf", logits(source)
    write(path, tensors_of(source), config=source.config)
    assert torch.equal(logits(loaded(source, path)), expected)
    opened = streamload.transformers.from_pretrained(path)
    assert type(opened).__name__ in (type(source).__name__, "LlamaForCausalLM")
    assert torch.equal(logits(opened), expected)
    streamload.convert(path, tmp_path / "out", verify=True, progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(theirs), expected)
    if not stacks_experts(source):
        report = streamload.load_state_dict(source, path)
        assert verify(report, streamload.open_checkpoint(path), source) == []


@pytest.mark.parametrize(
    "kind", product(["Q8_0", "Q4_1", "MXFP4", "q6_k"], fast=lambda kind: kind == "q6_k")
)
def test_blocks_are_dequantized_in_every_entrance(source: Any, kind: str, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    types = quantized_types(tensors, kind.upper())
    if kind == "q6_k":
        tensors, types = in_blocks(tensors, lambda name: "Q6_K")
    path = tmp_path / "model.gguf"
    write(path, tensors, types, config=source.config)
    number = gguf.GGMLQuantizationType[kind.upper()]
    exact = {}
    for name, array in tensors.items():
        coded = name in types
        if coded and array.dtype != np.uint8:
            array = gguf.quants.quantize(array, number)
        exact[name] = gguf.quants.dequantize(array, number) if coded else array
    plain = tmp_path / "plain.gguf"
    write(plain, exact, config=source.config)
    expected = logits(loaded(source, plain))
    if not stacks_experts(source):
        found = transformers.AutoModelForCausalLM.from_config(source.config).eval()
        report = streamload.load_state_dict(found, path)
        assert torch.equal(logits(found), expected)
        assert verify(report, streamload.open_checkpoint(path), found) == []
    opened = streamload.transformers.from_pretrained(path, dtype="float32")
    assert torch.equal(logits(opened), expected)
    streamload.convert(path, tmp_path / "f32", dtype="float32", verify=True, progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "f32")
    assert torch.equal(logits(theirs), expected)
    report = streamload.convert(path, tmp_path / "f16", verify=True, progress=False)
    assert {t.dtype.name for _, _, t in report.plan.tensors()} == {"float16", "float32"}
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "f16")
    numbers = theirs.state_dict()  # logits of a mixture may differ: a router chooses others
    for name, value in half.state_dict().items():
        assert torch.equal(value.half(), numbers[name].half()), name


def test_diff_compares_in_the_order_of_models(source: Any, tmp_path: Path) -> None:
    """A file and the model that transformers wrote are equal; so are blocks and their numbers."""
    tensors = tensors_of(source)
    path, theirs = tmp_path / "model.gguf", tmp_path / "theirs"
    write(path, tensors, config=source.config)
    source.save_pretrained(theirs)
    found = streamload.diff(path, theirs, progress=False)
    assert found.ok
    assert found.equal_count == len(streamload.open_checkpoint(theirs))
    assert streamload.diff(path, path, progress=False).ok
    assert streamload.diff(theirs, path, progress=False).ok
    write(path, tensors, quantized_types(tensors, "Q5_1"), config=source.config)
    streamload.convert(path, tmp_path / "out", dtype="float32", progress=False)
    assert streamload.diff(path, tmp_path / "out", dtype="float32", progress=False).ok
    assert not streamload.diff(path, theirs, dtype="float32", progress=False).ok


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", [*(k.lower() for k in MADE), *(k for k in PACKED if "k" in k)])
def test_every_type_is_gguf_pys_numbers(kind: str, dtype: str, tmp_path: Path) -> None:
    if kind not in (*PACKED, "mxfp4") or kind in ("gguf-mxfp4",):
        pytest.skip("no type of GGUF")
    blocks = random_blocks(kind, 6, 1024)
    path = tmp_path / "model.gguf"
    write(path, {"a.weight": blocks}, {"a.weight": kind.upper()}, architecture="none")
    exact = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()])
    report = streamload.load_state_dict(None, path, device="host", dtype=dtype)
    found = report.state_dict["a.weight"]
    assert np.array_equal(found, exact.astype(found.dtype))
    (name,) = {p.dst.name for p in report.plan.placements}
    assert name == dtype
    raw = streamload.load_state_dict(None, path, device="host").state_dict["a.weight"]
    assert np.array_equal(raw, blocks)


def test_plain_types_come_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f32": rng.standard_normal((3, 4, 5)).astype(np.float32),
        "f16": rng.standard_normal((2, 3, 4, 5)).astype(np.float16),
        "f64": rng.standard_normal(7),
        **{f"i{8 * n}": rng.integers(-100, 100, (3, 5)).astype(f"i{n}") for n in (1, 2, 4, 8)},
    }
    halves = rng.integers(0, 2**15, (4, 6)).astype(np.uint16)
    path = tmp_path / "model.gguf"
    write(path, arrays | {"bf16": halves.view(np.uint8)}, {"bf16": "BF16"}, architecture="none")
    found = dict(streamload.iterate(path, device="host", dtype="checkpoint"))
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    assert np.array_equal(found["bf16"].view(np.uint16), halves)


def test_inspect_and_plan_show_types(tmp_path: Path, here: Callable[..., tuple[str, str]]) -> None:
    model = small_model("llama")
    tensors = tensors_of(model)
    path = tmp_path / "model.gguf"
    write(path, tensors, quantized_types(tensors, "Q4_0"), config=model.config)
    for arguments in (
        ["inspect", str(path)],
        ["plan", str(path), "--budget", "1GB", "--device", "host", "--dtype", "float16"],
        ["plan", str(path), "--nodes", "2", "--budget", "1GB", "--dtype", "float16"],
    ):
        said, _ = here(*arguments)
        if "inspect" in arguments:
            assert re.search(r"model\.layers\.1\.mlp\.up_proj\.weight +q4_0 +512 x 256", said)


# --- modules that hold blocks ---------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_modules_of_torch_take_blocks_as_they_are(
    kind: str, model_type: str, tmp_path: Path
) -> None:
    """With ``quant=``, and again: modules hold the file's bytes, in the order of models' rows."""
    model = small_model(model_type)
    tensors = tensors_of(model)
    path = tmp_path / "model.gguf"
    types = {n: kind.upper() for n in quantized_types(tensors, "")}
    write(path, tensors, types, config=model.config)
    plain = tmp_path / "plain.gguf"
    write(plain, tensors, config=model.config)
    by_way = loaded(model, plain, quant=kind)  # quantised on the way
    packed = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    report = streamload.load_state_dict(packed, path, quant=kind)
    inside = [p for p in report.plan.placements if ".weight" in p.name and ".h." in p.name]
    inside += [p for p in report.plan.placements if "_proj" in p.name]
    assert len([p for p in inside if p.dst.name == "uint8" and p.src is p.dst]) > 7
    for other in (False, True):
        expected = dict(by_way.named_buffers())
        blocks = {n: b for n, b in packed.named_buffers() if b.dtype == torch.uint8}
        assert len(blocks) == 14 if model_type == "llama" else 8
        for name, buffer in blocks.items():
            assert torch.equal(buffer, expected[name]), name
            buffer.zero_()
        if not other:  # they hold the format already
            streamload.load_state_dict(packed, path)
    streamload.load_state_dict(packed, path)
    # a Conv1D's weight is the transpose: BLAS may sum the two in another order
    torch.testing.assert_close(logits(packed), logits(loaded(model, path)), rtol=0, atol=1e-5)


def test_modules_of_tinygrad_take_blocks_as_they_are(tmp_path: Path) -> None:
    """QuantLinear gets the file's bytes; a Linear of floats gets them dequantised."""
    tinygrad = module("tinygrad")
    from streamload.nn import replace_linears

    rng = np.random.default_rng(0)
    array = rng.standard_normal((64, 128)).astype(np.float32)
    path = tmp_path / "model.gguf"
    write(path, {"l.weight": array}, {"l.weight": "Q8_0"}, architecture="none")
    blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
    exact = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)

    class Model:
        def __init__(self) -> None:
            self.l = tinygrad.nn.Linear(128, 64, bias=False)

    quants: list[Any] = [{"l.weight": "q8_0"}, "stored"]
    for coded, options in (
        *((True, {}), (False, {})),
        *((True, {"quant": quant}) for quant in quants),
    ):
        model = Model()
        if coded and not options:
            replace_linears(model, lambda name: "q8_0")
        streamload.load_state_dict(model, path, device="PYTHON", **options)
        found = model.l.weight.numpy()
        assert np.array_equal(found, blocks if coded else exact.astype(found.dtype))


# --- sets of files, servers, nodes, families ------------------------------------------------------


def _split(tmp_path: Path, model: Any) -> list[Path]:
    tensors = tensors_of(model)
    path = tmp_path / "set" / "small.gguf"
    path.parent.mkdir()
    write(path, tensors, quantized_types(tensors, "Q8_0"), config=model.config, split_max_tensors=7)
    found = sorted(path.parent.iterdir())
    assert [each.name for each in found] == [
        f"small-{i + 1:05}-of-{len(found):05}.gguf" for i in range(len(found))
    ]
    assert len(found) > 2
    return found


def test_sets_of_files(tmp_path: Path) -> None:
    model = small_model("llama")
    files = _split(tmp_path, model)
    whole = tmp_path / "whole.gguf"
    tensors = tensors_of(model)
    write(whole, tensors, quantized_types(tensors, "Q8_0"), config=model.config)
    expected = logits(loaded(model, whole))
    config = streamload.open_checkpoint(whole).config
    for path in (files[0], files[-1], files[0].parent):
        checkpoint = streamload.open_checkpoint(path)
        assert len(checkpoint.tensors) == len(tensors)
        assert checkpoint.config == config
        assert not config["tie_word_embeddings"]
        assert torch.equal(logits(loaded(model, path)), expected)
    other = files[1].rename(files[1].with_name("other.gguf"))
    with pytest.raises(HeaderError, match=r"another name.*ends with -00002-of-"):
        streamload.open_checkpoint(other)
    other.unlink()
    with pytest.raises(ShardNotFoundError, match=r"shards are missing.*small-00002-of-"):
        streamload.open_checkpoint(files[0])


def test_a_projector_beside_a_set(tmp_path: Path) -> None:
    """It does not say that it is of the set: the folder is refused, and each file opens alone."""
    files = _split(tmp_path, small_model("llama"))
    projector = files[0].with_name("mmproj-small.gguf")
    writer = gguf.GGUFWriter(projector, "clip")
    writer.add_tensor("mm.0.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(HeaderError, match=r"several checkpoints.*one file.*mmproj-small"):
        streamload.open_checkpoint(tmp_path / "set")
    assert list(streamload.open_checkpoint(projector).tensors) == ["mm.0.weight"]
    assert len(streamload.open_checkpoint(files[0]).tensors) == 21


def test_files_that_are_no_set(tmp_path: Path) -> None:
    model = small_model("llama")
    files = _split(tmp_path, model)
    alone = tmp_path / files[-1].name
    tensors = tensors_of(model)
    write(alone, {"output.weight": tensors["output.weight"]}, config=model.config)
    of_set = files[-1].rename(tmp_path / "kept")
    alone.rename(files[-1])
    with pytest.raises(HeaderError, match=rf"{alone.name}: is a whole.*rename it.*split.count"):
        streamload.open_checkpoint(files[-1])
    with pytest.raises(HeaderError, match=r"do not belong together: .*count, 21, found 15 tensors"):
        streamload.open_checkpoint(files[0])
    of_set.rename(files[-1])
    del tensors["output.weight"]
    write(tmp_path / "small.gguf", tensors, config=model.config, split_max_tensors=7)
    (tmp_path / files[-1].name).replace(files[-1])
    with pytest.raises(HeaderError, match=r"do not belong together: .*count, 21, found 20 tensors"):
        streamload.open_checkpoint(files[0])


def test_over_http(tmp_path: Path) -> None:
    """A file and a set of files are read by ranges."""
    model = small_model("llama")
    files = _split(tmp_path, model)
    expected = logits(loaded(model, files[0]))
    with serve(files[0].parent) as site:
        assert torch.equal(logits(loaded(model, site.url + files[0].name)), expected)
        assert torch.equal(logits(loaded(model, site.url + files[-1].name)), expected)


def test_a_familys_order_of_rows_and_that_of_the_file_cancel_each_other(tmp_path: Path) -> None:
    """Meta's rows are interleaved, as GGUF's: they come as they lie, and others as usual."""
    model = small_model("llama")
    tensors = tensors_of(model)
    path = tmp_path / "model.gguf"
    write(path, tensors, config=model.config)
    model.save_pretrained(tmp_path / "hf")
    mine, theirs = (
        streamload.load_state_dict(None, p, device="host", mapping="hf-llama").state_dict
        for p in (path, tmp_path / "hf")
    )
    assert mine.keys() == theirs.keys()
    assert "layers.0.attention.wq.weight" in mine
    for name, array in theirs.items():
        assert np.array_equal(mine[name], array), name
    assert np.array_equal(mine["layers.1.attention.wk.weight"], tensors["blk.1.attn_k.weight"])
    report = streamload.plan(path, budget="1GB", device="host", mapping="hf-llama")
    assert all(p.transpose is None for p in report.placements)
    with pytest.raises(CheckpointError, match="would be reordered again"):
        name = "model.layers.0.self_attn.q_proj.weight"
        ranges = {"q": [streamload.RowRange(name, 0, 8)]}
        streamload.plan(path, budget="1GB", device="host", mapping=ranges)


def test_gpt2_for_linears(tmp_path: Path) -> None:
    """The transposes of file and family cancel each other."""
    model = small_model("gpt2")
    tensors = tensors_of(model)
    path = tmp_path / "model.gguf"
    write(path, tensors, quantized_types(tensors, "Q8_0"), config=model.config)
    found = streamload.load_state_dict(
        None, path, device="host", mapping="hf-gpt2", dtype="float32"
    ).state_dict
    number = gguf.GGMLQuantizationType.Q8_0
    exact = gguf.quants.dequantize(
        gguf.quants.quantize(tensors["blk.0.ffn_up.weight"], number), number
    )
    assert np.array_equal(found["h.0.mlp.c_fc.weight"], exact)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_blocks_for_a_model_of_other_names(tmp_path: Path, dtype: str | None) -> None:
    torch, path = module("torch"), tmp_path / "model.gguf"
    tensors = tensors_of(small_model("llama"))
    write(path, tensors, quantized_types(tensors, "Q8_0"), config=small_model("llama").config)
    options: dict[str, Any] = {"mapping": "hf-llama", "dtype": "float16", "progress": False}
    wanted = streamload.load_state_dict(None, path, device="host", **options).state_dict
    model = torch.nn.Module()
    for name, array in wanted.items():
        *folders, leaf = name.split(".")
        inner = model
        for each in folders:
            if each not in inner._modules:
                inner.add_module(each, torch.nn.Module())
            inner = inner._modules[each]
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(array.shape)))
    with pytest.raises(StateDictMismatchError) as raised:
        streamload.load_state_dict(model, path, dtype=dtype, device="cpu", progress=False)
    (said,) = raised.value.suggestions
    given = {"dtype": dtype, **eval(f"dict({said.arguments})")}
    assert given["mapping"] == "hf-llama"
    streamload.load_state_dict(model, path, device="cpu", progress=False, **given)
    for name, parameter in model.state_dict().items():
        assert np.allclose(parameter.float().numpy(), wanted[name], rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize(
    ("split", "kind"),
    product(
        ["layers", "balanced", "replicate"],
        [None, "Q6_K"],
        fast=lambda split, kind: split == "replicate" and kind is not None,
    ),
)
def test_nodes_load_what_one_process_does(kind: str | None, split: str, tmp_path: Path) -> None:
    model = small_model("gpt2")
    tensors = tensors_of(model)
    types = quantized_types(tensors, kind) if kind else {}
    tensors |= {n: random_blocks("q6_k", *tensors[n].shape) for n in types}
    path = tmp_path / "model.gguf"
    write(path, tensors, types, config=model.config)
    options: dict[str, Any] = {"device": "host", "budget": "1GB", "dtype": "float16"}
    expected = streamload.load_state_dict(None, path, **options).state_dict

    def body(group: Any) -> Any:
        given = options | {"split": split, "group": group, "progress": False}
        return streamload.distributed.load_state_dict(None, path, **given)

    reports = run(World(3), body)
    expected["lm_head.weight"] = expected["transformer.wte.weight"]  # a rank may have a copy
    assert {name for report in reports for name in report.state_dict} | {
        "lm_head.weight"
    } == expected.keys()
    for report in reports:
        for name, array in report.state_dict.items():
            assert np.array_equal(array, expected[name]), name


def test_offload_streams_layers_of_a_file(tmp_path: Path) -> None:
    model = small_model("llama", num_hidden_layers=6)
    path = tmp_path / "model.gguf"
    write(path, tensors_of(model), config=model.config)
    expected = logits(model)
    other = transformers.AutoModelForCausalLM.from_config(model.config).eval().to("meta")
    other.model.rotary_emb = model.model.rotary_emb
    with streamload.offload(other, path, device="cpu", budget="10MB") as offloaded:
        with torch.no_grad():
            assert torch.equal(other(IDS).logits, expected)
        assert offloaded.report.passes == 1


# --- settings and vocabulary ----------------------------------------------------------------------


def test_factors_of_rotary_embeddings_are_a_setting(tmp_path: Path) -> None:
    """The tensor of Llama 3's factors is not in the model, and config.json says what made it."""
    rope = {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"head_dim": 128, "max_position_embeddings": 131072}
    model = small_model("llama", rope_parameters=rope, **sizes)
    plain = 5e5 ** -(np.arange(64) / 64)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    path = tmp_path / "model.gguf"
    tensors = tensors_of(model) | {"rope_freqs.weight": factors.astype(np.float32)}
    write(path, tensors, config=model.config)
    checkpoint = streamload.open_checkpoint(path)
    assert not any("rope" in name for name in checkpoint.tensors)
    opened = streamload.transformers.from_pretrained(path)
    assert opened.config.rope_parameters == rope
    assert torch.equal(logits(opened), logits(model))
    tensors["rope_freqs.weight"] *= 1.5
    write(path, tensors, config=model.config)
    with pytest.warns(UserWarning, match="no scaling of Llama 3 that is known"):
        assert not streamload.open_checkpoint(path).config


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("add_rope_scaling_type", (gguf.RopeScalingType.LONGROPE,)), "by 'longrope'"),
        (("add_rope_dimension_count", (8,)), "rotates 8 of the 16 elements of a head"),
    ],
)
def test_rotary_embeddings_that_no_configuration_says(
    more: tuple[str, tuple[Any, ...]], said: str, tmp_path: Path
) -> None:
    """The tensors are read; a model is opened with a configuration of the caller's own alone."""
    model = small_model("llama", head_dim=16)
    model.config.architectures = ["LlamaForCausalLM"]
    path = tmp_path / "model.gguf"
    write(path, tensors_of(model), config=model.config, more=(more,))
    with pytest.warns(UserWarning, match=said):
        assert not streamload.open_checkpoint(path).config
    with pytest.warns(UserWarning, match=said), pytest.raises(CheckpointError, match="config="):
        streamload.transformers.from_pretrained(path)
    with pytest.warns(UserWarning, match=said):
        opened = streamload.transformers.from_pretrained(path, config=model.config)
    assert torch.equal(logits(opened), logits(model))


def test_a_conversion_is_a_folder_that_transformers_opens(tmp_path: Path) -> None:
    model = small_model("llama")
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120", "ab", "<s>", "</s>"]
    path = tmp_path / "model.gguf"
    more = (
        ("add_tokenizer_model", ("gpt2",)),
        ("add_tokenizer_pre", ("gpt-2",)),
        ("add_token_list", (letters + [f"<unused{i}>" for i in range(96 - len(letters))],)),
        ("add_token_types", ([1] * 28 + [3] * 2 + [5] * 66,)),
        ("add_token_merges", (["a b"],)),
        ("add_bos_token_id", (28,)),
        ("add_eos_token_id", (29,)),
        ("add_name", ("Small",)),
    )
    write(path, tensors_of(model), config=model.config, more=more)
    streamload.convert(path, tmp_path / "out", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("cab")["input_ids"] == [2, 27]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (28, 29)
    assert streamload.open_checkpoint(tmp_path / "out").metadata["general.name"] == "Small"


def test_settings_of_each_layer(tmp_path: Path) -> None:
    """An array is one setting where all layers have the same, and else an error."""
    model = small_model("llama")
    tensors = tensors_of(model)
    write(tmp_path / "one.gguf", tensors, config=model.config)

    said = model.config.to_dict()
    for name, counts in (("same", [2, 2]), ("other", [2, 4])):
        config = SimpleNamespace(**said | {"num_key_value_heads": counts})
        write(tmp_path / f"{name}.gguf", tensors, config=config)
    one, same = (streamload.open_checkpoint(tmp_path / f"{each}.gguf") for each in ("one", "same"))
    assert same.turns == one.turns
    assert same.config == one.config
    with pytest.raises(HeaderError, match=r"different settings.*head_count_kv \[2, 4\]"):
        streamload.open_checkpoint(tmp_path / "other.gguf")


def test_names_of_other_architectures_stay(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, {"blk.0.attn_q.weight": np.ones((8, 8), np.float32)}, architecture="mamba")
    checkpoint = streamload.open_checkpoint(path)
    assert list(checkpoint.tensors) == ["blk.0.attn_q.weight"]
    assert not checkpoint.config
    assert not checkpoint.turns


def test_original_shapes_of_reshaped_tensors(tmp_path: Path) -> None:
    """Convolutions stored as rows of 256 get the shapes that the file names; five axes are read."""
    rng = np.random.default_rng(0)
    shapes = {"conv": (8, 32, 3, 3), "linear": (64, 320), "video": (4, 2, 1, 2, 2)}
    exact = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    path, types = tmp_path / "model.gguf", {"conv": "Q8_0"}
    stored = {n: a if n == "video" else a.reshape(-1, 256) for n, a in exact.items()}
    shapes.pop("video")
    more = [("add_array", (f"comfy.gguf.orig_shape.{n}", s)) for n, s in shapes.items()]
    write(path, stored, types, architecture="sd1", more=more)
    exact["conv"] = gguf.quants.dequantize(
        gguf.quants.quantize(exact["conv"].reshape(-1, 256), 8), 8
    )
    exact["conv"] = exact["conv"].reshape(shapes["conv"])
    found = streamload.load_state_dict(None, path, dtype="float32", device="host").state_dict
    model = torch.nn.ParameterDict({n: torch.empty(a.shape) for n, a in exact.items()})
    streamload.load_state_dict(model, path, progress=False)
    streamload.convert(path, tmp_path / "out", dtype="float32", verify=True, progress=False)
    converted = streamload.load_state_dict(None, tmp_path / "out", device="host").state_dict
    for name, array in exact.items():
        for each in (found, model, converted):
            assert np.array_equal(torch.as_tensor(each[name]).detach().numpy(), array), name


def test_turns_of_a_header(tmp_path: Path) -> None:
    """Query and key rows of Llama, and the weights of GPT-2's Conv1D."""
    for model_type, name, turn in (
        ("llama", "model.layers.0.self_attn.k_proj.weight", (RowTranspose(2, 32, 2), None)),
        ("gpt2", "transformer.h.1.mlp.c_proj.weight", (RowTranspose(1, 256, 1024), (1024, 256))),
    ):
        model = small_model(model_type)
        path = tmp_path / f"{model_type}.gguf"
        write(path, tensors_of(model), config=model.config)
        assert streamload.open_checkpoint(path).turns[name] == turn


def test_groups_have_the_shape_of_the_weight(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    blocks = random_blocks("q5_k", 3, 512)
    write(path, {"a": blocks}, {"a": "Q5_K"}, architecture="none")
    group = streamload.open_checkpoint(path).groups["a"]
    assert (group.kind, group.shape, group.values.shape) == ("q5_k", (3, 512), (3, 352))
