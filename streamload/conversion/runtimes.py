"""``--for``: what runtimes need that read safetensors, and not all that transformers writes.

Sources: ``Config`` of models in mistralrs 0.9 and of candle's examples, which want ``rope_theta``
at the top of config.json, and ``ModelArgs`` of models in mlx-lm 0.32, which take 10,000 for it and
tied embeddings where the key is missing. All of them find ``model.safetensors``, or several files
by ``model.safetensors.index.json`` (mlx-lm: ``model*.safetensors``), with Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from streamload.core.dtypes import DTypeArgument
from streamload.core.patterns import did_you_mean
from streamload.planning.quant_policy import QuantArgument

_TEXT = "text_config"  # of a model with several parts
_HEADS = ("lm_head.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime that reads safetensors.

    Attributes:
        name: as users write it.
        dtype: of floats, unless users choose one.
        why: the reason for that.
    """

    name: str
    dtype: str
    why: str

    def asked(self, dtype: DTypeArgument, quant: QuantArgument) -> DTypeArgument:
        """What ``dtype=`` stands for; raises ValueError for ``quant=``."""
        if quant is not None:
            raise ValueError(f"{self.name} reads no weights that are quantised here: leave quant")
        return self.dtype if dtype is None else dtype

    def config(
        self, config: Mapping[str, Any], names: Collection[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """What config.json says besides, and sentences for users.

        Args:
            config: what it says.
            names: of the tensors.
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
        return said, [f"for {self.name}, config.json says {key} itself" for key in keys]

    def note(self, dtype: DTypeArgument) -> list[str]:
        """A sentence on the dtype of floats if users chose none."""
        if dtype is not None:
            return []
        return [f"for {self.name}, floats become {self.dtype}: {self.why}; dtype= says otherwise"]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers 5 has in ``rope_parameters``, by the keys that it was before."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        return {}
    said: dict[str, Any] = {}
    if "rope_theta" not in config:
        said["rope_theta"] = rope["rope_theta"]
    if config.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
        said["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return said


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("candle", "float16", "it computes in bfloat16 on few devices"),
        Runtime("mlx", "float16", "Apple's first chips only emulate bfloat16"),
    )
}


def runtime_of(name: str | None) -> Runtime | None:
    """The runtime of a name; raises ValueError where there is none."""
    if name is None:
        return None
    if name not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise ValueError(f"runtime is one of {known}, not {name!r}{did_you_mean(name, RUNTIMES)}")
    return RUNTIMES[name]
