"""The room that a plan leaves for the KV cache, on the devices that hold its layers."""

from __future__ import annotations

from bisect import bisect_right
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
    """The KV cache to leave room for when the load is done.

    Attributes:
        cache: the cache of each layer.
        dtype: its dtype.
        path: of the checkpoint, for errors.
        on: the layers of each device, once known.
    """

    cache: KvCache
    dtype: DType
    path: str
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
        """Choose the dtype: the requested one, else that of most weights, else the configured one.

        That of weights counts only if models compute in it.

        Raises:
            CheckpointError: there is none of these.
        """
        dtype = cache.request.dtype
        if dtype is None:
            nbytes: dict[str, int] = {}  # by name: a dtype's own hash takes ten times as long
            dsts = wants.dsts(policy, native_bf16)
            for dst, size in zip(dsts, wants.nbytes(policy, native_bf16), strict=True):
                nbytes[dst.name] = nbytes.get(dst.name, 0) + size
            most = max(nbytes, key=lambda name: nbytes[name], default="")
            dtype = next((one for one in COMPUTED_IN if one.name == most), cache.configured)
        path = str(checkpoint.path)
        if dtype is None:
            raise CheckpointError(
                path,
                "the dtype of the KV cache is not known",
                expected="cache_dtype=",
                found="none",
            )
        return cls(cache, dtype, path, {})

    @property
    def request(self) -> CacheRequest:
        """The request, with the dtype."""
        return replace(self.cache.request, dtype=self.dtype)

    @property
    def layers(self) -> list[int]:
        """Bytes of the cache of each layer."""
        asked = self.request
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
        """The same with each layer on the device of most of its weights.

        Raises:
            CheckpointError: no layer of the checkpoint is known by its name.
        """
        # by the checkpoint's names, which config.json counts the layers of
        names = [source[0].tensor for source in wants.sources]
        where = dict(zip(names, devices, strict=True))
        items = list(starmap(Item, dict(zip(names, wants.nbytes(policy), strict=True)).items()))
        on: dict[str, list[int]] = {}
        # in place of bytes the layers' numbers, from 1, so that units name their layers
        numbers = range(1, len(self.cache.layers) + 1)
        for unit in units_of(items, cache=numbers):
            if unit.cache_nbytes:
                weights = dict.fromkeys((where[item.name] for item in unit.items), 0)
                for item in unit.items:
                    weights[where[item.name]] += item.nbytes
                most = max(weights, key=lambda name: weights[name])
                on.setdefault(most, []).append(unit.cache_nbytes - 1)
        # what is loaded may be the end of a model; all of it has layers
        everything = (Item(name, 0) for name in checkpoint.tensors if not on)
        if not on and not any(unit.cache_nbytes for unit in units_of([*everything], cache=numbers)):
            raise CheckpointError(
                self.path,
                "which layer of the KV cache belongs where, the names of the tensors tell",
                expected="names of layers, such as model.layers.0",
                found="none",
            )
        return replace(self, on=on)

    def nbytes(self, spec: DeviceSpec, context: int) -> int:
        """Bytes of a device for the cache of ``context`` tokens, as its allocator rounds."""
        batch = self.cache.request.batch
        sizes = (
            self.dtype.nbytes(elements)
            for layer in self.on.get(spec.name, ())
            for elements in self.cache.layers[layer].elements(context, batch)
        )
        return sum(spec.taken(sizes))

    def most_context(self, devices: Iterable[DevicePlan], specs: Mapping[str, DeviceSpec]) -> int:
        """The most tokens that fit on all devices; 0 for none."""
        rooms = []
        for d in devices:
            spec = specs[d.device]
            room = spec.budget_nbytes - d.resident_nbytes
            if spec.free_nbytes is not None:
                room = min(room, spec.free_nbytes + d.reusable_nbytes - d.resident_nbytes)
            rooms.append((spec, room))
        contexts = range(1, self.cache.request.context + 1)
        return bisect_right(
            contexts,
            False,
            key=lambda context: any(self.nbytes(spec, context) > room for spec, room in rooms),
        )
