"""Quantised checkpoints of transformers: its modules, the stored bytes, the same logits."""

from __future__ import annotations

import json
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import needs
import pytest

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.core.units import format_bytes
from streamload.errors import (
    CheckpointError,
    DeviceError,
    PlanInfeasibleError,
    StateDictMismatchError,
    UnsupportedCastError,
)
from streamload.streaming.sink import ModelTarget
from streamload.verification.verify import verify

torch = needs.module("torch")
transformers = needs.module("transformers")

import safetensors.torch as st  # noqa: E402
from product_bounds import worst  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402
from transformers_quantized_helpers import (  # noqa: E402
    _GROUPS,
    MADE,
    MOE,
    OWN,
    compressed,
    fp8,
    in_fp8,
    load,
    logits,
    needs_library,
    plain,
    quiet,
    raw,
    reconfigure,
    reference,
    same_modules,
)

from streamload.devices.torch.deferred import Deferred  # noqa: E402
from streamload.devices.torch.product import _without_kernel as without_kernel  # noqa: E402
from streamload.devices.torch.product import decode  # noqa: E402
from streamload.transformers.quantizers import stored as quantised  # noqa: E402

__all__ = ["quiet"]


def stored(folder: Path) -> dict[str, tuple[Any, Any, bytes]]:
    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= st.load_file(path)
    return {name: raw(tensor) for name, tensor in tensors.items()}


def rounded_up(folder: Path) -> int:
    """More than the tensors of a checkpoint take of torch's allocator on the CPU."""
    checkpoint = open_checkpoint(folder)
    return checkpoint.nbytes + 64 * len(checkpoint.tensors)


@pytest.mark.parametrize("name", OWN)
def test_packed_weights_stay_packed(tmp_path: Path, name: str) -> None:
    """The state is that of the file, nothing wider; transformers' dequantised logits come out."""
    OWN[name](tmp_path)
    model = load(tmp_path)
    report = model.streamload_report
    assert {n: raw(t) for n, t in model.state_dict().items()} == stored(tmp_path)
    assert report.resident_nbytes < rounded_up(tmp_path)
    assert any("stay packed" in note for note in report.notes)
    assert not verify(report, open_checkpoint(tmp_path), model)
    assert model.is_quantized
    assert model.config.quantization_config is model.hf_quantizer.quantization_config
    found = logits(model)
    if name != "fp8-cut-blocks":  # which transformers does not dequantise
        expected = logits(reference(tmp_path))
        assert (found - expected).norm() < 0.01 * expected.norm()
    assert found.isfinite().all()
    assert {n: raw(t) for n, t in model.state_dict().items()} == stored(tmp_path)


def dense_nbytes(model: Any) -> int:
    """The bytes of the largest weight, or expert of fused ones, if it is dequantised."""
    sizes = [0]
    for name, tensor in model.state_dict().items():
        if name.endswith("_blocks"):
            sizes.append(2 * tensor[0].numel())
        elif tensor.dtype is torch.float8_e4m3fn:
            sizes.append(tensor.numel())
    return int(max(sizes) * model.dtype.itemsize)


@pytest.mark.parametrize("name", [*OWN, "quant"])
def test_what_a_forward_takes_is_said(tmp_path: Path, name: str) -> None:
    """The size of the largest weight that a module may dequantise."""
    plain(tmp_path) if name == "quant" else OWN[name](tmp_path)
    model = load(tmp_path, **({"quant": "nf4"} if name == "quant" else {}))
    (note,) = (n for n in model.streamload_report.notes if "no plan counts" in n)
    if name == "quant":  # in operators, whose memory a mode does not see
        held = (m for m in model.modules() if type(m).__name__ == "QuantLinear")
        expected = max(module.weight.nbytes for module in held)
    else:
        expected = dense_nbytes(model)
    expected = format_bytes(expected, up=True)
    assert f"the largest takes {expected} meanwhile" in note


def test_blocks_that_are_cut_are_dequantized(tmp_path: Path) -> None:
    """Each value by the scale of its block, rounded once, also where the last blocks are short."""
    from streamload.transformers.quantizers.fp8 import dequantized

    values, scales = in_fp8(torch.randn(70, 50), 32, 32)
    found = dequantized(values, scales, (32, 32), torch.bfloat16)
    wide = scales.repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)[:, :50]
    assert torch.equal(found, (values.float() * wide).to(torch.bfloat16))
    exponents = torch.randint(118, 124, (3, 2), dtype=torch.uint8)
    powers = torch.exp2(exponents.float() - 127)
    by_exponents = dequantized(values, exponents, (32, 32), torch.float32)
    assert torch.equal(by_exponents, dequantized(values, powers, (32, 32), torch.float32))
    for shape in ((4, 0), (0, 4)):
        empty = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        assert dequantized(empty, torch.ones(()), (32, 32), torch.float32).shape == shape


def test_fp8_experts_are_fused_with_their_scales(tmp_path: Path) -> None:
    experts = {**MOE, "num_experts": 4, "moe_intermediate_size": 32}
    fp8((32, 32), "Qwen3Moe", **experts)(tmp_path)
    model = load(tmp_path)
    state = model.state_dict()
    fused = state["model.layers.0.mlp.experts.gate_up_proj"]
    assert (fused.dtype, fused.shape) == (torch.float8_e4m3fn, (4, 64, 64))
    assert state["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 2, 2)
    assert model.streamload_report.resident_nbytes < rounded_up(tmp_path)
    assert torch.allclose(logits(model), logits(reference(tmp_path)), atol=0.02)


@pytest.mark.parametrize("name", ["fp8-blocks", "mxfp4"])
def test_shards_make_the_same_model(tmp_path: Path, name: str) -> None:
    OWN[name](tmp_path / "one")
    streamload.convert(tmp_path / "one", tmp_path / "many", max_shard_size="20kB", progress=False)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load(tmp_path / folder) for folder in ("one", "many"))
    assert {n: raw(t) for n, t in many.state_dict().items()} == stored(tmp_path / "one")
    assert torch.equal(logits(many), logits(one))


def test_the_rest_is_cast_and_packed_weights_are_not(tmp_path: Path) -> None:
    """Another dtype changes norms, biases and embeddings, and leaves weights and scales."""
    fp8((32, 32), "Qwen2")(tmp_path)
    model = load(tmp_path, dtype="float16")
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in model.state_dict().items()}
    assert dtypes == {
        "weight": torch.float16,  # the head's, which comes last
        "weight_scale_inv": torch.float32,
        "bias": torch.float16,
    }
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.float8_e4m3fn
    assert model.model.norm.weight.dtype is torch.float16
    close = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(logits(model).float(), logits(load(tmp_path)).float(), **close)


def test_a_budget_holds_what_is_stored(tmp_path: Path) -> None:
    """It fits into the bytes of the file; below, the plan says so before anything is read."""
    OWN["fp8-blocks"](tmp_path)
    nbytes = open_checkpoint(tmp_path).nbytes
    assert load(tmp_path, budget=rounded_up(tmp_path))
    with pytest.raises(PlanInfeasibleError):
        load(tmp_path, budget=nbytes - 1)


# --- what is refused ------------------------------------------------------------------------------


def test_methods_of_others_are_refused_by_name(tmp_path: Path) -> None:
    plain(tmp_path)
    reconfigure(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(CheckpointError, match=r"transformers alone.*bitsandbytes.*found hqq"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("compressed-tensors", "compressed-tensors"),
        ("torchao", "torchao"),
        ("gptq", "optimum gptqmodel"),
        ("awq", "gptqmodel"),
    ],
)
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, needed: str
) -> None:
    plain(tmp_path)
    reconfigure(tmp_path, quantization_config={"quant_method": method, "load_in_4bit": True})
    monkeypatch.setattr(quantised, "_installed", lambda name: name == "accelerate")
    with pytest.raises(CheckpointError, match=f"pip install {needed}:"):
        load(tmp_path)


def unquantized(folder: Path, name: str, dtype: Any = torch.bfloat16) -> None:
    path = folder / "model.safetensors"
    tensors = {n: t for n, t in st.load_file(path).items() if not n.startswith(name)}
    tensors[name] = torch.randn(128, 64).to(dtype)
    st.save_file(tensors, path, metadata={"format": "pt"})


def test_a_plain_weight_among_fp8_is_plain(tmp_path: Path) -> None:
    """Its module is a Linear, as its bytes are; so is the head, which config.json may not say."""
    OWN["fp8-blocks"](tmp_path)
    unquantized(tmp_path, "model.layers.1.mlp.up_proj.weight")
    model = load(tmp_path)
    assert type(model.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert {n: raw(t) for n, t in model.state_dict().items()} == stored(tmp_path)
    assert torch.equal(logits(model), logits(reference(tmp_path)))


def test_a_quantized_weight_in_a_plain_module_is_refused(tmp_path: Path) -> None:
    """A module that config.json leaves out gets no packed bytes."""
    OWN["fp8-blocks"](tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    reconfigure(tmp_path, quantization_config={**config, "modules_to_not_convert": ["mlp.up_proj"]})
    with pytest.raises((StateDictMismatchError, UnsupportedCastError), match="up_proj"):
        load(tmp_path)
    reconfigure(tmp_path, quantization_config=None)
    path = tmp_path / "model.safetensors"
    tensors = {n.replace("_scale_inv", "_unknown"): t for n, t in st.load_file(path).items()}
    st.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(StateDictMismatchError, match=r"up_proj\.weight_unknown has no place"):
        load(tmp_path)  # scales of another library


def test_scales_that_do_not_fit_the_module_are_refused(tmp_path: Path) -> None:
    """Blocks of another size than config.json says: the file and the tensor are named."""
    OWN["fp8-blocks"](tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    reconfigure(tmp_path, quantization_config={**config, "weight_block_size": [16, 16]})
    with pytest.raises(CheckpointError, match="blocks do not divide") as caught:
        load(tmp_path)
    assert str(caught.value.tensor).endswith("_scale_inv")


# --- with the libraries ---------------------------------------------------------------------------


def same_state(found: Any, expected: Any) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        other = theirs[name]
        assert type(tensor) is type(other), name
        if hasattr(tensor, "qdata"):  # a class of torchao
            assert raw(tensor.qdata) == raw(other.qdata), name
            assert raw(tensor.scale) == raw(other.scale), name
        else:
            assert raw(tensor) == raw(other), name


@pytest.mark.slow
@pytest.mark.parametrize("files", ["one", "many"])
@pytest.mark.parametrize("name", MADE)
def test_gives_what_transformers_gives(tmp_path: Path, name: str, files: str) -> None:
    library, make = MADE[name]
    needs_library(library)
    make(tmp_path / "one")
    if files == "many":
        streamload.convert(
            tmp_path / "one", tmp_path / "many", max_shard_size="20kB", progress=False
        )
    folder = tmp_path / files
    found, expected = load(folder), reference(folder, device_map="cpu")
    if library != "gptqmodel":  # which repacks what it is given
        same_state(found, expected)
    same_modules(found, expected)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.streamload_report.resident_nbytes >= open_checkpoint(folder).nbytes
    if library in ("bitsandbytes", "compressed_tensors"):
        assert not verify(found.streamload_report, open_checkpoint(folder), found)
    if name.startswith(("nf4", "fp4")):  # by kernels, which sum in float32
        torch.testing.assert_close(logits(found), logits(expected), atol=0.01, rtol=0.01)
    else:
        assert torch.equal(logits(found), logits(expected))
    assert found.is_quantized == expected.is_quantized
    assert found.quantization_method == expected.quantization_method


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "int8", "pack-quantized"])
def test_is_saved_as_it_was_opened(tmp_path: Path, name: str) -> None:
    library, make = MADE[name]
    needs_library(library)
    make(tmp_path / "in")
    load(tmp_path / "in").save_pretrained(tmp_path / "out")
    assert stored(tmp_path / "out") == stored(tmp_path / "in")


@pytest.mark.slow
def test_weights_of_bitsandbytes_are_not_copied(tmp_path: Path) -> None:
    needs_library("bitsandbytes")
    MADE["nf4"][1](tmp_path)
    model = load(tmp_path)
    module = model.model.layers[0].mlp.up_proj
    assert type(module.weight).__name__ == "Params4bit"
    assert module.weight.quant_state is module.quant_state
    assert module.weight.quant_state.shape == (128, 64)
    report = model.streamload_report
    assert report.resident_nbytes < 1.05 * open_checkpoint(tmp_path).nbytes


def _changed(name: str, tensor: Any) -> Any:
    """Another tensor of the same form."""
    if ".quant_state." in name:
        said = json.loads(bytes(tensor.tolist()))
        said |= {"nested_offset": said["nested_offset"] * 1.5} if "nested_offset" in said else {}
        return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return tensor.flip(0) if tensor.dim() and "quant_map" not in name else tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "nf4", "nf4-nested"])
@pytest.mark.parametrize("before", ["nothing", "computed", "interrupted"])
def test_weights_of_bitsandbytes_are_loaded_once_more(
    tmp_path: Path, name: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, with another checkpoint's values, scales and means."""
    needs_library("bitsandbytes")
    MADE[name][1](tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    tensors = st.load_file(tmp_path / "b" / "model.safetensors")
    changed = {n: _changed(n, t) for n, t in tensors.items()}
    st.save_file(changed, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    model, expected = load(tmp_path / "a"), logits(load(tmp_path / "b"))
    given: dict[str, Any] = {"chunk_nbytes": 4096, "threads": 1, "progress": False}
    if before == "computed":
        assert not torch.equal(logits(model), expected)
    elif before == "interrupted":
        finish, calls = ModelTarget.finish, count()

        def interrupt(target: ModelTarget, indices: Any) -> None:
            if next(calls) == 2:
                raise KeyboardInterrupt
            finish(target, indices)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(ModelTarget, "finish", interrupt)
            streamload.load_state_dict(model, tmp_path / "b", **given)
        with pytest.raises((DeviceError, AttributeError)):
            logits(model)
    streamload.load_state_dict(model, tmp_path / "b", **given)
    assert torch.equal(logits(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_floats_are_no_weights_of_bitsandbytes(tmp_path: Path, name: str, dtype: Any) -> None:
    """The line of the refusal loads them into a new model; the old one keeps its values."""
    needs_library("bitsandbytes")
    MADE[name][1](tmp_path / "a")
    model = load(tmp_path / "a")
    before = logits(model)
    streamload.convert(tmp_path / "a", tmp_path / "b", dtype="float16", progress=False)
    with pytest.raises(StateDictMismatchError) as caught:
        streamload.load_state_dict(model, tmp_path / "b", dtype=dtype, progress=False)
    assert torch.equal(logits(model), before)
    names = {"streamload": streamload, "LlamaForCausalLM": transformers.LlamaForCausalLM}
    lines = str(caught.value).split("; ")
    (line,) = [each for each in lines if "; write " not in each and "write model = " in each]
    exec(line.partition("write ")[2], names)
    assert (logits(names["model"]) - before).norm() <= 0.02 * before.norm()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["float-quantized", "int-quantized", "pack-quantized"])
def test_another_dtype_is_computed_as_by_transformers(
    tmp_path: Path, name: str, dtype: str
) -> None:
    needs_library("compressed_tensors")
    MADE[name][1](tmp_path)
    found = logits(load(tmp_path, dtype=dtype))
    right = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    assert found.dtype is right.dtype is getattr(torch, dtype)
    assert (found - right).norm() <= 0.01 * right.norm()


@pytest.mark.slow
def test_float8_of_torchao_in_another_dtype_is_refused(tmp_path: Path) -> None:
    """By tensor, before a byte moves, with a line that loads it; torch raised in the first pass."""
    needs_library("torchao")
    MADE["torchao-float8"][1](tmp_path)
    with pytest.raises(CheckpointError, match=r"_proj.weight.*found float32") as caught:
        load(tmp_path, dtype="float32")
    said = re.search(r"write (dtype=[\w\"]+)", str(caught.value))
    assert said is not None
    assert torch.equal(logits(eval(f"load(tmp_path, {said[1]})")), logits(load(tmp_path)))


@pytest.mark.slow
def test_a_weight_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    """config.json gives its module quantised weights: the bytes would mean something else."""
    needs_library("bitsandbytes")
    MADE["nf4"][1](tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    unquantized(tmp_path, name)
    with pytest.raises(CheckpointError, match="and it is not: expected uint8") as caught:
        load(tmp_path)
    assert caught.value.tensor == name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "int8", "pack-quantized", "float-quantized", "fp8-blocks"])
def test_a_tied_head_need_not_be_named(tmp_path: Path, name: str) -> None:
    """It has no tensor, and computes with the embedding, though nothing says to skip it."""
    library, make = MADE.get(name, ("transformers", OWN.get(name)))
    needs_library(library)
    make(tmp_path)
    st.save_file(
        {
            n: t
            for n, t in st.load_file(tmp_path / "model.safetensors").items()
            if n != "lm_head.weight"
        },
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    keys = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")
    named = {**said, **{key: ["lm_head"] for key in keys if key in said}}
    reconfigure(tmp_path, tie_word_embeddings=True, quantization_config=named)
    expected = logits(load(tmp_path))
    unnamed = {**said, **{key: [] for key in keys if key in said}}
    reconfigure(tmp_path, quantization_config=unnamed)
    model = load(tmp_path)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), expected)


@pytest.mark.slow
def test_a_packed_weight_in_a_plain_module_is_refused(tmp_path: Path) -> None:
    """A module that config.json leaves out of what bitsandbytes has gets no packed bytes."""
    needs_library("bitsandbytes")
    MADE["nf4"][1](tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    skipped = {**config, "llm_int8_skip_modules": ["lm_head", "up_proj"]}
    reconfigure(tmp_path, quantization_config=skipped)
    with pytest.raises(StateDictMismatchError, match=r"up_proj\.weight\.absmax"):
        load(tmp_path)


@pytest.mark.slow
def test_asymmetric_groups_are_opened(tmp_path: Path) -> None:
    """Packed zero points, which transformers 5.23 refuses by their shape, are dequantised right."""
    needs_library("compressed_tensors")
    torch.manual_seed(1)
    compressed({**_GROUPS, "symmetric": False})(tmp_path / "in")
    model = load(tmp_path / "in")
    assert {n: raw(t) for n, t in model.state_dict().items()} == stored(tmp_path / "in")
    plain(tmp_path / "plain")
    expected = logits(reference(tmp_path / "plain")).float()
    assert (
        torch.nn.functional.cosine_similarity(logits(model).float(), expected, dim=-1).min() > 0.97
    )


@pytest.mark.slow
def test_what_is_decompressed_at_once_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a module is of another class, compressed-tensors inflates the model: the plan says."""
    needs_library("compressed_tensors")
    from streamload.transformers.quantizers import compressed_tensors as packed_compressed

    MADE["int-quantized"][1](tmp_path)
    kept = load(tmp_path)
    assert any("compressed weights stay packed" in n for n in kept.streamload_report.notes)
    monkeypatch.setattr(packed_compressed, "_KINDS", (torch.nn.Embedding,))
    model = load(tmp_path)
    assert any("decompresses the model" in note for note in model.streamload_report.notes)
    assert torch.equal(logits(model), logits(kept))
    with pytest.raises(PlanInfeasibleError):
        load(tmp_path, budget=model.streamload_report.resident_nbytes + 8192)


@pytest.mark.slow
def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    needs_library("bitsandbytes")
    MADE["nf4"][1](tmp_path)
    reconfigure(tmp_path, intermediate_size=256)
    with pytest.raises(StateDictMismatchError, match=r"up_proj\.weight.*\[256, 64\].*\[128, 64\]"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("scales", ["float32", "bfloat16", "exponents", "float8_e8m0fnu", "one"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((300, 512), (128, 128)),
        ((70, 64), (128, 128)),
        ((100, 96), (32, 32)),
        ((40, 160), (16, 160)),
        ((48, 144), (48, 48)),
    ],
)
def test_products_with_fp8_are_within_rounding(
    dtype: Any, scales: str, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    from streamload.transformers.quantizers.fp8 import dequantized, multiplied, operand

    torch.manual_seed(0)
    grid = tuple(-(-n // each) for n, each in zip(shape, block, strict=True))
    values = (torch.randn(shape) * 10).to(dtype)
    exponents = torch.randint(110, 124, grid, dtype=torch.uint8)
    scale = {"one": torch.rand(()), "exponents": exponents}.get(scales, torch.rand(grid))
    if scales == "float8_e8m0fnu":
        if not hasattr(torch, scales):
            pytest.skip("this torch has no dtype of exponents")
        scale = exponents.view(torch.float8_e8m0fnu)
    elif scales == "bfloat16":
        scale = scale.to(torch.bfloat16)
    weight = dequantized(values, scale, block, torch.float32)
    of = operand(values, scale, block)
    assert (of is None) == (block == (48, 48))
    if of is not None:
        assert torch.equal(decode(of, torch.float32), weight)
        found = torch.empty(10, shape[1])
        without_kernel(of.between(20, 30), found)
        assert torch.equal(found, weight[20:30])
        rounded = dequantized(values, scale, block, torch.bfloat16)
        assert torch.equal(decode(of, torch.bfloat16), rounded)
        bias = torch.randn(shape[0])
        for x in (torch.randn(1, shape[1]), torch.randn(3, shape[1], dtype=torch.bfloat16)):
            assert worst(multiplied(x, values, scale, block), x, weight) < 1
            assert worst(multiplied(x.float(), values, scale, block, bias), x, weight, bias) < 1
    many = torch.randn(9, shape[1])
    assert worst(multiplied(many, values, scale, block), many, weight) < 1


def test_an_exponent_of_nan_makes_its_block_nan() -> None:
    from streamload.transformers.quantizers.fp8 import operand

    if not hasattr(torch, "float8_e8m0fnu"):
        pytest.skip("this torch has no dtype of exponents")
    values = torch.ones(4, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 255], [0, 127]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    of = operand(values, scale, (2, 32))
    assert of is not None
    found, other = decode(of, torch.float32), torch.empty(4, 64)
    without_kernel(of, other)
    for each in (found, other):
        assert each[:2, 32:].isnan().all() and (each[:2, :32] == 1).all()
        assert (each[2:, :32] == 2.0**-127).all()


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-cut-blocks", "fp8-tensor"])
def test_fp8_compiles_to_one_graph(tmp_path: Path, name: str) -> None:
    OWN[name](tmp_path)
    module = load(tmp_path).model.layers[0].mlp.up_proj.requires_grad_(False)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for tokens in (1, 5):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        assert torch.equal(compiled(x), module(x))
        compiled(x).sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_experts_multiply_a_few_tokens_as_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from streamload.devices.torch import product
    from streamload.transformers.quantizers import fp8 as packed

    if name == "fp8":
        sizes = {**MOE, "num_experts": 4, "moe_intermediate_size": 32}
        fp8((32, 32), "Qwen3Moe", **sizes)(tmp_path)
    else:
        OWN[name](tmp_path)
    model, ids = load(tmp_path), torch.tensor([[3, 1]])
    with torch.no_grad():
        expected = reference(tmp_path)(ids).logits

        def refused(*args: Any) -> Any:
            raise AssertionError("dequantised")

        monkeypatch.setattr(packed, "dequantized", refused)
        monkeypatch.setattr(product, "decode", refused)
        found = model(ids).logits
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_an_expert_of_mxfp4_is_a_matrix(tmp_path: Path) -> None:
    """Products are within rounding; other functions see the matrix that transformers makes."""
    OWN["mxfp4"](tmp_path)
    experts = load(tmp_path).model.layers[0].mlp.experts
    blocks, scales = experts.gate_up_proj_blocks[2:3], experts.gate_up_proj_scales[2:3]
    weight = convert_moe_packed_tensors(blocks, scales)[0]
    matrix = experts.gate_up_proj[torch.tensor(2)]
    assert (matrix.shape, matrix.dtype) == (weight.shape, weight.dtype)
    for tokens in (1, 3, 7):
        x = torch.randn(tokens, len(weight), dtype=torch.bfloat16, requires_grad=True)
        y = x @ matrix
        assert worst(y, x, weight.T) < 1
        y.sum().backward()
        assert torch.allclose(x.grad, weight.sum(1).expand_as(x), rtol=0.02, atol=0.02)
    assert type(matrix) is Deferred
    assert torch.equal(matrix, weight)
    assert type(matrix) is torch.Tensor
    assert torch.equal(experts.gate_up_proj[2].T[1], weight.T[1])
    with pytest.raises(IndexError):
        experts.gate_up_proj[4]
