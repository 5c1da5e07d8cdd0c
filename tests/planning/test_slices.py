"""Slices of tensors for ranks that share layers: each byte is in one, cut at heads and blocks."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

import streamload
from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.core.dtypes import BY_CODE
from streamload.core.tensors import TensorInfo, region_of
from streamload.distributed.tensor_split import styles_of
from streamload.files.header import Header
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.shares import ClusterPlan, Member, Mesh, make_shares

STYLES = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}


def checkpoint_of(
    shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], dtype: str = "BF16"
) -> Checkpoint:
    """A checkpoint of these headers, without a file; "weight" in FP8 beside its scales."""
    path, at, infos = Path("/nowhere/model.safetensors"), 8, []
    is_fp8 = any(name.endswith("_scale_inv") for name in shapes)
    for name, shape in shapes.items():
        code = "F8_E4M3" if is_fp8 and f"{name}_scale_inv" in shapes else dtype
        nbytes = BY_CODE[code].nbytes(math.prod(shape))
        infos.append(TensorInfo(name, BY_CODE[code], tuple(shape), path, at, at + nbytes))
        at += nbytes
    return from_headers(path, [Header(path, at, 8, tuple(infos), {})], dict(config))


@dataclass
class Model:
    """The shapes of a small model, and the numbers that must divide."""

    family: str
    heads: int
    kv_heads: int
    head: int  # size of a head
    inner: int
    vocabulary: int
    layers: int
    block: int = 1
    styles: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def random(cls, family: str, chance: random.Random) -> Model:
        """Any sizes: half of them divide by 2 or 4."""
        kv_heads = chance.choice((1, 2, 3, 4, 8))
        block = chance.choice((2, 4)) if family == "fp8" else 1
        some = chance.choice((2, 4, 8, 3))
        return cls(
            family,
            kv_heads * (1 if family == "gpt2" else chance.choice((1, 2, 4))),
            kv_heads,
            2 * chance.choice((1, 2)) * block,
            some * block * chance.choice((2, 4)),
            some * chance.choice((4, 7)),
            chance.choice((1, 2, 5)),
            block,
            STYLES if family == "stacked" else {},
        )

    def shapes(self) -> dict[str, Sequence[int]]:
        """Shapes by name."""
        q, kv, n = self.heads * self.head, self.kv_heads * self.head, self.inner
        width = q
        if self.family == "gpt2":
            shapes: dict[str, Sequence[int]] = {"wte.weight": (self.vocabulary, width)}
            for i in range(self.layers):
                shapes |= {
                    f"h.{i}.ln_1.weight": (width,),
                    f"h.{i}.attn.c_attn.weight": (width, 3 * q),
                    f"h.{i}.attn.c_attn.bias": (3 * q,),
                    f"h.{i}.attn.c_proj.weight": (q, width),
                    f"h.{i}.attn.c_proj.bias": (width,),
                    f"h.{i}.mlp.c_fc.weight": (width, n),
                    f"h.{i}.mlp.c_fc.bias": (n,),
                    f"h.{i}.mlp.c_proj.weight": (n, width),
                    f"h.{i}.mlp.c_proj.bias": (width,),
                }
            return shapes
        shapes = {"model.embed_tokens.weight": (self.vocabulary, width)}
        for i in range(self.layers):
            at = f"model.layers.{i}."
            attention = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width)}
            mlp: dict[str, Sequence[int]] = {
                "mlp.gate_proj.weight": (n, width),
                "mlp.up_proj.weight": (n, width),
                "mlp.down_proj.weight": (width, n),
            }
            if self.family == "fused":
                attention = {"qkv_proj": (q + 2 * kv, width)}
                mlp = {"mlp.gate_up_proj.weight": (2 * n, width), **dict([list(mlp.items())[2]])}
            elif self.family == "experts":
                mlp = {
                    f"block_sparse_moe.experts.{e}.{w}.weight": shape
                    for e in range(3)
                    for w, shape in (("w1", (n, width)), ("w3", (n, width)), ("w2", (width, n)))
                }
                mlp["block_sparse_moe.gate.weight"] = (3, width)
            elif self.family == "stacked":
                mlp = {
                    "mlp.experts.gate_up_proj": (3, 2 * n, width),
                    "mlp.experts.down_proj": (3, width, n),
                }
            each = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
            each |= {f"self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
            each |= {"self_attn.o_proj.weight": (width, q), **mlp}
            if self.family == "fp8":
                each = {name: shape for name, shape in each.items() if "bias" not in name}
                each |= {
                    f"{name}_scale_inv": tuple(-(-length // self.block) for length in shape)
                    for name, shape in each.items()
                }
            shapes |= {f"{at}{name}": shape for name, shape in each.items()}
            shapes[f"{at}self_attn.q_norm.weight"] = (self.head,)
        return shapes | {"lm_head.weight": (self.vocabulary, width)}

    def checkpoint(self) -> Checkpoint:
        config: dict[str, Any] = {
            "model_type": {"gpt2": "gpt2", "fused": "phi3"}.get(self.family, "llama"),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }
        if self.family == "fp8":
            sizes = [self.block, self.block]
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": sizes}
        return checkpoint_of(self.shapes(), config)

    def sizes(self) -> set[int]:
        """The sizes of groups that divide all, up to 8."""
        divisor = math.gcd(self.heads, self.kv_heads, self.vocabulary)
        divisor = math.gcd(divisor, self.inner // self.block, self.heads * self.head // self.block)
        return {size for size in range(1, 9) if divisor % size == 0}


def made(checkpoint: Checkpoint, budgets: Sequence[int], mesh: Mesh) -> ClusterPlan:
    members = [Member(rank, f"n{rank}", f"n{rank}", 0, 1) for rank in range(len(budgets))]

    def planned(nodes: Sequence[Node]) -> Plan:
        return streamload.split(checkpoint, nodes=nodes, dtype="checkpoint")

    return make_shares(0, members, budgets, mesh, planned, checkpoint)


def check_coverage(plan: ClusterPlan, checkpoint: Checkpoint, mesh: Mesh, head: int) -> None:
    """Each byte is on one rank of one group if it is cut, else on all; cuts are at heads."""
    found: set[str] = set()
    for first in range(0, len(plan.shares), mesh.size):
        group = plan.shares[first : first + mesh.size]
        assert [share.part for share in group] == list(range(mesh.size))
        assert len({share.parameters for share in group}) == 1
        assert len({share.nbytes for share in group}) == 1
        seen = {n: np.zeros(checkpoint.tensors[n].nbytes, np.uint8) for n in group[0].parameters}
        for share in group:
            slices, read = plan.slices(share), 0
            for name, source in plan.sources(share, checkpoint).items():
                for row in source.rows:
                    for start, stop in region_of(checkpoint.tensors[row.tensor], row).ranges():
                        base = checkpoint.tensors[row.tensor].start
                        seen[row.tensor][start - base : stop - base] += 1
                        read += stop - start
                shape = list(checkpoint.tensors[name].shape)
                for axis in {one.axis for one in slices.get(name, ())}:
                    shape[axis] //= mesh.size
                assert source.shape == tuple(shape)
                if "attn" in name and "scale" not in name:
                    assert all(one.start % head == 0 for one in slices.get(name, ())), name
            assert read == share.source_nbytes
            assert share.nbytes <= share.budget_nbytes
        for name, times in seen.items():
            assert (times == (1 if name in plan.first_slices else mesh.size)).all(), name
        assert not found & seen.keys()
        found |= seen.keys()
    assert found == checkpoint.tensors.keys()


FAMILIES = ("llama", "fused", "gpt2", "experts", "stacked", "fp8")


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= 30)) for n in range(100)]
)
def test_each_byte_is_on_one_rank_of_a_group(seed: int) -> None:
    chance = random.Random(seed)
    for number in range(10):
        model = Model.random(FAMILIES[number % len(FAMILIES)], chance)
        checkpoint = model.checkpoint()
        mesh = Mesh(chance.choice((1, 1, 2, 3)), chance.choice((1, 2, 2, 4, 4, 3)), model.styles)
        budgets = [chance.randrange(10**6, 10**7) for _ in range(mesh.groups * mesh.size)]
        if mesh.size not in model.sizes():
            with pytest.raises(ValueError, match="cannot split tensors over") as raised:
                made(checkpoint, budgets, mesh)
            does = ", ".join(str(size) for size in sorted(model.sizes()) if size > 1)
            assert (f"sizes that divide: {does}" in str(raised.value)) == bool(does), model
            continue
        plan = made(checkpoint, budgets, mesh)
        if mesh.size > 1:
            whole = re.compile(r"norm|ln_1|c_proj\.bias|moe\.gate")
            cut = {name for name in checkpoint.tensors if not whole.search(name)}
            assert plan.first_slices.keys() == cut
        check_coverage(plan, checkpoint, mesh, model.head)


def test_rules_are_those_of_transformers() -> None:
    """Its plan is read from its source, of the language model in a model of several parts."""
    transformers = needs.module("transformers")
    for model_type, name in {
        "llama": "LlamaConfig",
        "qwen3_moe": "Qwen3MoeConfig",
        "deepseek_v3": "DeepseekV3Config",
        "phi3": "Phi3Config",
    }.items():
        plan = getattr(transformers, name).base_model_tp_plan
        assert plan and styles_of({"model_type": model_type}) == plan
    inside = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert styles_of(inside) == transformers.Gemma3TextConfig.base_model_tp_plan
    assert styles_of({"model_type": "gpt2"}) == styles_of({"model_type": "../x"}) == {}
    assert styles_of({}) == {}


def test_what_transformers_leaves_whole_stays_whole() -> None:
    """Its plan decides if names are its own; else those of the family do."""
    shapes = {f"model.layers.0.self_attn.{x}_proj.weight": (8, 8) for x in "qkvo"}
    shapes |= {"model.layers.0.mlp.up_proj.weight": (16, 8)}
    config = {"model_type": "x", "num_attention_heads": 4}
    checkpoint = checkpoint_of(shapes, config)
    plan = made(checkpoint, [10**6] * 2, Mesh(1, 2, {"layers.*.mlp.up_proj": "colwise"}))
    assert list(plan.first_slices) == ["model.layers.0.mlp.up_proj.weight"]
    plan = made(checkpoint, [10**6] * 2, Mesh(1, 2, {"blocks.*.up": "colwise"}))
    assert plan.first_slices.keys() == shapes.keys()


def test_replicas_and_digest() -> None:
    checkpoint = Model("llama", 8, 4, 4, 32, 16, 2).checkpoint()
    plan = made(checkpoint, [10**6] * 4, Mesh(2, 2))
    (first, names), (second, others) = plan.replicas()
    assert (first, second) == ((0, 1), (2, 3))
    assert names == ["model.layers.0.self_attn.q_norm.weight"]
    assert others == ["model.layers.1.self_attn.q_norm.weight"]
    meshes = (Mesh(2, 2), Mesh(1, 4), Mesh(4, 1), Mesh(2, 2, {"layers.*.mlp.up_proj": "colwise"}))
    assert len({made(checkpoint, [10**6] * 4, mesh).digest for mesh in meshes}) == 4


def test_fused_matrices_are_cut_each() -> None:
    """Queries, keys and values, and gates and inputs: a slice of each, joined."""
    checkpoint = Model("fused", 8, 4, 4, 32, 16, 1).checkpoint()
    plan = made(checkpoint, [10**6] * 2, Mesh(1, 2))
    slices = plan.slices(plan.shares[1])
    at = "model.layers.0."
    assert slices[f"{at}self_attn.qkv_proj.weight"] == ((0, 16, 32), (0, 40, 48), (0, 56, 64))
    assert slices[f"{at}mlp.gate_up_proj.weight"] == ((0, 16, 32), (0, 48, 64))
    assert slices[f"{at}mlp.down_proj.weight"] == ((1, 16, 32),)
