"""`offload` of quantised checkpoints: what is stored streams, and computes as when it is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_quantized_helpers as stored

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import (
    OffloadError,
    PlanInfeasibleError,
    StateDictMismatchError,
    StreamloadError,
)

quiet = stored.quiet  # a fixture

#: Names of checkpoints that no library is needed for, and of those that need one.
_OWN = [*stored.OWN]
_MADE = [name for name in stored.MADE if stored.MADE[name][0] != "gptqmodel"]


def _make(name: str, folder: Path) -> None:
    if name in stored.OWN:
        stored.OWN[name](folder)
        return
    library, make = stored.MADE[name]
    stored.needs_library(library)
    make(folder)


def _least(path: Path) -> int:
    refused, accepted = 0, 3 * open_checkpoint(path).nbytes
    while accepted - refused > 64:
        budget = (refused + accepted) // 2
        try:
            stored.load(path, budget=budget, offload=True).streamload_offload.close()
            accepted = budget
        except PlanInfeasibleError:
            refused = budget
    return accepted


@pytest.mark.parametrize(
    "name", [*_OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in _MADE)]
)
def test_stored_weights_stream_and_compute_as_when_they_are_loaded(
    name: str, tmp_path: Path
) -> None:
    _make(name, tmp_path)
    resident = stored.load(tmp_path)
    expected, least = stored.logits(resident), _least(tmp_path)
    packed = {info.nbytes for info in open_checkpoint(tmp_path).tensors.values()}
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = torch.arange(5)[None]
    for budget in (least, int(1.2 * least), 4 * least):
        model = stored.load(tmp_path, budget=budget, offload=True)
        offloaded = model.streamload_offload
        plan = offloaded.plan
        if budget == least:
            assert {"model.layers.0", "model.layers.1"} <= {*plan.residency.streams}
            assert plan.residency.slots == 1
            layers = [n for n in open_checkpoint(tmp_path).tensors if ".layers." in n]
            nbytes = sum(open_checkpoint(tmp_path).tensors[n].nbytes for n in layers)
            assert nbytes <= plan.residency.pass_nbytes <= nbytes + 2 * max(packed)
        for _ in range(3):
            assert torch.equal(stored.logits(model), expected), budget
        found = model.generate(ids, **asked, attention_mask=torch.ones_like(ids))
        wanted = resident.generate(ids, **asked, attention_mask=torch.ones_like(ids))
        assert torch.equal(found, wanted)
        assert model.is_quantized == resident.is_quantized
        notes = model.streamload_report.notes
        assert {*resident.streamload_report.notes} <= {*notes}
        offloaded.close()
    again = stored.load(tmp_path, budget=least, offload=True)
    again.streamload_offload.close()
    with pytest.raises(StreamloadError, match="close"):
        stored.logits(again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "fp4", "int8"])
def test_what_bitsandbytes_changes_of_a_weight_goes_with_the_call(
    name: str, tmp_path: Path
) -> None:
    """Where it replaces weights (a CPU with AVX512-BF16), or keeps them in a state, too."""
    _make(name, tmp_path)
    model = stored.load(tmp_path, budget=_least(tmp_path), offload=True)
    module, seen = model.model.layers[0].mlp.up_proj, []
    module.register_forward_hook(lambda own, given, out: seen.append(own.weight.shape))
    stored.logits(model)
    assert getattr(module, "quant_state", None) is None
    assert getattr(module, "state", None) is None or module.state.CB is None
    assert seen == [module.weight.shape]  # the stored one again: nothing repacked stays
    model.streamload_offload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_biases_that_bitsandbytes_casts_are_as_stored_in_the_next_pass(
    name: str, tmp_path: Path
) -> None:
    """It puts other data in a bias that has another dtype than what it is added to."""
    library, _ = stored.MADE[name]
    stored.needs_library(library)
    asked = {"load_in_8bit": True} if name == "int8" else {"load_in_4bit": True}
    make = stored.by_transformers(
        lambda: transformers.BitsAndBytesConfig(**asked), attention_bias=True, mlp_bias=True
    )
    make(tmp_path)
    state = stored.load(tmp_path).state_dict()
    assert {state[name].dtype for name in state if name.endswith("bias")} == {torch.bfloat16}
    load: dict[str, Any] = {"dtype": {"*.bias": "float32", "*": "bfloat16"}}
    expected = stored.logits(stored.load(tmp_path, **load))
    model = stored.load(tmp_path, budget=_least(tmp_path) + 20_000, offload=True, **load)
    assert model.streamload_offload.plan.residency.streams
    for _ in range(3):
        assert torch.equal(stored.logits(model), expected)
    model.streamload_offload.close()


# --- dequantised on the way -----------------------------------------------------------------------


def _plain(folder: Path) -> Any:
    """A model whose weights are not quantised, of a checkpoint whose weights are."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-cut-blocks", "fp8-tensor", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_are_dequantized_at_every_pass(name: str, dtype: str, tmp_path: Path) -> None:
    stored.OWN[name](tmp_path)
    _dequantized(tmp_path, dtype)


@pytest.mark.parametrize("format", ["nf4", "nf4-nested", "bitsandbytes-int8", "int8"])
def test_what_convert_quantized_is_dequantized_at_every_pass(format: str, tmp_path: Path) -> None:
    stored.plain(tmp_path / "plain")
    streamload.convert(tmp_path / "plain", tmp_path / "small", quant=format, progress=False)
    _dequantized(tmp_path / "small", "bfloat16")


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "int8", "nf4", "nf4-nested"])
def test_codes_stream_into_modules_that_hold_them(format: str, tmp_path: Path) -> None:
    stored.plain(tmp_path / "plain")
    streamload.convert(tmp_path / "plain", tmp_path / "small", quant=format, progress=False)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    options: dict[str, Any] = {"device": "cpu", "progress": False}
    report = streamload.load_state_dict(model, tmp_path / "plain", quant=format, **options)
    expected, budget = stored.logits(model), int(0.75 * report.resident_nbytes)
    with streamload.offload(model, tmp_path / "small", budget=budget, **options) as offloaded:
        assert len(offloaded.plan.residency.streams) == 2
        for _ in range(3):
            assert torch.equal(stored.logits(model), expected)


def _dequantized(path: Path, dtype: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "progress": False}
    resident = _plain(path)
    report = streamload.load_state_dict(resident, path, **options)
    expected, whole = stored.logits(resident), report.resident_nbytes
    streamed = 0
    for share in (0.7, 0.85, 1.1):
        model = _plain(path)
        try:
            offloaded = streamload.offload(model, path, budget=int(share * whole), **options)
        except PlanInfeasibleError:
            continue
        with offloaded:
            streamed += bool(offloaded.plan.residency.streams)
            for _ in range(2):
                assert torch.equal(stored.logits(model), expected)
    assert streamed or "GptOss" in type(resident).__name__


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_weights_that_are_repacked_when_they_are_loaded_are_refused(
    name: str, tmp_path: Path
) -> None:
    _make(name, tmp_path)
    with pytest.raises(OffloadError, match=r"gptqmodel repacks all weights.*convert IN OUT"):
        stored.load(tmp_path, budget="100kB", offload=True)


@pytest.mark.slow
def test_a_model_that_is_decompressed_at_once_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compressed-tensors would put the whole model in the place of what streams."""
    _make("int-quantized", tmp_path)
    from streamload.transformers.quantizers import compressed_tensors as packed_compressed

    monkeypatch.setattr(packed_compressed, "_KINDS", (torch.nn.Embedding,))
    with pytest.raises(OffloadError, match=r"decompresses all of the model.*--dtype bfloat16"):
        stored.load(tmp_path, budget="80kB", offload=True)


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_stored_weights_that_plain_modules_cannot_have_name_what_opens_them(
    name: str, tmp_path: Path
) -> None:
    """The call that makes the modules of the checkpoint's quantiser, and offloads them."""
    stored.MADE[name][1](tmp_path)
    line = re.escape(f"from_pretrained('{tmp_path}', model_class=LlamaForCausalLM, offload=True)")
    with pytest.raises(StateDictMismatchError, match=line.replace("'", "['\"]")):
        streamload.offload(_plain(tmp_path), tmp_path, device="cpu", budget="100kB")


def test_quantizing_on_the_way_names_what_to_write(tmp_path: Path) -> None:
    """Every pass would read the full weights: the checkpoint is quantised once, and offloaded."""
    stored.plain(tmp_path)
    line = "streamload convert IN OUT --quant"
    with pytest.raises(ValueError, match=f"quant: .*{line} FORMAT"):
        stored.load(tmp_path, offload=True, quant="nf4")


@pytest.mark.slow
def test_quantizing_into_modules_of_bitsandbytes_names_what_to_write(tmp_path: Path) -> None:
    stored.needs_library("bitsandbytes")
    stored.plain(tmp_path)
    asked = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    line = re.escape('"streamload convert IN OUT --quant nf4"')
    with pytest.raises(OffloadError, match=f"quantization_config= quantises on the way.*{line}"):
        stored.load(tmp_path, offload=True, quantization_config=asked)
