"""Models of transformers that are quantised on the way: bitsandbytes' modules, and ours."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import needs
import pytest
from bench_parts.section import measure
from boxes import Boxes
from gguf_models import write_model
from make_checkpoint import LlamaShape, make_checkpoint
from transformers_quantized_helpers import (
    load,
    logits,
    needs_library,
    plain,
    quiet,
    raw,
    reference,
    same_modules,
)

from streamload import convert
from streamload.bench.processes import call, command
from streamload.errors import PlanInfeasibleError, UnsupportedCastError

torch = needs.module("torch")
transformers = needs.module("transformers")

from product_bounds import worst  # noqa: E402
from torch.nn import functional  # noqa: E402
from transformers_quantizing_helpers import EXPERTS, error, gpt2, make  # noqa: E402

from streamload.devices.torch.decoded import DecodedWeight  # noqa: E402
from streamload.devices.torch.deferred import Deferred  # noqa: E402
from streamload.devices.torch.quantized import CODED, Coded, QuantLinear, set_aside  # noqa: E402
from streamload.transformers.quantizers import on_the_way as quantizing  # noqa: E402

__all__ = ["quiet"]


# --- modules of ours ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "GPT2", *EXPERTS])
@pytest.mark.parametrize("format", ["int8", "nf4-nested"])
def test_all_of_the_layers_is_quantized(tmp_path: Path, name: str, format: str) -> None:
    """Linears, Conv1D and fused experts; the head and norms stay; the logits are near."""
    make(tmp_path, name, torch.float32)
    model = load(tmp_path, quant=format)
    wide = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.endswith("bias")
    ]
    left = {name.rpartition(".")[0].rpartition(".")[2] for name in wide}
    assert left <= {"embed_tokens", "lm_head", "wte", "wpe", "gate", "router"}
    coded = [module for module in model.modules() if isinstance(module, Coded)]
    assert {each[0] for module in coded for each in getattr(module, CODED).values()} == {format}
    kwargs = {"experts_implementation": "eager"} if name in EXPERTS else {}
    expected = logits(reference(tmp_path, **kwargs))
    assert error(logits(model), expected) < (0.005 if format == "int8" else 0.05)
    assert not model.streamload_report.missing


def test_experts_are_found_by_plain_numbers(tmp_path: Path) -> None:
    """As Nemotron-H does, whose class of experts numbers them without a tensor."""
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}
    moe = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    kinds = {"layers_block_type": ["moe", "attention"]}
    shared = {"moe_shared_expert_intermediate_size": 32}
    plain(tmp_path, "NemotronH", torch.float32, **sizes, **moe, **kinds, **shared)
    model = load(tmp_path, quant="q8_0")
    assert any(type(module).__name__ == "QuantNemotronHExperts" for module in model.modules())
    found = logits(model)
    assert error(found, logits(copy.deepcopy(model).dequantize())) < 1e-5


def test_each_way_to_compute_experts_takes_those_that_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert's matrices are read at a time, whatever implementation was chosen."""
    make(tmp_path, "Mixtral")
    model = load(tmp_path, quant="q8_0", experts_implementation="grouped_mm")
    asked: list[tuple[str, int | None]] = []
    operand = Coded.operand

    def recorded(self: Any, leaf: str, index: int | None = None, device: Any = None) -> Any:
        asked.append((leaf, index))
        return operand(self, leaf, index, device)

    monkeypatch.setattr(Coded, "operand", recorded)
    experts = model.model.layers[0].mlp.experts
    x, chosen = torch.randn(3, 64, dtype=torch.bfloat16), torch.tensor([[2, 0], [2, 0], [0, 2]])
    experts(x, chosen, torch.full((3, 2), 0.5, dtype=torch.bfloat16))
    assert asked == [(leaf, i) for i in (0, 2) for leaf in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize("format", ["q8_0", "nf4", "int8"])
def test_an_expert_is_multiplied_as_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Nothing is decoded for it; products are within rounding, and have gradients."""
    make(tmp_path, "Mixtral")
    experts = load(tmp_path, quant=format).model.layers[0].mlp.experts
    weight = experts.gate_up_proj[1].clone()
    exact = experts.dense("gate_up_proj", torch.float32, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Coded, "dense", None)
        matrix = experts.gate_up_proj[torch.tensor(1)]
        assert (matrix.shape, matrix.dtype, matrix.dim()) == (weight.shape, weight.dtype, 2)
        for tokens in (1, 3, 4):
            x = torch.randn(tokens, 64, dtype=torch.bfloat16)
            assert worst(functional.linear(x, matrix), x, exact) < 1
        with torch.autocast("cpu", torch.bfloat16):
            assert functional.linear(x.float(), matrix).dtype is torch.bfloat16
        x.requires_grad_()
        y = functional.linear(x, matrix)
    y.sum().backward()
    assert torch.allclose(x.grad, weight.sum(0).expand_as(x), rtol=0.02, atol=0.02)
    assert type(matrix) is Deferred
    wide = torch.randn(1, 64)
    with pytest.raises(RuntimeError, match="dtype"):
        functional.linear(wide, matrix)
    with pytest.raises(IndexError):
        experts.gate_up_proj[4]


@pytest.mark.parametrize("inference", [False, True])
def test_other_functions_decode_an_expert(tmp_path: Path, inference: bool) -> None:
    make(tmp_path, "Mixtral")
    experts = load(tmp_path, quant="q8_0").model.layers[0].mlp.experts
    weight = experts.dense("gate_up_proj", index=1)

    def one() -> Any:
        found = experts.gate_up_proj[1]
        assert type(found) is Deferred
        return found

    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.inference_mode(inference):
        matrix = one()
        assert torch.equal(x @ matrix.T, x @ weight.T)
        assert type(matrix) is DecodedWeight
        memory = matrix.data_ptr()
        assert torch.equal(matrix, weight) and matrix.data_ptr() == memory
        assert torch.equal(one()[2:5], weight[2:5])
        assert torch.equal(one().to(torch.float32), weight.float())
        assert all(map(torch.equal, one().chunk(2, 0), weight.chunk(2, 0)))
        assert torch.equal(torch.cat([one(), one()]), torch.cat([weight, weight]))
        assert type(copy.deepcopy(one())) is torch.Tensor
        assert type(pickle.loads(pickle.dumps(one()))) is torch.Tensor
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(one() + 0, weight)
    writes: list[Any] = [
        lambda w: w.mul_(2),
        lambda w: w.data.mul_(2),
        lambda w: w.t().mul_(2),
        lambda w: w[0].zero_(),
        lambda w: w.__setitem__(0, 0),
        lambda w: setattr(w, "data", torch.zeros(3)),
        lambda w: w.set_(torch.zeros(3, dtype=weight.dtype)),
        lambda w: torch.add(w, 1, out=w),
        torch.nn.init.zeros_,
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="cannot write to"):
            write(one())
    with pytest.raises(BufferError, match="clone"):
        torch.from_dlpack(one())


@pytest.mark.parametrize("name", EXPERTS)
def test_compiled_experts_compute_the_same(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    layer = load(tmp_path, quant="q8_0").model.layers[0].mlp
    x = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
        found = torch.compile(layer, backend="eager")(x)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 0.01
    product = torch.matmul if layer.experts.is_transposed else functional.linear
    for function in (product, lambda x, w: x @ w[:64, :64]):
        right = function(x, layer.experts.gate_up_proj[1])
        compiled = torch.compile(function, backend="eager")
        assert torch.equal(compiled(x, layer.experts.gate_up_proj[1]), right)


def test_experts_are_decoded_to_the_dtype_of_the_activations(tmp_path: Path) -> None:
    make(tmp_path, "Mixtral")
    experts = load(tmp_path, quant="q8_0").model.layers[0].mlp.experts
    x, chosen, shares = torch.randn(3, 64), torch.tensor([[2, 0]] * 3), torch.full((3, 2), 0.5)
    expected = experts(x, chosen, shares)
    for dtype in (torch.float16, torch.bfloat16):
        found = experts(x.to(dtype), chosen, shares.to(dtype))
        assert found.dtype is dtype
        assert error(found, expected) < 0.02


def test_experts_that_no_module_can_hold_are_named(tmp_path: Path) -> None:
    make(tmp_path, "Mixtral")
    report = load(tmp_path, quant="bitsandbytes-int8").streamload_report
    (note,) = (note for note in report.notes if note.startswith("not quantised"))
    assert "4 tensors of 393 kB" in note and "experts.gate_up_proj" in note


def test_experts_that_a_format_cannot_hold_are_named(tmp_path: Path) -> None:
    plain(tmp_path, "Mixtral", torch.bfloat16, **EXPERTS["Mixtral"] | {"intermediate_size": 48})
    with pytest.raises(UnsupportedCastError, match=r"experts\.0\.w2\.weight.*None"):
        load(tmp_path, quant="q8_0")


def test_one_pass_names_all_that_a_format_cannot_hold(tmp_path: Path) -> None:
    """What the error says to write works as it is typed, and leaves nothing else."""
    plain(tmp_path / "in", hidden_size=72, num_attention_heads=2, num_hidden_layers=3)
    with pytest.raises(UnsupportedCastError, match=r"so are 14 more") as caught:
        load(tmp_path / "in", quant={"*k_proj*": "q4_0", "*": "q8_0"})
    written = str(caught.value).partition("quant=")[2]
    assert "layers.*.mlp.up_proj" in written
    model = load(tmp_path / "in", quant=eval(written))
    coded = {name for name, module in model.named_modules() if isinstance(module, Coded)}
    left = {name.rpartition(".")[2] for name in coded}
    assert (len(coded), left) == (6, {"o_proj", "down_proj"})
    with pytest.raises(UnsupportedCastError) as caught:
        convert(tmp_path / "in", tmp_path / "out", quant="q8_0", progress=False)
    written = eval(str(caught.value).partition("quant=")[2])
    assert convert(tmp_path / "in", tmp_path / "out", quant=written, progress=False).errors


def test_classes_that_hold_nothing_quantized_are_named(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"torch's Linear.*Conv1D.*theirs are FalconLinear;"):
        load(tmp_path, quant="int8")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_of_gguf_stay_as_they_are_in_modules(tmp_path: Path, family: str) -> None:
    """Where ``quant=`` asks for the format that they are stored in: nothing is rounded twice."""
    write_model(tmp_path / "in", family)
    convert(tmp_path / "in", tmp_path / "out", to="gguf", quant="q8_0", progress=False)
    (path,) = (tmp_path / "out").glob("*.gguf")
    model = load(path, quant="q8_0")
    assert any(isinstance(module, Coded) for module in model.modules())
    assert error(logits(model), logits(load(path))) < 1e-3


def test_rows_of_two_weights_in_blocks_are_joined(tmp_path: Path) -> None:
    """They stay in their blocks; for another format that they cannot have, a line leaves them."""
    import streamload

    write_model(tmp_path / "in", "llama")
    convert(tmp_path / "in", tmp_path / "out", to="gguf", quant="q8_0", progress=False)
    (path,) = (tmp_path / "out").glob("*.gguf")
    a, b = (f"model.layers.{n}.mlp.up_proj.weight" for n in range(2))
    model = torch.nn.ModuleDict({"joined": torch.nn.Linear(64, 96, bias=False)})
    rows = [streamload.RowRange(a, 0, 48), streamload.RowRange(b, 48, 96)]
    given = {"mapping": {"joined.weight": rows}, "strict": False, "progress": False}
    with pytest.raises(UnsupportedCastError, match=r'quant=\{"model'):
        streamload.load_state_dict(model, path, quant="nf4", **given)
    streamload.load_state_dict(model, path, quant="q8_0", **given)
    plain = torch.nn.Linear(64, 96, bias=False)
    streamload.load_state_dict(torch.nn.ModuleDict({"joined": plain}), path, **given)
    assert isinstance(model["joined"], Coded)
    assert torch.equal(model["joined"].weight, plain.weight)


def test_a_budget_of_the_codes_is_enough(tmp_path: Path) -> None:
    """The plan counts codes; without quant= it does not fit, and "auto" finds what does."""
    make(tmp_path, "Llama")
    nbytes = load(tmp_path, quant="q8_0").streamload_report.plan.devices[0].peak_nbytes
    with pytest.raises(PlanInfeasibleError):
        load(tmp_path, budget=nbytes)
    model = load(tmp_path, quant="auto", budget=nbytes + 4096)  # and buffers
    assert type(model.model.layers[1].mlp.up_proj) is QuantLinear
    assert any('quant="auto" took q8_0' in note for note in model.streamload_report.notes)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
def test_models_are_pickled_and_copied(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    model = load(tmp_path, quant="nf4")
    expected = logits(model)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(logits(other), expected)


def test_a_conv1d_is_loaded_again(tmp_path: Path) -> None:
    import streamload

    gpt2(tmp_path)
    model = load(tmp_path, quant="nf4")
    expected = logits(model)
    module = model.transformer.h[0].mlp.c_fc
    module._buffers["weight"].zero_()
    streamload.load_state_dict(
        model.transformer, tmp_path, progress=False, rename=lambda n: n.removeprefix("transformer.")
    )
    assert torch.equal(logits(model), expected)
    assert module.weight.shape == (64, 256)  # as a Conv1D has it


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
@pytest.mark.parametrize("format", ["nf4", "q8_0"])
def test_hooks_of_accelerate_leave_codes_where_they_are(
    tmp_path: Path, name: str, format: str
) -> None:
    accelerate = needs.module("accelerate")
    make(tmp_path, name)
    model = load(tmp_path, quant=format)
    expected = logits(model)
    with set_aside(model):
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(logits(model), expected)


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "Llama")
    config = transformers.BitsAndBytesConfig
    four = config(load_in_4bit=True)
    monkeypatch.setattr(quantizing, "missing", lambda _: [])
    for wrong, said in (
        ({"quant": "nf4", "quantization_config": four}, "leave one of them out"),
        ({"quantization_config": transformers.QuantoConfig()}, "BitsAndBytesConfig here, not"),
        ({"quantization_config": {"quant_method": "hqq"}}, "BitsAndBytesConfig here, not hqq"),
        (
            {"quantization_config": config(load_in_8bit=True, llm_int8_has_fp16_weight=True)},
            "llm_int8_has_fp16_weight is False here, not True",
        ),
        (
            {"quantization_config": config(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")},
            "bnb_4bit_quant_storage is uint8 here",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            load(tmp_path, **wrong)
    monkeypatch.setattr(quantizing, "missing", lambda _: ["bitsandbytes"])
    with pytest.raises(ValueError, match=r"pip install bitsandbytes; quant=\"nf4\""):
        load(tmp_path, quantization_config=four)


ZAMBA = transformers.Zamba2Config(
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
    **{"layers_block_type": ["hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "chunk_size": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "attention_head_dim": 32},
    **{"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1},
    **{"mamba_expand": 2, "adapter_rank": 32},
)


@pytest.mark.parametrize("format", ["int8", "q8_0", "q4_0", "nf4", "nf4-nested", "fp4"])
def test_blocks_that_share_weights_compute_with_the_same_codes(tmp_path: Path, format: str) -> None:
    """Zamba2's: each use is that of the dequantised model, and the codes are held once."""
    torch.manual_seed(1)
    plain_model = transformers.Zamba2ForCausalLM(ZAMBA).eval()
    plain_model.save_pretrained(tmp_path)
    model = load(tmp_path, quant=format, dtype="float32")
    state = model.state_dict().values()
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in state}
    assert sum(held.values()) <= model.streamload_report.resident_nbytes
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Coded):
            plain_model.get_submodule(name).weight.data = module.weight.clone()
    assert error(logits(model), logits(plain_model)) < 1e-5
    blocks = [model.get_submodule(f"model.layers.{at}.shared_transformer") for at in (0, 2)]
    one, other = (block.self_attn.q_proj._buffers["weight"] for block in blocks)
    assert one is other


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_rwkv_rescales_codes(tmp_path: Path, format: str) -> None:
    """Powers of two that it divides weights by for inference, and multiplies with for training."""
    torch.manual_seed(1)
    config = transformers.RwkvConfig(
        **{"vocab_size": 96, "hidden_size": 64, "attention_hidden_size": 64},
        **{"num_hidden_layers": 4, "rescale_every": 1, "context_length": 64},
    )
    plain_model = transformers.RwkvForCausalLM(config).eval()
    plain_model.save_pretrained(tmp_path)
    model = load(tmp_path, quant=format, dtype="float32")
    for name, module in model.named_modules():
        if isinstance(module, Coded):
            plain_model.get_submodule(name).weight.data = module.weight.clone()
    expected = logits(plain_model)
    for _ in range(2):
        assert error(logits(model), expected) < 1e-5
        model.train()
        assert error(logits(model), expected) < 1e-3
        model.eval()


# --- bitsandbytes ---------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-bf16": {
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "fp4": {"load_in_4bit": True},
    "nf4-nested": {
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
    "int8-skipping": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "o_proj"]},
}


def both(folder: Path, name: str, **arguments: Any) -> tuple[Any, Any]:
    needs_library("bitsandbytes")
    config = transformers.BitsAndBytesConfig
    found = load(folder, quantization_config=config(**CONFIGS[name]))
    return found, reference(folder, quantization_config=config(**CONFIGS[name]), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama", "GPT2"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gives_the_bytes_of_bitsandbytes(tmp_path: Path, model: str, name: str) -> None:
    """State, modules, configuration and logits are those of transformers with bitsandbytes."""
    make(tmp_path, model)
    found, expected = both(tmp_path, name)
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    nested = [n for n in mine if "nested" in name and "quant_state" in n]
    for tensor in mine.keys() - set(nested):  # there the mean is a sum that depends on threads
        assert raw(mine[tensor]) == raw(theirs[tensor]), tensor
    same_modules(found, expected)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.is_quantized and found.quantization_method == expected.quantization_method
    assert error(logits(found), logits(expected)) < (1e-12 if name == "int8" else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", EXPERTS)
@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "int8"])
def test_fused_experts_are_quantized_too(tmp_path: Path, model: str, name: str) -> None:
    """bitsandbytes leaves them at 16 bits without a word; here a note says whose they are."""
    make(tmp_path, model)
    found, expected = both(tmp_path, name, experts_implementation="eager")
    assert not any(
        parameter.dim() == 3 and parameter.is_floating_point() for parameter in found.parameters()
    )
    assert any("fused weights of experts are" in n for n in found.streamload_report.notes)
    assert any(parameter.dim() == 3 for parameter in expected.parameters())
    mine, theirs = found.state_dict(), expected.state_dict()
    alike = [name for name in mine if "experts" not in name and "quant_state" not in name]
    assert all(raw(mine[tensor]) == raw(theirs[tensor]) for tensor in alike)
    assert error(logits(found), logits(expected)) < 0.02


@pytest.mark.slow
def test_what_is_quantized_so_is_saved_for_transformers(tmp_path: Path) -> None:
    make(tmp_path / "in", "Llama")
    found, _ = both(tmp_path / "in", "nf4")
    state = {name: raw(tensor) for name, tensor in found.state_dict().items()}
    found.save_pretrained(tmp_path / "out")
    for opened in (load(tmp_path / "out"), reference(tmp_path / "out", device_map="cpu")):
        assert {name: raw(tensor) for name, tensor in opened.state_dict().items()} == state


@pytest.mark.slow
def test_what_is_not_stored_is_not_quantized(tmp_path: Path) -> None:
    """A weight that would be initialised is named, with what leaves it out."""
    needs_library("bitsandbytes")
    make(tmp_path, "Llama")
    config = transformers.BitsAndBytesConfig
    wrong = {"intermediate_size": 160, "strict": False, "shapes": "skip"}
    with pytest.raises(ValueError, match=r"gate_proj.*\[160, 64\].*llm_int8_skip_modules="):
        load(tmp_path, quantization_config=config(load_in_8bit=True), **wrong)
    skip = ["lm_head", "gate_proj", "up_proj", "down_proj"]
    skipping = config(load_in_8bit=True, llm_int8_skip_modules=skip)
    assert load(tmp_path, quantization_config=skipping, **wrong).is_quantized


@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_not_repacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """bitsandbytes' own call does so on a CPU with AVX512-BF16: merging and saving would see it."""
    needs_library("bitsandbytes")
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    make(tmp_path, "Llama")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )

    def same(found: Any, expected: Any) -> bool:
        return found.keys() == expected.keys() and all(
            raw(found[name]) == raw(expected[name]) for name in expected
        )

    model, other = (load(tmp_path, quantization_config=config) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = logits(model)
    assert not hasattr(
        model.model.layers[0].mlp.up_proj.weight.quant_state, "packing_format_for_cpu"
    )
    assert same(model.state_dict(), before)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), first)
    peft = needs.module("peft", needed=False)

    def merged(model: Any) -> Any:
        torch.manual_seed(1)
        adapter = peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False, r=4)
        return peft.get_peft_model(model, adapter).merge_and_unload().state_dict()

    assert same(merged(model), merged(other))


def test_products_of_bitsandbytes_modules_are_within_rounding(tmp_path: Path) -> None:
    """With gradients of inputs and biases, in a compiled graph, and by keyword."""
    needs_library("bitsandbytes")
    import bitsandbytes

    make(tmp_path, "Llama")
    config = transformers.BitsAndBytesConfig(
        **CONFIGS["nf4-nested"] | {"bnb_4bit_compute_dtype": "bfloat16"}
    )
    module = load(tmp_path, quantization_config=config).model.layers[0].mlp.up_proj
    exact = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    for tokens in (1, 2, 9, 70):
        x = torch.randn(tokens, exact.shape[1], dtype=torch.bfloat16, requires_grad=True)
        y = module(x)
        y.sum().backward()
        assert error(y, x.double() @ exact.double().T) < 2.0**-8
        assert error(x.grad, exact.double().sum(0).expand_as(x)) < 2.0**-7
    jvp = torch.func.jvp(module, (x.detach(),), (torch.ones_like(x),))[1]
    assert error(jvp, exact.double().sum(1).expand_as(jvp)) < 2.0**-6
    with torch.no_grad():
        assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))
        assert torch.equal(module(x=x), module(x))
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert module(x.to(dtype)).dtype is dtype
        state = module.weight.quant_state
        state.offset.add_(0.5)
        exact = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
        assert error(module(x), x.double() @ exact.double().T) < 2.0**-7
    with torch.inference_mode():
        other = copy.deepcopy(module)
    other(x).sum().backward()
    module.weight.data = module.weight.data[:100].clone()
    with pytest.raises(RuntimeError, match=r"size|shape"):
        module(x)


# --- memory ---------------------------------------------------------------------------------------

JOB = "quantizing_job:load"
#: Few and large matrices: 1 GB as bfloat16, 0.17 GB each.
LARGE = LlamaShape(1000, 1024, 81920, 2, 8, 8)
LITTLE = LlamaShape(1000, 1024, 1024, 2, 8, 8)
HEADROOM_NBYTES = 64_000_000


@pytest.mark.slow
@pytest.mark.parametrize("way", ["quant, nf4", "streamload, int8"])
def test_the_peak_is_what_stays(tmp_path: Path, cgroup: Boxes, way: str) -> None:
    """In a cgroup of what a small model takes, what stays and 64 MB, a checkpoint of 1 GB loads."""
    needs_library("bitsandbytes")
    for name, shape in (("large", LARGE), ("little", LITTLE)):
        make_checkpoint(tmp_path / name, shape)
    little = measure(call(JOB, path=str(tmp_path / "little"), way=way))
    base_nbytes = little.peak.anon_nbytes - int(little.first["resident_nbytes"])
    large = measure(call(JOB, path=str(tmp_path / "large"), way=way))
    limit_nbytes = base_nbytes + int(large.first["resident_nbytes"]) + HEADROOM_NBYTES
    assert large.peak.anon_nbytes < limit_nbytes
    job = call(JOB, path=str(tmp_path / "large"), way=way)
    done = cgroup.run(command(job, at_once=True), limit_nbytes)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    theirs = {**job["arguments"], "way": f"transformers, {way.rpartition(', ')[2]}"}
    assert cgroup.run(command(call(JOB, **theirs), at_once=True), limit_nbytes).oom_killed
