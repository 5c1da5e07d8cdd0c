"""What a load casts with on the host: kernels are compiled before memory is looked at.

What compiling takes of the process is no part of a load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from streamload.codecs.cast_table import cast_engine, supported
from streamload.codecs.permute import compile_transpose
from streamload.core.dtypes import DType
from streamload.loading.options import CastArgument
from streamload.planning.dequantize import compile_decoders
from streamload.planning.planner import CastChoice
from streamload.planning.quant_policy import compile_encoders
from streamload.planning.requests import DeviceSpec, DTypePolicy, TensorRequests


def host_engine(
    wants: TensorRequests,
    policy: DTypePolicy,
    specs: Sequence[DeviceSpec],
    asked: CastArgument,
    *,
    clamp: bool,
) -> tuple[CastChoice, list[str]]:
    """Choose LLVM, or numpy where no kernel can be compiled, and compile what will be needed.

    Returns:
        The engine, and notes that say why it is not LLVM.
    """
    engine, notes = _engine(wants, policy, specs, asked)
    compile_encoders(wants)
    for native_bf16 in {spec.native_bf16 for spec in specs}:
        dsts = wants.dsts(policy, native_bf16)
        if engine != "numpy":
            compile_decoders(wants, dsts, clamp=clamp)
            compile_transpose(_transposed(wants, dsts))
    return engine, notes


def _transposed(wants: TensorRequests, dsts: Iterable[DType]) -> Iterator[int]:
    """Bytes of the elements of matrices that are transposed, as they are read or cast."""
    for order, shape, *dtypes in zip(wants.transposes, wants.shapes, wants.srcs, dsts, strict=True):
        if order is not None and order.rows != (shape or (1,))[0]:
            yield from (dtype.itemsize for dtype in dtypes)


def _engine(
    wants: TensorRequests, policy: DTypePolicy, specs: Sequence[DeviceSpec], asked: CastArgument
) -> tuple[CastChoice, list[str]]:
    if asked in ("numpy", "device"):
        return asked, []
    on_host = policy.fp16_cast == "llvm"  # some of it, whatever casts
    # kernels that no device needs are not compiled
    for native in sorted({spec.native_bf16 for spec in specs if on_host or not spec.casts}):
        for src, dst in wants.casts(policy, native):
            if not supported(src, dst):
                continue  # the planner names the tensor
            if cast_engine(src, dst, "llvm" if asked == "llvm" else "auto") == "numpy":
                return "numpy", ["LLVM kernels do not work here: casts run in numpy"]
    return "llvm", []
