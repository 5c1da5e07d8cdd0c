"""The KV cache that a model needs to run, from its ``config.json``; pure arithmetic.

For each token, a layer with attention keeps a key and a value of ``head_dim`` elements for each of
its key-value heads (grouped-query attention, https://arxiv.org/abs/2305.13245):

    elements of a layer = 2 * batch * tokens * num_key_value_heads * head_dim

with ``tokens`` the context, also where the layer attends to a window only
(https://arxiv.org/abs/2310.06825): see below. Under multi-head latent attention (section 2.1 of
https://arxiv.org/abs/2405.04434) it keeps one compressed row for all heads instead:

    elements of a layer = batch * tokens * (kv_lora_rank + qk_rope_head_dim)

These are the tensors of transformers' ``DynamicCache`` after a prompt of the whole context. A layer
with a window keeps a slice of its prompt then, and so all of it until the next token, with which it
shrinks to the window; ``StaticCache`` has room for the window alone. Any layer's tensors
exist twice for a moment when they grow: that is for ``reserve``, as activations are. The keys
and the rules for windows are those of the configuration classes of transformers 5.23, whose own
caches the tests compare with.

A forward pass takes memory besides weights and cache. For T tokens at once, with the hidden size
H, the intermediate size I, n heads (n_kv of keys and values) of d elements, a vocabulary V, and a
dtype of b bytes, these are in memory together at most, besides two states of T x H x b between the
layers:

    normalisation     2 x T x H x 4          (transformers' norms compute in float32)
    attention         T x (4 x n + 4 x n_kv) x d x b, and the mask of T x T x b
    feed-forward      3 x T x I x b          (of each expert that a token chooses)
    head              T x V x b

The largest of attention with its normalisation, feed-forward and head counts. All of them count if
the C library allocates, which keeps freed memory for allocations of its size. Attention that holds
its scores ("eager") takes n x T x T x 4 more, which is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from streamload.core.dtypes import BF16, BY_NAME, F16, F32, F64, DType, DTypeLike, parse_dtype
from streamload.core.model_config import integer, language_part, stated
from streamload.errors import CheckpointError

#: Dtypes in which models compute, and keep their cache unless another is requested.
COMPUTED_IN = frozenset({F16, BF16, F32, F64})

_MOST = 2**40  # of tokens or sequences: more is a mistake of units


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A request to keep memory free for a KV cache.

    Attributes:
        context: tokens of each sequence, at least 1.
        batch: sequences at once, at least 1.
    """

    context: int
    batch: int = 1
    dtype: DType | None = None

    @classmethod
    def read(
        cls, context: int | None, batch: int, cache_dtype: DTypeLike | None
    ) -> CacheRequest | None:
        """Read the arguments of a load; return None if no cache is requested.

        Raises ValueError: an argument is invalid, or is given without ``context``.
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


class LayerCache(NamedTuple):
    """The size of one layer's KV cache.

    Attributes:
        row: elements of a token in each of the cache's tensors; () if the layer uses another
            layer's cache.
        window: most tokens that the layer attends to, or None; a long prompt caches more.
    """

    row: tuple[int, ...]
    window: int | None = None

    def elements(self, context: int, batch: int) -> list[int]:
        """Return the elements of each tensor of the cache, for ``context`` tokens a sequence."""
        return [elements * context * batch for elements in self.row]


@dataclass(frozen=True, slots=True)
class KvCache:
    """The size of a model's KV cache, layer by layer.

    Attributes:
        layers: the cache of each layer of the language model, by its number.
        configured: the dtype in ``config.json``, or None.
    """

    request: CacheRequest
    layers: tuple[LayerCache, ...]
    configured: DType | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], request: CacheRequest, *, path: object) -> KvCache:
        """Compute the cache of a model from its ``config.json``, empty if there is none."""
        where = str(path)
        if not config:
            raise CheckpointError(
                where,
                "cannot size the KV cache: there is no config.json",
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
#: Defaults for `_KEYS`, by models whose ``config.json`` may leave out all of them.
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
#: Models whose layers keep keys and values and nothing else. Other models may keep another
#: state (Mamba, linear attention, an indexer of their own), and are refused.
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
#: Models of `_BY_HEADS` whose last layers may use the cache of others.
_SHARING = frozenset({"gemma3n_text", "gemma4_text"})
#: Models of `_BY_HEADS` that may have one key-value head.
_MULTI_QUERY = frozenset({"falcon", "gpt_bigcode"})


@dataclass(frozen=True, slots=True)
class _Text:
    """The part of ``config.json`` for a language model, or for one of its layers."""

    values: Mapping[str, Any]
    kind: str
    where: str

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> _Text:
        """Return the language model's part; raises CheckpointError for unknown architectures."""
        values, kind = language_part(config)
        if kind not in _BY_HEADS | _LATENT or config.get("is_encoder_decoder"):
            raise _unknown(where, f"model_type {kind!r}")
        return cls(values, kind, where)

    def at(self, layer: int, window: str | None) -> _Text:
        """Return the configuration of one layer; ``window``: key of its window, None for none."""
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
        """Return the value of a key or a synonym, or transformers' default; None if none."""
        value = stated(self.values, key)
        return _DEFAULTS.get(self.kind, {}).get(key) if value is None else value

    def number(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """Return a whole number, or the default; raises CheckpointError for anything else."""
        value = self.find(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(
                self.where,
                f"cannot size the KV cache by config.json: {key}",
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
    """Return the elements of the keys and of the values of one token in a layer."""
    heads = text.number("num_attention_heads")
    if text.find("head_dim") is None:
        length = text.number("hidden_size") // heads
    else:
        length = text.number("head_dim")
    # Falcon's second architecture keeps the keys and values of a group once for each of its heads
    if not text.values.get("new_decoder_architecture"):
        if text.kind in _MULTI_QUERY and text.values.get("multi_query", True):
            heads = 1
        else:
            heads = text.number("num_key_value_heads", heads)
    return heads * length, heads * length


def _latent_row(text: _Text) -> tuple[int, int]:
    """Return the elements of one token's compressed keys and values, and of its rotary part."""
    return text.number("kv_lora_rank"), text.number("qk_rope_head_dim")


def _expanded(text: _Text) -> str:
    """Return a note for runtimes that expand latent attention to keys and values: times larger."""
    keys = text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim")
    whole = text.number("num_attention_heads") * (keys + text.number("v_head_dim"))
    return (
        "the KV cache is counted compressed, as latent attention has it: where keys and values of "
        f"every head are kept, it takes {whole / sum(_latent_row(text)):.0f} times as much"
    )


# --- windows --------------------------------------------------------------------------------------

_Rule = Callable[[_Text, int], bool]  # whether a layer, by number, attends to a window only


def _every(count: int, key: str = "sliding_window_pattern") -> _Rule:
    """Return a rule: all layers but each ``count``-th have a window; config's ``key`` overrides."""
    return lambda text, layer: (layer + 1) % text.number(key, count) != 0


def _from_layer(text: _Text, layer: int) -> bool:
    """Return whether a layer has a window: the layers from ``max_window_layers`` on have."""
    used = bool(text.values.get("use_sliding_window"))
    return used and layer >= text.number("max_window_layers", least=0)


def _with_positions(text: _Text, layer: int) -> bool:
    """Return whether a layer has a window: a rotary layer, by ``no_rope_layers`` or interval."""
    listed = text.values.get("no_rope_layers")
    if isinstance(listed, Sequence) and len(listed) > layer:
        return bool(listed[layer])
    return _every(4, "no_rope_layer_interval")(text, layer)


#: Layers that attend to a window only, if there are no ``layer_types``. Layers of other models
#: count as attending to everything: their largest size.
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

#: The key of the window of each type of layers; None for types that attend to everything.
_TYPES: Mapping[object, str | None] = MappingProxyType(
    {
        "full_attention": None,
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
)


def _windows(text: _Text) -> list[str | None]:
    """Return for each layer the config.json key of its attention window; None for no window."""
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
            "cannot size the KV cache by config.json: layer_types",
            expected=f"a type for each of {count} layers",
            found=repr(given)[:80],
        )
    unknown = dict.fromkeys(str(kind) for kind in given[:count] if str(kind) not in _TYPES)
    if unknown:
        raise _unknown(text.where, f"layers of type {', '.join(unknown)}")
    return [_TYPES[kind] for kind in given[:count]]


def _held_whole(text: _Text, request: CacheRequest, layers: Sequence[LayerCache]) -> list[str]:
    """Return a note that the whole context counts if windows are shorter than it; else []."""
    found = {one.window for one in layers if one.row and one.window is not None}
    shorter = sorted(window for window in found if window < request.context)
    if not shorter:
        return []
    return [
        f"{text.kind}: the cache holds all {request.context} tokens after the prompt, not the "
        f"window of {' or '.join(map(str, shorter))}"
    ]


#: Host bytes of matrix products on the CPU for packed weights, and of threads for stacks: 8 MiB.
HOST_WORKSPACE_NBYTES = 2**23
#: Bytes that cuBLAS takes from torch's allocator for products on Hopper: 32 MiB.
CUDA_WORKSPACE_NBYTES = 2**25

_USUALLY_CHOSEN = 8


def experts_chosen(config: Mapping[str, Any]) -> int:
    """Return the number of experts that a token chooses; 8 if ``config.json`` does not state it."""
    return integer(language_part(config)[0], "num_experts_per_tok") or _USUALLY_CHOSEN


def activation_nbytes(
    config: Mapping[str, Any],
    tokens: int,
    itemsize: int,
    *,
    path: object,
    reused: bool = True,
    has_head: bool = True,
) -> int:
    """Return the most bytes of activations in a forward pass; see the module for the formula.

    ``config`` is config.json's, ``tokens`` those of all sequences, ``itemsize`` the bytes of an
    element that the model computes in. ``reused``: the allocator gives the freed memory of one part
    to the next; ``has_head``: logits are computed.
    """
    keys = ("hidden_size", "vocab_size", "num_attention_heads")
    values, _ = language_part(config)
    found = [integer(values, key) for key in keys]
    hidden, vocabulary, heads = found
    if not hidden or not vocabulary or not heads:
        raise CheckpointError(
            str(path),
            "cannot size the activations of a forward pass",
            expected="hidden_size, vocab_size and num_attention_heads in config.json, or the bytes "
            "as reserve=",
            found="some of them" if any(found) else "none of them",
        )
    head_dim = integer(values, "head_dim") or hidden // heads
    kv_heads = integer(values, "num_key_value_heads") or heads
    inner = integer(values, "intermediate_size") or 4 * hidden
    if chosen := integer(values, "num_experts_per_tok"):
        inner = max(inner, (integer(values, "moe_intermediate_size") or inner) * chosen)
    norm = 2 * tokens * hidden * 4
    attention = tokens * (4 * heads + 4 * kv_heads) * head_dim * itemsize
    attention += tokens * tokens * itemsize
    feed_forward = 3 * tokens * inner * itemsize
    head = tokens * vocabulary * itemsize * has_head
    states = 2 * tokens * hidden * itemsize
    if not reused:
        return int(states + norm + attention + feed_forward + head)
    return int(states + max(norm + attention, norm + feed_forward, head))
