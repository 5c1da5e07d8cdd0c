"""Writes GGUF: ``convert --to gguf`` of the language models in `architectures.OF_MODEL`.

One file ``model.gguf``, or with a smaller ``max_shard_size`` a set with the names that llama.cpp
expects; the tokenizer is in the metadata. ``quant`` applies to all matrices, embedding and head
included: "q8_0", "q4_0", or a mixture of several types such as "q4_k_m" (`mixture.MIXTURES`), with
an importance matrix or without. See `streamload.formats.gguf.model` for the types.

Source: docs/gguf.md in github.com/ggml-org/ggml, and the names of split files in
``llama_split_path`` of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from streamload.codecs.weights import Packed
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import BY_CODE, F16, F32
from streamload.core.location import Location
from streamload.core.model_config import stated
from streamload.core.system import trim_heap
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.formats.gguf.architectures import Architecture, module_of
from streamload.formats.gguf.constants import ALIGNMENT, BLOCKS_OF, TENSOR_TYPE_OF, TensorType
from streamload.formats.gguf.diffusion import Diffusion
from streamload.formats.gguf.layout import (
    OVERHEAD_NBYTES,
    Described,
    file_nbytes,
    header,
    metadata_bytes,
    split_metadata,
)
from streamload.formats.gguf.mixture import EMBEDDING, HEAD, MIXTURES, Mixer
from streamload.formats.gguf.model import architecture_of, metadata, numbers, rope_bytes, type_of
from streamload.formats.gguf.names import is_computed
from streamload.formats.gguf.sizes import check_head, check_shapes
from streamload.formats.gguf.vocabulary_out import no_vocabulary, parse_tokenizer, to_gguf
from streamload.formats.imatrix import Importance
from streamload.formats.writer import (
    FormatWriter,
    Joined,
    Model,
    OutFile,
    OutTensor,
    Slice,
    numbered,
    placed,
    shards,
)

_QUANTS = ("q8_0", "q4_0")
_DTYPES = ("F32", "F16", "BF16")
_ALL = "**"  # all matrices; "*" means the weights of layers alone
_TOKENIZER = "tokenizer.json"
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_TEMPLATE = "chat_template.jinja"
#: Files of tokenizers that are not read; transformers converts each to tokenizer.json.
_OTHERS = ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """The GGUF metadata of a tokenizer, as bytes since values take five times the memory."""

    raw: bytes
    keys: frozenset[str]
    notes: Sequence[str]  # for the user


class GGUF(FormatWriter):
    """Writes a model as GGUF files; see `FormatWriter`."""

    name = "gguf"
    max_shard_size = "1TB"  # one file: what runs it maps it
    takes_blocks = True
    quants = tuple(MIXTURES)
    weighted = tuple(MIXTURES)
    _tokenizer: _Tokenizer | None = None

    @staticmethod
    def asked(dtype: Any, quant: Any) -> tuple[Any, Any]:
        """Return dtype and quant by pattern, "*" for all matrices; ValueError for other schemes."""
        rules = quant if isinstance(quant, Mapping) else {"*": quant} if quant is not None else {}
        for found in rules.values():
            if found is not None and found not in (*_QUANTS, *MIXTURES):
                known = ", ".join((*_QUANTS, *MIXTURES))
                raise ValueError(f"GGUF is written with quant one of {known}, not {found!r}")
        wider = {_ALL if pattern == "*" else pattern: found for pattern, found in rules.items()}
        return dtype, wider or None

    @cached_property
    def _architecture(self) -> Architecture:
        """The model's GGUF architecture; raises CheckpointError if it is not written."""
        found = architecture_of(self.model.path, self.model.config)
        self.model.check_values("llama.cpp", found.values)
        return found

    @cached_property
    def _diffusion(self) -> Diffusion | None:
        """The diffusion model to write; None for a language model."""
        return None if self.model.family else Diffusion.of(self.model)

    @cached_property
    def _targets(self) -> dict[str, OutTensor]:
        """The tensors to write, by GGUF's names; CheckpointError for a tensor without any."""
        if self._diffusion is not None:
            return self._diffusion.targets()
        model, architecture = self.model, self._architecture
        kept = {name: t for name, t in model.by_name().items() if not is_computed(name)}
        for name, target in kept.items():
            if architecture.to_gguf(name) is not None:
                _check_kind(model, name, target)
        if not kept:
            model.refuse("no tensor of it is written as GGUF")
        sources: dict[tuple[str, int | None], str] = {}  # by GGUF's name and number in a stack
        found: dict[str, OutTensor] = {}
        stacks: dict[str, dict[int, OutTensor]] = {}
        for name, target in kept.items():
            own = architecture.to_gguf(name)
            if own is None or not own.endswith((".weight", ".bias")):
                advice = (
                    "llama.cpp's own convert_hf_to_gguf.py knows more"
                    if self._is_needed(name)
                    else f'leave it out with exclude=["{name}"] (--exclude)'
                )
                problem = f"it has no name in GGUF for the architecture {architecture.name}"
                raise CheckpointError(model.path, f"{problem}: {advice}", tensor=name)
            if own == HEAD and self._is_tied:
                continue
            number = architecture.number_in_stack(name)
            if (other := sources.setdefault((own, number), name)) != name:
                problem = f"{other!r} would have the same name in GGUF, {own}"
                raise CheckpointError(model.path, problem, tensor=name)
            if number is None:
                found[own] = self._target(own, name, target)
            else:
                stacks.setdefault(own, {})[number] = found[own] = target  # in its place; see below
        if EMBEDDING in found and HEAD not in found:
            check_head(model, self._is_tied)
        for own, parts in stacks.items():
            whole = self._stacked(own, parts)
            found[own] = self._target(own, whole.name, whole)
        infos = [target.info for target in found.values()]
        first = next((info for info in infos if info.dtype.kind == "float"), infos[0])
        rope = {
            name: OutTensor(name, first, F32, (n,), made=Joined.constant(n, data))
            for name, data in rope_bytes(model.path, model.config).items()
            if (n := len(data) // 4)
        }
        return rope | found

    def _is_needed(self, name: str) -> bool:
        """Whether a tensor that GGUF has no name for is in a layer of the model."""
        modules = self._architecture.modules.values()
        starts = {each.partition(".{}.")[0] for each in modules if ".{}." in each}
        found = re.fullmatch(r"(.*?)\.(\d{1,9})\..*", name)
        if found is None or not {found[1], self._architecture.prefix + found[1]} & starts:
            return False
        count = stated(self.model.config, "num_hidden_layers")
        return type(count) is not int or int(found[2]) < count  # what follows predicts more tokens

    def _stacked(self, own: str, parts: Mapping[int, OutTensor]) -> OutTensor:
        """Return a stack of tensors by their numbers; CheckpointError if they differ."""
        listed = [parts[number] for number in sorted(parts)]
        kinds = {(t.dtype, t.quant, t.shape, t.stored and t.stored.kind) for t in listed}
        known = (self.model.config.get(key) for key in ("num_experts", "num_local_experts"))
        count = next((each for each in known if type(each) is int), len(parts))
        if len(parts) != count or max(parts) != count - 1 or len(kinds) > 1:
            self.model.refuse(
                f"they cannot be stacked to {own}",
                f"numbers 0 to {count - 1}, of one shape, dtype and quantisation",
                f"{len(parts)} numbers up to {max(parts)}, {len(kinds)} kinds",
                listed[0].name,
            )
        first = listed[0]
        stored = first.stored and replace(first.stored, shape=(count, *first.stored.shape))
        made = Joined.joined([target.source for target in listed])
        return first._replace(shape=(count, *first.shape), made=made, stored=stored)

    @property
    def _is_tied(self) -> bool | None:
        """Whether the head is the embedding; None if unknown: then a head is written if present."""
        found = self.model.config.get("tie_word_embeddings")
        if found is None:
            return True if self._architecture.name == "gpt2" else None
        return found if isinstance(found, bool) else None

    def _target(self, own: str, name: str, target: OutTensor) -> OutTensor:
        """Return a tensor to write under GGUF's name ``own``, in GGUF's order of rows and type."""
        made, shape, stays = target.made, target.shape, target.stored is not None
        stays = stays and _stored_type(target) is not None
        if self._architecture.is_transposed(own) and not stays:
            made, shape = target.source.transposed(*shape), shape[::-1]
        rows = target.shape[0] if target.shape else 1
        try:
            order = self._architecture.interleaved(own, rows, self.model.config)
            heads = self._architecture.heads(own, rows, self.model.config)
        except ValueError as error:
            problem = f"its rows cannot be reordered: {error}"
            raise CheckpointError(self.model.path, problem, tensor=name) from error
        if order is not None:
            made = target.source.permuted(order.groups, order.outer, order.inner)
        if heads is not None and heads[0] > 1:
            made = _ungrouped(target, *heads)
        if shift := self._architecture.shift(own):
            made = Joined.of(target.info, shift=shift)
        if shape[:1] == (1,) and module_of(own) in self._architecture.as_rows:
            shape = shape[1:]
        if stays:
            return target._replace(name=own, made=made)
        # vectors have a type of their own, and may be of a dtype that matrices may not
        if target.quant is not None and target.quant in MIXTURES:
            asked = self._mixer.kind(own, shape[-1] if shape else 1, target.quant)
        else:
            code = (target.quant or target.dtype.code).upper()
            asked = TENSOR_TYPE_OF.get(code, TENSOR_TYPE_OF["F32"])
        kind = type_of(own, shape, asked)
        if not kind.dtype.is_packed:
            return OutTensor(own, target.info, kind.dtype, shape, None, made)
        if isinstance(target.info, Packed):
            made = made or target.source  # dequantized to F32, and quantized again
        importance = self._importance(own, shape)
        quant = kind.dtype.name
        return OutTensor(own, target.info, F16, shape, quant, made, importance=importance)

    @cached_property
    def _mixer(self) -> Mixer:
        found = map(self._architecture.to_gguf, self.model.by_name())
        names = {name for name in found if name is not None} - ({HEAD} if self._is_tied else set())
        return Mixer(names, self.model.config)

    def _importance(self, own: str, shape: tuple[int, ...]) -> Importance | None:
        """Return the importance of a matrix's columns, if it is known; CheckpointError if not it's.

        An embedding's rows are not multiplied: what has its name may be of another size.
        """
        found = (self.model.imatrix or {}).get(own)
        if found is None or found.sums.numel == math.prod(shape[:-2]) * shape[-1]:
            return found
        if own == EMBEDDING:
            return None
        expected = f"one of each column of a matrix of shape {list(shape)}"
        problem = "has other weights than the model"
        raise CheckpointError(
            found.header.path, problem, expected, found.sums.numel, tensor=found.sums.name
        )

    def tensors(self) -> Sequence[Sequence[OutTensor]]:
        return [[target] for target in self._targets.values()]

    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        vocabulary = self._vocabulary()
        described = {
            out.name: _described(self._targets[out.name]) for listed in lists for out in listed
        }
        entries = list(described.values())
        if self._diffusion is None:
            keys = metadata(self.model.path, self.model.config, entries)
            self._check_shapes(keys, described)
        else:
            keys = self._diffusion.metadata() | numbers(entries)
        mixtures = Counter(t.quant for t in self.model.tensors.values() if t.quant in MIXTURES)
        for mixture, _ in mixtures.most_common(1):
            keys["general.file_type"] = MIXTURES[str(mixture)].file_type
        keys = {key: value for key, value in keys.items() if key not in vocabulary.keys}
        raw, count = metadata_bytes(keys) + vocabulary.raw, len(keys) + len(vocabulary.keys)
        room = max_nbytes - OVERHEAD_NBYTES
        found = shards(lists, room, lambda out: file_nbytes(described[out.name]), len(raw))
        out = []
        for number, path in enumerate(numbered(len(found), ".gguf")):
            mine = [each for listed in found[number] for each in listed]
            if len(found) > 1:
                more = split_metadata(number, len(found), len(described))
                raw, count = raw + metadata_bytes(more), count + len(more)
            head = header(raw, count, [described[each.name] for each in mine])
            out.append(placed(path, head, mine, ALIGNMENT, ALIGNMENT))
            raw, count = b"", 0
        self._tokenizer = None  # the header has a copy, of MBs
        del head, vocabulary
        trim_heap()
        return out

    def _check_shapes(self, keys: Mapping[str, Any], described: Mapping[str, Described]) -> None:
        """Raise CheckpointError if a model by the file's metadata would have other tensors."""
        found = {own: (each.shape, self._targets[own].info.name) for own, each in described.items()}
        check_shapes(self.model, keys, found)
        layers: dict[str, set[str]] = {}  # names in a layer, by its number
        for name in described:
            if name.startswith("blk."):
                _, number, inner = name.split(".", 2)
                layers.setdefault(number, set()).add(inner)
        count = keys[f"{keys['general.architecture']}.block_count"]
        every = set().union(*layers.values())
        for number in map(str, range(max(count, len(layers))) if self.model.is_whole else ()):
            if lacking := sorted(every - layers.get(number, set())):
                self.model.refuse(
                    f"layer {number} has no tensor that is {lacking[0]} in GGUF",
                    f"{count} layers alike (num_hidden_layers of config.json)",
                    f"{len(layers)} layers",
                )
            if int(number) >= count:
                self.model.refuse(
                    "it has more layers than config.json states",
                    f"num_hidden_layers {len(layers)}",
                    count,
                )

    def notes(self) -> Sequence[str]:
        model = self.model
        kinds = Counter(t.stored.kind for t in model.tensors.values() if t.stored is not None)
        stay = [f"{n} tensors stay as they are stored: {kind}" for kind, n in kinds.items()]
        if model.imatrix is not None:
            targets = [t for t in self._targets.values() if t.quant is not None]
            lack = sum(t.importance is None for t in targets)
            stay.append(f"the importance matrix lacks {lack} of {len(targets)} quantised tensors")
        window = model.config.get("sliding_window")
        if window and model.family == "mistral":
            stay.append(
                f"llama.cpp reads no sliding_window ({window}) of Mistral: tokens attend to all "
                "that come before"
            )
        return [*self._vocabulary().notes, *stay]

    def _vocabulary(self) -> _Tokenizer:
        """Return the tokenizer's metadata, read once for the notes and the files."""
        if self._diffusion is not None:
            return _Tokenizer(b"", frozenset(), ())
        if self._tokenizer is None:
            embedding = self._targets.get(EMBEDDING)
            rows = embedding.shape[0] if embedding else self.model.config.get("vocab_size")
            self._tokenizer = _read_tokenizer(self.model, rows, self._architecture.name)
            trim_heap()  # tens of MB of small objects are gone
        return self._tokenizer


def _ungrouped(target: OutTensor, keys: int, queries: int, size: int) -> Joined:
    """Return fused rows with all queries first, then all keys; models group them by key head."""
    row, group = math.prod(target.shape[1:]), queries + 2
    heads = [(at * group, at * group + queries) for at in range(keys)]
    heads += [
        (at * group + n, at * group + n + 1) for n in (queries, queries + 1) for at in range(keys)
    ]
    return Joined(tuple(Slice(target.info, a * size * row, b * size * row) for a, b in heads))


def _check_kind(model: Model, name: str, target: OutTensor) -> None:
    """Refuse quantized weights that GGUF lacks; raise UnsupportedCastError for dtypes it lacks."""
    if _stored_type(target) is not None or target.quant is not None:
        return
    if target.dtype.kind != "float":
        model.refuse(
            "its weights are quantised already, and not as they would be in GGUF",
            'dtype="float16" (--dtype float16), which dequantises them, or first '
            f"streamload convert {model.path} plain/ --dtype float16",
            target.info.dtype.name,
            name,
        )
    if target.dtype.code not in _DTYPES and len(target.shape) > 1:
        names = ", ".join(BY_CODE[code].name for code in _DTYPES)
        raise UnsupportedCastError(
            target.info.dtype.name,
            target.dtype.name,
            reason=f'what runs GGUF has {names}: write dtype="float16" (--dtype float16)',
            tensor=name,
            path=target.info.shard,
        )


def _stored_type(target: OutTensor) -> TensorType | None:
    """Return the GGUF type of a weight's blocks, which are copied; None for any other tensor."""
    return BLOCKS_OF.get(target.stored.kind) if target.stored is not None else None


def _described(target: OutTensor) -> Described:
    """Return a tensor's entry in a GGUF header, with its shape in elements."""
    if target.stored is not None:
        return Described(target.name, target.stored.shape, BLOCKS_OF[target.stored.kind])
    kind = TENSOR_TYPE_OF[(target.quant or target.dtype.code).upper()]
    return Described(target.name, target.shape, kind)


def _read_tokenizer(model: Model, count: object, architecture: str) -> _Tokenizer:
    """Return the metadata of the model's tokenizer, without a vocabulary if the model has none.

    ``count`` is the number of rows of the embedding, one a token. Raise CheckpointError if the
    model has tokenizer files but no tokenizer.json.
    """
    if type(count) is not int:
        model.refuse("nothing says how many tokens there are", "an embedding, or vocab_size")
    folder = _folder(model)
    if _TOKENIZER not in model.companions:
        other = next((name for name in _OTHERS if name in model.companions), None)
        if other is not None:
            model.refuse(
                "its tokenizer is read from tokenizer.json alone; this writes it: "
                f'transformers.AutoTokenizer.from_pretrained("{folder}")'
                f'.save_pretrained("{folder}")',
                _TOKENIZER,
                other,
            )
        note = "there is no tokenizer.json: what runs the file takes and gives numbers of tokens"
        found, notes = no_vocabulary(count, architecture), [note]
    else:
        settings: dict[str, Any] = {}
        for name in _SETTINGS:
            if name in model.companions:
                settings |= _object(model, name)
        if _TEMPLATE in model.companions:
            settings["chat_template"] = model.companions[_TEMPLATE]().decode("utf-8", "replace")
        tokenizer = _object(model, _TOKENIZER, parse_tokenizer)
        found, notes = to_gguf(folder / _TOKENIZER, tokenizer, settings, model.config, count)
    return _Tokenizer(metadata_bytes(found), frozenset(found), notes)


def _folder(model: Model) -> Location:
    """Return the folder of a model's files."""
    return next(iter(model.tensors.values())).info.shard.parent


def _object(model: Model, name: str, parse: Callable[[bytes], Any] = parse_json) -> dict[str, Any]:
    """Return the JSON object in the model's file ``name``; raise CheckpointError if it is none."""
    try:
        found = parse(model.companions[name]())
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_folder(model) / name, "is not JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise CheckpointError(_folder(model) / name, "is not an object of JSON", "{...}")
    return found
