"""Buffers of tinygrad that raise when used: the memory of weights without values."""

from __future__ import annotations

from typing import Any

from tinygrad.device import Buffer
from tinygrad.uop.ops import UOp, buffers

from streamload.core.dtypes import DType
from streamload.errors import DeviceError, OffloadError


class InvalidBuffer(Buffer):  # type: ignore[misc]  # tinygrad has no types for this
    """The memory of a parameter that a failed load left without values: using it raises.

    Attributes:
        kept: the graph over memory that another load will write again; None if that is freed.
        keeps: the dtype that the parameter keeps by default, see `Parameter.keeps`.
    """

    def __init__(
        self, name: str, device: str, size: int, dtype: Any, kept: UOp | None, keeps: DType | None
    ) -> None:
        self.parameter, self.kept, self.keeps = name, kept, keeps
        super().__init__(device, size, dtype)

    def allocate(self, opaque: Any = None, external_ptr: Any = None) -> Buffer:
        raise DeviceError(
            self.device,
            f"parameter {self.parameter!r} holds no values, since a load failed or its offload was "
            "closed; load it again",
        )


class AbsentBuffer(Buffer):  # type: ignore[misc]  # tinygrad has no types for this
    """Stands for the memory of an offloaded weight between passes: using it raises."""

    def __init__(self, name: str, device: str, size: int, dtype: Any) -> None:
        self.parameter = name
        super().__init__(device, size, dtype)

    def allocate(self, opaque: Any = None, external_ptr: Any = None) -> Buffer:
        raise OffloadError(
            f"{self.parameter} streams from its file when its layer is called, and is not here "
            "now: a model that is offloaded cannot be saved, moved or copied; read the checkpoint, "
            f"or close() it first. Where the model computes with it outside of a layer's call, "
            f'offload it with stay="{self.parameter}"'
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise OffloadError: it cannot be pickled or copied."""
        return self.allocate()


def invalid_buffer(uop: UOp) -> InvalidBuffer | None:
    """Return a tensor's buffer if it is an `InvalidBuffer`, else None."""
    buffer = buffers.get(uop.base)
    return buffer if isinstance(buffer, InvalidBuffer) else None


def is_absent(uop: UOp) -> bool:
    """Whether a tensor's buffer is an `AbsentBuffer`: an offloaded weight, not loaded now."""
    return isinstance(buffers.get(uop.base), AbsentBuffer)
