"""Stream the experts that a router chose, of transformers' fused experts.

The classes that transformers registers (`use_experts_implementation`) have all experts of a layer
in one tensor for each projection, and an "eager" loop over the chosen experts. `computed` is that
loop, with equal arithmetic in equal order. It requests all chosen experts at once, after the one
wait for the device, and computes with a few while others are read. If the configuration names
"grouped_mm", each expert is a group of a grouped matrix product. A trial with small weights shows
whether a class computes in this form.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from streamload.offloading.prefetch import Rounds
from streamload.offloading.torch_modules import TorchSlots, Wrapped, refuse_training
from streamload.planning.kv_cache import experts_chosen

#: The dtype in which outputs of experts are added, one expert after the other: that of the states,
#: float32, or that of the router's weights. "grouped": all of a token at once, as by "grouped_mm".
Sums = Literal["states", "float32", "weights", "grouped"]

_GROUPS = 1023  # the most of a kernel of torch's grouped_mm
_FEW_ROWS = 128  # of a group, for which that has another kernel than for more
_TRIED = 4  # small experts, of which tokens choose three: sums of two round alike in all dtypes


class Routed(NamedTuple):
    """The input of a module of experts: states, each token's chosen experts, their weights."""

    states: torch.Tensor  # (tokens, width)
    choices: torch.Tensor  # (tokens, chosen): experts of each token; unknown numbers are left out
    weights: torch.Tensor  # (tokens, chosen): of each choice


def number_of_experts(module: nn.Module) -> int:
    """Return the number of experts of a module whose weights have an axis of experts; else 0."""
    count = getattr(module, "num_experts", None)
    own = [*module.parameters(recurse=False)]
    fused = type(count) is int and bool(own) and all(each.shape[:1] == (count,) for each in own)
    return int(count or 0) if fused and any(each.dim() == 3 for each in own) else 0


def number_chosen(module: nn.Module) -> int:
    """Return how many experts of a module each token chooses, by the module's config."""
    config = getattr(module, "config", None)
    chosen = experts_chosen(config.to_dict() if config is not None else {})
    return min(chosen, number_of_experts(module))


def sums_of(module: nn.Module) -> Sums | None:
    """Find by trials the `Sums` with which `computed` equals the module; None if there is none."""
    eager = getattr(type(module).forward, "__wrapped__", None)
    if eager is None or not hasattr(module, "_apply_gate"):
        return None
    forms: tuple[Sums, ...] = ("states", "float32", "weights")
    try:
        small, trials = _small(module), [*_trials(module)]
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            eager, forms = _moe().grouped_mm_experts_forward, ("grouped", *forms)
        wanted = [eager(small, *trial) for trial in trials]
        for sums in forms:
            found = [computed(small, sums, trial, _all_of(small)) for trial in trials]
            if all(map(torch.equal, wanted, found)):
                return sums
    except Exception:  # it needs an attribute that others lack
        return None
    return None


def _moe() -> Any:
    return sys.modules["transformers.integrations.moe"]


def _sizes(module: nn.Module) -> Callable[[int], int]:
    divisor = math.gcd(*(n for each in module.parameters(recurse=False) for n in each.shape[1:]))
    scale = min(divisor, 8)  # grouped_mm wants rows of whole 16 bytes
    return lambda n: n // divisor * scale


def _small(module: nn.Module) -> nn.Module:
    """Return a copy of a module of experts with four small experts of random weights on the CPU."""
    random, small = torch.Generator("cpu").manual_seed(0), _sizes(module)
    made = copy.copy(module)
    own: dict[str, Any] = dict.fromkeys(module._parameters)
    made.__dict__.update(training=False, num_experts=_TRIED, _parameters=own)
    for name, weight in module.named_parameters(recurse=False):
        shape = _TRIED, *map(small, weight.shape[1:])
        values = torch.randn(shape, generator=random, device="cpu").to(torch.bfloat16)
        own[name] = nn.Parameter(values, requires_grad=False)
    return made


def _trials(module: nn.Module) -> Iterator[Routed]:
    """Yield inputs for `_small` experts, whose outputs differ with the dtype of sums."""
    random, weight = torch.Generator("cpu").manual_seed(1), module._parameters["down_proj"]
    assert weight is not None
    width = _sizes(module)(weight.shape[2 if getattr(module, "is_transposed", False) else 1])
    choices = torch.tensor([[0, 1, 3], [2, 0, 1], [3, 1, 2], [1, 2, 0], [0, 2, 3]], device="cpu")
    for dtype in (torch.bfloat16, torch.float32):
        states = torch.randn((5, width), generator=random, device="cpu").to(torch.bfloat16)
        weights = torch.rand((5, 3), generator=random, device="cpu").to(dtype)
        yield Routed(states, choices, weights)


_Weights = Mapping[str, torch.Tensor]  # of one expert, by the names of the module's parameters


class Given(NamedTuple):
    """Experts to compute with now."""

    experts: Sequence[int]
    places: Sequence[int]  # of each expert, its index along the first axis of all weights
    weights: Mapping[str, torch.Tensor]  # by the names of the module's parameters


_Give = Callable[[Sequence[int]], Generator[Given, None, None]]  # from numbers of experts


def _all_of(module: nn.Module) -> _Give:
    own = dict(module.named_parameters(recurse=False))

    def give(chosen: Sequence[int]) -> Generator[Given, None, None]:
        yield Given(chosen, chosen, own)

    return give


def computed(module: Any, sums: Sums, routed: Routed, give: _Give) -> torch.Tensor:
    """Return the output of experts, (tokens, width), as transformers' eager implementation does.

    If ``sums`` is "grouped", as "grouped_mm" does. ``give`` takes numbers of experts, and yields
    each number with the expert's weights.
    """
    if sums == "grouped":
        return _computed_grouped(module, routed, give)
    states, choices, weights = routed
    tokens = len(states)
    flat = choices.T.reshape(-1)  # in the order of the eager loop: by choice, then by token
    order = torch.argsort(flat, stable=True)
    places, numbers = order // tokens, order % tokens
    mine = _parts(flat.cpu().numpy(), module.num_experts)  # the one wait for the device
    dtypes = {"states": states.dtype, "float32": torch.float32, "weights": weights.dtype}
    out = torch.zeros_like(states, dtype=dtypes[sums])
    with closing(give([*mine])) as some:  # closed after an error, too
        for expert, own in chain.from_iterable(map(_one_by_one, some)):
            token, place = numbers[mine[expert]], places[mine[expert]]
            project = partial(_project, module, own)
            found = _output(module, states[token], project) * weights[token, place, None]
            out.index_add_(0, token, found.to(out.dtype))
    return out.to(states.dtype)


def _one_by_one(given: Given) -> Iterator[tuple[int, _Weights]]:
    for expert, place in zip(given.experts, given.places, strict=True):
        yield expert, {name: each[place] for name, each in given.weights.items()}


def _parts(flat: np.ndarray[Any, Any], count: int) -> dict[int, slice]:
    """Return by chosen expert the slice of its choices, once ``flat`` is sorted.

    ``flat``: the experts that all tokens chose; experts from ``count`` on are left out.
    """
    counts = np.bincount(flat, minlength=count)[:count]
    ends, asked = counts.cumsum(), counts.nonzero()[0]
    rows = zip(asked.tolist(), ends[asked].tolist(), counts[asked].tolist(), strict=True)
    return {expert: slice(end - number, end) for expert, end, number in rows}


def _computed_grouped(module: Any, routed: Routed, give: _Give) -> torch.Tensor:
    """Return the output (tokens, width) of experts by "grouped_mm", one group per expert.

    A token gets the sum of its experts' outputs by the router's weights; ``give``: see `computed`.
    The host sorts the choices, which it needs anyway, and sends all indices by one copy.
    """
    states, choices, weights = routed
    flat = choices.reshape(-1).cpu().numpy()  # the one wait for the device
    order = np.argsort(flat, kind="stable")
    mine = _parts(flat, module.num_experts)
    out = states.new_zeros(len(flat), states.shape[-1])
    with closing(give([*mine])) as some:
        for experts, places, own in some:
            parts = [(place, order[mine[e]]) for place, e in zip(places, experts, strict=True)]
            parts.sort(key=lambda part: part[0])
            sizes = [len(part) for _, part in parts]
            rows = np.concatenate([part for _, part in parts])
            which = np.repeat([place for place, _ in parts], sizes)
            indices = np.concatenate([rows, rows // choices.shape[-1], which])
            ends = np.bincount(which, minlength=len(next(iter(own.values())))).cumsum()
            sent = np.concatenate([indices.view(np.int32), ends.astype(np.int32)])
            there = torch.from_numpy(sent).to(states.device, non_blocking=True)
            row, token, place = there[: 2 * len(indices)].view(torch.int64).view(3, -1)
            project = partial(_project_groups, module, own, place, there[2 * len(indices) :])
            out.index_copy_(0, row, _output(module, states.index_select(0, token), project))
    weighted = out * weights.reshape(-1, 1)
    return weighted.view(*choices.shape, -1).sum(dim=1).to(states.dtype)


_Project = Callable[[torch.Tensor, str], torch.Tensor]  # from inputs and a weight's name


def _output(module: Any, states: torch.Tensor, project: _Project) -> torch.Tensor:
    found = project(states, "gate_up_proj" if module.has_gate else "up_proj")
    found = module._apply_gate(found) if module.has_gate else module.act_fn(found)
    found = project(found, "down_proj")
    if getattr(module, "has_post_expert_norm", False):  # newer transformers
        found = module.post_expert_norm(found)
    return found


def _project(module: Any, own: _Weights, states: torch.Tensor, name: str) -> torch.Tensor:
    weight = own[name]
    out = states @ weight if module.is_transposed else nn.functional.linear(states, weight)
    return out + own[f"{name}_bias"] if module.has_bias else out


def _project_groups(
    module: Any,
    own: _Weights,
    places: torch.Tensor,
    ends: torch.Tensor,
    states: torch.Tensor,
    name: str,
) -> torch.Tensor:
    """Project the states of each expert's tokens, which end at ``ends``; ``places``: of each."""
    bias = own[f"{name}_bias"][places] if module.has_bias else None
    found: torch.Tensor = _moe()._grouped_linear(
        states, own[name], ends, bias=bias, is_transposed=module.is_transposed
    )
    return found


class StreamedExperts(Wrapped):
    """A substitute for the ``forward`` of fused experts that fetches only the chosen ones."""

    def __init__(
        self,
        module: nn.Module,
        layer: int,
        sums: Sums,
        places: Sequence[dict[str, int]],
        rounds: Rounds,
    ) -> None:
        """Change nothing yet; ``places``: for each expert, indices of buffers by weight's name."""
        super().__init__(module)
        self._layer, self._sums, self._places, self._rounds = layer, sums, places, rounds

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of experts ``top_k_index``, summed by ``top_k_weights`` per token."""
        refuse_training(self._module)
        module, routed = self._module, Routed(hidden_states, top_k_index, top_k_weights)
        most = 1
        if self._sums == "grouped" and top_k_index.numel() <= _FEW_ROWS * module.num_experts:
            most = _most_groups(module)
        give = partial(self._give, most)
        with torch.no_grad():
            return self._rounds.call(lambda: computed(module, self._sums, routed, give))

    def _give(self, most: int, chosen: Sequence[int]) -> Generator[Given, None, None]:
        """Yield experts with their weights in slots, a few of them acquired while others come.

        Up to ``most`` slots are in the weights that are yielded.
        """
        together = self._rounds.experts.together
        before = self._rounds.ask(self._layer, chosen)
        try:
            for first in range(0, len(chosen), together):
                some = chosen[first : first + together]
                try:  # before acquiring: after an error some may be acquired
                    held = self._rounds.acquire_experts(self._layer, some)
                    yield from self._given(some, held, most)
                finally:
                    self._rounds.release(*self._rounds.experts.numbers(self._layer, some))
        finally:
            self._rounds.end_asking(before)

    def _given(
        self, some: Sequence[int], held: Sequence[tuple[int, int]], most: int
    ) -> Iterator[Given]:
        """Yield acquired experts; ``held``: the number of each among all layers, and its slot."""
        memory = self._rounds.memory
        if most == 1:
            for expert, (number, slot) in zip(some, held, strict=True):
                (own, _), places = memory.views(number, slot), self._places[expert]
                yield Given([expert], [0], {name: own[at][None] for name, at in places.items()})
            return
        assert isinstance(memory, TorchSlots), "a GPU has no views of files"
        together: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for expert, (number, slot) in zip(some, held, strict=True):
            window, place = divmod(slot - memory.layers, most)
            key = window * most, *self._places[expert].values()
            together.setdefault(key, []).append((expert, number, place))
        for (first, *_), found in together.items():
            experts, numbers, at = zip(*found, strict=True)
            pools = memory.pools(numbers[0])
            names = self._places[experts[0]].items()
            slots = {name: pools[n][first : first + most] for name, n in names}
            yield Given(experts, at, slots)


def _most_groups(module: nn.Module) -> int:
    """Return how many experts one kernel of torch's grouped_mm can have; 1 if it loops over them.

    Source: aten/src/ATen/native/cuda/GroupedBlas.cpp and GroupMM.cu of torch 2.11.
    """
    weights = [each for each in module._parameters.values() if each is not None]
    fast = weights[0].is_cuda and all(each.dtype == torch.bfloat16 for each in weights)
    return _GROUPS if fast and _capability(weights[0].device)[0] in (9, 10) else 1


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.version.cuda else (0, 0)
