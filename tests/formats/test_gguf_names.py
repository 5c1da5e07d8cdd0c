"""Names of tensors and settings, GGUF's and Hugging Face's: held against gguf-py's tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import transformers

from streamload.core.tensors import RowTranspose
from streamload.formats.gguf.architectures import ARCHITECTURES, OF_MODEL
from streamload.formats.gguf.names import (
    ROPE_FREQS,
    config_of,
    is_computed,
    llama3_factors,
    llama3_scaling,
    metadata_of,
)

_SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
_ROPE = {"rope_theta": 5e5, "factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0}
_YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0} | {
    "original_max_position_embeddings": 512
}
_LLAMA3 = _ROPE | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _model(model_type: str, **more: Any) -> transformers.PreTrainedModel:
    small = _SMALL | {"intermediate_size": 128, "num_key_value_heads": 2}
    if model_type == "gpt2":
        small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96}
    more = {"pad_token_id": 0} | more
    config = transformers.AutoConfig.for_model(model_type, **small, **more)
    with __import__("torch").device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", OF_MODEL)
def test_all_names_go_to_gguf_as_in_its_package_and_back(model_type: str) -> None:
    gguf = pytest.importorskip("gguf")
    architecture = OF_MODEL[model_type]
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture.name)
    map_of = gguf.get_tensor_name_map(kind, 2)
    names = [name for name in _model(model_type).state_dict() if not is_computed(name)]
    for name in [name for name in names if ".experts." in name]:  # of one each, in files
        names.remove(name)
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        names += [f"{name.rpartition('.')[0]}.1.{part}.weight" for part in parts]
    if model_type == "gemma2":  # which is always tied
        names.remove("lm_head.weight")
    assert len(names) > 10
    for name in names:
        of_all = name.replace(".experts.1.", ".experts.")
        theirs = map_of.get_name(of_all, try_suffixes=(".weight", ".bias"))
        assert architecture.to_gguf(name) == theirs
        back = architecture.to_hugging_face(theirs)
        assert back is not None
        assert back.format(1) == name
        bare = name.removeprefix(architecture.prefix)
        if bare != name:
            assert architecture.to_gguf(bare) == theirs


@pytest.mark.parametrize("name", ["blk.00.attn_q.weight", "blk.x.attn_q.weight", "attn_q", "", "."])
def test_names_that_are_not_known_stay(name: str) -> None:
    assert all(one.to_hugging_face(name) is None for one in ARCHITECTURES.values())


def test_rows_are_interleaved_as_converters_do() -> None:
    llama = ARCHITECTURES["llama"]
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for name, heads in (("blk.3.attn_q.weight", 4), ("blk.3.attn_k.weight", 2)):
        there = llama.interleaved(name, 32, config)
        assert there == RowTranspose(heads, 2, 16 // heads)
        rows = np.arange(32)
        theirs = rows.reshape(heads, 2, 16 // heads).swapaxes(1, 2).reshape(32)
        assert (_moved(rows, there) == theirs).all()
    assert llama.interleaved("blk.3.attn_v.weight", 32, config) is None
    assert ARCHITECTURES["qwen2"].interleaved("blk.3.attn_q.weight", 32, config) is None
    with pytest.raises(ValueError, match="30 rows are not 4 heads"):
        llama.interleaved("blk.3.attn_q.weight", 30, config)


def _moved(rows: np.ndarray, order: RowTranspose | None) -> np.ndarray:
    assert order is not None
    return rows.reshape(order.groups, order.outer, order.inner).swapaxes(1, 2).reshape(-1)


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}),
        ("llama", {"head_dim": 32, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": _LLAMA3}),
        ("llama", {"rope_parameters": _YARN}),
        ("qwen2", {"rope_parameters": _YARN | {"attention_factor": 1.5, "beta_fast": 32.0}}),
        ("mistral", {"sliding_window": 4096, "rope_theta": 1e6}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("gpt2", {"n_inner": 100, "layer_norm_epsilon": 1e-6}),
    ],
)
def test_settings_go_to_gguf_and_back(model_type: str, more: dict[str, Any]) -> None:
    model = _model(model_type, **more)
    before = model.config.to_dict()
    metadata = metadata_of(before)
    architecture = OF_MODEL[model_type]
    shapes = {
        architecture.to_gguf(name) or name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not (before["tie_word_embeddings"] and name == "lm_head.weight")
    }
    config = config_of(
        {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in metadata.items()},
        shapes,
        {ROPE_FREQS: np.float32(llama3_factors(before) or []).tolist()},
    )
    after = transformers.AutoConfig.for_model(**config).to_dict()
    same = {*architecture.settings.values(), "rope_parameters", "tie_word_embeddings", "mlp_bias"}
    for key in same - {"rope_theta", "sliding_window"}:
        if before.get(key) is not None:
            assert after.get(key) == before[key], key
    assert (after.get("sliding_window") or None) == (before.get("sliding_window") or None)


@pytest.mark.parametrize(
    "more", [{}, {"attention_factor": 1.5}, {"mscale": 0.5, "mscale_all_dim": 2.0}]
)
def test_yarn_scales_rotated_elements_as_transformers_does(more: dict[str, Any]) -> None:
    """llama.cpp multiplies its own factor, 1 + 0.1 ln(factor), with the one that a file says."""
    config = _model("llama", rope_parameters=_YARN | more).config
    _, expected = transformers.modeling_rope_utils._compute_yarn_parameters(config, "cpu")
    stated = metadata_of(config.to_dict()).get("llama.rope.scaling.attn_factor", 1.0)
    assert stated * (1 + 0.1 * math.log(4)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        (_ROPE, "high_freq_factor is a number above 0, not None"),
        (_LLAMA3 | {"factor": "8"}, "factor is a number above 0, not '8'"),
        (_LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor is less than high_freq_factor"),
        ({"rope_type": "linear"}, "factor is a number above 0, not None"),
        (_YARN | {"truncate": False}, "no truncate"),
        (_YARN | {"beta_fast": 24.0}, "beta_fast 32 for these models"),
        (_LLAMA3 | {"partial_rotary_factor": 0.5}, "no partial_rotary_factor"),
    ],
)
def test_scalings_that_are_invalid(rope: dict[str, Any], said: str) -> None:
    """A setting that is missing, or that llama.cpp does not compute, is named."""
    config = _model("llama").config.to_dict() | {"rope_parameters": rope}
    with pytest.raises(ValueError, match=said):
        llama3_factors(config)
        metadata_of(config)


@pytest.mark.parametrize("value", [-5, 131072.0, "128", True, 2**32])
def test_counts_are_whole_numbers(value: object) -> None:
    """llama.cpp opens no file whose counts have another type."""
    config = _model("llama").config.to_dict() | {"max_position_embeddings": value}
    with pytest.raises(ValueError, match="max_position_embeddings is a whole number, not"):
        metadata_of(config)


@pytest.mark.parametrize("value", [-1, 0, 1e308, 10**400, "1", True])
def test_numbers_are_above_0_and_float32(value: object) -> None:
    """GGUF has no other."""
    config = _model("llama").config.to_dict() | {"rms_norm_eps": value}
    with pytest.raises(ValueError, match="rms_norm_eps is a number above 0, not"):
        metadata_of(config)


@pytest.mark.parametrize("value", [-1, [-1], 2**32, None, "2", True])
def test_tokens_that_are_none_are_left_out(value: object) -> None:
    """Some models state -1 for a token that they lack."""
    config = _model("llama").config.to_dict() | {"pad_token_id": value, "eos_token_id": [3, -1]}
    found = metadata_of(config)
    assert "tokenizer.ggml.padding_token_id" not in found
    assert found["tokenizer.ggml.eos_token_id"] == 3


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("gemma2", {"num_hidden_layers": None}, "num_hidden_layers is a number above 0, not None"),
        ("gemma3_text", {"hidden_size": "64"}, "hidden_size is a number above 0, not '64'"),
        ("gemma2", {"num_attention_heads": 0}, "num_attention_heads is a number above 0, not 0"),
        ("qwen2", {"max_window_layers": "x"}, "max_window_layers is a whole number, not 'x'"),
        ("phi3", {"original_max_position_embeddings": 1}, "is at least 2, not 1"),
        ("phi3", {"attention_factor": [1]}, r"attention_factor is a number above 0, not \[1\]"),
    ],
)
def test_settings_of_single_families_that_are_invalid(
    family: str, more: dict[str, Any], said: str
) -> None:
    long = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0], **more}
    config = _model("llama").config.to_dict() | {"model_type": family, **more}
    rope = {"rope_parameters": long} if family == "phi3" else {}
    with pytest.raises(ValueError, match=said):
        metadata_of(config | rope)


def test_what_gguf_has_no_key_for_is_refused() -> None:
    """A scaling or an architecture that GGUF cannot express is an error that names it."""
    config = _model("llama").config.to_dict()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="no scaling 'dynamic'"):
        metadata_of(config | {"rope_parameters": rope})
    with pytest.raises(ValueError, match="not 'opt'"):
        metadata_of({"model_type": "opt"})
    assert config_of({"general.architecture": "mamba"}, {}) == {}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3_are_those_of_transformers(factor: float) -> None:
    config = _model("llama", head_dim=128, rope_parameters=_LLAMA3 | {"factor": factor}).config
    made = llama3_factors(config.to_dict())
    scaled, _ = transformers.modeling_rope_utils._compute_llama3_parameters(config, "cpu")
    plain = 5e5 ** -(np.arange(64) / 64)
    assert made is not None
    np.testing.assert_allclose(plain / scaled.numpy(), made, rtol=1e-5)
    found = llama3_scaling(np.float32(made).tolist(), 5e5)
    assert found == {k: v for k, v in (_LLAMA3 | {"factor": factor}).items() if k != "rope_theta"}
    assert llama3_scaling([1.0] * 64, 5e5) is None
    assert llama3_scaling([math.pi] * 64, 5e5) is None


@pytest.mark.parametrize("context", [8, 64, 256, 4096, 131072, 2**20])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_factors_of_any_context_say_a_setting_that_makes_them(context: int, size: int) -> None:
    """Also of small models, and where no frequency is slow enough to have the whole factor."""
    rope = _LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": context}
    config = {"head_dim": size, "rope_parameters": rope}
    made = llama3_factors(config)
    assert made is not None
    if max(made) == 1:  # there is no scaling, in effect
        assert llama3_scaling(made, 1e4) is None
        return
    found = llama3_scaling(np.float32(made).tolist(), 1e4)
    again = llama3_factors({"head_dim": size, "rope_theta": 1e4, "rope_scaling": found})
    np.testing.assert_allclose(again, made, rtol=2e-5)
