"""Converting in tests, plain reads of what came of it, and the formats read and written."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import needs
import numpy as np
from make_checkpoint import make_checkpoint, shape_of_size

from streamload.checkpoint.open import open_checkpoint
from streamload.codecs.cast_reference import cast_array
from streamload.conversion.convert import ConvertReport, convert
from streamload.core.dtypes import BF16, F32, DType
from streamload.formats.gguf import layout as gguf_bytes
from streamload.formats.gguf.architectures import ARCHITECTURES
from streamload.formats.gguf.constants import ALIGNMENT, TENSOR_TYPE_OF
from streamload.formats.gguf.names import metadata_of


def quiet(source: Path, destination: Path, **arguments: Any) -> ConvertReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that values overflowed
        return convert(source, destination, **({"progress": False} | arguments))


def tensors_of(path: Path) -> dict[str, tuple[DType, tuple[int, ...], bytes]]:
    found = {}
    for info in open_checkpoint(path).tensors.values():
        assert isinstance(info.shard, Path)
        with open(info.shard, "rb") as file:
            file.seek(info.start)
            found[info.name] = (info.dtype, info.shape, file.read(info.nbytes))
    return found


def reference(data: bytes, src: DType, dst: DType) -> bytes:
    """The bytes that numpy casts them to."""
    if src is dst:
        return data
    return bytes(cast_array(np.frombuffer(data, src.numpy), dst).tobytes())


def same_values(found: bytes, expected: bytes, dtype: DType) -> bool:
    left, right = (np.frombuffer(data, dtype.numpy) for data in (found, expected))
    if dtype.kind != "float":
        return found == expected
    with np.errstate(invalid="ignore"):  # a signalling NaN
        nan = np.isnan(left) & np.isnan(right)
    bits = np.frombuffer(found, f"V{dtype.itemsize}") == np.frombuffer(
        expected, f"V{dtype.itemsize}"
    )
    return bool(np.all(nan | bits))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


# --- the formats that are read and written --------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A format in the tests that all formats share (tests/conversion/test_convert_formats.py)."""

    # writes a checkpoint of about so many bytes, in the dtype that is written or another of 16 bits
    make: Callable[[Path, int], object]
    options: dict[str, Any]  # of `convert`; plain JSON values
    speed: float = 0.6  # the least of it, of the speed of the plain cast
    file: str = ""  # where a server is asked for that alone; "" for the folder
    decoded: float = 1.0  # bytes of 16-bit elements that a byte of the source stands for


@dataclass(frozen=True)
class Gpt2Shape:
    """The numbers that a GPT-2's tensors follow from."""

    vocab: int
    width: int
    layers: int
    positions: int = 64

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Gpt2Shape:
        return cls(*(config[key] for key in ("vocab_size", "n_embd", "n_layer", "n_positions")))

    def bare(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes as in the first checkpoints: without a prefix, and with masks."""
        found = {name.removeprefix("transformer."): n for name, n in self.tensors().items()}
        mask = (1, 1, self.positions, self.positions)
        return found | {f"h.{i}.attn.bias": mask for i in range(self.layers)}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names (transformers') and shapes; matrices are those of Conv1D."""
        n = self.width
        found: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (self.vocab, n),
            "transformer.wpe.weight": (self.positions, n),
        }
        layer: dict[str, tuple[int, ...]] = {
            "ln_1.weight": (n,),
            "ln_1.bias": (n,),
            "attn.c_attn.weight": (n, 3 * n),
            "attn.c_attn.bias": (3 * n,),
            "attn.c_proj.weight": (n, n),
            "attn.c_proj.bias": (n,),
            "ln_2.weight": (n,),
            "ln_2.bias": (n,),
            "mlp.c_fc.weight": (n, 4 * n),
            "mlp.c_fc.bias": (4 * n,),
            "mlp.c_proj.weight": (4 * n, n),
            "mlp.c_proj.bias": (n,),
        }
        for i in range(self.layers):
            found |= {f"transformer.h.{i}.{name}": shape for name, shape in layer.items()}
        return found | {"transformer.ln_f.weight": (n,), "transformer.ln_f.bias": (n,)}

    def config(self, dtype: DType) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": self.width,
            "n_head": 4,
            "n_layer": self.layers,
            "n_positions": self.positions,
            "torch_dtype": dtype.name,
            "vocab_size": self.vocab,
        }


def make_gpt2(path: Path, nbytes: int, dtype: DType = BF16) -> None:
    """A GPT-2 with layers as wide as those of the largest one, where there is room for three."""
    numel = nbytes // dtype.itemsize
    width = next(n for n in (1600, 768, 128, 32, 16) if 40 * n * n < numel)
    layers = numel // (13 * width * width)
    vocab = max((numel - 12 * width * width * layers) // width, 100)
    make_checkpoint(path, Gpt2Shape(vocab, width, layers), dtype=dtype, shards=2)


def make_llama(path: Path, nbytes: int) -> None:
    make_checkpoint(path, shape_of_size(nbytes, BF16), shards=2)


def make_torch(path: Path, nbytes: int) -> None:
    save = needs.module("torch").save
    load = needs.module("safetensors.torch").load_file  # as views of the mapped file
    plain = path.with_name(f"{path.name}.plain")
    make_checkpoint(plain, shape_of_size(nbytes, BF16))
    path.mkdir(parents=True)
    save(load(plain / "model.safetensors"), path / "pytorch_model.bin")
    shutil.move(plain / "config.json", path)
    shutil.rmtree(plain)


def make_gguf(path: Path, nbytes: int, kind: str) -> None:
    """The same in a GGUF file, with blocks of a type for all matrices that it divides.

    Scales and minima are small and positive, and codes random, from one pool of blocks.
    """
    block = TENSOR_TYPE_OF[kind].dtype
    block_nbytes = block.nbytes(block.block)
    numel = nbytes * block.block // block_nbytes
    shape = shape_of_size(2 * numel, BF16)
    entries = []
    for name, axes in shape.tensors().items():
        fits = len(axes) == 2 and axes[-1] % block.block == 0
        of = kind if fits else "F32" if len(axes) == 1 else "F16"
        own = ARCHITECTURES["llama"].to_gguf(name)
        assert own is not None, name
        entries.append(gguf_bytes.Described(own, axes, TENSOR_TYPE_OF[of]))
    rng = np.random.default_rng(0)
    numbers = rng.normal(0, 0.02, 2**21)
    pools = {"F32": numbers.astype("<f4").tobytes(), "F16": numbers.astype("<f2").tobytes()}
    if kind not in pools:
        blocks = rng.integers(0, 256, (2**23 // block_nbytes, block_nbytes), np.uint8)
        scales = rng.uniform(1e-4, 1e-3, (len(blocks), 2)).astype("<f2").view(np.uint8)
        several = 4 if kind == "Q4_K" else 2  # it has minima, too
        blocks[:, :several] = scales[:, :several]
        pools[kind] = blocks.tobytes()
    settings = metadata_of(shape.config(BF16))
    path.mkdir(parents=True)
    with (path / "model.gguf").open("wb") as file:
        said = gguf_bytes.metadata_bytes(settings)
        file.write(gguf_bytes.header(said, len(settings), entries))
        for at, entry in enumerate(entries):
            pool, of = pools[entry.kind.name], entry.kind.dtype
            first = at * 1327 * of.nbytes(of.block) % len(pool)  # each from another block on
            left = entry.nbytes
            while left:
                left -= file.write(memoryview(pool)[first : first + left])
                first = 0
            file.write(bytes(-file.tell() % ALIGNMENT))


def read_gguf(kind: str) -> Written:
    """A row of `WRITTEN` for GGUF files of a type as a source."""
    block = TENSOR_TYPE_OF[kind].dtype
    decoded = 2 * block.block / block.nbytes(block.block)
    make = partial(make_gguf, kind=kind)
    return Written(make, {"dtype": "float16"}, file="model.gguf", decoded=decoded)


#: By name; "safetensors" is what others are compared with.
WRITTEN = {
    "safetensors": Written(make_llama, {"dtype": "float16"}),
    "irpa": Written(make_llama, {"to": "irpa", "dtype": "float16"}),
    "llm.c": Written(partial(make_gpt2, dtype=F32), {"to": "llm.c"}),
    "llm.c-bf16": Written(make_gpt2, {"to": "llm.c", "dtype": "bfloat16"}),
    "gguf": Written(make_llama, {"to": "gguf", "dtype": "float16"}),
    "gguf-q8_0": Written(make_llama, {"to": "gguf", "quant": "q8_0"}),
    "gguf-q4_0": Written(make_llama, {"to": "gguf", "quant": "q4_0"}),
    "mlc-q4f16_1": Written(make_llama, {"to": "mlc", "quant": "q4f16_1"}),
    "mlc-q4f16_0": Written(make_llama, {"to": "mlc", "quant": "q4f16_0"}),
    "mlc-q3f16_1": Written(make_llama, {"to": "mlc", "quant": "q3f16_1"}),
    "mlc-q4f32_1": Written(make_llama, {"to": "mlc", "quant": "q4f32_1"}),
    # the md5 sums of all bytes take more of the CPU than the plain cast (docs/measurements.md)
    "mlc-q0f16": Written(make_llama, {"to": "mlc", "quant": "q0f16"}, speed=0.25),
    "from .pth": Written(make_torch, {"dtype": "float16"}, file="pytorch_model.bin"),
    "from gguf-f16": read_gguf("F16"),
    "from gguf-q8_0": read_gguf("Q8_0"),
    "from gguf-q4_K": read_gguf("Q4_K"),
}
