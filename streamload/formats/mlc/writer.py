"""Writes the folder of weights that MLC-LLM's compiler, its engines and web-llm read.

``params_shard_0.bin`` and so on hold tensors one after the other, and nothing else; 32 MiB each
unless a tensor is larger, which has a file of its own. ``tensor-cache.json`` has the places of all
tensors and the md5 sum of each file, ``mlc-chat-config.json`` the model; the tokenizer is in the
same folder. With ``--quant`` q0f16, q0f32 or q0bf16 all have one dtype; with other values, weights
of linear layers and embeddings are ``q_weight`` and ``q_scale``, see
`streamload.codecs.schemes.mlc`, and the rest has the dtype of the name. MLC's own converter stores
float32 as bfloat16; here it stays float32.

Source: github.com/mlc-ai/mlc-llm, python/mlc_llm/interface/convert_weight.py; and
python/tvm/contrib/tvmjs.py of github.com/apache/tvm (``dump_tensor_cache``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from streamload.codecs.schemes.mlc import CODES, DTYPES
from streamload.codecs.weights import Packed
from streamload.core.dtypes import BF16, F16, F32
from streamload.formats.mlc.chat import TOKENIZER_FILES, chat_config, conv_template
from streamload.formats.mlc.models import HEAD, Parameter, family_of, notes_of
from streamload.formats.writer import (
    FormatWriter,
    Joined,
    Model,
    OutFile,
    OutTensor,
    placed,
    shards,
)

CACHE, CHAT_CONFIG = "tensor-cache.json", "mlc-chat-config.json"
#: Values of ``quant=`` without a scheme, and the dtype of all tensors.
PLAIN = {"q0f16": F16, "q0f32": F32, "q0bf16": BF16}
_TURNED, _NOT_TURNED, _GROUP = "q4f16_0", "q4f16_1", 32  # embeddings are never stored transposed


class MLC(FormatWriter):
    """Writes a model as a folder for MLC-LLM; see `FormatWriter`."""

    name = "mlc"
    max_shard_size = "32MiB"
    quants = tuple(DTYPES)
    copied = TOKENIZER_FILES
    wants_sums = True

    @staticmethod
    def asked(dtype: Any, quant: Any) -> tuple[Any, Any]:
        """Return (dtype, scheme or None) of ``quant``; ValueError for None, or for a ``dtype``."""
        known = (*DTYPES, *PLAIN)
        if quant not in known:
            raise ValueError(f"mlc needs quant=, one of {', '.join(known)}, not {quant!r}")
        if dtype is not None:
            raise ValueError(f"mlc takes no dtype=: quant={quant!r} says what all tensors are")
        return (PLAIN[quant].name, None) if quant in PLAIN else (DTYPES[quant].name, quant)

    def tensors(self) -> Sequence[Sequence[OutTensor]]:
        """Return MLC's tensors in the order of the layers; refuse a model that MLC lacks."""
        model, family = self.model, family_of(self.model)
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
        template, _ = self._template
        plain = next((name for name, each in PLAIN.items() if each is self.model.dtype), "")
        return _json(chat_config(self.model, self.model.quant or plain, template))

    @cached_property
    def _template(self) -> tuple[Mapping[str, Any] | None, str]:
        return conv_template(self.model)

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        """Return mlc-chat-config.json (the model) and tensor-cache.json (places of tensors)."""
        return {CHAT_CONFIG: self._chat_config, CACHE: _json(_cache(files, sums))}

    def notes(self) -> Sequence[str]:
        """Return notes on a missing conversation template, and on what MLC computes otherwise."""
        template, why = self._template
        asks = "to chat, give it one of MLC's (mlc_llm gen_config --conv-template)"
        lacks = f"{CHAT_CONFIG} has no conv_template, for {why}: {asks}"
        return (*notes_of(self.model), *([] if template else [lacks]))


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def _as_read(model: Model, parameter: Parameter, parts: Sequence[OutTensor]) -> OutTensor:
    """Return MLC's tensor to write: the sources ``parts`` joined, transposed or quantized."""
    # ``made`` is None, for one contiguous read, if it is quantized in the file's order, except if
    # it is dequantized first or shares its source with another tensor
    first, name = parts[0], parameter.name
    dtype = model.dtype or F16
    made = parts[0].made if len(parts) == 1 else Joined.joined([each.source for each in parts])
    shape = (sum(each.shape[0] for each in parts), *first.shape[1:])
    is_turned = model.quant == _TURNED and parameter.is_linear
    if parameter.experts:
        if is_turned:
            problem = f"MLC has no experts in {_TURNED}: write {_NOT_TURNED}"
            model.refuse(problem, tensor=first.info.name)
        shape = (parameter.experts, shape[0] // parameter.experts, *shape[1:])
    if parameter.is_conv1d:
        shape = shape[::-1]
        made = first.source if is_turned else first.source.transposed(*first.shape)
    if parameter.shift:
        made = Joined.of(first.info, shift=parameter.shift)
    if model.quant is None or not (parameter.is_linear or parameter.is_embedding):
        return OutTensor(name, first.info, dtype, shape, made=made)
    is_shared = parameter.name == HEAD and HEAD not in parameter.sources  # the embedding
    if made is None and (isinstance(first.info, Packed) or is_shared):
        made = first.source
    if is_turned:
        made, shape = _strips(model, parameter, made or first.source, first, shape)
    quant = _NOT_TURNED if model.quant == _TURNED and not is_turned else model.quant
    name = name.removesuffix("weight") + CODES
    return OutTensor(name, first.info, dtype, shape, quant, made)


def _strips(
    model: Model, parameter: Parameter, made: Joined, first: OutTensor, shape: tuple[int, ...]
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
