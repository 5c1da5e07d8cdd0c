"""Detect passes of more tokens than the plan of an offload has room for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from streamload.errors import OffloadError
from streamload.loading.options import OnOverrun

# Arguments of models with a shape (sequences, tokens), or with one axis more.
_IDS, _STATES = ("input_ids", "decoder_input_ids"), ("inputs_embeds", "decoder_inputs_embeds")

# The KV cache: transformers 5.24 renamed it.
_CACHES = ("past_key_values", "cache")
# The output of an encoder, for the decoder.
_ENCODED = "encoder_outputs"


@dataclass(slots=True)
class TokenRoom:
    """The tokens that a plan leaves room for, and the most that passes had.

    Attributes:
        tokens: planned most tokens of one pass, all sequences together; None: no room is planned.
        cached: planned most tokens of the KV cache, likewise; 0: no room is planned.
        most_tokens: the most tokens that a pass had.
        most_cached: the most tokens that the cache had at the end of a pass.
    """

    tokens: int | None = None
    cached: int = 0
    on_overrun: OnOverrun = "warn"
    most_tokens: int = 0
    most_cached: int = 0

    def __bool__(self) -> bool:
        """Whether any room is planned, so that passes are counted."""
        return self.tokens is not None or self.cached > 0

    @property
    def overrun(self) -> str:
        """In words, the most tokens that exceeded the plan's room; "" for none."""
        return self._over(self.most_tokens, self.most_cached)

    def see(self, tokens: int, cached: int) -> None:
        """Check a pass that begins, of ``tokens``, with ``cached`` in the KV cache at its end."""
        over = self._over(tokens, cached)
        first = over and not self.overrun
        if over and self.on_overrun == "error":
            raise OffloadError(f"{over}: {self._instead(tokens, cached)}")
        self.most_tokens = max(self.most_tokens, tokens)
        self.most_cached = max(self.most_cached, cached)
        if first:
            said = f"{over}: it takes memory beyond the budget; {self._instead(tokens, cached)}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)

    def _over(self, tokens: int, cached: int) -> str:
        if self.tokens is not None and tokens > self.tokens:
            return f"a pass of {tokens} tokens, and the plan has room for {self.tokens}"
        if self.cached and cached > self.cached:
            return f"a KV cache of {cached} tokens, and the plan has room for {self.cached}"
        return ""

    def _instead(self, tokens: int, cached: int) -> str:
        if self.tokens is not None and self.cached == self.tokens:
            most = max(tokens, cached)
            return f"offload the model with tokens={most} or more: all of prompts and answers"
        if self.tokens is not None and tokens > self.tokens:
            return f"offload the model with tokens={tokens} or more"
        return "offload the model with a larger context= (or batch=)"


def tokens_of(arguments: Mapping[str, Any], is_ids: Callable[[Any], bool]) -> tuple[int, int]:
    """Return how many tokens a pass computes, and how many the KV cache has then, in all sequences.

    Counts ids of tokens (integers, by ``is_ids``) and states of shape (sequences, tokens, width)
    among the model's ``arguments``; both counts are 0 if there are none.
    """
    shapes = []
    for name, value in arguments.items():
        given = _first(value) if name == _ENCODED else value
        if name in (*_IDS, *_STATES, _ENCODED) and hasattr(given, "shape"):
            shapes.append((name, tuple(given.shape if name in _IDS else given.shape[:-1])))
    if not shapes:
        first = next((each for each in arguments.values() if hasattr(each, "shape")), None)
        if first is None or not (is_ids(first) or len(first.shape) == 3):
            return 0, 0
        shapes.append(("", tuple(first.shape if is_ids(first) else first.shape[:-1])))
    counts = [math.prod(map(int, shape)) for _, shape in shapes]
    decoded = [shape for name, shape in shapes if name.startswith("decoder")]
    shape = (decoded or [shape for _, shape in shapes])[-1]
    past = next((arguments[name] for name in _CACHES if arguments.get(name) is not None), None)
    if past is None and arguments.get("use_cache") is False:
        return max(counts), 0
    sequences = math.prod(map(int, shape[:-1]))
    length = max(int(shape[-1]) + _length(past), _allocated(past))
    return max(counts), sequences * length


def _first(outputs: Any) -> Any:
    """Return the first item of a model's output; None if it has no items."""
    with suppress(TypeError, IndexError, KeyError):
        return outputs[0]
    return None


def _allocated(past: Any) -> int:
    """Return the tokens of each sequence that a KV cache of fixed size holds; 0 if it grows."""
    layers = getattr(past, "layers", ())
    return max((int(getattr(each, "max_cache_len", 0) or 0) for each in layers), default=0)


def _length(past: Any) -> int:
    """Return how many tokens of each sequence are in a KV cache of transformers."""
    if hasattr(past, "get_seq_length"):
        return int(past.get_seq_length())
    with suppress(TypeError, IndexError, AttributeError, KeyError):
        return int(past[0][0].shape[-2])  # of older models: pairs of keys and values
    return 0
