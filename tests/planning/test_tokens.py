"""The bytes of weights that a token reads, and the tokens a second that a memory allows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import checkpoint_of, device_spec, plan_of
from safetensors_files import write_safetensors

import streamload
from streamload.planning.plan import Plan
from streamload.planning.planner import speed_line

Tensors = Mapping[str, tuple[str, Sequence[int]]]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
TABLE = {EMBED: ("BF16", [100, 8])}
LAYER = {f"model.layers.{n}.mlp.up_proj.weight": ("BF16", [16, 8]) for n in range(2)}
LAYER_NBYTES = 2 * 16 * 8 * 2
ROW_NBYTES, TABLE_NBYTES = 16, 1600


def planned(tensors: Tensors, config: Mapping[str, Any] | None = None, **more: Any) -> Plan:
    return plan_of(checkpoint_of(tensors, config=config), device_spec("cpu", 10**6), **more)


def experts(names: str, *shape: int) -> Tensors:
    """A layer with this tensor for each of four experts, or with one for all of them."""
    found = [names.format(n) for n in range(4)] if "{" in names else [names]
    return {f"model.layers.0.mlp.{name}": ("BF16", shape) for name in found}


@pytest.mark.parametrize(
    ("tensors", "config", "nbytes"),
    [
        (TABLE | LAYER | {HEAD: ("BF16", [100, 8])}, LLAMA, ROW_NBYTES + TABLE_NBYTES),
        (TABLE | LAYER, LLAMA, TABLE_NBYTES),
        (TABLE | LAYER, LLAMA | {"tie_word_embeddings": False}, ROW_NBYTES),
        (TABLE | LAYER, {}, ROW_NBYTES),
        (TABLE | LAYER, {"architectures": ["AForConditionalGeneration"]}, TABLE_NBYTES),
        (
            TABLE | LAYER,
            {
                "architectures": ["AForConditionalGeneration"],
                "text_config": {"tie_word_embeddings": False},
            },
            ROW_NBYTES,
        ),
        (
            {"wte.weight": ("BF16", [100, 8]), "wpe.weight": ("BF16", [50, 8])} | LAYER,
            {"architectures": ["GPT2LMHeadModel"]},
            TABLE_NBYTES + ROW_NBYTES,
        ),
        ({"embed_out.weight": ("BF16", [100, 8])} | LAYER, {}, TABLE_NBYTES),
        ({"model.embed_proj.weight": ("BF16", [100, 8])} | LAYER, {}, TABLE_NBYTES),
        ({"shared.weight": ("BF16", [100, 8])} | LAYER, {}, ROW_NBYTES),
    ],
    ids=[
        *("untied", "tied", "base", "no config", "parts, tied", "parts, untied"),
        *("positions", "a head named embed", "a projection", "shared"),
    ],
)
def test_a_table_counts_a_row_unless_the_head_reads_it(
    tensors: Tensors, config: Mapping[str, Any], nbytes: int
) -> None:
    assert planned(tensors, config).token_nbytes == LAYER_NBYTES + nbytes


@pytest.mark.parametrize(
    "stored",
    [experts("experts.{}.w1.weight", 16, 8), experts("experts.gate_up_proj", 4, 16, 8)],
    ids=["by number", "fused"],
)
@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"num_experts_per_tok": 1, "num_local_experts": 4}, 0.25),
        ({"text_config": {"num_experts_per_tok": 2, "n_routed_experts": 4}}, 0.5),
        ({"num_experts_per_tok": 8, "num_experts": 4}, 1),
        ({"num_experts": 4}, 1),
        ({}, 1),
    ],
    ids=["1 of 4", "2 of 4", "more than all", "not stated", "no config"],
)
def test_experts_count_by_the_share_that_a_token_chooses(
    stored: Tensors, config: Mapping[str, Any], share: float
) -> None:
    tensors = {**stored, "model.layers.0.mlp.shared_experts.up_proj.weight": ("BF16", [16, 8])}
    assert planned(tensors, config).token_nbytes == 4 * 256 * share + 256


@pytest.mark.parametrize(
    ("config", "name", "is_read"),
    [
        ({"vision_config": {}}, "vision_tower.layers.0.mlp.weight", False),
        ({}, "vision_tower.layers.0.mlp.weight", True),
        ({"is_encoder_decoder": True}, "encoder.block.0.mlp.weight", False),
        ({"is_encoder_decoder": True}, "decoder.block.0.mlp.weight", True),
        ({}, "encoder.layer.0.mlp.weight", True),
        ({"_class_name": "UNet"}, "down_blocks.0.weight", False),
    ],
)
def test_what_reads_a_prompt_alone_does_not_count(
    config: Mapping[str, Any], name: str, is_read: bool
) -> None:
    """Towers and encoders run once; models of diffusers compute no tokens."""
    made = planned({name: ("BF16", [16, 8])}, config)
    assert made.token_nbytes == 256 * is_read
    assert ("per token" in str(made)) == (speed_line(made, {"cpu": 1.0}) != "") == is_read


def test_quantised_weights_count_as_they_are_held(tmp_path: Path) -> None:
    data = bytes(64 * 64 * 2)
    names = (EMBED, "model.layers.0.a.weight", "model.layers.1.a.weight")
    path = write_safetensors(
        tmp_path / "m.safetensors", {n: ("F16", (64, 64), data) for n in names}
    )
    asked: dict[str, Any] = {"budget": "1MB", "device": "host"}
    plain = streamload.plan(path, **asked)
    assert plain.token_nbytes == 2 * len(data) + 128
    coded = streamload.plan(path, quant="q8_0", **asked)
    held = 64 * 2 * 34  # rows of two blocks
    assert coded.token_nbytes == 2 * held + 128
    every = streamload.plan(path, quant={"*.weight": "int8"}, **asked)
    assert every.token_nbytes == 2 * (64 * 64 + 64 * 4) + 64 + 4
    (device,) = every.devices
    assert device.token_nbytes == every.token_nbytes < every.resident_nbytes


def test_a_split_counts_each_device() -> None:
    """The embedding's device reads a row, and the head's its copy."""
    specs = [device_spec(name, 10**4) for name in "ab"]
    checkpoint = checkpoint_of(TABLE | LAYER, config=LLAMA)
    made = plan_of(checkpoint, *specs, tied={HEAD: EMBED})
    a, b = made.devices
    assert {p.name: p.device for p in made.placements}[HEAD] == "b"
    assert a.token_nbytes + b.token_nbytes == LAYER_NBYTES + TABLE_NBYTES + ROW_NBYTES
    assert a.token_nbytes < TABLE_NBYTES <= b.token_nbytes


def test_json_has_the_bytes_and_no_rate() -> None:
    """Per device and in all; JSON of earlier versions is read, without them."""
    made = planned(TABLE | LAYER, LLAMA)
    data = json.loads(made.to_json())
    nbytes = LAYER_NBYTES + TABLE_NBYTES
    assert (data["token_nbytes"], data["devices"][0]["token_nbytes"]) == (nbytes, nbytes)
    assert "rate" not in data
    assert Plan.from_json(made.to_json()) == made
    del data["token_nbytes"], data["devices"][0]["token_nbytes"]
    earlier = Plan.from_json(json.dumps(data))
    (device,) = made.devices
    assert earlier == replace(made, devices=(replace(device, token_nbytes=0),))
    assert "per token" not in str(earlier)
    assert speed_line(earlier, {"cpu": 1.0}) == ""


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ({"cpu": 10.0}, ": at most 4,730,369 tokens a second (10.0 GB/s measured by streamload"),
        ({"cpu": 4e-6}, ": at most 1.9 tokens a second ("),
        ({"cpu": 1e-7}, ": at most 0.047 tokens a second ("),
        ({"cpu": 3350.4}, "(3,350 GB/s measured by streamload bench)"),
        ({"cpu": None}, "; streamload bench PATH --device cpu measures"),
        ({}, "a token reads 2.11 kB of weights"),
    ],
)
def test_the_line_on_speed(rates: Mapping[str, float | None], text: str) -> None:
    """It has the most tokens a second by a rate, else the command that measures one."""
    made = planned(TABLE | LAYER | {"model.norm.weight": ("BF16", [1])}, LLAMA)
    line = speed_line(made, rates)
    assert line.startswith("a token reads 2.11 kB of weights")
    assert text in line


def test_devices_take_their_turns() -> None:
    """A token passes one device after the other, each at its own rate."""
    specs = [device_spec(name, 10**4) for name in "ab"]
    made = plan_of(checkpoint_of(LAYER), *specs)
    assert [d.token_nbytes for d in made.devices] == [256, 256]
    line = speed_line(made, {"a": 256e-9, "b": 256e-9 / 3})
    assert "at most 0.250 tokens" in line
    assert "bench PATH --device b " in speed_line(made, {"a": 1.0, "b": None})
