"""`quant="stored"`: blocks of GGUF files stay as they are, in modules of torch and in plans."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import in_blocks, q4_k_m, quantized_types, small_model, tensors_of, write
from needs import module

import streamload
from streamload.core.dtypes import PACKED
from streamload.errors import (
    PlanInfeasibleError,
    ResidenceError,
    StateDictMismatchError,
    UnsupportedCastError,
)
from streamload.planning.plan import Plan
from streamload.streaming.sink import ModelTarget

torch = module("torch")
transformers = module("transformers")
from transformers_helpers import load, quiet  # noqa: E402

from streamload.devices.torch.quantized import CODED, Coded, QuantLinear  # noqa: E402

__all__ = ["quiet"]

IDS = torch.arange(40)[None] % 96
#: Types that gguf-py quantises to; of the others blocks are random.
MADE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "gguf-mxfp4")
KINDS = tuple(kind for kind, dtype in PACKED.items() if dtype.block > 1 and kind[:3] != "mlx")
UP = "model.layers.0.mlp.up_proj"


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def held(model: Any) -> dict[str, str]:
    return {
        f"{name}.{leaf}": each.format
        for name, one in model.named_modules()
        for leaf, each in getattr(one, CODED, {}).items()
    }


def write_model(
    path: Path, kind_of: Callable[[str], str], model_type: str = "llama", **sizes: Any
) -> Any:
    """A file of random blocks of these types; the model that it is of, with other values."""
    model = small_model(model_type, **sizes)
    tensors, types = in_blocks(tensors_of(model), kind_of)
    write(path, tensors, types, config=model.config)
    return model


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in a mixture such as Q4_K_M."""
    path = tmp_path_factory.mktemp("mixed") / "model-Q4_K_M.gguf"
    write_model(path, q4_k_m)
    return path


# --- what is held and computed --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_computes_what_its_floats_do(tmp_path: Path, kind: str) -> None:
    """Bit for bit, with Q and K in the order of models; memory is that of the file."""
    name, path = kind.removeprefix("gguf-").upper(), tmp_path / "model.gguf"
    if kind in MADE:
        model = small_model("llama")
        tensors = tensors_of(model)
        write(path, tensors, quantized_types(tensors, name), config=model.config)
    else:
        write_model(path, lambda _: name)
    model = load(path, quant="stored", dtype="float32")
    assert torch.equal(logits(model), logits(load(path, dtype="float32")))
    assert set(held(model).values()) == {kind} and len(held(model)) == 15
    nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    embedding = model.model.embed_tokens.weight
    assert nbytes - embedding.nbytes < path.stat().st_size
    notes = [note for note in model.streamload_report.notes if note.startswith("dequantised")]
    assert notes == [
        "dequantised, for no module holds their blocks as they are: "
        f"model.embed_tokens.weight ({kind})"
    ]


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_mixtures_of_each_family(tmp_path: Path, model_type: str, dtype: str | None) -> None:
    """Each weight has the type of the file; a tied head and what is no Linear are floats."""
    path = tmp_path / "model.gguf"
    write_model(path, q4_k_m, model_type)
    model = load(path, quant="stored", dtype=dtype)
    found, expected = logits(model), logits(load(path, dtype=dtype))
    if model_type == "gpt2":  # a Conv1D multiplies by the transpose
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
    else:
        assert torch.equal(found, expected)
    kinds = held(model)
    assert set(kinds.values()) == {"q4_k", "q6_k"}
    assert ("lm_head.weight" in kinds) == (not model.config.tie_word_embeddings)
    checkpoint = streamload.open_checkpoint(path)
    assert kinds == {name: checkpoint.stored[name].kind for name in kinds}


def test_patterns_choose(mixed: Path) -> None:
    kinds = held(load(mixed, quant={"*lm_head*": None, "*": "stored"}))
    assert len(kinds) == 14 and "lm_head.weight" not in kinds
    model = load(mixed, quant={"*.mlp.*": "stored"})
    assert len(held(model)) == 6 and all(".mlp." in name for name in held(model))
    assert not any(note.startswith("dequantised") for note in model.streamload_report.notes)
    with pytest.raises(UnsupportedCastError, match="this call dequantises it"):
        load(mixed, quant={"*.mlp.*": "stored", "*": "q8_0"})


def test_floats_of_the_file_stay_floats(tmp_path: Path) -> None:
    model = small_model("llama")
    tensors = tensors_of(model)
    types = {n: "Q5_1" for n in quantized_types(tensors, "") if "ffn" in n}
    write(tmp_path / "model.gguf", tensors, types, config=model.config)
    found = load(tmp_path / "model.gguf", quant="stored", dtype="float16")
    assert len(held(found)) == 6
    assert found.model.layers[0].self_attn.q_proj.weight.dtype is torch.float16
    assert not any("dequantised, " in note for note in found.streamload_report.notes)


def test_experts_stay_as_one_tensor(tmp_path: Path) -> None:
    """A tensor of three axes fills fused experts; each is decoded alone."""
    config = transformers.MixtralConfig(
        **{"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    )
    torch.manual_seed(1)
    plain = transformers.MixtralForCausalLM(config).eval()
    arrays = {name: tensor.numpy() for name, tensor in plain.state_dict().items()}
    types = {n: "Q8_0" for n in arrays if "experts" in n or "_proj" in n}
    write(tmp_path / "model.gguf", arrays, types, architecture="none")
    model = copy.deepcopy(plain)
    for each, quant in ((plain, None), (model, "stored")):
        streamload.load_state_dict(each, tmp_path / "model.gguf", quant=quant, progress=False)
    experts, expected = (each.model.layers[0].mlp.experts for each in (model, plain))
    assert isinstance(experts, Coded) and len(held(model)) == 6
    for leaf in ("gate_up_proj", "down_proj"):
        whole = getattr(expected, leaf)
        assert all(torch.equal(getattr(experts, leaf)[i], whole[i]) for i in range(4))
    plain.set_experts_implementation("eager")
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)


class Pair(torch.nn.Module):
    """An embedding, a Linear and a Conv1D, all square."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 256)
        self.linear = torch.nn.Linear(256, 256, bias=False)
        self.conv = transformers.pytorch_utils.Conv1D(256, 256)


@pytest.mark.parametrize(
    ("mapping", "stays"),
    [
        ({"linear.weight": "a"}, True),
        ({"linear.weight": "a", "embed.weight": "a"}, False),  # which needs floats
        ({"linear.weight": streamload.Source("a", transpose=True)}, False),
        (
            {"linear.weight": [streamload.RowRange("a", 128), streamload.RowRange("b", 0, 128)]},
            True,
        ),
        (
            {
                "linear.weight": [streamload.RowRange("a", 128), streamload.RowRange("b", 0, 128)],
                "embed.weight": "b",
            },
            False,
        ),
        ({"conv.weight": "a"}, False),  # its rows are columns of a Linear
        ({"conv.weight": streamload.Source("a", transpose=True)}, True),
    ],
    ids=range(7),
)
def test_what_would_be_cut_is_dequantised(
    tmp_path: Path, mapping: Mapping[str, Any], stays: bool
) -> None:
    """A weight stays in blocks where it is whole rows in the module's order."""
    tensors, types = in_blocks(dict.fromkeys("ab", np.zeros((256, 256))), lambda _: "Q3_K")
    write(tmp_path / "model.gguf", tensors, types, architecture="none")
    (name,) = {"linear.weight", "conv.weight"} & mapping.keys()
    values = []
    for quant in ("stored", None):
        model = Pair()
        options = {"mapping": mapping, "strict": False, "progress": False, "quant": quant}
        report = streamload.load_state_dict(model, tmp_path / "model.gguf", **options)
        assert held(model) == ({name: "q3_k"} if stays and quant else {})
        notes = " ".join(note for note in report.notes if note.startswith("dequantised, "))
        assert ("a (q3_k)" in notes) == (quant is not None and not stays)
        values.append(model.get_submodule(name.partition(".")[0]).weight)
    assert torch.equal(*values)


# --- plans and budgets ----------------------------------------------------------------------------


def test_plans_list_the_types(mixed: Path, here: Callable[..., tuple[str, str]]) -> None:
    """In JSON for each weight, printed with their numbers; as the load itself takes memory."""
    own = load(mixed, quant="stored", dtype="float16").streamload_report.plan
    options = ["--quant", "stored", "--dtype", "float16", "--device", "host", "--budget", "1GB"]
    made = Plan.from_json(here("plan", str(mixed), *options, "--json")[0])
    said, _ = here("plan", str(mixed), *options)
    stored = {p.name: p.stored for p in made.placements if p.stored}
    assert stored == {p.name: p.stored for p in own.placements if p.stored}
    assert len(stored) == 15 and stored["lm_head.weight"] == "q6_k"
    assert made == Plan.from_json(made.to_json())
    for plan in (said, str(own)):
        assert "3 tensors stay q6_k, as stored" in plan
        assert "12 tensors stay q4_k, as stored" in plan
        assert "1 tensors from q4_k to float16" in plan
        assert (
            "note: dequantised, for no module holds their blocks as they are: model.embed_tokens"
            in plan
        )
    assert abs(made.resident_nbytes - own.resident_nbytes) < 4096


def test_a_budget_of_the_plan_is_enough_and_no_less(mixed: Path) -> None:
    """What "auto" and the error for floats name; nothing is loaded in less."""
    plan = load(mixed, quant="stored").streamload_report.plan.devices[0]
    needed = plan.needed_nbytes + plan.reserve_nbytes
    assert needed < 1.1 * mixed.stat().st_size
    expected = logits(load(mixed))
    model = load(mixed, quant="auto", budget=needed)
    assert torch.equal(logits(model), expected) and len(held(model)) == 15
    (note,) = (n for n in model.streamload_report.notes if n.startswith("quant="))
    assert 'quant="auto" took stored, for no format needs' in note
    assert not held(load(mixed, quant="auto"))
    for quant in ("stored", "auto"):
        with pytest.raises(PlanInfeasibleError):
            load(mixed, quant=quant, budget=needed - 1000)
    with pytest.raises(PlanInfeasibleError, match=r'would fit: .*quant="stored" \('):
        load(mixed, budget=needed)


def test_plans_without_a_model_choose_alike(mixed: Path) -> None:
    """Floats by "auto", then blocks; loads and iterations give what was planned."""
    options: dict[str, Any] = {"device": "host", "dtype": "float16"}
    plans = {
        quant: streamload.plan(mixed, budget="1GB", quant=quant, **options)
        for quant in (None, "stored", "auto")
    }
    assert plans["auto"].placements == plans[None].placements
    budget = plans["stored"].devices[0].needed_nbytes
    made = streamload.plan(mixed, budget=budget, quant="auto", **options)
    assert made.placements == plans["stored"].placements
    with pytest.raises(PlanInfeasibleError, match='quant="stored"'):
        streamload.plan(mixed, budget=budget, **options)
    report = streamload.load_state_dict(None, mixed, quant="stored", budget=budget, **options)
    one = dict(streamload.iterate(mixed, quant="stored", **options))
    raw = streamload.load_state_dict(None, mixed, device="host").state_dict
    for name, array in report.state_dict.items():
        assert np.array_equal(array, one[name])
        stored = {p.name for p in made.placements if p.stored}
        assert array.dtype == (np.uint8 if name in stored else np.float16)
        if array.dtype == np.uint8:
            assert np.array_equal(array, raw[name])


def test_blocks_stay_in_mapped_files(mixed: Path) -> None:
    """Where the CPU computes on them; the model takes the memory of its embedding."""
    model = load(mixed, quant="stored", residence="auto")
    assert torch.equal(logits(model), logits(load(mixed)))
    (device,) = model.streamload_report.plan.devices
    assert device.mapped_nbytes > 0.6 * mixed.stat().st_size


# --- models that hold blocks ----------------------------------------------------------------------


def test_models_are_copied_moved_and_dequantised(mixed: Path) -> None:
    model = load(mixed, quant="stored", dtype="float32")
    expected, plain = logits(model), load(mixed, dtype="float32")
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(logits(other), expected)
    assert model.num_parameters() == plain.num_parameters()
    assert model.get_memory_footprint() < 0.6 * plain.get_memory_footprint()
    half = copy.deepcopy(model).to(torch.float16)
    assert half.get_submodule(UP).weight.dtype is torch.float16
    assert held(half) == held(model)
    dense = model.dequantize()
    assert not held(dense) and torch.equal(logits(dense), expected)
    assert torch.equal(dense.get_submodule(UP).weight, plain.get_submodule(UP).weight)


def test_what_is_saved_is_opened_and_offloaded(mixed: Path, tmp_path: Path) -> None:
    model = load(mixed, quant="stored")
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "streamload" and set(said["formats"]) == {"q4_k", "q6_k"}
    again = load(tmp_path)
    assert held(again) == held(model) and torch.equal(logits(again), logits(model))
    streamed = load(tmp_path, offload=True, budget="500kB")
    assert "\nstream" in str(streamed.streamload_offload.plan)
    assert torch.equal(logits(streamed), logits(model))


def test_blocks_that_a_conversion_keeps_are_opened(mixed: Path, tmp_path: Path) -> None:
    """config.json names their types; the embedding, which a module needs in floats, gets some."""
    streamload.convert(mixed, tmp_path, dtype="checkpoint", progress=False)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.embed_tokens.weight" in said["formats"]["q4_k"]
    model, expected = (
        load(path, dtype="float16", quant=quant)
        for path, quant in ((tmp_path, None), (mixed, "stored"))
    )
    assert held(model) == held(expected) and torch.equal(logits(model), logits(expected))
    (note,) = (n for n in model.streamload_report.notes if n.startswith("dequantised"))
    assert "(model.embed_tokens.weight)" in note
    streamed = load(tmp_path, dtype="float16", offload=True, budget="500kB")
    assert "\nstream" in str(streamed.streamload_offload.plan)
    assert torch.equal(logits(streamed), logits(model))


def test_a_conversion_keeps_blocks_and_quantises_floats(tmp_path: Path) -> None:
    tensors, path = tensors_of(model := small_model("llama")), tmp_path / "model.gguf"
    types = {n: "Q5_1" for n in quantized_types(tensors, "") if "ffn" in n}
    write(path, tensors, types, config=model.config)
    quant = {"*self_attn*": "nf4"}
    streamload.convert(path, tmp_path / "out", dtype="checkpoint", quant=quant, progress=False)
    found = held(load(tmp_path / "out"))
    assert sorted(found.values()) == ["nf4"] * 8 + ["q5_1"] * 6


def test_a_filled_model_is_filled_again(mixed: Path, tmp_path: Path) -> None:
    """With blocks of the same types, or floats; others are refused before anything is read."""
    model = small_model("llama")
    again = partial(streamload.load_state_dict, model, progress=False)
    again(mixed, quant="stored")
    expected = logits(model)
    for quant in (None, "stored"):
        model.get_submodule(UP)._buffers["weight"].zero_()
        again(mixed, quant=quant)
        assert torch.equal(logits(model), expected)
    path = tmp_path / "q5_k.gguf"
    write_model(path, lambda _: "Q5_K")
    with pytest.raises(StateDictMismatchError, match="it holds q4_k as stored, not q5_k"):
        again(path)
    assert torch.equal(logits(model), expected)
    floats = tmp_path / "f32.gguf"
    write(floats, tensors_of(small_model("llama")), config=model.config)
    report = again(floats)
    assert 0 < report.errors[f"{UP}.weight"].relative < 0.1
    assert not torch.equal(logits(model), expected)
    write_model(path, lambda _: "Q3_K")
    model = small_model("llama")
    streamload.load_state_dict(model, path, quant="stored", progress=False)
    with pytest.raises(StateDictMismatchError, match="it holds q3_k as stored, not float32"):
        streamload.load_state_dict(model, floats, progress=False)


def test_blocks_of_equal_size_are_not_confused(tmp_path: Path) -> None:
    """Q4_0 and IQ4_NL have 18 bytes for 32 elements, and other values."""
    model = write_model(tmp_path / "a.gguf", lambda _: "Q4_0")
    write_model(tmp_path / "b.gguf", lambda _: "IQ4_NL")
    streamload.load_state_dict(model, tmp_path / "a.gguf", quant="stored", progress=False)
    with pytest.raises(StateDictMismatchError, match="it holds q4_0 as stored, not iq4_nl"):
        streamload.load_state_dict(model, tmp_path / "b.gguf", progress=False)


# --- what is refused ------------------------------------------------------------------------------


def test_writes_name_the_line_to_write(tmp_path: Path) -> None:
    mixed = tmp_path / "q3_k.gguf"
    write_model(mixed, lambda _: "Q3_K")
    model = load(mixed, quant="stored")
    before, linear = logits(model), model.get_submodule(UP)
    new = torch.nn.Parameter(torch.zeros_like(linear.weight))
    said = rf'nothing here quantizes to q3_k.*: quant=\{{"{UP}.weight": None, "\*": "stored"\}}'
    for error, write_it in (
        (ValueError, lambda: setattr(linear, "weight", new)),
        (ValueError, lambda: linear.requantize("weight", new)),
        (TypeError, lambda: setattr(linear, "weight", 1)),
        (RuntimeError, lambda: linear.weight.zero_()),
        (RuntimeError, lambda: linear.load_state_dict({"weight": new})),
    ):
        with pytest.raises(error, match=said):
            write_it()
    assert torch.equal(logits(model), before)
    model = load(mixed, quant={f"{UP}.weight": None, "*": "stored"})
    model.get_submodule(UP).weight = new
    assert len(held(model)) == 14


def test_blocks_that_can_be_quantised_are_written(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", lambda _: "Q8_0")
    linear = load(tmp_path / "model.gguf", quant="stored").get_submodule(UP)
    linear.weight = torch.nn.Parameter(torch.ones_like(linear.weight))
    assert type(linear) is QuantLinear and (linear.weight - 1).abs().max() < 0.01


def test_without_blocks_it_is_refused(mixed: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write(path, tensors_of(small_model("llama")), config=small_model("llama").config)
    load(mixed, quant="stored").save_pretrained(tmp_path / "own")
    plan = partial(streamload.plan, budget="1GB", device="host")
    for call in (load, plan):
        with pytest.raises(ValueError, match=r'quant="stored": .*no weight is stored quantised'):
            call(path, quant="stored")
        with pytest.raises(ValueError, match=r"\(streamload\) are no blocks of GGUF"):
            call(tmp_path / "own", quant="stored")
    small_model("llama").save_pretrained(tmp_path / "in")
    streamload.convert(tmp_path / "in", tmp_path / "int8", quant="int8", progress=False)
    with pytest.raises(
        ValueError, match=r"\(int8\) are no blocks of GGUF or MLX: leave quant= out"
    ):
        plan(tmp_path / "int8", quant="stored")


def test_other_entrances_refuse_it(mixed: Path, tmp_path: Path) -> None:
    """Those that have no modules, or layers that stream; and what no module holds."""
    nodes = [streamload.Node("a", "1GB"), streamload.Node("b", "1GB")]
    for said, call in (
        ("in the modules of one process", partial(streamload.split, mixed, nodes=nodes)),
        ("files keep theirs", partial(streamload.convert, mixed, tmp_path, progress=False)),
        (r"as they are stored.*save_pretrained\(OUT\)", partial(load, mixed, offload=True)),
    ):
        with pytest.raises(ValueError, match=said):
            call(quant="stored")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: .*theirs are Embedding"):
        load(mixed, quant={"*embed*": "stored"})
    arrays = {"model.embed_tokens.weight": np.zeros((96, 256), np.float16)}
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: .*quantised weights are none"):
        streamload.load_state_dict(arrays, mixed, quant="stored", strict=False)


@pytest.mark.parametrize("quant", [None, "stored"])
def test_an_embedding_of_blocks_is_no_parameter(mixed: Path, quant: str | None) -> None:
    """dtype="checkpoint" is refused before a byte moves; the line in the error works."""
    with pytest.raises(UnsupportedCastError, match=r"'model\.embed_tokens.*write dtype=\"float16"):
        load(mixed, dtype="checkpoint", quant=quant)
    assert load(mixed, dtype="float16", quant=quant).dtype is torch.float16


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("finished", [0, 1, 12])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_load_that_was_interrupted_is_completed_by_the_same_call(
    tmp_path: Path, kind: str, finished: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_model(tmp_path / "m.gguf", lambda name: kind)
    expected, model = (copy.deepcopy(made).to(place) for _ in range(2))
    given: dict[str, Any] = {"quant": "stored", "device": "cpu", "progress": False}
    streamload.load_state_dict(expected, tmp_path / "m.gguf", **given)
    finish, calls = ModelTarget.finish, count()

    def interrupted(target: ModelTarget, indices: Any) -> None:
        if next(calls) == finished:
            raise KeyboardInterrupt
        finish(target, indices)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ModelTarget, "finish", interrupted)
        streamload.load_state_dict(model, tmp_path / "m.gguf", **given)
    streamload.load_state_dict(model, tmp_path / "m.gguf", **given)
    assert held(model) == held(expected)
    found = model.state_dict()
    assert all(torch.equal(found[name], each) for name, each in expected.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "quant", "tied"),
    [
        *(("Q8_0", quant, tied) for quant in (None, "stored") for tied in (True, False)),
        *((kind, quant, True) for kind in ("F16", "BF16") for quant in (None, "int8", "auto")),
    ],
)
def test_a_new_model_has_floats_of_one_dtype(
    tmp_path: Path, kind: str, quant: Any, tied: bool
) -> None:
    """The file's norms are float32, its matrices are not: torch multiplies no two dtypes."""
    made = small_model("llama", tie_word_embeddings=tied)
    tensors = tensors_of(made)
    types = quantized_types(tensors, kind)
    write(tmp_path / "m.gguf", tensors, types, config=made.config)
    model, broken = (copy.deepcopy(made).to("meta") for _ in range(2))
    [each.tie_weights() for each in (model, broken)]
    given: dict[str, Any] = {"quant": quant, "device": "cpu", "progress": False}
    report = streamload.load_state_dict(model, tmp_path / "m.gguf", **given)
    floats = {t.dtype for t in model.state_dict().values() if t.dtype.is_floating_point}
    parts = {torch.float32} if quant == "int8" else set()  # the scales of rows
    (dtype,) = floats - parts
    assert dtype in ({"BF16": (torch.bfloat16, torch.float16)}.get(kind) or (torch.float16,))
    tensors = {
        t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if not t.is_meta
    }
    assert (
        report.resident_nbytes
        >= sum(tensors.values())
        == sum(p.nbytes for p in report.plan.placements)
    )
    calls = count()

    def interrupt(done: int, total: int) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamload.load_state_dict(
            broken, tmp_path / "m.gguf", **given | {"progress": interrupt, "chunk_nbytes": 65536}
        )
    streamload.load_state_dict(broken, tmp_path / "m.gguf", **given)
    for each in (model, broken):
        each.model.rotary_emb = made.model.rotary_emb  # the buffers that no file has
    assert torch.equal(logits(model), logits(broken))
    streamload.load_state_dict(made, tmp_path / "m.gguf", **given)  # stays float32
    dtypes = {t.dtype for t in made.state_dict().values()}
    assert dtypes <= {torch.float32, torch.uint8, torch.int8}
    assert torch.allclose(logits(model).float(), logits(made), atol=0.01)


@pytest.mark.parametrize(
    "given", [{"residence": "mapped"}, {"budget": "400kB"}, {"budget": "900kB", "dtype": "float32"}]
)
def test_lines_of_refusals_load_a_new_model_of_gguf(tmp_path: Path, given: dict[str, Any]) -> None:
    """In floats of one dtype: norms are cast, so not all of the file can be mapped."""
    made = small_model("llama", num_hidden_layers=1)
    tensors, path = tensors_of(made), tmp_path / "m.gguf"
    write(path, tensors, quantized_types(tensors, "F16"), config=made.config)
    given = {"device": "cpu", "progress": False} | given
    with pytest.raises((ResidenceError, PlanInfeasibleError)) as caught:
        streamload.load_state_dict(copy.deepcopy(made).to("meta"), path, **given)
    lines = re.findall(r'(residence="\w+"|quant="\w+")', str(caught.value))
    assert lines
    for line in lines:
        model = copy.deepcopy(made).to("meta")
        streamload.load_state_dict(model, path, **given | eval(f"dict({line})"))
        model.model.rotary_emb = made.model.rotary_emb
        assert logits(model).dtype is getattr(torch, given.get("dtype", "float16"))
