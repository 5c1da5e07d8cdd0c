"""All pairs of sources, models, entrances, options and aftermaths, against plain references.

A case is a value of each dimension: ``source=nf4 model=gpt2 entrance=dict``; those that it does not
name have the first of their dimension. It is right, or refused by a rule of `REFUSED`; all else is
a fault. What is expected is computed by numpy, torch and gguf-py, from what the source's writer
stored. A new format, option or entrance is a row of its table.
"""

from __future__ import annotations

import collections
import datetime
import fnmatch
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import irpa_files
import lora_files
import ml_dtypes
import needs
import numpy as np
import pytest
import remote_server
import suggested
import thread_group
from gguf_files import gguf, in_blocks, quantized_types, small_model, tensors_of
from gguf_files import write as write_gguf
from load_helpers import raw

import streamload
from streamload.errors import StreamloadError

accelerate, torch = needs.module("accelerate"), needs.module("torch")
transformers = needs.module("transformers")
import safetensors.torch as st  # noqa: E402
from torch import nn  # noqa: E402
from transformers_helpers import quiet  # noqa: E402

import streamload.transformers as ours  # noqa: E402
from streamload.verification.verify import verify  # noqa: E402

__all__ = ["quiet"]

Array = np.ndarray[Any, Any]
Case = Mapping[str, str]

# --- the tables: the first row of each is what other dimensions are varied with -------------------

LAYERS = {"num_hidden_layers": 1, "intermediate_size": 256}
_BERT = dict(vocab_size=96, hidden_size=256, num_attention_heads=4, max_position_embeddings=64)


def _bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**_BERT, **LAYERS)
    return transformers.BertForMaskedLM(config).eval()


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: small_model("llama", **LAYERS),
    "tied": lambda: small_model("llama", **{**LAYERS, "tie_word_embeddings": True}),
    "gpt2": lambda: small_model("gpt2", n_layer=1),
    "bert": _bert,
}
#: By name, the largest error of a weight's elements, as a part of their root mean square.
QUANTS: Mapping[str, float] = {
    **{"none": 0.0, "q8_0": 0.008, "int8": 0.015, "nf4": 0.11, "q4_k": 0.11, "stored": 0.0},
    **{"auto": 0.0, "bitsandbytes-int8": 0.015, "nf4-nested": 0.11},
}
_NO_CODES = ("none", "stored", "auto")  # quantise nothing
_NORMS = {"gpt2": "*ln_*", "bert": "*LayerNorm*", "tied": "*norm*", "llama": "*norm*"}
DTYPES: Mapping[str, Any] = {
    **{name: name for name in ("float32", "float16", "bfloat16", "checkpoint")},
    **{"none": None, "patterns": {"NORMS": "float32", "*": "float16"}},
}
RENAMES: Mapping[str, Any] = {
    "none": lambda names: None,
    "function": lambda names: lambda name: f"base.{name}",
    "dict": lambda names: {name: f"base.{name}" for name in names},
}
#: Scales of the adapters, which are all of the same matrices.
ADAPTERS: Mapping[str, tuple[float, ...]] = {"none": (), "one": (1.0,), "two": (1.0, 0.5)}
CHUNKS: Mapping[str, int | None] = {"none": None, "64k": 65536, "4k": 4096}
_CODES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BLOCKS = ("q8_0", "q4_k")  # formats that gguf-py decodes
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


# --- sources: what a writer that is not ours stores, and the values of it -------------------------


class Stored(NamedTuple):
    path: Path
    exact: Mapping[str, Array]  # float64, by the names of the model
    dtype: str  # of what is not quantised
    packed: frozenset[str] = frozenset()  # names of what is


def state_of(model: Any) -> dict[str, Any]:
    """Tensors by name, tied ones once."""
    seen: dict[int, str] = {}
    return {n: t for n, t in model.state_dict().items() if seen.setdefault(t.data_ptr(), n) == n}


def weights_of(model: Any) -> frozenset[str]:
    """Names of the matrices that layers multiply by."""
    kinds = (nn.Linear, transformers.pytorch_utils.Conv1D)
    found = ((n, m) for n, m in model.named_modules() if re.search(r"\.(layers?|h)\.\d", n))
    return frozenset(f"{n}.weight" for n, m in found if isinstance(m, kinds))


def is_turned(model: Any, name: str) -> bool:
    """Whether a weight is one of a Conv1D, which has its inputs first."""
    module = model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, transformers.pytorch_utils.Conv1D)


def write_files(folder: Path, tensors: Mapping[str, Any], shards: int) -> Path:
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        st.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {}
    for at in range(shards):
        mine = dict(list(tensors.items())[at::shards])
        name = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        st.save_file(mine, folder / name, {"format": "pt"})
        where |= dict.fromkeys(mine, name)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_float(model: Any, folder: Path, shards: int, dtype: Any) -> Stored:
    tensors = floats(model, dtype)
    config(model, write_files(folder, tensors, shards))
    return Stored(folder, exact_of(tensors), str(dtype)[6:])


def floats(model: Any, dtype: Any) -> dict[str, Any]:
    """A model's tensors; of float64 with more digits than float32 has."""
    wide = {n: t.double() * (1 + 2.0**-30) for n, t in state_of(model).items()}
    return {name: tensor.to(dtype) for name, tensor in wide.items()}


def exact_of(tensors: Mapping[str, Any]) -> dict[str, Array]:
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def config(model: Any, folder: Path, **quantization: Any) -> None:
    model.config.architectures = [type(model).__name__]
    if quantization:
        model.config.quantization_config = quantization
    model.config.save_pretrained(folder)


def as_torch(model: Any, folder: Path, shards: int) -> Stored:
    folder.mkdir()
    tensors = floats(model, torch.float16)
    torch.save(tensors, folder / "pytorch_model.bin")
    config(model, folder)
    return Stored(folder, exact_of(tensors), "float16")


def as_dcp(model: Any, folder: Path, shards: int) -> Stored:
    tensors = floats(model, torch.bfloat16)
    torch.distributed.checkpoint.save(dict(tensors), checkpoint_id=folder, no_dist=True)
    config(model, folder)
    return Stored(folder, exact_of(tensors), "bfloat16")


def as_irpa(model: Any, folder: Path, shards: int) -> Stored:
    folder.mkdir()
    tensors = floats(model, torch.float32)
    items = [
        irpa_files.Item(n.encode(), t.numpy().tobytes(), irpa_files.said("float32", list(t.shape)))
        for n, t in tensors.items()
    ]
    (folder / "model.irpa").write_bytes(irpa_files.archive(items))
    config(model, folder)
    return Stored(folder, exact_of(tensors), "float32")


def as_parts(
    model: Any, folder: Path, shards: int, parts: Callable[[str, Array], Any], **config_: Any
) -> Stored:
    tensors = floats(model, torch.float16)
    exact, packed = exact_of(tensors), weights_of(model)
    for name in packed:
        weight = exact[name].astype(np.float32)
        turned = is_turned(model, name)
        made, values = parts(name, weight.T if turned else weight)
        del tensors[name]
        tensors |= {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in made.items()}
        exact[name] = values.T if turned else values
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    others = [name for name in linears if f"{name}.weight" not in packed]
    kept = {"llm_int8_skip_modules": others, "modules_to_not_convert": others}
    config(model, write_files(folder, tensors, shards), **config_, **kept)
    return Stored(folder, exact, "float16", packed)


def nf4_parts(name: str, weight: Array) -> tuple[dict[str, Array], Array]:
    blocks = weight.reshape(-1, 64)
    absmax, table = np.abs(blocks).max(1), np.array(_NF4, np.float32)
    codes = np.abs(blocks[..., None] / absmax[:, None, None] - table).argmin(-1).astype(np.uint8)
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
    state = np.frombuffer(json.dumps(said).encode(), np.uint8)
    packed = codes.reshape(-1, 2) @ np.array([16, 1], np.uint8)
    made = {name: packed[:, None], f"{name}.absmax": absmax, f"{name}.quant_map": table}
    made[f"{name}.quant_state.bitsandbytes__nf4"] = state
    return made, (table.astype(float)[codes] * absmax[:, None]).reshape(weight.shape)


def int8_parts(name: str, weight: Array) -> tuple[dict[str, Array], Array]:
    scb = np.abs(weight).max(1)
    codes = np.rint(weight / scb[:, None] * 127).astype(np.int8)
    stem = name.removesuffix("weight")
    made = {name: codes, f"{stem}SCB": scb, f"{stem}weight_format": np.array(0, np.uint8)}
    return made, codes * (scb.astype(float)[:, None] / 127)


def fp8_parts(name: str, weight: Array) -> tuple[dict[str, Array], Array]:
    rows, columns = weight.shape
    tiles = weight.reshape(rows // 128, 128, columns // 128, 128)
    scales = (np.abs(tiles).max((1, 3), keepdims=True) / 448).astype(np.float32)
    codes = np.clip(tiles / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    values = (codes.astype(float) * scales).reshape(weight.shape)
    held = codes.reshape(weight.shape).view(np.uint8)
    return {name: held, f"{name}_scale_inv": scales[:, 0, :, 0]}, values


def as_fp8(model: Any, folder: Path, shards: int) -> Stored:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    found = as_parts(model, folder, shards, fp8_parts, **said)
    for path in folder.glob("*.safetensors"):
        tensors = st.load_file(path)
        for name in found.packed & tensors.keys():
            tensors[name] = tensors[name].view(torch.float8_e4m3fn)
        st.save_file(tensors, path, {"format": "pt"})
    return found


def as_gguf(model: Any, folder: Path, shards: int, kind: str) -> Stored:
    """A file by gguf-py; its values by gguf-py's decoding, put where the model has them."""
    folder.mkdir()
    arrays = tensors_of(model)
    types = quantized_types(arrays, kind)
    if kind == "Q4_K":  # which gguf-py does not quantise to
        arrays, types = in_blocks(arrays, lambda name: kind)
    write_gguf(folder / "model.gguf", arrays, types, config=model.config)
    exact = from_gguf(folder / "model.gguf", model)
    packed = {n for n, each in exact.items() if each.ndim > 1} if kind != "F16" else ()
    return Stored(folder / "model.gguf", exact, "float16", frozenset(packed))


def from_gguf(path: Path, model: Any) -> dict[str, Array]:
    stored = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(float)
        for t in gguf.GGUFReader(path).tensors
    }
    exact: dict[str, Array] = {}
    for name, tensor in state_of(model).items():
        order = torch.arange(tensor.numel()).double().reshape(tensor.shape)
        exact[name] = np.full(tensor.numel(), np.nan)
        for own, places in tensors_of(_Named(model.config, {name: order})).items():
            exact[name][places.astype(int).ravel()] = stored[own].ravel()
        exact[name] = exact[name].reshape(tensor.shape)
    return exact


class _Named(NamedTuple):
    config: Any
    tensors: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.tensors


def as_ours(model: Any, folder: Path, shards: int) -> Stored:
    """Blocks of q8_0 in safetensors, which nobody but `convert` writes."""
    plain = as_float(model, folder.with_name(f"{folder.name}-plain"), 1, torch.float32)
    streamload.convert(plain.path, folder, quant="q8_0", progress=False)
    tensors = arrays_of(st.load_file(folder / "model.safetensors"))
    exact, packed = dict(plain.exact), weights_of(model)
    values = {n: decoded(tensors, n, exact[n].shape, ["q8_0"]) for n in packed}
    turned = any(values[n].shape != exact[n].shape for n in packed)
    for name in packed:
        exact[name] = values[name].T if turned and is_turned(model, name) else values[name]
    return Stored(folder, exact, "float32", packed)


_BNB = {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float32"}
SOURCES: Mapping[str, Callable[[Any, Path, int], Stored]] = {
    "bf16": functools.partial(as_float, dtype=torch.bfloat16),
    "f16": functools.partial(as_float, dtype=torch.float16),
    "f32": functools.partial(as_float, dtype=torch.float32),
    "f64": functools.partial(as_float, dtype=torch.float64),
    "torch": as_torch,
    "dcp": as_dcp,
    "irpa": as_irpa,
    "nf4": functools.partial(
        as_parts, parts=nf4_parts, **_BNB, load_in_4bit=True, bnb_4bit_quant_type="nf4"
    ),
    "int8": functools.partial(as_parts, parts=int8_parts, **_BNB, load_in_8bit=True),
    "fp8": as_fp8,
    "q8_0": as_ours,
    "gguf-f16": functools.partial(as_gguf, kind="F16"),
    "gguf-q8_0": functools.partial(as_gguf, kind="Q8_0"),
    "gguf-q4_k": functools.partial(as_gguf, kind="Q4_K"),
}


@functools.cache
def stored(source: str, shards: int, model: str, root: Path) -> Stored:
    """A source, written once."""
    return SOURCES[source](MODELS[model](), root / f"{source}-{shards}-{model}", shards)


def adapted(found: Stored, model: Any, scales: tuple[float, ...], folder: Path) -> Any:
    """Adapters as peft saves them, and the sums in float64."""
    exact, made = dict(found.exact), []
    for at, scale in enumerate(scales):
        arrays: dict[str, Array] = {}
        turned = False
        for seed, name in enumerate(sorted(weights_of(model))[::2]):
            turned = is_turned(model, name)
            rows, columns = exact[name].shape[:: -1 if turned else 1]
            pair = lora_files.pair(name.removesuffix(".weight"), rows, columns, seed=10 * at + seed)
            (key_a, a), (key_b, b) = pair.items()
            arrays |= {key_a: a, key_b: b * np.float32(0.01)}
            delta = arrays[key_b].astype(float) @ a.astype(float) * (6 / 4 * scale)
            exact[name] = exact[name] + (delta.T if turned else delta)
        where = folder / f"adapter-{at}"
        where.mkdir()
        made.append((lora_files.adapter(where, arrays, fan_in_fan_out=turned), scale))
    return made, exact


# --- entrances: what each gives, by name ----------------------------------------------------------


class Call(NamedTuple):
    """A case, made ready."""

    case: Case
    path: Any
    model: Callable[[], Any]  # of transformers, with other values
    shapes: Mapping[str, tuple[int, ...]]  # by the checkpoint's names
    rename: Callable[[str], str]
    options: dict[str, Any]
    folder: Path
    held: dict[str, Any]  # what the first call filled, for the second
    files: dict[str, Path]  # what it wrote


class Got(NamedTuple):
    state: Mapping[str, Any]
    model: Any = None  # which computes
    report: Any = None
    values: Mapping[str, Array] | None = None  # of a file in another format, by its own reader


def _none(call: Call) -> Got:
    report = streamload.load_state_dict(None, call.path, **call.options)
    return Got(report.state_dict, None, report)


def _dict(call: Call) -> Got:
    if not call.held:
        for name, shape in call.shapes.items():
            call.held[call.rename(name)] = _sevens(call.case["device"], shape)
    report = streamload.load_state_dict(call.held, call.path, **call.options)
    return Got(call.held, None, report)


def _sevens(device: str, shape: tuple[int, ...]) -> Any:
    if device == "host":
        return np.full(shape, 7, np.float32)
    if device == "torch:cpu":
        return torch.full(shape, 7.0)
    from tinygrad import Tensor

    return Tensor(np.full(shape, 7, np.float32), device=device).realize()


def _module(call: Call, meta: bool) -> Got:
    if not call.held:
        if meta:
            model = _empty(call.model)
        else:
            model = call.model()
            with torch.no_grad():
                [parameter.fill_(7) for parameter in model.parameters()]
        model.eval()
        call.held["model"] = (
            nn.ModuleDict({"base": model}) if call.case["rename"] != "none" else model
        )
    model = call.held["model"]
    report = streamload.load_state_dict(model, call.path, **call.options)
    return Got(
        model.state_dict(),
        getattr(model, "base", model) if isinstance(model, nn.ModuleDict) else model,
        report,
    )


def _empty(make: Callable[[], Any]) -> Any:
    """A model without values, but with the buffers that it computes."""
    with accelerate.init_empty_weights():
        model = make()
    model.tie_weights()
    return model


def _pretrained(call: Call) -> Got:
    if "model" in call.held:
        model = call.held["model"]
        report = streamload.load_state_dict(model, call.path, **call.options)
        return Got(model.state_dict(), model, report)
    model = call.held["model"] = ours.from_pretrained(call.path, **call.options)
    return Got(model.state_dict(), model, model.streamload_report)


def _iterate(call: Call) -> Got:
    options = {k: v for k, v in call.options.items() if k != "progress"}
    options.pop("residence")
    return Got({n: _copied(t) for n, t in streamload.iterate(call.path, **options)})


def _copied(tensor: Any) -> Any:
    return arrays_of({"": tensor})[""].copy()


def _layers(call: Call) -> Got:
    options = {k: v for k, v in call.options.items() if k != "progress"}
    found: dict[str, Any] = {}
    for _, tensors in streamload.stream_layers(call.path, **options):
        found |= {n: _copied(t) for n, t in tensors.items()}
    return Got(found)


def _offload(call: Call) -> Got:
    model = _empty(call.model).eval()
    streamload.offload(model, call.path, **call.options)
    return Got({}, model)


def _ranks(call: Call) -> Got:
    options = {k: v for k, v in call.options.items() if k not in ("residence", "adapters")}

    def one(group: Any) -> Any:
        return streamload.distributed.load_state_dict(None, call.path, group=group, **options)

    found = thread_group.run(thread_group.World(2), one)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return Got({n: t for each in found for n, t in each.state_dict.items()})


def _convert(call: Call, to: str) -> Got:
    taken = ("dtype", "quant", "rename", "adapters", "progress")
    options = {k: v for k, v in call.options.items() if k in taken}
    out = call.folder / "out"
    streamload.convert(call.path, out, to=to, overwrite=True, **options)
    call.files["out"] = out
    if to == "gguf":
        (file,) = out.glob("*.gguf")
        model = call.model()
        return Got({}, None, None, from_gguf(file, model))
    return Got(
        {n: t for file in sorted(out.glob("*.safetensors")) for n, t in st.load_file(file).items()}
    )


ENTRANCES: Mapping[str, Callable[[Call], Got]] = {
    "none": _none,
    "dict": _dict,
    "meta": functools.partial(_module, meta=True),
    "module": functools.partial(_module, meta=False),
    "from_pretrained": _pretrained,
    "iterate": _iterate,
    "stream_layers": _layers,
    "offload": _offload,
    "ranks": _ranks,
    "convert": functools.partial(_convert, to="safetensors"),
    "gguf": functools.partial(_convert, to="gguf"),
}
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "source": tuple(SOURCES),
    "shards": ("1", "3"),
    "model": tuple(MODELS),
    "entrance": tuple(ENTRANCES),
    "device": ("host", "torch:cpu", "CPU", "CL"),
    "dtype": ("none", *(name for name in DTYPES if name != "none")),
    "quant": tuple(QUANTS),
    "residence": ("memory", "mapped", "auto"),
    "adapters": tuple(ADAPTERS),
    "rename": tuple(RENAMES),
    "reader": ("auto", "mmap", "pread", "direct", "http"),
    "chunk": tuple(CHUNKS),
    "aftermath": ("none", "saved", "again", "interrupted", "converted", "verified"),
}


# --- what is right --------------------------------------------------------------------------------


#: Names of tinygrad's dtypes, and numpy's.
TINYGRAD = {
    **{"half": "float16", "float": "float32", "double": "float64", "__bf16": "bfloat16"},
    **{"unsigned char": "uint8", "signed char": "int8", "float8_e4m3": "float8_e4m3fn"},
}


def arrays_of(state: Mapping[str, Any]) -> dict[str, Array]:
    found = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            dtype = str(tensor.dtype)[6:]
            found[name] = flat.view(_numpy(dtype)).reshape(tuple(tensor.shape))
        elif isinstance(tensor, np.ndarray):
            found[name] = tensor
        else:
            dtype = TINYGRAD[tensor.dtype.name]
            found[name] = np.frombuffer(raw(tensor.to("CPU").realize()), _numpy(dtype)).reshape(
                tensor.shape
            )
    return found


def _numpy(name: str) -> Any:
    return np.dtype(
        getattr(ml_dtypes, name, None) or getattr(np, {"bool": "bool_"}.get(name, name))
    )


def decoded(state: Mapping[str, Array], name: str, shape: tuple[int, ...], kinds: list[str]) -> Any:
    """The elements of a weight in parts, by the formulas of its library; None for floats."""
    codes, stem = state[name], name.removesuffix("weight")
    if (absmax := state.get(f"{name}.absmax")) is not None:
        absmax = absmax.astype(float)
        (key,) = (n for n in state if n.startswith(f"{name}.quant_state."))
        said = json.loads(bytes(state[key]))
        if (outer := state.get(f"{name}.nested_absmax")) is not None:
            inner = state[f"{name}.nested_quant_map"].astype(float)[state[f"{name}.absmax"]]
            absmax = inner * np.repeat(outer, 256)[: inner.size] + said["nested_offset"]
        flat = np.stack([codes.view(np.uint8) >> 4, codes.view(np.uint8) & 15], -1).reshape(-1, 64)
        table = state[f"{name}.quant_map"].astype(float)
        return (table[flat] * absmax[:, None]).reshape(said["shape"])
    if (scale := state.get(f"{stem}SCB")) is not None:
        return codes * (scale.astype(float)[:, None] / 127)
    if (scale := state.get(f"{name}_scale")) is not None:
        return codes * scale.astype(float).reshape(len(codes), *[1] * (codes.ndim - 1))
    if (scale := state.get(f"{name}_scale_inv")) is not None:
        return codes.astype(float) * scale.astype(float).repeat(128, 0).repeat(128, 1)
    if codes.dtype == np.uint8:
        for kind in kinds:
            number = gguf.GGMLQuantizationType[kind.upper()]
            block, nbytes = gguf.GGML_QUANT_SIZES[number]
            if codes.size * block == int(np.prod(shape)) * nbytes:
                rows = codes.reshape(-1, codes.shape[-1])
                return gguf.quants.dequantize(rows, number).astype(float)
        raise AssertionError(f"{name}: {codes.size} bytes of blocks for {shape}, of {kinds}")
    return None


def assert_nearest(name: str, found: Array, exact: Array, slack: float) -> None:
    """Each is at most half a unit in the last place away, and a part of the largest element."""
    info = ml_dtypes.finfo(found.dtype)
    least = int(np.log2(float(info.smallest_normal)))
    ulp = np.exp2(np.maximum(np.frexp(exact)[1] - 1, least) - info.nmant)
    away = np.abs(found.astype(float) - exact)
    bad = ~(away <= ulp / 2 * (1 + 2.0**-20) + slack * np.abs(exact).max())
    if bad.any():
        turned = (
            found.ndim == 2
            and found.shape[0] == found.shape[1]
            and np.allclose(found.T.astype(float), exact, atol=1e-2 * np.abs(exact).max())
        )
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} elements of {found.dtype} are off by up to "
            f"{np.nanmax(away)} (largest {np.abs(exact).max():.3g})"
            + (", transposed" if turned else "")
        )


def compare(call: Call, got: Got, exact: Mapping[str, Array], found: Stored, model: Any) -> None:
    """Values, dtypes, and what the model computes."""
    case, state = call.case, arrays_of(got.state)
    quant, asked = case["quant"], call.options["dtype"]
    source = case["source"].removeprefix("gguf-")
    blocks = source in _BLOCKS
    kinds = [kind for kind in _BLOCKS if kind in (quant, source)]
    # gguf-py and bitsandbytes' formula for 8 bits round more than once, to float32
    slack = 1e-6 if blocks or source == "int8" else 1e-12
    parts = {
        name: values
        for name, each in exact.items()
        if state and (values := decoded(state, call.rename(name), each.shape, kinds)) is not None
    }
    for name, values in (got.values or {}).items():
        error = np.sqrt(((values - exact[name]) ** 2).mean() / (exact[name] ** 2).mean())
        most = QUANTS[quant] + (4e-3 if case["dtype"] != "float32" else 1e-6)  # bfloat16's 2**-8
        assert error <= most, f"{name}: the error of its elements is {error:.3g}, not {most:.3g}"
    turned = any(values.shape != exact[name].shape for name, values in parts.items())
    for name, each in exact.items() if state else ():
        if (values := parts.get(name)) is not None:
            values = values.T if turned and is_turned(model, name) else values
            error = np.sqrt(((values - each) ** 2).mean() / (each**2).mean())
            most = 1e-6 if name in found.packed and quant in _NO_CODES else QUANTS[quant]
            assert error <= most, (
                f"{name}: the error of its elements is {error:.3g}, not {most:.3g}"
            )
            continue
        array = state[call.rename(name)]
        assert array.shape == each.shape, f"{name} has shape {array.shape}, not {each.shape}"
        if isinstance(asked, dict):
            (norm, *_), own = asked, call.rename(name)
            asked_here = {"float32" if fnmatch.fnmatchcase(own, norm) else "float16"}
        elif case["dtype"] in ("none", "checkpoint"):
            asked_here = {found.dtype, "float32", "float16"}
        else:
            asked_here = {asked}
        assert array.dtype.name in asked_here, f"{name} is {array.dtype}, not {asked_here}"
        assert_nearest(name, array, each, slack)
    if QUANTS[quant] and state:
        assert parts, "nothing is quantised"
    # norms in float32 between matrices in float16, as patterns or the file have them
    mixed = isinstance(asked, dict) or (
        case["source"].startswith("gguf") and case["dtype"] == "checkpoint"
    )
    if got.model is not None and not mixed:
        reference = MODELS[case["model"]]()
        reference.load_state_dict(
            {n: torch.from_numpy(a).float() for n, a in exact.items()}, strict=False
        )
        ids = torch.arange(12)[None] % 96
        with torch.no_grad():
            right, logits = reference.eval()(ids).logits, got.model(ids).logits.float()
        away = float((logits - right).norm() / right.norm())
        # bitsandbytes rounds the inputs of its modules to 8 bits
        rounds = any(type(module).__name__ == "Linear8bitLt" for module in got.model.modules())
        most = 2 * QUANTS[quant] + (2e-2 if case["dtype"] != "float32" or rounds else 1e-4)
        assert away <= most, f"logits are {away:.3g} off, not {most:.3g}"


# --- cases ----------------------------------------------------------------------------------------

_TORCH = ("meta", "module", "from_pretrained", "offload")
_FILES = ("bf16", "f16", "f32", "f64", "nf4", "int8", "fp8")  # written by `write_files`
#: Options that entrances do not have.
LACKS: Mapping[str, tuple[str, ...]] = {
    "convert": ("device", "residence", "chunk"),
    "gguf": ("device", "residence", "chunk", "rename"),
    "iterate": ("residence",),
    "ranks": ("residence", "adapters"),
    "from_pretrained": ("rename",),
    "offload": ("rename",),
}
#: Entrances after which an aftermath makes sense.
AFTER: Mapping[str, tuple[str, ...]] = {
    "none": tuple(ENTRANCES),
    "converted": tuple(ENTRANCES),
    "saved": ("none", "dict", "meta", "module", "from_pretrained", "convert"),
    "again": ("dict", "meta", "module", "from_pretrained"),
    "interrupted": ("none", "dict", "meta", "module", "from_pretrained", "convert", "gguf"),
    "verified": ("none", "dict", "meta", "module", "from_pretrained", "convert", "gguf"),
}


def is_possible(c: Case) -> bool:
    """Whether there is such a case: a source of that model, an option of that entrance."""
    entrance = c["entrance"]
    return (
        (c["shards"] == "1" or c["source"] in _FILES)
        and not (c["source"].startswith("gguf") and c["model"] == "bert")
        and not (c["source"] == "fp8" and c["model"] == "gpt2")
        and not (c["rename"] == "dict" and c["source"] in ("nf4", "int8", "fp8"))
        and (entrance not in _TORCH or c["device"] == "torch:cpu")
        and all(c[name] == DIMENSIONS[name][0] for name in LACKS.get(entrance, ()))
        and not (entrance in ("convert", "gguf") and c["reader"] not in ("auto", "http"))
        and not (entrance == "gguf" and c["model"] == "bert")
        and entrance in AFTER[c["aftermath"]]
        and not (c["aftermath"] == "verified" and c["adapters"] != "none")
    )


class Rule(NamedTuple):
    """Cases that may be refused, the words of the refusal, and why."""

    when: Callable[[Case], bool]
    says: str
    why: str


_PACKED = ("nf4", "int8", "fp8", "q8_0", "gguf-q8_0", "gguf-q4_k")
REFUSED: tuple[Rule, ...] = (
    Rule(
        lambda c: c["source"] in _PACKED and c["adapters"] != "none",
        "an adapter is merged into floats",
        "what is stored quantised has no sums with an adapter",
    ),
    Rule(
        lambda c: c["source"] in _PACKED and bool(QUANTS[c["quant"]]),
        "this call dequantises it|are stored quantised|nothing is quantised",
        "one call either decodes or encodes",
    ),
    Rule(
        lambda c: (
            c["quant"] == "stored"
            and (not c["source"].startswith("gguf-q") or c["aftermath"] == "converted")
        ),
        "no weight is stored quantised|no blocks of GGUF",
        "there is nothing to keep",
    ),
    Rule(
        lambda c: c["entrance"] == "dict" and c["quant"] != "none",
        "the modules that can hold quantised weights",
        "a dict of tensors has no modules",
    ),
    Rule(
        lambda c: c["entrance"] in ("offload", "stream_layers") and c["quant"] != "none",
        "layers stream as they are stored",
        "passes read again and again, and would encode each time",
    ),
    Rule(
        lambda c: c["entrance"] in ("offload", "stream_layers") and c["residence"] != "memory",
        "layers stream through memory",
        "slots are memory",
    ),
    Rule(
        lambda c: (
            c["residence"] == "mapped"
            and (
                c["dtype"] not in ("none", "checkpoint")
                or (c["quant"], c["adapters"]) != ("none", "none")
                or c["reader"] == "http"
                or c["device"] in ("CPU", "CL")
                or c["entrance"] in ("dict", "module")
                or c["source"] in ("torch", "bf16", "dcp", "gguf-f16", *_PACKED)
            )
        ),
        "cannot be a view|mapped",
        "a view of a file has its bytes: no cast, no quantising, no server, no other device",
    ),
    Rule(
        lambda c: c["entrance"] in ("convert", "gguf", "iterate") and c["quant"] == "auto",
        "there is none here|is for loads of all at once",
        "nothing must fit at once",
    ),
    Rule(
        lambda c: c["entrance"] in ("convert", "gguf", "ranks") and c["quant"] == "stored",
        "files keep theirs without quant=|in the modules of one process",
        "blocks of a file are for the modules of a model",
    ),
    Rule(
        lambda c: (
            c["entrance"] in ("dict", "meta", "module", "offload")
            and c["source"] in _PACKED
            and c["dtype"] in ("none", "checkpoint", "patterns")
        ),
        "do not match",
        "plain modules and dicts hold no parts of a weight",
    ),
    Rule(
        lambda c: c["adapters"] != "none" and c["model"] == "gpt2" and bool(QUANTS[c["quant"]]),
        "cannot change on the way",
        "encoders get transposed rows, adapters those of the file",
    ),
    Rule(
        lambda c: c["adapters"] != "none" and c["source"].startswith("gguf"),
        "the base has rows in another order",
        "adapters have the rows of the model",
    ),
    Rule(
        lambda c: c["entrance"] == "gguf" and c["quant"] not in ("none", "q8_0"),
        "GGUF is written with quant one of",
        "the format has other blocks",
    ),
    Rule(
        lambda c: (
            c["entrance"] == "gguf"
            and c["source"] in _PACKED
            and c["dtype"] in ("none", "checkpoint")
        ),
        "quantised already, and not as they would be in GGUF",
        "codes of other libraries are no blocks",
    ),
    Rule(
        lambda c: (c["model"], c["entrance"], c["quant"]) == ("gpt2", "convert", "int8"),
        "transformers has no such module",
        "compressed-tensors has no Conv1D",
    ),
    Rule(
        lambda c: c["entrance"] == "from_pretrained" and c["reader"] == "http",
        "reads a model's configuration on this machine",
        "transformers opens no URL",
    ),
    Rule(
        lambda c: c["reader"] == "http" and c["source"] in ("dcp", "torch", "irpa"),
        "holds no safetensors file|",
        "servers do not list their folders",
    ),
    Rule(
        lambda c: c["chunk"] == "4k" and (c["reader"] == "http" or c["quant"] not in _NO_CODES),
        "chunk_nbytes is at least 65536",
        "each chunk takes a request, or is encoded alone",
    ),
)


def is_refusable(case: Case) -> bool:
    """Whether a rule says so."""
    return any(rule.when(case) for rule in REFUSED)


def run(case: Case, root: Path, folder: Path) -> str:
    """Run a case: it is "right" or "refused"; all else raises."""
    make = MODELS[case["model"]]
    model = make()
    found = stored(case["source"], int(case["shards"]), case["model"], root)
    made, exact = adapted(found, model, ADAPTERS[case["adapters"]], folder)
    names = RENAMES[case["rename"]](list(exact))
    dtype = DTYPES[case["dtype"]]
    if isinstance(dtype, dict):
        dtype = {_NORMS[case["model"]]: "float32", "*": "float16"}
    options: dict[str, Any] = {
        **{"budget": "300MB", "device": case["device"], "residence": case["residence"]},
        **{"dtype": dtype, "rename": names, "adapters": made or None},
        **{"quant": None if case["quant"] == "none" else case["quant"], "progress": False},
        **{"chunk_nbytes": CHUNKS[case["chunk"]]},
    }
    if case["reader"] != "http":
        options["reader"] = case["reader"]
    if case["entrance"] in ("from_pretrained",):
        del options["rename"]
    rename = (lambda name: name) if names is None else (lambda name: f"base.{name}")
    with ExitStack() as stack:
        path: Any = found.path
        call = None
        try:
            if case["aftermath"] == "converted":
                wide = {"*": "float32"} if case["source"].startswith("gguf") else None
                streamload.convert(path, folder / "converted", dtype=wide, progress=False)
                path = folder / "converted"
            if case["reader"] == "http":
                files = path if path.is_dir() else path.parent
                site = stack.enter_context(remote_server.serve(files))
                path = site.url if path.is_dir() else f"{site.url}{path.name}"
            shapes = {name: array.shape for name, array in exact.items()}
            call = Call(case, path, make, shapes, rename, options, folder, {}, {})
            enter = ENTRANCES[case["entrance"]]
            if case["aftermath"] == "interrupted":
                chunks = itertools.count()
                nth = random.Random(str(case)).randrange(3)

                def interrupt(done: int, total: int) -> None:
                    if next(chunks) == nth:
                        signal.raise_signal(signal.SIGINT)

                with suppress(KeyboardInterrupt):
                    enter(call._replace(options=options | {"progress": interrupt}))
            got = enter(call)
        except (StreamloadError, ValueError, TypeError) as error:
            words = str(error)
            for rule in REFUSED:
                if rule.when(case) and re.search(rule.says, words):
                    assert is_untouched(call), "refused after values had changed"
                    assert not (useless := list(suggested.useless())), useless
                    return "refused"
            raise
        compare(call, got, exact, found, model)
        after(call, got, enter, lambda again: compare(call, again, exact, found, model))
        assert not (useless := list(suggested.useless())), useless
    return "right"


def after(call: Call, got: Got, enter: Callable[[Call], Got], check: Callable[[Got], None]) -> None:
    """What is done with the result, and right again."""
    case, out = call.case, call.folder / "saved"
    if case["aftermath"] == "again":
        check(enter(call))
    elif case["aftermath"] == "verified":
        if "out" in call.files:
            assert streamload.verify_checkpoint(call.files["out"]).ok
        else:
            model = call.held.get("model", call.held or None)
            assert not verify(got.report, streamload.open_checkpoint(call.path), model)
    elif case["aftermath"] == "saved":
        if case["entrance"] in ("convert", "from_pretrained"):
            if case["entrance"] == "from_pretrained":
                got.model.save_pretrained(out)
            if case["rename"] == "none":
                model = ours.from_pretrained(
                    out if out.exists() else call.files["out"], device="cpu"
                )
                check(Got({}, model))
            return
        before = arrays_of(got.state)
        tensors = {}
        for name, array in before.items():
            flat = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
            tensors[name] = flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)
        write_files(out, tensors, 1)
        again = streamload.load_state_dict(
            None, out, device="host", dtype="checkpoint", progress=False
        )
        for name, array in arrays_of(again.state_dict).items():
            assert array.tobytes() == before[name].tobytes(), f"{name} is another when saved"


def is_untouched(call: Call | None) -> bool:
    """Whether what a refused call was to fill has the values that it had, all sevens."""
    if call is None or call.case["aftermath"] in ("again", "interrupted"):
        return True
    held = call.held
    if (model := held.get("model")) is not None:
        parameters = [p for p in model.parameters() if not p.is_meta]
        return all(bool((p == 7).all()) for p in parameters)
    return all((each == 7).all() for each in arrays_of(held).values())


def line_of(case: Case) -> str:
    """A case as a line, without what is the first of its dimension."""
    return " ".join(f"{n}={v}" for n, v in case.items() if v != DIMENSIONS[n][0]) or "shards=1"


def case_of(line: str) -> Case:
    return {name: rows[0] for name, rows in DIMENSIONS.items()} | dict(
        each.split("=") for each in line.split()
    )


def pairs_of(case: Case) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def all_pairs(seed: int) -> list[Case]:
    """Cases in which every pair occurs that a case can have, where no rule refuses if possible."""
    draw = random.Random(seed)
    names = list(DIMENSIONS)
    left = {
        pair
        for one, two in itertools.combinations(names, 2)
        for pair in itertools.product(
            ((one, v) for v in DIMENSIONS[one]), ((two, v) for v in DIMENSIONS[two])
        )
    }
    cases: list[Case] = []
    todo = sorted(left)
    draw.shuffle(todo)
    for pair in todo:
        if pair not in left:
            continue
        best: tuple[int, Case] | None = None
        for _ in range(30):
            case = {n: draw.choice(DIMENSIONS[n]) for n in names} | dict(pair)
            for name in draw.sample(names, len(names)):  # make it one that there is
                if is_possible(case) and not is_refusable(case):
                    break
                if name not in dict(pair):
                    case[name] = DIMENSIONS[name][0]
            if not is_possible(case):
                continue
            refusable = is_refusable(case)
            score = len(pairs_of(case) & left) - 1000 * refusable
            if best is None or score > best[0]:
                best = score, case
        if best is None:
            left.discard(pair)
            continue
        left -= pairs_of(best[1]) if best[0] > 0 else {pair}
        cases.append(best[1])
    return cases


_SEED = 51
_PARTS = 16


@functools.cache
def whole() -> list[Case]:
    """All cases, or the one of STREAMLOAD_PAIR."""
    line = os.environ.get("STREAMLOAD_PAIR")
    return all_pairs(_SEED) if line is None else [case_of(line)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture
def tried(root: Path, tmp_path: Path) -> Callable[[Case], str]:
    """Run a case; "right", "refused", or what is wrong."""
    folders = itertools.count()

    def run_one(case: Case) -> str:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        suggested.raised.clear()
        with warnings.catch_warnings(action="ignore"):
            try:
                return run(case, root, folder)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            finally:
                shutil.rmtree(folder)

    return run_one


def check_all(cases: list[Case], tried: Callable[[Case], str]) -> None:
    faults, counts = [], collections.Counter[str]()
    for case in cases:
        result = tried(case)
        counts[result if result in ("right", "refused") else "wrong"] += 1
        if result not in ("right", "refused"):
            line = (
                f"STREAMLOAD_PAIR='{line_of(case)}' scripts/test -n0 -m slow {__file__} -k whole-0"
            )
            faults.append(f"{result}\n    {line}")
    print(dict(counts))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("part", range(2))
def test_a_tenth_of_the_pairs(part: int, tried: Callable[[Case], str]) -> None:
    """Other cases each day of the year."""
    day = datetime.date.today().timetuple().tm_yday
    drawn = random.Random(day).sample(whole(), -(-len(whole()) // 10))
    check_all(drawn[part::2], tried)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_PARTS), ids=lambda part: f"whole-{part}")
def test_all_pairs(part: int, tried: Callable[[Case], str]) -> None:
    check_all(whole()[part::_PARTS], tried)
