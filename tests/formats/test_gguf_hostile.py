"""GGUF files that lie: one of our errors each, and no memory beyond what the file's size allows."""

from __future__ import annotations

import math
import struct
import tracemalloc
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few

from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.errors import CheckpointError
from streamload.files.header import Limits
from streamload.loading.load import load_state_dict

HUGE = 2**64 - 1
_CODES = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    """A string: its length, and its bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: Any) -> bytes:
    """A key and its value; a value of bytes stands as it is."""
    if not isinstance(value, bytes):
        value = struct.pack(f"<{_CODES[kind]}", value) if kind in _CODES else text(value)
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, raw: bytes) -> bytes:
    """The value of an array."""
    return struct.pack("<IQ", kind, count) + raw


def tensor(name: str | bytes, axes: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """What is said of a tensor; the innermost axis comes first."""
    said = text(name) + struct.pack("<I", len(axes))
    return said + struct.pack(f"<{len(axes)}Q", *axes) + struct.pack("<IQ", kind, offset)


def file(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 4096,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file of these parts."""
    said = (len(tensors), len(pairs)) if counts is None else counts
    head = magic + struct.pack("<IQQ", version, *said) + b"".join((*pairs, *tensors))
    return head + bytes(-len(head) % 32 + data)


HEADS = "llama.attention.head_count"
LLAMA = (
    pair("general.architecture", 8, "llama"),
    pair(HEADS, 4, 4),
    pair("llama.attention.head_count_kv", 4, 2),
)
QUERIES = "blk.0.attn_q.weight"
A = tensor("a", (8, 8))


def nested(depth: int) -> bytes:
    """An array in an array in an array."""
    return array(9, 1, nested(depth - 1)) if depth else array(4, 1, bytes(4))


def of(name: str, **settings: Any) -> tuple[bytes, ...]:
    """Keys of an architecture; dots are written as two underscores, bytes are arrays."""
    out = [pair("general.architecture", 8, name)]
    for key, value in settings.items():
        kind = {int: 4, float: 6, bytes: 9, str: 8, bool: 7}[type(value)]
        out.append(pair(f"{name}.{key.replace('__', '.')}", kind, value))
    return tuple(out)


EXPERTS = "blk.0.ffn_gate_exps.weight"
FALCON = of("falcon", attention__head_count=4, attention__head_count_kv=2)
QKV = "blk.0.attn_qkv.weight"
QKVS = "attn_qkv", (1, 3 * 4096), 24  # of as many heads
#: By what is wrong: the file, and what the error says.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut off"),
    "magic alone": (b"GGUF", "cut off"),
    "another magic": (file(magic=b"GGML"), "is not a GGUF file.*found b'GGML'"),
    "reversed magic": (file(magic=b"FUGG"), "is not a GGUF file"),
    "version 0": (file(version=0), "version 2 or 3, little-endian, found version 0"),
    "version 1": (file(version=1), "found version 1"),
    "version 4": (file(version=4), "found version 4"),
    "big-endian": (file(version=3 << 24), "found a big-endian file of version 3"),
    "no counts": (file()[:12], "cut off"),
    "too many pairs": (file(counts=(0, HUGE)), "more metadata than fits into it"),
    "more pairs than there are": (file(LLAMA[:1], data=0, counts=(0, 2)), "cut off|not valid"),
    "too many tensors": (file(counts=(HUGE, 0)), "more tensors than fit into it"),
    "more tensors than there are": (file([], [A], data=0, counts=(9, 0)), "more tensors"),
    "key longer than the file": (file([struct.pack("<Q", 2**40)]), "cut off"),
    "key of 2**64 - 1 bytes": (file([struct.pack("<Q", HUGE)]), "cut off"),
    "empty key": (file([pair("", 4, 1)]), "a key is not valid"),
    "key of other bytes": (file([pair(b"\xff\xfe", 4, 1)]), "a key is not valid.*UTF-8"),
    "the same key twice": (file([LLAMA[0], LLAMA[0]]), "a key is not unique"),
    "type 13": (file([pair("a", 13, b"")]), "the type of 'a' is not valid"),
    "type 2**32 - 1": (file([pair("a", 2**32 - 1, b"")]), "the type of 'a' is not valid"),
    "bool of 2": (file([pair("a", 7, b"\2")]), "'a' is not valid.*0 or 1, found 2"),
    "string longer than the file": (file([pair("a", 8, struct.pack("<Q", 2**62))]), "cut off"),
    "array of 2**64 - 1 bytes": (file([pair("a", 9, array(0, HUGE, b""))]), "cut off"),
    "array of 2**63 doubles": (file([pair("a", 9, array(12, 2**63, b""))]), "cut off"),
    "array of 2**60 strings": (
        file([pair("a", 9, array(8, 2**60, b""))]),
        "longer than what is left",
    ),
    "array of 2**60 arrays": (
        file([pair("a", 9, array(9, 2**60, b""))]),
        "longer than what is left",
    ),
    "string in an array past the end": (
        file([pair("a", 9, array(8, 2, text("x") + struct.pack("<Q", 2**50)))]),
        "cut off",
    ),
    "array of no type": (file([pair("a", 9, array(99, 1, b""))]), "type of 'a' is not valid"),
    "arrays in arrays": (file([pair("a", 9, nested(500))]), "arrays in arrays up to 4"),
    "alignment 0": (file([pair("general.alignment", 4, 0)]), "alignment is not valid"),
    "alignment 24": (file([pair("general.alignment", 4, 24)]), "a power of two, found 24"),
    "alignment as text": (file([pair("general.alignment", 8, "32")]), "alignment is not valid"),
    "alignment past the end": (
        file([pair("general.alignment", 10, 2**63)], [tensor("a", (1,))]),
        "shorter than its header says",
    ),
    "tensor's name past the end": (file([], [struct.pack("<Q", 2**33)]), "cut off"),
    "tensor without a name": (file([], [tensor("", (8,))]), "name is not valid"),
    "tensor's name of other bytes": (file([], [tensor(b"\xc3", (8,))]), "name is not valid"),
    "tensor of 6 axes": (file([], [tensor("a", (1,) * 6)]), "too many axes.*at most 5, found 6"),
    "original shape of more elements": (
        file([pair("comfy.gguf.orig_shape.a", 9, array(5, 2, struct.pack("<2i", 8, 9)))], [A]),
        r"'a': its original shape.*that of \[8, 8\], found \[8, 9\]",
    ),
    "original shape below 0": (
        file([pair("comfy.gguf.orig_shape.a", 9, array(5, 2, struct.pack("<2i", -8, -8)))], [A]),
        "'a': its original shape",
    ),
    "original shape as text": (file([pair("comfy.gguf.orig_shape.a", 8, "8")], [A]), "'a': its or"),
    "tensor of 2**32 - 1 axes": (
        file([], [text("a") + struct.pack("<I", 2**32 - 1) + bytes(24)]),
        "too many axes",
    ),
    "more elements than 64 bits": (file([], [tensor("a", (2**40, 2**40))]), "shape is too large"),
    "elements past the end": (file([], [tensor("a", (2**40,))]), "a.*shorter than its header says"),
    "offset past the end": (file([], [tensor("a", (8,), 0, 2**40)]), "shorter than its header"),
    "offset of 2**64 - 32": (file([], [tensor("a", (8,), 0, 2**64 - 32)]), "shorter than its"),
    "offset that is not aligned": (file([], [tensor("a", (8,), 0, 4)]), "not aligned.*of 32"),
    "tensor in another": (file([], [A, tensor("b", (8,), 0, 32)]), "'b': begins inside another"),
    "the same bytes twice": (file([], [A, tensor("b", (8, 8))]), "begins inside another"),
    "the same name twice": (file([], [A, tensor("a", (8,), 0, 256)]), "a name is not unique"),
    "two names of one parameter": (
        file(LLAMA[:1], [tensor("output.weight", (8,)), tensor("lm_head.weight", (8,), 0, 256)]),
        "'lm_head.weight': a name is not unique",
    ),
    "type of tensors 4": (file([], [tensor("a", (32,), 4)]), "its type is not read.*found 4"),
    "type of tensors 2**31": (file([], [tensor("a", (32,), 2**31)]), "its type is not read"),
    "a type that is not read": (file([], [tensor("a", (256,), 16)]), "found IQ2_XXS"),
    "rows that are no blocks": (file([], [tensor("a", (33,), 8)]), "not blocks of Q8_0.*of 32"),
    "a scalar of blocks": (file([], [tensor("a", (), 8)]), "not blocks of Q8_0"),
    "rows that are no heads": (file(LLAMA, [tensor(QUERIES, (8, 12))]), "split into heads"),
    "no heads": (file(LLAMA[:1], [tensor(QUERIES, (8, 8))]), "split into heads"),
    "0 heads": (file([LLAMA[0], pair(HEADS, 4, 0)], [tensor(QUERIES, (8, 8))]), "split into heads"),
    "heads of float": (
        file([LLAMA[0], pair(HEADS, 6, 4.0)], [tensor(QUERIES, (8, 8))]),
        "split into heads",
    ),
    "a stack without tensors": (
        file(of("qwen3moe"), [tensor(EXPERTS, (4, 4, 0))]),
        r"ffn_gate_exps.*cannot be split.*1 to 4096 tensors, found \[0, 4, 4\]",
    ),
    "a stack of 2**40 empty tensors": (
        file(of("qwen2moe"), [tensor(EXPERTS, (0, 4, 2**40))]),
        "cannot be split",
    ),
    "a stack of 4097 tensors": (
        file(of("qwen3moe"), [tensor(EXPERTS, (1, 1, 4097))], 2**15),
        "cannot be split.*1 to 4096",
    ),
    "a stack of one axis": (file(of("qwen3moe"), [tensor(EXPERTS, (8,))]), "cannot be split"),
    "fused rows that share a block": (
        file(FALCON, [tensor("blk.0.attn_qkv.bias", (256,), 8)]),
        "cannot be reordered.*whole blocks of 32, found 1",
    ),
    "rows in turn that share a block": (
        file(
            of("gpt-oss"),
            [
                tensor("blk.0.ffn_gate_exps.bias", (64, 2), 8),
                tensor("blk.0.ffn_up_exps.bias", (64, 2), 8, 160),
            ],
        ),
        "cannot be reordered.*whole blocks of 32, found 1",
    ),
    "a stack that is a scalar": (file(of("qwen3moe"), [tensor(EXPERTS, ())]), "cannot be split"),
    "norms of no head": (
        file(of("stablelm"), [tensor("blk.0.attn_q_norm.weight", (4, 0))]),
        "cannot be split",
    ),
    "two tensors of one expert": (
        file(
            of("qwen3moe"),
            [
                tensor(EXPERTS, (4, 4, 2)),
                tensor("model.layers.0.mlp.experts.1.gate_proj.weight", (4, 4), 0, 128),
            ],
        ),
        "a name is not unique",
    ),
    "norms in half precision": (
        file(of("gemma2"), [tensor("blk.0.attn_norm.weight", (8,), 1)]),
        "attn_norm.*cannot be shifted: expected F32, found F16",
    ),
    "norms in blocks": (
        file(of("gemma3"), [tensor("output_norm.weight", (32,), 8)]),
        "cannot be shifted: expected F32, found Q8_0",
    ),
    "fused rows that are no heads": (
        file(FALCON, [tensor(QKV, (4, 15))]),
        "split into heads.*15 rows are not 4 queries and twice 2 keys",
    ),
    "fused rows that are a scalar": (file(FALCON, [tensor(QKV, ())]), "split into heads"),
    "fused rows without elements": (file(FALCON, [tensor(QKV, (0, 16))]), "split into heads"),
    "fused rows of no heads": (file(of("falcon"), [tensor(QKV, (4, 16))]), "split into heads"),
    "more keys than queries": (
        file(
            of("falcon", attention__head_count=2, attention__head_count_kv=4),
            [tensor(QKV, (4, 16))],
        ),
        "num_kv_heads 4 are invalid",
    ),
    "keys that do not divide queries": (
        file(
            of("falcon", attention__head_count=4, attention__head_count_kv=3),
            [tensor(QKV, (4, 40))],
        ),
        "40 rows are not 4 queries",
    ),
    "5000 key heads": (
        file(
            of("falcon", attention__head_count=5000, attention__head_count_kv=5000),
            [tensor(QKV, (1, 15000))],
            2**16,
        ),
        "1 to 4096 key heads, found 5000",
    ),
    "2**32 - 1 layers": (
        file(of("gemma2", block_count=2**32 - 1)),
        "at most 4096 layers.*gemma2.block_count 4294967295",
    ),
    "layers below 0": (
        file([*of("gemma3"), pair("gemma3.block_count", 5, -1)]),
        "gemma3.block_count -1",
    ),
    "layers that are no number": (
        file(of("phi3", block_count=float("nan"))),
        "phi3.block_count nan",
    ),
    "2**31 experts": (file(of("gpt-oss", expert_count=2**31)), "gpt-oss.expert_count 2147483648"),
    "experts that differ": (
        file(of("qwen2moe", expert_used_count=array(4, 2, struct.pack("<2I", 2, 4)))),
        "different settings.*expert_used_count",
    ),
    "a window of text": (
        file(of("gemma2", block_count=2, attention__sliding_window_pattern="x")),
        "sliding_window_pattern x of 2 layers",
    ),
    "windows of fewer layers": (
        file(
            [
                *of("gemma3", block_count=3, attention__sliding_window=4),
                pair("gemma3.attention.sliding_window_pattern", 9, array(7, 2, b"\1\0")),
            ]
        ),
        r"sliding_window_pattern \[.*\] of 3 layers",
    ),
    "a window below 0": (
        file(
            [*of("gpt-oss", block_count=2), pair("gpt-oss.attention.sliding_window_pattern", 5, -6)]
        ),
        "sliding_window_pattern -6 of 2 layers",
    ),
    "rows in turn that overlap": (
        file(
            of("gpt-oss"),
            [tensor(EXPERTS, (8, 4, 2)), tensor("blk.0.ffn_up_exps.weight", (8, 4, 2), 0, 32)],
        ),
        "begins inside another",
    ),
    "two tensors of rows in turn": (
        file(
            of("gpt-oss"),
            [
                tensor(EXPERTS, (8, 4, 2)),
                tensor("blk.0.ffn_up_exps.weight", (8, 4, 2), 0, 256),
                tensor("model.layers.0.mlp.experts.gate_up_proj", (8,), 0, 512),
            ],
        ),
        "a name is not unique",
    ),
    "split as text": (file([pair("split.count", 8, "2")], [A]), "split.count are invalid"),
    "split without a number in its name": (
        file([pair("split.count", 2, 3), pair("split.no", 2, 1)], [A]),
        "has another name.*00002-of-00003.gguf",
    ),
}


#: A valid file of each of some architectures, whose tensors are split, joined, and shifted.
OTHERS = {
    "qwen3moe": file(
        of("qwen3moe", block_count=1, expert_count=2, expert_used_count=1),
        [tensor(EXPERTS, (32, 2, 2), 8), tensor("blk.0.ffn_gate_inp_shexp.weight", (8,), 0, 160)],
    ),
    "gpt-oss": file(
        of("gpt-oss", block_count=2, attention__sliding_window=4, rope__scaling__type="yarn"),
        [
            tensor(EXPERTS, (32, 3, 2), 39),
            tensor("blk.0.ffn_up_exps.weight", (32, 3, 2), 39, 128),
            tensor("blk.0.ffn_gate_exps.bias", (3, 2), 0, 256),
            tensor("blk.0.ffn_up_exps.bias", (3, 2), 0, 288),
            tensor("blk.0.ffn_down_exps.weight", (8, 4, 2), 0, 320),
            tensor("blk.0.attn_sinks.weight", (4,), 0, 576),
        ],
    ),
    "gemma3": file(
        [
            *of("gemma3", block_count=2, attention__head_count=2, attention__sliding_window=4),
            pair("gemma3.attention.sliding_window_pattern", 9, array(7, 2, b"\1\0")),
        ],
        [tensor("blk.0.attn_norm.weight", (8,)), tensor("output_norm.weight", (8,), 0, 32)],
    ),
    "falcon": file(
        FALCON, [tensor(QKV, (4, 16)), tensor("blk.0.attn_norm_2.weight", (4,), 0, 256)]
    ),
    "stablelm": file(
        of("stablelm", embedding_length=16, attention__head_count=2, rope__dimension_count=2)
        + of("stablelm", use_parallel_residual=True)[1:],
        [tensor("blk.0.attn_q_norm.weight", (8, 2)), tensor("blk.0.attn_q.bias", (4,), 0, 64)],
    ),
    "phi3": file(
        of("phi3", rope__scaling__original_context_length=16, attention__sliding_window=0),
        [
            tensor("rope_factors_long.weight", (4,)),
            tensor("rope_factors_short.weight", (4,), 0, 32),
            tensor("blk.0.attn_qkv.weight", (4, 4), 0, 64),
        ],
    ),
    "adapter": file(
        (*LLAMA[:1], pair("general.type", 8, "adapter"), pair("adapter.lora.alpha", 6, 8.0)),
        [tensor(f"{QUERIES}.lora_a", (8, 2)), tensor(f"{QUERIES}.lora_b", (2, 8), 0, 64)],
    ),
}
HOSTILE |= {
    f"2**32 - 1 layers of {name}": (file(of(name, block_count=2**32 - 1)), "at most 4096 layers")
    for name in ("gemma3", "phi3", "qwen2moe", "qwen3moe", "gpt-oss", "stablelm", "falcon")
} | {
    f"{name} cut off": (raw[: len(raw) - 4096 + 4], "shorter than its header says")
    for name, raw in OTHERS.items()
}


def opened(path: Path, raw: bytes) -> Checkpoint:
    """Open a file of these bytes; the memory for it is bounded by their length."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        return open_checkpoint(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20 + 40 * len(raw), peak


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("warm") / "a.gguf"
    path.write_bytes(file(LLAMA, [A]))
    open_checkpoint(path)


def test_the_parts_make_a_valid_file(tmp_path: Path) -> None:
    more = (pair("x", 9, array(8, 2, text("a") + text(b"\xff"))), pair("y", 9, nested(3)))
    said = (*LLAMA, *more, pair("general.alignment", 4, 64))
    tensors = [tensor("b", (32, 2), 8, 256), tensor("a", (8, 8)), tensor("c", (0, 4), 0, 256)]
    checkpoint = opened(tmp_path / "a.gguf", file(said, tensors))
    assert [(i.name, i.shape) for i in checkpoint.tensors.values()] == [
        ("a", (8, 8)),
        ("c", (4, 0)),
        ("b", (2, 34)),
    ]
    assert checkpoint.tensors["a"].start % 64 == 0
    assert checkpoint.config["num_attention_heads"] == 4
    assert not opened(tmp_path / "v2.gguf", file(version=2)).tensors


@pytest.mark.parametrize(("raw", "said"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_one_of_our_errors(raw: bytes, said: str, tmp_path: Path) -> None:
    assert len(HOSTILE) > 100
    with pytest.raises(CheckpointError, match=said) as error:
        opened(tmp_path / "model.gguf", raw)
    assert "model.gguf" in str(error.value)


def test_a_large_file_of_lies_takes_little_memory(tmp_path: Path) -> None:
    """Lengths near that of a sparse file of 1 TB are not believed, and not allocated."""
    for pairs, said in (
        ([pair("a", 8, struct.pack("<Q", 2**39))], "too long"),
        ([pair("a", 9, array(0, 2**39, b""))], "too long"),
        ([pair("a", 9, array(8, 2**36, b""))], "longer than what is left"),
        ([pair("a", 9, array(9, 2**36, b""))], "longer than what is left"),
        ([struct.pack("<Q", 2**38)], "too long"),
    ):
        path = tmp_path / "model.gguf"
        path.write_bytes(file(pairs))
        with path.open("r+b") as out:
            out.truncate(2**40)
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match=said):
                open_checkpoint(path)
            assert tracemalloc.get_traced_memory()[1] < 2**26
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("metadata", "name", "shape", "kind"),
    [
        (of("qwen3moe"), "ffn_gate_exps", (1, 1, 4096), 24),
        pytest.param(
            *(of("falcon", attention__head_count=4096, attention__head_count_kv=4096), *QKVS),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["experts", "heads"],
)
def test_few_entries_of_many_parts_take_little_memory(
    metadata: tuple[bytes, ...], name: str, shape: tuple[int, ...], kind: int, tmp_path: Path
) -> None:
    """A header of 100 KB does not become millions of tensors; ``limits=`` counts them, too."""
    stride = -(-math.prod(shape) // 32) * 32
    tensors = [tensor(f"blk.{at}.{name}.weight", shape, kind, at * stride) for at in range(1500)]
    path = tmp_path / "model.gguf"
    path.write_bytes(file(metadata, tensors))
    with path.open("r+b") as out:
        out.truncate(2**32)
    with pytest.raises(CheckpointError, match="too many parts"):
        open_checkpoint(path)


def test_experts_count_for_limits(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file(of("qwen3moe"), [tensor(EXPERTS, (4, 4, 8))]))
    assert len(open_checkpoint(path, limits=Limits(tensors=8)).tensors) == 8
    with pytest.raises(CheckpointError, match="too many tensors"):
        open_checkpoint(path, limits=Limits(tensors=7))


VALID = file(
    (
        *LLAMA,
        pair("llama.rope.freq_base", 6, 5e5),
        pair("llama.embedding_length", 4, 8),
        pair("tokenizer.ggml.tokens", 9, array(8, 3, text("a") + text("b") + text("cd"))),
        pair("y", 9, nested(2)),
        pair("general.alignment", 4, 32),
    ),
    [
        tensor("token_embd.weight", (8, 16)),
        tensor(QUERIES, (8, 8), 0, 512),
        tensor("rope_freqs.weight", (2,), 0, 768),
        tensor("blk.0.ffn_up.weight", (256, 2), 12, 1024),
        tensor("output.weight", (32, 2), 8, 2048),
    ],
)
_EDGES = [0, 1, 2, 7, 2**7, 2**8 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, HUGE]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with some bytes, or numbers, replaced, inserted or cut out."""
    valid = draw(st.sampled_from([VALID, *OTHERS.values()]))
    raw = bytearray(valid)
    header = len(valid) - 4096
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(min(header, len(raw) - 1), 0)))
        kind = draw(st.sampled_from(["byte", "u64", "u32", "cut", "insert", "end"]))
        if kind == "byte":
            raw[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind in ("u64", "u32"):
            nbytes = 8 if kind == "u64" else 4
            value = draw(st.sampled_from(_EDGES)) % 2 ** (8 * nbytes)
            raw[at : at + nbytes] = value.to_bytes(nbytes, "little")
        elif kind == "cut":
            del raw[at : at + draw(st.integers(1, 16))]
        elif kind == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=16))
        else:
            del raw[at:]
            raw += b"\0"
    return bytes(raw)


@settings(
    max_examples=few(1500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(raw=mutated())
def test_mutated_files_are_valid_or_one_of_our_errors(raw: bytes, tmp_path: Path) -> None:
    """Nothing else comes out, whatever the bytes, and little memory is taken."""
    with warnings.catch_warnings(action="ignore"):
        try:
            checkpoint = opened(tmp_path / "model.gguf", raw)
        except CheckpointError:
            return
    reach = checkpoint.shards[0].reach_nbytes
    for info in checkpoint.tensors.values():
        assert 0 <= info.start <= info.stop <= reach
        assert info.nbytes == info.dtype.nbytes(info.numel)
    for view in checkpoint.shards[0].views:
        (chunk,) = view.chunks
        last = sum((n - 1) * step for n, step in zip(chunk.shape, chunk.strides, strict=True))
        assert 0 <= chunk.at <= chunk.at + last + view.itemsize <= len(raw)


@pytest.mark.slow
@pytest.mark.parametrize("raw", OTHERS.values(), ids=OTHERS)
def test_every_setting_at_its_edges(raw: bytes, tmp_path: Path) -> None:
    for at in range(24, len(raw) - 4096 - 4):
        for value in (0, 2**16, 2**31, 2**32 - 1):
            changed = bytearray(raw)
            changed[at : at + 4] = value.to_bytes(4, "little")
            with warnings.catch_warnings(), suppress(CheckpointError):
                warnings.simplefilter("ignore")
                opened(tmp_path / "model.gguf", bytes(changed))


@pytest.mark.parametrize("raw", OTHERS.values(), ids=OTHERS)
def test_the_other_parts_make_valid_files(raw: bytes, tmp_path: Path) -> None:
    checkpoint = opened(tmp_path / "model.gguf", raw)
    found = load_state_dict(None, checkpoint, device="host", budget="1GB").state_dict
    assert len(found) == len(checkpoint.tensors) > 0
