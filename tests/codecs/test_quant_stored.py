"""Which tensors belong to a quantised weight: recognised, kept together, refused where they lie."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.cli import app
from streamload.codecs import stored
from streamload.codecs.stored import kept_dtype
from streamload.codecs.weights import QuantizedWeight
from streamload.core.dtypes import BF16, F16, F32, parse_dtype
from streamload.errors import CheckpointError
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.shares import Member, make_shares

_Tensor = tuple[str, tuple[int, ...], bytes]
Tensors = dict[str, _Tensor]

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4}


def groups(checkpoint: Checkpoint) -> Mapping[str, QuantizedWeight]:
    return checkpoint.groups


def read_states(checkpoint: Checkpoint) -> Mapping[str, QuantizedWeight]:
    return stored.read_states(checkpoint.layouts, checkpoint.groups)


def filled(code: str, *shape: int, value: bytes | None = None) -> _Tensor:
    """A tensor of bytes that are not all alike, or of those given."""
    nbytes = int(np.prod(shape)) * SIZES.get(code, 1)
    return code, shape, bytes(i % 251 for i in range(nbytes)) if value is None else value


def state(**changes: Any) -> _Tensor:
    """A quantisation state of bitsandbytes, of a weight of 8 x 128 in blocks of 64."""
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 128]}
    data = json.dumps(said | changes).encode()
    return "U8", (len(data),), data


NESTED = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.5}


def nf4(name: str = "l.q.weight", **changes: Any) -> Tensors:
    return {
        name: filled("U8", 512, 1),
        f"{name}.absmax": filled("F32", 16),
        f"{name}.quant_map": filled("F32", 16),
        f"{name}.quant_state.bitsandbytes__nf4": state(**changes),
    }


def nested(**changes: Any) -> Tensors:
    return nf4(**NESTED | changes) | {
        "l.q.weight.absmax": filled("U8", 16),
        "l.q.weight.nested_absmax": filled("F32", 4),
        "l.q.weight.nested_quant_map": filled("F32", 256),
    }


def int8() -> Tensors:
    return {
        "l.q.weight": filled("I8", 8, 16),
        "l.q.SCB": filled("F32", 8),
        "l.q.weight_format": filled("U8"),
    }


def shape_of(*shape: int) -> _Tensor:
    return "I64", (len(shape),), np.array(shape, np.int64).tobytes()


def packed(zeros: bool = False) -> Tensors:
    """A weight of compressed-tensors, 8 x 64 in 4 bits and groups of 32."""
    out = {
        "l.q.weight_packed": filled("I32", 8, 8),
        "l.q.weight_scale": filled("BF16", 8, 2),
        "l.q.weight_shape": shape_of(8, 64),
    }
    return out | ({"l.q.weight_zero_point": filled("I32", 1, 2)} if zeros else {})


def scaled(code: str, scale: str, *shape: int) -> Tensors:
    """A weight of 256 x 256 with scales."""
    return {"l.q.weight": filled(code, 256, 256), f"l.q.{scale}": filled("F32", *shape)}


def awq() -> Tensors:
    """A weight of AWQ, 32 outputs and 64 inputs in groups of 16."""
    return {
        "l.q.qweight": filled("I32", 64, 4),
        "l.q.qzeros": filled("I32", 4, 4),
        "l.q.scales": filled("F16", 4, 32),
    }


def gptq(bits: int = 4) -> Tensors:
    """A weight of GPTQ, 32 outputs and 64 inputs in groups of 16."""
    return {
        "l.q.qweight": filled("I32", 64 * bits // 32, 32),
        "l.q.qzeros": filled("I32", 4, bits),
        "l.q.scales": filled("F16", 4, 32),
        "l.q.g_idx": filled("I32", 64),
    }


def mxfp4() -> Tensors:
    """Experts of gpt-oss, two of 8 x 64."""
    return {
        "l.experts.down_proj_blocks": filled("U8", 2, 8, 2, 16),
        "l.experts.down_proj_scales": filled("U8", 2, 8, 2),
    }


def torchao() -> Tensors:
    return {"l.q._weight_qdata": filled("I8", 8, 16), "l.q._weight_scale": filled("F32", 8, 1)}


FORM = {
    "_type": "Int8Tensor",
    "_data": {"block_size": [1, 16]},
    "_tensor_data_names": ["qdata", "scale"],
}
AO = {"quant_method": "torchao"}
AO4 = {**AO, "form": {**FORM, "_type": "Int4Tensor", "_data": {"block_size": [1, 32]}}}
TILES = {**AO4, "form": {**AO4["form"], "_type": "Int4TilePackedTo4dTensor"}}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(
    folder: Path,
    tensors: Mapping[str, _Tensor],
    config: Mapping[str, Any] | None = None,
    form: object = FORM,
) -> Checkpoint:
    form = (config or {}).get("form", form)
    said = form if isinstance(form, str) else json.dumps(form)
    metadata = {"l.q.weight": said} if (config or {}).get("quant_method") == "torchao" else {}
    write_safetensors(folder / "model.safetensors", tensors, metadata=metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_checkpoint(folder)


#: Tensors, quantization_config, and of the group: kind, shape, block, bits, order.
KNOWN: dict[str, tuple[Tensors, Any, tuple[Any, ...]]] = {
    "nf4": (nf4(), None, ("bnb-nf4", (8, 128), (64,), 4)),
    "nested": (nested(), None, ("bnb-nf4", (8, 128), (64,), 4)),
    "nf4-in-bf16": (
        nf4() | {"l.q.weight": filled("BF16", 256, 1)},
        None,
        ("bnb-nf4", (8, 128), (64,), 4),
    ),
    "bnb-int8": (int8(), None, ("bnb-int8", (8, 16), (1, 16), 8)),
    "packed": (packed(), None, ("ct-packed", (8, 64), (1, 32), 4)),
    "packed-zeros": (packed(True), None, ("ct-packed", (8, 64), (1, 32), 4)),
    "int8": (scaled("I8", "weight_scale", 256, 1), None, ("int8", (256, 256), (1, 256), 8)),
    "fp8-row": (scaled("F8_E4M3", "weight_scale", 256, 1), None, ("fp8", (256, 256), (1, 256), 8)),
    "fp8-tensor": (scaled("F8_E4M3", "weight_scale_inv"), FP8, ("fp8", (256, 256), (256, 256), 8)),
    "fp8-block": (
        scaled("F8_E4M3", "weight_scale_inv", 2, 2),
        FP8,
        ("fp8", (256, 256), (128, 128), 8),
    ),
    "fp8-cut-block": (
        {"l.q.weight": filled("F8_E4M3", 200, 256), "l.q.weight_scale_inv": filled("F32", 2, 2)},
        FP8,
        ("fp8", (200, 256), (128, 128), 8),
    ),
    "ct-fp8-block": (
        {"l.q.weight": filled("F8_E4M3", 70, 96), "l.q.weight_scale": filled("F32", 3, 3)},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"type": "float", "block_structure": [32, 32]}}},
        },
        ("fp8", (70, 96), (32, 32), 8),
    ),
    "fp8-experts": (
        {
            "l.experts.up_proj": filled("F8_E4M3", 3, 32, 64),
            "l.experts.up_proj_scale_inv": filled("F32", 3, 2, 4),
        },
        None,
        ("fp8", (3, 32, 64), (16, 16), 8),
    ),
    "awq": (awq(), {"quant_method": "awq"}, ("awq", (32, 64), (1, 16), 4)),
    "gptq": (gptq(), None, ("gptq", (32, 64), (1, 16), 4)),
    "gptq-8": (gptq(8), None, ("gptq", (32, 64), (1, 16), 8)),
    "gptq-3": (gptq(3), None, ("gptq", (32, 64), (1, 16), 3)),
    "mxfp4": (mxfp4(), None, ("mxfp4", (2, 8, 64), (1, 32), 4)),
    "torchao-int4": (
        {"l.q._weight_qdata": filled("U8", 8, 16), "l.q._weight_scale": filled("F32", 1, 8)},
        AO4,
        ("torchao-Int4Tensor", (8, 32), (1, 32), 4),
    ),
    "torchao-tiles": (
        {"l.q._weight_qdata": filled("I32", 1, 2, 32, 4), "l.q._weight_scale": filled("F32", 8)},
        TILES,
        ("torchao-Int4TilePackedTo4dTensor", None, (1, 32), 4),
    ),
    "torchao": (torchao(), AO, ("torchao-Int8Tensor", (8, 16), (1, 16), 8)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_weight_is_recognised(tmp_path: Path, name: str) -> None:
    tensors, config, expected = KNOWN[name]
    plain = {"l.norm.weight": filled("BF16", 4), "l.q.bias": filled("BF16", 8)}
    checkpoint = write(tmp_path, plain | tensors, config)
    (group,) = read_states(checkpoint).values()
    assert (group.kind, group.shape, group.block, group.bits) == expected
    assert {info.name for info in group.members.values()} == set(tensors)
    assert set(checkpoint.members) == set(tensors)
    assert group.nbytes == sum(len(data) for _, _, data in tensors.values())
    assert next(iter(group.members)) == "weight"
    again = groups(pickle.loads(pickle.dumps(checkpoint)))
    assert list(again) == [group.name]


def test_what_the_state_says_is_kept(tmp_path: Path) -> None:
    (group,) = read_states(write(tmp_path, nested())).values()
    assert group.dtype is BF16
    assert dict(group.facts) == {
        "blocksize": 64,
        "quant_type": "nf4",
        "nested_blocksize": 4,
        "nested_offset": 0.5,
    }


def test_two_weights_of_a_module_are_two(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, nf4("l.q.weight") | nf4("l.k.weight"))
    assert list(groups(checkpoint)) == ["l.q.weight", "l.k.weight"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"l.absmax": filled("F32", 3), "l.mask": filled("U8", 3)},
        {"l.k_scale": filled("F32"), "l.weight": filled("U8", 3)},
        {"l.weight_scale": filled("F32", 1), "l.ids": filled("I32", 3)},
        {"l.qweight": filled("F32", 3, 3), "l.ids": filled("I32", 3)},
        {"l.res_blocks": filled("U8", 2, 3), "l.weight": filled("I8", 3)},
        {"l._weight_qdata": filled("I8", 3, 3)},
        {"table": filled("F8_E4M3", 3, 3)},
        {"l.weight": filled("I8"), "l.weight_scale": filled("F32", 3, 1)},
        {"l.qweight": filled("I32", 3, 3), "l.lookup_table": filled("F16", 3, 16)},
        {"l.weight_packed": filled("I32", 3, 3), "l.scale_packed": filled("F16", 3, 1)},
        {"l.a_blocks": filled("U8", 2, 3), "l.a_scales": filled("U8", 2)},
    ],
)
def test_what_only_looks_so_is_none(tmp_path: Path, tensors: Tensors) -> None:
    """Names that others have too make no quantised weight, and no error."""
    assert not groups(write(tmp_path, tensors))


def test_words_in_the_order_of_a_kernel_are_left(tmp_path: Path) -> None:
    """Formats of GPTQ and AWQ that are packed for one kernel are no group, and no error."""
    odd = gptq() | {"l.q.qweight": filled("I32", 4, 64)}
    assert not groups(write(tmp_path, odd, {"quant_method": "gptq", "checkpoint_format": "marlin"}))


def without(tensors: Tensors, *names: str) -> Tensors:
    """Without some of them."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


HOSTILE: dict[str, tuple[Tensors, Any, str]] = {
    "no absmax": (without(nf4(), "l.q.weight.absmax"), None, "its absmax is missing"),
    "no map": (without(nf4(), "l.q.weight.quant_map"), None, "its quant_map is missing"),
    "no weight": (without(nf4(), "l.q.weight"), None, "its weight is missing"),
    "no state": (
        without(nf4(), "l.q.weight.quant_state.bitsandbytes__nf4"),
        None,
        "state is missing or unclear",
    ),
    "two states": (
        nf4() | {"l.q.weight.quant_state.bitsandbytes__fp4": state()},
        None,
        "state is missing or unclear.*nf4 and fp4",
    ),
    "unknown type": (
        without(nf4(), "l.q.weight.quant_state.bitsandbytes__nf4")
        | {"l.q.weight.quant_state.bitsandbytes__af4": state()},
        None,
        "state is missing or unclear.*af4",
    ),
    "map of 15": (nf4() | {"l.q.weight.quant_map": filled("F32", 15)}, None, r"shape.*\[16\]"),
    "map of halves": (nf4() | {"l.q.weight.quant_map": filled("F16", 16)}, None, "dtype.*F32"),
    "no nested": (without(nested(), "l.q.weight.nested_absmax"), None, "nested_absmax is missing"),
    "nested map of 16": (
        nested() | {"l.q.weight.nested_quant_map": filled("F32", 16)},
        None,
        r"shape.*\[256\]",
    ),
    "nested beside floats": (
        nf4() | {"l.q.weight.nested_absmax": filled("F32", 4)},
        None,
        "dtype.*expected U8",
    ),
    "absmax too long": (
        nf4() | {"l.q.weight.absmax": filled("F32", 2000)},
        None,
        "length does not fit",
    ),
    "SCB of columns": (
        int8() | {"l.q.SCB": filled("F32", 16)},
        None,
        r"shape.*\[8\], found \[16\]",
    ),
    "SCB alone": (without(int8(), "l.q.weight"), None, "its weight is missing"),
    "SCB of floats": (int8() | {"l.q.weight": filled("BF16", 8, 16)}, None, "dtype.*I8"),
    "packed without scale": (without(packed(), "l.q.weight_scale"), None, "its scale is missing"),
    "packed without shape": (
        without(packed(), "l.q.weight_shape"),
        None,
        "weight_shape is missing",
    ),
    "int8 without scale": (
        without(scaled("I8", "weight_scale", 256, 1), "l.q.weight_scale"),
        {"quant_method": "compressed-tensors"},
        "its scale is missing",
    ),
    "fp8 without scale": (
        without(scaled("F8_E4M3", "weight_scale_inv", 2, 2), "l.q.weight_scale_inv"),
        FP8,
        "its scale is missing",
    ),
    "blocks that do not divide": (
        scaled("F8_E4M3", "weight_scale_inv", 3, 2),
        FP8,
        "blocks do not divide",
    ),
    "rows that do not fit": (scaled("F8_E4M3", "weight_scale", 255), None, "shape.*256, 256"),
    "scale of integers": (
        scaled("F8_E4M3", "x") | {"l.q.weight_scale": filled("I32", 1)},
        None,
        "dtype",
    ),
    "zeros unlike scales": (
        scaled("I8", "weight_scale", 256, 1) | {"l.q.weight_zero_point": filled("I8", 256, 2)},
        None,
        r"shape.*\[256, 1\]",
    ),
    "awq without zeros": (without(awq(), "l.q.qzeros"), None, "its zero point is missing"),
    "awq without scales": (without(awq(), "l.q.scales"), None, "its scale is missing"),
    "awq of other bits": (awq(), {"quant_method": "awq", "bits": 3}, "not of the bits"),
    "awq groups": (
        awq() | {"l.q.scales": filled("F16", 5, 32), "l.q.qzeros": filled("I32", 5, 4)},
        None,
        "groups do not divide 64",
    ),
    "gptq order": (gptq() | {"l.q.g_idx": filled("I32", 63)}, None, r"shape.*\[64\]"),
    "gptq zeros": (gptq() | {"l.q.qzeros": filled("I32", 3, 4)}, None, "shape.*a row for each"),
    "mxfp4 without scales": (
        without(mxfp4(), "l.experts.down_proj_scales"),
        {"quant_method": "mxfp4"},
        "its scale is missing",
    ),
    "mxfp4 scales": (
        mxfp4() | {"l.experts.down_proj_scales": filled("U8", 2, 8, 3)},
        None,
        r"shape.*\[2, 8, 2\]",
    ),
    "mxfp4 blocks": (
        mxfp4() | {"l.experts.down_proj_blocks": filled("U8", 2, 8, 4, 8)},
        {"quant_method": "mxfp4"},
        r"\[\.\.\., blocks, 16\]",
    ),
    "torchao without scale": (without(torchao(), "l.q._weight_scale"), AO, "its scale is missing"),
    "torchao scale": (torchao() | {"l.q._weight_scale": filled("F32", 8, 2)}, AO, r"\[8, 1\]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_headers_that_lie_are_refused(tmp_path: Path, name: str) -> None:
    tensors, config, said = HOSTILE[name]
    checkpoint = write(tmp_path, tensors, config)
    with pytest.raises(CheckpointError, match=f"(?s){said}") as caught:
        groups(checkpoint)
    error = caught.value
    assert error.path.endswith("model.safetensors")
    assert error.tensor in tensors
    assert error.expected is not None
    assert error.found is not None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(CheckpointError, match=f"(?s){said}"):
        streamload.load_state_dict(None, checkpoint, device="host", progress=False)


STATES: dict[str, tuple[Tensors, str]] = {
    "no JSON": (
        nf4() | {"l.q.weight.quant_state.bitsandbytes__nf4": ("U8", (3,), b"{x}")},
        "is not valid JSON",
    ),
    "a list": (
        nf4() | {"l.q.weight.quant_state.bitsandbytes__nf4": ("U8", (2,), b"[]")},
        "an object of JSON",
    ),
    "another type": (nf4(quant_type="fp4"), "another type.*expected nf4, found fp4"),
    "shape too large": (nf4(shape=[9, 128]), r"does not fit the bytes.*1024 values.*\[9, 128\]"),
    "negative shape": (nf4(shape=[-8, -128]), "no valid shape"),
    "no shape": (nf4(shape=None), "no valid shape"),
    "odd block": (nf4(blocksize=63), "no valid blocksize.*63"),
    "block of true": (nf4(blocksize=True), "no valid blocksize"),
    "endless block": (nf4(blocksize=2**64), "no valid blocksize.*4096"),
    "block too large": (nf4(blocksize=128), r"blocks of 128.*expected \[8\], found \[16\]"),
    "integers": (nf4(dtype="int8"), "no dtype of weights.*int8"),
    "nested block": (nested(nested_blocksize=8), r"blocks of 8.*expected \[2\], found \[4\]"),
    "endless nested block": (nested(nested_blocksize=2**62), "nothing valid of the nested"),
    "no nested offset": (nested(nested_offset=None), "nothing valid of the nested"),
    "endless nested offset": (nested(nested_offset=10**400), "nothing valid of the nested"),
    "NaN as nested offset": (nested(nested_offset=float("nan")), "nothing valid of the nested"),
    "other width": (
        packed() | {"l.q.weight_shape": shape_of(8, 640)},
        r"do not fit the packed.*found \[8, 640\]",
    ),
    "other rows": (packed() | {"l.q.weight_shape": shape_of(9, 64)}, "do not fit the packed"),
    "no width": (
        packed(zeros=True)
        | {"l.q.weight_shape": shape_of(8, 0), "l.q.weight_scale": filled("BF16", 1)},
        r"do not fit the packed.*found \[8, 0\]",
    ),
    "zeros of a scalar scale": (
        packed() | {"l.q.weight_scale": filled("BF16"), "l.q.weight_zero_point": filled("I32", 2)},
        r"shape.*\[1, 1\]",
    ),
    "groups": (
        packed() | {"l.q.weight_scale": filled("BF16", 8, 3)},
        "groups do not divide the 64 values",
    ),
    "zeros": (packed() | {"l.q.weight_zero_point": filled("I32", 3, 2)}, r"shape.*\[1, 2\]"),
}


@pytest.mark.parametrize("name", STATES)
def test_values_that_lie_are_refused(tmp_path: Path, name: str) -> None:
    tensors, said = STATES[name]
    checkpoint = write(tmp_path, tensors)
    assert len(groups(checkpoint)) == 1
    with pytest.raises(CheckpointError, match=f"(?s){said}") as caught:
        read_states(checkpoint)
    assert caught.value.tensor in tensors


@pytest.mark.parametrize(
    "form", ["{", "[]", {}, FORM | {"_data": 1}, FORM | {"_data": {"block_size": [1, 0]}}]
)
def test_metadata_that_lie_are_refused(tmp_path: Path, form: object) -> None:
    with pytest.raises(CheckpointError, match="metadata") as caught:
        groups(write(tmp_path, torchao(), AO, form))
    assert caught.value.tensor == "l.q._weight_qdata"


def test_a_plain_checkpoint_costs_nothing(tmp_path: Path) -> None:
    """50,000 tensors without a quantised weight are passed over in milliseconds, and once."""
    tensors = {f"l.{i}.weight": ("BF16", (1,), b"xx") for i in range(50_000)}
    checkpoint = write(tmp_path, tensors)
    begun = time.process_time()
    assert not groups(checkpoint)
    assert time.process_time() - begun < 0.5
    assert groups(checkpoint) is groups(checkpoint)


# --- kept together, and as they are ---------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A checkpoint in two files with quantised weights of several kinds, and plain ones."""
    folder = tmp_path / "in"
    plain = {f"layers.{i}.norm.weight": ("BF16", (64,), bytes(128)) for i in range(4)}
    first, second = dict(plain), {}
    for i in range(4):
        one = nf4(f"layers.{i}.q.weight")
        second |= {name: one.pop(name) for name in list(one) if name.endswith("absmax")}
        first |= one
        for name, tensor in packed().items():
            first[name.replace("l.q", f"layers.{i}.k")] = tensor
        fp8 = scaled("F8_E4M3", "weight_scale", 256, 1)
        second |= {name.replace("l.q", f"layers.{i}.v"): tensor for name, tensor in fp8.items()}
    write_safetensors(folder / "m1.safetensors", first)
    write_safetensors(folder / "m2.safetensors", second)
    return folder


def of(checkpoint: Checkpoint) -> Iterator[QuantizedWeight]:
    found = groups(checkpoint)
    assert len(found) == 12
    yield from found.values()


def test_a_conversion_keeps_them_in_one_file(mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    streamload.convert(mixed, out, max_shard_size="5kB", progress=False)
    converted = open_checkpoint(out)
    assert len(converted.shards) > 4
    for group in of(converted):
        assert len({info.shard for info in group.members.values()}) == 1
    assert streamload.diff(mixed, out, progress=False).ok


def test_a_conversion_does_not_cast_them(mixed: Path, tmp_path: Path) -> None:
    """Of what stays quantised, scales and statistics keep their dtypes; the rest changes."""
    out = tmp_path / "out"
    rules = {"*.v.weight": "checkpoint", "*.q.weight": "checkpoint", "*": "float16"}
    report = streamload.convert(mixed, out, dtype=rules, progress=False)
    assert "16 tensors of quantised weights keep their dtypes" in str(report)
    before, after = open_checkpoint(mixed), open_checkpoint(out)
    for group in of(before):
        for info in group.members.values():
            assert after.tensors[info.name].dtype is info.dtype
    assert after.tensors["layers.0.norm.weight"].dtype is F16
    assert streamload.diff(mixed, out, dtype=rules, progress=False).ok
    rules = {"*.q.weight": "checkpoint", "*": "float16"}
    streamload.convert(mixed, tmp_path / "other", dtype=rules, progress=False)
    after = open_checkpoint(tmp_path / "other")
    assert after.tensors["layers.0.v.weight"].dtype is F16
    assert "layers.0.v.weight_scale" not in after.tensors


@pytest.mark.parametrize("dtype", [None, "float32", {"*": "float16"}])
def test_a_load_does_not_cast_them(mixed: Path, dtype: Any) -> None:
    if dtype is not None:
        rest = {"*": dtype} if isinstance(dtype, str) else dtype
        dtype = {"*.v.weight": "checkpoint", "*.q.weight": "checkpoint"} | rest
    checkpoint = open_checkpoint(mixed)
    made = streamload.split(checkpoint, nodes=[Node("n", "1GB")], dtype=dtype)
    dsts = {p.name: p.dst for p in made.placements}
    for group in of(checkpoint):
        for info in group.members.values():
            assert dsts[info.name] is info.dtype
    expected = F16 if dtype is None else parse_dtype(dtype["*"])
    assert dsts["layers.0.norm.weight"] is expected
    report = streamload.load_state_dict(
        None, checkpoint, device="host", dtype="checkpoint", progress=False
    )
    scale = report.state_dict["layers.3.v.weight_scale"]
    assert scale.tobytes() == scaled("F8_E4M3", "weight_scale", 256, 1)["l.q.weight_scale"][2]


def test_a_model_may_hold_them_wider_and_gets_them_as_stored(tmp_path: Path) -> None:
    """A float32 parameter in place of a scale in bfloat16 becomes that scale."""
    checkpoint = write(tmp_path, packed())
    model = {
        "l.q.weight_packed": np.zeros((8, 8), np.int32),
        "l.q.weight_scale": np.zeros((8, 2), np.float32),
        "l.q.weight_shape": np.zeros(2, np.int64),
    }
    streamload.load_state_dict(model, checkpoint, progress=False)
    assert model["l.q.weight_scale"].dtype == BF16.numpy
    assert model["l.q.weight_scale"].tobytes() == packed()["l.q.weight_scale"][2]


def test_who_keeps_what(tmp_path: Path) -> None:
    """Members keep their dtypes; float8 values are left to be refused where a cast is asked for."""
    checkpoint = write(
        tmp_path, scaled("F8_E4M3", "weight_scale", 256, 1) | {"l.norm": filled("F32", 4)}
    )
    kept = {name: kept_dtype(checkpoint.members, info) for name, info in checkpoint.tensors.items()}
    assert kept == {"l.q.weight": None, "l.q.weight_scale": F32, "l.norm": None}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_split_keeps_them_on_one_node(tmp_path: Path, count: int) -> None:
    tensors: Tensors = {}
    for i in range(7):
        tensors |= nf4(f"part{i}.weight")
    checkpoint = write(tmp_path, tensors)
    nodes = [Node(f"n{i}", "1MB") for i in range(count)]
    made = streamload.split(checkpoint, nodes=nodes)
    where = {p.name: p.device for p in made.placements}
    assert set(where) == set(tensors)
    for group in groups(checkpoint).values():
        assert len({where[info.name] for info in group.members.values()}) == 1
    assert len(set(where.values())) == count


def test_a_balanced_split_keeps_them_on_one_node(mixed: Path) -> None:
    checkpoint = open_checkpoint(mixed)

    def planned(nodes: Sequence[Node]) -> Plan:
        return streamload.split(checkpoint, nodes=nodes, dtype="checkpoint")

    ranks = [Member(rank, name, name, 0, 1) for rank, name in enumerate(("a", "b", "c"))]
    made = make_shares(0, ranks, [10**6] * 3, "balanced", planned, checkpoint)
    where = {name: share.node for share in made.shares for name in share.parameters}
    assert where.keys() == checkpoint.tensors.keys()
    assert len(set(where.values())) == 3
    for group in of(checkpoint):
        assert len({where[info.name] for info in group.members.values()}) == 1


# --- what people see ------------------------------------------------------------------------------


def cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    app([str(argument) for argument in arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_inspect_shows_one_line_for_each(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Name, kind, unpacked shape, and the bytes of all of its tensors."""
    lines = cli(capsys, "inspect", mixed).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:17]}
    assert rows["layers.0.q.weight"] == ["bnb-nf4", "8", "x", "128", "718", "B"]
    assert rows["layers.0.k.weight"] == ["ct-packed", "8", "x", "64", "304", "B"]
    assert rows["layers.1.v.weight"] == ["fp8", "256", "x", "256", "66.56", "kB"]
    assert rows["layers.0.norm.weight"][0] == "bfloat16"
    assert lines[17].startswith("40 tensors, of 12 quantised weights and 4 others in 2 files")
    said = json.loads(cli(capsys, "inspect", mixed, "--json"))
    assert len(said["tensors"]) == 40
    one = next(each for each in said["quantised"] if each["name"] == "layers.0.q.weight")
    assert (one["kind"], one["shape"], one["nbytes"]) == ("bnb-nf4", [8, 128], 718)
    assert one["members"]["absmax"] == "layers.0.q.weight.absmax"


def changed(folder: Path, change: Callable[[bytearray], None]) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_diff_and_verify_speak_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in", nf4() | {"l.norm.weight": filled("BF16", 4)})
    out = tmp_path / "out"
    streamload.convert(tmp_path / "in", out, progress=False)
    infos = open_checkpoint(out).tensors

    def flip(data: bytearray) -> None:
        for name in ("l.q.weight", "l.q.weight.absmax"):
            data[infos[name].start] ^= 1

    changed(out, flip)
    found = streamload.diff(tmp_path / "in", out, progress=False)
    assert [d.name for d in found.differences] == ["l.q.weight", "l.q.weight.absmax"]
    lines = str(found).splitlines()
    assert lines[1].startswith("l.q.weight (bnb-nf4)  values: 1 of 512 values differ")
    assert "; absmax: 1 of 16 values differ" in lines[1]
    assert lines[2].startswith("2 tensors different, 3 equal")
    printed = cli(capsys, "verify", out, "--no-progress").splitlines()
    assert printed[1].startswith("l.q.weight (bnb-nf4)")
    assert printed[1].count("digest") == 2
