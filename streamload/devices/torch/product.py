"""Products with quantized weights, by compiled kernels: operators of torch, and their launches.

A few vectors are multiplied by a kernel that decodes as it reads. For more, and where there is no
such kernel, tiles of the weight are decoded and multiplied by torch: no other memory is used than
that of a tile. Gradients and `torch.func` decode the whole weight.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from streamload.codecs.decode_blocks import Blocks
from streamload.codecs.decode_kernels import Values
from streamload.codecs.product import (
    JOB,
    MOST_TOKENS,
    Form,
    Formed,
    coded_form,
    compile_product,
    float_bits,
    operands,
)
from streamload.codecs.product_cuda import PARAMETERS, SYMBOL, is_exact, launch, product_ptx
from streamload.codecs.scheme import SCHEMES, CodedWeight, codec_of
from streamload.codecs.schemes import bitsandbytes_nested as dynamic
from streamload.codecs.schemes.mlx import BLOCK, Affine
from streamload.core.dtypes import BF16, F16, F32, DType
from streamload.devices.cuda import Context, load_kept
from streamload.devices.torch.streams import current_stream
from streamload.errors import DeviceError, UnsupportedCastError

#: Bytes of a tile of decoded rows on a CUDA device, at most.
TILE_NBYTES = 2**26
_TILE_ROWS = 256  # of a tile on the host, for each thread; on CUDA a multiple of it
_CLAIM_NBYTES = 2**16  # of codes that a thread of the host claims at once, about
_PIECE_NUMEL = 2**20  # elements that torch's operations decode at once
_ALIGNMENT = 16  # of the addresses that kernels read
_BLOCK = 64  # elements of a block of bitsandbytes' modules
_TOKENS = (1, 2, 4, 8)  # vectors that there are kernels for
_MOST_ON_CUDA = 4  # vectors; for more, tiles are faster there
_SRC, _X, _OUT, _BIAS, _OFFSET = map(PARAMETERS.index, ("src", "x", "out", "bias", "offset"))
_DTYPES: Mapping[torch.dtype, DType] = {
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.float32: F32,
}


class Operand(NamedTuple):
    """A quantized matrix, or some rows of one.

    Attributes:
        format: the name of its format; or of a layout without a scheme, with a colon and its
            details, if it has such (`Formed.form`).
        parts: its codes, and the other arrays in the order of `Form.parts`, all on one device.
        stop: the end of the rows, exclusive.
    """

    format: str
    parts: Sequence[torch.Tensor]
    first: int
    stop: int
    width: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.first

    def between(self, start: int, stop: int) -> Operand:
        """Return rows ``start`` to ``stop``, exclusive, of these rows."""
        return self._replace(first=self.first + start, stop=self.first + stop)


#: The dtypes of inputs.
_COMPUTED = frozenset((*_DTYPES, torch.float64, torch.complex64, torch.complex128))


@cache
def form_of(format: str, width: int) -> Form | None:
    """Return how kernels read weights of a format and a width; None if none can."""
    form = coded_form(CodedWeight(format, (1, width)))
    return form if form is not None and form.per_row(width) else None


@cache
def _dtypes(format: str, width: int) -> list[torch.dtype]:
    """Return the dtypes of `Operand.parts`; none for a format whose name states them."""
    if isinstance(codec_of(format.partition(":")[0]), Formed) and format not in SCHEMES:
        return []
    coded = CodedWeight(format, (1, width))
    return [getattr(torch, part.dtype.name) for part in operands(coded)]


def _is_readable(of: Operand) -> bool:
    """Whether parts are as kernels expect them; ``load_state_dict(assign=True)`` takes any."""
    expected, device = _dtypes(of.format, of.width), of.parts[0].device
    is_own = not expected or [part.dtype for part in of.parts] == expected
    return is_own and all(part.is_contiguous() and part.device == device for part in of.parts)


def offset_of(state: torch.Tensor) -> float:
    """Return bitsandbytes' mean of nested scales, cached until its state is written again."""
    version = None if state.is_inference() else state._version
    known = getattr(state, "_streamload_offset", None)
    if known is None or version is None or known[0] != version:
        offset = json.loads(bytes(state.cpu().numpy()))["nested_offset"]
        state._streamload_offset = known = (version, float(offset))
    return float(known[1])


# --- without a kernel -----------------------------------------------------------------------------


def _by_scales(of: Operand) -> torch.Tensor:
    """Return values times the scales of blocks of rows and columns."""
    codes, scales = of.parts
    form = coded_form(CodedWeight(of.format, (1, of.width)))
    assert form is not None and isinstance(form.codes, Values)
    nbytes = form.row_nbytes(of.width)
    x = codes.reshape(-1)[of.first * nbytes : of.stop * nbytes]
    if form.codes.bits == 4:
        every = np.arange(16, dtype=np.uint8)
        table = torch.from_numpy(form.codes.decoded(every, every)).to(x.device)
        x = table[torch.stack([x & 15, x >> 4], 1).view(-1).int()]
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)
    across = of.width // (form.wide or of.width)
    down = torch.arange(of.first, of.stop, device=x.device) // (form.tall or of.stop)
    each = scales.float().reshape(-1, across)[down].unsqueeze(-1)
    found = (x.float().view(of.rows, across, -1) * each).view(of.rows, of.width)
    return found * form.factor if form.factor != 1.0 else found


def _by_blocks(of: Operand) -> torch.Tensor:
    """Return decoded blocks; other ones than Q8_0 and Q4_0 go through the host."""
    layout = form_of(of.format, of.width)
    assert layout is not None and isinstance(layout.codes, Blocks)
    nbytes = layout.row_nbytes(of.width)
    codes = of.parts[0].reshape(-1)[of.first * nbytes : of.stop * nbytes]
    blocks = codes.view(-1, layout.codes.nbytes)
    if of.format not in ("q8_0", "q4_0"):
        found = torch.from_numpy(layout.codes.decoded(blocks.cpu().numpy()))
        return found.to(codes.device).view(of.rows, of.width)
    scales, packed = blocks[:, :2].contiguous().view(torch.float16).float(), blocks[:, 2:]
    if of.format == "q8_0":
        return (packed.view(torch.int8) * scales).view(of.rows, of.width)
    values = torch.cat([packed & 15, packed >> 4], 1).float() - 8
    return (values * scales).view(of.rows, of.width)


def _by_groups(of: Operand) -> torch.Tensor:
    """Return MLX's codes times the scales of their groups, plus their biases."""
    layout = codec_of(of.format)
    assert isinstance(layout, Affine)
    codes, *others = (part[of.first : of.stop] for part in of.parts)
    octets = codes.contiguous().view(torch.uint8).view(-1, layout.bits * BLOCK // 8)
    octets = functional.pad(octets.int(), (0, 1))
    at = torch.arange(BLOCK, device=codes.device) * layout.bits
    both = octets[:, at // 8] | octets[:, at // 8 + 1] << 8
    x = (both >> at % 8 & (1 << layout.bits) - 1).float().view(-1, layout.group)
    scales, biases = (each.float().reshape(-1, 1) for each in others)
    return (x * scales + biases).view(of.rows, of.width)


def _by_table(of: Operand) -> torch.Tensor:
    """Return bitsandbytes' values of 4 bits."""
    codes, absmax, table, *nested = of.parts
    start, stop = of.first * of.width, of.stop * of.width
    packed = codes.reshape(-1)[start // 2 : -(-stop // 2)]
    values = table[torch.stack([packed >> 4, packed & 15], 1).view(-1).int()]
    values = values[start % 2 :][: stop - start]
    first, end = start // _BLOCK, -(-stop // _BLOCK)
    scales = absmax[first:end]
    if nested:
        outer, map, state = nested
        blocks = torch.arange(first, end, device=absmax.device) // dynamic.BLOCK
        scales = map[scales.int()] * outer[blocks] + offset_of(state)
    each = scales.repeat_interleave(_BLOCK)[start % _BLOCK :][: stop - start]
    return (values * each).view(of.rows, of.width)


def _without_kernel(of: Operand, out: torch.Tensor) -> None:
    """Decode by torch's operations, in pieces of whole rows, each rounded once to ``out``."""
    form, codes = coded_form(CodedWeight(of.format, (1, of.width))), of.parts[0]
    if codes.dtype not in (expected := _dtypes(of.format, of.width))[:1] and expected:
        raise RuntimeError(
            f"cannot compute with {codes.dtype} in place of codes of {of.format}: expected "
            f"{expected[0]}; write module.weight = torch.nn.Parameter(new), which quantizes it"
        )
    names = [role for role, _ in form.parts] if form is not None else []
    decode = _by_blocks if not names else _by_table if "table" in names else _by_scales
    decode = decode if form is not None else _by_groups
    step = max(_PIECE_NUMEL // max(of.width, 1), 1)
    for start, stop in pairwise([*range(0, of.rows, step), of.rows]):
        out[start:stop] = decode(of.between(start, stop))


# --- kernels --------------------------------------------------------------------------------------


@cache
def _host_kernel(form: Form, tokens: int, dst: DType) -> Any:
    """Return a kernel for this CPU, or None if it cannot be compiled."""
    try:
        return compile_product(form, tokens, dst)
    except UnsupportedCastError:
        return None


def _host_kernel_of(of: Operand, tokens: int, dst: torch.dtype) -> Any:
    """Return the kernel for an operand on the host, or None."""
    form, target = form_of(of.format, of.width), _DTYPES.get(dst)
    if form is None or target is None or not _is_readable(of):
        return None
    return _host_kernel(form, tokens, target)


def has_host_kernels(of: Operand, dtype: torch.dtype) -> bool:
    """Whether kernels of the host multiply vectors of a dtype by an operand."""
    return of.parts[0].is_cpu and _host_kernel_of(of, 0, dtype) is not None


def compile_kernels(coded: CodedWeight, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels for a weight ahead of their use; failures are ignored."""
    rows, width = coded.matrix
    form, target = form_of(coded.format, width), _DTYPES.get(dtype)
    for tokens in (0, *_TOKENS) if form is not None and target is not None else ():
        if device.type == "cuda" and tokens <= _MOST_ON_CUDA:
            index = torch.cuda.current_device() if device.index is None else device.index
            with suppress(DeviceError, OSError):
                context, _ = current_stream(index)
                _launch(coded.format, (0, rows), width, tokens, dtype, context)
        elif device.type == "cpu":
            _host_kernel(form, tokens, F32 if tokens else target)


@cache
def _threads_of_torch() -> Any:
    """Return the function by which torch's OpenMP runs another one on its threads, or None."""
    try:
        run = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):  # torch has other threads
        return None
    run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    run.restype = None
    return run


@cache
def _constants(format: str, width: int) -> tuple[tuple[str, ...], dict[str, int], int]:
    """Return the roles of parts, fields of every job, and the bytes of a row's codes."""
    form = form_of(format, width)
    assert form is not None
    roles = ("src", *(role for role, _ in form.parts))
    return roles, form.constants(width), form.row_nbytes(width)


def _fields(of: Operand) -> dict[str, int]:
    """Return the fields of a job or the parameters of a kernel, by name."""
    roles, constants, _ = _constants(of.format, of.width)
    found = {role: part.data_ptr() for role, part in zip(roles, of.parts, strict=True)}
    if "state" in found:
        found["offset"] = float_bits(offset_of(of.parts[-1]))
    return {**constants, **found, "stop": of.stop}


def _on_host(kernel: Any, of: Operand, **fields: int) -> None:
    """Run a kernel over an operand's rows, on torch's threads if these are many."""
    claim = max(_CLAIM_NBYTES // _constants(of.format, of.width)[2] // 4, 1) * 4
    fields |= _fields(of) | {"claim": claim, "next": of.first}
    job = (ctypes.c_uint64 * len(JOB))(*(fields.get(name, 0) for name in JOB))
    threads = min(torch.get_num_threads(), -(-of.rows // claim))
    run = _threads_of_torch() if threads > 1 else None
    if run is None:
        kernel(ctypes.addressof(job))
    else:
        run(ctypes.cast(kernel, ctypes.c_void_p), ctypes.addressof(job), threads, 0)


class _Launch(NamedTuple):
    """A kernel's launch for weights of one form and shape."""

    kernel: int
    blocks: int
    places: tuple[int, ...]
    parameters: tuple[int, ...]


@cache
def _launch(
    format: str,
    rows: tuple[int, int],
    width: int,
    tokens: int,
    dtype: torch.dtype,
    context: Context,
) -> _Launch | None:
    """Return the launch of a kernel for rows first to stop, exclusive; None if there is none.

    Raises OSError: there is no driver.
    """
    form, target = form_of(format, width), _DTYPES.get(dtype)
    if form is None or target is None or torch.version.hip is not None:
        return None
    try:
        ptx = product_ptx(form, target, tokens, is_exact(form, width))
    except UnsupportedCastError:
        return None
    kernel = load_kept(context, ptx, SYMBOL)  # what fails now may work later
    first, stop = rows
    splits, blocks = launch(form, stop - first, width, tokens)
    roles, constants, _ = _constants(format, width)
    fields = {**constants, "first": first, "stop": stop, "pitch": stop - first, "splits": splits}
    places = tuple(PARAMETERS.index(role) if role in PARAMETERS else -1 for role in roles)
    parameters = tuple(fields.get(name, 0) for name in PARAMETERS)
    return _Launch(kernel, blocks, places, parameters)


def _on_cuda(
    of: Operand, tokens: int, dtype: torch.dtype, out: int, x: int = 0, bias: int = 0
) -> bool:
    """Launch a kernel over an operand's rows on its device's current stream, if there is one."""
    parts = of.parts
    found = None
    with suppress(DeviceError, OSError):
        context, stream = current_stream(parts[0].get_device())
        found = _launch(of.format, (of.first, of.stop), of.width, tokens, dtype, context)
    if found is None:
        return False
    values = list(found.parameters)
    values[_X], values[_OUT], values[_BIAS] = x, out, bias
    for place, part in zip(found.places, parts, strict=True):
        if place >= 0:
            values[place] = part.data_ptr()
        else:
            values[_OFFSET] = float_bits(offset_of(part))
    if values[_SRC] % _ALIGNMENT or not _is_readable(of):
        return False
    context.launch(found.kernel, found.blocks, stream, values)
    return True


def decode(of: Operand, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return an operand as floats of a dtype, each rounded once; of shape (rows, columns).

    ``out``, contiguous and of the device and dtype, receives them, if it is given.
    """
    if out is None:
        out = torch.empty(of.rows, of.width, dtype=dtype, device=of.parts[0].device)
    start = out.data_ptr() - of.first * of.width * out.itemsize if out.numel() else 0  # of row 0
    if out.is_cuda and out.numel() and _on_cuda(of, 0, dtype, start):
        return out
    if out.is_cpu and (kernel := _host_kernel_of(of, 0, dtype)) and out.numel():
        _on_host(kernel, of, out=start)
        return out
    with torch.no_grad():
        _without_kernel(of, out)
    return out


def _multiplied(x: torch.Tensor, of: Operand, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x`` of shape (tokens, columns) times an operand, plus a bias; without gradients."""
    if x.is_neg() or x._is_zerotensor():  # whose memory has other values, or is none
        x = torch.zeros_like(x, device=x.device) + x.resolve_neg()
    if of.rows and 0 < x.shape[0] <= (_MOST_ON_CUDA if x.is_cuda else MOST_TOKENS):
        found = (_few_on_cuda if x.is_cuda else _few_on_host)(x, of, bias)
        if found is not None:
            return found
    return _by_tiles(x, of, bias)


def _counts(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the vectors that kernels multiply at once."""
    first = 0
    while first < tokens:
        count = next(n for n in reversed(_TOKENS) if n <= tokens - first)
        yield first, count
        first += count


def _few_on_cuda(x: torch.Tensor, of: Operand, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Multiply by kernels; None if there is none."""
    tokens, dtype = x.shape[0], x.dtype
    x = x.contiguous()
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    out = x.new_empty((tokens, of.rows))
    size, own = out.itemsize, 0
    if bias is not None:
        bias = bias.to(dtype).contiguous()
        own = bias.data_ptr() - of.first * size
    for first, count in _counts(tokens):
        place = out.data_ptr() + (first * of.rows - of.first) * size
        if not _on_cuda(of, count, dtype, place, x.data_ptr() + first * of.width * size, own):
            return None
    return out


def _few_on_host(x: torch.Tensor, of: Operand, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Multiply by kernels, in float32; None if there is none."""
    tokens, dtype = x.shape[0], x.dtype
    if not x.is_cpu or dtype not in _DTYPES:
        return None
    count = next(n for n in _TOKENS if n >= tokens)
    kernel = _host_kernel_of(of, count, torch.float32)
    if kernel is None:
        return None
    if count > tokens:  # cheaper than to read the weight twice
        x = functional.pad(x, (0, 0, 0, count - tokens))
    x = x.to(torch.float32).contiguous()
    out = x.new_empty(count, of.rows)
    place = out.data_ptr() - of.first * 4
    _on_host(kernel, of, out=place, x=x.data_ptr(), pitch=of.rows)
    out = out[:tokens]
    return (out if bias is None else out + bias).to(dtype)


def _by_tiles(x: torch.Tensor, of: Operand, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by tiles of decoded rows."""
    dtype, rows = x.dtype, of.rows
    if not x.shape[0]:
        return x.new_empty(0, rows)
    step = max(TILE_NBYTES // max(of.width * x.itemsize, 1), 1)
    step -= step % _TILE_ROWS if step > _TILE_ROWS else 0  # torch multiplies other numbers slowly
    step = min(step if x.is_cuda else min(step, _TILE_ROWS * torch.get_num_threads()), rows)
    if step == rows:
        return functional.linear(x, decode(of, dtype), bias)
    out = torch.empty(x.shape[0], rows, dtype=dtype, device=x.device)
    tile = torch.empty(step, of.width, dtype=dtype, device=x.device)
    for start, stop in pairwise([*range(0, rows, step), rows]):
        some = decode(of.between(start, stop), dtype, tile[: stop - start]).t()
        if bias is None:
            torch.mm(x, some, out=out[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, some, out=out[:, start:stop])
    return out


# --- operators ------------------------------------------------------------------------------------


@torch.library.custom_op("streamload::quantized_linear", mutates_args=())  # type: ignore[untyped-decorator]
def _linear(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    bias: torch.Tensor | None,
    format: str,
    rows: list[int],
    width: int,
) -> torch.Tensor:
    of = Operand(format, parts, rows[0], rows[1], width)
    return _multiplied(x.reshape(-1, width), of, bias).view(*x.shape[:-1], of.rows)


@_linear.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, parts: Any, bias: Any, format: str, rows: Any, width: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], rows[1] - rows[0])


@torch.library.custom_op("streamload::decoded", mutates_args=())  # type: ignore[untyped-decorator]
def _decoded(
    parts: list[torch.Tensor],
    format: str,
    rows: list[int],
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return decode(Operand(format, parts, rows[0], rows[1], width), dtype)


@_decoded.register_fake  # type: ignore[untyped-decorator]
def _(parts: Any, format: str, rows: Any, width: int, dtype: torch.dtype) -> torch.Tensor:
    return parts[0].new_empty(rows[1] - rows[0], width, dtype=dtype)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, parts, bias, *ctx.constants = inputs
    ctx.save_for_backward(*parts)  # which notices writes until then
    ctx.bias = None if bias is None else bias.dtype


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    of_x = of_bias = None
    parts = [*ctx.saved_tensors]  # once: a checkpoint of activations unpacks them once
    if ctx.needs_input_grad[0]:
        of_x = gradient @ _decoded(parts, *ctx.constants, gradient.dtype)
    if ctx.bias is not None and ctx.needs_input_grad[2]:
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias)
    return of_x, [None] * len(parts), of_bias, None, None, None


_linear.register_autograd(_gradients, setup_context=_keep)


def linear(x: torch.Tensor, of: Operand, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ of.T + bias``: (..., columns) becomes (..., rows), in the dtype of ``x``.

    Autocast, gradients of ``x`` and the bias, and compilers see an operator of torch.
    """
    kind = x.device.type
    if x.dtype not in _COMPUTED:
        raise RuntimeError(f"cannot multiply {x.dtype} by a quantized weight: pass floats")
    if x.dtype in _DTYPES and torch.amp.is_autocast_available(kind):
        x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    if bias is not None:
        bias = bias.to(x.dtype)
    if x.shape[-1:] != (of.width,):  # with torch's own error
        return functional.linear(x, x.new_empty(0, of.width), bias)
    if not torch.compiler.is_compiling():
        if (
            torch._C._functorch.peek_interpreter_stack() is not None  # inside of torch.func
            or torch.autograd.forward_ad._current_level >= 0
            or x.layout is not torch.strided
        ):
            with torch._C._DisableFuncTorch():
                weight = dense(of, x.dtype)
            return functional.linear(x, weight, bias)
        if _is_plain(x, bias):
            y = _multiplied(x.reshape(-1, of.width), of, bias)
            return y.view(*x.shape[:-1], of.rows)
    rows = [of.first, of.stop]
    return _linear(x, list(of.parts), bias, of.format, rows, of.width)


def dense(of: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return an operand as floats of a dtype; tracers and compilers see an operator of torch."""
    if not torch.compiler.is_compiling() and _is_plain(of.parts[0], None):
        return decode(of, dtype)
    return _decoded(list(of.parts), of.format, [of.first, of.stop], of.width, dtype)


def _is_plain(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether kernels may read the memory of ``x``, and there are no gradients to record."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    if type(x) is not torch.Tensor or x.is_meta or torch._C._get_tracing_state() is not None:
        return False
    return not torch._C._len_torch_dispatch_stack()
