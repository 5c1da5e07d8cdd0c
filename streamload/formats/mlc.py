"""Writes the folder of weights that MLC-LLM's compiler, its engines and web-llm read.

``params_shard_0.bin`` and so on hold tensors one after the other, and nothing else; 32 MiB each
unless a tensor is larger, which has a file of its own. ``tensor-cache.json`` has the places of all
tensors and the md5 sum of each file, ``mlc-chat-config.json`` the model; the tokenizer is in the
same folder. Names are those of Hugging Face, except of tensors that are joined by rows: query, key
and value are ``qkv_proj`` (``c_attn`` of Qwen), gate and up ``gate_up_proj``. With ``--quant``
q0f16, q0f32 or q0bf16 all have one dtype; with other values, weights of linear layers and
embeddings are ``q_weight`` and ``q_scale``, see `streamload.codecs.schemes.mlc`, and the rest has
the dtype of the name. MLC's own converter stores float32 as bfloat16; here it stays float32.

Source: github.com/mlc-ai/mlc-llm, ``*_model.py`` and ``*_loader.py`` of python/mlc_llm/model
(names, shapes, fields of the configuration), interface/gen_config.py, interface/convert_weight.py,
protocol/mlc_chat_config.py, cpp/tokenizers/tokenizers.cc (what tokenizer_info is); and
python/tvm/contrib/tvmjs.py of github.com/apache/tvm (``dump_tensor_cache``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from streamload.codecs.schemes.mlc import CODES
from streamload.codecs.weights import Packed
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import BF16, F16, F32
from streamload.formats.writer import (
    FormatWriter,
    Joined,
    Model,
    OutFile,
    OutTensor,
    Target,
    placed,
    register_writer,
    shards,
)

CACHE, CHAT_CONFIG = "tensor-cache.json", "mlc-chat-config.json"
_CHAT_CONFIG_VERSION = "0.1.0"
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_STEPS_NBYTES = 2**20  # most bytes of the normalizer or decoder in tokenizer.json
_HEAD = "lm_head.weight"
_TOKENIZER_FILES = (
    *("tokenizer.model", _TOKENIZER, "vocab.json", "merges.txt"),
    *("added_tokens.json", "tokenizer_config.json"),
)
_PLAIN = {"q0f16": F16, "q0f32": F32, "q0bf16": BF16}
# schemes, and the dtype of all that is not quantized
_QUANTS = {"q4f16_1": F16, "q4f16_0": F16, "q3f16_1": F16, "q4f32_1": F32, "q4bf16_1": BF16}
_TURNED, _NOT_TURNED, _GROUP = "q4f16_0", "q4f16_1", 32  # embeddings are never stored transposed

#: Fields of every configuration that no source has.
_ONE_DEVICE = {"tensor_parallel_shards": 1, "max_batch_size": 128}
#: Keys of generation_config.json or config.json, and MLC's defaults.
_GENERATION = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "temperature": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
}


class _Parameter(NamedTuple):
    """A tensor of MLC's model: the rows of its sources, joined."""

    name: str
    sources: Mapping[str, tuple[int, ...]]  # shapes by name; a Conv1D's is transposed
    is_linear: bool = False
    is_embedding: bool = False
    is_conv1d: bool = False


def _rows(name: str, *sources: str, rows: Sequence[int], columns: int = 0) -> _Parameter:
    """Return a linear layer's weight, joined from ``sources`` (by default ``name`` alone).

    ``rows`` has the rows of each source. Without ``columns`` return a vector: ``rows`` has the
    elements of each source then.
    """
    axes = (columns,) if columns else ()
    shapes = {s: (count, *axes) for s, count in zip(sources or (name,), rows, strict=True)}
    return _Parameter(name, shapes, is_linear=bool(columns))


def _llama(model: Model) -> Iterator[_Parameter]:
    """Yield the tensors of MLC's Llama, Mistral and Qwen models."""
    n = _llama_numbers(model)
    width, vocabulary = n["hidden_size"], n["vocab_size"]
    inner, mixed = n["intermediate_size"], n["num_attention_heads"] * n["head_dim"]
    shared = n["num_key_value_heads"] * n["head_dim"]
    rows = (mixed, shared, shared)
    is_qwen = model.family.startswith("qwen")
    has_bias = model.family == "qwen2" or (is_qwen and model.config.get("attention_bias"))
    embedding = "model.embed_tokens.weight"
    yield _Parameter(embedding, {embedding: (vocabulary, width)}, is_embedding=True)
    for layer in range(n["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        attention, mlp = f"{start}self_attn.", f"{start}mlp."
        joined = attention + ("c_attn" if is_qwen else "qkv_proj")
        parts = [f"{attention}{each}_proj" for each in "qkv"]
        weights = (f"{part}.weight" for part in parts)
        yield _rows(f"{joined}.weight", *weights, rows=rows, columns=width)
        if has_bias:
            yield _rows(f"{joined}.bias", *(f"{part}.bias" for part in parts), rows=rows)
        yield _rows(f"{attention}o_proj.weight", rows=[width], columns=mixed)
        if has_bias and model.family == "qwen3":
            yield _rows(f"{attention}o_proj.bias", rows=[width])
        if model.family == "qwen3":
            for each in "qk":
                yield _rows(f"{attention}{each}_norm.weight", rows=[n["head_dim"]])
        parts = [f"{mlp}{each}_proj.weight" for each in ("gate", "up")]
        yield _rows(f"{mlp}gate_up_proj.weight", *parts, rows=(inner, inner), columns=width)
        yield _rows(f"{mlp}down_proj.weight", rows=[width], columns=inner)
        for each in ("input", "post_attention"):
            yield _rows(f"{start}{each}_layernorm.weight", rows=[width])
    yield _rows("model.norm.weight", rows=[width])
    is_tied = model.config.get("tie_word_embeddings")
    if not is_tied or model.family == "mistral":  # MLC's has no other head
        source = embedding if is_tied else _HEAD
        yield _rows(_HEAD, source, rows=[vocabulary], columns=width)


def _gpt2(model: Model) -> Iterator[_Parameter]:
    """Yield the tensors of MLC's GPT-2; the source's names lack "transformer."."""
    n = _gpt2_numbers(model)
    width, inner = n["n_embd"], n["n_inner"]
    rows = {"wte.weight": n["vocab_size"], "wpe.weight": n["n_positions"]}
    for name, count in rows.items():
        yield _Parameter(f"transformer.{name}", {name: (count, width)}, is_embedding=True)
    layer = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    norms = [f"h.{i}.{each}" for i in range(n["n_layer"]) for each in ("ln_1", "ln_2")]
    for i in range(n["n_layer"]):
        for each, shape in layer.items():
            name = f"h.{i}.{each}"
            shapes = {f"{name}.weight": shape}
            yield _Parameter(f"transformer.{name}.weight", shapes, is_linear=True, is_conv1d=True)
            yield _rows(f"transformer.{name}.bias", f"{name}.bias", rows=shape[1:])
    for name in (*norms, "ln_f"):
        for kind in ("weight", "bias"):
            yield _rows(f"transformer.{name}.{kind}", f"{name}.{kind}", rows=[width])
    yield _rows(_HEAD, "wte.weight", rows=[n["vocab_size"]], columns=width)


# --- the configuration ----------------------------------------------------------------------------


def _llama_numbers(model: Model) -> dict[str, int]:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    found = model.numbers(**dict.fromkeys((*keys, "vocab_size")))
    heads = found["num_attention_heads"]
    found["num_key_value_heads"] = model.number("num_key_value_heads", heads)
    found["head_dim"] = model.number("head_dim", found["hidden_size"] // heads)
    return found


def _gpt2_numbers(model: Model) -> dict[str, int]:
    keys = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    found = model.numbers(**dict.fromkeys(keys))
    return {**found, "n_inner": model.number("n_inner", 4 * found["n_embd"])}


def _rope(model: Model) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling, or None, of rotary embeddings; refuse one MLC lacks."""
    scaling = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        model.refuse("rope_scaling of config.json is invalid", "an object", repr(scaling))
    if scaling.get("partial_rotary_factor") not in (None, 1):
        model.refuse("MLC rotates all of a head", "no partial_rotary_factor in config.json")
    base = model.config.get("rope_theta", scaling.get("rope_theta", 10000))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3" or model.family != "llama":
        model.refuse(f"MLC's {model.family} has no such scaling of rotary embeddings", found=kind)
    return base, {key: value for key, value in scaling.items() if key != "rope_theta"}


def _llama_config(model: Model) -> dict[str, Any]:
    """Return the ``model_config`` of MLC's Llama, Mistral or Qwen."""
    family, (base, scaling) = model.family, _rope(model)
    window = model.config.get("sliding_window") if family == "mistral" else None
    context = -1 if window else model.number("max_position_embeddings")
    is_qwen = family.startswith("qwen")
    found: dict[str, Any] = {
        **_llama_numbers(model),
        "rms_norm_eps": model.config.get("rms_norm_eps", 1e-6),
        "context_window_size": context,
        "prefill_chunk_size": min(window or context, 2048 if is_qwen else 8192),
        "rope_theta" if is_qwen else "position_embedding_base": base,
        **_ONE_DEVICE,
    }
    if family == "mistral":
        return {**found, "sliding_window_size": window or -1, "attention_sink_size": 4}
    found["tie_word_embeddings"] = bool(model.config.get("tie_word_embeddings"))
    if family == "llama":
        more = {"pipeline_parallel_stages": 1, "disaggregation": False}
        return {**found, "rope_scaling": scaling, **more}
    found |= {"hidden_act": model.config.get("hidden_act", "silu"), "dtype": "float32"}
    if family == "qwen3":
        biased = bool(model.config.get("attention_bias"))
        found |= {"attention_bias": biased, "weight_block_size": None}
    return found


def _gpt2_config(model: Model) -> dict[str, Any]:
    """Return the ``model_config`` of MLC's GPT-2."""
    found = _gpt2_numbers(model)
    context = found.pop("n_positions")
    scales = "scale_attn_by_inverse_layer_idx"
    return {
        **found,
        "head_dim": found["n_embd"] // found["n_head"],
        "layer_norm_epsilon": model.config.get("layer_norm_epsilon", 1e-5),
        "context_window_size": context,
        "prefill_chunk_size": min(context, 8192),
        scales: bool(model.config.get(scales)),
        **_ONE_DEVICE,
    }


class _Family(NamedTuple):
    """Functions and tables by which models of some families are written for MLC."""

    parameters: Callable[[Model], Iterator[_Parameter]]  # lists MLC's tensors
    config: Callable[[Model], dict[str, Any]]  # makes ``model_config``
    values: Mapping[str, tuple[object, ...]]  # those of config.json that MLC implements
    dropped: re.Pattern[str]  # names of tensors that are left out
    prefix: str  # removed from names of the source


_LLAMA = _Family(
    _llama,
    _llama_config,
    {
        "hidden_act": ("silu", "swish"),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1.0, None),
    },
    re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight"),
    "",
)
_GPT2 = _Family(
    _gpt2,
    _gpt2_config,
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": (True,),
        "scale_attn_weights": (True,),
    },
    re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"),
    "transformer.",
)
_FAMILIES = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA), "gpt2": _GPT2}


# --- the writer -----------------------------------------------------------------------------------


class MLC(FormatWriter):
    """Writes a model as a folder for MLC-LLM; see `FormatWriter`."""

    name = "mlc"
    max_shard_size = "32MiB"
    quants = tuple(_QUANTS)
    copied = _TOKENIZER_FILES
    wants_sums = True

    @staticmethod
    def asked(dtype: Any, quant: Any) -> tuple[Any, Any]:
        """Return (dtype, scheme or None) of ``quant``; ValueError for None, or for a ``dtype``."""
        known = (*_QUANTS, *_PLAIN)
        if quant not in known:
            raise ValueError(f"mlc needs quant=, one of {', '.join(known)}, not {quant!r}")
        if dtype is not None:
            raise ValueError(f"mlc takes no dtype=: quant={quant!r} says what all tensors are")
        return (_PLAIN[quant].name, None) if quant in _PLAIN else (_QUANTS[quant].name, quant)

    def tensors(self) -> Sequence[Sequence[Target]]:
        """Return MLC's tensors in the order of the layers; refuse a model that MLC lacks."""
        model, family = self.model, _family(self.model)
        model.check_values(f"MLC's {model.family}", family.values)
        by_name = model.by_name(family.prefix)
        problem = f"its shape is not that of a {model.family} by config.json"
        out = []
        used: set[str] = set()
        for each in family.parameters(model):
            parts = []
            for name, shape in each.sources.items():
                parts.append(model.take(by_name.get(name), name, shape, problem))
            used.update(each.sources)
            out.append((_as_read(model, each, parts),))
        for name in by_name.keys() - used:
            if not family.dropped.fullmatch(name):
                model.refuse(f"MLC's {model.family} has no place for it", tensor=by_name[name].name)
        return out

    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        """Return the files; a weight's values and scales may be in two of them."""
        single = [(each,) for listed in lists for each in listed]
        found = shards(single, max_nbytes, lambda each: each.nbytes)
        return [
            placed(f"params_shard_{i}.bin", b"", [each for (each,) in shard])
            for i, shard in enumerate(found)
        ]

    @cached_property
    def _chat_config(self) -> bytes:
        """The JSON of mlc-chat-config.json; cached, since the tokenizer may be on a server."""
        return _json(_chat_config(self.model))

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        """Return mlc-chat-config.json (the model) and tensor-cache.json (places of tensors)."""
        return {CHAT_CONFIG: self._chat_config, CACHE: _json(_cache(files, sums))}

    def notes(self) -> Sequence[str]:
        """Return a note that the configuration lacks a conversation template."""
        return (
            f"{CHAT_CONFIG} has no conv_template, for the source does not say it: to chat, give it "
            "one of MLC's (mlc_llm gen_config --conv-template)",
        )


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _family(model: Model) -> _Family:
    """Return the record of a model's family; raise CheckpointError for an unknown family."""
    found = _FAMILIES.get(model.family)
    if found is None:
        expected = f"model_type {', '.join(_FAMILIES)} in config.json"
        model.refuse("there is no way from this family to MLC's", expected, model.family)
    return found


def _as_read(model: Model, parameter: _Parameter, parts: Sequence[Target]) -> Target:
    """Return MLC's tensor to write: the sources ``parts`` joined, transposed or quantized."""
    # ``made`` is None, for one contiguous read, if it is quantized in the file's order, except if
    # it is dequantized first or shares its source with another tensor
    first, name = parts[0], parameter.name
    dtype = model.dtype or F16
    made = parts[0].made if len(parts) == 1 else Joined.joined([each.source for each in parts])
    shape = (sum(each.shape[0] for each in parts), *first.shape[1:])
    is_turned = model.quant == _TURNED and parameter.is_linear
    if parameter.is_conv1d:
        shape = shape[::-1]
        made = first.source if is_turned else first.source.transposed(*first.shape)
    if model.quant is None or not (parameter.is_linear or parameter.is_embedding):
        return Target(name, first.info, dtype, shape, made=made)
    is_shared = parameter.name == _HEAD and _HEAD not in parameter.sources  # the embedding
    if made is None and (isinstance(first.info, Packed) or is_shared):
        made = first.source
    if is_turned:
        made, shape = _strips(model, parameter, made or first.source, first, shape)
    quant = _NOT_TURNED if model.quant == _TURNED and not is_turned else model.quant
    name = name.removesuffix("weight") + CODES
    return Target(name, first.info, dtype, shape, quant, made)


def _strips(
    model: Model, parameter: _Parameter, made: Joined, first: Target, shape: tuple[int, ...]
) -> tuple[Joined, tuple[int, ...]]:
    """Return a weight reordered as q4f16_0 stores it, and the shape (groups of a row, rows, 32).

    ``made`` has the weight's elements, ``shape`` is (rows, columns); errors name ``first``.
    """
    rows, columns = shape
    groups, rest = divmod(columns, _GROUP)
    if rest:
        problem = f"{_TURNED} has groups of {_GROUP} elements of a row: write {_NOT_TURNED}"
        model.refuse(problem, f"rows of a multiple of {_GROUP}", columns, first.name)
    if parameter.is_conv1d:
        made = Joined.joined([made]).permuted(groups, _GROUP, rows)
    else:
        made = Joined.joined([made]).permuted(1, rows, groups)
    return made, (groups, rows, _GROUP)


def _cache(files: Sequence[OutFile], sums: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of tensor-cache.json: the place of each tensor, and md5 sums."""
    tensors = [t for file in files for t in file.tensors]
    nbytes = sum(t.nbytes for t in tensors)
    elements = sum({info.name: info.numel for t in tensors for info in t.infos}.values())
    records = [
        {
            "dataPath": file.path,
            "format": "raw-shard",
            "nbytes": file.nbytes,
            "records": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "dtype": t.dtype.name,
                    "format": "raw",
                    "nbytes": t.nbytes,
                    "byteOffset": t.start,
                }
                for t in file.tensors
            ],
            "md5sum": sums[file.path],
        }
        for file in files
    ]
    metadata = {
        "ParamSize": len(tensors),
        "ParamBytes": float(nbytes),
        "BitsPerParam": nbytes * 8.0 / elements,
    }
    return {"metadata": metadata, "records": records}


def _chat_config(model: Model) -> dict[str, Any]:
    """Return the content of mlc-chat-config.json, as far as the source provides it."""
    config = _family(model).config(model)
    said = [model.config]
    if _GENERATION_CONFIG in model.companions:
        said.append(parse_json(model.companions[_GENERATION_CONFIG]()))
    generation = dict(_GENERATION)
    for one in said:
        if isinstance(one, Mapping):
            generation |= {key: one[key] for key in _GENERATION if one.get(key) is not None}
    info = {}
    if _TOKENIZER in model.companions:
        info = _tokenizer_info(model.companions[_TOKENIZER]())
    return {
        "version": _CHAT_CONFIG_VERSION,
        "model_type": model.family,
        "quantization": model.quant or next(q for q in _PLAIN if _PLAIN[q] is model.dtype),
        "model_config": config,
        "vocab_size": config["vocab_size"],
        "context_window_size": config["context_window_size"],
        "sliding_window_size": config.get("sliding_window_size", -1),
        "prefill_chunk_size": config["prefill_chunk_size"],
        "attention_sink_size": config.get("attention_sink_size", -1),
        "tensor_parallel_shards": 1,
        "pipeline_parallel_stages": 1,
        "active_vocab_size": config["vocab_size"],
        **generation,
        "tokenizer_files": [name for name in _TOKENIZER_FILES if name in model.companions],
        "tokenizer_info": info,
    }


def _tokenizer_info(raw: bytes) -> dict[str, Any]:
    """Return ``tokenizer_info``: the facts that MLC detects in a tokenizer.json."""
    decoders = _steps(raw, "decoder", "decoders")
    normalizers = _steps(raw, "normalizer", "normalizers")
    kinds = [each.get("type") for each in decoders]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": "\u2581"}
    return {
        "token_postproc_method": "byte_level" if "ByteLevel" in kinds else "byte_fallback",
        "prepend_space_in_encode": any(prepend.items() <= each.items() for each in normalizers),
        "strip_space_in_decode": any(strip.items() <= each.items() for each in decoders),
    }


def _steps(raw: bytes, key: str, several: str) -> list[Mapping[str, Any]]:
    """Return the steps of tokenizer.json's ``key``, such as "normalizer"; [] without it."""
    # a Sequence lists its steps in ``several``; only this part is parsed: the whole file would take
    # 100 MB; words of a vocabulary may equal the key, but are not objects
    for at in re.finditer(rf'(?<!\\)"{key}"\s*:\s*(?=\{{)'.encode(), raw):
        text = raw[at.end() : at.end() + _STEPS_NBYTES].decode(errors="replace")
        try:
            found, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            continue
        steps = found.get(several) if found.get("type") == "Sequence" else [found]
        return [each for each in steps or () if isinstance(each, Mapping)]
    return []


register_writer(MLC)
