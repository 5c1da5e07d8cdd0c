"""GGUF out: ``convert --to gguf`` of Llama, Mistral, Qwen2, Qwen3 and GPT-2.

One file ``model.gguf``, or with a smaller ``max_shard_size`` a set of them in the names that
llama.cpp looks for; the tokenizer is in the metadata. ``quant`` is "q8_0" or "q4_0", and is of all
matrices: the embedding and the head too. What `streamload.formats.gguf.model` says of types holds.

Source: docs/gguf.md in github.com/ggml-org/ggml, and the names of split files in
``llama_split_path`` of llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from streamload.codecs.group import Packed
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import BY_CODE, F16, F32
from streamload.core.location import Location
from streamload.core.system import trim_heap
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.formats.gguf.constants import ALIGNMENT, BLOCKS_OF, TENSOR_TYPE_OF, TensorType
from streamload.formats.gguf.layout import (
    Described,
    file_nbytes,
    header,
    metadata_bytes,
    numbered,
    split,
    split_metadata,
)
from streamload.formats.gguf.model import (
    EMBEDDING,
    Given,
    Placed,
    architecture_of,
    metadata,
    placed,
    rope_freqs,
)
from streamload.formats.gguf.names import ROPE_FREQS, is_computed
from streamload.formats.gguf.vocabulary_out import no_vocabulary, parse_tokenizer, to_gguf
from streamload.formats.writer import (
    Entry,
    FormatWriter,
    Made,
    Model,
    OutFile,
    PerModel,
    Wanted,
    register_writer,
)
from streamload.formats.writer import placed as laid_out

_QUANTS = ("q8_0", "q4_0")
_DTYPES = ("F32", "F16", "BF16")
_ALL = "**"  # "*" stands for the weights of layers alone
_TOKENIZER = "tokenizer.json"
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
_TEMPLATE = "chat_template.jinja"
#: Tokenizers that are not read; transformers writes tokenizer.json of each.
_OTHERS = ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """The metadata of a tokenizer as bytes: as values they take five times the memory."""

    raw: bytes
    keys: frozenset[str]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any], notes: Sequence[str]) -> _Tokenizer:
        return cls(metadata_bytes(metadata), frozenset(metadata), tuple(notes))


class GGUF(FormatWriter):
    """Writes GGUF files; see `FormatWriter`."""

    name = "gguf"
    max_shard_size = "1TB"  # one file: what runs it maps it
    takes_blocks = True

    def __init__(self) -> None:
        # read once for a model's notes and its files
        self._vocabularies = PerModel(self._vocabulary)

    def asked(self, dtype: Any, quant: Any) -> tuple[Any, Any]:
        """See `FormatWriter.asked`: "*" stands for all matrices."""
        rules = quant if isinstance(quant, Mapping) else {"*": quant} if quant is not None else {}
        for found in rules.values():
            if found is not None and found not in _QUANTS:
                raise ValueError(
                    f"GGUF is written with quant {' or '.join(_QUANTS)}, not {found!r}"
                )
        wider = {_ALL if pattern == "*" else pattern: found for pattern, found in rules.items()}
        return dtype, wider or None

    def tensors(self, model: Model) -> Sequence[Sequence[Wanted]]:
        """See `FormatWriter.tensors`."""
        architecture = architecture_of(model.path, model.config)
        model.check_values("llama.cpp", architecture.values)
        found = self._placed(model)
        out = [[_wanted(model.tensors[each.source], each)] for each in found]
        data = rope_freqs(model.path, model.config, architecture)
        if data:
            infos = [model.tensors[each.source].info for each in found]
            first = next((info for info in infos if info.dtype.kind == "float"), infos[0])
            made = Made.constant(len(data) // 4, data)
            out.insert(0, [Wanted(ROPE_FREQS, first, F32, (len(data) // 4,), made=made)])
        return out

    def _placed(self, model: Model) -> list[Placed]:
        architecture = architecture_of(model.path, model.config)
        kept = {name: w for name, w in model.tensors.items() if not is_computed(name)}
        for name, wanted in kept.items():
            if architecture.to_gguf(name) is not None:
                _check_kind(model, name, wanted)
        if not kept:
            model.refuse("no tensor of it is written as GGUF")
        given = [_given(name, wanted) for name, wanted in kept.items()]
        return placed(model.path, model.config, architecture, given)

    def files(
        self, model: Model, entries: Sequence[Sequence[Entry]], max_nbytes: int
    ) -> Sequence[OutFile]:
        """See `FormatWriter.files`."""
        listed = [entry for each in entries for entry in each]
        known = {each.entry.name: each.entry for each in self._placed(model)}
        known[ROPE_FREQS] = Described(ROPE_FREQS, listed[0].shape, TENSOR_TYPE_OF["F32"])
        described = [known[entry.name] for entry in listed]
        vocabulary = self._vocabularies.of(model)
        keys = metadata(model.path, model.config, described)
        keys = {key: value for key, value in keys.items() if key not in vocabulary.keys}
        raw = metadata_bytes(keys) + vocabulary.raw
        counts = split([file_nbytes(each) for each in described], max_nbytes, len(raw))
        rest = iter(zip(listed, described, strict=True))
        out = []
        for number, path in enumerate(numbered("model", len(counts))):
            mine = list(islice(rest, counts[number]))
            said, count = (raw, len(keys) + len(vocabulary.keys)) if not number else (b"", 0)
            if len(counts) > 1:
                more = split_metadata(number, len(counts), len(listed))
                said, count = said + metadata_bytes(more), count + len(more)
            head = header(said, count, [each for _, each in mine])
            out.append(laid_out(path, head, [e for e, _ in mine], ALIGNMENT, pads_end=True))
        self._vocabularies.drop()  # the header has a copy, of MBs
        del raw, said, head, vocabulary
        trim_heap()
        return out

    def notes(self, model: Model) -> Sequence[str]:
        """See `FormatWriter.notes`."""
        kinds = Counter(w.stored.kind for w in model.tensors.values() if w.stored is not None)
        stay = [f"{n} tensors stay as they are stored: {kind}" for kind, n in kinds.items()]
        window = model.config.get("sliding_window")
        if window and model.family == "mistral":
            stay.append(
                f"llama.cpp reads no sliding_window ({window}) of Mistral: tokens attend to all "
                "that come before"
            )
        return [*self._vocabularies.of(model).notes, *stay]

    def _vocabulary(self, model: Model) -> _Tokenizer:
        """What is known of the tokenizer."""
        found = _read_tokenizer(model, self._placed(model))
        trim_heap()  # tens of MB of small objects are gone
        return found


def _check_kind(model: Model, name: str, wanted: Wanted) -> None:
    """Refuse weights that are stored quantised, and dtypes that no program computes with."""
    if _stored_kind(wanted) is not None:
        return
    if wanted.dtype.kind != "float" and wanted.quant is None:
        model.refuse(
            "its weights are quantised already, and not as they would be in GGUF",
            'dtype="float16" (--dtype float16), which dequantises them, or first '
            f"streamload convert {model.path} plain/ --dtype float16",
            wanted.info.dtype.name,
            name,
        )
    if wanted.quant is None and wanted.dtype.code not in _DTYPES and len(wanted.shape) > 1:
        names = ", ".join(BY_CODE[code].name for code in _DTYPES)
        raise UnsupportedCastError(
            wanted.info.dtype.name,
            wanted.dtype.name,
            reason=f'what runs GGUF has {names}: write dtype="float16" (--dtype float16)',
            tensor=name,
            path=wanted.info.shard,
        )


def _given(name: str, wanted: Wanted) -> Given:
    kind = _stored_kind(wanted)
    if wanted.stored is not None and kind is not None:
        return Given(name, wanted.stored.shape, kind, stays=True)
    # of vectors, which have their own type, any will do
    asked = TENSOR_TYPE_OF.get((wanted.quant or wanted.dtype.code).upper(), TENSOR_TYPE_OF["F32"])
    return Given(name, wanted.shape, asked)


def _stored_kind(wanted: Wanted) -> TensorType | None:
    """The type of blocks that stay as they are stored; None where GGUF has no such blocks."""
    return BLOCKS_OF.get(wanted.stored.kind) if wanted.stored is not None else None


def _wanted(wanted: Wanted, each: Placed) -> Wanted:
    """What is written of a tensor."""
    entry, made = each.entry, wanted.made
    if each.transposed:
        made = wanted.source.transposed(*wanted.shape)
    elif each.order is not None:
        made = wanted.source.turned(each.order.groups, each.order.outer, each.order.inner)
    if _stored_kind(wanted) is not None:
        return replace(wanted, name=entry.name, made=made)
    quant = entry.kind.name.lower() if entry.kind.numel > 1 else None
    if quant is not None and isinstance(wanted.info, Packed):
        made = made or wanted.source  # dequantised to F32, and quantised again
    dtype = BY_CODE[entry.kind.code] if quant is None else F16
    return Wanted(entry.name, wanted.info, dtype, entry.shape, quant, made)


def _read_tokenizer(model: Model, found: Sequence[Placed]) -> _Tokenizer:
    rows = [each.entry.shape[0] for each in found if each.entry.name == EMBEDDING]
    count = rows[0] if rows else model.config.get("vocab_size")
    if type(count) is not int:
        model.refuse("nothing says how many tokens there are", "an embedding, or vocab_size")
    folder = _folder(model)
    if _TOKENIZER not in model.beside:
        other = next((name for name in _OTHERS if name in model.beside), None)
        if other is not None:
            model.refuse(
                "its tokenizer is read from tokenizer.json alone; this writes it: "
                f'transformers.AutoTokenizer.from_pretrained("{folder}")'
                f'.save_pretrained("{folder}")',
                _TOKENIZER,
                other,
            )
        note = "there is no tokenizer.json: what runs the file takes and gives numbers of tokens"
        name = architecture_of(model.path, model.config).name
        return _Tokenizer.of(no_vocabulary(count, name), [note])
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        if name in model.beside:
            settings |= _object(model, name)
    if _TEMPLATE in model.beside:
        settings["chat_template"] = model.beside[_TEMPLATE]().decode("utf-8", "replace")
    tokenizer = _object(model, _TOKENIZER, parse_tokenizer)
    return _Tokenizer.of(*to_gguf(folder / _TOKENIZER, tokenizer, settings, model.config, count))


def _folder(model: Model) -> Location:
    """Where the files beside a model are, which is where its tensors are."""
    return next(iter(model.tensors.values())).info.shard.parent


def _object(model: Model, name: str, parse: Callable[[bytes], Any] = parse_json) -> dict[str, Any]:
    """What a file beside a model says; raises CheckpointError where that is no object of JSON."""
    try:
        found = parse(model.beside[name]())
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(_folder(model) / name, "is not JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise CheckpointError(_folder(model) / name, "is not an object of JSON", "{...}")
    return found


register_writer(GGUF())
