"""Writes GPT-2 for llm.c: one file, as llm.c's C programs read it.

256 little-endian int32 come first: magic, version, length of the context, vocabulary, layers,
heads, width, padded vocabulary, and zeros. The version gives the dtype of all that follows: 3 is
float32 and 5 is bfloat16. Then the parameters one after the other, each kind of all layers
together; matrices have a row for each output, where transformers' Conv1D has a column. The
embedding has rows of zeros up to a multiple of 128, and the head is the embedding.

Source: github.com/karpathy/llm.c, ``write_model`` and ``pad_vocab`` of train_gpt2.py, and
``gpt2_build_from_checkpoint`` of train_gpt2.c and train_gpt2.cu.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from streamload.core.dtypes import BF16, F32, parse_dtype
from streamload.core.units import round_up
from streamload.formats.writer import FormatWriter, Model, OutFile, OutTensor, placed

_MAGIC = 20240326
_VERSIONS = {F32: 3, BF16: 5}
_HEADER_INTS = 256
_ROWS = 128  # the embedding has a multiple of these

_DROPPED = re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight")
_FIRST = ("wte.weight", "wpe.weight")
_LAST = ("ln_f.weight", "ln_f.bias")
#: Of a layer, in order: the name, and the shape as widths of the model, (inputs, outputs).
_LAYER = {
    "ln_1.weight": (1,),
    "ln_1.bias": (1,),
    "attn.c_attn.weight": (1, 3),
    "attn.c_attn.bias": (3,),
    "attn.c_proj.weight": (1, 1),
    "attn.c_proj.bias": (1,),
    "ln_2.weight": (1,),
    "ln_2.bias": (1,),
    "mlp.c_fc.weight": (1, 4),
    "mlp.c_fc.bias": (4,),
    "mlp.c_proj.weight": (4, 1),
    "mlp.c_proj.bias": (1,),
}
#: Keys of the configuration in the order of the header, and GPT-2's defaults.
_NUMBERS: dict[str, int | None] = {
    "n_positions": 1024,
    "vocab_size": 50257,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
}
_VALUES = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "layer_norm_epsilon": (1e-5,),
}


class LlmC(FormatWriter):
    """Writes GPT-2 as llm.c's ``model.bin``; see `FormatWriter`."""

    name = "llm.c"
    max_shard_size = "16TiB"  # one file

    @staticmethod
    def asked(dtype: Any, quant: Any) -> tuple[Any, Any]:
        """Return (name of one dtype, None), float32 by default; raise ValueError for ``quant``."""
        if quant is not None:
            raise ValueError(f'llm.c reads no quantised weights: dtype="bfloat16", not {quant!r}')
        found = F32 if dtype is None else None
        if not isinstance(dtype, Mapping | None):
            found = parse_dtype(dtype)
        if found not in _VERSIONS:
            known = " or ".join(f'"{each.name}"' for each in _VERSIONS)
            raise ValueError(f"llm.c reads files of one dtype: dtype={known}, not {dtype!r}")
        return found.name, None

    def tensors(self) -> Sequence[Sequence[OutTensor]]:
        """Return the tensors in the order of the C program: each kind of tensor of all layers."""
        model, numbers = self.model, _numbers(self.model)
        width = numbers["n_embd"]
        shapes = {
            "wte.weight": (numbers["vocab_size"], width),
            "wpe.weight": (numbers["n_positions"], width),
            **{
                f"h.{layer}.{name}": tuple(count * width for count in counts)
                for name, counts in _LAYER.items()
                for layer in range(numbers["n_layer"])
            },
            **{name: (width,) for name in _LAST},
        }
        by_name = model.by_name("transformer.")
        unknown = [n for n in by_name if n not in shapes and not _DROPPED.fullmatch(n)]
        if unknown:
            model.refuse("llm.c has no place for it", "a tensor of GPT-2", tensor=unknown[0])
        out = []
        for name, shape in shapes.items():
            known = f"transformer.{name}"
            target = model.take(by_name.get(name), known, shape, "its shape is not GPT-2's")
            out.append((_as_read(name, target),))
        return out

    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        numbers = _numbers(self.model)
        flat = [each for listed in lists for each in listed]
        fields = [_MAGIC, _VERSIONS[flat[0].dtype], *numbers.values()]
        fields.append(round_up(numbers["vocab_size"], _ROWS))
        header = struct.pack(f"<{_HEADER_INTS}i", *fields, *[0] * (_HEADER_INTS - len(fields)))
        return [placed("model.bin", header, flat)]


def _as_read(name: str, target: OutTensor) -> OutTensor:
    """Return a tensor as the C program reads it: the embedding padded, matrices transposed."""
    made, shape = target.made, target.shape
    if name == "wte.weight":
        rows = round_up(shape[0], _ROWS)
        made, shape = target.source.padded((rows - shape[0]) * shape[1]), (rows, shape[1])
    elif name not in _FIRST and len(shape) == 2:
        made, shape = target.source.transposed(*shape), shape[::-1]
    return OutTensor(name, target.info, target.dtype, shape, made=made)


def _numbers(model: Model) -> dict[str, int]:
    """Return the header's numbers from the configuration; refuse any model but GPT-2."""
    if model.family != "gpt2":
        found = repr(model.family) if model.family else "no model_type"
        model.refuse("llm.c reads GPT-2 alone", 'model_type "gpt2" in config.json', found)
    width = model.number("n_embd", _NUMBERS["n_embd"])
    model.check_values("llm.c", _VALUES | {"n_inner": (None, 4 * width)})
    return model.numbers(**_NUMBERS)
