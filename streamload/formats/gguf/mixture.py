"""The types of a GGUF model's matrices in mixtures such as "q4_k_m".

A mixture has one type for most matrices, and a wider one for those on which much depends: the head,
values of attention, and the second matrix of feed-forward layers, in some layers. A matrix whose
rows are no whole blocks of 256 gets a type of blocks of 32, or float16.

Source: ``llama_tensor_get_type_impl`` and ``tensor_type_fallback`` in src/llama-quant.cpp of
llama.cpp, as in llama-cpp-python 0.3.36, for the architectures that are written here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from streamload.core.model_config import stated
from streamload.formats.gguf.constants import TENSOR_TYPE_OF, TensorType

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class Mixture(NamedTuple):
    """A mixture: the type of most of its matrices, and the number of ``general.file_type``."""

    kind: str
    file_type: int


#: By the value of ``quant=``.
MIXTURES: Mapping[str, Mixture] = {
    "q4_k_s": Mixture("Q4_K", 14),
    "q4_k_m": Mixture("Q4_K", 15),
    "q5_k_s": Mixture("Q5_K", 16),
    "q5_k_m": Mixture("Q5_K", 17),
    "q6_k": Mixture("Q6_K", 18),
}
_NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # of blocks of 32
_LAYER = re.compile(r"blk\.(\d+)\.")
_VALUES = re.compile(r"attn_(qkv|kv_b|v)\.weight$")
_LAYERS_OF_70B = 80
_EXPERTS_OF_MIXTRAL = 8  # llama.cpp's choice for any model of as many


class Mixer:
    """Chooses the types of a model's matrices."""

    def __init__(self, names: Collection[str], config: Mapping[str, Any]) -> None:
        """Prepare for the tensors with these names in GGUF, of a model with this config.json."""
        self._names, self._config = names, config
        layers = {name: int(found[1]) for name in names if (found := _LAYER.match(name))}
        self._layers = 1 + max(layers.values(), default=0)
        self._values = sorted(layers[name] for name in layers if _VALUES.search(name))

    def kind(self, name: str, columns: int, mixture: str) -> TensorType:
        """Return the type of a matrix in a mixture."""
        chosen = self._chosen(name, columns, mixture)
        if columns % TENSOR_TYPE_OF[chosen].dtype.block:
            chosen = _NARROWER.get(chosen, chosen)
        found = TENSOR_TYPE_OF[chosen]
        return TENSOR_TYPE_OF["F16"] if columns % found.dtype.block else found

    def _chosen(self, name: str, columns: int, mixture: str) -> str:
        """Return the name of a matrix's type, which rows of any length may not fit."""
        most = MIXTURES[mixture].kind
        is_falcon = self._config.get("model_type") == "falcon"
        if name == HEAD or (name == EMBEDDING and HEAD not in self._names):
            is_whole = not columns % TENSOR_TYPE_OF[most].dtype.block
            return "Q6_K" if is_whole and not is_falcon else "Q8_0"
        found = _LAYER.match(name)
        layer = int(found[1]) if found else 0
        if stated(self._config, "num_experts") == _EXPERTS_OF_MIXTRAL:
            if name.endswith((".attn_v.weight", ".attn_k.weight")):
                return "Q8_0"
            if name.endswith(".attn_output.weight") and most == "Q4_K":
                return "Q5_K"
        if _VALUES.search(name):
            at = self._values.index(layer)
            if mixture.endswith("_m") and _is_wide(at, len(self._values)):
                return "Q6_K"
            is_wider = (mixture == "q4_k_s" and at < 4) or (most == "Q4_K" and self._is_70b)
            return "Q5_K" if is_wider else most
        if ".ffn_down" in name:
            if mixture.endswith("_m") and _is_wide(layer, self._layers):
                narrow = is_falcon and most == "Q4_K" and layer >= self._layers // 16
                return "Q5_K" if narrow else "Q6_K"
            is_first = layer < self._layers // 8 and not is_falcon
            return "Q5_K" if mixture == "q4_k_s" and is_first else most
        return most

    @property
    def _is_70b(self) -> bool:
        """Whether values are shared by many heads, and small, as in Llama 2 70B."""
        heads, groups = (self._config.get(f"num_{of}_heads") for of in ("attention", "key_value"))
        is_qwen = self._config.get("model_type") == "qwen2"
        is_llama = self._config.get("model_type") in ("llama", "mistral") and heads != groups
        return self._layers == _LAYERS_OF_70B and (is_qwen or is_llama)


def _is_wide(at: int, count: int) -> bool:
    """Return whether layer ``at`` of ``count`` has the wider type: both ends, and each third."""
    eighth = count // 8
    return at < eighth or at >= 7 * count // 8 or (at - eighth) % 3 == 2
