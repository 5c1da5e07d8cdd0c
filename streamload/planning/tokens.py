"""Bytes of weights that a forward pass of one token reads, and the tokens a second that allows.

Memory is read at most once a token at the device's rate: of one sequence, KV cache and arithmetic
not counted, a token takes at least its bytes over that rate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from streamload.checkpoint.open import Checkpoint
from streamload.core.model_config import integer, language_part
from streamload.core.units import format_bytes
from streamload.planning.moves import Kind, Moves
from streamload.planning.plan import Plan
from streamload.planning.sources import tied_names

_EXPERTS = re.compile(r"\bexperts\.")
# A tensor of a module such as "embed_tokens" or "wte", and not of "embed_out" or "embed_proj".
_TABLE = re.compile(
    r"(?i)(?:^|[._])(?:(?:emb|embed|embeds|embeddings?|wte|wpe)"
    r"(?:_(?!out|proj|norm|layernorm|hidden)[^.]*)?|(?<![^.])shared)(?:\.weight\..+|\.[^.]+)$"
)
# Stacks that run once for a prompt: an encoder, or what reads images and sound.
_ENCODER = re.compile(r"(?:^|\.)encoder\.")
_TOWERS = re.compile(r"(?i)vision|visual|image|audio|speech|multi_modal|mm_projector")
_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_OF_TOWERS = ("vision_config", "audio_config", "speech_config")


def token_nbytes(checkpoint: Checkpoint, placements: Moves) -> Mapping[str, int]:
    """Return the bytes of weights that one token reads, by device, as they are held there.

    An embedding counts one row, or all if the head shares its weight. Of experts the share counts
    that a token chooses by config.json, else all. Encoders, and towers for images and sound, do
    not count. Models of diffusers compute no tokens: 0 bytes.
    """
    if "_class_name" in checkpoint.config:
        return {}
    values, _ = language_part(checkpoint.config)
    chosen, count = (integer(values, key) for key in ("num_experts_per_tok", "num_experts"))
    once = _run_once(checkpoint.config)
    shared = _shared_with_head(checkpoint)
    devices = [kind.device for kind, _ in placements.counted]
    out, experts = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    tables: list[tuple[str, int, int]] = []  # of the shared weight: device, bytes, bytes of a row
    has_copy = False
    sizes = {id(kind): (kind.nbytes, kind.device) for kind, _ in placements.counted}
    for name, source, kind, _, _ in placements:
        nbytes, device = sizes[id(kind)]
        if once is not None and once.search(name):
            continue
        if "experts" in name and _EXPERTS.search(name):
            experts[device] += nbytes
            continue
        of_table = "mb" in name or "wte" in name or "wpe" in name or "shared" in name
        tensor = source[0].tensor
        if of_table and _TABLE.search(name) and (rows := _rows(checkpoint, kind, tensor)):
            row_nbytes = -(-nbytes // rows)
            if tensor == shared:
                tables.append((device, nbytes, row_nbytes))
            else:
                out[device] += row_nbytes
        else:
            out[device] += nbytes
            has_copy |= tensor == shared
    for device, nbytes, row_nbytes in tables:
        out[device] += row_nbytes if has_copy else nbytes
    for device, nbytes in experts.items():
        out[device] += nbytes * min(chosen, count) // count if chosen and count else nbytes
    return out


def speed_line(plan: Plan, rates: Mapping[str, float | None]) -> str:
    """Return a line on the bytes that a token reads, and the most tokens a second; "" without.

    ``rates``: GB/s of each device's memory by name, None if it is not known; empty for nodes.
    """
    line = f"a token reads {format_bytes(plan.token_nbytes)} of weights"
    reading = [d for d in plan.devices if d.token_nbytes]
    if not reading or not rates:
        return line if reading else ""
    if unknown := [d.device for d in reading if not rates.get(d.device)]:
        named = "" if unknown[0] == "device" else f" --device {unknown[0]}"
        return f"{line}; streamload bench PATH{named} measures how many a second at most"
    each = [(d.token_nbytes, rates[d.device] or 0.0) for d in reading]
    tokens = 1 / sum(nbytes / 1e9 / rate for nbytes, rate in each)
    most = f"{tokens:,.{0 if tokens >= 100 else 1 if tokens >= 1 else 3}f}"
    shown = dict.fromkeys(f"{rate:,.{1 if rate < 100 else 0}f}" for _, rate in each)
    measured = f"{', '.join(shown)} GB/s measured by streamload bench"
    return f"{line}: at most {most} tokens a second ({measured})"


def _rows(checkpoint: Checkpoint, kind: Kind, tensor: str) -> int:
    """Return the rows of the matrix that a tensor of a table belongs to; 0 if it is no matrix."""
    shape = kind.shape if kind.coding is None else kind.coding.shape
    if kind.stored:
        shape = checkpoint.stored[tensor].shape or ()
    return shape[0] if len(shape) == 2 else 0


def _run_once(config: Mapping[str, object]) -> re.Pattern[str] | None:
    """Return a pattern of names of tensors that only a prompt reads; None if there are none."""
    if any(key in config for key in _OF_TOWERS):
        return _TOWERS
    return _ENCODER if config.get("is_encoder_decoder") is True else None


def _shared_with_head(checkpoint: Checkpoint) -> str:
    """Return the name of the embedding that the head shares; "" if it has a tensor of its own."""
    values, _ = language_part(checkpoint.config)
    has_own = any(name.endswith(".lm_head.weight") for name in checkpoint.tensors)
    if has_own or values.get("tie_word_embeddings") is False:
        return ""
    tied = tied_names(checkpoint, _GENERATING)
    return tied[0][1] if tied else ""
