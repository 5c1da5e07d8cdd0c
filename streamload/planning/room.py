"""Memory of a language model's forward pass besides weights and cache, from its ``config.json``.

For T tokens at once, with the hidden size H, the intermediate size I, n heads (n_kv of keys and
values) of d elements, a vocabulary V, and a dtype of b bytes, these are in memory together at
most, besides two states of T x H x b between the layers:

    normalisation     2 x T x H x 4          (transformers' norms compute in float32)
    attention         T x (4 x n + 4 x n_kv) x d x b, and the mask of T x T x b
    feed-forward      3 x T x I x b          (of each expert that a token chooses)
    head              T x V x b

The largest of attention with its normalisation, feed-forward and head counts. All of them count if
the C library allocates, which keeps freed memory for allocations of its size. Attention that holds
its scores ("eager") takes n x T x T x 4 more, which is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamload.core.model_config import integer, language_part
from streamload.errors import CheckpointError

#: Host bytes of matrix products on the CPU for packed weights, and of threads for stacks: 8 MiB.
HOST_WORKSPACE_NBYTES = 2**23
#: Bytes that cuBLAS takes from torch's allocator for products on Hopper: 32 MiB.
CUDA_WORKSPACE_NBYTES = 2**25

_USUALLY_CHOSEN = 8


def experts_chosen(config: Mapping[str, Any]) -> int:
    """Return the number of experts that a token chooses; 8 if ``config.json`` does not state it."""
    return integer(language_part(config)[0], "num_experts_per_tok") or _USUALLY_CHOSEN


def activation_nbytes(
    config: Mapping[str, Any],
    tokens: int,
    itemsize: int,
    *,
    path: object,
    reused: bool = True,
    has_head: bool = True,
) -> int:
    """Return the most bytes of activations in a forward pass; see the module for the formula.

    ``config`` is config.json's, ``tokens`` those of all sequences, ``itemsize`` the bytes of an
    element that the model computes in. ``reused``: the allocator gives the freed memory of one part
    to the next; ``has_head``: logits are computed.
    """
    keys = ("hidden_size", "vocab_size", "num_attention_heads")
    values, _ = language_part(config)
    found = [integer(values, key) for key in keys]
    hidden, vocabulary, heads = found
    if not hidden or not vocabulary or not heads:
        raise CheckpointError(
            str(path),
            "cannot size the activations of a forward pass",
            expected="hidden_size, vocab_size and num_attention_heads in config.json, or the bytes "
            "as reserve=",
            found="some of them" if any(found) else "none of them",
        )
    head_dim = integer(values, "head_dim") or hidden // heads
    kv_heads = integer(values, "num_key_value_heads") or heads
    inner = integer(values, "intermediate_size") or 4 * hidden
    if chosen := integer(values, "num_experts_per_tok"):
        inner = max(inner, (integer(values, "moe_intermediate_size") or inner) * chosen)
    norm = 2 * tokens * hidden * 4
    attention = tokens * (4 * heads + 4 * kv_heads) * head_dim * itemsize
    attention += tokens * tokens * itemsize
    feed_forward = 3 * tokens * inner * itemsize
    head = tokens * vocabulary * itemsize * has_head
    states = 2 * tokens * hidden * itemsize
    if not reused:
        return int(states + norm + attention + feed_forward + head)
    return int(states + max(norm + attention, norm + feed_forward, head))
