"""Refuse a plan that exceeds memory, with the numbers and arguments with which it would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest

from streamload.core.dtypes import DType
from streamload.core.memory import STAGING
from streamload.core.units import format_bytes
from streamload.errors import Fit, PlanInfeasibleError
from streamload.planning.cache_room import CacheRoom
from streamload.planning.fit import DeviceShare, least_read_nbytes
from streamload.planning.moves import Kind
from streamload.planning.partition import Item, smallest_count
from streamload.planning.plan import DevicePlan, Plan
from streamload.planning.requests import DeviceSpec, kept_free


def check(
    plan: Plan, shares: Sequence[DeviceShare], cache: CacheRoom | None, host_limit: str
) -> None:
    """Raise PlanInfeasibleError if a plan exceeds the memory of a device or of the host.

    ``shares``: the devices and their placements, in the plan's order; ``cache``: the KV cache to
    leave room for, or None; ``host_limit``: the source of the host's budget, for the message.
    """
    specs = {share.spec.name: share.spec for share in shares}
    for mine, share in zip(plan.devices, shares, strict=True):
        _check_device(plan, mine, share, specs, cache)
    sharing = [d for d in plan.devices if d.shared_memory and d.host_needed_nbytes]
    reserved = sum(each.reserve_nbytes for each in specs.values() if each.info.shared_memory)
    # memory that no cgroup is charged leaves the cgroup's rest to the others
    for some in ([d for d in sharing if d.charged], sharing):
        known = [specs[d.device].host_free_nbytes for d in some]
        free = max((nbytes for nbytes in known if nbytes is not None), default=None)
        largest = [(d.device, d.host_needed_nbytes) for d in some]
        if not all(d.charged for d in some):
            largest.append((STAGING, plan.host_nbytes))
        needed = sum(nbytes for _, nbytes in largest)
        if free is None or needed <= free:
            continue
        raise PlanInfeasibleError(
            ", ".join(d.device for d in some),
            needed,
            free,
            limit="free memory" + " that they share" * (len(some) > 1) + kept_free(reserved),
            largest=sorted(largest, key=lambda x: (-x[1], x[0])),
        )
    if plan.host_nbytes > plan.host_budget_nbytes:
        raise PlanInfeasibleError(
            STAGING, plan.host_nbytes, plan.host_budget_nbytes, limit=host_limit
        )


def _check_device(
    plan: Plan,
    mine: DevicePlan,
    share: DeviceShare,
    specs: Mapping[str, DeviceSpec],
    cache: CacheRoom | None,
) -> None:
    """Raise PlanInfeasibleError if ``mine``, the plan of one device, exceeds its memory."""
    spec, placements = share.spec, share.placements
    most = spec.info.largest_allocation_nbytes
    if most is not None and any(p.nbytes > most for p, _ in placements.counted):
        largest = [next((p.name, p.kind.nbytes) for p in placements if p.kind.nbytes > most)]
        raise PlanInfeasibleError(
            spec.name, largest[0][1], most, limit="largest allocation", largest=largest
        )
    limit, available, needed = spec.limit, spec.budget_nbytes, mine.needed_nbytes
    new = mine.host_needed_nbytes if spec.info.shared_memory else mine.fresh_needed_nbytes
    if spec.free_nbytes is not None and new > spec.free_nbytes and needed <= available:
        limit, available, needed = spec.free_limit, spec.free_nbytes, new
    if needed <= available:
        return
    largest = [("the KV cache", mine.cache_nbytes)] if mine.cache_nbytes else []
    if limit == spec.free_limit:
        other = mine.object_nbytes + mine.kernel_nbytes
        largest += [(f"what {len(placements)} tensors take beside their bytes", other)]
    named = ((move.name, move.kind.nbytes) for move in placements)
    parameters = nsmallest(8 - len(largest), named, key=lambda x: (-x[1], x[0]))
    raise PlanInfeasibleError(
        spec.name,
        needed,
        available,
        limit=limit,
        largest=sorted([*largest, *parameters], key=lambda x: -x[1]),
        would_fit=[*_suggestions(plan, mine, share, specs, cache, needed, available)],
        reason=_why_new(mine) if limit == spec.free_limit else "",
    )


def _suggestions(
    plan: Plan,
    mine: DevicePlan,
    share: DeviceShare,
    specs: Mapping[str, DeviceSpec],
    cache: CacheRoom | None,
    needed: int,
    available: int,
) -> Iterator[Fit]:
    """Yield arguments that would fit: the load takes ``needed`` of ``available`` device bytes."""
    spec, placements = share.spec, share.placements
    sizes = (move.kind.nbytes // _shrunk(move.kind) for move in placements)
    small = sum(spec.taken(sizes))
    small += needed - mine.resident_nbytes
    if spec.info.in_process and not mine.scratch_nbytes:
        small += least_read_nbytes(placements)
    if cache is not None and cache.cache.request.dtype is None:  # it would shrink as well
        shrunk = mine.cache_nbytes - mine.cache_nbytes // _shrink(cache.dtype)
        small -= min(shrunk, max(mine.run_nbytes - mine.peak_nbytes, 0))
    if any(_shrunk(p) > 1 for p, _ in placements.counted) and small <= available:
        yield Fit("dtype", '="float16"', format_bytes(small))
    if cache is not None and mine.peak_nbytes <= spec.budget_nbytes:
        context = cache.most_context(plan.devices, specs)
        if 0 < context < cache.cache.request.context:
            yield Fit("context", f"={context}")
    if not spec.alone and len({spec.budget_nbytes for spec in specs.values()}) == 1:
        count = smallest_count(
            [Item(move.name, move.resident_nbytes) for move in plan.placements],
            max(available - mine.scratch_nbytes, 0),
            cache=cache.layers if cache is not None else (),
        )
        if count is not None and count > len(plan.devices):
            yield Fit(f"{count} devices or nodes", f" of {format_bytes(available)}")


def _why_new(mine: DevicePlan) -> str:
    """Explain why overwriting a model's weights needs new memory; "" if it does not."""
    absent = mine.held_nbytes - mine.reusable_nbytes
    if absent <= 0:
        return ""
    return (
        f"of the {format_bytes(mine.held_nbytes)} that the model holds, {format_bytes(absent)} "
        "count as new: they were never written, are mapped from a file, or are shared with another "
        "process"
    )


def _shrunk(kind: Kind) -> int:
    """Return how many times smaller a parameter is in float16: 1 if it is quantized."""
    return 1 if kind.coding is not None else _shrink(kind.dst)


def _shrink(dtype: DType) -> int:
    """Return how many times smaller an element of this dtype is in float16; 1 for integers."""
    return max(dtype.bits // 16, 1) if dtype.kind == "float" else 1
