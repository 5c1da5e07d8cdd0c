"""Products of a few tokens on CUDA, by the compiled kernels that modules of torch have, too.

A kernel is a program of tinygrad's whose binary is PTX: TinyJit captures it like any other. Its
numbers are constants, since tinygrad passes buffers alone. That is no public API of tinygrad's, so
it is tried on each device before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context
from tinygrad.uop.ops import Ops, UOp

from streamload.codecs.product import coded_form, operands
from streamload.codecs.product_cuda import PARAMETERS, SYMBOL, is_exact, launch, product_ptx
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.codecs.scheme import CodedWeight
from streamload.core.dtypes import BF16, F16, F32, DType
from streamload.devices.tinygrad.tensors import TO_TINYGRAD, backend_of, view_start
from streamload.errors import UnsupportedCastError

#: The most tokens that kernels multiply: a block's threads store the sums of no more.
MOST_TOKENS = 16
_ALIGNMENT = 16  # of the addresses that kernels read
_DTYPES = {TO_TINYGRAD[dtype.name]: dtype for dtype in (BF16, F16, F32)}


class Weight(NamedTuple):
    """The tensors of a quantized Linear."""

    format: str
    shape: tuple[int, int]
    parts: Sequence[Tensor]
    bias: Tensor | None = None


#: Returns ``x @ weight.T + bias`` for ``x`` of shape (..., columns), in its dtype.
Expression = Callable[[Tensor, Weight], Tensor]


class _Kernel(NamedTuple):
    """A kernel for weights of one format and shape."""

    program: UOp
    roles: Sequence[str]
    parts: Sequence[str]
    dtypes: Sequence[Any]
    gradients: Callable[[UOp, UOp], tuple[UOp | None, ...]]


@cache
def _kernel(
    coded: CodedWeight, tokens: int, dtype: DType, has_bias: bool, expression: Expression
) -> _Kernel | None:
    """Return the kernel for a number of tokens of a dtype; None if there is none."""
    from tinygrad.renderer import Estimates
    from tinygrad.uop.ops import KernelInfo, ProgramInfo

    (rows, width), form = coded.matrix, coded_form(coded)
    if form is None or not form.per_row(width):
        return None
    splits, blocks = launch(form, rows, width, tokens)
    parts = ["src", *(role for role, _ in form.parts)]
    taken = {"x", "out", *(("bias",) if has_bias else ()), *parts}
    roles = [name for name in PARAMETERS if name in taken]
    fixed = dict.fromkeys((name for name in PARAMETERS if name not in taken), 0)
    fixed |= form.constants(width) | {"stop": rows, "pitch": rows, "splits": splits}
    try:
        ptx = product_ptx(form, dtype, tokens, is_exact(form, width), tuple(fixed.items()))
    except UnsupportedCastError:
        return None
    out, nbytes = roles.index("out"), rows * form.row_nbytes(width)
    info = ProgramInfo(
        name=SYMBOL,
        global_size=(blocks, 1, 1),
        local_size=(BLOCK_THREADS, 1, 1),
        globals=tuple(range(len(roles))),
        outs=(out,),
        ins=tuple(index for index in range(len(roles)) if index != out),
    )
    estimates = Estimates(2 * tokens * rows * width, nbytes, nbytes)
    sources = (
        UOp.sink(arg=KernelInfo(name=SYMBOL, estimates=estimates)),
        UOp(Ops.LINEAR),
        UOp(Ops.SOURCE, arg=ptx),
        UOp(Ops.BINARY, arg=ptx.encode() + b"\0"),
    )

    def gradients(gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
        given = dict(zip(roles, map(Tensor, call.src[1:]), strict=True))
        held = [given[role] for role in parts]
        y = expression(given["x"], Weight(coded.format, (rows, width), held, given.get("bias")))
        floats = {n: given[n] for n in roles if n != "out" and given[n].is_floating_point()}
        found = y.gradient(*floats.values(), gradient=Tensor(gradient))
        of = dict(zip(floats, found, strict=True))
        return tuple(of[role].uop if role in of else None for role in roles)

    program = UOp(Ops.PROGRAM, src=sources, arg=info)
    expected = [TO_TINYGRAD[part.dtype.name] for part in operands(coded)]
    return _Kernel(program, roles, parts, expected, gradients)


def product(x: Tensor, weight: Weight, expression: Expression) -> Tensor | None:
    """Return what ``expression`` does, by a kernel; None where there is none, or for many tokens.

    Gradients are those of the expression.
    """
    device = x.device
    if not isinstance(device, str) or backend_of(device) != "CUDA" or x.dtype not in _DTYPES:
        return None
    if not all(isinstance(n, int) for n in x.shape) or x.shape[-1:] != weight.shape[1:]:
        return None
    if not 0 < math.prod(x.shape[:-1]) <= MOST_TOKENS or not weight.shape[0]:
        return None
    bias = weight.bias
    if bias is not None and (bias.device != device or x.dtype not in (bias.dtype, dtypes.float32)):
        return None
    if not _works(device) or not _is_aligned(x.uop):
        return None
    for part in weight.parts:
        if part.device != device or not part.uop.has_buffer_identity() or not _is_aligned(part.uop):
            return None
    return _launched(x, weight, expression)


def _is_aligned(uop: UOp) -> bool:
    """Whether the memory that a kernel gets for a tensor begins at a multiple of 16 bytes.

    tinygrad aligns what it computes. It copies views for kernels, but for those that the model has
    made contiguous.
    """
    while uop.op is Ops.RESHAPE:
        uop = uop.src[0]
    memory, begins = uop, 0
    if uop.op is Ops.CONTIGUOUS:
        memory = uop.src[0].base
        while memory.op is Ops.BITCAST:
            memory = memory.src[0].base
        if memory.op is Ops.BUFFER:
            begins = view_start(uop.src[0]) or 0
    while memory.op in (Ops.AFTER, Ops.RESHAPE):
        memory = memory.src[0]
    if memory.op is not Ops.BUFFER:
        return uop.op is not Ops.AFTER and memory.op is not Ops.PARAM
    return (begins + (memory.buffer.offset if memory.is_realized else 0)) % _ALIGNMENT == 0


def _launched(x: Tensor, weight: Weight, expression: Expression) -> Tensor | None:
    """Return the product by a kernel; None if there is none for the weight."""
    (rows, width), bias = weight.shape, weight.bias
    tokens, coded = math.prod(x.shape[:-1]), CodedWeight(weight.format, weight.shape)
    kernel = _kernel(coded, tokens, _DTYPES[x.dtype], bias is not None, expression)
    if kernel is None or [part.dtype for part in weight.parts] != kernel.dtypes:
        return None
    given = dict(zip(kernel.parts, weight.parts, strict=True))
    given["x"] = x.reshape(tokens, width)
    given["out"] = Tensor.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if bias is not None:
        given["bias"] = bias.cast(x.dtype)
    sources = [given[role] for role in kernel.roles]
    found = Tensor.custom_kernel(*sources, fxn=lambda *_: kernel.program, grad_fxn=kernel.gradients)
    return found[kernel.roles.index("out")].reshape(*x.shape[:-1], rows)


@cache
def _works(device: str) -> bool:
    """Whether tinygrad runs such a program on a device, by a product with exact results."""

    def given(array: Any) -> Tensor:
        return Tensor(array, device=device).realize()

    try:
        with Context(CAPTURING=0):  # TinyJit would keep it
            codes = np.arange(64, dtype=np.int8).reshape(2, 32)
            parts = given(codes), given(np.array([[1], [2]], np.float32))
            x = given(np.arange(32, dtype=np.float32).reshape(1, 32))
            y = _launched(x, Weight("int8", (2, 32), parts), lambda x, _: x)
            if y is None:
                return False
            found = y.realize().uop.base.buffer.numpy()
    except Exception:  # any, from internals that are elsewhere in this version
        return False
    return bool((found == codes @ np.arange(32.0) * (1, 2)).all())
