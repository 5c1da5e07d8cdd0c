"""The memory that a plan keeps free for the KV cache on each device."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import DType
from streamload.errors import CheckpointError
from streamload.planning.kv_cache import COMPUTED_IN, CacheRequest, KvCache
from streamload.planning.partition import Item, units_of
from streamload.planning.plan import DevicePlan
from streamload.planning.requests import DeviceSpec, DTypePolicy, TensorRequests


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """The KV cache for which a plan leaves memory free after the load.

    `on`: the layer numbers on each device, by device name; empty until `placed`.
    """

    cache: KvCache
    dtype: DType
    on: Mapping[str, Sequence[int]]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        wants: TensorRequests,
        policy: DTypePolicy,
        cache: KvCache,
        native_bf16: bool,
    ) -> CacheRoom:
        """Return the cache with a dtype: the requested, else the weights', else config.json's.

        The weights' dtype is that of most bytes, and counts only if models compute in it.
        """
        dtype = cache.request.dtype
        if dtype is None:
            nbytes: dict[str, int] = {}  # by name: a dtype's own hash takes ten times as long
            dsts = wants.dsts(policy, native_bf16)
            for dst, size in zip(dsts, wants.nbytes(policy, native_bf16), strict=True):
                nbytes[dst.name] = nbytes.get(dst.name, 0) + size
            most = max(nbytes, key=lambda name: nbytes[name], default="")
            dtype = next((one for one in COMPUTED_IN if one.name == most), cache.configured)
        if dtype is None:
            raise CheckpointError(
                str(checkpoint.path),
                "the dtype of the KV cache is not known",
                expected="cache_dtype=",
                found="none",
            )
        return cls(cache, dtype, {})

    @property
    def request(self) -> CacheRequest:
        """The user's request for a cache, with the chosen dtype filled in."""
        return replace(self.cache.request, dtype=self.dtype)

    @property
    def layers(self) -> list[int]:
        """Bytes of each layer's cache."""
        asked = self.cache.request
        return [
            sum(map(self.dtype.nbytes, layer.elements(asked.context, asked.batch)))
            for layer in self.cache.layers
        ]

    def placed(
        self,
        checkpoint: Checkpoint,
        wants: TensorRequests,
        devices: Sequence[str],
        policy: DTypePolicy,
    ) -> CacheRoom:
        """Return the cache with each layer on the device that holds most of the layer's weights.

        ``devices`` names the device of each of ``wants``.
        """
        # by the checkpoint's names, whose layers config.json counts
        names = [info.name for info in wants.infos]
        where = dict(zip(names, devices, strict=True))
        items = list(starmap(Item, dict(zip(names, wants.nbytes(policy), strict=True)).items()))
        on: dict[str, list[int]] = {}
        # in place of bytes the layers' numbers, from 1, so that units name their layers
        numbers = range(1, len(self.cache.layers) + 1)
        for unit in units_of(items, cache=numbers):
            if unit.cache_nbytes:
                weights: dict[str, int] = defaultdict(int)
                for item in unit.items:
                    weights[where[item.name]] += item.nbytes
                most = max(weights, key=weights.__getitem__)
                on.setdefault(most, []).append(unit.cache_nbytes - 1)
        # the load may be of the end of a model; the checkpoint has layers
        everything = (Item(name, 0) for name in checkpoint.tensors if not on)
        if not on and not any(unit.cache_nbytes for unit in units_of([*everything], cache=numbers)):
            raise CheckpointError(
                str(checkpoint.path),
                "cannot place the KV cache: no tensor's name has the number of a layer",
                expected="names of layers, such as model.layers.0",
                found="none",
            )
        return replace(self, on=on)

    def nbytes(self, spec: DeviceSpec, context: int) -> int:
        """Return a device's bytes for the cache of ``context`` tokens, as its allocator rounds."""
        batch = self.cache.request.batch
        sizes = (
            self.dtype.nbytes(elements)
            for layer in self.on.get(spec.name, ())
            for elements in self.cache.layers[layer].elements(context, batch)
        )
        return sum(spec.taken(sizes))

    def most_context(self, devices: Iterable[DevicePlan], specs: Mapping[str, DeviceSpec]) -> int:
        """Return the most tokens, up to the requested number, whose cache fits on all devices."""
        rooms = []
        for d in devices:
            spec = specs[d.device]
            room = spec.budget_nbytes - d.resident_nbytes
            if spec.free_nbytes is not None:
                room = min(room, spec.free_nbytes + d.reusable_nbytes - d.resident_nbytes)
            rooms.append((spec, room))

        def too_long(context: int) -> bool:
            return any(self.nbytes(spec, context) > room for spec, room in rooms)

        return bisect_right(range(1, self.cache.request.context + 1), False, key=too_long)
