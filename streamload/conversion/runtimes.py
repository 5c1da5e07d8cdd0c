"""Keys of config.json and dtypes for runtimes that read safetensors: ``streamload convert --for``.

Sources: ``Config`` of models in mistralrs 0.9 and of candle's examples, which need ``rope_theta``
at the top of config.json, and ``ModelArgs`` of models in mlx-lm 0.32, which default to 10,000 for
it and to tied embeddings. All of them open ``model.safetensors``, or several files by
``model.safetensors.index.json`` (mlx-lm: ``model*.safetensors``), with Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from streamload.core.dtypes import DTypeArgument
from streamload.core.patterns import did_you_mean
from streamload.files.header import SAFETENSORS
from streamload.planning.quant_policy import QuantArgument

_TEXT = "text_config"  # the text model's section of a model with several
_HEADS = ("lm_head.weight", "output.weight")
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
    """Return keys to add to the model's ``config`` for a runtime, and sentences for users.

    ``names``: names of all output tensors.
    """
    said = _rope(config)
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
    """Return ``rope_parameters`` of transformers 5 under earlier keys; {} if not needed."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        return {}
    said: dict[str, Any] = {}
    if "rope_theta" not in config:
        said["rope_theta"] = rope["rope_theta"]
    if config.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
        said["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return said
