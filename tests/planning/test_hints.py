"""Mismatches say what to write: each suggestion is executed, and the load succeeds."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest
from load_helpers import load

import streamload
from streamload.errors import StateDictMismatchError, Suggestion

torch = needs.module("torch")
transformers = needs.module("transformers")
st = needs.module("safetensors.torch")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}
BERT = transformers.BertConfig(**SMALL)
LLAMA = transformers.LlamaConfig(**SMALL, rms_norm_eps=1e-5)


def classifier(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(BERT)


def body() -> Any:
    """The same without its head."""
    return transformers.BertModel(BERT)


def llama(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(LLAMA)


def save(folder: Path, tensors: dict[str, Any], config: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    st.save_file({k: t.clone().contiguous() for k, t in tensors.items()}, folder / "m.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def suggested(model: Any, path: Path, **arguments: Any) -> tuple[Suggestion, ...]:
    with pytest.raises(StateDictMismatchError) as caught:
        load(model, path, **arguments)
    found = caught.value.suggestions
    assert all(f"write {each.arguments} (fills" in str(caught.value) for each in found)
    assert pickle.loads(pickle.dumps(caught.value)).suggestions == found
    return found


def follow(suggestion: Suggestion, model: Any, path: Path, **arguments: Any) -> Any:
    written = eval(f"dict({suggestion.arguments})", {"streamload": streamload})
    return load(model, path, **arguments | written)


def renamed(change: Callable[[str], str]) -> dict[str, Any]:
    """A classifier's tensors under other names."""
    return {change(name): tensor for name, tensor in classifier().state_dict().items()}


SLIP = "bert.encoder.layer.0.output.dense.weight"

#: What a checkpoint of a classifier has in place of its names, and what there is to write.
NAMES: dict[str, tuple[Callable[[str], str], str]] = {
    "DataParallel": (
        lambda name: "module." + name,
        'rename=lambda name: name.removeprefix("module.")',
    ),
    "compile": (
        lambda name: "_orig_mod." + name,
        'rename=lambda name: name.removeprefix("_orig_mod.")',
    ),
    "both": (
        lambda name: "module._orig_mod." + name,
        'rename=lambda name: name.removeprefix("module._orig_mod.")',
    ),
    "sequential": (
        lambda name: "0.model." + name,
        'rename=lambda name: name.removeprefix("0.model.")',
    ),
    "peft": (
        lambda name: "base_model.model." + name,
        'rename=lambda name: name.removeprefix("base_model.model.")',
    ),
    "compile, of layers": (
        lambda name: name.replace(".layer.0.", ".layer.0._orig_mod."),
        'rename=lambda name: name.replace("._orig_mod.", ".")',
    ),
    "compile, in layers": (
        lambda name: name.replace(".attention.", ".attention._orig_mod."),
        'rename=lambda name: name.replace("._orig_mod.", ".")',
    ),
    "a merged adapter": (
        lambda name: name.replace(".query.", ".query.base_layer."),
        'rename=lambda name: name.replace(".base_layer.", ".")',
    ),
    "another body": (
        lambda name: name.replace("bert.", "model.encoder.", 1),
        'rename=lambda name: "bert." + name.removeprefix("model.encoder.") '
        'if name.startswith("model.encoder.") else name',
    ),
    "TensorFlow": (
        lambda name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"),
        'rename=lambda name: name.replace(".gamma", ".weight").replace(".beta", ".bias")',
    ),
    "a part": (
        lambda name: name.replace(".query.", ".qeury."),
        'rename=lambda name: name.replace(".qeury.", ".query.")',
    ),
    "a slip": (
        lambda name: name.replace(SLIP, SLIP.replace("weight", "wieght")),
        f'rename={{"{SLIP.replace("weight", "wieght")}": "{SLIP}"}}',
    ),
    "a slip in a wrapper": (
        lambda name: "module." + name.replace(SLIP, SLIP.replace("weight", "wieght")),
        f'rename=lambda name: {{"module.{SLIP.replace("weight", "wieght")}": "{SLIP}"}}'
        '.get(name, name.removeprefix("module."))',
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_that_differ(tmp_path: Path, case: str) -> None:
    """Wrappers, prefixes, parts of names and slips: one line that fills all."""
    change, line = NAMES[case]
    path = save(tmp_path, renamed(change))
    model = classifier(seed=2)
    (found,) = suggested(model, path)
    assert (found.arguments, found.filled, found.parameters) == (line, 41, 41)
    follow(found, model, path)
    wanted = classifier().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_part_of_a_larger_checkpoint(tmp_path: Path) -> None:
    """A sub-module takes its own tensors, and the line skips the others."""
    path = save(tmp_path, classifier().state_dict())
    model = body()
    (found,) = suggested(model, path)
    name = 'name.removeprefix("bert.")'
    line = f'rename=lambda name: {name} if name.startswith("bert.") else None'
    assert found == Suggestion(line, 39, 39)
    assert follow(found, model, path).skipped == ("classifier.bias", "classifier.weight")


def test_a_checkpoint_of_a_part(tmp_path: Path) -> None:
    """A body's tensors in a model with a head: the line says that some stay as they are."""
    path = save(tmp_path, body().state_dict())
    model = classifier()
    (found,) = suggested(model, path)
    assert found == Suggestion('rename=lambda name: "bert." + name, strict=False', 39, 41)
    assert follow(found, model, path).missing == ("classifier.weight", "classifier.bias")


def test_a_name_that_has_no_prefix(tmp_path: Path) -> None:
    """A head beside a body whose names lack the model's prefix keeps its own."""
    tensors = llama().model.state_dict() | {"lm_head.weight": llama().lm_head.weight.detach()}
    path = save(tmp_path, tensors)
    model = llama(seed=2)
    (found,) = suggested(model, path)
    assert found.filled == found.parameters == 21
    follow(found, model, path)
    assert torch.equal(model.lm_head.weight, llama().lm_head.weight)
    assert torch.equal(model.model.norm.weight, llama().model.norm.weight)


def test_a_module_that_stands_elsewhere(tmp_path: Path) -> None:
    """Few tensors of a part whose others are right: they are named one by one."""
    source = transformers.BertForPreTraining(BERT)
    model = transformers.BertForPreTraining(BERT)
    model.cls.pooler, model.bert.pooler = model.bert.pooler, None
    path = save(tmp_path, source.state_dict())
    (found,) = suggested(model, path)
    ends = ("pooler.dense.bias", "pooler.dense.weight")
    names = ", ".join(f'"bert.{end}": "cls.{end}"' for end in ends)
    assert found == Suggestion(f"rename={{{names}}}", 46, 46)
    follow(found, model, path)
    assert torch.equal(model.cls.pooler.dense.weight, source.bert.pooler.dense.weight)


def test_parts_that_fit_equally_well_are_suggested_each(tmp_path: Path) -> None:
    """Two towers of one shape: which is meant, only the user knows."""
    towers = {"query.": body(), "passage.": body()}
    named = {p + n: t for p, tower in towers.items() for n, t in tower.state_dict().items()}
    path = save(tmp_path, named)
    found = suggested(body(), path)
    assert [prefix in each.arguments for each in found for prefix in towers] in (
        [True, False, False, True],
        [False, True, True, False],
    )
    for each in found:
        model = body()
        follow(each, model, path)
        prefix = next(p for p in towers if p in each.arguments)
        weight = towers[prefix].embeddings.word_embeddings.weight
        assert torch.equal(model.embeddings.word_embeddings.weight, weight)


def test_what_could_be_several_things_is_not_guessed(tmp_path: Path) -> None:
    """Parts of one shape that are like nothing of the model: no line rather than a wrong one."""
    path = save(tmp_path, {f"l{i}.{n}": torch.ones(4) for i in range(4) for n in ("xx", "yy")})
    norms = torch.nn.ModuleDict({f"l{i}": torch.nn.LayerNorm(4) for i in range(4)})
    assert suggested(norms, path) == ()
    other = save(tmp_path / "other", {"a.weight": torch.ones(16, 16), "b": torch.ones(3)})
    assert suggested(body(), other) == ()


def test_shapes_that_differ(tmp_path: Path) -> None:
    """A head for another number of classes: it may be left as it is."""
    path = save(tmp_path, classifier().state_dict())
    config = transformers.BertConfig(**SMALL, num_labels=7)
    model = transformers.BertForSequenceClassification(config)
    (found,) = suggested(model, path, strict=False)
    assert found == Suggestion('shapes="skip"', 39, 41)
    assert follow(found, model, path).missing == ("classifier.weight", "classifier.bias")


@pytest.mark.slow
def test_shards_are_one_parameter(tmp_path: Path) -> None:
    """Of a model that is sharded, whole shapes are looked for, and each parameter counts once."""
    tinygrad = needs.module("tinygrad")
    path = save(tmp_path / "c", {f"model.l{n}.weight": torch.rand(6, 4) for n in range(3)})
    spread = ("CPU", "CPU:1", "CPU:2")
    model = {
        f"l{n}.weight": tinygrad.Tensor.zeros(6, 4).contiguous().shard_(spread, axis=0).realize()
        for n in range(3)
    }
    hint = 'rename=lambda name: name.removeprefix("model.")'
    with pytest.raises(StateDictMismatchError) as caught:
        load(model, path)
    assert caught.value.suggestions == (Suggestion(hint, 3, 3),)
    with pytest.warns(UserWarning, match=r"fills 0 of the model's 3 parameters, and 3 of its 3"):
        load(model, path, strict=False)
    half = {"model.l0.weight": model["l0.weight"], "l1.weight": model["l1.weight"]}
    with pytest.warns(UserWarning, match=r"fills 1 of the model's 4 parameters, and 2 of its 3"):
        load(
            {**half, "x": model["l2.weight"], "y": tinygrad.Tensor.zeros(2).realize()},
            path,
            strict=False,
        )
    load(model, path, rename=lambda name: name.removeprefix("model."))
    assert model["l2.weight"].numpy().shape == (6, 4)


def test_what_the_model_does_not_have(tmp_path: Path) -> None:
    """All parameters are filled, and tensors are left over."""
    path = save(tmp_path, body().state_dict() | {"other": torch.ones(3)})
    assert suggested(body(), path) == (Suggestion("strict=False", 39, 39),)


@pytest.mark.parametrize(
    "rename",
    [{"classifier.weight": "classifier.wieght"}, lambda name: name.removeprefix("bert.")],
    ids=["dict", "callable"],
)
def test_a_rename_that_spoils_it(tmp_path: Path, rename: Any) -> None:
    """What was given is judged too, and replaced."""
    path = save(tmp_path, classifier().state_dict())
    (found,) = suggested(classifier(), path, rename=rename)
    assert found == Suggestion("rename=None", 41, 41)
    follow(found, classifier(), path, rename=rename)


def test_a_rename_that_knows_its_names_alone(tmp_path: Path) -> None:
    """It is asked for no name that a family makes, which it may not know."""
    path = save(tmp_path / "c", llama().state_dict(), LLAMA)
    table = {name: f"x.{name}" for name in llama().state_dict()}
    with pytest.raises(StateDictMismatchError) as caught:
        load(llama(), path, rename=lambda name: table[name])
    assert "rename=None" in {hint.arguments for hint in caught.value.suggestions}


def test_a_slip_in_what_a_rename_makes(tmp_path: Path) -> None:
    """A name is near what the call made of it, if not near what it was."""
    path = save(tmp_path, renamed(lambda name: name.replace("classifier.weight", "head")))
    (found,) = suggested(classifier(), path, rename={"head": "classifier.wieght"})
    assert found == Suggestion('rename={"head": "classifier.weight"}', 41, 41)
    follow(found, classifier(), path)


def tinygrad_llama() -> Any:
    needs.module("tinygrad")
    return needs.module("llama").Llama(LLAMA.to_dict())


def meta_names(path: Path) -> dict[str, Any]:
    report = load(None, path, device="host", mapping="hf-llama")
    return {name: torch.from_numpy(array) for name, array in report.state_dict.items()}


@pytest.mark.parametrize("wrapped", [False, True])
def test_families(tmp_path: Path, wrapped: bool) -> None:
    """Hugging Face's names into a model with Meta's and back, with a prefix on top of it."""
    path = save(tmp_path / "hf", llama().state_dict(), LLAMA)
    model = tinygrad_llama()
    needs.device("CPU")
    target = {"net": model} if wrapped else model
    (found,) = suggested(target, path, device="CPU")
    line = 'mapping="hf-llama"' + ', rename=lambda name: "net." + name' * wrapped
    assert found == Suggestion(line, 21, 21)
    follow(found, target, path, device="CPU")
    expected = llama().model.norm.weight.detach().numpy()
    assert (model.norm.weight.numpy() == expected).all()

    back = llama(seed=2)
    stored = save(tmp_path / "meta", meta_names(path), LLAMA)
    inside = torch.nn.ModuleDict({"net": back}) if wrapped else back
    (found,) = suggested(inside, stored)
    line = 'mapping="meta-llama"' + ', rename=lambda name: "net." + name' * wrapped
    assert found == Suggestion(line, 21, 21)
    follow(found, inside, stored)
    wanted = llama().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in back.state_dict().items())


GPT2 = transformers.GPT2Config(
    n_embd=16, n_layer=3, n_head=2, vocab_size=50, n_positions=20, bos_token_id=0, eos_token_id=0
)


def with_linear() -> Any:
    """GPT-2 with Linear layers in place of its Conv1D, as most implementations have it."""
    model = transformers.GPT2Model(GPT2)
    for layer in model.h:
        for inner, name in [
            *((layer.attn, "c_attn"), (layer.attn, "c_proj")),
            *((layer.mlp, "c_fc"), (layer.mlp, "c_proj")),
        ]:
            setattr(inner, name, torch.nn.Linear(*getattr(inner, name).weight.shape))
    return model


def test_transposed_matrices(tmp_path: Path) -> None:
    """By their family where the names are its own, else by name; square ones too."""
    source = transformers.GPT2Model(GPT2)
    renamed = {n.replace("h.", "blocks.", 1): t for n, t in source.state_dict().items()}
    model = with_linear()
    blocks = torch.nn.ModuleDict({n.replace("h", "blocks"): m for n, m in model.named_children()})
    listed = (
        "mapping={name: streamload.Source(name, transpose=True) for i in range(3) for name in "
        '[f"blocks.{i}.attn.c_attn.weight", f"blocks.{i}.attn.c_proj.weight", '
        'f"blocks.{i}.mlp.c_fc.weight", f"blocks.{i}.mlp.c_proj.weight"]}'
    )
    for target, tensors, line in (
        (model, source.state_dict(), 'mapping="hf-gpt2"'),
        (blocks, renamed, listed),
    ):
        path = save(tmp_path, tensors)
        (found,) = suggested(target, path)
        assert found == Suggestion(line, 40, 40)
        follow(found, target, path)
        for layer, stored in zip(model.h, source.h, strict=True):
            assert torch.equal(layer.attn.c_proj.weight, stored.attn.c_proj.weight.T)
            assert torch.equal(layer.mlp.c_fc.weight, stored.mlp.c_fc.weight.T)
        torch.nn.init.zeros_(model.h[0].mlp.c_fc.weight)


def test_what_was_given_is_not_suggested(tmp_path: Path) -> None:
    """Beside a transposed matrix and a view that cannot be filled, strict=False stands already."""
    path = save(tmp_path, {"a": torch.ones(4, 16), "b": torch.ones(8), "z": torch.ones(8)})
    columns = torch.zeros(64, 2)[:, 0].unflatten(0, (4, 16))
    for a, others, line in (
        (torch.zeros(16, 4), {"c": torch.zeros(8)}, 'transpose=True) for name in ["a"]}'),
        (columns, {}, ""),
    ):
        model = {"a": a, "b": torch.zeros(8), **others}
        found = suggested(model, path, strict=False)
        assert [each.arguments[-len(line) :] for each in found] == [line] * bool(line)
        for each in found:
            follow(each, model, path, strict=False)
        (strictly,) = suggested(model, path)
        assert strictly.arguments.endswith("strict=False")


#: Models of transformers whose tensors have other names in files, or others' rows.
RENAMED = {
    "GPTNeoXForCausalLM": {**SMALL, "max_position_embeddings": 20},
    "MixtralForCausalLM": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2},
    "ViTForImageClassification": {**SMALL, "image_size": 8, "patch_size": 4},
}


@pytest.mark.parametrize("name", RENAMED)
def test_names_that_a_library_changes(tmp_path: Path, name: str) -> None:
    """The error says the call that renames tensors as the model's own library does."""
    model_class = getattr(transformers, name)
    torch.manual_seed(1)
    source = model_class(model_class.config_class(**RENAMED[name]))
    source.save_pretrained(tmp_path)
    with pytest.raises(StateDictMismatchError) as caught:
        load(model_class(source.config), tmp_path)
    call = caught.value.instead
    assert f"write model = {call}" in str(caught.value)
    assert not any("vit.layers.0." in each.arguments for each in caught.value.suggestions)
    assert pickle.loads(pickle.dumps(caught.value)).instead == call
    found = eval(call, {"streamload": streamload, name: model_class}).state_dict()
    assert found.keys() == source.state_dict().keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in source.state_dict().items())
    # where an argument is enough, or the model is nobody's, there is no such call
    tensors = {f"module.{name}": tensor for name, tensor in source.state_dict().items()}
    for model in (model_class(source.config), torch.nn.Linear(2, 2)):
        with pytest.raises(StateDictMismatchError) as caught:
            load(model, save(tmp_path / "b", tensors))
        assert caught.value.instead == ""


def test_the_wrong_family(tmp_path: Path) -> None:
    """A mapping that the model does not need is taken back."""
    path = save(tmp_path, llama().state_dict(), LLAMA)
    (found,) = suggested(llama(), path, mapping="hf-llama")
    assert found == Suggestion("mapping=None", 21, 21)
    follow(found, llama(), path, mapping="hf-llama")


@pytest.mark.parametrize("strict", [True, False])
def test_little_that_matches_is_a_warning(tmp_path: Path, strict: bool) -> None:
    """``strict=False`` with a forgotten prefix loads nothing, and says so with the line."""
    path = save(tmp_path, renamed(lambda name: "module." + name))
    if strict:
        suggested(classifier(), path)
        return
    with pytest.warns(UserWarning) as caught:
        report = streamload.load_state_dict(classifier(), path, strict=False, progress=False)
    (warned,) = caught
    assert warned.filename == __file__
    said = str(warned.message)
    assert "fills 0 of the model's 41 parameters, and 41 of its 41 tensors are in no" in said
    assert 'write rename=lambda name: name.removeprefix("module.") (fills 41 of 41' in said
    assert len(report.missing) == 41


@pytest.mark.filterwarnings("error")
def test_what_is_usual_is_no_warning(tmp_path: Path) -> None:
    """Part of a model from all tensors, and all of a model from some."""
    head = {n: t for n, t in classifier().state_dict().items() if n.startswith("classifier.")}
    assert len(load(classifier(), save(tmp_path / "a", head), strict=False).missing) == 39
    more = {f"other.{n}": t for n, t in classifier().state_dict().items()}
    load(classifier(), save(tmp_path / "b", classifier().state_dict() | more), strict=False)


def test_nothing_is_looked_for_where_all_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamload.planning.suggest.Wanted.suggestions", pytest.fail)
    load(classifier(), save(tmp_path, classifier().state_dict()))


#: Of Qwen2-VL, layers of text and of vision, and whether the head is tied.
TOWERS = [(2, 1, False), (4, 2, False), (4, 1, False), (2, 2, True)]


@pytest.mark.parametrize(("layers", "depth", "tied"), TOWERS)
def test_no_family_is_named_that_is_not_its_own(
    tmp_path: Path, layers: int, depth: int, tied: bool
) -> None:
    """Qwen2-VL's two prefixes are found whatever their parts are like, and hf-whisper is not."""
    text = {**SMALL, "num_hidden_layers": layers, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    vision = {"depth": depth, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=tied,
    )
    source, model = (transformers.Qwen2VLForConditionalGeneration(config) for _ in range(2))
    source.save_pretrained(tmp_path)
    (found,) = suggested(model, tmp_path)
    assert found.filled == found.parameters and "mapping=" not in found.arguments
    follow(found, model, tmp_path)
    wanted = source.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_line_that_fills_less_than_most_is_not_written(tmp_path: Path) -> None:
    """MiniMax: of each layer three of ten parameters would be left; the library's call has all."""
    config = transformers.MiniMaxConfig(**SMALL, num_key_value_heads=2, num_local_experts=2)
    source = transformers.MiniMaxForCausalLM(config)
    source.save_pretrained(tmp_path)
    with pytest.raises(StateDictMismatchError) as caught:
        load(transformers.MiniMaxForCausalLM(config), tmp_path)
    assert caught.value.suggestions == ()
    names = {"streamload": streamload, "MiniMaxForCausalLM": transformers.MiniMaxForCausalLM}
    found = eval(caught.value.instead, names).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in source.state_dict().items())
