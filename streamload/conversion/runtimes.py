"""Keys of config.json and dtypes for runtimes that read safetensors: ``streamload convert --for``.

Sources: ``Config`` of models in mistralrs 0.9 and of candle's examples, which need ``rope_theta``
at the top of config.json, and ``ModelArgs`` of models in mlx-lm 0.32, which default to 10,000 for
it and to tied embeddings, and need ``n_ctx`` of GPT-2. All of them open ``model.safetensors``, or
several files by ``model.safetensors.index.json`` (mlx-lm: ``model*.safetensors``), with Hugging
Face's names; mlx-lm GPT-2 as it was published, without "transformer.".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from streamload.core.dtypes import DTypeArgument
from streamload.core.patterns import did_you_mean
from streamload.files.header import SAFETENSORS
from streamload.planning.quant_policy import QuantArgument

_TEXT = "text_config"  # the text model's section of a model with several
_FULL, _SLIDING = "full_attention", "sliding_attention"  # kinds of layers in transformers 5
_HEADS = ("lm_head.weight", "output.weight")
_OF_GPT2 = "transformer."
_DTYPE = "float16"

#: By runtime, the reason for float16 if users choose no dtype.
RUNTIMES = {
    "candle": "it computes in bfloat16 on few devices",
    "mlx": "Apple's first chips only emulate bfloat16",
}


def dtype_for(
    runtime: str, to: str, dtype: DTypeArgument, quant: QuantArgument
) -> tuple[DTypeArgument, list[str]]:
    """Return the dtype of floats for a runtime, by default float16, and sentences for users.

    Raises ValueError if the runtime is unknown, cannot read the format ``to``, or ``quant`` is set.
    """
    if runtime not in RUNTIMES:
        known, meant = ", ".join(RUNTIMES), did_you_mean(runtime, RUNTIMES)
        raise ValueError(f"runtime is one of {known}, not {runtime!r}{meant}")
    if to != SAFETENSORS:
        raise ValueError(f"{runtime} reads safetensors, not {to}")
    if quant is not None:
        raise ValueError(f"{runtime} reads no weights that are quantised here: leave quant")
    if dtype is not None:
        return dtype, []
    why = RUNTIMES[runtime]
    return _DTYPE, [f"for {runtime}, floats become {_DTYPE}: {why}; dtype= says otherwise"]


def config_for(
    runtime: str, config: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return keys to add to the model's ``config`` for a runtime, and sentences for users."""
    is_gpt2 = config.get("model_type") == "gpt2"
    if runtime == "mlx" and is_gpt2 and any(name.startswith(_OF_GPT2) for name in names):
        raise ValueError(
            f'mlx-lm has the names of GPT-2 without "{_OF_GPT2}": '
            f'rename=lambda name: name.removeprefix("{_OF_GPT2}") (--rename "{_OF_GPT2}*=*")'
        )
    said = _rope(config)
    if is_gpt2 and "n_ctx" not in config and "n_positions" in config:
        said["n_ctx"] = config["n_positions"]
    if config.get("model_type") == "qwen3_moe" and "num_experts" not in config:
        said["num_experts"] = config.get("num_local_experts", 128)  # transformers' own default
    keys = list(said)
    text = config.get(_TEXT)
    if isinstance(text, Mapping) and (inner := _rope(text)):
        said[_TEXT] = inner
        keys += [f"{key} in {_TEXT}" for key in inner]
    architectures = config.get("architectures")
    known = architectures if isinstance(architectures, list) else []
    if "tie_word_embeddings" not in config and any(
        str(name).endswith("ForCausalLM") for name in known
    ):
        said["tie_word_embeddings"] = not any(head in names for head in _HEADS)
        keys.append("tie_word_embeddings")
    return said, [f"for {runtime}, config.json says {key} itself" for key in keys]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5 under earlier keys; {} if not needed.

    Models whose layers attend to a window, or to all tokens, have parameters for each kind.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return {}
    rope, local = given.get(_FULL, given), given.get(_SLIDING)
    said: dict[str, Any] = {}
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        said["rope_theta"] = rope["rope_theta"]
        if rope.get("partial_rotary_factor") is not None:
            said["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if config.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
            said["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if isinstance(local, Mapping) and "rope_theta" in local:
        said["rope_local_base_freq"] = local["rope_theta"]
        kinds = config.get("layer_types")
        if isinstance(kinds, list) and _FULL in kinds:
            said["sliding_window_pattern"] = kinds.index(_FULL) + 1
    return {key: value for key, value in said.items() if config.get(key) is None}
