"""The CUDA streams of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from streamload.devices.cuda import Context


def _handle(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# Returns the handle of a device's current stream, in a tenth of the public function's time.
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _handle)


def current_stream(index: int) -> tuple[Context, int]:
    """Return (context, handle) of the stream that torch uses now on CUDA device ``index``."""
    stream = _raw_stream(index)
    return Context.primary(f"cuda:{index}", index).of_stream(stream), stream
