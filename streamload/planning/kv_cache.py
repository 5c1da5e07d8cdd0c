"""The KV cache that a model needs to run, from its ``config.json``; pure arithmetic.

For each token, a layer with attention keeps a key and a value of ``head_dim`` elements for each of
its key-value heads (grouped-query attention, https://arxiv.org/abs/2305.13245):

    elements of a layer = 2 * batch * tokens * num_key_value_heads * head_dim

with ``tokens`` the context, also where the layer attends to a window only
(https://arxiv.org/abs/2310.06825): see below. Under multi-head latent attention (section 2.1 of
https://arxiv.org/abs/2405.04434) it keeps one compressed row for all heads instead:

    elements of a layer = batch * tokens * (kv_lora_rank + qk_rope_head_dim)

These are the tensors of transformers' ``DynamicCache`` after a prompt of the whole context. A layer
with a window keeps a slice of what it was given then, and so all of it until the next token, with
which it shrinks to the window; ``StaticCache`` has room for the window alone. Any layer's tensors
are there twice for a moment when they grow: that is for ``reserve``, as activations are. The keys
and the rules for windows are those of the configuration classes of transformers 5.23, whose own
caches the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from streamload.core.dtypes import BF16, BY_NAME, F16, F32, F64, DType, DTypeLike, parse_dtype
from streamload.core.model_config import language_part, stated
from streamload.errors import CheckpointError

#: What models compute in, and so keep their cache in where nothing else is asked for.
COMPUTED_IN = frozenset({F16, BF16, F32, F64})


_MOST = 2**40  # of tokens or sequences: beyond it somebody has mistaken the unit


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """The cache to leave room for.

    Attributes:
        context: tokens of each sequence, at least 1.
        batch: sequences at once, at least 1.
        dtype: of the cache; None is that of the weights.
    """

    context: int
    batch: int = 1
    dtype: DType | None = None

    @classmethod
    def read(
        cls, context: int | None, batch: int, cache_dtype: DTypeLike | None
    ) -> CacheRequest | None:
        """Read the arguments of a load; None if no cache is requested.

        Raises:
            ValueError: one is invalid, or is given without ``context``.
        """
        for name, count in (("context", 1 if context is None else context), ("batch", batch)):
            if type(count) is not int or not 1 <= count <= _MOST:
                raise ValueError(f"{name} is a whole number from 1 to {_MOST}, not {count!r}")
        dtype = None if cache_dtype is None else parse_dtype(cache_dtype)
        if dtype is not None and (dtype.kind != "float" or dtype.bits % 8):
            raise ValueError(f"cache_dtype is a dtype of floats of whole bytes, not {dtype}")
        if context is not None:
            return cls(context, batch, dtype)
        if batch != 1 or dtype is not None:
            raise ValueError("batch and cache_dtype say how large a cache is: they need context")
        return None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        row: elements of each token in each of its tensors; () if it shares another layer's.
        window: the most tokens that it attends to, or None. It keeps more after a long prompt.
    """

    row: tuple[int, ...]
    window: int | None = None

    def elements(self, context: int, batch: int) -> list[int]:
        """Elements of each of its tensors."""
        return [elements * context * batch for elements in self.row]


@dataclass(frozen=True, slots=True)
class KvCache:
    """The cache of a model, layer by layer.

    Attributes:
        request: the cache to leave room for.
        layers: the cache of each layer of the language model, by its number.
        configured: the dtype that the configuration names, or None.
        notes: facts for users, one sentence each.
    """

    request: CacheRequest
    layers: tuple[LayerCache, ...]
    configured: DType | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], request: CacheRequest, *, path: object) -> KvCache:
        """Compute the cache of a model from its ``config.json``, empty if there is none.

        Raises:
            CheckpointError: there is no configuration, or the cache of its model is not known.
        """
        where = str(path)
        if not config:
            raise CheckpointError(
                where,
                "how large the KV cache is, config.json tells",
                expected="config.json beside the tensors, or the bytes of the cache as reserve=",
                found="none",
            )
        text = _Text.of(config, where)
        latent = text.kind in _LATENT
        row = _latent_row if latent else _row
        windows = _windows(text)
        shared = text.number("num_kv_shared_layers", least=0) if text.kind in _SHARING else 0
        layers = []
        for layer, key in enumerate(windows):
            one = text.at(layer, key)
            own = layer < len(windows) - shared
            window = None if key is None else one.number(key)
            layers.append(LayerCache(row(one) if own else (), window))
        return cls(
            request,
            tuple(layers),
            _configured(text.values) or _configured(config),
            (*([_expanded(text)] if latent else ()), *_held_whole(text, request, layers)),
        )


# --- the configuration ----------------------------------------------------------------------------

_MOST_LAYERS = 100_000  # bounds the list that a file can ask for

# fmt: off
_HEADS_OF_128 = (
    "afmoe", "cohere2_moe", "cwm", "ernie4_5", "glm", "glm4", "helium", "internlm3", "llama4_text",
    "minimax_m2", "ministral3", "qwen3", "qwen3_vl_text", "seed_oss",
)
# fmt: on
_KEYS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "num_kv_shared_layers",
)
#: By `_KEYS`, of models whose ``config.json`` may leave out all of them.
_HEADS: Mapping[str, tuple[int, ...]] = {
    "gemma": (28, 16, 16, 256),
    "gemma2": (26, 8, 4, 256),
    "gemma3_text": (26, 8, 4, 256),
    "gemma3n_text": (35, 8, 2, 256, 15),
    "gemma4_text": (30, 8, 4, 256, 0),
}
_LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
#: Defaults of transformers' classes, for keys that ``config.json`` may leave out.
_DEFAULTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        **{kind: {"head_dim": 128} for kind in _HEADS_OF_128},
        **{kind: dict(zip(_KEYS, row, strict=False)) for kind, row in _HEADS.items()},
        "llama": _LLAMA,
        "mistral": {**_LLAMA, "num_key_value_heads": 8},
        "vaultgemma": {"head_dim": 256},
        "gpt_oss": {"head_dim": 64},
    }
)
#: Models whose layers keep keys and values and nothing else. What is not here may keep another
#: state (Mamba, linear attention, an indexer of its own), and is refused.
# fmt: off
_BY_HEADS = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "bitnet", "bloom", "codegen", "cohere", "cohere2",
    "cohere2_moe", "ctrl", "cwm", "diffllama", "doge", "emu3_text_model", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granitemoe",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "llama",
    "llama4_text", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mpt", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3",
    "phi4_multimodal", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl",
    "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss",
    "smollm3", "stablelm", "starcoder2", "vaultgemma",
})
# fmt: on
#: Models with multi-head latent attention.
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "minicpm3", "youtu"})
#: Of `_BY_HEADS`: whose last layers may use the cache of others; who may have one key-value head.
_SHARING = frozenset({"gemma3n_text", "gemma4_text"})
_MULTI_QUERY = frozenset({"falcon", "gpt_bigcode"})


@dataclass(frozen=True, slots=True)
class _Text:
    """The configuration of a language model, or of one of its layers.

    Attributes:
        values: the keys and values.
        kind: its ``model_type``.
        where: the checkpoint, for errors.
    """

    values: Mapping[str, Any]
    kind: str
    where: str

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> _Text:
        """Find the language model's part; raises CheckpointError if its architecture is unknown."""
        values, kind = language_part(config)
        if kind not in _BY_HEADS | _LATENT or config.get("is_encoder_decoder"):
            raise _unknown(where, f"model_type {kind!r}")
        return cls(values, kind, where)

    def at(self, layer: int, window: str | None) -> _Text:
        """The configuration of one layer, whose heads may differ in some models."""
        other: dict[str, Any]
        given = self.values.get("per_layer_config")
        if isinstance(given, Mapping):
            # transformers writes the numbers with leading zeros
            number = str(layer).lstrip("0")
            found = (v for k, v in given.items() if str(k).lstrip("0") == number)
            other = {k: v for one in found if isinstance(one, Mapping) for k, v in one.items()}
        elif self.kind == "gemma4_text" and window is None:
            heads = self.values.get("num_global_key_value_heads")
            other = {"head_dim": self.values.get("global_head_dim", 512)}
            if heads is not None and self.values.get("attention_k_eq_v"):
                other |= {"num_key_value_heads": heads}
        else:
            return self
        return replace(self, values={**self.values, **other})

    def find(self, key: str) -> Any:
        """The value under a key or another name of it, or its default; None if there is none."""
        value = stated(self.values, key)
        return _DEFAULTS.get(self.kind, {}).get(key) if value is None else value

    def number(self, key: str, *, least: int = 1, most: int = 2**40) -> int:
        """A required whole number; raises CheckpointError if it is missing or something else."""
        value = self.find(key)
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(
                self.where,
                f"config.json does not tell how large the KV cache is: {key}",
                expected=f"a whole number from {least} to {most}",
                found="none" if value is None else repr(value)[:80],
            )
        return value


def _unknown(where: str, found: str) -> CheckpointError:
    return CheckpointError(
        where,
        "what this model keeps for each token is not known",
        expected="a model that keeps keys and values alone, or the bytes of its cache as reserve=",
        found=found,
    )


def _configured(config: Mapping[str, Any]) -> DType | None:
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = BY_NAME.get(name) if isinstance(name, str) else None
    return dtype if dtype in COMPUTED_IN else None


# --- one token ------------------------------------------------------------------------------------


def _row(text: _Text) -> tuple[int, int]:
    """Elements of the keys and of the values of one token."""
    heads = text.number("num_attention_heads")
    if text.find("head_dim") is None:
        length = text.number("hidden_size") // heads
    else:
        length = text.number("head_dim")
    # Falcon's second architecture keeps what a group of heads shares once for each of them
    if not text.values.get("new_decoder_architecture"):
        if text.kind in _MULTI_QUERY and text.values.get("multi_query", True):
            heads = 1
        elif text.find("num_key_value_heads") is not None:
            heads = text.number("num_key_value_heads")
    return heads * length, heads * length


def _latent_row(text: _Text) -> tuple[int, int]:
    """Elements of the compressed keys and values of one token, and of its rotary part."""
    return text.number("kv_lora_rank"), text.number("qk_rope_head_dim")


def _expanded(text: _Text) -> str:
    """A note: the cache of an engine that keeps keys and values of every head."""
    keys = text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim")
    whole = text.number("num_attention_heads") * (keys + text.number("v_head_dim"))
    return (
        "the KV cache is counted compressed, as latent attention has it: where keys and values of "
        f"every head are kept, it takes {whole / sum(_latent_row(text)):.0f} times as much"
    )


# --- windows --------------------------------------------------------------------------------------

_Rule = Callable[[_Text, int], bool]
_PATTERN = "sliding_window_pattern"


def _every(count: int) -> _Rule:
    """All layers but one of so many; ``sliding_window_pattern`` may state how many."""

    def windowed(text: _Text, layer: int) -> bool:
        given = text.find(_PATTERN)
        return (layer + 1) % (count if given is None else text.number(_PATTERN)) != 0

    return windowed


def _from_layer(text: _Text, layer: int) -> bool:
    used = bool(text.values.get("use_sliding_window"))
    return used and layer >= text.number("max_window_layers", least=0)


def _with_positions(text: _Text, layer: int) -> bool:
    listed = text.values.get("no_rope_layers")
    if isinstance(listed, Sequence) and len(listed) > layer:
        return bool(listed[layer])
    interval = "no_rope_layer_interval"
    return (layer + 1) % (4 if text.find(interval) is None else text.number(interval)) != 0


#: Which layers attend to a window only, without ``layer_types``. Of other models none
#: do, as far as is known here: that is the most that they can take.
_WINDOWED: Mapping[str, _Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            ("ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"),
            lambda text, layer: True,
        ),
        **dict.fromkeys(("qwen2", "qwen2_5_vl", "qwen2_vl", "qwen3"), _from_layer),
        **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), _every(2)),
        **dict.fromkeys(("cohere2", "exaone4", "olmo3"), _every(4)),
        "gemma3n_text": _every(5),
        **dict.fromkeys(("gemma3_text", "gemma4_text"), _every(6)),
        "llama4_text": _with_positions,
    }
)

#: Under which key a layer of a type finds its window; None is one that attends to everything.
_TYPES: Mapping[object, str | None] = MappingProxyType(
    {
        "full_attention": None,
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
)


def _windows(text: _Text) -> list[str | None]:
    """For each layer the key of its window, or None."""
    count = text.number("num_hidden_layers", most=_MOST_LAYERS)
    given = text.values.get("layer_types")
    if given is None:
        rule = _WINDOWED.get(text.kind)
        key = "attention_chunk_size" if text.kind == "llama4_text" else "sliding_window"
        if rule is None or text.find(key) is None:
            return [None] * count
        return [key if rule(text, layer) else None for layer in range(count)]
    if not isinstance(given, list) or len(given) < count:
        raise CheckpointError(
            text.where,
            "config.json does not tell how large the KV cache is: layer_types",
            expected=f"a type for each of {count} layers",
            found=repr(given)[:80],
        )
    unknown = dict.fromkeys(str(kind) for kind in given[:count] if str(kind) not in _TYPES)
    if unknown:
        raise _unknown(text.where, f"layers of type {', '.join(unknown)}")
    return [_TYPES[kind] for kind in given[:count]]


def _held_whole(text: _Text, request: CacheRequest, layers: Sequence[LayerCache]) -> list[str]:
    """A note, where windows are shorter than what is counted."""
    found = {one.window for one in layers if one.row and one.window is not None}
    shorter = sorted(window for window in found if window < request.context)
    if not shorter:
        return []
    return [
        f"{text.kind}: the cache holds all {request.context} tokens after the prompt, not the "
        f"window of {' or '.join(map(str, shorter))}"
    ]
