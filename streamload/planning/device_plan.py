"""What a plan takes on one device: the numbers that are held against its budget."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What a plan takes on one device.

    Attributes:
        device: its name.
        budget_nbytes: what the load may take: the budget, less `reserve_nbytes`.
        resident_nbytes: parameters, when the load is done.
        scratch_nbytes: temporary device memory (and host staging, on shared memory).
        peak_nbytes: predicted peak: parameters, scratch, and old parameters not yet released.
        fresh_nbytes: how much memory the load newly takes at its peak, scratch included.
        held_nbytes: what the parameters hold there when the load begins; more than the peak where
            old parameters are larger than the budget, and go first.
        layers: first and last (exclusive) layer, under a split; None without one.
        embedding: holds the embedding, under a split.
        head: holds the head, under a split.
        release_first: old parameters go all at once before the first is loaded.
        cache_nbytes: the KV cache of its layers, which is allocated when the load is done.
        reserve_nbytes: bytes kept free in addition, of the budget and of what is free.
        reusable_nbytes: of `held_nbytes`, memory that the load takes over.
        object_nbytes: memory of the process for tensors besides their bytes.
        kernel_nbytes: what the kernel takes for them.
        shared_memory: its memory is the host's.
        mapped_nbytes: what stays in the mapped files: the kernel can take its pages back.
    """

    device: str
    budget_nbytes: int
    resident_nbytes: int
    scratch_nbytes: int
    peak_nbytes: int
    fresh_nbytes: int
    held_nbytes: int
    layers: tuple[int, int] | None = None
    embedding: bool = False
    head: bool = False
    release_first: bool = False
    cache_nbytes: int = 0
    reserve_nbytes: int = 0
    reusable_nbytes: int = 0
    object_nbytes: int = 0
    kernel_nbytes: int = 0
    shared_memory: bool = True
    mapped_nbytes: int = 0

    @property
    def run_nbytes(self) -> int:
        """Bytes of the parameters and of the cache that they run with."""
        return self.resident_nbytes + self.cache_nbytes

    @property
    def needed_nbytes(self) -> int:
        """The most of the budget that is taken: by the load, or by what runs afterwards."""
        return max(self.peak_nbytes, self.run_nbytes)

    @property
    def fresh_needed_nbytes(self) -> int:
        """How much of that is newly taken."""
        return max(self.fresh_nbytes, self.run_nbytes - self.reusable_nbytes)

    @property
    def host_needed_nbytes(self) -> int:
        """Host bytes for tensors, with their own bytes if the device shares the host's memory."""
        beside = self.object_nbytes + self.kernel_nbytes
        return beside + (self.fresh_needed_nbytes if self.shared_memory else 0)

    @property
    def stated_nbytes(self) -> int:
        """The budget as it was given, with what stays free of it."""
        return self.budget_nbytes + self.reserve_nbytes

    @property
    def holds(self) -> str:
        """Which parts of the model it holds under a split, in words."""
        first, stop = self.layers or (0, 0)
        layers = f"layers {first}-{stop - 1}" if stop - first > 1 else f"layer {first}"
        parts = [(self.embedding, "embedding"), (stop > first, layers), (self.head, "head")]
        return ", ".join(name for there, name in parts if there)
