"""What an offloaded model looks like: its methods, its weights, and who asks for them."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import typing
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import offloading_models as models
import pytest
import torch
import transformers as hf
from torch import nn

import streamload
from streamload.errors import OffloadError, PlanInfeasibleError
from streamload.transformers import from_pretrained

_TEXT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 64},
}
_BERT = {key: value for key, value in _TEXT.items() if key != "num_key_value_heads"}
_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}}
_QWEN = {"image_token_id": 255, "video_token_id": 254, "vision_start_token_id": 253}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
_MAMBA = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 256, "state_size": 8}
_SEQ2SEQ = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 256},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "bos_token_id": 1, "eos_token_id": 2},
}

#: By name, a class and its configuration, and whether it is tried with the slow tests only.
_FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any], bool]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _TEXT, False),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_TEXT, "head_dim": 16}, True),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _TEXT, True),
    "zamba2": (
        *("Zamba2ForCausalLM", "Zamba2Config"),
        {
            **_TEXT,
            **{"num_hidden_layers": 3, "num_key_value_heads": 4, "mamba_d_state": 8},
            **{"n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_headdim": 32, "chunk_size": 8},
            **{"layers_block_type": ["mamba", "mamba", "hybrid"], "num_mem_blocks": 1},
            **{"use_mem_eff_path": False, "attention_hidden_size": 128, "attention_head_dim": 32},
        },
        True,
    ),
    "bamba": (
        *("BambaForCausalLM", "BambaConfig"),
        {
            **_TEXT,
            **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
            **{"mamba_chunk_size": 8, "attn_layer_indices": [1, 3]},
        },
        True,
    ),
    "paligemma": (
        *("PaliGemmaForConditionalGeneration", "PaliGemmaConfig"),
        {
            "text_config": {"model_type": "gemma", "head_dim": 16, **_TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **_VISION},
            **{"projection_dim": 64, "hidden_size": 64, "image_token_index": 255},
        },
        True,
    ),
    "llava": (
        *("LlavaForConditionalGeneration", "LlavaConfig"),
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            **{"image_token_index": 255, "image_seq_length": 4},
        },
        False,
    ),
    "qwen2-vl": (
        *("Qwen2VLForConditionalGeneration", "Qwen2VLConfig"),
        {
            "text_config": {**_TEXT, **_MROPE},
            "vision_config": {
                **{"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, **_PATCHES}
            },
            **_QWEN,
        },
        True,
    ),
    "qwen2.5-vl": (
        *("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
        {
            "text_config": {**_TEXT, **_MROPE},
            "vision_config": {
                **{"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "window_size": 16},
                **{"intermediate_size": 64, "fullatt_block_indexes": [1], **_PATCHES},
            },
            **_QWEN,
        },
        True,
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_MAMBA, "pad_token_id": 0}, True),
    "jamba": (
        *("JambaForCausalLM", "JambaConfig"),
        {
            **_TEXT,
            **{"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4},
            **{"use_mamba_kernels": False, "mamba_d_state": 8, "mamba_expand": 2},
        },
        True,
    ),
    "led": (
        *("LEDForConditionalGeneration", "LEDConfig"),
        {
            **_SEQ2SEQ,
            **{"attention_window": [4, 4], "max_encoder_position_embeddings": 128},
            "max_decoder_position_embeddings": 128,
        },
        False,
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 32}, False),
    "modernbert": (
        *("ModernBertForMaskedLM", "ModernBertConfig"),
        {**_BERT, "cls_token_id": 1, "sep_token_id": 2},
        True,
    ),
    "xlnet": (
        *("XLNetLMHeadModel", "XLNetConfig"),
        {
            **{"d_model": 64, "n_layer": 4, "n_head": 4, "d_inner": 128, "vocab_size": 256},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
        True,
    ),
    "recurrent-gemma": (
        *("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig"),
        {**_TEXT, "lru_width": 64, "attention_window_size": 16, "head_dim": 16},
        True,
    ),
    "xlstm": (
        *("xLSTMForCausalLM", "xLSTMConfig"),
        {
            **{"hidden_size": 64, "embedding_dim": 64, "num_hidden_layers": 4, "num_blocks": 4},
            **{"vocab_size": 256, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 2},
            "qk_dim_factor": 1.0,  # transformers cannot compute others without Triton
        },
        True,
    ),
    "vits": (
        *("VitsModel", "VitsConfig"),
        {
            **{"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 64},
            **{"num_attention_heads": 2, "flow_size": 32, "spectrogram_bins": 33},
            **{"upsample_initial_channel": 32, "upsample_rates": [4, 4]},
            **{"upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3]},
            **{"resblock_dilation_sizes": [[1, 3]], "prior_encoder_num_flows": 2},
            **{"prior_encoder_num_wavenet_layers": 2, "duration_predictor_num_flows": 2},
            **{"posterior_encoder_num_wavenet_layers": 2, "wavenet_dilation_rate": 1},
        },
        True,
    ),
    "rwkv": (
        *("RwkvForCausalLM", "RwkvConfig"),
        {
            **{"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128},
            **{"num_hidden_layers": 4, "vocab_size": 256, "context_length": 64},
            **{"pad_token_id": 0, "eos_token_id": 2, "rescale_every": 2},
        },
        False,
    ),
}

_IDS = torch.randint(5, 200, (2, 9), generator=torch.Generator().manual_seed(1))
_IDS[0, :3] = 0  # padding


def _saved(name: str, folder: Path) -> Any:
    """Save a model with random weights, none of which is zero; returns its class."""
    kind, config, values, _ = _FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(hf, kind)(getattr(hf, config)(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder)
    return type(model)


def _offloaded(path: Path, kind: Any, **given: Any) -> Any:
    options = {"device": "cpu", "dtype": "float32", "model_class": kind, "offload": True, **given}
    budget = 1
    while True:
        try:
            return from_pretrained(path, budget=budget, **options)
        except PlanInfeasibleError as error:
            budget = max(error.needed_nbytes, budget + budget // 50)


def _passed(model: Any) -> Any:
    given = {"input_ids": _IDS, "attention_mask": (_IDS != 0).long()}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = _IDS
    if model.config.model_type == "rwkv":
        del given["attention_mask"]
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**given)[0]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * slow) for n, (*_, slow) in _FAMILIES.items()],
)
def test_passes_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    kind = _saved(name, tmp_path)
    theirs = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = _passed(theirs)
    model = _offloaded(tmp_path, kind)
    if name == "rwkv":  # it divides weights of its blocks from outside of these
        with pytest.raises(OffloadError) as refused:
            _passed(model)
        hint = str(refused.value).rpartition("stay=")[2]
        assert hint == (
            '["rwkv.blocks.*.attention.output.weight", "rwkv.blocks.*.feed_forward.value.weight"]'
        )
        model = _offloaded(tmp_path, kind, stay=eval(hint))
    assert model.streamload_offload.plan.residency.streams
    for _ in range(2):
        assert torch.equal(_passed(model), expected)
    if not model.can_generate():
        return
    mask = {"attention_mask": (_IDS != 0).long()}
    for given in ({}, mask if name != "rwkv" else {}):
        asked: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **given}
        assert torch.equal(model.generate(_IDS, **asked), theirs.generate(_IDS, **asked)), given


def test_images_reach_a_model_that_is_offloaded(tmp_path: Path) -> None:
    """`generate` takes what ``forward`` has by name, and nothing else."""
    kind = _saved("llava", tmp_path)
    theirs = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = _offloaded(tmp_path, kind)
    ids = torch.tensor([[1, 255, 255, 255, 255, 7, 8]])
    asked = {
        "pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
        **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False},
    }
    assert torch.equal(model.generate(ids, **asked), theirs.generate(ids, **asked))
    with pytest.raises(ValueError, match=r"not used by the model: \['pixel_value'\]"):
        model.generate(ids, pixel_value=1)


def test_logits_of_the_last_token_alone_are_computed(tmp_path: Path) -> None:
    model = _offloaded(tmp_path, _saved("llama", tmp_path))
    seen = []
    model.lm_head.register_forward_hook(lambda module, given, found: seen.append(found.shape[1]))
    model.generate(_IDS, attention_mask=(_IDS != 0).long(), max_new_tokens=2)
    assert seen == [1, 1]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, **rest: Any) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) * scale


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embedding(input=ids)
        for layer in self.layers[:3]:
            x = layer(x, scale=scale)
        found: torch.Tensor = self.layers[3].forward(x)
        return found


def _both(tmp_path: Path) -> tuple[Any, Any, Any]:
    """The model as it is, as it is offloaded, and its handle."""
    torch.manual_seed(0)
    plain = _Model().eval()
    path = models.save(plain, tmp_path / "model")
    model = _Model().eval()
    handle = streamload.offload(model, path, device="cpu", budget=9_000)
    assert len(handle.plan.residency.streams) == 4
    return plain, model, handle


def _looks(method: Any) -> dict[str, Any]:
    names = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__code__")
    unwrapped = inspect.unwrap(method)
    return {
        **{name: getattr(method, name) for name in (*names, "__defaults__", "__kwdefaults__")},
        "signature": inspect.signature(method),
        "arguments": inspect.getfullargspec(method),
        "hints": typing.get_type_hints(method),
        "source": inspect.getsource(method),
        "is a method": inspect.ismethod(method),
        "is one of its kind": isinstance(method, MethodType),
        "function": method.__func__,
        "its kind": isinstance(method.__func__, type(_Layer.forward)),
        "its signature": inspect.signature(method.__func__),
        "unwrapped": getattr(unwrapped, "__func__", unwrapped),
        "wrapped": hasattr(method, "__wrapped__"),
        "names": set(dir(method)),
    }


def test_methods_look_like_those_of_the_model_loaded(tmp_path: Path) -> None:
    plain, model, handle = _both(tmp_path)
    for name in ("", "layers.0", "embedding"):
        own, other = plain.get_submodule(name), model.get_submodule(name)
        assert _looks(other.forward) == _looks(own.forward)
        assert other.forward.__self__ is other
        assert other.forward == MethodType(type(own).forward, other)
        assert repr(other.forward) == repr(MethodType(type(own).forward, other))
        kept = weakref.WeakMethod(other.forward)
        gc.collect()
        found = kept()
        assert found == other.forward
        assert hash(found) == hash(other.forward)
        assert inspect.signature(found) == inspect.signature(own.forward)
        assert type(other) is type(own)
    for name in ("state_dict", "load_state_dict", "_apply"):
        assert inspect.signature(getattr(model, name)) == inspect.signature(getattr(plain, name))
        assert getattr(model, name).__doc__ == getattr(plain, name).__doc__
    x = torch.arange(4)
    assert torch.equal(weakref.WeakMethod(model.forward)()(x), plain(x))
    assert handle.report.passes == 1
    assert not hasattr(model, "save_pretrained")
    for (name, own), (_, other) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert isinstance(other, nn.Parameter), name
        assert (own.shape, own.dtype, own.requires_grad) == (
            *(other.shape, other.dtype, other.requires_grad),
        )
    handle.close()
    assert "forward" not in model.__dict__
    assert "forward" not in model.layers[0].__dict__


def test_methods_compute_as_those_of_the_model_loaded(tmp_path: Path) -> None:
    plain, model, handle = _both(tmp_path)
    ids, x = torch.tensor([[1, 2, 3]]), torch.randn(2, 32)
    with handle, torch.no_grad():
        assert torch.equal(model(ids, scale=2.0), plain(ids, scale=2.0))
        assert torch.equal(model.layers[1].forward(x), plain.layers[1](x))
        function = model.layers[1].forward.__func__
        assert torch.equal(function(model.layers[1], x), plain.layers[1](x))
        assert torch.equal(function(plain.layers[2], x), plain.layers[2](x))
        assert torch.equal(copy.copy(model.layers[1])(x), plain.layers[1](x))
        with pytest.raises(TypeError, match=r"_Layer\.forward\(\) missing 1 required"):
            model.layers[1]()


def test_copies_and_pickles_are_refused_by_name(tmp_path: Path) -> None:
    plain, model, handle = _both(tmp_path)
    refused = "a model that is offloaded cannot be"
    with handle:
        for each in (model, model.layers[0], model.layers[0].forward, model.forward):
            with pytest.raises(OffloadError, match=refused):
                copy.deepcopy(each)
            for protocol in (2, pickle.HIGHEST_PROTOCOL):
                with pytest.raises(OffloadError, match=refused):
                    pickle.dumps(each, protocol)
            with pytest.raises(OffloadError, match=refused):
                torch.save(each, io.BytesIO())
    streamload.load_state_dict(model, tmp_path / "model", device="cpu")
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(torch.tensor([[1, 2]])), plain(torch.tensor([[1, 2]])))


@pytest.mark.parametrize("trains", [True, False])
def test_weights_say_of_gradients_what_they_said(trains: bool, tmp_path: Path) -> None:
    """A matrix product takes another kernel for a weight that can be trained."""
    torch.manual_seed(0)
    build = lambda: _Products().eval().requires_grad_(trains)  # noqa: E731
    path = models.save(build(), tmp_path / "model")
    resident, model = build(), build()
    streamload.load_state_dict(resident, path, device="cpu")
    budget = models.least_budget(build, path)
    x = torch.randn(3, 5, 7, 48).transpose(1, 2)
    with torch.no_grad(), streamload.offload(model, path, device="cpu", budget=budget) as handle:
        assert handle.plan.residency.streams
        assert {p.requires_grad for p in model.parameters()} == {trains}
        with torch.autocast("cpu", torch.bfloat16):
            expected = resident(x)
            assert all(torch.equal(model(x), expected) for _ in range(2))
        assert torch.equal(model(x), resident(x))


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 48))
        self.seen: set[bool] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(self.weight.requires_grad)
        return x @ self.weight


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Product() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        assert len({frozenset(layer.seen) for layer in self.layers}) == 1
        return x
