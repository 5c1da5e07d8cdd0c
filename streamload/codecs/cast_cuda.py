"""The casts as CUDA kernels: PTX that LLVM makes, and that the driver compiles for its device.

One kernel for each pair of `cast.floats.PAIRS`, of the same instructions for an element
(`cast.kernels.careful`): bits and counts are those of `cast.reference`, the sign and payload of a
NaN aside. It is one pass over memory. Between the first and the last address where both sides are
aligned, elements go by vectors, of 16 bytes on the side where they are wider: a GPU's memory has
its bandwidth for accesses of that size. Those before and after go one by one, and so do all where
the two sides are never aligned together. Counts are summed by shuffles in a warp and in shared
memory in a block, which then adds each that is not zero to the tally.

The PTX is that of an old architecture, which every driver of today compiles for the device that is
there. Nothing in it flushes subnormals or fuses two operations.

Names and numbers: PTX ISA reference; LLVM, "User Guide for NVPTX Back-end"; CUDA driver API
reference.
"""

from __future__ import annotations

from functools import cache

from streamload.codecs.cast import Vector, careful
from streamload.codecs.floats import PAIRS, overflow_start
from streamload.core.disk_cache import keep, read_kept
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

#: Threads of a block, always: whole warps.
BLOCK_THREADS = 256
#: The kernel's name in its PTX.
SYMBOL = "cast"

_MAX_BLOCKS = 2048  # as many threads as the largest devices run at once; they go on in strides
_THREAD_NUMEL = 8  # a vector of the pairs of 16 bits, two where one side has 32
_VECTOR_NBYTES = 16  # the widest access of a thread
#: LLVM's name of the target.
TRIPLE = "nvptx64-nvidia-cuda"
_CPU, _FEATURES = "sm_50", "+ptx60"  # PTX 6.0 has the shuffles, and every driver since 2017
#: What a kernel counts: elements that overflowed, vanished, changed.
COUNTS = 3

#: What kernels begin with that count so.
PRELUDE = f"""
target triple = "{TRIPLE}"

@sums = internal addrspace(3) global [{COUNTS} x i32] undef, align 4

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
declare i32 @llvm.nvvm.shfl.sync.down.i32(i32, i32, i32, i32) convergent
declare void @llvm.nvvm.barrier0() convergent
"""

#: How a thread learns what it takes first, and how far the next one is: ``%first``, ``%stride``.
GRID = """%tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %ntid = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %ctaid = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %nctaid = call i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
  %thread = zext i32 %tid to i64
  %threads = zext i32 %ntid to i64
  %block = zext i32 %ctaid to i64
  %blocks = zext i32 %nctaid to i64
  %before = mul i64 %block, %threads
  %first = add i64 %before, %thread
  %stride = mul i64 %blocks, %threads"""

_KERNEL = (
    PRELUDE
    + """
define ptx_kernel void @{symbol}(i64 %src, i64 %out, i64 %numel, i64 %tally) nounwind {{
entry:
  {grid}
  {clear}
  br label %begin
begin:
  ; the elements ahead of the target's first vector; vectors only if the source is aligned there too
  %past = sub i64 0, %out
  %ahead.nbytes = and i64 %past, {out_mask}
  %ahead = udiv i64 %ahead.nbytes, {out_nbytes}
  %is.short = icmp ult i64 %numel, %ahead
  %head = select i1 %is.short, i64 %numel, i64 %ahead
  %head.nbytes = mul i64 %head, {src_nbytes}
  %src.head = add i64 %src, %head.nbytes
  %src.past = and i64 %src.head, {src_mask}
  %is.aligned = icmp eq i64 %src.past, 0
  %rest = sub i64 %numel, %head
  %whole = udiv i64 %rest, {width}
  %vectors = select i1 %is.aligned, i64 %whole, i64 0
  %covered = mul i64 %vectors, {width}
  %singles = sub i64 %numel, %covered
  br label %vector

vector:
  %vector.i = phi i64 [%first, %begin], [%vector.next, %vector.cast]
  {vector_sums}
  %vector.more = icmp ult i64 %vector.i, %vectors
  br i1 %vector.more, label %vector.cast, label %single
vector.cast:
  %vector.past = mul i64 %vector.i, {width}
  %vector.at = add i64 %head, %vector.past
  {vector_cast}
  %vector.next = add i64 %vector.i, %stride
  br label %vector

single:
  %single.i = phi i64 [%first, %vector], [%single.next, %single.cast]
  {single_sums}
  %single.more = icmp ult i64 %single.i, %singles
  br i1 %single.more, label %single.cast, label %end
single.cast:
  %is.head = icmp ult i64 %single.i, %head
  %skipped = select i1 %is.head, i64 0, i64 %covered
  %single.at = add i64 %single.i, %skipped
  {single_cast}
  %single.next = add i64 %single.i, %stride
  br label %single

end:
  {tell}
  ret void
}}
"""
)

#: How they clear their sums; the label ``begin`` is next.
CLEAR = f"""
  %clears = icmp ult i32 %tid, {COUNTS}
  br i1 %clears, label %clear, label %begin
clear:
  %clear.p = getelementptr i32, ptr addrspace(3) @sums, i32 %tid
  store i32 0, ptr addrspace(3) %clear.p
"""

_TELL = """
  call void @llvm.nvvm.barrier0()  ; after the clearing, and the threads of each warp together
  {shuffles}
  %lane = and i32 %tid, 31
  %leads = icmp eq i32 %lane, 0
  br i1 %leads, label %lead, label %led
lead:
  {adds}
  br label %led
led:
  call void @llvm.nvvm.barrier0()
  %tells = icmp ult i32 %tid, {counts}
  br i1 %tells, label %tell, label %done
tell:
  %sum.p = getelementptr i32, ptr addrspace(3) @sums, i32 %tid
  %sum = load i32, ptr addrspace(3) %sum.p
  %any = icmp ne i32 %sum, 0
  br i1 %any, label %add, label %done
add:
  %more = zext i32 %sum to i64
  %slot = shl i64 %thread, 3
  %slot.at = add i64 %tally, %slot
  %slot.p = inttoptr i64 %slot.at to ptr addrspace(1)
  %told = atomicrmw add ptr addrspace(1) %slot.p, i64 %more syncscope("device") monotonic
  br label %done
done:
"""


def blocks(numel: int) -> int:
    """How many blocks to launch for so many elements: any other number gives the same result."""
    return min(max(-(-numel // (_THREAD_NUMEL * BLOCK_THREADS)), 1), _MAX_BLOCKS)


def cast_ptx(src: DType, dst: DType, *, clamp: bool) -> str:
    """PTX of the kernel of a pair, `SYMBOL`: ``cast(u64 src, u64 out, u64 numel, u64 tally)``.

    It casts ``numel`` elements from device address ``src`` on to device address ``out`` on, each a
    multiple of the size of an element there. Where those sizes are equal ``out`` may be ``src``;
    otherwise the two do not overlap. To the three 64-bit counts at device address ``tally`` (a
    multiple of 8) it adds how many finite elements overflowed, how many that are not zero became
    zero, and how many changed in value at all, those two included; a lossless pair does not look at
    it. A launch that counts takes fewer than 2^32 elements. It is launched in any number of blocks
    (`blocks` suggests one) of `BLOCK_THREADS` threads in one dimension, without dynamic shared
    memory.

    Args:
        src: dtype of the source.
        dst: dtype of the target; with ``src`` one of `cast.floats.PAIRS`.
        clamp: finite elements that overflow become the largest finite value of their sign.

    Returns:
        The text, made once in a process, and kept for later ones. CUDA is not needed to make it.

    Raises:
        UnsupportedCastError: there is no such pair, or the text is not kept, and llvmlite is
            missing or has no NVPTX.
    """
    if (src, dst) not in PAIRS:
        raise UnsupportedCastError(src.name, dst.name, reason="there is no such kernel")
    try:
        return _cast_ptx(src, dst, clamp and overflow_start(src, dst) is not None)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedCastError(
            src.name, dst.name, reason=f"no CUDA kernel without llvmlite and its NVPTX: {error}"
        ) from error


@cache
def _cast_ptx(src: DType, dst: DType, clamp: bool) -> str:
    # kept, since compiling the first takes 50 to 72 ms: docs/measurements.md, "What is kept"
    ir = _kernel_ir(src, dst, clamp)
    depends_on = ("ptx", _CPU, _FEATURES, ir)
    kept = read_kept(*depends_on)
    if kept is not None:
        return kept.decode()
    ptx = compile_ptx(ir)
    keep(ptx.encode(), *depends_on)
    return ptx


def compile_ptx(ir: str, *, triple: str = TRIPLE, cpu: str = _CPU) -> str:
    """PTX of LLVM IR.

    Args:
        ir: of kernels and what they call.
        triple: LLVM's name of the target.
        cpu: the least architecture that the text is for.

    Raises:
        ImportError: llvmlite is missing.
        OSError: its library does not load.
        RuntimeError: LLVM does not accept the IR, or was built without the target.
    """
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    module = llvm.parse_assembly(ir)
    module.verify()
    machine = target.create_target_machine(cpu=cpu, features=_FEATURES, opt=3)
    text: str = machine.emit_assembly(module)
    return text


def _kernel_ir(src: DType, dst: DType, clamp: bool) -> str:
    v = Vector(1, native_half=True)
    width = _VECTOR_NBYTES // max(src.itemsize, dst.itemsize)
    casts, sums = [], []
    slots: tuple[int, ...] = ()
    begun = {slot: "0" for slot in range(COUNTS)}  # what the sums are before a loop
    for name, before, numel in (("vector", "begin", width), ("single", "vector", 1)):
        start = len(v.lines)
        added = _cast_elements(v, src, dst, f"%{name}.at", numel, clamp)
        slots = tuple(added)
        loop = {slot: f"%{name}.sum{slot}" for slot in slots}
        ends = {slot: v.op("add", "i32", loop[slot], added[slot]) for slot in slots}
        casts.append("\n  ".join(v.lines[start:]))
        sums.append(
            "\n  ".join(
                f"{loop[slot]} = phi i32 [{begun[slot]}, %{before}], [{ends[slot]}, %{name}.cast]"
                for slot in slots
            )
        )
        begun = loop
    return _KERNEL.format(
        symbol=SYMBOL,
        grid=GRID,
        src_nbytes=src.itemsize,
        out_nbytes=dst.itemsize,
        src_mask=width * src.itemsize - 1,
        out_mask=width * dst.itemsize - 1,
        width=width,
        clear=CLEAR if slots else "",
        vector_sums=sums[0],
        vector_cast=casts[0],
        single_sums=sums[1],
        single_cast=casts[1],
        tell=tell(v, begun) if slots else "",
    )


def _cast_elements(
    v: Vector, src: DType, dst: DType, at: str, numel: int, clamp: bool
) -> dict[int, str]:
    """Load elements from index ``at`` on, cast and store them; returns counts by tally slot."""
    (source, load), (target, store) = (
        (_pointer(v, dtype, base, at), _elements(dtype, numel))
        for dtype, base in ((src, "%src"), (dst, "%out"))
    )
    x = v.emit(f"load {load}, ptr addrspace(1) {source}, align {numel * src.itemsize}")
    y = "poison"
    counts: dict[int, str] = {}
    for index in range(numel):
        one = v.emit(f"extractelement {load} {x}, i32 {index}") if numel > 1 else x
        cared, masks = careful(v, src, dst, one, clamp=clamp)
        insert = f"insertelement {store} {y}, i{dst.bits} {cared}, i32 {index}"
        y = v.emit(insert) if numel > 1 else cared
        for slot, mask in enumerate(masks):
            if mask:
                found = v.convert("zext", "i1", mask, "i32")
                counts[slot] = v.op("add", "i32", counts[slot], found) if slot in counts else found
    v.lines.append(f"store {store} {y}, ptr addrspace(1) {target}, align {numel * dst.itemsize}")
    return counts


def _elements(dtype: DType, numel: int) -> str:
    return f"<{numel} x i{dtype.bits}>" if numel > 1 else f"i{dtype.bits}"


def _pointer(v: Vector, dtype: DType, base: str, at: str) -> str:
    offset = v.op("mul", "i64", at, dtype.itemsize)
    return v.emit(f"inttoptr i64 {v.op('add', 'i64', base, offset)} to ptr addrspace(1)")


def tell(v: Vector, sums: dict[int, str]) -> str:
    """Instructions that add each thread's sums, an i32 by slot, to the tally."""
    start = len(v.lines)
    totals = dict(sums)
    for slot in totals:
        for distance in (16, 8, 4, 2, 1):
            there = v.emit(
                "call i32 @llvm.nvvm.shfl.sync.down.i32"
                f"(i32 -1, i32 {totals[slot]}, i32 {distance}, i32 31)"
            )
            totals[slot] = v.op("add", "i32", totals[slot], there)
    shuffles = "\n  ".join(v.lines[start:])
    start = len(v.lines)
    for slot, total in totals.items():
        place = v.emit(f"getelementptr i32, ptr addrspace(3) @sums, i32 {slot}")
        v.emit(f"atomicrmw add ptr addrspace(3) {place}, i32 {total} monotonic")
    adds = "\n  ".join(v.lines[start:])
    return _TELL.format(counts=COUNTS, shuffles=shuffles, adds=adds)
