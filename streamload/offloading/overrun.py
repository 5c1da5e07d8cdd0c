"""Passes of more tokens than a plan has room for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from streamload.errors import OffloadError

#: What a pass does that takes more tokens than there is room for: warn once, or raise.
OnOverrun = Literal["warn", "error"]

# Arguments of models that are numbers of tokens, or states of these with one axis more.
_IDS, _STATES = ("input_ids", "decoder_input_ids"), ("inputs_embeds", "decoder_inputs_embeds")

# The output of an encoder, for the decoder.
_ENCODED = "encoder_outputs"


def check_on_overrun(value: object) -> OnOverrun:
    """Read the option; raises ValueError for one that is invalid."""
    if value not in get_args(OnOverrun):
        raise ValueError(f"on_overrun is one of {', '.join(get_args(OnOverrun))}, not {value!r}")
    return value  # type: ignore[return-value]


@dataclass(slots=True)
class TokenRoom:
    """The tokens that a plan leaves room for, and those that passes had.

    Attributes:
        tokens: of a pass, of all sequences together; None: unknown.
        cached: tokens of the KV cache, of all sequences together; 0: nothing is left for one.
        on_overrun: what a pass of more does.
        most_tokens: the most tokens that a pass had.
        most_cached: the most tokens that the cache had at the end of a pass.
    """

    tokens: int | None = None
    cached: int = 0
    on_overrun: OnOverrun = "warn"
    most_tokens: int = 0
    most_cached: int = 0

    def __bool__(self) -> bool:
        """Whether the room is known."""
        return self.tokens is not None or self.cached > 0

    @property
    def overrun(self) -> str:
        """The tokens beyond the plan's room, in words; "" for none."""
        return self._over(self.most_tokens, self.most_cached)

    def see(self, tokens: int, cached: int) -> None:
        """A pass begins, of so many tokens, and at its end so many in the KV cache.

        Raises:
            OffloadError: there is no room for them, under ``on_overrun="error"``.
        """
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
    """How many tokens a pass computes, and how many the KV cache has then, of all sequences.

    Counts ids of tokens (integers, by ``is_ids``) and states of shape (sequences, tokens, width).
    """
    shapes = []
    for name, value in arguments.items():
        if name in _IDS and hasattr(value, "shape"):
            shapes.append((name, tuple(value.shape)))
        elif name in _STATES and hasattr(value, "shape"):
            shapes.append((name, tuple(value.shape[:-1])))
        elif name == _ENCODED and (states := _first(value)) is not None:
            shapes.append((name, tuple(states.shape[:-1])))
    if not shapes:
        first = next((each for each in arguments.values() if hasattr(each, "shape")), None)
        if first is None or not (is_ids(first) or len(first.shape) == 3):
            return 0, 0
        shapes.append(("", tuple(first.shape) if is_ids(first) else tuple(first.shape[:-1])))
    counts = [math.prod(map(int, shape)) for _, shape in shapes]
    decoded = [shape for name, shape in shapes if name.startswith("decoder")]
    shape = (decoded or [shape for _, shape in shapes])[-1]
    past = arguments.get("past_key_values")
    if past is None and arguments.get("use_cache") is False:
        return max(counts), 0
    sequences = math.prod(map(int, shape[:-1]))
    length = max(int(shape[-1]) + _length(past), _allocated(past))
    return max(counts), sequences * length


def _first(outputs: Any) -> Any:
    """The first tensor of a model's output, if it has one."""
    with suppress(TypeError, IndexError, KeyError):
        return outputs[0] if hasattr(outputs[0], "shape") else None
    return None


def _allocated(past: Any) -> int:
    """How many tokens of each sequence a KV cache of a fixed size has memory for; 0: it grows."""
    layers = getattr(past, "layers", ())
    return max((int(getattr(each, "max_cache_len", 0) or 0) for each in layers), default=0)


def _length(past: Any) -> int:
    """How many tokens of each sequence a KV cache of transformers has."""
    if hasattr(past, "get_seq_length"):
        return int(past.get_seq_length())
    with suppress(TypeError, IndexError, AttributeError, KeyError):
        return int(past[0][0].shape[-2])  # of older models: pairs of keys and values
    return 0
