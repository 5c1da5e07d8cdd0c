"""Stream the chosen experts of transformers' fused experts.

The classes that transformers registers (`use_experts_implementation`) have all experts of a layer
in one tensor for each projection, and an "eager" loop over the chosen experts. This is that loop,
with the same arithmetic in the same order. It asks for all chosen experts at once, the one wait for
the device, and computes with a few while others come. If the configuration names "grouped_mm", each
is a group of that. Small weights show whether a class computes so.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Literal

import torch
from torch import nn

from streamload.offloading.prefetch import Rounds
from streamload.offloading.torch_modules import Wrapped, refuse_training
from streamload.planning.room import experts_chosen

#: In which dtype outputs of experts are added, one expert after the other: of the states, float32,
#: or of the router's weights. "grouped": those of a token at once, as "grouped_mm" adds them.
Sums = Literal["states", "float32", "weights", "grouped"]

_TRIED = 4  # small experts, of which tokens choose three: sums of two round alike in all dtypes


def number_of_experts(module: nn.Module) -> int:
    """How many fused experts a module has; 0 of any other module."""
    count = getattr(module, "num_experts", None)
    own = [each for each in module._parameters.values() if each is not None]
    fused = type(count) is int and bool(own) and all(each.shape[:1] == (count,) for each in own)
    return int(count or 0) if fused and any(each.dim() == 3 for each in own) else 0


def number_chosen(module: nn.Module) -> int:
    """How many experts of a module a token chooses."""
    config = getattr(module, "config", None)
    chosen = experts_chosen(config.to_dict() if config is not None else {})
    return min(chosen, number_of_experts(module))


def sums_of(module: nn.Module) -> Sums | None:
    """How fused experts add their outputs; None if they compute in no known form."""
    eager = getattr(type(module).forward, "__wrapped__", None)
    if eager is None or not hasattr(module, "_apply_gate"):
        return None
    forms: tuple[Sums, ...] = ("states", "float32", "weights")
    try:
        small, trials = _small(module), [*_trials(module)]
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            eager, forms = _grouped_mm(), ("grouped", *forms)
        wanted = [eager(small, *trial) for trial in trials]
        for sums in forms:
            found = [computed(small, sums, *trial, _all_of(small)) for trial in trials]
            if all(map(torch.equal, wanted, found)):
                return sums
    except Exception:  # it needs what the others do not have
        return None
    return None


def _grouped_mm() -> Callable[..., torch.Tensor]:
    """transformers' own implementation "grouped_mm": its models have imported the module."""
    found: Callable[..., torch.Tensor] = sys.modules[
        "transformers.integrations.moe"
    ].grouped_mm_experts_forward
    return found


def _sizes(module: nn.Module) -> Callable[[int], int]:
    """Map sizes of a module's weights to small ones, in proportion."""
    shapes = [each.shape[1:] for each in module._parameters.values() if each is not None]
    divisor = math.gcd(*(n for shape in shapes for n in shape))
    scale = min(divisor, 8)  # grouped_mm wants rows of whole 16 bytes
    return lambda n: n // divisor * scale


def _small(module: nn.Module) -> nn.Module:
    """A module like another, with four small experts on the CPU."""
    random, small = torch.Generator("cpu").manual_seed(0), _sizes(module)
    made = copy.copy(module)
    made.__dict__.update(training=False, num_experts=_TRIED, _parameters={})
    for name, weight in module._parameters.items():
        shape = (_TRIED, *map(small, weight.shape[1:])) if weight is not None else ()
        values = torch.randn(shape, generator=random, device="cpu").to(torch.bfloat16)
        value = nn.Parameter(values, requires_grad=False) if weight is not None else None
        made._parameters[name] = value
    return made


def _trials(module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """States, choices and weights that the small experts are tried on."""
    random, weight = torch.Generator("cpu").manual_seed(1), module._parameters["down_proj"]
    assert weight is not None
    width = _sizes(module)(weight.shape[2 if getattr(module, "is_transposed", False) else 1])
    choices = torch.tensor([[0, 1, 3], [2, 0, 1], [3, 1, 2], [1, 2, 0], [0, 2, 3]], device="cpu")
    for dtype in (torch.bfloat16, torch.float32):
        states = torch.randn((5, width), generator=random, device="cpu").to(torch.bfloat16)
        weights = torch.rand((5, 3), generator=random, device="cpu").to(dtype)
        yield states, choices, weights


_Weights = dict[str, torch.Tensor]  # of one expert, by the names of the module's parameters
_Given = Generator[tuple[int, _Weights], None, None]
_Give = Callable[[Sequence[int]], _Given]


def _all_of(module: nn.Module) -> _Give:
    """Gives the weights of experts of a module that has all of them."""
    own = {name: each for name, each in module._parameters.items() if each is not None}

    def give(chosen: Sequence[int]) -> _Given:
        for expert in chosen:
            yield expert, {name: each[expert] for name, each in own.items()}

    return give


def computed(
    module: Any,
    sums: Sums,
    states: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    give: _Give,
) -> torch.Tensor:
    """Compute as transformers' eager implementation does, or its "grouped_mm".

    ``states`` are (tokens, width), ``choices`` the experts of each token, (tokens, chosen), of
    which unknown ones are left out, ``weights`` theirs; ``give`` yields experts in order.
    """
    if sums == "grouped":
        return _computed_grouped(module, states, choices, weights, give)
    tokens = len(states)
    flat = choices.T.reshape(-1)  # as the eager loop finds them: by choice, then by token
    order = torch.argsort(flat, stable=True)
    places, numbers = order // tokens, order % tokens
    mine = _parts(flat, module.num_experts)
    dtypes = {"states": states.dtype, "float32": torch.float32, "weights": weights.dtype}
    out = torch.zeros_like(states, dtype=dtypes[sums])
    with closing(give([*mine])) as experts:  # an error lets go of them too
        for expert, own in experts:
            some = mine[expert]
            _add(module, out, states, weights, own, numbers[some], places[some])
    return out.to(states.dtype)


def _parts(flat: torch.Tensor, count: int) -> dict[int, slice]:
    """The places of each known expert among choices, when these are sorted."""
    asked, counts = torch.unique(flat.cpu(), return_counts=True)  # the one wait for the device
    ends = counts.cumsum(0)
    rows = zip(asked.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return {expert: slice(first, end) for expert, first, end in rows if expert < count}


def _computed_grouped(
    module: Any,
    states: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    give: _Give,
) -> torch.Tensor:
    """Compute by "grouped_mm": a group for each expert, and sums over a token's."""
    grouped, flat = _grouped_mm(), choices.reshape(-1)
    _, order = torch.sort(flat)  # as it sorts them
    numbers, mine = order // choices.shape[-1], _parts(flat, module.num_experts)
    out = states.new_zeros(len(flat), states.shape[-1])
    one = copy.copy(module)
    one.__dict__.update(num_experts=1, _parameters={})
    with closing(give([*mine])) as experts:
        for expert, own in experts:
            one._parameters.update({name: each[None] for name, each in own.items()})
            rows = states[numbers[mine[expert]]]
            alone = torch.zeros(len(rows), 1, dtype=torch.int64, device=states.device)
            found = grouped(one, rows, alone, torch.ones_like(alone, dtype=states.dtype))
            out[order[mine[expert]]] = found
    weighted = out * weights.reshape(-1, 1)
    return weighted.view(*choices.shape, -1).sum(dim=1).to(states.dtype)


def _add(
    module: Any,
    out: torch.Tensor,
    states: torch.Tensor,
    weights: torch.Tensor,
    own: _Weights,
    token: torch.Tensor,
    place: torch.Tensor,
) -> None:
    """Add one expert's output for some tokens; ``place``: of its weight among theirs."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    found = _project(module, states[token], own, up)
    found = module._apply_gate(found) if module.has_gate else module.act_fn(found)
    found = _project(module, found, own, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # newer transformers
        found = module.post_expert_norm(found)
    found = found * weights[token, place, None]
    out.index_add_(0, token, found.to(out.dtype))


def _project(module: Any, states: torch.Tensor, own: _Weights, name: str) -> torch.Tensor:
    weight = own[name]
    out = states @ weight if module.is_transposed else nn.functional.linear(states, weight)
    return out + own[f"{name}_bias"] if module.has_bias else out


class StreamedExperts(Wrapped):
    """Brings the experts that the router chose while their module computes."""

    def __init__(
        self,
        module: nn.Module,
        layer: int,
        sums: Sums,
        places: Sequence[dict[str, int]],
        rounds: Rounds,
    ) -> None:
        """Change nothing yet; ``places``: for each expert, buffers by the module's names."""
        super().__init__(module)
        self._layer, self._sums, self._places, self._rounds = layer, sums, places, rounds

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute with the experts that tokens choose."""
        refuse_training(self._module)
        with torch.no_grad():
            return computed(
                *(self._module, self._sums, hidden_states, top_k_index, top_k_weights, self._give)
            )

    def _give(self, chosen: Sequence[int]) -> _Given:
        """Experts one after the other, a few of them in use while others come."""
        together = self._rounds.experts.together
        self._rounds.ask(self._layer, chosen)
        try:
            for first in range(0, len(chosen), together):
                some = chosen[first : first + together]
                try:  # from here on: some of them may be there where it raises
                    buffers = self._rounds.acquire_experts(self._layer, some)
                    for expert, own in zip(some, buffers, strict=True):
                        yield expert, {name: own[at] for name, at in self._places[expert].items()}
                finally:
                    self._rounds.release_experts(self._layer, some)
        finally:
            self._rounds.end_asking()
