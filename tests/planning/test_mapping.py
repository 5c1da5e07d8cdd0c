"""Names and row orders of model families, and explicit mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load_helpers import write
from safetensors_files import write_arrays

import streamload
from streamload import RowRange, Source
from streamload.core.tensors import RowTranspose
from streamload.errors import CheckpointError, StateDictMismatchError
from streamload.planning.plan import Plan
from streamload.planning.sources import MAPPINGS, sources
from streamload.verification.verify import verify

Array = np.ndarray[Any, Any]


def to_meta(w: Array, heads: int) -> Array:
    """Half-split rows to interleaved ones, by the definition of Hugging Face's ``permute``.

    Their conversion is ``w.view(heads, dim // heads // 2, 2, dim2).transpose(1, 2)`` from Meta's
    rows; this is its inverse.
    """
    out = np.empty_like(w)
    size = len(w) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = w[head * size + i]
            out[head * size + 2 * i + 1] = w[head * size + size // 2 + i]
    return out


def to_hf(w: Array, heads: int) -> Array:
    """Interleaved rows to half-split ones, as transformers' conversion script has it."""
    dim, rest = len(w), w.shape[1:]
    axes = w.reshape(heads, dim // heads // 2, 2, *rest).swapaxes(1, 2)
    return axes.reshape(dim, *rest)


def hf_llama(rng: np.random.Generator, *, dim: int, heads: int, kv: int) -> dict[str, Array]:
    """A Llama of two layers with biases, by Hugging Face's names."""

    def new(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    kv_dim = dim // heads * kv
    tensors = {"model.embed_tokens.weight": new(17, dim), "model.norm.weight": new(dim)}
    tensors["lm_head.weight"] = new(17, dim)
    for layer in range(2):
        at = f"model.layers.{layer}"
        for kind, rows in (("q", dim), ("k", kv_dim), ("v", kv_dim), ("o", dim)):
            tensors[f"{at}.self_attn.{kind}_proj.weight"] = new(rows, dim)
            tensors[f"{at}.self_attn.{kind}_proj.bias"] = new(rows)
        for kind in ("gate", "up", "down"):
            tensors[f"{at}.mlp.{kind}_proj.weight"] = new(3, dim)
        tensors[f"{at}.input_layernorm.weight"] = new(dim)
        tensors[f"{at}.post_attention_layernorm.weight"] = new(dim)
    return tensors


CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}
META_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.1.input_layernorm.weight": "layers.1.attention_norm.weight",
    "model.layers.1.post_attention_layernorm.weight": "layers.1.ffn_norm.weight",
    "model.layers.1.self_attn.q_proj.weight": "layers.1.attention.wq.weight",
    "model.layers.1.self_attn.k_proj.bias": "layers.1.attention.wk.bias",
    "model.layers.1.self_attn.v_proj.weight": "layers.1.attention.wv.weight",
    "model.layers.1.self_attn.o_proj.weight": "layers.1.attention.wo.weight",
    "model.layers.1.mlp.gate_proj.weight": "layers.1.feed_forward.w1.weight",
    "model.layers.1.mlp.down_proj.weight": "layers.1.feed_forward.w2.weight",
    "model.layers.1.mlp.up_proj.weight": "layers.1.feed_forward.w3.weight",
}


def load(path: Path, **arguments: Any) -> dict[str, Array]:
    report = streamload.load_state_dict(
        None, path, device="host", dtype="checkpoint", progress=False, budget="1GB", **arguments
    )
    return report.state_dict


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("chunk_nbytes", [64, 1000, 2**20])
def test_hf_llama_to_meta(tmp_path: Path, heads: tuple[int, int], chunk_nbytes: int) -> None:
    """Names are Meta's; query and key rows interleave by their head counts, biases too."""
    tensors = hf_llama(np.random.default_rng(0), dim=32, heads=heads[0], kv=heads[1])
    config = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    path = write(tmp_path, tensors, config)
    found = load(path, mapping="hf-llama", chunk_nbytes=chunk_nbytes)
    assert len(found) == len(tensors)
    for hf, meta in META_NAMES.items():
        expected = tensors[hf]
        if ".q_proj" in hf or ".k_proj" in hf:
            expected = to_meta(expected, heads[".k_proj" in hf])
        assert np.array_equal(found[meta], expected), hf


def test_there_and_back(tmp_path: Path) -> None:
    """The mapping "meta-llama" undoes "hf-llama": every name and every byte; rows are permuted."""
    tensors = hf_llama(np.random.default_rng(1), dim=32, heads=4, kv=2)
    meta = load(write(tmp_path / "hf", tensors, CONFIG), mapping="hf-llama")
    back = load(write(tmp_path / "meta", meta, CONFIG), mapping="meta-llama")
    assert back.keys() == tensors.keys()
    for name, array in tensors.items():
        assert np.array_equal(back[name], array), name
    wq = meta["layers.0.attention.wq.weight"]
    assert np.array_equal(to_hf(wq, 4), tensors["model.layers.0.self_attn.q_proj.weight"])


def test_metas_own_config(tmp_path: Path) -> None:
    """Head counts by Meta's names; without a count of key heads, there are as many as queries."""
    tensors = hf_llama(np.random.default_rng(1), dim=32, heads=4, kv=4)
    meta = load(write(tmp_path / "a", tensors, {"num_attention_heads": 4}), mapping="hf-llama")
    config = {"n_heads": 4, "n_kv_heads": None}
    back = load(write(tmp_path / "b", meta, config), mapping="meta-llama")
    assert all(np.array_equal(back[name], array) for name, array in tensors.items())


def test_norms_of_queries_and_keys(tmp_path: Path) -> None:
    """A norm over one head is permuted as one head, one over all heads like the weight."""
    rng = np.random.default_rng(2)
    norm = "model.layers.0.self_attn.q_norm.weight"
    tensors = {norm: rng.standard_normal(8).astype(np.float32)}
    tensors["model.layers.0.self_attn.k_norm.weight"] = rng.standard_normal(16).astype(np.float32)
    config = CONFIG | {"hidden_size": 32}
    found = load(write(tmp_path, tensors, config), mapping="hf-llama")
    q, k = (found[f"layers.0.attention.{kind}_norm.weight"] for kind in "qk")
    assert np.array_equal(q, to_meta(tensors[norm], 1))
    assert np.array_equal(k, to_meta(tensors["model.layers.0.self_attn.k_norm.weight"], 2))


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"num_attention_heads": 3},
        {"num_attention_heads": 32},
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_attention_heads": "4"},
        {"num_attention_heads": True},
        {"num_attention_heads": None, "num_key_value_heads": None},
    ],
)
def test_head_counts_that_do_not_fit(tmp_path: Path, config: dict[str, Any] | None) -> None:
    """Missing or impossible head counts are an error with tensor, what is needed, and the count."""
    tensors = hf_llama(np.random.default_rng(0), dim=32, heads=4, kv=4)
    with pytest.raises(CheckpointError, match="num_attention_heads") as caught:
        load(write(tmp_path, tensors, config), mapping="hf-llama")
    error = caught.value
    assert error.tensor == "model.layers.0.self_attn.q_proj.weight"
    assert error.found == (config or {}).get("num_attention_heads")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("q_proj.weight", np.zeros((64, 1), np.uint8)),
        ("q_proj.qweight", np.zeros((4, 32), np.float32)),
        ("k_proj.weight_scale_inv", np.zeros((1 << 4, 4), np.float32)),
    ],
)
def test_packed_rows_are_not_reordered(tmp_path: Path, name: str, array: Array) -> None:
    """Packed and block-wise tensors of a query or key layer are refused, not scrambled."""
    tensors = hf_llama(np.random.default_rng(0), dim=32, heads=4, kv=4)
    tensors[f"model.layers.0.self_attn.{name}"] = array
    with pytest.raises(CheckpointError, match="packed or in blocks") as caught:
        load(write(tmp_path, tensors, CONFIG | {"num_key_value_heads": 4}), mapping="hf-llama")
    assert caught.value.tensor == f"model.layers.0.self_attn.{name}"


def test_scales_of_rows_go_with_their_rows(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": np.arange(64, dtype=np.int8).reshape(32, 2),
        "model.layers.0.self_attn.q_proj.weight_scale": np.arange(32, dtype=np.float32)[:, None],
        "model.layers.0.self_attn.q_proj.input_scale": np.ones(1, np.float32),
    }
    found = load(write(tmp_path, tensors, CONFIG), mapping="hf-llama")
    weight, scale = (found[f"layers.0.attention.wq.{n}"] for n in ("weight", "weight_scale"))
    assert np.array_equal(weight[:, 0], 2 * scale[:, 0])
    assert "layers.0.attention.wq.input_scale" in found


def test_a_permutation_is_its_transposes_inverse(tmp_path: Path) -> None:
    """What the sources say of both families: the same rows, outer and inner exchanged."""
    tensors = hf_llama(np.random.default_rng(0), dim=32, heads=4, kv=2)
    checkpoint = streamload.open_checkpoint(write(tmp_path, tensors, CONFIG))
    fill, _, _ = sources(checkpoint, "hf-llama", None)
    assert fill["layers.0.attention.wq.weight"].transpose == RowTranspose(4, 2, 4)
    assert fill["layers.0.attention.wk.weight"].transpose == RowTranspose(2, 2, 4)
    assert fill["layers.0.attention.wv.weight"].transpose is None
    assert MAPPINGS[:2] == ("hf-llama", "meta-llama")


def test_without_a_mapping_every_tensor_fills_the_parameter_of_its_name(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"b": (4, 2), "s": (), "a": (0, 3), "c": (1,)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    checkpoint = streamload.open_checkpoint(write(tmp_path, tensors))
    fill, skipped, tied = sources(checkpoint, None, None)
    expected = sources(checkpoint, {}, None)[0]
    assert (skipped, tied) == ([], {})
    assert dict(fill) == dict(expected)
    assert list(fill) == list(expected) == list(checkpoint.tensors)
    assert len(fill) == 4
    assert "s" in fill and "t" not in fill
    assert fill["b"].rows == (RowRange("b", 0, 4),)
    with pytest.raises(KeyError):
        fill["t"]


# --- explicit mappings ----------------------------------------------------------------------------

ABC = {
    "a": np.arange(6, dtype=np.float32).reshape(3, 2),
    "b": np.arange(10, 14, dtype=np.float32).reshape(2, 2),
    "c": np.arange(3, dtype=np.float32),
}


def test_concatenation_and_slices(tmp_path: Path) -> None:
    path = write(tmp_path, ABC)
    found = load(
        path,
        mapping={
            "ba": ["b", "a"],
            "middle": RowRange("a", 1, 2),
            "pieces": (RowRange("a", 2, 3), "b", RowRange("a", 0, 1)),
        },
    )
    a, b = ABC["a"], ABC["b"]
    assert found.keys() == {"ba", "middle", "pieces", "c"}
    assert np.array_equal(found["ba"], np.concatenate([b, a]))
    assert np.array_equal(found["middle"], a[1:2])
    assert np.array_equal(found["pieces"], np.concatenate([a[2:], b, a[:1]]))


def test_names_can_be_exchanged(tmp_path: Path) -> None:
    found = load(write(tmp_path, ABC), mapping={"a": "b", "b": "a"})
    assert np.array_equal(found["a"], ABC["b"])
    assert np.array_equal(found["b"], ABC["a"])


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("llama", "no mapping 'llama'; there are hf-llama, meta-llama"),
        (["a"], "hf-llama, meta-llama, .* or a dict"),
        (("hf-llama", 3), "hf-llama, meta-llama, .* or a dict"),
        (("llama", {}), "no mapping 'llama'; there are hf-llama, meta-llama"),
        (("hf-llama", {"x": "nope"}), "no tensor 'nope'"),
        ({"x": Source("nope", transpose=True)}, "no tensor 'nope'"),
        ({"x": Source("c", transpose=True)}, r"a transpose needs two axes, and its shape is \[3\]"),
        ({"x": "nope"}, "no tensor 'nope'"),
        ({"x": ["a", "nope"]}, "no tensor 'nope'"),
        ({"x": RowRange("nope", 0, 1)}, "no tensor 'nope'"),
        ({"x": []}, "no tensor is given"),
        ({"x": 3}, "not 3"),
        ({"x": ["a", None]}, "not None"),
    ],
)
def test_bad_mappings(tmp_path: Path, mapping: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, ABC), mapping=mapping)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", "c"], "does not continue"),
        (RowRange("a", 0, 4), "no rows 0 to 4"),
        (RowRange("a", -1, 2), "no rows -1 to 2"),
        (RowRange("a", 2, 1), "no rows 2 to 1"),
        (Source("a", shape=(5,)), r"are not a tensor of shape \[5\]"),
        (Source("a", transpose=True, shape=(3, 3)), r"are not a tensor of shape \[3, 3\]"),
        (Source("a", RowTranspose(1, 2, 2)), r"\[3, 2\] are not \(1, 2, 2\) rows"),
        (Source(["a", "b"], RowTranspose(1, 2, 5)), r"\[5, 2\] are not \(1, 2, 5\) rows"),
    ],
)
def test_rows_that_do_not_go_together(tmp_path: Path, given: Any, message: str) -> None:
    """Rows of other widths and rows that are not there name the parameter, in a plan too."""
    path = write(tmp_path, ABC)
    with pytest.raises(StateDictMismatchError, match=message) as caught:
        load(path, mapping={"x": given})
    assert caught.value.problems[0].startswith("x: ")
    with pytest.raises(StateDictMismatchError, match=message):
        streamload.plan(path, budget="1GB", dtype="float16", mapping={"x": given})


EXPERTS = [np.arange(6 * n, 6 * n + 6, dtype=np.float32).reshape(2, 3) for n in range(3)]
LAYOUTS: dict[str, tuple[Any, Array]] = {
    "t": (Source("a", transpose=True), ABC["a"].T),
    "rows": (
        Source([RowRange("a", 1), "b"], transpose=True),
        np.vstack([ABC["a"][1:], ABC["b"]]).T,
    ),
    "stack": (Source(["e0", "e1", "e2"], shape=(3, 2, 3)), np.stack(EXPERTS)),
    "turned": (
        Source(["e0", "e1", "e2"], transpose=True, shape=(3, 3, 2)),
        np.stack(EXPERTS).swapaxes(1, 2),
    ),
    "stored": (Source("s", transpose=True), np.stack(EXPERTS).swapaxes(1, 2)),
    "row": (Source("row", transpose=True), np.arange(4, dtype=np.float32)[:, None]),
    "none": (Source("none", transpose=True), np.zeros((0, 3), np.float32)),
    "one": (RowRange("b", 1), ABC["b"][1:]),
}


@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
@pytest.mark.parametrize("chunk_nbytes", [4, 9, 64, 2**20])
@pytest.mark.parametrize("device", ["host", "cpu", "CPU"])
def test_layouts(tmp_path: Path, device: str, chunk_nbytes: int, dtype: str) -> None:
    if device == "cpu":
        pytest.importorskip("torch")
    first = ABC | {"e1": EXPERTS[1], "s": np.stack(EXPERTS)}
    second = {"e0": EXPERTS[0], "e2": EXPERTS[2], "row": np.arange(4, dtype=np.float32)[None]}
    second["none"] = np.zeros((3, 0), np.float32)
    for number, tensors in enumerate((first, second)):
        write_arrays(tmp_path / f"{number}.safetensors", tensors)
    mapping = {name: source for name, (source, _) in LAYOUTS.items()}
    options = {"chunk_nbytes": chunk_nbytes, "dtype": dtype, "progress": False}
    report = streamload.load_state_dict(
        None, tmp_path, device=device, mapping=mapping, budget="1GB", **options
    )
    for name, (_, expected) in LAYOUTS.items():
        found = report.state_dict[name]
        if expected.size:
            found = found if device == "host" else found.numpy()
            assert np.array_equal(found, expected), name
            assert found.dtype == ("float32" if dtype == "checkpoint" else dtype)
        assert tuple(found.shape) == expected.shape, name
    assert verify(report, streamload.open_checkpoint(tmp_path)) == []
    assert Plan.from_json(report.plan.to_json()) == report.plan


def test_a_transpose_says_what_it_takes(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((1200, 3000)).astype(np.float32)
    path = write(tmp_path, {"w": w})
    arguments: dict[str, Any] = {"dtype": "float16", "mapping": {"w": Source("w", transpose=True)}}
    plain = streamload.plan(path, budget="1GB", dtype="float16", device="host", threads=2)
    turned = streamload.plan(path, budget="1GB", device="host", threads=2, **arguments)
    (a,), (b,) = plain.devices, turned.devices
    assert b.scratch_nbytes - a.scratch_nbytes == 2 * 2 * 2**19
    least = b.resident_nbytes + 2**21
    report = streamload.load_state_dict(
        None, path, device="host", budget=least, progress=False, reader="pread", **arguments
    )
    assert np.array_equal(report.state_dict["w"], w.T.astype(np.float16))
    assert report.held_nbytes["host"] <= least


# --- families -------------------------------------------------------------------------------------


def test_hf_gpt2(tmp_path: Path) -> None:
    """Conv1D becomes Linear, masks are left out, and the head is the embedding."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (11, 4), "wpe.weight": (8, 4), "ln_f.weight": (4,)}
    at = "h.0."
    shapes |= {f"{at}attn.c_attn.weight": (4, 12), f"{at}attn.c_attn.bias": (12,)}
    shapes |= {f"{at}attn.c_proj.weight": (4, 4), f"{at}mlp.c_fc.weight": (4, 16)}
    shapes |= {f"{at}mlp.c_proj.weight": (16, 4), f"{at}attn.bias": (1, 1, 8, 8)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for prefix in ("", "transformer."):
        tensors = {prefix + name: array for name, array in arrays.items()}
        path = write(tmp_path / f"p{prefix}", tensors, {"architectures": ["GPT2LMHeadModel"]})
        found = load(path, mapping="hf-gpt2")
        assert found.keys() == arrays.keys() - {"h.0.attn.bias"}
        for name, array in found.items():
            turned = array.ndim == 2 and name.startswith("h.")
            assert np.array_equal(array, arrays[name].T if turned else arrays[name]), name
        model = {name: np.zeros_like(array) for name, array in found.items()}
        model["lm_head.weight"] = np.zeros((11, 4), np.float32)
        streamload.load_state_dict(model, path, mapping="hf-gpt2", progress=False, budget="1GB")
        assert np.array_equal(model["lm_head.weight"], arrays["wte.weight"])


def moe(style: str, rng: np.random.Generator) -> dict[str, Array]:
    """A Llama with two experts a layer, named as families do."""
    tensors = hf_llama(rng, dim=32, heads=4, kv=2)
    tensors = {name: array for name, array in tensors.items() if ".mlp." not in name}
    names = ("w1", "w2", "w3") if style == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if style == "mixtral" else "mlp"
    for layer in range(2):
        at = f"model.layers.{layer}.{block}"
        tensors[f"{at}.gate.weight"] = rng.standard_normal((2, 32)).astype(np.float32)
        for expert in range(2):
            for name in names:
                array = rng.standard_normal((6, 32)).astype(np.float32)
                tensors[f"{at}.experts.{expert}.{name}.weight"] = array
    return tensors


def test_experts(tmp_path: Path) -> None:
    """Mixtral's stay apart, those of OLMoE and Qwen are stacked, by the names of their models."""
    rng = np.random.default_rng(0)
    tensors = moe("mixtral", rng)
    found = load(write(tmp_path / "mixtral", tensors, CONFIG), mapping="hf-mixtral")
    at = "model.layers.1.block_sparse_moe"
    for name in ("gate", "experts.1.w2"):
        assert np.array_equal(
            found[f"layers.1.feed_forward.{name}.weight"], tensors[f"{at}.{name}.weight"]
        )
    q = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(found["layers.1.attention.wq.weight"], to_meta(tensors[q], 4))
    tensors = moe("qwen", rng)
    path = write(tmp_path / "qwen", tensors, CONFIG)
    expected = np.stack([tensors[f"model.layers.1.mlp.experts.{n}.up_proj.weight"] for n in (0, 1)])
    olmoe, qwen = load(path, mapping="hf-olmoe"), load(path, mapping="hf-qwen")
    assert np.array_equal(olmoe["layers.1.feed_forward.up_proj"], expected)
    assert np.array_equal(olmoe["layers.1.attention.wq.weight"], to_meta(tensors[q], 4))
    assert np.array_equal(qwen["blk.1.ffn_up_exps.weight"], expected)
    assert np.array_equal(qwen["blk.1.attn_q.weight"], tensors[q])
    assert not [name for name in (*olmoe, *qwen) if "model." in name]
    del tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
    with pytest.raises(CheckpointError, match="number 0 is missing") as caught:
        load(write(tmp_path / "less", tensors, CONFIG), mapping="hf-qwen")
    assert caught.value.tensor == "model.layers.1.mlp.experts.1.up_proj.weight"


def test_whisper(tmp_path: Path) -> None:
    """Its names become OpenAI's, with and without the prefix of a model with a head."""
    names = {
        "encoder.conv1.bias": "encoder.conv1.bias",
        "encoder.embed_positions.weight": "encoder.positional_embedding",
        "encoder.layers.11.self_attn.q_proj.weight": "encoder.blocks.11.attn.query.weight",
        "encoder.layers.11.fc1.bias": "encoder.blocks.11.mlp.0.bias",
        "encoder.layer_norm.weight": "encoder.ln_post.weight",
        "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
        "decoder.embed_positions.weight": "decoder.positional_embedding",
        "decoder.layers.0.self_attn_layer_norm.bias": "decoder.blocks.0.attn_ln.bias",
        "decoder.layers.0.encoder_attn.k_proj.weight": "decoder.blocks.0.cross_attn.key.weight",
        "decoder.layers.0.encoder_attn.out_proj.bias": "decoder.blocks.0.cross_attn.out.bias",
        "decoder.layers.0.encoder_attn_layer_norm.bias": "decoder.blocks.0.cross_attn_ln.bias",
        "decoder.layers.0.fc2.weight": "decoder.blocks.0.mlp.2.weight",
        "decoder.layers.0.final_layer_norm.weight": "decoder.blocks.0.mlp_ln.weight",
        "decoder.layer_norm.bias": "decoder.ln.bias",
    }
    for prefix in ("", "model."):
        tensors = {prefix + old: np.full(2, n, np.float32) for n, old in enumerate(names)}
        path = write(
            tmp_path / f"p{prefix}", tensors | {"proj_out.weight": np.ones(2, np.float32)}, {}
        )
        found = load(path, mapping="hf-whisper")
        assert {name: int(array[0]) for name, array in found.items()} == {
            new: n for n, new in enumerate(names.values())
        }


def test_a_family_with_overrides(tmp_path: Path) -> None:
    tensors = hf_llama(np.random.default_rng(0), dim=32, heads=4, kv=4)
    at = "model.layers.0.self_attn"
    path = write(tmp_path, tensors, {"num_attention_heads": 4})
    parts = [f"{at}.{kind}_proj.weight" for kind in "qkv"]
    over = {"layers.0.attention.wqkv.weight": parts, "norm.weight": [f"{at}.o_proj.bias"]}
    found = load(path, mapping=("hf-llama", over))
    whole = load(path, mapping="hf-llama")
    assert np.array_equal(
        found["layers.0.attention.wqkv.weight"], np.concatenate([tensors[p] for p in parts])
    )
    assert np.array_equal(found["norm.weight"], tensors[f"{at}.o_proj.bias"])
    gone = {f"layers.0.attention.w{kind}.weight" for kind in "qkv"} | {"layers.0.attention.wo.bias"}
    assert found.keys() == whole.keys() - gone | over.keys()
    same = found.keys() - over.keys()
    assert all(np.array_equal(found[name], whole[name]) for name in same)


# --- rename ---------------------------------------------------------------------------------------


def test_rename(tmp_path: Path) -> None:
    path = write(tmp_path, ABC)
    assert load(path, rename={"a": "A"}).keys() == {"A", "b", "c"}
    assert load(path, rename={"a": None}).keys() == {"b", "c"}
    report = streamload.load_state_dict(
        None, path, device="host", rename=lambda n: None if n == "b" else n.upper(), progress=False
    )
    assert report.state_dict.keys() == {"A", "C"}
    assert report.skipped == ("b",)


def test_rename_comes_after_the_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, ABC)
    assert load(path, mapping={"ab": ["a", "b"]}, rename={"ab": "x"}).keys() == {"x", "c"}
    with pytest.raises(ValueError, match=r"^rename: no tensor's name matches 'a'"):
        load(path, mapping={"ab": ["a", "b"]}, rename={"a": "y"})
    with pytest.raises(ValueError, match=r"^rename: no tensor's name matches 1"):
        load(path, rename={1: "y"})


def test_what_matches_nothing_is_an_error(tmp_path: Path) -> None:
    array = np.zeros(2, np.float32)
    path = write(tmp_path, {"layers.0.weight": array, "layers.1.weight": array})
    near = r"; did you mean 'layers.0.weight'\?$"
    plan = partial(streamload.plan, budget="1GB")
    for entrance in (load, plan, partial(streamload.iterate, device="host")):
        with pytest.raises(ValueError, match=r"^rename: .* 'layer.0.weight'" + near):
            entrance(path, rename={"layer.0.weight": "w"})
        with pytest.raises(
            ValueError, match=r"^mapping of 'w': no tensor 'layer.0.weight'.*" + near
        ):
            entrance(path, mapping={"w": "layer.0.weight"})
        with pytest.raises(ValueError, match=r"^mapping 'hf-llama' matches no tensor of /"):
            entrance(path, mapping="hf-llama")
        with pytest.raises(ValueError, match=r"^mapping 'hf-qwen' matches no tensor of /"):
            entrance(path, mapping=("hf-qwen", {"w": "layers.0.weight"}))
    for entrance in (plan, streamload.iterate):
        with pytest.raises(ValueError, match=r"^dtype: no tensor's name matches '\*nrom\*'"):
            entrance(path, dtype={"*nrom*": "float32", "*": "float16"})
    with pytest.raises(ValueError, match=r"^rename: .* 'layer.0.weight'" + near):
        streamload.diff(path, path, rename={"layer.0.weight": "w"}, progress=False)


@pytest.mark.parametrize("rename", [["a"], 3, lambda name: 3, {"a": 3}])
def test_bad_renames(tmp_path: Path, rename: Any) -> None:
    """What is no renaming, and new names that are no names, are ValueErrors."""
    with pytest.raises(ValueError, match="rename"):
        load(write(tmp_path, ABC), rename=rename)


def test_two_tensors_of_one_new_name(tmp_path: Path) -> None:
    """Refused, with both old names and the new one."""
    with pytest.raises(CheckpointError, match=r"'a' and this tensor .* 'b'") as caught:
        load(write(tmp_path, ABC), rename={"a": "b"})
    assert caught.value.tensor == "b"


# --- tied heads -----------------------------------------------------------------------------------


def tied(
    tmp_path: Path, names: Sequence[str], config: Mapping[str, Any], **arguments: Any
) -> dict[str, str]:
    """The names that `sources` says are tied."""
    tensors = {name: np.zeros((2, 2), np.float32) for name in names}
    checkpoint = streamload.open_checkpoint(write(tmp_path, tensors, config))
    return sources(checkpoint, arguments.get("mapping"), arguments.get("rename"))[2]


LM = {"architectures": ["LlamaForCausalLM"], **CONFIG}
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("names", "config", "arguments", "expected"),
    [
        ([EMBED], LM, {}, {"lm_head.weight": EMBED}),
        ([EMBED], LM | {"tie_word_embeddings": True}, {}, {"lm_head.weight": EMBED}),
        ([EMBED], LM | {"tie_word_embeddings": False}, {}, {}),
        ([EMBED, "lm_head.weight"], LM, {}, {}),
        ([EMBED], {"architectures": ["BertModel"]}, {}, {}),
        ([EMBED], {}, {}, {}),
        (["transformer.wte.weight"], {"architectures": ["GPT2LMHeadModel"]}, {}, None),
        (["backbone.embeddings.weight"], {"architectures": ["MambaForCausalLM"]}, {}, None),
        ([EMBED], LM, {"mapping": "hf-llama"}, {"output.weight": "tok_embeddings.weight"}),
        ([EMBED], LM, {"rename": {"lm_head.weight": "head", EMBED: "tok"}}, {"head": "tok"}),
        ([EMBED], LM, {"rename": {EMBED: None}}, {}),
        (["a.embed_tokens.weight", "b.embed_tokens.weight"], LM, {}, {}),
    ],
)
def test_tied_heads(
    tmp_path: Path,
    names: list[str],
    config: dict[str, Any],
    arguments: dict[str, Any],
    expected: dict[str, str] | None,
) -> None:
    if expected is None:
        expected = {"lm_head.weight": names[0]}
    assert tied(tmp_path, names, config, **arguments) == expected
