#!/usr/bin/env python3
"""Write a Llama-shaped safetensors checkpoint of any size, quickly and in little memory.

    make_checkpoint.py OUT --size 2.27GB
    make_checkpoint.py OUT --preset llama-3-8b --shards 4
    make_checkpoint.py OUT --size 16GB --tensors 50000

OUT becomes a folder as Hugging Face publishes them: ``config.json`` and ``model.safetensors``, or
shards with ``model.safetensors.index.json``. It must not exist or be empty; it is there when it is
complete. Values are normal with sigma 0.02 (norms: around 1), the same for the same seed and numpy
version. One block of random values is drawn and written over and over, each time from another place
in it, so that writing is as fast as the disk, in memory of its own below 100 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from streamload.core.dtypes import DType, parse_dtype
from streamload.core.units import format_bytes, parse_bytes

SIGMA = 0.02
DTYPES = ("bfloat16", "float16", "float32")
SMALL_DTYPES = ("float8_e4m3fn", "float8_e5m2")  # without extremes
BLOCK_NUMEL = 2**22 + 2**4  # 8 MiB of bf16, and a bit, so that shifts do not fall on pages
SHIFT_NUMEL = 1_327_217  # a prime: how far each next use of the block starts after the last

_THREADS = 8
_WRITE_NBYTES = 2**26  # a thread's part, about

#: Tensors that `--extremes` plants in, and where: at the start of their data.
EXTREME_TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "lm_head.weight",
)


class Shape(Protocol):
    """What a model's tensors follow from."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, in the order of the model."""

    def config(self, dtype: DType) -> dict[str, Any]:
        """The content of config.json."""


@dataclass(frozen=True, slots=True)
class ManyTensors:
    """Tensors that are all alike: no published model has them, but they ask much of a loader."""

    count: int  # how many
    numel: int  # elements of each

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes."""
        return {f"experts.{i}.weight": (self.numel,) for i in range(self.count)}

    def config(self, dtype: DType) -> dict[str, Any]:
        """The content of config.json."""
        return {"model_type": "many", "torch_dtype": dtype.name}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers that a Llama's tensors follow from."""

    vocab: int  # rows of the embedding and of the head
    dim: int  # width
    ff: int  # width of the feed-forward layers
    layers: int  # how many layers
    heads: int  # query heads; ``dim`` is a multiple of it
    kv_heads: int  # key and value heads; ``heads`` is a multiple of it

    @property
    def numel(self) -> int:
        """Parameters in all."""
        return sum(math.prod(shape) for shape in self.tensors().values())

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names (Hugging Face's) and shapes, in the order of the model."""
        kv_dim = self.dim // self.heads * self.kv_heads
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.dim)}
        for layer in range(self.layers):
            for name, shape in {
                "input_layernorm": (self.dim,),
                "self_attn.q_proj": (self.dim, self.dim),
                "self_attn.k_proj": (kv_dim, self.dim),
                "self_attn.v_proj": (kv_dim, self.dim),
                "self_attn.o_proj": (self.dim, self.dim),
                "post_attention_layernorm": (self.dim,),
                "mlp.gate_proj": (self.ff, self.dim),
                "mlp.up_proj": (self.ff, self.dim),
                "mlp.down_proj": (self.dim, self.ff),
            }.items():
                tensors[f"model.layers.{layer}.{name}.weight"] = shape
        tensors["model.norm.weight"] = (self.dim,)
        tensors["lm_head.weight"] = (self.vocab, self.dim)
        return tensors

    def config(self, dtype: DType) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "intermediate_size": self.ff,
            "max_position_embeddings": 8192,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": dtype.name,
            "vocab_size": self.vocab,
        }


#: Shapes of published models (their config.json).
PRESETS = {
    "llama-3-8b": LlamaShape(128256, 4096, 14336, 32, 32, 8),
    "llama-2-7b": LlamaShape(32000, 4096, 11008, 32, 32, 32),
    "tinyllama-1.1b": LlamaShape(32000, 2048, 5632, 22, 32, 4),
}


def shape_of_size(nbytes: int, dtype: DType) -> LlamaShape:
    """The Llama of about ``nbytes`` bytes: as wide as it can be with a layer per 128 of width.

    The vocabulary takes up the difference, so that the size is met to a row of the embedding and
    of the head, unless it is small; never more than asked for.

    Raises:
        ValueError: no Llama is that small.
    """
    numel = nbytes * 8 // dtype.bits
    for dim in (8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 256, 128, 64, 32, 16):
        heads = max(4, dim // 128)
        one = LlamaShape(1, dim, dim * 7 // 2, 1, heads, heads // 4)
        per_row = 2 * dim
        per_layer = LlamaShape(1, dim, dim * 7 // 2, 2, heads, heads // 4).numel - one.numel
        vocab = min(32000, 16 * dim)
        layers = (numel - dim - vocab * per_row) // per_layer
        if layers >= max(1, dim // 128):
            vocab = (numel - dim - layers * per_layer) // per_row
            return LlamaShape(vocab, dim, dim * 7 // 2, layers, heads, heads // 4)
    raise ValueError(f"no Llama of {dtype} is as small as {format_bytes(nbytes)}")


def many_of_size(nbytes: int, dtype: DType, count: int) -> ManyTensors:
    """``count`` tensors of about ``nbytes`` bytes in all, never more.

    Raises:
        ValueError: there would be none, or nothing in them.
    """
    if count < 1 or nbytes * 8 // dtype.bits < count:
        raise ValueError(f"{count} tensors of {dtype} in {format_bytes(nbytes)}")
    return ManyTensors(count, nbytes * 8 // dtype.bits // count)


def extremes(dtype: DType) -> np.ndarray[Any, Any]:
    """The values that `--extremes` plants, as raw bits of ``dtype``.

    Zeros, ones, the smallest and largest subnormals and normals, infinities, NaNs (quiet,
    signalling, with a payload), and on the way to float16: the largest value that fits, the first
    that overflows, ties to even, and values that flush to zero or become subnormal; all of both
    signs.
    """
    mantissa = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype.name]
    width = dtype.bits
    infinity = ((1 << (width - 1 - mantissa)) - 1) << mantissa
    codes = [
        *(0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity),
        *(infinity | 1, infinity | 1 << (mantissa - 1), infinity | (1 << mantissa) - 1),
    ]
    unsigned = np.dtype(f"u{width // 8}")
    with np.errstate(over="ignore"):
        values = np.array(
            [
                *(1.0, 65504.0, 65520.0, 65536.0, 1e38),
                *(2**-14, 2**-24, 2**-25, 2**-25 * 1.5, 1e-30),
                *(1 + 2**-11, 1 + 3 * 2**-11),
            ],
            np.float64,
        ).astype(dtype.numpy)
    bits = np.concatenate([np.array(codes, unsigned), values.view(unsigned)])
    return np.concatenate([bits, bits | unsigned.type(1 << (width - 1))])


class _Source:
    """Random bytes by the tensor, from one block drawn in advance."""

    def __init__(self, dtype: DType, seed: int) -> None:
        rng = np.random.default_rng(seed)
        block = rng.standard_normal(BLOCK_NUMEL, np.float32)
        block *= SIGMA
        self._block = block.astype(dtype.numpy).view(np.uint8).data
        block += 1
        self._norm = block.astype(dtype.numpy).view(np.uint8).data
        self._itemsize = dtype.itemsize
        self._shift = 0

    def pieces(self, nbytes: int, norm: bool) -> list[memoryview]:
        block = self._norm if norm else self._block
        found = []
        while nbytes:
            start = self._shift * self._itemsize
            piece = block[start : start + nbytes]
            self._shift = (self._shift + SHIFT_NUMEL) % BLOCK_NUMEL
            nbytes -= len(piece)
            found.append(piece)
        return found


def _write(path: Path, start: int, pieces: Sequence[bytes | memoryview]) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.writelines(pieces)


def make_header(
    tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: DType, offset_mod_16: int = 8
) -> bytes:
    """The header of a file of tensors, by name and shape, with its length before it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + dtype.nbytes(math.prod(shape))
        entries[name] = {"dtype": dtype.code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # data begins after the length (8 bytes) and the header, which may be padded with spaces, here
    # at 0 or 8 modulo 64: at 0 the CPU computes on a mapped file
    text += b" " * ((offset_mod_16 - 8 - len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


def _split(sizes: dict[str, int], shards: int) -> list[list[str]]:
    """Names in order, cut where each shard has its share of the bytes that are left."""
    names = list(sizes)
    parts: list[list[str]] = []
    left_nbytes = sum(sizes.values())
    while names:
        left = shards - len(parts)
        count, nbytes = 1, sizes[names[0]]
        # each shard after this one keeps a tensor at least
        while count <= len(names) - left:
            if nbytes + sizes[names[count]] / 2 > left_nbytes / left:
                break
            nbytes += sizes[names[count]]
            count += 1
        parts.append(names[:count])
        names = names[count:]
        left_nbytes -= nbytes
    return parts


def make_checkpoint(
    out: Path,
    shape: Shape,
    *,
    dtype: DType | str = "bfloat16",
    shards: int = 1,
    seed: int = 0,
    plant_extremes: bool = False,
    offset_mod_16: int = 8,
) -> int:
    """Write the checkpoint.

    Args:
        out: the folder; it must not exist or be empty.
        shape: the model.
        dtype: one of `DTYPES` or `SMALL_DTYPES`.
        shards: how many files; fewer where there are fewer tensors.
        seed: chooses the values.
        plant_extremes: plant `extremes` in `EXTREME_TENSORS`; else every value is finite.
        offset_mod_16: where in each file the data begins, modulo 16: 0 or 8.

    Returns:
        The bytes of all tensors.

    Raises:
        ValueError: an argument is not one of those.
        FileExistsError: there is something in the folder.
    """
    dtype = parse_dtype(dtype)
    known = DTYPES if plant_extremes else DTYPES + SMALL_DTYPES
    if dtype.name not in known:
        raise ValueError(f"dtype is {dtype}; expected one of {', '.join(known)}")
    if offset_mod_16 not in (0, 8):
        raise ValueError(f"offset_mod_16 is {offset_mod_16}; expected 0 or 8")
    if shards < 1:
        raise ValueError(f"shards is {shards}; expected 1 or more")

    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} is there already and not an empty folder")
    partial = out.absolute().with_name(out.absolute().name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that did not finish
    partial.mkdir(parents=True)
    shapes = shape.tensors()
    sizes = {name: dtype.nbytes(math.prod(s)) for name, s in shapes.items()}
    parts = _split(sizes, shards)
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = ["model.safetensors"]

    source = _Source(dtype, seed)
    planted = extremes(dtype).tobytes() if plant_extremes else b""
    with ThreadPoolExecutor(_THREADS) as pool:  # a core writes slower than memory takes it
        written = []
        for name, part in zip(names, parts, strict=True):
            pieces: list[bytes | memoryview]
            pieces = [make_header([(t, shapes[t]) for t in part], dtype, offset_mod_16)]
            start, nbytes = 0, len(pieces[0])
            (partial / name).touch()
            for tensor in part:
                first = planted[: sizes[tensor]] if tensor in EXTREME_TENSORS else b""
                norm = "norm" in tensor and len(shapes[tensor]) == 1
                pieces += [first, *source.pieces(sizes[tensor] - len(first), norm)]
                nbytes += sizes[tensor]
                if tensor == part[-1] or nbytes > _WRITE_NBYTES:
                    written.append(pool.submit(_write, partial / name, start, pieces))
                    start, nbytes, pieces = start + nbytes, 0, []
        for one in written:
            one.result()
    total_nbytes = sum(sizes.values())
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": total_nbytes},
            "weight_map": {t: name for name, part in zip(names, parts, strict=True) for t in part},
        }
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (partial / "config.json").write_text(json.dumps(shape.config(dtype), indent=2))
    partial.rename(out)  # complete, or not there
    return total_nbytes


def main() -> None:
    """Read the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder to write")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--size", help="bytes of all tensors, such as 2.27GB")
    what.add_argument("--preset", choices=sorted(PRESETS), help="the shape of a published model")
    parser.add_argument(
        "--tensors",
        type=int,
        metavar="N",
        help="with --size: N tensors of one size instead of a Llama's",
    )
    parser.add_argument("--shards", type=int, default=1, help="number of files (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES + SMALL_DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="chooses the values (default: 0)")
    parser.add_argument(
        "--extremes",
        action="store_true",
        help="plant NaNs, infinities, subnormals and values out of float16's range at the start "
        "of " + ", ".join(EXTREME_TENSORS),
    )
    parser.add_argument(
        "--offset-mod-16",
        type=int,
        choices=(0, 8),
        default=8,
        help="where the data begins, modulo 16; half of all files in the wild have 8 (default)",
    )
    args = parser.parse_args()
    if args.tensors is not None and args.preset:
        parser.error("--tensors goes with --size")
    try:
        dtype = parse_dtype(args.dtype)
        shape: Shape
        if args.preset:
            shape = PRESETS[args.preset]
        elif args.tensors is not None:
            shape = many_of_size(parse_bytes(args.size), dtype, args.tensors)
        else:
            shape = shape_of_size(parse_bytes(args.size), dtype)
        nbytes = make_checkpoint(
            args.out,
            shape,
            dtype=dtype,
            shards=args.shards,
            seed=args.seed,
            plant_extremes=args.extremes,
            offset_mod_16=args.offset_mod_16,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"make_checkpoint: {error}")
    print(f"{args.out}: {format_bytes(nbytes)} of {dtype}, {shape}")


if __name__ == "__main__":
    main()
