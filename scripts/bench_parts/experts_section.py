"""How often the experts that a router chooses are in a cache: traces of routing, and ways to keep.

Nothing is read or computed: the traces are made here, and ours is `ExpertCache` as passes drive it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bench_parts.section import Options, Section
from streamload.offloading.experts import ExpertCache

_LAYERS, _EXPERTS, _CHOSEN, _TOKENS = 12, 32, 4, 400
_PROMPT_EVERY = 100  # tokens; a prompt asks for all experts of every layer
_SKEW = 1.2  # of Zipf's law
_DRIFT = 0.1  # how often two experts of a layer change places, a token
_SLOTS = (4, 24, 48, 96, 192, 288)

#: For each token and each layer, the experts that are asked for, ascending.
Trace = Sequence[Sequence[Sequence[int]]]


def trace(kind: str, seed: int = 0, *, prompts: bool = True) -> Trace:
    """Choices of a router.

    Args:
        kind: "uniform"; "skewed", where some experts of each layer are chosen more often; or
            "drifting", where these change.
        seed: another for another trace.
        prompts: whether prompts come between the tokens.
    """
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, _EXPERTS + 1) ** (0 if kind == "uniform" else _SKEW)
    likely = np.stack([random.permutation(weights) for _ in range(_LAYERS)])
    passes: list[list[list[int]]] = []
    for token in range(_TOKENS):
        for layer in np.flatnonzero(random.random(_LAYERS) < _DRIFT * (kind == "drifting")):
            a, b = random.integers(_EXPERTS, size=2)
            likely[layer, [a, b]] = likely[layer, [b, a]]
        # the largest of these are a choice without replacement by such weights
        keys = np.log(likely) + random.gumbel(size=likely.shape)
        chosen = np.sort(np.argpartition(-keys, _CHOSEN)[:, :_CHOSEN])
        prompt = prompts and token % _PROMPT_EVERY == 0
        passes.append([[*range(_EXPERTS)]] * _LAYERS if prompt else chosen.tolist())
    return passes


def _asked(passes: Trace) -> Iterator[tuple[int, int]]:
    for layers in passes:
        for layer, chosen in enumerate(layers):
            yield from ((layer, expert) for expert in chosen)


def ours(passes: Trace, slots: int) -> float:
    """The hit rate of `ExpertCache`."""
    cache = ExpertCache([_EXPERTS] * _LAYERS, slots)
    for layers in passes:
        for layer, chosen in enumerate(layers):
            cache.ask(layer, chosen, cache.has(layer, chosen))
            while cache.asked:
                expert = cache.asked[0]
                while (found := cache.next()) is not None:
                    held = cache.holder(found[1])
                    if held is not None:
                        cache.drop(held)
                    cache.take(*found)
                cache.has_computed([expert])
    return sum(cache.hits) / (sum(cache.hits) + sum(cache.misses))


def recent(passes: Trace, slots: int) -> float:
    """The hit rate of least-recently-used, of all layers together."""
    return _recent(passes, lambda layer: (0, slots))


def quotas(passes: Trace, slots: int) -> float:
    """The hit rate of least-recently-used, where each layer has as many slots."""
    return _recent(passes, lambda layer: (layer, slots // _LAYERS + (layer < slots % _LAYERS)))


def _recent(passes: Trace, pool_of: Callable[[int], tuple[int, int]]) -> float:
    pools: dict[int, OrderedDict[tuple[int, int], None]] = {}
    hits = count = 0
    for asked in _asked(passes):
        name, slots = pool_of(asked[0])
        pool = pools.setdefault(name, OrderedDict())
        count += 1
        if asked in pool:
            hits += 1
            pool.move_to_end(asked)
        elif slots:
            if len(pool) >= slots:
                pool.popitem(last=False)
            pool[asked] = None
    return hits / count


def frequent(passes: Trace, slots: int) -> float:
    """The hit rate of least-frequently-used, without ageing."""
    held: set[tuple[int, int]] = set()
    counts: dict[tuple[int, int], int] = {}
    hits = count = 0
    for asked in _asked(passes):
        count += 1
        counts[asked] = counts.get(asked, 0) + 1
        if asked in held:
            hits += 1
            continue
        if len(held) >= slots:
            held.remove(min(held, key=lambda each: (counts[each], each)))
        held.add(asked)
    return hits / count


def belady(passes: Trace, slots: int) -> float:
    """The best hit rate that there can be: what is needed last makes room."""
    order = [*_asked(passes)]
    following, seen = [0] * len(order), dict[tuple[int, int], int]()
    for at in reversed(range(len(order))):
        following[at] = seen.get(order[at], len(order))
        seen[order[at]] = at
    held: dict[tuple[int, int], int] = {}
    heap: list[tuple[int, tuple[int, int]]] = []
    hits = 0
    for asked, after in zip(order, following, strict=True):
        if asked in held:
            hits += 1
        elif len(held) >= slots:
            while True:
                last, each = heapq.heappop(heap)
                if held.get(each) == -last:
                    del held[each]
                    break
        held[asked] = after
        heapq.heappush(heap, (-after, asked))
    return hits / len(order)


WAYS: dict[str, Callable[[Trace, int], float]] = {
    "ours": ours,
    "least recent": recent,
    "the same, by layer": quotas,
    "least frequent": frequent,
    "the best there can be": belady,
}


def experts(options: Options) -> Section:
    """Hit rates by traces of routing, budgets in slots, and ways to keep."""
    made = Section(
        "experts",
        f"hit rates: {_LAYERS} layers of {_EXPERTS} experts, {_CHOSEN} chosen, {_TOKENS} tokens, "
        f"a prompt that asks for all of them every {_PROMPT_EVERY} tokens",
    )
    for kind in ("skewed", "drifting", "uniform"):
        options.say(f"trace: {kind}")
        passes = trace(kind, options.seed)
        for slots in _SLOTS:
            row = {name: round(way(passes, slots), 3) for name, way in WAYS.items()}
            made.rows.append({"trace": kind, "slots": f"{slots} of {_LAYERS * _EXPERTS}"} | row)
    return made
