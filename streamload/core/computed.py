"""Recognition, by name, of tensors that models compute, so that checkpoints may lack them."""

from __future__ import annotations

import re

_COMPUTED = re.compile(
    r"(?:.*\.)?(?:(?:original_)?inv_freq|rope\.freqs|freqs_cis|position_ids|num_batches_tracked"
    r"|relative_position_index|(?:attn|attention)\.masked_bias|cache_kv|cache_[kv]|allpos)"
)
_MASK = re.compile(r"(?:.*\.)?(?:mask|causal_mask|attn_mask|attention_mask)")
_MASK_AS_BIAS = re.compile(r"(?:.*\.)?(?:attn|attention)\.bias")  # GPT-2's
_STATISTICS = re.compile(r"(?:.*\.)?running_(?:mean|var)")


def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether models compute a tensor themselves: rotary frequencies, positions, masks, counters.

    Name and shape decide. Either the model or the checkpoint may lack such a tensor.
    """
    if _COMPUTED.fullmatch(name):
        return True
    is_square = len(shape) >= 2 and shape[-1] == shape[-2]
    if is_square and len(shape) == 4 and shape[:2] == (1, 1) and _MASK_AS_BIAS.fullmatch(name):
        return True
    return is_square and _MASK.fullmatch(name) is not None


def is_statistic(name: str) -> bool:
    """Whether a tensor, by its name, is a running mean or variance: learned, but no parameter."""
    return _STATISTICS.fullmatch(name) is not None
